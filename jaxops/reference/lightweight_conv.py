"""Lightweight convolution in plain `jax.numpy`: its definition."""

from __future__ import annotations

from typing import Any

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
    starts: jax.Array | None = None,
    state: jax.Array | None = None,
    slots: jax.Array | None = None,
) -> jax.Array:
    """y[..., t, c] = act(bias[..., c] + sum_k weight[..., h, k] x[..., t + k d - padding, c]).

    d is the dilation and h = c // (C // H); x is (..., T, C) or, for "NCT", (..., C, T), zero
    outside 0 <= t < T; weight is (..., H, K). The leading dimensions broadcast.

    With `starts` (..., T), the first step of the segment of each step, x is zero at steps of other
    segments. `state`, of x's layout, has the `padding` steps before step 0: the segment of step t
    has those from starts[..., t] on. With `slots` (..., T), it is (..., slots, padding, C) and has
    the steps before each segment, zeros for segments whose slot is outside of it.
    """
    if data_format == "NCT":
        x = jnp.swapaxes(x, -1, -2)
        state = None if state is None else jnp.swapaxes(state, -1, -2)
    dtype = accumulation_dtype(x, weight, *(() if bias is None else (bias,)))
    time, channels = x.shape[-2:]
    heads, taps = weight.shape[-2:]
    weight = jnp.repeat(weight.astype(dtype), channels // heads, axis=-2)
    cores = ((x, 2), (weight, 2), (starts, 1), (state, 2 if slots is None else 3))
    batch = _batch(cores)
    state = None if state is None else state.astype(dtype)
    read, offsets = _reader(x.astype(dtype), taps, padding, dilation, starts, state, slots)

    def add_tap(total, tap_and_offset):
        tap, offset = tap_and_offset
        taken = jax.lax.dynamic_index_in_dim(weight, tap, axis=-1, keepdims=False)
        return total + taken[..., None, :] * read(tap, offset), None

    if 0 in (*batch, time, channels):
        total = jnp.zeros((*batch, time, channels), dtype)
    else:
        # Unrolled, XLA fuses the taps into one pass over x; very long filters stay a loop.
        unroll = max(1, taps - 1) if taps <= 64 else 1
        # The first tap's sum varies over a mesh as the others do, under `shard_map`.
        total, _ = add_tap(jnp.zeros((), dtype), (0, offsets[0]))
        taps_left = (jnp.arange(1, taps), offsets[1:])
        total, _ = jax.lax.scan(add_tap, total, taps_left, unroll=unroll)
    if bias is not None:
        total = total + bias.astype(dtype)[..., None, :]
    y = ACTIVATIONS[activation](total).astype(x.dtype)
    return jnp.swapaxes(y, -1, -2) if data_format == "NCT" else y


def _batch(cores):
    return jnp.broadcast_shapes(*(a.shape[: a.ndim - n] for a, n in cores if a is not None))


def _reader(x, taps, padding, dilation, starts: Any = None, state: Any = None, slots: Any = None):
    """A function of a tap and its offset, what it reads at every step of x, and all offsets."""
    time = x.shape[-2]
    known = (taps - 1) * dilation if jax.export.is_symbolic_dim(x.shape[-2]) else time
    # Taps that reach beyond the sequence all read the same zeros, however far they reach.
    has_rows = state is not None and slots is None
    before = padding if has_rows else min(known, padding)
    after = min(known, (taps - 1) * dilation - padding)
    offsets = [max(-before, min(after, k * dilation - padding)) for k in range(taps)]
    if has_rows:
        assert state is not None  # `has_rows` says so
        batch = _batch(((x, 2), (state, 2)))
        parts = [jnp.broadcast_to(a, (*batch, *a.shape[-2:])) for a in (state, x)]
        rows = jnp.concatenate(parts, axis=-2)
    else:
        rows = _pad(x, before, 0, -2)
    rows = _pad(rows, 0, after, -2)
    starts_of_rows = None if starts is None else _pad(starts, before, after, -1)
    steps = jnp.arange(time, dtype=jnp.int32)

    def read(tap, offset):
        read = jax.lax.dynamic_slice_in_dim(rows, offset + before, time, axis=-2)
        if starts_of_rows is None:
            return read
        of_row = jax.lax.dynamic_slice_in_dim(starts_of_rows, offset + before, time, axis=-1)
        at = steps + offset
        is_inside = jnp.where(at < 0, at >= starts, of_row == starts)
        read = jnp.where(is_inside[..., None], read, 0)
        if slots is None:
            return read
        assert state is not None  # slots are numbers of states
        # The true offset: a state has steps further back than the sequence is long.
        back = steps + (tap * dilation - padding) - starts
        count = state.shape[-3]
        has_state = (back < 0) & (slots >= 0) & (slots < count)
        index = jnp.where(has_state, slots * padding + padding + back, 0)
        batch = _batch(((state, 3), (index, 1)))
        flat = state.reshape(*state.shape[:-3], count * padding, state.shape[-1])
        flat = jnp.broadcast_to(flat, (*batch, *flat.shape[-2:]))
        index = jnp.broadcast_to(index, (*batch, time))
        taken = jnp.take_along_axis(flat, index[..., None], axis=-2) if flat.size else 0
        return jnp.where(has_state[..., None], taken, read)

    return read, jnp.asarray(offsets, jnp.int32)


def _pad(array, before, after, axis):
    pads = [(0, 0)] * array.ndim
    pads[axis] = (before, after)
    return jnp.pad(array, pads)


def lightweight_conv_filter_grad(
    x: jax.Array,
    g: jax.Array,
    *,
    heads: int,
    taps: int,
    padding: int,
    dilation: int = 1,
    data_format: str = "NTC",
    starts: jax.Array | None = None,
) -> jax.Array:
    """dweight[..., h, k] = sum_{t, c in h} g[..., t, c] x[..., t + k dilation - padding, c].

    With `starts`, x is zero at steps of other segments.
    """
    if data_format == "NCT":
        x, g = jnp.swapaxes(x, -1, -2), jnp.swapaxes(g, -1, -2)
    dtype = accumulation_dtype(x, g)
    time, channels = x.shape[-2:]
    batch = _batch(((x, 2), (g, 2), (starts, 1)))
    if 0 in (*batch, time, channels):
        return jnp.zeros((*batch, heads, taps), dtype)
    read, offsets = _reader(x.astype(dtype), taps, padding, dilation, starts)
    g = g.astype(dtype)

    def correlate(_, tap_and_offset):
        return None, jnp.sum(read(*tap_and_offset) * g, axis=-2)

    unroll = taps if taps <= 64 else 1
    _, by_channel = jax.lax.scan(correlate, None, (jnp.arange(taps), offsets), unroll=unroll)
    by_head = by_channel.reshape(*by_channel.shape[:-1], heads, channels // heads).sum(axis=-1)
    return jnp.moveaxis(by_head, 0, -1)
