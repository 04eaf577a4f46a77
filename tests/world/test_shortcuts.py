"""Calls on concrete arrays take a short way from the second of their kind on: with the same results, errors and order."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, METHODS, OPS, slow
from counting import messages
from jax.experimental.layout import Format, Layout
from mpi4py import MPI

import jaxcomm
from jaxcomm import JaxComm, create_token
from jaxcomm._native import bridge
from jaxcomm._primitives import eager

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
X = np.random.default_rng([6, RANK]).normal(size=3)


@pytest.fixture
def long_way(monkeypatch):
    """Counts the calls that do not take it."""
    count = []
    run = eager.run
    monkeypatch.setattr(eager, "run", lambda *args: count.append(args[0].name) or run(*args))
    return count


@pytest.mark.parametrize("method", METHODS)
def test_later_calls_are_as_the_first(method, long_way):
    """New data each time; JAX arrays, and NumPy arrays."""
    for case in (case for case in CASES if case.method == method):
        dtype = "float64" if case.defined_for("float64") else "int64"
        for array in (jnp.asarray, *([] if case.in_place else [np.asarray])):
            for seed in range(4):
                xs = case.operands(WORLD, dtype=dtype, seed=seed)
                if seed == 3:
                    long_way.clear()
                case.check(case.call(WORLD, array(xs[RANK])), xs, RANK)
            # What is made on the way goes the long way: templates of the case's, what Exscan gives the first rank, a
            # JAX array of the NumPy array that a rank gets back which is not the root.
            made = case.name in ("Sendrecv-ragged", "Sendrecv-short") or (method == "Exscan" and RANK == 0)
            back = method in ("Gather", "Gatherv", "Reduce") and case.root(SIZE) != RANK and array is np.asarray
            compared = method == "Reduce_scatter" and bridge.checking()  # in words, before it
            assert made or back or compared or long_way == [], case


@pytest.mark.parametrize("array", [jnp.int32, np.int32, lambda i: np.array(i)], ids=["jax", "numpy", "0-d"])
def test_ranks_tags_and_roots_in_arrays_are_not_remembered(array):
    for i in range(3):
        root = i % SIZE
        np.testing.assert_array_equal(WORLD.Bcast(jnp.full(2, RANK), root=array(root)), root)
        there = WORLD.Reduce(jnp.ones(2), root=array(root))
        assert root != RANK or np.all(there == SIZE)
        request = WORLD.Irecv(jnp.zeros(2), (RANK - i) % SIZE, tag=i)
        WORLD.Send(jnp.full(2, 10.0 * i + RANK), array((RANK + i) % SIZE), array(i))
        np.testing.assert_array_equal(request.Wait(), 10 * i + (RANK - i) % SIZE)
        request = WORLD.Isend(jnp.full(2, 10.0 * i + RANK), (RANK + i) % SIZE, tag=i)
        got, status = WORLD.Recv(jnp.zeros(2), array((RANK - i) % SIZE), array(i), return_status=True)
        np.testing.assert_array_equal(got, 10 * i + (RANK - i) % SIZE)
        assert (status.source, status.tag) == ((RANK - i) % SIZE, i)
        request.Wait()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_counts_in_arrays_are_not_remembered(dtype):
    for seed in range(3):
        counts = np.random.default_rng(seed).integers(0, 4, (SIZE, SIZE)).astype(dtype)
        x = np.repeat(10.0 * RANK + np.arange(SIZE), counts[RANK])
        expected = np.repeat(10.0 * np.arange(SIZE) + RANK, counts[:, RANK])
        got = WORLD.Alltoallv(jnp.asarray(x), sendcounts=counts[RANK], recvcounts=counts[:, RANK])
        np.testing.assert_array_equal(got, expected)
        part = WORLD.Reduce_scatter(jnp.arange(float(sum(counts[0]))), recvcounts=counts[0])
        start = sum(counts[0][:RANK])
        np.testing.assert_array_equal(part, SIZE * np.arange(start, start + counts[0][RANK]))


@pytest.mark.parametrize("dtype", ["bool", "int8", "float32", "complex128"])
def test_dtypes_and_shapes_do_not_meet(dtype):
    for op in (name for name in OPS if np.dtype(dtype).kind in OPS[name][1]):
        case = next(case for case in CASES if case.name == f"Allreduce-{op}")
        for shape in ((3,), (), (0,), (3, 1), (1, 3), (3,)):
            for seed in range(2):
                xs = case.operands(WORLD, shape, dtype, seed)
                case.check(case.call(WORLD, jnp.asarray(xs[RANK])), xs, RANK)


def test_what_looks_alike_is_not_the_same(long_way):
    for _ in range(3):
        np.testing.assert_allclose(WORLD.Allreduce(X), WORLD.allreduce(X), rtol=1e-13)
        np.testing.assert_allclose(WORLD.Allreduce(X, op=MPI.MAX), WORLD.Allreduce(X, MPI.MAX))
        x = jnp.asarray(X)
        np.testing.assert_array_equal(WORLD.Bcast(x, 0), WORLD.bcast(X, 0))
        with pytest.raises(TypeError, match="root must be a Python int"):
            WORLD.Bcast(x, 0.0)
        with pytest.raises(TypeError, match=r"op must be an MPI\.Op"):
            WORLD.Allreduce(X, op="SUM")
        assert WORLD.Allreduce(np.float32(X)).dtype == jnp.float32
        with pytest.raises(ValueError, match="recvbuf is a template"):
            WORLD.Allreduce(x, np.zeros(4))
        y, _ = WORLD.Allreduce(X, token=create_token())
        np.testing.assert_allclose(y, WORLD.allreduce(X), rtol=1e-13)
        status = MPI.Status()
        WORLD.Sendrecv(X, RANK, 7, source=RANK, status=status)
        assert status.tag == 7


def test_x64_off():
    with jax.enable_x64(True):
        assert all(WORLD.Allreduce(X).dtype == jnp.float64 for _ in range(3))
    with jax.enable_x64(False):
        assert all(WORLD.Allreduce(X).dtype == jnp.float32 for _ in range(3))
    with jax.enable_x64(True):
        assert WORLD.Allreduce(X).dtype == jnp.float64


def test_layouts():
    """A transposed NumPy array, and a JAX array that lies in memory as its transpose does."""
    matrix = np.arange(6.0).reshape(2, 3) + RANK
    expected = WORLD.allreduce(matrix)
    turned = jax.device_put(matrix, Format(Layout(major_to_minor=(1, 0)), jnp.asarray(matrix).sharding))
    for _ in range(3):
        for x in (matrix, np.asfortranarray(matrix), jnp.asarray(matrix), turned, np.repeat(matrix, 2, 0)[::2]):
            np.testing.assert_array_equal(WORLD.Allreduce(x), expected)


def test_results_go_where_operands_are():
    for committed in (False, True, False):
        x = jax.device_put(X, jax.devices()[0]) if committed else jnp.asarray(X)
        for _ in range(2):
            assert WORLD.Allreduce(x).committed == committed


def test_operands_that_are_not_there_yet():
    for i in range(5):
        np.testing.assert_array_equal(
            WORLD.Allreduce(jax.jit(slow)(jnp.full(3, float(i)))), np.full(3, float(i * SIZE))
        )


def test_results_own_their_memory():
    """Large ones too, which are not copied."""
    for n in (3, 100_000):
        x = np.full(n, 1.0)
        results = [WORLD.Scan(x, MPI.MAX) for _ in range(3)]
        x[:] = 7
        for y in results:
            np.testing.assert_array_equal(y, np.ones(n))


def test_inside_transformations_nothing_is_cut_short():
    for _ in range(3):
        WORLD.Allreduce(jnp.asarray(X))
    f = lambda x: jnp.sum(WORLD.Allreduce(x) ** 2)  # noqa: E731
    np.testing.assert_allclose(jax.grad(f)(jnp.asarray(X)), 2 * SIZE * WORLD.allreduce(X), rtol=1e-13)
    constant = jnp.asarray(X)
    assert "mpi_allreduce" in str(jax.make_jaxpr(lambda: WORLD.Allreduce(constant))())
    np.testing.assert_allclose(jax.jit(lambda: WORLD.Allreduce(constant))(), WORLD.allreduce(X), rtol=1e-13)


@pytest.mark.skipif(SIZE == 1, reason="a message to oneself may wait for its receive")
def test_order():
    """A call waits for programs under way, jax.jit's and jaxcomm.jit's."""
    right = (RANK + 1) % SIZE
    ways = [
        lambda x: WORLD.Send(x, right, 1),
        jax.jit(lambda x: WORLD.Send(slow(x), right, 2)),
        jaxcomm.jit(lambda x: WORLD.Send(slow(x), right, 3)),
    ]
    order = np.random.default_rng(18).integers(0, 3, 30)
    for i, way in enumerate(order):
        ways[way](jnp.float64(i))
    assert messages(WORLD) == [(way + 1, i) for i, way in enumerate(order)]


def test_errors_are_those_of_the_first_call():
    comm = JaxComm(WORLD)
    x = jnp.asarray(X)
    for _ in range(3):
        comm.Allreduce(x)
    comm.Free()
    with pytest.raises(ValueError, match="was freed"):
        comm.Allreduce(x)
    if SIZE > 1:  # Open MPI sees no error in a message to oneself
        right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        WORLD.Sendrecv(jnp.zeros(2), right, 3, np.zeros(2), left, 3)
        long = jnp.zeros(4)
        for _ in range(3):
            with pytest.raises(MPI.Exception, match=r"(?i)sendrecv on .*truncate") as error:
                WORLD.Sendrecv(long, right, 3, np.zeros(2), left, 3)
            assert error.value.Get_error_class() == MPI.ERR_TRUNCATE
    gone = jnp.asarray(X)
    for _ in range(2):
        WORLD.Sendrecv(gone, RANK, source=RANK)
    gone.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        WORLD.Sendrecv(gone, RANK, source=RANK)


def test_methods_are_still_methods():
    import inspect

    assert inspect.isfunction(JaxComm.Allreduce)
    assert list(inspect.signature(JaxComm.Allreduce).parameters)[:3] == ["self", "sendbuf", "recvbuf"]
    assert "Reduce sendbuf over all ranks" in JaxComm.Allreduce.__doc__


def test_transfer_guards():
    """Operands and results are on the device: nothing is transferred that the user could mean to forbid."""
    x = jnp.asarray(X)
    for _ in range(3):
        with jax.transfer_guard("disallow"):
            total = WORLD.Allreduce(x)
        np.testing.assert_allclose(total, WORLD.allreduce(X), rtol=1e-13)
