"""Gradients of one loss that all ranks share, with respect to parameters that all ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

__all__ = ["shared_value_and_grad"]


def shared_value_and_grad(
    fun: Callable[..., Any], comm: Any, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """As jax.value_and_grad, for a loss that is the sum over ranks of what fun returns.

    The parameters (the arguments of argnums) are equal on every rank, the other arguments this rank's own. Value and
    gradient are those of the same computation in one process, equal on every rank: no factor of the number of ranks.

    Args:
      fun: returns this rank's share of the loss, a real scalar (a pair with auxiliary data if has_aux).
      comm: a JaxComm.
      argnums, has_aux: as jax.value_and_grad.
    Returns: a function like fun that returns (loss, gradient), or ((loss, aux), gradient). It may be jitted.
    Raises: what jax.value_and_grad raises.
    """
    chosen = {argnums} if isinstance(argnums, int) else set(argnums)

    def loss(*args: Any, **kwargs: Any) -> Any:
        positions = {i % len(args) for i in chosen}
        varied = [comm.Pvary(a) if i in positions else a for i, a in enumerate(args)]
        out = fun(*varied, **kwargs)
        share, aux = out if has_aux else (out, None)
        total = comm.Allreduce(share, replicated=True)
        return (total, aux) if has_aux else total

    return jax.value_and_grad(loss, argnums, has_aux)  # type: ignore[no-any-return]
