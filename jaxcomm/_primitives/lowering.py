"""The custom call and the token that orders it."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, attributes, dtypes
from jaxcomm._primitives.op import Op, Params
from jaxcomm.token import EFFECT, LINK

__all__ = ["lower"]

for _name, _capsule in bridge.capsules().items():
    jax.ffi.register_ffi_target(f"jaxcomm_{_name}", _capsule, platform="cpu")


_compat.exclude_from_call_sites(os.path.dirname(os.path.dirname(__file__)))


def _origin(context: Any, params: Params) -> dict[str, attributes.Attribute]:
    """What error messages say of an operation: where it is called, and whether differentiation passed it by."""
    out: dict[str, attributes.Attribute] = {"unlinked": 1} if params["unlinked"] else {}
    place = _compat.call_site(context)
    if site := _site_number(*place) if place else _known.site:
        out["site"] = site
    return out


class _Known(threading.local):
    """The place of the call that is being compiled, 0 if it is not known."""

    site = 0


_known = _Known()


@contextmanager
def called_at(site: int) -> Iterator[None]:
    """What is compiled in a with block, and is no part of the user's program, is called from there."""
    before, _known.site = _known.site, site
    try:
        yield
    finally:
        _known.site = before


def caller() -> int:
    """The number of the place in the user's program that is calling now; 0 if there is none."""
    frame = _compat.calling_frame()
    if frame is None:
        return 0
    place = (id(frame.f_code), frame.f_lasti)
    known = _callers.get(place)
    if known is None:
        if len(_callers) >= _MOST_CALLERS:
            _callers.clear()
        known = _callers[place] = frame.f_code, _site_number(*_compat.site_of(frame))
    return known[1]


# By code object, which is kept so that no other takes its place, and position in it.
_callers: dict[tuple[int, int], tuple[types.CodeType, int]] = {}
_MOST_CALLERS = 4096
_sites: dict[int, str] = {}
_MOST_TEXT = 200


def number_of(text: str) -> int:
    """The number of a text in the table of places, which has whatever else is said of calls, too."""
    return _site_number(text, text[:_MOST_TEXT])


def _site_number(name: str, text: str) -> int:
    """A number that is the same in every process and run: it is part of the program, which may come from a cache."""
    for again in itertools.count():  # two lambdas of a function have one name
        number = int.from_bytes(hashlib.sha256(f"{name}#{again}".encode()).digest()[:7], "little")
        if _sites.setdefault(number, text) == text:
            break
    bridge.add_site(number, text)
    return number


def _aliases(op: Op, comm: Any, given: Sequence[Any], arrays: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
    """Give the result the buffer of the row's alias operand, unless that must stay.

    In a loop this spares a copy of what the loop carries. An operand that is needed afterwards XLA would copy first: the
    program's argument, a constant, what is being sent. Between two groups MPI does nothing in place.
    """
    if op.alias is None or comm.two_groups or given[op.alias].shape != results[0].shape:
        return {}
    candidate = arrays[op.alias]
    needed = _compat.must_stay(candidate) or candidate in [x for i, x in enumerate(arrays) if i != op.alias]
    return {} if needed else {op.alias: 0}


def _refuse_several_devices(op: Op, context: Any) -> None:
    if _compat.devices_of(context) > 1:
        raise ValueError(
            f"mpi_{op.name} inside a program for {_compat.devices_of(context)} devices: each device of this process would "
            "send its own message, in no defined order. Give each MPI process one device (unset "
            "--xla_force_host_platform_device_count and jax_num_cpu_devices, launch more ranks), or call jaxcomm outside "
            "shard_map and outside jit of arrays that are sharded over several devices"
        )


def _tree_aliases(
    row: Op, comm: Any, given: Sequence[Any], arrays: Sequence[Any], results: Sequence[Any]
) -> dict[int, int]:
    """As _aliases, for each leaf."""
    if row.alias is None or comm.two_groups:
        return {}
    leaves = len(arrays) // row.operands
    first, results = row.alias * leaves, results[:leaves]  # and not the envelope
    return {
        first + i: i
        for i, result in enumerate(results)
        if given[first + i].shape == result.shape
        and not _compat.must_stay(arrays[first + i])
        and arrays.count(arrays[first + i]) == 1
    }


def lower_tree(
    row: Op,
    context: Any,
    arrays: Sequence[Any],
    scalars: Sequence[Any],
    comm: Any,
    params: Params,
    more: dict[str, Any],
) -> list[Any]:
    """Emit `custom_call @jaxcomm_tree_<row>`: as lower, for many arrays; `more` is what trees.hpp wants to know."""
    given = context.avals_in[: len(arrays)]
    return _emit(row, f"tree_{row.target}", context, arrays, given, scalars, comm, params, _tree_aliases, more)


def lower(
    op: Op,
    context: Any,
    arrays: Sequence[Any],
    scalars: Sequence[Any],
    comm: Any,
    params: Params,
    avals: Sequence[Any] | None = None,
) -> list[Any]:
    """Emit `custom_call @jaxcomm_<op>` with the token; a link costs nothing at run time.

    `avals` are those of the arrays, by default the first of the primitive's.
    """
    given = context.avals_in[: len(arrays)] if avals is None else avals
    return _emit(op, op.target, context, arrays, given, scalars, comm, params, _aliases, {})


def _as_it_is(aval: Any) -> bool:
    """Keys are lowered as their words already."""
    return dtypes.travels_as_it_is(aval.dtype) or dtypes.is_key(aval.dtype)


def _to_wire(context: Any, x: Any, aval: Any) -> Any:
    if _as_it_is(aval):
        return x
    return _compat.lower_here(context, dtypes.to_wire, x, aval, dtypes.wire(aval))


def _from_wire(context: Any, x: Any, aval: Any) -> Any:
    if _as_it_is(aval):
        return x
    return _compat.lower_here(context, lambda x: dtypes.from_wire(x, aval.dtype), x, dtypes.wire(aval), aval)


def _emit(
    op: Op,
    target: str | None,
    context: Any,
    arrays: Sequence[Any],
    given: Sequence[Any],
    scalars: Sequence[Any],
    comm: Any,
    params: Params,
    aliases: Callable[..., dict[int, int]],
    more: dict[str, Any],
) -> list[Any]:
    _refuse_several_devices(op, context)
    returns = op.returns(comm, params)
    out = context.avals_out[0 if returns else 1 :]
    dtype = given[0].dtype if op.operands else None
    arrays = [_to_wire(context, x, a) for x, a in zip(arrays, given, strict=True)]
    results = _compat.custom_call(
        context,
        f"jaxcomm_{target}",
        [*arrays, *scalars],
        [dtypes.wire(a) for a in out],
        EFFECT,
        attributes.attributes(op, comm, params, dtype) | more | _origin(context, params),
        aliases(op, comm, given, arrays, out) if returns else {},
    )
    results = [_from_wire(context, x, a) for x, a in zip(results, out, strict=True)]
    return results if returns else [_compat.constant(np.zeros(LINK.shape, LINK.dtype)), *results]
