"""Programs drawn from seeds, one after the other, in step on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import harness
import jax


def check(
    seeds: Sequence[int],
    seconds: float,
    draw: Callable[[int], Any],
    differs: Callable[[Any], str],
    counted: Callable[[Any], dict[str, int]],
    ways: Collection[str],
    keep: int,
) -> dict[str, Any]:
    """Run the programs of these seeds, or those that there is time for; fail on all ranks if one does. Collective.

    Args:
      seconds: no program is begun after that.
      draw: the program of a seed, which has a `way`. differs: runs it and says how it is wrong; "" if it is not.
      counted: numbers of a program, which are added up. ways: those that there are.
      keep: after how many programs JAX is to forget what it has compiled, which is not run again.
    Returns: how many programs, of each way, the sums, and seconds.
    """
    done = {"programs": 0, **dict.fromkeys(ways, 0)}
    start = time.monotonic()
    for seed in seeds:
        if harness.CONTROL.bcast(time.monotonic() - start > seconds):
            break
        program = draw(seed)
        try:
            text = differs(program)
        except Exception as error:
            text = f"{program}:\n{type(error).__name__}: {error}"
        harness.agree(not text, text)
        for name, number in {"programs": 1, program.way: 1, **counted(program)}.items():
            done[name] = done.get(name, 0) + number
        if done["programs"] % keep == 0:
            jax.clear_caches()
    return done | {"seconds": round(time.monotonic() - start, 1)}
