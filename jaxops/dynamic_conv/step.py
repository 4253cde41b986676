"""Dynamic convolution of the next steps of sequences whose states are in a cache.

The primitive has the kernels of `lightweight_conv_step`, and its derivatives are those of a
composition as well: the convolution of the steps after the rows of their slots.
"""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks, rules
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator
from jaxops._core.public import public_function
from jaxops._families import sequences
from jaxops.activations import ACTIVATIONS, Activation, activation_name, find_name
from jaxops.dynamic_conv.primitives import NAME
from jaxops.dynamic_conv.public import check_bias, check_weight, dynamic_conv
from jaxops.reference import dynamic_conv_step as reference
from jaxops.reference.lightweight_conv_step import gather, scatter

_NAME = "dynamic_conv_step"

# Kernels compute the steps one after the other. More of them are computed as a sequence.
_MAX_STEPS = 8


@public_function
def dynamic_conv_step(
    x_t: ArrayLike,
    state: ArrayLike,
    weight: ArrayLike,
    *,
    normalize: bool = False,
    dilation: int = 1,
    bias: ArrayLike | None = None,
    activation: Activation = None,
    state_indices: ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The next step, or the next few, of causal `dynamic_conv` of sequences with cached states.

    Steps one by one, several at a time and `dynamic_conv` of the whole sequence give the same
    result, up to rounding; kernels of CPUs in float32 bit for bit. Kernels update the state in
    place, without a copy, where nothing else uses it: in the carry of a `jax.lax.scan`, or as an
    argument that `jax.jit` has in ``donate_argnums``. Policies of `jax.checkpoint` can name the
    result "dynamic_conv".

    Args:
      x_t: (B, C), or (B, S, C) for S steps; any float dtype.
      state: (slots, P, C) with P = (K - 1) * dilation: the last P inputs of each slot, oldest
        first; any float dtype.
      weight: (B, H, K), or (B, S, H, K) for S steps; any float dtype.
      normalize: as in `dynamic_conv`, as are dilation, bias and activation.
      state_indices: (B,), any integer dtype, all different: the slot of each sequence. Without it
        sequence b has slot b, and there are B slots. A sequence whose index is outside of
        [0, slots) is padding: it reads zeros and writes nothing.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (y, state): y of x_t's shape and dtype, and the states with those of the sequences moved on.

    Raises:
      TypeError, ValueError: as `dynamic_conv`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> state = jnp.zeros((1, 1, 1))  # slots, P, channels
      >>> weight = jnp.array([[[1.0, 2.0]]])  # batch, heads, taps
      >>> y_0, state = jaxops.dynamic_conv_step(jnp.array([[3.0]]), state, weight)
      >>> y_1, state = jaxops.dynamic_conv_step(jnp.array([[4.0]]), state, 2 * weight)
      >>> y_0.item(), y_1.item(), state.item()
      (6.0, 22.0, 4.0)
    """
    activation = checks.choice(_NAME, "activation", find_name(activation), ACTIVATIONS)
    normalize = checks.boolean(_NAME, "normalize", normalize)
    x = checks.float_array(_NAME, "x_t", x_t, None, "(B, C) or (B, S, C)")
    if x.ndim not in (2, 3):
        raise ValueError(f"{_NAME}: x_t must have shape (B, C) or (B, S, C), got {x.shape}")
    form = "(B, H, K)" if x.ndim == 2 else "(B, S, H, K)"
    weight = checks.float_array(_NAME, "weight", weight, x.ndim + 1, form)
    state = checks.float_array(_NAME, "state", state, 3, "(slots, P, C)")
    dilation = checks.integer(_NAME, "dilation", dilation, 1)
    taps = check_weight(_NAME, weight, x.shape[:-1], form, x.shape[-1], x.shape)
    batch, channels = x.shape[0], x.shape[-1]
    bias = None if bias is None else check_bias(_NAME, bias, channels)
    slots = batch if state_indices is None else state.shape[0]
    why = f"(slots, P, C) with P = {(taps - 1) * dilation} for x_t {x.shape}"
    checks.shape(_NAME, "state", state, (slots, (taps - 1) * dilation, channels), why)
    indices = sequences.slot_indices(_NAME, state_indices, batch)
    has_steps = x.ndim == 3
    operands = [x, state, weight] if has_steps else [x[:, None], state, weight[:, None]]
    if accumulation_dtype(*operands, *(() if bias is None else (bias,))) == np.float64:
        operands[0] = operands[0].astype(np.float64)
    operands += [] if bias is None else [bias]
    operands += [] if indices is None else [indices]
    steps = operands[0].shape[1]
    is_short = not jax.export.is_symbolic_dim(steps) and steps <= _MAX_STEPS
    compute = _operator if is_short else _composed
    y, state = compute(
        *operands,
        # A single tap has no distance to another.
        dilation=1 if taps == 1 else dilation,
        normalize=normalize,
        activation=activation,
        with_bias=bias is not None,
        with_indices=indices is not None,
    )
    return checkpoint_name(y.reshape(x.shape).astype(x.dtype), NAME), state


def _signature(*, with_bias, with_indices, **_):
    return sequences.step_signature(
        "{entries} steps heads taps", with_bias=with_bias, with_indices=with_indices
    )


def _reference(*operands, with_bias, with_indices, **options):
    named = sequences.step_operands(operands, with_bias=with_bias, with_indices=with_indices)
    return list(reference.dynamic_conv_step(*named, **options))


_operator = Operator(
    _NAME,
    signature=_signature,
    reference=_reference,
    dtypes=lambda x, state, *_, **__: [x.dtype, state.dtype],
    attributes=lambda *, dilation, normalize, activation, **_: {
        "dilation": np.int64(dilation),
        "normalize": np.bool_(normalize),
        "activation": activation_name(activation),
    },
    replicated=("steps", "rows", "taps", "entries", "cache"),
    aliases={1: 1},
)


def _composed(*operands, dilation, normalize, activation, with_bias, with_indices):
    """The operator in terms of the convolution, whose derivatives of every order there are."""
    x, state, weight, bias, indices = sequences.step_operands(
        operands, with_bias=with_bias, with_indices=with_indices
    )
    wide = x.dtype if x.dtype == state.dtype else accumulation_dtype(x, state)
    window = gather(x.astype(wide), state.astype(wide), indices)
    before = state.shape[-2]

    def convolve(rows, own, weight, *bias):
        return dynamic_conv(
            rows,
            weight,
            dilation=dilation,
            normalize=normalize,
            bias=bias[0] if bias else None,
            activation=activation,
            initial_state=own,
        )

    parameters = (weight,) if bias is None else (weight, bias)
    shapes = "(b,t,c),(b,p,c),(b,t,h,k)" + (",(c)" if with_bias else "")
    y = jnp.vectorize(convolve, signature=f"{shapes}->(b,t,c)")(
        window[..., before:, :], window[..., :before, :], *parameters
    )
    return [y.astype(x.dtype), scatter(window, state, indices)]


@_operator.def_jvp
def _jvp(primals, tangents, **params):
    return rules.jvp(functools.partial(_composed, **params), primals, tangents)


@_operator.def_transpose
def _transpose(cotangents, *operands, **params):
    return rules.transpose(functools.partial(_composed, **params), cotangents, operands)
