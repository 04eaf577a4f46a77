"""Arrays cut along axis 0 into parts of different lengths, for ranks or neighbours: counts, displacements, message specs.

What is communicated is always packed, one part after the other. Displacements are dealt with around it, by indexing, so
that derivatives and vmap come by themselves. Keywords count rows of axis 0; the message specs of mpi4py count elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from mpi4py import MPI

from jaxcomm._primitives import _compat, dtypes, eager
from jaxcomm.arguments import alike, operand, static
from jaxcomm.token import own_array

__all__ = [
    "Finish",
    "array_of",
    "check_datatype",
    "check_own",
    "exchange",
    "parts_received",
    "parts_sent",
    "received",
    "sent",
    "static_counts",
    "template_of_part",
]

Counts = tuple[int, ...]


@jax.tree_util.register_pytree_node_class
class _Placed:
    """Puts rows `here` of what arrives into rows `there` of a template: slices, index arrays or None for all of them.

    A pytree, because it waits with a Request for what is received.
    """

    def __init__(self, template: Any, there: Any, here: Any):
        self.template, self.rows = template, (there, here)

    def __call__(self, y: Any) -> Any:
        there, here = self.rows
        if dtypes.is_nothing(y):
            return self.template
        return self.template.at[there].set(y if here is None else y[here])

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        ends = tuple((r.start, r.stop) if isinstance(r, slice) else r is None for r in self.rows)
        arrays = [r for r, end in zip(self.rows, ends, strict=True) if end is False]
        return (self.template, *arrays), ends

    @classmethod
    def tree_unflatten(cls, ends: tuple[Any, ...], children: tuple[Any, ...]) -> _Placed:
        template, *arrays = children
        left = iter(arrays)
        rows = [slice(*end) if isinstance(end, tuple) else None if end else next(left) for end in ends]
        return cls(template, *rows)


Finish = Callable[[Any], Any] | None
"""What makes the method's result of what has arrived; None if that is the result."""


# Message specs


class _Spec(NamedTuple):
    """A buffer argument. Counts and displacements are in elements: None, an int or one for each part."""

    array: Any
    counts: Any = None
    displs: Any = None
    datatype: Any = None

    @property
    def whole(self) -> bool:
        """Whether it is nothing but an array."""
        return self.counts is None and self.displs is None


def _spec(buf: Any, where: str) -> _Spec:
    """Take a message spec apart: [x, counts], [x, (counts, displs)], [x, counts, displs, datatype] ..."""
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    if not isinstance(buf, (list, tuple)) or not buf or not isinstance(buf[0], kinds):
        return _Spec(buf)
    array, *rest = buf
    if len(rest) == 1 and isinstance(rest[0], (MPI.Datatype, str)):
        rest = [None, *rest]
    counts, displs, datatype = rest if len(rest) == 3 else (*rest, None, None, None)[:3]
    if len(rest) < 3:
        displs, datatype = None, displs
        if isinstance(counts, tuple):
            counts, displs = counts if len(counts) == 2 else (counts, ())
    if len(rest) > 3 or displs == () or not isinstance(datatype, (MPI.Datatype, str, type(None))):
        raise ValueError(
            f"{where}: a message spec is [x, counts], [x, (counts, displs)], either with a datatype behind it, or "
            f"[x, counts, displs, datatype], where counts are an int or a list; got [x, {', '.join(map(repr, rest))}]"
        )
    spec = _Spec(array, counts, displs, datatype)
    check_datatype(array, datatype, where)
    return spec


def check_datatype(array: Any, datatype: MPI.Datatype | str | None, where: str) -> None:
    """Raise TypeError unless a datatype, if there is one, is that of an array's elements."""
    if datatype is None:
        return
    code = datatype if isinstance(datatype, str) else datatype.typestr
    try:
        meant = np.dtype(code)
    except TypeError:
        meant = None
    if meant not in (np.dtype(array.dtype), eager.canonical(array)):
        raise TypeError(f"{where}: the datatype of an array is that of its dtype {array.dtype}, got {code!r}")


# Counts and displacements


def _is_one(counts: Any) -> bool:
    return not isinstance(counts, (list, tuple, _compat.Tracer)) and np.ndim(counts) == 0


def static_counts(counts: Any, blocks: int, where: str) -> Counts:
    """Return what is given for each rank as a tuple; one int is for all of them."""
    if isinstance(counts, _compat.Tracer):
        raise TypeError(f"{where} must be Python ints, got a tracer; mark it static (static_argnums)")
    if _is_one(counts):
        counts = [counts] * blocks
    values = tuple(static(c, where) for c in counts)
    if len(values) != blocks:
        raise ValueError(f"{where} must have {blocks} elements, one for each part, got {len(values)}: {values}")
    if min(values, default=0) < 0:
        raise ValueError(f"{where} must not be negative, got {values}")
    return values


def _rows(elements: Counts, like: Any, where: str) -> Counts:
    """Elements of a message spec as rows of its array."""
    row = int(np.prod(like.shape[1:]))
    for n in elements:
        if n % row if row else n:
            raise ValueError(
                f"{where}: counts and displacements of a message spec are elements, and here multiples of {row}, the size "
                f"of a row of {like.dtype.name}{list(like.shape)}; got {elements}"
            )
    return tuple(n // row if row else 0 for n in elements)


def _even(array: Any, blocks: int, where: str) -> Counts:
    """The counts of an array that is cut into equal parts."""
    each, rest = divmod(array.shape[0], blocks) if blocks else (0, array.shape[0])
    if rest:
        raise ValueError(
            f"{where}: axis 0 of shape {tuple(array.shape)} cannot be cut into {blocks} equal parts; give counts, one for "
            "each part"
        )
    return (each,) * blocks


def _starts(counts: Counts) -> Counts:
    return tuple(int(n) for n in np.cumsum([0, *counts])[:-1])


def _cut(spec: _Spec, array: Any, counts: Any, blocks: int, where: str, what: str) -> tuple[Counts, Counts]:
    """Return counts and displacements of an array's parts in rows, checked against its axis 0."""
    if spec.counts is not None and counts is not None:
        raise TypeError(f"{where}: counts were given twice, in the message spec and as {what}; leave one out")
    if counts is not None:
        rows = static_counts(counts, blocks, f"{where.split(':')[0]}: {what}")
    elif spec.counts is not None:
        rows = _rows(static_counts(spec.counts, blocks, f"{where}: counts"), array, where)
    else:
        rows = _even(array, blocks, where)
    if counts is not None and spec.displs is None and sum(rows) != array.shape[0]:
        raise ValueError(
            f"{where}: {what} are rows of axis 0 and must add up to its length {array.shape[0]}, got {rows}, which add up "
            f"to {sum(rows)}"
        )
    starts = _displacements(spec, array, rows, blocks, where)
    if any(not 0 <= start <= array.shape[0] - n for start, n in zip(starts, rows, strict=True) if n):
        raise ValueError(
            f"{where}: axis 0 has {array.shape[0]} rows and does not hold counts {rows} at {starts} (in rows)"
        )
    return rows, starts


def _displacements(spec: _Spec, array: Any, rows: Counts, blocks: int, where: str) -> Counts:
    if spec.displs is None:
        return _starts(rows)
    if _is_one(spec.displs):
        stride = static(spec.displs, f"{where}: displacement")
        displs = tuple(stride * i for i in range(blocks))
    else:
        displs = static_counts(spec.displs, blocks, f"{where}: displacements")
    return _rows(displs, array, where)


# The rows that parts consist of


def _rows_of(counts: Counts, starts: Counts) -> Any:
    return np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)] or [np.arange(0)])


def _index(rows: Any, length: int) -> Any:
    """Some of so many rows: None if they are all in order, else a slice or an index array."""
    if len(rows) == length and np.array_equal(rows, np.arange(length)):
        return None
    first = int(rows[0]) if len(rows) else 0
    contiguous = np.array_equal(rows, np.arange(first, first + len(rows)))
    return slice(first, first + len(rows)) if contiguous else rows


def _take(x: Any, counts: Counts, starts: Counts) -> Any:
    index = _index(_rows_of(counts, starts), x.shape[0])
    return x if index is None else own_array(x)[index]


def _put(template: Any, counts: Counts, starts: Counts, where: str, comes: Sequence[bool] | None = None) -> Finish:
    """How what arrives gets into a template, whose other rows stay; `comes` says which parts arrive, by default all."""
    rows = _rows_of(counts, starts)
    if len(np.unique(rows)) < len(rows):
        raise ValueError(f"{where}: the parts that are received overlap: counts {counts} at {starts} (in rows)")
    arriving = np.flatnonzero(np.repeat([True] * len(counts) if comes is None else comes, counts))
    there, here = _index(rows[arriving], template.shape[0]), _index(arriving, len(rows))
    if there is None and here is None:
        return None
    return _Placed(own_array(template), there, here)


def _with_rows(array: Any, where: str, template: bool = False) -> Any:
    x = operand(array, where, template=template)
    if x.ndim == 0:
        raise ValueError(f"{where} must have an axis 0, along which it is cut into parts, got a scalar")
    return x


# What methods ask for


def _spec_of_part(buf: Any, where: str) -> _Spec:
    """As _spec; here one displacement is where the part begins, there the distance from part to part."""
    spec = _spec(buf, where)
    return spec._replace(displs=[spec.displs]) if _is_one(spec.displs) and spec.displs is not None else spec


def sent(buf: Any, where: str) -> Any:
    """Return what a rank sends as one part: an array, or the rows of it that a message spec names."""
    spec = _spec_of_part(buf, where)
    x = _with_rows(spec.array, where)
    return x if spec.whole else _take(x, *_cut(spec, x, None, 1, where, ""))


def parts_sent(buf: Any, counts: Any, blocks: int, where: str, what: str = "counts") -> tuple[Any, Counts]:
    """Return an array that a rank sends in so many parts, packed, and the rows of each."""
    spec = _spec(buf, where)
    x = _with_rows(spec.array, where)
    rows, starts = _cut(spec, x, counts, blocks, where, what)
    return _take(x, rows, starts), rows


def received(buf: Any, like: Any, shape: tuple[int, ...], where: str) -> Finish:
    """Check the template of a single part, or the rows of it that a message spec names, against what comes."""
    if buf is None or isinstance(buf, MPI.Op):
        return None
    part, finish = template_of_part(buf, f"{where}: recvbuf")
    alike(like, part, shape, where)
    return finish


def array_of(buf: Any, where: str) -> Any:
    """Return the template that a buffer argument is, or that a message spec is of."""
    return _with_rows(_spec(buf, where).array, where, template=True)


def template_of_part(buf: Any, where: str) -> tuple[Any, Finish]:
    """Return the template of a single part, and what puts the part into the array that a message spec is of."""
    spec = _spec_of_part(buf, where)
    template = _with_rows(spec.array, where, template=True)
    if spec.whole:
        return template, None
    rows, starts = _cut(spec, template, None, 1, where, "")
    return _take(template, rows, starts), _put(template, rows, starts, where)


def parts_received(
    buf: Any,
    counts: Any,
    like: Any,
    blocks: int,
    where: str,
    what: str,
    default: Counts | None,
    comes: Sequence[bool] | None = None,
) -> tuple[Counts, Finish]:
    """Return the rows of each part that a rank receives, and what puts them into recvbuf.

    Args:
      buf, counts: the arguments recvbuf and, by the name of `what`, counts.
      like: what arrives has its dtype, and rows of its shape. blocks: how many parts.
      default: where neither says how many; None if they must.
      comes: which parts arrive; by default all. recvbuf keeps the rows of the others.
    """
    if buf is None and counts is None:
        if default is None:
            raise TypeError(f"{where}: {what} (or recvbuf) must say how many rows come: see docs/ragged.md")
        return default, None
    if buf is None:
        return static_counts(counts, blocks, f"{where}: {what}"), None
    spec = _spec(buf, f"{where}: recvbuf")
    template = _with_rows(spec.array, f"{where}: recvbuf", template=True)
    alike(like, template, (template.shape[0], *like.shape[1:]), where)
    rows, starts = _cut(spec, template, counts, blocks, f"{where}: recvbuf", what)
    return rows, _put(template, rows, starts, f"{where}: recvbuf", comes)


def check_own(counts: Any, x: Any, comm: Any, where: str) -> None:
    """Raise ValueError unless this rank's operand has as many rows as counts say, if they are given."""
    if counts is None:
        return
    rows = static_counts(counts, comm.size, where)
    if rows[comm.rank] != x.shape[0]:
        raise ValueError(
            f"{where}[{comm.rank}] must be the number of rows that this rank has, {x.shape[0]}, got {rows[comm.rank]}"
        )


def exchange(comm: Any, sendcounts: Any) -> Counts:
    """Tell each rank how much it gets. See Operations.exchange_counts."""
    where = "exchange_counts: sendcounts"
    if _is_one(sendcounts):
        return tuple(comm.allgather(static_counts(sendcounts, 1, where)[0]))
    return tuple(comm.alltoall(list(static_counts(sendcounts, comm.peers, where))))
