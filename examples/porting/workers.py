"""A master hands out tasks, and workers ask for the next one when they are done: tags and ANY_SOURCE, ported from mpi4py.

    mpiexec -n 3 python examples/porting/workers.py

One line differs from the program for mpi4py, beside the import: the one that makes comm. workers_jit.py goes on from
here.
"""

import sys

import numpy as np
from mpi4py import MPI

from jaxcomm import JaxComm

comm = JaxComm(MPI.COMM_WORLD)  # was: comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
if size < 2:
    sys.exit("a master and at least one worker: mpiexec -n 2 or more")

READY, WORK, DONE, STOP = 1, 2, 3, 4  # tags
TASKS = 40


def integral(task):
    """The part of pi that is the integral of 4 / (1 + x^2) over one of TASKS intervals."""
    x = (task + (np.arange(1000) + 0.5) / 1000) / TASKS
    return np.mean(4 / (1 + x * x)) / TASKS


if rank == 0:
    parts, status, answer = np.zeros(TASKS), MPI.Status(), np.empty(2)
    given = stopped = 0
    while stopped < size - 1:
        comm.Recv(answer, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
        if status.Get_tag() == DONE:
            parts[int(answer[0])] = answer[1]
        if given < TASKS:
            comm.Send(np.array([given]), dest=status.Get_source(), tag=WORK)
            given += 1
        else:
            comm.Send(np.array([0]), dest=status.Get_source(), tag=STOP)
            stopped += 1
    expected = np.array([integral(task) for task in range(TASKS)])
    print(f"pi is about {parts.sum():.9f}, difference {np.abs(parts - expected).max():.1e}")
else:
    task, status = np.empty(1, int), MPI.Status()
    comm.Send(np.zeros(2), dest=0, tag=READY)
    while True:
        comm.Recv(task, source=0, tag=MPI.ANY_TAG, status=status)
        if status.Get_tag() == STOP:
            break
        comm.Send(np.array([task[0], integral(task[0])]), dest=0, tag=DONE)
