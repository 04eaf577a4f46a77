"""heat.py with its loop in jax.jit.

    mpiexec -n 3 python examples/porting/heat_jit.py

An array does not change, so a step takes the halos and returns the new cells.
"""

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm import JaxComm

jax.config.update("jax_enable_x64", True)

comm = JaxComm(MPI.COMM_WORLD)
dims = MPI.Compute_dims(comm.Get_size(), 2)
cart = comm.Create_cart(dims, periods=[False, True])
up, down = cart.Shift(0, 1)
left, right = cart.Shift(1, 1)

ny, nx = 12, 10  # cells a rank
whole = np.random.default_rng(0).random((ny * dims[0], nx * dims[1]))
row, col = cart.Get_coords(cart.Get_rank())
cells = whole[ny * row : ny * (row + 1), nx * col : nx * (col + 1)]


def step(_, u):
    # At a wall the neighbour is PROC_NULL, from which nothing comes: the result is the template, zeros.
    wall = jnp.zeros(nx)
    above = cart.Sendrecv(u[-1], dest=down, recvbuf=wall, source=up)
    below = cart.Sendrecv(u[0], dest=up, recvbuf=wall, source=down)
    before = cart.Sendrecv(u[:, -1], dest=right, source=left)  # a column is an array like any other
    after = cart.Sendrecv(u[:, 0], dest=left, source=right)
    framed = jnp.pad(u, 1)
    framed = framed.at[0, 1:-1].set(above).at[-1, 1:-1].set(below).at[1:-1, 0].set(before).at[1:-1, -1].set(after)
    around = framed[:-2, 1:-1] + framed[2:, 1:-1] + framed[1:-1, :-2] + framed[1:-1, 2:]
    return u + 0.2 * (around - 4 * u)


u = jax.jit(lambda u: jax.lax.fori_loop(0, 100, step, u))(jnp.asarray(cells))

blocks = cart.gather((row, col, np.asarray(u)), root=0)
if cart.Get_rank() == 0:
    result = np.empty_like(whole)
    for i, j, block in blocks:
        result[ny * i : ny * (i + 1), nx * j : nx * (j + 1)] = block
    alone = whole.copy()  # the same without MPI
    for _ in range(100):
        framed = np.pad(np.pad(alone, ((0, 0), (1, 1)), mode="wrap"), ((1, 1), (0, 0)))
        around = framed[:-2, 1:-1] + framed[2:, 1:-1] + framed[1:-1, :-2] + framed[1:-1, 2:]
        alone += 0.2 * (around - 4 * alone)
    print(f"heat left {result.sum():.6f}, difference {np.abs(result - alone).max():.1e}")
