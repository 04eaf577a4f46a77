"""Processes that a rank starts, and that are no ranks: importing this refuses to go on where MPI would go wrong.

The other half is native: every operation in a forked process fails (native.hpp).
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["end_forked"]

# By these a process knows itself as a rank: MPICH, Intel MPI; Open MPI.
_RANK_VARIABLES = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def _refuse_child() -> None:
    """Raise ImportError where MPI would take a process that multiprocessing has started for the rank that started it.

    MPICH ends such a process in MPI_Init, which a pool answers with another one, for ever; Open MPI crashes.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None or "mpi4py.MPI" in sys.modules:
        return
    if found := [name for name in _RANK_VARIABLES if name in os.environ]:
        raise ImportError(
            "this process was started by multiprocessing in a rank of an MPI job, and is none itself: MPI cannot start "
            f"here ({', '.join(found)} would make it that rank). Let workers do without jaxcomm and mpi4py: move their "
            "functions to a module that imports neither, and start the work under `if __name__ == '__main__':`; or start "
            "more ranks with mpiexec"
        )


def end_forked() -> NoReturn:
    """End a forked process: mpi4py would call MPI_Finalize next, over the connections of the rank."""
    sys.stdout.flush()
    print(
        "jaxcomm: this process was forked from a rank and has not ended by os._exit(), as it must (multiprocessing does "
        "so): to leave MPI from here would end the job. It ends at once, with exit status 1",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


_refuse_child()
