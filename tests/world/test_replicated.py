"""Values that all ranks share: each gradient against one process's. The numbers of docs/differentiation.md."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import check_gradient, operations

from jaxcomm import checking, shared_value_and_grad

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size

# The pages' example: rank r has x = r + 1; all have w = 2. Rank r's loss is (w x - 1)^2 / 2.
W = jnp.float64(2)
XS = np.arange(1.0, SIZE + 1)
X = XS[RANK]


def local_loss(w, x):
    return 0.5 * (w * x - 1) ** 2


def whole_loss(w, xs=XS):
    return sum(local_loss(w, x) for x in xs)


LOSS, GRADIENT = jax.value_and_grad(whole_loss)(W)
PER_RANK = [(2 * x - 1) * x for x in XS]
on_three_ranks = pytest.mark.skipif(SIZE != 3, reason="the numbers in the documentation are for three ranks")


@on_three_ranks
def test_the_numbers_in_the_documentation():
    assert PER_RANK == [1, 6, 15]
    assert (LOSS, GRADIENT) == (17.5, 22)


def test_local_losses_summed():
    """grad is of the sum over ranks, as far as this rank's argument goes: add up what the ranks' copies get."""
    g = jax.grad(local_loss)(W, X)
    assert g == PER_RANK[RANK]
    assert WORLD.Allreduce(g) == GRADIENT


def test_a_loss_reduced_by_allreduce_counts_once_per_rank():
    """Every rank returns the total, and grad is of the sum of what they return."""
    f = lambda w: WORLD.Allreduce(local_loss(w, X))  # noqa: E731
    assert jax.jit(jax.grad(f))(W) == SIZE * PER_RANK[RANK]
    # And as one function of all copies of w:
    check_gradient(WORLD, f, np.float64(W) + RANK)


def test_shared_loss():
    f = lambda w: WORLD.Allreduce(local_loss(w, X), replicated=True)  # noqa: E731
    value, g = jax.jit(jax.value_and_grad(f))(W)
    assert (value, g) == (LOSS, PER_RANK[RANK])  # this rank's copy of w
    value, g = jax.jit(jax.value_and_grad(lambda w: f(WORLD.Pvary(w))))(W)
    assert (value, g) == (LOSS, GRADIENT)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
def test_shared_value_and_grad(jit):
    def loss(params, x, scale=1.0):
        return scale * local_loss(params["w"], x) + params["b"] * x

    params = {"w": W, "b": jnp.float64(0.5)}
    value, g = jit(shared_value_and_grad(loss, WORLD))(params, X)
    expected, gradient = jax.value_and_grad(lambda p: sum(loss(p, x) for x in XS))(params)
    assert (value, g) == (expected, gradient)
    with_aux = lambda x, params: (loss(params, x), x)  # noqa: E731
    (value, aux), (g,) = jit(shared_value_and_grad(with_aux, WORLD, argnums=(-1,), has_aux=True))(X, params)
    assert (value, aux, g) == (expected, X, gradient)
    with checking(False):  # which compares the cotangents
        counts = operations(shared_value_and_grad(loss, WORLD), params, X)
    assert sum(counts.values()) == 3  # the loss, and a message for each parameter


def test_jacobians_of_replicated_values():
    """Forward and reverse mode agree, and give the one-process Jacobian and Hessian."""
    rng = np.random.default_rng(5)
    p, shares = rng.normal(size=3), rng.normal(size=(SIZE, 2, 3))

    def f(p):
        return WORLD.Allreduce(jnp.sin(shares[RANK] @ WORLD.Pvary(p)), replicated=True)

    def whole(p):
        return sum(jnp.sin(share @ p) for share in shares)

    scalar = lambda f: lambda p: jnp.sum(f(p) ** 2)  # noqa: E731

    def everything(f):
        return lambda p: [
            jax.jacfwd(f)(p),
            jax.jacrev(f)(p),
            jax.hessian(scalar(f))(p),
            jax.jacrev(jax.grad(scalar(f)))(p),
        ]

    for have, expected in zip(jax.jit(everything(f))(p), everything(whole)(p), strict=True):
        np.testing.assert_allclose(have, expected, rtol=1e-11, atol=1e-12)


def test_jacobians_have_seeds_on_all_ranks():
    """The documentation's example: Scan. Forward moves all ranks' x, reverse pulls all ranks' results."""
    forward, reverse = jax.jit(lambda x: (jax.jacfwd(WORLD.Scan)(x), jax.jacrev(WORLD.Scan)(x)))(jnp.arange(2.0))
    np.testing.assert_array_equal(forward, (RANK + 1) * np.eye(2))
    np.testing.assert_array_equal(reverse, (SIZE - RANK) * np.eye(2))


# Mixtures of reduced and local values: CASES 2 and 4


def test_nested_reductions():
    x = np.random.default_rng([1, RANK]).normal(size=3)
    s = WORLD.Allreduce
    check_gradient(WORLD, lambda x: jnp.sum(jnp.sin(s(jnp.sin(s(jnp.sin(x)))))), x)
    check_gradient(WORLD, lambda x: jnp.sum(s(x) * s(x**2)) * (RANK + 1), x)


@on_three_ranks
def test_global_norm_scaling():
    """y_r = x_r / |x|, x = (1, 2, 2): the sum of y over ranks is 5/3."""
    x = jnp.float64([1, 2, 2][RANK])
    f = lambda x: x / jnp.sqrt(WORLD.Allreduce(x**2))  # noqa: E731
    y, g = jax.jit(jax.value_and_grad(f))(x)
    np.testing.assert_allclose(y, [1 / 3, 2 / 3, 2 / 3][RANK], rtol=1e-15)
    # d/dx_r of sum(x) / |x|: 1 / |x| - x_r sum(x) / |x|^3
    np.testing.assert_allclose(g, [4 / 27, -1 / 27, -1 / 27][RANK], rtol=1e-14)


def test_global_norm_scaling_against_one_process():
    xs = np.random.default_rng(2).normal(size=(SIZE, 3))
    weights = np.random.default_rng(3).normal(size=(SIZE, 3))
    whole = jax.grad(lambda xs: jnp.sum(weights * xs / jnp.sqrt(jnp.sum(xs**2))))(xs)
    f = lambda x: jnp.sum(weights[RANK] * x / jnp.sqrt(WORLD.Allreduce(jnp.sum(x**2))))  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(f))(xs[RANK]), whole[RANK], rtol=1e-12, atol=1e-14)


def normalised(x, total, count):
    mean = total(jnp.sum(x)) / count
    variance = total(jnp.sum((x - mean) ** 2)) / count
    return (x - mean) / jnp.sqrt(variance)


@on_three_ranks
def test_synchronised_batch_statistics():
    """x = (1, 1, 4): mean 2, variance 2, y = (-1, -1, 2) / sqrt(2). Rank r's loss is (r + 1) y."""
    weights = jnp.arange(1.0, 4.0)
    xs = jnp.array([1.0, 1.0, 4.0])
    whole = jax.grad(lambda xs: jnp.sum(weights * normalised(xs, lambda a: a, 3)))(xs)
    g = jax.jit(jax.grad(lambda x: weights[RANK] * normalised(x, WORLD.Allreduce, 3)))(xs[RANK])
    np.testing.assert_allclose(g, whole[RANK], rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(g, np.array([-0.5, 0.5, 0])[RANK] / np.sqrt(2), rtol=1e-13, atol=1e-15)


def test_synchronised_batch_statistics_with_parameters():
    """A layer with a scale that all ranks share; the loss is shared too."""
    rng = np.random.default_rng(4)
    xs, targets = rng.normal(size=(SIZE, 4)), rng.normal(size=(SIZE, 4))

    def share(scale, x, target, total):
        return jnp.sum((jnp.tanh(scale * normalised(scale + x**2, total, 4 * SIZE)) - target) ** 2)

    whole = jax.value_and_grad(lambda s: share(s, xs, targets, lambda a: a))
    value, g = jax.jit(shared_value_and_grad(share, WORLD), static_argnums=3)(
        0.7, xs[RANK], targets[RANK], WORLD.Allreduce
    )
    np.testing.assert_allclose((value, g), whole(0.7), rtol=1e-12)


def test_tensor_parallel_matmul():
    """A two-layer network, the first matrix split by columns, the second by rows: Megatron's f and g."""
    rng = np.random.default_rng(6)
    x, a, b = rng.normal(size=(4, 5)), rng.normal(size=(5, 2 * SIZE)), rng.normal(size=(2 * SIZE, 3))

    def in_one_process(x, a, b):
        return jnp.sum(jnp.sin(jnp.tanh(x @ a) @ b))

    def split(x, a, b):
        hidden = jnp.tanh(WORLD.Pvary(x) @ a)
        return jnp.sum(jnp.sin(WORLD.Allreduce(hidden @ b, replicated=True)))

    mine = slice(2 * RANK, 2 * RANK + 2)
    expected, (gx, ga, gb) = jax.value_and_grad(in_one_process, argnums=(0, 1, 2))(x, a, b)
    value, (hx, ha, hb) = jax.jit(jax.value_and_grad(split, argnums=(0, 1, 2)))(x, a[:, mine], b[mine])
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for have, want in ((hx, gx), (ha, ga[:, mine]), (hb, gb[mine])):
        np.testing.assert_allclose(have, want, rtol=1e-11, atol=1e-13)


@on_three_ranks
def test_tensor_parallel_matmul_in_numbers():
    """y = (x1 w1 + x2 w2 + x3 w3)^2 / 2 with x = (1, 2, 3), w = (1, 1, 1), one column a rank; s scales all of x."""
    x, w = jnp.float64(RANK + 1), jnp.float64(1)

    def f(s, w):
        return WORLD.Allreduce(WORLD.Pvary(s) * x * w, replicated=True) ** 2 / 2

    value, (gs, gw) = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(1.0, w)
    assert (value, gs, gw) == (18, 36, 6 * x)


# CASES 11: conjugate gradients on vectors that all ranks hold, with a matrix that is spread over them


def test_conjugate_gradients():
    rng = np.random.default_rng(7)
    parts = rng.normal(size=(SIZE, 5, 5))
    matrices = np.stack([p @ p.T / SIZE + np.eye(5) for p in parts])
    b = rng.normal(size=5)
    weights = rng.normal(size=5)

    def solve(matvec, b):
        return jax.scipy.sparse.linalg.cg(matvec, b, tol=1e-14, maxiter=20)[0]

    def split(matrix, b):
        matvec = lambda v: WORLD.Allreduce(matrix @ WORLD.Pvary(v), replicated=True)  # noqa: E731
        return jnp.vdot(weights, solve(matvec, b) ** 2)

    def whole(matrices, b):
        return jnp.vdot(weights, jnp.linalg.solve(jnp.sum(matrices, axis=0), b) ** 2)

    expected, (gm, gb) = jax.value_and_grad(whole, argnums=(0, 1))(matrices, b)
    value, (hm, hb) = jax.jit(jax.value_and_grad(split, argnums=(0, 1)))(matrices[RANK], b)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    np.testing.assert_allclose(hb, gb, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(hm, gm[RANK], rtol=1e-9, atol=1e-11)
    tangent = jax.jit(lambda b, v: jax.jvp(lambda b: split(matrices[RANK], b), (b,), (v,))[1])(b, weights)
    np.testing.assert_allclose(tangent, gb @ weights, rtol=1e-9)


def test_conjugate_gradients_with_plain_allreduce():
    """jax's cg takes the matrix to be its own adjoint, so b's gradient is that of a vector that all ranks share."""
    part = np.random.default_rng([8, RANK]).normal(size=(4, 4))
    matrix, b = part @ part.T + np.eye(4), np.random.default_rng(8).normal(size=4)

    def f(b):
        x, _ = jax.scipy.sparse.linalg.cg(lambda v: WORLD.Allreduce(matrix @ v), b, tol=1e-14, maxiter=20)
        return jnp.sum(x**2)

    y, g = jax.jit(jax.value_and_grad(f))(b)
    total = WORLD.allreduce(matrix)
    x = np.linalg.solve(total, b)
    np.testing.assert_allclose(y, np.sum(x**2), rtol=1e-10)
    np.testing.assert_allclose(g, np.linalg.solve(total, 2 * x), rtol=1e-9)
