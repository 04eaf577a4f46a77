"""Traces: what every rank did, in one timeline; who waited for whom; names in the profiles of jax.profiler."""

import gzip
import json
import shutil
import tempfile
import time
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI

import jaxcomm
from jaxcomm import report, timeline
from jaxcomm._native import bridge

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
LEFT, RIGHT = (RANK - 1) % SIZE, (RANK + 1) % SIZE
X = jnp.arange(4.0)
OBSERVED = bridge.observed()  # by another (JAXCOMM_CHECK, JAXCOMM_TIMEOUT)
several_ranks = pytest.mark.skipif(SIZE < 2, reason="one rank waits for nobody")


@pytest.fixture
def folder():
    """A directory that all ranks share."""
    path = Path(harness.CONTROL.bcast(tempfile.mkdtemp() if RANK == 0 else None))
    yield path
    harness.CONTROL.Barrier()
    if RANK == 0:
        shutil.rmtree(path)


def seen(folder):
    """The trace, when all ranks have written theirs."""
    harness.CONTROL.Barrier()
    return report.read(folder)


def merged(folder):
    """The events of trace.json but for the names of ranks and threads."""
    limit = time.monotonic() + 20
    while not report.is_merged(folder) and time.monotonic() < limit:  # whoever came last writes it
        time.sleep(0.01)
    everything = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [e for e in everything if e["ph"] == "X"], [e for e in everything if e["ph"] == "M"]


def of(run, name, rank=RANK):
    return [event for event in run.events if event.rank == rank and event.name == name]


@jax.jit
def exchange(x):
    y = WORLD.Allreduce(x, op=MPI.MAX)
    return WORLD.Sendrecv(y, RIGHT, sendtag=3, source=LEFT)


def test_every_operation_is_there(folder):
    jax.block_until_ready(exchange(X))
    WORLD.Barrier()
    with jaxcomm.trace(folder):
        exchange(X)
        WORLD.Bcast(X.astype(jnp.float32), root=SIZE - 1)
        WORLD.Allgather({"a": X, "b": X})
        inner = WORLD.Split(RANK % 2)
        inner.Barrier()
    WORLD.Barrier()
    run = seen(folder)
    assert run.size == SIZE
    assert not run.missing
    names = ["allreduce", "sendrecv", "bcast", "allgather", "mpi4py's Split", "barrier"]
    for rank in range(SIZE):
        mine = [event for event in run.events if event.rank == rank]
        assert [event.name for event in mine] == names
        assert all(run.began <= event.began <= event.ended <= run.ended for event in mine)
        reduced, sent, broadcast, gathered, _, barrier = (event.record for event in mine)
        assert (reduced.op, reduced.elements, reduced.dtype, reduced.bytes) == ("MAX", 4, "float64", 32)
        assert (sent.dest, sent.sendtag, sent.source) == ((rank + 1) % SIZE, 3, (rank - 1) % SIZE)
        assert (broadcast.root, broadcast.bytes, broadcast.failed) == (SIZE - 1, 16, False)
        assert gathered.bytes == 64
        assert barrier.bytes == 0
        assert mine[-1].group[0] == tuple(r for r in range(SIZE) if r % 2 == rank % 2)
        assert all("test_timeline.py:" in event.record.site for event in mine)
        assert reduced.site.endswith("(exchange)")
        assert broadcast.site.endswith("(test_every_operation_is_there)")


def test_the_timeline_of_all_ranks(folder):
    with jaxcomm.trace(folder):
        exchange(X)
    events, names = merged(folder)
    assert len(events) == 2 * SIZE
    one = next(e for e in events if e["pid"] == SIZE - 1 and e["name"] == "sendrecv")
    assert one["ts"] >= 0
    assert one["dur"] >= 0
    site = one["args"].pop("call site")
    assert site.endswith("(exchange)")
    assert one["args"] == {
        "bytes": 32,
        "dtype": "float64",
        "count": 4,
        "dest": 0,
        "sendtag": 3,
        "source": max(SIZE - 2, 0),
        "recvtag": "ANY_TAG",
        "communicator": WORLD.Get_name(),
        "failed": False,
    }
    assert {e["args"]["name"] for e in names if e["name"] == "process_name"} == {
        f"rank {r} ({MPI.Get_processor_name()})" for r in range(SIZE)
    }
    assert {(e["pid"], e["tid"]) for e in events} == {(e["pid"], e["tid"]) for e in names if e["name"] == "thread_name"}


@several_ranks
def test_who_waits_for_whom(folder):
    """The last rank comes late, to a collective and to a message."""
    late, nap = SIZE - 1, 0.1
    WORLD.Barrier()
    with jaxcomm.trace(folder):
        WORLD.Barrier()
        if late == RANK:
            time.sleep(nap)
        WORLD.Allreduce(X)
        WORLD.Barrier()
        if late == RANK:
            time.sleep(nap)
            WORLD.Send(X, 0, tag=1)
            WORLD.Send(X, 0, tag=2)
        if RANK == 0:
            WORLD.Recv(X, late, tag=2)
            request = WORLD.Irecv(X, late, tag=1)
            request.Wait()
    run = seen(folder)
    for rank in range(SIZE):
        (reduced,) = of(run, "allreduce", rank)
        assert 0 <= reduced.wait <= reduced.time
        assert (reduced.wait > nap / 2 * 1e9) == (rank != late)
    first, second = of(run, "recv", 0)[0], of(run, "wait irecv", 0)[0]
    assert first.wait > nap / 2 * 1e9
    assert second.wait == 0
    assert all(event.wait is None for event in of(run, "send", late))
    row = next(row for row in report.rows(run) if row.name == "allreduce")
    assert row.calls == SIZE
    assert row.wait > (SIZE - 1) * nap / 2 * 1e9
    assert row.imbalance > 1
    assert report.messages(run)[late, 0] == 64
    assert report.collectives(run)[0, late] == 32


def test_a_receive_from_anybody_waits_for_whom_nobody_knows(folder):
    with jaxcomm.trace(folder):
        request = WORLD.Isend(X, RIGHT)
        WORLD.Recv(X, MPI.ANY_SOURCE)
        request.Wait()
        WORLD.Sendrecv(X, RIGHT, source=LEFT)
    run = seen(folder)
    assert [event.record.source for event in of(run, "recv")] == ["ANY_SOURCE"]
    assert of(run, "recv")[0].wait is None
    assert of(run, "sendrecv")[0].wait is None


def test_messages_of_derivatives_are_apart(folder):
    jaxcomm.flush()
    with jaxcomm.trace(folder):
        jax.jit(jax.grad(lambda x: jnp.sum(WORLD.Sendrecv(x, RIGHT, source=LEFT) ** 2)))(X)
    there, back = of(seen(folder), "sendrecv")
    assert (there.record.dest, there.record.apart) == (RIGHT, 0)
    assert (back.record.dest, back.record.apart) == (LEFT, 1)
    assert back.record.site == there.record.site


def test_an_operation_that_fails(folder):
    def program():
        jax.block_until_ready(jax.jit(lambda d: WORLD.Send(X, d))(SIZE + 7))
        jaxcomm.flush()

    with jaxcomm.trace(folder), pytest.raises(Exception, match="dest must be a rank below"):
        program()
    (event,) = of(seen(folder), "send")
    assert event.record.failed
    assert "rank" in event.record.dest


def test_a_rank_that_leaves_by_an_exception(folder):
    """It writes what it has, and nobody waits for it."""
    failing = pytest.raises(KeyError) if RANK == 0 else pytest.MonkeyPatch.context()
    with failing, jaxcomm.trace(folder):
        WORLD.Barrier()
        if RANK == 0:
            raise KeyError("mine")
        WORLD.Barrier() if SIZE == 1 else None
    run = seen(folder)
    assert [event.name for event in of(run, "barrier")] == ["barrier"]


def test_nothing_is_kept_when_no_trace_is_on(folder):
    with jaxcomm.trace(folder):
        WORLD.Barrier()
    WORLD.Allreduce(X)
    assert bridge.take_records() == []
    assert bridge.observed() == OBSERVED
    harness.CONTROL.Barrier()
    with jaxcomm.trace(folder):  # which replaces the first
        WORLD.Allreduce(X)
    assert [event.name for event in of(seen(folder), "allreduce")] == ["allreduce"]
    assert of(report.read(folder), "barrier") == []


@pytest.mark.skipif(OBSERVED, reason="all calls know their places")
def test_calls_after_a_trace_do_not_say_that_they_are_in_it(folder):
    """What eager calls learn while they are observed is for one place of the program."""
    comm = WORLD.Dup()

    def calls():
        comm.Allreduce(X)
        comm.Allreduce({"a": X, "b": X})

    with jaxcomm.trace(folder):
        calls()
        calls()
    bridge.keep_records(True)
    calls()
    calls()
    bridge.keep_records(False)
    sites = [report.Record(*raw).site for raw in bridge.take_records()]
    comm.Free()
    assert sites == [None] * 4
    assert len({event.record.site for event in of(seen(folder), "allreduce")}) == 2


def test_what_consists_of_messages(folder):
    with jaxcomm.trace(folder):
        WORLD.Allreduce(X, op=jnp.logaddexp)
    found = [event for event in seen(folder).events if event.rank == RANK]
    assert all(event.record.apart == 2 for event in found if event.name == "sendrecv")
    assert {"sendrecv"} <= {event.name for event in found} or SIZE == 1


def test_nested_traces(folder):
    with jaxcomm.trace(folder / "outer"):
        WORLD.Barrier()
        with jaxcomm.trace(folder / "inner"):
            WORLD.Bcast(X)
        WORLD.Allreduce(X)
        with pytest.raises(ValueError, match="is under way already"), jaxcomm.trace(folder / "outer"):
            pass
    outer, inner = seen(folder / "outer"), seen(folder / "inner")
    mine = [event.name for event in outer.events if event.rank == RANK]
    assert mine == ["barrier", "bcast", "allreduce"]
    assert [event.name for event in inner.events if event.rank == RANK] == ["bcast"]


def test_a_directory_that_cannot_be(folder):
    if RANK == 0:
        (folder / "file").touch()
    harness.CONTROL.Barrier()
    wrong = folder / "file" if RANK == SIZE - 1 else folder / "right"
    said = rf"no trace can be written there \(rank {SIZE - 1}: .*file is not a directory\)"
    with pytest.raises(OSError, match=said), jaxcomm.trace(wrong):
        raise AssertionError("the block must not begin")
    for value, error in ((3, TypeError), ("", ValueError)):
        with pytest.raises(error, match="directory"), jaxcomm.trace(value):
            pass
    with pytest.raises(RuntimeError, match="put the with block around its calls"):
        jax.jit(lambda x: jaxcomm.trace(folder).__enter__())(X)
    assert bridge.observed() == OBSERVED


def test_what_is_missing_is_told(folder):
    with jaxcomm.trace(folder):
        WORLD.Barrier()
    merged(folder)
    harness.CONTROL.Barrier()
    if RANK == 0:
        last = report.file_of(folder, SIZE - 1)
        whole = last.read_text()
        if SIZE > 1:
            assert all(event.wait is not None for event in report.read(folder).events)
        for text, why in ((whole[: len(whole) // 2], "incomplete"), ("", "incomplete"), (None, "no file")):
            last.unlink() if text is None else last.write_text(text)
            if SIZE > 1:
                run = report.read(folder)
                assert list(run.missing) == [SIZE - 1]
                assert f"missing: rank {SIZE - 1} (" in report.table(run)
                assert why in run.missing[SIZE - 1]
                assert all(event.wait is None for event in run.events)  # for whom, nobody knows
            else:
                with pytest.raises((FileNotFoundError, ValueError), match=r"there is no trace in .* (no|all) file"):
                    report.read(folder)


def test_the_table(folder):
    with jaxcomm.trace(folder):
        exchange(X)
        WORLD.Barrier()
    lines = report.table(seen(folder)).splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("operation"))
    assert lines[heading].split() == ["operation", "call", "site", "calls", "bytes", "time", "wait", "imbalance"]
    found = {line.split()[0]: line for line in lines[heading + 1 :]}
    assert found.keys() == {"allreduce", "sendrecv", "barrier"}
    assert f"test_timeline.py:{exchange.__wrapped__.__code__.co_firstlineno + 2} (exchange)" in found["allreduce"]
    assert f" {SIZE} " in found["barrier"]


def test_clocks_that_differ():
    """Each rank has a clock of its own here, which is off by seconds."""
    off = RANK * 3_000_000_000

    def read():
        return time.monotonic_ns() + off

    clock = timeline.clock_of(harness.CONTROL, f"clock {RANK}", read)
    assert abs(clock.offset + off) <= clock.error
    assert (clock.error == 0) == (RANK == 0)
    shared = timeline.clock_of(harness.CONTROL, f"clock {RANK % 2}", lambda: time.monotonic_ns() + off % 2)
    assert timeline.clock_of(harness.CONTROL) == (0, 0)
    assert len(set(harness.CONTROL.allgather(shared))) == min(SIZE, 2)


@pytest.mark.parametrize("observed", [False, True], ids=["alone", "in a trace"])
def test_the_names_in_profiles_of_jax(folder, observed):
    for call in (exchange, WORLD.Allgather):
        jax.block_until_ready(call(X))
    if observed:
        block = jaxcomm.trace(folder / "trace")
        block.__enter__()
    with jax.profiler.trace(folder / f"profile{RANK}"):
        jax.block_until_ready(exchange(X))
        for _ in range(2):
            WORLD.Allgather(X)
    if observed:
        block.__exit__(None, None, None)
    (file,) = (folder / f"profile{RANK}").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = [e["name"].split(".")[0] for e in events if e.get("ph") == "X"]
    assert names.count("mpi_allgather") == 2
    assert {"mpi_allreduce", "mpi_sendrecv"} <= set(names)
