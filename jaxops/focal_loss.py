"""Focal loss over sigmoid or softmax probabilities.

The sigmoid family has four kernels, all of the same operands: `_loss`, elementwise; `_sum`, which
reads the logits once and writes a scalar; `_gradient`, the derivative of that scalar; and
`_value_and_gradient`, both in one pass. What ties the sum to its derivatives is

    sum, gradient = value_and_gradient(logits, ...)
    d sum         = <gradient, dlogits>              _tangent
    dlogits       = gradient(logits, ...) * ct       its transpose

A program decides what runs. Where the cotangent is known to be one when it is traced, as under
`jax.value_and_grad` of a loss that nothing multiplies, the transpose is the gradient that came with
the sum: two passes over memory. Otherwise the cotangent joins the scale of a `_gradient` of its
own, nothing needs the one that came with the sum, and `_value_and_gradient` becomes `_sum`: three.

The softmax family has `_row_loss`, one loss a row, and `_row_gradient`, whose cotangent is a factor
of each row. Weights of rows are factors outside.

Second derivatives, and those by anything but logits, are those of the definition in jax.numpy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks, compat, rules
from jaxops._core.primitive import Operator
from jaxops.reference import focal_loss as reference

SIGMOID, SOFTMAX = "sigmoid_focal_loss", "softmax_focal_loss"
_REDUCTIONS = ("none", "sum", "mean")


def sigmoid_focal_loss(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    gamma: ArrayLike = 2.0,
    alpha: ArrayLike | None = 0.25,
    class_weight: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    ignore_index: int | None = None,
    reduction: str = "none",
    normalizer: ArrayLike | None = None,
) -> jax.Array:
    """Focal loss of independent classes: cross-entropy in which easy examples count less.

    With z a logit, y its target and ``p = sigmoid(z)``, an element's loss is

        ``-a (1 - p_t)^gamma (y log p + (1 - y) log(1 - p))``

    where ``p_t = y p + (1 - y) (1 - p)`` and ``a = alpha y + (1 - alpha) (1 - y)``. It is computed
    in log space: value and derivatives are finite and exact to a few roundings for every logit.

    Args:
      logits: (..., C), float16, bfloat16, float32 or float64.
      labels: integers (...,), the class of each row; a value outside [0, C) is background, which
        has no class. Or floats (..., C), soft targets in [0, 1].
      gamma: focusing parameter >= 0, a number or a scalar array, which may be traced. 0, 1/2, 1
        and 2, given as numbers, are the cheapest.
      alpha: weight of positive targets in [0, 1], a number or a scalar array; None weighs all by 1.
      class_weight: (C,), a factor of the rows of each class, or (C + 1,) with that of background
        last, which is otherwise 1. Needs integer labels.
      sample_weight: (...,), a factor of each row.
      ignore_index: rows of this label have loss and gradient zero, whatever their logits, and do
        not count in a mean. Needs integer labels.
      reduction: "none", "sum", or "mean": the sum divided by the number of rows not ignored (not
        that of elements), and 0 where there is no such row.
      normalizer: a number or scalar array, which may be traced. The result is the sum divided by
        it, with "none" as with "sum"; not allowed with "mean".

    Returns:
      The shape and dtype of logits for "none" without normalizer, otherwise a scalar, float32 for
      half-precision logits. Arithmetic is in float32, or in float64 where an array is. The gradient
      by logits has their dtype.

    Raises:
      TypeError: an array or number is not of the kind listed above.
      ValueError: a shape, a name or a number is out of what is listed above.

    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection",
    https://arxiv.org/abs/1708.02002.
    """
    me = SIGMOID
    call = _Arguments.check(
        me,
        logits,
        labels,
        class_weight,
        sample_weight,
        ignore_index,
        reduction,
        normalizer,
        soft=True,
    )
    gamma = _gamma(me, gamma)
    alpha = None if alpha is None else _scalar(me, "alpha", alpha)
    if isinstance(alpha, float) and not 0 <= alpha <= 1:
        raise ValueError(f"{me}: alpha must be in [0, 1] or None, got {alpha}")
    dtype = call.dtype(call.labels if call.soft else None, class_weight, sample_weight)
    negative, positive = (1.0, 1.0) if alpha is None else (1.0 - alpha, alpha)
    weight = call.row_weight(dtype)
    logits = call.logits.astype(dtype) if dtype == jnp.float64 else call.logits
    labels = call.labels
    if call.soft and labels.dtype != logits.dtype:
        labels = labels.astype(dtype)
    operands = [
        logits,
        labels,
        compat.shard_like_last(np.arange(call.classes, dtype=np.int32), logits),
        call.scale(dtype),
        _stack((gamma, negative, positive), dtype),
        *([] if weight is None else [weight]),
    ]
    options = _Options(
        rows=call.logits.ndim - 1,
        power=_power(gamma),
        soft=call.soft,
        ignored=call.ignored,
        weighted=weight is not None,
    )
    operator = _sum_operator if call.reduced else _loss_operator
    (loss,) = operator(*map(jnp.asarray, operands), options=options)
    return checkpoint_name(loss.astype(call.result_dtype), me)


def softmax_focal_loss(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    gamma: ArrayLike = 2.0,
    alpha: ArrayLike | None = 0.25,
    class_weight: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    ignore_index: int | None = None,
    reduction: str = "none",
    normalizer: ArrayLike | None = None,
) -> jax.Array:
    """Focal loss of exclusive classes: ``-a_y (1 - p_y)^gamma log p_y``, p the softmax of logits.

    It is computed in log space: value and derivatives are finite and exact to a few roundings for
    every logit.

    Args:
      logits: (..., C), float16, bfloat16, float32 or float64.
      labels: integers (...,), the class y of each row. A row whose label is outside [0, C) has no
        class and contributes zero, whatever its logits; it counts in a mean.
      gamma: focusing parameter >= 0, a number or a scalar array, which may be traced. 0, 1/2, 1
        and 2, given as numbers, are the cheapest.
      alpha: a factor of every row, as a number or scalar array, or (C,) of the rows of each class;
        None is 1.
      class_weight, sample_weight, ignore_index, normalizer: as for `sigmoid_focal_loss`.
      reduction: "none", "sum", or "mean": the sum divided by the number of rows not ignored, and 0
        where there is no such row.

    Returns:
      The shape (...,) and dtype of logits for "none" without normalizer, otherwise a scalar,
      float32 for half-precision logits. Arithmetic is in float32, or in float64 where an array is.
      The gradient by logits has their dtype.

    Raises:
      TypeError: an array or number is not of the kind listed above.
      ValueError: a shape, a name or a number is out of what is listed above.

    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection",
    https://arxiv.org/abs/1708.02002, with the softmax in place of the sigmoid.
    """
    me = SOFTMAX
    call = _Arguments.check(
        me,
        logits,
        labels,
        class_weight,
        sample_weight,
        ignore_index,
        reduction,
        normalizer,
        soft=False,
    )
    gamma = _gamma(me, gamma)
    by_class = None
    if alpha is not None and jnp.ndim(alpha):
        by_class = checks.float_array(me, "alpha", alpha, 1, "() or (C,)")
        checks.shape(me, "alpha", by_class, (call.classes,), "(C,), one entry a class")
    dtype = call.dtype(class_weight, sample_weight, by_class)
    labels = call.labels
    if call.ignored is not None:
        labels = jnp.where(labels == call.ignored, -1, labels)
    (loss,) = _row_loss_operator(
        call.logits.astype(dtype) if dtype == jnp.float64 else call.logits,
        labels,
        jnp.asarray(gamma, dtype),
        options=_RowOptions(rows=labels.ndim, power=_power(gamma)),
    )
    loss = checkpoint_name(loss, me)  # what the gradients by weights need
    factor = call.row_weight(dtype)
    if alpha is not None:
        scale = _scalar(me, "alpha", alpha) if by_class is None else None
        per_row = (
            jnp.asarray(scale, dtype)
            if by_class is None
            else reference.gather_class(by_class.astype(dtype), labels, call.classes, 0)
        )
        factor = per_row if factor is None else factor * per_row
    if factor is not None:
        known = (labels >= 0) & (labels < call.classes)
        loss = jnp.where(known, loss * factor, 0)  # whatever the weights of rows without a class
    if call.reduced:
        loss = loss.sum() * call.scale(dtype)
    return checkpoint_name(loss.astype(call.result_dtype), me)


# --- arguments -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """What the two functions have in common, checked.

    Integer labels are int32 here, and `ignored` is the one whose rows are left out.
    """

    logits: jax.Array
    labels: jax.Array
    soft: bool
    ignored: int | None
    class_weight: jax.Array | None
    sample_weight: jax.Array | None
    reduction: str
    normalizer: Any

    @classmethod
    def check(
        cls,
        me,
        logits,
        labels,
        class_weight,
        sample_weight,
        ignore_index,
        reduction,
        normalizer,
        *,
        soft,
    ):
        logits = checks.float_array(me, "logits", logits, None, "(..., C)")
        if logits.ndim == 0:
            raise ValueError(f"{me}: logits must have shape (..., C), got shape ()")
        classes = logits.shape[-1]
        labels = checks.array(me, "labels", labels, "(...,)")
        is_integer = jnp.issubdtype(labels.dtype, jnp.integer)
        if not is_integer and not (soft and labels.dtype in checks.FLOATS):
            kinds = "integers, or floats of the shape of logits" if soft else "integers"
            raise TypeError(f"{me}: labels must be {kinds}, got dtype {labels.dtype}")
        expected, why = (
            (logits.shape[:-1], "(...,), one class a row of logits")
            if is_integer
            else (logits.shape, "(..., C), soft targets of the shape of logits")
        )
        checks.shape(me, "labels", labels, expected, why)
        if not is_integer:
            for name, value in (("class_weight", class_weight), ("ignore_index", ignore_index)):
                if value is not None:
                    raise ValueError(
                        f"{me}: {name} needs integer labels, got labels of dtype {labels.dtype}"
                    )
        ignored = None
        if is_integer:
            if ignore_index is not None:
                ignore_index = checks.integer(me, "ignore_index", ignore_index)
            labels, ignored = _as_int32(labels, classes, ignore_index)
        if class_weight is not None:
            class_weight = checks.float_array(me, "class_weight", class_weight, 1, "(C,)")
            if class_weight.shape[0] not in (classes, classes + 1):
                raise ValueError(
                    f"{me}: class_weight must have shape ({classes},) or, with background, "
                    f"({classes + 1},), got {class_weight.shape}"
                )
        if sample_weight is not None:
            sample_weight = checks.float_array(me, "sample_weight", sample_weight, None, "(...,)")
            why = "(...,), one entry a row of logits"
            checks.shape(me, "sample_weight", sample_weight, logits.shape[:-1], why)
        reduction = checks.choice(me, "reduction", reduction, _REDUCTIONS)
        if normalizer is not None:
            if reduction == "mean":
                raise ValueError(f'{me}: reduction must not be "mean" where normalizer is given')
            normalizer = _scalar(me, "normalizer", normalizer, integers=True)
        return cls(
            logits,
            jnp.asarray(labels),
            not is_integer,
            ignored,
            class_weight,
            sample_weight,
            reduction,
            normalizer,
        )

    @property
    def classes(self) -> int:
        return self.logits.shape[-1]

    @property
    def reduced(self) -> bool:
        return self.reduction != "none" or self.normalizer is not None

    @property
    def result_dtype(self):
        return (
            jnp.promote_types(self.logits.dtype, jnp.float32) if self.reduced else self.logits.dtype
        )

    def dtype(self, *others) -> jnp.dtype:
        """What the arithmetic is done in."""
        arrays = [jnp.asarray(a) for a in others if a is not None]
        return reference.accumulation_dtype(self.logits, *arrays)

    def row_weight(self, dtype):
        """The factor of each row, None where there are no weights."""
        if self.class_weight is None and self.sample_weight is None:
            return None
        return reference.row_weight(
            self.logits if self.soft else self.labels,
            self.classes,
            self.class_weight,
            self.sample_weight,
            dtype,
        )

    def scale(self, dtype):
        """What the sum is multiplied by."""
        if self.normalizer is not None:
            return 1 / jnp.asarray(self.normalizer, dtype)
        if self.reduction != "mean":
            return np.ones((), dtype)
        if self.ignored is None:
            return np.asarray(1 / max(1, math.prod(self.logits.shape[:-1])), dtype)
        counted = jnp.sum(self.labels != self.ignored)
        return 1 / jnp.maximum(counted, 1).astype(dtype)


def _as_int32(labels, classes: int, ignore_index: int | None):
    """Integer labels as int32, and which of them is ignored.

    What int32 cannot hold is background, or the ignored label.
    """
    held = np.iinfo(labels.dtype)
    if ignore_index is not None and not held.min <= ignore_index <= held.max:
        ignore_index = None
    int32 = np.iinfo(np.int32)
    if int32.min <= held.min and held.max <= int32.max:
        return labels.astype(np.int32), ignore_index
    library = np if isinstance(labels, np.ndarray) else jnp
    known = (labels >= 0) & (labels < classes)
    narrow = library.where(known, labels.astype(np.int32), np.int32(-1))
    if ignore_index is None:
        return narrow, None
    return library.where(labels == ignore_index, np.int32(-2), narrow), -2


def _scalar(me: str, argument: str, value: Any, integers: bool = False) -> float | jax.Array:
    """A number as a float, a scalar array as it is."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        return float(value)
    kinds = (jnp.floating, jnp.integer) if integers else (jnp.floating,)
    if not isinstance(value, jax.Array) or not any(jnp.issubdtype(value.dtype, k) for k in kinds):
        got = value.dtype if isinstance(value, (jax.Array, np.ndarray)) else type(value).__name__
        raise TypeError(f"{me}: {argument} must be a number or a float scalar array, got {got}")
    if value.ndim:
        raise ValueError(f"{me}: {argument} must be a scalar, got shape {value.shape}")
    return value


def _gamma(me: str, value: Any) -> float | jax.Array:
    gamma = _scalar(me, "gamma", value)
    if isinstance(gamma, float) and not (gamma >= 0 and math.isfinite(gamma)):
        raise ValueError(f"{me}: gamma must be finite and >= 0, got {gamma}")
    return gamma


def _stack(scalars, dtype):
    if all(isinstance(s, float) for s in scalars):
        return np.array(scalars, dtype)
    return jnp.stack([jnp.asarray(s, dtype) for s in scalars])


#: Exponents that need no exponential, in the order of their codes in common/focal_loss.h.
_POWERS = (None, 0.0, 0.5, 1.0, 2.0)


def _power(gamma: float | jax.Array) -> float | None:
    return gamma if isinstance(gamma, float) and gamma in _POWERS else None


# --- sigmoid: what all its primitives are told ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Options:
    """What every primitive of the sigmoid family is told, beside shapes.

    Their operands are logits, labels, the class that each entry of a row is for (so that a shard of
    classes knows which ones it has), the scale of the sum, parameters (gamma, and the factors of
    negative and positive targets), and the weights of rows where `weighted`.
    """

    rows: int  # the number of dimensions before that of classes
    power: float | None  # gamma, where it is one of _POWERS
    soft: bool
    ignored: int | None
    weighted: bool

    @property
    def row(self) -> str:
        return _row(self.rows)

    @property
    def operands(self) -> str:
        labels = f"{self.row} classes" if self.soft else self.row
        weight = f", {self.row}" if self.weighted else ""
        return f"{self.row} classes, {labels}, classes, , parameters{weight}"


def _row(rows: int) -> str:
    return " ".join(f"row{i}" for i in range(rows))


def _attributes(*, options):
    return {
        "rows": np.int64(options.rows),
        "power": np.int32(_POWERS.index(options.power)),
        "has_ignored": np.bool_(options.ignored is not None),
        "ignored": np.int32(options.ignored or 0),
    }


def _expand(array, dims: int):
    """`array` with `dims` dimensions of size 1 at its end."""
    return jnp.expand_dims(array, tuple(range(array.ndim, array.ndim + dims)))


def _elements(slope, logits, labels, class_ids, scale, parameters, weight=None, *, options):
    """The weighted loss of every element in jax.numpy, or its derivative if `slope`."""
    rank = options.rows + 1
    gamma, negative, positive = (_expand(parameters[..., i], rank) for i in range(3))
    factor = _expand(scale, rank)
    if weight is not None:
        factor = factor * weight[..., None]
    z = logits.astype(parameters.dtype)
    if options.soft:
        y = labels.astype(z.dtype)
        function = reference.soft_focal_slope if slope else reference.soft_focal
        return factor * (y * positive + (1 - y) * negative) * function(z, y, gamma)
    ids = jnp.expand_dims(
        class_ids, tuple(range(class_ids.ndim - 1, class_ids.ndim - 1 + rank - 1))
    )
    target = labels[..., None] == ids
    counted = True if options.ignored is None else (labels != options.ignored)[..., None]
    z = jnp.where(counted, z, 0)
    function = reference.focal_slope if slope else reference.focal
    value = function(jnp.where(target, -z, z), gamma)
    sign = -1 if slope else 1
    return jnp.where(counted, factor * jnp.where(target, sign * positive, negative) * value, 0)


def _sum_elements(elements, options):
    return elements.sum(tuple(range(-options.rows - 1, 0)))


def _partial_sums(logits, *others, options):
    """Work space of the CUDA sums: one for each thread block, as many as the shapes alone say."""
    rank = options.rows + 1
    entries = math.prod(np.broadcast_shapes(*_batch_shapes(logits, *others, options=options)))
    size = math.prod(logits.shape[-rank:])
    splits = max(1, min(_MAX_SPLITS, -(-size // _SPLIT)))
    dtype = reference.accumulation_dtype(logits)
    return [jax.ShapeDtypeStruct((entries, splits), dtype)]


#: Elements that are worth a thread block, and the most blocks; kernels of long sums use fewer.
_SPLIT, _MAX_SPLITS = 2048, 16384


def _batch_shapes(logits, labels, class_ids, scale, parameters, weight=None, *, options):
    ranks = (options.rows + 1, options.rows + options.soft, 1, 0, 1, options.rows)
    operands = (logits, labels, class_ids, scale, parameters, weight)
    return [
        x.shape[: x.ndim - rank] for x, rank in zip(operands, ranks, strict=True) if x is not None
    ]


def _without_logits(tangents):
    """The tangents with a zero for that of the logits."""
    return [compat.Zero(jax.typeof(0.0)), *tangents[1:]]


def _moves(tangents) -> bool:
    return any(t is not None for t in rules.live(tangents, 0))


# --- sigmoid: the loss of every element ----------------------------------------------------------


def _loss_reference(*operands, options):
    return [_elements(False, *operands, options=options).astype(operands[0].dtype)]


_loss_operator = Operator(
    "sigmoid_focal_loss",
    signature=lambda *, options: f"{options.operands} -> {options.row} classes",
    reference=_loss_reference,
    dtypes=lambda logits, *_, **__: [logits.dtype],
    attributes=_attributes,
    replicated=("parameters",),
)


@_loss_operator.def_jvp
def _loss_jvp(primals, tangents, *, options):
    loss = _loss_operator(*primals, options=options)
    terms = []
    (dlogits,) = rules.live(tangents[:1], 1)
    if dlogits is not None:
        terms.append(_gradient_operator(*primals, options=options)[0] * dlogits)
    others = _without_logits(tangents)
    if _moves(others):
        function = functools.partial(_loss_reference, options=options)
        terms += rules.jvp(function, primals, others)[1]
    return loss, [sum(terms)]


# --- sigmoid: its sum, and the derivative of that -----------------------------------------------


def _sum_reference(*operands, options):
    return [_sum_elements(_elements(False, *operands, options=options), options)]


def _gradient_reference(*operands, options):
    return [_elements(True, *operands, options=options).astype(operands[0].dtype)]


def _both_reference(*operands, options):
    return [
        *_sum_reference(*operands, options=options),
        *_gradient_reference(*operands, options=options),
    ]


def _sum_dtype(*operands, **_):
    return operands[4].dtype  # that of the parameters


_sum_operator = Operator(
    "sigmoid_focal_loss_sum",
    signature=lambda *, options: f"{options.operands} -> ",
    reference=_sum_reference,
    dtypes=lambda *operands, **_: [_sum_dtype(*operands)],
    attributes=_attributes,
    scratch=_partial_sums,
    replicated=("parameters",),
)

_gradient_operator = Operator(
    "sigmoid_focal_loss_gradient",
    signature=lambda *, options: f"{options.operands} -> {options.row} classes",
    reference=_gradient_reference,
    dtypes=lambda logits, *_, **__: [logits.dtype],
    attributes=_attributes,
    replicated=("parameters",),
)

_value_and_gradient_operator = Operator(
    "sigmoid_focal_loss_value_and_gradient",
    signature=lambda *, options: f"{options.operands} -> , {options.row} classes",
    reference=_both_reference,
    dtypes=lambda *operands, **_: [_sum_dtype(*operands), operands[0].dtype],
    attributes=_attributes,
    scratch=_partial_sums,
    replicated=("parameters",),
)


@_sum_operator.def_jvp
def _sum_jvp(primals, tangents, *, options):
    (dlogits,) = rules.live(tangents[:1], 1)
    terms = []
    if dlogits is None:
        (value,) = _sum_operator(*primals, options=options)
    else:
        value, gradient = _value_and_gradient_operator(*primals, options=options)
        terms += _tangent_operator(gradient, dlogits, *primals, options=options)
    others = _without_logits(tangents)
    if _moves(others):
        function = functools.partial(_sum_reference, options=options)
        terms += rules.jvp(function, primals, others)[1]
    return [value], [sum(terms)]


@_gradient_operator.def_jvp
def _gradient_jvp(primals, tangents, *, options):
    function = functools.partial(_gradient_reference, options=options)
    _, tangent = rules.jvp(function, primals, tangents)
    return _gradient_operator(*primals, options=options), tangent


@_value_and_gradient_operator.def_jvp
def _value_and_gradient_jvp(primals, tangents, *, options):
    (value,), (dvalue,) = _sum_jvp(primals, tangents, options=options)
    (gradient,), (dgradient,) = _gradient_jvp(primals, tangents, options=options)
    return [value, gradient], [dvalue, dgradient]


@_value_and_gradient_operator.def_dead_code
def _value_and_gradient_dead_code(used, *operands, options):
    operator = _sum_operator if used[0] else _gradient_operator
    return operator, tuple(range(len(operands))), {"options": options}


# --- sigmoid: the tangent of the sum -------------------------------------------------------------


def _inner_product(gradient, dlogits, *operands, options):
    dtype = _sum_dtype(*operands)
    return [_sum_elements(gradient.astype(dtype) * dlogits.astype(dtype), options)]


# Of gradient and dlogits; the operands behind the gradient are there for the transpose.
_tangent_operator = Operator(
    "sigmoid_focal_loss_tangent",
    signature=lambda *, options: (
        f"{options.row} classes, {options.row} classes, {options.operands} -> "
    ),
    composition=_inner_product,
    dtypes=lambda _, __, *operands, **___: [_sum_dtype(*operands)],
)


@_tangent_operator.def_jvp
def _tangent_jvp(primals, tangents, *, options):
    gradient, dlogits, *operands = primals
    dgradient, ddlogits = rules.live(tangents[:2], 2)
    terms = []
    if dgradient is not None:
        terms += _inner_product(dgradient, dlogits, *operands, options=options)
    if ddlogits is not None:
        terms += _tangent_operator(gradient, ddlogits, *operands, options=options)
    tangent = sum(terms) if terms else jnp.zeros((), _sum_dtype(*operands))
    return _tangent_operator(*primals, options=options), [tangent]


@_tangent_operator.def_transpose
def _tangent_transpose(cotangents, gradient, dlogits, *operands, options):
    (ct,) = cotangents
    rest = [None] * len(operands)
    if isinstance(ct, compat.Zero):
        return [None, compat.Zero(dlogits.aval), *rest]
    if compat.literal(ct) != 1:
        logits, labels, class_ids, scale, *others = operands
        scaled = [logits, labels, class_ids, scale * ct, *others]
        (gradient,) = _gradient_operator(*scaled, options=options)
    return [None, rules.fit(gradient, dlogits.aval, options.rows + 1), *rest]


# --- softmax: the loss of every row --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _RowOptions:
    """What the primitives of the softmax family are told, beside shapes."""

    rows: int  # the number of dimensions before that of classes
    power: float | None  # gamma, where it is one of _POWERS

    @property
    def row(self) -> str:
        return _row(self.rows)


def _row_attributes(*, options):
    return {"rows": np.int64(options.rows), "power": np.int32(_POWERS.index(options.power))}


def _row_loss_reference(logits, labels, gamma, *, options):
    gamma = _expand(gamma, options.rows)
    return [reference.softmax_focal(logits, labels, gamma, gamma.dtype)]


_row_loss_operator = Operator(
    "softmax_focal_loss",
    signature=lambda *, options: f"{options.row} classes, {options.row},  -> {options.row}",
    reference=_row_loss_reference,
    dtypes=lambda logits, labels, gamma, **_: [gamma.dtype],
    attributes=_row_attributes,
    replicated=("classes",),
)


@_row_loss_operator.def_jvp
def _row_loss_jvp(primals, tangents, *, options):
    dlogits, _, dgamma = rules.live(tangents, 3)
    loss = _row_loss_operator(*primals, options=options)
    terms = []
    if dlogits is not None:
        terms += _row_tangent_operator(*primals, dlogits, options=options)
    if dgamma is not None:
        function = functools.partial(_row_loss_reference, options=options)
        terms += rules.jvp(function, primals, _without_logits(tangents))[1]
    return loss, [sum(terms)]


def _row_gradient_reference(logits, labels, gamma, ct, *, options):
    def loss(z):
        return _row_loss_reference(z, labels, gamma, options=options)[0]

    shape = (*np.broadcast_shapes(logits.shape[:-1], labels.shape, ct.shape), logits.shape[-1])
    wide = jnp.broadcast_to(logits, shape).astype(gamma.dtype)
    value, pull = jax.vjp(loss, wide)
    return [pull(jnp.broadcast_to(ct, value.shape))[0].astype(logits.dtype)]


_row_gradient_operator = Operator(
    "softmax_focal_loss_gradient",
    signature=lambda *, options: (
        f"{options.row} classes, {options.row}, , {options.row} -> {options.row} classes"
    ),
    reference=_row_gradient_reference,
    dtypes=lambda logits, *_, **__: [logits.dtype],
    attributes=_row_attributes,
    replicated=("classes",),
)


@_row_gradient_operator.def_jvp
def _row_gradient_jvp(primals, tangents, *, options):
    function = functools.partial(_row_gradient_reference, options=options)
    _, tangent = rules.jvp(function, primals, tangents)
    return _row_gradient_operator(*primals, options=options), tangent


def _row_inner_product(logits, labels, gamma, dlogits, *, options):
    shape = np.broadcast_shapes(logits.shape[:-1], labels.shape)
    ones = jnp.ones(shape, gamma.dtype)
    (gradient,) = _row_gradient_operator(logits, labels, gamma, ones, options=options)
    return [(gradient.astype(gamma.dtype) * dlogits.astype(gamma.dtype)).sum(-1)]


_row_tangent_operator = Operator(
    "softmax_focal_loss_tangent",
    signature=lambda *, options: (
        f"{options.row} classes, {options.row}, , {options.row} classes -> {options.row}"
    ),
    composition=_row_inner_product,
    dtypes=lambda logits, labels, gamma, *_, **__: [gamma.dtype],
)


@_row_tangent_operator.def_jvp
def _row_tangent_jvp(primals, tangents, *, options):
    function = functools.partial(_row_inner_product, options=options)
    return rules.jvp(function, primals, tangents)


@_row_tangent_operator.def_transpose
def _row_tangent_transpose(cotangents, logits, labels, gamma, dlogits, *, options):
    (ct,) = cotangents
    if isinstance(ct, compat.Zero):
        return [None, None, None, compat.Zero(dlogits.aval)]
    (gradient,) = _row_gradient_operator(logits, labels, gamma, ct, options=options)
    return [None, None, None, rules.fit(gradient, dlogits.aval, options.rows + 1)]
