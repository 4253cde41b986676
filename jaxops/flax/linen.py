"""Layers for `flax.linen`, and what the layers of `jaxops.flax.nnx` share with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

import jaxops
from jaxops._core import checks
from jaxops._core.dtypes import accumulation_dtype

# A tap sees one channel of one position, so the K taps of a filter are its fan-in.
default_kernel_init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
default_bias_init = nn.initializers.zeros_init()


class LightweightConv(nn.Module):
    """Lightweight convolution: a depthwise convolution over time, one filter a head.

    y[b, t, c] = act(bias[c] + sum_k w[h, k] * x[b, t + k * dilation - P, c]), h = c // (C // heads)

    with w = dropconnect(softmax(kernel, over k)), x zero outside the sequence, and P as `padding`
    says. See `jaxops.lightweight_conv`, which computes it.

    Parameters: `kernel` (heads, kernel_size) and, with `use_bias`, `bias` (C,).

    Attributes:
      heads: number of filters; it divides the channels C of the input.
      kernel_size: taps of a filter, at least 1.
      padding: "causal" (position t sees nothing after t), "same", or an int P.
      dilation: distance in time between two taps.
      use_bias: whether to add a bias to each channel.
      activation: None, "relu", "silu" or "gelu", applied to the result.
      data_format: "NTC" for x of shape (B, T, C), "NCT" for (B, C, T).
      normalize: whether a filter is the softmax of its kernel over the taps, as in the paper; the
        softmax is taken in float32 or wider. Otherwise the filter is the kernel itself.
      drop_connect: the probability, in [0, 1], with which DropConnect sets a tap of the
        (normalised) filter to zero; the taps kept are scaled by 1 / (1 - drop_connect), which
        keeps the filter's mean. All sequences of a batch see the same filter.
      deterministic: True turns DropConnect off; here or in the call, as in `nn.Dropout`.
      rng_collection: the collection DropConnect draws its key from.
      dtype: dtype of the computation and the result; None: that of x and the parameters together.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of `kernel`.
      bias_init: initializer of `bias`.

    Source: Wu, Fan, Baevski, Dauphin and Auli, "Pay Less Attention with Lightweight and Dynamic
    Convolutions", ICLR 2019, sections 3 and 4.
    """

    heads: int
    kernel_size: int
    padding: str | int = "causal"
    dilation: int = 1
    use_bias: bool = False
    activation: str | None = None
    data_format: str = "NTC"
    normalize: bool = True
    drop_connect: float = 0.0
    deterministic: bool | None = None
    rng_collection: str = "dropout"
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool | None = None) -> jax.Array:
        """The convolution of x, (B, T, C) or (B, C, T), in the shape of x.

        Raises:
          ValueError: an attribute is out of range, or heads does not divide C, or DropConnect is
            asked for and `deterministic` is given nowhere, or twice.
        """
        features = jnp.shape(x)[-2 if self.data_format == "NCT" else -1]
        check(features, self.heads, self.kernel_size, self.drop_connect)
        kernel = self.param(
            "kernel", self.kernel_init, (self.heads, self.kernel_size), self.param_dtype
        )
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (features,), self.param_dtype)
        drop = None
        if self.drop_connect:
            flag = nn.merge_param("deterministic", self.deterministic, deterministic)
            drop = nn.Dropout(
                self.drop_connect, deterministic=flag, rng_collection=self.rng_collection
            )
        return convolve(self, x, kernel, bias, drop)


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
