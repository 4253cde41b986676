"""How far the results of operators are from exact ones, in units in the last place."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxops.testing.measure import cotangents_for, jvp_of, on_reference, run, vjp_of
from jaxops.testing.platforms import Platform
from jaxops.testing.spec import OperatorSpec, normal

#: The results of a call that are measured.
KINDS: tuple[str, ...] = ("value", "gradients", "tangents")
SEEDS = (0, 1)


def ulps(got: np.ndarray, want: np.ndarray, dtype: str) -> float:
    """The largest error of an array, in units in the last place of `dtype` at its largest entry.

    Entries are sums, whose terms are of the magnitude of that entry where they cancel each other.
    A correctly rounded array of this dtype has at most 0.5.
    """
    info = jnp.finfo(dtype)
    largest = float(np.abs(want).max(initial=0))
    if not np.isfinite(got.astype(np.float64)).all():
        return np.inf
    exponent = np.frexp(max(largest, float(info.tiny)))[1] - 1
    error = float(np.abs(got.astype(np.float64) - want).max(initial=0))
    return error / float(np.ldexp(float(info.eps), exponent))


def _worst(got: Sequence[np.ndarray], want: Sequence[np.ndarray], dtype: str) -> float:
    return max((ulps(g, w, dtype) for g, w in zip(got, want, strict=True)), default=0.0)


def measure(spec: OperatorSpec, dtype: str, platform: Platform) -> dict[str, float]:
    """The largest `ulps` of the results, the gradients and the tangents of a spec's large case.

    The exact ones are those of its reference in float64, of the same rounded arguments.
    """
    moved = spec.differentiable
    found: dict[str, float] = dict.fromkeys(KINDS if moved else KINDS[:1], 0.0)
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        arguments = tuple(np.asarray(a) for a in spec.large(rng, jnp.dtype(dtype)))
        cotangents = cotangents_for(spec, arguments)
        tangents = tuple(normal(rng, arguments[i].shape, arguments[i].dtype) for i in moved)
        programs = {"gradients": (vjp_of, cotangents), "tangents": (jvp_of, tangents)}
        for kind, (derivative_of, directions) in programs.items():
            ours, oracle = (derivative_of(f, moved) for f in (spec.function, spec.reference))
            got = run(ours, platform, directions, *arguments)
            want = on_reference(oracle, directions, *arguments)
            count = len(cotangents)
            found["value"] = max(found["value"], _worst(got[:count], want[:count], dtype))
            if moved:
                found[kind] = max(found[kind], _worst(got[count:], want[count:], dtype))
    return found
