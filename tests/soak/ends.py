"""How a job ends when one of its ranks is killed, interrupted or raises, in each phase of a program.

The last rank is the one that meets its fate; the others wait for it in a compiled program.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from launch import launch

FAULTS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "KeyboardInterrupt": "os.kill(os.getpid(), signal.SIGINT)",
    "KeyboardInterrupt twice": "for _ in range(2): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.5)",
    "an exception": "raise ArithmeticError('on purpose')",
}
# What the last rank does instead of the rest.
PHASES = {
    "tracing": """
        def traced(x):
            fault()
            return comm.Allreduce(x)
        jax.jit(traced)(x)
        """,
    "compiling": """
        # JAX says so when it has lowered a program and XLA compiles it next.
        def listen(event, *_, **__):
            if event.endswith("jaxpr_to_mlir_module_duration"):
                fault()
        jax.monitoring.register_event_duration_secs_listener(listen)
        jax.jit(lambda x: comm.Allreduce(x + 1))(x)
        """,
    "running": """
        def calls_back(i, x):
            y = jax.pure_callback(lambda i, x: (fault() if i == 50 else None, x)[1], x, i, x)
            return comm.Allreduce(y)
        jax.jit(lambda x: jax.lax.fori_loop(0, 100, calls_back, x))(x).block_until_ready()
        """,
    "waiting": """
        threading.Timer(0.5, fault).start()
        jax.jit(lambda x: comm.Recv(x, 0, 7))(x).block_until_ready()
        """,
    "exit": """
        atexit.register(fault)
        sys.exit()
        """,
}
PROGRAM = """
import atexit, os, signal, sys, threading, time
import jax, jax.numpy as jnp
from mpi4py import MPI
import jaxcomm

comm = jaxcomm.JaxComm(MPI.COMM_WORLD)
x = jnp.arange(3.0)
assert jax.jit(comm.Allreduce)(x)[1] == comm.size
def fault():
    sys.stderr.write(f"fault {{time.time()}}\\n")
    sys.stderr.flush()
    {fault}

if comm.rank < comm.size - 1:
    jax.jit(lambda x: jax.lax.fori_loop(0, 50 if {runs} else 0, lambda i, x: comm.Allreduce(x), x))(x)
    jax.jit(lambda x: comm.Recv(x, comm.size - 1, 9))(x).block_until_ready()
    raise SystemExit("a message came that nobody sent")
"""


@dataclass(frozen=True)
class End:
    """How a job ended.

    Attributes:
      returncode: mpiexec's; 124 if the time limit ended the job.
      seconds: from the fault to the end of the job; None if there was no fault.
      stderr: of all ranks and mpiexec.
    """

    fault: str
    phase: str
    returncode: int
    seconds: float | None
    stderr: str


def end(fault: str, phase: str, ranks: int, limit: float, env: dict[str, str] | None = None) -> End:
    """Run a job to its end, with JAXCOMM_ABORT_ON_EXCEPTION on, as a program would that wants to end."""
    program = PROGRAM.format(fault=FAULTS[fault], runs=phase == "running")
    body = "\n".join(line.removeprefix("        ") for line in PHASES[phase].splitlines())
    done = launch(["-c", program + body], ranks, limit, {"JAXCOMM_ABORT_ON_EXCEPTION": "1"} | (env or {}))
    now, stderr = time.time(), done.stderr
    began = [float(line.split()[1]) for line in stderr.splitlines() if line.startswith("fault ")]
    return End(fault, phase, done.returncode, now - began[0] if began else None, stderr)


def run(ranks: int, limit: float) -> list[dict[str, Any]]:
    """Every fault in every phase."""
    rows = []
    for phase in PHASES:
        # While a rank waits in MPI it raises nothing; only then does the second interrupt add to the first.
        left_out = "an exception" if phase == "waiting" else "KeyboardInterrupt twice"
        for fault in [name for name in FAULTS if name != left_out]:
            found = end(fault, phase, ranks, limit)
            rows.append({key: value for key, value in vars(found).items() if key != "stderr"})
            print(rows[-1], flush=True)
    return rows
