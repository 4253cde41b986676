"""Layers for `flax.linen`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

import jaxops
from jaxops._core import checks
from jaxops._families import sequences
from jaxops.activations import Activation
from jaxops.flax import grids, shared
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
      activation: None, "relu", "silu", "gelu" or the function of `jax.nn`, applied to the result.
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
      implementation: of the convolution, see `jaxops.use_implementation`.
      heads, dilation: earlier names of num_heads and kernel_dilation, until a release.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen as layers
      >>> x = jnp.ones((2, 9, 64))  # batch, time, channels
      >>> layer = layers.LightweightConv(num_heads=8, kernel_size=7)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape
      (2, 9, 64)

    Source: Wu, Fan, Baevski, Dauphin and Auli, "Pay Less Attention with Lightweight and Dynamic
    Convolutions", ICLR 2019, sections 3 and 4.
    """

    num_heads: int | None = None
    kernel_size: int | None = None
    _: KW_ONLY
    padding: str | int = "causal"
    kernel_dilation: int = 1
    use_bias: bool = False
    activation: Activation = None
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
    implementation: str | None = None
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
        data_format = sequences.data_format(name, self.data_format)
        features = jnp.shape(x)[-2 if data_format == "NCT" else -1]
        shared.check(
            name,
            features,
            self.kernel_size,
            self.kernel_dilation,
            self.num_heads,
            self.drop_connect,
        )
        assert self.kernel_size is not None  # `check` refuses None
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
            sizes = (self.kernel_size, self.kernel_dilation, self.padding, data_format)
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
            data_format=data_format,
            implementation=self.implementation,
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
      activation: None, "relu", "silu", "gelu" or the function of `jax.nn`, applied to the result.
      decode: whether calls continue the sequences of earlier calls.
      dtype: dtype of the computation and the result; None: that of x and the parameters together.
        A float32 kernel is not rounded to a narrower dtype.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of `kernel`.
      bias_init: initializer of `bias`.
      implementation: of the convolution, see `jaxops.use_implementation`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen as layers
      >>> x = jnp.ones((2, 9, 64))  # batch, time, channels
      >>> layer = layers.ShortConv(kernel_size=4)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape
      (2, 9, 64)
    """

    kernel_size: int
    _: KW_ONLY
    kernel_dilation: int = 1
    use_bias: bool = True
    activation: Activation = "silu"
    decode: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_short_kernel_init
    bias_init: Initializer = default_bias_init
    implementation: str | None = None

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
            implementation=self.implementation,
        )
        _store(self, cache, state)
        return y


class _Block(nn.Module):
    """The fields and the call of the paper's blocks, which differ in their convolutions."""

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
    implementation: str | None = None

    _convolution: ClassVar[type[nn.Module]]

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
        dense = functools.partial(
            nn.Dense,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        y = nn.glu(dense(2 * conv_features, name="in_proj")(x))
        y = self._convolution(
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
            implementation=self.implementation,
            name="conv",
        )(y, deterministic, segment_ids=segment_ids)
        return dense(features, name="out_proj")(y)


class LightConv(_Block):
    """The block of the paper around a lightweight convolution, in place of self-attention.

    Linear from D to 2 C, gated linear unit, `LightweightConv`, Linear from C to D; D are the
    channels of the input and the result.

    Parameters: those of `in_proj` and `out_proj`, an `nn.Dense` each, and of `conv`, a
    `LightweightConv`. A layer of fairseq's LightConv models has them as follows, with its arrays as
    NumPy's::

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
      implementation: of the convolution, see `jaxops.use_implementation`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen as layers
      >>> x = jnp.ones((2, 9, 64))  # batch, time, channels
      >>> layer = layers.LightConv(num_heads=8, kernel_size=7)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape
      (2, 9, 64)

    Source: Wu et al. 2019, as of `LightweightConv`; figure 2.
    """

    # Flax's own fields are keyword-only as well in a class that says so itself.
    _: KW_ONLY

    _convolution = LightweightConv


class _DynamicFilters(nn.Module):
    """The convolution of `DynamicConv`, whose filters are a linear map of its input."""

    num_heads: int
    kernel_size: int
    _: KW_ONLY
    padding: str | int
    kernel_dilation: int
    use_bias: bool
    normalize: bool
    drop_connect: float
    deterministic: bool | None
    rng_collection: str
    decode: bool
    dtype: Dtype | None
    param_dtype: Dtype
    kernel_init: Initializer
    bias_init: Initializer
    implementation: str | None

    @nn.compact
    def __call__(
        self, x: jax.Array, deterministic: bool | None, *, segment_ids: jax.Array | None
    ) -> jax.Array:
        """The convolution of x, (..., T, C), in the shape of x."""
        name = "DynamicConv"
        features, taps = x.shape[-1], self.kernel_size
        shared.check(name, features, taps, self.kernel_dilation, self.num_heads, self.drop_connect)
        logits = nn.Dense(
            self.num_heads * taps,
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            name="weight_proj",
        )(x)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (features,), self.param_dtype)
        drop = None
        if self.drop_connect:
            flag = nn.merge_param("deterministic", self.deterministic, deterministic)
            if not flag:
                drop = nn.Dropout(
                    self.drop_connect, deterministic=False, rng_collection=self.rng_collection
                )
        x, logits, bias = promote_dtype(x, logits, bias, dtype=self.dtype)
        weight, normalize = shared.dynamic_filters(logits, self.num_heads, self.normalize, drop)
        cache = None
        if self.decode:
            sizes = (taps, self.kernel_dilation, self.padding)
            cache = _cached_inputs(self, shared.cache_shape(name, x.shape, *sizes), x.dtype)
        y, state = shared.convolve(
            name,
            x,
            weight,
            bias,
            None if cache is None else cache.value,
            dilation=self.kernel_dilation,
            padding=self.padding,
            segment_ids=segment_ids,
            normalize=normalize,
            implementation=self.implementation,
        )
        _store(self, cache, state)
        return y


class DynamicConv(_Block):
    """The block of the paper around a dynamic convolution: each position predicts its filters.

    Linear from D to 2 C, gated linear unit, `jaxops.dynamic_conv` with the filters that a Linear
    from C to num_heads * kernel_size, without a bias, makes of its input, Linear from C to D.

    Parameters: those of `in_proj` and `out_proj`, an `nn.Dense` each, and of `conv`: `weight_proj`,
    an `nn.Dense`, and with `conv_bias` `bias` (C,). A layer of fairseq's DynamicConv models has
    them as follows, with its arrays as NumPy's::

        params = {
            "in_proj": {"kernel": linear1.weight.T, "bias": linear1.bias},
            "conv": {"weight_proj": {"kernel": conv.weight_linear.weight.T}},  # "bias": conv_bias
            "out_proj": {"kernel": linear2.weight.T, "bias": linear2.bias},
        }

    The softmax is that of all taps, as without its renorm_padding. DropConnect drops the taps of
    each position on their own. Attributes are those of `LightConv`; `conv_kernel_init` initializes
    `weight_proj`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen as layers
      >>> x = jnp.ones((2, 9, 64))  # batch, time, channels
      >>> layer = layers.DynamicConv(num_heads=8, kernel_size=7)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape
      (2, 9, 64)

    Source: Wu et al. 2019, as of `LightweightConv`; section 4 and figure 2.
    """

    _: KW_ONLY
    conv_kernel_init: Initializer = default_dense_init

    _convolution = _DynamicFilters


class Conv(nn.Conv):
    """`flax.linen.Conv` on the kernels of jaxops: the same arguments, parameters and results.

    Calls for which there is no kernel, such as those of integers, are `jax.lax`'s and warn with a
    `jaxops.NoKernelWarning`, as `jaxops.conv_general_dilated` does.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen as layers
      >>> images = jnp.ones((2, 8, 8, 3))  # NHWC
      >>> layer = layers.Conv(features=16, kernel_size=(3, 3))
      >>> variables = layer.init(jax.random.key(0), images)
      >>> layer.apply(variables, images).shape
      (2, 8, 8, 16)
    """

    conv_general_dilated: Any = jaxops.conv_general_dilated


class ConvTranspose(nn.ConvTranspose):
    """`flax.linen.ConvTranspose` on the kernels of jaxops: `jaxops.conv_transpose`.

    It has the same arguments, parameters and results.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen as layers
      >>> images = jnp.ones((2, 8, 8, 3))  # NHWC
      >>> layer = layers.ConvTranspose(features=16, kernel_size=(4, 4), strides=(2, 2))
      >>> variables = layer.init(jax.random.key(0), images)
      >>> layer.apply(variables, images).shape
      (2, 16, 16, 16)
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The transposed convolution of inputs (..., *space, C)."""
        size = self.kernel_size
        kernel_size = (size,) if isinstance(size, int) else tuple(size)
        fans = (inputs.shape[-1], self.features)
        shape = kernel_size + (fans[::-1] if self.transpose_kernel else fans)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        kernel = shared.masked(kernel, self.mask)
        x, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert x is not None
        assert kernel is not None
        return shared.transpose_images(self, x, kernel, bias)


def _cached_inputs(layer: nn.Module, shape: tuple[int, ...], dtype: Dtype) -> nn.Variable:
    return layer.variable("cache", "cached_inputs", jnp.zeros, shape, dtype)


def _store(layer: nn.Module, cache: nn.Variable | None, state: jax.Array | None) -> None:
    # The x of `init` is there for its shape, and no sequence begins with it.
    if cache is not None and not layer.is_initializing():
        cache.value = state


class VoxelGrid(nn.Module):
    """A grid of features in space, sampled at points: `jaxops.grid_sample` of a parameter.

    Parameters: `grid`, of shape ``(*resolution, features)``.

    Attributes:
      resolution: the entries along each of two or three axes.
      features: the channels of an entry.
      method: "linear", "nearest" or "cubic"; the points have no gradient with "nearest".
      padding_mode: what lies outside of the grid: "zeros", "border", "reflection" or "wrap".
      align_corners: whether -1 and 1 are the centres of the first and last entries, or the outer
        edges of these.
      dtype: dtype of the computation and the result; None: that of the grid.
      param_dtype: dtype of the parameter.
      grid_init: initializer of `grid`; zeros by default.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen as layers
      >>> points = jnp.zeros((100, 3))  # coordinates in [-1, 1]
      >>> layer = layers.VoxelGrid(resolution=(16, 16, 16), features=4)
      >>> variables = layer.init(jax.random.key(0), points)
      >>> layer.apply(variables, points).shape
      (100, 4)
    """

    resolution: Sequence[int]
    features: int
    _: KW_ONLY
    method: str = "linear"
    padding_mode: str = "zeros"
    align_corners: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    grid_init: Initializer = grids.default_grid_init

    @nn.compact
    def __call__(self, points: jax.Array) -> jax.Array:
        """The features (..., features) at points (..., axes) in [-1, 1]."""
        shape = grids.grid_shape("VoxelGrid", self.resolution, self.features)
        grid = self.param("grid", self.grid_init, shape, self.param_dtype)
        (grid,) = promote_dtype(grid, dtype=self.dtype)
        points = grids.check_points("VoxelGrid", points, grid.ndim - 1)
        return jaxops.grid_sample(
            grid,
            points,
            method=self.method,
            padding_mode=self.padding_mode,
            align_corners=self.align_corners,
        )


class HashGrid(nn.Module):
    """The multiresolution hash encoding of instant-ngp: features of points, from many grids.

    Level l has ``N_l = floor(base_resolution * growth ** l)`` cells along each axis of [-1, 1], and
    features at their vertices, which are interpolated linearly. A level of more than 2 **
    log2_table_size vertices has a table of that size, where vertex v is at row
    ``(v_0 * 1 ^ v_1 * 2654435761 ^ v_2 * 805459861) mod 2 ** log2_table_size``, and vertices may
    share rows. Points outside of [-1, 1] have the features of the nearest point inside.

    Parameters: `table` (entries of all levels one after another, features_per_level). Vertices of
    levels that are not hashed are in the order of their indices, the last one fastest.

    Attributes:
      num_levels: the number of levels.
      features_per_level: the channels of an entry.
      log2_table_size: the size of a level's table, at most, is 2 to this power.
      base_resolution: the cells of level 0 along an axis.
      growth: the factor between the cells of a level and the next one, at least 1.
      dtype: dtype of the computation and the result; None: that of the table.
      param_dtype: dtype of the parameter.
      table_init: initializer of `table`; uniform in [-1e-4, 1e-4] by default.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen as layers
      >>> points = jnp.zeros((100, 3))  # coordinates in [-1, 1]
      >>> layer = layers.HashGrid(num_levels=4, log2_table_size=12)
      >>> variables = layer.init(jax.random.key(0), points)
      >>> layer.apply(variables, points).shape
      (100, 8)

    Source: Müller, Evans, Schied and Keller, "Instant Neural Graphics Primitives with a
    Multiresolution Hash Encoding", ACM Transactions on Graphics 41 (4), 2022.
    """

    num_levels: int = 16
    features_per_level: int = 2
    _: KW_ONLY
    log2_table_size: int = 19
    base_resolution: int = 16
    growth: float = 1.5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    table_init: Initializer = grids.default_table_init

    @nn.compact
    def __call__(self, points: jax.Array) -> jax.Array:
        """The features (..., num_levels * features_per_level) of points (..., 2) or (..., 3)."""
        points = checks.float_array("HashGrid", "points", points, None, "(..., 3) or (..., 2)")
        levels = grids.Levels.of(
            "HashGrid",
            points.shape[-1] if points.ndim else 0,
            self.num_levels,
            self.features_per_level,
            self.log2_table_size,
            self.base_resolution,
            self.growth,
        )
        shape = (levels.total, self.features_per_level)
        table = self.param("table", self.table_init, shape, self.param_dtype)
        (table,) = promote_dtype(table, dtype=self.dtype)
        return levels.encode(table, points)
