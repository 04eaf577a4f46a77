"""Alltoallw and Neighbor_alltoallw: arrays of any shapes and dtypes, with derivatives of what is inexact."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import check_gradient, operations, rounding, sums
from cases import DTYPES, arrivals, edges, random, topology
from counting import Compilations
from mpi4py import MPI

from jaxcomm import Token, create_token

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
both = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
# What a rank sends to itself and its right-hand neighbour is inexact on every rank, whatever their number.
KINDS = ["float64", "complex64", "int16", "float32", "bool", "complex128"]
SHAPES = [(2, 3), (), (4,), (0, 2), (3, 1, 2)]


def part(source, at, seed=0, kinds=KINDS):
    """What a rank sends to another, or over an outgoing edge."""
    rng = np.random.default_rng([source, at, seed])
    return random(rng, SHAPES[(2 * source + at) % len(SHAPES)], np.dtype(kinds[(at - source) % len(kinds)]))


def sent(seed=0, kinds=KINDS):
    return [jnp.asarray(part(RANK, at, seed, kinds)) for at in range(SIZE)]


def like(kinds=KINDS):
    found = [part(source, RANK, kinds=kinds) for source in range(SIZE)]
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]


def same(found, expected):
    assert isinstance(found, list)
    for y, x in zip(found, expected, strict=True):
        assert isinstance(y, jax.Array)
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, x)


@both
def test_every_dtype(wrap):
    for first in range(0, len(DTYPES), SIZE):
        kinds = [DTYPES[(first + i) % len(DTYPES)] for i in range(SIZE)]
        received = wrap(lambda *x, kinds=kinds: WORLD.Alltoallw(x, like(kinds)))(*sent(kinds=kinds))
        same(received, [part(source, RANK, kinds=kinds) for source in range(SIZE)])


@both
def test_templates_are_arrays_too(wrap):
    templates = [jnp.ones(a.shape, a.dtype) for a in like()]
    received = wrap(lambda *x: WORLD.Alltoallw(list(x), tuple(templates)))(*sent())
    same(received, [part(source, RANK) for source in range(SIZE)])


def test_eager_calls_compile_nothing():
    WORLD.Alltoallw(sent(), like())
    x = sent(1)
    with Compilations() as compiled:
        received = WORLD.Alltoallw(x, like())
    assert compiled.count == 0
    same(received, [part(source, RANK, 1) for source in range(SIZE)])


@both
def test_tokens(wrap):
    def f(x):
        first, token = WORLD.Alltoallw(x, like(), token=create_token(x[0]))
        second, token = WORLD.Alltoallw([2 * x[0] if RANK == 0 else x[0], *x[1:]], like(), token=token)
        return first, second, token

    first, second, token = wrap(f)(sent())
    assert isinstance(token, Token)
    expected = [part(source, RANK) for source in range(SIZE)]
    same(list(first), expected)
    same(list(second), [2 * x if RANK == source == 0 else x for source, x in enumerate(expected)])


# Derivatives


def split(parts):
    """The inexact ones, and all with the inexact ones put in."""
    at = [i for i, x in enumerate(parts) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return [parts[i] for i in at], lambda moving: [moving[at.index(i)] if i in at else x for i, x in enumerate(parts)]


@pytest.mark.calculus
@both
def test_adjoints(wrap):
    """sum_r <A v, w> = sum_r <v, A' w>, with what is exact beside it."""
    moving, put = split(sent())
    f = lambda moving: split(WORLD.Alltoallw(put(moving), like()))[0]  # noqa: E731
    v = split(sent(1))[0]
    w = [jnp.asarray(random(np.random.default_rng([RANK, 9]), x.shape, np.dtype(x.dtype))) for x in f(moving)]

    def run(moving, v, w):
        y, back = jax.vjp(f, moving)
        _, dy = jax.jvp(f, (moving,), (v,))
        again = lambda w: jax.vjp(f, moving)[1](w)[0]  # noqa: E731
        return y, dy, back(w)[0], jax.linear_transpose(again, w)(v)[0]

    y, dy, g, twice = wrap(run)(moving, v, w)
    for found, seed in ((y, 0), (dy, 1), (twice, 1)):
        same(list(found), split([part(source, RANK, seed) for source in range(SIZE)])[0])
    flat = lambda parts: np.concatenate([np.ravel(x).astype(complex) for x in parts])  # noqa: E731
    one, other = sums(WORLD, [(flat(dy), flat(w)), (flat(v), flat(g))])
    # Of what float32 holds, products and sums are rounded to complex128 only.
    np.testing.assert_allclose(one, other, rtol=0, atol=1e3 * rounding(WORLD))


@pytest.mark.calculus
def test_gradients_and_second_derivatives():
    kinds = ["float64", "int32", "float64"]

    def loss(x, y):
        parts = [part(RANK, at, kinds=kinds) for at in range(SIZE)]
        parts = [a * x if a.dtype == "float64" else a % 3 for a in parts]
        found = WORLD.Alltoallw(parts, like(kinds))
        return sum(jnp.sum(jnp.sin(a * y)) for a in found) * (RANK + 1)

    x, y = np.float64(1.5 + RANK), np.float64(0.5 - RANK)
    check_gradient(WORLD, loss, x, y)
    slope = jax.grad(lambda x, y: jnp.sum(jnp.asarray(jax.grad(loss, argnums=(0, 1))(x, y)) ** 2))
    assert np.isfinite(jax.jit(slope)(x, y))
    check_gradient(WORLD, lambda x, y: jnp.sum(jnp.asarray(jax.grad(loss, argnums=(0, 1))(x, y)) ** 2), x, y)


@pytest.mark.calculus
def test_a_template_is_a_link():
    """A rank that sends nothing inexact gets a cotangent back for nothing, and the others theirs."""
    kinds = ["float64"] if RANK == 0 else ["int32"]
    parts = [random(np.random.default_rng([RANK, at]), (2,), np.dtype(kinds[0])) for at in range(SIZE)]
    templates = [np.zeros(2, "float64" if source == 0 else "int32") for source in range(SIZE)]

    def loss(x):
        out = [p * x if RANK == 0 else p for p in parts]
        found = WORLD.Alltoallw(out, [templates[0] * x, *templates[1:]])
        return jnp.sum(found[0] ** 2) * (RANK + 1)

    x = np.float64(2)
    g = jax.jit(jax.grad(loss))(x)
    expected = sum(2 * x * np.sum(p**2) * (at + 1) for at, p in enumerate(parts)) if RANK == 0 else 0
    np.testing.assert_allclose(g, expected, rtol=1e-14)


@pytest.mark.calculus
def test_vmap():
    """One message for the batch, with what is mapped and what is not."""
    seeds = range(3)
    batch = [jnp.stack([part(RANK, at, seed) for seed in seeds], axis=-1) for at in range(SIZE)]
    f = lambda *x: WORLD.Alltoallw(x, like())  # noqa: E731
    ys = jax.jit(jax.vmap(f, in_axes=-1))(*batch)
    for i, seed in enumerate(seeds):
        same([y[i] for y in ys], [part(source, RANK, seed) for source in range(SIZE)])
    assert operations(jax.vmap(f, in_axes=-1), *batch) == {"alltoallw": 1}
    rest = sent()[1:]
    first = lambda x: WORLD.Alltoallw([x, *rest], like())  # noqa: E731
    ys = jax.jit(jax.vmap(first, in_axes=-1))(batch[0])
    for i, seed in enumerate(seeds):
        same([y[i] for y in ys], [part(source, RANK, seed if RANK == 0 else 0) for source in range(SIZE)])


def test_in_a_scan():
    f = lambda x, _: (WORLD.Alltoallw(x, x), None)  # noqa: E731
    x = [jnp.full(3, RANK * 10.0 + at) for at in range(SIZE)]
    there, _ = jax.jit(lambda x: jax.lax.scan(f, x, None, 3))(x)
    same(there, [np.full(3, source * 10.0 + RANK) for source in range(SIZE)])
    assert operations(lambda x: jax.lax.scan(f, x, None, 3), x) == {"alltoallw": 3}


# Neighbours


@both
@pytest.mark.parametrize("kind", ["line", "torus", "digraph"])
def test_neighbors(kind, wrap):
    comm = topology(WORLD, kind)
    x = [part(RANK, at) for at in range(len(edges(kind, SIZE)[RANK][1]))]
    found = arrivals(kind, SIZE, RANK)
    templates = [jnp.full(2, 7.0) if edge is None else jnp.zeros_like(part(*edge)) for edge in found]
    received = wrap(lambda *x: comm.Neighbor_alltoallw([jnp.asarray(a) for a in x], templates))(*x)
    same(list(received), [np.full(2, 7.0) if edge is None else part(*edge) for edge in found])


@pytest.mark.calculus
def test_gradient_of_neighbors():
    comm = topology(WORLD, "line")

    def loss(x):
        y = comm.Neighbor_alltoallw([x[:1], jnp.sin(x)], [jnp.zeros(3), x[:1]])
        return jnp.sum(y[0] ** 2) + jnp.sum(y[1] * (RANK + 1))

    check_gradient(WORLD, loss, np.random.default_rng(RANK).normal(size=3))


# Message specs


def test_specs_of_one_buffer():
    counts, displs = [2] * SIZE, [16 * (SIZE - r) for r in range(SIZE)]
    x = np.random.default_rng(RANK).normal(size=2 * SIZE + 2)
    # By NumPy: Open MPI 5.0's own Alltoallw leaves out what a rank that is alone sends to itself.
    theirs, mine = np.zeros(2 * SIZE + 2), np.zeros(2 * SIZE + 2)
    types, here = [MPI.DOUBLE] * SIZE, displs[RANK] // 8
    for r in range(SIZE):
        theirs[displs[r] // 8 :][:2] = np.random.default_rng(r).normal(size=2 * SIZE + 2)[here : here + 2]
    for template in (jnp.asarray(mine), jax.ShapeDtypeStruct(mine.shape, mine.dtype)):
        f = lambda x, t=template: WORLD.Alltoallw([x, (counts, displs), types], [t, counts, displs, types])  # noqa: E731
        np.testing.assert_array_equal(f(jnp.asarray(x)), theirs)
        np.testing.assert_array_equal(jax.jit(f)(x), theirs)
    check_gradient(WORLD, lambda x: jnp.sum(f(x) ** 2) * (RANK + 1), x)
    cart = topology(WORLD, "ring")
    spec = ([1, 1], [0, 8]), [MPI.DOUBLE] * 2
    y = cart.Neighbor_alltoallw([jnp.asarray(x[:2]), *spec], [jnp.zeros(2), *spec])
    np.testing.assert_array_equal(y, cart.Neighbor_alltoall(x[:2]))


# Errors


def raises(exception, pattern, call):
    for run in (call, jax.make_jaxpr(call)):
        with pytest.raises(exception, match=pattern):
            run()


def test_wrong_arguments():
    x = [jnp.zeros(2)] * SIZE
    few = [jnp.zeros(2)] * (SIZE + 1)
    raises(ValueError, f"Alltoallw: sendbuf must be a list of {SIZE} arrays", lambda: WORLD.Alltoallw(few, x))
    raises(ValueError, f"Alltoallw: recvbuf must be a list of {SIZE} arrays", lambda: WORLD.Alltoallw(x, few))
    raises(TypeError, "Alltoallw: recvbuf must be a list of .* arrays.*NoneType", lambda: WORLD.Alltoallw(x, None))
    nothing = [*x[1:], None]
    raises(TypeError, rf"Alltoallw: sendbuf\[{SIZE - 1}\] must be an array", lambda: WORLD.Alltoallw(nothing, x))
    raises(TypeError, rf"Alltoallw: recvbuf\[{SIZE - 1}\] must be an array", lambda: WORLD.Alltoallw(x, nothing))
    texts = [*x[1:], np.array("text")]
    raises(TypeError, r"sendbuf\[\d\]: dtype <U4 is not supported", lambda: WORLD.Alltoallw(texts, x))
    one, counts = jnp.zeros(SIZE), [1] * SIZE
    spec = lambda displs, types: [one, (counts, displs), types]  # noqa: E731
    good = spec([8 * r for r in range(SIZE)], [MPI.DOUBLE] * SIZE)
    wrong = spec([8 * r for r in range(SIZE)], [MPI.FLOAT] * SIZE)
    raises(TypeError, "Alltoallw: sendbuf: the datatype of an array", lambda: WORLD.Alltoallw(wrong, good))
    odd = spec([8 * r + 1 for r in range(SIZE)], [MPI.DOUBLE] * SIZE)
    raises(ValueError, "recvbuf: displacements are bytes, here multiples of 8", lambda: WORLD.Alltoallw(good, odd))


@pytest.mark.skipif(SIZE < 2, reason="two groups")
def test_between_two_groups():
    """The parts are those of the other group's ranks."""
    side, others = int(RANK > 0), range(1) if RANK else range(1, SIZE)
    inter = WORLD.Split(side, RANK).Create_intercomm(0, WORLD, 1 - side, 6)
    x = [jnp.asarray(part(RANK, other)) for other in others]
    expected = [part(other, RANK) for other in others]
    templates = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in expected]
    f = lambda x: inter.Alltoallw(x, templates)  # noqa: E731
    same(f(x), expected)
    same(jax.jit(f)(x), expected)
    inter.Free()


# In two halves


@both
def test_nonblocking(wrap):
    def f(*x):
        request = WORLD.Ialltoallw(list(x), like())
        return request.Wait()

    same(wrap(f)(*sent(1)), [part(source, RANK, 1) for source in range(SIZE)])
    request = jax.jit(lambda *x: WORLD.Ialltoallw(list(x), like()))(*sent(2))
    same(jax.jit(lambda request: request.Wait())(request), [part(source, RANK, 2) for source in range(SIZE)])
    with pytest.raises(Exception, match="waited for before"):
        jax.block_until_ready(request.Wait())


@pytest.mark.calculus
def test_derivatives_of_the_nonblocking_form():
    """Those of the blocking one; under vmap too."""

    def parts_of(x):
        return [(x * (i + 1))[: 1 + (RANK + i) % 2] if i != RANK else jnp.arange(3) for i in range(SIZE)]

    def templates(x):
        return [jnp.resize(x, 1 + (r + RANK) % 2) if r != RANK else jnp.zeros(3, int) for r in range(SIZE)]

    def loss(exchange, x):
        ys = exchange(parts_of(x), templates(x))
        return sum(jnp.sum(jnp.sin(y) * (RANK + 1)) for r, y in enumerate(ys) if r != RANK) + jnp.sum(x**2)

    x = jnp.arange(2.0) + RANK
    whole = lambda x: loss(WORLD.Alltoallw, x)  # noqa: E731
    split = lambda x: loss(lambda a, b: WORLD.Ialltoallw(a, b).Wait(), x)  # noqa: E731
    for transform in (
        jax.grad,
        lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
        lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1],
        lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
        lambda f: lambda x: jax.grad(lambda b: jnp.sum(jax.vmap(f)(b)))(jnp.stack([x, 2 * x])),
    ):
        np.testing.assert_allclose(jax.jit(transform(split))(x), jax.jit(transform(whole))(x), rtol=1e-13)


def test_nonblocking_among_neighbors():
    cart = WORLD.Create_cart([SIZE], [False])
    x = [jnp.full(2, RANK + 0.5), jnp.arange(3) + RANK]
    templates = [jnp.full(3, -1), jnp.full(2, -2.0)]  # from the left comes what it sent to its right
    for exchange in (cart.Ineighbor_alltoallw, jax.jit(lambda a, b: cart.Ineighbor_alltoallw(a, b))):
        same(exchange(x, templates).Wait(), cart.Neighbor_alltoallw(x, templates))
