"""Lightweight convolution: values, gradients and errors beyond what every operator is checked for.

The oracle is written out in NumPy, one tap at a time, and shares nothing with the library.
"""

from __future__ import annotations

import functools
import importlib
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._core import native
from jaxops._families import sequences
from jaxops.lightweight_conv import primitives
from jaxops.reference import lightweight_conv as reference
from jaxops.testing.measure import assert_close, custom_calls, on_reference, run, vjp_of
from jaxops.testing.spec import normal

LAYOUTS = ("NTC", "NCT")
ACTIVATIONS = (None, "relu", "silu", "gelu")
FLOATS = ("float16", "bfloat16", "float32", "float64")


# --- the oracle ----------------------------------------------------------------------------------


def resolve(padding, taps, dilation):
    reach = (taps - 1) * dilation
    return {"causal": reach, "same": reach // 2}.get(padding, padding)


def taps_in_range(time, taps, dilation, padding):
    """(tap, the steps of y, the steps of x) of every tap that meets the sequence."""
    for tap in range(taps):
        shift = tap * dilation - padding
        low, high = max(0, -shift), min(time, time - shift)
        if low < high:
            yield tap, slice(low, high), slice(low + shift, high + shift)


def correlate(x, weight, padding, dilation):
    """The convolution of (B, T, C) and (H, K)."""
    per_channel = np.repeat(weight, x.shape[2] // weight.shape[0], axis=0)
    y = np.zeros(x.shape)
    for tap, to, of in taps_in_range(x.shape[1], weight.shape[1], dilation, padding):
        y[:, to] += per_channel[:, tap] * x[:, of]
    return y


def correlate_vjp(g, x, weight, padding, dilation):
    heads, taps = weight.shape
    depth = x.shape[2] // heads
    per_channel = np.repeat(weight, depth, axis=0)
    dx, dweight = np.zeros(x.shape), np.zeros((heads, taps))
    for tap, to, of in taps_in_range(x.shape[1], taps, dilation, padding):
        dx[:, of] += per_channel[:, tap] * g[:, to]
        by_channel = (g[:, to] * x[:, of]).sum((0, 1))
        dweight[:, tap] = by_channel.reshape(heads, depth).sum(1)
    return dx, dweight, g.sum((0, 1))


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


GELU = np.sqrt(2 / np.pi)


def activate(z, activation):
    """The activation of z, its derivative, and by how much the derivative magnifies a rounding."""
    if activation is None:
        return z, np.ones_like(z), 1
    if activation == "relu":
        return np.maximum(z, 0), (z > 0).astype(float), 1
    if activation == "silu":
        s = sigmoid(z)
        return z * s, s * (1 + z * (1 - s)), 1
    tanh = np.tanh(GELU * (z + 0.044715 * z**3))
    slope = GELU * (1 + 3 * 0.044715 * z**2)
    # 1 - tanh**2 has twice the error of tanh, and no correct digit if tanh is almost 1.
    magnified = np.abs(z * slope)[tanh**2 < 1].max(initial=1)
    derivative = 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * slope
    return 0.5 * z * (1 + tanh), derivative, magnified


def oracle(g, x, weight, bias, *, padding, dilation, activation, data_format):
    """Value, and cotangents of x, weight and bias, in float64; `activate`'s magnification."""
    g, x, weight = (np.asarray(a, np.float64) for a in (g, x, weight))
    if data_format == "NCT":
        g, x = g.swapaxes(1, 2), x.swapaxes(1, 2)
    padding = resolve(padding, weight.shape[1], dilation)
    z = correlate(x, weight, padding, dilation)
    if bias is not None:
        z = z + np.asarray(bias, np.float64)
    y, slope, magnified = activate(z, activation)
    dx, dweight, dbias = correlate_vjp(g * slope, x, weight, padding, dilation)
    if data_format == "NCT":
        y, dx = y.swapaxes(1, 2), dx.swapaxes(1, 2)
    return [y, dx, dweight] + ([] if bias is None else [dbias]), magnified


def check(
    platform,
    *,
    shape,
    heads,
    taps,
    dtype="float32",
    weight_dtype=None,
    bias_dtype=None,
    padding="causal",
    dilation=1,
    bias=False,
    activation=None,
    data_format="NTC",
):
    """Value and gradients against the oracle; `shape` is (B, T, C)."""
    rng = np.random.default_rng(sum(shape) + 7 * heads + 11 * taps)
    batch, time, channels = shape
    if data_format == "NCT":
        shape = (batch, channels, time)
    dtypes = [dtype, weight_dtype or dtype, bias_dtype or dtype]
    g, x = normal(rng, shape, jnp.dtype(dtype)), normal(rng, shape, jnp.dtype(dtype))
    weight = normal(rng, (heads, taps), jnp.dtype(dtypes[1]))
    arguments = [x, weight]
    if bias:
        arguments.append(normal(rng, (channels,), jnp.dtype(dtypes[2])))
    options = {
        "padding": padding,
        "dilation": dilation,
        "activation": activation,
        "data_format": data_format,
    }

    def function(x, weight, bias=None):
        return jaxops.lightweight_conv(x, weight, bias=bias, **options)

    # One program computes both, because most of the time is the compiler's.
    def alone_and_differentiated(g, *arguments):
        argnums = tuple(range(len(arguments)))
        return function(*arguments), vjp_of(function, argnums)((g,), *arguments)

    fused, *got = run(alone_and_differentiated, platform, g, *arguments)
    want, magnified = oracle(g, x, weight, arguments[2] if bias else None, **options)
    assert [a.dtype for a in got] == [a.dtype for a in (x, *arguments)]
    what = f"{shape}, H = {heads}, K = {taps}, {dtypes}, {options}"
    value_terms = taps + 1
    assert_close([fused], want[:1], f"the value of {what}", dtype=dtype, terms=value_terms)
    # A program of derivatives computes the activation separately: its derivative and the cotangent
    # of its argument are rounded to the dtype of x.
    roundings = 0 if activation is None else 3
    # dx sums the taps of a channel, dweight the entries of a head, dbias those of a channel.
    terms = [value_terms, value_terms, batch * time * channels // heads, batch * time]
    terms = [terms[0], *(n * magnified for n in terms[1:])]
    for i, (a, w) in enumerate(zip(got, want, strict=True)):
        # Each result has the dtype of its argument, and is rounded from values of the dtype of x.
        coarse = max((dtype, a.dtype.name), key=lambda d: jnp.finfo(d).eps)
        name = f"result {i} of value and gradient of {what}"
        assert_close([a], [w], name, dtype=coarse, terms=terms[i], roundings=roundings)


# --- values and gradients ------------------------------------------------------------------------

TIMES = (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 257, 1025)
CHANNELS = (1, 3, 31, 32, 33, 64, 66, 130)
TAPS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 130)
PADDINGS = ("causal", "same", 0, 3)


def sampled_cases(count):
    """Cases that together hold every value of every list above, in the order of a fixed shuffle."""
    rng = np.random.default_rng(7)

    def endless(values):
        while True:
            for i in rng.permutation(len(values)):
                yield values[i]

    def divisor(n):
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        return divisors[rng.integers(len(divisors))]

    columns = zip(
        endless(TIMES),
        endless(CHANNELS),
        endless(TAPS),
        endless(PADDINGS),
        endless((1, 1, 2, 3, 40)),
        endless(LAYOUTS),
        endless(FLOATS),
        endless(ACTIVATIONS),
        endless((False, True)),
        strict=False,
    )
    for (
        time,
        channels,
        taps,
        padding,
        dilation,
        data_format,
        dtype,
        activation,
        bias,
    ) in itertools.islice(columns, count):
        batch = 1 if time * channels > 20_000 else 3
        yield {
            "shape": (batch, time, channels),
            "heads": divisor(channels),
            "taps": taps,
            "padding": min(padding, (taps - 1) * dilation) if padding in (0, 3) else padding,
            "dilation": dilation,
            "data_format": data_format,
            "dtype": dtype,
            "activation": activation,
            "bias": bias,
        }


def case_id(case):
    return ",".join(str(v).replace(" ", "") for v in case.values())


@pytest.mark.any_jax
@pytest.mark.parametrize("case", list(sampled_cases(100)), ids=case_id)
def test_edges_of_tiles(platform, case):
    check(platform, **case)


def test_the_sample_holds_every_value():
    cases = list(sampled_cases(100))
    assert {c["shape"][1] for c in cases} == set(TIMES)
    assert {c["shape"][2] for c in cases} == set(CHANNELS)
    assert {c["taps"] for c in cases} == set(TAPS)


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_empty(platform, shape, data_format, bias):
    check(platform, shape=shape, heads=2, taps=3, data_format=data_format, bias=bias)


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("padding", ["causal", "same", 0, 3, 6])
@pytest.mark.parametrize("time", [1, 2, 3, 6])
def test_more_taps_than_steps(platform, time, padding, data_format):
    shape = (2, time, 6)
    check(platform, shape=shape, heads=3, taps=7, padding=padding, data_format=data_format)


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("dilation", [2, 3, 9, 10, 50])
def test_dilation_up_to_beyond_the_sequence(platform, dilation, data_format):
    options = {"padding": "same", "dilation": dilation, "data_format": data_format}
    check(platform, shape=(2, 10, 6), heads=3, taps=3, dtype="float64", **options)


@pytest.mark.parametrize(
    ("taps", "dilation", "padding"),
    [
        (1, 2**23, "causal"),
        (1, 2**61, 0),
        (2, 2**61, "causal"),
        (3, 2**61, "same"),
        (5, 2**70, 2**70 - 2),
        (5, 2**31, 2**32 + 3),
        (2, 2**62 + 1, 2**61),
        (3, 21, 40),
        (3, 21, 23),
    ],
)
def test_dilation_without_bound(platform, taps, dilation, padding):
    options = {"padding": padding, "dilation": dilation, "bias": True}
    check(platform, shape=(2, 10, 6), heads=3, taps=taps, dtype="float64", **options)
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 10, 6)), rng.normal(size=(3, taps))
    options = {"padding": resolve(padding, taps, dilation), "dilation": dilation}
    want = correlate(x, weight, **options)
    np.testing.assert_allclose(reference.lightweight_conv(x, weight, **options), want, atol=1e-14)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "heads", "taps", "dilation"),
    [
        ((2, 4096, 3), 3, 3, 8),  # taps that are whole vectors apart
        ((2, 4096, 4), 2, 3, 6),  # taps that are not
        ((2, 4099, 3), 3, 5, 4),  # rows that vectors do not divide
        ((1, 9000, 2), 2, 4, 512),
        ((1, 9000, 2), 1, 3, 4096),
        ((2, 2048, 3), 3, 19, 2),
        ((2, 304, 600), 600, 3, 8),  # a block a channel
        ((2, 304, 600), 600, 4, 3),
        ((1, 60_000, 3), 1, 2, 1),
        ((40, 65, 10), 2, 3, 1),
        ((3, 65, 24), 3, 5, 1),  # a block a head
    ],
)
def test_long_and_short_rows(platform, shape, heads, taps, dilation, dtype):
    options = {"padding": "causal", "dilation": dilation, "data_format": "NCT"}
    check(platform, shape=shape, heads=heads, taps=taps, dtype=dtype, bias=True, **options)


def test_every_int_padding(platform):
    for padding in range(9):
        check(platform, shape=(2, 11, 4), heads=2, taps=5, dilation=2, padding=padding, bias=True)


# The CUDA kernels of small calls take no filters of another dtype than x, and no rows of many
# steps.
@pytest.mark.parametrize(
    "case",
    [
        {"shape": (2, 33, 132), "heads": 33, "taps": 5, "weight_dtype": "float32"},
        {"shape": (1, 257, 64), "heads": 8, "taps": 8, "weight_dtype": "float32", "bias": True},
        {"shape": (3, 5, 64), "heads": 64, "taps": 1, "weight_dtype": "float32"},
        {"shape": (2, 70, 6), "heads": 6, "taps": 8, "dilation": 3, "weight_dtype": "float32"},
        {"shape": (2, 1, 128), "heads": 1, "taps": 4, "weight_dtype": "float32", "bias": True},
        {"shape": (1, 9001, 2), "heads": 2, "taps": 3, "bias": True},
        {"shape": (2, 4096, 1), "heads": 1, "taps": 7, "dilation": 2},
        {"shape": (1, 9000, 1), "heads": 1, "taps": 3, "dilation": 2500, "bias": True},
    ],
    ids=case_id,
)
@pytest.mark.parametrize("data_format", LAYOUTS)
def test_short_filters_beyond_small_calls(platform, case, data_format):
    check(platform, **case, dtype="bfloat16", data_format=data_format)


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_activations(platform, activation, bias, data_format):
    options = {"activation": activation, "bias": bias, "data_format": data_format}
    check(platform, shape=(2, 19, 10), heads=5, taps=4, dtype="float64", **options)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "bias_dtype"),
    [
        ("bfloat16", "float32", "float32"),
        ("float16", "float32", "bfloat16"),
        ("float32", "float64", "float32"),
        ("float32", "float32", "float64"),
        ("float16", "float64", "float64"),
        ("float32", "bfloat16", "float16"),
        ("float64", "float32", "float16"),
        ("bfloat16", "float16", "bfloat16"),
    ],
)
def test_mixed_dtypes(platform, dtype, weight_dtype, bias_dtype, activation):
    for data_format in LAYOUTS:
        check(
            platform,
            shape=(2, 21, 12),
            heads=4,
            taps=3,
            dtype=dtype,
            weight_dtype=weight_dtype,
            bias_dtype=bias_dtype,
            bias=True,
            activation=activation,
            data_format=data_format,
        )


@pytest.mark.parametrize("bias_dtype", ["float32", "float64"])
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("data_format", LAYOUTS)
def test_long_16_bit_filters_of_float32(platform, data_format, weight_dtype, bias_dtype):
    check(
        platform,
        shape=(2, 40, 32),
        heads=2,
        taps=11,
        dtype="float32",
        weight_dtype=weight_dtype,
        bias_dtype=bias_dtype,
        bias=True,
        data_format=data_format,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_values_under_derivatives_are_rounded_once(platform, activation, data_format, dtype):
    rng = np.random.default_rng(0)
    x, weight, bias = rng.normal(size=(2, 50, 50)), rng.normal(size=(5, 3)), rng.normal(size=50)
    arguments = [jnp.asarray(a, dtype) for a in (x, weight, bias)]

    def function(x, weight, bias):
        options = {"activation": activation, "data_format": data_format}
        return jaxops.lightweight_conv(x, weight, bias=bias, **options)

    def values(*arguments):
        of_jvp, _ = jax.jvp(function, arguments, arguments)
        return function(*arguments), of_jvp, jax.vjp(function, *arguments)[0]

    exact = np.asarray(function(*(a.astype("float64") for a in arguments)))
    allowed = 0.6 * float(jnp.finfo(dtype).eps) * np.abs(exact)
    for value in run(values, platform, *arguments):
        # float16 rounds smaller values to subnormals.
        wrong = (np.abs(value.astype("float64") - exact) > allowed) & (np.abs(exact) > 2**-13)
        assert not wrong.any()

    # The derivative's input is a rounded sum: its error is that of a sum, times the second
    # derivative.
    gradient = jax.grad(lambda *xs: function(*xs).sum())
    want = np.asarray(gradient(*(a.astype("float64") for a in arguments)))
    (got,) = run(lambda *xs: [gradient(*xs)], platform, *arguments)
    slack = 8 * float(jnp.finfo(dtype).eps) * np.abs(np.asarray(weight)).max()
    if activation != "relu":  # the derivative of relu has a step
        np.testing.assert_allclose(got.astype("float64"), want, rtol=slack, atol=slack)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("data_format", LAYOUTS)
def test_half_precision_accumulates_in_float32(platform, dtype, data_format):
    """Sums of ones end at 2048 and at 256 if they are accumulated in half precision."""
    time, taps = 6000, 4500
    x = jnp.ones((1, time, 1) if data_format == "NTC" else (1, 1, time), dtype)
    weight = jnp.ones((1, taps), dtype)
    function = functools.partial(jaxops.lightweight_conv, data_format=data_format)
    y, dx, dweight = run(vjp_of(function, (0, 1)), platform, (x,), x, weight)
    steps = np.arange(time)
    want = [
        np.minimum(steps + 1, taps).reshape(x.shape),
        np.minimum(time - steps, taps).reshape(x.shape),
        time - (taps - 1 - np.arange(taps))[None],
    ]
    for got, exact in zip((y, dx, dweight), want, strict=True):
        np.testing.assert_array_equal(got, exact.astype(got.dtype))


def test_worked_by_hand(platform):
    x = np.array([[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]])
    weight = np.array([[1.0, 2.0, 4.0]])
    expected = {
        # y[t] = 4 x[t] + 2 x[t-1] + x[t-2]
        "causal": [4.0, 10.0, 17.0],
        # y[t] = x[t-1] + 2 x[t] + 4 x[t+1]
        "same": [10.0, 17.0, 8.0],
        # y[t] = x[t] + 2 x[t+1] + 4 x[t+2]
        0: [17.0, 8.0, 3.0],
    }
    for padding, y in expected.items():
        function = functools.partial(jaxops.lightweight_conv, padding=padding)
        (got,) = run(function, platform, x, weight)
        np.testing.assert_array_equal(got, np.multiply.outer(y, [1.0, 10.0])[None])

    # K = 2, dilation 2, "same": P = 1, y[t] = x[t-1] + 2 x[t+1]
    function = functools.partial(jaxops.lightweight_conv, padding="same", dilation=2)
    (got,) = run(function, platform, x, weight[:, :2])
    np.testing.assert_array_equal(got[0, :, 0], [4.0, 1.0 + 6.0, 2.0])


def test_heads_are_contiguous(platform):
    x = np.ones((1, 1, 6))
    (got,) = run(jaxops.lightweight_conv, platform, x, np.array([[1.0], [2.0], [3.0]]))
    np.testing.assert_array_equal(got[0, 0], [1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "heads", "taps", "padding", "dilation"),
    [((2, 13, 6), 3, 4, 5, 2), ((1, 30, 8), 8, 3, 0, 1), ((3, 4, 4), 1, 7, 3, 1)],
)
def test_agrees_with_grouped_convolution(
    platform, shape, heads, taps, padding, dilation, data_format
):
    """Compares value and gradients, also the reference's, with `jax.lax` in float64."""
    rng = np.random.default_rng(0)
    batch, time, channels = shape
    shape = shape if data_format == "NTC" else (batch, channels, time)
    g, x, weight = (normal(rng, s, np.float64) for s in (shape, shape, (heads, taps)))
    options = {"padding": padding, "dilation": dilation, "data_format": data_format}

    def by_lax(x, weight):
        per_channel = jnp.repeat(weight, channels // heads, axis=0).T[:, None]
        return jax.lax.conv_general_dilated(
            x,
            per_channel,
            window_strides=(1,),
            padding=[(padding, (taps - 1) * dilation - padding)],
            rhs_dilation=(dilation,),
            dimension_numbers=(data_format.replace("T", "W"), "WIO", data_format.replace("T", "W")),
            feature_group_count=channels,
            precision="highest",
        )

    def ours(x, weight):
        return jaxops.lightweight_conv(x, weight, **options)

    def defined(x, weight):
        return reference.lightweight_conv(x, weight, **options)

    want = on_reference(vjp_of(by_lax, (0, 1)), (g,), x, weight)
    terms = x.size // heads + taps
    for function in (ours, defined):
        got = run(vjp_of(function, (0, 1)), platform, (g,), x, weight)
        assert_close(got, want, function.__name__, dtype="float64", terms=terms)
    direct = reference.lightweight_conv_filter_grad(x, g, heads=heads, taps=taps, **options)
    assert_close([np.asarray(direct).sum(0)], want[2:], "filter_grad", dtype="float64", terms=terms)


# Tensor cores multiply heads of whole fragments with more than 8 taps: blocks of 16 steps and 16
# channels, tiles of 64 and 128 steps, and taps that fill two, three, five, nine and more blocks.
DEEP_HEADS = [
    {"shape": (2, 128, 64), "heads": 4, "taps": 9},
    {"shape": (3, 72, 48), "heads": 3, "taps": 15, "padding": "same", "bias": True},
    {"shape": (2, 200, 96), "heads": 2, "taps": 31},
    {"shape": (1, 64, 80), "heads": 5, "taps": 33, "padding": 3, "activation": "silu"},
    {"shape": (2, 264, 32), "heads": 1, "taps": 50, "padding": "same"},
    {"shape": (1, 8, 16), "heads": 1, "taps": 63, "padding": 30, "bias": True},
    {"shape": (2, 136, 64), "heads": 2, "taps": 127, "padding": "same", "bias": True},
    {"shape": (1, 328, 16), "heads": 1, "taps": 140},
    {"shape": (1, 64, 16), "heads": 1, "taps": 70},
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("case", DEEP_HEADS, ids=case_id)
def test_long_filters_of_deep_heads(platform, case, data_format, dtype):
    check(platform, **case, data_format=data_format, dtype=dtype)


# On GPUs, long filters in "NTC" of heads of few channels are computed in "NCT".
LONG_FILTERS_IN_NCT = [
    {"shape": (2, 1104, 24), "heads": 24, "taps": 800, "bias": True, "activation": "silu"},
    {"shape": (1, 1024, 48), "heads": 6, "taps": 767, "padding": "same"},
    {"shape": (3, 512, 20), "heads": 10, "taps": 191, "bias": True},
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", LONG_FILTERS_IN_NCT, ids=case_id)
def test_long_filters_in_ntc_of_heads_of_few_channels(platform, case, dtype, monkeypatch):
    monkeypatch.setattr(primitives, "_LEAST_IN_NCT", 0)
    check(platform, **case, data_format="NTC", dtype=dtype)


def test_a_batch_of_long_filters_in_ntc(platform, monkeypatch):
    """Filters and arrays vary together."""
    monkeypatch.setattr(primitives, "_LEAST_IN_NCT", 0)
    rng = np.random.default_rng(0)
    x, g = (normal(rng, (3, 1, 512, 8), np.float32) for _ in range(2))
    weight = normal(rng, (3, 8, 200), np.float32)

    def of_one(x, weight):
        return jaxops.lightweight_conv(x, weight)

    def defined(x, weight):
        return reference.lightweight_conv(x, weight, padding=199, dilation=1, data_format="NTC")

    got = run(vjp_of(jax.vmap(of_one), (0, 1)), platform, (g,), x, weight)
    want = on_reference(vjp_of(jax.vmap(defined), (0, 1)), (g,), x, weight)
    assert_close(got, want, "batch", dtype="float32", terms=x.size)


@pytest.mark.parametrize(
    "options",
    [
        {"dilation": 3},
        {"dilation": 40, "padding": "same"},
        {"dilation": 2, "padding": 7, "bias": True},
        {"bias_dtype": "float32", "bias": True, "activation": "gelu"},
        {"weight_dtype": "float32"},
        {"weight_dtype": "float32", "taps": 40, "bias": True},
        {"weight_dtype": "float32", "taps": 100},
        {"weight_dtype": "float32", "dtype": "float16"},
        {"weight_dtype": "bfloat16", "dtype": "float32"},
        {"shape": (2, 77, 48)},
    ],
    ids=case_id,
)
@pytest.mark.parametrize("data_format", LAYOUTS)
def test_options_of_long_filters_of_deep_heads(platform, options, data_format):
    given = {"shape": (2, 112, 48), "heads": 3, "taps": 17, "dtype": "bfloat16", **options}
    check(platform, **given, data_format=data_format)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("data_format", LAYOUTS)
def test_batched_filters_of_deep_heads(platform, data_format, dtype):
    """Each call under vmap has its own filters, some of which the steps of one block share."""
    rng = np.random.default_rng(3)
    shape = (2, 40, 32) if data_format == "NTC" else (2, 32, 40)
    g, x = (normal(rng, (3, *shape), jnp.dtype(dtype)) for _ in range(2))
    weight = normal(rng, (3, 2, 11), jnp.dtype(dtype))
    function = functools.partial(jaxops.lightweight_conv, data_format=data_format)
    pulled = vjp_of(function, (0, 1))

    def batched(g, x, weight):
        return jax.vmap(lambda g, x, weight: pulled((g,), x, weight))(g, x, weight)

    got = run(batched, platform, g, x, weight)
    options = {"padding": "causal", "dilation": 1, "activation": None, "data_format": data_format}
    want = [oracle(*one, None, **options)[0] for one in zip(g, x, weight, strict=True)]
    for i, (result, terms) in enumerate(zip(got, (12, 12, 2 * 40 * 16), strict=True)):
        exact = np.stack([w[i] for w in want])
        assert_close([result], [exact], f"result {i}", dtype=dtype, terms=terms)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(data=st.data())
def test_any_shape(platform, data):
    draw = data.draw
    heads, depth = draw(st.integers(1, 5)), draw(st.integers(0, 5))
    taps, dilation = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    reach = (taps - 1) * dilation
    check(
        platform,
        shape=(draw(st.integers(0, 3)), draw(st.integers(0, 20)), heads * depth),
        heads=heads,
        taps=taps,
        dilation=dilation,
        padding=draw(st.one_of(st.sampled_from(["causal", "same"]), st.integers(0, reach))),
        data_format=draw(st.sampled_from(LAYOUTS)),
        dtype=draw(st.sampled_from(FLOATS)),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)),
    )


# --- what derivatives call -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argnums", "calls"),
    [
        ((0,), {"jaxops_lightweight_conv": 1}),
        ((1,), {"jaxops_lightweight_conv_filter_grad": 1}),
        ((0, 1), {"jaxops_lightweight_conv_backward": 1}),
        ((1, 2), {"jaxops_lightweight_conv_backward": 1}),
    ],
)
def test_unused_gradients_cost_nothing(platform, argnums, calls):
    """All three are computed and some are unused, as optimizers with frozen weights do."""
    rng = np.random.default_rng(0)
    shapes = [(2, 9, 6), (2, 9, 6), (3, 4), (6,)]
    arguments = [normal(rng, shape, np.float32) for shape in shapes]

    def function(x, weight, bias):
        return jaxops.lightweight_conv(x, weight, bias=bias)

    def some(g, *arguments):
        _, gradients = vjp_of(function, (0, 1, 2))((g,), *arguments)
        return [gradients[i] for i in argnums]

    placed = jax.device_put(arguments, platform.device)
    program = jax.jit(some).lower(*placed).compile()
    assert custom_calls(program) == calls
    want = vjp_of(function, (0, 1, 2))((placed[0],), *placed[1:])[1]
    for got, i in zip(program(*placed), argnums, strict=True):
        terms = 2 * 9 * 6
        exact = [np.asarray(want[i], np.float64)]
        assert_close([np.asarray(got)], exact, f"{i}", dtype="float32", terms=terms)


# --- taps that read nothing ----------------------------------------------------------------------


@pytest.mark.any_jax
@pytest.mark.parametrize("has_state", [False, True])
def test_taps_that_read_are_kept(has_state):
    """No tap that reads is left out, and no more are kept than the padding of the rest needs."""
    for time, taps, dilation in itertools.product((1, 2, 3, 8), range(1, 8), (1, 2, 3, 5, 9, 20)):
        for padding in range((taps - 1) * dilation + 1):
            kept = sequences.taps_that_read(padding, dilation, taps, time, has_state)
            distances = [k * dilation - padding for k in range(taps)]
            least = -padding if has_state else 1 - time
            read = {k for k, distance in enumerate(distances) if least <= distance < time}
            assert read <= {*kept} <= {*range(taps)}
            before, after = distances[kept.start], distances[kept.stop - 1]
            assert before <= 0 <= after
            if kept.start not in read:
                assert before + dilation > 0
            if kept.stop - 1 not in read:
                assert after - dilation < 0


def primitives_of(function, *arguments):
    """The equations of a function's program."""
    return {e.primitive.name: e for e in jax.make_jaxpr(function)(*arguments).eqns}


@pytest.mark.parametrize(
    ("time", "taps", "padding", "with_state", "kept"),
    [
        (8, 31, "causal", False, 8),
        (8, 31, 0, False, 8),
        (8, 31, "same", False, 15),
        (8, 31, "same", True, 23),
        (1, 31, "causal", False, 1),
        # All taps read.
        (8, 31, "causal", True, 31),
        (31, 31, "causal", False, 31),
        (16, 31, "same", False, 31),
        (8, 4, "causal", False, 4),
    ],
)
def test_kernels_get_no_tap_that_reads_nothing(time, taps, padding, with_state, kept):
    x, weight = jnp.ones((2, 6, time)), jnp.ones((3, taps))
    state = jnp.ones((2, 6, resolve(padding, taps, 1))) if with_state else None

    def function(x, weight):
        return jaxops.lightweight_conv(
            x, weight, padding=padding, initial_state=state, data_format="NCT"
        )

    found = primitives_of(function, x, weight)
    assert found["lightweight_conv"].invars[1].aval.shape == (1, 3, kept)
    assert ("slice" in found) == (kept < taps)
    derivative = jax.grad(lambda x, weight: function(x, weight).sum(), (0, 1))
    found = primitives_of(derivative, x, weight)
    assert found["lightweight_conv_backward"].invars[1].aval.shape == (1, 3, kept)


def test_sequences_of_unknown_length_have_all_taps():
    (time,) = jax.export.symbolic_shape("t")
    for length in (0, time):
        x, weight = jax.ShapeDtypeStruct((2, length, 6), np.float32), jnp.ones((3, 31))
        found = primitives_of(jaxops.lightweight_conv, x, weight)
        assert found["lightweight_conv"].invars[1].aval.shape == (1, 3, 31)


def test_taps_that_devices_share_on_explicit_meshes(platform):
    if len(platform.devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(platform.devices[:2], ("d",), axis_types=(AxisType.Explicit,))
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 8, 6)), rng.normal(size=(3, 32))
    function = functools.partial(jaxops.lightweight_conv, padding="same")
    pulled = vjp_of(function, (0, 1))
    want = run(pulled, platform, (x,), x, weight)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P()), jax.device_put(weight, P(None, "d"))
        got = jax.jit(pulled)((placed[0],), *placed)
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


# --- NaN stays in its windows --------------------------------------------------------------------


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("step", [0, 63, 64, 149])
def test_nan_reaches_only_its_window(platform, step, dtype, data_format):
    batch, time, channels, heads, taps, dilation, padding = 2, 150, 70, 35, 5, 2, 3
    shape = (batch, time, channels) if data_format == "NTC" else (batch, channels, time)
    rng = np.random.default_rng(0)
    g, x = normal(rng, shape, jnp.dtype(dtype)), normal(rng, shape, jnp.dtype(dtype))
    weight = normal(rng, (heads, taps), jnp.dtype(dtype))
    channel = 33
    at = (1, step, channel) if data_format == "NTC" else (1, channel, step)
    poisoned = x.copy()
    poisoned[at] = np.nan

    def function(x, weight):
        return jaxops.lightweight_conv(
            x, weight, padding=padding, dilation=dilation, data_format=data_format
        )

    clean, got = (run(vjp_of(function, (0, 1)), platform, (g,), a, weight) for a in (x, poisoned))
    steps = [step + padding - k * dilation for k in range(taps)]
    hit = np.zeros(shape, bool)
    for t in (t for t in steps if 0 <= t < time):
        hit[(1, t, channel) if data_format == "NTC" else (1, channel, t)] = True
    rows = np.zeros((heads, taps), bool)
    rows[channel // (channels // heads), [0 <= t < time for t in steps]] = True
    for name, mask, a, b in (("y", hit, clean[0], got[0]), ("dweight", rows, clean[2], got[2])):
        np.testing.assert_array_equal(np.isnan(b), mask, err_msg=name)
        np.testing.assert_array_equal(b[~mask], a[~mask], err_msg=name)
    np.testing.assert_array_equal(got[1], clean[1], err_msg="dx does not depend on x")


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("step", [0, 70, 135])
def test_what_is_not_finite_in_deep_heads(platform, step, value, dtype, data_format):
    """Zeros of the matrices that tensor cores multiply must not be multiplied by it."""
    batch, time, channels, heads, taps, padding = 2, 136, 48, 3, 17, 5
    shape = (batch, time, channels) if data_format == "NTC" else (batch, channels, time)
    rng = np.random.default_rng(0)
    g, x = normal(rng, shape, jnp.dtype(dtype)), normal(rng, shape, jnp.dtype(dtype))
    weight = normal(rng, (heads, taps), jnp.dtype(dtype))
    x[(1, step, 33) if data_format == "NTC" else (1, 33, step)] = value
    g[(0, 70, 12) if data_format == "NTC" else (0, 12, 70)] = value
    options = {"padding": padding, "dilation": 1, "data_format": data_format}
    function = functools.partial(jaxops.lightweight_conv, **options)
    got = run(vjp_of(function, (0, 1)), platform, (g,), x, weight)
    with np.errstate(invalid="ignore"):
        want, _ = oracle(g, x, weight, None, activation=None, **options)
    terms = (taps + 1, taps + 1, batch * time * channels // heads)
    for i, (a, w) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(w), err_msg=f"result {i}")
        np.testing.assert_array_equal(np.isposinf(a), np.isposinf(w), err_msg=f"result {i}")
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(w), err_msg=f"result {i}")
        finite = np.isfinite(w)
        assert finite.mean() > 0.3
        a, w = np.where(finite, a, 0).astype(a.dtype), np.where(finite, w, 0)
        assert_close([a], [w], f"result {i}", dtype=dtype, terms=terms[i])
    # dx does not depend on x, to the last bit.
    clean = run(vjp_of(function, (0, 1)), platform, (g,), np.where(np.isfinite(x), x, 0), weight)
    np.testing.assert_array_equal(got[1].astype(np.float64), clean[1].astype(np.float64))


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32"])
def test_infinite_filters_of_deep_heads(platform, weight_dtype, dtype, data_format):
    batch, time, channels, heads, taps = 1, 72, 48, 3, 17
    rng = np.random.default_rng(0)
    x = normal(rng, (batch, time, channels), jnp.dtype(dtype))
    weight = normal(rng, (heads, taps), jnp.dtype(weight_dtype))
    weight[1, 4] = np.inf
    function = functools.partial(jaxops.lightweight_conv, data_format=data_format)
    laid_out = x if data_format == "NTC" else x.swapaxes(1, 2)
    (y,) = run(function, platform, laid_out, weight)
    y = (y if data_format == "NTC" else y.swapaxes(1, 2)).astype(np.float64)
    assert np.isfinite(y[..., :16]).all()
    assert np.isfinite(y[..., 32:]).all()
    # Tap 4 of 17 is 12 steps back; before the sequence its factors are zeros.
    of_head = slice(16, 32)
    assert np.isnan(y[:, :12, of_head]).all()
    signs = np.sign(x[:, :-12, of_head].astype(np.float64))
    np.testing.assert_array_equal(y[:, 12:, of_head], np.where(signs == 0, np.nan, signs * np.inf))


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("padding", ["same", "causal"])
@pytest.mark.parametrize("taps", [2, 3, 4, 7, 8])
def test_infinite_taps_beyond_the_ends(platform, taps, padding, dtype, data_format):
    """A tap that is not finite is multiplied by the zeros around the sequence, too."""
    batch, time, channels = 2, 21, 40
    rng = np.random.default_rng(taps)
    weight = normal(rng, (channels, taps), jnp.dtype(dtype))
    weight[3, 0] = weight[20, -1] = np.inf
    before = taps - 1 if padding == "causal" else (taps - 1) // 2
    g, x = (normal(rng, (batch, time, channels), jnp.dtype(dtype)) for _ in range(2))
    x[x == 0] = g[g == 0] = 1

    def along(x, weight, before):
        wide = np.pad(x.astype(np.float64), ((0, 0), (before, taps - 1 - before), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(wide, taps, axis=1)
        with np.errstate(invalid="ignore"):
            return (windows * weight.astype(np.float64)).sum(-1)

    def both(x, g):
        function = functools.partial(
            jaxops.lightweight_conv, weight=weight, padding=padding, data_format=data_format
        )
        y, pull = jax.vjp(function, x)
        return y, *pull(g)

    lay_out = (lambda a: a) if data_format == "NTC" else (lambda a: a.swapaxes(1, 2))
    got = run(both, platform, lay_out(x), lay_out(g))
    want = along(x, weight, before), along(g, weight[:, ::-1], taps - 1 - before)
    for a, b in zip(got, want, strict=True):
        a = lay_out(a).astype(np.float64)
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(a), test(b))


# --- arguments -----------------------------------------------------------------------------------


def test_numpy_lists_and_scalars_are_arrays():
    x, weight = np.arange(6.0).reshape(1, 3, 2), [[1.0, 2.0]]
    y = jaxops.lightweight_conv(x, weight, padding=np.int64(1), dilation=np.int32(1), bias=[0, 1.0])
    assert isinstance(y, jax.Array)
    np.testing.assert_array_equal(y[0], [[0, 3], [4, 8], [10, 14]])


def test_weak_types_stay_out():
    x = jnp.ones((1, 3, 2), jnp.bfloat16)
    y = jaxops.lightweight_conv(x, jnp.full((1, 2), 0.5), bias=jnp.zeros(2) + 1.0)
    assert y.dtype == jnp.bfloat16
    assert not y.weak_type


@pytest.mark.parametrize("argument", ["x", "weight", "bias"])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float8_e4m3fn"])
def test_dtypes_that_are_not_float(argument, dtype):
    arguments = {"x": jnp.ones((1, 3, 2)), "weight": jnp.ones((1, 2)), "bias": jnp.ones(2)}
    arguments[argument] = arguments[argument].astype(dtype)
    with pytest.raises(TypeError, match=rf"^lightweight_conv: {argument} must have.*got {dtype}"):
        jaxops.lightweight_conv(**arguments)


@pytest.mark.parametrize("argument", ["x", "weight", "bias"])
@pytest.mark.parametrize("value", ["text", {}, object()])
def test_arguments_that_are_no_arrays(argument, value):
    arguments = {"x": jnp.ones((1, 3, 2)), "weight": jnp.ones((1, 2)), argument: value}
    with pytest.raises(TypeError, match=f"^lightweight_conv: {argument} must be an array"):
        jaxops.lightweight_conv(**arguments)


@pytest.mark.parametrize(
    ("argument", "shape"),
    [("x", ()), ("x", (3,)), ("weight", (2,)), ("weight", (1, 1, 2))],
)
def test_ranks(argument, shape):
    arguments = {"x": jnp.ones((1, 3, 2)), "weight": jnp.ones((1, 2)), argument: jnp.ones(shape)}
    with pytest.raises(ValueError, match=f"^lightweight_conv: {argument} must have shape"):
        jaxops.lightweight_conv(**arguments)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 3, 5), (2, 2), (5,)), r"H = 2.*C = 5.*\(1, 3, 5\).*NTC"),
        (((1, 3, 2), (3, 2), (2,)), "H = 3.*C = 2"),
        (((1, 3, 2), (0, 2), (2,)), r"H >= 1 and K >= 1, got \(0, 2\)"),
        (((1, 3, 2), (1, 0), (2,)), r"H >= 1 and K >= 1, got \(1, 0\)"),
        (((1, 3, 2), (1, 2), (3,)), r"bias must have shape \(2,\).*got \(3,\)"),
        (((1, 3, 2), (1, 2), (1,)), r"bias must have shape \(2,\).*got \(1,\)"),
        (((1, 3, 2), (1, 2), (2, 1)), r"bias must have shape \(C,\).*got shape \(2, 1\)"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    x, weight, bias = map(jnp.ones, shapes)
    with pytest.raises(ValueError, match=f"^lightweight_conv: .*{message}"):
        jaxops.lightweight_conv(x, weight, bias=bias)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"padding": -1}, ValueError, r"padding must be in \[0, 4\], got -1"),
        ({"padding": 5}, ValueError, r"padding must be in \[0, 4\], got 5"),
        ({"padding": "valid"}, ValueError, "padding must be one of 'causal', 'same', got 'valid'"),
        ({"padding": 1.0}, TypeError, "padding must be a static integer, got 1.0"),
        ({"padding": True}, TypeError, "padding must be a static integer, got True"),
        ({"padding": None}, TypeError, "padding must be a static integer, got None"),
        ({"padding": (1, 1)}, TypeError, "padding must be a static integer"),
        ({"dilation": 0}, ValueError, "dilation must be >= 1, got 0"),
        ({"dilation": -2}, ValueError, "dilation must be >= 1, got -2"),
        ({"dilation": 1.5}, TypeError, "dilation must be a static integer, got 1.5"),
        ({"dilation": "2"}, TypeError, "dilation must be a static integer, got '2'"),
        ({"activation": "tanh"}, ValueError, "activation must be one of None, 'relu', 'silu'"),
        ({"activation": jax.nn.tanh}, ValueError, "activation must be one of"),
        ({"activation": ["relu"]}, ValueError, "activation must be one of"),
        ({"data_format": "NHWC"}, ValueError, "data_format must be one of 'NTC', 'NCT'"),
        ({"data_format": None}, ValueError, "data_format must be one of 'NTC', 'NCT'"),
    ],
)
def test_options_that_are_none(options, error, message):
    x, weight = jnp.ones((1, 3, 2)), jnp.ones((1, 3))
    with pytest.raises(error, match=f"^lightweight_conv: {message}"):
        jaxops.lightweight_conv(x, weight, **{"dilation": 2, **options})


def test_traced_options_are_refused():
    function = jax.jit(lambda n: jaxops.lightweight_conv(np.ones((1, 3, 2)), [[1.0]], dilation=n))
    with pytest.raises(TypeError, match="lightweight_conv: dilation must be a static integer"):
        function(1)


def test_options_are_by_keyword():
    with pytest.raises(TypeError, match="positional"):
        jaxops.lightweight_conv(np.ones((1, 3, 2)), [[1.0]], "same")


# --- beyond 2**31 elements -----------------------------------------------------------------------


@pytest.mark.xdist_group("most of the memory")
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize(("depth", "taps"), [(2, 4), (16, 9)])
def test_more_than_2_to_the_31_elements(platform, depth, taps, data_format):
    """Compares value and gradient around the ends and on both sides of element 2**31."""
    if platform.name == "cpu":
        pytest.skip("the index arithmetic of the host is 64-bit throughout; too slow here")
    limit = platform.device.memory_stats()["bytes_limit"]
    batch, time, channels = 3, 1 << 17, 6000
    elements = batch * time * channels
    assert elements > 2**31
    needed = 6 * 2 * elements
    if limit < needed:
        pytest.skip(f"needs {needed >> 30} GiB of device memory, there are {limit >> 30}")
    heads = channels // depth
    shape = (batch, time, channels) if data_format == "NTC" else (batch, channels, time)

    @jax.jit
    def make():
        """Small integers, whose short sums are exact, and which differ between neighbours."""
        t, c = (
            jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            for axis in ((1, 2) if data_format == "NTC" else (2, 1))
        )
        b = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        return ((t * 7 + c * 3 + b * 5) % 11 - 5).astype(jnp.bfloat16)

    def x_at(b, t, c):
        return 0 if not 0 <= t < time else (t * 7 + c * 3 + b * 5) % 11 - 5

    weight = (np.arange(heads * taps).reshape(heads, taps) % 5 - 2).astype(jnp.bfloat16)
    function = functools.partial(jaxops.lightweight_conv, data_format=data_format)
    with jax.default_device(platform.device):
        x = make()
        y, pull = jax.vjp(function, x, jnp.asarray(weight))
        probes = [(0, 0, 0), (0, 5, channels - 1), (batch - 1, time - 1, channels - 1)]
        for flat in (2**31 - 1, 2**31, 2**31 + 1, 2**31 + 64 * channels + 7, elements - 2):
            index = np.unravel_index(flat, shape)
            probes.append(index if data_format == "NTC" else (index[0], index[2], index[1]))
        for b, t, c in probes:
            b, t, c = int(b), int(t), int(c)
            at = (b, t, c) if data_format == "NTC" else (b, c, t)
            w = [int(v) for v in weight[c // depth]]
            value = sum(w[k] * x_at(b, t + k - taps + 1, c) for k in range(taps))
            assert float(y[at]) == value, (b, t, c)
        dx, dweight = pull(x)
        del y, pull
        for b, t, c in probes:
            b, t, c = int(b), int(t), int(c)
            at = (b, t, c) if data_format == "NTC" else (b, c, t)
            w = [int(v) for v in weight[c // depth]]
            slope = sum(w[k] * x_at(b, t - k + taps - 1, c) for k in range(taps))
            assert float(dx[at]) == slope, (b, t, c)
        # A head of the last channels, whose sums are over all steps of all batch entries.
        steps = np.arange(time)
        for head in (0, heads - 1):
            exact = np.zeros(taps)
            of_head = range(depth * head, depth * (head + 1))
            for b, c in itertools.product(range(batch), of_head):
                row = ((steps * 7 + c * 3 + b * 5) % 11 - 5).astype(np.float64)
                for k in range(taps):
                    shift = taps - 1 - k
                    exact[k] += (row[shift:] * row[: time - shift]).sum()
            assert_close(
                [np.asarray(dweight[head])],
                [exact],
                f"dweight of head {head}",
                dtype="bfloat16",
                terms=depth * batch * time,
            )


# --- the operands of the CUDA kernels ------------------------------------------------------------


@pytest.mark.parametrize("data_format", LAYOUTS)
def test_work_space_has_room_for_every_kept_entry(data_format):
    """Each operand may be the only one that varies along a batch dimension that is kept."""
    module = importlib.import_module("jaxops.lightweight_conv.primitives")
    options = module.Options(padding=2, dilation=1, data_format=data_format)
    core = (8, 6) if data_format == "NTC" else (6, 8)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    for x, weight, g in itertools.product((1, 5), repeat=3):
        kept = max(x, weight, g)
        (work,) = native.work_space(
            "jaxops_lightweight_conv_backward",
            [array(x, 4, *core), array(weight, 1, 3, 3), array(g, 4, *core)],
            [array(kept, 4, *core), array(kept, 1, 3, 3)],
            module.attributes(options=options),
        )
        # Sums in float32 of 3 taps and a bias by 6 channels.
        splits, rest = divmod(work.shape[0], kept * 4 * 6 * 4)
        assert (splits >= 1, rest, work.dtype) == (True, 0, jnp.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_gelu_has_derivatives_far_from_zero(dtype):
    """Powers of such numbers overflow."""
    far = float(jnp.finfo(dtype).max) / 4
    x = jnp.array([[-far], [far]], dtype)
    weight = jnp.ones((1, 1), dtype)

    def convolve(x):
        return jaxops.lightweight_conv(x, weight, activation="gelu")

    np.testing.assert_array_equal(jax.jvp(convolve, (x,), (jnp.ones_like(x),))[1], [[0], [1]])
