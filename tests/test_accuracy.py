"""The errors of operators are no larger than those that docs/accuracy.md has."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from jaxops.testing import accuracy
from jaxops.testing.registry import all_specs

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parents[1]
ROWS = {
    (platform, row["operator"], row["variant"], row["dtype"]): row
    for platform in ("cpu", "cuda")
    for row in json.loads((ROOT / f"benchmarks/results/accuracy/{platform}.json").read_text())[
        "rows"
    ]
}
CASES = [pytest.param(spec, d, id=f"{spec}-{d}") for spec in all_specs() for d in spec.dtypes]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("spec", "dtype"), CASES)
def test_errors(spec, dtype, platform):
    kept = ROWS[platform.name, spec.operator, spec.variant, dtype]
    found = accuracy.measure(spec, dtype, platform)
    assert set(found) == set(kept) & set(accuracy.KINDS)
    larger = {kind: e for kind, e in found.items() if not e <= max(1.0, 2 * kept[kind])}
    assert not larger, f"kept were {kept}"


def test_page_is_of_the_files():
    spec = importlib.util.spec_from_file_location(
        "measure_accuracy", ROOT / "scripts" / "measure_accuracy.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert len(ROWS) == 2 * len(CASES)
    page = (ROOT / "docs" / "accuracy.md").read_text()
    start, end = script.MARKERS
    assert page.partition(f"{start}\n")[2].partition(end)[0] == script.sections()


def test_units_in_the_last_place():
    want = np.array([3.0, 0.25])
    got = np.array([3.0, 0.25 + 2.0**-22], np.float32)  # by the last place of float32 at 3
    assert accuracy.ulps(got, want, "float32") == 1
    assert accuracy.ulps(got, want, "bfloat16") == 2.0**-16
    assert accuracy.ulps(np.array([np.nan, 1], np.float32), want, "float32") == np.inf
    assert accuracy.ulps(np.zeros((0,)), np.zeros((0,)), "float64") == 0
