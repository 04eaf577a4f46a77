"""What a trace tells: one timeline of all ranks, a table of where the time went, pictures. See timeline.py."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Record", "Run", "draw", "file_of", "merge", "merge_if_complete", "read", "replace", "rows", "table"]


class Record(NamedTuple):
    """An operation, as bridge.take_records says it; in files, ranks are those of COMM_WORLD.

    Attributes:
      number: counts this rank's operations, in the order in which they began.
      began, ended: nanoseconds of the rank's monotonic clock.
      request: the number of the operation that started the request that this one waits for (0: unknown), or None. All
        from `apart` to `started_at` is that operation's then.
      apart: 0, or which duplicate of the communicator (comm, its number) it uses: recorder.hpp.
      started_at, site: "file:line (function)" of the operation, and of the wait.
    """

    number: int
    operation: str
    began: int
    ended: int
    thread: int
    failed: bool
    request: int | None
    comm: int
    apart: int
    elements: int
    dtype: str | None
    bytes: int
    op: str | None
    root: Any
    dest: Any
    sendtag: int | None
    source: Any
    recvtag: Any
    started_at: str | None
    site: str | None


@dataclass(slots=True)
class Event:
    """A record on the clock of rank 0.

    Attributes:
      group: the communicator, the same on all its ranks; None if its ranks are not known.
      wait: nanoseconds until the others came; None if that is not known.
    """

    rank: int
    record: Record
    began: int
    ended: int
    communicator: str
    group: Any
    wait: int | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return self.record.operation if self.record.request is None else f"wait {self.record.operation}"

    @property
    def time(self) -> int:
        """How long it took, in nanoseconds."""
        return self.ended - self.began


@dataclass
class Run:
    """What there is of one trace.

    Attributes:
      size: how many ranks there were. started: seconds since 1970.
      hosts: {rank: its host}, of those whose files are there. error: of the clocks, in nanoseconds.
      events: of each rank in the order in which they began.
    """

    size: int
    started: float
    hosts: dict[int, str]
    error: int
    began: int
    ended: int
    events: list[Event]

    useless: dict[int, str]

    @property
    def missing(self) -> dict[int, str]:
        """The ranks that left no file of this trace, and what is known of why."""
        unknown = "no file: it has not ended yet, or it was killed"
        return {rank: self.useless.get(rank, unknown) for rank in range(self.size) if rank not in self.hosts}


# Files


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"rank-{rank}.json"


def _merged(folder: Path) -> Path:
    return folder / "trace.json"


def replace(path: Path, text: str | Iterable[str]) -> None:
    """Write a file that others see whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        os.fchmod(handle, 0o666 & ~_umask())
        with open(handle, "w") as file:
            file.writelines([text] if isinstance(text, str) else text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def merge_if_complete(folder: Path, run: str, size: int) -> None:
    """Write trace.json if all ranks have written, and nobody else does it."""
    start = f'{{"run":"{run}"'
    for rank in range(size):
        try:
            with open(file_of(folder, rank)) as file:
                if file.read(len(start)) != start:
                    return
        except FileNotFoundError:
            return
    claim = folder / f".merging-{run}"
    with suppress(FileExistsError):
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
        try:
            merge(folder, read(folder))
        finally:
            claim.unlink(missing_ok=True)


def read(folder: Path) -> Run:
    """Read what the ranks have written in the newest trace of a folder.

    Raises: FileNotFoundError: there is nothing. ValueError: a file is not jaxcomm's, or of another version.
    """
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        raise FileNotFoundError(f"there is no trace in {folder}: no file rank-<r>.json")
    found, useless = [], {}
    for path in paths:
        try:
            found.append(_load(path))
        except json.JSONDecodeError:
            useless[_rank_of(path)] = "its file is incomplete: it was ended while it wrote"
    if not found:
        raise ValueError(f"there is no trace in {folder}: all files rank-<r>.json are incomplete")
    newest = max(found, key=lambda content: content["started"])
    files = sorted((f for f in found if f["run"] == newest["run"]), key=lambda content: content["rank"])
    useless |= {f["rank"]: "its file is of another trace" for f in found if f["run"] != newest["run"]}
    events = [event for content in files for event in _events(content)]
    _find_waits(events)
    return Run(
        size=newest["size"],
        started=newest["started"],
        hosts={f["rank"]: f["host"] for f in files},
        error=max(f["clock"]["error"] for f in files),
        began=min(f["began"] + f["clock"]["offset"] for f in files),
        ended=max(f["ended"] + f["clock"]["offset"] for f in files),
        events=events,
        useless=useless,
    )


def _rank_of(path: Path) -> int:
    number = path.stem.removeprefix("rank-")
    return int(number) if number.isdigit() else -1


def _load(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    try:
        if tuple(content["columns"]) == Record._fields:
            return content  # type: ignore[no-any-return]
    except (KeyError, TypeError):
        pass
    raise ValueError(f"{path} was not written by this version of jaxcomm")


def _events(content: dict[str, Any]) -> list[Event]:
    """Those of one rank."""
    groups, names = _groups(content["communicators"]), content["communicators"]
    offset, rank = content["clock"]["offset"], content["rank"]
    records = sorted((Record(*row) for row in content["records"]), key=lambda record: record.number)
    return [
        Event(rank, r, r.began + offset, r.ended + offset, names[str(r.comm)]["name"], groups.get(r.comm))
        for r in records
    ]


def _groups(communicators: dict[str, dict[str, Any]]) -> dict[int, Any]:
    """What names a communicator on all its ranks: its members, and how many of the same members were made before."""
    made: defaultdict[Any, int] = defaultdict(int)
    groups = {}
    for slot in sorted(map(int, communicators)):
        known = communicators[str(slot)]
        if "ranks" in known:
            sides = sorted(tuple(known[name]) for name in ("ranks", "peers") if name in known)
            groups[slot] = (*sides, made[tuple(sides)])
            made[tuple(sides)] += 1
    return groups


# Who waits for whom

_ROOTED_OUT, _ROOTED_IN = {"bcast", "scatter", "scatterv"}, {"gather", "gatherv", "reduce"}
_SHARED = {"scatter", "scatterv", "alltoall", "alltoallv", "reduce_scatter_block", "reduce_scatter"}
_COLLECTIVE = _ROOTED_OUT | _ROOTED_IN | _SHARED | {"barrier", "allgather", "allgatherv", "allreduce", "scan", "exscan"}
_SENDS, _RECEIVES = {"send", "sendrecv"}, {"recv", "sendrecv"}


def _base(operation: str) -> str:
    """The blocking form's name."""
    return operation[1:] if operation.startswith("i") else operation


def _find_waits(events: Sequence[Event]) -> None:
    """Fill in how long each collective waited for the last rank, and each receive for its send."""
    came = _latest_arrivals(events)
    came.update(_starts_of_sends(events))
    for event in events:
        number = event.record.number if event.record.request is None else event.record.request
        last = came.get((event.rank, number))
        if last is not None:
            event.wait = max(0, min(last, event.ended) - event.began)


def _latest_arrivals(events: Sequence[Event]) -> dict[tuple[int, int], int]:
    """For each collective (rank, number) of which all ranks left a file, when the last one began it."""
    calls: defaultdict[Any, list[Event]] = defaultdict(list)
    counts: defaultdict[Any, int] = defaultdict(int)
    for event in events:
        if event.record.request is None and event.group and _base(event.record.operation) in _COLLECTIVE:
            counts[event.rank, event.group] += 1
            calls[event.group, counts[event.rank, event.group]].append(event)
    return {
        (event.rank, event.record.number): max(each.began for each in same)
        for same in calls.values()
        if len({each.record.operation for each in same}) == 1
        and {each.rank for each in same} >= set(itertools.chain(*same[0].group[:-1]))
        for event in same
    }


def _starts_of_sends(events: Sequence[Event]) -> dict[tuple[int, int], int]:
    """For each receive (rank, number), when its send began.

    A receive takes the first message of its source that has its tag and was not taken: MPI 4.1, 3.5. Where a rank also
    receives from anybody, nothing is said of its receives, as these took messages that the others did not see.
    """
    sends: defaultdict[Any, list[Event]] = defaultdict(list)
    receives: defaultdict[Any, list[Event]] = defaultdict(list)
    wild = set()
    for event in events:
        r, place = event.record, (event.group, event.record.apart)
        if r.request is not None or not event.group or r.failed:
            continue
        if _base(r.operation) in _SENDS and isinstance(r.dest, int):
            sends[place, event.rank, r.dest].append(event)
        if _base(r.operation) in _RECEIVES and isinstance(r.source, int):
            receives[place, r.source, event.rank].append(event)
        if _base(r.operation) in _RECEIVES and r.source == "ANY_SOURCE":
            wild.add((place, event.rank))
    found = {}
    for (place, source, rank), received in receives.items():
        left = sends[place, source, rank]
        for receive, send in _matched(received, left) if (place, rank) not in wild else ():
            found[rank, receive.record.number] = send.began
    return found


def _matched(receives: Sequence[Event], sends: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    left = deque(sends)
    for receive in receives:
        tag = receive.record.recvtag
        fits = next((i for i, send in enumerate(left) if tag in ("ANY_TAG", send.record.sendtag)), None)
        if fits is not None:
            yield receive, left[fits]
            del left[fits]


# One timeline


def merge(folder: Path, run: Run) -> None:
    """Write trace.json: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (trace events)."""
    replace(_merged(folder), _lines(run))


def is_merged(folder: Path) -> bool:
    """Whether trace.json is there, and no file of a rank is newer."""
    try:
        time_ = _merged(folder).stat().st_mtime_ns
    except FileNotFoundError:
        return False
    return all(path.stat().st_mtime_ns <= time_ for path in folder.glob("rank-*.json"))


def _lines(run: Run) -> Iterator[str]:
    separator = '{"displayTimeUnit": "ns", "traceEvents": [\n'
    for event in _trace_events(run):
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


def _trace_events(run: Run) -> Iterator[dict[str, Any]]:
    lanes = _lanes(run.events)
    for rank, host in run.hosts.items():
        yield _metadata("process_name", rank, 0, name=f"rank {rank} ({host})")
        yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    for (rank, thread, beside), lane in lanes.items():
        yield _metadata("thread_name", rank, lane, name=f"thread {thread}" + (", beside" if beside else ""))
    for event, lane in zip(run.events, _lane_of_each(run.events, lanes), strict=True):
        yield {
            "name": event.name,
            "ph": "X",
            "ts": (event.began - run.began) / 1000,
            "dur": event.time / 1000,
            "pid": event.rank,
            "tid": lane,
            "args": _args(event),
        }


def _metadata(what: str, rank: int, lane: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": args}


def _args(event: Event) -> dict[str, Any]:
    r = event.record
    found = {
        "bytes": r.bytes,
        "dtype": r.dtype,
        "count": r.elements,
        "op": r.op,
        "root": r.root,
        "dest": r.dest,
        "sendtag": r.sendtag,
        "source": r.source,
        "recvtag": r.recvtag,
        "communicator": event.communicator,
        "call site": r.site,
        "failed": r.failed,
    }
    return {name: value for name, value in found.items() if value is not None}


def _beside(events: Sequence[Event]) -> Iterator[tuple[int, int, int]]:
    """Rank, thread and lane of each: what overlaps in one thread (a message that XLA does not wait for) needs another."""
    ends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events:
        lanes = ends[event.rank, event.record.thread]
        free = next((i for i, end in enumerate(lanes) if end <= event.began), len(lanes))
        lanes[free : free + 1] = [event.ended]
        yield event.rank, event.record.thread, free


def _lanes(events: Sequence[Event]) -> dict[tuple[int, int, int], int]:
    """A number for each, counted by rank."""
    next_: defaultdict[int, int] = defaultdict(int)
    lanes = {}
    for lane in sorted(set(_beside(events))):
        next_[lane[0]] += 1
        lanes[lane] = next_[lane[0]]
    return lanes


def _lane_of_each(events: Sequence[Event], lanes: dict[tuple[int, int, int], int]) -> Iterator[int]:
    return (lanes[lane] for lane in _beside(events))


# The table


class Row(NamedTuple):
    """An operation at one place of the program, over all ranks.

    Attributes:
      time, wait: nanoseconds, summed over calls and ranks; wait is None where it is not known of any call.
      imbalance: the most time of a rank over the mean of the ranks that were there.
    """

    name: str
    site: str
    calls: int
    bytes: int
    time: int
    wait: int | None
    imbalance: float


def rows(run: Run) -> list[Row]:
    """What took most comes first."""
    same: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in run.events:
        same[event.name, event.record.site or "?"].append(event)
    found = [_row(name, site, events) for (name, site), events in same.items()]
    return sorted(found, key=lambda row: -row.time)


def _row(name: str, site: str, events: Sequence[Event]) -> Row:
    by_rank: defaultdict[int, int] = defaultdict(int)
    for event in events:
        by_rank[event.rank] += event.time
    total = sum(by_rank.values())
    waits = [event.wait for event in events if event.wait is not None]
    imbalance = max(by_rank.values()) * len(by_rank) / total if total else 1.0
    moved = sum(event.record.bytes for event in events)
    return Row(name, site, len(events), moved, total, sum(waits) if waits else None, imbalance)


def table(run: Run) -> str:
    """What `python -m jaxcomm report` prints."""
    heading = ("operation", "call site", "calls", "bytes", "time", "wait", "imbalance")
    lines = [heading]
    for row in rows(run):
        wait = "" if row.wait is None else _seconds(row.wait)
        numbers = (_bytes(row.bytes), _seconds(row.time), wait, f"{row.imbalance:.2f}")
        lines.append((row.name, _short(row.site), str(row.calls), *numbers))
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    return "\n".join([_summary(run), "", *(_line(line, widths) for line in lines)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(w) for cell, w in zip(cells, widths, strict=True)]
    padded[:2] = [cell.ljust(w) for cell, w in zip(cells[:2], widths[:2], strict=True)]
    return "  ".join(padded).rstrip()


def _summary(run: Run) -> str:
    hosts = len(set(run.hosts.values()))
    took = sum(event.time for event in run.events) / max(1, len(run.hosts))
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    text = (
        f"{run.size} rank{'s' * (run.size != 1)} on {hosts} host{'s' * (hosts != 1)}, {started}, "
        f"{_seconds(run.ended - run.began)}, of which {_seconds(took)} per rank in {len(run.events)} operations"
    )
    if run.error:
        text += f"\nclocks of different hosts: right to {_seconds(run.error)} when the trace began"
    for why in sorted(set(run.missing.values())):
        ranks = ", ".join(str(rank) for rank, reason in run.missing.items() if reason == why)
        text += f"\nmissing: rank {ranks} ({why})"
    return text


def _short(site: str) -> str:
    return os.path.basename(site)


def _seconds(nanoseconds: float) -> str:
    unit, size = next((u, s) for u, s in (("s", 1e9), ("ms", 1e6), ("us", 1e3)) if nanoseconds >= s or s == 1e3)
    return f"{_digits(nanoseconds / size)} {unit}"


def _bytes(count: float) -> str:
    unit, size = _unit(count)
    return f"{_digits(count / size)} {unit}"


def _unit(count: float) -> tuple[str, float]:
    return next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)) if count >= s or s == 1)


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


# Pictures


def messages(run: Run) -> np.ndarray:
    """Bytes that rank i (axis 0) sent to rank j in messages."""
    out = np.zeros((run.size, run.size))
    for event in run.events:
        r = event.record
        if r.request is None and _base(r.operation) in _SENDS and isinstance(r.dest, int):
            out[event.rank, r.dest] += r.bytes
    return out


def collectives(run: Run) -> np.ndarray:
    """Bytes that rank i has for rank j in collectives, by what these mean; MPI may take other ways."""
    out = np.zeros((run.size, run.size))
    for event in run.events:
        r, kind = event.record, _base(event.record.operation)
        if r.request is not None or not event.group or kind not in _COLLECTIVE:
            continue
        sides = event.group[:-1]
        others = [rank for rank in sides[-1 if event.rank in sides[0] else 0] if rank not in (None, event.rank)]
        if kind in _ROOTED_IN:
            others = [rank for rank in others if rank == r.root]
        if kind in _ROOTED_OUT and r.root not in (event.rank, "ROOT"):
            others = []
        parts = len(sides[-1 if event.rank in sides[0] else 0]) if kind in _SHARED else 1
        out[event.rank, others] += r.bytes / parts
    return out


_MOST_BARS = 20_000


def draw(run: Run, folder: Path) -> list[Path]:
    """Draw matrix.png and timeline.png.

    Raises: ImportError: there is no matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = []
    for name, width, height, draw_on in (
        ("matrix.png", 10, 4.5, _draw_matrix),
        ("timeline.png", 12, min(2 + 0.5 * run.size, 30), _draw_timeline),
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw_on(figure, run)
        figure.savefig(folder / name, dpi=120)
        made.append(folder / name)
    return made


def _draw_matrix(figure: Any, run: Run) -> None:
    parts = ("messages", messages(run)), ("collectives, by what they mean", collectives(run))
    for (title, values), axes in zip(parts, figure.subplots(1, 2), strict=True):
        most = values.max()
        unit, size = _unit(most)
        image = axes.imshow(values / size, cmap="viridis", vmin=0, origin="upper")
        axes.set(title=title if most else f"{title}: none", xlabel="to rank", ylabel="from rank")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes, label=unit)


def _draw_timeline(figure: Any, run: Run) -> None:
    axes = figure.subplots()
    bars = sorted(run.events, key=lambda event: -event.time)[:_MOST_BARS]
    kinds = list(dict.fromkeys(sorted(event.name for event in bars)))
    colour = _colours(kinds)

    def seconds(time_: int) -> float:
        return (time_ - run.began) / 1e9

    for kind in kinds:
        for rank in run.hosts:
            mine = [event for event in bars if event.name == kind and event.rank == rank]
            if not mine:
                continue
            axes.broken_barh([(seconds(e.began), e.time / 1e9) for e in mine], (rank - 0.4, 0.8), color=colour[kind])
            waits = [(seconds(e.began), e.wait / 1e9) for e in mine if e.wait]
            axes.broken_barh(waits, (rank - 0.4, 0.2), color="black", alpha=0.6, linewidth=0)
        axes.broken_barh([], (0, 0), color=colour[kind], label=kind)
    axes.broken_barh([], (0, 0), color="black", alpha=0.6, label="of which waiting")
    left_out = len(run.events) - len(bars)
    axes.set(
        title=f"the longest {_MOST_BARS} operations" if left_out else "",
        xlabel="seconds",
        xlim=(0, max(seconds(run.ended), 1e-9)),
        ylim=(run.size - 0.5, -0.5),
        ylabel="rank",
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right upper", fontsize="small")


def _colours(kinds: Sequence[str]) -> dict[str, Any]:
    import matplotlib

    palette = matplotlib.colormaps["tab20"]
    return {kind: palette(i % 20) for i, kind in enumerate(kinds)}
