"""The primitives of the focal loss of a sigmoid: of every element, and of their sum."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from jaxops._core import rules
from jaxops._core.primitive import Operator
from jaxops.focal_loss.options import append_ones, power_name, row_dims
from jaxops.focal_loss.summed_loss import moves, summed_loss, without_logits
from jaxops.reference import focal_loss as reference

NAME = "sigmoid_focal_loss"

#: Class ids count from 1, because XLA keeps no constant that counts from 0: it would launch a
#: kernel that makes it again for each call. They are kFirstClassId in common/focal_loss.h, too.
_FIRST_CLASS_ID = 1


def make_class_ids(classes: int) -> np.ndarray:
    """The class that each entry of a row is for."""
    return np.arange(_FIRST_CLASS_ID, _FIRST_CLASS_ID + classes, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Options:
    """Parameters of every primitive of the sigmoid family, next to shapes.

    Their operands are logits, labels, the class that each entry of a row is for (so that a shard of
    classes knows which ones it has), the scale of the sum, parameters (gamma, and the factors of
    negative and positive targets), and the weights of rows where `weighted`.

    Classes are counted from `_FIRST_CLASS_ID`.
    """

    rows: int  # the number of dimensions before that of classes
    power: float | None  # gamma, where it is one of POWERS
    soft: bool
    ignored: int | None
    weighted: bool

    @property
    def row(self) -> str:
        """The dimensions of rows in a signature."""
        return row_dims(self.rows)

    @property
    def operands(self) -> str:
        """The dimensions of the operands."""
        labels = f"{self.row} classes" if self.soft else self.row
        weight = f", {self.row}" if self.weighted else ""
        return f"{self.row} classes, {labels}, classes, , parameters{weight}"


def _attributes(*, options):
    return {
        "rows": np.int64(options.rows),
        "power": power_name(options.power),
        "has_ignored": np.bool_(options.ignored is not None),
        "ignored": np.int32(options.ignored or 0),
    }


def _elements(slope, logits, labels, class_ids, scale, parameters, weight=None, *, options):
    """The weighted loss of every element in jax.numpy, or its derivative if `slope`."""
    rank = options.rows + 1
    gamma, negative, positive = (append_ones(parameters[..., i], rank) for i in range(3))
    factor = append_ones(scale, rank)
    counted = True if options.ignored is None else (labels != options.ignored)[..., None]
    if weight is not None:
        # Whatever those of ignored rows: by zero, one that is not finite would still count.
        factor = factor * jnp.where(counted, weight[..., None], 0)
    z = logits.astype(parameters.dtype)
    if options.soft:
        y = labels.astype(z.dtype)
        function = reference.soft_focal_slope if slope else reference.soft_focal
        return factor * (y * positive + (1 - y) * negative) * function(z, y, gamma)
    ids = jnp.expand_dims(
        class_ids, tuple(range(class_ids.ndim - 1, class_ids.ndim - 1 + rank - 1))
    )
    target = labels[..., None] == ids - _FIRST_CLASS_ID
    z = jnp.where(counted, z, 0)
    function = reference.focal_slope if slope else reference.focal
    value = function(jnp.where(target, -z, z), gamma)
    sign = -1 if slope else 1
    return jnp.where(counted, factor * jnp.where(target, sign * positive, negative) * value, 0)


def _batch_shapes(logits, labels, class_ids, scale, parameters, weight=None, *, options):
    ranks = (options.rows + 1, options.rows + options.soft, 1, 0, 1, options.rows)
    operands = (logits, labels, class_ids, scale, parameters, weight)
    return [
        x.shape[: x.ndim - rank] for x, rank in zip(operands, ranks, strict=True) if x is not None
    ]


# --- the loss of every element -------------------------------------------------------------------


def _loss_reference(*operands, options):
    return [_elements(False, *operands, options=options).astype(operands[0].dtype)]


loss_operator = Operator(
    NAME,
    signature=lambda *, options: f"{options.operands} -> {options.row} classes",
    reference=_loss_reference,
    dtypes=lambda logits, *_, **__: [logits.dtype],
    attributes=_attributes,
    replicated=("parameters",),
)


@loss_operator.def_jvp
def _loss_jvp(primals, tangents, *, options):
    loss = loss_operator(*primals, options=options)
    terms = []
    (dlogits,) = rules.nonzero(tangents[:1], 1)
    if dlogits is not None:
        terms.append(sums.gradient(*primals, options=options)[0] * dlogits)
    others = without_logits(tangents)
    if moves(others):
        function = functools.partial(_loss_reference, options=options)
        terms += rules.jvp(function, primals, others)[1]
    return loss, [sum(terms)]


# --- its sum, and the derivative of that ----------------------------------------------------------


def _sum_reference(*operands, options):
    rows = tuple(range(-options.rows - 1, 0))
    return [_elements(False, *operands, options=options).sum(rows)]


def _gradient_reference(*operands, options):
    return [_elements(True, *operands, options=options).astype(operands[0].dtype)]


def _sum_by_others(primals, tangents, *, options):
    function = functools.partial(_sum_reference, options=options)
    return None, rules.jvp(function, primals, tangents)[1][0]


sums = summed_loss(
    NAME,
    sum_reference=_sum_reference,
    gradient_reference=_gradient_reference,
    by_others=_sum_by_others,
    batch_shapes=_batch_shapes,
    attributes=_attributes,
    replicated=("parameters",),
    scale=3,
)
