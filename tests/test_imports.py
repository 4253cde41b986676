"""The imports inside the package, read from its import statements.

    flax, testing, tools -> operators -> _families -> reference -> activations

A part may import the parts to its right, and `_core`, which imports nothing but itself; a reference
imports no more of `_core` than its dtypes. No operator or family imports another, except that steps
of the lightweight convolution have its derivatives.
"""

from __future__ import annotations

import ast
import pathlib

import pytest

import jaxops

pytestmark = pytest.mark.any_jax

PACKAGE = pathlib.Path(jaxops.__file__).parent
#: These modules import operators, and no operator imports them.
USERS = {"__init__", "__main__", "_bench", "_cli", "benchmarks", "flax", "testing"}
#: The modules that the other parts of the package may import, next to their own part.
ALLOWED = {
    "_core": (),
    "activations": (),
    "reference": ("_core.dtypes", "activations"),
    "_families": ("_core", "reference"),
}
OF_OPERATORS = ("_core", "_families", "activations", "reference")
ALLOWED["lightweight_conv_step"] = (*OF_OPERATORS, "lightweight_conv")


def modules() -> dict[str, pathlib.Path]:
    """The modules of the package by their names, without the package's name."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


MODULES = modules()
PARTS = sorted({name.split(".")[0] for name in MODULES} - USERS)


def imports_of(name: str) -> set[str]:
    """The modules and names of the package that this module imports, at any level."""
    path = MODULES[name]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            # `from jaxops import x` is an import of jaxops.x if there is such a module.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {n.removeprefix("jaxops.") for n in found if f"{n}.".startswith("jaxops.")}


def is_within(name: str, part: str) -> bool:
    return f"{name}.".startswith(f"{part}.")


@pytest.mark.parametrize("part", PARTS)
def test_imports_go_one_way(part):
    allowed = (part, *ALLOWED.get(part, OF_OPERATORS))
    wrong = [
        f"{name} imports {imported}"
        for name in MODULES
        if is_within(name, part)
        for imported in sorted(imports_of(name))
        if not any(is_within(imported, other) for other in allowed)
    ]
    assert not wrong


def test_families_know_nothing_of_each_other():
    families = [name for name in MODULES if name.startswith("_families.")]
    assert families
    for name in families:
        others = [i for i in imports_of(name) if is_within(i, "_families")]
        assert not others, name


def test_every_part_is_looked_at():
    """Several operators import a family, and _core is below all of them."""
    assert {*ALLOWED, "concatenate", "conv", "focal_loss"} <= {*PARTS}
    operators = [part for part in PARTS if part not in ALLOWED]
    users = {
        family: {
            part
            for part in operators
            for name in MODULES
            if is_within(name, part)
            if any(is_within(i, family) for i in imports_of(name))
        }
        for family in MODULES
        if family.startswith("_families.")
    }
    assert all(len(found) > 1 for found in users.values()), users
