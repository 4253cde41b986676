"""CUDA kernels that are plain C++, executed on the host under sanitizers: a fiber is a thread.

An access outside of an array or of shared memory, an access that is not aligned to its vector, and
a result that depends on the order of threads fail there without a GPU. `kernels_on_host/*.cc` have
the calls, and their definitions in float64.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "kernels_on_host"
#: Operators all of whose kernels are plain C++, and programs of `SOURCES`.
PROGRAMS = ["dynamic_conv", "im2col", "lightweight_conv_segments", "lightweight_conv_step", "taps"]
#: The sources in `cuda` of programs whose operators have other kernels, too.
SOURCES = {
    "lightweight_conv_segments": [
        "lightweight_conv/nct/causal.cu",
        "lightweight_conv/ntc/short.cu",
        "lightweight_conv/ntc/window.cu",
        "lightweight_conv/packed.cu",
        "lightweight_conv/partial_sums.cu",
        "segment_starts/dispatch.cu",
    ],
}
#: Code of device compilers, and what stands for it. Each is somewhere in the sources.
REPLACEMENTS = {
    r"(\w+)<<<(.+?), (\w+), (\w+), \w+>>>\((\w+)\);": r"host_cuda::Run(\1, \2, \3, \4, \5);",
    r"(\w+<[\w(), .<>]+>)\s*<<<(.+?), (\w+), (\w+), \w+>>>\((\w+)\);": (
        r"host_cuda::Run(\1, \2, \3, \4, \5);"
    ),
    r"#include <cuda_pipeline\.h>\n": "",
    r'asm volatile\("cp\.async\.wait_group %0;" ::"n"\((\w+)\) : "memory"\);': (
        r"host_cuda::WaitForCopies(\1);"
    ),
    r'asm volatile\("st\.global\.v[24][^#]*?: "memory"\);': (
        "*reinterpret_cast<Vector<T, kCount>*>(address) = vector;"
    ),
    r"extern __shared__ (?:__align__\(\w+\) )?([\w ]+) (\w+)\[\];": (
        r"\1* const \2 = static_cast<\1*>(host_cuda::Shared());"
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the sources that a host compiler understands."""
    tree = tmp_path_factory.mktemp("sources")
    found = dict.fromkeys(REPLACEMENTS, 0)
    for file in [*(ROOT / "cuda").rglob("*.*"), *(ROOT / "common").glob("*.h")]:
        text = file.read_text()
        for pattern, replacement in REPLACEMENTS.items():
            text, count = re.subn(pattern, replacement, text)
            found[pattern] += count
        copy = tree / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    assert all(found.values())
    shutil.copytree(FOLDER, tree / "tests" / FOLDER.name)
    return tree


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, sources, tmp_path):
    pytest.importorskip("jaxops._cuda")  # once a CI run is enough
    compiler = os.environ.get("CXX") or shutil.which("c++")
    nvcc = shutil.which("nvcc")
    if compiler is None or nvcc is None:
        pytest.skip("there is no C++ compiler, or no CUDA toolkit with its headers")
    found = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], check=True, capture_output=True, text=True
    )
    headers = re.findall(r'"-I(.+?)"', found.stderr)[0]
    options = ["-std=c++20", "-O0", "-g1", "-w", '-DJAXOPS_CUDA_ARCHITECTURES="80"']
    options += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    options += [f"-I{sources}", f"-isystem{headers}"]
    options += ["-include", sources / "tests" / FOLDER.name / "device.h", "-x", "c++"]
    here = sources / "tests" / FOLDER.name
    if name in SOURCES:
        kernels = [sources / "cuda" / file for file in SOURCES[name]]
    else:
        kernels = [*(sources / "cuda" / name).glob("*.c[cu]")]
    files = [here / f"{name}.cc", here / "device.cc", *kernels]
    program = tmp_path / name
    subprocess.run([compiler, *options, *files, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_program_is_run():
    programs = {file.stem for file in FOLDER.glob("*.cc")} - {"device"}
    assert sorted(programs) == PROGRAMS
