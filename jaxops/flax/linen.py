"""Layers for `flax.linen`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer

from jaxops.flax.shared import check, convolve, default_bias_init, default_kernel_init


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
