"""Pytrees: a call on a tree is the call on each of its leaves, by few messages. CASES 31."""

import functools
from dataclasses import dataclass

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import left, right
from counting import Compilations
from mpi4py import MPI

from jaxcomm import MEAN, Request, create_token
from jaxcomm._primitives import trees

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = right(WORLD), left(WORLD)
both = pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
calculus = pytest.mark.calculus


@jax.tree_util.register_dataclass
@dataclass
class State:
    """Leaves of several dtypes and sizes, one of them too large to be packed."""

    field: jax.Array
    parts: dict
    count: jax.Array
    rest: tuple


def state(rank, lead=()):
    rng = np.random.default_rng(rank)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(*lead, *shape)))  # noqa: E731
    whole = lambda *shape: jnp.asarray(rng.integers(0, 9, (*lead, *shape)))  # noqa: E731
    large = trees.BUCKET // 8 + 1
    return State(
        draw(2, 3),
        {"a": draw(), "large": draw(large), "b": draw(4).astype(np.float32), "none": None},
        whole(3),
        (whole(2) > 4, whole(5).astype(np.int8), draw(0, 2), draw(3) + 1j * draw(3)),
    )


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert isinstance(x, jax.Array)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


def line(x):
    below, above = RANK - 1 if RANK else MPI.PROC_NULL, RANK + 1 if RANK < SIZE - 1 else MPI.PROC_NULL
    return WORLD.Sendrecv(x, above, 4, source=below)


CALLS = {
    "Allreduce": lambda x: WORLD.Allreduce(x),
    "Allreduce-LOR": lambda x: WORLD.Allreduce(jax.tree.map(lambda a: a.real.astype(int), x), op=MPI.LOR),
    "Allgather": lambda x: WORLD.Allgather(x),
    "Bcast": lambda x: WORLD.Bcast(x, SIZE - 1),
    "Gather": lambda x: WORLD.Gather(x, root=SIZE - 1),
    "Reduce": lambda x: WORLD.Reduce(x, op=MPI.SUM, root=SIZE // 2),
    "Scan": lambda x: WORLD.Scan(x),
    "Exscan": lambda x: WORLD.Exscan(x),
    "Sendrecv": lambda x: WORLD.Sendrecv(x, RIGHT, 3, source=LEFT),
    "Sendrecv-any": lambda x: WORLD.Sendrecv(x, (RANK + 1) % SIZE, 5, recvtag=5),
    "Sendrecv-line": line,
    "Sendrecv_replace": lambda x: WORLD.Sendrecv_replace(x, RIGHT, 6, LEFT, 6),
    "Iallreduce": lambda x: WORLD.Iallreduce(x).Wait(),
    "Isendrecv": lambda x: WORLD.Isendrecv(x, RIGHT, 7, source=LEFT).Wait(),
}
LED = {
    "Alltoall": lambda x: WORLD.Alltoall(x),
    "Reduce_scatter_block": lambda x: WORLD.Reduce_scatter_block(x),
}


@pytest.mark.parametrize("name", [*CALLS, *LED])
@both
def test_as_leaf_by_leaf(name, jit):
    x = state(RANK, (SIZE,) if name in LED else ())
    call = (CALLS | LED)[name]
    expected = jax.tree.map(call, x)
    for _ in range(2):
        same(jit(call)(x), expected)


@both
def test_scatter_and_receive(jit):
    everything = state(0, (SIZE,))
    mine = jax.tree.map(lambda a: a[RANK], everything)
    same(jit(lambda x, y: WORLD.Scatter(x if RANK == 0 else None, y))(everything, mine), mine)

    def messages(x):
        if SIZE == 1:
            return x
        sending = WORLD.Isend(x, RIGHT, 8)
        y, status = WORLD.Recv(x, MPI.ANY_SOURCE, 8, return_status=True)
        sending.Wait()
        return y, status.source

    if SIZE > 1:
        y, source = jit(messages)(state(RANK))
        same(y, state(LEFT))
        assert source == LEFT


@both
def test_ragged_trees_share_their_counts(jit):
    counts = [r + 1 for r in range(SIZE)]
    rows = lambda r: {"x": jnp.arange(2.0 * counts[r]).reshape(-1, 2) + r, "n": jnp.full(counts[r], r)}  # noqa: E731
    y = jit(lambda x: WORLD.Allgatherv(x, counts=counts))(rows(RANK))
    same(y, jax.tree.map(lambda *parts: jnp.concatenate(parts), *map(rows, range(SIZE))))


def anything(rank, lead=()):
    """Leaves of what MPI has no datatypes for, beside those that travel in the same form."""
    rng = np.random.default_rng(rank)
    small = lambda dtype: jnp.asarray(rng.integers(0, 2, (*lead, 3)).astype(jnp.dtype(dtype)))  # noqa: E731
    names = [
        "bfloat16",
        "uint16",
        "float16",
        "float8_e4m3fn",
        "uint8",
        "int2",
        "int4",
        "int8",
        "float4_e2m1fn",
        "uint32",
    ]
    leaves = {name: small(name) for name in names} | {f"another {name}": small(name) for name in names}
    leaves["keys"] = jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, (*lead, 2, 2), np.uint32)))
    return leaves | {
        "nothing": np.zeros((*lead, 2), jax.dtypes.float0),
        "int32": small(int),
    }


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        # By NumPy, which compiles nothing.
        x, y = (jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in (x, y))
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("halves", [lambda comm: comm, harness.InTwoHalves], ids=["blocking", "in two halves"])
@both
def test_of_all_dtypes(jit, halves):
    """Of MPI's, bits of others' and of no data: a leaf with what is alone there too."""
    comm = halves(WORLD)
    everything = [anything(r) for r in range(SIZE)]
    keys = lambda x: jnp.issubdtype(x[0].dtype, jax.dtypes.prng_key)  # noqa: E731
    stack = lambda trees: jax.tree.map(lambda *x: (jnp if keys(x) else np).stack(x), *trees)  # noqa: E731
    # What has no data is no argument of jit's.
    call = lambda f: jit(lambda: f(everything[RANK]))()  # noqa: E731
    equal(call(lambda x: comm.Bcast(x, SIZE - 1)), everything[-1])
    equal(call(comm.Allgather), stack(everything))
    led = [anything(r, (SIZE,)) for r in range(SIZE)]
    equal(
        jit(lambda: comm.Alltoall(led[RANK]))(),
        stack([jax.tree.map(lambda x: x[RANK], tree) for tree in led]),
    )
    if SIZE > 1:
        equal(call(lambda x: comm.Sendrecv(x, RIGHT, 3, source=LEFT)), everything[LEFT])
    reducible = [{n: x for n, x in tree.items() if n != "keys"} for tree in everything]
    one_by_one = jax.tree.map(lambda x: WORLD.Allreduce(x, op=MPI.MAX), reducible[RANK])
    equal(jit(lambda: comm.Allreduce(reducible[RANK], op=MPI.MAX))(), one_by_one)


def test_persistent():
    """A request that is started again and again, also with another tree."""
    x = {"a": jnp.arange(3.0) + RANK, "b": jnp.full(2, RANK)}
    request = WORLD.Allreduce_init(x, op=MPI.SUM)
    for factor in (1, 1, 2):
        request.Start(*([jax.tree.map(lambda a: 2 * a, x)] if factor == 2 else []))
        equal(request.Wait(), jax.tree.map(lambda a: factor * WORLD.Allreduce(a), x))  # noqa: B023


@pytest.mark.calculus
@both
def test_gradients_of_what_is_shared(jit):
    """The adjoint of a sum that all ranks share communicates nothing, and that of Pvary is such a sum."""
    x = {"a": jnp.arange(3.0) + RANK, "b": (jnp.full(2, RANK + 1.0),)}
    total = lambda f: lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(x)))  # noqa: E731
    along = lambda f: lambda x: jax.jvp(jax.grad(total(f)), (x,), (x,))[1]  # noqa: E731
    for call in (
        lambda x: WORLD.Allreduce(x, replicated=True),
        lambda x: WORLD.Allreduce(x, op=MEAN, replicated=True, reproducible=True),
        WORLD.Pvary,
    ):
        one_by_one = functools.partial(jax.tree.map, call)
        equal(jit(jax.grad(total(call)))(x), jit(jax.grad(total(one_by_one)))(x))
        equal(jit(along(call))(x), jit(along(one_by_one))(x))
    for operand in (x, x["a"]):
        with pytest.raises(
            NotImplementedError, match="Iallreduce with replicated=True has no derivative in reverse mode"
        ):
            jit(jax.grad(total(lambda x: WORLD.Iallreduce(x, replicated=True).Wait())))(operand)


def test_waitany_of_trees_in_jit():
    @jax.jit
    def program(x):
        requests = [WORLD.Iallreduce({"a": x, "b": [i * x]}) for i in range(2)]
        first, one = Request.Waitany(requests)
        second, other = Request.Waitany(requests)
        return jnp.stack([first, second]), one, other

    indices, one, other = program(jnp.arange(3.0))
    assert sorted(indices.tolist()) == [0, 1]
    for index, found in zip(indices, (one, other), strict=True):
        equal(found, {"a": SIZE * jnp.arange(3.0), "b": [SIZE * float(index) * jnp.arange(3.0)]})


def test_nothing_at_all():
    """No leaves, or none with data: tokens and statuses are returned as ever."""
    nothing = {"a": np.zeros(2, jax.dtypes.float0)}
    for tree in ({}, (), [], nothing, {"a": ()}):
        result, token = WORLD.Allreduce(tree, token=create_token())
        equal(result, tree)
        assert token.array.shape == (0,)
        equal(WORLD.Iallreduce(tree).Wait(), tree)
        y, status = WORLD.Sendrecv_replace(tree, RANK, 0, RANK, 0, return_status=True)
        equal(y, tree)
        assert status.count == 0


def test_the_leaf_that_is_no_array_is_named():
    with pytest.raises(
        TypeError, match=r"Allreduce: sendbuf must be .*, got dict whose leaf \['b'\]\[0\] is str, no array"
    ):
        WORLD.Allreduce({"a": jnp.ones(2), "b": ["w"]})


@both
def test_places_without_an_array(jit):
    for x in ([jnp.ones(2), None, (None, jnp.arange(3))], {"a": None, "b": jnp.ones(1)}):
        equal(jit(WORLD.Allreduce)(x), jax.tree.map(lambda a: SIZE * a, x))
        equal(jit(lambda x: WORLD.Allreduce(x, op=first))(x), x)
        equal(jit(lambda x: WORLD.Iallreduce(x).Wait())(x), jax.tree.map(lambda a: SIZE * a, x))


def first(a, b):
    return a


def test_one_custom_call_and_no_concatenation():
    x = state(RANK)
    text = jax.jit(lambda x: WORLD.Allreduce(x)).lower(x).compile().as_text()
    assert text.count('custom_call_target="jaxcomm_tree_allreduce"') == 1
    assert "concatenate" not in text


def test_eager_calls_compile_nothing():
    x = state(RANK)
    WORLD.Allreduce(x)
    with Compilations() as made:
        for _ in range(3):
            WORLD.Allreduce(x)
    assert made.count == 0


def test_what_is_no_tree():
    np.testing.assert_array_equal(WORLD.Allreduce([1.0, 2.0]), [SIZE, 2.0 * SIZE])
    assert WORLD.Allreduce({}) == {}
    same(WORLD.Allreduce({"alone": jnp.arange(3.0)}), {"alone": SIZE * jnp.arange(3.0)})
    _, token = WORLD.Allreduce({"a": jnp.ones(2), "b": jnp.ones(3)}, token=create_token())
    assert token.array.shape == (0,)


@both
def test_errors(jit):
    x = {"a": jnp.ones(2), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="sendbuf and recvbuf must be trees of one structure"):
        jit(lambda x: WORLD.Sendrecv(x, RIGHT, source=LEFT, recvbuf=[x["a"], x["b"]]))(x)
    with pytest.raises(TypeError, match="op=MAX is not defined for dtype complex128"):
        jit(lambda x: WORLD.Allreduce(x | {"c": x["a"] * 1j}, op=MPI.MAX))(x)
    with pytest.raises(ValueError, match="leading axis"):
        jit(lambda x: WORLD.Alltoall({"a": jnp.ones((SIZE + 1, 2)), "b": jnp.ones(SIZE)}))(x)
    harness.CONTROL.Barrier()


@pytest.mark.skipif(SIZE < 2, reason="two ranks exchange messages")
def test_a_tree_that_fails_leaves_no_message_behind():
    """The first message is longer than its leaf, the second is in order."""
    sending = WORLD.Isend({"a": jnp.ones(5), "b": jnp.arange(3)}, RIGHT, 9)
    with pytest.raises(MPI.Exception, match="recv on"):
        WORLD.Recv({"a": jnp.ones(4), "b": jnp.arange(3)}, LEFT, 9)
    sending.Wait()
    sending = WORLD.Isend(jnp.arange(3) + RANK, RIGHT, 9)
    np.testing.assert_array_equal(WORLD.Recv(jnp.arange(3), LEFT, 9), np.arange(3) + LEFT)
    sending.Wait()


# Derivatives: of the inexact leaves, those of leaf by leaf


def loss(f, x):
    ys = [y for y in jax.tree.leaves(f(x)) if jnp.issubdtype(y.dtype, jnp.inexact)]
    return sum(jnp.sum(jnp.sin(y) * (RANK + 1 + i)) for i, y in enumerate(ys))


@calculus
@pytest.mark.parametrize("name", [name for name in CALLS if "LOR" not in name] + ["PROD"])
def test_derivatives(name):
    call = CALLS.get(name, lambda x: WORLD.Allreduce(x, op=MPI.PROD))
    rng = np.random.default_rng(RANK)
    moving = {
        "a": jnp.asarray(rng.normal(size=(2, 2))),
        "b": [jnp.asarray(rng.normal()), jnp.asarray(rng.normal(size=3))],
    }
    fixed = {"n": jnp.arange(3) + RANK}
    v = jax.tree.map(jnp.cos, moving)
    batch = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), moving)
    whole = lambda m: loss(call, m | fixed)  # noqa: E731
    leafwise = lambda m: loss(lambda x: jax.tree.map(call, x), m | fixed)  # noqa: E731

    @jax.jit
    def derivatives(x, batch):
        def of(g):
            return (
                jax.grad(g)(x),
                jax.jvp(g, (x,), (v,))[1],
                jax.jvp(jax.grad(g), (x,), (v,))[1] if "any" not in name else 0.0,
                jax.vmap(jax.grad(g))(batch),
                jax.grad(lambda b: jnp.sum(jax.vmap(g)(b)))(batch),
            )

        return of(whole), of(leafwise)

    together, apart = derivatives(moving, batch)
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-12, atol=1e-13), together, apart)
