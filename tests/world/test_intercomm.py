"""Intercommunicators: messages and collectives between two groups of ranks, in jit, with derivatives and vmap."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

from jaxcomm import JaxComm, JaxIntercomm, Request

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
pytestmark = pytest.mark.skipif(SIZE < 2, reason="two groups")
both = pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
calculus = pytest.mark.calculus

# The first rank alone, and all others: groups of different sizes from three ranks on.
SIDE = int(RANK > 0)
THERE = range(1) if SIDE or SIZE == 1 else range(1, SIZE)


@functools.cache
def between():
    inter = WORLD.Split(SIDE, RANK).Create_intercomm(0, WORLD, 1 - SIDE, 5)
    assert type(inter) is JaxIntercomm
    return inter


def root():
    """The first rank's: the root's group knows it otherwise than the other."""
    return 0 if SIDE else MPI.ROOT


def root_among_others():
    """In the larger group, its last rank."""
    if SIDE == 0:
        return SIZE - 2
    return MPI.ROOT if RANK == SIZE - 1 else MPI.PROC_NULL


def operand(rank):
    return np.random.default_rng(rank).normal(size=3)


X = np.stack([operand(r) for r in THERE])
MINE = operand(RANK)


def led(x):
    """A block for each rank of the other group."""
    return jnp.stack([x * (i + 1) for i in range(between().remote_size)])


def everywhere(name, **kwargs):
    return lambda x: getattr(between(), name)(x, **kwargs)


def scatter(x):
    if root() == MPI.ROOT:
        between().Scatter(led(x), root=root())
        return 1 * x
    return between().Scatter(x, root=root())


def gathered(at):
    return lambda x: between().Gather(x, jnp.broadcast_to(x, (between().remote_size, 3)), at())


def exchange(x):
    """Each rank of the larger group with the first."""
    return sum(between().Sendrecv(x, r, 3, source=r, recvtag=3) for r in range(between().remote_size))


COUNTS = [r % 2 + 1 for r in THERE]


def gatherv(x):
    part = x[: RANK % 2 + 1]
    template = jnp.resize(x, sum(COUNTS))  # made of x: the link that differentiation sees
    return between().Gatherv(part, template, root(), counts=COUNTS if root() == MPI.ROOT else None)


def scatterv(x):
    if root() == MPI.ROOT:
        between().Scatterv(jnp.concatenate([x[:n] for n in COUNTS]), counts=COUNTS, root=root())
        return 1 * x
    return between().Scatterv(x[: RANK % 2 + 1], root=root())


def parts(counts):
    return np.concatenate([x[:n] for x, n in zip(X, counts, strict=True)])


def at(root_, there, here=MINE):
    return there if root_() == MPI.ROOT else here


def from_root(root_, there):
    return there if root_() >= 0 else MINE


IS_FIRST = SIDE == 0
# name: (call, result). What a rank gets that gets nothing is its operand.
CASES = {
    "Allgather": (everywhere("Allgather"), X),
    "Allgatherv": (lambda x: between().Allgatherv(x[: RANK % 2 + 1], counts=COUNTS), parts(COUNTS)),
    "Allreduce": (everywhere("Allreduce"), X.sum(0)),
    "Allreduce-PROD": (everywhere("Allreduce", op=MPI.PROD), X.prod(0)),
    "Alltoall": (lambda x: between().Alltoall(led(x)), X * (RANK if SIDE else 1)),
    "Alltoallv": (
        lambda x: between().Alltoallv(
            jnp.tile(x[: RANK % 2 + 1], between().remote_size),
            sendcounts=RANK % 2 + 1,
            recvcounts=COUNTS,
        ),
        parts(COUNTS),
    ),
    "Bcast": (lambda x: between().Bcast(x, root()), from_root(root, operand(0))),
    "Bcast-others": (
        lambda x: between().Bcast(x, root_among_others()),
        from_root(root_among_others, operand(SIZE - 1)),
    ),
    "Gather": (gathered(root), at(root, X)),
    "Gather-others": (gathered(root_among_others), at(root_among_others, X)),
    "Gatherv": (gatherv, parts(COUNTS) if IS_FIRST else MINE[: RANK % 2 + 1]),
    "Reduce": (lambda x: between().Reduce(x, x, root=root()), at(root, X.sum(0))),
    "Scatter": (scatter, MINE if IS_FIRST else RANK * operand(0)),
    "Scatterv": (scatterv, MINE if IS_FIRST else operand(0)[: RANK % 2 + 1]),
    "Sendrecv": (exchange, X.sum(0)),
}
every_case = pytest.mark.parametrize("name", CASES)


@every_case
@both
def test_values(name, jit):
    call, expected = CASES[name]
    np.testing.assert_allclose(jit(call)(jnp.asarray(MINE)), expected, rtol=1e-14)


def check_dot_product(call):
    """sum_r <A v, w> = sum_r <v, A' w>; and the tangent is that of the values."""
    x, v = jnp.asarray(MINE), jnp.cos(jnp.asarray(MINE))
    y, dy = jax.jvp(call, (x,), (v,))
    h = 1e-6
    np.testing.assert_allclose(dy, (call(x + h * v) - call(x - h * v)) / (2 * h), atol=1e-8)
    w = jnp.sin(jnp.arange(y.size).reshape(y.shape) + RANK)
    (g,) = jax.vjp(call, x)[1](w)
    forward, backward = harness.CONTROL.allreduce(np.array([np.vdot(dy, w), np.vdot(v, g)]))
    np.testing.assert_allclose(backward, forward, rtol=1e-12)


@calculus
@every_case
def test_derivatives(name):
    check_dot_product(jax.jit(CASES[name][0]))


@calculus
@every_case
def test_nonblocking(name, monkeypatch):
    call, expected = CASES[name]
    split = harness.InTwoHalves(between())
    monkeypatch.setitem(globals(), "between", lambda: split)
    np.testing.assert_allclose(call(jnp.asarray(MINE)), expected, rtol=1e-14)
    if "PROD" not in name:
        check_dot_product(jax.jit(call))


@calculus
@every_case
def test_vmap(name):
    call = CASES[name][0]
    batch = jnp.stack([MINE, 2 * MINE, MINE - 1])
    mapped, single = jax.jit(lambda b: (jax.vmap(call)(b), [call(x) for x in b]))(batch)
    np.testing.assert_allclose(mapped, np.stack(single), rtol=1e-14)
    g = jax.grad(lambda b: jnp.sum(jnp.sin(jax.vmap(call)(b))))(batch)
    each = jnp.stack([jax.grad(lambda x: jnp.sum(jnp.sin(call(x))))(x) for x in batch])
    np.testing.assert_allclose(g, each, rtol=1e-12)


@both
def test_messages(jit):
    """Ranks are those of the other group; a request and a probe know that too."""

    def f(x):
        if SIDE:
            between().Send(x, 0, RANK)
            return between().Recv(x, 0)
        received = []
        for _ in range(between().remote_size):
            status = between().Probe(return_status=True)
            received.append(between().Recv(x, status.source, status.tag))
        Request.Waitall([between().Isend(sum(received), r, 0) for r in range(between().remote_size)])
        return sum(received)

    total = sum(operand(r) for r in range(1, SIZE))
    np.testing.assert_allclose(jit(f)(jnp.asarray(MINE)), total, rtol=1e-13)


def test_merge():
    merged = between().Merge(bool(SIDE))
    assert type(merged) is JaxComm
    assert merged.rank == RANK
    np.testing.assert_allclose(merged.Allreduce(jnp.asarray(MINE)), sum(operand(r) for r in range(SIZE)), rtol=1e-14)


def test_exchange_counts():
    """One for each rank of the other group, where the groups differ in size."""
    inter = between()
    assert inter.exchange_counts([10 * RANK + r for r in THERE]) == tuple(10 * r + RANK for r in THERE)
    assert inter.exchange_counts(RANK) == tuple(THERE)
    with pytest.raises(ValueError, match=f"sendcounts must have {len(THERE)} elements"):
        inter.exchange_counts([1] * (len(THERE) + 1))


def test_numpy_buffers_are_mpi4pys():
    received = np.empty((between().remote_size, 3))
    assert between().Allgather(MINE, received) is None
    np.testing.assert_array_equal(received, X)


def test_errors():
    x = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"Bcast: root must be MPI\.ROOT on the root.*got"):
        between().Bcast(x, between().remote_size)
    with pytest.raises(ValueError, match="dest"):
        between().Send(x, between().remote_size)
    for method in ("Reduce_scatter_block", "Scan", "Exscan", "Pvary"):
        with pytest.raises(TypeError, match="not for arrays on an intercommunicator"):
            getattr(between(), method)(x)
    harness.CONTROL.Barrier()
