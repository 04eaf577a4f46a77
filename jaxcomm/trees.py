"""Pytrees as operands: a call of a method on each leaf, planned together and run as one (_primitives/trees.py)."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxcomm._primitives import _compat, dtypes, eager, make, shapes
from jaxcomm._primitives.table import TABLE
from jaxcomm._primitives.trees import BUCKET
from jaxcomm.token import own_array

__all__ = ["among", "groups", "key_of", "packed", "planned"]

# The parameters that are buffers, as mpi4py names them.
_BUFFERS = ("buf", "sendbuf", "recvbuf")
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
# What is no container: most arguments are, and cost no more than this look.
_PLAIN = (*_ARRAYS, int, float, complex, str, bytes, type(None), MPI.Op, MPI.Status)


def _is_tree(x: Any) -> bool:
    """Whether x is a pytree of arrays, and not one array, a list of numbers that becomes one, or a message spec."""
    if isinstance(x, _PLAIN):
        return False
    if type(x) in (list, tuple):
        if x and isinstance(x[0], _ARRAYS):  # [array, counts, datatype] is none, nor is [array, None]
            more = [part for part in x if part is not None]
            return all(isinstance(part, _ARRAYS) or _is_tree(part) for part in more) and len(more) > min(1, len(x) - 1)
        return not x or any(isinstance(part, _ARRAYS) or _is_tree(part) for part in x)
    leaves = jax.tree_util.tree_leaves(x)
    return not (len(leaves) == 1 and leaves[0] is x) and all(
        isinstance(leaf, (*_ARRAYS, float, int)) for leaf in leaves
    )


def among(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a buffer among a method's arguments is a tree."""
    return any(map(_is_tree, args[:2])) or any(_is_tree(kwargs.get(name)) for name in _BUFFERS)


def key_of(plan: Any, comm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]] | None:
    """Return what decides how a call on one tree of concrete JAX arrays goes, and its leaves; None if that is not all."""
    tree, *rest = args if args else (None,)
    if (
        not _is_tree(tree)
        or _compat.tracing()
        or any(not isinstance(x, (int, MPI.Op)) for x in (*rest, *kwargs.values()))
    ):
        return None
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if any(type(x) is not _compat.ArrayImpl for x in leaves) or len(leaves) < 2:
        return None
    # By handle, as there may be many objects of one op; and by object, as MPI gives the handle of a freed one to another.
    more = [(MPI._handleof(x), id(x)) if isinstance(x, MPI.Op) else x for x in (*rest, *kwargs.values())]
    return (plan, comm.slot, structure, *[(x.shape, x.dtype) for x in leaves], *more, *kwargs), leaves


def planned(
    plan: Callable[..., Any], comm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Any]:
    """Return the plan of a call for each leaf, and the structure of the result.

    Raises: ValueError: the buffers have different structures.
    """
    given = inspect.signature(plan).bind(comm, *args, **kwargs)
    trees = {name: given.arguments[name] for name in _BUFFERS if _is_tree(given.arguments.get(name))}
    structure = _one_structure(plan.__name__, trees)
    leaves = {name: jax.tree_util.tree_leaves(tree) for name, tree in trees.items()}
    plans = []
    for each in zip(*leaves.values(), strict=True):
        given.arguments.update(zip(leaves, each, strict=True))
        plans.append(plan(*given.args, **given.kwargs))
    if any(_static(other) != _static(plans[0]) for other in plans):
        raise ValueError(
            f"{plan.__name__}: counts must be the same for all leaves of a tree. In a message spec counts are a list, since "
            "[x, array] is a tree of two leaves: write [x, counts.tolist()]"
        )
    return plans, structure


def _static(plan: Any) -> dict[str, Any]:
    return {name: value for name, value in plan.params.items() if not isinstance(value, jax.Array)}


def _one_structure(where: str, trees: dict[str, Any]) -> Any:
    found = {name: jax.tree_util.tree_structure(tree) for name, tree in trees.items()}
    first = next(iter(found.values()))
    for structure in found.values():
        if structure != first:
            raise ValueError(
                f"{where}: {' and '.join(found)} must be trees of one structure, got {first} and {structure}"
            )
    return first


# Nonblocking: each group of leaves that _native/trees.hpp would pack is packed here, into one operand. Between a start and
# its wait a program carries flights and not leaves, so derivatives follow from those of the packing.


def groups(comm: Any, plans: Sequence[Any]) -> list[list[int]]:
    """Return which leaves travel together: those of one dtype, but for large ones, in the order of trees.hpp."""
    row = TABLE[plans[0].name] if plans else None
    out: list[list[int]] = []
    of_dtype: dict[Any, list[int]] = {}
    for i, plan in enumerate(plans):
        x = plan.operands[0]
        dtype = eager.canonical(x)
        if _is_large(row, comm, plan, dtypes.wire_bytes(_compat.ShapedArray(tuple(x.shape), dtype))):
            out.append([i])
        elif dtype in of_dtype:
            of_dtype[dtype].append(i)
        else:
            of_dtype[dtype] = [i]
            out.append(of_dtype[dtype])
    return out


def _is_large(row: Any, comm: Any, plan: Any, size: int) -> bool:
    if any(lead not in (None, "size") for lead in (row.lead_in, row.lead_out)):
        return False
    blocks = comm.peers if row.lead_in and row.sends(comm, plan.params) else 1
    return bool(size // blocks > BUCKET)


def packed(comm: Any, plans: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the plan of a call on all of a group, and for each leaf what makes its result of the call's."""
    first = plans[0]
    if len(plans) == 1:
        return first, [first.finish]
    row = TABLE[first.name]
    led = [make.batch_axis(row, comm, first.params, i) == 1 for i in range(row.operands)]
    operands = tuple(_joined([plan.operands[i] for plan in plans], led[i]) for i in range(row.operands))
    if not row.returns(comm, first.params):
        return first._replace(operands=operands, otherwise=None), [None] * len(plans)
    shapes_ = [shapes.results(row, comm, dict(row.params) | plan.params, plan.operands)[0].shape for plan in plans]
    width = [math.prod(shape[1:] if row.lead_out else shape) for shape in shapes_]
    stops = itertools.accumulate(width)
    cuts = [
        _Cut(plan.finish, (stop - n, stop, shape, row.lead_out is not None))
        for plan, n, stop, shape in zip(plans, width, stops, shapes_, strict=True)
    ]
    return first._replace(operands=operands, otherwise=None, finish=None), cuts


def _joined(xs: Sequence[Any], led: bool) -> Any:
    flat = [own_array(x) for x in xs]
    return dtypes.concatenate([x.reshape(x.shape[0], -1) if led else x.reshape(-1) for x in flat], axis=int(led))


@jax.tree_util.register_pytree_node_class
class _Cut:
    """Takes a leaf's result out of that of its group. A pytree, because it waits with a Request."""

    def __init__(self, finish: Any, place: tuple[int, int, tuple[int, ...], bool]):
        self.finish, self.place = finish, place

    def __call__(self, y: Any) -> Any:
        start, stop, shape, led = self.place
        part = y[:, start:stop] if led else y[start:stop]
        return part.reshape(shape) if self.finish is None else self.finish(part.reshape(shape))

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.finish,), self.place

    @classmethod
    def tree_unflatten(cls, place: Any, children: tuple[Any]) -> _Cut:
        return cls(*children, place)
