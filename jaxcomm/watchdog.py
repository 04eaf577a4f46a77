"""The watchdog: what ranks do when an operation takes too long, or when a signal asks. See _native/watchdog.hpp."""

from __future__ import annotations

import functools
import os
import socket

from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._runtime import seconds
from jaxcomm.token import flush

__all__ = ["watch"]

ACTIONS = ("wait", "raise", "abort")
_observing = False


def watch(timeout: float, action: str = "wait", directory: str | os.PathLike[str] = ".") -> None:
    """Report what the ranks do when one of them is in an operation for too long.

    Environment variables do the same for a whole program: JAXCOMM_TIMEOUT, JAXCOMM_TIMEOUT_ACTION, JAXCOMM_REPORT.
    Collective over COMM_WORLD, because the ranks are to ask each other. The report goes to stderr and, with the last 64
    operations of each rank, to jaxcomm-report-<rank>.json of the rank that asked.

    Args:
      timeout: seconds that an operation may take; 0 for any time. With a limit, calls outside jit take some
        microseconds longer, because they look for their place in the program.
      action: what follows the report. "wait": the operation goes on waiting; "raise": it raises, on the ranks that are in
        one for so long, which needs copies of all data; "abort": the job ends (MPI_Abort).
      directory: where the JSON file goes; it must exist on every node.
    Raises:
      TypeError, ValueError: for a timeout that is no number or negative, an unknown action, no directory.
    """
    global _observing
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"watch: timeout must be a number of seconds, got {timeout!r}")
    if not 0 <= timeout < float("inf"):
        raise ValueError(f"watch: timeout must be a number of seconds from 0 on, got {timeout!r}")
    if action not in ACTIONS:
        raise ValueError(f"watch: action must be one of {', '.join(ACTIONS)}, got {action!r}")
    if not os.path.isdir(directory):
        raise ValueError(f"watch: directory must exist, got {os.fspath(directory)!r}")
    flush()
    comm = _meeting_place() if timeout > 0 else None
    bridge.observe((timeout > 0) - _observing)
    _observing = timeout > 0
    _start(float(timeout), action, os.path.abspath(directory), comm)


@functools.cache
def _meeting_place() -> int | None:
    """The handle of a duplicate of COMM_WORLD, if several threads may use MPI at once."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return None
    duplicate = MPI.COMM_WORLD.Split(0, MPI.COMM_WORLD.rank)
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    return MPI._handleof(duplicate) & (2**64 - 1)


def _start(timeout: float, action: str, directory: str, comm: int | None) -> None:
    world = MPI.COMM_WORLD
    handle = MPI._handleof(world) & (2**64 - 1)
    bridge.start_watchdog(
        timeout, ACTIONS.index(action), directory, socket.gethostname(), comm, handle, world.rank, world.size
    )


def _begin() -> None:
    """What importing the package does: listen to signals, and watch if the environment says so."""
    bridge.listen_to_signals()
    timeout = seconds("JAXCOMM_TIMEOUT")
    action = os.environ.get("JAXCOMM_TIMEOUT_ACTION", "").strip().lower() or "wait"
    if action not in ACTIONS:
        raise ValueError(f"JAXCOMM_TIMEOUT_ACTION must be one of {', '.join(ACTIONS)}, got {action!r}")
    directory = os.environ.get("JAXCOMM_REPORT", "").strip() or "."
    if not os.path.isdir(directory):
        raise ValueError(f"JAXCOMM_REPORT must be a directory that exists, got {directory!r}")
    if timeout == 0:
        _start(0, action, directory, None)
        return
    watch(timeout, action, directory)


_begin()
