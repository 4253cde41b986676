"""Sequences whose time is sharded: neighbours exchange steps, and nobody gathers them."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._families import sequences
from jaxops.testing.measure import collectives, hasty_options

PARTS = 8  # at most
BATCH, HEADS, CHANNELS = 2, 3, 6
GATHERS = {"all-gather", "all-to-all"}


@pytest.fixture(autouse=True)
def enough_devices(platform):
    if len(platform.devices) < 2:
        pytest.skip("needs two devices")
    with jax.default_device(None):
        yield


def mesh_of(platform, kind=AxisType.Auto):
    count = min(PARTS, 2 ** (len(platform.devices).bit_length() - 1))
    devices = platform.devices[:count]
    return jax.make_mesh((len(devices),), ("t",), (kind,), devices=devices)


class Case:
    """A call of an operator over time and its arguments, in float32, and where they lie."""

    operator = staticmethod(jaxops.lightweight_conv)

    def __init__(
        self, layout, time, taps, padding, dilation, *, segments=False, state=False, **more
    ):
        self.options = dict(padding=padding, dilation=dilation, data_format=layout, **more)
        self.has_segments, self.has_state = segments, state
        rng = np.random.default_rng(time * taps)
        reach = (taps - 1) * dilation
        count = {"causal": reach, "same": reach // 2}.get(padding, padding)

        def rows(steps):
            x = rng.standard_normal((BATCH, steps, CHANNELS)).astype(np.float32)
            return x if layout == "NTC" else x.swapaxes(1, 2)

        self.g = rows(time)
        self.ids = np.cumsum(rng.random((BATCH, time)) < 0.15, axis=1, dtype=np.int32)
        self.arguments = [
            rows(time),
            self.weight(rng, time, taps),
            rng.standard_normal(CHANNELS).astype(np.float32),
            *([rows(count)] if state else []),
        ]
        self.spec = P(None, "t", None) if layout == "NTC" else P(None, None, "t")
        self.weight_spec = P()

    def weight(self, rng, time, taps):
        del time
        return rng.standard_normal((HEADS, taps)).astype(np.float32)

    def __call__(self, ids, x, weight, bias, state=None):
        segment_ids = ids if self.has_segments else None
        return self.operator(
            x, weight, bias=bias, segment_ids=segment_ids, initial_state=state, **self.options
        )

    def value_and_gradients(self, g, ids, *arguments):
        y, pull = jax.vjp(functools.partial(self, ids), *arguments)
        return y, pull(g)

    def placed(self, mesh):
        """The cotangent, the ids and the arguments."""

        def put(array, spec):
            return jax.device_put(array, NamedSharding(mesh, spec))

        specs = [self.spec, self.weight_spec, P(), P()]
        arguments = map(put, self.arguments, specs[: len(self.arguments)])
        return [put(self.g, self.spec), put(self.ids, P(None, "t")), *arguments]

    def value(self, platform):
        """The value of one device."""
        with jax.default_device(platform.devices[0]):
            compiled = jax.jit(self, compiler_options=hasty_options(platform))
            return compiled(self.ids, *self.arguments)

    def whole(self, platform):
        """The value and gradients of one device."""
        with jax.default_device(platform.devices[0]):
            options = hasty_options(platform)
            compiled = jax.jit(self.value_and_gradients, compiler_options=options)
            return compiled(self.g, self.ids, *self.arguments)


class DynamicCase(Case):
    """A call of `dynamic_conv`, whose filters lie where their steps do."""

    operator = staticmethod(jaxops.dynamic_conv)

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.weight_spec = P(None, "t", None, None)

    def weight(self, rng, time, taps):
        return rng.standard_normal((BATCH, time, HEADS, taps)).astype(np.float32)


def check(case, platform, mesh):
    """Results as those of one device, and the collectives of value, and of value and gradients."""
    g, *others = case.placed(mesh)
    with jax.set_mesh(mesh):
        options = hasty_options(platform)
        value = jax.jit(case).lower(*others).compile(options)
        both = jax.jit(case.value_and_gradients).lower(g, *others).compile(options)
    y, (same, gradients) = value(*others), both(g, *others)
    want_y, (want_same, want) = case.value(platform), case.whole(platform)
    for rows in (y, same, gradients[0]):
        assert rows.sharding.is_equivalent_to(others[1].sharding, y.ndim)
    assert gradients[1].sharding.is_equivalent_to(others[2].sharding, others[2].ndim)

    def compare(got, want, exact):
        if exact and platform.name == "cpu":
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    compare(y, want_y, True)
    # XLA's activations and their derivatives are rounded as they are fused.
    exact = case.options.get("activation") is None
    compare(same, want_same, exact)
    sums_over_time = (2,) if isinstance(case, DynamicCase) else (1, 2)
    for i, (a, b) in enumerate(zip(gradients, want, strict=True)):
        compare(a, b, exact and i not in sums_over_time)
    return collectives(value), collectives(both)


@pytest.mark.parametrize(
    ("segments", "state", "kind"),
    [
        (False, False, AxisType.Auto),
        (False, True, AxisType.Auto),
        (True, False, AxisType.Auto),
        (True, True, AxisType.Auto),
        (True, True, AxisType.Explicit),
    ],
)
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (Case, "NTC"),
        (Case, "NCT"),
        (functools.partial(DynamicCase, normalize=True), "NTC"),
        (DynamicCase, "NCT"),
    ],
    ids=["NTC", "NCT", "dynamic NTC softmax", "dynamic NCT"],
)
def test_causal_calls_send_steps_once(segments, state, kind, make, layout, platform):
    case = make(layout, 64, 4, "causal", 1, segments=segments, state=state)
    value, both = check(case, platform, mesh_of(platform, kind))
    assert set(value) == {"collective-permute"} | ({"all-reduce"} if segments else set())
    assert not GATHERS & set(both)
    # Ids send one step as well, and where segments begin is one number a device. Gradients need x
    # again, and the cotangent with its filters and where the segments of its steps begin.
    permutes = value["collective-permute"], both["collective-permute"]
    if platform.name == "cpu":
        assert permutes == (1 + segments, 3 + segments)
        assert value.get("all-reduce", 0) == segments
    else:  # XLA merges some of them
        assert permutes[0] <= 1 + segments
        assert permutes[1] <= 3 + segments
        assert value.get("all-reduce", 0) <= segments


@pytest.mark.parametrize(
    "case",
    [
        # The second number is that of the parts that a device needs steps of, if there are 8.
        (Case("NTC", 64, 5, "same", 2, segments=True, state=True), 2),
        (Case("NCT", 64, 5, 0, 1, segments=True), 1),
        (Case("NCT", 16, 5, "causal", 1, segments=True, state=True, activation="silu"), 2),
        (Case("NTC", 8, 4, "same", 2, segments=True), 3 + 3),
        # The last tap would read the 8th step after its own, which no sequence of 8 steps has.
        (Case("NCT", 8, 6, 7, 3, state=True), 7 + 5),
        (Case("NTC", 16, 5, "causal", 7), 7),
        (Case("NTC", 16, 5, "causal", 40), 0),
        (DynamicCase("NCT", 64, 5, "same", 2, segments=True, state=True, activation="silu"), 2),
        (DynamicCase("NTC", 8, 4, "same", 2, segments=True, normalize=True), 3 + 3),
    ],
    ids=[
        "both sides",
        "ahead",
        "two parts",
        "parts of one step",
        "all",
        "all, and taps beyond",
        "beyond all",
        "dynamic, both sides",
        "dynamic, parts of one step",
    ],
)
def test_steps_come_from_as_many_parts_as_have_them(case, platform):
    case, count = case
    mesh = mesh_of(platform)
    value, both = check(case, platform, mesh)
    if platform.name == "cpu":  # which has 8; XLA for GPUs merges some
        # Where segments begin is sent with the steps, and ids before that.
        assert value.get("collective-permute", 0) == count + case.has_segments
    assert not GATHERS & {*value, *both}


@pytest.mark.parametrize(
    ("make", "padding"), [(Case, "causal"), (Case, "same"), (DynamicCase, "same")]
)
def test_a_nan_reaches_what_it_reaches_on_one_device(make, padding, platform):
    """In x and in the cotangent, at both ends of a part, within segments and not beyond."""
    case = make("NTC", 64, 4, padding, 1, segments=True)
    mesh = mesh_of(platform)
    program = None
    for of_g in (False, True):
        for step in (23, 24, 39, 40):
            g, x = case.g.copy(), case.arguments[0].copy()
            (g if of_g else x)[:, step, :2] = np.nan
            spoiled = type(case).__new__(type(case))
            spoiled.__dict__.update(case.__dict__, g=g, arguments=[x, *case.arguments[1:]])
            placed = spoiled.placed(mesh)
            if program is None:
                lowered = jax.jit(case.value_and_gradients).lower(*placed)
                program = lowered.compile(hasty_options(platform))
            got, want = program(*placed), spoiled.whole(platform)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


@pytest.mark.parametrize("order", [("s", "t"), ("t", "s")])
def test_two_axes_of_a_mesh(order, platform):
    """The parts lie in the order of the axes in the spec, the batch may be sharded next to them."""
    case = Case("NTC", 32, 4, "causal", 2, segments=True)
    if len(platform.devices) < 4:
        pytest.skip("needs four devices")
    shape = (min(2, len(platform.devices) // 4), 2, 2)
    devices = platform.devices[: math.prod(shape)]
    mesh = jax.make_mesh(shape, ("n", "s", "t"), (AxisType.Auto,) * 3, devices=devices)
    places = [NamedSharding(mesh, P("n", order, *more)) for more in ((None,), (), (None,), ())]
    whole = NamedSharding(mesh, P())
    arrays = [case.g, case.ids, *case.arguments]
    placed = [
        jax.device_put(a, s) for a, s in zip(arrays, [*places[:3], whole, whole], strict=True)
    ]
    lowered = jax.jit(case.value_and_gradients).lower(*placed)
    program = lowered.compile(hasty_options(platform))
    assert not GATHERS & set(collectives(program))
    got, want = program(*placed), case.whole(platform)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_parts_are_neither_copied_nor_kept(platform):
    """A device's memory holds its part of x and of the result, and a few steps more."""
    if platform.name != "cpu":
        pytest.skip("counts the bytes of the program for CPUs")
    case = Case("NTC", 64, 4, "causal", 1)
    mesh = mesh_of(platform)
    shape = (1, PARTS * 4096, CHANNELS)
    x = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, case.spec))
    _, weight, bias = case.arguments
    compiled = jax.jit(case).lower(case.ids, x, weight, bias).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < np.prod(shape) * 4 / PARTS / 4


@pytest.mark.parametrize("make", [Case, functools.partial(DynamicCase, normalize=True)])
def test_vmap_and_second_derivatives(make, platform):
    case = make("NTC", 32, 4, "same", 1, segments=True, state=True)
    mesh = mesh_of(platform)
    g, ids, x, weight, bias, state = case.placed(mesh)
    weights = np.stack([weight, -2 * np.asarray(weight)])
    weights = jax.device_put(weights, NamedSharding(mesh, P(None, *case.weight_spec)))

    def second(g, ids, x, weights, bias, state):
        call = jax.vmap(lambda w, x, s: jnp.sin(case(ids, x, w, bias, s)) * g, (0, None, None))

        def first(*moving):
            return jax.grad(lambda w, x, s: call(w, x, s).sum(), (0, 1, 2))(*moving)

        moving = (weights, x, state)
        return jax.jvp(first, moving, moving)

    options = hasty_options(platform)
    program = jax.jit(second).lower(g, ids, x, weights, bias, state).compile(options)
    assert not GATHERS & set(collectives(program))
    got = program(g, ids, x, weights, bias, state)
    whole = [*map(np.asarray, (g, ids, x, weights, bias, state))]
    with jax.default_device(platform.devices[0]):
        want = jax.jit(second, compiler_options=options)(*whole)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("time", [64, 8])
def test_final_states(time, kind, platform):
    """Also where one part has fewer steps than a state, and they have gradients."""
    case = Case("NTC", time, 4, "causal", 3, segments=True, state=True, return_final_state=True)
    mesh = mesh_of(platform, kind)
    _, ids, *arguments = case.placed(mesh)

    def value_and_gradients(ids, *arguments):
        results, pull = jax.vjp(functools.partial(case, ids), *arguments)
        return results, pull(results)

    with jax.set_mesh(mesh):
        options = hasty_options(platform)
        program = jax.jit(value_and_gradients).lower(ids, *arguments).compile(options)
    assert not GATHERS & set(collectives(program))
    got = program(ids, *arguments)
    with jax.default_device(platform.devices[0]):
        compiled = jax.jit(value_and_gradients, compiler_options=options)
        want = compiled(case.ids, *case.arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_lengths_that_do_not_divide_are_right(platform):
    """Inside a program a sequence may be sharded that has no equal parts."""
    case = Case("NTC", 60, 4, "causal", 1, segments=True)
    x, *shared = case.arguments
    place = NamedSharding(mesh_of(platform), P(None, "t"))

    def call(ids, x, *shared):
        longer = lax.with_sharding_constraint(x, place)
        return case(ids, longer[:, :60], *shared)

    longer = np.pad(x, ((0, 0), (0, 4), (0, 0)))
    got = jax.jit(call)(case.ids, jax.device_put(longer, place), *shared)
    np.testing.assert_allclose(got, case.value(platform), rtol=1e-5, atol=1e-5)


def test_ragged_tokens_may_be_sharded(platform):
    rng = np.random.default_rng(0)
    x, states = (rng.standard_normal(s).astype(np.float32) for s in ((32, 6), (3, 3, 6)))
    weight = rng.standard_normal((HEADS, 4)).astype(np.float32)
    starts = np.array([0, 5, 5, 30])

    def call(x):
        y, pull = jax.vjp(lambda x: jaxops.ragged_conv(x, weight, starts, initial_state=states), x)
        return y, *pull(y)

    place = NamedSharding(mesh_of(platform), P("t"))
    with jax.default_device(platform.devices[0]):
        want = jax.jit(call)(x)
    for a, b in zip(jax.jit(call)(jax.device_put(x, place)), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [Case, DynamicCase])
def test_the_example_of_the_documentation(make, platform):
    """Under `shard_map` the steps before a part are its initial state, and so it has gradients."""
    mesh = mesh_of(platform)
    case = make("NTC", 64, 4, "causal", 1, segments=True)

    def of_part(x, segment_ids, weight, bias):
        count = 3  # (K - 1) * dilation
        to_the_next = [(i, i + 1) for i in range(lax.axis_size("t") - 1)]
        before, ids_before = lax.ppermute(
            (x[:, -count:], segment_ids[:, -count:]), "t", to_the_next
        )
        is_same = (ids_before == segment_ids[:, :1]) & (lax.axis_index("t") > 0)
        return case.operator(
            x,
            weight,
            bias=bias,
            segment_ids=segment_ids,
            initial_state=jnp.where(is_same[..., None], before, 0),
        )

    steps, whole = P(None, "t"), P()
    mapped = jax.shard_map(
        of_part,
        mesh=mesh,
        in_specs=(steps, steps, case.weight_spec, whole),
        out_specs=steps,
        check_vma=True,
    )

    def value_and_gradients(g, ids, *arguments):
        y, pull = jax.vjp(lambda x, weight, bias: mapped(x, ids, weight, bias), *arguments)
        return y, pull(g)

    lowered = jax.jit(value_and_gradients).lower(*case.placed(mesh))
    program = lowered.compile(hasty_options(platform))
    assert not GATHERS & set(collectives(program))
    got = program(*case.placed(mesh))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(case.whole(platform)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
@pytest.mark.parametrize("first", [0, -3])
def test_segments_of_parts(first, dtype, platform):
    """Segments of one step and of several parts; ids may come again."""
    rng = np.random.default_rng(0)
    rows = [
        np.zeros(32),
        np.arange(32),
        np.repeat([1, 2, 1, 2], 8),
        np.repeat([0, 3, 0], [12, 8, 12]),
        *(np.cumsum(rng.random((4, 32)) < 0.1, axis=1) % 2),
    ]
    ids = np.stack(rows).astype(dtype)
    place = NamedSharding(mesh_of(platform), P(None, "t"))
    starts = jax.jit(functools.partial(sequences.segment_starts, first=first))
    with jax.default_device(platform.devices[0]):
        want = starts(ids)
    got = starts(jax.device_put(ids, place))
    assert got.sharding.is_equivalent_to(place, 2)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(want[2], np.repeat([first, 8, 16, 24], 8))
