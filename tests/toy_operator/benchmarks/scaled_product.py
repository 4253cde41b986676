"""The scaled product against XLA. Shapes are (rows, width)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Cost, Peer, cases, directions, normal
from jaxops.reference import scaled_product as reference

CASES = [
    *cases("small", (8, 64), ["float32", "bfloat16"]),
    *cases("typical", (512, 512), "float32"),
    *cases("large", (8192, 4096), "float32"),
    *cases("odd", (37, 1001), "float64"),
]
for rows in (1, 32, 1024):
    CASES += cases("scaling", (rows, 1024), "float32")


def arguments(case, key):
    return tuple(normal(k, case.shape, case.dtype) for k in jax.random.split(key))


def cost(case, direction):
    passes = 3 * (direction.value + len(direction.wrt))
    entries = case.shape[0] * case.shape[1]
    return Cost(
        bytes=passes * entries * jnp.dtype(case.dtype).itemsize,
        flops=passes * entries,
        unit="fma float64" if case.dtype == "float64" else "fma float32",
    )


def xla(case):
    return functools.partial(reference.scaled_product, scale=2.0)


BENCHMARK = Benchmark(
    operator="scaled_product",
    shape="rows,width",
    cases=CASES,
    directions=directions(0, 1),
    arguments=arguments,
    function=lambda case: functools.partial(jaxops.scaled_product, scale=2.0),
    reference=xla,
    peers=(Peer("XLA", xla),),
    cost=cost,
    terms=lambda case, direction: 1,
)
