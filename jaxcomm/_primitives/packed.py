"""Operations on many arrays of any shapes and dtypes at once: mpi_alltoallw, mpi_neighbor_alltoallw.

Each is one message: the arrays go as bytes, one behind the other, by a row of the table that moves bytes. Bytes have no
derivative, so these primitives have their own: the same operation on the tangents of what is inexact. All ranks know what
that is, because an array has one dtype on both ends; in its place a tangent operation has an array without elements.

Operands: the arrays, then any number of links. Results: one for each array that arrives, then a link.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcomm._primitives import _compat, dtypes, eager, make, nonblocking
from jaxcomm._primitives.adjoints import keep
from jaxcomm._primitives.op import Adjoint, Op, Params
from jaxcomm._primitives.table import TABLE
from jaxcomm.token import COMPANION, EFFECT, LINK, link, link_cotangents

__all__ = ["ROWS", "bind", "start", "wait"]

ROWS = {
    row.name: row
    for row in (
        Op(
            "alltoallw",
            "MPI 4.1, 6.8",
            native="alltoallv",
            adjoint=Adjoint("alltoallw", keep, "Alltoallw of the cotangents of what is inexact"),
        ),
        Op(
            "neighbor_alltoallw",
            "MPI 4.1, 8.6.3",
            native="neighbor_alltoallv",
            adjoint=Adjoint(
                "neighbor_alltoallw", keep, "Neighbor_alltoallw of the cotangents of what is inexact against the edges"
            ),
        ),
    )
}
_NOTHING = _compat.ShapedArray((0,), np.dtype(np.float32))


def bind(
    row: Op, comm: Any, arrays: Sequence[Any], like: Sequence[Any], links: Sequence[Any] = (), reverse: bool = False
) -> list[Any]:
    """Stage or run an operation.

    Args:
      row: of ROWS. comm: a communicator of ours.
      arrays: for each rank or outgoing edge. like: abstract values of what comes from each rank or incoming edge.
      links: as in make.bind. reverse: against the direction of the edges.
    Returns: what comes, and a link.
    """
    return PRIMITIVES[row.name].bind(  # type: ignore[no-any-return]
        *arrays, *links, comm=comm, sent=len(arrays), like=tuple(like), reverse=reverse, unlinked=False
    )


def _inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _or_nothing(avals: Sequence[Any]) -> list[Any]:
    return [a if _inexact(a) else _NOTHING for a in avals]


def _moving(tangents: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """The tangents or cotangents of what is inexact, as arrays; in the place of the others arrays without elements."""
    return [
        _compat.instantiate_zeros(d) if _inexact(x) else _zeros(_NOTHING) for d, x in zip(tangents, like, strict=True)
    ]


def _avals(arrays: Sequence[Any]) -> list[Any]:
    return [_compat.ShapedArray(tuple(a.shape), a.dtype) for a in map(_compat.abstract_operand, arrays)]


def _batched(args: Sequence[Any], dims: Sequence[Any], sent: int) -> tuple[list[Any], int]:
    """The arrays with the batch in front, and its size."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    return [make.moved(x, d, 0, size) for x, d in zip(args[:sent], dims[:sent], strict=True)], size


def _with_batch(avals: Sequence[Any], size: int) -> list[Any]:
    return [_compat.ShapedArray((size, *a.shape), a.dtype) for a in avals]


def _zeros(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype)


def _abstract(row: Op, /, *args: Any, like: tuple[Any, ...], **params: Any) -> tuple[list[Any], set[Any]]:
    return [*like, LINK], {EFFECT, COMPANION}


def _batch(
    row: Op,
    args: Sequence[Any],
    dims: Sequence[Any],
    /,
    *,
    comm: Any,
    sent: int,
    like: Any,
    reverse: bool,
    unlinked: bool,
) -> tuple[Any, Any]:
    """All arrays of all ranks have the batch: one message carries it, and its size is known on both ends."""
    arrays, size = _batched(args, dims, sent)
    *ys, end = bind(row, comm, arrays, _with_batch(like, size), args[sent:], reverse)
    return [*ys, make.moved(end, None, 0, size)], [0] * (len(ys) + 1)


def _jvp(
    row: Op, primals: Sequence[Any], tangents: Sequence[Any], /, *, comm: Any, sent: int, like: Any, reverse: bool,
    unlinked: bool,
) -> tuple[Any, Any]:  # fmt: skip
    *ys, end = bind(row, comm, primals[:sent], like, primals[sent:], reverse)
    moving = _moving(tangents[:sent], primals[:sent])
    dlinks = [d for d in tangents[sent:] if type(d) is not _compat.Zero]
    *dys, dend = bind(row, comm, moving, _or_nothing(like), [*dlinks, link(end)], reverse)
    return [*ys, end], [*(dy if _inexact(y) else make.zero_tangent(y) for y, dy in zip(ys, dys, strict=True)), dend]


def _transpose(
    row: Op, cts: Sequence[Any], /, *args: Any, comm: Any, sent: int, like: Any, reverse: bool, unlinked: bool
) -> list[Any]:
    arrays, links = args[:sent], args[sent:]
    linear = _compat.is_undefined_primal
    *given, end = cts
    end = _compat.instantiate_zeros(end)
    payload = _moving(given, like)
    residual = [k for k in links if not linear(k)]
    *back, end = bind(row, comm, payload, _or_nothing(_avals(arrays)), [end, *residual], not reverse)
    return [*(c if linear(x) else None for x, c in zip(arrays, back, strict=True)), *link_cotangents(links, end)]


# As bytes


def _joined(row: Op, comm: Any, arrays: Sequence[Any], like: Any, reverse: bool) -> tuple[Any, Params]:
    """Return the bytes of concrete arrays, put together by NumPy without compilation, and the counts."""
    given = [eager.host_array(x) for x in arrays]
    moves = TABLE[str(row.native)]
    return _packed(np, map(eager.to_wire, given)), dict(moves.params) | _counts(row, given, like, reverse)


def _taken_apart(y: Any, like: Sequence[Any]) -> list[Any]:
    return [*map(jnp.asarray, _parts(np.asarray(y), like)), np.zeros(LINK.shape, LINK.dtype)]


def _bytes(array: Any) -> Any:
    return dtypes.to_wire(array).reshape(-1).view(np.uint8)


def _parts(packed: Any, like: Sequence[Any]) -> list[Any]:
    starts = np.cumsum([0, *map(dtypes.wire_bytes, like)])
    pieces = [packed[start:stop] for start, stop in itertools.pairwise(starts)]
    return [_array(piece, a, dtypes.wire(a)) for piece, a in zip(pieces, like, strict=True)]


def _array(piece: Any, aval: Any, wire: Any) -> Any:
    if isinstance(piece, np.ndarray):
        piece = jnp.asarray(piece.view(wire.dtype).copy()) if dtypes.is_key(aval.dtype) else piece.copy()  # is aligned
    return dtypes.from_wire(piece.view(wire.dtype).reshape(wire.shape), aval.dtype)


def _kind(x: Any) -> int:
    """XLA's element type of what travels as bytes."""
    return dtypes.code(dtypes.wire(_compat.ShapedArray(tuple(x.shape), x.dtype)).dtype)


def _counts(row: Op, avals: Sequence[Any], like: Sequence[Any], reverse: bool) -> Params:
    counts: Params = {
        "sendcounts": tuple(map(dtypes.wire_bytes, avals)),
        "recvcounts": tuple(map(dtypes.wire_bytes, like)),
        "sendkinds": tuple(map(_kind, avals)),
        "recvkinds": tuple(map(_kind, like)),
    }
    return counts | ({"reverse": reverse} if "reverse" in dict(TABLE[str(row.native)].params) else {})


def _packed(xp: Any, arrays: Iterable[Any]) -> Any:
    return xp.concatenate([xp.zeros(0, np.uint8), *map(_bytes, arrays)])


def _run(row: Op, /, *args: Any, comm: Any, sent: int, like: Any, reverse: bool, unlinked: bool) -> list[Any]:
    x, params = _joined(row, comm, args[:sent], like, reverse)
    y, *_ = eager.run(TABLE[str(row.native)], comm, [x], params)
    return _taken_apart(y, like)


def _compiled(row: Op, /, *args: Any, comm: Any, sent: int, like: Any, reverse: bool, unlinked: bool) -> list[Any]:
    arrays = args[:sent]
    counts = _counts(row, arrays, like, reverse)
    y, *_ = make.bind(TABLE[str(row.native)], comm, [_packed(jnp, arrays)], unlinked=unlinked, **counts)
    return [*_parts(y, like), _zeros(LINK)]


# In two halves: what nonblocking.py is for the rows of the table


def start(
    row: Op, comm: Any, arrays: Sequence[Any], like: Sequence[Any], links: Sequence[Any] = (), reverse: bool = False
) -> Any:
    """Start an operation, with arguments as for `bind`. Returns its flight (nonblocking.py)."""
    return _STARTS[row.name].bind(
        *arrays, *links, comm=comm, sent=len(arrays), like=tuple(like), reverse=reverse, unlinked=False
    )[0]


def wait(
    row: Op,
    comm: Any,
    flight: Any,
    sent: Sequence[Any],
    like: Sequence[Any],
    links: Sequence[Any] = (),
    reverse: bool = False,
    chosen: bool = False,
) -> list[Any]:
    """Wait for it; `sent` are the abstract values of what was sent; chosen as for nonblocking.wait. Returns as `bind`."""
    return _WAITS[row.name].bind(  # type: ignore[no-any-return]
        flight, *links, comm=comm, sent=tuple(sent), like=tuple(like), reverse=reverse, chosen=chosen, unlinked=False
    )


def _abstract_start(row: Op, /, *args: Any, **params: Any) -> tuple[list[Any], set[Any]]:
    return [nonblocking.FLIGHT], {EFFECT, COMPANION}


def _batch_start(
    row: Op, args: Any, dims: Any, /, *, comm: Any, sent: int, like: Any, reverse: bool, unlinked: bool
) -> tuple[Any, Any]:
    arrays, size = _batched(args, dims, sent)
    flight = start(row, comm, arrays, _with_batch(like, size), args[sent:], reverse)
    if size == 0:
        nonblocking.end("release", comm, flight)
    return [jnp.broadcast_to(flight, (size, *flight.shape))], [0]


def _jvp_start(
    row: Op, primals: Any, tangents: Any, /, *, comm: Any, sent: int, like: Any, reverse: bool, unlinked: bool
) -> tuple[Any, Any]:
    flight = start(row, comm, primals[:sent], like, primals[sent:], reverse)
    moving = _moving(tangents[:sent], primals[:sent])
    dlinks = [d for d in tangents[sent:] if type(d) is not _compat.Zero]
    return [flight], [start(row, comm, moving, _or_nothing(like), [*dlinks, link(flight)], reverse)]


def _transpose_start(
    row: Op, cts: Any, /, *args: Any, comm: Any, sent: int, like: Any, reverse: bool, unlinked: bool
) -> list[Any]:
    arrays, links = args[:sent], args[sent:]
    linear = _compat.is_undefined_primal
    ct = _compat.instantiate_zeros(cts[0])
    residual = [k for k in links if not linear(k)]
    *back, end = wait(row, comm, ct, _or_nothing(like), _or_nothing(_avals(arrays)), residual, not reverse)
    return [*(c if linear(x) else None for x, c in zip(arrays, back, strict=True)), *link_cotangents(links, end)]


def _run_start(row: Op, /, *args: Any, comm: Any, sent: int, like: Any, reverse: bool, unlinked: bool) -> list[Any]:
    x, params = _joined(row, comm, args[:sent], like, reverse)
    return [nonblocking.start(TABLE[str(row.native)], comm, [x], **params)]


def _compiled_start(
    row: Op, /, *args: Any, comm: Any, sent: int, like: Any, reverse: bool, unlinked: bool
) -> list[Any]:
    counts = _counts(row, args[:sent], like, reverse)
    return [nonblocking.start(TABLE[str(row.native)], comm, [_packed(jnp, args[:sent])], unlinked=unlinked, **counts)]


def _batch_wait(
    row: Op, args: Any, dims: Any, /, *, comm: Any, sent: Any, like: Any, reverse: bool, chosen: bool, unlinked: bool
) -> tuple[Any, Any]:
    (flight, *links), (axis, *_) = args, dims
    if axis is None:
        outs = wait(row, comm, flight, sent, like, links, reverse, chosen)
        return outs, [None] * len(outs)
    size = flight.shape[axis]
    one = nonblocking.common(flight, axis) if size else nonblocking.NOTHING
    *ys, end = wait(row, comm, one, _with_batch(sent, size), _with_batch(like, size), links, reverse, chosen)
    return [*ys, make.moved(end, None, 0, size)], [0] * (len(ys) + 1)


def _jvp_wait(
    row: Op,
    primals: Any,
    tangents: Any,
    /,
    *,
    comm: Any,
    sent: Any,
    like: Any,
    reverse: bool,
    chosen: bool,
    unlinked: bool,
) -> tuple[Any, Any]:
    nonblocking.refuse_chosen(chosen)
    (flight, *links), (dflight, *dlinks) = primals, tangents
    *ys, end = wait(row, comm, flight, sent, like, links, reverse)
    dlinks = [d for d in dlinks if type(d) is not _compat.Zero]
    dflight = _compat.instantiate_zeros(dflight)
    *dys, dend = wait(row, comm, dflight, _or_nothing(sent), _or_nothing(like), [*dlinks, link(end)], reverse)
    return [*ys, end], [*(dy if _inexact(y) else make.zero_tangent(y) for y, dy in zip(ys, dys, strict=True)), dend]


def _transpose_wait(
    row: Op,
    cts: Any,
    /,
    flight: Any,
    *links: Any,
    comm: Any,
    sent: Any,
    like: Any,
    reverse: bool,
    chosen: bool,
    unlinked: bool,
) -> list[Any]:
    *given, end = cts
    end = _compat.instantiate_zeros(end)
    payload = _moving(given, like)
    residual = [k for k in links if not _compat.is_undefined_primal(k)]
    back = start(row, comm, payload, _or_nothing(sent), [end, *residual], not reverse)
    return [back if _compat.is_undefined_primal(flight) else None, *link_cotangents(links, back)]


def _as_bytes(avals: Sequence[Any]) -> tuple[tuple[int], np.dtype[Any]]:
    return (sum(map(dtypes.wire_bytes, avals)),), np.dtype(np.uint8)


def _waited(row: Op, flight: Any, comm: Any, sent: Any, like: Any, reverse: bool) -> Any:
    counts = _counts(row, sent, like, reverse)
    return nonblocking.wait(TABLE[str(row.native)], comm, flight, [], _as_bytes(sent), **counts)[0]


def _run_wait(
    row: Op, /, flight: Any, *links: Any, comm: Any, sent: Any, like: Any, reverse: bool, chosen: bool, unlinked: bool
) -> list[Any]:
    return _taken_apart(_waited(row, flight, comm, sent, like, reverse), like)


def _compiled_wait(
    row: Op, /, flight: Any, *links: Any, comm: Any, sent: Any, like: Any, reverse: bool, chosen: bool, unlinked: bool
) -> list[Any]:
    return [*_parts(_waited(row, flight, comm, sent, like, reverse), like), _zeros(LINK)]


def _lowered(compiled: Any) -> Any:
    """The lowering rule that runs a function on the operands."""
    return lambda row, *args, **params: _compat.lower_as(partial(compiled, row), several=True)(*args, **params)


_RULES: Any = {
    "": (_abstract, _run, _batch, _jvp, _transpose, _lowered(_compiled)),
    "start_": (_abstract_start, _run_start, _batch_start, _jvp_start, _transpose_start, _lowered(_compiled_start)),
    "wait_": (_abstract, _run_wait, _batch_wait, _jvp_wait, _transpose_wait, _lowered(_compiled_wait)),
}
PRIMITIVES, _STARTS, _WAITS = (
    {name: make.primitive(f"mpi_{half}{name}", row, *rules) for name, row in ROWS.items()}
    for half, rules in _RULES.items()
)
