"""Other ways to compute a convolution than by one call of a kernel, or by patches.

`choices` says which calls take one of them. All are made of convolutions that `local` computes,
whose functions are passed as `compute`, or of XLA's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._core import compat
from jaxops.activations import ACTIVATIONS
from jaxops.conv import rearranged
from jaxops.conv.choices import Way
from jaxops.conv.options import Options, over_pixels, sum_dtype
from jaxops.conv.patches import DEVICE_BLOCK_BYTES, map_blocks, sum_blocks


def forward(
    way: Way,
    compute: Callable,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    options: Options,
    dtype: Any,
    activation: str | None,
    platform: str | None,
) -> jax.Array:
    """The convolution, with bias and activation."""
    axis = x.ndim - 2 - options.rank

    def finish(y):
        if bias is not None:
            y = y + over_pixels(bias, options)
        return ACTIVATIONS[activation](y).astype(dtype)

    if way.kind == "xla":
        if bias is not None or activation is not None or not _are_sums(platform, dtype, x, kernel):
            x, kernel = _widen(dtype, x, kernel)
        return finish(_by_kernel(lambda x, kernel: convolve(x, kernel, options), axis, x, kernel))
    if way.kind == "cut_taps":
        sums = dict(dtype=sum_dtype(x, kernel, dtype=dtype), platform=platform)
        parts = [
            compute(x, kernel[(..., *part, slice(None), slice(None))], options=some, **sums)[0]
            for some, part in rearranged.cut_taps(options, way.blocks)
        ]
        return finish(sum(parts[1:], parts[0]))
    if way.kind == "images":
        more = dict(options=options, dtype=dtype, activation=activation, platform=platform)
        return map_blocks(lambda x: compute(x, kernel, bias, **more)[0], axis, way.block, x)
    form = way.rearranged(options)
    inner, wide = form.of_kernel(kernel), None if bias is None else form.of_bias(bias)
    more = dict(options=form.options, dtype=dtype, activation=activation, platform=platform)

    def images(x):
        return form.of_y(compute(form.of_x(x), inner, wide, **more)[0])

    return map_blocks(images, axis, _block(form, x, axis), x)


def input_grad(
    way: Way,
    compute: Callable,
    g: jax.Array,
    kernel: jax.Array,
    *,
    options: Options,
    dtype: Any,
    platform: str | None,
) -> jax.Array:
    """The gradient with respect to x."""
    axis = g.ndim - 2 - options.rank
    sums = sum_dtype(g, kernel, dtype=dtype)

    image = (*options.windows.ins, options.groups * options.fan_in)

    if way.kind == "xla":
        if not _are_sums(platform, dtype, g, kernel):
            g, kernel = _widen(dtype, g, kernel)

        def one(g, kernel):
            function = functools.partial(convolve, kernel=kernel, options=options)
            return rearranged.transpose(function, g, (g.shape[0], *image))

        return _by_kernel(one, axis, g, kernel).astype(dtype)
    if way.kind == "cut_taps":
        parts = [
            compute(
                g,
                kernel[(..., *part, slice(None), slice(None))],
                options=some,
                dtype=sums,
                platform=platform,
            )[0]
            for some, part in rearranged.cut_taps(options, way.blocks)
        ]
        return sum(parts[1:], parts[0]).astype(dtype)
    if way.kind == "images":
        more = dict(options=options, dtype=dtype, platform=platform)
        return map_blocks(lambda g: compute(g, kernel, **more)[0], axis, way.block, g)
    form = way.rearranged(options)
    inner = form.of_kernel(kernel)
    rounded = dtype if form.is_copy else sums

    def images(g):
        dx = compute(form.of_g(g), inner, options=form.options, dtype=rounded, platform=platform)
        shape = (*g.shape[: axis + 1], *image)
        return rearranged.transpose(form.of_x, dx[0], shape).astype(dtype)

    like = jax.ShapeDtypeStruct((*g.shape[: axis + 1], *image), rounded)
    return map_blocks(images, axis, _block(form, like, axis), g)


def kernel_grad(
    way: Way,
    compute: Callable,
    x: jax.Array,
    g: jax.Array,
    *,
    options: Options,
    dtype: Any,
    summed: tuple[bool, ...],
    platform: str | None,
) -> jax.Array:
    """The gradient with respect to the kernel, summed over some batch dimensions."""
    axis = x.ndim - 2 - options.rank
    shape = (*options.windows.taps, options.fan_in, options.groups * options.fan_out)
    sums = sum_dtype(x, g, dtype=dtype)
    if way.kind == "xla":
        if not _are_sums(platform, dtype, x, g):
            x, g = _widen(dtype, x, g)

        def one(x, g):
            return rearranged.transpose(lambda kernel: convolve(x, kernel, options), g, shape)

        return _with_kernels(one, axis, summed, x, g).astype(dtype)
    more = dict(summed=summed, platform=platform)
    if way.kind == "cut_taps":
        parts = rearranged.cut_taps(options, way.blocks)
        lead = lax.broadcast_shapes(x.shape[:axis], g.shape[:axis])
        kept = [1 if s else n for n, s in zip(lead, summed, strict=True)]
        total, *_ = compat.make_varying([jnp.zeros((*kept, *shape), dtype), x, g])
        for some, part in parts:
            (found,) = compute(x, g, options=some, dtype=dtype, **more)
            total = lax.dynamic_update_slice(
                total, found, (*[0] * axis, *(s.start for s in part), 0, 0)
            )
        return total
    if way.kind == "images":
        more |= dict(options=options, dtype=sums)
        total = sum_blocks(lambda x, g: compute(x, g, **more)[0], axis, way.block, x, g)
        return total.astype(dtype)
    form = way.rearranged(options)
    block = _block(form, x, axis)
    rounded = dtype if block >= x.shape[axis] else sums

    def images(x, g):
        operands = form.of_x(x), form.of_g(g)
        return compute(*operands, options=form.options, dtype=rounded, **more)[0]

    dkernel = sum_blocks(images, axis, block, x, g)
    return rearranged.transpose(
        form.of_kernel, dkernel.astype(dtype), (*dkernel.shape[:axis], *shape)
    )


def _block(form: rearranged.Rearranged, x: Any, axis: int) -> int:
    """How many images are rearranged at a time: patches may take as much memory."""
    rows = x.shape[axis]
    image_bytes = math.prod(x.shape) // max(1, rows) * x.dtype.itemsize * form.growth
    return int(max(1, min(rows, DEVICE_BLOCK_BYTES // max(1, image_bytes))))


def _are_sums(platform: str | None, dtype: Any, *operands: jax.Array) -> bool:
    """Whether XLA's convolution of the operands has sums as wide as ours, and rounds them once."""
    is_wide = dtype == sum_dtype(*operands, dtype=dtype)
    return all(a.dtype == dtype for a in operands) and (is_wide or platform == "cuda")


def _widen(dtype: Any, *operands: jax.Array) -> list[jax.Array]:
    return [a.astype(sum_dtype(*operands, dtype=dtype)) for a in operands]


def _by_kernel(function: Callable, axis: int, images: jax.Array, kernel: jax.Array) -> jax.Array:
    """function(images, kernel) of images (rows, ...) and one kernel, for every batch entry."""
    if axis == 0:
        return function(images, kernel)
    if kernel.shape[0] == 1:
        moved = jnp.moveaxis(images, 0, axis - 1)
        sizes = moved.shape[axis - 1 : axis + 1]
        count = sizes[0] * sizes[1]
        rows = moved.reshape(*moved.shape[: axis - 1], count, *moved.shape[axis + 1 :])
        y = _by_kernel(function, axis - 1, rows, kernel[0])
        y = y.reshape(*y.shape[: axis - 1], *sizes, *y.shape[axis:])
        return jnp.moveaxis(y, axis - 1, 0)
    if images.shape[0] == 1:
        return jax.vmap(lambda k: _by_kernel(function, axis - 1, images[0], k))(kernel)
    return jax.vmap(lambda i, k: _by_kernel(function, axis - 1, i, k))(images, kernel)


def _with_kernels(function, axis, summed, x, g):
    """function(x, g) of images (rows, ...), summed over some dimensions before the rows."""
    if axis == 0:
        return function(x, g)
    lead = lax.broadcast_shapes(x.shape[:axis], g.shape[:axis])
    x, g = (jnp.broadcast_to(a, (*lead, *a.shape[axis:])) for a in (x, g))
    if summed[0]:
        x, g = (jnp.moveaxis(a, 0, axis - 1) for a in (x, g))
        count = x.shape[axis - 1] * x.shape[axis]
        x, g = (a.reshape(*a.shape[: axis - 1], count, *a.shape[axis + 1 :]) for a in (x, g))
        return _with_kernels(function, axis - 1, summed[1:], x, g)[None]
    return jax.vmap(lambda x, g: _with_kernels(function, axis - 1, summed[1:], x, g))(x, g)


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    options: Options,
    dtype: Any = None,
    zeros: Sequence[int] | None = None,
) -> jax.Array:
    """XLA's convolution of images (rows, ...), with a result of the dtype given.

    The entries of x are `zeros` apart, next to each other by default.
    """
    windows = options.windows
    zeros = (1,) * options.rank if zeros is None else zeros
    reaches = [
        (out - 1) * s + (k - 1) * d + 1
        for out, s, k, d in zip(
            windows.outs, windows.strides, windows.taps, windows.dilation, strict=True
        )
    ]
    padding = [
        (low, reach - max(0, (n - 1) * step + 1) - low)
        for low, reach, n, step in zip(windows.low, reaches, windows.ins, zeros, strict=True)
    ]
    sizes = "DHW"[3 - options.rank :]
    return lax.conv_general_dilated(
        x,
        kernel,
        windows.strides,
        padding,
        zeros,
        windows.dilation,
        dimension_numbers=(f"N{sizes}C", f"{sizes}IO", f"N{sizes}C"),
        feature_group_count=kernel.shape[-1] // options.fan_out if options.groups > 1 else 1,
        precision=options.precision,
        preferred_element_type=dtype,
    )
