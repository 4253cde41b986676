"""Lightweight convolution of ragged batches."""

from __future__ import annotations

import functools

import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._families import sequences
from jaxops.reference import lightweight_conv as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal

_ME = "ragged_conv"
_TAPS, _LARGE_CHANNELS = 3, 48


def _function(x, weight, starts, states):
    return jaxops.ragged_conv(
        x,
        weight,
        starts,
        initial_state=states,
        activation="silu",
        return_final_state=True,
    )


def _oracle(x, weight, starts, states):
    of_tokens, slots = sequences.ragged_starts(starts, x.shape[0])
    y = reference.lightweight_conv(
        x,
        weight,
        padding=_TAPS - 1,
        activation="silu",
        starts=of_tokens,
        state=states,
        slots=slots,
    )
    return y, sequences.final_states(x, starts, _TAPS - 1, states)


def _arguments(rng, dtype, channels=4, lengths=(3, 0, 1, 4)):
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    return (
        normal(rng, (starts[-1], channels), dtype),
        normal(rng, (max(channels, 1), _TAPS), dtype),
        starts,
        normal(rng, (len(lengths), _TAPS - 1, channels), dtype),
    )


def _reach_of_weight(index, x, weight, *_):
    of_channel = np.arange(weight.shape[0]) == index[0]
    return (of_channel, False, of_channel, of_channel[:, None], of_channel)


def _bad(name, change, error, *fragments):
    def call(*arguments):
        return _function(*change(*arguments))

    return BadInput(name=name, call=call, error=error, fragments=(f"{_ME}: ", *fragments))


def _bad_inputs():
    return (
        _bad("x of rank 3", lambda x, *a: (x[None], *a), ValueError, "x must", "(N, C)", "2 dim"),
        _bad(
            "heads that do not divide the channels",
            lambda x, w, *a: (x, np.zeros((3, _TAPS), x.dtype), *a),
            ValueError,
            "weight",
            "H = 3",
            "C = 4",
        ),
        _bad(
            "starts of a float dtype",
            lambda x, w, s, *a: (x, w, s.astype(np.float32), *a),
            TypeError,
            "starts must have an integer dtype",
            "got float32",
        ),
        _bad(
            "no starts",
            lambda x, w, s, *a: (x, w, s[:0], *a),
            ValueError,
            "starts must have shape (S + 1,)",
        ),
        _bad(
            "a state less",
            lambda x, w, s, states: (x, w, s, states[1:]),
            ValueError,
            "initial_state must have shape (4, 2, 4)",
        ),
        BadInput(
            name="indices without a cache",
            call=lambda x, w, s, *_: jaxops.ragged_conv(
                x, w, s, state_indices=np.zeros(4, np.int32)
            ),
            error=ValueError,
            fragments=(f"{_ME}: ", "state_indices need an initial_state"),
        ),
    )


SPECS = (
    OperatorSpec(
        operator=_ME,
        variant="states, silu",
        function=_function,
        reference=_oracle,
        arguments=_arguments,
        large=functools.partial(
            _arguments, channels=_LARGE_CHANNELS, lengths=(100, 1, 0, 1, 1, 300, 7)
        ),
        differentiable=(0, 1, 3),
        calls={"jaxops_lightweight_conv": 1},
        # The second is of the P steps of the states.
        vjp_calls={"jaxops_lightweight_conv": 1, "jaxops_lightweight_conv_backward": 2},
        value_terms=lambda x, weight, *_: weight.shape[1] + 1,
        vjp_terms=lambda x, *_: x.size,
        # The activation rounds three times, and two gradients of the weight are added.
        vjp_roundings=5,
        # XLA adds the two input gradients in the loop that makes one of them, where it may contract
        # a product and the sum.
        vjp_bitwise=False,
        placements=(
            Placement(
                name="channels",
                axes=("c",),
                arguments=(P(None, "c"), P("c", None), P(), P(None, None, "c")),
                results=(P(None, "c"), P(None, None, "c")),
            ),
        ),
        empty={
            "no tokens": functools.partial(_arguments, lengths=(0, 0)),
            "no sequences": functools.partial(_arguments, lengths=()),
            "no channels": functools.partial(_arguments, channels=0),
        },
        padded_reach={1: _reach_of_weight},
        bad_inputs=_bad_inputs(),
        checkpoint_name="lightweight_conv",
    ),
)
