"""Grids of features in space, which the layers of `linen` and `nnx` share."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import jaxops
from jaxops._core import checks
from jaxops._core.dtypes import accumulation_dtype
from jaxops.grid_sample import taps

default_grid_init = nn.initializers.zeros_init()

# The primes of instant-ngp, an axis each.
_PRIMES = (1, 2654435761, 805459861)


def default_table_init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Uniform in [-1e-4, 1e-4], as in the paper of `HashGrid`."""
    return jax.random.uniform(key, shape, dtype, -1e-4, 1e-4)


def grid_shape(layer: str, resolution: Sequence[int], features: int) -> tuple[int, ...]:
    """The shape of a voxel grid's parameter."""
    if not checks.is_sequence(resolution) or len(resolution) not in (2, 3):
        raise ValueError(
            f"{layer}: resolution must have two or three integers, got "
            f"{checks.describe(resolution)}"
        )
    sizes = [checks.integer(layer, "resolution", n, 1) for n in resolution]
    return (*sizes, checks.integer(layer, "features", features, 1))


def check_points(layer: str, points: Any, axes: int) -> jax.Array:
    """The points of a call as an array (..., axes), or an error in the name of the layer."""
    points = checks.float_array(layer, "points", points, None, "(..., axes)")
    if points.shape[-1:] != (axes,):
        raise ValueError(f"{layer}: points must have {axes} coordinates, got shape {points.shape}")
    return points


@dataclasses.dataclass(frozen=True)
class Levels:
    """The levels of a hash grid over some axes: dense ones come before hashed ones.

    Attributes:
      axes: 2 or 3.
      cells: the cells along an axis of each level, which has one vertex more.
      entries: the rows of the table that each level has.
    """

    axes: int
    cells: tuple[int, ...]
    entries: tuple[int, ...]

    @classmethod
    def of(
        cls,
        layer: str,
        axes: int,
        num_levels: int,
        features_per_level: int,
        log2_table_size: int,
        base_resolution: int,
        growth: float,
    ) -> Levels:
        """The levels of a layer with these arguments, checked."""
        checks.integer(layer, "num_levels", num_levels, 1)
        checks.integer(layer, "features_per_level", features_per_level, 1)
        checks.integer(layer, "log2_table_size", log2_table_size, 1, 30)
        checks.integer(layer, "base_resolution", base_resolution, 1)
        if axes not in (2, 3):
            raise ValueError(f"{layer}: points must have two or three coordinates, got {axes}")
        factor = checks.scalar(layer, "growth", growth, integers=True)
        if not isinstance(factor, float) or not 1 <= factor <= 64:
            raise ValueError(
                f"{layer}: growth must be a number in [1, 64], got {checks.describe(growth)}"
            )
        # Powers of floats overflow for levels that are far too fine.
        exponent = math.log2(base_resolution) + (num_levels - 1) * math.log2(factor)
        levels = range(num_levels if exponent < 25 else 1)
        # A power such as 16 * 2 ** (1 / 3) ** 3 may be rounded to just below a whole number.
        cells = tuple(math.floor(base_resolution * factor**n * (1 + 1e-12)) for n in levels)
        if exponent >= 25 or cells[-1] >= 2**24:
            raise ValueError(
                f"{layer}: the finest level must have fewer than 2^24 cells along an axis, got "
                f"2^{exponent:.1f}"
            )
        entries = tuple(min((n + 1) ** axes, 2**log2_table_size) for n in cells)
        if sum(entries) >= 2**31:
            raise ValueError(f"{layer}: all levels must have fewer than 2^31 entries together")
        return cls(axes, cells, entries)

    @property
    def total(self) -> int:
        """The rows of the table."""
        return sum(self.entries)

    def encode(self, table: jax.Array, points: jax.Array) -> jax.Array:
        """The features (..., levels F) of points (..., axes) in a table (total, F)."""
        is_dense = [
            (n + 1) ** self.axes == e for n, e in zip(self.cells, self.entries, strict=True)
        ]
        found, begin = [], 0
        for dense, n, rows in zip(is_dense, self.cells, self.entries, strict=True):
            if dense:
                grid = jax.lax.slice_in_dim(table, begin, begin + rows)
                grid = grid.reshape(*[n + 1] * self.axes, table.shape[1])
                found.append(jaxops.grid_sample(grid, points, padding_mode="border"))
                begin += rows
        if not all(is_dense):
            rest = jax.lax.slice_in_dim(table, begin, self.total)
            found.append(self._hashed(rest, points, self.cells[sum(is_dense) :]))
        return jnp.concatenate(found, -1)

    def _hashed(self, table, points, cells):
        """The features of levels that share tables of one size each, in one call."""
        dtype = accumulation_dtype(table, points)
        size = table.shape[0] // len(cells)  # a power of two
        p = points.astype(dtype)[..., None, :]
        lost = jnp.isnan(p).any(-1)  # NaNs read the first cell and are marked below
        p = jnp.clip(jnp.where(lost[..., None], -1, p), -1, 1)
        scale = np.array(cells, dtype)[:, None]
        x = (p + 1) * (scale / 2)  # (..., levels, axes)
        lower = jnp.clip(jnp.floor(jax.lax.stop_gradient(x)), 0, scale - 1)
        fraction = x - lower
        lower = lower.astype(jnp.uint32)
        indices, weights = [], []
        for corner in itertools.product((0, 1), repeat=self.axes):
            index: Any = 0
            weight: Any = 1
            for a, c in enumerate(corner):
                index = index ^ ((lower[..., a] + np.uint32(c)) * np.uint32(_PRIMES[a]))
                weight = weight * (fraction[..., a] if c else 1 - fraction[..., a])
            indices.append((index & np.uint32(size - 1)).astype(jnp.int32))
            weights.append(weight)
        offsets = np.arange(len(cells), dtype=np.int32)[:, None] * np.int32(size)
        all_indices = jnp.stack(indices, -1) + offsets
        wide = table.astype(dtype) if dtype == jnp.float64 else table
        result = taps.sum_taps(
            wide, all_indices[..., None, :], [jnp.stack(weights, -1)], points.ndim
        )
        result = result.reshape(*points.shape[:-1], len(cells) * table.shape[1])
        marked = jnp.where(lost, points.sum(-1, keepdims=True).astype(result.dtype), result)
        return marked.astype(table.dtype)
