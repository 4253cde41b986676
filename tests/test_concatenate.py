"""Concatenation and splitting, bit for bit: dtypes, shapes, derivatives, calls and errors.

NumPy is the oracle: it moves bytes and supports every dtype through ml_dtypes. `jax.numpy` is a
second oracle for the bits that XLA's concatenation keeps, which excludes some payloads of NaN.
"""

from __future__ import annotations

import itertools
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._core import native
from jaxops.testing.measure import assert_bitwise, custom_calls, lowered_calls, run, vjp_of

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("bfloat16", "float16", "float32", "float64")
FLOATS_8 = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *FLOATS_8, *COMPLEX, *BITS)


def arbitrary(rng, shape, dtype):
    """Any bits of the dtype: NaNs of every payload, both zeros, subnormal numbers."""
    kind = jnp.dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in BITS:
        values = np.arange(1 << BITS[dtype], dtype=np.uint8)
        if dtype == "float4_e2m1fn":
            values = values.view(kind)
        elif dtype.startswith("int"):
            values = (values.astype(np.int8) - (1 << (BITS[dtype] - 1))).astype(kind)
        return values.astype(kind)[rng.integers(0, len(values), shape)]
    count = int(np.prod(shape))
    return rng.integers(0, 256, count * kind.itemsize, np.uint8).view(kind).reshape(shape)


def with_extent(shape, axis, extent):
    return (*shape[:axis], extent, *shape[axis + 1 :])


def cut(array, axis, start, stop):
    return array[(slice(None),) * (axis % array.ndim) + (slice(start, stop),)]


def padded(array, axis, extent):
    """The array, with zero bits after it up to `extent`."""
    axis %= array.ndim
    shape = with_extent(array.shape, axis, extent - array.shape[axis])
    return np.concatenate([array, np.zeros(shape, array.dtype)], axis)


def joined(arrays, axis, sizes=None, padded_size=None):
    """The expected result of concatenate."""
    sizes = [a.shape[axis] for a in arrays] if sizes is None else sizes
    whole = np.concatenate([cut(a, axis, 0, s) for a, s in zip(arrays, sizes, strict=True)], axis)
    return whole if padded_size is None else padded(whole, axis, padded_size)


def parted(array, sizes, axis, padded_sizes=None):
    """The expected result of split."""
    ends = list(itertools.accumulate(sizes))
    parts = [cut(array, axis, end - size, end) for end, size in zip(ends, sizes, strict=True)]
    extents = sizes if padded_sizes is None else padded_sizes
    return [padded(p, axis, e) for p, e in zip(parts, extents, strict=True)]


def check(platform, arrays, axis, sizes=None, padded_size=None, padded_sizes=None):
    """Checks `concatenate` and `split` without options, and with those of `sizes` and paddings
    given.

    One program computes all of them: compiling it takes longer than running it.
    """
    extents = [a.shape[axis] for a in arrays]
    whole = joined(arrays, axis)
    calls = {
        "concatenate": lambda arrays, whole: [jaxops.concatenate(arrays, axis)],
        "split": lambda arrays, whole: jaxops.split(whole, extents, axis),
    }
    want = {"concatenate": [whole], "split": parted(whole, extents, axis)}
    if sizes is not None:
        name = f"concatenate of {sizes} to {padded_size}"
        calls[name] = lambda arrays, whole: [
            jaxops.concatenate(arrays, axis, sizes=sizes, padded_size=padded_size)
        ]
        want[name] = [joined(arrays, axis, sizes, padded_size)]
    if padded_sizes is not None:
        name = f"split to {padded_sizes}"
        calls[name] = lambda arrays, whole: jaxops.split(
            whole, extents, axis, padded_sizes=padded_sizes
        )
        want[name] = parted(whole, extents, axis, padded_sizes)

    def every_call(arrays, whole):
        return [call(arrays, whole) for call in calls.values()]

    got = iter(run(every_call, platform, arrays, whole))
    for name in calls:
        results = list(itertools.islice(got, len(want[name])))
        what = f"{name}: {[a.shape for a in arrays]} {arrays[0].dtype} along {axis}"
        assert len(results) == len(want[name]), what
        assert_bitwise(results, want[name], what)
    assert next(got, None) is None, "there are more results than asked for"


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(platform, dtype):
    rng = np.random.default_rng(0)
    for axis, extents in enumerate(((3, 5), (16, 0, 8), (1, 4))):
        arrays = [arbitrary(rng, with_extent((5, 7, 11), axis, n), dtype) for n in extents]
        sizes, padded_sizes = [n // 2 for n in extents], [n + 3 for n in extents]
        check(platform, arrays, axis, sizes, sum(extents), padded_sizes)


def test_every_dtype_is_tested():
    """All dtypes that JAX can put on a device and take back."""
    kinds = {jnp.dtype(t) for t in vars(jnp).values() if isinstance(t, type(jnp.float32))}
    tested = {jnp.dtype(d) for d in DTYPES}
    unknown_to_xla = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}
    assert {k.name for k in kinds - tested} <= unknown_to_xla


# XLA ends the process if it concatenates entries of less than a byte.
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in BITS])
def test_the_same_bits_as_jax_numpy(platform, dtype):
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 99, (6, n, 3)).astype(jnp.dtype(dtype)) for n in (3, 1, 9)]
    want = run(lambda *a: jnp.concatenate(a, 1), platform, *arrays)
    got = run(lambda *a: jaxops.concatenate(a, 1), platform, *arrays)
    assert_bitwise(got, want, dtype)
    want = run(lambda a: jnp.split(a, [3, 4], 1), platform, want[0])
    got = run(lambda a: jaxops.split(a, [3, 1, 9], 1), platform, got[0])
    assert_bitwise(got, want, dtype)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys(platform, impl):
    with jax.default_device(platform.device):
        keys = jax.random.split(jax.random.key(3, impl=impl), (2, 5))
        for axis, cuts in ((0, (1, 1)), (1, (2, 3)), (-1, (2, 3))):
            parts = jnp.split(keys, [cuts[0]], axis)
            whole = jax.jit(lambda *p, axis=axis: jaxops.concatenate(p, axis))(*parts)
            assert whole.dtype == keys.dtype
            assert (jax.random.key_data(whole) == jax.random.key_data(keys)).all()
            found = jaxops.split(keys, cuts, axis)
            for part, expected in zip(found, parts, strict=True):
                assert (jax.random.key_data(part) == jax.random.key_data(expected)).all()


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float16", "float32"),
        ("float16", "bfloat16"),
        ("int32", "float32"),
        ("bool", "int8", "uint8"),
        ("bool", "bfloat16"),
        ("float64", "complex64"),
        ("uint32", "int32"),
    ],
)
def test_promotion(platform, dtypes):
    arrays = [np.array([[0, 1], [1, 0]]).astype(jnp.dtype(d)) for d in dtypes]
    want = run(lambda *a: jnp.concatenate(a, 1), platform, *arrays)
    assert_bitwise(run(lambda *a: jaxops.concatenate(a, 1), platform, *arrays), want, str(dtypes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32", "complex64"])
def test_dtype_of_the_result(platform, dtype):
    """Operands are converted as `jax.numpy` does, and gradients back to their dtypes."""
    arrays = [np.array([[0.5, 3]], np.float16), np.array([[2, 7, 1]], np.float32)]
    want = run(lambda *a: jnp.concatenate(a, 1, dtype), platform, *arrays)
    assert want[0].dtype == jnp.dtype(dtype)
    got = run(lambda *a: jaxops.concatenate(a, 1, dtype), platform, *arrays)
    assert_bitwise(got, want, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        weights = np.arange(5).astype(jnp.dtype(dtype))

        def gradients(concatenate):
            def total(*arrays):
                return (concatenate(arrays, 1, dtype) * weights).sum().real.astype(np.float32)

            return run(jax.grad(total, (0, 1)), platform, *arrays)

        assert_bitwise(gradients(jaxops.concatenate), gradients(jnp.concatenate), dtype)


def test_weak_types_promote_as_in_jax_numpy():
    weak, strong = jnp.full(3, 1.0), jnp.ones(2, jnp.bfloat16)
    assert weak.weak_type
    assert jaxops.concatenate([weak, strong]).dtype == jnp.concatenate([weak, strong]).dtype


# --- shapes --------------------------------------------------------------------------------------


@hypothesis.settings(deadline=None, derandomize=True, max_examples=120)
@hypothesis.given(data=st.data())
def test_any_shape(platform, data):
    draw = data.draw
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=7)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    extents = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    sizes = [draw(st.integers(0, n)) for n in extents]
    padding = draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    dtype = draw(st.sampled_from(DTYPES))
    at = axis % len(shape)
    arrays = [arbitrary(rng, with_extent(shape, at, n), dtype) for n in extents]
    padded_sizes = [n + padding for n in extents]
    check(platform, arrays, axis, sizes, sum(sizes) + padding, padded_sizes)


# Bytes of a row of each array: multiples of 16, 8, 4 and 2 bytes, odd widths, rows longer than one
# iteration of a block or a task, and rows of which it takes thousands.
ROWS = (
    (3, 1),
    (1, 1, 1),
    (126, 130),
    (128, 128),
    (8, 24, 40),
    (4, 12),
    (16384, 3),
    (1, 70_001),
    (65_536, 16),
    (300_000, 1),
    (2_000_000, 32),
    (2, 2, 6, 5),
    (7, 9, 1, 15, 16, 17),
)


@pytest.mark.parametrize("widths", ROWS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 1000, 40_001])
def test_widths(platform, widths, rows):
    rows = min(rows, max(1, 2_000_000 // sum(widths)))
    rng = np.random.default_rng(2)
    arrays = [arbitrary(rng, (rows, n), "uint8") for n in widths]
    sizes, padded_sizes = [n - n // 2 for n in widths], [n + 1 for n in widths]
    check(platform, arrays, 1, sizes, sum(widths), padded_sizes)


@pytest.mark.parametrize(
    "widths", [(5, 5), (12,) * 3, (2,) * 4, (16,) * 4, (48, 48), (8, 24), (6, 10), (4, 8, 12, 4)]
)
@pytest.mark.parametrize("rows", [1, 7, 1200, 2500])
def test_small_arrays(platform, widths, rows):
    """Equal arrays and others, with every vector width, alone and before zeros; partial blocks."""
    rng = np.random.default_rng(6)
    arrays = [arbitrary(rng, (rows, n), "uint8") for n in widths]
    check(platform, arrays, 1, widths, sum(widths) + 2 * widths[0], [n + 1 for n in widths])


@pytest.mark.any_jax
@pytest.mark.parametrize(
    "widths",
    [
        *[(7,) * 300, (28,) * 300, (10,) * 64, (16,) * 24, (48,) * 12, (64,) * 16, (128,) * 64],
        *[(3,) * 12, (18,) * 8, (20,) * 9, (12,) * 203, (260,) * 32, (1,) * 80],
        *[(1,) * 8, (3,) * 8, (2,) * 16, (4,) * 8, (1,) * 10, (24,) * 33],
        *[(24,) * 480, (33,) * 300, (26,) * 480, (9,) * 480, (1000,) * 128, (500,) * 300],
        *[(300, 17, 4), (2, 4, 6, 8, 2, 2, 2, 10), (4, 12, 40, 8) * 16],
        *[(3, 1), (1, 1, 1), (2, 2, 6, 5)],
        *[(250,) * 7, (602,) * 30, (80,) * 9, (12, 4), (13,) * 10, (37,) * 70],
    ],
    ids=lambda widths: f"{len(widths)} from {widths[0]}",
)
@pytest.mark.parametrize("size", [60_000, 400_000, 10_000_000])
def test_many_rows_of_narrow_arrays(platform, widths, size):
    """Tiles of whole rows and of parts of rows, the rows after the last tile, and few rows."""
    rows = size // sum(widths) | 1
    rng = np.random.default_rng(4)
    arrays = [arbitrary(rng, (rows, n), "uint8") for n in widths]
    check(platform, arrays, 1, widths, sum(widths) + 6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
@pytest.mark.parametrize(("channels", "filled"), [(1, 4), (3, 4), (3, 8), (7, 16), (5, 21)])
def test_few_channels_are_filled_up(platform, dtype, channels, filled):
    """Tests the gradient too, for which most of the input need not be read."""
    rng = np.random.default_rng(7)
    x = arbitrary(rng, (300_007, channels), dtype)
    g = arbitrary(rng, (300_007, filled), dtype)
    function = vjp_of(lambda x: jaxops.concatenate([x], 1, padded_size=filled), (0,))
    got = run(function, platform, (g,), x)
    assert_bitwise(got, [padded(x, 1, filled), g[:, :channels]], f"{channels} of {filled} {dtype}")


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("channels", "all_channels"),
    [
        *[((1, 1), 4), ((1, 1, 1), 8), ((3,), 8), ((2, 1), 8), ((1, 0, 2), 16), ((3, 5), 16)],
        *[((3, 3, 3), 32), ((1, 1), 2), ((1, 2), 9), ((1, 1, 1, 1, 1), 16), ((3, 4), 7)],
    ],
)
@pytest.mark.parametrize("rows", [33, 150_003])
def test_few_channels_are_cut(platform, dtype, channels, all_channels, rows):
    """The gradient of several arrays and zeros: few bytes of a row are read, for several parts."""
    rng = np.random.default_rng(8)
    g = arbitrary(rng, (rows, all_channels), dtype)
    arrays = [np.zeros((rows, n), dtype) for n in channels]
    function = vjp_of(
        lambda *arrays: jaxops.concatenate(arrays, 1, padded_size=all_channels),
        tuple(range(len(channels))),
    )
    got = run(function, platform, (g,), *arrays)
    want = [padded(np.concatenate(arrays, 1), 1, all_channels)]
    want += parted(g[:, : sum(channels)], channels, 1)
    assert_bitwise(got, want, f"{channels} of {all_channels} {dtype}")


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_few_rows_of_long_arrays(platform, rows):
    rng = np.random.default_rng(5)
    sizes = [100_003, 70_001, 50_000, 0, 90_002, 40_001, 33_333, 65_536]
    for dtype in "uint8", "uint16", "float32", "float64":
        arrays = [arbitrary(rng, (rows, n), dtype) for n in sizes]
        check(platform, arrays, 1, [n - n // 9 for n in sizes], sum(sizes))


def test_more_than_the_cache_holds(platform):
    """From this size the host's stores bypass its caches; both arrays end within a cache line."""
    rng = np.random.default_rng(3)
    sizes = [20_000_003, 15_000_001]
    arrays = [arbitrary(rng, (n,), "uint8") for n in sizes]
    check(platform, arrays, 0)


@pytest.mark.parametrize("widths", [(64, 128, 320), (257, 40, 300)], ids=str)
def test_more_rows_than_the_cache_holds(platform, widths):
    """The host's stores of arrays that fill cache lines, or most of them, bypass its caches too."""
    rng = np.random.default_rng(3)
    rows = (33 << 20) // sum(widths)
    arrays = [arbitrary(rng, (rows, n), "uint8") for n in widths]
    check(platform, arrays, 1)


@pytest.mark.any_jax
@pytest.mark.parametrize("count", [63, 64, 65, 199, 200, 201, 300, 480, 481])
@pytest.mark.parametrize("axis", [0, 1])
def test_many_arrays(platform, count, axis):
    rng = np.random.default_rng(count)
    sizes = rng.integers(0, 7, count).tolist()
    arrays = [arbitrary(rng, with_extent((9, 9), axis, n), "uint8") for n in sizes]
    check(platform, arrays, axis, [n // 2 for n in sizes], sum(sizes))


@pytest.mark.any_jax
@pytest.mark.parametrize("rows", [1, 130, 700])
@pytest.mark.parametrize(
    "sizes", [[7] * 40, [3] * 33 + [5] * 600 + [1, 9] + [64] * 35, [2] * 31 + [4] * 520 + [65] * 40]
)
def test_many_arrays_of_one_narrow_width(platform, sizes, rows):
    """The host copies these arrays row by row, and others in the same call by columns."""
    rng = np.random.default_rng(rows)
    arrays = [arbitrary(rng, (rows, n), "uint8") for n in sizes]
    check(platform, arrays, 1, [n - 1 for n in sizes], sum(sizes), [n + 1 for n in sizes])


def test_more_arrays_than_a_launch_takes(platform):
    arrays = [np.full((2, 1 + i % 3), i, np.int16) for i in range(1200)]
    check(platform, arrays, 1, [1] * 1200, 1300)


def test_axis_none_flattens(platform):
    arrays = [np.arange(6).reshape(2, 3), np.arange(4)]
    got = run(lambda *a: jaxops.concatenate(a, None), platform, *arrays)
    assert_bitwise(got, [np.concatenate(arrays, None)], "axis None")


def test_what_arrays_may_be():
    x = np.arange(6).reshape(2, 3)
    for arrays in ([x, x], (x, jnp.asarray(x)), np.stack([x, x]), jnp.stack([x, x])):
        got = jaxops.concatenate(arrays, axis=np.int64(1), sizes=np.array([3, 2]), padded_size=7)
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, joined([x, x], 1, [3, 2], 7))
    parts = jaxops.split(x, np.array([1, 2]), 1)
    assert isinstance(parts, tuple)
    assert jaxops.split(x[:, :0], [], 1) == ()


def test_padding_of_a_dtype_without_zero():
    """The bits are zero, which in float8_e8m0fnu is the least of its powers of two."""
    x = jnp.ones(1, jnp.float8_e8m0fnu)
    assert np.asarray(jaxops.concatenate([x], padded_size=3)).tobytes() == b"\x7f\0\0"


# --- the node tests of ONNX ----------------------------------------------------------------------

CONCAT_NODES = {
    "1d": ([1, 2], [3, 4]),
    "2d": ([[1, 2], [3, 4]], [[5, 6], [7, 8]]),
    "3d": ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [[[9, 10], [11, 12]], [[13, 14], [15, 16]]]),
}
CONCAT_RESULTS = {
    ("1d", 0): [1, 2, 3, 4],
    ("2d", 0): [[1, 2], [3, 4], [5, 6], [7, 8]],
    ("2d", 1): [[1, 2, 5, 6], [3, 4, 7, 8]],
    ("3d", 0): [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]], [[13, 14], [15, 16]]],
    ("3d", 1): [[[1, 2], [3, 4], [9, 10], [11, 12]], [[5, 6], [7, 8], [13, 14], [15, 16]]],
    ("3d", 2): [[[1, 2, 9, 10], [3, 4, 11, 12]], [[5, 6, 13, 14], [7, 8, 15, 16]]],
}


@pytest.mark.parametrize(("name", "axis"), CONCAT_RESULTS)
def test_onnx_concat(platform, name, axis):
    arrays = [np.array(a, np.float32) for a in CONCAT_NODES[name]]
    want = np.array(CONCAT_RESULTS[name, axis], np.float32)
    for a in (axis, axis - want.ndim):
        got = run(lambda *arrays, a=a: jaxops.concatenate(arrays, a), platform, *arrays)
        assert_bitwise(got, [want], f"Concat {name}, axis {a}")


TWO_ROWS = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
SPLIT_NODES = {
    "equal parts, 1d": ([1, 2, 3, 4, 5, 6], 0, [2, 2, 2], [[1, 2], [3, 4], [5, 6]]),
    "variable parts, 1d": ([1, 2, 3, 4, 5, 6], 0, [2, 4], [[1, 2], [3, 4, 5, 6]]),
    "uneven parts, 1d": ([1, 2, 3, 4, 5, 6, 7], 0, [2, 2, 2, 1], [[1, 2], [3, 4], [5, 6], [7]]),
    "equal parts, 2d": (
        TWO_ROWS,
        1,
        [3, 3],
        [[[1, 2, 3], [7, 8, 9]], [[4, 5, 6], [10, 11, 12]]],
    ),
    "variable parts, 2d": (
        TWO_ROWS,
        1,
        [2, 4],
        [[[1, 2], [7, 8]], [[3, 4, 5, 6], [9, 10, 11, 12]]],
    ),
    "uneven parts, 2d": (
        [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]],
        1,
        [3, 3, 2],
        [[[1, 2, 3], [9, 10, 11]], [[4, 5, 6], [12, 13, 14]], [[7, 8], [15, 16]]],
    ),
    "zero size": ([], 0, [0, 0, 0], [[], [], []]),
}


@pytest.mark.parametrize("name", SPLIT_NODES)
def test_onnx_split(platform, name):
    array, axis, sizes, parts = SPLIT_NODES[name]
    array = np.array(array, np.float32)
    for a in (axis, axis - array.ndim):
        got = run(lambda x, a=a: jaxops.split(x, sizes, a), platform, array)
        assert_bitwise(got, [np.array(p, np.float32) for p in parts], f"Split {name}, axis {a}")


# --- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, "float8_e4m3fn"])
def test_gradients_are_the_bits_of_the_cotangent(platform, dtype):
    """The gradient is zero for unread input: invalid entries and padding."""
    rng = np.random.default_rng(4)
    extents, sizes, total = (5, 3, 4), (3, 3, 0), 9
    arrays = [arbitrary(rng, (2, n, 3), dtype) for n in extents]
    g = arbitrary(rng, (2, total, 3), dtype)

    def function(*arrays):
        return jaxops.concatenate(arrays, 1, sizes=sizes, padded_size=total)

    _, *gradients = run(vjp_of(function, (0, 1, 2)), platform, (g,), *arrays)
    want = parted(g[:, : sum(sizes)], sizes, 1, extents)
    assert_bitwise(gradients, want, f"concatenate in {dtype}")

    whole = arbitrary(rng, (2, 6, 3), dtype)
    cotangents = tuple(arbitrary(rng, (2, n + 2, 3), dtype) for n in sizes)

    def function(whole):
        return jaxops.split(whole, sizes, 1, padded_sizes=[n + 2 for n in sizes])

    gradient = run(vjp_of(function, (0,)), platform, cotangents, whole)[-1]
    want = joined(cotangents, 1, sizes)
    assert_bitwise([gradient], [want], f"split in {dtype}")


def test_gradients_have_the_dtypes_of_the_arguments(platform):
    arrays = [np.ones(2, d) for d in (np.float16, np.float32, jnp.bfloat16)]
    g = np.arange(6, dtype=np.float32)
    got = run(vjp_of(lambda *a: jaxops.concatenate(a), (0, 1, 2)), platform, (g,), *arrays)
    want = [g[2 * i : 2 * i + 2].astype(a.dtype) for i, a in enumerate(arrays)]
    assert_bitwise(got[1:], want, "gradients")


def program_of(function, platform, *arguments):
    placed = jax.device_put(arguments, platform.device)
    return jax.jit(function).lower(*placed).compile()


def temporary_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


def test_one_gradient_of_many_is_cut_alone(platform):
    """Along one of many arrays the tangents of the others are zeros that no program computes."""
    arrays = [np.ones((64, n), np.float32) for n in (5, 6, 7)]
    g = np.ones((64, 18), np.float32)
    function = vjp_of(lambda *a: jaxops.concatenate(a, 1), (1,))
    program = program_of(lambda *a: function(*a)[1], platform, (g,), *arrays)
    assert custom_calls(program) == {"jaxops_split": 1}
    assert temporary_bytes(program) == 0

    def along_the_first(tangent, *arrays):
        others = [jnp.zeros_like(a) for a in arrays[1:]]
        return jax.jvp(lambda x: jaxops.concatenate([x, *others], 1), [arrays[0]], [tangent])[1]

    program = program_of(along_the_first, platform, arrays[0], *arrays)
    assert custom_calls(program) == {"jaxops_concatenate": 1}
    assert temporary_bytes(program) == 0
    (tangent,) = run(along_the_first, platform, arrays[0], *arrays)
    np.testing.assert_array_equal(tangent, [[1] * 5 + [0] * 13] * 64)


def test_parts_that_nobody_uses_are_not_cut(platform):
    program = program_of(lambda x: jaxops.split(x, [3, 4, 5])[1], platform, np.ones(12, np.float32))
    assert program.as_text().count("f32[4]") > 0
    assert "f32[3]" not in program.as_text()
    assert "f32[5]" not in program.as_text()


def test_unused_arrays_are_not_read_for_the_gradient_of_a_linear_loss(platform):
    """The value is not needed: the gradient is one split and no concatenation."""
    arrays = [np.ones((4, n), np.float32) for n in (3, 5)]
    weights = np.arange(32, dtype=np.float32).reshape(4, 8)

    def loss(a, b):
        return (jaxops.concatenate([a, b], 1) * weights).sum()

    program = program_of(jax.grad(loss, argnums=(0, 1)), platform, *arrays)
    assert custom_calls(program) == {"jaxops_split": 1}


# --- what is called, and what it costs -----------------------------------------------------------


def test_nothing_is_copied_on_the_way(platform):
    """The program has no work space: it reads each byte once and writes it once."""
    x, y = np.ones((8, 6, 63), jnp.bfloat16), np.ones((8, 6, 65), jnp.bfloat16)
    options = {"sizes": [60, 65], "padded_size": 136}
    program = program_of(lambda x, y: jaxops.concatenate([x, y], -1, **options), platform, x, y)
    assert custom_calls(program) == {"jaxops_concatenate": 1}
    assert temporary_bytes(program) == 0
    program = program_of(lambda x: jaxops.split(x, [60, 3], -1), platform, x)
    assert custom_calls(program) == {"jaxops_split": 1}
    # XLA keeps the table of addresses if a program has several results.
    assert temporary_bytes(program) <= 64


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_does_not_repeat_what_is_unbatched(platform, in_axes, axis):
    rng = np.random.default_rng(5)
    core = [with_extent((48, 32), axis, n) for n in (31, 17)]
    arrays = [
        arbitrary(rng, shape if a is None else (9, *shape), "uint16")
        for shape, a in zip(core, in_axes, strict=True)
    ]

    def function(x, y):
        return jaxops.concatenate([x, y], axis)

    batched = jax.vmap(function, in_axes)
    program = program_of(batched, platform, *arrays)
    assert custom_calls(program) == {"jaxops_concatenate": 1}
    assert temporary_bytes(program) == 0
    each = [
        joined([a if i is None else a[n] for a, i in zip(arrays, in_axes, strict=True)], axis)
        for n in range(9)
    ]
    assert_bitwise(run(batched, platform, *arrays), [np.stack(each)], str(in_axes))


def alternating(levels):
    """A function of two arrays under levels of vmap, each of which batches x or y in turn."""

    def function(x, y):
        return jaxops.concatenate([x, y], 1)

    for level in reversed(range(levels)):
        function = jax.vmap(function, (0, None) if level % 2 == 0 else (None, 0))
    return function


@pytest.mark.parametrize("levels", [7, 9])
def test_many_levels_of_vmap(platform, levels):
    """Nine levels exceed the kernel's maximum."""
    rng = np.random.default_rng(6)
    of_x, of_y = (levels + 1) // 2, levels // 2
    x, y = (
        arbitrary(rng, (2,) * of_x + (3, 2), "uint8"),
        arbitrary(rng, (2,) * of_y + (3, 5), "uint8"),
    )
    at_x = x.reshape((*((2, 1) * of_x)[:levels], 3, 2))
    at_y = y.reshape((*((1, 2) * of_x)[:levels], 3, 5))
    batch = (2,) * levels
    want = [np.broadcast_to(a, batch + a.shape[levels:]) for a in (at_x, at_y)]
    got = run(alternating(levels), platform, x, y)
    assert_bitwise(got, [np.concatenate(want, -1)], "many levels of vmap")


LIMITS = native.limits("concatenate")
PIECES, PARTS = LIMITS.max_pieces, LIMITS.max_parts


@pytest.mark.parametrize(
    ("count", "calls"), [(2, 1), (300, 1), (PIECES, 1), (PIECES + 1, 2), (2 * PIECES, 3)]
)
def test_hundreds_of_arrays_in_one_call(count, calls):
    arrays = [np.ones((2, 3), np.float32)] * count
    lowered = jax.jit(lambda *a: jaxops.concatenate(a, 1)).lower(*arrays)
    assert lowered_calls(lowered) == ["jaxops_concatenate"] * calls


@pytest.mark.parametrize(("count", "calls"), [(2, 1), (PARTS, 1), (PARTS + 1, 2), (3 * PARTS, 3)])
def test_hundreds_of_parts_in_few_calls(count, calls):
    lowered = jax.jit(lambda a: jaxops.split(a, [1] * count)).lower(np.ones(count))
    assert lowered_calls(lowered) == ["jaxops_split"] * calls


def seconds_to_compile(function, arrays):
    """The least of several times of tracing, lowering and compiling a function new to JAX."""

    def once():
        start = time.perf_counter()
        jax.jit(lambda arrays: function(arrays, 1)).lower(arrays).compile()
        return time.perf_counter() - start

    return min(once() for _ in range(3))


@pytest.mark.any_jax
@pytest.mark.usefixtures("optimized")
def test_compile_time_does_not_grow_as_xla_s_does(platform):
    """As users compile: without optimizations XLA takes only twice as long for 300 arrays, and a
    loaded machine hides that."""
    with jax.default_device(platform.device):
        few, many = ([jnp.ones((4, 3))] * n for n in (2, 300))
        ours, ours_many = (seconds_to_compile(jaxops.concatenate, a) for a in (few, many))
        xla, xla_many = (seconds_to_compile(jnp.concatenate, a) for a in (few, many))
    print(f"ours: {ours:.3f} s for 2, {ours_many:.3f} s for 300; XLA: {xla:.3f}, {xla_many:.3f}")
    assert ours_many < xla_many


# --- beyond 2**31 --------------------------------------------------------------------------------


@pytest.mark.xdist_group("most of the memory")
@pytest.mark.parametrize(
    ("dtype", "rows", "widths", "axis"),
    [
        ("uint8", 2**29 + 5, (3, 1), 1),
        ("bfloat16", 2**24 + 3, (63, 65), 1),
        ("float32", 2**21 + 1, (512, 512), 1),
        ("uint8", 3, (2**31 + 7, 2**31 + 16), 1),
        ("int16", 2, (2**30 + 1, 2**30 + 2), 0),
    ],
    ids=str,
)
def test_more_than_2_to_the_31_elements(platform, dtype, rows, widths, axis):
    """Every element, compared on the device; and a split of the whole gives the arrays back."""
    if platform.name == "cpu":
        pytest.skip("the index arithmetic of the host is 64-bit throughout; too slow here")
    shapes = [(rows, n) if axis else (n, rows) for n in widths]
    elements = rows * sum(widths)
    assert elements > 2**31
    limit = platform.device.memory_stats()["bytes_limit"]
    needed = 4 * elements * jnp.dtype(dtype).itemsize
    if limit < needed:
        pytest.skip(f"needs {needed >> 30} GiB of device memory, there are {limit >> 30}")

    def make(salt, shape):
        """Small integers that differ between neighbours in every direction."""
        row, column = (jax.lax.broadcasted_iota(jnp.int64, shape, d) for d in (0, 1))
        return ((row * 7 + column * 3 + salt) % 113).astype(dtype)

    def differences(array, salt, start, size):
        part = jax.lax.slice_in_dim(array, start, start + size, axis=axis)
        return (part != make(salt, part.shape)).sum()

    with jax.default_device(platform.device):
        arrays = [jax.jit(make, static_argnums=(1,))(i, s) for i, s in enumerate(shapes)]
        whole = jax.jit(lambda *a: jaxops.concatenate(a, axis))(*arrays)
        del arrays
        for i, n in enumerate(widths):
            compare = jax.jit(differences, static_argnums=(2, 3))
            assert compare(whole, i, sum(widths[:i]), n) == 0
        parts = jax.jit(lambda a: jaxops.split(a, widths, axis))(whole)
        del whole
        for i, (part, n) in enumerate(zip(parts, widths, strict=True)):
            assert jax.jit(differences, static_argnums=(2, 3))(part, i, 0, n) == 0


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([],), ValueError, r"arrays must be one or more arrays, got \[\]"),
        ((np.zeros((0, 3)),), ValueError, r"arrays must be one or more arrays, got \[\]"),
        ((3.0,), TypeError, "arrays must be a sequence of arrays, got float"),
        (([1.0, 2.0],), TypeError, r"arrays\[0\] must be an array, got float"),
        (([np.zeros(2), [1.0]],), TypeError, r"arrays\[1\] must be an array, got list"),
        (([np.zeros(()), np.zeros(())],), ValueError, r"arrays\[0\] must have one dimension"),
        (([np.zeros(2)], 1), ValueError, r"axis must be in \[-1, 0\], got 1"),
        (([np.zeros(2)], -2), ValueError, r"axis must be in \[-1, 0\], got -2"),
        (([np.zeros(2)], "0"), TypeError, "axis must be a static integer, got '0'"),
        (([np.zeros(2)], True), TypeError, "axis must be a static integer, got True"),
    ],
)
def test_bad_arrays(arguments, error, message):
    with pytest.raises(error, match=f"^concatenate: {message}"):
        jaxops.concatenate(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sizes": [2]}, ValueError, "sizes must have one entry for each of the 2 arrays, got 1"),
        ({"sizes": [2, 4]}, ValueError, r"sizes\[1\] must be in \[0, 3\], got 4"),
        ({"sizes": [-1, 3]}, ValueError, r"sizes\[0\] must be in \[0, 2\], got -1"),
        ({"sizes": [1.0, 3]}, TypeError, r"sizes\[0\] must be a static integer, got 1.0"),
        ({"sizes": 3}, TypeError, "sizes must be a sequence of integers, got 3"),
        ({"sizes": "12"}, TypeError, "sizes must be a sequence of integers, got '12'"),
        ({"padded_size": 4}, ValueError, "padded_size must be >= 5, got 4"),
        ({"padded_size": 8.0}, TypeError, "padded_size must be a static integer, got 8.0"),
    ],
)
def test_bad_sizes(options, error, message):
    with pytest.raises(error, match=f"^concatenate: {message}"):
        jaxops.concatenate([np.zeros(2), np.zeros(3)], **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sizes": [2, 2]}, ValueError, r"sizes must sum to 5.*\(5,\) along axis 0, got \(2, 2\)"),
        ({"sizes": []}, ValueError, "sizes must sum to 5"),
        ({"sizes": [6, -1]}, ValueError, r"sizes\[1\] must be >= 0, got -1"),
        ({"sizes": 5}, TypeError, "sizes must be a sequence of integers, got 5"),
        ({"sizes": [5], "axis": 1}, ValueError, r"axis must be in \[-1, 0\], got 1"),
        ({"sizes": [5], "axis": None}, TypeError, "axis must be a static integer, got None"),
        (
            {"sizes": [2, 3], "padded_sizes": [2]},
            ValueError,
            "padded_sizes must have one entry for each of the 2 sizes, got 1",
        ),
        (
            {"sizes": [2, 3], "padded_sizes": [2, 2]},
            ValueError,
            r"padded_sizes\[1\] must be >= 3, got 2",
        ),
    ],
)
def test_bad_splits(options, error, message):
    with pytest.raises(error, match=f"^split: {message}"):
        jaxops.split(np.zeros(5), **options)


def test_traced_sizes_are_refused():
    with pytest.raises(TypeError, match=r"^concatenate: sizes\[0\] must be a static integer"):
        jax.jit(lambda n: jaxops.concatenate([np.zeros(3)], sizes=[n]))(2)


def test_sizes_are_by_keyword():
    with pytest.raises(TypeError, match="positional"):
        jaxops.concatenate([np.zeros(2)], 0, None, [2])
