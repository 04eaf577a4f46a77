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
several_ranks = pytest.mark.skipif(SIZE < 2, reason="one rank does not disagree")
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
    "barrier": ("the operation", lambda x: WORLD.Barrier() if ODD else WORLD.Bcast(x)),
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


def test_off_again_after_the_block():
    from jaxcomm._native import bridge

    with jaxcomm.checking(False):
        assert not bridge.checking()
    assert bridge.checking()
