"""The public function of dynamic convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops._core.public import public_function
from jaxops._families import sequences
from jaxops.activations import ACTIVATIONS, Activation, find_name
from jaxops.dynamic_conv import primitives


@public_function
def dynamic_conv(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    normalize: bool = False,
    padding: str | int = "causal",
    dilation: int = 1,
    bias: ArrayLike | None = None,
    activation: Activation = None,
    segment_ids: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    return_final_state: bool = False,
    data_format: str = "NTC",
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Depthwise convolution over time with a filter of its own at each step and head.

    ``y[b, t, c] = act(bias[c] + sum_k p[b, t, h, k] * x[b, t + k * dilation - P, c])`` with
    ``h = c // (C // H)``, p the weight or with `normalize` its softmax over k, and x zero outside
    ``0 <= t < T``. The softmax is always that of all K taps.

    Packed sequences have `segment_ids`: x is zero as well at steps of other segments than that of
    t. With an `initial_state`, x has its rows at the steps ``-P <= t < 0``, for the first segment.

    Under `jax.checkpoint`, policies such as
    ``jax.checkpoint_policies.save_only_these_names("dynamic_conv")`` can name the result.

    Args:
      x: (..., T, C), or (..., C, T) with data_format "NCT"; float16, bfloat16, float32 or float64.
      weight: (..., T, H, K) in both layouts, K >= 1, H >= 1 dividing C, with the leading dimensions
        of x (`jax.vmap` broadcasts); any float dtype.
      normalize: whether p is the softmax of the weight over its taps, fused with the convolution.
      padding: "causal" for P = (K - 1) * dilation, "same" for P = (K - 1) * dilation // 2, or an
        int P with 0 <= P <= (K - 1) * dilation. The result always has T steps.
      dilation: steps between neighbouring taps, >= 1.
      bias: (C,), any float dtype.
      activation: None, "relu", "silu" (or "swish") or "gelu" (the tanh form, `jax.nn.gelu`'s
        default), in any case, or the function of `jax.nn`.
      segment_ids: (..., T), any integer dtype. A segment is a run of equal neighbouring ids.
      initial_state: (..., P, C), or (..., C, P) with data_format "NCT": the P inputs before those
        of x, oldest first; any float dtype. Without it they are zero.
      return_final_state: whether to return the initial state of a next call as well.
      data_format: "NTC" or "NCT"; neither is transposed.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      An array of x's shape and dtype. Arithmetic is in float32, or in float64 where an argument is.
      With return_final_state, (y, state): the last P inputs of the last segment of each row, with
      the initial state where that segment is the first and has fewer, else with zeros. The state
      has the shape of the initial state, and its dtype, or x's without one.

    Raises:
      TypeError: an argument is not of a float dtype, segment_ids not of an integer one, or an
        option not a static integer or bool.
      ValueError: a shape, a padding, a dilation or a name is out of what is listed above.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> x = jnp.arange(1.0, 6.0).reshape(1, 5, 1)  # batch, time, channels
      >>> weight = jnp.zeros((1, 5, 1, 2))  # batch, time, heads, taps
      >>> jaxops.dynamic_conv(x, weight, normalize=True)[0, :, 0]  # all taps are 1/2
      Array([0.5, 1.5, 2.5, 3.5, 4.5], dtype=float32)

    Source: Wu et al. 2019, "Pay Less Attention with Lightweight and Dynamic Convolutions",
    https://arxiv.org/abs/1901.10430.
    """
    name = primitives.NAME
    data_format = sequences.data_format(name, data_format)
    activation = checks.choice(name, "activation", find_name(activation), ACTIVATIONS)
    normalize = checks.boolean(name, "normalize", normalize)
    return_final_state = checks.boolean(name, "return_final_state", return_final_state)
    x = sequences.sequence_array(name, "x", x, data_format)
    time_axis = sequences.time_axis(data_format)
    time, channels = x.shape[time_axis], x.shape[-3 - time_axis]
    weight = checks.float_array(name, "weight", weight, x.ndim + 1, "(..., T, H, K)")
    taps = check_weight(name, weight, (*x.shape[:-2], time), "(..., T, H, K)", channels, x.shape)
    dilation = checks.integer(name, "dilation", dilation, 1)
    padding = sequences.resolve_padding(name, padding, (taps - 1) * dilation)
    rank = x.ndim - 2
    state = starts = final = None
    if bias is not None:
        bias = sequences.unvarying(check_bias(name, bias, channels), rank)
    if initial_state is not None:
        state = sequences.state_array(name, "initial_state", initial_state, x, padding, data_format)
    if segment_ids is not None:
        why = "(..., T), one id a step of x"
        ids = sequences.segment_ids_array(name, segment_ids, (*x.shape[:-2], time), why)
        starts = sequences.segment_starts(ids, 0 if state is None else -padding)
        starts = checkpoint_name(starts, name)  # gradients need them, too
    if return_final_state:
        final = sequences.final_state(x, padding, data_format, starts, state)
    if padding == 0:
        state = None
    if state is None:
        padding, dilation = sequences.bounded(padding, dilation, taps, time)
    result_dtype = x.dtype
    if any(a is not None and a.dtype == jnp.float64 for a in (weight, bias, state)):
        x = x.astype(jnp.float64)
    y = primitives.conv(
        x,
        weight,
        bias,
        starts,
        state,
        options=primitives.Options(padding, dilation, data_format, normalize),
        activation=activation,
    )
    y = checkpoint_name(y.astype(result_dtype), name)
    return y if final is None else (y, final)


def check_bias(function: str, bias: ArrayLike, channels: int) -> jax.Array:
    """The bias as an array of an entry a channel."""
    array = checks.float_array(function, "bias", bias, 1, "(C,)")
    checks.shape(function, "bias", array, (channels,), "(C,), one entry a channel of x")
    return array


def check_weight(
    function: str,
    weight: jax.Array,
    leading: tuple[int, ...],
    form: str,
    channels: int,
    shape: tuple[int, ...],
) -> int:
    """The number of taps of a weight whose shape, (*leading, H, K), fits that of x."""
    heads, taps = weight.shape[-2:]
    if heads < 1 or taps < 1:
        raise ValueError(
            f"{function}: weight must have shape {form} with H >= 1 and K >= 1, got {weight.shape}"
        )
    checks.shape(function, "weight", weight, (*leading, heads, taps), f"{form} for x {shape}")
    if channels % heads:
        raise ValueError(
            f"{function}: the H = {heads} heads of weight must divide the C = {channels} channels "
            f"of x {shape}"
        )
    return taps
