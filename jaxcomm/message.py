"""Messages that a matched probe has found: MPI 4.1, 3.8.2. Whoever has one, and nobody else, receives it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcomm._primitives import _compat, dtypes, eager, statuses
from jaxcomm.arguments import operand
from jaxcomm.request import Request
from jaxcomm.token import flush

__all__ = ["Message", "TracedMessage"]


def _is_template(buf: Any) -> bool:
    if isinstance(buf, np.ndarray):
        return not buf.flags.writeable
    return isinstance(buf, (jax.Array, jax.ShapeDtypeStruct)) or np.isscalar(buf)


class Message(MPI.Message):
    """A message found outside jit: mpi4py's own, whose Recv and Irecv take a template for a JAX array too."""

    def Recv(self, buf: Any, status: MPI.Status | None = None, *, return_status: bool = False) -> Any:
        """Receive into a buffer, as mpi4py; or return the message like a template: an array or a ShapeDtypeStruct.

        With return_status a ReceivedStatus beside.
        """
        flush()
        self._check_there("Message.Recv")
        if not _is_template(buf):
            return super().Recv(buf, status)
        template, into, back = _memory(buf, "Message.Recv: buf")
        known = MPI.Status() if status is None else status
        super().Recv(into, known)
        if not return_status:
            return back()
        envelope = [known.source, known.tag, known.Get_count(MPI.BYTE) // into.itemsize]
        return back(), statuses.received(jnp.array(envelope, jnp.int32), template)

    def Irecv(self, buf: Any) -> Any:
        """As Recv. Returns a request; for a template the message, which is there already, is received at once."""
        flush()
        self._check_there("Message.Irecv")
        return Request([], self.Recv(buf)) if _is_template(buf) else super().Irecv(buf)

    def _check_there(self, where: str) -> None:
        """Raise MPI.Exception for a message that was received: some MPI libraries would end the job."""
        if self == MPI.MESSAGE_NULL:
            raise eager.exception(MPI.ERR_REQUEST, f"{where}: the message was received before")


def _memory(buf: Any, where: str) -> tuple[Any, Any, Any]:
    """The template as an array, a NumPy copy of it as mpi4py takes it, and what gives the JAX array made of that."""
    if isinstance(buf, _compat.Tracer):
        raise TypeError(f"{where}: the message was found outside jit and cannot be received inside; probe inside too")
    template = operand(buf, where, template=True)
    array = dtypes.exported(np.array(eager.to_wire(eager.host_array(template)), order="C"))
    return template, array, lambda: dtypes.imported(array, eager.canonical(template))


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
