"""The choice by `pip install` and CMake of the modules to build, on invented machines."""

from __future__ import annotations

import collections
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import types

import pytest

from jaxops._core import native

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parents[1]
CHOICE = ROOT / "cmake" / "choose_cuda.cmake"

# nvcc 13.0 lists these.
KNOWN = "75 80 86 87 88 89 90 100 103 110 120 121"


# The nvcc of the test extra need not be on the path.
PLACES = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
CMAKE = shutil.which("cmake", path=PLACES)
needs_cmake = pytest.mark.skipif(CMAKE is None, reason="there is no CMake; pip install cmake")


@pytest.fixture
def choose(tmp_path):
    """Runs the choice on a machine with these GPUs, this nvcc and these variables."""

    def program(name, output):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{output}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def run(gpus=None, devices="", nvcc=None, known=KNOWN, cuda=None, archs=None):
        smi = "" if gpus is None else program("nvidia-smi", f"printf '%s\\n' {gpus}")
        compiler = ""
        if nvcc is not None:
            listed = " ".join(f"compute_{k}" for k in known.split())
            compiler = program(
                "nvcc",
                f"[ $1 = --version ] && echo 'Cuda compilation tools, release, V{nvcc}' ||"
                f" printf '%s\\n' {listed}",
            )
        script = tmp_path / "script.cmake"
        script.write_text(
            f"include({CHOICE})\n"
            'execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${JAXOPS_CPU_ONLY}|${JAXOPS_NVCC}|'
            '${JAXOPS_NVCC_VERSION}|${CMAKE_CUDA_ARCHITECTURES}")\n'
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXOPS_CUDA")}
        environment |= {} if cuda is None else {"JAXOPS_CUDA": cuda}
        environment |= {} if archs is None else {"JAXOPS_CUDA_ARCHS": archs}
        done = subprocess.run(
            [
                CMAKE,
                f"-DJAXOPS_NVIDIA_SMI={smi}",
                f"-DJAXOPS_GPU_DEVICES={devices}",
                f"-DJAXOPS_NVCC={compiler}",
                "-P",
                script,
            ],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            # CMake breaks the lines, and writes the file and line of the call.
            message = done.stderr.split("Call Stack")[0].split("(message):", 1)[1]
            return "error", " ".join(message.split())
        assert not done.stderr
        cpu_only, found, version, architectures = done.stdout.strip().split("|")
        if cpu_only:
            return "cpu", cpu_only
        assert (found, version) == (str(compiler), nvcc)
        return "cuda", architectures

    return run


H100 = {"gpus": "9.0"}
NVCC = {"nvcc": "13.0.88"}


@needs_cmake
@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        # No variable is set.
        ({}, ("cpu", "no GPU was found")),
        (NVCC, ("cpu", "no GPU was found")),
        (H100, ("cpu", "no nvcc was found")),
        (H100 | NVCC, ("cuda", "90a-real;90-virtual")),
        (NVCC | {"gpus": "8.6"}, ("cuda", "86-real;90-virtual")),
        (NVCC | {"gpus": "9.0 8.0 9.0"}, ("cuda", "80-real;90a-real;90-virtual")),
        (NVCC | {"gpus": "10.0"}, ("cuda", "100-real;100-virtual")),
        (NVCC | {"gpus": "12.0 8.9"}, ("cuda", "89-real;120-real;120-virtual")),
        # A driver that does not answer, and a container without nvidia-smi.
        (NVCC | {"gpus": "'No devices were found'"}, ("cpu", "no GPU was found")),
        (NVCC | {"devices": "/dev/nvidia3"}, ("cuda", "80-real;90a-real;90-virtual")),
        (NVCC | {"gpus": "'NVML library version: 535.129'; exit 18"}, ("cpu", "no GPU was found")),
        # GPUs that are too old are left out.
        (NVCC | {"gpus": "8.6 7.5"}, ("cuda", "86-real;90-virtual")),
        (
            NVCC | {"gpus": "7.5 6.1"},
            (
                "cpu",
                "the GPUs here have 6.1, 7.5, and the kernels need compute capability 8.0 or newer",
            ),
        ),
        # Variables are set.
        (H100 | NVCC | {"cuda": "off"}, ("cpu", "JAXOPS_CUDA was off")),
        (H100 | NVCC | {"cuda": "on"}, ("cuda", "90a-real;90-virtual")),
        (NVCC | {"cuda": "on"}, ("cuda", "80-real;90a-real;90-virtual")),
        (NVCC | {"cuda": "on", "archs": "90a"}, ("cuda", "90a-real")),
        (NVCC | {"archs": "80;90a"}, ("cuda", "80-real;90a-real")),
        (H100 | NVCC | {"archs": "80-real;90-virtual"}, ("cuda", "80-real;90-virtual")),
        ({"archs": "90a"}, ("cpu", "no nvcc was found")),
        ({"cuda": "auto", "archs": ""}, ("cpu", "no GPU was found")),
    ],
    ids=str,
)
def test_what_is_built(choose, machine, expected):
    assert choose(**machine) == expected


@needs_cmake
@pytest.mark.parametrize(
    ("machine", "parts"),
    [
        ({"cuda": "yes"}, ["JAXOPS_CUDA must be on, off or auto, got 'yes'"]),
        ({"cuda": "on"}, ["JAXOPS_CUDA=on, but no nvcc was found", "CUDA_HOME"]),
        (NVCC | {"cuda": "on", "gpus": "7.5"}, ["JAXOPS_CUDA=on", "have 7.5", "8.0 or newer"]),
        (NVCC | {"archs": "75"}, ["JAXOPS_CUDA_ARCHS has 75", "8.0 or newer"]),
        (NVCC | {"archs": "75-virtual"}, ["JAXOPS_CUDA_ARCHS has 75-virtual", "8.0 or newer"]),
        (NVCC | {"archs": "80-virtual"}, ["JAXOPS_CUDA_ARCHS has 80-virtual", "90-virtual"]),
        (NVCC | {"archs": "90a-virtual"}, ["JAXOPS_CUDA_ARCHS has 90a-virtual", "90-virtual"]),
        (NVCC | {"archs": "80,90a"}, ["JAXOPS_CUDA_ARCHS has '80,90a'", "80;90a"]),
        (NVCC | {"archs": "native"}, ["JAXOPS_CUDA_ARCHS has 'native'"]),
        (NVCC | {"archs": "130"}, ["nvcc 13.0.88 cannot compile for 130"]),
        (H100 | {"nvcc": "12.4.131"}, ["12.4.131", "12.5 or newer", "JAXOPS_CUDA=off"]),
        (H100 | {"nvcc": "of a broken toolkit"}, ["nvcc", "12.5 or newer"]),
        (
            {"gpus": "10.0", "nvcc": "12.6.20", "known": "80 86 87 89 90"},
            ["nvcc 12.6.20 cannot compile for 100", "install"],
        ),
    ],
    ids=str,
)
def test_what_is_refused(choose, machine, parts):
    kind, message = choose(**machine)
    assert kind == "error"
    for part in parts:
        assert part in message
    assert message.count(". ") <= 1  # one sentence, and what to do


@pytest.fixture
def choose_isas(tmp_path):
    """Runs the choice of the CPU's instruction sets, on this machine."""

    def run(asked, processor="x86_64"):
        source = tmp_path / "CMakeLists.txt"
        source.write_text(
            "cmake_minimum_required(VERSION 3.26)\nproject(choice LANGUAGES CXX)\n"
            f"set(CMAKE_SYSTEM_PROCESSOR {processor})\n"
            f"include({ROOT / 'cmake' / 'choose_isas.cmake'})\n"
            'message(STATUS "chosen: ${JAXOPS_ISAS}")\n'
        )
        done = subprocess.run(
            [CMAKE, "-S", tmp_path, "-B", tmp_path / "build"],
            env=os.environ | {"JAXOPS_CPU_ISAS": asked},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return ["error", " ".join(done.stderr.split())]
        return re.findall("chosen: (.*)", done.stdout)[0].split(";")

    return run


@needs_cmake
def test_instruction_sets(choose_isas):
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    best = "avx512" if "avx512vl" in flags else "avx2" if "avx2" in flags else "baseline"
    for asked in ("", "auto"):
        assert choose_isas(asked) == [best]
    assert choose_isas("all") == ["baseline", "avx2", "avx512"]
    assert choose_isas("avx512;baseline;avx512") == ["avx512", "baseline"]
    assert choose_isas("all", processor="aarch64") == ["baseline"]
    error, message = choose_isas("sse;avx2")
    assert error == "error"
    assert "JAXOPS_CPU_ISAS has 'sse'; it is auto, all, or a list" in message


@needs_cmake
@pytest.mark.parametrize("knows", [True, False])
def test_a_compiler_without_cxx20_is_refused(knows, tmp_path):
    compiler = tmp_path / "c++"
    older = 'for a in "$@"; do [ "$a" != -std=c++20 ] || set -- "$@" -std=c++14; done\n'
    real = shutil.which(os.environ.get("CXX", "c++"))
    compiler.write_text(f'#!/bin/sh\n{"" if knows else older}exec {real} "$@"\n')
    compiler.chmod(0o755)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\n"
        f'set(CMAKE_CXX_COMPILER "{compiler}")\n'
        "project(probe LANGUAGES CXX)\n"
        "set(CMAKE_CXX_STANDARD 20)\n"
        "set(CMAKE_CXX_EXTENSIONS OFF)\n"
        f"include({ROOT / 'cmake' / 'check_cxx.cmake'})\n"
    )
    command = [CMAKE, "-S", tmp_path, "-B", tmp_path / "build"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if knows:
        assert done.returncode == 0, done.stderr
        return
    message = " ".join(done.stderr.split())
    assert f"jaxops needs a C++20 compiler, such as GCC 11 or Clang 16, and {compiler}" in message
    assert "name another one in CXX." in message


@pytest.mark.parametrize(
    ("cpu_only", "said"),
    [
        ("no GPU was found", "built into this installation, because no GPU was found. Rebuild"),
        ("", "built into this installation. Rebuild"),  # it was built, and the file is missing
    ],
)
def test_an_installation_knows_why(cpu_only, said, monkeypatch):
    cpu = types.ModuleType("jaxops_cpu")
    cpu.CPU_ONLY = cpu_only
    monkeypatch.setitem(native._modules, "cpu", cpu)
    monkeypatch.setitem(sys.modules, "jaxops._no_such", None)
    assert said in native._register("cuda", "jaxops._no_such").reason


# --- names in a trace ----------------------------------------------------------------------------


def test_a_kernel_has_a_name_of_its_own():
    """A profiler's trace tells kernels apart by names without namespaces and folders."""
    nested = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
    bounds = rf"__launch_bounds__{nested}"
    kernel = re.compile(rf"__global__\s+void\s+(?:{bounds}\s*)?(\w+)\s*\(")
    names = collections.Counter()
    for file in sorted((ROOT / "cuda").rglob("*.cu*")):
        text = file.read_text()
        found = kernel.findall(text)
        assert len(found) == text.count("__global__ "), file
        names.update(found)
    assert len(names) > 90
    assert [name for name, count in names.items() if count > 1] == []
