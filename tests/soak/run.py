"""Run the long tests: a job for each, under one MPI; leave the figures in a folder.

    python tests/soak/run.py --output build/soak/mpich

The Python that runs this is the one that is tested, with its MPI and its jaxcomm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ends

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from launch import launch  # noqa: E402

PAIR = 2  # for what counts how often, on as many ranks as any machine has cores
PACKAGES = ("jax", "jaxlib", "mpi4py", "numpy")


def machine() -> dict[str, Any]:
    """Describe the machine and the software that the figures belong to."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    code = "from mpi4py import MPI; print(MPI.Get_library_version().split('\\n')[0].strip(chr(0) + ' '))"
    done = launch(["-c", code], 1, 60)
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "mpi": done.stdout.strip(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def job(script: str, ranks: int, limit: float, **specification: Any) -> dict[str, Any]:
    """What a script leaves; or, where it fails, how."""
    paths = [HERE, HERE.parent, HERE.parent / "world", *filter(None, [os.environ.get("PYTHONPATH")])]
    # Most of the time of random programs is XLA's, which need not make them fast.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_ENABLE_X64": "1", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        done = launch([str(HERE / script), json.dumps(specification), str(path)], ranks, limit, env)
        if done.returncode or not path.exists():
            return {"failed": done.returncode, "stderr": done.stderr[-4000:]}
        return dict(json.loads(path.read_text()))


def commit() -> str:
    done = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Long tests of jaxcomm.")
    parser.add_argument("--output", type=Path, default=Path("build/soak"), help="folder (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=3, help="for programs and faults")
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--derivatives", type=int, default=1000, help="programs that are differentiated")
    parser.add_argument("--seconds", type=float, default=7200, help="for each kind of programs: no more are begun then")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--communicators", type=int, default=10_000)
    parser.add_argument(
        "--limit", type=float, default=25, help="of a job with a fault, in seconds; 0 to leave these out"
    )
    options = parser.parse_args()
    ranks, result = options.ranks, {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine()}
    most = options.seconds + 600
    for name, on, specification in (
        ("programs", ranks, {"programs": options.programs, "seconds": options.seconds}),
        ("derivatives", ranks, {"derivatives": options.derivatives, "seconds": options.seconds}),
        ("operations", PAIR, {"operations": options.operations}),
        ("communicators", PAIR, {"communicators": options.communicators}),
    ):
        if specification[name]:
            result[name] = job(f"{name}.py", on, most, **specification) | {"ranks": on}
            print(name, {k: v for k, v in result[name].items() if k != "held"}, flush=True)
    if options.limit:
        result["limit"] = options.limit
        result["ends"] = [row | {"ranks": ranks} for row in ends.run(ranks, options.limit)]
    options.output.mkdir(parents=True, exist_ok=True)
    text = re.sub(r"}, {", "},\n{", json.dumps(result)).replace("[{", "[\n{")
    (options.output / "results.json").write_text(text + "\n")
    print(f"the figures are in {options.output}")
    return any("failed" in part for part in result.values() if isinstance(part, dict))


if __name__ == "__main__":
    sys.exit(main())
