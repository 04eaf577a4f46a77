"""Reductions with a JAX function as op: Allreduce(x, op=jnp.logaddexp), on arrays and pytrees.

They are made of messages, so what they do under jit, vmap and differentiation follows from what Sendrecv and the function
do. The messages are on a communicator of their own, which no receive of the program listens to.

The function must be associative; it need not be commutative: the result is x_0 op x_1 op ... op x_{P-1}, in the order of
the ranks, for some way to put the parentheses, which depends on nothing but P. With L = log2 P rounded down and C rounded
up, a rank takes part in at most so many rounds, each with at most one message of x's size each way:

    Allreduce             recursive doubling: L; where P is no power of two, L + 2
    Reduce                binomial tree: C, and one more where the root is not rank 0
    Scan                  recursive doubling: C
    Exscan                a shift and a Scan of P - 1 ranks: at most C + 1
    Reduce_scatter(_block) recursive halving: L, with P - 1 blocks in all; where P is no power of two, 2 more with P + 1

A round has one message for each dtype of a pytree, whatever the number of its leaves.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm import ragged
from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, dtypes, lowering, reductions
from jaxcomm.arguments import alike, operand, root_rank, token_link
from jaxcomm.jitted import jit
from jaxcomm.token import EFFECT, Token, join, link, own_array

__all__ = ["Fold", "among", "described", "like_operand", "planned", "tree_text"]

Combine = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Way:
    """What is fixed when a fold is traced: hashable, the key of what was compiled.

    Attributes:
      name: the method.
      comm: the communicator.
      op: the function.
      root: of Reduce.
      counts: of Reduce_scatter, rows for each rank.
      site: where it is called, if somebody wants to know; what is staged in a program of the user's knows it by itself.
    """

    name: str
    comm: Any
    op: Combine
    root: int = 0
    counts: tuple[int, ...] = ()
    site: int = 0


class Fold(NamedTuple):
    """A call whose arguments are checked, as operations.Planned.

    Attributes:
      way: what is static. operand: a pytree. identity: Exscan's, like the operand. token: the user's.
    """

    way: Way
    operand: Any
    identity: Any
    token: Token | None

    @property
    def says(self) -> str:
        """The call in words, equal on all ranks."""
        way = self.way
        op = repr(way.op) if isinstance(way.op, Extremum) else getattr(way.op, "__name__", type(way.op).__name__)
        more = f", root {way.root}" * (way.name == "Reduce") + f", recvcounts {list(way.counts)}" * bool(way.counts)
        return f"{way.name} of {_described(self.operand)}, op {op}{more}"

    def run(self) -> Any:
        """Run or stage the call. Returns what the method returns."""
        self.way.comm._check_alive()
        links = () if self.token is None else (token_link(self.token, self.way.name).array,)
        leaves = jax.tree_util.tree_leaves((self.operand, self.identity, links))
        staged = _compat.tracing() or any(isinstance(leaf, _compat.Tracer) for leaf in [*leaves, *_held(self.way.op)])
        with lowering.called_at(self.way.site):
            result, end = (_program if staged else _compiled)(self.way, self.operand, self.identity, links)
        return result if self.token is None else (result, Token(end))


def planned(
    comm: Any,
    name: str,
    sendbuf: Any,
    recvbuf: Any,
    op: Any,
    token: Token | None,
    *,
    root: Any = 0,
    recvcounts: Any = None,
    identity: Any = None,
) -> Fold | None:
    """The plan of a reduction whose op is a function; None if it is not."""
    function, recvbuf = _function(name, recvbuf, op)
    if function is None:
        chosen = recvbuf if isinstance(recvbuf, MPI.Op) else op
        if identity is not None and getattr(chosen, "is_predefined", True):
            raise TypeError(f"{name}: identity is for a function as op; that of {chosen!r} is known")
        return None
    if isinstance(function, Extremum):
        if identity is not None:
            raise TypeError(f"{name}: identity is for a function as op; that of {function!r} is known")
        sendbuf = function.pair(name, sendbuf)
        identity = function.identity(sendbuf) if name == "Exscan" else None
    if comm.two_groups:
        raise TypeError(f"{name}: a function as op is not for an intercommunicator; merge the groups (Merge)")
    # A None is no leaf, but a tree that is None has none.
    x = jax.tree_util.tree_map(partial(_operand, f"{name}: sendbuf"), sendbuf, is_leaf=lambda _: sendbuf is None)
    at, counts = root_rank(root, comm.size, f"{name}: root"), _counts(comm, name, x, recvcounts)
    site = lowering.caller() if bridge.observed() else 0
    way = Way(name, comm, function, at, counts, site)
    _check_template(way, x, recvbuf)
    return Fold(way, x, like_operand(x, identity) if name == "Exscan" else None, token)


def _function(name: str, recvbuf: Any, op: Any) -> tuple[Combine | None, Any]:
    """The function, which may stand in the receive buffer's place as an MPI.Op may; and the receive buffer."""
    recvbuf, op = (_EXTREMA.get(MPI._handleof(x), x) if isinstance(x, MPI.Op) else x for x in (recvbuf, op))
    if _is_function(recvbuf):
        if op != MPI.SUM:
            raise TypeError(f"{name}: two operations were given, one in recvbuf's place and one as op; leave one out")
        op, recvbuf = recvbuf, None
    if not _is_function(op):
        return None, recvbuf
    if isinstance(recvbuf, MPI.Op):
        raise TypeError(f"{name}: two operations were given, one in recvbuf's place and one as op; leave one out")
    try:
        hash(op)
    except TypeError:
        raise TypeError(f"{name}: op must be hashable, since what is compiled for it is kept; got {op!r}") from None
    return op, recvbuf


def _is_function(x: Any) -> bool:
    return callable(x) and not isinstance(x, (MPI.Op, jax.Array, np.ndarray, np.ufunc))


def among(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op among a method's arguments is reduced by messages: then the operand is one tree, not many arrays."""
    return any(
        _is_function(x) or (isinstance(x, MPI.Op) and MPI._handleof(x) in _EXTREMA)
        for x in (*args[1:], *kwargs.values())
    )


def _operand(where: str, x: Any) -> Any:
    """A leaf, which is no longer weakly typed: messages are not."""
    x = own_array(operand(x, where))
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x  # keys have none


def _counts(comm: Any, name: str, x: Any, recvcounts: Any) -> tuple[int, ...]:
    if name == "Reduce_scatter":
        leaves = jax.tree_util.tree_leaves(x)
        each = {ragged.parts_sent(leaf, recvcounts, comm.size, f"{name}: sendbuf", "recvcounts")[1] for leaf in leaves}
        if len(each) > 1:
            raise ValueError(f"{name}: the leaves of sendbuf have different numbers of rows")
        return each.pop() if each else ()
    for leaf in jax.tree_util.tree_leaves(x) if name == "Reduce_scatter_block" else []:
        comm._led(leaf, f"{name}: sendbuf")
    return ()


def _check_template(way: Way, x: Any, recvbuf: Any) -> None:
    """As arguments.alike, of a pytree."""
    if recvbuf is None or (way.name == "Reduce" and way.comm.rank != way.root):
        return
    leaves, tree = jax.tree_util.tree_flatten(x)
    templates, other = jax.tree_util.tree_flatten(recvbuf)
    if tree != other:
        raise ValueError(f"{way.name}: recvbuf is a template of the result, a pytree {tree}, got {other}")
    for leaf, template in zip(leaves, templates, strict=True):
        alike(leaf, template, _result_shape(way, leaf.shape), way.name)


def _result_shape(way: Way, shape: tuple[int, ...]) -> tuple[int, ...]:
    if way.name == "Reduce_scatter_block":
        return shape[1:]
    return (way.counts[way.comm.rank], *shape[1:]) if way.name == "Reduce_scatter" else shape


def like_operand(x: Any, identity: Any) -> Any:
    """Exscan's result on the first rank, like x."""
    if identity is None:
        raise TypeError(
            "Exscan: with a function or an operation of your own as op, the first rank's result must be given, since there "
            "is nothing to reduce: pass identity=, the value that leaves others as they are (0 for a sum, 1 for a product)"
        )
    leaves, tree = jax.tree_util.tree_flatten(x)
    given, other = jax.tree_util.tree_flatten(identity)
    if tree != other:
        raise TypeError(f"Exscan: identity must be a pytree like sendbuf, {tree}, got {other}")
    made = [_like(leaf, value) for leaf, value in zip(leaves, given, strict=True)]
    return jax.tree_util.tree_unflatten(tree, made)


def _like(x: Any, value: Any) -> Any:
    value = jnp.asarray(value, x.dtype)
    try:
        return jnp.broadcast_to(value, x.shape)
    except ValueError:
        raise ValueError(
            f"Exscan: identity must have sendbuf's shape {x.shape} or one that becomes it, got {value.shape}"
        ) from None


# MAXLOC and MINLOC are such functions. MPI has its own, but for pairs of few types, with indices of 32 bits, lying side by
# side in memory; this has all dtypes, derivatives and batching.


@dataclass(frozen=True)
class Extremum:
    """The function of MPI.MAXLOC and MPI.MINLOC: of two (values, indices) the larger, or smaller.

    Of equal ones it is the one with the lower index. A NaN is more extreme than all numbers, as for jnp.argmax.
    """

    largest: bool

    def __repr__(self) -> str:
        return "MAXLOC" if self.largest else "MINLOC"

    def __call__(self, a: Any, b: Any) -> Any:
        (x, i), (y, j) = a, b
        takes_b = (y > x) if self.largest else (y < x)
        equal = x == y
        if jnp.issubdtype(x.dtype, jnp.inexact):
            takes_b |= jnp.isnan(y) & ~jnp.isnan(x)
            equal |= jnp.isnan(y) & jnp.isnan(x)
        takes_b |= equal & (j < i)
        return jnp.where(takes_b, y, x), jnp.where(takes_b, j, i)

    def pair(self, name: str, x: Any) -> Any:
        """The operand, of which an index may be one for all values, such as the rank."""
        if not isinstance(x, (tuple, list)) or len(x) != 2:
            raise TypeError(f"{name}: op={self} takes a pair (values, indices), got {type(x).__name__}")
        values, indices = (
            _operand(f"{name}: {what}", part) for what, part in zip(("values", "indices"), x, strict=True)
        )
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise TypeError(f"{name}: the indices of op={self} must be integers, got {indices.dtype.name}")
        if jnp.issubdtype(values.dtype, jnp.complexfloating):
            raise TypeError(f"{name}: op={self} is not defined for dtype {values.dtype.name}, which has no order")
        if indices.shape not in ((), values.shape):
            raise ValueError(f"{name}: indices must have the values' shape {values.shape}, or (), got {indices.shape}")
        return values, jnp.broadcast_to(indices, values.shape)

    def identity(self, pair: Any) -> Any:
        """What leaves every pair as it is."""
        kind = reductions.BY_NAME["MAX" if self.largest else "MIN"]
        values, indices = (np.dtype(jnp.asarray(part).dtype) for part in pair)
        return reductions.identity(kind, values), np.iinfo(indices).max


_EXTREMA = {MPI._handleof(MPI.MAXLOC): Extremum(True), MPI._handleof(MPI.MINLOC): Extremum(False)}


def described(planned: Fold) -> str:
    """What is said of the op in errors."""
    return f"op={planned.way.op}" if isinstance(planned.way.op, Extremum) else "a function as op"


# The program


def _held(op: Any, depth: int = 8) -> Iterator[Any]:
    """What a function holds: variables of the functions around it, arguments of a partial, the object of a method."""
    if depth == 0:
        return
    cells = [cell.cell_contents for cell in getattr(op, "__closure__", None) or () if cell != _EMPTY]
    of_partial = [getattr(op, "func", None), getattr(op, "args", None), getattr(op, "keywords", None)]
    more = [getattr(op, "__self__", None), getattr(op, "__wrapped__", None), getattr(op, "__defaults__", None)]
    for leaf in jax.tree_util.tree_leaves([cells, of_partial, more]):
        yield leaf
        if callable(leaf):
            yield from _held(leaf, depth - 1)


_EMPTY = types.CellType()


def _program(way: Way, x: Any, identity: Any, links: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the result, and a link for the token."""
    # Ranks apply the function different numbers of times, and one takes the identity. So if a leaf of these, or what the
    # function holds, is differentiated or has a batch, all leaves are and have: else a message would not be what the other
    # end expects.
    one = jax.tree_util.tree_map(lambda leaf: jax.ShapeDtypeStruct(_result_shape(way, leaf.shape), leaf.dtype), x)
    held = [value for value in jax.make_jaxpr(way.op)(one, one).consts if isinstance(value, _compat.Tracer)]
    bond = link(*links, *held, *jax.tree_util.tree_leaves((x, identity)))
    x = jax.tree_util.tree_map(lambda leaf: join(leaf, bond), x)
    y = _ALGORITHMS[way.name](way, x, identity)
    return y, link(*links, *jax.tree_util.tree_leaves(y))


_compiled = jit(_program, static_argnums=0)


def _checked(way: Way, x: Any) -> Combine:
    """The function, if it makes of two values like x another one, without communication of its own."""
    jaxpr, made = jax.make_jaxpr(way.op, return_shape=True)(x, x)
    if EFFECT in jaxpr.effects:
        raise TypeError(f"{way.name}: op must not communicate: ranks apply it different numbers of times")
    takes, returns = _described(x), _described(made)
    if takes != returns:
        raise TypeError(f"{way.name}: op must return what it takes, {takes}, got {returns}")
    return way.op


def _described(x: Any) -> str:
    return tree_text(jax.tree_util.tree_map(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", x))


def tree_text(tree: Any) -> str:
    """A pytree of words, without their quotation marks."""
    return str(tree).replace("'", "")


def _exchange(comm: Any, x: Any, dest: int | None, source: int | None, like: Any = None) -> Any:
    """Send a pytree to one rank and return one from another that is like `like`, by default x; from nobody, that itself."""
    leaves, _ = jax.tree_util.tree_flatten(x)
    templates, tree = jax.tree_util.tree_flatten(x if like is None else like)
    there, came = _of_each_dtype(leaves), list(templates)
    for dtype, at in _of_each_dtype(templates).items():
        message, template = _packed(leaves, there[dtype]), _packed(templates, at)
        y = _message(comm, message, template, dest, source)
        for i, part in zip(at, _unpacked(y, [templates[i] for i in at]), strict=True):
            came[i] = part
    return jax.tree_util.tree_unflatten(tree, came)


def _message(comm: Any, x: Any, template: Any, dest: int | None, source: int | None) -> Any:
    """Also where there is nobody at either end: by the links between its messages a fold is differentiated on all ranks."""
    to, from_ = (MPI.PROC_NULL if rank is None else rank for rank in (dest, source))
    return comm._call("sendrecv", x, template, dest=to, source=from_, fold=True)[0]


def _of_each_dtype(leaves: Sequence[Any]) -> dict[Any, list[int]]:
    """Which leaves have a dtype."""
    found: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault(leaf.dtype, []).append(i)
    return found


def _packed(leaves: Sequence[Any], at: Sequence[int]) -> Any:
    return leaves[at[0]] if len(at) == 1 else dtypes.concatenate([leaves[i].reshape(-1) for i in at])


def _unpacked(y: Any, like: Sequence[Any]) -> list[Any]:
    if len(like) == 1:
        return [y]
    ends = np.cumsum([leaf.size for leaf in like])[:-1]
    return [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(y, ends), like, strict=True)]


def _steps(size: int) -> Iterator[int]:
    """1, 2, 4 ... below size."""
    step = 1
    while step < size:
        yield step
        step *= 2


class _Members:
    """A power of two of members that ranks are made into: the first ranks in pairs, of which the even one is the member."""

    def __init__(self, comm: Any):
        self.comm, self.rank = comm, comm.rank
        self.size = 1 << (comm.size.bit_length() - 1)
        self.pairs = comm.size - self.size
        self.paired = self.rank < 2 * self.pairs
        self.active = not (self.paired and self.rank % 2)
        self.number = self.of(self.rank)

    def of(self, rank: int) -> int:
        """The member that a rank belongs to."""
        return rank // 2 if rank < 2 * self.pairs else rank - self.pairs

    def partner(self, step: int) -> int:
        """The rank of the member to meet in a round. A member and its partner have met their step - 1 neighbours."""
        other = self.number ^ step
        return 2 * other if other < self.pairs else other + self.pairs

    def gather(self, x: Any, op: Combine) -> Any:
        """The operand of the member."""
        if not self.paired:
            return x
        if not self.active:
            return _exchange(self.comm, x, self.rank - 1, None)
        return op(x, _exchange(self.comm, x, None, self.rank + 1))

    def in_order(self, op: Combine, step: int, mine: Any, other: Any) -> Any:
        return op(other, mine) if self.number & step else op(mine, other)


def _allreduce(way: Way, x: Any, identity: Any) -> Any:
    """Recursive doubling; after the round of step s every member has the fold of the 2 s neighbours around it."""
    members, op = _Members(way.comm), _checked(way, x)
    y = members.gather(x, op)
    for step in _steps(members.size) if members.active else ():
        partner = members.partner(step)
        y = members.in_order(op, step, y, _exchange(way.comm, y, partner, partner))
    if members.paired:
        to, from_ = (members.rank + 1, None) if members.active else (None, members.rank - 1)
        y = _exchange(way.comm, y, to, from_)
    return y


def _reduce(way: Way, x: Any, identity: Any) -> Any:
    """Binomial tree to rank 0, since ranks in order are neighbours there; then to the root."""
    (rank, size), op, y = (way.comm.rank, way.comm.size), _checked(way, x), x
    for step in _steps(size):
        if rank % (2 * step) == step:
            y = _exchange(way.comm, y, rank - step, None)
            break
        if rank + step < size:
            y = op(y, _exchange(way.comm, y, None, rank + step))
    if way.root and rank in (0, way.root):
        to, from_ = (None, 0) if rank else (way.root, None)
        y = _exchange(way.comm, y, to, from_)
    if rank == way.root:
        return y
    end = jax.tree_util.tree_leaves(y)
    return jax.tree_util.tree_map(lambda leaf: join(leaf, *end), x)


def _scan(way: Way, x: Any, identity: Any) -> Any:
    return _scan_from(way, 0, x, _checked(way, x))


def _scan_from(way: Way, first: int, x: Any, op: Combine) -> Any:
    """Recursive doubling; after the round of step s a rank has the fold of the 2 s ranks up to itself."""
    rank, size, y = way.comm.rank - first, way.comm.size - first, x
    for step in _steps(size) if rank >= 0 else ():
        to = rank + step + first if rank + step < size else None
        came = _exchange(way.comm, y, to, rank - step + first if rank >= step else None)
        y = op(came, y) if rank >= step else came
    return y


def _exscan(way: Way, x: Any, identity: Any) -> Any:
    rank, size = way.comm.rank, way.comm.size
    to, from_ = (rank + 1 if rank + 1 < size else None), (rank - 1 if rank else None)
    before = _exchange(way.comm, x, to, from_, x if rank else identity)
    return _scan_from(way, 1, before, _checked(way, x))


class _Blocks(NamedTuple):
    """How the parts for the ranks are kept.

    Attributes:
      take: those at some places. each: op on all of them. only: the one that there is.
    """

    take: Callable[[Any, list[int]], Any]
    each: Callable[[Combine], Combine]
    only: Callable[[Any], Any]


_STACKED = _Blocks(
    lambda x, at: jax.tree_util.tree_map(lambda leaf: leaf[np.array(at)], x),
    jax.vmap,
    lambda x: jax.tree_util.tree_map(lambda leaf: leaf[0], x),
)
_LISTED = _Blocks(
    lambda x, at: [x[i] for i in at],
    lambda op: lambda a, b: [op(left, right) for left, right in zip(a, b, strict=True)],
    lambda x: x[0],
)


def _reduce_scatter_block(way: Way, x: Any, identity: Any) -> Any:
    block = jax.tree_util.tree_map(lambda leaf: leaf[0], x)
    return _halved(way.comm, x, _checked(way, block), _STACKED)


def _reduce_scatter(way: Way, x: Any, identity: Any) -> Any:
    ends = np.cumsum(way.counts)
    parts = [
        jax.tree_util.tree_map(lambda leaf, a=end - n, b=end: leaf[a:b], x)
        for end, n in zip(ends.tolist(), way.counts, strict=True)
    ]
    for part in dict(zip(way.counts, parts, strict=True)).values():
        _checked(way, part)
    return _halved(way.comm, parts, way.op, _LISTED)


def _halved(comm: Any, x: Any, op: Combine, blocks: _Blocks) -> Any:
    """Recursive halving, from neighbours on, so that what is combined lies side by side.

    In the round of step s a member keeps the blocks of the members whose number has the same bit s as its own.
    """
    members, each, kept = _Members(comm), blocks.each(op), list(range(comm.size))
    x = members.gather(x, each)
    for step in _steps(members.size) if members.active else ():
        stays = [(members.of(block) ^ members.number) & step == 0 for block in kept]
        mine = blocks.take(x, [i for i, stay in enumerate(stays) if stay])
        theirs = blocks.take(x, [i for i, stay in enumerate(stays) if not stay])
        partner = members.partner(step)
        x = members.in_order(each, step, mine, _exchange(comm, theirs, partner, partner, mine))
        kept = [block for block, stay in zip(kept, stays, strict=True) if stay]
    if not members.paired:
        return blocks.only(x)
    if members.active:
        own, other = blocks.take(x, [0]), blocks.take(x, [1])
        return blocks.only(_exchange(comm, other, comm.rank + 1, None, own))
    return blocks.only(_exchange(comm, blocks.take(x, [comm.rank]), None, comm.rank - 1))


_ALGORITHMS = {
    "Allreduce": _allreduce,
    "Reduce": _reduce,
    "Scan": _scan,
    "Exscan": _exscan,
    "Reduce_scatter_block": _reduce_scatter_block,
    "Reduce_scatter": _reduce_scatter,
}
