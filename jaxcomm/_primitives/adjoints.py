"""Parameter maps: how the parameters of an adjoint follow from those of the operation."""

from __future__ import annotations

from jaxcomm._primitives.op import Params

__all__ = ["backwards", "keep", "pick", "send_back", "take_back", "turn"]


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
    """A send of the cotangent to where the message came from: as many elements as came."""
    return {
        "dest": params["source"],
        "sendtag": params["recvtag"],
        "count": params["received"],
        "synchronous": False,
        "shadow": True,
    }


def turn(params: Params) -> Params:
    """Both, for a message each way."""
    back = send_back(params)
    del back["synchronous"]
    return back | take_back(params)
