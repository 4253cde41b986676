"""The compiled modules: finding them, checking that they fit this jaxlib, registering handlers.

Nothing is registered before the version check: a handler built against a newer XLA FFI than the
running jaxlib's would make JAX's whole backend fail to initialise.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import importlib
import importlib.metadata
import os
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jaxlib.version
import numpy as np

from jaxops._core import compat, implementation

# JAX platform names, and the module that holds each one's handlers.
PLATFORMS = {"cpu": "jaxops._cpu", "cuda": "jaxops._cuda"}
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA"}

# Target names that the operators ask for, filled in as they are defined.
TARGETS: list[str] = []

#: Set to 1 in the environment, a platform without kernels is an error.
REQUIRE_VARIABLE = "JAXOPS_REQUIRE_KERNELS"

#: Set to "on" in the environment, CUDA kernels are chosen even if no GPU has run them or XLA is
#: faster.
NEW_KERNELS_VARIABLE = "JAXOPS_NEW_KERNELS"

_warned: set[str] = set()
_statuses: dict[str, PlatformStatus] = {}
_modules: dict[str, types.ModuleType] = {}


@dataclasses.dataclass(frozen=True)
class PlatformStatus:
    """The handlers that one platform has. `reason` tells why it cannot, and what to do about it."""

    platform: str
    available: bool
    targets: tuple[str, ...] = ()
    reason: str | None = None
    build: str | None = None


def running_ffi_version() -> tuple[int, int]:
    """The version of the XLA FFI that the running jaxlib speaks, read from its own headers."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    versions = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(versions["MAJOR"]), int(versions["MINOR"])


def check_version(built: tuple[int, int], built_jaxlib: str, running: tuple[int, int]) -> None:
    """Raises ImportError when handlers built for FFI `built` cannot run under `running`."""
    if running >= built and running[0] == built[0]:
        return
    raise ImportError(
        f"jaxops was built against jaxlib {built_jaxlib}, whose XLA FFI is version "
        f"{built[0]}.{built[1]}, but the running jaxlib {jaxlib.version.__version__} has version "
        f"{running[0]}.{running[1]}. Upgrade JAX (pip install -U 'jaxlib>={built_jaxlib}'), or "
        "build jaxops against the jaxlib you have: pip install --no-build-isolation . in its "
        "source tree."
    )


def interface(platform: str, root: pathlib.Path) -> str | None:
    """The INTERFACE of a module built from the source tree `root`: None if it is no source tree.

    A digest of what is compiled into the handlers of a platform, as `CMakeLists.txt` makes it. An
    installed package has no such sources next to it, and brought its modules along.
    """
    if not (root / "ffi" / "module.h").is_file():
        return None
    other = {"cpu": "_cuda", "cuda": "_cpu"}[platform]
    files = [*root.glob("common/*.h"), *root.glob("ffi/*.h"), *root.glob("ffi/*.cc")]
    lines = sorted(
        f"{f.parent.name}/{f.name} {hashlib.sha256(f.read_bytes()).hexdigest()}\n"
        for f in files
        if not f.stem.endswith(other)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def register() -> None:
    """Loads and registers the handlers of every platform; called once, by `import jaxops`.

    A platform without handlers runs the reference, and its first program says why in a warning.
    """
    _search_installed_copy()
    for platform, module_name in PLATFORMS.items():
        _statuses[platform] = _register(platform, module_name)


def _search_installed_copy() -> None:
    """Lets a source tree on `sys.path` use the compiled modules of the installed jaxops.

    `python -m jaxops` in a clone imports the clone, while `pip install .` put the modules into
    site-packages. Files of this tree still come first.
    """
    package = sys.modules["jaxops"]
    try:
        installed = importlib.metadata.distribution("jaxops").locate_file("jaxops")
    except importlib.metadata.PackageNotFoundError:
        return
    if str(installed) not in package.__path__:
        package.__path__.append(str(installed))


def _register(platform: str, module_name: str) -> PlatformStatus:
    how = "JAXOPS_CUDA=on pip install ." if platform == "cuda" else "pip install ."
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        cpu = _modules.get("cpu") if platform == "cuda" else None
        why = f", because {cpu.CPU_ONLY}" if cpu is not None and cpu.CPU_ONLY else ""
        return PlatformStatus(
            platform,
            available=False,
            reason=f"{module_name} was not built into this installation{why}. Rebuild jaxops with "
            f"`{how}` in its source tree.",
        )
    except ImportError as error:
        return PlatformStatus(
            platform, available=False, reason=f"{module_name} could not be loaded: {error}"
        )
    try:
        check_version(module.FFI_VERSION, module.JAXLIB_VERSION, running_ffi_version())
    except ImportError as error:
        return PlatformStatus(platform, available=False, reason=str(error))
    root = pathlib.Path(__file__).parents[2]
    if interface(platform, root) not in (None, module.INTERFACE):
        return PlatformStatus(
            platform,
            available=False,
            reason=f"{module.__file__} was built from other sources than those in {root}. Rebuild "
            f"jaxops with `{how}` there.",
        )
    _modules[platform] = module
    handlers = module.registrations()
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform=_XLA_NAMES[platform])
    return PlatformStatus(
        platform,
        available=True,
        targets=tuple(sorted(handlers)),
        build=module.BUILD,
    )


def builds() -> tuple[tuple[str, str | None], ...]:
    """The sources and targets that the modules of the platforms were built of and for."""
    return tuple((status.platform, status.build) for status in _statuses.values())


def has_bf16_matrices() -> bool:
    """Whether CPU kernels multiply bfloat16 matrices, by AMX, on this processor."""
    return "cpu" in _modules and _modules["cpu"].has_bf16_matrices()


def cuda_module() -> types.ModuleType:
    """The compiled CUDA module. RuntimeError: why there is none."""
    if "cuda" not in _modules:
        raise RuntimeError(_statuses["cuda"].reason)
    return _modules["cuda"]


@dataclasses.dataclass
class _Recording:
    """A lowering for a GPU that need not be here."""

    capability: str
    calls: list[tuple[str, Sequence[Any], Sequence[Any], dict[str, Any]]]


_recording: contextvars.ContextVar[_Recording | None] = contextvars.ContextVar(
    "_recording", default=None
)


@contextlib.contextmanager
def recording_calls(capability: str) -> Generator[list]:
    """Lowers for GPUs of a compute capability, and lists the calls of handlers.

    Each with its target, operands, results and attributes.
    """
    cuda_module()
    recording = _Recording(capability, [])
    token = _recording.set(recording)
    try:
        yield recording.calls
    finally:
        _recording.reset(token)


def ffi_call(target: str, results: Sequence[jax.ShapeDtypeStruct], **options: Any) -> Callable:
    """`jax.ffi.ffi_call`, for calls that can be recorded."""
    call = jax.ffi.ffi_call(target, results, **options)

    def recorded(*operands: Any, **attributes: Any) -> Any:
        recording = _recording.get()
        if recording is not None:
            recording.calls.append((target, operands, results, attributes))
        return call(*operands, **attributes)

    return recorded


def gpu_capabilities() -> set[str]:
    """The compute capabilities of the GPUs that programs are for, such as "9.0"."""
    recording = _recording.get()
    return compat.gpu_capabilities() if recording is None else {recording.capability}


def cuda_architectures() -> tuple[str, ...]:
    """The GPU architectures that the CUDA kernels are compiled for, such as "90a"."""
    module = _modules.get("cuda")
    return tuple(module.ARCHITECTURES.split(", ")) if module is not None else ()


class _Unbounded(types.SimpleNamespace):
    def __getattr__(self, name: str) -> int:
        return sys.maxsize


def limits(operator: str) -> types.SimpleNamespace:
    """The limits that calls of an operator on CUDA devices keep to; see `ffi/limits.h`.

    Every module tells them. Without one there are no kernels, and no bounds.
    """
    for module in _modules.values():
        return types.SimpleNamespace(**module.LIMITS[operator])
    return _Unbounded()


def conv_is_kernel_grad_split(*sizes: Sequence[int]) -> bool:
    """Whether float32 of a CUDA call is split for tensor cores; see `ffi/conv_cuda.h`."""
    return _modules["cuda"].conv_is_kernel_grad_split(*sizes)


# As XLA numbers them.
_NUMBERS = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 16,
}


def encode_array(array: Any) -> tuple[int, tuple[int, ...]]:
    """An operand or a result as the modules take it: the number of its dtype, and its shape."""
    return _NUMBERS[np.dtype(array.dtype).name], tuple(map(int, array.shape))


def encode_attribute(name: str, value: Any) -> tuple[str, str, int, int, bytes]:
    """An attribute as the modules take it: name, kind, number of the dtype, size and bytes."""
    if isinstance(value, str):
        return name, "string", _NUMBERS["int8"], len(value), value.encode()
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    value = np.asarray(value)
    return name, kind, _NUMBERS[value.dtype.name], value.size, value.tobytes()


def work_space(
    target: str, operands: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, Any]
) -> list[jax.ShapeDtypeStruct]:
    """The work space of a call on CUDA devices, its last result; none where it needs none.

    The handler of the call tells its size, in the CPU module too, for exports.
    """
    size = _ask("work_space_bytes", target, operands, results, attributes)
    return [jax.ShapeDtypeStruct((size,), np.uint8)] if size else []


def prefers_kernels(
    target: str, operands: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, Any]
) -> bool:
    """Whether CUDA devices are to run the kernels of a call, and not XLA's program of it.

    Without a module that could tell, they are to: `use_kernels` says what is missing.
    """
    return not _modules or _ask("prefers_kernels", target, operands, results, attributes)


def _ask(query, target, operands, results, attributes):
    module = _modules.get("cuda", _modules.get("cpu"))
    assert module is not None  # or nothing would be lowered to a handler
    return getattr(module, query)(
        target,
        [encode_array(a) for a in operands],
        [encode_array(r) for r in results],
        [encode_attribute(*a) for a in sorted(attributes.items())],
    )


def status() -> list[PlatformStatus]:
    """The handlers of each platform."""
    return list(_statuses.values())


class NoKernelWarning(UserWarning):
    """A call that has no kernel here runs in plain JAX.

    Example:
      >>> import warnings
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", jaxops.NoKernelWarning)  # no kernel is an error
      ...     y = jaxops.conv2d(jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 4)))
      >>> y.shape
      (1, 8, 8, 4)
    """


def missing_kernels(platform: str) -> str | None:
    """Why operators run their reference on a platform, and what to do; None where kernels run."""
    found = _statuses[platform]
    if not found.available:
        return found.reason
    if platform != "cuda":
        return None
    without = sorted(c for c in gpu_capabilities() if not has_code(c))
    if not without:
        return None
    return (
        f"{PLATFORMS[platform]} has code for sm {', '.join(cuda_architectures())}, which GPUs of "
        f"compute capability {' and '.join(without)} do not run. "
        + (
            "jaxops needs compute capability 8.0 or later."
            if all(int(c.split(".")[0]) < 8 for c in without)
            else "Rebuild jaxops on a machine with these GPUs with `pip install .` in its source "
            "tree, or name their architectures in JAXOPS_CUDA_ARCHS."
        )
    )


def has_code(capability: str) -> bool:
    """Whether the CUDA module has code for GPUs of a compute capability such as "9.0"."""
    major, minor = map(int, capability.split("."))
    if _recording.get() is not None:  # choices do not depend on it
        return major >= 8
    architectures = cuda_architectures()
    # Code runs on later GPUs of the same generation, unless it is for features of one only; PTX,
    # which an architecture may be called virtual for, on all later ones.
    of_generation = [f"{major}{i}" for i in range(minor + 1)] + [f"{major}{minor}a"]
    virtual = [int(a.removesuffix("-virtual")) for a in architectures if a.endswith("-virtual")]
    return major >= 8 and (
        any(a in architectures for a in of_generation)
        or any(v <= 10 * major + minor for v in virtual)
    )


def _refuse(function: str, platform: str, reason: str) -> None:
    """Raises where a call insists on kernels that there are not."""
    raise NotImplementedError(
        f"{function}: implementation='native' needs kernels for platform {platform!r}: {reason}"
    )


def refuse_elsewhere(operator: str, ctx, handled: Sequence[str]) -> None:
    """Raises where a lowering for a platform without handlers insists on them."""
    function = implementation.needs_kernels(operator)
    if function is not None:
        others = [p for p in compat.platforms(ctx) if p not in handled]
        _refuse(function, ", ".join(others), f"there are some for {' and '.join(handled)} only")


def refuse_symbolic(operator: str, platform: str) -> None:
    """Raises where a lowering insists on kernels whose work space needs sizes that are numbers."""
    function = implementation.needs_kernels(operator)
    if function is not None:
        _refuse(function, platform, "their work space needs sizes that are numbers")


def use_kernels(operator: str, platform: str, ctx) -> bool:
    """Whether a lowering for a platform calls its handlers, or else the reference, with a warning.

    Exporting needs only a module that tells work spaces and limits: the machine that runs the
    export must have the handlers.
    """
    reason = None if compat.exporting(ctx) and _modules else missing_kernels(platform)
    if reason is None:
        return True
    function = implementation.needs_kernels(operator)
    if function is not None:
        _refuse(function, platform, reason)
    if os.environ.get(REQUIRE_VARIABLE, "0") not in ("", "0"):
        raise RuntimeError(f"jaxops has no kernels for platform {platform!r}: {reason}")
    if reason not in _warned:
        warnings.warn(
            f"jaxops runs on platform {platform!r} without its kernels, in jax.numpy: {reason} "
            f"{REQUIRE_VARIABLE}=1 in the environment makes this an error.",
            NoKernelWarning,
            stacklevel=2,
        )
        _warned.add(reason)
    return False


def allows_new_kernels() -> bool:
    """Whether lowerings for CUDA devices choose kernels even if these are new, or XLA is faster.

    Dry runs, for which there is no device, always look at them, and so do calls that insist on
    kernels.
    """
    return (
        _recording.get() is not None
        or implementation.insists()
        or os.environ.get(NEW_KERNELS_VARIABLE) == "on"
    )


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Allows the operators' custom calls in `jax.export`."""
    return [jax.export.DisabledSafetyCheck.custom_call(t) for t in TARGETS]
