"""An Allreduce of a tree of many small leaves, beside one message of as many bytes, and one for each leaf. See job.py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import job
from timing import WORLD, Timed, interleaved

import jaxcomm

COMM = jaxcomm.JaxComm(WORLD)
STEPS = 100  # of a loop

Reduce = Callable[[Any], Any]


def leaf_by_leaf(tree: Any) -> Any:
    return [COMM.Allreduce(leaf) for leaf in tree]


def looped(reduce: Reduce) -> Reduce:
    return lambda x: jax.lax.fori_loop(0, STEPS, lambda _, x: reduce(x), x)


def measure(leaves: int, nbytes: int, **effort: Any) -> dict[str, Any]:
    """Time so many leaves of so many bytes: eager, compiled, and in a compiled loop, which has no arguments to look at."""
    tree = [jnp.zeros(nbytes // 4, jnp.float32) for _ in range(leaves)]
    whole = jnp.zeros(leaves * nbytes // 4, jnp.float32)
    kinds: dict[str, tuple[Reduce, Any]] = {
        "one message": (COMM.Allreduce, whole),
        "tree": (COMM.Allreduce, tree),
        "leaf by leaf": (leaf_by_leaf, tree),
        "no communication": (lambda x: jax.tree.map(lambda leaf: leaf + 1, x), tree),
    }
    rows = []
    for way, wrap, operations in (
        ("eager", lambda f: f, 1),
        ("jaxcomm.jit", jaxcomm.jit, 1),
        ("loop", lambda f: jaxcomm.jit(looped(f)), STEPS),
    ):
        timed = {kind: Timed(call(wrap(f), x), operations) for kind, (f, x) in kinds.items()}
        found = interleaved(timed, **effort)
        rows += [{"way": way, "kind": kind} | times for kind, times in found.items()]
    return {"leaves": leaves, "bytes": nbytes, "trees": rows}


def call(f: Reduce, x: Any) -> Callable[[], object]:
    return lambda: jax.block_until_ready(f(x))


if __name__ == "__main__":
    job.main(measure)
