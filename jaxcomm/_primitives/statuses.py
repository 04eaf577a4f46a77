"""mpi4py's Status objects as static parameters: MPI writes into them when the operation has run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import dtypes

__all__ = ["ReceivedStatus", "StatusRef", "address", "index", "of", "received"]


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


class ReceivedStatus(NamedTuple):
    """A status as values, which a program inside jit can act on: int32 scalars.

    Attributes:
      source: the rank that sent, PROC_NULL if nobody did.
      tag: of the message.
      count: how many elements came; for a probe, how many bytes there are.
    """

    source: Any
    tag: Any
    count: Any

    @classmethod
    def of_nothing(cls) -> Self:
        """An empty status, as a request for a send has. MPI 4.1, 3.7.3."""
        return cls(*(jnp.int32(value) for value in (MPI.ANY_SOURCE, MPI.ANY_TAG, 0)))

    def Get_source(self) -> Any:
        """Return the source."""
        return self.source

    def Get_tag(self) -> Any:
        """Return the tag."""
        return self.tag

    def Get_count(self) -> Any:
        """Return the count."""
        return self.count


def received(envelope: Any, template: Any) -> ReceivedStatus:
    """Return the status of a receive with a template, from its envelope (Op.envelope)."""
    source, tag, count = envelope
    words = dtypes.per_element(template.dtype)
    came = jnp.where(count < 0, math.prod(template.shape), count if words == 1 else count // words)
    return ReceivedStatus(source, tag, came.astype(jnp.int32))
