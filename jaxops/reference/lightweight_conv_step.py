"""Steps of the causal lightweight convolution in plain `jax.numpy`: their definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxops._core.dtypes import accumulation_dtype
from jaxops.reference.lightweight_conv import lightweight_conv


def lightweight_conv_step(
    x: jax.Array,
    state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    indices: jax.Array | None = None,
    *,
    dilation: int = 1,
    activation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """y[..., b, s, c] = act(bias[..., c] + sum_k weight[..., h, k] rows[..., b, s + k d, c]).

    d is the dilation, h = c // (C // H), and rows has the P = (K - 1) d rows of entry b's slot and
    then its S rows of x. The new state of the slot has the last P of these. x is (..., B, S, C),
    state (..., slots, P, C), weight (..., H, K), indices (..., B) or None for the slots in their
    order. The leading dimensions broadcast.
    """
    parameters = (weight,) if bias is None else (weight, bias)
    wide = accumulation_dtype(x, state, *parameters)
    window = gather(x.astype(wide), state.astype(wide), indices)
    y = lightweight_conv(
        window,
        weight[..., None, :, :],
        None if bias is None else bias[..., None, :],
        padding=0,
        dilation=dilation,
        activation=activation,
    )
    return y[..., : x.shape[-2], :].astype(x.dtype), scatter(window, state, indices)


def gather(x: jax.Array, state: jax.Array, indices: jax.Array | None) -> jax.Array:
    """The rows of each entry's slot, zeros of a slot that is none, and then those of x."""
    if indices is not None:
        slots = state.shape[-3]
        state = jnp.vectorize(_gather, signature="(n,p,c),(b)->(b,p,c)")(
            state, _distinct(indices, slots)
        )
    batch = jnp.broadcast_shapes(x.shape[:-3], state.shape[:-3])
    both = [jnp.broadcast_to(a, (*batch, *a.shape[-3:])) for a in (state, x)]
    return jnp.concatenate(both, axis=-2)


def scatter(window: jax.Array, state: jax.Array, indices: jax.Array | None) -> jax.Array:
    """The state whose slots have the last rows of these windows."""
    rows = state.shape[-2]
    last = window[..., window.shape[-2] - rows :, :].astype(state.dtype)
    if indices is None:
        return last
    slots = state.shape[-3]
    return jnp.vectorize(_scatter, signature="(n,p,c),(b),(b,p,c)->(n,p,c)")(
        state, _distinct(indices, slots), last
    )


def _distinct(indices, slots):
    """The indices, those of no slot being different ones from `slots` on."""
    others = slots + jnp.arange(indices.shape[-1], dtype=indices.dtype)
    return jnp.where((indices >= 0) & (indices < slots), indices, others)


def _gather(state, indices):
    return state.at[indices].get(mode="fill", fill_value=0, unique_indices=True)


def _scatter(state, indices, rows):
    return state.at[indices].set(rows, mode="drop", unique_indices=True)
