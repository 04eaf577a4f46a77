"""Neighbour collectives on every kind of topology: values as the standard says them, whatever the MPI; the rest of what
holds for all operations is tested over the cases."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import check_gradient, operations, random_like, rounding, shapes, sums
from cases import NEIGHBORS, TOPOLOGIES, arrivals, edges, near_counts, topology
from mpi4py import MPI

from jaxcomm import JaxCartcomm, JaxComm, Token, create_token

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
X = jnp.asarray(np.random.default_rng(RANK).normal(size=(2, 3)))
kinds = pytest.mark.parametrize("kind", TOPOLOGIES)


def of(kind):
    return [case for case in NEIGHBORS if case.name.endswith(f"-{kind}")]


@kinds
def test_the_topologies_are_those_of_mpi(kind):
    comm = topology(WORLD, kind)
    assert comm.inoutedges == edges(kind, SIZE)[comm.rank]
    assert type(comm).__name__.startswith("Jax")


@kinds
def test_values(kind):
    which = of(kind)
    xs = [case.operands(WORLD, seed=31) for case in which]
    mine = [x[RANK] for x in xs]
    run = lambda operands: [case.call(WORLD, x) for case, x in zip(which, operands, strict=True)]  # noqa: E731
    for results in (run(mine), run([jnp.asarray(x) for x in mine]), jax.jit(run)(mine)):
        for case, y, x in zip(which, results, xs, strict=True):
            case.check(y, x, RANK)


@pytest.mark.calculus
@kinds
def test_adjoints(kind):
    """sum_r <A v, w> = sum_r <v, A' w>, of vjp, of a transpose, and of the transpose of that."""
    which = of(kind)
    vs = [case.operands(WORLD, seed=32) for case in which]
    ws = [
        random_like(WORLD, shapes([case.reference(v, r) for r in range(SIZE)]), 33)
        for case, v in zip(which, vs, strict=True)
    ]

    def run(operands):
        out = []
        for case, (v, w) in zip(which, operands, strict=True):
            f = functools.partial(case.call, WORLD)
            transposed = lambda w, f=f, v=v: jax.linear_transpose(f, v)(w)[0]  # noqa: E731
            dy = jax.jvp(f, (v,), (v,))[1]
            out.append((dy, jax.vjp(f, v)[1](w)[0], transposed(w), jax.linear_transpose(transposed, w)(v)[0]))
        return out

    mine = [(v[RANK], w[RANK]) for v, w in zip(vs, ws, strict=True)]
    for case, v, w, (dy, back, transposed, again) in zip(which, vs, ws, jax.jit(run)(mine), strict=True):
        case.check(dy, v, RANK)
        np.testing.assert_allclose(again, dy, rtol=1e-14)
        expected, *found = sums(WORLD, [(dy, w[RANK]), (v[RANK], back), (v[RANK], transposed)])
        np.testing.assert_allclose(found, expected, rtol=0, atol=100 * rounding(WORLD), err_msg=case.name)


@pytest.mark.calculus
@kinds
def test_vmap_of_gradients(kind):
    which = of(kind)
    losses = [lambda x, case=case: jnp.sum(jnp.sin(case.call(WORLD, x)) * (RANK + 1)) for case in which]
    pairs = [[case.operands(WORLD, seed=s)[RANK] for s in (34, 35)] for case in which]
    run = jax.jit(lambda ps: [jax.vmap(jax.grad(f), in_axes=1)(p) for f, p in zip(losses, ps, strict=True)])
    found = run([np.stack(pair, axis=1) for pair in pairs])
    one = jax.jit(lambda xs: [jax.grad(f)(x) for f, x in zip(losses, xs, strict=True)])
    for i in range(2):
        for g, expected in zip(found, one([pair[i] for pair in pairs]), strict=True):
            np.testing.assert_allclose(g[i], expected, rtol=1e-14)


def test_one_message_for_the_batch():
    cart = topology(WORLD, "ring")
    for f, name in ((cart.Neighbor_allgather, "neighbor_allgather"), (cart.Neighbor_alltoall, "neighbor_alltoallv")):
        assert operations(jax.vmap(f), np.zeros((4, 2, 3))) == {name: 1}
        assert operations(jax.grad(lambda x, f=f: jnp.sum(f(x))), np.zeros((2, 3)))["neighbor_alltoallv"] > 0


# Blocks from PROC_NULL: zero, or what the template has there


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("kind", ["line", "channel"])
def test_templates_keep_the_blocks_that_do_not_arrive(kind, wrap):
    cart = topology(WORLD, kind)
    found = arrivals(kind, SIZE, RANK)
    template = np.random.default_rng([1, RANK]).normal(size=(len(found), 2, 3))
    x = np.stack([X + at for at in range(len(found))])
    expected = [t if edge is None else block(edge) for t, edge in zip(template, found, strict=True)]
    ours = jnp.asarray(template)
    np.testing.assert_array_equal(wrap(lambda x, t: cart.Neighbor_alltoall(x, t))(x, ours), np.stack(expected))
    there = [2] * len(found)
    flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
    y = wrap(lambda x, t: cart.Neighbor_alltoallv(x, t, sendcounts=there, recvcounts=2))(flat(x), flat(ours))
    np.testing.assert_array_equal(y, flat(np.stack(expected)))
    expected = [t if edge is None else block((edge[0], 0)) for t, edge in zip(template, found, strict=True)]
    np.testing.assert_array_equal(wrap(lambda x, t: cart.Neighbor_allgather(x, t))(X, ours), np.stack(expected))
    y = wrap(lambda x, t: cart.Neighbor_allgatherv(x, t))(X, flat(ours))
    np.testing.assert_array_equal(y, flat(np.stack(expected)))


def block(edge):
    source, at = edge
    return np.random.default_rng(source).normal(size=(2, 3)) + at


@pytest.mark.calculus
def test_templates_are_differentiated_where_nothing_arrives():
    cart = topology(WORLD, "line")
    x, t = np.stack([X, X + 1]), np.stack([X - 1, X - 2])
    _, dt = check_gradient(WORLD, lambda x, t: jnp.sum(jnp.sin(cart.Neighbor_alltoall(x, t)) * (RANK + 1)), x, t)
    missing = [edge is None for edge in arrivals("line", SIZE, RANK)]
    np.testing.assert_allclose(dt, np.cos(t) * (RANK + 1) * np.reshape(missing, (2, 1, 1)), rtol=1e-14)


def test_specs():
    """Counts and displacements in elements; what does not arrive stays, and so do the gaps."""
    cart = topology(WORLD, "line")
    there, here = near_counts("line", RANK, SIZE)
    into = [1, 1 + here[0] + 1]
    template = np.arange(2.0 * (sum(here) + 4)).reshape(-1, 2)
    x = np.random.default_rng(RANK).normal(size=(sum(there), 2))
    spec = [jnp.asarray(template), ([2 * n for n in here], [2 * n for n in into]), MPI.DOUBLE]
    y = cart.Neighbor_alltoallv([x, [2 * n for n in there]], spec)
    packed = cart.Neighbor_alltoallv(x, sendcounts=there, recvcounts=here)
    expected = template.copy()
    for edge, n, start, part in zip(
        arrivals("line", SIZE, RANK), here, into, np.split(np.asarray(packed), np.cumsum(here)[:-1]), strict=True
    ):
        if edge is not None:
            expected[start : start + n] = part
    np.testing.assert_array_equal(y, expected)


# In programs


def test_diffusion_in_a_scan():
    """A ring of ranks with one cell each: the whole vector by NumPy."""
    cart = topology(WORLD, "ring")
    x = float(np.random.default_rng([2, RANK]).normal())
    step = lambda x, _: (x + 0.1 * (cart.Neighbor_allgather(x).sum() - 2 * x), None)  # noqa: E731
    run = lambda x: jax.lax.scan(step, x, None, 4)[0]  # noqa: E731
    whole = np.array(WORLD.allgather(x))
    for _ in range(4):
        whole = whole + 0.1 * (np.roll(whole, 1) + np.roll(whole, -1) - 2 * whole)
    np.testing.assert_allclose(jax.jit(run)(x), whole[RANK], rtol=1e-12)
    np.testing.assert_allclose(jax.jit(jax.grad(run))(x), 1, rtol=1e-12)  # the sum over the ring is conserved
    assert operations(run, x) == {"neighbor_allgather": 4}


def test_with_tokens():
    for wrap in (lambda f: f, jax.jit):
        x, y, token = wrap(through_tokens)(X)
        np.testing.assert_array_equal(x, np.stack([X] * 4))
        np.testing.assert_array_equal(y, np.concatenate([X] * 4))
        assert isinstance(token, Token)


def through_tokens(x):
    """There and back."""
    cart, token = topology(WORLD, "torus"), create_token(x)
    y, token = cart.Neighbor_allgather(x, token=token)
    y, token = cart.Neighbor_alltoall(y, token=token)
    z, token = cart.Neighbor_allgatherv(x, token=token)
    z, token = cart.Neighbor_alltoallv(z, token=token)
    return y, z, token


# Communicators


def test_a_wrapped_topology_has_its_own():
    """JaxComm(cart) duplicates; Sub and Dup make topologies too. Freed ones are refused."""
    plain = MPI.COMM_WORLD.Create_cart([SIZE, 1], [True, False])
    cart = JaxComm(plain)
    plain.Free()
    assert isinstance(cart, JaxCartcomm)
    line, copy = cart.Sub([True, False]), cart.Dup()
    compiled = jax.jit(copy.Neighbor_allgather)
    near = [(RANK - 1) % SIZE, (RANK + 1) % SIZE]
    np.testing.assert_array_equal(line.Neighbor_allgather(1.0 * RANK), near)
    np.testing.assert_array_equal(compiled(1.0 * RANK), [*near, 0, 0])
    for comm in (cart, line, copy):
        comm.Free()
    with pytest.raises(ValueError, match="was freed"):
        cart.Neighbor_allgather(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="was freed"):
        compiled(1.0 * RANK).block_until_ready()


def test_point_to_point_beside_it():
    """A topology is a communicator like others."""
    cart = topology(WORLD, "ring")
    before, after = cart.Shift(0, 1)
    f = lambda x: cart.Sendrecv(x, after, source=before) + cart.Neighbor_allgather(x)[0]  # noqa: E731
    np.testing.assert_array_equal(jax.jit(f)(1.0 + RANK), 2 * (1.0 + (RANK - 1) % SIZE))


# Errors, before MPI is entered


def raises(exception, pattern, call):
    for run in (call, jax.make_jaxpr(call)):
        with pytest.raises(exception, match=pattern):
            run()


def test_wrong_arguments():
    cart, x = topology(WORLD, "ring"), jnp.asarray(X)
    leading = r"Neighbor_alltoall: sendbuf: the leading axis must be the number of outgoing edges 2, got shape \(3, 2\)"
    raises(ValueError, leading, lambda: cart.Neighbor_alltoall(np.zeros((3, 2))))
    raises(ValueError, "Neighbor_alltoall: recvbuf is a template", lambda: cart.Neighbor_alltoall(x, x[:, :2]))
    raises(ValueError, r"Neighbor_allgather: recvbuf is .*\[2, 2, 3\]", lambda: cart.Neighbor_allgather(x, x))
    raises(ValueError, "recvcounts must have 2 elements", lambda: cart.Neighbor_allgatherv(X, recvcounts=[1, 2, 3]))
    raises(ValueError, "recvcounts must not be neg", lambda: cart.Neighbor_allgatherv(X, recvcounts=[-1, 2]))
    raises(TypeError, "recvcounts .* say how many", lambda: cart.Neighbor_alltoallv(X, sendcounts=[1, 1]))
    add_up = r"Neighbor_alltoallv: sendbuf: sendcounts are rows of axis 0 .* length 2, got \(1, 2\)"
    raises(ValueError, add_up, lambda: cart.Neighbor_alltoallv(X, sendcounts=[1, 2], recvcounts=1))
    with pytest.raises(TypeError, match="recvcounts must be Python ints, got a tracer"):
        jax.make_jaxpr(lambda n: cart.Neighbor_allgatherv(X, recvcounts=n))(np.array([1, 1]))
    assert not hasattr(WORLD, "Neighbor_allgather")
