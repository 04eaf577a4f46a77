"""Random programs: messages, collectives, requests and communicators, in loops, branches and nested jit, against NumPy.

A program is drawn from a seed, the same on every rank. Its state on a rank is some registers of small whole numbers; a step
takes one through an operation of the table of cases, in a drawn dtype and on a drawn communicator, and puts back what came.
So whatever the programs do, their results are exact, and NumPy says what they are on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import drawn
import harness
import jax
import jax.numpy as jnp
import measured
import numpy as np
from cases import CASES, Case
from jax import lax
from mpi4py import MPI

import jaxcomm

REGISTERS, LENGTH, PRIME = 3, 4, 13
# Exact in all of these: sums of four numbers below 13, products of four below 3.
DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
# Alone, a rank's two halves of a message to itself are other tests' matter.
HERE = [case for case in CASES if case.name not in ("Sendrecv-ragged", "Sendrecv-short")]
COMMS = ("world", "dup", "parity", "reversed", "self")
WAYS: dict[str, Callable[..., Any]] = {"eager": lambda f: f, "jax.jit": jax.jit, "jaxcomm.jit": jaxcomm.jit}

Registers = Sequence[Any]  # of one rank
Everyones = list[list[np.ndarray]]  # by rank, by register


def members(name: str) -> list[list[int]]:
    """The groups of a kind of communicator, each as ranks of the world in its own order."""
    every = list(range(harness.WORLD.size))
    return {
        "parity": [group for group in (every[::2], every[1::2]) if group],
        "reversed": [every[::-1]],
        "self": [[rank] for rank in every],
    }.get(name, [every])


@functools.cache
def in_two_halves(name: str) -> Any:
    """One for each communicator: it remembers its topologies."""
    return harness.InTwoHalves(harness.communicator(name))


class Step:
    """A part of a program: as JAX runs it on this rank, and as NumPy does for all."""

    def run(self, x: Registers) -> Registers:
        raise NotImplementedError

    def reference(self, xs: Everyones) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Local(Step):
    """Arithmetic on a rank."""

    to: int
    other: int
    factor: int

    def run(self, x: Registers) -> Registers:
        x = list(x)
        x[self.to] = (self.factor * x[self.to] + x[self.other] + harness.WORLD.rank) % PRIME
        return x

    def reference(self, xs: Everyones) -> None:
        for rank, x in enumerate(xs):
            x[self.to] = (self.factor * x[self.to] + x[self.other] + rank) % PRIME


def operand(x: Any, case: Case, dtype: str, rank: int, size: int, of: Any) -> Any:
    """Make a register what an operation takes on a rank; `of` is NumPy or JAX's."""
    most = 2 if dtype == "bool" else 3 if case.op == "PROD" else PRIME
    shape = case.shape(rank, size, (LENGTH,))
    return spread_jitted(x, most, shape, dtype) if of is jnp else spread(x, most, shape, dtype, np)


def spread(x: Any, most: int, shape: tuple[int, ...], dtype: str, of: Any = jnp) -> Any:
    return of.resize(x % most, shape).astype(dtype)


spread_jitted = jax.jit(spread, static_argnums=(1, 2, 3))


def taken_back(x: Any, y: Any, of: Any) -> Any:
    """Make a register of what came, of any shape, and what was there."""
    flat = of.clip(of.real(y).astype(np.float64), -1e5, 1e5).astype(np.int32).ravel()
    rows = of.resize(of.concatenate([flat, of.zeros(-flat.size % LENGTH, np.int32)]), (-(-flat.size // LENGTH), LENGTH))
    weights = np.arange(1, rows.shape[0] + 1, dtype=np.int32)[:, None]
    return (x + (rows * weights).sum(0, dtype=np.int32)) % PRIME


taken_back_jitted = jax.jit(functools.partial(taken_back, of=jnp))


def came(case: Case, comm: str, dtype: str, xs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What an operation gives each rank of the world whose register is that."""
    ys: list[Any] = [None] * len(xs)
    for group in members(comm):
        given = [operand(xs[world], case, dtype, r, len(group), np) for r, world in enumerate(group)]
        for rank, world in enumerate(group):
            ys[world] = case.reference(given, rank)
    return ys


@dataclass(frozen=True, repr=False)
class Operate(Step):
    """An operation of the table, blocking or started and waited for at once."""

    at: int
    case: Case
    comm: str
    dtype: str
    halves: bool

    def __repr__(self) -> str:
        return f"Operate({self.at}, {self.case} on {self.comm}, {self.dtype}{', in two halves' * self.halves})"

    def run(self, x: Registers) -> Registers:
        x, comm = list(x), harness.communicator(self.comm)
        given = operand(x[self.at], self.case, self.dtype, comm.rank, comm.size, jnp)
        y = self.case.call(in_two_halves(self.comm) if self.halves else comm, given)
        x[self.at] = taken_back_jitted(x[self.at], y)
        return x

    def reference(self, xs: Everyones) -> None:
        ys = came(self.case, self.comm, self.dtype, [x[self.at] for x in xs])
        for x, y in zip(xs, ys, strict=True):
            x[self.at] = taken_back(x[self.at], y, np)


@dataclass(frozen=True)
class Tree(Step):
    """A reduction of all registers at once, by an operation of MPI's or any JAX function."""

    comm: str
    function: bool

    def run(self, x: Registers) -> Registers:
        comm = harness.communicator(self.comm)
        leaves = {"a": x[0], "b": [x[1].astype(np.float32), x[2].astype(np.int16)]}
        op = (lambda a, b: jax.tree.map(jnp.maximum, a, b)) if self.function else MPI.MAX
        y = comm.Allreduce(leaves, op=op)
        return [v.astype(np.int32) for v in (y["a"], *y["b"])]

    def reference(self, xs: Everyones) -> None:
        for group in members(self.comm):
            most = [functools.reduce(np.maximum, (xs[rank][i] for rank in group)) for i in range(REGISTERS)]
            for rank in group:
                xs[rank][:] = [m.copy() for m in most]


@dataclass(frozen=True)
class Meanwhile(Step):
    """A message round a ring, or a reduction, that is under way while other steps run."""

    at: int
    comm: str
    shift: int
    tag: int
    reduces: bool
    steps: tuple[Step, ...]

    def run(self, x: Registers) -> Registers:
        comm, at = harness.communicator(self.comm), self.at
        given = x[at]
        if self.reduces:
            requests = [comm.Iallreduce(given)]
        else:
            receiving = comm.Irecv(given, (comm.rank - self.shift) % comm.size, self.tag)
            requests = [comm.Isend(given, (comm.rank + self.shift) % comm.size, self.tag), receiving]
        x = list(run_all(self.steps, x))
        x[at] = taken_back_jitted(x[at], jaxcomm.Request.Waitall(requests)[-1])
        return x

    def reference(self, xs: Everyones) -> None:
        ys: list[Any] = [None] * len(xs)
        for group in members(self.comm):
            given = [xs[rank][self.at] for rank in group]
            for r, rank in enumerate(group):
                ys[rank] = sum(given) if self.reduces else given[(r - self.shift) % len(group)]
        refer_all(self.steps, xs)
        for x, y in zip(xs, ys, strict=True):
            x[self.at] = taken_back(x[self.at], y, np)


@dataclass(frozen=True)
class Loop(Step):
    kind: str
    times: int
    steps: tuple[Step, ...]

    def run(self, x: Registers) -> Registers:
        once, start = functools.partial(run_all, self.steps), list(x)
        if self.kind == "scan":
            return lax.scan(lambda c, _: (once(c), None), start, None, length=self.times)[0]
        if self.kind == "fori":
            return lax.fori_loop(0, self.times, lambda _, c: once(c), start)
        going = lambda c: c[0] < self.times  # noqa: E731
        return lax.while_loop(going, lambda c: (c[0] + 1, once(c[1])), (0, start))[1]

    def reference(self, xs: Everyones) -> None:
        for _ in range(self.times):
            refer_all(self.steps, xs)


@dataclass(frozen=True)
class Branch(Step):
    """One side on the even ranks and another on the odd ones, whose steps stay among them; or a side for all."""

    by_parity: bool
    taken: int
    sides: tuple[tuple[Step, ...], tuple[Step, ...]]

    def side(self, rank: int) -> int:
        return rank % 2 if self.by_parity else self.taken

    def run(self, x: Registers) -> Registers:
        which = jnp.int32(self.side(harness.WORLD.rank)) + 0 * x[0][0]
        return lax.cond(which == 0, *(functools.partial(run_all, side) for side in self.sides), list(x))

    def reference(self, xs: Everyones) -> None:
        # The groups do not meet inside, so each side may run for all.
        runs = [[[r.copy() for r in x] for x in xs] for _ in self.sides]
        for side, mine in zip(self.sides, runs, strict=True):
            refer_all(side, mine)
        for rank, x in enumerate(xs):
            x[:] = runs[self.side(rank)][rank]


@dataclass(frozen=True)
class Nested(Step):
    """The steps in a function of their own, compiled or with its values computed again for derivatives."""

    remat: bool
    steps: tuple[Step, ...]

    def run(self, x: Registers) -> Registers:
        wrap = jax.checkpoint if self.remat else jax.jit
        return wrap(functools.partial(run_all, self.steps))(list(x))

    def reference(self, xs: Everyones) -> None:
        refer_all(self.steps, xs)


@dataclass(frozen=True)
class Host(Step):
    """mpi4py's own calls between those on JAX arrays."""

    at: int
    comm: str

    def run(self, x: Registers) -> Registers:
        x, comm = list(x), harness.communicator(self.comm)
        total = np.empty(LENGTH, np.int32)
        comm.Allreduce(np.array(x[self.at]), total)
        x[self.at] = jnp.asarray((total + comm.allreduce(1)) % PRIME)
        return x

    def reference(self, xs: Everyones) -> None:
        for group in members(self.comm):
            total = (sum(xs[rank][self.at] for rank in group) + len(group)) % PRIME
            for rank in group:
                xs[rank][self.at] = total.copy()


def run_all(steps: Sequence[Step], x: Registers) -> Registers:
    for step in steps:
        x = step.run(x)
    return list(x)


def refer_all(steps: Sequence[Step], xs: Everyones) -> None:
    for step in steps:
        step.reference(xs)


class Draw:
    """Draws programs from a seed."""

    def __init__(self, seed: int):
        self.rng, self.seed, self.tags = np.random.default_rng(seed), seed, 100
        self.way = self.choose(tuple(WAYS))

    def choose(self, values: Sequence[Any]) -> Any:
        return values[self.rng.integers(len(values))]

    def steps(self, depth: int, comms: Sequence[str], most: int) -> tuple[Step, ...]:
        return tuple(self.step(depth, comms) for _ in range(self.rng.integers(1, most + 1)))

    def step(self, depth: int, comms: Sequence[str]) -> Step:
        inside = depth > 0
        kinds = ["operate"] * 6 + ["local"] * 2 + ["tree"] * inside
        kinds += ["meanwhile", "loop", "branch", "nested"] * (depth < 2)
        kinds += ["tree", "host"] * (self.way == "eager" and not inside)
        return getattr(self, self.choose(kinds))(depth, comms)

    def local(self, depth: int, comms: Sequence[str]) -> Step:
        return Local(*(int(self.rng.integers(REGISTERS)) for _ in range(2)), int(self.rng.integers(1, PRIME)))

    def operate(self, depth: int, comms: Sequence[str]) -> Step:
        dtype = self.choose(DTYPES)
        case = self.choose([case for case in HERE if case.defined_for(dtype)])
        return Operate(
            int(self.rng.integers(REGISTERS)), case, self.choose(comms), dtype, bool(self.rng.integers(3) == 0)
        )

    def tree(self, depth: int, comms: Sequence[str]) -> Step:
        return Tree(self.choose(comms), bool(self.rng.integers(2)))

    def meanwhile(self, depth: int, comms: Sequence[str]) -> Step:
        self.tags += 1
        return Meanwhile(
            int(self.rng.integers(REGISTERS)), self.choose(comms), int(self.rng.integers(-1, 3)), self.tags,
            bool(self.rng.integers(2)), self.steps(depth + 1, comms, 3),
        )  # fmt: skip

    def loop(self, depth: int, comms: Sequence[str]) -> Step:
        return Loop(self.choose(["scan", "fori", "while"]), int(self.rng.integers(4)), self.steps(depth + 1, comms, 3))

    def branch(self, depth: int, comms: Sequence[str]) -> Step:
        inside = [name for name in comms if name in ("parity", "self")]
        by_parity = bool(self.rng.integers(2))
        sides = tuple(self.steps(depth + 1, inside if by_parity else comms, 2) for _ in range(2))
        return Branch(by_parity, int(self.rng.integers(2)), sides)  # type: ignore[arg-type]

    def nested(self, depth: int, comms: Sequence[str]) -> Step:
        return Nested(bool(self.rng.integers(2)), self.steps(depth + 1, comms, 3))

    def host(self, depth: int, comms: Sequence[str]) -> Step:
        return Host(int(self.rng.integers(REGISTERS)), self.choose(comms))


@dataclass(frozen=True)
class Program:
    seed: int
    way: str
    steps: tuple[Step, ...]

    @classmethod
    def drawn(cls, seed: int) -> Program:
        draw = Draw(seed)
        return cls(seed, draw.way, draw.steps(0, COMMS, 6))

    def start(self) -> Everyones:
        size = harness.WORLD.size
        return list(np.random.default_rng([self.seed, 1]).integers(0, PRIME, (size, REGISTERS, LENGTH), np.int32))

    def differs(self) -> str:
        """Run it, twice where it is compiled, and say how the registers differ from NumPy's; "" if they do not."""
        xs = [list(x) for x in self.start()]
        mine = [jnp.asarray(x) for x in xs[harness.WORLD.rank]]
        function = WAYS[self.way](functools.partial(run_all, self.steps))
        found = [function(mine) for _ in range(1 if self.way == "eager" else 2)]
        refer_all(self.steps, xs)
        for y in found:
            if not np.array_equal(np.array(y), np.array(xs[harness.WORLD.rank])):
                return f"{self}:\n{np.array(y)}\nis not\n{np.array(xs[harness.WORLD.rank])}"
        return ""

    def __str__(self) -> str:
        lines = "\n".join(f"  {step}" for step in self.steps)
        return f"program {self.seed}, {self.way}:\n{lines}"

    def operations(self) -> int:
        """How many operations it has, loops not unrolled."""

        def count(value: Any) -> int:
            if isinstance(value, tuple):
                return sum(map(count, value))
            if not isinstance(value, Step):
                return 0
            return (type(value) is not Local) + sum(map(count, vars(value).values()))

        return count(self.steps)


def check(seeds: Sequence[int], seconds: float = float("inf")) -> dict[str, Any]:
    """Run the programs of these seeds, or those that there is time for; fail on all ranks if one does. Collective."""
    return drawn.check(
        seeds,
        seconds,
        draw=Program.drawn,
        differs=Program.differs,
        counted=lambda program: {"operations": program.operations()},
        ways=WAYS,
        keep=200,
    )


def run(programs: int, seconds: float) -> dict[str, Any]:
    return check(range(programs), seconds)


if __name__ == "__main__":
    measured.main(run)
