"""What jaxcomm does, one row an operation, in the MPI standard's chapter order. The C++ twin is _native/ops.inc."""

from __future__ import annotations

from jaxcomm._primitives import adjoints as to
from jaxcomm._primitives.op import Adjoint, Op, Params, nobody, not_first, not_last, the_root
from jaxcomm._primitives.reductions import SUM

__all__ = ["TABLE"]


def _sums(params: Params) -> bool:
    return bool(params["op"] == SUM)


_REDUCTION = ("op", SUM)
_ROOT = ("root", 0)
# The two ways of a message; Sendrecv has both.
_TO = (("dest", 0), ("sendtag", 0), ("count", -1))
_FROM = (
    ("source", 0),
    ("recvtag", 0),
    ("received", -1),
    ("batch", 1),
    ("shadow", False),
    ("status", None),
    ("enveloped", False),
)
_BACKWARDS = "the same from the last rank to the first, for op=SUM"

_ROWS = (
    # MPI 4.1, chapter 3: point-to-point. The adjoint of a message is the cotangent's way back.
    Op(
        "send",
        "MPI 4.1, 3.2.1",
        params=(*_TO, ("synchronous", False), ("shadow", False)),
        returns=nobody,
        adjoint=Adjoint("recv", to.take_back, "Recv of the cotangent from dest"),
    ),
    Op(
        "recv",
        "MPI 4.1, 3.2.4",
        params=_FROM,
        sends=nobody,
        envelope=True,
        alias=0,
        adjoint=Adjoint("send", to.send_back, "Send of the cotangent to the rank that sent"),
    ),
    Op(
        "sendrecv",
        "MPI 4.1, 3.10",
        params=_TO + _FROM,
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
        alias=0,
        adjoint=Adjoint(
            "reduce", to.pick("root", op=SUM), "Reduce of the cotangents (op=SUM) to the root, zero elsewhere"
        ),
    ),
    Op(
        "gather",
        "MPI 4.1, 6.5",
        params=(_ROOT,),
        returns=the_root,
        lead_out="size",
        adjoint=Adjoint("scatter", to.keep, "Scatter of the root's cotangent"),
    ),
    Op(
        "scatter",
        "MPI 4.1, 6.6",
        params=(_ROOT,),
        sends=the_root,
        lead_in="size",
        alias=0,
        adjoint=Adjoint("gather", to.keep, "Gather of the cotangents to the root, zero elsewhere"),
    ),
    Op(
        "allgather",
        "MPI 4.1, 6.7",
        lead_out="size",
        adjoint=Adjoint("reduce_scatter_block", to.pick(op=SUM), "Reduce_scatter_block of the cotangents (op=SUM)"),
    ),
    Op(
        "alltoall",
        "MPI 4.1, 6.8",
        lead_in="size",
        lead_out="size",
        adjoint=Adjoint("alltoall", to.keep, "Alltoall of the cotangents"),
    ),
    Op(
        "reduce",
        "MPI 4.1, 6.9.1",
        params=(_REDUCTION, _ROOT),
        returns=the_root,
        alias=0,
        linear=_sums,
        adjoint=Adjoint("bcast", to.pick("root"), "Bcast of the root's cotangent, for op=SUM"),
    ),
    Op(
        "allreduce",
        "MPI 4.1, 6.9.6",
        params=(_REDUCTION,),
        alias=0,
        linear=_sums,
        adjoint=Adjoint("allreduce", to.keep, "Allreduce of the cotangents (op=SUM), for op=SUM"),
    ),
    # The same result declared to be one value that all ranks share, and its partner. See docs/differentiation.md.
    Op(
        "allreduce_replicated",
        "MPI 4.1, 6.9.6",
        params=(_REDUCTION,),
        alias=0,
        native="allreduce",
        adjoint=Adjoint("pvary", to.pick(), "the cotangent itself, which is the same on every rank"),
    ),
    Op(
        "pvary",
        "jax.lax.pvary; f of Megatron-LM, https://arxiv.org/abs/1909.08053, section 3",
        native=None,
        adjoint=Adjoint("allreduce_replicated", to.pick(op=SUM), "Allreduce of the cotangents (op=SUM)"),
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
)

TABLE = {row.name: row for row in _ROWS}
