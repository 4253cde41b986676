"""split against XLA and PyTorch, on the cases of concatenate without padding."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench import registry
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, directions

JOINED = registry.load("concatenate")


def sizes(case: Case) -> list[int]:
    (arrays,) = jax.eval_shape(lambda key: JOINED.arguments(case, key), jax.random.key(0))
    return [array.shape[case.options["axis"]] for array in arrays]


def arguments(case, key):
    return (JOINED.reference(case)(*JOINED.arguments(case, key)),)


def ours(case):
    parts, axis = sizes(case), case.options["axis"]
    return lambda array: jaxops.split(array, parts, axis)


def by_xla(case):
    ends, axis = list(itertools.accumulate(sizes(case))), case.options["axis"]
    return lambda array: tuple(jnp.split(array, ends[:-1], axis))


def by_torch(case):
    """Copies of the parts: PyTorch's own split is a view."""
    parts, axis = sizes(case), case.options["axis"]
    return lambda array: [part.clone() for part in array.split(parts, axis)]


def cost(case: Case, direction: Direction) -> Cost:
    return JOINED.cost(case, direction)


BENCHMARK = Benchmark(
    operator="split",
    shape="the array's",
    cases=[case for case in JOINED.cases if "padded" not in case.options],
    directions=directions(0)[:2],
    arguments=arguments,
    function=ours,
    reference=by_xla,
    peers=(
        Peer("XLA slices", by_xla),
        Peer("torch.split", by_torch, torch=True),
    ),
    cost=cost,
    terms=lambda case, direction: 0,
)
