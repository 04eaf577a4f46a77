"""Every import from JAX's internals, with what differs between the supported releases (0.8.1 to 0.12).

Public JAX has no way to define an effect, so these are needed as long as that is so. Nothing else in jaxcomm imports
`jax._src`.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import ad_checkpoint, array, config, core, dispatch, effects, literals, source_info_util
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import loops
from jax._src.lib import version as jaxlib_version
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir

OLDEST = (0, 8, 1)  # the FFI of older releases does not know the headers that the native layer is built with
for _name, _version in (("jax", jax.__version_info__), ("jaxlib", jaxlib_version)):
    if _version < OLDEST:
        raise ImportError(
            f"jaxcomm needs {_name} {'.'.join(map(str, OLDEST))} or newer, found {'.'.join(map(str, _version))}: "
            "pip install --upgrade jax jaxlib"
        )

Array = jax.Array
# The last is what NumPy arrays become in a jaxpr: it is no jax.Array and has no hash.
ARRAYS = (jax.Array, np.ndarray, literals.TypedNdArray)
ArrayImpl = array.ArrayImpl
enable_x64 = config.enable_x64
# JAX's internals are untyped to a type checker (follow_imports = "skip"), so these are aliases of Any there.
Effect: TypeAlias = effects.Effect
Primitive: TypeAlias = core.Primitive
exclude_from_call_sites = source_info_util.register_exclusion
ShapedArray: TypeAlias = core.ShapedArray
Tracer = core.Tracer
Zero = ad.Zero
instantiate_zeros = ad.instantiate_zeros
is_undefined_primal = ad.is_undefined_primal
primitive_transposes = ad.primitive_transposes
primitive_batchers = batching.primitive_batchers
runtime_tokens = dispatch.runtime_tokens
no_trace = core.eval_trace
# Where the current trace is kept, an object and its attribute: since JAX 0.9 as a thread-local state in C++.
_state = getattr(core, "trace_state_strong_ref", None)
trace_context = (core.trace_ctx, "trace") if _state is None else (_state, "value")
RuntimeToken: TypeAlias = core.Token

__all__ = [
    "ARRAYS",
    "Array",
    "ArrayImpl",
    "Effect",
    "OperationPrimitive",
    "Primitive",
    "ShapedArray",
    "Tracer",
    "Zero",
    "abstract_operand",
    "allow_everywhere",
    "as_array",
    "call_site",
    "calling_frame",
    "constant",
    "custom_call",
    "device_array",
    "devices_of",
    "dont_hoist",
    "enable_x64",
    "exclude_from_call_sites",
    "freeze_finished_elements",
    "inline",
    "instantiate_zeros",
    "is_undefined_primal",
    "keep_under_checkpoint",
    "key_words",
    "lower_as",
    "lower_here",
    "must_stay",
    "no_trace",
    "order_by",
    "primitive_batchers",
    "primitive_transposes",
    "primitives_in",
    "put",
    "register_jvp",
    "register_lowering",
    "run",
    "runtime_tokens",
    "site_of",
    "trace_context",
    "tracing",
    "wrap_key",
]


def tracing() -> bool:
    """Whether a JAX transformation is being traced in this thread, so that even a concrete operand must be staged."""
    return not core.trace_state_clean()


def allow_everywhere(ordered: type[Effect], companion: type[Effect]) -> None:
    """Enter the two effect types in every allow-list that JAX has; only the first is ordered."""
    effects.ordered_effects.add_type(ordered)
    effects.shardable_ordered_effects.add_type(ordered)
    for effect in (ordered, companion):
        effects.lowerable_effects.add_type(effect)
        effects.control_flow_allowed_effects.add_type(effect)
        effects.custom_derivatives_allowed_effects.add_type(effect)
        effects.remat_allowed_effects.add_type(effect)
        effects.partial_eval_kept_effects.add_type(effect)


# Loop-invariant hoisting
#
# Under grad, scan's partial evaluation moves equations that do not depend on the loop out of it, effects and all: five
# messages become one (JAX 0.8.1 to 0.12). JAX's own comment in _scan_known_hoisting says how to disable it; both places
# that hoist are told to leave loops alone that communicate.


def dont_hoist(effect: type[Effect]) -> None:
    """Keep scan's partial evaluation from hoisting anything out of a loop that has an effect of this type."""

    def communicates(jaxpr: Any) -> bool:
        return any(isinstance(e, effect) for e in jaxpr.effects)

    hoist = loops._scan_known_hoisting

    def known_hoisting(jaxpr: Any, consts: Sequence[Any], num_res: int, *more: Any) -> Any:
        if communicates(jaxpr):
            return jaxpr, consts, [False] * num_res, []
        return hoist(jaxpr, consts, num_res, *more)

    loops._scan_known_hoisting = known_hoisting

    # Under jax.checkpoint the same is done inline: run that function with a partial_eval that does not hoist.
    rule = pe.partial_eval_jaxpr_custom_rules[loops.scan_p]
    without_hoisting = _with_partial_eval(rule, partial_eval_jaxpr_nounits=_split_nothing_off)

    def rule_for_remat(saveable: Any, unknown: Any, instantiate: Any, eqn: Any) -> Any:
        chosen = without_hoisting if communicates(eqn.params["jaxpr"]) else rule
        return chosen(saveable, unknown, instantiate, eqn)

    pe.partial_eval_jaxpr_custom_rules[loops.scan_p] = rule_for_remat


def _split_nothing_off(jaxpr: Any, unknowns: Sequence[bool], instantiate: Any) -> Any:
    """partial_eval_jaxpr_nounits for a loop body, leaving all in the loop."""
    # The loop takes the hoisted part's results (here the constants themselves) before its other inputs, which is the
    # order that it has, unless some constant is a mutable reference.
    if list(unknowns) != sorted(unknowns):
        return pe.partial_eval_jaxpr_nounits(jaxpr, unknowns, instantiate)
    avals = [a for a, unknown in zip(jaxpr.in_avals, unknowns, strict=True) if not unknown]
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    hoisted = _without_names(jax.make_jaxpr(lambda *consts: consts)(*arguments))
    return hoisted, jaxpr, [True] * len(jaxpr.out_avals), avals


def keep_under_checkpoint(effect: type[Effect]) -> None:
    """Keep what jax.checkpoint leaves for the backward pass if it has the effect, though no result needs it.

    A Send that this rank's result does not depend on has an adjoint nevertheless. JAX 0.8.1 to 0.12 see to that for jit
    and scan, but not for checkpoint.
    """

    def new_eqn_recipe(trace: Any, tracers: Any, outs: Any, primitive: Any, params: Any, effs: Any, *more: Any) -> Any:
        recipe = pe.new_eqn_recipe(trace, tracers, outs, primitive, params, effs, *more)
        if any(isinstance(e, effect) for e in effs):
            trace.effect_handles.append(pe.EffectHandle(tracers, recipe))
        return recipe

    rule = pe.custom_partial_eval_rules[ad_checkpoint.remat_p]
    pe.custom_partial_eval_rules[ad_checkpoint.remat_p] = _with_partial_eval(rule, new_eqn_recipe=new_eqn_recipe)


def freeze_finished_elements(effect: type[Effect]) -> None:
    """Give vmap of a while_loop its meaning where the condition communicates: elements that are done keep their values.

    With an ordered effect in the condition, JAX 0.8.1 to 0.12 goes on with all elements until the last one is done. The
    condition is moved into the loop's body, and its result into the carry.
    """
    rule = batching.fancy_primitive_batchers[loops.while_p]

    def batch(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        cut = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        if not any(isinstance(e, effect) for e in cond.effects) or not condition_is_mapped(axis, dims, cut, cond, body):
            return rule(axis, args, dims, **params)

        def loop(*args: Any) -> Any:
            of_cond, of_body, init = args[: cut[0]], args[cut[0] : cut[1]], args[cut[1] :]

            def with_condition(state: Sequence[Any]) -> Any:
                return *core.jaxpr_as_fun(cond)(*of_cond, *state), *state

            step = lambda carry: with_condition(core.jaxpr_as_fun(body)(*of_body, *carry[1:]))  # noqa: E731
            return jax.lax.while_loop(lambda carry: carry[0], step, with_condition(init))[1:]

        name = None if axis.name is core.no_axis_name else axis.name
        mapped = jax.vmap(loop, tuple(dims), axis_size=axis.size, axis_name=name, spmd_axis_name=axis.spmd_name)
        out = mapped(*args)
        return out, (0,) * len(out)

    def condition_is_mapped(axis: Any, dims: Any, cut: tuple[int, int], cond: Any, body: Any) -> bool:
        """Whether elements differ in it; found as JAX does, by what the body makes of the carry until nothing changes."""
        mapped = [d is not None for d in dims]
        of_cond, of_body, carry = mapped[: cut[0]], mapped[cut[0] : cut[1]], mapped[cut[1] :]
        while True:
            _, found = batching.batch_jaxpr(body, axis, [*of_body, *carry], instantiate=carry)
            if list(found) == carry:
                break
            carry = [a or b for a, b in zip(carry, found, strict=True)]
        _, (condition,) = batching.batch_jaxpr(cond, axis, [*of_cond, *carry], instantiate=False)
        return bool(condition)

    batching.fancy_primitive_batchers[loops.while_p] = batch


class _PartialEval:
    """jax._src.interpreters.partial_eval with some functions replaced."""

    def __init__(self, replaced: dict[str, Any]):
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(pe, name)


def _with_partial_eval(rule: Any, **replaced: Any) -> Any:
    """Return one of JAX's rules with some functions of partial_eval replaced, for it alone."""
    return types.FunctionType(
        rule.__code__,
        {**rule.__globals__, "pe": _PartialEval(replaced)},
        rule.__name__,
        rule.__defaults__,
        rule.__closure__,
    )


def _without_names(closed: Any) -> Any:
    """A closed jaxpr that does not claim to know the names of its arguments, which JAX would compare with the loop's."""
    plain = closed.jaxpr.replace(debug_info=closed.jaxpr.debug_info.with_unknown_names())
    return closed.replace(jaxpr=plain) if closed.jaxpr is not closed else plain


# What a missing link looks like: see the first sharp bit of docs/differentiation.md.


class OperationPrimitive(Primitive):  # type: ignore[misc]
    """A primitive that is told, as its parameter `unlinked`, when a differentiation passes it by.

    Then none of its operands depends on what is differentiated, and its derivative will not run on this rank.
    """

    def bind_with_trace(self, trace: Any, args: Any, *more: Any) -> Any:
        *avals, params = more  # JAX 0.8 has no avals here
        if hasattr(trace, "to_primal_tangent_pair") and any(_is_inexact(x) for x in args):
            moving = [type(trace.to_primal_tangent_pair(x)[1]) is not Zero for x in args]
            params = params | {"unlinked": not any(moving)}
        return super().bind_with_trace(trace, args, *avals, params)


def _is_inexact(x: Any) -> bool:
    return bool(jax.numpy.issubdtype(core.typeof(x).dtype, np.inexact))


# Lowering


def call_site(context: Any) -> tuple[str, str] | None:
    """Where the user's program calls the operation being lowered, in two forms, or None.

    Returns: a name that stays when lines are added above the calling function, and "path:line (function)".
    """
    codes, offsets = context.traceback.raw_frames() if context.traceback else ((), ())
    for code, offset in zip(codes, offsets, strict=True):
        if source_info_util.is_user_filename(code.co_filename):
            frame = source_info_util.raw_frame_to_frame(code, offset)
            file, function, line = frame.file_name, frame.function_name, frame.start_line
            name = f"{os.path.basename(file)}:{function}+{line - code.co_firstlineno}"
            return name, f"{file}:{line} ({function})"
    return None


def calling_frame() -> types.FrameType | None:
    """The frame of the user's program that makes the call at hand."""
    frame = inspect.currentframe()
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def site_of(frame: types.FrameType) -> tuple[str, str]:
    """As call_site, of where a frame is."""
    file, function, line = frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
    return f"{os.path.basename(file)}:{function}+{line - frame.f_code.co_firstlineno}", f"{file}:{line} ({function})"


_is_users = functools.cache(source_info_util.is_user_filename)


def register_lowering(
    primitive: Any, rule: Callable[..., Any], platform: str | None = None, cacheable: bool = True
) -> None:
    """Say how a primitive is lowered.

    Args:
      platform: None is every platform.
      cacheable: whether equal operations, at different places of the program, may share what is made of one.
    """
    mlir.register_lowering(primitive, rule, platform=platform, cacheable=cacheable)


def lower_as(function: Callable[..., Any], several: bool = False) -> Callable[..., Any]:
    """Return a lowering rule that runs `function` on the operands; it returns one result, or several."""
    return mlir.lower_fun(function, multiple_results=several)  # type: ignore[no-any-return]


def lower_here(context: Any, function: Callable[..., Any], x: Any, aval: ShapedArray, out: ShapedArray) -> Any:
    """Emit a pure function of one array in a rule of another primitive."""
    nothing = mlir.TokenSet()
    inner = context.replace(avals_in=[aval], avals_out=[out], tokens_in=nothing, tokens_out=None)
    return mlir.lower_fun(function, multiple_results=False)(inner, x)[0]


def devices_of(context: Any) -> int:
    """How many devices the program being lowered is for."""
    axis_context = context.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    devices = mesh.size if mesh is not None else getattr(axis_context, "num_devices", 1)
    return int(devices or 1)


def custom_call(
    context: Any,
    target: str,
    operands: Sequence[Any],
    result_avals: Sequence[ShapedArray],
    effect: Effect,
    attributes: dict[str, int | tuple[int, ...]],
    aliases: dict[int, int],
) -> list[Any]:
    """Emit a side-effecting custom call on the effect's token chain; return its results without the token."""
    token = context.tokens_in.get(effect)
    types_ = [_ir_type(context, a) for a in result_avals]
    call = mlir.custom_call(
        target,
        result_types=[*types_, mlir.token_type()],
        operands=[*operands, token],
        backend_config={k: _ir_attribute(v) for k, v in attributes.items()},
        has_side_effect=True,
        api_version=4,
        operand_output_aliases=aliases,
        operand_layouts=[*(_row_major(o.type) for o in operands), ()],
        result_layouts=[*(_row_major(t) for t in types_), ()],
    )
    *results, token = call.results
    context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return list(results)


def _ir_attribute(value: int | tuple[int, ...]) -> Any:
    if isinstance(value, tuple):
        return ir.DenseI64ArrayAttr.get(value)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


# JAX 0.8 had no context here.
if len(inspect.signature(mlir.aval_to_ir_type).parameters) == 1:

    def _ir_type(context: Any, aval: ShapedArray) -> Any:
        return mlir.aval_to_ir_type(aval)
else:

    def _ir_type(context: Any, aval: ShapedArray) -> Any:
        return mlir.aval_to_ir_type(context.module_context, aval)


PROGRAM = "mpi_program"


def primitives_in(jaxpr: Any) -> set[str]:
    """Return the names of the primitives of a closed jaxpr, at any depth."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    found = {eqn.primitive.name for eqn in inner.eqns}
    return found.union(*(primitives_in(sub) for eqn in inner.eqns for sub in core.jaxprs_in_params(eqn.params)))


def _with_results_of(closed: Any, prefix: str) -> Any:
    """A closed jaxpr that also returns the results of some primitives, in its uppermost level."""
    jaxpr = closed.jaxpr
    more = [v for eqn in jaxpr.eqns if eqn.primitive.name.startswith(prefix) for v in eqn.outvars]
    more = [v for v in more if not isinstance(v, core.DropVar)]
    if not more:
        return closed
    debug_info = jaxpr.debug_info.with_unknown_names()
    return closed.replace(jaxpr=jaxpr.replace(outvars=[*jaxpr.outvars, *more], debug_info=debug_info))


def inline(
    context: Any,
    operands: Sequence[Any],
    jaxpr: Any,
    effect: Effect,
    end: str,
    beside: Sequence[str] = (),
    keep: str = "",
) -> list[Any]:
    """Emit a closed jaxpr in a rule whose first result is not its own.

    Its order by `effect` begins here, and ends with a call of the target `end`. The targets `beside` are called at any time;
    what primitives whose names begin with `keep` have made lasts as long.
    """
    ordered = effects.ordered_effects.filter_in(jaxpr.effects)
    fresh = mlir.TokenSet.create([e for e in ordered if e == effect])
    given = {e: fresh.get(e) if e == effect else context.tokens_in.get(e) for e in ordered}
    n_results = len(jaxpr.out_avals)
    if beside:
        jaxpr = _with_results_of(jaxpr, keep)
    inner = context.replace(
        avals_out=jaxpr.out_avals,
        tokens_in=mlir.TokenSet(given),
        tokens_out=None,
    )
    # From inside, an argument that is given away cannot be told from one that is not.
    name = PROGRAM if all(map(must_stay, operands)) else f"giving_{PROGRAM}"
    results = mlir.core_call_lowering(inner, *operands, name=name, call_jaxpr=jaxpr)
    kept, results = results[n_results:], results[:n_results]
    last = inner.tokens_out if effect in given else mlir.TokenSet.create([effect])
    # Where something runs beside, the end is the end of it all: XLA gives the memory of what has ended, even a token's, to
    # what comes later in its schedule, which then would have to wait for it.
    awaited = [*results, *kept] if beside else []
    custom_call(inner.replace(tokens_in=last, tokens_out=None), end, awaited, [], effect, {}, {})
    for target in beside:
        mlir.custom_call(target, result_types=[], operands=[], backend_config={}, has_side_effect=True, api_version=4)
    outer = [e for e in ordered if e != effect]
    if outer:
        context.set_tokens_out(context.tokens_in.update_tokens(inner.tokens_out.subset(outer)))
    return list(results)


def run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr."""
    return core.jaxpr_as_fun(jaxpr)(*args)  # type: ignore[no-any-return]


def constant(value: np.ndarray) -> Any:
    """Return an IR constant."""
    return mlir.ir_constant(value)


def must_stay(value: Any) -> bool:
    """Whether an IR value is a constant, or an argument of the whole program that is not given away (donated)."""
    owner = value.owner
    if not isinstance(owner, ir.Block):
        operation = getattr(owner, "operation", owner)
        if operation.name == "stablehlo.broadcast_in_dim":  # of a number, say
            operation = getattr(operation.operands[0].owner, "operation", None)
        return operation is not None and bool(operation.name == "stablehlo.constant")
    function = owner.owner
    name = function.attributes["sym_name"].value if "sym_name" in function.attributes else ""
    if name != "main":
        return bool(name.startswith(PROGRAM))
    if "arg_attrs" not in function.attributes:
        return True
    given = ir.DictAttr(function.attributes["arg_attrs"][ir.BlockArgument(value).arg_number])
    return not any(mark in given for mark in ("tf.aliasing_output", "jax.buffer_donor"))


def _row_major(type_: Any) -> tuple[int, ...]:
    return tuple(range(ir.RankedTensorType(type_).rank - 1, -1, -1))


# Values


def as_array(x: Any) -> Any:
    """Return a Python number as an array: JAX hands over what users gave to jax.jvp, or to what jax.linearize returns.

    Some releases make it a number with a dtype, which has no shape either.
    """
    return x if hasattr(x, "shape") else jax.numpy.asarray(x)


def register_jvp(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Set the jvp rule of a primitive. In jax.jvp a primal may be a Python number; the rule gets arrays."""

    def on_arrays(primals: Sequence[Any], tangents: Sequence[Any], /, **params: Any) -> Any:
        moving = [d if type(d) is Zero else as_array(d) for d in tangents]
        return rule(list(map(as_array, primals)), moving, **params)

    ad.primitive_jvps[primitive] = on_arrays


def abstract_operand(x: Any) -> ShapedArray:
    """Return the abstract value of an operand of a transpose rule, be it linear or not."""
    return x.aval if is_undefined_primal(x) else core.typeof(x)


def key_words(aval: ShapedArray) -> ShapedArray:
    """The shape and dtype of the words of typed PRNG keys."""
    return core.physical_aval(aval)


def wrap_key(words: Any, dtype: Any) -> Any:
    """Return the typed PRNG keys of some words."""
    return jax.random.wrap_key_data(words, impl=dtype._impl)


def device_array(x: Any, aval: ShapedArray, sharding: Any, device: Any, committed: bool) -> Array:
    """Return x as a JAX array on a device: jax.device_put without its 90 us of generality."""
    return put(aval, sharding, [x], [device], committed)  # type: ignore[no-any-return]


def put(*args: Any) -> Any:
    """As batched_device_put, and no implicit transfer, which jax.transfer_guard may disallow."""
    try:
        return xla_client.batched_device_put(*args)
    except jax.errors.JaxRuntimeError:
        with config.explicit_device_put_scope():
            return xla_client.batched_device_put(*args)


# The runtime token: what JAX hands from one program with an ordered effect to the next. A program starts when its
# arguments are there, so this empty array keeps the programs of a thread in order.


@functools.cache
def _ready_token(device: Any) -> RuntimeToken:
    """The token that there is when no program is under way."""
    return RuntimeToken(jax.device_put(np.zeros(0, bool), device))


def order_by(effect: Effect, under_way: Callable[[], Array | None], flush: Callable[[], None]) -> None:
    """Let JAX's runtime token and jaxcomm.jit keep one order, and make the token cheap.

    JAX puts the token on the device again for each call, which takes 100 us or more. And it keeps a failed program's
    token as the input of the next, whose results then fail in turn, for ever, though the user has seen the error and
    dealt with it.

    Args:
      effect: the ordered effect.
      under_way: returns what this thread's last program returned to wait for, or None if it has ended.
      flush: waits for this thread's programs.
    """
    tokens = type(runtime_tokens)
    token_input, block = tokens.get_token_input, tokens.block_until_ready

    def get_token_input(self: Any, eff: Any, devices: Any) -> Any:
        if eff != effect or len(devices) > 1:
            return token_input(self, eff, devices)
        array = under_way()
        if array is None:
            return _ready_token(devices[0])
        if array.sharding.device_set == {devices[0]}:
            return RuntimeToken(array)
        self.current_tokens[eff] = RuntimeToken(array)
        return token_input(self, eff, devices)

    def block_until_ready(self: Any) -> None:
        try:
            flush()
        finally:
            block(self)

    tokens.get_token_input, tokens.block_until_ready = get_token_input, block_until_ready
