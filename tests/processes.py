"""Python in processes of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

import jaxops


def environment(**changes: str) -> dict[str, str]:
    """The variables of a process that imports the package under test."""
    path = [str(pathlib.Path(jaxops.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **changes, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run_python(arguments: Sequence[object], changes: Mapping[str, str] | None = None) -> str:
    """The output of Python, which imports the package under test; it must exit with 0."""
    found = environment(**(changes or {}))
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=found)
    assert done.returncode == 0, done.stderr
    return done.stdout
