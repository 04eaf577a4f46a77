"""Point-to-point: who sent what, how much of it, and what happens when it does not fit."""

import re
import time
import warnings
from contextlib import contextmanager, suppress

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from counting import Compilations
from mpi4py import MPI

from jaxcomm import JaxComm, flush
from jaxcomm._primitives import lowering

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
several_ranks = pytest.mark.skipif(SIZE == 1, reason="a message to oneself may wait for its receive")
eager_and_jitted = pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jitted"])


def values(rank, size=3):
    return jnp.asarray(np.random.default_rng(rank).normal(size=size))


def facts(status):
    return status.source, status.tag, status.Get_count(MPI.DOUBLE), status.Get_elements(MPI.DOUBLE), status.error


@eager_and_jitted
def test_a_status_tells_who_sent_how_much(jit):
    status, other = MPI.Status(), MPI.Status()

    def program(x):
        y = WORLD.Sendrecv(x, RIGHT, RANK, recvtag=LEFT, status=status)
        return y, WORLD.Sendrecv_replace(x[:2], LEFT, 50 + RANK, RIGHT, status=other)

    run = jit(program)
    for size in (3, 2):
        y, z = run(values(RANK, size))
        flush()
        assert facts(status) == (LEFT, LEFT, size, size, 0)
        assert facts(other) == (RIGHT, 50 + RIGHT, 2, 2, 0)
        np.testing.assert_array_equal(y, values(LEFT, size))
        np.testing.assert_array_equal(z, values(RIGHT, size)[:2])


@eager_and_jitted
def test_a_short_message_leaves_the_rest_of_the_template(jit):
    status = MPI.Status()
    template = np.arange(5.0) + 100 * RANK
    y = jit(lambda x, t: WORLD.Sendrecv(x, RIGHT, 4, t, LEFT, status=status))(values(RANK, RANK + 1), template)
    flush()
    assert facts(status) == (LEFT, 4, LEFT + 1, LEFT + 1, 0)
    np.testing.assert_array_equal(y, [*values(LEFT, LEFT + 1), *template[LEFT + 1 :]])


@eager_and_jitted
def test_an_empty_message(jit):
    status = MPI.Status()
    template = values(RANK)
    y = jit(lambda x, t: WORLD.Sendrecv(x, RIGHT, 4, t, LEFT, status=status))(jnp.zeros((0, 2)), template)
    flush()
    assert facts(status)[:3] == (LEFT, 4, 0)
    np.testing.assert_array_equal(y, template)


@eager_and_jitted
def test_proc_null(jit):
    """CASES 26: nothing goes, nothing comes, and the template passes through."""
    statuses = [MPI.Status() for _ in range(3)]
    null = MPI.PROC_NULL
    x = values(RANK)

    def program(x):
        WORLD.Send(x, null)
        WORLD.Ssend(x, null, 3)
        received = WORLD.Recv(x + 1, null, 5, statuses[0])
        exchanged = WORLD.Sendrecv(x, null, 0, x + 2, null, 7, statuses[1])
        return received, exchanged, WORLD.Sendrecv_replace(x, null, 0, null, 0, statuses[2])

    received, exchanged, replaced = jit(program)(x)
    flush()
    np.testing.assert_array_equal(received, x + 1)
    np.testing.assert_array_equal(exchanged, x + 2)
    np.testing.assert_array_equal(replaced, x)
    for status in statuses:
        assert facts(status) == (null, MPI.ANY_TAG, 0, 0, 0)


@several_ranks
@eager_and_jitted
def test_any_source_and_any_tag(jit):
    def collect(x):
        status = [MPI.Status() for _ in range(SIZE - 1)]
        return jit(lambda x: [WORLD.Recv(x, status=s) for s in status])(x), status

    if RANK == 0:
        received, status = collect(jnp.zeros(3))
        flush()
        assert sorted(s.source for s in status) == list(range(1, SIZE))
        for y, s in zip(received, status, strict=True):
            assert s.tag == 10 + s.source
            np.testing.assert_array_equal(y, values(s.source))
    else:
        jit(lambda x: WORLD.Ssend(x, 0, 10 + RANK))(values(RANK))


@several_ranks
@eager_and_jitted
def test_tags_choose(jit):
    def program(x):
        WORLD.Send(x, RIGHT, 1)
        WORLD.Send(2 * x, RIGHT, 2)
        second = WORLD.Recv(x, LEFT, 2)
        return WORLD.Recv(x, LEFT), second

    first, second = jit(program)(values(RANK))
    np.testing.assert_array_equal(first, values(LEFT))
    np.testing.assert_array_equal(second, 2 * values(LEFT))


@several_ranks
@eager_and_jitted
def test_ssend_waits_for_its_receive(jit):
    if RANK == 0:
        jit(lambda x: WORLD.Ssend(x, 1))(values(0))
        flush()
        harness.CONTROL.send("sent", 1)
    if RANK == 1:
        limit, early = time.monotonic() + 0.1, False
        while not early and time.monotonic() < limit:
            early = harness.CONTROL.Iprobe(0)
        y = WORLD.Recv(values(1), 0)
        assert harness.CONTROL.recv(source=0) == "sent"
        assert not early
        np.testing.assert_array_equal(y, values(0))


def test_numpy_integers_are_ranks_and_tags():
    y = WORLD.Sendrecv(values(RANK), np.int64(RIGHT), np.uint8(3), source=jnp.int32(LEFT), recvtag=np.int16(3))
    np.testing.assert_array_equal(y, values(LEFT))


def test_traced_ranks_and_tags():
    """CASES 20: one program for any partner, and PROC_NULL, ANY_SOURCE and ANY_TAG among them."""
    status = MPI.Status()
    program = jax.jit(
        lambda x, dest, sendtag, source, recvtag: WORLD.Sendrecv(x, dest, sendtag, x, source, recvtag, status)
    )
    x = values(RANK)
    program(x, MPI.PROC_NULL, 0, MPI.PROC_NULL, 0)
    for shift in range(SIZE):
        to, origin = (RANK + shift) % SIZE, (RANK - shift) % SIZE
        for source, tag in ((origin, shift), (MPI.ANY_SOURCE, shift), (origin, MPI.ANY_TAG)):
            with Compilations() as again:
                y = program(x, to, shift, source, tag)
            assert again.count == 0
            np.testing.assert_array_equal(y, values(origin))
            flush()
            assert (status.source, status.tag) == (origin, shift)
    np.testing.assert_array_equal(program(x, np.int8(MPI.PROC_NULL), 0, jnp.int64(MPI.PROC_NULL), 9), x)


HERE = rf"sendrecv on .*, rank {RANK} of {SIZE}, .* x float64 .*, at \S*test_messages.py:\d+ \(<lambda>\): "
WRONG = {
    "dest too large": (SIZE, 0, f"{HERE}dest must be a rank .*size .*PROC_NULL, got {{}}"),
    "dest negative": (-77, 0, f"{HERE}dest must be .*got {{}}"),
    "dest beyond 32 bits": (2**32 + RANK, 0, f"{HERE}dest must be .*got a number beyond 32 bits"),
    "tag negative": (RANK, -7, f"{HERE}tag must lie between 0 and .*TAG_UB.*got {{}}"),
    "tag beyond 32 bits": (RANK, 2**32 + 3, f"{HERE}tag must lie between 0 and .*got a number beyond 32 bits"),
}
send_to = jax.jit(lambda x, dest, tag, source: WORLD.Sendrecv(x, dest, tag, x, source))
total = jax.jit(WORLD.Allreduce)


@pytest.fixture(autouse=True)
def clean():
    """A failure that a test left pending is not the next test's."""
    yield
    with suppress(jax.errors.JaxRuntimeError):
        flush()


@contextmanager
def works_afterwards():
    """The communicator is as good as new; also where the test fails, as other ranks take part."""
    try:
        yield
    finally:
        works()


def works():
    expected = sum(values(r) for r in range(SIZE))
    np.testing.assert_allclose(total(values(RANK)), expected, rtol=1e-12)
    np.testing.assert_allclose(WORLD.Allreduce(values(RANK)), expected, rtol=1e-12)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_traced_rank_or_tag_out_of_range(wrong):
    """Known when the program runs: an exception then, before MPI is entered."""
    dest, tag, pattern = WRONG[wrong]
    with works_afterwards():
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match=pattern.format(tag if "tag" in wrong else dest)):
                send_to(values(RANK), dest, tag, RANK).block_until_ready()


# A message that is longer than its template: what MPI reports. Rank 0 sends, rank 1 has too little room.


def send_too_much(times):
    for _ in range(times):
        WORLD.Send(np.arange(8.0), 1, 5)


TRUNCATED = f"(?i)recv on .*, rank 1 of {SIZE}, 4 x float64 .*from rank 0 tag 5.*truncate"


@several_ranks
def test_truncation_when_eager():
    with works_afterwards():
        if RANK == 0:
            send_too_much(3)
        if RANK == 1:
            for _ in range(3):
                with pytest.raises(MPI.Exception, match=TRUNCATED) as error:
                    WORLD.Recv(jnp.zeros(4), 0, 5)
                assert error.value.Get_error_class() == MPI.ERR_TRUNCATE


@several_ranks
def test_no_truncation_passes_unnoticed():
    """MPICH 5.0 forgets now and then, on four busy ranks, to report that a message did not fit."""
    for _ in range(300):
        request = WORLD.Isend(jnp.arange(8.0), RIGHT, 3)
        with pytest.raises(MPI.Exception, match=r"(?i)truncate") as raised:
            WORLD.Recv(jnp.zeros(4), MPI.ANY_SOURCE, MPI.ANY_TAG)
        assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE
        request.Wait()
        harness.CONTROL.Barrier()


@several_ranks
def test_truncation_when_jitted():
    with works_afterwards():
        if RANK == 0:
            send_too_much(3)
        if RANK == 1:
            receive = jax.jit(lambda x: WORLD.Recv(x, 0, 5))
            for _ in range(3):
                with pytest.raises(jax.errors.JaxRuntimeError, match=TRUNCATED):
                    receive(np.zeros(4)).block_until_ready()


@several_ranks
def test_truncation_in_pending_programs():
    with works_afterwards():
        if RANK == 0:
            send_too_much(2)
        if RANK == 1:
            receive = jax.jit(lambda x: WORLD.Recv(slow(x), 0, 5))
            for _ in range(2):
                receive(np.zeros(4))
                with pytest.raises(jax.errors.JaxRuntimeError, match=TRUNCATED):
                    flush()


slow_send_to = jax.jit(lambda x, dest: WORLD.Sendrecv(slow(x), dest, 0, x, MPI.PROC_NULL))


def no_message():
    """A program that communicates nothing, but has its place in the order."""
    return send_to(values(RANK), MPI.PROC_NULL, 0, MPI.PROC_NULL).block_until_ready()


def test_the_failure_of_a_pending_program_is_raised_by_its_result():
    """What comes next cannot know that it was seen: it warns, and works."""
    for _ in range(3):
        with works_afterwards():
            y = slow_send_to(values(RANK), SIZE)
            with pytest.raises(jax.errors.JaxRuntimeError, match="dest must be"):
                y.block_until_ready()
            with pytest.warns(RuntimeWarning, match="earlier program failed .*dest must be"):
                no_message()
            with warnings.catch_warnings(action="error"):
                no_message()


@pytest.mark.parametrize(
    "following", [flush, lambda: WORLD.Sendrecv(1.0, MPI.PROC_NULL, source=MPI.PROC_NULL)], ids=["flush", "eager"]
)
def test_the_failure_of_a_program_that_nobody_waited_for(following):
    """Raised once, by what waits for it next."""
    with works_afterwards():
        slow_send_to(values(RANK), SIZE)
        with pytest.raises(jax.errors.JaxRuntimeError, match="dest must be"):
            following()
        with warnings.catch_warnings(action="error"):
            following()


def test_the_failure_of_a_program_that_nobody_looked_at():
    """The next program raises it if it is still under way then, or warns."""
    reports = []
    with works_afterwards():
        slow_send_to(values(RANK), SIZE)
        for _ in range(2):
            with warnings.catch_warnings(record=True, action="always") as warned:
                try:
                    no_message()
                except jax.errors.JaxRuntimeError as error:
                    reports.append(str(error))
            reports += [str(warning.message) for warning in warned]
        with warnings.catch_warnings(action="error"):
            no_message()
    assert reports
    assert all("dest must be" in report for report in reports)


def test_errors_on_one_communicator_leave_the_others_alone():
    comm = JaxComm(MPI.COMM_SELF)
    f = jax.jit(comm.Allreduce)
    f(1.0)
    comm.Free()
    with pytest.raises(jax.errors.JaxRuntimeError, match="was freed"):
        f(2.0).block_until_ready()
    works()


# Where an operation was written is told by its errors, and is no reason to compile again


def test_call_sites():
    """Two equal operations differ by their place; lines added elsewhere in the file make no difference."""

    def lowered(source):
        lowering._sites.clear()  # as in another process
        space = {"comm": WORLD}
        exec(compile(source, "program.py", "exec"), space)
        return jax.jit(space["f"]).lower(values(RANK)).as_text()

    program = "def f(x):\n    y = comm.Scan(x)\n    return comm.Scan(y)\n"
    sites = re.findall(r"site = (\d+) : i64", lowered(program))
    assert len(set(sites)) == 2
    assert lowered(program) == lowered("import jax\n\n" + program) == lowered(program)
    assert lowered(program) != lowered(program.replace("    return", "\n    return"))


def test_call_sites_of_lambdas_are_not_mixed_up():
    """They have one name and one place in their function."""
    first = jax.jit(lambda x, dest: WORLD.Sendrecv(x, dest))
    second = jax.jit(lambda x, dest: WORLD.Sendrecv_replace(x, dest))
    lines = []
    for program in (first, second, first, second):
        with pytest.raises(jax.errors.JaxRuntimeError, match="dest must be") as error:
            jax.block_until_ready(program(values(RANK), SIZE))
        lines.append(int(re.search(r"test_messages.py:(\d+)", str(error.value))[1]))
    assert lines == [lines[0], lines[0] + 1] * 2
