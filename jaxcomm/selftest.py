"""Small programs that show whether jaxcomm works with an MPI library: python -m jaxcomm selftest.

Each check runs on all ranks and compares with what NumPy says.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import jaxcomm

__all__ = ["CHECKS"]


def _equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=1e-5)


def reductions(comm: Any) -> None:
    """Allreduce of several dtypes and ops, eager and compiled."""
    for dtype in (jnp.float32, jnp.int32, jnp.bfloat16, jnp.int8):
        x = (jnp.arange(4) % 3 + comm.rank % 2).astype(dtype)
        every = np.stack([np.arange(4) % 3 + rank % 2 for rank in range(comm.size)])
        for wrap in (jax.jit, jaxcomm.jit, lambda f: f):
            _equal(wrap(lambda x: comm.Allreduce(x, op=MPI.MAX))(x), every.max(axis=0))
        if comm.size <= 32:  # sums of more do not fit the small ones
            _equal(comm.Allreduce(x), every.sum(axis=0))


def collectives(comm: Any) -> None:
    """Bcast, Gather, Scatter, Allgather, Alltoall."""
    x = jnp.arange(3.0) + 10 * comm.rank
    every = np.arange(3.0) + 10 * np.arange(comm.size)[:, None]
    led = jnp.arange(comm.size) + 100.0 * comm.rank

    def program(x: Any, led: Any) -> list[Any]:
        return [comm.Bcast(x, comm.size - 1), comm.Allgather(x), comm.Alltoall(led), comm.Scatter(comm.Gather(x), x)]

    bcast, allgather, alltoall, scattered = jax.jit(program)(x, led)
    _equal(bcast, every[-1])
    _equal(allgather, every)
    _equal(alltoall, comm.rank + 100.0 * np.arange(comm.size))
    _equal(scattered, every[comm.rank])


def ring(comm: Any) -> None:
    """messages round a ring, blocking and not, short and long."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in (1, 1000, 1_000_000):
        x = jnp.full(length, comm.rank, jnp.float32)
        _equal(jax.jit(lambda x: comm.Sendrecv(x, right, source=left))(x)[-1], left)

        def in_two_halves(x: Any) -> Any:
            receiving, sending = comm.Irecv(x, left, 1), comm.Isend(x, right, 1)
            return jaxcomm.Request.Waitall([sending, receiving])[1]

        _equal(jax.jit(in_two_halves)(x)[-1], left)


def order(comm: Any) -> None:
    """many operations in a compiled loop, in order."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def step(i: Any, x: Any) -> Any:
        return comm.Allreduce(comm.Sendrecv(x, right, source=left)) / comm.size + i

    y = jax.jit(lambda x: jax.lax.fori_loop(0, 200, step, x))(jnp.float32(comm.rank))
    _equal(y, (comm.size - 1) / 2 + sum(range(200)))


def derivatives(comm: Any) -> None:
    """the gradient of a program that communicates."""

    def loss(x: Any) -> Any:
        return jnp.sum(comm.Allreduce(x**2)) * (comm.rank + 1)

    x = jnp.arange(3.0) + comm.rank
    _equal(jax.jit(jax.grad(loss))(x), 2 * np.asarray(x) * comm.size * (comm.size + 1) / 2)


def host(comm: Any) -> None:
    """mpi4py's own calls beside them."""
    x, y = np.full(2, float(comm.rank)), np.zeros(2)
    comm.Allreduce(x, y)
    _equal(y, sum(range(comm.size)))
    _equal(comm.allgather(comm.rank), range(comm.size))


def failures(comm: Any) -> None:
    """an error of MPI's becomes an exception."""
    if comm.size == 1:
        return
    told = ""
    try:
        jax.jit(lambda x, to: comm.Send(x, to))(jnp.ones(1), jnp.int32(comm.size))
        jax.effects_barrier()
    except Exception as error:
        told = str(error)
    if "dest" not in told:
        raise RuntimeError(f"a message to a rank that is not there: expected an error that says so, got {told!r}")
    _equal(comm.Allreduce(1.0), comm.size)


CHECKS = (reductions, collectives, ring, order, derivatives, host, failures)
"""Functions of a communicator; the first line of each docstring says what it is about."""
