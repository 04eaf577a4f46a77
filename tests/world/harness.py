"""What tests on several ranks share: communicators of every kind, and verdicts that all ranks reach together."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
# The harness's own messages never meet a test's.
CONTROL = WORLD.Dup()


def gather_in_time(code: int, seconds: float) -> list[int] | None:
    """Every rank's code, or None if a rank did not come in time."""
    send, receive = bytearray([code]), bytearray(WORLD.size)
    request = CONTROL.Iallgather([send, MPI.BYTE], [receive, 1, MPI.BYTE])
    limit = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > limit:
            return None
        time.sleep(0.0002)
    return list(receive)


def agree(ok: bool, message: str = "") -> None:
    """Fail on all ranks, with one text, if the verdict of any is not ok. Collective."""
    verdicts = CONTROL.allgather((bool(ok), message))
    wrong = [f"rank {r}: {text or 'not ok'}" for r, (good, text) in enumerate(verdicts) if not good]
    if wrong:
        raise AssertionError(f"on {len(wrong)} of {WORLD.size} ranks:\n" + "\n".join(wrong))


def communicators() -> dict[str, Callable[[], MPI.Intracomm]]:
    """The kinds of communicator that a property must hold on, by name; making one is collective."""
    return {
        "world": lambda: WORLD,
        "self": lambda: MPI.COMM_SELF,
        "dup": WORLD.Dup,
        "parity": lambda: WORLD.Split(WORLD.rank % 2, WORLD.rank),
        "reversed": lambda: WORLD.Split(0, -WORLD.rank),
    }


@cache
def communicator(name: str) -> Any:
    """The communicator of that name, made once, as a JaxComm where jaxcomm is installed."""
    comm = communicators()[name]()
    if importlib.util.find_spec("jaxcomm") is None:
        return comm
    return importlib.import_module("jaxcomm").JaxComm(comm)


def result(request, status=None):
    """Wait. That of a barrier outside jit, which has no operand, is mpi4py's."""
    y = request.Wait(status)
    return None if isinstance(request, MPI.Request) else y


class InTwoHalves:
    """A communicator whose blocking methods start, do something else, and wait."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        start = getattr(self.comm, f"I{name[0].lower()}{name[1:]}", None) if name[0].isupper() else None
        return getattr(self.comm, name) if start is None else partial(self.half, start)

    def half(self, start, *args, status=None, **kwargs):
        return result(start(*args, **kwargs), status)
