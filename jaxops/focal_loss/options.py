"""Parameters of the primitives of both losses, and dimensions that both have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

#: A number, or an array without dimensions.
Scalar = float | jax.Array | np.ndarray

#: Exponents that need no exponential.
POWERS = (None, 0.0, 0.5, 1.0, 2.0)


def power(gamma: Scalar) -> float | None:
    """gamma, if it is one of `POWERS`; what is traced is none."""
    return gamma if isinstance(gamma, float) and gamma in POWERS else None


def power_name(power: float | None) -> str:
    """The name by which handlers know one of `POWERS`."""
    return "any" if power is None else f"{power:g}"


def row_dims(rows: int) -> str:
    """The dimensions of rows in a signature."""
    return " ".join(f"row{i}" for i in range(rows))


def append_ones(array, dims: int):
    """`array` with `dims` dimensions of size 1 at its end."""
    return jnp.expand_dims(array, tuple(range(array.ndim, array.ndim + dims)))
