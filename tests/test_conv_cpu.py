"""The kernels of convolution on CPUs: what `test_conv2d.py` and the capabilities do not show."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxops
from jaxops.conv import cpu_kernels
from jaxops.testing.measure import assert_close, on_reference, vjp_of

NUMBERS = ("NHWC", "HWIO", "NHWC")
# Channels, outputs, groups, and options: whole tiles and parts of them, taps in pairs or not, rows
# of taps or single ones, remainders by the strides that have no taps, channels as lanes. Products
# of matrices have 32 pixels: long lines fill them without pixels of other lines. Where windows have
# one line of taps, several lines of an image are read in place, or copied if they meet the padding.
CASES = {
    "tiles": (64, 64, 1, (3, 3), {}),
    "parts of tiles": (37, 50, 1, (3, 2), {"window_strides": (2, 1)}),
    "few channels": (3, 70, 1, (5, 7), {"window_strides": (2, 2)}),
    "few outputs": (40, 3, 1, (2, 3), {"rhs_dilation": (2, 3)}),
    "one channel": (1, 20, 1, (3, 4), {}),
    "no taps": (5, 20, 1, (1, 2), {"window_strides": (3, 4)}),
    "long lines": (24, 40, 1, (3, 3), {"columns": 71}),
    "lines of whole matrices": (33, 17, 1, (2, 3), {"columns": 64}),
    "entries apart": (64, 33, 1, (1, 1), {"window_strides": (2, 2), "columns": 39}),
    "windows without overlap": (32, 64, 1, (2, 2), {"window_strides": (2, 2), "columns": 40}),
    "lines in two parts": (32, 33, 1, (1, 3), {"columns": 300}),
    "groups": (36, 72, 4, (3, 3), {}),
    "small groups": (24, 48, 8, (3, 3), {"window_strides": (1, 2)}),
    "depthwise": (37, 37, 37, (3, 5), {"padding": ((-1, 2), (4, 0))}),
}


def arrays(name, dtype, seed=0):
    channels, outputs, groups, taps, options = CASES[name]
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    columns = options.pop("columns", 11)
    options |= {"feature_group_count": groups, "dimension_numbers": NUMBERS}
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 9, columns, channels)).astype(jnp.dtype(dtype))
    kernel = rng.standard_normal((*taps, channels // groups, outputs)).astype(jnp.dtype(dtype))
    oracle = functools.partial(lax.conv_general_dilated, **options)
    g = rng.standard_normal(jax.eval_shape(oracle, x, kernel).shape).astype(jnp.dtype(dtype))
    return functools.partial(jaxops.conv_general_dilated, **options), oracle, x, kernel, g


def on_cpu(function, *arguments):
    placed = jax.device_put(arguments, jax.devices("cpu")[0])
    return jax.tree.map(np.asarray, jax.tree.leaves(jax.jit(function)(*placed)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients(name, dtype):
    ours, oracle, x, kernel, g = arrays(name, dtype)
    got = on_cpu(vjp_of(ours, (0, 1)), (g,), x, kernel)
    want = jax.tree.leaves(on_reference(vjp_of(oracle, (0, 1)), (g,), x, kernel))
    assert_close(got, want, name, dtype=dtype, terms=4 * max(x.size, kernel.size), roundings=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", CASES)
def test_padding_meets_no_nan(name, value, dtype):
    """What is not finite reaches what depends on it; products with padding would be NaN."""
    ours, oracle, x, kernel, g = arrays(name, dtype)
    x, kernel, g = map(np.abs, (x, kernel, g))
    entries = [(i, at) for i in range(3) for at in ("first", "middle", "last")]
    for i, entry in entries:
        poisoned = (x, kernel, g)[i]
        of = {"first": lambda n: 0, "middle": lambda n: n // 2, "last": lambda n: n - 1}[entry]
        at = tuple(map(of, poisoned.shape))
        changed = [a.copy() for a in (x, kernel, g)]
        changed[i][at] = value
        unit = np.zeros(poisoned.shape)
        unit[at] = 1
        got = on_cpu(vjp_of(ours, (0, 1)), (changed[2],), changed[0], changed[1])
        ones = [np.ones(a.shape) for a in (x, kernel, g)]
        ones[i] = unit
        reached = jax.tree.leaves(on_reference(vjp_of(oracle, (0, 1)), (ones[2],), *ones[:2]))
        # The value has no cotangent in it, and a gradient not what it is the gradient of.
        depends = (i < 2, i != 0, i != 1)
        for a, count, may_reach in zip(got, reached, depends, strict=True):
            where = (np.asarray(count) > 0.5) & may_reach
            np.testing.assert_array_equal(~np.isfinite(a.astype(np.float64)), where)
            if np.isinf(value):
                assert not np.isnan(a.astype(np.float64)).any()


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0)])
@pytest.mark.parametrize("name", ["parts of tiles", "small groups"])
def test_a_batch_is_one_call(name, axes):
    ours, oracle, x, kernel, _ = arrays(name, "float64")
    x, kernel = (
        a if axis is None else np.stack([a, 2 * a, -a])
        for a, axis in zip((x, kernel), axes, strict=True)
    )

    def gradients(convolve):
        def loss(x, kernel):
            y = jax.vmap(convolve, axes)(x, kernel)
            return (y * jnp.cos(y)).sum()

        return jax.value_and_grad(loss, (0, 1))

    with jax.enable_x64(True):
        text = jax.jit(gradients(ours)).lower(x, kernel).as_text()
        got = on_cpu(gradients(ours), x, kernel)
        want = jax.tree.leaves(jax.jit(gradients(oracle))(x, kernel))
    if jax.default_backend() == "cpu":
        assert [text.count(f"@{target}(") for target in cpu_kernels.TARGETS] == [1, 1, 1]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_the_bits_of_an_image_are_those_of_any_batch():
    """Tiles, tasks and threads do not show in the sums of an image."""
    ours, _, x, kernel, g = arrays("parts of tiles", "float32")

    def function(x, g):
        y, pull = jax.vjp(lambda x: ours(x, kernel), x)
        return y, pull(g)[0]

    whole = on_cpu(function, np.tile(x, (9, 1, 1, 1)), np.tile(g, (9, 1, 1, 1)))
    for a, b in zip(whole, on_cpu(function, x[1:], g[1:]), strict=True):
        for image in a[1::2]:
            np.testing.assert_array_equal(image, b[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("channels", "groups", "size", "strides", "taps"),
    [
        (64, 1, (45, 71), (2, 3), (3, 2)),
        (64, 64, (131, 301), (2, 3), (3, 2)),
        (352, 1, (20, 23), (2, 2), (4, 3)),  # kernels that no cache holds
        (16, 1, (9, 3, 41), (2, 2, 3), (3, 3, 3)),  # remainders with half of the lines of others
        (32, 32, (9, 3, 41), (2, 2, 3), (3, 3, 3)),
        (8, 1, (37, 41), (9, 10), (3, 4)),  # more remainders than share a task
        (16, 16, (37, 41), (9, 10), (3, 4)),
    ],
)
def test_remainders_by_the_strides_in_several_tasks(channels, groups, size, strides, taps, dtype):
    """A task has lines of all remainders, of which some have fewer lines."""
    numbers = {2: NUMBERS, 3: ("NDHWC", "DHWIO", "NDHWC")}[len(size)]
    options = {"window_strides": strides, "padding": "VALID", "dimension_numbers": numbers}
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((*taps, channels // groups, channels)).astype(jnp.dtype(dtype))
    counts = [(n - t) // s + 1 for n, t, s in zip(size, taps, strides, strict=True)]
    g = rng.standard_normal((2, *counts, channels)).astype(jnp.dtype(dtype))

    def input_grad(g, kernel):
        def convolve(x):
            return jaxops.conv_general_dilated(x, kernel, feature_group_count=groups, **options)

        (dx,) = jax.vjp(convolve, jnp.zeros((2, *size, channels), g.dtype))[1](g)
        return dx

    want = np.zeros((2, *size, channels))
    for tap in np.ndindex(*taps):
        factor = kernel[tap].astype(np.float64)
        windows = (slice(t, None, s) for t, s in zip(tap, strides, strict=True))
        to = want[(slice(None), *windows)][(slice(None), *(slice(n) for n in counts))]
        to += g.astype(np.float64) @ factor.T if groups == 1 else g * factor[0]
    (dx,) = on_cpu(input_grad, g, kernel)
    assert_close([dx], [want], "input gradient", dtype=dtype, terms=kernel[..., 0].size)


def test_strides_beyond_taps_and_long_lines():
    """Lines of a remainder that has no taps in two dimensions were cut into tasks of none."""
    channels, length = 1024, 3300
    options = {"window_strides": (2, 2, 1), "padding": ((0, 0), (0, 0), (1, 1))}
    options |= {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")}
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((1, 1, 3, 1, channels)).astype(np.float32)
    g = rng.standard_normal((1, 1, 1, length, channels)).astype(np.float32)

    def input_grad(g, kernel):
        def convolve(x):
            return jaxops.conv_general_dilated(x, kernel, feature_group_count=channels, **options)

        (dx,) = jax.vjp(convolve, jnp.zeros((1, 2, 2, length, channels), g.dtype))[1](g)
        return dx

    (dx,) = on_cpu(input_grad, g, kernel)
    padded = np.pad(g[0, 0, 0], ((1, 1), (0, 0)))
    want = sum(padded[2 - t : 2 - t + length] * kernel[0, 0, t, 0] for t in range(3))
    np.testing.assert_allclose(dx[0, 0, 0], want, rtol=1e-5, atol=1e-5)
    assert not dx[0, 1].any()
    assert not dx[0, 0, 1].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("groups", [1, 2, 64])
@pytest.mark.parametrize("dilation", [2**58, 2**57, 2**56 - 3, 100_000])
def test_taps_far_outside_of_the_image(dilation, groups, dtype):
    """Lines are copied with what taps read, which are pixels, and not all that lies between."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 5, 64)).astype(jnp.dtype(dtype))
    kernel = rng.standard_normal((2, 64 // groups, 64)).astype(jnp.dtype(dtype))

    def convolve(x, kernel, **options):
        return jaxops.conv1d(x, kernel, groups=groups, **options)

    far = functools.partial(convolve, dilation=dilation, padding=((dilation, 0),))
    got = on_cpu(vjp_of(far, (0, 1)), (x,), x, kernel)
    near = functools.partial(convolve, padding=((0, 0),), implementation="xla")
    want = jax.tree.leaves(on_reference(vjp_of(near, (0, 1)), (x,), x, kernel[1:]))
    want[2] = np.concatenate([np.zeros_like(want[2]), want[2]])
    assert_close(got, want, "far taps", dtype=dtype, terms=64)


@pytest.mark.parametrize("value", [None, np.nan])
def test_many_lines_of_taps(value):
    """Beyond 64, products of matrices would copy more lines than they multiply."""
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((1, 40, 6, 32)).astype(jnp.bfloat16) for _ in range(2))
    kernel = rng.standard_normal((65, 2, 32, 32)).astype(jnp.bfloat16)
    if value is not None:
        x[0, 20, 3, 5] = value
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NUMBERS}
    ours = functools.partial(jaxops.conv_general_dilated, **options)
    oracle = functools.partial(lax.conv_general_dilated, **options)
    got = on_cpu(vjp_of(ours, (0, 1)), (g,), x, kernel)
    want = jax.tree.leaves(on_reference(vjp_of(oracle, (0, 1)), (g,), x, kernel))
    if value is None:
        assert_close(got, want, "lines", dtype="bfloat16", terms=4 * kernel.size, roundings=1)
    else:
        assert not np.isnan(got[1].astype(np.float32)).any()
        is_nan = np.isnan(got[2].astype(np.float32))
        assert is_nan[:, :, 5].any()
        assert not np.delete(is_nan, 5, axis=2).any()


def test_strides_far_beyond_the_image():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 4, 64)).astype(np.float32)
    kernel = rng.standard_normal((1, 64, 64)).astype(np.float32)
    stride = 2**20
    (y,) = on_cpu(
        lambda x, kernel: jaxops.conv1d(x, kernel, strides=stride, padding=((0, 47 * stride),)),
        x,
        kernel,
    )
    assert y.shape == (1, 48, 64)
    assert not y[:, 1:].any()
    np.testing.assert_allclose(y[0, 0], x[0, 0] @ kernel[0], rtol=1e-5, atol=1e-5)


def test_threads_do_not_show_where_entries_are_not_finite():
    """Many calls have one thread each; what is not finite is summed in another way."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 28, 28, 64)).astype(jnp.bfloat16)
    x[0, 6, :, 0] = np.nan
    g = rng.standard_normal((1, 28, 28, 128)).astype(jnp.bfloat16)
    like = jnp.zeros((3, 3, 64, 128), jnp.bfloat16)

    def kernel_grad(x, g):
        return jax.vjp(lambda kernel: jaxops.conv2d(x, kernel), like)[1](g)[0]

    (one,) = on_cpu(kernel_grad, x, g)
    (many,) = on_cpu(jax.vmap(kernel_grad), np.stack([x] * 64), np.stack([g] * 64))
    is_nan = np.isnan(one.astype(np.float32))
    assert is_nan.any()
    assert not is_nan.all()
    for other in many:
        np.testing.assert_array_equal(other.view(np.uint16), one.view(np.uint16))
