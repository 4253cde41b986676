"""Random calls of every operator, others for each `--choice`, as many as `--cases` says.

A failure prints the smallest such call that was found, and how to have it again.
"""

from __future__ import annotations

import zlib

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

from jaxops.testing import registry, strategies
from jaxops.testing.random_calls import check_call

_CALLS_BETWEEN_CLEARED_CACHES = 100


@st.composite
def in_axes(draw, ranks):
    """An axis or None for the cotangents and every argument; one or more of them are batched."""
    axes = [draw(st.sampled_from([None, 0]))]
    axes += [draw(st.sampled_from([None, *range(rank + 1)])) for rank in ranks]
    return (0, *axes[1:]) if all(axis is None for axis in axes) else tuple(axes)


@pytest.mark.parametrize("operator", registry.operators())
def test_random_calls(operator, platform, request):
    done = 0

    @hypothesis.seed(zlib.crc32(request.config.getoption("--choice").encode()))
    @hypothesis.settings(
        max_examples=request.config.getoption("--cases"),
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=True,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.data())
    def check(data):
        nonlocal done
        spec = data.draw(strategies.calls(operator))
        dtype = data.draw(st.sampled_from(spec.dtypes))
        axes = data.draw(in_axes([array.ndim for array in spec.case(dtype)]))
        hypothesis.note(f"{spec} in {dtype}")
        with jax.default_device(platform.device):
            check_call(spec, platform, dtype, axes)
        done += 1
        if done % _CALLS_BETWEEN_CLEARED_CACHES == 0:
            jax.clear_caches()  # hundreds of programs of every operator

    check()
    assert done
