"""The layers of grids in space, against formulas in NumPy and between linen and nnx."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxops
from jaxops.flax import linen as linen_layers
from jaxops.flax import nnx as nnx_layers

SIZES = {"num_levels": 5, "features_per_level": 3}
OPTIONS = {"log2_table_size": 8, "base_resolution": 3, "growth": 1.6}


def encode(table, points, levels, log2_table_size, base_resolution, growth):
    """The formulas of the paper, point by point and level by level, in float64."""
    axes, rows = points.shape[1], []
    for point in points:
        found, begin = [], 0
        for level in range(levels):
            cells = int(base_resolution * growth**level)
            entries = min((cells + 1) ** axes, 2**log2_table_size)
            x = (np.clip(point, -1, 1) + 1) / 2 * cells
            lower = np.minimum(np.floor(x), cells - 1)
            total = 0
            for corner in itertools.product((0, 1), repeat=axes):
                vertex = [int(v) for v in lower + corner]
                weight = np.prod(np.where(corner, x - lower, 1 - (x - lower)))
                if entries < (cells + 1) ** axes:
                    index = 0
                    for v, prime in zip(vertex, (1, 2654435761, 805459861), strict=False):
                        index ^= v * prime
                    index %= entries
                else:
                    index = np.ravel_multi_index(vertex, [cells + 1] * axes)
                total = total + weight * table[begin + index]
            found.append(total)
            begin += entries
        rows.append(np.concatenate(found))
    assert begin == len(table)
    return np.array(rows)


@pytest.mark.parametrize("axes", [2, 3])
def test_hash_grid(axes):
    """Dense and hashed levels, points at both ends and outside; NaN stays in its row."""
    points = np.random.default_rng(0).uniform(-1.2, 1.2, (30, axes))
    points[0], points[1] = 1, -1
    layer = linen_layers.HashGrid(**SIZES, **OPTIONS)
    table = layer.init(jax.random.key(0), points)["params"]["table"]
    assert jnp.abs(table).max() <= 1e-4
    table = np.random.default_rng(1).standard_normal(table.shape)
    want = encode(table, points, SIZES["num_levels"], **OPTIONS)
    got = layer.apply({"params": {"table": jnp.asarray(table)}}, points)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    same = nnx_layers.HashGrid(axes, **SIZES, **OPTIONS, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    same.table[...] = jnp.asarray(table)
    shaped = nnx.jit(lambda layer, p: layer(p))(same, points.reshape(5, 6, axes))
    np.testing.assert_array_equal(shaped.reshape(30, -1), got)
    points[4, 0] = np.nan
    lost = np.asarray(layer.apply({"params": {"table": jnp.asarray(table)}}, points))
    assert np.isnan(lost[4]).all()
    np.testing.assert_array_equal(np.delete(lost, 4, 0), np.delete(np.asarray(got), 4, 0))


def test_gradients_of_a_hash_grid():
    """In the table they are the transpose; in points they are those of differences."""
    points = np.random.default_rng(0).uniform(-1, 1, (20, 3))
    layer = linen_layers.HashGrid(**SIZES, **OPTIONS, param_dtype=jnp.float64)
    variables = layer.init(jax.random.key(0), points)
    g = np.random.default_rng(1).standard_normal((20, 15))

    def loss(variables, points):
        return (layer.apply(variables, points) * g).sum()

    of_table, of_points = jax.grad(loss, (0, 1))(variables, points)
    table, of_table = variables["params"]["table"], of_table["params"]["table"]
    np.testing.assert_allclose((table * of_table).sum(), loss(variables, points), rtol=1e-9)
    step = 1e-7
    for a in range(3):
        moved = points + step * np.eye(3)[a]
        want = (layer.apply(variables, moved) - layer.apply(variables, points)) * g
        np.testing.assert_allclose(of_points[:, a], want.sum(1) / step, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"method": "cubic", "padding_mode": "border"}], ids=str)
def test_voxel_grid(options):
    points = np.random.default_rng(0).uniform(-1.2, 1.2, (2, 9, 3)).astype(np.float32)
    layer = linen_layers.VoxelGrid((4, 3, 5), 6, **options)
    value, variables = layer.init_with_output(jax.random.key(0), points)
    assert not value.any()
    grid = jax.random.normal(jax.random.key(1), (4, 3, 5, 6), jnp.float32)
    assert variables["params"]["grid"].shape == grid.shape
    want = jaxops.grid_sample(grid, points, **options)
    np.testing.assert_array_equal(layer.apply({"params": {"grid": grid}}, points), want)
    same = nnx_layers.VoxelGrid((4, 3, 5), 6, **options, rngs=nnx.Rngs(0))
    same.grid[...] = grid
    np.testing.assert_array_equal(same(points), want)
    half = layer.clone(dtype=jnp.bfloat16).apply({"params": {"grid": grid}}, points)
    assert half.dtype == jnp.bfloat16


def test_arguments_are_checked():
    points = np.zeros((2, 3), np.float32)
    for call, message in (
        (lambda: linen_layers.VoxelGrid((4,), 6), "VoxelGrid: resolution must have two or three"),
        (lambda: linen_layers.VoxelGrid((4, 0), 6), "VoxelGrid: resolution must be >= 1"),
        (lambda: linen_layers.HashGrid(0), "HashGrid: num_levels must be >= 1"),
        (lambda: linen_layers.HashGrid(growth=0.5), r"HashGrid: growth must be a number in \[1"),
        (lambda: linen_layers.HashGrid(growth=8.0), "HashGrid: the finest level"),
        (
            lambda: linen_layers.HashGrid(400, growth=64),
            "HashGrid: the finest level .* got 2\\^2398",
        ),
        (lambda: linen_layers.VoxelGrid((4, 4), 6), "VoxelGrid: points must have 2 coordinates"),
    ):
        with pytest.raises(ValueError, match=message):
            call().init(jax.random.key(0), points)
    with pytest.raises(ValueError, match="HashGrid: points must have two or three coordinates"):
        nnx_layers.HashGrid(4, rngs=nnx.Rngs(0))
    layer = nnx_layers.HashGrid(2, **OPTIONS, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="HashGrid: points must have 2 coordinates"):
        layer(points)
    grid = nnx_layers.VoxelGrid((4, 4), 6, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="VoxelGrid: points must have 2 coordinates"):
        grid(points)
