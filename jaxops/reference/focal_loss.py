"""Focal loss in plain `jax.numpy`: its definition, and the functions of one logit it is made of.

With q the probability of the wrong answer, the loss of a sigmoid whose target is 0 or 1 and of a
softmax are the same function `focal` of one number x: how far the wrong answer leads. Its first
derivatives are written out, as sums of terms of one sign and without inf - inf or 0 * inf, so that
they are exact to rounding over the whole range of the logits.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxops._core.dtypes import accumulation_dtype


def sigmoid_focal_loss(
    logits,
    labels,
    *,
    gamma=2.0,
    alpha=0.25,
    class_weight=None,
    sample_weight=None,
    ignore_index=None,
    reduction="none",
    normalizer=None,
):
    """-a (1 - p_t)^gamma (y log p + (1 - y) log(1 - p)), a = alpha y + (1 - alpha)(1 - y)."""
    arrays = (class_weight, sample_weight, labels)
    dtype = accumulation_dtype(logits, *(a for a in arrays if _is_float(a)))
    negative, positive = (1.0, 1.0) if alpha is None else (1.0 - alpha, alpha)
    counted = _counted(labels, ignore_index)
    if _is_float(labels):
        z, y = logits.astype(dtype), labels.astype(dtype)
        loss = (y * positive + (1 - y) * negative) * soft_focal(z, y, jnp.asarray(gamma, dtype))
    else:
        z = jnp.where(counted[..., None], logits, 0).astype(dtype)
        target = labels[..., None] == jnp.arange(logits.shape[-1])
        loss = focal(jnp.where(target, -z, z), jnp.asarray(gamma, dtype))
        loss = loss * jnp.where(target, positive, negative)
    weight = row_weight(labels, logits.shape[-1], class_weight, sample_weight, dtype)
    loss = jnp.where(counted[..., None], loss * weight[..., None], 0)
    return _reduce(loss, logits, counted, reduction, normalizer)


def softmax_focal_loss(
    logits,
    labels,
    *,
    gamma=2.0,
    alpha=0.25,
    class_weight=None,
    sample_weight=None,
    ignore_index=None,
    reduction="none",
    normalizer=None,
):
    """-a_y (1 - p_y)^gamma log p_y over softmax(logits); zero where the label is no class."""
    arrays = (alpha, class_weight, sample_weight)
    dtype = accumulation_dtype(logits, *(a for a in arrays if _is_float(a) and jnp.ndim(a)))
    counted = _counted(labels, ignore_index)
    classes = logits.shape[-1]
    loss = softmax_focal(logits, jnp.where(counted, labels, -1), jnp.asarray(gamma, dtype), dtype)
    if alpha is not None:
        alpha = jnp.asarray(alpha, dtype)
        loss = loss * (gather_class(alpha, labels, classes, 0) if alpha.ndim else alpha)
    weight = row_weight(labels, classes, class_weight, sample_weight, dtype)
    valid = counted & (labels >= 0) & (labels < classes)
    return _reduce(jnp.where(valid, loss * weight, 0), logits, counted, reduction, normalizer)


def _is_float(array) -> bool:
    return array is not None and jnp.issubdtype(jnp.result_type(array), jnp.floating)


def _counted(labels, ignore_index):
    """Which rows are not ignored."""
    if _is_float(labels):
        return jnp.ones(labels.shape[:-1], bool)
    return jnp.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index


def _reduce(loss, logits, counted, reduction, normalizer):
    if reduction == "none" and normalizer is None:
        return loss.astype(logits.dtype)
    total = loss.sum()
    if reduction == "mean":
        total = total / jnp.maximum(counted.sum(), 1)
    if normalizer is not None:
        total = total / jnp.asarray(normalizer, loss.dtype)
    return total.astype(accumulation_dtype(logits))


def gather_class(values, labels, classes, background):
    """values[..., label], and `background` where the label is outside [0, classes)."""
    known = (labels >= 0) & (labels < classes)
    if not classes:
        return jnp.full(labels.shape, background, values.dtype)
    return jnp.where(known, _pick(values, jnp.where(known, labels, 0)), background)


@jax.custom_jvp
def _pick(values, index):
    """values[index], whose transpose sums in a fixed order: a scatter on a GPU adds in any."""
    # On explicit meshes a gather must be told what it makes.
    sharding = jax.typeof(index).sharding
    explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return values.at[index].get(out_sharding=sharding if explicit else None)


@_pick.defjvp
def _pick_jvp(primals, tangents):
    values, index = primals
    classes = jnp.arange(values.shape[-1], dtype=jnp.int32)
    chosen = index[..., None].astype(jnp.int32) == classes
    return _pick(values, index), jnp.sum(jnp.where(chosen, tangents[0], 0), -1)


def row_weight(labels, classes, class_weight, sample_weight, dtype):
    """The product of the weight of a row's label and that of the row."""
    weight = jnp.ones(labels.shape[:-1] if _is_float(labels) else labels.shape, dtype)
    if class_weight is not None:
        by_class = class_weight.astype(dtype)
        background = by_class[classes] if class_weight.shape[0] > classes else 1
        weight = weight * gather_class(by_class[:classes], labels, classes, background)
    return weight if sample_weight is None else weight * sample_weight.astype(dtype)


# --- functions of one logit ----------------------------------------------------------------------


@jax.custom_jvp
def sigmoid(x):
    """1 / (1 + exp(-x)), whose derivative is exact to rounding on both sides."""
    e = jnp.exp(-jnp.abs(x))
    return jnp.where(x >= 0, 1, e) / (1 + e)


@sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    s = sigmoid(x)
    return s, s * sigmoid(-x) * dx


@jax.custom_jvp
def softplus(x):
    """log(1 + exp(x))."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@softplus.defjvp
def _softplus_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return softplus(x), sigmoid(x) * dx


def _times_right(value, x):
    """value sigmoid(-x), also where the second underflows and the first makes up for it."""
    far = x >= 32
    near = jnp.exp(-jnp.where(x >= 0, jnp.where(far, x - 16, x), 0))
    tail = value * near * jnp.where(far, math.exp(-16), 1)
    return jnp.where(x >= 0, tail * sigmoid(x), value * sigmoid(-x))


def _capped_softplus(x):
    """softplus up to where sigmoid(-x), which it is multiplied by, has long been zero."""
    return jnp.minimum(softplus(x), 1e5)


def _finite(x):
    """x with the largest finite number for infinity: what is multiplied by it is zero there."""
    return jnp.minimum(x, jnp.finfo(x.dtype).max)


def _log_sigmoid(x):
    return -_finite(softplus(-x))


def _power(x, gamma):
    """sigmoid(x)^gamma, exact to a few roundings though the exponent may be long."""

    def high(value):
        bits = jnp.finfo(value.dtype)
        return jax.lax.reduce_precision(value, bits.nexp, (bits.nmant - 1) // 2)

    # The loss has underflowed long before the bound, which keeps 0 * inf away.
    log_high, log_low = jnp.clip(x, -2000, 0), -jnp.log1p(jnp.exp(-jnp.abs(x)))
    product = high(gamma) * high(log_high)
    rest = (gamma - high(gamma)) * high(log_high) + gamma * (log_high - high(log_high))
    rest = rest + gamma * log_low
    total = product + rest
    back = total - product
    power = jnp.exp(total)
    return power + power * ((product - (total - back)) + (rest - back))


@jax.custom_jvp
def focal(x, gamma):
    """sigmoid(x)^gamma softplus(x), the loss when the wrong answer leads by x."""
    return _power(x, gamma) * softplus(x)


@focal.defjvp
def _focal_jvp(primals, tangents):
    (x, gamma), (dx, dgamma) = primals, tangents
    loss = focal(x, gamma)
    return loss, focal_slope(x, gamma) * dx + _log_sigmoid(x) * loss * dgamma


@jax.custom_jvp
def focal_slope(x, gamma):
    """The derivative of `focal` by x."""
    product = _times_right(_capped_softplus(x), x)
    return _power(x, gamma) * (gamma * product + sigmoid(x))


@focal_slope.defjvp
def _focal_slope_jvp(primals, tangents):
    (x, gamma), (dx, dgamma) = primals, tangents
    slope = focal_slope(x, gamma)
    by_gamma = _power(x, gamma) * _times_right(_capped_softplus(x), x)
    return slope, focal_curvature(x, gamma) * dx + (_log_sigmoid(x) * slope + by_gamma) * dgamma


def focal_curvature(x, gamma):
    """The second derivative of `focal` by x."""
    wrong, right = sigmoid(x), sigmoid(-x)
    term = gamma * (gamma * right - wrong) * _capped_softplus(x) + (2 * gamma + 1) * wrong
    return _times_right(_power(x, gamma) * term, x)


def _soft_terms(z, y):
    """The probability of the wrong answer and the cross-entropy for a target y in [0, 1]."""

    def weigh(weight, value):  # 0 * inf is 0
        return weight * jnp.where(jnp.isinf(value) & (weight == 0), 0, value)

    wrong = y * sigmoid(-z) + (1 - y) * sigmoid(z)
    return wrong, weigh(y, softplus(-z)) + weigh(1 - y, softplus(z))


def _log(wrong):
    # Where `wrong` underflows what is multiplied by the power underflows as well.
    return jnp.log(jnp.maximum(wrong, jnp.finfo(wrong.dtype).tiny))


@jax.custom_jvp
def soft_focal(z, y, gamma):
    """(1 - p_t)^gamma times the cross-entropy of logit z for a target y in [0, 1]."""
    wrong, cross_entropy = _soft_terms(z, y)
    return jnp.exp(gamma * _log(wrong)) * cross_entropy


@soft_focal.defjvp
def _soft_focal_jvp(primals, tangents):
    (z, y, gamma), (dz, dy, dgamma) = primals, tangents
    wrong, cross_entropy = _soft_terms(z, y)
    loss = soft_focal(z, y, gamma)
    ratio = _finite(cross_entropy) / jnp.maximum(wrong, jnp.finfo(wrong.dtype).tiny)
    by_target = jnp.exp(gamma * _log(wrong)) * (gamma * (sigmoid(-z) - sigmoid(z)) * ratio - z)
    return loss, soft_focal_slope(z, y, gamma) * dz + by_target * dy + _log(wrong) * loss * dgamma


def soft_focal_slope(z, y, gamma):
    """The derivative of `soft_focal` by z."""
    wrong, cross_entropy = _soft_terms(z, y)
    p, q = sigmoid(z), sigmoid(-z)
    share = p * q / jnp.maximum(wrong, jnp.finfo(wrong.dtype).tiny)
    term = (1 - 2 * y) * gamma * (share * _finite(cross_entropy))
    return jnp.exp(gamma * _log(wrong)) * (term + ((1 - y) * p - y * q))


# --- functions of a row --------------------------------------------------------------------------


def softmax_focal(logits, labels, gamma, dtype):
    """(1 - p_y)^gamma (-log p_y) of rows of logits; zero where the label is no class."""
    classes = logits.shape[-1]
    known = (labels >= 0) & (labels < classes)
    if not classes:
        shape = jnp.broadcast_shapes(logits.shape[:-1], labels.shape, jnp.shape(gamma))
        return jnp.zeros(shape, dtype)
    z = jnp.where(known[..., None], logits, 0).astype(dtype)
    target = labels[..., None] == jnp.arange(classes)
    lead = _log_sum_exp_of(z, ~target) - jnp.where(target, z, 0).sum(-1)
    return jnp.where(known, focal(lead, gamma), 0)


@jax.custom_jvp
def _log_sum_exp_of(z, chosen):
    return jax.nn.logsumexp(z, axis=-1, where=chosen)


@_log_sum_exp_of.defjvp
def _log_sum_exp_of_jvp(primals, tangents):
    (z, chosen), (dz, _) = primals, tangents
    return _log_sum_exp_of(z, chosen), (_softmax_of(z, chosen) * dz).sum(-1)


@jax.custom_jvp
def _softmax_of(z, chosen):
    largest = jnp.max(z, axis=-1, keepdims=True, where=chosen, initial=jnp.finfo(z.dtype).min)
    terms = jnp.where(chosen, jnp.exp(jnp.where(chosen, z - largest, 0)), 0)
    total = terms.sum(-1, keepdims=True)
    return terms / jnp.where(total == 0, 1, total)


@_softmax_of.defjvp
def _softmax_of_jvp(primals, tangents):
    (z, chosen), (dz, _) = primals, tangents
    shares = _softmax_of(z, chosen)
    # Exactly zero where there is but one choice.
    return shares, shares * (dz - (shares * dz).sum(-1, keepdims=True))
