"""python -m jaxcomm info: what a program has to do with here. python -m jaxcomm selftest: whether it works.

Both run under mpiexec too; rank 0 speaks for all, and says where ranks differ.

python -m jaxcomm report DIRECTORY: what a trace tells (jaxcomm.trace, JAXCOMM_TRACE). Without mpiexec.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import jaxcomm
from jaxcomm import report as reports
from jaxcomm import selftest, timeline
from jaxcomm._native import bridge

WORLD = MPI.COMM_WORLD
THREADS = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}


def facts() -> dict[str, str]:
    """What is so on this rank."""
    standard = ".".join(map(str, MPI.Get_version()))
    handles = "pointers" if MPI._sizeof(MPI.Comm) == 8 else "32-bit integers"
    return {
        "jaxcomm": jaxcomm.__version__,
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "JAX": f"jax {jax.__version__}, jaxlib {version('jaxlib')}, 64 bits {'on' if jax.config.jax_enable_x64 else 'off'}",
        "XLA FFI": f"jaxcomm built for {'.'.join(map(str, bridge.ffi_version()))}",
        "devices": ", ".join(map(str, jax.local_devices())),
        "mpi4py": f"{version('mpi4py')}, numpy {np.__version__}",
        "MPI": f"{MPI.Get_library_version().split(chr(10))[0].strip(chr(0) + ' ')}, standard {standard}",
        "MPI handles": handles,
        "MPI threads": THREADS.get(MPI.Query_thread(), "?"),
        "large counts": "MPI 4's functions" if bridge.large_counts() else "by datatypes, without MPI 4's functions",
        "largest tag": str(WORLD.Get_attr(MPI.TAG_UB)),
        "settings": ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("JAXCOMM_")) or "none",
    }


def info() -> bool:
    """Print the facts, and those that differ between ranks once for each kind of rank."""
    every = WORLD.gather((MPI.Get_processor_name(), facts()))
    if every is None:
        return True
    hosts = [host for host, _ in every]
    names = list(dict.fromkeys(hosts))
    print(f"{'ranks':14} {len(every)}: " + ", ".join(f"{hosts.count(host)} on {host}" for host in names))
    for key in every[0][1]:
        values = [found[key] for _, found in every]
        for value in dict.fromkeys(values):
            ranks = [str(rank) for rank, mine in enumerate(values) if mine == value]
            where = "" if len(ranks) == len(every) else f"   (ranks {', '.join(ranks)})"
            print(f"{key:14} {value}{where}")
    return True


def test(limit: float) -> bool:
    """Run the checks, and print how each went on the ranks; end the job where they take longer than so many seconds."""
    clock = threading.Timer(limit, _give_up, [limit])
    clock.daemon = True
    clock.start()
    good = True
    for check in selftest.CHECKS:
        start = time.perf_counter()
        errors = [text for text in WORLD.allgather(_error(check)) if text]
        good = good and not errors
        if WORLD.rank == 0:
            verdict = "ok" if not errors else f"FAILED on {len(errors)} of {WORLD.size} ranks"
            print(f"{(check.__doc__ or '').rstrip('.'):60} {verdict} ({time.perf_counter() - start:.1f} s)", flush=True)
            for text in dict.fromkeys(errors):
                print(text, flush=True)
    clock.cancel()
    if WORLD.rank == 0:
        print("all is well" if good else "something is wrong: the text above, and `python -m jaxcomm info`, say more")
    return good


def _give_up(limit: float) -> None:
    sys.stderr.write(f"jaxcomm selftest: rank {WORLD.rank} is not through after {limit:g} s; it waits here:\n")
    faulthandler.dump_traceback()
    sys.stderr.flush()
    WORLD.Abort(1)


def _error(check: Callable[[Any], None]) -> str:
    try:
        check(jaxcomm.JaxComm(WORLD))
    except Exception:
        return f"rank {WORLD.rank}: {traceback.format_exc()}"
    return ""


def report(folder: Path) -> bool:
    """Print the table of a trace, and leave the timeline and the pictures beside it; whether there is a trace."""
    try:
        run = reports.read(folder)
    except (OSError, ValueError) as error:
        print(f"jaxcomm report: {error}", file=sys.stderr)
        return False
    print(reports.table(run), end="\n\n")
    try:
        if not reports.is_merged(folder):
            reports.merge(folder, run)
        print(f"{folder / 'trace.json'}: for https://ui.perfetto.dev or chrome://tracing")
        for path in reports.draw(run, folder):
            print(path)
    except ImportError:
        print("no pictures, as there is no matplotlib: pip install 'jaxcomm[report]'")
    except OSError as error:
        print(f"nothing more can be written there: {error}")
    return True


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxcomm", description=__doc__)
    parser.add_argument("command", choices=["info", "selftest", "report"])
    parser.add_argument("directory", nargs="?", type=Path, help="of report: where the trace is")
    parser.add_argument("--timeout", type=_seconds, default=300, help="of selftest, in seconds (default: %(default)s)")
    options = parser.parse_args()
    if (options.command == "report") != (options.directory is not None):
        parser.error("report needs a directory, and the others take none")
    if options.command == "report":
        timeline.discard()  # JAXCOMM_TRACE may still be set; the report is no part of the trace
        return 0 if WORLD.rank > 0 or report(options.directory) else 1
    return 0 if (info() if options.command == "info" else test(options.timeout)) else 1


if __name__ == "__main__":
    sys.exit(main())
