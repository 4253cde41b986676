"""conv_transpose against XLA and PyTorch. Shapes are (N, C, S, O, K, stride).

Images have S entries in each of their `rank` dimensions, kernels have K taps. The kernel is that of
the convolution which is transposed.
"""

from __future__ import annotations

import jax

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, directions, normal

# fmt: off
CASES = [
    *cases("small", (2, 16, 64, 16, 4, 2), "float32", rank=1),
    *cases("small", (1, 16, 8, 16, 4, 2), ["float32", "bfloat16"], rank=2),
    # The decoders of U-Nets and of DCGAN, and a vocoder's upsampling.
    *cases("typical", (16, 256, 16, 128, 2, 2), ["float32", "bfloat16"], rank=2),
    *cases("typical", (16, 128, 32, 64, 4, 2), ["float32", "bfloat16"], rank=2),
    *cases("typical", (8, 512, 128, 256, 16, 8), ["float32", "bfloat16"], rank=1),
    *cases("typical", (2, 64, 16, 32, 3, 2), ["float32", "bfloat16"], rank=3),
    *cases("typical", (16, 64, 28, 64, 4, 2), ["float32", "bfloat16"], rank=2, groups=64),
    *cases("typical", (16, 64, 1024, 64, 4, 2), "bfloat16", rank=1, groups=64),
    *cases("typical", (2, 32, 16, 32, 4, 2), "bfloat16", rank=3, groups=32),
    *cases("large", (32, 128, 64, 64, 4, 2), "bfloat16", rank=2),
    *cases("odd", (3, 37, 29, 41, 3, 2), ["float32", "float16"], rank=2),
    *cases("odd", (2, 12, 13, 18, 5, 3), "float64", rank=2, groups=6),
]
# fmt: on
for n in (1, 16, 256, 4096):
    CASES += cases("scaling", (n, 8, 8, 8, 4, 2), "float32", rank=2)

SPACE = "HWD"


def numbers(case):
    space = SPACE[: case.options["rank"]]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def groups(case):
    return case.options.get("groups", 1)


def precision(case):
    """True float32, for peers and for the judge too."""
    return "highest" if case.dtype == "float32" else None


def arguments(case, key):
    n, c, s, o, k, _ = case.shape
    rank = case.options["rank"]
    of_x, of_kernel = jax.random.split(key)
    x = normal(of_x, (n, *(s,) * rank, c), case.dtype)
    # As of the convolution that is transposed: c outputs of o // groups inputs.
    return x, normal(of_kernel, (*(k,) * rank, o // groups(case), c), case.dtype)


def ours(case):
    def function(x, kernel):
        return jaxops.conv_transpose(
            x,
            kernel,
            (case.shape[-1],) * case.options["rank"],
            "SAME",
            transpose_kernel=True,
            precision=precision(case),
            feature_group_count=groups(case),
        )

    return function


def transpose(case):
    """`jax.lax.conv_transpose`, or, as it has no groups, the gradient of the convolution."""
    n, _, s, o, _, stride = case.shape
    rank = case.options["rank"]
    strides = (stride,) * rank

    def function(x, kernel):
        if groups(case) == 1:
            return jax.lax.conv_transpose(
                x, kernel, strides, "SAME", transpose_kernel=True, precision=precision(case)
            )

        def convolve(image):
            return jax.lax.conv_general_dilated(
                image,
                kernel,
                strides,
                "SAME",
                dimension_numbers=numbers(case),
                feature_group_count=groups(case),
                precision=precision(case),
            )

        image = jax.ShapeDtypeStruct((n, *(s * stride,) * rank, o), x.dtype)
        return jax.linear_transpose(convolve, image)(x)[0]

    return function


def torch_transpose(case):
    import torch

    *_, k, stride = case.shape
    rank = case.options["rank"]
    convolve = getattr(torch.nn.functional, f"conv_transpose{rank}d")
    # What "SAME" leaves out of K - stride more entries.
    low = max(k - stride, 0) // 2

    def function(x, kernel):
        y = convolve(
            x.movedim(-1, 1),
            kernel.movedim((-1, -2), (0, 1)),
            stride=stride,
            groups=groups(case),
        )
        for dimension in range(2, rank + 2):
            y = y.narrow(dimension, low, case.shape[2] * stride)
        return y.movedim(1, -1)

    return function


def declines_torch(case, direction, platform):
    *_, k, stride = case.shape
    return "has fewer results than SAME" if k < stride else None


def cost(case: Case, direction: Direction) -> Cost:
    n, c, s, o, k, stride = case.shape
    rank = case.options["rank"]
    x, y = n * s**rank * c, n * (s * stride) ** rank * o
    kernel = k**rank * c * o // groups(case)
    of_direction = {
        "forward": (x + kernel + y, 1),
        "backward": (2 * x + 2 * kernel + y, 2),
        "value_and_grad": (2 * x + 2 * kernel + 2 * y, 3),
    }
    entries, products = of_direction[direction.name]
    half = f"matmul {case.dtype}"
    return Cost(
        bytes=entries * (8 if case.dtype == "float64" else 4 if case.dtype == "float32" else 2),
        flops=2 * products * n * s**rank * k**rank * c * o // groups(case),
        unit=half if case.dtype.endswith("16") else f"fma {case.dtype}",
    )


def terms(case: Case, direction: Direction) -> int:
    n, c, s, o, k, _ = case.shape
    rank = case.options["rank"]
    return max(k**rank * max(c, o), n * s**rank) if direction.wrt else k**rank * c


BENCHMARK = Benchmark(
    operator="conv_transpose",
    shape="N,C,S,O,K,stride",
    cases=CASES,
    directions=directions(0, 1),
    arguments=arguments,
    function=ours,
    reference=transpose,
    peers=(
        Peer("XLA transpose", transpose),
        Peer("torch", torch_transpose, declines=declines_torch, torch=True),
    ),
    cost=cost,
    terms=terms,
)
