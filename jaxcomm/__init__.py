"""MPI inside JAX programs: mpi4py's communicator for JAX arrays, inside jit, with derivatives."""

from jaxcomm._runtime import abort_on_exception  # isort: skip  (first: it loads the native layer on mpi4py's MPI)
from jaxcomm.communicator import JaxCartcomm, JaxComm, JaxDistgraphcomm, JaxGraphcomm, JaxIntercomm
from jaxcomm.jitted import jit
from jaxcomm.replicated import shared_value_and_grad
from jaxcomm.token import Token, create_token, flush

__version__ = "0.1.0"

__all__ = [
    "JaxCartcomm",
    "JaxComm",
    "JaxDistgraphcomm",
    "JaxGraphcomm",
    "JaxIntercomm",
    "Token",
    "abort_on_exception",
    "create_token",
    "flush",
    "jit",
    "shared_value_and_grad",
]
