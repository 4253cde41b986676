"""Operators within programs: several devices, settings of threads, profiles, symbolic shapes."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from jax.experimental import jet, serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.testing import registry

# Functions linear in one operand, in two, in none; with several results.
IN_SERIES = [
    next(spec for spec in registry.all_specs() if spec.operator == name)
    for name in ("concatenate", "lightweight_conv", "sigmoid_focal_loss", "split")
]


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def batch_sharding(count=4):
    devices = jax.devices("cpu")[:count]
    mesh = jax.make_mesh((count,), ("batch",), axis_types=(AxisType.Auto,), devices=devices)
    return NamedSharding(mesh, P("batch"))


def test_sharded_64_bit_arrays_that_only_a_context_allows():
    """XLA partitions in another thread, which does not have the setting."""
    jax.config.update("jax_enable_x64", False)
    try:
        with jax.enable_x64(True):
            x, weight = normal(8, 5, 4, dtype=np.float64), normal(2, 3, dtype=np.float64)
            placed = jax.device_put(x, batch_sharding())
            got = jax.jit(jaxops.lightweight_conv)(placed, weight)
            want = jax.jit(jaxops.lightweight_conv)(x, weight)
    finally:
        jax.config.update("jax_enable_x64", True)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-12)


WITHOUT_SHARDY = """
import jax, numpy as np, jaxops
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_use_shardy_partitioner", False)
mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
x = jax.device_put(np.ones((4, 5, 4), np.float32), NamedSharding(mesh, P("a")))
jax.jit(jaxops.lightweight_conv)(np.ones((4, 5, 4), np.float32), np.ones((2, 3), np.float32))
try:
    jax.jit(jaxops.lightweight_conv)(x, np.ones((2, 3), np.float32))
except NotImplementedError as error:
    print(error)
"""


def test_without_shardy_several_devices_are_refused():
    """Runs in a separate process, which the call once ended."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    said = processes.run_python(["-W", "ignore", "-c", WITHOUT_SHARDY], flags)
    assert "lightweight_conv: arrays on several devices need the Shardy partitioner" in said


@pytest.mark.parametrize("spec", IN_SERIES, ids=str)
def test_taylor_series(spec, hasty):
    arguments = spec.case("float64")
    moving = spec.differentiable[0]
    series = [0.1 * normal(*arguments[moving].shape, dtype=np.float64) * k for k in (1, 2)]

    def function(x):
        return spec.function(*arguments[:moving], x, *arguments[moving + 1 :])

    def along(t):
        return function(arguments[moving] + series[0] * t + series[1] * t**2 / 2)

    def derivative(function):
        return lambda t: jax.jvp(function, (t,), (1.0,))[1]

    compiled = functools.partial(jax.jit, compiler_options=hasty)
    value, terms = compiled(lambda x: jet.jet(function, (x,), (series,)))(arguments[moving])
    by_result = [terms] if isinstance(value, jax.Array) else terms
    for order, curve in enumerate((derivative(along), derivative(derivative(along)))):
        for got, want in zip(by_result, jax.tree.leaves(compiled(curve)(0.0)), strict=True):
            np.testing.assert_allclose(got[order], want, rtol=1e-10, atol=1e-10)


def test_taylor_series_of_complex_and_of_integer_arrays():
    x, dx = jnp.array([1 + 2j], jnp.complex64), jnp.array([3 + 1j], jnp.complex64)
    _, series = jet.jet(lambda x: jaxops.concatenate([x, x]), (x,), ([dx],))
    np.testing.assert_array_equal(series[0], [3 + 1j, 3 + 1j])

    def rounded(x):
        return jaxops.concatenate([jnp.round(x).astype(jnp.int32)] * 2).astype(jnp.float32)

    _, series = jet.jet(rounded, (x.real,), ([dx.real],))
    np.testing.assert_array_equal(series[0], [0, 0])


def test_no_parameter_is_none_or_a_dtype():
    """NumPy treats None as equal to float64, and JAX's caches compare parameters by ==."""
    assert np.dtype("float64") == None  # noqa: E711 - the test is about ==

    def gradients(with_bias):
        def loss(x, weight, *bias):
            return jaxops.lightweight_conv(x, weight, bias=bias[0] if bias else None).sum()

        arrays = normal(2, 50, 4), normal(1, 3), normal(4)
        arrays = [a.astype(np.float64) for a in arrays[: 2 + with_bias]]
        return jax.make_jaxpr(jax.grad(loss, tuple(range(len(arrays)))))(*arrays)

    calls = [
        next(e for e in gradients(b).eqns if e.primitive.name == "lightweight_conv_backward")
        for b in (False, True)
    ]
    assert [len(e.outvars) for e in calls] == [2, 3]
    without, with_bias = (e.params for e in calls)
    # A name or None, which no dtype is compared with.
    names = without.keys() - {"needs_kernels"}
    assert all(without[name] != with_bias[name] for name in names if without[name] is None)


def test_export_of_a_map_over_some_axes_of_a_mesh_of_one_device():
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=auto, devices=jax.devices("cpu")[:1])
    mapped = jax.shard_map(
        jaxops.lightweight_conv,
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P("a"),
        axis_names={"a"},
    )
    export = jax.export.export(
        jax.jit(mapped), disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS, platforms=("cpu",)
    )
    assert "jaxops_lightweight_conv" in export(normal(2, 5, 4), normal(1, 3)).mlir_module()


def test_an_executable_of_several_devices_is_serialised():
    x, weight = normal(8, 5, 4), normal(2, 3)
    placed = jax.device_put(x, batch_sharding())
    gradients = jax.jit(jax.grad(lambda x, w: jaxops.lightweight_conv(x, w).sum(), (0, 1)))
    compiled = gradients.lower(placed, weight).compile()
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(compiled),
        backend="cpu",
        execution_devices=jax.devices("cpu")[:4],
    )
    placed = jax.device_put((placed, weight), compiled.input_shardings[0])
    for got, want in zip(loaded(*placed), compiled(*placed), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("devices", [1, 4])
def test_profiles_name_the_operator(devices):
    x = jax.device_put(normal(8, 5, 4), batch_sharding(devices))
    function = jax.jit(jax.value_and_grad(lambda w, x: jaxops.lightweight_conv(x, w).sum()))
    text = function.lower(normal(2, 3), x).compile().as_text()
    for name in ("lightweight_conv", "lightweight_conv_filter_grad"):
        assert f"/jaxops.{name}/" in text


def _last_state(x, state, weight):
    return jaxops.lightweight_conv(
        x, weight, initial_state=state, return_final_state=True, activation="silu"
    )


def _as_int8(x):
    return (25 * x).astype(np.int8)


# Programs of a batch of symbolic size b.
SYMBOLIC = {
    "lightweight_conv": (
        lambda x, w, bias: jaxops.lightweight_conv(x, w, bias=bias, activation="silu"),
        [("b", 16, 8), (2, 3), (8,)],
    ),
    "lightweight_conv, states": (_last_state, [("b", 16, 8), ("b", 2, 8), (2, 3)]),
    "lightweight_conv_step": (jaxops.lightweight_conv_step, [("b", 8), ("b", 2, 8), (4, 3)]),
    "dynamic_conv": (
        lambda x, w: jaxops.dynamic_conv(x, w, normalize=True),
        [("b", 8, 4), ("b", 8, 2, 3)],
    ),
    "dynamic_conv_step": (jaxops.dynamic_conv_step, [("b", 8), ("b", 2, 8), ("b", 4, 3)]),
    "ragged_conv": (
        lambda x, w: jaxops.ragged_conv(x, w, np.array([0, 0, 1], np.int32)),
        [("b", 8), (4, 3)],
    ),
    "concatenate": (lambda x, y: jaxops.concatenate([x, y], -1), [("b", 3), ("b", 4)]),
    "split": (lambda x: jaxops.split(x, (3, 5), -1), [("b", 8)]),
    "conv1d": (jaxops.conv1d, [("b", 8, 3), (3, 3, 4)]),
    "conv2d": (
        lambda x, k, bias: jaxops.conv2d(x, k, bias=bias, activation="gelu", strides=2),
        [("b", 8, 7, 3), (3, 3, 3, 4), (4,)],
    ),
    "conv2d, depthwise": (
        lambda x, k: jaxops.conv2d(x, k, groups=4),
        [("b", 6, 5, 4), (3, 3, 1, 4)],
    ),
    "conv2d, a batch of batches": (
        jax.vmap(jaxops.conv2d, (0, None)),
        [("b", 2, 6, 5, 2), (3, 3, 2, 4)],
    ),
    "conv3d": (lambda x, k: jaxops.conv3d(x, k, groups=2), [("b", 3, 4, 5, 4), (2, 2, 3, 2, 4)]),
    "conv_general_dilated": (
        lambda x, k: jaxops.conv_general_dilated(x, k, (1, 1), ((1, 2), (2, 1)), (2, 3)),
        [("b", 3, 4, 5), (2, 3, 3, 3)],
    ),
    "conv_transpose": (
        lambda x, k: jaxops.conv_transpose(x, k, (2,), "SAME"),
        [("b", 6, 3), (4, 3, 2)],
    ),
    "im2col": (lambda x: jaxops.im2col(x, 3), [("b", 8, 8, 3)]),
    "col2im": (
        lambda x: jaxops.col2im(x, (x.shape[0], 8, 8, 2), padding=1),
        [("b", 8, 8, 3, 3, 2)],
    ),
    "trilinear_interpolate": (jaxops.trilinear_interpolate, [("b", 8, 3), ("b", 3)]),
    "grid_sample": (jaxops.grid_sample, [("b", 4, 5, 3, 2), ("b", 7, 3)]),
    "grid_sample, deterministic": (
        lambda v, p: jaxops.grid_sample(v, p, deterministic=True),
        [(4, 5, 3), ("b", 2)],
    ),
    "conv2d, int8, a batch of batches": (
        jax.vmap(
            lambda x, k: jaxops.conv2d(
                _as_int8(x), _as_int8(k), preferred_element_type=np.int32
            ).astype(np.float32),
            (0, None),
        ),
        [("b", 2, 6, 5, 2), (3, 3, 2, 4)],
    ),
    "conv2d, int8": (
        lambda x, k: jaxops.conv2d(
            _as_int8(x), _as_int8(k), preferred_element_type=np.int32
        ).astype(np.float32),
        [("b", 6, 5, 2), (3, 3, 2, 4)],
    ),
    "grid_sample, cubic": (
        lambda v, p: jaxops.grid_sample(v, p, method="cubic"),
        [("b", 4, 5, 3), ("b", 7, 2)],
    ),
    "grid_sample, wrap": (
        lambda v, p: jaxops.grid_sample(v, p, padding_mode="wrap", coordinates="pixel"),
        [("b", 4, 5, 3), (1, 7, 2)],
    ),
    "grid_sample, nearest in a constant": (
        lambda v, p: jaxops.grid_sample(v, p, method="nearest", padding_mode="constant", cval=2),
        [("b", 4, 5, 3), ("b", 7, 2)],
    ),
    "grid_sample, pixel, constant": (
        lambda v, p: jaxops.grid_sample(v, p, padding_mode="constant", coordinates="pixel"),
        [(4, 5, 3), ("b", 2)],
    ),
    "map_coordinates, nearest": (
        lambda v, x, y: jaxops.map_coordinates(v, [x, y], 0),
        [(4, 5), ("b",), ("b",)],
    ),
    "map_coordinates, linear": (
        lambda v, x, y: jaxops.map_coordinates(v, [x, y], 1, "reflect"),
        [(4, 5), ("b",), ("b",)],
    ),
    "map_coordinates, cubic": (
        lambda v, x, y: jaxops.map_coordinates(v, [x, y], 3, "mirror"),
        [(4, 5), ("b",), ("b",)],
    ),
    "sigmoid_focal_loss": (
        lambda x: jaxops.sigmoid_focal_loss(x, jax.nn.sigmoid(x)),
        [("b", 5)],
    ),
    "sigmoid_focal_loss, mean": (
        lambda x: jaxops.sigmoid_focal_loss(x, jax.nn.sigmoid(x), reduction="mean"),
        [("b", 5)],
    ),
    "sigmoid_focal_loss, class ids": (
        lambda x: jaxops.sigmoid_focal_loss(x, jnp.argmax(x, -1)),
        [("b", 5)],
    ),
    "softmax_focal_loss, soft labels": (
        lambda x: jaxops.softmax_focal_loss(x, jax.nn.softmax(x)),
        [("b", 5)],
    ),
    "softmax_focal_loss, sum": (
        lambda x, w: jaxops.softmax_focal_loss(
            x, jnp.argmax(x, -1), sample_weight=w, reduction="sum"
        ),
        [("b", 5), ("b",)],
    ),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_batch(name):
    """Exports value and gradient for every platform, and calls them on the CPU."""
    function, shapes = SYMBOLIC[name]
    (symbol,) = jax.export.symbolic_shape("b")
    types = [
        jax.ShapeDtypeStruct([symbol if n == "b" else n for n in shape], np.float32)
        for shape in shapes
    ]

    def both(*arrays):
        value, pull = jax.vjp(function, *arrays)
        return value, pull(value)

    program = jax.jit(both)
    exported = jax.export.export(
        program,
        platforms=("cpu", "cuda", "tpu"),
        disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS,
    )(*types)
    for size in (1, 5):
        arrays = [normal(*(size if n == "b" else n for n in shape)) for shape in shapes]
        placed = jax.device_put(arrays, jax.devices("cpu")[0])
        got, want = exported.call(*placed), program(*placed)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


REFUSED = {
    "concatenate": (lambda x, y: jaxops.concatenate([x, y]), [("b", 3), ("b", 3)]),
    "conv": (jax.vmap(jaxops.conv2d), [("b", 1, 6, 5, 2), ("b", 3, 3, 2, 4)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_symbolic_sizes_that_are_refused(name):
    function, shapes = REFUSED[name]
    (symbol,) = jax.export.symbolic_shape("b")
    types = [
        jax.ShapeDtypeStruct([symbol if n == "b" else n for n in shape], np.float32)
        for shape in shapes
    ]
    checks = jaxops.DISABLE_JAX_EXPORT_CHECKS
    with pytest.raises(NotImplementedError, match=rf"{name}.*symbolic shape.*b"):
        jax.export.export(jax.jit(function), disabled_checks=checks)(*types)
