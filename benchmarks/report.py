"""Tables and plots of the figures, and docs/performance.md, whose numbers all come from here.

python benchmarks/report.py build/benchmarks/*/results.json    keep these runs in docs/performance, and fill the page
python benchmarks/report.py                                    fill the page from the runs kept there
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import goals

Results = dict[str, Any]
DOCS = Path(__file__).parents[1] / "docs"
PAGE, KEPT = DOCS / "performance.md", DOCS / "performance"
SECTION = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def as_lines(results: Results) -> str:
    """Return JSON with a row a line."""
    return json.dumps(results).replace("}, {", "},\n{").replace("[{", "[\n{") + "\n"


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def name(results: Results) -> str:
    """Name a run by its MPI."""
    version = results["machine"]["mpi"]
    short = re.match(r"(Open MPI|MPICH|Intel\(R\) MPI)\D*([\d.]*\d)", version)
    return " ".join(short.groups()) if short else version


def size(nbytes: int) -> str:
    for power, unit in ((30, "GB"), (20, "MB"), (10, "kB")):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:g} {unit}"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us"


# Tables


def machine_table(runs: list[Results]) -> str:
    def facts(run: Results) -> list[str]:
        m = run["machine"]
        packages = ", ".join(f"{package} {version}" for package, version in m["packages"].items())
        return [
            name(run),
            f"{m['cpu']}, {m['cores']} cores, {m['system']}",
            f"Python {m['python']}, {packages}",
            run["date"],
        ]

    return table(["MPI", "machine", "software", "date"], [facts(run) for run in runs])


def verdict(goal: dict[str, Any] | None) -> str:
    if goal is None or goal["figure"] is None:
        return "not measured"
    return f"{goal['figure']:g}{' ' * bool(goal['unit'])}{goal['unit']} {'yes' if goal['reached'] else '**no**'}"


def goal_table(runs: list[Results]) -> str:
    """Each goal with its limit, and in each run the figure, and whether it is reached."""
    by_name = [{goal["what"]: goal for goal in run["goals"]} for run in runs]
    every = {what: goal for goals in by_name for what, goal in goals.items()}
    rows = [
        [
            goal["goal"],
            what,
            f"{'at least' if goal['least'] else 'at most'} {goal['limit']:g}{' ' * bool(goal['unit'])}{goal['unit']}",
            *(verdict(goals.get(what)) for goals in by_name),
        ]
        for what, goal in sorted(every.items(), key=lambda item: item[1]["goal"])
    ]
    return table(["", "figure", "goal", *map(name, runs)], rows)


def times_of(results: Results, parts: tuple[str, ...]) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """By operation and contender: the rows of these parts by message size."""
    out: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in results["rows"]:
        if row["part"] in parts:
            # mpi4py runs in each part; the first one counts.
            out.setdefault((row["operation"], row["contender"]), {}).setdefault(row["bytes"], row)
    return out


def time_tables(results: Results, parts: tuple[str, ...] = ("sweep", "gloo"), key: str = "median") -> str:
    """For each operation: sizes down, contenders across."""
    times = times_of(results, parts)
    tables = []
    for operation in dict.fromkeys(operation for operation, _ in times):
        across = [contender for o, contender in times if o == operation]
        sizes = sorted({n for contender in across for n in times[operation, contender]})
        rows = [
            [size(n), *(duration(row[key]) if (row := times[operation, c].get(n)) else "" for c in across)]
            for n in sizes
        ]
        tables.append(f"**{operation}**\n\n{table(['', *across], rows)}")
    return "\n\n".join(tables)


def per_run(make: Callable[[Results], str]) -> Callable[[list[Results]], str]:
    """Make a table of one run into one of several, each under its name."""

    def of_all(runs: list[Results]) -> str:
        return "\n\n".join(f"{name(run)}:\n\n{text}" for run in runs if (text := make(run)))

    return of_all


def latency_table(results: Results) -> str:
    times = times_of(results, ("latency",))
    operations = list(dict.fromkeys(operation for operation, _ in times))
    rows = []
    for contender in dict.fromkeys(contender for _, contender in times):
        found = [times.get((operation, contender), {}).get(8) for operation in operations]
        rows.append([contender, *(f"{duration(r['median'])} ({duration(r['min'])})" if r else "" for r in found)])
    return table(["8 B, median (least)", *operations], rows) if rows else ""


def overlap_table(results: Results) -> str:
    runs = results.get("overlap", [])
    rows = [
        [r["computation"], r["order"], duration(r["median"]), duration(r["max"]), f"{100 * r['in time']:.0f} %"]
        for run in runs
        for r in run["overlap"]
    ]
    limit = f"within {1e3 * runs[0]['limit']:g} ms" if runs else ""
    return table(["computation", "order in the source", "median", "longest", limit], rows) if rows else ""


def memory_table(results: Results) -> str:
    rows = [[r["contender"], r["needs"], r["growth"]] for run in results.get("memory", []) for r in run["memory"]]
    return table(["Allreduce", "arrays beside the operand", "growth of the peak"], rows) if rows else ""


def trees_table(results: Results) -> str:
    rows: dict[str, dict[str, str]] = {}
    for run in results.get("trees", []):
        for r in run["trees"]:
            rows.setdefault(r["way"], {})[r["kind"]] = duration(r["median"])
    kinds = list(next(iter(rows.values()), {}))
    return table(["", *kinds], [[way, *(row[kind] for kind in kinds)] for way, row in rows.items()]) if rows else ""


def startup_table(results: Results) -> str:
    rows = [[what, duration(seconds)] for run in results.get("compile", []) for what, seconds in run["compile"].items()]
    return table(["tracing and compiling", "median"], rows) if rows else ""


def shallow_water_table(results: Results) -> str:
    rows = [
        [f"{r['side']} x {r['side']}", r["contender"], duration(r["median"]), duration(r["min"])]
        for run in results.get("shallow water", [])
        for r in run["shallow water"]
    ]
    return table(["cells a rank", "", "a time step, median", "least"], rows) if rows else ""


SECTIONS: dict[str, Callable[[list[Results]], str]] = {
    "machine": machine_table,
    "goals": goal_table,
    "latency": per_run(latency_table),
    "overlap": per_run(overlap_table),
    "memory": per_run(memory_table),
    "trees": per_run(trees_table),
    "startup": per_run(startup_table),
    "shallow_water": per_run(shallow_water_table),
    "times": per_run(time_tables),
}


def markdown(results: Results) -> str:
    """Return all tables of a run."""
    chapters = [
        f"## {title.replace('_', ' ')}\n\n{text}" for title, make in SECTIONS.items() if (text := make([results]))
    ]
    return "\n\n".join(chapters) + "\n"


# Plots


def panels(
    series: dict[tuple[str, str], dict[int, float]], ylabel: str, xlabel: str, path: Path, ticks: Any = None
) -> None:
    """Draw one panel an operation and one line a contender, log-log. series: (operation, contender) -> {x: y}."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    operations = list(dict.fromkeys(operation for operation, _ in series))
    lines = list(dict.fromkeys(line for _, line in series))
    columns = min(3, len(operations))
    down = -(-len(operations) // columns)
    figure, grid = plt.subplots(down, columns, figsize=(5 * columns, 4 * down), squeeze=False, sharex=True)
    for axes in grid.flat[len(operations) :]:
        axes.set_visible(False)
    for operation, axes in zip(operations, grid.flat, strict=False):
        for i, line in enumerate(lines):
            if points := sorted(series.get((operation, line), {}).items()):
                style = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--", "marker": "os^vD*"[i % 6]}
                axes.plot(*zip(*points, strict=True), label=line, markersize=3, linewidth=1.2, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=operation, xlabel=xlabel, ylabel=ylabel)
        if ticks:
            axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.grid(alpha=0.3)
    handles = {label: h for axes in grid.flat for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize="small")
    figure.tight_layout(rect=(0, 0.03 + 0.05 * -(-len(handles) // 5) / down, 1, 1))
    figure.savefig(path, dpi=90)
    plt.close(figure)


def plots(results: Results, folder: Path, prefix: str = "") -> None:
    """Draw latency, bandwidth, and the growth of our time over mpi4py's with the number of ranks."""
    times = times_of(results, ("sweep", "gloo"))
    if times:
        latency = {key: {n: 1e6 * row["median"] for n, row in rows.items()} for key, rows in times.items()}
        panels(latency, "latency, us", "message, bytes", folder / f"{prefix}latency.png")
        bandwidth = {key: {n: n / row["median"] / 1e6 for n, row in rows.items()} for key, rows in times.items()}
        panels(bandwidth, "bandwidth, MB/s", "message, bytes", folder / f"{prefix}bandwidth.png")
    growth = growth_series(results)
    if growth:
        ranks = sorted({x for line in growth.values() for x in line})
        panels(growth, "time / mpi4py's time", "ranks", folder / f"{prefix}growth.png", ticks=ranks)


def growth_series(results: Results) -> dict[tuple[str, str], dict[int, float]]:
    rows = {
        (r["operation"], r["contender"], r["bytes"], r["ranks"]): r["median"]
        for r in results["rows"]
        if r["part"] == "growth"
    }
    series: dict[tuple[str, str], dict[int, float]] = {}
    for (operation, contender, nbytes, ranks), seconds in rows.items():
        if contender != "mpi4py":
            line = series.setdefault((operation, f"{contender}, {size(nbytes)}"), {})
            line[ranks] = seconds / rows[operation, "mpi4py", nbytes, ranks]
    return series


# The page


def keep(paths: list[Path]) -> None:
    """Put runs into docs/performance, in place of those that are there, by their MPI: mpich.json, open-mpi.json.

    Of a run on the machine and with the software of the one that is there, the parts that it has not measured stay.
    """
    KEPT.mkdir(exist_ok=True)
    for path in paths:
        run = json.loads(path.read_text())
        kept_at = KEPT / f"{re.sub(r'[^a-z]+', '-', name(run).lower()).strip('-')}.json"
        if kept_at.exists() and (there := json.loads(kept_at.read_text()))["machine"] == run["machine"]:
            measured = {row["part"] for row in run["rows"]}
            run["rows"] += [row for row in there["rows"] if row["part"] not in measured]
            run = there | run
            run["goals"] = goals.judge(run)
        kept_at.write_text(as_lines(run))


def kept() -> list[Results]:
    return [json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))]


def fill(page: str, runs: list[Results]) -> str:
    """Return the page with what stands between its markers made anew."""
    return SECTION.sub(lambda m: f"{m[1]}\n{SECTIONS[m[2]](runs)}\n\n{m[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill docs/performance.md.")
    parser.add_argument(
        "results", type=Path, nargs="*", help="results.json of a run each; the page shows the first's plots"
    )
    options = parser.parse_args()
    keep(options.results)
    if not (runs := kept()):
        sys.exit(f"no runs in {KEPT}: give the results.json of one")
    PAGE.write_text(fill(PAGE.read_text(), runs))
    plots(runs[0], KEPT)


if __name__ == "__main__":
    main()
