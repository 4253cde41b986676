"""Finds the files of `benchmarks/`, in a clone and in an installed package."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys

from jaxops._bench.spec import Benchmark

_PACKAGE = pathlib.Path(__file__).parents[1]
# A wheel carries the folder inside the package; in a clone it lies next to the package.
_INSTALLED, _CLONE = _PACKAGE / "benchmarks", _PACKAGE.parent / "benchmarks"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _CLONE


def operators() -> tuple[str, ...]:
    """The operators that have a benchmark, in alphabetical order."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.py")))


@functools.cache
def load(operator: str) -> Benchmark:
    """The `BENCHMARK` of an operator's file."""
    name = f"jaxops.benchmarks.{operator}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{operator}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.BENCHMARK
