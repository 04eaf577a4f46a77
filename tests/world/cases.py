"""The one table of cases: calls of each operation, what they are applied to, and what NumPy says that they give.

A case is a map x -> y between per-rank arrays. A property (values, derivatives, batching ...) is one test over CASES.
A new operation is a new row here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

Shape = tuple[int, ...]
Arrays = Sequence[np.ndarray]

# The operations of MPI 4.1, 6.9.2, as NumPy computes them, and the kinds of dtype (NumPy's letters) that have them.
OPS = {
    "SUM": (np.add, "biufc"),
    "PROD": (np.multiply, "biufc"),
    "MAX": (np.maximum, "biuf"),
    "MIN": (np.minimum, "biuf"),
    "LAND": (np.logical_and, "biu"),
    "LOR": (np.logical_or, "biu"),
    "LXOR": (np.logical_xor, "biu"),
    "BAND": (np.bitwise_and, "biu"),
    "BOR": (np.bitwise_or, "biu"),
    "BXOR": (np.bitwise_xor, "biu"),
}
INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
DTYPES = ["bool", *INTEGERS, "float32", "float64", "complex64", "complex128"]
ROOTS = {"first": lambda size: 0, "middle": lambda size: size // 2, "last": lambda size: size - 1}


def fold(op: str, xs: Arrays) -> np.ndarray:
    return functools.reduce(OPS[op][0], xs).astype(xs[0].dtype)


def identity(op: str, like: np.ndarray) -> np.ndarray:
    """The reduction of nothing: what leaves every operand as it is."""
    dtype = like.dtype
    least, most = (False, True) if dtype.kind == "b" else (-np.inf, np.inf)
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    every_bit = np.invert(np.zeros((), dtype)) if dtype.kind in "biu" else None
    value = {"PROD": 1, "LAND": 1, "MAX": least, "MIN": most, "BAND": every_bit}.get(op, 0)
    return np.full(like.shape, value, dtype)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
      name: the test's id.
      method: of JaxComm, the one that the case is about.
      call: (comm, x) -> y, the same on every rank; eager or in a transformation.
      reference: (the operands of all ranks, rank) -> y on that rank, without MPI.
      shape: (rank, size, base shape) -> the operand's shape on that rank.
      op: the reduction, if there is one.
      root: size -> rank, if there is one.
    """

    name: str
    method: str
    call: Callable[[Any, Any], Any]
    reference: Callable[[Arrays, int], np.ndarray]
    shape: Callable[[int, int, Shape], Shape] = lambda rank, size, base: base
    op: str | None = None
    root: Callable[[int], int] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def linear(self) -> bool:
        """Whether y is linear in the operands of all ranks."""
        return self.op in (None, "SUM")

    @property
    def differentiable(self) -> bool:
        return self.op in (None, "SUM", "PROD", "MAX", "MIN")

    def defined_for(self, dtype: Any) -> bool:
        return self.op is None or np.dtype(dtype).kind in OPS[self.op][1]

    def operands(self, comm: MPI.Comm, base: Shape = (3,), dtype: Any = np.float64, seed: int = 0) -> list[np.ndarray]:
        """What each rank of comm brings. Every rank computes them all; no two ranks of the world bring the same."""
        members = MPI.Group.Translate_ranks(comm.group, None, harness.WORLD.group)
        return [
            random(np.random.default_rng([seed, member]), self.shape(rank, comm.size, base), np.dtype(dtype), self.op)
            for rank, member in enumerate(members)
        ]

    def check(self, y: Any, xs: Arrays, rank: int) -> None:
        """Compare a result with the reference: kind, dtype, shape, and value to the rounding that the order allows."""
        expected = self.reference(xs, rank)
        assert isinstance(y, jax.Array), f"{self.name}: {type(y)}"
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape), self.name
        y = np.asarray(y)
        # Equal first: infinities have no difference.
        close = y == expected
        if expected.dtype.kind in "fc" and self.op in ("SUM", "PROD"):
            # Each of size - 1 additions (multiplications) errs by at most eps (complex: sqrt(5) eps) of the sum
            # (product) of the absolute values, and so does the reference's.
            size = len(xs)
            scale = self.reference([np.abs(x) for x in xs], rank)
            with np.errstate(invalid="ignore"):
                close |= np.abs(y - expected) <= 2 * (size - 1) * 5**0.5 * np.finfo(expected.dtype).eps * scale
        assert np.all(close), f"{self.name} on rank {rank} of {len(xs)}:\n{y}\nis not\n{expected}"


def random(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any], op: str | None = None) -> np.ndarray:
    """Random data; whole numbers so small that no product or sum of four of them overflows."""
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        most = {"PROD": 3, "SUM": info.max // 8}.get(op or "", info.max)
        return rng.integers(max(-most, info.min), most, shape, dtype, endpoint=True)
    real = rng.normal(size=shape)
    return np.asarray(real + 1j * rng.normal(size=shape) if dtype.kind == "c" else real).astype(dtype)


# Point-to-point: to the right-hand neighbour on a ring. A rank that is alone has none: a message to itself would wait.


def right(comm: Any) -> int:
    return (comm.rank + 1) % comm.size if comm.size > 1 else MPI.PROC_NULL


def left(comm: Any) -> int:
    return (comm.rank - 1) % comm.size if comm.size > 1 else MPI.PROC_NULL


def in_turn(comm: Any, send: Callable[[], Any], receive: Callable[[], Any]) -> Any:
    """Odd ranks receive first: whatever the length of the messages, somebody is always listening."""
    if comm.rank % 2:
        y = receive()
        send()
        return y
    send()
    return receive()


def _pass_on(comm: Any, x: Any) -> Any:
    return in_turn(comm, lambda: comm.Send(x, right(comm)), lambda: comm.Recv(x, left(comm)))


def _pass_on_synchronously(comm: Any, x: Any) -> Any:
    return in_turn(comm, lambda: comm.Ssend(x, right(comm), 7), lambda: comm.Recv(x, left(comm), 7))


def _from_left(xs: Arrays, rank: int) -> np.ndarray:
    return xs[rank - 1]


def _shift(comm: Any, x: Any) -> Any:
    return comm.Sendrecv(x, right(comm), source=left(comm))


def _shift_from_any(comm: Any, x: Any) -> Any:
    # By its tag: a rank that is ahead may already send for another case.
    return comm.Sendrecv(x, (comm.rank + 1) % comm.size, 3, recvtag=3)


def _along_line(comm: Any, x: Any) -> Any:
    below = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    above = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    return comm.Sendrecv(x, above, 11, x, below, 11)


def _ragged(comm: Any, x: Any) -> Any:
    template = jax.ShapeDtypeStruct(((comm.rank - 1) % comm.size + 1, *x.shape[1:]), jnp.result_type(x))
    return comm.Sendrecv(x, (comm.rank + 1) % comm.size, 0, template, (comm.rank - 1) % comm.size, MPI.ANY_TAG)


def _short(comm: Any, x: Any) -> Any:
    return comm.Sendrecv(x[:1], (comm.rank + 1) % comm.size, 0, x, (comm.rank - 1) % comm.size)


def _replace(comm: Any, x: Any) -> Any:
    return comm.Sendrecv_replace(x, (comm.rank - 1) % comm.size, 2, (comm.rank + 1) % comm.size, 2)


def _barrier(comm: Any, x: Any) -> Any:
    assert comm.Barrier() is None
    return jnp.array(x)


MESSAGES = [
    Case("Send", "Send", _pass_on, _from_left),
    Case("Ssend", "Ssend", _pass_on_synchronously, _from_left),
    Case("Sendrecv", "Sendrecv", _shift, _from_left),
    Case("Sendrecv-any", "Sendrecv", _shift_from_any, _from_left),
    Case("Sendrecv-line", "Sendrecv", _along_line, lambda xs, rank: xs[max(rank - 1, 0)]),
    Case("Sendrecv-ragged", "Sendrecv", _ragged, _from_left, lambda rank, size, base: (rank + 1, *base)),
    Case(
        "Sendrecv-short",
        "Sendrecv",
        _short,
        lambda xs, rank: np.concatenate([xs[rank - 1][:1], xs[rank][1:]]),
        lambda rank, size, base: (2, *base),
    ),
    Case("Sendrecv_replace", "Sendrecv_replace", _replace, lambda xs, rank: xs[(rank + 1) % len(xs)]),
]

# Collectives


def _led(rank: int, size: int, base: Shape) -> Shape:
    return (size, *base)


def _plain_collectives() -> list[Case]:
    return [
        Case("Barrier", "Barrier", _barrier, lambda xs, rank: xs[rank]),
        Case("Allgather", "Allgather", lambda comm, x: comm.Allgather(x), lambda xs, rank: np.stack(xs)),
        Case(
            "Alltoall",
            "Alltoall",
            lambda comm, x: comm.Alltoall(x),
            lambda xs, rank: np.stack([x[rank] for x in xs]),
            _led,
        ),
    ]


def _rooted(name: str, root: Callable[[int], int]) -> list[Case]:
    def on(comm: Any) -> dict[str, int]:
        return {"root": root(comm.size)} if root(comm.size) else {}  # the default is 0

    def is_root(rank: int, xs: Arrays) -> bool:
        return rank == root(len(xs))

    return [
        Case(
            f"Bcast-{name}",
            "Bcast",
            lambda comm, x: comm.Bcast(x, **on(comm)),
            lambda xs, rank: xs[root(len(xs))],
            root=root,
        ),
        Case(
            f"Gather-{name}",
            "Gather",
            lambda comm, x: comm.Gather(x, **on(comm)),
            lambda xs, rank: np.stack(xs) if is_root(rank, xs) else xs[rank],
            root=root,
        ),
        Case(
            f"Scatter-{name}",
            "Scatter",
            lambda comm, x: comm.Scatter(x, **on(comm)),
            lambda xs, rank: xs[root(len(xs))][rank],
            lambda rank, size, base: (size, *base) if rank == root(size) else base,
            root=root,
        ),
        Case(
            f"Reduce-{name}",
            "Reduce",
            lambda comm, x: comm.Reduce(x, **on(comm)),
            lambda xs, rank: fold("SUM", xs) if is_root(rank, xs) else xs[rank],
            op="SUM",
            root=root,
        ),
    ]


def _reductions(op: str) -> list[Case]:
    def last(comm: Any) -> int:
        return int(comm.size - 1)

    native = getattr(MPI, op)
    return [
        Case(
            f"Allreduce-{op}",
            "Allreduce",
            lambda comm, x: comm.Allreduce(x, op=native),
            lambda xs, rank: fold(op, xs),
            op=op,
        ),
        Case(
            f"Reduce-{op}",
            "Reduce",
            lambda comm, x: comm.Reduce(x, op=native, root=last(comm)),
            lambda xs, rank: fold(op, xs) if rank == len(xs) - 1 else xs[rank],
            op=op,
            root=lambda size: size - 1,
        ),
        Case(
            f"Reduce_scatter_block-{op}",
            "Reduce_scatter_block",
            lambda comm, x: comm.Reduce_scatter_block(x, op=native),
            lambda xs, rank: fold(op, xs)[rank],
            _led,
            op=op,
        ),
        Case(
            f"Scan-{op}",
            "Scan",
            lambda comm, x: comm.Scan(x, op=native),
            lambda xs, rank: fold(op, xs[: rank + 1]),
            op=op,
        ),
        Case(
            f"Exscan-{op}",
            "Exscan",
            lambda comm, x: comm.Exscan(x, op=native),
            lambda xs, rank: fold(op, xs[:rank]) if rank else identity(op, xs[0]),
            op=op,
        ),
    ]


CASES = [
    *MESSAGES,
    *_plain_collectives(),
    *(case for name, root in ROOTS.items() for case in _rooted(name, root)),
    *(case for op in OPS for case in _reductions(op)),
]
METHODS = list(dict.fromkeys(case.method for case in CASES))


def slow(x: Any) -> Any:
    """x, after a while: so costly that XLA runs the program in a thread of its own while the caller goes on."""
    a = jnp.sin(jnp.arange(300.0 * 300).reshape(300, 300) + jnp.ravel(x)[0])
    return x + 0 * (a @ a @ a)[0, 0]
