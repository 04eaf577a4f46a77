"""What happened behind a test's back: compilations, and messages that arrived."""

from __future__ import annotations

from typing import Any, Self

import jax
import numpy as np
from mpi4py import MPI

_compilations = 0


def _count(event: str, duration: float, **_: Any) -> None:
    global _compilations
    _compilations += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


class Compilations:
    """As a context: how many programs this rank compiled inside it is `count`."""

    def __enter__(self) -> Self:
        self.count = -_compilations
        return self

    def __exit__(self, *error: object) -> None:
        self.count += _compilations


END = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)


def messages(comm: Any) -> list[tuple[int, Any]]:
    """(tag, value) of each float64 message that the left-hand neighbour sent to this rank, in their order. Collective.

    Messages between two ranks do not overtake each other (MPI 4.1, 3.5): a last one to the neighbour marks the end. Any
    that are left are few and small enough for MPI to keep them.
    """
    comm.send(None, (comm.rank + 1) % comm.size, END)  # waits for pending operations first
    found, status = [], MPI.Status()
    while True:
        comm.Probe((comm.rank - 1) % comm.size, MPI.ANY_TAG, status)
        if status.tag == END:
            comm.recv(None, (comm.rank - 1) % comm.size, END)
            return found
        value = np.empty(status.Get_count(MPI.DOUBLE))
        MPI.Intracomm.Recv(comm, value, status.source, status.tag)
        found.append((status.tag, value.tolist() if value.size > 1 else value.item()))
