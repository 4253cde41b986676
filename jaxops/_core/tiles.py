"""Convolution whose patches are never in memory: kernels for Hopper GPUs.

They take images of 16-bit floats in one or two dimensions, one group, and channels and outputs in
multiples of 8. Convolutions are brought into that form by linear maps of x, kernel and result:
missing channels are zeros, and a few channels with strides between pixels become more channels
without (space to depth), of which a step of a product then holds fewer zeros. The kernel gets no
zeros for taps that it does not have: they would be multiplied by pixels outside of its windows,
which may be NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._core import compat, native
from jaxops._core.windows import Windows

# Those of `cuda/conv.h`.
_MAX_TAPS = 128
_MAX_STRIDE = 8
_MAX_PIXELS = 1 << 30
# What bulk copies move of an image, in entries of 2 bytes.
_UNIT = 8

_FORWARD, _INPUT_GRAD, _KERNEL_GRAD, _DEEPEN = TARGETS = (
    "jaxops_conv",
    "jaxops_conv_input_grad",
    "jaxops_conv_kernel_grad",
    "jaxops_conv_deepen",
)
native.CUDA_TARGETS.extend(TARGETS)


@dataclasses.dataclass(frozen=True)
class Form:
    """A convolution as the kernels take it.

    The convolution is `of_y` of that of `of_x(x)` with `of_kernel(kernel)`. All three are linear.

    Attributes:
      windows: over of_x(x).
      channels: of of_x(x).
      outputs: of the result that of_y is given.
      fan_in: the channels of x.
      fan_out: those of y.
      deep: the windows over x that become pixels of more channels, where they do.
    """

    windows: Windows
    channels: int
    outputs: int
    fan_in: int
    fan_out: int
    deep: Windows | None

    def of_x(self, x: jax.Array) -> jax.Array:
        """The images that the kernels take, which `_deep_x` makes; this is what is transposed."""
        if self.deep is not None:
            rank = len(self.deep.taps)
            lead = x.ndim - 1 - rank
            sizes = [n * s for n, s in zip(self.windows.ins, self.deep.strides, strict=True)]
            pads = [
                (low, n - low - size, 0)
                for n, low, size in zip(sizes, self.deep.low, self.deep.ins, strict=True)
            ]
            x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0)] * lead + pads + [(0, 0, 0)])
            x = _deepened(x, lead, self.deep.strides)
        return _widened(x, -1, self.channels)

    def of_kernel(self, kernel: jax.Array) -> jax.Array:
        """The kernel that the kernels take."""
        if self.deep is not None:
            kernel = _deepened(kernel, 0, self.deep.strides)
        return _widened(_widened(kernel, -2, self.channels), -1, self.outputs)

    def of_y(self, y: jax.Array) -> jax.Array:
        """The result without the outputs that fill it up."""
        return y[..., : self.fan_out]


def _deepened(array: jax.Array, at: int, steps: tuple[int, ...]) -> jax.Array:
    """Blocks of so many steps along the dimensions from `at` on become entries of the next one."""
    rank = len(steps)
    shape = list(array.shape)
    split = [
        n for size, s in zip(shape[at : at + rank], steps, strict=True) for n in (size // s, s)
    ]
    array = array.reshape(*shape[:at], *split, *shape[at + rank :])
    blocks = range(at, at + 2 * rank, 2)
    inner = range(at + 1, at + 2 * rank, 2)
    rest = range(at + 2 * rank, array.ndim)
    array = array.transpose(*range(at), *blocks, *inner, *rest)
    sizes = array.shape
    merged = math.prod(sizes[at + rank : at + 2 * rank + 1])
    return array.reshape(*sizes[: at + rank], merged, *sizes[at + 2 * rank + 1 :])


def _widened(array: jax.Array, axis: int, size: int) -> jax.Array:
    missing = size - array.shape[axis]
    if missing == 0:
        return array
    pads = [(0, 0)] * array.ndim
    pads[axis] = (0, missing)
    return jnp.pad(array, pads)


def form(windows: Windows, fan_in: int, fan_out: int) -> Form | None:
    """The form of a convolution of one group, or None where it has none."""
    rank = len(windows.taps)
    steps = math.prod(windows.strides)
    are_blocks = all(k % s == 0 for k, s in zip(windows.taps, windows.strides, strict=True))
    deep = None
    if (
        fan_in < _UNIT
        and 1 < steps <= 64 // max(1, fan_in)
        and set(windows.dilation) == {1}
        and are_blocks
    ):
        deep = windows
        taps = tuple(k // s for k, s in zip(windows.taps, windows.strides, strict=True))
        windows = dataclasses.replace(
            windows,
            ins=tuple(n + k - 1 for n, k in zip(windows.outs, taps, strict=True)),
            taps=taps,
            strides=(1,) * rank,
            low=(0,) * rank,
        )
    # Of the padded image: the kernels count its entries in 32 bits.
    reaches = [
        out * s + k * d
        for out, s, k, d in zip(
            windows.outs, windows.strides, windows.taps, windows.dilation, strict=True
        )
    ]
    if (
        rank > 2
        or windows.are_entries
        or math.prod(windows.taps) > _MAX_TAPS
        or max(windows.strides) > _MAX_STRIDE
        or max(*reaches, *map(abs, windows.low), *windows.ins) >= _MAX_PIXELS
        or 0 in (fan_in, fan_out, *windows.ins, *windows.outs)
    ):
        return None
    depth = fan_in * (steps if deep is not None else 1)
    return Form(
        windows=windows,
        channels=-(-depth // _UNIT) * _UNIT,
        outputs=-(-fan_out // _UNIT) * _UNIT,
        fan_in=fan_in,
        fan_out=fan_out,
        deep=deep,
    )


def find_form(
    options: Any, platform: str | None, dtype: Any, images: jax.Array, other: jax.Array
) -> Form | None:
    """The form in which the kernels compute something of these operands, if they can."""
    dtypes = {images.dtype, other.dtype}
    if (
        platform != "cuda"
        or options.groups != 1
        or len(dtypes) != 1
        or not dtypes <= {np.dtype(jnp.float16), np.dtype(jnp.bfloat16)}
        or (dtype not in dtypes and dtype != np.float32)
        or not _has_kernels()
    ):
        return None
    found = form(options.windows, options.fan_in, options.fan_out)
    if found is None:
        return None
    pixels = max(math.prod(found.windows.ins), math.prod(found.windows.outs))
    rows = math.prod(images.shape[: images.ndim - 1 - len(found.windows.taps)])
    return found if 0 < rows * pixels < _MAX_PIXELS else None


def _has_kernels() -> bool:
    """Whether the GPUs here are those of the kernels, and the kernels are compiled for them."""
    return "90a" in native.cuda_architectures() and compat.gpu_capabilities() == {"9.0"}


def forward(x: jax.Array, kernel: jax.Array, form: Form, dtype: Any) -> jax.Array:
    """Of x (..., *ins, fan_in) and kernel (*taps, fan_in, fan_out)."""
    result = _shape(x, form.windows.outs, form.outputs, dtype)
    (y,) = _convolve(_FORWARD, [result], form, _deep_x(x, form), form.of_kernel(kernel))
    return form.of_y(y)


def input_grad(g: jax.Array, kernel: jax.Array, form: Form, dtype: Any) -> jax.Array:
    """Of g (..., *outs, fan_out)."""
    result = _shape(g, form.windows.ins, form.channels, dtype)
    (dx,) = _convolve(_INPUT_GRAD, [result], form, _deep_g(g, form), form.of_kernel(kernel))
    ins = form.windows.ins if form.deep is None else form.deep.ins
    return _transposed(form.of_x, _shape(g, ins, form.fan_in, dtype), dx)


def kernel_grad(x: jax.Array, g: jax.Array, form: Form, dtype: Any) -> jax.Array:
    """The sum over all images: (*taps, fan_in, fan_out)."""
    x, g = _deep_x(x, form), _deep_g(g, form)
    shape = (*form.windows.taps, form.channels, form.outputs)
    needed = native.conv_kernel_grad_workspace(x.shape, shape, g.shape, *_placement(form.windows))
    results = [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((needed,), np.uint8)]
    dkernel, _ = _convolve(_KERNEL_GRAD, results, form, x, g)
    taps = form.windows.taps if form.deep is None else form.deep.taps
    like = jax.ShapeDtypeStruct((*taps, form.fan_in, form.fan_out), dtype)
    return _transposed(form.of_kernel, like, dkernel)


def _deep_x(x: jax.Array, form: Form) -> jax.Array:
    """form.of_x(x), by a kernel where that is not x itself."""
    if form.deep is not None:
        result = _shape(x, form.windows.ins, form.channels, x.dtype)
        return _deepen(x, result, form.deep.strides, form.deep.low)
    return _deep(x, form.windows.ins, form.channels)


def _deep_g(g: jax.Array, form: Form) -> jax.Array:
    """The transpose of form.of_y."""
    return _deep(g, form.windows.outs, form.outputs)


def _deep(array: jax.Array, sizes: tuple[int, ...], channels: int) -> jax.Array:
    if array.shape[-1] == channels:
        return array
    rank = len(sizes)
    return _deepen(array, _shape(array, sizes, channels, array.dtype), (1,) * rank, (0,) * rank)


def _deepen(array, result, strides, low) -> jax.Array:
    return _call(_DEEPEN, [result], array, strides=strides, low=low)[0]


def _convolve(target: str, results, form: Form, *operands: jax.Array) -> list[jax.Array]:
    names = ("strides", "dilation", "low")
    return _call(
        target, results, *operands, **dict(zip(names, _placement(form.windows), strict=True))
    )


def _call(target: str, results, *operands: jax.Array, **steps: tuple[int, ...]) -> list[jax.Array]:
    return jax.ffi.ffi_call(target, results)(
        *operands, **{name: np.array(values, np.int64) for name, values in steps.items()}
    )


def _placement(windows: Windows) -> tuple[tuple[int, ...], ...]:
    return windows.strides, windows.dilation, windows.low


def _shape(like: jax.Array, sizes, channels, dtype) -> jax.ShapeDtypeStruct:
    lead = like.shape[: like.ndim - 1 - len(sizes)]
    return jax.ShapeDtypeStruct((*lead, *sizes, channels), dtype)


def _transposed(function, like: jax.ShapeDtypeStruct, cotangent: jax.Array) -> jax.Array:
    (result,) = jax.linear_transpose(function, like)(cotangent)
    return result
