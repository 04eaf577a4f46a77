"""Faults that need a job of their own: how a program starts, grows, fails and ends. The numbers are those of CASES."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launch import Result, clean_environment, launch

WORLD_TESTS = Path(__file__).parents[1] / "world"
LIMIT = 90  # seconds a job

pytestmark = pytest.mark.timeout(2 * LIMIT + 30)

PREAMBLE = f"""
import sys; sys.path.append({str(WORLD_TESTS)!r})
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
"""


def run(code: str, ranks: int, options: tuple[str, ...] = (), **env: str) -> Result:
    done = launch([*options, "-c", PREAMBLE + textwrap.dedent(code)], ranks, LIMIT, env=env)
    print(done.stdout, done.stderr, sep="\n")
    assert not done.timed_out, done.stderr
    return done


def test_1_eager_calls_compile_once_and_keep_no_memory():
    """300 calls of every method, and of every reduction."""
    done = run(
        """
        import harness
        from cases import CASES
        from counting import Compilations
        comm = harness.communicator("world")

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

        chosen = {case.method: case for case in CASES} | {case.name: case for case in CASES if case.method == "Allreduce"}
        assert len(chosen) >= 25
        for name, case in chosen.items():
            x = case.operands(comm, dtype="int32")[comm.rank]
            x = jnp.asarray(np.resize(x, (*x.shape[:-1], 1000)))
            before = None
            with Compilations() as made:
                for i in range(300):
                    y = case.call(comm, x)
                    before = before or (resident() if i == 20 else None)
            assert made.count <= 1, (name, made.count)
            assert resident() - before < 20, (name, resident() - before)
        print("flat")
        """,
        2,
    )
    assert done.returncode == 0
    assert [rank.stdout for rank in done.ranks] == ["flat\n"] * 2


def test_10_a_program_may_end_right_after_dispatch():
    """Nothing hangs, and nothing that was sent is lost."""
    done = run(
        """
        from cases import slow
        from jaxcomm import JaxComm
        comm = JaxComm(MPI.COMM_WORLD)
        if comm.rank == 0:
            jax.jit(lambda x: comm.Ssend(slow(x), 1))(42.0)
        if comm.rank == 1:
            print(float(comm.Recv(np.float32(0), 0)))
        jax.jit(lambda x: comm.Allreduce(slow(x)))(1.0)
        """,
        3,
    )
    assert done.returncode == 0
    assert done.ranks[1].stdout == "42.0\n"
    assert not any(word in rank.stderr for rank in done.ranks for word in ("Traceback", "jaxcomm"))


def test_10_a_program_may_finalize_mpi_itself_right_after_dispatch():
    done = run(
        """
        from cases import slow
        from jaxcomm import JaxComm
        comm = JaxComm(MPI.COMM_WORLD)
        y = jax.jit(lambda x: comm.Allreduce(slow(x)))(1.0)
        MPI.Finalize()
        print(float(y))
        """,
        3,
    )
    assert done.returncode == 0
    assert [rank.stdout for rank in done.ranks] == ["3.0\n"] * 3


def test_10_a_failure_that_is_pending_at_the_end_is_reported():
    done = run(
        """
        from cases import slow
        from jaxcomm import JaxComm
        comm = JaxComm(MPI.COMM_WORLD)
        jax.jit(lambda x, dest: comm.Send(slow(x), dest))(1.0, 99)
        """,
        2,
    )
    for rank in done.ranks:
        assert "jaxcomm: an operation that was pending at exit failed" in rank.stderr
        assert "dest must be a rank" in rank.stderr


def test_14_several_devices_in_a_process():
    """An error that says what to do, and life goes on."""
    done = run(
        """
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from jaxcomm import JaxComm
        comm = JaxComm(MPI.COMM_WORLD)
        mesh = Mesh(np.array(jax.devices()), ("d",))
        x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("d")))
        for program in (
            jax.jit(jax.shard_map(comm.Allreduce, mesh=mesh, in_specs=P("d"), out_specs=P("d"))),
            jax.shard_map(comm.Allreduce, mesh=mesh, in_specs=P("d"), out_specs=P("d")),
            jax.jit(comm.Allreduce),
        ):
            try:
                program(x)
            except ValueError as error:
                assert "allreduce inside a program for 2 devices" in str(error), error
                assert "Give each MPI process one device" in str(error)
            else:
                raise SystemExit("no error")
        for i, device in enumerate(jax.devices()):
            y = jax.jit(comm.Allreduce)(jax.device_put(np.arange(4.0), device))
            assert y.devices() == {device}
            np.testing.assert_array_equal(y, comm.size * np.arange(4.0))
        np.testing.assert_array_equal(comm.Allreduce(x), comm.size * np.arange(4.0))
        print("done")
        """,
        2,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert done.returncode == 0
    assert done.stdout == "done\n" * 2


WAYS = {
    "the variable": ((), "", {"JAXCOMM_ABORT_ON_EXCEPTION": "1"}),
    "the function": ((), "jaxcomm.abort_on_exception()", {}),
    "python -m mpi4py": (("-m", "mpi4py"), "", {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_23_an_exception_on_one_rank_ends_the_job(way):
    options, line, env = WAYS[way]
    done = run(
        f"""
        import jaxcomm
        {line}
        comm = jaxcomm.JaxComm(MPI.COMM_WORLD)
        if comm.rank == 0:
            raise ArithmeticError("on purpose")
        comm.Barrier()
        """,
        3,
        options,
        **env,
    )
    assert done.returncode != 0
    assert done.seconds < 45
    assert "ArithmeticError: on purpose" in done.ranks[0].stderr
    assert "ArithmeticError" not in done.ranks[1].stderr
    if way != "python -m mpi4py":
        assert "uncaught exception on rank 0: ending the job" in done.ranks[0].stderr


def test_28_the_second_run_compiles_nothing(tmp_path):
    """Each rank has a cache of its own: in one, they would write the same entries at the same time."""
    code = f"""
        from jax import lax
        import jaxcomm
        comm = jaxcomm.JaxComm(MPI.COMM_WORLD).Dup()
        jax.config.update("jax_compilation_cache_dir", f"{tmp_path}/{{comm.rank}}")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        events = []
        jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        def loss(x):
            body = lambda x, _: (comm.Sendrecv(jnp.sin(x), right, source=left), comm.Allreduce(x, op=MPI.MAX))
            return lax.scan(body, x, None, length=3)[0].sum()

        value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.arange(3.0) + comm.rank)
        value += jaxcomm.jit(loss)(jnp.arange(3.0) + comm.rank)
        print(events.count("cache_misses"), events.count("cache_hits"), float(value))
        """
    first, second = run(code, 2), run(code, 2)
    assert first.returncode == second.returncode == 0
    for before, after in zip(first.ranks, second.ranks, strict=True):
        (misses, hits, value), (misses_after, hits_after, value_after) = before.stdout.split(), after.stdout.split()
        assert int(misses) > 0
        assert (int(misses_after), int(hits_after)) == (0, int(misses) + int(hits))
        assert value == value_after


# 34: what is wrong with the installation is one clear ImportError


def start(code: str, **env: str) -> str:
    """What `python -c` writes to stderr as it fails, without MPI's mpiexec."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=clean_environment() | env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode != 0
    return done.stderr


def one_import_error(stderr: str) -> str:
    assert stderr.count("Traceback") == 1, stderr
    last = stderr[stderr.rindex("\nImportError: ") :]
    assert last.startswith("\nImportError: jaxcomm needs mpi4py and an MPI library that it can load.")
    assert "jaxcomm[mpich]" in last
    return last


def test_34_without_mpi4py():
    stderr = start("import sys; sys.modules['mpi4py'] = None; import jaxcomm")
    assert "mpi4py" in one_import_error(stderr)


def test_34_without_a_working_mpi():
    stderr = start("import jaxcomm", MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert "libmpi" in one_import_error(stderr)


def test_34_without_the_native_layer():
    """As in a source checkout that was not built."""
    stderr = start("import sys; sys.modules['jaxcomm._native.bridge'] = None; import jaxcomm")
    assert stderr.splitlines()[-1].startswith("ImportError: jaxcomm's native layer cannot be loaded:")
    assert "built" in stderr.splitlines()[-1]


def test_34_with_too_low_a_thread_level():
    code = "from mpi4py import MPI; MPI.Query_thread = lambda: MPI.THREAD_{}; import jaxcomm; print('imported')"
    for level in ("SINGLE", "FUNNELED"):
        done = launch(["-c", code.format(level)], 1, LIMIT)
        assert done.returncode != 0
        assert f"ImportError: jaxcomm needs MPI_THREAD_SERIALIZED or better, got MPI_THREAD_{level}" in done.stderr
        assert "mpi4py.rc.thread_level" in done.stderr
    done = launch(["-c", code.format("SERIALIZED")], 1, LIMIT)
    assert (done.returncode, done.stdout) == (0, "imported\n")
    assert "MPI gives MPI_THREAD_SERIALIZED only" in done.stderr


# Requests


def test_36_a_request_that_is_never_waited_for_is_reported():
    """With the place that started it, for each once; those that were waited for, tested or freed are not."""
    done = run(
        """
        from jaxcomm import JaxComm, Request
        comm = JaxComm(MPI.COMM_WORLD)
        other = 1 - comm.rank
        def forgets(x):
            comm.Isend(x, other, 3)
            comm.Irecv(x, other, 4)
            comm.Isend(x, other, 5).Free()
            return comm.Iallreduce(x)
        total = jax.jit(forgets)(jnp.arange(3.0))
        while not total.Test()[0]:
            pass
        Request.Waitall([comm.Isendrecv(jnp.arange(3.0), other)])
        comm.Irecv(jnp.arange(3.0), other, 6)
        """,
        2,
    )
    assert done.returncode == 0
    for r, rank in enumerate(done.ranks):
        lines = [line for line in rank.stderr.splitlines() if line.startswith("jaxcomm: ")]
        about = f"on MPI_COMM_WORLD, rank {r} of 2, 3 x float32 (12 bytes)"
        assert lines == [
            f"jaxcomm: a request was never waited for: isend {about}, to rank {1 - r} tag 3, at <string>:10 (forgets)",
            f"jaxcomm: a request was never waited for: irecv {about}, from rank {1 - r} tag 4, at <string>:11 (forgets)",
            f"jaxcomm: a request was never waited for: irecv {about}, from rank {1 - r} tag 6, at <string>:18 (<module>)",
        ]


# JAXCOMM_DEBUG


def test_debug_logs_each_operation():
    done = run(
        """
        from jaxcomm import JaxComm
        comm = JaxComm(MPI.COMM_WORLD)
        comm.Set_name("mine")
        comm.Sendrecv(np.float32([1, 2, 3]), 1 - comm.rank, 4, source=MPI.ANY_SOURCE, recvtag=4)
        comm.Allreduce(np.zeros((0, 3)))
        program = jax.jit(lambda x: (comm.Allreduce(x, op=MPI.MAX), comm.Bcast(x, 1)))
        jax.block_until_ready(program(np.zeros((2, 4), np.int8)))
        """,
        2,
        JAXCOMM_DEBUG="1",
    )
    assert done.returncode == 0
    for r, rank in enumerate(done.ranks):
        about = f"mine, rank {r} of 2, "
        expected = [
            f"sendrecv on {about}3 x float32 (12 bytes), to rank {1 - r} tag 4, from ANY_SOURCE tag 4",
            f"allreduce on {about}0 x float32 (0 bytes), op SUM",
            f"allreduce on {about}8 x int8 (8 bytes), op MAX, at <string>:11 (<lambda>)",
            f"bcast on {about}8 x int8 (8 bytes), root 1, at <string>:11 (<lambda>)",
        ]
        lines = [line for line in rank.stderr.splitlines() if line.startswith("jaxcomm: ")]
        assert len(lines) == 8
        for what, begins, ends in zip(expected, lines[::2], lines[1::2], strict=True):
            assert begins == f"jaxcomm: {what}: begins"
            assert re.fullmatch(re.escape(f"jaxcomm: {what}: done in ") + r"\d+\.\d us", ends)


MALFORMED = {
    "JAXCOMM_DEBUG": "must be 0 or 1",
    "JAXCOMM_CHECK": "must be 0 or 1",
    "JAXCOMM_ABORT_ON_EXCEPTION": "must be 0 or 1",
    "JAXCOMM_BUCKET": "must be a number, not negative and below 10^18",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_settings(name):
    """Told at import, before anything is computed, and in one line that names the variable."""
    stderr = start("import jaxcomm", **{name: "maybe"})
    assert stderr.splitlines()[-1] == f"ValueError: {name} {MALFORMED[name]}, got 'maybe'"
