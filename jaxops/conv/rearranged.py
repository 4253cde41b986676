"""Convolutions as others, of rearranged arrays, for which there are faster kernels.

A `Rearranged` convolution is computed by another one: the arrays go through linear maps, and
gradients through their transposes, which JAX derives. Sums of several entries of an input gradient
are in the dtype of sums, before they are rounded. No map multiplies an entry by a zero that is no
padding, so that NaN and Inf stay in the windows that cover them.

`cut_taps` is another way: a convolution as the sum of several, each of some of the taps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._core import compat
from jaxops.conv.options import Options

Map = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Rearranged:
    """A convolution as another one.

    Attributes:
      options: of the other one.
      of_x: its images from those of this one.
      of_kernel: its kernel.
      of_y: this one's result from the other's.
      of_g: the transpose of `of_y`.
      of_bias: its bias.
      growth: how many times as large the rearranged images are, at most.
      is_copy: whether no entry of the images is there twice, so that the transpose adds none.
    """

    options: Options
    of_x: Map
    of_kernel: Map
    of_y: Map
    of_g: Map
    of_bias: Map
    growth: float
    is_copy: bool = True


def transpose(function: Map, result: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The transpose of a linear map from arrays of this shape, applied to `result`."""
    # Inside a shard_map these vary over the mesh as the result does. Their type alone is needed.
    like, _ = compat.make_varying([jnp.zeros(shape, result.dtype), result])
    (pulled,) = jax.linear_transpose(function, like)(result)
    return pulled


def _same(array: jax.Array) -> jax.Array:
    return array


def fold_depth(options: Options) -> Rearranged:
    """Windows of three dimensions as windows of two: taps of the first one become channels.

    The images are copied for each of these taps, and each row of windows is an image.
    """
    windows = options.windows
    n, out, k, s, d, low = (
        values[0]
        for values in (
            windows.ins,
            windows.outs,
            windows.taps,
            windows.strides,
            windows.dilation,
            windows.low,
        )
    )
    groups = options.groups
    reach = (out - 1) * s + (k - 1) * d + 1
    flat = dataclasses.replace(
        windows,
        ins=windows.ins[1:],
        outs=windows.outs[1:],
        taps=windows.taps[1:],
        strides=windows.strides[1:],
        dilation=windows.dilation[1:],
        low=windows.low[1:],
    )

    def of_x(x):
        at = x.ndim - 4
        config = [(0, 0, 0)] * x.ndim
        config[at] = (low, reach - n - low, 0)
        padded = lax.pad(x, jnp.zeros((), x.dtype), config)
        padded = padded.reshape(*padded.shape[:-1], groups, padded.shape[-1] // groups)
        taps = [lax.slice_in_dim(padded, t * d, t * d + (out - 1) * s + 1, s, at) for t in range(k)]
        folded = jnp.concatenate(taps, -1)
        rows = folded.shape[at - 1] * out
        shape = (*folded.shape[: at - 1], rows, *folded.shape[at + 1 : -2])
        return folded.reshape(*shape, groups * k * options.fan_in)

    def of_kernel(kernel):
        at = kernel.ndim - 5
        moved = jnp.moveaxis(kernel, at, -3)
        return moved.reshape(*moved.shape[:-3], k * options.fan_in, moved.shape[-1])

    def of_y(y):
        at = y.ndim - 4
        return y.reshape(*y.shape[:at], y.shape[at] // out, out, *y.shape[at + 1 :])

    def of_g(g):
        at = g.ndim - 4
        return g.reshape(*g.shape[: at - 1], g.shape[at - 1] * out, *g.shape[at + 1 :])

    inner = dataclasses.replace(options, windows=flat, fan_in=k * options.fan_in)
    return Rearranged(inner, of_x, of_kernel, of_y, of_g, _same, k * out / max(1, n), is_copy=False)


def fill_groups(options: Options, multiple: int) -> Rearranged:
    """Channels and outputs of every group filled up to a multiple, by zeros."""
    groups = options.groups
    fan_in, fan_out = (-(-n // multiple) * multiple for n in (options.fan_in, options.fan_out))

    def fill(array, size, fan):
        split = array.reshape(*array.shape[:-1], groups, fan)
        config = [(0, 0, 0)] * (split.ndim - 1) + [(0, size - fan, 0)]
        filled = lax.pad(split, jnp.zeros((), array.dtype), config)
        return filled.reshape(*array.shape[:-1], groups * size)

    def of_kernel(kernel):
        config = [(0, 0, 0)] * kernel.ndim
        config[-2] = (0, fan_in - options.fan_in, 0)
        wide = lax.pad(kernel, jnp.zeros((), kernel.dtype), config)
        return fill(wide, fan_out, options.fan_out)

    def of_y(y):
        split = y.reshape(*y.shape[:-1], groups, fan_out)[..., : options.fan_out]
        return split.reshape(*y.shape[:-1], groups * options.fan_out)

    return Rearranged(
        dataclasses.replace(options, fan_in=fan_in, fan_out=fan_out),
        lambda x: fill(x, fan_in, options.fan_in),
        of_kernel,
        of_y,
        lambda g: fill(g, fan_out, options.fan_out),
        lambda bias: fill(bias, fan_out, options.fan_out),
        fan_in / options.fan_in,
    )


def strides_to_channels(options: Options) -> Rearranged:
    """Windows with strides as windows without: the entries of a stride become channels.

    Only windows without dilation are. Where taps are not in multiples of the strides, the last
    entries of a window are not its own: the kernel gradient leaves theirs out, and there is no
    value and no input gradient.
    """
    windows = options.windows
    rank = options.rank
    steps = windows.strides
    taps = tuple(-(-k // s) for k, s in zip(windows.taps, steps, strict=True))
    ins = tuple(out + k - 1 for out, k in zip(windows.outs, taps, strict=True))
    inner = dataclasses.replace(windows, ins=ins, taps=taps, strides=(1,) * rank, low=(0,) * rank)

    def split(array, first, sizes, channels):
        """(..., size * step, ..., C) -> (..., size, ..., steps * C) along all dimensions."""
        pairs = [n for pair in zip(sizes, steps, strict=True) for n in pair]
        lead, last = array.shape[:first], array.shape[first + rank :]
        array = array.reshape(*lead, *pairs, *last)
        moved = jnp.moveaxis(
            array,
            range(first + 1, first + 2 * rank, 2),
            range(first + rank, first + 2 * rank),
        )
        return moved.reshape(*lead, *sizes, math.prod(steps) * channels, *last[1:])

    def of_x(x):
        first = x.ndim - 1 - rank
        config = [(0, 0, 0)] * x.ndim
        for i in range(rank):
            size = ins[i] * steps[i]
            config[first + i] = (windows.low[i], size - windows.ins[i] - windows.low[i], 0)
        padded = lax.pad(x, jnp.zeros((), x.dtype), config)
        return split(padded, first, ins, x.shape[-1])

    def of_kernel(kernel):
        first = kernel.ndim - 2 - rank
        config = [(0, 0, 0)] * kernel.ndim
        for i in range(rank):
            config[first + i] = (0, taps[i] * steps[i] - windows.taps[i], 0)
        padded = lax.pad(kernel, jnp.zeros((), kernel.dtype), config)
        return split(padded, first, taps, kernel.shape[-2])

    growth = math.prod(
        n * s / max(1, size) for n, s, size in zip(ins, steps, windows.ins, strict=True)
    )
    return Rearranged(
        dataclasses.replace(options, windows=inner, fan_in=options.fan_in * math.prod(steps)),
        of_x,
        of_kernel,
        _same,
        _same,
        _same,
        growth,
    )


def cut_taps(options: Options, blocks: Sequence[int]) -> list[tuple[Options, tuple[slice, ...]]]:
    """The windows in parts of at most `blocks` taps along each dimension, and the taps of each."""
    windows = options.windows
    parts: list[tuple[slice, ...]] = [()]
    for size, block in zip(windows.taps, blocks, strict=True):
        count = -(-size // block)
        # Even parts.
        edges = [size * i // count for i in range(count + 1)]
        parts = [(*part, slice(a, b)) for part in parts for a, b in itertools.pairwise(edges)]

    def some(part):
        taps = tuple(s.stop - s.start for s in part)
        low = tuple(
            low - s.start * d for low, s, d in zip(windows.low, part, windows.dilation, strict=True)
        )
        return dataclasses.replace(
            options, windows=dataclasses.replace(windows, taps=taps, low=low)
        )

    return [(some(part), part) for part in parts]
