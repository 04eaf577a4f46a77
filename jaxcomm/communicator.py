"""JaxComm and its kin: mpi4py's communicators, with operations on JAX arrays (operations.py).

What is here is their life: made, named, compared, freed. Everything else is mpi4py's own (host.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm.checks import introduce
from jaxcomm.host import forget, inherit
from jaxcomm.intercomm import Between
from jaxcomm.neighbors import Neighbors
from jaxcomm.operations import Operations
from jaxcomm.token import flush
from jaxcomm.topology import Graphs

__all__ = [
    "JaxCartcomm",
    "JaxComm",
    "JaxDistgraphcomm",
    "JaxGraphcomm",
    "JaxIntercomm",
    "registered",
    "when_registered",
]


_registered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Our communicators by MPI's handle; freed ones may be among them."""
when_registered: list[Callable[[Any], None]] = []
"""Who wants to know of every communicator that gets a row of the native table."""


def registered() -> list[Any]:
    """Return those that are alive, in the order in which they were made."""
    alive = [comm for comm in _registered.values() if comm != MPI.COMM_NULL]
    return sorted(alive, key=lambda comm: comm.slot)


class _Communicator:
    """What all wrapper types share; mixed into mpi4py's classes."""

    Get_rank: Callable[[], int]
    Get_size: Callable[[], int]
    Get_name: Callable[[], str]
    rank: int
    size: int

    def __new__(cls, comm: MPI.Comm | None = None) -> Any:
        if comm is not None and not isinstance(comm, MPI.Comm):
            raise TypeError(f"{cls.__name__}: comm must be an mpi4py communicator such as MPI.COMM_WORLD, got {comm!r}")
        if comm is None or comm == MPI.COMM_NULL:
            return super().__new__(cls, comm)  # type: ignore[call-arg]
        flush()
        duplicate = comm.Dup()
        duplicate.Set_name(comm.Get_name())
        return _adopt(duplicate)

    # The native table

    @property
    def slot(self) -> int:
        """The row of the native table, by which compiled programs name this communicator."""
        try:
            return self.__dict__["_slot"]  # type: ignore[no-any-return]
        except KeyError:
            return self._register()

    def _register(self, shadow: MPI.Comm | None = None, called: str = "unnamed") -> int:
        self._check_alive()
        self.Set_errhandler(MPI.ERRORS_RETURN)  # type: ignore[attr-defined]
        handle, other = (MPI._handleof(c) & (2**64 - 1) for c in (self, self if shadow is None else shadow))
        rank, size, name = self.Get_rank(), self.Get_size(), self.Get_name()
        slot = bridge.add_communicator(handle, other, rank, size, self.peers, self.two_groups, name or called)
        self.__dict__.update(_slot=slot, _facts=(rank, size), _name=name or called, _shadow=shadow)
        _registered[MPI._handleof(self)] = self
        for tell in when_registered:
            tell(self)
        return slot

    def _add_graphs(self, graphs: Graphs) -> None:
        graphs.register(self.slot)
        self.__dict__["_graphs"] = graphs

    def _need_graphs(self) -> None:
        """Make them for a communicator that is somebody else's, at its first neighbour collective. Collective."""
        if "_graphs" not in self.__dict__:
            flush()
            self._add_graphs(Graphs.of(self))

    def _check_alive(self) -> None:
        if self != MPI.COMM_NULL:
            return
        if "_slot" in self.__dict__:
            raise ValueError(f"{self!r} was freed (Free or the end of a with block); make a new communicator")
        raise ValueError(f"{type(self).__name__} is a null communicator: this rank is no part of it")

    if not TYPE_CHECKING:  # mpi4py's stub has plain attributes here

        @property
        def rank(self) -> int:
            """This process's rank in the communicator."""
            self._check_alive()
            return self.__dict__["_facts"][0] if "_facts" in self.__dict__ else self.Get_rank()

        @property
        def size(self) -> int:
            """The number of ranks (of an intercommunicator, those of this side)."""
            self._check_alive()
            return self.__dict__["_facts"][1] if "_facts" in self.__dict__ else self.Get_size()

    two_groups = False

    @property
    def peers(self) -> int:
        """The number of ranks that this one can exchange messages with: its own group, or the remote one."""
        return self.size

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Communicator) and "_slot" in self.__dict__ and "_slot" in other.__dict__:
            return self.slot == other.slot
        return bool(super().__eq__(other))

    def __hash__(self) -> int:
        return hash((_Communicator, self.slot))

    def __repr__(self) -> str:
        if "_slot" not in self.__dict__ and self == MPI.COMM_NULL:
            return f"{type(self).__name__}(null)"
        freed = ", freed" if self == MPI.COMM_NULL else ""
        if not freed:
            self.slot  # noqa: B018  fills _facts
        (rank, size), name = self.__dict__["_facts"], self.__dict__["_name"]
        return f"{type(self).__name__}({name}, rank {rank} of {size}{freed})"

    def __copy__(self) -> Any:
        """A communicator is a place to meet, not data: what contains one may be copied, and meets there too."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.Free()

    def Free(self) -> None:
        """Free the communicator, on all its ranks; what was called before is finished first.

        Requests may be waited for later. Compiled functions that refer to it raise an error from then on. Calling it twice
        does nothing.
        """
        if self != MPI.COMM_NULL and self._retire():
            super().Free()  # type: ignore[misc]

    def Disconnect(self) -> None:
        """Wait for what was called on the communicator and free it, on all its ranks. As Free otherwise."""
        self._check_alive()
        if self._retire():
            super().Disconnect()  # type: ignore[misc]

    def _retire(self) -> bool:
        """End what is ours. Returns whether MPI's communicator may be freed; if not, this object has none any more."""
        slot = self.slot
        flush()
        if not bridge.free_communicator(slot):
            # Open MPI crashes if a communicator is freed before its requests are complete: this one stays.
            forget(self)
            return False
        shadow = self.__dict__.pop("_shadow")
        if shadow is not None:
            shadow.Free()
        if (graphs := self.__dict__.pop("_graphs", None)) is not None:
            graphs.free()
        return True

    def free(self) -> None:
        """As Free."""
        self.Free()

    def Set_name(self, name: str) -> None:
        """Name the communicator; error messages and repr show the name."""
        super().Set_name(name)  # type: ignore[misc]
        bridge.rename_communicator(self.slot, name or "unnamed")
        self.__dict__["_name"] = name or "unnamed"


class JaxComm(Operations, _Communicator, MPI.Intracomm):
    """MPI inside JAX programs: mpi4py's communicator, whose operations work on JAX arrays and inside jax.jit.

    `JaxComm(comm)` duplicates an mpi4py communicator, so that its messages never match those of the original. That is
    collective: every rank of comm must do it. The error handler of the duplicate is MPI.ERRORS_RETURN.

    Operations take arrays (JAX, NumPy, scalars) and return JAX arrays; receive buffers are templates. Outside jit, calls
    whose buffers are all given and all NumPy arrays are mpi4py's own, in place (docs/porting.md). All run in program order
    by themselves. A JaxComm is hashable and may be closed over by a jitted function or be a static argument.
    """


class JaxCartcomm(Neighbors, _Communicator, MPI.Cartcomm):
    """A JaxComm with a Cartesian topology: what JaxComm.Create_cart returns."""


class JaxGraphcomm(Neighbors, _Communicator, MPI.Graphcomm):
    """A JaxComm with a graph topology: what JaxComm.Create_graph returns."""


class JaxDistgraphcomm(Neighbors, _Communicator, MPI.Distgraphcomm):
    """A JaxComm with a distributed graph topology: what JaxComm.Create_dist_graph returns."""


class JaxIntercomm(Between, _Communicator, MPI.Intercomm):
    """An intercommunicator: mpi4py's own methods, on NumPy arrays and Python objects."""


_KINDS = (
    (MPI.Cartcomm, JaxCartcomm),
    (MPI.Distgraphcomm, JaxDistgraphcomm),
    (MPI.Graphcomm, JaxGraphcomm),
    (MPI.Intercomm, JaxIntercomm),
    (MPI.Intracomm, JaxComm),
)


def _adopt(made: Any, called: str = "unnamed") -> Any:
    """Give a communicator that mpi4py made the wrapper type; it becomes ours. If it has no name, messages call it so."""
    if isinstance(made, tuple):  # Idup: nothing can be known of the communicator before the request is complete
        made[1].Wait()
        return (_adopt(made[0], called), made[1])
    if not isinstance(made, MPI.Comm) or made == MPI.COMM_NULL:
        return made
    base, ours = next(kind for kind in _KINDS if isinstance(made, kind[0]))
    comm: Any = base.__new__(ours, made)  # type: ignore[type-var]
    # Of the same ranks, by mpi4py's method: ours would come back here. Dup would call what copies the user's attributes.
    comm._register(MPI.Comm.Split(made, 0, made.Get_rank()), called)
    if not isinstance(made, MPI.Intercomm):
        introduce(comm.slot, comm.__dict__["_shadow"])
    if isinstance(made, MPI.Topocomm):
        comm._add_graphs(Graphs.of(made))
    return comm


def _view(made: Any, called: str = "") -> Any:
    """Give a communicator that somebody has already the wrapper type, or find ours; it stays theirs."""
    if not isinstance(made, MPI.Comm) or made == MPI.COMM_NULL:
        return made
    known = _registered.get(MPI._handleof(made))
    if known is not None and known == made:
        return known
    base, ours = next(kind for kind in _KINDS if isinstance(made, kind[0]))
    return base.__new__(ours, made)  # type: ignore[type-var]


for _base, _cls in _KINDS:
    inherit(_cls, _base, {"made": _adopt, "known": _view})
