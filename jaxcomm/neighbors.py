"""The neighbour collectives: operations of communicators with a topology (Cartesian, graph, distributed graph).

Blocks belong to the edges of the topology, in MPI's order: of a Cartesian one in each dimension the neighbour in the
negative direction, then the one in the positive direction (comm.inoutedges has them). See topology.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from mpi4py import MPI

from jaxcomm import mixed, ragged
from jaxcomm.arguments import alike, operand
from jaxcomm.operations import Operations, Planned, derive, documented, operation
from jaxcomm.token import Token

__all__ = ["Neighbors"]

Counts = tuple[int, ...]


class Neighbors(Operations):
    """The operations with neighbours on a topology; mixed into mpi4py's classes."""

    inoutedges: tuple[list[int], list[int]]
    _need_graphs: Callable[[], None]

    # MPI 4.1, chapter 8: topologies

    @operation("neighbor_allgather")
    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any = None, *, token: Token | None = None) -> Any:
        """Send sendbuf to every neighbour and return what the neighbours sent, stacked.

        Shapes: sendbuf (...,), equal on every rank; returns (number of incoming edges, ...), same dtype. Count:
        sendbuf.size elements to each neighbour.
        Args:    sendbuf: array or scalar. recvbuf: template of the result, optional; its block stays where the neighbour is
                 PROC_NULL, without it that is zero. token: see jaxcomm.token.
        Returns: the stack, in the order of the edges; (stack, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: recvbuf's shape.
        """
        where = "Neighbor_allgather"
        x = operand(sendbuf, f"{where}: sendbuf")
        ins, outs = self._degrees()
        alike(x, recvbuf, (ins, *x.shape), where)
        block = jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
        here, finish = self._received(recvbuf, None, block, where, (1,) * ins)
        return self._exchange("neighbor_allgather", where, x, (1,) * outs, here, finish, token)

    @operation("neighbor_allgatherv")
    def Neighbor_allgatherv(
        self, sendbuf: Any, recvbuf: Any = None, *, recvcounts: Any = None, token: Token | None = None
    ) -> Any:
        """Send sendbuf to every neighbour and return what the neighbours sent, of different lengths, one after the other.

        Shapes: sendbuf (n, ...), equal on every rank but for n; returns (sum of recvcounts, ...), same dtype. Count:
        sendbuf.size elements to each neighbour.
        Args:    sendbuf: array, or a message spec [x, count] of one. recvbuf: template of the result, or a message spec of
                 one (see docs/ragged.md); its rows stay where the neighbour is PROC_NULL, without it those are zero.
                 recvcounts: rows from each neighbour (static); without them and recvbuf as many as sendbuf has. token: see
                 jaxcomm.token.
        Returns: the parts in the order of the edges; (that, token) if a token was given.
        Raises:  TypeError: dtype, traced counts. ValueError: counts, recvbuf's shape.
        """
        where = "Neighbor_allgatherv"
        x = ragged.sent(sendbuf, f"{where}: sendbuf")
        ins, outs = self._degrees()
        n = x.shape[0]
        here, finish = self._received(recvbuf, recvcounts, x, where, (n,) * ins)
        return self._exchange("neighbor_allgatherv", where, x, (n,) * outs, here, finish, token)

    @operation("neighbor_alltoallv")
    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any = None, *, token: Token | None = None) -> Any:
        """Send sendbuf[i] to neighbour i and return what the neighbours sent here, stacked.

        Shapes: sendbuf (number of outgoing edges, ...); returns (number of incoming edges, ...), same dtype. Count:
        sendbuf[0].size elements to each neighbour, equal on every rank.
        Args:    sendbuf: array. recvbuf: template of the result, optional; its block stays where the neighbour is PROC_NULL,
                 without it that is zero. token: see jaxcomm.token.
        Returns: the stack, in the order of the edges; (stack, token) if a token was given.
        Raises:  TypeError: dtype. ValueError: leading axis, recvbuf's shape.
        """
        where = "Neighbor_alltoall"
        x = operand(sendbuf, f"{where}: sendbuf")
        ins, outs = self._degrees()
        if x.ndim == 0 or x.shape[0] != outs:
            raise ValueError(
                f"{where}: sendbuf: the leading axis must be the number of outgoing edges {outs}, got shape {tuple(x.shape)}"
            )
        alike(x, recvbuf, (ins, *x.shape[1:]), where)
        here, finish = self._received(recvbuf, None, x, where, (1,) * ins)
        return self._exchange("neighbor_alltoallv", where, x, (1,) * outs, here, finish, token)

    @operation("neighbor_alltoallv")
    def Neighbor_alltoallv(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        *,
        sendcounts: Any = None,
        recvcounts: Any = None,
        token: Token | None = None,
    ) -> Any:
        """Send each neighbour its part of sendbuf and return what the neighbours sent here, one part after the other.

        Shapes: sendbuf (sum of sendcounts, ...); returns (sum of recvcounts, ...), same dtype. Count: sendbuf.size elements
        go.
        Args:    sendbuf: array, or a message spec of one (see docs/ragged.md). recvbuf: template of the result, or a message
                 spec of one; its rows stay where the neighbour is PROC_NULL, without it those are zero. sendcounts: rows
                 for each neighbour (static); without them and a spec, all get as many. recvcounts: rows from each
                 neighbour (static); not needed with recvbuf, or where all parts are equal. token: see jaxcomm.token.
        Returns: the parts in the order of the edges; (that, token) if a token was given.
        Raises:  TypeError: dtype, traced or missing counts. ValueError: counts, recvbuf's shape.
        """
        where = "Neighbor_alltoallv"
        ins, outs = self._degrees()
        x, there = ragged.parts_sent(sendbuf, sendcounts, outs, f"{where}: sendbuf", "sendcounts")
        equal = sendcounts is None and not isinstance(sendbuf, (list, tuple)) and outs > 0
        even = there[:1] * ins if equal else None
        here, finish = self._received(recvbuf, recvcounts, x, where, even)
        return self._exchange("neighbor_alltoallv", where, x, there, here, finish, token)

    @documented("neighbor_alltoallw")
    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any, *, token: Token | None = None) -> Any:
        """Send sendbuf[i], of any shape and dtype, to neighbour i and return what the neighbours sent here, as a list.

        Shapes: sendbuf[i] (...,), recvbuf[i] (...,), of any shape and dtype, equal on both ends; returns a list like
        recvbuf. Count: sendbuf[i].size elements to neighbour i, as one message of bytes.
        Args:    sendbuf: sequence of arrays, one for each outgoing edge. recvbuf: sequence of arrays or ShapeDtypeStruct,
                 templates for what comes over each incoming edge; they stay where the neighbour is PROC_NULL. Or both
                 are message specs, as for Alltoallw. token: see jaxcomm.token.
        Returns: the list of arrays (with specs the array); (that, token) if a token was given.
        Raises:  TypeError: dtypes, no lists. ValueError: not one for each edge; specs as for Neighbor_alltoallv.
        """
        comes = [source != MPI.PROC_NULL for source in self.inoutedges[0]]
        return mixed.exchange(self, "neighbor_alltoallw", sendbuf, recvbuf, self._degrees()[1], comes, token)

    @documented("neighbor_alltoallw")
    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any, *, token: Token | None = None) -> Any:
        """Start Neighbor_alltoallw and return its Request.

        Shapes: sendbuf[i] (...,), recvbuf[i] (...,): as Neighbor_alltoallw. Count: as Neighbor_alltoallw.
        Args:    sendbuf, recvbuf, token: as Neighbor_alltoallw.
        Returns: a Request, whose Wait returns the list of arrays; (that, token) if a token was given.
        Raises:  TypeError: dtypes, no lists. ValueError: as Neighbor_alltoallw.
        """
        comes = [source != MPI.PROC_NULL for source in self.inoutedges[0]]
        return mixed.exchange(
            self, "neighbor_alltoallw", sendbuf, recvbuf, self._degrees()[1], comes, token, later=True
        )

    def _exchange(
        self, name: str, where: str, x: Any, there: Counts, here: Counts, finish: ragged.Finish, token: Token | None
    ) -> Planned:
        self._need_graphs()
        return self._planned(
            name, x, token=token, where=where, finish=finish, sendcounts=there, recvcounts=here, reverse=False
        )

    def _degrees(self) -> tuple[int, int]:
        """How many incoming and outgoing edges this rank has."""
        self._check_alive()
        sources, destinations = self.inoutedges
        return len(sources), len(destinations)

    def _received(
        self, recvbuf: Any, counts: Any, x: Any, where: str, default: Counts | None
    ) -> tuple[Counts, ragged.Finish]:
        """As ragged.parts_received; nothing comes from PROC_NULL."""
        comes = [source != MPI.PROC_NULL for source in self.inoutedges[0]]
        return ragged.parts_received(recvbuf, counts, x, len(comes), where, "recvcounts", default, comes)


derive(Neighbors)
