"""The primitives of lightweight convolution and their rules.

The family has four primitives. `conv` is the operator itself, with bias and activation fused.
It is linear in each of x and (weight, bias); what ties it to its derivatives is

    d conv(x, w)   = conv(dx, w) + conv(x, dw)   _tangent, so that one backward kernel serves both
    dx             = conv(g, w), taps flipped, padding mirrored
    dw             = filter_grad(x, g)           _filter_grad, bilinear in x and g
    dx, dw, dbias  = backward(x, w, g)           _backward, the three in one pass over x and g

and every derivative of these is again one of these, so all orders run the same kernels.

Any of them may take `starts`, the first step of the segment of each step: a tap is zero at steps of
other segments. `_families/sequences.py` says more. The relation of two steps that a tap connects is
symmetric, so that the equations above hold as they are.

`conv` alone takes a `state`, the `padding` steps before step 0, or with `slots`, numbers by step,
one state a segment. A state adds to few steps. Its derivatives are computed on these, by the same
primitives without segments.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._core import compat, rules
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator
from jaxops._families import sequences, shards
from jaxops.activations import ACTIVATIONS, activation_name
from jaxops.reference import lightweight_conv as reference

NAME = "lightweight_conv"

#: Entries of the smallest call in "NTC" that GPUs may compute in "NCT": all that were measured.
_LEAST_IN_NCT = 2**22


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
    def state(self) -> str:
        """The dimensions of the state of a sequence in signatures."""
        if self.data_format == "NTC":
            return "before (heads depth)"
        return "(heads depth) before"

    @property
    def time_axis(self) -> int:
        """The dimension of time in a sequence."""
        return -2 if self.data_format == "NTC" else -1

    @property
    def channel_axis(self) -> int:
        """The dimension of channels in a sequence."""
        return -1 if self.data_format == "NTC" else -2


class _WholeOptions(Options):
    """Options of calls whose sequences are short: devices have all of their steps."""

    @property
    def rows(self) -> str:
        return super().rows.replace(shards.TIME, "token")


def attributes(*, options, **_):
    """The attributes that every handler of the family takes."""
    return {
        "padding": np.int64(options.padding),
        "dilation": np.int64(options.dilation),
        "data_format": options.data_format,
    }


def _is_dilated_nct(options):
    return options.dilation > 1 and options.data_format == "NCT"


def _is_faster_in_nct(x, weight, options, direction) -> bool:
    """Whether GPUs take less time for a call in "NTC" in "NCT", transposing rows included.

    It is so for long filters of heads of few channels: "A long filter in NTC" in
    docs/lightweight_conv.md has the times.
    """
    steps, channels = x.shape[-2:]
    heads, taps = weight.shape[-2:]
    if any(map(jax.export.is_symbolic_dim, (*x.shape, heads, taps))):
        return False
    depth = channels // heads
    is_16_bit = x.dtype.itemsize == 2
    if options.data_format == "NCT" or options.dilation > 1 or depth > 8 or x.dtype.itemsize > 4:
        return False
    # In "NCT", rows of other sizes are not aligned, and have no tensor cores.
    if steps % (8 if is_16_bit else 4) != 0 or x.size < _LEAST_IN_NCT:
        return False
    if direction == "backward":
        return taps >= (127 if is_16_bit else 191) and steps >= 512
    if is_16_bit:
        has_tensor_cores = x.dtype == weight.dtype or x.dtype == jnp.bfloat16
        return has_tensor_cores and taps >= 767 and steps >= 1024
    return taps >= 383 and depth == 1


def _transposed(rows):
    return jnp.swapaxes(rows, -1, -2)


# --- the operator itself: x, weight, bias, starts, state, slots -> y -----------------------------


def _split(operands, **has) -> tuple[Any, ...]:
    """(x, weight, bias, starts, state, slots), with None for what a call does not have."""
    rest = iter(operands[2:])
    flags = (has["with_bias"], has["with_starts"], has["with_state"], has["with_slots"])
    return (*operands[:2], *(next(rest) if flag else None for flag in flags))


def _conv_signature(*, options, with_bias, with_starts, with_state, with_slots, **_):
    operands = [options.rows, "heads taps"]
    if with_bias:
        operands.append("(heads depth)")
    if with_starts:
        operands.append("time")
    if with_state:
        operands.append(f"slots {options.state}" if with_slots else options.state)
    if with_slots:
        operands.append("time")
    text = f"{', '.join(operands)} -> {options.rows}"
    # Devices have all segments if these have states of their own.
    return text.replace(shards.TIME, "token") if with_slots else text


def _conv_reference(*operands, options, flip, activation, **has):
    x, weight, bias, starts, state, slots = _split(operands, **has)
    weight = weight[..., ::-1] if flip else weight
    return [
        reference.lightweight_conv(
            x,
            weight,
            bias,
            starts=starts,
            state=state,
            slots=slots,
            activation=activation,
            **dataclasses.asdict(options),
        )
    ]


def _conv_attributes(
    *, options, flip, activation, with_bias, with_starts, with_state, with_slots, **_
):
    return attributes(options=options) | {
        "activation": activation_name(activation),
        "flip_taps": np.bool_(flip),
        "has_bias": np.bool_(with_bias),
        "has_starts": np.bool_(with_starts),
        "has_state": np.bool_(with_state),
        "has_slots": np.bool_(with_slots),
    }


def _conv_on_part(*operands, plan, options, flip, activation, **has):
    """The call of a device that has a part of the steps."""
    x, weight, bias, starts, state, _ = _split(operands, **has)
    part = shards.part_of(plan, x, options.time_axis)
    params = dict(options=options, flip=flip, activation=activation)
    if part is None:
        return operands, {**params, **has}, None
    around = shards.Surroundings(
        x, starts, state, part=part, options=options, reach=_reach(weight, options)
    )
    has = dict(has, with_state=False)

    def of_steps(begin, end):
        rows, starts = around.rows(begin, end), around.starts(begin, end)
        operands = (rows, weight, *_present(bias), *_present(starts))
        return _conv_operator.on_one_device(*operands, **params, **has)[0]

    def complete(y):
        return [shards.completed(y, around, part, options.time_axis, of_steps)]

    own = _present(part.own_starts(starts))
    return (x, weight, *_present(bias), *own), {**params, **has}, complete


def _reach(weight, options):
    return (weight.shape[-1] - 1) * options.dilation


def _conv_instead_on_gpu(x, weight, *others, options, **params):
    has_more = params["with_starts"] or params["with_state"]
    if has_more or not _is_faster_in_nct(x, weight, options, "forward"):
        return None
    params["options"] = dataclasses.replace(options, data_format="NCT")
    return (_transposed(x), weight, *others), params, lambda y: [_transposed(y)]


_conv_operator = Operator(
    "lightweight_conv",
    signature=_conv_signature,
    reference=_conv_reference,
    dtypes=lambda x, *_, **__: [x.dtype],
    attributes=_conv_attributes,
    replicated=("token", "taps", "before", "slots"),
    neighbours=_conv_on_part,
    asks_on_gpu=lambda *, options, with_starts, with_state, **_: (
        with_starts or with_state or _is_dilated_nct(options)
    ),
    instead_on_gpu=_conv_instead_on_gpu,
)


def conv(
    x,
    weight,
    bias=None,
    starts=None,
    state=None,
    slots=None,
    *,
    options,
    flip=False,
    activation=None,
):
    """The convolution of x, with bias and activation, segments and states."""
    (y,) = _conv_operator(
        *(a for a in (x, weight, bias, starts, state, slots) if a is not None),
        options=options,
        flip=flip,
        activation=activation,
        with_bias=bias is not None,
        with_starts=starts is not None,
        with_state=state is not None,
        with_slots=slots is not None,
    )
    return y


@_conv_operator.def_jvp
def _conv_jvp(primals, tangents, *, options, flip, activation, **has):
    primals = _split(primals, **has)
    tangents = _split([*tangents], **has)
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
    x, weight, _, starts, state, slots = primals
    dx, dweight, dbias = (_known(t) for t in tangents[:3])
    terms = []
    if dx is not None and dweight is not None:
        terms.append(_tangent(x, weight, dx, dweight, dbias, starts, options=options, flip=flip))
    elif dx is not None:
        terms.append(conv(dx, weight, dbias, starts, options=options, flip=flip))
    elif dweight is not None:
        terms.append(conv(x, dweight, dbias, starts, options=options, flip=flip))
    elif dbias is not None:
        terms.append(_spread_over_time(dbias, y, options).astype(x.dtype))
    dstate = None if state is None else _known(tangents[4])
    if state is not None and not (dstate is None and dweight is None):
        part = functools.partial(
            _state_part, starts=starts, slots=slots, like=y, options=options, flip=flip
        )
        _, term = rules.jvp(part, (state, weight), (tangents[4], tangents[1]))
        terms.append(term)
    return sum(terms[1:], terms[0])


def _known(tangent):
    return None if tangent is None or isinstance(tangent, compat.Zero) else tangent


@_conv_operator.def_transpose
def _conv_transpose(cotangents, *operands, options, flip, activation, **has):
    del activation  # only what is linear, and so has no activation, is transposed
    (g,) = cotangents
    x, weight, bias, starts, state, slots = _split(operands, **has)
    pulled = _pullback(g, x, weight, (x, weight, bias), starts, options=options, flip=flip)
    dx, dweight, *dbias = pulled
    dstate = None
    if state is not None and compat.is_undefined_primal(state):
        dstate = (
            rules.zeros((state,))[0]
            if isinstance(g, compat.Zero)
            else _state_cotangent(g, state.aval, weight, starts, slots, options=options, flip=flip)
        )
    elif state is not None and not isinstance(g, compat.Zero):
        assert dweight is not None
        dweight = dweight + _state_weight_cotangent(
            g, state, weight.aval, starts, slots, options=options, flip=flip
        )
    flags = (has["with_starts"], has["with_state"], has["with_slots"])
    rest = [ct for ct, flag in zip((None, dstate, None), flags, strict=True) if flag]
    return [dx, dweight, *dbias, *rest]


# --- the part of a state -------------------------------------------------------------------------
#
# The sums of the first P steps of a segment have terms of the P rows of its state: those of a
# convolution of these rows, without padding.


def _state_part(state, weight, *, starts, slots, like, options, flip):
    """The part of the sums that a state adds, as an array like `like`."""
    if 0 in like.shape:
        return jnp.zeros_like(like)
    state = state.astype(accumulation_dtype(like))
    if slots is None:
        state = _of_first_segment(state, starts, options)
        heads = conv(state, weight, options=_over_states(options), flip=flip).astype(like.dtype)
        time = like.shape[options.time_axis]
        is_symbolic = jax.export.is_symbolic_dim(time)
        heads = _resize(heads, time if is_symbolic else min(time, options.padding), options)
        heads = _in_first_segment(heads, starts, options)
        zeros = rules.broadcast_like(jnp.zeros((), like.dtype), jax.typeof(like))
        return sequences.add_steps(zeros, heads, 0, options.time_axis)
    weight = jnp.expand_dims(weight, -3)
    heads = conv(state, weight, options=_over_states(options), flip=flip).astype(like.dtype)
    spread = _batched(_scatter_heads, like.shape[:-2])(heads, starts, slots)
    return rules.broadcast_like(spread, jax.typeof(like))


def _state_cotangent(g, like, weight, starts, slots, *, options, flip):
    """The transpose of `_state_part` in the state, which is like `like`."""
    of_states = _over_states(options).mirrored(weight.shape[-1])
    heads = _heads(g, starts, slots, like.shape, options)
    weight = weight if slots is None else jnp.expand_dims(weight, -3)
    dstate = conv(heads, weight, options=of_states, flip=not flip)
    if slots is None:
        dstate = _of_first_segment(dstate, starts, options)
    return rules.match_type(dstate, like, 2 if slots is None else 3)


def _state_weight_cotangent(g, state, like, starts, slots, *, options, flip):
    """The transpose of `_state_part` in the weight, which is like `like`."""
    heads = _heads(g, starts, slots, state.shape, options)
    state = state.astype(heads.dtype)
    if slots is None:
        state = _of_first_segment(state, starts, options)
    whole = jax.ShapeDtypeStruct((*heads.shape[:-2], *like.shape[-2:]), like.dtype)
    dweight = _filter_grad(state, heads, whole, options=_over_states(options), flip=flip)
    return rules.match_type(dweight if slots is None else dweight.sum(-3), like)


def _over_states(options):
    return _WholeOptions(0, options.dilation, options.data_format)


def _heads(g, starts, slots, state_shape, options):
    """The first P steps of g of each segment that has a state, of the type of sums."""
    if slots is None:
        heads = _first_steps(g, options.padding, options.time_axis)
        heads = _resize(_in_first_segment(heads, starts, options), options.padding, options)
    else:
        gather = functools.partial(_gather_heads, shape=state_shape[-3:-1])
        heads = _batched(gather, g.shape[:-2])(g, starts, slots)
    return heads.astype(accumulation_dtype(g))


def _resize(rows, steps, options):
    """The first steps of `rows`, with zeros after them if they are fewer."""
    pads = [(0, 0, 0)] * rows.ndim
    pads[options.time_axis] = (0, steps - rows.shape[options.time_axis], 0)
    return jax.lax.pad(rows, jnp.zeros((), rows.dtype), pads)


def _first_steps(rows, count, axis):
    """The first steps of a sequence, at most `count` of them unless it is of symbolic length."""
    time = rows.shape[axis]
    if jax.export.is_symbolic_dim(time):
        return rows
    return sequences.take_steps(rows, 0, min(count, time), axis)


def _in_first_segment(rows, starts, options):
    """The first steps of a sequence, zero where they are not of the first segment."""
    if starts is None or 0 in rows.shape:
        return rows
    starts = _first_steps(starts, rows.shape[options.time_axis], -1)
    is_first = starts == starts[..., :1]
    return jnp.where(jnp.expand_dims(is_first, options.channel_axis), rows, 0)


def _of_first_segment(state, starts, options):
    """Steps before a sequence, zero where the first segment has not begun."""
    if starts is None or starts.shape[-1] == 0:
        return state
    steps = jnp.arange(-options.padding, 0, dtype=starts.dtype)
    has_begun = steps >= sequences.take_steps(starts, 0, 1, -1)
    return jnp.where(jnp.expand_dims(has_begun, options.channel_axis), state, 0)


def _head_steps(starts, slots, slot_count, count):
    """The first `count` steps of the segment of each slot, T where it has fewer: (slots, count)."""
    time = starts.shape[0]
    steps = jnp.arange(time, dtype=starts.dtype)
    is_begin = (steps == starts) & (slots >= 0)
    begins = jnp.full(slot_count, time, starts.dtype)
    begins = begins.at[jnp.where(is_begin, slots, slot_count)].set(steps, mode="drop")[:, None]
    rows = begins + jnp.arange(count, dtype=starts.dtype)
    owner = starts.at[rows].get(mode="fill", fill_value=-1)
    return jnp.where(owner == begins, rows, time)


def _scatter_heads(heads, starts, slots):
    """Rows (slots, P, C) at the first steps of the segments of the slots: (T, C).

    It is a gather, because a scatter would begin with zeros that are whole on every device of a
    mesh of explicit axes.
    """
    count, padding = heads.shape[:2]
    since = jnp.arange(starts.shape[0], dtype=starts.dtype) - starts
    is_head = (since >= 0) & (since < padding) & (slots >= 0)
    return heads.at[jnp.where(is_head, slots, count), since].get(mode="fill", fill_value=0)


def _gather_heads(g, starts, slots, *, shape):
    """The transpose of `_scatter_heads`."""
    return g.at[_head_steps(starts, slots, *shape)].get(mode="fill", fill_value=0)


def _batched(function, batch):
    """`function` of arrays with the leading dimensions `batch`, or 1 where they do not vary."""
    rank = len(batch)
    for _ in batch:
        function = jax.vmap(function)

    def run(*arrays):
        shapes = [(*batch, *a.shape[rank:]) for a in arrays]
        # Broadcasting to the same shape would gather an array of a mesh of explicit axes.
        pairs = zip(arrays, shapes, strict=True)
        return function(*(a if a.shape == s else jnp.broadcast_to(a, s) for a, s in pairs))

    return run


# --- its tangent: x, weight, dx, dweight, dbias, starts -> dy ------------------------------------


def _tangent_unfused(*operands, options, flip, with_bias, with_starts):
    x, weight, dx, dweight, *rest = operands
    dbias = rest[0] if with_bias else None
    starts = rest[-1] if with_starts else None
    return [
        conv(dx, weight, dbias, starts, options=options, flip=flip)
        + conv(x, dweight, None, starts, options=options, flip=flip)
    ]


_tangent_operator = Operator(
    "lightweight_conv_tangent",
    signature=lambda *, options, with_bias, with_starts, **_: (
        f"{options.rows}, heads taps, {options.rows}, heads taps"
        + (", (heads depth)" if with_bias else "")
        + (", time" if with_starts else "")
        + f" -> {options.rows}"
    ),
    composition=_tangent_unfused,
    dtypes=lambda x, *_, **__: [x.dtype],
)


def _tangent(x, weight, dx, dweight, dbias=None, starts=None, *, options, flip=False):
    (dy,) = _tangent_operator(
        *(a for a in (x, weight, dx, dweight, dbias, starts) if a is not None),
        options=options,
        flip=flip,
        with_bias=dbias is not None,
        with_starts=starts is not None,
    )
    return dy


@_tangent_operator.def_jvp
def _tangent_jvp(primals, tangents, **params):
    return rules.jvp(functools.partial(_tangent_unfused, **params), primals, tangents)


@_tangent_operator.def_transpose
def _tangent_transpose(
    cotangents, x, weight, dx, dweight, *rest, options, flip, with_bias, with_starts
):
    (g,) = cotangents
    dbias = rest[0] if with_bias else None
    starts = rest[-1] if with_starts else None
    pulled = _pullback(g, x, weight, (dx, dweight, dbias), starts, options=options, flip=flip)
    return [None, None, *pulled, *([None] if with_starts else [])]


def _pullback(g, x, weight, wanted, starts, *, options, flip):
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
            *_present(starts),
            options=options,
            summed=tuple(n == 1 for n in weight.shape[:batch_rank]),
            # Its name: NumPy finds None equal to float64, and JAX's caches compare parameters.
            bias_dtype=dbias_like.dtype.name if dbias_like is not None and fuse_bias else None,
            with_starts=starts is not None,
        )
        dbias = fused[0] if fused else None
    elif dx_like is not None:
        mirrored = options.mirrored((weight if dweight_like is None else dweight_like).shape[-1])
        dx = conv(g, weight, None, starts, options=mirrored, flip=not flip)
    if dweight_like is not None and dweight is None:
        dweight = _filter_grad(x, g, dweight_like, starts, options=options, flip=flip)
    if dbias_like is not None and dbias is None:
        dbias = _sum_over_time(g, dbias_like.dtype, options)
    return [
        None if like is None or ct is None else rules.match_type(ct, like, like.ndim - batch_rank)
        for ct, like in zip((dx, dweight, dbias), (dx_like, dweight_like, dbias_like), strict=True)
    ][:count]


def _present(operand):
    return () if operand is None else (operand,)


def _spread_over_time(bias, like, options):
    """A per-channel vector at every time step of an array like `like`."""
    spread = rules.broadcast_like(jnp.expand_dims(bias, options.time_axis), jax.typeof(like))
    return spread.astype(like.dtype)


def _sum_over_time(g, dtype, options):
    wide = g.astype(accumulation_dtype(g))
    return jnp.sum(wide, axis=options.time_axis).astype(dtype)


# --- filter gradient: x, g, starts -> dweight ----------------------------------------------------


def _filter_grad_reference(x, g, starts=None, *, options, heads, taps, summed, dtype, **_):
    dweight = reference.lightweight_conv_filter_grad(
        x, g, starts=starts, heads=heads, taps=taps, **dataclasses.asdict(options)
    )
    axes = tuple(i for i, s in enumerate(summed) if s)
    return [dweight.sum(axes, keepdims=True).astype(dtype)]


def _filter_grad_on_part(x, g, starts=None, *, plan, options, **params):
    """The call of a device that has a part of the steps."""
    part = shards.part_of(plan, x, options.time_axis)
    if part is None:
        return (x, g, *_present(starts)), {"options": options, **params}, None
    reach = (params["taps"] - 1) * options.dilation
    around = shards.Surroundings(x, starts, part=part, options=options, reach=reach)

    def complete(dweight):
        return [_with_products_across(dweight, around, g, part, options=options, **params)]

    operands = (x, g, *_present(part.own_starts(starts)))
    return operands, {"options": options, **params}, complete


def _with_products_across(dweight, around, g, part, **params):
    """A filter's gradient with what products with steps of other devices add to it."""
    wide = accumulation_dtype(dweight, g)

    def of_rows(x, g, starts):
        operands = (x, g, *_present(starts))
        return _filter_grad_operator.on_one_device(*operands, **{**params, "dtype": wide})[0]

    axis = params["options"].time_axis
    terms = shards.filter_grad_across(around, g, part, axis, of_rows)
    return sum(terms, dweight.astype(wide)).astype(dweight.dtype)


_filter_grad_operator = Operator(
    "lightweight_conv_filter_grad",
    signature=lambda *, options, with_starts, **_: (
        f"{options.rows}, {options.rows}{', time' if with_starts else ''} -> heads taps"
    ),
    reference=_filter_grad_reference,
    dtypes=lambda *_, dtype, **__: [dtype],
    attributes=attributes,
    work_space=True,
    replicated=("token", "taps"),
    neighbours=_filter_grad_on_part,
    asks_on_gpu=lambda *, options, with_starts, **_: with_starts or _is_dilated_nct(options),
    summed_outputs=(0,),
)


def _filter_grad(x, g, like, starts=None, *, options, flip=False):
    """dweight of conv(x, weight), of the shape and dtype of `like` where g varies no less."""
    heads, taps = like.shape[-2:]
    if flip:
        # The correlation with flipped taps is the one with its two operands exchanged.
        x, g, options = g, x, options.mirrored(taps)
    (dweight,) = _filter_grad_operator(
        x,
        g,
        *_present(starts),
        options=options,
        heads=heads,
        taps=taps,
        summed=tuple(n == 1 for n in like.shape[:-2]),
        dtype=np.dtype(like.dtype),
        with_starts=starts is not None,
    )
    return dweight


@_filter_grad_operator.def_jvp
def _filter_grad_jvp(primals, tangents, **params):
    x, g, *starts = primals
    dx, dg = (_known(t) for t in tangents[:2])
    terms = [(dx, g)] if dx is not None else []
    terms += [(x, dg)] if dg is not None else []
    (dweight,) = _filter_grad_operator(*primals, **params)
    return [dweight], [sum(_filter_grad_operator(*term, *starts, **params)[0] for term in terms)]


@_filter_grad_operator.def_transpose
def _filter_grad_transpose(cotangents, x, g, starts=None, *, options, taps, **_):
    (dweight,) = cotangents
    rest = [None for _ in _present(starts)]
    if isinstance(dweight, compat.Zero):
        return [*rules.zeros((x, g)), *rest]
    if compat.is_undefined_primal(x):
        mirrored = options.mirrored(taps)
        ct = conv(g, dweight, None, starts, options=mirrored, flip=True)
        return [rules.match_type(ct, x.aval), None, *rest]
    ct = conv(x, dweight, None, starts, options=options)
    return [None, rules.match_type(ct, g.aval), *rest]


# --- fused backward: x, weight, g, starts -> dx, dweight, dbias ----------------------------------


def _backward_signature(*, options, bias_dtype, with_starts, **_):
    results = f"{options.rows}, heads taps" + ("" if bias_dtype is None else ", (heads depth)")
    operands = f"{options.rows}, heads taps, {options.rows}" + (", time" if with_starts else "")
    return f"{operands} -> {results}"


def _backward_unfused(x, weight, g, starts=None, *, options, summed, bias_dtype, **_):
    mirrored = options.mirrored(weight.shape[-1])
    like = jax.ShapeDtypeStruct(
        tuple(
            1 if s else n for s, n in zip(summed, _batch_shape(x, weight, g, starts), strict=True)
        )
        + weight.shape[-2:],
        weight.dtype,
    )
    results = [
        conv(g, weight, None, starts, options=mirrored, flip=True),
        _filter_grad(x, g, like, starts, options=options),
    ]
    if bias_dtype is not None:
        dbias = _sum_over_time(g, bias_dtype, options)
        results.append(rules.unbroadcast(dbias, like.shape[:-2]))
    return results


def _batch_shape(x, weight, g, starts):
    shapes = [a.shape[:-2] for a in (x, weight, g)]
    return lax.broadcast_shapes(*shapes, *(a.shape[:-1] for a in _present(starts)))


def _backward_reference(x, weight, g, starts=None, *, options, summed, bias_dtype, **_):
    """The gradients of the definition, which XLA computes in fewer passes than one of each."""
    axes = tuple(i for i, s in enumerate(summed) if s)
    batch = _batch_shape(x, weight, g, starts)
    wide = accumulation_dtype(x, weight, g)

    def of_batch(array, rank):
        return jnp.broadcast_to(array, (*batch, *array.shape[array.ndim - rank :]))

    def convolve(x, weight):
        return reference.lightweight_conv(x, weight, starts=starts, **dataclasses.asdict(options))

    _, pull = jax.vjp(convolve, of_batch(x, 2), of_batch(weight.astype(wide), 2))
    dx, dweight = pull(of_batch(g, 2))
    results = [dx, dweight.sum(axes, keepdims=True).astype(weight.dtype)]
    if bias_dtype is not None:
        dbias = of_batch(jnp.sum(g.astype(wide), axis=options.time_axis), 1)
        results.append(dbias.sum(axes, keepdims=True).astype(bias_dtype))
    return results


def _backward_on_part(x, weight, g, starts=None, *, plan, options, summed, **params):
    """The call of a device that has a part of the steps."""
    part = shards.part_of(plan, x, options.time_axis)
    operands = (x, weight, g, *_present(starts))
    if part is None:
        return operands, {"options": options, "summed": summed, **params}, None
    mirrored = options.mirrored(weight.shape[-1])
    reach = _reach(weight, options)
    around_x = shards.Surroundings(x, starts, part=part, options=options, reach=reach)
    around_g = shards.Surroundings(g, starts, part=part, options=mirrored, reach=reach)
    has = dict(with_bias=False, with_starts=starts is not None, with_state=False, with_slots=False)

    def input_grad(begin, end):
        rows, starts = around_g.rows(begin, end), around_g.starts(begin, end)
        operands = (rows, weight, *_present(starts))
        return _conv_operator.on_one_device(
            *operands, options=mirrored, flip=True, activation=None, **has
        )[0]

    def complete(dx, dweight, *dbias):
        heads, taps = weight.shape[-2:]
        dweight = _with_products_across(
            dweight,
            around_x,
            g,
            part,
            options=options,
            heads=heads,
            taps=taps,
            summed=summed,
            with_starts=starts is not None,
        )
        return [
            shards.completed(dx, around_g, part, options.time_axis, input_grad),
            dweight,
            *dbias,
        ]

    own = _present(part.own_starts(starts))
    return (x, weight, g, *own), {"options": options, "summed": summed, **params}, complete


def _backward_instead_on_gpu(x, weight, g, *starts, options, with_starts, **params):
    if with_starts or not _is_faster_in_nct(x, weight, options, "backward"):
        return None
    options = dataclasses.replace(options, data_format="NCT")
    params |= dict(options=options, with_starts=False)

    def finish(dx, *others):
        return [_transposed(dx), *others]

    return (_transposed(x), weight, _transposed(g)), params, finish


_backward_operator = Operator(
    "lightweight_conv_backward",
    signature=_backward_signature,
    reference=_backward_reference,
    dtypes=lambda x, weight, *_, bias_dtype, **__: (
        [x.dtype, weight.dtype] + ([] if bias_dtype is None else [np.dtype(bias_dtype)])
    ),
    attributes=attributes,
    work_space=True,
    replicated=("token", "taps"),
    neighbours=_backward_on_part,
    asks_on_gpu=lambda *, options, with_starts, **_: with_starts or _is_dilated_nct(options),
    summed_outputs=(1, 2),
    instead_on_gpu=_backward_instead_on_gpu,
)


@_backward_operator.def_jvp
def _backward_jvp(primals, tangents, **params):
    return rules.jvp(functools.partial(_backward_unfused, **params), primals, tangents)


@_backward_operator.def_transpose
def _backward_transpose(cotangents, x, weight, g, starts=None, *, options, **_):
    """The transpose in g of the transpose of the tangent: the tangent."""
    terms = []
    dx, dweight, dbias = rules.nonzero(cotangents, 3)
    if dx is not None:
        terms.append(conv(dx, weight, None, starts, options=options))
    if dweight is not None:
        terms.append(conv(x, dweight, None, starts, options=options))
    if dbias is not None:
        terms.append(_spread_over_time(dbias, g.aval, options))
    ct = rules.match_type(sum(terms), g.aval) if terms else rules.zeros((g,))[0]
    return [None, None, ct, *([] if starts is None else [None])]


@_backward_operator.def_dead_code
def _backward_dead_code(used, x, weight, g, *_, options, summed, bias_dtype, with_starts):
    """With one gradient unused, the other's own primitive serves."""
    starts = (3,) if with_starts else ()
    if used[0] and not any(used[1:]) and g.shape == x.shape:
        mirrored = options.mirrored(weight.shape[-1])
        has = dict(with_bias=False, with_starts=with_starts, with_state=False, with_slots=False)
        params = dict(options=mirrored, flip=True, activation=None, **has)
        return _conv_operator, (2, 1, *starts), params
    if used[1] and not used[0] and not any(used[2:]):
        heads, taps = weight.shape[-2:]
        params = dict(options=options, heads=heads, taps=taps, summed=summed, dtype=weight.dtype)
        return _filter_grad_operator, (0, 2, *starts), {**params, "with_starts": with_starts}
    return None
