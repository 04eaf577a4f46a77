"""Run world tests on a native layer that GCC's address and undefined-behaviour sanitizers watch: `make sanitize`.

    python tests/sanitize.py --package FOLDER [-n 2] -- tests/world/test_errors.py ...

FOLDER holds the package, built with JAXCOMM_SANITIZE=1. Leaks are not looked for: Python's are many. Whatever the
sanitizers say about any rank fails the run, and is printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from launch import Result, launch

# Of all that runs in the process, only the native layer was built to be watched.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0:handle_segv=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "PYTHONMALLOC": "malloc",
}
COMPLAINTS = ("ERROR: AddressSanitizer", "runtime error:", "AddressSanitizer CHECK failed")


def preload() -> str:
    """The sanitizers come first, and then the C++ library, whose exceptions they look for as they start."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    return " ".join(str(Path(done.stdout.strip()).resolve()) for done in found)


def complaints(result: Result) -> list[str]:
    """What the sanitizers say, each with some lines of context."""
    found = []
    for r, rank in enumerate(result.ranks):
        lines = (rank.stderr + rank.stdout).splitlines()
        at = [i for i, line in enumerate(lines) if any(text in line for text in COMPLAINTS)]
        found += [f"rank {r}:\n" + "\n".join(lines[i : i + 30]) for i in at]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Run world tests under sanitizers.")
    parser.add_argument("--package", type=Path, required=True, help="the folder that has it")
    parser.add_argument("-n", dest="ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("arguments", nargs="*", metavar="PYTEST_ARGUMENT")
    options = parser.parse_args()
    env = ENVIRONMENT | {"PYTHONPATH": str(options.package.resolve()), "LD_PRELOAD": preload()}
    # What watches is slow; only the clock of the whole counts. Output is not captured, or a crash would take it along.
    program = ["-m", "pytest", "-p", "no:cacheprovider", "-s", "-o", "timeout=0", *options.arguments]
    result = launch(program, options.ranks, options.timeout, env)
    print(result.ranks[0].stdout[-3000:])
    wrong = complaints(result)
    print(*wrong[:10], f"sanitizers: {len(wrong)} complaints", sep="\n")
    if result.returncode and not wrong:
        print(result.stderr[-6000:])
    return int(result.returncode != 0 or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
