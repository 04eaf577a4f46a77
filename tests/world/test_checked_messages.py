"""Checking mode: who receives a message that was not meant so is told whose it is. CASES 21."""

import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import jaxcomm
from jaxcomm import JaxComm

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
SMALL, LARGE = 4, 1 << 17  # at once; in two steps
jits = pytest.mark.parametrize("jit", [jax.jit, jaxcomm.jit, lambda f: f], ids=["jit", "jaxcomm.jit", "eager"])
pytestmark = pytest.mark.skipif(SIZE < 2, reason="a message to oneself may wait for its receive, which comes behind it")
sizes = pytest.mark.parametrize("n", [SMALL, LARGE], ids=["small", "large"])


@pytest.fixture(autouse=True)
def checked():
    with jaxcomm.checking():
        yield


def blocking(x, template, tag=0, **more):
    WORLD.Bsend(x, RIGHT, tag)
    return WORLD.Recv(template, LEFT, tag, **more)


def wildcards(x, template):
    WORLD.Bsend(x, RIGHT, 3)
    return WORLD.Recv(template, MPI.ANY_SOURCE, MPI.ANY_TAG)


def nonblocking(x, template):
    mine = WORLD.Irecv(template, LEFT, 5)
    theirs = WORLD.Isend(x, RIGHT, 5)
    theirs.Wait()
    return mine.Wait()


def exchanged(x, template):
    return WORLD.Sendrecv(x, RIGHT, 1, template, LEFT, 1)


def probed(x, template):
    WORLD.Bsend(x, RIGHT, 2)
    return WORLD.Mprobe(LEFT, 2, return_status=True)[0].Recv(template)


WAYS = {f.__name__: f for f in (blocking, wildcards, nonblocking, exchanged, probed)}
ways = pytest.mark.parametrize("way", WAYS)


def fails_with(jit, call, *args):
    """The text of what a program raises. Everything is received when it returns."""

    def program():
        jax.block_until_ready(jit(call)(*args))
        jax.effects_barrier()
        jaxcomm.flush()

    with pytest.raises(Exception) as raised:  # noqa: PT011  whatever JAX makes of it
        program()
    return str(raised.value)


def names_the_sender(text, way, n, dtype="float64"):
    what = {"exchanged": "sendrecv", "nonblocking": "isend"}.get(way, "send")
    where = "(exchanged|blocking|wildcards|nonblocking|probed)"
    call = rf"  {what} on MPI_COMM_WORLD, rank {LEFT} of {SIZE}, {n} x {dtype} .*"
    assert re.search(rf"{call}, at .*test_checked_messages.py:\d+ \({where}\)", text), text
    return True


@jits
@ways
@sizes
def test_a_message_of_another_dtype(jit, way, n):
    if way == "exchanged":  # whose buffers have one dtype
        pytest.skip("Sendrecv refuses it when it is traced")
    text = fails_with(jit, WAYS[way], jnp.arange(n, dtype=jnp.int64), jnp.zeros(n))
    assert f"a message of {n} x int64 was received with a template of {n} x float64" in text
    assert names_the_sender(text, way, n, "int64")
    np.testing.assert_array_equal(jit(WAYS[way])(1.0 * jnp.arange(n) + RANK, jnp.zeros(n)), np.arange(n) + LEFT)


@jits
@ways
@sizes
def test_a_message_that_is_longer(jit, way, n):
    if n == LARGE and MPI.get_vendor()[0] == "Open MPI":
        pytest.skip("Open MPI writes behind the buffer before it reports the error, also for mpi4py alone")
    text = fails_with(jit, WAYS[way], jnp.arange(2.0 * n), jnp.zeros(n))
    assert names_the_sender(text, way, 2 * n)
    assert f"the template has room for {n} x float64" in text


@jits
@ways
def test_a_message_that_is_shorter(jit, way):
    x, template = jnp.arange(3.0), jnp.zeros(5)
    if way == "probed":  # it was looked at
        np.testing.assert_array_equal(jit(WAYS[way])(x, template)[:3], x)
        return
    text = fails_with(jit, WAYS[way], x, template)
    assert "a message of 3 x float64 is shorter than its template of 5 x float64" in text
    assert names_the_sender(text, way, 3)


@jits
def test_who_asks_how_much_has_come_may_get_less(jit):
    x, template = jnp.arange(3.0) + RANK, jnp.zeros(5)
    y, status = jit(lambda x: blocking(x, template, return_status=True))(x)
    assert status.Get_count() == 3
    np.testing.assert_array_equal(y, [LEFT, LEFT + 1, LEFT + 2, 0, 0])
    known = MPI.Status()
    jit(lambda x: blocking(x, template, status=known))(x)
    jaxcomm.flush()
    assert known.Get_count(MPI.DOUBLE) == 3

    def later(x):
        mine = WORLD.Irecv(template, LEFT, 5)
        theirs = WORLD.Isend(x, RIGHT, 5)
        y, status = mine.Wait(return_status=True)
        theirs.Wait()
        return y, status.Get_count()

    assert jit(later)(x)[1] == 3
    g = jit(jax.grad(lambda x: jnp.sum(blocking(x, jnp.pad(0 * x, (0, 2)), return_status=True)[0] ** 2)))(x)
    np.testing.assert_allclose(g, 2 * x)


@jits
def test_differentiation_does_not_ask(jit):
    call = lambda x: jnp.sum(blocking(x, jnp.zeros(5)))  # noqa: E731
    assert "is shorter than its template" in fails_with(jit, jax.grad(call), jnp.arange(3.0))


def test_messages_without_a_note():
    """What mpi4py's methods send and receive has none: neither is it waited for, nor taken for that of another message."""
    zeros = np.zeros(4, np.int32)
    for _ in range(2):
        # Sent by mpi4py, received here; the notes of what is sent here come too early.
        MPI.Intracomm.Isend(WORLD, zeros, RIGHT, 7).Free()
        WORLD.Bsend(jnp.ones(4, jnp.int32), RIGHT, 7)
        np.testing.assert_array_equal(WORLD.Recv(jnp.ones(4, jnp.float32), LEFT, 7), 0)
        np.testing.assert_array_equal(WORLD.Recv(jnp.zeros(4, jnp.int32), LEFT, 7), 1)
        # Sent here, received by mpi4py: notes stay.
        WORLD.Bsend(jnp.zeros(4, jnp.int64), RIGHT, 7)
        WORLD.Recv(np.ones(4, np.int64), LEFT, 7)
    # Now zeros are not taken for those of any message.
    WORLD.Send(np.zeros(4), RIGHT, 7)
    np.testing.assert_array_equal(WORLD.Recv(jnp.ones(4), LEFT, 7), 0)
    WORLD.send("words", RIGHT, 7)
    assert WORLD.recv(None, LEFT, 7) == "words"


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
def test_messages_out_of_order(jit):
    """Requests that end in another order than they began, and messages of one tag with several dtypes."""

    def program(x):
        xs = [x, x.astype(jnp.int32), x.astype(jnp.float32), 2 * x]
        mine = [WORLD.Irecv(jnp.zeros(4, y.dtype), MPI.ANY_SOURCE, 9) for y in xs]
        for y in xs:
            WORLD.Isend(y, RIGHT, 9).Wait()
        return [request.Wait() for request in reversed(mine)][::-1]

    out = jit(program)(jnp.arange(4.0) + RANK)
    expected = np.arange(4.0) + LEFT
    for y, scale in zip(out, (1, 1, 1, 2), strict=True):
        np.testing.assert_array_equal(y, scale * expected)


def test_trees_batches_and_derivatives():
    tree = {"a": jnp.arange(4.0), "b": jnp.arange(3), "c": jnp.ones((2, 2))}
    got = WORLD.Sendrecv(tree, RIGHT, 0, tree, LEFT, 0)
    jax.tree.map(np.testing.assert_array_equal, got, tree)
    xs = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(jax.vmap(lambda x: exchanged(x, jnp.zeros(2)))(xs), xs)
    for f in (exchanged, blocking, nonblocking):
        g = jax.grad(lambda x, f=f: jnp.sum(f(x, x) ** 3))(jnp.arange(3.0))
        np.testing.assert_allclose(g, 3 * np.arange(3.0) ** 2)


def test_messages_that_were_matched_on_the_host():
    for more, says in (
        (0, "a message of 3 x int64 was received with a template of 3 x float64"),
        (1, "has room for 2 x"),
    ):
        WORLD.Bsend(jnp.arange(3) * (1.0 if more else 1), RIGHT, 8)
        with pytest.raises(Exception, match=says) as raised:
            WORLD.Mprobe(LEFT, 8).Recv(jnp.zeros(3 - more))
        assert re.search(r"  send on .*, at .*test_checked_messages.py:\d+ \(test_messages_that", str(raised.value))


def test_communicators_of_some_ranks():
    with JaxComm(WORLD.Split(RANK % 2, -RANK)) as part:
        part.Bsend(jnp.arange(3), (part.rank + 1) % part.size)
        with pytest.raises(RuntimeError, match=r"a message of 3 x int64 was received with a template of 3 x float64"):
            part.Recv(jnp.zeros(3), (part.rank - 1) % part.size)
    with JaxComm(MPI.COMM_SELF) as alone:
        alone.Bsend(jnp.arange(3), 0)
        with pytest.raises(RuntimeError, match="was received with a template of"):
            alone.Recv(jnp.zeros(3), 0)


def test_nothing_is_checked_outside():
    with jaxcomm.checking(False):
        assert blocking(jnp.arange(3), jnp.zeros(3)).dtype == jnp.float64
        assert blocking(jnp.arange(3.0), jnp.zeros(5)).shape == (5,)
