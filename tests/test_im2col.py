"""Patches and their transpose: NumPy's sliding windows, other dtypes, published values, bits.

The oracle of the values is NumPy. The oracle of the transpose is its definition, <col2im(p), x> =
<p, im2col(x)>, and `jaxops.reference`.
"""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import onnx_nodes
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.testing.measure import collectives, compile_without_loops, custom_calls, run, vjp_of

FORMATS = ("NWC", "NHWC", "NDHWC", "NCW", "NCHW", "NCDHW")


def patches_of(x, taps, strides, pads, dilation, channels_last):
    """im2col by `numpy.lib.stride_tricks`."""
    rank = len(taps)
    first = 1 if channels_last else 2
    widths = [(0, 0)] * x.ndim
    widths[first : first + rank] = pads
    padded = np.pad(x, widths)
    reaches = [(k - 1) * d + 1 for k, d in zip(taps, dilation, strict=True)]
    axes = tuple(range(first, first + rank))
    if any(padded.shape[a] < reach for a, reach in zip(axes, reaches, strict=True)):
        sizes = [padded.shape[a] - reach for a, reach in zip(axes, reaches, strict=True)]
        outs = [max(0, n // s + 1) for n, s in zip(sizes, strides, strict=True)]
        inner = (*outs, *taps) if channels_last else (*taps, *outs)
        return np.zeros((*x.shape[:first], *inner, *x.shape[first + rank :]), x.dtype)
    views = np.lib.stride_tricks.sliding_window_view(padded, reaches, axes)
    cut = [slice(None)] * views.ndim
    for d in range(rank):
        cut[first + d] = slice(None, None, strides[d])
        cut[x.ndim + d] = slice(None, None, dilation[d])
    views = views[tuple(cut)]
    # (N, *outs, C, *taps), or (N, C, *outs, *taps).
    if channels_last:
        return np.moveaxis(views, 1 + rank, -1)
    taps_first = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    return views.transpose(taps_first)


def random_image(rng, data_format, rows, channels, sizes, dtype):
    shape = (rows, *sizes, channels) if data_format[-1] == "C" else (rows, channels, *sizes)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 100, shape).astype(jnp.dtype(dtype))


DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float8_e4m3fn", "bfloat16", "float16")
DTYPES += ("float32", "float64", "complex64", "complex128")


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(data=st.data())
def test_any_window(platform, data):
    """Checks values bit for bit, and the transpose by its definition."""
    data_format = data.draw(st.sampled_from(FORMATS))
    rank, channels_last = len(data_format) - 2, data_format[-1] == "C"

    def each(low, high):
        return data.draw(st.tuples(*[st.integers(low, high)] * rank))

    taps, strides, dilation, sizes = each(1, 4), each(1, 3), each(1, 3), each(0, 9)
    pads = list(zip(each(0, 3), each(0, 3), strict=True))
    dtype = data.draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    rows, channels = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 20))
    x = random_image(rng, data_format, rows, channels, sizes, dtype)
    options = {
        "strides": strides,
        "padding": pads,
        "dilation": dilation,
        "data_format": data_format,
    }

    (got,) = run(lambda x: jaxops.im2col(x, taps, **options), platform, x)
    want = patches_of(x, taps, strides, pads, dilation, channels_last)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, want)

    if dtype in ("float16", "bfloat16", "float32", "float64"):
        patches = rng.integers(-8, 8, got.shape).astype(jnp.dtype(dtype))
        (image,) = run(lambda p: jaxops.col2im(p, x.shape, **options), platform, patches)
        assert (image.shape, image.dtype) == (x.shape, x.dtype)
        # Small integers, whose sums are exact.
        direction = rng.integers(-8, 8, x.shape).astype(np.float64)
        moved = patches_of(direction, taps, strides, pads, dilation, channels_last)
        assert np.vdot(image.astype(np.float64), direction) == np.vdot(patches, moved)


def test_no_windows_and_no_image(platform):
    """No size is a divisor of zero: an image smaller than the window, and padding alone."""
    small = np.ones((2, 3, 4, 5), np.float32)
    patches, image = run(
        lambda x: (jaxops.im2col(x, 5), jax.grad(lambda x: jaxops.im2col(x, 5).sum())(x)),
        platform,
        small,
    )
    assert patches.shape == (2, 0, 0, 5, 5, 5)
    np.testing.assert_array_equal(image, np.zeros_like(small))
    (padding,) = run(lambda x: jaxops.im2col(x, 2, padding=2), platform, small[:, :0])
    np.testing.assert_array_equal(padding, np.zeros((2, 3, 7, 2, 2, 5), np.float32))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6, 7, 8, 16, 17, 32, 72])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64"])
def test_every_unit_of_bytes(channels, dtype, platform):
    """The channels of a pixel have every alignment, in an image that exceeds a block."""
    rng = np.random.default_rng(channels)
    x = random_image(rng, "NHWC", 3, channels, (21, 13), dtype)
    (got,) = run(lambda x: jaxops.im2col(x, 3, padding=1, strides=(1, 2)), platform, x)
    want = patches_of(x, (3, 3), (1, 2), [(1, 1)] * 2, (1, 1), True)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("padding", ["SAME", "VALID", 1, (2, 0), ((0, 2), (1, 0))])
@pytest.mark.parametrize("strides", [1, (2, 3)])
def test_paddings_are_those_of_lax(padding, strides, platform):
    """Patches times ones are a convolution with ones."""
    x = np.random.default_rng(0).integers(0, 9, (2, 7, 8, 3)).astype(np.float32)
    steps = (strides, strides) if isinstance(strides, int) else strides
    pads = [(1, 1), (1, 1)] if padding == 1 else padding
    pads = [(2, 2), (0, 0)] if padding == (2, 0) else pads
    (got,) = run(lambda x: jaxops.im2col(x, 3, strides=strides, padding=padding), platform, x)
    want = jax.lax.conv_general_dilated(
        x,
        np.ones((3, 3, 3, 1), np.float32),
        steps,
        pads,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_array_equal(got.sum((3, 4, 5)), want[..., 0])


# --- published values ----------------------------------------------------------------------------

COL2IM_NODES = onnx_nodes.cases("Col2Im")


@pytest.mark.parametrize("name", COL2IM_NODES)
def test_onnx_col2im(name, platform):
    attributes, (columns, sizes, block), (want,) = COL2IM_NODES[name]
    rank = len(sizes)
    strides, dilation = (attributes.get(key, [1] * rank) for key in ("strides", "dilations"))
    pads = attributes.get("pads", [0] * 2 * rank)
    padding = list(zip(pads[:rank], pads[rank:], strict=True))
    # ONNX's columns are (N, C * taps, patches).
    outs = [
        (n + lo + hi - (k - 1) * d - 1) // s + 1
        for n, k, s, d, (lo, hi) in zip(sizes, block, strides, dilation, padding, strict=True)
    ]
    patches = columns.reshape(*want.shape[:2], *block, *outs)
    options = {"strides": strides, "padding": padding, "dilation": dilation}
    options["data_format"] = {2: "NCHW", 3: "NCDHW"}[rank]
    (got,) = run(lambda p: jaxops.col2im(p, want.shape, **options), platform, patches)
    np.testing.assert_array_equal(got, want)


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_bits_are_kept(data_format, platform):
    """NaNs with payloads, infinities, negative zeros and subnormal numbers keep their bits."""
    words = np.array([0x7FC12345, 0xFFA00001, 0x7F800000, 0x80000000, 0x00000001], np.uint32)
    x = np.resize(words, (1, 4, 5, 5)).view(np.float32)
    (got,) = run(lambda x: jaxops.im2col(x, 2, data_format=data_format), platform, x)
    channels_last = data_format == "NHWC"
    want = patches_of(x, (2, 2), (1, 1), [(0, 0)] * 2, (1, 1), channels_last)
    np.testing.assert_array_equal(got.view(np.uint32), np.ascontiguousarray(want).view(np.uint32))


def test_a_nan_stays_in_its_pixel(platform):
    x = np.ones((1, 6, 6, 2), np.float32)
    x[0, 2, 3, 1] = np.nan
    ones = np.ones((1, 6, 6, 3, 3, 2), np.float32)
    function = vjp_of(lambda x: jaxops.im2col(x, 3, padding=1), (0,))
    patches, gradient = run(function, platform, (ones,), x)
    assert np.isnan(patches).sum() == 9
    assert not np.isnan(patches[..., 0]).any()
    assert np.isfinite(gradient).all()


def test_half_precision_is_summed_in_float32(platform):
    """Each of nine halves of the last place of one would be rounded away alone."""
    patches = np.full((1, 3, 3, 3, 3, 8), 2.0**-9, jnp.bfloat16)
    patches[:, 2, 2, 0, 0] = 1  # the last patch that has the middle of the image
    (got,) = run(lambda p: jaxops.col2im(p, (1, 3, 3, 8), padding=1), platform, patches)
    np.testing.assert_array_equal(got[0, 1, 1].astype(np.float32), 1 + 2.0**-6)


def test_gradients_of_other_dtypes(platform):
    """Complex and 8-bit arrays have gradients."""
    x = np.arange(16.0).reshape(1, 4, 4, 1) * (1 + 2j)

    def loss(x):
        return jnp.sum(jnp.abs(jaxops.im2col(x, 2)) ** 2)

    (gradient,) = run(jax.grad(loss), platform, x)
    counts = np.outer([1, 2, 2, 1], [1, 2, 2, 1]).reshape(1, 4, 4, 1)
    np.testing.assert_allclose(gradient, 2 * counts * x.conj())
    small = np.ones((1, 4, 4, 1), jnp.float8_e4m3fn)
    (gradient,) = run(jax.grad(lambda x: jaxops.im2col(x, 2).sum()), platform, small)
    assert gradient.dtype == small.dtype
    np.testing.assert_array_equal(gradient.astype(np.float32), counts)


def test_patches_are_one_call_and_no_loop(platform):
    x = jax.device_put(np.zeros((2, 3, 8, 8, 4), np.float32), platform.device)
    program = compile_without_loops(jax.vmap(lambda x: jaxops.im2col(x, 3, padding="SAME")), x)
    assert custom_calls(program) == {"jaxops_im2col": 1}


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("devices", [(2, 1), (4, 2)], ids=str)
def test_images_whose_sizes_are_sharded(data_format, devices, platform):
    """Devices exchange the entries that windows reach beyond their parts, and hold no more."""
    rows = min(devices[0], 1 << (len(platform.devices) // devices[1]).bit_length() >> 1)
    if rows * devices[1] < 2:
        pytest.skip("one device")
    mesh = jax.make_mesh(
        (rows, devices[1]),
        ("h", "w"),
        axis_types=(AxisType.Auto,) * 2,
        devices=platform.devices[: rows * devices[1]],
    )
    options = {"strides": (2, 1), "padding": ((3, 2), (1, 1)), "data_format": data_format}
    last = data_format == "NHWC"
    x = random_image(np.random.default_rng(0), data_format, 2, 3, (16, 8), "float32")

    def value_and_gradient(x, g):
        y, pull = jax.vjp(lambda x: jaxops.im2col(x, (7, 3), **options), x)
        return y, *pull(g)

    shape = jax.eval_shape(lambda x: jaxops.im2col(x, (7, 3), **options), x).shape
    g = np.random.default_rng(1).integers(0, 9, shape).astype(np.float32)
    want_y, want_dx = run(value_and_gradient, platform, x, g)
    spread = P(None, "h", "w") if last else P(None, None, "h", "w")
    of_patches = P(None, "h", "w") if last else P(None, None, None, None, "h", "w")
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, spread), (g, of_patches))]
    program = jax.jit(value_and_gradient).lower(*placed).compile()
    assert not set(collectives(program)) & {"all-gather", "all-to-all"}
    y, dx = program(*placed)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, of_patches), y.ndim)
    assert dx.sharding.is_equivalent_to(NamedSharding(mesh, spread), dx.ndim)
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(dx, want_dx)
