"""The activations that operators apply to their sums, before they round them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

#: The type of an argument `activation`.
Activation = str | Callable[[jax.Array], jax.Array] | None


def gelu(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu` in its default form, with nothing that cancels where x is negative."""
    # The sigmoid is 0 or 1 beyond 30. Powers that overflow would make derivatives NaN there.
    near = jnp.clip(x, -30, 30)
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (near + 0.044715 * near**3))


#: By name.
ACTIVATIONS = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": gelu,
}


_FUNCTIONS = ((jax.nn.relu, "relu"), (jax.nn.silu, "silu"), (jax.nn.gelu, "gelu"))


def find_name(activation: Any) -> Any:
    """The key in `ACTIVATIONS` of a function of `jax.nn` or of another name.

    Anything else is returned as it is.
    """
    for function, name in _FUNCTIONS:
        if activation is function:
            return name
    is_swish = isinstance(activation, str) and activation.lower() == "swish"
    return "silu" if is_swish else activation


def activation_name(activation: str | None) -> str:
    """The name by which handlers know an activation."""
    return activation or "none"
