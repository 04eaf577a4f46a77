"""What the program says wrongly: found before any rank enters MPI, in words that help; and communicators that are gone."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, METHODS, OPS, RAGGED_METHODS, kind, topology
from mpi4py import MPI

from jaxcomm import JaxComm, create_token

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
TAG_UB = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
X = jnp.asarray(np.random.default_rng(RANK).normal(size=3))
LED = jnp.asarray(np.random.default_rng(RANK).normal(size=(SIZE, 3)))
RANKS = f"from 0 to {SIZE - 1}"
TAGS = f"between 0 and {TAG_UB} "


def raises(exception, pattern, call, *operands):
    """Eagerly and while tracing, on this rank alone: whoever enters MPI waits for ever."""
    with pytest.raises(exception, match=pattern):
        call(*operands)
    with pytest.raises(exception, match=pattern):
        jax.make_jaxpr(call)(*operands)


PEERS = {
    "Send: dest": (lambda rank: WORLD.Send(X, rank), "or MPI.PROC_NULL"),
    "Ssend: dest": (lambda rank: WORLD.Ssend(X, rank), "or MPI.PROC_NULL"),
    "Recv: source": (lambda rank: WORLD.Recv(X, rank), "MPI.ANY_SOURCE or MPI.PROC_NULL"),
    "Sendrecv: dest": (lambda rank: WORLD.Sendrecv(X, rank), "or MPI.PROC_NULL"),
    "Sendrecv: source": (lambda rank: WORLD.Sendrecv(X, 0, source=rank), "MPI.ANY_SOURCE or MPI.PROC_NULL"),
    "Sendrecv_replace: dest": (lambda rank: WORLD.Sendrecv_replace(X, rank), "or MPI.PROC_NULL"),
    "Sendrecv_replace: source": (
        lambda rank: WORLD.Sendrecv_replace(X, 0, source=rank),
        "MPI.ANY_SOURCE or MPI.PROC_NULL",
    ),
    "Bcast: root": (lambda rank: WORLD.Bcast(X, rank), ""),
    "Gather: root": (lambda rank: WORLD.Gather(X, root=rank), ""),
    "Scatter: root": (lambda rank: WORLD.Scatter(LED, root=rank), ""),
    "Reduce: root": (lambda rank: WORLD.Reduce(X, root=rank), ""),
}


@pytest.mark.parametrize("argument", PEERS)
def test_ranks(argument):
    call, also = PEERS[argument]
    for rank in (SIZE, -77, 2**32, 2**32 + RANK, -(2**31), np.int64(SIZE)):
        raises(ValueError, rf"{argument} must be a rank {RANKS}.*{also}, got {rank}\b", lambda rank=rank: call(rank))
    for wrong in (1.0, "0", None, [0]):
        raises(TypeError, f"{argument} must be a Python int, got ", lambda wrong=wrong: call(wrong))
    if "source" not in argument:
        raises(ValueError, rf"{argument} must be a rank .* got {MPI.ANY_SOURCE}\b", lambda: call(MPI.ANY_SOURCE))


TAGGED = {
    "Send: tag": lambda tag: WORLD.Send(X, 0, tag),
    "Ssend: tag": lambda tag: WORLD.Ssend(X, 0, tag),
    "Recv: tag": lambda tag: WORLD.Recv(X, 0, tag),
    "Sendrecv: sendtag": lambda tag: WORLD.Sendrecv(X, 0, tag),
    "Sendrecv: recvtag": lambda tag: WORLD.Sendrecv(X, 0, recvtag=tag),
    "Sendrecv_replace: sendtag": lambda tag: WORLD.Sendrecv_replace(X, 0, tag),
    "Sendrecv_replace: recvtag": lambda tag: WORLD.Sendrecv_replace(X, 0, recvtag=tag),
}


@pytest.mark.parametrize("argument", TAGGED)
def test_tags(argument):
    call = TAGGED[argument]
    for tag in (-7, TAG_UB + 1, 2**32 + 3, np.int64(2**40)):
        raises(ValueError, rf"{argument} must lie {TAGS}.*TAG_UB.*, got {tag}\b", lambda tag=tag: call(tag))
    raises(TypeError, f"{argument} must be a Python int, got 0.5", lambda: call(0.5))
    if "Recv: " not in argument and "recvtag" not in argument:
        raises(ValueError, rf"{argument} must lie .* got {MPI.ANY_TAG}\b", lambda: call(MPI.ANY_TAG))


def test_traced_ranks_and_tags_are_integer_scalars():
    for what, call in (PEERS | {name: (call, "") for name, call in TAGGED.items()}).items():
        if "root" not in what:
            for wrong in (jnp.float32(0), jnp.zeros(1, int)):
                with pytest.raises(TypeError, match=rf"{what} must be an integer scalar, got {wrong.dtype}\["):
                    jax.make_jaxpr(call[0] if isinstance(call, tuple) else call)(wrong)


@pytest.mark.parametrize("argument", [name for name in PEERS if "root" in name])
def test_a_traced_root(argument):
    """CASES 20."""
    with pytest.raises(TypeError, match=f"{argument} must be a Python int, got a tracer; mark it static"):
        jax.jit(PEERS[argument][0])(0)


# Operands and templates

ON_OPERAND = {
    "Send": lambda x: WORLD.Send(x, RANK),
    "Ssend": lambda x: WORLD.Ssend(x, RANK),
    "Recv": lambda x: WORLD.Recv(x, RANK),
    "Sendrecv": lambda x: WORLD.Sendrecv(x, RANK, 0, X, RANK),
    "Sendrecv_replace": lambda x: WORLD.Sendrecv_replace(x, RANK, 0, RANK),
} | {
    name: lambda x, name=name: getattr(topology(WORLD, "torus") if "Neighbor" in name else WORLD, name)(x)
    for name in METHODS
    if name not in ("Barrier", "Send", "Ssend", "Recv", "Sendrecv", "Sendrecv_replace")
}


@pytest.mark.parametrize("method", ON_OPERAND)
def test_operands(method):
    call = ON_OPERAND[method]
    raises(TypeError, rf"{method}: \w+.* must be an array.* scalar.*, got None", lambda: call(None))
    raises(TypeError, rf"{method}: \w+.* must be an array or a scalar, got object", lambda: call(object()))
    if method not in RAGGED_METHODS:  # which take message specs
        raises(
            TypeError, rf"{method}: \w+.* must be an array, got a list: pass the array", lambda: call([X, MPI.DOUBLE])
        )
    strings = np.full((SIZE, 1), "a")
    with pytest.raises(TypeError, match=rf"{method}: \w+.*dtype <U1 is not supported; supported are bool, int8"):
        jax.make_jaxpr(lambda: call(strings))()  # eager calls on NumPy arrays may be mpi4py's


def test_a_template_is_no_data():
    """Where a rank sends, a ShapeDtypeStruct has nothing to send."""
    for method, call in ON_OPERAND.items():
        like = jax.ShapeDtypeStruct((SIZE, 2), "float32")
        if method != "Recv" and (RANK == 0 or method not in ("Bcast", "Scatter", "Scatterv")):
            raises(TypeError, rf"{method}: \w+ .*got ShapeDtypeStruct", lambda call=call, like=like: call(like))


def test_leading_axes():
    """CASES 19: on the ranks that are wrong."""
    calls = {"Alltoall": WORLD.Alltoall, "Reduce_scatter_block": WORLD.Reduce_scatter_block}
    if RANK == SIZE - 1:
        calls["Scatter"] = lambda x: WORLD.Scatter(x, root=SIZE - 1)
    for method, call in calls.items():
        for shape in ((SIZE + 2, 2), (0,), ()):
            pattern = rf"{method}: .*leading axis.* must be the communicator's size {SIZE}, got shape {tuple(shape)}"
            pattern = pattern.replace("(", r"\(").replace(")", r"\)")
            raises(ValueError, pattern, call, np.zeros(shape))


TEMPLATED = {
    "Allreduce": (lambda buf: WORLD.Allreduce(X, buf), (3,)),
    "Reduce": (lambda buf: WORLD.Reduce(X, buf, root=RANK), (3,)),
    "Scan": (lambda buf: WORLD.Scan(X, buf), (3,)),
    "Exscan": (lambda buf: WORLD.Exscan(X, buf), (3,)),
    "Reduce_scatter_block": (lambda buf: WORLD.Reduce_scatter_block(LED, buf), (3,)),
    "Allgather": (lambda buf: WORLD.Allgather(X, buf), (SIZE, 3)),
    "Gather": (lambda buf: WORLD.Gather(X, buf, root=RANK), (SIZE, 3)),
    "Scatter": (lambda buf: WORLD.Scatter(LED, buf, root=RANK), (3,)),
    "Alltoall": (lambda buf: WORLD.Alltoall(LED, buf), (SIZE, 3)),
}


@pytest.mark.parametrize("method", TEMPLATED)
def test_receive_buffers(method):
    call, shape = TEMPLATED[method]
    text = rf"{method}: recvbuf is a template of the result, float64\[{', '.join(map(str, shape))}\], got "
    for wrong in ((*shape, 1), (shape[0] + 1, *shape[1:]), ()):
        found = ", ".join(map(str, wrong))
        raises(ValueError, rf"{text}float64\[{found}\]", lambda wrong=wrong: call(np.zeros(wrong)))
    raises(ValueError, f"{text}int64", lambda: call(np.zeros(shape, np.int64)))
    raises(TypeError, f"{method}: recvbuf must be an array or a scalar, got str", lambda: call("x"))


def test_sendrecv_takes_one_dtype():
    pattern = "Sendrecv: recvbuf must have sendbuf's dtype float64, got int64"
    raises(ValueError, pattern, lambda: WORLD.Sendrecv(X, 0, 0, np.zeros(3, np.int64)))


# Reductions

REDUCTIONS = {
    "Allreduce": lambda x, op: WORLD.Allreduce(x, op=op),
    "Reduce": lambda x, op: WORLD.Reduce(x, op=op),
    "Scan": lambda x, op: WORLD.Scan(x, op=op),
    "Exscan": lambda x, op: WORLD.Exscan(x, op=op),
    "Reduce_scatter_block": lambda x, op: WORLD.Reduce_scatter_block(x, op=op),
}


@pytest.mark.parametrize("method", REDUCTIONS)
def test_ops(method):
    for dtype in map(np.dtype, DTYPES):
        for name, (_, kinds) in OPS.items():
            if kind(dtype) not in kinds:
                defined = ", ".join(other for other, (_, kinds) in OPS.items() if kind(dtype) in kinds)
                pattern = f"{method}: op={name} is not defined for dtype {dtype}; defined are {defined}. Convert"
                with pytest.raises(TypeError, match=pattern):
                    REDUCTIONS[method](np.zeros((SIZE, 1), dtype), getattr(MPI, name))
    for wrong in (None, "SUM", np.add):
        raises(
            TypeError,
            f"{method}: op must be an MPI.Op such as MPI.SUM, got ",
            lambda wrong=wrong: REDUCTIONS[method](LED, wrong),
        )
    raises(TypeError, f"{method}: op must be one of MPI.SUM", lambda: REDUCTIONS[method](LED, MPI.REPLACE))
    raises(TypeError, f"{method}: op=MAXLOC takes a pair", lambda: REDUCTIONS[method](LED, MPI.MAXLOC))


def test_tokens_and_statuses():
    for wrong in (0, jnp.zeros(0), create_token):
        for name, call in {
            "Send": lambda token: WORLD.Send(X, MPI.PROC_NULL, token=token),
            "Recv": lambda token: WORLD.Recv(X, MPI.PROC_NULL, token=token),
            "Sendrecv_replace": lambda token: WORLD.Sendrecv_replace(X, 0, token=token),
            "Bcast": lambda token: WORLD.Bcast(X, token=token),
            "Barrier": lambda token: WORLD.Barrier(token=token),
        }.items():
            pattern = f"(?i){name}: token must be a jaxcomm.Token .*create_token.*, got"
            raises(TypeError, pattern, lambda call=call, wrong=wrong: call(wrong))
    raises(TypeError, "Recv: status must be an MPI.Status or None, got 3", lambda: WORLD.Recv(X, 0, 0, 3))
    raises(TypeError, "Sendrecv: status must be", lambda: WORLD.Sendrecv(X, 0, status=[]))


# Communicators that are gone

SENDERS = {
    "Send": lambda comm, x: comm.Send(x, 0),
    "Ssend": lambda comm, x: comm.Ssend(x, 0),
    "Recv": lambda comm, x: comm.Recv(x),
    "Sendrecv": lambda comm, x: comm.Sendrecv(x, 0),
    "Sendrecv_replace": lambda comm, x: comm.Sendrecv_replace(x, 0),
    "Barrier": lambda comm, x: comm.Barrier(),
}


def not_saying(text, comm):
    """The methods that fail on comm as they should, but in other words."""
    methods = SENDERS | {
        name: lambda comm, x, name=name: getattr(comm, name)(x)
        for name in METHODS
        if name not in SENDERS and hasattr(comm, name)
    }
    found = []
    for name, call in methods.items():
        with pytest.raises((RuntimeError, ValueError, MPI.Exception)) as error:
            call(comm, np.zeros((SIZE, 1)))
        if text not in str(error.value):
            found.append(name)
    return found


def test_a_freed_communicator():
    """CASES 29: compiled functions and new calls say so, and nobody else's communicator takes its place."""
    comm = JaxComm(WORLD)
    comm.Set_name("gone")
    compiled = jax.jit(lambda x: (comm.Allreduce(x), comm.Sendrecv(x, RIGHT, source=LEFT)))
    total = compiled(LED)[0]
    comm.Free()
    comm.Free()
    fresh = [WORLD.Dup() for _ in range(3)]  # MPI may give the freed handle away again
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"on gone, rank {RANK} of {SIZE}, .*gone was freed"):
            jax.block_until_ready(compiled(LED))
    assert "freed" in repr(comm)
    assert "gone" in repr(comm)
    for other in fresh:
        np.testing.assert_array_equal(other.Allreduce(LED), total)
        other.Free()
    assert not_saying("was freed", comm) == []


def test_a_null_communicator():
    null = JaxComm(MPI.COMM_NULL)
    assert null == MPI.COMM_NULL
    assert "null" in repr(null)
    assert not_saying("null communicator", null) == []


def test_host_methods_refuse_traced_values():
    for name, call in {
        "allreduce": lambda x: WORLD.allreduce(x),
        "bcast": lambda x: WORLD.bcast({"a": x}),
        "Psend_init": lambda x: WORLD.Psend_init(x, 1, 0),
        "Split": lambda x: WORLD.Split(x[0]),
        "Create_keyval": lambda x: JaxComm.Create_keyval(x),
    }.items():
        with pytest.raises(TypeError, match=f"{name} works on the host and cannot take a traced value"):
            jax.jit(call)(X)
    with pytest.raises(TypeError, match=r"Psend_init is mpi4py's own and takes NumPy arrays: pass np.asarray"):
        WORLD.Psend_init(jnp.zeros(1), 1, 0)
