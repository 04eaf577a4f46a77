"""mpi4py's Status objects as static parameters: MPI writes into them when the operation has run."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from jaxcomm._native import bridge

__all__ = ["StatusRef", "address", "index", "of"]


class StatusRef:
    """A Status by identity. mpi4py compares statuses by content and does not hash them."""

    __slots__ = ("status",)

    def __init__(self, status: MPI.Status):
        self.status = status

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StatusRef) and self.status is other.status

    def __hash__(self) -> int:
        return id(self.status)

    def __repr__(self) -> str:
        return "status"


# Compiled programs write into a status whenever they run, so those that were traced live as long as the process.
_traced: dict[StatusRef, int] = {}


def index(ref: StatusRef | None) -> int:
    """Return the row of the native table, -1 for no status."""
    if ref is None:
        return -1
    if ref not in _traced:
        _traced[ref] = bridge.add_status(MPI._addressof(ref.status))
    return _traced[ref]


def address(ref: StatusRef | None) -> int:
    """Return where MPI shall write at once, 0 for nowhere."""
    return 0 if ref is None else int(MPI._addressof(ref.status))


def of(status: Any, where: str) -> StatusRef | None:
    """Return the static parameter for a user's status argument."""
    if status is None:
        return None
    if not isinstance(status, MPI.Status):
        raise TypeError(f"{where}: status must be an MPI.Status or None, got {status!r}")
    return StatusRef(status)
