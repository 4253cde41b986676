"""Concatenation and splitting along every kind of axis, with and without padding."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import concatenate as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal


def _bad(function, name, call, error, *fragments):
    return BadInput(name=name, call=call, error=error, fragments=(f"{function}: ", *fragments))


def _placements(axis, rank, arrays, results, gathered):
    """By every dimension but the axis, by two of them, and by the axis where shards are equal.

    Rows are independent of each other. Along the axis a shard of the result is made of shards that
    other devices have: the arguments are gathered, and what is made of them is whole on each.
    """

    def placement(name, names):
        spec = P(*(names.get(d) for d in range(rank)))
        collectives = {"all-gather": arrays} if axis in names else {}
        return Placement(
            name=name,
            axes=tuple(names.values()),
            arguments=(spec,) * arrays,
            results=(P(*(names.get(d) if d != axis else None for d in range(rank))),) * results,
            forward=collectives,
            backward=collectives,  # those of the value: the gradient cuts what is whole
            manual=axis not in names,
        )

    others = [d for d in range(rank) if d != axis]
    yield from (placement(f"dimension {d}", {d: "n"}) for d in others)
    for a, b in itertools.combinations(others, 2):
        yield placement(f"dimensions {a} and {b}", {a: "n", b: "c"})
    if gathered:
        yield placement("the axis", {axis: "n"})


class Shape:
    """A shape with None at the axis, of a small case and of a large one that devices divide."""

    def __init__(self, *dims):
        self.axis = dims.index(None)
        self.rank = len(dims)
        self._dims = dims

    def __repr__(self):
        return f"Shape{self._dims}"

    def array(self, rng, dtype, extent, scale=1):
        """Numbers of this shape with `extent` entries along the axis, `scale` times in others."""
        shape = [extent if n is None else n * scale for n in self._dims]
        return normal(rng, tuple(shape), dtype)


def _empty(shape, arguments, **nothing):
    cases = {"nothing along the axis": functools.partial(arguments, **nothing)}
    if shape.rank > 1:
        cases["no rows"] = functools.partial(arguments, scale=0)
    return cases


# --- concatenate ---------------------------------------------------------------------------------

_CONCATENATE_BAD_INPUTS = tuple(
    itertools.starmap(
        functools.partial(_bad, "concatenate"),
        (
            ("no arrays", lambda *_: jaxops.concatenate([]), ValueError, "arrays", "got []"),
            (
                "no sequence",
                lambda *_: jaxops.concatenate(None),
                TypeError,
                "arrays must be a sequence of arrays, got NoneType",
            ),
            (
                "a scalar for all arrays",
                lambda *_: jaxops.concatenate(np.zeros(())),
                ValueError,
                "arrays must have one dimension or more, got a scalar",
            ),
            (
                "what is no number",
                lambda *_: jaxops.concatenate([np.array(["a"])]),
                TypeError,
                "arrays[0] must be an array of numbers that JAX has, got <U1",
            ),
            (
                "dtypes that have none in common",
                lambda *_: jaxops.concatenate([jax.random.key(0)[None], np.zeros(1)]),
                TypeError,
                "arrays must have dtypes that promote to one as in jax.numpy, got key<",
            ),
            (
                "a size for all arrays",
                lambda *_: jaxops.concatenate([np.zeros(2)] * 2, sizes=np.array(2)),
                TypeError,
                "sizes must be a sequence of integers, got an array of shape () and dtype int64",
            ),
            (
                "a padded size that is no number of entries",
                lambda *_: jaxops.concatenate([np.zeros(2)], padded_size=2**63),
                ValueError,
                "padded_size must be at most 9223372036854775807, got 9223372036854775808",
            ),
            (
                "something that is no array",
                lambda x, *_: jaxops.concatenate([x, "text"]),
                TypeError,
                "arrays[1] must be an array, got str",
            ),
            (
                "a scalar",
                lambda x, *_: jaxops.concatenate([x, np.zeros(())]),
                ValueError,
                "arrays[1] must have one dimension or more, got a scalar",
            ),
            (
                "arrays of two ranks",
                lambda x, *_: jaxops.concatenate([x, x[None]]),
                ValueError,
                "arrays[1] must have the shape of arrays[0] except along axis 0",
            ),
            (
                "shapes that do not fit",
                lambda *_: jaxops.concatenate([np.zeros((2, 3)), np.zeros((2, 4))]),
                ValueError,
                "arrays[1] must have the shape of arrays[0] except along axis 0, (2, 3)",
                "got (2, 4)",
            ),
            (
                "an axis beyond the rank",
                lambda x, *_: jaxops.concatenate([x], x.ndim),
                ValueError,
                "axis must be in [-",
            ),
            (
                "an axis that is no integer",
                lambda x, *_: jaxops.concatenate([x], 0.0),
                TypeError,
                "axis must be a static integer, got 0.0",
            ),
            (
                "too few sizes",
                lambda x, *_: jaxops.concatenate([x, x], sizes=[1]),
                ValueError,
                "sizes must have one entry for each of the 2 arrays, got 1",
            ),
            (
                "a size beyond its array",
                lambda *_: jaxops.concatenate([np.zeros(3), np.zeros(4)], sizes=[3, 5]),
                ValueError,
                "sizes[1] must be in [0, 4], got 5",
            ),
            (
                "sizes that are no sequence",
                lambda x, *_: jaxops.concatenate([x], sizes=1),
                TypeError,
                "sizes must be a sequence of integers, got 1",
            ),
            (
                "a padded size below the sum",
                lambda *_: jaxops.concatenate([np.zeros(3), np.zeros(4)], padded_size=6),
                ValueError,
                "padded_size must be >= 7, got 6",
            ),
        ),
    )
)


def make_concatenate_spec(variant, shape, extents, large, *, unused=None, padding=0, axis=None):
    """The last `unused[i]` entries of array i are invalid; `padding` zeros follow them all."""
    axis = shape.axis if axis is None else axis
    unused = unused or (0,) * len(extents)

    def options(arrays):
        extents = [a.shape[shape.axis] for a in arrays]
        sizes = [max(0, e - n) for e, n in zip(extents, unused, strict=True)]
        padded = sum(sizes) + padding if padding else None
        return {"sizes": sizes if any(unused) else None, "padded_size": padded}

    def arguments(rng, dtype, extents=extents, scale=1):
        return tuple(shape.array(rng, dtype, extent, scale) for extent in extents)

    gathered = all(extent % 8 == 0 for extent in large)
    return OperatorSpec(
        operator="concatenate",
        variant=variant,
        function=lambda *arrays: jaxops.concatenate(arrays, axis, **options(arrays)),
        reference=lambda *arrays: reference.concatenate(arrays, axis, **options(arrays)),
        arguments=arguments,
        large=functools.partial(arguments, extents=large, scale=8),
        differentiable=tuple(range(len(extents))),
        calls={"jaxops_concatenate": 1},
        vjp_calls={"jaxops_concatenate": 1, "jaxops_split": 1},
        value_terms=lambda *_: 0,
        vjp_terms=lambda *_: 0,
        placements=tuple(_placements(shape.axis, shape.rank, len(extents), 1, gathered)),
        empty=_empty(shape, arguments, extents=(0,) * len(extents)),
        bad_inputs=_CONCATENATE_BAD_INPUTS,
        checkpoint_name="concatenate",
    )


# --- split ---------------------------------------------------------------------------------------

_SPLIT_BAD_INPUTS = tuple(
    itertools.starmap(
        functools.partial(_bad, "split"),
        (
            (
                "something that is no array",
                lambda x: jaxops.split([1.0], [1]),
                TypeError,
                "array must be an array, got list",
            ),
            (
                "a scalar",
                lambda x: jaxops.split(np.zeros(()), [1]),
                ValueError,
                "array must have one dimension or more, got a scalar",
            ),
            (
                "sizes of another sum",
                lambda x: jaxops.split(np.zeros((2, 5)), [2, 2], 1),
                ValueError,
                "sizes must sum to 5, the extent of array (2, 5) along axis 1, got (2, 2)",
            ),
            (
                "a negative size",
                lambda x: jaxops.split(np.zeros(5), [6, -1]),
                ValueError,
                "sizes[1] must be >= 0, got -1",
            ),
            (
                "sizes that are no integers",
                lambda x: jaxops.split(np.zeros(5), [2.5, 2.5]),
                TypeError,
                "sizes[0] must be a static integer, got 2.5",
            ),
            (
                "an axis beyond the rank",
                lambda x: jaxops.split(x, [1], -1 - x.ndim),
                ValueError,
                "axis must be in [-",
            ),
            (
                "too many padded sizes",
                lambda x: jaxops.split(np.zeros(5), [2, 3], padded_sizes=[2, 3, 4]),
                ValueError,
                "padded_sizes must have one entry for each of the 2 sizes, got 3",
            ),
            (
                "a padded size below its size",
                lambda x: jaxops.split(np.zeros(5), [2, 3], padded_sizes=[2, 2]),
                ValueError,
                "padded_sizes[1] must be >= 3, got 2",
            ),
        ),
    )
)


def make_split_spec(variant, shape, first, *, rest, large_rest, padding=None, axis=None):
    """The parts have `first` entries and the last of them what is left; zeros follow each."""
    axis = shape.axis if axis is None else axis

    def options(array):
        extent = array.shape[shape.axis]
        sizes = first if extent else (0,) * len(first)
        sizes = (*sizes, extent - sum(sizes))
        padded = [s + n for s, n in zip(sizes, padding, strict=True)] if padding else None
        return {"sizes": sizes, "padded_sizes": padded}

    extent, large_extent = (sum(first) + n for n in (rest, large_rest))

    def arguments(rng, dtype, extent=extent, scale=1):
        return (shape.array(rng, dtype, extent, scale),)

    parts = len(first) + 1
    return OperatorSpec(
        operator="split",
        variant=variant,
        function=lambda array: jaxops.split(array, axis=axis, **options(array)),
        reference=lambda array: reference.split(array, axis=axis, **options(array)),
        arguments=arguments,
        large=functools.partial(arguments, extent=large_extent, scale=8),
        differentiable=(0,),
        calls={"jaxops_split": 1},
        vjp_calls={"jaxops_concatenate": 1, "jaxops_split": 1},
        value_terms=lambda *_: 0,
        vjp_terms=lambda *_: 0,
        placements=tuple(_placements(shape.axis, shape.rank, 1, parts, large_extent % 8 == 0)),
        empty=_empty(shape, arguments, extent=0),
        bad_inputs=_SPLIT_BAD_INPUTS,
        checkpoint_name="split",
    )


SPECS = (
    make_concatenate_spec("last axis", Shape(2, 3, None), (3, 5), (64, 72), axis=-1),
    make_concatenate_spec("first axis", Shape(None, 3, 2), (2, 1), (8, 16)),
    make_concatenate_spec("middle axis, odd", Shape(2, None, 3), (3, 4), (63, 65)),
    make_concatenate_spec(
        "padded channels", Shape(2, 2, None), (4, 2), (40, 24), unused=(1, 0), padding=3
    ),
    make_concatenate_spec("three arrays", Shape(2, None), (3, 2, 1), (31, 8, 5), axis=-1),
    make_concatenate_spec("one dimension", Shape(None), (3, 4), (4096, 40_000)),
    make_concatenate_spec("one array, padded", Shape(2, None), (3,), (130,), padding=5),
    make_split_spec("last axis", Shape(2, 3, None), (3,), rest=2, large_rest=133, axis=-1),
    make_split_spec("first axis", Shape(None, 3, 2), (2, 1), rest=1, large_rest=13),
    make_split_spec("middle axis, odd", Shape(2, None, 3), (3,), rest=4, large_rest=126),
    make_split_spec(
        "padded channels", Shape(2, 2, None), (3, 1), rest=2, large_rest=60, padding=(1, 0, 2)
    ),
    make_split_spec("one dimension", Shape(None), (3,), rest=4, large_rest=70_005),
)
