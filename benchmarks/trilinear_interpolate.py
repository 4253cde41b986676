"""trilinear_interpolate against XLA and PyTorch. Shapes are (cells, features)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, normal

# fmt: off
CASES = [
    *cases("small", (4096, 4), "float32"),
    *cases("small", (1024, 32), ["float32", "bfloat16"]),
    # Grids of radiance fields have few features and many samples; those of networks are wide.
    *cases("typical", (262_144, 16), ["float32", "bfloat16", "float16"]),
    *cases("typical", (200_000, 4), "float32"),
    *cases("typical", (50_000, 32), "float32"),
    *cases("typical", (65_536, 64), ["float32", "bfloat16"]),
    *cases("typical", (1_048_576, 2), ["float32", "bfloat16"]),
    *cases("large", (65_536, 256), "float32", target=True),
    *cases("large", (4_194_304, 4), "float32", target=True),
    *cases("large", (4_194_304, 8), "bfloat16"),
    *cases("large", (8_388_608, 1), ["float32", "bfloat16"]),
    *cases("large", (65_536, 512), "bfloat16"),
    *cases("large", (8192, 2048), "float32"),
    *cases("odd", (1_000_003, 3), ["float32", "bfloat16"]),
    *cases("odd", (262_147, 5), ["float32", "bfloat16"]),
    *cases("odd", (262_147, 7), "float32"),
    *cases("odd", (131_101, 9), "float32"),
    *cases("odd", (131_101, 15), "float32"),
    *cases("odd", (262_147, 33), ["float32", "bfloat16"]),
    *cases("odd", (65_537, 129), ["float32", "float16"]),
    *cases("odd", (16_385, 1_023), ["float32", "bfloat16"]),
    *cases("odd", (1_048_577, 12), "float32"),
    *cases("odd", (262_144, 16), "float64"),
]
# fmt: on
for cells in (2**n for n in range(8, 23, 2)):
    CASES += cases("scaling", (cells, 8), "float32")

DIRECTIONS = (
    Direction("forward", True, ()),
    Direction("feature_grad", False, (0,)),
    Direction("point_grad", False, (1,)),
    Direction("backward", False, (0, 1)),
    Direction("value_and_grad", True, (0, 1)),
)


def arguments(case, key):
    cells, features = case.shape
    of_features, of_points = jax.random.split(key)
    points = jax.random.uniform(of_points, (cells, 3), jnp.float32, -1, 1)
    return normal(of_features, (cells, 8, features), case.dtype), points.astype(case.dtype)


def ours(case):
    return jaxops.trilinear_interpolate


def weighted_sum(case):
    """Eight products that XLA fuses into one pass over the features."""

    def function(features, points):
        wide = jnp.promote_types(features.dtype, jnp.float32)
        upper = (points.astype(wide) + 1) / 2
        factors = (1 - upper, upper)
        total = 0
        for c in range(8):
            weight = factors[c >> 2][:, 0] * factors[c >> 1 & 1][:, 1] * factors[c & 1][:, 2]
            total = total + weight[:, None] * features[:, c].astype(wide)
        return total.astype(features.dtype)

    return function


def batched_product(case):
    """The weights of every cell times its features, as a product of matrices."""

    def function(features, points):
        wide = jnp.promote_types(features.dtype, jnp.float32)
        upper = (points.astype(wide) + 1) / 2
        u, v, w = (jnp.stack([1 - upper[:, i], upper[:, i]], -1) for i in range(3))
        weights = (u[:, :, None, None] * v[:, None, :, None] * w[:, None, None, :]).reshape(-1, 8)
        product = jnp.einsum("nc,ncf->nf", weights, features.astype(wide), precision="highest")
        return product.astype(features.dtype)

    return function


def plain_sum(case):
    """The formula as users write it, with the corners in a dimension that is summed."""

    def function(features, points):
        wide = jnp.promote_types(features.dtype, jnp.float32)
        upper = (points.astype(wide) + 1) / 2
        u, v, w = (jnp.stack([1 - upper[:, i], upper[:, i]], -1) for i in range(3))
        weights = (u[:, :, None, None] * v[:, None, :, None] * w[:, None, None, :]).reshape(-1, 8)
        total = (weights[:, :, None] * features.astype(wide)).sum(1)
        return total.astype(features.dtype)

    return function


def torch_sum(case):
    import torch

    def function(features, points):
        wide = torch.promote_types(features.dtype, torch.float32)
        upper = (points.to(wide) + 1) / 2
        factors = (1 - upper, upper)
        total = 0
        for c in range(8):
            weight = factors[c >> 2][:, 0] * factors[c >> 1 & 1][:, 1] * factors[c & 1][:, 2]
            total = total + weight[:, None] * features[:, c].to(wide)
        return total.to(features.dtype)

    return function


def torch_compiled(case):
    import torch

    return torch.compile(torch_sum(case), dynamic=False, fullgraph=True)


def cost(case: Case, direction: Direction) -> Cost:
    cells, features = case.shape
    # Rows of features of a cell: eight of corners or their gradient, one of value or cotangent.
    rows = {
        "forward": 8 + 1,
        "feature_grad": 1 + 8,
        "point_grad": 8 + 1,
        "backward": 8 + 1 + 8,
        "value_and_grad": 8 + 1 + 1 + 8,
    }[direction.name]
    points = 3 + 3 * (1 in direction.wrt)
    products = 8 * (direction.value + len(direction.wrt))
    return Cost(
        bytes=cells * (rows * features + points) * jnp.dtype(case.dtype).itemsize,
        flops=2 * products * cells * features,
        unit="fma float64" if case.dtype == "float64" else "fma float32",
    )


def terms(case: Case, direction: Direction) -> int:
    return 8 * case.shape[1] if 1 in direction.wrt else 8


BENCHMARK = Benchmark(
    operator="trilinear_interpolate",
    shape="N,F",
    cases=CASES,
    directions=DIRECTIONS,
    arguments=arguments,
    function=ours,
    reference=weighted_sum,
    peers=(
        Peer("XLA weighted sum", weighted_sum),
        Peer("XLA plain sum", plain_sum),
        Peer("XLA product", batched_product),
        Peer("torch", torch_sum, torch=True),
        Peer("torch.compile", torch_compiled, torch=True, costly=True),
    ),
    cost=cost,
    terms=terms,
)
