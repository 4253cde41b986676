"""conv3d against XLA and PyTorch. Shapes are (N, C, S, O, K, stride).

Images have S entries in each of their `rank` dimensions, kernels have K taps. `conv1d` has the same
functions, with cases of its own.
"""

from __future__ import annotations

import jax

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, directions, normal

# fmt: off
CASES = [
    *cases("small", (1, 16, 8, 16, 3, 1), ["float32", "bfloat16"], rank=3),
    # Layers of networks for volumes and videos.
    *cases("typical", (2, 32, 48, 32, 3, 1), ["float32", "bfloat16"], rank=3),
    *cases("typical", (4, 64, 24, 64, 3, 1), ["float32", "bfloat16"], rank=3),
    *cases("typical", (4, 32, 32, 64, 3, 2), ["float32", "bfloat16"], rank=3),
    *cases("typical", (4, 64, 24, 64, 3, 1), "bfloat16", rank=3, groups=64),
    *cases("large", (2, 64, 64, 64, 3, 1), "bfloat16", rank=3),
    *cases("odd", (2, 13, 11, 18, 3, 1), ["float32", "float16"], rank=3),
    *cases("odd", (1, 12, 9, 18, 2, 1), "float64", rank=3, groups=6),
]
# fmt: on
for n in (1, 16, 256, 4096):
    CASES += cases("scaling", (n, 8, 4, 8, 3, 1), "float32", rank=3)

SPACE = "DHW"


def rank(case):
    return case.options["rank"]


def groups(case):
    return case.options.get("groups", 1)


def precision(case):
    """True float32, for peers and for the judge too."""
    return "highest" if case.dtype == "float32" else None


def outputs(case):
    """The entries of y along a dimension."""
    return -(-case.shape[2] // case.shape[-1])


def arguments(case, key):
    n, c, s, o, k, _ = case.shape
    of_x, of_kernel = jax.random.split(key)
    x = normal(of_x, (n, *(s,) * rank(case), c), case.dtype)
    return x, normal(of_kernel, (*(k,) * rank(case), c // groups(case), o), case.dtype)


def ours(case):
    convolve = getattr(jaxops, f"conv{rank(case)}d")

    def function(x, kernel):
        options = {"strides": case.shape[-1], "groups": groups(case)}
        return convolve(x, kernel, precision=precision(case), **options)

    return function


def convolution(case):
    space = SPACE[3 - rank(case) :]

    def function(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (case.shape[-1],) * rank(case),
            "SAME",
            dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
            feature_group_count=groups(case),
            precision=precision(case),
        )

    return function


def torch_convolution(case):
    import torch

    _, _, s, _, k, stride = case.shape
    convolve = getattr(torch.nn.functional, f"conv{rank(case)}d")
    total = max(0, (outputs(case) - 1) * stride + k - s)
    pads = (total // 2, total - total // 2)

    def function(x, kernel):
        x, kernel = x.movedim(-1, 1), kernel.movedim((-1, -2), (0, 1))
        padding = pads[0]
        if pads[0] != pads[1]:
            x, padding = torch.nn.functional.pad(x, pads * rank(case)), 0
        y = convolve(x, kernel, stride=stride, padding=padding, groups=groups(case))
        return y.movedim(1, -1)

    return function


def products(case):
    n, c, _, o, k, _ = case.shape
    return n * outputs(case) ** rank(case) * k ** rank(case) * c * o // groups(case)


def cost(case: Case, direction: Direction) -> Cost:
    n, c, s, o, k, _ = case.shape
    x, y = n * s ** rank(case) * c, n * outputs(case) ** rank(case) * o
    kernel = k ** rank(case) * c * o // groups(case)
    entries, passes = {
        "forward": (x + kernel + y, 1),
        "backward": (2 * x + 2 * kernel + y, 2),
        "value_and_grad": (2 * x + 2 * kernel + 2 * y, 3),
    }[direction.name]
    is_half = case.dtype.endswith("16") and groups(case) < c
    dtype = "float64" if case.dtype == "float64" else "float32"
    return Cost(
        bytes=entries * (8 if case.dtype == "float64" else 4 if case.dtype == "float32" else 2),
        flops=2 * passes * products(case),
        unit=f"matmul {case.dtype}" if is_half else f"fma {dtype}",
    )


def terms(case: Case, direction: Direction) -> int:
    n, c, _, o, k, _ = case.shape
    if direction.wrt:
        return max(k ** rank(case) * max(c, o), n * outputs(case) ** rank(case))
    return k ** rank(case) * c // groups(case)


BENCHMARK = Benchmark(
    operator="conv3d",
    shape="N,C,S,O,K,stride",
    cases=CASES,
    directions=directions(0, 1),
    arguments=arguments,
    function=ours,
    reference=convolution,
    peers=(
        Peer("XLA conv", convolution),
        Peer("torch", torch_convolution, torch=True),
    ),
    cost=cost,
    terms=terms,
)
