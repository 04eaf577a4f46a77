"""Reductions: mpi4py's operations as static parameters, their identities, and derivatives of those that are not linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge

__all__ = ["COLLECT", "SUM", "Reduction", "check", "identity", "local", "native", "reduction"]


@dataclass(frozen=True)
class Reduction:
    """An MPI.Op as a static parameter: hashable, equal by index, named in jaxprs.

    Attributes:
      name: MPI's name, "SUM".
      index: the row of the native table. Compiled programs hold it instead of the handle.
      op: mpi4py's object, kept alive because the native table refers to its memory.
    """

    name: str = field(compare=False)
    index: int
    op: MPI.Op = field(compare=False, repr=False)

    def __hash__(self) -> int:
        return self.index

    def __repr__(self) -> str:
        return self.name


def _add(name: str, op: MPI.Op) -> Reduction:
    return Reduction(name, bridge.add_reduction(MPI._addressof(op), name), op)


_NAMES = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
_KNOWN = {MPI._handleof(getattr(MPI, name)): _add(name, getattr(MPI, name)) for name in _NAMES}
BY_NAME = {known.name: known for known in _KNOWN.values()}
SUM = BY_NAME["SUM"]

# Those that the native layer does itself, because MPI libraries do them differently: see reduce_ops.hpp.
_SMALL = ("int8", "uint8", "int16", "uint16")
_OWN = {
    (name, np.dtype(dtype)): Reduction(name, bridge.add_own_reduction(name, dtype), getattr(MPI, name))
    for name in ("SUM", "PROD")
    for dtype in _SMALL
}

# What each is defined for, by NumPy's kind of dtype. MPI 4.1, 6.9.2, and for bool as NumPy does: SUM is `or`.
_KINDS = dict.fromkeys(_NAMES, "biu") | {"SUM": "biufc", "PROD": "biufc", "MAX": "biuf", "MIN": "biuf"}
_ON_BOOL = {"SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "PROD": "LAND", "MIN": "LAND", "BAND": "LAND", "BXOR": "LXOR"}


def reduction(op: Any, where: str) -> Reduction:
    """Return the static parameter for an mpi4py operation."""
    if not isinstance(op, MPI.Op):
        raise TypeError(f"{where}: op must be an MPI.Op such as MPI.SUM, got {op!r}")
    known = _KNOWN.get(MPI._handleof(op))
    if known is None:
        names = ", ".join(f"MPI.{name}" for name in _NAMES)
        raise TypeError(f"{where}: op must be one of {names}; got another operation, {op!r}")
    return known


def check(op: Reduction, dtype: np.dtype[Any], where: str) -> None:
    """Raise TypeError unless op is defined for the dtype, before any rank enters MPI."""
    if dtype.kind not in _KINDS[op.name]:
        defined = [name for name in _NAMES if dtype.kind in _KINDS[name]]
        raise TypeError(
            f"{where}: op={op.name} is not defined for dtype {dtype.name}; defined are {', '.join(defined) or 'none'}. "
            "Convert the operand (x.astype) or choose another op"
        )


def native(op: Reduction, dtype: np.dtype[Any]) -> Reduction:
    """The operation that MPI is asked for: for bool a logical one, as MPI 4.1 has no arithmetic there; or one of our own."""
    if dtype.kind == "b":
        return BY_NAME[_ON_BOOL.get(op.name, op.name)]
    return _OWN.get((op.name, dtype), op)


def identity(op: Reduction, dtype: np.dtype[Any]) -> Any:
    """Return the reduction of no operands: what Exscan gives the first rank."""
    if op.name in ("MAX", "MIN"):
        return _extreme(dtype, lowest=op.name == "MAX")
    ones = {"PROD": 1, "LAND": 1, "BAND": -1}.get(op.name, 0)
    return np.array(ones, np.int64).astype(dtype)


def _extreme(dtype: np.dtype[Any], lowest: bool) -> Any:
    if dtype.kind == "b":
        return np.array(not lowest)
    if dtype.kind == "f":
        return np.array(-np.inf if lowest else np.inf, dtype)
    info = np.iinfo(dtype)
    return np.array(info.min if lowest else info.max, dtype)


_LOCAL: dict[str, Callable[..., Any]] = {"MAX": jnp.max, "MIN": jnp.min, "PROD": jnp.prod}


def local(op: Reduction) -> Callable[..., Any] | None:
    """Return the same reduction of one array over an axis, differentiable, or None where there is no derivative."""
    return _LOCAL.get(op.name)


# The derivative of a reduction that is not linear: bring the operands together and differentiate the same reduction there.
# Costs as much memory as there are ranks; exact with ties (MAX and MIN split evenly) and zeros (PROD), at every order,
# because the row that collects has an adjoint of its own.
COLLECT: dict[str, tuple[str, Callable[[Any, Any, Any], Any]]] = {
    "allreduce": ("allgather", lambda all_, rank, reverse: all_),
    "reduce": ("gather", lambda all_, rank, reverse: all_),
    "reduce_scatter_block": ("alltoall", lambda all_, rank, reverse: all_),
    "scan": ("allgather", lambda all_, rank, reverse: all_[rank:] if reverse else all_[: rank + 1]),
    "exscan": ("allgather", lambda all_, rank, reverse: all_[rank + 1 :] if reverse else all_[:rank]),
}
