"""The watchdog: what is said, and what follows, when an operation takes too long or a signal comes. CASES 22, 23, 47."""

import json
import re
import textwrap

import pytest
from launch import launch

LIMIT = 60  # seconds a job
pytestmark = pytest.mark.timeout(2 * LIMIT + 30)

PREAMBLE = """
import os, signal, threading, time
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
import jaxcomm
comm = jaxcomm.JaxComm(MPI.COMM_WORLD)
rank, size = comm.rank, comm.size
x = jnp.ones(3)
def later(seconds, number):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
"""


def run(code, ranks=3, **env):
    done = launch(["-c", PREAMBLE + textwrap.dedent(code)], ranks, LIMIT, env=env)
    print(done.stdout, done.stderr, sep="\n")
    assert not done.timed_out
    return done


@pytest.mark.parametrize(
    "call",
    ["comm.Allreduce(x)", "jax.jit(lambda x: comm.Allreduce(x))(x)", "jaxcomm.jit(lambda x: comm.Allreduce(x))(x)"],
)
def test_who_is_missing_is_told_and_the_others_go_on(call, tmp_path):
    done = run(
        f"""
        jax.block_until_ready(comm.Bcast(x))
        if rank == 1:
            time.sleep(4)
        print(float(jax.block_until_ready({call})[0]))
        time.sleep(0.5)
        """,
        JAXCOMM_TIMEOUT="1.5",
        JAXCOMM_REPORT=str(tmp_path),
    )
    assert done.returncode == 0
    assert [rank.stdout for rank in done.ranks] == ["3.0\n"] * 3
    text = done.ranks[0].stderr
    assert re.search(r"rank 1 is in no operation; its last one ended \d\.\d s ago: bcast on ", text)
    for rank in (0, 2):
        assert re.search(rf"rank {rank} has waited \d\.\d s in allreduce on .*, op SUM, at <string>:\d+", text)
    assert "Outside MPI: rank 1" in text
    assert "goes on" in text
    assert "What the ranks do" not in done.ranks[1].stderr + done.ranks[2].stderr
    (report,) = tmp_path.iterdir()
    ranks = json.loads(report.read_text())["ranks"]
    assert [r["rank"] for r in ranks] == [0, 1, 2]
    assert [len(r["waits_in"]) for r in ranks] == [1, 0, 1]
    assert all(r["last"][-1]["operation"].startswith("bcast on ") for r in ranks)


WAITS = {
    "a message": "comm.Recv(x, (rank + 1) % size, 7)",
    "a message in jit": "jax.jit(lambda x: comm.Recv(x, (rank + 1) % size, 7))(x)",
    "a request": "comm.Irecv(x, (rank + 1) % size, 7).Wait()",
    "a request in jit": "jax.jit(lambda x: comm.Irecv(x, (rank + 1) % size, 7).Wait())(x)",
    "a rendezvous": "comm.Ssend(x, (rank + 1) % size, 7)",
    "another message": "comm.Sendrecv(x, (rank + 1) % size, 7, source=(rank + 1) % size, recvtag=8)",
    "a probe": "comm.Probe((rank + 1) % size, 7)",
    "others": "comm.Split(rank, 0).Barrier() if rank == 0 else comm.Barrier() or jaxcomm.flush()",
}


@pytest.mark.parametrize("what", WAITS)
def test_an_operation_raises(what, tmp_path):
    """On every rank that waits for too long; life goes on elsewhere."""
    done = run(
        f"""
        other = jaxcomm.JaxComm(MPI.COMM_WORLD)
        try:
            if rank or {what != "others"}:
                jax.block_until_ready({WAITS[what]})
                jaxcomm.flush()
            else:
                time.sleep(4.5)
        except Exception as error:
            print("given up" in str(error), f"rank {{rank}} of 3" in str(error), "<string>:" in str(error))
            time.sleep(2)
        print(float(other.Allreduce(x)[0]), flush=True)
        MPI.COMM_WORLD.Barrier()
        os._exit(0)  # MPI cannot be finalised with a collective under way
        """,
        JAXCOMM_TIMEOUT="1",
        JAXCOMM_TIMEOUT_ACTION="raise",
        JAXCOMM_REPORT=str(tmp_path),
    )
    for rank, each in enumerate(done.ranks):
        told = "" if what == "others" and rank == 0 else "True True True\n"
        assert each.stdout == f"{told}3.0\n"
    if what != "others":
        assert "All ranks wait for each other" in done.stderr


def test_results_are_the_same_where_operations_may_raise():
    done = run(
        """
        import sys
        for jit in (lambda f: f, jax.jit, jaxcomm.jit):
            right, left = (rank + 1) % size, (rank - 1) % size
            status = MPI.Status()
            long = jnp.arange(5.0) - 5
            np.testing.assert_array_equal(jit(lambda x: comm.Allreduce(x))(x * rank), 3)
            np.testing.assert_array_equal(jit(lambda x: comm.Allreduce(x, op=MPI.MAX))(jnp.array([-rank])), 0)
            np.testing.assert_array_equal(jit(lambda x: comm.Bcast(x, 1))(x * rank), 1)
            np.testing.assert_array_equal(jit(lambda x: comm.Exscan(x))(x), rank)
            np.testing.assert_array_equal(jit(lambda x: comm.Allgather(x))(x[0] * rank), [0, 1, 2])
            gathered = jit(lambda x: comm.Gather(x, root=2))(x[0] * rank)
            np.testing.assert_array_equal(gathered, [0, 1, 2] if rank == 2 else rank)
            np.testing.assert_array_equal(jit(lambda x: comm.Alltoall(x))(x * rank), [0, 1, 2])
            y, s = jit(lambda x, t: comm.Sendrecv(x, right, source=left, recvbuf=t, return_status=True))(x * rank, long)
            np.testing.assert_array_equal(y, [left, left, left, -2, -1])
            assert int(s.source) == left and int(s.count) == 3, s
            if rank == 0:
                jit(lambda x: comm.Send(x, 1, 5))(x)
            if rank == 1:
                y = jit(lambda t: comm.Recv(t, MPI.ANY_SOURCE, status=status))(long)
                np.testing.assert_array_equal(y, [1, 1, 1, -2, -1])
                jax.effects_barrier()
                assert status.source == 0 and status.tag == 5
            np.testing.assert_array_equal(jit(lambda t: comm.Recv(t, MPI.PROC_NULL))(long), long)
            big = jnp.full(100_000, rank + 1.0)
            np.testing.assert_array_equal(jit(lambda x: comm.Sendrecv_replace(x, right, source=left))(big), left + 1)
            np.testing.assert_array_equal(jit(jax.grad(lambda x: jnp.sum(comm.Allreduce(x) ** 2)))(x), 18)
        comm.Barrier()
        print("right")
        """,
        JAXCOMM_TIMEOUT="50",
        JAXCOMM_TIMEOUT_ACTION="raise",
    )
    assert done.returncode == 0
    assert done.stdout == "right\n" * 3
    assert "jaxcomm:" not in done.stderr


def test_the_job_ends(tmp_path):
    done = run(
        "comm.Recv(x, (rank + 1) % size, 7)",
        JAXCOMM_TIMEOUT="1",
        JAXCOMM_TIMEOUT_ACTION="abort",
        JAXCOMM_REPORT=str(tmp_path),
    )
    assert done.returncode != 0
    assert done.seconds < 30
    assert "All ranks wait for each other" in done.stderr
    assert "ending the job (MPI_Abort), since JAXCOMM_TIMEOUT_ACTION is abort" in done.stderr


def test_a_rank_that_has_left_does_not_answer(tmp_path):
    done = run(
        """
        if rank == 0:
            comm.Recv(x, 1)
        """,
        ranks=2,
        JAXCOMM_TIMEOUT="1",
        JAXCOMM_TIMEOUT_ACTION="abort",
        JAXCOMM_REPORT=str(tmp_path),
    )
    assert done.returncode != 0
    assert "No answer from rank 1: it has left the program" in done.ranks[0].stderr


def test_requests_under_way_are_told(tmp_path):
    done = run(
        """
        request = comm.Irecv(x, (rank + 1) % size, 7)
        comm.Recv(x, (rank + 1) % size, 8)
        """,
        ranks=2,
        JAXCOMM_TIMEOUT="1",
        JAXCOMM_TIMEOUT_ACTION="abort",
        JAXCOMM_REPORT=str(tmp_path),
    )
    assert re.search(r"it has started and not yet waited for 1 request, irecv on .* tag 7", done.stderr)


def test_methods_of_mpi4pys_are_told(tmp_path):
    """Whoever is in one does not compute; nor does a rank that has ended keep the others from a report."""
    done = run(
        """
        if rank == 0:
            comm.Recv(np.zeros(3), 1, 7)
        elif rank == 1:
            comm.recv(source=0)
        """,
        JAXCOMM_TIMEOUT="1",
        JAXCOMM_TIMEOUT_ACTION="abort",
        JAXCOMM_REPORT=str(tmp_path),
    )
    assert done.returncode != 0
    for rank, method in enumerate(("Recv", "recv")):
        says = (
            rf"rank {rank} has waited \d\.\d s in mpi4py's {method} on MPI_COMM_WORLD, rank {rank} of 3, at <string>:"
        )
        assert re.search(says, done.stderr)
    assert "rank 2 does not answer" in done.stderr
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("timeout", ["", "40"], ids=["alone", "with the others"])
def test_a_signal_asks(timeout, tmp_path):
    done = run(
        """
        if rank == 1:
            later(1, signal.SIGUSR1)
            print(comm.Recv(x, 0))
        elif rank == 0:
            time.sleep(4)
            comm.Send(x, 1)
        """,
        ranks=2,
        JAXCOMM_TIMEOUT=timeout,
        JAXCOMM_REPORT=str(tmp_path),
    )
    assert done.returncode == 0
    assert re.search(r"a signal asks\. What the ranks do:\n", done.ranks[1].stderr)
    assert re.search(r"rank 1 has waited [01]\.\d s in recv on ", done.ranks[1].stderr)
    assert ("rank 0 has done nothing in MPI so far" in done.ranks[1].stderr) == bool(timeout)


def test_interrupted_twice_the_job_ends():
    done = run(
        """
        if rank == 0:
            later(1, signal.SIGINT)
            later(2.5, signal.SIGINT)
            comm.Recv(x, 1)
        else:
            time.sleep(20)
        """,
        ranks=2,
    )
    assert done.returncode != 0
    assert done.seconds < 19
    assert re.search(
        r"interrupted, but it has waited [01]\.\d s in recv on .*; Ctrl-C once more|once more ends the job", done.stderr
    )
    assert "interrupted again: ending the job" in done.stderr


def test_interrupted_once_where_operations_may_raise():
    done = run(
        """
        if rank == 0:
            later(1, signal.SIGINT)
            try:
                comm.Recv(x, 1)
            except KeyboardInterrupt:
                print("KeyboardInterrupt")
            comm.Send(x, 1)
        else:
            print(comm.Recv(x, 0)[0])
        """,
        ranks=2,
        JAXCOMM_TIMEOUT="50",
        JAXCOMM_TIMEOUT_ACTION="raise",
    )
    assert done.returncode == 0
    assert done.ranks[0].stdout == "KeyboardInterrupt\n"
    assert done.ranks[1].stdout == "1.0\n"


def test_an_interrupt_outside_operations_is_pythons():
    done = run(
        """
        later(0.5, signal.SIGINT)
        try:
            time.sleep(10)
        except KeyboardInterrupt:
            print("KeyboardInterrupt")
        """,
        ranks=1,
    )
    assert done.returncode == 0
    assert done.stdout == "KeyboardInterrupt\n"
    assert "jaxcomm" not in done.stderr


def test_in_code(tmp_path):
    done = run(
        f"""
        for wrong in (["1"], [-1], [1, "stop"], [1, "wait", "/none"]):
            try:
                jaxcomm.watch(*wrong)
            except (TypeError, ValueError) as error:
                print(str(error).split(",")[0])
        jaxcomm.watch(1, directory={str(tmp_path)!r})
        if rank == 1:
            time.sleep(3)
        comm.Barrier()
        jaxcomm.flush()
        jaxcomm.watch(0)
        if rank == 1:
            time.sleep(2)
        comm.Barrier()
        """,
        ranks=2,
    )
    assert done.returncode == 0
    assert done.ranks[0].stdout.splitlines() == [
        "watch: timeout must be a number of seconds",
        "watch: timeout must be a number of seconds from 0 on",
        "watch: action must be one of wait",
        "watch: directory must exist",
    ]
    assert done.stderr.count("What the ranks do") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAXCOMM_TIMEOUT", "soon"),
        ("JAXCOMM_TIMEOUT", "-1"),
        ("JAXCOMM_TIMEOUT", "nan"),
        ("JAXCOMM_TIMEOUT_ACTION", "stop"),
    ],
)
def test_malformed_settings(name, value):
    done = run("", ranks=1, **{name: value})
    assert done.returncode != 0
    assert f"ValueError: {name} must be" in done.stderr
