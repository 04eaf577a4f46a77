"""Halo exchange: a block of the padded whole array, which NumPy pads."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import check_gradient, operations
from mpi4py import MPI

from jaxcomm import halo_exchange

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
PERIODS = [(True, True), (False, True), (True, False), (False, False)]
CARTS = {periods: WORLD.Create_cart(MPI.Compute_dims(SIZE, 2), periods) for periods in PERIODS}
LINE, RING = WORLD.Create_cart([SIZE], [False]), WORLD.Create_cart([SIZE], [True])


def bounds(n, parts, i):
    return n * i // parts, n * (i + 1) // parts


def whole(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def block(array, cart, axes=(0, 1)):
    index = [slice(None)] * array.ndim
    for axis, parts, i in zip(axes, cart.dims, cart.coords, strict=False):
        index[axis] = slice(*bounds(array.shape[axis], parts, i))
    return array[tuple(index)]


def padded(array, cart, widths, modes, axes=(0, 1), **more):
    """This rank's block of the padded array, by NumPy."""
    index = [slice(None)] * array.ndim
    for axis, parts, i, period, width, mode in zip(
        axes, cart.dims, cart.coords, cart.periods, widths, modes, strict=False
    ):
        start, stop = bounds(array.shape[axis], parts, i)
        index[axis] = slice(start, stop + sum(width))
        pads = [(0, 0)] * array.ndim
        pads[axis] = width
        array = (
            np.pad(array, pads, "wrap") if period else np.pad(array, pads, mode, **more if mode == "constant" else {})
        )
    return array[tuple(index)]


@pytest.mark.parametrize("periods", PERIODS)
def test_every_mode_of_a_grid(periods):
    """Blocks of different sizes, corners included."""
    cart, a = CARTS[periods], whole(13, 11)
    modes = ["constant", "edge", "reflect", "symmetric"]
    run = lambda x: [halo_exchange(x, cart, 2, mode=mode) for mode in modes]  # noqa: E731
    for results in (run(block(a, cart)), jax.jit(run)(block(a, cart))):
        for y, mode in zip(results, modes, strict=True):
            np.testing.assert_array_equal(y, padded(a, cart, [(2, 2)] * 2, [mode] * 2), err_msg=mode)


def test_widths_modes_and_values_of_each_axis():
    cart, a = CARTS[False, False], whole(9, 12, 2)
    f = lambda x: halo_exchange(x, cart, [(0, 2), 3], mode=["edge", "constant"], constant_values=7)  # noqa: E731
    expected = padded(a, cart, [(0, 2), (3, 3)], ["edge", "constant"], constant_values=7)
    np.testing.assert_array_equal(jax.jit(f)(block(a, cart)), expected)
    np.testing.assert_array_equal(halo_exchange(block(a, cart), cart, (0, 0)), block(a, cart))
    sent = operations(lambda x: halo_exchange(x, cart, [0, (1, 0)]), block(a, cart))
    assert sent == {"sendrecv": 1}


def test_axes_of_the_array():
    cart, a = CARTS[True, False], whole(3, 8, 10)
    x = block(a, cart, (2, 1))
    for axes in ((2, 1), (-1, -2)):
        y = jax.jit(lambda x, axes=axes: halo_exchange(x, cart, axes=axes, mode="edge"))(x)
        np.testing.assert_array_equal(y, padded(a, cart, [(1, 1)] * 2, ["edge"] * 2, (2, 1)))


def test_three_dimensions():
    cart = WORLD.Create_cart(MPI.Compute_dims(SIZE, 3), [True, False, True])
    a = whole(8, 6, 5)
    y = halo_exchange(block(a, cart, range(3)), cart, mode="symmetric")
    np.testing.assert_array_equal(y, padded(a, cart, [(1, 1)] * 3, ["symmetric"] * 3, range(3)))
    cart.Free()


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool", "bfloat16", "uint2"])
def test_dtypes(dtype):
    a = (10 * whole(3 * SIZE + 1)).astype(dtype)
    for cart in (LINE, RING):
        y = halo_exchange(block(a, cart, (0,)), cart, mode="edge")
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, padded(a, cart, [(1, 1)], ["edge"], (0,)))


def test_a_function_of_the_border():
    """Linear extrapolation, by a function that sees the block and the side."""

    def extrapolated(x, axis, side):
        first, second = (x[0], x[1]) if side < 0 else (x[-1], x[-2])
        assert axis == 0
        return (2 * first - second)[None]

    a = 3.0 * np.arange(-1, 3 * SIZE + 1)
    y = jax.jit(lambda x: halo_exchange(x, LINE, mode=extrapolated))(block(a[1:-1], LINE, (0,)))
    np.testing.assert_allclose(y, a[3 * RANK : 3 * RANK + 5], rtol=1e-14)


# Transformations


def laplacian(cart, x, mode="edge"):
    y = halo_exchange(x, cart, mode=mode)
    return y[2:, 1:-1] + y[:-2, 1:-1] + y[1:-1, 2:] + y[1:-1, :-2] - 4 * x


@pytest.mark.calculus
@pytest.mark.parametrize("periods", PERIODS)
def test_diffusion_in_a_scan(periods):
    cart, a = CARTS[periods], whole(8, 9)
    step = lambda x, _: (x + 0.1 * laplacian(cart, x), None)  # noqa: E731
    x, _ = jax.jit(lambda x: jax.lax.scan(step, x, None, 5))(block(a, cart))
    for _ in range(5):
        p = a
        for axis, period in enumerate(periods):
            p = np.pad(p, [(int(i == axis),) * 2 for i in range(2)], "wrap" if period else "edge")
        a = a + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * a)
    np.testing.assert_allclose(x, block(a, cart), rtol=1e-12)


@pytest.mark.calculus
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_gradients(mode):
    cart = CARTS[False, True]
    x = block(whole(9, 11), cart)
    weight = np.random.default_rng([5, RANK]).normal(size=(x.shape[0] + 4, x.shape[1] + 2))
    loss = lambda x: jnp.sum(jnp.sin(halo_exchange(x, cart, (2, 1), mode=mode)) * weight)  # noqa: E731
    check_gradient(WORLD, loss, x)


@pytest.mark.calculus
def test_the_value_at_the_border_is_differentiated():
    x = block(whole(4 * SIZE), LINE, (0,))
    loss = lambda x, v: jnp.sum(halo_exchange(x, LINE, 2, constant_values=v) ** 2)  # noqa: E731
    _, dv = check_gradient(WORLD, loss, x, np.float64(0.5))
    np.testing.assert_allclose(dv, 2 * ((RANK == 0) + (RANK == SIZE - 1)), rtol=1e-14)


@pytest.mark.calculus
def test_the_second_derivative():
    """Of an energy: the Hessian of a quadratic form is linear, and symmetric."""
    cart = CARTS[False, True]
    energy = lambda x: jnp.sum(jnp.sum(x**2) * laplacian(cart, x) ** 2)  # noqa: E731
    x, u, v = (block(whole(8, 9, seed=s), cart) for s in range(3))
    product = jax.jit(lambda x, v: jax.jvp(jax.grad(energy), (x,), (v,))[1])
    one, other = WORLD.allreduce(np.array([np.vdot(u, product(x, v)), np.vdot(v, product(x, u))]))
    np.testing.assert_allclose(one, other, rtol=1e-10)


@pytest.mark.calculus
def test_vmap():
    cart = CARTS[True, False]
    a = whole(3, 8, 9)
    xs = np.stack([block(each, cart) for each in a], axis=1)
    f = lambda x: halo_exchange(x, cart, mode="symmetric")  # noqa: E731
    ys = jax.jit(jax.vmap(f, in_axes=1))(xs)
    for y, each in zip(ys, a, strict=True):
        np.testing.assert_array_equal(y, padded(each, cart, [(1, 1)] * 2, ["symmetric"] * 2))
    assert operations(jax.vmap(f, in_axes=1), xs) == {"sendrecv": 4}


# Errors


def raises(exception, pattern, call):
    for run in (call, jax.make_jaxpr(call)):
        with pytest.raises(exception, match=pattern):
            run()


def test_wrong_arguments():
    x, cart = np.zeros((4, 5)), CARTS[True, True]
    raises(TypeError, "cart must be a JaxCartcomm .*, got JaxComm", lambda: halo_exchange(x, WORLD))
    raises(ValueError, r"width \(5, 5\) is too much for the 4 cells of axis 0", lambda: halo_exchange(x, cart, 5))
    raises(ValueError, "too much for the 4 cells", lambda: halo_exchange(x, cart, 4, mode="reflect"))
    raises(ValueError, "width must be a number from 0 on", lambda: halo_exchange(x, cart, -1))
    raises(ValueError, r"width must be .* got \(1, 2, 3\)", lambda: halo_exchange(x, cart, [1, (1, 2, 3)]))
    raises(
        ValueError,
        "width must be one for each of cart's 2 dimensions, got 3",
        lambda: halo_exchange(x, cart, [1, 1, 1]),
    )
    raises(TypeError, "width must be a Python int, got 1.5", lambda: halo_exchange(x, cart, 1.5))
    with pytest.raises(TypeError, match="width must be a Python int, got a tracer"):
        jax.make_jaxpr(lambda n: halo_exchange(x, cart, n))(1)
    raises(ValueError, "axes must be 2 different axes of x", lambda: halo_exchange(x, cart, axes=(0, 2)))
    raises(ValueError, "axes must be 2 different axes of x", lambda: halo_exchange(x, cart, axes=(1, -1)))
    raises(ValueError, "axes must be 2 different axes of x, which has 1", lambda: halo_exchange(x[0], cart))
    raises(ValueError, "mode must be one of constant, edge.* got 'wrap'", lambda: halo_exchange(x, cart, mode="wrap"))
    wrong = lambda x, axis, side: x  # noqa: E731
    if SIZE > 1 and RANK in (0, SIZE - 1):
        raises(
            ValueError,
            r"mode must return ghost cells of shape \(1,\)",
            lambda: halo_exchange(x[:, 0], LINE, mode=wrong),
        )
