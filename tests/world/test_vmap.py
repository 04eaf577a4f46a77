"""vmap: as a Python loop over the batch, by one message for all of it. CASES 32."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import COMPOSED, of, operations, rounding, slope, sums
from cases import CASES, left, right
from jax import lax
from mpi4py import MPI

from jaxcomm import create_token

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = right(WORLD), left(WORLD)
BATCH = 2
two_ranks = pytest.mark.skipif(SIZE < 2, reason="a message to oneself may wait for its receive")

# What comes short has no batch, see below.
MAPPED = [case for case in CASES if case.name != "Sendrecv-short"]


@pytest.fixture
def comm(request):
    return harness.communicator(request.param)


def batches(comm, case, size=BATCH):
    """[element][rank]"""
    dtype = "float64" if case.defined_for("float64") else "int64"
    return [case.operands(comm, dtype=dtype, seed=21 + i) for i in range(size)]


def mapped_over(case, comm, elements, axis, out_axis, wrap):
    x = np.stack([xs[comm.rank] for xs in elements], axis=axis)
    return wrap(jax.vmap(functools.partial(case.call, comm), in_axes=axis, out_axes=out_axis))(x)


def check_elements(case, comm, elements, y, axis):
    for i, xs in enumerate(elements):
        case.check(jnp.take(y, i, axis=axis), xs, comm.rank)


def axes(case, comm, elements):
    """Each axis that the operand's batch can have, from either end, with another one of the result."""
    ndim = min(len(case.shape(rank, comm.size, (3,))) for rank in range(comm.size))
    return [(axis, (axis + 1) % 2) for axis in range(ndim + 1)] + [(-1, 0), (0, -1)]


@pytest.mark.parametrize("method", list(dict.fromkeys(case.method for case in MAPPED)))
@pytest.mark.parametrize("comm", ["world", "parity", "reversed"], indirect=True)
def test_vmap(comm, method):
    """Every axis, one program for all; the messages are as many as without vmap."""
    which = [case for case in of(method, MAPPED) if comm is WORLD or case.op in (None, "SUM", "MAX")]
    elements = [batches(comm, case) for case in which]

    def run(operands):
        return [
            [
                jax.vmap(functools.partial(case.call, comm), in_axes=axis, out_axes=out)(jnp.moveaxis(x, 0, axis))
                for axis, out in axes(case, comm, e)
            ]
            for case, e, x in zip(which, elements, operands, strict=True)
        ]

    stacked = [np.stack([xs[comm.rank] for xs in e]) for e in elements]
    for case, e, ys in zip(which, elements, jax.jit(run)(stacked), strict=True):
        for (_, out), y in zip(axes(case, comm, e), ys, strict=True):
            check_elements(case, comm, e, y, out)
    for case, x in zip(which, stacked, strict=True):
        call = functools.partial(case.call, comm)
        assert operations(jax.vmap(call), x) == operations(call, x[0]), case


def test_vmap_eager():
    for case in COMPOSED:
        if case in MAPPED:
            elements = batches(WORLD, case)
            check_elements(case, WORLD, elements, mapped_over(case, WORLD, elements, 0, 0, lambda f: f), 0)


def test_nested_vmap():
    """The outer batch is the last axis of the operand and the first of the result."""
    which = [case for case in COMPOSED if case in MAPPED]
    elements = [[batches(WORLD, case), batches(WORLD, case, 4)[2:], batches(WORLD, case, 6)[4:]] for case in which]
    nested = lambda case: jax.vmap(jax.vmap(functools.partial(case.call, WORLD)), in_axes=-1)  # noqa: E731
    run = jax.jit(lambda operands: [nested(case)(x) for case, x in zip(which, operands, strict=True)])
    stacked = [np.stack([[xs[RANK] for xs in inner] for inner in e]) for e in elements]
    for case, e, y in zip(which, elements, run([np.moveaxis(x, 0, -1) for x in stacked]), strict=True):
        for i, inner in enumerate(e):
            check_elements(case, WORLD, inner, y[i], 0)


# Derivatives


def loss(case, x):
    y = case.call(WORLD, x)
    y = jnp.where(jnp.isinf(y), 0, y)  # what Exscan gives the first rank of MAX
    return jnp.sum(jnp.sin(y) * (RANK + 1 + jnp.arange(y.size).reshape(y.shape)))


def total(case, xs):
    out = 0.0
    for rank in range(SIZE):
        y = case.reference(xs, rank)
        y = np.where(np.isinf(y), 0, y)
        out = out + np.sum(np.sin(y) * (rank + 1 + np.arange(y.size).reshape(y.shape)))
    return out


def test_vmap_and_grad():
    """vmap of grad, and grad of vmap, against NumPy."""
    which = [case for case in COMPOSED if case in MAPPED]
    elements = [batches(WORLD, case) for case in which]

    def run(operands):
        out = []
        for case, x in zip(which, operands, strict=True):
            f = functools.partial(loss, case)
            out.append((jax.vmap(jax.grad(f))(x), jax.grad(lambda x, f=f: jnp.sum(jax.vmap(f)(x)))(x)))
        return out

    found = jax.jit(run)([np.stack([xs[RANK] for xs in e]) for e in elements])
    directions = [[[np.cos(7 * x + i) for x in xs] for i, xs in enumerate(e)] for e in elements]
    products = sums(
        WORLD,
        [(v[i][RANK], g[i]) for v, gs in zip(directions, found, strict=True) for g in gs for i in range(BATCH)],
    ).reshape(-1, 2, BATCH)
    for case, e, v, have in zip(which, elements, directions, products, strict=True):
        expected = [slope(functools.partial(total, case), xs, vs) for xs, vs in zip(e, v, strict=True)]
        # Fewer than 100 terms of at most 15 in absolute value.
        np.testing.assert_allclose(have, [expected] * 2, rtol=0, atol=1500 * rounding(WORLD), err_msg=case.name)


def test_hessian_products_under_vmap():
    case = next(case for case in CASES if case.name == "Allreduce-PROD")
    x, v = (np.stack([xs[RANK] for xs in batches(WORLD, case, 4)[i : i + 2]]) for i in (0, 2))
    f = functools.partial(loss, case)
    product = lambda x, v: jax.jvp(jax.grad(f), (x,), (v,))[1]  # noqa: E731
    reverse = lambda x, v: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x)  # noqa: E731
    one, other = jax.jit(lambda x, v: (jax.vmap(product)(x, v), jax.vmap(reverse)(x, v)))(x, v)
    loop = [jax.jit(product)(a, b) for a, b in zip(x, v, strict=True)]
    np.testing.assert_allclose(one, loop, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(other, loop, rtol=1e-12, atol=1e-13)


# Only some operands mapped


def test_only_some_operands_are_mapped():
    xs, x = np.arange(6.0).reshape(2, 3) + RANK, np.arange(3.0) - RANK
    shift = lambda x, template: WORLD.Sendrecv(x, RIGHT, 0, template, LEFT)  # noqa: E731
    theirs, their = (a if SIZE == 1 else WORLD.sendrecv(a, RIGHT, source=LEFT) for a in (xs, x))
    if SIZE == 1:
        theirs, their = np.stack([x, x]), x  # there is no neighbour: the template stays
        f = jax.jit(lambda xs, x: (jax.vmap(shift, (0, None))(xs, x), jax.vmap(shift, (None, 0))(x, xs)))
        for y, expected in zip(f(xs, x), (theirs, xs), strict=True):
            np.testing.assert_array_equal(y, expected)
        return
    f = jax.jit(lambda xs, x: (jax.vmap(shift, (0, None))(xs, x), jax.vmap(shift, (None, 0))(x, xs)))
    for y, expected in zip(f(xs, x), (theirs, np.stack([their] * 2)), strict=True):
        np.testing.assert_array_equal(y, expected)
    # A rank whose template is a constant is told by a token that there is a batch.
    root = SIZE - 1
    g = lambda x: WORLD.Bcast(x if root == RANK else jnp.zeros(3), root, token=create_token(x))[0]  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.vmap(g))(xs), WORLD.bcast(xs, root))


def test_tokens_have_batches():
    def f(x):
        token = create_token(x)
        y, token = WORLD.Allreduce(x, token=token)
        z, token = WORLD.Scan(y, token=token)
        return z, token

    z, token = jax.jit(jax.vmap(f))(np.ones((4, 2)))
    np.testing.assert_array_equal(z, np.full((4, 2), SIZE * (RANK + 1)))
    assert token.array.shape == (4, 0)


# What has no batch


def test_a_short_message_under_vmap_raises():
    """Where one element's message ends and the next begins is not told."""
    f = lambda x: WORLD.Sendrecv(x[:1], (RANK + 1) % SIZE, 0, x, (RANK - 1) % SIZE)  # noqa: E731
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmap"):
        jax.block_until_ready(jax.jit(jax.vmap(f))(np.ones((2, 3))))
    with pytest.raises((RuntimeError, MPI.Exception), match="vmap"):
        jax.vmap(f)(np.ones((2, 3)))


@pytest.mark.parametrize("name", ["dest", "source", "tag"])
def test_ranks_and_tags_of_a_batch_may_not_differ(name):
    def f(x, i):
        at = {"dest": 0, "source": 0, "sendtag": 0} | {"sendtag" if name == "tag" else name: i}
        return WORLD.Sendrecv(x, at["dest"], at["sendtag"], x, at["source"])

    with pytest.raises(NotImplementedError, match=r"mpi_sendrecv: .*lax.map"):
        jax.make_jaxpr(jax.vmap(f))(np.ones((2, 3)), np.arange(2))
    # One rank for the whole batch is well.
    jax.make_jaxpr(jax.vmap(f, (0, None)))(np.ones((2, 3)), 0)


# Control flow


def test_map_and_scan_are_loops_of_messages():
    x = np.arange(6.0).reshape(2, 3) + RANK
    mapped = lambda x: lax.map(WORLD.Allreduce, x)  # noqa: E731
    summed = lambda x: lax.scan(lambda s, t: (s + WORLD.Scan(t), WORLD.Allreduce(s)), jnp.zeros(3), x)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(mapped)(x), WORLD.allreduce(x))
    assert operations(mapped, x) == {"allreduce": 2}
    # And vmap of a scan: a loop of messages, each of which has the batch.
    (last, reduced) = jax.jit(jax.vmap(summed))(np.stack([x, 2 * x]))
    before = sum(np.arange(6.0).reshape(2, 3) + r for r in range(RANK + 1))
    np.testing.assert_array_equal(last, [before.sum(0), 2 * before.sum(0)])
    first = WORLD.allreduce(before[0])
    np.testing.assert_array_equal(reduced, [[0 * first, first], [0 * first, 2 * first]])
    assert operations(jax.vmap(summed), np.stack([x, x])) == {"scan": 2, "allreduce": 2}


def test_while_loop_under_vmap():
    """Elements that are done wait for the others; each step is one message. All ranks see the same condition."""

    def f(x):
        step = lambda c: (c[0] + 1, WORLD.Allreduce(c[1]) / SIZE + c[0])  # noqa: E731
        return lax.while_loop(lambda c: c[1] < 10, step, (0, x))

    x = np.array([0.5, 9.5, 3.0])
    steps, y = jax.jit(jax.vmap(f))(x)
    for i, start in enumerate(x):
        n, value = 0, start
        while value < 10:
            n, value = n + 1, value + n
        assert steps[i] == n
        np.testing.assert_allclose(y[i], value, rtol=1e-14)


@pytest.mark.parametrize("communicates", ["condition", "both"])
def test_while_loop_whose_condition_communicates_under_vmap(communicates):
    """As a loop over the elements: one that is done keeps its value, also in derivatives and with constants mapped."""

    def f(x, most):
        def step(s):
            y = WORLD.Allreduce(s[1]) / SIZE if communicates == "both" else s[1]
            return s[0] + 1, 2 * y

        return lax.while_loop(lambda s: WORLD.Allreduce(s[1], op=MPI.MAX) < most, step, (0, x))

    xs, most = np.array([1.0, 5.0, 300.0]), np.array([100.0, 50.0, 100.0])
    for mapped, limits in ((jax.vmap(f), most), (jax.vmap(f, in_axes=(0, None)), most[0])):
        for wrap in (jax.jit, lambda f: f):
            steps, y = wrap(mapped)(xs, limits)
            expected = [jax.jit(f)(x, limit) for x, limit in zip(xs, np.broadcast_to(limits, 3), strict=True)]
            np.testing.assert_array_equal(steps, [n for n, _ in expected])
            np.testing.assert_allclose(y, [y for _, y in expected], rtol=1e-15)
    tangent = lambda x: jax.jvp(lambda x: f(x, 100.0)[1], (x,), (1.0,))[1]  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.vmap(tangent))(xs), [128, 32, 1], rtol=1e-14)
    twice = jax.jit(jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0)))(xs, most)
    np.testing.assert_allclose(twice[1][1], [64, 80, 300], rtol=1e-14)


def test_a_condition_that_communicates_and_is_the_same_for_all_elements():
    """Then nothing of the loop is mapped that need not be: jacfwd, whose tangents alone are, and ranks computed so."""
    h = lambda b: lax.while_loop(lambda s: WORLD.Allreduce(s @ s) > 1.0, lambda s: s * 0.5, b)  # noqa: E731
    b = np.arange(1.0, 4.0)
    np.testing.assert_array_equal(jax.jit(jax.jacfwd(h))(b), np.diag(h(b) / b))

    def shift(v):
        k = lax.while_loop(lambda k: WORLD.Allreduce(k) < SIZE, lambda k: k + 1, jnp.asarray(0))
        return WORLD.Sendrecv(v, (RANK + k) % SIZE, 0, v, (RANK - k) % SIZE, 0)

    np.testing.assert_array_equal(jax.jit(jax.vmap(shift))(np.arange(4.0) + RANK), np.arange(4.0) + (RANK - 1) % SIZE)


def test_batched_condition_runs_both_branches():
    """JAX makes a select of it: every element goes through both branches, on every rank."""
    f = lambda p, x: lax.cond(p, WORLD.Allreduce, lambda x: WORLD.Scan(x) * 2, x)  # noqa: E731
    p, x = np.array([True, False]) ^ bool(RANK % 2), np.array([1.0, 2.0]) + RANK
    assert operations(jax.vmap(f), p, x) == {"allreduce": 1, "scan": 1}
    expected = np.where(p, WORLD.allreduce(x), 2 * WORLD.scan(x))
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(p, x), expected)
