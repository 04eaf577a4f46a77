"""Waves in a basin: the nonlinear shallow-water equations, with the grid spread over all ranks.

    mpiexec -n 2 python examples/shallow_water.py

The ranks form a two-dimensional grid of processes, each with one block of cells. In every stage of a time step a rank
sends the cells along its edges to its neighbours and receives theirs. Messages and arithmetic are one compiled program,
whose loop over the time steps runs without Python. Any number of ranks and of cells will do; the result is the same,
apart from rounding. The picture needs matplotlib.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm import JaxComm, halo_exchange

GRAVITY = 9.81  # m/s^2
DEPTH = 100.0  # of the water at rest, m
SPEED = (GRAVITY * DEPTH) ** 0.5  # of long waves, m/s
CELL = 5e3  # width of a cell, m
STEP = 0.5 * CELL / SPEED  # time step, s; stable up to 0.61 CELL / SPEED

# The state of a block is one array [eta, u, v] of shape (3, rows, columns): the height of the surface above its rest,
# at the cells' centres; the velocity to the east, on their eastern faces; that to the north, on their northern faces.
ETA, U, V = range(3)


def block(cart, rank, shape):
    """Return which rows and columns of the whole grid a rank holds. Blocks differ by at most one row or column."""
    return tuple(
        slice(n * i // parts, n * (i + 1) // parts)
        for n, i, parts in zip(shape, cart.Get_coords(rank), cart.dims, strict=True)
    )


def initial_state(cart, shape):
    """Return this rank's block of water at rest with a hump, 1 m high and 100 km wide, off the centre of the basin."""
    rows, columns = (np.arange(n)[part] for n, part in zip(shape, block(cart, cart.rank, shape), strict=True))
    y, x = np.meshgrid(rows - 0.4 * shape[0], columns - 0.3 * shape[1], indexing="ij")
    eta = np.exp(-(x**2 + y**2) * (CELL / 50e3) ** 2)
    return jnp.asarray([eta, 0 * eta, 0 * eta])


def beyond_wall(state, axis, side):
    """Return what takes the place of a neighbour's cells at a wall: the block's mirror image, without flow across it."""
    start = 0 if side < 0 else state.shape[axis] - 1
    return jax.lax.slice_in_dim(state, start, start + 1, axis=axis).at[V if axis == 1 else U].set(0)


def with_frame(cart, state):
    """Return the block in a frame of one cell: the neighbours' cells, or what takes their place at a wall."""
    return halo_exchange(state, cart, axes=(1, 2), mode=beyond_wall)


def close_walls(cart, change):
    """Keep the velocity at zero where the last faces of this block are the basin's northern or eastern wall."""
    _, to_the_north = cart.Shift(0, 1)
    _, to_the_east = cart.Shift(1, 1)
    if to_the_north == MPI.PROC_NULL:
        change = change.at[V, -1, :].set(0)
    if to_the_east == MPI.PROC_NULL:
        change = change.at[U, :, -1].set(0)
    return change


def east(a):
    return jnp.roll(a, -1, axis=1)


def west(a):
    return jnp.roll(a, 1, axis=1)


def north(a):
    return jnp.roll(a, -1, axis=0)


def south(a):
    return jnp.roll(a, 1, axis=0)


def time_derivative(cart, state, coriolis):
    """The energy-conserving scheme of Sadourny (J. Atmos. Sci. 32, 1975) on Arakawa's C grid."""
    # Values that roll wraps around reach no further than the frame, which is cut off in the end.
    eta, u, v = with_frame(cart, state)
    h = DEPTH + eta
    flux_x = u * (h + east(h)) / 2
    flux_y = v * (h + north(h)) / 2
    energy = GRAVITY * eta + (u**2 + west(u) ** 2 + v**2 + south(v) ** 2) / 4
    # Potential vorticity, at the north-eastern corners of the cells.
    vorticity = (east(v) - v - north(u) + u) / CELL
    pv = 4 * (coriolis + vorticity) / (h + east(h) + north(h) + north(east(h)))
    turn_x = pv * (flux_y + east(flux_y)) / 2
    turn_y = pv * (flux_x + north(flux_x)) / 2
    eta_change = -(flux_x - west(flux_x) + flux_y - south(flux_y)) / CELL
    u_change = (turn_x + south(turn_x)) / 2 - (east(energy) - energy) / CELL
    v_change = -(turn_y + west(turn_y)) / 2 - (north(energy) - energy) / CELL
    change = jnp.stack([eta_change, u_change, v_change])
    return close_walls(cart, change[:, 1:-1, 1:-1])


def solve(cart, state, steps, coriolis):
    """Return the state after so many steps of the third-order Runge-Kutta method of Shu and Osher."""

    def step(_, state):
        a = state + STEP * time_derivative(cart, state, coriolis)
        b = (3 * state + a + STEP * time_derivative(cart, a, coriolis)) / 4
        return (state + 2 * b + 2 * STEP * time_derivative(cart, b, coriolis)) / 3

    return jax.jit(lambda state: jax.lax.fori_loop(0, steps, step, state))(state)


def gather(cart, part, shape):
    """Return the whole grid on rank 0, and None elsewhere."""
    # The blocks differ in size, so they travel as Python objects: mpi4py's lower-case gather.
    parts = cart.gather(np.asarray(part), root=0)
    if cart.rank != 0:
        return None
    whole = np.empty(shape, part.dtype)
    for rank, part in enumerate(parts):
        whole[block(cart, rank, shape)] = part
    return whole


def save_picture(cart, eta, hours, path):
    import matplotlib.pyplot as plt

    height, width = (n * CELL / 1e3 for n in eta.shape)
    limit = 100 * np.abs(eta).max()
    figure, axes = plt.subplots(figsize=(8, 8 * height / width))
    extent = (0, width, 0, height)
    image = axes.imshow(100 * eta, origin="lower", extent=extent, cmap="RdBu_r", vmin=-limit, vmax=limit)
    for rank in range(cart.size):
        rows, columns = block(cart, rank, eta.shape)
        axes.axhline(rows.start * CELL / 1e3, color="black", linewidth=0.4, linestyle=":")
        axes.axvline(columns.start * CELL / 1e3, color="black", linewidth=0.4, linestyle=":")
    axes.set(xlabel="km", ylabel="km", title=f"Height of the surface after {hours:.1f} hours ({cart.size} blocks)")
    figure.colorbar(image, label="cm", fraction=0.03, pad=0.03)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description="Nonlinear shallow-water waves on a distributed grid.")
    parser.add_argument("--nx", type=int, default=300, help="cells from west to east (default: %(default)s)")
    parser.add_argument("--ny", type=int, default=200, help="cells from south to north (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="time steps (default: %(default)s)")
    parser.add_argument("--periodic", choices=["x", "y", "xy"], default="", help="no walls along x, y or both")
    parser.add_argument("--coriolis", type=float, default=1e-4, help="Coriolis parameter, 1/s (default: %(default)s)")
    parser.add_argument("--output", default="shallow_water.png", help="picture, or .npy file (default: %(default)s)")
    options = parser.parse_args()

    comm = JaxComm(MPI.COMM_WORLD)
    shape = options.ny, options.nx
    processes = MPI.Compute_dims(comm.size, 2)
    if processes[0] > shape[0] or processes[1] > shape[1]:
        sys.exit(f"{processes[0]} x {processes[1]} ranks are too many for {shape[0]} x {shape[1]} cells")
    cart = comm.Create_cart(processes, periods=["y" in options.periodic, "x" in options.periodic])
    if cart.rank == 0:
        print(
            f"Solving the shallow-water equations on {shape[0]} x {shape[1]} cells, {options.steps} steps, "
            f"on {processes[0]} x {processes[1]} ranks.",
            flush=True,
        )

    start = time.perf_counter()
    before = initial_state(cart, shape)
    after = jax.block_until_ready(solve(cart, before, options.steps, options.coriolis))
    seconds = time.perf_counter() - start
    volumes = [float(cart.Allreduce(state[ETA].sum(), op=MPI.SUM)) * CELL**2 / 1e9 for state in (before, after)]
    eta = gather(cart, after[ETA], shape)

    if cart.rank == 0:
        print(f"{seconds:.1f} s, compilation included. Volume above rest: {volumes[0]:.5f} -> {volumes[1]:.5f} km^3.")
        if options.output.endswith(".npy"):
            np.save(options.output, eta)
        else:
            save_picture(cart, eta, options.steps * STEP / 3600, options.output)
        print(f"The height of the surface is in {options.output}.")


if __name__ == "__main__":
    main()
