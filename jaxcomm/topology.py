"""The neighbours of a communicator with a topology, as two distributed graphs of ours.

Every neighbour collective runs on one of them, by MPI_Neighbor_alltoallv: forward on a graph of the live edges (those to or
from PROC_NULL are left out), derivatives on the same graph with all edges turned round. So an adjoint exists for every
topology, and results are the same under every MPI: libraries differ in how they match messages where several edges of a
Cartesian topology join the same two ranks (periodic dimensions of one or two ranks).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpi4py import MPI

from jaxcomm._native import bridge

__all__ = ["Graphs"]


class Graphs(NamedTuple):
    """The graphs of a communicator, and which edges of its topology they have, in their order."""

    forward: MPI.Distgraphcomm
    backward: MPI.Distgraphcomm
    in_edges: list[int]
    out_edges: list[int]

    @classmethod
    def of(cls, comm: Any) -> Graphs:
        """Make them, of an mpi4py communicator with a topology. Collective."""
        sources, destinations = comm.inoutedges
        in_edges = [edge for edge in _in_order(comm, len(sources)) if sources[edge] != MPI.PROC_NULL]
        out_edges = [edge for edge, rank in enumerate(destinations) if rank != MPI.PROC_NULL]
        ends = [sources[edge] for edge in in_edges], [destinations[edge] for edge in out_edges]
        # Open MPI 5.0 takes a graph that is made of a Cartesian communicator for a Cartesian one: make it of a plain one.
        plain: Any = MPI.Intracomm.Split(comm, 0, comm.Get_rank())
        forward, backward = (plain.Create_dist_graph_adjacent(*way) for way in (ends, ends[::-1]))
        plain.Free()
        for graph in (forward, backward):
            graph.Set_errhandler(MPI.ERRORS_RETURN)
        return cls(forward, backward, in_edges, out_edges)

    def register(self, slot: int) -> None:
        """Tell the native layer."""
        forward, backward = (MPI._handleof(graph) & (2**64 - 1) for graph in self[:2])
        bridge.set_graphs(slot, forward, backward, self.in_edges, self.out_edges)

    def free(self) -> None:
        """Free them. Collective."""
        self.forward.Free()
        self.backward.Free()


def _in_order(comm: Any, edges: int) -> list[int]:
    """The incoming edges in the order in which the messages of one sender are to match them.

    Several messages from one rank to another match the edges between them in the order of both ranks' lists. Of a
    Cartesian topology, what is sent in the negative direction, which comes first in each dimension, arrives from the
    positive one (MPI 4.1, 8.6): there those are swapped.
    """
    return [edge ^ 1 for edge in range(edges)] if isinstance(comm, MPI.Cartcomm) else list(range(edges))
