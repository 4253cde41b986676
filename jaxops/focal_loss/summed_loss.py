"""The rules that tie the sum of a loss over rows of logits to its derivatives.

    sum, gradient = value_and_gradient(logits, ...)
    d sum         = <gradient, dlogits>              tangent
    dlogits       = gradient(logits, ...) * ct       its transpose

A program decides what runs. Where the cotangent is known to be one when it is traced, as under
`jax.value_and_grad` of a loss that nothing multiplies, the transpose is the gradient that came with
the sum: two passes over memory. Otherwise the cotangent joins the scale of a `gradient` of its own,
nothing needs the one that came with the sum, and `value_and_gradient` becomes `sum`: three.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxops._core import compat, rules
from jaxops._core.primitive import Operator


@dataclasses.dataclass(frozen=True)
class SummedLoss:
    """The primitives of a sum, all but the last with the same operands, of which logits are first.

    All take one parameter, `options`, which has as `rows` the number of dimensions before that of
    classes, as `row` their names, and as `operands` the signature of the operands.
    """

    sum: Operator
    gradient: Operator  # by the logits
    value_and_gradient: Operator
    tangent: Operator  # of gradient, tangent of the logits, and the operands


def summed_loss(
    name: str,
    *,
    sum_reference: Callable,
    gradient_reference: Callable,
    by_others: Callable,
    batch_shapes: Callable,
    attributes: Callable,
    replicated: Sequence[str],
    scale: int,
    across: Mapping[str, Callable] | None = None,
) -> SummedLoss:
    """Defines the primitives of the sum of the loss `name`.

    Args:
      name: of the loss.
      sum_reference, gradient_reference: the results in jax.numpy, each alone in a list.
      by_others: by_others(primals, tangents, options=...), for tangents of other operands than the
        logits, with symbolic zeros among them: the sum, or None where it is not at hand, and its
        tangent.
      batch_shapes: the batch dimensions of each of the operands.
      attributes: what handlers are told of the options.
      replicated: factors of the signatures that each device needs whole.
      scale: which operand is a factor of the results, a scalar of the dtype of the sum.
      across: as for an `Operator`, of the sum and the gradient together.
    """

    def both_reference(*operands, options):
        return [
            *sum_reference(*operands, options=options),
            *gradient_reference(*operands, options=options),
        ]

    def sum_dtype(*operands):
        return operands[scale].dtype

    def across_of(*results):
        """A function that computes the results of these numbers only."""

        def some(function):
            return lambda *operands, **params: [function(*operands, **params)[i] for i in results]

        return {factor: some(function) for factor, function in (across or {}).items()}

    sum_operator = Operator(
        f"{name}_sum",
        signature=lambda *, options: f"{options.operands} -> ",
        reference=sum_reference,
        dtypes=lambda *operands, **_: [sum_dtype(*operands)],
        attributes=attributes,
        work_space=True,
        replicated=replicated,
        across=across_of(0),
    )
    gradient_operator = Operator(
        f"{name}_gradient",
        signature=lambda *, options: f"{options.operands} -> {options.row} classes",
        reference=gradient_reference,
        dtypes=lambda logits, *_, **__: [logits.dtype],
        attributes=attributes,
        replicated=replicated,
        across=across_of(1),
    )
    value_and_gradient_operator = Operator(
        f"{name}_value_and_gradient",
        signature=lambda *, options: f"{options.operands} -> , {options.row} classes",
        reference=both_reference,
        dtypes=lambda *operands, **_: [sum_dtype(*operands), operands[0].dtype],
        attributes=attributes,
        work_space=True,
        replicated=replicated,
        across=across_of(0, 1),
    )

    @sum_operator.def_jvp
    def sum_jvp(primals, tangents, *, options):
        (dlogits,) = rules.nonzero(tangents[:1], 1)
        value, terms = None, []
        others = without_logits(tangents)
        if moves(others):
            value, tangent = by_others(primals, others, options=options)
            terms.append(tangent)
        if dlogits is not None:
            both, gradient = value_and_gradient_operator(*primals, options=options)
            value = both if value is None else value
            terms += tangent_operator(gradient, dlogits, *primals, options=options)
        if value is None:
            (value,) = sum_operator(*primals, options=options)
        return [value], [sum(terms)]

    @gradient_operator.def_jvp
    def gradient_jvp(primals, tangents, *, options):
        function = functools.partial(gradient_reference, options=options)
        _, tangent = rules.jvp(function, primals, tangents)
        return gradient_operator(*primals, options=options), tangent

    @value_and_gradient_operator.def_jvp
    def value_and_gradient_jvp(primals, tangents, *, options):
        (value,), (dvalue,) = sum_jvp(primals, tangents, options=options)
        (gradient,), (dgradient,) = gradient_jvp(primals, tangents, options=options)
        return [value, gradient], [dvalue, dgradient]

    @value_and_gradient_operator.def_dead_code
    def value_and_gradient_dead_code(used, *operands, options):
        operator = sum_operator if used[0] else gradient_operator
        return operator, tuple(range(len(operands))), {"options": options}

    # The operands behind the gradient are there for the transpose.
    def inner_product(gradient, dlogits, *operands, options):
        dtype = sum_dtype(*operands)
        product = gradient.astype(dtype) * dlogits.astype(dtype)
        return [product.sum(tuple(range(-options.rows - 1, 0)))]

    def exact_inner_product(gradient, dlogits, *operands, options):
        if gradient.dtype != jnp.float16:
            return inner_product(gradient, dlogits, *operands, options=options)
        # The gradient of a mean over many rows is too small for float16.
        unscaled = [*operands]
        unscaled[scale] = jnp.ones_like(operands[scale])
        (gradient,) = gradient_operator(*unscaled, options=options)
        (product,) = inner_product(gradient, dlogits, *operands, options=options)
        return [operands[scale] * product]

    tangent_operator = Operator(
        f"{name}_tangent",
        signature=lambda *, options: (
            f"{options.row} classes, {options.row} classes, {options.operands} -> "
        ),
        composition=exact_inner_product,
        dtypes=lambda _, __, *operands, **___: [sum_dtype(*operands)],
    )

    @tangent_operator.def_jvp
    def tangent_jvp(primals, tangents, *, options):
        gradient, dlogits, *operands = primals
        dgradient, ddlogits = rules.nonzero(tangents[:2], 2)
        terms = []
        if dgradient is not None:
            terms += inner_product(dgradient, dlogits, *operands, options=options)
        if ddlogits is not None:
            terms += tangent_operator(gradient, ddlogits, *operands, options=options)
        tangent = sum(terms) if terms else jnp.zeros((), sum_dtype(*operands))
        return tangent_operator(*primals, options=options), [tangent]

    @tangent_operator.def_transpose
    def tangent_transpose(cotangents, gradient, dlogits, *operands, options):
        (ct,) = cotangents
        rest = [None] * len(operands)
        if isinstance(ct, compat.Zero):
            return [None, compat.Zero(dlogits.aval), *rest]
        if compat.literal(ct) != 1:
            scaled = [*operands[:scale], operands[scale] * ct, *operands[scale + 1 :]]
            (gradient,) = gradient_operator(*scaled, options=options)
        return [None, rules.match_type(gradient, dlogits.aval, options.rows + 1), *rest]

    return SummedLoss(
        sum_operator, gradient_operator, value_and_gradient_operator, tangent_operator
    )


def without_logits(tangents):
    """The tangents with a zero for that of the logits."""
    return [compat.Zero(jax.typeof(0.0)), *tangents[1:]]


def moves(tangents) -> bool:
    """Whether any tangent is not a symbolic zero."""
    return any(t is not None for t in rules.nonzero(tangents, 0))
