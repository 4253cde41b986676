"""Dynamic convolution: values, derivatives, segments and states, decoding.

The oracle is written out in NumPy, one tap at a time, and shares nothing with the library.
"""

from __future__ import annotations

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxops
from jaxops._core import native
from jaxops.testing.measure import assert_close, custom_calls, run, vjp_of
from jaxops.testing.spec import normal

LAYOUTS = ("NTC", "NCT")
ACTIVATIONS = (None, "relu", "silu", "gelu")
FLOATS = ("float16", "bfloat16", "float32", "float64")


# --- the oracle ----------------------------------------------------------------------------------


def softmax(weight):
    e = np.exp(weight - weight.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def segment_numbers(ids, shape):
    if ids is None:
        return np.zeros(shape, int)
    changes = np.diff(np.asarray(ids).astype(np.int64), axis=1) != 0
    return np.pad(np.cumsum(changes, axis=1), [(0, 0), (1, 0)])


def valid_taps(ids, shape, taps, dilation, padding):
    """(tap, step, read step, rows) of every tap; rows are those whose step is of the segment."""
    numbers = segment_numbers(ids, shape)
    for k, t in itertools.product(range(taps), range(shape[1])):
        s = t + k * dilation - padding
        if s < 0:
            yield k, t, s, numbers[:, t] == 0
        elif s < shape[1]:
            yield k, t, s, numbers[:, t] == numbers[:, s]


def by_channel(p, channels):
    return np.repeat(p, channels // p.shape[2], axis=2)


def oracle(x, weight, bias, ids, state, *, normalize, padding, dilation):
    """The sums of (B, T, C), in float64."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    p = by_channel(softmax(weight) if normalize else weight, x.shape[2])
    y = np.zeros(x.shape)
    for k, t, s, rows in valid_taps(ids, x.shape[:2], weight.shape[3], dilation, padding):
        if s >= 0:
            y[rows, t] += p[rows, t, :, k] * x[rows, s]
        elif state is not None:
            y[rows, t] += p[rows, t, :, k] * np.asarray(state, np.float64)[rows, padding + s]
    return y if bias is None else y + np.asarray(bias, np.float64)


def oracle_vjp(g, x, weight, ids, state, *, normalize, padding, dilation):
    """The cotangents of x, weight, bias and state."""
    g, x, weight = (np.asarray(a, np.float64) for a in (g, x, weight))
    heads, taps = weight.shape[2:]
    p = softmax(weight) if normalize else weight
    wide = by_channel(p, x.shape[2])
    dx, dp = np.zeros(x.shape), np.zeros(weight.shape)
    dstate = None if state is None else np.zeros(state.shape)
    for k, t, s, rows in valid_taps(ids, x.shape[:2], taps, dilation, padding):
        if s < 0 and state is None:
            continue
        source = x[rows, s] if s >= 0 else np.asarray(state, np.float64)[rows, padding + s]
        pulled = wide[rows, t, :, k] * g[rows, t]
        if s >= 0:
            dx[rows, s] += pulled
        else:
            dstate[rows, padding + s] += pulled
        products = (g[rows, t] * source).reshape(len(source), heads, x.shape[2] // heads)
        dp[rows, t, :, k] += products.sum(-1)
    dweight = p * (dp - (p * dp).sum(-1, keepdims=True)) if normalize else dp
    return dx, dweight, g.sum((0, 1)), dstate


def swapped(array, data_format):
    return array if array is None or data_format == "NTC" else np.swapaxes(array, 1, 2)


def resolve(padding, taps, dilation):
    reach = (taps - 1) * dilation
    return {"causal": reach, "SAME": reach // 2, "same": reach // 2}.get(padding, padding)


def check(
    platform,
    *,
    shape,
    heads,
    taps,
    dtype="float32",
    weight_dtype=None,
    normalize=False,
    padding="causal",
    dilation=1,
    bias=False,
    segments=False,
    state=False,
    activation=None,
    data_format="NTC",
):
    """Value and gradients against the oracle; `shape` is (B, T, C)."""
    rng = np.random.default_rng(sum(shape) + 7 * heads + 11 * taps)
    batch, time, channels = shape
    number = resolve(padding, taps, dilation)
    g, x = (normal(rng, shape, jnp.dtype(dtype)) for _ in range(2))
    weight = normal(rng, (batch, time, heads, taps), jnp.dtype(weight_dtype or dtype))
    b = normal(rng, (channels,), jnp.dtype(dtype)) if bias else None
    ids = np.cumsum(rng.random((batch, time)) < 0.2, axis=1, dtype=np.int32) if segments else None
    s = normal(rng, (batch, number, channels), jnp.dtype(dtype)) if state else None
    options = {"normalize": normalize, "padding": padding, "dilation": dilation}
    arguments = [swapped(x, data_format), weight]
    arguments += [b] if bias else []
    arguments += [swapped(s, data_format)] if state else []

    def function(x, weight, *rest):
        return jaxops.dynamic_conv(
            x,
            weight,
            bias=rest[0] if bias else None,
            initial_state=rest[-1] if state else None,
            segment_ids=ids,
            activation=activation,
            data_format=data_format,
            **options,
        )

    # One program computes both, because most of the time is the compiler's.
    def alone_and_differentiated(g, *arguments):
        argnums = tuple(range(len(arguments)))
        return function(*arguments), vjp_of(function, argnums)((g,), *arguments)

    got = run(alone_and_differentiated, platform, swapped(g, data_format), *arguments)
    options["padding"] = number
    sums = oracle(x, weight, b, ids, s, **options)
    of_activation = {
        None: (lambda z: (z, np.ones_like(z))),
        "relu": (lambda z: (np.maximum(z, 0), (z > 0).astype(float))),
        "silu": silu,
        "gelu": gelu,
    }
    y, slope = of_activation[activation](sums)
    dx, dweight, dbias, dstate = oracle_vjp(
        np.asarray(g, np.float64) * slope, x, weight, ids, s, **options
    )
    want = [y, y, dx, dweight] + ([dbias] if bias else []) + ([dstate] if state else [])
    want = [swapped(a, data_format) if a.shape[0] == batch and a.ndim == 3 else a for a in want]
    what = f"{shape}, H = {heads}, K = {taps}, {dtype}, {options}, {activation}, {data_format}"
    assert [a.dtype for a in got] == [got[0].dtype, *(a.dtype for a in (x, *arguments))]
    terms = taps + 1 + 2 * taps * normalize
    # dweight sums the channels of a head, and under the softmax the taps; dbias all of a channel.
    sizes = [terms, terms, terms, channels // heads + 2 * terms, batch * time, terms]
    sizes = sizes if bias else sizes[:4] + sizes[5:]
    roundings = 0 if activation is None else 3
    for i, (a, w) in enumerate(zip(got, want, strict=True)):
        coarse = max((dtype, a.dtype.name), key=lambda d: jnp.finfo(d).eps)
        factor = 8 if activation == "gelu" and i > 1 else 1
        assert_close(
            [a],
            [w],
            f"result {i} of {what}",
            dtype=coarse,
            terms=sizes[i] * factor,
            # The sums of a state and of a sequence are rounded before they are added.
            roundings=roundings + 2 * state,
        )


def silu(z):
    s = 1 / (1 + np.exp(-z))
    return z * s, s * (1 + z * (1 - s))


def gelu(z):
    root = np.sqrt(2 / np.pi)
    tanh = np.tanh(root * (z + 0.044715 * z**3))
    slope = root * (1 + 3 * 0.044715 * z**2)
    return 0.5 * z * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * slope


# --- values and gradients ------------------------------------------------------------------------


@st.composite
def cases(draw):
    heads = draw(st.sampled_from((1, 2, 3, 5)))
    taps = draw(st.sampled_from((1, 2, 3, 4, 7, 9, 17)))
    dilation = draw(st.sampled_from((1, 1, 2, 5)))
    reach = (taps - 1) * dilation
    return {
        "shape": (
            draw(st.integers(1, 2)),
            draw(st.sampled_from((1, 2, 5, 16, 17, 33, 40))),
            heads * draw(st.sampled_from((1, 2, 3, 8, 16, 19))),
        ),
        "heads": heads,
        "taps": taps,
        "dilation": dilation,
        "padding": draw(st.sampled_from(("causal", "SAME", 0, reach, reach // 3))),
        "normalize": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "segments": draw(st.booleans()),
        "state": draw(st.booleans()),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "dtype": draw(st.sampled_from(FLOATS)),
        "data_format": draw(st.sampled_from(LAYOUTS)),
    }


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(case=cases())
def test_against_float64(platform, case):
    check(platform, **case)


# Tiles, blocks of steps and of heads, and their ends.
@pytest.mark.any_jax
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "heads", "taps", "options"),
    [
        ((1, 300, 130), 2, 5, {}),
        ((1, 600, 24), 3, 31, {"normalize": True, "segments": True}),
        ((2, 35, 70), 70, 4, {"normalize": True, "state": True}),
        ((1, 270, 64), 8, 3, {"dilation": 40, "padding": "same", "segments": True}),
        ((1, 40, 6), 1, 200, {"state": True}),
        ((1, 1100, 3), 1, 130, {"normalize": True, "padding": "same"}),
        ((1, 1, 96), 6, 7, {"state": True, "normalize": True, "bias": True}),
    ],
)
def test_blocks(platform, shape, heads, taps, options, data_format):
    check(platform, shape=shape, heads=heads, taps=taps, data_format=data_format, **options)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("float32", "float64"),
        ("float64", "float32"),
        ("float32", "float16"),
    ],
)
def test_mixed_dtypes(platform, dtype, weight_dtype):
    for data_format in LAYOUTS:
        check(
            platform,
            shape=(2, 21, 12),
            heads=3,
            taps=3,
            dtype=dtype,
            weight_dtype=weight_dtype,
            normalize=True,
            data_format=data_format,
        )


@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0)])
def test_empty(platform, shape):
    for data_format, state in itertools.product(LAYOUTS, (False, True)):
        options = {"state": state, "segments": state, "data_format": data_format}
        check(platform, shape=shape, heads=2, taps=3, normalize=state, bias=True, **options)


@pytest.mark.parametrize(
    ("taps", "dilation", "padding"), [(1, 2**61, 0), (3, 2**61, "same"), (5, 2**70, 2**70 - 2)]
)
def test_dilation_without_bound(platform, taps, dilation, padding):
    shape, options = (2, 6, 4), {"dilation": dilation, "padding": padding}
    check(platform, shape=shape, heads=2, taps=taps, dtype="float64", **options)


def arrays(batch=2, time=9, channels=6, heads=3, taps=4, dtype="float64"):
    rng = np.random.default_rng(3)
    return (
        jnp.asarray(rng.normal(size=(batch, time, channels)), dtype),
        jnp.asarray(rng.normal(size=(batch, time, heads, taps)), dtype),
        jnp.asarray(rng.normal(size=channels), dtype),
        jnp.asarray(rng.normal(size=(batch, taps - 1, channels)), dtype),
        jnp.asarray(np.cumsum(rng.random((batch, time)) < 0.3, axis=1)),
    )


def test_second_derivatives():
    """The Hessian along directions, against differences of the oracle's gradient."""
    x, weight, _, state, ids = arrays()
    rng = np.random.default_rng(0)
    g = rng.normal(size=x.shape)
    moves = [rng.normal(size=a.shape) for a in (x, weight, state)]
    for normalize in (False, True):
        options = {"normalize": normalize, "padding": 3, "dilation": 1}

        def loss(x, weight, state, normalize=normalize):
            y = jaxops.dynamic_conv(
                x, weight, normalize=normalize, segment_ids=ids, initial_state=state
            )
            return jnp.sum(g * y**2)

        def gradients(x, weight, state, options=options):
            y = oracle(x, weight, None, ids, state, **options)
            dx, dweight, _, dstate = oracle_vjp(2 * g * y, x, weight, ids, state, **options)
            return dx, dweight, dstate

        def along(step, gradients=gradients):
            moved = (
                np.asarray(a) + step * m for a, m in zip((x, weight, state), moves, strict=True)
            )
            return gradients(*moved)

        grad = jax.grad(loss, (0, 1, 2))
        forward = jax.jit(lambda *a, grad=grad: jax.jvp(grad, a, tuple(moves))[1])
        reverse = jax.jit(
            jax.grad(
                lambda *a, grad=grad: sum(
                    jnp.vdot(m, d) for m, d in zip(moves, grad(*a), strict=True)
                ),
                (0, 1, 2),
            )
        )
        step = 1e-5
        want = [(b - a) / (2 * step) for a, b in zip(along(-step), along(step), strict=True)]
        for got in (forward(x, weight, state), reverse(x, weight, state)):
            for a, w in zip(got, want, strict=True):
                np.testing.assert_allclose(a, w, rtol=1e-6, atol=1e-6 * np.abs(w).max())


def test_gradients_are_kernels():
    """Value and gradients are a call each, and so are derivatives of the gradients."""
    x, weight, *_ = arrays(dtype="float32")

    def loss(x, weight):
        return jaxops.dynamic_conv(x, weight, normalize=True).sum()

    def calls(function, *arguments):
        function = jaxops.use_implementation("native")(function)
        return custom_calls(jax.jit(function).lower(*arguments).compile())

    both = jax.value_and_grad(loss, (0, 1))
    assert calls(both, x, weight) == {"jaxops_dynamic_conv": 1, "jaxops_dynamic_conv_backward": 1}
    assert calls(jax.grad(loss), x, weight) == {"jaxops_dynamic_conv_input_grad": 1}
    plain = jax.grad(lambda w: jaxops.dynamic_conv(x, w).sum())
    assert calls(plain, weight) == {"jaxops_dynamic_conv_weight_grad": 1}


AXES = list(itertools.product((0, None), repeat=4))[:-1]


@pytest.mark.parametrize("in_axes", AXES, ids=str)
def test_vmap(in_axes):
    x, weight, _, state, ids = arrays(time=5, taps=3, dtype="float32")
    full = [jnp.stack([a, 2 * a]) for a in (x, weight, state)] + [jnp.stack([ids, ids[:, ::-1]])]
    given = [a if axis == 0 else a[0] for a, axis in zip(full, in_axes, strict=True)]

    def function(x, weight, state, ids):
        def value(x, weight, state):
            return jaxops.dynamic_conv(
                x, weight, normalize=True, segment_ids=ids, initial_state=state
            )

        y, pullback = jax.vjp(value, x, weight, state)
        return y, *pullback(jnp.cos(y))

    got = jax.jit(jax.vmap(function, in_axes))(*given)
    want = [
        function(*(a[i] if axis == 0 else a for a, axis in zip(given, in_axes, strict=True)))
        for i in range(2)
    ]
    for a, parts in zip(got, zip(*want, strict=True), strict=True):
        np.testing.assert_allclose(a, jnp.stack(parts), rtol=2e-6, atol=2e-6)


def test_gradients_of_unbatched_weights_sum_over_the_batch():
    x, weight, *_ = arrays(batch=40, dtype="float32")
    x, weight = x.astype(jnp.bfloat16), weight[0].astype(jnp.bfloat16)

    def loss(weight):
        return jax.vmap(jaxops.dynamic_conv, (0, None))(x, weight).astype(jnp.float32).sum()

    want = jax.grad(lambda w: loss(w))(weight.astype(jnp.float64))
    np.testing.assert_allclose(
        jax.grad(loss)(weight).astype(np.float64), want, rtol=2**-7, atol=1e-2
    )


# --- shapes, names and NaN -----------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (2, 1, 2)])
def test_leading_dimensions(lead):
    x, weight, _, state, ids = arrays(batch=4)
    n = 1 if lead == () else 4
    want = jaxops.dynamic_conv(x, weight, segment_ids=ids, initial_state=state)[:n]
    got = jaxops.dynamic_conv(
        *(a[:n].reshape(*lead, *a.shape[1:]) for a in (x, weight)),
        segment_ids=ids[:n].reshape(*lead, *ids.shape[1:]),
        initial_state=state[:n].reshape(*lead, *state.shape[1:]),
    )
    np.testing.assert_array_equal(got.reshape(want.shape), want)


def test_paddings_in_any_case():
    x, weight, *_ = arrays()
    for name, number in (("Causal", 3), ("SAME", 1)):
        got = jaxops.dynamic_conv(x, weight, padding=name)
        np.testing.assert_array_equal(got, jaxops.dynamic_conv(x, weight, padding=number))


@pytest.mark.parametrize("data_format", LAYOUTS)
def test_nan_stays_in_its_segment(data_format):
    x, weight, *_ = arrays(batch=1, time=40, taps=5, channels=24, dtype="float32")
    ids = (jnp.arange(40) >= 19).astype(jnp.int32)[None]
    first = np.arange(40) < 19
    bad_x = jnp.where(first[None, :, None], jnp.nan, x)
    bad_weight = jnp.where(first[None, :, None, None], jnp.inf, weight)
    function = functools.partial(
        jaxops.dynamic_conv, padding="same", segment_ids=ids, data_format=data_format
    )

    def results(x, weight):
        x = jnp.asarray(swapped(x, data_format))
        y, pullback = jax.vjp(function, x, weight)
        dx, dweight = pullback(jnp.ones_like(y))
        return [swapped(y, data_format)[0], swapped(dx, data_format)[0], dweight[0]]

    for got, want in zip(results(bad_x, bad_weight), results(x, weight), strict=True):
        assert not np.isfinite(got[first]).any(axis=tuple(range(1, got.ndim))).all()
        np.testing.assert_array_equal(got[~first], want[~first])


# --- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("channels", "heads"), [(6, 3), (96, 3), (40, 40)])
def test_chunks_equal_the_whole(channels, heads, normalize, data_format):
    x, weight, bias, state, _ = arrays(
        time=37, channels=channels, heads=heads, taps=4, dtype="float32"
    )
    axis = 1 if data_format == "NTC" else 2
    x, state = (jnp.asarray(swapped(a, data_format)) for a in (x, state))
    function = jax.jit(
        functools.partial(
            jaxops.dynamic_conv,
            normalize=normalize,
            activation="silu",
            return_final_state=True,
            data_format=data_format,
        )
    )
    whole, final = function(x, weight, bias=bias, initial_state=state)
    parts = []
    for begin, end in itertools.pairwise((0, 1, 3, 20, 37)):
        part, state = function(
            jax.lax.slice_in_dim(x, begin, end, axis=axis),
            weight[:, begin:end],
            bias=bias,
            initial_state=state,
        )
        parts.append(part)
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=axis), whole)
    np.testing.assert_array_equal(state, final)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_steps_equal_the_whole(steps, normalize, dilation):
    """Slots of a cache; 0 steps stand for x_t without a dimension of steps."""
    x, weight, bias, *_ = arrays(batch=3, time=6, channels=32, heads=2, taps=3, dtype="float32")
    options = {"normalize": normalize, "dilation": dilation, "bias": bias, "activation": "gelu"}
    padding = 2 * dilation
    rng = np.random.default_rng(1)
    cache = jnp.asarray(rng.normal(size=(5, padding, 32)), jnp.float32)
    slots = jnp.array([4, 0, 2])
    whole, final = jaxops.dynamic_conv(
        x, weight, initial_state=cache[slots], return_final_state=True, **options
    )
    step = jax.jit(functools.partial(jaxops.dynamic_conv_step, **options))
    moved, outputs = cache, []
    for t in range(0, 6, max(1, steps)):
        at = t if steps == 0 else slice(t, t + steps)
        y, moved = step(x[:, at], moved, weight[:, at], state_indices=slots)
        outputs.append(y[:, None] if steps == 0 else y)
    together = jnp.concatenate(outputs, axis=1)
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(together, whole)
    else:  # kernels of GPUs have several orders of sums
        np.testing.assert_allclose(together, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(moved[slots], final)
    np.testing.assert_array_equal(moved[jnp.array([1, 3])], cache[jnp.array([1, 3])])


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("steps", [8, 9])
def test_many_steps_equal_the_whole(steps, state_dtype):
    """The kernel of steps takes 8 at a time, and 9 are a sequence."""
    x, weight, bias, *_ = arrays(batch=2, time=steps, channels=8, heads=2, taps=4, dtype="float32")
    options = {"normalize": True, "bias": bias, "dilation": 2}
    rng = np.random.default_rng(0)
    cache = jnp.asarray(rng.normal(size=(4, 6, 8)), state_dtype)
    slots = np.array([3, 1], np.int64)
    whole, _ = jaxops.dynamic_conv(
        x, weight, initial_state=cache[slots], return_final_state=True, **options
    )
    y, moved = jaxops.dynamic_conv_step(x, cache, weight, state_indices=slots, **options)
    np.testing.assert_allclose(y, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(moved[slots], x[:, -6:].astype(state_dtype))
    np.testing.assert_array_equal(moved[np.array([0, 2])], cache[np.array([0, 2])])


def test_a_step_updates_a_donated_state_in_place():
    x, weight, *_ = arrays(batch=3, time=1, channels=32, heads=2, taps=31, dtype="float32")
    cache = jnp.ones((5, 30, 32), jnp.float32)
    step = jax.jit(
        lambda x, cache, w: jaxops.dynamic_conv_step(
            x, cache, w, state_indices=np.array([4, 0, 2])
        ),
        donate_argnums=1,
    )
    compiled = step.lower(x[:, 0], cache, weight[:, 0]).compile()
    assert "jaxops_dynamic_conv_step" in compiled.as_text()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes


def test_steps_of_padding_write_nothing():
    x, weight, *_ = arrays(batch=3, time=1, channels=6, taps=3, dtype="float32")
    cache = jnp.ones((2, 2, 6), jnp.float32)
    slots = jnp.array([-1, 1, 2])
    y, moved = jaxops.dynamic_conv_step(x[:, 0], cache, weight[:, 0], state_indices=slots)
    zeros = jnp.zeros((3, 2, 6), jnp.float32).at[1].set(1)
    want, final = jaxops.dynamic_conv_step(x[:, 0], zeros, weight[:, 0])
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(moved, cache.at[1].set(final[1]))


def test_a_step_has_gradients():
    x, weight, bias, *_ = arrays(batch=2, time=1, channels=6, taps=3)
    cache = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 6)))

    def loss(x, weight, cache):
        y, moved = jaxops.dynamic_conv_step(
            x[:, 0], cache, weight[:, 0], bias=bias, state_indices=jnp.array([3, 1])
        )
        return jnp.sum(y**2) + jnp.sum(moved**3)

    check_grads(loss, (x, weight, cache), order=2, modes=["rev"])


def test_states_with_segments():
    """The final state is that of the last segment; the initial one is the first segment's."""
    x, weight, _, state, ids = arrays(batch=1, time=8, taps=4)
    ids = jnp.array([[5, 5, 5, 2, 2, 2, 7, 7]])
    y, final = jaxops.dynamic_conv(
        x, weight, segment_ids=ids, initial_state=state, return_final_state=True
    )
    np.testing.assert_array_equal(final[0, 0], 0)
    np.testing.assert_array_equal(final[0, 1:], x[0, 6:])
    first = jaxops.dynamic_conv(x[:, :3], weight[:, :3], initial_state=state)
    rest = jaxops.dynamic_conv(x[:, 3:6], weight[:, 3:6])
    np.testing.assert_array_equal(y[:, :6], jnp.concatenate([first, rest], axis=1))


@pytest.mark.parametrize(
    ("shape", "heads", "taps", "data_format", "chosen"),
    [
        ((2, 64, 64), 1, 31, "NTC", ("value", "gradients")),
        ((2, 64, 64), 1, 31, "NCT", ("gradients",)),
        ((2, 64, 64), 1, 7, "NTC", ()),
        ((2, 64, 48), 1, 31, "NTC", ()),
        ((8, 1024, 256), 4, 7, "NTC", ("value",)),
        ((8, 1024, 256), 4, 3, "NTC", ()),
        ((16, 1024, 256), 4, 3, "NTC", ("value",)),
        ((16, 1024, 256), 4, 2, "NTC", ()),
        ((16, 1024, 256), 4, 7, "NCT", ()),
    ],
)
def test_gpus_run_what_is_fast(shape, heads, taps, data_format, chosen, monkeypatch):
    monkeypatch.delenv(native.NEW_KERNELS_VARIABLE, raising=False)
    batch, time, channels = shape
    weight = jnp.ones((batch, time, heads, taps), jnp.float32)
    x = jnp.ones(shape if data_format == "NTC" else (batch, channels, time), jnp.float32)

    def function(x, weight):
        return jaxops.dynamic_conv(x, weight, normalize=True, data_format=data_format)

    def text(function, *arguments):
        checks = jaxops.DISABLE_JAX_EXPORT_CHECKS
        export = jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=checks)
        return export(*arguments).mlir_module()

    of_value = text(function, x, weight)
    assert ("@jaxops_dynamic_conv(" in of_value) == ("value" in chosen)
    of_both = text(lambda x, w, g: jax.vjp(function, x, w)[1](g), x, weight, x)
    assert ("@jaxops_dynamic_conv_backward(" in of_both) == ("gradients" in chosen)


def test_normalized_derivatives_under_vmaps_of_other_arguments():
    """The weight and its tangent have other batch dimensions each."""
    rng = np.random.default_rng(0)
    x, dx = rng.standard_normal((2, 4, 3))
    weight, dweight = rng.standard_normal((4, 1, 2)), rng.standard_normal((3, 4, 1, 2))
    weights = np.stack([weight, 2 * weight])

    def jvp(weight, dweight):
        call = functools.partial(jaxops.dynamic_conv, normalize=True)
        return jax.jvp(call, (x, weight), (dx, dweight))[1]

    batched = jax.vmap(jax.vmap(jvp, (None, 0)), (0, None))
    got = jax.jit(batched)(weights, dweight)
    want = [[jvp(w, d) for d in dweight] for w in weights]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
