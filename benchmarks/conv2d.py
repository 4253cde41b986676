"""conv2d against XLA and PyTorch. Shapes are (N, C, H, W, O, K): K x K kernels, O outputs.

Cases with an activation have a bias as well.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, normal
from jaxops._families.windows import make_windows

NHWC, NCHW = "NHWC", "NCHW"
LAYOUTS = {NHWC: (NHWC, "HWIO", NHWC), NCHW: (NCHW, "OIHW", NCHW)}

# fmt: off
CASES = [
    *cases("small", (1, 16, 32, 32, 32, 3), ["float32", "bfloat16"], layout=NHWC),
    *cases("small", (8, 8, 8, 8, 16, 3), "float32", layout=[NHWC, NCHW]),
    # A ResNet has these layers, at a batch that trains on one device.
    *cases("typical", (32, 64, 56, 56, 64, 3), ["float32", "bfloat16", "float16"], layout=NHWC),
    *cases("typical", (32, 128, 28, 28, 128, 3), ["float32", "bfloat16"], layout=[NHWC, NCHW]),
    *cases("typical", (32, 128, 56, 56, 128, 3), "bfloat16", layout=NHWC, strides=2),
    *cases("typical", (32, 512, 7, 7, 512, 3), "bfloat16", layout=NHWC),
    *cases("typical", (32, 64, 56, 56, 256, 1), ["float32", "bfloat16"], layout=NHWC),
    *cases("typical", (32, 3, 224, 224, 64, 7), "float32", layout=NHWC, strides=2),
    *cases("typical", (32, 64, 56, 56, 64, 3), "bfloat16", layout=NHWC, activation="relu"),
    *cases("typical", (32, 128, 28, 28, 128, 3), "bfloat16", layout=NHWC, activation="gelu"),
    # Grouped and depthwise.
    *cases("typical", (32, 128, 28, 28, 128, 3), ["float32", "bfloat16"], layout=NHWC, groups=32),
    *cases("typical", (32, 96, 56, 56, 96, 7), ["float32", "bfloat16"], layout=NHWC, groups=96),
    *cases("typical", (32, 192, 28, 28, 192, 3), "bfloat16", layout=NHWC, strides=2, groups=192),
    *cases("typical", (32, 192, 28, 28, 192, 5), "bfloat16", layout=NHWC, groups=192),
    *cases("large", (64, 384, 28, 28, 384, 7), "bfloat16", layout=NHWC, groups=384),
    *cases("large", (64, 3, 224, 224, 64, 7), "bfloat16", target=True, layout=NHWC, strides=2),
    *cases("large", (64, 64, 56, 56, 64, 3), "bfloat16", target=True, layout=NHWC),
    *cases("large", (64, 256, 14, 14, 256, 3), "bfloat16", target=True, layout=NHWC),
    *cases("large", (64, 256, 14, 14, 1024, 1), "bfloat16", target=True, layout=NHWC),
    *cases("large", (64, 256, 28, 28, 256, 3), "bfloat16", target=True, layout=NHWC, dilation=2),
    *cases("large", (64, 256, 28, 28, 256, 3), "float32", layout=NHWC),
    # float32 is multiplied as TF32, which is JAX's default.
    *cases("typical", (32, 64, 56, 56, 64, 3), "float32", layout=NHWC, precision="default"),
    *cases("typical", (32, 128, 28, 28, 128, 3), "float32", layout=NHWC, precision="default"),
    *cases("large", (64, 256, 28, 28, 256, 3), "float32", layout=NHWC, precision="default"),
    *cases("odd", (17, 37, 29, 31, 41, 3), ["float32", "bfloat16"], layout=[NHWC, NCHW]),
    *cases("odd", (16, 100, 33, 35, 50, 5), "float16", layout=NHWC, strides=2),
    *cases("odd", (4, 64, 28, 28, 64, 3), "float64", layout=NHWC),
]
# fmt: on
for n in (1, 8, 64, 512, 4096):
    CASES += cases("scaling", (n, 8, 14, 14, 8, 3), "float32", layout=NHWC)

DIRECTIONS = (
    Direction("forward", True, ()),
    Direction("input_grad", False, (0,)),
    Direction("kernel_grad", False, (1,)),
    Direction("backward", False, (0, 1)),
)


def windows(case):
    *_, h, w, _, k = case.shape
    return make_windows(
        "conv2d",
        (h, w),
        (k, k),
        strides=case.options.get("strides", 1),
        padding="SAME",
        dilation=case.options.get("dilation", 1),
        channels_last=True,
    )


def arguments(case, key):
    n, c, h, w, o, k = case.shape
    fan_in = c // case.options.get("groups", 1)
    of_x, of_kernel, of_bias = jax.random.split(key, 3)
    x = normal(of_x, (n, h, w, c), case.dtype)
    kernel = normal(of_kernel, (k, k, fan_in, o), case.dtype)
    if case.options["layout"] == NCHW:
        return x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1)
    if "activation" in case.options:
        return x, kernel, normal(of_bias, (o,), case.dtype)
    return x, kernel


def ours(case):
    def function(x, kernel, bias=None):
        return jaxops.conv2d(
            x,
            kernel,
            bias=bias,
            dimension_numbers=LAYOUTS[case.options["layout"]],
            **{k: v for k, v in case.options.items() if k not in ("layout", "precision")},
            precision=precision(case),
        )

    return function


def finished(case, y, bias, activations):
    """The result, with bias and activation if the case has them; images are (N, H, W, O) then."""
    return y if bias is None else getattr(activations, case.options["activation"])(y + bias)


def precision(case):
    """The precision of a case, by default "highest" for float32; peers and the judge use it too."""
    return case.options.get("precision", "highest" if case.dtype == "float32" else None)


def is_tf32(case):
    return case.dtype == "float32" and precision(case) == "default"


def convolution(case):
    placed = windows(case)

    def function(x, kernel, bias=None):
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            placed.strides,
            "SAME",
            rhs_dilation=placed.dilation,
            dimension_numbers=LAYOUTS[case.options["layout"]],
            feature_group_count=case.options.get("groups", 1),
            precision=precision(case),
        )
        return finished(case, y, bias, jax.nn)

    return function


def patches_product(case):
    """XLA's own patches, which it makes by a convolution with a kernel of ones and zeros."""
    *_, k = case.shape
    placed = windows(case)
    is_last = case.options["layout"] == NHWC

    def function(x, kernel, bias=None):
        patches = jax.lax.conv_general_dilated_patches(
            x,
            (k, k),
            placed.strides,
            "SAME",
            rhs_dilation=placed.dilation,
            dimension_numbers=LAYOUTS[case.options["layout"]],
            precision=jax.lax.Precision.HIGHEST,
        )
        # The channel is the slowest index of a patch.
        if is_last:
            matrix = kernel.transpose(2, 0, 1, 3).reshape(-1, kernel.shape[-1])
            y = jnp.einsum("nhwp,po->nhwo", patches, matrix, precision=precision(case))
            return finished(case, y, bias, jax.nn)
        matrix = kernel.reshape(kernel.shape[0], -1)
        return jnp.einsum("nphw,op->nohw", patches, matrix, precision=precision(case))

    return function


def has_groups(case, direction, platform):
    return "groups are not one matrix product" if "groups" in case.options else None


def is_set_to_float32(case, direction, platform):
    return "torch is set to true float32" if is_tf32(case) else None


def torch_convolution(case):
    import torch
    from torch.nn.functional import gelu

    *_, k = case.shape
    placed = windows(case)
    is_last = case.options["layout"] == NHWC

    def function(x, kernel, bias=None):
        if is_last:
            x, kernel = x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1)
        pads = []
        for d in (1, 0):
            reach = (placed.outs[d] - 1) * placed.strides[d] + (k - 1) * placed.dilation[d] + 1
            pads += [placed.low[d], max(0, reach - placed.ins[d] - placed.low[d])]
        if pads[0] == pads[1] and pads[2] == pads[3]:
            padding = (pads[2], pads[0])
        else:
            x, padding = torch.nn.functional.pad(x, pads), 0
        y = torch.nn.functional.conv2d(
            x,
            kernel,
            bias,
            stride=placed.strides,
            padding=padding,
            dilation=placed.dilation,
            groups=case.options.get("groups", 1),
        )
        if bias is not None:
            activations = {"relu": torch.relu, "gelu": functools.partial(gelu, approximate="tanh")}
            y = activations[case.options["activation"]](y)
        return y.permute(0, 2, 3, 1) if is_last else y

    return function


def torch_compiled(case):
    import torch

    return torch.compile(torch_convolution(case), dynamic=False, fullgraph=True)


def sizes(case):
    """Entries of x, kernel and y, and products of a pass."""
    n, c, h, w, o, k = case.shape
    fan_in = c // case.options.get("groups", 1)
    y = n * o
    for out in windows(case).outs:
        y *= out
    return n * c * h * w, k * k * fan_in * o, y, y * k * k * fan_in


def cost(case: Case, direction: Direction) -> Cost:
    x, kernel, y, products = sizes(case)
    # The gradient of an activation needs what it was given.
    passes = (direction.value or "activation" in case.options) + len(direction.wrt)
    # Both gradients read the cotangent and x or the kernel once, and write their result.
    entries = x + kernel + y if passes == 1 else 2 * (x + kernel) + y
    depthwise = case.options.get("groups") == case.shape[1]
    unit = "fma" if depthwise else "matmul"
    dtype = case.dtype if not depthwise or case.dtype == "float64" else "float32"
    return Cost(
        bytes=entries * jnp.dtype(case.dtype).itemsize,
        flops=2 * passes * products,
        unit=f"{unit} tf32" if is_tf32(case) else f"{unit} {dtype}",
    )


def terms(case: Case, direction: Direction) -> int:
    n, c, _, _, o, k = case.shape
    groups = case.options.get("groups", 1)
    of_kernel = n
    for out in windows(case).outs:
        of_kernel *= out
    counts = [k * k * c // groups] if direction.value else []
    counts += [(k * k * o // groups, of_kernel)[i] for i in direction.wrt]
    return max(counts)


BENCHMARK = Benchmark(
    operator="conv2d",
    shape="N,C,H,W,O,K",
    cases=CASES,
    directions=DIRECTIONS,
    arguments=arguments,
    function=ours,
    reference=convolution,
    peers=(
        Peer("XLA conv", convolution),
        Peer("XLA patches", patches_product, declines=has_groups, costly=True),
        Peer("torch conv2d", torch_convolution, torch=True, declines=is_set_to_float32),
        Peer("torch.compile", torch_compiled, torch=True, declines=is_set_to_float32, costly=True),
    ),
    cost=cost,
    terms=terms,
    # TF32 has the mantissa of float16.
    rounding=lambda case: "float16" if is_tf32(case) else case.dtype,
    near_limit=False,
)
