"""The Flax layers over time: decoding, packed sequences, scans over layers, weights of others."""

from __future__ import annotations

import inspect
import itertools
import pathlib
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxops.flax import linen as jaxops_linen
from jaxops.flax import nnx as jaxops_nnx

FEATURES, TIME, BATCH = 6, 11, 2
LAYERS = {
    "ShortConv": {"kernel_size": 4, "kernel_dilation": 2},
    "LightweightConv": {"num_heads": 3, "kernel_size": 4, "use_bias": True},
    "LightConv": {"num_heads": 2, "kernel_size": 5, "conv_features": 8, "conv_bias": True},
    "DynamicConv": {"num_heads": 2, "kernel_size": 5, "conv_features": 8, "conv_bias": True},
}
layers = pytest.mark.parametrize("name", LAYERS)
eps = np.finfo(np.float32).eps


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    """GPUs round the operands of float32 products by default, so that two ways give two results."""
    with jax.default_matmul_precision("highest"):
        yield


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def make(name, **options):
    """The linen layer, its variables, and the nnx layer with the same weights."""
    options = {**LAYERS[name], **options}
    linen_layer = getattr(jaxops_linen, name)(**options)
    params = getattr(jaxops_linen, name)(**{**options, "decode": False}).init(
        jax.random.key(0), jnp.zeros((1, TIME, FEATURES))
    )["params"]
    # Biases that are not zero.
    leaves, tree = jax.tree.flatten(params)
    leaves = [leaf + 0.1 * normal(i, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    params = jax.tree.unflatten(tree, leaves)
    nnx_layer = getattr(jaxops_nnx, name)(FEATURES, **options, rngs=nnx.Rngs(0))
    nnx.update(nnx_layer, nnx.State(jax.tree.map(nnx.Param, params)))
    return linen_layer, params, nnx_layer


def close(actual, expected):
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=64 * eps * scale)


@layers
def test_linen_and_nnx_agree_on_the_same_weights(name):
    linen_layer, params, nnx_layer = make(name)
    x, ids = normal(1, (BATCH, TIME, FEATURES)), jnp.arange(TIME)[None].repeat(BATCH, 0) // 4
    for segment_ids in (None, ids):
        y = linen_layer.apply({"params": params}, x, segment_ids=segment_ids)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        close(nnx_layer(x, segment_ids=segment_ids), y)
    close(linen_layer.apply({"params": params}, x[0]), linen_layer.apply({"params": params}, x)[0])


@layers
def test_segments_are_separate_sequences(name):
    linen_layer, params, _ = make(name)
    x, cuts = normal(1, (1, TIME, FEATURES)), [0, 3, 4, TIME]
    ids = jnp.asarray([[7] * 3 + [1] + [7] * (TIME - 4)])
    packed = linen_layer.apply({"params": params}, x, segment_ids=ids)
    for start, stop in itertools.pairwise(cuts):
        alone = linen_layer.apply({"params": params}, x[:, start:stop])
        close(packed[:, start:stop], alone)


@layers
@pytest.mark.parametrize("chunks", [[1] * TIME, [5, 1, 3, 2]], ids=["steps", "chunks"])
def test_linen_decoding_is_the_whole(name, chunks):
    linen_layer, params, _ = make(name)
    decoder = linen_layer.clone(decode=True)
    x = normal(1, (BATCH, TIME, FEATURES))
    whole = linen_layer.apply({"params": params}, x)
    # The x of `init` leaves no trace in the cache.
    variables = decoder.init(jax.random.key(0), x)
    assert not any(leaf.any() for leaf in jax.tree.leaves(variables["cache"]))
    step = jax.jit(lambda v, x: decoder.apply(v, x, mutable=["cache"]))
    cache, parts, start = variables["cache"], [], 0
    for size in chunks:
        y, updated = step({"params": params, "cache": cache}, x[:, start : start + size])
        cache, start = updated["cache"], start + size
        parts.append(y)
    decoded = jnp.concatenate(parts, axis=1)
    if name in (
        "LightConv",
        "DynamicConv",
    ):  # The matrix products of one step and of many differ in rounding.
        close(decoded, whole)
    else:
        np.testing.assert_array_equal(decoded, whole)
    # A first call without a cache begins a sequence.
    y, _ = decoder.apply({"params": params}, x, mutable=["cache"])
    close(y, whole)


@layers
def test_nnx_decoding_is_the_whole(name):
    _, _, layer = make(name)
    x = normal(1, (BATCH, TIME, FEATURES))
    whole = layer(x)
    with pytest.raises(ValueError, match="call init_cache first"):
        layer(x, decode=True)
    layer.init_cache(x.shape)
    layer.set_attributes(decode=True, raise_if_not_found=False)
    step = nnx.jit(lambda layer, x: layer(x))
    parts = [step(layer, x[:, start : start + 1]) for start in range(4)]
    parts.append(step(layer, x[:, 4:]))
    close(jnp.concatenate(parts, axis=1), whole)
    assert len(jax.tree.leaves(nnx.state(layer, nnx.Cache))) == 1
    layer.init_cache(x.shape)
    close(layer(x[:, :1]), whole[:, :1])


@pytest.mark.parametrize("data_format", ["NTC", "NCT", "nct"])
def test_a_prompt_with_segments_leaves_the_state_of_the_last(data_format):
    layer, params, _ = make("LightweightConv", data_format="NTC")
    layer = layer.clone(data_format=data_format, decode=True)

    def apply(variables, x, **options):
        x = x if data_format == "NTC" else x.swapaxes(1, 2)
        y, updated = layer.apply(variables, x, mutable=["cache"], **options)
        return (y if data_format == "NTC" else y.swapaxes(1, 2)), updated["cache"]

    x = normal(1, (1, TIME, FEATURES))
    ids = jnp.asarray([[0] * 6 + [1] * 2])
    _, cache = apply({"params": params}, x[:, :8], segment_ids=ids)
    y, _ = apply({"params": params, "cache": cache}, x[:, 8:])
    expected, _ = apply({"params": params}, x[:, 6:])
    np.testing.assert_array_equal(y, expected[:, 2:])


def test_the_cache_must_be_of_such_inputs():
    layer, params, nnx_layer = make("ShortConv", decode=True)
    cache = layer.init(jax.random.key(0), jnp.zeros((4, 1, FEATURES)))["cache"]
    message = r"ShortConv: x of shape \(2, 1, 6\) needs a cache of shape \(2, 6, 6\), got \(4, 6, 6"
    x = jnp.zeros((2, 1, FEATURES))
    with pytest.raises(ValueError, match=message):
        layer.apply({"params": params, "cache": cache}, x, mutable=["cache"])
    nnx_layer.init_cache((4, 1, FEATURES))
    with pytest.raises(ValueError, match=message):
        nnx_layer(x)


@pytest.mark.parametrize(
    ("name", "inner"), [("LightConv", "LightweightConv"), ("DynamicConv", "DynamicConv")]
)
def test_decoding_needs_causal_padding(name, inner):
    x = jnp.zeros((1, TIME, FEATURES))
    linen_block, nnx_block = getattr(jaxops_linen, name), getattr(jaxops_nnx, name)
    message = rf'{inner}: decoding needs padding="causal", got \'same\''
    with pytest.raises(ValueError, match=message):
        linen_block(3, 5, padding="same", decode=True).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=message):
        nnx_block(FEATURES, 3, 5, padding="same", rngs=nnx.Rngs(0)).init_cache(x.shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 0}, "ShortConv: kernel_size must be at least 1, got 0"),
        ({"kernel_size": 4, "kernel_dilation": 0}, "kernel_dilation must be at least 1, got 0"),
        ({"kernel_size": 4, "activation": "tanh"}, "activation"),
    ],
)
def test_bad_short_convs(options, message):
    x = jnp.zeros((1, TIME, FEATURES))
    with pytest.raises(ValueError, match=message):
        jaxops_linen.ShortConv(**options).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=message):
        jaxops_nnx.ShortConv(FEATURES, **options, rngs=nnx.Rngs(0))(x)


def test_other_channels():
    with pytest.raises(ValueError, match=r"ShortConv: expected 6 channels \(NTC\), got x of shape"):
        jaxops_nnx.ShortConv(FEATURES, 4, rngs=nnx.Rngs(0))(jnp.zeros((1, TIME, 3)))


def test_names_of_fields():
    """Sizes are positional, options are not, and earlier names still mean the same."""
    for kind in LAYERS:
        sizes = (4,) if kind == "ShortConv" else (3, 5)
        with pytest.raises(TypeError, match="positional"):
            getattr(jaxops_linen, kind)(*sizes, 1)
        with pytest.raises(TypeError, match="positional"):
            getattr(jaxops_nnx, kind)(FEATURES, *sizes, 1, rngs=nnx.Rngs(0))
    new = jaxops_linen.LightweightConv(3, 5, kernel_dilation=2)
    old = jaxops_linen.LightweightConv(heads=3, kernel_size=5, dilation=2)
    assert old == new
    assert old.clone(num_heads=2, kernel_dilation=1) == jaxops_linen.LightweightConv(2, 5)
    assert old.clone(heads=2) == new.clone(num_heads=2)
    layer = jaxops_nnx.LightweightConv(
        FEATURES, heads=3, kernel_size=5, dilation=2, rngs=nnx.Rngs(0)
    )
    assert (layer.num_heads, layer.kernel_dilation) == (3, 2)
    with pytest.raises(TypeError, match="LightweightConv: num_heads must be a static integer"):
        jaxops_linen.LightweightConv(kernel_size=5).init(jax.random.key(0), jnp.zeros((1, 4, 6)))


@layers
def test_bfloat16(name):
    """x and the result are bfloat16, parameters float32; decoding keeps bfloat16 inputs."""
    layer, params, nnx_layer = make(name, dtype=jnp.bfloat16)
    x = normal(1, (BATCH, TIME, FEATURES), jnp.bfloat16)
    y = layer.apply({"params": params}, x)
    assert y.dtype == jnp.bfloat16
    exact = layer.clone(dtype=jnp.float32).apply({"params": params}, x)
    np.testing.assert_allclose(
        y.astype(np.float32), exact, rtol=0, atol=0.03 * float(jnp.abs(exact).max())
    )
    nnx_layer.init_cache(x.shape)
    steps = [nnx_layer(x[:, t : t + 1], decode=True) for t in range(4)]
    np.testing.assert_allclose(
        jnp.concatenate(steps, 1).astype(np.float32),
        y[:, :4].astype(np.float32),
        rtol=0,
        atol=0.02 * float(jnp.abs(exact).max()),
    )
    (cache,) = jax.tree.leaves(nnx.state(nnx_layer, nnx.Cache))
    assert cache.dtype == jnp.bfloat16


class Residual(nn.Module):
    """A layer with a residual connection, computed again for its gradient."""

    name_of_layer: str
    decode: bool = False

    @nn.compact
    def __call__(self, x, _):
        layer = nn.remat(getattr(jaxops_linen, self.name_of_layer))
        options = {**LAYERS[self.name_of_layer], "decode": self.decode}
        return x + layer(**options, name="layer")(x), None


class Stack(nn.Module):
    """Layers of one kind in a loop, with their parameters and caches in one array each."""

    name_of_layer: str
    decode: bool = False

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Residual,
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True},
            length=3,
        )
        return layers(self.name_of_layer, self.decode, name="layers")(x, None)[0]


@pytest.mark.parametrize("name", ["ShortConv", "LightConv"])
def test_linen_scan_over_layers_with_remat(name):
    x = normal(1, (BATCH, 5, FEATURES))
    stack = Stack(name)
    params = stack.init(jax.random.key(0), x)["params"]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params)} == {3}

    def whole(params):
        return stack.apply({"params": params}, x)

    def in_a_row(params):
        y = x
        for i in range(3):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])["layer"]
            y = y + getattr(jaxops_linen, name)(**LAYERS[name]).apply({"params": one}, y)
        return y

    @jax.jit
    def both(params):
        def results(call):
            y, backward = jax.vjp(call, params)
            return y, backward(y)[0]

        return results(whole), results(in_a_row)

    result, expected = both(params)
    jax.tree.map(close, result, expected)
    decoder = stack.clone(decode=True)
    cache = decoder.init(jax.random.key(0), x)["cache"]
    step = jax.jit(lambda v, x: decoder.apply(v, x, mutable=["cache"]))
    parts = []
    for t in range(x.shape[1]):
        y, updated = step({"params": params, "cache": cache}, x[:, t : t + 1])
        cache = updated["cache"]
        parts.append(y)
    close(jnp.concatenate(parts, axis=1), result[0])


@pytest.mark.parametrize("name", ["ShortConv", "LightConv"])
def test_nnx_scan_over_layers_with_remat(name):
    x = normal(1, (BATCH, 5, FEATURES))
    kind = getattr(jaxops_nnx, name)

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def create(rngs):
        return kind(FEATURES, **LAYERS[name], rngs=rngs)

    stack = create(nnx.Rngs(0))

    @nnx.jit(static_argnames="decode")
    def apply(stack, x, decode=False):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def body(layer, x):
            return x + layer(x, decode=decode)

        return body(stack, x)

    whole = apply(stack, x)
    nnx.vmap(lambda layer: layer.init_cache(x.shape))(stack)
    parts = [apply(stack, x[:, t : t + 1], decode=True) for t in range(x.shape[1])]
    close(jnp.concatenate(parts, axis=1), whole)


@layers
def test_training_lowers_a_loss(name):
    layer, params, _ = make(name)
    x, target = normal(1, (BATCH, TIME, FEATURES)), normal(2, (BATCH, TIME, FEATURES))
    optimizer = optax.adam(3e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            return jnp.mean((layer.apply({"params": params}, x) - target) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(30):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", ["LightConv", "DynamicConv"])
def test_drop_connect_of_the_blocks(name):
    linen_block, nnx_block = getattr(jaxops_linen, name), getattr(jaxops_nnx, name)
    x, options = normal(1, (BATCH, TIME, FEATURES)), {"num_heads": 2, "kernel_size": 5}
    block = linen_block(**options, drop_connect=0.5)
    variables = block.init(jax.random.key(0), x, deterministic=True)
    quiet = block.apply(variables, x, deterministic=True)
    np.testing.assert_array_equal(quiet, linen_block(**options).apply(variables, x))
    rngs = {"dropout": jax.random.key(1)}
    assert (block.apply(variables, x, deterministic=False, rngs=rngs) != quiet).any()
    module = nnx_block(FEATURES, **options, drop_connect=0.5, rngs=nnx.Rngs(0))
    assert (module(x) != module(x)).any()
    module.eval()
    np.testing.assert_array_equal(module(x), module(x))


def test_the_page_decodes_what_it_says():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "flax.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "linen_error" in block)
    names = {}
    exec(code, names)
    assert names["linen_error"] < 1e-5
    assert names["nnx_error"] < 1e-5


# --- weights of other libraries, by the lines that the docstrings have ----------------------------


def documented(layer, first, **names):
    """The lines of a docstring's block of code that begins with `first`, executed."""
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", inspect.cleandoc(layer.__doc__))
    (code,) = [b for b in map(textwrap.dedent, blocks) if b.startswith(first)]
    return code, names


def depthwise64(x, weight, bias, dilation=1):
    """Sum over k of weight[c, k] x[t - (K - 1 - k) dilation, c], in float64."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    y = np.zeros_like(x) + np.asarray(bias, np.float64)
    taps = weight.shape[1]
    for t in range(x.shape[1]):
        for k in range(taps):
            source = t - (taps - 1 - k) * dilation
            if source >= 0:
                y[:, t] += weight[:, k] * x[:, source]
    return y


def silu64(x):
    return x / (1 + np.exp(-x))


def test_weights_of_causal_conv1d_and_of_depthwise_convolutions():
    x, bias = normal(1, (BATCH, TIME, FEATURES)), normal(2, (FEATURES,))
    code, names = documented(
        jaxops_linen.ShortConv,
        "kernel = flax",
        flax_depthwise_kernel=normal(3, (4, 1, FEATURES)),
        causal_conv1d_weight=normal(3, (4, FEATURES)).T,
    )
    from_flax, from_causal_conv1d = code.splitlines()[:2]
    for line in (from_flax, from_causal_conv1d):
        exec(line, names)
        params = {"kernel": names["kernel"], "bias": bias}
        y = jaxops_linen.ShortConv(4).apply({"params": params}, x)
        close(y, silu64(depthwise64(x, names["causal_conv1d_weight"], bias)))
    theirs = nn.Conv(FEATURES, 4, padding="CAUSAL", feature_group_count=FEATURES)
    y = theirs.apply({"params": {"kernel": names["flax_depthwise_kernel"], "bias": bias}}, x)
    ours = jaxops_linen.ShortConv(4, activation=None)
    close(ours.apply({"params": params}, x), y)


class Attributes:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def linear64(x, layer):
    return x @ np.asarray(layer.weight, np.float64).T + np.asarray(layer.bias, np.float64)


def glu64(x):
    first, second = np.split(x, 2, axis=-1)
    return first / (1 + np.exp(-second))


def softmax64(x):
    e = np.exp(np.asarray(x, np.float64))
    return e / e.sum(-1, keepdims=True)


def fairseq_layer(inner):
    """The linear maps before and after the convolution."""
    linear1 = Attributes(weight=normal(3, (2 * inner, FEATURES)), bias=normal(4, (2 * inner,)))
    linear2 = Attributes(weight=normal(5, (FEATURES, inner)), bias=normal(6, (FEATURES,)))
    return linear1, linear2


def test_weights_of_a_fairseq_light_conv_layer():
    """The layer's linear1, GLU, LightweightConv1dTBC with softmax, and linear2, in float64."""
    heads, taps, inner = 4, 5, 8
    x = normal(1, (BATCH, TIME, FEATURES))
    weight = np.asarray(normal(2, (heads, 1, taps)))
    linear1, linear2 = fairseq_layer(inner)
    names = {"linear1": linear1, "linear2": linear2, "conv": Attributes(weight=weight)}
    code, names = documented(jaxops_linen.LightConv, "params = ", **names)
    exec(code, names)
    block = jaxops_linen.LightConv(heads, taps, conv_features=inner)
    y = block.apply({"params": names["params"]}, x)
    hidden = glu64(linear64(np.asarray(x, np.float64), linear1))
    filters = np.repeat(softmax64(weight[:, 0]), inner // heads, axis=0)
    close(y, linear64(depthwise64(hidden, filters, 0.0), linear2))


def test_weights_of_a_fairseq_dynamic_conv_layer():
    """The layer's linear1, GLU, DynamicConv1dTBC with softmax, and linear2, in float64."""
    heads, taps, inner = 4, 5, 8
    x = normal(1, (BATCH, TIME, FEATURES))
    linear1, linear2 = fairseq_layer(inner)
    weight_linear = Attributes(weight=normal(2, (heads * taps, inner)), bias=0.0)
    names = {
        "linear1": linear1,
        "linear2": linear2,
        "conv": Attributes(weight_linear=weight_linear),
    }
    code, names = documented(jaxops_linen.DynamicConv, "params = ", **names)
    exec(code, names)
    block = jaxops_linen.DynamicConv(heads, taps, conv_features=inner)
    y = block.apply({"params": names["params"]}, x)
    hidden = glu64(linear64(np.asarray(x, np.float64), linear1))
    # The rows of weight_linear are those of head 0, of head 1, ...: view(T * B * H, K).
    filters = softmax64(linear64(hidden, weight_linear).reshape(BATCH, TIME, heads, taps))
    filters = np.repeat(filters, inner // heads, axis=2)
    convolved = np.zeros_like(hidden)
    for t, k in itertools.product(range(TIME), range(taps)):
        if t - (taps - 1 - k) >= 0:
            convolved[:, t] += filters[:, t, :, k] * hidden[:, t - (taps - 1 - k)]
    close(y, linear64(convolved, linear2))
