"""Focal loss over sigmoid or softmax probabilities.

The kernels of both families: the loss itself, of every element of a sigmoid (`_loss`) and of every
row of a softmax (`_row_loss`), and those of its sum, which `summed_loss` ties together: the sum
reads the logits once and writes a scalar, its gradient, and both in one pass.

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
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator
from jaxops.focal_loss.softmax_shards import sharded_rows
from jaxops.focal_loss.summed_loss import moves, summed_loss, without_logits
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

    Targets 0 and 1 have the shape of logits, (..., C). Integers of shape (...,) are class ids, also
    where there is one class: with logits (N, 1) and labels (N,), 0 is the class, and any other
    label is background.

    With z a logit, y its target and ``p = sigmoid(z)``, an element's loss is

        ``-a (1 - p_t)^gamma (y log p + (1 - y) log(1 - p))``

    where ``p_t = y p + (1 - y) (1 - p)`` and ``a = alpha y + (1 - alpha) (1 - y)``. It is computed
    in log space: value and derivatives are finite and exact to a few roundings for every logit.

    Args:
      logits: (..., C), float16, bfloat16, float32 or float64.
      labels: (..., C), the target of each logit: floats in [0, 1], booleans, or integers 0 and 1
        (with others the result is undefined). Or integers (...,), the class of each row; a value
        outside [0, C) is background, which has no class.
      gamma: focusing parameter >= 0, a number or a scalar array, which may be traced. 0, 1/2, 1
        and 2, given as numbers, are the cheapest.
      alpha: weight of positive targets in [0, 1], a number or a scalar array; None weighs all by 1.
      class_weight: (C,), a factor of the rows of each class, or (C + 1,) with that of background
        last, which is otherwise 1. Needs class ids as labels.
      sample_weight: (...,), a factor of each row.
      ignore_index: rows of this label have loss and gradient zero, whatever their logits, and do
        not count in a mean. Needs class ids as labels.
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
    gamma = _scalar(me, "gamma", gamma)
    alpha = None if alpha is None else _scalar(me, "alpha", alpha)
    if isinstance(alpha, float) and not 0 <= alpha <= 1:
        raise ValueError(f"{me}: alpha must be in [0, 1] or None, got {alpha}")
    dtype = call.dtype(call.labels if call.soft else None, class_weight, sample_weight)
    _check_gamma(me, gamma, dtype)
    negative, positive = (1.0, 1.0) if alpha is None else (1.0 - alpha, alpha)
    weight = call.row_weight(dtype)
    logits = call.logits.astype(dtype) if dtype == jnp.float64 else call.logits
    labels = call.labels
    if call.soft and labels.dtype != logits.dtype:
        # Integers and booleans are 0 or 1, in any dtype.
        labels = labels.astype(dtype if labels.dtype in checks.FLOATS else logits.dtype)
    operands = [
        logits,
        labels,
        compat.shard_like_last(_class_ids(call.classes), logits),
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
    operator = _sums.sum if call.reduced else _loss_operator
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
    gamma = _scalar(me, "gamma", gamma)
    by_class = None
    if isinstance(alpha, (list, tuple)) or (checks.is_array(alpha) and jnp.ndim(alpha)):
        by_class = checks.float_array(me, "alpha", alpha, 1, "() or (C,)")
        checks.shape(me, "alpha", by_class, (call.classes,), "(C,), one entry a class")
    dtype = call.dtype(class_weight, sample_weight, by_class)
    _check_gamma(me, gamma, dtype)
    labels = call.labels
    if call.ignored is not None:
        labels = jnp.where(labels == call.ignored, -1, labels)
    logits = call.logits.astype(dtype) if dtype == jnp.float64 else call.logits
    gamma_array = jnp.asarray(gamma, dtype)
    options = _RowOptions(rows=labels.ndim, power=_power(gamma))
    weight, of_alpha = call.row_weight(dtype), None
    if by_class is not None:
        of_class = reference.gather_class(by_class.astype(dtype), labels, call.classes, 0)
        weight = of_class if weight is None else weight * of_class
    elif alpha is not None:
        alpha = _scalar(me, "alpha", alpha)
        of_alpha = np.asarray(alpha, dtype) if isinstance(alpha, float) else alpha.astype(dtype)
    if call.reduced:
        scale = call.scale(dtype)
        scale = scale if of_alpha is None else scale * of_alpha
        operands = [logits, labels, scale, gamma_array, *([] if weight is None else [weight])]
        options = dataclasses.replace(options, weighted=weight is not None)
        (loss,) = _row_sums.sum(*map(jnp.asarray, operands), options=options)
    else:
        (loss,) = _row_loss_operator(logits, labels, gamma_array, options=options)
        loss = checkpoint_name(loss, me)  # what the gradients by weights need
        factors = [factor for factor in (of_alpha, weight) if factor is not None]
        if factors:
            known = (labels >= 0) & (labels < call.classes)
            # Whatever the weights of rows without a class.
            loss = jnp.where(known, loss * math.prod(factors), 0)
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
        is_target = _check_labels(me, labels, logits.shape, soft)
        ignored = None
        if is_target:
            for name, value in (("class_weight", class_weight), ("ignore_index", ignore_index)):
                if value is not None:
                    raise ValueError(
                        f"{me}: {name} needs class ids as labels, integers of shape (...,), got "
                        f"targets of the shape of logits, of dtype {labels.dtype}"
                    )
        else:
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
        if (reduction != "none" or normalizer is not None) and compat.has_symbolic_shape(logits):
            raise NotImplementedError(
                f"{me}: a reduced loss of logits of symbolic shape "
                f"({', '.join(map(str, logits.shape))}) is not supported; export it with "
                'reduction="none"'
            )
        return cls(
            logits,
            jnp.asarray(labels),
            is_target,
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
        return accumulation_dtype(self.logits) if self.reduced else self.logits.dtype

    def dtype(self, *others) -> jnp.dtype:
        """What the arithmetic is done in."""
        arrays = [jnp.asarray(a) for a in others if a is not None]
        return accumulation_dtype(self.logits, *arrays)

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


def _check_labels(me: str, labels, logits_shape: tuple[int, ...], soft: bool) -> bool:
    """Whether labels are targets of each logit rather than class ids.

    They are told apart by their shapes, of which one has a dimension more than the other.
    """
    is_integer = jnp.issubdtype(labels.dtype, jnp.integer)
    is_bool = labels.dtype == np.bool_
    ids = "integers of shape (...,), class ids"
    kinds = f"{ids}, or targets of the shape of logits" if soft else ids
    known = is_integer or (soft and (is_bool or labels.dtype in checks.FLOATS))
    misfit = labels.shape == (logits_shape[:-1] if is_bool else logits_shape)
    if not known or (misfit and (is_bool or not soft)):
        raise TypeError(
            f"{me}: labels must be {kinds}, got dtype {labels.dtype} and shape {labels.shape}"
        )
    if soft and labels.shape == logits_shape:
        return True
    if not is_integer:
        why = "(..., C), targets of the shape of logits"
        checks.shape(me, "labels", labels, logits_shape, why)
    why = "(...,), one class a row of logits"
    if soft:
        why += f"; or {logits_shape}, (..., C), targets 0 and 1"
    checks.shape(me, "labels", labels, logits_shape[:-1], why)
    return False


def _as_int32(labels, classes: int, ignore_index: int | None):
    """Integer labels as int32, and which of them is ignored.

    Labels that are no class may all become the same one: they are background, or the ignored label.
    """
    held = jnp.iinfo(labels.dtype)
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
    # As an array: JAX takes a number for an int32.
    is_ignored = labels == np.asarray(ignore_index, labels.dtype)
    return library.where(is_ignored, np.int32(-2), narrow), -2


def _scalar(me: str, argument: str, value: Any, integers: bool = False) -> float | jax.Array:
    """A number as a float, a scalar array as it is."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        return float(value)
    kinds = (jnp.floating, jnp.integer) if integers else (jnp.floating,)
    is_array = isinstance(value, (jax.Array, np.ndarray))
    if not is_array or not any(jnp.issubdtype(value.dtype, k) for k in kinds):
        got = value.dtype if is_array else type(value).__name__
        raise TypeError(f"{me}: {argument} must be a number or a float scalar array, got {got}")
    if value.ndim:
        raise ValueError(f"{me}: {argument} must be a scalar, got shape {value.shape}")
    return value


def _check_gamma(me: str, gamma: float | jax.Array, dtype: jnp.dtype):
    if isinstance(gamma, float) and not 0 <= gamma <= float(jnp.finfo(dtype).max):
        raise ValueError(f"{me}: gamma must be finite in {dtype} and >= 0, got {gamma}")


def _stack(scalars, dtype):
    if all(isinstance(s, float) for s in scalars):
        return np.array(scalars, dtype)
    return jnp.stack([jnp.asarray(s, dtype) for s in scalars])


#: Exponents that need no exponential, in the order of their codes in common/focal_loss.h.
_POWERS = (None, 0.0, 0.5, 1.0, 2.0)


def _power(gamma: float | jax.Array) -> float | None:
    return gamma if isinstance(gamma, float) and gamma in _POWERS else None


# --- sigmoid: what all its primitives are told ---------------------------------------------------

#: Class ids count from 1, because XLA keeps no constant that counts from 0: it would launch a
#: kernel that makes it anew for each call. Handlers refuse programs whose ids count otherwise.
_FIRST_CLASS_ID = 1


def _class_ids(classes: int) -> np.ndarray:
    return np.arange(_FIRST_CLASS_ID, _FIRST_CLASS_ID + classes, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class _Options:
    """What every primitive of the sigmoid family is told, beside shapes.

    Their operands are logits, labels, the class that each entry of a row is for (so that a shard of
    classes knows which ones it has), the scale of the sum, parameters (gamma, and the factors of
    negative and positive targets), and the weights of rows where `weighted`.

    Classes are counted from `_FIRST_CLASS_ID`.
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
        "first_class_id": np.int32(_FIRST_CLASS_ID),
    }


def _expand(array, dims: int):
    """`array` with `dims` dimensions of size 1 at its end."""
    return jnp.expand_dims(array, tuple(range(array.ndim, array.ndim + dims)))


def _elements(slope, logits, labels, class_ids, scale, parameters, weight=None, *, options):
    """The weighted loss of every element in jax.numpy, or its derivative if `slope`."""
    rank = options.rows + 1
    gamma, negative, positive = (_expand(parameters[..., i], rank) for i in range(3))
    factor = _expand(scale, rank)
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


# --- sigmoid: the loss of every element ----------------------------------------------------------


def _loss_reference(*operands, options):
    return [_elements(False, *operands, options=options).astype(operands[0].dtype)]


_loss_operator = Operator(
    SIGMOID,
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
        terms.append(_sums.gradient(*primals, options=options)[0] * dlogits)
    others = without_logits(tangents)
    if moves(others):
        function = functools.partial(_loss_reference, options=options)
        terms += rules.jvp(function, primals, others)[1]
    return loss, [sum(terms)]


# --- sigmoid: its sum, and the derivative of that -----------------------------------------------


def _sum_reference(*operands, options):
    rows = tuple(range(-options.rows - 1, 0))
    return [_elements(False, *operands, options=options).sum(rows)]


def _gradient_reference(*operands, options):
    return [_elements(True, *operands, options=options).astype(operands[0].dtype)]


def _sum_by_others(primals, tangents, *, options):
    function = functools.partial(_sum_reference, options=options)
    return None, rules.jvp(function, primals, tangents)[1][0]


_sums = summed_loss(
    SIGMOID,
    sum_reference=_sum_reference,
    gradient_reference=_gradient_reference,
    by_others=_sum_by_others,
    batch_shapes=_batch_shapes,
    attributes=_attributes,
    replicated=("parameters",),
    scale=3,
)


# --- softmax: the loss of every row --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _RowOptions:
    """What the primitives of the softmax family are told, beside shapes.

    The loss of rows is one of logits, labels and gamma. The operands of its sum and the gradient
    are logits, labels, a scale of the results, gamma, and weights of the rows where `weighted`.
    """

    rows: int  # the number of dimensions before that of classes
    power: float | None  # gamma, where it is one of _POWERS
    weighted: bool = False

    @property
    def row(self) -> str:
        return _row(self.rows)

    @property
    def operands(self) -> str:
        weight = f", {self.row}" if self.weighted else ""
        return f"{self.row} classes, {self.row}, , {weight}"


def _row_attributes(*, options):
    return {"rows": np.int64(options.rows), "power": np.int32(_POWERS.index(options.power))}


def _row_loss_reference(logits, labels, gamma, *, options):
    gamma = _expand(gamma, options.rows)
    return [reference.softmax_focal(logits, labels, gamma, gamma.dtype)]


def _row_loss_across(logits, labels, gamma, *, options, axes):
    gamma = _expand(gamma, options.rows)
    return [sharded_rows(logits, labels, gamma.dtype, axes).losses(gamma)]


_row_loss_operator = Operator(
    SOFTMAX,
    signature=lambda *, options: f"{options.row} classes, {options.row},  -> {options.row}",
    reference=_row_loss_reference,
    dtypes=lambda logits, labels, gamma, **_: [gamma.dtype],
    attributes=_row_attributes,
    across={"classes": _row_loss_across},
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
        terms += rules.jvp(function, primals, without_logits(tangents))[1]
    return loss, [sum(terms)]


def _row_gradient(logits, labels, gamma, ct, options):
    """The gradient where each row's loss has a cotangent of its own."""
    options = dataclasses.replace(options, weighted=True)
    return _row_sums.gradient(logits, labels, jnp.ones_like(gamma), gamma, ct, options=options)[0]


def _row_inner_product(logits, labels, gamma, dlogits, *, options):
    shape = np.broadcast_shapes(logits.shape[:-1], labels.shape)
    gradient = _row_gradient(logits, labels, gamma, jnp.ones(shape, gamma.dtype), options)
    return [(gradient.astype(gamma.dtype) * dlogits.astype(gamma.dtype)).sum(-1)]


_row_tangent_operator = Operator(
    f"{SOFTMAX}_row_tangent",
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
    gradient = _row_gradient(logits, labels, gamma, ct, options)
    return [None, None, None, rules.fit(gradient, dlogits.aval, options.rows + 1)]


# --- softmax: its sum, and the derivative of that ------------------------------------------------


def _row_factor(known, scale, weight, options):
    """What the loss of each row is multiplied by, of those whose label is a class."""
    factor = _expand(scale, options.rows)
    return factor if weight is None else factor * jnp.where(known, weight, 0)


def _weigh_rows(losses, known, scale, weight, options):
    """The sum of weighted losses of rows, of which those without a class have none."""
    factor = _row_factor(known, scale, weight, options)
    return jnp.where(known, factor * losses, 0).sum(tuple(range(-options.rows, 0)))


def _are_known(logits, labels):
    return (labels >= 0) & (labels < logits.shape[-1])


def _row_sum_reference(logits, labels, scale, gamma, weight=None, *, options):
    (losses,) = _row_loss_reference(logits, labels, gamma, options=options)
    return [_weigh_rows(losses, _are_known(logits, labels), scale, weight, options)]


def _row_gradient_reference(logits, labels, scale, gamma, weight=None, *, options):
    def total(z):
        others = (labels, scale, gamma, weight)
        return _row_sum_reference(z, *others, options=options)[0].sum()

    batch = np.broadcast_shapes(
        *_row_batch_shapes(logits, labels, scale, gamma, weight, options=options)
    )
    core = logits.shape[logits.ndim - options.rows - 1 :]
    wide = jnp.broadcast_to(logits, (*batch, *core)).astype(gamma.dtype)
    return [jax.grad(total)(wide).astype(logits.dtype)]


def _row_sum_across(logits, labels, scale, gamma, weight=None, *, options, axes):
    """The sum and the gradient."""
    gamma = _expand(gamma, options.rows)
    rows = sharded_rows(logits, labels, gamma.dtype, axes)
    factor = _row_factor(rows.known, scale, weight, options)
    gradient = rows.gradient(gamma, factor).astype(logits.dtype)
    return [_weigh_rows(rows.losses(gamma), rows.known, scale, weight, options), gradient]


def _row_sum_by_others(primals, tangents, *, options):
    logits, labels, _, gamma, *_ = primals
    dscale, dgamma, dweight = rules.live(tangents[2:], 3)
    value, terms = None, []
    if dscale is not None or dweight is not None:
        unweighted = dataclasses.replace(options, weighted=False)
        (losses,) = _row_loss_operator(logits, labels, gamma, options=unweighted)
        losses = checkpoint_name(losses, SOFTMAX)

        def of_factors(scale, weight=None):
            return _weigh_rows(losses, _are_known(logits, labels), scale, weight, options)

        factors = [primals[i] for i in (2, 4) if i < len(primals)]
        moved = [tangents[i] for i in (2, 4) if i < len(primals)]
        value, tangent = rules.jvp(of_factors, factors, moved)
        terms.append(tangent)
    if dgamma is not None:
        by_gamma = [compat.Zero(jax.typeof(0.0))] * len(primals)
        by_gamma[3] = dgamma
        function = functools.partial(_row_sum_reference, options=options)
        terms += rules.jvp(function, primals, by_gamma)[1]
    return value, sum(terms)


def _row_batch_shapes(logits, labels, scale, gamma, weight=None, *, options):
    ranks = (options.rows + 1, options.rows, 0, 0, options.rows)
    operands = (logits, labels, scale, gamma, weight)
    return [
        x.shape[: x.ndim - rank] for x, rank in zip(operands, ranks, strict=True) if x is not None
    ]


_row_sums = summed_loss(
    SOFTMAX,
    sum_reference=_row_sum_reference,
    gradient_reference=_row_gradient_reference,
    by_others=_row_sum_by_others,
    batch_shapes=_row_batch_shapes,
    attributes=_row_attributes,
    replicated=(),
    scale=2,
    across={"classes": _row_sum_across},
)
