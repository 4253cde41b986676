"""Concatenation and splitting in plain `jax.numpy`: their definition."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def concatenate(
    arrays: Sequence[jax.Array],
    axis: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    padded_size: int | None = None,
) -> jax.Array:
    """The first `sizes[i]` entries of each array along `axis`, zeros up to `padded_size`."""
    sizes = [a.shape[axis] for a in arrays] if sizes is None else sizes
    parts = [
        jax.lax.slice_in_dim(a, 0, size, axis=axis) for a, size in zip(arrays, sizes, strict=True)
    ]
    whole = jnp.concatenate(parts, axis)
    return whole if padded_size is None else _pad(whole, axis, padded_size)


def split(
    array: jax.Array,
    sizes: Sequence[int],
    axis: int = 0,
    *,
    padded_sizes: Sequence[int] | None = None,
) -> tuple[jax.Array, ...]:
    """Neighbouring parts of `array`, each followed by zeros up to its padded size."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [
        jax.lax.slice_in_dim(array, start, start + size, axis=axis)
        for start, size in zip(starts, sizes, strict=True)
    ]
    if padded_sizes is None:
        return tuple(parts)
    return tuple(_pad(p, axis, size) for p, size in zip(parts, padded_sizes, strict=True))


def _pad(array, axis, size):
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths)
