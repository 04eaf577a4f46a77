"""The operations of intercommunicators, between two groups of ranks: MPI 4.1, 6.2.3.

Messages and collectives without a root are those of operations.py, with the other group in the place of all ranks: what
comes, comes from there. A root is known to its own group as MPI.ROOT, on the other ranks there as MPI.PROC_NULL, and to the
other group by its rank.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from jaxcomm import ragged
from jaxcomm._primitives import dtypes
from jaxcomm.arguments import operand, reduction, refuse_order, static
from jaxcomm.operations import Operations, derive, operation
from jaxcomm.token import Token, own_array

__all__ = ["Between"]

_NOTHING = np.zeros((), np.float32)
"""The operand of a rank that neither sends nor gets anything."""


class Between(Operations):
    """The operations between two groups; mixed into mpi4py's class."""

    two_groups = True
    remote_size: int

    @property
    def peers(self) -> int:  # type: ignore[override]
        """The number of ranks of the other group."""
        self._check_alive()
        return self.remote_size

    def _root(self, root: Any, where: str) -> int:
        value = static(root, where)
        if value in (MPI.ROOT, MPI.PROC_NULL) or 0 <= value < self.peers:
            return value
        raise ValueError(
            f"{where} must be MPI.ROOT on the root, MPI.PROC_NULL on the other ranks of its group, and in the other group "
            f"the root's rank, from 0 to {self.peers - 1}; got {value}"
        )

    @operation("bcast")
    def Bcast(self, buf: Any = None, root: int = 0, *, token: Token | None = None) -> Any:
        """Return the root's buf on every rank of the other group.

        Shapes: buf (...,), in the other group a template; returns (...,) there, same dtype. Count: buf.size elements.
        Args:    buf: array, scalar, or in the other group a ShapeDtypeStruct; None with PROC_NULL. root: MPI.ROOT,
                 MPI.PROC_NULL or rank (static). token: see jaxcomm.token.
        Returns: the root's array in the other group, buf elsewhere; (that, token) if a token was given.
        Raises:  TypeError: dtype, or a traced root. ValueError: root out of range.
        """
        root = self._root(root, "Bcast: root")
        x = _NOTHING if root == MPI.PROC_NULL else operand(buf, "Bcast: buf", template=root != MPI.ROOT)
        return self._planned("bcast", x, token=token, otherwise=buf, root=root)

    @operation("gather")
    def Gather(self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, token: Token | None = None) -> Any:
        """Return the arrays of all ranks of the other group, stacked, on the root.

        Shapes: sendbuf (...,), equal on every rank; returns (remote size, ...) on the root, sendbuf elsewhere. Count:
        sendbuf.size elements from each rank.
        Args:    sendbuf: array or scalar, None in the root's group. recvbuf: on the root, template of the result. root:
                 MPI.ROOT, MPI.PROC_NULL or rank (static). token: see jaxcomm.token.
        Returns: the stack on the root, sendbuf elsewhere; (that, token) if a token was given.
        Raises:  TypeError: dtype, or a traced root. ValueError: root out of range, recvbuf's shape.
        """
        root = self._root(root, "Gather: root")
        if root == MPI.ROOT:
            x = self._led(operand(recvbuf, "Gather: recvbuf", template=True), "Gather: recvbuf")[0]
        else:
            x = _NOTHING if root == MPI.PROC_NULL else operand(sendbuf, "Gather: sendbuf")
        return self._planned("gather", x, token=token, otherwise=sendbuf, root=root)

    @operation("gatherv")
    def Gatherv(
        self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, counts: Any = None, token: Token | None = None
    ) -> Any:
        """Return the arrays of all ranks of the other group, of different lengths, one after the other, on the root.

        Shapes: sendbuf (n, ...), equal on every rank but for n; returns (sum of the counts, ...) on the root, sendbuf
        elsewhere. Count: sendbuf.size elements from each rank.
        Args:    sendbuf: array, or a message spec of one, None in the root's group. recvbuf: on the root, template of the
                 result, or a message spec of one (see docs/ragged.md). root: MPI.ROOT, MPI.PROC_NULL or rank (static).
                 counts: rows from each rank (static), on the root. token: see jaxcomm.token.
        Returns: the parts in the order of the ranks, on the root; sendbuf elsewhere; (that, token) if a token was given.
        Raises:  TypeError: dtype, traced root or counts. ValueError: root out of range, counts, recvbuf's shape.
        """
        root = self._root(root, "Gatherv: root")
        known: tuple[int, ...] = ()
        finish = None
        if root == MPI.ROOT:
            like = ragged.array_of(recvbuf, "Gatherv: recvbuf")
            known, finish = ragged.parts_received(recvbuf, counts, like, self.peers, "Gatherv", "counts", None)
            x = like[:0]
        else:
            x = _NOTHING[None] if root == MPI.PROC_NULL else ragged.sent(sendbuf, "Gatherv: sendbuf")
        return self._planned("gatherv", x, token=token, otherwise=sendbuf, finish=finish, root=root, counts=known)

    @operation("scatter")
    def Scatter(self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, token: Token | None = None) -> Any:
        """Return to each rank of the other group its part of the root's array.

        Shapes: sendbuf (remote size, ...) on the root; in the other group the template (...,) is recvbuf, or sendbuf if
        that is not given; returns (...,) there, same dtype. Count: sendbuf.size elements on the root.
        Args:    sendbuf: array on the root, None elsewhere, or a template. recvbuf: template in the other group. root:
                 MPI.ROOT, MPI.PROC_NULL or rank (static). token: see jaxcomm.token.
        Returns: sendbuf[rank] of the root, None in its group; (that, token) if a token was given.
        Raises:  TypeError: dtype, or a traced root. ValueError: root out of range, leading axis, recvbuf's shape.
        """
        root = self._root(root, "Scatter: root")
        if root == MPI.ROOT:
            x = self._led(sendbuf, "Scatter: sendbuf")
        elif root == MPI.PROC_NULL:
            x = _NOTHING
        else:
            x = operand(sendbuf if recvbuf is None else recvbuf, "Scatter: recvbuf", template=True)
        return self._planned("scatter", x, token=token, root=root)

    @operation("scatterv")
    def Scatterv(
        self, sendbuf: Any, recvbuf: Any = None, root: int = 0, *, counts: Any = None, token: Token | None = None
    ) -> Any:
        """Return to each rank of the other group its part, of its own length, of the root's array.

        Shapes: sendbuf (sum of the counts, ...) on the root; in the other group the template (n, ...) is recvbuf, or
        sendbuf if that is not given; returns (n, ...) there, same dtype. Count: sendbuf.size elements on the root.
        Args:    sendbuf: array, or a message spec of one, on the root; None elsewhere, or a template. recvbuf: template in
                 the other group, or a message spec of one. root: MPI.ROOT, MPI.PROC_NULL or rank (static). counts: rows
                 for each rank (static), on the root. token: see jaxcomm.token.
        Returns: this rank's part, None in the root's group; (that, token) if a token was given.
        Raises:  TypeError: dtype, traced root or counts. ValueError: root out of range, counts, recvbuf's shape.
        """
        root = self._root(root, "Scatterv: root")
        known: tuple[int, ...] = ()
        finish = None
        if root == MPI.ROOT:
            x, known = ragged.parts_sent(sendbuf, counts, self.peers, "Scatterv: sendbuf")
        elif root == MPI.PROC_NULL:
            x = _NOTHING[None]
        else:
            template = sendbuf if recvbuf is None else recvbuf
            x, finish = ragged.template_of_part(template, "Scatterv: recvbuf")
        return self._planned("scatterv", x, token=token, finish=finish, root=root, counts=known)

    @operation("reduce")
    def Reduce(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        reproducible: bool = False,
        token: Token | None = None,
    ) -> Any:
        """Reduce sendbuf over all ranks of the other group with op and return the result on the root.

        Shapes: sendbuf (...,), equal on every rank; returns (...,) on the root, same dtype. Count: sendbuf.size elements.
        Args:    sendbuf: array or scalar, None in the root's group. recvbuf: on the root, template of the result. op:
                 MPI.SUM, PROD, MAX, ... (static). root: MPI.ROOT, MPI.PROC_NULL or rank (static). reproducible:
                 not between two groups. token: see jaxcomm.token.
        Returns: the reduction on the root, sendbuf elsewhere; (that, token) if a token was given.
        Raises:  TypeError: op is not defined for the dtype, or a traced root. ValueError: root out of range.
        """
        root = self._root(root, "Reduce: root")
        if root == MPI.ROOT:
            x = operand(recvbuf, "Reduce: recvbuf", template=True)
        else:
            x = _NOTHING if root == MPI.PROC_NULL else operand(sendbuf, "Reduce: sendbuf")
        op_ = reduction(None, op, x, "Reduce")
        refuse_order(self, reproducible, "Reduce")
        return self._planned("reduce", x, token=token, otherwise=sendbuf, op=op_, root=root)

    @operation("alltoallv")
    def Allgatherv(self, sendbuf: Any, recvbuf: Any = None, *, counts: Any = None, token: Token | None = None) -> Any:
        """Return the arrays of all ranks of the other group, of different lengths, one after the other, on every rank.

        Shapes: sendbuf (n, ...), equal on every rank but for n; returns (sum of the counts, ...), same dtype. Count:
        sendbuf.size elements to each rank.
        Args:    sendbuf: array, or a message spec of one. recvbuf: template of the result, or a message spec of one (see
                 docs/ragged.md). counts: rows from each rank of the other group (static). token: see jaxcomm.token.
        Returns: the parts in the order of the ranks; (that, token) if a token was given.
        Raises:  TypeError: dtype, traced or missing counts. ValueError: counts, recvbuf's shape.
        """
        x = ragged.sent(sendbuf, "Allgatherv: sendbuf")
        known, finish = ragged.parts_received(recvbuf, counts, x, self.peers, "Allgatherv", "counts", None)
        there = (x.shape[0],) * self.peers
        # By Alltoallv, whose counts tell both groups' lengths, which its adjoint needs.
        everyone = dtypes.concatenate([own_array(x)] * self.peers)
        return self._planned(
            "alltoallv", everyone, token=token, where="Allgatherv", finish=finish, sendcounts=there, recvcounts=known
        )

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any = None, op: MPI.Op = MPI.SUM, *, token: Token | None = None
    ) -> NoReturn:
        """Not between two groups on arrays: there all of one group's parts belong to the other's ranks. Use Reduce."""
        _refuse("Reduce_scatter_block")

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any = None,
        recvcounts: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        token: Token | None = None,
    ) -> NoReturn:
        """As Reduce_scatter_block."""
        _refuse("Reduce_scatter")

    def Scan(self, *args: Any, **kwargs: Any) -> Any:
        """MPI has no order of ranks between two groups."""
        _refuse("Scan")

    def Exscan(self, *args: Any, **kwargs: Any) -> Any:
        """As Scan."""
        _refuse("Exscan")

    def Pvary(self, x: Any) -> Any:
        """Two groups share no value."""
        _refuse("Pvary")


def _refuse(name: str) -> NoReturn:
    raise TypeError(
        f"{name} is not for arrays on an intercommunicator; merge the groups (Merge), or use Reduce and Scatter"
    )


derive(Between)
