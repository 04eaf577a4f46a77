"""The shape rule of all operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcomm._primitives import _compat
from jaxcomm._primitives.op import Lead, Op, Params
from jaxcomm.token import LINK

__all__ = ["results", "stacks"]

ENVELOPE = _compat.ShapedArray((3,), np.dtype(np.int32))


def results(op: Op, comm: Any, params: Params, arrays: Sequence[Any]) -> list[_compat.ShapedArray]:
    """Return the abstract results: y, or a link where this rank gets none; then the envelope if the row has one."""
    if op.shapes is not None:
        return op.shapes(comm, params, arrays)
    y = LINK
    if op.returns(comm, params):
        like = arrays[-1]
        like_operand = op.sends(comm, params) or stacks(op)
        shape = _shape(op, comm, params, like.shape) if like_operand else like.shape
        y = _compat.ShapedArray(shape, like.dtype)
    return [y, ENVELOPE] if params.get("enveloped") else [y]


def stacks(op: Op) -> bool:
    """Whether the result is made of parts. Who gets one but sends none has the template of a part, else of the result."""
    return op.lead_out not in (None, "part")


def _shape(op: Op, comm: Any, params: Params, shape: tuple[int, ...]) -> tuple[int, ...]:
    each = shape[1:] if op.lead_in else shape
    return (_length(op.lead_out, comm, params), *each) if op.lead_out else each


def _length(lead: Lead, comm: Any, params: Params) -> int:
    if lead == "size":
        return int(comm.peers)
    if lead == "part":
        return int(params["counts"][comm.rank])
    return sum(params[str(lead)])
