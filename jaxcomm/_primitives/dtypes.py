"""JAX dtypes, and how they travel: as which dtype of NumPy's, of which MPI datatype.

Most travel as they are. What MPI has no datatype for travels as unsigned integers of the same width. Elements of less than
a byte, which are packed in XLA's memory and not in NumPy's, travel one a byte. A typed PRNG key travels as its words, which
are one more axis behind all others: so no rule about leading axes sees them. A float0, the tangent of an integer, has no
data and does not travel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat

__all__ = [
    "DTYPES",
    "NAMES",
    "check",
    "code",
    "concatenate",
    "from_wire",
    "in_mpi",
    "is_key",
    "is_nothing",
    "kind",
    "limits",
    "nothing",
    "per_element",
    "reduced_as",
    "to_wire",
    "travels_as_it_is",
    "wire",
    "wire_bytes",
    "zeros",
]

# XLA's element type (XLA_FFI_DataType in xla/ffi/api/c_api.h) and MPI's for each dtype.
_ROWS = {
    "bool": (1, MPI.C_BOOL),
    "int8": (2, MPI.INT8_T),
    "int16": (3, MPI.INT16_T),
    "int32": (4, MPI.INT32_T),
    "int64": (5, MPI.INT64_T),
    "uint8": (6, MPI.UINT8_T),
    "uint16": (7, MPI.UINT16_T),
    "uint32": (8, MPI.UINT32_T),
    "uint64": (9, MPI.UINT64_T),
    "float16": (10, MPI.UINT16_T),
    "bfloat16": (16, MPI.UINT16_T),
    "float32": (11, MPI.FLOAT),
    "float64": (12, MPI.DOUBLE),
    "complex64": (15, MPI.C_FLOAT_COMPLEX),
    "complex128": (18, MPI.C_DOUBLE_COMPLEX),
    "float8_e3m4": (29, MPI.UINT8_T),
    "float8_e4m3": (28, MPI.UINT8_T),
    "float8_e4m3b11fnuz": (23, MPI.UINT8_T),
    "float8_e4m3fn": (20, MPI.UINT8_T),
    "float8_e4m3fnuz": (25, MPI.UINT8_T),
    "float8_e5m2": (19, MPI.UINT8_T),
    "float8_e5m2fnuz": (24, MPI.UINT8_T),
    "float8_e8m0fnu": (33, MPI.UINT8_T),
}
# Those of less than a byte, and what they travel as: the same number, or the bits of a float.
_SUB_BYTE = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8", "float4_e2m1fn": "uint8"}


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


_CODES = {_dtype(name): code for name, (code, _) in _ROWS.items()}
_WIRE = {_dtype(name): np.dtype(carrier) for name, carrier in _SUB_BYTE.items()}
NAMES = (*_ROWS, *_SUB_BYTE)
DTYPES = (*_CODES, *_WIRE)
"""The dtypes that travel, and their names; beside them, PRNG keys."""

for _name, (_code, _datatype) in _ROWS.items():
    bridge.add_datatype(_code, MPI._handleof(_datatype) & (2**64 - 1), 1, _dtype(_name).itemsize, _name)


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def is_nothing(x: Any) -> bool:
    """Whether an array has the dtype float0, whose arrays have no data."""
    return bool(x.dtype == jax.dtypes.float0)


def nothing(shape: Sequence[int]) -> np.ndarray:
    """Return an array of float0."""
    return np.zeros(shape, jax.dtypes.float0)


def check(dtype: Any, where: str) -> None:
    """Raise TypeError for a dtype that no operation carries."""
    if dtype not in _CODES and dtype not in _WIRE and dtype != jax.dtypes.float0 and not is_key(dtype):
        raise TypeError(f"{where}: dtype {dtype} is not supported; supported are {', '.join(NAMES)} and PRNG keys")


@functools.cache
def kind(dtype: Any) -> str:
    """NumPy's letter for the kind of a dtype, which for those of ml_dtypes NumPy does not know: b, i, u, f, c; or empty."""
    kinds = {
        "b": jnp.bool_,
        "i": jnp.signedinteger,
        "u": jnp.unsignedinteger,
        "f": jnp.floating,
        "c": jnp.complexfloating,
    }
    return next((letter for letter, parent in kinds.items() if jnp.issubdtype(dtype, parent)), "")


def limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The lowest and the highest value of a real dtype; infinities where it has them."""
    if kind(dtype) == "b":
        return False, True
    if kind(dtype) != "f":
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    infinite = np.isinf(np.array(np.inf, np.float32).astype(dtype).astype(np.float64))
    info = jnp.finfo(dtype)
    # float8_e8m0fnu has no negative numbers, and its info.min is what other dtypes' info.tiny is.
    return (-np.inf, np.inf) if infinite else (info.min, info.max)


def zeros(shape: Sequence[int], dtype: Any, xp: Any = jnp) -> Any:
    """As jnp.zeros or np.zeros; keys too, whose words are zero, as a template of them."""
    if not is_key(dtype):
        return xp.zeros(shape, dtype)
    aval = wire(_compat.ShapedArray(tuple(shape), dtype))
    return _compat.wrap_key(jnp.zeros(aval.shape, aval.dtype), dtype)


# What travels


def travels_as_it_is(dtype: Any) -> bool:
    return dtype in _CODES


def wire(aval: Any) -> _compat.ShapedArray:
    """The shape and dtype of what travels for an array."""
    if is_key(aval.dtype):
        return _compat.key_words(aval)
    return _compat.ShapedArray(aval.shape, _WIRE.get(aval.dtype, aval.dtype))


def wire_bytes(aval: Any) -> int:
    """How many bytes travel for an array."""
    travels = wire(aval)
    return int(math.prod(travels.shape) * travels.dtype.itemsize)


def per_element(dtype: Any) -> int:
    """How many elements travel for one."""
    return int(np.prod(_compat.key_words(_compat.ShapedArray((), dtype)).shape)) if is_key(dtype) else 1


def to_wire(x: Any) -> Any:
    """What travels for an array: of NumPy's or JAX's, or traced."""
    if x.dtype in _CODES:
        return x
    if is_key(x.dtype):
        return jax.random.key_data(x)
    if kind(x.dtype) != "f":
        return x.astype(_WIRE[x.dtype])
    if isinstance(x, np.ndarray):
        return x.view(_WIRE[x.dtype])
    return jax.lax.bitcast_convert_type(x, jnp.uint4).astype(_WIRE[x.dtype])


def from_wire(x: Any, dtype: Any) -> Any:
    """The array that something has travelled for."""
    if dtype in _CODES:
        return x
    if is_key(dtype):
        return _compat.wrap_key(x, dtype)
    if kind(dtype) != "f":
        return x.astype(dtype)
    if isinstance(x, np.ndarray):
        return x.view(dtype)
    return jax.lax.bitcast_convert_type(x.astype(jnp.uint4), dtype)


def concatenate(arrays: Sequence[Any], axis: int = 0) -> Any:
    """As jnp.concatenate, which ends the process for integers of two bits (XLA's EmitFastConcatenate, to JAX 0.12)."""
    dtype = arrays[0].dtype
    if dtype not in _WIRE or kind(dtype) == "f":
        return jnp.concatenate(arrays, axis)
    return jnp.concatenate([to_wire(x) for x in arrays], axis).astype(dtype)


def in_mpi(dtype: Any) -> bool:
    """Whether MPI has a datatype of a dtype, or of what it travels as, in which its numbers are these numbers."""
    return kind(dtype) in "biuc" if dtype.itemsize <= 2 else kind(dtype) != ""


def reduced_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype whose reductions are done. Integers of less than a byte wrap around when what has travelled arrives."""
    return dtype if kind(dtype) == "f" else _WIRE.get(dtype, dtype)


def code(dtype: np.dtype[Any]) -> int:
    """Return XLA's number of an element type that travels."""
    return _CODES[dtype]
