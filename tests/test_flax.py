"""The Flax layers: their results, DropConnect, and the agreement of linen and nnx."""

from __future__ import annotations

import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxops
from jaxops.flax import linen as jaxops_linen
from jaxops.flax import nnx as jaxops_nnx

HEADS, TAPS, FEATURES, TIME = 3, 5, 6, 9


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def linen_apply(options, kernel, bias, x, rngs=None, **call):
    """The linen layer with these weights, applied to x."""
    layer = jaxops_linen.LightweightConv(*kernel.shape, use_bias=bias is not None, **options)
    params = {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}
    return layer.apply({"params": params}, x, rngs=rngs, **call)


def nnx_apply(options, kernel, bias, x, rngs=None, **call):
    """The nnx layer with these weights, applied to x."""
    features = x.shape[-2 if options.get("data_format") in ("NCT", "nct") else -1]
    layer = jaxops_nnx.LightweightConv(
        features, *kernel.shape, use_bias=bias is not None, rngs=rngs or nnx.Rngs(0), **options
    )
    layer.kernel[...] = kernel
    if bias is not None:
        layer.bias[...] = bias
    return layer(x, **call)


APIS = pytest.mark.parametrize("apply", [linen_apply, nnx_apply], ids=["linen", "nnx"])


def streams(apply, seed):
    """The random streams of one call, in the form of each API."""
    if apply is linen_apply:
        return {"dropout": jax.random.key(seed)}
    return nnx.Rngs(params=0, dropout=seed)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "same", "dilation": 2},
        {"padding": 1, "activation": "silu"},
        {"data_format": "NCT", "activation": "relu"},
        {"data_format": "nct", "padding": "SAME"},
    ],
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_both_layers_are_the_public_function(options, normalize, with_bias):
    shape = (
        (2, FEATURES, TIME) if options.get("data_format") in ("NCT", "nct") else (2, TIME, FEATURES)
    )
    x, kernel = normal(0, shape), normal(1, (HEADS, TAPS))
    bias = normal(2, (FEATURES,)) if with_bias else None
    weight = jax.nn.softmax(kernel, axis=-1) if normalize else kernel
    expected = jaxops.lightweight_conv(x, weight, bias=bias, **options)
    options = {**options, "normalize": normalize}
    for apply in (linen_apply, nnx_apply):
        y = apply(options, kernel, bias, x)
        assert y.shape == x.shape
        np.testing.assert_array_equal(y, expected)


@APIS
def test_a_normalised_filter_averages(apply):
    y = apply({}, normal(1, (HEADS, TAPS)), None, jnp.ones((1, TIME, FEATURES)))
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(y[:, TAPS - 1 :], 1.0, rtol=TAPS * eps)


def impulse_response(apply, options, kernel, seed):
    """The filter (K, H) that a call used: at time t an impulse at 0 has reached tap K - 1 - t."""
    x = jnp.zeros((1, TAPS, HEADS)).at[:, 0].set(1.0)
    rngs = streams(apply, seed)
    return apply(options, kernel, None, x, rngs=rngs, deterministic=False)[0, ::-1]


@APIS
@pytest.mark.parametrize("normalize", [True, False])
def test_drop_connect_drops_taps_after_normalisation(apply, normalize):
    rate, kernel = 0.4, normal(1, (HEADS, TAPS))
    options = {"drop_connect": rate, "normalize": normalize}
    kept = (jax.nn.softmax(kernel, axis=-1) if normalize else kernel).T / (1 - rate)
    filters = jnp.stack([impulse_response(apply, options, kernel, seed) for seed in range(20)])
    dropped = filters == 0
    assert 0 < dropped.mean() < 1
    np.testing.assert_allclose(
        filters, jnp.where(dropped, 0, kept), rtol=4 * np.finfo(np.float32).eps
    )


@APIS
@pytest.mark.parametrize("rate", [1.5, -0.1, "0.1"])
def test_drop_connect_is_a_probability(apply, rate):
    x, kernel = jnp.ones((1, TIME, FEATURES)), normal(1, (HEADS, TAPS))
    message = r"^LightweightConv: drop_connect is a probability in \[0, 1\], got "
    with pytest.raises(ValueError, match=message):
        apply({"drop_connect": rate}, kernel, None, x)


def test_drop_connect_keeps_the_mean():
    rate, draws, kernel = np.float32(0.4), 2000, normal(1, (HEADS, TAPS))
    x = normal(0, (1, TIME, FEATURES))
    layer = jaxops_linen.LightweightConv(HEADS, TAPS, drop_connect=rate)
    apply = jax.jit(
        lambda key: layer.apply(
            {"params": {"kernel": kernel}}, x, deterministic=False, rngs={"dropout": key}
        )
    )
    y = jax.lax.map(apply, jax.random.split(jax.random.key(3), draws))
    mean = linen_apply({}, kernel, None, x)
    # Five standard errors, estimated from the draws themselves.
    assert jnp.all(jnp.abs(y.mean(0) - mean) <= 5 * y.std(0) / draws**0.5 + 1e-6)


@APIS
def test_drop_connect_is_off_when_deterministic_and_a_function_of_the_key(apply):
    x, kernel = normal(0, (2, TIME, FEATURES)), normal(1, (HEADS, TAPS))
    options = {"drop_connect": 0.5}

    def call(seed, **flag):
        return np.asarray(apply(options, kernel, None, x, rngs=streams(apply, seed), **flag))

    np.testing.assert_array_equal(call(1, deterministic=True), apply({}, kernel, None, x))
    np.testing.assert_array_equal(call(1, deterministic=False), call(1, deterministic=False))
    assert (call(1, deterministic=False) != call(2, deterministic=False)).any()
    assert (call(1, deterministic=False) != call(1, deterministic=True)).any()


def test_linen_flag_in_constructor_or_call():
    x = normal(0, (2, TIME, FEATURES))
    layer = jaxops_linen.LightweightConv(HEADS, TAPS, drop_connect=0.5)
    with pytest.raises(ValueError, match="deterministic"):
        layer.init(jax.random.key(0), x)
    params = layer.init(jax.random.key(0), x, deterministic=True)
    quiet = jaxops_linen.LightweightConv(HEADS, TAPS, drop_connect=0.5, deterministic=True)
    np.testing.assert_array_equal(
        quiet.apply(params, x), layer.apply(params, x, deterministic=True)
    )


def test_nnx_train_and_eval_modes():
    x = normal(0, (2, TIME, FEATURES))
    layer = jaxops_nnx.LightweightConv(
        FEATURES, HEADS, TAPS, drop_connect=0.5, rngs=nnx.Rngs(params=0, dropout=1)
    )
    call = nnx.jit(lambda layer, x: layer(x))
    first, second = call(layer, x), call(layer, x)
    assert (first != second).any(), "two training calls share a mask"
    layer.eval()
    np.testing.assert_array_equal(call(layer, x), call(layer, x))
    layer.train()
    assert (call(layer, x) != call(layer, x)).any()


def test_parameters_of_both_apis():
    x = jnp.zeros((1, TIME, FEATURES))
    options = {"use_bias": True, "param_dtype": jnp.bfloat16, "bias_init": jax.nn.initializers.ones}
    params = jaxops_linen.LightweightConv(HEADS, TAPS, **options).init(jax.random.key(0), x)
    layer = jaxops_nnx.LightweightConv(FEATURES, HEADS, TAPS, rngs=nnx.Rngs(0), **options)
    for kernel, bias in (
        (params["params"]["kernel"], params["params"]["bias"]),
        (layer.kernel[...], layer.bias[...]),
    ):
        assert (kernel.shape, bias.shape) == ((HEADS, TAPS), (FEATURES,))
        assert kernel.dtype == bias.dtype == jnp.bfloat16
        assert (bias == 1).all()
    assert len(jax.tree.leaves(nnx.state(layer, nnx.Param))) == 2


@APIS
def test_dtype_of_computation_and_result(apply):
    kernel, x = normal(1, (HEADS, TAPS)), normal(0, (2, TIME, FEATURES), jnp.bfloat16)
    assert apply({}, kernel, None, x).dtype == jnp.float32
    y = apply({"dtype": jnp.bfloat16}, kernel, None, x)
    assert y.dtype == jnp.bfloat16
    # The filter is not rounded to bfloat16: only x and the result are.
    weight = jax.nn.softmax(kernel, axis=-1)
    np.testing.assert_array_equal(y, jaxops.lightweight_conv(x, weight))


def test_gradients_of_both_apis_agree():
    x, kernel = normal(0, (2, TIME, FEATURES)), normal(1, (HEADS, TAPS))
    linen_layer = jaxops_linen.LightweightConv(HEADS, TAPS)
    nnx_layer = jaxops_nnx.LightweightConv(FEATURES, HEADS, TAPS, rngs=nnx.Rngs(0))
    nnx_layer.kernel[...] = kernel
    by_linen = jax.grad(lambda p: jnp.sum(linen_layer.apply(p, x) ** 2))(
        {"params": {"kernel": kernel}}
    )["params"]["kernel"]
    by_nnx = nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(nnx_layer)["kernel"][...]
    np.testing.assert_array_equal(by_linen, by_nnx)
    # A softmax does not change if a constant is added to all its logits.
    scale = jnp.abs(by_linen).max()
    np.testing.assert_allclose(by_linen.sum(-1) / scale, 0, atol=8 * np.finfo(np.float32).eps)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((4, 5), {}, "num_heads must divide the 6 channels, got num_heads=4"),
        ((0, 5), {}, "num_heads=0"),
        ((3, 0), {}, "kernel_size must be at least 1, got 0"),
        ((3, 5), {"drop_connect": 1.5}, r"probability in \[0, 1\], got 1.5"),
    ],
)
def test_bad_sizes(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        jaxops_nnx.LightweightConv(FEATURES, *sizes, rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match=message):
        jaxops_linen.LightweightConv(*sizes, **options).init(
            jax.random.key(0), jnp.zeros((1, TIME, FEATURES))
        )


@pytest.mark.parametrize("sizes", [(np.ones(2), 5), (3, np.ones(5))])
def test_sizes_that_are_arrays(sizes):
    with pytest.raises(TypeError, match=r"LightweightConv: .* integer, got an array of shape"):
        jaxops_nnx.LightweightConv(FEATURES, *sizes, rngs=nnx.Rngs(0))


def test_nnx_refuses_other_channels():
    layer = jaxops_nnx.LightweightConv(FEATURES, HEADS, TAPS, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"expected 6 channels \(NTC\), got x of shape \(1, 9, 3\)"
    ):
        layer(jnp.zeros((1, TIME, 3)))


def test_message_without_flax(monkeypatch):
    for name in list(sys.modules):
        if name == "jaxops.flax" or name.startswith("jaxops.flax."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ImportError, match=r"pip install jaxops\[flax\]"):
        importlib.import_module("jaxops.flax")


def test_importing_jaxops_leaves_flax_alone():
    code = "import sys, jaxops; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
