"""The scaled product."""

from __future__ import annotations

import functools

from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import scaled_product as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal


def _arrays(rng, dtype, shape=(3, 5)):
    return normal(rng, shape, dtype), normal(rng, shape, dtype)


SPECS = (
    OperatorSpec(
        operator="scaled_product",
        variant="scale = 3",
        function=functools.partial(jaxops.scaled_product, scale=3.0),
        reference=functools.partial(reference.scaled_product, scale=3.0),
        arguments=_arrays,
        large=functools.partial(_arrays, shape=(64, 96)),
        differentiable=(0, 1),
        calls={"jaxops_scaled_product": 1},
        vjp_calls={"jaxops_scaled_product": 3},
        value_terms=lambda a, b: 1,
        vjp_terms=lambda a, b: 1,
        placements=(
            Placement(
                name="rows",
                axes=("n",),
                arguments=(P("n", None), P("n", None)),
                results=(P("n", None),),
            ),
        ),
        empty={"no rows": functools.partial(_arrays, shape=(0, 5))},
        bad_inputs=(
            BadInput(
                name="a row less",
                call=lambda a, b: jaxops.scaled_product(a, b[1:]),
                error=ValueError,
                fragments=("scaled_product: b must have shape",),
            ),
        ),
        checkpoint_name="scaled_product",
    ),
)
