"""Checking mode: what ranks disagree on is told on all of them, and the communicator goes on. CASES 21."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxcomm

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
ODD = RANK == SIZE - 1
X = jnp.arange(4.0)
RING = WORLD.Create_cart([SIZE], periods=[True])
several_ranks = pytest.mark.skipif(SIZE < 2, reason="one rank does not disagree")
PARTS = "what they send each other"
ALL = [4] * SIZE
FEWER = [2 if ODD and rank == 0 else 4 for rank in range(SIZE)]
OWN_FEWER = [2 if ODD and rank == RANK else 4 for rank in range(SIZE)]
MISMATCHES = {
    "operation": ("the operation", lambda x: WORLD.Allgather(x) if ODD else WORLD.Allreduce(x)),
    "dtype": ("dtype", lambda x: WORLD.Bcast(x.astype(jnp.float32) if ODD else x)),
    "count": ("count", lambda x: WORLD.Allreduce(x[:3] if ODD else x)),
    "op": ("op", lambda x: WORLD.Allreduce(x, op=MPI.MAX if ODD else MPI.SUM)),
    "root": ("root", lambda x: WORLD.Bcast(x, root=int(ODD))),
    "several": ("dtype, count, op", lambda x: WORLD.Scan(jnp.arange(3) if ODD else x, op=MPI.MIN if ODD else MPI.SUM)),
    "parts": ("count", lambda x: WORLD.Scatter(jnp.zeros((SIZE, 2)), jnp.zeros(3 if ODD else 2))),
    "order": ("the order", lambda x: WORLD.Allreduce(x, reproducible=ODD)),
    "ragged": ("dtype", lambda x: WORLD.Gatherv(x.astype(int) if ODD else x, counts=[4] * SIZE)),
    "counts of Gatherv": (PARTS, lambda x: WORLD.Gatherv(x[:2] if ODD else x, counts=OWN_FEWER)),
    "counts of Scatterv": (
        PARTS,
        lambda x: WORLD.Scatterv(jnp.zeros(sum(FEWER)), x, counts=FEWER if ODD else None, root=SIZE - 1),
    ),
    "counts of Allgatherv": (PARTS, lambda x: WORLD.Allgatherv(x[:2] if ODD else x, counts=OWN_FEWER)),
    "counts of Alltoallv": (PARTS, lambda x: WORLD.Alltoallv(jnp.zeros(sum(FEWER)), sendcounts=FEWER, recvcounts=ALL)),
    "barrier": ("the operation", lambda x: WORLD.Barrier() if ODD else WORLD.Bcast(x)),
    "neighbours": ("dtype", lambda x: RING.Neighbor_allgather(x.astype(int) if ODD else x)),
    "functions": (
        "the operation",
        lambda x: WORLD.Scan(x, jnp.logaddexp) if ODD else WORLD.Allreduce(x, jnp.logaddexp),
    ),
    "function or op": ("the operation", lambda x: WORLD.Allreduce(x, op=jnp.add if ODD else MPI.SUM)),
    "root of a function": ("the operation", lambda x: WORLD.Reduce((x, RANK), op=MPI.MAXLOC, root=int(ODD))),
    "other functions": ("the operation", lambda x: WORLD.Exscan(x, op=jnp.add if ODD else jnp.multiply, identity=0)),
    "lengths for a function": ("the operation", lambda x: WORLD.Allreduce(x[:3] if ODD else x, op=jnp.add)),
    "MINLOC": ("the operation", lambda x: WORLD.Allreduce((x, RANK), op=MPI.MINLOC if ODD else MPI.MAXLOC)),
    "MEAN": ("the operation", lambda x: WORLD.Allreduce(x, op=jaxcomm.MEAN if ODD else MPI.SUM)),
    "parts of a reduction": (
        "the operation",
        lambda x: WORLD.Reduce_scatter(jnp.ones(4 * SIZE), recvcounts=[4] * SIZE if ODD else [5, *[4] * (SIZE - 2), 3]),
    ),
    "trees": ("the operation", lambda x: WORLD.Bcast({"a": x, "b" if ODD else "c": x[:2]})["a"]),
    "leaves": ("the operation", lambda x: WORLD.Allreduce([x[:2], x] if ODD else [x, x[:2]])),
    "dtypes of parts": (PARTS, lambda x: WORLD.Alltoallw([x.astype(int) if ODD else x] * SIZE, [x] * SIZE)),
    "counts of neighbours": (PARTS, lambda x: RING.Neighbor_allgather(x[:3] if ODD else x)),
    "parts of neighbours": (
        PARTS,
        lambda x: RING.Neighbor_alltoallv(x, sendcounts=[1, 3] if ODD else [2, 2], recvcounts=[2, 2]),
    ),
    "dtypes of neighbours": (PARTS, lambda x: RING.Neighbor_alltoallw([x, x.astype(int) if ODD else x], [x, x])),
    "of neighbours": ("the operation", lambda x: RING.Neighbor_allgather(x) if ODD else RING.Neighbor_alltoall(x[:2])),
}


@pytest.fixture(autouse=True)
def checked():
    with jaxcomm.checking():
        yield


@several_ranks
@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("jit", [jax.jit, jaxcomm.jit, lambda f: f], ids=["jit", "jaxcomm.jit", "eager"])
def test_every_rank_is_told(name, jit):
    differs, call = MISMATCHES[name]

    def program():
        jax.block_until_ready(jit(call)(X))
        jax.effects_barrier()
        jaxcomm.flush()

    with pytest.raises(Exception, match=f"do not do the same; they disagree on {differs}:") as raised:
        program()
    text = str(raised.value)
    for rank in range(SIZE):
        assert f", rank {rank} of {SIZE}" in text
    assert text.count("test_checking.py:") >= SIZE
    np.testing.assert_array_equal(WORLD.Allreduce(X), SIZE * X)


LATER = {
    "op": ("op", lambda c, x: c.Iallreduce(x, op=MPI.MAX if ODD else MPI.SUM)),
    "dtype": ("dtype", lambda c, x: c.Ibcast(x.astype(jnp.int64) if ODD else x)),
    "order": ("the operation", lambda c, x: c.Iallgather(x) if ODD else c.Iallreduce(x)),
}


@several_ranks
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_who_waits_is_told(jit, name):
    """Nonblocking collectives are compared as soon as somebody waits; the communicator cannot be used on."""
    differs, start = LATER[name]
    comm = jaxcomm.JaxComm(WORLD)  # it stays: MPI may not end what is under way
    comm.Barrier()
    with pytest.raises(Exception, match=f"do not do the same; they disagree on {differs}:") as raised:
        jax.block_until_ready(jit(lambda x: start(comm, x).Wait())(X))
    assert all(f", rank {rank} of {SIZE}" in str(raised.value) for rank in range(SIZE))
    jaxcomm.flush()
    y = jit(lambda x: WORLD.Iallreduce(x).Wait() + WORLD.Ibcast(x, SIZE - 1).Wait())(X)
    np.testing.assert_array_equal(y, (SIZE + 1) * X)


def test_what_agrees_is_done():
    rows = [r % 2 + 1 for r in range(SIZE)]

    @jax.jit
    def program(x):
        y = WORLD.Allreduce(x) + WORLD.Bcast(x, SIZE - 1)
        z = WORLD.Allgatherv(jnp.ones(rows[RANK]), counts=rows)
        part = WORLD.Scatter(jnp.ones((SIZE, 2)) if RANK == 0 else None, jnp.zeros(2))
        return y, z, part, WORLD.Reduce({"a": x, "b": x[:1]}, op=MPI.MAX, root=SIZE - 1)

    y, z, part, _ = program(X)
    np.testing.assert_array_equal(y, (SIZE + 1) * X)
    assert z.shape == (sum(rows),)
    np.testing.assert_array_equal(part, 1)
    grad = jax.grad(lambda x: jnp.sum(WORLD.Allreduce(x) ** 2))(X)
    np.testing.assert_allclose(grad, 2 * SIZE * SIZE * X)
    second = jax.jacfwd(jax.grad(lambda x: jnp.sum(WORLD.Allreduce(x, op=jnp.add) ** 2)))
    np.testing.assert_allclose(jax.vmap(second)(jnp.stack([X, X]))[1], 2 * SIZE * SIZE * np.eye(4))


@pytest.mark.parametrize(
    "of_mpi4py",
    [
        lambda: WORLD.Bcast(np.zeros(4)),
        lambda: WORLD.bcast(1),
        lambda: WORLD.Barrier(),
        lambda: WORLD.Dup(),
        lambda: WORLD.Split(0),
        lambda: WORLD.Create_cart([SIZE]),
    ],
)
@several_ranks
def test_methods_of_mpi4pys(of_mpi4py):
    """Of these the operation is known, and where it is."""
    with pytest.raises(RuntimeError, match="they disagree on the operation:") as raised:
        of_mpi4py() if ODD else WORLD.Allreduce(X)
    assert str(raised.value).count("test_checking.py:") >= SIZE
    y = WORLD.Bcast(np.arange(4.0)) if RANK == 0 else WORLD.Bcast(X)
    np.testing.assert_array_equal(X if y is None else y, X)


jits = pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])


@several_ranks
@jits
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.complex128, jnp.bfloat16])
def test_cotangents_that_are_not_replicated(jit, dtype):
    def loss(x):
        y = WORLD.Allreduce(x, replicated=True)
        return jnp.sum(y.real.astype(jnp.float64) * jnp.arange(4) * (2 if ODD else 1))

    with pytest.raises(Exception, match="they disagree on the value of the cotangent:") as raised:
        jax.block_until_ready(jit(jax.grad(loss))(X.astype(dtype)))
    text = str(raised.value)
    assert f"On rank {SIZE - 1} it is not what it is on rank 0" in text
    assert text.count("replicated_cotangent on ") >= SIZE
    jaxcomm.flush()
    np.testing.assert_array_equal(WORLD.Allreduce(X), SIZE * X)


@jits
def test_replicated_cotangents(jit):
    """Not numbers and zeros of either sign are what they are on other ranks."""
    odd_zero = jnp.array([-0.0 if ODD else 0.0, np.nan, 2.0, -1.0])
    for dtype in (jnp.float64, jnp.float32):
        g = jit(jax.grad(lambda x: jnp.sum(WORLD.Allreduce(x, replicated=True) * odd_zero.astype(x.dtype))))(
            X.astype(dtype)
        )
        np.testing.assert_array_equal(g, odd_zero)
    tree = {"a": X, "b": X[:2], "c": jnp.float32(2.0)}
    g = jit(jax.grad(lambda t: sum(jnp.sum(y**2) for y in WORLD.Allreduce(t, replicated=True).values())))(tree)
    jax.tree.map(lambda g, x: np.testing.assert_array_equal(g, 2 * SIZE * x), g, tree)
    f = jaxcomm.shared_value_and_grad(lambda w, x: jnp.sum((w * x - 1) ** 2), WORLD)
    value, g = jit(f)(X, X + RANK)
    np.testing.assert_allclose(g, sum(2 * (X * (X + r) - 1) * (X + r) for r in range(SIZE)))
    assert np.isfinite(value)
    twice = jit(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: WORLD.Allreduce(x, replicated=True)[0] ** 3)(x))))(X)
    assert np.isfinite(twice).all()


@several_ranks
@jits
def test_a_missing_link_is_named(jit):
    """Where the template is a constant, the derivative of a broadcast does not run: the root is alone with it."""

    def loss(x):
        y = WORLD.Bcast(x if RANK == 0 else jnp.zeros(4))
        return jnp.sum(WORLD.Allreduce(y * x))

    with pytest.raises(Exception, match="they disagree on the operation:") as raised:
        jax.block_until_ready(jit(lambda x: WORLD.Allreduce(jax.grad(loss)(x)))(X))
    text = str(raised.value)
    assert "Perhaps a derivative runs on some ranks only. Before, differentiation has passed by\n  bcast on " in text
    assert "whose operands do not depend on what is differentiated" in text
    assert f"bcast on MPI_COMM_WORLD, rank {SIZE - 1}" in text
    jaxcomm.flush()


def test_off_again_after_the_block():
    from jaxcomm._native import bridge

    with jaxcomm.checking(False):
        assert not bridge.checking()
    assert bridge.checking()
