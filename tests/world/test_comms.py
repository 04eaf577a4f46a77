"""Communicators: mpi4py's own in every respect, with the wrapper types, values that jit can hold, and private messages."""

from dataclasses import dataclass, field

import harness
import jax
import numpy as np
import pytest
from mpi4py import MPI

import jaxcomm
from jaxcomm import JaxCartcomm, JaxComm, JaxDistgraphcomm, JaxGraphcomm, JaxIntercomm

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size


def agree_on_sum(comm):
    """The communicator works, eagerly and jitted, and has the members it says."""
    values = [np.random.default_rng(member).normal(size=2) for member in comm.allgather(RANK)]
    for allreduce in (comm.Allreduce, jax.jit(comm.Allreduce)):
        np.testing.assert_allclose(allreduce(values[comm.rank]), sum(values), rtol=1e-12, atol=1e-15)


MADE = {
    "JaxComm": (lambda: JaxComm(MPI.COMM_WORLD), JaxComm),
    "JaxComm of a JaxComm": (lambda: JaxComm(WORLD), JaxComm),
    "Dup": (lambda: WORLD.Dup(), JaxComm),
    "Clone": (lambda: WORLD.Clone(), JaxComm),
    "Split": (lambda: WORLD.Split(RANK % 2, -RANK), JaxComm),
    "Split_type": (lambda: WORLD.Split_type(MPI.COMM_TYPE_SHARED), JaxComm),
    "Create": (lambda: WORLD.Create(WORLD.group), JaxComm),
    "Create_group": (lambda: WORLD.Create_group(WORLD.group, 3), JaxComm),
    "Create_cart": (lambda: WORLD.Create_cart([SIZE], [True]), JaxCartcomm),
    "Dup of a Cartcomm": (lambda: WORLD.Create_cart([SIZE, 1]).Dup(), JaxCartcomm),
    "Sub": (lambda: WORLD.Create_cart([SIZE, 1]).Sub([True, False]), JaxCartcomm),
    "Create_graph": (
        lambda: WORLD.Create_graph(range(1, SIZE + 1), [(r + 1) % SIZE for r in range(SIZE)]),
        JaxGraphcomm,
    ),
    "Create_dist_graph": (lambda: WORLD.Create_dist_graph([RANK], [1], [(RANK + 1) % SIZE]), JaxDistgraphcomm),
    "Create_dist_graph_adjacent": (
        lambda: WORLD.Create_dist_graph_adjacent([(RANK - 1) % SIZE], [(RANK + 1) % SIZE]),
        JaxDistgraphcomm,
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_communicators_that_are_made(name):
    make, kind = MADE[name]
    comm = make()
    assert type(comm) is kind
    theirs = next(base for base in kind.__mro__ if base.__module__ == MPI.__name__)
    assert isinstance(comm, theirs)
    assert issubclass(theirs, MPI.Comm)
    assert comm not in (WORLD, MPI.COMM_WORLD)
    agree_on_sum(comm)
    comm.Free()
    agree_on_sum(WORLD)


def test_a_jaxcomm_is_mpi4pys():
    assert isinstance(WORLD, MPI.Intracomm)
    assert MPI.Comm.Compare(WORLD, MPI.COMM_WORLD) == MPI.CONGRUENT
    assert (WORLD.rank, WORLD.Get_rank(), WORLD.size, WORLD.Get_size()) == (MPI.COMM_WORLD.rank,) * 2 + (
        MPI.COMM_WORLD.size,
    ) * 2
    assert (WORLD.name, WORLD.Get_name()) == ("MPI_COMM_WORLD",) * 2
    assert WORLD.Get_errhandler() == MPI.ERRORS_RETURN
    assert not WORLD.is_inter
    assert not WORLD.Is_inter()
    assert WORLD.Get_topology() == MPI.UNDEFINED
    assert WORLD.Get_attr(MPI.TAG_UB) == MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)


def test_py2f():
    again = MPI.Comm.f2py(WORLD.py2f())
    assert MPI.Comm.Compare(again, WORLD) == MPI.IDENT
    assert again == WORLD


def test_groups():
    group = WORLD.Get_group()
    assert WORLD.group == group
    assert (group.size, group.rank) == (SIZE, RANK)
    assert MPI.Group.Compare(group, MPI.COMM_WORLD.group) == MPI.IDENT
    turned = WORLD.Split(0, -RANK)
    assert MPI.Group.Translate_ranks(turned.group, None, group) == list(reversed(range(SIZE)))
    last = WORLD.Create_group(group.Incl([SIZE - 1])) if RANK == SIZE - 1 else None
    if last is not None:
        assert (last.rank, last.size) == (0, 1)
        np.testing.assert_array_equal(jax.jit(last.Allreduce)(np.arange(3.0)), np.arange(3.0))
    assert WORLD.Create(group.Incl([SIZE - 1])) == MPI.COMM_NULL or RANK == SIZE - 1
    assert WORLD.Split(MPI.UNDEFINED if RANK else 0) == MPI.COMM_NULL or RANK == 0


@pytest.mark.skipif(SIZE == 1, reason="two groups")
def test_intercommunicators():
    half = WORLD.Split(RANK % 2)
    inter = half.Create_intercomm(0, WORLD, 1 - RANK % 2, 5)
    assert type(inter) is JaxIntercomm
    assert inter.remote_size == (SIZE + RANK % 2) // 2
    assert inter.allgather(RANK) == [r for r in range(SIZE) if r % 2 != RANK % 2]
    merged = inter.Merge(bool(RANK % 2))
    assert type(merged) is JaxComm
    agree_on_sum(merged)


# As values


def test_equality_and_hash():
    a, b = WORLD.Dup(), WORLD.Dup()
    assert a == a
    assert a != b
    assert a != MPI.COMM_WORLD
    assert a != MPI.COMM_NULL
    assert a != 3
    assert len({a, b, a}) == 2
    again = MPI.Intracomm.f2py(a.py2f())
    assert a == again
    assert not a != again  # noqa: SIM202
    index = hash(a)
    a.Free()
    assert hash(a) == index
    assert a != b
    assert b in {b: 1}


def test_as_static_arguments():
    """One compilation for a communicator, another for another, and each program uses its own."""
    traces = []

    def program(x, comm):
        traces.append(comm)
        return comm.Allreduce(x)

    jitted = jax.jit(program, static_argnums=1)
    alone = harness.communicator("self")
    x = np.float64(RANK + 1)
    for _ in range(2):
        assert float(jitted(x, WORLD)) == SIZE * (SIZE + 1) / 2
        assert float(jitted(x, alone)) == RANK + 1
    assert traces == [WORLD, alone]


@jax.tree_util.register_dataclass
@dataclass
class Field:
    """As an application's state may be: data, and where it lives."""

    x: jax.Array
    comm: JaxComm = field(metadata={"static": True})


def test_in_the_static_part_of_a_pytree():
    total = jax.jit(lambda f: Field(f.comm.Allreduce(f.x), f.comm))
    for comm in (WORLD, harness.communicator("self"), WORLD):
        y = total(Field(RANK + 1.0, comm))
        assert y.comm is comm
        assert float(y.x) == sum(r + 1 for r in comm.allgather(RANK))


def test_programs_name_communicators_by_index():
    """CASES 28: the same program in every run, whatever MPI's handles are."""
    comm = WORLD.Dup()
    text = jax.jit(comm.Allreduce).lower(np.zeros(3)).as_text()
    assert f"comm = {comm.slot} : i64" in text
    assert "jaxcomm_allreduce" in text
    assert str(MPI._handleof(comm)) not in text
    comm.Free()
    assert WORLD.Dup().slot > comm.slot  # a row is never used again


def test_names_and_repr():
    assert repr(WORLD) == f"JaxComm(MPI_COMM_WORLD, rank {RANK} of {SIZE})"
    comm = WORLD.Create_cart([SIZE])
    comm.Set_name("ring of ranks")
    assert comm.Get_name() == comm.name == "ring of ranks"
    assert repr(comm) == f"JaxCartcomm(ring of ranks, rank {RANK} of {SIZE})"
    comm.name = "line"
    assert repr(comm) == f"JaxCartcomm(line, rank {RANK} of {SIZE})"
    comm.Free()
    assert repr(comm) == f"JaxCartcomm(line, rank {RANK} of {SIZE}, freed)"


def test_with_block():
    with JaxComm(MPI.COMM_WORLD) as comm:
        f = jax.jit(comm.Allreduce)
        assert float(f(1.0)) == SIZE
    with pytest.raises(jax.errors.JaxRuntimeError, match="was freed"):
        f(1.0).block_until_ready()
    with pytest.raises(ZeroDivisionError), JaxComm(MPI.COMM_WORLD) as comm:
        _ = 1 / 0
    assert comm == MPI.COMM_NULL


def test_disconnect():
    comm = WORLD.Dup()
    f = jax.jit(comm.Allreduce)
    assert float(f(1.0)) == SIZE
    comm.Disconnect()
    assert comm == MPI.COMM_NULL
    with pytest.raises(jax.errors.JaxRuntimeError, match="was freed"):
        f(1.0).block_until_ready()


# With the rest of mpi4py


def test_messages_never_match_those_of_the_original():
    """The same partner and tag, on the communicator that was duplicated; each gets its own."""
    to, origin = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    theirs = np.empty(())
    receive = MPI.COMM_WORLD.Irecv(theirs, MPI.ANY_SOURCE, MPI.ANY_TAG)
    ours = WORLD.Sendrecv(RANK + 0.5, to, 3, source=origin)
    again = jax.jit(lambda x: WORLD.Sendrecv(x, to, 3, source=origin))(RANK + 0.25)
    assert (float(ours), float(again)) == (origin + 0.5, origin + 0.25)
    assert not receive.Test()
    harness.CONTROL.Barrier()
    MPI.COMM_WORLD.Send(np.float64(RANK), to, 3)
    receive.Wait()
    assert theirs == origin


def test_object_methods():
    assert WORLD.allgather({"rank": RANK}) == [{"rank": r} for r in range(SIZE)]
    assert WORLD.allreduce(RANK + 1) == SIZE * (SIZE + 1) // 2
    assert WORLD.bcast([RANK], root=SIZE - 1) == [SIZE - 1]
    assert WORLD.scatter([f"to {r}" for r in range(SIZE)] if RANK == 0 else None) == f"to {RANK}"
    assert WORLD.sendrecv(RANK, (RANK + 1) % SIZE, source=(RANK - 1) % SIZE) == (RANK - 1) % SIZE
    request = WORLD.isend("x" * RANK, (RANK + 1) % SIZE, 4)
    assert WORLD.recv(source=(RANK - 1) % SIZE, tag=4) == "x" * ((RANK - 1) % SIZE)
    request.wait()
    WORLD.barrier()


def test_buffer_methods_of_mpi4py():
    """What has no JAX counterpart yet is mpi4py's, on NumPy buffers."""
    counts = [r + 1 for r in range(SIZE)]
    gathered = np.empty(sum(counts))
    WORLD.Allgatherv(np.full(RANK + 1, float(RANK)), [gathered, counts])
    np.testing.assert_array_equal(gathered, np.repeat(np.arange(SIZE), counts))
    cart = WORLD.Create_cart([SIZE], [True])
    received = np.empty(2)
    cart.Neighbor_allgather(np.float64(RANK), received)
    np.testing.assert_array_equal(received, [(RANK - 1) % SIZE, (RANK + 1) % SIZE])
    assert cart.Shift(0, 1) == ((RANK - 1) % SIZE, (RANK + 1) % SIZE)
    assert cart.coords == [RANK]


def test_one_sided_windows_accept_it():
    memory = np.zeros(1)
    window = MPI.Win.Create(memory, comm=WORLD)
    window.Fence()
    window.Put(np.float64(RANK), (RANK + 1) % SIZE)
    window.Fence()
    assert memory[0] == (RANK - 1) % SIZE
    window.Free()


def test_the_package_exports_what_it_says():
    for name in jaxcomm.__all__:
        assert hasattr(jaxcomm, name)
    assert jaxcomm.__version__.count(".") == 2


def test_attributes_are_copied_once():
    """The communicators beside each of ours, which nobody sees, have none."""
    calls = []
    key = MPI.Comm.Create_keyval(
        copy_fn=lambda comm, key, value: calls.append(f"copy {value}") or value + 1,
        delete_fn=lambda comm, key, value: calls.append(f"delete {value}"),
    )
    with JaxComm(WORLD) as comm:
        comm.Set_attr(key, 5)
        again = comm.Dup()
        assert again.Get_attr(key) == 6
        again.Free()
        comm.Delete_attr(key)
    assert calls == ["copy 5", "delete 6", "delete 5"]
    MPI.Comm.Free_keyval(key)
