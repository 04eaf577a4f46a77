"""CASES 25: more elements than an int counts. With the limit lowered, so that every operation meets it; and for real.

With the limit lowered, the large-count functions of MPI 4 are passed by: libraries that have them are tested like those that
do not.
"""

import gc
import os

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DTYPES, left, right
from harness import InTwoHalves
from mpi4py import MPI

from jaxcomm._native import bridge

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
two_ranks = pytest.mark.skipif(SIZE < 2, reason="two ranks exchange messages")
# Those of one number of elements, which are cut in the same way, do for one reduction.
WHICH = [case for case in CASES if case.op in (None, "SUM", "MAX")]


@pytest.fixture(params=[7, 2], ids=lambda limit: f"at most {limit}")
def limit(request):
    """On every rank, as the number of elements decides by which functions ranks meet."""
    WORLD.barrier()
    bridge.set_small_counts(request.param)
    yield request.param
    WORLD.barrier()
    bridge.set_small_counts(0)


def test_the_limit_is_lowered(limit):
    assert not bridge.large_counts()


def operands(which, base, dtype=None):
    xs = [
        case.operands(WORLD, base, dtype or ("float64" if case.defined_for("float64") else "int64")) for case in which
    ]
    return xs, [jnp.asarray(x[RANK]) for x in xs]


def check(comm, which, base, dtype=None, wrap=lambda f: f):
    xs, mine = operands(which, base, dtype)
    ys = wrap(lambda operands: [case.call(comm, x) for case, x in zip(which, operands, strict=True)])(mine)
    for case, y, x in zip(which, ys, xs, strict=True):
        case.check(y, x, RANK)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jitted", "eager"])
@pytest.mark.parametrize("base", [(3,), (5, 3)], ids=str)
def test_every_operation(limit, base, wrap):
    check(WORLD, WHICH, base, wrap=wrap)


def test_nonblocking(limit):
    which = [case for case in WHICH if case.method != "Barrier"]
    for base in [(3,), (5, 3)]:
        check(InTwoHalves(WORLD), which, base)


def test_nonblocking_in_jit(limit):
    which = [case for case in WHICH if case.method in ("Allreduce", "Reduce_scatter_block", "Alltoallv", "Sendrecv")]
    check(InTwoHalves(WORLD), which, (5, 3), wrap=jax.jit)


@pytest.mark.parametrize("kind", ["dup", "parity", "reversed", "self"])
def test_communicators(limit, kind):
    comm = harness.communicator(kind)
    xs = [case.operands(comm, (5, 3), "float64" if case.defined_for("float64") else "int64") for case in WHICH]
    for case, x in zip(WHICH, xs, strict=True):
        case.check(case.call(comm, jnp.asarray(x[comm.rank])), x, comm.rank)


@pytest.mark.parametrize(
    "dtype", [name for name in DTYPES if name in ("bool", "complex128", "bfloat16", "int4", "int8")]
)
def test_dtypes(limit, dtype):
    which = [
        case for case in WHICH if case.defined_for(dtype) and case.name not in ("Sendrecv-ragged", "Sendrecv-short")
    ]
    check(WORLD, which, (5, 3), dtype)


def test_lists_of_arrays(limit):
    x = [jnp.full(3 + i + RANK, RANK * 10.0 + i) for i in range(SIZE)]
    like = [jax.ShapeDtypeStruct((3 + i + RANK,), x[0].dtype) for i in range(SIZE)]
    for source, y in enumerate(WORLD.Alltoallw(x, like)):
        np.testing.assert_array_equal(y, np.full(3 + RANK + source, source * 10.0 + RANK))


@two_ranks
def test_messages_shorter_than_their_templates(limit):
    """The count of what came is that of elements, also where they came as one datatype."""
    x = jnp.arange(30.0) + RANK
    y, status = WORLD.Sendrecv(x[:20], right(WORLD), 0, -x, left(WORLD), return_status=True)
    assert int(status.count) == 20
    np.testing.assert_array_equal(y, np.concatenate([np.arange(20.0) + left(WORLD), -np.asarray(x)[20:]]))


@two_ranks
def test_probed_messages(limit):
    x = jnp.arange(30.0) + RANK
    request = WORLD.Isend(x, right(WORLD), 4)
    y = jax.jit(lambda x: WORLD.Mprobe(left(WORLD), 4).Recv(x))(jnp.zeros(30))
    request.Wait()
    np.testing.assert_array_equal(y, np.arange(30.0) + left(WORLD))


def test_gradients(limit):
    x = jnp.arange(30.0) + RANK
    g = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(WORLD.Allgather(x)) * WORLD.Allreduce(x))))(x)
    total = SIZE * np.arange(30.0) + SIZE * (SIZE - 1) / 2
    everyone = sum(np.sin(np.arange(30.0) + r) for r in range(SIZE))
    np.testing.assert_allclose(g, SIZE * np.cos(x) * total + SIZE * everyone, rtol=1e-12)


# For real


def memory():
    """Bytes that a rank of this machine may take."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path):
            text = open(path).read().strip()  # noqa: SIM115
            free = min(free, int(text) if text.isdigit() else free)
    return harness.WORLD.allreduce(free, MPI.MIN) // SIZE


MANY = 2**31 + 5
REAL = {
    "message": lambda x: WORLD.Sendrecv(x, right(WORLD), source=left(WORLD)),
    "Bcast": lambda x: WORLD.Bcast(x, SIZE - 1),
    "Allreduce": lambda x: WORLD.Allreduce(x, op=MPI.MAX),
}
ANSWERS = {"message": left(WORLD), "Bcast": SIZE - 1, "Allreduce": SIZE - 1}


@two_ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("small", [False, True], ids=["as it comes", "without large counts"])
def test_for_real(name, small):
    needed = 16 * MANY // 5
    if memory() < needed:
        pytest.skip(f"a rank needs {needed / 2**30:.0f} GiB, of which there are {memory() / 2**30:.0f}")
    if os.environ.get("JAXCOMM_TEST_LARGE") != "1":
        pytest.skip("takes minutes: set JAXCOMM_TEST_LARGE=1")
    bridge.set_small_counts(2**31 - 1 if small else 0)
    try:
        x = jnp.full(MANY, RANK, np.int8)
        y = np.asarray(REAL[name](x))
        assert y.shape == (MANY,)
        assert (y.min(), y.max()) == (ANSWERS[name], ANSWERS[name])
    finally:
        bridge.set_small_counts(0)
        del x
        gc.collect()
