"""Timelines: every operation of every rank with its times, for Perfetto and for `python -m jaxcomm report`.

The native layer records (recorder.hpp). Each rank writes a file of its own when the trace ends, without asking the others:
a rank that failed keeps nobody waiting. Whoever finds that all files are there merges them (report.py).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from jaxcomm import communicator, report
from jaxcomm._native import bridge
from jaxcomm._primitives import _compat
from jaxcomm.report import Record
from jaxcomm.token import flush

__all__ = ["Clock", "clock_of", "discard", "finish", "trace"]

SETTING = "JAXCOMM_TRACE"


@contextmanager
def trace(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Record every operation in a with block, and write a timeline of all ranks into a directory.

    Collective over MPI.COMM_WORLD when the block is entered: clocks are compared, and what is pending is finished first.
    When a rank leaves the block it finishes what is pending, and writes `rank-<r>.json`; the last one to do so writes
    `trace.json`, for https://ui.perfetto.dev or chrome://tracing. A rank that leaves by an exception writes what it has.
    `python -m jaxcomm report DIRECTORY` prints where the time went; see docs/timeline.md. The environment variable
    JAXCOMM_TRACE=DIRECTORY does the same for a whole program.

    Blocks may be nested, in directories of their own: the outer one has all. A second trace into a directory replaces the
    first.

    Args:
      directory: where to write; it is made if need be. The same for all ranks.
    Raises: OSError: on every rank, if one cannot write there. ValueError: a trace into the directory is under way.
      TypeError: no path. RuntimeError: inside a function that JAX traces, which runs later.
    """
    folder = _folder(directory)
    if _compat.tracing():
        raise RuntimeError(
            "jaxcomm.trace inside a function that is being traced (jit, grad, vmap ...) would record nothing, as the "
            "function runs later: put the with block around its calls"
        )
    running = _begin(folder, f"jaxcomm.trace({os.fspath(directory)!r})")
    try:
        yield
        flush()
    finally:
        _end(running)


def _folder(directory: str | os.PathLike[str]) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"jaxcomm.trace(directory=...) must be a path, got {directory!r}")
    if not os.fspath(directory):
        raise ValueError("jaxcomm.trace(directory=...) must name a directory, got an empty path")
    folder = Path(directory).absolute()
    if any(other.folder == folder for other in _running):
        raise ValueError(f"a trace into {folder} is under way already; give this one another directory")
    return folder


@dataclass
class _Trace:
    """One that is under way.

    Attributes:
      head: what its file begins with.
      communicators: {row of the native table: its members' ranks in COMM_WORLD}.
      records: what bridge.take_records has given.
    """

    folder: Path
    head: dict[str, Any]
    communicators: dict[int, dict[str, Any]] = field(default_factory=dict)
    records: list[tuple[Any, ...]] = field(default_factory=list)

    def note(self, comm: Any) -> None:
        self.communicators[comm.slot] = _members(comm)


_running: list[_Trace] = []
"""Outermost first."""


def _begin(folder: Path, what: str) -> _Trace:
    flush()
    comm = MPI.COMM_WORLD.Split(0, MPI.COMM_WORLD.rank)
    try:
        _agree(comm, what, _problem(folder))
        clock = clock_of(comm)
        run, started = comm.bcast((uuid.uuid4().hex, time.time()))
    finally:
        comm.Free()
    head = {
        "run": run,
        "started": started,
        "rank": MPI.COMM_WORLD.rank,
        "size": MPI.COMM_WORLD.size,
        "host": MPI.Get_processor_name(),
        "clock": clock._asdict(),
        "began": time.monotonic_ns(),
    }
    this = _Trace(folder, head)
    for known in communicator.registered():
        this.note(known)
    if not _running:
        communicator.when_registered.append(_note)
    _collect()
    _running.append(this)
    bridge.keep_records(True)
    bridge.observe(1)
    return this


def _note(comm: Any) -> None:
    for each in _running:
        each.note(comm)


def _collect() -> None:
    records = bridge.take_records()
    for each in _running:
        each.records.extend(records)


def _close(this: _Trace) -> None:
    _collect()
    this.head["ended"] = time.monotonic_ns()
    _running.remove(this)
    bridge.observe(-1)
    if not _running:
        bridge.keep_records(False)
        communicator.when_registered.remove(_note)


def _end(this: _Trace) -> None:
    _close(this)
    _write(this)
    report.merge_if_complete(this.folder, this.head["run"], this.head["size"])


def finish() -> None:
    """End what is under way, without waiting for anything: the process is about to end."""
    for this in reversed(_running[:]):
        try:
            _end(this)
        except OSError as error:
            print(f"jaxcomm: the trace in {this.folder} could not be written: {error}", file=sys.stderr, flush=True)


def discard() -> None:
    """End what is under way, and write nothing."""
    for this in reversed(_running[:]):
        _close(this)


def _problem(folder: Path) -> str:
    """Why no file can be written in a folder, or nothing."""
    if folder.exists() and not folder.is_dir():
        return f"{folder} is not a directory"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return str(error)


def _agree(comm: MPI.Comm, what: str, problem: str) -> None:
    found = {text: rank for rank, text in reversed(list(enumerate(comm.allgather(problem)))) if text}
    if found:
        said = "; ".join(f"rank {rank}: {text}" for text, rank in found.items())
        raise OSError(
            f"{what}: no trace can be written there ({said}). Give a directory that exists or can be made, and in which "
            "every rank may make files"
        )


# Clocks


class Clock(NamedTuple):
    """How this rank's clock is turned into that of rank 0, in nanoseconds.

    Attributes:
      offset: what is added.
      error: by how much it may be wrong, at most; 0 where both are one clock.
    """

    offset: int
    error: int


ROUNDS = 20


def _identity() -> str:
    """What the processes have in common whose monotonic clocks are one."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    return MPI.Get_processor_name()


def clock_of(comm: MPI.Comm, identity: str | None = None, read: Callable[[], int] = time.monotonic_ns) -> Clock:
    """Compare this rank's clock with that of rank 0. Collective.

    Of some messages there and back, the one that took least bounds the error: the clock of rank 0 was read between the
    two readings here. One rank does it for all that share its clock.

    Args:
      identity: the same where the clock is. read: the clock, in nanoseconds.
    """
    identities = comm.allgather(_identity() if identity is None else identity)
    first = identities.index(identities[comm.rank])
    message = np.zeros(1, np.int64)
    mine = Clock(0, 0)
    for rank in sorted({identities.index(each) for each in identities} - {0}):
        for _ in range(ROUNDS):
            if comm.rank == 0:
                comm.Recv(message, rank)
                message[0] = read()
                comm.Send(message, rank)
            elif comm.rank == rank:
                sent = read()
                comm.Send(message, 0)
                comm.Recv(message, 0)
                came = read()
                found = Clock(int(message[0]) - (sent + came) // 2, (came - sent + 1) // 2)
                mine = found if mine.error == 0 or found.error < mine.error else mine
    everyones: list[Clock] = comm.allgather(mine)
    return everyones[first]


# Writing


def _members(comm: Any) -> dict[str, Any]:
    found = {"ranks": _in_world(comm.group)}
    return found | {"peers": _in_world(comm.remote_group)} if comm.two_groups else found


def _in_world(group: MPI.Group) -> list[int | None]:
    world = MPI.COMM_WORLD.group
    ranks = MPI.Group.Translate_ranks(group, None, world)
    group.Free()
    world.Free()
    return [None if rank == MPI.UNDEFINED else int(rank) for rank in ranks]


_NAMES = {MPI.ANY_SOURCE: "ANY_SOURCE", MPI.PROC_NULL: "PROC_NULL", MPI.ROOT: "ROOT"}


def _peer(rank: int | None, members: Sequence[int | None]) -> int | str | None:
    """A rank of COMM_WORLD for one of a communicator, or in words."""
    if rank is None or rank in _NAMES:
        return None if rank is None else _NAMES[rank]
    known = members[rank] if 0 <= rank < len(members) else None
    return f"rank {rank} of the communicator" if known is None else known


def _record(raw: tuple[Any, ...], communicators: dict[int, dict[str, Any]]) -> Record:
    record = Record(*raw)
    found = communicators.get(record.comm, {"ranks": []})
    members = found.get("peers", found["ranks"])
    return record._replace(
        root=_peer(record.root, members),
        dest=_peer(record.dest, members),
        source=_peer(record.source, members),
        recvtag="ANY_TAG" if record.recvtag == MPI.ANY_TAG else record.recvtag,
    )


def _write(this: _Trace) -> None:
    report.replace(report.file_of(this.folder, this.head["rank"]), _content(this))


def _content(this: _Trace) -> Iterator[str]:
    """The file's JSON, bit by bit, as there may be many records."""
    used = {raw[Record._fields.index("comm")] for raw in this.records} | this.communicators.keys()
    names = {slot: {"name": bridge.communicator_name(slot)} for slot in sorted(used)}
    communicators = {slot: names[slot] | this.communicators.get(slot, {}) for slot in names}
    head = this.head | {"communicators": communicators, "columns": Record._fields}
    yield _json(head)[:-1] + ',"records":['
    for i, raw in enumerate(this.records):
        yield ("\n" if i == 0 else ",\n") + _json(_record(raw, this.communicators))
    yield "]}\n"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _begin_with_the_program() -> None:
    value = os.environ.get(SETTING, "").strip()
    if not value:
        return
    if value.lower() in ("0", "1", "true", "false", "on", "off", "yes", "no"):
        raise ValueError(f"{SETTING} must be a directory, got {value!r} (a directory of that name is ./{value})")
    _begin(Path(value).absolute(), f"{SETTING}={value}")


_begin_with_the_program()
