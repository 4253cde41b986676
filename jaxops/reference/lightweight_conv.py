"""Lightweight convolution in plain `jax.numpy`: its definition."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp

from jaxops._core.dtypes import accumulation_dtype
from jaxops.activations import ACTIVATIONS


def lightweight_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    padding: int,
    dilation: int = 1,
    activation: str | None = None,
    data_format: str = "NTC",
) -> jax.Array:
    """y[..., t, c] = act(bias[..., c] + sum_k weight[..., h, k] x[..., t + k d - padding, c]).

    d is the dilation and h = c // (C // H); x is (..., T, C) or, for "NCT", (..., C, T), zero
    outside 0 <= t < T; weight is (..., H, K). The leading dimensions broadcast.
    """
    if data_format == "NCT":
        x = jnp.swapaxes(x, -1, -2)
    dtype = accumulation_dtype(x, weight, *(() if bias is None else (bias,)))
    time, channels = x.shape[-2:]
    heads, taps = weight.shape[-2:]
    weight = jnp.repeat(weight.astype(dtype), channels // heads, axis=-2)
    batch = jnp.broadcast_shapes(x.shape[:-2], weight.shape[:-2])
    rows, starts = _pad(x.astype(dtype), taps, padding, dilation)

    def add_tap(total, tap_and_start):
        tap, start = tap_and_start
        shifted = jax.lax.dynamic_slice_in_dim(rows, start, time, axis=-2)
        taken = jax.lax.dynamic_index_in_dim(weight, tap, axis=-1, keepdims=False)
        return total + taken[..., None, :] * shifted, None

    total = jnp.zeros((*batch, time, channels), dtype)
    if total.size:
        # Unrolled, XLA fuses the taps into one pass over x; very long filters stay a loop.
        unroll = taps if taps <= 64 else 1
        total, _ = jax.lax.scan(add_tap, total, (jnp.arange(taps), starts), unroll=unroll)
    if bias is not None:
        total = total + bias.astype(dtype)[..., None, :]
    y = ACTIVATIONS[activation](total).astype(x.dtype)
    return jnp.swapaxes(y, -1, -2) if data_format == "NCT" else y


def _pad(x: jax.Array, taps: int, padding: int, dilation: int) -> tuple[jax.Array, jax.Array]:
    """x (..., T, C) with zeros around it, and where in that the steps of each tap begin.

    Taps that reach beyond the sequence all read the same zeros, however far they reach.
    """
    time = x.shape[-2]
    if jax.export.is_symbolic_dim(time):
        time = (taps - 1) * dilation
    before, after = (min(time, p) for p in (padding, (taps - 1) * dilation - padding))
    starts = [max(-before, min(after, k * dilation - padding)) + before for k in range(taps)]
    pads = [(0, 0)] * (x.ndim - 2) + [(before, after), (0, 0)]
    return jnp.pad(x, pads), jnp.asarray(starts)


def lightweight_conv_filter_grad(
    x: jax.Array,
    g: jax.Array,
    *,
    heads: int,
    taps: int,
    padding: int,
    dilation: int = 1,
    data_format: str = "NTC",
) -> jax.Array:
    """dweight[..., h, k] = sum_{t, c in h} g[..., t, c] x[..., t + k dilation - padding, c]."""
    if data_format == "NCT":
        x, g = jnp.swapaxes(x, -1, -2), jnp.swapaxes(g, -1, -2)
    dtype = accumulation_dtype(x, g)
    time, channels = x.shape[-2:]
    rows, starts = _pad(x.astype(dtype), taps, padding, dilation)
    g = g.astype(dtype)

    def correlate(_, start):
        shifted = jax.lax.dynamic_slice_in_dim(rows, start, time, axis=-2)
        return None, jnp.sum(shifted * g, axis=-2)

    batch = jnp.broadcast_shapes(x.shape[:-2], g.shape[:-2])
    if 0 in (*batch, time, channels):
        return jnp.zeros((*batch, heads, taps), dtype)
    _, by_channel = jax.lax.scan(correlate, None, starts)
    by_head = by_channel.reshape(*by_channel.shape[:-1], heads, channels // heads).sum(axis=-1)
    return jnp.moveaxis(by_head, 0, -1)
