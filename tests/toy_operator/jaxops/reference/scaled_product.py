"""The product of two arrays and a number in plain `jax.numpy`: its definition."""

from __future__ import annotations

import jax


def scaled_product(a: jax.Array, b: jax.Array, *, scale: float = 1.0) -> jax.Array:
    """scale a[..., n] b[..., n]."""
    return scale * a * b
