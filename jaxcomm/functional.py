"""The functional API: operations as functions with tokens in and out.

`comm=None` is a private duplicate of MPI.COMM_WORLD, made when this module is imported, which is collective. An mpi4py
communicator is duplicated at its first use, collectively, and remembered. Shapes, errors and derivatives are those of
the methods of jaxcomm.JaxComm.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from jaxcomm.communicator import JaxComm
from jaxcomm.token import Token, create_token

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "gather",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]

_WORLD = JaxComm(MPI.COMM_WORLD)
_wrapped: dict[int, tuple[MPI.Comm, JaxComm]] = {}


def _ready(comm: MPI.Comm | None, token: Token | None) -> tuple[Any, Token]:
    return _ours(comm), create_token() if token is None else token


def _ours(comm: MPI.Comm | None) -> Any:
    if comm is None:
        return _WORLD
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm must be a JaxComm, an mpi4py communicator or None, got {comm!r}")
    if hasattr(comm, "slot"):
        return comm
    # By handle and not by object: mpi4py makes a new object for a handle freely. The original is kept, so that its
    # handle is not given to another communicator unless it is freed.
    handle = MPI._handleof(comm)
    known = _wrapped.get(handle)
    if known is None or known[0] != comm:
        _wrapped[handle] = known = comm, JaxComm(comm)
    return known[1]


def allgather(x: Any, comm: MPI.Comm | None = None, token: Token | None = None) -> tuple[Any, Token]:
    """As JaxComm.Allgather. Returns (array of shape (size, *x.shape), token)."""
    ours, token = _ready(comm, token)
    return ours.Allgather(x, token=token)  # type: ignore[no-any-return]


def allreduce(x: Any, op: MPI.Op, comm: MPI.Comm | None = None, token: Token | None = None) -> tuple[Any, Token]:
    """As JaxComm.Allreduce. Returns (array like x, token)."""
    ours, token = _ready(comm, token)
    return ours.Allreduce(x, op=op, token=token)  # type: ignore[no-any-return]


def alltoall(x: Any, comm: MPI.Comm | None = None, token: Token | None = None) -> tuple[Any, Token]:
    """As JaxComm.Alltoall. Returns (array like x, token)."""
    ours, token = _ready(comm, token)
    return ours.Alltoall(x, token=token)  # type: ignore[no-any-return]


def barrier(comm: MPI.Comm | None = None, token: Token | None = None) -> Token:
    """As JaxComm.Barrier. Returns a token."""
    ours, token = _ready(comm, token)
    return ours.Barrier(token=token)[1]  # type: ignore[no-any-return]


def bcast(x: Any, root: int, comm: MPI.Comm | None = None, token: Token | None = None) -> tuple[Any, Token]:
    """As JaxComm.Bcast. Returns (array like x, token)."""
    ours, token = _ready(comm, token)
    return ours.Bcast(x, root, token=token)  # type: ignore[no-any-return]


def gather(x: Any, root: int, comm: MPI.Comm | None = None, token: Token | None = None) -> tuple[Any, Token]:
    """As JaxComm.Gather. Returns (array of shape (size, *x.shape) on the root and x elsewhere, token)."""
    ours, token = _ready(comm, token)
    return ours.Gather(x, root=root, token=token)  # type: ignore[no-any-return]


def recv(
    x: Any,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    comm: MPI.Comm | None = None,
    status: MPI.Status | None = None,
    token: Token | None = None,
) -> tuple[Any, Token]:
    """As JaxComm.Recv. Returns (array like x, token)."""
    ours, token = _ready(comm, token)
    return ours.Recv(x, source, tag, status, token=token)  # type: ignore[no-any-return]


def reduce(
    x: Any, op: MPI.Op, root: int, comm: MPI.Comm | None = None, token: Token | None = None
) -> tuple[Any, Token]:
    """As JaxComm.Reduce. Returns (the reduction on the root and x elsewhere, token)."""
    ours, token = _ready(comm, token)
    return ours.Reduce(x, op=op, root=root, token=token)  # type: ignore[no-any-return]


def scan(x: Any, op: MPI.Op, comm: MPI.Comm | None = None, token: Token | None = None) -> tuple[Any, Token]:
    """As JaxComm.Scan. Returns (array like x, token)."""
    ours, token = _ready(comm, token)
    return ours.Scan(x, op=op, token=token)  # type: ignore[no-any-return]


def scatter(x: Any, root: int, comm: MPI.Comm | None = None, token: Token | None = None) -> tuple[Any, Token]:
    """As JaxComm.Scatter; x is (size, ...) on the root and a template elsewhere. Returns (array, token)."""
    ours, token = _ready(comm, token)
    return ours.Scatter(x, root=root, token=token)  # type: ignore[no-any-return]


def send(x: Any, dest: int, tag: int = 0, comm: MPI.Comm | None = None, token: Token | None = None) -> Token:
    """As JaxComm.Send. Returns a token."""
    ours, token = _ready(comm, token)
    return ours.Send(x, dest, tag, token=token)[1]  # type: ignore[no-any-return]


def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: int,
    dest: int,
    sendtag: int = 0,
    recvtag: int = MPI.ANY_TAG,
    comm: MPI.Comm | None = None,
    status: MPI.Status | None = None,
    token: Token | None = None,
) -> tuple[Any, Token]:
    """As JaxComm.Sendrecv. Returns (array like recvbuf, token)."""
    ours, token = _ready(comm, token)
    return ours.Sendrecv(  # type: ignore[no-any-return]
        sendbuf, dest, sendtag, recvbuf, source, recvtag, status, token=token
    )
