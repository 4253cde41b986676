"""Segments and states of `lightweight_conv`, and `ragged_conv`.

The oracle lists which input or row of a state each tap of each step reads, in plain Python, and
shares nothing with the library.
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
from jaxops._core import native
from jaxops._families import sequences
from jaxops.testing.measure import assert_bitwise, assert_close, custom_calls, hasty_options, run
from jaxops.testing.spec import normal

LAYOUTS = ("NTC", "NCT")
ACTIVATIONS = {
    None: lambda z: z,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}


# --- the oracle ----------------------------------------------------------------------------------


def resolve(padding, reach):
    return {"causal": reach, "same": reach // 2}.get(padding, padding)


def sequences_of(ids, time):
    """(begin, end, whether the state is its) of the segments of a row."""
    edges = [t for t in range(1, time) if ids is not None and ids[t] != ids[t - 1]]
    edges = [0, *edges, time]
    return [(b, e, b == 0) for b, e in itertools.pairwise(edges)]


def reads(sequences, taps, dilation, padding):
    """(step, tap, step that is read) of all taps; steps before 0 are those of a state."""
    for begin, end, has_state in sequences:
        for t in range(begin, end):
            for k in range(taps):
                s = t + k * dilation - padding
                if begin <= s < end or (has_state and s < begin):
                    yield t, k, s


def sums(x, weight, state, ids, dilation, padding):
    """The sums of x (B, T, C) before bias and activation, in float64."""
    per_channel = np.repeat(weight, x.shape[2] // weight.shape[0], axis=0)
    z = np.zeros(x.shape)
    for n in range(x.shape[0]):
        sequences = sequences_of(None if ids is None else ids[n], x.shape[1])
        for t, k, s in reads(sequences, weight.shape[1], dilation, padding):
            if s >= 0:
                z[n, t] += per_channel[:, k] * x[n, s]
            elif state is not None:
                z[n, t] += per_channel[:, k] * state[n, padding + s]
    return z


def sums_vjp(g, x, weight, state, ids, dilation, padding):
    """The cotangents of x, weight, bias and state."""
    heads, taps = weight.shape
    depth = x.shape[2] // heads
    per_channel = np.repeat(weight, depth, axis=0)
    dx, by_channel = np.zeros(x.shape), np.zeros((x.shape[2], taps))
    dstate = None if state is None else np.zeros(state.shape)
    for n in range(x.shape[0]):
        sequences = sequences_of(None if ids is None else ids[n], x.shape[1])
        for t, k, s in reads(sequences, taps, dilation, padding):
            if s >= 0:
                dx[n, s] += per_channel[:, k] * g[n, t]
                by_channel[:, k] += g[n, t] * x[n, s]
            elif state is not None:
                dstate[n, padding + s] += per_channel[:, k] * g[n, t]
                by_channel[:, k] += g[n, t] * state[n, padding + s]
    return dx, by_channel.reshape(heads, depth, taps).sum(1), g.sum((0, 1)), dstate


def last_inputs(x, state, ids, padding):
    """The final state."""
    final = np.zeros((x.shape[0], padding, x.shape[2]))
    for n in range(x.shape[0]):
        begin, end, has_state = sequences_of(None if ids is None else ids[n], x.shape[1])[-1]
        for row in range(padding):
            s = end - padding + row
            if s >= begin:
                final[n, row] = x[n, s]
            elif has_state and state is not None:
                final[n, row] = state[n, padding + s]
    return final


def swapped(array, data_format):
    return array if array is None or data_format == "NTC" else array.swapaxes(-1, -2)


def check(
    platform,
    *,
    shape,
    heads,
    taps,
    dilation=1,
    padding="causal",
    ids=None,
    with_state=False,
    with_bias=False,
    activation=None,
    data_format="NTC",
    dtype="float32",
    weight_dtype=None,
    state_dtype=None,
):
    """Value, final state and gradients against the oracle; `shape` is (B, T, C)."""
    rng = np.random.default_rng(sum(shape) + 5 * taps + dilation)
    batch, time, channels = shape
    reach = (taps - 1) * dilation
    steps = resolve(padding, reach)
    x, g = (normal(rng, shape, jnp.dtype(dtype)) for _ in range(2))
    weight = normal(rng, (heads, taps), jnp.dtype(weight_dtype or dtype))
    bias = normal(rng, (channels,), jnp.dtype(dtype)) if with_bias else None
    state = None
    if with_state:
        state = normal(rng, (batch, steps, channels), jnp.dtype(state_dtype or dtype))
    given_ids = None if ids is None else np.asarray(ids)
    present = [a for a in (bias, swapped(state, data_format)) if a is not None]

    def function(x, weight, *rest):
        rest = list(rest)
        return jaxops.lightweight_conv(
            x,
            weight,
            bias=rest.pop(0) if with_bias else None,
            initial_state=rest.pop(0) if with_state else None,
            segment_ids=given_ids,
            padding=padding,
            dilation=dilation,
            activation=activation,
            data_format=data_format,
            return_final_state=True,
        )

    def value_and_vjp(g, *arguments):
        def alone(*arguments):
            return function(*arguments)[0]

        return function(*arguments), jax.vjp(alone, *arguments)[1](g)

    y, final, *grads = run(
        value_and_vjp,
        platform,
        swapped(g, data_format),
        swapped(x, data_format),
        weight,
        *present,
        options=hasty_options(platform) if dtype == "float64" else None,
    )
    wide = [None if a is None else np.asarray(a, np.float64) for a in (x, weight, state, bias, g)]
    x64, w64, s64, b64, g64 = wide
    z = sums(x64, w64, s64, ids, dilation, steps) + (0 if bias is None else b64)
    want, pull = jax.vjp(ACTIVATIONS[activation], z)
    dx, dweight, dbias, dstate = sums_vjp(
        np.asarray(pull(g64)[0]), x64, w64, s64, ids, dilation, steps
    )
    what = f"{shape}, H = {heads}, K = {taps}, {dilation}, {padding}, {data_format}, {dtype}, {ids}"
    coarse = {"dtype": dtype, "terms": taps + 1}
    assert_close([y], [swapped(np.asarray(want), data_format)], f"value of {what}", **coarse)
    assert final.dtype == (x if state is None else state).dtype
    states = swapped(last_inputs(x64, s64, ids, steps), data_format)
    least = max((dtype, final.dtype.name), key=lambda d: jnp.finfo(d).eps)
    assert_close([final], [states], f"final state of {what}", dtype=least, terms=0)
    wanted = [swapped(dx, data_format), dweight]
    wanted += [dbias] if with_bias else []
    wanted += [swapped(dstate, data_format)] if with_state else []
    # Of a weight that a state meets, two rounded gradients are added.
    roundings = (2 if with_state else 0) + (4 if activation else 0)
    terms = 8 * (batch * time * (channels // heads) + taps + 1)
    for i, (a, b) in enumerate(zip(grads, wanted, strict=True)):
        least = max((dtype, a.dtype.name), key=lambda d: jnp.finfo(d).eps)
        name = f"gradient {i} of {what}"
        assert_close([a], [b], name, dtype=least, terms=terms, roundings=roundings)


def segment_ids(draw, batch, time):
    """Rows of ids with runs of many lengths; ids may return after others."""
    rows = []
    for _ in range(batch):
        row: list[int] = []
        while len(row) < time:
            row += [draw(st.integers(0, 2))] * draw(st.sampled_from([1, 1, 2, 3, 7, 20]))
        rows.append(row[:time])
    return np.asarray(rows, draw(st.sampled_from(["int8", "uint16", "int32"]))).reshape(batch, time)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=30)
@hypothesis.given(data=st.data())
def test_any_call(platform, data):
    draw = data.draw
    heads, depth = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    taps, dilation = draw(st.integers(1, 7)), draw(st.sampled_from([1, 1, 2, 5]))
    batch, time = draw(st.integers(1, 2)), draw(st.integers(0, 24))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"]))
    check(
        platform,
        shape=(batch, time, heads * depth),
        heads=heads,
        taps=taps,
        dilation=dilation,
        padding=draw(st.sampled_from(["causal", "same", 0, (taps - 1) * dilation // 3])),
        ids=segment_ids(draw, batch, time) if draw(st.booleans()) else None,
        with_state=draw(st.booleans()),
        with_bias=draw(st.booleans()),
        activation=draw(st.sampled_from(list(ACTIVATIONS))),
        data_format=draw(st.sampled_from(LAYOUTS)),
        dtype=dtype,
        weight_dtype=draw(st.sampled_from([dtype, "float32"])),
        state_dtype=draw(st.sampled_from([dtype, "float32"])),
    )


def packed(time, length):
    return (np.arange(time) // length % 3)[None].astype(np.int32)


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize(
    ("time", "length", "taps", "dilation", "padding"),
    [
        (1100, 1, 4, 1, "causal"),
        (1100, 16, 4, 1, "causal"),
        (2100, 300, 4, 3, "causal"),
        (300, 7, 31, 1, "same"),
        (600, 100, 3, 150, "same"),  # taps further apart than a block is long
        (900, 333, 3, 389, "causal"),  # taps in groups
    ],
)
def test_blocks(platform, time, length, taps, dilation, padding, data_format):
    check(
        platform,
        shape=(1, time, 19),
        heads=1,
        taps=taps,
        dilation=dilation,
        padding=padding,
        ids=packed(time, length),
        with_state=True,
        data_format=data_format,
    )


# No tap reads a step itself: the rows that its taps read begin later, or end earlier.
@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(
    ("time", "begins", "taps", "dilation", "padding"),
    [
        (10, (2,), 4, 3, 4),
        (10, (9,), 4, 3, 4),
        (2, (1,), 5, 5, 19),
        (1, (), 3, 2, 3),
        (3, (2,), 5, 4, 15),
    ],
)
def test_paddings_between_taps(
    platform, time, begins, taps, dilation, padding, with_state, data_format
):
    ids = np.zeros((3, time), np.int32)
    for begin in begins:
        ids[1:, begin:] = 1
    check(
        platform,
        shape=(3, time, 12),
        heads=4,
        taps=taps,
        dilation=dilation,
        padding=padding,
        ids=ids,
        with_state=with_state,
        data_format=data_format,
    )


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("time", [0, 1, 2])
def test_fewer_steps_than_taps(platform, time, channels, data_format):
    for ids in (None, np.zeros((2, time), np.int32), np.arange(2 * time).reshape(2, time)):
        check(
            platform,
            shape=(2, time, channels),
            heads=1,
            taps=4,
            dilation=2,
            ids=ids,
            with_state=True,
            with_bias=True,
            data_format=data_format,
        )


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("padding", ["causal", "same", 0, "one less than causal"])
@pytest.mark.parametrize("dilation", [1, 4])
@pytest.mark.parametrize("taps", [5, 31])
@pytest.mark.parametrize("time", [1, 3, 8])
def test_taps_that_read_nothing(platform, time, taps, dilation, padding, data_format):
    reach = (taps - 1) * dilation
    ids = (np.arange(2 * time).reshape(2, time) // 3 % 2).astype(np.int32)
    for with_state, with_ids in itertools.product([False, True], repeat=2):
        check(
            platform,
            shape=(2, time, 6),
            heads=3,
            taps=taps,
            dilation=dilation,
            padding=reach - 1 if padding == "one less than causal" else padding,
            ids=ids if with_ids else None,
            with_state=with_state,
            with_bias=True,
            data_format=data_format,
            dtype="float64",
        )


# Kernels of GPUs have chunks of 2048 steps, and a launch more from 8193 steps on.
@pytest.mark.parametrize(
    ("time", "lengths", "dtype"),
    [
        (1, (1,), "int32"),
        (7, (3,), "int4"),
        (500, (1, 70), "uint8"),
        (2048, (2047,), "int64"),
        (2049, (2048,), "int16"),
        (8192, (1, 5000, 33), "int32"),
        (8193, (8192,), "int32"),
        (70_001, (40_000, 1, 2047, 2), "uint64"),
        (1_100_000, (1_000_000, 3, 700), "int32"),
    ],
)
def test_first_steps_of_segments(platform, time, lengths, dtype):
    ends = np.cumsum(np.resize(lengths, time // min(lengths) + 1))
    begins = np.append(0, ends[ends < time])
    numbers = np.searchsorted(begins, np.arange(time), side="right") - 1
    want = np.where(numbers == 0, -3, begins[numbers])
    # The first bytes of wide ids are equal, and other rows end elsewhere.
    ids = (numbers % 2 << (jnp.iinfo(dtype).bits - 2)).astype(dtype)
    rows = np.stack([ids, np.full_like(ids, 1), np.roll(ids, 1)])
    (got,) = run(lambda ids: sequences.segment_starts(ids, -3), platform, rows)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], -3)
    rolled = np.roll(ids, 1).astype(np.int64)
    changes = np.flatnonzero(np.diff(rolled)) + 1
    numbers = np.searchsorted(changes, np.arange(time), side="right")
    np.testing.assert_array_equal(got[2], np.append(-3, changes)[numbers])


def test_equal_ids_apart_are_two_segments(platform):
    x = np.ones((6, 1), np.float32)
    weight = np.ones((1, 3), np.float32)
    ids = np.asarray([0, 0, 1, 0, 0, 0])
    (y,) = run(lambda x, w: jaxops.lightweight_conv(x, w, segment_ids=ids), platform, x, weight)
    np.testing.assert_array_equal(y[:, 0], [1, 2, 1, 1, 2, 3])


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_crosses_a_boundary(platform, bad, data_format):
    rng = np.random.default_rng(3)
    x, g = (normal(rng, (1, 64, 20), np.dtype("float32")) for _ in range(2))
    weight = normal(rng, (1, 5), np.dtype("float32"))
    ids = np.repeat(np.arange(4), [20, 11, 30, 3])[None]
    poisoned = np.array(x), np.array(g)
    for array in poisoned:
        array[:, 20:31] = bad

    def function(g, x, weight):
        def of_x(x):
            return jaxops.lightweight_conv(
                x, weight, padding="same", segment_ids=ids, data_format=data_format
            )

        y, pull = jax.vjp(of_x, x)
        return y, *pull(g)

    clean = run(function, platform, *(swapped(a, data_format) for a in (g, x)), weight)
    dirty = run(function, platform, *(swapped(a, data_format) for a in poisoned[::-1]), weight)
    for a, b in zip(clean, dirty, strict=True):
        others = ids[0] != 1
        a, b = (swapped(r, data_format)[:, others] for r in (a, b))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (9, 3)])
@pytest.mark.parametrize("with_ids", [False, True])
def test_chunks_have_the_bits_of_the_whole(platform, taps, dilation, data_format, with_ids):
    rng = np.random.default_rng(taps)
    x = normal(rng, (2, 300, 24), np.dtype("float32"))
    weight = normal(rng, (8, taps), np.dtype("float32"))
    bias = normal(rng, (24,), np.dtype("float32"))
    ids = np.sort(rng.integers(0, 9, (2, 300)), axis=1) if with_ids else None
    axis = 1 if data_format == "NTC" else 2
    options = {
        "bias": bias,
        "dilation": dilation,
        "activation": "silu",
        "data_format": data_format,
        "return_final_state": True,
    }

    def whole(x, weight):
        return jaxops.lightweight_conv(x, weight, segment_ids=ids, **options)

    def by_chunks(x, weight):
        state, parts, begin = None, [], 0
        for steps in (1, 2, 97, 100, 100):
            part = jax.lax.slice_in_dim(x, begin, begin + steps, axis=axis)
            some = None if ids is None else ids[:, begin : begin + steps]
            if state is not None and ids is not None:
                # A state belongs to the first segment, so a row that starts one gets none.
                goes_on = (ids[:, begin - 1] == ids[:, begin])[:, None, None]
                state = jnp.where(goes_on, state, 0)
            y, state = jaxops.lightweight_conv(
                part, weight, segment_ids=some, initial_state=state, **options
            )
            parts.append(y)
            begin += steps
        return jnp.concatenate(parts, axis=axis), state

    arguments = swapped(x, data_format), weight
    # On GPUs XLA computes some of these faster than kernels, in orders of its own.
    functions = (jaxops.use_implementation("native")(f) for f in (by_chunks, whole))
    got, want = (run(function, platform, *arguments) for function in functions)
    if platform.name == "cuda" and taps > 8:  # kernels of many taps have orders of their own, too
        assert_close(got, [a.astype(np.float64) for a in want], "chunks", dtype="float32", terms=40)
    else:
        assert_bitwise(got, want, "chunks")


def as_products(sequences, time, taps, dilation, padding):
    """A 0/1 array (T, K, P + T): which of the steps of state and x each tap of each step reads."""
    table = np.zeros((time, taps, padding + time))
    for t, k, step in reads(sequences, taps, dilation, padding):
        table[t, k, padding + step] = 1
    return table


def assert_second_derivatives(function, definition, arguments):
    """Derivatives of gradients along a direction, forward over reverse and reverse over reverse."""
    rng = np.random.default_rng(5)
    along = [rng.normal(size=a.shape) for a in arguments]
    outputs = jax.eval_shape(function, *arguments)
    weights = [rng.normal(size=y.shape) for y in jax.tree.leaves(outputs)]

    def second(function):
        def loss(*arguments):
            results = jax.tree.leaves(function(*arguments))
            return sum(jnp.vdot(w, jnp.sin(y)) for w, y in zip(weights, results, strict=True))

        def slope(*arguments):
            grads = jax.grad(loss, range(len(arguments)))(*arguments)
            return sum(jnp.vdot(d, g) for d, g in zip(along, grads, strict=True))

        def both(*arguments):
            gradient = jax.grad(loss, tuple(range(len(arguments))))
            return jax.jvp(gradient, arguments, tuple(along)), jax.grad(
                slope, tuple(range(len(arguments)))
            )(*arguments)

        return jax.jit(both)(*arguments)

    got, want = (jax.tree.leaves(second(f)) for f in (function, definition))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_second_derivatives(data_format, activation):
    rng = np.random.default_rng(1)
    x, state = (rng.normal(size=s) for s in ((2, 7, 4), (2, 4, 4)))
    weight, bias = rng.normal(size=(2, 3)), rng.normal(size=4)
    ids = np.asarray([[0, 0, 0, 1, 1, 2, 2], [3, 4, 4, 4, 4, 4, 4]])
    tables = np.stack([as_products(sequences_of(row, 7), 7, 3, 2, 4) for row in ids])

    def function(x, weight, bias, state):
        return jaxops.lightweight_conv(
            x,
            weight,
            dilation=2,
            bias=bias,
            activation=activation,
            segment_ids=ids,
            initial_state=state,
            data_format=data_format,
        )

    def definition(x, weight, bias, state):
        x, state = swapped(x, data_format), swapped(state, data_format)
        rows = jnp.concatenate([state, x], axis=1)
        y = jnp.einsum("ntks,ck,nsc->ntc", tables, jnp.repeat(weight, 2, axis=0), rows) + bias
        return swapped(ACTIVATIONS[activation](y), data_format)

    arguments = swapped(x, data_format), weight, bias, swapped(state, data_format)
    assert_second_derivatives(function, definition, arguments)


@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 7, 6)])
def test_any_number_of_leading_dimensions(platform, shape):
    rng = np.random.default_rng(2)
    x = normal(rng, shape, np.dtype("float32"))
    weight = normal(rng, (2, 3), np.dtype("float32"))
    state = normal(rng, (*shape[:-2], 2, 6), np.dtype("float32"))
    ids = np.sort(rng.integers(0, 3, shape[:-1]))

    def function(x, weight, state, ids):
        return jaxops.lightweight_conv(
            x, weight, segment_ids=ids, initial_state=state, return_final_state=True
        )

    got = run(function, platform, x, weight, state, ids)
    flat = run(
        function,
        platform,
        x.reshape(-1, 7, 6),
        weight,
        state.reshape(-1, 2, 6),
        ids.reshape(-1, 7),
    )
    assert [a.shape for a in got] == [shape, (*shape[:-2], 2, 6)]
    assert_bitwise([a.reshape(b.shape) for a, b in zip(got, flat, strict=True)], flat, "batches")


@pytest.mark.parametrize("mapped", list(itertools.product([0, None], repeat=3))[:-1])
def test_vmap_is_one_launch(platform, mapped):
    rng = np.random.default_rng(4)
    x, state = (normal(rng, (3, 2, n, 6), np.dtype("float32")) for n in (9, 2))
    ids = np.sort(rng.integers(0, 3, (3, 2, 9)))
    weight = normal(rng, (6, 3), np.dtype("float32"))
    arguments = [a if m == 0 else a[0] for a, m in zip((x, ids, state), mapped, strict=True)]

    def function(x, ids, state):
        def of(x, weight, state):
            return jaxops.lightweight_conv(x, weight, segment_ids=ids, initial_state=state)

        y, pull = jax.vjp(of, x, weight, state)
        return y, *pull(y)

    def one_by_one(*arguments):
        parts = [
            function(*(a if m is None else a[i] for a, m in zip(arguments, mapped, strict=True)))
            for i in range(3)
        ]
        return jax.tree.map(lambda *p: jnp.stack(p), *parts)

    batched = jax.vmap(function, mapped)
    if platform.name == "cpu":
        assert sum(custom_calls(jax.jit(batched).lower(*arguments).compile()).values()) <= 4
    want = run(one_by_one, platform, *arguments)
    for got, expected in zip(run(batched, platform, *arguments), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


# --- ragged batches ------------------------------------------------------------------------------


def one_by_one(x, weight, starts, states, **options):
    """The sequences of a ragged batch that have tokens, one call each."""
    parts, finals = [x[:0]], []
    reach = (weight.shape[1] - 1) * options.get("dilation", 1)
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        state = None if states is None else states[i]
        if begin == end:
            finals.append(jnp.zeros((reach, x.shape[1]), x.dtype) if state is None else state)
            continue
        y, final = jaxops.lightweight_conv(
            x[begin:end], weight, initial_state=state, return_final_state=True, **options
        )
        parts.append(y)
        finals.append(final)
    return jnp.concatenate(parts), jnp.stack(finals)


@pytest.mark.parametrize(
    "lengths", [(5, 0, 1, 1, 2, 30, 0), (0, 0), (1, 1, 1), (64, 3, 200)], ids=str
)
@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (3, 3), (1, 1)])
@pytest.mark.parametrize("with_states", [False, True])
def test_ragged(platform, lengths, taps, dilation, with_states):
    rng = np.random.default_rng(len(lengths))
    starts = np.cumsum([0, *lengths])
    x = normal(rng, (starts[-1], 10), np.dtype("float32"))
    weight = normal(rng, (5, taps), np.dtype("float32"))
    bias = normal(rng, (10,), np.dtype("float32"))
    reach = (taps - 1) * dilation
    states = normal(rng, (len(lengths), reach, 10), np.dtype("float32"))
    options = {"bias": bias, "dilation": dilation, "activation": "silu"}

    def ragged(starts, x, weight, states):
        return jaxops.ragged_conv(
            x,
            weight,
            starts,
            initial_state=states if with_states else None,
            return_final_state=True,
            **options,
        )

    def apart(x, weight, states):
        return one_by_one(x, weight, starts, states if with_states else None, **options)

    want = run(apart, platform, x, weight, states)
    # The starts are traced.
    assert_bitwise(run(ragged, platform, starts, x, weight, states), want, f"{lengths}")

    def gradients(function, x, weight, states):
        (y, final), pull = jax.vjp(function, x, weight, states)
        return pull((y, final))

    of_ragged = functools.partial(gradients, functools.partial(ragged, starts))
    got = run(of_ragged, platform, x, weight, states)
    want = run(functools.partial(gradients, apart), platform, x, weight, states)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("starts", [[5, 8], [6, 2, 9, -3], [10**6, 2 * 10**6], [-7, 3], [8, 8]])
def test_any_starts_are_within_arrays(starts):
    """Kernels read rows of a state at the distance from a token's start."""
    first, _ = sequences.ragged_starts(jnp.array(starts), 8)
    assert (first >= 0).all()
    assert (first <= np.arange(8)).all()


def ragged_with_cache(x, weight, cache, starts, indices):
    """`ragged_conv`, and the cache with the states of the sequences moved on."""
    return jaxops.ragged_conv(
        x, weight, starts, initial_state=cache, state_indices=indices, return_final_state=True
    )


@pytest.mark.parametrize("index", [2**32 + 1, 1 - 2**32, 2**31])
def test_wide_indices_of_ragged_calls_are_no_slots(index):
    rng = np.random.default_rng(7)
    x, weight, cache = (normal(rng, s, np.dtype("float32")) for s in ((6, 8), (2, 3), (4, 2, 8)))
    convolve = functools.partial(ragged_with_cache, x, weight, cache, np.array([0, 3, 6]))
    want = convolve(np.array([-1, 2]))
    np.testing.assert_array_equal(want[1][1], cache[1])
    assert not np.array_equal(want[1][2], cache[2])
    wide = np.array([index, 2], np.int64)
    for got in (convolve(wide), jax.jit(convolve)(jnp.array(wide))):
        assert_bitwise(got, want, f"index {index}")


def test_the_number_of_sequences_may_be_symbolic():
    tokens, sequences = jax.export.symbolic_shape("n, s")
    arguments = (
        jax.ShapeDtypeStruct((tokens, 8), np.float32),
        jax.ShapeDtypeStruct((sequences + 1,), np.int32),
    )
    function = functools.partial(jaxops.ragged_conv, weight=np.ones((2, 3), np.float32))
    convolve = jax.jit(lambda x, starts: function(x, starts=starts))
    exported = jax.export.export(convolve, disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS)(
        *arguments
    )
    x = np.arange(56, dtype=np.float32).reshape(7, 8)
    for starts in ([0, 7], [0, 3, 3, 7]):
        starts = np.int32(starts)
        np.testing.assert_array_equal(exported.call(x, starts), convolve(x, starts))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", ["lightweight_conv", "dynamic_conv"])
def test_wide_segment_ids_keep_segments_apart(name, x64):
    function = getattr(jaxops, name)
    ids = np.array([[0, 0, 2**32, 2**32, 1, 1]])
    x = np.ones((1, 6, 8), np.float32)
    weight = np.ones((2, 3) if name == "lightweight_conv" else (1, 6, 2, 3), np.float32)
    with jax.enable_x64(x64):
        got = function(x, weight, segment_ids=ids)
        want = function(x, weight, segment_ids=np.int32(ids % 7))
    np.testing.assert_array_equal(got, want)


def test_ragged_cache(platform):
    rng = np.random.default_rng(6)
    starts = np.asarray([0, 4, 5, 5, 12])
    x = normal(rng, (12, 6), np.dtype("float32"))
    weight = normal(rng, (6, 4), np.dtype("float32"))
    cache = normal(rng, (7, 3, 6), np.dtype("bfloat16"))
    indices = np.asarray([5, -1, 2, 99])
    ragged = functools.partial(ragged_with_cache, starts=starts, indices=indices)
    y, updated = run(ragged, platform, x, weight, cache)
    states = np.zeros((4, 3, 6), cache.dtype)
    states[0], states[2] = cache[5], cache[2]
    apart, finals = run(lambda *a: one_by_one(*a[:2], starts, a[2]), platform, x, weight, states)
    assert_bitwise([y], [apart], "values")
    expected = np.array(cache)
    expected[5], expected[2] = finals[0], finals[2]
    assert_bitwise([updated], [expected], "cache")
    # A sequence without tokens keeps its state.
    np.testing.assert_array_equal(updated[2], cache[2])


def test_ragged_second_derivatives():
    rng = np.random.default_rng(8)
    starts, indices = np.asarray([0, 3, 3, 4, 9]), np.asarray([3, 0, -1, 4])
    x, cache = rng.normal(size=(9, 4)), rng.normal(size=(5, 2, 4))
    weight = rng.normal(size=(2, 3))

    function = functools.partial(ragged_with_cache, starts=starts, indices=jnp.asarray(indices))

    def definition(x, weight, cache):
        parts = []
        for begin, end, index in zip(starts[:-1], starts[1:], indices, strict=True):
            state = cache[index] if index >= 0 else jnp.zeros((2, 4))
            rows = jnp.concatenate([state, x[begin:end]])
            table = as_products([(0, end - begin, True)], end - begin, 3, 1, 2)
            weights = jnp.repeat(weight, 2, axis=0)
            parts.append(jnp.einsum("tks,ck,sc->tc", table, weights, rows))
            cache = cache.at[index].set(rows[-2:]) if index >= 0 else cache
        return jnp.concatenate(parts), cache

    assert_second_derivatives(function, definition, (x, weight, cache))


def test_ragged_batches(platform):
    rng = np.random.default_rng(9)
    x = normal(rng, (3, 12, 6), np.dtype("float32"))
    states = normal(rng, (3, 2, 3, 6), np.dtype("float32"))
    weight = normal(rng, (6, 4), np.dtype("float32"))
    starts = np.asarray([[0, 4, 12], [0, 12, 12], [0, 0, 12]])

    def function(x, starts, states):
        return jaxops.ragged_conv(x, weight, starts, initial_state=states, return_final_state=True)

    def apart(x, starts, states):
        parts = [function(*(a[i] for a in (x, starts, states))) for i in range(3)]
        return jax.tree.map(lambda *p: jnp.stack(p), *parts)

    batched = jax.vmap(function)
    if platform.name == "cpu":
        program = jax.jit(batched).lower(x, starts, states).compile()
        assert custom_calls(program) == {"jaxops_lightweight_conv": 1}
    want = run(apart, platform, x, starts, states)
    assert_bitwise(run(batched, platform, x, starts, states), want, "vmap")


# --- the choice on GPUs --------------------------------------------------------------------------

BOTH, NONE = ("value", "gradients"), ()


@pytest.mark.parametrize(
    ("data_format", "shape", "filters", "has_ids", "has_state", "dtype", "chosen"),
    [
        ("NTC", (2, 64, 32), (32, 4), True, False, "float32", BOTH),
        ("NTC", (2, 64, 32), (2, 31), True, False, "float32", BOTH),
        ("NTC", (2, 64, 32), (2, 31), True, True, "float32", BOTH),
        ("NTC", (2, 64, 32), (32, 31), True, False, "float32", BOTH),
        ("NCT", (2, 32, 64), (2, 31), True, False, "float32", BOTH),
        ("NCT", (2, 32, 256), (32, 31), False, True, "float32", BOTH),
        ("NCT", (2, 32, 63), (32, 4), False, True, "float32", BOTH),
        ("NCT", (2, 32, 64), (32, 4), True, False, "bfloat16", BOTH),
        ("NCT", (2, 32, 64), (32, 4), True, True, "float32", BOTH),
        ("NCT", (2, 32, 64), (32, 4), True, False, "float32", BOTH),
        # XLA's program is faster.
        ("NCT", (2, 32, 63), (32, 4), True, False, "float32", NONE),
        ("NCT", (2, 32, 64), (32, 4), True, False, "float64", NONE),
        ("NCT", (2, 32, 63), (2, 31), True, False, "float32", NONE),
        ("NTC", (2, 64, 32), (32, 31), True, True, "float32", ("gradients",)),
        ("NCT", (2, 32, 64), (32, 31), False, True, "float32", ("gradients",)),
    ],
)
def test_gpus_run_what_is_fast(
    data_format, shape, filters, has_ids, has_state, dtype, chosen, monkeypatch
):
    monkeypatch.delenv(native.NEW_KERNELS_VARIABLE, raising=False)
    time, channels = shape[1:] if data_format == "NTC" else shape[:0:-1]
    before = filters[1] - 1
    state = (shape[0], *((before, channels) if data_format == "NTC" else (channels, before)))
    x, weight, initial = (jnp.ones(s, dtype) for s in (shape, filters, state))

    def function(x, weight):
        return jaxops.lightweight_conv(
            x,
            weight,
            segment_ids=jnp.zeros((shape[0], time), jnp.int32) if has_ids else None,
            initial_state=initial if has_state else None,
            data_format=data_format,
        )

    assert kernels_on_a_gpu(function, x, weight) == set(chosen)


def kernels_on_a_gpu(function, x, weight):
    """What kernels compute of function(x, weight): the value, the gradients, both or neither."""

    def text(function, *arguments):
        checks = jaxops.DISABLE_JAX_EXPORT_CHECKS
        export = jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=checks)
        return export(*arguments).mlir_module()

    found = set()
    if "@jaxops_lightweight_conv(" in text(function, x, weight):
        found.add("value")
    of_both = text(lambda x, w, g: jax.vjp(function, x, w)[1](g), x, weight, x)
    if "@jaxops_lightweight_conv_backward(" in of_both:
        found.add("gradients")
    return found


@pytest.mark.parametrize(
    ("shape", "taps", "dtype", "chosen"),
    [
        ((8, 1024, 2048), 4, "bfloat16", NONE),
        ((8, 1024, 2048), 7, "bfloat16", ("value",)),
        ((8, 1024, 2048), 15, "bfloat16", BOTH),
        ((8, 1024, 2048), 4, "float32", BOTH),
        ((128, 1024, 64), 7, "bfloat16", NONE),
        ((128, 1024, 64), 7, "float32", ("gradients",)),
        ((128, 1024, 64), 7, "float64", BOTH),
        ((2, 1024, 2048), 4, "bfloat16", BOTH),
    ],
)
def test_gpus_run_what_is_fast_of_dilated_filters(shape, taps, dtype, chosen, monkeypatch):
    monkeypatch.delenv(native.NEW_KERNELS_VARIABLE, raising=False)
    x, weight = (jax.ShapeDtypeStruct(s, dtype) for s in (shape, (16, taps)))
    function = functools.partial(jaxops.lightweight_conv, data_format="NCT", dilation=2)
    assert kernels_on_a_gpu(function, x, weight) == set(chosen)
