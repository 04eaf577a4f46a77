"""How much an Allreduce adds to a process's peak memory, in multiples of its operand. Runs on the ranks, see job.py.

mpi4py in place is the reference: what its MPI takes for itself is not ours. A function that gets to keep its operand needs
one array more, for the result.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import job
import numpy as np
from mpi4py import MPI

import jaxcomm

WORLD = MPI.COMM_WORLD


def resident(field: str) -> int:
    """Return VmRSS, the memory in use, or VmHWM, the most there ever was, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def in_loop(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, x: function(x), x)


def numpy_operand(nbytes: int) -> np.ndarray:
    return np.full(nbytes // 4, 0, np.float32)


def jax_operand(nbytes: int) -> Any:
    return jnp.array(numpy_operand(nbytes)).block_until_ready()


def growth(call: Callable[[Any], Any], make: Callable[[int], Any], nbytes: int) -> float:
    """Return by how much a call raises the peak above what is there before it, operand included."""
    x = make(nbytes)
    gc.collect()
    WORLD.Barrier()
    forget_peak()
    start = resident("VmRSS")
    jax.block_until_ready(call(x))
    return float(WORLD.allreduce((resident("VmHWM") - start) / nbytes, op=MPI.MAX))


def measure(nbytes: int) -> dict[str, Any]:
    comm = jaxcomm.JaxComm(WORLD)
    donated = jaxcomm.jit(comm.Allreduce, donate_argnums=0)
    # By name: the call, what makes its operand, and how many arrays the result needs beside the operand.
    rows = {
        "mpi4py": (lambda x: WORLD.Allreduce(MPI.IN_PLACE, x), numpy_operand, 0),
        "eager": (comm.Allreduce, jax_operand, 1),
        "jax.jit": (jax.jit(comm.Allreduce), jax_operand, 1),
        "jaxcomm.jit": (jaxcomm.jit(comm.Allreduce), jax_operand, 1),
        "jaxcomm.jit, donated": (donated, jax_operand, 0),
        "loop": (jaxcomm.jit(in_loop(comm.Allreduce)), jax_operand, 1),
        "loop, donated": (jaxcomm.jit(in_loop(comm.Allreduce), donate_argnums=0), jax_operand, 0),
    }
    out = []
    for name, (call, make, needs) in rows.items():
        growth(call, make, nbytes)  # compiles, and lets MPI set up what it keeps
        out.append({"contender": name, "needs": needs, "growth": round(growth(call, make, nbytes), 3)})
    return {"bytes": nbytes, "memory": out}


if __name__ == "__main__":
    job.main(measure)
