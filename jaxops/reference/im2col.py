"""Patches of images and their transpose in plain `jax.numpy`: their definition.

Entry `tap` of patch `out` is, along each dimension of the window, entry
``out * stride + tap * dilation - low`` of the image, or zero where there is none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxops._core.dtypes import accumulation_dtype


def im2col(
    x: jax.Array,
    *,
    taps: Sequence[int],
    outs: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    low: Sequence[int],
    channels_last: bool,
) -> jax.Array:
    """(..., *in, C) -> (..., *outs, *taps, C), or (..., *in) -> (..., *taps, *outs)."""
    copy = functools.partial(
        _im2col,
        taps=taps,
        outs=outs,
        strides=strides,
        dilation=dilation,
        low=low,
        channels_last=channels_last,
    )
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return copy(x)
    of_half = jax.custom_jvp(copy)

    @of_half.defjvp
    def _jvp(primals, tangents):
        # The transpose adds what was copied from one entry, and does so in float32.
        tangent = copy(tangents[0].astype(jnp.float32)).astype(x.dtype)
        return of_half(*primals), tangent

    return of_half(x)


def _im2col(x, *, taps, outs, strides, dilation, low, channels_last):
    rank = len(taps)
    first = x.ndim - rank - channels_last
    at = first + rank if channels_last else first
    shape = (*x.shape[:first], *outs, *x.shape[first + rank :])
    shape = (*shape[:at], *taps, *shape[at:])
    if 0 in outs:
        return jnp.zeros(shape, x.dtype)
    widths = [(0, 0, 0)] * x.ndim
    for d in range(rank):
        reach = (outs[d] - 1) * strides[d] + (taps[d] - 1) * dilation[d] + 1
        widths[first + d] = (low[d], reach - x.shape[first + d] - low[d], 0)
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    entries = []
    for tap in itertools.product(*map(range, taps)):
        window = [slice(None)] * x.ndim
        for d in range(rank):
            start = tap[d] * dilation[d]
            window[first + d] = slice(start, start + (outs[d] - 1) * strides[d] + 1, strides[d])
        entries.append(padded[tuple(window)])
    return jnp.stack(entries, axis=at).reshape(shape)


def col2im(
    patches: jax.Array,
    *,
    ins: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    low: Sequence[int],
    channels_last: bool,
) -> jax.Array:
    """The transpose of `im2col` for an image that is `ins` large."""
    rank = len(ins)
    first = patches.ndim - 2 * rank - channels_last
    of_taps = first + rank if channels_last else first
    of_outs = first if channels_last else first + rank
    taps, outs = (patches.shape[i : i + rank] for i in (of_taps, of_outs))
    shape = (*patches.shape[:first], *ins, *patches.shape[first + 2 * rank :])
    dtype = accumulation_dtype(patches)
    image = jnp.zeros(shape, dtype)
    if 0 in outs:
        return image.astype(patches.dtype)
    for tap in itertools.product(*map(range, taps)):
        index = (*(slice(None),) * of_taps, *tap)
        entry = patches[index].astype(dtype)
        widths = [(0, 0, 0)] * entry.ndim
        for d in range(rank):
            start = tap[d] * dilation[d] - low[d]
            stop = start + (outs[d] - 1) * strides[d] + 1
            widths[first + d] = (start, ins[d] - stop, strides[d] - 1)
        image = image + jax.lax.pad(entry, jnp.zeros((), dtype), widths)
    return image.astype(patches.dtype)
