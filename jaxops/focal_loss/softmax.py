"""The primitives of the focal loss of a softmax: of every row, and of their sum."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._core import compat, rules
from jaxops._core.primitive import Operator
from jaxops.focal_loss.options import append_ones, power_name, row_dims
from jaxops.focal_loss.softmax_shards import sharded_rows
from jaxops.focal_loss.summed_loss import summed_loss, without_logits
from jaxops.reference import focal_loss as reference

NAME = "softmax_focal_loss"


@dataclasses.dataclass(frozen=True)
class Options:
    """Parameters of the primitives of the softmax family, next to shapes.

    The loss of rows is one of logits, labels and gamma. The operands of its sum and the gradient
    are logits, labels, a scale of the results, gamma, and weights of the rows where `weighted`.
    """

    rows: int  # the number of dimensions before that of classes
    power: float | None  # gamma, where it is one of POWERS
    weighted: bool = False

    @property
    def row(self) -> str:
        """The dimensions of rows in a signature."""
        return row_dims(self.rows)

    @property
    def operands(self) -> str:
        """The dimensions of the operands."""
        weight = f", {self.row}" if self.weighted else ""
        return f"{self.row} classes, {self.row}, , {weight}"


def _attributes(*, options):
    return {"rows": np.int64(options.rows), "power": power_name(options.power)}


def _loss_reference(logits, labels, gamma, *, options):
    gamma = append_ones(gamma, options.rows)
    return [reference.softmax_focal(logits, labels, gamma, gamma.dtype)]


def _loss_across(logits, labels, gamma, *, options, axes):
    gamma = append_ones(gamma, options.rows)
    return [sharded_rows(logits, labels, gamma.dtype, axes).losses(gamma)]


loss_operator = Operator(
    NAME,
    signature=lambda *, options: f"{options.row} classes, {options.row},  -> {options.row}",
    reference=_loss_reference,
    dtypes=lambda logits, labels, gamma, **_: [gamma.dtype],
    attributes=_attributes,
    across={"classes": _loss_across},
)


@loss_operator.def_jvp
def _loss_jvp(primals, tangents, *, options):
    dlogits, _, dgamma = rules.nonzero(tangents, 3)
    loss = loss_operator(*primals, options=options)
    terms = []
    if dlogits is not None:
        terms += _tangent_operator(*primals, dlogits, options=options)
    if dgamma is not None:
        function = functools.partial(_loss_reference, options=options)
        terms += rules.jvp(function, primals, without_logits(tangents))[1]
    return loss, [sum(terms)]


def _gradient(logits, labels, gamma, ct, options):
    """The gradient where each row's loss has a cotangent of its own."""
    options = dataclasses.replace(options, weighted=True)
    return sums.gradient(logits, labels, jnp.ones_like(gamma), gamma, ct, options=options)[0]


def _inner_product(logits, labels, gamma, dlogits, *, options):
    shape = lax.broadcast_shapes(logits.shape[:-1], labels.shape)
    gradient = _gradient(logits, labels, gamma, jnp.ones(shape, gamma.dtype), options)
    return [(gradient.astype(gamma.dtype) * dlogits.astype(gamma.dtype)).sum(-1)]


_tangent_operator = Operator(
    f"{NAME}_row_tangent",
    signature=lambda *, options: (
        f"{options.row} classes, {options.row}, , {options.row} classes -> {options.row}"
    ),
    composition=_inner_product,
    dtypes=lambda logits, labels, gamma, *_, **__: [gamma.dtype],
)


@_tangent_operator.def_jvp
def _tangent_jvp(primals, tangents, *, options):
    function = functools.partial(_inner_product, options=options)
    return rules.jvp(function, primals, tangents)


@_tangent_operator.def_transpose
def _tangent_transpose(cotangents, logits, labels, gamma, dlogits, *, options):
    (ct,) = cotangents
    if isinstance(ct, compat.Zero):
        return [None, None, None, compat.Zero(dlogits.aval)]
    gradient = _gradient(logits, labels, gamma, ct, options)
    return [None, None, None, rules.match_type(gradient, dlogits.aval, options.rows + 1)]


# --- its sum, and the derivative of that ----------------------------------------------------------


def _row_factor(known, scale, weight, options):
    """The factor of each row's loss; with weights, zero unless its label is a class."""
    factor = append_ones(scale, options.rows)
    return factor if weight is None else factor * jnp.where(known, weight, 0)


def _weigh_rows(losses, known, scale, weight, options):
    """The sum of weighted losses of rows, of which those without a class have none."""
    factor = _row_factor(known, scale, weight, options)
    return jnp.where(known, factor * losses, 0).sum(tuple(range(-options.rows, 0)))


def _are_known(logits, labels):
    return (labels >= 0) & (labels < logits.shape[-1])


def _sum_reference(logits, labels, scale, gamma, weight=None, *, options):
    (losses,) = _loss_reference(logits, labels, gamma, options=options)
    return [_weigh_rows(losses, _are_known(logits, labels), scale, weight, options)]


def _gradient_reference(logits, labels, scale, gamma, weight=None, *, options):
    def total(z):
        others = (labels, scale, gamma, weight)
        return _sum_reference(z, *others, options=options)[0].sum()

    batch = lax.broadcast_shapes(
        *_batch_shapes(logits, labels, scale, gamma, weight, options=options)
    )
    core = logits.shape[logits.ndim - options.rows - 1 :]
    wide = jnp.broadcast_to(logits, (*batch, *core)).astype(gamma.dtype)
    return [jax.grad(total)(wide).astype(logits.dtype)]


def _sum_across(logits, labels, scale, gamma, weight=None, *, options, axes):
    """The sum and the gradient."""
    gamma = append_ones(gamma, options.rows)
    rows = sharded_rows(logits, labels, gamma.dtype, axes)
    factor = _row_factor(rows.known, scale, weight, options)
    gradient = rows.gradient(gamma, factor).astype(logits.dtype)
    return [_weigh_rows(rows.losses(gamma), rows.known, scale, weight, options), gradient]


def _sum_by_others(primals, tangents, *, options):
    logits, labels, _, gamma, *_ = primals
    dscale, dgamma, dweight = rules.nonzero(tangents[2:], 3)
    value, terms = None, []
    if dscale is not None or dweight is not None:
        unweighted = dataclasses.replace(options, weighted=False)
        (losses,) = loss_operator(logits, labels, gamma, options=unweighted)
        losses = checkpoint_name(losses, NAME)

        def weigh(scale, weight=None):
            return _weigh_rows(losses, _are_known(logits, labels), scale, weight, options)

        factors = [primals[i] for i in (2, 4) if i < len(primals)]
        moved = [tangents[i] for i in (2, 4) if i < len(primals)]
        value, tangent = rules.jvp(weigh, factors, moved)
        terms.append(tangent)
    if dgamma is not None:
        by_gamma: list[Any] = [compat.Zero(jax.typeof(0.0))] * len(primals)
        by_gamma[3] = dgamma
        function = functools.partial(_sum_reference, options=options)
        terms += rules.jvp(function, primals, by_gamma)[1]
    return value, sum(terms)


def _batch_shapes(logits, labels, scale, gamma, weight=None, *, options):
    ranks = (options.rows + 1, options.rows, 0, 0, options.rows)
    operands = (logits, labels, scale, gamma, weight)
    return [
        x.shape[: x.ndim - rank] for x, rank in zip(operands, ranks, strict=True) if x is not None
    ]


sums = summed_loss(
    NAME,
    sum_reference=_sum_reference,
    gradient_reference=_gradient_reference,
    by_others=_sum_by_others,
    batch_shapes=_batch_shapes,
    attributes=_attributes,
    replicated=(),
    scale=2,
    across={"classes": _sum_across},
)
