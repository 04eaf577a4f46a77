"""The operations that are measured: one row each, with its form in every library.

The size of a message is that of the operand on one rank: of Alltoall all that a rank sends, of Allgather what it
contributes. Operands are float32 and zero, so that sums stay finite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from mpi4py import MPI
from names import PING_PONG

RANKS = "ranks"  # the mesh axis over all processes, for JAX's own collectives
ITEM = np.dtype(np.float32).itemsize

Array = Any


@dataclass(frozen=True)
class Operation:
    """An operation of MPI.

    Attributes:
      name: as in MPI.
      mpi4py: (comm, x, y) -> result, on NumPy arrays: in place in x, or from x into y, whichever MPI does faster.
      jaxcomm: (comm, x) -> result.
      mpi4jax: (module, comm, x) -> result, or None if it has no such operation.
      lax: x -> result inside shard_map over all processes, or None if JAX has no equivalent.
      messages: how many follow one another in one call.
      grows: the result has one more axis, over the ranks, than x.
      split: the first axis of x is over the ranks.
    """

    name: str
    mpi4py: Callable[[MPI.Comm, Array, Array], Array]
    jaxcomm: Callable[[Any, Array], Array]
    mpi4jax: Callable[[Any, MPI.Comm, Array], Array] | None = None
    lax: Callable[[Array], Array] | None = None
    messages: int = 1
    grows: bool = False
    split: bool = False

    def operand(self, size: int, nbytes: int) -> np.ndarray:
        """Return an operand of about so many bytes, in memory of its own: what only reads as zero would be cached."""
        shape = (size, max(1, nbytes // ITEM // size)) if self.split else (nbytes // ITEM,)
        return np.full(shape, 0, np.float32)

    def result(self, size: int, x: np.ndarray) -> np.ndarray:
        return np.empty((size, *x.shape) if self.grows else x.shape, x.dtype)


def after(comm: MPI.Comm) -> int:
    return (comm.rank + 1) % comm.size


def before(comm: MPI.Comm) -> int:
    return (comm.rank - 1) % comm.size


def on_numpy(method: str, in_place: bool) -> Callable[[MPI.Comm, Array, Array], Array]:
    """A collective of mpi4py on NumPy arrays; in place, the result is where its receive buffer is."""

    def call(comm: MPI.Comm, x: Array, y: Array) -> Array:
        getattr(comm, method)(MPI.IN_PLACE if in_place else x, y)
        return y

    return call


def replace(method: str, **arguments: Any) -> Callable[[MPI.Comm, Array, Array], Array]:
    """A collective of mpi4py whose result replaces x."""

    def call(comm: MPI.Comm, x: Array, y: Array) -> Array:
        getattr(comm, method)(*([] if method == "Bcast" else [MPI.IN_PLACE]), x, **arguments)
        return x

    return call


def numpy_sendrecv(comm: MPI.Comm, x: Array, y: Array) -> Array:
    comm.Sendrecv(x, after(comm), recvbuf=y, source=before(comm))
    return y


def numpy_sendrecv_replace(comm: MPI.Comm, x: Array, y: Array) -> Array:
    comm.Sendrecv_replace(x, after(comm), source=before(comm))
    return x


def ring(axis_size: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % axis_size) for rank in range(axis_size)]


# A message from rank 0 to rank 1 and back; the other ranks look on.


def ping_pong(comm: MPI.Comm, x: Array, send: Callable[[Array, int], Any], receive: Callable[[int], Array]) -> Array:
    if comm.rank == 0:
        send(x, 1)
        return receive(1)
    if comm.rank == 1:
        y = receive(0)
        send(y, 0)
        return y
    return x


def numpy_ping_pong(comm: MPI.Comm, x: Array, y: Array) -> Array:
    def receive(source: int) -> Array:
        comm.Recv(y, source)
        return y

    return ping_pong(comm, x, comm.Send, receive)


def mpi4jax_ping_pong(m: Any, comm: MPI.Comm, x: Array) -> Array:
    return ping_pong(comm, x, lambda x, dest: m.send(x, dest, comm=comm), lambda source: m.recv(x, source, comm=comm))


def lax_ping_pong(x: Array) -> Array:
    return lax.ppermute(lax.ppermute(x, RANKS, [(0, 1)]), RANKS, [(1, 0)])


TABLE = {
    operation.name: operation
    for operation in [
        Operation(
            "Allreduce",
            mpi4py=replace("Allreduce"),
            jaxcomm=lambda comm, x: comm.Allreduce(x),
            mpi4jax=lambda m, comm, x: m.allreduce(x, op=MPI.SUM, comm=comm),
            lax=lambda x: lax.psum(x, RANKS),
        ),
        Operation(
            "Bcast",
            mpi4py=replace("Bcast"),
            jaxcomm=lambda comm, x: comm.Bcast(x),
            mpi4jax=lambda m, comm, x: m.bcast(x, 0, comm=comm),
        ),
        Operation(
            "Allgather",
            mpi4py=on_numpy("Allgather", in_place=True),
            jaxcomm=lambda comm, x: comm.Allgather(x),
            mpi4jax=lambda m, comm, x: m.allgather(x, comm=comm),
            lax=lambda x: lax.all_gather(x, RANKS),
            grows=True,
        ),
        Operation(
            "Alltoall",
            mpi4py=on_numpy("Alltoall", in_place=False),
            jaxcomm=lambda comm, x: comm.Alltoall(x),
            mpi4jax=lambda m, comm, x: m.alltoall(x, comm=comm),
            lax=lambda x: lax.all_to_all(x, RANKS, 0, 0),
            split=True,
        ),
        Operation(
            "Sendrecv",
            mpi4py=numpy_sendrecv,
            jaxcomm=lambda comm, x: comm.Sendrecv(x, after(comm), source=before(comm)),
            mpi4jax=lambda m, comm, x: m.sendrecv(x, x, before(comm), after(comm), comm=comm),
            lax=lambda x: lax.ppermute(x, RANKS, ring(lax.axis_size(RANKS))),
        ),
        Operation(
            PING_PONG,
            mpi4py=numpy_ping_pong,
            jaxcomm=lambda comm, x: ping_pong(comm, x, comm.Send, lambda source: comm.Recv(x, source)),
            mpi4jax=mpi4jax_ping_pong,
            lax=lax_ping_pong,
            messages=2,
        ),
        Operation(
            "Scan",
            mpi4py=replace("Scan"),
            jaxcomm=lambda comm, x: comm.Scan(x),
            mpi4jax=lambda m, comm, x: m.scan(x, MPI.SUM, comm=comm),
        ),
        Operation(
            "Sendrecv_replace",
            mpi4py=numpy_sendrecv_replace,
            jaxcomm=lambda comm, x: comm.Sendrecv_replace(x, after(comm), source=before(comm)),
        ),
    ]
}
