"""Dtypes that MPI has no datatype for, PRNG keys and float0: everywhere where arrays go, and reductions of small floats."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, FLOAT8, OPS, SUB_BYTE, kind, left, right
from harness import InTwoHalves
from mpi4py import MPI
from test_requests import Persistent

from jaxcomm import Request

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
both = pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
two_ranks = pytest.mark.skipif(SIZE < 2, reason="two ranks exchange messages")
SMALL_FLOATS = ["float16", "bfloat16", *FLOAT8, "float4_e2m1fn"]
MOVING = [
    case
    for case in CASES
    if case.op is None and (case.root is None or "middle" in case.name)
    if case.name not in ("Ssend", "Sendrecv_replace", "Barrier")
]
REDUCING = [
    case for case in CASES if case.op in ("SUM", "MAX") and case.method in ("Allreduce", "Scan", "Reduce_scatter")
]


def run_all(comm, which, operands):
    return [case.call(comm, x) for case, x in zip(which, operands, strict=True)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "float4_e2m1fn"])
@pytest.mark.parametrize("halves", [InTwoHalves, Persistent])
def test_nonblocking(halves, dtype):
    which = [case for case in MOVING + REDUCING if case.name not in ("Sendrecv-ragged", "Sendrecv-short")]
    xs = [case.operands(WORLD, dtype=dtype, seed=1) for case in which]
    mine = [jnp.asarray(x[RANK]) for x in xs]
    for case, y, x in zip(which, run_all(halves(WORLD), which, mine), xs, strict=True):
        case.check(y, x, RANK)


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_nonblocking_in_jit(dtype):
    which = [case for case in MOVING + REDUCING if case.method in ("Sendrecv", "Alltoallv", "Allreduce", "Bcast")]
    xs = [case.operands(WORLD, dtype=dtype, seed=2) for case in which]
    ys = jax.jit(lambda operands: run_all(InTwoHalves(WORLD), which, operands))([jnp.asarray(x[RANK]) for x in xs])
    for case, y, x in zip(which, ys, xs, strict=True):
        case.check(y, x, RANK)


@two_ranks
@pytest.mark.parametrize("dtype", ["bfloat16", *SUB_BYTE])
def test_one_end_compiled(dtype):
    """What XLA packs travels as what NumPy has."""
    case = next(case for case in CASES if case.name == "Sendrecv")
    xs = case.operands(WORLD, (5,), dtype=dtype, seed=3)
    call = lambda x: case.call(WORLD, x)  # noqa: E731
    case.check((jax.jit(call) if RANK % 2 else call)(jnp.asarray(xs[RANK])), xs, RANK)


@two_ranks
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int4", "float4_e2m1fn", "key"])
def test_matched_probes(dtype):
    x = jax.random.split(jax.random.key(RANK), 2) if dtype == "key" else jnp.asarray([1, 0, -RANK]).astype(dtype)
    expected = jax.random.split(jax.random.key(left(WORLD)), 2) if dtype == "key" else x.at[2].set(-left(WORLD))
    request = WORLD.Isend(x, right(WORLD), 5)
    y = WORLD.Mprobe(left(WORLD), 5).Recv(jax.ShapeDtypeStruct(x.shape, x.dtype))
    request.Wait()
    assert y.dtype == x.dtype
    assert jnp.all(y == expected)


# Keys


def keys_of(case, comm, seed):
    """The words of each rank's keys."""
    rngs = [np.random.default_rng([seed, member]) for member in range(comm.size)]
    shapes = [(*case.shape(rank, comm.size, (3,)), 2) for rank in range(comm.size)]
    return [rng.integers(0, 2**32, shape, np.uint32) for rng, shape in zip(rngs, shapes, strict=True)]


def check_keys(case, y, xs, rank):
    assert y.dtype == jax.random.key(0).dtype
    words = np.asarray(jax.random.key_data(y))
    np.testing.assert_array_equal(words, case.reference(xs, rank), err_msg=case.name)


@both
@pytest.mark.parametrize("halves", [lambda comm: comm, InTwoHalves], ids=["blocking", "in two halves"])
def test_keys(jit, halves):
    xs = [keys_of(case, WORLD, 1) for case in MOVING]
    mine = [jax.random.wrap_key_data(jnp.asarray(x[RANK])) for x in xs]
    ys = jit(lambda operands: run_all(halves(WORLD), MOVING, operands))(mine)
    for case, y, x in zip(MOVING, ys, xs, strict=True):
        check_keys(case, y, x, RANK)


@both
def test_keys_of_other_lengths(jit):
    """Four words each."""
    x = jax.random.split(jax.random.key(RANK, impl="rbg"), 2)
    y = jit(WORLD.Allgather)(x)
    assert (y.shape, y.dtype) == ((SIZE, 2), x.dtype)
    expected = [jax.random.key_data(jax.random.split(jax.random.key(r, impl="rbg"), 2)) for r in range(SIZE)]
    np.testing.assert_array_equal(jax.random.key_data(y), np.stack(expected))


def test_keys_have_leading_axes_of_their_own():
    """A single key has no axis, though there are two words, and ranks."""
    with pytest.raises(ValueError, match="the leading axis must be the communicator's size"):
        WORLD.Alltoall(jax.random.key(0))
    with pytest.raises(TypeError, match="op=SUM is not defined for dtype key<fry>; defined are none"):
        WORLD.Allreduce(jax.random.key(0))
    y, status = WORLD.Sendrecv_replace(jax.random.split(jax.random.key(0), 3), RANK, 0, RANK, 0, return_status=True)
    assert (y.shape, int(status.count)) == ((3,), 3)


@two_ranks
@both
def test_keys_that_come_in_part(jit):
    x = jax.random.split(jax.random.key(RANK), 3)
    shift = lambda x: WORLD.Sendrecv(x[:2], right(WORLD), 0, x, left(WORLD), return_status=True)  # noqa: E731
    y, status = jit(shift)(x)
    assert int(status.count) == 2
    expected = jnp.concatenate([jax.random.split(jax.random.key(left(WORLD)), 3)[:2], x[2:]])
    assert jnp.all(y == expected)


@pytest.mark.calculus
def test_keys_under_vmap():
    x = jax.random.split(jax.random.key(RANK), (SIZE, 2))
    for method in (WORLD.Allgather, WORLD.Alltoall):
        batch = jax.jit(jax.vmap(method, in_axes=1))(x)
        assert jnp.all(batch == jnp.stack([method(x[:, i]) for i in range(2)]))
    mixed = jax.jit(jax.vmap(lambda x: WORLD.Alltoallw([x] * SIZE, [x] * SIZE)[-1]))(x)
    assert jnp.all(mixed == WORLD.Bcast(x, SIZE - 1))


@pytest.mark.calculus
@both
def test_keys_beside_what_is_differentiated(jit):
    def loss(x, key):
        key = WORLD.Bcast(key, SIZE - 1)
        return jnp.sum(WORLD.Allreduce(x * jax.random.normal(key, (3,))))

    g = jit(jax.grad(loss))(jnp.ones(3), jax.random.key(RANK))
    np.testing.assert_allclose(g, SIZE * jax.random.normal(jax.random.key(SIZE - 1), (3,)), rtol=1e-12)


# float0


@both
@pytest.mark.parametrize("halves", [lambda comm: comm, InTwoHalves], ids=["blocking", "in two halves"])
def test_float0_passes_through(jit, halves):
    """On one rank alone: nothing is communicated."""
    if RANK:
        return
    x = np.zeros((SIZE, 2), jax.dtypes.float0)
    comm = halves(WORLD)
    shapes = {
        "Bcast": ((SIZE, 2), lambda x: comm.Bcast(x)),
        "Allreduce": ((SIZE, 2), lambda x: comm.Allreduce(x, op=MPI.MAX)),
        "Exscan": ((SIZE, 2), lambda x: comm.Exscan(x)),
        "Reduce": ((SIZE, 2), lambda x: comm.Reduce(x, root=SIZE - 1)),
        "Allgather": ((SIZE, SIZE, 2), lambda x: comm.Allgather(x)),
        "Gather": ((SIZE, SIZE, 2), lambda x: comm.Gather(x)),
        "Scatter": ((2,), lambda x: comm.Scatter(x)),
        "Alltoall": ((SIZE, 2), lambda x: comm.Alltoall(x)),
        "Reduce_scatter_block": ((2,), lambda x: comm.Reduce_scatter_block(x)),
        "Allgatherv": ((SIZE**2, 2), lambda x: comm.Allgatherv(x, counts=SIZE)),
        "Sendrecv": ((SIZE, 2), lambda x: comm.Sendrecv(x, 0)),
    }
    for name, (shape, call) in shapes.items():
        y = jit(lambda _, call=call: call(x))(0.0)
        assert (y.shape, y.dtype) == (shape, jax.dtypes.float0), name
    assert comm.Send(x, 0) is None
    y, status = WORLD.Recv(x, 0, return_status=True)
    assert (y.dtype, int(status.source), int(status.count)) == (jax.dtypes.float0, MPI.PROC_NULL, 0)
    assert Request.Waitall([WORLD.Isend(x, 0), WORLD.Irecv(x, 0)])[1].dtype == jax.dtypes.float0
    assert WORLD.Iallreduce(x).Test()[0] is True


def test_float0_among_others():
    x = [np.zeros(3, jax.dtypes.float0) if (RANK + i) % 2 else jnp.full(2, RANK, jnp.int4) for i in range(SIZE)]
    for i, y in enumerate(WORLD.Alltoallw(x, x)):
        assert y.dtype == x[i].dtype
        assert y.dtype == jax.dtypes.float0 or np.array_equal(y, np.full(2, i, "int4"))


def test_tangents_of_integers_pass_through():
    """What JAX gives and takes for them: float0."""
    f = lambda i, x: (i, x * i)  # noqa: E731
    _, tangents = jax.jvp(f, (2, 3.0), (np.zeros((), jax.dtypes.float0), 1.0))
    found = [WORLD.Allreduce(t) for t in tangents]
    assert (found[0].dtype, float(found[1])) == (jax.dtypes.float0, 2.0 * SIZE)


# Reductions


def every_pair(dtype):
    """Two arrays: all pairs of values of 8 bits; of 16 bits each value, with some other."""
    bits = {"float4_e2m1fn": 4}.get(dtype, 8 * np.dtype(dtype).itemsize)
    words = np.arange(2**bits).astype(f"u{np.dtype(dtype).itemsize}")
    if bits == 16:
        return words.view(dtype), np.random.default_rng(0).permutation(words).view(dtype)
    return np.repeat(words, len(words)).view(dtype), np.tile(words, len(words)).view(dtype)


def in_float32(op, a, b):
    """Combined in float32 and rounded once by ml_dtypes; the extremes of 0 and -0, which NumPy leaves open, by the sign."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    with np.errstate(all="ignore"):
        y = OPS[op][0](a, b)
    if op in ("MAX", "MIN"):
        zeros = (a == 0) & (b == 0)
        y[zeros] = np.copysign(0, OPS[op][0](np.copysign(1, a), np.copysign(1, b))[zeros])
    return y


def same_values(y, expected):
    y, expected = (np.asarray(v).astype(np.float64) for v in (y, expected))
    np.testing.assert_array_equal(y, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(y[numbers]), np.signbit(expected[numbers]))


@two_ranks
@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN"])
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_small_floats_are_rounded_once(dtype, op):
    """On two ranks, that is one combination: all values against ml_dtypes, bit for bit but for the payload of NaN."""
    pair = WORLD.Split(0 if RANK < 2 else MPI.UNDEFINED, RANK)
    if RANK > 1:
        return
    a, b = every_pair(dtype)
    with np.errstate(all="ignore"):
        expected = in_float32(op, a, b).astype(dtype)
    with pair:
        same_values(pair.Allreduce(jnp.asarray((a, b)[RANK]), op=getattr(MPI, op)), expected)


@pytest.mark.parametrize("op", ["MAX", "MIN"])
@pytest.mark.parametrize("dtype", ["float32", "float64", *SMALL_FLOATS])
def test_extremes_propagate_nan(dtype, op):
    """NaN on any rank, at every place of a vector; and -0 is less than 0. The same on every MPI."""
    has_nan = bool(np.isnan(np.array(np.nan).astype(dtype)))
    infinite = np.inf if np.isinf(np.array(np.inf).astype(dtype)) else 1.0
    values = [np.nan if has_nan else 1.0, 0.0, -0.0, infinite, -infinite, 1.0, -1.0]
    if dtype == "float8_e8m0fnu":
        values = [np.nan, 1.0, 2.0, 0.5]
    for length in (1, 7, 129):
        xs = [np.random.default_rng([length, r]).choice(values, length).astype(dtype) for r in range(SIZE)]
        expected = functools.reduce(functools.partial(in_float32, op), [x.astype(np.float64) for x in xs])
        mine = jnp.asarray(xs[RANK])
        reduce_all = functools.partial(WORLD.Allreduce, op=getattr(MPI, op))
        scanned = WORLD.Scan(mine, op=getattr(MPI, op))
        for y in (reduce_all(mine), jax.jit(reduce_all)(mine), *[scanned] * (RANK == SIZE - 1)):
            same_values(y, expected.astype(dtype))


def test_extremes_are_what_jax_says():
    x = np.array([np.nan, 1, -np.inf, 2.5], np.float32)
    other = np.roll(x, RANK)
    everywhere = np.stack(harness.WORLD.allgather(other))
    np.testing.assert_array_equal(WORLD.Allreduce(other, op=MPI.MAX), functools.reduce(jnp.maximum, everywhere))
    np.testing.assert_array_equal(WORLD.Allreduce(other, op=MPI.MIN), functools.reduce(jnp.minimum, everywhere))


@both
@pytest.mark.parametrize("dtype", [name for name in SUB_BYTE if kind(name) != "f"])
def test_integers_of_less_than_a_byte_wrap_around(jit, dtype):
    """As in JAX, whatever they travel as."""
    words = np.arange(2 ** int(dtype.strip("uint"))).astype("u1").view(dtype)
    xs = [np.random.default_rng(r).choice(words, 64) for r in range(SIZE)]
    for op, combine in (
        (MPI.SUM, jnp.add),
        (MPI.PROD, jnp.multiply),
        (MPI.MAX, jnp.maximum),
        (MPI.MIN, jnp.minimum),
        (MPI.BXOR, jnp.bitwise_xor),
        (MPI.BAND, jnp.bitwise_and),
    ):
        y = jit(lambda x, op=op: WORLD.Allreduce(x, op=op))(jnp.asarray(xs[RANK]))
        expected = functools.reduce(combine, map(jnp.asarray, xs))
        assert y.dtype == expected.dtype == dtype
        np.testing.assert_array_equal(np.asarray(y), np.asarray(expected))


# Derivatives


# One of each method.
LINEAR = list({case.method: case for case in MOVING + [case for case in CASES if case.op == "SUM"]}.values())


@pytest.mark.calculus
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_adjoints(dtype):
    """sum_r <A v, w> = sum_r <v, A' w>, exactly: of whole numbers that are so small that nothing is rounded."""
    for case in LINEAR:
        x = jnp.zeros(case.shape(RANK, SIZE, (2,)), dtype)
        rng = np.random.default_rng([RANK, 7])
        f = lambda x, case=case: case.call(WORLD, x)  # noqa: E731
        v = jnp.asarray(rng.integers(-1, 2, x.shape)).astype(dtype)
        _, dy = jax.jvp(f, (x,), (v,))
        y, back = jax.vjp(f, x)
        w = jnp.asarray(rng.integers(-1, 2, y.shape)).astype(dtype)
        (g,) = back(w)
        assert (y.dtype, dy.dtype, g.dtype) == (dtype, dtype, dtype)
        inner = lambda a, b: np.sum(np.asarray(a).astype(float) * np.asarray(b).astype(float))  # noqa: E731
        one, other = harness.WORLD.allreduce(np.array([inner(dy, w), inner(v, g)]))
        harness.agree(one == other, f"{case.name}: {one} is not {other}")


@pytest.mark.calculus
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("op", ["MAX", "MIN", "PROD"])
def test_derivatives_of_reductions(dtype, op):
    x = jnp.asarray([1, 2 + RANK, -1.5], dtype)
    g = jax.grad(lambda x: WORLD.Allreduce(x, op=getattr(MPI, op)).astype(float)[1])(x)
    everyone = [2.0 + r for r in range(SIZE)]
    chosen = {"MAX": SIZE - 1, "MIN": 0}.get(op)
    others = np.prod(everyone) / everyone[RANK]
    expected = others if op == "PROD" else chosen == RANK
    # The cotangents of all ranks are added up.
    np.testing.assert_array_equal(np.asarray(g).astype(float), [0, SIZE * expected, 0])


# Weak types, and 64 bits


@both
@pytest.mark.parametrize("x64", [True, False], ids=["x64", "x32"])
def test_scalars_are_strong(jit, x64):
    """A result has the dtype that JAX gives the operand, and that is not weak: so ranks agree on what they have."""
    with jax.enable_x64(x64):
        for value in (True, 3, 2.5, 1j):
            y = jit(lambda x: WORLD.Allreduce(x) + jnp.bfloat16(1))(value)
            x = jax.lax.convert_element_type(jnp.asarray(value), jnp.asarray(value).dtype)
            assert y.dtype == (x + jnp.bfloat16(1)).dtype
            assert not WORLD.Bcast(value).weak_type
