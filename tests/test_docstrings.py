"""The docstrings of public functions and layers have examples, which print what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pathlib
import warnings

import jax
import pytest

import jaxops
from jaxops._core import native

PACKAGE = pathlib.Path(jaxops.__file__).parent
# Read from the sources, so that layers are listed as skipped where Flax is not installed.
LAYERS = [
    f"jaxops.flax.{api}.{node.name}"
    for api in ("linen", "nnx")
    for node in ast.parse((PACKAGE / "flax" / f"{api}.py").read_text()).body
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
]
FUNCTIONS = [f"jaxops.{name}" for name in jaxops.__all__ if callable(getattr(jaxops, name))]


@pytest.mark.parametrize("name", [*FUNCTIONS, *LAYERS])
def test_example(name):
    """It runs without other imports than its own, in float32 as a reader has it."""
    if name in LAYERS:
        pytest.importorskip("flax")
    if name == "jaxops.NoKernelWarning" and native.missing_kernels(jax.default_backend()):
        pytest.skip("the example makes this warning an error")
    module, _, attribute = name.rpartition(".")
    documented = getattr(importlib.import_module(module), attribute)
    docstring = inspect.cleandoc(documented.__doc__ or "")
    test = doctest.DocTestParser().get_doctest(docstring, {}, name, None, None)
    assert test.examples, f"the docstring of {name} has no example"
    printed = []
    with warnings.catch_warnings(), jax.enable_x64(False):
        doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert "".join(printed) == ""
