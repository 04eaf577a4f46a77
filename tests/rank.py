"""What mpiexec starts on each rank: send the output to files, then become the program.

Usage: python rank.py FOLDER PROGRAM [ARGUMENT ...], see launch.py.
"""

import os
import resource
import sys

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def redirect(path: str, descriptor: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, descriptor)
    os.close(file)


def main(folder: str, *command: str) -> None:
    rank = next(os.environ[name] for name in RANK_VARIABLES if name in os.environ)
    path = os.path.join(folder, rank)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    redirect(path + ".out", 1)
    redirect(path + ".err", 2)
    os.environ["JAXCOMM_TEST_JOURNAL"] = path + ".journal"
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
