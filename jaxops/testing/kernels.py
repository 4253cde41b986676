"""The CUDA kernels that take a call, on a GPU that is described: none is needed.

A program is lowered for the GPU, not compiled. Its calls of handlers then run dry: the code that
chooses kernels and launches them runs as it does on a GPU, on addresses at which there is nothing,
and what it launches is recorded and checked. So arrays may be of any size, and choices are those
that a GPU of this kind gets from this build of jaxops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pathlib
import re
import struct
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxops._core import native


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU: everything that choices of kernels depend on."""

    name: str
    compute_capability: str
    multiprocessors: int
    shared_memory: int
    """KiB of shared memory that a block can have."""

    def __str__(self):
        return self.name

    def as_tuple(self) -> tuple[int, int, int, int]:
        """The form that dry runs take: the capability in two parts, multiprocessors and bytes."""
        major, minor = map(int, self.compute_capability.split("."))
        return major, minor, self.multiprocessors, self.shared_memory * 1024


#: GPUs by name, with the figures of NVIDIA's data sheets and its table of compute capabilities.
DEVICES = {
    device.name: device
    for device in (
        Device("A100", "8.0", 108, 163),
        Device("A10", "8.6", 72, 99),
        Device("L4", "8.9", 58, 99),
        Device("L40S", "8.9", 142, 99),
        Device("H100", "9.0", 132, 227),
        Device("H200", "9.0", 132, 227),
        Device("B200", "10.0", 148, 227),
        Device("RTX 5090", "12.0", 170, 99),
    )
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of a kernel, or a memset, whose sizes are all 1.

    Attributes:
      kernel: the kernel's name and template arguments; "memset"; of CUB's kernels "cub::" and the
        name.
      grid: its blocks.
      threads: those of a block.
      cluster: the blocks of a cluster.
      shared_bytes: the dynamic shared memory of a block.
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand or a result of a call."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self):
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Attribute:
    """An attribute of a call; `encoded` is the form that handlers are given."""

    name: str
    text: str
    encoded: tuple

    def __str__(self):
        return f"{self.name}={self.text}"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a handler as the library makes it. Work space is the last result."""

    target: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    attributes: tuple[Attribute, ...]

    def __str__(self):
        parts = [*map(str, self.operands), *map(str, self.attributes)]
        return f"{self.target}({', '.join(parts)}) -> {', '.join(map(str, self.results))}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a call: its launches, the error it returned and the first fault found.

    The latter two are empty unless jaxops has a fault.
    """

    launches: tuple[Launch, ...]
    error: str = ""
    violation: str = ""

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels that were launched."""
        return tuple(launch.kernel for launch in self.launches)


def kernels(
    function: Callable, *args: Any, device: str | Device = "H200"
) -> dict[Call, tuple[Launch, ...]]:
    """The calls of jaxops' CUDA handlers in `function(*args)`, and the kernels that each launches.

    Args:
      function: a function of JAX that calls operators of jaxops; of them, of their gradients
        (`jax.grad`), of anything that `jax.jit` takes.
      args: its arguments: arrays, `jax.ShapeDtypeStruct`, and trees of these.
      device: a key of `DEVICES`, or a `Device`.

    Returns:
      the launches of each call, in the order of the program; calls that are alike are one. Calls
      that XLA computes instead, because there is no kernel for them, are not in it.

    Raises:
      ValueError: there is no such device.
      RuntimeError: jaxops._cuda was not built, or a launch would fail on such a device.
    """
    described = find_device(device)
    found = {}
    for call in record(function, *args, capability=described.compute_capability):
        outcome = run(call, described)
        fault = outcome.error or outcome.violation
        if fault:
            raise RuntimeError(f"kernels: {call} on {described}: {fault}")
        found[call] = outcome.launches
    return found


def find_device(device: str | Device) -> Device:
    """The device of this name."""
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ValueError(f"kernels: device must be one of {', '.join(DEVICES)}, got {device!r}")
    return DEVICES[device]


def record(function: Callable, *args: Any, capability: str) -> tuple[Call, ...]:
    """The calls of handlers in a program for GPUs of a compute capability, without repetitions."""
    with native.recording_calls(capability) as recorded:
        # A function of its own, so that nothing of an earlier program is used again.
        traced = jax.jit(lambda *a: function(*a)).trace(*args)
        traced.lower(lowering_platforms=("cuda",))
    calls = {}
    for target, operands, results, attributes in recorded:
        call = Call(
            target,
            tuple(map(_array, operands)),
            tuple(map(_array, results)),
            tuple(sorted((_attribute(*a) for a in attributes.items()), key=lambda a: a.name)),
        )
        calls[call] = None
    return tuple(calls)


def _array(array) -> Array:
    return Array(tuple(array.shape), array.dtype.name)


def _attribute(name, value) -> Attribute:
    text = str(value if isinstance(value, str) else value.tolist())
    return Attribute(name, text, native.encode_attribute(name, value))


def run(call: Call, device: Device) -> Outcome:
    """The outcome of a call on a GPU."""
    error, violation, launches = dry_run().run(_frame(call), device.as_tuple())
    return Outcome(
        tuple(Launch(short_name(kernel), *sizes) for kernel, *sizes in launches),
        error,
        violation,
    )


def families() -> dict[str, dict[str, list[str]]]:
    """The kernel families by operator, as its folder in `cuda/` is called, and by direction.

    They are in the order in which dispatch asks them; `docs/` says which takes what, and why.
    """
    return dry_run().family_names()


@contextlib.contextmanager
def forcing(operator: str, family: str) -> Generator[None]:
    """Lets one kernel family run all calls of an operator: for tests and benchmarks.

    It holds for the whole process, in dry runs and on GPUs. A call that the family cannot run is an
    error, and so are directions that have no such family. CUDA graphs that XLA has captured before
    run what they captured.

    Args:
      operator: a key of `families()`.
      family: one of its families.

    Raises:
      ValueError: there is no such family.
    """
    known = {name for names in families().get(operator, {}).values() for name in names}
    if family not in known:
        raise ValueError(f"forcing: {operator!r} has the families {sorted(known)}, got {family!r}")
    dry_run().force_family(operator, family)
    try:
        yield
    finally:
        dry_run().force_family(operator, "")


def seconds(call: Call, device: Device, calls: int) -> list[float]:
    """The host's time in each of several calls of a handler, whose launches take none."""
    return dry_run().time(_frame(call), device.as_tuple(), calls)


@functools.cache
def dry_run() -> Any:
    """The module that makes dry runs. RuntimeError: why there is none."""
    native.cuda_module()
    module = importlib.import_module("jaxops._cuda")
    for name, found in resources().items():
        module.dry_run.set_resources(name, *found)
    return module.dry_run


def _frame(call: Call) -> Any:
    return dry_run().CallFrame(
        call.target,
        [native.encode_array(a) for a in call.operands],
        [native.encode_array(r) for r in call.results],
        [a.encoded for a in call.attributes],
    )


@functools.cache
def short_name(kernel: str) -> str:
    """A kernel's name and template arguments, from its mangled name; "memset" for none."""
    if not kernel:
        return "memset"
    text = native.cuda_module().dry_run.demangle(kernel)
    is_of_cub = "cub::" in text
    text = text.removeprefix("void ").replace("(anonymous namespace)::", "")
    text = re.sub(r"\((unsigned )?(int|char|long|bool)\)", "", text)
    text = re.sub(r"\(jaxops::[\w:]+\)", "", text)
    text = text.replace("__nv_bfloat16", "bf16").replace("__half", "f16")
    text = re.sub(r"\b(?:\w+::)+", "", text)
    text = text[: _end_of_name(text)]
    return "cub::" + text.split("<")[0] if is_of_cub else text


def _end_of_name(text: str) -> int:
    """Where a function's parameters begin, behind its template arguments."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            return i
    return len(text)


def resources() -> dict[str, tuple[int, int, int, bool]]:
    """Facts that the machine code has about each kernel, by its mangled name.

    They are registers, static shared memory, threads of a block at most, and whether a kernel has
    instructions that only GPUs of 9.0 have.
    """
    file = native.cuda_module().__file__
    assert file is not None
    return _read_resources(pathlib.Path(file).read_bytes())


# --- machine code --------------------------------------------------------------------------------

_EM_CUDA = 190
_REGISTERS, _MAX_THREADS = 0x2F, 0x05  # attributes in .nv.info
# The system's part of each block's shared memory, which is counted with that of the kernel.
_RESERVED_BYTES = 1024


# A fat binary has machine code (kind 2) and PTX. Its header has a magic number, a version, its own
# size and that of the entries.
_FAT_BINARY = re.compile(re.escape(struct.pack("<IHH", 0xBA55ED50, 1, 16)))
_MACHINE_CODE = 2
_ZSTANDARD = b"\x28\xb5\x2f\xfd"  # begins what nvcc --compress-mode=size has compressed


def _read_resources(module: bytes) -> dict[str, tuple[int, int, int, bool]]:
    # Dry runs know the registers of 9.0; a build without code for it has those of another GPU.
    found, preferred = {}, {}
    for architecture, elf in _machine_code(memoryview(module)):
        (preferred if architecture == 90 else found).update(_resources_of_elf(elf))
    return found | preferred


def _machine_code(module: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The machine code in a module's fat binaries, each with the number of its architecture."""
    for match in _FAT_BINARY.finditer(module):
        (size,) = struct.unpack_from("<Q", module, match.end())
        at = match.start() + 16
        end = at + size
        while at < end:
            kind, _, header, padded = struct.unpack_from("<HHIQ", module, at)
            compressed, _, _, architecture = struct.unpack_from("<IIII", module, at + 16)
            code = module[at + header : at + header + (compressed or padded)]
            if kind == _MACHINE_CODE:
                if bytes(code[:4]) == _ZSTANDARD:
                    code = memoryview(_decompress(code))
                if struct.unpack_from("<H", code, 18)[0] == _EM_CUDA:
                    yield architecture, code
            at += header + padded


def _decompress(code: memoryview) -> bytes:
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.decompress(code)
    try:
        import zstandard  # pyright: ignore[reportMissingImports]: an extra of tests
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The machine code of this build of jaxops._cuda is compressed, and dry runs read it: "
            "pip install zstandard."
        ) from error
    return zstandard.ZstdDecompressor().decompressobj().decompress(code)


def _resources_of_elf(elf):
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]

    def text(strings, at):
        start = headers[strings][4] + at
        return bytes(elf[start : start + 4096]).split(b"\0", 1)[0].decode()

    sections = {text(names_at, h[0]): h for h in headers}
    symbols = sections[".symtab"]
    registers = {}
    for attribute, values in _info(elf, sections.get(".nv.info")):
        if attribute == _REGISTERS:
            (name,) = struct.unpack_from("<I", elf, symbols[4] + values[0] * 24)
            registers[text(symbols[6], name)] = values[1]
    found = {}
    for section, header in sections.items():
        name = section.removeprefix(".text.")
        if name == section or name not in registers:
            continue
        shared = sections.get(f".nv.shared.{name}")
        threads = 1024
        for attribute, values in _info(elf, sections.get(f".nv.info.{name}")):
            if attribute == _MAX_THREADS:
                threads = values[0] * values[1] * values[2]
        code = np.frombuffer(elf[header[4] : header[4] + header[5]], "<u8")
        # Instructions have 16 bytes; these are HGMMA's and its kin's.
        has_wgmma = bool(np.isin(code[::2] & 0x1FF, (0x1F0, 0x1F1, 0x1F3)).any())
        static = max(shared[5] - _RESERVED_BYTES, 0) if shared else 0
        found[name] = (registers[name], static, threads, has_wgmma)
    return found


def _info(elf, header) -> Iterator[tuple[int, Sequence[int]]]:
    """The attributes of a section .nv.info that have values of 32 bits."""
    if header is None:
        return
    at, end = header[4], header[4] + header[5]
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", elf, at)
        at += 4
        if form == 4:
            yield attribute, struct.unpack_from(f"<{size // 4}I", elf, at)
            at += size
