"""matrix_vector.py with its loop in jax.jit.

    mpiexec -n 3 python examples/porting/matrix_vector_jit.py

The calls return their results, and the whole iteration is one compiled program.
"""

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm import JaxComm

jax.config.update("jax_enable_x64", True)

comm = JaxComm(MPI.COMM_WORLD)
rank, size = comm.Get_rank(), comm.Get_size()

m = 8  # rows a rank
n = m * size
whole = np.random.default_rng(0).random((n, n))
A = whole[m * rank : m * (rank + 1)]


def matvec(A, x):
    """Multiply A by the vector of which x is this rank's part."""
    return A @ comm.Allgather(x).ravel()  # no buffer: the result is returned, with an axis for the ranks in front


@jax.jit
def largest_eigenvalue(A, x):
    def iterate(_, x):
        x = matvec(A, x)
        return x / jnp.sqrt(comm.Allreduce(x @ x, op=MPI.SUM))

    x = jax.lax.fori_loop(0, 50, iterate, x)
    return comm.Allreduce(x @ matvec(A, x), op=MPI.SUM)


value = largest_eigenvalue(A, jnp.ones(m))
if rank == 0:
    exact = np.abs(np.linalg.eigvals(whole)).max()
    print(f"largest eigenvalue {value:.6f}, relative error {abs(value - exact) / exact:.1e}")
