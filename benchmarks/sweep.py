"""Times of operations, by message size, of several contenders. Runs on the ranks, see job.py."""

from typing import Any

import contenders
import job
import operations
from names import GLOO, PING_PONG
from timing import WORLD, Timed, interleaved


def compare(operation: operations.Operation, names: list[str], nbytes: int, **effort: Any) -> list[dict[str, Any]]:
    """Time the contenders that know the operation and have what they need."""
    started: dict[str, Timed] = {}
    for name in names:
        contender = contenders.TABLE[name]
        # Each has an operand of its own: what is given away or overwritten is nobody else's.
        timed = contender.start(operation, operation.operand(WORLD.size, nbytes)) if contender.available else None
        if timed:
            started[name] = timed
    row = {"operation": operation.name, "ranks": WORLD.size, "bytes": nbytes}
    return [row | {"contender": name} | times for name, times in interleaved(started, **effort).items()]


def measure(names: list[str], methods: list[str], sizes: list[int], **effort: Any) -> dict[str, Any]:
    if set(names) & set(GLOO):
        contenders.start_distributed()
    rows = []
    for method in methods:
        if method == PING_PONG and WORLD.size == 1:
            continue
        for nbytes in sizes:
            rows += compare(operations.TABLE[method], names, nbytes, **effort)
    return {"rows": rows}


if __name__ == "__main__":
    job.main(measure)
