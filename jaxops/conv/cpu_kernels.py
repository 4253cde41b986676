"""Convolution on CPUs, whose patches are never in memory: the kernels of `cpu/conv.cc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._core import native
from jaxops.activations import activation_name
from jaxops.conv.options import Options

_FORWARD, _INPUT_GRAD, _KERNEL_GRAD = TARGETS = (
    "jaxops_conv",
    "jaxops_conv_input_grad",
    "jaxops_conv_kernel_grad",
)
native.TARGETS.extend(TARGETS)


def prefers(options: Options, platform: str | None, direction: str, dtype: Any) -> bool:
    """Whether these kernels take a call: all calls of floats on CPUs, but two of one group.

    The input gradient of few channels, such as RGB, leaves most of a vector idle: that of
    (32,3,224,224,64,7) float32 with strides of 2 takes 246 ms, and 103 by patches. In bfloat16 it
    takes 18 by products of matrices, and 122 by patches (two cores of an Intel Xeon). A window of
    one entry without strides is a matrix product, which XLA computes for float32 and float64: the
    value of (4,64,56,56,256,1) float32 takes 2.0 ms, and 2.8 here; the kernel gradient of
    (4,512,28,28,128,1) takes 3.8, and 2.4 here (7469577, two cores).
    """
    if platform != "cpu":
        return False
    if options.groups > 1:
        return True
    if direction == "input_grad" and options.fan_in < 8 <= options.fan_out:
        return dtype == jnp.bfloat16 and native.has_bf16_matrices()
    is_16_bit = np.dtype(dtype).itemsize == 2
    return not options.windows.are_entries or direction == "kernel_grad" or is_16_bit


def forward(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    options: Options,
    dtype: Any,
    activation: str | None,
) -> jax.Array:
    """Takes operands of one dtype, and a bias of the dtype of sums.

    The images are (..., rows, *ins, C), kernels (..., *taps, fan_in, O) and biases (..., O), with
    the same number of leading dimensions. These are 1 in arrays that do not vary along them.
    """
    biases = [] if bias is None else [bias]
    operands = x, kernel, *biases
    rank = x.ndim - 2 - options.rank
    shape = (*_batch(rank, operands), x.shape[rank], *options.windows.outs, kernel.shape[-1])
    more = {"activation": activation_name(activation)}
    return _call(_FORWARD, shape, dtype, operands, options, **more)


def input_grad(g: jax.Array, kernel: jax.Array, *, options: Options, dtype: Any) -> jax.Array:
    """The transpose of `forward` in x."""
    rank = g.ndim - 2 - options.rank
    fan_in, outputs = kernel.shape[-2:]
    channels = outputs if options.is_depthwise else options.groups * fan_in
    shape = (*_batch(rank, (g, kernel)), g.shape[rank], *options.windows.ins, channels)
    return _call(_INPUT_GRAD, shape, dtype, (g, kernel), options)


def kernel_grad(
    x: jax.Array, g: jax.Array, *, options: Options, dtype: Any, summed: Sequence[bool]
) -> jax.Array:
    """The transpose of `forward` in the kernel, summed over the dimensions flagged in `summed`."""
    batch = _batch(len(summed), (x, g))
    batch = tuple(1 if s else n for s, n in zip(summed, batch, strict=True))
    fan_in = 1 if options.is_depthwise else x.shape[-1] // options.groups
    shape = (*batch, *options.windows.taps, fan_in, g.shape[-1])
    return _call(_KERNEL_GRAD, shape, dtype, (x, g), options)


def _batch(rank: int, operands: Sequence[jax.Array]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(o.shape[:rank] for o in operands))


def _call(target, shape, dtype, operands, options: Options, **more: Any) -> jax.Array:
    windows = options.windows
    attributes = {
        name: np.array(getattr(windows, name), np.int64) for name in ("strides", "dilation", "low")
    }
    result = jax.ShapeDtypeStruct(shape, dtype)
    (y,) = native.ffi_call(target, [result])(*operands, **attributes, **more)
    return y
