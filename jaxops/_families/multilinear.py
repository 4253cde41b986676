"""Families of primitives that interpolate: linear in values, piecewise multilinear in points.

out[f] = Σ_c w_c(point) values[c, f], where w_c is a product of one factor an axis. A derivative
along a direction t, Σ_a t_a ∂_a w_c, is again such a sum with other weights, linear in t; so is a
derivative along several directions, and one along more directions than there are axes is zero.
Three primitives, each told a number of directions (`order`), therefore close a family under
differentiation to any order:

    sample       values, points, t...        -> Σ_c D_t w_c(point) values[c, f]
    values_grad  points, g, t...             -> its transpose in values
    points_grad  values, points, g, t...     -> its gradient along one more direction

Only sums of these occur as derivatives. `backward` makes both gradients in one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._core import compat, native, rules
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator


class Options(Protocol):
    """Parameters of the primitives of a family, next to shapes; hashable.

    Attributes:
      values: the dimensions of the values in a signature, the last one being that of channels.
      points: those of the points, the last one being that of axes.
      result: those of the result.
      entries: the sizes of the values' dimensions but that of channels.
      axes: the number of axes.
    """

    @property
    def values(self) -> str: ...
    @property
    def points(self) -> str: ...
    @property
    def result(self) -> str: ...
    @property
    def entries(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> int: ...


class Family:
    """The primitives of one operator.

    Attributes:
      name: the operator's.
      reference: the operator in jax.numpy, called as reference(values, points, options), with one
        batch shape for both.
      attributes: what the native handlers are told, called with options.
      values_name: the name of the values' gradient.
      sums_batches: whether the kernels sum the values' gradient over batch dimensions that the
        values do not have.
      work_space: whether CUDA calls of the values' gradients, and of the values, may have one.
      platforms: those that have handlers of calls with these options.
      cpu_layout: as in `Operator`.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[[jax.Array, jax.Array, Any], jax.Array],
        attributes: Callable[[Any], Mapping[str, Any]],
        values_name: str,
        replicated: Sequence[str],
        sums_batches: bool = False,
        work_space: bool = False,
        prefix: str | None = None,
        platforms: Callable[[Any], Sequence[str]] = lambda options: tuple(native.PLATFORMS),
        cpu_layout: Callable[..., Sequence[int] | None] | None = None,
    ):
        self._reference = reference
        self._sums_batches = sums_batches
        common: dict[str, Any] = {"replicated": tuple(replicated)}
        handled = {
            **common,
            "attributes": lambda *, options, **_: attributes(options),
            "platforms": lambda *, options, **_: platforms(options),
            "cpu_layout": cpu_layout,
        }
        prefix = prefix or name
        self._sample = Operator(
            name,
            signature=lambda *, options, order: (
                f"{options.values}, {options.points}{_along(options, order)} -> {options.result}"
            ),
            dtypes=lambda values, *_, **__: [values.dtype],
            reference=self._sample_reference,
            work_space=work_space,
            **handled,
        )
        self._values_grad = Operator(
            f"{prefix}_{values_name}_grad",
            signature=lambda *, options, order, **_: (
                f"{options.points}, {options.result}{_along(options, order)} -> {options.values}"
            ),
            dtypes=lambda points, g, *_, **__: [g.dtype],
            reference=self._values_grad_reference,
            work_space=work_space,
            summed_outputs=(0,),
            **handled,
        )
        self._points_grad = Operator(
            f"{prefix}_point_grad",
            signature=lambda *, options, order: (
                f"{options.values}, {options.points}, {options.result}{_along(options, order)} -> "
                f"{options.points}"
            ),
            dtypes=lambda values, points, *_, **__: [points.dtype],
            reference=self._points_grad_reference,
            **handled,
        )
        self._backward = Operator(
            f"{prefix}_backward",
            signature=lambda *, options, order, **_: (
                f"{options.values}, {options.points}, {options.result}{_along(options, order)} -> "
                f"{options.values}, {options.points}"
            ),
            dtypes=lambda values, points, *_, **__: [values.dtype, points.dtype],
            reference=self._backward_reference,
            work_space=work_space,
            summed_outputs=(0,),
            **handled,
        )
        # values, points, dvalues, dpoints, t... -> the derivative along both.
        self._tangent = Operator(
            f"{prefix}_tangent",
            signature=lambda *, options, order: (
                f"{options.values}, {options.points}, {options.values}, {options.points}"
                f"{_along(options, order)} -> {options.result}"
            ),
            dtypes=lambda values, *_, **__: [values.dtype],
            composition=self._tangent_unfused,
            **common,
        )
        self._register_rules()

    def __call__(self, values: jax.Array, points: jax.Array, options: Options) -> jax.Array:
        """The operator itself."""
        (result,) = self._sample(values, points, options=options, order=0)
        return result

    # --- what each primitive computes, in jax.numpy ----------------------------------------------

    def _directional(self, values, points, directions, options):
        if not directions:
            return self._reference(values, points, options)
        *others, last = directions

        def at(points):
            return self._directional(values, points, others, options)

        return jax.jvp(at, (points,), (last,))[1]

    def _sample_reference(self, values, points, *along, options, order):
        del order
        _, values_wide, (points, *along) = _widen(options, values, points, None, along)
        return [self._directional(values_wide, points, along, options).astype(values.dtype)]

    def _values_grad_reference(self, points, g, *along, options, order, summed):
        del order
        g_wide, _, (points, *along) = _widen(options, None, points, g, along)
        batch = points.shape[: points.ndim - _rank(options.points)]
        shape = (*batch, *options.entries, g.shape[-1])

        def linear(values):
            return self._directional(values, points, along, options)

        (values,) = jax.vjp(linear, jnp.zeros(shape, g_wide.dtype))[1](g_wide)
        axes = tuple(i for i, s in enumerate(summed) if s)
        return [values.sum(axes, keepdims=True).astype(g.dtype)]

    def _points_grad_reference(self, values, points, g, *along, options, order):
        del order
        dtype = points.dtype
        g, values, (points, *along) = _widen(options, values, points, g, along)

        def at(points):
            return self._directional(values, points, along, options)

        return [jax.vjp(at, points)[1](g)[0].astype(dtype)]

    def _backward_reference(self, values, points, g, *along, options, order, summed):
        # The values' gradient has every batch dimension that is not summed, those of the values
        # too.
        batch = _batch_shape(options, values, points, g, along)
        g = jnp.broadcast_to(g, (*batch, *g.shape[g.ndim - _rank(options.result) :]))
        params = {"options": options, "order": order}
        return [
            *self._values_grad_reference(points, g, *along, summed=summed, **params),
            *self._points_grad_reference(values, points, g, *along, **params),
        ]

    def _tangent_unfused(
        self, values, points, dvalues, dpoints, *along, options, order
    ) -> list[Any]:
        del order
        terms = self._samples(dvalues, points, along, options)
        terms += self._samples(values, points, (*along, dpoints), options)
        return [sum(terms)]

    def _backward_unfused(self, values, points, g, *along, options, order, summed):
        batch = _batch_shape(options, values, points, g, along)
        g = jnp.broadcast_to(g, (*batch, *g.shape[g.ndim - _rank(options.result) :]))
        (dvalues,) = self._values_grad(
            points, g, *along, options=options, order=order, summed=summed
        )
        (dpoints,) = self._points_grad(values, points, g, *along, options=options, order=order)
        return [dvalues, dpoints]

    # --- the same as lists of terms, without those that are zero ---------------------------------

    def _samples(self, values, points, along, options):
        if len(along) > options.axes:
            return []
        return self._sample(values, points, *along, options=options, order=len(along))

    def _values_grads(self, points, g, along, options, summed):
        if len(along) > options.axes:
            return []
        return self._values_grad(
            points, g, *along, options=options, order=len(along), summed=summed
        )

    def _points_grads(self, values, points, g, along, options):
        if len(along) >= options.axes:
            return []
        return self._points_grad(values, points, g, *along, options=options, order=len(along))

    def _summed(self, like, options):
        batch = like.shape[: like.ndim - _rank(options.values)]
        return tuple(self._sums_batches and n == 1 for n in batch)

    # --- derivatives -----------------------------------------------------------------------------

    def _register_rules(self):
        self._sample.def_jvp(self._sample_jvp)
        self._sample.def_transpose(self._sample_transpose)
        self._values_grad.def_jvp(self._values_grad_jvp)
        self._values_grad.def_transpose(self._values_grad_transpose)
        self._points_grad.def_jvp(self._points_grad_jvp)
        self._points_grad.def_transpose(self._points_grad_transpose)
        self._tangent.def_jvp(self._tangent_jvp)
        self._tangent.def_transpose(self._tangent_transpose)
        self._backward.def_jvp(self._backward_jvp)
        self._backward.def_transpose(self._backward_transpose)
        self._backward.def_dead_code(self._backward_dead_code)

    def _sample_jvp(self, primals, tangents, *, options, order):
        values, points, *along = primals
        dvalues, dpoints, *dalong = rules.nonzero(tangents, len(primals))
        (result,) = self._sample(*primals, options=options, order=order)
        terms = []
        if dvalues is not None and dpoints is not None and order < options.axes:
            terms += self._tangent(
                values, points, dvalues, dpoints, *along, options=options, order=order
            )
        else:
            if dvalues is not None:
                terms += self._samples(dvalues, points, along, options)
            if dpoints is not None:
                terms += self._samples(values, points, (*along, dpoints), options)
        for others in _replaced(along, dalong):
            terms += self._samples(values, points, others, options)
        return [result], [_total(terms, result)]

    def _sample_transpose(self, cotangents, values, points, *along, options, order):
        del order
        (g,) = cotangents
        if isinstance(g, compat.Zero):
            return rules.zeros((values, points, *along))
        if compat.is_undefined_primal(values):
            summed = self._summed(values.aval, options)
            pulled = self._values_grads(points, g, along, options, summed)
            return [_match_type(pulled, values.aval, options.values), None, *(None for _ in along)]
        others, like = _take_undefined(along)
        pulled = self._points_grads(values, points, g, others, options)
        return [None, None, *_at_undefined(along, _match_type(pulled, like, options.points))]

    def _values_grad_jvp(self, primals, tangents, *, options, order, summed):
        points, g, *along = primals
        dpoints, dg, *dalong = rules.nonzero(tangents, len(primals))
        (result,) = self._values_grad(*primals, options=options, order=order, summed=summed)
        terms = []
        if dg is not None:
            terms += self._values_grads(points, dg, along, options, summed)
        if dpoints is not None:
            terms += self._values_grads(points, g, (*along, dpoints), options, summed)
        for others in _replaced(along, dalong):
            terms += self._values_grads(points, g, others, options, summed)
        return [result], [_total(terms, result)]

    def _values_grad_transpose(self, cotangents, points, g, *along, options, order, summed):
        del order, summed
        (ct,) = cotangents
        if isinstance(ct, compat.Zero):
            return rules.zeros((points, g, *along))
        if compat.is_undefined_primal(g):
            pulled = self._samples(ct, points, along, options)
            return [None, _match_type(pulled, g.aval, options.result), *(None for _ in along)]
        others, like = _take_undefined(along)
        pulled = self._points_grads(ct, points, g, others, options)
        return [None, None, *_at_undefined(along, _match_type(pulled, like, options.points))]

    def _points_grad_jvp(self, primals, tangents, *, options, order):
        values, points, g, *along = primals
        dvalues, dpoints, dg, *dalong = rules.nonzero(tangents, len(primals))
        (result,) = self._points_grad(*primals, options=options, order=order)
        terms = []
        if dvalues is not None:
            terms += self._points_grads(dvalues, points, g, along, options)
        if dg is not None:
            terms += self._points_grads(values, points, dg, along, options)
        if dpoints is not None:
            terms += self._points_grads(values, points, g, (*along, dpoints), options)
        for others in _replaced(along, dalong):
            terms += self._points_grads(values, points, g, others, options)
        return [result], [_total(terms, result)]

    def _points_grad_transpose(self, cotangents, values, points, g, *along, options, order):
        del order
        (ct,) = cotangents
        if isinstance(ct, compat.Zero):
            return rules.zeros((values, points, g, *along))
        rest = [None for _ in along]
        if compat.is_undefined_primal(values):
            summed = self._summed(values.aval, options)
            pulled = self._values_grads(points, g, (*along, ct), options, summed)
            return [_match_type(pulled, values.aval, options.values), None, None, *rest]
        if compat.is_undefined_primal(g):
            pulled = self._samples(values, points, (*along, ct), options)
            return [None, None, _match_type(pulled, g.aval, options.result), *rest]
        others, like = _take_undefined(along)
        pulled = self._points_grads(values, points, g, (*others, ct), options)
        return [None, None, None, *_at_undefined(along, _match_type(pulled, like, options.points))]

    def _tangent_jvp(self, primals, tangents, **params):
        return rules.jvp(functools.partial(self._tangent_unfused, **params), primals, tangents)

    def _tangent_transpose(
        self, cotangents, values, points, dvalues, dpoints, *along, options, order
    ):
        (g,) = cotangents
        rest = [None for _ in along]
        if isinstance(g, compat.Zero):
            return rules.zeros((values, points, dvalues, dpoints, *along))
        of_values, of_points = map(compat.is_undefined_primal, (dvalues, dpoints))
        pulled_values = pulled_points = None
        if of_values and of_points:
            summed = self._summed(dvalues.aval, options)
            pulled_values, pulled_points = (
                [x]
                for x in self._backward(
                    values, points, g, *along, options=options, order=order, summed=summed
                )
            )
        elif of_values:
            summed = self._summed(dvalues.aval, options)
            pulled_values = self._values_grads(points, g, along, options, summed)
        else:
            pulled_points = self._points_grads(values, points, g, along, options)
        return [
            None,
            None,
            _match_type(pulled_values, dvalues.aval, options.values) if of_values else None,
            _match_type(pulled_points, dpoints.aval, options.points) if of_points else None,
            *rest,
        ]

    def _backward_jvp(self, primals, tangents, **params):
        unfused = functools.partial(self._backward_unfused, **params)
        _, moved = rules.jvp(unfused, primals, tangents)
        return self._backward(*primals, **params), moved

    def _backward_transpose(self, cotangents, values, points, g, *along, options, order, summed):
        """The transpose in g of the transpose of the tangent: the tangent."""
        del summed
        of_values, of_points = rules.nonzero(cotangents, 2)
        terms = []
        if of_values is not None and of_points is not None:
            shape = lax.broadcast_shapes(of_values.shape, values.shape)
            of_values = jnp.broadcast_to(of_values, shape)
            terms += self._tangent(
                values, points, of_values, of_points, *along, options=options, order=order
            )
        elif of_values is not None:
            terms += self._samples(of_values, points, along, options)
        elif of_points is not None:
            terms += self._samples(values, points, (*along, of_points), options)
        rest = [None for _ in along]
        return [None, None, _match_type(terms, g.aval, options.result), *rest]

    def _backward_dead_code(self, used, values, points, g, *along, options, order, summed):
        """With one gradient unused, the other's own primitive serves."""
        params = {"options": options, "order": order}
        if used[1]:
            return self._points_grad, tuple(range(3 + len(along))), params
        without_values = _batch_shape(options, None, points, g, along)
        if without_values != _batch_shape(options, values, points, g, along):
            return None  # only the values know all batch dimensions
        return self._values_grad, tuple(range(1, 3 + len(along))), {**params, "summed": summed}


def _along(options, order: int) -> str:
    return f", {options.points}" * order


def _rank(term: str) -> int:
    return len(term.split())


def _batch_dims(options, values, points, g, along):
    """The operands that are there, each with the number of its batch dimensions."""
    terms = [options.values, options.points, options.result, *(options.points for _ in along)]
    operands = [values, points, g, *along]
    return [(x, x.ndim - _rank(t)) for x, t in zip(operands, terms, strict=True) if x is not None]


def _batch_shape(options, values, points, g, along):
    dims = _batch_dims(options, values, points, g, along)
    return lax.broadcast_shapes(*(x.shape[:rank] for x, rank in dims))


def _widen(options, values, points, g, along) -> tuple[Any, Any, tuple]:
    """The operands in the dtype of the arithmetic and with all of the batch dimensions."""
    present = _batch_dims(options, values, points, g, along)
    batch = lax.broadcast_shapes(*(x.shape[:rank] for x, rank in present))
    dtype = accumulation_dtype(*(x for x, _ in present))
    wide = iter(
        [jnp.broadcast_to(x.astype(dtype), (*batch, *x.shape[rank:])) for x, rank in present]
    )
    values, points, g, *along = (
        None if x is None else next(wide) for x in (values, points, g, *along)
    )
    return g, values, (points, *along)


def _replaced(along, dalong):
    """The directions with one of them replaced by its tangent, for each that has one."""
    for i, tangent in enumerate(dalong):
        if tangent is not None:
            yield (*along[:i], tangent, *along[i + 1 :])


def _total(terms, like) -> Any:
    return sum(terms) if terms else compat.Zero(jax.typeof(like))


def _match_type(terms, like, term: str):
    if not terms:
        return compat.Zero(like)
    return rules.match_type(sum(terms), like, _rank(term))


def _take_undefined(along):
    """The defined ones of the directions, and the type of the one that is not."""
    (missing,) = (t for t in along if compat.is_undefined_primal(t))
    return tuple(t for t in along if t is not missing), missing.aval


def _at_undefined(along, cotangent):
    return [cotangent if compat.is_undefined_primal(t) else None for t in along]
