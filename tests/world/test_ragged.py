"""Ragged collectives: counts, displacements and message specs; what is wrong with them is found before MPI is entered."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import check_gradient, operations
from cases import counts, recvcounts, sendcounts
from mpi4py import MPI

from jaxcomm import create_token

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
COUNTS = counts(SIZE)
MINE, ALL = COUNTS[RANK], sum(COUNTS)
ROOT = SIZE - 1
both = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jitted"])


def rows(n, rank=RANK, seed=0):
    """n rows of two elements."""
    return jnp.asarray(np.random.default_rng([seed, rank]).normal(size=(n, 2)))


def everywhere():
    return np.concatenate([rows(n, r) for r, n in enumerate(COUNTS)])


# CASES 37


@both
@pytest.mark.parametrize("turn", range(3))
def test_alltoallv_with_empty_parts(wrap, turn):
    """Counts 0, 3, 1 and so on, in another order on each rank, with the gradient."""
    table = [[(0, 3, 1, 2)[(turn + s + 2 * d) % 3] for d in range(SIZE)] for s in range(SIZE)]
    here, there = table[RANK], [table[s][RANK] for s in range(SIZE)]
    assert WORLD.exchange_counts(here) == tuple(there)
    exchange = lambda x: WORLD.Alltoallv(x, sendcounts=here, recvcounts=there)  # noqa: E731
    x = rows(sum(here))
    expected = [np.split(rows(sum(table[s]), s), np.cumsum(table[s])[:-1])[RANK] for s in range(SIZE)]
    np.testing.assert_array_equal(wrap(exchange)(x), np.concatenate(expected))
    weight = 1.0 + np.arange(2 * sum(there)).reshape(-1, 2) + 10 * RANK
    loss = lambda x: jnp.sum(jnp.sin(exchange(x)) * weight)  # noqa: E731
    back = WORLD.Alltoallv(weight * np.cos(exchange(x)), sendcounts=there, recvcounts=here)
    np.testing.assert_allclose(wrap(jax.grad(loss))(x), back, rtol=1e-14)
    check_gradient(WORLD, loss, x)


def test_no_rows_at_all():
    x, none = np.zeros((0, 2)), [0] * SIZE
    assert WORLD.Allgatherv(x, counts=none).shape == (0, 2)
    assert jax.jit(lambda x: WORLD.Alltoallv(x, sendcounts=none, recvcounts=none))(x).shape == (0, 2)
    assert WORLD.Scatterv(x, counts=none).shape == (0, 2)
    g = jax.grad(lambda x: jnp.sum(WORLD.Reduce_scatter(x, recvcounts=none) ** 2))(x)
    assert g.shape == (0, 2)


# Message specs: as mpi4py fills its buffers


def gaps(lengths, gap=1):
    """Displacements in the opposite order of the ranks, with gaps; and how many rows that takes."""
    starts = [sum(lengths[r + 1 :]) + gap * (len(lengths) - r) for r in range(len(lengths))]
    return starts, sum(lengths) + gap * (len(lengths) + 2)


def in_elements(values, row=2):
    return [row * v for v in values]


@both
@pytest.mark.parametrize("like", ["array", "struct"])
def test_receiving_at_displacements(wrap, like):
    """Gaps keep the template's elements; mpi4py does the same in place."""
    starts, length = gaps(COUNTS)
    spec = [in_elements(COUNTS), in_elements(starts)]
    template = np.full((length, 2), 7.0) if like == "array" else np.zeros((length, 2))
    theirs = template.copy()
    MPI.COMM_WORLD.Allgatherv(np.asarray(rows(MINE)), [theirs, *spec, MPI.DOUBLE])
    ours = template if like == "array" else jax.ShapeDtypeStruct((length, 2), np.float64)
    for buf in ([ours, tuple(spec)], [ours, *spec, MPI.DOUBLE], [ours, tuple(spec), "d"]):
        y = wrap(lambda x, buf=buf: WORLD.Allgatherv(x, buf))(rows(MINE))
        np.testing.assert_array_equal(y, theirs)
        z = wrap(lambda x, buf=buf: WORLD.Gatherv(x, buf if RANK == ROOT else None, ROOT))(rows(MINE))
        np.testing.assert_array_equal(z, theirs if RANK == ROOT else rows(MINE))


def test_the_template_is_differentiated_in_its_gaps():
    starts, length = gaps(COUNTS)
    spec = (in_elements(COUNTS), in_elements(starts))
    weight = 1.0 + np.arange(2 * length).reshape(length, 2) * (RANK + 1)
    loss = lambda x, t: jnp.sum(WORLD.Allgatherv(x, [t, spec]) * weight)  # noqa: E731
    t = rows(length, seed=1)
    _, dt = check_gradient(WORLD, loss, rows(MINE), t)
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, COUNTS, strict=True)])
    expected = weight.copy()
    expected[covered] = 0
    np.testing.assert_array_equal(dt, expected)


@both
def test_sending_from_displacements(wrap):
    """Parts in any order, with gaps; they may overlap."""
    starts, length = gaps(COUNTS)
    x = rows(length, ROOT)
    spec = [jnp.asarray(x), in_elements(COUNTS), in_elements(starts), MPI.DOUBLE]
    y = wrap(lambda: WORLD.Scatterv(spec if RANK == ROOT else None, jnp.zeros((MINE, 2)), ROOT))()
    np.testing.assert_array_equal(y, x[starts[RANK] : starts[RANK] + MINE])
    # Everybody gets the same two rows.
    x = rows(3)
    same = lambda x: WORLD.Alltoallv([x, ([4] * SIZE, 0)], recvcounts=2)  # noqa: E731
    np.testing.assert_array_equal(wrap(same)(x), np.concatenate([rows(3, r)[:2] for r in range(SIZE)]))
    g = wrap(jax.grad(lambda x: jnp.sum(same(x) * (RANK + 1))))(x)
    np.testing.assert_array_equal(g, np.outer([1, 1, 0], [1, 1]) * SIZE * (SIZE + 1) / 2)


def test_alltoallv_with_specs_on_both_sides():
    here, there = sendcounts(RANK, SIZE), recvcounts(RANK, SIZE)
    (out, n_out), (into, n_into) = gaps(here), gaps(there, 2)
    x, template = rows(n_out), np.full((n_into, 2), -1.0)
    theirs = template.copy()
    send, receive = [in_elements(here), in_elements(out)], [in_elements(there), in_elements(into)]
    MPI.COMM_WORLD.Alltoallv([x, *send, MPI.DOUBLE], [theirs, *receive, MPI.DOUBLE])
    f = lambda x, t: WORLD.Alltoallv([x, *send, MPI.DOUBLE], [t, *receive, MPI.DOUBLE])  # noqa: E731
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(wrap(f)(jnp.asarray(x), jnp.asarray(template)), theirs)
    check_gradient(WORLD, lambda x, t: jnp.sum(jnp.sin(f(x, t)) * (RANK + 1)), x, template)
    # Under vmap one message has all elements.
    xs, ts = np.stack([x, 2 * x]), np.stack([template, 3 * template])
    mapped = jax.jit(jax.vmap(f, in_axes=(1, 0)))(xs.swapaxes(0, 1), ts)
    for y, a, t in zip(mapped, xs, ts, strict=True):
        np.testing.assert_array_equal(y, f(jnp.asarray(a), jnp.asarray(t)))
    assert operations(jax.vmap(f), xs, ts) == {"alltoallv": 1}


def test_parts_of_one_buffer():
    """[x, count] and [x, (count, displacement)] where one part is sent or received."""
    x = jnp.asarray(rows(MINE + 3))
    inner = [x, (2 * MINE, 4), MPI.DOUBLE]
    np.testing.assert_array_equal(WORLD.Allgatherv([x, 2 * MINE], counts=COUNTS), parts(slice(0, None)))
    np.testing.assert_array_equal(WORLD.Allgatherv(inner, counts=COUNTS), parts(slice(2, None)))
    y = WORLD.Scatterv([jnp.asarray(everywhere()), in_elements(COUNTS)] if RANK == 0 else None, inner)
    expected = np.array(x)
    expected[2 : 2 + MINE] = rows(MINE)
    np.testing.assert_array_equal(y, expected)
    z = WORLD.Reduce_scatter(jnp.asarray(everywhere()), [x, 2 * MINE], COUNTS)
    np.testing.assert_allclose(z[:MINE], SIZE * rows(MINE), rtol=1e-14)
    np.testing.assert_array_equal(z[MINE:], x[MINE:])


def parts(where):
    return np.concatenate([rows(n + 3, r)[where][:n] for r, n in enumerate(COUNTS)])


@both
def test_counts_that_are_left_out(wrap):
    """Equal parts, as in mpi4py; one int is for all ranks."""
    x = rows(2)
    all_ = np.concatenate([rows(2, r) for r in range(SIZE)])
    like = jax.ShapeDtypeStruct(all_.shape, all_.dtype)
    calls = [
        lambda x: WORLD.Allgatherv(x),
        lambda x: WORLD.Allgatherv(x, like),
        lambda x: WORLD.Allgatherv(x, [like, None]),
        lambda x: WORLD.Allgatherv(x, [like, MPI.DOUBLE]),
        lambda x: WORLD.Allgatherv(x, [like, 4]),
        lambda x: WORLD.Allgatherv(x, [like, 4, 4, MPI.DOUBLE]),
        lambda x: WORLD.Allgatherv(x, counts=2),
        lambda x: WORLD.Allgatherv(x, counts=np.full(SIZE, 2)),
    ]
    for y in wrap(lambda x: [call(x) for call in calls])(x):
        np.testing.assert_array_equal(y, all_)
    whole = rows(2 * SIZE)
    calls = [
        lambda x: WORLD.Alltoallv(x),
        lambda x: WORLD.Alltoallv(x, like),
        lambda x: WORLD.Alltoallv([x, 4], [like, [4] * SIZE]),
        lambda x: WORLD.Alltoallv(x, sendcounts=2, recvcounts=2),
    ]
    expected = np.concatenate([rows(2 * SIZE, r)[2 * RANK : 2 * RANK + 2] for r in range(SIZE)])
    for y in wrap(lambda x: [call(x) for call in calls])(whole):
        np.testing.assert_array_equal(y, expected)
    total = sum(rows(2 * SIZE, r) for r in range(SIZE))[2 * RANK : 2 * RANK + 2]
    for y in wrap(
        lambda x: [WORLD.Reduce_scatter(x), WORLD.Reduce_scatter(x, MPI.SUM), WORLD.Reduce_scatter(x, x[:2])]
    )(whole):
        np.testing.assert_allclose(y, total, rtol=1e-13, atol=1e-14)
    y = wrap(lambda x: WORLD.Scatterv(WORLD.Gatherv(x, root=ROOT), root=ROOT))(x)
    np.testing.assert_array_equal(y, x)


def test_counts_that_only_the_root_knows():
    known = COUNTS if RANK == ROOT else None
    f = lambda x: WORLD.Scatterv(jnp.sin(WORLD.Gatherv(x, root=ROOT, counts=known)), root=ROOT, counts=known)  # noqa: E731
    np.testing.assert_allclose(jax.jit(f)(rows(MINE)), np.sin(rows(MINE)), rtol=1e-14)
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(rows(MINE)[None])[0], np.sin(rows(MINE)), rtol=1e-14)
    check_gradient(WORLD, lambda x: jnp.sum(f(x) ** 2), rows(MINE))


def test_in_a_loop_with_tokens():
    def step(carry, _):
        x, token = carry
        y, token = WORLD.Allgatherv(x, counts=COUNTS, token=token)
        z, token = WORLD.Reduce_scatter(y, recvcounts=COUNTS, token=token)
        return (z / SIZE, token), y[0, 0]

    run = lambda x: jax.lax.scan(step, (x, create_token(x)), None, 3)  # noqa: E731
    (x, _), firsts = jax.jit(run)(rows(MINE))
    np.testing.assert_allclose(x, rows(MINE), rtol=1e-14)
    np.testing.assert_allclose(firsts, np.full(3, everywhere()[0, 0]), rtol=1e-14)
    assert operations(run, rows(MINE)) == {"allgatherv": 3, "reduce_scatter": 3}


def test_the_counts_are_part_of_what_a_call_is():
    """Eager calls remember how the last one went: other counts, same shapes."""
    if SIZE < 2:
        return
    x = rows(4)
    for _ in range(3):
        for first in (0, 1, 3):
            here = [first, 4 - first] + [0] * (SIZE - 2)
            there = [here[RANK]] * SIZE
            y = WORLD.Alltoallv(x, sendcounts=here, recvcounts=there)
            start = sum(here[:RANK])
            expected = [rows(4, r)[start : start + here[RANK]] for r in range(SIZE)]
            np.testing.assert_array_equal(y, np.concatenate(expected))


def test_exchange_counts():
    assert WORLD.exchange_counts(RANK + 2) == tuple(range(2, SIZE + 2))
    assert WORLD.exchange_counts(np.int64(RANK)) == tuple(range(SIZE))
    assert WORLD.exchange_counts(sendcounts(RANK, SIZE)) == tuple(recvcounts(RANK, SIZE))
    assert WORLD.exchange_counts(np.array(sendcounts(RANK, SIZE))) == tuple(recvcounts(RANK, SIZE))
    for wrong in (0, jnp.zeros(SIZE, int)):
        with pytest.raises(TypeError, match="exchange_counts: sendcounts must be Python ints, got a tracer"):
            jax.make_jaxpr(WORLD.exchange_counts)(wrong)
    with pytest.raises(ValueError, match=f"exchange_counts: sendcounts must have {SIZE} elements"):
        WORLD.exchange_counts([1] * (SIZE + 1))
    with pytest.raises(ValueError, match="exchange_counts: sendcounts must not be negative"):
        WORLD.exchange_counts([-1] * SIZE)
    # While tracing, on the host: what is under way is finished first.
    f = jax.jit(lambda x: WORLD.Allgatherv(x, counts=WORLD.exchange_counts(x.shape[0])))
    np.testing.assert_array_equal(f(rows(MINE)), everywhere())


# Errors: on the ranks that are wrong, eagerly and while tracing


def raises(exception, pattern, call, *operands):
    for run in (call, jax.make_jaxpr(call)):
        with pytest.raises(exception, match=pattern):
            run(*operands)


BY_COUNTS = {
    "Gatherv: counts": lambda n, x: WORLD.Gatherv(x, root=RANK, counts=n),
    "Scatterv: counts": lambda n, x: WORLD.Scatterv(x, root=RANK, counts=n),
    "Allgatherv: counts": lambda n, x: WORLD.Allgatherv(x, counts=n),
    "Alltoallv: sendcounts": lambda n, x: WORLD.Alltoallv(x, sendcounts=n, recvcounts=n),
    "Reduce_scatter: recvcounts": lambda n, x: WORLD.Reduce_scatter(x, recvcounts=n),
}


@pytest.mark.parametrize("argument", BY_COUNTS)
def test_wrong_counts(argument):
    call = functools.partial(BY_COUNTS[argument])
    x = rows(2 * SIZE)
    wrong = [2] * (SIZE + 1)
    raises(
        ValueError, rf"{argument} must have {SIZE} elements, one for each part, got {SIZE + 1}", lambda: call(wrong, x)
    )
    raises(ValueError, rf"{argument} must not be negative, got \(-1", lambda: call([-1] + [2] * (SIZE - 1), x))
    raises(TypeError, f"{argument} must be a Python int, got 2.0", lambda: call([2.0] * SIZE, x))
    with pytest.raises(TypeError, match=f"{argument} must be Python ints, got a tracer; mark it static"):
        jax.make_jaxpr(lambda n: call(n, x))(np.full(SIZE, 2))
    with pytest.raises(TypeError, match=f"{argument} must be a Python int, got a tracer; mark it static"):
        jax.make_jaxpr(lambda n: call([n] * SIZE, x))(2)
    name, what = argument.split(": ")
    too_many = 2 * SIZE + 1
    if name in ("Gatherv", "Allgatherv"):
        pattern = rf"{argument}\[{RANK}\] must be the number of rows that this rank has, {2 * SIZE}, got {too_many}"
    else:
        pattern = (
            rf"{name}: sendbuf: {what} are rows of axis 0 .* length {2 * SIZE}, got \(.*add up to {SIZE * too_many}"
        )
    raises(ValueError, pattern, lambda: call(too_many, x))


def test_counts_that_do_not_fit_off_the_root():
    if RANK > 0:
        wrong = [n + 1 for n in COUNTS]
        raises(ValueError, rf"Gatherv: counts\[{RANK}\] must be", lambda: WORLD.Gatherv(rows(MINE), counts=wrong))
        raises(ValueError, rf"Scatterv: counts\[{RANK}\] must be", lambda: WORLD.Scatterv(rows(MINE), counts=wrong))


def test_parts_that_are_not_equal():
    if SIZE > 1:
        x = rows(SIZE + 1)
        text = rf"sendbuf: axis 0 of shape \({SIZE + 1}, 2\) cannot be cut into {SIZE} equal parts; give counts"
        raises(ValueError, f"Scatterv: {text}", lambda: WORLD.Scatterv(x, root=RANK))
        raises(ValueError, f"Alltoallv: {text}", lambda: WORLD.Alltoallv(x))
        raises(ValueError, f"Reduce_scatter: {text}", lambda: WORLD.Reduce_scatter(x))
        raises(ValueError, text.replace("sendbuf", "recvbuf"), lambda: WORLD.Allgatherv(x, x))


def test_counts_that_nobody_tells():
    text = r"Alltoallv: recvcounts \(or recvbuf\) must say how many rows come: see docs/ragged.md"
    raises(TypeError, text, lambda: WORLD.Alltoallv(rows(SIZE), sendcounts=1))
    raises(TypeError, text, lambda: WORLD.Alltoallv([rows(SIZE), 2]))


def test_wrong_specs():
    x, n = rows(2 * SIZE), [4] * SIZE
    raises(ValueError, "Scatterv: sendbuf: a message spec is", lambda: WORLD.Scatterv([x, n, n, "d", 0], root=RANK))
    raises(ValueError, "Scatterv: sendbuf: a message spec is", lambda: WORLD.Scatterv([x, n, n], root=RANK))
    raises(ValueError, "Scatterv: sendbuf: a message spec is", lambda: WORLD.Scatterv([x, (n, n, n)], root=RANK))
    raises(ValueError, r"multiples of 2, the size of a row .*; got \(3", lambda: WORLD.Scatterv([x, 3], root=RANK))
    raises(ValueError, "multiples of 2", lambda: WORLD.Scatterv([x, (n, [1] * SIZE)], root=RANK))
    raises(ValueError, "multiples of 2", lambda: WORLD.Allgatherv([x, 1]))
    beyond = [4] * SIZE, [4 * SIZE] * SIZE
    raises(ValueError, "axis 0 has .* rows and does not hold counts", lambda: WORLD.Scatterv([x, beyond], root=RANK))
    raises(ValueError, "displacements must not be", lambda: WORLD.Scatterv([x, (n, [-4] * SIZE)], root=RANK))
    raises(
        TypeError,
        "datatype of an array is that of its dtype float64, got 'f4'",
        lambda: WORLD.Allgatherv([x, MPI.FLOAT]),
    )
    raises(TypeError, "datatype of an array", lambda: WORLD.Allgatherv([x, 2, "i"]))
    vector = MPI.DOUBLE.Create_vector(2, 1, 2)
    raises(TypeError, "datatype of an array", lambda: WORLD.Allgatherv([x, 2, vector]))
    vector.Free()
    twice = "counts were given twice, in the message spec and as counts"
    raises(TypeError, f"Scatterv: sendbuf: {twice}", lambda: WORLD.Scatterv([x, n], root=RANK, counts=2))
    raises(TypeError, f"Allgatherv: recvbuf: {twice}", lambda: WORLD.Allgatherv(x[:2], [x, n], counts=2))
    if SIZE > 1:
        same = (n, [0] * SIZE)
        raises(ValueError, "Allgatherv: recvbuf: the parts .* overlap", lambda: WORLD.Allgatherv(x[:2], [x, same]))


def test_receive_buffers():
    text = "recvbuf is a template of the result, float64"
    total = np.zeros((2 * SIZE, 3))
    raises(ValueError, rf"Allgatherv: {text}\[{2 * SIZE}, 2\], got", lambda: WORLD.Allgatherv(rows(2), total))
    raises(ValueError, f"Allgatherv: {text}.*got int", lambda: WORLD.Allgatherv(rows(2), np.zeros((2 * SIZE, 2), int)))
    raises(ValueError, f"Scatterv: {text}", lambda: WORLD.Scatterv(rows(SIZE), rows(2), root=RANK))
    raises(ValueError, f"Reduce_scatter: {text}", lambda: WORLD.Reduce_scatter(rows(SIZE), rows(2)))
    raises(
        ValueError,
        r"Alltoallv: recvbuf: recvcounts are rows",
        lambda: WORLD.Alltoallv(rows(SIZE), rows(SIZE), recvcounts=2),
    )
    for call in (WORLD.Gatherv, WORLD.Scatterv, WORLD.Allgatherv, WORLD.Alltoallv, WORLD.Reduce_scatter):
        raises(
            ValueError, r"\w+: sendbuf.* must have an axis 0|recvbuf.* must have an axis 0", lambda call=call: call(1.0)
        )
