"""The page of dtypes says what the tables say, and the tables are those of JAX's dtypes."""

import dtype_table
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

from jaxcomm._primitives import dtypes, reductions
from jaxcomm.arguments import operand


def test_the_page_is_up_to_date():
    assert dtype_table.PAGE.read_text() == dtype_table.page(), "run python docs/dtype_table.py"


def test_every_dtype_of_jax_is_there():
    """All scalar types that jax.numpy has, but for those that XLA's CPU programs cannot hand to a custom call."""
    named = {np.dtype(t).name for t in vars(jnp).values() if isinstance(t, type(jnp.float32))}
    known = set(dtypes.NAMES)
    missing = {name for name in named if not name.startswith(("float6_", "int1", "uint1")) or name.endswith("16")}
    assert {"bfloat16", "int4", "float8_e4m3fn"} <= named
    assert missing <= known


@pytest.mark.parametrize("name", [n for n in dtypes.NAMES if dtypes.kind(np.dtype(n)) == "c"])
def test_complex_numbers_have_no_order(name):
    for op in (MPI.MAX, MPI.MIN):
        with pytest.raises(TypeError, match=f"op=M.. is not defined for dtype {name}; defined are SUM, PROD"):
            reductions.check(reductions.reduction(op, "f"), np.dtype(name), "f")


def values(dtype):
    """All values of up to 16 bits, else some whole numbers."""
    bits = {"bool": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}.get(
        dtype.name, 8 * dtype.itemsize
    )
    if bits > 16:
        return np.arange(-500, 500).astype(dtype)
    return np.arange(2**bits).astype(f"u{dtype.itemsize}").view(dtype)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", dtypes.NAMES)
def test_identities_leave_every_value_as_it_is(name):
    dtype = np.dtype(name)
    x = values(dtype)
    for op, combine in (("MAX", np.maximum), ("MIN", np.minimum), ("PROD", np.multiply)):
        if dtypes.kind(dtype) == "c" and op != "PROD":
            continue
        y = combine(x, reductions.identity(reductions.BY_NAME[op], dtype)).astype(dtype)
        assert np.all((y == x) | (x != x))


def test_what_does_not_travel():
    for x in (np.array(["a"]), np.array([None]), np.zeros(2, "datetime64[s]")):
        with pytest.raises(TypeError, match="is not supported; supported are bool"):
            operand(x, "f")
