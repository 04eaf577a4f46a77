"""Derivatives: each is that of the one function that all ranks compute together (docs/differentiation.md)."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import (
    COMPOSED,
    DIFFERENTIABLE,
    EPS,
    METHODS,
    REPRESENTATIVE,
    bend,
    of,
    operations,
    random_like,
    results,
    rounding,
    shapes,
    sizes,
    slope,
    sums,
    tangents,
)
from cases import CASES, RAGGED_METHODS, counts
from jax import lax
from mpi4py import MPI

from jaxcomm._primitives import reductions
from jaxcomm._primitives.make import bind
from jaxcomm._primitives.table import TABLE

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size

on_three_communicators = pytest.mark.parametrize("comm", ["world", "parity", "reversed"], indirect=True)
# Which rank sent, under which tag, or how much, is known only when it runs: these have a transpose only in jax.vjp.
UNTRANSPOSABLE = ("Send", "Sendrecv", "Sendrecv-any", "Sendrecv-short", "Sendrecv-ragged")


@pytest.fixture
def comm(request):
    return harness.communicator(request.param)


# First derivatives


def first_derivatives(comm, case, x, v, w):
    f = functools.partial(case.call, comm)
    y, dy = jax.jvp(f, (x,), (v,))
    z, back = jax.vjp(f, x)
    out = {"y": [y, z], "dy": [dy], "g": [back(w)[0]]}
    if jnp.iscomplexobj(x):
        return out
    out["dy"].append(jax.linearize(f, x)[1](v))
    if case.linear and case.name not in UNTRANSPOSABLE:
        transposed = lambda w: jax.linear_transpose(f, x)(w)[0]  # noqa: E731
        out["g"].append(transposed(w))
        if (
            case.method != "Ssend"
        ):  # a bare Send leaves its transpose no link to w: test_one_sided.py has it with tokens
            out["y"].append(jax.linear_transpose(transposed, w)(x)[0])
    return out


class Data:
    """Operands, tangents and cotangents of every rank for one case."""

    def __init__(self, comm, case, dtype=np.float64, xs=None):
        self.case, self.xs = case, case.operands(comm, dtype=dtype, seed=11) if xs is None else xs
        self.vs = random_like(comm, shapes(self.xs), 12, dtype)
        self.ws = random_like(comm, shapes(results(case, self.xs)), 13, dtype)
        self.rank = comm.rank

    @property
    def mine(self):
        return [jnp.asarray(a[self.rank]) for a in (self.xs, self.vs, self.ws)]


def check_first_derivatives(comm, data, found):
    """jvp against NumPy's complex step; then the dot product: sum_r <A v, w> = sum_r <v, A' w>."""
    tolerance = rounding(comm)
    pairs, scales = [], []
    for d, got in zip(data, found, strict=True):
        case, rank = d.case, comm.rank
        for y in got["y"]:
            case.check(y, d.xs, rank)
        dy, size = tangents(case, d.xs, d.vs), sizes(case, d.xs, d.vs)
        for have in got["dy"]:
            assert np.all(np.abs(have - dy[rank]) <= tolerance * size[rank]), f"{case}: {have} is not {dy[rank]}"
        pairs += [(dy[rank], d.ws[rank]), *[(d.vs[rank], g) for g in got["g"]]]
        scale = sum(float(np.sum(s * np.abs(w))) for s, w in zip(size, d.ws, strict=True))
        scales += [(case, scale, len(got["g"]))]
    products = iter(sums(comm, pairs))
    for case, scale, count in scales:
        expected = next(products)
        for _ in range(count):
            # The sums over at most 100 elements round too.
            assert abs(next(products) - expected) <= (tolerance + 100 * EPS) * scale, case


def all_first_derivatives(comm, data, wrap):
    run = lambda mine: [first_derivatives(comm, d.case, *m) for d, m in zip(data, mine, strict=True)]  # noqa: E731
    return wrap(run)([d.mine for d in data])


@pytest.mark.parametrize("method", METHODS)
@on_three_communicators
def test_first_derivatives_jitted(comm, method):
    which = of(method, DIFFERENTIABLE if comm is WORLD else REPRESENTATIVE)
    data = [Data(comm, case) for case in which]
    data += [Data(comm, case, np.complex128) for case in which if case.linear]
    check_first_derivatives(comm, data, all_first_derivatives(comm, data, jax.jit))


@pytest.mark.parametrize("method", METHODS)
@on_three_communicators
def test_first_derivatives_eager(comm, method):
    data = [Data(comm, case) for case in of(method, REPRESENTATIVE) if case.op in (None, "SUM", "MAX")]
    check_first_derivatives(comm, data, all_first_derivatives(comm, data, lambda f: f))


@pytest.mark.parametrize("method", ["Gather", "Reduce", "Pvary"])
def test_results_of_vjp_on_numpy_operands_are_jax_arrays(method):
    """Also where a rank gets its own operand back."""
    y, back = jax.vjp(getattr(WORLD, method), np.arange(3.0))
    (g,) = back(y)
    assert isinstance(y, jax.Array)
    assert isinstance(g, jax.Array)


PRODUCTS = [case for case in CASES if case.op == "PROD"]


def test_products_with_zeros():
    """In the second element one rank brings a zero; in the third that one and the next."""
    data = []
    for case in PRODUCTS:
        xs = case.operands(WORLD, seed=11)
        for rank in range(min(2, SIZE)):
            xs[rank][..., 1 + rank :] = 0
        data.append(Data(WORLD, case, xs=xs))
    check_first_derivatives(WORLD, data, all_first_derivatives(WORLD, data, jax.jit))
    check_second_derivatives(WORLD, [d for d in data if d.case.method in ("Allreduce", "Scan")])


def reduced_for(case, rank):
    """Which part of the operands is reduced for a rank."""
    before, upto = sum(counts(SIZE)[:rank]), sum(counts(SIZE)[: rank + 1])
    return {"Reduce_scatter_block": rank, "Reduce_scatter": slice(before, upto)}.get(case.method, slice(None))


def holders(case, xs, rank):
    """Per source rank: where its operand is the extremum that `rank` gets, in the shape of the result."""
    part = {"Scan": slice(rank + 1), "Exscan": slice(rank)}.get(case.method, slice(None))
    stack = np.stack([x[reduced_for(case, rank)] for x in xs])
    mine = np.zeros(stack.shape, bool)
    if stack[part].size:
        mine[part] = stack[part] == (np.max if case.op == "MAX" else np.min)(stack[part], axis=0)
    return mine


def test_extrema_are_split_evenly_among_ties():
    data, expected = [], []
    for case in (case for case in CASES if case.op in ("MAX", "MIN")):
        xs = [np.round(x) for x in case.operands(WORLD, seed=14)]
        xs = [np.where(np.arange(3) == 1, 1.0, x) for x in xs]  # in the second element all are equal
        d = Data(WORLD, case, xs=xs)
        g = np.zeros(xs[RANK].shape)
        for rank in range(SIZE):
            if case.method == "Reduce" and rank != case.root(SIZE):
                g += d.ws[rank] * (rank == RANK)  # such a rank has its own operand back
                continue
            mine = holders(case, xs, rank)
            g[reduced_for(case, rank)] += mine[RANK] / np.maximum(mine.sum(axis=0), 1) * d.ws[rank]
        data.append(d)
        expected.append(g)
    found = all_first_derivatives(WORLD, data, jax.jit)
    for got, g, d in zip(found, expected, data, strict=True):
        np.testing.assert_allclose(got["g"][0], g, rtol=0, atol=8 * EPS * sum(np.abs(w).max(initial=0) for w in d.ws))
    products = sums(WORLD, [p for got, d in zip(found, data, strict=True) for p in both_products(d, got)])
    np.testing.assert_allclose(products[::2], products[1::2], rtol=0, atol=1e4 * EPS)


def both_products(d, got):
    finite = np.isfinite(d.case.reference(d.xs, RANK))  # what Exscan gives the first rank is a constant
    return (jnp.where(finite, got["dy"][0], 0), d.ws[RANK]), (d.vs[RANK], got["g"][0])


# Second derivatives


def loss(y, w):
    return jnp.sum(jnp.sin(y) * w)


def finite(case, y):
    """What Exscan gives the first rank of MAX is infinite, and is not for arithmetic."""
    return jnp.where(jnp.isinf(y), 0, y) if case.method == "Exscan" else y


def second_derivatives(comm, case, x, v, w):
    """The same product of Hessian and v: forward over reverse, reverse over reverse, reverse over forward."""
    f = lambda x: loss(finite(case, case.call(comm, x)), w)  # noqa: E731
    return [
        jax.jvp(jax.grad(f), (x,), (v,))[1],
        jax.grad(lambda x: jnp.sum(jax.grad(f)(x) * v))(x),
        jax.grad(lambda x: jax.jvp(f, (x,), (v,))[1])(x),
    ]


def total_loss(case, ws):
    def total(xs):
        ys = results(case, xs)
        return sum(
            np.sum(np.where(np.isinf(y), 0, np.sin(np.where(np.isinf(y), 0, y))) * w)
            for y, w in zip(ys, ws, strict=True)
        )

    return total


def check_second_derivatives(comm, data):
    """Against NumPy, in a second direction; so the Hessian is also symmetric."""
    run = jax.jit(lambda mine: [second_derivatives(comm, d.case, *m) for d, m in zip(data, mine, strict=True)])
    us = [random_like(comm, shapes(d.xs), 15) for d in data]
    found = run([d.mine for d in data])
    products = sums(comm, [(u[comm.rank], h) for u, hs in zip(us, found, strict=True) for h in hs]).reshape(-1, 3)
    for d, u, have in zip(data, us, products, strict=True):
        expected = bend(total_loss(d.case, d.ws), d.xs, u, d.vs)
        scale = 1 + max(abs(expected), *np.abs(have))
        # The differences of fourth order err by h**4 = 1e-12 times a fifth derivative, those among the three by rounding.
        assert np.all(np.abs(have - have[0]) <= 1e-12 * scale), (d.case, have)
        assert np.all(np.abs(have - expected) <= 1e-8 * scale), (d.case, have, expected)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("Ssend", "Sendrecv_replace", "Barrier")])
def test_second_derivatives(method):
    check_second_derivatives(WORLD, [Data(WORLD, case) for case in of(method, REPRESENTATIVE)])


@pytest.mark.parametrize("comm", ["parity", "reversed"], indirect=True)
def test_second_derivatives_on_other_communicators(comm):
    check_second_derivatives(comm, [Data(comm, case) for case in COMPOSED])


def test_hessian_of_a_ring():
    """CASES 6. Column j moves element j of every rank's x, row i asks for that of every rank's gradient."""
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    f = lambda x: jnp.sum(jnp.sin(x) * WORLD.Sendrecv(x, right, source=left) ** 2)  # noqa: E731
    x = np.random.default_rng([31, RANK]).normal(size=3)
    theirs, mine = (WORLD.sendrecv(x, to, source=origin) for to, origin in ((right, left), (left, right)))
    # g = cos(x) theirs^2 + 2 x sin(mine), of which all three arrays move.
    diagonal = -np.sin(x) * theirs**2 + 2 * np.cos(x) * theirs + 2 * np.sin(mine) + 2 * x * np.cos(mine)
    np.testing.assert_allclose(jax.jit(jax.hessian(f))(x), np.diag(diagonal), rtol=1e-13, atol=1e-13)


# Jacobians. On each rank: forward mode moves element j of all ranks' operands at once, reverse mode pulls element i of all
# ranks' results at once.

# Not where ranks have as many elements as they please, nor where a bare Send hides that the cotangents are many.
JACOBIANS = [
    case
    for case in REPRESENTATIVE
    if case.method
    not in ("Scatter", "Gather", "Send", "Ssend", *RAGGED_METHODS, "Neighbor_allgather", "Neighbor_alltoall")
    and case.name not in ("Sendrecv-ragged", "Sendrecv-short")
]


def seeds(xs):
    """For each element: all ranks' arrays with a one there."""
    for j in range(xs[0].size):
        one = np.zeros(xs[0].size)
        one[j] = 1
        yield [one.reshape(x.shape) for x in xs]


def test_jacobians():
    data = [Data(WORLD, case) for case in JACOBIANS]
    both = lambda f, x: (jax.jacfwd(f)(x), jax.jacrev(f)(x))  # noqa: E731
    run = jax.jit(
        lambda mine: [both(functools.partial(d.case.call, WORLD), x) for d, (x, *_) in zip(data, mine, strict=True)]
    )
    for d, (forward, reverse) in zip(data, run([d.mine for d in data]), strict=True):
        moved = [tangents(d.case, d.xs, seed)[RANK] for seed in seeds(d.xs)]
        expected = np.stack(moved, axis=-1).reshape(forward.shape)
        np.testing.assert_allclose(forward, expected, rtol=1e-12, atol=1e-12, err_msg=d.case.name)
        # J[i, j]: how the sum over ranks of element i moves with this rank's element j.
        columns = []
        for seed in seeds(d.xs):
            alone = [v * (rank == RANK) for rank, v in enumerate(seed)]
            columns.append(sum(tangents(d.case, d.xs, alone)))
        expected = np.stack(columns, axis=-1).reshape(reverse.shape)
        np.testing.assert_allclose(reverse, expected, rtol=1e-12, atol=1e-12, err_msg=d.case.name)


# Composition: one program, written in many ways. Two steps, each with a message; the second one's carries on.


def term(case, y, t):
    return jnp.sum(jnp.sin(finite(case, y)) * (1 + jnp.arange(y.size).reshape(y.shape))) * t


def python_loop(f, case, x):
    total = 0.0
    for t in (0.5, 1.5):
        total = 1.1 * total + term(case, f(t * x), t)
    return total


def scan(f, case, x):
    return lax.scan(lambda s, t: (1.1 * s + term(case, f(t * x), t), None), 0.0, jnp.array([0.5, 1.5]))[0]


def while_loop(f, case, x):
    step = lambda c: (c[0] + 1, 1.1 * c[1] + term(case, f(c[0] * x), c[0]))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 2, step, (0.5, 0.0))[1]


def cond_in_scan(f, case, x):
    """Both branches communicate; all ranks take the same."""

    def step(s, t):
        y = lax.cond(t > 1, f, lambda x: f(1.0 * x), t * x)
        return 1.1 * s + term(case, y, t), None

    return lax.scan(step, 0.0, jnp.array([0.5, 1.5]))[0]


def checkpoint_in_scan(f, case, x):
    step = lambda s, t: (1.1 * s + term(case, f(t * jnp.sin(jnp.arcsin(x / 9)) * 9), t), None)  # noqa: E731
    return lax.scan(jax.checkpoint(step), 0.0, jnp.array([0.5, 1.5]))[0]


def checkpoint_with_policy(f, case, x):
    policy = jax.checkpoint_policies.save_only_these_names(*(f"mpi_{name}" for name in TABLE))
    return jax.checkpoint(scan, static_argnums=(0, 1), policy=policy)(f, case, x)


def custom_vjp(f, case, x):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: jax.vjp(f, x), lambda back, ct: back(ct))
    return python_loop(g, case, x)


def custom_jvp(f, case, x):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return python_loop(jax.jit(g), case, x)


REVERSE = [cond_in_scan, checkpoint_in_scan, checkpoint_with_policy, custom_vjp, custom_jvp]


def numpy_loop(case, xs):
    """The sum over ranks of what the program returns."""
    total = 0.0
    for t in (0.5, 1.5):
        ys = [np.where(np.isinf(y), 0, y) for y in results(case, [t * x for x in xs])]
        total = 1.1 * total + sum(np.sum(np.sin(y) * (1 + np.arange(y.size).reshape(y.shape))) for y in ys) * t
    return total


def check_programs(run, forward):
    """run: (case, x, v) -> the gradient, or in forward mode the tangent."""
    data = [Data(WORLD, case) for case in COMPOSED]
    found = jax.jit(lambda mine: [run(d.case, x, v) for d, (x, v, _) in zip(data, mine, strict=True)])(
        [d.mine for d in data]
    )
    products = sums(WORLD, [(y, 1.0) if forward else (d.vs[RANK], y) for d, y in zip(data, found, strict=True)])
    for d, have in zip(data, products, strict=True):
        expected = slope(functools.partial(numpy_loop, d.case), d.xs, d.vs)
        # The terms are of order one, weighted by up to 27, and there are fewer than 100.
        assert abs(have - expected) <= 1e4 * EPS * (1 + abs(expected)), (d.case, have, expected)


@pytest.mark.parametrize("program", REVERSE, ids=lambda f: f.__name__)
def test_reverse_through(program):
    def run(case, x, v):
        return jax.grad(functools.partial(program, functools.partial(case.call, WORLD), case))(x)

    check_programs(run, forward=False)


def test_forward_through_while_loop():
    def run(case, x, v):
        return jax.jvp(functools.partial(while_loop, functools.partial(case.call, WORLD), case), (x,), (v,))[1]

    check_programs(run, forward=True)


def test_linearize_through_while_loop():
    """What moves is linear in the loop; CASES 15."""
    f = lambda x: while_loop(functools.partial(WORLD.Allreduce), COMPOSED[0], x)  # noqa: E731
    x, v = jnp.arange(3.0) + RANK, jnp.cos(jnp.arange(3.0) + RANK)
    y, push = jax.linearize(f, x)
    z, dz = jax.jvp(f, (x,), (v,))
    np.testing.assert_allclose([y, push(v)], [z, dz], rtol=1e-14)


# What has no tangent


def test_integers_need_no_communication():
    for case in COMPOSED:
        f = functools.partial(case.call, WORLD)
        x = case.operands(WORLD, dtype=np.float64, seed=16)[RANK]
        through_integers = lambda x, f=f: jnp.sum(f(jnp.round(x).astype(int)) * x[:1]) * jnp.sum(x)  # noqa: E731
        if case.method in ("Allreduce", "Bcast", "Reduce", "Scan"):
            assert operations(jax.grad(through_integers), x) == operations(through_integers, x), case
        count = lambda x, f=f: jax.jvp(f, (x,), (np.zeros(x.shape, jax.dtypes.float0),))[0]  # noqa: E731
        whole = case.operands(WORLD, dtype=np.int64, seed=16)[RANK]
        assert operations(count, whole) == operations(f, whole), case


def test_what_has_no_derivative_says_so():
    x = np.arange(3.0)
    bitwise = lambda x: bind(TABLE["allreduce"], WORLD, [x], op=reductions.BY_NAME["BAND"])[0]  # noqa: E731
    with pytest.raises(
        NotImplementedError, match=r"mpi_allreduce with op=BAND .*SUM, PROD, MAX and MIN.*stop_gradient"
    ):
        jax.make_jaxpr(lambda x: jax.jvp(bitwise, (x,), (x,)))(x)
    maximum = lambda x: WORLD.Allreduce(x, op=MPI.MAX)  # noqa: E731
    with pytest.raises(NotImplementedError, match="mpi_allreduce"):
        jax.make_jaxpr(lambda w: jax.linear_transpose(maximum, x)(w))(x)
