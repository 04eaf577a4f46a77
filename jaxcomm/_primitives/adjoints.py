"""Parameter maps: how the parameters of an adjoint follow from those of the operation."""

from __future__ import annotations

from typing import Any

from jaxcomm._primitives.op import BUFFERED, Params

__all__ = [
    "along_edges",
    "backwards",
    "exchanged",
    "keep",
    "pick",
    "send_back",
    "sum_over_edges",
    "sum_over_ranks",
    "take_back",
    "turn",
]


def keep(params: Params) -> Params:
    """The same parameters."""
    return params


def pick(*names: str, **fixed: object):  # type: ignore[no-untyped-def]
    """Some of the parameters, and others with a fixed value."""

    def picked(params: Params) -> Params:
        return {name: params[name] for name in names} | fixed

    return picked


def backwards(params: Params) -> Params:
    """The same on the communicator in reverse order."""
    return params | {"reverse": not params["reverse"]}


def exchanged(params: Params) -> Params:
    """As many rows to each rank as came from it, and the other way round. Bytes have no derivative, and so no kinds."""
    rest = {name: value for name, value in params.items() if name not in ("sendkinds", "recvkinds")}
    return rest | {"sendcounts": params["recvcounts"], "recvcounts": params["sendcounts"]}


def along_edges(params: Params) -> Params:
    """The same against the direction of the edges: what went to each comes from it."""
    return exchanged(params) | {"reverse": not params["reverse"]}


def sum_over_edges(params: Params, back: Any, like: Any) -> Any:
    """The sum of what comes from the neighbours that all got the same."""
    return back.reshape(len(params["sendcounts"]), *like.shape).sum(axis=0)


def sum_over_ranks(params: Params, back: Any, like: Any) -> Any:
    """The sum of what comes from all ranks of the other group, which all got the same."""
    return back.sum(axis=0)


def take_back(params: Params) -> Params:
    """A receive of the cotangent from where the message went."""
    return {
        "source": params["dest"],
        "recvtag": params["sendtag"],
        "received": params["count"],
        "shadow": True,
        "status": None,
    }


def send_back(params: Params) -> Params:
    """A send of the cotangent to where the message came from: as many elements as came.

    It is buffered, as all sends that differentiation adds: make.for_tangent says why.
    """
    return {
        "dest": params["source"],
        "sendtag": params["recvtag"],
        "count": params["received"],
        "mode": BUFFERED,
        "shadow": True,
    }


def turn(params: Params) -> Params:
    """Both, for a message each way."""
    back = send_back(params)
    del back["mode"]
    return back | take_back(params) | {"fold": params["fold"]}
