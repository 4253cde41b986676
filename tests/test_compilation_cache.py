"""The persistent compilation cache and programs over several devices."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import processes
import pytest

from jaxops._core import cache_key
from jaxops._families.windows import Windows

PROGRAMS = pathlib.Path(__file__).with_name("cache_programs.py")


def run_programs(directory, *, pointer_in_key, rounds=1, count=1000):
    """A list of pairs: whether a program's values were right, and its number of cache hits."""
    arguments = (PROGRAMS, directory, pointer_in_key, rounds, count)
    return json.loads(processes.run_python(arguments))


def test_programs_that_differ_never_share_an_entry_and_equal_ones_do(tmp_path):
    first = run_programs(tmp_path, pointer_in_key=False)
    assert first == [[True, 0]] * len(first)
    second = run_programs(tmp_path, pointer_in_key=False)
    assert second == [[True, 1]] * len(first)


def test_nothing_is_wrong_in_the_default_configuration(tmp_path):
    """The key then has the `id` of an object, and ids of dead objects are used again."""
    report = run_programs(tmp_path, pointer_in_key=True, rounds=20, count=3)
    assert all(right for right, _ in report)


DIFFERENT = [
    None,
    True,
    1,
    1.0,
    -0.0,
    0.0,
    "1",
    (1,),
    [1],
    ((1,), 2),
    (1, (2,)),
    np.float32(1),
    np.dtype(np.float32),
    jax.numpy.bfloat16,
    jax.lax.Precision.HIGHEST,
    jax.lax.Precision.HIGH,
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    Windows((4,), (4,), (1,), (1,), (1,), (0,), True),
    Windows((4,), (4,), (1,), (1,), (2,), (0,), True),
]


def test_different_static_values_have_different_texts():
    texts = [cache_key.canonical(value) for value in DIFFERENT]
    assert len(set(texts)) == len(texts)
    assert not any(" at 0x" in text for text in texts)
    assert cache_key.canonical({"b": 2, "a": 1}) == cache_key.canonical({"a": 1, "b": 2})


@pytest.mark.parametrize("value", [len, lambda: 0, object(), object])
def test_what_has_no_canonical_text_is_refused(value):
    with pytest.raises(TypeError, match="has no canonical text"):
        cache_key.canonical(value)
