"""A JAX function as op: the fold in the order of the ranks, against NumPy's, with derivatives, vmap and one compilation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import calculus
import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import Compilations
from mpi4py import MPI

import jaxcomm
from jaxcomm import functional

Tree = Any


@dataclass(frozen=True, eq=False)
class Function:
    """
    Attributes:
      op: the JAX function. reference: the same in NumPy. shapes: of the leaves of an operand.
      identity: of op, like an operand.
      make: leaves -> operand. dtypes: of the leaves.
    """

    name: str
    op: Callable[[Tree, Tree], Tree]
    reference: Callable[[Tree, Tree], Tree]
    shapes: tuple[tuple[int, ...], ...]
    identity: Tree
    make: Callable[..., Tree] = lambda x: x
    dtypes: tuple[str, ...] = ("float64",)

    def __str__(self) -> str:
        return self.name

    def operand(self, seed: list[int], lead: tuple[int, ...] = ()) -> Tree:
        rng = np.random.default_rng(seed)
        return self.make(
            *(
                rng.normal(size=lead + shape).astype(d) if d[0] == "f" else rng.integers(-9, 9, lead + shape).astype(d)
                for shape, d in zip(self.shapes, self.dtypes, strict=True)
            )
        )


def _affine(f: Tree, g: Tree) -> Tree:
    """First f, then g; x -> a x + b."""
    return {"a": g["a"] @ f["a"], "b": g["a"] @ f["b"] + g["b"], "n": f["n"] + g["n"]}


FUNCTIONS = [
    Function("logaddexp", jnp.logaddexp, np.logaddexp, ((3,),), -5.0),
    Function("matmul", lambda a, b: a @ b, np.matmul, ((2, 2),), np.eye(2)),
    Function(
        "affine",
        _affine,
        _affine,
        ((2, 2), (2,), ()),
        {"a": np.eye(2), "b": np.zeros(2), "n": 0},
        lambda a, b, n: {"a": a, "b": b, "n": n},
        ("float64", "float64", "int32"),
    ),
]
LOGADDEXP, MATMUL, AFFINE = FUNCTIONS


@dataclass(frozen=True, eq=False)
class Method:
    """How a method reduces: what it gives to a rank, from all ranks' operands; `lead` are axes before the function's."""

    name: str
    call: Callable[[Any, Tree, Function], Tree]
    reference: Callable[[list[Tree], int, Function], Tree]
    lead: Callable[[int], tuple[int, ...]] = lambda size: ()

    def __str__(self) -> str:
        return self.name


def fold(xs: list[Tree], function: Function) -> Tree:
    return functools.reduce(function.reference, xs)


def part(x: Tree, at: Any) -> Tree:
    return jax.tree_util.tree_map(lambda leaf: leaf[at], x)


def last(comm_or_xs: Any) -> int:
    return (comm_or_xs.size if hasattr(comm_or_xs, "size") else len(comm_or_xs)) - 1


def parts(xs: list[Tree], rank: int) -> list[Tree]:
    ends = np.cumsum([0, *cases.counts(len(xs))])
    return [part(x, slice(ends[rank], ends[rank + 1])) for x in xs]


def by_rows(op: Callable[[Tree, Tree], Tree]) -> Callable[[Tree, Tree], Tree]:
    """Of Reduce_scatter's parts the function gets any number of rows."""
    return jax.vmap(op)


METHODS = [
    Method("Allreduce", lambda c, x, f: c.Allreduce(x, op=f.op), lambda xs, rank, f: fold(xs, f)),
    Method(
        "Reduce",
        lambda c, x, f: c.Reduce(x, op=f.op, root=last(c)),
        lambda xs, rank, f: fold(xs, f) if rank == last(xs) else xs[rank],
    ),
    Method("Reduce-first", lambda c, x, f: c.Reduce(x, f.op), lambda xs, rank, f: xs[rank] if rank else fold(xs, f)),
    Method("Scan", lambda c, x, f: c.Scan(x, op=f.op), lambda xs, rank, f: fold(xs[: rank + 1], f)),
    Method(
        "Exscan",
        lambda c, x, f: c.Exscan(x, op=f.op, identity=f.identity),
        lambda xs, rank, f: (
            fold(xs[:rank], f)
            if rank
            else jax.tree_util.tree_map(
                lambda leaf, i: np.broadcast_to(i, leaf.shape).astype(leaf.dtype), xs[0], f.identity
            )
        ),
    ),
    Method(
        "Reduce_scatter_block",
        lambda c, x, f: c.Reduce_scatter_block(x, op=f.op),
        lambda xs, rank, f: fold([part(x, rank) for x in xs], f),
        lambda size: (size,),
    ),
    Method(
        "Reduce_scatter",
        lambda c, x, f: c.Reduce_scatter(x, recvcounts=cases.counts(c.size), op=_rowwise(f)),
        lambda xs, rank, f: functools.reduce(_rowwise_reference(f), parts(xs, rank)),
        lambda size: (sum(cases.counts(size)),),
    ),
]
methods = pytest.mark.parametrize("method", METHODS, ids=str)


@functools.cache
def _rowwise(function: Function) -> Callable[[Tree, Tree], Tree]:
    return by_rows(function.op)


def _rowwise_reference(function: Function) -> Callable[[Tree, Tree], Tree]:
    def reference(a: Tree, b: Tree) -> Tree:
        n = len(jax.tree_util.tree_leaves(a)[0])
        if not n:
            return a
        rows = [function.reference(part(a, i), part(b, i)) for i in range(n)]
        return jax.tree_util.tree_map(lambda *each: np.stack(each), *rows)

    return reference


def operands(comm: Any, method: Method, function: Function, seed: int = 0) -> list[Tree]:
    members = MPI.Group.Translate_ranks(comm.group, None, MPI.COMM_WORLD.group)
    return [function.operand([seed, member], method.lead(comm.size)) for member in members]


def check(found: Tree, expected: Tree, rtol: float = 1e-12) -> None:
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    for y, z in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        assert isinstance(y, jax.Array)
        assert (y.shape, y.dtype) == (z.shape, z.dtype)
        np.testing.assert_allclose(y, z, rtol, 1e-12)


@pytest.fixture
def world():
    """Where the kind of communicator makes no difference: each costs a compilation."""
    return harness.communicator("world")


@pytest.fixture(params=["world", "reversed"])
def comm(request):
    """Of the kinds there are, those whose order of ranks differs."""
    return harness.communicator(request.param)


@methods
def test_the_fold_is_in_the_order_of_the_ranks(comm, method):
    xs = operands(comm, method, MATMUL)
    expected = method.reference(xs, comm.rank, MATMUL)
    check(method.call(comm, xs[comm.rank], MATMUL), expected)
    check(jax.jit(lambda x: method.call(comm, x, MATMUL))(xs[comm.rank]), expected)


@pytest.mark.parametrize("function", [LOGADDEXP, AFFINE], ids=str)
@methods
def test_other_functions(world, method, function):
    comm = world
    xs = operands(comm, method, function)
    expected = method.reference(xs, comm.rank, function)
    check(jaxcomm.jit(lambda x: method.call(comm, x, function))(xs[comm.rank]), expected)


@methods
def test_later_calls_compile_nothing(world, method):
    comm, function = world, MATMUL
    x, y = (jax.tree_util.tree_map(jnp.asarray, operands(comm, method, function, seed)[comm.rank]) for seed in (0, 1))
    first = method.call(comm, x, function)
    with Compilations() as compilations:
        method.call(comm, y, function)
        again = method.call(comm, x, function)
    assert compilations.count == 0
    jax.tree_util.tree_map(np.testing.assert_array_equal, first, again)


def inexact(tree: Tree) -> list[Any]:
    return [leaf for leaf in jax.tree_util.tree_leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def weighted(tree: Tree, seed: int) -> Any:
    """A scalar that depends on every inexact element."""
    rng = np.random.default_rng([seed, MPI.COMM_WORLD.rank])
    return sum(jnp.sum(jnp.sin(leaf) * rng.normal(size=leaf.shape)) for leaf in inexact(tree))


@pytest.mark.calculus
@methods
def test_gradients(world, method):
    comm, function = world, AFFINE
    x = operands(comm, method, function)[comm.rank]
    leaves, tree = jax.tree_util.tree_flatten(x)
    moving = [i for i, leaf in enumerate(leaves) if leaf.dtype.kind == "f"]

    def f(*given):
        full = list(leaves)
        for i, leaf in zip(moving, given, strict=True):
            full[i] = leaf
        return weighted(method.call(comm, jax.tree_util.tree_unflatten(tree, full), function), 3)

    calculus.check_gradient(comm, f, *(leaves[i] for i in moving), rtol=1e-6)


@pytest.mark.calculus
@methods
def test_forward_and_reverse_mode_agree(world, method):
    """The dot product test, and for some again for the derivative of the gradient."""
    comm = world
    x, v = (operands(comm, method, MATMUL, seed)[comm.rank] for seed in (0, 1))
    f = lambda x: method.call(comm, x, MATMUL)  # noqa: E731
    y, dy = jax.jit(lambda x, v: jax.jvp(f, (x,), (v,)))(x, v)
    w = calculus.random_like(comm, [a.shape for a in comm.allgather(np.asarray(y))], 5)[comm.rank]
    (back,) = jax.jit(lambda x, w: jax.vjp(f, x)[1](w))(x, w)
    forward, reverse = calculus.sums(comm, [(w, dy), (back, v)])
    np.testing.assert_allclose(forward, reverse, rtol=1e-10, atol=1e-10)
    if method.name not in ("Allreduce", "Exscan"):
        return
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(f(x)) * w))
    along, u = jax.jit(lambda x, v: jax.jvp(gradient, (x,), (v,))[1])(x, v), np.cos(v)
    other = jax.jit(lambda x, u: jax.jvp(gradient, (x,), (u,))[1])(x, u)
    forward, reverse = calculus.sums(comm, [(along, u), (other, v)])  # second derivatives are symmetric
    np.testing.assert_allclose(forward, reverse, rtol=1e-9, atol=1e-9)


@pytest.mark.calculus
@methods
def test_vmap_is_a_loop(world, method):
    comm, function = world, AFFINE
    batch = [operands(comm, method, function, seed)[comm.rank] for seed in range(3)]
    f = lambda x: method.call(comm, x, function)  # noqa: E731
    loop = [f(x) for x in batch]
    stacked = jax.tree_util.tree_map(lambda *xs: np.stack(xs, -1), *batch)
    mapped = jax.jit(jax.vmap(f, -1, -1))(stacked)
    check(mapped, jax.tree_util.tree_map(lambda *ys: np.stack(ys, -1), *loop))


@pytest.mark.calculus
@methods
def test_what_the_function_holds_is_differentiated(world, method):
    """It comes in on the ranks that apply the function, which not all do, nor as often."""
    x = operands(world, method, LOGADDEXP)[world.rank]

    def f(w):
        held = dataclasses.replace(LOGADDEXP, op=lambda a, b: a + b + w, identity=0.0)
        return weighted(method.call(world, x, held), 6)

    w = np.cos(float(world.rank))
    (found,) = calculus.check_gradient(world, f, w)
    np.testing.assert_allclose(jax.grad(f)(w), found, rtol=1e-12)


@pytest.mark.calculus
@methods
def test_one_leaf_is_differentiated(world, method):
    """The others are constants, until they are combined with it."""
    x = operands(world, method, AFFINE)[world.rank]
    f = lambda a: weighted(method.call(world, x | {"a": a}, AFFINE), 7)  # noqa: E731
    (found,) = calculus.check_gradient(world, f, x["a"])
    np.testing.assert_allclose(jax.grad(f)(x["a"]), found, rtol=1e-10, atol=1e-12)


@pytest.mark.calculus
def test_an_identity_is_differentiated(world):
    """One rank takes it, and all are told."""
    f = lambda w: jnp.sum(world.Exscan(jnp.ones(3), op=jnp.add, identity=w))  # noqa: E731
    for wrap in (jax.jit, lambda f: f):
        assert wrap(jax.grad(f))(1.5) == (3 if world.rank == 0 else 0)
        assert jax.jvp(wrap(f), (1.5,), (1.0,))[1] == (3 if world.rank == 0 else 0)
    mapped = jax.vmap(lambda w: world.Exscan(jnp.ones(3), op=jnp.add, identity=w))(jnp.arange(2.0))
    np.testing.assert_array_equal(
        mapped, [[rank0, rank0, rank0] for rank0 in ([0, 1] if world.rank == 0 else 2 * [world.rank])]
    )


@pytest.fixture(autouse=True)
def nothing_is_left(world):
    """A message that nobody has received would be taken for one of the next fold."""
    yield
    x = np.arange(11.0) + world.rank
    np.testing.assert_array_equal(world.Allreduce(x, op=jnp.maximum), np.arange(11.0) + world.size - 1)


@pytest.mark.calculus
def test_what_a_partial_holds(world):
    f = lambda w: jnp.sum(world.Allreduce(jnp.ones(2), op=functools.partial(_plus, c=[w])))  # noqa: E731
    np.testing.assert_allclose(world.allreduce(jax.grad(f)(1.5)), 2 * world.size * (world.size - 1))


@pytest.mark.calculus
def test_what_the_function_holds_has_a_batch(world):
    mapped = jax.vmap(lambda w: world.Scan(jnp.ones(2), op=lambda a, b: a + b + w))(jnp.arange(3.0))
    expected = (world.rank + 1) + np.arange(3.0)[:, None] * world.rank
    np.testing.assert_allclose(mapped, np.broadcast_to(expected, (3, 2)))


def _plus(a, b, c):
    return a + b + c[0]


def test_all_ranks_get_the_same_bits(comm):
    """Also where the operand is computed in the program, and a rank might round it together with what comes."""
    add = lambda a, b: a + b  # noqa: E731
    u, v = np.random.default_rng(comm.rank).normal(size=(2, 1000)).astype(np.float32)
    y = np.asarray(jax.jit(lambda u, v: comm.Allreduce(u * v, op=add))(u, v))
    assert all(other == y.tobytes() for other in comm.allgather(y.tobytes()))


def test_no_message_of_a_fold_meets_the_programs_own(comm):
    """Not even one that takes anything from anybody."""

    @jax.jit
    def f(x):
        request = comm.Irecv(x, MPI.ANY_SOURCE, MPI.ANY_TAG)
        y = comm.Allreduce(x, op=jnp.logaddexp)
        comm.Isend(2 * x, (comm.rank + 1) % comm.size, 0).Wait()
        return y, request.Wait()

    xs = [np.arange(2.0) + 10 * rank for rank in range(comm.size)]
    y, z = f(xs[comm.rank])
    np.testing.assert_allclose(y, functools.reduce(np.logaddexp, xs))
    np.testing.assert_array_equal(z, 2 * xs[comm.rank - 1])


@pytest.mark.calculus
def test_in_a_loop_under_checkpoint_with_a_token(comm):
    xs = operands(comm, METHODS[0], MATMUL)

    def f(x):
        def step(carry, _):
            y, token = carry
            z, token = comm.Allreduce(y, op=MATMUL.op, token=token)
            return (0.5 * (y + z), token), None

        return jax.lax.scan(jax.checkpoint(step), (x, jaxcomm.create_token(x)), None, 2)[0][0]

    expected = [0.5 * x for x in xs]
    once = functools.reduce(np.matmul, xs)
    halves = [0.5 * (x + once) for x in xs]
    twice = functools.reduce(np.matmul, halves)
    expected = 0.5 * (halves[comm.rank] + twice)
    check(jax.jit(f)(xs[comm.rank]), expected, 1e-10)
    calculus.check_gradient(comm, lambda x: weighted(f(x), 4), xs[comm.rank], rtol=1e-5)


def test_the_number_of_rounds_is_logarithmic(world):
    comm = world
    x = np.eye(2)
    down, up = comm.size.bit_length() - 1, (comm.size - 1).bit_length()
    rounds = down + 2 * (down != up)
    most = {"Allreduce": rounds, "Reduce": up + 1, "Scan": up, "Exscan": up + 1, "Reduce_scatter_block": rounds}
    for method in METHODS:
        if method.name in most:
            given = np.stack([x] * comm.size) if method.lead(2) else x
            counted = calculus.operations(lambda x, method=method: method.call(comm, x, MATMUL), given)
            assert set(counted) <= {"sendrecv"}
            assert counted["sendrecv"] <= most[method.name]


def test_a_function_may_stand_where_an_op_may(comm):
    x = jnp.arange(3.0) + comm.rank
    by_place = comm.Scan(x, jnp.logaddexp)
    np.testing.assert_array_equal(by_place, comm.Scan(x, op=jnp.logaddexp))
    np.testing.assert_array_equal(by_place, comm.Scan(x, jax.ShapeDtypeStruct((3,), x.dtype), jnp.logaddexp))
    y, token = functional.allreduce(x, jnp.logaddexp, comm=comm)
    np.testing.assert_allclose(y, comm.Allreduce(x, op=jnp.logaddexp), 1e-12)
    assert isinstance(token, jaxcomm.Token)


def test_scalars_and_no_elements(comm):
    y = comm.Allreduce(1.5 + comm.rank, op=jnp.logaddexp)
    np.testing.assert_allclose(y, functools.reduce(np.logaddexp, 1.5 + np.arange(comm.size)))
    assert not y.weak_type
    assert comm.Allreduce(jnp.zeros((0, 2)), op=jnp.logaddexp).shape == (0, 2)
    assert comm.Allreduce({}, op=lambda a, b: a) == {}


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (
            lambda c: c.Allreduce(1.0, op=lambda a, b: a > b),
            TypeError,
            r"op must return what it takes, float64\[\], got bool\[\]",
        ),
        (
            lambda c: c.Scan(np.ones(2), op=lambda a, b: (a, b)),
            TypeError,
            r"op must return what it takes, float64\[2\]",
        ),
        (lambda c: c.Reduce(1.0, op=lambda a, b: c.Allreduce(a) + b), TypeError, "op must not communicate"),
        (lambda c: c.Allreduce(1.0, jnp.add, jnp.add), TypeError, "two operations were given"),
        (lambda c: c.Allreduce(1.0, MPI.MAX, jnp.add), TypeError, "two operations were given"),
        (lambda c: c.Exscan(1.0, op=jnp.add), TypeError, "pass identity="),
        (lambda c: c.Exscan(1.0, identity=0.0), TypeError, "identity is for a function as op"),
        (lambda c: c.Exscan({"a": 1.0}, op=jnp.add, identity=0.0), TypeError, "identity must be a pytree like sendbuf"),
        (lambda c: c.Exscan(np.ones(2), op=jnp.add, identity=np.ones(3)), ValueError, "shapes|identity must have"),
        (lambda c: c.Allreduce(1.0, op=jnp.add, replicated=True), ValueError, "replicated=True is for op=MPI.SUM"),
        (lambda c: c.Allreduce(np.ones(2), jnp.ones(3), jnp.add), ValueError, "recvbuf is a template"),
        (lambda c: c.Allreduce([1.0], 1.0, jnp.add), ValueError, "recvbuf is a template of the result, a pytree"),
        (lambda c: c.Reduce_scatter_block(1.0, op=jnp.add), ValueError, "leading axis"),
        (lambda c: c.Reduce(1.0, op=jnp.add, root=-1), ValueError, "root must be a rank"),
        (lambda c: c.Iallreduce(1.0, op=jnp.add), TypeError, "a function as op has no nonblocking form; use Allreduce"),
        (lambda c: c.Allreduce(1.0, op="SUM"), TypeError, "op must be an MPI.Op"),
        (lambda c: c.Allreduce(None, op=jnp.add), TypeError, "Allreduce: sendbuf"),
    ],
)
def test_what_is_wrong_is_told(comm, call, kind, says):
    with pytest.raises(kind, match=says):
        call(comm)
    with pytest.raises(kind, match=says):
        jax.jit(lambda: call(comm))()


def test_a_freed_communicator_is_told():
    with jaxcomm.JaxComm(MPI.COMM_WORLD) as comm:
        compiled = jax.jit(lambda x: comm.Allreduce(x, op=jnp.logaddexp))
        compiled(1.0)
    with pytest.raises(ValueError, match="was freed"):
        comm.Allreduce(1.0, op=jnp.logaddexp)
    if comm_has_messages():
        with pytest.raises(jax.errors.JaxRuntimeError, match="was freed"):
            jax.block_until_ready(compiled(1.0))


def comm_has_messages() -> bool:
    return MPI.COMM_WORLD.size > 1
