"""Transposed convolution, with the kernel of its own and of the convolution that it transposes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import conv as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal
from jaxops.testing.specs.conv import transposed_calls

_ME = "conv_transpose"


def _bad_inputs(rank):
    strides = (2,) * rank

    def bad(name, call, error, *fragments):
        return BadInput(name=name, call=call, error=error, fragments=(f"{_ME}: ", *fragments))

    def convolve(x, kernel, strides=strides, padding="SAME", **options):
        return jaxops.conv_transpose(x, kernel, strides, padding, **options)

    return (
        bad("ranks that differ", lambda x, k: convolve(x[0], k), ValueError, "lhs and rhs must"),
        bad("no stride", lambda x, k: convolve(x, k, 0), ValueError, "strides must be >= 1"),
        bad(
            "strides of another rank",
            lambda x, k: convolve(x, k, (2,) * (rank + 1)),
            ValueError,
            "strides must",
        ),
        bad(
            "an unknown padding",
            lambda x, k: convolve(x, k, padding="FULL"),
            ValueError,
            "padding must be one of",
        ),
        bad(
            "padding that is no pairs",
            lambda x, k: convolve(x, k, padding=(1,) * rank),
            ValueError,
            "padding must be 'SAME', 'VALID' or",
        ),
        bad(
            "a dilation of 0",
            lambda x, k: convolve(x, k, rhs_dilation=0),
            ValueError,
            "rhs_dilation must be >= 1",
        ),
        bad(
            "groups that do not divide the kernel",
            lambda x, k: convolve(x, k, transpose_kernel=True, feature_group_count=7),
            ValueError,
            "feature_group_count = 7 must divide",
        ),
    )


def make_spec(variant, *, taps, strides, padding, low, outs, ins, groups=1, is_transposed=False):
    """A convolution of `ins` entries, whose result has `outs`, with `low` zeros before them."""
    rank = len(taps)
    dims = range(rank)

    def arguments(rng, dtype, rows=2, fan_in=2, fan_out=3, space=ins):
        x = normal(rng, (rows, *space, groups * fan_in), dtype)
        fans = (fan_out, groups * fan_in) if is_transposed else (fan_in, groups * fan_out)
        return x, normal(rng, (*taps, *fans), dtype)

    def function(x, kernel):
        return jaxops.conv_transpose(
            x,
            kernel,
            strides,
            padding,
            transpose_kernel=is_transposed,
            precision="highest",
            feature_group_count=groups,
        )

    def compute_reference(x, kernel):
        spread = [(0, 0, s - 1) for s in strides]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *spread, (0, 0, 0)])
        parts = []
        for g in range(groups):
            image = jnp.split(x, groups, -1)[g]
            own = jnp.split(kernel, groups, -1)[g]
            own = jnp.flip(own, dims).swapaxes(-1, -2) if is_transposed else own
            ones = (1,) * rank
            parts.append(
                reference.conv(image, own, outs=outs, strides=ones, dilation=ones, low=low)
            )
        return jnp.concatenate(parts, axis=-1)

    def placement(name, axes, row, channel):
        space = (None,) * rank
        of_kernel = (channel, None) if is_transposed else (None, channel)
        return Placement(
            name=name,
            axes=axes,
            arguments=(P(row, *space, None), P(*space, *of_kernel)),
            results=(P(row, *space, channel),),
            backward={"all-reduce": (row is not None) + (channel is not None)},
        )

    def reach(channel, index, x, kernel):
        """Entries and taps whose product is beyond the result are multiplied by zeros there."""
        of_x, of_kernel = np.zeros(x.shape, bool), np.zeros(kernel.shape, bool)
        of_x[..., index[channel]] = True
        of_kernel[..., index[channel], :] = True
        return False, of_x, of_kernel

    # The position of the input channel in an index of x, and in one of kernel.
    reaches = {0: functools.partial(reach, -1), 1: functools.partial(reach, -2)}
    placements = [placement("images", ("n",), "n", None)]
    if groups == 1:
        placements += [
            placement("output channels", ("c",), None, "c"),
            placement("images and output channels", ("n", "c"), "n", "c"),
        ]
    return OperatorSpec(
        operator=_ME,
        variant=variant,
        function=function,
        reference=compute_reference,
        arguments=arguments,
        large=functools.partial(arguments, rows=8, fan_in=8, fan_out=16),
        differentiable=(0, 1),
        calls=functools.partial(transposed_calls, passes=1, groups=groups),
        vjp_calls=functools.partial(transposed_calls, passes=3, groups=groups),
        value_terms=lambda x, kernel: math.prod(taps) * x.shape[-1] // groups,
        vjp_terms=lambda x, kernel: 4 * max(x.size, kernel.size),
        vjp_roundings=2,
        placements=tuple(placements),
        empty={
            "no images": functools.partial(arguments, rows=0),
            "no channels": functools.partial(arguments, fan_in=0),
        },
        bad_inputs=_bad_inputs(rank),
        padded_reach={} if is_transposed else reaches,
        vjp_bitwise=False,
        checkpoint_name="conv_general_dilated",
    )


SPECS = (
    make_spec(
        "2-D",
        taps=(3, 4),
        strides=(2, 2),
        padding="SAME",
        low=(2, 2),
        ins=(3, 2),
        outs=(6, 4),
    ),
    make_spec(
        "1-D, groups, transposed kernel",
        taps=(5,),
        strides=(3,),
        padding="VALID",
        low=(4,),
        ins=(4,),
        outs=(14,),
        groups=2,
        is_transposed=True,
    ),
)
