"""mpi4py's own methods on our communicators: they wait for what jaxcomm has under way first.

Where they give communicators, those get the wrapper type. Traced values they refuse, and say what to use.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from mpi4py import MPI

from jaxcomm._primitives import _compat
from jaxcomm.buffers import buffers_of, drop_in, run_on_host

__all__ = ["ENDS", "KINDS", "Kind", "forget", "inherit", "kind_of"]


@dataclass(frozen=True)
class Kind:
    """Methods of mpi4py's that have no form on JAX arrays.

    Attributes:
      why: they do not work inside jit; empty for those whose result is a constant of a traced program.
      names: which these are.
      result: what becomes of a communicator that they give: "made" is ours, with duplicates of our own; "known" is also
        somebody's who may not know jaxcomm, and nothing may be asked of him.
      waits: whether what is under way comes first.
    """

    why: str
    names: str = ""
    result: str = ""
    waits: bool = True


BUFFERS = Kind("it has no form on JAX arrays", "Barrier")
ENDS = Kind(
    "it changes or ends the communicator, which is no data of a program",
    "Free free Disconnect Set_name Set_info Set_errhandler Call_errhandler Set_attr Delete_attr",
)
LOCAL = Kind("", waits=False)
KINDS = (
    BUFFERS,
    Kind(
        "it makes a communicator, and a compiled program keeps to those that there are",
        """Clone Dup Dup_with_info Idup Idup_with_info Create Create_group Split Split_type Create_cart Create_graph
        Create_dist_graph Create_dist_graph_adjacent Sub Create_intercomm Merge Create_from_group Create_from_groups""",
        result="made",
    ),
    Kind(
        "dynamic processes: a compiled program is for the ranks that there are",
        "Spawn Spawn_multiple Accept Connect Join",
        result="known",
    ),
    Kind(
        "dynamic processes: a compiled program is for the ranks that there are",
        "Get_parent",
        result="known",
        waits=False,
    ),
    Kind("it makes an object of a handle", "fromhandle fromint f2py", result="known", waits=False),
    Kind(
        "it sends Python objects; its upper-case namesake takes arrays",
        """send bsend ssend recv sendrecv isend ibsend issend irecv barrier bcast gather scatter allgather alltoall reduce
        allreduce scan exscan neighbor_allgather neighbor_alltoall""",
    ),
    Kind(
        "it looks for messages when it is called, and not when a compiled program runs",
        "Probe Iprobe Mprobe Improbe probe iprobe mprobe improbe",
    ),
    Kind("fault tolerance: who is left is for the host to find out", "Shrink Ishrink", result="made"),
    Kind(
        "fault tolerance: who is left is for the host to find out",
        "Agree Iagree Revoke Is_revoked Get_failed Ack_failed",
    ),
    Kind("it manages memory of the host's", "Attach_buffer Detach_buffer Flush_buffer Iflush_buffer"),
    ENDS,
    Kind("it ends the job", "Abort", waits=False),
)


def kind_of(base: type, name: str) -> Kind:
    """How a method of mpi4py's behaves where a wrapper type inherits it."""
    for kind in KINDS:
        if name in kind.names.split():
            return kind
    has_buffers = name[0].isupper() and not _is_classmethod(base, name) and buffers_of(getattr(base, name))
    return BUFFERS if has_buffers else LOCAL


def forget(x: Any) -> None:
    """Let an object of mpi4py's have no handle, which belongs to somebody else or has to stay."""
    null: Any = MPI.MESSAGE_NULL if isinstance(x, MPI.Message) else MPI.COMM_NULL
    ctypes.memmove(MPI._addressof(x), MPI._addressof(null), MPI._sizeof(type(null)))


def _is_classmethod(base: type, name: str) -> bool:
    return inspect.ismethod(getattr(base, name))


def _guarded(cls: type, base: type, name: str, results: dict[str, Callable[[Any, str], Any]]) -> Any:
    """A method that looks at its arguments and waits for pending operations first, and then does as it did before."""
    theirs, kind = getattr(base if _is_classmethod(base, name) else cls, name), kind_of(base, name)
    result = results.get(kind.result, _as_it_is)

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse(cls, name, kind, (*args, *kwargs.values()))
        given = run_on_host(theirs, self, args, kwargs) if kind.waits else theirs(self, *args, **kwargs)
        return result(given, f"{name} of {self.__dict__.get('_name', 'unnamed')}")

    @functools.wraps(getattr(theirs, "__func__", theirs))
    def of_class(cls: type, *args: Any, **kwargs: Any) -> Any:
        _refuse(cls, name, kind, (*args, *kwargs.values()))
        return result(theirs(*args, **kwargs), name)

    return classmethod(of_class) if _is_classmethod(base, name) else method


def _as_it_is(given: Any, called: str) -> Any:
    return given


def _refuse(cls: type, name: str, kind: Kind, given: tuple[Any, ...]) -> None:
    """Raise TypeError if a value among the arguments is traced, or is a JAX array where mpi4py wants memory."""
    if _any(_compat.Tracer, given):
        raise TypeError(_host_only(cls, name))
    if kind is BUFFERS and _any(jax.Array, given):
        raise TypeError(f"{cls.__name__}.{name} is mpi4py's own and takes NumPy arrays: pass np.asarray(x)")


def _any(type_: type, values: tuple[Any, ...]) -> bool:
    if any(isinstance(value, type_) for value in values):
        return True
    if type_ is _compat.Tracer and not _compat.tracing():
        return False
    try:
        return any(isinstance(leaf, type_) for leaf in jax.tree_util.tree_leaves(values))
    except (TypeError, ValueError):  # a dict whose keys have no order is no pytree; to pickle a tracer fails, too
        return False


def _host_only(cls: type, name: str) -> str:
    ours = name.capitalize()
    works = ours != name and any(
        ours in vars(base) for base in cls.__mro__[1:] if base.__module__.startswith("jaxcomm.")
    )
    instead = f"use {ours}, which takes arrays" if works else "call it outside"
    if issubclass(cls, MPI.Intercomm):
        instead = "use a JaxComm: an intercommunicator has no operations on JAX arrays"
    return f"{name} works on the host and cannot take a traced value; inside jit {instead}"


def inherit(cls: type, base: type, results: dict[str, Callable[[Any, str], Any]]) -> None:
    """Make a wrapper type's methods mpi4py's: guard those that it inherits, let its own take host buffers.

    Args:
      results: for each Kind.result, what gives a communicator the wrapper type, and a name for messages.
    """
    for name in (name for name in dir(base) if name[0] != "_" and callable(getattr(base, name))):
        ours, theirs, kind = getattr(cls, name), getattr(base, name), kind_of(base, name)
        inherited = getattr(ours, "__func__", ours) is getattr(theirs, "__func__", theirs)
        if not inherited and kind is not ENDS:
            setattr(cls, name, drop_in(ours))
        elif _takes_arguments(ours) or (inherited and kind is not LOCAL):
            setattr(cls, name, _guarded(cls, base, name, results))


def _takes_arguments(method: Callable[..., Any]) -> bool:
    return len(inspect.signature(method).parameters) > (0 if inspect.ismethod(method) else 1)
