"""Dynamic convolution and its decode step, in both layouts, with segments and states."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import dynamic_conv as reference
from jaxops.reference.segment_starts import segment_starts
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal, unless_xla_is_faster

_NAME = "dynamic_conv"
_BATCH, _TIME, _CHANNELS = 8, 24, 48  # of the large case


def _bad_inputs(swap):
    """Calls with one thing wrong; `swap` brings a (B, T, C) array into the variant's layout."""
    call = functools.partial(jaxops.dynamic_conv, data_format="NCT" if swap else "NTC")

    def rows(channels):
        x = np.zeros((2, 5, channels), np.float32)
        return np.swapaxes(x, 1, 2) if swap else x

    weight = np.zeros((2, 5, 3, 2), np.float32)

    def bad(name, call, error, *fragments):
        return BadInput(name=name, call=call, error=error, fragments=(f"{_NAME}: ", *fragments))

    return (
        bad(
            "heads that do not divide the channels",
            lambda *_: call(rows(7), weight),
            ValueError,
            "H = 3",
            "C = 7",
        ),
        bad("x of rank 1", lambda *_: call(rows(6)[0, 0], weight), ValueError, "x must", "shape"),
        bad(
            "weight without steps",
            lambda *_: call(rows(6), weight[:, 0]),
            ValueError,
            "weight must",
            "(..., T, H, K)",
        ),
        bad(
            "weight of other steps",
            lambda *_: call(rows(6), weight[:, :4]),
            ValueError,
            "weight must",
            "(..., T, H, K)",
        ),
        bad("no taps", lambda *_: call(rows(6), weight[..., :0]), ValueError, "K >= 1"),
        bad("no heads", lambda *_: call(rows(6), weight[:, :, :0]), ValueError, "H >= 1"),
        bad(
            "bias of another length",
            lambda *_: call(rows(6), weight, bias=np.zeros(7, np.float32)),
            ValueError,
            "bias must",
            "(C,)",
        ),
        bad(
            "integer weight",
            lambda *_: call(rows(6), weight.astype(np.int8)),
            TypeError,
            "weight must have dtype",
            "got int8",
        ),
        bad(
            "normalize that is no bool",
            lambda *_: call(rows(6), weight, normalize="softmax"),
            TypeError,
            "normalize must be a bool",
        ),
        bad(
            "padding beyond the filter",
            lambda *_: call(rows(6), weight, padding=2),
            ValueError,
            "padding must be in [0, 1]",
        ),
        bad(
            "an unknown padding",
            lambda *_: call(rows(6), weight, padding="valid"),
            ValueError,
            "padding must be one of 'causal', 'same'",
        ),
        bad(
            "ids that are floats",
            lambda *_: call(rows(6), weight, segment_ids=np.zeros((2, 5), np.float32)),
            TypeError,
            "segment_ids must have an integer dtype",
        ),
        bad(
            "ids of other steps",
            lambda *_: call(rows(6), weight, segment_ids=np.zeros((2, 4), np.int32)),
            ValueError,
            "segment_ids must have shape",
        ),
        bad(
            "a state of other steps",
            lambda *_: call(rows(6), weight, initial_state=rows(6)),
            ValueError,
            "initial_state must have shape",
        ),
        bad(
            "an unknown layout",
            lambda *_: jaxops.dynamic_conv(rows(6), weight, data_format="CNT"),
            ValueError,
            "data_format must be one of 'NTC', 'NCT'",
        ),
    )


def _placements(swap, heads, names, parts):
    """By batch, by channel, by both and by time; weights with a filter a channel go with channels.

    The gradient of a bias is summed over the batch, and that of weights over the channels of a head
    where devices have parts of these. `parts` is the number of other devices' parts of time that
    filters reach.
    """

    def rows(batch, time, channels):
        return P(batch, channels, time) if swap else P(batch, time, channels)

    def placement(name, axes, by, backward, manual, forward=None):
        batch, time, channels = (axis if axis in by else None for axis in "ntc")
        per_channel = channels if heads == _CHANNELS else None
        specs = {
            "weight": P(batch, time, per_channel, None),
            "bias": P(channels),
            "ids": P(batch, time),
            "state": rows(batch, None, channels),
        }
        return Placement(
            name=name,
            axes=axes,
            arguments=(rows(batch, time, channels), *(specs[n] for n in names)),
            results=(rows(batch, time, channels),),
            forward=forward or {},
            backward=backward,
            manual=manual,
        )

    by_batch = {"all-reduce": 1} if "bias" in names else {}
    whole_heads = heads in (1, _CHANNELS)
    # The gradient of the weights is that of sums over the sequence and over the state.
    sums = 0 if heads == _CHANNELS else 2 if "state" in names else 1
    by_channel = {"all-reduce": sums} if sums else {}
    both = sums + bool(by_batch)
    # Steps of x, and in the backward pass those of x and the cotangent; of ids one step, and one
    # number for where segments begin.
    has_ids = "ids" in names
    sent = {"collective-permute": parts + has_ids}
    sent_by_both = {"collective-permute": 3 * parts + has_ids}
    sent |= {"all-reduce": 1} if has_ids else {}
    sent_by_both |= {"all-reduce": 1} if has_ids or "bias" in names else {}
    placements = (
        placement("batch", ("n",), "n", by_batch, True),
        placement("channels", ("c",), "c", by_channel, whole_heads),
        placement(
            "batch and channels",
            ("n", "c"),
            "nc",
            {"all-reduce": both} if both else {},
            whole_heads,
        ),
        placement("time", ("t",), "t", sent_by_both, False, sent),
    )
    # A state's terms are exchanged by sums that XLA may join; `test_time_over_devices` has them.
    return placements[:-1] if "state" in names else placements


# By how many eps the derivative of jax.nn.gelu is itself wrong for |x| < 6, where 1 - tanh² cancels
# and is multiplied by a polynomial: two platforms with different tanh differ by as much.
_GELU_ERROR = 48


def make_spec(
    variant,
    *,
    heads,
    large_heads,
    taps,
    data_format="NTC",
    normalize=False,
    padding="causal",
    dilation=1,
    names=(),
    segment=None,
    activation=None,
    vjp_calls=None,
):
    """A call of `dynamic_conv`, whose other arguments are `names`: "bias", "ids" and "state"."""
    swap = data_format == "NCT"
    names = ("weight", *names)
    reach = (taps - 1) * dilation
    resolved = {"causal": reach, "same": reach // 2}.get(padding, padding)
    part = _TIME // 8  # the steps of each of eight devices
    parts = math.ceil(resolved / part) + math.ceil((reach - resolved) / part)
    options = {"dilation": dilation, "activation": activation, "data_format": data_format}
    options["normalize"] = normalize

    def segment_ids(x, given):
        """The ids that are an argument, or segments of a fixed length; more arguments take long."""
        if segment is None:
            return given.get("ids")
        time = x.shape[2 if swap else 1]
        return jnp.broadcast_to(jnp.arange(time) // segment, (*x.shape[:-2], time))

    def function(x, *rest):
        given = dict(zip(names, rest, strict=True))
        return jaxops.dynamic_conv(
            x,
            given["weight"],
            padding=padding,
            bias=given.get("bias"),
            segment_ids=segment_ids(x, given),
            initial_state=given.get("state"),
            **options,
        )

    def oracle(x, *rest):
        given = dict(zip(names, rest, strict=True))
        ids, state = segment_ids(x, given), given.get("state")
        first = 0 if state is None else -resolved
        starts = None if ids is None else segment_starts(jnp.asarray(ids), first=first)
        return reference.dynamic_conv(
            x, given["weight"], given.get("bias"), starts, state, padding=resolved, **options
        )

    def arrays(rng, dtype, batch=2, time=7, channels=6, heads=heads):
        def rows(time):
            return (batch, channels, time) if swap else (batch, time, channels)

        made = {
            "weight": normal(rng, (batch, time, heads, taps), dtype),
            "bias": normal(rng, (channels,), dtype),
            "ids": np.cumsum(rng.random((batch, time)) < 0.2, axis=1, dtype=np.int32),
            "state": normal(rng, rows(resolved), dtype),
        }
        return normal(rng, rows(time), dtype), *(made[n] for n in names)

    # The softmax has a rounding of each tap, and its gradient twice as many.
    softmax = 2 * taps * normalize

    def gradient_terms(x, weight, *_):
        depth = x.shape[1 if swap else 2] // weight.shape[2]
        summed = x.shape[0] * x.shape[2 if swap else 1] if "bias" in names else 0
        gelu = _GELU_ERROR if activation == "gelu" else 0
        return max(depth, taps, summed) + 2 * softmax + gelu

    calls = {"jaxops_dynamic_conv": 1}
    has_ids = "ids" in names or segment is not None
    starts = {"jaxops_segment_starts": 1} if has_ids else {}
    return OperatorSpec(
        operator=_NAME,
        variant=variant,
        function=function,
        reference=oracle,
        arguments=arrays,
        large=functools.partial(
            arrays, batch=_BATCH, time=_TIME, channels=_CHANNELS, heads=large_heads
        ),
        differentiable=tuple(i for i, n in enumerate(("x", *names)) if n != "ids"),
        calls=unless_xla_is_faster(calls, starts),
        vjp_calls=unless_xla_is_faster(
            vjp_calls or {**calls, "jaxops_dynamic_conv_backward": 1}, starts
        ),
        value_terms=lambda *_: taps + 1 + softmax,
        vjp_terms=gradient_terms,
        # The value before the activation, the activation's derivative, and their product.
        vjp_roundings=3 if activation else 0,
        vjp_bitwise=activation != "silu",  # XLA computes its derivative
        placements=_placements(swap, large_heads, names, parts),
        empty={
            "no batch": functools.partial(arrays, batch=0),
            "no time": functools.partial(arrays, time=0),
            "no channels": functools.partial(arrays, channels=0),
        },
        bad_inputs=_bad_inputs(swap),
        checkpoint_name=_NAME,
    )


SPECS = (
    make_spec("NTC", heads=3, large_heads=3, taps=3),
    make_spec("NCT, even K", heads=3, large_heads=3, taps=4, padding="same", data_format="NCT"),
    make_spec(
        "NTC, softmax, bias, gelu",
        heads=2,
        large_heads=1,
        taps=3,
        normalize=True,
        padding=1,
        dilation=2,
        names=("bias",),
        activation="gelu",
    ),
    make_spec(
        "NCT, softmax, segments, state, silu",
        heads=6,
        large_heads=_CHANNELS,
        taps=4,
        normalize=True,
        names=("state",),
        segment=5,
        activation="silu",
        data_format="NCT",
        vjp_calls={"jaxops_dynamic_conv": 1, "jaxops_dynamic_conv_backward": 2},
    ),
    make_spec("NTC, segments, K > T", heads=6, large_heads=_CHANNELS, taps=9, names=("ids",)),
)
