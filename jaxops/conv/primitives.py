"""The primitives of convolution, of any number of spatial dimensions.

The family has three, each linear in each of its operands:

    conv              x, kernel -> y
    conv_input_grad   g, kernel -> dx, its transpose in x
    conv_kernel_grad  x, g -> dkernel, its transpose in the kernel

and every derivative of these is again one of these. The first may also add a bias and apply an
activation, before it rounds. Where there are kernels for them, see `cuda_kernels`, they take images
as they are; elsewhere they are made of `im2col` and `col2im` and of a matrix product of XLA's. What
a gradient needs is x, not its patches, which are made again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._core import compat, rules
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator
from jaxops._families.windows import Windows, col2im_operator, im2col_operator
from jaxops.activations import ACTIVATIONS
from jaxops.conv import cuda_kernels
from jaxops.conv.slabs import Slabs

# Patches of more bytes than these do not stay in the caches of a CPU until they are multiplied.
# There they are made and used block by block; where XLA's own convolution, which never has more
# than a tile of them, was measured to be faster still, it takes their place.
_BLOCK_BYTES = 8 << 20
# On other devices they may take this much of the memory.
_DEVICE_BLOCK_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Options:
    """What every primitive of the family is told, beside shapes.

    Attributes:
      windows: over x.
      groups: of channels.
      fan_in: input channels of a group.
      fan_out: output channels of a group.
      precision: of the products.
      rounds_cotangent: whether cotangents of the result are rounded to the dtype of x, to which
        the result is rounded too, if only after bias and activation.
    """

    windows: Windows
    groups: int
    fan_in: int
    fan_out: int
    precision: Any
    rounds_cotangent: bool

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel is a group of its own, with one output."""
        return self.groups > 1 and self.fan_in == 1 and self.fan_out == 1

    def of_one_group(self) -> Options:
        """The options of each of the groups."""
        return dataclasses.replace(self, groups=1)

    def transposed(self, strides: Sequence[int]) -> Options:
        """Those of the convolution whose input gradient is this one, of an lhs with zeros between.

        This one has no strides, that one those by which the entries of lhs are apart.
        """
        windows = self.windows
        mirrored = dataclasses.replace(
            windows,
            ins=windows.outs,
            outs=windows.ins,
            strides=tuple(strides),
            low=tuple(r - low for r, low in zip(windows.reach, windows.low, strict=True)),
        )
        return dataclasses.replace(self, windows=mirrored, fan_in=self.fan_out, fan_out=self.fan_in)

    # The dimensions of the operands in signatures. Of several groups devices have all channels,
    # unless every channel is a group of its own.

    @property
    def x(self) -> str:
        """The dimensions of the images."""
        return self._image(self.windows.in_dims, "cin", "inputs", self.fan_in)

    @property
    def y(self) -> str:
        """The dimensions of the result."""
        return self._image(self.windows.out_dims, "cout", "outputs", self.fan_out)

    @property
    def kernel(self) -> str:
        """The dimensions of the kernel."""
        taps = self.windows.tap_dims
        if self.groups == 1:
            return f"{taps} cin cout"
        if self.is_depthwise:
            return f"{taps} () channels"
        return f"{taps} fan={self.fan_in} outputs={self.groups * self.fan_out}"

    @property
    def bias(self) -> str:
        """The dimension of the bias."""
        if self.groups == 1:
            return "cout"
        return "channels" if self.is_depthwise else f"outputs={self.groups * self.fan_out}"

    def _image(self, dims, dense, grouped, fan):
        if self.groups == 1:
            channels = dense
        else:
            channels = "channels" if self.is_depthwise else f"{grouped}={self.groups * fan}"
        return f"rows {dims} {channels}"


_REPLICATED = ("in", "out", "step", "tap", "fan", "inputs", "outputs")


def _forward_local(x, kernel, bias=None, *, options, dtype, activation=None, platform, **_):
    windows = options.windows
    axis = x.ndim - 2 - _rank(options)
    batch = _Batch.of_kernels(kernel, axis)
    *operands, sums = cuda_kernels.operands(platform, dtype, x, kernel)
    form = _tiled(options, platform, sums, *operands, batch)
    if form is not None and (bias is None or batch.has(bias)):
        images, kernels = map(batch.to_groups, operands)
        shared = None if bias is None else batch.to_groups(bias).reshape(-1)
        y = cuda_kernels.forward(images, _alone(kernels, options), form, sums, shared, activation)
        return [batch.from_groups(y).astype(dtype)]
    apart = _epilogue(x, kernel, bias, options=options, dtype=dtype, activation=activation)
    if apart is not None:
        operands, of_sums, finish = apart
        return finish(*_forward_local(*operands, **of_sums, platform=platform))
    if options.is_depthwise:

        def compute(x, windows):
            products = _wide(_patches(x, windows)) * _over_images(kernel, options)
            return products.sum(_tap_axes(products, options)).astype(dtype)
    elif options.groups > 1:
        grouped = _to_groups(x, axis, options), _to_groups(kernel, axis, options)
        one = options.of_one_group()
        (y,) = _forward_local(*grouped, options=one, dtype=dtype, platform=platform)
        return [_from_groups(y, axis)]
    else:

        def compute(x, windows):
            outs, taps = _letters(options)
            names = (f"n{outs}{taps}i", f"{taps}ij", f"n{outs}j")
            rounded = _product_dtype(platform, dtype, x, kernel)
            y = _product(names, _patches(x, windows), kernel, options, dtype=rounded)
            return y.astype(dtype)

    block, slabs = _block(options, platform, x, kernel)
    if _is_faster_by_xla(options, platform, block, dtype, x, kernel):
        return [_convolution(x, kernel, options).astype(dtype)]

    def images(x):
        return slabs.joined(compute, x) if slabs else compute(x, windows)

    return [_joined(images, axis, block, x)]


def _input_grad_local(g, kernel, *, options, dtype, platform):
    windows = options.windows
    axis = g.ndim - 2 - _rank(options)
    batch = _Batch.of_kernels(kernel, axis)
    *operands, sums = cuda_kernels.operands(platform, dtype, g, kernel)
    form = _tiled(options, platform, sums, *operands, batch)
    if form is not None:
        images, kernels = map(batch.to_groups, operands)
        dx = cuda_kernels.input_grad(images, _alone(kernels, options), form, sums)
        return [batch.from_groups(dx).astype(dtype)]
    if options.is_depthwise:

        def patches(g):
            taps = range(g.ndim - 1, g.ndim - 1 + _rank(options))
            return _wide(jnp.expand_dims(g, taps)) * _over_images(kernel, options)
    elif options.groups > 1:
        grouped = _to_groups(g, axis, options), _to_groups(kernel, axis, options)
        one = options.of_one_group()
        dx = _input_grad_local(*grouped, options=one, dtype=dtype, platform=platform)
        return [_from_groups(dx[0], axis)]
    else:

        def patches(g):
            outs, taps = _letters(options)
            names = (f"n{outs}j", f"{taps}ij", f"n{outs}{taps}i")
            # Patches of several taps are summed before they are rounded.
            rounded = _product_dtype(platform, dtype, g, kernel) if windows.are_entries else None
            return _product(names, g, kernel, options, dtype=rounded)

    block, slabs = _block(options, platform, g, kernel, dtype=_wide_dtype(g, kernel, dtype))
    by_xla = set(windows.strides) == {1} and _is_faster_by_xla(
        options, platform, block, dtype, g, kernel
    )
    if by_xla or _is_faster_by_cudnn(options, platform, dtype, g, kernel):
        mirrored = options.transposed((1,) * _rank(options))
        return [_convolution(g, transposed_kernel(kernel, 1), mirrored).astype(dtype)]

    def compute(g, windows):
        return _image(patches(g), windows)

    def images(g):
        return (slabs.spread(compute, g) if slabs else compute(g, windows)).astype(dtype)

    return [_joined(images, axis, block, g)]


def _kernel_grad_local(x, g, *, options, dtype, summed, platform):
    axis = x.ndim - 2 - _rank(options)
    shape = np.broadcast_shapes(x.shape[:axis], g.shape[:axis])
    batch = _Batch({i: n for i, n in enumerate(shape) if not summed[i] and n != 1})
    *operands, sums = cuda_kernels.operands(platform, dtype, x, g)
    form = cuda_kernels.find_kernel_grad_form(options, platform, sums, *operands, batch.count)
    if form is not None and (
        0 not in shape
        and _has_groups_for(batch, form, options)
        and (form.kernels == "direct" or x.shape[:axis] == g.shape[:axis])
    ):
        x, g = (jnp.broadcast_to(a, shape + a.shape[axis:]) for a in operands)
        dkernel = cuda_kernels.kernel_grad(batch.to_groups(x), batch.to_groups(g), form, sums)
        alone = jnp.expand_dims(dkernel, range(axis - len(batch.sizes)))
        return [batch.from_groups(alone).astype(dtype)]
    windows = options.windows
    if options.groups > 1 and not options.is_depthwise:
        grouped = _to_groups(x, axis, options), _to_groups(g, axis, options)
        (dkernel,) = _kernel_grad_local(
            *grouped,
            options=options.of_one_group(),
            dtype=dtype,
            summed=(*summed, False),
            platform=platform,
        )
        return [_from_groups(dkernel, axis)]

    block, slabs = _block(options, platform, x, g)
    # Of one block the sum is the result; several are added before they are rounded.
    rounded = _product_dtype(platform, dtype, x, g) if block >= x.shape[axis] else None

    def compute(x, g, windows):
        patches = _patches(x, windows, again=True)
        if options.is_depthwise:
            taps = range(g.ndim - 1, g.ndim - 1 + _rank(options))
            products = _wide(patches) * jnp.expand_dims(g, taps)
            images = range(axis, axis + 1 + _rank(options))
            batch = tuple(i for i, s in enumerate(summed) if s)
            return products.sum(batch, keepdims=True).sum(tuple(images))[..., None, :]
        outs, taps = _letters(options)
        of_patches, of_g = f"n{outs}{taps}i", f"n{outs}j"
        if platform != "cpu" or math.prod(windows.taps) * options.fan_in <= options.fan_out:
            names = (of_patches, of_g, f"{taps}ij")
            return _product(names, patches, g, options, summed, dtype=rounded)
        # The products of a CPU were measured to be faster with more columns than rows.
        names = (of_g, of_patches, f"j{taps}i")
        transposed = _product(names, g, patches, options, summed, dtype=rounded)
        return jnp.moveaxis(transposed, axis, -1)

    def images(x, g):
        return slabs.summed(compute, x, g) if slabs else compute(x, g, windows)

    return [_summed(images, axis, block, x, g).astype(dtype)]


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Batch dimensions whose entries have kernels of their own: each is as good as more groups.

    Attributes:
      sizes: of these dimensions, by their number.
    """

    sizes: dict[int, int]

    @staticmethod
    def of_kernels(kernel: jax.Array, axis: int) -> _Batch:
        return _Batch({i: n for i, n in enumerate(kernel.shape[:axis]) if n != 1})

    @property
    def count(self) -> int:
        return math.prod(self.sizes.values())

    def has(self, bias: jax.Array) -> bool:
        """Whether a bias (..., C) has entries of its own for no others than these."""
        return all(n == 1 or i in self.sizes for i, n in enumerate(bias.shape[:-1]))

    def to_groups(self, array: jax.Array) -> jax.Array:
        """The entries of these dimensions as groups of the last one, in their place."""
        if not self.sizes:
            return array
        shape = [self.sizes.get(i, n) for i, n in enumerate(array.shape)]
        last = array.ndim - 1
        moved = jnp.moveaxis(
            jnp.broadcast_to(array, shape), tuple(self.sizes), range(last - len(self.sizes), last)
        )
        return moved.reshape(*moved.shape[: last - len(self.sizes)], self.count * shape[-1])

    def from_groups(self, array: jax.Array) -> jax.Array:
        """Undoes `to_groups`."""
        if not self.sizes:
            return array
        *lead, channels = array.shape
        split = array.reshape(*lead, *self.sizes.values(), channels // self.count)
        return jnp.moveaxis(split, range(len(lead), split.ndim - 1), tuple(self.sizes))


def _tiled(options, platform, dtype, images, kernel, batch):
    """The form in which kernels take images, if they do, with a batch of kernels as groups."""
    fan_in, outputs = kernel.shape[-2:]
    # A device's channels of a depthwise convolution, which may be a shard, are its groups.
    groups = outputs if options.is_depthwise else options.groups
    fans = fan_in, outputs // groups
    form = cuda_kernels.find_form(
        options, platform, dtype, images, kernel, fans, groups * batch.count
    )
    return form if form is not None and _has_groups_for(batch, form, options) else None


def _has_groups_for(batch: _Batch, form: cuda_kernels.Form, options: Options) -> bool:
    """Whether the kernels of a batch may be groups: those of a matrix product are left alone."""
    return not batch.sizes or (form.kernels == "direct" and options.groups > 1)


def _alone(kernel: jax.Array, options: Options) -> jax.Array:
    return kernel.reshape(kernel.shape[kernel.ndim - 2 - _rank(options) :])


def _rank(options: Options) -> int:
    return len(options.windows.taps)


def _letters(options: Options) -> tuple[str, str]:
    """Those of the windows' dimensions, for `_product`: patches and taps.

    Dimensions that are summed over come in the order of their letters. With these, that is how they
    lie in memory, in which patches are multiplied as they are.
    """
    return "opq"[: _rank(options)], "abc"[: _rank(options)]


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(accumulation_dtype(array))


def _wide_dtype(x: jax.Array, kernel: jax.Array, dtype: Any) -> np.dtype:
    """That of sums, and of a result that is not rounded yet."""
    return accumulation_dtype(x, kernel, dtype)


def _over_pixels(bias: jax.Array, options: Options) -> jax.Array:
    """(..., C) -> (..., 1, 1..., C), as results lie."""
    return jnp.expand_dims(bias, range(bias.ndim - 1, bias.ndim + _rank(options)))


def _patches(x: jax.Array, windows: Windows, *, again: bool = False) -> jax.Array:
    """(..., rows, *ins, C) -> (..., rows, *outs, *taps, C)."""
    if windows.are_entries:
        return jnp.expand_dims(x, range(x.ndim - 1, x.ndim - 1 + len(windows.taps)))
    return im2col_operator.on_one_device(x, windows=windows, again=again)[0]


def _image(patches: jax.Array, windows: Windows) -> jax.Array:
    """The transpose of `_patches`."""
    if windows.are_entries:
        rank = len(windows.taps)
        return jnp.squeeze(patches, range(patches.ndim - 1 - rank, patches.ndim - 1))
    return col2im_operator.on_one_device(patches, windows=windows)[0]


def _over_images(kernel: jax.Array, options: Options) -> jax.Array:
    """A depthwise kernel, broadcast over the patches of images: (..., 1, 1..., *taps, C)."""
    at = kernel.ndim - 2 - _rank(options)
    return jnp.expand_dims(kernel.squeeze(-2), range(at, at + 1 + _rank(options)))


def _tap_axes(patches: jax.Array, options: Options) -> tuple[int, ...]:
    return tuple(range(patches.ndim - 1 - _rank(options), patches.ndim - 1))


def _to_groups(array: jax.Array, axis: int, options: Options) -> jax.Array:
    """The groups of the last dimension as one more batch dimension, the one before `axis`."""
    groups = options.groups
    split = array.reshape(*array.shape[:-1], groups, array.shape[-1] // groups)
    return jnp.moveaxis(split, -2, axis)


def _from_groups(array: jax.Array, axis: int) -> jax.Array:
    """Undoes `_to_groups`."""
    split = jnp.moveaxis(array, axis, -2)
    return split.reshape(*split.shape[:-2], split.shape[-2] * split.shape[-1])


def _product_dtype(platform: str | None, dtype: Any, *arrays: jax.Array) -> Any:
    """The dtype of a product that is rounded to `dtype`: that of its sums, if not `dtype` itself.

    GPUs sum products of 16-bit floats in float32 whatever the result is, and were measured to be
    faster where it is not that.
    """
    if platform == "cuda" and all(a.dtype == dtype for a in arrays):
        return dtype
    return accumulation_dtype(*arrays)


def _product(names, a, b, options, summed=None, dtype=None):
    """An einsum in the accumulation's dtype, of arrays with batch dimensions before the named ones.

    If a `dtype` is given the result is rounded to that.

    A batch dimension may be 1 in either array, which then does not vary along it. Those flagged in
    `summed` are summed over; their size in the result is 1. The dimensions of `names` are those of
    the result in the order of the arrays.
    """
    of_a, of_b, of_out = names
    rank = a.ndim - len(of_a)
    batch = np.broadcast_shapes(a.shape[:rank], b.shape[:rank])
    varies = [n != 1 and not (summed and summed[i]) for i, n in enumerate(batch)]
    out = [i for i in range(rank) if varies[i]] + [*of_out]
    wide = accumulation_dtype(a, b)
    (a, in_a), (b, in_b) = (
        _without_ones(array, rank, letters) for array, letters in ((a, of_a), (b, of_b))
    )
    # What only one of them varies along is summed over before.
    a, in_a = _sum_over([d for d in in_a if d not in in_b and d not in out], a, in_a)
    b, in_b = _sum_over([d for d in in_b if d not in in_a and d not in out], b, in_b)
    if a.dtype != b.dtype:
        a, b = a.astype(wide), b.astype(wide)
    shared = [d for d in in_a if d in in_b]
    contracted, common = [d for d in shared if d not in out], [d for d in shared if d in out]
    result = lax.dot_general(
        a,
        b,
        tuple(
            tuple([in_x.index(d) for d in dims] for in_x in (in_a, in_b))
            for dims in (contracted, common)
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
    total = _wide(array).sum([names.index(d) for d in dims])
    return total, [name for name in names if name not in dims]


def _block(
    options: Options, platform: str | None, *arrays: jax.Array, dtype: Any = None
) -> tuple[int, Slabs | None]:
    """How many images' patches may be made at a time; with 0, what of one image's may be.

    The `dtype` is that of the patches, if it is wider than that of all arrays.
    """
    images = arrays[0]
    axis = images.ndim - 2 - _rank(options)
    rows = images.shape[axis]
    batch = np.broadcast_shapes(*(a.shape[:axis] for a in arrays))
    windows = options.windows
    channels = options.fan_in * (images.shape[-1] if options.is_depthwise else 1)
    itemsize = max(d.itemsize for d in (*(a.dtype for a in arrays), dtype or arrays[0].dtype))
    window_bytes = math.prod((*batch, *windows.taps)) * channels * itemsize
    image_bytes = window_bytes * math.prod(windows.outs)
    most = _BLOCK_BYTES if platform == "cpu" else _DEVICE_BLOCK_BYTES
    if image_bytes == 0:
        return rows, None
    # The patches of single entries are the image.
    fits = image_bytes <= most or windows.are_entries
    return most // image_bytes, None if fits else Slabs.of(windows, most // window_bytes)


def _is_faster_by_xla(
    options: Options, platform: str | None, block: int, dtype: Any, images, kernel
):
    """Whether XLA's convolution takes the place of patches, of which there are too many.

    On CPUs that is so of float32. On other devices, which have more memory, it is so where the
    patches of one image are too many: in three dimensions it was measured to be faster on GPUs.
    """
    if images.ndim != _rank(options) + 2 or kernel.ndim != images.ndim or options.is_depthwise:
        return False
    if platform == "cpu":
        return block < images.shape[0] and images.dtype == kernel.dtype == jnp.float32
    return (
        block == 0
        and images.shape[0] > 0
        and not options.windows.are_entries
        and images.dtype == kernel.dtype == dtype
        and dtype != jnp.float64
    )


def _is_faster_by_cudnn(options: Options, platform: str | None, dtype: Any, g, kernel):
    """Whether the gradient by x of windows of one entry is a convolution instead of a product.

    XLA has cuDNN convolve, which was measured to be up to 1.9 times faster than its products by a
    transposed kernel, and never slower by more than a tenth. Forward that is the other way round.
    """
    return (
        platform == "cuda"
        and options.windows.are_entries
        and options.groups == 1
        and g.ndim == kernel.ndim == _rank(options) + 2
        and g.dtype == kernel.dtype == dtype
        and dtype.itemsize == 2
    )


def _convolution(x: jax.Array, kernel: jax.Array, options: Options) -> jax.Array:
    """XLA's convolution of one group."""
    windows = options.windows
    reaches = [
        (out - 1) * s + (k - 1) * d + 1
        for out, s, k, d in zip(
            windows.outs, windows.strides, windows.taps, windows.dilation, strict=True
        )
    ]
    padding = [
        (low, reach - n - low)
        for low, reach, n in zip(windows.low, reaches, windows.ins, strict=True)
    ]
    sizes = "DHW"[3 - _rank(options) :]
    return lax.conv_general_dilated(
        x,
        kernel,
        windows.strides,
        padding,
        rhs_dilation=windows.dilation,
        dimension_numbers=(f"N{sizes}C", f"{sizes}IO", f"N{sizes}C"),
        precision=options.precision,
    )


def transposed_kernel(kernel: jax.Array, groups: int) -> jax.Array:
    """The kernel whose input gradient is the convolution, without strides, with `kernel`."""
    *taps, fan_in, outputs = kernel.shape
    flipped = jnp.flip(kernel, range(len(taps)))
    grouped = flipped.reshape(*taps, fan_in, groups, outputs // groups)
    return jnp.moveaxis(grouped, (-3, -1), (-1, -3)).reshape(
        *taps, outputs // groups, groups * fan_in
    )


def _cut(array: jax.Array, axis: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Whole blocks of entries along the axis, beside each other, and what is left of the array."""
    moved = jnp.moveaxis(array, axis, 0)
    whole = moved.shape[0] // block * block
    blocks = moved[:whole].reshape(whole // block, block, *moved.shape[1:])
    return jnp.moveaxis(blocks, 1, axis + 1), jnp.moveaxis(moved[whole:], 0, axis)


def _joined(function, axis, block, array):
    """function(array), made of blocks of entries along the axis."""
    rows = array.shape[axis]
    block = max(1, block)
    if block >= rows:
        return function(array)
    blocks, rest = _cut(array, axis, block)
    results = jnp.moveaxis(lax.map(function, blocks), 0, axis)
    shape = results.shape
    joined = results.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    if rest.shape[axis] == 0:
        return joined
    return jnp.concatenate([joined, function(rest)], axis)


def _summed(function, axis, block, *arrays):
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


def _epilogue(x, kernel, bias=None, *, options, dtype, activation, **_):
    """Bias, activation and rounding apart from the sums, see `Operator`."""
    if bias is None and activation is None:
        return None

    def finish(y):
        if bias is not None:
            y = y + _over_pixels(bias, options)
        return [ACTIVATIONS[activation](y).astype(dtype)]

    of_sums = dict(
        options=options,
        dtype=_wide_dtype(x, kernel, dtype),
        activation=None,
        with_bias=False,
    )
    return (x, kernel), of_sums, finish


def _with_neighbours(image, *others, plan, options, of_windows, **params):
    first = image.ndim - 1 - _rank(options)
    image, part = options.windows.of_part(image, first, plan, of_windows=of_windows)
    return (image, *others), {"options": dataclasses.replace(options, windows=part), **params}


def _operator(name, signature, local, **more):
    of_windows = local is _input_grad_local
    return Operator(
        name,
        signature=lambda *, options, **params: signature(options, **params),
        dtypes=lambda *_, dtype, **__: [dtype],
        local=local,
        replicated=_REPLICATED,
        summed_outputs=(0,) if local is _kernel_grad_local else (),
        neighbours=functools.partial(_with_neighbours, of_windows=of_windows),
        **more,
    )


def _forward_signature(options, *, with_bias, **_):
    operands = (options.x, options.kernel, *([options.bias] if with_bias else ()))
    return f"{', '.join(operands)} -> {options.y}"


_forward_operator = _operator("conv", _forward_signature, _forward_local, epilogue=_epilogue)
_input_grad_operator = _operator(
    "conv_input_grad", lambda o, **_: f"{o.y}, {o.kernel} -> {o.x}", _input_grad_local
)
_kernel_grad_operator = _operator(
    "conv_kernel_grad", lambda o, **_: f"{o.x}, {o.y} -> {o.kernel}", _kernel_grad_local
)


def forward(x, kernel, bias=None, *, options, dtype, activation=None):
    """Of a bias in the dtype of the sums, if there is one."""
    operands = (x, kernel) if bias is None else (x, kernel, bias)
    (y,) = _forward_operator(
        *operands,
        options=options,
        dtype=np.dtype(dtype),
        activation=activation,
        with_bias=bias is not None,
    )
    return y


def input_grad(g, kernel, *, options, dtype):
    """The gradient with respect to x, of the dtype given."""
    (dx,) = _input_grad_operator(g, kernel, options=options, dtype=np.dtype(dtype))
    return dx


def kernel_grad(x, g, like, *, options):
    """Of the dtype of `like`, and summed over the batch dimensions that it does not have."""
    summed = tuple(n == 1 for n in like.shape[: like.ndim - 2 - _rank(options)])
    (dkernel,) = _kernel_grad_operator(
        x, g, options=options, dtype=np.dtype(like.dtype), summed=summed
    )
    return dkernel


def _tangent(operator: Operator, primals, tangents, **params) -> jax.Array | None:
    """That of an operator which is linear in each of two operands."""
    a, b = primals
    da, db = tangents
    terms = [(da, b)] if da is not None else []
    terms += [(a, db)] if db is not None else []
    results = [operator(*t, **params)[0] for t in terms]
    return functools.reduce(jnp.add, results) if results else None


def _def_jvp(operator: Operator) -> None:
    @operator.def_jvp
    def _jvp(primals, tangents, **params):
        (value,) = operator(*primals, **params)
        return [value], [_tangent(operator, primals, rules.live(tangents, 2), **params)]


_def_jvp(_input_grad_operator)
_def_jvp(_kernel_grad_operator)


@_forward_operator.def_jvp
def _forward_jvp(primals, tangents, *, options, dtype, activation, **_):
    if activation not in (None, "relu"):

        def unfused(*operands):
            wide = _wide_dtype(*operands[:2], dtype)
            # Named as well: it is what the gradient needs, so that a policy which saves the
            # operator's result spares the backward pass a second forward one.
            y = checkpoint_name(forward(*operands, options=options, dtype=wide), "conv2d")
            return ACTIVATIONS[activation](y).astype(dtype)

        y, dy = rules.jvp(unfused, primals, tangents)
        return [y], [dy]

    y = forward(*primals, options=options, dtype=dtype, activation=activation)
    if activation is not None:
        # The result tells where it was positive, so that nothing else is kept for the gradient.
        y = checkpoint_name(y, "conv2d")
    *live, dbias = rules.live(tangents, 3)
    plain = dict(options=options, activation=None, with_bias=False)
    # What the bias adds to is rounded with it.
    summed = dtype if dbias is None else _wide_dtype(*primals[:2], dtype)
    dy = _tangent(_forward_operator, primals[:2], live, dtype=np.dtype(summed), **plain)
    if dbias is not None:
        spread = rules.broadcast_like(_over_pixels(dbias, options), jax.typeof(y)).astype(summed)
        dy = spread if dy is None else compat.reshard_like(dy, jax.typeof(y)) + spread
    dy = compat.reshard_like(dy.astype(dtype), jax.typeof(y))
    return [y], [dy if activation is None else jnp.where(y > 0, dy, jnp.zeros_like(dy))]


@_forward_operator.def_transpose
def _forward_transpose(cotangents, x, kernel, *, options, dtype, activation, with_bias):
    del dtype, activation, with_bias  # what is linear has neither
    (g,) = cotangents
    if isinstance(g, compat.Zero):
        return rules.zeros((x, kernel))
    like = x.aval if compat.is_undefined_primal(x) else kernel.aval
    if options.rounds_cotangent:
        g = g.astype(like.dtype)
    if compat.is_undefined_primal(x):
        dx = input_grad(g, kernel, options=options, dtype=like.dtype)
        return [rules.fit(dx, like, _rank(options) + 2), None]
    dkernel = kernel_grad(x, g, like, options=options)
    return [None, rules.fit(dkernel, like, _rank(options) + 2)]


@_input_grad_operator.def_transpose
def _input_grad_transpose(cotangents, g, kernel, *, options, dtype):
    (dx,) = cotangents
    if isinstance(dx, compat.Zero):
        return rules.zeros((g, kernel))
    if compat.is_undefined_primal(g):
        y = forward(dx, kernel, options=options, dtype=g.aval.dtype)
        return [rules.fit(y, g.aval, _rank(options) + 2), None]
    dkernel = kernel_grad(dx, g, kernel.aval, options=options)
    return [None, rules.fit(dkernel, kernel.aval, _rank(options) + 2)]


@_kernel_grad_operator.def_transpose
def _kernel_grad_transpose(cotangents, x, g, *, options, dtype, summed):
    (dkernel,) = cotangents
    if isinstance(dkernel, compat.Zero):
        return rules.zeros((x, g))
    if compat.is_undefined_primal(x):
        dx = input_grad(g, dkernel, options=options, dtype=x.aval.dtype)
        return [rules.fit(dx, x.aval, _rank(options) + 2), None]
    y = forward(x, dkernel, options=options, dtype=g.aval.dtype)
    return [None, rules.fit(y, g.aval, _rank(options) + 2)]
