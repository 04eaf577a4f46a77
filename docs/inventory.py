"""Write docs/mpi4py.md: every public member of mpi4py's communicators and requests, and how it behaves here.

    python docs/inventory.py

The members are those of mpi4py's own stub file; how they behave is told by the table in jaxcomm/host.py and by what
jaxcomm's classes define. tests/single/test_inventory.py checks that the page is up to date.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpi4py
from mpi4py import MPI

import jaxcomm
from jaxcomm import host

PAGE = Path(__file__).with_name("mpi4py.md")
OURS = {
    "Comm": jaxcomm.JaxComm,
    "Intracomm": jaxcomm.JaxComm,
    "Topocomm": jaxcomm.JaxCartcomm,
    "Cartcomm": jaxcomm.JaxCartcomm,
    "Graphcomm": jaxcomm.JaxGraphcomm,
    "Distgraphcomm": jaxcomm.JaxDistgraphcomm,
    "Intercomm": jaxcomm.JaxIntercomm,
    "Request": jaxcomm.Request,
    "Prequest": jaxcomm.Prequest,
    "Message": jaxcomm.Message,
    "Status": MPI.Status,
}
"""By mpi4py's class, the class here that has its members."""

IN_JIT = "in jit and on arrays; on host buffers mpi4py's own ([porting.md](porting.md))"
REQUESTS = "in jit and on arrays; operations on host buffers return mpi4py's requests"
ON_HOST = "on the host, mpi4py's own; called in a function that is traced, its result is a constant of the program"
MESSAGES = (
    "mpi4py's own; with a template in the buffer's place it returns an array. Found inside jit, received inside jit"
)
STATUSES = "on the host, mpi4py's own, once the operation has run; inside jit return_status=True gives traced values"


@dataclass(frozen=True)
class Member:
    """
    Attributes:
      parameters: (name, default as written or None) of a method, without self or cls; None for a property.
    """

    name: str
    parameters: tuple[tuple[str, str | None], ...] | None


def stub() -> dict[str, list[Member]]:
    """The public members of each class, where they are defined, as the stub of the installed mpi4py has them."""
    tree = ast.parse((Path(mpi4py.__file__).parent / "MPI.pyi").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {name: [m for node in classes[name].body if (m := _member(node))] for name in OURS}


def _member(node: ast.stmt) -> Member | None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return Member(node.target.id, None)
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
        return None
    decorators = {ast.unparse(d) for d in node.decorator_list}
    if any(d.endswith(".setter") for d in decorators):
        return None
    return Member(node.name, None if "property" in decorators else _parameters(node.args))


def _parameters(args: ast.arguments) -> tuple[tuple[str, str | None], ...]:
    names = [a.arg for a in (*args.posonlyargs, *args.args)]
    defaults = [None] * (len(names) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
    return tuple(zip(names, defaults, strict=True))[1:]


def behaviour(of: str, member: Member, cls: type) -> str:
    """How a member of one of mpi4py's classes behaves on one of ours."""
    name = member.name
    if of == "Status":
        return STATUSES
    if of == "Message":
        return MESSAGES if name in vars(cls) else ON_HOST
    ours = inspect.getattr_static(cls, name)
    if refusal := _refusal(ours, cls):
        return refusal
    if of in ("Request", "Prequest"):
        return REQUESTS
    if member.parameters is None:
        return ON_HOST
    kind = host.kind_of(getattr(MPI, of), name)
    if kind is not host.ENDS and getattr(cls, name).__module__.startswith(jaxcomm.__name__):
        return IN_JIT
    return f"not inside jit: {kind.why}" if kind.why else ON_HOST


def _refusal(ours: Any, cls: type) -> str:
    """What a method of ours that is not there says of itself, or where it refers to."""
    function = getattr(ours, "__func__", getattr(ours, "fget", ours))
    if getattr(function, "__annotations__", {}).get("return") != "NoReturn" or function.__module__ == MPI.__name__:
        return ""
    text = inspect.getdoc(function) or ""
    if text.startswith("As "):
        return _refusal(inspect.getattr_static(cls, text.removeprefix("As ").rstrip(".")), cls)
    return text.replace("Not here:", "not there, raises NotImplementedError:").rstrip(".")


def _section(title: str, of: str, cls: type, members: list[Member]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for member in members:
        groups.setdefault(behaviour(of, member, cls), []).append(f"`{member.name}`")
    rows = [f"| {how} | {' '.join(names)} |" for how, names in groups.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *rows, ""]


def page() -> str:
    lines = [
        "# mpi4py's members",
        "",
        f"Every public member of mpi4py {mpi4py.__version__}'s communicators, requests, messages and statuses exists here,",
        "with the same arguments in the same order. Each is listed where mpi4py defines it. What does not work inside jit",
        "raises a TypeError when it is handed a traced value. Written by `python docs/inventory.py`.",
        "",
    ]
    found = stub()
    for of, members in found.items():
        ours = OURS[of].__name__
        lines += _section(of if of == ours else f"{of} ({ours})", of, OURS[of], members)
    # What Comm has and an intercommunicator does in another way.
    inter = jaxcomm.JaxIntercomm
    other = [m for m in found["Comm"] if behaviour("Comm", m, inter) != behaviour("Comm", m, jaxcomm.JaxComm)]
    if other:
        lines += _section("Comm, of an intercommunicator (JaxIntercomm)", "Comm", inter, other)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
