"""Halo exchange: blocks of a distributed array, and the cells of their neighbours around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from jaxcomm._primitives import dtypes
from jaxcomm.arguments import operand, static
from jaxcomm.communicator import JaxCartcomm

__all__ = ["halo_exchange"]

Widths = tuple[int, int]
_MODES = ("constant", "edge", "reflect", "symmetric")


def halo_exchange(
    x: Any,
    cart: JaxCartcomm,
    width: int | Sequence[int | Widths] = 1,
    *,
    axes: Sequence[int] | None = None,
    mode: str | Callable[[Any, int, int], Any] | Sequence[Any] = "constant",
    constant_values: Any = 0,
) -> Any:
    """Return this rank's block of a distributed array with the cells of its neighbours around it.

    The result is the block of what `jnp.pad(whole, width, mode)` would be: inside, the neighbours' cells, corners
    included; at the border of the whole array, what `mode` says; where a dimension of cart is periodic, the other end.
    Blocks may differ in size. To update ghost cells that a block has already, pass it without them.

    It works under jit, vmap, scan and derivatives; its adjoint adds the cotangents of ghost cells to those of the cells
    that they were. Each axis costs two Sendrecv.

    Args:
      x: array, the block, without ghost cells.
      cart: the communicator. Its dimensions are those along which the array is cut, and know what is periodic.
      width: ghost cells on each side; one number for all axes, or for each a number or a pair (before, after). Equal on
        every rank, and no more than any block has (one less for "reflect").
      axes: the axis of x for each dimension of cart; by default dimension i is axis i.
      mode: "constant", "edge", "reflect" or "symmetric", as for jnp.pad; or a function (cells, axis, side) -> ghost cells,
        which gets x, padded along the axes before, and -1 or 1 for the side of that axis, and returns as many cells as
        the width; or one of these for each dimension.
      constant_values: the ghost cells' value for mode "constant"; a number or a scalar array.
    Returns: x, larger by the widths.
    Raises: TypeError: cart is no JaxCartcomm, traced widths. ValueError: widths, axes, mode, the shape of what mode returns.
    """
    x = jnp.asarray(operand(x, "halo_exchange: x"))
    if not isinstance(cart, JaxCartcomm):
        raise TypeError(f"halo_exchange: cart must be a JaxCartcomm (JaxComm.Create_cart makes one), got {cart!r}")
    dims = len(cart.dims)
    along = _axes(axes, dims, x.ndim)
    modes = [_mode(each) for each in _for_each(mode, dims, "mode")]
    # Not by neighbour collectives: those on a grid have messages, if empty ones, for the neighbours along every axis, and
    # cost several times as much (docs/adr/0009-neighbours.md).
    # Axis after axis: what goes along the second one includes the halo of the first, so the corners arrive too.
    for dim, (axis, widths, beyond) in enumerate(zip(along, _widths(width, dims), modes, strict=True)):
        if widths != (0, 0):
            x = _exchange(x, cart, dim, axis, widths, beyond, constant_values)
    return x


def _exchange(x: Any, cart: JaxCartcomm, dim: int, axis: int, widths: Widths, mode: Any, constant_values: Any) -> Any:
    """The halo along one axis."""
    before, after = widths
    length = x.shape[axis]
    if length < max(widths) + (mode == "reflect"):
        raise ValueError(
            f"halo_exchange: width {widths} is too much for the {length} cells of axis {axis} of {x.shape}"
        )
    below, above = cart.Shift(dim, 1)
    first, last = _cells(x, axis, 0, after), _cells(x, axis, length - before, length)
    # The template is what lies beyond the border: Sendrecv returns it where the neighbour is PROC_NULL.
    low, high = (
        _beyond(x, axis, side, width, mode, constant_values)
        if rank == MPI.PROC_NULL
        else jax.ShapeDtypeStruct(cells.shape, x.dtype)
        for rank, side, width, cells in ((below, -1, before, last), (above, 1, after, first))
    )
    up, down = 2 * dim, 2 * dim + 1
    halo = []
    if before:
        halo.append(cart.Sendrecv(last, above, up, low, below, up))
    halo.append(x)
    if after:
        halo.append(cart.Sendrecv(first, below, down, high, above, down))
    return dtypes.concatenate(halo, axis)


def _cells(x: Any, axis: int, start: int, stop: int) -> Any:
    return jax.lax.slice_in_dim(x, start, stop, axis=axis)


def _beyond(x: Any, axis: int, side: int, width: int, mode: Any, constant_values: Any) -> Any:
    """The ghost cells of a block at the border of the whole array."""
    shape = (*x.shape[:axis], width, *x.shape[axis + 1 :])
    if mode == "constant":
        return jnp.broadcast_to(jnp.asarray(constant_values, x.dtype), shape)
    if callable(mode):
        ghosts = jnp.asarray(mode(x, axis, side))
        if ghosts.shape != shape:
            raise ValueError(f"halo_exchange: mode must return ghost cells of shape {shape}, got {ghosts.shape}")
        return ghosts.astype(x.dtype)
    pads = [(0, 0)] * x.ndim
    pads[axis] = (width, 0) if side < 0 else (0, width)
    padded = jnp.pad(x, pads, mode=mode)
    return _cells(padded, axis, 0, width) if side < 0 else _cells(padded, axis, x.shape[axis], x.shape[axis] + width)


def _for_each(value: Any, dims: int, name: str) -> list[Any]:
    given = list(value) if isinstance(value, (list, tuple)) else [value] * dims
    if len(given) != dims:
        raise ValueError(f"halo_exchange: {name} must be one for each of cart's {dims} dimensions, got {len(given)}")
    return given


def _mode(mode: Any) -> Any:
    if not callable(mode) and mode not in _MODES:
        raise ValueError(f"halo_exchange: mode must be one of {', '.join(_MODES)} or a function, got {mode!r}")
    return mode


def _axes(axes: Sequence[int] | None, dims: int, ndim: int) -> list[int]:
    given = _for_each(tuple(range(dims) if axes is None else axes), dims, "axes")
    numbers = [static(axis, "halo_exchange: axes") for axis in given]
    found = [axis + ndim if axis < 0 else axis for axis in numbers]
    if any(not 0 <= axis < ndim for axis in found) or len(set(found)) < dims:
        raise ValueError(
            f"halo_exchange: axes must be {dims} different axes of x, which has {ndim}, got {tuple(numbers)}"
        )
    return found


def _widths(width: Any, dims: int) -> list[Widths]:
    found = []
    for each in _for_each(width, dims, "width"):
        pair = tuple(each) if isinstance(each, (list, tuple)) else (each, each)
        numbers = tuple(static(n, "halo_exchange: width") for n in pair)
        if len(numbers) != 2 or min(numbers) < 0:
            raise ValueError(
                f"halo_exchange: width must be a number from 0 on, or a pair (before, after), got {each!r}"
            )
        found.append((numbers[0], numbers[1]))
    return found
