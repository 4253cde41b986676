"""The activations that operators apply to their sums, before they round them."""

from __future__ import annotations

import math

import jax


def gelu(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu` in its default form, with nothing that cancels where x is negative."""
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


#: By name.
ACTIVATIONS = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": gelu,
}


def activation_name(activation: str | None) -> str:
    """The name by which handlers know an activation."""
    return activation or "none"
