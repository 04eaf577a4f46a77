"""The table of operations: closed under adjoints, one with its C++ twin, right about shapes on any number of ranks."""

import re
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import attributes, reductions
from jaxcomm._primitives.make import bind
from jaxcomm._primitives.nonblocking import CHOOSE, startable
from jaxcomm._primitives.op import BUFFERED, TRACEABLE, Adjoint
from jaxcomm._primitives.table import TABLE
from jaxcomm.neighbors import Neighbors
from jaxcomm.operations import Operations

NATIVE = Path(__file__).parents[2] / "jaxcomm" / "_native"


@dataclass(frozen=True)
class Comm:
    """As much of a communicator as shapes depend on."""

    rank: int
    size: int
    two_groups = False

    @property
    def peers(self):
        return self.size


COMMS = [Comm(rank, size) for size in (1, 2, 3) for rank in range(size)]
# A value for each parameter that no other has, so that a mix-up shows.
VALUES = {"root": 0, "op": reductions.SUM, "reverse": False, "dest": 101, "source": 102, "sendtag": 103, "recvtag": 104}
VALUES |= {
    "count": 105,
    "received": 106,
    "batch": 1,
    "mode": BUFFERED,  # an adjoint is
    "message": 107,
    "differentiated": False,
    "waits": True,
    "matched": False,
    "status": None,
    "shadow": True,
    "fold": True,
    "ordered": True,
    "enveloped": False,
    "counts": (3, 0, 2),
    "sendcounts": (2, 1, 0),
    "recvcounts": (0, 4, 1),
    "sendkinds": (108, 109, 110),
    "recvkinds": (111, 112, 113),
    "says": 114,
}

rows = pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
sums_up = [row.name for row in TABLE.values() if row.adjoint and row.adjoint.then is not Adjoint.then]
rows_with_adjoint = pytest.mark.parametrize(
    "row", [row for row in TABLE.values() if row.adjoint], ids=lambda row: row.name
)


def params_of(row):
    return {name: VALUES[name] for name, _ in row.params}


def native_rows():
    """{name: number of data operands} of ops.inc."""
    text = (NATIVE / "ops.inc").read_text()
    return {name: int(n) for name, n in re.findall(r"^OP\((\w+), (\d+),", text, re.MULTILINE)}


# What is done with requests, whatever the operation was that they are of.
OF_REQUESTS = {"wait", "wait_recv", CHOOSE.target, "cancel", "release"}


def native_starts():
    return re.findall(r"^LATER\((\w+),", (NATIVE / "ops.inc").read_text(), re.MULTILINE)


def native_attributes():
    return re.findall(r"^(?:ATTRIBUTE|LIST)\((\w+)", (NATIVE / "attributes.inc").read_text(), re.MULTILINE)


def test_the_twin_has_the_same_rows():
    targets = {row.target for row in TABLE.values() if row.target}
    assert targets | OF_REQUESTS == set(native_rows())
    started = {row.target for row in TABLE.values() if startable(row)}
    assert started == set(native_starts())
    forms = {f"start_{name}" for name in started} | {f"tree_{name}" for name in native_rows()}
    assert set(native_rows()) | forms == set(bridge.capsules())


@rows
def test_the_twin_has_the_same_columns(row):
    assert {"comm", *dict(row.params)} <= set(native_attributes())
    if row.target:
        assert native_rows()[row.target] == row.operands


def test_attributes_that_are_left_out_are_those_that_mean_the_same():
    text = (NATIVE / "attributes.inc").read_text()
    absent = {name: int(value) for name, value in re.findall(r"^ATTRIBUTE\((\w+), (-?\d+)\)", text, re.MULTILINE)}
    assert absent | attributes.ABSENT == absent
    defaults = {name: value for row in TABLE.values() for name, value in row.params}
    of_requests = {"expected": 0, "keep": 0, "site": 0}
    meant = {name: -1 if value is None else value for name, value in (defaults | of_requests).items()}
    assert {name: int(meant[name]) for name in attributes.ABSENT if name != "waits"} == {
        name: value for name, value in attributes.ABSENT.items() if name != "waits"
    }


def test_traced_parameters_are_in_the_order_of_the_attributes():
    assert [name for name in native_attributes() if name in TRACEABLE] == list(TRACEABLE)


def test_rows_are_in_the_order_of_the_standard():
    numbers = [re.fullmatch(r"MPI 4\.1, ([\d.]+)", row.source) for row in TABLE.values() if row.target]
    assert all(numbers)
    sections = [tuple(map(int, number[1].split("."))) for number in numbers]
    assert sections == sorted(sections)


@rows
def test_every_row_has_a_method(row):
    methods = [method for cls in (Operations, Neighbors) for method in vars(cls).values()]
    assert any(f"Source:  {row.source}." in (method.__doc__ or "") for method in methods)


@rows_with_adjoint
def test_the_adjoint_of_the_adjoint_is_the_operation(row):
    adjoint = TABLE[row.adjoint.name]
    expected = row.name if row.name not in sums_up else adjoint.name
    assert expected in (adjoint.adjoint.name, adjoint.adjoint.checked)
    there = row.adjoint.params(params_of(row))
    back = adjoint.adjoint.params(dict(adjoint.params) | there)
    assert set(there) <= set(dict(adjoint.params))
    assert set(back) <= set(dict(row.params))
    for name in back:
        assert back[name] == VALUES[name], name


@rows_with_adjoint
def test_an_adjoint_goes_the_other_way(row):
    """Who sends gets the adjoint's result, and the other way round; leading axes change sides."""
    adjoint, params = TABLE[row.adjoint.name], params_of(row)
    there = dict(adjoint.params) | row.adjoint.params(params)
    assert adjoint.linear(there)
    # Where rows are exchanged, so are the names of their counts.
    lengths = [there.get(lead, lead) for lead in (adjoint.lead_in, adjoint.lead_out)]
    if row.name in sums_up:  # what comes from each neighbour becomes one cotangent
        assert lengths == [params[row.lead_out], params["sendcounts"]]
    else:
        assert lengths == [params.get(lead, lead) for lead in (row.lead_out, row.lead_in)]
    for comm in COMMS:
        assert adjoint.sends(comm, there) == row.returns(comm, params)
        assert adjoint.returns(comm, there) == row.sends(comm, params)


LED, ALONE, PART, PARTS, SENT, RECEIVED, STACK = "led", "alone", "part", "parts", "sent", "received", "stack"
PROBED = "probed"
# name: (operand, result) on the root, then elsewhere; a result of None is a link.
SHAPES = {
    "send": ((ALONE, None),) * 2,
    "recv": ((ALONE, ALONE),) * 2,
    "sendrecv": ((ALONE, ALONE),) * 2,
    "probe": ((None, PROBED),) * 2,
    "bcast": ((ALONE, ALONE),) * 2,
    "gather": ((ALONE, LED), (ALONE, None)),
    "scatter": ((LED, ALONE), (ALONE, ALONE)),
    "gatherv": ((PART, PARTS), (PART, None)),
    "scatterv": ((PARTS, PART), (PART, PART)),
    "allgatherv": ((PART, PARTS),) * 2,
    "alltoallv": ((SENT, RECEIVED),) * 2,
    "reduce_scatter": ((PARTS, PART),) * 2,
    "neighbor_allgather": ((ALONE, STACK),) * 2,
    "neighbor_allgatherv": ((PART, RECEIVED),) * 2,
    "neighbor_alltoallv": ((SENT, RECEIVED),) * 2,
    "allgather": ((ALONE, LED),) * 2,
    "alltoall": ((LED, LED),) * 2,
    "reduce": ((ALONE, ALONE), (ALONE, None)),
    "allreduce": ((ALONE, ALONE),) * 2,
    "allreduce_replicated": ((ALONE, ALONE),) * 2,
    "pvary": ((ALONE, ALONE),) * 2,
    "replicated_cotangent": ((ALONE, ALONE),) * 2,
    "reduce_scatter_block": ((LED, ALONE),) * 2,
    "scan": ((ALONE, ALONE),) * 2,
    "exscan": ((ALONE, None), (ALONE, ALONE)),
    "barrier": ((None, None),) * 2,
    "agree": ((None, None),) * 2,
}


def test_shapes_are_stated_for_every_row():
    assert set(SHAPES) == set(TABLE)


@rows
def test_shapes(row):
    for comm in COMMS:
        for base in ((), (0,), (4, 2)):
            shape = {LED: (comm.size, *base), ALONE: base, PROBED: (5,), None: (0,)}
            shape |= {PART: (VALUES["counts"][comm.rank], *base), PARTS: (sum(VALUES["counts"]), *base)}
            shape |= {SENT: (sum(VALUES["sendcounts"]), *base), RECEIVED: (sum(VALUES["recvcounts"]), *base)}
            shape[STACK] = shape[RECEIVED]
            given, expected = SHAPES[row.name][comm.rank != 0]
            x = jax.ShapeDtypeStruct(shape[given], np.int16)
            operands = [x, x][: row.operands]
            more = {"enveloped": True} if row.envelope else {}
            call = lambda *xs, comm=comm, more=more: bind(row, comm, xs, **params_of(row) | more)  # noqa: E731
            y, *envelope = jax.eval_shape(call, *operands)
            assert y.shape == shape[expected]
            assert y.dtype == {None: np.float32, PROBED: np.int32}.get(expected, np.int16)
            assert [e.shape for e in envelope] == [(3,)] * row.envelope


@pytest.mark.parametrize("name", ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"])
def test_reductions_are_values(name):
    """Equal and hashable whichever of mpi4py's objects they come from: two traces of a program are one."""
    first = reductions.reduction(getattr(MPI, name), "")
    again = reductions.reduction(MPI.Op(getattr(MPI, name)), "")
    assert first == again
    assert hash(first) == hash(again)
    assert repr(first) == name
    assert [other for other in reductions.BY_NAME if reductions.BY_NAME[other] == first] == [name]
