"""Sampling of volumes at points in plain `jax.numpy`: its definition."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxops._core.dtypes import accumulation_dtype
from jaxops.reference import taps


def grid_sample(
    volume: jax.Array,
    points: jax.Array,
    *,
    method: str = "linear",
    padding_mode: str = "zeros",
    align_corners: bool = True,
    coordinates: str = "normalized",
    cval: ArrayLike = 0.0,
    point_rank: int = 1,
) -> jax.Array:
    """out[..., p, f] = sum_c w_c(points[..., p]) volume[..., entry_c(points[..., p]), f].

    volume is (..., *sizes, F) and points (..., *P, len(sizes)), with `point_rank` dimensions in P
    and the same leading ones. "pixel" coordinates are reflected about entries with `align_corners`.
    """
    pixel = coordinates == "pixel"
    if method == "linear" and padding_mode == "constant":
        dtype = accumulation_dtype(volume, points)
        total = grid_sample(
            volume.astype(dtype),
            points,
            align_corners=align_corners,
            coordinates=coordinates,
            point_rank=point_rank,
        )
        sizes = volume.shape[-1 - points.shape[-1] : -1]
        beyond = outside(points.astype(dtype), sizes, align_corners, pixel)
        return add_outside(total, beyond, cval).astype(volume.dtype)
    if method == "cubic" or padding_mode in ("wrap", "constant"):
        return _by_stencils(
            volume, points, method, padding_mode, align_corners, pixel, cval, point_rank
        )
    axes = points.shape[-1]
    batch = points.shape[: points.ndim - 1 - point_rank]
    sizes, width = volume.shape[len(batch) : -1], volume.shape[-1]
    dtype = accumulation_dtype(volume, points)
    p = points.astype(dtype)
    # A coordinate that is not a number has no place: it is put outside here and marked at the end.
    lost = taps.lost(p)
    at = [
        _positions(jnp.where(lost, -2, p[..., a]), sizes[a], padding_mode, align_corners, pixel)
        for a in range(axes)
    ]
    places = []
    for (x, inside), n in zip(at, sizes, strict=True):
        # Where there are more entries than this dtype counts one by one, that is rounded.
        is_last = x == n - 1
        if method == "nearest":
            entries = (jnp.where(is_last, n - 1, _whole(jnp.round(x))),)
            factors = (1.0,)
        else:
            # The last entry belongs to the interval before it, where there is one.
            ends = is_last & (n > 1)
            lower = jnp.where(ends, n - 2, _whole(jnp.floor(x)))
            of_end = 1 + (x - jax.lax.stop_gradient(x))
            fraction = jnp.where(ends, of_end, x - lower.astype(dtype))
            entries, factors = (lower, lower + 1), (1 - fraction, fraction)
        places.append((inside & ~lost, entries, factors))

    shape = (math.prod(batch), *points.shape[len(batch) : -1], width)
    rows = volume.astype(dtype).reshape(shape[0], math.prod(sizes), width)
    total = jnp.zeros((*points.shape[:-1], width), dtype)
    if not total.size or not rows.size:
        return _mark(total, p, lost, method).astype(volume.dtype)
    for corner in itertools.product(range(len(places[0][1])), repeat=axes):
        index: Any = 0
        weight: Any = 1
        valid: Any = True
        for c, n, (inside, entries, factors) in zip(corner, sizes, places, strict=True):
            entry = jnp.where(inside, entries[c], -1)
            valid = valid & (entry >= 0) & (entry < n)
            index = index * n + jnp.clip(entry, 0, n - 1)
            weight = weight * factors[c]
        index = index.reshape(shape[0], -1, 1)
        values = jnp.take_along_axis(rows, index, axis=1, mode="clip").reshape(total.shape)
        values = jnp.where(valid[..., None], values, 0)
        weight = jnp.where(valid, weight, 0)
        total = total + weight[..., None] * values
    return _mark(total, p, lost, method).astype(volume.dtype)


def _whole(x):
    return jax.lax.stop_gradient(x).astype(jnp.int32)


def _mark(total, p, lost, method):
    """The rows of points with a NaN: NaN, and so are the derivatives in their coordinates."""
    if method == "nearest":
        return total
    # XLA fuses the sum of slices, but not a reduction.
    whole = functools.reduce(operator.add, [p[..., a] for a in range(p.shape[-1])])
    found = jnp.where(lost, whole, 0)[..., None]
    return jnp.where(lost[..., None], found * jnp.nan, total)


def _by_stencils(
    volume, points, method, padding_mode, align_corners, pixel, cval, point_rank
) -> jax.Array:
    dtype = accumulation_dtype(volume, points)
    axes = points.shape[-1]
    sizes = volume.shape[volume.ndim - axes - 1 : -1]
    indices, weights = stencils(
        points.astype(dtype), sizes, method, padding_mode, align_corners, pixel
    )
    total = taps.sum_taps(volume.astype(dtype), indices, weights, point_rank)
    if padding_mode == "constant":
        total = add_outside(total, taps.outside(indices, weights), cval)
    return mark(total, points.astype(dtype), method).astype(volume.dtype)


def add_outside(total: jax.Array, weight: jax.Array, cval: ArrayLike) -> jax.Array:
    """The result plus `cval`, which may be NaN, times the weight of the entries outside."""
    weight, cval = weight[..., None], jnp.asarray(cval, total.dtype)
    # A finite one stays where the weight is zero, whose slope is not.
    cval = jnp.where((weight == 0) & ~jnp.isfinite(cval), 0, cval)
    return total + weight.astype(total.dtype) * cval


def outside(points: jax.Array, sizes: Sequence[int], align_corners: bool, pixel: bool) -> jax.Array:
    """The weight (...) of the entries outside around points, with "linear"."""
    inside: Any = 1
    for a, n in enumerate(sizes):
        x = entry_position(points[..., a], n, align_corners, pixel)
        # As with the entries, the slope at the last one is that inside, if there is an inside.
        after = x > n - 1 if n > 1 else x >= 0
        of_axis = jnp.where(x < 0, x + 1, jnp.where(after, n - x, 1))
        inside = inside * jnp.where(of_axis > 0, of_axis, 0)
    return 1 - inside


def stencils(
    points: jax.Array,
    sizes: Sequence[int],
    method: str,
    padding_mode: str,
    align_corners: bool,
    pixel: bool,
) -> tuple[jax.Array, list[jax.Array]]:
    """The indices (..., axes, K) that points (..., axes) read, and the weights of each axis.

    A point with a NaN reads no entry.
    """
    lost = taps.lost(points)
    padding = "zeros" if padding_mode == "constant" else padding_mode
    if padding == "reflection":
        padding = "mirror" if align_corners else "reflect"
    positions = [
        entry_position(jnp.where(lost, 0, points[..., a]), n, align_corners, pixel)
        for a, n in enumerate(sizes)
    ]
    return taps.stencils(positions, lost, sizes, method, padding)


def mark(total: jax.Array, points: jax.Array, method: str) -> jax.Array:
    """The result with the rows of points with a NaN: NaN, or zeros with "nearest"."""
    return _mark(total, points, taps.lost(points), method)


def entry_position(p: jax.Array, n: int, align_corners: bool, pixel: bool) -> jax.Array:
    """Where coordinates are along an axis of n entries, in entries, before any padding."""
    if pixel:
        return p
    if n == 1 and align_corners:
        return jnp.zeros_like(p)
    return (p + 1) * ((n - 1) / 2) if align_corners else (p + 1) * (n / 2) - 0.5


def _positions(p, n: int, padding_mode: str, align_corners: bool, pixel: bool):
    """Where coordinates are along an axis of n entries, in entries; and whether that counts."""
    x = entry_position(p, n, align_corners, pixel)
    if n == 1 and padding_mode != "zeros":
        x = jnp.zeros_like(p)  # every place is the only entry's, so that derivatives are zero
    last = n - 1
    if padding_mode == "zeros":
        inside = (x > -1) & ((x < n) | (x == last))
        return jnp.where(inside, x, -1), inside
    if padding_mode == "reflection":
        low, span = (0, n - 1) if align_corners else (-0.5, n)
        finite = jnp.isfinite(x) & (span > 0)
        within = jnp.where(finite, x, low)
        distance = jnp.where(within < low, low - within, within - low)
        period = max(2 * span, 1)
        distance = distance - period * jnp.floor(distance / period)
        folded = jnp.where(distance > span, 2 * span - distance, distance) + low
        x = jnp.where(finite, folded, x)
    x = jnp.where(x < 0, 0, jnp.where(x > last, last, x))
    return x, jnp.ones(x.shape, bool)
