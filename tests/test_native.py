"""Loading and registration of the compiled modules, and the messages if these fail."""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import types

import jax
import jax.export
import jax.numpy as jnp
import jaxlib
import pytest

import jaxops
from jaxops._core import compat, native, primitive
from jaxops.testing import measure, registry

# Of those with kernels on every platform.
ONE_OF_EACH = list(
    {
        spec.operator: spec
        for spec in registry.all_specs()
        if spec.calls_on("cuda") or spec.operator.startswith("dynamic_conv")
    }.values()
)
CPU_TARGETS = (
    "jaxops_concatenate",
    "jaxops_lightweight_conv",
    "jaxops_lightweight_conv_backward",
    "jaxops_lightweight_conv_filter_grad",
    "jaxops_split",
)


@pytest.mark.any_jax
@pytest.mark.parametrize("name", [f"_{platform}" for platform in native.PLATFORMS])
def test_modules_export_their_initialization_alone(name):
    """Libraries inside, such as CUB, would otherwise be those of whichever module came first."""
    try:
        module = importlib.import_module(f"jaxops.{name}")
    except ImportError:
        pytest.skip(f"jaxops{name} is not built here")
    if shutil.which("nm") is None:
        pytest.skip("nm, which lists symbols, is not here")
    listed = ["nm", "--dynamic", "--defined-only", "--format=posix", module.__file__]
    lines = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [f"PyInit_{name}"]


@pytest.mark.parametrize("running", [(0, 3), (0, 4), (0, 12)])
def test_older_or_equal_handlers_may_run(running):
    native.check_version((0, 3), "0.10.2", running)


@pytest.mark.parametrize(
    ("built", "running"), [((0, 4), (0, 3)), ((1, 0), (0, 5)), ((0, 5), (1, 0))]
)
def test_other_handlers_are_refused_with_what_to_do(built, running):
    with pytest.raises(ImportError) as caught:
        native.check_version(built, "9.8.7", running)
    message = str(caught.value)
    for part in (
        "built against jaxlib 9.8.7",
        f"version {built[0]}.{built[1]}",
        f"running jaxlib {jaxlib.__version__} has version {running[0]}.{running[1]}",
        "pip install -U 'jaxlib>=9.8.7'",
        "pip install --no-build-isolation .",
    ):
        assert part in message


def test_this_jaxlib_runs_the_built_handlers():
    from jaxops import _cpu

    assert native.running_ffi_version() >= tuple(_cpu.FFI_VERSION)
    assert native.running_ffi_version() >= (0, 3)


def test_status():
    by_platform = {s.platform: s for s in native.status()}
    assert list(by_platform) == list(native.PLATFORMS)
    cpu = by_platform["cpu"]
    assert cpu.available
    assert cpu.reason is None
    assert cpu.build
    assert set(CPU_TARGETS) <= set(cpu.targets)
    assert set(cpu.targets) == set(native.TARGETS)
    for status in by_platform.values():
        assert status.available == bool(status.targets)
        assert (status.reason is None) == status.available


def test_export_checks_name_every_target():
    allowed = {check.is_custom_call() for check in jaxops.DISABLE_JAX_EXPORT_CHECKS}
    assert allowed == set(native.TARGETS)
    assert set(CPU_TARGETS) <= allowed


def test_a_module_that_was_not_built(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxops._no_such", None)
    for platform, how in (("cuda", "JAXOPS_CUDA=on pip install ."), ("cpu", "`pip install .`")):
        status = native._register(platform, "jaxops._no_such")
        assert not status.available
        assert status.targets == ()
        assert "jaxops._no_such was not built" in status.reason
        assert how in status.reason


def test_a_module_that_cannot_be_loaded(monkeypatch, tmp_path):
    (tmp_path / "jaxops_broken.py").write_text("raise ImportError('libfoo.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    status = native._register("cuda", "jaxops_broken")
    assert not status.available
    assert status.reason == "jaxops_broken could not be loaded: libfoo.so: not found"


def test_a_module_that_needs_another_module(monkeypatch, tmp_path):
    """If the module itself is missing, so is its platform; another missing module is an error."""
    (tmp_path / "jaxops_needy.py").write_text("import no_such_module_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        native._register("cuda", "jaxops_needy")


def test_a_newer_module_registers_nothing(monkeypatch):
    def registrations():
        raise AssertionError("asked for handlers before the version was checked")

    newer = types.ModuleType("jaxops_newer")
    newer.FFI_VERSION, newer.JAXLIB_VERSION = (0, 10_000), "99.0"
    newer.registrations = registrations
    monkeypatch.setitem(sys.modules, "jaxops_newer", newer)
    status = native._register("cuda", "jaxops_newer")
    assert not status.available
    assert "built against jaxlib 99.0" in status.reason


def in_a_process(program):
    """What a program prints that imports this jaxops."""
    package = str(pathlib.Path(jaxops.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": package, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.any_jax
def test_without_modules_every_operator_runs_its_reference():
    """And one warning says so, in place of an error of `import jaxops`."""
    said = in_a_process("""if True:
        import sys, warnings
        sys.modules.update({"jaxops._cpu": None, "jaxops._cuda": None})
        import jax, jax.numpy as jnp, jaxops
        from jaxops.testing import registry
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for spec in {s.operator: s for s in registry.all_specs()}.values():
                for platform in ("cpu", "cuda"):
                    arguments = spec.case(spec.dtypes[0])
                    traced = jax.jit(lambda *a: spec.function(*a)).trace(*arguments)
                    text = traced.lower(lowering_platforms=(platform,)).as_text()
                    assert "@jaxops_" not in text, spec
            x = jnp.ones((2, 3))
            assert jaxops.concatenate([x] * 300).shape == (600, 3)
        print(sorted(str(w.message).split("kernels, ")[1].split(".")[1] for w in caught))
    """)
    assert said.strip() == "['numpy: jaxops', 'numpy: jaxops']", said


@pytest.mark.any_jax
def test_a_jax_without_a_name_is_an_error_that_names_tested_versions():
    said = in_a_process("import jax._src.mesh as m; del m.thread_resources; import jaxops")
    oldest, newest = compat.TESTED_JAX
    assert f"jax {jax.__version__} lacks one: cannot import name 'thread_resources'" in said
    assert f"jaxops is tested with jax {oldest} to {newest}: upgrade jaxops" in said
    assert f"pip install 'jax>={oldest},<={newest}'" in said


ROOT = pathlib.Path(native.__file__).parents[2]
is_source_tree = pytest.mark.skipif(
    native.interface("cpu", ROOT) is None, reason="needs the sources of the handlers"
)


@is_source_tree
@pytest.mark.parametrize("name", native.PLATFORMS)
def test_a_module_of_other_sources_is_refused(monkeypatch, name):
    def registrations():
        raise AssertionError("asked for handlers of other sources")

    older = types.ModuleType("jaxops_older")
    older.FFI_VERSION, older.JAXLIB_VERSION = (0, 3), "0.10.0"
    older.__file__, older.registrations = "/somewhere/else.so", registrations
    monkeypatch.setitem(sys.modules, "jaxops_older", older)
    how = {"cpu": "`pip install .`", "cuda": "`JAXOPS_CUDA=on pip install .`"}[name]
    older.INTERFACE = "0" * 64
    status = native._register(name, "jaxops_older")
    assert not status.available
    for part in ("/somewhere/else.so was built from other sources", str(ROOT), how):
        assert part in status.reason


@is_source_tree
def test_the_interface_is_that_of_the_sources(tmp_path):
    from jaxops import _cpu

    assert native.interface("cpu", ROOT) == _cpu.INTERFACE
    assert native.interface("cpu", tmp_path) is None
    for folder in ("common", "ffi"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    assert native.interface("cpu", tmp_path) == _cpu.INTERFACE
    (tmp_path / "ffi" / "conv_cuda.cc").write_text("// of the other platform")
    assert native.interface("cpu", tmp_path) == _cpu.INTERFACE
    (tmp_path / "ffi" / "decode.h").write_text("// changed")
    assert native.interface("cpu", tmp_path) not in (None, _cpu.INTERFACE)


def test_modules_have_the_same_limits():
    cuda = pytest.importorskip("jaxops._cuda")
    from jaxops import _cpu

    assert cuda.LIMITS == _cpu.LIMITS
    assert set(cuda.LIMITS) == {"batch", "concatenate", "conv", "taps"}


@pytest.mark.any_jax
def test_wrong_calls_of_handlers_are_errors():
    """Runs in a separate process, which a handler without checks would end."""
    program = pathlib.Path(__file__).with_name("wrong_calls.py")
    package = str(pathlib.Path(jaxops.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": package, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, program], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def absent(platform):
    return native.PlatformStatus(platform, available=False, reason="it was [not] built")


def text_for(spec, platform):
    """A new program of an operator and its gradient, which no cache holds."""
    arguments = spec.case("float32" if "float32" in spec.dtypes else spec.dtypes[-1])
    function = spec.function
    if spec.differentiable:
        cotangents = measure.cotangents_for(spec, arguments)
        arguments = (cotangents, *arguments)
        function = measure.vjp_of(spec.function, spec.differentiable)
    traced = jax.jit(lambda *arguments: function(*arguments)).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def nothing_warned(monkeypatch):
    monkeypatch.setattr(native, "_warned", set())


@pytest.mark.usefixtures("nothing_warned")
@pytest.mark.parametrize("absentee", native.PLATFORMS)
@pytest.mark.parametrize("spec", ONE_OF_EACH, ids=str)
def test_a_platform_without_handlers_runs_the_reference(spec, absentee, monkeypatch):
    monkeypatch.setenv(native.NEW_KERNELS_VARIABLE, "on")
    monkeypatch.setitem(native._statuses, absentee, absent(absentee))
    with pytest.warns(
        jaxops.NoKernelWarning, match=r"in jax.numpy: it was \[not\] built"
    ) as caught:
        text = text_for(spec, absentee)
    assert len(caught) == 1
    assert "@jaxops_" not in text


@pytest.mark.usefixtures("nothing_warned")
@pytest.mark.parametrize("spec", ONE_OF_EACH, ids=str)
def test_a_gpu_without_code_runs_the_reference(spec, monkeypatch):
    monkeypatch.setenv(native.NEW_KERNELS_VARIABLE, "on")
    built = native.PlatformStatus("cuda", available=True, targets=("t",))
    monkeypatch.setitem(native._statuses, "cuda", built)
    monkeypatch.setattr(native, "cuda_architectures", lambda: ("90a",))
    monkeypatch.setattr(compat, "gpu_capabilities", lambda: {"8.0"})
    with pytest.warns(
        jaxops.NoKernelWarning, match=r"code for sm 90a.*capability 8\.0.*JAXOPS_CUDA"
    ):
        text = text_for(spec, "cuda")
    assert "@jaxops_" not in text


def test_a_gpu_that_is_too_old(monkeypatch):
    built = native.PlatformStatus("cuda", available=True, targets=("t",))
    monkeypatch.setitem(native._statuses, "cuda", built)
    monkeypatch.setattr(native, "cuda_architectures", lambda: ("80", "90-virtual"))
    monkeypatch.setattr(compat, "gpu_capabilities", lambda: {"7.5"})
    assert "needs compute capability 8.0 or later" in native.missing_kernels("cuda")


@pytest.mark.usefixtures("nothing_warned")
def test_kernels_may_be_required(monkeypatch):
    monkeypatch.setitem(native._statuses, "cpu", absent("cpu"))
    monkeypatch.setenv(native.REQUIRE_VARIABLE, "1")
    x, weight = jax.device_put((jnp.ones((1, 3, 2)), jnp.ones((1, 2))), jax.devices("cpu")[0])
    function = jax.jit(lambda x, weight: jaxops.lightweight_conv(x, weight) * 17)
    with pytest.raises(RuntimeError, match=r"no kernels for platform 'cpu': it was \[not\] built"):
        function.lower(x, weight)


@pytest.mark.parametrize(
    ("capability", "architectures", "has"),
    [
        ("9.0", ("80", "90a"), True),
        ("8.9", ("80",), True),
        ("8.0", ("86",), False),
        ("12.0", ("90a", "100"), False),
        ("12.0", ("90a", "90-virtual"), True),
        ("8.6", ("90a", "90-virtual"), False),
        ("7.5", ("75",), False),
    ],
)
def test_which_gpus_have_code(capability, architectures, has, monkeypatch):
    monkeypatch.setattr(native, "cuda_architectures", lambda: architectures)
    assert native.has_code(capability) == has


def test_exporting_needs_no_handlers(monkeypatch):
    monkeypatch.setitem(native._statuses, "cuda", absent("cuda"))
    exported = jax.export.export(
        jax.jit(jaxops.lightweight_conv),
        platforms=("cuda",),
        disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS,
    )(jnp.ones((1, 3, 2)), jnp.ones((1, 2)))
    assert "@jaxops_lightweight_conv(" in exported.mlir_module()


@pytest.fixture
def total(monkeypatch):
    """An operator whose second operand's memory has the result; without the scale it is new."""
    monkeypatch.setattr(native, "TARGETS", [])
    return primitive.Operator(
        "total",
        signature=lambda **_: "rows, rows -> rows",
        dtypes=lambda x, y, **_: [y.dtype],
        reference=lambda x, y, **_: [(x + y).astype(y.dtype)],
        attributes=lambda **_: {},
        aliases={1: 0},
        is_new_on_gpu=lambda scaled, **_: not scaled,
    )


def text_of_total(total, x, y, scaled):
    function = jax.jit(lambda x, y: total(x, y, scaled=scaled))
    checks = [jax.export.DisabledSafetyCheck.custom_call(total.target)]
    exported = jax.export.export(function, platforms=("cuda",), disabled_checks=checks)(x, y)
    return exported.mlir_module()


def test_new_kernels_wait_for_a_switch(total, monkeypatch):
    x = jnp.ones(3, jnp.float32)
    for switch, is_chosen in (("", False), ("off", False), ("on", True)):
        monkeypatch.setenv(native.NEW_KERNELS_VARIABLE, switch)
        assert native.allows_new_kernels() == is_chosen
        assert ("@jaxops_total(" in text_of_total(total, x, x, scaled=False)) == is_chosen
        assert "@jaxops_total(" in text_of_total(total, x, x, scaled=True)


@pytest.mark.parametrize(
    ("x", "y", "is_aliased"),
    [
        (((4, 3), "float32"), ((4, 3), "float32"), True),
        (((4, 3), "bfloat16"), ((4, 3), "float32"), True),
        (((4, 3), "float32"), ((1, 3), "float32"), False),
    ],
)
def test_results_have_the_memory_of_operands(total, x, y, is_aliased):
    x, y = (jax.ShapeDtypeStruct(*array) for array in (x, y))
    text = text_of_total(total, x, y, scaled=True)
    alias = "output_operand_alias<output_tuple_indices = [], operand_index = 1"
    assert (alias in text) == is_aliased


@pytest.mark.parametrize("package", ["flax", "rich", "hypothesis", "jaxops.testing", "jaxops._cli"])
def test_import_is_lean(package):
    code = f"import sys, jaxops; sys.exit({package!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_import_makes_no_backend():
    code = (
        "import os, jaxops, jax; os.environ['XLA_FLAGS'] = "
        "'--xla_force_host_platform_device_count=5'; assert len(jax.devices('cpu')) == 5"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_exporting_a_sharded_jit_says_what_to_do_instead():
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("z",), axis_types=types, devices=jax.devices("cpu"))
    spec = jax.sharding.PartitionSpec("z")
    x = jax.device_put(jnp.ones((8, 5, 4), jnp.float32), jax.sharding.NamedSharding(mesh, spec))
    weight = jnp.ones((2, 3), jnp.float32)
    export = functools.partial(jax.export.export, disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS)
    with pytest.raises(NotImplementedError, match=r"lightweight_conv.*jax\.shard_map"):
        export(jax.jit(jaxops.lightweight_conv))(x, weight)

    whole = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        jaxops.lightweight_conv, mesh=mesh, in_specs=(spec, whole), out_specs=spec
    )
    exported = export(jax.jit(mapped))(x, weight)
    assert "jaxops_lightweight_conv" in exported.mlir_module()
