"""Checks and computation that the layers of `jaxops.flax.linen` and `jaxops.flax.nnx` share."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype

import jaxops
from jaxops._core import checks
from jaxops._core.dtypes import accumulation_dtype
from jaxops._families import sequences

# A tap sees one channel of one position, so the K taps of a filter are its fan-in.
default_kernel_init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
default_short_kernel_init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1)
default_dense_init = nn.initializers.lecun_normal()
default_bias_init = nn.initializers.zeros_init()


def check(
    layer: str,
    features: int,
    kernel_size: int,
    kernel_dilation: int,
    num_heads: int | None = 1,
    drop_connect: float = 0.0,
) -> None:
    """Raises the errors of a layer's sizes, before any parameter takes a senseless shape."""
    sizes = {
        "num_heads": num_heads,
        "kernel_size": kernel_size,
        "kernel_dilation": kernel_dilation,
    }
    for name, value in sizes.items():
        checks.integer(layer, name, value)
    if num_heads < 1 or features % num_heads:
        raise ValueError(
            f"{layer}: num_heads must divide the {features} channels, got num_heads={num_heads}"
        )
    for name in ("kernel_size", "kernel_dilation"):
        if sizes[name] < 1:
            raise ValueError(f"{layer}: {name} must be at least 1, got {sizes[name]}")
    if not 0 <= drop_connect <= 1:
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
    activation: str | None,
    padding: str | int = "causal",
    segment_ids: jax.Array | None = None,
    data_format: str = "NTC",
) -> tuple[jax.Array, jax.Array | None]:
    """The convolution of x, and the next state of decoding; without a state x is all there is."""
    weight = weight.astype(accumulation_dtype(x))
    if state is not None:
        taps = weight.shape[1]
        expected = cache_shape(layer, x.shape, taps, dilation, padding, data_format)
        _check_state(layer, x, state, expected)
        if segment_ids is None and data_format == "NTC":
            y, flat_state = jaxops.lightweight_conv_step(
                _with_one_batch_dimension(x),
                _with_one_batch_dimension(state),
                weight,
                dilation=dilation,
                bias=bias,
                activation=activation,
            )
            return y.reshape(x.shape), flat_state.reshape(state.shape)
    result = jaxops.lightweight_conv(
        x,
        weight,
        padding=padding,
        dilation=dilation,
        bias=bias,
        activation=activation,
        segment_ids=segment_ids,
        initial_state=state,
        return_final_state=state is not None,
        data_format=data_format,
    )
    return result if state is not None else (result, None)


def _check_state(layer: str, x: jax.Array, state: jax.Array, expected: tuple[int, ...]) -> None:
    if state.shape != expected:
        raise ValueError(
            f"{layer}: x of shape {x.shape} needs a cache of shape {expected}, got {state.shape}"
        )


def _with_one_batch_dimension(array: jax.Array) -> jax.Array:
    return array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])
