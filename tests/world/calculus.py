"""Derivatives of a case by NumPy alone, and what a traced program would communicate.

All ranks together compute one function of all ranks' inputs. Complex steps through the table's reference give its
derivatives without the rounding of finite differences: Im f(x + i h v) / h, for h so small that h squared is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import CASES, Arrays, Case
from mpi4py import MPI

STEP = 1e-200
EPS = np.finfo(np.float64).eps
DIFFERENTIABLE = [case for case in CASES if case.differentiable]
METHODS = list(dict.fromkeys(case.method for case in DIFFERENTIABLE))
# One root, and MAX for MIN, do where it is not the operation but what surrounds it that is tested.
REPRESENTATIVE = [
    case
    for case in DIFFERENTIABLE
    if case.op != "MIN" and (case.root is None or case.op == "PROD" or "last" in case.name)
]
# One of each kind, for what is costly to compile. These are left out, since another goes the same ways.
LIKE_OTHERS = ("Ssend", "Sendrecv", "Sendrecv_replace", "Barrier", "Alltoall", "Allgatherv", "Gatherv-last")
LIKE_OTHERS += ("Neighbor_allgather-channel", "Neighbor_alltoall-torus", "Neighbor_alltoallv-digraph")
COMPOSED = [
    case
    for case in REPRESENTATIVE
    if case.op in (None, "SUM") or case.name in ("Allreduce-MAX", "Scan-PROD", "Exscan-MAX", "Reduce-PROD")
    if case.name not in LIKE_OTHERS
]


def of(method: str, cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.method == method]


def results(case: Case, xs: Arrays) -> list[np.ndarray]:
    """What every rank gets."""
    return [case.reference(xs, rank) for rank in range(len(xs))]


def tangents(case: Case, xs: Arrays, vs: Arrays) -> list[np.ndarray]:
    """What every rank gets if all operands move."""
    if case.linear:
        return results(case, vs)
    moved = [x + 1j * STEP * v for x, v in zip(xs, vs, strict=True)]
    # NumPy orders complex numbers by their real parts first: MAX and MIN of the moved operands are right too.
    return [y.imag / STEP for y in results(case, moved)]


def sizes(case: Case, xs: Arrays, vs: Arrays) -> list[np.ndarray]:
    """The sums of the absolute values of what is added up in the tangents: what rounding is relative to."""
    if case.op in ("SUM", "PROD"):
        xs, vs = [np.abs(x) for x in xs], [np.abs(v) for v in vs]
    return [np.abs(dy) for dy in tangents(case, xs, vs)]


def rounding(comm: Any) -> float:
    """Relative to `sizes`: size products of size factors and their sum, in complex arithmetic, here and in NumPy."""
    return 4 * (comm.size + 1) * 5**0.5 * EPS


def random_like(comm: Any, shapes: Sequence[tuple[int, ...]], seed: int, dtype: Any = np.float64) -> list[np.ndarray]:
    """Random arrays for every rank of comm; no two ranks of the world have the same."""
    out = []
    for rank, shape in enumerate(shapes):
        rng = np.random.default_rng([seed, rank, comm.allreduce(MPI.COMM_WORLD.rank, MPI.MIN)])
        x = rng.normal(size=shape)
        out.append(np.asarray(x + 1j * rng.normal(size=shape) if np.dtype(dtype).kind == "c" else x).astype(dtype))
    return out


def shapes(arrays: Arrays) -> list[tuple[int, ...]]:
    return [a.shape for a in arrays]


def sums(comm: Any, pairs: Sequence[tuple[Any, Any]]) -> np.ndarray:
    """The inner products over all ranks, without conjugation."""
    return np.asarray(comm.allreduce(np.array([np.sum(np.asarray(a) * np.asarray(b)) for a, b in pairs])))


def slope(total: Callable[[list[np.ndarray]], Any], xs: Arrays, vs: Arrays) -> float:
    """The derivative of a NumPy function of all ranks' operands in a direction."""
    return float(np.imag(total([x + 1j * STEP * v for x, v in zip(xs, vs, strict=True)])) / STEP)


def bend(total: Callable[[list[np.ndarray]], Any], xs: Arrays, us: Arrays, vs: Arrays) -> float:
    """The second derivative in two directions: differences of fourth order of the exact slope."""
    h = 1e-3

    def at(t: float) -> float:
        return slope(total, [x + t * u for x, u in zip(xs, us, strict=True)], vs)

    return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)


def check_gradient(comm: Any, f: Callable[..., Any], *args: Any, rtol: float = 1e-6, seed: int = 0) -> Any:
    """Compare jit(grad(f)) with differences of the sum over ranks of f, all arguments of all ranks moving at once.

    Returns: the gradient for all arguments.
    """
    rng = np.random.default_rng([seed, MPI.COMM_WORLD.rank])
    vs = [rng.normal(size=np.shape(a)) for a in args]
    grads = jax.jit(jax.grad(f, argnums=tuple(range(len(args)))))(*args)
    value = jax.jit(f)
    h = 1e-5
    ahead, behind = (float(value(*[a + t * v for a, v in zip(args, vs, strict=True)])) for t in (h, -h))
    mine = sum(float(np.vdot(g, v)) for g, v in zip(grads, vs, strict=True))
    found, expected, scale = comm.allreduce(np.array([mine, (ahead - behind) / (2 * h), abs(mine)]))
    assert abs(found - expected) <= rtol * scale, (found, expected)
    return grads


def operations(f: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often a program calls each operation on this rank; those of a loop count once for each step."""
    found: Counter[str] = Counter()
    _count(jax.make_jaxpr(f)(*args).jaxpr, 1, found)
    return found


def _count(jaxpr: Any, times: int, found: Counter[str]) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith("mpi_") and name not in ("mpi_join", "mpi_rest", "mpi_pvary", "mpi_agree"):
            found[name.removeprefix("mpi_")] += times
        inner = times * eqn.params["length"] if name == "scan" else times
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else [value]:
                if hasattr(part, "eqns"):
                    _count(part, inner, found)
                elif hasattr(part, "jaxpr"):
                    _count(part.jaxpr, inner, found)


# Modes of differentiation. Of a function of all ranks' numbers: a derivative along v on a rank is that of its own result,
# a gradient that of the sum of all ranks' results (docs/differentiation.md).


def along(f: Any, v: Any) -> Any:
    return lambda x: jax.jvp(f, (x,), (v,))[1]


def against(f: Any, v: Any) -> Any:
    return jax.grad(lambda x: jnp.vdot(f(x), v))


def modes(f: Any, v: Any, w: Any) -> dict[str, Any]:
    """The value and the derivatives of a function, up to third order, by mode, as functions of x."""
    first = {"value": f, "forward": along(f, v), "reverse": jax.grad(f)}
    second = {
        "forward over forward": along(along(f, v), w),
        "forward over reverse": along(jax.grad(f), v),
        "reverse over forward": jax.grad(along(f, v)),
        "reverse over reverse": against(jax.grad(f), v),
    }
    third = {
        "forward, forward, reverse": along(along(jax.grad(f), v), w),
        "reverse, forward, reverse": against(along(jax.grad(f), v), w),
        "forward, reverse, reverse": along(against(jax.grad(f), v), w),
    }
    return first | second | third
