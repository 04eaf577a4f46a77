"""jaxcomm.jit: jax.jit for functions that communicate, at the price of one that does not.

JAX gives its fast dispatch only to compiled programs without effects. Here a whole function becomes one primitive that has
none: what keeps its programs in order is a token that is an ordinary array, an argument of each and a result. It is
JAX's own runtime token for the effect, so plain jax.jit, calls on concrete arrays and jax.effects_barrier stay in order
with it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm._primitives import _compat
from jaxcomm.token import COMPANION, EFFECT

__all__ = ["jit"]

# mpi_program(token, *operands) -> token, *results: a jaxpr whose communication is ordered by the two tokens.

program_p = _compat.Primitive("mpi_program")
program_p.multiple_results = True
TOKEN = _compat.ShapedArray((0,), np.dtype(bool))
_HIDDEN = {EFFECT, COMPANION}


def _abstract(token: Any, *args: Any, jaxpr: Any) -> tuple[list[Any], set[Any]]:
    return [TOKEN, *jaxpr.out_avals], {e for e in jaxpr.effects if e not in _HIDDEN}


def _lower(context: Any, token: Any, *args: Any, jaxpr: Any) -> list[Any]:
    # The array orders whole programs: one starts when its arguments are there. Inside, the order begins anew.
    return [token, *_compat.inline(context, args, jaxpr, EFFECT)]


program_p.def_effectful_abstract_eval(_abstract)
_compat.register_lowering(program_p, _lower)


def _as_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return function with a token as its first argument and first result, and no effect of ours."""

    def program(_token: Any, /, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        dynamic = [isinstance(leaf, _compat.Tracer) for leaf in leaves]  # what is not was declared static

        def flat(*values: Any) -> Any:
            rest = iter(values)
            merged = [next(rest) if moves else leaf for leaf, moves in zip(leaves, dynamic, strict=True)]
            again, named = jax.tree_util.tree_unflatten(tree, merged)
            return function(*again, **named)

        tracers = [leaf for leaf, moves in zip(leaves, dynamic, strict=True) if moves]
        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*tracers)
        token, *results = program_p.bind(_token, *tracers, jaxpr=jaxpr)
        return token, jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), results)

    functools.update_wrapper(program, function)
    vars(program).pop("__wrapped__")
    with_token = _signature_with_token(function)
    if with_token is not None:
        program.__signature__ = with_token  # type: ignore[attr-defined]
    return program


def _signature_with_token(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature by which jax.jit finds the names of arguments given by number, and the other way round."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    token = inspect.Parameter("_token", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[token, *signature.parameters.values()])


def _behind_token(numbers: int | Sequence[int] | None) -> Any:
    """Positions of arguments when the token stands first; negative ones count from the end."""
    if numbers is None:
        return None
    each = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    return tuple(n + 1 if n >= 0 else n for n in each)


# What names arguments by position, and what says where they lie: there, plain jax.jit does the work.
_NUMBERS = ("static_argnums", "donate_argnums")
_PLACES = ("in_shardings", "out_shardings", "device", "backend")


def jit(fun: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Return fun compiled, as jax.jit does, with calls that cost as little as those of a function without communication.

    The calls of plain jax.jit on a function that communicates go through JAX's slow path, see docs/performance.md. Called
    inside another transformation (jit, grad, vmap, ...), or for several devices, it is plain jax.jit.

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
    shifted = {name: _behind_token(n) if name in _NUMBERS else n for name, n in options.items()}
    program = jax.jit(_as_program(fun), **shifted)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _compat.tracing() or _compat.several_devices() or jax.config.jax_disable_jit:
            return plain(*args, **kwargs)
        tokens = _compat.runtime_tokens.current_tokens
        token, result = program(_compat.take_token(tokens, EFFECT), *args, **kwargs)
        tokens[EFFECT] = _compat.RuntimeToken(token)
        return result

    def clear_cache() -> None:
        """Forget what was compiled."""
        plain.clear_cache()
        program.clear_cache()

    for name in ("lower", "trace", "eval_shape"):
        setattr(call, name, getattr(plain, name))
    call.clear_cache = clear_cache  # type: ignore[attr-defined]
    return call
