"""Which convolutions are computed otherwise than by one call of a kernel, or by patches.

A way can run only some calls, and `find` prefers it for those of which that was measured. The
figures are in docs/conv2d.md, and `scripts/time_conv_choices.py` measures them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Generator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._core import implementation, native
from jaxops.conv import cuda_kernels, rearranged
from jaxops.conv.cuda_kernels import KernelCall
from jaxops.conv.options import Options

# Groups with fewer channels or outputs than 8, which are no matrix products, are worth filling up
# from the first number of these and the second of the others on, and in kernel gradients from the
# third number on.
_MIN_SMALL_FAN = 2
_MIN_WIDE_FAN = 32
_MIN_FILLED_FAN = 3
# The strides of windows over a few channels become at least this number of channels.
_MIN_STRIDE_CHANNELS = 48
# Gradients of windows that do not overlap are products of their entries, which is worth copies from
# this number of entries on.
_MIN_ENTRIES_APART = 8
# With strides of this product a pixel has the taps of few windows.
_MIN_STEP_BY_XLA = 16
# Fewer taps of few channels were not measured in float32.
_MIN_TAPS_BY_XLA = 49

Kind = Literal[
    "own",
    "xla",
    "cut_taps",
    "images",
    "fold_depth",
    "fill_groups",
    "strides_to_channels",
]
Direction = Literal["forward", "input_grad", "kernel_grad"]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a convolution is computed.

    Attributes:
      kind: "xla" is XLA's convolution. "cut_taps" adds convolutions of some of the taps, and
        "images" takes some images at a time. Others are functions of `rearranged`. "own" is what
        convolutions have without a choice: a kernel, or patches.
      blocks: how many taps along each dimension are taken at a time.
      block: how many images are taken at a time.
      multiple: to which groups are filled up.
    """

    kind: Kind
    blocks: tuple[int, ...] = ()
    block: int = 0
    multiple: int = 0

    def rearranged(self, options: Options) -> rearranged.Rearranged:
        """The convolution of rearranged arrays."""
        if self.kind == "fill_groups":
            return rearranged.fill_groups(options, self.multiple)
        if self.kind == "fold_depth":
            return rearranged.fold_depth(options)
        return rearranged.strides_to_channels(options)


_forced: contextvars.ContextVar[Way | None] = contextvars.ContextVar("_forced", default=None)


@contextlib.contextmanager
def forced(way: Way) -> Generator[None]:
    """Lets the next convolution that is traced be computed in this way, if the way can run it."""
    token = _forced.set(way)
    try:
        yield
    finally:
        _forced.reset(token)


def is_forced() -> bool:
    """Whether the next convolution is to be computed in a way of `forced`."""
    return _forced.get() is not None


def find(
    direction: Direction,
    options: Options,
    platform: str | None,
    dtype: Any,
    call: KernelCall | None,
    count: Any,
    *arrays: jax.Array,
) -> Way | None:
    """The way of a call, or None for its own: the call of a kernel, if it has one, or patches.

    `options` are those of the shards of a device, and `count` is the number of kernels, or of
    kernel gradients, of which each has images of its own.
    """
    way = _find(direction, options, platform, dtype, call, count, *arrays)
    is_kernel = way is None or way.kind != "xla"
    return way if is_kernel or not implementation.insists() else None


def _find(direction, options, platform, dtype, call, count, *arrays):
    way = _forced.get()
    if way is not None and way.kind == "own":
        return None
    if way is not None:
        # Convolutions that this one is made of choose for themselves.
        _forced.set(None)
        return way
    dtypes = {np.dtype(a.dtype) for a in arrays}
    if any(jax.export.is_symbolic_dim(n) for a in arrays for n in a.shape):
        if jax.export.is_symbolic_dim(count):
            raise NotImplementedError(
                f"conv: a batch of kernels or their gradients, of symbolic shape {count}, is not "
                "supported here, because XLA has no symbolic number of groups. Export it with a "
                "size that is a number."
            )
        # Blocks of images, of which the patches fit a buffer, need numbers. On GPUs XLA has no
        # convolution of integers.
        is_refused = platform == "cuda" and np.dtype(np.int8) in dtypes
        return None if call or is_refused else Way("xla")
    if (
        platform != "cuda"
        or len(dtypes) > 1
        or count != 1
        or any(0 in a.shape for a in arrays)
        or options.windows.are_entries
        or not cuda_kernels.has_kernels()
    ):
        return None
    (operand,) = dtypes
    way = _of_gpus(direction, options, operand, call, arrays[0])
    # XLA's convolution rounds its sums to the dtype of its operands.
    is_rounded = operand == dtype
    return None if way is not None and way.kind == "xla" and not is_rounded else way


def _of_gpus(
    direction: Direction, options: Options, dtype: Any, call: KernelCall | None, images: jax.Array
) -> Way | None:
    if _prefers_products(direction, options, dtype):
        return Way("strides_to_channels")
    if options.rank < 3 and call is None and cuda_kernels.can_take(options, dtype):
        return _of_many_images(options, images)
    if dtype == jnp.float32:
        # Channels of their own are never multiplied as TF32.
        if not (options.is_depthwise or cuda_kernels.may_be_tf32(options.precision)):
            return None
    elif dtype not in (jnp.float16, jnp.bfloat16):
        return None
    if options.rank == 3:
        return _of_volumes(direction, options, dtype)
    if call is None and math.prod(options.windows.taps) > native.limits("conv").max_taps:
        way = _of_many_taps(direction, options, dtype)
        if way is not None:
            return way
    if options.is_depthwise and dtype == jnp.float32:
        return None
    if options.is_depthwise:
        # cuDNN has a kernel for these windows.
        is_special = options.windows.taps == (7, 7) and options.windows.strides == (2, 2)
        return Way("xla") if is_special and direction == "kernel_grad" else None
    if options.groups > 1:
        return _of_groups(direction, options, dtype, call)
    if dtype == jnp.float32:
        return _of_few_wide_channels(direction, options)
    return _of_one_group(direction, options, call)


def _prefers_products(direction: Direction, options: Options, dtype: Any) -> bool:
    """Whether these are gradients of windows that do not overlap; on Hopper, others unmeasured."""
    windows = options.windows
    is_apart = windows.taps == windows.strides and set(windows.dilation) == {1}
    if dtype == jnp.float32:
        is_rounded = cuda_kernels.may_be_tf32(options.precision)
    else:
        is_rounded = dtype in (jnp.float16, jnp.bfloat16)
    if direction == "forward" or not is_apart or not cuda_kernels.are_hopper():
        return False
    if not is_rounded or options.rank == 3 or options.groups > 1:
        return False
    if options.fan_in <= native.limits("conv").max_few_channels:
        return False
    return math.prod(windows.taps) >= _MIN_ENTRIES_APART


def _of_volumes(direction: Direction, options: Options, dtype: Any) -> Way | None:
    has_columns = math.prod(options.windows.taps[1:]) > 1
    is_grouped = options.groups > 1 and not options.is_depthwise
    if dtype == jnp.float32 and is_grouped and has_columns and direction == "forward":
        return Way("xla")
    if direction != "kernel_grad":
        # The product of entries alone is XLA's, and needs no copy of them.
        return Way("fold_depth") if has_columns or direction == "input_grad" else None
    if options.groups == 1:
        return Way("fold_depth") if has_columns else None
    return None if options.is_depthwise else Way("xla")


def _of_many_taps(direction: Direction, options: Options, dtype: Any) -> Way | None:
    is_apart = options.windows.taps == options.windows.strides
    is_wide = dtype == jnp.float32 and options.groups == 1
    if is_wide and direction == "input_grad" and not is_apart:
        return Way("xla")
    most = native.limits("conv").max_taps
    blocks: list[int] = []
    for taps in reversed(options.windows.taps):
        blocks.insert(0, max(1, min(taps, most)))
        most //= blocks[0]
    way = Way("cut_taps", blocks=tuple(blocks))
    part, _ = rearranged.cut_taps(options, way.blocks)[0]
    return way if cuda_kernels.can_take(part, dtype) else None


def _of_many_images(options: Options, images: jax.Array) -> Way | None:
    windows = options.windows
    *batch, rows = images.shape[: -1 - options.rank]
    pixels = max(math.prod(windows.ins), math.prod(windows.outs)) * math.prod(batch)
    most = (native.limits("conv").max_pixels - 1) // pixels
    if not 0 < most < rows:
        return None
    parts = -(-rows // most)
    # Equal parts need no copy to be joined.
    even = next((n for n in range(parts, 2 * parts) if rows % n == 0), None)
    return Way("images", block=rows // even if even else most)


def _of_groups(
    direction: Direction, options: Options, dtype: Any, call: KernelCall | None
) -> Way | None:
    limits, is_wide = native.limits("conv"), dtype == jnp.float32
    least, most = sorted((options.fan_in, options.fan_out))
    multiple = limits.channel_bytes // np.dtype(dtype).itemsize
    if least < limits.min_fan:
        multiple = max(multiple, limits.min_fan)
    way = Way("fill_groups", multiple=multiple)
    if not cuda_kernels.can_take(rearranged.fill_groups(options, multiple).options, dtype):
        return None
    if least < limits.min_fan:
        if least < _MIN_SMALL_FAN or most < _MIN_WIDE_FAN:
            return None
        is_mostly_zeros = least < _MIN_FILLED_FAN and direction == "kernel_grad"
        return Way("xla") if is_mostly_zeros and not is_wide else way
    if is_wide:  # other kernels of such groups do not use tensor cores
        return way if call is None or call.kernels != "mma" else None
    return way if call is None and direction != "kernel_grad" else None


def _of_few_wide_channels(direction: Direction, options: Options) -> Way | None:
    """The way of float32 images that may be multiplied as TF32: kernels of few channels do not."""
    windows, limits = options.windows, native.limits("conv")
    if set(windows.dilation) != {1} or options.fan_in > limits.max_few_channels:
        return None
    if not cuda_kernels.are_hopper():
        return None
    if windows.taps == windows.strides:
        return Way("strides_to_channels")
    taps = math.prod(windows.taps)
    if taps < _MIN_TAPS_BY_XLA or (direction == "input_grad" and taps == _MIN_TAPS_BY_XLA):
        return None
    is_strided = math.prod(windows.strides) > 1
    return Way("strides_to_channels" if is_strided and direction == "kernel_grad" else "xla")


def _of_one_group(direction: Direction, options: Options, call: KernelCall | None) -> Way | None:
    windows, limits = options.windows, native.limits("conv")
    if set(windows.dilation) != {1}:
        return None
    is_apart = direction == "input_grad" and windows.taps == windows.strides
    if call is None:
        return Way("strides_to_channels") if is_apart else None
    if call.kernels != "mma" or options.fan_in > limits.max_few_channels:
        return None
    if is_apart:
        return Way("strides_to_channels")
    # Few channels have kernels of their own on Hopper GPUs, unless their windows are large.
    is_filled = call.channels > options.fan_in
    if not is_filled or direction == "forward" or not cuda_kernels.are_hopper():
        return None
    step = math.prod(windows.strides)
    if direction == "kernel_grad" and step * options.fan_in >= _MIN_STRIDE_CHANNELS:
        return Way("strides_to_channels")
    if direction == "input_grad" and step >= _MIN_STEP_BY_XLA:
        return Way("xla")
    if step > 1 or options.fan_out > limits.max_few_outputs:
        return None
    rows = (limits.max_few_tap_rows,) * (options.rank - 1)
    return Way("cut_taps", blocks=(*rows, limits.max_few_row_entries // options.fan_in))
