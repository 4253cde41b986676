"""Steps of the causal dynamic convolution in plain `jax.numpy`: their definition."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp

from jaxops._core.dtypes import accumulation_dtype
from jaxops.activations import ACTIVATIONS
from jaxops.reference.dynamic_conv import by_channel, dynamic_conv, probabilities
from jaxops.reference.lightweight_conv_step import gather, scatter


def dynamic_conv_step(
    x: jax.Array,
    state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    indices: jax.Array | None = None,
    *,
    dilation: int = 1,
    normalize: bool = False,
    activation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """y[..., b, s, c] = act(bias[..., c] + sum_k p[..., b, s, h, k] rows[..., b, s + k d, c]).

    p is the weight (..., B, S, H, K), or its softmax over the taps; all else is as in
    `lightweight_conv_step`.
    """
    parameters = (weight,) if bias is None else (weight, bias)
    wide = accumulation_dtype(x, state, *parameters)
    moved = x.dtype if x.dtype == state.dtype else wide
    window = gather(x.astype(moved), state.astype(moved), indices)
    before, steps = state.shape[-2], x.shape[-2]
    state = scatter(window, state, indices)
    if not jax.export.is_symbolic_dim(steps) and steps == 1:
        # XLA compiles a product of all taps and their sum to one kernel.
        p = probabilities(weight[..., 0, :, :], wide, normalize)
        taps = by_channel(jnp.swapaxes(p, -1, -2), x.shape[-1])
        rows = window[..., ::dilation, :].astype(wide)
        y = jnp.sum(rows * taps, axis=-2, keepdims=True)
        if bias is not None:
            y = y + bias.astype(wide)[..., None, None, :]
        return ACTIVATIONS[activation](y).astype(x.dtype), state
    y = dynamic_conv(
        window[..., before:, :],
        weight,
        None if bias is None else bias[..., None, :],
        state=window[..., :before, :] if before else None,
        padding=before,
        dilation=dilation,
        normalize=normalize,
        activation=activation,
    )
    return y.astype(x.dtype), state
