"""Focal loss in plain `jax.numpy`: its definition, and the functions of one logit it is made of.

With q the probability of the wrong answer, the loss of a sigmoid whose target is 0 or 1 and of a
softmax are the same function `focal` of one number x: how far the wrong answer leads. Its first
derivatives are written out, as sums of terms of one sign and without inf - inf or 0 * inf, so that
they are exact to rounding over the whole range of the logits.
"""

from __future__ import annotations

import collections
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._core.dtypes import accumulation_dtype


def sigmoid_focal_loss(
    logits,
    labels,
    *,
    gamma=2.0,
    alpha: Any = 0.25,
    class_weight=None,
    sample_weight=None,
    ignore_index=None,
    reduction="none",
    normalizer=None,
):
    """-a (1 - p_t)^gamma (y log p + (1 - y) log(1 - p)), a = alpha y + (1 - alpha)(1 - y)."""
    if labels.ndim == logits.ndim and not _is_float(labels):
        labels = labels.astype(logits.dtype)
    arrays = (class_weight, sample_weight, labels)
    dtype = accumulation_dtype(logits, *(a for a in arrays if _is_float(a)))
    negative, positive = (1.0, 1.0) if alpha is None else (1.0 - alpha, alpha)
    counted = _counted(labels, ignore_index)
    if _is_float(labels):
        z, y = logits.astype(dtype), labels.astype(dtype)
        loss = (y * positive + (1 - y) * negative) * soft_focal(z, y, jnp.asarray(gamma, dtype))
    else:
        z = jnp.where(counted[..., None], logits, 0).astype(dtype)
        target = labels[..., None] == class_ids(logits.shape[-1], logits.ndim)
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
    alpha: Any = 0.25,
    class_weight=None,
    sample_weight=None,
    ignore_index=None,
    reduction="none",
    normalizer=None,
    where=None,
):
    """-a_y (1 - p_y)^gamma log p_y over softmax(logits); zero where the label is no class.

    With labels (..., C), sum_c y_c of that. Classes where `where` is False are none of their row.
    """
    kept = True if where is None else jnp.broadcast_to(where, logits.shape)
    soft = _is_float(labels)
    arrays = (alpha, class_weight, sample_weight, labels)
    dtype = accumulation_dtype(
        logits, *(a for a in arrays if a is not None and _is_float(a) and jnp.ndim(a))
    )
    counted = _counted(labels, ignore_index)
    classes = logits.shape[-1]
    gamma = jnp.asarray(gamma, dtype)
    if soft:
        y = labels.astype(dtype) * (1 if alpha is None else jnp.asarray(alpha, dtype))
        loss = soft_softmax_focal(logits, y, gamma, kept)
        weight = row_weight(labels, classes, None, sample_weight, dtype)
        return _reduce(loss * weight, logits, counted, reduction, normalizer)
    logits, of_kept = without_classes(logits, labels, kept)
    loss = softmax_focal(logits, jnp.where(counted, of_kept, -1), gamma, dtype)
    if alpha is not None:
        alpha = jnp.asarray(alpha, dtype)
        loss = loss * (gather_class(alpha, labels, classes, 0) if alpha.ndim else alpha)
    weight = row_weight(labels, classes, class_weight, sample_weight, dtype)
    valid = counted & (of_kept >= 0) & (of_kept < classes)
    return _reduce(jnp.where(valid, loss * weight, 0), logits, counted, reduction, normalizer)


def _is_float(array: Any) -> bool:
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


def class_ids(classes, rank):
    """0, 1, ..., classes - 1 along the last of `rank` dimensions."""
    return jnp.arange(classes, dtype=jnp.int32).reshape((1,) * (rank - 1) + (classes,))


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
    chosen = index[..., None].astype(jnp.int32) == class_ids(values.shape[-1], index.ndim + 1)
    tangent = jnp.expand_dims(tangents[0], tuple(range(index.ndim)))
    return _pick(values, index), jnp.sum(jnp.where(chosen, tangent, 0), -1)


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


@jax.custom_jvp
def _times_right(value, x):
    """value sigmoid(-x), also where the second underflows and the first makes up for it."""
    far = x >= 32
    near = jnp.exp(-jnp.where(x >= 0, jnp.where(far, x - 16, x), 0))
    tail = value * near * jnp.where(far, math.exp(-16), 1)
    return jnp.where(x >= 0, tail * sigmoid(x), value * sigmoid(-x))


@_times_right.defjvp
def _times_right_jvp(primals, tangents):
    (value, x), (dvalue, dx) = primals, tangents
    by_x = -_times_right(value * sigmoid(x), x)
    return _times_right(value, x), _times_right(dvalue, x) + by_x * dx


# Where softplus(x) is multiplied by sigmoid(-x), or log(sigmoid(x)) by sigmoid(x), the product has
# long been zero beyond this bound, whose powers are finite.
_BOUND = 1e5


@jax.custom_jvp
def _capped_softplus(x):
    """softplus(x), which is multiplied by sigmoid(-x)."""
    return jnp.minimum(softplus(x), _BOUND)


@_capped_softplus.defjvp
def _capped_softplus_jvp(primals, tangents):
    return _capped_softplus(*primals), sigmoid(*primals) * tangents[0]


def _log_sigmoid(x):
    """log(sigmoid(x)), which is multiplied by sigmoid(x) or softplus(x)."""
    return -_capped_softplus(-x)


def _exp_of_product(gamma, log_high, log_low, gamma_low=0.0):
    """exp((gamma + gamma_low) (log_high + log_low)), exact to a few roundings.

    It is so though the exponent may be long. The second terms are small: gamma_low to gamma, and
    log_low to log_high or to one.
    """
    bits = jnp.finfo(gamma.dtype)

    def high(value):
        short = jax.lax.reduce_precision(value, bits.nexp, (bits.nmant - 1) // 2)
        return jnp.clip(short, bits.min, bits.max)

    log_high = jnp.maximum(log_high, bits.min)
    exponent = gamma * log_high
    product = high(gamma) * high(log_high)
    rest = (gamma - high(gamma)) * high(log_high) + gamma * (log_high - high(log_high))
    rest = rest + gamma * log_low + gamma_low * (log_high + log_low)
    total = product + rest
    back = total - product
    power = jnp.exp(total)
    power = power + power * ((product - (total - back)) + (rest - back))
    # Where the exponent is out of every range its parts may be inf - inf.
    power = jnp.where(total < -2000, 0, power)
    return jnp.where(exponent < -2000, 0, jnp.where(exponent > 2000, jnp.inf, power))


@jax.custom_jvp
def _power(x, gamma):
    """sigmoid(x)^gamma."""
    return _exp_of_product(gamma, jnp.minimum(x, 0), -jnp.log1p(jnp.exp(-jnp.abs(x))))


@_power.defjvp
def _power_jvp(primals, tangents):
    (x, gamma), (dx, dgamma) = primals, tangents
    power = _power(x, gamma)
    return power, _times_right(gamma * power, x) * dx + _log_sigmoid(x) * power * dgamma


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
    # The power is zero where this would be too large, and a very large gamma is scaled, so that no
    # product overflows.
    by_power = jnp.minimum(gamma * right - wrong, 1e4)
    scale = jnp.where(gamma > 1e20, 2.0**-40, 1.0).astype(x.dtype)
    small = scale * gamma
    term = small * by_power * _capped_softplus(x) + (2 * small + scale) * wrong
    return _times_right(_power(x, gamma) * term, x) / scale


# --- functions of a logit and its soft target ----------------------------------------------------
#
# With W = y sigmoid(-z) + (1 - y) sigmoid(z), the probability of the wrong answer, and H the
# cross-entropy, a derivative of any order of W^gamma H is W^gamma times a polynomial in
#
#   gamma,  v = 1 - 2 y,  d = sigmoid(-z) - sigmoid(z),  z,  a = sigmoid(z) sigmoid(-z) / W,
#   h = H,  b = dH/dz,  l = log W,  and w = W, whose exponent may be negative,
#
# because the derivatives of all of these are such polynomials. W may underflow, and its inverse
# overflow: the powers of it are therefore one function of log W.

_VARIABLES = "gvdzahblw"


def _monomial(text):
    """The exponents of a product of variables; a variable after "/" divides."""
    over, _, under = text.partition("/")
    return tuple(over.count(x) - under.count(x) for x in _VARIABLES)


def _polynomial(**terms):
    return {x: [(n, _monomial(m)) for n, m in of] for x, of in terms.items()}


#: By z, by y and by gamma: the derivatives of the variables, and that of gamma log W as `power`.
_DERIVATIVES = (
    _polynomial(
        d=[(-2, "aw")],
        z=[(1, "")],
        a=[(1, "ad"), (-1, "vaa")],
        h=[(1, "b")],
        b=[(1, "aw")],
        l=[(1, "va")],
        w=[(1, "vaw")],
        power=[(1, "gva")],
    ),
    _polynomial(
        v=[(-2, "")],
        a=[(-1, "ad/w")],
        h=[(-1, "z")],
        b=[(-1, "")],
        l=[(1, "d/w")],
        w=[(1, "d")],
        power=[(1, "gd/w")],
    ),
    _polynomial(g=[(1, "")], power=[(1, "l")]),
)


def _derive(terms, rules):
    """The derivative of the product of W^gamma and a polynomial, as a polynomial like `terms`."""
    found = collections.Counter()
    for exponents, factor in terms:
        products = [(factor, exponents, rules["power"])]
        for i, name in enumerate(_VARIABLES):
            if exponents[i]:
                rest = (*exponents[:i], exponents[i] - 1, *exponents[i + 1 :])
                products.append((factor * exponents[i], rest, rules.get(name, ())))
        for number, rest, rule in products:
            for n, more in rule:
                found[tuple(map(operator.add, rest, more))] += number * n
    return tuple((exponents, n) for exponents, n in sorted(found.items()) if n)


_LOSS = ((_monomial("h"), 1),)
_SLOPE = _derive(_LOSS, _DERIVATIVES[0])


def soft_focal(z, y, gamma):
    """(1 - p_t)^gamma times the cross-entropy of logit z for a target y in [0, 1]."""
    return _soft(_LOSS, z, y, gamma)


def soft_focal_slope(z, y, gamma):
    """The derivative of `soft_focal` by z."""
    return _soft(_SLOPE, z, y, gamma)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _soft(terms, z, y, gamma):
    """W^gamma times the polynomial `terms`."""
    leads = z >= 0
    e = jnp.exp(-jnp.abs(z))
    inverse, log1p = 1 / (1 + e), jnp.log1p(e)
    # The parts of y and 1 - y that weigh the less and the more probable of the two answers.
    small, big = jnp.where(leads, y, 1 - y), jnp.where(leads, 1 - y, y)
    hard = big == 0
    # W / inverse, which of a hard target is e, though that may underflow.
    total = jnp.where(hard, 1, small * e + big)
    entropy = log1p + jnp.where(hard, 0, big * jnp.abs(z))
    sign = jnp.where(leads, 1.0, -1.0)
    by_entropy = jnp.where(hard, -e, big - small * e) * sign
    log_high, log_low = _log(total)
    log_high = jnp.where(hard, -jnp.abs(z), log_high)
    log_low = log_low - log1p
    right = inverse * (e * big + small)  # 1 - W, for the logarithm of what is nearly one
    # One over W is part of these where W is in the denominator.
    entropy_over = jnp.where(hard, jnp.where(e == 0, 1, log1p / e), entropy / total) / inverse
    values = {
        "a": jnp.where(hard, inverse, inverse * e / total),
        "g": gamma,
        "v": 1 - 2 * y,
        "d": sign * jnp.expm1(-jnp.abs(z)) * inverse,
        "b": by_entropy * inverse,
        "l": jnp.where(right < 0.25, jnp.log1p(-right), log_high + log_low),
        "h": entropy,
        "z": z,
        "b/w": jnp.where(hard, -sign, by_entropy / total),
        "h/w": entropy_over,
    }
    powers = {}
    result = 0
    for exponents, factor in terms:
        degree = dict(zip(_VARIABLES, exponents, strict=True))
        over = next((x for x in "hb" if degree[x] and degree["w"] < 0), None)
        if over:
            degree |= {over: 0, f"{over}/w": 1, "w": degree["w"] + 1}
        exponent = degree.pop("w")
        if exponent not in powers:
            total_exponent = gamma + exponent
            back = total_exponent - gamma
            lost = (gamma - (total_exponent - back)) + (exponent - back)
            powers[exponent] = _exp_of_product(total_exponent, log_high, log_low, lost)
        term = factor * powers[exponent]
        # One of each at a time: gamma^2 may overflow where (gamma a)^2 does not.
        for i in range(max(degree.values())):
            for name, value in values.items():
                if degree.get(name, 0) > i:
                    # Some are infinite where others, or the power, vanish.
                    term = jnp.where(term == 0, 0, term * value)
        result = result + term
    return result


def _soft_jvp(terms, primals, tangents):
    moving = [
        _soft(_derive(terms, rules), *primals) * tangent
        for rules, tangent in zip(_DERIVATIVES, tangents, strict=True)
        if not isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    ]
    value = _soft(terms, *primals)
    return value, sum(moving) if moving else jnp.zeros_like(value)


_soft.defjvp(_soft_jvp, symbolic_zeros=True)


def _log(x):
    """log(x) of a normal number as a sum of two, of which the second is what the first rounded."""
    # log(2) in two parts, the first so short that its product with an exponent is exact.
    high, low = {
        "float32": ("0x1.62ep-1", "0x1.0bfbe8p-15"),
        "float64": ("0x1.62e42fefap-1", "0x1.cf79abc9e3b3ap-40"),
    }[x.dtype.name]
    # This is jnp.frexp, whose exponent loses its sharding on meshes of explicit axes (jax 0.12).
    integers, digits, bias = {"float32": (np.int32, 23, 126), "float64": (np.int64, 52, 1022)}[
        x.dtype.name
    ]
    bits = lax.bitcast_convert_type(x, integers)
    exponent = (bits >> digits) - bias
    fraction = lax.bitcast_convert_type(bits - (exponent << digits), x.dtype)
    is_small = fraction < 0.75
    fraction = jnp.where(is_small, 2 * fraction, fraction)
    exponent = jnp.where(is_small, exponent - 1, exponent).astype(x.dtype)
    first = exponent * float.fromhex(high)
    rest = exponent * float.fromhex(low) + jnp.log1p(fraction - 1)
    total = jnp.where((x > 0) & (x < jnp.inf), first + rest, jnp.log(x))
    return total, rest - (total - first)


# --- functions of a row --------------------------------------------------------------------------


def softmax_focal(logits, labels, gamma, dtype):
    """(1 - p_y)^gamma (-log p_y) of rows of logits; zero where the label is no class."""
    classes = logits.shape[-1]
    known = (labels >= 0) & (labels < classes)
    if not classes:
        shape = jnp.broadcast_shapes(logits.shape[:-1], labels.shape, jnp.shape(gamma))
        return jnp.zeros(shape, dtype)
    z = jnp.where(known[..., None], logits, 0).astype(dtype)
    target = labels[..., None] == class_ids(classes, labels.ndim + 1)
    lead = _log_sum_exp_of(z, ~target) - jnp.where(target, z, 0).sum(-1)
    return jnp.where(known, focal(lead, gamma), 0)


def soft_softmax_focal(logits, y, gamma, kept: Any = True):
    """sum_c y_c (1 - p_c)^gamma (-log p_c) of rows of logits, p the softmax of those `kept`.

    Class c is led by the others by log(sum_{j != c} exp(z_j)) - z_c, which is exact for each: the
    sum of all but c is at least half of the sum of all, unless z_c is the largest, and that one
    sum is made of the others alone.
    """
    if not logits.shape[-1]:
        return jnp.zeros(logits.shape[:-1], y.dtype)
    z = jnp.where(kept, logits.astype(y.dtype), jnp.finfo(y.dtype).min)
    largest = lax.stop_gradient(z.max(-1, keepdims=True))
    is_first = class_ids(z.shape[-1], z.ndim) == z.argmax(-1, keepdims=True)
    terms = jnp.exp(z - largest)
    others = largest + jnp.log(jnp.where(is_first, 1, terms.sum(-1, keepdims=True) - terms))
    lead = jnp.where(is_first, _log_sum_exp_of(z, ~is_first)[..., None], others) - z
    lead = jnp.where(kept, lead, 0)
    return jnp.where(kept, y * focal(lead, gamma), 0).sum(-1)


def without_classes(logits, labels, kept):
    """Logits that are as good as none where `kept` is False, and labels of which those are none."""
    if kept is True:
        return logits, labels
    target = labels[..., None] == class_ids(logits.shape[-1], logits.ndim)
    # Minus infinity would make differences of infinities; float16 has logits near its least number.
    z = logits.astype(jnp.float32) if logits.dtype == jnp.float16 else logits
    return jnp.where(kept, z, jnp.finfo(z.dtype).min), jnp.where(
        (target & kept).any(-1), labels, -1
    )


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
