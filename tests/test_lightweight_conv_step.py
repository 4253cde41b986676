"""Steps of the lightweight convolution: the bits of whole sequences, slots, updates in place.

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

import jaxops
from jaxops.testing.measure import assert_close

FLOATS = ("float16", "bfloat16", "float32", "float64")
ACTIVATIONS = (None, "relu", "silu", "gelu")
step = jaxops.lightweight_conv_step


def activate(activation, y):
    if activation == "relu":
        return np.maximum(y, 0)
    if activation == "silu":
        return y / (1 + np.exp(-y))
    if activation == "gelu":
        return y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) / 2
    return y


def oracle(x, state, weight, bias, indices, dilation, activation):
    """(y, new state) in float64; the new state is not rounded."""
    x, state, weight = (np.asarray(a, np.float64) for a in (x, state, weight))
    filters = np.repeat(weight, x.shape[-1] // weight.shape[0], axis=0)
    y, new = np.zeros(x.shape), state.copy()
    for entry, slot in enumerate(np.arange(len(x)) if indices is None else indices):
        is_slot = 0 <= int(slot) < len(state)
        rows = np.concatenate([state[slot] if is_slot else 0 * state[0], x[entry]])
        for s, k in itertools.product(range(x.shape[1]), range(weight.shape[1])):
            y[entry, s] += filters[:, k] * rows[s + k * dilation]
        if is_slot:
            new[slot] = rows[len(rows) - state.shape[1] :]
    bias = 0 if bias is None else np.asarray(bias, np.float64)
    return activate(activation, y + bias), new


def normal(rng, shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape), dtype)


CASES = st.fixed_dictionaries(
    {
        "entries": st.integers(0, 4),
        "steps": st.integers(0, 5),
        "more_slots": st.integers(1, 3),
        "heads": st.integers(1, 5),
        "depth": st.sampled_from([0, 1, 2, 17, 130]),
        "taps": st.integers(1, 10),
        "dilation": st.integers(1, 4),
        "activation": st.sampled_from(ACTIVATIONS),
        "dtypes": st.tuples(*[st.sampled_from(FLOATS)] * 4),
        "with_bias": st.booleans(),
        "with_indices": st.booleans(),
        "seed": st.integers(0, 2**32 - 1),
    }
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(CASES)
def test_values(case):
    rng = np.random.default_rng(case["seed"])
    channels = case["heads"] * case["depth"]
    slots = case["entries"] + case["more_slots"]
    of_x, of_state, of_weight, of_bias = case["dtypes"]
    reach = (case["taps"] - 1) * case["dilation"]
    with jax.enable_x64(True):
        x = normal(rng, (case["entries"], case["steps"], channels), of_x)
        state = normal(rng, (slots, reach, channels), of_state)
        weight = normal(rng, (case["heads"], case["taps"]), of_weight)
        bias = normal(rng, (channels,), of_bias) if case["with_bias"] else None
        indices = None
        if case["with_indices"]:
            # As many numbers below 0 and from `slots` on as there are slots.
            indices = rng.permutation(np.arange(-slots, 2 * slots))[: case["entries"]]
        options = {"dilation": case["dilation"], "activation": case["activation"]}
        y, new = step(x, state, weight, bias=bias, state_indices=indices, **options)
        want, want_state = oracle(x, state, weight, bias, indices, *options.values())
        assert (y.dtype, new.dtype) == (x.dtype, state.dtype)
        assert_close([y], [want], "y", dtype=of_x, terms=case["taps"] + 1)
        assert_close([new], [want_state], "state", dtype=of_state, terms=1)
        if of_x == of_state:
            np.testing.assert_array_equal(new, want_state.astype(state.dtype))


# --- whole sequences -----------------------------------------------------------------------------


def in_chunks(x, weight, chunk, *, dilation, **options):
    """The result of a whole sequence from its chunks, and the final state."""
    state = jnp.zeros((len(x), (weight.shape[1] - 1) * dilation, x.shape[2]), x.dtype)
    results = []
    for start in range(0, x.shape[1], chunk):
        rows = x[:, start] if chunk == 1 else x[:, start : start + chunk]
        y, state = step(rows, state, weight, dilation=dilation, **options)
        results.append(y[:, None] if chunk == 1 else y)
    return np.concatenate(results, axis=1), state


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dilation", [1, 2, 5])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7, 16, 31])
def test_steps_and_chunks_have_the_bits_of_the_whole(taps, dilation, dtype):
    if jax.default_backend() != "cpu":
        pytest.skip("the kernels of GPUs have several orders of sums")
    rng = np.random.default_rng(taps)
    sizes = (1, 1), (6, 3), (40, 40), (530, 5)
    # All ends of a sum meet all taps, but not each size: the sums come before them.
    ends = itertools.cycle(itertools.product(ACTIVATIONS, (False, True)))
    ends = itertools.islice(ends, 4 * dilation + 2 * (dtype == "float64"), None)
    with jax.enable_x64(True):
        for (channels, heads), (activation, with_bias) in zip(sizes, ends, strict=False):
            x, weight = normal(rng, (2, 12, channels), dtype), normal(rng, (heads, taps), dtype)
            bias = normal(rng, (channels,), dtype) if with_bias else None
            options = {"dilation": dilation, "activation": activation, "bias": bias}
            whole = jaxops.lightweight_conv(x, weight, **options)
            for chunk in (1, 5, 12):
                y, state = in_chunks(x, weight, chunk, **options)
                np.testing.assert_array_equal(y, whole)
                padded = np.pad(x, [(0, 0), (state.shape[1], 0), (0, 0)])
                np.testing.assert_array_equal(state, padded[:, x.shape[1] :])


def test_gradients_through_steps_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    x, weight, bias = normal(rng, (2, 6, 4)), normal(rng, (2, 3)), normal(rng, (4,))

    def of_steps(x, weight, bias):
        def advance(state, x_t):
            y, state = step(x_t, state, weight, bias=bias, activation="silu")
            return state, y

        _, y = jax.lax.scan(advance, jnp.zeros((2, 2, 4)), x.swapaxes(0, 1))
        return jnp.sum(jnp.sin(y))

    def of_whole(x, weight, bias):
        return jnp.sum(jnp.sin(jaxops.lightweight_conv(x, weight, bias=bias, activation="silu")))

    arguments = (x, weight, bias)
    for got, want in zip(
        jax.grad(of_steps, (0, 1, 2))(*arguments),
        jax.grad(of_whole, (0, 1, 2))(*arguments),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    got, want = (
        jax.jvp(lambda w, f=f: jax.grad(f, 1)(x, w, bias), (weight,), (weight,))[1]
        for f in (of_steps, of_whole)
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("indices", [None, np.array([2, -1], np.int32)])
def test_one_tap_has_an_empty_state(indices):
    rng = np.random.default_rng(0)
    x, weight, state = normal(rng, (2, 4)), normal(rng, (2, 1)), jnp.zeros((3, 0, 4))

    def function(x, weight):
        y, new = step(x, state, weight, dilation=3, state_indices=indices)
        assert new.shape == state.shape
        return y

    y, pull = jax.vjp(function, x, weight)
    np.testing.assert_allclose(y, x * np.repeat(weight[:, 0], 2), rtol=1e-6)
    dx, dweight = pull(jnp.ones_like(y))
    np.testing.assert_allclose(dx, np.tile(np.repeat(weight[:, 0], 2), (2, 1)), rtol=1e-6)
    np.testing.assert_allclose(dweight[:, 0], x.reshape(2, 2, 2).sum((0, 2)), rtol=1e-5, atol=1e-6)


# --- slots ---------------------------------------------------------------------------------------

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("as_jax", [False, True])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_indices_of_every_integer_dtype(dtype, as_jax):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, state, weight = normal(rng, (4, 6)), normal(rng, (5, 2, 6)), normal(rng, (3, 3))
        held = np.iinfo(dtype)
        indices = np.array([3, held.max, held.min if held.min < 0 else 5, 0], dtype)
        y, new = step(x, state, weight, state_indices=jnp.asarray(indices) if as_jax else indices)
        want, want_state = oracle(x[:, None], state, weight, None, indices.astype(object), 1, None)
    np.testing.assert_allclose(y, want[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(new, want_state.astype(np.float32))


def test_large_indices_without_64_bits():
    """NumPy's indices are int64 also where JAX has none."""
    rng = np.random.default_rng(0)
    x, state, weight = normal(rng, (2, 6)), normal(rng, (3, 2, 6)), normal(rng, (3, 3))
    y, new = step(x, state, weight, state_indices=np.array([2**32 + 1, 2]))
    padded, _ = step(x[:1], jnp.zeros((1, 2, 6)), weight)
    np.testing.assert_array_equal(y[0], padded[0])
    np.testing.assert_array_equal(new[:2], state[:2])


def test_padding_has_no_gradient_of_the_state():
    rng = np.random.default_rng(0)
    x, state, weight = normal(rng, (3, 6)), normal(rng, (3, 2, 6)), normal(rng, (3, 3))
    indices = np.array([-1, 1, 7], np.int32)
    _, pull = jax.vjp(lambda s: step(x, s, weight, state_indices=indices), state)
    (cotangent,) = pull((jnp.ones_like(x), jnp.zeros_like(state)))
    assert not cotangent[0].any()
    assert not cotangent[2].any()
    assert cotangent[1].any()
    (cotangent,) = pull((jnp.zeros_like(x), jnp.ones_like(state)))
    # The slot's second row has moved to its first one; the others are the state's own.
    np.testing.assert_array_equal(cotangent[::2], 1)
    np.testing.assert_array_equal(cotangent[1], [[0] * 6, [1] * 6])


def test_more_slots_than_entries_without_indices():
    rng = np.random.default_rng(0)
    x, state, weight = normal(rng, (2, 6)), normal(rng, (5, 2, 6)), normal(rng, (3, 3))
    y, new = step(x, state, weight)
    want, want_state = step(x, state, weight, state_indices=[0, 1])
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(new, want_state)
    np.testing.assert_array_equal(new[2:], state[2:])


@pytest.mark.parametrize(
    "axes",
    [a for a in itertools.product((None, 0), repeat=5) if any(x is not None for x in a)],
)
def test_vmap_is_one_launch(axes):
    rng = np.random.default_rng(0)
    shapes = (2, 3, 6), (4, 2, 6), (3, 3), (6,)

    def varied(shape, axis):
        return normal(rng, shape if axis is None else (5, *shape))

    arguments = [varied(s, a) for s, a in zip(shapes, axes, strict=False)]
    slots = np.stack([rng.permutation(4)[:2] for _ in range(5)]).astype(np.int32)
    arguments.append(slots[0] if axes[4] is None else slots)

    def function(x, state, weight, bias, indices):
        return step(x, state, weight, bias=bias, state_indices=indices, activation="gelu")

    mapped = jax.vmap(function, axes)
    got = jax.jit(mapped)(*arguments)
    each = [
        function(*(a if axis is None else a[i] for a, axis in zip(arguments, axes, strict=True)))
        for i in range(5)
    ]
    for y, wants in zip(got, zip(*each, strict=True), strict=True):
        np.testing.assert_array_equal(y, np.stack(wants))
    text = jax.jit(mapped).lower(*arguments).as_text()
    assert text.count("@jaxops_lightweight_conv_step(") == 1


# --- updates in place ----------------------------------------------------------------------------


def arguments_of(with_indices, slots=6):
    rng = np.random.default_rng(0)
    entries = 4 if with_indices else slots
    x, state, weight = normal(rng, (7, entries, 8)), normal(rng, (slots, 3, 8)), normal(rng, (8, 4))
    return x, state, weight, jnp.arange(entries, dtype=jnp.int32) if with_indices else None


def copies_of(compiled, state):
    """The instructions that copy an array of the shape of the state."""
    shape = ",".join(map(str, state.shape))
    return [
        line.strip()
        for line in compiled.as_text().splitlines()
        if f"f32[{shape}]" in line and ("copy(" in line or "dynamic-update-slice(" in line)
    ]


@pytest.mark.parametrize("with_indices", [False, True])
def test_a_donated_state_is_updated_in_place(with_indices):
    x, state, weight, indices = arguments_of(with_indices)

    @functools.partial(jax.jit, donate_argnums=1)
    def advance(x, state, weight):
        return step(x, state, weight, state_indices=indices)

    compiled = advance.lower(x[0], state, weight).compile()
    assert not copies_of(compiled, state)
    want = step(x[0], state, weight, state_indices=indices)
    given = jnp.array(state)
    address = given.unsafe_buffer_pointer()
    y, new = compiled(x[0], given, weight)
    assert given.is_deleted()
    assert new.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(y, want[0])
    np.testing.assert_array_equal(new, want[1])


@pytest.mark.parametrize("with_indices", [False, True])
def test_a_state_that_is_not_donated_stays(with_indices):
    x, state, weight, indices = arguments_of(with_indices)
    before = np.array(state)
    _, new = jax.jit(lambda x, state: step(x, state, weight, state_indices=indices))(x[0], state)
    assert (np.asarray(new) != before).any()
    np.testing.assert_array_equal(state, before)


@pytest.mark.parametrize("with_indices", [False, True])
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_loops_copy_no_state(loop, with_indices):
    x, state, weight, indices = arguments_of(with_indices)

    def advance(state, x_t):
        y, state = step(x_t, state, weight, state_indices=indices)
        return state, y

    def scanned(state, x):
        return jax.lax.scan(advance, state, x)

    def looped(state, x):
        def body(carry):
            i, state, total = carry
            state, y = advance(state, x[i])
            return i + 1, state, total + y

        start = (0, state, jnp.zeros(x.shape[1:]))
        return jax.lax.while_loop(lambda carry: carry[0] < len(x), body, start)[1:]

    function = {"scan": scanned, "while": looped}[loop]
    compiled = jax.jit(function, donate_argnums=0).lower(state, x).compile()
    assert "jaxops_lightweight_conv_step" in compiled.as_text()
    assert not copies_of(compiled, state)
    want = state
    for x_t in x:
        _, want = step(x_t, want, weight, state_indices=indices)
    np.testing.assert_array_equal(compiled(jnp.array(state), x)[0], want)
