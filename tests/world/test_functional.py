"""The functional API: twelve functions over the methods, tokens in and out."""

import inspect

import harness
import jax
import numpy as np
import pytest
from counting import Compilations
from mpi4py import MPI

import jaxcomm.functional as jf
from jaxcomm import Token, create_token

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
NULL, ANY_TAG = MPI.PROC_NULL, MPI.ANY_TAG


def draw(rank):
    return np.random.default_rng(rank).normal(size=(SIZE, 2))


ALL = np.stack([draw(r) for r in range(SIZE)])
X = ALL[RANK]
LAST = SIZE - 1
ON_LAST = RANK == LAST

# name: the call, with what comes after the operands passed on; what it gives.
CALLS = {
    "allgather": (lambda *c, **k: jf.allgather(X, *c, **k), ALL),
    "allreduce": (lambda *c, **k: jf.allreduce(X, MPI.MAX, *c, **k), ALL.max(axis=0)),
    "alltoall": (lambda *c, **k: jf.alltoall(X, *c, **k), ALL[:, RANK]),
    "barrier": (lambda *c, **k: jf.barrier(*c, **k), None),
    "bcast": (lambda *c, **k: jf.bcast(X, LAST, *c, **k), ALL[LAST]),
    "gather": (lambda *c, **k: jf.gather(X, LAST, *c, **k), ALL if ON_LAST else X),
    "recv": (lambda *c, **k: jf.recv(X, NULL, ANY_TAG, *c, **k), X),
    "reduce": (lambda *c, **k: jf.reduce(X, MPI.MIN, LAST, *c, **k), ALL.min(axis=0) if ON_LAST else X),
    "scan": (lambda *c, **k: jf.scan(X, MPI.MAX, *c, **k), ALL[: RANK + 1].max(axis=0)),
    "scatter": (lambda *c, **k: jf.scatter(X if ON_LAST else X[0], LAST, *c, **k), ALL[LAST, RANK]),
    "send": (lambda *c, **k: jf.send(X, NULL, 3, *c, **k), None),
    "sendrecv": (lambda *c, **k: jf.sendrecv(X, X, LEFT, RIGHT, 2, 2, *c, **k), ALL[LEFT]),
}
SIGNATURES = {
    "allgather": "x, comm, token",
    "allreduce": "x, op, comm, token",
    "alltoall": "x, comm, token",
    "barrier": "comm, token",
    "bcast": "x, root, comm, token",
    "gather": "x, root, comm, token",
    "recv": "x, source=ANY_SOURCE, tag=ANY_TAG, comm, status, token",
    "reduce": "x, op, root, comm, token",
    "scan": "x, op, comm, token",
    "scatter": "x, root, comm, token",
    "send": "x, dest, tag=0, comm, token",
    "sendrecv": "sendbuf, recvbuf, source, dest, sendtag=0, recvtag=ANY_TAG, comm, status, token",
}


def test_there_are_twelve():
    assert sorted(jf.__all__) == sorted(CALLS) == sorted(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    names = {"comm": None, "token": None, "status": None, "tag=0": 0, "sendtag=0": 0}
    parameters = inspect.signature(getattr(jf, name)).parameters
    stated = SIGNATURES[name].split(", ")
    assert list(parameters) == [s.partition("=")[0] for s in stated]
    for s, parameter in zip(stated, parameters.values(), strict=True):
        expected = getattr(MPI, s.partition("=")[2], names.get(s, inspect.Parameter.empty))
        assert parameter.default == expected
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def check(name, result):
    expected = CALLS[name][1]
    if expected is None:
        assert isinstance(result, Token)
        return result
    value, token = result
    assert isinstance(value, jax.Array)
    np.testing.assert_array_equal(value, expected)
    assert isinstance(token, Token)
    return token


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
def test_functions(jit):
    """Without comm and token, and with both, by name and in their place; the token goes from call to call."""

    def program(token):
        results = {name: [call()] for name, (call, _) in CALLS.items()}
        for name, (call, _) in CALLS.items():
            status = [MPI.Status()] if "status" in SIGNATURES[name] else []
            for result in (call(comm=WORLD, token=token), call(WORLD, *status, token)):
                results[name].append(result)
                token = result if isinstance(result, Token) else result[1]
        return results

    for name, results in jit(program)(create_token()).items():
        for result in results:
            check(name, result)


def test_any_communicator():
    """A raw mpi4py communicator is wrapped once, and remembered; the default is a duplicate of COMM_WORLD."""
    raw = MPI.COMM_WORLD.Split(RANK % 2, -RANK)
    members = [r for r in reversed(range(SIZE)) if r % 2 == RANK % 2]
    program = jax.jit(lambda x: (jf.allgather(x, comm=raw)[0], jf.allgather(x)[0]))
    for x in (1.0, 2.0):
        with Compilations() as made:
            inside, outside = program(x + RANK)
        np.testing.assert_array_equal(inside, x + np.array(members))
        np.testing.assert_array_equal(outside, x + np.arange(SIZE))
        assert made.count == (x == 1)
    slots = {jf._ours(MPI.Intracomm(raw)).slot for _ in range(3)}
    assert len(slots) == 1
    assert jf._ours(None).slot not in slots
    wrapped = jf._ours(raw)
    assert MPI.Comm.Compare(wrapped, raw) == MPI.CONGRUENT
    raw.Free()
    again = MPI.COMM_WORLD.Dup()  # may well have the handle of the freed one
    np.testing.assert_array_equal(jf.allgather(RANK, comm=again)[0], np.arange(SIZE))
    again.Free()


@pytest.mark.skipif(SIZE == 1, reason="a message to oneself may wait for its receive")
def test_messages_between_two_ranks():
    """The others need not take part."""
    status = MPI.Status()
    if RANK == LAST:
        token = jf.send(X, 0, 5)
        assert isinstance(token, Token)
    if RANK == 0:
        y, token = jf.recv(X, tag=5, status=status)
        np.testing.assert_array_equal(y, ALL[LAST])
        assert (status.source, status.tag) == (LAST, 5)


def test_other_things_are_no_communicators():
    for wrong in (0, "world", MPI.SUM):
        with pytest.raises(TypeError, match="comm must be a JaxComm, an mpi4py communicator or None, got"):
            jf.allreduce(X, MPI.SUM, comm=wrong)
    with pytest.raises(TypeError, match=r"token must be a jaxcomm\.Token"):
        jf.allreduce(X, MPI.SUM, token=0)
    with pytest.raises(ValueError, match=r"null|freed"):
        jf.allreduce(X, MPI.SUM, comm=MPI.COMM_NULL)
