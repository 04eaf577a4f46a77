"""The goals, and how far the figures of a run reach them."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from names import IN_PLACE, PING_PONG

MB = 2**20
Results = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """One figure that has a limit.

    Attributes:
      goal: its number.
      what: what the figure is.
      figure: as measured; None if this run has not measured it.
      limit: the most it may be, or the least.
      least: whether the limit is one from below.
      unit: of figure and limit; empty for ratios.
    """

    goal: int
    what: str
    figure: float | None
    limit: float
    least: bool = False
    unit: str = ""

    @property
    def reached(self) -> bool | None:
        if self.figure is None:
            return None
        return self.figure >= self.limit if self.least else self.figure <= self.limit


def judge(results: Results) -> list[dict[str, Any]]:
    found = [goal for check in CHECKS for goal in check(results)]
    return [asdict(goal) | {"figure": rounded(goal.figure), "reached": goal.reached} for goal in found]


def rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.3g}")


class Times:
    """The medians of one part by operation, contender, size and number of ranks; of what is not there, NaN."""

    def __init__(self, results: Results, part: str):
        self.rows = [row for row in results["rows"] if row["part"] == part]
        self.medians: dict[tuple[str, str, int, int], float] = {}
        for r in self.rows:
            self.medians[r["operation"], r["contender"], r["bytes"], r["ranks"]] = r["median"]

    def values(self, key: str) -> list[Any]:
        return list(dict.fromkeys(row[key] for row in self.rows))

    def __call__(self, operation: str, contender: str, nbytes: int = 8, ranks: int = 0) -> float:
        ranks = ranks or next(iter(self.values("ranks")), 0)
        return self.medians.get((operation, contender, nbytes, ranks), math.nan)


def known(x: float) -> float | None:
    return None if math.isnan(x) else x


def small_messages(results: Results) -> Iterator[Goal]:
    time = Times(results, "latency")
    for operation in ("Allreduce", PING_PONG):
        mpi4py, plain = time(operation, "mpi4py"), time(operation, "plain call")
        ratio = time(operation, "eager") / (mpi4py + plain)
        yield Goal(1, f"eager {operation}, 8 B / (mpi4py + a plain jitted call)", known(ratio), 1)
    mpi4py, plain = time("Allreduce", "mpi4py"), time("Allreduce", "plain call")
    ratio = time("Allreduce", "jaxcomm.jit") / (mpi4py + 2 * plain)
    yield Goal(2, "jaxcomm.jit Allreduce, 8 B / (mpi4py + two plain jitted calls)", known(ratio), 1)
    for operation in ("Allreduce", PING_PONG):
        ratio = time(operation, "jax.jit") / time(operation, "mpi4jax jit")
        yield Goal(3, f"jax.jit {operation}, 8 B / mpi4jax", known(ratio), 1)


def loops(results: Results) -> Iterator[Goal]:
    time = Times(results, "loops")
    for operation in IN_PLACE:
        ratio = time(operation, "loop") / (time(operation, "mpi4py") + time(operation, "empty loop"))
        yield Goal(4, f"{operation} in a loop, 8 B / (mpi4py + an empty custom call)", known(ratio), 1.2)
        for nbytes in [n for n in time.values("bytes") if n >= MB]:
            ratio = time(operation, "loop", nbytes) / time(operation, "mpi4py", nbytes)
            yield Goal(4, f"{operation} in a loop, {nbytes // MB} MB / mpi4py in place", known(ratio), 1.05)


def memory(results: Results) -> Iterator[Goal]:
    what = "memory of an Allreduce beyond its arrays and what MPI takes under mpi4py, in multiples of the message"
    worst = None
    for run in results.get("memory", []):
        rows = {row["contender"]: row["growth"] - row["needs"] for row in run["memory"]}
        worst = max(extra - rows["mpi4py"] for extra in rows.values())
        what = what.replace("an Allreduce", f"an Allreduce of {run['bytes'] // MB} MB")
    yield Goal(4, what, worst, 0.05)


def overlap(results: Results) -> Iterator[Goal]:
    for run in results.get("overlap", []):
        alone = {row["computation"]: row["median"] for row in run["overlap"] if row["order"] == "no Recv"}
        for row in run["overlap"]:
            if row["order"] != "no Recv":
                what = f"{row['computation']}, {row['order']}: share of calls within {1e3 * run['limit']:g} ms"
                # On a busy machine the computation may turn out longer or shorter than it was to be.
                fair = 0.8 < alone[row["computation"]] / run["busy"] < 1.2
                yield Goal(5, what, row["in time"] if fair else None, 0.95, least=True)


def trees(results: Results) -> Iterator[Goal]:
    for run in results.get("trees", []):
        times = {(row["way"], row["kind"]): row["median"] for row in run["trees"]}
        for way in dict.fromkeys(way for way, _ in times):
            tree, what = times[way, "tree"], f"{way}: {run['leaves']} leaves of {run['bytes']} B"
            yield Goal(6, f"{what} / one message of as many bytes", tree / times[way, "one message"], 3)
            yield Goal(6, f"{what} / leaf by leaf", tree / times[way, "leaf by leaf"], 1 / 3)


def startup(results: Results) -> Iterator[Goal]:
    imports = [run["import seconds"] for part in ("import", "compile") for run in results.get(part, [])]
    yield Goal(
        7, "import jaxcomm after jax and mpi4py", 1e3 * statistics.median(imports) if imports else None, 30, unit="ms"
    )
    for run in results.get("compile", []):
        seconds = run["compile"]
        for ours, baseline in (("jax.jit", "empty"), ("jaxcomm.jit, first call", "empty, first call")):
            what = f"{ours}: tracing and compiling {run['operations']} operations / as many empty custom calls"
            yield Goal(7, what, seconds[ours] / seconds[baseline], 1.3)
    runs = results.get("cache", [])
    misses = runs[1]["misses"] if len(runs) > 1 and runs[0]["misses"] else None
    yield Goal(7, "programs that the second process compiles, with the persistent cache", misses, 0)


def growth(results: Results) -> Iterator[Goal]:
    time = Times(results, "growth")
    ranks = sorted(time.values("ranks"))
    for operation in time.values("operation"):
        for contender in time.values("contender"):
            if contender == "mpi4py" or not {2, ranks[-1]} <= set(ranks):
                continue
            ratios = [ratio(time, operation, contender, n, ranks[-1]) / ratio(time, operation, contender, n, 2)
                      for n in time.values("bytes")]  # fmt: skip
            mean = statistics.geometric_mean(r for r in ratios if not math.isnan(r))
            what = f"{operation}, {contender} / mpi4py: growth from 2 to {ranks[-1]} ranks, mean over sizes"
            yield Goal(8, what, mean, 1.25)


def ratio(time: Times, operation: str, contender: str, nbytes: int, ranks: int) -> float:
    return time(operation, contender, nbytes, ranks) / time(operation, "mpi4py", nbytes, ranks)


def shallow_water(results: Results) -> Iterator[Goal]:
    for grid, limit in (("small", 1.3), ("large", 1.0)):
        speedup, cells = None, grid
        for run in results.get("shallow water", []):
            rows = {row["contender"]: row for row in run["shallow water"] if row["grid"] == grid}
            if rows:
                speedup = rows["mpi4jax"]["median"] / rows["jax.jit"]["median"]
                cells = "{0} x {0}".format(rows["jax.jit"]["side"])
        yield Goal(9, f"shallow water, {cells} cells a rank: mpi4jax / jaxcomm", speedup, limit, least=True)


CHECKS = [small_messages, loops, memory, overlap, trees, startup, growth, shallow_water]
