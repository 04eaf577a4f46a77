"""Processes that a rank starts: fork and multiprocessing. What cannot work says so, and the job goes on."""

import textwrap

import pytest
from launch import launch

LIMIT = 90  # seconds a job

pytestmark = pytest.mark.timeout(LIMIT + 30)


def run(code, tmp_path):
    """As a file, because spawned processes import the main module."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(code))
    done = launch(path, 2, LIMIT, {"PYTHONWARNINGS": "ignore"})
    print(done.stdout, done.stderr, sep="\n")
    assert not done.timed_out
    return done


def test_every_call_in_a_forked_process_says_so_and_the_job_goes_on(tmp_path):
    done = run(
        """
        import os
        import jax, jax.numpy as jnp, numpy as np
        from mpi4py import MPI
        import jaxcomm
        comm = jaxcomm.JaxComm(MPI.COMM_WORLD)
        x = jnp.arange(3.0)
        jitted, ours = jax.jit(comm.Allreduce), jaxcomm.jit(comm.Allreduce)
        for call in 2 * [jitted, ours, comm.Allreduce]:
            call(x)
        request = comm.Iallreduce(x)
        calls = {
            "as before": lambda: comm.Allreduce(x),
            "anew": lambda: comm.Bcast(x),
            "tree": lambda: comm.Allreduce([x, x]),
            "start": lambda: comm.Isend(x, 0),
            "wait": lambda: request.Wait(),
            "compiled": lambda: jitted(x),
            "compiled by jaxcomm.jit": lambda: ours(x),
            "traced": lambda: jax.jit(lambda x: comm.Allreduce(x + 1))(x),
            "traced by jaxcomm.jit": lambda: jaxcomm.jit(lambda x: comm.Allreduce(x + 1))(x),
            "objects": lambda: comm.allreduce(1),
            "buffers": lambda: comm.Allreduce(np.zeros(1), np.zeros(1)),
            "JaxComm": lambda: jaxcomm.JaxComm(MPI.COMM_WORLD),
            "Dup": lambda: comm.Dup(),
            "Free": lambda: comm.Free(),
            "flush": jaxcomm.flush,
        }
        child = os.fork()
        if child == 0:
            wrong = []
            for name, call in calls.items():
                try:
                    call()
                    wrong.append(name)
                except RuntimeError as error:
                    if "this process was forked from a rank of an MPI job" not in str(error):
                        wrong.append((name, error))
            print(*wrong, flush=True)
            os._exit(len(wrong))
        assert os.waitpid(child, 0)[1] == 0
        total = request.Wait()
        for call in (jitted, ours, comm.Allreduce):
            np.testing.assert_array_equal(call(x), total)
        print("all is well")
        """,
        tmp_path,
    )
    assert done.returncode == 0
    assert [rank.stdout for rank in done.ranks] == ["\nall is well\n"] * 2


def test_a_forked_process_that_leaves_as_a_rank_does_is_ended(tmp_path):
    """MPI_Finalize in it would end the job."""
    done = run(
        """
        import os, sys
        from mpi4py import MPI
        import jaxcomm
        comm = jaxcomm.JaxComm(MPI.COMM_WORLD)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, float(comm.Allreduce(1.0)))
        """,
        tmp_path,
    )
    assert done.returncode == 0
    for rank in done.ranks:
        assert rank.stdout == "1 2.0\n"
        assert "jaxcomm: this process was forked from a rank and has not ended by os._exit()" in rank.stderr


def test_multiprocessing(tmp_path):
    """Workers that compute are welcome, however they are started; those that would communicate get an error."""
    done = run(
        """
        import multiprocessing

        def square(x):
            return x * x

        def communicate(x):
            import jaxcomm
            from mpi4py import MPI
            return float(jaxcomm.JaxComm(MPI.COMM_WORLD).Allreduce(x))

        if __name__ == "__main__":
            from mpi4py import MPI
            import jaxcomm
            comm = jaxcomm.JaxComm(MPI.COMM_WORLD)
            for method, kind, text in (
                ("fork", RuntimeError, "was forked from a rank of an MPI job"),
                ("spawn", ImportError, "was started by multiprocessing in a rank of an MPI job"),
                ("forkserver", ImportError, "was started by multiprocessing in a rank of an MPI job"),
            ):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    assert pool.map_async(square, [1, 2, 3]).get(60) == [1, 4, 9]
                    try:
                        pool.apply_async(communicate, [1.0]).get(60)
                    except kind as error:
                        assert text in str(error), error
                    else:
                        raise SystemExit(f"{method}: no error")
                assert float(comm.Allreduce(1.0)) == 2
            print("all is well")
        """,
        tmp_path,
    )
    assert done.returncode == 0
    assert [rank.stdout for rank in done.ranks] == ["all is well\n"] * 2
