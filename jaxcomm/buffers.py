"""The drop-in rule: a call outside every trace whose buffers are all host buffers is mpi4py's own, in place.

A host buffer is a NumPy array, or what else mpi4py takes memory from: bytes, a memoryview, array.array, MPI.buffer, and
the specifications that begin with one, such as [x, count, datatype]. Beside one, MPI.IN_PLACE and None say what they say
in mpi4py, and so does None where the peer is MPI.PROC_NULL. Which of a method's parameters are buffers, its signature
tells, in which mpi4py calls them buf, sendbuf, recvbuf.

A barrier has no buffers; Ibarrier and Barrier_init are mpi4py's own outside a trace, for the sake of their request.

Everything else is a call on arrays, which returns its result: where one of the buffers is a JAX array, a scalar, a
ShapeDtypeStruct or an MPI.Op, where one is left out, where an argument is given that mpi4py does not know (token=), and
where the only buffer to receive into is a read-only NumPy array.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, eager, lowering
from jaxcomm.token import flush

__all__ = ["Buffers", "buffers_of", "drop_in", "run_on_host", "theirs"]

_BOTTOM, _IN_PLACE = type(MPI.BOTTOM), type(MPI.IN_PLACE)
_LEFT_OUT = object()


def theirs(name: str) -> Callable[..., Any] | None:
    """mpi4py's method of that name, of whichever kind of communicator."""
    for base in (MPI.Comm, MPI.Intracomm, MPI.Topocomm):
        if name in vars(base):
            return vars(base)[name]  # type: ignore[no-any-return]
    return None


@dataclass(frozen=True)
class Buffers:
    """What a signature of mpi4py's says about buffers.

    Attributes:
      names: of all parameters, in their order.
      sent, received: the one that is a buffer to send from, or to receive into; or empty.
      root: whether one rank is the root. Elsewhere the buffer that only the root needs may be None, and the root of a
        broadcast sends what the others receive.
    """

    names: tuple[str, ...]
    sent: str
    received: str
    root: bool

    def are_on_host(self, comm: MPI.Comm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether all buffers among the arguments are given and on the host, and at least one has memory."""
        if len(args) > len(self.names) or not kwargs.keys() <= set(self.names):
            return False
        x = y = None
        if self.sent:
            x = self._given(self.sent, args, kwargs)
            if not (_has_memory(x) or x is None or isinstance(x, _IN_PLACE)):
                return False
        if self.received:
            y = self._given(self.received, args, kwargs)
            if _is_template(y) and not self._sends_it_after_all(comm, y, args, kwargs):
                return False
            of_root = y is None and self.root and self.sent
            if not (
                _has_memory(y) or isinstance(y, _IN_PLACE) or of_root or self._is_nothing(y, "source", args, kwargs)
            ):
                return False
        if _has_memory(x) or _has_memory(y):
            return True
        sends = self.sent and not self._is_nothing(x, "dest", args, kwargs)
        return not sends and not (self.received and not self._is_nothing(y, "source", args, kwargs))

    def _is_nothing(self, x: Any, peer: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether x is the None of a program for mpi4py in the place of a buffer that nobody sends or receives."""
        if x is not None or peer not in self.names:
            return False
        rank = self._given(peer, args, kwargs)
        return isinstance(rank, int) and rank == MPI.PROC_NULL

    def _given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = self.names.index(name)
        return args[at] if at < len(args) else kwargs.get(name, _LEFT_OUT)

    def _sends_it_after_all(self, comm: MPI.Comm, y: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether y is what the root broadcasts. Who broadcasts a scalar wants to have its value, so that is a JAX call."""
        if not self.root or self.sent or isinstance(y, np.generic):
            return False
        root = self._given("root", args, kwargs)
        here = MPI.ROOT if comm.is_inter else comm.rank
        return bool(here == (0 if root is _LEFT_OUT else root))


def _is_template(x: Any) -> bool:
    """Whether x, or what a specification begins with, has a shape and a dtype, but cannot be written to."""
    if isinstance(x, (list, tuple)) and len(x) > 1:
        x = x[0]
    return (isinstance(x, np.ndarray) and not x.flags.writeable) or isinstance(x, np.generic)


def _has_memory(x: Any) -> bool:
    """Whether x is a host buffer, or a specification that begins with one."""
    if type(x) is np.ndarray:
        return not _has_no_data(x)
    if isinstance(x, (list, tuple)) and len(x) > 1:
        if any(map(_is_data, x[1:])):
            return False
        x = x[0]
        return x is None or isinstance(x, _BOTTOM) or (_exports_memory(x) and not isinstance(x, np.generic))
    return _exports_memory(x)


def _is_data(part: Any) -> bool:
    """Whether part has an array that cannot be counts or displacements: then what it is in is a pytree."""
    if isinstance(part, (list, tuple)):
        return any(map(_is_data, part[:1]))
    return isinstance(part, jax.Array) or (isinstance(part, np.ndarray) and part.dtype.kind not in "iu")


def _exports_memory(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return not _has_no_data(x)
    if isinstance(x, jax.Array):
        return False
    try:
        memoryview(x)
    except (TypeError, ValueError, BufferError):
        return hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")
    return True


def _has_no_data(x: np.ndarray) -> bool:
    return x.dtype.kind == "V" and bool(x.dtype == jax.dtypes.float0)


@functools.cache
def buffers_of(method: Callable[..., Any]) -> Buffers | None:
    """What the signature of a method of mpi4py's says about buffers; None if there are none and it gives no request."""
    signature = inspect.signature(method)
    names = tuple(signature.parameters)[1:]
    received = "recvbuf" if "recvbuf" in names else "buf" if {"source", "root"} & set(names) else ""
    sent = "sendbuf" if "sendbuf" in names else "" if received else "buf"
    if {sent, received} & set(names):
        return Buffers(names, sent, received, "root" in names)
    # Of Ibarrier(), a program for mpi4py expects one of mpi4py's requests, to be among others.
    return Buffers(names, "", "", root=False) if signature.return_annotation in ("Request", "Prequest") else None


def drop_in(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let calls of an operation on host buffers be mpi4py's own."""
    mpi4pys = theirs(method.__name__)
    buffers = buffers_of(mpi4pys) if mpi4pys else None
    if mpi4pys is None or buffers is None or hasattr(method, "drops_in"):
        return method

    @functools.wraps(method)
    def call(comm: Any, *args: Any, **kwargs: Any) -> Any:
        if buffers.are_on_host(comm, args, kwargs) and not _compat.tracing():
            result = run_on_host(mpi4pys, comm, args, kwargs)
            eager.was_mpi4pys(mpi4pys)
            return result
        return method(comm, *args, **kwargs)

    made: Any = call
    made.drops_in = True
    return made  # type: ignore[no-any-return]


# As the table of operations names them. What takes Python objects is another operation, but for a barrier.
_COLLECTIVES = (
    "barrier bcast gather gatherv scatter scatterv allgather allgatherv alltoall alltoallv alltoallw reduce allreduce "
    "reduce_scatter reduce_scatter_block scan exscan "
    # What makes communicators or processes.
    "clone dup dup_with_info idup idup_with_info create split split_type create_cart create_graph create_dist_graph "
    "create_dist_graph_adjacent sub create_intercomm spawn spawn_multiple accept connect"
)
_NEIGHBORS = {
    "neighbor_allgather": "neighbor_allgatherv",
    "neighbor_allgatherv": "neighbor_allgatherv",
    "neighbor_alltoall": "neighbor_alltoallv",
    "neighbor_alltoallv": "neighbor_alltoallv",
    "neighbor_alltoallw": "neighbor_alltoallw",
}
_KNOWN = {name: name for name in _COLLECTIVES.split()} | _NEIGHBORS


def _check(name: str, comm: Any) -> None:
    """In checking mode: tell the native layer, and before a collective the other ranks, of a method of mpi4py's own."""
    known = _KNOWN.get(name.lower())
    if known is not None:
        of_objects = name[0].islower() and known != "barrier"
        bridge.check_operation(comm.slot, f"{known} of objects" if of_objects else known, lowering.caller())
    elif any(part in name.lower() for part in ("send", "recv", "probe")):
        bridge.mix(comm.slot)


def run_on_host(method: Callable[..., Any], comm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of mpi4py's when what is under way is done."""
    comm._check_alive()
    flush()
    if bridge.checking():
        _check(method.__name__, comm)
    slot = comm.__dict__.get("_slot")
    if slot is None:  # it is being registered, or is somebody else's, who has not used it here
        result = method(comm, *args, **kwargs)
    else:
        result = bridge.on_host(method, comm, args, kwargs, slot, lowering.caller() if bridge.observed() else 0)
    if isinstance(result, MPI.Request):
        # mpi4py 4.1 does not keep the buffers of twelve methods (Iallreduce, Reduce_init ...) while MPI still uses them.
        # Requests take no attributes; a finalizer holds its arguments as long as the request is there.
        weakref.finalize(result, lambda *_: None, args, kwargs).atexit = False
    return result
