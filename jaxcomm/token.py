"""Program order: the effect that keeps communication in order by itself, and the explicit Token for those who want one.

Every operation carries CommunicationEffect, which JAX threads through jit, loops, branches and derivatives: all
communication of a thread happens in program order, on every communicator, with nothing for the user to do.

What the effect does not tell differentiation is that a receive depends on another rank's send. That link is data: a
Token, or the template of a receive. See docs/differentiation.md.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._native import bridge
from jaxcomm._primitives import _compat

__all__ = [
    "COMPANION",
    "EFFECT",
    "LINK",
    "CommunicationEffect",
    "Token",
    "create_token",
    "flush",
    "join",
    "link",
    "link_cotangents",
    "own_array",
    "run_in_turn",
]


class CommunicationEffect(_compat.Effect):  # type: ignore[misc]
    """The ordered effect of every operation. Equal by value, so that two traces of one program are one program."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self).__qualname__)

    def __repr__(self) -> str:
        return "MPI"


class CompanionEffect(CommunicationEffect):
    """An unordered effect beside the ordered one.

    The ahead-of-time path of JAX 0.8.1 to 0.12 looks for unordered effects only when it decides whether a compiled
    program may take the fast path; with an ordered effect alone, the second call of `jit(f).lower(x).compile()` fails.
    """

    def __repr__(self) -> str:
        return "MPI (unordered)"


# The companion must not count as ordered: isinstance decides in JAX's lists, so the ordered type is a subclass of its own.
class _OrderedEffect(CommunicationEffect):
    pass


EFFECT = _OrderedEffect()
COMPANION = CompanionEffect()
_compat.allow_everywhere(_OrderedEffect, CompanionEffect)
_compat.dont_hoist(_OrderedEffect)
_compat.keep_under_checkpoint(_OrderedEffect)
_compat.freeze_finished_elements(_OrderedEffect)

LINK = _compat.ShapedArray((0,), np.dtype(np.float32))
"""The abstract value of a link: no data, but a path for differentiation."""


class _Thread(threading.local):
    """What this thread's last program of jaxcomm.jit returned to wait for; not where the bridge keeps it."""

    last: Any = None


_thread = _Thread()


def run_in_turn(program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call program(*args, **kwargs) -> (what to wait for, result) when this thread's last program has ended."""
    _await_last()
    if bridge.owns_count():
        return bridge.run_program(program, args, kwargs)
    bridge.give_up_count()
    _thread.last, result = program(*args, **kwargs)
    return result


def _await_last() -> None:
    """As flush; that a program has failed is not the next one's fault, which warns: docs/adr/0005-failed-programs.md."""
    bridge.refuse_forked()
    try:
        flush()
    except Exception as error:
        warnings.warn(f"an earlier program failed after it was dispatched: {error}", RuntimeWarning, stacklevel=5)


def _last_program() -> Any:
    """An array that is there when this thread's last program has ended; None if nothing is under way."""
    token = _compat.runtime_tokens.current_tokens.get(EFFECT)
    if token is not None:  # it waits for what went before
        return token._buf
    return bridge.last_program() if bridge.owns_count() else _thread.last


def _under_way() -> Any:
    """As _last_program, without those that are known to have ended."""
    bridge.refuse_forked()
    last = _last_program()
    if last is None or not last.is_ready():
        return last
    _await_last()
    return None


def flush() -> None:
    """Wait until every operation that this thread has dispatched is done; raise what one of them raised."""
    bridge.refuse_forked()  # nothing that was under way ends here
    last = _last_program()
    try:
        if last is not None:
            last.block_until_ready()
    finally:
        # What has failed is over too: the next program starts a fresh chain.
        _thread.last = None
        if bridge.owns_count():
            bridge.settle()
        _compat.runtime_tokens.current_tokens.pop(EFFECT, None)


_compat.order_by(EFFECT, _under_way, flush)
bridge.set_dispatch(_compat.trace_context, _compat.no_trace, _compat.runtime_tokens, EFFECT)


# join(x, *links) is x, and depends on the links as far as differentiation can see.

join_p = _compat.Primitive("mpi_join")


def join(x: Any, *links: Any) -> Any:
    """Return x, with a zero cotangent for each of the links: it makes a transpose reach them.

    Shapes: x (...,), links of any shape; returns x.
    """
    links = tuple(k for k in links if k.dtype != jax.dtypes.float0)
    return join_p.bind(x, *links) if links else x


def link(*sources: Any) -> Any:
    """Return an empty array that depends on the sources as far as differentiation can see."""
    return join(jnp.zeros(LINK.shape, LINK.dtype), *sources)


def _join_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    out = join(*primals)
    dx, *dlinks = tangents
    if type(dx) is _compat.Zero and dx.aval.dtype == jax.dtypes.float0:
        return out, dx
    moving = [d for d in dlinks if type(d) is not _compat.Zero]
    return out, join(_compat.instantiate_zeros(dx), *moving)


def _join_transpose(ct: Any, x: Any, *links: Any) -> list[Any]:
    ct = _compat.instantiate_zeros(ct)
    return [ct if _compat.is_undefined_primal(x) else None, *link_cotangents(links, ct)]


def link_cotangents(links: Sequence[Any], ct: Any) -> list[Any]:
    """Zero for each linear link; it depends on ct, so that what is transposed again finds its way."""
    return [join(jnp.zeros(k.aval.shape, k.aval.dtype), ct) if _compat.is_undefined_primal(k) else None for k in links]


def _join_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    x, *links = args
    if dims[0] is None:
        size = next(k.shape[d] for k, d in zip(args, dims, strict=True) if d is not None)
        x = jnp.broadcast_to(x, (size, *x.shape))
    return join(x, *links), dims[0] or 0


join_p.def_impl(lambda x, *links: own_array(_compat.as_array(x)))
join_p.def_abstract_eval(lambda x, *links: x)
_compat.register_jvp(join_p, _join_jvp)
_compat.primitive_transposes[join_p] = _join_transpose
_compat.primitive_batchers[join_p] = _join_batch
_compat.register_lowering(join_p, lambda context, x, *links: [x])


def own_array(x: Any) -> jax.Array:
    """Return x as a JAX array that shares no memory with a NumPy array, which its owner may overwrite.

    A float0, which has no data, is always an array of NumPy's.
    """
    if isinstance(x, jax.Array) or x.dtype == jax.dtypes.float0:
        return x  # type: ignore[no-any-return]
    return jnp.array(x)  # type: ignore[no-any-return]


@jax.tree_util.register_pytree_node_class
class Token:
    """A place in the program's order, as a value: pass it on from call to call.

    It goes through jit, loops, branches and derivatives like any array. Order itself needs no token; what one adds is a
    path for differentiation between the two ends of a message.

    Attributes:
      array: shape (0,), float32.
    """

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Token:
        return cls(*children)

    def __repr__(self) -> str:
        return f"Token({self.array})"


def create_token(x: Any = None) -> Token:
    """Return a Token, made from x if there is one.

    Args:
      x: a pytree of arrays or None. If x is being differentiated, so is whatever takes the token: this links a rank that
        receives but has no data input of its own to the gradient of the whole program.
    """
    return Token(link(*map(jnp.asarray, jax.tree_util.tree_leaves(x))))
