"""Running, comparing and counting: what the capabilities are made of."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._core.dtypes import accumulation_dtype
from jaxops.testing.platforms import Platform
from jaxops.testing.spec import Arrays, OperatorSpec, normal


@functools.cache
def vjp_of(function: Callable, argnums: tuple[int, ...]) -> Callable:
    """f(cotangents, *arguments) -> (results, the cotangents of the arguments in `argnums`)."""

    def value_and_vjp(cotangents, *arguments):
        if not argnums:
            return tuple(leaves(function(*arguments))), ()

        def moving(*changed):
            return tuple(leaves(function(*replace(arguments, argnums, changed))))

        results, pull = jax.vjp(moving, *(arguments[i] for i in argnums))
        return results, pull(tuple(cotangents))

    return value_and_vjp


@functools.cache
def jvp_of(function: Callable, argnums: tuple[int, ...]) -> Callable:
    """f(tangents, *arguments) -> (results, their tangents), moving the arguments in `argnums`."""

    def jvp(tangents, *arguments):
        def moving(*changed):
            return tuple(leaves(function(*replace(arguments, argnums, changed))))

        return jax.jvp(moving, [arguments[i] for i in argnums], list(tangents))

    return jvp


def replace(arguments: Sequence, positions: Sequence[int], changed: Sequence) -> list:
    """`arguments` with those at `positions` changed."""
    replaced = list(arguments)
    for i, argument in zip(positions, changed, strict=True):
        replaced[i] = argument
    return replaced


def leaves(tree: Any) -> list:
    """The arrays of one or several, possibly nested, results."""
    return jax.tree.leaves(tree)


def cotangents_for(spec: OperatorSpec, arguments: Arrays) -> Arrays:
    """Random cotangents of the results, the same in every run; results must have the right type."""
    rng = np.random.default_rng(1)
    results, expected = (
        leaves(jax.eval_shape(f, *arguments)) for f in (spec.function, spec.reference)
    )
    types, expected_types = ([(r.shape, r.dtype.name) for r in rs] for rs in (results, expected))
    assert types == expected_types, f"the results are {types}, expected {expected_types}"
    return tuple(normal(rng, r.shape, r.dtype) for r in results)


def on_reference(function: Callable, *arguments: Any, optimized: bool = False) -> list[np.ndarray]:
    """The results of a function of `reference`, computed in float64 on the CPU."""
    options = None if optimized else _hasty()
    with jax.default_device(jax.devices("cpu")[0]):
        return host(jax.jit(function, compiler_options=options)(*widen(arguments)))


def hasty_options(platform: Platform) -> dict[str, bool | int]:
    """Compiler options with which the machine code of a program is not optimized.

    For questions of the rules of an operator, which are asked in its widest dtype of programs that
    run once: XLA rewrites and fuses them all the same, and optimizing its code would take most of
    the time. Questions of rounding and of what users run are not for them.
    """
    return _hasty() if platform.name == "cpu" else {}


@functools.cache
def _hasty() -> dict[str, Any]:
    # Not every release of XLA has both emitters of fusions.
    wanted: dict[str, Any] = {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
    }
    trivial = jax.jit(lambda: 0).lower()
    options = {}
    for name, value in wanted.items():
        with contextlib.suppress(RuntimeError):
            trivial.compile({name: value})
            options[name] = value
    return options


def widen(tree: Any) -> Any:
    """The floating arrays in float64, the others as they are."""
    return jax.tree.map(lambda a: np.asarray(a, np.float64) if is_floating(a) else a, tree)


def is_floating(array: Any) -> bool:
    """Whether an array's dtype is one of the floating ones, which NumPy alone does not know."""
    return jnp.issubdtype(array.dtype, jnp.floating)


def host(tree: Any) -> list[np.ndarray]:
    """The results as NumPy arrays."""
    return [np.asarray(r) for r in leaves(tree)]


def run(
    function: Callable, platform: Platform, *arguments: Any, options: dict | None = None
) -> list[np.ndarray]:
    """The results of the function, compiled with `options`, on one device of the platform."""
    placed = jax.device_put(arguments, platform.device)
    return host(jax.jit(function, compiler_options=options)(*placed))


def tolerance(want: np.ndarray, dtype: str, terms: int, roundings: int = 0) -> np.ndarray:
    """How far a result may be from the exact `want`.

    One rounding to its dtype, the roundings of a sum of `terms` in the accumulation's dtype, and
    `roundings` of intermediates to `dtype`; the last two are relative to the largest result, as
    what is summed is of its magnitude or, where the sum is small, of order one.
    """
    eps = float(jnp.finfo(dtype).eps)
    sum_eps = float(jnp.finfo(accumulation_dtype(dtype)).eps)
    scale = max(1.0, np.abs(want).max(initial=0.0))
    return eps * np.abs(want) + (terms * sum_eps + roundings * eps) * scale


def assert_close(
    got: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    what: str,
    *,
    dtype: str,
    terms: int,
    roundings: int = 0,
) -> None:
    """Compares results with exact ones, within `tolerance`."""
    assert len(got) == len(want), f"{what}: {len(got)} results, expected {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        name = f"{what}, result {i}" if len(want) > 1 else what
        assert g.shape == w.shape, f"{name}: shape {g.shape}, expected {w.shape}"
        difference = np.abs(g.astype(np.float64) - w)
        allowed = tolerance(w, dtype, terms, roundings)
        wrong = ~(difference <= allowed)  # a NaN is wrong too
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            raise AssertionError(
                f"{name}: {wrong.sum()} of {wrong.size} entries are wrong; the first, at {at}, is "
                f"{g[at]!r}, expected {w[at]!r} within {allowed[at]:.3g}"
            )


def assert_value(
    spec: OperatorSpec, got: Sequence[np.ndarray], want: Sequence, arguments, what: str, dtype: str
) -> None:
    """`assert_close` for results of the spec's function."""
    assert_close(got, want, what, dtype=dtype, terms=spec.value_terms(*arguments))


def assert_vjp(
    spec: OperatorSpec,
    got: Sequence[np.ndarray],
    want: Sequence,
    arguments,
    what: str,
    dtype: str,
    order: int = 1,
) -> None:
    """`assert_close` for derivatives of any kind; each order passes through the sums once more."""
    terms, roundings = order * spec.vjp_terms(*arguments), order * spec.vjp_roundings
    assert_close(got, want, what, dtype=dtype, terms=terms, roundings=roundings)


def assert_bitwise(got: Sequence[np.ndarray], want: Sequence[np.ndarray], what: str) -> None:
    """Compares results bit for bit."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), (
            f"{what}: result {i} is {g.dtype}{g.shape}, expected {w.dtype}{w.shape}"
        )
        bytes_of = [np.frombuffer(a.tobytes(), np.uint8) for a in (g, w)]
        differ = np.not_equal(*bytes_of).sum()
        assert not differ, f"{what}: result {i} differs in {differ} of {w.nbytes} bytes"


def custom_calls(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How often a compiled program calls each of our handlers."""
    found = re.findall(r'custom_call_target="(jaxops_\w+)"', compiled.as_text() or "")
    return dict(collections.Counter(found))


def lowered_calls(lowered: jax.stages.Lowered) -> list[str]:
    """Our handlers in the order of their calls, before XLA finds that two calls are the same."""
    return re.findall(r"custom_call @(jaxops_\w+)", lowered.as_text() or "")


_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
    "reduce-scatter",
)


def collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How often a compiled program communicates in each way."""
    text = compiled.as_text() or ""
    counts = {k: len(re.findall(rf"\s{k}(?:-start)?\(", text)) for k in _COLLECTIVES}
    return {k: n for k, n in counts.items() if n}


def traffic(compiled: jax.stages.Compiled) -> dict[str, tuple[int, int]]:
    """How often a compiled program communicates in each way, and the bytes of what comes of it."""
    found: dict[str, tuple[int, int]] = {}
    kinds = "|".join(_COLLECTIVES)
    for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text() or ""):
        size = 0
        for bits, shape in re.findall(r"[a-z]+(\d*)\[([\d,]*)\]", result):
            # A predicate, which has no number of bits, is a byte.
            size += math.prod(map(int, filter(None, shape.split(",")))) * int(bits or 8) // 8
        count, before = found.get(kind, (0, 0))
        found[kind] = count + 1, before + size
    return found


def compile_without_loops(
    function: Callable, *arguments: Any, options: dict | None = None
) -> jax.stages.Compiled:
    """A program without loops, compiled with `options` for where its arguments are."""
    lowered = jax.jit(function).lower(*arguments)
    assert "stablehlo.while" not in lowered.as_text(), "the program has a loop"
    return lowered.compile(options)
