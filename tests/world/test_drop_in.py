"""A program written for mpi4py: calls on host buffers do what mpi4py's do, in place; all others return their result."""

import array
import gc
import inspect
import pickle
import weakref

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import METHODS, slow
from counting import messages
from mpi4py import MPI

import jaxcomm
from jaxcomm import JaxCartcomm, JaxComm, JaxDistgraphcomm, JaxGraphcomm, JaxIntercomm, create_token
from jaxcomm.buffers import buffers_of, theirs
from jaxcomm.communicator import _KINDS

WORLD = harness.communicator("world")
PLAIN = MPI.COMM_WORLD.Dup()
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE, SIZE - 1
COUNTS = [r + 1 for r in range(SIZE)]
PLACES = [10 * r + 1 for r in range(SIZE)]


def data(*shape, dtype=float):
    """Numbers that no two ranks share."""
    return np.random.default_rng(RANK).normal(size=shape).astype(dtype)


def blank(*shape, dtype=float):
    return np.full(shape, -7, dtype)


def read_only(x):
    x.flags.writeable = False
    return x


def on_root(value, otherwise=None):
    return value if RANK == LAST else otherwise


# Programs as mpi4py's users write them. Each returns (what the calls returned, the buffers).

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def exchange(comm, send, receive):
    request = MPI.Intracomm.Isend(comm, send, RIGHT, 3)
    returned = comm.Recv(receive, LEFT, 3)
    request.Wait()
    return returned


@program
def recv(comm):
    y = blank(4)
    return [exchange(comm, data(3), y)], [y]


@program
def send(comm):
    y = blank(3)
    request = MPI.Intracomm.Irecv(comm, y, LEFT, 3)
    returned = [comm.Send(data(3), dest=RIGHT, tag=3)]
    request.Wait()
    request = MPI.Intracomm.Irecv(comm, y[:1], LEFT, 4)
    returned += [comm.Ssend(data(1), RIGHT, 4)]
    request.Wait()
    return returned, [y]


@program
def specifications(comm):
    y = [blank(9) for _ in range(5)] + [blank(sum(COUNTS))]
    returned = [
        exchange(comm, [data(9), 2, MPI.DOUBLE], [y[0], MPI.DOUBLE]),
        exchange(comm, [data(9), (2, 3), MPI.DOUBLE], [y[1], (4, 5), MPI.DOUBLE]),
        exchange(comm, [data(9), 2, 3, "d"], [y[2], 4, 5, MPI.DOUBLE]),
        exchange(comm, (data(9), 8), (y[3], 8)),
        exchange(comm, [data(9), None, "d"], [y[4], "d"]),
        comm.Allgatherv(data(RANK + 1), [y[5], np.array(COUNTS)]),
    ]
    return returned, y


@program
def derived_datatypes(comm):
    """A column becomes a row."""
    column = MPI.DOUBLE.Create_vector(3, 1, 4).Commit()
    x, y = data(3, 4), blank(2, 3)
    returned = exchange(comm, [x, 1, column], [y, (3, 3), MPI.DOUBLE])
    column.Free()
    return [returned], [y]


@program
def absolute_addresses(comm):
    x, y = data(2), blank(4)

    def at(buf, count):
        return MPI.DOUBLE.Create_hindexed([count], [MPI.Get_address(buf)]).Commit()

    sent, received = at(x, 2), at(y[1:], 2)
    returned = [
        comm.Sendrecv([MPI.BOTTOM, 1, sent], RIGHT, 3, [MPI.BOTTOM, 1, received], LEFT, 3),
        comm.Bcast([MPI.BOTTOM, 1, received], 0),
    ]
    sent.Free()
    received.Free()
    return returned, [y]


@program
def other_memory(comm):
    x, y, z = bytes([RANK, 7]), bytearray(2), array.array("i", [0, 0])
    window = memoryview(bytearray(4))
    memory = MPI.Alloc_mem(8)
    returned = [
        comm.Sendrecv(x, RIGHT, 3, y, LEFT, 3),
        comm.Sendrecv(array.array("i", [RANK, 9]), RIGHT, 3, z, LEFT, 3),
        comm.Sendrecv(y, RIGHT, 3, window[1:3], LEFT, 3),
        comm.Bcast([memory, 8, MPI.BYTE] if RANK else [data(1), MPI.DOUBLE]),
    ]
    filled = bytes(memory) if RANK else b""
    MPI.Free_mem(memory)
    return returned, [y, z, window, filled]


@program
def sendrecv(comm):
    y, z = blank(3), data(2, 2)
    return [
        comm.Sendrecv(data(3), dest=RIGHT, recvbuf=y, source=LEFT),
        comm.Sendrecv_replace(z, RIGHT, 4, LEFT, 4),
    ], [y, z]


@program
def where_nobody_is(comm):
    y, z, status = blank(3), data(3), MPI.Status()
    null = MPI.PROC_NULL
    returned = [
        comm.Send(data(3), null),
        comm.Recv(y, null, status=status),
        comm.Sendrecv(data(3), null, recvbuf=y, source=null),
        comm.Sendrecv_replace(z, null, source=null),
    ]
    return [*returned, status.source], [y, z]


@program
def statuses(comm):
    y, status = blank(5), MPI.Status()
    returned = comm.Sendrecv(data(3), RIGHT, RANK, y, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
    return [returned, status.source, status.tag, status.Get_count(MPI.DOUBLE)], [y]


@program
def bcast(comm):
    x, y, z = data(3), on_root(read_only(data(2)), blank(2)), data(2, dtype="f4")
    return [comm.Bcast(x), comm.Bcast(y, root=LAST), comm.Bcast([z, MPI.FLOAT], LAST)], [x, y, z]


@program
def gather(comm):
    x, y, v = blank(SIZE, 2), data(SIZE, 2), blank(sum(PLACES))
    return [
        comm.Gather(data(2), on_root(x), root=LAST),
        comm.Gather(on_root(MPI.IN_PLACE, y[RANK].copy()), on_root(y), LAST),
        comm.Gatherv(data(RANK + 1), on_root([v, (COUNTS, PLACES), MPI.DOUBLE]), root=LAST),
    ], [x, y, v]


@program
def gather_what_is_not_significant(comm):
    """A buffer off the root is accepted and left alone."""
    x = blank(SIZE, 2)
    return [comm.Gather(data(2), x, LAST)], [x]


@program
def scatter(comm):
    x, y, z, v = blank(2), data(SIZE, 2), blank(2), blank(RANK + 1)
    return [
        comm.Scatter(on_root(data(SIZE, 2)), x, LAST),
        comm.Scatter(on_root(y), on_root(MPI.IN_PLACE, z), root=LAST),
        comm.Scatterv(on_root([data(sum(PLACES) + SIZE), COUNTS, PLACES, MPI.DOUBLE]), v, root=LAST),
    ], [x, y, z, v]


@program
def allgather(comm):
    x, y, v, w = blank(SIZE, 2), data(SIZE, 2), blank(sum(COUNTS)), data(sum(COUNTS))
    return [
        comm.Allgather(data(2), x),
        comm.Allgather(MPI.IN_PLACE, y),
        comm.Allgatherv(data(RANK + 1), [v, COUNTS]),
        comm.Allgatherv(MPI.IN_PLACE, [w, COUNTS]),
    ], [x, y, v, w]


@program
def alltoall(comm):
    x, y, v, w = blank(SIZE, 2), data(SIZE, 2), blank(SIZE * SIZE), blank(SIZE, dtype="i4")
    places = [4 * r for r in range(SIZE)]
    types = [MPI.INT] * SIZE
    return [
        comm.Alltoall(data(SIZE, 2), x),
        comm.Alltoall(MPI.IN_PLACE, y),
        comm.Alltoallv([data(sum(COUNTS)), COUNTS], [v, [RANK + 1] * SIZE]),
        comm.Alltoallw(
            [np.arange(SIZE, dtype="i4") * RANK, ([1] * SIZE, places), types], [w, ([1] * SIZE, places), types]
        ),
    ], [x, y, v, w]


@program
def reduce(comm):
    """CASES 18: the result is in the buffer on the root, and nowhere else."""
    x, y, z = blank(3), data(3), blank(3)
    return [
        comm.Reduce(data(3), on_root(x), op=MPI.SUM, root=LAST),
        comm.Reduce(on_root(MPI.IN_PLACE, y), on_root(y), MPI.MAX, LAST),
        comm.Reduce(data(3), z, MPI.MIN),
    ], [x, y, z]


@program
def allreduce(comm):
    x, y, z, total = blank(3), data(3), data(3), np.zeros(())
    return [
        comm.Allreduce(data(3), x, op=MPI.SUM),
        comm.Allreduce(MPI.IN_PLACE, y, MPI.MAX),
        comm.Allreduce(None, z, MPI.MIN),
        comm.Allreduce(np.float64(RANK), total),
    ], [x, y, z, total]


@program
def reduce_scatter(comm):
    x, y, z = blank(2), blank(RANK + 1), data(SIZE, 2)
    return [
        comm.Reduce_scatter_block(data(SIZE, 2), x, MPI.MAX),
        comm.Reduce_scatter(data(sum(COUNTS)), y, COUNTS, op=MPI.MIN),
        comm.Reduce_scatter_block(MPI.IN_PLACE, z, MPI.MAX),
    ], [x, y, z[0]]


@program
def scan(comm):
    x, y, z = blank(2), data(2), blank(2) if RANK else data(2)
    return [
        comm.Scan(data(2), x, MPI.PROD),
        comm.Scan(MPI.IN_PLACE, y),
        comm.Exscan(data(2), z),
    ], [x, y, z if RANK else []]


@program
def nonblocking(comm):
    y, z, total = blank(3), blank(3), blank(3)
    requests = [comm.Irecv(y, LEFT, 5), comm.Isend(data(3), RIGHT, 5), comm.Ibcast(z, LAST)]
    requests += [comm.Iallreduce(data(3), total, MPI.MAX)]
    kinds = [type(request) for request in requests]
    MPI.Request.Waitall(requests)
    return kinds, [y, z, total]


@program
def barriers(comm):
    """Until everybody has come; the requests are mpi4py's, whose Test is true or false."""
    request, again = comm.Ibarrier(), comm.Barrier_init()
    tested = [request.Test()]
    while not request.Test():
        tested.append(False)
    again.Start()
    again.Wait()
    again.Free()
    return [comm.Barrier(), type(request), type(again), set(map(type, tested))], [[1]]


@program
def persistent(comm):
    x, y, kept = data(3), blank(3), []
    requests = [comm.Recv_init(y, LEFT, 5), comm.Send_init(x, RIGHT, 5)]
    for _ in range(2):
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        kept.append(y.copy())
        x += 1
    kinds = [type(request) for request in requests]
    for request in requests:
        request.Free()
    return kinds, kept


@program
def neighbours(comm):
    cart = comm.Create_cart([SIZE], [True])
    x, y = blank(2), blank(2)
    returned = [cart.Neighbor_allgather(data(1), x), cart.Neighbor_alltoall(data(2), y), cart.Shift(0, 1)]
    cart.Free()
    return returned, [x, y]


@program
def with_64_bits_off(comm):
    with jax.enable_x64(False):
        y, total = blank(2), blank(2)
        returned = [comm.Sendrecv(data(2), RIGHT, 3, y, LEFT, 3), comm.Allreduce(data(2), total, MPI.MAX)]
        returned += [exchange(comm, data(2), y), comm.Bcast(total)]
    return returned, [y, total]


def outcome(comm, run):
    returned, buffers = run(comm)
    return returned, [np.array(b).tolist() for b in buffers]


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_mpi4py(name):
    """Twice, as calls of a kind that were made before may go another way."""
    expected = outcome(PLAIN, PROGRAMS[name])
    filled = any(np.any(np.array(buffer) != -7) for buffer in expected[1])
    assert harness.CONTROL.allreduce(filled, MPI.LOR)
    for _ in range(2):
        assert outcome(WORLD, PROGRAMS[name]) == expected


@pytest.mark.parametrize("make", ["Dup", "Split", "Create_cart", "Create_graph", "Create_dist_graph"])
def test_on_communicators_of_every_kind(make):
    comm = {
        "Dup": lambda: WORLD.Dup(),
        "Split": lambda: WORLD.Split(0, RANK),
        "Create_cart": lambda: WORLD.Create_cart([SIZE]),
        "Create_graph": lambda: WORLD.Create_graph(range(1, SIZE + 1), [(r + 1) % SIZE for r in range(SIZE)]),
        "Create_dist_graph": lambda: WORLD.Create_dist_graph([RANK], [1], [RIGHT]),
    }[make]()
    for name in ("recv", "reduce", "allreduce", "nonblocking"):
        assert outcome(comm, PROGRAMS[name]) == outcome(PLAIN, PROGRAMS[name])
    comm.Free()


def test_errors_are_mpi4pys():
    """What does not fit, and what is no buffer."""
    for comm in (PLAIN, WORLD):
        with pytest.raises((ValueError, BufferError)):
            comm.Send(data(4)[::2], RIGHT)
        with pytest.raises(ValueError, match="message"):
            comm.Allgather(data(2), [blank(2), 1, 2, 3, 4, 5])
        with pytest.raises(TypeError):
            comm.Allreduce(data(2), blank(2), "SUM")
        with pytest.raises(MPI.Exception):
            comm.Send(data(2), SIZE)


# What is not mpi4py's

X, LED = data(3), data(SIZE, 3)
RETURNING = {
    "no buffer": lambda out: (WORLD.Allreduce(X), out),
    "no buffer, by name": lambda out: (WORLD.Gather(sendbuf=X, root=0), out),
    "no buffer to receive into": lambda out: (WORLD.Sendrecv(X, RIGHT, source=LEFT), out),
    "none to receive into": lambda out: (WORLD.Sendrecv(X, RIGHT, 0, None, LEFT), out),
    "none where mpi4py takes none": lambda out: (WORLD.Allreduce(X, None, MPI.MAX), out),
    "an op in its place": lambda out: (WORLD.Allreduce(X, MPI.MAX), out),
    "a JAX array": lambda out: (WORLD.Allreduce(jnp.asarray(X), out), out),
    "a JAX array to receive into": lambda out: (WORLD.Allreduce(X, jnp.zeros(3)), out),
    "a JAX array is sent": lambda out: (WORLD.Bcast(jnp.asarray(X)), out),
    "a ShapeDtypeStruct": lambda out: (WORLD.Allreduce(X, jax.ShapeDtypeStruct((3,), X.dtype)), out),
    "a scalar": lambda out: (WORLD.Allreduce(float(RANK), out[0]), out),
    "a scalar to broadcast": lambda out: (WORLD.Bcast(np.float64(RANK)), out),
    "a list of NumPy scalars": lambda out: (WORLD.Allreduce([X[0], X[1]])[1], out),
    "a tree": lambda out: (WORLD.Bcast([X, X])[1], out),
    "a tree to receive into": lambda out: (WORLD.Recv((out, [out, out]), MPI.PROC_NULL)[1][0], out),
    "a dictionary": lambda out: (WORLD.Allreduce({"a": X}, {"a": out})["a"], out),
    "a token": lambda out: (WORLD.Allreduce(X, out, token=create_token())[0], out),
    "an argument of ours": lambda out: (WORLD.Allreduce(X, out, replicated=True), out),
    "a read-only template": lambda out: (WORLD.Allreduce(X, read_only(out)), out),
    "a read-only message": lambda out: (WORLD.Recv(read_only(out), MPI.PROC_NULL), out),
    "a traced operand": lambda out: (jax.jit(lambda x: WORLD.Allreduce(x, out))(X), out),
    "a constant of a trace": lambda out: (jax.jit(lambda: WORLD.Allreduce(X, out))(), out),
    "a constant that is sent": lambda out: (jax.jit(lambda: WORLD.Sendrecv(X, RIGHT, 0, out, LEFT))(), out),
    "under vmap": lambda out: (jax.vmap(lambda x: x + WORLD.Allreduce(X, out))(jnp.zeros(2)), out),
}


@pytest.mark.parametrize("name", RETURNING)
def test_results_are_returned(name):
    for _ in range(2):
        out = blank(3)
        y, out = RETURNING[name](out)
        assert isinstance(y, jax.Array)
        assert (out == -7).all()


def test_what_was_learnt_of_templates_is_not_done_with_buffers():
    """Calls on NumPy arrays take a short way when they were made before; a buffer that may be written to is another kind."""
    total = WORLD.allreduce(X)
    for i in range(6):
        out = blank(3)
        template = read_only(blank(3))
        np.testing.assert_allclose(WORLD.Allreduce(X, template), total, rtol=1e-13)
        if i % 2:
            assert WORLD.Allreduce(X, out) is None
            np.testing.assert_allclose(out, total, rtol=1e-13)
        message = WORLD.Sendrecv(X, RIGHT, 3, template, LEFT, 3)
        assert isinstance(message, jax.Array)
        assert WORLD.Sendrecv(X, RIGHT, 3, out, LEFT, 3) is None
        np.testing.assert_array_equal(out, message)


def test_both_worlds_meet():
    """What mpi4py sends, a JAX call receives, and the other way round."""
    y = blank(3)
    request = WORLD.Isend(X, RIGHT, 3)
    received = WORLD.Recv(jnp.zeros(3), LEFT, 3)
    request.Wait()
    request = WORLD.Irecv(y, LEFT, 4)
    jax.jit(lambda x: WORLD.Send(x, RIGHT, 4))(X)
    request.Wait()
    np.testing.assert_array_equal(received, y)
    assert not np.array_equal(y, X) or SIZE == 1
    if RANK == 0:
        WORLD.Bcast(X)
    else:
        np.testing.assert_array_equal(WORLD.Bcast(jnp.zeros(3)), np.random.default_rng(0).normal(size=3))


@pytest.mark.skipif(SIZE == 1, reason="a message to oneself may wait for its receive")
def test_order():
    """Calls on host buffers wait for programs under way, and these for them."""
    ways = [
        jax.jit(lambda x: WORLD.Send(slow(x), RIGHT, 1)),
        lambda x: WORLD.Send(np.asarray(x), RIGHT, 2),
        jaxcomm.jit(lambda x: WORLD.Send(slow(x), RIGHT, 3)),
        lambda x: WORLD.Send(x, RIGHT, 4),
    ]
    for i in range(12):
        ways[i % 4](jnp.float64(i))
    assert messages(WORLD) == [(i % 4 + 1, i) for i in range(12)]


def test_every_operation_drops_in():
    """Whatever the wrapper types define themselves, where mpi4py's method has buffers."""
    found = set()
    for base, ours in _KINDS:
        for name in dir(base):
            method = getattr(ours, name)
            if inspect.isfunction(method) and method.__module__.startswith("jaxcomm."):
                mpi4pys = theirs(name)
                if mpi4pys is not None and buffers_of(mpi4pys):
                    assert hasattr(method, "drops_in"), f"{ours.__name__}.{name}"
                    found.add(name)
    assert set(METHODS) - {"Barrier"} <= found


def test_signatures_tell_buffers():
    expected = {
        "Send": ("buf", None), "Issend": ("buf", None), "Send_init": ("buf", None), "Psend_init": ("buf", None),
        "Recv": (None, "buf"), "Irecv": (None, "buf"), "Precv_init": (None, "buf"), "Bcast": (None, "buf"),
        "Sendrecv_replace": (None, "buf"), "Sendrecv": ("sendbuf", "recvbuf"), "Gatherv": ("sendbuf", "recvbuf"),
        "Neighbor_alltoallw": ("sendbuf", "recvbuf"), "Ireduce": ("sendbuf", "recvbuf"), "Exscan": ("sendbuf", "recvbuf"),
    }  # fmt: skip
    for name, (sent, received) in expected.items():
        found = buffers_of(theirs(name))
        assert (found.sent, found.received) == (sent or "", received or "")
    assert buffers_of(theirs("Barrier")) is None
    assert buffers_of(theirs("Probe")) is None


# Buffers of requests


@pytest.mark.parametrize(
    "name", ["Iallgatherv", "Ireduce", "Iallreduce", "Ireduce_scatter", "Ireduce_scatter_block", "Iscan", "Iexscan"]
)
def test_buffers_live_as_long_as_their_request(name):
    """mpi4py 4.1 forgets these, and MPI would read and write memory that is somebody else's."""
    x = data(SIZE)
    y = blank(SIZE * SIZE)
    kept = [weakref.ref(x), weakref.ref(y)]
    recv = {"Iallgatherv": [y, SIZE], "Ireduce_scatter": y[:1], "Ireduce_scatter_block": y[:1]}.get(name, y[:SIZE])
    request = getattr(WORLD, name)(x, recv)
    assert type(request) is MPI.Request
    del x, y, recv
    gc.collect()
    assert all(ref() is not None for ref in kept)
    request.Wait()
    del request
    gc.collect()
    assert all(ref() is None for ref in kept)


# The rest of mpi4py's communicator


def test_lower_case_methods_take_any_object():
    """Also what is no pytree."""
    thing = {1: RANK, "a": [RANK], None: {"b"}}
    assert WORLD.bcast(thing, 0) == {1: 0, "a": [0], None: {"b"}}
    assert WORLD.allgather(thing)[RANK] == thing
    np.testing.assert_array_equal(WORLD.bcast(jnp.arange(3) + RANK, LAST), np.arange(3) + LAST)


def test_pickling_follows_mpi4pys_rules():
    for comm in (WORLD, MPI.COMM_WORLD.Dup()):
        with pytest.raises(ValueError, match="cannot serialize"):
            pickle.dumps(comm)
    assert pickle.loads(pickle.dumps(MPI.COMM_WORLD)) == MPI.COMM_WORLD


def test_handles():
    """An object for a handle is a wrapper, and the one that there is."""
    for comm in (WORLD, WORLD.Create_cart([SIZE]), WORLD.Dup()):
        assert type(comm).fromhandle(comm.handle) is comm
        assert type(comm).fromint(comm.toint()) is comm
        assert JaxComm.f2py(comm.py2f()) is comm
    view = JaxComm.fromhandle(MPI.COMM_SELF.handle)
    assert type(view) is JaxComm
    assert view == MPI.COMM_SELF
    assert float(view.Allreduce(jnp.float64(3))) == 3
    assert JaxComm.f2py(MPI.COMM_NULL.py2f()) == MPI.COMM_NULL
    gone = WORLD.Dup()
    handle = gone.handle
    gone.Free()
    assert gone not in [WORLD.Dup() for _ in range(2)]
    assert MPI.Comm.fromhandle(WORLD.handle) == WORLD
    assert isinstance(handle, int)


def test_kinds_of_handles():
    """The kind is the communicator's, whatever class is asked, as in mpi4py."""
    plain = {
        JaxCartcomm: PLAIN.Create_cart([SIZE]),
        JaxGraphcomm: PLAIN.Create_graph(range(1, SIZE + 1), [(r + 1) % SIZE for r in range(SIZE)]),
        JaxDistgraphcomm: PLAIN.Create_dist_graph([RANK], [1], [RIGHT]),
        JaxComm: PLAIN.Dup(),
    }
    for kind, comm in plain.items():
        view = JaxComm.fromhandle(comm.handle)
        assert type(view) is kind
        assert view == comm
        assert float(view.Allreduce(jnp.float64(1))) == SIZE
        if kind in (JaxCartcomm, JaxDistgraphcomm):  # a graph's edges must have both directions
            received = view.Neighbor_allgather(jnp.float64(RANK))
            np.testing.assert_array_equal(received, np.where(np.array(comm.inedges) >= 0, comm.inedges, 0))
        view.Free()


@pytest.mark.skipif(SIZE == 1, reason="two groups")
def test_intercommunicators():
    """The root of a broadcast is in the other group; a read-only buffer is sent there all the same."""
    side = int(RANK == LAST)
    inter = WORLD.Split(side, RANK).Create_intercomm(0, WORLD, 0 if side else LAST, 5)
    assert JaxComm.fromhandle(inter.handle) is inter
    y = blank(3)
    assert inter.Bcast(read_only(data(3)) if side else y, root=MPI.ROOT if side else 0) is None
    if not side:
        np.testing.assert_array_equal(y, np.random.default_rng(LAST).normal(size=3))
    total = blank(1)
    assert inter.Allreduce(np.ones(1), total) is None
    assert total == (LAST if side else 1)
    inter.Free()


def test_there_is_no_parent():
    assert JaxComm.Get_parent() == MPI.COMM_NULL
    assert JaxIntercomm.Get_parent() == MPI.COMM_NULL


def test_info_and_error_handlers():
    comm = WORLD.Dup()
    info = MPI.Info.Create({"mpi_assert_no_any_tag": "false"})
    comm.Set_info(info)
    assert isinstance(comm.Get_info(), MPI.Info)
    assert isinstance(comm.info, MPI.Info)
    seen = []
    handler = MPI.Comm.Create_errhandler(lambda comm, code: seen.append(MPI.Get_error_class(code)))
    comm.Set_errhandler(handler)
    comm.Call_errhandler(MPI.ERR_OTHER)
    assert seen == [MPI.ERR_OTHER]
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    assert comm.Get_errhandler() == MPI.ERRORS_RETURN
    handler.Free()
    comm.Free()


def test_communicators_of_groups():
    try:
        session = MPI.Session.Init()
    except NotImplementedError:
        pytest.skip("no sessions in this MPI")
    group = session.Create_group("mpi://WORLD")
    comm = JaxComm.Create_from_group(group, "org.jaxcomm.test")
    assert type(comm) is JaxComm
    assert float(comm.Allreduce(jnp.float64(RANK))) == sum(range(SIZE))
    comm.Free()
    group.Free()
    session.Finalize()


def test_none_where_there_is_nobody():
    """A ported program's shift that is not periodic: the ends send and receive nothing, all others float64."""
    here, left, right = blank(*X.shape), RANK - 1, RANK + 1
    null = MPI.PROC_NULL
    to, from_ = (right if right < SIZE else null), (left if left >= 0 else null)
    with jax.enable_x64(False):
        for shift in (WORLD.Sendrecv, lambda *args: WORLD.Isendrecv(*args).Wait()):
            here[:] = -7
            shift(None if to == null else X, to, 0, None if from_ == null else here, from_, 0)
            np.testing.assert_array_equal(
                here, -7 if from_ == null else np.random.default_rng(left).normal(size=X.shape)
            )
    for name in ("Send", "Ssend", "Bsend", "Rsend", "Recv"):
        assert getattr(WORLD, name)(None, null) is None
    for name in ("Isend", "Issend", "Irecv"):
        assert isinstance(getattr(WORLD, name)(None, null), MPI.Request)
    assert WORLD.Sendrecv(None, null, 0, None, null) is None
    with pytest.raises(TypeError, match="Recv: buf must be"):
        WORLD.Recv(None, RANK)
