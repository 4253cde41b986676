"""Layers for `flax.nnx`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from jaxops.flax.shared import check, convolve, default_bias_init, default_kernel_init


class LightweightConv(nnx.Module):
    """Lightweight convolution: a depthwise convolution over time, one filter a head.

    y[b, t, c] = act(bias[c] + sum_k w[h, k] * x[b, t + k * dilation - P, c]), h = c // (C // heads)

    with w = dropconnect(softmax(kernel, over k)), x zero outside the sequence, and P as `padding`
    says. See `jaxops.lightweight_conv`, which computes it.

    Parameters: `kernel` (heads, kernel_size) and `bias`, (C,) or None.

    Args:
      features: the channels C of the input and the result.
      heads: number of filters; it divides `features`.
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
        keeps the filter's mean. All sequences of a batch see the same filter. It is an
        `nnx.Dropout`: `model.eval()` turns it off, `model.train()` on.
      deterministic: True turns DropConnect off; `train`, `eval` and the call can change it.
      rng_collection: the stream of `rngs` that DropConnect draws its keys from.
      dtype: dtype of the computation and the result; None: that of x and the parameters together.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of `kernel`.
      bias_init: initializer of `bias`.
      rngs: the streams `params` and, with DropConnect, `rng_collection`.

    Raises:
      ValueError: heads does not divide features, or kernel_size or drop_connect is out of range.

    Source: Wu, Fan, Baevski, Dauphin and Auli, "Pay Less Attention with Lightweight and Dynamic
    Convolutions", ICLR 2019, sections 3 and 4.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        kernel_size: int,
        *,
        padding: str | int = "causal",
        dilation: int = 1,
        use_bias: bool = False,
        activation: str | None = None,
        data_format: str = "NTC",
        normalize: bool = True,
        drop_connect: float = 0.0,
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs,
    ):
        check(features, heads, kernel_size, drop_connect)
        self.kernel = nnx.Param(kernel_init(rngs.params(), (heads, kernel_size), param_dtype))
        self.bias = (
            nnx.Param(bias_init(rngs.params(), (features,), param_dtype)) if use_bias else None
        )
        self.drop = (
            nnx.Dropout(
                drop_connect, deterministic=deterministic, rng_collection=rng_collection, rngs=rngs
            )
            if drop_connect
            else None
        )
        self.features = features
        self.padding = padding
        self.dilation = dilation
        self.activation = activation
        self.data_format = data_format
        self.normalize = normalize
        self.dtype = dtype

    def __call__(
        self,
        x: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """The convolution of x, (B, T, C) or (B, C, T), in the shape of x.

        `deterministic` and `rngs` mean for DropConnect what they mean for `nnx.Dropout`.

        Raises:
          ValueError: x does not have `features` channels or is not what
            `jaxops.lightweight_conv` takes.
        """
        channels = jnp.shape(x)[-2 if self.data_format == "NCT" else -1]
        if channels != self.features:
            raise ValueError(
                f"LightweightConv: expected {self.features} channels ({self.data_format}), "
                f"got x of shape {jnp.shape(x)}"
            )

        drop = None
        if self.drop is not None:
            drop = functools.partial(self.drop, deterministic=deterministic, rngs=rngs)
        bias = None if self.bias is None else self.bias[...]
        return convolve(self, x, self.kernel[...], bias, drop)
