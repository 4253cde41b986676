"""The switch between kernels and plain JAX: what holds of programs that are traced under it."""

from __future__ import annotations

import concurrent.futures
import inspect
import pathlib
import re
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_errors import CALLS

import jaxops
from jaxops._core import native
from jaxops.grid_sample.taps import sum_taps
from jaxops.testing.measure import custom_calls, lowered_calls

ROOT = pathlib.Path(__file__).parents[1]
CPU = jax.devices("cpu")[0]
X = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)
WEIGHT = np.ones((2, 3), np.float32)
IMAGE, KERNEL = np.ones((1, 5, 5, 4), np.float32), np.ones((3, 3, 4, 2), np.float32)
NHWC = ("NHWC", "HWIO", "NHWC")
FUNCTIONS = sorted(f for f in jaxops.__all__ if inspect.isfunction(getattr(jaxops, f)))
FUNCTIONS.remove("use_implementation")


def conv(x, **options):
    return jaxops.lightweight_conv(x, WEIGHT, **options)


def has_kernel(function, *arguments):
    return bool(lowered_calls(jax.jit(function).lower(*arguments)))


def has_primitive(function, *arguments):
    return "needs_kernels" in str(jax.make_jaxpr(function)(*arguments))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_it(name):
    function = getattr(jaxops, name)
    parameter = inspect.signature(function).parameters["implementation"]
    assert (parameter.kind, parameter.default) == (parameter.KEYWORD_ONLY, None)
    assert "implementation: " in function.__doc__


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_in_plain_jax_has_no_primitive(name):
    options = dict(CALLS[name])
    text = str(jax.make_jaxpr(lambda: getattr(jaxops, name)(**options))())
    assert "needs_kernels" in text
    options["implementation"] = "xla"
    assert "needs_kernels" not in str(jax.make_jaxpr(lambda: getattr(jaxops, name)(**options))())


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.vmap(jax.jit(f))])
def test_a_change_traces_again(wrap):
    function = wrap(conv)
    assert has_primitive(function, X[None])
    with jaxops.use_implementation("xla"):
        assert not has_primitive(function, X[None])
        with jaxops.use_implementation(None):
            assert has_primitive(function, X[None])
        assert not has_primitive(function, X[None])
    assert has_primitive(function, X[None])


def test_a_jitted_function_is_compiled_for_each_setting():
    traces = []

    @jax.jit
    def function(x):
        traces.append(None)
        return conv(x)

    kernel = function(X)
    with jaxops.use_implementation("xla"):
        plain = function(X)
        assert not custom_calls(function.lower(X).compile())
    np.testing.assert_allclose(plain, kernel, rtol=1e-6)
    function(X)
    with jaxops.use_implementation("xla"):
        function(X)
    assert len(traces) == 2


def test_a_call_comes_before_the_context():
    with jaxops.use_implementation("native"):
        assert not has_kernel(lambda x: conv(x, implementation="xla"), X)
    with jaxops.use_implementation("xla"):
        assert has_kernel(lambda x: conv(x, implementation="native"), X)
        # The calls that a public function makes are of its implementation.
        step = jax.jit(
            lambda x, s: jaxops.dynamic_conv_step(
                x, s, np.ones((2, 9, 2, 3), np.float32), implementation="native"
            )
        )
        assert lowered_calls(step.lower(np.zeros((2, 9, 6), np.float32), X[:, :2]))


def test_a_program_keeps_what_it_was_traced_with():
    """Derivatives, batches and compilation of what has been traced do not ask for the setting."""
    _, pull = jax.vjp(conv, jnp.asarray(X))
    linear = jax.linearize(conv, jnp.asarray(X))[1]
    traced = jax.jit(jax.grad(lambda x: conv(x).sum())).trace(X)
    with jaxops.use_implementation("xla"):
        assert has_kernel(pull, X)
        assert has_kernel(jax.vmap(linear), X[None])
        assert lowered_calls(traced.lower())
        plain = jax.jit(jax.grad(lambda x: conv(x).sum())).trace(X)
    assert not lowered_calls(plain.lower())


def test_it_belongs_to_a_thread():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = threading.Barrier(2)

        def find(name):
            with jaxops.use_implementation(name):
                both.wait()
                found = has_kernel(conv, X)
                both.wait()
            return found

        assert list(pool.map(find, ["xla", None])) == [False, True]
        with jaxops.use_implementation("xla"):
            assert pool.submit(has_kernel, conv, X).result()


def test_native_over_devices():
    """XLA partitions in a thread of its own, which does not have the setting."""
    mesh = jax.make_mesh((2,), ("n",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    x = jax.device_put(X, NamedSharding(mesh, P("n")))
    with jaxops.use_implementation("native"):
        native = jax.jit(jax.grad(lambda x: conv(x).sum())).lower(x).compile()
        assert custom_calls(native)
    with jaxops.use_implementation("xla"):
        plain = jax.jit(jax.grad(lambda x: conv(x).sum())).lower(x).compile()
        assert not custom_calls(plain)
        # A call of a kernel would have to be partitioned by this process.
        exported = jax.export.export(jax.jit(conv))(x)
    np.testing.assert_allclose(native(x), plain(x), rtol=1e-6)
    assert "custom_call @jaxops" not in exported.mlir_module()


def test_native_without_a_platform(monkeypatch):
    """The error names the function that was called, not one that it calls."""
    monkeypatch.setattr(native, "missing_kernels", lambda platform: "there are none today.")
    state, weight = np.zeros((2, 2, 6), np.float32), np.ones((2, 9, 2, 3), np.float32)
    steps = np.zeros((2, 9, 6), np.float32)  # more than 8 steps are computed by dynamic_conv
    calls = {
        "lightweight_conv": lambda **options: conv(X, **options),
        "dynamic_conv_step": lambda **o: jaxops.dynamic_conv_step(steps, state, weight, **o),
        "conv2d": lambda **options: jaxops.conv2d(IMAGE, KERNEL, **options),
        "conv_transpose": lambda **o: jaxops.conv_transpose(IMAGE, KERNEL, (2, 2), "SAME", **o),
    }
    for name, call in calls.items():
        with jax.default_device(CPU), pytest.raises(NotImplementedError) as caught:
            call(implementation="native")
        assert str(caught.value) == (
            f"{name}: implementation='native' needs kernels for platform 'cpu': there are none "
            "today."
        )


def test_native_of_an_option_without_kernels():
    with pytest.raises(NotImplementedError, match=r"^conv_general_dilated: .* dtype int32$"):
        jaxops.conv_general_dilated(
            IMAGE.astype(np.int32),
            KERNEL.astype(np.int32),
            (1, 1),
            "SAME",
            dimension_numbers=NHWC,
            implementation="native",
        )
    with pytest.raises(NotImplementedError, match=r"^softmax_focal_loss: .* of dtype float32"):
        jaxops.softmax_focal_loss(X, X, implementation="native")
    with pytest.raises(NotImplementedError, match=r"^map_coordinates: .* for order 0$"):
        jaxops.map_coordinates(np.ones(3), [np.ones(2)], 0, implementation="native")


def cuda_program(function, *arguments):
    checks = jaxops.DISABLE_JAX_EXPORT_CHECKS
    export = jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=checks)
    return export(*arguments).mlir_module()


def test_native_of_an_option_that_cpus_alone_have(monkeypatch):
    options = {"coordinates": "pixel"}
    volume, points = np.ones((4, 4, 2), np.float32), np.zeros((5, 2), np.float32)
    with pytest.raises(
        NotImplementedError, match=r"^grid_sample: .* platform 'cuda': there are some for cpu only"
    ):
        cuda_program(
            lambda v, p: jaxops.grid_sample(v, p, implementation="native", **options),
            volume,
            points,
        )
    # The definition runs there otherwise, whatever kernels are allowed.
    monkeypatch.setenv(native.NEW_KERNELS_VARIABLE, "on")
    text = cuda_program(lambda v, p: jaxops.grid_sample(v, p, **options), volume, points)
    assert "@jaxops_" not in text


@pytest.mark.parametrize(
    ("switch", "axes", "taps", "channels", "dtype", "deterministic", "chosen"),
    [
        ("off", 1, 8, 1, "float32", False, "value volume weight"),
        ("off", 1, 8, 1, "float32", True, "value weight"),
        ("off", 1, 4, 1, "float32", False, ""),
        ("off", 1, 4, 2, "float32", False, "volume"),
        ("off", 1, 4, 1, "bfloat16", False, "volume"),
        ("off", 2, 2, 1, "float32", False, ""),
        ("off", 2, 4, 1, "float32", False, "volume"),
        ("off", 3, 2, 4, "float32", False, "volume"),
        ("off", 3, 4, 1, "float32", False, "volume weight"),
        ("on", 1, 4, 1, "float32", False, "value volume weight"),
        ("on", 1, 8, 1, "float32", True, "value weight"),
        ("on", 1, 9, 1, "float32", False, ""),
    ],
)
def test_kernels_of_stencils_on_gpus(
    switch, axes, taps, channels, dtype, deterministic, chosen, monkeypatch
):
    """Sums of any order and short stencils have some, and run those that are faster than XLA."""
    volume, indices = np.ones((8,) * axes + (channels,), dtype), np.zeros((5, axes, taps), np.int32)
    weights = [np.ones((5, taps), np.float32)] * axes

    def both(volume, weights):
        value, pull = jax.vjp(
            lambda v, w: sum_taps(v, indices, w, 1, deterministic), volume, weights
        )
        return value, pull(value)

    monkeypatch.setenv(native.NEW_KERNELS_VARIABLE, switch)
    program = cuda_program(both, volume, weights)
    names = {"value": "@jaxops_taps(", "volume": "@jaxops_taps_volume_grad("}
    names["weight"] = "@jaxops_taps_weight_grad("
    assert {result for result, name in names.items() if name in program} == set(chosen.split())


def test_native_with_an_unknown_work_space():
    (rows,) = jax.export.symbolic_shape("b")
    logits = jax.ShapeDtypeStruct((rows, 4), np.float32)
    labels = jax.ShapeDtypeStruct((rows,), np.int32)
    with pytest.raises(NotImplementedError, match=r"platform 'cuda': their work space needs sizes"):
        cuda_program(
            lambda z, y: jaxops.sigmoid_focal_loss(z, y, reduction="sum", implementation="native"),
            logits,
            labels,
        )


def test_native_takes_patches_by_our_kernels():
    """XLA's convolution, which conv2d leaves large images to on CPUs, is none of them."""
    x = jax.ShapeDtypeStruct((64, 224, 224, 64), np.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 64, 64), np.float32)
    lowered = jax.jit(lambda x, k: jaxops.conv2d(x, k, implementation="native")).lower(x, kernel)
    assert lowered_calls(lowered)


def test_plain_calls_of_lax_do_not_warn():
    with jax.default_device(CPU):  # XLA has no convolution of integers on GPUs
        jaxops.conv_general_dilated(
            IMAGE.astype(np.int16),
            KERNEL.astype(np.int16),
            (1, 1),
            "SAME",
            dimension_numbers=NHWC,
            implementation="xla",
        )


def test_wrong_names():
    with pytest.raises(ValueError, match=r"^conv2d: implementation must be one of None, 'native'"):
        jaxops.conv2d(IMAGE, KERNEL, implementation="lax")
    with (
        pytest.raises(ValueError, match=r"^use_implementation: implementation must be one of"),
        jaxops.use_implementation("lax"),
    ):
        pass


PROGRAM = """
import jax, numpy as np, jaxops
def has_kernel():
    x = np.ones((1, 5, 4), np.float32)
    function = jax.jit(lambda x: jaxops.lightweight_conv(x, np.ones((2, 3), np.float32)))
    return "jaxops_" in function.lower(x).as_text()
with jaxops.use_implementation(None):
    print(has_kernel(), end=" ")
print(has_kernel())
"""


def test_the_environment_variable():
    for name in ("xla", "XLA"):
        printed = processes.run_python(["-c", PROGRAM], {"JAXOPS_IMPLEMENTATION": name})
        assert printed == "True False\n"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jaxops.conv2d(IMAGE, KERNEL, stride=2), "'stride'; did you mean 'strides'"),
        (
            lambda: jaxops.conv2d(IMAGE, KERNEL, feature_group_count=2),
            "'feature_group_count'; did you mean 'groups'",
        ),
        (lambda: jaxops.concatenate([X, X], dim=1), "'dim'; did you mean 'axis'"),
        (lambda: jaxops.grid_sample(X, X, mode="nearest"), "'mode'; did you mean 'method'"),
        (lambda: jaxops.grid_sample(input=X, grid=X), "'input'; did you mean 'volume'"),
        (
            lambda: jaxops.conv_transpose(IMAGE, KERNEL, (1, 1), "SAME", groups=2),
            "'groups'; did you mean 'feature_group_count'",
        ),
        (lambda: jaxops.softmax_focal_loss(X, target=X), "'target'; did you mean 'labels'"),
        (lambda: jaxops.lightweight_conv(X, WEIGHT, dilations=2), "'dilation'"),
        (lambda: jaxops.im2col(IMAGE, 3, padddding=2), "did you mean 'padding'"),
        (lambda: jaxops.split(X, (1, 1), zzz=1), "the arguments are array, sizes, axis"),
    ],
)
def test_misnamed_arguments(call, message):
    with pytest.raises(TypeError, match=message) as caught:
        call()
    assert ": there is no argument '" in str(caught.value)


def test_flax_is_reached_by_attribute():
    program = "import sys, jaxops\nprint('flax' in sys.modules, jaxops.flax.nnx.__name__)"
    pytest.importorskip("flax")
    assert processes.run_python(["-c", program]) == "False jaxops.flax.nnx\n"
    assert "flax" in dir(jaxops)
    with pytest.raises(AttributeError, match="no attribute 'linen'"):
        _ = jaxops.linen


def test_layers_pass_it_on():
    pytest.importorskip("flax")
    from flax import nnx

    linen, jnnx = jaxops.flax.linen, jaxops.flax.nnx
    layers = [
        linen.LightweightConv(2, 3, implementation="xla"),
        linen.ShortConv(3, implementation="xla", activation=jax.nn.silu),
        linen.DynamicConv(2, 3, implementation="xla"),
    ]
    for layer in layers:
        text = str(
            jax.make_jaxpr(lambda k, layer=layer: layer.init_with_output(k, X))(jax.random.key(0))
        )
        assert "needs_kernels" not in text
    rngs = nnx.Rngs(0)
    modules = [
        jnnx.LightweightConv(6, 2, 3, implementation="xla", rngs=rngs),
        jnnx.ShortConv(6, 3, implementation="xla", activation=jax.nn.silu, rngs=rngs),
        jnnx.LightConv(6, 2, 3, implementation="xla", rngs=rngs),
    ]
    assert not any(has_primitive(module, X) for module in modules)


def test_activations_by_function_and_name():
    named = {"relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}
    for name, function in named.items():
        want = conv(X, activation=name)
        for other in (function, name.upper()):
            np.testing.assert_array_equal(conv(X, activation=other), want)
    np.testing.assert_array_equal(conv(X, activation=jax.nn.swish), conv(X, activation="Swish"))
    np.testing.assert_array_equal(
        jaxops.conv2d(IMAGE, KERNEL, padding="same", activation=jax.nn.relu),
        jaxops.conv2d(IMAGE, KERNEL, padding="SAME", activation="relu"),
    )
    with pytest.raises(ValueError, match=r"activation must be one of .* got function"):
        conv(X, activation=lambda x: x)


@pytest.mark.parametrize("page", ["implementation", "focal_loss"])
def test_examples_of_the_pages(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    example, *_ = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(example, f"{page}.md", "exec"), names)
    if page == "implementation":
        assert "custom_call" not in names["exported"].mlir_module()
    else:
        np.testing.assert_allclose(names["mean"], np.log(1000), rtol=1e-6)
        # Half of the classes are left out, with half of what is smoothed.
        np.testing.assert_allclose(names["soft"], 0.95 * np.log(500), rtol=1e-5)
