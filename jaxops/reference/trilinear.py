"""Trilinear interpolation between the corners of cells in plain `jax.numpy`: its definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxops._core.dtypes import accumulation_dtype


def trilinear_interpolate(features: jax.Array, points: jax.Array) -> jax.Array:
    """out[..., f] = sum_ijk a_i(u) a_j(v) a_k(w) features[..., 4i + 2j + k, f].

    (u, v, w) = points, a_0(u) = (1 - u) / 2 and a_1(u) = (1 + u) / 2; features (..., 8, F), points
    (..., 3). The leading dimensions broadcast.
    """
    dtype = accumulation_dtype(features, points)
    p = points.astype(dtype)
    factors = jnp.stack([(1 - p) / 2, (1 + p) / 2], axis=-1)  # (..., axis, corner)
    u, v, w = (factors[..., i, :] for i in range(3))
    weights = u[..., :, None, None] * v[..., None, :, None] * w[..., None, None, :]
    weights = weights.reshape(*weights.shape[:-3], 8)
    return jnp.sum(weights[..., None] * features.astype(dtype), axis=-2).astype(features.dtype)
