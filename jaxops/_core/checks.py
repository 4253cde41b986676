"""Argument checks that every operator shares; each error names operator, argument, want and got.

`describe` tells what came: an error is read in a terminal or a log, and has no array in it.
"""

from __future__ import annotations

import contextlib
import enum
import operator
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np

FLOATS = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))


def describe(value: Any) -> str:
    """A few words about an argument: scalars and short static ones as they are, never an array."""
    if _is_short(value) and len(text := repr(value)) <= 100:
        return text
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = "a traced array" if isinstance(value, jax.core.Tracer) else "an array"
        return f"{kind} of shape {value.shape} and dtype {value.dtype}"
    kind = type(value).__name__
    if isinstance(value, int):
        return f"{kind} of {value.bit_length()} bits"
    return f"{kind} of length {len(value)}" if isinstance(value, (str, list, tuple)) else kind


def _is_short(value):
    if isinstance(value, str):
        return len(value) <= 40
    if isinstance(value, enum.Enum):
        return True
    if isinstance(value, (int, np.integer)):
        return abs(int(value)) < 10**20
    if isinstance(value, (list, tuple)):
        # Numbers that are no integers may be the entries of an array.
        return len(value) <= 8 and all(
            not isinstance(v, (float, complex)) and _is_short(v) for v in value
        )
    is_scalar = isinstance(value, (float, complex)) and not isinstance(value, np.generic)
    return value is None or is_scalar


@contextlib.contextmanager
def without_arrays(function: str, options: Mapping[str, Any]) -> Generator[None]:
    """Around checks by JAX, whose errors may have all of an option in them."""
    try:
        yield
    except Exception:
        for name, value in options.items():
            has_entries = is_array(value) or isinstance(value, (str, list, tuple, dict))
            entries = value.tolist() if isinstance(value, np.ndarray) else value
            if has_entries and not _is_short(entries):
                raise TypeError(
                    f"{function}: {name} must be static and short, got {describe(value)}"
                ) from None
        raise


def array(function: str, argument: str, value: Any, shape: str) -> jax.Array | np.ndarray:
    """`value` as an array, left to NumPy where it is not JAX's."""
    _check_kind(function, argument, value, shape)
    if is_array(value) and not isinstance(value, np.ndarray):
        return as_array(function, argument, value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError):  # such as of a list of traced arrays
        return as_array(function, argument, value)


def is_array(value: Any) -> bool:
    """Whether it is one, or like the parameters of Flax's modules stands for one."""
    return isinstance(value, (jax.Array, np.ndarray)) or hasattr(value, "__jax_array__")


def is_sequence(value: Any) -> bool:
    """Whether it may be a list of integers, which an option has one a dimension or one a part."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and np.issubdtype(value.dtype, np.integer)
    return isinstance(value, Sequence) and not isinstance(value, str)


def as_array(function: str, argument: str, value: Any) -> jax.Array:
    """`value` as an array of JAX."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        kind = getattr(value, "dtype", type(value).__name__)
        # Errors of NumPy and JAX may have all of the array in them.
        raise TypeError(
            f"{function}: {argument} must be an array of numbers that JAX has, got {kind}"
        ) from None


def _check_kind(function, argument, value, shape):
    is_value = is_array(value) or isinstance(value, (np.generic, float, int, list, tuple))
    if not is_value or isinstance(value, np.ma.MaskedArray):
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


def dtype(function: str, argument: str, value: Any) -> np.dtype:
    """`value` as a dtype that JAX has; without 64 bits, one of 32, as everywhere in JAX."""
    if not is_array(value):  # NumPy takes an array for its dtype
        try:
            known = jax.dtypes.canonicalize_dtype(jnp.dtype(value))
        except (TypeError, ValueError, SyntaxError):
            pass
        else:
            if jnp.issubdtype(known, jnp.number) or known == np.bool_:
                return known
    raise TypeError(f"{function}: {argument} must be a dtype that JAX has, got {describe(value)}")


def choice(function: str, argument: str, value: Any, choices: Collection[Any]) -> Any:
    """The one of `choices` that `value` is; names are taken in any case."""
    if value is None or isinstance(value, str):
        for known in choices:
            if value == known or (value and known and value.lower() == known.lower()):
                return known
    raise ValueError(
        f"{function}: {argument} must be one of {', '.join(map(repr, choices))}, got "
        f"{describe(value)}"
    )


def integer(
    function: str, argument: str, value: Any, low: int | None = None, high: int | None = None
) -> int:
    """`value` as an int in [low, high]; None is no bound."""
    if jax.export.is_symbolic_dim(value):
        raise NotImplementedError(
            f"{function}: {argument} must be a static integer, symbolic shapes such as {value} are "
            "not supported here"
        )
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{function}: {argument} must be a static integer, got {describe(value)}")
    if (low is not None and number < low) or (high is not None and number > high):
        bound = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{function}: {argument} must be {bound}, got {describe(number)}")
    return number


def boolean(function: str, argument: str, value: Any) -> bool:
    """`value` as a bool, which must be static."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: {argument} must be a bool, got {describe(value)}")
    return bool(value)


def scalar(
    function: str, argument: str, value: Any, integers: bool = False
) -> float | jax.Array | np.ndarray:
    """A number as a float, a scalar array as it is."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        return float(value)
    kinds = (jnp.floating, jnp.integer) if integers else (jnp.floating,)
    got = value.dtype if isinstance(value, (jax.Array, np.ndarray)) else type(value).__name__
    kind = "float or integer" if integers else "float"
    if not isinstance(value, (jax.Array, np.ndarray)) or not any(
        jnp.issubdtype(value.dtype, k) for k in kinds
    ):
        raise TypeError(
            f"{function}: {argument} must be a number or a scalar array of a {kind} dtype, got "
            f"{got}"
        )
    if value.ndim:
        raise ValueError(f"{function}: {argument} must be a scalar, got shape {value.shape}")
    return value


def shape(function: str, argument: str, array: jax.Array, expected: Sequence[int], why: str):
    """Raises unless `array` has exactly the expected shape."""
    if array.shape != tuple(expected):
        raise ValueError(
            f"{function}: {argument} must have shape {tuple(expected)} ({why}), got {array.shape}"
        )
