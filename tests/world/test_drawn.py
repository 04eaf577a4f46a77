"""Cases, dtypes, shapes and trees as hypothesis draws them, the same on every rank."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
from cases import CASES, DTYPES, kind, left, random, right
from harness import InTwoHalves
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
IN_TWO_HALVES = InTwoHalves(WORLD)
dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
ways = st.sampled_from([(WORLD, lambda f: f), (WORLD, jax.jit), (IN_TWO_HALVES, lambda f: f), (IN_TWO_HALVES, jax.jit)])
few = settings(max_examples=20)
# Two halves of a message to oneself, and of a Sendrecv whose two ends differ, are other tests' matter.
HERE = [case for case in CASES if case.name not in ("Sendrecv-ragged", "Sendrecv-short", "Barrier")]


def agreed(check, *args):
    """Fail on all ranks if one does, so that they go on drawing the same."""
    try:
        check(*args)
        text = ""
    except AssertionError as error:
        text = str(error) or "other values"
    harness.agree(not text, text)


@few
@given(st.sampled_from(HERE), dtypes, shapes, ways, st.integers(0, 2**16))
def test_cases(case, dtype, base, way, seed):
    assume(case.defined_for(dtype))
    comm, jit = way
    xs = case.operands(WORLD, base, dtype=dtype, seed=seed)
    agreed(case.check, jit(lambda x: case.call(comm, x))(jnp.asarray(xs[RANK])), xs, RANK)


leaves = st.tuples(dtypes | st.just("key"), shapes)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3).map(list) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=6,
).map(lambda tree: {"all": tree})


def is_leaf(x):
    return isinstance(x, tuple)


def grown(tree, rank, seed):
    """A rank's arrays for what was drawn."""
    rng = np.random.default_rng([seed, rank])

    def leaf(drawn):
        dtype, shape = drawn
        if dtype == "key":
            return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, (*shape, 2), np.uint32)))
        return jnp.asarray(random(rng, shape, np.dtype(dtype), "PROD"))

    return jax.tree.map(leaf, tree, is_leaf=is_leaf)


def check(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for y, x in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        # By NumPy, which compiles nothing.
        y, x = (jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in (y, x))
        y, x = np.asarray(y), np.asarray(x)
        assert np.all((y == x) | ((y != y) & (x != x)))


def stacked(*arrays):
    """By NumPy: XLA's concatenation of integers of two bits ends the process."""
    keys = jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key)
    return jnp.stack(arrays) if keys else np.stack([np.asarray(x) for x in arrays])


def maximum(a, b):
    return jax.tree.map(jnp.maximum, a, b)


@few
@given(trees, ways, st.integers(0, 2**16))
def test_trees(tree, way, seed):
    comm, jit = way
    everyones = [grown(tree, rank, seed) for rank in range(SIZE)]
    mine = everyones[RANK]
    agreed(check, jit(lambda x: comm.Bcast(x, SIZE - 1))(mine), everyones[-1])
    agreed(check, jit(comm.Allgather)(mine), jax.tree.map(stacked, *everyones))
    if SIZE > 1:
        agreed(
            check, jit(lambda x: comm.Sendrecv(x, right(WORLD), 3, source=left(WORLD)))(mine), everyones[left(WORLD)]
        )


@few
@given(trees, ways, st.integers(0, 2**16))
def test_reductions_of_trees(tree, way, seed):
    comm, jit = way
    ordered = [jax.tree.leaves(grown(tree, rank, seed)) for rank in range(SIZE)]
    drawn = jax.tree.leaves(tree, is_leaf=is_leaf)
    kept = [i for i, (dtype, _) in enumerate(drawn) if dtype != "key" and kind(dtype) in "iuf"]
    each = [[x[i] for i in kept] for x in ordered]
    expected = [functools.reduce(np.maximum, map(np.asarray, x)).astype(x[0].dtype) for x in zip(*each, strict=True)]
    agreed(check, jit(lambda x: comm.Allreduce(x, op=MPI.MAX))({"all": each[RANK]}), {"all": expected})
    agreed(check, jit(lambda x: WORLD.Allreduce(x, op=maximum))({"all": each[RANK]}), {"all": expected})
