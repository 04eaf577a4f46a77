"""Request: what Isend, Irecv and the other nonblocking operations return, on concrete arrays and inside jit.

A Request is a pytree: it goes through jit, cond and the carries of loops. Its data belong to the native layer until they
are waited for. Where mpi4py fills a buffer, Wait returns the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm._primitives import _compat, dtypes, nonblocking, statuses
from jaxcomm._primitives.op import Op, Params
from jaxcomm._primitives.statuses import ReceivedStatus
from jaxcomm._primitives.table import TABLE
from jaxcomm.arguments import token_link
from jaxcomm.ragged import Finish
from jaxcomm.token import Token, flush, join, link, own_array

__all__ = ["Leaf", "Part", "Prequest", "Request", "method_result"]


class Part(NamedTuple):
    """One nonblocking operation under way; Isendrecv is two.

    Attributes:
      flight, extra: see nonblocking.py.
      scalars: the traced parameters.
      name: the row of the table.
      comm: the communicator.
      params: the static parameters, as items.
      like: (shape, dtype) of the operand, or None.
    """

    flight: Any
    extra: tuple[Any, ...]
    scalars: dict[str, Any]
    name: str
    comm: Any
    params: tuple[tuple[str, Any], ...]
    like: tuple[tuple[int, ...], np.dtype[Any]] | None

    @property
    def row(self) -> Op:
        return TABLE[self.name]

    @property
    def returns(self) -> bool:
        return self.row.returns(self.comm, dict(self.params))

    def wait(self, links: Sequence[Any], **more: Any) -> list[Any]:
        """Return the row's results."""
        params: Params = dict(self.params) | self.scalars
        known = dict(self.row.params)
        params |= {name: value for name, value in more.items() if name in known or name in ("keep", "chosen")}
        return nonblocking.wait(self.row, self.comm, self.flight, self.extra, self.like, links, **params)

    def only_if(self, told: Any) -> Part:
        """The same, or nothing, for which there is nothing to wait."""
        return self._replace(flight=jnp.where(told, self.flight, nonblocking.NOTHING))


def method_result(y: Any, returns: bool, otherwise: Any, finish: Finish) -> Any:
    """What a method returns, of the row's result or the link in its place: see operations.Planned."""
    if returns:
        return y if finish is None else finish(y)
    return None if otherwise is None else join(own_array(otherwise), y)


class Leaf(NamedTuple):
    """How a result follows from what a part gives: as Planned has it. Part -1: nothing is under way, as it has no data."""

    otherwise: Any
    finish: Finish
    part: int


# A NamedTuple is a pytree by itself, but all its fields would be data.
class _Data(NamedTuple):
    flight: Any
    extra: Any
    scalars: Any


@jax.tree_util.register_pytree_node_class
class Request:
    """A nonblocking operation under way: MPI 4.1, 3.7.

    Wait, Waitall and their like return what the blocking method returns. A request is waited for once; one that never is
    is reported when the program ends, with the place where it was started.

    Inside jit, flags and indices are traced values. Requests of mpi4py, for NumPy buffers, may be among those that Waitall
    and its like take.
    """

    def __init__(self, parts: Sequence[Any], otherwise: Any = None, finish: Finish = None):
        self._parts: tuple[Any, ...] = tuple(parts)
        self._leaves: tuple[Leaf, ...] = (Leaf(otherwise, finish, len(self._parts) - 1),)
        self._tree: Any = None

    @classmethod
    def of_tree(cls, requests: Sequence[Request], leaves: Sequence[Leaf], tree: Any) -> Request:
        """Return one request for several, whose results are the leaves of a pytree."""
        made = cls([part for request in requests for part in request._parts])
        made._leaves, made._tree = tuple(leaves), tree
        return made

    def _like(self, other: Request) -> None:
        self._parts, self._leaves, self._tree = other._parts, other._leaves, other._tree

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        data = tuple(_Data(*part[:3]) for part in self._parts)
        static = tuple((type(part), *part[3:]) for part in self._parts)
        places = tuple(leaf.part for leaf in self._leaves)
        return (data, [leaf[:2] for leaf in self._leaves]), (static, places, self._tree)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Request:
        (data, leaves), (static, places, tree) = children, aux
        made = cls([kind(*d, *s) for d, (kind, *s) in zip(data, static, strict=True)])
        made._leaves = tuple(Leaf(a, b, place) for (a, b), place in zip(leaves, places, strict=True))
        made._tree = tree
        return made

    def __repr__(self) -> str:
        return f"Request({', '.join(f'{part.name} on {part.comm}' for part in self._parts)})"

    # Completion

    def Wait(self, status: MPI.Status | None = None, *, return_status: bool = False, token: Token | None = None) -> Any:
        """Wait until the operation is complete and return its result.

        Args:
          status: filled when the operation has run. return_status: whether to return a ReceivedStatus too.
          token: see jaxcomm.token.
        Returns: what the blocking method returns; (that, status); with a token (that, token).
        Raises: RuntimeError (JaxRuntimeError inside jit): the request was waited for before.
        """
        links = () if token is None else (token_link(token, "Wait").array,)
        result, found = self._collect(status, links, return_status)
        out = (result, found) if return_status else result
        return out if token is None else (out, Token(link(*links, *jax.tree_util.tree_leaves(result))))

    def _collect(
        self, status: Any = None, links: Sequence[Any] = (), enveloped: bool = False, **how: bool
    ) -> tuple[Any, Any]:
        """Wait for all parts. Returns the result and, if `enveloped`, the ReceivedStatus of the message that came.

        How: keep, chosen: see nonblocking.wait.
        """
        ref = statuses.of(status, "Wait")
        outs, failed = [], []
        for part in self._parts:
            try:
                outs.append(part.wait(links, status=ref, enveloped=enveloped, **how))
            except Exception as error:
                failed.append(error)  # the others end nevertheless
        if failed:
            raise failed[0]
        results = [
            method_result(outs[leaf.part][0], self._parts[leaf.part].returns, leaf.otherwise, leaf.finish)
            if leaf.part >= 0
            else leaf.otherwise
            for leaf in self._leaves
        ]
        result = results[0] if self._tree is None else jax.tree_util.tree_unflatten(self._tree, results)
        if not outs:
            return result, ReceivedStatus.of_nothing()
        _, *envelope = outs[-1]
        like = self._parts[-1].like
        if not envelope or not like:
            return result, ReceivedStatus.of_nothing()
        return result, statuses.received(envelope[0], _compat.ShapedArray(*like))

    def Test(self, status: MPI.Status | None = None) -> Any:
        """Return (whether the operation is complete, its result if so, else the template or zeros).

        The result can be had again by one Wait. It has no derivative.
        """
        told = _told([self], waits=False, need=len(self._parts), most=len(self._parts))
        flag = jnp.all(told > 0)
        result, _ = self._if(flag & jnp.all(told < 3))._collect(status, keep=True, chosen=True)
        return _host(flag, bool), result

    def _if(self, told: Any) -> Request:
        made = Request([part.only_if(told) for part in self._parts])
        made._leaves, made._tree = self._leaves, self._tree
        return made

    def Get_status(self, status: MPI.Status | None = None) -> Any:
        """Return whether the operation is complete; it stays to be waited for."""
        _no_status("Get_status", status)
        return _host(jnp.all(_told([self], waits=False, need=len(self._parts), most=len(self._parts)) > 0), bool)

    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> Any:
        """Wait for all requests. Returns the list of their results; fills the list of statuses."""
        given = _statuses(statuses, len(requests))
        return [_wait(request, status) for request, status in zip(requests, given, strict=True)]

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> Any:
        """Return (whether all are complete, their results if so, else None on the host, inside jit templates or zeros)."""
        told = _told(requests, waits=False, need=len(requests), most=len(requests))
        flag = _host(jnp.all(told > 0), bool)
        given = _statuses(statuses, len(requests))
        if flag is False:
            return False, None
        results = [
            r._if(told[i] != 0)._collect(status, keep=True, chosen=True)[0]
            for i, (r, status) in enumerate(zip(requests, given, strict=True))
        ]
        return flag, results

    @classmethod
    def Waitany(cls, requests: Sequence[Any], status: MPI.Status | None = None) -> Any:
        """Wait until one of those not yet complete is. Returns (its index, its result); (MPI.UNDEFINED, None) if all are.

        Inside jit the results of all requests must be alike; where all are complete, the result is zeros.
        """
        return cls._pick(requests, _told(requests, waits=True, need=1, most=1), status)

    @classmethod
    def Testany(cls, requests: Sequence[Any], status: MPI.Status | None = None) -> Any:
        """As Waitany without waiting. Returns (index, flag, result); flag is true too where all were complete before."""
        told = _told(requests, waits=False, need=1, most=1)
        index, result = cls._pick(requests, told, status)
        return index, _host(jnp.any(told == 1) | jnp.all(told > 1), bool), result

    @classmethod
    def _pick(cls, requests: Sequence[Any], told: Any, status: Any) -> tuple[Any, Any]:
        if not requests:
            return MPI.UNDEFINED, None
        now = told == 1
        index = jnp.where(jnp.any(now), jnp.argmax(now), MPI.UNDEFINED).astype(jnp.int32)
        if not isinstance(index, _compat.Tracer):
            chosen = int(index)
            return chosen, None if chosen == MPI.UNDEFINED else _wait(requests[chosen], status, chosen=True)
        results = [r._if(now[i])._collect(status, chosen=True)[0] for i, r in enumerate(requests)]
        kinds = {str(jax.tree_util.tree_map(lambda y: f"{y.dtype.name}{list(y.shape)}", result)) for result in results}
        if len(kinds) > 1:
            raise TypeError(
                f"Waitany inside jit: the results must have one shape and dtype, got {' and '.join(sorted(kinds))}; "
                "use Waitall or Waitsome"
            )

        def pick(*ys: Any) -> Any:
            stack = dtypes.concatenate([y[None] for y in ys])
            return jnp.take(stack, index, axis=0, mode="fill", fill_value=0)

        return index, jax.tree_util.tree_map(pick, *results)

    @classmethod
    def Waitsome(cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> Any:
        """Wait until some of those not yet complete are. Returns (their indices, their results).

        On the host two lists, (None, None) if all are complete. Inside jit an int32 array and a list with an element for
        each request: MPI.UNDEFINED and zeros where it is not now complete.
        """
        return cls._some(requests, statuses, waits=True)

    @classmethod
    def Testsome(cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> Any:
        """As Waitsome without waiting."""
        return cls._some(requests, statuses, waits=False)

    @classmethod
    def _some(cls, requests: Sequence[Any], statuses: Any, waits: bool) -> tuple[Any, Any]:
        told = _told(requests, waits=waits, need=1, most=len(requests))
        now = told == 1
        if isinstance(told, _compat.Tracer):
            indices = jnp.where(now, jnp.arange(len(requests)), MPI.UNDEFINED).astype(jnp.int32)
            results = [r._if(now[i])._collect(chosen=True)[0] for i, r in enumerate(requests)]
            return indices, [_where(now[i], result) for i, result in enumerate(results)]
        if np.all(np.asarray(told) > 1):
            return None, None
        chosen = [int(i) for i in np.flatnonzero(now)]
        given = _statuses(statuses, len(chosen))
        return chosen, [_wait(requests[i], status, chosen=True) for i, status in zip(chosen, given, strict=True)]

    def Cancel(self) -> None:
        """Cancel a receive for which no message has come: Wait then returns the template. Others are left alone."""
        for part in self._parts:
            nonblocking.end("cancel", part.comm, part.flight)

    def Free(self) -> None:
        """Let the operation end by itself: it is not to be waited for."""
        for part in self._parts:
            nonblocking.end("release", part.comm, part.flight)

    # mpi4py's lower-case names, which return results too

    wait, test, get_status, cancel, free = Wait, Test, Get_status, Cancel, Free
    waitall, testall, waitany, testany, waitsome, testsome = Waitall, Testall, Waitany, Testany, Waitsome, Testsome

    @classmethod
    def Get_status_all(cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> Any:
        """Return whether all are complete."""
        _no_status("Get_status_all", statuses)
        return _host(jnp.all(_told(requests, waits=False, need=len(requests), most=len(requests)) > 0), bool)

    @classmethod
    def Get_status_any(cls, requests: Sequence[Any], status: MPI.Status | None = None) -> Any:
        """Return (the index of one that is complete or MPI.UNDEFINED, whether there is one or all were before)."""
        _no_status("Get_status_any", status)
        told = _told(requests, waits=False, need=1, most=1)
        index = jnp.where(jnp.any(told == 1), jnp.argmax(told == 1), MPI.UNDEFINED)
        return _host(index, int), _host(jnp.any(told == 1) | jnp.all(told > 1), bool)

    @classmethod
    def Get_status_some(cls, requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> Any:
        """Return the indices of those that are complete; inside jit a mask."""
        _no_status("Get_status_some", statuses)
        told = _told(requests, waits=False, need=1, most=len(requests))
        if isinstance(told, _compat.Tracer):
            return told == 1
        return [int(i) for i in np.flatnonzero(np.asarray(told) == 1)] if np.any(np.asarray(told) < 2) else None

    get_status_all, get_status_any, get_status_some = Get_status_all, Get_status_any, Get_status_some

    # What an mpi4py request has beside: a handle

    @property
    def handle(self) -> NoReturn:
        """Not here: the operation belongs to the native layer, and has no MPI handle that could be given away."""
        _no_handle("handle")

    def toint(self) -> NoReturn:
        """As handle."""
        _no_handle("toint")

    def py2f(self) -> NoReturn:
        """As handle."""
        _no_handle("py2f")

    @classmethod
    def fromhandle(cls, handle: int) -> NoReturn:
        """As handle."""
        _no_handle("fromhandle")

    @classmethod
    def fromint(cls, arg: int, /) -> NoReturn:
        """As handle."""
        _no_handle("fromint")

    @classmethod
    def f2py(cls, arg: int) -> NoReturn:
        """As handle."""
        _no_handle("f2py")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Request is of this process and cannot be pickled")


def _theirs_too(name: str, method: Any) -> Any:
    """Let a method for several requests take mpi4py's: alone they are completed as ever."""

    @functools.wraps(method)
    def complete(cls: type, requests: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for request in requests:
            if not isinstance(request, (Request, MPI.Request)):
                raise TypeError(f"{name}: requests must be Requests, got {request!r}")
        if requests and all(isinstance(request, MPI.Request) for request in requests):
            flush()
            return getattr(MPI.Request, name)(requests, *args, **kwargs)
        return method(cls, requests, *args, **kwargs)

    return classmethod(complete)


for _name in ("all", "any", "some"):
    for _verb in ("Wait", "Test", "Get_status_"):
        for _method in (_verb + _name, (_verb + _name).lower()):
            setattr(Request, _method, _theirs_too(_method, vars(Request)[_method].__func__))


def _no_handle(name: str) -> NoReturn:
    raise NotImplementedError(
        f"Request.{name}: a jaxcomm Request has no MPI handle; wait for it by its own methods, or use NumPy buffers, for "
        "which the methods return mpi4py's requests"
    )


def _wait(request: Any, status: Any, chosen: bool = False) -> Any:
    """Wait for one of ours or of mpi4py's, which fills its buffer or gives an object; chosen as for nonblocking.wait."""
    if isinstance(request, Request):
        return request._collect(status, chosen=chosen)[0]
    flush()
    return request.wait(status)


def _told(requests: Sequence[Any], waits: bool, need: int, most: int) -> Any:
    """nonblocking.choose; of a request of two parts the last one tells, the receive."""
    if any(isinstance(request, MPI.Request) for request in requests):
        raise TypeError("requests of mpi4py's are completed by MPI.Request's methods, or by Waitall here")
    parts = [request._parts for request in requests]
    comm = next((part.comm for of_one in parts for part in of_one), None)
    if comm is None:
        return np.full(len(parts), 3, np.int32)
    ends = [p[-1].flight if p else nonblocking.NOTHING for p in parts]
    flights = [part.flight for part in parts[0]] if len(parts) == 1 else ends
    told = nonblocking.choose(comm, flights, waits=waits, need=need, most=most)
    return told if isinstance(told, _compat.Tracer) else np.asarray(told)


def _no_status(where: str, status: Any) -> None:
    if status is not None:
        raise TypeError(f"{where}: a status is filled by Wait, Test and their like; here it must be None")


def _where(told: Any, result: Any) -> Any:
    """The leaves of a result, or zeros."""
    return jax.tree_util.tree_map(
        lambda y: y if dtypes.is_nothing(y) else jnp.where(told, y, dtypes.zeros(y.shape, y.dtype)), result
    )


def _host(value: Any, kind: Callable[[Any], Any]) -> Any:
    """A concrete value as Python's own, a traced one as it is."""
    return value if isinstance(value, _compat.Tracer) else kind(value)


def _statuses(given: list[MPI.Status] | None, count: int) -> list[Any]:
    """As many statuses as there are requests: mpi4py fills the list up."""
    if given is None:
        return [None] * count
    given.extend(MPI.Status() for _ in range(count - len(given)))
    return given[:count]


class Prequest(Request):
    """A persistent request: an operation with its arguments, started as often as one likes. MPI 4.1, 3.9.

    JAX arrays do not change, so each start sends the same operand unless it is given another. Inside jit it belongs to the
    trace in which it was made.
    """

    def __init__(self, begin: Callable[..., Request]):
        super().__init__(())
        self._begin = begin
        self._active = self._freed = False

    def Start(self, *operands: Any) -> None:
        """Start the operation, with the operand that it was made with or another in its place."""
        if self._freed:
            raise RuntimeError("Start: the request was freed (Free); make a new one")
        if self._active:
            raise RuntimeError("Start: the request is active; wait for it first")
        current = self._begin(*operands)
        self._like(current)
        self._active = True

    def Free(self) -> None:
        """Start no more; an operation that is under way ends by itself."""
        super().Free()
        self._freed = True

    free = Free

    @classmethod
    def Startall(cls, requests: list[Any]) -> None:
        """Start several, of mpi4py's too."""
        for request in requests:
            request.Start()

    def _collect(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._active:  # MPI 4.1, 3.9: to wait for an inactive request does nothing
            return None, ReceivedStatus.of_nothing()
        out = super()._collect(*args, **kwargs)
        self._active = bool(kwargs.get("keep"))
        self._parts = self._parts if self._active else ()
        return out

    def Pready(self, partition: int) -> NoReturn:
        """Not here: a JAX array is complete when it is there, so its parts cannot be sent one by one."""
        _no_partitions("Pready")

    def Pready_range(self, partition_low: int, partition_high: int) -> NoReturn:
        """As Pready."""
        _no_partitions("Pready_range")

    def Pready_list(self, partitions: Sequence[int]) -> NoReturn:
        """As Pready."""
        _no_partitions("Pready_list")

    def Parrived(self, partition: int) -> NoReturn:
        """As Pready."""
        _no_partitions("Parrived")


def _no_partitions(name: str) -> NoReturn:
    raise NotImplementedError(
        f"Prequest.{name}: partitioned communication is for NumPy buffers (Psend_init, Precv_init); a JAX array is "
        "complete when it is there"
    )
