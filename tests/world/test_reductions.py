"""Reductions by users' operations, in a fixed order, of pairs with their places, and as means."""

from __future__ import annotations

import functools
import gc
from typing import Any

import calculus
import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import Compilations
from mpi4py import MPI

import jaxcomm
from jaxcomm import MEAN


@pytest.fixture
def world():
    return harness.communicator("world")


@pytest.fixture(params=["world", "reversed"])
def comm(request):
    """Of the kinds there are, those whose order of ranks differs."""
    return harness.communicator(request.param)


def arrays(comm: Any, shape: tuple[int, ...] = (3,), dtype: Any = np.float64, seed: int = 0) -> list[np.ndarray]:
    """What each rank of comm brings."""
    members = MPI.Group.Translate_ranks(comm.group, None, MPI.COMM_WORLD.group)
    return [cases.random(np.random.default_rng([seed, m]), shape, np.dtype(dtype), "SUM") for m in members]


# Users' operations


def _last(a: Any, b: Any, datatype: MPI.Datatype) -> None:
    """Not commutative: twice the left operand plus the right one, of any dtype that MPI tells."""
    dtype = np.dtype(datatype.typestr)
    left, right = (np.frombuffer(x, dtype) for x in (a, b))
    right[:] = 2 * left + right


def weighted(xs: list[np.ndarray]) -> np.ndarray:
    """Associative it is not; MPI says nothing of the parentheses then, but for a chain of two."""
    return functools.reduce(lambda a, b: 2 * a + b, xs)


def _concat(a: Any, b: Any, datatype: MPI.Datatype) -> None:
    """Associative and not commutative: numbers in base 10, in each element the digits and how many, as d + n / 16."""
    left, right = (np.frombuffer(x, np.float64) for x in (a, b))
    n, m = (np.mod(x, 1) * 16 for x in (left, right))
    right[:] = np.floor(left) * 10**m + np.floor(right) + (n + m) / 16


def digits(comm: Any) -> tuple[Any, list[float]]:
    members = list(range(comm.size))
    return jnp.full(3, comm.rank + 1 + 1 / 16), [rank + 1 + 1 / 16 for rank in members]


def joined(xs: list[float]) -> float:
    return float("".join(str(int(x)) for x in xs)) + len(xs) / 16 if xs else 0.0


def test_a_users_operation_that_is_not_commutative(comm):
    op = MPI.Op.Create(_concat)
    try:
        x, all_x = digits(comm)
        calls = {
            "Allreduce": (lambda x: comm.Allreduce(x, op=op), joined(all_x)),
            "Scan": (lambda x: comm.Scan(x, op), joined(all_x[: comm.rank + 1])),
            "Exscan": (lambda x: comm.Exscan(x, op=op, identity=0.0), joined(all_x[: comm.rank])),
            "Reduce": (lambda x: comm.Reduce(x, op=op), x if comm.rank else joined(all_x)),
            "in order": (lambda x: comm.Allreduce(x, op=op, reproducible=True), joined(all_x)),
            "vmap": (lambda x: jax.vmap(lambda e: comm.Allreduce(e, op=op))(x), joined(all_x)),
            "Iallreduce": (lambda x: comm.Iallreduce(x, op=op).Wait(), joined(all_x)),
        }
        for name, (call, expected) in calls.items():
            np.testing.assert_array_equal(call(x), np.broadcast_to(expected, 3), name)
            np.testing.assert_array_equal(jax.jit(call)(x), np.broadcast_to(expected, 3), name)
    finally:
        op.Free()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float32", "complex128"])
def test_a_users_operation_is_told_the_datatype(world, dtype):
    op = MPI.Op.Create(_last, commute=False)
    x = [np.arange(4).astype(dtype), np.ones(4, dtype)][world.rank % 2]
    two = world.Split(world.rank // 2)
    found = jax.jit(lambda x: two.Allreduce(x, op=op))(x)
    expected = weighted([np.arange(4).astype(dtype), np.ones(4, dtype)][: two.size])
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == dtype
    op.Free()
    two.Free()


def test_a_users_operation_has_no_derivative(world):
    op = MPI.Op.Create(_concat)
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda x: world.Allreduce(x, op=op))(1.0)
    op.Free()


def test_a_freed_operation_is_told(comm):
    """Row 45, in calls that were compiled and in those that were not; other operations are none the worse."""
    op, kept = MPI.Op.Create(_concat), MPI.Op.Create(_last)
    x, _ = digits(comm)
    compiled = jax.jit(lambda x: comm.Allreduce(x, op=op))
    jax.block_until_ready(compiled(x))
    comm.Allreduce(x, op=op)
    op.Free()
    again = MPI.Op.Create(_last)  # which gets the freed one's handle
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"_concat\(\) was freed"):
        jax.block_until_ready(compiled(x))
    with pytest.raises((ValueError, RuntimeError), match="was freed"):
        comm.Allreduce(x, op=op)
    with pytest.raises((ValueError, RuntimeError), match="was freed"):
        jax.jit(lambda x: comm.Scan(x, op=op))(x)
    for other in (kept, again):
        np.testing.assert_array_equal(comm.Scan(x, op=other)[0] > 0, True)
        other.Free()


class RefusedError(Exception):
    pass


def _raise(a: Any, b: Any, datatype: MPI.Datatype) -> None:
    raise RefusedError("not this one")


@pytest.mark.parametrize("what", ["array", "tree"])
@pytest.mark.parametrize("how", ["eager", "again", "jit", "jaxcomm.jit", "Iallreduce"])
def test_what_a_users_operation_raises_reaches_the_caller(comm, how, what):
    """Row 46: where it ran; elsewhere the call ends, also of a tree, which is several messages. The communicator goes on."""
    x = jnp.ones(3) if what == "array" else {"a": jnp.ones(3), "b": jnp.ones(2, jnp.int32), "long": jnp.ones(30_000)}
    op = MPI.Op.Create(_raise, commute=True)
    call = lambda x: comm.Allreduce(x, op=op)  # noqa: E731
    calls = {
        "jit": jax.jit(call),
        "jaxcomm.jit": jaxcomm.jit(call),
        "Iallreduce": lambda x: comm.Iallreduce(x, op=op).Wait(),
    }
    kind = jax.errors.JaxRuntimeError if "jit" in how else RefusedError
    raised = False
    for _ in range(2):  # the second eager call takes a shortcut
        try:
            jax.block_until_ready(calls.get(how, call)(x))
        except kind as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            assert "RefusedError: not this one" in text
            assert "allreduce on" in text
            raised = True
    assert comm.allreduce(raised, MPI.LOR) == (comm.size > 1)
    np.testing.assert_array_equal(comm.Allreduce(jnp.ones(3)), comm.size)
    op.Free()


def test_users_operations_do_not_pile_up(world):
    """mpi4py has room for 32 functions: those of freed operations are let go."""
    before = None
    for round in range(40):
        op = MPI.Op.Create(_concat)
        world.Allreduce(jnp.ones(2), op=op)
        op.Free()
        if round == 5:
            gc.collect()
            before = len(gc.get_objects())
    gc.collect()
    assert len(gc.get_objects()) - before < 5000


# A fixed order


def tree_sum(xs: list[np.ndarray], combine: Any = np.add) -> np.ndarray:
    while len(xs) > 1:
        xs = [combine(*xs[i : i + 2]) if i + 1 < len(xs) else xs[i] for i in range(0, len(xs), 2)]
    return xs[0]


LENGTHS = [0, 1, 2, 7, 1025, 5001]  # short and long, and parts of different lengths


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int32"])
def test_reproducible_sums_have_the_bits_of_the_tree(comm, length, dtype):
    xs = [x * np.asarray(10, dtype) ** (rank % 5) for rank, x in enumerate(arrays(comm, (length,), dtype))]
    expected = tree_sum(xs)
    for call in (
        lambda x: comm.Allreduce(x, reproducible=True),
        jax.jit(lambda x: comm.Allreduce(x, op=MPI.SUM, reproducible=True)),
    ):
        y = np.asarray(call(xs[comm.rank]))
        assert y.dtype == dtype
        assert y.tobytes() == expected.tobytes()
    last = comm.size - 1
    y = np.asarray(jax.jit(lambda x: comm.Reduce(x, root=last, reproducible=True))(xs[comm.rank]))
    assert y.tobytes() == (expected if comm.rank == last else xs[comm.rank]).tobytes()


@pytest.mark.parametrize("length", [3, 3000])
def test_the_length_of_an_array_does_not_change_an_element(world, length):
    """Whether it is gathered or cut into parts."""
    x = arrays(world, (5000,), np.float32)[world.rank]
    whole, part = (np.asarray(world.Allreduce(a, reproducible=True)) for a in (x, x[:length]))
    assert whole[:length].tobytes() == part.tobytes()


def test_other_operations_in_a_fixed_order(comm):
    xs = arrays(comm, (4,))
    product = comm.Allreduce(xs[comm.rank], op=MPI.PROD, reproducible=True)
    assert np.asarray(product).tobytes() == tree_sum(xs, np.multiply).tobytes()
    np.testing.assert_array_equal(
        comm.Allreduce(xs[comm.rank], op=MPI.MAX, reproducible=True), functools.reduce(np.maximum, xs)
    )


@pytest.mark.calculus
def test_derivatives_of_reproducible_sums_are_reproducible(comm):
    """The bits of the tree in both modes, also where the sum is declared to be shared."""
    xs, cts = arrays(comm, (1500,), np.float32), arrays(comm, (1500,), np.float32, 1)
    f = lambda x: comm.Allreduce(x, reproducible=True)  # noqa: E731
    y, dy = jax.jvp(f, (xs[comm.rank],), (cts[comm.rank],))
    (back,) = jax.jit(lambda x, ct: jax.vjp(f, x)[1](ct))(xs[comm.rank], cts[comm.rank])
    assert np.asarray(y).tobytes() == tree_sum(xs).tobytes()
    assert np.asarray(dy).tobytes() == np.asarray(back).tobytes() == tree_sum(cts).tobytes()
    shared = lambda x: comm.Allreduce(x, replicated=True, reproducible=True)  # noqa: E731
    y, pull = jax.vjp(shared, xs[comm.rank])
    assert np.asarray(y).tobytes() == tree_sum(xs).tobytes()
    np.testing.assert_array_equal(pull(cts[0])[0], cts[0])
    again = jax.linear_transpose(lambda ct: pull(ct)[0], cts[0])
    assert np.asarray(jax.jit(again)(xs[comm.rank])[0]).tobytes() == tree_sum(xs).tobytes()


@pytest.mark.calculus
def test_batches_of_reproducible_sums(comm):
    xs = arrays(comm, (5, 4), np.float32)
    y = jax.vmap(lambda x: comm.Allreduce(x, reproducible=True), 1, 1)(xs[comm.rank])
    assert np.asarray(y).tobytes() == tree_sum(xs).tobytes()


def test_no_request_for_a_fixed_order(world):
    with pytest.raises(TypeError, match="reproducible=True has no nonblocking form; use Allreduce"):
        world.Iallreduce(1.0, reproducible=True)


# MAXLOC, MINLOC


def extremum(op: str, xs: list[np.ndarray], indices: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """By MPI's definition: of the ranks that have the extremum, the lowest index."""
    values, places = np.stack(xs), np.stack([np.broadcast_to(i, xs[0].shape) for i in indices])
    best = values.max(axis=0) if op == "MAXLOC" else values.min(axis=0)
    return best, np.where(values == best, places, np.iinfo(places.dtype).max).min(axis=0)


@pytest.mark.parametrize("op", ["MAXLOC", "MINLOC"])
@pytest.mark.parametrize(
    ("dtype", "index"), [("bool", "int32"), ("int8", "int64"), ("uint64", "int32"), ("float32", "int64")]
)
def test_the_extremum_and_where_it_is(world, op, dtype, index):
    native = getattr(MPI, op)
    xs = [np.round(x * 2).astype(dtype) if x.dtype.kind == "f" else x for x in arrays(world, (2, 40), dtype)]
    places = [np.asarray((7 * rank + np.arange(40)) % 5, index) for rank in range(world.size)]
    places = [np.broadcast_to(p, (2, 40)) for p in places]
    call = lambda x, i: world.Allreduce((x, i), op=native)  # noqa: E731
    for f in (call, jax.jit(call), jax.vmap(call, 1, 1)):
        value, place = f(xs[world.rank], places[world.rank])
        expected = extremum(op, xs, places)
        assert (value.dtype, place.dtype) == (dtype, index)
        np.testing.assert_array_equal(value, expected[0])
        np.testing.assert_array_equal(place, expected[1])


def test_a_batch_of_values_with_one_place_for_all(world):
    xs = arrays(world, (3, 4), "float32")
    batched = jax.vmap(lambda x: world.Allreduce((x, world.rank), op=MPI.MAXLOC))
    for wrap in (jax.jit, lambda f: f):
        value, place = wrap(batched)(xs[world.rank])
        np.testing.assert_array_equal(value, np.max(xs, axis=0))
        np.testing.assert_array_equal(place, np.argmax(xs, axis=0))


def test_other_reductions_of_pairs(comm):
    xs, rank = arrays(comm), comm.rank
    pair = xs[rank], rank

    def upto(stop: int) -> tuple[Any, Any]:
        return extremum("MAXLOC", xs[:stop], list(range(stop)))

    nothing = np.full(3, -np.inf), np.full(3, np.iinfo(np.int64).max)
    for found, expected in (
        (comm.Scan(pair, MPI.MAXLOC), upto(rank + 1)),
        (comm.Exscan(pair, op=MPI.MAXLOC), upto(rank) if rank else nothing),
        (comm.Reduce(pair, op=MPI.MAXLOC), (xs[rank], np.full(3, rank)) if rank else upto(comm.size)),
    ):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


def test_nan_is_the_extremum_of_the_lowest_rank_that_has_one(comm):
    x = jnp.where(comm.rank % 2 == 1, jnp.nan, 5.0)
    for op in (MPI.MAXLOC, MPI.MINLOC):
        value, place = comm.Allreduce((x, comm.rank), op=op)
        assert int(place) == (1 if comm.size > 1 else 0)
        assert bool(jnp.isnan(value)) == (comm.size > 1)


@pytest.mark.calculus
def test_the_derivative_goes_to_the_rank_that_has_the_extremum(comm):
    xs = arrays(comm, (6,))
    xs = [np.round(x) for x in xs]  # with ties, which go to the lowest index
    weights = np.arange(1.0, 7.0)
    gradient = jax.jit(jax.grad(lambda x: jnp.vdot(weights, comm.Allreduce((x, comm.rank), op=MPI.MAXLOC)[0])))
    holder = extremum("MAXLOC", xs, list(range(comm.size)))[1]
    np.testing.assert_array_equal(gradient(xs[comm.rank]), np.where(holder == comm.rank, comm.size * weights, 0))


@pytest.mark.parametrize(
    ("x", "kind", "says"),
    [
        (1.0, TypeError, "takes a pair"),
        ((1.0, 1.0), TypeError, "must be integers"),
        ((1j, 1), TypeError, "has no order"),
        ((np.ones(3), np.arange(2)), ValueError, "indices must have the values' shape"),
    ],
)
def test_what_is_wrong_with_a_pair_is_told(world, x, kind, says):
    with pytest.raises(kind, match=says):
        world.Allreduce(x, op=MPI.MAXLOC)


def test_the_identity_of_a_pair_is_known(world):
    with pytest.raises(TypeError, match="that of MAXLOC is known"):
        world.Exscan((1.0, 1), op=MPI.MAXLOC, identity=(0.0, 0))


# All of these, of all dtypes


def test_every_dtype(world):
    """A fixed order, means, places of extrema and functions; what has no meaning is refused."""
    made = []
    for dtype in cases.DTYPES:
        xs, kind = arrays(world, (6,), dtype), cases.kind(dtype)
        x = xs[world.rank]
        calls = {"first": (lambda x: world.Allreduce(x, op=lambda a, b: a), xs[0])}
        if kind != "b":
            with np.errstate(all="ignore"):
                total = tree_sum(xs)
            calls["sum"] = lambda x: world.Allreduce(x, reproducible=True), total
        if kind in "fc":
            wide = np.result_type(total.dtype, np.float32).type if total.dtype.itemsize > 2 else np.float32
            part = np.zeros((), wide).real.dtype.type(1 / world.size)
            mean = total.astype(wide)
            mean = mean.real * part + 1j * (mean.imag * part) if kind == "c" else mean * part
            mean = mean.astype(dtype)
            calls["mean"] = lambda x: world.Allreduce(x, op=MEAN, reproducible=True), mean
        else:
            with pytest.raises(TypeError, match="op=MEAN is for floating-point and complex dtypes"):
                world.Allreduce(x, op=MEAN)
        if kind == "c":
            with pytest.raises(TypeError, match="op=MAXLOC is not defined for dtype"):
                world.Allreduce((x, world.rank), op=MPI.MAXLOC)
        else:
            calls["place"] = lambda x: world.Allreduce((x, world.rank), op=MPI.MAXLOC)[1], np.argmax(xs, axis=0)
        made += [(dtype, name, f, x, y) for name, (f, y) in calls.items()]
    ys = jax.jit(lambda xs: [f(x) for (*_, f, _, _), x in zip(made, xs, strict=True)])(
        [jnp.asarray(m[3]) for m in made]
    )
    for (dtype, name, f, x, expected), y in zip(made, ys, strict=True):
        for found in (y, f(jnp.asarray(x))) if dtype in ("bool", "bfloat16", "int4", "complex64") else (y,):
            assert name == "place" or found.dtype == dtype
            np.testing.assert_array_equal(np.asarray(found), expected, err_msg=f"{name} of {dtype}")


def test_users_operations_are_refused_what_mpi_has_not(world):
    op = MPI.Op.Create(_concat)
    for dtype in ("bfloat16", "float16", "float8_e5m2", "float4_e2m1fn"):
        with pytest.raises(TypeError, match=f"MPI has no datatype for {dtype}"):
            world.Allreduce(jnp.ones(2, dtype), op=op)
    op.Free()


def test_keys_are_reduced_by_functions_alone(world):
    keys = [jax.random.split(jax.random.key(rank), 2) for rank in range(world.size)]
    last = world.Allreduce({"keys": keys[world.rank], "n": 1}, op=lambda a, b: b)["keys"]
    assert jnp.all(last == keys[-1])


# Means


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_means(comm, dtype):
    xs = arrays(comm, (comm.size, 2), dtype)
    x = xs[comm.rank]
    mean = np.mean(xs, axis=0)
    root = comm.size - 1
    calls = [
        (lambda x: comm.Allreduce(x, op=MEAN), mean),
        (lambda x: comm.Allreduce(x, MEAN), mean),
        (lambda x: comm.Iallreduce(x, op=MEAN).Wait(), mean),
        (lambda x: comm.Allreduce(x, op=MEAN, replicated=True), mean),
        (lambda x: comm.Allreduce(x, op=MEAN, reproducible=True), mean),
        (lambda x: comm.Reduce(x, op=MEAN, root=root), mean if comm.rank == root else x),
        (lambda x: comm.Scan(x, op=MEAN), np.mean(xs[: comm.rank + 1], axis=0)),
        (lambda x: comm.Reduce_scatter_block(x, op=MEAN), mean[comm.rank]),
        (lambda x: comm.Reduce_scatter(x, MEAN), mean[comm.rank : comm.rank + 1]),
        (lambda x: jax.vmap(lambda e: comm.Allreduce(e, op=MEAN), 1, 1)(x), mean),
    ]
    compiled = jax.jit(lambda x: [call(x) for call, _ in calls])(x)
    for y, (call, expected) in zip(compiled, calls, strict=True):
        for found in (y, call(x)) if dtype == "float32" else (y,):
            assert (found.dtype, found.shape) == (dtype, expected.shape)
            # size - 1 additions err by half an eps each (complex: sqrt(5) times that) of the sum of the absolute values,
            # which is then divided by size; so does the reference. The reciprocal and the product round once each.
            eps, scale = float(jnp.finfo(dtype).eps), float(np.max(np.sum(np.abs(xs), axis=0)))
            np.testing.assert_allclose(found, expected, 4 * eps, atol=5**0.5 * eps * scale)


def test_the_mean_of_what_has_no_data(world):
    """Gradients by integers are float0."""
    grads = jax.grad(lambda p: jnp.sum(p["w"]) * 2, allow_int=True)({"n": jnp.arange(3), "w": jnp.ones(2)})
    mean = world.Allreduce(grads, op=MEAN)
    assert mean["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(mean["w"], 2)


@pytest.mark.calculus
def test_the_gradient_of_a_mean(comm):
    x = arrays(comm)[comm.rank]
    calculus.check_gradient(comm, lambda x: jnp.sum(jnp.sin(comm.Allreduce(x, op=MEAN)) * (comm.rank + 1)), x)
    shared = jax.grad(lambda x: comm.Allreduce(jnp.sum(x**2), op=MEAN, replicated=True))(x)
    np.testing.assert_allclose(shared, 2 * x / comm.size)


def test_what_is_wrong_with_a_mean_is_told(world):
    for call, says in (
        (lambda: world.Allreduce(1, op=MEAN), "op=MEAN is for floating-point"),
        (lambda: world.Exscan(1.0, op=MEAN), "op must be an MPI.Op"),
        (lambda: world.Allreduce(1.0, MEAN, MPI.MAX), "two operations were given"),
    ):
        with pytest.raises(TypeError, match=says):
            call()


# Norms, and trees that should be equal


def test_global_norm(comm):
    xs, zs = arrays(comm, (3,)), arrays(comm, (2, 2), np.complex64, 1)
    expected = np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in (*xs, *zs)))
    tree = {"x": xs[comm.rank], "z": [zs[comm.rank]]}
    for f in (lambda t: jaxcomm.global_norm(comm, t), jax.jit(lambda t: jaxcomm.global_norm(comm, t))):
        assert f(tree).dtype == np.float64
        np.testing.assert_allclose(f(tree), expected, 1e-6)
    assert jaxcomm.global_norm(comm, jnp.ones(3, jnp.float32)).dtype == np.float32
    assert jaxcomm.global_norm(comm, np.full(4, 300, np.int16)).dtype == np.float32
    assert jaxcomm.global_norm(comm, {"n": np.zeros(3, jax.dtypes.float0)}) == 0
    small = [np.full(2, 2, dtype) for dtype in ("float8_e4m3fn", "int4", "bfloat16", "bool")]
    np.testing.assert_allclose(jaxcomm.global_norm(comm, small), np.sqrt(comm.size * 26), rtol=1e-6)
    for unlike in ([], np.ones(4, np.float32)):  # ranks need not have the same leaves
        norm = jaxcomm.global_norm(comm, unlike if comm.rank == 0 else np.ones(4))
        assert norm.dtype == (np.float32 if comm.rank == 0 else np.float64)
        np.testing.assert_allclose(norm**2, 4 * (comm.size - (len(unlike) == 0)), rtol=1e-6)
    with pytest.raises(TypeError, match="global_norm: tree must be of numbers, got key<fry>"):
        jaxcomm.global_norm(comm, jax.random.key(0))


@pytest.mark.calculus
def test_derivatives_of_the_global_norm(comm):
    x = arrays(comm)[comm.rank]
    calculus.check_gradient(comm, lambda x: (comm.rank + 1) * jaxcomm.global_norm(comm, {"x": x}), x)
    zero = jax.grad(lambda x: jaxcomm.global_norm(comm, x))(jnp.zeros(3))
    np.testing.assert_array_equal(zero, 0)
    once = jax.grad(lambda x: jaxcomm.global_norm(comm, x, replicated=True))(x)
    np.testing.assert_allclose(once, x / jaxcomm.global_norm(comm, x), 1e-12)


def tree_of(comm: Any) -> dict[str, Any]:
    return {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": [jnp.ones((), jnp.bfloat16), np.array([True])],
        "c": 3,
        "n": jnp.nan,
    }


def test_equal_trees_are_close(comm):
    found = jaxcomm.allclose_across(comm, tree_of(comm), 0, 0)
    assert found
    assert (found.ranks, found.leaves, found.differences) == ((), (), ())
    assert repr(found) == "all ranks have the same as rank 0"
    assert jaxcomm.allclose_across(comm, tree_of(comm), equal_nan=False).leaves == ("['n']",)


def test_differences_are_told_by_rank_and_leaf(comm):
    tree, last = tree_of(comm), comm.size - 1
    if comm.rank == last and last:
        tree["a"] = tree["a"].at[1, 0].add(0.5).at[0, 0].add(0.25)
        tree["b"][0] = jnp.full((), 2, jnp.bfloat16)
        tree["b"][1] = np.array([False])
    found = jaxcomm.allclose_across(comm, tree)
    assert found == comm.bcast(found, 0)
    assert bool(found) == (comm.size == 1)
    if last:
        assert found.ranks == (last,)
        assert found.leaves == ("['a']", "['b'][0]", "['b'][1]")
        assert f"rank {last}, leaf ['a']: 2 of 6 elements, most at (1, 0): 3.5 instead of 3.0" in repr(found)
        assert "1 of 1 elements, most at (): 2.0 instead of 1.0" in repr(found)
        assert "False instead of True" in repr(found)
    assert jaxcomm.allclose_across(comm, tree["a"], atol=0.5)
    assert jaxcomm.allclose_across(comm, tree["c"])


def test_other_structures_shapes_and_dtypes_are_differences(comm):
    trees = [{"a": np.ones(2), "k": 1}, {"a": np.ones(2, np.float32), "k": 1}, {"a": np.ones(3), "z": 1}, {"k": 2}]
    found = jaxcomm.allclose_across(comm, trees[comm.rank % 4])
    lines = {
        1: ["rank 1, leaf ['a']: float32[2] instead of float64[2]"],
        2: [
            "rank 2, leaf ['a']: float64[3] instead of float64[2]",
            "rank 2, leaf ['k']: no such leaf instead of int64[]",
            "rank 2, leaf ['z']: int64[] instead of no such leaf",
        ],
        3: ["rank 3, leaf ['a']: no such leaf instead of float64[2]"],
    }
    expected = [line for rank in range(comm.size) for line in lines.get(rank, [])]
    assert [str(d) for d in found.differences] == expected


def test_what_has_no_data_is_close_and_what_is_no_array_is_told(world):
    assert jaxcomm.allclose_across(world, {"n": np.zeros(3, jax.dtypes.float0), "w": jnp.ones(2)})
    with pytest.raises(TypeError, match="allclose_across: tree must be an array or a scalar, got str"):
        jaxcomm.allclose_across(world, {"name": "w"})


def test_traced_values_cannot_be_compared(world):
    with pytest.raises(TypeError, match="call it outside jit"):
        jax.jit(lambda x: jaxcomm.allclose_across(world, x))(1.0)


def test_means_and_fixed_orders_compile_once(world):
    calls = [lambda x: world.Allreduce(x, op=MEAN), lambda x: world.Allreduce((x, 1), op=MPI.MAXLOC)]
    calls += [lambda x: world.Allreduce(x, reproducible=True), lambda x: jaxcomm.global_norm(world, x)]
    x = jnp.ones(3)
    for call in calls:
        call(x)
    with Compilations() as compilations:
        for call in calls:
            call(x)
    assert compilations.count == 0


def test_trees_of_all_kinds_of_reductions(world):
    """One call for all leaves, with operations that come and go."""
    xs, zs = arrays(world, (3,)), arrays(world, (1500,), np.float32, 1)
    tree = {"x": jnp.asarray(xs[world.rank]), "z": [jnp.asarray(zs[world.rank])]}
    for call, combine in (
        (lambda t: world.Allreduce(t, op=MEAN), lambda each: np.mean(each, axis=0)),
        (lambda t: world.Allreduce(t, reproducible=True), tree_sum),
    ):
        for f in (call, call, jax.jit(call)):
            y = f(tree)
            np.testing.assert_allclose(y["x"], combine(xs), 1e-6)
            np.testing.assert_allclose(y["z"][0], combine(zs), 1e-5, 1e-6)
    for _ in range(3):  # each gets the handle of the one before
        op = MPI.Op.Create(_concat)
        x, all_x = digits(world)
        for _ in range(2):
            y = world.Allreduce({"a": x, "b": x[:2]}, op=op)
            np.testing.assert_array_equal(y["b"], joined(all_x))
        op.Free()
    with pytest.raises(TypeError, match="no nonblocking form"):
        world.Iallreduce(tree, reproducible=True)
    with pytest.raises(TypeError, match="a function as op has no nonblocking form"):
        world.Iallreduce(tree, op=jnp.add)
