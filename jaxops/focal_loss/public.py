"""Focal loss over sigmoid or softmax probabilities: the public functions."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks, compat
from jaxops._core.implementation import needs_kernels
from jaxops._core.public import public_function
from jaxops.focal_loss import sigmoid, softmax
from jaxops.focal_loss.arguments import Arguments, check_gamma
from jaxops.focal_loss.options import power
from jaxops.reference import focal_loss as reference


@public_function
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
    implementation: str | None = None,
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
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      The shape and dtype of logits for "none" without normalizer, otherwise a scalar, float32 for
      half-precision logits. Arithmetic is in float32, or in float64 where an array is. The gradient
      by logits has their dtype.

    Raises:
      TypeError: an array or number is not of the kind listed above.
      ValueError: a shape, a name or a number is out of what is listed above.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> logits = jnp.zeros((2, 3))  # rows, classes
      >>> labels = jnp.array([1, -1])  # class 1, and background
      >>> jaxops.sigmoid_focal_loss(logits, labels).shape
      (2, 3)
      >>> round(jaxops.sigmoid_focal_loss(logits, labels, reduction="sum").item(), 3)
      0.693

    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection",
    https://arxiv.org/abs/1708.02002.
    """
    name = sigmoid.NAME
    call = Arguments.check(
        name,
        logits,
        labels,
        class_weight,
        sample_weight,
        ignore_index,
        reduction,
        normalizer,
        hard_targets=True,
    )
    gamma = checks.scalar(name, "gamma", gamma)
    alpha = None if alpha is None else checks.scalar(name, "alpha", alpha)
    if isinstance(alpha, float) and not 0 <= alpha <= 1:
        raise ValueError(f"{name}: alpha must be in [0, 1] or None, got {alpha}")
    dtype = call.dtype(call.labels if call.soft else None, class_weight, sample_weight)
    check_gamma(name, gamma, dtype)
    negative, positive = (1.0, 1.0) if alpha is None else (1.0 - alpha, alpha)
    weight = call.row_weight(dtype)
    logits = call.logits.astype(dtype) if dtype == jnp.float64 else call.logits
    labels = call.labels
    if call.soft and labels.dtype != logits.dtype:
        # Integers are 0 or 1: kernels read them as booleans, of one byte.
        labels = labels.astype(dtype if labels.dtype in checks.FLOATS else np.bool_)
    operands = [
        logits,
        labels,
        compat.shard_like_last(sigmoid.make_class_ids(call.classes), logits),
        call.scale(dtype),
        _stack((gamma, negative, positive), dtype),
        *([] if weight is None else [weight]),
    ]
    options = sigmoid.Options(
        rows=call.logits.ndim - 1,
        power=power(gamma),
        soft=call.soft,
        ignored=call.ignored,
        weighted=weight is not None,
    )
    operator = sigmoid.sums.sum if call.reduced else sigmoid.loss_operator
    (loss,) = operator(*map(jnp.asarray, operands), options=options)
    return checkpoint_name(loss.astype(call.result_dtype), name)


@public_function
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
    where: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Focal loss of exclusive classes: ``-a_y (1 - p_y)^gamma log p_y``, p the softmax of logits.

    With ``gamma=0, alpha=None`` it is the softmax cross-entropy, fused: logits are read once, and
    no probabilities are in memory. Soft labels, (..., C), give
    ``-sum_c y_c a_c (1 - p_c)^gamma log p_c``, which XLA compiles.

    It is computed in log space: value and derivatives are finite and exact to a few roundings for
    every logit.

    Args:
      logits: (..., C), float16, bfloat16, float32 or float64.
      labels: integers (...,), the class y of each row. A row whose label is outside [0, C) has no
        class and contributes zero, whatever its logits; it counts in a mean. Or floats (..., C),
        the weight of each class in each row, such as smoothed or mixed labels.
      gamma: focusing parameter >= 0, a number or a scalar array, which may be traced. 0, 1/2, 1
        and 2, given as numbers, are the cheapest.
      alpha: a factor of every row, as a number or scalar array, or (C,) of the rows of each class;
        None is 1.
      class_weight, sample_weight, ignore_index, normalizer: as for `sigmoid_focal_loss`.
      reduction: "none", "sum", or "mean": the sum divided by the number of rows not ignored, and 0
        where there is no such row.
      where: booleans that broadcast to the shape of logits: False leaves a class out of the softmax
        of a row, whatever its logit. A row whose label is such a class has no class.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      The shape (...,) and dtype of logits for "none" without normalizer, otherwise a scalar,
      float32 for half-precision logits. Arithmetic is in float32, or in float64 where an array is.
      The logits' gradient has their dtype.

    Raises:
      TypeError: an array or number is not of the kind listed above.
      ValueError: a shape, a name or a number is out of what is listed above.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> logits, labels = jnp.array([[2.0, 0.0, -1.0], [0.0, 3.0, 0.0]]), jnp.array([0, 1])
      >>> cross_entropy = jaxops.softmax_focal_loss(logits, labels, gamma=0, alpha=None)
      >>> log_p = jax.nn.log_softmax(logits)
      >>> bool(jnp.allclose(cross_entropy, -log_p[jnp.arange(2), labels]))
      True

    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection",
    https://arxiv.org/abs/1708.02002, with the softmax in place of the sigmoid.
    """
    name = softmax.NAME
    call = Arguments.check(
        name,
        logits,
        labels,
        class_weight,
        sample_weight,
        ignore_index,
        reduction,
        normalizer,
        hard_targets=False,
    )
    gamma = checks.scalar(name, "gamma", gamma)
    by_class = None
    if isinstance(alpha, (list, tuple)) or (
        alpha is not None and checks.is_array(alpha) and jnp.ndim(alpha)
    ):
        by_class = checks.float_array(name, "alpha", alpha, 1, "() or (C,)")
        checks.shape(name, "alpha", by_class, (call.classes,), "(C,), one entry a class")
    dtype = call.dtype(call.labels if call.soft else None, class_weight, sample_weight, by_class)
    check_gamma(name, gamma, dtype)
    kept = True if where is None else _classes_kept(where, call.logits)
    labels = call.labels
    if call.soft:
        if by_class is None and alpha is not None:
            alpha = checks.scalar(name, "alpha", alpha)
        factor = alpha if by_class is None else by_class
        return checkpoint_name(_soft_softmax(call, gamma, factor, kept, dtype), name)
    if call.ignored is not None:
        labels = jnp.where(labels == call.ignored, -1, labels)
    logits = call.logits.astype(dtype) if dtype == jnp.float64 else call.logits
    logits, labels = reference.without_classes(logits, labels, kept)
    gamma_array = jnp.asarray(gamma, dtype)
    options = softmax.Options(rows=labels.ndim, power=power(gamma))
    weight, of_alpha = call.row_weight(dtype), None
    if by_class is not None:
        of_class = reference.gather_class(by_class.astype(dtype), labels, call.classes, 0)
        weight = of_class if weight is None else weight * of_class
    elif alpha is not None:
        alpha = checks.scalar(name, "alpha", alpha)
        of_alpha = (
            np.asarray(alpha, dtype) if isinstance(alpha, (int, float)) else alpha.astype(dtype)
        )
    if call.reduced:
        scale = call.scale(dtype)
        scale = scale if of_alpha is None else scale * of_alpha
        operands = [logits, labels, scale, gamma_array, *([] if weight is None else [weight])]
        options = dataclasses.replace(options, weighted=weight is not None)
        (loss,) = softmax.sums.sum(*map(jnp.asarray, operands), options=options)
    else:
        (loss,) = softmax.loss_operator(logits, labels, gamma_array, options=options)
        loss = checkpoint_name(loss, name)  # needed for the gradients of weights
        factors = [factor for factor in (of_alpha, weight) if factor is not None]
        if factors:
            known = (labels >= 0) & (labels < call.classes)
            # Whatever the weights of rows without a class.
            loss = jnp.where(known, loss * math.prod(factors), 0)
    return checkpoint_name(loss.astype(call.result_dtype), name)


def _classes_kept(where, logits):
    name = softmax.NAME
    kept = checks.as_array(name, "where", checks.array(name, "where", where, "(..., C)"))
    if kept.dtype != np.bool_:
        raise TypeError(f"{name}: where must have dtype bool, got {kept.dtype}")
    try:
        fits = jnp.broadcast_shapes(kept.shape, logits.shape) == logits.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name}: where must broadcast to the shape of logits, {logits.shape}, got {kept.shape}"
        )
    return jnp.broadcast_to(kept, logits.shape)


@jax.named_scope(f"jaxops.{softmax.NAME}")
def _soft_softmax(call: Arguments, gamma, alpha, kept, dtype):
    """The loss of soft labels, which has no kernels."""
    function = needs_kernels(softmax.NAME)
    if function is not None:
        raise NotImplementedError(
            f"{function}: implementation='native' needs kernels, and there are none for labels "
            f"{call.labels.shape} of dtype {call.labels.dtype}, only for class ids"
        )
    with jax.numpy_dtype_promotion("standard"):
        y = call.labels.astype(dtype)
        if alpha is not None:
            y = y * jnp.asarray(alpha, dtype)
        loss = reference.soft_softmax_focal(call.logits, y, jnp.asarray(gamma, dtype), kept)
        weight = call.row_weight(dtype)
        loss = loss if weight is None else loss * weight
        loss = loss.sum() * call.scale(dtype) if call.reduced else loss
    return loss.astype(call.result_dtype)


def _stack(scalars, dtype):
    if all(isinstance(s, float) for s in scalars):
        return np.array(scalars, dtype)
    return jnp.stack([jnp.asarray(s, dtype) for s in scalars])
