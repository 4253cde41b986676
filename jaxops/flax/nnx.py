"""Layers for `flax.nnx`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

import jaxops
from jaxops._families import sequences
from jaxops.activations import Activation
from jaxops.flax import grids, shared
from jaxops.flax.shared import (
    default_bias_init,
    default_dense_init,
    default_kernel_init,
    default_short_kernel_init,
)


class _Convolution(nnx.Module):
    """A layer whose calls may continue the sequences of earlier calls.

    Classes set the attributes, and `cached_inputs` to ``nnx.data(None)``.
    """

    name: ClassVar[str]
    features: int
    kernel_size: int
    kernel_dilation: int
    padding: str | int = "causal"
    data_format: str = "NTC"
    decode: bool
    dtype: Dtype | None
    implementation: str | None
    cached_inputs: nnx.Cache | None

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype | None = None) -> None:
        """Begins sequences: sets the inputs that decoding keeps to zeros.

        Args:
          input_shape: the shape of an input of the layer; its number of steps does not matter.
          dtype: the dtype of the kept inputs; None: that of the layer, or float32.
        """
        self._check_channels(input_shape)
        sizes = (self.kernel_size, self.kernel_dilation, self.padding, self.data_format)
        shape = shared.cache_shape(self.name, input_shape, *sizes)
        self.cached_inputs = nnx.Cache(jnp.zeros(shape, dtype or self.dtype or jnp.float32))

    def _check_channels(self, shape: tuple[int, ...]) -> None:
        if shape[-2 if self.data_format == "NCT" else -1] != self.features:
            raise ValueError(
                f"{self.name}: expected {self.features} channels ({self.data_format}), "
                f"got x of shape {shape}"
            )

    def _convolve(
        self,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        decode: bool | None,
        **options: Any,
    ) -> jax.Array:
        state = None
        if self.decode if decode is None else decode:
            if self.cached_inputs is None:
                raise ValueError(
                    f"{self.name}: there is no cache to decode with, call init_cache first"
                )
            state = self.cached_inputs[...]
        y, state = shared.convolve(
            self.name,
            x,
            weight,
            bias,
            state,
            dilation=self.kernel_dilation,
            padding=self.padding,
            data_format=self.data_format,
            implementation=self.implementation,
            **options,
        )
        if state is not None:
            assert self.cached_inputs is not None  # the state came from it
            self.cached_inputs[...] = state
        return y


class LightweightConv(_Convolution):
    """Lightweight convolution: a depthwise convolution over time, one filter a head.

    y[b, t, c] = act(bias[c] + sum_k w[h, k] * x[b, t + k * dilation - P, c]), h = c // (C // heads)

    with w = dropconnect(softmax(kernel, over k)), x zero outside the sequence, and P as `padding`
    says. See `jaxops.lightweight_conv`, which computes it.

    Parameters: `kernel` (num_heads, kernel_size) and `bias`, (C,) or None.

    Args:
      features: the channels C of the input and the result.
      num_heads: number of filters; it divides `features`.
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
        keeps the filter's mean. All sequences of a batch see the same filter. It is an
        `nnx.Dropout`: `model.eval()` turns it off, `model.train()` on.
      deterministic: True turns DropConnect off; `train`, `eval` and the call can change it.
      rng_collection: the stream of `rngs` that DropConnect draws its keys from.
      decode: whether calls continue the sequences of earlier calls, as `ShortConv` describes.
      dtype: dtype of the computation and the result; None: that of x and the parameters together.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of `kernel`.
      bias_init: initializer of `bias`.
      implementation: of the convolution, see `jaxops.use_implementation`.
      rngs: the streams `params` and, with DropConnect, `rng_collection`.
      heads, dilation: earlier names of num_heads and kernel_dilation, until a release.

    Raises:
      ValueError: num_heads does not divide features, or a size or drop_connect is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as nnx_layers
      >>> x = jnp.ones((2, 9, 64))  # batch, time, channels
      >>> layer = nnx_layers.LightweightConv(64, num_heads=8, kernel_size=7, rngs=nnx.Rngs(0))
      >>> layer(x).shape
      (2, 9, 64)

    Source: Wu, Fan, Baevski, Dauphin and Auli, "Pay Less Attention with Lightweight and Dynamic
    Convolutions", ICLR 2019, sections 3 and 4.
    """

    name = "LightweightConv"

    def __init__(
        self,
        features: int,
        num_heads: int | None = None,
        kernel_size: int | None = None,
        *,
        padding: str | int = "causal",
        kernel_dilation: int = 1,
        use_bias: bool = False,
        activation: Activation = None,
        data_format: str = "NTC",
        normalize: bool = True,
        drop_connect: float = 0.0,
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        decode: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        heads: int | None = None,
        dilation: int | None = None,
    ):
        num_heads = num_heads if heads is None else heads
        kernel_dilation = kernel_dilation if dilation is None else dilation
        shared.check(
            "LightweightConv", features, kernel_size, kernel_dilation, num_heads, drop_connect
        )
        assert kernel_size is not None  # `check` refuses None
        self.kernel = nnx.Param(kernel_init(rngs.params(), (num_heads, kernel_size), param_dtype))
        self.bias = (
            nnx.Param(bias_init(rngs.params(), (features,), param_dtype)) if use_bias else None
        )
        self.drop = _drop_connect(drop_connect, deterministic, rng_collection, rngs)
        self.features = features
        self.num_heads = num_heads
        self.kernel_size = kernel_size
        self.padding = padding
        self.kernel_dilation = kernel_dilation
        self.activation = activation
        self.data_format = sequences.data_format("LightweightConv", data_format)
        self.normalize = normalize
        self.decode = decode
        self.dtype = dtype
        self.implementation = implementation
        self.cached_inputs = nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        decode: bool | None = None,
    ) -> jax.Array:
        """The convolution of x, (..., T, C) or (..., C, T), in the shape of x.

        `segment_ids`, integers (..., T), are those of packed sequences: a tap reads only the
        segment of its result. `deterministic` and `rngs` mean for DropConnect what they mean for
        `nnx.Dropout`. `decode` takes precedence over the attribute.

        Raises:
          ValueError: x does not have `features` channels or is not what
            `jaxops.lightweight_conv` takes.
        """
        self._check_channels(jnp.shape(x))
        drop = None
        if self.drop is not None:
            drop = functools.partial(self.drop, deterministic=deterministic, rngs=rngs)
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = shared.operands(x, self.kernel[...], bias, self.dtype)
        return self._convolve(
            x,
            shared.filters(kernel, self.normalize, drop),
            bias,
            decode,
            activation=self.activation,
            segment_ids=segment_ids,
        )


class ShortConv(_Convolution):
    """A short causal depthwise convolution over time, as in Mamba, GDN and Hyena.

    y[..., t, c] = act(bias[c] + sum_k kernel[k, c] * x[..., t + (k - K + 1) * kernel_dilation, c])

    with x zero before the sequence. See `jaxops.lightweight_conv`, which computes it.

    Parameters: `kernel` (kernel_size, C) and `bias`, (C,) or None.

    With `decode`, a call continues the sequences of the calls before it: `cached_inputs`, an
    `nnx.Cache` (..., (K - 1) * kernel_dilation, C), holds their last inputs. `init_cache` makes it
    and begins sequences. A call may have any number of steps: a prompt, one token, or several as in
    speculative decoding. Results are those of one call on the whole sequence.

    `jaxops.flax.linen.ShortConv` lists how weights of other libraries are loaded.

    Args:
      features: the channels C of the input and the result.
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
      rngs: the stream `params`.

    Raises:
      ValueError: kernel_size or kernel_dilation is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as nnx_layers
      >>> x = jnp.ones((2, 9, 64))  # batch, time, channels
      >>> layer = nnx_layers.ShortConv(64, kernel_size=4, rngs=nnx.Rngs(0))
      >>> layer(x).shape
      (2, 9, 64)
    """

    name = "ShortConv"

    def __init__(
        self,
        features: int,
        kernel_size: int,
        *,
        kernel_dilation: int = 1,
        use_bias: bool = True,
        activation: Activation = "silu",
        decode: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_short_kernel_init,
        bias_init: Initializer = default_bias_init,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        shared.check("ShortConv", features, kernel_size, kernel_dilation)
        self.kernel = nnx.Param(kernel_init(rngs.params(), (kernel_size, features), param_dtype))
        self.bias = (
            nnx.Param(bias_init(rngs.params(), (features,), param_dtype)) if use_bias else None
        )
        self.features = features
        self.kernel_size = kernel_size
        self.kernel_dilation = kernel_dilation
        self.activation = activation
        self.decode = decode
        self.dtype = dtype
        self.implementation = implementation
        self.cached_inputs = nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        decode: bool | None = None,
    ) -> jax.Array:
        """The convolution of x (..., T, C), in the shape of x.

        `segment_ids`, integers (..., T), are those of packed sequences: a tap reads only the
        segment of its result. In decoding, the cache continues the first segment of a row, and is
        left with the inputs of the last. `decode` takes precedence over the attribute.

        Raises:
          ValueError: x does not have `features` channels, or the cache is absent or of inputs of
            another shape.
        """
        self._check_channels(jnp.shape(x))
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = shared.operands(x, self.kernel[...], bias, self.dtype)
        options = {"activation": self.activation, "segment_ids": segment_ids}
        return self._convolve(x, kernel.T, bias, decode, **options)


class _Block(nnx.Module):
    """The paper's blocks, which differ in their convolutions."""

    _convolution: ClassVar[Callable[..., _Convolution]]
    _default_conv_kernel_init: ClassVar[Initializer]

    def __init__(
        self,
        features: int,
        num_heads: int,
        kernel_size: int,
        *,
        conv_features: int | None = None,
        padding: str | int = "causal",
        kernel_dilation: int = 1,
        use_bias: bool = True,
        conv_bias: bool = False,
        normalize: bool = True,
        drop_connect: float = 0.0,
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        decode: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_dense_init,
        conv_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        conv_features = conv_features or features
        dense = functools.partial(
            nnx.Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        self.in_proj = dense(features, 2 * conv_features)
        self.conv = self._convolution(
            conv_features,
            num_heads,
            kernel_size,
            padding=padding,
            kernel_dilation=kernel_dilation,
            use_bias=conv_bias,
            normalize=normalize,
            drop_connect=drop_connect,
            deterministic=deterministic,
            rng_collection=rng_collection,
            decode=decode,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=conv_kernel_init or self._default_conv_kernel_init,
            bias_init=bias_init,
            implementation=implementation,
            rngs=rngs,
        )
        self.out_proj = dense(conv_features, features)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype | None = None) -> None:
        """Begins sequences: sets the inputs that decoding keeps to zeros.

        Args:
          input_shape: the shape of an input of the block; its number of steps does not matter.
          dtype: the dtype of the kept inputs; None: that of the block, or float32.
        """
        self.conv.init_cache((*input_shape[:-1], self.conv.features), dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        decode: bool | None = None,
    ) -> jax.Array:
        """The block's result on x (..., T, features), in the shape of x.

        `segment_ids`, integers (..., T), are those of packed sequences: a tap reads only the
        segment of its result. `deterministic` and `rngs` mean for DropConnect what they mean for
        `nnx.Dropout`. `decode` takes precedence over the attribute.

        Raises:
          ValueError: the cache is absent or of inputs of another shape.
        """
        y = nnx.glu(self.in_proj(x))
        y = self.conv(
            y, segment_ids=segment_ids, deterministic=deterministic, rngs=rngs, decode=decode
        )
        return self.out_proj(y)


class LightConv(_Block):
    """The block of the paper around a lightweight convolution, in place of self-attention.

    Linear from `features` to 2 C, gated linear unit, `LightweightConv`, Linear from C to
    `features`.

    Parameters: those of `in_proj` and `out_proj`, an `nnx.Linear` each, and of `conv`, a
    `LightweightConv`. `jaxops.flax.linen.LightConv` lists how weights of fairseq are loaded.

    Args:
      features: the channels of the input and the result.
      num_heads: number of filters; it divides `conv_features`.
      kernel_size: taps of a filter, at least 1.
      conv_features: the channels C of the convolution; None: `features`.
      padding: "causal" (position t sees nothing after t), "same", or an int.
      kernel_dilation: distance in time between two taps.
      use_bias: whether the linear maps add a bias.
      conv_bias: whether the convolution adds one.
      normalize: whether filters are normalised by a softmax over the taps.
      drop_connect: the probability with which a tap of a filter is dropped in training.
      deterministic: True turns DropConnect off; `train`, `eval` and the call can change it.
      rng_collection: the stream of `rngs` that DropConnect draws its keys from.
      decode: whether calls continue the sequences of earlier calls, as `ShortConv` describes.
      dtype: dtype of the computation and the result; None: that of x and the parameters together.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the kernels of the linear maps.
      conv_kernel_init: initializer of the filters; None: that of `LightweightConv`.
      bias_init: initializer of every bias.
      implementation: of the convolution, see `jaxops.use_implementation`.
      rngs: the streams `params` and, with DropConnect, `rng_collection`.

    Raises:
      ValueError: num_heads does not divide the channels, or a size or drop_connect is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as nnx_layers
      >>> x = jnp.ones((2, 9, 64))  # batch, time, channels
      >>> layer = nnx_layers.LightConv(64, num_heads=8, kernel_size=7, rngs=nnx.Rngs(0))
      >>> layer(x).shape
      (2, 9, 64)

    Source: Wu et al. 2019, as of `LightweightConv`; figure 2.
    """

    _convolution = LightweightConv
    _default_conv_kernel_init = staticmethod(default_kernel_init)


class _DynamicFilters(_Convolution):
    """The convolution of `DynamicConv`, whose filters are a linear map of its input."""

    name = "DynamicConv"

    def __init__(
        self,
        features: int,
        num_heads: int,
        kernel_size: int,
        *,
        padding: str | int,
        kernel_dilation: int,
        use_bias: bool,
        normalize: bool,
        drop_connect: float,
        deterministic: bool | None,
        rng_collection: str,
        decode: bool,
        dtype: Dtype | None,
        param_dtype: Dtype,
        kernel_init: Initializer,
        bias_init: Initializer,
        implementation: str | None,
        rngs: nnx.Rngs,
    ):
        shared.check(self.name, features, kernel_size, kernel_dilation, num_heads, drop_connect)
        self.weight_proj = nnx.Linear(
            features,
            num_heads * kernel_size,
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        self.bias = (
            nnx.Param(bias_init(rngs.params(), (features,), param_dtype)) if use_bias else None
        )
        self.drop = _drop_connect(drop_connect, deterministic, rng_collection, rngs)
        self.features = features
        self.num_heads = num_heads
        self.kernel_size = kernel_size
        self.padding = padding
        self.kernel_dilation = kernel_dilation
        self.normalize = normalize
        self.decode = decode
        self.dtype = dtype
        self.implementation = implementation
        self.cached_inputs = nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None,
        deterministic: bool | None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None,
        decode: bool | None,
    ) -> jax.Array:
        """The convolution of x, (..., T, C), in the shape of x."""
        drop = None
        if self.drop is not None:
            flag = self.drop.deterministic if deterministic is None else deterministic
            if not flag:
                drop = functools.partial(self.drop, deterministic=False, rngs=rngs)
        bias = None if self.bias is None else self.bias[...]
        x, logits, bias = promote_dtype(x, self.weight_proj(x), bias, dtype=self.dtype)
        weight, normalize = shared.dynamic_filters(logits, self.num_heads, self.normalize, drop)
        options = {"normalize": normalize, "segment_ids": segment_ids}
        return self._convolve(x, weight, bias, decode, **options)


class DynamicConv(_Block):
    """The block of the paper around a dynamic convolution: each position predicts its filters.

    Linear from `features` to 2 C, gated linear unit, `jaxops.dynamic_conv` with the filters that a
    Linear from C to num_heads * kernel_size, without a bias, makes of its input, Linear from C to
    `features`.

    Parameters: those of `in_proj` and `out_proj`, an `nnx.Linear` each, and of `conv`:
    `weight_proj`, an `nnx.Linear`, and `bias`, (C,) or None. `jaxops.flax.linen.DynamicConv` lists
    how weights of fairseq are loaded.

    DropConnect drops the taps of each position on their own. Arguments are those of `LightConv`;
    `conv_kernel_init` initializes `weight_proj`; None: as the other kernels' default.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as nnx_layers
      >>> x = jnp.ones((2, 9, 64))  # batch, time, channels
      >>> layer = nnx_layers.DynamicConv(64, num_heads=8, kernel_size=7, rngs=nnx.Rngs(0))
      >>> layer(x).shape
      (2, 9, 64)

    Source: Wu et al. 2019, as of `LightweightConv`; section 4 and figure 2.
    """

    _convolution = _DynamicFilters
    _default_conv_kernel_init = staticmethod(default_dense_init)


class Conv(nnx.Conv):
    """`flax.nnx.Conv` on the kernels of jaxops: the same arguments, parameters and results.

    Calls for which there is no kernel, such as those of integers, are `jax.lax`'s and warn with a
    `jaxops.NoKernelWarning`, as `jaxops.conv_general_dilated` does.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as nnx_layers
      >>> images = jnp.ones((2, 8, 8, 3))  # NHWC
      >>> layer = nnx_layers.Conv(3, 16, kernel_size=(3, 3), rngs=nnx.Rngs(0))
      >>> layer(images).shape
      (2, 8, 8, 16)
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(
            *arguments, **{"conv_general_dilated": jaxops.conv_general_dilated, **options}
        )


class ConvTranspose(nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` on the kernels of jaxops: `jaxops.conv_transpose`.

    It has the same arguments, parameters and results.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as nnx_layers
      >>> images = jnp.ones((2, 8, 8, 3))  # NHWC
      >>> layer = nnx_layers.ConvTranspose(3, 16, (4, 4), strides=(2, 2), rngs=nnx.Rngs(0))
      >>> layer(images).shape
      (2, 16, 16, 16)
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The transposed convolution of inputs (..., *space, C)."""
        kernel = shared.masked(self.kernel[...], self.mask)
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        return shared.transpose_images(self, x, kernel, bias)


class VoxelGrid(nnx.Module):
    """A grid of features in space, sampled at points: `jaxops.grid_sample` of a parameter.

    Parameters: `grid`, of shape ``(*resolution, features)``.

    Args:
      resolution: the entries along each of two or three axes.
      features: the channels of an entry.
      method: "linear", "nearest" or "cubic"; the points have no gradient with "nearest".
      padding_mode: what lies outside of the grid: "zeros", "border", "reflection" or "wrap".
      align_corners: whether -1 and 1 are the centres of the first and last entries, or the outer
        edges of these.
      dtype: dtype of the computation and the result; None: that of the grid.
      param_dtype: dtype of the parameter.
      grid_init: initializer of `grid`; zeros by default.
      rngs: the stream `params`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as nnx_layers
      >>> points = jnp.zeros((100, 3))  # coordinates in [-1, 1]
      >>> layer = nnx_layers.VoxelGrid((16, 16, 16), features=4, rngs=nnx.Rngs(0))
      >>> layer(points).shape
      (100, 4)
    """

    def __init__(
        self,
        resolution: Sequence[int],
        features: int,
        *,
        method: str = "linear",
        padding_mode: str = "zeros",
        align_corners: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        grid_init: Initializer = grids.default_grid_init,
        rngs: nnx.Rngs,
    ):
        shape = grids.grid_shape("VoxelGrid", resolution, features)
        self.method = method
        self.padding_mode = padding_mode
        self.align_corners = align_corners
        self.dtype = dtype
        self.grid = nnx.Param(grid_init(rngs.params(), shape, param_dtype))

    def __call__(self, points: jax.Array) -> jax.Array:
        """The features (..., features) at points (..., axes) in [-1, 1]."""
        (grid,) = promote_dtype(self.grid[...], dtype=self.dtype)
        points = grids.check_points("VoxelGrid", points, grid.ndim - 1)
        return jaxops.grid_sample(
            grid,
            points,
            method=self.method,
            padding_mode=self.padding_mode,
            align_corners=self.align_corners,
        )


class HashGrid(nnx.Module):
    """The multiresolution hash encoding of instant-ngp: features of points, from many grids.

    Level l has ``N_l = floor(base_resolution * growth ** l)`` cells along each axis of [-1, 1], and
    features at their vertices, which are interpolated linearly. A level of more than 2 **
    log2_table_size vertices has a table of that size, where vertex v is at row
    ``(v_0 * 1 ^ v_1 * 2654435761 ^ v_2 * 805459861) mod 2 ** log2_table_size``, and vertices may
    share rows. Points outside of [-1, 1] have the features of the nearest point inside.

    Parameters: `table` (entries of all levels one after another, features_per_level). Vertices of
    levels that are not hashed are in the order of their indices, the last one fastest.

    Args:
      axes: the coordinates of a point, 2 or 3.
      num_levels: the number of levels.
      features_per_level: the channels of an entry.
      log2_table_size: the size of a level's table, at most, is 2 to this power.
      base_resolution: the cells of level 0 along an axis.
      growth: the factor between the cells of a level and the next one, at least 1.
      dtype: dtype of the computation and the result; None: that of the table.
      param_dtype: dtype of the parameter.
      table_init: initializer of `table`; uniform in [-1e-4, 1e-4] by default.
      rngs: the stream `params`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as nnx_layers
      >>> points = jnp.zeros((100, 3))  # coordinates in [-1, 1]
      >>> layer = nnx_layers.HashGrid(3, num_levels=4, log2_table_size=12, rngs=nnx.Rngs(0))
      >>> layer(points).shape
      (100, 8)

    Source: Müller, Evans, Schied and Keller, "Instant Neural Graphics Primitives with a
    Multiresolution Hash Encoding", ACM Transactions on Graphics 41 (4), 2022.
    """

    def __init__(
        self,
        axes: int,
        num_levels: int = 16,
        features_per_level: int = 2,
        *,
        log2_table_size: int = 19,
        base_resolution: int = 16,
        growth: float = 1.5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        table_init: Initializer = grids.default_table_init,
        rngs: nnx.Rngs,
    ):
        self.levels = grids.Levels.of(
            "HashGrid",
            axes,
            num_levels,
            features_per_level,
            log2_table_size,
            base_resolution,
            growth,
        )
        self.dtype = dtype
        shape = (self.levels.total, features_per_level)
        self.table = nnx.Param(table_init(rngs.params(), shape, param_dtype))

    def __call__(self, points: jax.Array) -> jax.Array:
        """The features (..., num_levels * features_per_level) of points (..., axes)."""
        points = grids.check_points("HashGrid", points, self.levels.axes)
        (table,) = promote_dtype(self.table[...], dtype=self.dtype)
        return self.levels.encode(table, points)


def _drop_connect(
    rate: float, deterministic: bool | None, rng_collection: str, rngs: nnx.Rngs
) -> nnx.Dropout | None:
    if not rate:
        return None
    return nnx.Dropout(rate, deterministic=deterministic, rng_collection=rng_collection, rngs=rngs)
