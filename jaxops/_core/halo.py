"""Entries that a device needs of its neighbours' parts of an array."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def extended(part: jax.Array, dim: int, before: int, after: int, axes: Sequence[str]) -> jax.Array:
    """One device's part of an array, with entries before and after it along a dimension.

    The parts lie in order over these mesh axes. Only the entries asked for are communicated, from
    as many devices as have them; beyond the ends of the array they are zeros.
    """
    size = part.shape[dim]
    devices = math.prod(lax.axis_size(a) for a in axes)

    def border(count, step):
        """So many entries of the parts that follow, at step 1, or precede, at step -1."""
        found = []
        for distance in range(1, math.ceil(count / size) + 1):
            there = min(size, count - (distance - 1) * size)
            start = 0 if step == 1 else size - there
            entries = lax.slice_in_dim(part, start, start + there, axis=dim)
            ways = [
                (source, source - step * distance)
                for source in range(devices)
                if 0 <= source - step * distance < devices
            ]
            found.append(lax.ppermute(entries, tuple(axes), ways))
        return found[::step]

    return jnp.concatenate([*border(before, -1), part, *border(after, 1)], axis=dim)
