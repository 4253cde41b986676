"""`.ci/run`, the hooks of pre-commit and the hosted workflow agree."""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml
from conftest import one_in

import jaxops
from jaxops._core import compat

ROOT = pathlib.Path(__file__).parents[1]
RUN = ROOT / ".ci" / "run"

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(not RUN.exists(), reason="only a clone has .ci"),
]


def run(*arguments):
    return subprocess.run([RUN, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def sections():
    listed = run("--list")
    assert listed.returncode == 0
    return [line.split()[0] for line in listed.stdout.splitlines()]


def test_every_section_has_its_code(sections):
    assert "lint" in sections
    assert re.findall(r"^run_(\w+)\(\)", RUN.read_text(), re.MULTILINE) == sections


@pytest.mark.parametrize("name", ["no_such", "lint,oldest", ""])
def test_unknown_sections_are_refused(name, sections):
    refused = run("lint", name)
    assert refused.returncode == 1
    assert f"there is no section '{name}'; there are: {' '.join(sections)}" in refused.stderr


def test_hosted_ci_runs_every_section_once(sections):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    jobs = workflow["jobs"].values()
    assert all(job["steps"][-1] == {"run": ".ci/run ${{ matrix.section }}"} for job in jobs)
    named = " ".join(entry for job in jobs for entry in job["strategy"]["matrix"]["section"])
    assert sorted(named.split()) == sorted(sections)


def locked(name):
    """The versions of a file that `.ci/lock` writes, each with a hash."""
    lines = (RUN.parent / name).read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found)
    return {match[1].lower().replace("_", "-"): match[2] for match in found}


def test_locks_have_what_is_installed():
    (oldest,) = re.findall(r"^OLDEST_JAX=(.+)$", RUN.read_text(), re.MULTILINE)
    (pre_commit,) = re.findall(r"^PRE_COMMIT=(.+)$", RUN.read_text(), re.MULTILINE)
    packages = locked("oldest.txt")
    assert packages["jax"] == packages["jaxlib"] == oldest
    assert locked("lint.txt")["pre-commit"] == pre_commit
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [
        line
        for name in ("test", "examples", "bench", "distributed", "flax")
        for line in extras[name]
    ]
    names = {re.match(r"[\w-]+", line)[0].lower() for line in wanted} - {"jaxops"}
    assert names <= set(packages)


def test_the_oldest_jax_is_the_same_everywhere():
    (oldest,) = re.findall(r"^OLDEST_JAX=(.+)$", RUN.read_text(), re.MULTILINE)
    assert compat.TESTED_JAX[0] == oldest
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    tools = next(hook for hook in hooks if hook["id"] == "pyright")["additional_dependencies"]
    assert {f"jax=={oldest}", f"jaxlib=={oldest}"} <= set(tools)
    assert all("==" in tool for tool in tools)
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    tested = [entry["jax"] for entry in release["jobs"]["test"]["strategy"]["matrix"]["include"]]
    assert set(tested) == {f"jax=={oldest} jaxlib=={oldest}", "jax"}
    # The configuration of the hooks has the only copy of these versions.
    for tool in ("ruff", "clang-format", "pyright"):
        assert f"{tool}==" not in RUN.read_text()


def test_the_version_is_that_of_the_project_and_of_the_newest_changes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert jaxops.__version__ == project["version"] == newest.group(1)


Item = collections.namedtuple("Item", "nodeid")


@pytest.mark.parametrize("share", [1, 3, 1000])
def test_a_share_of_the_parameters_has_every_test(share):
    sizes = {"a.py::one": 1, "a.py::seven": 7, "b.py::seven": 7, "b.py::many": 100}
    items = [Item(f"{name}[{n}]") for name, size in sizes.items() for n in range(size)]
    kept = one_in(share, items)
    assert kept == sorted(kept, key=items.index)
    assert kept == one_in(share, items)
    assert (kept == one_in(share, items, "another")) == (share == 1)
    counts = collections.Counter(item.nodeid.split("[")[0] for item in kept)
    assert counts == {name: -(-size // share) for name, size in sizes.items()}
