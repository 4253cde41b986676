"""Dynamic convolution in plain `jax.numpy`: its definition.

Every function takes sequences (..., T, C), or (..., C, T) with data_format "NCT", and weights
(..., T, H, K) whose leading dimensions broadcast. `starts` (..., T) has the first step of the
segment of each step; a tap in another segment contributes zero.
"""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp

from jaxops._core.dtypes import accumulation_dtype
from jaxops.activations import ACTIVATIONS


def dynamic_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    starts: jax.Array | None = None,
    state: jax.Array | None = None,
    *,
    padding: int,
    dilation: int = 1,
    normalize: bool = False,
    activation: str | None = None,
    data_format: str = "NTC",
) -> jax.Array:
    """y[..., t, c] = act(bias[..., c] + sum_k p[..., t, h, k] x[..., t + k dilation - padding, c]).

    p is the weight, or its softmax over the taps, and h = c // (C // H). x is zero outside
    0 <= t < T, except that `state` (..., padding, C) precedes step 0 for the segments whose start
    is not above the step that is read. bias is (..., C).
    """
    if data_format == "NCT":
        x = jnp.swapaxes(x, -1, -2)
        state = None if state is None else jnp.swapaxes(state, -1, -2)
    arrays = (weight, *(a for a in (bias, state) if a is not None))
    dtype = accumulation_dtype(x, *arrays)
    p = probabilities(weight, dtype, normalize)
    (time, channels), taps = x.shape[-2:], weight.shape[-1]
    shifted = _Shifted(x.astype(dtype), state, starts, taps, padding, dilation)

    def add_tap(total, k):
        valid, rows = shifted.at(k)
        tap = jax.lax.dynamic_index_in_dim(p, k, axis=-1, keepdims=False)
        tap = by_channel(jnp.where(valid[..., None], tap, 0), channels)
        return total + tap * rows, None

    shape = (*_batch(x, weight, starts, state), time, channels)
    if 0 in shape:
        total = jnp.zeros(shape, dtype)
    else:
        # The first tap's sum varies over a mesh as the others do, under `shard_map`.
        total, _ = add_tap(jnp.zeros((), dtype), 0)
        total, _ = jax.lax.scan(add_tap, total, jnp.arange(1, taps), unroll=_unroll(taps - 1))
    if bias is not None:
        total = total + bias.astype(dtype)[..., None, :]
    y = ACTIVATIONS[activation](total).astype(x.dtype)
    return jnp.swapaxes(y, -1, -2) if data_format == "NCT" else y


def dynamic_conv_input_grad(
    g: jax.Array,
    weight: jax.Array,
    starts: jax.Array | None = None,
    *,
    padding: int,
    dilation: int = 1,
    normalize: bool = False,
    data_format: str = "NTC",
) -> jax.Array:
    """dx[..., s, c] = sum_k p[..., t, h, k] g[..., t, c] with t = s + padding - k dilation."""
    if data_format == "NCT":
        g = jnp.swapaxes(g, -1, -2)
    dtype = accumulation_dtype(g, weight)
    p = probabilities(weight, dtype, normalize)
    (time, channels), taps = g.shape[-2:], weight.shape[-1]
    # Step s reads what tap K - 1 - k of a convolution with the mirrored padding reads.
    mirrored = (taps - 1) * dilation - padding
    shifted = _Shifted(g.astype(dtype), None, starts, taps, mirrored, dilation)
    of_steps = p.reshape(*p.shape[:-2], p.shape[-2] * taps)
    filters = _Shifted(of_steps, None, starts, taps, mirrored, dilation)

    def add_tap(total, k):
        _, rows = shifted.at(k)
        _, tap = filters.at(k)
        tap = tap.reshape(*tap.shape[:-1], *p.shape[-2:])
        tap = jax.lax.dynamic_index_in_dim(tap, taps - 1 - k, axis=-1, keepdims=False)
        return total + by_channel(tap, channels) * rows, None

    total = jnp.zeros((*_batch(g, weight, starts), time, channels), dtype)
    if total.size:
        steps = jnp.arange(taps)[::-1]
        total, _ = jax.lax.scan(add_tap, total, steps, unroll=_unroll(taps))
    dx = total.astype(g.dtype)
    return jnp.swapaxes(dx, -1, -2) if data_format == "NCT" else dx


def dynamic_conv_weight_grad(
    x: jax.Array,
    g: jax.Array,
    starts: jax.Array | None = None,
    *,
    heads: int,
    taps: int,
    padding: int,
    dilation: int = 1,
    data_format: str = "NTC",
) -> jax.Array:
    """dp[..., t, h, k] = sum_{c in h} g[..., t, c] x[..., t + k dilation - padding, c]."""
    if data_format == "NCT":
        x, g = jnp.swapaxes(x, -1, -2), jnp.swapaxes(g, -1, -2)
    dtype = accumulation_dtype(x, g)
    time, channels = x.shape[-2:]
    x = jnp.broadcast_to(x, (*_batch(x, g[..., None], starts), time, channels))
    if x.size == 0:
        return jnp.zeros((*x.shape[:-2], time, heads, taps), dtype)
    shifted = _Shifted(x.astype(dtype), None, starts, taps, padding, dilation)
    g = g.astype(dtype)

    def correlate(_, k):
        valid, rows = shifted.at(k)
        products = jnp.where(valid[..., None], g, 0) * rows
        return None, products.reshape(*products.shape[:-1], heads, -1).sum(axis=-1)

    _, by_tap = jax.lax.scan(correlate, None, jnp.arange(taps), unroll=_unroll(taps))
    return jnp.moveaxis(by_tap, 0, -1)


def softmax_grad(weight: jax.Array, dp: jax.Array) -> jax.Array:
    """The cotangent of `weight` for that of its softmax over the last axis; so too its tangent."""
    dtype = accumulation_dtype(weight, dp)
    p, dp = probabilities(weight, dtype, True), dp.astype(dtype)
    return p * (dp - jnp.sum(p * dp, axis=-1, keepdims=True))


def probabilities(weight: jax.Array, dtype, normalize: bool) -> jax.Array:
    """The weight, or its softmax over the last axis, in `dtype`."""
    weight = weight.astype(dtype)
    return jax.nn.softmax(weight, axis=-1) if normalize else weight


def by_channel(tap: jax.Array, channels: int) -> jax.Array:
    """(..., T, H) with an entry a channel."""
    return jnp.repeat(tap, channels // tap.shape[-1], axis=-1)


def _batch(x, weight, starts, state=None):
    """The batch dimensions of all of these arrays together."""
    shapes = [x.shape[:-2], weight.shape[:-3]]
    shapes += [] if starts is None else [starts.shape[:-1]]
    shapes += [] if state is None else [state.shape[:-2]]
    return jnp.broadcast_shapes(*shapes)


def _unroll(count):
    # Unrolled, XLA fuses the taps into one pass over x; very long filters stay a loop.
    return max(1, count) if count < 64 else 1


class _Shifted:
    """The rows of (..., T, C) that each tap reads, zero where a tap is not valid."""

    def __init__(self, rows, state, starts, taps, padding, dilation):
        time = rows.shape[-2]
        self._time, self._starts, self._state = time, starts, state is not None
        reach = (taps - 1) * dilation
        limit = reach if jax.export.is_symbolic_dim(time) else time
        # Taps that reach beyond the rows all read the same zeros, however far they reach.
        before = padding if state is not None else min(limit, padding)
        after = min(limit, reach - padding)
        pads = [(0, 0)] * (rows.ndim - 2)
        if state is None:
            self._rows = jnp.pad(rows, [*pads, (before, after), (0, 0)])
        else:
            batch = jnp.broadcast_shapes(rows.shape[:-2], state.shape[:-2])
            rows = jnp.broadcast_to(rows, (*batch, *rows.shape[-2:]))
            state = jnp.broadcast_to(state.astype(rows.dtype), (*batch, *state.shape[-2:]))
            rows = jnp.concatenate([state, rows], axis=-2)
            self._rows = jnp.pad(rows, [*pads, (0, after), (0, 0)])
        shifts = [k * dilation - padding for k in range(taps)]
        self._begins = jnp.asarray([max(-before, min(after, s)) + before for s in shifts])
        # int32 holds these bounds; a step more or less outside of the sequence does not matter.
        bound = 2**30
        self._shifts = jnp.asarray([max(-bound, min(bound, s)) for s in shifts], jnp.int32)
        if starts is not None:
            pads = [(0, 0)] * (starts.ndim - 1)
            self._padded_starts = jnp.pad(starts, [*pads, (before, after)])

    def at(self, k):
        """Whether tap k of each step is valid, and the rows that it reads."""
        begin = self._begins[k]
        rows = jax.lax.dynamic_slice_in_dim(self._rows, begin, self._time, axis=-2)
        shift = self._shifts[k]
        steps = jnp.arange(self._time, dtype=jnp.int32)
        # No sums of steps and shifts, which may be beyond int32.
        is_before = steps < -shift
        valid = ~is_before & (steps < self._time - shift)
        if self._starts is not None:
            starts = self._starts
            own = jax.lax.dynamic_slice_in_dim(self._padded_starts, begin, self._time, axis=-1)
            valid = valid & (own == starts)
            if self._state:
                valid = valid | (is_before & (steps + shift >= starts))
        elif self._state:
            valid = valid | is_before
        return valid, jnp.where(valid[..., None], rows, 0)
