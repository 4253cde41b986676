"""Steps of the lightweight convolution: one or several, slots in their order or by indices."""

from __future__ import annotations

import functools

import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import lightweight_conv_step as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal

_ME = "lightweight_conv_step"

_BATCH, _CHANNELS = 8, 48  # of the large case

# The derivative of jax.nn.gelu, as in the specification of the whole convolution.
_GELU_ERROR = 48


def _bad_inputs():
    step = jaxops.lightweight_conv_step

    def bad(name, call, error, *fragments):
        return BadInput(name=name, call=call, error=error, fragments=(f"{_ME}: ", *fragments))

    return (
        bad("x_t of rank 1", lambda x, s, w, *_: step(x[0, 0], s, w), ValueError, "x_t", "(B, C)"),
        bad(
            "a state of other rows",
            lambda x, s, w, *_: step(x, s[:, 1:], w),
            ValueError,
            "state must have shape",
            "(K - 1) * dilation",
        ),
        bad(
            "a state of rank 2",
            lambda x, s, w, *_: step(x, s[0], w),
            ValueError,
            "state must",
            "(slots, P, C)",
        ),
        bad(
            "a state of another dilation",
            lambda x, s, w, *_: step(x, s, w, dilation=7),
            ValueError,
            "state must have shape",
        ),
        bad(
            "fewer slots than entries",
            lambda x, s, w, *_: step(x, s[:1], w),
            ValueError,
            "state must have at least as many slots as x_t has entries, ",
            "got 1",
        ),
        bad(
            "heads that do not divide the channels",
            lambda x, s, w, *_: step(x[..., :5], s[..., :5], w[:1].repeat(4, 0)),
            ValueError,
            "H = 4",
            "C = 5",
        ),
        bad("no taps", lambda x, s, w, *_: step(x, s, w[:, :0]), ValueError, "weight", "K >= 1"),
        bad("no heads", lambda x, s, w, *_: step(x, s, w[:0]), ValueError, "weight", "H >= 1"),
        bad(
            "bias of another length",
            lambda x, s, w, *_: step(x, s, w, bias=np.zeros(1, np.float32)),
            ValueError,
            "bias must",
            "(C,)",
        ),
        bad(
            "an index too few",
            lambda x, s, w, *_: step(x, s, w, state_indices=np.arange(len(x) - 1)),
            ValueError,
            "state_indices must have shape",
        ),
        bad(
            "indices of a float dtype",
            lambda x, s, w, *_: step(x, s, w, state_indices=np.zeros(len(x), np.float32)),
            TypeError,
            "state_indices must have an integer dtype, got float32",
        ),
        bad(
            "integer state",
            lambda x, s, w, *_: step(x, s.astype(np.int32), w),
            TypeError,
            "state must have dtype",
            "got int32",
        ),
        bad(
            "integer x_t",
            lambda x, s, w, *_: step(x.astype(np.int8), s, w),
            TypeError,
            "x_t must have dtype",
            "got int8",
        ),
        bad(
            "an unknown activation",
            lambda x, s, w, *_: step(x, s, w, activation="tanh"),
            ValueError,
            "activation must be one of",
        ),
        bad("no dilation", lambda x, s, w, *_: step(x, s, w, dilation=0), ValueError, "dilation"),
    )


def _placements(heads, with_bias, with_indices, rank):
    """By entries and their slots, if these are in their order, and by channels."""

    def placement(name, axes, batch, channels, backward, manual):
        per_channel = channels if heads == _CHANNELS else None
        x = P(batch, None, channels) if rank == 3 else P(batch, channels)
        state = P(batch, None, channels)
        others = [P(per_channel, None)]
        others += [P(channels)] if with_bias else []
        return Placement(
            name=name,
            axes=axes,
            arguments=(x, state, *others),
            results=(x, state),
            backward=backward,
            manual=manual,
        )

    summed = {"all-reduce": 1}
    twice = with_bias and heads != _CHANNELS
    whole_heads = heads in (1, _CHANNELS)
    by_channel = {} if heads == _CHANNELS else summed
    found = [placement("channels", ("c",), None, "c", by_channel, whole_heads)]
    if not with_indices:
        both = {"all-reduce": 2} if twice else summed
        found += [
            placement("batch", ("n",), "n", None, summed, True),
            placement("batch and channels", ("n", "c"), "n", "c", both, whole_heads),
        ]
    return tuple(found)


def make_spec(
    variant,
    *,
    heads,
    taps,
    steps=None,
    dilation=1,
    bias=False,
    indices=False,
    activation=None,
    channels=6,
    large_heads,
):
    """A call of `lightweight_conv_step`, of one step without its dimension if `steps` is None."""
    reach = (taps - 1) * dilation
    options = {"dilation": dilation, "activation": activation}

    def slots_of(x, state):
        # Constants: every vmap of another argument would take most of the time of all checks.
        return np.arange(len(state) - 1, -1, -1, dtype=np.int32)[: len(x)] if indices else None

    def function(x, state, weight, bias=None):
        given = {"bias": bias, "state_indices": slots_of(x, state)}
        return jaxops.lightweight_conv_step(x, state, weight, **given, **options)

    def oracle(x, state, weight, bias=None):
        rows = x if steps else x[:, None]
        slots = slots_of(x, state)
        y, state = reference.lightweight_conv_step(rows, state, weight, bias, slots, **options)
        return y.reshape(x.shape), state

    def arrays(rng, dtype, batch=3, channels=channels, heads=heads):
        slots = batch + 2 if indices else batch
        x = normal(rng, (batch, steps, channels) if steps else (batch, channels), dtype)
        found = [x, normal(rng, (slots, reach, channels), dtype), normal(rng, (heads, taps), dtype)]
        found += [normal(rng, (channels,), dtype)] if bias else []
        return tuple(found)

    def vjp_terms(x, state, weight, *_):
        entries = len(x) * (reach + (steps or 1))
        return entries * x.shape[-1] // len(weight) + (_GELU_ERROR if activation == "gelu" else 0)

    return OperatorSpec(
        operator=_ME,
        variant=variant,
        function=function,
        reference=oracle,
        arguments=arrays,
        large=functools.partial(arrays, batch=_BATCH, channels=_CHANNELS, heads=large_heads),
        differentiable=(0, 1, 2, 3) if bias else (0, 1, 2),
        calls={"jaxops_lightweight_conv_step": 1},
        vjp_calls={"jaxops_lightweight_conv": 1, "jaxops_lightweight_conv_backward": 1},
        value_terms=lambda *_: taps + 1,
        vjp_terms=vjp_terms,
        # Rows have a cotangent through y and one through the new state, and each is rounded.
        vjp_roundings=4 if activation else 2,
        placements=_placements(large_heads, bias, indices, 3 if steps else 2),
        empty={
            "no batch": functools.partial(arrays, batch=0),
            "no channels": functools.partial(arrays, channels=0),
        },
        bad_inputs=_bad_inputs() if dilation == 1 else (),
    )


SPECS = (
    make_spec("one step", heads=6, large_heads=_CHANNELS, taps=4, activation="silu"),
    make_spec("3 steps, heads, bias", heads=3, large_heads=3, taps=3, steps=3, bias=True),
    make_spec(
        "indices, 2 steps, dilated, gelu",
        heads=2,
        large_heads=1,
        taps=3,
        steps=2,
        dilation=2,
        indices=True,
        activation="gelu",
    ),
    make_spec(
        "9 taps, 2 steps, H = 1, dilated, relu",
        heads=1,
        large_heads=1,
        taps=9,
        steps=2,
        dilation=3,
        activation="relu",
    ),
)
