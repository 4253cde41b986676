"""Argument checks that every operator shares; each error names operator, argument, want and got."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


def array(function: str, argument: str, value: Any, shape: str) -> jax.Array | np.ndarray:
    """`value` as an array, left to NumPy where it is not JAX's."""
    _check_kind(function, argument, value, shape)
    if is_array(value) and not isinstance(value, np.ndarray):
        return as_array(function, argument, value)
    return np.asarray(value)


def is_array(value: Any) -> bool:
    """Whether it is one, or like the parameters of Flax's modules stands for one."""
    return isinstance(value, (jax.Array, np.ndarray)) or hasattr(value, "__jax_array__")


def as_array(function: str, argument: str, value: Any) -> jax.Array:
    """`value` as an array of JAX."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        kind = getattr(value, "dtype", type(value).__name__)
        raise TypeError(
            f"{function}: {argument} must be an array of numbers that JAX has, got {kind}"
        ) from error


def _check_kind(function, argument, value, shape):
    if not (is_array(value) or isinstance(value, (np.generic, float, int, list, tuple))):
        raise TypeError(
            f"{function}: {argument} must be an array of shape {shape}, got {type(value).__name__}"
        )


def float_array(
    function: str, argument: str, value: Any, rank: int | None, shape: str
) -> jax.Array:
    """`value` as an array of `rank` dimensions, None for any, and one of the four float dtypes."""
    _check_kind(function, argument, value, shape)
    array = as_array(function, argument, value)
    if array.dtype not in FLOATS:
        raise TypeError(
            f"{function}: {argument} must have dtype float16, bfloat16, float32 or float64, "
            f"got {array.dtype}"
        )
    if rank is not None and array.ndim != rank:
        raise ValueError(
            f"{function}: {argument} must have shape {shape}, which has {rank} dimensions, "
            f"got shape {array.shape}"
        )
    return array


def choice(function: str, argument: str, value: Any, choices: Collection[Any]) -> Any:
    """`value` if it is one of `choices`."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(
            f"{function}: {argument} must be one of {', '.join(map(repr, choices))}, got {value!r}"
        )
    return value


def integer(
    function: str, argument: str, value: Any, low: int | None = None, high: int | None = None
) -> int:
    """`value` as an int in [low, high]; None is no bound."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {argument} must be a static integer, got {value!r}") from None
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: {argument} must be a static integer, got {value!r}")
    if (low is not None and number < low) or (high is not None and number > high):
        bound = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{function}: {argument} must be {bound}, got {number}")
    return number


def shape(function: str, argument: str, array: jax.Array, expected: Sequence[int], why: str):
    """Raises unless `array` has exactly the expected shape."""
    if array.shape != tuple(expected):
        raise ValueError(
            f"{function}: {argument} must have shape {tuple(expected)} ({why}), got {array.shape}"
        )
