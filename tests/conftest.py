"""For all tests: hypothesis draws the same everywhere, and launch.py learns what each rank did."""

import os
import zlib

import pytest
from hypothesis import settings

# All ranks draw and shrink in step; a database or a deadline would differ between them.
settings.register_profile("jaxcomm", derandomize=True, database=None, deadline=None)
settings.load_profile("jaxcomm")

SEVERITY = ("passed", "skipped", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="run the K-th of N shares of the tests, from 0/N to N-1/N")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.share is None:
        return
    share, shares = map(int, config.option.share.split("/"))
    # By name, so that a test stays in its share when others come and go.
    mine = [zlib.crc32(item.name.encode()) % shares == share for item in items]
    config.hook.pytest_deselected(items=[item for item, kept in zip(items, mine, strict=True) if not kept])
    items[:] = [item for item, kept in zip(items, mine, strict=True) if kept]


class Journal:
    """A line at the start and at the end of each test, in the file that launch.py reads."""

    def __init__(self, path: str):
        # Line by line, so that it tells where a rank was killed.
        self.file, self.outcome = open(path, "w", buffering=1), "passed"  # noqa: SIM115

    def write(self, line: str) -> None:
        print(line, file=self.file)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome = "passed"
        self.write(f"start {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcome = max(self.outcome, report.outcome, key=SEVERITY.index)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(f"{self.outcome} {nodeid}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write(f"exit {int(exitstatus)}")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("JAXCOMM_TEST_JOURNAL")
    if path:
        config.pluginmanager.register(Journal(path))
