"""Many operations and many communicators: what a process holds does not grow. Many more: make soak."""

import communicators
import measured
import operations

# Ranks share two cores.
FEWER = max(1, measured.WORLD.size - 1)
TABLES = ("files", "threads", "python", "reductions", "statuses", "datatypes", "sites", "messages", "requests")


def test_operations():
    result = operations.run(20_000 // FEWER)
    assert result["operations"] >= 20_000 // FEWER
    grown = measured.grown(result)
    assert {what: grown[what] for what in (*TABLES, "communicators")} == dict.fromkeys((*TABLES, "communicators"), 0)
    assert grown["memory"] < 8 * 1024, result["held"]["memory"]


def test_communicators():
    """A row of the native table stays of each, so that a program that refers to a freed one says so."""
    result = communicators.run(300 // FEWER)
    grown = measured.grown(result)
    assert {what: grown[what] for what in TABLES} == dict.fromkeys(TABLES, 0)
    assert grown["memory"] < 8 * 1024, result["held"]["memory"]
