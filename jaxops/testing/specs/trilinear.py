"""Trilinear interpolation in cells: features that fill vector loads, and ones that do not."""

from __future__ import annotations

import functools

import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import trilinear as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal

_ME = "trilinear_interpolate"


def _bad(name, call, error, *fragments):
    return BadInput(name=name, call=call, error=error, fragments=(f"{_ME}: ", *fragments))


_BAD_INPUTS = (
    _bad(
        "integer features",
        lambda f, p: jaxops.trilinear_interpolate(f.astype(np.int32), p),
        TypeError,
        "features must have dtype",
        "got int32",
    ),
    _bad(
        "integer points",
        lambda f, p: jaxops.trilinear_interpolate(f, p.astype(np.int8)),
        TypeError,
        "points must have dtype",
        "got int8",
    ),
    _bad(
        "a text",
        lambda f, p: jaxops.trilinear_interpolate("features", p),
        TypeError,
        "features must be an array",
        "str",
    ),
    _bad(
        "seven corners",
        lambda f, p: jaxops.trilinear_interpolate(f[..., :7, :], p),
        ValueError,
        "features must have shape (..., 8, F)",
        "7",
    ),
    _bad(
        "features of rank 1",
        lambda f, p: jaxops.trilinear_interpolate(np.zeros(8), p),
        ValueError,
        "features must have shape (..., 8, F)",
    ),
    _bad(
        "points in a plane",
        lambda f, p: jaxops.trilinear_interpolate(f, p[..., :2]),
        ValueError,
        "points must have shape",
    ),
    _bad(
        "more points than cells",
        lambda f, p: jaxops.trilinear_interpolate(f, np.concatenate([p, p])),
        ValueError,
        "points must have shape",
    ),
    _bad(
        "one point for all cells",
        lambda f, p: jaxops.trilinear_interpolate(f, p[0, ...]),
        ValueError,
        "points must have shape",
    ),
)


def _placement(name, axes, row, feature, rank):
    between = (None,) * (rank - 1)
    return Placement(
        name=name,
        axes=axes,
        arguments=(P(row, *between, None, feature), P(row, *between, None)),
        results=(P(row, *between, feature),),
        # Each device's features contribute to the points' gradient.
        backward={} if feature is None else {"all-reduce": 1},
    )


def make_spec(variant, *, leading, width, large_width):
    """A call of `trilinear_interpolate`; `leading` are the dimensions before the corners."""
    rank = len(leading)

    def arrays(rng, dtype, leading=leading, width=width):
        features = normal(rng, (*leading, 8, width), dtype)
        return features, rng.uniform(-1, 1, (*leading, 3)).astype(dtype)

    def terms(features, points):
        return 16 + 8 * features.shape[-1]

    return OperatorSpec(
        operator=_ME,
        variant=variant,
        function=jaxops.trilinear_interpolate,
        reference=reference.trilinear_interpolate,
        arguments=arrays,
        large=functools.partial(arrays, leading=(64, *leading[1:]), width=large_width),
        differentiable=(0, 1),
        calls={"jaxops_trilinear_interpolate": 1},
        vjp_calls={"jaxops_trilinear_interpolate": 1, "jaxops_trilinear_backward": 1},
        value_terms=lambda features, points: 16,
        vjp_terms=terms,
        placements=(
            _placement("cells", ("n",), "n", None, rank),
            _placement("features", ("c",), None, "c", rank),
            _placement("cells and features", ("n", "c"), "n", "c", rank),
        ),
        empty={
            "no cells": functools.partial(arrays, leading=(0, *leading[1:])),
            "no features": functools.partial(arrays, width=0),
        },
        bad_inputs=_BAD_INPUTS,
        checkpoint_name=_ME,
    )


SPECS = (
    make_spec("F = 4", leading=(5,), width=4, large_width=8),
    make_spec("F = 3", leading=(5,), width=3, large_width=40),
    make_spec("F = 1, two leading dimensions", leading=(2, 3), width=1, large_width=16),
    make_spec("F = 64", leading=(3,), width=64, large_width=256),
    make_spec("F = 37", leading=(3,), width=37, large_width=72),
)
