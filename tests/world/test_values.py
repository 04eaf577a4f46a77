"""Values: each case, eager and jitted, against NumPy."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DTYPES, INTEGERS, METHODS, SUB_BYTE
from counting import Compilations
from jax.experimental.layout import Format, Layout
from mpi4py import MPI

WORLD = harness.communicator("world")


def run_all(comm, which, operands):
    """Every case's result; under jit one program, whose compilation costs little more than that of a single call."""
    return [case.call(comm, x) for case, x in zip(which, operands, strict=True)]


def check_all(comm, which, results, xs):
    for case, y, x in zip(which, results, xs, strict=True):
        case.check(y, x, comm.rank)


def default_dtype(case):
    return "float64" if case.defined_for("float64") else "int64"


def check_eager_and_jitted(comm, which):
    """Twice, with other data; the second time, nothing is compiled."""
    jitted = jax.jit(lambda operands: run_all(comm, which, operands))
    xs = [[case.operands(comm, dtype=default_dtype(case), seed=seed) for case in which] for seed in range(2)]
    mine = [[jnp.asarray(x[comm.rank]) for x in drawn] for drawn in xs]
    results = []
    for operands in mine:
        with Compilations() as by_jit:
            results.append(jitted(operands))
        with Compilations() as by_eager_calls:
            results.append(run_all(comm, which, operands))
    for result, drawn in zip(results, [xs[0], xs[0], xs[1], xs[1]], strict=True):
        check_all(comm, which, result, drawn)
    assert (by_jit.count, by_eager_calls.count) == (0, 0)
    for operands, drawn in zip(mine, xs, strict=True):
        assert all(np.array_equal(x, x_of_rank[comm.rank]) for x, x_of_rank in zip(operands, drawn, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_methods(method):
    check_eager_and_jitted(WORLD, [case for case in CASES if case.method == method])


def test_communicators(comm):
    check_eager_and_jitted(comm, CASES)


# One reduction and one root do where the dtype or the shape is the subject.
ONE_OF_EACH = [case for case in CASES if case.op in (None, "SUM") and (case.root is None or "last" in case.name)]
EVERY_REDUCTION = [case for case in CASES if case.op and case.method in ("Allreduce", "Exscan")]


# What is not mpi4py's own with NumPy operands (test_drop_in.py is about the rest).
ON_NUMPY = [case for case in ONE_OF_EACH if not case.in_place]


# The template of one, and the slice of the other, JAX compiles for each dtype.
FOR_EVERY_DTYPE = [
    case
    for case in dict.fromkeys(ONE_OF_EACH + EVERY_REDUCTION)
    if case.name not in ("Sendrecv-ragged", "Sendrecv-short")
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    which = [case for case in FOR_EVERY_DTYPE if case.defined_for(dtype)]
    xs = [case.operands(WORLD, dtype=dtype, seed=1) for case in which]
    mine = [jnp.asarray(x[WORLD.rank]) for x in xs]
    eager = run_all(WORLD, which, mine)
    some = (
        ("Allreduce", "Sendrecv", "Gather", "Alltoallv") if dtype in SUB_BYTE else ("Allreduce", "Sendrecv", "Gather")
    )
    jittable = [i for i, case in enumerate(which) if case.method in some]
    some, mine = ([list_[i] for i in jittable] for list_ in (which, mine))
    jitted = jax.jit(lambda operands: run_all(WORLD, some, operands))(mine)
    check_all(WORLD, which, eager, xs)
    check_all(WORLD, some, jitted, [xs[i] for i in jittable])


@pytest.mark.parametrize("shape", [(), (0,), (1, 2, 3), (2, 0)], ids=str)
def test_shapes(shape):
    xs = [case.operands(WORLD, shape, seed=2) for case in ONE_OF_EACH]
    mine = [jnp.asarray(x[WORLD.rank]) for x in xs]
    jitted = jax.jit(lambda operands: run_all(WORLD, ONE_OF_EACH, operands))(mine)
    eager = run_all(WORLD, ONE_OF_EACH, mine)
    check_all(WORLD, ONE_OF_EACH * 2, jitted + eager, xs * 2)


def with_gaps(x):
    return np.repeat(x, 2, axis=-1)[..., ::2]


def backwards_and_read_only(x):
    x = x[::-1].copy()[::-1]
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("layout", [np.asfortranarray, with_gaps, backwards_and_read_only])
def test_numpy_layouts(layout):
    xs = [case.operands(WORLD, (2, 3), seed=3) for case in ON_NUMPY]
    check_all(WORLD, ON_NUMPY, run_all(WORLD, ON_NUMPY, [layout(x[WORLD.rank]) for x in xs]), xs)


def test_jax_layouts():
    """Column-major arrays; and transposed ones in jit, where XLA would rather change the layout than move data."""
    column_major = Format(Layout((1, 0)), jnp.zeros(()).sharding)
    for case in [case for case in ONE_OF_EACH if case.method in ("Sendrecv_replace", "Gather", "Scan")]:
        xs = case.operands(WORLD, (2, 3), seed=4)
        x = jax.device_put(xs[WORLD.rank], column_major)
        turned = jax.jit(lambda x, call=case.call: call(WORLD, x.T))
        case.check(case.call(WORLD, x), xs, WORLD.rank)
        case.check(jax.jit(lambda x, call=case.call: call(WORLD, x))(x), xs, WORLD.rank)
        case.check(turned(np.asarray(x).T), xs, WORLD.rank)


@pytest.mark.parametrize("kind", [bool, int, float, complex, np.float32, list])
@pytest.mark.parametrize("x64", [True, False], ids=["x64", "x32"])
def test_scalars_become_arrays_of_the_canonical_dtype(kind, x64):
    values = [
        kind([r + 1.5, 2.0]) if kind is list else kind(r + 1 if kind is not bool else r) for r in range(WORLD.size)
    ]
    with jax.enable_x64(x64):
        xs = [np.asarray(value, jnp.asarray(value).dtype) for value in values]
        which = [case for case in ONE_OF_EACH if case.shape(1, 2, ()) == case.shape(0, 2, ()) == ()]
        assert len(which) > 9
        check_all(WORLD, which, run_all(WORLD, which, [values[WORLD.rank]] * len(which)), [xs] * len(which))
        assert WORLD.Allreduce(values[WORLD.rank], op=MPI.SUM).weak_type is False


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128", "uint64"])
def test_results_are_canonical_with_x64_off(dtype):
    """CASES 44: on every rank, whether it gets something or its own operand back."""
    wide = [case.operands(WORLD, dtype=dtype, seed=5) for case in ON_NUMPY]
    mine = [x[WORLD.rank] for x in wide]
    with jax.enable_x64(False):
        narrow = [[x.astype(jax.dtypes.canonicalize_dtype(dtype)) for x in xs] for xs in wide]
        results = run_all(WORLD, ON_NUMPY, mine)
        check_all(WORLD, ON_NUMPY, results, narrow)
        kept = [np.array(y) for y in results]
        for x in mine:
            x[...] = 0
        assert all(map(np.array_equal, results, kept))


def aligned(x):
    """A copy that starts where XLA would take it without another copy."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def test_results_do_not_share_memory_with_numpy_operands():
    xs = [case.operands(WORLD, seed=6) for case in ON_NUMPY]
    mine = [aligned(x[WORLD.rank]) for x in xs]
    results = run_all(WORLD, ON_NUMPY, mine)
    for x in mine:
        x[...] = np.nan
    check_all(WORLD, ON_NUMPY, results, xs)


def test_jit_leaves_its_operands_alone():
    """Results may take an operand's memory, but only where the operand is not needed any more."""
    xs = [case.operands(WORLD, seed=7) for case in ONE_OF_EACH]
    mine = [jnp.array(x[WORLD.rank]) for x in xs]
    results, inside = jax.jit(lambda operands: (run_all(WORLD, ONE_OF_EACH, operands), operands))(mine)
    check_all(WORLD, ONE_OF_EACH, results, xs)
    for x, a, b in zip(xs, mine, inside, strict=True):
        assert np.array_equal(a, x[WORLD.rank])
        assert np.array_equal(b, x[WORLD.rank])


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
def test_receive_buffers_are_templates(jit):
    rank, size = WORLD.rank, WORLD.size
    rng = np.random.default_rng(rank)
    x, led = jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=(size, 3)))
    like = lambda *shape: jax.ShapeDtypeStruct(shape, np.float64)  # noqa: E731
    with_buffers = lambda x, led: (  # noqa: E731
        WORLD.Allreduce(x, np.full(3, 9.0), MPI.MAX),
        WORLD.Reduce(x, like(3), MPI.MIN, 0),
        WORLD.Scan(x, like(3), MPI.PROD),
        WORLD.Exscan(x, like(3)),
        WORLD.Allgather(x, like(size, 3)),
        WORLD.Gather(x, like(size, 3) if rank == 0 else None),
        WORLD.Alltoall(led, like(size, 3)),
        WORLD.Reduce_scatter_block(led, like(3)),
        WORLD.Scatter(led if rank == 0 else None, like(3)),
        WORLD.Scatter(led if rank == 0 else like(3)),
        WORLD.Bcast(x if rank == 0 else like(3)),
        WORLD.Sendrecv(x, (rank + 1) % size, 0, like(3), (rank - 1) % size),
        WORLD.Recv(like(3), MPI.PROC_NULL),
    )
    without = lambda x, led: (  # noqa: E731
        WORLD.Allreduce(x, op=MPI.MAX),
        WORLD.Reduce(x, op=MPI.MIN),
        WORLD.Scan(x, MPI.PROD),  # an op in the buffer's place is the op
        WORLD.Exscan(x, MPI.SUM),
        WORLD.Allgather(x),
        WORLD.Gather(x),
        WORLD.Alltoall(led),
        WORLD.Reduce_scatter_block(led, MPI.SUM),
        WORLD.Scatter(led if rank == 0 else x),
        WORLD.Scatter(led if rank == 0 else np.zeros(3)),
        WORLD.Bcast(x),
        WORLD.Sendrecv(x, (rank + 1) % size, source=(rank - 1) % size),
        jnp.zeros(3),  # a template's values where nothing arrives
    )
    for with_buffer, result in zip(jit(with_buffers)(x, led), jit(without)(x, led), strict=True):
        np.testing.assert_array_equal(with_buffer, result)


@pytest.mark.parametrize("method", ["Allreduce", "Reduce", "Scan", "Exscan", "Reduce_scatter_block"])
def test_an_op_in_the_buffers_place(method):
    case = next(case for case in CASES if case.name == f"{method}-MAX")
    xs = case.operands(WORLD, seed=8)
    root = {"root": WORLD.size - 1} if case.root else {}
    case.check(getattr(WORLD, method)(xs[WORLD.rank], MPI.MAX, **root), xs, WORLD.rank)


def test_results_of_eager_calls_go_into_jax_programs():
    """XLA takes the memory of an eager result without copying it, and frees it when it is done."""
    xs = CASES[0].operands(WORLD, (1000,), seed=9)
    mean = jax.jit(lambda total: total / WORLD.size, donate_argnums=0)
    total = WORLD.Allreduce(xs[WORLD.rank])
    for _ in range(50):
        total = mean(WORLD.Allreduce(total))
    np.testing.assert_allclose(total, sum(xs), rtol=1e-12)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_around(name):
    """As in NumPy, under every MPI, at every length: Open MPI's own reductions saturate, in part of an array."""
    limits, rng = np.iinfo(name), np.random.default_rng(WORLD.rank)
    for length in (1, 67):
        x = rng.integers(limits.min, limits.max, length, dtype=name, endpoint=True)
        everywhere = np.stack(harness.WORLD.allgather(x))
        for op, combine in ((MPI.SUM, np.add), (MPI.PROD, np.multiply)):
            np.testing.assert_array_equal(WORLD.Allreduce(x, op), combine.reduce(everywhere, dtype=name))
