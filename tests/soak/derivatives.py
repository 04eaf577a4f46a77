"""Random programs of messages, differentiated in every mode, against the same function of all ranks' inputs on one process.

A program is a course of events in time: messages start, are waited for, are done at once; collectives. On each rank it is
what happens there, in that order. Time goes on in a way in which every wait has what it waits for behind it, if a send is
taken to wait for its receive (MPI 4.1, 3.5): so a program is right, whatever MPI does. Of messages that only their order
tells apart (equal ranks and tags) starts and waits are in the same order on both sides: docs/nonblocking.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import drawn
import harness
import jax
import jax.numpy as jnp
import measured
import numpy as np
from calculus import along, modes
from jax import lax
from mpi4py import MPI

import jaxcomm
from jaxcomm import Request

N, LONG = 3, 12_000  # numbers of a rank; how often a long message has them: more than MPI libraries send unasked
# Most of the time is XLA's, which need not make these programs fast.
HASTE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda f: f,
    "jax.jit": functools.partial(jax.jit, compiler_options=HASTE),
    "jaxcomm.jit": functools.partial(jaxcomm.jit, compiler_options=HASTE),
}
SENDS = ("Isend", "Issend", "forgotten Isend", "Send", "Ssend", "Bsend")


@dataclass(frozen=True)
class Message:
    """From one rank to another (or itself). `anyone`: it is received from ANY_SOURCE, with ANY_TAG."""

    number: int
    source: int
    dest: int
    tag: int
    send: str
    nonblocking: bool
    anyone: bool
    long: bool
    times: tuple[float, float, float, float]  # the send starts, it is waited for; the receive starts, it is waited for

    def fits(self, other: Message) -> bool:
        """Whether the two may be under way at once: where they could be mixed up, one is before the other in everything."""
        if (self.source, self.dest) != (other.source, other.dest) or not (self.anyone or self.tag == other.tag):
            return True
        before = [a < b for a, b in zip(self.times, other.times, strict=True)]
        start, end, *received = before
        return len({start, *received, *([end] if self.tag == other.tag else [])}) == 1


@dataclass(frozen=True)
class Sum:
    """An Allreduce, or an Iallreduce and its Wait, of all ranks."""

    number: int
    times: tuple[float, float]


Event = tuple[float, int, str, Any]


@dataclass(frozen=True)
class Program:
    seed: int
    way: str
    repeats: int
    checkpoint: bool
    parts: tuple[Message | Sum, ...]

    @classmethod
    def drawn(cls, seed: int, size: int) -> Program:
        rng = np.random.default_rng([seed, size])
        way = list(WAYS)[rng.choice(3, p=[0.1, 0.45, 0.45])]
        anyone = rng.random(size) < 0.3
        from_one = rng.integers(size, size=size)  # who sends to a rank that asks nobody's name
        parts: list[Message | Sum] = []
        for number in range(int(rng.integers(2, 7))):
            if rng.random() < 0.2:
                parts.append(Sum(number, _in_order(rng, rng.random() < 0.5)))
                continue
            for _ in range(200):
                message = _drawn_message(rng, number, size, anyone, from_one)
                if all(message.fits(other) for other in parts if isinstance(other, Message)):
                    parts.append(message)
                    break
        return cls(seed, way, int(rng.choice([1, 1, 2])), bool(rng.random() < 0.3), tuple(parts))

    def events(self) -> list[Event]:
        """In the order of time."""
        found: list[Event] = []
        for part in self.parts:
            if isinstance(part, Sum):
                names = ("start sum", "end sum") if part.times[0] < part.times[1] else ("sum",)
                found += [(at, part.number, what, part) for at, what in zip(part.times, names, strict=False)]
                continue
            sends = ("start send", "end send") if part.send.startswith(("Is", "forgotten")) else ("send",)
            sends = sends[:1] if part.send.startswith("forgotten") else sends
            receives = ("start receive", "end receive") if part.nonblocking else ("receive",)
            found += [(at, part.number, what, part) for at, what in zip(part.times[:2], sends, strict=False)]
            found += [(at, part.number, what, part) for at, what in zip(part.times[2:], receives, strict=False)]
        order = {"send": 0, "receive": 1}
        return sorted(found, key=lambda event: (event[0], order.get(event[2], 0)))

    def __str__(self) -> str:
        lines = "\n".join(f"  {part}" for part in self.parts)
        return f"program {self.seed}, {self.way}, {self.repeats} times, checkpoint {self.checkpoint}:\n{lines}"


def _sum(part: Any) -> bool:
    return isinstance(part, Sum)


def _in_order(rng: Any, two: bool) -> tuple[float, float]:
    a, b = sorted(rng.random(2))
    return (float(a), float(b)) if two else (float(a), float(a))


def _drawn_message(rng: Any, number: int, size: int, anyone: Any, from_one: Any) -> Message:
    dest = int(rng.integers(size))
    source = int(from_one[dest] if anyone[dest] else rng.integers(size))
    send, nonblocking = SENDS[rng.integers(len(SENDS))], bool(rng.random() < 0.7) or source == dest
    now = send in ("Send", "Ssend")
    if now and not nonblocking:
        start_send = start_receive = rng.random()
    elif now:
        start_receive, start_send = sorted(rng.random(2))
    elif not nonblocking:
        start_send, start_receive = sorted(rng.random(2))
    else:
        start_send, start_receive = rng.random(2)
    latest = max(start_send, start_receive)
    end_send, end_receive = latest + (1 - latest) * rng.random(2)
    if send not in ("Isend", "Issend"):
        end_send = start_send
    if not nonblocking:
        end_receive = start_receive
    times = tuple(map(float, (start_send, end_send, start_receive, end_receive)))
    tag, long = int(rng.integers(2)), bool(rng.random() < 0.5)
    return Message(number, source, dest, tag, send, nonblocking, bool(anyone[dest]), long, times)  # type: ignore[arg-type]


# What the parts do to the numbers of a rank


def sent(x: Any, part: Message | Sum) -> Any:
    return (0.5 + 0.1 * part.number) * x - 0.2 * x * x


def moved(x: Any, y: Any, part: Message | Sum) -> Any:
    return 0.7 * x + (0.3 + 0.1 * part.number) * x * y


def on_one_process(program: Program, xs: Any) -> Any:
    """What all ranks' numbers become: without communication."""
    x = list(xs)
    for _ in range(program.repeats):
        under_way: dict[int, Any] = {}
        for _, number, what, part in program.events():
            if what in ("start sum", "sum"):
                under_way[number] = sum(sent(each, part) for each in x)
            if what in ("end sum", "sum"):
                x = [moved(each, under_way[number], part) for each in x]
            if what in ("start send", "send"):
                under_way[number] = sent(x[part.source], part)
            if what in ("end receive", "receive"):
                x[part.dest] = moved(x[part.dest], under_way[number], part)
    return jnp.stack(x)


def on_this_rank(program: Program, comm: Any, x: Any) -> Any:
    def once(x: Any) -> Any:
        requests: dict[tuple[str, int], Any] = {}
        for _, number, what, part in program.events():
            if _sum(part):
                if what == "start sum":
                    requests["sum", number] = comm.Iallreduce(sent(x, part))
                else:
                    y = comm.Allreduce(sent(x, part)) if what == "sum" else requests["sum", number].Wait()
                    x = moved(x, y, part)
                continue
            if comm.rank == part.source:
                x = _send_side(requests, comm, x, what, part)
            if comm.rank == part.dest:
                x = _receive_side(requests, comm, x, what, part)
        return x

    once = jax.checkpoint(once) if program.checkpoint else once  # type: ignore[assignment]
    if program.repeats == 1:
        return once(x)
    return lax.scan(lambda x, _: (once(x), None), x, None, length=program.repeats)[0]


def _send_side(requests: dict[tuple[str, int], Any], comm: Any, x: Any, what: str, part: Message) -> Any:
    if what in ("start send", "send"):
        payload = jnp.tile(sent(x, part), LONG if part.long else 1)
        request = getattr(comm, part.send.removeprefix("forgotten "))(payload, part.dest, part.tag)
        requests["send", part.number] = request
        if part.send.startswith("forgotten"):
            request.Free()
    if what == "end send":
        Request.Waitall([requests["send", part.number]])
    return x


def _receive_side(requests: dict[tuple[str, int], Any], comm: Any, x: Any, what: str, part: Message) -> Any:
    if "receive" not in what:
        return x
    template = jnp.tile(x, LONG if part.long else 1)
    source, tag = (MPI.ANY_SOURCE, MPI.ANY_TAG) if part.anyone else (part.source, part.tag)
    if what == "start receive":
        requests["receive", part.number] = comm.Irecv(template, source, tag)
        return x
    y = comm.Recv(template, source, tag) if what == "receive" else requests["receive", part.number].Wait()
    return moved(x, y.reshape(-1, N).mean(axis=0), part)


MODES = list(modes(jnp.sum, None, None))


def expected(program: Program, xs: Any, vs: Any, ws: Any, weights: Any) -> dict[str, np.ndarray]:
    """The derivatives by mode, each with a row for each rank."""
    results = lambda xs: jnp.sum(on_one_process(program, xs) * weights, axis=1)  # noqa: E731
    total = lambda xs: jnp.sum(results(xs))  # noqa: E731

    def all_of(xs: Any, vs: Any, ws: Any) -> tuple[Any, ...]:
        gradient = jax.grad(total)
        return (
            results(xs),
            along(results, vs)(xs),
            gradient(xs),
            along(along(results, vs), ws)(xs),
            along(gradient, vs)(xs),
            along(along(gradient, vs), ws)(xs),
        )

    found = [np.asarray(y) for y in all_of(xs, vs, ws)]  # to compile it takes much longer
    return dict(zip(MODES, [*found[:4], *[found[4]] * 3, *[found[5]] * 3], strict=True))


def differs(program: Program, comm: Any, chosen: Iterable[str] | None = None) -> str:
    """How the derivatives on this rank differ from those on one process; "" if they do not. Collective."""
    xs, vs, ws, weights = np.random.default_rng([program.seed, 1]).normal(size=(4, comm.size, N))
    right = harness.CONTROL.bcast(
        expected(program, *map(jnp.asarray, (xs, vs, ws)), weights) if comm.rank == 0 else None
    )
    rank, wrap = comm.rank, WAYS[program.way]
    f = lambda x: jnp.vdot(on_this_rank(program, comm, x), weights[rank])  # noqa: E731
    for name, mode in modes(f, vs[rank], ws[rank]).items():
        if chosen is not None and name not in chosen:
            continue
        y, good = np.asarray(wrap(mode)(jnp.asarray(xs[rank]))), right[name][rank]
        # Sums over long messages round like LONG numbers; each repeat and order multiplies by factors of order one to ten.
        if not np.allclose(y, good, rtol=1e-8, atol=1e-8 * np.abs(right[name]).max()):
            return f"{program}\n{name}: {y} is not {good}"
    return ""


def check(seeds: Sequence[int], seconds: float = float("inf"), most: int = len(MODES)) -> dict[str, Any]:
    """Differentiate the programs of these seeds, or those that there is time for; fail on all ranks if one does.

    Each in all modes, or in as many as are wanted at most, which are drawn. Collective.
    """
    comm = harness.communicator("world")

    def counted(program: Program) -> dict[str, int]:
        messages = [part for part in program.parts if isinstance(part, Message)]
        return {"messages": len(messages), "long": sum(part.long for part in messages)}

    def some(seed: int) -> Any:
        return np.random.default_rng([seed, 2]).choice(MODES, most, replace=False)

    done = drawn.check(
        seeds,
        seconds,
        draw=lambda seed: Program.drawn(seed, comm.size),
        differs=lambda program: differs(program, comm, some(program.seed)),
        counted=counted,
        ways=WAYS,
        keep=50,
    )
    return done | {"modes": most}


def run(derivatives: int, seconds: float) -> dict[str, Any]:
    return check(range(derivatives), seconds)


if __name__ == "__main__":
    measured.main(run)
