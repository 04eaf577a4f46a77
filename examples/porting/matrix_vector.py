"""The largest eigenvalue of a matrix whose rows are spread over all ranks: mpi4py's tutorial on Allgather, ported.

    mpiexec -n 2 python examples/porting/matrix_vector.py

One line differs from the program for mpi4py, beside the import: the one that makes comm. matrix_vector_jit.py goes on from
here.
"""

import numpy as np
from mpi4py import MPI

from jaxcomm import JaxComm

comm = JaxComm(MPI.COMM_WORLD)  # was: comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

m = 8  # rows a rank
n = m * size
whole = np.random.default_rng(0).random((n, n))
A = whole[m * rank : m * (rank + 1)]


def matvec(comm, A, x):
    """Multiply A by the vector of which x is this rank's part."""
    xg = np.empty(n)
    comm.Allgather([x, MPI.DOUBLE], [xg, MPI.DOUBLE])
    return A @ xg


x = np.ones(m)
length = np.empty(1)
for _ in range(50):
    x = matvec(comm, A, x)
    comm.Allreduce(np.array([x @ x]), length, op=MPI.SUM)
    x /= np.sqrt(length)

product = np.empty(1)
comm.Reduce(np.array([x @ matvec(comm, A, x)]), product, op=MPI.SUM, root=0)
if rank == 0:
    exact = np.abs(np.linalg.eigvals(whole)).max()
    print(f"largest eigenvalue {product[0]:.6f}, relative error {abs(product[0] - exact) / exact:.1e}")
