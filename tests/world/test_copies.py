"""Payloads are not copied: compiled programs and eager calls need no memory for a copy, and loops work in place."""

import tracemalloc

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import left, right
from jax import lax
from mpi4py import MPI

import jaxcomm.jitted

WORLD = harness.communicator("world")
SIZE = WORLD.size
RIGHT, LEFT = right(WORLD), left(WORLD)
BIG = jax.ShapeDtypeStruct((2**26,), jnp.float32)  # 256 MB; nothing is run
SMALL = 2**16

IN_PLACE = {
    "Allreduce": lambda x: WORLD.Allreduce(x),
    "Bcast": lambda x: WORLD.Bcast(x),
    "Scan": lambda x: WORLD.Scan(x),
    "Recv": lambda x: WORLD.Recv(x, LEFT),
}


def memory(f, *args, jit=jax.jit, **options):
    """Bytes that a program needs beside its arguments and results, and those of results without an argument's memory."""
    stats = jit(f, **options).lower(*args).compile().memory_analysis()
    return stats.temp_size_in_bytes, stats.output_size_in_bytes - stats.alias_size_in_bytes


@pytest.mark.parametrize("name", IN_PLACE)
def test_loops_work_in_place(name):
    """The carry of a loop is the buffer that MPI reads and writes."""
    f = IN_PLACE[name]
    loop = lambda x: lax.fori_loop(0, 5, lambda i, x: f(x), x)  # noqa: E731
    temporary, results = memory(loop, BIG)
    assert temporary < SMALL
    assert results <= BIG.size * 4 + SMALL
    temporary, results = memory(loop, BIG, donate_argnums=0)
    assert temporary < SMALL
    assert results < SMALL


@pytest.mark.parametrize("jit", [jax.jit, jaxcomm.jitted._as_jitted_program], ids=["jit", "jaxcomm.jit"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_operands_that_are_given_away_are_overwritten(name, jit):
    temporary, results = memory(IN_PLACE[name], BIG, jit=jit, donate_argnums=0)
    assert temporary < SMALL
    assert results < SMALL


@pytest.mark.parametrize("name", [*IN_PLACE, "Sendrecv", "Allgather", "Alltoall"])
def test_single_operations_need_their_result_only(name):
    f = IN_PLACE.get(name) or {
        "Sendrecv": lambda x: WORLD.Sendrecv(x, RIGHT, source=LEFT),
        "Allgather": lambda x: WORLD.Allgather(x),
        "Alltoall": lambda x: WORLD.Alltoall(x.reshape(SIZE, -1)),
    }.get(name)
    x = jax.ShapeDtypeStruct((SIZE * 2**20,), jnp.float32)
    result = int(np.prod(jax.eval_shape(f, x).shape)) * 4
    temporary, results = memory(f, x)
    assert temporary < SMALL
    assert results <= result + SMALL


@pytest.mark.parametrize("name", ["Recv", "Sendrecv"])
def test_a_template_that_is_the_programs_argument_is_not_copied(name):
    f = IN_PLACE.get(name) or (lambda x: WORLD.Sendrecv(x, RIGHT, source=LEFT))
    text = jax.jit(f).lower(BIG).compile().as_text()
    assert "copy(" not in text


def test_eager_calls_need_their_result_only():
    x = jnp.ones(2**22)
    total = WORLD.Allreduce(x)
    del total
    tracemalloc.start()
    try:
        for f in (WORLD.Allreduce, WORLD.Scan):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            y = f(x)
            assert tracemalloc.get_traced_memory()[1] - before < x.nbytes + 2**20
            assert y.nbytes == x.nbytes
            del y
    finally:
        tracemalloc.stop()


def test_short_and_missing_messages_keep_the_template_without_an_alias():
    """The template is the program's argument, so that the result has memory of its own."""
    x = jnp.arange(6.0) + WORLD.rank
    none = jax.jit(lambda x: WORLD.Recv(x, MPI.PROC_NULL))
    np.testing.assert_array_equal(none(x), x)
    right, left, status = (WORLD.rank + 1) % SIZE, (WORLD.rank - 1) % SIZE, MPI.Status()
    short = jax.jit(lambda x: WORLD.Sendrecv(x[:2], right, 0, x, left, status=status))
    origin = (WORLD.rank - 1) % SIZE
    np.testing.assert_array_equal(short(x), [origin, 1 + origin, *x[2:]])
