"""Concrete arrays: the same native code, with no compilation.

Wait for what this thread has dispatched and for the operand, call MPI on the buffers with the GIL released, wrap the
result.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, attributes, dtypes, lowering, shapes, statuses, user_ops
from jaxcomm._primitives.op import Op, Params
from jaxcomm.token import LINK, flush

__all__ = [
    "TreeShortcuts",
    "canonical",
    "exception",
    "host_array",
    "run",
    "run_tree",
    "to_wire",
    "was_mpi4pys",
    "with_shortcuts",
]

# XLA's CPU client takes an array without copying it if it is aligned so; below some size a copy is cheaper than aligning.
_ALIGNMENT = 64
_SMALL = 1 << 14
profiled: Callable[[], bool] = jax.profiler.TraceAnnotation.is_enabled
"""Whether a profiler of JAX's runs."""


def canonical(x: Any) -> np.dtype[Any]:
    """Return the dtype that an operand has for JAX, which depends on whether 64 bits are enabled."""
    return x.dtype if isinstance(x, jax.Array) else jax.dtypes.canonicalize_dtype(x.dtype)


def host_array(x: Any) -> Any:
    """Return an operand as a C-contiguous NumPy array of its canonical dtype; a view where it can be. A key stays."""
    dtype = canonical(x)
    return np.asarray(x, dtype, order="C") if isinstance(dtype, np.dtype) else x


def run(op: Op, comm: Any, operands: Sequence[Any], params: Params) -> list[Any]:
    """Run an operation now.

    Returns: JAX arrays, on the device of the first operand that has one.
    Raises: MPI.Exception: what MPI reports; RuntimeError: what jaxcomm's native layer does.
    """
    flush()
    params = _with_site(params)
    arrays = [host_array(x) for x in operands]
    status = statuses.address(params.get("status"))
    plan = _plan(op, comm, arrays, params | {"status": None} if status else params)
    place = _place(operands)
    out = _run_plan(plan, arrays, status, place)
    if _record.calls is not None and not status:
        _record.calls.append(_Made(plan, operands, out, place))
    return out if plan.returns else [np.zeros(LINK.shape, LINK.dtype), *out]


def _with_site(params: Params) -> Params:
    """Where somebody wants to know, an operation knows its place in the user's program, as a compiled one always does."""
    if not bridge.observed() or "site" in params:
        return params
    return params | {"site": lowering.caller()}


def _run_plan(plan: _Plan, arrays: Sequence[Any], status: int, place: tuple[Any, Any, bool]) -> list[Any]:
    results = [_empty(a) for a in plan.wire]
    try:
        plan.native.run([to_wire(x) for x in arrays], results, status)
    except bridge.NativeError as error:
        raise exception(*error.args) from None
    return [_from_wire(x, a, place) for x, a in zip(results, plan.results, strict=True)]


def to_wire(x: Any) -> np.ndarray:
    """Return what travels for an array of host_array's."""
    return x if dtypes.travels_as_it_is(x.dtype) else np.asarray(dtypes.to_wire(x))


def _from_wire(x: np.ndarray, aval: _compat.ShapedArray, place: tuple[Any, Any, bool]) -> Any:
    if dtypes.is_key(aval.dtype):
        return dtypes.from_wire(_compat.device_array(x, dtypes.wire(aval), *place), aval.dtype)
    return _compat.device_array(dtypes.from_wire(x, aval.dtype), aval, *place)


def run_tree(
    row: Op, comm: Any, each: Sequence[Sequence[Any]], params: Params, more: dict[str, Any], results: Any
) -> list[Any]:
    """As run, for each of some leaves, given with their operands; `results` is the shape rule."""
    flush()
    params = _with_site(params)
    given = [[host_array(x) for x in leaf] for leaf in each]
    arrays = [x for operand in zip(*given, strict=True) for x in operand]
    status = statuses.address(params.get("status"))
    static = params | {"status": None} if status else params
    key = ("tree", row.name, comm.slot, *[(a.shape, a.dtype) for a in arrays], *static.values())
    plan = _known_plan(key, lambda: _make_tree_plan(row, comm, given, arrays, static, more, results))
    return _run_tree_plan(plan, arrays, status, [x for leaf in each for x in leaf])


def _run_tree_plan(plan: _Plan, arrays: Sequence[Any], status: int, operands: Sequence[Any]) -> list[Any]:
    made = _run_plan(plan, arrays, status, _place(operands))
    if _record.trees is not None:
        _record.trees.append((plan, operands))
    return made if plan.returns else [np.zeros(LINK.shape, LINK.dtype), *made]


class TreeShortcuts:
    """Calls on trees of concrete arrays that were made before with the same kind of arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[_Plan, bool]] = {}

    def run(self, key: Any, leaves: Sequence[Any]) -> list[Any] | None:
        """Return the results for each leaf of a call that is known."""
        known = self._known.get(key)
        if known is None:
            return None
        flush()
        plan, returns = known
        out = _run_tree_plan(plan, [host_array(x) for x in leaves], 0, leaves)
        return out if returns else list(leaves)

    def watch(self, key: Any, leaves: Sequence[Any], call: Callable[[], Any]) -> Any:
        """Make a call, and remember it if its operands are the leaves, and its results those of the row or the leaves."""
        made: list[tuple[_Plan, Sequence[Any]]] = []
        outer, _record.trees = _record.trees, made
        try:
            result = call()
        finally:
            _record.trees = outer
        if len(made) == 1 and _are(made[0][1], leaves):
            plan = made[0][0]
            kept = _are(jax.tree_util.tree_leaves(result), leaves)
            if plan.returns != kept and len(plan.results) == plan.returns * len(leaves):
                if len(self._known) >= _MOST_PLANS:
                    self._known.clear()
                self._known[key] = plan, plan.returns
        return result


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _make_tree_plan(
    row: Op, comm: Any, given: Any, arrays: Sequence[Any], params: Params, more: dict[str, Any], results: Any
) -> _Plan:
    found = results(comm, params, [[_compat.ShapedArray(a.shape, a.dtype) for a in leaf] for leaf in given])
    returns = row.returns(comm, params)
    found = found if returns else found[1:]
    attrs = _given(row, comm, params, arrays[0].dtype) | more
    return _wired(bridge.TreePlan, row, [_compat.ShapedArray(a.shape, a.dtype) for a in arrays], found, attrs, returns)


class _Plan(NamedTuple):
    """What is the same for all calls with these shapes, dtypes and parameters."""

    native: Any
    results: list[_compat.ShapedArray]
    wire: list[_compat.ShapedArray]
    returns: bool


_plans: dict[Any, _Plan] = {}
_MOST_PLANS = 4096


def _plan(op: Op, comm: Any, arrays: list[Any], params: Params) -> _Plan:
    key = (op.name, comm.slot, *[(a.shape, a.dtype) for a in arrays], *params.values())
    return _known_plan(key, lambda: _make_plan(op, comm, arrays, params))


def _known_plan(key: Any, make: Callable[[], _Plan]) -> _Plan:
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def _make_plan(op: Op, comm: Any, arrays: list[Any], params: Params) -> _Plan:
    avals = [_compat.ShapedArray(a.shape, a.dtype) for a in arrays]
    results = shapes.results(op, comm, params, avals)
    returns = op.returns(comm, params)
    results = results if returns else results[1:]
    given = _given(op, comm, params, arrays[0].dtype if arrays else None)
    return _wired(bridge.Plan, op, avals, results, given, returns)


def _given(op: Op, comm: Any, params: Params, dtype: Any) -> dict[str, Any]:
    more = {name: int(params[name]) for name in ("site", "unlinked") if params.get(name)}
    return attributes.attributes(op, comm, params, dtype) | more


def _wired(
    kind: Any,
    op: Op,
    operands: Sequence[_compat.ShapedArray],
    results: list[_compat.ShapedArray],
    given: dict[str, Any],
    returns: bool,
) -> _Plan:
    wire = [dtypes.wire(a) for a in results]
    number = bridge.operation_index(op.target or "")
    return _Plan(kind(number, _buffers(map(dtypes.wire, operands)), _buffers(wire), given), results, wire, returns)


def _buffers(arrays: Iterable[Any]) -> list[tuple[int, int]]:
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


_BUFFERS = ("buf", "sendbuf", "recvbuf")


class _Made(NamedTuple):
    """A call that was made."""

    plan: _Plan
    operands: Sequence[Any]
    out: list[Any]
    place: tuple[Any, Any, bool]


class _Record(threading.local):
    """The calls that this thread has made while a method ran, or the method of mpi4py's; None if nobody asks."""

    calls: list[Any] | None = None
    trees: list[tuple[_Plan, Sequence[Any]]] | None = None


_record = _Record()
bridge.set_profiled(profiled)
bridge.set_kinds(
    array_type=_compat.ArrayImpl, op_type=MPI.Op, numpy_type=np.ndarray, x64=_compat.enable_x64, caller=lowering.caller
)


def was_mpi4pys(method: Callable[..., Any]) -> None:
    """Note that the call at hand was done by a method of mpi4py's."""
    if _record.calls is not None:
        _record.calls.append(method)


def with_shortcuts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let calls of a communicator's method on concrete arrays, after the first of their kind, go straight to MPI."""
    shortcuts, name = bridge.Shortcuts(), f"mpi_{method.__name__.lower()}"
    _, *names = inspect.signature(method).parameters

    @functools.wraps(method)
    def call(comm: Any, *args: Any, **kwargs: Any) -> Any:
        result = shortcuts.run(comm, args, kwargs)
        if result is not bridge.MISSED:
            return result
        if not profiled() or _compat.tracing():
            return the_long_way(comm, args, kwargs)
        with jax.profiler.TraceAnnotation(name):  # as XLA calls those of compiled programs
            result = shortcuts.run(comm, args, kwargs, True)
            return result if result is not bridge.MISSED else the_long_way(comm, args, kwargs)

    def the_long_way(comm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bridge.refuse_forked()  # before JAX computes or compiles with threads that are gone
        calls: list[Any] = []
        outer, _record.calls = _record.calls, calls
        try:
            result = method(comm, *args, **kwargs)
        finally:
            _record.calls = outer
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(calls) == 1 and (how := _how(calls[0], given, result)):
            shortcuts.learn(comm, args, kwargs, how)
        return result

    return call


def _how(made: Any, given: dict[str, Any], result: Any) -> bridge.Shortcut | bridge.HostCall | None:
    """How to do again what was done with arguments of these names: `made` of `_record`, and what the method returned."""
    if isinstance(made, _Made):
        return _shortcut(made, given, result)
    return bridge.HostCall(made, [v for v in given.values() if isinstance(v, MPI.Op)])


def _shortcut(made: _Made, given: dict[str, Any], result: Any) -> bridge.Shortcut | None:
    """How the call's operands and the method's result follow from the method's arguments, or None if not at a glance."""
    if not _has_one_place():
        return None
    # An array is known by its shape. As a rank, a tag or counts, its value matters.
    if any(isinstance(v, (jax.Array, np.ndarray)) and name not in _BUFFERS for name, v in given.items()):
        return None
    values = list(given.values())
    arrays = [v for v in values if isinstance(v, (jax.Array, np.ndarray))]
    at = [i for x in made.operands if (i := _index(arrays, x)) is not None]
    if made.plan.wire != made.plan.results or not all(dtypes.travels_as_it_is(a.dtype) for a in arrays):
        return None
    if len(at) < len(made.operands) or not all(
        a.flags.c_contiguous and a.dtype == canonical(a) for a in arrays if isinstance(a, np.ndarray)
    ):
        return None
    first = made.out[0] if made.plan.returns else None
    returns = -2 if result is None else -1 if result is first else _index(arrays, result)
    if returns is None or (returns >= 0 and not isinstance(result, jax.Array)):
        return None
    aval = made.plan.results[0] if made.plan.returns else None
    keep = [v for v in values if isinstance(v, MPI.Op)]  # and no arrays, which may be large
    return bridge.Shortcut(made.plan.native, tuple(at), returns, aval, made.place[2], keep)


def _index(arrays: list[Any], x: Any) -> int | None:
    return next((i for i, a in enumerate(arrays) if a is x), None)


@functools.cache
def _has_one_place() -> bool:
    """Whether all results go to one device; then the bridge is told of it."""
    if jax.default_backend() != "cpu" or jax.local_device_count() > 1:
        return False
    sharding, device, _ = _default_place(None)
    bridge.set_eager(
        put=_compat.put,
        empty=_aligned,
        kept=1 << 18,
        failed=exception,
        device=device,
        sharding=sharding,
    )
    return True


def exception(code: int, message: str) -> BaseException:
    """Return what is raised for an error code of MPI's, or one of the native layer's."""
    if code == user_ops.FROM_OP:
        return user_ops.raised(message)
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
