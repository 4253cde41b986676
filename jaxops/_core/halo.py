"""Entries that a device needs of its neighbours' parts of an array."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def borders(
    part: jax.Array, dim: int, before: int, after: int, axes: Sequence[str], mesh
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The entries before and after one device's part of an array along a dimension, by device.

    The parts lie in order over these axes of the mesh, the first one major. Only the entries asked
    for are communicated, from as many devices as have them; beyond the ends of the array they are
    zeros.
    """
    size = part.shape[dim]
    # ppermute numbers devices in the order of the mesh, whatever that of its axes.
    ordered = [a for a in mesh.axis_names if a in axes]
    numbers = np.arange(math.prod(mesh.shape[a] for a in axes))
    numbers = numbers.reshape([mesh.shape[a] for a in ordered])
    numbers = numbers.transpose([ordered.index(a) for a in axes]).ravel().tolist()

    def border(count, step):
        """`count` entries of the parts that follow, at step 1, or precede, at step -1."""
        found = []
        for distance in range(1, math.ceil(count / size) + 1):
            there = min(size, count - (distance - 1) * size)
            start = 0 if step == 1 else size - there
            entries = lax.slice_in_dim(part, start, start + there, axis=dim)
            near, far = numbers[: max(0, len(numbers) - distance)], numbers[distance:]
            ways = zip(far, near, strict=True) if step == 1 else zip(near, far, strict=True)
            found.append(lax.ppermute(entries, tuple(ordered), list(ways)))
        return found[::step]

    return border(before, -1), border(after, 1)


def extended(
    part: jax.Array, dim: int, before: int, after: int, axes: Sequence[str], mesh
) -> jax.Array:
    """One device's part of an array, with its `borders` before and after it."""
    preceding, following = borders(part, dim, before, after, axes, mesh)
    return jnp.concatenate([*preceding, part, *following], axis=dim)
