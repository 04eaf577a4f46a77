"""Keep the ranks in step: the same tests in the same order, one verdict a test, and no rank left waiting."""

from __future__ import annotations

import os
import sys
import zlib

import harness
import pytest
from _pytest.runner import runtestprotocol

# How long a rank that failed waits for the others, who may be waiting for its message.
GRACE = float(os.environ.get("JAXCOMM_TEST_GRACE", "20"))
SEVERITY = ("passed", "skipped", "failed")

# For tolerances that mean something. A test of 32 bits says so.
os.environ.setdefault("JAX_ENABLE_X64", "1")


@pytest.fixture(params=list(harness.communicators()))
def comm(request: pytest.FixtureRequest):
    return harness.communicator(request.param)


def abort(why: str) -> None:
    print(f"\nrank {harness.WORLD.rank} ends the job: {why}", file=sys.stderr, flush=True)
    harness.WORLD.Abort(1)


CALCULUS = {"test_derivatives", "test_vmap", "test_one_sided", "test_replicated", "test_checkpoint"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in CALCULUS:
            item.add_marker("calculus")


def pytest_internalerror(excrepr: object) -> None:
    abort(str(excrepr))


def pytest_collection_finish(session: pytest.Session) -> None:
    names = "\n".join(item.nodeid for item in session.items)
    facts = (len(session.items), zlib.crc32(names.encode()), session.testsfailed)
    everywhere = harness.CONTROL.allgather(facts)
    if len(set(everywhere)) > 1:
        lines = [f"rank {r}: {n} tests, hash {h:08x}, {bad} errors" for r, (n, h, bad) in enumerate(everywhere)]
        pytest.exit("the ranks collected different tests\n" + "\n".join(lines), returncode=3)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """As pytest's own, but the ranks share the outcome before anyone reports it."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    # The time limit is the test's; a rank that is done waits for those that are not, and theirs end the job.
    item.config.hook.pytest_timeout_cancel_timer(item=item)
    share(item, reports)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def outcome(reports: list[pytest.TestReport]) -> int:
    return max(SEVERITY.index(report.outcome) for report in reports)


def share(item: pytest.Item, reports: list[pytest.TestReport]) -> None:
    """Make the test fail here too if it failed elsewhere, or if only some ranks skipped it."""
    mine = outcome(reports)
    failed = mine == SEVERITY.index("failed")
    codes = harness.gather_in_time(mine, GRACE if failed else float("inf"))
    if codes is None:
        abort(f"it failed {item.nodeid} and not all ranks came within {GRACE:.0f} s\n{failure(reports)}")
    if len(set(codes)) > 1:
        adopt(reports, codes)


def adopt(reports: list[pytest.TestReport], codes: list[int]) -> None:
    texts = harness.CONTROL.allgather(failure(reports))
    heading = "outcomes by rank: " + ", ".join(SEVERITY[code] for code in codes)
    others = [f"---- rank {r}\n{text}" for r, text in enumerate(texts) if text and r != harness.WORLD.rank]
    if SEVERITY.index("failed") == codes[harness.WORLD.rank]:
        report = next(report for report in reports if report.failed)
        report.sections.append((heading, "\n".join(others)))
    else:
        report = next((report for report in reports if report.when == "call"), reports[0])
        report.outcome, report.longrepr = "failed", "\n".join([heading, *others])


def failure(reports: list[pytest.TestReport]) -> str:
    return "\n".join(report.longreprtext for report in reports if report.failed)


def pytest_unconfigure() -> None:
    """Leave together: some mpiexecs end all ranks once the first has returned an error."""
    harness.gather_in_time(0, GRACE)
