"""Environments and wheels for the Makefile, which knows when they are out of date.

    create NAME    make or update .envs/NAME: cp311-build, cp311-lint, or Python, JAX and MPI: cp311-jax0.8.1-mpich,
                   cp311-bench-mpich (the newest JAX, for the benchmarks), cp311-peers-mpich (and what mpi4jax needs)
    wheel TAG      build build/wheels/TAG/*.whl for this Python, with .envs/TAG-build
    install NAME   put the wheel into .envs/NAME
    extra NAME X   add the requirements of the extra X to .envs/NAME
    peers NAME     build mpi4jax from its source and put it into .envs/NAME

pip works from outside on environments that have none of their own, and leaves byte code to the first import: both
together take 14 s where the usual way takes 39.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def folder(name: str) -> Path:
    return Path(".envs", name)


def pip(name: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run pip on an environment, silent unless it fails."""
    command = [sys.executable, "-m", "pip", "--python", str(folder(name) / "bin/python"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(command)}")


def requirements(name: str) -> list[str]:
    _, kind, *mpi = name.split("-")
    if kind == "build":
        # jaxlib is here for its headers only, so without what it needs to run.
        return ["--no-deps", *PROJECT["build-system"]["requires"]]
    needed = PROJECT["project"]["dependencies"]
    if kind == "lint":
        return [*needed, *EXTRAS["lint"]]
    if kind in ("bench", "peers"):
        return [*needed, *EXTRAS["bench"], *EXTRAS[mpi[0]]]
    version = kind.removeprefix("jax")
    jax = ["jax", "jaxlib"] if version == "newest" else [f"jax=={version}", f"jaxlib=={version}"]
    return [*needed, *jax, *EXTRAS["test"], *EXTRAS[mpi[0]]]


def create(name: str) -> None:
    stamp = folder(name) / "deps"
    if not stamp.exists():
        # None yet, or one that an interruption left half made.
        shutil.rmtree(folder(name), ignore_errors=True)
        venv.create(folder(name), symlinks=True)
    stamp.unlink(missing_ok=True)
    pip(name, "install", "--no-compile", *requirements(name))
    stamp.touch()


def wheel(tag: str) -> None:
    target = Path("build/wheels", tag)
    shutil.rmtree(target, ignore_errors=True)
    # setuptools keeps compiled objects from last time, welcome, and modules deleted since, not so.
    for module in Path("build").glob("lib.*/**/*.py*"):
        module.unlink()
    os.environ["PATH"] = f"{Path('.ci/stubs').resolve()}:{os.environ['PATH']}"
    pip(f"{tag}-build", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(target), ".")
    if Path("build/nvcc-was-called").exists():
        sys.exit("the build asked for nvcc")
    Path(target, "ok").touch()


def install(name: str) -> None:
    (built,) = Path("build/wheels", name.split("-")[0]).glob("*.whl")
    # The version does not change from one build to the next.
    pip(name, "install", "--no-compile", "--force-reinstall", "--no-deps", "--no-cache-dir", str(built))
    (folder(name) / "ok").touch()


def extra(name: str, which: str) -> None:
    pip(name, "install", "--no-compile", *EXTRAS[which])
    (folder(name) / which).touch()


def peers(name: str) -> None:
    programs = (folder(name) / "bin").resolve()
    mpicc = shutil.which("mpicc", path=f"{programs}:{os.environ['PATH']}")
    if mpicc is None:
        sys.exit("mpi4jax cannot be built: there is no mpicc, neither that of the MPI from PyPI nor one on PATH")
    # With nvcc on PATH its build wants CUDA's headers, too; and a wheel from pip's cache may belong to another MPI.
    path = [d for d in os.environ["PATH"].split(":") if not Path(d, "nvcc").exists()]
    env = os.environ | {"PATH": ":".join([str(programs), *path]), "MPICC": mpicc}
    for variable in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"):
        env.pop(variable, None)
    print("mpi4jax is built, which takes some minutes", flush=True)
    try:
        pip(name, "install", "--no-compile", "--no-cache-dir", "--no-binary", "mpi4jax", "mpi4jax", env=env)
    except SystemExit as failure:
        sys.exit(
            f"{failure}\nmpi4jax cannot be built here (above: why), so there is no peer to compare with: make bench"
        )
    (folder(name) / "peers").touch()


if __name__ == "__main__":
    {"create": create, "wheel": wheel, "install": install, "extra": extra, "peers": peers}[sys.argv[1]](*sys.argv[2:])
