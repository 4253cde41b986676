"""Steps of decoding of the causal lightweight convolution.

The primitive makes the results and the new state of some steps at once, and updates the state in
place where it is donated. Its derivatives are those of a composition: the rows of each slot and the
new ones in one sequence, a convolution of that, and its last rows in place of those of the slot.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxops._core import checks, rules
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator
from jaxops._core.public import public_function
from jaxops._families import sequences
from jaxops.activations import ACTIVATIONS, Activation, activation_name, find_name
from jaxops.lightweight_conv import lightweight_conv
from jaxops.reference import lightweight_conv_step as reference

NAME = "lightweight_conv_step"


@public_function
def lightweight_conv_step(
    x_t: ArrayLike,
    state: ArrayLike,
    weight: ArrayLike,
    *,
    dilation: int = 1,
    bias: ArrayLike | None = None,
    activation: Activation = None,
    state_indices: ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One step, or several, of ``lightweight_conv(..., padding="causal")``.

    ``y[b, s, c] = act(bias[c] + sum_k weight[h, k] * rows[b, s + k * dilation, c])`` with
    ``h = c // (C // H)``, where ``rows[b]`` has the P rows of the state of entry b and then those
    of ``x_t[b]``. The last P of these are the new state. From a state of zeros, a sequence gives
    the same y whether it is cut into steps, into chunks or not at all.

    The state is updated in place, without a copy, where nothing else uses it: in the carry of a
    `jax.lax.scan`, or as an argument that `jax.jit` has in ``donate_argnums``.

    Args:
      x_t: (B, C), or (B, S, C) for S steps; float16, bfloat16, float32 or float64.
      state: (slots, P, C) with P = (K - 1) * dilation, the rows before x_t, the oldest first; any
        float dtype.
      weight: (H, K), K >= 1, H >= 1 dividing C; any float dtype.
      dilation: steps between neighbouring taps, >= 1.
      bias: (C,), any float dtype.
      activation: None, "relu", "silu" (or "swish") or "gelu" (the tanh form, `jax.nn.gelu`'s
        default), in any case, or the function of `jax.nn`.
      state_indices: (B,), integers: the slot of each entry of x_t, all different; the default is
        ``arange(B)``. Entries that are no slot, such as -1, are padding: they read zeros and write
        nothing. Slots that none names keep their state.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (y, state): y has the shape and dtype of x_t, the state those of the state given. Arithmetic
      is in float32, or in float64 where an argument is.

    Raises:
      TypeError: an argument is not of a float dtype, state_indices not of an integer dtype, or an
        option not a static integer.
      ValueError: a shape, a dilation or a name is out of what is listed above, or there are fewer
        slots than entries and no state_indices.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> weight, state = jnp.ones((1, 2)), jnp.zeros((1, 1, 1))  # state: slots, P, channels
      >>> y_0, state = jaxops.lightweight_conv_step(jnp.array([[1.0]]), state, weight)
      >>> y_1, state = jaxops.lightweight_conv_step(jnp.array([[2.0]]), state, weight)
      >>> y_0.item(), y_1.item(), state.item()
      (1.0, 3.0, 2.0)
    """
    name = NAME
    activation = checks.choice(name, "activation", find_name(activation), ACTIVATIONS)
    dilation = checks.integer(name, "dilation", dilation, 1)
    x = checks.float_array(name, "x_t", x_t, None, "(B, C) or (B, S, C)")
    if x.ndim not in (2, 3):
        raise ValueError(f"{name}: x_t must have shape (B, C) or (B, S, C), got {x.shape}")
    state = checks.float_array(name, "state", state, 3, "(slots, P, C)")
    weight = checks.float_array(name, "weight", weight, 2, "(H, K)")
    heads, taps = weight.shape
    entries, channels = x.shape[0], x.shape[-1]
    if heads < 1 or taps < 1:
        raise ValueError(
            f"{name}: weight must have shape (H, K) with H >= 1 and K >= 1, got {weight.shape}"
        )
    if channels % heads:
        raise ValueError(
            f"{name}: the H = {heads} rows of weight must divide the C = {channels} channels of "
            f"x_t {x.shape}"
        )
    slots = state.shape[0]
    why = "(slots, P, C) with P = (K - 1) * dilation"
    checks.shape(name, "state", state, (slots, (taps - 1) * dilation, channels), why)
    operands = [x if x.ndim == 3 else x[:, None], state, weight]
    if bias is not None:
        bias = checks.float_array(name, "bias", bias, 1, "(C,)")
        checks.shape(name, "bias", bias, (channels,), "(C,), one entry a channel of x_t")
        operands.append(bias)
    if accumulation_dtype(*operands) == np.float64:
        operands[0] = operands[0].astype(np.float64)
    if state_indices is None and slots < entries:
        raise ValueError(
            f"{name}: state must have at least as many slots as x_t has entries, {entries}, "
            f"without state_indices, got {slots}"
        )
    if state_indices is None and slots > entries:
        state_indices = np.arange(entries, dtype=np.int32)
    indices = sequences.slot_indices(name, state_indices, entries)
    y, state = _step_operator(
        *operands,
        *(() if indices is None else (indices,)),
        # A single tap has no distance to another.
        dilation=1 if taps == 1 else dilation,
        activation=activation,
        with_bias=bias is not None,
        with_indices=indices is not None,
    )
    return y.reshape(x.shape).astype(x.dtype), state


def _signature(*, with_bias, with_indices, **_):
    return sequences.step_signature("heads taps", with_bias=with_bias, with_indices=with_indices)


def _step_reference(*operands, with_bias, with_indices, **options):
    return list(
        reference.lightweight_conv_step(
            *sequences.step_operands(operands, with_bias=with_bias, with_indices=with_indices),
            **options,
        )
    )


_step_operator = Operator(
    NAME,
    signature=_signature,
    reference=_step_reference,
    dtypes=lambda x, state, *_, **__: [x.dtype, state.dtype],
    attributes=lambda *, dilation, activation, **_: {
        "dilation": np.int64(dilation),
        "activation": activation_name(activation),
    },
    replicated=("steps", "rows", "taps", "entries", "cache"),
    aliases={1: 1},
)


def _composed(*operands, dilation, activation, with_bias, with_indices):
    """The operator in terms of the convolution, whose derivatives of every order there are."""
    x, state, weight, bias, indices = sequences.step_operands(
        operands, with_bias=with_bias, with_indices=with_indices
    )
    same = x.dtype == state.dtype
    wide = x.dtype if same else accumulation_dtype(x, state)
    window = reference.gather(x.astype(wide), state.astype(wide), indices)

    def convolve(window, weight, *bias):
        return lightweight_conv(
            window,
            weight,
            padding=0,
            dilation=dilation,
            bias=bias[0] if bias else None,
            activation=activation,
        )

    parameters = (weight,) if bias is None else (weight, bias)
    shapes = "(b,t,c),(h,k)" + (",(c)" if with_bias else "")
    y = jnp.vectorize(convolve, signature=f"{shapes}->(b,t,c)")(window, *parameters)
    y = y[..., : x.shape[-2], :].astype(x.dtype)
    return [y, reference.scatter(window, state, indices)]


@_step_operator.def_jvp
def _step_jvp(primals, tangents, **params):
    return rules.jvp(functools.partial(_composed, **params), primals, tangents)


@_step_operator.def_transpose
def _step_transpose(cotangents, *operands, **params):
    return rules.transpose(functools.partial(_composed, **params), cotangents, operands)
