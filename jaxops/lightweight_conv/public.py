"""The public function of lightweight convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks, compat
from jaxops._core.public import public_function
from jaxops._families import sequences
from jaxops.activations import ACTIVATIONS, Activation, find_name
from jaxops.lightweight_conv import primitives

_SHORT_TAPS = 8  # kShortTaps of common/lightweight_conv_choice.h: tensor cores run longer filters


@public_function
def lightweight_conv(
    x: ArrayLike,
    weight: ArrayLike,
    *,
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
    """Depthwise convolution over time whose filters are shared by the channels of a head.

    ``y[b, t, c] = act(bias[c] + sum_k weight[h, k] * x[b, t + k * dilation - P, c])`` with
    ``h = c // (C // H)`` and x zero outside ``0 <= t < T``. The paper uses it in place of
    self-attention with ``weight = jax.nn.softmax(w)`` over the taps.

    Packed sequences have `segment_ids`: x is zero as well at steps of other segments than that of
    t. With an `initial_state`, x has its rows at the steps ``-P <= t < 0``, for the first segment.

    Under `jax.checkpoint`, policies such as
    ``jax.checkpoint_policies.save_only_these_names("lightweight_conv")`` can name the result.

    Args:
      x: (..., T, C), or (..., C, T) with data_format "NCT"; float16, bfloat16, float32 or float64.
      weight: (H, K), K >= 1, H >= 1 dividing C; any float dtype. H = C is a plain depthwise
        convolution.
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
      >>> weight = jnp.ones((1, 2))  # heads, taps
      >>> jaxops.lightweight_conv(x, weight, padding="causal", activation="silu").shape
      (1, 5, 1)
      >>> jaxops.lightweight_conv(x, weight, segment_ids=jnp.array([[0, 0, 0, 1, 1]]))[0, :, 0]
      Array([1., 3., 5., 4., 9.], dtype=float32)

    Source: Wu et al. 2019, "Pay Less Attention with Lightweight and Dynamic Convolutions",
    https://arxiv.org/abs/1901.10430.
    """
    name = primitives.NAME
    data_format = sequences.data_format(name, data_format)
    activation = checks.choice(name, "activation", find_name(activation), ACTIVATIONS)
    return_final_state = checks.boolean(name, "return_final_state", return_final_state)
    x = sequences.sequence_array(name, "x", x, data_format)
    time_axis = sequences.time_axis(data_format)
    weight, bias = check_parameters(name, x, x.shape[-3 - time_axis], weight, bias, data_format)
    taps = weight.shape[1]
    dilation = checks.integer(name, "dilation", dilation, 1)
    padding = sequences.resolve_padding(name, padding, (taps - 1) * dilation)
    rank, time = x.ndim - 2, x.shape[time_axis]
    has_state = initial_state is not None and padding > 0
    kept = sequences.taps_that_read(padding, dilation, taps, time, has_state)
    if len(kept) < taps:
        # Kernels multiply by every tap that they get, also where it reads nothing but zeros.
        if compat.has_explicit_axes(weight):  # a slice of taps that devices share is an error
            weight = sequences.take_steps(weight, kept.start, len(kept), -1)
        else:
            weight = jax.lax.slice_in_dim(weight, kept.start, kept.stop, axis=1)
    arrays: list[jax.Array | None] = [x, sequences.unvarying(weight, rank), None, None, None]
    if bias is not None:
        arrays[2] = sequences.unvarying(bias, rank)
    state = starts = None
    if initial_state is not None:
        state = sequences.state_array(name, "initial_state", initial_state, x, padding, data_format)
    if segment_ids is not None:
        why = "(..., T), one id a step of x"
        ids = sequences.segment_ids_array(name, segment_ids, (*x.shape[:-2], time), why)
        starts = sequences.segment_starts(ids, 0 if state is None else -padding)
        starts = checkpoint_name(starts, name)  # gradients need them, too
    final = None
    if return_final_state:
        final = sequences.final_state(x, padding, data_format, starts, state)
    arrays[3] = starts
    if has_state:
        arrays[4] = state
    else:
        padding -= kept.start * dilation
        padding, dilation = sequences.bounded(padding, dilation, len(kept), time)
    options = primitives.Options(padding, dilation, data_format)
    result_dtype = x.dtype
    if any(a is not None and a.dtype == jnp.float64 for a in arrays):
        arrays[0] = x.astype(jnp.float64)
    elif x.dtype == jnp.float32 and weight.dtype.itemsize == 2 and len(kept) > _SHORT_TAPS:
        # The numbers stay the same, and tensor cores multiply filters of x's dtype.
        arrays[1] = sequences.unvarying(weight.astype(jnp.float32), rank)
    y = primitives.conv(*arrays, options=options, activation=activation)
    y = checkpoint_name(y.astype(result_dtype), name)
    return y if final is None else (y, final)


def check_parameters(
    function: str,
    x: jax.Array,
    channels: int,
    weight: ArrayLike,
    bias: ArrayLike | None,
    data_format: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Weight and bias as arrays that fit the channels of x."""
    weight = checks.float_array(function, "weight", weight, 2, "(H, K)")
    heads, taps = weight.shape
    if heads < 1 or taps < 1:
        raise ValueError(
            f"{function}: weight must have shape (H, K) with H >= 1 and K >= 1, got {weight.shape}"
        )
    if channels % heads:
        raise ValueError(
            f"{function}: the H = {heads} rows of weight must divide the C = {channels} channels "
            f"of x {x.shape} ({data_format})"
        )
    if bias is not None:
        bias = checks.float_array(function, "bias", bias, 1, "(C,)")
        checks.shape(function, "bias", bias, (channels,), "(C,), one entry a channel of x")
    return weight, bias
