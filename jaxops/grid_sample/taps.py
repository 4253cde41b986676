"""Weighted sums of the entries of a volume: primitives that interpolations of any kind are made of.

out[p, f] = Σ_k Π_a w_a[p, k_a] volume[i_0[p, k_0], i_1[p, k_1], ..., f]

The indices and weights are arrays, which `jax.numpy` makes of coordinates. The sum is linear in the
volume and in the weights of each axis, so every derivative of any order is such a sum with other
operands, or its transpose in one of them:

    sample       volume, indices, w...        -> out
    volume_grad  indices, g, w...             -> its transpose in the volume
    weight_grad  volume, indices, g, w...     -> its transposes in the weights of each axis

CPUs have kernels of these; so have GPUs, but for long stencils and sums in a fixed order, and run
those that are faster than XLA's program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._core import compat, native, rules, signature
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator
from jaxops.reference import taps as reference


@dataclasses.dataclass(frozen=True)
class _Options:
    """Parameters of every primitive of the family, next to shapes."""

    sizes: tuple[int, ...]
    point_rank: int
    taps: int
    deterministic: bool

    @property
    def axes(self) -> int:
        return len(self.sizes)

    @property
    def volume(self) -> str:
        return " ".join(f"size{i}={n}" for i, n in enumerate(self.sizes)) + " features"

    @property
    def indices(self) -> str:
        return f"{self._points} axes={self.axes} taps={self.taps}"

    @property
    def weights(self) -> str:
        return ", ".join([f"{self._points} taps={self.taps}"] * self.axes)

    @property
    def result(self) -> str:
        return f"{self._points} features"

    @property
    def _points(self) -> str:
        return " ".join(f"point{i}" for i in range(self.point_rank))


def sum_taps(
    volume: jax.Array,
    indices: jax.Array,
    weights: Sequence[jax.Array],
    point_rank: int,
    deterministic: bool = False,
) -> jax.Array:
    """The sum of the volume (..., *sizes, F) at int32 indices (..., *P, axes, K).

    `weights` are (..., *P, K) for each axis, in float32, or in float64 if the volume is float64.
    Combinations with an index outside of the volume contribute nothing. Leading dimensions
    broadcast. A point reads at most 64 entries. `deterministic` fixes the order in which GPUs add
    to the volume's gradient.
    """
    axes, taps = indices.shape[-2:]
    rank = volume.ndim - axes - 1
    options = _Options(volume.shape[rank:-1], point_rank, taps, deterministic)
    (result,) = _sample(volume, indices, *weights, options=options)
    return result


# --- what each primitive computes, in jax.numpy ---------------------------------------------------


def _sample_reference(volume, indices, *weights, options):
    return [reference.sum_taps(volume, indices, weights, options.point_rank)]


def _volume_grad_reference(indices, g, *weights, options, summed):
    rank = g.ndim - 1 - options.point_rank
    leading = [x.shape[:rank] for x in (indices, g, *weights)]
    batch = jnp.broadcast_shapes(*leading)
    kept = tuple(1 if s else n for n, s in zip(batch, summed, strict=True))
    if options.deterministic:
        shape = (*kept, *options.sizes, g.shape[-1])
        return [reference.ordered_volume_grad(shape, indices, g, weights, options.point_rank)]
    wide = g.astype(accumulation_dtype(g))
    wide = jnp.broadcast_to(wide, (*batch, *g.shape[rank:]))
    like = jnp.zeros((*kept, *options.sizes, g.shape[-1]), wide.dtype)

    def linear(volume):
        return reference.sum_taps(volume, indices, weights, options.point_rank)

    return [jax.vjp(linear, like)[1](wide)[0].astype(g.dtype)]


def _weight_grad_reference(volume, indices, g, *weights, options):
    rank = g.ndim - 1 - options.point_rank
    leading = [x.shape[:rank] for x in (volume, indices, g, *weights)]
    batch = jnp.broadcast_shapes(*leading)
    dtype = accumulation_dtype(volume)
    weights = [jnp.broadcast_to(w, (*batch, *w.shape[rank:])) for w in weights]
    wide = jnp.broadcast_to(g.astype(dtype), (*batch, *g.shape[rank:]))
    volume = volume.astype(dtype)

    def linear(*weights):
        return reference.sum_taps(volume, indices, weights, options.point_rank)

    return list(jax.vjp(linear, *weights)[1](wide))


def _attributes(*, options, **_):
    return {"point_rank": np.int64(options.point_rank)}


def _platforms(*, options, **_):
    has_cuda = options.taps <= native.limits("taps").max_taps
    return tuple(native.PLATFORMS) if has_cuda else ("cpu",)


def _volume_grad_platforms(*, options, **_):
    return ("cpu",) if options.deterministic else _platforms(options=options)


def _cpu_layout(term, **_):
    """Points last in indices and weights: `jax.numpy` makes these tap by tap."""
    return signature.with_last(term, "point") if ("taps",) in term else None


_COMMON: dict[str, Any] = {"replicated": ("size", "axes", "taps")}
_HANDLED: dict[str, Any] = {
    **_COMMON,
    "attributes": _attributes,
    "platforms": _platforms,
    "asks_on_gpu": lambda **_: True,
    "cpu_layout": _cpu_layout,
}

_sample = Operator(
    "taps",
    signature=lambda *, options: (
        f"{options.volume}, {options.indices}, {options.weights} -> {options.result}"
    ),
    dtypes=lambda volume, *_, **__: [volume.dtype],
    reference=_sample_reference,
    **_HANDLED,
)
_volume_grad = Operator(
    "taps_volume_grad",
    signature=lambda *, options, **_: (
        f"{options.indices}, {options.result}, {options.weights} -> {options.volume}"
    ),
    dtypes=lambda indices, g, *_, **__: [g.dtype],
    reference=_volume_grad_reference,
    summed_outputs=(0,),
    work_space=True,
    **{**_HANDLED, "platforms": _volume_grad_platforms},
)
_weight_grad = Operator(
    "taps_weight_grad",
    signature=lambda *, options: (
        f"{options.volume}, {options.indices}, {options.result}, {options.weights} -> "
        f"{options.weights}"
    ),
    dtypes=lambda volume, indices, g, *weights, **_: [w.dtype for w in weights],
    reference=_weight_grad_reference,
    **_HANDLED,
)


def _tangent_unfused(volume, indices, *weights, options) -> list[Any]:
    weights, moved = weights[: options.axes], weights[options.axes :]
    return [sum(_samples(volume, indices, weights, moved, options))]


# volume, indices, w..., t... -> the derivative along t: its transpose is one call of weight_grad.
_tangent = Operator(
    "taps_tangent",
    signature=lambda *, options: (
        f"{options.volume}, {options.indices}, {options.weights}, {options.weights} -> "
        f"{options.result}"
    ),
    dtypes=lambda volume, *_, **__: [volume.dtype],
    composition=_tangent_unfused,
    **_COMMON,
)


def _replaced(weights, moved):
    """The weights with those of one axis replaced, and that axis, for each that is given."""
    for a, tangent in enumerate(moved):
        if tangent is not None:
            yield a, (*weights[:a], tangent, *weights[a + 1 :])


def _samples(volume, indices, weights, moved, options) -> list[Any]:
    return [
        _sample(volume, indices, *others, options=options)[0]
        for _, others in _replaced(weights, moved)
    ]


def _volume_grads(indices, g, weights, moved, options, summed) -> list[Any]:
    return [
        _volume_grad(indices, g, *others, options=options, summed=summed)[0]
        for _, others in _replaced(weights, moved)
    ]


def _summed(like, options):
    return tuple(n == 1 for n in like.shape[: like.ndim - options.axes - 1])


def _total(terms, like) -> Any:
    return sum(terms) if terms else compat.Zero(jax.typeof(like))


def _match_volume(terms, like, options):
    return rules.match_type(sum(terms), like, options.axes + 1) if terms else compat.Zero(like)


def _match_points(terms, like, options):
    return (
        rules.match_type(sum(terms), like, options.point_rank + 1) if terms else compat.Zero(like)
    )


def _defined(weights):
    """Weights with zeros for those that are undefined: a gradient does not depend on its own."""
    return tuple(
        jnp.zeros(w.aval.shape, w.aval.dtype) if compat.is_undefined_primal(w) else w
        for w in weights
    )


def _undefined(weights):
    return [a for a, w in enumerate(weights) if compat.is_undefined_primal(w)]


# --- derivatives ----------------------------------------------------------------------------------


@_sample.def_jvp
def _(primals, tangents, *, options):
    volume, indices, *weights = primals
    dvolume, _, *moved = rules.nonzero(tangents, len(primals))
    (result,) = _sample(*primals, options=options)
    terms = [] if dvolume is None else _sample(dvolume, indices, *weights, options=options)
    all_move = [t for t in moved if t is not None]
    if len(all_move) == options.axes:
        terms += _tangent(volume, indices, *weights, *all_move, options=options)
    else:
        terms += _samples(volume, indices, weights, moved, options)
    return [result], [_total(terms, result)]


@_sample.def_transpose
def _(cotangents, volume, indices, *weights, options):
    (g,) = cotangents
    if isinstance(g, compat.Zero):
        return rules.zeros((volume, indices, *weights))
    if compat.is_undefined_primal(volume):
        summed = _summed(volume.aval, options)
        terms = _volume_grad(indices, g, *weights, options=options, summed=summed)
        return [_match_volume(terms, volume.aval, options), None, *(None for _ in weights)]
    grads = _weight_grad(volume, indices, g, *_defined(weights), options=options)
    return [None, None, *_at_undefined(weights, grads, options)]


def _at_undefined(weights, grads, options):
    missing = _undefined(weights)
    return [
        _match_points([grad], w.aval, options) if a in missing else None
        for a, (w, grad) in enumerate(zip(weights, grads, strict=True))
    ]


@_volume_grad.def_jvp
def _(primals, tangents, *, options, summed):
    indices, g, *weights = primals
    _, dg, *moved = rules.nonzero(tangents, len(primals))
    (result,) = _volume_grad(*primals, options=options, summed=summed)
    terms = []
    if dg is not None:
        terms += _volume_grad(indices, dg, *weights, options=options, summed=summed)
    terms += _volume_grads(indices, g, weights, moved, options, summed)
    return [result], [_total(terms, result)]


@_volume_grad.def_transpose
def _(cotangents, indices, g, *weights, options, summed):
    del summed
    (ct,) = cotangents
    if isinstance(ct, compat.Zero):
        return rules.zeros((indices, g, *weights))
    if compat.is_undefined_primal(g):
        terms = _sample(ct, indices, *weights, options=options)
        return [None, _match_points(terms, g.aval, options), *(None for _ in weights)]
    grads = _weight_grad(ct, indices, g, *_defined(weights), options=options)
    return [None, None, *_at_undefined(weights, grads, options)]


@_weight_grad.def_jvp
def _(primals, tangents, *, options):
    volume, indices, g, *weights = primals
    dvolume, _, dg, *moved = rules.nonzero(tangents, len(primals))
    results = _weight_grad(*primals, options=options)
    terms: list[list[Any]] = [[] for _ in results]

    def add(grads, but=None):
        for a, grad in enumerate(grads):
            if a != but:  # a gradient does not depend on its own weights
                terms[a].append(grad)

    if dvolume is not None:
        add(_weight_grad(dvolume, indices, g, *weights, options=options))
    if dg is not None:
        add(_weight_grad(volume, indices, dg, *weights, options=options))
    for a, others in _replaced(weights, moved):
        if options.axes > 1:
            add(_weight_grad(volume, indices, g, *others, options=options), but=a)
    return results, [_total(t, r) for t, r in zip(terms, results, strict=True)]


@_weight_grad.def_transpose
def _(cotangents, volume, indices, g, *weights, options):
    moved = rules.nonzero(cotangents, options.axes)
    if all(t is None for t in moved):
        return rules.zeros((volume, indices, g, *weights))
    rest = [None for _ in weights]
    if compat.is_undefined_primal(volume):
        terms = _volume_grads(indices, g, weights, moved, options, _summed(volume.aval, options))
        return [_match_volume(terms, volume.aval, options), None, None, *rest]
    if compat.is_undefined_primal(g):
        terms = _samples(volume, indices, weights, moved, options)
        return [None, None, _match_points(terms, g.aval, options), *rest]
    grads: list[Any] = list(rest)
    for b in _undefined(weights):
        terms = [
            _weight_grad(volume, indices, g, *_defined(others), options=options)[b]
            for a, others in _replaced(weights, moved)
            if a != b
        ]
        grads[b] = _match_points(terms, weights[b].aval, options)
    return [None, None, None, *grads]


@_tangent.def_jvp
def _(primals, tangents, **params):
    return rules.jvp(functools.partial(_tangent_unfused, **params), primals, tangents)


@_tangent.def_transpose
def _(cotangents, volume, indices, *weights, options):
    (g,) = cotangents
    if isinstance(g, compat.Zero):
        return rules.zeros((volume, indices, *weights))
    weights, moved = weights[: options.axes], weights[options.axes :]
    rest = [None for _ in weights]
    if compat.is_undefined_primal(volume):
        terms = _volume_grads(indices, g, weights, moved, options, _summed(volume.aval, options))
        return [_match_volume(terms, volume.aval, options), None, *rest, *rest]
    grads = _weight_grad(volume, indices, g, *weights, options=options)
    return [None, None, *rest, *_at_undefined(moved, grads, options)]
