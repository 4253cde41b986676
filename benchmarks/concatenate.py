"""concatenate against XLA and PyTorch. Shapes are those of the result, without padding.

`parts` lists the extents along the axis: "63+65" are two arrays, "16x32" are sixteen.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, directions, normal

# fmt: off
CASES = [
    *cases("small", (8, 16, 16, 64), ["bfloat16", "float32"], parts="32+32", axis=3),
    *cases("small", (4, 1000), "float32", parts="4x250", axis=1),
    *cases("small", (64, 512), "bfloat16", parts="32+32", axis=0),
    # U-Nets concatenate skip connections, channel-last and channel-first; a DenseNet, its blocks.
    *cases("typical", (16, 128, 128, 128), "bfloat16", parts="64+64", axis=3, target=True),
    *cases("typical", (64, 28, 28, 512), "bfloat16", parts="16x32", axis=3, target=True),
    *cases("typical", (16, 128, 128, 192), ["bfloat16", "float32"], parts="64+128", axis=3),
    *cases("typical", (16, 192, 128, 128), "bfloat16", parts="64+128", axis=1),
    *cases("typical", (64, 28, 28, 256), "float32", parts="8x32", axis=3),
    *cases("typical", (4096, 4096), ["bfloat16", "float64"], parts="2x2048", axis=0),
    *cases("large", (16, 256, 128, 128), "float32", parts="64+192", axis=1, target=True),
    *cases("large", (64, 512, 512, 4), "uint8", parts="2+2", axis=3),
    *cases("large", (8192, 8192), "float32", parts="2x4096", axis=0),
    *cases("large", (64, 128, 4096), "bfloat16", parts="64x64", axis=2),
    *cases("large", (32, 128, 128, 128), "float64", parts="64+64", axis=3),
    # No vector access divides these widths; some are RGB and alpha.
    *cases("odd", (16, 128, 128, 128), ["bfloat16", "float32"], parts="63+65", axis=3),
    *cases("odd", (64, 512, 512, 4), "uint8", parts="3+1", axis=3),
    *cases("odd", (64, 512, 512, 3), ["uint8", "float16"], parts="3x1", axis=3),
    *cases("odd", (64, 512, 512, 3), "float16", parts="1x3", axis=3, padded=8),
    *cases("odd", (16, 128, 128, 125), "bfloat16", parts="61+64", axis=3, padded=128),
    *cases("odd", (65_536, 320), "bfloat16", parts="64x5", axis=1),
    *cases("odd", (16_384, 2100), ["float32", "uint8"], parts="300x7", axis=1),
    *cases("odd", (11_100, 2049), "float32", parts="300x37", axis=0),
    *cases("odd", (16, 129, 127, 127), "bfloat16", parts="63+66", axis=1),
]
# fmt: on
for rows in (2**n for n in range(6, 21, 2)):
    CASES += cases("scaling", (rows, 128), "bfloat16", parts="63+65", axis=1)


def sizes(case: Case) -> list[int]:
    """The extents of the arrays along the axis."""
    parts = case.options["parts"]
    if "x" in parts:
        count, size = map(int, parts.split("x"))
        return [size] * count
    return [int(size) for size in parts.split("+")]


def padding(case: Case) -> int:
    return case.options.get("padded", sum(sizes(case))) - sum(sizes(case))


def arguments(case, key):
    axis = case.options["axis"]
    shapes = [(*case.shape[:axis], n, *case.shape[axis + 1 :]) for n in sizes(case)]
    make = normal if jnp.issubdtype(case.dtype, jnp.floating) else jax.random.bits
    if len(set(shapes)) == 1:
        # One generator compiles in a fraction of the time that hundreds take.
        return (list(make(key, (len(shapes), *shapes[0]), case.dtype)),)
    keys = jax.random.split(key, len(shapes))
    return ([make(k, shape, case.dtype) for k, shape in zip(keys, shapes, strict=True)],)


def ours(case):
    options = {"axis": case.options["axis"], "padded_size": case.options.get("padded")}
    return lambda arrays: jaxops.concatenate(arrays, **options)


def by_xla(case):
    def function(arrays):
        axis, first = case.options["axis"], arrays[0]
        zeros = (*first.shape[:axis], padding(case), *first.shape[axis + 1 :])
        tail = [jnp.zeros(zeros, first.dtype)] if padding(case) else []
        return jnp.concatenate([*arrays, *tail], axis)

    return function


def by_torch(case):
    import torch

    def function(arrays):
        whole = torch.cat(arrays, case.options["axis"])
        # The axis of the padded cases is the last.
        return torch.nn.functional.pad(whole, (0, padding(case))) if padding(case) else whole

    return function


def makes_views(case: Case, direction: Direction, platform: str) -> str | None:
    return None if direction.name == "forward" else "its gradients are views of the cotangent"


def cost(case: Case, direction: Direction) -> Cost:
    entries = 1
    for n in case.shape:
        entries *= n
    written = entries // sum(sizes(case)) * (sum(sizes(case)) + padding(case))
    # The gradient does not read the padding.
    count = entries + (written if direction.name == "forward" else entries)
    return Cost(bytes=count * jnp.dtype(case.dtype).itemsize)


BENCHMARK = Benchmark(
    operator="concatenate",
    shape="the result's",
    cases=CASES,
    directions=directions(0)[:2],
    arguments=arguments,
    function=ours,
    reference=by_xla,
    peers=(
        Peer("XLA concatenate", by_xla),
        Peer("torch.cat", by_torch, torch=True, declines=makes_views),
    ),
    cost=cost,
    terms=lambda case, direction: 0,
)
