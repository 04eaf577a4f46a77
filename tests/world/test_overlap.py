"""While a message does not come, a compiled program goes on with what does not depend on it."""

import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import messages
from jax import lax

import jaxcomm

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
LATE = 0.2  # seconds, far longer than a receive waits on the spot

pytestmark = pytest.mark.skipif(SIZE == 1, reason="nobody to be late")


def note(log, what, x):
    """Write down when this point of the program is reached."""
    return jax.pure_callback(
        lambda x: log.append((what, time.monotonic())) or x, jax.ShapeDtypeStruct(x.shape, x.dtype), x
    )


@pytest.mark.parametrize("recv", ["first", "last"])
@pytest.mark.parametrize("operation", ["Recv", "Sendrecv", "Irecv", "Ibcast"])
def test_computation_goes_on_while_a_message_is_late(operation, recv):
    """Rank 0 has computed before the message is there, wherever the two stand in the source."""
    log = []
    receive = {
        "Recv": lambda x: WORLD.Recv(x, 1, 3),
        "Sendrecv": lambda x: WORLD.Sendrecv(x, 1, 3, x, 1, 3),
        "Irecv": lambda x: WORLD.Irecv(x, 1, 3).Wait(),
        "Ibcast": lambda x: WORLD.Ibcast(x, 1).Wait(),
    }[operation]

    def compute(a):
        return note(log, "computed", lax.fori_loop(0, 5, lambda i, a: jnp.sin(a), lax.sort(a)))

    def both(x, a):
        if recv == "first":
            y = receive(x)
            return y, compute(a)
        z = compute(a)
        return receive(x), z

    x, a = jnp.arange(3.0) + RANK, jnp.arange(20_000.0)
    program = jaxcomm.jit(both)
    for compiled in (False, True):
        log.clear()
        WORLD.barrier()
        start = time.monotonic()
        if RANK == 0:
            y, _ = jax.block_until_ready(program(x, a))
            took = time.monotonic() - start
            computed = log[0][1] - start
            ok = not compiled or (took > 0.9 * LATE and computed < took - LATE / 4)
            harness.agree(ok, f"computed after {computed} s, ended after {took} s")
            np.testing.assert_array_equal(y, np.arange(3.0) + 1)
        else:
            if RANK == 1:
                time.sleep(LATE)
                if operation in ("Recv", "Irecv"):
                    WORLD.Send(x, 0, 3)
                elif operation == "Sendrecv":
                    np.testing.assert_array_equal(WORLD.Sendrecv(x, 0, 3, x, 0, 3), np.arange(3.0))
            if operation == "Ibcast":
                WORLD.Ibcast(x, 1).Wait()
            harness.agree(True)


@pytest.mark.parametrize("jit", [jax.jit, jaxcomm.jit], ids=["jit", "jaxcomm.jit"])
def test_what_comes_after_a_late_message_waits_for_it(jit):
    """The order of messages is the program's, also when the receive ends on another thread."""

    def f(x):
        y = WORLD.Recv(x, LEFT, 1)
        WORLD.Send(y + 1, RIGHT, 2)
        return WORLD.Allreduce(y)

    program = jit(f)
    for i in range(3):
        WORLD.Barrier()
        if i % SIZE == RANK:
            time.sleep(LATE / 4)
        request = WORLD.Isend(np.array([float(RANK + i)]), RIGHT, 1)
        total = program(jnp.zeros(1))
        np.testing.assert_array_equal(total, [sum(range(SIZE)) + SIZE * i])
        request.Wait()
        assert messages(WORLD) == [(2, (RANK - 2) % SIZE + i + 1)]


def test_errors_of_late_messages():
    """A message that is too long is told as any other, and the next program works."""
    program = jaxcomm.jit(lambda x: WORLD.Recv(x, 0, 4))
    if RANK == 0:
        time.sleep(LATE / 4)
        for rank in range(1, SIZE):
            WORLD.Send(np.zeros(8), rank, 4)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"(?i)recv on .*rank {RANK} of {SIZE}, 2 x .*truncate"):
            jax.block_until_ready(program(jnp.zeros(2)))
    total = jaxcomm.jit(lambda x: WORLD.Allreduce(x))(jnp.ones(1))
    np.testing.assert_array_equal(total, [SIZE])
