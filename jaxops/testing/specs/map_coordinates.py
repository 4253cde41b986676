"""Interpolation of arrays at coordinates: every order, one to three axes."""

from __future__ import annotations

import functools

from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import map_coordinates as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal

_ME = "map_coordinates"


def _bad(name, call, error, *fragments):
    return BadInput(name=name, call=call, error=error, fragments=(f"{_ME}: ", *fragments))


def _bad_inputs():
    call = jaxops.map_coordinates
    return (
        _bad("integer input", lambda x, *c: call(x.astype(int), c, 1), TypeError, "input must"),
        _bad(
            "integer coordinates",
            lambda x, *c: call(x, [a.astype(int) for a in c], 1),
            TypeError,
            "coordinates must have dtype",
        ),
        _bad("a coordinate too few", lambda x, *c: call(x, c[1:], 1), ValueError, "coordinates"),
        _bad("four axes", lambda x, *c: call(x[(None,) * 3], c, 1), ValueError, "1 to 3 axes"),
        _bad("order 2", lambda x, *c: call(x, c, 2), ValueError, "one of 0, 1, 3, got 2"),
        _bad("an unknown mode", lambda x, *c: call(x, c, 1, "clip"), ValueError, "mode", "'clip'"),
        _bad("several constants", lambda x, *c: call(x, c, 1, "constant", x), ValueError, "cval"),
        _bad("an end of nothing", lambda x, *c: call(x[:0], c, 1, "nearest"), ValueError, "mode"),
    )


def make_spec(variant, *, sizes, order, mode, large_points=64, **options):
    """A call of `map_coordinates`."""
    axes = len(sizes)

    def function(x, *coordinates):
        return jaxops.map_coordinates(x, coordinates, order, mode, **options)

    def oracle(x, *coordinates):
        return reference.map_coordinates(x, coordinates, order, mode, **options)

    def arrays(rng, dtype, points=6, sizes=sizes):
        coordinates = [rng.uniform(-0.4 * n, 1.4 * n, points).astype(dtype) for n in sizes]
        return normal(rng, sizes, dtype), *coordinates

    has_stencils = order == 3
    kernel = "jaxops_taps" if has_stencils else "jaxops_grid_sample"
    gradients = (
        (f"{kernel}_volume_grad", f"{kernel}_weight_grad")
        if has_stencils
        else (f"{kernel}_backward",)
    )

    def calls(*names):
        return lambda platform: dict.fromkeys(names, 1) if platform == "cpu" else {}

    position = (8 * max(sizes) + 16) * (32 if order == 3 else 1)
    points = P("n")
    return OperatorSpec(
        operator=_ME,
        variant=variant,
        function=function,
        reference=oracle,
        arguments=arrays,
        large=functools.partial(arrays, points=large_points),
        differentiable=tuple(range(1 + axes)),
        calls=calls(kernel),
        vjp_calls=calls(kernel, *gradients),
        value_terms=lambda *_: position,
        vjp_terms=lambda x, *c: position * 2 + c[0].size,
        placements=(
            Placement(
                name="points",
                axes=("n",),
                arguments=(P(*(None,) * axes), *(points,) * axes),
                results=(points,),
                backward={"all-reduce": 1},
            ),
        ),
        empty={"no points": functools.partial(arrays, points=0)},
        bad_inputs=_bad_inputs(),
        # A NaN in a coordinate does not reach the gradient of the array.
        untouched={i: (1,) for i in range(1, axes + 1)},
        vjp_bitwise=order != 3,
        arrival_order=True,
        checkpoint_name=_ME,
    )


SPECS = (
    make_spec("2-D, linear, reflect", sizes=(5, 4), order=1, mode="reflect"),
    make_spec("1-D, cubic spline, constant", sizes=(7,), order=3, mode="constant", cval=0.5),
)
