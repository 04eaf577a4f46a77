"""Run the benchmarks: start a job for each part, judge the goals, leave figures, table and plots in a folder.

    python benchmarks/run.py --output build/benchmarks/mpich

Every part is a job of its own under mpiexec, so that what one leaves behind does not slow the next. Conclusions are
ratios of figures from one job. The Python that runs this is the one that is measured, with its mpi4py, its MPI and its
jaxcomm.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import empty
import goals
import report
from names import BASELINES, CONTENDERS, EVERY, GLOO, IN_LOOPS, IN_PLACE, PING_PONG, SIX

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from launch import launch  # noqa: E402  the launcher of the tests: any MPI, a wall clock, and nothing left behind

KB, MB, GB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Scale:
    """How much of everything. Times in seconds, sizes in bytes."""

    sizes: list[int] = field(default_factory=lambda: [2**k for k in (*range(3, 28, 2), 28)])
    loop_sizes: list[int] = field(default_factory=lambda: [8, MB, 16 * MB, 128 * MB])
    growth_sizes: list[int] = field(default_factory=lambda: [8, 8 * KB, MB, 32 * MB, GB])
    latency_methods: list[str] = field(default_factory=lambda: ["Allreduce", PING_PONG])
    loop_methods: list[str] = field(default_factory=lambda: IN_PLACE)
    methods: list[str] = field(default_factory=lambda: SIX)
    gloo_methods: list[str] = field(default_factory=lambda: SIX)
    growth_methods: list[str] = field(default_factory=lambda: ["Allreduce", "Alltoall", "Sendrecv"])
    growth_ranks: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    fine: dict[str, Any] = field(default_factory=lambda: {"repetitions": 21, "seconds": 0.02})
    coarse: dict[str, Any] = field(default_factory=lambda: {"repetitions": 5, "seconds": 0.005, "budget": 8})
    memory: int = 256 * MB
    overlap: dict[str, Any] = field(
        default_factory=lambda: {"late": 0.050, "busy": 0.045, "limit": 0.060, "many": 16, "repetitions": 20}
    )
    imports: int = 9
    compile: dict[str, Any] = field(default_factory=lambda: {"operations": 100, "repetitions": 7})
    trees: dict[str, int] = field(default_factory=lambda: {"leaves": 200, "nbytes": KB})
    grids: dict[str, list[int]] = field(default_factory=lambda: {"small": [64, 200], "large": [1024, 2]})
    limit: float = 1800


SMALL = {"repetitions": 1, "seconds": 1e-4, "budget": 0.1}
SMOKE = Scale(
    sizes=[4 * KB],
    growth_sizes=[8],
    latency_methods=EVERY,
    loop_methods=[],
    methods=[],
    gloo_methods=["Alltoall"],
    growth_methods=["Allreduce"],
    growth_ranks=[3],
    fine=SMALL,
    coarse=SMALL,
    memory=MB,
    overlap={"late": 0.002, "busy": 0.001, "limit": 1, "many": 2, "repetitions": 1},
    imports=0,
    compile={"operations": 3, "repetitions": 1},
    trees={"leaves": 3, "nbytes": KB},
    grids={"small": [8, 2]},
    limit=60,
)


@dataclass(frozen=True)
class Part:
    """A job: a script and its specification."""

    name: str
    script: str
    specification: dict[str, Any]
    ranks: int = 2
    env: dict[str, str] = field(default_factory=dict)


def parts(scale: Scale, ranks: int, scratch: Path) -> Iterator[Part]:
    """All jobs, in the order in which they run."""

    def sweep(name: str, ranks: int = ranks, **specification: Any) -> Part:
        return Part(name, "sweep.py", specification, ranks)

    def startup(mode: str, ranks: int = 1, env: dict[str, str] | None = None, **specification: Any) -> Part:
        return Part(mode, "startup.py", {"mode": mode, **specification}, ranks, env or {})

    for _ in range(scale.imports):
        yield startup("import")
    yield startup("compile", **scale.compile)
    for _ in range(2):
        yield startup("cache", ranks, cache_in(scratch / "cache"))
    yield sweep("latency", names=CONTENDERS + BASELINES, methods=scale.latency_methods, sizes=[8], **scale.fine)
    yield sweep("loops", names=IN_LOOPS, methods=scale.loop_methods, sizes=scale.loop_sizes, **scale.fine)
    yield Part("memory", "memory.py", {"nbytes": scale.memory}, ranks)
    yield Part("overlap", "overlap.py", scale.overlap)
    yield Part("trees", "trees.py", {**scale.trees, **scale.fine}, ranks)
    if find_spec("mpi4jax"):
        yield Part("shallow water", "shallow_water_peer.py", {"grids": scale.grids, **scale.fine}, ranks)
    yield sweep("sweep", names=CONTENDERS, methods=scale.methods, sizes=scale.sizes, **scale.coarse)
    yield sweep("gloo", names=["mpi4py", *GLOO], methods=scale.gloo_methods, sizes=scale.sizes, **scale.coarse)
    names = ["mpi4py", "eager", "jaxcomm.jit", "loop"]
    for many in scale.growth_ranks:
        sizes = [n for n in scale.growth_sizes if fits(n, many)]
        yield sweep("growth", many, names=names, methods=scale.growth_methods, sizes=sizes, **scale.coarse)


def cache_in(folder: Path) -> dict[str, str]:
    """Have JAX keep everything it compiles."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def fits(nbytes: int, ranks: int) -> bool:
    """Whether so many ranks have memory for messages of that size: each some ten arrays, MPI's own among them."""
    return 10 * nbytes * ranks < 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run(part: Part, scratch: Path, limit: float) -> dict[str, Any] | None:
    """Return what rank 0 left, or None if the job failed."""
    path = scratch / "result.json"
    path.unlink(missing_ok=True)
    # Open MPI's ranks yield the processor only where there are more of them than processors.
    crowded = part.ranks > len(os.sched_getaffinity(0))
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "OMPI_MCA_mpi_yield_when_idle": str(int(crowded))} | part.env
    program = [str(HERE / part.script), json.dumps(part.specification), str(path)]
    done = launch(program, part.ranks, limit, env)
    if done.returncode or not path.exists():
        print(f"{part.name} on {part.ranks} ranks failed ({done.returncode}):\n{done.stdout}{done.stderr}", flush=True)
        return None
    return dict(json.loads(path.read_text()))


def collect(wanted: list[Part], scratch: Path, limit: float) -> dict[str, Any]:
    """Run the parts, and put what they leave together."""
    out: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": {}, "failed": [], "rows": []}
    for part in wanted:
        start = time.monotonic()
        result = run(part, scratch, limit)
        print(f"{part.name}, {part.ranks} ranks: {time.monotonic() - start:.1f} s", flush=True)
        if result is None:
            out["failed"].append(part.name)
            continue
        out["machine"] = result.pop("machine")
        if part.script == "sweep.py":
            out["rows"] += [{"part": part.name} | row for row in result["rows"]]
        else:
            out.setdefault(part.name, []).append(result)
    return out


def write(results: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(report.as_lines(results))
    (folder / "report.md").write_text(report.markdown(results))
    report.plots(results, folder)
    print(report.goal_table([results]), f"\nFigures, tables and plots are in {folder}.", sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Benchmarks of jaxcomm against mpi4py, mpi4jax and JAX's own collectives."
    )
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="folder (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="tiny: does everything work?")
    parser.add_argument("--parts", nargs="+", help="only these: latency, loops, sweep, growth, ...")
    parser.add_argument("--max-size", type=int, default=GB, help="of a message, in bytes (default: %(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=2, help="one a core, for all parts but growth (default: %(default)s)"
    )
    options = parser.parse_args()

    scale = capped(SMOKE if options.smoke else Scale(), options.max_size)
    with tempfile.TemporaryDirectory(prefix="jaxcomm-") as scratch:
        os.environ[empty.LIBRARY] = str(empty.build(Path(scratch)))
        every = parts(scale, options.ranks, Path(scratch))
        wanted = [p for p in every if p.name in (options.parts or [p.name]) and p.specification.get("methods", True)]
        results = collect(wanted, Path(scratch), scale.limit)
    if not results["machine"]:
        sys.exit("no part has run to its end")
    results["goals"] = goals.judge(results)
    write(results, options.output)
    return bool(results["failed"])


def capped(scale: Scale, largest: int) -> Scale:
    fields = ("sizes", "loop_sizes", "growth_sizes")
    fewer = {name: [n for n in getattr(scale, name) if n <= largest] for name in fields}
    return Scale(**vars(scale) | fewer | {"memory": max(MB, min(scale.memory, largest))})


if __name__ == "__main__":
    sys.exit(main())
