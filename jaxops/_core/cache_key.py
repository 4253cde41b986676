"""A partitioned call's part of the key of the persistent compilation cache.

JAX hashes the program into the cache's key, and of a partitioned call that holds only the shapes,
the sharding rule and a Python `id`. Python code that XLA calls back decides later what
the call computes. A digest of everything that this code depends on, kept as an attribute of the
call, makes programs that differ have different keys (jax issue 21159).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxops._core import native

_PACKAGE = pathlib.Path(__file__).parents[1]
#: Parts of the package that no operator imports.
_TOOLS = ("_bench", "_cli", "benchmarks", "flax", "testing")


def digest(*parts: Any) -> str:
    """The SHA-256 of static values, of this library's sources and of its compiled modules."""
    known = canonical((*parts, source_digest(), native.builds()))
    return hashlib.sha256(known.encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """The SHA-256 of the Python files of the operators."""
    found = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE)
        if name.parts[0] not in _TOOLS:
            found.update(f"{name.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def canonical(value: Any) -> str:
    """A text that equal static values share in every process, and different ones never.

    Raises TypeError for what has no such text, such as a function.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.dtype):
        return f"dtype:{value.name}"
    if isinstance(value, type) and np.dtype(value) != np.dtype(object):
        return f"dtype:{np.dtype(value).name}"
    if isinstance(value, np.generic):
        return f"{value.dtype.name}:{value.item()!r}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return f"{type(value).__qualname__}{canonical(fields)}"
    if isinstance(value, Mapping):
        entries = sorted(f"{canonical(k)}={canonical(v)}" for k, v in value.items())
        return f"{{{','.join(entries)}}}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({','.join(map(canonical, value))})"
    if isinstance(value, (set, frozenset)):
        return f"set({','.join(sorted(map(canonical, value)))})"
    raise TypeError(f"a static option of type {type(value).__name__} has no canonical text")
