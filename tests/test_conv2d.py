"""Convolution: jax.lax over shapes and options of all kinds, layers of Flax, published values.

The oracle is `jax.lax.conv_general_dilated` in float64.
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import onnx_nodes
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxops
from jaxops.conv import cpu_kernels, cuda_kernels, patches, public
from jaxops.testing.measure import (
    assert_close,
    collectives,
    compile_without_loops,
    custom_calls,
    hasty_options,
    on_reference,
    run,
    vjp_of,
)

DTYPES = ("float16", "bfloat16", "float32", "float64")
NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")


def normal(seed, *shapes, dtype="float64"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def lax_conv(x, kernel, *, strides, padding, dilation, groups, numbers=NHWC):
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        rhs_dilation=dilation,
        feature_group_count=groups,
        dimension_numbers=numbers,
    )


def assert_same(function, oracle, platform, arguments, dtype, terms, wrt=(0, 1)):
    """Value and gradients of a function are the oracle's."""
    shape = jax.eval_shape(oracle, *arguments)
    (g,) = normal(1, shape.shape, dtype=dtype)
    got = run(vjp_of(function, wrt), platform, (g,), *arguments)
    want = on_reference(vjp_of(oracle, wrt), (g,), *arguments)
    assert_close(got, want, "value and gradients", dtype=dtype, terms=8 * terms, roundings=4)


@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(data=st.data())
def test_any_convolution(platform, data):
    def pair(low, high):
        return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    groups, fan_in, fan_out = (data.draw(st.integers(low, 3)) for low in (1, 0, 0))
    taps, strides, dilation, sizes = pair(1, 4), pair(1, 3), pair(1, 2), pair(1, 8)
    padding = data.draw(st.sampled_from(["SAME", "VALID", (pair(0, 3), pair(0, 3))]))
    numbers = data.draw(st.sampled_from([NHWC, NCHW]))
    dtype = data.draw(st.sampled_from(DTYPES))
    rows = data.draw(st.integers(0, 3))
    shapes = (rows, *sizes, groups * fan_in), (*taps, fan_in, groups * fan_out)
    x, kernel = normal(data.draw(st.integers(0, 99)), *shapes, dtype=dtype)
    if numbers == NCHW:
        x, kernel = x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1)
    options = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}

    def ours(x, kernel):
        return jaxops.conv2d(x, kernel, dimension_numbers=numbers, precision="highest", **options)

    def oracle(x, kernel):
        # XLA does not support empty arrays everywhere; the definition's value for them is zero.
        if 0 in (*x.shape, *kernel.shape):
            shape = jax.eval_shape(ours, x, kernel).shape
            return jnp.zeros(shape, x.dtype) + 0 * (x.sum() + kernel.sum())
        return lax_conv(x, kernel, numbers=numbers, **options)

    assert_same(ours, oracle, platform, (x, kernel), dtype, terms=max(x.size, kernel.size))


@hypothesis.settings(deadline=None, max_examples=12)
@hypothesis.given(data=st.data())
def test_any_case_of_lax(platform, data):
    """Tests `conv_general_dilated` of one to three dimensions, also transposed, in any layout."""
    rank = data.draw(st.integers(1, 3))

    def each(low, high):
        return data.draw(st.tuples(*[st.integers(low, high)] * rank))

    groups, fan_in, fan_out = (data.draw(st.integers(1, n)) for n in (3, 3, 2))
    is_transposed = data.draw(st.booleans())
    ones = (1,) * rank
    strides, zeros = (ones, each(1, 3)) if is_transposed else (each(1, 3), ones)
    taps, dilation, sizes = each(1, 3), each(1, 2), each(1, 6)
    pads = tuple(zip(each(-1, 3), each(-1, 3), strict=True))
    names = "DHW"[3 - rank :]
    layouts = [data.draw(st.permutations(letters + names)) for letters in ("NC", "OI", "NC")]
    numbers = tuple("".join(layout) for layout in layouts)

    def shape(layout, letters, counts):
        of = dict(zip(letters + names, counts, strict=True))
        return tuple(of[letter] for letter in layout)

    lhs_shape = shape(layouts[0], "NC", (2, groups * fan_in, *sizes))
    rhs_shape = shape(layouts[1], "OI", (groups * fan_out, fan_in, *taps))
    dtype = data.draw(st.sampled_from(("bfloat16", "float32", "float64")))
    lhs, rhs = normal(data.draw(st.integers(0, 99)), lhs_shape, rhs_shape, dtype=dtype)
    options = (strides, pads, zeros, dilation, numbers, groups)
    try:
        oracle = functools.partial(lambda *a: lax.conv_general_dilated(*a, *options))
        jax.eval_shape(oracle, lhs, rhs)
    except (ValueError, TypeError):
        hypothesis.assume(False)  # the padded image would have a negative size

    def ours(lhs, rhs):
        return jaxops.conv_general_dilated(lhs, rhs, *options, precision="highest")

    assert jaxops.conv_general_dilated.supported(lhs, rhs, *options)
    assert_same(ours, oracle, platform, (lhs, rhs), dtype, terms=lhs.size)


LAYOUTS = {
    "conv1d": (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")),
    "conv3d": (("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW")),
}


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_and_three_dimensions(name, channels_first, platform):
    """Tests all options at once, on values and gradients, against `jax.lax`."""
    rank = int(name[4])
    numbers = LAYOUTS[name][channels_first]
    x, kernel, bias = normal(0, (2, *(7, 5, 4)[:rank], 4), (*(3, 2, 2)[:rank], 2, 6), (6,))
    placed = {"strides": (2, 1, 3)[:rank], "dilation": (1, 2, 1)[:rank]}
    padding = ((2, 1), (0, 1), (1, 1))[:rank]
    if channels_first:
        x, kernel = np.moveaxis(x, -1, 1), np.moveaxis(kernel, (-1, -2), (0, 1))

    def ours(x, kernel, bias):
        return getattr(jaxops, name)(
            x,
            kernel,
            padding=padding,
            groups=2,
            bias=bias,
            activation="silu",
            dimension_numbers=numbers,
            **placed,
        )

    def oracle(x, kernel, bias):
        y = lax_conv(x, kernel, padding=padding, groups=2, numbers=numbers, **placed)
        spread = bias[:, *[None] * rank] if channels_first else bias
        return jax.nn.silu(y + spread)

    (g,) = normal(1, jax.eval_shape(oracle, x, kernel, bias).shape)
    got = run(vjp_of(ours, (0, 1, 2)), platform, (g,), x, kernel, bias)
    want = on_reference(vjp_of(oracle, (0, 1, 2)), (g,), x, kernel, bias)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("groups", "taps"), [(1, (3, 2)), (2, (3, 2)), (6, (3, 3)), (1, (1, 1))])
def test_int8(groups, taps, platform):
    """Tests the largest sums, which are exact, with a bias, and under vmap over kernels."""
    rng = np.random.default_rng(0)
    x, kernels = (
        rng.integers(-128, 128, s, np.int8) for s in ((2, 9, 7, 6), (2, *taps, 6 // groups, 6))
    )
    x[0] = kernels[0] = -128
    bias = np.arange(6, dtype=np.int32)
    placed = {"strides": (2, 1), "groups": groups}

    def oracle(kernel):
        wide = x.astype(np.float64), kernel.astype(np.float64)
        y = lax_conv(*wide, padding="SAME", dilation=(1, 1), **placed)
        return y.astype(np.int32)

    options = {**placed, "preferred_element_type": np.int32}
    want = jnp.stack([oracle(k) for k in kernels])
    (got,) = run(
        jax.vmap(lambda k, x: jaxops.conv2d(x, k, **options), (0, None)), platform, kernels, x
    )
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    finished = functools.partial(jaxops.conv2d, bias=bias, activation="relu", **options)
    (got,) = run(finished, platform, x, kernels[1])
    np.testing.assert_array_equal(got, jnp.maximum(want[1] + bias, 0))
    general = functools.partial(
        jaxops.conv_general_dilated,
        window_strides=(2, 1),
        padding="SAME",
        dimension_numbers=NHWC,
        feature_group_count=groups,
        preferred_element_type=np.int32,
    )
    assert general.func.supported(x, kernels[1], **general.keywords)
    np.testing.assert_array_equal(*run(general, platform, x, kernels[1]), want[1])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_int8_of_entries_apart(rank, platform):
    """Convolutions with `lhs_dilation`, which for floats are input gradients."""
    rng = np.random.default_rng(0)
    sizes, taps, steps = (5, 3, 4)[:rank], (3, 2, 1)[:rank], (2, 3, 1)[:rank]
    x = rng.integers(-128, 128, (2, 4, *sizes), np.int8)
    kernel = rng.integers(-128, 128, (6, 2, *taps), np.int8)
    options = {
        "window_strides": (1,) * rank,
        "padding": ((2, 1), (-1, 2), (0, 0))[:rank],
        "lhs_dilation": steps,
        "rhs_dilation": (1, 2, 1)[:rank],
        "feature_group_count": 2,
    }
    want = lax.conv_general_dilated(x.astype(np.float64), kernel.astype(np.float64), **options)
    general = functools.partial(
        jaxops.conv_general_dilated, preferred_element_type=np.int32, **options
    )
    assert general.func.supported(x, kernel, **general.keywords)
    (got,) = run(general, platform, x, kernel)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rank", [1, 3])
def test_int8_in_other_ranks(rank, platform):
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (2, *(6, 4, 5)[:rank], 4), np.int8)
    kernel = rng.integers(-128, 128, (*(3, 2, 3)[:rank], 4, 3), np.int8)
    conv = {1: jaxops.conv1d, 3: jaxops.conv3d}[rank]
    (got,) = run(functools.partial(conv, preferred_element_type=np.int32), platform, x, kernel)
    (want,) = run(conv, platform, x.astype(np.float64), kernel.astype(np.float64))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "preferred_element_type must be int32 if x has dtype int8, got None"),
        ({"kernel": np.float32}, TypeError, "kernel must have dtype int8 if x has"),
        ({"bias": np.zeros(4, np.float32)}, TypeError, "bias must be an array of dtype int32"),
        ({"activation": "gelu"}, ValueError, "activation must be None or 'relu' if x has"),
    ],
)
def test_int8_that_is_refused(options, error, message):
    options = dict(options)
    kernel = np.zeros((3, 3, 2, 4), options.pop("kernel", np.int8))
    if options or kernel.dtype != np.int8:
        options["preferred_element_type"] = np.int32
    with pytest.raises(error, match=message):
        jaxops.conv2d(np.zeros((1, 5, 5, 2), np.int8), kernel, **options)


@hypothesis.settings(deadline=None, max_examples=12)
@hypothesis.given(data=st.data())
def test_any_transposed_convolution_of_lax(platform, data):
    """Tests `conv_transpose` without groups, which `jax.lax` does not have."""
    rank = data.draw(st.integers(1, 3))

    def each(low, high):
        return data.draw(st.tuples(*[st.integers(low, high)] * rank))

    fan_in, fan_out = (data.draw(st.integers(1, n)) for n in (3, 2))
    strides, taps, dilation, sizes = each(1, 5), each(1, 4), each(1, 2), each(1, 5)
    pairs = tuple(zip(each(0, 3), each(0, 3), strict=True))
    is_flipped, is_consistent = data.draw(st.booleans()), data.draw(st.booleans())
    layouts = {
        1: [None, ("NCH", "OIH", "NCH"), ("HNC", "IHO", "CHN")],
        2: [None, ("NCHW", "OIHW", "NCHW")],
        3: [None, ("NCDHW", "OIDHW", "NCDHW")],
    }
    numbers = data.draw(st.sampled_from(layouts[rank]))
    of_lhs, of_rhs, _ = numbers or ("N" + "HWD"[:rank] + "C", "HWD"[:rank] + "IO", "")

    def shape(layout, letters, counts):
        space = "HWD"[:rank] if numbers is None else "DHW"[-rank:] if rank > 1 else "H"
        of = dict(zip(letters + space, counts, strict=True))
        return tuple(of[letter] for letter in layout)

    fans = (fan_in, fan_out) if is_flipped else (fan_out, fan_in)
    shapes = shape(of_lhs, "NC", (2, fan_in, *sizes)), shape(of_rhs, "OI", (*fans, *taps))
    dtype = data.draw(st.sampled_from(("bfloat16", "float32", "float64")))
    lhs, rhs = normal(data.draw(st.integers(0, 99)), *shapes, dtype=dtype)
    padding = data.draw(st.sampled_from(("SAME", "VALID", pairs)))
    options = (strides, padding, dilation, numbers, is_flipped)
    try:
        oracle = functools.partial(
            lambda *a: lax.conv_transpose(*a, *options, use_consistent_padding=is_consistent)
        )
        jax.eval_shape(oracle, lhs, rhs)
    except (ValueError, TypeError):
        hypothesis.assume(False)  # the padded image would have a negative size

    def ours(lhs, rhs):
        return jaxops.conv_transpose(
            lhs, rhs, *options, precision="highest", use_consistent_padding=is_consistent
        )

    assert_same(ours, oracle, platform, (lhs, rhs), dtype, terms=max(lhs.size, rhs.size))


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("strides", "dilation"), [((2, 1), (1, 1)), ((3, 2), (1, 2))])
def test_a_transposed_convolution_is_the_gradient_of_a_convolution(
    groups, strides, dilation, platform
):
    """Tests groups, and padding as PyTorch has it."""
    pads = ((1, 0), (1, 1))
    image, kernel = normal(0, (2, 9, 8, 6), (3, 2, 6 // groups, 12), dtype="float64")

    def convolve(image):
        return lax.conv_general_dilated(
            image,
            kernel,
            strides,
            pads,
            rhs_dilation=dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    def transpose(y, kernel):
        return jaxops.conv_transpose(
            y,
            kernel,
            strides,
            pads,
            dilation,
            transpose_kernel=True,
            use_consistent_padding=True,
            feature_group_count=groups,
        )

    y, pull = jax.vjp(convolve, image)
    (cotangent,) = normal(1, y.shape, dtype="float64")
    (want,) = pull(cotangent)
    (got,) = run(lambda *a: [transpose(*a)], platform, cotangent, kernel)
    # The last rows of the image, which no window reads, are not made.
    reached = tuple(slice(n) for n in got.shape)
    np.testing.assert_allclose(got, want[reached], rtol=1e-12, atol=1e-12)
    assert got.shape[1] > image.shape[1] - strides[0]


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_activation(activation, dtype, platform):
    x, kernel, bias = normal(0, (2, 5, 6, 3), (3, 3, 3, 4), (4,), dtype=dtype)
    activate = getattr(jax.nn, activation) if activation else lambda y: y

    def ours(x, kernel, bias):
        options = {"bias": bias, "activation": activation, "precision": "highest"}
        return jaxops.conv2d(x, kernel, **options)

    def oracle(x, kernel, bias):
        y = lax_conv(x, kernel, strides=(1, 1), padding="SAME", dilation=(1, 1), groups=1)
        return activate(y + bias)

    assert_same(ours, oracle, platform, (x, kernel, bias), dtype, 100, wrt=(0, 1, 2))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_derivatives_with_bias_and_activation(activation, platform):
    x, kernel, bias = normal(0, (1, 4, 5, 2), (3, 3, 2, 3), (3,))

    def function(x, kernel, bias):
        return jaxops.conv2d(x, kernel, bias=bias, activation=activation)

    arrays = jax.device_put((x, kernel, bias), platform.device)
    check_grads(jax.jit(function), arrays, order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("over", ["images", "channels", "outputs"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_shards_with_bias_and_activation(over, activation, platform):
    """They are added after sums that devices share, such as sums over sharded channels."""
    if len(platform.devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(platform.devices[:2], ("d",))
    specs = {
        "images": (P("d"), P(), P()),
        "channels": (P(None, None, None, "d"), P(None, None, "d"), P()),
        "outputs": (P(), P(None, None, None, "d"), P("d")),
    }[over]
    arrays = normal(0, (2, 5, 6, 4), (3, 3, 4, 6), (6,), dtype="float32")
    (g,) = normal(1, (2, 5, 6, 6), dtype="float32")
    shards = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]

    def function(x, kernel, bias):
        return jaxops.conv2d(x, kernel, bias=bias, activation=activation, precision="highest")

    derivatives = jax.jit(vjp_of(function, (0, 1, 2)))
    got, want = derivatives((g,), *shards), run(derivatives, platform, (g,), *arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert "all-gather" not in derivatives.lower((g,), *shards).compile().as_text()


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_policy_that_saves_the_result_spares_a_second_convolution(activation):
    arrays = normal(0, (1, 4, 5, 2), (3, 3, 2, 3), (3,))

    def total(x, kernel, bias):
        return jaxops.conv2d(x, kernel, bias=bias, activation=activation).sum()

    def convolutions(policy):
        saved = jax.checkpoint(total, policy=policy)
        text = str(jax.make_jaxpr(jax.grad(saved, (0, 1, 2)))(*arrays))
        return len(re.findall(r"= conv\[", text))

    assert convolutions(jax.checkpoint_policies.save_only_these_names("conv2d")) == 1
    assert convolutions(jax.checkpoint_policies.nothing_saveable) == 2


@pytest.mark.parametrize("wrt", [(0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("of_x", [P("d"), P()], ids=str)
def test_a_sharded_bias_on_explicit_meshes(of_x, activation, wrt, platform):
    if len(platform.devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(platform.devices[:2], ("d",), axis_types=(AxisType.Explicit,))
    arrays = normal(0, (2, 4, 5, 2), (3, 3, 2, 4), (4,))
    specs = of_x, P(), P("d")

    def total(x, kernel, bias):
        return (jaxops.conv2d(x, kernel, bias=bias, activation=activation) ** 2).sum()

    derivatives = jax.value_and_grad(total, wrt)
    want = run(derivatives, platform, *arrays)
    with jax.set_mesh(mesh):
        shards = [
            jax.device_put(array, NamedSharding(mesh, spec))
            for array, spec in zip(arrays, specs, strict=True)
        ]
        got = jax.jit(derivatives)(*shards)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_second_derivatives_of_a_batch_gather_nothing_on_explicit_meshes(activation, platform):
    if len(platform.devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(platform.devices[:2], ("d",), axis_types=(AxisType.Explicit,))
    x, kernel, bias = normal(0, (3, 2, 4, 5, 2), (3, 3, 2, 4), (4,))

    def total(*arrays):
        convolve = functools.partial(jaxops.conv2d, activation=activation)
        of_batch = jax.vmap(lambda x, k, b: convolve(x, k, bias=b), (0, None, None))
        return (of_batch(*arrays) ** 2).sum()

    def sum_gradients(*arrays):
        return sum((g**2).sum() for g in jax.grad(total, (0, 1, 2))(*arrays))

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P(None, "d")), jax.device_put(kernel), jax.device_put(bias)
        program = jax.jit(jax.grad(sum_gradients, (0, 1, 2))).lower(*placed)
        assert set(collectives(program.compile(hasty_options(platform)))) == {"all-reduce"}


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("batched", list(itertools.product([None, 0], repeat=3))[1:], ids=str)
def test_vmap_with_bias(batched, activation, platform):
    shapes = (2, 4, 5, 3), (3, 3, 3, 4), (4,)
    arrays = [
        array[0] if axis is None else array
        for array, axis in zip(normal(0, *((2, *s) for s in shapes)), batched, strict=True)
    ]

    def function(x, kernel, bias):
        return jaxops.conv2d(x, kernel, bias=bias, activation=activation)

    def one_by_one(*arrays):
        rows = [
            function(
                *(a if axis is None else a[i] for a, axis in zip(arrays, batched, strict=True))
            )
            for i in range(2)
        ]
        return jnp.stack(rows)

    weigh = jnp.cos(jnp.arange(2 * 2 * 4 * 5 * 4.0).reshape(2, 2, 4, 5, 4))
    results = [
        run(
            jax.value_and_grad(lambda *a, f=f: jnp.sum(f(*a) * weigh), argnums=(0, 1, 2)),
            platform,
            *arrays,
            options=hasty_options(platform),
        )
        for f in (jax.vmap(function, batched), one_by_one)
    ]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtypes", "preferred", "result"),
    [
        (("bfloat16", "float32", "float32"), None, "bfloat16"),
        (("float32", "float64", "float16"), None, "float32"),
        (("bfloat16", "bfloat16", "bfloat16"), "float32", "float32"),
        (("float16", "float16", "float32"), "float64", "float64"),
    ],
)
def test_mixed_dtypes(dtypes, preferred, result, platform):
    """Sums have the widest dtype; every gradient has the dtype of its argument."""
    arrays = [
        a.astype(jnp.dtype(d))
        for a, d in zip(normal(0, (2, 5, 5, 3), (3, 3, 3, 2), (2,)), dtypes, strict=True)
    ]

    def ours(x, kernel, bias):
        options = {"bias": bias, "preferred_element_type": preferred, "precision": "highest"}
        return jaxops.conv2d(x, kernel, **options)

    def oracle(x, kernel, bias):
        y = lax_conv(x, kernel, strides=(1, 1), padding="SAME", dilation=(1, 1), groups=1)
        return y + bias

    (g,) = normal(1, (2, 5, 5, 2), dtype=result)
    got = run(vjp_of(ours, (0, 1, 2)), platform, (g,), *arrays)
    assert [a.dtype.name for a in got] == [result, *dtypes]
    want = on_reference(vjp_of(oracle, (0, 1, 2)), (g,), *arrays)
    for a, w in zip(got, want, strict=True):
        coarsest = max((a.dtype.name, dtypes[0]), key=lambda d: float(jnp.finfo(d).eps))
        assert_close([a], [w], "mixed dtypes", dtype=coarsest, terms=400, roundings=2)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_vmap_of_everything(groups, platform):
    """Images and kernels are batched, alone and together; gradients also of the unbatched ones."""
    x, kernel = normal(0, (3, 2, 5, 4, 4), (3, 3, 3, 4 // groups, 8))
    options = {"groups": groups, "strides": (1, 2)}
    ours = functools.partial(jaxops.conv2d, precision="highest", **options)
    oracle = functools.partial(
        lax_conv, strides=(1, 2), padding="SAME", dilation=(1, 1), groups=groups
    )
    for axes in ((0, None), (None, 0), (0, 0)):
        arrays = [a if axis == 0 else a[0] for a, axis in zip((x, kernel), axes, strict=True)]
        assert_same(
            jax.vmap(ours, axes), jax.vmap(oracle, axes), platform, arrays, "float64", x.size
        )


def test_float64_is_wanted_of_float32(platform):
    """Sums are computed in float64; without 64 bits they are float32."""
    lhs, rhs = normal(0, (2, 3, 9, 9), (4, 3, 5, 5), dtype="float32")
    options = {"window_strides": (1, 1), "padding": "SAME", "preferred_element_type": "float64"}
    ours = functools.partial(jaxops.conv_general_dilated, **options)
    (got,) = run(ours, platform, lhs, rhs)
    want = lax.conv_general_dilated(
        lhs.astype(np.float64), rhs.astype(np.float64), (1, 1), "SAME", precision="highest"
    )
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    with jax.enable_x64(False):
        x, kernel = lhs.transpose(0, 2, 3, 1), rhs.transpose(2, 3, 1, 0)
        assert jaxops.conv2d(x, kernel, preferred_element_type="float64").dtype == np.float32


def test_groups_that_do_not_divide_the_channels():
    x, kernel = normal(0, (1, 4, 4, 4), (3, 3, 4, 3))
    with pytest.raises(ValueError, match="groups = 3 must divide the 4 channels of x"):
        jaxops.conv2d(x, kernel, groups=3)


@pytest.mark.any_jax
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("rows", [7, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_more_patches_than_caches_hold(dtype, rows, groups, platform, monkeypatch):
    """The CPU computes patches in blocks, the last one smaller, or XLA does in float32."""
    x, kernel = normal(0, (rows, 6, 5, 3), (3, 2, 3 // groups, 3), dtype=dtype)
    monkeypatch.setattr(cpu_kernels, "prefers", lambda *_: False)
    monkeypatch.setattr(patches, "_BLOCK_BYTES", 3 * (6 * 5 * 18 * x.itemsize) + 1)
    options = {"strides": (1, 1), "padding": "SAME", "dilation": (1, 2), "groups": groups}

    def ours(x, kernel):
        return jaxops.conv2d(x, kernel, precision="highest", **options)

    oracle = functools.partial(lax_conv, **options)
    assert_same(ours, oracle, platform, (x, kernel), dtype, x.size)
    if platform.name == "cpu":
        text = jax.jit(ours).lower(*jax.device_put((x, kernel), platform.device)).as_text()
        in_tiles = dtype == "float32" and groups == 1
        assert ("stablehlo.convolution" in text) == in_tiles
        assert ("stablehlo.while" in text) != in_tiles


BOUNDED = {
    "rows": ((400,), (50,), {"window_strides": (2,), "padding": ((3, 1),)}, 1, "float64"),
    "columns": (
        (7, 60),
        (3, 4),
        {"padding": ((1, 1), (-1, 7)), "rhs_dilation": (2, 1)},
        1,
        "float64",
    ),
    "cubes": ((11, 9, 10), (3, 3, 2), {"padding": "VALID"}, 1, "bfloat16"),
    "cubes with strides": ((13, 12, 9), (3, 4, 3), {"window_strides": (1, 2, 1)}, 2, "float64"),
    "depthwise cubes": ((6, 9, 10), (3, 3, 3), {}, 8, "float64"),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_patches_of_one_image_are_bounded(name, platform, monkeypatch):
    """Patches are made by slabs of windows; a NaN reaches the same entries as without slabs."""
    if platform.name != "cpu":
        pytest.skip("the bound is that of CPUs")
    monkeypatch.setattr(cpu_kernels, "prefers", lambda *_: False)
    sizes, taps, options, groups, dtype = BOUNDED[name]
    names = "DHW"[3 - len(sizes) :]
    options = {
        "window_strides": (1,) * len(sizes),
        "padding": "SAME",
        "dimension_numbers": (f"N{names}C", f"{names}IO", f"N{names}C"),
        "feature_group_count": groups,
        **options,
    }
    ours = functools.partial(jaxops.conv_general_dilated, **options)
    oracle = functools.partial(lax.conv_general_dilated, **options)
    x, kernel = normal(0, (2, *sizes, 8), (*taps, 8 // groups, 8), dtype=dtype)
    (g,) = normal(1, jax.eval_shape(oracle, x, kernel).shape, dtype=dtype)

    def compiled():
        traced = jax.jit(vjp_of(ours, (0, 1))).trace((g,), x, kernel)
        return traced.lower(lowering_platforms=("cpu",)).compile()

    whole = compiled()
    x[1, *(n // 2 for n in sizes), 3] = np.nan
    reached = [np.isnan(a) for a in jax.tree.leaves(whole((g,), x, kernel))]

    bound = 1 << 14
    monkeypatch.setattr(patches, "_BLOCK_BYTES", bound)
    jax.clear_caches()
    program = compiled()
    for a, nans in zip(jax.tree.leaves(program((g,), x, kernel)), reached, strict=True):
        np.testing.assert_array_equal(np.isnan(a), nans)
    x[np.isnan(x)] = 1
    got = jax.tree.leaves(program((g,), x, kernel))
    want = on_reference(vjp_of(oracle, (0, 1)), (g,), x, kernel)
    assert_close(got, want, "value and gradients", dtype=dtype, terms=x.size, roundings=4)
    # Copies of images with padding and their sums need memory too, and XLA casts blocks of 16 bits.
    needed, before = (p.memory_analysis().temp_size_in_bytes for p in (program, whole))
    image_bytes = max(x.size, g.size) * max(4, x.itemsize)
    assert needed < 4 * bound + 6 * image_bytes < before


@pytest.mark.parametrize(("groups", "by_xla"), [(1, True), (2, False)])
def test_what_devices_do_with_too_many_patches_of_one_image(groups, by_xla, monkeypatch):
    """Lowers for a GPU without kernels: XLA's convolution of one group, and slabs of several."""
    monkeypatch.setattr(cuda_kernels, "has_kernels", lambda: False)
    monkeypatch.setattr(patches, "DEVICE_BLOCK_BYTES", 1 << 14)
    options = {
        "window_strides": (1, 1, 1),
        "padding": "SAME",
        "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"),
        "feature_group_count": groups,
    }
    shapes = (2, 8, 8, 8, 4), (3, 3, 3, 4 // groups, 4)
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def gradient(x, kernel):
        convolve = functools.partial(jaxops.conv_general_dilated, rhs=kernel, **options)
        y, pull = jax.vjp(convolve, x)
        return pull(y)

    exported = jax.export.export(
        jax.jit(gradient),
        platforms=("cuda",),
        disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS,
    )(*structs)
    text = exported.mlir_module()
    assert text.count("stablehlo.convolution") == (2 if by_xla else 0)
    assert ("stablehlo.while" in text) != by_xla


def test_a_1x1_kernel_needs_no_patches(platform):
    x, kernel = normal(0, (2, 4, 4, 3), (1, 1, 3, 5))
    (x,) = jax.device_put((x,), platform.device)
    program = compile_without_loops(
        vjp_of(jaxops.conv2d, (0, 1)), (x[..., :1] + np.ones(5),), x, kernel
    )
    on_cpu = {"jaxops_conv_kernel_grad": 1}
    assert custom_calls(program) == (on_cpu if platform.name == "cpu" else {})


def test_a_1x1_kernel_of_many_pixels_is_a_product_on_cpus():
    """Their patches are the image, so that none are too many."""
    x, kernel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 56, 56, 256), (1, 1, 256, 64)))
    g = jax.ShapeDtypeStruct((4, 56, 56, 64), jnp.float32)
    traced = jax.jit(vjp_of(jaxops.conv2d, (0,))).trace((g,), x, kernel)
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "stablehlo.dot_general" in text
    assert "stablehlo.convolution" not in text


def test_a_gradient_keeps_x_and_not_its_patches():
    x, kernel = normal(0, (2, 8, 8, 3), (3, 3, 3, 5))
    _, pull = jax.vjp(jaxops.conv2d, x, kernel)
    kept = [a.size for a in jax.tree.leaves(pull) if hasattr(a, "shape")]
    assert max(kept) <= x.size


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_stays_in_its_window_and_group(value, platform):
    x, kernel = normal(0, (2, 6, 6, 4), (3, 3, 2, 4), dtype="float32")
    x[1, 2, 3, 3] = value  # of the second group
    function = vjp_of(functools.partial(jaxops.conv2d, groups=2), (0, 1))
    ones = np.ones((2, 6, 6, 4), np.float32)
    y, dx, dkernel = run(function, platform, (ones,), x, kernel)
    bad = ~np.isfinite(y)
    assert bad[1, 1:4, 2:5, 2:].all()
    assert bad.sum() == 9 * 2
    assert np.isfinite(dx).all()
    assert np.isfinite(dkernel[..., :2]).all()
    assert np.isfinite(dkernel[:, :, 0]).all()
    assert not np.isfinite(dkernel[:, :, 1, 2:]).any()


# --- conv_general_dilated ------------------------------------------------------------------------

CONV_NODES = onnx_nodes.cases("Conv")
TRANSPOSE_NODES = onnx_nodes.cases("ConvTranspose")


@pytest.mark.parametrize("name", CONV_NODES)
def test_onnx_conv(name, platform):
    attributes, (x, kernel), (want,) = CONV_NODES[name]
    strides = tuple(attributes.get("strides", (1, 1)))
    pads = attributes.get("pads", (0, 0, 0, 0))
    padding = ((pads[0], pads[2]), (pads[1], pads[3]))
    if attributes.get("auto_pad") == b"SAME_LOWER":
        padding = "SAME_LOWER"

    def ours(x, kernel):
        return jaxops.conv_general_dilated(x, kernel, strides, padding, precision="highest")

    (got,) = run(ours, platform, x, kernel)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", TRANSPOSE_NODES)
def test_onnx_conv_transpose(name, platform):
    """ConvTranspose is the transpose of a convolution: its kernel is flipped, and (C, O, ...)."""
    attributes, (x, kernel), (want,) = TRANSPOSE_NODES[name]
    rank = x.ndim - 2
    groups = attributes.get("group", 1)
    strides, dilation = (
        tuple(attributes.get(key, (1,) * rank)) for key in ("strides", "dilations")
    )
    reaches = [(k - 1) * d for k, d in zip(kernel.shape[2:], dilation, strict=True)]
    spread = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], strides, strict=True)]
    pads = attributes.get("pads", (0,) * 2 * rank)
    low = [reach - p for reach, p in zip(reaches, pads[:rank], strict=True)]
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or "output_shape" in attributes:
        totals = [n + r - out for n, r, out in zip(spread, reaches, want.shape[2:], strict=True)]
        is_upper = attributes.get("auto_pad") == b"SAME_UPPER"
        first = [t // 2 if is_upper else t - t // 2 for t in totals]
        low = [reach - t for reach, t in zip(reaches, first, strict=True)]
    padding = [
        (lo, out - 1 + reach - n - lo + 1)
        for lo, out, reach, n in zip(low, want.shape[2:], reaches, spread, strict=True)
    ]
    in_groups = kernel.reshape(groups, -1, *kernel.shape[1:])
    swapped = np.moveaxis(in_groups, 1, 2).reshape(-1, x.shape[1] // groups, *kernel.shape[2:])
    flipped = np.flip(swapped, range(2, 2 + rank)).copy()

    def ours(x, kernel):
        options = {"rhs_dilation": dilation, "feature_group_count": groups}
        ones = (1,) * rank
        return jaxops.conv_general_dilated(
            x, kernel, ones, padding, strides, precision="highest", **options
        )

    (got,) = run(ours, platform, x, flipped)
    np.testing.assert_allclose(got, want, rtol=1e-6)


UNSUPPORTED = {
    "batch_group_count": {"batch_group_count": 2},
    "window_strides and lhs_dilation at once": {
        "window_strides": (2, 2),
        "lhs_dilation": (2, 1),
        "padding": ((1, 1), (0, 0)),
    },
    "dtype int32": {"dtype": "int32"},
    "dtype complex64": {"dtype": "complex64"},
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_is_left_to_lax(reason, monkeypatch):
    """The reason is given, the warning comes once a case, and the result is jax.lax's.

    The test runs on the CPU, because cuDNN does not support all of it.
    """
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(public._LaxCase, "_warned", set())
    options = {"window_strides": (1, 1), "padding": "VALID", "dtype": "float32"}
    options |= UNSUPPORTED[reason]
    dtype = jnp.dtype(options.pop("dtype"))
    arrays = (a.astype(dtype) for a in normal(0, (2, 4, 6, 6), (2, 4, 3, 3)))
    lhs, rhs = jax.device_put(tuple(arrays), cpu)
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs)]
    assert jaxops.conv_general_dilated.supported(*structs, **options) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error", jaxops.NoKernelWarning)
        for _ in range(2):
            with pytest.raises(jaxops.NoKernelWarning, match=reason):
                jaxops.conv_general_dilated(lhs, rhs, **options)
    with pytest.warns(jaxops.NoKernelWarning, match=reason):
        got = jaxops.conv_general_dilated(lhs, rhs, **options)
    np.testing.assert_array_equal(got, lax.conv_general_dilated(lhs, rhs, **options))
    jaxops.conv_general_dilated(lhs, rhs, **options)  # no second warning


def test_supported_takes_structures_and_says_no_to_nonsense_as_lax_does():
    x, kernel = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 3, 8, 8), (4, 3, 3, 3)))
    assert jaxops.conv_general_dilated.supported(x, kernel, (1, 1), "SAME") is True
    assert (
        jaxops.conv_general_dilated.supported([[[1.0]]], np.ones((1, 1, 1)), (1,), "SAME") is True
    )
    with pytest.raises(ValueError, match="feature_group_count"):
        jaxops.conv_general_dilated.supported(x, kernel, (1, 1), "SAME", feature_group_count=2)


def test_arguments_are_checked_once_for_all_calls_of_one_kind(monkeypatch):
    """`jax.lax` checks them, in all forms that it accepts; an eager call is one program."""
    lhs, rhs = normal(0, (1, 3, 9, 7), (2, 3, 3, 2), dtype="float32")
    checked = []
    original = lax.conv_general_dilated

    def count(*arguments, **options):
        checked.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(public.lax, "conv_general_dilated", count)
    forms = (
        {"window_strides": (2, 1), "padding": ((1, 0), (0, 1))},
        {"window_strides": [2, 1], "padding": [[1, 0], [0, 1]]},
        {"window_strides": np.array([2, 1]), "padding": np.array([[1, 0], [0, 1]])},
    )
    results = [jaxops.conv_general_dilated(lhs, rhs, **form) for form in forms]
    assert len(checked) == 1
    tolerance = 1e-5 if jax.default_backend() == "cpu" else 1e-2  # GPUs multiply in TF32
    for result in results:
        want = original(lhs, rhs, **forms[0])
        np.testing.assert_allclose(result, want, rtol=tolerance, atol=tolerance)
    # The case also depends on 64 bits and on the precision in effect.
    wide = {**forms[0], "preferred_element_type": "float64"}
    for enable, dtype in ((True, np.float64), (False, np.float32), (True, np.float64)):
        with jax.enable_x64(enable), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # jax.lax warns that it is float32
            assert jaxops.conv_general_dilated(lhs, rhs, **wide).dtype == dtype
    case = public._find_case(jnp.asarray(lhs), jnp.asarray(rhs), OPTIONS | forms[0])
    # The products of patches show it; the kernels of CPUs have one precision.
    monkeypatch.setattr(cpu_kernels, "prefers", lambda *_: False)
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            text = case.compiled.lower(lhs, rhs).as_text()
            assert f"[{precision.upper()}, {precision.upper()}]" in text


OPTIONS = {
    "window_strides": (1, 1),
    "padding": "SAME",
    "lhs_dilation": None,
    "rhs_dilation": None,
    "dimension_numbers": None,
    "feature_group_count": 1,
    "batch_group_count": 1,
    "precision": None,
    "preferred_element_type": None,
}


# --- Flax ----------------------------------------------------------------------------------------


def resnet18(nn, convolution):
    """ResNet-18 with few channels: a stem and eight blocks of two convolutions, some strided."""
    conv = functools.partial(nn.Conv, use_bias=False, conv_general_dilated=convolution)

    class Block(nn.Module):
        features: int
        strides: int

        @nn.compact
        def __call__(self, x):
            strides = (self.strides, self.strides)
            y = nn.relu(nn.GroupNorm(2)(conv(self.features, (3, 3), strides)(x)))
            y = nn.GroupNorm(2)(conv(self.features, (3, 3))(y))
            if x.shape != y.shape:
                x = conv(self.features, (1, 1), strides)(x)
            return nn.relu(x + y)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.GroupNorm(2)(conv(4, (7, 7), (2, 2))(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for features, first in ((4, 1), (8, 2), (12, 2), (16, 2)):
                x = Block(features, first)(x)
                x = Block(features, 1)(x)
            return nn.Dense(10)(x.mean((1, 2)))

    return Network()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resnet18_of_linen(dtype, platform):
    """Outputs and gradients are as close to those in float64 as with jax.lax."""
    nn = pytest.importorskip("flax.linen")
    x = normal(0, (2, 64, 64, 3), dtype=dtype)[0]
    shapes = jax.eval_shape(resnet18(nn, None).init, jax.random.key(0), x)
    rng = np.random.default_rng(1)

    # NumPy draws the parameters, as XLA takes seconds to compile random numbers.
    def parameter(of):
        fan_in = of.size / of.shape[-1]
        return (rng.standard_normal(of.shape) / np.sqrt(fan_in)).astype(x.dtype)

    params = jax.tree.map(parameter, shapes)

    def outputs(convolution):
        network = resnet18(nn, convolution)

        def loss(params, x):
            y = network.apply(params, x)
            return (y.astype(jnp.float32) ** 2).sum(), y

        return lambda p, x: jax.value_and_grad(loss, (0, 1), has_aux=True)(p, x)

    # The layers of Flax may multiply in TF32 by default.
    with jax.default_matmul_precision("highest"):
        got = run(outputs(jaxops.conv_general_dilated), platform, params, x)
        options = hasty_options(platform)
        by_lax = run(outputs(lax.conv_general_dilated), platform, params, x, options=options)
        want = on_reference(outputs(None), params, x)
    for g, other, w in zip(got, by_lax, want, strict=True):
        error, usual = (np.linalg.norm(a.astype(np.float64) - w) for a in (g, other))
        # Roundings of 18 layers grow alike, but are not the same.
        assert error <= 3 * usual + 16 * float(jnp.finfo(dtype).eps) * np.linalg.norm(w)


def test_a_layer_of_nnx(platform):
    nnx = pytest.importorskip("flax.nnx")
    x = normal(0, (2, 8, 8, 3), dtype="float32")[0]

    def output(convolution):
        layer = nnx.Conv(
            3, 4, (3, 3), padding="SAME", conv_general_dilated=convolution, rngs=nnx.Rngs(0)
        )
        return layer(jax.device_put(x, platform.device))

    with jax.default_matmul_precision("highest"):
        got, want = output(jaxops.conv_general_dilated), output(lax.conv_general_dilated)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


SPREAD = {
    "one neighbour": ((1, 16, 4, 3), (3, 3, 3, 2), {}, ("h", None)),
    "rows and columns": ((2, 16, 8, 3), (5, 3, 3, 2), {}, ("h", "w")),
    "several neighbours": ((1, 16, 4, 3), (7, 3, 3, 2), {"dilation": 2}, ("h", None)),
    "strides": ((2, 32, 16, 3), (7, 5, 3, 2), {"strides": 2}, ("h", "w")),
    "strides beyond the window": ((2, 48, 8, 3), (2, 1, 3, 4), {"strides": (3, 1)}, ("h", "w")),
    "padding on one side": (
        (2, 16, 8, 3),
        (3, 4, 3, 2),
        {"padding": ((2, 0), (0, 3))},
        ("h", "w"),
    ),
    "groups": ((2, 16, 8, 4), (3, 3, 2, 6), {"groups": 2}, ("h", "w")),
    "depthwise": ((2, 16, 8, 4), (3, 3, 1, 4), {"groups": 4}, ("h", "w")),
    "one tap": ((2, 16, 8, 4), (1, 1, 4, 3), {}, ("h", "w")),
    "two axes": ((2, 16, 5, 3), (5, 3, 3, 2), {}, (("h", "w"), None)),
    "two axes in another order": ((2, 32, 5, 3), (5, 3, 3, 2), {"strides": (2, 1)}, (("w", "h"),)),
}


def spread(platform, shape):
    """A mesh of this shape, or of a smaller power of two of rows where devices are fewer."""
    rows = min(shape[0], 1 << (len(platform.devices) // shape[1]).bit_length() >> 1)
    if rows * shape[1] < 2:
        pytest.skip("one device")
    return jax.make_mesh(
        (rows, shape[1]),
        ("h", "w"),
        axis_types=(AxisType.Auto,) * 2,
        devices=platform.devices[: rows * shape[1]],
    )


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("devices", [(2, 1), (8, 1), (4, 2)], ids=str)
def test_images_whose_sizes_are_sharded(name, devices, platform):
    """No device has more of an image than its part and the reach of windows beyond it."""
    size, taps, options, axes = SPREAD[name]
    options = {"strides": (1, 1), "padding": "SAME", "dilation": (1, 1), "groups": 1} | options
    options |= {k: (v, v) for k, v in options.items() if k != "groups" and isinstance(v, int)}

    def ours(x, kernel, bias):
        return jaxops.conv2d(x, kernel, bias=bias, activation="silu", **options)

    def expected(x, kernel, bias):
        return jax.nn.silu(lax_conv(x, kernel, **options) + bias)

    check_spread(ours, expected, normal(0, size, taps, taps[-1:]), axes, devices, platform)


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (1, 1), "padding": ((-1, 3), (2, -2))},
        {"window_strides": (1, 1), "padding": ((2, 1), (1, 1)), "lhs_dilation": (2, 1)},
    ],
    ids=["negative padding", "transposed"],
)
def test_images_whose_sizes_are_sharded_as_jax_lax_has_them(options, platform):
    def ours(x, kernel):
        return jaxops.conv_general_dilated(x, kernel, **options, dimension_numbers=NHWC)

    def expected(x, kernel):
        return lax.conv_general_dilated(x, kernel, **options, dimension_numbers=NHWC)

    arguments = normal(0, (2, 16, 8, 3), (3, 1 if "lhs_dilation" not in options else 3, 3, 2))
    check_spread(ours, expected, arguments, ("h", "w"), (4, 2), platform)


def check_spread(ours, expected, arguments, axes, devices, platform):
    mesh = spread(platform, devices)

    def value_and_gradients(function):
        def both(g, *arguments):
            y, pull = jax.vjp(function, *arguments)
            return y, pull(g)

        return both

    (g,) = normal(1, jax.eval_shape(expected, *arguments).shape)
    of_image, whole = NamedSharding(mesh, P(None, *axes)), NamedSharding(mesh, P())
    places = (of_image, of_image, *[whole] * (len(arguments) - 1))
    placed = [jax.device_put(a, to) for a, to in zip((g, *arguments), places, strict=True)]
    options = hasty_options(platform)
    program = jax.jit(value_and_gradients(ours)).lower(*placed).compile(options)
    assert not set(collectives(program)) & {"all-gather", "all-to-all"}
    got = program(*placed)
    want = jax.jit(value_and_gradients(expected), compiler_options=options)(g, *arguments)
    assert got[0].sharding.is_equivalent_to(of_image, 4)
    assert got[1][0].sharding.is_equivalent_to(of_image, 4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def test_sharded_images_without_parts_for_windows_are_right(platform):
    """16 rows have 14 windows: a device cannot have the same number of both."""
    mesh = spread(platform, (2, 1))
    x, kernel = normal(0, (1, 16, 4, 3), (3, 3, 3, 2))
    placed = jax.device_put(x, NamedSharding(mesh, P(None, "h")))
    got = jax.jit(functools.partial(jaxops.conv2d, padding="VALID"))(placed, kernel)
    want = lax_conv(x, kernel, strides=(1, 1), padding="VALID", dilation=(1, 1), groups=1)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_sharded_sizes_on_a_mesh_of_explicit_axes(platform):
    """Types follow the rows, with strides too; with one axis a result has one dimension."""
    if len(platform.devices) < 2:
        pytest.skip("one device")
    mesh = jax.sharding.Mesh(platform.devices[:2], ("h",), axis_types=(AxisType.Explicit,))
    x, kernel = normal(0, (1, 16, 4, 3), (3, 3, 3, 2))
    rows = P(None, "h", None, None)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, rows)
        for strides in (1, 2):
            of_rows = jax.jit(functools.partial(jaxops.conv2d, strides=strides))
            for of_kernel in (P(), P(None, None, None, "h")):
                got = of_rows(placed, jax.device_put(kernel, of_kernel))
                assert jax.typeof(got).sharding.spec == rows
                want = jaxops.conv2d(x, kernel, strides=strides)
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
