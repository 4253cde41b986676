"""The primitives of dynamic convolution and their rules.

`conv` is the operator itself, with softmax, bias and activation fused. With p the weight, or its
softmax over the taps, it is bilinear in x and p, and

    d conv(x, p)  = conv(dx, p) + conv(x, dp)   _tangent, so that one backward kernel serves both
    dx            = input_grad(g, p)            _input_grad, which is bilinear as well
    dp            = weight_grad(x, g)           _weight_grad, likewise
    dx, dweight   = backward(x, weight, g)      _backward, the two in one pass, softmax included

The three bilinear ones are the partial derivatives of one trilinear form, sum(g * conv(x, p)), so
every derivative of each is another of them, and all orders run the same kernels.

Any of them may take `starts`, the first step of the segment of each step: a tap is zero at steps of
other segments. `_families/sequences.py` says more. `conv` alone takes a `state`, the `padding`
steps before step 0. A state adds to few steps. Its derivatives are computed on these, by the same
primitives without segments.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._core import compat, rules
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator
from jaxops._families import sequences, shards
from jaxops.activations import ACTIVATIONS, activation_name
from jaxops.reference import dynamic_conv as reference

NAME = "dynamic_conv"


@dataclasses.dataclass(frozen=True)
class Options:
    """Parameters of every primitive of the family, next to shapes."""

    padding: int
    dilation: int
    data_format: str
    normalize: bool

    def mirrored(self, taps: int) -> Options:
        """The options of the steps that the input gradient of a step depends on."""
        return dataclasses.replace(self, padding=(taps - 1) * self.dilation - self.padding)

    @property
    def time(self) -> str:
        """The factor of time in signatures."""
        return shards.TIME

    @property
    def rows(self) -> str:
        """The dimensions of a sequence in signatures."""
        channels = "(heads depth)"
        ordered = (self.time, channels) if self.data_format == "NTC" else (channels, self.time)
        return " ".join(ordered)

    @property
    def weight(self) -> str:
        """The dimensions of the weight in signatures."""
        return f"{self.time} heads taps"

    @property
    def state(self) -> str:
        """The dimensions of the state of a sequence in signatures."""
        return self.rows.replace(self.time, "before")

    @property
    def time_axis(self) -> int:
        """The dimension of time in a sequence."""
        return -2 if self.data_format == "NTC" else -1

    @property
    def of_probabilities(self) -> Options:
        """The options of calls whose weights are normalized already."""
        return dataclasses.replace(self, normalize=False)

    @property
    def unnormalized(self) -> dict[str, int | str]:
        """The arguments of every function of the reference."""
        return {
            "padding": self.padding,
            "dilation": self.dilation,
            "data_format": self.data_format,
        }


class _WholeOptions(Options):
    """Options of calls whose sequences are short: devices have all of their steps."""

    @property
    def time(self) -> str:
        return "token"


def _attributes(*, options, with_starts, **_):
    return {
        "padding": np.int64(options.padding),
        "dilation": np.int64(options.dilation),
        "data_format": options.data_format,
        "normalize": np.bool_(options.normalize),
        "has_starts": np.bool_(with_starts),
    }


_COMMON = {
    "replicated": ("token", "taps", "before"),
    "work_space": True,
    "asks_on_gpu": lambda **_: True,
}


def _present(*operands):
    return [x for x in operands if x is not None]


# --- the operator itself: x, weight, bias, starts, state -> y ------------------------------------


def _conv_signature(*, options, with_bias, with_starts, with_state, **_):
    operands = [options.rows, options.weight]
    operands += ["(heads depth)"] if with_bias else []
    operands += [options.time] if with_starts else []
    operands += [options.state] if with_state else []
    return f"{', '.join(operands)} -> {options.rows}"


def _named(rest, with_bias, with_starts, with_state):
    """The optional operands (bias, starts, state) of a call, None where there is none."""
    rest = iter(rest)
    return [next(rest) if present else None for present in (with_bias, with_starts, with_state)]


def _conv_reference(x, weight, *rest, options, activation, **present):
    return [
        reference.dynamic_conv(
            x,
            weight,
            *_named(rest, **present),
            normalize=options.normalize,
            activation=activation,
            **options.unnormalized,
        )
    ]


def _reach(weight, options):
    return (weight.shape[-1] - 1) * options.dilation


def _conv_on_part(*operands, plan, options, activation, **present):
    """The call of a device that has a part of the steps."""
    x, weight, *rest = operands
    part = shards.part_of(plan, x, options.time_axis)
    params = {"options": options, "activation": activation}
    if part is None:
        return operands, {**params, **present}, None
    bias, starts, state = _named(rest, **present)
    reach = _reach(weight, options)
    around = shards.Surroundings(x, starts, state, part=part, options=options, reach=reach)
    params |= {**present, "with_state": False}

    def of_steps(begin, end):
        filters = part.own(weight, shards.FILTER_AXIS, begin, end)
        others = _present(bias, around.starts(begin, end))
        return _conv_operator.on_one_device(around.rows(begin, end), filters, *others, **params)[0]

    def complete(y):
        return [shards.completed(y, around, part, options.time_axis, of_steps)]

    return _present(x, weight, bias, part.own_starts(starts)), params, complete


_conv_operator = Operator(
    NAME,
    signature=_conv_signature,
    reference=_conv_reference,
    dtypes=lambda x, *_, **__: [x.dtype],
    attributes=lambda *, activation, with_bias, with_state, **params: (
        _attributes(**params)
        | {
            "activation": activation_name(activation),
            "has_bias": np.bool_(with_bias),
            "has_state": np.bool_(with_state),
        }
    ),
    neighbours=_conv_on_part,
    **_COMMON,
)


def conv(x, weight, bias=None, starts=None, state=None, *, options, activation=None):
    """The operator: act(bias + the convolution of x with weight, or with its softmax)."""
    (y,) = _conv_operator(
        *_present(x, weight, bias, starts, state),
        options=options,
        activation=activation,
        with_bias=bias is not None,
        with_starts=starts is not None,
        with_state=state is not None,
    )
    return y


@_conv_operator.def_jvp
def _conv_jvp(primals, tangents, *, options, activation, **present):
    x, weight, *rest = primals
    primals = (x, weight, *_named(rest, **present))
    dx, dweight, *moved = rules.nonzero(tangents, len(tangents))
    tangents = (dx, dweight, *_named(moved, **present))
    if activation is None:
        y = conv(*primals, options=options)
        return [y], [_conv_tangent(primals, tangents, y, options)]

    # Named as well: they are what the gradient needs, so that a policy which saves the operator's
    # result spares the backward pass a second forward one.
    sums = checkpoint_name(conv(*primals, options=options), NAME)
    dsums = _conv_tangent(primals, tangents, sums, options)
    wide = accumulation_dtype(x)
    y, dy = rules.jvp(ACTIVATIONS[activation], [sums.astype(wide)], [dsums.astype(wide)])
    if wide != x.dtype and activation != "relu":
        # An activation of sums that are already rounded would round twice. The derivative may take
        # them: made of wider sums, which no kernel returns, it would cost two more passes.
        y = conv(*primals, options=options, activation=activation)
    return [y.astype(x.dtype)], [dy.astype(x.dtype)]


def _conv_tangent(primals, tangents, y, options):
    """The tangent of the convolution without activation, whose result has the type of y."""
    x, weight, _, starts, state = primals
    dx, dweight, dbias, _, dstate = tangents
    terms = []
    if dx is not None and dweight is not None:
        terms.append(_tangent(x, weight, dx, dweight, dbias, starts, options=options))
    elif dx is not None:
        terms.append(conv(dx, weight, dbias, starts, options=options))
    elif dweight is not None:
        dp = _probability_tangent(weight, dweight, options)
        terms.append(conv(x, dp, dbias, starts, options=options.of_probabilities))
    elif dbias is not None:
        spread = jnp.expand_dims(dbias, options.time_axis)
        terms.append(rules.broadcast_like(spread, jax.typeof(y)).astype(y.dtype))
    if state is not None and (dweight is not None or dstate is not None):
        moving = [(state, dstate), (weight, dweight)]
        head = functools.partial(_head, starts=starts, options=options, like=y)
        zeros = [compat.Zero(jax.typeof(a)) if d is None else d for a, d in moving]
        terms.append(rules.jvp(head, [a for a, _ in moving], zeros)[1])
    return sum(terms[1:], terms[0])


def _probability_tangent(weight, dweight, options):
    # The Jacobian of a softmax is symmetric, and batch dimensions of the two may differ under vmap.
    return reference.softmax_grad(weight, dweight) if options.normalize else dweight


def _head(state, weight, *, starts, options, like):
    """The terms that the state adds to the sums, an array of the type of `like`.

    No more steps than the state has read it: the result has the convolution of these alone.
    """
    axis, time = options.time_axis, weight.shape[shards.FILTER_AXIS]
    before = state.shape[axis]
    steps = min(before, time)
    first = sequences.take_steps(weight, 0, steps, shards.FILTER_AXIS)
    first = jnp.pad(first, [(0, 0)] * (weight.ndim - 3) + [(0, before - steps), (0, 0), (0, 0)])
    state = state.astype(accumulation_dtype(like, state))
    whole = _WholeOptions(0, options.dilation, options.data_format, options.normalize)
    sums = conv(state, first, options=whole)
    sums = jax.lax.slice_in_dim(sums, 0, steps, axis=axis % sums.ndim)
    if starts is not None and steps > 0:
        starts = sequences.take_steps(starts, 0, steps, -1)
        own = starts == starts[..., :1]
        sums = jnp.where(jnp.expand_dims(own, -1 if axis == -2 else -2), sums, 0)
    zeros = rules.broadcast_like(jnp.zeros((), sums.dtype), jax.typeof(like))
    return sequences.add_steps(zeros, sums, 0, axis).astype(like.dtype)


@_conv_operator.def_transpose
def _conv_transpose(cotangents, x, weight, *rest, options, activation, **present):
    del activation  # only what is linear, and so has no activation, is transposed
    (g,) = cotangents
    bias, starts, state = _named(rest, **present)
    operands = _present(x, weight, bias, starts, state)
    if isinstance(g, compat.Zero):
        return rules.zeros(operands)
    pulled = _pullback(g, x, weight, starts, (x, weight, bias), options)
    dstate = None
    if state is not None:
        dstate, dhead = _pull_head(g, state, weight, starts, options)
        if dhead is not None:
            pulled[1] = pulled[1] + dhead
    pulled += [None] if starts is not None else []
    return pulled + ([dstate] if state is not None else [])


def _pull_head(g, state, weight, starts, options):
    """The cotangents of that of `state` and `weight` which is undefined, through `_head`."""
    cotangents = [None, None]
    head = functools.partial(_head, starts=starts, options=options, like=g)
    for i, like in enumerate((state, weight)):
        if compat.is_undefined_primal(like):
            others = [state, weight]

            def of_one(array, i=i, others=others):
                return head(*(array if j == i else a for j, a in enumerate(others)))

            (cotangents[i],) = jax.linear_transpose(of_one, like.aval)(g)
    return cotangents


# --- its tangent: x, weight, dx, dweight, dbias, starts -> dy ------------------------------------


def _tangent_operands(operands, with_bias, with_starts):
    x, weight, dx, dweight, *rest = operands
    dbias, starts, _ = _named(rest, with_bias, with_starts, False)
    return x, weight, dx, dweight, dbias, starts


def _tangent_unfused(*operands, options, **present):
    x, weight, dx, dweight, dbias, starts = _tangent_operands(operands, **present)
    dp = _probability_tangent(weight, dweight, options)
    return [
        conv(dx, weight, dbias, starts, options=options)
        + conv(x, dp, None, starts, options=options.of_probabilities)
    ]


def _tangent_signature(*, options, with_bias, with_starts):
    operands = [options.rows, options.weight] * 2
    operands += ["(heads depth)"] if with_bias else []
    operands += [options.time] if with_starts else []
    return f"{', '.join(operands)} -> {options.rows}"


_tangent_operator = Operator(
    "dynamic_conv_tangent",
    signature=_tangent_signature,
    composition=_tangent_unfused,
    dtypes=lambda x, *_, **__: [x.dtype],
)


def _tangent(x, weight, dx, dweight, dbias, starts, *, options):
    (dy,) = _tangent_operator(
        *_present(x, weight, dx, dweight, dbias, starts),
        options=options,
        with_bias=dbias is not None,
        with_starts=starts is not None,
    )
    return dy


@_tangent_operator.def_jvp
def _tangent_jvp(primals, tangents, **params):
    return rules.jvp(functools.partial(_tangent_unfused, **params), primals, tangents)


@_tangent_operator.def_transpose
def _tangent_transpose(cotangents, *operands, options, **present):
    (g,) = cotangents
    x, weight, dx, dweight, dbias, starts = _tangent_operands(operands, **present)
    if isinstance(g, compat.Zero):
        return rules.zeros(operands)
    pulled = _pullback(g, x, weight, starts, (dx, dweight, dbias), options)
    return [None, None, *pulled] + ([] if starts is None else [None])


def _pullback(g, x, weight, starts, wanted, options):
    """The cotangents of those of `wanted`, a triple like (x, weight, bias), that are undefined."""
    dx_like, dweight_like, dbias_like = (
        w.aval if compat.is_undefined_primal(w) else None for w in wanted
    )
    dx = dweight = dbias = None
    if dx_like is not None and dweight_like is not None:
        dx, dweight = _backward(x, weight, g, starts, options=options)
    elif dx_like is not None:
        dx = _input_grad(g, weight, starts, options=options)
    elif dweight_like is not None:
        dweight = _weight_grad(x, g, starts, dweight_like, options=options)
    if dbias_like is not None:
        dbias = jnp.sum(g.astype(accumulation_dtype(g)), axis=options.time_axis)
    batch_rank = g.ndim - 2
    return [
        None if like is None else rules.match_type(ct, like, like.ndim - batch_rank)
        for ct, like in zip((dx, dweight, dbias), (dx_like, dweight_like, dbias_like), strict=True)
    ][: 2 if wanted[2] is None else 3]


# --- input gradient: g, weight, starts -> dx -----------------------------------------------------


def _input_grad_reference(g, weight, starts=None, *, options, with_starts):
    del with_starts
    return [
        reference.dynamic_conv_input_grad(
            g, weight, starts, normalize=options.normalize, **options.unnormalized
        )
    ]


def _completed_input_grad(dx, g, weight, starts, part, options):
    """The input gradient dx of a part, with the terms of other devices' cotangents and filters."""
    mirrored = options.mirrored(weight.shape[-1])
    around = shards.Surroundings(
        g, starts, part=part, options=mirrored, reach=_reach(weight, options), filters=weight
    )

    def of_steps(begin, end):
        operands = around.rows(begin, end), around.filters(begin, end)
        own_starts = _present(around.starts(begin, end))
        params = {"options": options, "with_starts": starts is not None}
        return _input_grad_operator.on_one_device(*operands, *own_starts, **params)[0]

    return shards.completed(dx, around, part, options.time_axis, of_steps)


def _input_grad_on_part(g, weight, starts=None, *, plan, options, **params):
    """The call of a device that has a part of the steps."""
    part = shards.part_of(plan, g, options.time_axis)
    params["options"] = options
    if part is None:
        return _present(g, weight, starts), params, None

    def complete(dx):
        return [_completed_input_grad(dx, g, weight, starts, part, options)]

    return _present(g, weight, part.own_starts(starts)), params, complete


_input_grad_operator = Operator(
    "dynamic_conv_input_grad",
    signature=lambda *, options, with_starts: (
        f"{options.rows}, {options.weight}{f', {options.time}' * with_starts} -> {options.rows}"
    ),
    reference=_input_grad_reference,
    neighbours=_input_grad_on_part,
    dtypes=lambda g, *_, **__: [g.dtype],
    attributes=_attributes,
    **_COMMON,
)


def _input_grad(g, weight, starts, *, options):
    operands = _present(g, weight, starts)
    (dx,) = _input_grad_operator(*operands, options=options, with_starts=starts is not None)
    return dx


@_input_grad_operator.def_jvp
def _input_grad_jvp(primals, tangents, *, options, with_starts):
    g, weight, starts = (*primals, None)[:3]
    dg, dweight, _ = rules.nonzero(tangents, 3)
    terms = []
    if dg is not None:
        terms.append(_input_grad(dg, weight, starts, options=options))
    if dweight is not None:
        dp = _probability_tangent(weight, dweight, options)
        terms.append(_input_grad(g, dp, starts, options=options.of_probabilities))
    return [_input_grad(g, weight, starts, options=options)], [sum(terms[1:], terms[0])]


@_input_grad_operator.def_transpose
def _input_grad_transpose(cotangents, g, weight, *starts, options, with_starts):
    (dx,) = cotangents
    if isinstance(dx, compat.Zero):
        return rules.zeros((g, weight, *starts))
    (of_segments,) = starts or (None,)
    unused = [None] * len(starts)
    if compat.is_undefined_primal(g):
        ct = conv(dx, weight, None, of_segments, options=options)
        return [rules.match_type(ct, g.aval), None, *unused]
    ct = _weight_grad(dx, g, of_segments, weight.aval, options=options)
    return [None, rules.match_type(ct, weight.aval, 3), *unused]


# --- gradient of the probabilities: x, g, starts -> dp -------------------------------------------


def _weight_grad_reference(x, g, starts=None, *, options, heads, taps, dtype, with_starts):
    del with_starts
    dp = reference.dynamic_conv_weight_grad(
        x, g, starts, heads=heads, taps=taps, **options.unnormalized
    )
    return [dp.astype(dtype)]


def _weight_grad_on_part(x, g, starts=None, *, plan, options, **params):
    """The call of a device that has a part of the steps."""
    part = shards.part_of(plan, x, options.time_axis)
    params["options"] = options
    if part is None:
        return _present(x, g, starts), params, None
    reach = (params["taps"] - 1) * options.dilation
    around = shards.Surroundings(x, starts, part=part, options=options, reach=reach)

    def of_steps(begin, end):
        cotangents = part.own(g, options.time_axis, begin, end)
        operands = _present(around.rows(begin, end), cotangents, around.starts(begin, end))
        return _weight_grad_operator.on_one_device(*operands, **params)[0]

    def complete(dp):
        return [shards.completed(dp, around, part, shards.FILTER_AXIS, of_steps)]

    return _present(x, g, part.own_starts(starts)), params, complete


_weight_grad_operator = Operator(
    "dynamic_conv_weight_grad",
    signature=lambda *, options, with_starts, **_: (
        f"{options.rows}, {options.rows}{f', {options.time}' * with_starts} -> {options.weight}"
    ),
    reference=_weight_grad_reference,
    neighbours=_weight_grad_on_part,
    dtypes=lambda *_, dtype, **__: [dtype],
    attributes=_attributes,
    **_COMMON,
)


def _weight_grad(x, g, starts, like, *, options):
    """dp of conv(x, p), in the dtype of `like`, or wider if batch entries are yet to be added."""
    heads, taps = like.shape[-2:]
    batch = lax.broadcast_shapes(x.shape[:-2], g.shape[:-2])
    dtype = like.dtype if batch == like.shape[:-3] else accumulation_dtype(x, like)
    (dp,) = _weight_grad_operator(
        *_present(x, g, starts),
        options=options.of_probabilities,
        heads=heads,
        taps=taps,
        dtype=np.dtype(dtype),
        with_starts=starts is not None,
    )
    return dp


@_weight_grad_operator.def_jvp
def _weight_grad_jvp(primals, tangents, **params):
    x, g, *starts = primals
    dx, dg, *_ = rules.nonzero(tangents, 2)
    terms = [(dx, g)] if dx is not None else []
    terms += [(x, dg)] if dg is not None else []
    (dp,) = _weight_grad_operator(*primals, **params)
    return [dp], [sum(_weight_grad_operator(*term, *starts, **params)[0] for term in terms)]


@_weight_grad_operator.def_transpose
def _weight_grad_transpose(cotangents, x, g, *starts, options, **_):
    (dp,) = cotangents
    if isinstance(dp, compat.Zero):
        return rules.zeros((x, g, *starts))
    (of_segments,) = starts or (None,)
    unused = [None] * len(starts)
    if compat.is_undefined_primal(x):
        ct = _input_grad(g, dp, of_segments, options=options)
        return [rules.match_type(ct, x.aval), None, *unused]
    ct = conv(x, dp, None, of_segments, options=options)
    return [None, rules.match_type(ct, g.aval), *unused]


# --- fused backward: x, weight, g, starts -> dx, dweight -----------------------------------------


def _backward_signature(*, options, with_starts, **_):
    operands = f"{options.rows}, {options.weight}, {options.rows}"
    operands += f", {options.time}" * with_starts
    return f"{operands} -> {options.rows}, {options.weight}"


def _backward_reference(x, weight, g, starts=None, *, options, with_starts, dtype):
    del with_starts
    heads, taps = weight.shape[-2:]
    dx = reference.dynamic_conv_input_grad(
        g, weight, starts, normalize=options.normalize, **options.unnormalized
    )
    dp = reference.dynamic_conv_weight_grad(
        x, g, starts, heads=heads, taps=taps, **options.unnormalized
    )
    dweight = reference.softmax_grad(weight, dp) if options.normalize else dp
    batch = lax.broadcast_shapes(dx.shape[:-2], dweight.shape[:-3])
    return [
        jnp.broadcast_to(dx, (*batch, *dx.shape[-2:])),
        jnp.broadcast_to(dweight.astype(dtype), (*batch, *dweight.shape[-3:])),
    ]


def _backward_on_part(x, weight, g, starts=None, *, plan, options, **params):
    """The call of a device that has a part of the steps."""
    part = shards.part_of(plan, x, options.time_axis)
    params["options"] = options
    if part is None:
        return _present(x, weight, g, starts), params, None
    reach = _reach(weight, options)
    around = shards.Surroundings(x, starts, part=part, options=options, reach=reach)

    def of_steps(begin, end):
        filters = part.own(weight, shards.FILTER_AXIS, begin, end)
        cotangents = part.own(g, options.time_axis, begin, end)
        operands = _present(around.rows(begin, end), filters, cotangents, around.starts(begin, end))
        return _backward_operator.on_one_device(*operands, **params)[1]

    def complete(dx, dweight):
        return [
            _completed_input_grad(dx, g, weight, starts, part, options),
            shards.completed(dweight, around, part, shards.FILTER_AXIS, of_steps),
        ]

    return _present(x, weight, g, part.own_starts(starts)), params, complete


_backward_operator = Operator(
    "dynamic_conv_backward",
    signature=_backward_signature,
    reference=_backward_reference,
    neighbours=_backward_on_part,
    dtypes=lambda x, *_, dtype, **__: [x.dtype, dtype],
    attributes=_attributes,
    **_COMMON,
)


def _backward(x, weight, g, starts, *, options):
    batch = lax.broadcast_shapes(x.shape[:-2], weight.shape[:-3], g.shape[:-2])
    # Wider where batch entries have yet to be added.
    dtype = weight.dtype if batch == weight.shape[:-3] else accumulation_dtype(x, weight)
    return _backward_operator(
        *_present(x, weight, g, starts),
        options=options,
        with_starts=starts is not None,
        dtype=np.dtype(dtype),
    )


def _backward_unfused(x, weight, g, starts=None, *, options, dtype, **_):
    dp = _weight_grad(x, g, starts, weight, options=options)
    if options.normalize:
        dp = reference.softmax_grad(weight, dp)
    dx = _input_grad(g, weight, starts, options=options)
    batch = lax.broadcast_shapes(dx.shape[:-2], dp.shape[:-3])
    return [
        jnp.broadcast_to(dx, (*batch, *dx.shape[-2:])),
        jnp.broadcast_to(dp, (*batch, *dp.shape[-3:])).astype(dtype),
    ]


@_backward_operator.def_jvp
def _backward_jvp(primals, tangents, **params):
    unfused = functools.partial(_backward_unfused, **params)
    _, moved = rules.jvp(unfused, primals, tangents)
    return _backward_operator(*primals, **params), moved


@_backward_operator.def_transpose
def _backward_transpose(cotangents, x, weight, g, *starts, options, **_):
    """The transpose in g of the transpose of the tangent: the tangent."""
    dx, dweight = rules.nonzero(cotangents, 2)
    (of_segments,) = starts or (None,)
    unused = [None] * len(starts)
    like = g.aval
    if dx is not None and dweight is not None:
        ct = _tangent(x, weight, dx, dweight, None, of_segments, options=options)
    elif dx is not None:
        ct = conv(dx, weight, None, of_segments, options=options)
    elif dweight is not None:
        dp = _probability_tangent(weight, dweight.astype(weight.dtype), options)
        ct = conv(x, dp, None, of_segments, options=options.of_probabilities)
    else:
        return [None, None, rules.zeros((g,))[0], *unused]
    return [None, None, rules.match_type(ct, like), *unused]


@_backward_operator.def_dead_code
def _backward_dead_code(used, x, weight, g, *starts, options, with_starts, dtype):
    """With one gradient unused, the other's own primitive serves if its operands have the batch."""
    batch = lax.broadcast_shapes(x.shape[:-2], weight.shape[:-3], g.shape[:-2])
    others = range(3, 3 + len(starts))
    params = {"options": options, "with_starts": with_starts}
    if used[0] and batch == lax.broadcast_shapes(g.shape[:-2], weight.shape[:-3]):
        return _input_grad_operator, (2, 1, *others), params
    if (
        used[1]
        and not options.normalize
        and batch == lax.broadcast_shapes(x.shape[:-2], g.shape[:-2])
    ):
        heads, taps = weight.shape[-2:]
        params |= {"heads": heads, "taps": taps, "dtype": dtype}
        return _weight_grad_operator, (0, 2, *others), params
    return None
