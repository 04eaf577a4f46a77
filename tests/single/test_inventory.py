"""Every public member of mpi4py's communicators and requests is here, with mpi4py's arguments; and what it does in jit."""

import inspect
import re

import inventory
import jax
import mpi4py
import pytest
from mpi4py import MPI

import jaxcomm
from jaxcomm import host

STUB = inventory.stub()
# A member is inherited: Cartcomm has what Comm has.
WRAPPERS = [jaxcomm.JaxComm, jaxcomm.JaxCartcomm, jaxcomm.JaxGraphcomm, jaxcomm.JaxDistgraphcomm, jaxcomm.JaxIntercomm]
BASES = {cls: [base.__name__ for base in cls.__mro__ if base.__module__ == MPI.__name__] for cls in WRAPPERS}
MEMBERS = [(cls, of, m) for cls in WRAPPERS for of in BASES[cls] for m in STUB[of]]
MEMBERS += [(inventory.OURS[of], of, m) for of in ("Request", "Prequest", "Message", "Status") for m in STUB[of]]
MEMBERS += [(jaxcomm.Prequest, "Request", m) for m in STUB["Request"]]
members = pytest.mark.parametrize(
    ("cls", "of", "member"), MEMBERS, ids=[f"{cls.__name__}.{m.name}" for cls, _, m in MEMBERS]
)


def test_the_stub_is_read():
    names = {of: {m.name for m in found} for of, found in STUB.items()}
    assert {"Allreduce", "Join", "group", "name", "Get_attr", "irecv"} <= names["Comm"]
    assert {"Waitsome", "handle"} <= names["Request"]
    assert {"Start", "Pready_list"} <= names["Prequest"]
    assert {"coords", "Sub"} <= names["Cartcomm"]
    assert sum(map(len, names.values())) >= 289
    recv = next(m for m in STUB["Comm"] if m.name == "Recv")
    assert recv.parameters == (("buf", None), ("source", "ANY_SOURCE"), ("tag", "ANY_TAG"), ("status", "None"))
    assert BASES[jaxcomm.JaxCartcomm] == ["Cartcomm", "Topocomm", "Intracomm", "Comm"]


@members
def test_members_are_mpi4pys(cls, of, member):
    """The same arguments in the same order with the same defaults; more of ours are optional, by keyword or behind (*)."""
    ours = inspect.getattr_static(cls, member.name)
    if member.parameters is None:
        assert not callable(ours)
        return
    signature = inspect.signature(getattr(cls, member.name))
    bound = inspect.ismethod(getattr(cls, member.name))
    ours = list(signature.parameters.values())[0 if bound else 1 :]
    positional = [p for p in ours if p.kind not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)]
    assert [p.name for p in positional] == [name for name, _ in member.parameters]
    for p, (name, default) in zip(positional, member.parameters, strict=True):
        if default is not None:
            assert p.default == eval(default, vars(MPI)), name
    assert all(p.default is not p.empty for p in ours if p.kind is p.KEYWORD_ONLY)


ON_HOST = [
    (cls, member)
    for cls, of, member in MEMBERS
    if cls in WRAPPERS
    and member.parameters
    and inventory.behaviour(of, member, cls).startswith(("not inside jit", "on the host"))
]


@pytest.mark.parametrize(("cls", "member"), ON_HOST, ids=lambda value: getattr(value, "__name__", None) or value.name)
def test_what_works_on_the_host_alone_refuses_traced_values(cls, member):
    """Also on a communicator that is none, and with values inside containers."""
    method = getattr(cls, member.name)
    comm = () if inspect.ismethod(method) else (cls(),)
    count = max(1, sum(default is None for _, default in member.parameters))
    message = rf"{member.name} works on the host and cannot take a traced value; inside jit "
    for wrapped in (lambda x: x, lambda x: {"a": [x]}):
        with pytest.raises(TypeError, match=message):
            jax.make_jaxpr(lambda x, wrapped=wrapped: method(*comm, *[wrapped(x)] * count))(1.0)


@pytest.mark.parametrize("name", ["send", "bcast", "allreduce", "gather", "isend", "sendrecv", "scan"])
def test_lower_case_methods_name_the_upper_case_one(name):
    count = sum(default is None for _, default in next(m.parameters for _, _, m in MEMBERS if m.name == name))
    with pytest.raises(TypeError, match=f"inside jit use {name.capitalize()}, which takes arrays"):
        jax.make_jaxpr(lambda x: getattr(jaxcomm.JaxComm(MPI.COMM_NULL), name)(*[x] * count))(1.0)


def test_methods_of_requests_that_are_not_there_say_why():
    found = 0
    for cls, of, member in MEMBERS:
        if of in ("Request", "Prequest") and "not there" in inventory.behaviour(of, member, cls):
            request = cls(()) if cls is jaxcomm.Request else cls(lambda: None)
            with pytest.raises(NotImplementedError, match=rf"\w+\.{member.name}: .*NumPy buffers"):
                getattr(request, member.name)(*[0] * len(member.parameters or ()))  # a property raises before
            found += 1
    assert found >= 10


def test_the_table_names_members_once():
    known = {m.name for found in STUB.values() for m in found}
    named = [name for kind in host.KINDS for name in kind.names.split()]
    assert set(named) <= known
    assert len(named) == len(set(named))


def test_the_page_is_up_to_date():
    written = inventory.PAGE.read_text()
    version = re.search(r"mpi4py (\S+)'s", written)[1]
    if version != mpi4py.__version__:
        pytest.skip(f"the page is of mpi4py {version}")
    assert written == inventory.page(), "run python docs/inventory.py"
