"""What jaxcomm does, one row an operation, in the MPI standard's chapter order. The C++ twin is _native/ops.inc."""

from __future__ import annotations

import numpy as np

from jaxcomm._primitives import _compat
from jaxcomm._primitives import adjoints as to
from jaxcomm._primitives.op import STANDARD, Adjoint, Op, Params, nobody, not_first, not_last, the_root, with_the_root
from jaxcomm._primitives.reductions import SUM

__all__ = ["TABLE"]


def _sums(params: Params) -> bool:
    return bool(params["op"] == SUM)


_REDUCTION = ("op", SUM)
_ROOT = ("root", 0)
_ORDERED = ("ordered", False)
# Rows for each rank; () on a rank that need not know them.
_COUNTS = ("counts", ())
_EDGES = (("sendcounts", ()), ("recvcounts", ()), ("reverse", False))
# What the parts are, where they travel as bytes: for checking mode.
_KINDS = (("sendkinds", ()), ("recvkinds", ()))
_ALL_BACK = Adjoint(
    "neighbor_alltoallv",
    to.along_edges,
    "Neighbor_alltoallv of the cotangents against the edges' direction, added up",
    to.sum_over_edges,
)
# The two ways of a message; Sendrecv has both.
_TO = (("dest", 0), ("sendtag", 0), ("count", -1), ("differentiated", False))
_FROM = (
    ("source", 0),
    ("recvtag", 0),
    ("received", -1),
    ("batch", 1),
    ("shadow", False),
    ("status", None),
    ("enveloped", False),
    ("differentiated", False),
)
# What a probe tells: source, tag, number of bytes, whether there is a message, its number in handles.hpp.
_PROBED = _compat.ShapedArray((5,), np.dtype(np.int32))
_BACKWARDS = "the same from the last rank to the first, for op=SUM"

_ROWS = (
    # MPI 4.1, chapter 3: point-to-point. The adjoint of a message is the cotangent's way back.
    Op(
        "send",
        "MPI 4.1, 3.2.1",
        params=(*_TO, ("mode", STANDARD), ("shadow", False)),
        returns=nobody,
        adjoint=Adjoint("recv", to.take_back, "Recv of the cotangent from dest"),
    ),
    Op(
        "recv",
        "MPI 4.1, 3.2.4",
        params=(*_FROM, ("message", -1)),
        sends=nobody,
        envelope=True,
        alias=0,
        adjoint=Adjoint("send", to.send_back, "Send of the cotangent to the rank that sent"),
    ),
    Op(
        "probe",
        "MPI 4.1, 3.8.1",
        params=(("source", 0), ("recvtag", 0), ("waits", True), ("matched", False), ("status", None)),
        operands=0,
        sends=nobody,
        shapes=lambda comm, params, operands: [_PROBED],
    ),
    Op(
        "sendrecv",
        "MPI 4.1, 3.10",
        params=(*dict(_TO + _FROM).items(), ("fold", False)),
        operands=2,
        envelope=True,
        alias=1,
        adjoint=Adjoint("sendrecv", to.turn, "Sendrecv of the cotangent the other way"),
    ),
    # MPI 4.1, chapter 6: collectives
    Op("barrier", "MPI 4.1, 6.3", operands=0, sends=nobody, returns=nobody),
    Op(
        "bcast",
        "MPI 4.1, 6.4",
        params=(_ROOT,),
        sends=the_root,
        returns=with_the_root,
        alias=0,
        adjoint=Adjoint(
            "reduce", to.pick("root", op=SUM), "Reduce of the cotangents (op=SUM) to the root, zero elsewhere"
        ),
    ),
    Op(
        "gather",
        "MPI 4.1, 6.5",
        params=(_ROOT,),
        sends=with_the_root,
        returns=the_root,
        lead_out="size",
        adjoint=Adjoint("scatter", to.keep, "Scatter of the root's cotangent"),
    ),
    Op(
        "gatherv",
        "MPI 4.1, 6.5",
        params=(_ROOT, _COUNTS),
        sends=with_the_root,
        returns=the_root,
        lead_in="part",
        lead_out="counts",
        adjoint=Adjoint("scatterv", to.keep, "Scatterv of the root's cotangent"),
    ),
    Op(
        "scatter",
        "MPI 4.1, 6.6",
        params=(_ROOT,),
        sends=the_root,
        returns=with_the_root,
        lead_in="size",
        alias=0,
        adjoint=Adjoint("gather", to.keep, "Gather of the cotangents to the root, zero elsewhere"),
    ),
    Op(
        "scatterv",
        "MPI 4.1, 6.6",
        params=(_ROOT, _COUNTS),
        sends=the_root,
        returns=with_the_root,
        lead_in="counts",
        lead_out="part",
        adjoint=Adjoint("gatherv", to.keep, "Gatherv of the cotangents to the root, zero elsewhere"),
    ),
    Op(
        "allgather",
        "MPI 4.1, 6.7",
        lead_out="size",
        adjoint=Adjoint("reduce_scatter_block", to.pick(op=SUM), "Reduce_scatter_block of the cotangents (op=SUM)"),
        adjoint_between=Adjoint("alltoall", to.pick(), "Alltoall of the cotangents, added up", to.sum_over_ranks),
    ),
    Op(
        "allgatherv",
        "MPI 4.1, 6.7",
        params=(_COUNTS,),
        lead_in="part",
        lead_out="counts",
        adjoint=Adjoint("reduce_scatter", to.pick("counts", op=SUM), "Reduce_scatter of the cotangents (op=SUM)"),
    ),
    Op(
        "alltoall",
        "MPI 4.1, 6.8",
        lead_in="size",
        lead_out="size",
        adjoint=Adjoint("alltoall", to.keep, "Alltoall of the cotangents"),
    ),
    Op(
        "alltoallv",
        "MPI 4.1, 6.8",
        params=(("sendcounts", ()), ("recvcounts", ()), *_KINDS),
        lead_in="sendcounts",
        lead_out="recvcounts",
        adjoint=Adjoint("alltoallv", to.exchanged, "Alltoallv of the cotangents with the counts exchanged"),
    ),
    # In checking mode, before what the native layer cannot tell from something else: ranks compare what they say of it.
    Op(
        "agree",
        "MPI 4.1, 6.9",
        params=(("says", 0),),
        operands=0,
        sends=nobody,
        returns=nobody,
        blocking_only=True,
    ),
    Op(
        "reduce",
        "MPI 4.1, 6.9.1",
        params=(_REDUCTION, _ROOT, _ORDERED),
        sends=with_the_root,
        returns=the_root,
        alias=0,
        linear=_sums,
        adjoint=Adjoint("bcast", to.pick("root"), "Bcast of the root's cotangent, for op=SUM"),
    ),
    Op(
        "allreduce",
        "MPI 4.1, 6.9.6",
        params=(_REDUCTION, _ORDERED),
        alias=0,
        linear=_sums,
        adjoint=Adjoint("allreduce", to.keep, "Allreduce of the cotangents (op=SUM), for op=SUM"),
    ),
    # The same result declared to be one value that all ranks share, and its partner. See docs/differentiation.md.
    Op(
        "allreduce_replicated",
        "MPI 4.1, 6.9.6",
        params=(_REDUCTION, _ORDERED),
        alias=0,
        native="allreduce",
        adjoint=Adjoint(
            "pvary",
            to.pick("ordered"),
            "the cotangent itself, which is the same on every rank",
            checked="replicated_cotangent",
        ),
    ),
    Op(
        "pvary",
        "jax.lax.pvary; f of Megatron-LM, https://arxiv.org/abs/1909.08053, section 3",
        params=(_ORDERED,),
        native=None,
        adjoint=Adjoint("allreduce_replicated", to.pick("ordered", op=SUM), "Allreduce of the cotangents (op=SUM)"),
    ),
    # As pvary; in checking mode, ranks compare what they have.
    Op(
        "replicated_cotangent",
        "MPI 4.1, 6.9.6",
        params=(_ORDERED,),
        alias=0,
        blocking_only=True,
        adjoint=Adjoint("allreduce_replicated", to.pick("ordered", op=SUM), "Allreduce of the cotangents (op=SUM)"),
    ),
    Op(
        "reduce_scatter_block",
        "MPI 4.1, 6.10.1",
        params=(_REDUCTION,),
        lead_in="size",
        linear=_sums,
        adjoint=Adjoint("allgather", to.pick(), "Allgather of the cotangents, for op=SUM"),
    ),
    Op(
        "reduce_scatter",
        "MPI 4.1, 6.10.2",
        params=(_REDUCTION, _COUNTS),
        lead_in="counts",
        lead_out="part",
        linear=_sums,
        adjoint=Adjoint("allgatherv", to.pick("counts"), "Allgatherv of the cotangents, for op=SUM"),
    ),
    Op(
        "scan",
        "MPI 4.1, 6.11.1",
        params=(_REDUCTION, ("reverse", False)),
        alias=0,
        linear=_sums,
        adjoint=Adjoint("scan", to.backwards, _BACKWARDS),
    ),
    Op(
        "exscan",
        "MPI 4.1, 6.11.2",
        params=(_REDUCTION, ("reverse", False)),
        sends=not_last,
        returns=not_first,
        linear=_sums,
        adjoint=Adjoint("exscan", to.backwards, _BACKWARDS),
    ),
    # MPI 4.1, chapter 8: topologies. Counts are those of all edges, rows of edges from PROC_NULL are zero.
    Op(
        "neighbor_allgather",
        "MPI 4.1, 8.6.1",
        params=_EDGES,
        lead_out="recvcounts",
        native="neighbor_allgatherv",
        adjoint=_ALL_BACK,
    ),
    Op(
        "neighbor_allgatherv",
        "MPI 4.1, 8.6.1",
        params=_EDGES,
        lead_in="part",
        lead_out="recvcounts",
        adjoint=_ALL_BACK,
    ),
    Op(
        "neighbor_alltoallv",
        "MPI 4.1, 8.6.2",
        params=(*_EDGES, *_KINDS),
        lead_in="sendcounts",
        lead_out="recvcounts",
        adjoint=Adjoint(
            "neighbor_alltoallv", to.along_edges, "Neighbor_alltoallv of the cotangents against the edges' direction"
        ),
    ),
)

TABLE = {row.name: row for row in _ROWS}
