"""All declared operators: every module of `specs`, in the order of their names."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from jaxops.testing import specs
from jaxops.testing.spec import OperatorSpec


@functools.cache
def all_specs() -> tuple[OperatorSpec, ...]:
    """The `SPECS` of every module in `specs`."""
    names = sorted(module.name for module in pkgutil.iter_modules(specs.__path__))
    modules = [importlib.import_module(f"{specs.__name__}.{name}") for name in names]
    return tuple(spec for module in modules for spec in module.SPECS)


def operators() -> tuple[str, ...]:
    """The public names of the declared operators."""
    return tuple(dict.fromkeys(spec.operator for spec in all_specs()))
