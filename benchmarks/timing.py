"""Fair timing of several ways to do the same thing, on all ranks at once.

The contenders take turns, so that what else happens on the machine meets them all. Every sample starts after a barrier
and counts as long as the slowest rank took. How often a contender is called for one sample is rank 0's decision.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
FEWEST = 3  # repetitions of even the slowest


@dataclass(frozen=True)
class Timed:
    """A contender: a call that returns when its work is done, and how many operations that work is."""

    call: Callable[[], object]
    operations: int = 1


def sample(call: Callable[[], object], count: int) -> float:
    # Nobody waits for what the one before has left under way: each library has its own chain of tokens in JAX.
    jax.effects_barrier()
    WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def calibrate(call: Callable[[], object], seconds: float) -> tuple[int, float]:
    """Return how many calls make a sample of about so many seconds, and how long that takes. Compiles what it needs."""
    call()
    count = 1
    while (elapsed := WORLD.bcast(sample(call, count))) < seconds / 2:
        count = min(4 * count, math.ceil(count * seconds / elapsed))
    return count, elapsed


def interleaved(
    contenders: Mapping[str, Timed], repetitions: int, seconds: float, budget: float = 20
) -> dict[str, dict[str, Any]]:
    """Time the contenders against each other.

    Args:
      contenders: by name; the same on every rank.
      repetitions: samples of each; fewer, but at least three, where they would take longer than the budget.
      seconds: how long a sample should take.
      budget: seconds for the whole comparison.
    Returns: for each contender the seconds an operation took: median and minimum over the samples, and their number.
    """
    counts = {name: calibrate(timed.call, seconds) for name, timed in contenders.items()}
    affordable = int(budget / sum(elapsed for _, elapsed in counts.values()))
    repetitions = min(repetitions, max(FEWEST, affordable))
    own = np.empty((len(contenders), repetitions))
    for repetition in range(repetitions):
        # Every other round runs backwards: nobody always comes after the same one.
        for row, (name, timed) in list(enumerate(contenders.items()))[:: (-1) ** repetition]:
            count, _ = counts[name]
            own[row, repetition] = sample(timed.call, count) / (count * timed.operations)
    slowest = np.empty_like(own)
    WORLD.Allreduce(own, slowest, op=MPI.MAX)
    return {name: summary(samples) for name, samples in zip(contenders, slowest.tolist(), strict=True)}


def summary(samples: list[float]) -> dict[str, Any]:
    return {
        "median": significant(statistics.median(samples)),
        "min": significant(min(samples)),
        "samples": len(samples),
    }


def significant(x: float, digits: int = 4) -> float:
    return float(f"{x:.{digits}g}")
