"""What the launcher says of jobs that go wrong: each sample is a test module that pytest runs on the ranks."""

import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launch import launch

TESTS = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path):
    """Run a sample below a copy of the harness, as the launcher's command line does."""
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    shutil.copytree(TESTS, tmp_path / "tests", ignore=shutil.ignore_patterns("test_*.py", "__pycache__"))

    def run(sample: str, *options: str, ranks: int = 2) -> subprocess.CompletedProcess:
        Path(tmp_path, "tests/world/test_sample.py").write_text("import harness\n" + textwrap.dedent(sample))
        command = [sys.executable, "tests/launch.py", "-n", str(ranks), *options, "--", "tests/world"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        return done

    return run


def test_the_ranks_share_each_outcome_and_the_run_goes_on(run):
    done = run(
        """
        import pytest
        def test_failed(): assert harness.WORLD.rank != 1, "odd one out"
        def test_skipped():
            if harness.WORLD.rank == 2: pytest.skip("not me")
        def test_passed(): harness.agree(True)
        """,
        ranks=3,
    )
    assert done.returncode
    assert "odd one out" in done.stdout
    assert "outcomes by rank: passed, failed, passed" in done.stdout
    assert "outcomes by rank: passed, passed, skipped" in done.stdout
    assert "2 failed, 1 passed in" in done.stdout.splitlines()[-1]


def test_a_failure_on_one_rank_ends_the_job_when_the_others_wait_for_it(run, monkeypatch):
    monkeypatch.setenv("JAXCOMM_TEST_GRACE", "2")
    done = run("""
        def test_it():
            assert harness.WORLD.rank != 1, "odd one out"
            harness.CONTROL.recv(source=1, tag=9)
        """)
    assert done.returncode
    assert "odd one out" in done.stdout
    assert "rank 1 ends the job" in done.stdout


def test_different_collections(run):
    done = run("""
        def test_it(): pass
        if harness.WORLD.rank == 1:
            def test_more(): pass
        """)
    assert done.returncode
    assert "the ranks collected different tests" in done.stdout + done.stderr


def test_no_tests(run):
    done = run("")
    assert done.returncode
    assert "rank 0 finished no test" in done.stdout


def test_a_rank_that_leaves_early(run):
    done = run("""
        import os
        def test_it():
            if harness.WORLD.rank == 1: os._exit(0)
        """, "--timeout", "20")  # fmt: skip
    assert done.returncode
    assert "rank 1 ended at: start tests/world/test_sample.py::test_it" in done.stdout


def test_the_time_limit_of_a_test_names_the_line_that_hangs(run):
    done = run("""
        import pytest
        @pytest.mark.timeout(2)
        def test_it():
            if harness.WORLD.rank == 1: harness.CONTROL.recv(source=0, tag=9)  # hangs
        """)
    assert done.returncode
    assert "Timeout" in done.stdout
    assert "# hangs" in done.stdout


def test_the_time_limit_of_the_job_prints_every_stack(run):
    started = time.monotonic()
    done = run("""
        def hangs(): harness.CONTROL.recv(source=0, tag=9)
        def test_it():
            if harness.WORLD.rank == 1: hangs()
        """, "--timeout", "10")  # fmt: skip
    assert done.returncode == 124
    assert time.monotonic() - started < 30
    assert "rank 1 ended at: start tests/world/test_sample.py::test_it" in done.stdout
    assert "in hangs" in done.stdout


def test_jobs_from_within_pytest():
    done = launch(["-c", "from mpi4py import MPI; print('rank', MPI.COMM_WORLD.rank, 'of', MPI.COMM_WORLD.size)"], 3)
    assert done.returncode == 0, done.stderr
    assert [rank.stdout for rank in done.ranks] == [f"rank {r} of 3\n" for r in range(3)]


def test_a_job_ended_by_its_time_limit_shows_where_it_was():
    done = launch(["-c", "def sleeps():\n import time; time.sleep(60)\nsleeps()"], 2, timeout=2)
    assert done.timed_out
    assert all("in sleeps" in rank.stderr for rank in done.ranks)
    assert done.seconds < 12
