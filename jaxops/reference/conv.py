"""Convolution in plain `jax.numpy`, as patches times a matrix: its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxops._core.dtypes import accumulation_dtype
from jaxops.activations import ACTIVATIONS
from jaxops.reference.im2col import im2col


def conv(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    outs: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    low: Sequence[int],
    groups: int = 1,
    activation: str | None = None,
) -> jax.Array:
    """y[n, out, o] = act(bias[o] + sum_{tap, i} kernel[tap, i, o] patches[n, out, tap, i]).

    x (N, *ins, C), kernel (*taps, C // groups, O); i runs over the channels of the group of o.
    """
    *taps, fan_in, outputs = kernel.shape
    patches = im2col(
        x, taps=taps, outs=outs, strides=strides, dilation=dilation, low=low, channels_last=True
    )
    rows = patches.reshape(x.shape[0], *outs, math.prod(taps), groups, fan_in)
    matrix = kernel.reshape(math.prod(taps), fan_in, groups, outputs // groups)
    dtype = accumulation_dtype(x)
    y = jnp.einsum("...tgi,tigo->...go", rows.astype(dtype), matrix.astype(dtype))
    y = y.reshape(x.shape[0], *outs, outputs)
    if bias is not None:
        y = y + bias.astype(dtype)
    return ACTIVATIONS[activation](y).astype(x.dtype)
