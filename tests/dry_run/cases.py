"""Chosen calls of every operator: for the table of kernels, and for host times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxops
from jaxops.testing import kernels
from jaxops.testing.measure import leaves, vjp_of

FLOATS = ("bfloat16", "float16", "float32", "float64")
FEW = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a public function in some dtypes: `arguments(dtype)`, and what has gradients."""

    name: str
    function: Callable
    arguments: Callable[[Any], tuple]
    differentiable: tuple[int, ...]
    dtypes: tuple[str, ...] = FEW

    def programs(self, dtype: str) -> Iterator[tuple[Callable, tuple]]:
        """The value, each gradient alone, and the value with all of them."""
        arguments = self.arguments(jnp.dtype(dtype))
        yield self.function, arguments
        results = jax.eval_shape(self.function, *arguments)
        cotangents = tuple(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in leaves(results))
        alone = [(i,) for i in self.differentiable] if len(self.differentiable) > 1 else []
        for moved in [*alone, self.differentiable]:
            if moved:
                yield vjp_of(self.function, moved), (cotangents, *arguments)

    def calls(self, capability: str, dtype: str) -> tuple[kernels.Call, ...]:
        """The calls of handlers in these programs."""
        found = {}
        for function, arguments in self.programs(dtype):
            found |= dict.fromkeys(kernels.record(function, *arguments, capability=capability))
        return tuple(found)


def _array(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def _join(name, shapes, axis, dtypes=FEW):
    return Case(
        f"concatenate {name}",
        lambda *arrays: jaxops.concatenate(arrays, axis),
        lambda d: tuple(_array(*s, dtype=d) for s in shapes),
        tuple(range(len(shapes))),
        dtypes,
    )


def _conv(name, x, kernel, dtypes=FEW, function=jaxops.conv2d, **options):
    return Case(
        f"conv2d {name}",
        functools.partial(function, **options),
        lambda d: (_array(*x, dtype=d), _array(*kernel, dtype=d)),
        (0, 1),
        dtypes,
    )


def _loss(function, name, rows, classes, dtypes=FEW, targets=None, **options):
    def arguments(d):
        if targets is None:
            return _array(rows, classes, dtype=d), _array(rows, dtype=jnp.int32)
        of_logits = _array(rows, classes, dtype=d if targets == "floats" else targets)
        return _array(rows, classes, dtype=d), of_logits

    options = {"reduction": "none", **options}
    return Case(
        f"{function.__name__} {name}",
        functools.partial(function, **options),
        arguments,
        (0,),
        dtypes,
    )


def _losses_of_entries(function, entries, rows, classes, dtypes=FEW, reduction="mean"):
    return Case(
        f"{function.__name__} {entries} entries of {rows} rows, {classes} classes, {reduction}",
        jax.vmap(functools.partial(function, reduction=reduction)),
        lambda d: (
            _array(entries, rows, classes, dtype=d),
            _array(entries, rows, dtype=jnp.int32),
        ),
        (0,),
        dtypes,
    )


def _sample(name, volume, points, dtypes=FEW, **options):
    return Case(
        f"grid_sample {name}",
        functools.partial(jaxops.grid_sample, **options),
        lambda d: (_array(*volume, dtype=d), _array(*points, dtype=d)),
        (0, 1),
        dtypes,
    )


def _trilinear(name, cells, features, dtypes=FEW):
    return Case(
        f"trilinear_interpolate {name}",
        jaxops.trilinear_interpolate,
        lambda d: (_array(cells, 8, features, dtype=d), _array(cells, 3, dtype=d)),
        (0, 1),
        dtypes,
    )


def _patches(name, x, taps, dtypes=FEW, **options):
    return Case(
        f"im2col {name}",
        functools.partial(jaxops.im2col, kernel_size=taps, **options),
        lambda d: (_array(*x, dtype=d),),
        (0,),
        dtypes,
    )


def _lightweight(name, x, weight, dtypes=FEW, weight_dtype=None, **options):
    return Case(
        f"lightweight_conv {name}",
        functools.partial(jaxops.lightweight_conv, **options),
        lambda d: (_array(*x, dtype=d), _array(*weight, dtype=weight_dtype or d)),
        (0, 1),
        dtypes,
    )


def _step(name, x, state, weight, dtypes=FEW, indices=False, **options):
    def function(x, state, weight, *indices):
        given = {"state_indices": indices[0]} if indices else {}
        return jaxops.lightweight_conv_step(x, state, weight, **given, **options)

    def arguments(d):
        given = (_array(x[0], dtype=jnp.int32),) if indices else ()
        return (*(_array(*shape, dtype=d) for shape in (x, state, weight)), *given)

    return Case(f"lightweight_conv_step {name}", function, arguments, (), dtypes)


def _dynamic_step(name, x, state, heads, taps, dtypes=FEW, **options):
    return Case(
        f"dynamic_conv_step {name}",
        functools.partial(jaxops.dynamic_conv_step, **options),
        lambda d: (
            _array(*x, dtype=d),
            _array(*state, dtype=d),
            _array(*x[:-1], heads, taps, dtype=d),
        ),
        (),
        dtypes,
    )


def _packed(name, x, weight, dtypes=FEW, state=None, **options):
    """Segments, and with `state`, the shape of one, states."""

    def convolve(x, weight, ids, *rest):
        state = rest[0] if rest else None
        return jaxops.lightweight_conv(x, weight, segment_ids=ids, initial_state=state, **options)

    time = x[2] if options.get("data_format") == "NCT" else x[1]

    def arguments(d):
        ids = _array(x[0], time, dtype=jnp.int32)
        states = () if state is None else (_array(*state, dtype=d),)
        return _array(*x, dtype=d), _array(*weight, dtype=d), ids, *states

    return Case(
        f"lightweight_conv of segments, {name}",
        convolve,
        arguments,
        (0, 1) if state is None else (0, 1, 3),
        dtypes,
    )


def _dynamic(name, x, heads, taps, dtypes=FEW, **options):
    time = x[2 if options.get("data_format") == "NCT" else 1]
    return Case(
        f"dynamic_conv {name}",
        functools.partial(jaxops.dynamic_conv, **options),
        lambda d: (_array(*x, dtype=d), _array(x[0], time, heads, taps, dtype=d)),
        (0, 1),
        dtypes,
    )


def _ragged(name, x, weight, sequences, slots, dtypes=FEW):
    def convolve(x, weight, cache, starts, indices):
        return jaxops.ragged_conv(x, weight, starts, initial_state=cache, state_indices=indices)

    def arguments(d):
        cache = _array(slots, weight[1] - 1, x[1], dtype=d)
        starts, indices = (_array(n, dtype=jnp.int32) for n in (sequences + 1, sequences))
        return _array(*x, dtype=d), _array(*weight, dtype=d), cache, starts, indices

    return Case(f"ragged_conv {name}", convolve, arguments, (0, 1, 2), dtypes)


def _general(name, x, kernel, dtypes=FEW, **options):
    spatial = "DHW"[-(len(x) - 2) :]
    options.setdefault("dimension_numbers", (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"))
    options.setdefault("window_strides", (1,) * len(spatial))
    options.setdefault("padding", "VALID")
    case = _conv(name, x, kernel, dtypes, jaxops.conv_general_dilated, **options)
    return dataclasses.replace(case, name=f"conv_general_dilated {name}")


_sigmoid = functools.partial(_loss, jaxops.sigmoid_focal_loss)
_softmax = functools.partial(_loss, jaxops.softmax_focal_loss)

CASES = (
    _join("2 x (8, 56, 56, 64) channels", [(8, 56, 56, 64)] * 2, 3, FLOATS),
    _join("3 odd rows", [(1000, n) for n in (7, 13, 64)], 1),
    _join("4 vectors", [(100_000,)] * 4, 0),
    _join("100 pieces", [(64, n % 9 + 1) for n in range(100)], 1),
    _conv("3x3, 64 to 128 channels", (8, 56, 56, 64), (3, 3, 64, 128), FLOATS),
    _conv("1x1, 256 to 512 channels", (16, 28, 28, 256), (1, 1, 256, 512)),
    _conv("3x3, stride 2", (16, 28, 28, 256), (3, 3, 256, 512), strides=2),
    _conv("3x3, small images", (4, 7, 7, 512), (3, 3, 512, 512)),
    _conv("7x7, stride 2, 3 channels", (32, 224, 224, 3), (7, 7, 3, 64), FLOATS, strides=2),
    _conv(
        "3x3, 64 to 128 channels, highest precision",
        (8, 56, 56, 64),
        (3, 3, 64, 128),
        ("float32",),
        precision="highest",
    ),
    _conv(
        "3x3, 256 channels, highest precision",
        (32, 28, 28, 256),
        (3, 3, 256, 256),
        ("float32",),
        precision="highest",
    ),
    _conv(
        "3x3, 9 to 10 channels, highest precision",
        (2, 20, 20, 9),
        (3, 3, 9, 10),
        ("float32",),
        precision="highest",
    ),
    _conv("3x3, depthwise", (16, 56, 56, 128), (3, 3, 1, 128), FLOATS, groups=128),
    _conv("7x7, depthwise", (8, 28, 28, 384), (7, 7, 1, 384), groups=384),
    _conv("3x3, groups of 4", (16, 56, 56, 128), (3, 3, 4, 128), FLOATS, groups=32),
    _conv("3x3, groups of 16", (16, 56, 56, 128), (3, 3, 16, 128), FLOATS, groups=8),
    _conv("5x5, one channel", (64, 28, 28, 1), (5, 5, 1, 1)),
    # Other ways than a call of one kernel.
    _conv("13x13", (8, 28, 28, 32), (13, 13, 32, 32), ("bfloat16",)),
    _conv("13x13, depthwise", (8, 28, 28, 64), (13, 13, 1, 64), ("bfloat16",), groups=64),
    _conv(
        "7x7, depthwise, stride 2",
        (8, 28, 28, 64),
        (7, 7, 1, 64),
        ("bfloat16",),
        groups=64,
        strides=2,
    ),
    _conv("9x9, 3 channels", (8, 112, 112, 3), (9, 9, 3, 64), ("bfloat16",)),
    _conv(
        "11x11, stride 4, 3 channels", (8, 227, 227, 3), (11, 11, 3, 64), ("bfloat16",), strides=4
    ),
    _conv(
        "16x16, stride 16, 3 channels",
        (8, 224, 224, 3),
        (16, 16, 3, 768),
        ("bfloat16",),
        strides=16,
    ),
    _conv("3x3, groups of 12", (8, 28, 28, 96), (3, 3, 12, 96), ("bfloat16",), groups=8),
    _conv("3x3, groups of 32 to 4", (8, 28, 28, 256), (3, 3, 32, 32), ("bfloat16",), groups=8),
    _conv("3x3, groups of 64 to 2", (8, 28, 28, 256), (3, 3, 64, 8), ("bfloat16",), groups=4),
    _conv("3x3, 2^30 pixels", (1050, 1024, 1024, 8), (3, 3, 8, 8), ("bfloat16",)),
    _general("one dimension, 5 taps", (16, 4000, 64), (5, 64, 64), FLOATS),
    _general(
        "transposed, stride 2",
        (8, 28, 28, 128),
        (4, 4, 128, 64),
        padding=((2, 2), (2, 2)),
        lhs_dilation=(2, 2),
    ),
    _general("three dimensions", (2, 16, 32, 32, 32), (3, 3, 3, 32, 32)),
    _sample("volume of 32 channels", (64, 64, 64, 32), (100_000, 3), FLOATS),
    _sample("volume of 1 channel", (128, 128, 128, 1), (1_000_000, 3)),
    _sample("images", (16, 64, 64, 256), (16, 4096, 2)),
    _sample("deterministic", (64, 64, 64, 32), (100_000, 3), deterministic=True),
    _sample("border", (32, 32, 32, 2), (100_000, 3), padding_mode="border"),
    _sample("border, 1 channel", (256, 256, 256, 1), (4_194_304, 3), padding_mode="border"),
    _sample("nearest", (64, 64, 64, 32), (100_000, 3), method="nearest"),
    _sample("cubic, volume of 4 channels", (64, 64, 64, 4), (50_000, 3), FLOATS, method="cubic"),
    _sample("cubic, image of 3 channels", (256, 256, 3), (100_000, 2), method="cubic"),
    _sample("cubic, deterministic", (64, 64, 8), (999, 2), method="cubic", deterministic=True),
    _sample("wrap", (64, 64, 64, 16), (100_000, 3), padding_mode="wrap"),
    _patches("3x3, 64 channels", (8, 56, 56, 64), 3, (*FLOATS, "int8"), padding=1),
    _patches("3x3, stride 2", (8, 56, 56, 64), 3, strides=2),
    _patches("3x3, NCHW", (8, 3, 100, 100), 3, data_format="NCHW"),
    _lightweight("NTC, 3 taps", (16, 512, 1024), (16, 3), FLOATS),
    _lightweight("NTC, 31 taps", (16, 512, 1024), (16, 31), FLOATS),
    _lightweight(
        "NTC, 31 taps in bfloat16", (16, 512, 1024), (16, 31), ("float32",), weight_dtype="bfloat16"
    ),
    _lightweight("NCT, 4 taps", (4, 2048, 8192), (2048, 4), FLOATS[:2], data_format="NCT"),
    _lightweight("NCT, 3 taps, short rows", (128, 1024, 64), (16, 3), data_format="NCT"),
    _lightweight("NCT, 7 taps", (16, 1024, 512), (16, 7), FLOATS, data_format="NCT"),
    _lightweight("NCT, 31 taps", (16, 1024, 512), (16, 31), data_format="NCT"),
    _lightweight("NCT, 7 taps, short rows", (4096, 512, 16), (512, 7), FLOATS, data_format="NCT"),
    _lightweight("NCT, 15 taps, short rows", (4096, 512, 16), (8, 15), data_format="NCT"),
    _lightweight("NCT, 4 taps, odd rows", (254, 512, 129), (512, 4), FLOATS, data_format="NCT"),
    _lightweight("NCT, 7 taps, odd rows", (16, 512, 1001), (512, 7), FLOATS, data_format="NCT"),
    _lightweight("NCT, 10 taps, odd rows", (16, 512, 1001), (512, 10), data_format="NCT"),
    _lightweight("NTC, 31 taps a channel", (16, 512, 1024), (1024, 31)),
    _lightweight("NTC, 127 taps a channel", (16, 512, 1024), (1024, 127)),
    _lightweight("NCT, 31 taps a channel", (16, 1024, 512), (1024, 31), data_format="NCT"),
    _lightweight("NCT, 1023 taps of 8 channels", (2, 1024, 4096), (128, 1023), data_format="NCT"),
    _lightweight("NTC, one step", (256, 1, 1024), (16, 7)),
    _lightweight("NCT, one step", (256, 1024, 1), (16, 7), data_format="NCT"),
    _lightweight("NTC, eight steps", (1024, 8, 1024), (1024, 4)),
    _lightweight("NCT, 15 taps, 64 steps", (128, 1024, 64), (16, 15), data_format="NCT"),
    _step("4 taps", (64, 4096), (64, 3, 4096), (4096, 4), FLOATS),
    _step("4 taps, one sequence", (1, 4096), (8, 3, 4096), (4096, 4), indices=True),
    _step("4 taps, 5 tokens", (64, 5, 1536), (64, 3, 1536), (1536, 4), activation="silu"),
    _step("7 taps of 3 channels", (17, 99), (40, 6, 99), (33, 7), indices=True),
    _step("31 taps", (32, 1024), (32, 30, 1024), (16, 31)),
    _dynamic_step("7 taps", (64, 1024), (64, 6, 1024), 16, 7, normalize=True),
    _dynamic_step("15 taps", (256, 4096), (256, 14, 4096), 64, 15, normalize=True),
    _dynamic_step("31 taps, 2 tokens", (32, 2, 1024), (32, 30, 1024), 16, 31, FLOATS),
    _step("3 taps, dilated", (32, 1024), (32, 8, 1024), (1024, 3), dilation=4),
    _lightweight("NTC, 15 taps of 3 channels", (4, 1000, 99), (33, 15)),
    _packed("NTC, 4 taps", (1, 16384, 2048), (2048, 4), FLOATS),
    _packed("NTC, 4 taps and a state", (4, 512, 1024), (1024, 4), state=(4, 3, 1024)),
    _packed("NTC, 7 taps of 99 channels", (4, 1000, 99), (33, 7)),
    _packed("NTC, 31 taps", (16, 512, 1024), (16, 31), FLOATS),
    _packed("NTC, 31 taps and a state", (16, 512, 1024), (16, 31), state=(16, 30, 1024)),
    _packed("NCT, 31 taps", (16, 1024, 512), (16, 31), data_format="NCT"),
    _packed("NCT, 4 taps", (1, 2048, 16384), (2048, 4), FLOATS, data_format="NCT"),
    _packed("NCT, 7 taps of rows of 999", (4, 96, 999), (96, 7), data_format="NCT"),
    _ragged("4 taps", (4096, 1024), (1024, 4), 64, 256, FLOATS),
    _ragged("31 taps", (4096, 1024), (16, 31), 16, 64),
    _dynamic("NTC, 7 taps", (8, 512, 1024), 16, 7, FLOATS),
    _dynamic("NTC, 31 taps, softmax", (8, 512, 1024), 16, 31, normalize=True),
    _dynamic("NTC, 3 taps, softmax", (2, 70, 64), 4, 3, normalize=True),
    _dynamic("NCT, 4 taps", (1, 512, 2048), 8, 4, data_format="NCT"),
    _sigmoid("80 classes", 100_000, 80, FLOATS),
    _sigmoid("80 classes, sum", 100_000, 80, FLOATS, reduction="sum"),
    _sigmoid("80 classes, soft labels", 100_000, 80, targets="floats"),
    _sigmoid("80 classes, soft labels, gamma 1.5", 100_000, 80, targets="floats", gamma=1.5),
    _sigmoid("80 classes, soft labels, sum", 100_000, 80, targets="floats", reduction="sum"),
    _sigmoid("80 classes, booleans, sum", 100_000, 80, FLOATS, targets=jnp.bool_, reduction="sum"),
    _sigmoid("80 classes, integers", 100_000, 80, targets=jnp.int32),
    _sigmoid("1 class, booleans", 1_000_000, 1, targets=jnp.bool_),
    _sigmoid("1 class, sum", 1_000_000, 1, reduction="sum"),
    _sigmoid("8 rows", 8, 80),
    _softmax("10 classes", 100_000, 10, FLOATS),
    _softmax("1000 classes", 4096, 1000, FLOATS),
    _softmax("1000 classes, sum", 4096, 1000, FLOATS, reduction="sum"),
    _softmax("50257 classes, mean", 4096, 50257, FLOATS, reduction="mean"),
    _softmax("2 classes, mean", 1_000_000, 2, reduction="mean"),
    *(
        _losses_of_entries(loss, *sizes)
        for loss in (jaxops.sigmoid_focal_loss, jaxops.softmax_focal_loss)
        for sizes in (
            (8, 10_000, 80),
            (4096, 1, 10, FLOATS),
            (4096, 8, 80),
            (4096, 1, 1000),
            (4096, 8, 80, FEW, "none"),
        )
    ),
    _trilinear("1 feature", 1_000_000, 1, FLOATS),
    _trilinear("4 features", 1_000_000, 4, FLOATS),
    _trilinear("64 features", 100_000, 64, FLOATS),
    _trilinear("7 features", 10_000, 7),
    _trilinear("300 features", 1000, 300),
)
