"""Fixtures of all tests: eight virtual CPU devices, float64, and the platforms of this machine."""

from __future__ import annotations

import collections
import math
import os
import zlib

import jax
import pytest

from jaxops.testing import platforms
from jaxops.testing.measure import hasty_options

platforms.prepare()
# The workers of pytest-xdist share the GPU, and the first would take most of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

FOUND = {name: platforms.find(name) for name in platforms.NAMES}
PRESENT = [p for p in FOUND.values() if isinstance(p, platforms.Platform)]
# XLA takes longer to optimize the machine code of most tests' programs for CPUs than to run it. XLA
# rewrites and fuses the programs all the same. The fixture `optimized` is for tests of rounding
# and of the time to compile.
HASTY = all(p.name == "cpu" for p in PRESENT)
jax.config.update("jax_disable_most_optimizations", HASTY)
#: Files of another tree, see `test_recipe.py`.
collect_ignore = ["toy_operator"]
REQUIRED_VARIABLE = "JAXOPS_REQUIRE_PLATFORMS"


def pytest_addoption(parser):
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run every test, but for one in N of its parameters; at least one (default: all)",
    )
    parser.addoption(
        "--choice",
        default="",
        metavar="TEXT",
        help="what decides which parameters --one-in takes, and which calls are random: the same "
        "text, the same parameters and calls",
    )
    parser.addoption(
        "--cases",
        type=int,
        default=5,
        metavar="N",
        help="random calls for each operator in test_random_calls.py (default: 5)",
    )


def one_in(share, items, choice=""):
    """The tests that `--one-in` keeps, in their order."""
    tests = collections.defaultdict(list)
    for item in items:
        # A platform is not a parameter to leave out.
        parameters = getattr(item, "callspec", None) and item.callspec.params
        tests[item.nodeid.split("[")[0], str((parameters or {}).get("platform"))].append(item)
    kept = set()
    for same in tests.values():
        # By a hash, so that no pattern of the parameters is that of what is left out.
        same.sort(key=lambda item: zlib.crc32(f"{choice} {item.nodeid}".encode()))
        kept.update(same[: math.ceil(len(same) / share)])
    return [item for item in items if item in kept]


@pytest.hookimpl(trylast=True)  # a share of what -k and -m select
def pytest_collection_modifyitems(config, items):
    kept = one_in(config.getoption("--one-in"), items, config.getoption("--choice"))
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def pytest_configure(config):
    share = config.getoption("--one-in")
    if share < 1:
        raise pytest.UsageError(f"--one-in takes a number from 1, got {share}")
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
    share, choice = config.getoption("--one-in"), config.getoption("--choice")
    lines.append(f"parameters and random calls: --one-in {share} --choice '{choice}'")
    for name, found in FOUND.items():
        if isinstance(found, platforms.Absent):
            lines.append(f"platform {name}: NOT TESTED, {found.reason}")
        else:
            lines.append(f"platform {name}: {len(found.devices)} x {found.device.device_kind}")
    return lines


@pytest.fixture
def optimized():
    """For questions of rounding and of the time to compile: machine code as users have it."""
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", HASTY)


@pytest.fixture
def hasty():
    """`hasty_options` for the default device."""
    name = jax.default_backend()
    return hasty_options(FOUND["cuda" if name == "gpu" else name])


def pytest_generate_tests(metafunc):
    if "platform" in metafunc.fixturenames:
        metafunc.parametrize("platform", PRESENT, ids=str)
