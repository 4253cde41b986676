"""Lightweight convolution of ragged batches, as serving engines have them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops._core.public import public_function
from jaxops._families import sequences
from jaxops.activations import ACTIVATIONS, Activation, find_name
from jaxops.lightweight_conv import primitives
from jaxops.lightweight_conv.public import check_parameters

_NAME = "ragged_conv"


@public_function
def ragged_conv(
    x: ArrayLike,
    weight: ArrayLike,
    starts: ArrayLike,
    *,
    initial_state: ArrayLike | None = None,
    state_indices: ArrayLike | None = None,
    dilation: int = 1,
    bias: ArrayLike | None = None,
    activation: Activation = None,
    return_final_state: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal `lightweight_conv` of sequences of any lengths, whose tokens follow each other.

    Sequence i has the tokens ``starts[i] <= t < starts[i + 1]`` of x. It is convolved as
    ``lightweight_conv(x[starts[i]:starts[i + 1]], weight, initial_state=initial_state[i])``, with
    P = (K - 1) * dilation inputs in a state. All sequences are computed together. Policies of
    `jax.checkpoint` can name the result "lightweight_conv".

    Args:
      x: (N, C), the tokens of all sequences; float16, bfloat16, float32 or float64.
      weight: (H, K), K >= 1, H >= 1 dividing C; any float dtype.
      starts: (S + 1,), any integer dtype: 0, ascending, N. Equal neighbours are an empty sequence.
        The values may be traced and are not checked.
      initial_state: (S, P, C), the P inputs before those of each sequence, oldest first; any float
        dtype. Without it they are zero. With state_indices it is a cache (slots, P, C).
      state_indices: (S,), any integer dtype: the slot of the cache for each sequence, all
        different. Sequences whose index is outside of the cache read zeros and write nothing.
      dilation: steps between neighbouring taps, >= 1.
      bias: (C,), any float dtype.
      activation: as in `lightweight_conv`.
      return_final_state: whether to return the states after the tokens as well.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      An array of x's shape and dtype. Arithmetic is in float32, or in float64 where an argument is.
      With return_final_state, (y, states) of the shape and dtype of initial_state, or without one
      (S, P, C) of x's dtype. The state of an empty sequence stays as it was. With state_indices the
      states are the cache with the slots of the sequences replaced.

    Raises:
      TypeError: an argument is not of a float dtype, starts or state_indices not of an integer one,
        or an option not a static integer or bool.
      ValueError: a shape, the dilation or the activation is out of what is listed above, or
        state_indices come without initial_state.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> x = jnp.arange(1.0, 6.0).reshape(5, 1)  # a sequence of 3 tokens, then one of 2
      >>> weight = jnp.ones((1, 2))  # heads, taps
      >>> jaxops.ragged_conv(x, weight, starts=jnp.array([0, 3, 5]))[:, 0]
      Array([1., 3., 5., 4., 9.], dtype=float32)
    """
    name = _NAME
    activation = checks.choice(name, "activation", find_name(activation), ACTIVATIONS)
    return_final_state = checks.boolean(name, "return_final_state", return_final_state)
    x = checks.float_array(name, "x", x, 2, "(N, C)")
    tokens, channels = x.shape
    weight, bias = check_parameters(name, x, channels, weight, bias, "NTC")
    dilation = checks.integer(name, "dilation", dilation, 1)
    padding = (weight.shape[1] - 1) * dilation
    starts = sequences.integer_array(name, "starts", starts, None, "(S + 1,)")
    if starts.ndim != 1 or starts.shape[0] < 1:
        raise ValueError(f"{name}: starts must have shape (S + 1,), got shape {starts.shape}")
    starts = starts.astype(jnp.int32)
    count = starts.shape[0] - 1
    if initial_state is not None:
        initial_state = checks.float_array(name, "initial_state", initial_state, 3, "(S, P, C)")
        slots = count if state_indices is None else initial_state.shape[0]
        why = f"(S, P, C), the P = {padding} inputs before those of each sequence"
        if state_indices is not None:
            why = f"(slots, P, C), P = {padding} inputs a slot"
        checks.shape(name, "initial_state", initial_state, (slots, padding, channels), why)
    if state_indices is not None:
        if initial_state is None:
            raise ValueError(f"{name}: state_indices need an initial_state, the cache; got None")
        why = "(S,), one slot a sequence"
        state_indices = jnp.asarray(sequences.slot_indices(name, state_indices, count, why))
        # Numbers beyond int32 are slots of no cache.
        is_slot = (state_indices >= 0) & (state_indices <= np.iinfo(np.int32).max)
        state_indices = jnp.where(is_slot, state_indices, -1).astype(jnp.int32)

    token_starts, numbers = sequences.ragged_starts(starts, tokens)
    state = token_slots = None
    if initial_state is not None and padding > 0:
        state, token_slots = initial_state, numbers
        if state_indices is not None:
            token_slots = state_indices.at[numbers].get(mode="fill", fill_value=-1)
    operands: list[jax.Array | None] = [x, weight, bias, token_starts, state, token_slots]
    result_dtype = x.dtype
    if any(a is not None and a.dtype == jnp.float64 for a in operands):
        operands[0] = x.astype(jnp.float64)
    y = primitives.conv(
        *operands,
        options=primitives.Options(padding, dilation, "NTC"),
        activation=activation,
    )
    y = checkpoint_name(y.astype(result_dtype), primitives.NAME)
    if not return_final_state:
        return y
    if state_indices is None:
        return y, sequences.final_states(x, starts, padding, initial_state)
    return y, _update_cache(x, starts, padding, initial_state, state_indices)


def _update_cache(x, starts, padding, cache, indices):
    """The cache with the slots of the sequences replaced by their final states."""
    slots = cache.shape[0]
    # Indexing counts negative indices from the end, so they are moved past it.
    indices = jnp.where(indices < 0, slots, indices)
    initial = cache.at[indices].get(mode="fill", fill_value=0)
    final = sequences.final_states(x, starts, padding, initial)
    return cache.at[indices].set(final, mode="drop")
