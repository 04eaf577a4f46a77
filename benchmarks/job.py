"""What the scripts that run on the ranks have in common: they take a specification and leave a result.

mpiexec -n 2 python benchmarks/sweep.py '{"sizes": [8], ...}' result.json
"""

import json
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mpi4py import MPI

PACKAGES = ("jax", "jaxlib", "mpi4py", "jaxcomm", "mpi4jax", "numpy")


def main(measure: Callable[..., dict[str, Any]]) -> None:
    """Run measure(**specification) on every rank; rank 0 writes what it returns, and where that was."""
    specification, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    result = measure(**specification)
    if MPI.COMM_WORLD.rank == 0:
        path.write_text(json.dumps(result | {"machine": machine()}))


def machine() -> dict[str, Any]:
    """Describe the machine and the software that a figure belongs to."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "mpi": MPI.Get_library_version().split("\n")[0].strip().rstrip("\0"),
        "packages": {name: found for name in PACKAGES if (found := installed(name))},
    }


def cpu_model() -> str:
    names = [line.partition(":")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0].strip() if names else platform.processor()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
