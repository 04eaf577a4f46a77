"""examples/shallow_water.py on jaxcomm and on mpi4jax: one program, two communicators. Runs on the ranks, see job.py."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import job
import numpy as np
from mpi4py import MPI
from timing import Timed, interleaved

import jaxcomm

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import shallow_water

WORLD = MPI.COMM_WORLD


class OnMpi4jax:
    """The Cartesian communicator as shallow_water uses it, by mpi4jax."""

    def __init__(self, cart: MPI.Cartcomm):
        self.cart = cart

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cart, name)

    def with_frame(self, state: Any) -> Any:
        """What halo_exchange does, of one cell and without walls."""
        import mpi4jax

        for dim, axis in enumerate((1, 2)):
            below, above = self.cart.Shift(dim, 1)
            first, last = (jax.lax.slice_in_dim(state, i, i + 1, axis=axis) for i in (0, state.shape[axis] - 1))
            low = mpi4jax.sendrecv(last, last, below, above, comm=self.cart)
            high = mpi4jax.sendrecv(first, first, above, below, comm=self.cart)
            state = jnp.concatenate([low, state, high], axis)
        return state


with_frame = shallow_water.with_frame
shallow_water.with_frame = lambda cart, state: (
    cart.with_frame(state) if isinstance(cart, OnMpi4jax) else with_frame(cart, state)
)


def solver(jit: Callable[..., Any], cart: Any, state: Any, steps: int) -> Callable[[], Any]:
    solve = jit(lambda state: shallow_water.solve(cart, state, steps, 1e-4))
    return lambda: solve(state).block_until_ready()


def measure(grids: dict[str, list[int]], **effort: Any) -> dict[str, Any]:
    """Time steps on grids of so many cells a rank, side by side; grids: name -> [cells along a side, steps a call]."""
    comm = jaxcomm.JaxComm(WORLD)
    # Periodic: at a wall mpi4jax would return what happens to be in memory.
    processes, periods = MPI.Compute_dims(WORLD.size, 2), [True, True]
    ours = comm.Create_cart(processes, periods)
    theirs = OnMpi4jax(WORLD.Create_cart(processes, periods))
    rows = []
    for grid, (side, steps) in grids.items():
        state = shallow_water.initial_state(ours, [side * n for n in processes])
        calls = {
            "jax.jit": solver(jax.jit, ours, state, steps),
            "jaxcomm.jit": solver(jaxcomm.jit, ours, state, steps),
            "mpi4jax": solver(jax.jit, theirs, state, steps),
        }
        expected = calls["mpi4jax"]()
        np.testing.assert_allclose(calls["jax.jit"](), expected, rtol=1e-5, atol=1e-5)
        timed = {name: Timed(call, steps) for name, call in calls.items()}
        rows += [{"grid": grid, "side": side, "contender": n} | t for n, t in interleaved(timed, **effort).items()]
    return {"shallow water": rows}


if __name__ == "__main__":
    job.main(measure)
