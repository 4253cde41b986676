"""The activations that operators apply to their sums, before they round them."""

from __future__ import annotations

import math

import jax
import numpy as np


def gelu(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu` in its default form, with nothing that cancels where x is negative."""
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


#: By name, in the order of `Activation` in common/types.h.
ACTIVATIONS = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": gelu,
}


def activation_code(activation: str | None) -> np.int32:
    """The number by which kernels know an activation."""
    return np.int32([*ACTIVATIONS].index(activation))
