"""Operations of every kind, many of them: nothing that a process holds may grow."""

from __future__ import annotations

from typing import Any

import harness
import jax
import jax.numpy as jnp
import measured
import numpy as np
from cases import left, right
from jax import lax
from mpi4py import MPI

import jaxcomm

COMM = harness.communicator("world")
HALF = harness.communicator("parity")
RIGHT, LEFT = right(COMM), left(COMM)
LOOP = 20


def exchange(x: Any) -> Any:
    requests = [COMM.Irecv(x, LEFT, 5), COMM.Isend(x, RIGHT, 5), HALF.Iallreduce(x, op=MPI.MAX)]
    return jaxcomm.Request.Waitall(requests)[0]


def body(i: Any, x: Any) -> Any:
    x = COMM.Sendrecv(x, RIGHT, 3, source=LEFT) + COMM.Allreduce(x, op=MPI.MIN) + exchange(x)
    return lax.cond(i % 2 == 0, lambda x: HALF.Bcast(x), lambda x: COMM.Allgather(x)[0], x) % 7


IN_LOOP = 6  # operations of an iteration, a start and its wait being one
compiled = [jit(lambda x: lax.fori_loop(0, LOOP, body, x)) for jit in (jax.jit, jaxcomm.jit)]
differentiated = jaxcomm.jit(jax.grad(lambda x: jnp.sum(COMM.Allreduce(COMM.Sendrecv(x, RIGHT, 4, source=LEFT) ** 2))))
wrong = jax.jit(lambda x, dest: COMM.Send(x, dest))


def eagerly(x: Any) -> int:
    """Calls on concrete arrays, trees, requests that are waited for, tested and dropped, and mpi4py's own."""
    COMM.Allreduce(x)
    COMM.Sendrecv(x, RIGHT, 1, source=LEFT)
    COMM.Bcast(x, COMM.size - 1)
    COMM.Allgather(x)
    HALF.Scan(x)
    COMM.Allreduce({"a": x, "b": [x[:1], x.astype(np.int32)]})
    exchange(x)
    request = COMM.Iallreduce(x)
    while not request.Test()[0]:
        pass
    request.Wait()
    COMM.Isend(x, RIGHT, 2).Free()
    COMM.Recv(x, LEFT, 2, status=MPI.Status())
    COMM.Iprobe(LEFT, 9)
    persistent = COMM.Allreduce_init(x)
    persistent.Start()
    persistent.Wait()
    COMM.Allreduce(np.asarray(x), np.empty(x.shape, x.dtype))
    COMM.allgather(COMM.rank)
    return 16


def failing(x: Any) -> int:
    """A program that fails, and one that goes on."""
    for call in (lambda: COMM.Send(x, COMM.size), lambda: wrong(x, COMM.size), lambda: COMM.Recv(x, 0, -7)):
        try:
            call()
            jaxcomm.flush()
        except (ValueError, RuntimeError, MPI.Exception):
            continue
        raise AssertionError("no error")
    return 3


def step(i: int) -> int:
    x = jnp.arange(8, dtype=np.float32) + i % 5
    done = eagerly(x)
    for program in compiled:
        program(x)
        done += LOOP * IN_LOOP
    if i % 10 == 0:
        differentiated(x)
        done += 4 + failing(x)
    return done


def run(operations: int) -> dict[str, Any]:
    """At least so many operations."""
    a_step = 16 + 2 * LOOP * IN_LOOP
    steps = -(-operations // a_step)
    return measured.growth(step, steps, warm_up=steps // 5)


if __name__ == "__main__":
    measured.main(run)
