"""The shape rule of all operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcomm._primitives import _compat
from jaxcomm._primitives.op import Op, Params
from jaxcomm.token import LINK

__all__ = ["results"]

ENVELOPE = _compat.ShapedArray((3,), np.dtype(np.int32))


def results(op: Op, comm: Any, params: Params, arrays: Sequence[Any]) -> list[_compat.ShapedArray]:
    """Return the abstract results: y, or a link where this rank gets none; then the envelope if the row has one."""
    y = LINK
    if op.returns(comm, params):
        like = arrays[-1]
        shape = like.shape[1:] if op.lead_in and op.sends(comm, params) else like.shape
        y = _compat.ShapedArray((comm.size, *shape) if op.lead_out else shape, like.dtype)
    return [y, ENVELOPE] if params.get("enveloped") else [y]
