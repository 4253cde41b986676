"""The kernels that convolve without patches in memory, and how calls are mapped to them."""

from __future__ import annotations

import functools
import math
import re
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._core import compat, native
from jaxops._families.windows import Windows, make_windows
from jaxops.activations import ACTIVATIONS
from jaxops.conv import choices, cpu_kernels, cuda_kernels
from jaxops.conv.choices import Way
from jaxops.testing.measure import assert_close, on_reference, run, vjp_of

NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}


def normal(seed, *shapes, dtype="float64"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def lax_conv(x, kernel, windows: Windows, groups: int = 1):
    """The convolution that windows describe."""
    padding = [
        (low, (out - 1) * s + (k - 1) * d + 1 - low - n)
        for low, out, s, k, d, n in zip(
            windows.low,
            windows.outs,
            windows.strides,
            windows.taps,
            windows.dilation,
            windows.ins,
            strict=True,
        )
    ]
    return lax.conv_general_dilated(
        x,
        kernel,
        windows.strides,
        padding,
        rhs_dilation=windows.dilation,
        dimension_numbers=NUMBERS[len(windows.taps)],
        feature_group_count=groups,
    )


def fake_convolve(target, results, call, *operands, activation="none"):
    """A stand-in of the kernels by `jax.lax`, which reads only the operands of the kernels."""
    windows = call.windows
    rank = len(windows.taps)

    def flat(shape):
        """Dimensions before those of the images count images."""
        return (-1, *shape[-rank - 1 :]) if len(shape) > rank + 2 else shape

    operands = [a.reshape(flat(a.shape)) for a in operands]
    result = np.empty(results[0].shape).reshape(flat(results[0].shape))
    shapes = [a.shape for a in (*operands[:2], result)]
    order = {"jaxops_conv": (0, 1, 2), "jaxops_conv_input_grad": (2, 1, 0)}
    x_shape, kernel_shape, y_shape = (shapes[i] for i in order.get(target, (0, 2, 1)))
    assert (x_shape[1:-1], y_shape[1:-1]) == (windows.ins, windows.outs)
    assert kernel_shape == (*windows.taps, x_shape[-1] // call.groups, y_shape[-1])
    assert (x_shape[-1], y_shape[-1]) == (call.channels, call.outputs)
    if call.kernels == "mma":
        assert y_shape[-1] % 4 == 0
    elif (call.channels, call.outputs) != (call.fan_in, call.fan_out):
        assert call.kernels == "fma"
        assert call.channels % 4 == call.outputs % 4 == 0
    fans = kernel_shape[-2], y_shape[-1] // call.groups
    is_small = min(fans) < 8 and (call.groups > 1 or fans == (1, 1))
    assert is_small == (call.kernels == "direct")
    if x_shape[-1] % 4 and call.kernels == "mma":
        assert x_shape[-1] < 8
        assert windows.dilation == (1,) * rank
        assert windows.taps[-1] * x_shape[-1] <= 24
        assert rank == 1 or windows.taps[0] <= 8
    x, kernel = (jnp.zeros(shape, operands[0].dtype) for shape in (x_shape, kernel_shape))
    if target == "jaxops_conv":
        y = lax_conv(*operands[:2], windows, call.groups)
        if len(operands) > 2:
            assert operands[2].shape == y_shape[-1:]
            y = y + operands[2]
        y = {**ACTIVATIONS, "none": ACTIVATIONS[None]}[activation](y)
        return [y.reshape(results[0].shape)]
    if target == "jaxops_conv_input_grad":
        g, kernel = operands
        (dx,) = jax.linear_transpose(lambda x: lax_conv(x, kernel, windows, call.groups), x)(g)
        return [dx.reshape(results[0].shape)]
    x, g = operands
    return [*jax.linear_transpose(lambda k: lax_conv(x, k, windows, call.groups), kernel)(g), None]


def random_windows(data, rank):
    def each(low, high):
        return data.draw(st.tuples(*[st.integers(low, high)] * rank))

    padding = data.draw(
        st.sampled_from(["SAME", "VALID", tuple(zip(each(0, 3), each(0, 3), strict=True))])
    )
    ins, taps = each(1, 9), each(1, 5)
    return make_windows(
        "test",
        ins,
        taps,
        strides=each(1, 3),
        padding=padding,
        dilation=data.draw(st.sampled_from([1, 1, 2])),
        channels_last=True,
    )


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(data=st.data())
def test_the_form_of_a_convolution_is_that_convolution(data):
    windows = random_windows(data, data.draw(st.integers(1, 2)))
    groups = data.draw(st.sampled_from([1, 1, 3, 5]))
    fans = {1: st.integers(1, 17), 3: st.sampled_from([8, 9, 16]), 5: st.integers(1, 7)}[groups]
    fan_in, fan_out = data.draw(fans), data.draw(fans)
    itemsize, tf32 = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.booleans())
    call = cuda_kernels.make_call(windows, fan_in, fan_out, groups, itemsize=itemsize, tf32=tf32)
    hypothesis.assume(call is not None)
    shapes = (
        (2, *windows.ins, groups * fan_in),
        (*windows.taps, fan_in, groups * fan_out),
        (2, *windows.outs, groups * fan_out),
    )
    x, kernel, g, bias = normal(0, *shapes, shapes[1][-1:])
    activation = data.draw(st.sampled_from(list(ACTIVATIONS)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernels, "_convolve", fake_convolve)
        patch.setattr(native, "work_space", lambda *call: [])
        patch.setattr(native, "conv_is_kernel_grad_split", lambda *sizes: False)
        y = cuda_kernels.forward(x, kernel, call, x.dtype)
        finished = cuda_kernels.forward(x, kernel, call, x.dtype, bias, activation)
        dx = cuda_kernels.input_grad(g, kernel, call, x.dtype)
        dkernel = cuda_kernels.kernel_grad(x, g, call, x.dtype)

    want, pull = jax.vjp(lambda x, k: lax_conv(x, k, windows, groups), x, kernel)
    wants = (want, *pull(g), ACTIVATIONS[activation](want + bias))
    for got, wanted in zip((y, dx, dkernel, finished), wants, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("taps", [(2, 4), (3, 3), (1, 3)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_fills_a_form_up_meets_no_nan(value, taps):
    windows = make_windows(
        "test", (9, 8), taps, strides=2, padding="VALID", dilation=1, channels_last=True
    )
    call = cuda_kernels.make_call(windows, 3, 5)
    x, kernel, g = normal(0, (1, 9, 8, 3), (*taps, 3, 5), (1, *windows.outs, 5))
    x[0, 3, 2, 1] = g[0, 1, 1, 2] = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernels, "_convolve", fake_convolve)
        y = cuda_kernels.forward(x, kernel, call, x.dtype)
        dx = cuda_kernels.input_grad(g, kernel, call, x.dtype)

    want, pull = jax.vjp(lambda x: lax_conv(x, kernel, windows), x)
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(want))
    np.testing.assert_array_equal(np.isfinite(dx), np.isfinite(pull(g)[0]))


@pytest.mark.parametrize(
    ("taps", "channels", "want"),
    [
        ((7, 7), 3, 3),
        ((3, 3), 7, 7),
        ((3, 3), 8, 8),
        ((3, 3), 9, 16),
        ((8, 8), 3, 3),
        ((9, 7), 3, 8),
        ((7, 9), 3, 8),
    ],
)
def test_few_channels_are_filled_up_only_for_large_windows(taps, channels, want):
    def make_call(**options):
        windows = make_windows(
            "test", (40, 40), taps, padding="SAME", strides=2, channels_last=True, **options
        )
        return cuda_kernels.make_call(windows, channels, 64)

    assert make_call(dilation=1).channels == want
    assert make_call(dilation=2).channels == max(8, want)


def test_what_units_channels_are_filled_up_to():
    windows = make_windows(
        "test", (8, 8), (3, 3), strides=1, padding="SAME", dilation=1, channels_last=True
    )

    def sizes(*fans, **options):
        found = cuda_kernels.make_call(windows, *fans, **options)
        return found and (found.channels, found.outputs)

    assert sizes(37, 41) == (40, 48)
    assert sizes(37, 41, itemsize=4) == (40, 44)
    assert sizes(3, 41, takes_few=False) == (8, 48)
    assert sizes(3, 41, itemsize=4) == (3, 41)
    assert sizes(37, 41, itemsize=4, tf32=False) == (37, 41)
    assert sizes(37, 41, itemsize=8) == (37, 41)
    assert sizes(12, 20, 3, itemsize=4) == (36, 60)
    assert sizes(9, 20, 3, itemsize=4) == (27, 60)
    assert sizes(9, 10, 3, itemsize=8) == (27, 30)
    assert sizes(12, 20, 3) is None


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({"itemsize": 2}, "mma"),
        ({"itemsize": 4}, "mma"),
        ({"itemsize": 4, "tf32": False}, "fma"),
        ({"itemsize": 4, "fans": (3, 64)}, "fma"),
        ({"itemsize": 4, "fans": (9, 16), "groups": 2}, "fma"),
        ({"itemsize": 4, "fans": (4, 16), "groups": 2}, "direct"),
        ({"itemsize": 8}, "fma"),
    ],
    ids=str,
)
def test_which_kernels_there_are(options, kernels):
    windows = make_windows(
        "test", (8, 8), (3, 3), strides=1, padding="SAME", dilation=1, channels_last=True
    )
    fans = options.get("fans", (8, 16))
    given = {name: options[name] for name in ("itemsize", "tf32") if name in options}
    assert (
        cuda_kernels.make_call(windows, *fans, options.get("groups", 1), **given).kernels == kernels
    )


@pytest.mark.parametrize(
    ("fans", "groups", "want"),
    [
        ((1, 1), 37, (37, 37)),
        ((1, 3), 5, (5, 15)),
        ((4, 4), 32, (128, 128)),
        ((7, 100), 3, (21, 300)),
        ((1, 1), 1 << 16, (1 << 16, 1 << 16)),
        ((1, 1), 1, (1, 1)),
        ((8, 8), 3, None),
        ((2, 1), 1, None),
    ],
)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_which_groups_are_small(fans, groups, want, itemsize):
    windows = make_windows(
        "test", (8, 8), (3, 3), strides=1, padding="SAME", dilation=1, channels_last=True
    )
    call = cuda_kernels.make_call(windows, *fans, groups, itemsize=itemsize)
    found = (call.channels, call.outputs) if call and call.kernels == "direct" else None
    assert found == want


MIXED = [
    (("bfloat16", "bfloat16"), "float32"),
    (("bfloat16", "bfloat16"), "float16"),
    (("float16", "float32"), None),
    (("float32", "float32"), "bfloat16"),
    (("float32", "float32"), "float64"),
    (("float64", "float16"), "float32"),
]


@pytest.fixture
def faked(monkeypatch):
    """The operands that the kernels get, on the CPU, with `jax.lax` in the kernels' place."""
    calls = []

    def convolve(target, results, call, *operands, **attributes):
        calls.append((target, call))
        return fake_convolve(target, results, call, *operands, **attributes)

    monkeypatch.setattr(cpu_kernels, "prefers", lambda *_: False)
    monkeypatch.setattr(cuda_kernels, "_convolve", convolve)
    monkeypatch.setattr(cuda_kernels, "has_kernels", lambda: True)
    monkeypatch.setattr(cuda_kernels, "are_hopper", lambda: True)
    monkeypatch.setattr(native, "work_space", lambda *call: [])
    monkeypatch.setattr(native, "conv_is_kernel_grad_split", lambda *sizes: False)
    find, operands = cuda_kernels.find_call, cuda_kernels.operands
    monkeypatch.setattr(cuda_kernels, "find_call", lambda o, platform, *a: find(o, "cuda", *a))
    monkeypatch.setattr(cuda_kernels, "operands", lambda platform, *a: operands("cuda", *a))
    return calls


@pytest.mark.parametrize(("dtypes", "preferred"), MIXED, ids=str)
def test_operands_that_are_cast_for_kernels(dtypes, preferred, faked):
    shapes = (2, 5, 6, 8), (3, 3, 8, 8)
    x, kernel = (normal(i, shapes[i], dtype=dtypes[i])[0] for i in range(2))
    (g,) = normal(2, (2, 5, 6, 8), dtype=preferred or dtypes[0])
    ours = functools.partial(jaxops.conv2d, preferred_element_type=preferred)
    got = jax.jit(vjp_of(ours, (0, 1)))((g,), x, kernel)

    def oracle(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS[2])

    want = on_reference(vjp_of(oracle, (0, 1)), (g,), x, kernel)
    assert sorted(target for target, _ in faked) == sorted(cpu_kernels.TARGETS)
    # The kernel is rounded to TF32, which has as many digits as float16.
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize(("dtypes", "preferred"), MIXED, ids=str)
@pytest.mark.parametrize("groups", [1, 16])
def test_kernels_take_any_dtypes(dtypes, preferred, groups, monkeypatch):
    """Compiles for a GPU: operands of two dtypes, or other than the result's, are cast."""
    monkeypatch.setattr(compat, "gpu_capabilities", lambda: {"9.0"})
    monkeypatch.setattr(native, "cuda_architectures", lambda: ("90a",))
    monkeypatch.setattr(native, "work_space", lambda *call: [])
    monkeypatch.setattr(native, "conv_is_kernel_grad_split", lambda *sizes: False)
    shapes = (2, 8, 9, 16), (3, 3, 16 // groups, 16)
    x, kernel = (jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True))
    result = jnp.dtype(preferred or dtypes[0])
    g = jax.ShapeDtypeStruct((2, 8, 9, 16), result)

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, groups=groups, preferred_element_type=preferred)

    derivatives = vjp_of(function, (0, 1))
    exported = jax.export.export(
        jax.jit(derivatives),
        platforms=("cuda",),
        disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS,
    )((g,), x, kernel)
    targets = re.findall(r"custom_call @(jaxops_\w+)", exported.mlir_module())
    assert sorted(targets) == sorted(cpu_kernels.TARGETS)
    assert [a.dtype for a in exported.out_avals] == [result, *map(jnp.dtype, dtypes)]


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("over", ["channels", "images and channels"])
def test_shards_of_a_depthwise_convolution_are_groups(over, count, faked):
    """The channels of a device are its groups, even if there is only one."""
    channels = 24 - 2 * count  # one on each of eight devices
    mesh = jax.make_mesh(
        (count,) if over == "channels" else (2, count // 2),
        ("c",) if over == "channels" else ("n", "c"),
        axis_types=(AxisType.Auto,) * (1 if over == "channels" else 2),
        devices=jax.devices("cpu")[:count],
    )
    row = None if over == "channels" else "n"
    specs = P(row, None, None, "c"), P(None, None, None, "c"), P(row, None, None, "c")
    arrays = normal(0, (2, 8, 8, channels), (3, 3, 1, channels), (2, 8, 8, channels))
    x, kernel, g = (
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    )
    function = functools.partial(jaxops.conv2d, groups=channels, precision="highest")
    got = jax.jit(vjp_of(function, (0, 1)))((g,), x, kernel)

    local = channels // mesh.shape["c"]
    assert {target for target, _ in faked} == set(cpu_kernels.TARGETS)
    assert {(f.kernels, f.groups, f.channels, f.outputs) for _, f in faked} == {
        ("direct", local, local, local)
    }
    x, kernel, g = arrays

    def oracle(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS[2], feature_group_count=channels
        )

    want = vjp_of(oracle, (0, 1))((g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("groups", "fan_in", "fan_out"), [(6, 1, 1), (3, 1, 2), (2, 3, 2)])
@pytest.mark.parametrize(
    "axes",
    [(0, None), (None, 0), (0, 0), ((0, 1), (None, 0)), ((1, None), (0, 2)), ((0, 0), (4, 1))],
)
def test_a_batch_of_kernels_is_more_groups(axes, groups, fan_in, fan_out, faked, hasty):
    levels = [axes] if isinstance(axes[0], int | None) else list(zip(*axes, strict=True))
    sizes = [2, 3][: len(levels)]
    shapes = [[2, 5, 4, groups * fan_in], [3, 2, fan_in, groups * fan_out]]
    for level, size in reversed(list(zip(levels, sizes, strict=True))):
        for shape, axis in zip(shapes, level, strict=True):
            if axis is not None:
                shape.insert(axis, size)
    x, kernel = normal(0, *map(tuple, shapes))
    options = {"groups": groups, "strides": (1, 2)}

    def nested(function):
        for level in reversed(levels):
            function = jax.vmap(function, level)
        return function

    def oracle(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1, 2), "SAME", dimension_numbers=NUMBERS[2], feature_group_count=groups
        )

    function = nested(lambda x, kernel: jaxops.conv2d(x, kernel, **options))
    (g,) = normal(1, jax.eval_shape(function, x, kernel).shape)
    got, want = (
        jax.jit(vjp_of(f, (0, 1)), compiler_options=hasty)((g,), x, kernel)
        for f in (function, nested(oracle))
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert sorted(target for target, _ in faked) == sorted(cpu_kernels.TARGETS)


@pytest.mark.parametrize("axes", [(None, None, 0), (0, 0, 0), (0, None, 0), (None, 0, None)])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_batch_of_biases(axes, activation, faked, hasty):
    """A batched bias goes with batched kernels; a bias batched alone is added to the sums."""
    shapes = (2, 5, 4, 6), (3, 2, 1, 6), (6,)
    x, kernel, bias = (
        array if axis == 0 else array[0]
        for array, axis in zip(normal(0, *((3, *s) for s in shapes)), axes, strict=True)
    )

    def function(x, kernel, bias):
        return jaxops.conv2d(x, kernel, bias=bias, groups=6, activation=activation)

    def oracle(x, kernel, bias):
        y = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS[2], feature_group_count=6
        )
        return ACTIVATIONS[activation](y + bias)

    (g,) = normal(1, (3, 2, 5, 4, 6))
    got, want = (
        jax.jit(vjp_of(jax.vmap(f, axes), (0, 1, 2)), compiler_options=hasty)((g,), x, kernel, bias)
        for f in (function, oracle)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert sorted(target for target, _ in faked) == sorted(cpu_kernels.TARGETS)


@pytest.mark.parametrize("over", ["images", "channels", "outputs"])
def test_shards_have_forms_of_their_own(over, faked):
    """Lowers for two GPUs: the channels of a device are the operand of its kernels."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    specs = {
        "images": (P("d"), P(), P("d")),
        "channels": (P(None, None, None, "d"), P(None, None, "d"), P()),
        "outputs": (P(), P(None, None, None, "d"), P(None, None, None, "d")),
    }[over]
    arrays = normal(0, (2, 8, 8, 16), (3, 3, 16, 32), (2, 8, 8, 32), dtype="float32")
    x, kernel, g = (
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    )
    got = jax.jit(vjp_of(lambda x, k: jaxops.conv2d(x, k), (0, 1)))((g,), x, kernel)

    fans = (8 if over == "channels" else 16), (16 if over == "outputs" else 32)
    assert {target for target, _ in faked} == set(cpu_kernels.TARGETS)
    assert {(call.fan_in, call.fan_out) for _, call in faked} == {fans}
    x, kernel, g = arrays

    def oracle(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS[2])

    want = vjp_of(oracle, (0, 1))((g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # The kernel is rounded to TF32.
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("dtype", "precision", "groups", "are_hopper", "has"),
    [
        ("float32", "highest", 1, True, True),
        ("float32", "highest", 1, False, False),
        ("float32", "highest", 16, True, False),
        ("float32", "default", 1, True, False),
        ("float64", "highest", 1, True, False),
        ("bfloat16", "highest", 1, True, False),
    ],
)
def test_what_has_work_space(dtype, precision, groups, are_hopper, has, faked, monkeypatch):
    """True float32 in one group has work space, of the bytes that the module computes."""
    asked, given = [], []

    def workspace(target, operands, results, attributes):
        asked.append([a.shape for a in (*operands, *results)])
        return [jax.ShapeDtypeStruct((768,), np.uint8)]

    convolve = cuda_kernels._convolve
    monkeypatch.setattr(
        cuda_kernels,
        "_convolve",
        lambda t, r, *a, **k: given.append((t, r)) or convolve(t, r, *a, **k),
    )
    monkeypatch.setattr(cuda_kernels, "are_hopper", lambda: are_hopper)
    monkeypatch.setattr(native, "work_space", workspace)
    x, kernel = normal(0, (2, 8, 9, 16), (3, 3, 16 // groups, 32), dtype=dtype)

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, groups=groups, strides=(1, 2), precision=precision)

    jax.jit(vjp_of(function, (0,)))((np.zeros((2, 8, 5, 32), kernel.dtype),), x, kernel)
    assert [t for t, _ in given] == [cpu_kernels.TARGETS[0], cpu_kernels.TARGETS[1]]
    images, results = (2, 8, 9, 16), (2, 8, 5, 32)
    wanted = [[images, kernel.shape, results], [results, kernel.shape, images]]
    assert asked == (wanted if has else [])
    for (_, shapes), first in zip(given, (results, images), strict=True):
        assert [a.shape for a in shapes] == [first, *([(768,)] if has else [])]


@pytest.mark.parametrize(
    ("channels", "outputs", "sizes"),
    [(37, 41, (40, 44)), (24, 26, (24, 28)), (37, 23, (37, 23)), (12, 16, (12, 16))],
)
def test_true_float32_is_filled_up_for_tensor_cores(channels, outputs, sizes, faked, monkeypatch):
    asked = []

    def is_split(*sizes):
        asked.append(sizes[:3])
        return True

    space = [jax.ShapeDtypeStruct((256,), np.uint8)]
    monkeypatch.setattr(native, "work_space", lambda *call: space)
    monkeypatch.setattr(native, "conv_is_kernel_grad_split", is_split)
    shapes = (2, 6, 7, channels), (3, 2, channels, outputs), (2, 6, 4, outputs)
    x, kernel, g = normal(0, *shapes, dtype="float32")
    bias = np.arange(outputs, dtype=np.float32)

    def ours(x, kernel):
        return jaxops.conv2d(x, kernel, strides=(1, 2), bias=bias, precision="highest")

    def oracle(x, kernel):
        return (
            lax.conv_general_dilated(x, kernel, (1, 2), "SAME", dimension_numbers=NUMBERS[2]) + bias
        )

    # A GPU would round the operands of the stand-in, and of the oracle, to TF32.
    with jax.default_device(jax.devices("cpu")[0]):
        got = jax.jit(vjp_of(ours, (0, 1)))((g,), x, kernel)
        want = vjp_of(oracle, (0, 1))((g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    found = {target: (call.channels, call.outputs) for target, call in faked}
    assert [found[t] for t in cpu_kernels.TARGETS] == [sizes] * 3
    channels, outputs = sizes
    placed = (2, 6, 7, channels), (3, 2, channels, outputs), (2, 6, 4, outputs)
    assert asked == ([placed] if channels % 4 == 0 else [])


PLANNED = {
    "3x3": ((32, 56, 56, 64), (3, 3, 64, 64), 1),
    "1x1": ((32, 28, 28, 256), (1, 1, 256, 512), 1),
    "7x7 of 3 channels": ((32, 224, 224, 3), (7, 7, 3, 64), 2),
    "11x11": ((8, 240, 240, 64), (11, 11, 64, 64), 1),
    "grouped": ((32, 28, 28, 256), (3, 3, 32, 256), 1),
    "depthwise": ((32, 28, 28, 96), (7, 7, 1, 96), 1),
    "of many columns": ((1, 32, 720720, 64), (3, 3, 64, 64), 1),
    "of one wide row": ((1, 1, 48_000_000, 64), (1, 3, 64, 64), 1),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "true float32", "float64"])
@pytest.mark.parametrize("name", PLANNED)
def test_kernel_gradients_are_planned_in_no_time(name, dtype):
    """A call plans on the host, for kernels of about 30 microseconds; most plans take 2 to 15."""
    pytest.importorskip("jaxops._cuda")
    x, kernel, strides = PLANNED[name]
    windows = make_windows(
        "test", x[1:3], kernel[:2], strides=strides, padding="SAME", dilation=1, channels_last=True
    )
    of_x, of_kernel, of_y = (
        jax.ShapeDtypeStruct(s, dtype.removeprefix("true "))
        for s in (x, kernel, (x[0], *windows.outs, kernel[-1]))
    )
    names = ("strides", "dilation", "low")
    placed = zip(names, (windows.strides, (1, 1), windows.low), strict=True)
    attributes = {name: np.array(n, np.int64) for name, n in placed}
    attributes["tf32"] = np.bool_(dtype == "float32")
    none = {"activation": "none"}

    def plan():
        begin = time.thread_time()
        native.work_space("jaxops_conv_kernel_grad", [of_x, of_y], [of_kernel], attributes)
        if dtype == "true float32":
            sizes = (a.shape for a in (of_x, of_kernel, of_y))
            native.conv_is_kernel_grad_split(*sizes, windows.strides, (1, 1), windows.low)
            native.work_space("jaxops_conv", [of_x, of_kernel], [of_y], attributes | none)
            native.work_space("jaxops_conv_input_grad", [of_y, of_kernel], [of_x], attributes)
        return time.thread_time() - begin

    assert min(plan() for _ in range(5)) < 0.5e-3


@pytest.mark.parametrize(
    ("precision", "may"),
    [
        (None, True),
        ("default", True),
        ("tensorfloat32", True),
        (lax.Precision.HIGHEST, False),
        ("float32", False),
        (("default", "highest"), False),
        ("F32_F32_F32", False),
    ],
)
def test_what_may_be_multiplied_as_tf32(precision, may):
    assert cuda_kernels.may_be_tf32(precision) == may


@pytest.mark.parametrize(
    ("capabilities", "architectures", "has"),
    [
        ({"9.0"}, ("80", "90a"), True),
        ({"12.0", "8.9"}, ("80", "90a", "90-virtual"), True),
        ({"9.0", "8.6"}, ("90a",), False),
        (set(), ("90a",), False),
    ],
)
def test_which_gpus_have_kernels(capabilities, architectures, has, monkeypatch):
    monkeypatch.setattr(compat, "gpu_capabilities", lambda: capabilities)
    monkeypatch.setattr(native, "cuda_architectures", lambda: architectures)
    assert cuda_kernels.has_kernels() == has


@pytest.mark.parametrize(
    "changes",
    [
        {"taps": (1, 1), "padding": 0},  # a matrix product
        {"taps": (12, 12), "sizes": (20, 20)},
        {"strides": 9, "channels": 8},
        {"channels": 0},
        {"sizes": (0, 4)},
        {"taps": (2, 2, 2), "sizes": (4, 4, 4)},
        {"groups": 1 << 16},
        {"channels": 7, "groups": 2, "strides": 9},
        {"itemsize": 4, "channels": 7, "outputs": 7},
        {"itemsize": 8, "strides": 9, "sizes": (20, 20)},
    ],
    ids=str,
)
def test_what_has_no_form(changes):
    sizes, taps = changes.get("sizes", (8, 8)), changes.get("taps", (3, 3))
    windows = make_windows(
        "test",
        sizes,
        taps,
        strides=changes.get("strides", 1),
        padding=changes.get("padding", "SAME"),
        dilation=1,
        channels_last=True,
    )
    fans = changes.get("channels", 8), changes.get("outputs", 8)
    options = {"itemsize": changes.get("itemsize", 2)}
    assert cuda_kernels.make_call(windows, *fans, changes.get("groups", 1), **options) is None


# --- on the GPUs that have the kernels -----------------------------------------------------------

# (images, H, W), channels, outputs, taps and options: whole and partial tiles, strips of wide rows,
# few channels, several groups of taps, and all kinds of strides.
CASES = {
    "3x3": ((3, 14, 14), 64, 64, 3, {}),
    "of many channels": ((2, 9, 11), 200, 328, 3, {}),
    "of odd channels": ((2, 9, 11), 37, 41, 3, {}),
    "of 16 channels": ((2, 20, 20), 16, 24, 5, {}),
    "of 24 channels": ((2, 20, 20), 24, 8, 2, {}),
    "of wide rows": ((2, 5, 150), 32, 72, 3, {}),
    "of small images": ((70, 3, 2), 64, 64, 3, {}),
    "of few outputs": ((2, 20, 21), 64, 24, 3, {}),
    "stem": ((2, 40, 48), 3, 64, 7, {"strides": 2}),
    "stem of odd rows": ((2, 31, 33), 3, 64, 7, {"strides": 2, "padding": 3}),
    "stem of blocks": ((2, 31, 33), 3, 96, 4, {"strides": 4}),
    "stem of wide rows": ((1, 9, 700), 3, 40, 3, {"strides": 2}),
    "grey": ((3, 28, 28), 1, 32, 5, {}),
    "grey of odd strides": ((3, 28, 30), 1, 16, 3, {"strides": 3}),
    "of few channels": ((3, 20, 21), 5, 128, 3, {"padding": ((0, 2), (4, 1))}),
    "of few channels and many outputs": ((2, 16, 16), 7, 500, 3, {}),
    "of large windows": ((2, 40, 40), 3, 64, 9, {"strides": 2}),
    "strided": ((2, 17, 30), 64, 136, 3, {"strides": (2, 3)}),
    "strided 1x1": ((2, 17, 30), 96, 64, 1, {"strides": 2}),
    "strided by 2": ((3, 30, 31), 72, 136, 3, {"strides": 2}),
    "of strided rows": ((2, 31, 20), 64, 64, 3, {"strides": (4, 1)}),
    "of strided columns": ((2, 17, 132), 64, 64, 3, {"strides": (1, 2), "padding": 3}),
    "of strided columns, odd": ((2, 17, 131), 64, 64, 3, {"strides": (1, 2), "padding": 3}),
    "dilated": ((2, 30, 31), 64, 64, 3, {"dilation": (7, 2)}),
    "far apart": ((1, 64, 64), 64, 64, 3, {"dilation": 25, "padding": 25}),
    "9x9": ((1, 30, 30), 64, 64, 9, {}),
    "asymmetric": ((2, 12, 13), 64, 64, 4, {"padding": ((0, 5), (3, 1))}),
    # Clusters of 2, 4 and 8 blocks share the long sums of few pixels.
    "shared": ((1, 7, 7), 512, 512, 3, {}),
    "shared, of several tiles": ((9, 7, 7), 512, 320, 3, {}),
    "shared, of ragged channels": ((2, 9, 11), 712, 136, 3, {}),
    "shared, of few outputs": ((2, 9, 11), 640, 24, 3, {}),
    "shared, strided": ((2, 13, 14), 384, 328, 3, {"strides": 2}),
    "shared, strided 1x1": ((3, 14, 15), 1024, 256, 1, {"strides": 2}),
    "shared, dilated": ((2, 15, 9), 320, 264, 3, {"dilation": (2, 3)}),
    "shared, of large windows": ((1, 9, 10), 96, 256, 7, {}),
}


@pytest.fixture
def hopper(platform):
    if platform.name != "cuda" or platform.device.compute_capability != "9.0":
        pytest.skip("the kernels are for Hopper")
    assert "90a" in native.cuda_architectures()
    return platform


@choices.forced(Way("own"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, dtype, hopper):
    (rows, *sizes), channels, outputs, taps, options = CASES[name]
    shapes = (rows, *sizes, channels), (taps, taps, channels, outputs)
    x, kernel = normal(0, *shapes, dtype=dtype)

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, **options)

    y = jax.eval_shape(function, x, kernel)
    (g,) = normal(1, y.shape, dtype=dtype)
    derivatives = vjp_of(function, (0, 1))
    text = jax.jit(derivatives).lower(*jax.device_put(((g,), x, kernel), hopper.device)).as_text()
    assert all(f"@{target}(" in text for target in cpu_kernels.TARGETS[:3])
    assert "jaxops_im2col" not in text

    def oracle(x, kernel):
        windows = make_windows(
            "test",
            sizes,
            (taps, taps),
            **{"strides": 1, "padding": "SAME", "dilation": 1, **options},
            channels_last=True,
        )
        return lax_conv(x, kernel, windows)

    got = run(derivatives, hopper, (g,), x, kernel)
    want = on_reference(vjp_of(oracle, (0, 1)), (g,), x, kernel)
    terms = max(taps * taps * max(channels, outputs), g.size // outputs)
    assert_close(got, want, "value and gradients", dtype=dtype, terms=8 * terms, roundings=4)
    again = run(derivatives, hopper, (g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


# True float32 with enough products for tensor cores: tiles of all sizes, partial vectors of
# channels and outputs, several taps at a time, sums that clusters share.
SPLIT = {
    "3x3": ((8, 28, 28), 64, 64, 3, {}),
    "of many outputs": ((4, 28, 28), 64, 272, 3, {}),
    "of 128 outputs": ((5, 56, 57), 32, 128, 3, {}),
    "of even windows": ((5, 56, 57), 100, 100, 2, {}),
    "of ragged channels": ((4, 20, 21), 100, 132, 3, {}),
    "of few outputs": ((8, 28, 28), 256, 20, 3, {}),
    "of 8 channels": ((9, 56, 57), 8, 64, 3, {}),
    "of 16 channels": ((9, 56, 57), 16, 24, 5, {}),
    "of odd channels": ((17, 29, 31), 37, 41, 3, {}),
    "of wide rows": ((2, 40, 150), 48, 64, 3, {"padding": ((0, 5), (3, 1))}),
    "strided": ((9, 44, 43), 72, 136, 3, {"strides": 2}),
    "strided 1x1": ((9, 60, 62), 256, 128, 1, {"strides": 2}),
    "dilated": ((8, 30, 31), 64, 64, 3, {"dilation": (7, 2)}),
    "far apart": ((2, 64, 64), 64, 64, 3, {"dilation": 25, "padding": 25}),
    "shared": ((2, 7, 7), 512, 512, 3, {}),
    "shared, of several tiles": ((3, 14, 14), 512, 72, 3, {}),
    "shared, strided": ((9, 13, 14), 384, 328, 3, {"strides": 2}),
}


@pytest.mark.parametrize("are_positive", [False, True], ids=["of any sign", "positive"])
@pytest.mark.parametrize("name", SPLIT)
def test_float32_of_tensor_cores(name, are_positive, hopper):
    """Errors are those of multiply-adds: truncation does not add up if all terms are positive."""
    (rows, *sizes), channels, outputs, taps, options = SPLIT[name]
    shapes = (rows, *sizes, channels), (taps, taps, channels, outputs)
    windows = make_windows(
        "test",
        sizes,
        (taps, taps),
        **{"strides": 1, "padding": "SAME", "dilation": 1, **options},
        channels_last=True,
    )
    x, kernel, g = normal(0, *shapes, (rows, *windows.outs, outputs), dtype="float32")
    if are_positive:
        x, kernel, g = (np.abs(a) for a in (x, kernel, g))

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, precision="highest", **options)

    derivatives = vjp_of(function, (0,))
    lowered = jax.jit(derivatives).lower(*jax.device_put(((g,), x, kernel), hopper.device))
    assert lowered.as_text().count("xui8>") >= 2  # the work space of both calls
    got = run(derivatives, hopper, (g,), x, kernel)
    want = on_reference(vjp_of(lambda x, k: lax_conv(x, k, windows), (0,)), (g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error, size = a - b, np.sqrt(np.mean(b**2))
        assert np.sqrt(np.mean(error**2)) < 6e-7 * size
        assert np.abs(error).max() < 8e-6 * size
    again = run(derivatives, hopper, (g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_float32_of_tensor_cores_multiplies_integers_exactly(hopper):
    rng = np.random.default_rng(0)
    x, g = (rng.integers(-4000, 4001, (8, 28, 28, 64)).astype(np.float32) for _ in range(2))
    kernel = rng.integers(-7, 8, (3, 3, 64, 64)).astype(np.float32)
    function = functools.partial(jaxops.conv2d, precision="highest")
    got = run(vjp_of(function, (0,)), hopper, (g,), x, kernel)

    def oracle(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS[2])

    want = on_reference(vjp_of(oracle, (0,)), (g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("value", "of_kernel"),
    [
        (np.nan, False),
        (np.inf, False),
        (-np.inf, False),
        (3e38, False),
        (np.finfo(np.float32).max, False),
        (np.nan, True),
        (np.inf, True),
        (np.finfo(np.float32).max, True),
    ],
)
@pytest.mark.parametrize(
    ("channels", "outputs", "strides"), [(64, 64, 1), (37, 41, 1), (512, 64, 2)]
)
def test_float32_of_tensor_cores_that_is_not_finite(
    value, of_kernel, channels, outputs, strides, hopper
):
    """Inf gives no NaN, and the largest numbers, which TF32 does not represent, give no Inf."""
    windows = make_windows(
        "test", (28, 29), (3, 3), strides=strides, padding="SAME", dilation=1, channels_last=True
    )
    shapes = (8, 28, 29, channels), (3, 3, channels, outputs), (8, *windows.outs, outputs)
    x, kernel, g = (a / 16 for a in normal(0, *shapes, dtype="float32"))
    bias = np.full(outputs, 1e3, np.float32)
    if of_kernel and strides > 1:
        pytest.skip("in its gradient by x lax multiplies zeros between the cotangents")
    if of_kernel:
        kernel[1, 2, 5, 7] = value
    else:
        x[7, 27, 28, channels - 1] = x[0, 5, 9, 0] = g[3, 2, 1, 0] = value

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, bias=bias, strides=strides, precision="highest")

    def oracle(x, kernel):
        return lax_conv(x, kernel, windows) + bias

    got = run(vjp_of(function, (0,)), hopper, (g,), x, kernel)
    want = on_reference(vjp_of(oracle, (0,)), (g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isposinf(a), np.isposinf(b))
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        finite = np.isfinite(b)
        np.testing.assert_allclose(a[finite], b[finite], rtol=1e-5, atol=1e-3)


# (images, H, W), channels, outputs, taps and options; TF32, which float32 is multiplied as unless
# `precision` says otherwise, has the mantissa of float16.
HIGHEST = {"precision": "highest"}
OF_EVERY_GPU = {
    "f32": ((3, 14, 14), 64, 64, 3, {}, "float32"),
    "f32 of odd channels": ((2, 9, 11), 37, 41, 3, {}, "float32"),
    "f32 of many channels": ((2, 9, 11), 200, 332, 3, {}, "float32"),
    "f32 strided": ((2, 17, 30), 64, 136, 3, {"strides": (2, 3)}, "float32"),
    "f32 dilated": ((2, 30, 31), 64, 64, 3, {"dilation": (7, 2)}, "float32"),
    "f32 of wide rows": ((2, 5, 150), 32, 72, 5, {"padding": ((0, 5), (3, 1))}, "float32"),
    "f32 in groups": ((2, 20, 20), 96, 48, 3, {"groups": 4}, "float32"),
    "f32 in small groups": ((2, 20, 20), 64, 128, 3, {"groups": 8, "strides": 2}, "float32"),
    "f16 in groups": ((2, 20, 20), 64, 128, 3, {"groups": 4}, "float16"),
    "bf16 in groups": ((2, 20, 21), 48, 24, 5, {"groups": 3, "strides": 3}, "bfloat16"),
    "f32 of few channels": ((2, 20, 21), 3, 24, 3, {}, "float32"),
    "f32 shared": ((1, 7, 7), 512, 256, 3, {}, "float32"),
    "f32 shared, strided": ((2, 13, 14), 256, 328, 3, {"strides": 2}, "float32"),
    "f32 in odd groups": ((2, 20, 21), 27, 30, 3, {"groups": 3}, "float32"),
    # Tiles of all sizes, whole and partial, with copies of 16 bytes and of single entries.
    "highest": ((3, 14, 14), 64, 64, 3, HIGHEST, "float32"),
    "highest, many pixels": ((8, 56, 57), 16, 128, 3, HIGHEST, "float32"),
    "highest, odd channels": ((2, 9, 11), 37, 41, 3, HIGHEST, "float32"),
    "highest, many channels": ((2, 9, 11), 200, 332, 3, HIGHEST, "float32"),
    "highest, stem": ((2, 31, 33), 3, 64, 7, {"strides": 2, **HIGHEST}, "float32"),
    "highest, few outputs": ((2, 31, 33), 64, 3, 3, HIGHEST, "float32"),
    "highest, strided": ((2, 17, 30), 64, 136, 3, {"strides": (2, 3), **HIGHEST}, "float32"),
    "highest, strided 1x1": ((2, 17, 30), 96, 64, 1, {"strides": 2, **HIGHEST}, "float32"),
    "highest, long strides": ((2, 17, 90), 16, 24, 2, {"strides": (1, 20), **HIGHEST}, "float32"),
    "highest, dilated": ((2, 30, 31), 64, 64, 3, {"dilation": (7, 2), **HIGHEST}, "float32"),
    # Partial sums, and input gradients of all pixels between strides in one launch.
    "highest, deep": ((1, 7, 7), 256, 272, 3, HIGHEST, "float32"),
    "highest, deep and odd": ((1, 5, 7), 203, 130, 3, HIGHEST, "float32"),
    "highest, patches": ((2, 16, 24), 3, 96, 4, {"strides": 4, **HIGHEST}, "float32"),
    "highest, few and strided": ((2, 15, 19), 2, 32, 5, {"strides": (3, 2), **HIGHEST}, "float32"),
    "highest, in groups": ((2, 20, 20), 27, 48, 3, {"groups": 3, **HIGHEST}, "float32"),
    "f64": ((3, 14, 14), 64, 64, 3, {}, "float64"),
    "f64 of odd channels": ((2, 9, 11), 37, 41, 3, {}, "float64"),
    "f64 of many channels": ((2, 9, 11), 200, 332, 3, {"padding": ((0, 5), (3, 1))}, "float64"),
    "f64 deep": ((1, 7, 7), 136, 130, 3, {}, "float64"),
    "f64 of one channel, strided": ((2, 21, 18), 1, 16, 5, {"strides": 2}, "float64"),
    "f64 stem": ((2, 31, 33), 3, 64, 7, {"strides": 2}, "float64"),
    "f64 in groups": ((2, 20, 20), 32, 48, 3, {"groups": 4, "strides": 3}, "float64"),
}


# Small groups: every loop, whole and partial strips, parts of rows, and any window.
SMALL_GROUPS = {
    "3x3": ((3, 28, 28), 96, 96, 3, {"groups": 96}),
    "3x3 strided": ((3, 29, 30), 96, 96, 3, {"groups": 96, "strides": 2}),
    "3x3 of odd channels": ((2, 13, 11), 37, 37, 3, {"groups": 37}),
    "3x3 of many images": ((70, 7, 7), 24, 24, 3, {"groups": 24}),
    "5x5": ((2, 20, 21), 72, 72, 5, {"groups": 72}),
    "5x5 strided": ((2, 20, 21), 72, 72, 5, {"groups": 72, "strides": 2}),
    "7x7": ((4, 56, 56), 96, 96, 7, {"groups": 96}),
    "7x7 of small images": ((5, 7, 7), 130, 130, 7, {"groups": 130}),
    "7x7 of wide rows": ((3, 15, 70), 40, 40, 7, {"groups": 40, "padding": ((0, 9), (5, 1))}),
    "5x5 without padding": ((40, 9, 33), 8, 8, 5, {"groups": 8, "padding": "VALID"}),
    "7x7 asymmetric": ((2, 15, 40), 33, 33, 7, {"groups": 33, "padding": ((0, 9), (5, 1))}),
    "7x7 strided": ((2, 20, 21), 24, 24, 7, {"groups": 24, "strides": 2}),
    "dilated": ((2, 20, 21), 24, 24, 3, {"groups": 24, "dilation": (3, 2)}),
    "of other strides": ((2, 20, 21), 24, 24, (4, 3), {"groups": 24, "strides": (3, 2)}),
    "of a row": ((2, 1, 300), 40, 40, (1, 9), {"groups": 40}),
    "of large windows": ((1, 30, 30), 20, 20, 11, {"groups": 20}),
    "multiplied": ((2, 14, 15), 24, 72, 3, {"groups": 24}),
    "multiplied 7x7": ((2, 14, 15), 24, 48, 7, {"groups": 24}),
    "32 groups of 4": ((3, 28, 28), 128, 128, 3, {"groups": 32}),
    "32 groups of 4 strided": ((3, 28, 27), 128, 128, 3, {"groups": 32, "strides": 2}),
    "12 groups of 4": ((2, 5, 37), 48, 48, 3, {"groups": 12, "padding": ((2, 2), (2, 3))}),
    "groups of 3 to 5": ((2, 14, 15), 21, 35, 3, {"groups": 7}),
    "groups of 12 to 1": ((2, 14, 15), 48, 4, 5, {"groups": 4}),
    "one channel": ((2, 40, 33), 1, 1, 5, {}),
}
DIRECT = {
    f"{dtype} {name}": ((*case[:4], {**case[4], "precision": "highest"}, dtype))
    for name, case in SMALL_GROUPS.items()
    for dtype in ("float16", "bfloat16", "float32", "float64")
}


@choices.forced(Way("own"))
@pytest.mark.parametrize("name", [*OF_EVERY_GPU, *DIRECT])
def test_what_every_gpu_has(name, platform):
    if platform.name != "cuda" or not cuda_kernels.has_kernels():
        pytest.skip("the kernels are for GPUs with tensor cores")
    (rows, *sizes), channels, outputs, taps, options, dtype = {**OF_EVERY_GPU, **DIRECT}[name]
    taps = taps if isinstance(taps, tuple) else (taps, taps)
    groups = options.get("groups", 1)
    shapes = (rows, *sizes, channels), (*taps, channels // groups, outputs)
    x, kernel = normal(0, *shapes, dtype=dtype)

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, **options)

    y = jax.eval_shape(function, x, kernel)
    (g,) = normal(1, y.shape, dtype=dtype)
    derivatives = vjp_of(function, (0, 1))
    operands = jax.device_put(((g,), x, kernel), platform.device)
    text = jax.jit(derivatives).lower(*operands).as_text()
    assert all(f"@{target}(" in text for target in cpu_kernels.TARGETS)
    assert "jaxops_im2col" not in text

    def oracle(x, kernel):
        steps = {"strides": 1, "padding": "SAME", "dilation": 1, **options}
        for other in ("groups", "precision"):
            steps.pop(other, None)
        windows = make_windows("test", sizes, taps, **steps, channels_last=True)
        return lax_conv(x, kernel, windows, groups)

    got = run(derivatives, platform, (g,), x, kernel)
    want = on_reference(vjp_of(oracle, (0, 1)), (g,), x, kernel)
    terms = max(taps[0] * taps[1] * max(channels, outputs), g.size // outputs)
    is_true = name in DIRECT or "precision" in options
    precision = "float16" if dtype == "float32" and not is_true else dtype
    assert_close(got, want, "value and gradients", dtype=precision, terms=8 * terms, roundings=4)
    again = run(derivatives, platform, (g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("dtype", "channels", "outputs", "groups"),
    [
        ("bfloat16", 64, 72, 1),
        ("float16", 200, 328, 1),
        ("bfloat16", 3, 41, 1),
        ("float32", 40, 44, 1),
        ("float16", 48, 24, 3),
        ("float32", 64, 128, 8),
        ("float32", 3, 41, 1),
        ("float64", 37, 41, 1),
        ("float64", 48, 24, 3),
        ("bfloat16", 40, 40, 40),
        ("float32", 32, 32, 8),
        ("float64", 24, 48, 24),
    ],
)
def test_bias_and_activation_are_part_of_the_kernel(
    dtype, channels, outputs, groups, activation, platform
):
    if platform.name != "cuda" or not cuda_kernels.has_kernels():
        pytest.skip("the kernels are for GPUs with tensor cores")
    shapes = (2, 13, 18, channels), (3, 3, channels // groups, outputs), (outputs,)
    # TF32 does not change bfloat16; rounding would move sums across the zero of relu.
    exact = "bfloat16" if dtype == "float32" else dtype
    x, kernel, bias = (a.astype(dtype) for a in normal(0, *shapes, dtype=exact))

    def function(x, kernel, bias):
        return jaxops.conv2d(x, kernel, bias=bias, activation=activation, groups=groups)

    def oracle(x, kernel, bias):
        windows = make_windows(
            "test", (13, 18), (3, 3), strides=1, padding="SAME", dilation=1, channels_last=True
        )
        return ACTIVATIONS[activation](lax_conv(x, kernel, windows, groups) + bias)

    (g,) = (a.astype(dtype) for a in normal(1, (2, 13, 18, outputs), dtype=exact))
    got = run(vjp_of(function, (0, 1, 2)), platform, (g,), x, kernel, bias)
    want = on_reference(vjp_of(oracle, (0, 1, 2)), (g,), x, kernel, bias)
    precision = "float16" if dtype == "float32" else dtype
    terms = max(9 * max(channels, outputs), 2 * 13 * 18)
    assert_close(got, want, "value and gradients", dtype=precision, terms=8 * terms, roundings=4)

    # XLA runs only copies of small arrays: no further pass reads the result.
    compiled = (
        jax.jit(function).lower(*jax.device_put((x, kernel, bias), platform.device)).compile()
    )
    if outputs % 8 == channels % 8 == 0:
        assert compiled.memory_analysis().temp_size_in_bytes < g.nbytes


# Kernel gradients in true float32 that are large enough for tensor cores.
SPLIT_KERNEL_GRADS = {
    "3x3": ((16, 28, 28), 64, 64, 3, {}),
    "of ragged channels": ((8, 29, 31), 100, 132, 3, {}),
    "of some channels": ((16, 56, 57), 36, 64, 3, {}),
    "of one image": ((1, 61, 60), 128, 256, 3, {}),
    "of wide rows": ((2, 30, 301), 64, 68, 3, {}),
    "of strips": ((2, 31, 512), 128, 64, 3, {}),
    "of part of the images": ((8, 30, 31), 64, 128, 3, {"padding": "VALID"}),
    "of much padding": ((8, 26, 25), 64, 128, 3, {"padding": ((3, 5), (4, 2))}),
    "5x5": ((4, 24, 20), 128, 96, 5, {}),
    "strided": ((16, 30, 31), 136, 128, 3, {"strides": 2}),
    "strided columns": ((8, 30, 57), 64, 128, 3, {"strides": (1, 3)}),
    "dilated": ((8, 30, 31), 64, 128, 3, {"dilation": (7, 2)}),
    "of many channels": ((8, 7, 7), 512, 512, 3, {}),
}


@pytest.mark.parametrize("are_positive", [False, True], ids=["of any sign", "positive"])
@pytest.mark.parametrize("name", SPLIT_KERNEL_GRADS)
def test_kernel_gradients_of_float32_on_tensor_cores(name, are_positive, hopper):
    """Errors are those of multiply-adds: truncation does not add up if all terms are positive."""
    (rows, *sizes), channels, outputs, taps, options = SPLIT_KERNEL_GRADS[name]
    windows = make_windows(
        "test",
        sizes,
        (taps, taps),
        **{"strides": 1, "padding": "SAME", "dilation": 1, **options},
        channels_last=True,
    )
    shapes = (rows, *sizes, channels), (taps, taps, channels, outputs)
    x, kernel, g = normal(0, *shapes, (rows, *windows.outs, outputs), dtype="float32")
    if are_positive:
        x, g = np.abs(x), np.abs(g)

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, precision="highest", **options)

    derivatives = vjp_of(function, (1,))
    _, got = run(derivatives, hopper, (g,), x, kernel)
    _, want = on_reference(vjp_of(lambda x, k: lax_conv(x, k, windows), (1,)), (g,), x, kernel)
    error, size = got - want, np.sqrt(np.mean(want**2))
    assert np.sqrt(np.mean(error**2)) < 1e-6 * size
    assert np.abs(error).max() < 8e-6 * size
    _, again = run(derivatives, hopper, (g,), x, kernel)
    np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize("of_x", [False, True], ids=["of g", "of x"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
@pytest.mark.parametrize("strides", [1, 2])
def test_kernel_gradients_of_float32_that_is_not_finite(value, of_x, strides, hopper):
    """It reaches only the entries that it belongs to, though its parts times zero are NaN."""
    channels, outputs = 64, 128
    windows = make_windows(
        "test", (28, 29), (3, 3), strides=strides, padding="SAME", dilation=1, channels_last=True
    )
    shapes = (32, 28, 29, channels), (3, 3, channels, outputs), (32, *windows.outs, outputs)
    x, kernel, g = (a / 16 for a in normal(0, *shapes, dtype="float32"))
    # The entry is in a corner, whose products with some taps are padding.
    if of_x:
        x[3, 0, 0, 5] = value
    else:
        g[3, 0, 0, 7] = value

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, strides=strides, precision="highest")

    _, got = run(vjp_of(function, (1,)), hopper, (g,), x, kernel)
    _, want = on_reference(vjp_of(lambda x, k: lax_conv(x, k, windows), (1,)), (g,), x, kernel)
    spoiled = got[:, :, 5] if of_x else got[..., 7]
    assert np.isfinite(got).sum() >= got.size - spoiled.size
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-5, atol=1e-3)


# All kernels of kernel gradients are tested. The first cases of 16-bit floats cut rows into strips,
# have several stages for an image, or several phases.
KERNEL_GRADS = {
    "3x3": ("float16", (4, 28, 28), 64, 72, 3, {}),
    "3x3 of bfloat16": ("bfloat16", (4, 28, 28), 72, 64, 3, {}),
    "ragged": ("bfloat16", (3, 29, 31), 136, 72, 3, {}),
    "of small images": ("float16", (9, 7, 7), 128, 64, 3, {}),
    "of strips": ("bfloat16", (3, 30, 192), 64, 64, 3, {}),
    "5x4": ("float16", (3, 20, 24), 64, 64, (5, 4), {}),
    "strided": ("float16", (4, 30, 31), 128, 64, 3, {"strides": 2}),
    "dilated": ("bfloat16", (4, 30, 31), 64, 64, 3, {"dilation": (2, 3)}),
    "VALID": ("float16", (4, 30, 31), 64, 64, 3, {"padding": "VALID"}),
    "much padding": ("bfloat16", (4, 26, 25), 64, 64, 3, {"padding": ((3, 5), (4, 2))}),
    "1x1": ("float16", (4, 15, 13), 64, 128, 1, {}),
    "of part of the image": ("float16", (4, 31, 32), 64, 64, 1, {"strides": 2}),
    "of few channels": ("bfloat16", (4, 28, 28), 24, 64, 3, {}),
    "of 3 channels": ("float16", (4, 30, 31), 3, 64, 7, {"strides": 2}),
    "grouped": ("bfloat16", (4, 28, 28), 64, 64, 3, {"groups": 4}),
    "depthwise": ("float16", (4, 28, 28), 64, 64, 3, {"groups": 64}),
    "of small groups": ("bfloat16", (4, 28, 28), 64, 32, 3, {"groups": 16}),
    "of TF32": ("float32", (4, 28, 28), 64, 72, 3, {}),
}


def patch_sums(x, g, windows, groups):
    """The kernel gradient in float64, from patches with zeros for padding, and cotangents."""
    x, g = (np.asarray(a, np.float64) for a in (x, g))
    steps = list(
        zip(windows.low, windows.outs, windows.strides, windows.taps, windows.dilation, strict=True)
    )
    ends = [(out - 1) * s + (k - 1) * d + 1 for _, out, s, k, d in steps]
    pads = [
        (low, max(0, end - low - n))
        for low, end, n in zip(windows.low, ends, windows.ins, strict=True)
    ]
    padded = np.pad(x, [(0, 0), *pads, (0, 0)])
    columns = g.reshape(-1, groups, g.shape[-1] // groups).swapaxes(0, 1)
    sums = np.empty((*windows.taps, x.shape[-1] // groups, g.shape[-1]))
    for tap in np.ndindex(*windows.taps):
        starts = [t * d for t, (*_, d) in zip(tap, steps, strict=True)]
        within = [
            slice(start, start + (out - 1) * s + 1, s)
            for start, (_, out, s, _, _) in zip(starts, steps, strict=True)
        ]
        entries = padded[:, *within].reshape(-1, groups, x.shape[-1] // groups)
        with np.errstate(invalid="ignore"):
            sums[tap] = np.concatenate(list(entries.transpose(1, 2, 0) @ columns), axis=-1)
    return sums


@pytest.mark.parametrize("name", KERNEL_GRADS)
def test_kernel_gradients_of_what_is_not_finite(name, hopper):
    """A NaN or Inf reaches exactly its products, and an Inf makes no NaN, in any number."""
    dtype, (rows, *sizes), channels, outputs, taps, given = KERNEL_GRADS[name]
    taps = tuple(np.broadcast_to(taps, 2).tolist())
    options = {"strides": 1, "padding": "SAME", "dilation": 1, **given}
    groups = options.pop("groups", 1)
    windows = make_windows("test", sizes, taps, **options, channels_last=True)
    shapes = (rows, *sizes, channels), (rows, *windows.outs, outputs)
    x, g = normal(0, *shapes, dtype=dtype)
    kernel = jnp.zeros((*taps, channels // groups, outputs), dtype)

    @jax.jit
    def gradient(x, g):
        _, pull = jax.vjp(lambda k: jaxops.conv2d(x, k, groups=groups, **options), kernel)
        return pull(g)[0]

    def check(of_x, of_g=(), make=np.array):
        arrays = make(x), make(g)
        for array, changes in zip(arrays, (of_x, of_g), strict=True):
            for at, value in changes:
                array[at] = value
        got = np.asarray(gradient(*jax.device_put(arrays, hopper.device)), np.float64)
        want = patch_sums(*arrays, windows, groups)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
        finite = np.isfinite(want)
        atol = 0.02 * math.sqrt(rows * math.prod(windows.outs))
        np.testing.assert_allclose(got[finite], want[finite], rtol=0.01, atol=atol)

    check([])
    for value in (np.inf, np.nan):
        for at in ((0, 0, 0, 1), (1, -1, -1, -1), (2, 3, 0, 0), (1, 2, -1, 2)):
            check([(at, value)])
        check([((1, sizes[0] // 2, sizes[1] // 2, -1), value)])
        check([], [((0, 0, 0, 1), value), ((1, -1, -1, -1), value)])
        check([((1, 2, 0, 1), value)], [((1, 2, 0, 1), value)])
        check([((0, slice(None), 0), value)])
        check([(..., value)])
        check([], [(..., value)])
    check([((1, 2, 0, 1), np.inf), ((1, 4, 0, 1), -np.inf)])
    check([((slice(None), slice(None), 0), np.inf)], make=np.abs)
    check([(..., np.inf)], make=np.abs)
    check([(..., np.inf)], [(..., np.inf)])


def test_one_row_of_pixels(hopper):
    x, kernel = normal(0, (2, 301, 64), (5, 64, 72), dtype="bfloat16")
    numbers = NUMBERS[1]

    def function(x, kernel):
        return jaxops.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=numbers)

    def oracle(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=numbers)

    (g,) = normal(1, (2, 301, 72), dtype="bfloat16")
    got = run(vjp_of(function, (0, 1)), hopper, (g,), x, kernel)
    want = on_reference(vjp_of(oracle, (0, 1)), (g,), x, kernel)
    assert_close(got, want, "one row", dtype="bfloat16", terms=8 * 602, roundings=4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("dtype", "channels", "taps", "strides", "groups"),
    [
        ("bfloat16", 40, (3, 2), 1, 1),
        ("bfloat16", 40, (3, 2), 2, 1),
        ("bfloat16", 3, (4, 3), 2, 1),
        ("bfloat16", 3, (3, 5), 3, 1),
        ("bfloat16", 48, (3, 2), 1, 3),
        ("float32", 40, (3, 2), 1, 1),
        ("float32", 40, (3, 2), 2, 1),
        ("float32", 3, (3, 5), 3, 1),
        ("float64", 40, (3, 2), 1, 1),
        ("float64", 27, (3, 2), 2, 3),
        ("bfloat16", 24, (3, 3), 1, 24),
        ("bfloat16", 24, (3, 3), 2, 24),
        ("float32", 24, (5, 5), 2, 24),
        ("bfloat16", 24, (5, 5), 1, 24),
        ("float16", 24, (7, 7), 1, 24),
        ("float32", 8, (7, 7), 1, 8),
        ("bfloat16", 32, (3, 3), 1, 8),
        ("float32", 24, (3, 3), 2, 6),
        ("float64", 24, (3, 4), 3, 12),
    ],
)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_a_nan_stays_in_its_windows(value, dtype, channels, taps, strides, groups, padding, hopper):
    """The kernel gradient has it only if a window covers the pixel, also in partial tiles.

    Zeros that pad channels, pixels and images must not be multiplied by it.
    """
    sizes = (9, 67)
    windows = make_windows(
        "test", sizes, taps, strides=strides, padding=padding, dilation=1, channels_last=True
    )
    outputs = 32 if channels == 32 else 24
    kernel_shape = *taps, channels // groups, outputs
    shapes = (3, *sizes, channels), kernel_shape, (3, *windows.outs, outputs)
    x, kernel, g = normal(0, *shapes, dtype=dtype)
    x[2, 8, 66, channels - 1] = x[0, 4, 40, 0] = value

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, strides=strides, padding=padding, groups=groups)

    def oracle(x, kernel):
        return lax_conv(x, kernel, windows, groups)

    got = run(vjp_of(function, (0, 1)), hopper, (g,), x, kernel)
    want = on_reference(vjp_of(oracle, (0, 1)), (g,), x, kernel)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(
            np.isfinite(np.asarray(a, np.float64)), np.isfinite(np.asarray(b, np.float64))
        )


@pytest.mark.parametrize(
    ("dtype", "channels", "groups", "taps"),
    [
        ("bfloat16", 3, 1, 3),
        ("float16", 40, 1, 3),
        ("float32", 40, 1, 3),
        ("float64", 40, 1, 3),
        ("bfloat16", 24, 3, 3),
        ("bfloat16", 24, 24, 3),
        ("bfloat16", 24, 24, 5),
        ("float16", 24, 24, 7),
    ],
)
def test_an_infinite_cotangent_meets_no_zeros(dtype, channels, groups, taps, hopper):
    """Its products with entries greater than 0 are infinite; products with padding would be NaN."""
    sizes = taps + 2, taps + 400
    shapes = (1, *sizes, channels), (taps, taps, channels // groups, 24), (1, 3, 401, 24)
    x, kernel, g = normal(0, *shapes, dtype=dtype)
    x = np.abs(x) + np.ones_like(x)
    g[0, 0, 105, 1] = g[0, 2, 400, 7] = np.inf

    def function(kernel):
        return jaxops.conv2d(x, kernel, padding="VALID", groups=groups)

    dkernel = np.asarray(run(vjp_of(function, (0,)), hopper, (g,), kernel)[1], np.float64)
    infinite = np.zeros(24, bool)
    infinite[[1, 7]] = True
    np.testing.assert_array_equal(np.isposinf(dkernel), np.broadcast_to(infinite, dkernel.shape))
    assert not np.isnan(dkernel).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_no_patches_are_in_memory(dtype, hopper):
    shapes = (32, 56, 56, 64), (3, 3, 64, 64), (32, 56, 56, 64)
    x, kernel, g = jax.device_put(normal(0, *shapes, dtype=dtype), hopper.device)

    def function(x, kernel):
        return jaxops.conv2d(x, kernel, precision="highest")

    compiled = jax.jit(vjp_of(function, (0, 1))).lower((g,), x, kernel).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 9 * x.nbytes / 4


@pytest.mark.xdist_group("most of the memory")
@pytest.mark.parametrize(
    ("dtype", "groups", "taps"),
    [
        ("bfloat16", 1, 3),
        ("float32", 1, 3),
        ("bfloat16", 64, 3),
        ("bfloat16", 64, 7),
        ("bfloat16", 64, 4),
        ("bfloat16", 16, 3),
    ],
)
def test_more_entries_than_32_bits_count(dtype, groups, taps, hopper):
    sizes = (128, 128, 64)
    rows = 2**31 // (128 * 128 * 64) + 1
    shapes = (1, *sizes), (taps, taps, 64 // groups, 64), (1, *sizes)
    last, kernel, g_last = normal(0, *shapes, dtype=dtype)

    def convolution(x, kernel):
        return jaxops.conv2d(x, kernel, groups=groups, precision="highest")

    def function(last, kernel, g_last):
        x, g = (jnp.zeros((rows, *sizes), a.dtype).at[-1:].set(a) for a in (last, g_last))
        y, pull = jax.vjp(convolution, x, kernel)
        dx, dkernel = pull(g)
        return y[-1:], dx[-1:], dkernel, jnp.any(y[:-1] != 0), jnp.any(dx[:-1] != 0)

    *got, y_elsewhere, dx_elsewhere = run(function, hopper, last, kernel, g_last)
    assert not y_elsewhere
    assert not dx_elsewhere

    windows = make_windows(
        "test", (128, 128), (taps, taps), strides=1, padding="SAME", dilation=1, channels_last=True
    )

    def alone(last, kernel, g_last):
        y, pull = jax.vjp(lambda x, k: lax_conv(x, k, windows, groups), last, kernel)
        return y, *pull(g_last)

    want = on_reference(alone, last, kernel, g_last)
    assert_close(got, want, "the last image", dtype=dtype, terms=8 * 128 * 128, roundings=4)
