"""A row of the table -> a JAX primitive: abstract evaluation, batching, JVP, transpose, lowering, eager implementation.

Nothing here knows an operation by name. If a new one seems to need that, the table lacks a column.

Operands of a primitive: the row's arrays, the traced parameters, then any number of links (see token.join).
Results: y, or a link where this rank gets none; then the envelope if the row has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from mpi4py import MPI

from jaxcomm._primitives import _compat, eager, lowering, reductions, shapes
from jaxcomm._primitives.op import TRACEABLE, TRACED, Op, Params
from jaxcomm._primitives.table import TABLE
from jaxcomm.token import COMPANION, EFFECT, join, link, link_cotangents, own_array

__all__ = ["PRIMITIVES", "bind"]


def bind(row: Op, comm: Any, operands: Sequence[Any], links: Sequence[Any] = (), /, **params: Any) -> list[Any]:
    """Stage or run an operation.

    Args:
      row: of the table.
      comm: a communicator of ours.
      operands: the row's arrays.
      links: arrays of any shape; differentiation sees the result depend on them.
      params: values of the row's parameters, static or int32 scalars; those left out take the row's default.
    Returns: [y or a link], and the envelope if the row has one.
    """
    full = {"unlinked": False} | dict(row.params) | params
    traced = [name for name in TRACEABLE if _is_array(full.get(name))]
    scalars = [full[name] for name in traced]
    return PRIMITIVES[row.name].bind(  # type: ignore[no-any-return]
        *operands, *scalars, *links, comm=comm, **full | dict.fromkeys(traced, TRACED)
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def _split(row: Op, args: Sequence[Any], params: Params) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Take a primitive's operands apart: arrays, traced parameters by name, links."""
    names = [name for name in TRACEABLE if params.get(name) is TRACED]
    cut = row.operands + len(names)
    scalars = dict(zip(names, args[row.operands : cut], strict=True))
    return list(args[: row.operands]), scalars, list(args[cut:])


# Shapes


def _abstract(row: Op, /, *args: Any, comm: Any, **params: Any) -> tuple[list[Any], set[Any]]:
    arrays, _, _ = _split(row, args, params)
    return shapes.results(row, comm, params, arrays), {EFFECT, COMPANION} if row.target else set()


# Batching: the batch axis goes behind a leading axis that numbers ranks, else to the front: one message for the batch.
#
# A batched link makes the operation batched, and its result, link or not, is batched: so ranks agree on the message's size
# also where one of them has but a constant template.


def _batch(row: Op, args: Sequence[Any], dims: Sequence[Any], /, *, comm: Any, **params: Any) -> tuple[Any, Any]:
    arrays, scalars, links = _split(row, args, params)
    array_dims, scalar_dims, _ = _split(row, dims, params)
    mapped = [name for name, d in scalar_dims.items() if d is not None]
    if mapped:
        raise NotImplementedError(
            f"mpi_{row.name}: {', '.join(mapped)} may not differ over a vmapped axis: a call is one message for the whole "
            "batch. Use jax.lax.map or jax.lax.scan for a message for each element"
        )
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    at = [_lead(row, comm, params, i) for i in range(row.operands)]
    arrays = [_moved(x, d, to, size) for x, d, to in zip(arrays, array_dims, at, strict=True)]
    more = {"batch": params["batch"] * size} if row.envelope else {}
    y, *envelope = bind(row, comm, arrays, links, **params | scalars | more)
    if not row.returns(comm, params):
        return [_moved(y, None, 0, size), *envelope], [0, *[None] * len(envelope)]
    return [y, *envelope], [int(row.lead_out is not None), *[None] * len(envelope)]


def _lead(row: Op, comm: Any, params: Params, operand: int) -> int:
    return int(bool(operand == 0 and row.lead_in and row.sends(comm, params)))


def _moved(x: Any, axis: int | None, to: int, size: int) -> Any:
    """x with its batch axis at `to`, repeated where it had none."""
    if axis is not None:
        return jnp.moveaxis(x, axis, to)
    shape = (*x.shape[:to], size, *x.shape[to:])
    return jnp.broadcast_to(jnp.expand_dims(x, to), shape)


# Derivatives
#
# A tangent operation also gets a link to the result of the operation proper, and its transpose hands that on. Where this
# rank's cotangent or tangent is a constant zero (off the root of a Gather, say) and another's is not, it is by this link
# that the next differentiation finds the operation on both, and neither waits for the other in vain.


def _differentiable(arrays: Sequence[Any]) -> bool:
    return bool(arrays) and all(jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in arrays)


def _jvp(row: Op, primals: Sequence[Any], tangents: Sequence[Any], /, *, comm: Any, **params: Any) -> tuple[Any, Any]:
    arrays, scalars, links = _split(row, primals, params)
    moving, _, dlinks = _split(row, tangents, params)
    dlinks = [d for d in dlinks if type(d) is not _compat.Zero]
    full = params | scalars
    n_outs = 1 + bool(params.get("enveloped"))
    y, *envelope = bind(row, comm, arrays, links, **full | ({"enveloped": True} if row.envelope else {}))
    # The name is for checkpoint policies, which see a function only after it is differentiated.
    outs = [checkpoint_name(y, f"mpi_{row.name}"), *envelope]
    if not _differentiable(arrays):
        return outs[:n_outs], _no_tangent(row, comm, params, outs[:n_outs], dlinks)
    if not row.linear(params):
        return outs, [_reduction_tangent(row, comm, full, arrays[0], moving[0], dlinks)]
    if row.adjoint is None:
        raise NotImplementedError(f"mpi_{row.name} has no derivative")
    moving = [_compat.instantiate_zeros(d) for d in moving]
    dy, *_ = bind(row, comm, moving, [*dlinks, link(outs[0])], **_for_tangent(row, full, outs))
    return outs[:n_outs], [dy, *map(_zero, outs[1:n_outs])]


def _zero(x: Any) -> Any:
    return _compat.Zero(jax.core.ShapedArray(x.shape, jax.dtypes.float0))


def _no_tangent(row: Op, comm: Any, params: Params, outs: Sequence[Any], dlinks: Sequence[Any]) -> list[Any]:
    """Integers have no tangent and need no message; a link goes on."""
    if row.returns(comm, params):
        return [_zero(x) for x in outs]
    return [link(*dlinks), *map(_zero, outs[1:])]


def _for_tangent(row: Op, full: Params, outs: Sequence[Any]) -> Params:
    """The tangent comes from the rank that the value really came from, under the tag that it had.

    It travels on the shadow communicator, where no receive from ANY_SOURCE can take it for a value.
    """
    if "shadow" in full:
        full = full | {"shadow": True}
    if not row.envelope:
        return full
    source, tag, received = outs[1]
    return full | {"source": source, "recvtag": tag, "received": received, "status": None, "enveloped": False}


def _reduction_tangent(row: Op, comm: Any, full: Params, x: Any, dx: Any, dlinks: Sequence[Any]) -> Any:
    local = reductions.local(full["op"])
    if local is None:
        raise NotImplementedError(
            f"mpi_{row.name} with op={full['op']} has no derivative; differentiable are SUM, PROD, MAX and MIN. "
            "Use jax.lax.stop_gradient on the operand if its derivative is not wanted"
        )
    collect, part = reductions.COLLECT[row.name]
    collector = TABLE[collect]
    given = {name: full[name] for name, _ in collector.params}
    all_x, *_ = bind(collector, comm, [x], **given)
    all_dx, *_ = bind(collector, comm, [_compat.instantiate_zeros(dx)], [*dlinks, link(all_x)], **given)
    if not row.returns(comm, full):
        return link(all_dx)
    reduce_here = lambda stack: local(part(stack, comm.rank, full.get("reverse")), axis=0)  # noqa: E731
    return jax.jvp(reduce_here, (all_x,), (all_dx,))[1]


def _transpose(row: Op, cts: Sequence[Any], /, *args: Any, comm: Any, **params: Any) -> list[Any]:
    arrays, scalars, links = _split(row, args, params)
    full = params | scalars
    if row.adjoint is None or not row.linear(params):
        raise NotImplementedError(f"mpi_{row.name} is not linear and cannot be transposed")
    adjoint = TABLE[row.adjoint.name]
    _check_origin(row, full)
    ct = _compat.instantiate_zeros(cts[0])
    avals = [_compat.abstract_operand(a) for a in arrays]
    zeros = [jnp.zeros(a.shape, a.dtype) for a in avals]
    # Where this rank got nothing it has no cotangent to send, and what it gets back is like its operand.
    payload, via = (ct, []) if row.returns(comm, params) else (zeros[0], [ct])
    linear = _compat.is_undefined_primal
    residual = [k for k in links if not linear(k)]
    operands = [payload, zeros[0]][: adjoint.operands]
    back, *_ = bind(adjoint, comm, operands, [*via, *residual], **row.adjoint.params(full))
    first = back if row.sends(comm, params) else join(zeros[0], back)
    out = [first, *zeros[1:]]
    if row.envelope:
        out[-1] = _rest(ct, full, out[-1])
    results = [c if linear(a) else None for a, c in zip(arrays, out, strict=True)]
    return [*results, *[None] * len(scalars), *link_cotangents(links, ct)]


def _check_origin(row: Op, full: Params) -> None:
    """Refuse to transpose a receive whose sender and tag only a run would tell; a tangent knows them."""
    wildcards = {"source": ("ANY_SOURCE", MPI.ANY_SOURCE), "recvtag": ("ANY_TAG", MPI.ANY_TAG)}
    for name, (says, value) in wildcards.items() if row.envelope else ():
        if not _is_array(full[name]) and full[name] == value and not _from_nobody(full):
            raise NotImplementedError(
                f"mpi_{row.name} with {says} cannot be transposed by itself: where the message came from is known only "
                "when it runs. Differentiate the function (jax.vjp, jax.grad) instead, or name source and tag"
            )


def _from_nobody(full: Params) -> bool:
    return not _is_array(full["source"]) and bool(full["source"] == MPI.PROC_NULL)


# Where a receive got less than its template, the template stays, and so does its cotangent.


def _rest(ct: Any, full: Params, via: Any) -> Any:
    """The cotangent of a template. Without a tangent to tell what came, all of the template is taken to have come."""
    if _is_array(full["received"]):
        return join(rest_p.bind(ct, full["received"]), via)
    if _from_nobody(full):
        return join(ct, via)
    return join(jnp.zeros(ct.shape, ct.dtype), via)


def _rest_impl(x: Any, received: Any) -> Any:
    kept = jnp.arange(x.size, dtype=jnp.uint32) >= jnp.where(received < 0, x.size, received).astype(jnp.uint32)
    return jnp.where(kept.reshape(x.shape), x, 0)


def _rest_transpose(ct: Any, x: Any, received: Any) -> list[Any]:
    return [rest_p.bind(_compat.instantiate_zeros(ct), received), None]


def _rest_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    (x, received), (axis, scalar_axis) = args, dims
    assert scalar_axis is None, "an envelope is one for the whole batch"
    return rest_p.bind(jnp.moveaxis(x, axis, 0), received), 0


def _rest_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    x, received = primals
    return rest_p.bind(x, received), rest_p.bind(_compat.instantiate_zeros(tangents[0]), received)


rest_p = _compat.Primitive("mpi_rest")
rest_p.def_impl(jax.jit(_rest_impl))
rest_p.def_abstract_eval(lambda x, received: _compat.ShapedArray(x.shape, x.dtype))
_compat.primitive_jvps[rest_p] = _rest_jvp
_compat.primitive_transposes[rest_p] = _rest_transpose
_compat.primitive_batchers[rest_p] = _rest_batch
_compat.register_lowering(rest_p, _compat.lower_as(_rest_impl))


def _make(row: Op) -> Any:
    primitive = _compat.OperationPrimitive(f"mpi_{row.name}")
    primitive.multiple_results = True
    rule: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: partial(f, row)  # noqa: E731
    primitive.def_effectful_abstract_eval(rule(_abstract))
    primitive.def_impl(rule(_run))
    _compat.primitive_batchers[primitive] = rule(_batch)
    _compat.primitive_jvps[primitive] = rule(_jvp)
    _compat.primitive_transposes[primitive] = rule(_transpose)
    if row.target:
        # Not cacheable: an operation knows its place, and what becomes of its operands decides on aliases.
        _compat.register_lowering(primitive, rule(_lower), "cpu", cacheable=False)
    else:
        _compat.register_lowering(primitive, lambda context, x, *links, **params: [x])
    return primitive


def _run(row: Op, /, *args: Any, comm: Any, unlinked: bool, **params: Any) -> list[Any]:
    arrays, scalars, _ = _split(row, args, params)
    if not row.target:
        return [own_array(x) for x in arrays]
    known = {name: int(value) for name, value in scalars.items()}
    return eager.run(row, comm, arrays, params | known)


def _lower(row: Op, context: Any, /, *args: Any, comm: Any, **params: Any) -> list[Any]:
    arrays, scalars, _ = _split(row, args, params)
    return lowering.lower(row, context, arrays, list(scalars.values()), comm, params)


PRIMITIVES = {row.name: _make(row) for row in TABLE.values()}
