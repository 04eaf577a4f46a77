"""The form of the docstrings, so that every method answers the same questions in the same place."""

import inspect
import re

import pytest

import jaxcomm
import jaxcomm.functional
from jaxcomm.communicator import JaxComm
from jaxcomm.neighbors import Neighbors

SECTIONS = ["Shapes", "Args", "Returns", "Raises", "Adjoint", "Source"]
MANAGEMENT = {"Disconnect", "Free", "Set_name"}
OURS = {name: value for ours in (*JaxComm.__mro__[1:3], Neighbors) for name, value in vars(ours).items()}
OPERATIONS = [name for name in OURS if name[0].isupper() and name not in MANAGEMENT]


def sections_of(text):
    found = re.findall(r"^(\w+):\s+(.*?)(?=^\w+:\s|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: content.strip() for name, content in found}


def test_operations_are_found():
    assert {"Allreduce", "Send", "Sendrecv_replace", "Barrier"} <= set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_docstrings_of_operations(name):
    text = inspect.getdoc(OURS[name])
    assert re.match(r"[A-Z][^\n]*\.\n", text), "one sentence on one line"
    found = sections_of(text)
    assert list(found) == SECTIONS
    assert re.search(r"^(x|buf|sendbuf|no array)\b", found["Shapes"])
    assert "Count:" in found["Shapes"]
    assert re.search(r"Batching: \w", found["Adjoint"])
    assert found["Source"].endswith(".")
    assert all(len(line) <= 120 for line in text.splitlines())
    elsewhere = re.search(r"The others: as (\w+)\.", found["Args"])
    assert elsewhere is None or elsewhere[1] in OPERATIONS
    for parameter in list(inspect.signature(OURS[name]).parameters)[1:]:
        assert elsewhere or re.search(rf"\b{parameter}\b", found["Args"]), f"{parameter} is not explained"


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_raises(name):
    raised = sections_of(inspect.getdoc(OURS[name]))["Raises"]
    assert "TypeError" in raised or "arrier" in name
    assert "JaxRuntimeError: MPI reports an error" in raised or name == "Pvary"


PUBLIC = [
    *(getattr(jaxcomm, name) for name in jaxcomm.__all__),
    *(
        value
        for name, value in OURS.items()
        if not name.startswith("_") and (callable(value) or hasattr(value, "fget"))
    ),
]


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: getattr(thing, "__qualname__", repr(thing)))
def test_everything_public_has_a_docstring(thing):
    assert re.match(r"[A-Z][^\n]*[.:]($|\n)", inspect.getdoc(thing) or "")


@pytest.mark.parametrize("name", jaxcomm.functional.__all__)
def test_functions_point_to_their_methods(name):
    text = inspect.getdoc(getattr(jaxcomm.functional, name))
    method = re.match(r"As JaxComm\.(\w+)", text)[1]
    assert method.lower() == name
    assert method in OPERATIONS
    assert "Returns " in text
