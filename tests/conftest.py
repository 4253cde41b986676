"""Fixtures of all tests: eight virtual CPU devices, float64, and the platforms of this machine."""

from __future__ import annotations

import os

import jax
import pytest

from jaxops.testing import platforms
from jaxops.testing.measure import hasty_options

platforms.prepare()
# The workers of pytest-xdist share the GPU, and the first would take most of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

FOUND = {name: platforms.find(name) for name in platforms.NAMES}
PRESENT = [p for p in FOUND.values() if isinstance(p, platforms.Platform)]
#: Files of another tree, see `test_recipe.py`.
collect_ignore = ["toy_operator"]
REQUIRED_VARIABLE = "JAXOPS_REQUIRE_PLATFORMS"


def pytest_configure(config):
    required = [name for name in os.environ.get(REQUIRED_VARIABLE, "").split(",") if name]
    unknown = sorted(set(required) - set(FOUND))
    if unknown:
        raise pytest.UsageError(f"{REQUIRED_VARIABLE} has {unknown}; there are {list(FOUND)}")
    absent = [FOUND[n] for n in required if isinstance(FOUND[n], platforms.Absent)]
    if absent:
        reasons = "; ".join(f"{p.name}: {p.reason}" for p in absent)
        raise pytest.UsageError(f"{REQUIRED_VARIABLE} requires what is absent. {reasons}")


def pytest_report_header(config):
    lines = [f"jax {jax.__version__}"]
    for name, found in FOUND.items():
        if isinstance(found, platforms.Absent):
            lines.append(f"platform {name}: NOT TESTED, {found.reason}")
        else:
            lines.append(f"platform {name}: {len(found.devices)} x {found.device.device_kind}")
    return lines


@pytest.fixture
def hasty():
    """`hasty_options` for the default device."""
    name = jax.default_backend()
    return hasty_options(FOUND["cuda" if name == "gpu" else name])


def pytest_generate_tests(metafunc):
    if "platform" in metafunc.fixturenames:
        metafunc.parametrize("platform", PRESENT, ids=str)
