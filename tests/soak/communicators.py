"""Communicators made, used and freed, many times: nothing runs out, and what a process holds does not grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import measured
import numpy as np
from mpi4py import MPI

from jaxcomm import JaxComm

WORLD = harness.communicator("world")
X = jnp.arange(3, dtype=np.float32)
MAKE: dict[str, Callable[[], Any]] = {
    "JaxComm": lambda: JaxComm(MPI.COMM_WORLD),
    "Dup": lambda: WORLD.Dup(),
    "Split": lambda: WORLD.Split(WORLD.rank % 2, -WORLD.rank),
    "Create_group": lambda: WORLD.Create_group(WORLD.group, 3),
    "Create_cart": lambda: WORLD.Create_cart([WORLD.size], [True]),
    "Create_dist_graph_adjacent": lambda: WORLD.Create_dist_graph_adjacent([WORLD.rank], [WORLD.rank]),
}
COMPILE = 200  # a program of its own for every so many communicators


def use(comm: Any, compiles: bool) -> None:
    """One that is reversed too, which makes a communicator of its own, and with neighbours."""
    calls = [comm.Allreduce] + [jax.jit(comm.Allreduce)] * compiles
    for call in calls:
        np.testing.assert_array_equal(call(X), comm.size * np.arange(3))
    comm.Sendrecv(X, (comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size)
    if hasattr(comm, "Neighbor_allgather") and comm.Get_topology() != MPI.UNDEFINED:
        comm.Neighbor_allgather(X)
    if compiles:
        jax.grad(lambda x: comm.Scan(x).sum())(X)


def step(i: int) -> int:
    name = list(MAKE)[i % len(MAKE)]
    compiles = i // len(MAKE) % COMPILE == 0
    comm = MAKE[name]()
    use(comm, compiles)
    if i % 2:
        comm.Free()
    else:
        with comm:
            pass
    if compiles:
        jax.clear_caches()
    return 1


def run(communicators: int) -> dict[str, Any]:
    return measured.growth(step, communicators, warm_up=communicators // 5)


if __name__ == "__main__":
    measured.main(run)
