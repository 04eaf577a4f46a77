"""The contenders: one row each, the ways to run an operation.

A call returns when its result is there. What runs in a loop gives its operand away and goes on with its result, so that
nobody has to copy.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from empty import empty_call
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec
from mpi4py import MPI
from names import PING_PONG
from operations import RANKS, Array, Operation
from timing import Timed

import jaxcomm

WORLD = MPI.COMM_WORLD
LOOP = 100
Function = Callable[[Array], Array]
Jit = Callable[..., Any]


@dataclass(frozen=True)
class Contender:
    """A way to run operations.

    Attributes:
      start: (operation, operand) -> what to time, or None where there is no such thing.
      note: what the tables say about it.
      available: whether it can run here.
    """

    start: Callable[[Operation, np.ndarray], Timed | None]
    note: str
    available: bool = True


@functools.cache
def communicator() -> jaxcomm.JaxComm:
    return jaxcomm.JaxComm(WORLD)


# The function of one operand that each library makes of an operation


def ours(operation: Operation) -> Function:
    return functools.partial(operation.jaxcomm, communicator())


def theirs(operation: Operation) -> Function | None:
    import mpi4jax

    if operation.mpi4jax is None:
        return None
    return functools.partial(operation.mpi4jax, mpi4jax, peer_communicator())


@functools.cache
def peer_communicator() -> MPI.Intracomm:
    return WORLD.Dup()


def callback(operation: Operation) -> Function:
    def host(x: Array) -> Any:
        # What XLA hands over must not be written to.
        mine = np.array(x)
        return operation.mpi4py(WORLD, mine, operation.result(WORLD.size, mine))

    def function(x: Array) -> Array:
        y = operation.result(WORLD.size, np.broadcast_to(np.float32(0), x.shape))
        return io_callback(host, jax.ShapeDtypeStruct(y.shape, y.dtype), x, ordered=True)

    return function


def collective(operation: Operation) -> Function | None:
    return None if operation.name == PING_PONG and WORLD.size == 1 else operation.lax


def jit_over_all(function: Function, **options: Any) -> Any:
    """jax.jit for one program of all processes, whose function sees its own process's part."""
    axis = PartitionSpec(RANKS)
    spread = jax.shard_map(function, mesh=mesh(), in_specs=axis, out_specs=axis, check_vma=False)
    return jax.jit(spread, **options)


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((WORLD.size,), (RANKS,))


def distributed(x: np.ndarray) -> Any:
    return jax.make_array_from_process_local_data(NamedSharding(mesh(), PartitionSpec(RANKS)), x)


def start_distributed() -> None:
    """Make the processes one JAX program over gloo; before JAX's first use, and in a job of its own."""
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = WORLD.bcast(probe.getsockname()[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", WORLD.size, WORLD.rank)


# How it is run


def on_numpy(operation: Operation, x: np.ndarray) -> Timed:
    y = operation.result(WORLD.size, x)
    return Timed(lambda: operation.mpi4py(WORLD, x, y), operation.messages)


def single(jit: Jit | None, make: Callable[[Operation], Function | None], place: Callable[..., Any] = jnp.array) -> Any:
    """One operation a call, in a function compiled by jit, or not compiled."""

    def start(operation: Operation, x: np.ndarray) -> Timed | None:
        function = make(operation)
        if function is None:
            return None
        call, operand = jit(function) if jit else function, place(x)
        return Timed(lambda: call(operand).block_until_ready(), operation.messages)

    return start


def looped(jit: Jit, make: Callable[[Operation], Function | None], place: Callable[..., Any] = jnp.array) -> Any:
    """Many operations a call, in a fori_loop."""

    def start(operation: Operation, x: np.ndarray) -> Timed | None:
        function = make(operation)
        if function is None:
            return None
        times = iterations(x.nbytes)

        def loop(x: Array) -> Array:
            return jax.lax.fori_loop(0, times, lambda _, x: onward(x, function(x)), x)

        call, state = jit(loop, donate_argnums=0), [place(x)]

        def run() -> None:
            state[0] = call(state[0]).block_until_ready()

        return Timed(run, times * operation.messages)

    return start


def once_a_call(start: Callable[[Operation, np.ndarray], Timed | None]) -> Any:
    """A baseline: however many messages the operation exchanges, it stands for one call."""
    return lambda operation, x: start(dataclasses.replace(operation, messages=1), x)


def onward(x: Array, y: Array) -> Array:
    """Return what the next iteration starts from: the result, or as much of it as is like the operand."""
    return y if y.shape == x.shape else y[0]


def iterations(nbytes: int) -> int:
    """How long a loop is: LOOP, and less for messages of more than 1 MB."""
    return max(4, min(LOOP, LOOP * 2**20 // max(nbytes, 1)))


HAVE_MPI4JAX = find_spec("mpi4jax") is not None
TABLE = {
    "mpi4py": Contender(on_numpy, "mpi4py on NumPy arrays, in place where MPI can"),
    "eager": Contender(single(None, ours), "jaxcomm on concrete arrays, nothing compiled"),
    "jax.jit": Contender(single(jax.jit, ours), "jaxcomm in a function compiled by jax.jit"),
    "jaxcomm.jit": Contender(single(jaxcomm.jit, ours), "jaxcomm in a function compiled by jaxcomm.jit"),
    "loop": Contender(looped(jaxcomm.jit, ours), f"jaxcomm in a fori_loop of {LOOP}, under jaxcomm.jit"),
    "mpi4jax eager": Contender(single(None, theirs), "mpi4jax on concrete arrays", HAVE_MPI4JAX),
    "mpi4jax jit": Contender(single(jax.jit, theirs), "mpi4jax under jax.jit", HAVE_MPI4JAX),
    "mpi4jax loop": Contender(looped(jax.jit, theirs), f"mpi4jax in a fori_loop of {LOOP}", HAVE_MPI4JAX),
    "io_callback": Contender(single(jax.jit, callback), "mpi4py in an ordered io_callback, under jax.jit"),
    "gloo": Contender(
        single(jit_over_all, collective, distributed), "JAX's own collectives over gloo: jax.distributed, shard_map"
    ),
    "gloo loop": Contender(looped(jit_over_all, collective, distributed), f"the same in a fori_loop of {LOOP}"),
    # Baselines: no communication
    "plain call": Contender(once_a_call(single(jax.jit, lambda _: lambda x: x + 1)), "jax.jit(lambda x: x + 1)"),
    "empty loop": Contender(
        once_a_call(looped(jax.jit, lambda _: empty_call)), f"an empty custom call in a fori_loop of {LOOP}"
    ),
}
