"""Weighted sums of the entries of a volume in plain `jax.numpy`, and weights of interpolation."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._core.dtypes import accumulation_dtype

KEYS_A = -0.75  # the parameter of PyTorch's and OpenCV's cubic convolution


def sum_taps(volume: jax.Array, indices: jax.Array, weights: Sequence[jax.Array], point_rank: int):
    """out[p, f] = sum_k prod_a weights[a][p, k_a] volume[i_0[p, k_0], ..., f].

    Combinations with an index outside of the volume contribute nothing.

    Args:
      volume: (..., *sizes, F).
      indices: integers (..., *P, axes, K), with `point_rank` dimensions in P.
      weights: (..., *P, K) for each axis. Leading dimensions broadcast against each other.
      point_rank: see above.
    """
    axes, taps = indices.shape[-2:]
    rank = volume.ndim - axes - 1
    sizes, width = volume.shape[rank:-1], volume.shape[-1]
    dtype = accumulation_dtype(volume)
    leading = (volume.shape[:rank], *(x.shape[:rank] for x in (indices, *weights)))
    batch = jnp.broadcast_shapes(*leading)
    points = indices.shape[rank : rank + point_rank]
    total = jnp.zeros((*batch, *points, width), dtype)
    if not total.size or not volume.size:
        return total.astype(volume.dtype)
    is_shared = math.prod(volume.shape[:rank]) == 1
    if is_shared:  # all points read the same rows
        rows = volume.reshape(-1, width)
    else:
        rows = jnp.broadcast_to(volume, (*batch, *volume.shape[rank:]))
        rows = rows.reshape(math.prod(batch), -1, width)
    rows = rows.astype(dtype)
    for combination in itertools.product(range(taps), repeat=axes):
        flat: Any = 0
        weight: Any = 1
        valid: Any = True
        for a, (k, n) in enumerate(zip(combination, sizes, strict=True)):
            index = indices[..., a, k]
            valid = valid & (index >= 0) & (index < n)
            flat = flat * n + jnp.clip(index, 0, n - 1)
            weight = weight * weights[a][..., k]
        weight = jnp.where(valid, weight, 0)
        if is_shared:
            values = jnp.take(rows, flat, axis=0, mode="clip")
        else:
            flat = jnp.broadcast_to(flat, (*batch, *points)).reshape(rows.shape[0], -1, 1)
            values = jnp.take_along_axis(rows, flat, axis=1, mode="clip").reshape(total.shape)
        total = total + weight[..., None] * jnp.where(valid[..., None], values, 0)
    return total.astype(volume.dtype)


def ordered_volume_grad(
    shape: tuple[Any, ...],
    indices: jax.Array,
    g: jax.Array,
    weights: Sequence[jax.Array],
    point_rank: int,
) -> jax.Array:
    """The transpose of `sum_taps` in a volume of a shape, whose sums have a fixed order.

    A scatter may add to an entry in any order, so each entry's terms are sorted to be neighbours
    and summed by a scan first.
    """
    axes, taps = indices.shape[-2:]
    rank = g.ndim - 1 - point_rank
    batch = jnp.broadcast_shapes(*(x.shape[:rank] for x in (indices, g, *weights)))
    points = g.shape[rank:-1]
    dtype = accumulation_dtype(g)
    # The volume that a batch entry adds to.
    which: Any = 0
    for i, (n, kept) in enumerate(zip(batch, shape[:rank], strict=True)):
        along = jnp.arange(n).reshape(n, *[1] * (rank - 1 - i + point_rank))
        which = which * kept + (along if kept > 1 else 0)
    total = math.prod(shape[:-1])
    if 0 in (*batch, *points, *shape):
        return jnp.zeros(shape, g.dtype)
    flats, terms = [], []
    for combination in itertools.product(range(taps), repeat=axes):
        flat: Any = which
        weight: Any = 1
        valid: Any = True
        for a, (k, n) in enumerate(zip(combination, shape[rank:-1], strict=True)):
            index = indices[..., a, k]
            valid = valid & (index >= 0) & (index < n)
            flat = flat * n + index
            weight = weight * weights[a][..., k]
        flat = jnp.where(valid, flat, total)
        flats.append(jnp.broadcast_to(flat, (*batch, *points)).reshape(-1))
        term = jnp.where(valid, weight, 0)[..., None] * jnp.where(valid[..., None], g, 0)
        term = jnp.broadcast_to(term.astype(dtype), (*batch, *points, g.shape[-1]))
        terms.append(term.reshape(-1, g.shape[-1]))
    flat, term = jnp.concatenate(flats), jnp.concatenate(terms)
    order = jnp.argsort(flat, stable=True)
    flat, term = flat[order], term[order]
    begins = jnp.concatenate([jnp.ones(1, bool), flat[1:] != flat[:-1]])

    def add(left, right):
        (left_begins, left_sum), (right_begins, right_sum) = left, right
        kept = jnp.where(right_begins[:, None], 0, left_sum)
        return left_begins | right_begins, kept + right_sum

    _, sums = jax.lax.associative_scan(add, (begins, term))
    ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    # Entries are written once; places after the volume are dropped.
    place = jnp.where(ends & (flat < total), flat, total + jnp.arange(flat.shape[0]))
    result = jnp.zeros((total, g.shape[-1]), dtype)
    result = result.at[place].set(sums, mode="drop", unique_indices=True)
    return result.reshape(shape).astype(g.dtype)


def stencils(
    positions: Sequence[jax.Array],
    lost: jax.Array,
    sizes: Sequence[int],
    method: str,
    padding: str,
) -> tuple[jax.Array, list[jax.Array]]:
    """The entries (..., axes, K) that points read, and their weights (..., K) along each axis.

    Args:
      positions: those along each axis, in entries; there is no NaN among them.
      lost: which points read no entry.
      sizes: the numbers of entries.
      method, padding: as in `stencil`.
    """
    found = [stencil(x, n, method, padding) for x, n in zip(positions, sizes, strict=True)]
    indices = jnp.stack([jnp.where(lost, -1, index) for index, _ in found])
    weights = [jnp.moveaxis(weight, 0, -1) for _, weight in found]
    return jnp.moveaxis(indices, (0, 1), (-2, -1)), weights


def stencil(x: jax.Array, n: int, method: str, padding: str) -> tuple[jax.Array, jax.Array]:
    """The entries that positions x along an axis of n entries read, and their weights, (K, ...).

    The taps come first, because XLA writes arrays one after the other faster than interleaved.

    Args:
      x: positions in entries; there is no NaN among them.
      n: the number of entries.
      method: "nearest", "linear", "cubic" (cubic convolution) or "spline" (the cubic B-spline).
      padding: "zeros" (entries outside have the index -1), "border", "wrap", or what positions are
        reflected about: "mirror" (0 and n - 1) or "reflect" (-1/2 and n - 1/2).
    """
    x = near(x, n, padding)
    if method == "nearest":
        first, fraction, taps = jnp.round(x), None, 1
    else:
        first = jnp.floor(x)
        fraction = x - jax.lax.stop_gradient(first)
        taps = 2 if method == "linear" else 4
    first = jax.lax.stop_gradient(first).astype(jnp.int32) - (taps // 2 - 1 if taps > 1 else 0)
    steps = jnp.arange(taps, dtype=jnp.int32).reshape(taps, *[1] * x.ndim)
    weights = [jnp.ones_like(x)] if fraction is None else _WEIGHTS[method](fraction)
    return fold(first + steps, n, padding), jnp.stack(weights)


def lost(points: jax.Array) -> jax.Array:
    """Which points (..., axes) have a NaN; XLA fuses it with what reads the same coordinates."""
    nans = [jnp.isnan(points[..., a]) for a in range(points.shape[-1])]
    return functools.reduce(operator.or_, nans)


def outside(indices: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
    """The sum of the weights of entries outside, (...), exactly zero where there are none."""
    valid = [indices[..., a, :] >= 0 for a in range(len(weights))]
    inside = functools.reduce(
        operator.mul,
        [jnp.where(v, w, 0).sum(-1) for v, w in zip(valid, weights, strict=True)],
    )
    return jnp.where((indices >= 0).all((-2, -1)), 0, 1 - inside)


def _linear(t):
    return [1 - t, t]


def _cubic(t):
    a = KEYS_A

    def near(s):
        return ((a + 2) * s - (a + 3)) * s * s + 1

    def far(s):
        return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

    return [far(1 + t), near(t), near(1 - t), far(2 - t)]


def _spline(t):
    def near(s):
        return ((s - 2) * s * s * 3 + 4) / 6

    return [(1 - t) ** 3 / 6, near(t), near(1 - t), t**3 / 6]


_WEIGHTS = {"linear": _linear, "cubic": _cubic, "spline": _spline}

# The entries after which the extension of a volume repeats itself.
_PERIODS = {
    "wrap": lambda n: n,
    "mirror": lambda n: 2 * max(n - 1, 1),
    "reflect": lambda n: 2 * n,
}


def near(x, n: int, padding: str):
    """Positions with the values of x, moved so close that they are integers of 32 bits.

    Infinite ones are clamped.
    """
    low, high = -4, n + 3
    if padding in _PERIODS:
        period = _PERIODS[padding](max(n, 1))
        finite = jnp.isfinite(x)
        moved = jnp.where(finite, x, 0)
        moved = moved - period * jax.lax.stop_gradient(jnp.floor(moved / period))
        # Positions in the volume stay as they are, also those that float32 rounds.
        x = jnp.where(finite & ~((x >= 0) & (x <= n - 1)), moved, x)
        low, high = 0, jnp.where(finite, period, n - 1)
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def fold(indices, n: int, padding: str):
    """The entries that indices are in the extension of a volume; -1 where there is none."""
    if padding == "zeros":
        return jnp.where((indices >= 0) & (indices < n), indices, -1)
    if padding == "border" or n == 1:
        return jnp.clip(indices, 0, n - 1)
    if padding == "wrap":
        return indices % n
    period = _PERIODS[padding](n)
    indices = indices % period
    return jnp.minimum(indices, period - indices if padding == "mirror" else period - 1 - indices)
