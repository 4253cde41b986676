"""Paddings by name, segments and states: the parts that operators over time share.

The primitives take segments as `starts`: the first step of the segment of each step, non-decreasing
over time. A segment that began before step 0 has a start of 0 if nothing is known of its earlier
steps, and of -P if a state holds P of them. Two steps are of the same segment if and only if their
starts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxops._core import checks

PADDINGS = ("causal", "same")


def resolve_padding(function: str, padding: Any, reach: int) -> int:
    """The padding as a number in [0, reach]; names are taken in any case."""
    if isinstance(padding, str):
        name = padding.lower()
        checks.choice(function, "padding", name if name in PADDINGS else padding, PADDINGS)
        return reach if name == "causal" else reach // 2
    return checks.integer(function, "padding", padding, 0, reach)


def boolean(function: str, argument: str, value: Any) -> bool:
    """`value` as a bool, which must be static."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: {argument} must be a bool, got {checks.describe(value)}")
    return bool(value)


def time_axis(data_format: str) -> int:
    """The dimension of time in a sequence, counted from the last."""
    return -2 if data_format == "NTC" else -1


def sequence_array(function: str, argument: str, value: Any, data_format: str) -> jax.Array:
    """`value` as an array (..., T, C), or (..., C, T), of a float dtype."""
    shape = "(..., T, C)" if data_format == "NTC" else "(..., C, T)"
    array = checks.float_array(function, argument, value, None, shape)
    if array.ndim < 2:
        raise ValueError(
            f"{function}: {argument} must have shape {shape}, which has at least 2 dimensions, got "
            f"shape {array.shape}"
        )
    return array


def unvarying(array: jax.Array, rank: int) -> jax.Array:
    """An array that does not vary over the `rank` batch dimensions of a sequence."""
    return array.reshape((1,) * rank + array.shape) if rank else array


def integer_array(
    function: str, argument: str, value: Any, expected: Sequence[int] | None, why: str
) -> jax.Array:
    """`value` as an integer array of exactly the expected shape, or with None of any."""
    array = checks.as_array(function, argument, checks.array(function, argument, value, why))
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{function}: {argument} must have an integer dtype, got {array.dtype}")
    if expected is not None:
        checks.shape(function, argument, array, expected, why)
    return array


def state_array(
    function: str, argument: str, value: Any, x: jax.Array, padding: int, data_format: str
) -> jax.Array:
    """`value` as the steps that precede those of x: `padding` of them, and as x otherwise."""
    time_first = data_format == "NTC"
    why = "(..., P, C)" if time_first else "(..., C, P)"
    array = checks.float_array(function, argument, value, None, why)
    expected = list(x.shape)
    expected[time_axis(data_format)] = padding
    why = f"{why}, the P = {padding} steps before those of x {x.shape}"
    checks.shape(function, argument, array, expected, why)
    return array


def segment_starts(segment_ids: jax.Array, first: int) -> jax.Array:
    """The first step of the segment of each step, int32, of ids (..., T).

    A segment is a run of equal neighbouring ids. The first one starts at `first`.
    """
    time = segment_ids.shape[-1]
    steps = jnp.arange(time, dtype=jnp.int32)
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    begins = jnp.pad(changes, [(0, 0)] * (segment_ids.ndim - 1) + [(min(1, time), 0)])
    return jax.lax.cummax(jnp.where(begins, steps, jnp.int32(first)), axis=segment_ids.ndim - 1)


def ragged_starts(starts: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """For each token the first one of its sequence, and the number of its sequence, int32.

    `starts` (S + 1,) has the first token of each sequence and the end of the last. Tokens past that
    end are a sequence of their own, which has the number S.
    """
    starts = starts.astype(jnp.int32)
    steps = jnp.arange(tokens, dtype=jnp.int32)
    # The last of the sequences that start at a token is the one that is not empty.
    number = jnp.searchsorted(starts, steps, side="right", method="scan_unrolled")
    number = number.astype(jnp.int32) - 1
    return jnp.take(starts, number, mode="clip"), number


def final_state(
    x: jax.Array,
    padding: int,
    data_format: str,
    starts: jax.Array | None = None,
    initial_state: jax.Array | None = None,
) -> jax.Array:
    """The last `padding` inputs of the last segment of each row: the state of a next call.

    The initial state precedes the inputs of the first segment, zeros those of the others. The
    result has the dtype of the initial state, else that of x.
    """
    axis = x.ndim + time_axis(data_format)
    time = x.shape[axis]
    dtype = x.dtype if initial_state is None else initial_state.dtype
    if jax.export.is_symbolic_dim(time) or time < padding:
        if initial_state is None:
            before = [(0, 0)] * x.ndim
            before[axis] = (padding, 0)
            rows = jnp.pad(x, before)
        else:
            wide = jnp.promote_types(x.dtype, dtype)
            rows = jnp.concatenate([initial_state.astype(wide), x.astype(wide)], axis=axis)
        last = jax.lax.slice_in_dim(rows, time, time + padding, axis=axis)
    else:
        last = jax.lax.slice_in_dim(x, time - padding, time, axis=axis)
    if starts is not None and padding > 0 and time > 0:
        steps = time - padding + jnp.arange(padding, dtype=jnp.int32)
        is_of_last = steps >= starts[..., -1:]
        last = jnp.where(jnp.expand_dims(is_of_last, 2 * x.ndim - 3 - axis), last, 0)
    return last.astype(dtype)


def final_states(
    x: jax.Array, starts: jax.Array, padding: int, initial_states: jax.Array | None
) -> jax.Array:
    """The last `padding` inputs (S, padding, C) of each sequence of tokens (N, C).

    The initial state of a sequence precedes its inputs; without one zeros do.
    """
    tokens, channels = x.shape
    begins, ends = starts[:-1, None], starts[1:, None]
    rows = ends - padding + jnp.arange(padding, dtype=starts.dtype)
    is_input = (rows >= begins)[..., None]
    if tokens > 0:
        last = x.at[jnp.where(rows >= begins, rows, tokens)].get(mode="fill", fill_value=0)
    else:
        last = jnp.zeros((*rows.shape, channels), x.dtype)
    if initial_states is None:
        return last
    if padding == 0:
        return initial_states
    kept = jnp.clip(rows - begins + padding, 0, padding - 1)
    before = jax.vmap(lambda state, at: state.at[at].get(mode="clip"))(initial_states, kept)
    return jnp.where(is_input, last.astype(initial_states.dtype), before)
