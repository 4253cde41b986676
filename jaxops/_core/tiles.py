"""Convolution whose patches are never in memory: kernels for Hopper GPUs.

They take images of 16-bit floats in one or two dimensions, one group, outputs in multiples of 8,
and channels in multiples of 8 as well or only a few. Convolutions are brought into that form by
linear maps of x, kernel and result: missing channels and outputs are zeros.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._core import compat, native
from jaxops._core.windows import Windows

# Those of `cuda/conv.h`.
_MAX_TAPS = 128
_MAX_STRIDE = 8
_MAX_PIXELS = 1 << 30
# What is moved of an image at a time, in entries of 2 bytes.
_UNIT = 8
# Those of the kernels for few channels: channels, rows of taps, entries of a window's row, outputs.
_FEW_CHANNELS = 7
_FEW_TAP_ROWS = 8
_FEW_ROW_ENTRIES = 24
_FEW_OUTPUTS = 512

_FORWARD, _INPUT_GRAD, _KERNEL_GRAD = TARGETS = (
    "jaxops_conv",
    "jaxops_conv_input_grad",
    "jaxops_conv_kernel_grad",
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
    """

    windows: Windows
    channels: int
    outputs: int
    fan_in: int
    fan_out: int

    def of_x(self, x: jax.Array) -> jax.Array:
        """The images that the kernels take."""
        return _widened(x, -1, self.channels)

    def of_kernel(self, kernel: jax.Array) -> jax.Array:
        """The kernel that the kernels take."""
        return _widened(_widened(kernel, -2, self.channels), -1, self.outputs)

    def of_y(self, y: jax.Array) -> jax.Array:
        """The result without the outputs that fill it up."""
        return y[..., : self.fan_out]

    def of_g(self, g: jax.Array) -> jax.Array:
        """The transpose of `of_y`."""
        return _widened(g, -1, self.outputs)


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
    are_few = (
        fan_in <= _FEW_CHANNELS
        and set(windows.dilation) == {1}
        and math.prod(windows.taps[:-1]) <= _FEW_TAP_ROWS
        and windows.taps[-1] * fan_in <= _FEW_ROW_ENTRIES
        and fan_out <= _FEW_OUTPUTS
    )
    return Form(
        windows=windows,
        channels=fan_in if are_few else _up_to_units(fan_in),
        outputs=_up_to_units(fan_out),
        fan_in=fan_in,
        fan_out=fan_out,
    )


def _up_to_units(channels: int) -> int:
    return -(-channels // _UNIT) * _UNIT


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
    (y,) = _convolve(_FORWARD, [result], form, form.of_x(x), form.of_kernel(kernel))
    return form.of_y(y)


def input_grad(g: jax.Array, kernel: jax.Array, form: Form, dtype: Any) -> jax.Array:
    """Of g (..., *outs, fan_out)."""
    result = _shape(g, form.windows.ins, form.channels, dtype)
    (dx,) = _convolve(_INPUT_GRAD, [result], form, form.of_g(g), form.of_kernel(kernel))
    return dx[..., : form.fan_in]


def kernel_grad(x: jax.Array, g: jax.Array, form: Form, dtype: Any) -> jax.Array:
    """The sum over all images: (*taps, fan_in, fan_out)."""
    x, g = form.of_x(x), form.of_g(g)
    shape = (*form.windows.taps, form.channels, form.outputs)
    needed = native.conv_kernel_grad_workspace(x.shape, shape, g.shape, *_placement(form.windows))
    results = [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((needed,), np.uint8)]
    dkernel, _ = _convolve(_KERNEL_GRAD, results, form, x, g)
    return dkernel[..., : form.fan_in, : form.fan_out]


def _convolve(target: str, results, form: Form, *operands: jax.Array) -> list[jax.Array]:
    steps = zip(("strides", "dilation", "low"), _placement(form.windows), strict=True)
    return jax.ffi.ffi_call(target, results)(
        *operands, **{name: np.array(values, np.int64) for name, values in steps}
    )


def _placement(windows: Windows) -> tuple[tuple[int, ...], ...]:
    return windows.strides, windows.dilation, windows.low


def _shape(like: jax.Array, sizes, channels, dtype) -> jax.ShapeDtypeStruct:
    lead = like.shape[: like.ndim - 1 - len(sizes)]
    return jax.ShapeDtypeStruct((*lead, *sizes, channels), dtype)
