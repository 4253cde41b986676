"""On GPUs, every kernel family computes, when forced, the results of the chosen family.

`tests/test_launches.py` forces them on random calls without a GPU, where no value is computed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._core import native
from jaxops.testing import kernels
from jaxops.testing.measure import leaves, vjp_of

Case = tuple  # a function, its arguments, and those with gradients

RANDOM = np.random.default_rng(0)


def normal(*shape, dtype):
    return jnp.asarray(RANDOM.standard_normal(shape), dtype)


def uniform(low, high, *shape):
    return jnp.asarray(RANDOM.uniform(low, high, shape), jnp.float32)


def labels(rows, classes):
    return jnp.asarray(RANDOM.integers(0, classes, rows), jnp.int32)


def lightweight_conv(dtype) -> Iterator[Case]:
    sequences = ("NTC", (4, 300, 64)), ("NCT", (4, 64, 304)), ("NCT", (2, 64, 301))
    for data_format, shape in sequences:
        for taps, dilation in ((3, 1), (4, 1), (31, 1), (7, 2)):
            options = {"data_format": data_format, "dilation": dilation}
            function = functools.partial(jaxops.lightweight_conv, **options)
            yield function, [normal(*shape, dtype=dtype), normal(16, taps, dtype=dtype)], (0, 1)
    function = functools.partial(jaxops.lightweight_conv, data_format="NCT")
    short_rows = ((50, 64, 24), 4), ((50, 64, 9), 7), ((9, 64, 16), 15), ((2100, 64, 64), 3)
    short_rows += ((9, 64, 64), 5), ((9, 64, 64), 8)
    for shape, taps in short_rows:
        yield function, [normal(*shape, dtype=dtype), normal(64, taps, dtype=dtype)], (0, 1)
    for taps in (4, 7):
        x = normal(1030, 9, 64, dtype=dtype)
        yield jaxops.lightweight_conv, [x, normal(16, taps, dtype=dtype)], (0, 1)
    for data_format, shape in (("NTC", (2, 1100, 40)), ("NCT", (2, 40, 1096))):
        function = functools.partial(jaxops.lightweight_conv, data_format=data_format)
        for heads, taps in ((40, 31), (8, 70), (1, 300)):
            yield function, [normal(*shape, dtype=dtype), normal(heads, taps, dtype=dtype)], (0, 1)


def packed(dtype) -> Iterator[Case]:
    """Lightweight convolutions with segments."""
    for data_format, shape in (("NTC", (4, 300, 64)), ("NCT", (4, 64, 304)), ("NCT", (2, 64, 301))):
        time = shape[1 if data_format == "NTC" else 2]
        ids = jnp.asarray(np.sort(RANDOM.integers(0, 9, (shape[0], time)), axis=1), jnp.int32)
        for taps, dilation in ((3, 1), (4, 1), (31, 1), (7, 2)):
            function = functools.partial(
                jaxops.lightweight_conv,
                data_format=data_format,
                dilation=dilation,
                segment_ids=ids,
            )
            yield function, [normal(*shape, dtype=dtype), normal(16, taps, dtype=dtype)], (0, 1)
        function = functools.partial(jaxops.lightweight_conv, data_format=data_format)
        weight = normal(4, 31, dtype=dtype)
        yield (
            functools.partial(function, segment_ids=ids),
            [normal(*shape, dtype=dtype), weight],
            (0, 1),
        )
        for segments, taps in itertools.product((None, ids), (31, 7, 4)):
            rows = (taps - 1, 64)
            state = normal(shape[0], *(rows if data_format == "NTC" else rows[::-1]), dtype=dtype)
            weight = normal(4, taps, dtype=dtype)
            of_state = functools.partial(_with_state, function, segments)
            yield of_state, [normal(*shape, dtype=dtype), weight, state], (0, 1, 2)


def _with_state(function, segment_ids, x, weight, state):
    return function(x, weight, segment_ids=segment_ids, initial_state=state)


def concatenate(dtype) -> Iterator[Case]:
    for axis, shapes in (
        (1, [(64, 7), (64, 13)]),
        (2, [(8, 9, 64)] * 3),
        (1, [(33, 1)] * 20),
        (0, [(1000,)] * 4),
        (2, [(5, 64, 32), (5, 64, 64)]),
    ):
        arrays = [normal(*s, dtype=dtype) for s in shapes]
        moved = tuple(range(len(arrays)))
        yield lambda *a, axis=axis: jaxops.concatenate(a, axis), arrays, moved


def grid_sample(dtype) -> Iterator[Case]:
    for volume, points in (
        ((16, 16, 16, 8), (3000, 3)),
        ((32, 32, 4), (2000, 2)),
        ((9, 8, 7, 3), (500, 3)),
        ((128, 128, 128, 16), (1 << 20, 3)),
    ):
        yield jaxops.grid_sample, [normal(*volume, dtype=dtype), uniform(-1.1, 1.1, *points)], (0,)
        yield jaxops.grid_sample, [normal(*volume, dtype=dtype), uniform(-1.1, 1.1, *points)], (1,)


def trilinear_interpolate(dtype) -> Iterator[Case]:
    for cells, features in ((1000, 1), (1000, 4), (1000, 64), (333, 7), (100, 300), (64, 2000)):
        arrays = [normal(cells, 8, features, dtype=dtype), uniform(0, 1, cells, 3)]
        yield jaxops.trilinear_interpolate, arrays, (0, 1)


def _losses(function, dtype, sizes) -> Iterator[Case]:
    for rows, classes in sizes:
        arguments = [normal(rows, classes, dtype=dtype), labels(rows, classes)]
        for reduction in ("none", "sum"):
            yield functools.partial(function, reduction=reduction), arguments, (0,)
    for entries, rows, classes in ((1200, 3, 10), (1100, 40, 17)):
        arguments = [
            normal(entries, rows, classes, dtype=dtype),
            labels(entries * rows, classes).reshape(entries, rows),
        ]
        yield jax.vmap(functools.partial(function, reduction="sum")), arguments, (0,)


def sigmoid_focal_loss(dtype) -> Iterator[Case]:
    sizes = (1000, 80), (100_000, 1), (8, 80), (37, 13)
    yield from _losses(jaxops.sigmoid_focal_loss, dtype, sizes)
    for shape in ((1000, 80), (37, 13), (1200, 3, 10)):
        logits, values = normal(*shape, dtype=dtype), normal(*shape, dtype="float32")
        for targets in (values > 0, np.clip(values, 0, 1).astype(dtype)):
            for reduction in ("none", "sum"):
                function = functools.partial(jaxops.sigmoid_focal_loss, reduction=reduction)
                batched = function if len(shape) == 2 else jax.vmap(function)
                yield batched, [logits, targets], (0,)


def softmax_focal_loss(dtype) -> Iterator[Case]:
    sizes = (1000, 10), (512, 1000), (64, 50257), (10_000, 2), (37, 130)
    return _losses(jaxops.softmax_focal_loss, dtype, sizes)


def im2col(dtype) -> Iterator[Case]:
    for shape, size in (((2, 20, 20, 16), 3), ((2, 31, 30, 3), 5)):
        function = functools.partial(jaxops.im2col, kernel_size=size, padding=1)
        yield function, [normal(*shape, dtype=dtype)], (0,)


def conv(dtype) -> Iterator[Case]:
    for shape, kernel, groups in (
        ((2, 20, 20, 64), (3, 3, 64, 64), 1),
        ((2, 20, 20, 32), (3, 3, 4, 32), 8),
        ((2, 20, 20, 64), (5, 5, 1, 64), 64),
        ((2, 20, 20, 3), (3, 3, 3, 32), 1),
    ):
        for precision in (None, "highest"):
            function = functools.partial(jaxops.conv2d, groups=groups, precision=precision)
            arguments = [normal(*shape, dtype=dtype), normal(*kernel, dtype=dtype)]
            yield function, arguments, (0,)
            yield function, arguments, (1,)


#: The functions by the operator of a table of families.
CASES = {
    "col2im": im2col,
    "concatenate": concatenate,
    "conv": conv,
    "grid_sample": grid_sample,
    "im2col": im2col,
    "lightweight_conv": lightweight_conv,
    "lightweight_conv_packed": packed,
    "lightweight_conv_packed_part": packed,
    "lightweight_conv_part": lightweight_conv,
    "sigmoid_focal_loss": sigmoid_focal_loss,
    "softmax_focal_loss": softmax_focal_loss,
    "trilinear_interpolate": trilinear_interpolate,
}


def run(function, arguments):
    """The results of a separate program: no CUDA graph has captured the kernels of another."""
    return leaves(jax.block_until_ready(jax.jit(lambda *a: function(*a))(*arguments)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("operator", CASES)
def test_families_agree(operator, dtype, platform, monkeypatch):
    if platform.name != "cuda":
        pytest.skip("kernel families are those of GPUs")
    monkeypatch.setenv(native.NEW_KERNELS_VARIABLE, "on")
    families = sorted({name for names in kernels.families()[operator].values() for name in names})
    ran = 0
    for function, arguments, moved in CASES[operator](dtype):
        value = jax.eval_shape(function, *arguments)
        cotangents = tuple(normal(*y.shape, dtype=y.dtype) for y in leaves(value))
        pull = vjp_of(function, moved)
        for program, of_program in ((function, arguments), (pull, [cotangents, *arguments])):
            want = run(program, of_program)
            for family in families:
                try:
                    with kernels.forcing(operator, family):
                        got = run(program, of_program)
                except jax.errors.JaxRuntimeError as error:
                    if "cudaErrorNotSupported" not in str(error):
                        raise
                    continue
                ran += 1
                for a, b in zip(got, want, strict=True):
                    scale = max(1e-3, float(jnp.abs(b.astype(jnp.float32)).max(initial=0)))
                    error = float(jnp.abs(a.astype(jnp.float32) - b).max(initial=0)) / scale
                    assert error < 2e-2, f"{family} on {[x.shape for x in arguments]}: {error}"
    assert ran > 0


def test_every_table_has_cases():
    try:
        tables = kernels.families()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert set(tables) == set(CASES)
