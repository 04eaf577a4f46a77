"""The heat equation on a grid of ranks, with an exchange of halos: a tutorial program for mpi4py, ported.

    mpiexec -n 4 python examples/porting/heat.py

One line differs from the program for mpi4py, beside the import: the one that makes comm. heat_jit.py goes on from
here.
"""

import numpy as np
from mpi4py import MPI

from jaxcomm import JaxComm

comm = JaxComm(MPI.COMM_WORLD)  # was: comm = MPI.COMM_WORLD
dims = MPI.Compute_dims(comm.Get_size(), 2)
cart = comm.Create_cart(dims, periods=[False, True])
up, down = cart.Shift(0, 1)
left, right = cart.Shift(1, 1)

ny, nx = 12, 10  # cells a rank
whole = np.random.default_rng(0).random((ny * dims[0], nx * dims[1]))
row, col = cart.Get_coords(cart.Get_rank())

u = np.zeros((ny + 2, nx + 2))  # this rank's cells, and a frame of their neighbours'; beyond the walls it stays zero
u[1:-1, 1:-1] = whole[ny * row : ny * (row + 1), nx * col : nx * (col + 1)]
column = MPI.DOUBLE.Create_vector(ny, 1, nx + 2).Commit()


def exchange(u):
    cart.Sendrecv(u[-2, 1:-1], dest=down, recvbuf=u[0, 1:-1], source=up)
    cart.Sendrecv(u[1, 1:-1], dest=up, recvbuf=u[-1, 1:-1], source=down)
    flat = u.ravel()
    start = nx + 2  # of the first row of cells
    cart.Sendrecv([flat[start + nx :], 1, column], dest=right, recvbuf=[flat[start:], 1, column], source=left)
    cart.Sendrecv([flat[start + 1 :], 1, column], dest=left, recvbuf=[flat[start + nx + 1 :], 1, column], source=right)


def step(u):
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    u[1:-1, 1:-1] += 0.2 * (around - 4 * u[1:-1, 1:-1])


for _ in range(100):
    exchange(u)
    step(u)

blocks = cart.gather((row, col, u[1:-1, 1:-1]), root=0)
if cart.Get_rank() == 0:
    result = np.empty_like(whole)
    for i, j, block in blocks:
        result[ny * i : ny * (i + 1), nx * j : nx * (j + 1)] = block
    alone = np.pad(whole, 1)  # the same without MPI
    for _ in range(100):
        alone[:, 0], alone[:, -1] = alone[:, -2], alone[:, 1]
        step(alone)
    print(f"heat left {result.sum():.6f}, difference {np.abs(result - alone[1:-1, 1:-1]).max():.1e}")
