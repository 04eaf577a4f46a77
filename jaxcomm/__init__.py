"""MPI inside JAX programs: mpi4py's communicator for JAX arrays, inside jit, with derivatives."""

from jaxcomm._runtime import abort_on_exception  # isort: skip  (first: it loads the native layer on mpi4py's MPI)
from jaxcomm._primitives.reductions import MEAN
from jaxcomm._primitives.statuses import ReceivedStatus
from jaxcomm.across import Closeness, allclose_across, global_norm
from jaxcomm.checks import checking
from jaxcomm.communicator import JaxCartcomm, JaxComm, JaxDistgraphcomm, JaxGraphcomm, JaxIntercomm
from jaxcomm.halo import halo_exchange
from jaxcomm.jitted import jit
from jaxcomm.message import Message
from jaxcomm.replicated import shared_value_and_grad
from jaxcomm.request import Prequest, Request
from jaxcomm.timeline import trace
from jaxcomm.token import Token, create_token, flush
from jaxcomm.watchdog import watch

__version__ = "0.1.0"

__all__ = [
    "MEAN",
    "Closeness",
    "JaxCartcomm",
    "JaxComm",
    "JaxDistgraphcomm",
    "JaxGraphcomm",
    "JaxIntercomm",
    "Message",
    "Prequest",
    "ReceivedStatus",
    "Request",
    "Token",
    "abort_on_exception",
    "allclose_across",
    "checking",
    "create_token",
    "flush",
    "global_norm",
    "halo_exchange",
    "jit",
    "shared_value_and_grad",
    "trace",
    "watch",
]
