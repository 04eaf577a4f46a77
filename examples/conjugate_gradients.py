"""Poisson's equation by conjugate gradients, with the unknowns spread over all ranks.

    mpiexec -n 2 python examples/conjugate_gradients.py

Solves -(d2/dx2 + d2/dy2) u = f on a rectangle, u = 0 on its boundary, by the five-point formula. Each rank holds some
rows of the grid. To apply the operator it needs one row from each neighbour: a Sendrecv up and a Sendrecv down. The
whole iteration is one compiled loop. Rank 0 compares the result with a direct solution.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm import JaxComm

jax.config.update("jax_enable_x64", True)


def my_rows(comm, ny):
    """Return which rows of the grid this rank holds. Shares differ by at most one row."""
    return slice(ny * comm.rank // comm.size, ny * (comm.rank + 1) // comm.size)


def laplacian(comm, u):
    """Apply the five-point formula for minus the Laplacian (grid spacing 1) to this rank's rows."""
    below = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    above = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    # From PROC_NULL comes nothing, and recvbuf is returned: the zeros on the boundary of the rectangle.
    boundary = jnp.zeros_like(u[0])
    row_below = comm.Sendrecv(u[-1], dest=above, recvbuf=boundary, source=below)
    row_above = comm.Sendrecv(u[0], dest=below, recvbuf=boundary, source=above)
    padded = jnp.pad(jnp.vstack([row_below, u, row_above]), ((0, 0), (1, 1)))
    return 4 * u - padded[:-2, 1:-1] - padded[2:, 1:-1] - padded[1:-1, :-2] - padded[1:-1, 2:]


def conjugate_gradients(comm, apply, b, tolerance=1e-10, max_iterations=10_000):
    """Solve apply(x) = b, all vectors spread over the ranks; return this rank's part of x, and the iterations taken.

    The iteration ends when the residual's norm is below tolerance times that of b.
    """
    # jax.scipy.sparse.linalg.cg would take its dot products over this rank's part alone. Each rank would then go its
    # own way: to a wrong result, or to wait for ever for a rank that has finished earlier. So here the dot products end
    # in an Allreduce. Its result is identical on all ranks (MPI 4.1, 6.9.6), which makes them leave the loop together.

    def dot(x, y):
        return comm.Allreduce(jnp.vdot(x, y), op=MPI.SUM)

    def unfinished(state):
        *_, rr, iterations = state
        return (rr > goal) & (iterations < max_iterations)

    def iterate(state):
        x, r, p, rr, iterations = state
        ap = apply(p)
        alpha = rr / dot(p, ap)
        x, r = x + alpha * p, r - alpha * ap
        rr_before, rr = rr, dot(r, r)
        return x, r, r + rr / rr_before * p, rr, iterations + 1

    bb = dot(b, b)
    goal = tolerance**2 * bb
    x, *_, iterations = jax.lax.while_loop(unfinished, iterate, (jnp.zeros_like(b), b, b, bb, 0))
    return x, iterations


def direct_solution(f):
    """Solve the same equations without iteration, in the basis of the eigenvectors of the second differences."""

    def eigen(n):
        return np.linalg.eigh(2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1))

    (values_y, vectors_y), (values_x, vectors_x) = map(eigen, f.shape)
    return vectors_y @ (vectors_y.T @ f @ vectors_x / np.add.outer(values_y, values_x)) @ vectors_x.T


def main():
    parser = argparse.ArgumentParser(description="Poisson's equation by distributed conjugate gradients.")
    parser.add_argument("--nx", type=int, default=150, help="columns of the grid (default: %(default)s)")
    parser.add_argument("--ny", type=int, default=100, help="rows of the grid (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=1e-10, help="relative residual (default: %(default)s)")
    options = parser.parse_args()

    comm = JaxComm(MPI.COMM_WORLD)
    shape = options.ny, options.nx
    if comm.size > options.ny:
        sys.exit(f"{comm.size} ranks are too many for {options.ny} rows")
    if comm.rank == 0:
        print(f"Solving Poisson's equation on {shape[0]} x {shape[1]} points, on {comm.size} ranks.", flush=True)

    f = np.random.default_rng(0).standard_normal(shape)
    my_f = jnp.asarray(f[my_rows(comm, options.ny)])
    solve = jax.jit(lambda b: conjugate_gradients(comm, lambda u: laplacian(comm, u), b, options.tolerance))
    my_u, iterations = solve(my_f)
    # The shares may differ by a row, so they travel as Python objects: mpi4py's lower-case gather.
    parts = comm.gather(np.asarray(my_u), root=0)

    if comm.rank == 0:
        u, exact = np.concatenate(parts), direct_solution(f)
        error = np.linalg.norm(u - exact) / np.linalg.norm(exact)
        print(f"{iterations} iterations; relative difference from the direct solution: {error:.1e}")


if __name__ == "__main__":
    main()
