"""Nonblocking operations: the blocking ones in two halves, in jit and outside; requests as values of a program."""

import functools
import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calculus import COMPOSED, check_gradient, modes, operations
from cases import CASES, left, right
from jax import lax
from mpi4py import MPI

import jaxcomm
from jaxcomm import JaxComm, Prequest, Request, create_token
from jaxcomm._native import bridge
from jaxcomm._primitives import dtypes

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = right(WORLD), left(WORLD)
both = pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
two_ranks = pytest.mark.skipif(SIZE < 2, reason="two ranks exchange messages")
calculus = pytest.mark.calculus


class Persistent(harness.InTwoHalves):
    def __getattr__(self, name):
        make = getattr(self.comm, f"{name}_init", None) if name[0].isupper() else None
        return getattr(self.comm, name) if make is None else functools.partial(self.again, make)

    def again(self, make, *args, **kwargs):
        request = make(*args, **kwargs)
        results = []
        for _ in range(2):
            request.Start()
            results.append(harness.result(request))
        return results[-1]


SPLIT = [case for case in CASES if case.op in (None, "SUM", "MAX", "PROD")]


def run_all(comm, which, operands):
    return [case.call(comm, x) for case, x in zip(which, operands, strict=True)]


@pytest.fixture
def comm(request):
    return harness.communicator(request.param)


@pytest.mark.parametrize("comm", ["world", "parity", "reversed"], indirect=True)
@both
def test_values(comm, jit):
    xs = [case.operands(comm, seed=31) for case in SPLIT]
    ys = jit(lambda operands: run_all(harness.InTwoHalves(comm), SPLIT, operands))(
        [jnp.asarray(x[comm.rank]) for x in xs]
    )
    for case, y, x in zip(SPLIT, ys, xs, strict=True):
        case.check(y, x, comm.rank)


# A Send that starts again and again has to have a receive each time.
REPEATABLE = [case for case in SPLIT if "Send" not in case.name]


@both
def test_persistent(jit):
    xs = [case.operands(WORLD, seed=32) for case in REPEATABLE]
    mine = [jnp.asarray(x[RANK]) for x in xs]
    ys = jit(lambda operands: run_all(Persistent(WORLD), REPEATABLE, operands))(mine)
    for case, y, x in zip(REPEATABLE, ys, xs, strict=True):
        case.check(y, x, RANK)


# Derivatives: those of the blocking operations, which are compared with NumPy elsewhere.


def loss(case, comm, x):
    y = case.call(comm, x)
    y = jnp.where(jnp.isinf(y), 0, y)
    return jnp.sum(jnp.sin(y) * (RANK + 1 + jnp.arange(y.size).reshape(y.shape)))


def derivatives(case, comm, x, v):
    f = functools.partial(loss, case, comm)
    dy = jax.jvp(f, (x,), (v,))[1]
    g = jax.grad(f)
    second = jax.jvp(g, (x,), (v,))[1] if case.name in SECOND else 0.0
    batch = jnp.stack([(1 + i) * x for i in range(3)])
    batch = jnp.tile(batch, (4000, *[1] * x.ndim))  # long messages, for which a send waits until they are received
    mapped = jax.vmap(g)(batch) if "short" not in case.name else 0.0
    moved = jax.vmap(lambda x: jax.jvp(f, (x,), (v,))[1])(batch) if "short" not in case.name else 0.0
    together = jax.grad(lambda b: jnp.sum(jax.vmap(f)(b)))(batch) if "short" not in case.name else 0.0
    return dy, g(x), second, mapped, moved, together


SECOND = ("Send", "Sendrecv-any", "Sendrecv-ragged", "Allgather", "Allreduce-SUM", "Gather-last", "Scan-PROD")


@calculus
def test_derivatives():
    """Forward, reverse, both together, under vmap and of vmap."""
    data = [(case, case.operands(WORLD, seed=33)[RANK]) for case in COMPOSED]

    def run(comm, xs):
        return [derivatives(case, comm, x, jnp.cos(x)) for (case, _), x in zip(data, xs, strict=True)]

    xs = [x for _, x in data]
    split = jax.jit(functools.partial(run, harness.InTwoHalves(WORLD)))(xs)
    whole = jax.jit(functools.partial(run, WORLD))(xs)
    for (case, _), a, b in zip(data, split, whole, strict=True):
        jax.tree.map(
            lambda p, q, case=case: np.testing.assert_allclose(p, q, rtol=1e-12, atol=1e-13, err_msg=case), a, b
        )


def ring(x):
    """What everyone writes: start both, compute, wait for both."""
    sending, receiving = WORLD.Isend(x, RIGHT, 3), WORLD.Irecv(x, LEFT, 3)
    inner = jnp.sin(x)
    _, y = Request.Waitall([sending, receiving])
    return inner + y * y


@both
def test_ring(jit):
    x = jnp.arange(3.0) + RANK
    there = np.arange(3.0) + (RANK - 1) % SIZE
    np.testing.assert_allclose(jit(ring)(x), np.sin(x) + there**2, rtol=1e-14)


@calculus
def test_ring_in_scan_with_gradient():
    """CASES 36; in each step, and with the request in the loop's carry."""

    def each_step(x):
        return jnp.sum(lax.scan(lambda x, _: (0.3 * ring(x), None), x, None, length=3)[0] * (RANK + 1))

    def overlapping(x):
        def start(x):
            WORLD.Isend(x, RIGHT, 4).Free()
            return WORLD.Irecv(x, LEFT, 4)

        def step(carry, _):
            receiving, x = carry
            x = jnp.sin(x) + 0.5 * receiving.Wait()
            return (start(x), x), jnp.sum(x)

        (receiving, x), sums = lax.scan(step, (start(x), x), None, length=3)
        return jnp.sum(receiving.Wait() * x) * (RANK + 1) + jnp.sum(sums)

    for f in (each_step, overlapping):
        check_gradient(WORLD, f, 0.1 * jnp.arange(3.0) + 0.2 * RANK)
    x, v = 0.1 * jnp.arange(3.0) + 0.2 * RANK, jnp.cos(jnp.arange(3.0))
    second = jax.jit(lambda x: jax.jvp(jax.grad(overlapping), (x,), (v,))[1])(x)
    h = 1e-5
    first = jax.jit(jax.grad(overlapping))
    np.testing.assert_allclose(second, (first(x + h * v) - first(x - h * v)) / (2 * h), rtol=1e-7, atol=1e-7)


@calculus
@two_ranks
def test_the_adjoint_is_a_start_and_its_wait():
    x = jnp.arange(3.0)
    counts = operations(jax.grad(lambda x: jnp.sum(ring(x))), x)
    assert counts["start_send"] == counts["start_recv"] == counts["wait_send"] == counts["wait_recv"] == 2


@calculus
def test_from_any_source():
    """CASES 41: the tangent comes from, and the cotangent goes to, the rank that really sent."""

    def f(x):
        sending = WORLD.Isend(x * x, (RANK + 1) % SIZE, 5)
        y = WORLD.Irecv(x, MPI.ANY_SOURCE, MPI.ANY_TAG).Wait()
        sending.Wait()
        return jnp.sum(jnp.sin(y)) * (RANK + 1)

    check_gradient(WORLD, f, jnp.arange(3.0) + RANK)


@calculus
@two_ranks
def test_messages_that_derivatives_could_mix_up():
    """Equal ranks and tags, ended in another order than started: an error, and not the wrong gradient."""
    comm = WORLD.Dup()  # the requests of what failed stay open

    def f(tags, x):
        sending = [comm.Isend(x * k, RIGHT, tag) for k, tag in zip((1, 2), tags, strict=True)]
        first, second = (comm.Irecv(x, LEFT, tag) for tag in tags)
        b, a = second.Wait(), first.Wait()
        Request.Waitall(sending)
        return jnp.sum(a * a + 3 * b)

    x = jnp.arange(3.0)
    check_gradient(WORLD, functools.partial(f, (6, 7)), x)
    f((8, 8), x)  # without derivatives there is nothing to mix up
    with pytest.raises(Exception, match=r"irecv .*could not be told apart.*different tags"):
        jax.grad(functools.partial(f, (9, 9)))(x)

    def freed(x):  # as if it were waited for at once, while an earlier one is open
        first = comm.Isend(x, RIGHT, 10)
        comm.Isend(2 * x, RIGHT, 10).Free()
        a, b = (comm.Recv(x, LEFT, 10) for _ in range(2))
        first.Wait()
        return jnp.sum(a * b)

    with pytest.raises(Exception, match=r"could not be told apart"):
        jax.grad(freed)(x)
    # What failed is in nobody's way.
    check_gradient(comm, lambda x: jnp.sum(comm.Sendrecv(x * x, RIGHT, 33, source=LEFT, recvtag=33)), x)
    check_gradient(comm, functools.partial(f, (6, 7)), x)
    harness.CONTROL.Barrier()


LONG = 40_000  # elements: no MPI library sends so much before its receive is there


def pair(x):
    """Two messages of equal ranks and tag under way at once, each way."""
    return [WORLD.Isendrecv(k * x, RIGHT, 0, x, LEFT, 0) for k in (1, 2)]


def ends(x):
    """A halo exchange with one tag: on two ranks both messages of each go to the same."""
    receiving = WORLD.Irecv(x, LEFT, 0), WORLD.Irecv(x, RIGHT, 0)
    return [*receiving, WORLD.Isend(x, RIGHT, 0), WORLD.Isend(2 * x, LEFT, 0)]


def half_blocking(x):
    receiving = [WORLD.Irecv(x, LEFT, 0) for _ in range(2)]
    WORLD.Send(x, RIGHT, 0)
    WORLD.Send(2 * x, RIGHT, 0)
    return receiving


def sends_first(x):
    """The sends are waited for first, though nobody waits for the receives before."""
    sending = [WORLD.Isend(k * x, RIGHT, 0) for k in (1, 2)]
    receiving = [WORLD.Irecv(x, LEFT, 0) for _ in range(2)]
    Request.Waitall(sending)
    return receiving


def forgotten_sends(x):
    for k in (1, 2):
        WORLD.Isend(k * x, RIGHT, 0).Free()
    return [WORLD.Irecv(x, LEFT, 0) for _ in range(2)]


def from_anyone(x):
    """Nobody but the right neighbour's left one sends to it."""
    receiving = [WORLD.Irecv(x, MPI.ANY_SOURCE, MPI.ANY_TAG) for _ in range(2)]
    WORLD.Send(x, RIGHT, 0)
    WORLD.Ssend(2 * x, RIGHT, 0)
    return receiving


def tree(x):
    """One call, several messages: of two dtypes, and of a leaf that is not packed."""
    leaves = {"x": x, "y": (2 * x).astype(jnp.float32), "z": jnp.ones(LONG) * x[0]}
    return [WORLD.Isendrecv(leaves, RIGHT, 0, leaves, LEFT, 0)]


def from_left(x):
    return WORLD.Sendrecv(x, RIGHT, 0, x, LEFT, 0)


def one_by_one(x):
    return [from_left(x), from_left(2 * x)]


# What has to come out: the same with operations that are one at a time.
EQUAL_MESSAGES = {
    pair: one_by_one,
    ends: lambda x: [from_left(x), WORLD.Sendrecv(2 * x, LEFT, 0, x, RIGHT, 0)],
    half_blocking: one_by_one,
    sends_first: one_by_one,
    forgotten_sends: one_by_one,
    from_anyone: one_by_one,
    tree: lambda x: [from_left(x), from_left((2 * x).astype(jnp.float32)), from_left(jnp.ones(LONG) * x[0])],
}


@calculus
@two_ranks
@both
def test_a_forgotten_send_under_vmap_of_a_gradient(jit):
    """Its adjoint, which nobody has started, receives for the batch as well."""

    def f(send, x):
        if RANK % 2 == 0 and RANK + 1 < SIZE:
            send(jnp.sin(x), RANK + 1)
        return WORLD.Recv(x, RANK - 1) * x if RANK % 2 else x

    xs = jnp.arange(6.0).reshape(2, 3)
    derivative = lambda send: jit(jax.vmap(jax.grad(lambda x: jnp.sum(f(send, x)))))(xs)  # noqa: E731
    forgotten = derivative(lambda *args: WORLD.Isend(*args).Free())
    np.testing.assert_allclose(forgotten, derivative(WORLD.Send), rtol=1e-14)


def mean_of_products(results, x):
    ys = [y.astype(jnp.float64) for y in jax.tree.leaves(results) if y is not None and y.size]
    return sum((1 + i) * jnp.mean(jnp.sin(y + x[0]) * y * x[1]) for i, y in enumerate(ys))


@functools.cache
def all_modes(program):
    """The derivatives of a program, by mode. All of a rank's numbers differ, and so do those of two ranks."""
    n = np.arange(LONG)
    x, v, w = 0.1 * n % 1 + 0.2 * RANK, np.cos(n + RANK), np.sin(n + 1)
    f = lambda x: mean_of_products(program(x), x)  # noqa: E731
    return {name: jax.jit(mode)(x) for name, mode in modes(f, v, w).items()}


@calculus
@two_ranks
@pytest.mark.parametrize("program", EQUAL_MESSAGES, ids=lambda program: program.__name__)
def test_every_mode_of_differentiation_with_equal_messages_under_way(program):
    """Messages that only their order tells apart; and long ones, for which a send waits until they are received."""
    got = all_modes(lambda x: Request.Waitall(program(x)))
    expected = all_modes(EQUAL_MESSAGES[program])
    # The same numbers, but for their order in sums of LONG terms of order 1 / LONG, some of them in float32.
    limit = 64 * np.finfo(np.float32 if program is tree else np.float64).eps
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=limit, atol=limit, err_msg=name)


# Requests as values


@both
@two_ranks
def test_data_belong_to_the_request(jit):
    """The operand may be overwritten while the message waits for its receive: more than an eager message holds."""
    x = jnp.full(1 << 18, RANK + 1.0)

    @jit
    def exchange(x):
        sending = WORLD.Isend(x, RIGHT, 10)
        for _ in range(3):
            x = jnp.sin(x) * 2
        y = WORLD.Recv(x, LEFT, 10)
        sending.Wait()
        return y

    if jit is jax.jit:
        exchange = jax.jit(exchange, donate_argnums=0)
    np.testing.assert_array_equal(exchange(jnp.array(x)), np.full(1 << 18, (RANK - 1) % SIZE + 1.0))


@two_ranks
def test_numpy_operands_may_be_overwritten():
    x = np.full(1 << 18, RANK + 1.0)
    sending = WORLD.Issend(jnp.asarray(x), RIGHT, 11)
    receiving = WORLD.Irecv(jax.ShapeDtypeStruct(x.shape, x.dtype), LEFT, 11)
    x[:] = -1
    _, y = Request.Waitall([sending, receiving])
    assert np.all(y == (RANK - 1) % SIZE + 1)


@two_ranks
def test_through_jit_boundaries_and_branches():
    x = jnp.arange(4.0) + RANK
    start = jax.jit(lambda x: (WORLD.Isend(x, RIGHT, 12), WORLD.Irecv(x, LEFT, 12)))
    finish = jax.jit(lambda requests: Request.Waitall(requests)[1])
    choose = jax.jit(
        lambda flag, x: lax.cond(
            flag, lambda x: WORLD.Irecv(x, LEFT, 13), lambda x: WORLD.Irecv(x + 1, LEFT, 13), x
        ).Wait()
    )
    for _ in range(2):
        np.testing.assert_array_equal(finish(start(x)), np.arange(4.0) + LEFT)
    for flag in (True, False):
        sending = WORLD.Isend(x, RIGHT, 13)
        np.testing.assert_array_equal(choose(flag, x), np.arange(4.0) + LEFT)
        sending.Wait()


def test_a_second_wait_raises():
    request = WORLD.Iallreduce(1.0)
    assert float(request.Wait()) == SIZE
    with pytest.raises(RuntimeError, match=r"waited for before.*its result is what that call returned"):
        request.Wait()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"waited for before"):
        jax.block_until_ready(jax.jit(lambda r: r.Wait())(request))


@both
def test_the_result_is_there_after_test(jit):
    def poll(x):
        request = WORLD.Iallreduce(x)
        if jit is jax.jit:
            step = lambda state: (*request.Test(), state[2] + 1)  # noqa: E731
            flag, y, _ = lax.while_loop(lambda state: ~state[0], step, (False, x, 0))
        else:
            flag = False
            while not flag:
                flag, y = request.Test()
        return flag, y, request.Wait()

    flag, y, z = jit(poll)(jnp.arange(3.0))
    assert flag
    np.testing.assert_array_equal(y, SIZE * np.arange(3.0))
    np.testing.assert_array_equal(z, y)


@two_ranks
def test_test_before_the_message_comes():
    x = jnp.arange(3.0)
    receiving = WORLD.Irecv(x - 1, LEFT, 14)
    harness.CONTROL.Barrier()
    for test in (Request.Test, jax.jit(Request.Test)):
        flag, y = test(receiving)
        assert not flag
        np.testing.assert_array_equal(y, x - 1)
    assert not receiving.Get_status()
    assert Request.Testall([receiving]) == (False, None)
    assert Request.Testany([receiving])[:2] == (MPI.UNDEFINED, False)
    harness.CONTROL.Barrier()
    sending = WORLD.Isend(x, RIGHT, 14)
    while not receiving.Get_status():
        pass
    np.testing.assert_array_equal(receiving.Wait(), x)
    sending.Wait()


OTHERS = [r for r in range(SIZE) if r != RANK]


def exchange_with_all(x, tag):
    receiving = [WORLD.Irecv(x, r, tag) for r in OTHERS]
    return [WORLD.Isend(x, r, tag) for r in OTHERS], receiving


@both
@two_ranks
def test_waitany(jit):
    def f(x):
        sending, receiving = exchange_with_all(x, 15)
        found = [Request.Waitany(receiving) for _ in receiving]
        end = Request.Waitany(receiving)
        Request.Waitall(sending)
        return found, end[0]

    found, end = jit(f)(jnp.arange(3.0) + RANK)
    assert sorted(int(i) for i, _ in found) == list(range(SIZE - 1))
    for i, y in found:
        np.testing.assert_array_equal(y, np.arange(3.0) + OTHERS[int(i)])
    assert end == MPI.UNDEFINED


@both
@two_ranks
def test_waitany_for_sends(jit):
    def f(x):
        sending, receiving = exchange_with_all(x, 16)
        index, result = Request.Waitany(sending)
        assert result is None
        Request.Waitall(receiving)
        return index, Request.Waitsome(sending)[0] if len(sending) > 1 else 0

    assert 0 <= jit(f)(jnp.arange(3.0))[0] < SIZE - 1


@two_ranks
def test_waitsome_and_testsome():
    sending, receiving = exchange_with_all(jnp.arange(3.0) + RANK, 17)
    found = {}
    while len(found) < SIZE - 1:
        some = Request.Waitsome if len(found) % 2 else Request.Testsome
        indices, results = some(receiving)
        found |= dict(zip(indices, results, strict=True))
    for i, y in found.items():
        np.testing.assert_array_equal(y, np.arange(3.0) + OTHERS[i])
    assert Request.Waitsome(receiving) == (None, None)
    Request.Waitall(sending)


@two_ranks
def test_waitsome_in_jit():
    """The results of all at the places of the requests: where nothing came now, zeros, which may be added up."""

    @jax.jit
    def f(x):
        sending, receiving = exchange_with_all(x, 18)

        def step(state):
            indices, ys = Request.Waitsome(receiving)
            return state[0] + jnp.sum(indices != MPI.UNDEFINED), jax.tree.map(jnp.add, state[1], ys)

        out = lax.while_loop(lambda s: s[0] < SIZE - 1, step, (0, [jnp.zeros_like(x)] * (SIZE - 1)))[1]
        Request.Waitall(sending)
        return out

    for r, y in zip(OTHERS, f(jnp.arange(3.0) + RANK), strict=True):
        np.testing.assert_array_equal(y, np.arange(3.0) + r)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16, jnp.int4, jnp.float8_e4m3fn, "key"])
@two_ranks
def test_what_is_not_complete_is_a_template_or_zeros(dtype):
    """A test leaves a receive's template, as MPI leaves the buffer; what picks gives zeros where it does not pick."""

    @jax.jit
    def f(x):
        receiving = [WORLD.Irecv({"a": x, "b": x}, LEFT, 26), WORLD.Irecv({"a": x, "b": x}, LEFT, 27)]
        early = [
            Request.Testall(receiving),
            receiving[1].Test(),
            Request.Testsome(receiving),
            Request.Testany(receiving),
        ]
        WORLD.Barrier()
        sending = [WORLD.Isend({"a": x, "b": x}, RIGHT, 26), WORLD.Isend({"a": x, "b": x}, RIGHT, 27)]
        _, late = Request.Waitall([*sending, receiving[0]])[-1], Request.Waitsome(receiving)
        return early, late

    def words(y):
        return np.asarray(jax.random.key_data(y) if dtypes.is_key(y.dtype) else y.astype(jnp.float32))

    x = jax.random.key(3) if dtype == "key" else jnp.ones(3, dtype)
    (all_, one, some, any_), (indices, ys) = f(x)
    np.testing.assert_array_equal([all_[0], one[0], any_[1]], False)
    for y in jax.tree.leaves([all_[1], one[1]]):
        np.testing.assert_array_equal(words(y), words(x))
    for y in jax.tree.leaves([some[1], any_[2], ys[0]]):
        np.testing.assert_array_equal(words(y), np.zeros_like(words(x)))
    np.testing.assert_array_equal([*some[0], any_[0]], MPI.UNDEFINED)
    np.testing.assert_array_equal(indices, [MPI.UNDEFINED, 1])
    for y in jax.tree.leaves(ys[1]):
        np.testing.assert_array_equal(words(y), words(x))


PICKS = {
    "Test": lambda request: request.Test()[1],
    "Testall": lambda request: Request.Testall([request])[1],
    "Waitany": lambda request: Request.Waitany([request])[1],
    "Testany": lambda request: Request.Testany([request])[2],
    "Waitsome": lambda request: Request.Waitsome([request])[1],
    "Testsome": lambda request: Request.Testsome([request])[1],
}


def total(tree):
    return sum((jnp.sum(y) for y in jax.tree.leaves(tree)), jnp.zeros(()))


@both
@pytest.mark.parametrize("mode", ["grad", "jvp"])
@pytest.mark.parametrize("name", PICKS)
def test_what_depends_on_time_has_no_derivative(name, mode, jit):
    """Every rank refuses it, whatever came first."""

    def f(x):
        mixed = name.startswith("Wait")  # Test has no result of lists
        request = WORLD.Ialltoallw([x] * SIZE, [x] * SIZE) if mixed else WORLD.Iallreduce(x)
        while request.Get_status() is False:
            pass
        try:
            return total(PICKS[name](request))
        finally:
            request.Free()

    x = jnp.ones(3)
    with pytest.raises(NotImplementedError, match="depends on when a message comes"):
        jax.grad(jit(f))(x) if mode == "grad" else jax.jvp(jit(f), (x,), (x,))
    WORLD.Barrier()


@both
@pytest.mark.parametrize("name", ["Waitany", "Waitsome"])
def test_what_has_no_derivative_may_depend_on_time(name, jit):
    def f(x):
        constant = PICKS[name](WORLD.Iallreduce(lax.stop_gradient(x)))
        return jnp.sum(x) * total(constant) + total(PICKS[name](WORLD.Iallreduce(x.astype(jnp.int32))))

    x = jnp.ones(3)
    np.testing.assert_array_equal(jax.grad(jit(f))(x), [3 * SIZE] * 3)
    np.testing.assert_array_equal(jax.jvp(jit(f), (x,), (x,))[1], 9 * SIZE)


@both
@two_ranks
def test_statuses(jit):
    status, statuses = MPI.Status(), []

    def f(x):
        sending = WORLD.Isend(x[:2], RIGHT, 19)
        y, found = WORLD.Irecv(x, MPI.ANY_SOURCE, 19).Wait(status, return_status=True)
        sending.Wait()
        Request.Waitall([WORLD.Isend(x, RIGHT, 20), WORLD.Irecv(x, LEFT, 20)], statuses)
        return y, found

    y, found = jax.block_until_ready(jit(f)(jnp.arange(3.0) + RANK))
    np.testing.assert_array_equal(y, [LEFT, LEFT + 1, 2 + RANK])
    assert tuple(map(int, found)) == (LEFT, 19, 2)
    assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (LEFT, 19, 2)
    assert (statuses[1].source, statuses[1].tag) == (LEFT, 20)


@two_ranks
def test_cancel_and_free():
    receiving = WORLD.Irecv(jnp.arange(3.0), LEFT, 21)
    receiving.Cancel()
    np.testing.assert_array_equal(receiving.Wait(), np.arange(3.0))
    WORLD.Isend(jnp.arange(3.0), RIGHT, 22).Free()
    np.testing.assert_array_equal(WORLD.Recv(jnp.zeros(3), LEFT, 22), np.arange(3.0))


@both
def test_tokens(jit):
    def f(x):
        request, token = WORLD.Iallreduce(x, token=create_token(x))
        y, token = request.Wait(token=token)
        return y, token

    np.testing.assert_array_equal(jit(f)(jnp.arange(3.0))[0], SIZE * np.arange(3.0))


def test_requests_of_mpi4py_may_be_among_them():
    x, buffer = np.arange(3.0) + RANK, np.empty(3)
    theirs = [
        MPI.Comm.Isend(WORLD, x, (RANK + 1) % SIZE, 23),
        MPI.Comm.Irecv(WORLD, buffer, (RANK - 1) % SIZE, 23),
    ]
    _, _, total = Request.Waitall([*theirs, WORLD.Iallreduce(jnp.asarray(x))])
    np.testing.assert_array_equal(buffer, np.arange(3.0) + (RANK - 1) % SIZE)
    np.testing.assert_array_equal(total, sum(np.arange(3.0) + r for r in range(SIZE)))


@two_ranks
def test_persistent_requests_are_started_together():
    pair = [WORLD.Send_init(jnp.zeros(3), RIGHT, 24), WORLD.Recv_init(jnp.zeros(3), LEFT, 24)]
    for _ in range(3):
        Prequest.Startall(pair)
        with pytest.raises(RuntimeError, match="is active"):
            pair[0].Start()
        Request.Waitall(pair)
    pair[0].Start(jnp.full(3, RANK + 0.5))
    pair[1].Start()
    np.testing.assert_array_equal(Request.Waitall(pair)[1], np.full(3, LEFT + 0.5))
    assert pair[1].Wait() is None  # inactive


@both
def test_no_requests_at_all(jit):
    assert jit(lambda: Request.Waitany([])[0])() == MPI.UNDEFINED
    assert jit(lambda: Request.Testany([])[1])()
    assert Request.Waitall([]) == []


def test_wrong_arguments_are_told_at_the_start():
    with pytest.raises(ValueError, match="dest"):
        WORLD.Isend(jnp.zeros(3), SIZE)
    with pytest.raises(ValueError, match="leading axis"):
        WORLD.Ialltoall(jnp.zeros((SIZE + 1, 2)))
    with pytest.raises(ValueError, match="dest"):
        WORLD.Send_init(jnp.zeros(3), SIZE)
    with pytest.raises(NotImplementedError, match="no MPI handle"):
        _ = WORLD.Iallreduce(1.0).handle
    with pytest.raises(NotImplementedError, match="has no derivative; use Wait"):
        jax.grad(lambda x: WORLD.Iallreduce(x).Test()[1])(1.0)
    harness.CONTROL.Barrier()


# Probes, and what they find


@both
@two_ranks
def test_probe_tells_a_program_what_comes(jit):
    def f(x):
        sending = WORLD.Isend(x, RIGHT, 25 + RANK)
        status = WORLD.Probe(return_status=True)
        there, again = WORLD.Iprobe(LEFT, return_status=True)
        y = WORLD.Recv(x, status.source, status.tag)
        sending.Wait()
        return y, status, there, again

    y, status, there, again = jit(f)(jnp.arange(3.0) + RANK)
    np.testing.assert_array_equal(y, np.arange(3.0) + LEFT)
    assert tuple(map(int, status)) == tuple(map(int, again)) == (LEFT, 25 + LEFT, 24)
    assert there


@both
@two_ranks
def test_matched_messages(jit):
    """The first message is kept aside while the second is received by one that would have taken either."""

    def f(x):
        sending = [WORLD.Isend(x, RIGHT, 30), WORLD.Isend(x + 1, RIGHT, 30)]
        message, status = WORLD.Mprobe(LEFT, 30, return_status=True)
        later = WORLD.Recv(x, LEFT, 30)
        first, received = message.Recv(x, return_status=True)
        found, nothing, _ = WORLD.Improbe(LEFT, 31, return_status=True)
        Request.Waitall(sending)
        return first, later, status, received, found, nothing.Irecv(x * 0 - 1).Wait()

    first, later, status, received, found, nothing = jit(f)(jnp.arange(3.0) + RANK)
    np.testing.assert_array_equal(first, np.arange(3.0) + LEFT)
    np.testing.assert_array_equal(later, np.arange(3.0) + LEFT + 1)
    assert tuple(map(int, status)) == (LEFT, 30, 24)
    assert tuple(map(int, received)) == (LEFT, 30, 3)
    assert not found
    np.testing.assert_array_equal(nothing, [-1, -1, -1])


@calculus
@two_ranks
def test_gradient_of_a_matched_message():
    def f(x):
        sending = WORLD.Isend(x * x, RIGHT, 32)
        y = WORLD.Mprobe(return_status=True)[0].Recv(x)
        sending.Wait()
        return jnp.sum(jnp.sin(y)) * (RANK + 1)

    check_gradient(WORLD, f, jnp.arange(3.0) + RANK)


@two_ranks
@calculus
def test_a_python_number_is_differentiated():
    def messages(w):
        sending, receiving = WORLD.Isend(w, RIGHT, 41), WORLD.Irecv(w, LEFT, 41)
        return Request.Waitall([sending, receiving])[1]

    for f, slope in (
        (messages, 1),
        (lambda w: WORLD.Allreduce({"a": w, "b": 2 * w})["b"], 2 * SIZE),
        (lambda w: WORLD.Allreduce(jnp.ones(()), op=lambda a, b: a + b + w), SIZE - 1),
        (lambda w: WORLD.Exscan(jnp.ones(()), op=jnp.add, identity=w), RANK == 0),
        (lambda w: WORLD.Alltoallw([w] * SIZE, [w] * SIZE)[0], 1),
    ):
        _, found = jax.jvp(f, (1.5,), (1.0,))
        assert found == slope
        assert jax.linearize(f, 1.5)[1](1.0) == slope
        # A message that nobody has received would be taken for one of this reduction.
        np.testing.assert_array_equal(WORLD.Allreduce(np.arange(5.0), op=jnp.add), SIZE * np.arange(5.0))


@two_ranks
def test_a_message_is_received_once():
    sending = WORLD.Isend(jnp.arange(2.0), RIGHT, 36)
    message = WORLD.Mprobe(LEFT, 36)
    message.Recv(jnp.zeros(2))
    sending.Wait()
    for again in (message.Recv, message.Irecv):
        for buffer in (jnp.zeros(2), np.zeros(2)):
            with pytest.raises(MPI.Exception, match="the message was received before"):
                again(buffer)


@two_ranks
def test_requests_of_mpi4pys_keep_their_results():
    """Objects; alone it is mpi4py's method that completes them."""
    objects = lambda tag: [WORLD.isend({"from": RANK}, RIGHT, tag), WORLD.irecv(source=LEFT, tag=tag)]  # noqa: E731
    came = {"from": LEFT}
    assert Request.waitall(objects(37)) == [None, came]
    mixed = Request.waitall([*objects(38), WORLD.Isend(jnp.ones(2), RIGHT, 39), WORLD.Irecv(jnp.zeros(2), LEFT, 39)])
    assert mixed[:3] == [None, came, None]
    np.testing.assert_array_equal(mixed[3], np.ones(2))
    pending, found = objects(40), [None, None]
    for _ in pending:
        index, y = Request.waitany(pending)
        found[index] = y
    assert found == [None, came]
    for wrong in ([5], [None, WORLD.Iallreduce(1.0)]):
        with pytest.raises(TypeError, match="Waitall: requests must be Requests, got "):
            Request.Waitall(wrong)


def test_a_persistent_request_keeps_its_shapes():
    request = WORLD.Allreduce_init(jnp.ones(4))
    for other in (jnp.ones(2), jnp.ones(4, int), 1.0):
        with pytest.raises(ValueError, match=r"Start: the request was made for float64\[4\], got "):
            request.Start(other)
    tree = WORLD.Allreduce_init({"a": jnp.ones(2), "b": jnp.ones(3)})
    with pytest.raises(
        ValueError, match=r"made for float64\[2\], float64\[3\], as .*, got float64\[3\], float64\[2\], as"
    ):
        tree.Start({"a": jnp.ones(3), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"as PyTreeDef\({'a': \*, 'b': \*}\), got .*, as PyTreeDef\(\[\*, \*\]\)"):
        tree.Start([jnp.ones(2), jnp.ones(3)])


@two_ranks
@both
def test_out_of_one_vmap_into_another(jit):
    """All that a request carries has the batch axis then, also the rank that it is for."""
    x = jnp.arange(12.0).reshape(3, 4) + RANK
    start = jit(jax.vmap(lambda x: (WORLD.Isend(x, RIGHT, 35), WORLD.Irecv(x, LEFT, 35))))
    complete = jit(jax.vmap(lambda sending, receiving: Request.Waitall([sending, receiving])[1]))
    for batch in (x, x[:0]):
        np.testing.assert_array_equal(complete(*start(batch)), batch - RANK + LEFT)
    both_ends = lambda x: jnp.sum(jnp.sin(complete(*start(x))))  # noqa: E731
    np.testing.assert_allclose(jax.grad(both_ends)(x), jnp.cos(x), rtol=1e-12)


@two_ranks
def test_matched_messages_on_the_host():
    sending = [WORLD.Isend(jnp.arange(3.0) + RANK, RIGHT, 33) for _ in range(3)]
    np.testing.assert_array_equal(WORLD.Mprobe(LEFT).Recv(jnp.zeros(3)), np.arange(3.0) + LEFT)
    buffer, status = np.zeros(3), MPI.Status()
    WORLD.Mprobe(LEFT, 33).Recv(buffer, status)
    assert (status.source, status.tag) == (LEFT, 33)
    message = None
    while message is None:
        message = WORLD.Improbe()
    message.Irecv([buffer, MPI.DOUBLE]).Wait()
    more = [WORLD.Isend(jnp.arange(3.0) + RANK, RIGHT, 34) for _ in range(2)]
    y, found = WORLD.Mprobe(LEFT, 34).Recv(jnp.zeros(4), return_status=True)
    assert tuple(map(int, found)) == (LEFT, 34, 3)
    request = WORLD.Mprobe(LEFT, 34).Irecv(jax.ShapeDtypeStruct((3,), np.float64))
    assert request.Test()[0]
    np.testing.assert_array_equal(request.Wait(), y[:3])
    Request.Waitall(more)
    np.testing.assert_array_equal(buffer, np.arange(3.0) + LEFT)
    Request.Waitall(sending)
    assert WORLD.Improbe() is None
    assert WORLD.Iprobe() is False


@both
@two_ranks
def test_status_as_values(jit):
    """A program acts on who sent and how much."""

    def f(x):
        y, status = WORLD.Sendrecv(x[: RANK + 1], RIGHT, 50 + RANK, x, MPI.ANY_SOURCE, 50 + LEFT, return_status=True)
        return (
            jnp.where(jnp.arange(x.size) < status.count, y, -1),
            WORLD.Sendrecv(x, status.source, source=RIGHT),
            status,
        )

    x = jnp.arange(float(SIZE)) + 10 * RANK
    y, back, status = jit(f)(x)
    count = LEFT + 1
    assert tuple(map(int, status)) == (LEFT, 50 + LEFT, count)
    np.testing.assert_array_equal(y, np.where(np.arange(SIZE) < count, np.arange(SIZE) + 10 * LEFT, -1))
    np.testing.assert_array_equal(back, np.arange(float(SIZE)) + 10 * RIGHT)


@both
def test_ring_whose_partner_depends_on_the_loop(jit):
    """Ranks and tags may be traced values."""

    def f(x):
        def body(i, total):
            shift = i + 1
            sending = WORLD.Isend(x, (RANK + shift) % SIZE, i)
            receiving = WORLD.Irecv(x, (RANK - shift) % SIZE, i)
            return total + (i + 1) * Request.Waitall([sending, receiving])[1]

        return lax.fori_loop(0, SIZE, body, jnp.zeros_like(x))

    expected = sum((i + 1) * (np.arange(3.0) + (RANK - i - 1) % SIZE) for i in range(SIZE))
    np.testing.assert_allclose(jit(f)(jnp.arange(3.0) + RANK), expected, rtol=1e-14)


@calculus
@two_ranks
def test_ranks_and_tags_of_a_request_may_be_traced_or_not():
    """In a loop's carry and in branches, also one started with numbers and the next with traced values."""

    def loop(x):
        def step(carry, i):
            sending, receiving, x = carry
            y = receiving.Wait()
            sending.Wait()
            x = jnp.sin(y)
            return (WORLD.Isend(x, (RANK + i) % SIZE, i), WORLD.Irecv(x, (RANK - i) % SIZE, i), x), None

        start = WORLD.Isend(x, RIGHT, 1), WORLD.Irecv(x, LEFT, 1), x
        (sending, receiving, _), _ = lax.scan(step, start, jnp.arange(1, SIZE))
        sending.Wait()
        return jnp.sum(receiving.Wait()) * (RANK + 1)

    check_gradient(WORLD, loop, 0.1 * jnp.arange(3.0) + RANK)

    def branch(flag, tag, x):
        one = lambda x: (WORLD.Isend(x, RIGHT, tag), WORLD.Irecv(x, LEFT, tag))  # noqa: E731
        two = lambda x: (WORLD.Isend(2 * x, RIGHT, 2), WORLD.Irecv(x, LEFT, 2))  # noqa: E731
        return Request.Waitall(lax.cond(flag, one, two, x))[1]

    for flag in (True, False):
        y = jax.jit(branch)(flag, 1, jnp.arange(3.0) + RANK)
        np.testing.assert_array_equal(y, (np.arange(3.0) + LEFT) * (1 if flag else 2))


@two_ranks
def test_buffered_sends_return_at_once():
    """All ranks send before any receives, more than MPI would buffer."""
    x = jnp.full(1 << 18, RANK + 1.0)
    for f in (lambda x: (WORLD.Bsend(x, RIGHT, 40), WORLD.Recv(x, LEFT, 40))[1],):
        for run in (f, jax.jit(f)):
            assert np.all(run(x) == LEFT + 1)


@two_ranks
def test_other_work_is_done_while_a_request_waits():
    """Ibarrier: those that came early go on."""
    start, finish = jax.jit(WORLD.Ibarrier), jax.jit(Request.Wait)
    request = jax.block_until_ready(start())
    if RANK == 0:
        time.sleep(0.05)
    assert finish(request) is None


@two_ranks
@both
@pytest.mark.parametrize("differentiate", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_requests_that_differ_within_a_batch(jit, differentiate):
    """A select chooses among requests, of which each is for the whole batch."""
    comm = JaxComm(WORLD)

    def f(x):
        request = lax.cond(x[0] > 0, lambda x: comm.Iallreduce(2 * x), lambda x: comm.Iallreduce(3 * x), x)
        return jnp.sum(request.Wait())

    x = jnp.array([[1.0, 2.0], [-2.0, -3.0]])
    run = differentiate(lambda x: jnp.sum(jax.vmap(f)(x)))
    with pytest.raises(Exception, match="its elements have different ones: a cond or a while_loop"):
        jax.block_until_ready(jit(run)(x))
    jaxcomm.flush()
    WORLD.Barrier()


@two_ranks
@both
@pytest.mark.parametrize("end", [JaxComm.Free, JaxComm.Disconnect])
def test_requests_outlive_their_communicator(end, jit):
    comm, x = JaxComm(WORLD), jnp.arange(3.0)
    start = jit(lambda x: (comm.Iallreduce(x), comm.Irecv(x, LEFT, 1), comm.Isend(x + RANK, RIGHT, 1)))
    requests = start(x)
    end(comm)
    assert comm == MPI.COMM_NULL
    total, came, _ = Request.Waitall(list(requests))
    np.testing.assert_array_equal(total, SIZE * x)
    np.testing.assert_array_equal(came, x + LEFT)
    with pytest.raises(Exception, match="was freed"):
        jax.block_until_ready(start(x))
    jaxcomm.flush()


@two_ranks
def test_who_is_cancelled_says_so():
    status = MPI.Status()
    receiving = WORLD.Irecv(jnp.ones(3), LEFT, 77)
    receiving.Cancel()
    np.testing.assert_array_equal(receiving.Wait(status), 1)
    assert status.Is_cancelled()


def test_get_status_fills_no_status():
    request, status = WORLD.Ibarrier(token=create_token())[0], MPI.Status()
    for ask in (
        lambda: request.Get_status(status),
        lambda: Request.Get_status_all([request], [status]),
        lambda: Request.Get_status_any([request], status),
        lambda: Request.Get_status_some([request], [status]),
    ):
        with pytest.raises(TypeError, match="a status is filled by Wait"):
            ask()
    request.Wait()


def test_a_persistent_request_that_was_freed():
    for name in ("Free", "free"):
        request = WORLD.Allreduce_init(jnp.ones(3))
        request.Start()
        getattr(request, name)()
        with pytest.raises(RuntimeError, match="Start: the request was "):
            request.Start()
    WORLD.Barrier()


@both
def test_a_batch_without_elements_leaves_nothing(jit):
    before = len(bridge.open_requests())
    f = lambda x: WORLD.Iallreduce(x).Wait() + WORLD.Ialltoallw([x] * SIZE, [x] * SIZE).Wait()[0]  # noqa: E731
    x = jnp.zeros((0, 3))
    assert jit(jax.vmap(f))(x).shape == (0, 3)
    assert jit(jax.vmap(jax.grad(lambda x: jnp.sum(f(x)))))(x).shape == (0, 3)
    WORLD.Barrier()
    assert len(bridge.open_requests()) == before


def test_errors_name_the_form_that_was_called():
    for call, name in (
        (lambda: WORLD.Isend(jnp.ones(1), 0, -3), "Isend: tag"),
        (lambda: WORLD.Irecv(None, 0), "Irecv: buf"),
        (lambda: WORLD.Iallreduce(jnp.ones(1), jnp.ones(2)), "Iallreduce: "),
        (lambda: WORLD.Send_init(jnp.ones(1), SIZE), "Send_init: dest"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{name}"):
            call()
