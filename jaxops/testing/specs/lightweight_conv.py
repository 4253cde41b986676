"""Lightweight convolution, in both layouts and at the ends of every option's range."""

from __future__ import annotations

import functools

import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._families import sequences
from jaxops.reference import lightweight_conv as reference
from jaxops.reference.segment_starts import segment_starts
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal, unless_xla_is_faster

_ME = "lightweight_conv"


def _bad_inputs(swap):
    """Calls with one thing wrong; `swap` brings a (B, T, C) array into the variant's layout."""
    call = functools.partial(jaxops.lightweight_conv, data_format="NCT" if swap else "NTC")

    def rows(channels):
        x = np.zeros((2, 5, channels), np.float32)
        return np.swapaxes(x, 1, 2) if swap else x

    def bad(name, call, error, *fragments):
        return BadInput(name=name, call=call, error=error, fragments=(f"{_ME}: ", *fragments))

    return (
        bad(
            "heads that do not divide the channels",
            lambda x, w, *_: call(rows(7), np.zeros((3, 2), np.float32)),
            ValueError,
            "weight",
            "H = 3",
            "C = 7",
        ),
        bad(
            "x of rank 1", lambda x, w, *_: call(x[0, 0], w), ValueError, "x must", "2 dim", "shape"
        ),
        bad(
            "weight of rank 1", lambda x, w, *_: call(x, w[0]), ValueError, "weight must", "(H, K)"
        ),
        bad("no taps", lambda x, w, *_: call(x, w[:, :0]), ValueError, "weight must", "K >= 1"),
        bad("no heads", lambda x, w, *_: call(x, w[:0]), ValueError, "weight must", "H >= 1"),
        bad(
            "bias of another length",
            lambda x, w, *_: call(x, w, bias=np.zeros(1 + max(x.shape), np.float32)),
            ValueError,
            "bias must",
            "(C,)",
        ),
        bad(
            "integer x",
            lambda x, w, *_: call(x.astype(np.int32), w),
            TypeError,
            "x must have dtype",
            "got int32",
        ),
        bad(
            "integer weight",
            lambda x, w, *_: call(x, w.astype(np.int8)),
            TypeError,
            "weight must have dtype",
            "got int8",
        ),
        bad(
            "padding beyond the filter",
            lambda x, w, *_: call(x, w, padding=w.shape[1], dilation=1),
            ValueError,
            "padding must be in [0, ",
        ),
        bad(
            "an unknown padding",
            lambda x, w, *_: call(x, w, padding="valid"),
            ValueError,
            "padding must be one of 'causal', 'same'",
            "'valid'",
        ),
        bad("no dilation", lambda x, w, *_: call(x, w, dilation=0), ValueError, "dilation", ">= 1"),
        bad(
            "an unknown activation",
            lambda x, w, *_: call(x, w, activation="tanh"),
            ValueError,
            "activation must be one of",
            "'tanh'",
        ),
        bad(
            "segment ids of a float dtype",
            lambda x, w, *_: call(x, w, segment_ids=np.zeros((2, 7), np.float32)),
            TypeError,
            "segment_ids must have an integer dtype",
            "got float32",
        ),
        bad(
            "segment ids of another length",
            lambda x, w, *_: call(x, w, segment_ids=np.zeros((2, 9), np.int32)),
            ValueError,
            "segment_ids must have shape (2, 7)",
            "(2, 9)",
        ),
        bad(
            "a state of other steps",
            lambda x, w, *_: call(x, w, padding=0, initial_state=np.zeros_like(x)),
            ValueError,
            "initial_state must have shape",
            "the P = 0 steps",
        ),
        bad(
            "an integer for a bool",
            lambda x, w, *_: call(x, w, return_final_state=1),
            TypeError,
            "return_final_state must be a bool",
            "got 1",
        ),
        bad(
            "an unknown layout",
            lambda x, w, *_: jaxops.lightweight_conv(x, w, data_format="CNT"),
            ValueError,
            "data_format must be one of 'NTC', 'NCT'",
            "'CNT'",
        ),
    )


def _placements(swap, heads, names, sides):
    """By batch, by channel, by both and by time.

    The arguments shared by all devices are whole on each, so that the backward pass has to sum what
    they contribute; weights with one row a channel are sharded with the channels. `sides` tells on
    how many sides of a part of the steps filters reach beyond it.
    """

    def placement(name, axes, by, forward, backward, manual):
        batch, time, channels = (axis if axis in by else None for axis in "ntc")
        per_channel = channels if heads == _CHANNELS else None
        x, state = (P(batch, channels, t) if swap else P(batch, t, channels) for t in (time, None))
        specs = {"bias": P(channels), "segment_ids": P(batch, time), "initial_state": state}
        return Placement(
            name=name,
            axes=axes,
            arguments=(x, P(per_channel, None), *(specs[n] for n in names)),
            results=(x, state) if "initial_state" in names else (x,),
            forward=forward,
            backward=backward,
            manual=manual,
        )

    summed = {"all-reduce": 1}
    # On both axes the weight's gradient is summed, a bias's over the shards of the batch alone.
    twice = "bias" in names and heads != _CHANNELS
    # A shard of channels has whole heads only if there is one head, or one a channel.
    whole_heads = heads in (1, _CHANNELS)
    by_channel = {} if heads == _CHANNELS else summed
    return (
        placement("batch", ("n",), "n", {}, summed, True),
        placement("channels", ("c",), "c", {}, by_channel, whole_heads),
        placement(
            "batch and channels",
            ("n", "c"),
            "nc",
            {},
            {"all-reduce": 2} if twice else summed,
            whole_heads,
        ),
        placement("time", ("t",), "t", *_sent_over_time(names, sides), False),
    )


def _sent_over_time(names, sides):
    """The collectives of value, and of value and gradients, of parts of the steps."""
    segments, state = "segment_ids" in names, "initial_state" in names
    # Steps of x, and in the backward pass those of x and the cotangent, each with the starts of
    # segments; of the ids one step.
    permutes = sides + segments
    permutes_of_both = 3 * sides + segments
    # Where segments begin, the final state, and where its segment begins. XLA sums what belongs to
    # states with the gradients.
    sums = segments + state + (segments and state)
    sums_of_both = 1 + segments + (segments and state)

    def counts(sums, permutes):
        found = {"all-reduce": sums, "collective-permute": permutes}
        return {name: count for name, count in found.items() if count}

    return counts(sums, permutes), counts(sums_of_both, permutes_of_both)


_BATCH, _TIME, _CHANNELS = 8, 64, 48  # of the large case

# By how many eps the derivative of jax.nn.gelu is itself wrong for |x| < 6, where 1 - tanh² cancels
# and is multiplied by a polynomial: two platforms with different tanh differ by as much.
_GELU_ERROR = 48


def make_spec(
    variant,
    *,
    heads,
    taps,
    data_format,
    padding="causal",
    dilation=1,
    bias=False,
    activation=None,
    channels=6,
    large_heads,
    segments=False,
    state=False,
):
    """A call of `lightweight_conv`."""
    swap = data_format == "NCT"
    reach = (taps - 1) * dilation
    options = {"dilation": dilation, "activation": activation, "data_format": data_format}

    resolved = {"causal": reach, "same": reach // 2}.get(padding, padding)
    names = ["bias"] * bias + ["segment_ids"] * segments + ["initial_state"] * state

    def function(x, weight, *rest):
        rest = dict(zip(names, rest, strict=True))
        returned = {"return_final_state": True} if state else {}
        return jaxops.lightweight_conv(x, weight, padding=padding, **rest, **returned, **options)

    def oracle(x, weight, *rest):
        rest = dict(zip(names, rest, strict=True))
        initial, ids, starts = rest.get("initial_state"), rest.get("segment_ids"), None
        if ids is not None:
            starts = segment_starts(ids, first=-resolved if state else 0)
        y = reference.lightweight_conv(
            x,
            weight,
            rest.get("bias"),
            padding=resolved,
            starts=starts,
            state=initial,
            **options,
        )
        if not state:
            return y
        return y, sequences.final_state(x, resolved, data_format, starts, initial)

    def arrays(rng, dtype, batch=2, time=7, channels=channels, heads=heads):
        def rows(steps):
            return normal(
                rng, (batch, channels, steps) if swap else (batch, steps, channels), dtype
            )

        rest = [normal(rng, (heads, taps), dtype)]
        x = rows(time)
        if bias:
            rest.append(normal(rng, (channels,), dtype))
        if segments:
            rest.append((np.arange(batch * time).reshape(batch, time) // 3 % 5).astype(np.int32))
        if state:
            rest.append(rows(resolved))
        return (x, *rest)

    def summed_entries(x, weight, *_):
        return x.size // weight.shape[0] + (_GELU_ERROR if activation == "gelu" else 0)

    def reach_of_weight(index, x, weight, *_):
        of_head = np.arange(weight.shape[0]) == index[0]
        of_channel = np.repeat(of_head, x.shape[1 if swap else 2] // weight.shape[0])
        rows = of_channel[:, None] if swap else of_channel
        results = (rows, False) if state else (rows,)
        of_state = (rows,) if state else ()
        if activation is None:  # the weight and bias gradients do not depend on weight
            return (*results, rows, False, *[False] * bias, *of_state)
        return (*results, rows, of_head[:, None], *[of_channel] * bias, *of_state)

    large = functools.partial(
        arrays, batch=_BATCH, time=_TIME, channels=_CHANNELS, heads=large_heads
    )
    calls = {"jaxops_lightweight_conv": 1}
    starts = {"jaxops_segment_starts": 1} if segments else {}

    def chosen(calls):
        if segments and swap:
            return unless_xla_is_faster(calls, starts)
        return {**starts, **calls}

    return OperatorSpec(
        operator=_ME,
        variant=variant,
        function=function,
        reference=oracle,
        arguments=arrays,
        large=large,
        differentiable=(0, 1, *(i for i, n in enumerate(names, 2) if n != "segment_ids")),
        calls=chosen(calls),
        # The second gradient is of the P steps of the state.
        vjp_calls=chosen({**calls, "jaxops_lightweight_conv_backward": 2 if state else 1}),
        value_terms=lambda x, weight, *_: weight.shape[1] + 1,
        vjp_terms=summed_entries,
        # The value before the activation, the activation's derivative, and their product.
        # Two gradients with respect to a weight that a state meets are added.
        vjp_roundings=(3 if activation else 0) + (2 if state else 0),
        placements=_placements(swap, large_heads, names, (resolved > 0) + (resolved < reach)),
        empty={
            "no batch": functools.partial(arrays, batch=0),
            "no time": functools.partial(arrays, time=0),
            "no channels": functools.partial(arrays, channels=0),
        },
        padded_reach={1: reach_of_weight},
        bad_inputs=_bad_inputs(swap),
        checkpoint_name=_ME,
    )


SPECS = (
    make_spec("NTC", heads=3, large_heads=3, taps=3, data_format="NTC"),
    make_spec("NCT, even K", heads=3, large_heads=3, taps=4, padding="same", data_format="NCT"),
    make_spec(
        "NTC, dilated, bias, gelu",
        heads=2,
        large_heads=3,
        taps=3,
        padding="same",
        dilation=2,
        bias=True,
        activation="gelu",
        data_format="NTC",
    ),
    make_spec(
        "NCT, dilated, bias, silu",
        heads=2,
        large_heads=1,
        taps=4,
        padding=2,
        dilation=3,
        bias=True,
        activation="silu",
        data_format="NCT",
    ),
    make_spec(
        "NTC, H = 1, bias, relu",
        heads=1,
        large_heads=1,
        taps=5,
        padding=1,
        bias=True,
        activation="relu",
        data_format="NTC",
    ),
    make_spec(
        "NCT, H = C, bias",
        heads=6,
        large_heads=_CHANNELS,
        taps=3,
        bias=True,
        data_format="NCT",
    ),
    make_spec("NTC, H = C, K = 1", heads=6, large_heads=_CHANNELS, taps=1, data_format="NTC"),
    make_spec("NCT, K > T", heads=3, large_heads=3, taps=17, padding="same", data_format="NCT"),
    make_spec(
        "NTC, segments, state, silu",
        heads=6,
        large_heads=_CHANNELS,
        taps=4,
        activation="silu",
        segments=True,
        state=True,
        data_format="NTC",
    ),
    make_spec(
        "NCT, segments, dilated",
        heads=3,
        large_heads=3,
        taps=3,
        padding="same",
        dilation=2,
        segments=True,
        data_format="NCT",
    ),
    make_spec("NCT, state", heads=2, large_heads=3, taps=3, state=True, data_format="NCT"),
)
