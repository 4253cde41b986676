"""The README's example runs, and its commands are where `.ci/run` finds them."""

from __future__ import annotations

import pathlib
import re
import shlex

import numpy as np
import pytest

import jaxops

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def command(name):
    """The one line of the code block that follows `<!-- name -->`."""
    (line,) = re.findall(rf"^<!-- {name} -->\n```sh\n(.+)\n```$", README, re.MULTILINE)
    return line


def test_example(capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["gradient"].shape == (8, 7)
    assert names["of_each"].shape == (4, 8, 7)
    # The sequences have equal lengths, so the mean of their losses is the loss of all.
    np.testing.assert_allclose(
        names["of_each"].mean(axis=0), names["gradient"], rtol=1e-3, atol=1e-6
    )
    assert "(8, 7) (4, 8, 7)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "extra", "main"),
    [
        ("demo-command", "flax", "-m jaxops demo"),
        ("test-command", "test", "-m pytest -n 2 --one-in 8 tests"),
    ],
)
def test_commands(name, extra, main):
    venv, install, run = command(name).split(" && ")
    assert shlex.split(venv) == ["python", "-m", "venv", ".venv"]
    assert shlex.split(install) == [".venv/bin/pip", "install", "-v", f".[{extra}]"]
    assert run == f".venv/bin/python {main}"


@pytest.mark.parametrize("name", jaxops.__all__)
def test_public_names(name):
    assert f"`jaxops.{name}`" in README
