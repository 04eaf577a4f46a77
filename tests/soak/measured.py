"""What the long runs have in common: they take counts, watch what a process holds, and leave a result."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from jaxcomm._native import bridge

WORLD = MPI.COMM_WORLD


def held() -> dict[str, int]:
    """What this process holds: kB of memory, files, threads, and rows of the native tables."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    status = Path("/proc/self/status").read_text()
    threads = int(status.partition("Threads:")[2].split()[0])
    files = len(list(Path("/proc/self/fd").iterdir()))
    python = threading.active_count()
    own = {"memory": pages * os.sysconf("SC_PAGE_SIZE") // 1024, "files": files, "threads": threads, "python": python}
    return own | bridge.counts()


def growth(step: Callable[[int], int], steps: int, warm_up: int, points: int = 10) -> dict[str, Any]:
    """Call step(i) -> operations done, so many times, and look at what the process holds now and then.

    Returns: how many operations were done, in how many seconds, and {what: [what it was at each point]}, the largest
      over the ranks. Collective.
    """
    operations, series, start = 0, [], time.monotonic()
    at = {warm_up + (steps - warm_up) * k // points for k in range(points + 1)}
    for i in range(steps + 1):
        if i in at:
            series.append(held())
        if i < steps:
            operations += step(i)
    most = WORLD.allreduce(series, op=_most)
    return {
        "operations": operations,
        "seconds": round(time.monotonic() - start, 1),
        "held": {what: [point[what] for point in most] for what in most[0]},
    }


def _most(a: list[dict[str, int]], b: list[dict[str, int]]) -> list[dict[str, int]]:
    return [{what: max(x[what], y[what]) for what in x} for x, y in zip(a, b, strict=True)]


def grown(result: dict[str, Any]) -> dict[str, int]:
    """By how much each thing grew from the first look, after warming up, to the last."""
    return {what: values[-1] - values[0] for what, values in result["held"].items()}


def main(run: Callable[..., dict[str, Any]]) -> None:
    """Call run(**specification) on all ranks, from the command line; rank 0 writes what it returns."""
    result = run(**json.loads(sys.argv[1]))
    if WORLD.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))
