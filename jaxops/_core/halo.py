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
    (found,) = borders_of_several([(part, dim, before, after)], axes, mesh)
    return found


def borders_of_several(
    wanted: Sequence[tuple[jax.Array, int, int, int]], axes: Sequence[str], mesh
) -> list[tuple[list[jax.Array], list[jax.Array]]]:
    """The `borders` of several arrays (part, dim, before, after), which are sent together.

    All have as many entries along their dimensions.
    """
    part, dim, *_ = wanted[0]
    size = part.shape[dim]
    # ppermute numbers devices in the order of the mesh, whatever that of its axes.
    ordered = [a for a in mesh.axis_names if a in axes]
    numbers = np.arange(math.prod(mesh.shape[a] for a in axes))
    numbers = numbers.reshape([mesh.shape[a] for a in ordered])
    numbers = numbers.transpose([ordered.index(a) for a in axes]).ravel().tolist()

    def border(counts, step):
        """`counts` entries of the parts that follow, at step 1, or precede, at step -1."""
        found = [[] for _ in wanted]
        for distance in range(1, math.ceil(max(counts) / size) + 1):
            near, far = numbers[: max(0, len(numbers) - distance)], numbers[distance:]
            ways = zip(far, near, strict=True) if step == 1 else zip(near, far, strict=True)
            entries = []
            for (part, dim, *_), count in zip(wanted, counts, strict=True):
                there = min(size, max(0, count - (distance - 1) * size))
                start = 0 if step == 1 else size - there
                entries.append(lax.slice_in_dim(part, start, start + there, axis=dim))
            sent = [i for i, count in enumerate(counts) if count > (distance - 1) * size]
            received = _sent_together([entries[i] for i in sent], tuple(ordered), list(ways))
            for i, array in zip(sent, received, strict=True):
                found[i].append(array)
        return [arrays[::step] for arrays in found]

    preceding = border([before for *_, before, _ in wanted], -1)
    following = border([after for *_, after in wanted], 1)
    return list(zip(preceding, following, strict=True))


def _sent_together(
    arrays: Sequence[jax.Array], axes: tuple[str, ...], ways: Sequence[tuple[int, int]]
) -> list[jax.Array]:
    """The arrays of other devices, by one collective: the bits of all of them in one array."""
    if len(arrays) == 1:
        return [lax.ppermute(arrays[0], axes, ways)]
    size = min(a.dtype.itemsize for a in arrays)
    bits = [lax.bitcast_convert_type(a, f"uint{8 * size}") for a in arrays]
    received = lax.ppermute(jnp.concatenate([b.ravel() for b in bits]), axes, ways)
    ends = np.cumsum([b.size for b in bits])[:-1].tolist()
    return [
        lax.bitcast_convert_type(r.reshape(b.shape), a.dtype)
        for r, b, a in zip(jnp.split(received, ends), bits, arrays, strict=True)
    ]


def extended(
    part: jax.Array, dim: int, before: int, after: int, axes: Sequence[str], mesh
) -> jax.Array:
    """One device's part of an array, with its `borders` before and after it."""
    preceding, following = borders(part, dim, before, after, axes, mesh)
    return jnp.concatenate([*preceding, part, *following], axis=dim)
