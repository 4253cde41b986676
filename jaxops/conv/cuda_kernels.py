"""Convolution whose patches are never in memory: kernels for GPUs with tensor cores.

The kernels take images in one or two dimensions. Kernels of 16-bit floats, and of float32 that is
multiplied as TF32, want channels and outputs in multiples of 16 bytes; on Hopper GPUs there are
some for a few channels of 16-bit floats. Convolutions of one group are filled up to these: missing
channels and outputs are zeros. Float64, and float32 that is not multiplied as TF32, are taken as
they are, by kernels of multiply-adds; on Hopper GPUs large convolutions of such float32 are sums of
products of TF32, as exact, of channels and outputs in multiples of 16 bytes. Small groups of every
dtype, depthwise ones above all, which are no matrix products, are taken as they are by direct
kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._core import checks, native
from jaxops._core.dtypes import accumulation_dtype
from jaxops._families.windows import Windows
from jaxops.activations import activation_name
from jaxops.conv import cpu_kernels

# From this number of channels and outputs on, filling them up costs little.
_MIN_WIDENED = 24

_FORWARD, _INPUT_GRAD, _KERNEL_GRAD = cpu_kernels.TARGETS


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A convolution as the kernels take it.

    The convolution is `crop_y` of that of `pad_x(x)` with `pad_kernel(kernel)`. These are linear.

    Attributes:
      windows: over pad_x(x).
      channels: of pad_x(x).
      outputs: of the result that crop_y is given.
      fan_in: the channels of x.
      fan_out: those of y.
      groups: of channels; several have no missing ones.
      kernels: which take it: those of tensor cores, "mma", which round float32 to TF32, those of
        multiply-adds, or as exact, "fma", or for small groups "direct" ones.
    """

    windows: Windows
    channels: int
    outputs: int
    fan_in: int
    fan_out: int
    groups: int = 1
    kernels: Literal["mma", "fma", "direct"] = "mma"

    def pad_x(self, x: jax.Array) -> jax.Array:
        """The images that the kernels take."""
        return _pad_axis(x, -1, self.channels)

    def pad_kernel(self, kernel: jax.Array) -> jax.Array:
        """The kernel that the kernels take."""
        return _pad_axis(_pad_axis(kernel, -2, self.channels // self.groups), -1, self.outputs)

    def crop_y(self, y: jax.Array) -> jax.Array:
        """The result without the outputs that fill it up."""
        return y[..., : self.fan_out]

    def pad_g(self, g: jax.Array) -> jax.Array:
        """The transpose of `crop_y`."""
        return _pad_axis(g, -1, self.outputs)


def _pad_axis(array: jax.Array, axis: int, size: int) -> jax.Array:
    missing = size - array.shape[axis]
    if missing == 0:
        return array
    pads = [(0, 0)] * array.ndim
    pads[axis] = (0, missing)
    return jnp.pad(array, pads)


def make_call(
    windows: Windows,
    fan_in: int,
    fan_out: int,
    groups: int = 1,
    *,
    itemsize: int = 2,
    takes_few: bool = True,
    tf32: bool = True,
) -> KernelCall | None:
    """The call for a convolution of entries of `itemsize` bytes, or None if kernels have none.

    The fans are those of a group. Few channels are taken as they are on Hopper GPUs only. `tf32`
    says whether float32 may be multiplied as TF32.
    """
    limits = native.limits("conv")
    rank = len(windows.taps)
    # The kernels count entries of the padded image in 32 bits.
    reaches = [
        out * s + k * d
        for out, s, k, d in zip(
            windows.outs, windows.strides, windows.taps, windows.dilation, strict=True
        )
    ]
    if (
        rank > 2
        or windows.are_entries
        or math.prod(windows.taps) > limits.max_taps
        or max(*reaches, *map(abs, windows.low), *windows.ins) >= limits.max_pixels
        or 0 in (fan_in, fan_out, *windows.ins, *windows.outs)
    ):
        return None
    channels, outputs = groups * fan_in, groups * fan_out
    as_it_is = functools.partial(KernelCall, windows, channels, outputs, channels, outputs, groups)
    has_short_strides = max(windows.strides) <= limits.max_stride
    if _is_direct(fan_in, fan_out, groups):
        return as_it_is("direct") if has_short_strides else None
    unit = limits.channel_bytes // itemsize
    least, most = sorted((fan_in, fan_out))
    are_units = groups == 1 or (fan_in % unit == 0 and fan_out % unit == 0)
    if groups > limits.max_groups:
        return None
    # Images of TF32 with fewer channels would be filled up more than not. Where the outputs are
    # fewer, too, there is little to multiply and patches are small.
    if itemsize == 8 or (itemsize == 4 and not (tf32 and least >= limits.min_fan and are_units)):
        # The input gradient is a launch for each remainder by the strides.
        fits = (
            most >= limits.min_fan
            and math.prod(windows.strides) <= limits.max_stride**2
            and math.prod(windows.taps) * groups * most * itemsize < limits.max_kernel_bytes
        )
        return as_it_is("fma") if fits else None
    if not (has_short_strides and are_units):
        return None
    are_few = (
        takes_few
        and itemsize == 2
        and groups == 1
        and fan_in <= limits.max_few_channels
        and set(windows.dilation) == {1}
        and math.prod(windows.taps[:-1]) <= limits.max_few_tap_rows
        and windows.taps[-1] * fan_in <= limits.max_few_row_entries
        and fan_out <= limits.max_few_outputs
    )
    return KernelCall(
        windows=windows,
        channels=channels if are_few else _up_to_units(channels, unit),
        outputs=_up_to_units(outputs, unit),
        fan_in=channels,
        fan_out=outputs,
        groups=groups,
    )


def _is_direct(fan_in: int, fan_out: int, groups: int) -> bool:
    """Whether that is how kernels compute groups; like `IsDirect` in `cuda/conv/families.h`."""
    is_small = min(fan_in, fan_out) < native.limits("conv").min_fan
    return is_small and (groups > 1 or fan_in == fan_out == 1)


def _up_to_units(channels: int, unit: int) -> int:
    return -(-channels // unit) * unit


def operands(
    platform: str | None, dtype: Any, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, jax.Array, np.dtype]:
    """Operands of a result of `dtype` as there are kernels for them, and the dtype of their result.

    Kernels take operands of one dtype; results have that too, or float32 where it has 16 bits.
    """
    if platform not in native.PLATFORMS:
        return a, b, dtype
    wide = accumulation_dtype(a, b, dtype)
    if a.dtype != b.dtype or wide == np.float64:
        a, b = a.astype(wide), b.astype(wide)
    return a, b, dtype if dtype == a.dtype else wide


def find_call(
    options: Any,
    platform: str | None,
    dtype: Any,
    images: jax.Array,
    other: jax.Array,
    fans: tuple[int, int],
    groups: int,
) -> KernelCall | None:
    """The call by which kernels compute something of these operands, if they can.

    The fans and groups are those that the operands have, which may be shards of a device.
    """
    itemsize = images.dtype.itemsize
    if (
        platform != "cuda"
        or images.dtype != other.dtype
        or images.dtype not in checks.FLOATS
        or (dtype != images.dtype and not (dtype == np.float32 and itemsize == 2))
        or not has_kernels()
    ):
        return None
    found = make_call(
        options.windows,
        *fans,
        groups,
        itemsize=itemsize,
        takes_few=are_hopper(),
        tf32=may_be_tf32(options.precision),
    )
    if found is None:
        return None
    pixels = max(math.prod(found.windows.ins), math.prod(found.windows.outs))
    rows = math.prod(images.shape[: images.ndim - 1 - len(found.windows.taps)])
    if jax.export.is_symbolic_dim(rows):
        # The sizes of work spaces are not known, and what is too many shows when the program runs.
        return found if found.kernels in ("direct", "mma") else None
    # The direct kernels count images in 64 bits.
    has_many = rows * pixels >= native.limits("conv").max_pixels and found.kernels != "direct"
    return found if rows > 0 and not has_many else None


def find_kernel_grad_call(
    options: Any, platform: str | None, dtype: Any, x: jax.Array, g: jax.Array, count: int
) -> KernelCall | None:
    """The call for the kernel gradient, or for `count` of them, each of groups of its own.

    TF32's are not worth while where patches are no larger than x, which XLA multiplies as well.
    """
    if any(jax.export.is_symbolic_dim(n) for a in (x, g) for n in a.shape):
        return None  # nobody knows the size of the work space
    # Devices have all channels of several groups, unless every channel is a group of its own.
    fans, groups = (options.fan_in, options.fan_out), options.groups
    if options.is_depthwise:
        groups = x.shape[-1]
    elif groups == 1:
        fans = x.shape[-1], g.shape[-1]
    found = find_call(options, platform, dtype, x, g, fans, groups * count)
    windows = options.windows
    has_small_patches = math.prod(windows.taps) <= math.prod(windows.strides)
    return None if found and has_small_patches and _is_tf32(x, found) else found


def may_be_tf32(precision: Any) -> bool:
    """Whether XLA, too, multiplies float32 as TF32 on GPUs that have it."""
    parts = precision if isinstance(precision, tuple) else (precision,)
    try:
        return all(lax.Precision(p) != lax.Precision.HIGHEST for p in parts if p is not None)
    except ValueError:  # an algorithm of its own
        return False


def are_hopper() -> bool:
    """Whether the GPUs here are those of the kernels for Hopper, and these are compiled."""
    return "90a" in native.cuda_architectures() and native.gpu_capabilities() == {"9.0"}


def can_take(options: Any, dtype: Any) -> bool:
    """Whether kernels take such windows and channels of this dtype, of not too many images."""
    found = make_call(
        options.windows,
        options.fan_in,
        options.fan_out,
        options.groups,
        itemsize=np.dtype(dtype).itemsize,
        takes_few=are_hopper(),
        tf32=may_be_tf32(options.precision),
    )
    return found is not None


def has_kernels() -> bool:
    """Whether there are GPUs here, and all have kernels that are compiled for them."""
    found = native.gpu_capabilities()
    return bool(found) and all(map(native.has_code, found))


def forward(
    x: jax.Array,
    kernel: jax.Array,
    call: KernelCall,
    dtype: Any,
    bias: jax.Array | None = None,
    activation: str | None = None,
) -> jax.Array:
    """Takes x (..., *ins, fan_in), kernel (*taps, fan_in, fan_out), a bias (fan_out,) like sums."""
    call, workspace = _split(_FORWARD, x, kernel, call)
    results = [_shape(x, call.windows.outs, call.outputs, dtype), *workspace]
    operands = [call.pad_x(x), _operand(kernel, call)]
    if bias is not None:
        operands.append(call.pad_g(bias))
    y, *_ = _convolve(_FORWARD, results, call, *operands, activation=activation_name(activation))
    return call.crop_y(y)


def input_grad(g: jax.Array, kernel: jax.Array, call: KernelCall, dtype: Any) -> jax.Array:
    """Takes g (..., *outs, fan_out)."""
    call, workspace = _split(_INPUT_GRAD, g, kernel, call)
    results = [_shape(g, call.windows.ins, call.channels, dtype), *workspace]
    dx, *_ = _convolve(_INPUT_GRAD, results, call, call.pad_g(g), _operand(kernel, call))
    return dx[..., : call.fan_in]


def kernel_grad(x: jax.Array, g: jax.Array, call: KernelCall, dtype: Any) -> jax.Array:
    """The sum over all images: (*taps, fan_in, fan_out)."""
    wide = _in_units(call) if x.dtype == np.float32 else None
    if wide and native.conv_is_kernel_grad_split(*_sizes(x, wide), *_placement(call.windows)):
        call = wide
    x, g = call.pad_x(x), call.pad_g(g)
    shape = (*call.windows.taps, call.channels // call.groups, call.outputs)
    results = [jax.ShapeDtypeStruct(shape, dtype)]
    attributes = _attributes(call, _is_tf32(x, call))
    results += native.work_space(_KERNEL_GRAD, [x, g], results, attributes)
    dkernel, *_ = _convolve(_KERNEL_GRAD, results, call, x, g)
    return dkernel[..., : call.fan_in // call.groups, : call.fan_out]


def _split(
    target: str, images: jax.Array, kernel: jax.Array, call: KernelCall
) -> tuple[KernelCall, list[jax.ShapeDtypeStruct]]:
    """The call of float32 that is split for tensor cores and its work space, where that is faster.

    It has channels and outputs in units. Otherwise it is the call that is given, and nothing.
    `images` are those of either side: what counts of them is how many there are.
    """
    wide = _in_units(call)
    if wide is None or kernel.dtype != np.float32:
        return call, []
    x, widened, y = (jax.ShapeDtypeStruct(s, np.float32) for s in _sizes(images, wide))
    operand, result = (x, y) if target == _FORWARD else (y, x)
    activation = {"activation": activation_name(None)} if target == _FORWARD else {}
    attributes = _attributes(wide, False, **activation)
    space = native.work_space(target, [operand, widened], [result], attributes)
    return (wide, space) if space else (call, [])


def _in_units(call: KernelCall) -> KernelCall | None:
    """The call of float32 with channels and outputs as it can be split for tensor cores, if any."""
    if call.kernels != "fma" or call.groups > 1 or not are_hopper():
        return None
    unit = native.limits("conv").channel_bytes // 4
    channels, outputs = (_up_to_units(n, unit) for n in (call.channels, call.outputs))
    wide = dataclasses.replace(call, channels=channels, outputs=outputs)
    is_worthwhile = wide == call or min(call.channels, call.outputs) >= _MIN_WIDENED
    return wide if is_worthwhile else None


def _sizes(images: jax.Array, call: KernelCall) -> tuple[tuple[int, ...], ...]:
    """Sizes of x, the kernel and the result, as many images as there are of either side."""
    windows = call.windows
    lead = images.shape[: images.ndim - 1 - len(windows.taps)]
    return (
        (*lead, *windows.ins, call.channels),
        (*windows.taps, call.channels, call.outputs),
        (*lead, *windows.outs, call.outputs),
    )


def _operand(kernel: jax.Array, call: KernelCall) -> jax.Array:
    """The kernel as it is multiplied: products of TF32 leave out the lower bits of float32."""
    kernel = call.pad_kernel(kernel)
    return lax.reduce_precision(kernel, 8, 10) if _is_tf32(kernel, call) else kernel


def _is_tf32(operand: jax.Array, call: KernelCall) -> bool:
    return operand.dtype == np.float32 and call.kernels == "mma"


def _convolve(
    target: str, results, call: KernelCall, *operands: jax.Array, **attributes: Any
) -> list[jax.Array]:
    tf32 = _is_tf32(operands[1], call)
    layouts = None
    if target == _FORWARD and tf32:
        # Products of TF32 want the entries that are summed over next to each other.
        rank = len(call.windows.taps)
        layouts = [None, (*range(rank), rank + 1, rank), *[None] * (len(operands) - 2)]
    attributes = _attributes(call, tf32, **attributes)
    return native.ffi_call(target, results, input_layouts=layouts)(*operands, **attributes)


def _attributes(call: KernelCall, tf32: bool, **more: Any) -> dict[str, Any]:
    steps = zip(("strides", "dilation", "low"), _placement(call.windows), strict=True)
    placed = {name: np.array(values, np.int64) for name, values in steps}
    return {**placed, "tf32": np.bool_(tf32), **more}


def _placement(windows: Windows) -> tuple[tuple[int, ...], ...]:
    return windows.strides, windows.dilation, windows.low


def _shape(like: jax.Array, sizes, channels, dtype) -> jax.ShapeDtypeStruct:
    lead = like.shape[: like.ndim - 1 - len(sizes)]
    return jax.ShapeDtypeStruct((*lead, *sizes, channels), dtype)
