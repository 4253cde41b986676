"""Patches and their transpose in both layouts, with strides, dilation and uneven padding."""

from __future__ import annotations

import functools
import math

import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import im2col as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal


def _bad(function, name, call, error, *fragments):
    return BadInput(name=name, call=call, error=error, fragments=(f"{function}: ", *fragments))


_IM2COL_BAD_INPUTS = (
    _bad("im2col", "a text", lambda x: jaxops.im2col("x", 3), TypeError, "x must be an array"),
    _bad(
        "im2col",
        "half a byte",
        lambda x: jaxops.im2col(np.zeros((1, 4, 4, 1), "int4"), 3),
        TypeError,
        "x must have a dtype of whole bytes, got int4",
    ),
    _bad(
        "im2col",
        "a rank that is not the format's",
        lambda x: jaxops.im2col(np.zeros((4, 4, 1)), 3),
        ValueError,
        "x must have shape (N, H, W, C) (NHWC), got shape (4, 4, 1)",
    ),
    _bad(
        "im2col",
        "an unknown format",
        lambda x: jaxops.im2col(x, 3, data_format="HWCN"),
        ValueError,
        "data_format must be one of 'NWC', 'NHWC'",
        "got 'HWCN'",
    ),
    _bad(
        "im2col",
        "a window of nothing",
        lambda x: jaxops.im2col(np.zeros((1, 4, 4, 1)), (3, 0)),
        ValueError,
        "kernel_size[1] must be >= 1, got 0",
    ),
    _bad(
        "im2col",
        "too many strides",
        lambda x: jaxops.im2col(np.zeros((1, 4, 4, 1)), 3, strides=(1, 1, 1)),
        ValueError,
        "strides must be an integer or 2 of them, one a dimension, got (1, 1, 1)",
    ),
    _bad(
        "im2col",
        "a dilation that is no integer",
        lambda x: jaxops.im2col(np.zeros((1, 4, 4, 1)), 3, dilation=1.5),
        TypeError,
        "dilation must be a static integer, got 1.5",
    ),
    _bad(
        "im2col",
        "negative padding",
        lambda x: jaxops.im2col(np.zeros((1, 4, 4, 1)), 3, padding=[(0, 1), (-1, 0)]),
        ValueError,
        "padding[1][0] must be >= 0, got -1",
    ),
    _bad(
        "im2col",
        "an unknown padding",
        lambda x: jaxops.im2col(np.zeros((1, 4, 4, 1)), 3, padding="FULL"),
        ValueError,
        "padding must be one of 'SAME', 'VALID', got 'FULL'",
    ),
)

_COL2IM_BAD_INPUTS = (
    _bad(
        "col2im",
        "integers",
        lambda p: jaxops.col2im(np.zeros((1, 2, 2, 3, 3, 1), np.int32), (1, 4, 4, 1)),
        TypeError,
        "patches must have dtype float16, bfloat16, float32 or float64, got int32",
    ),
    _bad(
        "col2im",
        "a rank that is not the format's",
        lambda p: jaxops.col2im(np.zeros((1, 2, 3, 1)), (1, 4, 4, 1)),
        ValueError,
        "patches must have shape (N, OH, OW, KH, KW, C) (NHWC), got shape (1, 2, 3, 1)",
    ),
    _bad(
        "col2im",
        "a short input_shape",
        lambda p: jaxops.col2im(np.zeros((1, 2, 2, 3, 3, 1)), (4, 4)),
        ValueError,
        "input_shape must be (N, H, W, C), got (4, 4)",
    ),
    _bad(
        "col2im",
        "patches of another image",
        lambda p: jaxops.col2im(np.zeros((1, 2, 2, 3, 3, 1)), (1, 5, 4, 1)),
        ValueError,
        "patches must have shape (1, 3, 2, 3, 3, 1) (for input_shape (1, 5, 4, 1)), got",
    ),
    _bad(
        "col2im",
        "windows of nothing",
        lambda p: jaxops.col2im(np.zeros((1, 4, 4, 0, 1, 1)), (1, 4, 4, 1)),
        ValueError,
        "patches must have shape (N, OH, OW, KH, KW, C) with a window of one entry or more",
    ),
)


def _placements(rank, channels_last, *, folds):
    def placement(name, axes, row, channel):
        dims = [row, *(None,) * rank, channel] if channels_last else [row, channel]
        wide = [row, *(None,) * 2 * rank, channel] if channels_last else [row, channel]
        # Written out: types of explicit meshes have an entry for every dimension.
        image = dims + [None] * (rank + 2 - len(dims))
        patches = wide + [None] * (2 * rank + 2 - len(wide))
        argument, result = (patches, image) if folds else (image, patches)
        return Placement(name=name, axes=axes, arguments=(P(*argument),), results=(P(*result),))

    return (
        placement("images", ("n",), "n", None),
        placement("channels", ("c",), None, "c"),
        placement("images and channels", ("n", "c"), "n", "c"),
    )


def make_specs(variant, data_format, ins, taps, *, strides, low, high, dilation, large):
    """One of each operator. `large` is a scale of the number of images, and that of channels."""
    rank = len(ins)
    channels_last = data_format.endswith("C")
    outs = tuple(
        (n + lo + hi - (k - 1) * d - 1) // s + 1
        for n, k, s, lo, hi, d in zip(ins, taps, strides, low, high, dilation, strict=True)
    )
    public = {
        "strides": strides,
        "padding": tuple(zip(low, high, strict=True)),
        "dilation": dilation,
        "data_format": data_format,
    }
    exact = {"strides": strides, "dilation": dilation, "low": low, "channels_last": channels_last}

    def image_shape(rows, channels):
        return (rows, *ins, channels) if channels_last else (rows, channels, *ins)

    def image(rng, dtype, rows=2, channels=3):
        return (normal(rng, image_shape(rows, channels), dtype),)

    def patches(rng, dtype, rows=2, channels=3):
        shape = (rows, *outs, *taps, channels) if channels_last else (rows, channels, *taps, *outs)
        return (normal(rng, shape, dtype),)

    def fold(patches):
        channels = patches.shape[-1] if channels_last else patches.shape[1]
        return jaxops.col2im(patches, image_shape(patches.shape[0], channels), **public)

    common = {
        "variant": variant,
        "differentiable": (0,),
        "vjp_calls": {"jaxops_im2col": 1, "jaxops_col2im": 1},
    }
    copied = {"value_terms": lambda *_: 0, "vjp_terms": lambda *_: math.prod(taps)}
    summed = {"value_terms": lambda *_: math.prod(taps), "vjp_terms": lambda *_: math.prod(taps)}
    empty = {"no images": {"rows": 0}, "no channels": {"channels": 0}}
    return (
        OperatorSpec(
            operator="im2col",
            function=lambda x: jaxops.im2col(x, taps, **public),
            reference=lambda x: reference.im2col(x, taps=taps, outs=outs, **exact),
            arguments=image,
            large=functools.partial(image, rows=large[0], channels=large[1]),
            calls={"jaxops_im2col": 1},
            placements=_placements(rank, channels_last, folds=False),
            empty={name: functools.partial(image, **n) for name, n in empty.items()},
            bad_inputs=_IM2COL_BAD_INPUTS,
            checkpoint_name="im2col",
            **copied,
            **common,
        ),
        OperatorSpec(
            operator="col2im",
            function=fold,
            reference=lambda patches: reference.col2im(patches, ins=ins, **exact),
            arguments=patches,
            large=functools.partial(patches, rows=large[0], channels=large[1]),
            calls={"jaxops_col2im": 1},
            placements=_placements(rank, channels_last, folds=True),
            empty={name: functools.partial(patches, **n) for name, n in empty.items()},
            bad_inputs=_COL2IM_BAD_INPUTS,
            checkpoint_name="col2im",
            **summed,
            **common,
        ),
    )


SPECS = (
    *make_specs(
        "NHWC",
        "NHWC",
        (5, 4),
        (3, 2),
        strides=(2, 1),
        low=(1, 0),
        high=(1, 2),
        dilation=(1, 2),
        large=(16, 32),
    ),
    *make_specs(
        "NCHW",
        "NCHW",
        (4, 6),
        (2, 3),
        strides=(1, 2),
        low=(0, 1),
        high=(1, 1),
        dilation=(2, 1),
        large=(16, 40),
    ),
)
