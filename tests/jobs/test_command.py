"""python -m jaxcomm, alone and on several ranks."""

import re

import jax
import pytest
from launch import launch

import jaxcomm

pytestmark = pytest.mark.timeout(200)


def command(*arguments, ranks, **env):
    done = launch(["-m", "jaxcomm", *arguments], ranks, 90, env=env)
    print(done.stdout, done.stderr, sep="\n")
    return done


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


def test_malformed_settings():
    for name, value in (("JAXCOMM_BUCKET", "many"), ("JAXCOMM_BUCKET", "-1"), ("JAXCOMM_DEBUG", "maybe")):
        done = command("info", ranks=1, **{name: value})
        assert done.returncode != 0
        assert f"ValueError: {name} must be" in done.stderr + done.ranks[0].stderr
