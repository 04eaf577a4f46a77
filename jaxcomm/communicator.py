"""JaxComm: mpi4py's communicator for JAX arrays, one short method an operation.

A JaxComm is an mpi4py communicator. What is written here works inside jit and on concrete arrays; everything else is
mpi4py's own, by inheritance, and waits for the operations that jaxcomm has under way first.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, dtypes, eager, reductions, statuses
from jaxcomm._primitives.make import bind
from jaxcomm._primitives.table import TABLE
from jaxcomm._runtime import TAG_UB
from jaxcomm.token import Token, flush, join, link, own_array

__all__ = ["JaxCartcomm", "JaxComm", "JaxDistgraphcomm", "JaxGraphcomm", "JaxIntercomm"]

F = TypeVar("F", bound=Callable[..., Any])


def _row(name: str) -> Callable[[F], F]:
    """Complete a method's docstring from its row of the table."""

    def complete(method: F) -> F:
        row = TABLE[name]
        adjoint = row.adjoint.says if row.adjoint else "none: no data"
        text = inspect.cleandoc(method.__doc__ or "")
        gap = "  " if text.endswith("Raises:") else "\n         "
        method.__doc__ = (
            f"{text}{gap}JaxRuntimeError: MPI reports an error (MPI.Exception when called on concrete arrays).\n"
            f"Adjoint: {adjoint}.   Batching: one call on the batch.\nSource:  {row.source}.\n"
        )
        return eager.with_shortcuts(method)  # type: ignore[return-value]

    return complete


# Arguments: wrong ones are found before any rank enters MPI


def _operand(x: Any, where: str, template: bool = False) -> Any:
    """Return x as something with shape and dtype that both paths take; a template may be a ShapeDtypeStruct."""
    if template and isinstance(x, jax.ShapeDtypeStruct):
        # Concrete zeros would be compiled for each new shape; a constant of a trace must not be that large.
        x = (jnp if _compat.tracing() else np).zeros(x.shape, x.dtype)
    elif x is None or isinstance(x, jax.ShapeDtypeStruct):
        kinds = "an array, a scalar or a ShapeDtypeStruct" if template else "an array or a scalar, because it is sent"
        raise TypeError(f"{where} must be {kinds}, got {x!r}")
    elif isinstance(x, (type(MPI.IN_PLACE), type(MPI.BOTTOM))):
        raise TypeError(f"{where}: {x!r} is for buffers; here results are returned, so pass the operand itself")
    elif isinstance(x, (list, tuple)) and any(isinstance(part, (MPI.Datatype, np.ndarray, jax.Array)) for part in x):
        raise TypeError(
            f"{where} must be an array, got a {type(x).__name__}: pass the array, whose dtype and size tell the rest"
        )
    elif not isinstance(x, (jax.Array, np.ndarray)):
        try:
            x = jnp.asarray(x)
        except OverflowError as error:
            raise ValueError(f"{where}: {error}; enable 64 bits (jax_enable_x64) or pass an array") from None
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where} must be an array or a scalar, got {type(x).__name__}: {error}") from None
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"{where}: dtype {x.dtype} is not supported; pass jax.random.key_data(key) for a PRNG key")
    dtypes.check(eager.canonical(x), where)
    return x


def _traced(value: Any, where: str) -> Any:
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{where} must be an integer scalar, got {value.dtype.name}{list(value.shape)}")
    narrow, wide = jnp.iinfo(jnp.int32), jnp.iinfo(value.dtype)
    if narrow.min <= wide.min and wide.max <= narrow.max:
        return value.astype(jnp.int32)
    # What 32 bits cannot hold must stay out of range, and not become somebody else's rank: this is no rank and no tag.
    fits = (value >= max(narrow.min, wide.min)) & (value <= narrow.max)
    return jnp.where(fits, value.astype(jnp.int32), narrow.min)


def _static(value: Any, where: str) -> int:
    if isinstance(value, _compat.Tracer):
        raise TypeError(f"{where} must be a Python int, got a tracer; mark it static (static_argnums)")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{where} must be a Python int, got {value!r}") from None


def _rank(value: Any, size: int, where: str, wildcard: bool = False) -> Any:
    if isinstance(value, _compat.Tracer):
        return _traced(value, where)
    rank = _static(value, where)
    special = rank == MPI.PROC_NULL or (wildcard and rank == MPI.ANY_SOURCE)
    if not special and not 0 <= rank < size:
        names = "MPI.ANY_SOURCE or MPI.PROC_NULL" if wildcard else "or MPI.PROC_NULL"
        raise ValueError(f"{where} must be a rank from 0 to {size - 1}, {names}, got {rank}")
    return rank


def _root(value: Any, size: int, where: str) -> int:
    root = _static(value, where)
    if not 0 <= root < size:
        raise ValueError(f"{where} must be a rank from 0 to {size - 1}, got {root}")
    return root


def _tag(value: Any, where: str, wildcard: bool = False) -> Any:
    if isinstance(value, _compat.Tracer):
        return _traced(value, where)
    tag = _static(value, where)
    if not (wildcard and tag == MPI.ANY_TAG) and not 0 <= tag <= TAG_UB:
        names = " or be MPI.ANY_TAG" if wildcard else ""
        raise ValueError(f"{where} must lie between 0 and {TAG_UB} (MPI.TAG_UB){names}, got {tag}")
    return tag


def _op(recvbuf: Any, op: Any, x: Any, where: str) -> reductions.Reduction:
    """The reduction, which may stand in the receive buffer's place."""
    if isinstance(recvbuf, MPI.Op):
        if op not in (MPI.SUM, recvbuf):
            raise TypeError(f"{where}: two operations were given, one in recvbuf's place and one as op; leave one out")
        op = recvbuf
    chosen = reductions.reduction(op, where)
    reductions.check(chosen, eager.canonical(x), where)
    return chosen


def _alike(x: Any, recvbuf: Any, shape: tuple[int, ...], where: str) -> None:
    """Raise ValueError unless a receive buffer, which is only a template, has the result's shape and dtype."""
    if recvbuf is None or isinstance(recvbuf, MPI.Op):
        return
    template = _operand(recvbuf, f"{where}: recvbuf", template=True)
    have, want = (eager.canonical(a) for a in (template, x))
    if template.shape != shape or have != want:
        raise ValueError(
            f"{where}: recvbuf is a template of the result, {want.name}{list(shape)}, got {have.name}{list(template.shape)}"
        )


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

    def _register(self, shadow: MPI.Comm | None = None) -> int:
        self._check_alive()
        self.Set_errhandler(MPI.ERRORS_RETURN)  # type: ignore[attr-defined]
        handle, other = (MPI._handleof(c) & (2**64 - 1) for c in (self, self if shadow is None else shadow))
        rank, size, name = self.Get_rank(), self.Get_size(), self.Get_name()
        slot = bridge.add_communicator(handle, other, rank, size, name or "unnamed")
        self.__dict__.update(_slot=slot, _facts=(rank, size), _name=name, _shadow=shadow)
        return slot

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
        return f"{type(self).__name__}({name or 'unnamed'}, rank {rank} of {size}{freed})"

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
        """Free the communicator, on all its ranks; pending operations are finished first.

        Compiled functions that refer to it raise an error from then on. Calling it twice does nothing.
        """
        if self != MPI.COMM_NULL:
            self._retire()
            super().Free()  # type: ignore[misc]

    def Disconnect(self) -> None:
        """Wait for all communication on the communicator and free it, on all its ranks. As Free otherwise."""
        self._check_alive()
        self._retire()
        super().Disconnect()  # type: ignore[misc]

    def _retire(self) -> None:
        slot = self.slot
        flush()
        bridge.free_communicator(slot)
        shadow = self.__dict__.pop("_shadow")
        if shadow is not None:
            shadow.Free()

    def free(self) -> None:
        """As Free."""
        self.Free()

    def Set_name(self, name: str) -> None:
        """Name the communicator; error messages and repr show the name."""
        super().Set_name(name)  # type: ignore[misc]
        bridge.rename_communicator(self.slot, name)
        self.__dict__["_name"] = name


class _Operations(_Communicator):
    """The operations on arrays: what the wrappers of intracommunicators share."""

    def _call(self, name: str, *operands: Any, links: Sequence[Any] = (), **params: Any) -> list[Any]:
        """Run or stage a row of the table. Returns what make.bind returns."""
        self._check_alive()
        row = TABLE[name]
        concrete = not _compat.tracing() and not any(isinstance(x, _compat.Tracer) for x in (*operands, *links))
        if concrete and row.target:
            return eager.run(row, self, operands, dict(row.params) | params)
        return bind(row, self, [own_array(x) for x in operands], links, **params)

    def _result(
        self, name: str, *operands: Any, token: Token | None, otherwise: Any = None, where: str = "", **params: Any
    ) -> Any:
        """Call, and give what the method returns: the result, with a token if one was given.

        `otherwise` is what a rank returns that gets nothing.
        """
        links = () if token is None else (_token(token, where or name.capitalize()).array,)
        y, *_ = self._call(name, *operands, links=links, **params)
        returns = TABLE[name].returns(self, params)
        result = y if returns else otherwise
        if not returns and otherwise is not None:
            result = join(own_array(otherwise), y)
        if token is None:
            return result
        return result, Token(link(*links, y))

    # MPI 4.1, chapter 3: point-to-point

    @_row("send")
    def Send(self, buf: Any, dest: int, tag: int = 0, *, token: Token | None = None) -> Any:
        """Send buf to another rank.

        Shapes: buf (...,). Count: buf.size elements.
        Args:    buf: array or scalar. dest: rank or PROC_NULL, may be traced. tag: 0 to TAG_UB, may be traced.
                 token: see jaxcomm.token.
        Returns: None; (None, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: dest or tag out of range.
        """
        return self._send("Send", buf, dest, tag, token, synchronous=False)

    @_row("send")
    def Ssend(self, buf: Any, dest: int, tag: int = 0, *, token: Token | None = None) -> Any:
        """Send buf to another rank and return when its receive has begun.

        Shapes: buf (...,). Count: buf.size elements.
        Args:    buf, dest, tag, token: as Send.
        Returns: None; (None, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: dest or tag out of range.
        """
        return self._send("Ssend", buf, dest, tag, token, synchronous=True)

    def _send(self, where: str, buf: Any, dest: Any, tag: Any, token: Token | None, synchronous: bool) -> Any:
        x = _operand(buf, f"{where}: buf")
        peer = _rank(dest, self.size, f"{where}: dest")
        return self._result(
            "send", x, token=token, where=where, dest=peer, sendtag=_tag(tag, f"{where}: tag"), synchronous=synchronous
        )

    @_row("recv")
    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        token: Token | None = None,
    ) -> Any:
        """Receive a message like buf and return it.

        Shapes: buf (...,), a template; returns (...,), same dtype. Count: at most buf.size elements. Where fewer arrive,
        or none (PROC_NULL), buf's elements stay.
        Args:    buf: array, scalar or ShapeDtypeStruct. source: rank, ANY_SOURCE or PROC_NULL, may be traced. tag: 0 to
                 TAG_UB or ANY_TAG, may be traced. status: filled when the operation has run. token: see jaxcomm.token.
        Returns: the message; (message, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: source or tag out of range. An MPI error: the message is longer than buf.
        """
        template = _operand(buf, "Recv: buf", template=True)
        return self._result(
            "recv",
            template,
            token=token,
            source=_rank(source, self.size, "Recv: source", wildcard=True),
            recvtag=_tag(tag, "Recv: tag", wildcard=True),
            status=statuses.of(status, "Recv"),
        )

    @_row("sendrecv")
    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        token: Token | None = None,
    ) -> Any:
        """Send sendbuf to one rank and return a message like recvbuf from another, without deadlock.

        Shapes: sendbuf (...,), recvbuf (...,), a template, by default sendbuf; returns like recvbuf. Count: sendbuf.size
        elements go, at most recvbuf.size come; where fewer come, or none (PROC_NULL), recvbuf's elements stay.
        Args:    sendbuf: array or scalar. dest: rank or PROC_NULL. sendtag: 0 to TAG_UB. recvbuf: array, scalar or
                 ShapeDtypeStruct, of sendbuf's dtype. source: rank, ANY_SOURCE or PROC_NULL. recvtag: 0 to TAG_UB or
                 ANY_TAG. status: filled when the operation has run. token: see jaxcomm.token. Ranks and tags may be traced.
        Returns: the message; (message, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: rank or tag out of range, recvbuf's dtype. An MPI error: the message is
                 longer than recvbuf.
        """
        return self._sendrecv("Sendrecv", sendbuf, dest, sendtag, recvbuf, source, recvtag, status, token)

    @_row("sendrecv")
    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        token: Token | None = None,
    ) -> Any:
        """Send buf to one rank and return a message like it from another.

        Shapes: buf (...,); returns (...,), same dtype. Count: buf.size elements go, at most as many come.
        Args:    buf: array or scalar. The others: as Sendrecv.
        Returns: the message; (message, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: rank or tag out of range. An MPI error: the message is longer than buf.
        """
        return self._sendrecv("Sendrecv_replace", buf, dest, sendtag, None, source, recvtag, status, token)

    def _sendrecv(
        self,
        where: str,
        sendbuf: Any,
        dest: Any,
        sendtag: Any,
        recvbuf: Any,
        source: Any,
        recvtag: Any,
        status: Any,
        token: Token | None,
    ) -> Any:
        x = _operand(sendbuf, f"{where}: sendbuf")
        template = x if recvbuf is None else _operand(recvbuf, f"{where}: recvbuf", template=True)
        sent, received = (eager.canonical(a) for a in (x, template))
        if sent != received:
            raise ValueError(f"{where}: recvbuf must have sendbuf's dtype {sent.name}, got {received.name}")
        return self._result(
            "sendrecv",
            x,
            template,
            token=token,
            where=where,
            dest=_rank(dest, self.size, f"{where}: dest"),
            sendtag=_tag(sendtag, f"{where}: sendtag"),
            source=_rank(source, self.size, f"{where}: source", wildcard=True),
            recvtag=_tag(recvtag, f"{where}: recvtag", wildcard=True),
            status=statuses.of(status, where),
        )

    # MPI 4.1, chapter 6: collectives

    @_row("barrier")
    def Barrier(self, *, token: Token | None = None) -> Any:
        """Wait until every rank has come here, in its place among the other operations of the program.

        Shapes: no array. Count: 0.
        Args:    token: see jaxcomm.token.
        Returns: None; (None, token) if a token was given.
        Raises:
        """
        return self._result("barrier", token=token)

    @_row("bcast")
    def Bcast(self, buf: Any, root: int = 0, *, token: Token | None = None) -> Any:
        """Return the root's buf on every rank.

        Shapes: buf (...,), equal on every rank, elsewhere than on the root a template; returns (...,), same dtype. Count:
        buf.size elements.
        Args:    buf: array, scalar, or off the root a ShapeDtypeStruct. root: rank (static). token: see jaxcomm.token.
        Returns: the root's array; (array, token) if a token was given.
        Raises:  TypeError: dtype, or a traced root. ValueError: root out of range.
        """
        root = _root(root, self.size, "Bcast: root")
        x = _operand(buf, "Bcast: buf", template=self.rank != root)
        return self._result("bcast", x, token=token, root=root)

    @_row("gather")
    def Gather(self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, token: Token | None = None) -> Any:
        """Return the arrays of all ranks, stacked, on the root.

        Shapes: sendbuf (...,), equal on every rank; returns (size, ...) on the root, sendbuf elsewhere. Count: sendbuf.size
        elements from each rank.
        Args:    sendbuf: array or scalar. recvbuf: template of the root's result, optional. root: rank (static). token:
                 see jaxcomm.token.
        Returns: the stack on the root, sendbuf elsewhere; (that, token) if a token was given.
        Raises:  TypeError: dtype, or a traced root. ValueError: root out of range, recvbuf's shape.
        """
        x = _operand(sendbuf, "Gather: sendbuf")
        root = _root(root, self.size, "Gather: root")
        if self.rank == root:
            _alike(x, recvbuf, (self.size, *x.shape), "Gather")
        return self._result("gather", x, token=token, otherwise=x, root=root)

    @_row("scatter")
    def Scatter(self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, token: Token | None = None) -> Any:
        """Return to each rank its part of the root's array.

        Shapes: sendbuf (size, ...) on the root; elsewhere the template (...,) is recvbuf, or sendbuf if that is not given;
        returns (...,), same dtype. Count: size * the result's size on the root.
        Args:    sendbuf: array; elsewhere than on the root None, or a template. recvbuf: array, scalar or ShapeDtypeStruct,
                 optional on the root. root: rank (static). token: see jaxcomm.token.
        Returns: sendbuf[rank] of the root; (that, token) if a token was given.
        Raises:  TypeError: dtype, or a traced root. ValueError: root out of range, leading axis, recvbuf's shape.
        """
        root = _root(root, self.size, "Scatter: root")
        if self.rank == root:
            x = self._led(sendbuf, "Scatter: sendbuf")
            _alike(x, recvbuf, x.shape[1:], "Scatter")
        else:
            template = sendbuf if recvbuf is None else recvbuf
            x = _operand(template, "Scatter: recvbuf (or a template in sendbuf's place)", template=True)
        return self._result("scatter", x, token=token, root=root)

    @_row("allgather")
    def Allgather(self, sendbuf: Any, recvbuf: Any = None, *, token: Token | None = None) -> Any:
        """Return the arrays of all ranks, stacked, on every rank.

        Shapes: sendbuf (...,), equal on every rank; returns (size, ...), same dtype. Count: sendbuf.size elements from
        each rank.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional. token: see jaxcomm.token.
        Returns: the stack; (stack, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: recvbuf's shape.
        """
        x = _operand(sendbuf, "Allgather: sendbuf")
        _alike(x, recvbuf, (self.size, *x.shape), "Allgather")
        return self._result("allgather", x, token=token)

    @_row("alltoall")
    def Alltoall(self, sendbuf: Any, recvbuf: Any = None, *, token: Token | None = None) -> Any:
        """Send sendbuf[i] to rank i and return what the ranks sent here, stacked.

        Shapes: sendbuf (size, ...), equal on every rank; returns (size, ...), same dtype. Count: sendbuf.size / size
        elements to each rank.
        Args:    sendbuf: array. recvbuf: template of the result, optional. token: see jaxcomm.token.
        Returns: the stack; (stack, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: leading axis, recvbuf's shape.
        """
        x = self._led(sendbuf, "Alltoall: sendbuf")
        _alike(x, recvbuf, x.shape, "Alltoall")
        return self._result("alltoall", x, token=token)

    @_row("reduce")
    def Reduce(
        self, sendbuf: Any, recvbuf: Any = None, op: MPI.Op = MPI.SUM, root: int = 0, *, token: Token | None = None
    ) -> Any:
        """Reduce sendbuf over all ranks with op and return the result on the root.

        Shapes: sendbuf (...,), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM,
                 PROD, MAX, ... (static). root: rank (static). token: see jaxcomm.token.
        Returns: the reduction on the root, sendbuf elsewhere; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype, or a traced root. ValueError: root out of range.
        """
        x = _operand(sendbuf, "Reduce: sendbuf")
        op_ = _op(recvbuf, op, x, "Reduce")
        _alike(x, recvbuf, x.shape, "Reduce")
        return self._result("reduce", x, token=token, otherwise=x, op=op_, root=_root(root, self.size, "Reduce: root"))

    @_row("allreduce")
    def Allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        replicated: bool = False,
        token: Token | None = None,
    ) -> Any:
        """Reduce sendbuf over all ranks with op and return the result on each.

        Shapes: sendbuf (...,), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM,
                 PROD, MAX, ... (static). replicated: the result is one value that all ranks share, for op=SUM: then its
                 adjoint is the cotangent itself, which must be equal on every rank, and not the sum of the ranks'
                 cotangents. Pvary is its partner. token: see jaxcomm.token.
        Returns: the reduction, equal on every rank; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype. ValueError: recvbuf's shape, or replicated with another op.
        """
        if not replicated:
            return self._reduction("allreduce", "Allreduce", sendbuf, recvbuf, op, token)
        if (recvbuf if isinstance(recvbuf, MPI.Op) else op) != MPI.SUM:
            raise ValueError("Allreduce: replicated=True is for op=MPI.SUM; for another op leave it out")
        return self._reduction("allreduce_replicated", "Allreduce", sendbuf, recvbuf, op, token)

    @_row("pvary")
    def Pvary(self, x: Any) -> Any:
        """Return x, a value that all ranks share, for use in what each rank computes differently.

        The partner of Allreduce(replicated=True), for parameters that every rank holds: nothing is communicated forward,
        and the adjoint adds up what the ranks' uses contribute.

        Shapes: x: a pytree of arrays of any shape, equal on every rank; returns the same. Count: x.size elements each, in
        the adjoint.
        Args:    x: pytree of arrays or scalars.
        Returns: x.
        Raises:  TypeError: dtype.
        """
        leaves, tree = jax.tree_util.tree_flatten(x)
        varied = [self._result("pvary", _operand(leaf, "Pvary: x"), token=None) for leaf in leaves]
        return jax.tree_util.tree_unflatten(tree, varied)

    @_row("reduce_scatter_block")
    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any = None, op: MPI.Op = MPI.SUM, *, token: Token | None = None
    ) -> Any:
        """Reduce sendbuf over all ranks with op and return to each rank its part of the result.

        Shapes: sendbuf (size, ...), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM, PROD, MAX,
                 ... (static). token: see jaxcomm.token.
        Returns: the reduction of sendbuf[rank]; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype. ValueError: leading axis, recvbuf's shape.
        """
        x = self._led(sendbuf, "Reduce_scatter_block: sendbuf")
        op_ = _op(recvbuf, op, x, "Reduce_scatter_block")
        _alike(x, recvbuf, x.shape[1:], "Reduce_scatter_block")
        return self._result("reduce_scatter_block", x, token=token, op=op_)

    @_row("scan")
    def Scan(self, sendbuf: Any, recvbuf: Any = None, op: MPI.Op = MPI.SUM, *, token: Token | None = None) -> Any:
        """Reduce sendbuf with op over the ranks up to and including this one.

        Shapes: sendbuf (...,), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM,
                 PROD, MAX, ... (static). token: see jaxcomm.token.
        Returns: the reduction over ranks 0 to rank; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype. ValueError: recvbuf's shape.
        """
        return self._reduction("scan", "Scan", sendbuf, recvbuf, op, token)

    @_row("exscan")
    def Exscan(self, sendbuf: Any, recvbuf: Any = None, op: MPI.Op = MPI.SUM, *, token: Token | None = None) -> Any:
        """Reduce sendbuf with op over the ranks below this one.

        Shapes: sendbuf (...,), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM,
                 PROD, MAX, ... (static). token: see jaxcomm.token.
        Returns: the reduction over ranks 0 to rank - 1, on rank 0 that of no operands: 0 for SUM, 1 for PROD, the lowest
                 value for MAX; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype. ValueError: recvbuf's shape.
        """
        return self._reduction("exscan", "Exscan", sendbuf, recvbuf, op, token)

    def _reduction(self, name: str, where: str, sendbuf: Any, recvbuf: Any, op: Any, token: Token | None) -> Any:
        x = _operand(sendbuf, f"{where}: sendbuf")
        op_ = _op(recvbuf, op, x, where)
        _alike(x, recvbuf, x.shape, where)
        params: dict[str, Any] = {"op": op_} | ({"reverse": False} if name.endswith("scan") else {})
        nothing = None
        if not TABLE[name].returns(self, params):
            dtype = eager.canonical(x)
            nothing = np.full(x.shape, reductions.identity(op_, dtype), dtype)
        return self._result(name, x, token=token, otherwise=nothing, **params)

    def _led(self, x: Any, where: str) -> Any:
        """Return an operand whose leading axis numbers the ranks."""
        x = _operand(x, where)
        if x.ndim == 0 or x.shape[0] != self.size:
            raise ValueError(
                f"{where}: the leading axis must be the communicator's size {self.size}, got shape {tuple(x.shape)}"
            )
        return x


def _token(token: Any, where: str) -> Token:
    if not isinstance(token, Token):
        raise TypeError(f"{where}: token must be a jaxcomm.Token (see jaxcomm.create_token), got {token!r}")
    return token


class JaxComm(_Operations, MPI.Intracomm):
    """MPI inside JAX programs: mpi4py's communicator, whose operations work on JAX arrays and inside jax.jit.

    `JaxComm(comm)` duplicates an mpi4py communicator, so that its messages never match those of the original. That is
    collective: every rank of comm must do it. The error handler of the duplicate is MPI.ERRORS_RETURN.

    Operations take arrays (JAX, NumPy, scalars) and return JAX arrays; receive buffers are templates. They run in program
    order by themselves. A JaxComm is hashable and may be closed over by a jitted function or be a static argument.
    """


class JaxCartcomm(_Operations, MPI.Cartcomm):
    """A JaxComm with a Cartesian topology: what JaxComm.Create_cart returns."""


class JaxGraphcomm(_Operations, MPI.Graphcomm):
    """A JaxComm with a graph topology: what JaxComm.Create_graph returns."""


class JaxDistgraphcomm(_Operations, MPI.Distgraphcomm):
    """A JaxComm with a distributed graph topology: what JaxComm.Create_dist_graph returns."""


class JaxIntercomm(_Communicator, MPI.Intercomm):
    """An intercommunicator: mpi4py's own methods, on NumPy arrays and Python objects."""


_KINDS = (
    (MPI.Cartcomm, JaxCartcomm),
    (MPI.Distgraphcomm, JaxDistgraphcomm),
    (MPI.Graphcomm, JaxGraphcomm),
    (MPI.Intercomm, JaxIntercomm),
    (MPI.Intracomm, JaxComm),
)


def _adopt(made: Any) -> Any:
    """Give a communicator that mpi4py made the wrapper type; it becomes ours."""
    if isinstance(made, tuple):  # Idup: nothing can be known of the communicator before the request is complete
        made[1].Wait()
        return (_adopt(made[0]), made[1])
    if not isinstance(made, MPI.Comm) or made == MPI.COMM_NULL:
        return made
    base, ours = next(kind for kind in _KINDS if isinstance(made, kind[0]))
    comm: Any = base.__new__(ours, made)  # type: ignore[type-var]
    # A duplicate of the mpi4py object and not ours: Dup would come back here.
    comm._register(shadow=base.Dup(made) if made.Is_intra() else None)
    return comm


def _inherit(cls: type, base: type, name: str, adopt: bool) -> None:
    """Let a method of mpi4py's wait for pending operations first, and return the wrapper type, where we have none."""
    theirs = getattr(base, name, None)
    if theirs is None or getattr(cls, name) is not theirs:
        return

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = jax.tree_util.tree_leaves((args, kwargs))
        if any(isinstance(a, _compat.Tracer) for a in given):
            raise TypeError(_host_only(cls, name))
        if name[0].isupper() and any(isinstance(a, jax.Array) for a in given):
            raise TypeError(f"{cls.__name__}.{name} is mpi4py's own and takes NumPy arrays: pass np.asarray(x)")
        self._check_alive()
        flush()
        result = theirs(self, *args, **kwargs)
        return _adopt(result) if adopt else result

    setattr(cls, name, method)


def _host_only(cls: type, name: str) -> str:
    ours = name.capitalize()
    instead = f"use {ours}, which takes arrays" if ours in _Operations.__dict__ else "call it outside"
    if not issubclass(cls, _Operations):
        instead = "use a JaxComm: an intercommunicator has no operations on JAX arrays"
    return f"{name} works on the host and cannot take a traced value; inside jit {instead}"


# mpi4py's methods that make communicators, and those that communicate on the host.
_MAKERS = """
    Clone Dup Dup_with_info Idup Idup_with_info Create Create_group Split Split_type Shrink Ishrink Create_cart Create_graph
    Create_dist_graph Create_dist_graph_adjacent Create_intercomm Merge Sub
"""
_ON_HOST = """
    send bsend ssend recv sendrecv isend ibsend issend irecv probe iprobe mprobe improbe barrier bcast gather scatter
    allgather alltoall reduce allreduce scan exscan neighbor_allgather neighbor_alltoall Probe Iprobe Mprobe Improbe Isend
    Ibsend Issend Irsend Irecv Isendrecv Isendrecv_replace Bsend Rsend Gatherv Scatterv Allgatherv Alltoallv Alltoallw
    Reduce_scatter Ibarrier Ibcast Igather Igatherv Iscatter Iscatterv Iallgather Iallgatherv Ialltoall Ialltoallv
    Ialltoallw Ireduce Iallreduce Ireduce_scatter Ireduce_scatter_block Iscan Iexscan Neighbor_allgather
    Neighbor_allgatherv Neighbor_alltoall Neighbor_alltoallv Neighbor_alltoallw
    Send Ssend Recv Sendrecv Sendrecv_replace Barrier Bcast Gather Scatter Allgather Alltoall Reduce Allreduce
    Reduce_scatter_block
"""
_ON_HOST += " ".join(name for name in dir(MPI.Comm) + dir(MPI.Intracomm) if name.endswith("_init"))

for _base, _cls in _KINDS:
    for _name in _MAKERS.split():
        _inherit(_cls, _base, _name, adopt=True)
    for _name in _ON_HOST.split():
        _inherit(_cls, _base, _name, adopt=False)
