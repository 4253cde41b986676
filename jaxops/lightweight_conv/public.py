"""The public function of lightweight convolution."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops.activations import ACTIVATIONS
from jaxops.lightweight_conv import primitives

_DATA_FORMATS = ("NTC", "NCT")


def lightweight_conv(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    padding: str | int = "causal",
    dilation: int = 1,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    data_format: str = "NTC",
) -> jax.Array:
    """Depthwise convolution over time whose filters are shared by the channels of a head.

    ``y[b, t, c] = act(bias[c] + sum_k weight[h, k] * x[b, t + k * dilation - P, c])`` with
    ``h = c // (C // H)`` and x zero outside ``0 <= t < T``. The paper uses it in place of
    self-attention with ``weight = jax.nn.softmax(w)`` over the taps.

    Under `jax.checkpoint`, policies such as
    ``jax.checkpoint_policies.save_only_these_names("lightweight_conv")`` can name the result.

    Args:
      x: (B, T, C), or (B, C, T) with data_format "NCT"; float16, bfloat16, float32 or float64.
      weight: (H, K), K >= 1, H >= 1 dividing C; any float dtype. H = C is a plain depthwise
        convolution.
      padding: "causal" for P = (K - 1) * dilation, "same" for P = (K - 1) * dilation // 2, or an
        int P with 0 <= P <= (K - 1) * dilation. The result always has T steps.
      dilation: steps between neighbouring taps, >= 1.
      bias: (C,), any float dtype.
      activation: None, "relu", "silu" or "gelu" (the tanh form, `jax.nn.gelu`'s default).
      data_format: "NTC" or "NCT"; neither is transposed.

    Returns:
      An array of x's shape and dtype. Arithmetic is in float32, or in float64 where an argument is.

    Raises:
      TypeError: an argument is not of a float dtype, or an option not a static integer.
      ValueError: a shape, a padding, a dilation or a name is out of what is listed above.

    Source: Wu et al. 2019, "Pay Less Attention with Lightweight and Dynamic Convolutions",
    https://arxiv.org/abs/1901.10430.
    """
    name = primitives.NAME
    data_format = checks.choice(name, "data_format", data_format, _DATA_FORMATS)
    activation = checks.choice(name, "activation", activation, ACTIVATIONS)
    x_shape = "(B, T, C)" if data_format == "NTC" else "(B, C, T)"
    x = checks.float_array(name, "x", x, 3, x_shape)
    weight = checks.float_array(name, "weight", weight, 2, "(H, K)")
    channels = x.shape[2] if data_format == "NTC" else x.shape[1]
    heads, taps = weight.shape
    if heads < 1 or taps < 1:
        raise ValueError(
            f"{name}: weight must have shape (H, K) with H >= 1 and K >= 1, got {weight.shape}"
        )
    if channels % heads:
        raise ValueError(
            f"{name}: the H = {heads} rows of weight must divide the C = {channels} channels of x "
            f"{x.shape} ({data_format})"
        )
    dilation = checks.integer(name, "dilation", dilation, 1)
    padding = _resolve_padding(name, padding, (taps - 1) * dilation)
    time = x.shape[1] if data_format == "NTC" else x.shape[2]
    padding, dilation = _bounded(padding, dilation, taps, time)
    arrays = [x, weight[None]]  # weight and bias do not vary over the batch dimension of x
    if bias is not None:
        bias = checks.float_array(name, "bias", bias, 1, "(C,)")
        checks.shape(name, "bias", bias, (channels,), "(C,), one entry a channel of x")
        arrays.append(bias[None])
    result_dtype = x.dtype
    if any(a.dtype == jnp.float64 for a in arrays):
        arrays[0] = x.astype(jnp.float64)
    y = primitives.conv(
        *arrays,
        options=primitives.Options(padding, dilation, data_format),
        flip=False,
        activation=activation,
    )
    return checkpoint_name(y.astype(result_dtype), name)


def _resolve_padding(function: str, padding: str | int, reach: int) -> int:
    if isinstance(padding, str):
        named = {"causal": reach, "same": reach // 2}
        checks.choice(function, "padding", padding, named)
        return named[padding]
    return checks.integer(function, "padding", padding, 0, reach)


def _bounded(padding: int, dilation: int, taps: int, time: int) -> tuple[int, int]:
    """A padding and a dilation with the same terms, of which the dilation is at most 2 * time.

    If taps are further apart than that, at most one is within the sequence at any step, and it is
    always the same one. A single tap has no distance to another.
    """
    if taps == 1:
        return 0, 1
    if jax.export.is_symbolic_dim(time):
        return padding, dilation
    far = max(1, 2 * time)
    if dilation <= far:
        return padding, dilation
    tap, back = divmod(padding, dilation)
    if back < time:
        return tap * far + back, far
    ahead = dilation - back
    return (tap + 1) * far - min(ahead, time), far
