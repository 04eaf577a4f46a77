"""Programs that differ between ranks: one rank sends, another receives; data on the root only; pipelines.

That a Recv depends on another rank's Send is told to differentiation by a link: the template, or a token made from what is
differentiated (docs/differentiation.md, the first sharp bit).
"""

import functools
import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import check_gradient, operations
from cases import in_turn, left, right
from jax import lax
from mpi4py import MPI

from jaxcomm import create_token
from jaxcomm.token import join

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = right(WORLD), left(WORLD)
two_ranks = pytest.mark.skipif(SIZE < 2, reason="a message to oneself may wait for its receive")


def data(*shape, seed=0):
    return np.random.default_rng([seed, RANK]).normal(size=shape)


# CASES 5: rank 0 sends f(x), rank 1 uses it. The adjoint of the Send runs, and the cotangent returns to the sender.


def by_template(x):
    if RANK == 0:
        WORLD.Send(jnp.sin(x), 1)
        return jnp.sum(x)
    if RANK == 1:
        return jnp.sum(WORLD.Recv(x, 0) ** 2)
    return jnp.sum(x)


def by_token(x):
    """The receiver's template is a constant, and the sender's result has nothing to do with the message."""
    token = create_token(x)
    if RANK == 0:
        _, token = WORLD.Send(jnp.sin(x), 1, token=token)
        return jnp.float64(1)
    if RANK == 1:
        y, token = WORLD.Recv(jax.ShapeDtypeStruct(x.shape, x.dtype), 0, token=token)
        return jnp.sum(y**2)
    return jnp.float64(1)


@two_ranks
@pytest.mark.parametrize(("program", "own"), [(by_template, 1.0), (by_token, 0.0)])
def test_send_and_receive(program, own):
    x = data(3)
    first = WORLD.bcast(x)
    expected = np.full(3, own)
    if RANK == 0:
        expected += 2 * np.sin(x) * np.cos(x)
    if RANK == 1:
        expected = np.zeros(3)
    for grad in (jax.grad(program), jax.jit(jax.grad(program))):
        np.testing.assert_allclose(grad(x), expected, rtol=1e-14)
    v = data(3, seed=1)
    _, dy = jax.jit(lambda x, v: jax.jvp(program, (x,), (v,)))(x, v)
    sent = WORLD.bcast(v)
    here = 2 * np.sin(first) * np.cos(first) @ sent if RANK == 1 else own * v.sum()
    np.testing.assert_allclose(dy, here, rtol=1e-13)


@two_ranks
@pytest.mark.parametrize(
    "gradient",
    [
        lambda f, x: jax.value_and_grad(f)(x)[1],
        lambda f, x: jax.vjp(f, x)[1](1.0)[0],
        lambda f, x: jax.linear_transpose(jax.linearize(f, x)[1], x)(1.0)[0],
        lambda f, x: jax.grad(jax.checkpoint(f))(x),
    ],
    ids=["value_and_grad", "vjp", "linearize", "checkpoint"],
)
def test_a_side_send_and_its_adjoint_run_once(gradient):
    """CASES 15: no result of rank 0 depends on its Send, and the cotangent returns to it all the same."""
    x = data(3)
    expected = np.sin(2 * x) if RANK == 0 else np.zeros(3)
    for wrap in (jax.jit, lambda f: f):
        np.testing.assert_allclose(wrap(lambda x: gradient(by_token, x))(x), expected, rtol=1e-14)
    found = operations(lambda x: gradient(by_token, x), x)
    assert found == ({"send": 1, "recv": 1} if RANK < 2 else {})


def test_an_operation_knows_that_differentiation_passes_it_by():
    """What tells of a missing link: of the three, only the last depends on x."""

    def f(x):
        WORLD.Bcast(jnp.zeros(3))
        WORLD.Allreduce(jnp.arange(3))  # integers have no derivative
        return jnp.sum(WORLD.Allreduce(x))

    def unlinked(jaxpr):
        calls = [eqn for eqn in jaxpr.eqns if "unlinked" in eqn.params]
        return [eqn.primitive.name for eqn in calls if eqn.params["unlinked"]]

    assert unlinked(jax.make_jaxpr(f)(data(3)).jaxpr) == []
    for derivative in (
        jax.grad(f),
        jax.value_and_grad(f),
        lambda x: jax.jvp(f, (x,), (x,)),
        jax.grad(jax.checkpoint(f)),
    ):
        assert unlinked(jax.make_jaxpr(derivative)(data(3)).jaxpr) == ["mpi_bcast"]


@two_ranks
def test_second_derivatives_of_send_and_receive():
    """hessian moves element j of all ranks' x at once, and takes the gradient's: the sum over ranks' second derivatives."""
    h = jax.jit(jax.hessian(by_template))(data(3))
    x = WORLD.bcast(data(3))
    np.testing.assert_allclose(h, np.diag(2 * np.cos(2 * x)) if RANK == 0 else np.zeros((3, 3)), atol=1e-14)
    _, (again,) = jax.jit(lambda x: (0, jax.grad(lambda x: jnp.sum(jax.grad(by_token)(x) ** 2), argnums=(0,))(x)))(
        data(3)
    )
    np.testing.assert_allclose(again, 2 * np.sin(2 * x) * 2 * np.cos(2 * x) if RANK == 0 else np.zeros(3), atol=1e-14)


def with_tokens(x):
    """A ring; the links make the whole of it visible on every rank, also where the Send comes last."""
    token = create_token(x)
    if RANK % 2:
        y, token = WORLD.Recv(x, LEFT, 5, token=token)
        _, token = WORLD.Send(x, RIGHT, 5, token=token)
        return join(y, token.array)
    _, token = WORLD.Send(x, RIGHT, 5, token=token)
    return WORLD.Recv(x, LEFT, 5, token=token)[0]


@two_ranks
def test_tokens_make_a_ring_of_sends_a_linear_map():
    """Transposed twice, and mapped over cotangents alone, which a bare Send does not see."""
    x, w = data(3), data(3, seed=1)
    transposed = lambda w: jax.linear_transpose(with_tokens, x)(w)[0]  # noqa: E731
    g, y = jax.jit(lambda x, w: (transposed(w), jax.linear_transpose(transposed, w)(x)[0]))(x, w)
    np.testing.assert_array_equal(g, WORLD.sendrecv(w, LEFT, source=RIGHT))
    np.testing.assert_array_equal(y, WORLD.sendrecv(x, RIGHT, source=LEFT))
    forward, reverse = jax.jit(lambda x: (jax.jacfwd(with_tokens)(x), jax.jacrev(with_tokens)(x)))(x)
    np.testing.assert_array_equal(forward, np.eye(3))
    np.testing.assert_array_equal(reverse, np.eye(3))


@two_ranks
@pytest.mark.parametrize("mode", ["template", "token"])
def test_messages_in_scan_under_grad(mode):
    """CASES 38 with derivatives: constant, scanned and carried operands; every message and its adjoint, once a step."""

    def shift(x, link, tag):
        if mode == "template":
            return in_turn(WORLD, lambda: WORLD.Send(x, RIGHT, tag), lambda: WORLD.Recv(x + 0 * link, LEFT, tag))
        token = create_token(link)
        receive = lambda: WORLD.Recv(jax.ShapeDtypeStruct(x.shape, x.dtype), LEFT, tag, token=token)[0]  # noqa: E731
        return in_turn(WORLD, lambda: WORLD.Send(x, RIGHT, tag, token=token), receive)

    def program(x, scale, combine=shift):
        # A Send of a constant would have no adjoint, and the Recv's would wait for it: the sharp bit, at its other end.
        constant = jnp.float64(RANK) + (0 * x if mode == "template" else 0)

        def step(s, t):
            y = combine(s, x, 1) * combine(t * scale, x, 2) + combine(constant, x, 3)
            return jnp.sin(y), None

        return lax.scan(step, x, jnp.arange(1.0, 6.0))[0]

    x, scale = np.float64(0.3 + RANK), np.float64(1.1 - RANK / 7)
    check_gradient(WORLD, program, x, scale)
    counts = operations(jax.value_and_grad(program, argnums=(0, 1)), x, scale)
    forward = operations(program, x, scale)
    assert forward == {"send": 15, "recv": 15}
    assert counts["send"] == counts["recv"] == 30
    for f in (program, jax.checkpoint(program)):
        _, push = jax.linearize(f, x, scale)
        a = WORLD.allreduce(float(push(1.0, 0.5)))
        gx, gs = jax.grad(f, argnums=(0, 1))(x, scale)
        np.testing.assert_allclose(a, WORLD.allreduce(float(gx + 0.5 * gs)), rtol=1e-11)


# CASES 41: the cotangent goes to the rank that really sent.


def from_any(x):
    return jnp.sum(jnp.sin(WORLD.Sendrecv(x, (RANK + 1) % SIZE, 3, recvtag=3)) * (RANK + 1))


@pytest.mark.parametrize("late", range(SIZE))
def test_ring_from_any_source(late):
    """A rank is late: its neighbour, who waits for anyone, must not take a cotangent of a rank that is ahead."""
    x = data(3)
    step = jax.jit(jax.grad(from_any)).lower(x).compile()
    WORLD.barrier()
    time.sleep(0.2 * (late == RANK))
    np.testing.assert_allclose(step(x), np.cos(x) * ((RANK + 1) % SIZE + 1), rtol=1e-14)


@two_ranks
def test_receive_from_any_source():
    """Rank 0 takes one message from each of the others, in whatever order."""

    def program(x):
        if RANK:
            WORLD.Send(x, 0, 4)
            return 0.0 * jnp.sum(x)
        return sum(jnp.sum(WORLD.Recv(x, MPI.ANY_SOURCE, 4) ** 2) for _ in range(SIZE - 1))

    x = data(3)
    np.testing.assert_allclose(jax.jit(jax.grad(program))(x), 2 * x if RANK else np.zeros(3), rtol=1e-14)


@pytest.mark.parametrize("tag", [MPI.ANY_TAG, 3], ids=["any tag", "tag"])
def test_a_wildcard_cannot_be_transposed_by_itself(tag):
    source = LEFT if tag == MPI.ANY_TAG else MPI.ANY_SOURCE
    f = lambda x: WORLD.Recv(x, source if SIZE > 1 else MPI.ANY_SOURCE, tag)  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"mpi_recv .*ANY_(SOURCE|TAG)"):
        jax.make_jaxpr(lambda w: jax.linear_transpose(f, w)(w))(data(3))


# Templates that stay, wholly or in part: so does their cotangent


def test_template_of_proc_null():
    x = data(3)
    f = lambda x: jnp.sum(jnp.sin(WORLD.Recv(x * x, MPI.PROC_NULL)))  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), 2 * x * np.cos(x * x), rtol=1e-14)
    # With a traced rank too.
    g = lambda x, source: jnp.sum(jnp.sin(WORLD.Recv(x * x, source)))  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(g))(x, MPI.PROC_NULL), 2 * x * np.cos(x * x), rtol=1e-14)


def test_template_of_a_short_message():
    """Two of five elements come; the other three are the template's. Send and receive shapes differ: CASES 40."""

    def program(x, template):
        y = WORLD.Sendrecv(x[:2], (RANK + 1) % SIZE, 6, template, (RANK - 1) % SIZE, 6, status=MPI.Status())
        return jnp.sum(jnp.sin(y) * jnp.arange(1.0, 6.0))

    gx, gt = check_gradient(WORLD, program, data(4), data(5, seed=1))
    assert np.all(gx[2:] == 0)
    assert np.all(gx[:2] != 0)
    assert np.all(gt[:2] == 0)
    assert np.all(gt[2:] != 0)
    v = data(4, seed=2)
    hvp = jax.jit(lambda x, t: jax.jvp(jax.grad(program), (x, t), (v, 0 * t))[1])
    again = jax.jit(jax.grad(lambda x, t: jnp.sum(jax.grad(program)(x, t) * v)))
    np.testing.assert_allclose(hvp(data(4), data(5, seed=1)), again(data(4), data(5, seed=1)), rtol=1e-12)


def test_traced_ranks_and_tags():
    """The cotangent takes the way back that the program found when it ran."""
    x = data(3)
    f = lambda x, d, s, t: jnp.sum(WORLD.Sendrecv(x, d, t, x, s, t) ** 3)  # noqa: E731
    g = jax.jit(jax.grad(f))
    for step in (0, 1):
        got = g(x, (RANK + step) % SIZE, (RANK - step) % SIZE, 8 + step)
        np.testing.assert_allclose(got, 3 * x**2, rtol=1e-14)


# Data on the root only


@pytest.mark.parametrize("root", sorted({0, SIZE - 1}))
def test_bcast_and_scatter_from_the_root_only(root):
    """Elsewhere the templates are constants; the differentiated array is the rank's own, and links them by a token."""

    def program(x):
        token = create_token(x)
        a, token = WORLD.Bcast(jnp.sin(x) if root == RANK else np.zeros(3), root, token=token)
        led = x * jnp.arange(1.0, SIZE + 1)[:, None]
        b, token = WORLD.Scatter(led if root == RANK else np.zeros(3), root=root, token=token)
        return jnp.sum(a * b * (RANK + 1.0))

    x = data(3)
    g = jax.jit(jax.grad(program))(x)
    weight = sum((r + 1.0) ** 2 for r in range(SIZE))
    expected = weight * (np.cos(x) * x + np.sin(x)) if root == RANK else np.zeros(3)
    np.testing.assert_allclose(g, expected, rtol=1e-13)
    check_gradient(WORLD, program, x)


def test_bcast_of_parameters_with_templates():
    """What every rank has stands in as the template, and gets a zero gradient."""
    f = lambda x: jnp.sum(WORLD.Bcast(x, SIZE - 1) ** 2 * (RANK + 1))  # noqa: E731
    x = data(3)
    expected = 2 * x * SIZE * (SIZE + 1) / 2 if RANK == SIZE - 1 else np.zeros(3)
    for grad in (jax.grad(f), jax.jit(jax.grad(f))):
        np.testing.assert_allclose(grad(x), expected, rtol=1e-14)


# A pipeline: each rank receives activations, applies its layer, sends on.


def layer(w, h):
    return jnp.tanh(h @ w)


def layers():
    return [np.random.default_rng(r).normal(size=(4, 4)) for r in range(SIZE)]


def in_one_process(ws, x):
    for w in ws:
        x = layer(w, x)
    return jnp.sum(x**2)


def stage(comm, w, x, with_token=False):
    """With a token the template may be a constant; else it must depend on what is differentiated."""
    if RANK:
        if with_token:
            x, _ = comm.Recv(jax.ShapeDtypeStruct((2, 4), np.float64), RANK - 1, token=create_token(w))
        else:
            x = comm.Recv(w[:2], RANK - 1)
    h = layer(w, x)
    if RANK < SIZE - 1:
        comm.Send(h, RANK + 1)
        return jnp.float64(0)
    return jnp.sum(h**2)


WRAPPERS = {
    "template": lambda comm: functools.partial(stage, comm),
    "token": lambda comm: functools.partial(stage, comm, with_token=True),
    "jit": lambda comm: jax.jit(functools.partial(stage, comm)),
    "cond": lambda comm: lambda w, x: lax.cond(x.size > 0, functools.partial(stage, comm), lambda w, x: 0.0, w, x),
    "cond on data": lambda comm: (
        lambda w, x: lax.cond(x[0, 0] < 9, functools.partial(stage, comm), lambda w, x: 0.0, w, x)
    ),
    "checkpoint": lambda comm: jax.checkpoint(functools.partial(stage, comm)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_pipeline(wrapper):
    x = np.random.default_rng(99).normal(size=(2, 4))
    expected, gradients = jax.value_and_grad(in_one_process)(layers(), x)
    with WORLD.Dup() as comm:  # what a wrong program leaves behind is no business of the next one
        y, g = jax.jit(jax.value_and_grad(WRAPPERS[wrapper](comm)))(layers()[RANK], x)
        harness.agree(np.allclose(g, gradients[RANK], rtol=1e-12, atol=1e-15), f"{g} is not {gradients[RANK]}")
        assert RANK < SIZE - 1 or abs(y - expected) < 1e-13


def test_pipeline_of_micro_batches():
    """Several batches in a scan."""
    xs = np.random.default_rng(98).normal(size=(3, 2, 4))
    whole = lambda ws: sum(in_one_process(ws, x) for x in xs)  # noqa: E731
    gradients = jax.grad(whole)(layers())
    f = lambda w: lax.scan(lambda s, x: (s + stage(WORLD, w, x, True), None), 0.0, jnp.asarray(xs))[0]  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(f))(layers()[RANK]), gradients[RANK], rtol=1e-12, atol=1e-15)
