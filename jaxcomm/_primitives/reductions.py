"""Reductions: mpi4py's operations as static parameters, their identities, and derivatives of those that are not linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import dtypes, user_ops
from jaxcomm._primitives.op import Params

__all__ = ["COLLECT", "MEAN", "SUM", "Mean", "Reduction", "check", "identity", "local", "native", "reduction"]


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

    @property
    def user(self) -> bool:
        """Whether it was made by MPI.Op.Create."""
        return self.name not in BY_NAME

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

# Those that the native layer does itself, because MPI lacks them, or its libraries do them differently: reduce_ops.hpp.
_REDUCED = dict.fromkeys(map(dtypes.reduced_as, dtypes.DTYPES))
_OWN_DTYPES = {
    "SUM PROD": [d for d in _REDUCED if dtypes.kind(d) in "iuf" and d.itemsize <= 2],
    "MAX MIN": [d for d in _REDUCED if dtypes.kind(d) == "f"],
}
_OWN = {
    (name, dtype): Reduction(name, bridge.add_own_reduction(name, dtype.name), getattr(MPI, name))
    for names, of in _OWN_DTYPES.items()
    for name in names.split()
    for dtype in of
}


class Mean:
    """As op of a reduction: the sum, divided by the number of ranks that it is of."""

    def __repr__(self) -> str:
        return "MEAN"


MEAN = Mean()

# What each is defined for, by the kind of dtype (dtypes.kind). MPI 4.1, 6.9.2, and for bool as NumPy does: SUM is `or`.
_KINDS = dict.fromkeys(_NAMES, "biu") | {"SUM": "biufc", "PROD": "biufc", "MAX": "biuf", "MIN": "biuf"}
_ON_BOOL = {"SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "PROD": "LAND", "MIN": "LAND", "BAND": "LAND", "BXOR": "LXOR"}


def reduction(op: Any, where: str) -> Reduction:
    """Return the static parameter for an mpi4py operation."""
    if not isinstance(op, MPI.Op):
        raise TypeError(f"{where}: op must be an MPI.Op such as MPI.SUM, got {op!r}; or a function of JAX arrays")
    known = _KNOWN.get(MPI._handleof(op)) or _user(op, where)
    if known is None:
        names = ", ".join(f"MPI.{name}" for name in _NAMES)
        raise TypeError(f"{where}: op must be one of {names}; got another operation, {op!r}")
    return known


_of_users: dict[int, Reduction] = {}
"""By the object, which is kept alive: MPI gives the handle of one that was freed to another."""


def _user(op: MPI.Op, where: str) -> Reduction | None:
    if op == MPI.OP_NULL:
        raise ValueError(f"{where}: op was freed (MPI.Op.Free) or is MPI.OP_NULL")
    if op.is_predefined:
        return None
    if id(op) not in _of_users:
        _of_users[id(op)] = Reduction(*user_ops.add(op), op)
    return _of_users[id(op)]


def check(op: Reduction, dtype: np.dtype[Any], where: str) -> None:
    """Raise TypeError unless op is defined for the dtype, before any rank enters MPI."""
    if dtype == jax.dtypes.float0:
        return
    if op.user:
        if not dtypes.in_mpi(dtype):
            raise TypeError(
                f"{where}: MPI has no datatype for {dtype.name} that {op.name} could be given; pass a JAX function as op, "
                "or convert the operand (x.astype)"
            )
        return
    kind = dtypes.kind(dtype)
    if not kind or kind not in _KINDS[op.name]:
        defined = [name for name in _NAMES if kind and kind in _KINDS[name]]
        raise TypeError(
            f"{where}: op={op.name} is not defined for dtype {dtype.name}; defined are {', '.join(defined) or 'none'}. "
            "Convert the operand (x.astype) or choose another op"
        )


def native(op: Reduction, dtype: np.dtype[Any]) -> Reduction:
    """The operation that MPI is asked for: for bool a logical one, as MPI 4.1 has no arithmetic there; or one of our own."""
    if op.user:
        return op
    if dtype.kind == "b":
        return BY_NAME[_ON_BOOL.get(op.name, op.name)]
    return _OWN.get((op.name, dtypes.reduced_as(dtype)), op)


def identity(op: Reduction, dtype: np.dtype[Any]) -> Any:
    """Return the reduction of no operands: what Exscan gives the first rank."""
    if dtype == jax.dtypes.float0:
        return dtypes.nothing(())
    if op.name in ("MAX", "MIN"):
        lowest, highest = dtypes.limits(dtype)
        return np.array(lowest if op.name == "MAX" else highest).astype(dtype)
    ones = {"PROD": 1, "LAND": 1, "BAND": -1}.get(op.name, 0)
    return np.array(ones, np.int64).astype(dtype)


_LOCAL: dict[str, Callable[..., Any]] = {"MAX": jnp.max, "MIN": jnp.min, "PROD": jnp.prod}


def local(op: Reduction) -> Callable[..., Any] | None:
    """Return the same reduction of one array over an axis, differentiable, or None where there is no derivative."""
    return _LOCAL.get(op.name)


# The derivative of a reduction that is not linear: bring the operands together and differentiate the same reduction there.
# Costs as much memory as there are ranks; exact with ties (MAX and MIN split evenly) and zeros (PROD), at every order,
# because the row that collects has an adjoint of its own. `part` takes of what was collected what this rank reduces, with a
# leading axis for the ranks; `params` are those of the row that collects, where they do not have the same names.


@dataclass(frozen=True)
class Collect:
    row: str
    part: Callable[[Any, Any, Params], Any] = lambda all_, comm, params: all_
    params: Callable[[Any, Params], Params] = lambda comm, params: params


def _parts_from_all(comm: Any, params: Params) -> Params:
    counts = params["counts"]
    return {"sendcounts": counts, "recvcounts": (counts[comm.rank],) * comm.size}


COLLECT = {
    "allreduce": Collect("allgather"),
    "reduce": Collect("gather"),
    "reduce_scatter_block": Collect("alltoall"),
    "reduce_scatter": Collect(
        "alltoallv",
        lambda all_, comm, params: all_.reshape(comm.size, params["counts"][comm.rank], *all_.shape[1:]),
        _parts_from_all,
    ),
    "scan": Collect(
        "allgather", lambda all_, comm, params: all_[comm.rank :] if params["reverse"] else all_[: comm.rank + 1]
    ),
    "exscan": Collect(
        "allgather", lambda all_, comm, params: all_[comm.rank + 1 :] if params["reverse"] else all_[: comm.rank]
    ),
}
