"""Checks and computation that the layers of `jaxops.flax.linen` and `jaxops.flax.nnx` share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import canonicalize_padding
from flax.typing import Dtype

import jaxops
from jaxops._core import checks
from jaxops._core.dtypes import accumulation_dtype
from jaxops._families import sequences
from jaxops.activations import Activation

# A tap sees one channel of one position, so the K taps of a filter are its fan-in.
default_kernel_init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
default_short_kernel_init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1)
default_dense_init = nn.initializers.lecun_normal()
default_bias_init = nn.initializers.zeros_init()


def check(
    layer: str,
    features: int,
    kernel_size: int | None,
    kernel_dilation: int,
    num_heads: int | None = 1,
    drop_connect: float = 0.0,
) -> None:
    """Raises the errors of a layer's sizes, before any parameter takes a senseless shape."""
    sizes: dict[str, Any] = {
        "num_heads": num_heads,
        "kernel_size": kernel_size,
        "kernel_dilation": kernel_dilation,
    }
    for name, value in sizes.items():
        checks.integer(layer, name, value)
    if sizes["num_heads"] < 1 or features % sizes["num_heads"]:
        raise ValueError(
            f"{layer}: num_heads must divide the {features} channels, got num_heads={num_heads}"
        )
    for name in ("kernel_size", "kernel_dilation"):
        if sizes[name] < 1:
            raise ValueError(f"{layer}: {name} must be at least 1, got {sizes[name]}")
    if not isinstance(drop_connect, numbers.Real) or not 0 <= drop_connect <= 1:
        raise ValueError(
            f"{layer}: drop_connect is a probability in [0, 1], got {checks.describe(drop_connect)}"
        )


def operands(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, dtype: Dtype | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """x and bias in the dtype of the computation, and the kernel in float32 or wider.

    The operators take a weight wider than x, and half-precision taps would not sum to one.
    """
    x, _, bias = promote_dtype(x, kernel, bias, dtype=dtype)
    return x, kernel.astype(accumulation_dtype(kernel)), bias


def filters(
    kernel: jax.Array, normalize: bool, drop: Callable[[jax.Array], jax.Array] | None
) -> jax.Array:
    """The filters of a kernel (..., K): its softmax, then DropConnect, where these are wanted."""
    weight = jax.nn.softmax(kernel, axis=-1) if normalize else kernel
    return weight if drop is None else drop(weight)


def dynamic_filters(
    logits: jax.Array,
    num_heads: int,
    normalize: bool,
    drop: Callable[[jax.Array], jax.Array] | None,
) -> tuple[jax.Array, bool]:
    """The weight (..., H, K) of a dynamic convolution of predictions (..., H K), and `normalize`.

    DropConnect comes after the softmax, so the softmax is not the convolution's where taps are
    dropped.
    """
    weight = logits.reshape(*logits.shape[:-1], num_heads, logits.shape[-1] // num_heads)
    if drop is None:
        return weight, normalize
    return filters(weight.astype(accumulation_dtype(weight)), normalize, drop), False


def cache_shape(
    layer: str,
    x_shape: tuple[int, ...],
    kernel_size: int,
    kernel_dilation: int,
    padding: str | int = "causal",
    data_format: str = "NTC",
) -> tuple[int, ...]:
    """The shape of the inputs that decoding keeps for a next call on inputs such as x.

    Raises:
      ValueError: the padding is not causal, so results need inputs that have not come yet.
    """
    reach = (kernel_size - 1) * kernel_dilation
    if sequences.resolve_padding(layer, padding, reach) != reach:
        raise ValueError(f'{layer}: decoding needs padding="causal", got {padding!r}')
    shape = list(x_shape)
    shape[sequences.time_axis(data_format)] = reach
    return tuple(shape)


def convolve(
    layer: str,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array | None = None,
    *,
    dilation: int,
    activation: Activation = None,
    padding: str | int = "causal",
    segment_ids: jax.Array | None = None,
    data_format: str = "NTC",
    implementation: str | None = None,
    **normalize: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """The convolution of x, and the next state of decoding; without a state x is all there is.

    weight is (H, K), or for a dynamic convolution (..., T, H, K) with the option `normalize`.
    """
    is_dynamic = weight.ndim > 2
    if not is_dynamic:
        weight = weight.astype(accumulation_dtype(x))
    options: dict[str, Any] = {
        "dilation": dilation,
        "bias": bias,
        "activation": activation,
        "implementation": implementation,
        **normalize,
    }
    if state is not None:
        taps = weight.shape[-1]
        expected = cache_shape(layer, x.shape, taps, dilation, padding, data_format)
        if state.shape != expected:
            raise ValueError(
                f"{layer}: x of shape {x.shape} needs a cache of shape {expected}, got "
                f"{state.shape}"
            )
        if segment_ids is None and data_format == "NTC":
            batch = math.prod(x.shape[:-2])
            steps, slots = (a.reshape(batch, *a.shape[x.ndim - 2 :]) for a in (x, state))
            if is_dynamic:
                step = jaxops.dynamic_conv_step
                weight = weight.reshape(batch, *weight.shape[-3:])
            else:
                step = jaxops.lightweight_conv_step
            y, new_state = step(steps, slots, weight, **options)
            return y.reshape(x.shape), new_state.reshape(state.shape)
    whole = jaxops.dynamic_conv if is_dynamic else jaxops.lightweight_conv
    result = whole(
        x,
        weight,
        padding=padding,
        segment_ids=segment_ids,
        initial_state=state,
        return_final_state=state is not None,
        data_format=data_format,
        **options,
    )
    return result if isinstance(result, tuple) else (result, None)


def transpose_images(
    layer: Any, x: jax.Array, kernel: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """The transposed convolution of x (..., *space, C) that a layer with Flax's fields asks for.

    The result is that of `flax.linen.ConvTranspose`, also with its "CIRCULAR" padding.
    """
    rank = kernel.ndim - 2
    batch = x.shape[: -rank - 1]
    strides = _per_dimension(layer.strides, rank)
    y = jaxops.conv_transpose(
        x.reshape(math.prod(batch), *x.shape[-rank - 1 :]),
        kernel,
        strides,
        "VALID" if layer.padding == "CIRCULAR" else canonicalize_padding(layer.padding, rank),
        _per_dimension(layer.kernel_dilation, rank),
        transpose_kernel=layer.transpose_kernel,
        precision=layer.precision,
        preferred_element_type=layer.preferred_element_type,
    )
    if layer.padding == "CIRCULAR":
        for axis, stride in enumerate(strides, 1):
            period = x.shape[axis - rank - 2] * stride
            y = _wrap(y, axis, period, layer.transpose_kernel)
    y = y if bias is None else y + bias
    return y.reshape(*batch, *y.shape[1:])


def masked(kernel: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The kernel of a convolution, zero where its mask is."""
    if mask is None:
        return kernel
    checks.shape("ConvTranspose", "mask", mask, kernel.shape, "that of the kernel")
    return kernel * mask


def _per_dimension(value: Any, rank: int) -> tuple[int, ...]:
    if value is None or isinstance(value, int):
        return (value or 1,) * rank
    return tuple(value)


def _wrap(y: jax.Array, axis: int, period: int, rounds_down: bool) -> jax.Array:
    """Sums the entries whose distance is a multiple of `period`, the middle ones in their place."""
    size = y.shape[axis]
    if period == 0:
        return jax.lax.slice_in_dim(y, 0, 0, axis=axis)
    # Half of what completes two periods lies before y.
    rest = (period - size) % (2 * period)
    before = (rest if rounds_down else rest + 1) // 2 % period
    pads = [(0, 0)] * y.ndim
    pads[axis] = (before, -(before + size) % period)
    y = jnp.pad(y, pads)
    return y.reshape(*y.shape[:axis], -1, period, *y.shape[axis + 1 :]).sum(axis)
