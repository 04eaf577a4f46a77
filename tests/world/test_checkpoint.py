"""jax.checkpoint: what is communicated again, and what is not. CASES 13."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import check_gradient, operations
from jax import lax

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
X = np.random.default_rng([1, RANK]).normal(size=3)
policies = jax.checkpoint_policies


def block(x):
    """Two reductions, whose results the derivative needs."""
    return jnp.sum(jnp.sin(WORLD.Allreduce(jnp.sin(WORLD.Allreduce(x * x)))))


def deep(x):
    return lax.scan(lambda x, t: (jnp.sin(WORLD.Allreduce(x * t)) / SIZE, None), x, jnp.arange(1.0, 4.0))[0].sum()


def with_bcast(x):
    return jnp.sum(jnp.sin(WORLD.Allreduce(jnp.sin(WORLD.Bcast(x * x, SIZE - 1)))))


POLICIES = {
    "none": None,
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "names": policies.save_only_these_names("mpi_allreduce", "mpi_bcast"),
    "other names": policies.save_only_these_names("something"),
    "any names": policies.save_any_names_but_these(),
}
"""Whatever the policy: JAX keeps the results of effectful operations, and never runs these again."""


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_and_counts(policy):
    functions = (block, with_bcast)
    expected = jax.jit(lambda x: [jax.grad(f)(x) for f in functions])(X)
    saved = [jax.checkpoint(f, policy=POLICIES[policy]) for f in functions]
    grads = lambda x: [jax.grad(f)(x) for f in saved]  # noqa: E731
    for found in (jax.jit(grads)(X), grads(X)):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    # Each operation once forward, its adjoint once backward.
    assert operations(jax.grad(saved[0]), X) == {"allreduce": 4}
    assert operations(jax.grad(saved[1]), X) == {"bcast": 1, "reduce": 1, "allreduce": 2}


@pytest.mark.parametrize("policy", ["none", "names"])
def test_in_scan(policy):
    """The same order of messages on all ranks, whatever is computed again."""
    whole = jax.checkpoint(deep, policy=POLICIES[policy])
    step = jax.checkpoint(
        lambda x, t: (jnp.sin(WORLD.Allreduce(x * t)) / SIZE, None), policy=POLICIES[policy], prevent_cse=False
    )
    steps = lambda x: lax.scan(step, x, jnp.arange(1.0, 4.0))[0].sum()  # noqa: E731
    expected = jax.jit(jax.grad(deep))(X)
    assert operations(jax.grad(deep), X) == {"allreduce": 6}
    for f in (whole, steps, jax.checkpoint(steps)):
        np.testing.assert_allclose(jax.jit(jax.grad(f))(X), expected, rtol=1e-12, atol=1e-14)
        assert operations(jax.grad(f), X) == {"allreduce": 6}


def test_second_derivatives():
    v = np.cos(X)
    product = lambda f: jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (v,))[1])(X)  # noqa: E731
    np.testing.assert_allclose(product(jax.checkpoint(block)), product(block), rtol=1e-11, atol=1e-13)
    check_gradient(WORLD, lambda x: jnp.sum(jax.grad(jax.checkpoint(block))(x) * v), X)


def test_names_reach_policies():
    """A policy sees mpi_<op>: it could offload, or count, what is communicated."""
    seen = []

    def policy(primitive, *_, **params):
        if primitive.name == "name":
            seen.append(params["name"])
        return False

    jax.make_jaxpr(jax.grad(jax.checkpoint(with_bcast, policy=policy)))(X)
    assert {"mpi_bcast", "mpi_allreduce"} <= set(seen)
