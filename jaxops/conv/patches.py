"""Patches and their products: what a convolution is made of where it has no kernels.

Patches that are too many for a buffer are made and used block by block of images, or by `slabs` of
one image.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import lax

from jaxops._families.windows import Windows, col2im_operator, im2col_operator
from jaxops.conv.options import Options, sum_dtype
from jaxops.conv.slabs import Slabs

# Patches of more bytes than these do not stay in the caches of a CPU until they are multiplied.
# There they are made and used block by block; where XLA's own convolution, which never has more
# than a tile of them, was measured to be faster still, it takes their place.
_BLOCK_BYTES = 8 << 20
# On other devices they may take this much of the memory.
DEVICE_BLOCK_BYTES = 1 << 30
# 128 tiles of 128 x 128, about as many as large GPUs have multiprocessors.
_MIN_ROUNDED_ENTRIES = 1 << 21


def im2col(x: jax.Array, windows: Windows, *, again: bool = False) -> jax.Array:
    """(..., rows, *ins, C) -> (..., rows, *outs, *taps, C)."""
    if windows.are_entries:
        return jnp.expand_dims(x, range(x.ndim - 1, x.ndim - 1 + len(windows.taps)))
    return im2col_operator.on_one_device(x, windows=windows, again=again)[0]


def col2im(patches: jax.Array, windows: Windows) -> jax.Array:
    """The transpose of `im2col`."""
    if windows.are_entries:
        rank = len(windows.taps)
        return jnp.squeeze(patches, range(patches.ndim - 1 - rank, patches.ndim - 1))
    return col2im_operator.on_one_device(patches, windows=windows)[0]


def over_images(kernel: jax.Array, options: Options) -> jax.Array:
    """A depthwise kernel, broadcast over the patches of images: (..., 1, 1..., *taps, C)."""
    at = kernel.ndim - 2 - options.rank
    return jnp.expand_dims(kernel.squeeze(-2), range(at, at + 1 + options.rank))


def tap_axes(patches: jax.Array, options: Options) -> tuple[int, ...]:
    """The dimensions of patches that are those of a window."""
    return tuple(range(patches.ndim - 1 - options.rank, patches.ndim - 1))


def letters(options: Options) -> tuple[str, str]:
    """The letters of the windows' dimensions, for `product`: patches and taps.

    Dimensions that are summed over come in the order of their letters. With these, that is how they
    lie in memory, in which patches are multiplied as they are.
    """
    return "opq"[: options.rank], "abc"[: options.rank]


def widen(array: jax.Array) -> jax.Array:
    """The array in the dtype of sums."""
    return array.astype(sum_dtype(array, dtype=array.dtype))


def product_dtype(platform: str | None, dtype: Any, entries: int, *arrays: jax.Array) -> Any:
    """The dtype of a product that is rounded to `dtype`: that of its sums, if not `dtype` itself.

    GPUs sum products of 16-bit floats in float32, but where XLA cuts a sum into parts, it adds
    these in the dtype of the result. It does so for results of few entries, whose tiles are too few
    for all multiprocessors. With more `entries` a result that is rounded at once was measured to be
    faster: 15.4 instead of 18.0 us for 12544 x 256 by 1024 bfloat16 on an H100.
    """
    is_cut = platform == "cuda" and all(a.dtype == dtype for a in arrays)
    if is_cut and entries >= _MIN_ROUNDED_ENTRIES:
        return dtype
    return sum_dtype(*arrays, dtype=dtype)


def product(names, a, b, options, summed=None, dtype=None):
    """An einsum in the accumulation's dtype, of arrays with batch dimensions before the named ones.

    If a `dtype` is given the result is rounded to that.

    A batch dimension may be 1 in either array, which then does not vary along it. Dimensions that
    `summed` flags are summed over; their size in the result is 1. The dimensions of `names` are
    those of the result in the order of the arrays.
    """
    of_a, of_b, of_out = names
    rank = a.ndim - len(of_a)
    batch = lax.broadcast_shapes(a.shape[:rank], b.shape[:rank])
    varies = [n != 1 and not (summed and summed[i]) for i, n in enumerate(batch)]
    out = [i for i in range(rank) if varies[i]] + [*of_out]
    wide = sum_dtype(a, b, dtype=a.dtype)
    (a, in_a), (b, in_b) = (
        _without_ones(array, rank, letters) for array, letters in ((a, of_a), (b, of_b))
    )
    # Dimensions that only one of them varies along are summed over before.
    a, in_a = _sum_over([d for d in in_a if d not in in_b and d not in out], a, in_a)
    b, in_b = _sum_over([d for d in in_b if d not in in_a and d not in out], b, in_b)
    if a.dtype != b.dtype:
        a, b = a.astype(wide), b.astype(wide)
    shared = [d for d in in_a if d in in_b]
    contracted, common = [d for d in shared if d not in out], [d for d in shared if d in out]
    result = lax.dot_general(
        a,
        b,
        (
            ([in_a.index(d) for d in contracted], [in_b.index(d) for d in contracted]),
            ([in_a.index(d) for d in common], [in_b.index(d) for d in common]),
        ),
        precision=options.precision,
        preferred_element_type=dtype or wide,
    )
    order = common + [d for d in in_a if d not in shared] + [d for d in in_b if d not in shared]
    if order != out:
        result = result.transpose([order.index(d) for d in out])
    ones = [i for i in range(rank) if not varies[i]]
    return lax.expand_dims(result, ones) if ones else result


def _without_ones(array, rank, letters):
    """The array without batch dimensions of size 1, and the names of the others."""
    ones = [i for i in range(rank) if array.shape[i] == 1]
    names = [i for i in range(rank) if array.shape[i] != 1] + [*letters]
    return lax.squeeze(array, ones) if ones else array, names


def _sum_over(dims, array, names):
    if not dims:
        return array, names
    total = widen(array).sum([names.index(d) for d in dims])
    return total, [name for name in names if name not in dims]


def block_size(
    options: Options, platform: str | None, *arrays: jax.Array, dtype: Any = None
) -> tuple[int, Slabs | None]:
    """How many images' patches may be made at a time; with 0, what of one image's may be.

    The `dtype` is that of the patches, if it is wider than that of all arrays.
    """
    images = arrays[0]
    axis = images.ndim - 2 - options.rank
    rows = images.shape[axis]
    batch = lax.broadcast_shapes(*(a.shape[:axis] for a in arrays))
    windows = options.windows
    channels = options.fan_in * (images.shape[-1] if options.is_depthwise else 1)
    itemsize = max(d.itemsize for d in (*(a.dtype for a in arrays), dtype or arrays[0].dtype))
    window_bytes = math.prod((*batch, *windows.taps)) * channels * itemsize
    image_bytes = window_bytes * math.prod(windows.outs)
    most = _BLOCK_BYTES if platform == "cpu" else DEVICE_BLOCK_BYTES
    if any(map(jax.export.is_symbolic_dim, (*batch, rows))):
        return rows, None  # a block needs numbers
    # Patches of single entries are the image, so that none are made.
    if image_bytes == 0 or (windows.are_entries and platform == "cpu"):
        return rows, None
    fits = image_bytes <= most or windows.are_entries
    return most // image_bytes, None if fits else Slabs.cut(windows, most // window_bytes)


def map_blocks(function, axis, block, array):
    """function(array), made of blocks of entries along the axis."""
    rows = array.shape[axis]
    if jax.export.is_symbolic_dim(rows) or max(1, block) >= rows:
        return function(array)
    block = max(1, block)
    blocks, rest = _cut(array, axis, block)
    results = jnp.moveaxis(lax.map(function, blocks), 0, axis)
    shape = results.shape
    joined = results.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    if rest.shape[axis] == 0:
        return joined
    return jnp.concatenate([joined, function(rest)], axis)


def sum_blocks(function, axis, block, *arrays):
    """function(*arrays), a sum over the entries along the axis, made of blocks of them."""
    block = max(1, block)
    if block >= arrays[0].shape[axis]:
        return function(*arrays)
    blocks, rests = zip(*(_cut(a, axis, block) for a in arrays), strict=True)
    total = function(*(b[0] for b in blocks))
    total, _ = lax.scan(
        lambda total, block: (total + function(*block), None), total, tuple(b[1:] for b in blocks)
    )
    return total + function(*rests) if rests[0].shape[axis] else total


def _cut(array: jax.Array, axis: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Whole blocks of entries along the axis, next to each other, and the rest of the array."""
    moved = jnp.moveaxis(array, axis, 0)
    whole = moved.shape[0] // block * block
    blocks = moved[:whole].reshape(whole // block, block, *moved.shape[1:])
    return jnp.moveaxis(blocks, 1, axis + 1), jnp.moveaxis(moved[whole:], 0, axis)
