"""Sampling of volumes: both ranks, every padding, both methods, one volume and several."""

from __future__ import annotations

import functools

import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import grid_sample as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal

_ME = "grid_sample"


def _bad(name, call, error, *fragments):
    return BadInput(name=name, call=call, error=error, fragments=(f"{_ME}: ", *fragments))


def _bad_inputs(axes):
    call = jaxops.grid_sample
    return (
        _bad("integer volume", lambda v, p: call(v.astype(int), p), TypeError, "volume must have"),
        _bad("integer points", lambda v, p: call(v, p.astype(int)), TypeError, "points must have"),
        _bad(
            "points on a line",
            lambda v, p: call(v, p[..., :1]),
            ValueError,
            "points must have shape (..., 3) or (..., 2)",
        ),
        _bad("a scalar point", lambda v, p: call(v, p.flat[0]), ValueError, "points must"),
        _bad(
            "a volume without channels",
            lambda v, p: call(v.reshape(-1)[: v.shape[-1] ** axes].reshape((-1,) * 1), p),
            ValueError,
            "volume must have",
        ),
        _bad(
            "points of another batch",
            lambda v, p: call(np.stack([v] * 2), np.stack([p] * 3)),
            ValueError,
            "points must have shape",
            "batch",
        ),
        _bad(
            "an unknown method",
            lambda v, p: call(v, p, method="quintic"),
            ValueError,
            "method must be one of 'linear', 'bilinear', 'trilinear', 'nearest', 'cubic'",
            "'quintic'",
        ),
        _bad(
            "an unknown padding",
            lambda v, p: call(v, p, padding_mode="clip"),
            ValueError,
            "padding_mode must be one of",
            "'clip'",
        ),
        _bad(
            "unknown coordinates",
            lambda v, p: call(v, p, coordinates="voxel"),
            ValueError,
            "coordinates must be one of 'normalized', 'pixel'",
        ),
        _bad(
            "corners of pixels",
            lambda v, p: call(v, p, coordinates="pixel", align_corners=True),
            ValueError,
            "align_corners has no meaning",
        ),
        _bad(
            "a constant without its padding",
            lambda v, p: call(v, p, cval=1.0),
            ValueError,
            'cval needs padding_mode="constant"',
        ),
        _bad(
            "a format of another rank",
            lambda v, p: call(v, p, data_format="NCW"),
            ValueError,
            "data_format must be one of",
        ),
        _bad(
            "a number as flag", lambda v, p: call(v, p, align_corners=1), TypeError, "align_corners"
        ),
        _bad(
            "a text as flag",
            lambda v, p: call(v, p, deterministic="yes"),
            TypeError,
            "deterministic",
        ),
        _bad(
            "a border of nothing",
            lambda v, p: call(v[..., :0, :], p, padding_mode="border"),
            ValueError,
            "padding_mode 'border'",
        ),
    )


def _placements(axes, batched, nearest):
    """By point, by channel and by both; batched volumes by batch."""
    grid = (None,) * axes
    if batched:
        return (
            Placement(
                name="batch",
                axes=("n",),
                arguments=(P("n", *grid, None), P("n", None, None)),
                results=(P("n", None, None),),
            ),
        )

    def placement(name, mesh, point, channel):
        # Each device adds its points' part of the volume's gradient, and its channels' part
        # of the points' gradient.
        sums = (point is not None) + (channel is not None and not nearest)
        return Placement(
            name=name,
            axes=mesh,
            arguments=(P(*grid, channel), P(point, None)),
            results=(P(point, channel),),
            backward={"all-reduce": sums} if sums else {},
        )

    return (
        placement("points", ("n",), "n", None),
        placement("channels", ("c",), None, "c"),
        placement("points and channels", ("n", "c"), "n", "c"),
    )


def make_spec(variant, *, sizes, width, large_width, batched=False, reach=1.3, **options):
    """A call of `grid_sample` with its options; points are within `reach` times the volume."""
    axes = len(sizes)
    nearest = options.get("method") == "nearest"
    cubic = options.get("method") == "cubic"
    # Weights of the entries are made in jax.numpy, and a kernel of CPUs sums these.
    has_stencils = cubic or options.get("padding_mode") == "wrap"
    lead = (2,) if batched else ()

    def function(volume, points):
        return jaxops.grid_sample(volume, points, **options)

    def oracle(volume, points):
        known = {k: v for k, v in options.items() if k != "deterministic"}
        return reference.grid_sample(volume, points, **known)

    def arrays(rng, dtype, lead=lead, sizes=sizes, points=6, width=width):
        volume = normal(rng, (*lead, *sizes, width), dtype)
        at = rng.uniform(-reach, reach, (*lead, points, axes))
        if options.get("coordinates") == "pixel":
            at = (at + 1) / 2 * np.array(sizes) - 0.5
        return volume, at.astype(dtype)

    # Positions are rounded relative to the extent of the volume.
    position = (8 * max(sizes) + 16) * (8 if cubic else 1)
    kernel = "jaxops_taps" if has_stencils else "jaxops_grid_sample"
    gradients = (
        (f"{kernel}_volume_grad", f"{kernel}_weight_grad")
        if has_stencils
        else (f"{kernel}_volume_grad" if nearest else f"{kernel}_backward",)
    )
    # CPUs alone have kernels of stencils and of coordinates in entries.
    only_on_cpus = has_stencils or options.get("coordinates") == "pixel"

    def calls(*names):
        counts = dict.fromkeys(names, 1)
        return (lambda platform: counts if platform == "cpu" else {}) if only_on_cpus else counts

    empty = {
        "no points": functools.partial(arrays, points=0),
        "no channels": functools.partial(arrays, width=0),
    }
    if options.get("padding_mode", "zeros") == "zeros":
        empty["no entries"] = functools.partial(arrays, sizes=(0, *sizes[1:]))
    return OperatorSpec(
        operator=_ME,
        variant=variant,
        function=function,
        reference=oracle,
        arguments=arrays,
        large=functools.partial(arrays, lead=(8,) if batched else (), points=64, width=large_width),
        differentiable=(0,) if nearest else (0, 1),
        calls=calls(kernel),
        vjp_calls=calls(kernel, *gradients),
        value_terms=lambda volume, points: position,
        vjp_terms=lambda volume, points: (
            position * (1 + volume.shape[-1]) + points.size // points.shape[-1]
        ),
        placements=_placements(axes, batched, nearest),
        empty=empty,
        bad_inputs=_bad_inputs(axes),
        # A NaN in a point does not reach the volume's gradient.
        untouched={} if nearest else {1: (1,)},
        # XLA makes the weights of stencils, and their gradients.
        vjp_bitwise=not has_stencils,
        arrival_order=not options.get("deterministic", False),
        checkpoint_name=_ME,
    )


SPECS = (
    make_spec("3-D, zeros", sizes=(4, 3, 5), width=4, large_width=16),
    make_spec(
        "3-D, border, edges, deterministic",
        sizes=(3, 5, 4),
        width=3,
        large_width=24,
        padding_mode="border",
        align_corners=False,
        deterministic=True,
    ),
    make_spec(
        "2-D, reflection, edges, batch",
        sizes=(5, 4),
        width=2,
        large_width=8,
        batched=True,
        padding_mode="reflection",
        align_corners=False,
    ),
    make_spec(
        "2-D, zeros, edges, deterministic, batch",
        sizes=(4, 6),
        width=5,
        large_width=16,
        batched=True,
        align_corners=False,
        deterministic=True,
    ),
    make_spec(
        "3-D, nearest, reflection, deterministic",
        sizes=(4, 3, 3),
        width=8,
        large_width=40,
        method="nearest",
        padding_mode="reflection",
        deterministic=True,
    ),
    make_spec(
        "3-D, pixel, constant",
        sizes=(4, 3, 5),
        width=3,
        large_width=16,
        coordinates="pixel",
        padding_mode="constant",
        cval=0.5,
    ),
    make_spec(
        "2-D, cubic, wrap, batch, deterministic",
        sizes=(4, 5),
        width=2,
        large_width=8,
        batched=True,
        method="cubic",
        padding_mode="wrap",
        align_corners=False,
        deterministic=True,
    ),
)
