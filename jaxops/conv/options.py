"""Parameters of the primitives of convolution, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._core.dtypes import accumulation_dtype
from jaxops._families.windows import Windows


@dataclasses.dataclass(frozen=True)
class Options:
    """Parameters of every primitive of the family, next to shapes.

    Attributes:
      windows: over x.
      groups: of channels.
      fan_in: input channels of a group.
      fan_out: output channels of a group.
      precision: of the products.
      rounds_cotangent: whether cotangents of the result are rounded to the dtype of x, to which
        the result is rounded too, if only after bias and activation.
    """

    windows: Windows
    groups: int
    fan_in: int
    fan_out: int
    precision: Any
    rounds_cotangent: bool

    @property
    def rank(self) -> int:
        """The number of spatial dimensions."""
        return len(self.windows.taps)

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel is a group of its own, with one output."""
        return self.groups > 1 and self.fan_in == 1 and self.fan_out == 1

    def take_one_group(self) -> Options:
        """The options of each of the groups."""
        return dataclasses.replace(self, groups=1)

    def of_shard(self, fan_in: int, outputs: int) -> Options:
        """The options of what a device has: some channels, if these are one group or depthwise."""
        if self.is_depthwise:
            return dataclasses.replace(self, groups=outputs)
        if self.groups > 1:
            return self
        return dataclasses.replace(self, fan_in=fan_in, fan_out=outputs)

    def transposed(self, strides: Sequence[int]) -> Options:
        """The convolution whose input gradient is this one, of an lhs with zeros between.

        This one has no strides, that one those by which the entries of lhs are apart.
        """
        windows = self.windows
        mirrored = dataclasses.replace(
            windows,
            ins=windows.outs,
            outs=windows.ins,
            strides=tuple(strides),
            low=tuple(r - low for r, low in zip(windows.reach, windows.low, strict=True)),
        )
        return dataclasses.replace(self, windows=mirrored, fan_in=self.fan_out, fan_out=self.fan_in)

    # The dimensions of the operands in signatures. Devices have all channels of several groups,
    # unless every channel is a group of its own.

    @property
    def x(self) -> str:
        """The dimensions of the images."""
        return self._image(self.windows.in_dims, "cin", "inputs", self.fan_in)

    @property
    def y(self) -> str:
        """The dimensions of the result."""
        return self._image(self.windows.out_dims, "cout", "outputs", self.fan_out)

    @property
    def kernel(self) -> str:
        """The dimensions of the kernel."""
        taps = self.windows.tap_dims
        if self.groups == 1:
            return f"{taps} cin cout"
        if self.is_depthwise:
            return f"{taps} () channels"
        return f"{taps} fan={self.fan_in} outputs={self.groups * self.fan_out}"

    @property
    def bias(self) -> str:
        """The dimension of the bias."""
        if self.groups == 1:
            return "cout"
        return "channels" if self.is_depthwise else f"outputs={self.groups * self.fan_out}"

    def _image(self, dims, dense, grouped, fan):
        if self.groups == 1:
            channels = dense
        else:
            channels = "channels" if self.is_depthwise else f"{grouped}={self.groups * fan}"
        return f"rows {dims} {channels}"


def transposed_kernel(kernel: jax.Array, groups: int) -> jax.Array:
    """The kernel whose input gradient is the convolution, without strides, with `kernel`."""
    *taps, fan_in, outputs = kernel.shape
    flipped = jnp.flip(kernel, range(len(taps)))
    grouped = flipped.reshape(*taps, fan_in, groups, outputs // groups)
    return jnp.moveaxis(grouped, (-3, -1), (-1, -3)).reshape(
        *taps, outputs // groups, groups * fan_in
    )


def sum_dtype(*arrays: jax.Array, dtype: Any) -> np.dtype:
    """The dtype of sums, and of a result of `dtype` that is not rounded yet."""
    if jnp.issubdtype(dtype, jnp.integer):
        return np.dtype(np.int32)
    return accumulation_dtype(*arrays, dtype)


def over_pixels(bias: jax.Array, options: Options) -> jax.Array:
    """(..., C) -> (..., 1, 1..., C), as results lie."""
    return jnp.expand_dims(bias, range(bias.ndim - 1, bias.ndim + options.rank))
