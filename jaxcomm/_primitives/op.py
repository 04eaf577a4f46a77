"""One row of the table: what an operation is, as data.

An operation is a map x -> y between per-rank arrays. Where a rank contributes nothing, its operand is a template: only
shape and dtype count. Where a rank gets nothing, its result is a link (token.LINK): empty, but a path for
differentiation. With that, every linear operation and its adjoint are exact maps between what each rank really has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from mpi4py import MPI

__all__ = [
    "BUFFERED",
    "FOR_DERIVATIVES",
    "STANDARD",
    "SYNCHRONOUS",
    "TRACEABLE",
    "TRACED",
    "Adjoint",
    "Lead",
    "Op",
    "Params",
    "Who",
    "everyone",
    "nobody",
    "not_first",
    "not_last",
    "the_root",
    "with_the_root",
]

Params = dict[str, Any]
Lead = Literal["size", "part", "counts", "sendcounts", "recvcounts"] | None
Who = Callable[[Any, Params], bool]

TRACED: Final = "traced"
"""The value of a parameter that is a scalar operand."""

TRACEABLE: Final = ("dest", "source", "sendtag", "recvtag", "count", "received", "message")
"""The parameters that may be traced, in the order of their operands (the order of attributes.inc)."""


FOR_DERIVATIVES: Final = 2
"""The value of the parameter `enveloped` where the program does not ask how much a receive has got."""

STANDARD, SYNCHRONOUS, BUFFERED = range(3)
"""How a send is done, its parameter `mode`: as in call.hpp."""


def everyone(comm: Any, params: Params) -> bool:
    return True


def nobody(comm: Any, params: Params) -> bool:
    return False


def the_root(comm: Any, params: Params) -> bool:
    """MPI 4.1, 6.2.3: of two groups, the root's knows it as MPI.ROOT, the others there say PROC_NULL."""
    return bool(params["root"] == MPI.ROOT if comm.two_groups else comm.rank == params["root"])


def with_the_root(comm: Any, params: Params) -> bool:
    """Those that the root sends to or receives from: all ranks, or of two groups those of the other one."""
    return not comm.two_groups or params["root"] >= 0


def not_first(comm: Any, params: Params) -> bool:
    return bool(comm.rank != (comm.size - 1 if params["reverse"] else 0))


def not_last(comm: Any, params: Params) -> bool:
    return bool(comm.rank != (0 if params["reverse"] else comm.size - 1))


@dataclass(frozen=True)
class Adjoint:
    """The operation that applies the transposed matrix, and its parameters in terms of this one's.

    `then` makes the cotangent of its result, where that is not the cotangent: (this one's parameters, result, an array like
    the cotangent) -> cotangent. `checked` is the operation that checking mode puts in its place, if there is one.
    """

    name: str
    params: Callable[[Params], Params]
    says: str
    then: Callable[[Params, Any, Any], Any] = lambda params, back, like: back
    checked: str = ""


@dataclass(frozen=True)
class Op:
    """The columns of the table.

    Attributes:
      name: the primitive is mpi_<name>, the custom call jaxcomm_<name>, the row of ops.inc <name>.
      source: chapter of the MPI standard.
      params: names of the parameters beside the communicator, with the value of those left out. Those in TRACEABLE may be
        operands.
      operands: number of arrays: 2 where the receive template is not the send operand.
      sends: the ranks whose first operand is data; elsewhere it is a template of the result.
      returns: the ranks that get a result; elsewhere it is a link.
      lead_in: whether data has a leading axis that numbers ranks ("size"), or is cut along axis 0 into a part for each
        rank (the name of the parameter that has their lengths), or is one such part ("part" of `counts`).
      lead_out: the same for the result.
      envelope: it receives: the template stays where nothing arrives, and so is an input of the linear map. With the
        parameter `enveloped`, True or what derivatives set (FOR_DERIVATIVES), it also returns int32 (source, tag, number of
        elements received, or -1 for all of the template).
      alias: the operand that may share the result's buffer, where it has its shape.
      adjoint: None where there is no derivative.
      adjoint_between: that on an intercommunicator, where it is another.
      shapes: (comm, params, operands) -> the results, where they do not follow from the leading axes.
      blocking_only: whether it has no nonblocking form.
      native: the row of ops.inc that it runs, by default its own name; None where nothing is communicated and y is x.
      linear: whether y is linear in x for these parameters; elsewhere reductions.py has the derivative.
    """

    name: str
    source: str
    params: tuple[tuple[str, Any], ...] = ()
    operands: int = 1
    sends: Who = everyone
    returns: Who = everyone
    lead_in: Lead = None
    lead_out: Lead = None
    envelope: bool = False
    alias: int | None = None
    adjoint: Adjoint | None = None
    adjoint_between: Adjoint | None = None
    shapes: Callable[[Any, Params, Sequence[Any]], list[Any]] | None = None
    blocking_only: bool = False
    native: str | None = ""
    linear: Callable[[Params], bool] = lambda params: True

    def adjoint_on(self, comm: Any) -> Adjoint | None:
        """The adjoint on a communicator."""
        return self.adjoint_between if comm.two_groups and self.adjoint_between else self.adjoint

    @property
    def target(self) -> str | None:
        """The row of ops.inc, or None."""
        return self.name if self.native == "" else self.native
