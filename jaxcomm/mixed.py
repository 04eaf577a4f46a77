"""Alltoallw and Neighbor_alltoallw: for each rank or neighbour an array of its own shape and dtype.

In mpi4py they take one buffer with a datatype and a displacement for each part. Here the parts are arrays. mpi4py's form,
(buffer, (counts, displacements in bytes), datatypes), means the same as Alltoallv where all datatypes are the array's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm import ragged
from jaxcomm._primitives import _compat, dtypes, eager, packed
from jaxcomm._primitives.nonblocking import NOTHING
from jaxcomm.arguments import operand, static, token_link
from jaxcomm.request import Request
from jaxcomm.token import Token, link, own_array

__all__ = ["exchange"]


def exchange(
    comm: Any,
    name: str,
    sendbuf: Any,
    recvbuf: Any,
    parts: int,
    comes: Sequence[bool],
    token: Token | None,
    later: bool = False,
) -> Any:
    """Run or stage a row of packed.ROWS, or what is the same with one buffer.

    Args:
      name: of the row; with a v for the w, the method for one buffer.
      parts: how many arrays go. comes: for each array that is to be received whether it comes; else the template stays.
      later: whether to start it only, and return a Request.
    """
    comm._check_alive()
    where = name.capitalize()
    one = _one_buffer(sendbuf, parts, f"{where}: sendbuf"), _one_buffer(recvbuf, len(comes), f"{where}: recvbuf")
    if None not in one:
        return getattr(comm, f"I{name[:-1]}v" if later else f"{where[:-1]}v")(*one, token=token)
    arrays = [_or_empty(operand(x, here)) for x, here in _listed(sendbuf, parts, f"{where}: sendbuf")]
    templates = [operand(x, here, template=True) for x, here in _listed(recvbuf, len(comes), f"{where}: recvbuf")]
    like = [_compat.ShapedArray(tuple(x.shape), eager.canonical(x)) for x in map(_or_empty, templates)]
    # Templates are links, as those of a receive are: a rank that sends nothing inexact has its part in the derivative.
    links = [x for x in templates if isinstance(x, _compat.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)]
    links += [] if token is None else [token_link(token, where).array]
    stays = [not comes_ or dtypes.is_nothing(x) for x, comes_ in zip(templates, comes, strict=True)]
    arrays, kept = [own_array(x) for x in arrays], Kept([own_array(x) for x in templates], stays)
    row = packed.ROWS[name]
    if later:
        flight = packed.start(row, comm, arrays, like, links)
        sent = tuple(_compat.ShapedArray(x.shape, x.dtype) for x in arrays)
        request = Request([MixedPart(flight, (), {}, name, comm, sent, tuple(like))], finish=kept)
        return request if token is None else (request, Token(link(*links, flight)))
    *ys, end = packed.bind(row, comm, arrays, like, links)
    return kept(ys) if token is None else (kept(ys), Token(link(*links, end)))


@jax.tree_util.register_pytree_node_class
class Kept:
    """Puts templates in the place of what does not come. A pytree, because it waits with a Request."""

    def __init__(self, templates: Sequence[Any], stays: Sequence[bool]):
        self.templates, self.stays = templates, stays

    def __call__(self, ys: Sequence[Any]) -> list[Any]:
        return [x if stays else y for y, x, stays in zip(ys, self.templates, self.stays, strict=True)]

    def tree_flatten(self) -> tuple[tuple[Any], tuple[bool, ...]]:
        return (list(self.templates),), tuple(self.stays)

    @classmethod
    def tree_unflatten(cls, stays: tuple[bool, ...], children: tuple[Any]) -> Kept:
        return cls(*children, stays)


class MixedPart(NamedTuple):
    """What request.Part is for the rows of the table."""

    flight: Any
    extra: tuple[Any, ...]
    scalars: dict[str, Any]
    name: str
    comm: Any
    sent: tuple[Any, ...]
    like: tuple[Any, ...]

    @property
    def returns(self) -> bool:
        return True

    def wait(self, links: Sequence[Any], keep: bool = False, chosen: bool = False, **more: Any) -> list[Any]:
        """Return [the arrays that came]."""
        if keep:
            raise NotImplementedError(f"{self.name}: Test does not give the result of lists of arrays; use Wait")
        *ys, _ = packed.wait(packed.ROWS[self.name], self.comm, self.flight, self.sent, self.like, links, chosen=chosen)
        return [ys]

    def only_if(self, told: Any) -> MixedPart:
        """The same, or nothing, for which there is nothing to wait."""
        return self._replace(flight=jnp.where(told, self.flight, NOTHING))


def _or_empty(x: Any) -> Any:
    """x; an array without elements for one of float0, which has no data."""
    return np.zeros(0, np.uint8) if dtypes.is_nothing(x) else x


def _listed(buf: Any, count: int, where: str) -> list[tuple[Any, str]]:
    """Each array with its name."""
    if not isinstance(buf, (list, tuple)):
        raise TypeError(
            f"{where} must be a list of {count} arrays, one for each part, or on both sides a message spec "
            f"(x, (counts, byte displacements), datatypes); got {type(buf).__name__}"
        )
    if len(buf) != count:
        raise ValueError(f"{where} must be a list of {count} arrays, one for each part, got {len(buf)}")
    return [(x, f"{where}[{i}]") for i, x in enumerate(buf)]


def _one_buffer(buf: Any, blocks: int, where: str) -> list[Any] | None:
    """Return a message spec of Alltoallw as one of Alltoallv; None if it is a list of arrays."""
    if not isinstance(buf, (list, tuple)) or len(buf) < 2 or not _are_datatypes(buf[-1]):
        return None
    x, *places, datatypes = buf
    if len(places) == 1:
        places = list(places[0])
    counts, displs = places if places else ([1] * blocks, [0] * blocks)
    for datatype in datatypes if isinstance(datatypes, (list, tuple)) else [datatypes]:
        ragged.check_datatype(x, datatype, where)
    displs = [static(d, f"{where}: displacements") for d in displs]
    itemsize = np.dtype(x.dtype).itemsize
    if any(d % itemsize for d in displs):
        raise ValueError(f"{where}: displacements are bytes, here multiples of {itemsize}, got {displs}")
    return [x, list(counts), [d // itemsize for d in displs], None]


def _are_datatypes(x: Any) -> bool:
    parts = x if isinstance(x, (list, tuple)) and x else [x]
    return all(isinstance(part, (MPI.Datatype, str)) for part in parts)
