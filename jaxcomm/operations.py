"""The operations of JaxComm on arrays: one short method each, which checks its arguments and names its row of the table.

A method as written returns a Planned call. The decorator makes of it the method that users call, which runs the plan.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from mpi4py import MPI

from jaxcomm import folds, mixed, ragged, trees
from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, dtypes, eager, lowering, nonblocking, packed, reductions, shapes, statuses
from jaxcomm._primitives.make import bind, is_array
from jaxcomm._primitives.op import BUFFERED, STANDARD, SYNCHRONOUS, Op, Params
from jaxcomm._primitives.reductions import Mean
from jaxcomm._primitives.table import TABLE
from jaxcomm._primitives.trees import bind as bind_tree
from jaxcomm.arguments import (
    Divided,
    alike,
    averaged,
    operand,
    peer,
    reduction,
    refuse_order,
    root_rank,
    tag_value,
    token_link,
)
from jaxcomm.buffers import drop_in
from jaxcomm.message import Message, TracedMessage
from jaxcomm.ragged import Finish
from jaxcomm.request import Leaf, Part, Prequest, Request, method_result
from jaxcomm.token import Token, flush, link, own_array

__all__ = ["Operations", "Planned", "derive", "documented", "operation"]

_PEERS = {"dest", "source", "sendtag", "recvtag"}
_known_trees = eager.TreeShortcuts()

F = TypeVar("F", bound=Callable[..., Any])


class Planned(NamedTuple):
    """A call whose arguments are checked.

    Attributes:
      name: the row of the table.
      operands: its arrays.
      params: its parameters.
      token: the user's.
      otherwise: what a rank returns that gets nothing.
      where: the operation's name in messages.
      return_status: whether the result is returned with a ReceivedStatus.
      finish: what makes the method's result of the call's, if that is not the result.
    """

    name: str
    operands: tuple[Any, ...]
    params: Params
    token: Token | None
    otherwise: Any
    where: str
    return_status: bool = False
    finish: Finish = None

    def result(self, y: Any, returns: bool) -> Any:
        """What the method returns, of the row's result or the link in its place."""
        return method_result(y, returns, self.otherwise, self.finish)


def documented(name: str) -> Callable[[F], F]:
    """Complete a method's docstring from its row of the table."""

    def complete(method: F) -> F:
        row = TABLE.get(name) or packed.ROWS[name]
        adjoint = row.adjoint.says if row.adjoint else "none: no data"
        text = inspect.cleandoc(method.__doc__ or "")
        gap = "  " if text.endswith("Raises:") else "\n         "
        method.__doc__ = (
            f"{text}{gap}JaxRuntimeError: MPI reports an error (MPI.Exception when called on concrete arrays).\n"
            f"Adjoint: {adjoint}.   Batching: one call on the batch.\nSource:  {row.source}.\n"
        )
        return method

    return complete


def operation(name: str) -> Callable[[F], F]:
    """Make a method of one that plans a call of a row of the table."""

    def complete(plan: F) -> F:
        @functools.wraps(plan)
        def method(self: Operations, *args: Any, **kwargs: Any) -> Any:
            if trees.among(args, kwargs) and not folds.among(args, kwargs):
                return self._on_tree(plan, args, kwargs)
            planned = plan(self, *args, **kwargs)
            self._agree([planned])
            return self._run(planned)

        # The shortcuts see a call first: what they know are never calls on host buffers.
        made: Any = eager.with_shortcuts(drop_in(documented(name)(method)))
        made.plan = plan
        return made  # type: ignore[no-any-return]

    return complete


def _has_no_data(planned: Planned) -> bool:
    return any(map(dtypes.is_nothing, planned.operands))


def _bare(planned: Planned) -> Planned:
    """The call that returns the result alone."""
    return planned._replace(token=None, return_status=False)


def _said(plans: Sequence[Planned | folds.Fold], tree: Any) -> str:
    """What ranks are to agree on beyond what checks.hpp compares, in words: a function as op, MEAN, the structure of a tree,
    the parts of a reduction. Empty where there is no more."""
    first = plans[0]
    if isinstance(first, folds.Fold):
        return first.says
    row, mean, parts = TABLE[first.name], isinstance(first.finish, Divided), first.name == "reduce_scatter"
    if not row.source.startswith("MPI 4.1, 6.") or not (mean or parts or tree is not None):
        return ""
    equal = parts or ({row.lead_in, row.lead_out} <= {None, "size"} and row.name != "scatter")
    leaves = [plan.operands[0] for plan in plans if isinstance(plan, Planned)]
    of = [f"{eager.canonical(x).name}{list(x.shape) if equal else ''}" for x in leaves]
    what = of[0] if tree is None else folds.tree_text(jax.tree_util.tree_unflatten(tree, of))
    facts = {"root": first.params.get("root"), "recvcounts": first.params.get("counts") if parts else None}
    more = [f", {name} {value}" for name, value in facts.items() if value is not None]
    return f"{first.where} of {what}{', op MEAN' if mean else ''}{''.join(more)}"


def _parts(name: str, operands: Sequence[Any]) -> list[tuple[str, Sequence[Any]]]:
    """The operations that a nonblocking one is made of, each with its operands; the last has the result."""
    if name == "sendrecv":
        return [("send", operands[:1]), ("recv", operands[1:])]
    return [(name, operands)]


class Operations:
    """The operations on arrays: what the wrapper types share; mixed into mpi4py's classes."""

    rank: int
    size: int
    peers: int
    slot: int
    _check_alive: Callable[[], None]

    def _planned(
        self,
        name: str,
        *operands: Any,
        token: Token | None,
        otherwise: Any = None,
        where: str = "",
        finish: Finish = None,
        **params: Any,
    ) -> Planned:
        return_status = params.pop("return_status", False)
        return Planned(name, operands, params, token, otherwise, where or name.capitalize(), return_status, finish)

    def _agree(self, plans: Sequence[Planned | folds.Fold], tree: Any = None) -> None:
        """In checking mode, compare with other ranks what the native layer will not see of a call."""
        if bridge.checking() and plans and (text := _said(plans, tree)):
            self._call("agree", says=lowering.number_of(text))

    def _run(self, planned: Planned | folds.Fold) -> Any:
        """Run or stage a call. Returns what the method returns: the result, with a token if one was given."""
        if isinstance(planned, folds.Fold):
            return planned.run()
        name, operands, params, token, _, where, return_status, _ = planned
        links = () if token is None else (token_link(token, where).array,)
        more = {"enveloped": True} if return_status else {}
        y, *envelope = self._call(name, *operands, links=links, **params | more)
        result = planned.result(y, TABLE[name].returns(self, params))
        if return_status:
            result = result, statuses.received(envelope[0], operands[-1])
        if token is None:
            return result
        return result, Token(link(*links, y))

    def _on_tree(self, plan: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call() -> Any:
            more = {name: kwargs[name] for name in ("token", "return_status") if name in kwargs}
            plans, tree = trees.planned(plan, self, args, kwargs)
            self._agree(plans, tree)
            return self._run_tree(plans, tree, **more)

        kind = None if bridge.checking() else trees.key_of(plan, self, args, kwargs)
        if kind is None:
            return call()
        self._check_alive()
        key, leaves = kind
        key = (*key, lowering.caller() if bridge.observed() else 0)
        known = _known_trees.run(key, leaves)
        if known is None:
            return _known_trees.watch(key, leaves, call)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(args[0]), known)

    def _run_tree(
        self, plans: list[Planned], tree: Any, token: Token | None = None, return_status: bool = False
    ) -> Any:
        """As _run, for all leaves of a tree in one call. Returns a tree like the operand."""
        results = [self._run(_bare(plan)) if _has_no_data(plan) else None for plan in plans]
        moving = [(i, plan) for i, plan in enumerate(plans) if not _has_no_data(plan)]
        links = () if token is None else (token_link(token, plans[0].where if plans else "token").array,)
        self._check_alive()
        found, ends = statuses.ReceivedStatus.of_nothing(), list(links)
        if moving:
            first = moving[0][1]
            more = {"enveloped": True} if return_status else {}
            leaves = [plan.operands for _, plan in moving]
            ys = bind_tree(TABLE[first.name], self, leaves, links, **first.params | more)
            ends.append(ys[0])
            if return_status:
                elements = sum(x[-1].size for x in leaves)
                found = statuses.received(ys.pop(), jax.ShapeDtypeStruct((elements,), np.uint8))
            returns = TABLE[first.name].returns(self, first.params)
            for k, (i, plan) in enumerate(moving):
                results[i] = plan.result(ys[k] if returns else ys[0], returns)
        result = jax.tree_util.tree_unflatten(tree, results)
        result = (result, found) if return_status else result
        return result if token is None else (result, Token(link(*ends)))

    def _begin(self, planned: Planned) -> Any:
        """Start or stage a call. Returns its Request, with a token if one was given."""
        name, operands, params, token, otherwise, where, _, finish = planned
        links = () if token is None else (token_link(token, where).array,)
        self._check_alive()
        if _has_no_data(planned):
            result = self._run(_bare(planned))
            return Request([], result) if token is None else (Request([], result), token)
        # What is received depends on what is sent, as in the blocking form.
        links = (*links, operands[0]) if name == "sendrecv" else links
        parts = [self._start(part, x, links, params) for part, x in _parts(name, operands)]
        request = Request(parts, otherwise, finish)
        return request if token is None else (request, Token(link(*links, *(part.flight for part in parts))))

    def _begin_tree(self, plans: list[Planned], tree: Any, token: Token | None) -> Any:
        """As _begin, for all leaves of a tree: one request, of a message for each group of leaves, as _run_tree's."""
        requests: list[Request] = []
        leaves = [Leaf(self._run(_bare(plan)) if _has_no_data(plan) else None, None, -1) for plan in plans]
        moving = [i for i in range(len(plans)) if not _has_no_data(plans[i])]
        for group in trees.groups(self, [plans[i] for i in moving]):
            group = [moving[i] for i in group]
            packed, cuts = trees.packed(self, [plans[i] for i in group])
            requests.append(self._begin(packed._replace(token=None)))
            last = sum(len(request._parts) for request in requests) - 1
            for i, cut in zip(group, cuts, strict=True):
                leaves[i] = Leaf(plans[i].otherwise, cut, last)
        request = Request.of_tree(requests, leaves, tree)
        if token is None:
            return request
        return request, Token(link(token.array, *(part.flight for part in request._parts)))

    def _requested(self, name: str, *operands: Any, **params: Any) -> Any:
        return self._begin(self._planned(name, *operands, token=None, **params))

    def _start(self, name: str, operands: Sequence[Any], links: Sequence[Any], params: Params) -> Part:
        row = TABLE[name]
        mine = {key: value for key, value in params.items() if key in dict(row.params)}
        flight = nonblocking.start(row, self, operands, links, **mine)
        # Ranks and tags are data of a request, so that loops and branches may mix those that are traced with others.
        mine |= {
            key: np.array(mine[key], np.int32)
            for key in _PEERS & mine.keys()
            if isinstance(mine[key], int) and mine[key] >= 0
        }
        scalars = {key: value for key, value in mine.items() if is_array(value)}
        static = tuple((key, value) for key, value in mine.items() if key not in scalars and key != "status")
        extra = operands[: nonblocking.extras(row, dict(row.params) | mine)]
        like = (tuple(operands[0].shape), eager.canonical(operands[0])) if operands else None
        return Part(flight, tuple(own_array(x) for x in extra), scalars, name, self, static, like)

    def _call(self, name: str, *operands: Any, links: Sequence[Any] = (), **params: Any) -> list[Any]:
        """Run or stage a row of the table. Returns what make.bind returns."""
        self._check_alive()
        row = TABLE[name]
        if any(map(dtypes.is_nothing, operands)):
            return self._nothing(row, operands, dict(row.params) | params)
        concrete = not _compat.tracing() and not any(isinstance(x, _compat.Tracer) for x in (*operands, *links))
        if concrete and row.target:
            return eager.run(row, self, operands, dict(row.params) | params)
        return bind(row, self, [own_array(x) for x in operands], links, **params)

    def _nothing(self, row: Op, operands: Sequence[Any], params: Params) -> list[Any]:
        """What an operation on arrays of float0 returns, which have no data: nothing is communicated."""
        y, *envelope = shapes.results(row, self, params, operands)
        results = [dtypes.nothing(y.shape) if row.returns(self, params) else np.zeros(y.shape, y.dtype)]
        return results + [np.array([MPI.PROC_NULL, MPI.ANY_TAG, 0], np.int32) for _ in envelope]

    # MPI 4.1, chapter 3: point-to-point

    @operation("send")
    def Send(self, buf: Any, dest: int, tag: int = 0, *, token: Token | None = None) -> Any:
        """Send buf to another rank.

        Shapes: buf (...,). Count: buf.size elements.
        Args:    buf: array or scalar. dest: rank or PROC_NULL, may be traced. tag: 0 to TAG_UB, may be traced.
                 token: see jaxcomm.token.
        Returns: None; (None, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: dest or tag out of range.
        """
        return self._send("Send", buf, dest, tag, token, mode=STANDARD)

    @operation("send")
    def Ssend(self, buf: Any, dest: int, tag: int = 0, *, token: Token | None = None) -> Any:
        """Send buf to another rank and return when its receive has begun.

        Shapes: buf (...,). Count: buf.size elements.
        Args:    buf, dest, tag, token: as Send.
        Returns: None; (None, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: dest or tag out of range.
        """
        return self._send("Ssend", buf, dest, tag, token, mode=SYNCHRONOUS)

    @operation("send")
    def Bsend(self, buf: Any, dest: int, tag: int = 0, *, token: Token | None = None) -> Any:
        """Send buf to another rank and return at once: the native layer keeps a copy (no buffer is to be attached).

        Shapes: buf (...,). Count: buf.size elements.
        Args:    buf, dest, tag, token: as Send.
        Returns: None; (None, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: dest or tag out of range.
        """
        return self._send("Bsend", buf, dest, tag, token, mode=BUFFERED)

    @operation("send")
    def Rsend(self, buf: Any, dest: int, tag: int = 0, *, token: Token | None = None) -> Any:
        """Send buf to a rank that is known to be receiving already. As Send, which promises less (MPI 4.1, 3.4).

        Shapes: buf (...,). Count: buf.size elements.
        Args:    buf, dest, tag, token: as Send.
        Returns: None; (None, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: dest or tag out of range.
        """
        return self._send("Rsend", buf, dest, tag, token, mode=STANDARD)

    def _send(self, where: str, buf: Any, dest: Any, tag: Any, token: Token | None, mode: int) -> Any:
        x = operand(buf, f"{where}: buf")
        to = peer(dest, self.peers, f"{where}: dest")
        return self._planned(
            "send",
            x,
            token=token,
            where=where,
            dest=to,
            sendtag=tag_value(tag, f"{where}: tag"),
            mode=mode,
        )

    @operation("recv")
    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        return_status: bool = False,
        token: Token | None = None,
    ) -> Any:
        """Receive a message like buf and return it.

        Shapes: buf (...,), a template; returns (...,), same dtype. Count: at most buf.size elements. Where fewer arrive,
        or none (PROC_NULL), buf's elements stay.
        Args:    buf: array, scalar or ShapeDtypeStruct. source: rank, ANY_SOURCE or PROC_NULL, may be traced. tag: 0 to
                 TAG_UB or ANY_TAG, may be traced. status: filled when the operation has run. return_status: return a
                 ReceivedStatus too, whose source, tag and count are int32 values that a program in jit can act on.
                 token: see jaxcomm.token.
        Returns: the message; (message, status) with return_status; (that, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: source or tag out of range. An MPI error: the message is longer than buf.
        """
        template = operand(buf, "Recv: buf", template=True)
        return self._planned(
            "recv",
            template,
            token=token,
            source=peer(source, self.peers, "Recv: source", wildcard=True),
            recvtag=tag_value(tag, "Recv: tag", wildcard=True),
            status=statuses.of(status, "Recv"),
            return_status=return_status,
        )

    @operation("sendrecv")
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
        return_status: bool = False,
        token: Token | None = None,
    ) -> Any:
        """Send sendbuf to one rank and return a message like recvbuf from another, without deadlock.

        Shapes: sendbuf (...,), recvbuf (...,), a template, by default sendbuf; returns like recvbuf. Count: sendbuf.size
        elements go, at most recvbuf.size come; where fewer come, or none (PROC_NULL), recvbuf's elements stay.
        Args:    sendbuf: array or scalar. dest: rank or PROC_NULL. sendtag: 0 to TAG_UB. recvbuf: array, scalar or
                 ShapeDtypeStruct, of sendbuf's dtype. source: rank, ANY_SOURCE or PROC_NULL. recvtag: 0 to TAG_UB or
                 ANY_TAG. status: filled when the operation has run. return_status: as Recv. token: see jaxcomm.token.
                 Ranks and tags may be traced.
        Returns: the message; (message, status) with return_status; (that, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: rank or tag out of range, recvbuf's dtype. An MPI error: the message is
                 longer than recvbuf.
        """
        return self._sendrecv(
            "Sendrecv", sendbuf, dest, sendtag, recvbuf, source, recvtag, status, return_status, token
        )

    @operation("sendrecv")
    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        return_status: bool = False,
        token: Token | None = None,
    ) -> Any:
        """Send buf to one rank and return a message like it from another.

        Shapes: buf (...,); returns (...,), same dtype. Count: buf.size elements go, at most as many come.
        Args:    buf: array or scalar. The others: as Sendrecv.
        Returns: the message; (message, status) with return_status; (that, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: rank or tag out of range. An MPI error: the message is longer than buf.
        """
        return self._sendrecv(
            "Sendrecv_replace", buf, dest, sendtag, None, source, recvtag, status, return_status, token
        )

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
        return_status: bool,
        token: Token | None,
    ) -> Any:
        x = operand(sendbuf, f"{where}: sendbuf")
        template = x if recvbuf is None else operand(recvbuf, f"{where}: recvbuf", template=True)
        sent, received = (eager.canonical(a) for a in (x, template))
        if sent != received:
            raise ValueError(f"{where}: recvbuf must have sendbuf's dtype {sent.name}, got {received.name}")
        return self._planned(
            "sendrecv",
            x,
            template,
            token=token,
            where=where,
            dest=peer(dest, self.peers, f"{where}: dest"),
            sendtag=tag_value(sendtag, f"{where}: sendtag"),
            source=peer(source, self.peers, f"{where}: source", wildcard=True),
            recvtag=tag_value(recvtag, f"{where}: recvtag", wildcard=True),
            status=statuses.of(status, where),
            return_status=return_status,
        )

    # What a probe finds out. The message that a matched one finds is received by its own Recv (message.py).

    @documented("probe")
    def Probe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        return_status: bool = False,
    ) -> Any:
        """Wait until there is a message that Recv with these arguments would receive.

        Shapes: no array. Count: 0.
        Args:    source, tag: as Recv. status: filled when the operation has run. return_status: return a ReceivedStatus,
                 whose count is in bytes.
        Returns: True; with return_status the status.
        Raises:  TypeError: source or tag is no integer. ValueError: source or tag out of range.
        """
        found, _ = self._probe("Probe", source, tag, status, waits=True)
        return found if return_status else True

    @documented("probe")
    def Iprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        return_status: bool = False,
    ) -> Any:
        """Tell whether there is a message that Recv with these arguments would receive.

        Shapes: no array. Count: 0.
        Args:    source, tag: as Recv. status, return_status: as Probe.
        Returns: bool, traced inside jit; with return_status (that, status).
        Raises:  TypeError: source or tag is no integer. ValueError: source or tag out of range.
        """
        found, (flag, _) = self._probe("Iprobe", source, tag, status, waits=False)
        flag = flag if isinstance(flag, _compat.Tracer) else bool(flag)
        return (flag, found) if return_status else flag

    @documented("probe")
    def Mprobe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        return_status: bool = False,
    ) -> Any:
        """Wait for a message and return it, to be received by its own Recv and by no other.

        Shapes: no array. Count: 0.
        Args:    source, tag: as Recv. status, return_status: as Probe.
        Returns: Message; with return_status (that, status).
        Raises:  TypeError: source or tag is no integer. ValueError: source or tag out of range.
        """
        if not _compat.tracing() and not return_status:
            return self._matched_on_host(MPI.Message.Probe, source, tag, status)
        found, (_, number) = self._probe("Mprobe", source, tag, status, waits=True, matched=True)
        message = TracedMessage(self, number, found)
        return (message, found) if return_status else message

    @documented("probe")
    def Improbe(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        return_status: bool = False,
    ) -> Any:
        """Return a message if there is one, to be received by its own Recv and by no other.

        Shapes: no array. Count: 0.
        Args:    source, tag: as Recv. status, return_status: as Probe.
        Returns: Message or None. Inside jit (flag, Message): the Recv of a message that is not there returns the template.
                 With return_status the status beside.
        Raises:  TypeError: source or tag is no integer. ValueError: source or tag out of range.
        """
        if not _compat.tracing() and not return_status:
            return self._matched_on_host(MPI.Message.Iprobe, source, tag, status)
        found, (flag, number) = self._probe("Improbe", source, tag, status, waits=False, matched=True)
        message = TracedMessage(self, number, found)
        return (flag, message, found) if return_status else (flag, message)

    def _matched_on_host(self, probe: Any, source: Any, tag: Any, status: Any) -> Message | None:
        self._check_alive()
        flush()
        known = MPI.Status() if status is None else status
        found = probe(self, source, tag, known)
        return None if found is None else Message.of(self, found, known)

    def _probe(
        self, where: str, source: Any, tag: Any, status: Any, waits: bool, matched: bool = False
    ) -> tuple[statuses.ReceivedStatus, tuple[Any, Any]]:
        """Return the status, and (whether there is a message, its number in the native layer)."""
        (found,) = self._call(
            "probe",
            source=peer(source, self.peers, f"{where}: source", wildcard=True),
            recvtag=tag_value(tag, f"{where}: tag", wildcard=True),
            status=statuses.of(status, where),
            waits=waits,
            matched=matched,
        )
        if not isinstance(found, _compat.Tracer):
            found = np.asarray(found)
        return statuses.ReceivedStatus(*found[:3]), (found[3] != 0, found[4])

    # MPI 4.1, chapter 6: collectives

    @operation("barrier")
    def Barrier(self, *, token: Token | None = None) -> Any:
        """Wait until every rank has come here, in its place among the other operations of the program.

        Shapes: no array. Count: 0.
        Args:    token: see jaxcomm.token.
        Returns: None; (None, token) if a token was given.
        Raises:
        """
        return self._planned("barrier", token=token)

    @operation("bcast")
    def Bcast(self, buf: Any, root: int = 0, *, token: Token | None = None) -> Any:
        """Return the root's buf on every rank.

        Shapes: buf (...,), equal on every rank, elsewhere than on the root a template; returns (...,), same dtype. Count:
        buf.size elements.
        Args:    buf: array, scalar, or off the root a ShapeDtypeStruct. root: rank (static). token: see jaxcomm.token.
        Returns: the root's array; (array, token) if a token was given.
        Raises:  TypeError: dtype, or a traced root. ValueError: root out of range.
        """
        root = root_rank(root, self.size, "Bcast: root")
        x = operand(buf, "Bcast: buf", template=self.rank != root)
        return self._planned("bcast", x, token=token, root=root)

    @operation("gather")
    def Gather(self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, token: Token | None = None) -> Any:
        """Return the arrays of all ranks, stacked, on the root.

        Shapes: sendbuf (...,), equal on every rank; returns (size, ...) on the root, sendbuf elsewhere. Count: sendbuf.size
        elements from each rank.
        Args:    sendbuf: array or scalar. recvbuf: template of the root's result, optional. root: rank (static). token:
                 see jaxcomm.token.
        Returns: the stack on the root, sendbuf elsewhere; (that, token) if a token was given.
        Raises:  TypeError: dtype, or a traced root. ValueError: root out of range, recvbuf's shape.
        """
        x = operand(sendbuf, "Gather: sendbuf")
        root = root_rank(root, self.size, "Gather: root")
        if self.rank == root:
            alike(x, recvbuf, (self.size, *x.shape), "Gather")
        return self._planned("gather", x, token=token, otherwise=x, root=root)

    @operation("gatherv")
    def Gatherv(
        self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, counts: Any = None, token: Token | None = None
    ) -> Any:
        """Return the arrays of all ranks, of different lengths, one after the other, on the root.

        Shapes: sendbuf (n, ...), equal on every rank but for n; returns (sum of the n, ...) on the root, sendbuf
        elsewhere. Count: sendbuf.size elements from each rank.
        Args:    sendbuf: array, or a message spec [x, count] of one. recvbuf: template of the root's result, or a message
                 spec of one (counts in elements, displacements: see docs/ragged.md), optional. root: rank (static). counts:
                 rows from each rank (static), on the root; without them and a spec, all ranks have as many. token: see
                 jaxcomm.token.
        Returns: the parts in the order of the ranks, on the root; sendbuf elsewhere; (that, token) if a token was given.
        Raises:  TypeError: dtype, traced root or counts. ValueError: root out of range, counts, recvbuf's shape.
        """
        root = root_rank(root, self.size, "Gatherv: root")
        x = ragged.sent(sendbuf, "Gatherv: sendbuf")
        known: tuple[int, ...] = ()
        finish = None
        if self.rank == root:
            even = (x.shape[0],) * self.size
            known, finish = ragged.parts_received(recvbuf, counts, x, self.size, "Gatherv", "counts", even)
        ragged.check_own(known or counts, x, self, "Gatherv: counts")
        return self._planned("gatherv", x, token=token, otherwise=x, finish=finish, root=root, counts=known)

    @operation("scatter")
    def Scatter(self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, token: Token | None = None) -> Any:
        """Return to each rank its part of the root's array.

        Shapes: sendbuf (size, ...) on the root; elsewhere the template (...,) is recvbuf, or sendbuf if that is not given;
        returns (...,), same dtype. Count: size * the result's size on the root.
        Args:    sendbuf: array; elsewhere than on the root None, or a template. recvbuf: array, scalar or ShapeDtypeStruct,
                 optional on the root. root: rank (static). token: see jaxcomm.token.
        Returns: sendbuf[rank] of the root; (that, token) if a token was given.
        Raises:  TypeError: dtype, or a traced root. ValueError: root out of range, leading axis, recvbuf's shape.
        """
        root = root_rank(root, self.size, "Scatter: root")
        if self.rank == root:
            x = self._led(sendbuf, "Scatter: sendbuf")
            alike(x, recvbuf, x.shape[1:], "Scatter")
        else:
            template = sendbuf if recvbuf is None else recvbuf
            x = operand(template, "Scatter: recvbuf (or a template in sendbuf's place)", template=True)
        return self._planned("scatter", x, token=token, root=root)

    @operation("scatterv")
    def Scatterv(
        self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, counts: Any = None, token: Token | None = None
    ) -> Any:
        """Return to each rank its part of the root's array, of which each may have another length.

        Shapes: sendbuf (sum of the n, ...) on the root; elsewhere the template (n, ...) is recvbuf, or sendbuf if that is
        not given; returns (n, ...), same dtype. Count: sendbuf.size elements on the root.
        Args:    sendbuf: array, or a message spec of one (counts in elements, displacements: see docs/ragged.md); elsewhere
                 than on the root None, or a template. recvbuf: array or ShapeDtypeStruct, or a message spec [x, count] of
                 one, optional on the root. root: rank (static). counts: rows for each rank (static), on the root; without
                 them and a spec, all get as many. token: see jaxcomm.token.
        Returns: this rank's part; (that, token) if a token was given.
        Raises:  TypeError: dtype, traced root or counts. ValueError: root out of range, counts, recvbuf's shape.
        """
        root = root_rank(root, self.size, "Scatterv: root")
        known: tuple[int, ...] = ()
        if self.rank == root:
            x, known = ragged.parts_sent(sendbuf, counts, self.size, "Scatterv: sendbuf")
            finish = ragged.received(recvbuf, x, (known[root], *x.shape[1:]), "Scatterv")
        else:
            template = sendbuf if recvbuf is None else recvbuf
            x, finish = ragged.template_of_part(template, "Scatterv: recvbuf (or a template in sendbuf's place)")
            ragged.check_own(counts, x, self, "Scatterv: counts")
        return self._planned("scatterv", x, token=token, finish=finish, root=root, counts=known)

    @operation("allgather")
    def Allgather(self, sendbuf: Any, recvbuf: Any = None, *, token: Token | None = None) -> Any:
        """Return the arrays of all ranks, stacked, on every rank.

        Shapes: sendbuf (...,), equal on every rank; returns (size, ...), same dtype. Count: sendbuf.size elements from
        each rank.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional. token: see jaxcomm.token.
        Returns: the stack; (stack, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: recvbuf's shape.
        """
        x = operand(sendbuf, "Allgather: sendbuf")
        alike(x, recvbuf, (self.peers, *x.shape), "Allgather")
        return self._planned("allgather", x, token=token)

    @operation("allgatherv")
    def Allgatherv(self, sendbuf: Any, recvbuf: Any = None, *, counts: Any = None, token: Token | None = None) -> Any:
        """Return the arrays of all ranks, of different lengths, one after the other, on every rank.

        Shapes: sendbuf (n, ...), equal on every rank but for n; returns (sum of the n, ...), same dtype. Count: sendbuf.size
        elements from each rank.
        Args:    sendbuf: array, or a message spec [x, count] of one. recvbuf: template of the result, or a message spec of
                 one (counts in elements, displacements: see docs/ragged.md), optional. counts: rows from each rank (static),
                 for example exchange_counts(len(sendbuf)); without them and a spec, all ranks have as many. token: see
                 jaxcomm.token.
        Returns: the parts in the order of the ranks; (that, token) if a token was given.
        Raises:  TypeError: dtype, traced counts. ValueError: counts, recvbuf's shape.
        """
        x = ragged.sent(sendbuf, "Allgatherv: sendbuf")
        even = (x.shape[0],) * self.size
        known, finish = ragged.parts_received(recvbuf, counts, x, self.size, "Allgatherv", "counts", even)
        ragged.check_own(known, x, self, "Allgatherv: counts")
        return self._planned("allgatherv", x, token=token, finish=finish, counts=known)

    @operation("alltoall")
    def Alltoall(self, sendbuf: Any, recvbuf: Any = None, *, token: Token | None = None) -> Any:
        """Send sendbuf[i] to rank i and return what the ranks sent here, stacked.

        Shapes: sendbuf (size, ...), equal on every rank; returns (size, ...), same dtype. Count: sendbuf.size / size
        elements to each rank.
        Args:    sendbuf: array. recvbuf: template of the result, optional. token: see jaxcomm.token.
        Returns: the stack; (stack, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: leading axis, recvbuf's shape.
        """
        x = self._led(sendbuf, "Alltoall: sendbuf")
        alike(x, recvbuf, x.shape, "Alltoall")
        return self._planned("alltoall", x, token=token)

    @operation("alltoallv")
    def Alltoallv(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        sendcounts: Any = None,
        recvcounts: Any = None,
        token: Token | None = None,
    ) -> Any:
        """Send to each rank its part of sendbuf and return what the ranks sent here, one part after the other.

        Shapes: sendbuf (sum of sendcounts, ...); returns (sum of recvcounts, ...), same dtype. Count: sendbuf.size elements
        go.
        Args:    sendbuf: array, or a message spec of one (counts in elements, displacements: see docs/ragged.md). recvbuf:
                 template of the result, or a message spec of one. sendcounts: rows for each rank (static); without them and
                 a spec, all get as many. recvcounts: rows from each rank (static), which exchange_counts(sendcounts) tells;
                 not needed with recvbuf, or where all parts are equal. token: see jaxcomm.token.
        Returns: the parts in the order of the ranks; (that, token) if a token was given.
        Raises:  TypeError: dtype, traced or missing counts. ValueError: counts, recvbuf's shape.
        """
        x, there = ragged.parts_sent(sendbuf, sendcounts, self.peers, "Alltoallv: sendbuf", "sendcounts")
        even = there if sendcounts is None and not isinstance(sendbuf, (list, tuple)) else None
        here, finish = ragged.parts_received(recvbuf, recvcounts, x, self.peers, "Alltoallv", "recvcounts", even)
        return self._planned("alltoallv", x, token=token, finish=finish, sendcounts=there, recvcounts=here)

    @documented("alltoallw")
    def Alltoallw(self, sendbuf: Any, recvbuf: Any, *, token: Token | None = None) -> Any:
        """Send sendbuf[i], of any shape and dtype, to rank i and return what the ranks sent here, as a list.

        Shapes: sendbuf[i] (...,), recvbuf[i] (...,), of any shape and dtype, equal on both ends; returns a list like
        recvbuf. Count: sendbuf[i].size elements to rank i, as one message of bytes.
        Args:    sendbuf: sequence of arrays, one for each rank. recvbuf: sequence of arrays or ShapeDtypeStruct, templates
                 for what each rank sends. Or both are message specs (x, (counts, byte displacements), datatypes), where
                 the datatypes are that of the array: then it is Alltoallv. token: see jaxcomm.token.
        Returns: the list of arrays (with specs the array); (that, token) if a token was given.
        Raises:  TypeError: dtypes, no lists. ValueError: not one for each rank; specs as for Alltoallv.
        """
        return mixed.exchange(self, "alltoallw", sendbuf, recvbuf, self.peers, [True] * self.peers, token)

    @documented("alltoallw")
    def Ialltoallw(self, sendbuf: Any, recvbuf: Any, *, token: Token | None = None) -> Any:
        """Start Alltoallw and return its Request.

        Shapes: sendbuf[i] (...,), recvbuf[i] (...,): as Alltoallw. Count: as Alltoallw.
        Args:    sendbuf, recvbuf, token: as Alltoallw.
        Returns: a Request, whose Wait returns the list of arrays; (that, token) if a token was given.
        Raises:  TypeError: dtypes, no lists. ValueError: as Alltoallw.
        """
        return mixed.exchange(self, "alltoallw", sendbuf, recvbuf, self.peers, [True] * self.peers, token, later=True)

    @operation("reduce")
    def Reduce(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        op: Any = MPI.SUM,
        root: int = 0,
        *,
        reproducible: bool = False,
        token: Token | None = None,
    ) -> Any:
        """Reduce sendbuf over all ranks with op and return the result on the root.

        Shapes: sendbuf (...,), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM,
                 PROD, MAX, ... or an associative function of two pytrees like sendbuf (static): see docs/reductions.md.
                 root: rank (static). reproducible: as Allreduce. token: see jaxcomm.token.
        Returns: the reduction on the root, sendbuf elsewhere; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype, or a traced root. ValueError: root out of range.
        """
        if (fold := folds.planned(self, "Reduce", sendbuf, recvbuf, op, token, root=root)) is not None:
            return fold
        x = operand(sendbuf, "Reduce: sendbuf")
        op_, finish = averaged(recvbuf, op, x, "Reduce", self.size)
        alike(x, recvbuf, x.shape, "Reduce")
        root = root_rank(root, self.size, "Reduce: root")
        return self._planned(
            "reduce", x, token=token, otherwise=x, finish=finish, op=op_, root=root, ordered=bool(reproducible)
        )

    @operation("allreduce")
    def Allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        op: Any = MPI.SUM,
        *,
        replicated: bool = False,
        reproducible: bool = False,
        token: Token | None = None,
    ) -> Any:
        """Reduce sendbuf over all ranks with op and return the result on each.

        Shapes: sendbuf (...,), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM,
                 PROD, MAX, ... or an associative function of two pytrees like sendbuf (static): see docs/reductions.md.
                 replicated: the result is one value that all ranks share, for op=SUM and MEAN: then its
                 adjoint is the cotangent itself, which must be equal on every rank, and not the sum of the ranks'
                 cotangents. Pvary is its partner. reproducible: the bits of the result depend on nothing but the operands
                 and the number of ranks. token: see jaxcomm.token.
        Returns: the reduction, equal on every rank; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype. ValueError: recvbuf's shape, or replicated with another op.
        """
        chosen = recvbuf if callable(recvbuf) or isinstance(recvbuf, Mean) else op
        if replicated and not isinstance(chosen, Mean) and chosen != MPI.SUM:
            raise ValueError("Allreduce: replicated=True is for op=MPI.SUM and MEAN; for another op leave it out")
        refuse_order(self, reproducible, "Allreduce")
        if (fold := folds.planned(self, "Allreduce", sendbuf, recvbuf, op, token)) is not None:
            return fold
        name = "allreduce_replicated" if replicated else "allreduce"
        return self._reduction(name, "Allreduce", sendbuf, recvbuf, op, token, ordered=bool(reproducible))

    @documented("pvary")
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
        varied = [self._call("pvary", operand(leaf, "Pvary: x"))[0] for leaf in leaves]
        return jax.tree_util.tree_unflatten(tree, varied)

    @operation("reduce_scatter_block")
    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any = None, op: Any = MPI.SUM, *, token: Token | None = None
    ) -> Any:
        """Reduce sendbuf over all ranks with op and return to each rank its part of the result.

        Shapes: sendbuf (size, ...), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM, PROD, MAX,
                 ... or an associative function of two pytrees like sendbuf[0] (static): see docs/reductions.md. token: see
                 jaxcomm.token.
        Returns: the reduction of sendbuf[rank]; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype. ValueError: leading axis, recvbuf's shape.
        """
        if (fold := folds.planned(self, "Reduce_scatter_block", sendbuf, recvbuf, op, token)) is not None:
            return fold
        x = self._led(sendbuf, "Reduce_scatter_block: sendbuf")
        op_, finish = averaged(recvbuf, op, x, "Reduce_scatter_block", self.size)
        alike(x, recvbuf, x.shape[1:], "Reduce_scatter_block")
        return self._planned("reduce_scatter_block", x, token=token, finish=finish, op=op_)

    @operation("reduce_scatter")
    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        recvcounts: Any = None,
        op: Any = MPI.SUM,
        *,
        token: Token | None = None,
    ) -> Any:
        """Reduce sendbuf over all ranks with op and return to each rank its part, of which each may have another length.

        Shapes: sendbuf (sum of recvcounts, ...), equal on every rank; returns (recvcounts[rank], ...), same dtype. Count:
        sendbuf.size elements.
        Args:    sendbuf: array, or a message spec [x, count] of one. recvbuf: template of the result, or a message spec
                 [x, count] of one, optional; an MPI.Op here is op. recvcounts: rows for each rank (static); without them all
                 get as many. op: MPI.SUM, PROD, MAX, ... or an associative function of two pytrees like a rank's part
                 (static): see docs/reductions.md. token: see jaxcomm.token.
        Returns: this rank's part of the reduction; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype, traced counts. ValueError: recvcounts, recvbuf's shape.
        """
        fold = folds.planned(self, "Reduce_scatter", sendbuf, recvbuf, op, token, recvcounts=recvcounts)
        if fold is not None:
            return fold
        x = ragged.sent(sendbuf, "Reduce_scatter: sendbuf")
        _, rows = ragged.parts_sent(x, recvcounts, self.size, "Reduce_scatter: sendbuf", "recvcounts")
        template = None if isinstance(recvbuf, Mean) else recvbuf
        then = ragged.received(template, x, (rows[self.rank], *x.shape[1:]), "Reduce_scatter")
        op_, finish = averaged(recvbuf, op, x, "Reduce_scatter", self.size, then)
        return self._planned("reduce_scatter", x, token=token, finish=finish, op=op_, counts=rows)

    @operation("scan")
    def Scan(self, sendbuf: Any, recvbuf: Any = None, op: Any = MPI.SUM, *, token: Token | None = None) -> Any:
        """Reduce sendbuf with op over the ranks up to and including this one.

        Shapes: sendbuf (...,), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM,
                 PROD, MAX, ... or an associative function of two pytrees like sendbuf (static): see docs/reductions.md.
                 token: see jaxcomm.token.
        Returns: the reduction over ranks 0 to rank; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype. ValueError: recvbuf's shape.
        """
        if (fold := folds.planned(self, "Scan", sendbuf, recvbuf, op, token)) is not None:
            return fold
        return self._reduction("scan", "Scan", sendbuf, recvbuf, op, token, reverse=False)

    @operation("exscan")
    def Exscan(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        op: Any = MPI.SUM,
        *,
        identity: Any = None,
        token: Token | None = None,
    ) -> Any:
        """Reduce sendbuf with op over the ranks below this one.

        Shapes: sendbuf (...,), equal on every rank; returns (...,), same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional; an MPI.Op here is op. op: MPI.SUM,
                 PROD, MAX, ... or an associative function of two pytrees like sendbuf (static): see docs/reductions.md.
                 identity: for a function, what rank 0 gets. token: see jaxcomm.token.
        Returns: the reduction over ranks 0 to rank - 1, on rank 0 that of no operands: 0 for SUM, 1 for PROD, the lowest
                 value for MAX, identity for a function; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype. ValueError: recvbuf's shape.
        """
        fold = folds.planned(self, "Exscan", sendbuf, recvbuf, op, token, identity=identity)
        if fold is not None:
            return fold
        x = operand(sendbuf, "Exscan: sendbuf")
        op_ = reduction(recvbuf, op, x, "Exscan")
        alike(x, recvbuf, x.shape, "Exscan")
        nothing = folds.like_operand(x, identity) if op_.user else None
        if self.rank == 0 and nothing is None:
            dtype = eager.canonical(x)
            nothing = np.full(x.shape, reductions.identity(op_, dtype), dtype)
        return self._planned("exscan", x, token=token, otherwise=None if self.rank else nothing, op=op_, reverse=False)

    def _reduction(
        self, name: str, where: str, sendbuf: Any, recvbuf: Any, op: Any, token: Token | None, **params: Any
    ) -> Any:
        x = operand(sendbuf, f"{where}: sendbuf")
        op_, finish = averaged(recvbuf, op, x, where, self.rank + 1 if name == "scan" else self.peers)
        alike(x, recvbuf, x.shape, where)
        return self._planned(name, x, token=token, finish=finish, op=op_, **params)

    def exchange_counts(self, sendcounts: Any) -> tuple[int, ...]:
        """Tell every rank how much it gets, and return how much comes here, as Python ints.

        For Alltoallv, whose receivers must know their counts. Works on the host, at once, also while a function is traced:
        counts are part of a compiled program.

        Args:
          sendcounts: for each rank how much this one sends it; or one int, how much this rank has.
        Returns: what each rank sends here; for one int, the ints of all ranks.
        Raises: TypeError: counts that are traced, or no ints. ValueError: not one for each rank, or negative.
        """
        return ragged.exchange(self, sendcounts)

    def _led(self, x: Any, where: str) -> Any:
        """Return an operand whose leading axis numbers the ranks."""
        x = operand(x, where)
        if x.ndim == 0 or x.shape[0] != self.peers:
            raise ValueError(
                f"{where}: the leading axis must be the communicator's size {self.peers}, got shape {tuple(x.shape)}"
            )
        return x


# The other forms of the operations: Iallreduce and Allreduce_init, with Allreduce's arguments.

_LEFT_OUT = ("status", "return_status")


def _plan_later(
    comm: Operations, plan: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any], list[Any]]:
    """Return what starts a call, and shapes and dtypes of its operands; wrong arguments are told at once."""
    structure = None
    if trees.among(args, kwargs) and not folds.among(args, kwargs):
        plans, structure = trees.planned(plan, comm, args, kwargs)
        begin = lambda: comm._begin_tree(plans, structure, kwargs.get("token"))  # noqa: E731
    else:
        plans = [plan(comm, *args, **kwargs)]
        begin = lambda: comm._begin(plans[0])  # noqa: E731
    for planned in plans:
        if isinstance(planned, folds.Fold) or planned.params.get("ordered"):
            what = folds.described(planned) if isinstance(planned, folds.Fold) else "reproducible=True"
            raise TypeError(f"{plan.__name__}: {what} has no nonblocking form; use {plan.__name__}")
    like = [f"{eager.canonical(x).name}{list(x.shape)}" for planned in plans for x in planned.operands]
    return begin, like if structure is None else [*like, f"as {structure}"]


@contextmanager
def _called(name: str, blocking: str) -> Iterator[None]:
    """Let what is raised about the arguments of a method name it, and not the blocking one that it is the form of."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        if type(error) not in (TypeError, ValueError) or not text.startswith(f"{blocking}: "):
            raise
        error.args = (name + text.removeprefix(blocking), *error.args[1:])
        raise


def _nonblocking(name: str, blocking: Any) -> Any:
    def method(self: Operations, *args: Any, **kwargs: Any) -> Any:
        with _called(_i_name(name), name):
            begin, _ = _plan_later(self, blocking.plan, args, kwargs)
        return begin()

    says = f"Start {name} and return its Request."
    return _described(method, _i_name(name), blocking, says, "a Request, whose Wait returns ", [])


def _persistent(name: str, blocking: Any) -> Any:
    def method(self: Operations, *args: Any, **kwargs: Any) -> Prequest:
        given = signature.bind(self, *args, **kwargs)
        given.arguments.pop("info", None)
        _, *operands = given.args
        keywords = given.kwargs
        with _called(f"{name}_init", name):
            begin, like = _plan_later(self, blocking.plan, tuple(operands), keywords)

        def restart(*other: Any) -> Request:
            if not other:
                return begin()  # type: ignore[no-any-return]
            begin_other, has = _plan_later(self, blocking.plan, (*other, *operands[len(other) :]), keywords)
            if has != like:
                raise ValueError(f"Start: the request was made for {', '.join(like)}, got {', '.join(has)}")
            return begin_other()  # type: ignore[no-any-return]

        return Prequest(restart)

    # MPI 4.1, 3.9 and 6.13: collectives take an info.
    point_to_point = {"dest", "source"} & set(inspect.signature(blocking).parameters)
    says = f"Return a persistent request for {name}: see jaxcomm.Prequest."
    more = [] if point_to_point else ["info"]
    made = _described(method, f"{name}_init", blocking, says, "a Prequest, whose Wait returns ", more)
    signature = inspect.signature(made)
    return made


def _i_name(name: str) -> str:
    return "I" + name[0].lower() + name[1:]


def _described(method: Any, name: str, blocking: Any, says: str, returns: str, more: list[str]) -> Any:
    """Give a method the blocking one's arguments, without those that Wait has, and its docstring."""
    signature = inspect.signature(blocking)
    kept = [p for p in signature.parameters.values() if p.name not in _LEFT_OUT]
    positional = [p for p in kept if p.kind is not p.KEYWORD_ONLY]
    keywords = [p for p in kept if p.kind is p.KEYWORD_ONLY and not (p.name == "token" and name.endswith("_init"))]
    extra = [inspect.Parameter(m, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=MPI.INFO_NULL) for m in more]
    method.__name__, method.__qualname__ = name, f"Operations.{name}"
    method.__signature__ = signature.replace(parameters=[*positional, *extra, *keywords])
    method.__doc__ = _docstring(blocking, says, returns, more)
    return method


def _docstring(blocking: Any, says: str, returns: str, more: list[str]) -> str:
    """The blocking method's, with other words for what it does and returns."""
    _, rest = blocking.__doc__.split("\n", 1)
    text = f"{says}\n{rest}".replace("Returns: ", f"Returns: {returns}")
    if more:
        text = text.replace("Args:    ", "Args:    info: MPI's hints, not looked at. ")
    lines = [textwrap.wrap(line, 118, subsequent_indent=" " * 9) or [""] for line in text.split("\n")]
    return "\n".join(itertools.chain.from_iterable(lines)) + "\n"


def derive(cls: type) -> None:
    """Give a class of operations the other forms of its methods."""
    for name, blocking in list(vars(cls).items()):
        if not hasattr(blocking, "plan"):
            continue
        setattr(cls, _i_name(name), _nonblocking(name, blocking))
        if not name.startswith("Sendrecv"):  # MPI has no persistent form of it
            setattr(cls, f"{name}_init", _persistent(name, blocking))


derive(Operations)
