"""A call's parameters as the native layer takes them: integers, and indices of its tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxcomm._native import bridge
from jaxcomm._primitives import reductions, statuses
from jaxcomm._primitives.op import TRACED, Op, Params

__all__ = ["attributes"]


def attributes(op: Op, comm: Any, params: Params, dtype: np.dtype[Any] | None) -> dict[str, int]:
    """Return {name of attributes.inc: value}; dtype is that of the operands."""
    out = {"comm": comm.slot}
    for name, _ in op.params:
        value = params[name]
        if value is TRACED:
            out[name] = bridge.TRACED
        elif isinstance(value, reductions.Reduction):
            assert dtype is not None
            out[name] = reductions.native(value, dtype).index
        elif name == "status":
            out[name] = statuses.index(value)
        else:
            out[name] = int(value)
    return out
