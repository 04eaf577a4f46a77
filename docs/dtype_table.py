"""Write docs/dtypes.md: which operation takes which dtype, and which op is defined for it.

    python docs/dtype_table.py

The page is made from jaxcomm's own tables. tests/single/test_dtype_table.py checks that it is up to date.
"""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxcomm._primitives import _compat, dtypes, packed, reductions
from jaxcomm._primitives.table import TABLE

PAGE = Path(__file__).with_name("dtypes.md")
NOTHING = ("barrier", "probe", "pvary", "replicated_cotangent", "agree")
"""Rows that take no array, or communicate none."""
OTHERS = ("MAXLOC, MINLOC", "MEAN", "Op.Create", "function")
"""What else a reduction takes as op: reductions.md."""

INTRODUCTION = """# dtypes

Every operation that moves arrays takes every dtype below, typed PRNG keys, and float0. So does every form of it: eager and
in jit, nonblocking (`I...`) and persistent (`..._init`), on every MPI. Written by `python docs/dtype_table.py`.

- moving: {moving}; and what is made of these: Ssend, Bsend, Rsend, Sendrecv_replace, Neighbor_alltoall
- reducing: {reducing}

| dtype | travels as | derivative | {names} |
|---|---|---|{lines}|
"""

NOTES = """
**MPI**: MPI's own operation. **messages**: by jaxcomm, of messages ([reductions.md](reductions.md)); the columns to the
right of BXOR are those of MAXLOC and MINLOC (the dtype is that of the values), MEAN, operations of `MPI.Op.Create`, and JAX
functions. **own**: done by jaxcomm's native layer, because MPI has none for the dtype, or its
libraries do it differently. **once**: own, in float32, and rounded to the dtype once at each combination, to the
nearest, ties to even. A dash: TypeError, before any rank enters MPI. On bool, the op that NumPy's arithmetic is;
those that are left are MPI's.

## What holds on every MPI

- **MAX and MIN** are `jnp.maximum` and `jnp.minimum`: NaN if any rank has NaN there, and -0 is less than 0. That
  holds for all floats, and more: XLA's own maximum of float8_e8m0fnu loses the smallest number. Complex numbers have no
  order: TypeError.
- **Results are not weakly typed**, as that of `jax.lax.psum` is not: a Python number is sent in the dtype that `jnp.asarray`
  gives it, which depends on whether 64 bits are enabled.
- **Integers wrap around** in SUM and PROD at their own width, int4 too.
- **The order** in which operands are combined is MPI's to choose. A sum of floats may differ in its last bits between
  MPI libraries and between numbers of ranks, and a sum of float8 in more: each combination rounds to few bits. Where
  that matters, reduce in float32 and convert the result: `comm.Allreduce(x.astype(jnp.float32)).astype(x.dtype)`; or fix
  the order with `reproducible=True`.
- **What is too large** becomes what `astype` makes of it: infinity, or NaN in the dtypes that have no infinity;
  float4_e2m1fn has neither and takes its largest number. float8_e8m0fnu has no zero and no sign: what is not positive
  becomes NaN, ties go up.
- **Identities** of MAX and MIN, which `Exscan` gives the first rank, are infinities, or the lowest and highest number
  of a dtype without them.

## Kinds that are not numbers

- **PRNG keys** (`jax.random.key`) have a dtype of their own: shapes, leading axes, counts and templates are those of
  the keys. Their words travel as uint32. Templates are arrays of keys or `jax.ShapeDtypeStruct(shape, key.dtype)`.
  The only reduction is that by a JAX function.
- **float0**, the tangent of an integer, is an array without data. Operations return what they would return in shape,
  and communicate nothing: it must be float0 on all ranks, which it is where the primal has one dtype.
- **Elements of less than a byte** travel one a byte, as NumPy has them; so it does not matter which end of a message
  is compiled.

float6 dtypes, int1 and uint1 are not supported: XLA's CPU programs cannot hand them to a custom call. NumPy arrays of
dtypes that mpi4py does not know (bfloat16 and what else ml_dtypes adds) are operands like others; as *host buffers*
(see [porting.md](porting.md)) they are mpi4py's affair, which refuses them: pass a JAX array.

Counts may be larger than 2^31 - 1 elements, and messages than 2^31 bytes, in every operation. MPI libraries without
the large-count functions of MPI 4 (Open MPI 5) get datatypes made of blocks, and reductions in parts.
"""


def _travels_as(dtype: np.dtype) -> str:
    wire = dtypes.wire(_compat.ShapedArray((), dtype)).dtype
    if wire != dtype:
        return f"{wire.name}, one a byte"
    small = dtypes.kind(dtype) == "f" and dtype.itemsize <= 2
    return f"{8 * dtype.itemsize} bits" if small else "itself"


def _reduced(name: str, dtype: np.dtype) -> str:
    op = reductions.BY_NAME[name]
    try:
        reductions.check(op, dtype, "")
    except TypeError:
        return "-"
    chosen = reductions.native(op, dtype)
    if chosen in reductions.BY_NAME.values():
        return "MPI" if chosen == op else f"MPI {chosen.name}"
    wide = dtypes.kind(dtype) != "f" or dtype.itemsize > 2 or name in ("MAX", "MIN")
    return "own" if wide else "once"


def _others(dtype: np.dtype) -> list[str]:
    """For OTHERS."""
    ordered, inexact = dtypes.kind(dtype) in "biuf", jnp.issubdtype(dtype, jnp.inexact)
    mean = f"{_reduced('SUM', dtype)}, divided" if inexact else "-"
    return ["messages" if ordered else "-", mean, "MPI" if dtypes.in_mpi(dtype) else "-", "messages"]


def _row(dtype: np.dtype) -> str:
    derivative = "yes" if jnp.issubdtype(dtype, jnp.inexact) else "float0"
    cells = [_reduced(name, dtype) for name in reductions.BY_NAME] + _others(dtype)
    return f"| {dtype.name} | {_travels_as(dtype)} | {derivative} | {' | '.join(cells)} |"


def page() -> str:
    rows = [row for row in TABLE.values() if row.name not in NOTHING]
    reducing = [row for row in rows if "op" in dict(row.params)]
    moving = [*[row for row in rows if row not in reducing], *packed.ROWS.values()]
    listed = lambda rows: ", ".join(dict.fromkeys(row.name.removesuffix("_replicated").capitalize() for row in rows))  # noqa: E731
    names = [*reductions.BY_NAME, *OTHERS]
    top = INTRODUCTION.format(
        moving=listed(moving),
        reducing=listed(reducing),
        names=" | ".join(names),
        lines="---|" * (len(names) - 1) + "---",
    )
    keys = f"| PRNG keys | their words, uint32 | float0 | {' | '.join([*('-' for _ in names[1:]), 'messages'])} |"
    return top + "\n".join([*map(_row, dtypes.DTYPES), keys]) + "\n" + NOTES


if __name__ == "__main__":
    PAGE.write_text(page())
