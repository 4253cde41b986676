"""Random calls of every operator, as strategies of Hypothesis that make an `OperatorSpec`.

XLA compiles programs for each call, so sizes are small, zero among them, or next to the numbers
at which kernels change. Options and optional arguments are any that the spec of the operator has;
those of `ragged_conv` and `conv_general_dilated` have none, and tests of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

from jaxops.testing import registry
from jaxops.testing.spec import OperatorSpec, normal
from jaxops.testing.specs import (
    concatenate,
    conv,
    conv_transpose,
    dynamic_conv,
    dynamic_conv_step,
    focal_loss,
    grid_sample,
    im2col,
    lightweight_conv,
    lightweight_conv_step,
    map_coordinates,
    ragged_conv,
    trilinear,
)

_ACTIVATIONS = st.sampled_from([None, "relu", "silu", "gelu"])
#: Most sizes are small; the others are at or next to those of vectors and tiles.
_SIZES = st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 65]))
_FEW = st.integers(0, 3)
_FLAGS = st.booleans()


def calls(operator: str) -> st.SearchStrategy[OperatorSpec]:
    """Any call of an operator: its `arguments` are those of the call.

    An operator that has no strategy here has the calls of its specs.
    """
    if operator in _STRATEGIES:
        return _STRATEGIES[operator]()
    return st.sampled_from([spec for spec in registry.all_specs() if spec.operator == operator])


def _make(make: Callable[..., Any], *arguments, **options) -> Any:
    """Calls `make` with the options, which are the name of the variant too."""
    named = ", ".join([*map(str, arguments), *(f"{k}={v!r}" for k, v in options.items())])
    return make(named, *arguments, **options)


def _with_sizes(spec: OperatorSpec, **sizes) -> OperatorSpec:
    named = ", ".join(f"{k}={v}" for k, v in sizes.items())
    return dataclasses.replace(
        spec,
        variant=f"{spec.variant}; {named}",
        arguments=functools.partial(spec.arguments, **sizes),
    )


@st.composite
def _sequence_options(draw):
    """Heads, channels, taps and what belongs to them."""
    heads = draw(st.integers(1, 5))
    taps = draw(st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 33])))
    dilation = draw(st.sampled_from([1, 1, 1, 2, 3]))
    padding = draw(
        st.one_of(st.sampled_from(["causal", "same"]), st.integers(0, (taps - 1) * dilation))
    )
    channels = heads * draw(st.sampled_from([1, 1, 2, 3, 8]))
    return heads, channels, {"taps": taps, "dilation": dilation}, padding


@st.composite
def _lightweight_conv(draw):
    heads, channels, filters, padding = draw(_sequence_options())
    spec = _make(
        lightweight_conv.make_spec,
        heads=heads,
        large_heads=heads,
        channels=channels,
        padding=padding,
        data_format=draw(st.sampled_from(["NTC", "NCT"])),
        bias=draw(_FLAGS),
        activation=draw(_ACTIVATIONS),
        segments=draw(_FLAGS),
        state=draw(_FLAGS),
        **filters,
    )
    return _with_sizes(spec, batch=draw(_FEW), time=draw(_SIZES))


@st.composite
def _dynamic_conv(draw):
    heads, channels, filters, padding = draw(_sequence_options())
    spec = _make(
        dynamic_conv.make_spec,
        heads=heads,
        large_heads=heads,
        padding=padding,
        data_format=draw(st.sampled_from(["NTC", "NCT"])),
        normalize=draw(_FLAGS),
        names=tuple(name for name in ("bias", "ids", "state") if draw(_FLAGS)),
        activation=draw(_ACTIVATIONS),
        **filters,
    )
    return _with_sizes(spec, batch=draw(_FEW), time=draw(_SIZES), channels=channels)


@st.composite
def _step(draw, make, flag):
    """Steps of decoding; `flag` is the option that only one of the two operators has."""
    heads, channels, filters, _ = draw(_sequence_options())
    spec = _make(
        make,
        heads=heads,
        large_heads=heads,
        steps=draw(st.sampled_from([None, 1, 2, 4])),
        indices=draw(_FLAGS),
        activation=draw(_ACTIVATIONS),
        **{flag: draw(_FLAGS)},
        **filters,
    )
    return _with_sizes(spec, batch=draw(_FEW), channels=channels)


@st.composite
def _ragged_conv(draw):
    (spec,) = ragged_conv.SPECS
    return _with_sizes(
        spec, channels=draw(_SIZES), lengths=tuple(draw(st.lists(_SIZES, max_size=4)))
    )


@st.composite
def _shapes(draw):
    sizes = draw(st.lists(st.integers(0, 5), max_size=3))
    axis = draw(st.integers(0, len(sizes)))
    shape = concatenate.Shape(*sizes[:axis], None, *sizes[axis:])
    return shape, draw(st.sampled_from([axis, axis - shape.rank]))


@st.composite
def _concatenate(draw):
    shape, axis = draw(_shapes())
    extents = tuple(draw(st.lists(_SIZES, min_size=1, max_size=5)))
    unused = tuple(draw(st.integers(0, extent)) for extent in extents)
    return _make(
        concatenate.make_concatenate_spec,
        shape,
        extents,
        extents,
        unused=unused if draw(_FLAGS) else None,
        padding=draw(st.sampled_from([0, 0, 1, 5])),
        axis=axis,
    )


@st.composite
def _split(draw):
    shape, axis = draw(_shapes())
    first = tuple(draw(st.lists(_SIZES, max_size=4)))
    rest = draw(_SIZES)
    padding = tuple(draw(_FEW) for _ in range(len(first) + 1)) if draw(_FLAGS) else None
    return _make(
        concatenate.make_split_spec,
        shape,
        first,
        rest=rest,
        large_rest=rest,
        padding=padding,
        axis=axis,
    )


@st.composite
def _windows(draw, rank):
    """Sizes of an image and of a window of it that has one position or more in each dimension."""

    def each(strategy):
        return tuple(draw(strategy) for _ in range(rank))

    taps = each(st.integers(1, 4))
    dilation = each(st.sampled_from([1, 1, 2]))
    low, high = each(_FEW), each(_FEW)
    least = [
        max(1, (k - 1) * d + 1 - lo - hi)
        for k, d, lo, hi in zip(taps, dilation, low, high, strict=True)
    ]
    return {
        "ins": tuple(n + draw(st.integers(0, 5)) for n in least),
        "taps": taps,
        "strides": each(st.integers(1, 3)),
        "low": low,
        "high": high,
        "dilation": dilation,
    }


@st.composite
def _conv(draw, rank):
    fans = draw(st.one_of(st.just((1, 1)), st.tuples(st.integers(1, 9), st.integers(1, 9))))
    spec = _make(
        conv.make_spec,
        fans=fans,
        groups=draw(st.sampled_from([1, 2, 3, 8])),
        channels_first=draw(_FLAGS),
        large={},
        bias=draw(_FLAGS),
        activation=draw(_ACTIVATIONS),
        **draw(_windows(rank)),
    )
    return _with_sizes(spec, rows=draw(_FEW))


@st.composite
def _conv_general_dilated(draw):
    (spec,) = (spec for spec in conv.SPECS if spec.operator == "conv_general_dilated")
    return _with_sizes(spec, rows=draw(_FEW), channels=draw(_SIZES), outputs=draw(_SIZES))


@st.composite
def _conv_transpose(draw):
    rank = draw(st.integers(1, 3))
    taps, strides, ins = (
        tuple(draw(st.integers(1, most)) for _ in range(rank)) for most in (4, 3, 4)
    )
    padding = tuple((draw(st.integers(0, k)), draw(st.integers(k - 1, k + 1))) for k in taps)
    outs = tuple(
        (n - 1) * s + 1 + lo + hi - (k - 1)
        for n, s, k, (lo, hi) in zip(ins, strides, taps, padding, strict=True)
    )
    spec = _make(
        conv_transpose.make_spec,
        taps=taps,
        strides=strides,
        padding=padding,
        low=tuple(lo for lo, _ in padding),
        ins=ins,
        outs=outs,
        groups=draw(st.integers(1, 3)),
        is_transposed=draw(_FLAGS),
    )
    return _with_sizes(
        spec, rows=draw(_FEW), fan_in=draw(st.integers(1, 5)), fan_out=draw(st.integers(1, 5))
    )


@st.composite
def _im2col(draw, operator):
    rank = draw(st.integers(1, 3))
    space = "DHW"[3 - rank :]
    specs = _make(
        im2col.make_specs,
        draw(st.sampled_from([f"N{space}C", f"NC{space}"])),
        large=(1, 1),
        **draw(_windows(rank)),
    )
    (spec,) = (spec for spec in specs if spec.operator == operator)
    return _with_sizes(spec, rows=draw(_FEW), channels=draw(_SIZES))


@st.composite
def _focal_loss(draw, operator):
    options = {
        "gamma": draw(st.sampled_from([0, 0.5, 1, 1.5, 2, 2.3, 5])),
        "alpha": draw(st.sampled_from([None, 0.0, 0.25, 1.0])),
        "reduction": draw(st.sampled_from(["none", "sum", "mean"])),
    }
    is_soft = draw(_FLAGS)
    if not is_soft:
        options["ignore_index"] = draw(st.sampled_from([None, -1, 2]))
    is_bool = is_soft and operator == "sigmoid_focal_loss" and draw(_FLAGS)
    has_row_weights = draw(_FLAGS)
    has_class_weights = not is_soft and draw(_FLAGS)
    names = ["sample_weight"] * has_row_weights + ["class_weight"] * has_class_weights

    def function(module, logits, labels, *weights):
        if is_soft and not is_bool:  # any number makes targets of the operator
            labels = (jax.nn.sigmoid if "sigmoid" in operator else jax.nn.softmax)(labels)
        weights = dict(zip(names, weights, strict=True))
        return getattr(module, operator)(logits, labels, **weights, **options)

    def others(rng, rows, classes, dtype):
        if is_bool:
            labels = rng.random((rows, classes)) < 0.5
        elif is_soft:
            labels = normal(rng, (rows, classes), dtype)
        else:
            labels = rng.integers(-1, classes + 1, rows).astype(np.int32)
        shapes = {"sample_weight": (rows,), "class_weight": (classes + 1,)}
        return labels, *(normal(rng, shapes[name], dtype) for name in names)

    named = {"soft": is_soft, "booleans": is_bool, "weights": names, **options}
    first_other = 1 if is_soft and not is_bool else 2
    spec = focal_loss.make_spec(
        ", ".join(f"{k}={v!r}" for k, v in named.items()),
        operator=operator,
        function=function,
        others=others,
        calls=(),
        vjp_calls=(),
        differentiable=(0, *range(first_other, 2 + len(names))),
        reduced=options["reduction"] != "none",
    )
    if is_soft:  # what makes the targets rounds, and so do its derivatives
        spec = dataclasses.replace(spec, vjp_roundings=spec.vjp_roundings + 4)
    return _with_sizes(spec, rows=draw(_SIZES), classes=draw(_SIZES))


@st.composite
def _grid_sample(draw):
    options = {
        "method": draw(st.sampled_from(["linear", "nearest", "cubic"])),
        "padding_mode": draw(
            st.sampled_from(["zeros", "border", "reflection", "wrap", "constant"])
        ),
        "coordinates": draw(st.sampled_from(["normalized", "pixel"])),
        "deterministic": draw(_FLAGS),
    }
    if options["padding_mode"] == "constant":
        options["cval"] = 0.5
    if options["coordinates"] == "normalized":
        options["align_corners"] = draw(_FLAGS)
    width = draw(_SIZES)
    spec = _make(
        grid_sample.make_spec,
        sizes=tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=3))),
        width=width,
        large_width=width,
        batched=draw(_FLAGS),
        reach=draw(st.sampled_from([0.9, 1.3, 4.0])),
        **options,
    )
    return _with_sizes(spec, points=draw(_SIZES))


@st.composite
def _map_coordinates(draw):
    spec = _make(
        map_coordinates.make_spec,
        sizes=tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))),
        order=draw(st.sampled_from([0, 1, 3])),
        mode=draw(st.sampled_from(["constant", "nearest", "wrap", "mirror", "reflect"])),
        cval=0.5,
    )
    return _with_sizes(spec, points=draw(_SIZES))


@st.composite
def _trilinear_interpolate(draw):
    width = draw(_SIZES)
    return _make(
        trilinear.make_spec,
        leading=tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))),
        width=width,
        large_width=width,
    )


_STRATEGIES: dict[str, Callable[[], st.SearchStrategy[OperatorSpec]]] = {
    "concatenate": _concatenate,
    "split": _split,
    "conv1d": functools.partial(_conv, 1),
    "conv2d": functools.partial(_conv, 2),
    "conv3d": functools.partial(_conv, 3),
    "conv_general_dilated": _conv_general_dilated,
    "conv_transpose": _conv_transpose,
    "dynamic_conv": _dynamic_conv,
    "dynamic_conv_step": functools.partial(_step, dynamic_conv_step.make_spec, "normalize"),
    "sigmoid_focal_loss": functools.partial(_focal_loss, "sigmoid_focal_loss"),
    "softmax_focal_loss": functools.partial(_focal_loss, "softmax_focal_loss"),
    "grid_sample": _grid_sample,
    "im2col": functools.partial(_im2col, "im2col"),
    "col2im": functools.partial(_im2col, "col2im"),
    "lightweight_conv": _lightweight_conv,
    "lightweight_conv_step": functools.partial(_step, lightweight_conv_step.make_spec, "bias"),
    "map_coordinates": _map_coordinates,
    "ragged_conv": _ragged_conv,
    "trilinear_interpolate": _trilinear_interpolate,
}
