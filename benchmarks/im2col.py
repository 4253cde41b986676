"""im2col against XLA and PyTorch. Shapes are (N, C, H, W, K): images, and the sides of a window."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, directions, normal
from jaxops._families.windows import make_windows

NHWC, NCHW = "NHWC", "NCHW"

# fmt: off
CASES = [
    *cases("small", (1, 16, 32, 32, 3), ["float32", "bfloat16"], layout=[NHWC, NCHW], strides=1),
    *cases("typical", (32, 3, 224, 224, 7), ["float32", "bfloat16"], layout=NHWC, strides=2),
    *cases("typical", (32, 64, 56, 56, 3), ["float32", "bfloat16"], layout=[NHWC, NCHW], strides=1),
    *cases("typical", (32, 256, 14, 14, 3), ["float32", "bfloat16"], layout=NHWC, strides=1),
    *cases("large", (64, 3, 224, 224, 7), ["bfloat16"], layout=[NHWC, NCHW], strides=2),
    *cases("large", (64, 64, 56, 56, 3), "bfloat16", layout=[NHWC, NCHW], strides=1, target=True),
    *cases("large", (64, 256, 28, 28, 3), "bfloat16", layout=NHWC, strides=1),
    *cases("large", (64, 128, 56, 56, 3), "float32", layout=NHWC, strides=2),
    *cases("odd", (17, 37, 29, 31, 3), ["float32", "bfloat16"], layout=[NHWC, NCHW], strides=1),
    *cases("odd", (16, 100, 33, 35, 5), "float16", layout=NHWC, strides=2),
    *cases("odd", (16, 64, 56, 56, 3), ["uint8", "float64"], layout=NHWC, strides=1),
]
# fmt: on
for n in (1, 4, 16, 64, 256, 1024):
    CASES += cases("scaling", (n, 16, 28, 28, 3), "float32", layout=NHWC, strides=1)


def options(case):
    return {"strides": case.options["strides"], "padding": "SAME"}


def image_shape(case):
    n, c, h, w, _ = case.shape
    return (n, h, w, c) if case.options["layout"] == NHWC else (n, c, h, w)


def arguments(case, key):
    if not jnp.issubdtype(case.dtype, jnp.floating):
        return (jax.random.randint(key, image_shape(case), 0, 100).astype(case.dtype),)
    return (normal(key, image_shape(case), case.dtype),)


def ours(case):
    return functools.partial(
        jaxops.im2col,
        kernel_size=case.shape[-1],
        data_format=case.options["layout"],
        **options(case),
    )


def windows(case):
    *_, h, w, k = case.shape
    return make_windows("im2col", (h, w), (k, k), dilation=1, channels_last=True, **options(case))


def slices(case):
    """One strided slice a tap, stacked."""
    k, stride = case.shape[-1], case.options["strides"]
    placed = windows(case)
    first = 1 if case.options["layout"] == NHWC else 2
    at = 3 if case.options["layout"] == NHWC else 2

    def function(x):
        widths = [(0, 0, 0)] * 4
        for d in range(2):
            reach = (placed.outs[d] - 1) * stride + k
            widths[first + d] = (placed.low[d], reach - placed.ins[d] - placed.low[d], 0)
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
        taps = []
        for i in range(k * k):
            window = [slice(None)] * 4
            for d, start in enumerate(divmod(i, k)):
                stop = start + (placed.outs[d] - 1) * stride + 1
                window[first + d] = slice(start, stop, stride)
            taps.append(padded[tuple(window)])
        stacked = jnp.stack(taps, at)
        return stacked.reshape(*stacked.shape[:at], k, k, *stacked.shape[at + 1 :])

    return function


def identity_kernel(case):
    """`jax.lax.conv_general_dilated_patches`, in the order of channels and taps that it has."""
    layout = case.options["layout"]
    k, stride = case.shape[-1], case.options["strides"]

    def function(x):
        numbers = (layout, "HWIO" if layout == NHWC else "OIHW", layout)
        made = jax.lax.conv_general_dilated_patches(
            x,
            (k, k),
            (stride, stride),
            "SAME",
            dimension_numbers=numbers,
            precision=jax.lax.Precision.HIGHEST,
        )
        if layout == NCHW:
            return made.reshape(*x.shape[:2], k, k, *made.shape[2:])
        apart = made.reshape(*made.shape[:3], x.shape[-1], k, k)
        return jnp.moveaxis(apart, 3, -1)

    return function


def torch_unfold(case):
    import torch

    k, stride = case.shape[-1], case.options["strides"]
    placed = windows(case)

    def function(x):
        n, c = x.shape[:2]
        pads = []
        for d in (1, 0):
            reach = (placed.outs[d] - 1) * stride + k
            pads += [placed.low[d], max(0, reach - placed.ins[d] - placed.low[d])]
        padded = torch.nn.functional.pad(x, pads)
        columns = torch.nn.functional.unfold(padded, k, stride=stride)
        return columns.reshape(n, c, k, k, *placed.outs)

    return function


def torch_declines(case, direction, platform):
    if case.options["layout"] != NCHW:
        return "unfold takes channels first"
    if not jnp.issubdtype(case.dtype, jnp.floating):
        return "unfold takes floats"
    return None


def convolution_declines(case, direction, platform):
    return None if jnp.issubdtype(case.dtype, jnp.floating) else "it is a convolution of floats"


def cost(case: Case, direction: Direction) -> Cost:
    n, c, h, w, k = case.shape
    image, patches = n * c * h * w, n * c * k * k
    for out in windows(case).outs:
        patches *= out
    passes = direction.value + len(direction.wrt)
    sums = patches * len(direction.wrt)
    return Cost(
        bytes=passes * (image + patches) * jnp.dtype(case.dtype).itemsize,
        flops=sums,
        unit="fma float64" if case.dtype == "float64" else "fma float32",
    )


BENCHMARK = Benchmark(
    operator="im2col",
    shape="N,C,H,W,K",
    cases=CASES,
    directions=directions(0),
    arguments=arguments,
    function=ours,
    reference=slices,
    peers=(
        Peer("XLA slices", slices),
        Peer("XLA patches", identity_kernel, declines=convolution_declines, costly=True),
        Peer("torch unfold", torch_unfold, torch=True, declines=torch_declines),
    ),
    cost=cost,
    terms=lambda case, direction: case.shape[-1] ** 2 if direction.wrt else 1,
)
