"""Messages that a matched probe has found: MPI 4.1, 3.8.2. Whoever has one, and nobody else, receives it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat, eager, statuses
from jaxcomm.arguments import operand
from jaxcomm.host import forget
from jaxcomm.request import Request
from jaxcomm.token import flush

__all__ = ["Message", "TracedMessage"]


def _is_template(buf: Any) -> bool:
    if isinstance(buf, np.ndarray):
        return not buf.flags.writeable
    return isinstance(buf, (jax.Array, jax.ShapeDtypeStruct)) or np.isscalar(buf)


class Message(MPI.Message):
    """A message found outside jit: mpi4py's own, whose Recv and Irecv take a template for a JAX array too."""

    _comm: Any
    _found: statuses.ReceivedStatus

    @classmethod
    def of(cls, comm: Any, found: MPI.Message, status: MPI.Status) -> Message:
        """Make one of what a probe of mpi4py's has found on a communicator of ours."""
        message = cls(found)
        message._comm = comm
        message._found = statuses.ReceivedStatus(status.source, status.tag, status.Get_count(MPI.BYTE))
        return message

    def Recv(self, buf: Any, status: MPI.Status | None = None, *, return_status: bool = False) -> Any:
        """Receive into a buffer, as mpi4py; or return the message like a template: an array or a ShapeDtypeStruct.

        With return_status a ReceivedStatus beside.
        """
        flush()
        self._check_there("Message.Recv")
        if not _is_template(buf):
            return super().Recv(buf, status)
        return self._taken("Message.Recv").Recv(buf, status, return_status=return_status)

    def Irecv(self, buf: Any) -> Any:
        """As Recv. Returns a request; for a template the message, which is there already, is received at once."""
        flush()
        self._check_there("Message.Irecv")
        return Request([], self.Recv(buf)) if _is_template(buf) else super().Irecv(buf)

    def _check_there(self, where: str) -> None:
        """Raise MPI.Exception for a message that was received: some MPI libraries would end the job."""
        if self == MPI.MESSAGE_NULL:
            raise eager.exception(MPI.ERR_REQUEST, f"{where}: the message was received before")

    def _taken(self, where: str) -> TracedMessage:
        """The same as the native layer knows them; this object has none then, as after a receive of mpi4py's."""
        if _compat.tracing():
            raise TypeError(
                f"{where}: the message was found outside jit and cannot be received inside; probe inside too"
            )
        number = bridge.add_message(MPI._handleof(self) & (2**64 - 1))
        forget(self)
        return TracedMessage(self._comm, number, self._found)


@jax.tree_util.register_pytree_node_class
class TracedMessage:
    """A message found inside jit, or with return_status: a pytree, so it goes through cond and the carries of loops."""

    def __init__(self, comm: Any, number: Any, status: statuses.ReceivedStatus):
        self._comm, self._number, self._status = comm, number, status

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        return (self._number, self._status), self._comm

    @classmethod
    def tree_unflatten(cls, comm: Any, children: tuple[Any, Any]) -> TracedMessage:
        return cls(comm, *children)

    @property
    def _params(self) -> dict[str, Any]:
        given = {"source": self._status.source, "recvtag": self._status.tag, "message": self._number}
        return {name: value if isinstance(value, _compat.Tracer) else int(value) for name, value in given.items()}

    def Recv(self, buf: Any, status: MPI.Status | None = None, *, return_status: bool = False) -> Any:
        """Receive the message and return it, like the template buf; with return_status a ReceivedStatus beside.

        Raises: JaxRuntimeError: the message was received before, or is longer than buf.
        """
        template = operand(buf, "Message.Recv: buf", template=True)
        y, envelope = self._comm._call(
            "recv",
            template,
            **self._params,
            status=statuses.of(status, "Message.Recv"),
            enveloped=True,
        )
        return (y, statuses.received(envelope, template)) if return_status else y

    def Irecv(self, buf: Any) -> Any:
        """Start to receive the message. Returns a Request."""
        template = operand(buf, "Message.Irecv: buf", template=True)
        return self._comm._requested("recv", template, **self._params)
