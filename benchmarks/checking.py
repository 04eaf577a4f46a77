"""What checking mode costs: small operations with it on and off. Runs under mpiexec.

    mpiexec -n 2 python benchmarks/checking.py

Prints microseconds an operation takes (median of the slowest rank's samples), and the ratio.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI
from timing import Timed, interleaved

import jaxcomm

COMM = jaxcomm.JaxComm(MPI.COMM_WORLD)
RIGHT, LEFT = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size
X = jnp.arange(8.0)
IN_A_LOOP = 100


def allreduce(x: Any) -> Any:
    return COMM.Allreduce(x) / COMM.size


def sendrecv(x: Any) -> Any:
    return COMM.Sendrecv(x, RIGHT, 0, x, LEFT, 0)


def looped(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.jit(lambda x: jax.lax.fori_loop(0, IN_A_LOOP, lambda _, x: f(x), x))


def timed(f: Callable[[Any], Any], operations: int, on: bool) -> Timed:
    def call() -> None:
        with jaxcomm.checking(on):
            for _ in range(100 // operations):  # so that entering the block does not count
                jax.block_until_ready(f(X))

    return Timed(call, 100)


for name, f, operations in [
    ("Allreduce, eager", allreduce, 1),
    ("Allreduce, jaxcomm.jit", jaxcomm.jit(allreduce), 1),
    ("Allreduce, a loop in jit", looped(allreduce), IN_A_LOOP),
    ("Sendrecv, eager", sendrecv, 1),
    ("Sendrecv, jaxcomm.jit", jaxcomm.jit(sendrecv), 1),
    ("Sendrecv, a loop in jit", looped(sendrecv), IN_A_LOOP),
]:
    times = interleaved({str(on): timed(f, operations, on) for on in (False, True)}, repetitions=9, seconds=0.1)
    if COMM.rank == 0:
        off, on = (1e6 * times[str(on)]["median"] for on in (False, True))
        print(f"{name:26s} off {off:7.2f} us   on {on:7.2f} us   {on / off:5.2f} times", flush=True)
