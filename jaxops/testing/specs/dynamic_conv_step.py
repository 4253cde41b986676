"""Steps of the dynamic convolution: one or several, slots in their order or by indices."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import dynamic_conv as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal, unless_xla_is_faster

_ME = "dynamic_conv_step"

_BATCH, _CHANNELS = 8, 48  # of the large case


def _bad_inputs():
    step = jaxops.dynamic_conv_step

    def bad(name, call, error, *fragments):
        return BadInput(name=name, call=call, error=error, fragments=(f"{_ME}: ", *fragments))

    return (
        bad("x_t of rank 1", lambda x, s, w: step(x[0, 0], s, w), ValueError, "x_t", "(B, C)"),
        bad(
            "weights of one filter",
            lambda x, s, w: step(x, s, w[0]),
            ValueError,
            "weight must have shape (B, S, H, K)",
        ),
        bad(
            "weights of other steps",
            lambda x, s, w: step(x, s, w[:, 1:]),
            ValueError,
            "weight must",
            "(B, S, H, K)",
        ),
        bad("no taps", lambda x, s, w: step(x, s, w[..., :0]), ValueError, "weight", "K >= 1"),
        bad(
            "a state of other rows",
            lambda x, s, w: step(x, s[:, 1:], w),
            ValueError,
            "state must have shape",
            "P = 2",
        ),
        bad(
            "fewer slots than entries",
            lambda x, s, w: step(x, s[:1], w),
            ValueError,
            "state must have shape",
        ),
        bad(
            "an index too few",
            lambda x, s, w: step(x, s, w, state_indices=np.arange(len(x) - 1)),
            ValueError,
            "state_indices must have shape",
        ),
        bad(
            "indices of a float dtype",
            lambda x, s, w: step(x, s, w, state_indices=np.zeros(len(x), np.float32)),
            TypeError,
            "state_indices must have an integer dtype, got float32",
        ),
        bad(
            "integer state",
            lambda x, s, w: step(x, s.astype(np.int32), w),
            TypeError,
            "state must have dtype",
            "got int32",
        ),
        bad(
            "normalize that is no bool",
            lambda x, s, w: step(x, s, w, normalize="softmax"),
            TypeError,
            "normalize must",
        ),
        bad(
            "an unknown activation",
            lambda x, s, w: step(x, s, w, activation="tanh"),
            ValueError,
            "activation must be one of",
        ),
        bad("no dilation", lambda x, s, w: step(x, s, w, dilation=0), ValueError, "dilation"),
    )


def _placements(heads, with_indices, rank):
    """By entries and their slots, if these are in their order, and by channels and heads."""
    if with_indices:
        return ()

    def placement(name, axes, batch, channels):
        of_heads = channels if heads == _CHANNELS else None
        middle = (None,) * (rank - 2)
        x, state = P(batch, *middle, channels), P(batch, None, channels)
        weight = P(batch, *middle, of_heads, None)
        return Placement(
            name=name,
            axes=axes,
            arguments=(x, state, weight),
            results=(x, state),
            backward={} if heads == _CHANNELS or not channels else {"all-reduce": 1},
            manual=heads in (1, _CHANNELS),
        )

    return (
        placement("batch", ("n",), "n", None),
        placement("channels", ("c",), None, "c"),
        placement("batch and channels", ("n", "c"), "n", "c"),
    )


def make_spec(
    variant,
    *,
    heads,
    large_heads,
    taps,
    steps=None,
    dilation=1,
    normalize=False,
    indices=False,
    activation=None,
):
    """A call of `dynamic_conv_step`, of one step without its dimension if `steps` is None."""
    reach = (taps - 1) * dilation
    options = {"dilation": dilation, "activation": activation, "normalize": normalize}

    def slots_of(x, state):
        # Constants: every vmap of another argument would take most of the time of all checks.
        return np.arange(len(state) - 1, -1, -1, dtype=np.int32)[: len(x)] if indices else None

    def function(x, state, weight):
        slots = slots_of(x, state)
        return jaxops.dynamic_conv_step(x, state, weight, state_indices=slots, **options)

    def oracle(x, state, weight):
        slots = slots_of(x, state)
        own = state if slots is None else state[slots]
        rows, filters = (x, weight) if steps else (x[:, None], weight[:, None])
        y = reference.dynamic_conv(rows, filters, None, None, own, padding=reach, **options)
        moved = jnp.concatenate([own, rows], axis=1)[:, rows.shape[1] :]
        return y.reshape(x.shape), moved if slots is None else state.at[slots].set(moved)

    def arrays(rng, dtype, batch=3, channels=6, heads=heads):
        slots = batch + 2 if indices else batch
        middle = (steps,) if steps else ()
        return (
            normal(rng, (batch, *middle, channels), dtype),
            normal(rng, (slots, reach, channels), dtype),
            normal(rng, (batch, *middle, heads, taps), dtype),
        )

    # The softmax has a rounding of each tap, and its gradient twice as many.
    softmax = 2 * taps * normalize
    return OperatorSpec(
        operator=_ME,
        variant=variant,
        function=function,
        reference=oracle,
        arguments=arrays,
        large=functools.partial(arrays, batch=_BATCH, channels=_CHANNELS, heads=large_heads),
        differentiable=(0, 1, 2),
        calls={"jaxops_dynamic_conv_step": 1},
        # The second is of the steps of the state.
        vjp_calls=unless_xla_is_faster(
            {"jaxops_dynamic_conv": 1, "jaxops_dynamic_conv_backward": 2}
        ),
        value_terms=lambda *_: taps + 1 + softmax,
        vjp_terms=lambda x, state, weight: max(x.shape[-1] // weight.shape[-2], taps) + 2 * softmax,
        # Rows have a cotangent through y and one through the new state, and each is rounded.
        vjp_roundings=4 if activation else 2,
        placements=_placements(large_heads, indices, 3 if steps else 2),
        empty={
            "no batch": functools.partial(arrays, batch=0),
            "no channels": functools.partial(arrays, channels=0, heads=1),
        },
        bad_inputs=_bad_inputs() if steps and dilation == 1 else (),
        # XLA adds the gradients of y and of the new state where it may contract a product with it.
        vjp_bitwise=False,
        checkpoint_name="dynamic_conv",
    )


SPECS = (
    make_spec(
        "one step, softmax, silu",
        heads=6,
        large_heads=_CHANNELS,
        taps=4,
        normalize=True,
        activation="silu",
    ),
    make_spec("3 steps, heads", heads=3, large_heads=1, taps=3, steps=3),
    make_spec(
        "indices, 2 steps, dilated, softmax",
        heads=2,
        large_heads=2,
        taps=3,
        steps=2,
        dilation=2,
        normalize=True,
        indices=True,
    ),
)
