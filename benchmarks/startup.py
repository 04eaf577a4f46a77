"""What starts up: the import, the compilation, the persistent cache. Runs on the ranks, see job.py."""

import time

# Before everything else: what `import jaxcomm` adds to these two.
import jax
from mpi4py import MPI

BEFORE = time.perf_counter()
import jaxcomm  # noqa: E402

IMPORT = time.perf_counter() - BEFORE

import statistics  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import jax.numpy as jnp  # noqa: E402
import job  # noqa: E402
from empty import empty_call  # noqa: E402

WORLD = MPI.COMM_WORLD


def operand() -> Any:
    return jnp.arange(16.0)


def chain(operation: Callable[[Any], Any], operations: int) -> Callable[[Any], Any]:
    """Return a new function that calls the operation so often; new, so that nothing of it is compiled yet."""

    def function(x: Any) -> Any:
        for _ in range(operations):
            x = operation(x)
        return x

    return function


def compile_time(operations: int, repetitions: int) -> dict[str, Any]:
    """Time tracing and compiling a function of many operations, and of as many empty custom calls."""
    comm, x = jaxcomm.JaxComm(WORLD), operand()
    contenders = {
        "empty": lambda: jax.jit(chain(empty_call, operations)).lower(x).compile(),
        "jax.jit": lambda: jax.jit(chain(comm.Allreduce, operations)).lower(x).compile(),
        "empty, first call": lambda: jax.jit(chain(empty_call, operations))(x).block_until_ready(),
        "jaxcomm.jit, first call": lambda: jaxcomm.jit(chain(comm.Allreduce, operations))(x).block_until_ready(),
    }
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions + 1):
        for name, build in contenders.items():
            start = time.perf_counter()
            build()  # type: ignore[no-untyped-call]
            if repetition:  # the first one imports parts of JAX
                samples[name].append(time.perf_counter() - start)
    return {"operations": operations, "compile": {name: round(statistics.median(s), 5) for name, s in samples.items()}}


def cache() -> dict[str, Any]:
    """Count what is compiled, and what comes from the persistent cache, in a program that communicates."""
    events: Counter[str] = Counter()

    def count(event: str, **_: Any) -> None:
        events[event] += 1

    jax.monitoring.register_event_listener(count)
    comm, x = jaxcomm.JaxComm(WORLD), operand()
    for jit in (jax.jit, jaxcomm.jit):
        jit(lambda x: comm.Bcast(comm.Allreduce(2 * x)))(x).block_until_ready()
    comm.Allreduce(x).block_until_ready()
    counted = {name: events[f"/jax/compilation_cache/cache_{name}"] for name in ("misses", "hits")}
    return {name: WORLD.allreduce(count) for name, count in counted.items()}


MODES: dict[str, Callable[..., dict[str, Any]]] = {"import": dict, "compile": compile_time, "cache": cache}


def measure(mode: str, **specification: Any) -> dict[str, Any]:
    return {"import seconds": round(IMPORT, 5), **MODES[mode](**specification)}


if __name__ == "__main__":
    job.main(measure)
