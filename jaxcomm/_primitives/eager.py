"""Concrete arrays: the same native code, with no compilation.

Wait for what this thread has dispatched and for the operand, call MPI on the buffers with the GIL released, wrap the
result.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, attributes, dtypes, shapes, statuses
from jaxcomm._primitives.op import Op, Params
from jaxcomm.token import LINK, flush

__all__ = ["canonical", "run", "with_shortcuts"]

# XLA's CPU client takes an array without copying it if it is aligned so; below some size a copy is cheaper than aligning.
_ALIGNMENT = 64
_SMALL = 1 << 14


def canonical(x: Any) -> np.dtype[Any]:
    """Return the dtype that an operand has for JAX, which depends on whether 64 bits are enabled."""
    return x.dtype if isinstance(x, jax.Array) else jax.dtypes.canonicalize_dtype(x.dtype)


def _host_array(x: Any) -> np.ndarray:
    """Return an operand as a C-contiguous NumPy array of its canonical dtype; a view where it can be."""
    return np.asarray(x, canonical(x), order="C")


def run(op: Op, comm: Any, operands: Sequence[Any], params: Params) -> list[Any]:
    """Run an operation now.

    Returns: JAX arrays, on the device of the first operand that has one.
    Raises: MPI.Exception: what MPI reports; RuntimeError: what jaxcomm's native layer does.
    """
    flush()
    arrays = [_host_array(x) for x in operands]
    status = statuses.address(params.get("status"))
    plan = _plan(op, comm, arrays, params | {"status": None} if status else params)
    results = [_empty(a) for a in plan.results]
    try:
        plan.native.run(arrays, results, status)
    except bridge.NativeError as error:
        raise _exception(*error.args) from None
    place = _place(operands)
    out = [_compat.device_array(x, a, *place) for x, a in zip(results, plan.results, strict=True)]
    if _record.calls is not None and not status:
        _record.calls.append(_Made(plan, operands, out, place))
    return out if plan.returns else [np.zeros(LINK.shape, LINK.dtype), *out]


class _Plan(NamedTuple):
    """What is the same for all calls with these shapes, dtypes and parameters."""

    native: bridge.Plan
    results: list[_compat.ShapedArray]
    returns: bool


_plans: dict[Any, _Plan] = {}
_MOST_PLANS = 4096


def _plan(op: Op, comm: Any, arrays: list[np.ndarray], params: Params) -> _Plan:
    key = (op.name, comm.slot, *[(a.shape, a.dtype) for a in arrays], *params.values())
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(op, comm, arrays, params)
    return plan


def _make_plan(op: Op, comm: Any, arrays: list[np.ndarray], params: Params) -> _Plan:
    results = shapes.results(op, comm, params, [_compat.ShapedArray(a.shape, a.dtype) for a in arrays])
    returns = op.returns(comm, params)
    results = results if returns else results[1:]
    number = bridge.operation_index(op.target or "")
    given = attributes.attributes(op, comm, params, arrays[0].dtype if arrays else None)
    return _Plan(bridge.Plan(number, _buffers(arrays), _buffers(results), given), results, returns)


def _buffers(arrays: Sequence[Any]) -> list[tuple[int, int]]:
    return [(math.prod(a.shape), dtypes.code(a.dtype)) for a in arrays]


def _empty(aval: _compat.ShapedArray) -> np.ndarray:
    if math.prod(aval.shape) * aval.dtype.itemsize < _SMALL:
        return np.empty(aval.shape, aval.dtype)
    return _aligned(aval)


def _aligned(aval: _compat.ShapedArray) -> np.ndarray:
    size = math.prod(aval.shape) * aval.dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(aval.dtype).reshape(aval.shape)  # type: ignore[no-any-return]


def _place(operands: Sequence[Any]) -> tuple[Any, Any, bool]:
    """Where the results of a call go: the device of an operand, else JAX's default; and whether they are bound to it."""
    for x in operands:
        if isinstance(x, jax.Array) and len(devices := x.sharding.device_set) == 1:
            return x.sharding, next(iter(devices)), x.committed
    return _default_place(jax.config.jax_default_device)


@functools.lru_cache
def _default_place(default: Any) -> tuple[Any, Any, bool]:
    device = default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
    return jax.sharding.SingleDeviceSharding(device), device, False


# Shortcuts: what a method does with arguments of one kind is seen once, and then done without Python. bridge.pyx has them.


class _Made(NamedTuple):
    """A call that was made."""

    plan: _Plan
    operands: Sequence[Any]
    out: list[Any]
    place: tuple[Any, Any, bool]


class _Record(threading.local):
    """The calls that this thread has made while a method ran; None if nobody asks."""

    calls: list[_Made] | None = None


_record = _Record()


def with_shortcuts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let calls of a communicator's method on concrete arrays, after the first of their kind, go straight to MPI."""
    shortcuts = bridge.Shortcuts()

    @functools.wraps(method)
    def call(comm: Any, *args: Any, **kwargs: Any) -> Any:
        result = shortcuts.run(comm, args, kwargs)
        if result is not bridge.MISSED:
            return result
        calls: list[_Made] = []
        outer, _record.calls = _record.calls, calls
        try:
            result = method(comm, *args, **kwargs)
        finally:
            _record.calls = outer
        if len(calls) == 1 and (shortcut := _shortcut(calls[0], args, kwargs, result)):
            shortcuts.learn(comm, args, kwargs, shortcut)
        return result

    return call


def _shortcut(made: _Made, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bridge.Shortcut | None:
    """How the call's operands and the method's result follow from the method's arguments, or None if not at a glance."""
    if not _has_one_place():
        return None
    values = [*args, *kwargs.values()]
    arrays = [v for v in values if isinstance(v, (jax.Array, np.ndarray))]
    at = [i for x in made.operands if (i := _index(arrays, x)) is not None]
    if len(at) < len(made.operands) or not all(
        a.flags.c_contiguous and a.dtype == canonical(a) for a in arrays if isinstance(a, np.ndarray)
    ):
        return None
    first = made.out[0] if made.plan.returns else None
    returns = -2 if result is None else -1 if result is first else _index(arrays, result)
    if returns is None or (returns >= 0 and not isinstance(result, jax.Array)):
        return None
    aval = made.plan.results[0] if made.plan.returns else None
    return bridge.Shortcut(made.plan.native, tuple(at), returns, aval, made.place[2], values)


def _index(arrays: list[Any], x: Any) -> int | None:
    return next((i for i, a in enumerate(arrays) if a is x), None)


@functools.cache
def _has_one_place() -> bool:
    """Whether all results go to one device; then the bridge is told of it."""
    if jax.default_backend() != "cpu" or jax.local_device_count() > 1:
        return False
    sharding, device, _ = _default_place(None)
    bridge.set_eager(
        array_type=_compat.ArrayImpl,
        op_type=MPI.Op,
        numpy_type=np.ndarray,
        x64=_compat.enable_x64,
        put=_compat.put,
        empty=_aligned,
        kept=1 << 18,
        failed=_exception,
        device=device,
        sharding=sharding,
    )
    return True


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
