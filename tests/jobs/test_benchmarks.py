"""The page on performance shows what the runs kept beside it say. That the suite runs is `make bench-smoke`'s."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import goals  # noqa: E402
import report  # noqa: E402


def test_the_page_shows_the_runs_that_are_kept():
    page = report.PAGE.read_text()
    assert report.fill(page, report.kept()) == page


def test_every_section_of_the_page_has_its_figures():
    assert {found[1] for found in report.SECTION.findall(report.PAGE.read_text())} == set(report.SECTIONS)


@pytest.mark.parametrize("run", report.kept(), ids=report.name)
def test_the_verdicts_are_those_of_the_figures(run):
    assert goals.judge(run) == run["goals"]


def test_nothing_measured_is_no_verdict():
    assert not any(goal["reached"] for goal in goals.judge({"rows": []}))
