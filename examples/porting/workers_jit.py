"""workers.py with both loops in jax.jit.

    mpiexec -n 3 python examples/porting/workers_jit.py

Who asks, and what for, are traced values, and the programs act on them.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm import JaxComm

jax.config.update("jax_enable_x64", True)

comm = JaxComm(MPI.COMM_WORLD)
rank, size = comm.Get_rank(), comm.Get_size()
if size < 2:
    sys.exit("a master and at least one worker: mpiexec -n 2 or more")

READY, WORK, DONE, STOP = 1, 2, 3, 4  # tags
TASKS = 40


def integral(task):
    """The part of pi that is the integral of 4 / (1 + x^2) over one of TASKS intervals."""
    x = (task + (jnp.arange(1000) + 0.5) / 1000) / TASKS
    return jnp.mean(4 / (1 + x * x)) / TASKS


@jax.jit
def master():
    def serve(state):
        parts, given, stopped = state
        # return_status: source and tag as values. A Status object would be filled too late for the program itself.
        answer, status = comm.Recv(jnp.zeros(2), return_status=True)
        parts = jnp.where(status.tag == DONE, parts.at[answer[0].astype(int)].set(answer[1]), parts)
        more = given < TASKS
        comm.Send(given, dest=status.source, tag=jnp.where(more, WORK, STOP))
        return parts, given + more, stopped + ~more

    return jax.lax.while_loop(lambda state: state[2] < size - 1, serve, (jnp.zeros(TASKS), 0, 0))[0]


@jax.jit
def worker():
    def next_task():
        task, status = comm.Recv(jnp.zeros((), int), source=0, return_status=True)
        return task, status.tag

    def work(state):
        task, _ = state
        comm.Send(jnp.stack([task.astype(float), integral(task)]), dest=0, tag=DONE)
        return next_task()

    comm.Send(jnp.zeros(2), dest=0, tag=READY)
    return jax.lax.while_loop(lambda state: state[1] != STOP, work, next_task())


if rank == 0:
    parts = np.asarray(master())
    expected = np.array([integral(task) for task in range(TASKS)])
    print(f"pi is about {parts.sum():.9f}, difference {np.abs(parts - expected).max():.1e}")
else:
    worker()
