"""The program that docs/timeline.md shows: each rank smooths its part of a ring, and one has more to do than the others.

mpiexec -n 3 python docs/timeline_example.py build/trace
python -m jaxcomm report build/trace
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
from mpi4py import MPI

import jaxcomm

comm = jaxcomm.JaxComm(MPI.COMM_WORLD)
LEFT, RIGHT = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
WORK = 40 if comm.rank == 1 else 10


@jax.jit
def step(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take the neighbours' edges, smooth, work, and say how large the whole is."""
    before = comm.Sendrecv(x[-1], RIGHT, source=LEFT)
    after = comm.Sendrecv(x[0], LEFT, source=RIGHT)
    x = (jnp.concatenate([before[None], x[:-1]]) + jnp.concatenate([x[1:], after[None]])) / 2
    x = jax.lax.fori_loop(0, WORK, lambda _, x: jnp.tanh(x @ matrix), x)
    return x, comm.Allreduce(jnp.vdot(x, x))


def main(folder: str) -> None:
    """Run eight steps, those of the trace after all is compiled."""
    x, matrix = jnp.ones((300, 300)), jnp.eye(300)
    x, size = jax.block_until_ready(step(x, matrix))
    with jaxcomm.trace(folder):
        for _ in range(8):
            x, size = step(x, matrix)
        comm.Bcast(size)


if __name__ == "__main__":
    main(sys.argv[1])
