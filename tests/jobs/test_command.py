"""python -m jaxcomm, alone and on several ranks."""

import importlib.util
import os
import re
import sys

import jax
import pytest
from launch import launch

import jaxcomm

pytestmark = pytest.mark.timeout(200)


def command(*arguments, ranks, **env):
    done = launch(["-m", "jaxcomm", *arguments], ranks, 90, env=env)
    print(done.stdout, done.stderr, sep="\n")
    return done


def test_settings_that_are_none():
    done = command("info", ranks=2, JAXCOMM_CHEK="1", JAXCOMM_SPEED="11", JAXCOMM_TEST_ANYTHING="1")
    assert done.returncode == 0
    assert "JAXCOMM_CHEK is no setting of jaxcomm's: did you mean JAXCOMM_CHECK?" in done.ranks[0].stderr
    assert "JAXCOMM_SPEED is no setting of jaxcomm's: there are JAXCOMM_ABORT_ON_EXCEPTION, " in done.ranks[0].stderr
    assert "JAXCOMM_TEST" not in done.stderr
    assert "no setting" not in done.ranks[1].stderr


@pytest.mark.parametrize("limit", ["-1", "0", "inf", "nan", "soon"])
def test_a_limit_that_is_none(limit):
    done = command("selftest", "--timeout", limit, ranks=1)
    assert done.returncode == 2
    assert "--timeout: " in done.stderr


def test_info():
    done = command("info", ranks=2, JAXCOMM_BUCKET="1000")
    assert done.returncode == 0
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in done.ranks[0].stdout.splitlines())
    assert lines["ranks"].startswith("2: 2 on ")
    assert lines["jaxcomm"] == jaxcomm.__version__
    assert f"jax {jax.__version__}, jaxlib " in lines["JAX"]
    assert lines["settings"] == "JAXCOMM_BUCKET=1000" or "JAXCOMM_BUCKET=1000, " in lines["settings"]
    assert not {"MPI", "MPI threads", "XLA FFI", "large counts", "devices"} - lines.keys()
    assert done.ranks[1].stdout == ""


@pytest.mark.parametrize("ranks", [1, 3])
def test_selftest(ranks):
    done = command("selftest", ranks=ranks)
    assert done.returncode == 0
    *checks, last = done.ranks[0].stdout.splitlines()
    assert last == "all is well"
    assert len(checks) == 7
    assert all(re.search(r" ok \(\d+\.\d s\)$", line) for line in checks)


def test_a_failed_check_is_told():
    """A check that fails on one rank."""
    program = """
import runpy, sys
from jaxcomm import selftest

def broken(comm):
    'something.'
    assert comm.rank != 1, "not here"

selftest.CHECKS = (broken,)
sys.argv = ["jaxcomm", "selftest"]
runpy.run_module("jaxcomm", run_name="__main__")
"""
    done = launch(["-c", program], 2, 90)
    assert done.returncode != 0
    assert "FAILED on 1 of 2 ranks" in done.ranks[0].stdout
    assert "rank 1: Traceback" in done.ranks[0].stdout
    assert "AssertionError: not here" in done.ranks[0].stdout


def test_ranks_that_wait_for_each_other_are_told():
    program = """
import runpy, sys
from jaxcomm import selftest

def waits(comm):
    'waits.'
    if comm.rank == 0:
        comm.Barrier()

selftest.CHECKS = (waits,)
sys.argv = ["jaxcomm", "selftest", "--timeout", "3"]
runpy.run_module("jaxcomm", run_name="__main__")
"""
    done = launch(["-c", program], 2, 90)
    assert done.returncode != 0
    assert not done.timed_out
    assert "is not through after 3 s; it waits here:" in "".join(rank.stderr for rank in done.ranks)


TRACED = """
import jax, jax.numpy as jnp
from mpi4py import MPI
from jaxcomm import JaxComm

comm = JaxComm(MPI.COMM_WORLD)
step = jax.jit(lambda x: comm.Sendrecv(comm.Allreduce(x), (comm.rank + 1) % comm.size))
for _ in range(3):
    x = step(jnp.ones(10))
comm.Barrier()
MPI.Finalize()
"""


def test_report(tmp_path):
    """JAXCOMM_TRACE for a whole program, and what is told of it, also where the setting is still there."""
    folder = tmp_path / "made" / "trace"
    assert launch(["-c", TRACED], 3, 90, env={"JAXCOMM_TRACE": str(folder)}).returncode == 0
    assert {path.name for path in folder.iterdir()} == {"trace.json", *(f"rank-{r}.json" for r in range(3))}
    (folder / "trace.json").unlink()
    block = tmp_path / "block"
    block.mkdir()
    (block / "matplotlib.py").write_text("raise ImportError('none here')")
    path = os.pathsep.join([str(block), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = command("report", str(folder), ranks=1, JAXCOMM_TRACE=str(folder), PYTHONPATH=path)
    assert done.returncode == 0
    text = done.ranks[0].stdout
    assert text.startswith("3 ranks on 1 host, ")
    found = {line.split()[0]: line for line in text.splitlines() if "(<" in line}
    assert found.keys() == {"allreduce", "sendrecv", "barrier"}
    assert re.match(r"allreduce  <string>:7 \(<lambda>\) +9 +360 B ", found["allreduce"])
    assert "no pictures, as there is no matplotlib: pip install" in text
    assert (folder / "trace.json").exists()
    assert not list(folder.glob("*.png"))
    if importlib.util.find_spec("matplotlib"):
        done = command("report", str(folder), ranks=1)
        for name in ("matrix.png", "timeline.png"):
            assert str(folder / name) in done.stdout
            assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_a_trace_of_a_job_that_ends_early(tmp_path):
    """The rank that fails says what it did; the others do not come to it."""
    program = TRACED.replace("MPI.Finalize()", "1 / comm.rank; comm.Barrier()")
    done = launch(["-c", program], 2, 60, env={"JAXCOMM_TRACE": str(tmp_path), "JAXCOMM_ABORT_ON_EXCEPTION": "1"})
    assert done.returncode != 0
    assert not done.timed_out
    assert "ZeroDivisionError" in done.ranks[0].stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]
    told = command("report", str(tmp_path), ranks=1)
    assert told.returncode == 0
    assert "missing: rank 1 (" in told.stdout


def test_no_report_without_a_trace(tmp_path):
    for arguments, said in (((str(tmp_path),), "there is no trace in"), ((), "report needs a directory")):
        done = command("report", *arguments, ranks=1)
        assert done.returncode != 0
        assert said in done.stderr
    (tmp_path / "rank-0.json").write_text("{}")
    done = command("report", str(tmp_path), ranks=1)
    assert done.returncode != 0
    assert "rank-0.json was not written by this version of jaxcomm" in done.stderr


def test_where_no_trace_can_be_written():
    for value, error in (
        ("yes", "ValueError: JAXCOMM_TRACE must be a directory, got 'yes'"),
        (sys.executable, "OSError"),
    ):
        done = launch(["-c", "import jaxcomm; print('imported')"], 2, 60, env={"JAXCOMM_TRACE": value})
        assert done.returncode != 0
        assert not done.timed_out
        assert "imported" not in done.stdout
        assert error in done.stderr
    assert f"JAXCOMM_TRACE={value}: no trace can be written there (rank 0: {value} is not a directory)" in done.stderr


def test_malformed_settings():
    for name, value in (("JAXCOMM_BUCKET", "many"), ("JAXCOMM_BUCKET", "-1"), ("JAXCOMM_DEBUG", "maybe")):
        done = command("info", ranks=1, **{name: value})
        assert done.returncode != 0
        assert f"ValueError: {name} must be" in done.stderr + done.ranks[0].stderr
