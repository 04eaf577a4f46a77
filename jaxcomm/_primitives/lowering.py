"""The custom call and the token that orders it."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, attributes
from jaxcomm._primitives.op import Op, Params
from jaxcomm.token import EFFECT, LINK

__all__ = ["lower"]

for _name, _capsule in bridge.capsules().items():
    jax.ffi.register_ffi_target(f"jaxcomm_{_name}", _capsule, platform="cpu")


_compat.exclude_from_call_sites(os.path.dirname(os.path.dirname(__file__)))


def _origin(context: Any, params: Params) -> dict[str, int]:
    """What error messages say of an operation: where it is called, and whether differentiation passed it by."""
    out = {"unlinked": 1} if params["unlinked"] else {}
    if site := _compat.call_site(context):
        out["site"] = _site_number(*site)
    return out


_sites: dict[int, str] = {}


def _site_number(name: str, text: str) -> int:
    """A number that is the same in every process and run: it is part of the program, which may come from a cache."""
    for again in itertools.count():  # two lambdas of a function have one name
        number = int.from_bytes(hashlib.sha256(f"{name}#{again}".encode()).digest()[:7], "little")
        if _sites.setdefault(number, text) == text:
            break
    bridge.add_site(number, text)
    return number


def _aliases(op: Op, context: Any, arrays: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
    """Give the result the buffer of the row's alias operand, unless that must stay.

    In a loop this spares a copy of what the loop carries. An operand that is needed afterwards XLA would copy first: the
    program's argument, a constant, what is being sent.
    """
    if op.alias is None or context.avals_in[op.alias].shape != results[0].shape:
        return {}
    candidate = arrays[op.alias]
    needed = _compat.must_stay(candidate) or candidate in [x for i, x in enumerate(arrays) if i != op.alias]
    return {} if needed else {op.alias: 0}


def lower(op: Op, context: Any, arrays: Sequence[Any], scalars: Sequence[Any], comm: Any, params: Params) -> list[Any]:
    """Emit `custom_call @jaxcomm_<op>` with the token; a link costs nothing at run time."""
    if _compat.devices_of(context) > 1:
        raise ValueError(
            f"mpi_{op.name} inside a program for {_compat.devices_of(context)} devices: each device of this process would "
            "send its own message, in no defined order. Give each MPI process one device (unset "
            "--xla_force_host_platform_device_count and jax_num_cpu_devices, launch more ranks), or call jaxcomm outside "
            "shard_map and outside jit of arrays that are sharded over several devices"
        )
    returns = op.returns(comm, params)
    avals = context.avals_out[0 if returns else 1 :]
    dtype = context.avals_in[0].dtype if op.operands else None
    aliases = _aliases(op, context, arrays, avals) if returns else {}
    results = _compat.custom_call(
        context,
        f"jaxcomm_{op.target}",
        [*arrays, *scalars],
        avals,
        EFFECT,
        attributes.attributes(op, comm, params, dtype) | _origin(context, params),
        aliases,
    )
    return results if returns else [_compat.constant(np.zeros(LINK.shape, LINK.dtype)), *results]
