"""Interpolation of an array at coordinates in plain `jax.numpy`: its definition."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxops._core.dtypes import accumulation_dtype
from jaxops.reference import grid_sample, taps

# The padding of SciPy's modes, as `taps.stencil` names it.
PADDINGS = {
    "constant": "zeros",
    "nearest": "border",
    "wrap": "wrap",
    "mirror": "mirror",
    "reflect": "reflect",
}

# SciPy fills this number of entries around the volume in before it filters.
_MARGIN = 12


def map_coordinates(
    input: jax.Array,
    coordinates: Sequence[jax.Array],
    order: int,
    mode: str = "constant",
    cval: ArrayLike = 0.0,
) -> jax.Array:
    """The values of `jax.scipy.ndimage.map_coordinates`, and for order 3 those of SciPy."""
    arrays = jnp.broadcast_arrays(*coordinates)
    dtype = accumulation_dtype(input, *arrays)
    volume = input.astype(dtype)
    if order == 0:
        arrays = [a.astype(dtype) for a in arrays]
        return nearest(volume, arrays, mode, cval).astype(input.dtype)
    points = jnp.stack(arrays, -1).astype(dtype)
    if order == 3:
        volume, margin = prefiltered(volume, mode, cval)
        points = points + margin
    indices, weights = stencils(points, volume.shape, order, mode)
    total = taps.sum_taps(volume[..., None], indices, weights, points.ndim - 1)
    if mode == "constant":
        total = grid_sample.add_outside(total, taps.outside(indices, weights), cval)
    return grid_sample.mark(total, points, "linear")[..., 0].astype(input.dtype)


def nearest(
    input: jax.Array, coordinates: Sequence[jax.Array], mode: str, cval: ArrayLike
) -> jax.Array:
    """The entries nearest to coordinates of one shape; halves are rounded away from zero."""
    lost = functools.reduce(operator.or_, map(jnp.isnan, coordinates))
    indices = []
    for x, n in zip(coordinates, input.shape, strict=True):
        x = jax.lax.stop_gradient(jnp.where(lost, 0, x))
        x = jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO)
        x = taps.near(x, n, PADDINGS[mode])
        indices.append(taps.fold(x.astype(jnp.int32), n, PADDINGS[mode]))
    inside = functools.reduce(operator.and_, [index >= 0 for index in indices])
    if 0 in input.shape:
        values = jnp.full(inside.shape, cval, input.dtype)
    else:
        values = jnp.where(inside, input.at[tuple(indices)].get(mode="clip"), cval)
    return jnp.where(lost, 0, values)


def stencils(
    points: jax.Array, sizes: Sequence[int], order: int, mode: str
) -> tuple[jax.Array, list[jax.Array]]:
    """The indices (..., axes, K) that points (..., axes) read, and the weights of each axis."""
    method = {1: "linear", 3: "spline"}[order]
    lost = taps.lost(points)
    positions = [jnp.where(lost, 0, points[..., a]) for a in range(len(sizes))]
    return taps.stencils(positions, lost, sizes, method, PADDINGS[mode])


def prefiltered(volume: jax.Array, mode: str, cval: ArrayLike) -> tuple[jax.Array, int]:
    """The coefficients of the cubic B-splines through the entries, and the margin around them."""
    margin = _MARGIN if mode in ("constant", "nearest") else 0
    if mode == "constant":
        volume = jnp.pad(volume, margin, constant_values=jnp.asarray(cval, volume.dtype))
    elif mode == "nearest":
        volume = jnp.pad(volume, margin, mode="edge")
    extension = {"constant": "mirror", "nearest": "reflect"}.get(mode, mode)
    for axis in range(volume.ndim):
        volume = _filtered(volume, axis, extension)
    return volume, margin


def _filtered(x, axis: int, extension: str):
    """The inverse of the filter (1, 4, 1) / 6 over the extension of x.

    It is -6 z / ((1 - z S) (1 - z / S)) with S the shift by an entry and z = sqrt(3) - 2. A factor
    1 / (1 - z S) is the product of (1 + z^k S^k) for k = 1, 2, 4, ...; the powers of z fall below
    what the dtype tells apart.
    """
    n = x.shape[axis]
    if n < 2:  # every extension is constant
        return x
    pole = math.sqrt(3) - 2
    steps = [2**i for i in range(5 if x.dtype == jnp.float64 else 4)]
    reach = sum(steps)
    places = np.arange(-reach, n + reach, dtype=np.int32)
    x = jnp.take(x, taps.fold(places, n, extension), axis)
    for is_back in (False, True):
        for k in steps:
            first = jax.lax.slice_in_dim(x, 0, x.shape[axis] - k, axis=axis)
            second = jax.lax.slice_in_dim(x, k, x.shape[axis], axis=axis)
            x = first + pole**k * second if is_back else second + pole**k * first
    return -6 * pole * x
