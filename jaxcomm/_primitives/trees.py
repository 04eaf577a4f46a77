"""Rows of the table on many arrays at once, the leaves of a pytree: mpi_tree_<row>.

What a row does to one array, its tree does to each of its leaves, in one call; the native layer packs small leaves into one
message (_native/trees.hpp). Every rule is that of make.py, leaf by leaf. A tangent has the inexact leaves only, and both
ends of a message know which those are, since a leaf has one dtype on all ranks.

Operands of a primitive: for each of the row's operands the leaves, then traced parameters, then links. Results: for each
leaf y, or one link where this rank gets none; then the envelope if the row has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._primitives import _compat, eager, lowering, make, reductions, shapes
from jaxcomm._primitives.op import TRACEABLE, TRACED, Lead, Op, Params
from jaxcomm._primitives.table import TABLE
from jaxcomm._runtime import number
from jaxcomm.token import COMPANION, EFFECT, LINK, join, link, link_cotangents, own_array

__all__ = ["BUCKET", "bind"]

Leaves = Sequence[Sequence[Any]]
"""For each leaf the row's operands."""

BUCKET = number("JAXCOMM_BUCKET", 1 << 16)
"""Leaves of more bytes (for each rank that they go to) travel by themselves; below, a copy is cheaper than a message. Equal
on all ranks."""


def bind(row: Op, comm: Any, leaves: Leaves, links: Sequence[Any] = (), /, **params: Any) -> list[Any]:
    """Stage or run an operation, as make.bind.

    Returns: for each leaf its result, or a single link if this rank gets none; then the envelope if the row has one.
    """
    if len(leaves) == 1:
        return make.bind(row, comm, leaves[0], links, **params)
    if not row.target:  # it communicates nothing
        return [make.bind(row, comm, x, links, **params)[0] for x in leaves]
    full = {"unlinked": False} | dict(row.params) | params
    traced = [name for name in TRACEABLE if make.is_array(full.get(name))]
    arrays = [own_array(x) for operand in zip(*leaves, strict=True) for x in operand]
    args = [*arrays, *(full[name] for name in traced), *links]
    return PRIMITIVES[row.name].bind(  # type: ignore[no-any-return]
        *args, comm=comm, leaves=len(leaves), **full | dict.fromkeys(traced, TRACED)
    )


def _split(
    row: Op, leaves: int, args: Sequence[Any], params: Params
) -> tuple[list[list[Any]], dict[str, Any], list[Any]]:
    """Take a primitive's operands apart: for each leaf its operands; traced parameters by name; links."""
    arrays, scalars, links = make.split(row.operands * leaves, args, params)
    return [arrays[i::leaves] for i in range(leaves)], scalars, links


def _results(row: Op, comm: Any, params: Params, each: Leaves) -> list[_compat.ShapedArray]:
    plain = params | {"enveloped": False}
    ys = [shapes.results(row, comm, plain, x)[0] for x in each] if row.returns(comm, params) else [LINK]
    return [*ys, shapes.ENVELOPE] if params.get("enveloped") else ys


def _abstract(row: Op, /, *args: Any, comm: Any, leaves: int, **params: Any) -> tuple[list[Any], set[Any]]:
    each, _, _ = _split(row, leaves, args, params)
    return _results(row, comm, params, each), {EFFECT, COMPANION}


def _batch(
    row: Op, args: Sequence[Any], dims: Sequence[Any], /, *, comm: Any, leaves: int, **params: Any
) -> tuple[Any, Any]:
    each, scalars, links = _split(row, leaves, args, params)
    each_dims, scalar_dims, _ = _split(row, leaves, dims, params)
    make.refuse_mapped(row, scalar_dims)
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    at = [make.batch_axis(row, comm, params, i) for i in range(row.operands)]
    moved = [
        [make.moved(x, d, to, size) for x, d, to in zip(x, d, at, strict=True)]
        for x, d in zip(each, each_dims, strict=True)
    ]
    more = {"batch": params["batch"] * size} if row.envelope else {}
    outs = bind(row, comm, moved, links, **params | scalars | more)
    returns = row.returns(comm, params)
    n = leaves if returns else 1
    ys = outs[:n] if returns else [make.moved(outs[0], None, 0, size)]
    axis = int(row.lead_out is not None) if returns else 0
    return [*ys, *outs[n:]], [*[axis] * n, *[None] * len(outs[n:])]


def _jvp(
    row: Op, primals: Sequence[Any], tangents: Sequence[Any], /, *, comm: Any, leaves: int, **params: Any
) -> tuple[Any, Any]:
    each, scalars, links = _split(row, leaves, primals, params)
    moving, _, dlinks = _split(row, leaves, tangents, params)
    dlinks = [d for d in dlinks if type(d) is not _compat.Zero]
    full = params | scalars
    returns = row.returns(comm, params)
    n = leaves if returns else 1
    n_outs = n + bool(params.get("enveloped"))
    outs = bind(row, comm, each, links, **make.differentiated(row, full))
    inexact = [i for i, x in enumerate(each) if make.differentiable(x)]
    zeros = [make.zero_tangent(x) for x in outs[:n_outs]]
    if not inexact:
        return outs[:n_outs], zeros if returns else [link(*dlinks), *zeros[1:]]
    dlinks = [*dlinks, link(outs[0])]
    moving = [[_compat.instantiate_zeros(d) for d in moving[i]] for i in inexact]
    if row.linear(params):
        for_tangent = make.for_tangent(row, full, [None, outs[-1]])
        dys = bind(row, comm, moving, dlinks, **for_tangent)
    else:
        dys = _reduction_tangents(row, comm, full, [each[i] for i in inexact], moving, dlinks)
    if not returns:
        return outs[:n_outs], [dys[0], *zeros[1:]]
    for i, dy in zip(inexact, dys, strict=False):
        zeros[i] = dy
    return outs[:n_outs], zeros


def _reduction_tangents(row: Op, comm: Any, full: Params, xs: Leaves, dxs: Leaves, dlinks: Sequence[Any]) -> list[Any]:
    """As make.reduction_tangent."""
    local = reductions.local(full["op"])
    if local is None:
        raise NotImplementedError(f"mpi_{row.name} with op={full['op']} has no derivative; see its error for one array")
    collect = reductions.COLLECT[row.name]
    collector = TABLE[collect.row]
    known = collect.params(comm, full)
    given = {name: known[name] for name, _ in collector.params}
    all_xs = bind(collector, comm, xs, **given)
    all_dxs = bind(collector, comm, dxs, [*dlinks, link(all_xs[0])], **given)
    if not row.returns(comm, full):
        return [link(*all_dxs)]
    reduce_here = lambda stack: local(collect.part(stack, comm, full), axis=0)  # noqa: E731
    return [jax.jvp(reduce_here, (x,), (dx,))[1] for x, dx in zip(all_xs, all_dxs, strict=True)]


def _transpose(row: Op, cts: Sequence[Any], /, *args: Any, comm: Any, leaves: int, **params: Any) -> list[Any]:
    each, scalars, links = _split(row, leaves, args, params)
    full = params | scalars
    way_back = make.adjoint_of(row, comm, full)
    adjoint = TABLE[way_back.name]
    make.check_origin(row, full)
    linear = _compat.is_undefined_primal
    avals = [[_compat.abstract_operand(a) for a in x] for x in each]
    zeros = [[jnp.zeros(a.shape, a.dtype) for a in x] for x in avals]
    given = [_compat.instantiate_zeros(ct) for ct in cts]
    returns, sends = row.returns(comm, params), row.sends(comm, params)
    payload = given[:leaves] if returns else [make.template(adjoint, z[0]) for z in zeros]
    residual = [k for k in links if not linear(k)]
    operands = [[p, z[0]][: adjoint.operands] for p, z in zip(payload, zeros, strict=True)]
    via = residual if returns else [given[0], *residual]
    back = bind(adjoint, comm, operands, via, **way_back.params(full))
    out = [list(z) for z in zeros]
    for i in range(leaves):
        out[i][0] = way_back.then(full, back[i], zeros[i][0]) if sends else join(zeros[i][0], back[0])
        if row.envelope:
            out[i][-1] = make.rest(given[i], full, out[i][-1])
    cotangents = [c for operand in zip(*out, strict=True) for c in operand]
    arrays = [a for operand in zip(*each, strict=True) for a in operand]
    results = [c if linear(a) else None for a, c in zip(arrays, cotangents, strict=True)]
    return [*results, *[None] * len(scalars), *link_cotangents(links, given[0])]


# Blocks: how the payload of a row is cut, as trees.hpp has it


def _blocks(lead: Lead, comm: Any, params: Params) -> tuple[int, ...]:
    if lead == "size":
        return (1,) * int(comm.peers)
    return (1,) if lead in (None, "part") else tuple(params[lead])


def _native_params(row: Op, comm: Any, params: Params, dtypes: Sequence[Any]) -> dict[str, Any]:
    lead_in = row.lead_in if row.sends(comm, params) else None
    in_blocks, out_blocks = (_blocks(lead, comm, params) for lead in (lead_in, row.lead_out))
    # Ranks that have parts of different lengths could not agree on which leaves are large.
    ragged = any(lead not in (None, "size") for lead in (row.lead_in, row.lead_out))
    bucket = (1 << 62) if ragged else BUCKET
    op = params.get("op")
    ops = tuple(reductions.native(op, dtype).index for dtype in dtypes) if op else ()
    lists = {
        "kinds": tuple(map(list(dict.fromkeys(dtypes)).index, dtypes)),
        "ops": ops,
        "in_blocks": in_blocks,
        "out_blocks": out_blocks,
    }
    return {"leaves": len(dtypes), "bucket": bucket} | {name: values for name, values in lists.items() if values}


def _run(row: Op, /, *args: Any, comm: Any, leaves: int, unlinked: bool, **params: Any) -> list[Any]:
    each, scalars, _ = _split(row, leaves, args, params)
    known = params | {name: int(value) for name, value in scalars.items()}
    more = _native_params(row, comm, known, [eager.canonical(x[0]) for x in each])
    return eager.run_tree(row, comm, each, known, more, partial(_results, row))


def _lower(row: Op, context: Any, /, *args: Any, comm: Any, leaves: int, **params: Any) -> list[Any]:
    arrays, scalars, _ = make.split(row.operands * leaves, args, params)
    more = _native_params(row, comm, params, [a.dtype for a in context.avals_in[:leaves]])
    return lowering.lower_tree(row, context, arrays, list(scalars.values()), comm, params, more)


PRIMITIVES = {
    row.name: make.primitive(f"mpi_tree_{row.name}", row, _abstract, _run, _batch, _jvp, _transpose, _lower)
    for row in TABLE.values()
    if row.target and row.operands and row.shapes is None
}
