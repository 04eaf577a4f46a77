"""Checking mode: before each collective the ranks compare what they are about to do. See _native/checks.hpp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxcomm._native import bridge
from jaxcomm.token import flush

__all__ = ["checking"]


@contextmanager
def checking(on: bool = True) -> Iterator[None]:
    """Turn checking mode on (or off) for the operations in a with block; JAXCOMM_CHECK=1 turns it on for a program.

    Before each blocking collective the ranks tell each other operation, dtype, count, op and root. Where these differ, every
    rank raises an error that lists what each is doing, and where; nothing has been communicated then, and the
    communicator goes on. It costs another small collective for each. Ranks enter and leave the block alike. Functions that
    were compiled before are checked too.

    Not checked: messages, nonblocking and neighbour collectives, the counts of ragged ones, and operations between two
    groups.
    """
    flush()  # what is under way began outside
    before = bridge.checking()
    bridge.set_checking(on)
    try:
        yield
        flush()
    finally:
        bridge.set_checking(before)
