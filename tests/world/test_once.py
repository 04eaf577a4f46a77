"""An operation whose result nobody uses runs exactly once, whatever JAX does with the program around it.

CASES 9, 15, 38, and 12, 13, 39 as far as a Send without a derivative goes. The neighbour counts what arrives.
"""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from counting import messages
from jax import lax

import jaxcomm

WORLD = harness.communicator("world")
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE

pytestmark = pytest.mark.skipif(SIZE == 1, reason="a message to oneself may wait for its receive")

# A Send whose result nobody uses. Its operand has no derivative here: that would be a message of its own.


def tell(value, tag=0):
    WORLD.Send(lax.stop_gradient(value), RIGHT, tag)


# Each starts from x = START + rank, so that the neighbour's messages are not one's own. Little arithmetic: compiling it
# is what takes the time.


def straight(x):
    tell(jnp.float64(RANK), 1)
    tell(x, 2)
    return x * x


def scan(x):
    closed_over = jnp.array([RANK, 7.0])

    def body(s, t):
        tell(jnp.float64(RANK), 1)  # a constant
        tell(t, 2)  # the slice
        tell(s, 3)  # the carry
        tell(closed_over, 4)
        return s * t, None

    return lax.scan(body, x, jnp.arange(3.0) + RANK)[0]


def cond(x):
    return lax.cond(x > 0, straight, lambda x: x, x)


def cond_not_taken(x):
    return lax.cond(x < 0, straight, lambda x: x, x)


def switch(x):
    return lax.switch(1, [lambda x: x, lambda x: (tell(x, 3), x * x)[1], straight], x)


def fori_loop(x):
    return lax.fori_loop(0, 3, lambda i, x: (tell(x), x * 2)[1], x)


def while_loop(x):
    return lax.while_loop(lambda x: x < 8, lambda x: (tell(x), x * 2)[1], x)


def mapped(x):
    return lax.map(lambda t: (tell(t), t * x)[1], jnp.arange(3.0) + RANK).sum()


@jax.custom_jvp
def custom_jvp(x):
    tell(x, 5)
    return x * x


@custom_jvp.defjvp
def _(primals, tangents):
    tell(primals[0], 6)
    return primals[0] ** 2, 2 * primals[0] * tangents[0]


@jax.custom_vjp
def custom_vjp(x):
    tell(x, 5)
    return x * x


def _forward(x):
    tell(x, 6)
    return x * x, x


def _backward(x, ct):
    tell(ct, 7)
    return (2 * x * ct,)


custom_vjp.defvjp(_forward, _backward)

START = 2.0


def sent_by_scan(x, rank):
    out = []
    for t in np.arange(3.0) + rank:
        out += [(1, rank), (2, t), (3, x), (4, [rank, 7.0])]
        x = x * t
    return out


SENT = {
    straight: lambda x, rank: [(1, rank), (2, x)],
    scan: sent_by_scan,
    cond: lambda x, rank: [(1, rank), (2, x)],
    cond_not_taken: lambda x, rank: [],
    switch: lambda x, rank: [(3, x)],
    fori_loop: lambda x, rank: [(0, x), (0, 2 * x), (0, 4 * x)],
    while_loop: lambda x, rank: [(0, x * 2**i) for i in range(3) if x * 2**i < 8],
    mapped: lambda x, rank: [(0, rank + i) for i in range(3)],
    custom_jvp: lambda x, rank: [(5, x)],
    custom_vjp: lambda x, rank: [(5, x)],
}
# What a user's own rules say instead when they are differentiated.
SENT_UNDER_GRAD = SENT | {custom_jvp: lambda x, rank: [(6, x)], custom_vjp: lambda x, rank: [(6, x), (7, 1.0)]}

WAYS = {
    "jit": jax.jit,
    "eager": lambda f: f,
    "jaxcomm.jit": jaxcomm.jit,
    "nested jit": lambda f: jax.jit(lambda x: jax.jit(f)(x) + 1),
    "checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "aot": lambda f: jax.jit(f).lower(START).compile(),
}
WAYS_OF_GRAD = {
    "jit(grad)": lambda f: jax.jit(jax.grad(f)),
    "grad": jax.grad,
    "grad(jit)": lambda f: jax.grad(jax.jit(f)),
    "value_and_grad": jax.value_and_grad,
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](1.0),
    "jaxcomm.jit(grad)": lambda f: jaxcomm.jit(jax.grad(f)),
    "grad(jaxcomm.jit)": lambda f: jax.grad(jaxcomm.jit(f)),
    "jit(linearize)": lambda f: jax.jit(lambda x: jax.linearize(f, x)[0]),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](1.0),
    # What is recomputed is what the derivative needs: no message.
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(f)),
    "jit(grad(checkpoint))": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (1.0,)),
}


def sends(function, expected):
    jax.block_until_ready(function(jnp.float64(START + RANK)))
    assert messages(WORLD) == expected(START + LEFT, LEFT)


def every(ways, functions):
    """Every function in the first way, and the two that JAX treats most differently in all the others."""
    first, *others = ways
    pairs = [(first, f) for f in functions] + [(way, f) for way in others for f in (straight, scan)]
    return pytest.mark.parametrize(("way", "function"), pairs, ids=lambda value: getattr(value, "__name__", value))


@every(WAYS, SENT)
def test_an_unused_send_runs_once(way, function):
    sends(WAYS[way](function), SENT[function])


@every(WAYS_OF_GRAD, [f for f in SENT if f is not while_loop])
def test_an_unused_send_runs_once_under_grad(way, function):
    sends(WAYS_OF_GRAD[way](function), SENT_UNDER_GRAD[function])


def test_xla_is_told_that_an_operation_has_a_side_effect():
    """What it does with one that claims to be pure is up to its passes, and to their next version."""
    which = [case for case in CASES if case.defined_for("float64")]
    together = lambda operands: [c.call(WORLD, x) for c, x in zip(which, operands, strict=True)]  # noqa: E731
    program = jax.jit(together).lower([case.operands(WORLD)[RANK] for case in which])
    calls = [line for line in program.as_text().splitlines() if "@jaxcomm_" in line]
    assert len(calls) >= len(which)
    assert all("has_side_effect = true" in call for call in calls)
