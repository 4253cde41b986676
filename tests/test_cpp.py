"""The host's C++ that kernels and handlers share, under sanitizers: the programs of `tests/cpp`."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parents[1]
SANITIZERS = {
    "batch_map": "address,undefined",
    "isa": "address,undefined",
    "packed_taps": "address,undefined",
    "plan_cache": "thread",
}


@pytest.mark.parametrize("name", SANITIZERS)
def test_program(name, tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / name
    sanitize = f"-fsanitize={SANITIZERS[name]}", "-fno-sanitize-recover=all"
    source = ROOT / "tests" / "cpp" / f"{name}.cc"
    words = [compiler, "-std=c++20", "-O1", "-g", "-pthread", *sanitize, f"-I{ROOT}", source]
    subprocess.run([*words, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_program_is_run():
    assert {file.stem for file in (ROOT / "tests" / "cpp").glob("*.cc")} == set(SANITIZERS)


def test_every_operator_of_the_cpu_has_random_calls():
    """`scripts/sanitize.sh` makes the calls of `random_calls`."""
    operators = {f.stem for f in (ROOT / "cpu").glob("*.cc") if not f.stem.endswith("_kernels")}
    made = {f.stem for f in (ROOT / "tests" / "random_calls").glob("*.cc")}
    assert made - operators == {"calls", "main"}
    assert operators <= made
