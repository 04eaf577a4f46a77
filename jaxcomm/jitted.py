"""jaxcomm.jit: jax.jit for functions that communicate, at the price of one that does not.

JAX gives its fast dispatch only to compiled programs without effects. Here a whole function becomes one primitive that has
none; inside, its operations are in order by the effect as ever. Order among programs is kept by starting one when the
communication of the last one has ended, see bridge.pyx. Plain jax.jit, calls on concrete arrays and jax.effects_barrier are
part of that order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat
from jaxcomm.token import COMPANION, EFFECT, run_in_turn

__all__ = ["jit"]

# mpi_program(*operands) -> end, *results: a jaxpr that communicates. `end` is empty, and there when the program has ended.

program_p = _compat.Primitive("mpi_program")
program_p.multiple_results = True
END = _compat.ShapedArray((0,), np.dtype(bool))
_HIDDEN = {EFFECT, COMPANION}
for _name, _capsule in bridge.program_capsules().items():
    jax.ffi.register_ffi_target(f"jaxcomm_{_name}", _capsule, platform="cpu")

# XLA's CPU executor runs programs of at most 8 kernels, calls, loops ... strictly one after the other. Where there is
# computation worth the while beside a message that may come late, as many calls that do nothing make the program large.
_FILLERS = 9
_LONG = {"while", "scan", "dot_general", "conv_general_dilated", "sort", "fft"}
_LATE = ("mpi_recv", "mpi_sendrecv", "mpi_wait_")


def _abstract(*args: Any, jaxpr: Any) -> tuple[list[Any], set[Any]]:
    return [END, *jaxpr.out_avals], {e for e in jaxpr.effects if e not in _HIDDEN}


def _lower(context: Any, *args: Any, jaxpr: Any) -> list[Any]:
    end = _compat.constant(np.zeros(END.shape, END.dtype))
    found = _compat.primitives_in(jaxpr)
    late = any(name.startswith(_LATE) for name in found)
    fillers = _FILLERS if late and found & _LONG else 0
    beside = ["jaxcomm_nothing"] * fillers
    return [end, *_compat.inline(context, args, jaxpr, EFFECT, "jaxcomm_end", beside, keep="mpi_start_")]


def _run(*args: Any, jaxpr: Any) -> list[Any]:
    """Without compilation (jax.disable_jit)."""
    return [jax.numpy.zeros(END.shape, END.dtype), *_compat.run(jaxpr, args)]


program_p.def_impl(_run)
program_p.def_effectful_abstract_eval(_abstract)
_compat.register_lowering(program_p, _lower, cacheable=False)  # it looks at what its operands are


def _as_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return function without an effect of ours, and with something to wait for as its first result."""

    def program(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        dynamic = [isinstance(leaf, (_compat.Tracer, jax.Array)) for leaf in leaves]  # what is not was declared static

        def flat(*values: Any) -> Any:
            rest = iter(values)
            merged = [next(rest) if moves else leaf for leaf, moves in zip(leaves, dynamic, strict=True)]
            again, named = jax.tree_util.tree_unflatten(tree, merged)
            return function(*again, **named)

        moving = [leaf for leaf, moves in zip(leaves, dynamic, strict=True) if moves]
        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*moving)
        end, *results = program_p.bind(*moving, jaxpr=jaxpr)
        return end, jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), results)

    return functools.update_wrapper(program, function)


def _as_jitted_program(function: Callable[..., Any], **options: Any) -> Any:
    return jax.jit(_as_program(function), **options)


# What says where arguments lie: there, plain jax.jit does the work.
_PLACES = ("in_shardings", "out_shardings", "device", "backend")


def jit(fun: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Return fun compiled, as jax.jit does, with calls that cost as little as those of a function without communication.

    The calls of plain jax.jit on a function that communicates go through JAX's slow path, see docs/performance.md. Called
    inside another transformation (jit, grad, vmap, ...) it is plain jax.jit.

    A call returns before its program has ended, as that of jax.jit does; but it starts only when the communication of the
    program before it has ended.

    Args:
      fun: as for jax.jit; left out, a decorator is returned.
      options: those of jax.jit.
    Returns: a function like fun. Its attributes lower, trace, eval_shape and clear_cache are those of jax.jit.
    Raises: what jax.jit raises. jax.errors.JaxRuntimeError: MPI reports an error (at the call, or where its results are
      used).
    """
    if fun is None:
        return functools.partial(jit, **options)
    plain = jax.jit(fun, **options)
    if any(options.get(name) is not None for name in _PLACES):
        return plain
    program = _as_jitted_program(fun, **options)

    def careful(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plain(*args, **kwargs) if _compat.tracing() else run_in_turn(program, args, kwargs)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return bridge.dispatch(program, careful, args, kwargs)

    def clear_cache() -> None:
        """Forget what was compiled."""
        plain.clear_cache()
        program.clear_cache()

    for name in ("lower", "trace", "eval_shape"):
        setattr(call, name, getattr(plain, name))
    call.clear_cache = clear_cache  # type: ignore[attr-defined]
    return call
