"""Operations that users make with MPI.Op.Create: what they raise reaches the caller.

mpi4py ends the job when a user's function raises, since MPI, which calls it, could not go on. MPI is therefore given another
operation, whose function calls the user's, notes what it raises and returns. The call then fails on this rank; on the
others it ends, with a result that means nothing.

mpi4py keeps the functions in a list, and in each MPI.Op the place in it, and shows neither. Both are found by means of an
operation made for the purpose; where they are not as expected, MPI gets the user's operation as it is.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from jaxcomm._native import bridge

__all__ = ["FROM_OP", "add", "raised"]

FROM_OP = -2
"""The error code of a call whose operation raised an exception: Failure::kFromOp."""

Function = Callable[[Any, Any, MPI.Datatype], None]


class _Raised(threading.local):
    """What a user's function raised last in this thread."""

    error: BaseException | None = None


_last = _Raised()


def raised(message: str) -> BaseException:
    """Return the exception of the call that has just failed here."""
    error, _last.error = _last.error, None
    if error is None:  # in another thread: a request that MPI went on with
        return RuntimeError(message)
    error.add_note(f"jaxcomm: {message}")
    return error


class _Guarded:
    """An operation that calls the user's function.

    Attributes:
      user: the user's operation. op: the one for MPI. index: its row of the native table.
    """

    def __init__(self, user: MPI.Op, function: Function, name: str):
        self.user, self.function = user, function
        self.op = MPI.Op.Create(self, user.Is_commutative())
        self.index = bridge.add_reduction(MPI._addressof(self.op), name, MPI._addressof(user))

    def __call__(self, a: Any, b: Any, datatype: MPI.Datatype) -> None:
        try:
            self.function(a, b, datatype)
        except BaseException as error:
            _last.error = error
            bridge.set_raised(self.index, f"{type(error).__name__}: {error}")


_guarded: list[_Guarded] = []


def add(op: MPI.Op) -> tuple[str, int]:
    """Return the name of a user's operation, and its row of the native table."""
    _let_go()
    function = _function(op)
    name = f"{getattr(function, '__name__', 'of the user')}()"
    if function is not None:
        try:
            _guarded.append(_Guarded(op, function, name))
            return name, _guarded[-1].index
        except RuntimeError:  # mpi4py has 32 places for functions, and they are taken
            pass
    return name, bridge.add_reduction(MPI._addressof(op), name)


def _let_go() -> None:
    """Free the operations whose user's operation was freed: the native layer calls them no more."""
    for guarded in [g for g in _guarded if g.user == MPI.OP_NULL]:
        guarded.op.Free()
        _guarded.remove(guarded)


def _function(op: MPI.Op) -> Function | None:
    functions = _functions()
    return None if functions is None else functions[_place(op)]


def _place(op: MPI.Op) -> int:
    """Behind the handle mpi4py has 32 bits, of which the first eight say where the function is (MPI.pxd, opimpl.pxi)."""
    return ctypes.c_uint32.from_address(MPI._addressof(op) + MPI._sizeof(MPI.Op)).value >> 24


@functools.cache
def _functions() -> list[Any] | None:
    """mpi4py's list of functions, if it and the places are what they were in 4.0 and 4.1."""

    def probe(a: Any, b: Any, datatype: MPI.Datatype) -> None:
        pass

    op = MPI.Op.Create(probe)
    lists = [found for found in gc.get_referrers(probe) if type(found) is list]
    place = _place(op)
    known = len(lists) == 1 and place < len(lists[0]) and lists[0][place] is probe
    op.Free()
    return lists[0] if known else None
