"""A case that the user names: the shape, dtype and options of one's own problem."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._bench.spec import OWN, Benchmark, Case


def make_case(benchmark: Benchmark, shape: str, dtype: str, options: Sequence[str]) -> Case:
    """A case of an operator: its sizes with commas, a dtype, and options as NAME=VALUE.

    Options that every case of the benchmark has, such as a layout, are those of its first case
    unless they are given.

    Raises:
      ValueError: the operator has no such case; the message says why.
    """
    operator = benchmark.operator
    try:
        sizes = tuple(int(size) for size in shape.split(","))
    except ValueError:
        sizes = ()
    counts = sorted({len(case.shape) for case in benchmark.cases})
    if len(sizes) not in counts or min(sizes) < 1:
        raise ValueError(
            f"{operator}: --shape must be {' or '.join(map(str, counts))} sizes, "
            f"{benchmark.shape}, such as {_text(benchmark.cases[0].shape)}; got {shape!r}"
        )
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        raise ValueError(f"--dtype must be that of an array, got {dtype!r}") from None
    found = Case(OWN, sizes, name, _options(benchmark, options))
    _try(benchmark, found)
    return found


def _options(benchmark: Benchmark, given: Sequence[str]) -> dict[str, Any]:
    known = dict.fromkeys(name for case in benchmark.cases for name in case.options)
    first = benchmark.cases[0].options
    options = {
        name: first[name] for name in known if all(name in c.options for c in benchmark.cases)
    }
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or name not in known:
            names = ", ".join(known) or "none"
            raise ValueError(
                f"{benchmark.operator}: --option must be NAME=VALUE, with a name out of {names}; "
                f"got {text!r}"
            )
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value  # a string without quotes
    return options


def _try(benchmark: Benchmark, case: Case) -> None:
    """Refuses what our operator refuses, before minutes are spent on peers."""
    with jax.enable_x64(case.dtype == "float64"):
        key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
        try:
            arguments = jax.eval_shape(lambda k: benchmark.arguments(case, k), key)
            jax.eval_shape(benchmark.function(case), *arguments)
        except Exception as error:
            first, *_ = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"{benchmark.operator} {case.name}: {first}") from error


def _text(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))
