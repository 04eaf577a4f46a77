"""docs/reliability.md, whose figures all come from here.

python tests/soak/page.py build/soak/*/results.json    keep these runs in docs/reliability, and fill the page
python tests/soak/page.py                              fill the page from the runs kept there
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = dict[str, Any]
DOCS = Path(__file__).parents[2] / "docs"
PAGE, KEPT = DOCS / "reliability.md", DOCS / "reliability"
SECTION = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def name(run: Run) -> str:
    """Name a run by its MPI."""
    found = re.match(r"(Open MPI|MPICH|Intel\(R\) MPI)\D*([\d.]*\d)", run["machine"]["mpi"])
    return " ".join(found.groups()) if found else run["machine"]["mpi"]


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def number(n: int) -> str:
    return f"{n:,}"


def machine_table(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        m = run["machine"]
        packages = ", ".join(f"{package} {version}" for package, version in m["packages"].items())
        rows.append(
            [
                name(run),
                f"{m['cpu']}, {m['cores']} cores",
                f"Python {m['python']}, {packages}",
                run["commit"],
                run["date"],
            ]
        )
    return table(["MPI", "machine", "software", "commit", "date"], rows)


def of_part(part: str, head: list[str], row: Callable[[Run], list[Any]]) -> Callable[[list[Run]], str]:
    """Make a table with a row for each run that has the part; one that failed says so."""

    def make(runs: list[Run]) -> str:
        rows = []
        for run in runs:
            if found := run.get(part):
                cells = ["**failed**"] * (len(head) - 2) if "failed" in found else row(found)
                rows.append([name(run), found["ranks"], *cells])
        return table(head, rows)

    return make


def ways(found: Run) -> str:
    return ", ".join(f"{number(found[way])} {way}" for way in ("eager", "jax.jit", "jaxcomm.jit"))


def of_programs(found: Run) -> list[Any]:
    return [number(found["programs"]), ways(found), number(found["operations"]), 0, f"{found['seconds']:.0f} s"]


def of_derivatives(found: Run) -> list[Any]:
    messages = f"{number(found['messages'])}, {number(found['long'])}"
    return [number(found["programs"]), ways(found), messages, found["modes"], 0, f"{found['seconds']:.0f} s"]


TABLES = ("reductions", "statuses", "datatypes", "sites", "messages")


def growth_of(found: Run, *what: str) -> str:
    """From the first look to the last."""
    return ", ".join(str(found["held"][w][-1] - found["held"][w][0]) for w in what)


def of_growth(found: Run) -> list[Any]:
    memory = found["held"]["memory"]
    half = memory[len(memory) // 2]
    return [
        number(found["operations"]),
        f"{memory[0] / 1024:.1f}, {half / 1024:.1f}, {memory[-1] / 1024:.1f} MB",
        growth_of(found, "files"),
        growth_of(found, "threads"),
        growth_of(found, "requests"),
        growth_of(found, *TABLES),
        growth_of(found, "communicators"),
        f"{found['seconds']:.0f} s",
    ]


def verdict(row: dict[str, Any], limit: float) -> str:
    if row["seconds"] is None:
        return "**no fault**"
    if row["returncode"] == 124:
        return f"**still waits after {limit:.0f} s**"
    return f"{row['seconds']:.1f} s, status {row['returncode']}"


def ends_tables(runs: list[Run]) -> str:
    texts = []
    for run in runs:
        rows = run.get("ends", [])
        if not rows:
            continue
        faults = list(dict.fromkeys(row["fault"] for row in rows))
        phases = dict.fromkeys(row["phase"] for row in rows)
        cells = {(row["phase"], row["fault"]): verdict(row, run["limit"]) for row in rows}
        lines = [[phase, *(cells.get((phase, fault), "") for fault in faults)] for phase in phases]
        texts.append(f"{name(run)}, {rows[0]['ranks']} ranks:\n\n{table(['', *faults], lines)}")
    return "\n\n".join(texts)


GROWTH = ["memory: first, middle, last", "files", "threads", "requests", "rows of tables", "of communicators", "time"]
SECTIONS: dict[str, Callable[[list[Run]], str]] = {
    "machine": machine_table,
    "programs": of_part(
        "programs", ["MPI", "ranks", "programs", "of which", "operations written", "wrong", "time"], of_programs
    ),
    "derivatives": of_part(
        "derivatives",
        ["MPI", "ranks", "programs", "of which", "messages, long ones", "modes", "wrong", "time"],
        of_derivatives,
    ),
    "operations": of_part("operations", ["MPI", "ranks", "operations", *GROWTH], of_growth),
    "communicators": of_part("communicators", ["MPI", "ranks", "communicators", *GROWTH], of_growth),
    "ends": ends_tables,
}


def keep(paths: list[Path]) -> None:
    """Put runs into docs/reliability by their MPI, over the parts that are there: mpich.json, open-mpi.json."""
    KEPT.mkdir(exist_ok=True)
    for path in paths:
        run = json.loads(path.read_text())
        if "ends" not in run:
            run.pop("limit", None)  # which is theirs
        kept_at = KEPT / f"{re.sub(r'[^a-z]+', '-', name(run).lower()).strip('-')}.json"
        if kept_at.exists() and (there := json.loads(kept_at.read_text()))["machine"] == run["machine"]:
            run = there | run
        kept_at.write_text(json.dumps(run).replace("}, {", "},\n{").replace("[{", "[\n{") + "\n")


def kept() -> list[Run]:
    return [json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))]


def fill(page: str, runs: list[Run]) -> str:
    """Return the page with what stands between its markers made anew."""
    return SECTION.sub(lambda m: f"{m[1]}\n{SECTIONS[m[2]](runs)}\n\n{m[3]}", page)


def main() -> None:
    keep([Path(argument) for argument in sys.argv[1:]])
    if not (runs := kept()):
        sys.exit(f"no runs in {KEPT}: give the results.json of one")
    PAGE.write_text(fill(PAGE.read_text(), runs))


if __name__ == "__main__":
    main()
