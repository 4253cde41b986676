"""col2im against XLA and PyTorch. Shapes are (N, C, H, W, K): images, and the sides of a window."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench import registry
from jaxops._bench.spec import Peer, cases, directions, normal

COPY = registry.load("im2col")
NHWC, NCHW = "NHWC", "NCHW"

# fmt: off
CASES = [
    *cases("small", (1, 16, 32, 32, 3), ["float32", "bfloat16"], layout=[NHWC, NCHW], strides=1),
    *cases("typical", (32, 3, 224, 224, 7), ["float32", "bfloat16"], layout=NHWC, strides=2),
    *cases("typical", (32, 64, 56, 56, 3), ["float32", "bfloat16"], layout=[NHWC, NCHW], strides=1),
    *cases("typical", (32, 256, 14, 14, 3), ["float32", "bfloat16"], layout=NHWC, strides=1),
    *cases("large", (64, 64, 56, 56, 3), "bfloat16", layout=[NHWC, NCHW], strides=1, target=True),
    *cases("large", (64, 256, 28, 28, 3), "bfloat16", layout=NHWC, strides=1),
    *cases("large", (64, 128, 56, 56, 3), "float32", layout=NHWC, strides=2),
    *cases("odd", (17, 37, 29, 31, 3), ["float32", "bfloat16"], layout=[NHWC, NCHW], strides=1),
    *cases("odd", (16, 100, 33, 35, 5), "float16", layout=NHWC, strides=2),
    *cases("odd", (16, 64, 56, 56, 3), "float64", layout=NHWC, strides=1),
]
# fmt: on
for n in (1, 4, 16, 64, 256, 1024):
    CASES += cases("scaling", (n, 16, 28, 28, 3), "float32", layout=NHWC, strides=1)


def image(case):
    return jax.eval_shape(functools.partial(COPY.arguments, case), jax.random.key(0))[0]


def arguments(case, key):
    shape = jax.eval_shape(COPY.function(case), image(case)).shape
    return (normal(key, shape, case.dtype),)


def ours(case):
    return functools.partial(
        jaxops.col2im,
        input_shape=image(case).shape,
        strides=case.options["strides"],
        padding="SAME",
        data_format=case.options["layout"],
    )


def slices(case):
    """The transpose of one strided slice a tap: float32 sums of parts padded with zeros."""
    wide = jnp.promote_types(case.dtype, jnp.float32)
    of_slices = next(peer for peer in COPY.peers if peer.name == "XLA slices").function(case)

    def function(patches):
        like = jax.ShapeDtypeStruct(image(case).shape, jnp.promote_types(patches.dtype, wide))
        (summed,) = jax.linear_transpose(of_slices, like)(patches.astype(like.dtype))
        return summed.astype(patches.dtype)

    return function


def torch_fold(case):
    import torch

    *_, h, w, k = case.shape
    stride = case.options["strides"]

    def function(patches):
        n, c, _, _, *outs = patches.shape
        totals = [max(0, (o - 1) * stride + k - size) for o, size in zip(outs, (h, w), strict=True)]
        columns = patches.reshape(n, c * k * k, outs[0] * outs[1])
        whole = torch.nn.functional.fold(columns, (h + totals[0], w + totals[1]), k, stride=stride)
        top, left = totals[0] // 2, totals[1] // 2
        return whole[:, :, top : top + h, left : left + w]

    return function


def torch_declines(case, direction, platform):
    return None if case.options["layout"] == NCHW else "fold takes channels first"


BENCHMARK = dataclasses.replace(
    COPY,
    operator="col2im",
    cases=CASES,
    directions=directions(0),
    arguments=arguments,
    function=ours,
    reference=slices,
    peers=(
        Peer("XLA slices", slices),
        Peer("torch fold", torch_fold, torch=True, declines=torch_declines),
    ),
    terms=lambda case, direction: case.shape[-1] ** 2 if direction.value else 1,
)
