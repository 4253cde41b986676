"""Layers for `flax.linen`."""

from __future__ import annotations

from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer

from jaxops.flax import shared
from jaxops.flax.shared import (
    default_bias_init,
    default_dense_init,
    default_kernel_init,
    default_short_kernel_init,
)


class LightweightConv(nn.Module):
    """Lightweight convolution: a depthwise convolution over time, one filter a head.

    y[b, t, c] = act(bias[c] + sum_k w[h, k] * x[b, t + k * dilation - P, c]), h = c // (C // heads)

    with w = dropconnect(softmax(kernel, over k)), x zero outside the sequence, and P as `padding`
    says. See `jaxops.lightweight_conv`, which computes it.

    Parameters: `kernel` (num_heads, kernel_size) and, with `use_bias`, `bias` (C,).

    Attributes:
      num_heads: number of filters; it divides the channels C of the input.
      kernel_size: taps of a filter, at least 1.
      padding: "causal" (position t sees nothing after t), "same", or an int P.
      kernel_dilation: distance in time between two taps.
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
      decode: whether calls continue the sequences of earlier calls, as `ShortConv` describes.
      dtype: dtype of the computation and the result; None: that of x and the parameters together.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of `kernel`.
      bias_init: initializer of `bias`.
      heads, dilation: earlier names of num_heads and kernel_dilation, until a release.

    Source: Wu, Fan, Baevski, Dauphin and Auli, "Pay Less Attention with Lightweight and Dynamic
    Convolutions", ICLR 2019, sections 3 and 4.
    """

    num_heads: int | None = None
    kernel_size: int | None = None
    _: KW_ONLY
    padding: str | int = "causal"
    kernel_dilation: int = 1
    use_bias: bool = False
    activation: str | None = None
    data_format: str = "NTC"
    normalize: bool = True
    drop_connect: float = 0.0
    deterministic: bool | None = None
    rng_collection: str = "dropout"
    decode: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    heads: int | None = None
    dilation: int | None = None

    def __post_init__(self) -> None:
        """Gives the values of earlier names to the fields."""
        # The earlier names are None again, so that `clone` takes new values by either name.
        if self.heads is not None:
            self.num_heads, self.heads = self.heads, None
        if self.dilation is not None:
            self.kernel_dilation, self.dilation = self.dilation, None
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        deterministic: bool | None = None,
        *,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """The convolution of x, (..., T, C) or (..., C, T), in the shape of x.

        `segment_ids`, integers (..., T), are those of packed sequences: a tap reads only the
        segment of its result.

        Raises:
          ValueError: an attribute is out of range, or num_heads does not divide C, or DropConnect
            is asked for and `deterministic` is given nowhere, or twice.
        """
        name = "LightweightConv"
        features = jnp.shape(x)[-2 if self.data_format == "NCT" else -1]
        shared.check(
            name,
            features,
            self.kernel_size,
            self.kernel_dilation,
            self.num_heads,
            self.drop_connect,
        )
        kernel = self.param(
            "kernel", self.kernel_init, (self.num_heads, self.kernel_size), self.param_dtype
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
        x, kernel, bias = shared.operands(x, kernel, bias, self.dtype)
        cache = None
        if self.decode:
            sizes = (self.kernel_size, self.kernel_dilation, self.padding, self.data_format)
            cache = _cached_inputs(self, shared.cache_shape(name, x.shape, *sizes), x.dtype)
        y, state = shared.convolve(
            name,
            x,
            shared.filters(kernel, self.normalize, drop),
            bias,
            None if cache is None else cache.value,
            dilation=self.kernel_dilation,
            activation=self.activation,
            padding=self.padding,
            segment_ids=segment_ids,
            data_format=self.data_format,
        )
        _store(self, cache, state)
        return y


class ShortConv(nn.Module):
    """A short causal depthwise convolution over time, as in Mamba, GDN and Hyena.

    y[..., t, c] = act(bias[c] + sum_k kernel[k, c] * x[..., t + (k - K + 1) * kernel_dilation, c])

    with x zero before the sequence. See `jaxops.lightweight_conv`, which computes it.

    Parameters: `kernel` (kernel_size, C) and, with `use_bias`, `bias` (C,).

    With `decode`, a call continues the sequences of the calls before it: the variable
    `cached_inputs` (..., (K - 1) * kernel_dilation, C) of the collection "cache" holds their last
    inputs, and `apply` needs ``mutable=["cache"]``. A call may have any number of steps: a prompt,
    one token, or several as in speculative decoding. Results are those of one call on the whole
    sequence. `init` makes a cache of zeros, which begins sequences; so does a call without a cache.

    Weights of other libraries::

        kernel = flax_depthwise_kernel[:, 0, :]  # of nn.Conv or nnx.Conv, (K, 1, C)
        kernel = causal_conv1d_weight.T          # (C, K); of torch's conv1d, weight[:, 0].T

    and every bias as it is. The state of `causal_conv1d_update` (B, C, L) gives
    ``cached_inputs = state[..., L - (K - 1):].swapaxes(-1, -2)``.

    Attributes:
      kernel_size: taps of the filter of a channel, at least 1.
      kernel_dilation: distance in time between two taps.
      use_bias: whether to add a bias to each channel.
      activation: None, "relu", "silu" or "gelu", applied to the result.
      decode: whether calls continue the sequences of earlier calls.
      dtype: dtype of the computation and the result; None: that of x and the parameters together.
        A float32 kernel is not rounded to a narrower dtype.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of `kernel`.
      bias_init: initializer of `bias`.
    """

    kernel_size: int
    _: KW_ONLY
    kernel_dilation: int = 1
    use_bias: bool = True
    activation: str | None = "silu"
    decode: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_short_kernel_init
    bias_init: Initializer = default_bias_init

    @nn.compact
    def __call__(self, x: jax.Array, *, segment_ids: jax.Array | None = None) -> jax.Array:
        """The convolution of x (..., T, C), in the shape of x.

        `segment_ids`, integers (..., T), are those of packed sequences: a tap reads only the
        segment of its result. With `decode`, the cache continues the first segment of a row, and
        is left with the inputs of the last.

        Raises:
          ValueError: an attribute is out of range, or the cache is of inputs of another shape.
        """
        name = "ShortConv"
        features = jnp.shape(x)[-1]
        shared.check(name, features, self.kernel_size, self.kernel_dilation)
        kernel = self.param(
            "kernel", self.kernel_init, (self.kernel_size, features), self.param_dtype
        )
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (features,), self.param_dtype)
        x, kernel, bias = shared.operands(x, kernel, bias, self.dtype)
        cache = None
        if self.decode:
            sizes = (self.kernel_size, self.kernel_dilation)
            cache = _cached_inputs(self, shared.cache_shape(name, x.shape, *sizes), x.dtype)
        y, state = shared.convolve(
            name,
            x,
            kernel.T,
            bias,
            None if cache is None else cache.value,
            dilation=self.kernel_dilation,
            activation=self.activation,
            segment_ids=segment_ids,
        )
        _store(self, cache, state)
        return y


class LightConv(nn.Module):
    """The block of the paper around a lightweight convolution, in place of self-attention.

    Linear from D to 2 C, gated linear unit, `LightweightConv`, Linear from C to D; D are the
    channels of the input and the result.

    Parameters: those of `in_proj` and `out_proj`, an `nn.Dense` each, and of `conv`, a
    `LightweightConv`. A decoder layer of fairseq's `lightconv_lm` has them as follows, with its
    arrays as NumPy's::

        params = {
            "in_proj": {"kernel": linear1.weight.T, "bias": linear1.bias},
            "conv": {"kernel": conv.weight[:, 0]},  # (H, 1, K); with conv_bias, "bias": conv.bias
            "out_proj": {"kernel": linear2.weight.T, "bias": linear2.bias},
        }

    where `normalize` is its weight_softmax, `drop_connect` its weight_dropout, and `padding` is
    "causal" in decoders and "same" in encoders.

    Attributes:
      num_heads: number of filters; it divides `conv_features`.
      kernel_size: taps of a filter, at least 1.
      conv_features: the channels C of the convolution; None: those of the input.
      padding: "causal" (position t sees nothing after t), "same", or an int.
      kernel_dilation: distance in time between two taps.
      use_bias: whether the linear maps add a bias.
      conv_bias: whether the convolution adds one.
      normalize: whether filters are normalised by a softmax over the taps.
      drop_connect: the probability with which a tap of a filter is dropped in training.
      deterministic: True turns DropConnect off; here or in the call, as in `nn.Dropout`.
      rng_collection: the collection DropConnect draws its key from.
      decode: whether calls continue the sequences of earlier calls, as `ShortConv` describes.
      dtype: dtype of the computation and the result; None: that of x and the parameters together.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the kernels of the linear maps.
      conv_kernel_init: initializer of the filters.
      bias_init: initializer of every bias.

    Source: Wu et al. 2019, as of `LightweightConv`; figure 2.
    """

    num_heads: int
    kernel_size: int
    _: KW_ONLY
    conv_features: int | None = None
    padding: str | int = "causal"
    kernel_dilation: int = 1
    use_bias: bool = True
    conv_bias: bool = False
    normalize: bool = True
    drop_connect: float = 0.0
    deterministic: bool | None = None
    rng_collection: str = "dropout"
    decode: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_dense_init
    conv_kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        deterministic: bool | None = None,
        *,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """The block's result on x (..., T, D), in the shape of x.

        `segment_ids`, integers (..., T), are those of packed sequences: a tap reads only the
        segment of its result.

        Raises:
          ValueError: an attribute is out of range, or num_heads does not divide the channels, or
            DropConnect is asked for and `deterministic` is given nowhere, or twice.
        """
        features = jnp.shape(x)[-1]
        conv_features = self.conv_features or features
        y = nn.glu(_dense(self, 2 * conv_features, "in_proj")(x))
        y = LightweightConv(
            self.num_heads,
            self.kernel_size,
            padding=self.padding,
            kernel_dilation=self.kernel_dilation,
            use_bias=self.conv_bias,
            normalize=self.normalize,
            drop_connect=self.drop_connect,
            deterministic=self.deterministic,
            rng_collection=self.rng_collection,
            decode=self.decode,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.conv_kernel_init,
            bias_init=self.bias_init,
            name="conv",
        )(y, deterministic, segment_ids=segment_ids)
        return _dense(self, features, "out_proj")(y)


def _dense(layer: LightConv, features: int, name: str, use_bias: bool | None = None) -> nn.Dense:
    return nn.Dense(
        features,
        use_bias=layer.use_bias if use_bias is None else use_bias,
        dtype=layer.dtype,
        param_dtype=layer.param_dtype,
        kernel_init=layer.kernel_init,
        bias_init=layer.bias_init,
        name=name,
    )


def _cached_inputs(layer: nn.Module, shape: tuple[int, ...], dtype: Dtype) -> nn.Variable:
    return layer.variable("cache", "cached_inputs", jnp.zeros, shape, dtype)


def _store(layer: nn.Module, cache: nn.Variable | None, state: jax.Array | None) -> None:
    # The x of `init` is there for its shape, and no sequence begins with it.
    if cache is not None and not layer.is_initializing():
        cache.value = state
