"""`python -m jaxops check`: its checks, its output and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest

from jaxops import _cli
from jaxops._cli import check
from jaxops.testing import platforms, registry
from jaxops.testing.capabilities import Capability, NotApplicable

FIRST = registry.all_specs()[0]


def passes(spec, platform):
    pass


def fails(spec, platform):
    raise AssertionError("it is [broken]")


def breaks(spec, platform):
    raise KeyError("missing")


def is_elsewhere(spec, platform):
    raise NotApplicable("not here")


@pytest.fixture
def capabilities(monkeypatch):
    """Replaces the real capabilities by the given ones."""

    def replace(**functions):
        fakes = {n: Capability(n, "", f) for n, f in functions.items()}
        monkeypatch.setattr(check, "CAPABILITIES", fakes)

    return replace


def run_json(capsys, *arguments):
    code = _cli.main(["check", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_one_document_from_a_fresh_process():
    """Runs in a separate process, in which the command has to make the eight devices."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "jaxops", "check", FIRST.operator]
    done = subprocess.run(
        [*command, "--quick", "--json", "--platform", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["passed"] is True
    assert document["jax"] == jax.__version__
    assert document["platforms"]["cpu"]["devices"] == 8
    cells = {r["capability"]: r for r in document["results"]}
    assert list(cells) == list(check.CAPABILITIES)
    assert {r["variant"] for r in document["results"]} == {FIRST.variant}
    unanswered = {n: c["reason"] for n, c in cells.items() if c["status"] != check.PASS}
    assert unanswered == {"command buffers": "cpu has no command buffers"}


def test_everything_is_checked_everywhere(capabilities, capsys):
    capabilities(one=passes, two=is_elsewhere)
    code, document = run_json(capsys)
    present = [n for n in platforms.NAMES if isinstance(platforms.find(n), platforms.Platform)]
    assert code == 0
    assert {
        (r["platform"], r["operator"], r["variant"], r["capability"]) for r in document["results"]
    } == {
        (p, s.operator, s.variant, c)
        for p in present
        for s in registry.all_specs()
        for c in ("one", "two")
    }
    assert {(r["status"], r["reason"]) for r in document["results"]} == {
        ("pass", None),
        ("not applicable", "not here"),
    }


@pytest.mark.parametrize(
    ("function", "reason"), [(fails, "it is [broken]"), (breaks, "KeyError: 'missing'")]
)
def test_failures(capabilities, capsys, function, reason):
    capabilities(good=passes, bad=function)
    code, document = run_json(capsys, "--quick", "--platform", "cpu")
    assert code == 1
    assert document["passed"] is False
    assert [r["reason"] for r in document["results"] if r["status"] == "fail"] == [reason] * len(
        registry.operators()
    )


def test_the_matrix(capabilities, capsys):
    capabilities(good=passes, bad=fails, other=is_elsewhere)
    assert _cli.main(["check", "--platform", "cpu", FIRST.operator]) == 1
    printed = capsys.readouterr().out
    variants = [s.variant for s in registry.all_specs() if s.operator == FIRST.operator]
    for mark in check.MARKS.values():
        assert printed.count(mark.plain) >= len(variants)
    assert f"{FIRST.operator} on cpu" in printed
    assert "it is [broken]" in printed
    for variant in variants:
        assert variant in printed
    assert "not here" in printed
    n = len(variants)
    assert f"{n} pass, {n} fail, {n} not applicable" in printed


def test_quick_has_one_table_that_fits_a_narrow_terminal(capabilities, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    capabilities(good=passes, other=is_elsewhere)
    assert _cli.main(["check", "--quick", "--platform", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    n = len(registry.operators())
    assert max(map(len, lines)) <= 80
    (good,) = (line for line in lines if line.startswith("good"))
    assert good.count(check.MARKS[check.PASS].plain) == n
    for number, operator in enumerate(registry.operators(), 1):
        assert any(line.startswith(f"{number:3}  {operator}[") for line in lines)
    assert lines[-1].startswith(f"{n} pass, 0 fail, {n} not applicable")


def test_absent_platforms(capabilities, capsys, monkeypatch):
    find = platforms.find

    def find_cpu_only(name):
        return find(name) if name == "cpu" else platforms.Absent(name, f"no {name} [here]")

    monkeypatch.setattr(platforms, "find", find_cpu_only)
    capabilities(good=passes)
    assert _cli.main(["check", "--platform", "cuda"]) == 2
    assert "cuda: no cuda [here]" in capsys.readouterr().err
    code, document = run_json(capsys, "--quick")
    assert code == 0
    assert document["platforms"]["cuda"] == {"devices": 0, "kind": None, "reason": "no cuda [here]"}
    assert _cli.main(["check", "--quick"]) == 0
    assert "cuda: not checked. no cuda [here]" in capsys.readouterr().out


def test_unknown_operators(capsys):
    with pytest.raises(SystemExit, match="2"):
        _cli.main(["check", "no_such_operator"])
    assert "there is no operator 'no_such_operator'" in capsys.readouterr().err
