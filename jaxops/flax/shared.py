"""What the layers of `jaxops.flax.linen` and `jaxops.flax.nnx` share: checks and computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

import jaxops
from jaxops._core import checks
from jaxops._core.dtypes import accumulation_dtype

# A tap sees one channel of one position, so the K taps of a filter are its fan-in.
default_kernel_init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
default_bias_init = nn.initializers.zeros_init()


def check(features: int, heads: int, kernel_size: int, drop_connect: float) -> None:
    """Raises the errors of both layers, before any parameter takes a senseless shape."""
    for name, value in (("heads", heads), ("kernel_size", kernel_size)):
        checks.integer("LightweightConv", name, value)
    if heads < 1 or features % heads:
        raise ValueError(
            f"LightweightConv: heads must divide the {features} channels, got heads={heads}"
        )
    if kernel_size < 1:
        raise ValueError(f"LightweightConv: kernel_size must be at least 1, got {kernel_size}")
    if not 0 <= drop_connect <= 1:
        raise ValueError(
            "LightweightConv: drop_connect is a probability in [0, 1], got "
            f"{checks.describe(drop_connect)}"
        )


def convolve(
    layer: Any,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    drop: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """Computes both layers; `layer` has their attributes, `drop` is DropConnect or None."""
    x, _, bias = promote_dtype(x, kernel, bias, dtype=layer.dtype)
    # Half-precision taps would not sum to one, and the operator takes a weight wider than x.
    weight = kernel.astype(accumulation_dtype(kernel))
    if layer.normalize:
        weight = jax.nn.softmax(weight, axis=-1)
    if drop is not None:
        weight = drop(weight)
    return jaxops.lightweight_conv(
        x,
        weight.astype(accumulation_dtype(x)),
        padding=layer.padding,
        dilation=layer.dilation,
        bias=bias,
        activation=layer.activation,
        data_format=layer.data_format,
    )
