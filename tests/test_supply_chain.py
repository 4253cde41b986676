"""What an installation brings: hardened modules, a list of what is inside, and its licences."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shutil
import subprocess

import pytest

from jaxops._core import native

pytestmark = pytest.mark.any_jax

#: Licences that do not ask programs for their sources.
PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "LLVM-exception",
    "LicenseRef-NVIDIA-CUDA-Toolkit-EULA",  # libcudart_static is among what may be redistributed
    "MIT",
    "Python-2.0",
    "Zlib",
}
#: The licences of packages that name them in older ways.
NAMES = {
    "Apache Software License": "Apache-2.0",
    "Apache-2.0": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "MIT": "MIT",
}


def path_of_module(name):
    try:
        return importlib.import_module(f"jaxops.{name}").__file__
    except ImportError:
        pytest.skip(f"jaxops.{name} is not built here")


@pytest.fixture(scope="module")
def distribution():
    try:
        return importlib.metadata.distribution("jaxops")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxops is not installed")


@pytest.mark.parametrize("name", [f"_{platform}" for platform in native.PLATFORMS])
def test_modules_are_hardened(name):
    module = path_of_module(name)
    if shutil.which("readelf") is None:
        pytest.skip("readelf, which shows the parts of a module, is not here")
    told = ["readelf", "--dynamic", "--program-headers", "--dyn-syms", "--wide", module]
    shown = subprocess.run(told, capture_output=True, text=True, check=True).stdout
    assert re.search(r"\(FLAGS\).*BIND_NOW", shown)
    assert re.search(r"GNU_RELRO", shown)
    assert re.search(r"GNU_STACK .* RW ", shown)
    assert "__stack_chk_fail" in shown


def test_the_parts_of_the_modules_are_listed(distribution):
    (listed,) = (f for f in distribution.files if f.name == "jaxops.cdx.json")
    assert listed.parent.name == "sboms"
    parts = json.loads(listed.read_text())
    assert parts["bomFormat"] == "CycloneDX"
    assert parts["metadata"]["component"]["version"] == distribution.version
    versions = {part["name"]: part["version"] for part in parts["components"]}
    status = {s.platform: s for s in native.status()}
    assert all(re.fullmatch(r"\d+(\.\d+)+", version) for version in versions.values())
    assert ("CUDA Runtime" in versions) == status["cuda"].available
    for part in parts["components"]:
        for licence in part["licenses"]:
            assert is_permissive(licence["expression"]), part["name"]
    kept = {f.name for f in distribution.files if "licenses" in f.parts}
    assert "LICENSE" in kept


def is_permissive(expression):
    words = re.findall(r"[\w.+-]+", expression)
    return set(words) - {"AND", "OR", "WITH"} <= PERMISSIVE


def licence_of(name):
    told = importlib.metadata.metadata(name)
    if "License-Expression" in told:
        return told["License-Expression"]
    names = [c.split(" :: ")[-1] for c in told.get_all("Classifier", []) if "License ::" in c]
    return " AND ".join(NAMES.get(n, n) for n in names or [told.get("License", "none")])


def needed_by(distribution):
    """The names of the packages that an installation without extras brings."""
    found, new = set(), {"jaxops"}
    while new:
        found |= new
        lines = [line for n in new for line in importlib.metadata.requires(n) or []]
        lines = [line for line in lines if "extra ==" not in line and "sys_platform" not in line]
        new = {re.match(r"[\w.-]+", line)[0].lower() for line in lines} - found
    return found - {"jaxops"}


def test_packages_have_permissive_licences(distribution):
    licences = {name: licence_of(name) for name in needed_by(distribution)}
    assert {"jax", "jaxlib", "numpy"} <= set(licences)
    wrong = {name: licence for name, licence in licences.items() if not is_permissive(licence)}
    assert not wrong
