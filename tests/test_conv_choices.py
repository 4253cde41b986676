"""Ways to compute a convolution that are no call of one kernel, and the calls that take them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._families.windows import make_windows
from jaxops.conv import alternatives, choices, cuda_kernels, local
from jaxops.conv.choices import Way
from jaxops.conv.options import Options

DIRECTIONS = ("forward", "input_grad", "kernel_grad")


def options_of(x, kernel, groups=1, **placed):
    *taps, fan_in, outputs = kernel
    placed = {"strides": 1, "padding": "SAME", "dilation": 1, **placed}
    precision = placed.pop("precision", "highest")
    rank = len(taps)
    windows = make_windows("conv", x[-1 - rank : -1], taps, channels_last=True, **placed)
    return Options(windows, groups, fan_in, outputs // groups, precision, True)


def arrays_of(direction, x, kernel, options):
    """The operands of a direction, as shapes."""
    g = (*x[: len(x) - 1 - options.rank], *options.windows.outs, kernel[-1])
    return {"forward": (x, kernel), "input_grad": (g, kernel), "kernel_grad": (x, g)}[direction]


def compute(direction, way, options, platform, *operands, bias=None):
    batch = operands[0].ndim - 2 - options.rank
    more = dict(options=options, dtype=operands[0].dtype, platform=platform)
    if direction == "kernel_grad":
        more["summed"] = (True,) * batch
    else:
        operands = operands[0], operands[1][(None,) * batch]
    if bias is not None:
        more |= {"bias": bias, "activation": "silu"}
    with choices.forced(way):
        return getattr(local, direction)(*operands, **more)[0]


XLA, DEPTH, CHANNELS = Way("xla"), Way("fold_depth"), Way("strides_to_channels")
WAYS = {
    "xla": (XLA, (2, 5, 6, 4), (3, 2, 2, 6), {"groups": 2, "dilation": (1, 2)}),
    "xla, one dimension": (XLA, (2, 2, 9, 3), (3, 3, 4), {"strides": 2}),
    "depth": (DEPTH, (2, 4, 5, 4, 2), (3, 3, 2, 2, 4), {}),
    "depth, placed": (
        DEPTH,
        (2, 9, 5, 4, 4),
        (2, 3, 1, 2, 2),
        {"groups": 2, "strides": (3, 1, 2), "padding": ((2, 0), (1, 0), (0, 0)), "dilation": 2},
    ),
    "depth, some images": (DEPTH, (5, 3, 3, 3, 2), (3, 2, 2, 2, 3), {}),
    "groups": (Way("fill_groups", multiple=4), (2, 5, 6, 6), (3, 2, 3, 10), {"groups": 2}),
    "strides": (CHANNELS, (2, 8, 9, 3), (4, 3, 3, 2), {"strides": (4, 3), "padding": "VALID"}),
    "strides, padded": (CHANNELS, (2, 7, 9, 3), (5, 7, 3, 2), {"strides": (2, 4), "padding": 3}),
    "taps": (Way("cut_taps", blocks=(2, 3)), (2, 6, 7, 2), (3, 5, 2, 4), {"dilation": (1, 2)}),
    "taps, depthwise": (Way("cut_taps", blocks=(4,)), (3, 9, 4), (6, 1, 4), {"groups": 4}),
    "images": (Way("images", block=2), (5, 4, 4, 2), (3, 2, 2, 3), {"strides": 2}),
}


@pytest.mark.parametrize("name", WAYS)
def test_ways_compute_the_convolution(name, monkeypatch, platform):
    """Tests float64 against `jax.lax`, and bfloat16, whose sums are rounded once."""
    way, x, kernel, placed = WAYS[name]
    options = options_of(x, kernel, **placed)
    if name == "depth, some images":
        monkeypatch.setattr(alternatives, "DEVICE_BLOCK_BYTES", 2 * 2 * 3**4 * 2 * 8)
    for direction in DIRECTIONS:
        shapes = arrays_of(direction, x, kernel, options)
        rng = np.random.default_rng(0)
        exact = [jnp.asarray(rng.standard_normal(s), jnp.float64) for s in shapes]
        bias = jnp.asarray(rng.standard_normal(kernel[-1])) if direction == "forward" else None
        exact, bias = jax.device_put((exact, bias), platform.device)
        run = jax.jit(functools.partial(compute, direction, way, options, platform.name))
        got = run(*exact, bias=bias)
        want = _by_lax(direction, options, x, kernel, *exact, bias=bias)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        halves = [a.astype(jnp.bfloat16) for a in exact]
        wide = None if bias is None else bias.astype(jnp.float32)
        got = run(*halves, bias=wide).astype(jnp.float64)
        exact = [a.astype(jnp.float64) for a in halves]
        want = _by_lax(direction, options, x, kernel, *exact, bias=wide)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)


def _by_lax(direction, options, x, kernel, *operands, bias=None):
    lead = len(x) - 2 - options.rank

    def convolve(x, kernel):
        flat = x.reshape(-1, *x.shape[lead + 1 :])
        y = alternatives.convolve(flat, kernel, options)
        return y.reshape(*x.shape[: lead + 1], *y.shape[1:])

    if direction == "forward":
        y = convolve(*operands)
        return y if bias is None else jax.nn.silu(y + bias.astype(y.dtype))
    if direction == "input_grad":
        g, kernel = operands
        like = jax.ShapeDtypeStruct(x, g.dtype)
        return jax.linear_transpose(lambda x: convolve(x, kernel), like)(g)[0]
    x, g = operands
    like = jax.ShapeDtypeStruct(kernel, g.dtype)
    (found,) = jax.linear_transpose(lambda kernel: convolve(x, kernel), like)(g)
    return found[(None,) * lead]


@pytest.mark.parametrize("way", [XLA, DEPTH, Way("cut_taps", blocks=(1, 3, 2))], ids=str)
def test_ways_inside_a_shard_map(way, monkeypatch):
    """Tests values that vary over a mesh as `check_vma` wants, in every direction."""
    x, kernel = (4, 3, 4, 3, 2), (2, 3, 2, 2, 2)

    def find(direction, options, *_):
        return way if options.windows.taps == kernel[:3] else None

    monkeypatch.setattr(choices, "find", find)
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:4], "n")
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(s) for s in (x, kernel)]
    of_parts = jax.shard_map(
        jaxops.conv3d, mesh=mesh, in_specs=(P("n"), P()), out_specs=P("n"), check_vma=True
    )

    def loss(function):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sin(function(*a)).sum(), (0, 1)))

    def oracle(x, kernel):
        numbers = ("NDHWC", "DHWIO", "NDHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1, 1), "SAME", dimension_numbers=numbers)

    got, want = loss(of_parts)(*operands), loss(oracle)(*operands)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_entries_that_become_channels_keep_nan_apart(direction):
    """A pixel that is not finite is in one window, and no other result may have it."""
    x, kernel = (1, 9, 9, 2), (3, 3, 2, 4)
    options = options_of(x, kernel, strides=3, padding="VALID")
    operands = [np.ones(s) for s in arrays_of(direction, x, kernel, options)]
    operands[0][0, 1, 1] = np.nan
    operands = jax.device_put(operands, jax.devices("cpu")[0])
    y = compute(direction, CHANNELS, options, "cpu", *operands)
    of_window = {"forward": jnp.s_[0, 0, 0], "input_grad": jnp.s_[0, 3:6, 3:6]}[direction]
    assert jnp.isnan(y[of_window]).all()
    assert jnp.isnan(y).sum() == y[of_window].size


BF16, F32 = "bfloat16", "float32"
FILL = Way("fill_groups", multiple=8)


def _cut(*blocks):
    return Way("cut_taps", blocks=blocks)


# x, kernel, options, and the ways forward, of the input gradient and of the kernel gradient.
CHOICES = {
    "3x3": ((8, 28, 28, 64), (3, 3, 64, 64), {}, (None, None, None)),
    "3x3x3": ((2, 8, 16, 16, 32), (3, 3, 3, 32, 32), {}, (DEPTH, DEPTH, DEPTH)),
    "3x1x1": ((2, 8, 16, 16, 32), (3, 1, 1, 32, 32), {}, (None, DEPTH, None)),
    "1x1x1": ((2, 8, 16, 16, 32), (1, 1, 1, 32, 32), {}, (None, None, None)),
    "3x3x3, depthwise": (
        (2, 8, 16, 16, 32),
        (3, 3, 3, 1, 32),
        {"groups": 32},
        (DEPTH, DEPTH, None),
    ),
    "3x3x3, groups": ((2, 8, 16, 16, 32), (3, 3, 3, 16, 32), {"groups": 2}, (DEPTH, DEPTH, XLA)),
    "7x7, depthwise": ((8, 28, 28, 64), (7, 7, 1, 64), {"groups": 64}, (None, None, None)),
    "7x7, depthwise, strides of 2": (
        (8, 28, 28, 64),
        (7, 7, 1, 64),
        {"groups": 64, "strides": 2},
        (None, None, XLA),
    ),
    "13x13, depthwise": ((8, 28, 28, 64), (13, 13, 1, 64), {"groups": 64}, (_cut(9, 13),) * 3),
    "12x12": ((8, 28, 28, 64), (12, 12, 64, 64), {}, (_cut(10, 12),) * 3),
    "255 taps": ((8, 512, 64), (255, 64, 64), {}, (_cut(128),) * 3),
    "8 taps, strides of 8": (
        (8, 512, 64),
        (8, 64, 64),
        {"strides": 8},
        (None, CHANNELS, CHANNELS),
    ),
    "16 taps, strides of 8": ((8, 512, 64), (16, 64, 64), {"strides": 8}, (None, None, None)),
    "2x2, strides of 2": (
        (8, 28, 28, 64),
        (2, 2, 64, 64),
        {"strides": 2},
        (None, None, None),
    ),
    "4x4, strides of 4": (
        (8, 28, 28, 64),
        (4, 4, 64, 64),
        {"strides": 4},
        (None, CHANNELS, CHANNELS),
    ),
    "4x4, strides of 4, dilation of 3": (
        (8, 28, 28, 64),
        (4, 4, 64, 64),
        {"strides": 4, "dilation": 3},
        (None, None, None),
    ),
    "7x7 of RGB": ((8, 64, 64, 3), (7, 7, 3, 64), {"strides": 2}, (None, None, None)),
    "9x9 of RGB": ((8, 64, 64, 3), (9, 9, 3, 64), {}, (None, _cut(8, 8), _cut(8, 8))),
    "11x11 of RGB": (
        (8, 64, 64, 3),
        (11, 11, 3, 64),
        {"strides": 4},
        (None, XLA, CHANNELS),
    ),
    "16x16 of RGB": ((8, 64, 64, 3), (16, 16, 3, 64), {"strides": 16}, (None, CHANNELS, None)),
    "4x4 of RGB": ((8, 64, 64, 3), (4, 4, 3, 64), {"strides": 4}, (None, CHANNELS, None)),
    "groups of 12": ((8, 28, 28, 96), (3, 3, 12, 96), {"groups": 8}, (FILL, FILL, None)),
    "groups of 10 to 20": ((8, 28, 28, 80), (3, 3, 10, 160), {"groups": 8}, (FILL, FILL, None)),
    "groups of 16": ((8, 28, 28, 128), (3, 3, 16, 128), {"groups": 8}, (None, None, None)),
    "groups of 4": ((8, 28, 28, 32), (3, 3, 4, 32), {"groups": 8}, (None, None, None)),
    "groups of 32 to 4": ((8, 28, 28, 128), (3, 3, 32, 16), {"groups": 4}, (FILL, FILL, FILL)),
    "groups of 32 to 1": ((8, 28, 28, 128), (3, 3, 32, 4), {"groups": 4}, (None, None, None)),
    "groups of 64 to 2": ((8, 28, 28, 256), (3, 3, 64, 8), {"groups": 4}, (FILL, FILL, XLA)),
    "2^30 pixels": (
        (1050, 1024, 1024, 8),
        (3, 3, 8, 8),
        {},
        (Way("images", block=525),) * 3,
    ),
}


FILL_4 = Way("fill_groups", multiple=4)
# The same of float32 that may be multiplied as TF32.
TF32_CHOICES = {
    "3x3": (None, None, None),
    "3x3x3": (DEPTH, DEPTH, DEPTH),
    "3x3x3, depthwise": (DEPTH, DEPTH, None),
    "3x3x3, groups": (XLA, DEPTH, XLA),
    "7x7, depthwise, strides of 2": (None, None, None),
    "13x13, depthwise": (_cut(9, 13),) * 3,
    "12x12": (_cut(10, 12), XLA, _cut(10, 12)),
    "8 taps, strides of 8": (None, CHANNELS, CHANNELS),
    "16 taps, strides of 8": (None, None, None),
    "2x2, strides of 2": (None, None, None),
    "7x7 of RGB": (XLA, None, CHANNELS),
    "9x9 of RGB": (XLA, XLA, XLA),
    "11x11 of RGB": (XLA, XLA, CHANNELS),
    "16x16 of RGB": (CHANNELS, CHANNELS, CHANNELS),
    "4x4 of RGB": (CHANNELS, CHANNELS, CHANNELS),
    "groups of 12": (None, None, None),
    "groups of 10 to 20": (FILL_4, FILL_4, FILL_4),
    "groups of 4": (None, None, None),
    "groups of 32 to 4": (FILL, FILL, FILL),
    "groups of 32 to 1": (None, None, None),
    "groups of 64 to 2": (FILL, FILL, FILL),
}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "has_kernels", lambda: True)
    monkeypatch.setattr(cuda_kernels, "are_hopper", lambda: True)


class ChosenError(Exception):
    """The choice is made, and nothing is to be computed."""


def choice_of(monkeypatch, direction, x, kernel, options, dtype, **given):
    """The way that `local` is told for shapes."""
    found = []
    find = choices.find

    def stop(*arguments):
        found.append(find(*arguments))
        raise ChosenError

    monkeypatch.setattr(choices, "find", stop)
    structs = [jax.ShapeDtypeStruct(s, dtype) for s in arrays_of(direction, x, kernel, options)]
    more = dict(options=options, dtype=np.dtype(dtype), platform="cuda", **given)
    if direction == "kernel_grad":
        more["summed"] = (False,) * (len(x) - 2 - options.rank)
    with pytest.raises(ChosenError):
        jax.eval_shape(functools.partial(getattr(local, direction), **more), *structs)
    monkeypatch.setattr(choices, "find", find)
    return found[0]


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name, hopper, monkeypatch):
    x, kernel, placed, want = CHOICES[name]
    options = options_of(x, kernel, **placed)
    got = tuple(choice_of(monkeypatch, d, x, kernel, options, BF16) for d in DIRECTIONS)
    assert got == want


@pytest.mark.parametrize("name", TF32_CHOICES)
def test_choices_of_float32(name, hopper, monkeypatch):
    x, kernel, placed, _ = CHOICES[name]

    def choices_with(precision):
        options = options_of(x, kernel, **placed, precision=precision)
        return tuple(choice_of(monkeypatch, d, x, kernel, options, F32) for d in DIRECTIONS)

    assert choices_with(None) == TF32_CHOICES[name]
    # Channels of their own are not multiplied as TF32, whatever is allowed.
    exact = TF32_CHOICES[name] if "depthwise" in name else (None,) * 3
    assert choices_with("highest") == exact


def test_choices_that_are_not_measured(hopper, monkeypatch):
    """Float64, int8, and kernel gradients for each entry of a batch take patches."""
    x, kernel = (2, 8, 16, 16, 32), (3, 3, 3, 32, 32)
    options = options_of(x, kernel)
    assert choice_of(monkeypatch, "forward", x, kernel, options, "float64") is None
    assert choice_of(monkeypatch, "kernel_grad", (4, *x), kernel, options, BF16) is None
    for image, filters in (((56, 56, 64), (3, 3, 64, 64)), ((30, 30, 3), (7, 7, 3, 20))):
        placed = options_of((8, *image), filters)
        each = (32, 1, *image)
        assert choice_of(monkeypatch, "kernel_grad", each, filters, placed, BF16) is None
        assert choice_of(monkeypatch, "forward", (8, *image), filters, placed, "int8") is None
    monkeypatch.setattr(cuda_kernels, "has_kernels", lambda: False)
    assert choice_of(monkeypatch, "forward", x, kernel, options, BF16) is None


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_products_on_gpus_are_rounded_from_float32(direction, monkeypatch):
    """XLA adds parts of a sum in the dtype of the result, so that of a few entries is float32."""
    x, kernel = (5, 2, 4, 6, 3), (2, 3, 3, 3, 4)
    options = options_of(x, kernel, dilation=2)
    results = []

    def product(*operands, preferred_element_type, **more):
        results.append(preferred_element_type)
        return dot(*operands, preferred_element_type=preferred_element_type, **more)

    dot = lax.dot_general
    monkeypatch.setattr(lax, "dot_general", product)
    structs = [
        jax.ShapeDtypeStruct(s, jnp.float16) for s in arrays_of(direction, x, kernel, options)
    ]
    more = dict(options=options, dtype=np.dtype(np.float16), platform="cuda")
    if direction == "kernel_grad":
        more["summed"] = ()
    with choices.forced(Way("own")):
        jax.eval_shape(functools.partial(getattr(local, direction), **more), *structs)
    assert results == [np.float32]
