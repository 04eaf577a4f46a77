"""A row of the table -> a JAX primitive: abstract evaluation, batching, JVP, transpose, lowering, eager implementation.

Nothing here knows an operation by name. If a new one seems to need that, the table lacks a column.

Operands of a primitive: the row's arrays, the traced parameters, then any number of links (see token.join).
Results: y, or a link where this rank gets none; then the envelope if the row has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, eager, lowering, reductions, shapes
from jaxcomm._primitives.op import BUFFERED, FOR_DERIVATIVES, TRACEABLE, TRACED, Adjoint, Op, Params
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
    traced = [name for name in TRACEABLE if is_array(full.get(name))]
    scalars = [full[name] for name in traced]
    return PRIMITIVES[row.name].bind(  # type: ignore[no-any-return]
        *operands, *scalars, *links, comm=comm, **full | dict.fromkeys(traced, TRACED)
    )


def is_array(x: Any) -> bool:
    return isinstance(x, _compat.ARRAYS)


def split(arrays: int, args: Sequence[Any], params: Params) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Take a primitive's operands apart: so many arrays, traced parameters by name, links."""
    names = [name for name in TRACEABLE if params.get(name) is TRACED]
    cut = arrays + len(names)
    return list(args[:arrays]), dict(zip(names, args[arrays:cut], strict=True)), list(args[cut:])


# Shapes


def _abstract(row: Op, /, *args: Any, comm: Any, **params: Any) -> tuple[list[Any], set[Any]]:
    arrays, _, _ = split(row.operands, args, params)
    return shapes.results(row, comm, params, arrays), {EFFECT, COMPANION} if row.target else set()


# Batching: the batch axis goes behind a leading axis that numbers ranks or is cut into parts for them, else to the front:
# one message for the batch. A template is like the result.
#
# A batched link makes the operation batched, and its result, link or not, is batched: so ranks agree on the message's size
# also where one of them has but a constant template.


def _batch(row: Op, args: Sequence[Any], dims: Sequence[Any], /, *, comm: Any, **params: Any) -> tuple[Any, Any]:
    _, scalars, links = split(row.operands, args, params)
    arrays, size, more = batched_operands(row, comm, args, dims, params)
    return batched_results(row, comm, params, bind(row, comm, arrays, links, **params | scalars | more), size)


def batched_operands(
    row: Op, comm: Any, args: Sequence[Any], dims: Sequence[Any], params: Params
) -> tuple[list[Any], int, Params]:
    """Return the arrays with the batch in its place, its size, and the parameters that change with it."""
    arrays, _, _ = split(row.operands, args, params)
    array_dims, scalar_dims, _ = split(row.operands, dims, params)
    refuse_mapped(row, scalar_dims)
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    at = [batch_axis(row, comm, params, i) for i in range(row.operands)]
    arrays = [moved(x, d, to, size) for x, d, to in zip(arrays, array_dims, at, strict=True)]
    return arrays, size, {"batch": params["batch"] * size} if row.envelope else {}


def refuse_mapped(row: Op, scalar_dims: Params) -> None:
    mapped = [name for name, d in scalar_dims.items() if d is not None]
    if mapped:
        raise NotImplementedError(
            f"mpi_{row.name}: {', '.join(mapped)} may not differ over a vmapped axis: a call is one message for the whole "
            "batch. Use jax.lax.map or jax.lax.scan for a message for each element. With lax.cond and a batched predicate, "
            "differentiate what vmap returns, and do not vmap a derivative: jax.grad(lambda xs: jax.vmap(f)(xs).sum())"
        )


def batched_results(row: Op, comm: Any, params: Params, outs: Sequence[Any], size: int) -> tuple[Any, Any]:
    """Return the results of a batch and where each has the batch axis."""
    y, *envelope = outs
    if not row.returns(comm, params):
        return [moved(y, None, 0, size), *envelope], [0, *[None] * len(envelope)]
    return [y, *envelope], [int(row.lead_out is not None), *[None] * len(envelope)]


def batch_axis(row: Op, comm: Any, params: Params, operand: int) -> int:
    like_operand = operand == 0 and (row.sends(comm, params) or shapes.stacks(row))
    return int((row.lead_in if like_operand else row.lead_out) is not None)


def moved(x: Any, axis: int | None, to: int, size: int) -> Any:
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


def differentiable(arrays: Sequence[Any]) -> bool:
    return bool(arrays) and all(jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in arrays)


def _jvp(row: Op, primals: Sequence[Any], tangents: Sequence[Any], /, *, comm: Any, **params: Any) -> tuple[Any, Any]:
    arrays, scalars, links = split(row.operands, primals, params)
    moving, _, dlinks = split(row.operands, tangents, params)
    dlinks = [d for d in dlinks if type(d) is not _compat.Zero]
    full = params | scalars
    n_outs = 1 + bool(params.get("enveloped"))
    y, *envelope = bind(row, comm, arrays, links, **differentiated(row, full))
    # The name is for checkpoint policies, which see a function only after it is differentiated.
    outs = [checkpoint_name(y, f"mpi_{row.name}"), *envelope]
    if not differentiable(arrays):
        return outs[:n_outs], no_tangent(row, comm, params, outs[:n_outs], dlinks)
    if not row.linear(params):
        return outs, [reduction_tangent(row, comm, full, arrays[0], moving[0], dlinks)]
    if row.adjoint is None:
        raise NotImplementedError(f"mpi_{row.name} has no derivative")
    moving = [_compat.instantiate_zeros(d) for d in moving]
    dy, *_ = bind(row, comm, moving, [*dlinks, link(outs[0])], **for_tangent(row, full, outs))
    return outs[:n_outs], [dy, *map(zero_tangent, outs[1:n_outs])]


def differentiated(row: Op, full: Params) -> Params:
    """The parameters of what is differentiated: a receive tells where its message came from, and messages keep order."""
    return with_own(row, full, enveloped=full.get("enveloped") or FOR_DERIVATIVES, differentiated=True)


def with_own(row: Op, full: Params, **given: Any) -> Params:
    """The parameters with these in their places, as far as the row has them."""
    return full | {name: given[name] for name, _ in row.params if name in given}


def zero_tangent(x: Any) -> Any:
    return _compat.Zero(jax.core.ShapedArray(x.shape, jax.dtypes.float0))


def no_tangent(row: Op, comm: Any, params: Params, outs: Sequence[Any], dlinks: Sequence[Any]) -> list[Any]:
    """Integers have no tangent and need no message; a link goes on."""
    if row.returns(comm, params):
        return [zero_tangent(x) for x in outs]
    return [link(*dlinks), *map(zero_tangent, outs[1:])]


def for_tangent(row: Op, full: Params, outs: Sequence[Any]) -> Params:
    """The tangent comes from the rank that the value really came from, under the tag that it had.

    It travels on the shadow communicator, where no receive from ANY_SOURCE can take it for a value. A send is buffered:
    a program may be sure that its message is received (Irecv, Send, Wait on every rank), but the tangent of a receive is
    not received before it is waited for.
    """
    full = with_own(
        row, full, shadow=True, mode=BUFFERED, message=-1, status=None, enveloped=False, differentiated=False
    )
    if not row.envelope:
        return full
    source, tag, received = outs[1]
    return full | {"source": source, "recvtag": tag, "received": received}


def reduction_tangent(row: Op, comm: Any, full: Params, x: Any, dx: Any, dlinks: Sequence[Any]) -> Any:
    local = reductions.local(full["op"])
    if local is None:
        raise NotImplementedError(
            f"mpi_{row.name} with op={full['op']} has no derivative; differentiable are SUM, PROD, MAX and MIN. "
            "Use jax.lax.stop_gradient on the operand if its derivative is not wanted"
        )
    collect = reductions.COLLECT[row.name]
    collector = TABLE[collect.row]
    known = collect.params(comm, full)
    given = {name: known.get(name, default) for name, default in collector.params}
    all_x, *_ = bind(collector, comm, [x], **given)
    all_dx, *_ = bind(collector, comm, [_compat.instantiate_zeros(dx)], [*dlinks, link(all_x)], **given)
    if not row.returns(comm, full):
        return link(all_dx)
    reduce_here = lambda stack: local(collect.part(stack, comm, full), axis=0)  # noqa: E731
    return jax.jvp(reduce_here, (all_x,), (all_dx,))[1]


def _transpose(row: Op, cts: Sequence[Any], /, *args: Any, comm: Any, **params: Any) -> list[Any]:
    arrays, scalars, links = split(row.operands, args, params)
    full = params | scalars
    way_back = adjoint_of(row, comm, full)
    adjoint = TABLE[way_back.name]
    check_origin(row, full)
    ct = _compat.instantiate_zeros(cts[0])
    avals = [_compat.abstract_operand(a) for a in arrays]
    zeros = [jnp.zeros(a.shape, a.dtype) for a in avals]
    # Where this rank got nothing it has no cotangent to send, and what it gets back is like its operand.
    payload, via = (ct, []) if row.returns(comm, params) else (template(adjoint, zeros[0]), [ct])
    linear = _compat.is_undefined_primal
    residual = [k for k in links if not linear(k)]
    operands = [payload, zeros[0]][: adjoint.operands]
    back, *_ = bind(adjoint, comm, operands, [*via, *residual], **way_back.params(full))
    back = way_back.then(full, back, zeros[0])
    first = back if row.sends(comm, params) else join(zeros[0], back)
    out = [first, *zeros[1:]]
    if row.envelope:
        out[-1] = rest(ct, full, out[-1])
    results = [c if linear(a) else None for a, c in zip(arrays, out, strict=True)]
    return [*results, *[None] * len(scalars), *link_cotangents(links, ct)]


def template(op: Op, like: Any) -> Any:
    """A template for a rank that gets a result and sends nothing, from an array like what it gets."""
    return like[0] if shapes.stacks(op) and op.lead_in is None else like


def adjoint_of(row: Op, comm: Any, full: Params) -> Adjoint:
    adjoint = row.adjoint_on(comm)
    if adjoint is None or not row.linear(full):
        raise NotImplementedError(f"mpi_{row.name} is not linear and cannot be transposed")
    checked = adjoint.checked and bridge.checking()
    return dataclasses.replace(adjoint, name=adjoint.checked) if checked else adjoint


def check_origin(row: Op, full: Params) -> None:
    """Refuse to transpose a receive whose sender and tag only a run would tell; a tangent knows them."""
    wildcards = {"source": ("ANY_SOURCE", MPI.ANY_SOURCE), "recvtag": ("ANY_TAG", MPI.ANY_TAG)}
    for name, (says, value) in wildcards.items() if row.envelope else ():
        if not is_array(full[name]) and full[name] == value and not _from_nobody(full):
            raise NotImplementedError(
                f"mpi_{row.name} with {says} cannot be transposed by itself: where the message came from is known only "
                "when it runs. Differentiate the function (jax.vjp, jax.grad) instead, or name source and tag"
            )


def _from_nobody(full: Params) -> bool:
    return not is_array(full["source"]) and bool(full["source"] == MPI.PROC_NULL)


# Where a receive got less than its template, the template stays, and so does its cotangent.


def rest(ct: Any, full: Params, via: Any) -> Any:
    """The cotangent of a template. Without a tangent to tell what came, all of the template is taken to have come."""
    if is_array(full["received"]):
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
_compat.register_jvp(rest_p, _rest_jvp)
_compat.primitive_transposes[rest_p] = _rest_transpose
_compat.primitive_batchers[rest_p] = _rest_batch
_compat.register_lowering(rest_p, _compat.lower_as(_rest_impl))


def primitive(
    name: str, row: Op, abstract: Any, run: Any, batch: Any, jvp: Any, transpose: Any, lower: Any = None
) -> Any:
    """Return a JAX primitive whose rules are these functions of the row."""
    made = _compat.OperationPrimitive(name)
    made.multiple_results = True
    made.def_effectful_abstract_eval(partial(abstract, row))
    made.def_impl(lambda *args, **params: run(row, *map(_compat.as_array, args), **params))
    _compat.primitive_batchers[made] = partial(batch, row)
    _compat.register_jvp(made, partial(jvp, row))
    _compat.primitive_transposes[made] = partial(transpose, row)
    if lower is not None:
        # Not cacheable: an operation knows its place, and what becomes of its operands decides on aliases.
        _compat.register_lowering(made, partial(lower, row), "cpu", cacheable=False)
    return made


def _make(row: Op) -> Any:
    lower = _lower if row.target else None
    made = primitive(f"mpi_{row.name}", row, _abstract, _run, _batch, _jvp, _transpose, lower)
    if lower is None:
        _compat.register_lowering(made, lambda context, x, *links, **params: [x])
    return made


def _run(row: Op, /, *args: Any, comm: Any, unlinked: bool, **params: Any) -> list[Any]:
    arrays, scalars, _ = split(row.operands, args, params)
    if not row.target:
        return [own_array(x) for x in arrays]
    known = {name: int(value) for name, value in scalars.items()}
    return eager.run(row, comm, arrays, params | known | ({"unlinked": True} if unlinked else {}))


def _lower(row: Op, context: Any, /, *args: Any, comm: Any, **params: Any) -> list[Any]:
    arrays, scalars, _ = split(row.operands, args, params)
    return lowering.lower(row, context, arrays, list(scalars.values()), comm, params)


PRIMITIVES = {row.name: _make(row) for row in TABLE.values()}
