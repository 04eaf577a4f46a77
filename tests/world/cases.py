"""The one table of cases: calls of each operation, what they are applied to, and what NumPy says that they give.

A case is a map x -> y between per-rank arrays. A property (values, derivatives, batching ...) is one test over CASES.
A new operation is a new row here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
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
FLOAT8 = [
    f"float8_{name}" for name in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
]
SUB_BYTE = ["int2", "int4", "uint2", "uint4", "float4_e2m1fn"]
DTYPES = [
    "bool",
    *INTEGERS,
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float16",
    "bfloat16",
    *FLOAT8,
    *SUB_BYTE,
]
ROOTS = {"first": lambda size: 0, "middle": lambda size: size // 2, "last": lambda size: size - 1}


def kind(dtype: Any) -> str:
    """NumPy's letter for the kind of a dtype, also of those that NumPy does not know."""
    letters = re.match("[a-z]+", np.dtype(dtype).name)[0]
    return {"bool": "b", "int": "i", "uint": "u", "complex": "c"}.get(letters, "f")


def fold(op: str, xs: Arrays) -> np.ndarray:
    return functools.reduce(OPS[op][0], xs).astype(xs[0].dtype)


def identity(op: str, like: np.ndarray) -> np.ndarray:
    """The reduction of nothing: what leaves every operand as it is."""
    dtype = like.dtype
    least, most = (False, True) if kind(dtype) == "b" else (-np.inf, np.inf)
    if kind(dtype) in "iu":
        least, most = ml_dtypes.iinfo(dtype).min, ml_dtypes.iinfo(dtype).max
    if kind(dtype) == "f" and not np.isinf(np.array(np.inf).astype(dtype)):
        least, most = ml_dtypes.finfo(dtype).min, ml_dtypes.finfo(dtype).max
    value = {"PROD": 1, "LAND": 1, "MAX": least, "MIN": most, "BAND": -1}.get(op, 0)
    return np.full(like.shape, np.array(value).astype(dtype))


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

    @property
    def in_place(self) -> bool:
        """Whether the call is mpi4py's own if x is a NumPy array, because that is every buffer that mpi4py needs."""
        buffer_is_all = self.method in ("Send", "Ssend", "Sendrecv_replace", "Bcast")
        return buffer_is_all or self.name in ("Sendrecv-line", "Sendrecv-short")

    def defined_for(self, dtype: Any) -> bool:
        return self.op is None or kind(dtype) in OPS[self.op][1]

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
        close = (y == expected) | ((y != y) & (expected != expected))
        if kind(expected.dtype) in "fc" and self.op in ("SUM", "PROD"):
            # Each of size - 1 additions (multiplications) errs by at most eps (complex: sqrt(5) eps) of the sum
            # (product) of the absolute values, and so does the reference's.
            size = len(xs)
            scale = np.abs(self.reference([np.abs(x) for x in xs], rank)).astype(float)
            info = ml_dtypes.finfo(expected.dtype)
            wide = np.complex128 if kind(expected.dtype) == "c" else np.float64
            with np.errstate(invalid="ignore"):
                most = 2 * (size - 1) * (5**0.5 * float(info.eps) * scale + float(info.smallest_subnormal))
                close |= np.abs(y.astype(wide) - expected.astype(wide)) <= most
        assert np.all(close), f"{self.name} on rank {rank} of {len(xs)}:\n{y}\nis not\n{expected}"


def random(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any], op: str | None = None) -> np.ndarray:
    """Random data; whole numbers so small that no product or sum of four of them overflows."""
    if kind(dtype) == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.itemsize <= 2 and kind(dtype) in "iu":
        info = ml_dtypes.iinfo(dtype)  # these wrap around
        return rng.integers(info.min, info.max, shape, np.int32, endpoint=True).astype(dtype)
    if dtype.itemsize <= 2:
        quarters = rng.integers(*(1, 5) if dtype == "float8_e8m0fnu" else (-5, 5), shape, endpoint=True) / 4
        return np.asarray(quarters).astype(dtype)
    if kind(dtype) in "iu":
        info = np.iinfo(dtype)
        most = {"PROD": 3, "SUM": info.max // 8}.get(op or "", info.max)
        return rng.integers(max(-most, info.min), most, shape, dtype, endpoint=True)
    real = rng.normal(size=shape)
    return np.asarray(real + 1j * rng.normal(size=shape) if kind(dtype) == "c" else real).astype(dtype)


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
    # With a status, as checking mode wants who receives less than the template to ask for it.
    return comm.Sendrecv(x[:1], (comm.rank + 1) % comm.size, 0, x, (comm.rank - 1) % comm.size, status=MPI.Status())


def _replace(comm: Any, x: Any) -> Any:
    return comm.Sendrecv_replace(x, (comm.rank - 1) % comm.size, 2, (comm.rank + 1) % comm.size, 2)


def _barrier(comm: Any, x: Any) -> Any:
    assert comm.Barrier() in (None, True)  # True says the Wait of mpi4py's requests, Ibarrier's outside a trace
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


# Ragged: ranks have 1, 2 or no rows, and send 0, 1 or 2 to each.


def _rows(rank: int, size: int, base: Shape) -> Shape:
    return ((rank + 1) % 3, *base)


def _all_rows(rank: int, size: int, base: Shape) -> Shape:
    return (sum(counts(size)), *base)


def counts(size: int) -> list[int]:
    return [_rows(rank, size, ())[0] for rank in range(size)]


def sendcounts(rank: int, size: int) -> list[int]:
    return [(rank + 2 * to) % 3 for to in range(size)]


def recvcounts(rank: int, size: int) -> list[int]:
    return [sendcounts(source, size)[rank] for source in range(size)]


def _parts(x: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(x, np.cumsum(lengths)[:-1])


def _alltoallv(comm: Any, x: Any) -> Any:
    here, there = sendcounts(comm.rank, comm.size), recvcounts(comm.rank, comm.size)
    return comm.Alltoallv(x, sendcounts=here, recvcounts=there)


def _from_parts(xs: Arrays, rank: int) -> np.ndarray:
    return np.concatenate([_parts(x, sendcounts(source, len(xs)))[rank] for source, x in enumerate(xs)])


RAGGED_METHODS = (
    "Gatherv",
    "Scatterv",
    "Allgatherv",
    "Alltoallv",
    "Reduce_scatter",
    "Neighbor_allgatherv",
    "Neighbor_alltoallv",
)
RAGGED = [
    Case(
        "Allgatherv",
        "Allgatherv",
        lambda comm, x: comm.Allgatherv(x, counts=counts(comm.size)),
        lambda xs, rank: np.concatenate(xs),
        _rows,
    ),
    Case(
        "Alltoallv",
        "Alltoallv",
        _alltoallv,
        _from_parts,
        lambda rank, size, base: (sum(sendcounts(rank, size)), *base),
    ),
]


# Neighbours. Topologies are made once for each communicator, by all its ranks at the same place.


def edges(kind: str, size: int) -> list[tuple[list[int], list[int]]]:
    """The incoming and outgoing edges of each rank, as a topology has them."""
    if kind == "star":
        near = [list(range(1, size)) or [0], *[[0]] * (size - 1)]
        return [(near[rank], near[rank]) for rank in range(size)]
    if kind == "digraph":  # some edges twice, some one way only, some from a rank to itself; rank 1 of 4 has but one
        pairs = [(0, size - 1), (0, size - 1), (size - 1, 0), (0, 0), (size // 2, 0), (0, size - 1)]
        return [([s for s, d in pairs if d == rank], [d for s, d in pairs if s == rank]) for rank in range(size)]
    dims, periods = carts(size)[kind]
    grid = np.arange(size).reshape(dims)
    both = []
    for axis, period in enumerate(periods):
        for step in (-1, 1):
            there = np.roll(grid, -step, axis)
            if not period:
                np.moveaxis(there, axis, 0)[0 if step < 0 else -1] = MPI.PROC_NULL
            both.append(there)
    near = [[int(there.flat[rank]) for there in both] for rank in range(size)]
    return [(near[rank], near[rank]) for rank in range(size)]


def carts(size: int) -> dict[str, tuple[list[int], list[bool]]]:
    dims = MPI.Compute_dims(size, 2)
    return {
        "ring": ([size], [True]),
        "line": ([size], [False]),
        "torus": (dims, [True, True]),
        "channel": (dims[::-1], [False, True]),
    }


TOPOLOGIES = ("ring", "line", "torus", "channel", "star", "digraph")


@functools.cache
def topology(comm: Any, kind: str) -> Any:
    near = edges(kind, comm.size)
    if kind == "star":
        return comm.Create_graph(np.cumsum([len(outs) for _, outs in near]), [r for _, outs in near for r in outs])
    if kind == "digraph":
        return comm.Create_dist_graph_adjacent(*near[comm.rank])
    return comm.Create_cart(*carts(comm.size)[kind])


def arrivals(kind: str, size: int, rank: int) -> list[tuple[int, int] | None]:
    """For each incoming edge: which rank's block for which of its outgoing edges comes; None from PROC_NULL."""
    near = edges(kind, size)
    found: list[tuple[int, int] | None] = []
    for at, source in enumerate(near[rank][0]):
        if source == MPI.PROC_NULL:
            found.append(None)
        elif kind in carts(size):  # MPI 4.1, 8.6: what was sent one way comes from the other
            found.append((source, at ^ 1))
        else:
            found.append(
                (source, [i for i, d in enumerate(near[source][1]) if d == rank][near[rank][0][:at].count(source)])
            )
    return found


def edge_rows(source: int, at: int) -> int:
    return (source + at) % 3


def near_counts(kind: str, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Rows for each outgoing edge and from each incoming one; from PROC_NULL there are two, which are zero."""
    there = [edge_rows(rank, at) for at in range(len(edges(kind, size)[rank][1]))]
    return there, [2 if edge is None else edge_rows(*edge) for edge in arrivals(kind, size, rank)]


def _stacked(blocks: list[np.ndarray], like: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros((0, *like.shape), like.dtype), *[block[None] for block in blocks]])


def _neighbors(kind: str) -> list[Case]:
    def out(rank: int, size: int) -> int:
        return len(edges(kind, size)[rank][1])

    def from_each(xs: Arrays, rank: int) -> np.ndarray:
        found = arrivals(kind, len(xs), rank)
        return _stacked([np.zeros_like(xs[0]) if edge is None else xs[edge[0]] for edge in found], xs[0])

    def blocks(xs: Arrays, rank: int) -> np.ndarray:
        like = np.zeros(xs[rank].shape[1:], xs[rank].dtype)
        found = arrivals(kind, len(xs), rank)
        return _stacked([like if edge is None else xs[edge[0]][edge[1]] for edge in found], like)

    def lengths_of_all(comm: Any) -> list[int]:
        return [1 if edge is None else _rows(edge[0], 0, ())[0] for edge in arrivals(kind, comm.size, comm.rank)]

    def parts_from_each(xs: Arrays, rank: int) -> np.ndarray:
        none = np.zeros((1, *xs[0].shape[1:]), xs[0].dtype)
        found = [none if edge is None else xs[edge[0]] for edge in arrivals(kind, len(xs), rank)]
        return np.concatenate([none[:0], *found])

    def alltoallv(comm: Any, x: Any) -> Any:
        there, here = near_counts(kind, comm.rank, comm.size)
        return topology(comm, kind).Neighbor_alltoallv(x, sendcounts=there, recvcounts=here)

    def parts(xs: Arrays, rank: int) -> np.ndarray:
        none = np.zeros((2, *xs[0].shape[1:]), xs[0].dtype)
        found = []
        for edge in arrivals(kind, len(xs), rank):
            source = none if edge is None else _parts(xs[edge[0]], near_counts(kind, edge[0], len(xs))[0])[edge[1]]
            found.append(source)
        return np.concatenate([none[:0], *found])

    return [
        Case(
            f"Neighbor_allgather-{kind}",
            "Neighbor_allgather",
            lambda comm, x: topology(comm, kind).Neighbor_allgather(x),
            from_each,
        ),
        Case(
            f"Neighbor_allgatherv-{kind}",
            "Neighbor_allgatherv",
            lambda comm, x: topology(comm, kind).Neighbor_allgatherv(x, recvcounts=lengths_of_all(comm)),
            parts_from_each,
            _rows,
        ),
        Case(
            f"Neighbor_alltoall-{kind}",
            "Neighbor_alltoall",
            lambda comm, x: topology(comm, kind).Neighbor_alltoall(x),
            blocks,
            lambda rank, size, base: (out(rank, size), *base),
        ),
        Case(
            f"Neighbor_alltoallv-{kind}",
            "Neighbor_alltoallv",
            alltoallv,
            parts,
            lambda rank, size, base: (sum(near_counts(kind, rank, size)[0]), *base),
        ),
    ]


NEIGHBORS = [case for kind in TOPOLOGIES for case in _neighbors(kind)]
# One of each kind, for properties that are costly to test.
NEIGHBOR_CASES = [
    case
    for case in NEIGHBORS
    if case.name in ("Neighbor_allgather-channel", "Neighbor_allgatherv-digraph")
    or case.name in ("Neighbor_alltoall-torus", "Neighbor_alltoallv-digraph", "Neighbor_alltoallv-channel")
]


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
            f"Gatherv-{name}",
            "Gatherv",
            lambda comm, x: comm.Gatherv(x, counts=counts(comm.size), **on(comm)),
            lambda xs, rank: np.concatenate(xs) if is_root(rank, xs) else xs[rank],
            _rows,
            root=root,
        ),
        Case(
            f"Scatterv-{name}",
            "Scatterv",
            lambda comm, x: comm.Scatterv(x, counts=counts(comm.size), **on(comm)),
            lambda xs, rank: _parts(xs[root(len(xs))], counts(len(xs)))[rank],
            lambda rank, size, base: (_all_rows if rank == root(size) else _rows)(rank, size, base),
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
            f"Reduce_scatter-{op}",
            "Reduce_scatter",
            lambda comm, x: comm.Reduce_scatter(x, recvcounts=counts(comm.size), op=native),
            lambda xs, rank: _parts(fold(op, xs), counts(len(xs)))[rank],
            _all_rows,
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
    *RAGGED,
    *NEIGHBOR_CASES,
    *(case for name, root in ROOTS.items() for case in _rooted(name, root)),
    *(case for op in OPS for case in _reductions(op)),
]
METHODS = list(dict.fromkeys(case.method for case in CASES))


def slow(x: Any) -> Any:
    """x, after a while: so costly that XLA runs the program in a thread of its own while the caller goes on."""
    a = jnp.sin(jnp.arange(300.0 * 300).reshape(300, 300) + jnp.ravel(x)[0])
    return x + 0 * (a @ a @ a)[0, 0]
