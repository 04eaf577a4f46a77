"""Program order: within a program, between programs, communicators and libraries; and explicit tokens."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, in_turn, left, right, slow
from counting import messages
from jax import lax
from mpi4py import MPI

from jaxcomm import Token, create_token, flush

WORLD = harness.communicator("world")
OTHER = harness.communicator("dup")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = right(WORLD), left(WORLD)
several_ranks = pytest.mark.skipif(SIZE == 1, reason="a message to oneself may wait for its receive")

# CASES 8, hot potato: sends and receives in turn, with arithmetic. Any other order gives another value, or none.


def pass_on(x):
    return in_turn(WORLD, lambda: WORLD.Send(x, RIGHT, 1), lambda: WORLD.Recv(x, LEFT, 1))


def toss(x, i=0):
    return 1.5 * pass_on(x) + (RANK + i)


def tossed(rounds):
    """What this rank holds in the end, by NumPy; None is a round without arithmetic."""
    x = np.arange(SIZE) + 0.5
    for i in rounds:
        x = np.roll(x, 1)
        x = x if i is None else 1.5 * x + np.arange(SIZE) + i
    return x[RANK]


def straight(x):
    for i in range(50):
        # Arithmetic is what takes time to compile.
        x = toss(x, i) if i % 10 == 0 else pass_on(x)
    return x


def nested(x):
    for _ in range(4):
        x = jax.jit(toss)(x)
    return x


custom = jax.custom_jvp(toss)
custom.defjvp(lambda primals, tangents: jax.jvp(toss, primals, tangents))


def cond_in_scan(x):
    """Each branch communicates, and all ranks take the same one."""
    other = jax.checkpoint(custom)
    return lax.scan(lambda x, i: (lax.cond(i % 3 == 0, toss, other, x, i), None), x, jnp.arange(50))[0]


def while_in_fori(x):
    def inner(i, x):
        return lax.while_loop(lambda c: c[0] < i, lambda c: (c[0] + 1, toss(c[1], c[0])), (0, x))[1]

    return lax.fori_loop(0, 5, inner, x)


POTATOES = {
    straight: [None if i % 10 else i for i in range(50)],
    nested: [0] * 4,
    cond_in_scan: range(50),
    while_in_fori: [j for i in range(5) for j in range(i)],
}


@pytest.mark.parametrize("potato", POTATOES, ids=lambda f: f.__name__)
def test_hot_potato(potato):
    np.testing.assert_allclose(jax.jit(potato)(RANK + 0.5), tossed(POTATOES[potato]), rtol=1e-12)


def test_hot_potato_from_call_to_call():
    """Programs that are dispatched and not waited for, and eager calls."""
    x, jitted = jnp.float64(RANK + 0.5), jax.jit(toss)
    for i in range(50):
        x = jitted(x, i) if i % 3 else toss(x, i)
    np.testing.assert_allclose(x, tossed(range(50)), rtol=1e-12)


@several_ranks
def test_ranks_may_take_different_branches():
    send = lambda x: (WORLD.Send(x, RIGHT), x)[1]  # noqa: E731
    receive = lambda x: WORLD.Recv(x, LEFT)  # noqa: E731
    x = np.random.default_rng(RANK).normal(size=3)
    y = jax.jit(lambda x, rank: lax.switch(rank, [send, receive, send_nothing], x))(x, RANK)
    np.testing.assert_array_equal(y, np.random.default_rng(0).normal(size=3) if RANK < 2 else x)


def send_nothing(x):
    WORLD.Send(x, MPI.PROC_NULL)
    return x


def test_two_communicators_share_one_order():
    """Each rank has the operand of another call ready first; collectives out of order would meet the wrong partner."""

    def program(x):
        delayed = [slow(x + i) if i == RANK % 3 else x + i for i in range(3)]
        comms = (WORLD, OTHER, WORLD)
        for comm, y in zip(comms, delayed, strict=True):
            in_turn(comm, lambda comm=comm, y=y: comm.Ssend(y, RIGHT), lambda comm=comm, y=y: comm.Recv(y, LEFT))
        return [comm.Allreduce(y) for comm, y in zip(comms, delayed, strict=True)]

    xs = [np.random.default_rng(r).normal(size=2) for r in range(SIZE)]
    for i, total in enumerate(jax.jit(program)(xs[RANK])):
        np.testing.assert_allclose(total, sum(xs) + SIZE * i, rtol=1e-12)


@several_ranks
def test_sends_of_jax_programs_and_of_mpi4py_in_turn():
    jitted = jax.jit(lambda x, tag: WORLD.Send(slow(x), RIGHT, tag))
    x = jnp.float64(RANK)
    for i in range(0, 8, 4):
        jitted(x + i, i)
        WORLD.Send(x + i + 1, RIGHT, i + 1)
        WORLD.Isend(np.float64(RANK + i + 2), RIGHT, i + 2).Wait()
        jitted(x + i + 3, i + 3)
    assert messages(WORLD) == [(i, float(LEFT + i)) for i in range(8)]


def test_receives_of_jax_programs_and_of_mpi4py_in_turn():
    jitted = jax.jit(lambda x, source: WORLD.Recv(slow(x), source))
    here, there = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    requests = [MPI.Intracomm.Isend(WORLD, np.float64(RANK + i), there, i) for i in range(8)]
    template, received = jnp.float64(0), []
    for _ in range(2):
        received += [jitted(template, here), jitted(template, here), WORLD.Recv(template, here)]
        received.append(np.empty(()))
        WORLD.Irecv(received[-1], here).Wait()
    MPI.Request.Waitall(requests)
    assert list(map(float, received)) == [float(here + i) for i in range(8)]


def test_collectives_of_jax_programs_and_of_mpi4py_in_turn():
    """They would meet each other if they were not in order on every rank."""
    jitted = jax.jit(lambda x: WORLD.Allreduce(slow(x)))
    total = SIZE * (SIZE - 1) / 2
    for i in range(3):
        pending = jitted(jnp.float64(RANK + i))
        objects = WORLD.allgather(RANK + i)
        result = np.empty(())
        WORLD.Iallreduce(np.float64(RANK + 2 * i), result).Wait()
        assert float(pending) == total + SIZE * i
        assert objects == [r + i for r in range(SIZE)]
        assert result == total + SIZE * 2 * i


@several_ranks
@pytest.mark.parametrize("wait", [flush, jax.effects_barrier])
def test_waiting_for_what_is_pending(wait):
    """The program's results are ready long before its message is there."""
    received = jax.jit(lambda x: (x, WORLD.Recv(x, LEFT)))
    if RANK == 0:
        jax.jit(lambda x: WORLD.Ssend(slow(x), RIGHT))(1.0)
        wait()
    else:
        y = received(0.0)[1]
        if RANK < SIZE - 1:
            WORLD.Ssend(y, RIGHT)
    if RANK == 0:
        assert float(received(0.0)[1]) == 1.0
    else:
        assert float(y) == 1.0
        if RANK == SIZE - 1:
            WORLD.Ssend(y, RIGHT)


# Whole programs


def test_ahead_of_time_compiled_programs_can_be_called_again():
    """CASES 39."""
    x = jnp.arange(3.0) + RANK
    f = lambda x, t: (WORLD.Allreduce(x), WORLD.Allreduce(x, op=MPI.MAX, token=t)[1])  # noqa: E731
    compiled = jax.jit(f, donate_argnums=0).lower(x, create_token()).compile()
    token = create_token()
    for i in range(3):
        total, token = compiled(jnp.array(np.arange(3.0) + RANK + i), token)
        np.testing.assert_array_equal(total, SIZE * (np.arange(3.0) + i) + SIZE * (SIZE - 1) / 2)


def test_donated_arguments():
    operands = np.random.default_rng(RANK).normal(size=(2, 100))
    expected = sum(np.random.default_rng(r).normal(size=(2, 100)) for r in range(SIZE))
    f = jax.jit(lambda x, y: (WORLD.Allreduce(x), WORLD.Bcast(y), WORLD.Allreduce(y)), donate_argnums=(0, 1))
    for _ in range(3):
        x, y = map(jnp.array, operands)
        total, first, total_of_first = f(x, y)
        np.testing.assert_allclose(total, expected[0], rtol=1e-12, atol=1e-15)
        np.testing.assert_array_equal(first, np.random.default_rng(0).normal(size=(2, 100))[1])
        np.testing.assert_allclose(total_of_first, expected[1], rtol=1e-12, atol=1e-15)
        assert x.is_deleted()


# Tokens


class Threaded:
    """The communicator, with a token that goes from call to call."""

    def __init__(self, comm, token):
        self.comm, self.token, self.rank, self.size = comm, token, comm.rank, comm.size

    def __getattr__(self, name):
        def call(*args, **kwargs):
            result, self.token = getattr(self.comm, name)(*args, token=self.token, **kwargs)
            assert isinstance(self.token, Token)
            return result

        return call


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
def test_every_operation_takes_and_gives_a_token(jit):
    # Those with neighbours have a communicator of their own: test_neighbors.py.
    which = [case for case in CASES if case.op in (None, "SUM", "MAX") and "Neighbor" not in case.method]
    xs = [case.operands(WORLD) for case in which]

    def program(token, operands):
        comm = Threaded(WORLD, token)
        return comm.token, [case.call(comm, x) for case, x in zip(which, operands, strict=True)]

    token, results = jit(program)(create_token(), [x[RANK] for x in xs])
    assert isinstance(token, Token)
    for case, y, x in zip(which, results, xs, strict=True):
        case.check(y, x, RANK)


def shift(x, token):
    return WORLD.Sendrecv(x, (RANK + 1) % SIZE, source=(RANK - 1) % SIZE, token=token)


def fori_loop(x, token):
    return lax.fori_loop(0, 2, lambda i, c: shift(*c), (x, token))


def while_loop(x, token):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, *shift(*c[1:])), (0, x, token))[1:]


def scan(x, token):
    return lax.scan(lambda c, _: (shift(*c), None), (x, token), None, length=2)[0]


def cond(x, token):
    x, token = lax.cond(x[0] == x[0], shift, lambda x, token: (x, token), x, token)
    return jax.checkpoint(shift)(x, token)


def twice(x, token):
    return jax.jit(shift)(*jax.jit(shift)(x, token))


custom_jvp = jax.custom_jvp(twice)
custom_jvp.defjvp(lambda primals, tangents: jax.jvp(twice, primals, tangents))
custom_vjp = jax.custom_vjp(twice)
custom_vjp.defvjp(lambda x, token: (twice(x, token), None), lambda _, ct: ct)


@pytest.mark.parametrize("loop", [fori_loop, while_loop, scan, cond, custom_jvp, custom_vjp])
def test_tokens_go_through(loop):
    xs = [np.random.default_rng(r).normal(size=2) for r in range(SIZE)]
    y, token = jax.jit(loop)(xs[RANK], create_token(xs[RANK]))
    np.testing.assert_array_equal(y, xs[RANK - 2] if SIZE > 1 else xs[0])
    assert isinstance(token, Token)
    assert token.array.shape == (0,)


def test_tokens_are_made_from_any_pytree():
    for x in (None, 1.0, {"a": jnp.zeros(2), "b": [np.int32(1), True]}):
        token = create_token(x)
        assert isinstance(token, Token)
        assert jax.tree_util.tree_structure(token) == jax.tree_util.tree_structure(create_token())
        assert "Token" in repr(token)
