"""Dynamic convolution of the next steps of sequences whose states are in a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops._core.public import public_function
from jaxops._families import sequences
from jaxops.activations import ACTIVATIONS, Activation, find_name
from jaxops.dynamic_conv.public import check_bias, check_weight, dynamic_conv

_NAME = "dynamic_conv_step"


@public_function
def dynamic_conv_step(
    x_t: ArrayLike,
    state: ArrayLike,
    weight: ArrayLike,
    *,
    normalize: bool = False,
    dilation: int = 1,
    bias: ArrayLike | None = None,
    activation: Activation = None,
    state_indices: ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The next step, or the next few, of causal `dynamic_conv` of sequences with cached states.

    Steps one by one, several at a time and `dynamic_conv` of the whole sequence give the same
    result; in float32 bit for bit.

    Args:
      x_t: (B, C), or (B, S, C) for S steps; any float dtype.
      state: (slots, P, C) with P = (K - 1) * dilation: the last P inputs of each slot, oldest
        first; any float dtype.
      weight: (B, H, K), or (B, S, H, K) for S steps; any float dtype.
      normalize: as in `dynamic_conv`, as are dilation, bias and activation.
      state_indices: (B,), any integer dtype, all different: the slot of each sequence. Without it
        sequence b has slot b, and there are B slots. A sequence whose index is outside of
        [0, slots) is padding: it reads zeros and writes nothing.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (y, state): y of x_t's shape and dtype, and the states with those of the sequences moved on.

    Raises:
      TypeError, ValueError: as `dynamic_conv`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> state = jnp.zeros((1, 1, 1))  # slots, P, channels
      >>> weight = jnp.array([[[1.0, 2.0]]])  # batch, heads, taps
      >>> y_0, state = jaxops.dynamic_conv_step(jnp.array([[3.0]]), state, weight)
      >>> y_1, state = jaxops.dynamic_conv_step(jnp.array([[4.0]]), state, 2 * weight)
      >>> y_0.item(), y_1.item(), state.item()
      (6.0, 22.0, 4.0)
    """
    activation = checks.choice(_NAME, "activation", find_name(activation), ACTIVATIONS)
    normalize = checks.boolean(_NAME, "normalize", normalize)
    x = checks.float_array(_NAME, "x_t", x_t, None, "(B, C) or (B, S, C)")
    if x.ndim not in (2, 3):
        raise ValueError(f"{_NAME}: x_t must have shape (B, C) or (B, S, C), got {x.shape}")
    form = "(B, H, K)" if x.ndim == 2 else "(B, S, H, K)"
    weight = checks.float_array(_NAME, "weight", weight, x.ndim + 1, form)
    state = checks.float_array(_NAME, "state", state, 3, "(slots, P, C)")
    dilation = checks.integer(_NAME, "dilation", dilation, 1)
    taps = check_weight(_NAME, weight, x.shape[:-1], form, x.shape[-1], x.shape)
    batch, channels = x.shape[0], x.shape[-1]
    bias = None if bias is None else check_bias(_NAME, bias, channels)
    slots = batch if state_indices is None else state.shape[0]
    padding = (taps - 1) * dilation
    why = f"(slots, P, C) with P = {padding} for x_t {x.shape}"
    checks.shape(_NAME, "state", state, (slots, padding, channels), why)
    own, indices = state, None
    if state_indices is not None:
        why = "(B,), one slot a sequence of x_t"
        indices = sequences.integer_array(_NAME, "state_indices", state_indices, (batch,), why)
        # Negative indices would count from the end.
        indices = jnp.where((indices >= 0) & (indices < slots), indices, slots).astype(jnp.int32)
        own = state.at[indices].get(mode="fill", fill_value=0)
    steps = x[:, None] if x.ndim == 2 else x
    y, moved = dynamic_conv(
        steps,
        weight[:, None] if x.ndim == 2 else weight,
        normalize=normalize,
        dilation=dilation,
        bias=bias,
        activation=activation,
        initial_state=own,
        return_final_state=True,
    )
    if indices is not None:
        moved = state.at[indices].set(moved, mode="drop")
    return y.reshape(x.shape), moved
