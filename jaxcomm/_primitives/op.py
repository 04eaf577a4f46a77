"""One row of the table: what an operation is, as data.

An operation is a map x -> y between per-rank arrays. Where a rank contributes nothing, its operand is a template: only
shape and dtype count. Where a rank gets nothing, its result is a link (token.LINK): empty, but a path for
differentiation. With that, every linear operation and its adjoint are exact maps between what each rank really has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = [
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
]

Params = dict[str, Any]
Lead = Literal["size"] | None
Who = Callable[[Any, Params], bool]

TRACED: Final = "traced"
"""The value of a parameter that is a scalar operand."""

TRACEABLE: Final = ("dest", "source", "sendtag", "recvtag", "count", "received")
"""The parameters that may be traced, in the order of their operands (the order of attributes.inc)."""


def everyone(comm: Any, params: Params) -> bool:
    return True


def nobody(comm: Any, params: Params) -> bool:
    return False


def the_root(comm: Any, params: Params) -> bool:
    return bool(comm.rank == params["root"])


def not_first(comm: Any, params: Params) -> bool:
    return bool(comm.rank != (comm.size - 1 if params["reverse"] else 0))


def not_last(comm: Any, params: Params) -> bool:
    return bool(comm.rank != (0 if params["reverse"] else comm.size - 1))


@dataclass(frozen=True)
class Adjoint:
    """The operation that applies the transposed matrix, and its parameters in terms of this one's."""

    name: str
    params: Callable[[Params], Params]
    says: str


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
      lead_in: whether data has a leading axis that numbers ranks.
      lead_out: whether the result has.
      envelope: it receives: the template stays where nothing arrives, and so is an input of the linear map. With the
        parameter `enveloped`, which derivatives set, it also returns int32 (source, tag, number of elements received, or
        -1 for all of the template).
      alias: the operand that may share the result's buffer, where it has its shape.
      adjoint: None where there is no derivative.
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
    native: str | None = ""
    linear: Callable[[Params], bool] = lambda params: True

    @property
    def target(self) -> str | None:
        """The row of ops.inc, or None."""
        return self.name if self.native == "" else self.native
