"""An installation: hardened modules, a list of what is inside, and licences."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess

import pytest
from packaging.requirements import Requirement

from jaxops._core import native

#: Licences of packages that do not ask programs for their sources.
PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "LLVM-exception",
    "MIT",
    "PSF-2.0",
    "Python-2.0",
    "Zlib",
}
#: Licences of parts of the modules, which may be passed on in programs.
OF_PARTS = PERMISSIVE | {
    "GCC-exception-3.1",
    "GPL-3.0-or-later",
    "LicenseRef-NVIDIA-CUDA-Toolkit-EULA",
}
#: The licences of packages that name them in older ways.
NAMES = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}


def path_of_module(name):
    found = importlib.util.find_spec(f"jaxops.{name}")
    return found.origin if found else None


@pytest.fixture(scope="module")
def distribution():
    try:
        return importlib.metadata.distribution("jaxops")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxops is not installed")


@pytest.mark.any_jax
@pytest.mark.parametrize("name", [f"_{platform}" for platform in native.PLATFORMS])
def test_modules_are_hardened(name):
    module = path_of_module(name)
    if module is None:
        pytest.skip(f"jaxops.{name} is not built here")
    if shutil.which("readelf") is None:
        pytest.skip("readelf, which shows the parts of a module, is not here")
    told = ["readelf", "--dynamic", "--program-headers", "--dyn-syms", "--wide", module]
    shown = subprocess.run(told, capture_output=True, text=True, check=True).stdout
    assert re.search(r"\(FLAGS\).*BIND_NOW", shown)
    assert re.search(r"GNU_RELRO", shown)
    assert re.search(r"GNU_STACK .* RW ", shown)
    assert "__stack_chk_fail" in shown


def test_a_wheel_needs_no_newer_c_library_than_it_says(distribution):
    said = re.findall(r"manylinux_2_(\d+)", distribution.read_text("WHEEL"))
    if not said:
        pytest.skip("this installation was built for this machine alone")
    if shutil.which("readelf") is None:
        pytest.skip("readelf, which shows the versions of symbols, is not here")
    for module in filter(None, (path_of_module(f"_{platform}") for platform in native.PLATFORMS)):
        told = ["readelf", "--version-info", "--wide", module]
        shown = subprocess.run(told, capture_output=True, text=True, check=True).stdout
        needed = [int(minor) for minor in re.findall(r"\bGLIBC_2\.(\d+)", shown)]
        assert needed
        assert max(needed) <= min(map(int, said)), module


def test_the_parts_of_the_modules_are_listed(distribution):
    (listed,) = (f for f in distribution.files if f.name == "jaxops.cdx.json")
    assert listed.parent.name == "sboms"
    told = json.loads(listed.read_text())
    assert told["bomFormat"] == "CycloneDX"
    assert told["metadata"]["component"]["version"] == distribution.version
    parts = {part["name"]: part for part in told["components"]}
    assert {"nanobind", "jaxlib"} <= set(parts)
    assert ("CUDA Runtime" in parts) == (path_of_module("_cuda") is not None)
    for name, part in parts.items():
        assert re.fullmatch(r"\d+(\.\d+)+", part["version"]), name
        (licence,) = part["licenses"]
        assert words(licence["expression"]) <= OF_PARTS, name


def test_licences_are_passed_on(distribution):
    kept = {pathlib.Path(f).parts[-2:] for f in distribution.files if "licenses" in f.parts}
    wanted = {("licenses", "LICENSE"), ("nanobind", "LICENSE"), ("robin_map", "LICENSE")}
    assert wanted <= kept


def words(expression):
    found = set(re.findall(r"[\w.+-]+", expression)) - {"AND", "OR", "WITH"}
    assert found, "no licence"
    return found


def licence_of(name):
    told = importlib.metadata.metadata(name)
    if "License-Expression" in told:
        return told["License-Expression"]
    names = [c.split(" :: ")[-1] for c in told.get_all("Classifier", []) if "License ::" in c]
    return " AND ".join(NAMES.get(n, n) for n in names or [told.get("License", "none")])


def needed_packages():
    """The packages that an installation without extras brings."""
    found, new = set(), {"jaxops"}
    while new:
        found |= new
        wanted = [Requirement(line) for n in new for line in importlib.metadata.requires(n) or []]
        new = {
            r.name.lower() for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})
        } - found
    return found - {"jaxops"}


@pytest.mark.usefixtures("distribution")
def test_packages_have_permissive_licences():
    licences = {name: licence_of(name) for name in needed_packages()}
    assert {"jax", "jaxlib", "numpy"} <= set(licences)
    wrong = {name: licence for name, licence in licences.items() if words(licence) - PERMISSIVE}
    assert not wrong
