"""Nonblocking operations: of each row of the table two primitives, one that starts it and one that waits for it.

    flight = mpi_start_<row>(x)         y = mpi_wait_<row>(flight)

A flight is what a program carries between the two: an array of two float32 that hold the number of a request
(_native/requests.hpp). As it is an array of floats, JAX differentiates through it, and the flight of a tangent or of a
cotangent is that of a request of its own. With A' the adjoint of A, another row of the table:

    start A, wait A     is linear, as A is, and its transpose is     start A' (in wait's place), wait A' (in start's place).

Operands of start: the row's arrays, traced parameters, links; of wait: `extra`, the flight, traced parameters, links.
`extra` is what wait needs of the operands: the template of a receive, whose elements stay where nothing arrives; the
operand of a reduction that is not linear, whose derivative is taken when it is waited for.

The tangent of a receive is received when that is waited for (it is deferred), since only then it is known from whom
(MPI.ANY_SOURCE). That of a receive which differentiation added is not: it travels on the same communicator, among others
of its kind, and who sends starts both at once. Messages are told apart by their order, so who receives has to do the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._primitives import _compat, dtypes, eager, lowering, make, shapes
from jaxcomm._primitives.op import BUFFERED, TRACEABLE, TRACED, Op, Params, everyone
from jaxcomm._primitives.table import TABLE
from jaxcomm.token import COMPANION, EFFECT, join, link, link_cotangents, own_array

__all__ = [
    "CHOOSE",
    "FLIGHT",
    "NOTHING",
    "choose",
    "common",
    "end",
    "extras",
    "refuse_chosen",
    "start",
    "startable",
    "wait",
]

FLIGHT = _compat.ShapedArray((2,), np.dtype(np.float32))
NOTHING = np.array([-1, 0], np.float32)
SEVERAL = np.array([-2, 0], np.float32)
"""In the place of a request, under vmap: requests that differ within the batch, which there is no waiting for."""
"""The flight of no request at all: to wait for it gives the template, or zeros."""


def startable(row: Op) -> bool:
    """Whether an operation has a nonblocking form: Sendrecv is two of them."""
    return row.target is not None and row.operands < 2 and row.shapes is None and not row.blocking_only


@functools.cache
def _start_op(row: Op) -> Op:
    name = f"start_{row.target}"
    return dataclasses.replace(
        row,
        name=name,
        params=(*row.params, ("expected", 0), ("site", 0)),
        returns=everyone,
        envelope=False,
        alias=None,
        shapes=lambda comm, params, arrays: [FLIGHT],
        native=name,
    )


@functools.cache
def _wait_op(row: Op) -> Op:
    """As the native layer knows it: by its template, if it has one, and the flight."""
    of_receive = [(name, value) for name, value in row.params if name != "differentiated"] if row.envelope else []
    return dataclasses.replace(
        row,
        name=f"wait_{row.name}",
        params=(*of_receive, ("keep", False)),
        operands=1 + row.envelope,
        alias=0 if row.envelope else None,
        shapes=partial(_results, row),
        native="wait_recv" if row.envelope else "wait",
    )


def _results(row: Op, comm: Any, params: Params, arrays: Sequence[Any] = ()) -> list[_compat.ShapedArray]:
    operands = [_compat.ShapedArray(*params["like"])] if params["like"] else []
    return shapes.results(row, comm, params, operands)


def extras(row: Op, params: Params) -> int:
    """How many of the row's operands its wait needs."""
    return int(row.envelope or not row.linear(params))


def start(row: Op, comm: Any, operands: Sequence[Any], links: Sequence[Any] = (), /, **params: Any) -> Any:
    """Start an operation. Returns its flight."""
    if row.name not in _START:  # pvary, which is the adjoint of a sum that is shared, and communicates nothing
        raise NotImplementedError(
            "Iallreduce with replicated=True has no derivative in reverse mode, since a request cannot hold the cotangent; "
            "use Allreduce, or replicated=False"
        )
    full = {"unlinked": False, "deferred": False} | dict(row.params) | params
    avals = list(map(_compat.as_array, operands))
    y = shapes.results(row, comm, full | {"enveloped": False}, avals)[0]
    full["expected"] = math.prod(dtypes.wire(y).shape) if row.returns(comm, full) else 0
    return _bind(_START[row.name], operands, links, comm, full)[0]


def wait(
    row: Op, comm: Any, flight: Any, extra: Sequence[Any], like: Any, links: Sequence[Any] = (), /, **params: Any
) -> list[Any]:
    """Wait for an operation.

    Args:
      row: of the table. comm: a communicator of ours.
      flight: from `start`. extra: as many of the operands as `extras` says.
      like: (shape, dtype) of the operand that it was started with, None without one.
      params: as `start` was given; keep: the request may be waited for again; chosen: it is waited for because it was
        found complete, so that its result depends on when a message comes, and has no derivative.
    Returns: as make.bind.
    """
    full = {"unlinked": False, "keep": False, "chosen": False} | dict(row.params) | params | {"like": like}
    return _bind(_WAIT[row.name], [*extra, flight], links, comm, full)


def _bind(primitive: Any, operands: Sequence[Any], links: Sequence[Any], comm: Any, full: Params) -> list[Any]:
    traced = [name for name in TRACEABLE if make.is_array(full.get(name))]
    args = [*operands, *[full[name] for name in traced], *links]
    full |= dict.fromkeys(traced, TRACED)
    if _compat.tracing() or any(isinstance(x, _compat.Tracer) for x in args):
        return primitive.bind(*map(own_array, args), comm=comm, **full)  # type: ignore[no-any-return]
    return primitive.impl(*args, comm=comm, **full)  # type: ignore[no-any-return]


def _split_wait(row: Op, args: Sequence[Any], params: Params) -> tuple[list[Any], Any, dict[str, Any], list[Any]]:
    (*extra, flight), scalars, links = make.split(extras(row, params) + 1, args, params)
    return extra, flight, scalars, links


# Start


def _abstract_start(row: Op, /, *args: Any, deferred: bool, **params: Any) -> tuple[list[Any], set[Any]]:
    return [FLIGHT], set() if deferred else {EFFECT, COMPANION}


def _batch_start(
    row: Op, args: Sequence[Any], dims: Sequence[Any], /, *, comm: Any, **params: Any
) -> tuple[list[Any], list[int]]:
    arrays, scalars, links = make.split(row.operands, args, params)
    arrays, size, more = make.batched_operands(row, comm, args, dims, params)
    flight = start(row, comm, arrays, links, **params | scalars | more)
    if size == 0:  # nobody will have it
        end("release", comm, flight)
    return [jnp.broadcast_to(flight, (size, *flight.shape))], [0]


def _jvp_start(
    row: Op, primals: Sequence[Any], tangents: Sequence[Any], /, *, comm: Any, **params: Any
) -> tuple[list[Any], list[Any]]:
    arrays, scalars, links = make.split(row.operands, primals, params)
    moving, _, dlinks = make.split(row.operands, tangents, params)
    dlinks = [d for d in dlinks if type(d) is not _compat.Zero]
    full = params | scalars
    flight = start(row, comm, arrays, links, **make.differentiated(row, full))
    if not make.differentiable(arrays) or not row.linear(params):
        moved = [d for d in moving if type(d) is not _compat.Zero and d.dtype != jax.dtypes.float0]
        return [flight], [join(jnp.zeros(FLIGHT.shape, FLIGHT.dtype), *dlinks, *map(link, moved))]
    deferred = row.envelope and (params["deferred"] or not params["shadow"])
    for_tangent = make.with_own(row, full, shadow=True, mode=BUFFERED) | {"deferred": deferred}
    moving = [_compat.instantiate_zeros(d) for d in moving]
    return [flight], [start(row, comm, moving, [*dlinks, link(flight)], **for_tangent)]


def _transpose_start(row: Op, cts: Sequence[Any], /, *args: Any, comm: Any, **params: Any) -> list[Any]:
    """Wait for the adjoint, which was started in wait's place; or, if nobody waited, do all of it here."""
    arrays, scalars, links = make.split(row.operands, args, params)
    ct = _compat.instantiate_zeros(cts[0])
    full = params | scalars
    way_back = make.adjoint_of(row, comm, full)
    adjoint = TABLE[way_back.name]
    avals = [_compat.abstract_operand(a) for a in arrays]
    zeros = [jnp.zeros(a.shape, a.dtype) for a in avals]
    payload = _payload(adjoint, row, comm, full, avals)
    back, *_ = wait(
        adjoint,
        comm,
        ct,
        [jnp.zeros(payload.shape, payload.dtype)] * adjoint.envelope,
        _like(payload),
        [k for k in links if not _compat.is_undefined_primal(k)],
        **way_back.params(full),
    )
    if zeros:
        back = way_back.then(full, back, zeros[0])
    first = back if row.sends(comm, params) else join(zeros[0], back)
    results = [c if _compat.is_undefined_primal(a) else None for a, c in zip(arrays, [first], strict=False)]
    return [*results, *[None] * len(scalars), *link_cotangents(links, ct)]


def _payload(adjoint: Op, row: Op, comm: Any, full: Params, avals: Sequence[Any]) -> Any:
    """The abstract operand of the adjoint: like the result, or where there is none like the operand."""
    if not row.returns(comm, full):
        return jax.eval_shape(partial(make.template, adjoint), jnp.zeros(avals[0].shape, avals[0].dtype))
    return shapes.results(row, comm, full | {"enveloped": False}, avals)[0]


def _like(aval: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return tuple(aval.shape), np.dtype(aval.dtype)


def _run_start(row: Op, /, *args: Any, comm: Any, unlinked: bool, deferred: bool, **params: Any) -> list[Any]:
    arrays, scalars, _ = make.split(row.operands, args, params)
    if deferred:
        return [jnp.zeros(FLIGHT.shape, FLIGHT.dtype)]
    known = {name: int(value) for name, value in scalars.items()}
    return eager.run(_start_op(row), comm, arrays, params | known | {"site": lowering.caller()})


def _lower_start(row: Op, context: Any, /, *args: Any, comm: Any, deferred: bool, **params: Any) -> list[Any]:
    arrays, scalars, _ = make.split(row.operands, args, params)
    if deferred:
        return [_compat.constant(np.zeros(FLIGHT.shape, FLIGHT.dtype))]
    return lowering.lower(_start_op(row), context, arrays, list(scalars.values()), comm, params | {"site": 0})


# Wait


def _abstract_wait(row: Op, /, *args: Any, comm: Any, **params: Any) -> tuple[list[Any], set[Any]]:
    return _results(row, comm, params), {EFFECT, COMPANION}


def _batch_wait(
    row: Op, args: Sequence[Any], dims: Sequence[Any], /, *, comm: Any, like: Any, **params: Any
) -> tuple[list[Any], list[Any]]:
    extra, flight, scalars, links = _split_wait(row, args, params)
    extra_dims, axis, scalar_dims, _ = _split_wait(row, dims, params)
    if axis is None:
        make.refuse_mapped(row, scalar_dims)
        if any(d is not None for d in extra_dims):
            raise NotImplementedError(f"mpi_{row.name} was started outside of vmap and is waited for with a batch")
        outs = wait(row, comm, flight, extra, like, links, **params | scalars)
        return outs, [None] * len(outs)
    size = flight.shape[axis]
    lead = make.batch_axis(row, comm, params, 0)
    extra = [make.moved(x, d, lead, size) for x, d in zip(extra, extra_dims, strict=True)]
    if like is not None:
        like = ((*like[0][:lead], size, *like[0][lead:]), like[1])
    more = {"batch": params["batch"] * size} if row.envelope else {}
    # One operation was started for the batch, so where ranks and tags came out of vmap with one, they are all the same.
    one = common(flight, axis) if size else NOTHING
    scalars = {name: _first(x, scalar_dims[name]) for name, x in scalars.items()}
    y, *envelope = wait(row, comm, one, extra, like, links, **params | scalars | more)
    return make.batched_results(row, comm, params, [y, *envelope], size)


def common(flights: Any, axis: int) -> Any:
    """The flight of all elements of a batch; where these have different ones, SEVERAL."""
    first = _first(flights, axis)
    if flights.shape[axis] < 2:
        return first
    return jnp.where(jnp.all(flights == jnp.expand_dims(first, axis)), first, SEVERAL)


def _first(x: Any, axis: int | None) -> Any:
    if axis is None:
        return x
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return jax.lax.index_in_dim(x, 0, axis, keepdims=False) if x.shape[axis] else jnp.zeros(shape, x.dtype)


def _jvp_wait(
    row: Op, primals: Sequence[Any], tangents: Sequence[Any], /, *, comm: Any, like: Any, **params: Any
) -> tuple[list[Any], list[Any]]:
    extra, flight, scalars, links = _split_wait(row, primals, params)
    moving, dflight, _, dlinks = _split_wait(row, tangents, params)
    dlinks = [d for d in dlinks if type(d) is not _compat.Zero]
    full = params | scalars
    n_outs = 1 + bool(params.get("enveloped"))
    moves = like is not None and jnp.issubdtype(like[1], jnp.inexact)
    refuse_chosen(moves and params["chosen"])
    outs = wait(row, comm, flight, extra, like, links, **make.differentiated(row, full))
    if not moves:
        return outs[:n_outs], make.no_tangent(row, comm, params, outs[:n_outs], dlinks)
    dflight = _compat.instantiate_zeros(dflight)
    if not row.linear(params):
        dlinks = [*dlinks, dflight]
        return outs, [make.reduction_tangent(row, comm, full, extra[0], moving[0], dlinks)]
    moving = [_compat.instantiate_zeros(d) for d in moving]
    for_tangent = make.for_tangent(row, full, outs)
    dy, *_ = wait(row, comm, dflight, moving, like, [*dlinks, link(outs[0])], **for_tangent)
    return outs[:n_outs], [dy, *map(make.zero_tangent, outs[1:n_outs])]


def _transpose_wait(row: Op, cts: Sequence[Any], /, *args: Any, comm: Any, like: Any, **params: Any) -> list[Any]:
    """Start the adjoint."""
    extra, flight, scalars, links = _split_wait(row, args, params)
    full = params | scalars
    way_back = make.adjoint_of(row, comm, full)
    adjoint = TABLE[way_back.name]
    make.check_origin(row, full)
    ct = _compat.instantiate_zeros(cts[0])
    linear = _compat.is_undefined_primal
    payload, via = (ct, []) if row.returns(comm, params) else (make.template(adjoint, jnp.zeros(*like)), [ct])
    residual = [k for k in links if not linear(k)]
    back = start(adjoint, comm, [payload], [*via, *residual], **way_back.params(full))
    rest = [make.rest(ct, full, link(back)) for _ in extra]
    results = [c if linear(a) else None for a, c in zip([*extra, flight], [*rest, back], strict=True)]
    return [*results, *[None] * len(scalars), *link_cotangents(links, ct)]


def refuse_chosen(chosen: bool) -> None:
    """Raise if a result that depends on when a message comes is to be differentiated."""
    if chosen:
        raise NotImplementedError(
            "what Test, Waitany, Waitsome and their like return depends on when a message comes and has no derivative; "
            "use Wait or Waitall, Get_status for the flag alone, or jax.lax.stop_gradient on the operands"
        )


def _run_wait(row: Op, /, *args: Any, comm: Any, unlinked: bool, chosen: bool, **params: Any) -> list[Any]:
    extra, flight, scalars, _ = _split_wait(row, args, params)
    known = {name: int(value) for name, value in scalars.items()}
    return eager.run(_wait_op(row), comm, [*extra[: row.envelope], flight], params | known)


def _lower_wait(row: Op, context: Any, /, *args: Any, comm: Any, **params: Any) -> list[Any]:
    extra, flight, scalars, _ = _split_wait(row, args, params)
    given = list(scalars.values()) if row.envelope else []
    avals = [*context.avals_in[: row.envelope], FLIGHT]
    return lowering.lower(_wait_op(row), context, [*extra[: row.envelope], flight], given, comm, params, avals)


_STARTABLE = [row for row in TABLE.values() if startable(row)]
_START = {
    row.name: make.primitive(
        f"mpi_start_{row.name}",
        row,
        _abstract_start,
        _run_start,
        _batch_start,
        _jvp_start,
        _transpose_start,
        _lower_start,
    )
    for row in _STARTABLE
}
_WAIT = {
    row.name: make.primitive(
        f"mpi_wait_{row.name}",
        row,
        _abstract_wait,
        _run_wait,
        _batch_wait,
        _jvp_wait,
        _transpose_wait,
        _lower_wait,
    )
    for row in _STARTABLE
}

# What is done with requests as such. These rows have no counterpart in the table: they are about numbers, not about data.

_CHOSEN = lambda comm, params, arrays: [_compat.ShapedArray(arrays[0].shape[:1], np.dtype(np.int32))]  # noqa: E731
CHOOSE = Op("choose", "MPI 4.1, 3.7.5", params=(("waits", False), ("need", 0), ("most", 0)), shapes=_CHOSEN)
_ENDS = {
    name: Op(name, f"MPI 4.1, {chapter}", shapes=lambda comm, params, arrays: [])
    for name, chapter in {"cancel": "3.8.4", "release": "3.7.3"}.items()
}


def _plain(op: Op) -> Any:
    """A primitive that only has a value: no derivative, one call for a batch that it does not depend on.

    Operands: flights, links.
    """

    def abstract(*args: Any, comm: Any, **params: Any) -> tuple[list[Any], set[Any]]:
        return op.shapes(comm, params, args), {EFFECT, COMPANION}  # type: ignore[misc]

    def run(flights: Any, *links: Any, comm: Any, **params: Any) -> list[Any]:
        return eager.run(op, comm, [flights], params)

    def lower(context: Any, flights: Any, *links: Any, comm: Any, **params: Any) -> list[Any]:
        return lowering.lower(op, context, [flights], [], comm, params | {"unlinked": False})

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, comm: Any, **params: Any) -> tuple[Any, Any]:
        outs = primitive.bind(*primals, comm=comm, **params)
        if not outs and type(tangents[0]) is not _compat.Zero:  # what becomes of a request becomes of its tangent's too
            primitive.bind(tangents[0], link(*primals), comm=comm, **params)
        return outs, [make.zero_tangent(x) for x in outs]

    def transpose(cts: Sequence[Any], flight: Any, *links: Any, **params: Any) -> list[Any]:
        """Nobody waits for the adjoint, and there is one for each element of a batch if there was one operation for it."""
        residual = [k for k in links if not _compat.is_undefined_primal(k)]
        nobody = join(jnp.zeros(FLIGHT.shape, FLIGHT.dtype), *residual)
        return [nobody, *link_cotangents(links, nobody)]

    def batch(args: Sequence[Any], dims: Sequence[Any], *, comm: Any, **params: Any) -> tuple[Any, Any]:
        outs = primitive.bind(args[0] if dims[0] is None else common(args[0], dims[0]), comm=comm, **params)
        return outs, [None] * len(outs)

    primitive = _compat.Primitive(f"mpi_{op.name}")
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(abstract)
    primitive.def_impl(run)
    _compat.register_jvp(primitive, jvp)
    _compat.primitive_transposes[primitive] = transpose
    _compat.primitive_batchers[primitive] = batch
    _compat.register_lowering(primitive, lower, "cpu", cacheable=False)
    return primitive


_choose_p = _plain(CHOOSE)
_end_p = {name: _plain(op) for name, op in _ENDS.items()}


def choose(comm: Any, flights: Sequence[Any], *, waits: bool, need: int, most: int) -> Any:
    """Tell which of some requests are complete.

    Args:
      waits: whether to wait until `need` of those that were not told before are; else, if fewer are, none is told.
      most: how many are told at most.
    Returns: int32 (number of requests,): 0 not complete or not told, 1 told now, 2 told before, 3 waited for before.
    """
    return _choose_p.bind(jnp.stack(flights), comm=comm, waits=waits, need=need, most=most)[0]


def end(how: str, comm: Any, flight: Any) -> None:
    """Cancel a request, or release it: nobody will wait for it."""
    _end_p[how].bind(flight, comm=comm)
