"""Every capability of every declared operator, on every platform; and that the checks can fail."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._core import implementation
from jaxops.testing import measure, registry
from jaxops.testing.capabilities import CAPABILITIES, NotApplicable
from jaxops.testing.platforms import Platform

SPECS = registry.all_specs()
CPU = Platform("cpu", tuple(jax.devices("cpu")))


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_capability(spec, capability, platform):
    try:
        capability.check(spec, platform)
    except NotApplicable as reason:
        pytest.skip(str(reason))


LINEAR = {
    "concatenate": (lambda x: jaxops.concatenate([x, x[:1]], padded_size=5), (3, 2)),
    "split": (lambda x: jaxops.split(x, (1, 2), padded_sizes=(2, 2)), (3, 2)),
    "trilinear_interpolate": (
        lambda x: jaxops.trilinear_interpolate(x, np.full((2, 3), 0.3, np.float32)),
        (2, 8, 3),
    ),
    "grid_sample": (
        lambda x: jaxops.grid_sample(x, np.array([[0.1, -0.4], [1, 1]], np.float32)),
        (3, 4, 2),
    ),
    "conv2d": (lambda x: jaxops.conv2d(x, np.ones((3, 3, 2, 4), np.float32)), (1, 5, 6, 2)),
    "conv_transpose": (
        lambda x: jaxops.conv_transpose(x, np.ones((3, 3, 2, 4), np.float32), (2, 3), "SAME"),
        (1, 4, 5, 2),
    ),
    "im2col": (lambda x: jaxops.im2col(x, 3, padding=1), (1, 4, 5, 2)),
    "col2im": (lambda x: jaxops.col2im(x, (1, 4, 5, 2)), (1, 2, 3, 3, 3, 2)),
    "lightweight_conv": (
        lambda x: jaxops.lightweight_conv(x, np.ones((2, 3), np.float32)),
        (1, 5, 4),
    ),
    "lightweight_conv_step": (
        lambda x: jaxops.lightweight_conv_step(
            x, np.zeros((1, 2, 4), np.float32), np.ones((2, 3), np.float32)
        ),
        (1, 5, 4),
    ),
}


class Parameter:
    """A stand-in of an array, as Flax's modules have."""

    def __init__(self, array):
        self._array = jnp.asarray(array)

    def __jax_array__(self):
        return self._array


@pytest.mark.parametrize("name", ["concatenate", "split", "grid_sample", "conv2d", "im2col"])
def test_what_stands_for_an_array(name):
    function = {
        "concatenate": lambda x: jaxops.concatenate([x, np.ones((2, 2), np.float32)]),
        "split": lambda x: jaxops.split(x, jnp.array([1, 2])),
    }.get(name, LINEAR[name][0])
    x = np.random.default_rng(0).standard_normal(LINEAR[name][1]).astype(np.float32)
    got, want = jax.tree.leaves(function(Parameter(x))), jax.tree.leaves(function(x))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_transpose(name):
    function, shape = LINEAR[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    y, pull = jax.vjp(function, x)
    transpose = jax.jit(lambda y: jax.linear_transpose(function, x)(y))
    for got, want in zip(jax.tree.leaves(transpose(y)), jax.tree.leaves(pull(y)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_shard_map_over_some_axes_of_a_mesh(name, entered):
    """Shards of the other axes are gathered, also in a program for which the mesh is entered."""
    function, shape = LINEAR[name]
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("of_map", "other"), axis_types=auto, devices=CPU.devices[:4])
    x = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    axis = next((i for i, n in enumerate(shape) if n % 2 == 0), None)
    spec = P(None, *("other" if i == axis else None for i in range(len(shape))))
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    def compute_shard(x):
        return jax.tree.map(lambda y: y[None], function(x[0]))

    mapped = jax.shard_map(
        compute_shard, mesh=mesh, in_specs=P("of_map"), out_specs=P("of_map"), axis_names={"of_map"}
    )
    with jax.default_device(CPU.devices[0]):
        wants = jax.tree.leaves(jax.vmap(function)(x))
    with mesh if entered else contextlib.nullcontext():
        gots = jax.tree.leaves(jax.jit(mapped)(placed))
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_strict_promotion(spec, target):
    """A user's setting of dtype promotion does not change the operators."""
    arguments = spec.case("bfloat16" if "bfloat16" in spec.dtypes else spec.dtypes[0])
    function = measure.vjp_of(spec.function, spec.differentiable)
    cotangents = measure.cotangents_for(spec, arguments)
    with jax.numpy_dtype_promotion("strict"):
        jax.export.export(
            jax.jit(function),
            platforms=[target],
            disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS,
        )(cotangents, *arguments)


def test_every_public_operator_is_declared():
    named = {name: getattr(jaxops, name) for name in jaxops.__all__}
    public = [
        name for name, value in named.items() if callable(value) and not inspect.isclass(value)
    ]
    assert set(public) - {"use_implementation"} == set(registry.operators())


def test_names_are_unique():
    names = list(map(str, SPECS))
    assert len(set(names)) == len(names)


# --- each check must fail: it meets an operator that lacks its capability ------------------------

SOUND = next(spec for spec in SPECS if spec.operator == "lightweight_conv")


def changed(**fields):
    return dataclasses.replace(SOUND, **fields)


def function_of(wrap):
    """The sound operator with its function wrapped."""
    return changed(function=wrap(SOUND.function))


def off_by_ulps(f):
    def function(x, w):
        y = f(x, w)
        return y + 8 * jnp.finfo(y.dtype).eps * jnp.abs(y)

    return function


def unlike_under_trace(f):
    return lambda x, w: f(x, w) * (2 if isinstance(x, jax.core.Tracer) else 1)


def without_gradient_by_weight(f):
    return lambda x, w: f(x, jax.lax.stop_gradient(w))


def wrong_second_order(f):
    @jax.custom_jvp
    def function(x, w):
        return f(x, w)

    @function.defjvp
    def rule(primals, tangents):
        frozen = jax.lax.stop_gradient(primals)
        y, _ = jax.jvp(f, primals, tangents)
        return y, jax.jvp(f, frozen, tangents)[1]

    return function


def one_entry_at_a_time(f):
    @jax.custom_batching.sequential_vmap
    def function(x, w):
        return f(x, w)

    return function


def two_calls(f):
    return lambda x, w: f(x, w / 2) + f(x, w - w / 2)


def gathering(f):
    def function(x, w):
        types = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((8,), ("n",), axis_types=types, devices=CPU.devices)
        replicated = jax.sharding.NamedSharding(mesh, P())
        return f(jax.lax.with_sharding_constraint(x, replicated), w)

    return function


def with_a_callback(f):
    def function(x, w):
        spy = jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((), x.dtype), x.dtype.type(0))
        return f(x, w) + spy

    return function


def poisoning(f):
    return lambda x, w: f(x, w) + 0 * x.sum()


def never_the_same(f):
    seed = iter(range(10**6))

    def function(x, w):
        noise = jax.pure_callback(
            lambda: np.float32(next(seed)), jax.ShapeDtypeStruct((), np.float32)
        )
        return f(x, w) * (1 + noise.astype(x.dtype))

    return function


def content_without_kernels(f):
    def function(x, w):
        if not implementation.insists():
            return f(x, w)
        with jaxops.use_implementation(None):
            return f(x, w)

    return function


def without_zero_sizes(f):
    return lambda x, w: f(x, w) if x.size else jnp.zeros(x.shape[::-1], x.dtype)


WRONG = "entries are wrong"
# The operator of each check, and the check's message.
BROKEN = {
    "value f16": (function_of(off_by_ulps), WRONG),
    "value bf16": (function_of(off_by_ulps), WRONG),
    "value f32": (function_of(off_by_ulps), WRONG),
    "value f64": (function_of(off_by_ulps), WRONG),
    "jit": (function_of(unlike_under_trace), WRONG),
    "grad": (function_of(without_gradient_by_weight), WRONG),
    "gradient calls": (function_of(two_calls), "run the handlers"),
    "jvp": (function_of(without_gradient_by_weight), WRONG),
    "second order": (function_of(wrong_second_order), WRONG),
    "check_grads": (function_of(wrong_second_order), "Mismatched elements"),
    "vmap": (function_of(two_calls), "one vmap should run"),
    "nested vmap": (function_of(one_entry_at_a_time), "has a loop"),
    "sharded jit": (function_of(gathering), "collectives {'all-gather': 1}, expected {}"),
    "shard_map": (
        changed(placements=tuple(dataclasses.replace(p, backward={}) for p in SOUND.placements)),
        "collectives {'all-reduce': 1}, expected {}",
    ),
    "explicit mesh": (
        changed(placements=tuple(dataclasses.replace(p, results=(P(),)) for p in SOUND.placements)),
        "has the type",
    ),
    "export": (function_of(with_a_callback), "python_callback"),
    "implementation": (function_of(content_without_kernels), "native runs no handler on tpu"),
    "checkpoint": (changed(checkpoint_name="another_name"), "with 'another_name' saved calls"),
    "donation": (function_of(never_the_same), "in donated memory"),
    "size zero": (function_of(without_zero_sizes), "the results are"),
    "determinism": (function_of(never_the_same), "run 2 against run 1"),
    "NaN and Inf": (function_of(poisoning), "others changed"),
    "bad input": (
        changed(bad_inputs=(dataclasses.replace(SOUND.bad_inputs[0], call=SOUND.function),)),
        "None, expected ValueError",
    ),
}


@pytest.mark.parametrize("name", [n for n in CAPABILITIES if n != "command buffers"])
def test_the_check_can_fail(name):
    spec, message = BROKEN[name]
    # JAX refuses the export.
    error = NotImplementedError if name == "export" else AssertionError
    with pytest.raises(error, match=re.escape(message)):
        CAPABILITIES[name].check(spec, CPU)


BARE = changed(
    differentiable=(), placements=(), empty={}, bad_inputs=(), dtypes=("float32",), vjp_calls={}
)
INAPPLICABLE = {
    "value f16": "does not take float16",
    "grad": "no argument has a gradient",
    "check_grads": "no argument has a gradient",
    "checkpoint": "no argument has a gradient",
    "sharded jit": "no placement",
    "size zero": "no dimension",
    "bad input": "no bad input",
}


@pytest.mark.parametrize("name", CAPABILITIES)
def test_what_an_operator_does_not_declare(name):
    """No check asks an operator for a capability, such as derivatives, that it does not declare."""
    if name in INAPPLICABLE:
        with pytest.raises(NotApplicable, match=INAPPLICABLE[name]):
            CAPABILITIES[name].check(BARE, CPU)
    else:
        with contextlib.suppress(NotApplicable):
            CAPABILITIES[name].check(BARE, CPU)


@pytest.mark.parametrize("name", ["sharded jit", "shard_map", "explicit mesh"])
def test_one_device_is_not_several(name):
    with pytest.raises(NotApplicable, match="one cpu device"):
        CAPABILITIES[name].check(SOUND, Platform("cpu", CPU.devices[:1]))
