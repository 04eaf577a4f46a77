"""Two threads, with a communicator each: their operations are in order by thread, and meet only each other."""

import threading

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import left, right
from mpi4py import MPI

import jaxcomm

RANK, SIZE = harness.WORLD.rank, harness.WORLD.size
COMMS = [harness.communicator("world").Dup() for _ in range(2)]
ROUNDS = 10


def at_once(functions):
    """Run each in a thread of its own, and raise what one of them raises."""
    results, errors = [None] * len(functions), []

    def run(i):
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[i]) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return results


def steps(comm, x):
    """A message round the ring with the same tags in both threads, a reduction, and a request."""
    x = comm.Sendrecv(x, right(comm), 1, source=left(comm), recvtag=1) + 1
    request = comm.Iallreduce(x, op=MPI.MAX)
    x = comm.Allreduce(x) + comm.rank
    return (x + request.Wait()) % 101


def by_numpy(start, rounds):
    xs = [np.int32(start + r) for r in range(SIZE)]
    for _ in range(rounds):
        xs = [xs[r - 1] + 1 for r in range(SIZE)]
        most = max(xs)
        xs = [(sum(xs) + r + most) % 101 for r in range(SIZE)]
    return xs[RANK]


def eagerly(comm, x, rounds):
    for _ in range(rounds):
        x = steps(comm, x)
    return x


def call_by_call(jit):
    def run(comm, x, rounds):
        once = jit(lambda x: steps(comm, x))
        for _ in range(rounds):
            x = once(x)
        return x

    return run


def in_a_loop(comm, x, rounds):
    return jax.jit(lambda x: jax.lax.fori_loop(0, rounds, lambda _, x: steps(comm, x), x))(x)


def on_buffers(comm, x, rounds):
    """mpi4py's own calls."""
    x = np.array(x)
    for _ in range(rounds):
        y, most, total = np.array(x), np.empty_like(x), np.empty_like(x)
        comm.Sendrecv(x, right(comm), 1, y, left(comm), 1)
        y += 1
        comm.Iallreduce(y, most, op=MPI.MAX).Wait()
        comm.Allreduce(y, total)
        x = (total + comm.rank + most) % 101
    return x


KINDS = {
    "eager": eagerly,
    "jax.jit": call_by_call(jax.jit),
    "jaxcomm.jit": call_by_call(jaxcomm.jit),
    "a loop": in_a_loop,
    "mpi4py": on_buffers,
}
PAIRS = [(a, b) for i, a in enumerate(KINDS) for b in list(KINDS)[i:]]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[f"{a} and {b}" for a, b in PAIRS])
def test_two_threads(first, second):
    """One does twice as much as the other, and on odd ranks starts last."""
    work = [
        lambda: KINDS[first](COMMS[0], jnp.int32(RANK), ROUNDS),
        lambda: KINDS[second](COMMS[1], jnp.int32(RANK + 40), 2 * ROUNDS),
    ]
    order = slice(None, None, -1 if RANK % 2 else 1)
    results = at_once(work[order])[order]
    assert [int(x) for x in results] == [by_numpy(0, ROUNDS), by_numpy(40, 2 * ROUNDS)]


def test_an_error_is_that_of_its_thread():
    @jax.jit
    def send(x, dest):
        COMMS[0].Send(x, dest)
        return x

    def fails():
        with pytest.raises(jax.errors.JaxRuntimeError, match="dest must be a rank"):
            jax.block_until_ready(send(jnp.ones(3), SIZE))

    def goes_on():
        return int(KINDS["jax.jit"](COMMS[1], jnp.int32(RANK), ROUNDS))

    assert at_once([fails, goes_on])[1] == by_numpy(0, ROUNDS)
