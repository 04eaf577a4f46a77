"""jaxcomm.jit: jax.jit's meaning, without its effect on the cost of a call."""

import functools
import warnings
from contextlib import suppress

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, in_turn, slow
from counting import Compilations, messages
from jax import lax
from mpi4py import MPI

import jaxcomm
from jaxcomm._primitives import _compat

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
X = np.random.default_rng([5, RANK]).normal(size=3)
TOTAL = WORLD.allreduce(X)
several_ranks = pytest.mark.skipif(SIZE == 1, reason="a message to oneself may wait for its receive")


def test_every_operation():
    """Twice, with other data; the second time nothing is compiled, and no call takes JAX's slow path."""
    which = [case for case in CASES if case.defined_for("float64")]
    together = jaxcomm.jit(lambda operands: [c.call(WORLD, x) for c, x in zip(which, operands, strict=True)])
    for seed in range(2):
        xs = [case.operands(WORLD, seed=seed) for case in which]
        with Compilations() as compiled:
            results = together([x[RANK] for x in xs])
        for case, y, x in zip(which, results, xs, strict=True):
            case.check(y, x, RANK)
    assert compiled.count == 0


def test_calls_have_no_effect_for_jax(monkeypatch):
    """JAX dispatches a program with effects in Python, where it asks for the runtime token."""

    def refuse(*args):
        raise AssertionError("slow path")

    f = jaxcomm.jit(lambda x: WORLD.Allreduce(x))
    f(X)
    monkeypatch.setattr(type(_compat.runtime_tokens), "get_token_input", refuse)
    np.testing.assert_allclose(f(X), TOTAL, rtol=1e-14)
    with pytest.raises(AssertionError, match="slow path"):
        jax.jit(lambda x: WORLD.Allreduce(x))(X)


# jax.jit's arguments


def test_static_arguments():
    @functools.partial(jaxcomm.jit, static_argnums=(0, 2))
    def by_number(comm, x, op):
        return comm.Allreduce(x, op=op.value)

    @jaxcomm.jit(static_argnames=("op", "name"))
    def by_name(x, op="SUM", *, name="x"):
        return {name: WORLD.Allreduce(x, op=getattr(MPI, op))}

    class Op:
        """Hashable, which mpi4py's are not."""

        def __init__(self, value):
            self.value = value

    maximum = Op(MPI.MAX)
    np.testing.assert_allclose(by_number(WORLD, X, maximum), WORLD.Allreduce(X, op=MPI.MAX))
    # jax.jit finds the name of a static position and the position of a static name.
    np.testing.assert_allclose(by_number(WORLD, X, op=maximum), WORLD.Allreduce(X, op=MPI.MAX))
    np.testing.assert_allclose(by_name(X)["x"], TOTAL, rtol=1e-14)
    np.testing.assert_allclose(by_name(X, "MIN", name="y")["y"], WORLD.Allreduce(X, op=MPI.MIN))
    with Compilations() as again:
        by_name(X, "MIN", name="y")
        by_number(WORLD, X + 1, maximum)
    assert again.count == 0


@pytest.mark.parametrize("options", [{"donate_argnums": 1}, {"donate_argnames": "x"}])
def test_donated_arguments(options):
    f = jaxcomm.jit(lambda scale, x: scale * WORLD.Allreduce(x), **options)
    x = jnp.array(X)
    np.testing.assert_allclose(f(2.0, x), 2 * TOTAL, rtol=1e-14)
    assert x.is_deleted()


def test_pytrees_keywords_defaults_and_methods():
    class Solver:
        def __init__(self, comm):
            self.comm = comm

        @functools.partial(jaxcomm.jit, static_argnums=0)
        def step(self, state, *, dt=0.5):
            """A step."""
            return {"x": state["x"] + dt * self.comm.Allreduce(state["x"]), "n": state["n"] + 1}, None

    state, nothing = Solver(WORLD).step({"x": X, "n": 0}, dt=0.25)
    np.testing.assert_allclose(state["x"], X + 0.25 * TOTAL, rtol=1e-14)
    assert (int(state["n"]), nothing) == (1, None)
    assert Solver.step.__doc__ == "A step."
    assert Solver.step.__name__ == "step"


def test_weak_types_and_dtypes_are_those_of_jit():
    f = lambda x, y: (x + 1, WORLD.Allreduce(y), jnp.arange(3) * x)  # noqa: E731
    for x in (1, 1.0, np.float32(1), jnp.int8(1)):
        for mine, theirs in zip(jaxcomm.jit(f)(x, X), jax.jit(f)(x, X), strict=True):
            assert (mine.dtype, mine.weak_type, mine.committed) == (theirs.dtype, theirs.weak_type, theirs.committed)


def test_a_tree_of_500_leaves():
    """CASES 48."""
    f = jaxcomm.jit(lambda tree: {k: v + WORLD.Allreduce(tree["0"]) for k, v in tree.items()})
    tree = {str(i): X + i for i in range(500)}
    for _ in range(2):
        result = f(tree)
    for i in (0, 250, 499):
        np.testing.assert_allclose(result[str(i)], X + i + TOTAL, rtol=1e-14)


def test_attributes():
    f = jaxcomm.jit(lambda x: WORLD.Allreduce(x))
    compiled = f.lower(X).compile()
    for _ in range(3):
        np.testing.assert_allclose(compiled(X), TOTAL, rtol=1e-14)
    assert f.eval_shape(X).shape == (3,)
    assert "mpi_allreduce" in str(f.trace(X).jaxpr)
    f.clear_cache()
    np.testing.assert_allclose(f(X), TOTAL, rtol=1e-14)
    with jax.disable_jit():
        np.testing.assert_allclose(f(X), TOTAL, rtol=1e-14)


# Inside other transformations


def test_composition():
    f = jaxcomm.jit(lambda x: jnp.sum(jnp.sin(WORLD.Allreduce(x))))
    plain = lambda x: jnp.sum(jnp.sin(WORLD.Allreduce(x)))  # noqa: E731
    xs = np.stack([X, 2 * X])
    ways = {
        "jit": (lambda f: jax.jit(f), X),
        "jaxcomm.jit": (lambda f: jaxcomm.jit(lambda x: f(x) + 1), X),
        "grad": (jax.grad, X),
        "jaxcomm.jit(grad)": (lambda f: jaxcomm.jit(jax.grad(f)), X),
        "hessian": (lambda f: jax.jit(jax.hessian(f)), X),
        "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,))[1], X),
        "vmap": (jax.vmap, xs),
        "jaxcomm.jit(vmap)": (lambda f: jaxcomm.jit(jax.vmap(f)), xs),
        "scan": (lambda f: lambda xs: lax.scan(lambda s, x: (s + f(x), f(s * x)), 0.0, xs), xs),
        "checkpoint": (lambda f: jax.grad(jax.checkpoint(f)), X),
    }
    for name, (wrap, x) in ways.items():
        found, expected = jax.tree.leaves(wrap(f)(x)), jax.tree.leaves(wrap(plain)(x))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, err_msg=name)


def test_control_flow_inside():
    def f(x):
        x = lax.fori_loop(0, 3, lambda i, x: WORLD.Allreduce(x) / SIZE, x)
        x = lax.while_loop(lambda x: jnp.abs(x[0]) < 0, WORLD.Allreduce, x)
        return lax.cond(SIZE > 0, WORLD.Allreduce, lambda x: x, x)

    np.testing.assert_allclose(jaxcomm.jit(f)(X), TOTAL, rtol=1e-14)


def test_other_effects_stay(capfd):
    def f(x):
        jax.debug.print("first", ordered=True)
        y = WORLD.Allreduce(x)
        jax.debug.print("second", ordered=True)
        return y

    for jit in (jax.jit, jaxcomm.jit):
        g = jit(f)
        for _ in range(2):
            np.testing.assert_allclose(g(X), TOTAL, rtol=1e-14)
        jax.effects_barrier()
        assert capfd.readouterr().out.split() == ["first", "second"] * 2


# Program order among all ways of calling


def send(x, tag):
    WORLD.Send(x, RIGHT, tag)


WAYS = [
    jaxcomm.jit(lambda x: send(slow(x), 1)),
    jax.jit(lambda x: send(slow(x), 2)),
    lambda x: send(x, 3),
    jaxcomm.jit(lambda x: send(x, 4)),
    jax.jit(lambda x: send(x, 5)),
    jaxcomm.jit(lambda x: jax.jit(send, static_argnums=1)(slow(x), 6)),
]


@several_ranks
def test_order_among_jit_jaxcomm_jit_and_eager_calls():
    rng = np.random.default_rng(17)
    order = rng.integers(0, len(WAYS), 40)
    for i, way in enumerate(order):
        WAYS[way](jnp.float64(i))
    assert messages(WORLD) == [(way + 1, i) for i, way in enumerate(order)]
    with Compilations() as again:
        for i, way in enumerate(order):
            WAYS[way](jnp.float64(i))
            if i % 5 == 0:
                jax.effects_barrier()
    assert again.count == 0
    assert messages(WORLD) == [(way + 1, i) for i, way in enumerate(order)]


@several_ranks
def test_hot_potato():
    """CASES 8: what one rank sends, the next needs for its own message; each call leaves before the last has ended."""

    @jaxcomm.jit
    def turn(x):
        return in_turn(WORLD, lambda: send(slow(x), 9), lambda: WORLD.Recv(x, LEFT, 9)) + 1

    x = jnp.float64(RANK)
    for _ in range(20):
        x = turn(x)
    assert float(x) == (RANK - 20) % SIZE + 20


def test_effects_barrier_waits():
    """The runtime token is JAX's own."""
    f = jaxcomm.jit(lambda x: WORLD.Barrier())
    f(X)
    jax.effects_barrier()
    assert not _compat.runtime_tokens.current_tokens


# What goes wrong


def test_an_error_reaches_the_caller_and_the_next_program_works():
    f = jaxcomm.jit(lambda x, dest: WORLD.Sendrecv(x, dest, 0, x, RANK))
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"rank {RANK} of {SIZE}, .*at .*test_jit.py.*dest must be"):
        f(X, SIZE).block_until_ready()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        np.testing.assert_allclose(jaxcomm.jit(lambda x: WORLD.Allreduce(x))(X), TOTAL, rtol=1e-14)
        with suppress(jax.errors.JaxRuntimeError):
            f(X, SIZE)
        np.testing.assert_allclose(jax.jit(lambda x: WORLD.Allreduce(x))(X), TOTAL, rtol=1e-14)


def test_an_error_that_nobody_reads_is_a_warning():
    f = jaxcomm.jit(lambda x, dest: WORLD.Send(slow(x), dest))
    f(X, SIZE)  # goes on elsewhere
    with pytest.warns(RuntimeWarning, match="earlier program failed.*dest must be"):
        total = jaxcomm.jit(lambda x: WORLD.Allreduce(x))(X)
    np.testing.assert_allclose(total, TOTAL, rtol=1e-14)
    f(X, SIZE)
    with pytest.raises(jax.errors.JaxRuntimeError, match="dest must be"):
        jaxcomm.flush()


def test_wrong_arguments_raise_as_in_jit():
    with pytest.raises(TypeError, match="root must be a Python int, got a tracer"):
        jaxcomm.jit(lambda x, root: WORLD.Bcast(x, root))(X, 0)
    with pytest.raises(TypeError):
        jaxcomm.jit(lambda x: x)(object())
    np.testing.assert_allclose(jaxcomm.jit(lambda x: WORLD.Allreduce(x))(X), TOTAL, rtol=1e-14)
