"""The arguments of operations: wrong ones are found here, before any rank enters MPI."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm._primitives import _compat, dtypes, eager, reductions
from jaxcomm._runtime import TAG_UB
from jaxcomm.token import Token

__all__ = [
    "Divided",
    "alike",
    "averaged",
    "operand",
    "peer",
    "reduction",
    "refuse_order",
    "root_rank",
    "static",
    "tag_value",
    "token_link",
]


Finish = Callable[[Any], Any] | None


def operand(x: Any, where: str, template: bool = False) -> Any:
    """Return x as something with shape and dtype that both paths take; a template may be a ShapeDtypeStruct."""
    if template and isinstance(x, jax.ShapeDtypeStruct):
        # Concrete zeros would be compiled for each new shape; a constant of a trace must not be that large.
        x = dtypes.zeros(x.shape, x.dtype, jnp if _compat.tracing() else np)
    elif x is None or isinstance(x, jax.ShapeDtypeStruct):
        kinds = "an array, a scalar or a ShapeDtypeStruct" if template else "an array or a scalar, because it is sent"
        raise TypeError(f"{where} must be {kinds}, got {x!r}")
    elif isinstance(x, (type(MPI.IN_PLACE), type(MPI.BOTTOM))):
        raise TypeError(f"{where}: {x!r} is for buffers; here results are returned, so pass the operand itself")
    elif isinstance(x, (list, tuple)) and any(isinstance(part, (MPI.Datatype, np.ndarray, jax.Array)) for part in x):
        raise TypeError(
            f"{where} must be an array, got a {type(x).__name__}: pass the array, whose dtype and size tell the rest"
        )
    elif not isinstance(x, (jax.Array, np.ndarray)):
        try:
            x = jnp.asarray(x)
        except OverflowError as error:
            raise ValueError(f"{where}: {error}; enable 64 bits (jax_enable_x64) or pass an array") from None
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where} must be an array or a scalar, got {_told(x, error)}") from None
    dtypes.check(eager.canonical(x), where)
    return x


def _traced(value: Any, where: str) -> Any:
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{where} must be an integer scalar, got {value.dtype.name}{list(value.shape)}")
    narrow, wide = jnp.iinfo(jnp.int32), jnp.iinfo(value.dtype)
    if narrow.min <= wide.min and wide.max <= narrow.max:
        return value.astype(jnp.int32)
    # What 32 bits cannot hold must stay out of range, and not become somebody else's rank: this is no rank and no tag.
    fits = (value >= max(narrow.min, wide.min)) & (value <= narrow.max)
    return jnp.where(fits, value.astype(jnp.int32), narrow.min)


def static(value: Any, where: str) -> int:
    if isinstance(value, _compat.Tracer):
        raise TypeError(f"{where} must be a Python int, got a tracer; mark it static (static_argnums)")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{where} must be a Python int, got {value!r}") from None


def peer(value: Any, size: int, where: str, wildcard: bool = False) -> Any:
    if isinstance(value, _compat.Tracer):
        return _traced(value, where)
    rank = static(value, where)
    special = rank == MPI.PROC_NULL or (wildcard and rank == MPI.ANY_SOURCE)
    if not special and not 0 <= rank < size:
        names = "MPI.ANY_SOURCE or MPI.PROC_NULL" if wildcard else "or MPI.PROC_NULL"
        raise ValueError(f"{where} must be a rank from 0 to {size - 1}, {names}, got {rank}")
    return rank


def root_rank(value: Any, size: int, where: str) -> int:
    root = static(value, where)
    if not 0 <= root < size:
        raise ValueError(f"{where} must be a rank from 0 to {size - 1}, got {root}")
    return root


def tag_value(value: Any, where: str, wildcard: bool = False) -> Any:
    if isinstance(value, _compat.Tracer):
        return _traced(value, where)
    tag = static(value, where)
    if not (wildcard and tag == MPI.ANY_TAG) and not 0 <= tag <= TAG_UB:
        names = " or be MPI.ANY_TAG" if wildcard else ""
        raise ValueError(f"{where} must lie between 0 and {TAG_UB} (MPI.TAG_UB){names}, got {tag}")
    return tag


def reduction(recvbuf: Any, op: Any, x: Any, where: str) -> reductions.Reduction:
    """The reduction, which may stand in the receive buffer's place."""
    if isinstance(recvbuf, MPI.Op):
        if op not in (MPI.SUM, recvbuf):
            raise TypeError(f"{where}: two operations were given, one in recvbuf's place and one as op; leave one out")
        op = recvbuf
    chosen = reductions.reduction(op, where)
    reductions.check(chosen, eager.canonical(x), where)
    return chosen


def averaged(
    recvbuf: Any, op: Any, x: Any, where: str, ranks: int, then: Finish = None
) -> tuple[reductions.Reduction, Finish]:
    """As reduction, also for MEAN: then the sum, and what divides it by the number of ranks that it is of."""
    if not isinstance(op, reductions.Mean) and not isinstance(recvbuf, reductions.Mean):
        return reduction(recvbuf, op, x, where), then
    if isinstance(recvbuf, MPI.Op) or (isinstance(recvbuf, reductions.Mean) and op not in (MPI.SUM, recvbuf)):
        raise TypeError(f"{where}: two operations were given, one in recvbuf's place and one as op; leave one out")
    dtype = eager.canonical(x)
    if dtypes.is_nothing(x):
        return reduction(None, MPI.SUM, x, where), then
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"{where}: op=MEAN is for floating-point and complex dtypes, got {dtype.name}")
    return reduction(None, MPI.SUM, x, where), Divided(ranks, then)


def _divided(x: Any, by: int) -> Any:
    """The quotient with the same bits in every program: compiled, a division by a constant is a multiplication as this."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_divided(jnp.real(x), by), _divided(jnp.imag(x), by))
    return x * np.asarray(1 / by, x.dtype)


@jax.tree_util.register_pytree_node_class
class Divided:
    """Makes a mean of a sum, before what else is done with it. A pytree, because it waits with a Request."""

    def __init__(self, ranks: int, then: Finish = None):
        self.ranks, self.then = ranks, then

    def __call__(self, total: Any) -> Any:
        # In float32 at least, as the number may have no place in a small dtype.
        wide = total.astype(jnp.float32) if total.dtype.itemsize <= 2 else total
        mean = _divided(wide, self.ranks).astype(total.dtype)
        return mean if self.then is None else self.then(mean)

    def tree_flatten(self) -> tuple[tuple[Any], int]:
        return (self.then,), self.ranks

    @classmethod
    def tree_unflatten(cls, ranks: int, children: tuple[Any]) -> Divided:
        return cls(ranks, *children)


def refuse_order(comm: Any, reproducible: Any, where: str) -> None:
    """Raise TypeError for reproducible=True between two groups."""
    if reproducible and comm.two_groups:
        raise TypeError(f"{where}: reproducible=True is not for an intercommunicator; merge the groups (Merge)")


def alike(x: Any, recvbuf: Any, shape: tuple[int, ...], where: str) -> None:
    """Raise ValueError unless a receive buffer, which is only a template, has the result's shape and dtype."""
    if recvbuf is None or isinstance(recvbuf, (MPI.Op, reductions.Mean)):
        return
    template = operand(recvbuf, f"{where}: recvbuf", template=True)
    have, want = (eager.canonical(a) for a in (template, x))
    if template.shape != shape or have != want:
        raise ValueError(
            f"{where}: recvbuf is a template of the result, {want.name}{list(shape)}, got {have.name}{list(template.shape)}"
        )


def _told(x: Any, error: Exception) -> str:
    """What is no array: of a tree the leaf that is none."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if path and not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            return f"{type(x).__name__} whose leaf {jax.tree_util.keystr(path)} is {type(leaf).__name__}, no array"
    if not jax.tree_util.all_leaves([x]):
        return f"{type(x).__name__}, a tree, which is not for this"
    return f"{type(x).__name__}: {error}"


def token_link(token: Any, where: str) -> Token:
    if not isinstance(token, Token):
        raise TypeError(f"{where}: token must be a jaxcomm.Token (see jaxcomm.create_token), got {token!r}")
    return token
