"""A call's parameters as the native layer takes them: integers, lists of integers, and indices of its tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxcomm._native import bridge
from jaxcomm._primitives import reductions, statuses
from jaxcomm._primitives.op import TRACED, Op, Params

__all__ = ["ABSENT", "Attribute", "attributes"]

Attribute = int | tuple[int, ...]

ABSENT = {
    "count": -1,
    "received": -1,
    "batch": 1,
    "message": -1,
    "mode": 0,
    "reverse": 0,
    "ordered": 0,
    "shadow": 0,
    "fold": 0,
    "status": -1,
    "enveloped": 0,
    "differentiated": 0,
    "expected": 0,
    "keep": 0,
    "waits": 0,
    "matched": 0,
    "says": 0,
    "site": 0,
}
"""What the native layer takes an attribute to be that is not there. The others it names in messages if they are there."""


def attributes(op: Op, comm: Any, params: Params, dtype: np.dtype[Any] | None) -> dict[str, Attribute]:
    """Return {name of attributes.inc: value}; dtype is that of the operands."""
    out: dict[str, Attribute] = {"comm": comm.slot}
    for name, _ in op.params:
        value = params[name]
        if value is TRACED:
            out[name] = bridge.TRACED
        elif isinstance(value, reductions.Reduction):
            assert dtype is not None
            out[name] = reductions.native(value, dtype).index
        elif name == "status":
            out[name] = statuses.index(value)
        elif isinstance(value, tuple):
            out[name] = value
        else:
            out[name] = int(value)
    # Fewer attributes compile faster.
    return {name: value for name, value in out.items() if value not in (ABSENT.get(name), ())}
