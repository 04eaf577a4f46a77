"""Concrete arrays: the same native code, with no compilation.

Wait for what this thread has dispatched and for the operand, call MPI on the buffers with the GIL released, wrap the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, dtypes, reductions, statuses
from jaxcomm._primitives.op import Op, Params
from jaxcomm.token import LINK, flush

__all__ = ["ANY_SOURCE", "ANY_TAG", "PROC_NULL", "TAG_UB", "host_array", "run"]

ANY_SOURCE = MPI.ANY_SOURCE
ANY_TAG = MPI.ANY_TAG
PROC_NULL = MPI.PROC_NULL
TAG_UB = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)  # what MPI 4.1, 3.2.3 guarantees
_INT32 = np.dtype(np.int32)
_ALIGNMENT = 64  # what XLA's CPU client needs to take an array without copying it


def host_array(x: Any) -> np.ndarray:
    """Return x as a C-contiguous NumPy array of JAX's canonical dtype; a view where it can be."""
    array = np.asarray(x, order="C")
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype), order="C")


def run(op: Op, comm: Any, operands: Sequence[Any], params: Params) -> list[Any]:
    """Run an operation now.

    Returns: JAX arrays, on the device of the first operand that has one.
    Raises: MPI.Exception: what MPI reports; RuntimeError: what jaxcomm's native layer does.
    """
    flush()
    arrays = [host_array(x) for x in operands]
    results = _results(op, comm, params, arrays)
    codes = [dtypes.code(a.dtype) for a in (*arrays, *results)]
    try:
        bridge.call(
            NUMBERS[op.target or ""], arrays, results, codes, _attributes(op, comm, params, arrays), _status(params)
        )
    except bridge.NativeError as error:
        raise _exception(*error.args) from None
    place = _Place(operands)
    out = [place.put(x) for x in results]
    return out if op.returns(comm, params) else [place.put(np.zeros(LINK.shape, LINK.dtype)), *out]


NUMBERS = {name: bridge.operation_index(name) for name in bridge.capsules()}


def _attributes(op: Op, comm: Any, params: Params, arrays: Sequence[np.ndarray]) -> dict[str, int]:
    out = {"comm": comm.slot}
    for name, _ in op.params:
        if name == "op":
            out[name] = reductions.native(params[name], arrays[0].dtype).index
        elif name != "status":
            out[name] = int(params[name])
    return out


def _status(params: Params) -> int:
    return statuses.address(params.get("status"))


def _results(op: Op, comm: Any, params: Params, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    results = []
    if op.returns(comm, params):
        shape = arrays[-1].shape
        if op.lead_in and op.sends(comm, params):
            shape = shape[1:]
        results.append(_aligned((comm.size, *shape) if op.lead_out else shape, arrays[-1].dtype))
    return [*results, np.empty(3, np.int32)] if op.envelope else results


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.empty(count * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count * dtype.itemsize].view(dtype).reshape(shape)


def _exception(code: int, message: str) -> Exception:
    if code < 0:
        return RuntimeError(message)
    return _MPIError(code, message)


class _MPIError(MPI.Exception):
    """mpi4py's exception, which says what was being done."""

    def __new__(cls, code: int, message: str) -> Self:
        return super().__new__(cls, code)

    def __init__(self, code: int, message: str):
        super().__init__(code)
        self.message = message

    def __str__(self) -> str:
        return self.message


class _Place:
    """Where the results of a call go: the device of an operand, else JAX's default."""

    def __init__(self, operands: Sequence[Any]):
        placed = [x for x in operands if isinstance(x, jax.Array)]
        self.sharding = placed[0].sharding if placed else jax.numpy.zeros(()).sharding
        self.device = next(iter(self.sharding.device_set))

    def put(self, x: np.ndarray) -> jax.Array:
        return _compat.device_array(x, _compat.ShapedArray(x.shape, x.dtype), self.sharding, self.device)
