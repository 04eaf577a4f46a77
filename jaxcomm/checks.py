"""Checking mode: ranks tell each other what they are about to do, and senders what they send.

The work is the native layer's: _native/checks.hpp (collectives), _native/notes.hpp (messages).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm.token import flush

__all__ = ["checking", "introduce"]

_numbers = itertools.count(1)
_carriers: list[MPI.Comm] = []


@contextmanager
def checking(on: bool = True) -> Iterator[None]:
    """Turn checking mode on (or off) for the operations in a with block; JAXCOMM_CHECK=1 turns it on for a program.

    Collectives: before each blocking one, the ranks tell each other operation, dtype, count, op and root (of ragged
    ones, those of neighbours and Alltoallw, what each sends and expects; of mpi4py's own on a JaxComm, what makes
    communicators among them, the operation). Where these differ, every rank raises an error that lists what each is
    doing, and where; nothing has been communicated then, and the communicator goes on. Nonblocking ones are compared
    when they are waited for, without the counts of ragged ones; then the communicator should not be used on. That
    begins with a communicator's first blocking one.

    Messages: a receive raises, and names the sender's call with file and line, if the message has another dtype than the
    template, or is longer, or is shorter and the program does not ask how much has come (return_status=True, status=, a
    probe). What mpi4py's own methods send, on NumPy arrays or as objects, is received as it is.

    Cotangents that Allreduce(..., replicated=True) says are equal on all ranks are compared in functions that are
    differentiated inside the block. In those that are traced there, so are functions as op, by their names, MEAN, the
    structures of trees, and the parts of Reduce_scatter.

    It costs another small collective or message for each. Ranks enter and leave the block alike. Functions that were
    compiled before are checked too, but for these two.

    Not checked: operations between two groups; nonblocking methods of mpi4py's own; messages on communicators that jaxcomm
    did not make, and any messages before it has made one of all processes of MPI.COMM_WORLD.
    """
    flush()  # what is under way began outside
    before = bridge.checking()
    bridge.set_checking(on)
    try:
        yield
        flush()
    finally:
        bridge.set_checking(before)


def introduce(slot: int, comm: Any) -> None:
    """Let notes on a communicator's messages find their way. Collective.

    Args:
      slot: its row of the native table. comm: one of the same processes that nobody uses yet.
    """
    world, group = MPI.COMM_WORLD.Get_group(), comm.Get_group()
    try:
        ranks = MPI.Group.Translate_ranks(group, None, world)
        # The whole world makes this one, so it can make another.
        if not _carriers and MPI.Group.Compare(group, world) in (MPI.IDENT, MPI.SIMILAR):
            _carriers.append(MPI.Comm.Split(MPI.COMM_WORLD, 0, world.Get_rank()))
            _carriers[0].Set_errhandler(MPI.ERRORS_RETURN)
            bridge.carry_notes(MPI._handleof(_carriers[0]) & (2**64 - 1))
    finally:
        world.Free()
        group.Free()
    number = np.array([MPI.COMM_WORLD.Get_rank() << 32 | next(_numbers)], np.int64)
    MPI.Intracomm.Bcast(comm, number, 0)
    bridge.introduce(slot, int(number[0]), [rank if rank >= 0 else -1 for rank in ranks])
