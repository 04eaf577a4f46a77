"""What everyone writes by hand of trees that ranks share: the norm of all of them, and whether they are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm._primitives import _compat, dtypes
from jaxcomm.arguments import operand

__all__ = ["Closeness", "Difference", "allclose_across", "global_norm"]


def global_norm(comm: Any, tree: Any, *, replicated: bool = False) -> Any:
    """Return the Euclidean norm of all elements of the trees of all ranks, on each rank.

    One Allreduce of a scalar, inside or outside jit, with derivatives (at a norm of zero they are zero). Sums of squares are
    formed in the dtype of the result, and added up over ranks in float64 where JAX has it (jax_enable_x64).

    Args:
      comm: a JaxComm.
      tree: a pytree of arrays, each rank's own part of something larger. Structures and dtypes may differ.
      replicated: as Allreduce: the norm is one value that all ranks share.
    Returns: a real scalar: float64 if this rank has leaves of float64 or complex128, else float32.
    Raises: TypeError: a leaf that is no array, or of keys.
    """
    given = [operand(leaf, "global_norm: tree") for leaf in jax.tree_util.tree_leaves(tree)]
    leaves = [jnp.asarray(leaf) for leaf in given if not dtypes.is_nothing(leaf)]
    for leaf in leaves:
        if dtypes.is_key(leaf.dtype):
            raise TypeError(f"global_norm: tree must be of numbers, got {leaf.dtype}")
    double = any(leaf.dtype in (np.float64, np.complex128) for leaf in leaves)
    dtype = np.dtype(np.float64 if double else np.float32)
    mine = sum((_square(leaf, dtype) for leaf in leaves), jnp.zeros((), dtype))
    # Other ranks may have other leaves: they all send the same dtype.
    widest = jax.dtypes.canonicalize_dtype(np.float64)
    return _root(comm.Allreduce(mine.astype(widest), op=MPI.SUM, replicated=replicated).astype(dtype))


def _square(x: Any, dtype: Any) -> Any:
    parts = (jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else (x,)
    return sum(jnp.sum(jnp.square(part.astype(dtype))) for part in parts)


def _root(x: Any) -> Any:
    """The square root, whose derivative at zero is zero; what jnp.where does not choose must not be infinite either."""
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), x)


@dataclass(frozen=True)
class Difference:
    """A leaf of one rank that is not that of rank 0.

    Attributes:
      rank: which. leaf: its path in the tree, as jax.tree_util.keystr has it. text: how it differs.
    """

    rank: int
    leaf: str
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}, leaf {self.leaf or '(the whole tree)'}: {self.text}"


@dataclass(frozen=True)
class Closeness:
    """What allclose_across finds: true if nothing differs. As text it says what does.

    Attributes:
      differences: by rank and leaf; the same on every rank.
    """

    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return not self.differences

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that differ from rank 0."""
        return tuple(sorted({d.rank for d in self.differences}))

    @property
    def leaves(self) -> tuple[str, ...]:
        """The paths of the leaves that differ."""
        return tuple(dict.fromkeys(d.leaf for d in self.differences))

    def __repr__(self) -> str:
        if self:
            return "all ranks have the same as rank 0"
        return "\n".join(["not all ranks have the same as rank 0", *map(str, self.differences)])


def allclose_across(comm: Any, tree: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = True) -> Closeness:
    """Tell whether all ranks have the same tree as rank 0, and if not, which ranks and leaves differ, and by how much.

    `assert allclose_across(comm, params)` fails on all ranks with a text that says so. Collective, on the host: not inside
    jit. Every leaf of rank 0 is broadcast, one after the other.

    Args:
      comm: a JaxComm or an mpi4py communicator.
      tree: a pytree of arrays and scalars. Where structures, shapes or dtypes differ, that is the difference.
      rtol, atol: as numpy.allclose; 0 and 0 for equality.
      equal_nan: whether NaN is the same as NaN.
    Returns: Closeness, equal on every rank.
    Raises: TypeError: called on traced values, or a leaf that is no array.
    """
    named = jax.tree_util.tree_leaves_with_path(tree)
    if any(isinstance(leaf, _compat.Tracer) for _, leaf in named):
        raise TypeError(
            "allclose_across compares values on the host, which a traced program does not have yet; call it outside jit"
        )
    mine = {jax.tree_util.keystr(path): _on_host(leaf) for path, leaf in named}
    kinds = comm.allgather({path: f"{x.dtype.name}{list(x.shape)}" for path, x in mine.items()})
    found = list(_other_kinds(comm.rank, kinds))
    for path in kinds[0]:
        if all(kind.get(path) == kinds[0][path] for kind in kinds):
            text = _other_values(mine[path], _from_first(comm, mine[path]), rtol, atol, equal_nan)
            found += [Difference(comm.rank, path, text)] if text else []
    return Closeness(tuple(d for each in comm.allgather(found) for d in each))


def _on_host(leaf: Any) -> np.ndarray:
    leaf = operand(leaf, "allclose_across: tree")
    if dtypes.is_nothing(leaf):
        return np.zeros((*leaf.shape, 0), np.bool_)
    if dtypes.is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf, order="C")


def _other_kinds(rank: int, kinds: list[dict[str, str]]) -> Iterator[Difference]:
    first, mine = kinds[0], kinds[rank]
    for path in dict.fromkeys([*first, *mine]):
        if first.get(path) != mine.get(path):
            here, there = (kind.get(path, "no such leaf") for kind in (mine, first))
            yield Difference(rank, path, f"{here} instead of {there}")


def _from_first(comm: Any, like: np.ndarray) -> np.ndarray:
    """Rank 0's array, as bytes, since MPI does not know all dtypes."""
    data = np.array(like.reshape(-1)).view(np.uint8)
    comm.Bcast(data, root=0)
    return data.view(like.dtype).reshape(like.shape)


def _other_values(x: np.ndarray, first: np.ndarray, rtol: float, atol: float, equal_nan: bool) -> str:
    """How x differs from rank 0's array; empty if it does not."""
    a, b = (_wide(each) for each in (x, first))
    same = np.isclose(a, b, rtol, atol, equal_nan) if a.dtype.kind in "fc" else a == b
    wrong = np.flatnonzero(~same)
    if not len(wrong):
        return ""
    with np.errstate(all="ignore"):
        gap = np.abs(np.subtract(a.reshape(-1)[wrong], b.reshape(-1)[wrong], dtype=np.result_type(a, np.float64)))
    # A NaN on one side only is the worst.
    worst = wrong[np.argmax(np.where(np.isnan(gap), np.inf, gap))]
    at = tuple(map(int, np.unravel_index(worst, x.shape)))
    return f"{len(wrong)} of {x.size} elements, most at {at}: {x[at]} instead of {first[at]}"


def _wide(x: np.ndarray) -> np.ndarray:
    """In a dtype that NumPy can compare: not bfloat16 and its like."""
    if x.dtype.kind in "biufc":
        return x
    return x.astype(np.float64 if jnp.issubdtype(x.dtype, jnp.inexact) else np.int64)
