"""A Recv that waits for a late message beside a computation that does not need it. Runs on two ranks, see job.py.

Rank 0 times a compiled function that does both; rank 1 sends late. In order they take the sum, at best the longer one.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import job
from mpi4py import MPI

import jaxcomm

WORLD = MPI.COMM_WORLD
COMM = jaxcomm.JaxComm(WORLD)
SIDE = 256
X = jnp.arange(256.0)
MATRIX = jnp.eye(SIDE)
MESSAGE = jnp.float32(1)

Compute = Callable[[Any], Any]


def loops(pieces: int, steps: Any) -> Compute:
    """Return a computation of so many loops, one after the other, with so many steps in all, on one thread."""

    def compute(x: Any) -> Any:
        for _ in range(pieces):
            x = jax.lax.fori_loop(0, steps // pieces, lambda _, x: jnp.sin(x) + x, x)
        return x

    return compute


def matmuls(count: int) -> Compute:
    """Return a computation of so many products of matrices, one after the other."""

    def compute(x: Any) -> Any:
        for _ in range(count):
            x = x @ MATRIX
        return x

    return compute


def receive() -> Any:
    return COMM.Recv(MESSAGE, source=1)


# Both orders in the source; a computation alone for comparison


def receive_first(compute: Compute, x: Any) -> Any:
    message = receive()
    return compute(x), message


def receive_last(compute: Compute, x: Any) -> Any:
    y = compute(x)
    return y, receive()


def in_two_halves(compute: Compute, x: Any) -> Any:
    receiving = COMM.Irecv(MESSAGE, source=1)
    y = compute(x)
    return y, receiving.Wait()


def no_receive(compute: Compute, x: Any) -> Any:
    return compute(x)


ORDERS = {
    "Recv first": receive_first,
    "Recv last": receive_last,
    "Irecv first, Wait last": in_two_halves,
    "no Recv": no_receive,
}


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def fastest(function: Callable[..., Any], *args: Any) -> float:
    jax.block_until_ready(function(*args))
    return min(seconds(lambda: function(*args)) for _ in range(20))


def calibrated(busy: float, many: int) -> dict[str, int]:
    """How many steps of a loop, and how many products of matrices, take so long."""
    trial = 10000
    step = fastest(jax.jit(lambda x, steps: loops(1, steps)(x)), X, trial) / trial
    product = fastest(jax.jit(matmuls(10)), MATRIX) / 10
    return {"steps": max(many, round(busy / step)), "products": max(1, round(busy / product))}


def quietly(find: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Return on all ranks what rank 0 finds out, while the others sleep."""
    if WORLD.rank == 0:
        found = find()
        for rank in range(1, WORLD.size):
            WORLD.send(found, rank)
        return found
    while not WORLD.Iprobe(source=0):
        time.sleep(0.01)
    return dict(WORLD.recv(source=0))


def computations(many: int, steps: int, products: int) -> dict[str, tuple[Compute, Any]]:
    """By name: a computation and its operand. XLA makes one or more thunks of each loop and of each product."""
    return {
        "1 loop": (loops(1, steps), X),
        f"{many} loops": (loops(many, steps), X),
        "matrix products": (matmuls(products), MATRIX),
    }


def once(function: Compute, x: Any, receives: bool, late: float) -> float:
    WORLD.Barrier()
    if WORLD.rank == 0:
        return seconds(lambda: function(x))
    # Also where nobody receives: a rank that waits in a barrier takes processor time.
    time.sleep(late)
    if WORLD.rank == 1 and receives:
        COMM.Send(MESSAGE, dest=0)
    return 0.0


def measure(late: float, busy: float, limit: float, many: int, repetitions: int) -> dict[str, Any]:
    counts = quietly(lambda: calibrated(busy, many))
    jobs = {
        (order, name): (jaxcomm.jit(functools.partial(both, compute)), x)
        for name, (compute, x) in computations(many, **counts).items()
        for order, both in ORDERS.items()
    }
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    for repetition in range(repetitions + 1):
        for key, (function, x) in jobs.items():
            elapsed = once(function, x, key[0] != "no Recv", late)
            if repetition:  # the first one compiles
                samples[key].append(elapsed)
    rows = [
        {
            "order": order,
            "computation": name,
            "median": round(statistics.median(times), 5),
            "max": round(max(times), 5),
            "in time": round(sum(t <= limit for t in times) / len(times), 3),
        }
        for (order, name), times in samples.items()
    ]
    return {"late": late, "busy": busy, "limit": limit, "samples": repetitions, **counts, "overlap": rows}


if __name__ == "__main__":
    job.main(measure)
