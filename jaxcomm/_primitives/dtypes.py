"""JAX dtypes and the MPI datatypes that carry them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from jaxcomm._native import bridge

__all__ = ["check", "code"]

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
    "float32": (11, MPI.FLOAT),
    "float64": (12, MPI.DOUBLE),
    "complex64": (15, MPI.C_FLOAT_COMPLEX),
    "complex128": (18, MPI.C_DOUBLE_COMPLEX),
}
_CODES = {np.dtype(name): code for name, (code, _) in _ROWS.items()}

for _name, (_code, _datatype) in _ROWS.items():
    _itemsize = np.dtype(_name).itemsize
    bridge.add_datatype(_code, MPI._handleof(_datatype) & (2**64 - 1), 1, _itemsize, _name)


def code(dtype: np.dtype[Any]) -> int:
    """Return XLA's number of an element type."""
    return _CODES[dtype]


def check(dtype: Any, where: str) -> None:
    """Raise TypeError for a dtype that no operation carries."""
    if dtype not in _CODES:
        raise TypeError(f"{where}: dtype {dtype} is not supported; supported are {', '.join(_ROWS)}")
