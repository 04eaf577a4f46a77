"""The native layer's own entry points, called as no program of ours calls them: an error each, and no crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm  # noqa: F401  registers the targets
from jaxcomm._native import bridge

TARGETS = sorted(bridge.capsules())
X = np.ones(2, np.float32)
TOO_MANY = 17


def call(target, *operands, **attributes):
    result = jax.ShapeDtypeStruct(X.shape, X.dtype)
    program = jax.ffi.ffi_call(f"jaxcomm_{target}", result, has_side_effect=True)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(jax.jit(lambda *xs: program(*xs, **attributes))(*operands))
    return str(error.value)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target(target):
    """A communicator that is not there, an attribute that nobody knows, one of another type, too many arrays."""
    tree = {"leaves": np.int64(1), "kinds": np.zeros(1, np.int64)} if target.startswith("tree_") else {}
    for comm in (10**6, -1, -(2**62)):
        assert "an object that this process never made" in call(target, X, X, comm=np.int64(comm), **tree)
    assert "unknown attribute nonsense" in call(target, X, nonsense=np.int64(1))
    for wrong in (np.int32(0), np.float64(0), "0", True, np.zeros(2, np.int64)):
        assert "unknown attribute comm" in call(target, X, comm=wrong)
    assert "unknown attribute counts" in call(target, X, counts=np.int64(1))
    if tree:
        for leaves, kinds in ((-1, [0]), (TOO_MANY, [0] * TOO_MANY), (1, []), (1, [5]), (1, [-1]), (0, [])):
            wrong = {"leaves": np.int64(leaves), "kinds": np.array(kinds, np.int64)}
            text = call(target, *[X] * (TOO_MANY if leaves == 0 else 2), comm=np.int64(0), **wrong)
            assert f"a tree of {leaves} leaves does not fit" in text
    else:
        assert "too many operands or results" in call(target, *[X] * TOO_MANY, comm=np.int64(0))


def test_plans():
    """Of more arrays than there can be, of operations that are not there; arrays that are missing."""
    known = bridge.operation_index("allreduce")
    array = (2, 11)
    for operands, results in (([array] * TOO_MANY, []), ([], [array] * TOO_MANY)):
        with pytest.raises(ValueError, match="at most 16 operands and 16 results"):
            bridge.Plan(known, operands, results, {"comm": 0})
    for kind in (bridge.Plan, bridge.TreePlan):
        for operation in (-1, 10**6):
            with pytest.raises(bridge.NativeError, match="no operation has the number"):
                kind(operation, [], [], {}).run([], [], 0)
        with pytest.raises(IndexError):
            kind(known, [array], [array], {"comm": 0}).run([], [], 0)
        with pytest.raises(bridge.NativeError, match="an object that this process never made"):
            kind(known, [array], [array], {"comm": 10**6, "leaves": 1, "kinds": (0,)}).run([X], [np.empty_like(X)], 0)
        with pytest.raises((TypeError, OverflowError)):
            kind(known, [array], [array], {"comm": 2**70})
    with pytest.raises(KeyError):
        bridge.operation_index("nonsense")


def test_tables():
    for row in (-1, 10**6):
        with pytest.raises(RuntimeError, match="an object that this process never made"):
            bridge.free_communicator(row)
        with pytest.raises(RuntimeError, match="an object that this process never made"):
            bridge.rename_communicator(row, "name")
        with pytest.raises(RuntimeError, match="an object that this process never made"):
            bridge.set_graphs(row, 0, 0, [], [])
        with pytest.raises(RuntimeError, match="an object that this process never made"):
            bridge.set_raised(row, "text")
    for code in (-1, 64, 10**6):
        with pytest.raises(ValueError, match="no element type of XLA's has the number"):
            bridge.add_datatype(code, 0, 1, 1, "nonsense")
    with pytest.raises(RuntimeError):
        bridge.add_own_reduction("nonsense", "float16")
    assert bridge.counts()["requests"] == 0
    np.testing.assert_array_equal(jnp.asarray(X), 1)
