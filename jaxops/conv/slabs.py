"""Loops over slabs of windows, for an image whose patches alone are larger than a buffer.

Slabs are whole rows of windows where these fit: a slab has one window along the leading dimensions,
several along the next one, and all along those that follow. The last slab along a dimension ends
where the windows end, and so may begin with windows that the one before has, too: results of these
are written twice, but in sums they are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._core import compat
from jaxops._families.windows import Windows


@dataclasses.dataclass(frozen=True)
class Slabs:
    """How windows over images (..., *ins, channels) are taken in parts.

    Attributes:
      windows: all of them.
      blocks: how many of them a slab has along every dimension.
    """

    windows: Windows
    blocks: tuple[int, ...]

    @staticmethod
    def cut(windows: Windows, most: int) -> Slabs:
        """Slabs of at most `most` windows, and of at least one."""
        blocks: list[int] = []
        for out in reversed(windows.outs):
            blocks.insert(0, min(out, max(1, most)))
            most //= out
        return Slabs(windows, tuple(blocks))

    def joined(self, function: Callable, x: jax.Array) -> jax.Array:
        """function(x, windows), which has an entry for every window."""
        padded = self._padded(x)

        def slab(n):
            return function(self._slice_image(padded, n), self._part)

        def write(n, y):
            return lax.dynamic_update_slice(y, slab(n), self._at(y, self._starts(n)))

        like = jax.eval_shape(slab, 0)
        return self._loop(write, self._resized(like, self.windows.outs), x)

    def summed(self, function: Callable, x: jax.Array, g: jax.Array) -> jax.Array:
        """function(x, g, windows), a sum over the windows, of which g has an entry for each."""
        padded = self._padded(x)

        def term(n):
            return function(self._slice_image(padded, n), self._slice_windows(g, n), self._part)

        return self._loop(lambda n, total: total + term(n), jax.eval_shape(term, 0), x, g)

    def spread(self, function: Callable, g: jax.Array) -> jax.Array:
        """function(g, windows), an image of sums of what each window adds to its entries."""

        def piece(n):
            return function(self._slice_windows(g, n), self._part)

        def add(n, total):
            starts = self._at(total, self._entries(n))
            there = lax.dynamic_slice(total, starts, like.shape)
            return lax.dynamic_update_slice(total, there + piece(n), starts)

        like = jax.eval_shape(piece, 0)
        covered = [
            c if split else n
            for c, n, split in zip(self._covered, self.windows.ins, self._are_split, strict=True)
        ]
        total = self._loop(add, self._resized(like, covered), g)
        return self._pad(total, [(-before, -after) for before, after in self._pads])

    @property
    def _are_split(self) -> list[bool]:
        return [b < out for b, out in zip(self.blocks, self.windows.outs, strict=True)]

    @property
    def _counts(self) -> list[int]:
        return [-(-out // b) for b, out in zip(self.blocks, self.windows.outs, strict=True)]

    @property
    def _covered(self) -> list[int]:
        """The entries from the first that a window covers to the last."""
        return self._extents(self.windows.outs)

    def _extents(self, outs: Sequence[int]) -> list[int]:
        windows = self.windows
        return [
            (out - 1) * s + reach + 1
            for out, s, reach in zip(outs, windows.strides, windows.reach, strict=True)
        ]

    @property
    def _pads(self) -> list[tuple[int, int]]:
        """Before and after an image, for the entries that windows cover."""
        low, ins = self.windows.low, self.windows.ins
        return [
            (before, c - before - n) if split else (0, 0)
            for before, c, n, split in zip(low, self._covered, ins, self._are_split, strict=True)
        ]

    @functools.cached_property
    def _part(self) -> Windows:
        """The windows of a slab, over the entries that they cover."""
        windows, split = self.windows, self._are_split
        extents = self._extents(self.blocks)
        return dataclasses.replace(
            windows,
            ins=tuple(e if s else n for e, n, s in zip(extents, windows.ins, split, strict=True)),
            outs=self.blocks,
            low=tuple(0 if s else n for n, s in zip(windows.low, split, strict=True)),
        )

    def _numbers(self, n):
        """The number of slab n along every dimension."""
        numbers = []
        for count in reversed(self._counts):
            numbers.insert(0, n % count)
            n = n // count
        return numbers

    def _starts(self, n):
        """The first windows of slab n."""
        return [
            jnp.minimum(number * b, out - b)
            for number, b, out in zip(self._numbers(n), self.blocks, self.windows.outs, strict=True)
        ]

    def _entries(self, n):
        """The first entries of the padded image that slab n covers."""
        return [start * s for start, s in zip(self._starts(n), self.windows.strides, strict=True)]

    def _first(self, array) -> int:
        """The first of the dimensions that windows slide over."""
        return array.ndim - 1 - len(self.blocks)

    def _at(self, array, starts):
        """The starts of a slice of an array that is whole along other dimensions."""
        zero = jnp.zeros_like(starts[0])
        return [*[zero] * self._first(array), *starts, zero]

    def _resized(self, like, sizes: Sequence[int]) -> jax.ShapeDtypeStruct:
        first = self._first(like)
        return jax.ShapeDtypeStruct((*like.shape[:first], *sizes, like.shape[-1]), like.dtype)

    def _pad(self, array, pads):
        if not any(map(any, pads)):
            return array
        config = [(0, 0, 0)] * self._first(array) + [(*p, 0) for p in pads] + [(0, 0, 0)]
        return lax.pad(array, jnp.zeros((), array.dtype), config)

    def _padded(self, x):
        return self._pad(x, self._pads)

    def _slice_image(self, padded, n):
        shape = self._resized(padded, self._part.ins).shape
        return lax.dynamic_slice(padded, self._at(padded, self._entries(n)), shape)

    def _slice_windows(self, g, n):
        """Entries of slab n; zeros for windows that a slab before has as well."""
        first, starts = self._first(g), self._starts(n)
        part = lax.dynamic_slice(g, self._at(g, starts), self._resized(g, self.blocks).shape)
        for i, (number, start) in enumerate(zip(self._numbers(n), starts, strict=True)):
            if self.windows.outs[i] % self.blocks[i]:
                at = start + lax.broadcasted_iota(jnp.int32, part.shape, first + i)
                part = jnp.where(at >= number * self.blocks[i], part, jnp.zeros_like(part))
        return part

    def _loop(self, body: Callable, like: jax.ShapeDtypeStruct, *operands: jax.Array):
        # Inside a shard_map what a loop carries varies over the mesh as its operands do.
        initial, *_ = compat.make_varying([jnp.zeros(like.shape, like.dtype), *operands])
        # Whatever the sizes of Python's integers are in JAX.
        count = jnp.int32(math.prod(self._counts))
        return lax.fori_loop(jnp.int32(0), count, body, initial)
