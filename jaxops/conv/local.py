"""The computation of one device in a convolution.

Where there are kernels, see `cuda_kernels` and `cpu_kernels`, they take images as they are.
Elsewhere convolutions are made of `im2col` and `col2im` and of a matrix product of XLA's, see
`patches`, or by XLA's own convolution where that was measured to be faster.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._core import implementation
from jaxops.activations import ACTIVATIONS
from jaxops.conv import alternatives, choices, cpu_kernels, cuda_kernels
from jaxops.conv.options import Options, over_pixels, sum_dtype, transposed_kernel
from jaxops.conv.patches import (
    block_size,
    col2im,
    im2col,
    letters,
    map_blocks,
    over_images,
    product,
    product_dtype,
    sum_blocks,
    tap_axes,
    widen,
)


def forward(x, kernel, bias=None, *, options, dtype, activation=None, platform, **_):
    """The convolution, with bias and activation."""
    windows = options.windows
    axis = x.ndim - 2 - options.rank
    batch = _Batch.from_kernels(kernel, axis)
    a, b, sums = cuda_kernels.operands(platform, dtype, x, kernel)
    if _runs_on_cpu("forward", options, platform, a, b):
        more = {"options": options, "dtype": sums, "activation": activation}
        return [cpu_kernels.forward(a, b, bias, **more).astype(dtype)]
    call = _find_call(options, platform, sums, a, b, batch)
    call = call if bias is None or batch.has(bias) else None
    own = options.of_shard(*kernel.shape[-2:])
    way = choices.find("forward", own, platform, dtype, call, batch.count, x, kernel)
    if way is not None:
        given = dict(options=own, dtype=dtype, platform=platform)
        return [alternatives.forward(way, forward, x, kernel, bias, activation=activation, **given)]
    if call is not None:
        in_groups, kernels = batch.to_groups(a), batch.to_groups(b)
        shared = None if bias is None else batch.to_groups(bias).reshape(-1)
        y = cuda_kernels.forward(
            in_groups, _alone(kernels, options), call, sums, shared, activation
        )
        return [batch.from_groups(y).astype(dtype)]
    apart = epilogue(x, kernel, bias, options=options, dtype=dtype, activation=activation)
    if apart is not None:
        operands, of_sums, finish = apart
        return finish(*forward(*operands, **of_sums, platform=platform))
    if options.is_depthwise:

        def compute(x, windows):
            products = widen(im2col(x, windows)) * over_images(kernel, options)
            return products.sum(tap_axes(products, options)).astype(dtype)
    elif options.groups > 1:
        grouped = _to_groups(x, axis, options), _to_groups(kernel, axis, options)
        one = options.take_one_group()
        (y,) = forward(*grouped, options=one, dtype=dtype, platform=platform)
        return [_from_groups(y, axis)]
    else:

        def compute(x, windows):
            outs, taps = letters(options)
            names = (f"n{outs}{taps}i", f"{taps}ij", f"n{outs}j")
            entries = math.prod((*x.shape[: axis + 1], *windows.outs, kernel.shape[-1]))
            rounded = product_dtype(platform, dtype, entries, x, kernel)
            x, filled = _with_whole_sums(platform, options, x, kernel)
            y = product(names, im2col(x, windows), filled, options, dtype=rounded)
            return y.astype(dtype)

    block, slabs = block_size(options, platform, x, kernel)
    if _is_faster_by_xla(options, platform, block, dtype, x, kernel):
        return [alternatives.convolve(x, kernel, options).astype(dtype)]

    def images(x):
        return slabs.joined(compute, x) if slabs else compute(x, windows)

    return [map_blocks(images, axis, block, x)]


def _with_whole_sums(platform, options, x, kernel):
    """Images and kernel with channels of zeros, so that sums of int8 products have 4 n terms.

    XLA (jax 0.11.2) doubled all sums of 6 such products on an H200; those of 4 n were right.
    """
    terms = math.prod(kernel.shape[-2 - options.rank : -1])
    if platform != "cuda" or kernel.dtype != jnp.int8 or terms % 4 == 0:
        return x, kernel
    missing = -options.fan_in % 4
    of_kernel = [(0, 0)] * (kernel.ndim - 2) + [(0, missing), (0, 0)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]), jnp.pad(kernel, of_kernel)


def input_grad(g, kernel, *, options, dtype, platform):
    """Its transpose in x."""
    windows = options.windows
    axis = g.ndim - 2 - options.rank
    batch = _Batch.from_kernels(kernel, axis)
    a, b, sums = cuda_kernels.operands(platform, dtype, g, kernel)
    if _runs_on_cpu("input_grad", options, platform, a, b):
        return [cpu_kernels.input_grad(a, b, options=options, dtype=sums).astype(dtype)]
    call = _find_call(options, platform, sums, a, b, batch)
    own = options.of_shard(*kernel.shape[-2:])
    way = choices.find("input_grad", own, platform, dtype, call, batch.count, g, kernel)
    if way is not None:
        more = dict(options=own, dtype=dtype, platform=platform)
        return [alternatives.input_grad(way, input_grad, g, kernel, **more)]
    if call is not None:
        in_groups, kernels = batch.to_groups(a), batch.to_groups(b)
        dx = cuda_kernels.input_grad(in_groups, _alone(kernels, options), call, sums)
        return [batch.from_groups(dx).astype(dtype)]
    if options.is_depthwise:

        def patches(g):
            taps = range(g.ndim - 1, g.ndim - 1 + options.rank)
            return widen(jnp.expand_dims(g, taps)) * over_images(kernel, options)
    elif options.groups > 1:
        grouped = _to_groups(g, axis, options), _to_groups(kernel, axis, options)
        one = options.take_one_group()
        dx = input_grad(*grouped, options=one, dtype=dtype, platform=platform)
        return [_from_groups(dx[0], axis)]
    else:

        def patches(g):
            outs, taps = letters(options)
            names = (f"n{outs}j", f"{taps}ij", f"n{outs}{taps}i")
            # Patches of several taps are summed before they are rounded.
            entries = math.prod((*g.shape[:-1], kernel.shape[-2])) if windows.are_entries else 0
            rounded = product_dtype(platform, dtype, entries, g, kernel)
            return product(names, g, kernel, options, dtype=rounded)

    block, slabs = block_size(options, platform, g, kernel, dtype=sum_dtype(g, kernel, dtype=dtype))
    by_xla = set(windows.strides) == {1} and _is_faster_by_xla(
        options, platform, block, dtype, g, kernel
    )
    if by_xla or _is_faster_by_cudnn(options, platform, dtype, g, kernel):
        mirrored = options.transposed((1,) * options.rank)
        return [alternatives.convolve(g, transposed_kernel(kernel, 1), mirrored).astype(dtype)]

    def compute(g, windows):
        return col2im(patches(g), windows)

    def images(g):
        return (slabs.spread(compute, g) if slabs else compute(g, windows)).astype(dtype)

    return [map_blocks(images, axis, block, g)]


def kernel_grad(x, g, *, options, dtype, summed, platform):
    """Its transpose in the kernel, summed over the batch dimensions flagged in `summed`."""
    axis = x.ndim - 2 - options.rank
    shape: tuple[Any, ...] = lax.broadcast_shapes(x.shape[:axis], g.shape[:axis])
    batch = _Batch({i: n for i, n in enumerate(shape) if not summed[i] and n != 1})
    a, b, sums = cuda_kernels.operands(platform, dtype, x, g)
    if _runs_on_cpu("kernel_grad", options, platform, a, b):
        more = {"options": options, "dtype": sums, "summed": summed}
        return [cpu_kernels.kernel_grad(a, b, **more).astype(dtype)]
    call = cuda_kernels.find_kernel_grad_call(options, platform, sums, a, b, batch.count)
    if call is not None and not (
        0 not in shape
        and _has_groups_for(batch, call, options)
        and (call.kernels == "direct" or x.shape[:axis] == g.shape[:axis])
    ):
        call = None
    own = options.of_shard(x.shape[-1], g.shape[-1])
    way = choices.find("kernel_grad", own, platform, dtype, call, batch.count, x, g)
    if way is not None:
        more = dict(options=own, dtype=dtype, summed=summed, platform=platform)
        return [alternatives.kernel_grad(way, kernel_grad, x, g, **more)]
    if call is not None:
        x, g = (jnp.broadcast_to(t, shape + t.shape[axis:]) for t in (a, b))
        dkernel = cuda_kernels.kernel_grad(batch.to_groups(x), batch.to_groups(g), call, sums)
        alone = jnp.expand_dims(dkernel, range(axis - len(batch.sizes)))
        return [batch.from_groups(alone).astype(dtype)]
    windows = options.windows
    if options.groups > 1 and not options.is_depthwise:
        grouped = _to_groups(x, axis, options), _to_groups(g, axis, options)
        (dkernel,) = kernel_grad(
            *grouped,
            options=options.take_one_group(),
            dtype=dtype,
            summed=(*summed, False),
            platform=platform,
        )
        return [_from_groups(dkernel, axis)]

    block, slabs = block_size(options, platform, x, g)

    def compute(x, g, windows):
        patches = im2col(x, windows, again=True)
        if options.is_depthwise:
            taps = range(g.ndim - 1, g.ndim - 1 + options.rank)
            products = widen(patches) * jnp.expand_dims(g, taps)
            images = range(axis, axis + 1 + options.rank)
            batch = tuple(i for i, s in enumerate(summed) if s)
            return products.sum(batch, keepdims=True).sum(tuple(images))[..., None, :]
        outs, taps = letters(options)
        of_patches, of_g = f"n{outs}{taps}i", f"n{outs}j"
        if platform != "cpu" or math.prod(windows.taps) * options.fan_in <= options.fan_out:
            names = (of_patches, of_g, f"{taps}ij")
            return product(names, patches, g, options, summed)
        # The products of a CPU were measured to be faster with more columns than rows.
        names = (of_g, of_patches, f"j{taps}i")
        transposed = product(names, g, patches, options, summed)
        return jnp.moveaxis(transposed, axis, -1)

    def images(x, g):
        return slabs.summed(compute, x, g) if slabs else compute(x, g, windows)

    return [sum_blocks(images, axis, block, x, g).astype(dtype)]


def by_xla(x, kernel, bias=None, *, options, dtype, activation, **_):
    """The convolution, with bias and activation, by `jax.lax` alone."""
    y = alternatives.convolve(x, kernel, options, sum_dtype(x, kernel, dtype=dtype))
    apart = epilogue(x, kernel, bias, options=options, dtype=dtype, activation=activation)
    return [y.astype(dtype)] if apart is None else apart[2](y)


def input_grad_by_xla(g, kernel, *, options, dtype, **_):
    """Its transpose in x, by `jax.lax` alone."""
    mirrored = options.transposed((1,) * options.rank)
    flipped = transposed_kernel(kernel, options.groups)
    wide = sum_dtype(g, kernel, dtype=dtype)
    dx = alternatives.convolve(g, flipped, mirrored, wide, options.windows.strides)
    return [dx.astype(dtype)]


def epilogue(x, kernel, bias=None, *, options, dtype, activation, **_):
    """Bias, activation and rounding apart from the sums, see `Operator`."""
    if bias is None and activation is None:
        return None

    def finish(y):
        if bias is not None:
            y = y + over_pixels(bias, options)
        return [ACTIVATIONS[activation](y).astype(dtype)]

    of_sums = dict(
        options=options,
        dtype=sum_dtype(x, kernel, dtype=dtype),
        activation=None,
        with_bias=False,
    )
    return (x, kernel), of_sums, finish


def _runs_on_cpu(direction, options: Options, platform: str | None, *arrays) -> bool:
    """Whether a kernel of CPUs computes a call, whose sizes it needs to know."""
    return (
        cpu_kernels.prefers(options, platform, direction, arrays[0].dtype)
        and all(jnp.issubdtype(a.dtype, jnp.floating) for a in arrays)
        and not any(jax.export.is_symbolic_dim(n) for a in arrays for n in a.shape)
        and not choices.is_forced()
    )


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Batch dimensions whose entries have kernels of their own: each is as good as more groups.

    Attributes:
      sizes: of these dimensions, by their number.
    """

    sizes: dict[int, int]

    @staticmethod
    def from_kernels(kernel: jax.Array, axis: int) -> _Batch:
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


def _find_call(options, platform, dtype, images, kernel, batch):
    """The call by which kernels take images, if they do, with a batch of kernels as groups."""
    if any(jax.export.is_symbolic_dim(n) for n in kernel.shape):
        return None
    fan_in, outputs = kernel.shape[-2:]
    # A device's channels of a depthwise convolution, which may be a shard, are its groups.
    groups = outputs if options.is_depthwise else options.groups
    fans = fan_in, outputs // groups
    call = cuda_kernels.find_call(
        options, platform, dtype, images, kernel, fans, groups * batch.count
    )
    return call if call is not None and _has_groups_for(batch, call, options) else None


def _has_groups_for(batch: _Batch, call: cuda_kernels.KernelCall, options: Options) -> bool:
    """Whether the kernels of a batch may be groups: those of a matrix product are left alone."""
    return not batch.sizes or (call.kernels == "direct" and options.groups > 1)


def _alone(kernel: jax.Array, options: Options) -> jax.Array:
    return kernel.reshape(kernel.shape[kernel.ndim - 2 - options.rank :])


def _to_groups(array: jax.Array, axis: int, options: Options) -> jax.Array:
    """The groups of the last dimension as one more batch dimension, the one before `axis`."""
    groups = options.groups
    split = array.reshape(*array.shape[:-1], groups, array.shape[-1] // groups)
    return jnp.moveaxis(split, -2, axis)


def _from_groups(array: jax.Array, axis: int) -> jax.Array:
    """Undoes `_to_groups`."""
    split = jnp.moveaxis(array, axis, -2)
    return split.reshape(*split.shape[:-2], split.shape[-2] * split.shape[-1])


def _is_faster_by_xla(
    options: Options, platform: str | None, block: int, dtype: Any, images, kernel
):
    """Whether XLA's convolution takes the place of patches, of which there are too many.

    On CPUs that is so of float32. On other devices, which have more memory, it is so where the
    patches of one image are too many: in three dimensions it was measured to be faster on GPUs.
    """
    if implementation.insists():
        return False
    if images.ndim != options.rank + 2 or kernel.ndim != images.ndim or options.is_depthwise:
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
    """Whether the input gradient of windows of one entry is a convolution, not a product.

    XLA has cuDNN convolve, which was measured to be up to 1.9 times faster than its products by a
    transposed kernel, and never slower by more than a tenth. Forward that is the other way round.
    """
    return (
        platform == "cuda"
        and not implementation.insists()
        and options.windows.are_entries
        and options.groups == 1
        and g.ndim == kernel.ndim == options.rank + 2
        and g.dtype == kernel.dtype == dtype
        and dtype.itemsize == 2
    )
