"""The primitives of lightweight convolution and their rules.

The family has four primitives. `conv` is the operator itself, with bias and activation fused.
It is linear in each of x and (weight, bias); what ties it to its derivatives is

    d conv(x, w)   = conv(dx, w) + conv(x, dw)   _tangent, so that one backward kernel serves both
    dx             = conv(g, w), taps flipped, padding mirrored
    dw             = filter_grad(x, g)           _filter_grad, bilinear in x and g
    dx, dw, dbias  = backward(x, w, g)           _backward, the three in one pass over x and g

and every derivative of these is again one of these, so all orders run the same kernels.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxops._core import compat, rules
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator
from jaxops.activations import ACTIVATIONS, activation_name
from jaxops.reference import lightweight_conv as reference

NAME = "lightweight_conv"


@dataclasses.dataclass(frozen=True)
class Options:
    """Parameters of every primitive of the family, next to shapes."""

    padding: int
    dilation: int
    data_format: str

    def mirrored(self, taps: int) -> Options:
        """The options under which flipped taps compute the transpose over time."""
        return dataclasses.replace(self, padding=(taps - 1) * self.dilation - self.padding)

    @property
    def rows(self) -> str:
        """The dimensions of a sequence in signatures."""
        return "time (heads depth)" if self.data_format == "NTC" else "(heads depth) time"

    @property
    def time_axis(self) -> int:
        """The dimension of time in a sequence."""
        return -2 if self.data_format == "NTC" else -1


def attributes(*, options, **_):
    """What every handler of the family is passed."""
    return {
        "padding": np.int64(options.padding),
        "dilation": np.int64(options.dilation),
        "data_format": options.data_format,
    }


# --- the operator itself: x, weight, bias -> y ---------------------------------------------------


def _conv_signature(*, options, with_bias, **_):
    operands = f"{options.rows}, heads taps" + (", (heads depth)" if with_bias else "")
    return f"{operands} -> {options.rows}"


def _conv_reference(x, weight, bias=None, *, options, flip, activation, **_):
    weight = weight[..., ::-1] if flip else weight
    return [
        reference.lightweight_conv(
            x, weight, bias, activation=activation, **dataclasses.asdict(options)
        )
    ]


_conv_operator = Operator(
    "lightweight_conv",
    signature=_conv_signature,
    reference=_conv_reference,
    dtypes=lambda x, *_, **__: [x.dtype],
    attributes=lambda *, options, flip, activation, **_: (
        attributes(options=options)
        | {"activation": activation_name(activation), "flip_taps": np.bool_(flip)}
    ),
    replicated=("time", "taps"),
)


def conv(x, weight, bias=None, *, options, flip=False, activation=None):
    """The convolution of x, with bias and activation."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    (y,) = _conv_operator(
        *operands, options=options, flip=flip, activation=activation, with_bias=bias is not None
    )
    return y


@_conv_operator.def_jvp
def _conv_jvp(primals, tangents, *, options, flip, activation, with_bias):
    del with_bias
    x = primals[0]
    if activation is None:
        y = conv(*primals, options=options, flip=flip)
        return [y], [_conv_tangent(primals, tangents, y, options=options, flip=flip)]

    # Named as well: they are what the gradient needs, so that a policy which saves the operator's
    # result spares the backward pass a second forward one.
    sums = checkpoint_name(conv(*primals, options=options, flip=flip), NAME)
    dsums = _conv_tangent(primals, tangents, sums, options=options, flip=flip)
    wide = accumulation_dtype(x)
    activate = ACTIVATIONS[activation]
    y, dy = rules.jvp(activate, [sums.astype(wide)], [dsums.astype(wide)])
    if wide != x.dtype and activation != "relu":
        # An activation of sums that are already rounded would round twice. The derivative may take
        # them: made of wider sums, which no kernel returns, it would cost two more passes.
        y = conv(*primals, options=options, flip=flip, activation=activation)
    return [y.astype(x.dtype)], [dy.astype(x.dtype)]


def _conv_tangent(primals, tangents, y, *, options, flip):
    """The tangent of the convolution without activation, whose result has the shape of y."""
    x, weight = primals[:2]
    dx, dweight, dbias = rules.nonzero(tangents, 3)
    if dx is not None and dweight is not None:
        return _tangent(x, weight, dx, dweight, dbias, options=options, flip=flip)
    if dx is not None:
        return conv(dx, weight, dbias, options=options, flip=flip)
    if dweight is not None:
        return conv(x, dweight, dbias, options=options, flip=flip)
    return _spread_over_time(dbias, y, options).astype(x.dtype)


@_conv_operator.def_transpose
def _conv_transpose(cotangents, x, weight, bias=None, *, options, flip, activation, with_bias):
    del activation, with_bias  # only what is linear, and so has no activation, is transposed
    (g,) = cotangents
    return _pullback(g, x, weight, (x, weight, bias), options=options, flip=flip)


# --- its tangent: x, weight, dx, dweight, dbias -> dy --------------------------------------------


def _tangent_unfused(x, weight, dx, dweight, dbias=None, *, options, flip, **_):
    return [
        conv(dx, weight, dbias, options=options, flip=flip)
        + conv(x, dweight, options=options, flip=flip)
    ]


_tangent_operator = Operator(
    "lightweight_conv_tangent",
    signature=lambda *, options, with_bias, **_: (
        f"{options.rows}, heads taps, {options.rows}, heads taps"
        + (", (heads depth)" if with_bias else "")
        + f" -> {options.rows}"
    ),
    composition=_tangent_unfused,
    dtypes=lambda x, *_, **__: [x.dtype],
)


def _tangent(x, weight, dx, dweight, dbias=None, *, options, flip=False):
    operands = (x, weight, dx, dweight) if dbias is None else (x, weight, dx, dweight, dbias)
    (dy,) = _tangent_operator(*operands, options=options, flip=flip, with_bias=dbias is not None)
    return dy


@_tangent_operator.def_jvp
def _tangent_jvp(primals, tangents, **params):
    return rules.jvp(functools.partial(_tangent_unfused, **params), primals, tangents)


@_tangent_operator.def_transpose
def _tangent_transpose(cotangents, x, weight, dx, dweight, dbias=None, *, options, flip, with_bias):
    del with_bias
    (g,) = cotangents
    pulled = _pullback(g, x, weight, (dx, dweight, dbias), options=options, flip=flip)
    return [None, None, *pulled]


def _pullback(g, x, weight, wanted, *, options, flip):
    """The cotangents of those of `wanted`, a triple like (x, weight, bias), that are undefined."""
    count = 2 if wanted[2] is None else 3
    if isinstance(g, compat.Zero):
        return rules.zeros(wanted[:count])
    dx_like, dweight_like, dbias_like = (
        w.aval if compat.is_undefined_primal(w) else None for w in wanted
    )
    batch_rank = g.ndim - 2
    dx = dweight = dbias = None
    if dx_like is not None and dweight_like is not None and not flip:
        fuse_bias = dbias_like is not None and (
            dbias_like.shape[:batch_rank] == dweight_like.shape[:batch_rank]
        )
        dx, dweight, *fused = _backward_operator(
            x,
            weight,
            g,
            options=options,
            summed=tuple(n == 1 for n in weight.shape[:batch_rank]),
            # Its name: NumPy finds None equal to float64, and JAX's caches compare parameters.
            bias_dtype=dbias_like.dtype.name if dbias_like is not None and fuse_bias else None,
        )
        dbias = fused[0] if fused else None
    elif dx_like is not None:
        mirrored = options.mirrored((weight if dweight_like is None else dweight_like).shape[-1])
        dx = conv(g, weight, options=mirrored, flip=not flip)
    if dweight_like is not None and dweight is None:
        dweight = _filter_grad(x, g, dweight_like, options=options, flip=flip)
    if dbias_like is not None and dbias is None:
        dbias = _sum_over_time(g, dbias_like.dtype, options)
    return [
        None if like is None or ct is None else rules.match_type(ct, like, like.ndim - batch_rank)
        for ct, like in zip((dx, dweight, dbias), (dx_like, dweight_like, dbias_like), strict=True)
    ][:count]


def _spread_over_time(bias, like, options):
    """A per-channel vector at every time step of an array like `like`."""
    spread = rules.broadcast_like(jnp.expand_dims(bias, options.time_axis), jax.typeof(like))
    return spread.astype(like.dtype)


def _sum_over_time(g, dtype, options):
    wide = g.astype(accumulation_dtype(g))
    return jnp.sum(wide, axis=options.time_axis).astype(dtype)


# --- filter gradient: x, g -> dweight ------------------------------------------------------------


def _filter_grad_reference(x, g, *, options, heads, taps, summed, dtype):
    dweight = reference.lightweight_conv_filter_grad(
        x, g, heads=heads, taps=taps, **dataclasses.asdict(options)
    )
    axes = tuple(i for i, s in enumerate(summed) if s)
    return [dweight.sum(axes, keepdims=True).astype(dtype)]


_filter_grad_operator = Operator(
    "lightweight_conv_filter_grad",
    signature=lambda *, options, **_: f"{options.rows}, {options.rows} -> heads taps",
    reference=_filter_grad_reference,
    dtypes=lambda *_, dtype, **__: [dtype],
    attributes=attributes,
    work_space=True,
    replicated=("time", "taps"),
    summed_outputs=(0,),
)


def _filter_grad(x, g, like, *, options, flip=False):
    """dweight of conv(x, weight), of the shape and dtype of `like` where g varies no less."""
    heads, taps = like.shape[-2:]
    if flip:
        # The correlation with flipped taps is the one with its two operands exchanged.
        x, g, options = g, x, options.mirrored(taps)
    (dweight,) = _filter_grad_operator(
        x,
        g,
        options=options,
        heads=heads,
        taps=taps,
        summed=tuple(n == 1 for n in like.shape[:-2]),
        dtype=np.dtype(like.dtype),
    )
    return dweight


@_filter_grad_operator.def_jvp
def _filter_grad_jvp(primals, tangents, **params):
    x, g = primals
    dx, dg = rules.nonzero(tangents, 2)
    terms = [(dx, g)] if dx is not None else []
    terms += [(x, dg)] if dg is not None else []
    (dweight,) = _filter_grad_operator(x, g, **params)
    return [dweight], [sum(_filter_grad_operator(*term, **params)[0] for term in terms)]


@_filter_grad_operator.def_transpose
def _filter_grad_transpose(cotangents, x, g, *, options, taps, **_):
    (dweight,) = cotangents
    if isinstance(dweight, compat.Zero):
        return rules.zeros((x, g))
    if compat.is_undefined_primal(x):
        ct = conv(g, dweight, options=options.mirrored(taps), flip=True)
        return [rules.match_type(ct, x.aval), None]
    return [None, rules.match_type(conv(x, dweight, options=options), g.aval)]


# --- fused backward: x, weight, g -> dx, dweight, dbias ------------------------------------------


def _backward_signature(*, options, bias_dtype, **_):
    results = f"{options.rows}, heads taps" + ("" if bias_dtype is None else ", (heads depth)")
    return f"{options.rows}, heads taps, {options.rows} -> {results}"


def _backward_unfused(x, weight, g, *, options, summed, bias_dtype):
    mirrored = options.mirrored(weight.shape[-1])
    like = jax.ShapeDtypeStruct(
        tuple(1 if s else n for s, n in zip(summed, _batch_shape(x, weight, g), strict=True))
        + weight.shape[-2:],
        weight.dtype,
    )
    results = [
        conv(g, weight, options=mirrored, flip=True),
        _filter_grad(x, g, like, options=options),
    ]
    if bias_dtype is not None:
        dbias = _sum_over_time(g, bias_dtype, options)
        results.append(rules.unbroadcast(dbias, like.shape[:-2]))
    return results


def _batch_shape(*arrays):
    return np.broadcast_shapes(*(a.shape[:-2] for a in arrays))


def _backward_reference(x, weight, g, *, options, summed, bias_dtype):
    axes = tuple(i for i, s in enumerate(summed) if s)
    mirrored = options.mirrored(weight.shape[-1])
    heads, taps = weight.shape[-2:]
    dx = reference.lightweight_conv(g, weight[..., ::-1], **dataclasses.asdict(mirrored))
    dweight = reference.lightweight_conv_filter_grad(
        x, g, heads=heads, taps=taps, **dataclasses.asdict(options)
    )
    dx = jnp.broadcast_to(dx, (*_batch_shape(x, weight, g), *dx.shape[-2:]))
    results = [dx, dweight.sum(axes, keepdims=True).astype(weight.dtype)]
    if bias_dtype is not None:
        wide = g.astype(accumulation_dtype(g))
        dbias = jnp.sum(wide, axis=options.time_axis).sum(axes, keepdims=True)
        results.append(dbias.astype(bias_dtype))
    return results


_backward_operator = Operator(
    "lightweight_conv_backward",
    signature=_backward_signature,
    reference=_backward_reference,
    dtypes=lambda x, weight, g, *, bias_dtype, **_: (
        [x.dtype, weight.dtype] + ([] if bias_dtype is None else [np.dtype(bias_dtype)])
    ),
    attributes=attributes,
    work_space=True,
    replicated=("time", "taps"),
    summed_outputs=(1, 2),
)


@_backward_operator.def_jvp
def _backward_jvp(primals, tangents, **params):
    return rules.jvp(functools.partial(_backward_unfused, **params), primals, tangents)


@_backward_operator.def_transpose
def _backward_transpose(cotangents, x, weight, g, *, options, **_):
    """The transpose in g of the transpose of the tangent: the tangent."""
    terms = []
    dx, dweight, dbias = rules.nonzero(cotangents, 3)
    if dx is not None:
        terms.append(conv(dx, weight, options=options))
    if dweight is not None:
        terms.append(conv(x, dweight, options=options))
    if dbias is not None:
        terms.append(_spread_over_time(dbias, g.aval, options))
    return [None, None, rules.match_type(sum(terms), g.aval) if terms else rules.zeros((g,))[0]]


@_backward_operator.def_dead_code
def _backward_dead_code(used, x, weight, g, *, options, summed, bias_dtype):
    """With one gradient unused, the other's own primitive serves."""
    if used[0] and not any(used[1:]) and g.shape == x.shape:
        mirrored = options.mirrored(weight.shape[-1])
        params = dict(options=mirrored, flip=True, activation=None, with_bias=False)
        return _conv_operator, (2, 1), params
    if used[1] and not used[0] and not any(used[2:]):
        heads, taps = weight.shape[-2:]
        params = dict(options=options, heads=heads, taps=taps, summed=summed, dtype=weight.dtype)
        return _filter_grad_operator, (0, 2), params
    return None
