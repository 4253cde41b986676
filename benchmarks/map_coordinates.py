"""map_coordinates against XLA. Shapes are (points, sizes of the array)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, normal
from jaxops.reference import map_coordinates as reference

# fmt: off
CASES = [
    *cases("small", (1000, 64, 64), "float32", order=1, mode="nearest"),
    *cases("typical", (100_000, 4096), "float32", order=1, mode="nearest"),
    *cases("typical", (100_000, 256, 256), "float32", order=[0, 1, 3], mode="nearest"),
    *cases("typical", (100_000, 256, 256), "float32", order=1,
           mode=["constant", "wrap", "reflect"]),
    *cases("typical", (100_000, 64, 64, 64), "float32", order=[1, 3], mode="mirror"),
    *cases("large", (2_000_000, 2048, 2048), "float32", order=1, mode="nearest"),
    *cases("odd", (50_009, 31, 33, 29), "float32", order=1, mode="wrap"),
    *cases("odd", (50_009, 255, 127), "bfloat16", order=1, mode="nearest"),
]
# fmt: on
for points in (2**n for n in range(8, 23, 2)):
    CASES += cases("scaling", (points, 16, 16, 16), "float32", order=1, mode="nearest")

DIRECTIONS = (
    Direction("forward", True, ()),
    Direction("input_grad", False, (0,)),
    Direction("backward", False, (0, 1)),
)


def arguments(case, key):
    count, *sizes = case.shape
    of_input, of_points = jax.random.split(key)
    wide = jnp.promote_types(case.dtype, jnp.float32)
    at = jax.random.uniform(of_points, (len(sizes), count), wide, -0.1, 1.1)
    at = at * jnp.array(sizes, wide)[:, None]
    # Gradients jump at entries, and rounding decides on which side.
    whole = jnp.floor(at)
    return normal(of_input, tuple(sizes), case.dtype), whole + jnp.clip(at - whole, 0.01, 0.99)


def ours(case):
    return lambda x, at: jaxops.map_coordinates(x, at, case.options["order"], case.options["mode"])


def by_xla(case):
    """JAX's for orders 0 and 1, and the sum over entries in jax.numpy for splines."""
    order, mode = case.options["order"], case.options["mode"]
    if order == 3:
        return lambda x, at: reference.map_coordinates(x, at, order, mode)
    return lambda x, at: jax.scipy.ndimage.map_coordinates(x, list(at), order, mode)


def cost(case: Case, direction: Direction) -> Cost:
    count, *sizes = case.shape
    itemsize = jnp.dtype(case.dtype).itemsize
    taps = {0: 1, 1: 2, 3: 4}[case.options["order"]] ** len(sizes)
    by_input, by_points = 0 in direction.wrt, 1 in direction.wrt
    size = math.prod(sizes) * itemsize
    return Cost(
        bytes=size * (direction.value + by_points + by_input)
        + count * itemsize * (direction.value + bool(direction.wrt))
        + count * len(sizes) * max(4, itemsize) * (1 + by_points),
        flops=2 * taps * count * (direction.value + len(direction.wrt)),
    )


def terms(case: Case, direction: Direction) -> int:
    count, *sizes = case.shape
    crowd = -(-count * 4 ** len(sizes)) // math.prod(sizes)
    return 64 * max(sizes) + crowd


BENCHMARK = Benchmark(
    operator="map_coordinates",
    shape="P,sizes",
    cases=CASES,
    directions=DIRECTIONS,
    arguments=arguments,
    function=ours,
    reference=by_xla,
    peers=(Peer("XLA map_coordinates", by_xla),),
    cost=cost,
    terms=terms,
    # The limit counts the array once, and random reads of its entries cannot reach that.
    near_limit=False,
)
