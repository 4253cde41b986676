"""Paddings by name, segments and states: the parts that operators over time share.

The primitives take segments as `starts`: the first step of the segment of each step, non-decreasing
over time. A segment that began before step 0 has a start of 0 if nothing is known of its earlier
steps, and of -P if a state holds P of them. Two steps are of the same segment if and only if their
starts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._core import checks, compat, halo, rules
from jaxops._core.partition import Plan
from jaxops._core.primitive import Operator
from jaxops.reference import segment_starts as reference

PADDINGS = ("causal", "same")


def resolve_padding(function: str, padding: Any, reach: int) -> int:
    """The padding as a number in [0, reach]; names are taken in any case."""
    if isinstance(padding, str):
        name = checks.choice(function, "padding", padding, PADDINGS)
        return reach if name == "causal" else reach // 2
    return checks.integer(function, "padding", padding, 0, reach)


def taps_that_read(padding: int, dilation: int, taps: int, time: int, has_state: bool) -> range:
    """The taps that read something at any step; others at both ends of a filter add zeros alone.

    Tap k reads the step that is ``k * dilation - padding`` after its own. Steps are those of the
    sequence, and the `padding` steps before it that a state has. Kept taps have the padding
    ``padding - start * dilation``, which `resolve_padding` would take: for that, a tap on either
    side of the step itself stays, even if it reads nothing.
    """
    if jax.export.is_symbolic_dim(time) or time == 0:
        return range(taps)
    # The last tap that reads no step after its own, and the first that reads none before it.
    back, ahead = padding // dilation, -(-padding // dilation)
    # A state begins where tap 0 reads at step 0.
    first = 0 if has_state else min(max(0, -((time - 1 - padding) // dilation)), back)
    last = max(min(taps - 1, (padding + time - 1) // dilation), ahead)
    return range(first, last + 1)


def bounded(padding: int, dilation: int, taps: int, time: int) -> tuple[int, int]:
    """A padding and a dilation with the same terms, of which the dilation is at most 2 * time.

    If taps are further apart than that, at most one is within the sequence at any step, and it is
    always the same one. A single tap has no distance to another.
    """
    if taps == 1:
        return 0, 1
    if jax.export.is_symbolic_dim(time):
        return padding, dilation
    if time == 0:
        return 0, 1
    far = 2 * time
    if dilation <= far:
        return padding, dilation
    tap, back = divmod(padding, dilation)
    if back < time:
        return tap * far + back, far
    ahead = dilation - back
    return (tap + 1) * far - min(ahead, time), far


def data_format(function: str, value: Any) -> str:
    """The data format of sequences, in capitals."""
    return checks.choice(function, "data_format", value, ("NTC", "NCT"))


def time_axis(data_format: str) -> int:
    """The dimension of time in a sequence, counted from the last."""
    return -2 if data_format == "NTC" else -1


def sequence_array(function: str, argument: str, value: Any, data_format: str) -> jax.Array:
    """`value` as an array (..., T, C), or (..., C, T), of a float dtype."""
    shape = "(..., T, C)" if data_format == "NTC" else "(..., C, T)"
    array = checks.float_array(function, argument, value, None, shape)
    if array.ndim < 2:
        raise ValueError(
            f"{function}: {argument} must have shape {shape}, which has at least 2 dimensions, got "
            f"shape {array.shape}"
        )
    return array


def unvarying(array: jax.Array, rank: int) -> jax.Array:
    """An array that does not vary over the `rank` batch dimensions of a sequence."""
    return array.reshape((1,) * rank + array.shape) if rank else array


def integer_array(
    function: str, argument: str, value: Any, expected: Sequence[int] | None, why: str
) -> jax.Array:
    """`value` as an integer array of exactly the expected shape, or with None of any."""
    array = checks.as_array(function, argument, checks.array(function, argument, value, why))
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{function}: {argument} must have an integer dtype, got {array.dtype}")
    if expected is not None:
        checks.shape(function, argument, array, expected, why)
    return array


def segment_ids_array(function: str, value: Any, expected: Sequence[int], why: str) -> jax.Array:
    """Segment ids as an integer array: neighbours that are equal are so there, and no others."""
    ids = checks.array(function, "segment_ids", value, why)
    is_wide = isinstance(ids, np.ndarray) and ids.ndim > 0 and ids.dtype.kind in "iu"
    if is_wide and ids.dtype.itemsize == 8 and not compat.setting("jax_enable_x64"):
        # JAX would cut off the upper halves.
        differ = ids[..., 1:] != ids[..., :-1]
        ids = np.zeros(ids.shape, np.int32)
        ids[..., 1:] = differ.cumsum(axis=-1)
    return integer_array(function, "segment_ids", ids, expected, why)


def slot_indices(
    function: str, indices: Any, entries: int, why: str = "(B,), one slot an entry of x_t"
) -> jax.Array | np.ndarray | None:
    """The slots of entries as int32 or int64, None for None. Any negative one is none."""
    if indices is None:
        return None
    indices = checks.array(function, "state_indices", indices, why)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"{function}: state_indices must have an integer dtype, got {indices.dtype}"
        )
    checks.shape(function, "state_indices", indices, (entries,), why)
    held, int32 = jnp.iinfo(indices.dtype), np.iinfo(np.int32)
    if int32.min <= held.min and held.max <= int32.max:
        return indices.astype(np.int32)
    if not isinstance(indices, np.ndarray) and indices.dtype == np.int64:
        return indices
    library = np if isinstance(indices, np.ndarray) else jnp
    # Numbers beyond int32 are slots of no cache.
    is_slot = (indices >= 0) & (indices <= np.asarray(int32.max, indices.dtype))
    return library.where(is_slot, indices.astype(np.int32), np.int32(-1))


def step_signature(filters: str, *, with_bias: bool, with_indices: bool) -> str:
    """The signature of steps with states; `filters` may name the `{entries}` of x_t."""
    # Slots in their order are shared out with the entries. Others are anywhere.
    entries, slots = ("entries", "cache") if with_indices else ("slots", "slots")
    x, state = (f"{rows} (heads depth)" for rows in (f"{entries} steps", f"{slots} rows"))
    operands = [x, state, filters.format(entries=entries)]
    operands += ["(heads depth)"] if with_bias else []
    operands += ["entries"] if with_indices else []
    return f"{', '.join(operands)} -> {x}, {state}"


def step_operands(
    operands: Sequence[jax.Array], *, with_bias: bool, with_indices: bool
) -> tuple[Any, ...]:
    """The operands x_t, state, weight, bias and indices, the last two None where there are none."""
    x, state, weight, *others = operands
    bias = others[0] if with_bias else None
    return x, state, weight, bias, others[-1] if with_indices else None


def state_array(
    function: str, argument: str, value: Any, x: jax.Array, padding: int, data_format: str
) -> jax.Array:
    """`value` as the steps that precede those of x: `padding` of them, and as x otherwise."""
    time_first = data_format == "NTC"
    why = "(..., P, C)" if time_first else "(..., C, P)"
    array = checks.float_array(function, argument, value, None, why)
    expected = list(x.shape)
    expected[time_axis(data_format)] = padding
    why = f"{why}, the P = {padding} steps before those of x {x.shape}"
    checks.shape(function, argument, array, expected, why)
    return array


def segment_starts(segment_ids: jax.Array, first: int) -> jax.Array:
    """The first step of the segment of each step, int32, of ids (..., T).

    A segment is a run of equal neighbouring ids. The first one starts at `first`, which is at most
    0.
    """
    if jnp.iinfo(segment_ids.dtype).bits < 8:
        segment_ids = segment_ids.astype(jnp.int8)  # handlers read whole bytes
    (starts,) = _segment_starts_operator(segment_ids, first=first)
    return starts


def _segment_starts_on_part(ids, *, plan: Plan, first: int):
    """The call of a device that has a part of the steps, and what other devices' ids change."""
    axes = plan.axes.get("time", ())
    count, steps = plan.size(axes), ids.shape[-1]
    if count == 1 or steps == 0:
        return (ids,), {"first": first}, None
    ((before,), _) = halo.borders(ids, ids.ndim - 1, 1, 0, axes, plan.mesh)
    device = jax.lax.axis_index(axes)
    place = device * jnp.int32(steps)

    def complete(starts):
        # Where the first segment of the part begins, unless in another part.
        begins = (device > 0) & (before != ids[..., :1])
        known = jnp.where(begins, place, jnp.int32(first))
        last = jnp.where(starts[..., -1:] > 0, starts[..., -1:] + place, known)
        # One entry a device, summed with the zeros of the others.
        devices = jnp.arange(count)
        of_all = jax.lax.psum(jnp.where(devices == device, last, 0), axes)
        carried = jnp.where(devices < device, of_all, first).max(axis=-1, keepdims=True)
        known = jnp.maximum(known, carried)
        return [jnp.where(starts > 0, starts + place, known)]

    return (ids,), {"first": 0}, complete


# XLA would gather the ids for their cumulative maximum.
_segment_starts_operator = Operator(
    "segment_starts",
    signature=lambda **_: "time -> time",
    dtypes=lambda *_, **__: [np.int32],
    reference=lambda ids, *, first: [reference.segment_starts(ids, first=first)],
    attributes=lambda *, first: {"first": np.int64(first)},
    neighbours=_segment_starts_on_part,
)


# --- some steps of sequences ---------------------------------------------------------------------
#
# Two linear primitives, each of which is the other's transpose. Slices and pads along time would be
# errors on meshes of explicit axes, and XLA would gather some where devices have parts of it.


def take_steps(rows: jax.Array, begin: int, count: int, axis: int) -> jax.Array:
    """The steps of `rows` from `begin` on, which every device gets where devices have parts.

    Time is the dimension `axis`, counted from the last.
    """
    if jax.export.is_symbolic_dim(rows.shape[axis]):  # exported, and so for one device
        return jax.lax.slice_in_dim(rows, begin, begin + count, axis=rows.ndim + axis)
    (taken,) = _take_steps_operator(rows, begin=begin, kept=count, axis=axis)
    return taken


def add_steps(rows: jax.Array, some: jax.Array, begin: int, axis: int) -> jax.Array:
    """`rows` with `some` added to the steps from `begin` on."""
    if jax.export.is_symbolic_dim(rows.shape[axis]):
        return _add_steps(rows, some, begin=begin, axis=axis)[0]
    (sums,) = _add_steps_operator(rows, some.astype(rows.dtype), begin=begin, axis=axis)
    return sums


def _take_steps(rows, *, begin, kept, axis, **_):
    return [jax.lax.slice_in_dim(rows, begin, begin + kept, axis=rows.ndim + axis)]


def _add_steps(rows, some, *, begin, axis, **_):
    batch = lax.broadcast_shapes(rows.shape[:axis], some.shape[:axis])
    rows, some = (jnp.broadcast_to(a, (*batch, *a.shape[axis:])) for a in (rows, some))
    dim = rows.ndim + axis
    old = jax.lax.slice_in_dim(rows, begin, begin + some.shape[axis], axis=dim)
    return [jax.lax.dynamic_update_slice_in_dim(rows, old + some, begin, dim)]


def _signature(text):
    def of_axis(*, axis, **_):
        return text.replace(" others", "".join(f" other{i}" for i in range(-1 - axis)))

    return of_axis


def _some_steps(rows, first, count, axis):
    """`count` steps from `first` on, which may be traced, with zeros for those beyond the ends."""
    at = first + jnp.arange(count, dtype=jnp.int32)
    is_inside = (at >= 0) & (at < rows.shape[axis])
    taken = jnp.take(rows, jnp.clip(at, 0, rows.shape[axis] - 1), axis=axis)
    is_inside = is_inside.reshape(count, *[1] * (-1 - axis))
    return jnp.where(is_inside, taken, jnp.zeros_like(taken))


def _take_steps_on_part(rows, *, plan: Plan, begin: int, kept: int, axis: int):
    """The call of a device that has a part of the steps: with zeros for others, to be summed."""
    params = {"begin": begin, "kept": kept, "axis": axis}
    axes, steps = plan.axes.get("time", ()), rows.shape[axis]
    if plan.size(axes) == 1 or steps == 0:
        return (rows,), params, None
    place = jax.lax.axis_index(axes) * jnp.int32(steps)
    return (_some_steps(rows, begin - place, kept, axis),), {**params, "begin": 0}, None


def _add_steps_on_part(rows, some, *, plan: Plan, begin: int, axis: int):
    """The call of a device that has a part of the steps, to which it adds its own of `some`."""
    params = {"begin": begin, "axis": axis}
    axes, steps = plan.axes.get("time", ()), rows.shape[axis]
    if plan.size(axes) == 1 or 0 in (steps, some.shape[axis]):
        return (rows, some), params, None
    place = jax.lax.axis_index(axes) * jnp.int32(steps)
    return (rows, _some_steps(some, place - begin, steps, axis)), {**params, "begin": 0}, None


_take_steps_operator = Operator(
    "take_steps",
    signature=_signature("time others -> kept others"),
    dtypes=lambda rows, **_: [rows.dtype],
    local=_take_steps,
    replicated=("kept",),
    neighbours=_take_steps_on_part,
)
_add_steps_operator = Operator(
    "add_steps",
    signature=_signature("time others, kept others -> time others"),
    dtypes=lambda rows, *_, **__: [rows.dtype],
    local=_add_steps,
    replicated=("kept",),
    neighbours=_add_steps_on_part,
)


@_take_steps_operator.def_jvp
def _take_steps_jvp(primals, tangents, **params):
    return _take_steps_operator(*primals, **params), _take_steps_operator(*tangents, **params)


@_add_steps_operator.def_jvp
def _add_steps_jvp(primals, tangents, *, begin, axis):
    sums = add_steps(primals[0], primals[1], begin, axis)
    rows, some = rules.nonzero(tangents, 2)
    if rows is None:
        rows = rules.broadcast_like(jnp.zeros((), sums.dtype), jax.typeof(sums))
    if some is None:
        return [sums], [rules.broadcast_like(rows, jax.typeof(sums))]
    return [sums], [add_steps(rows, some, begin, axis)]


@_take_steps_operator.def_transpose
def _take_steps_transpose(cotangents, rows, *, begin, kept, axis):
    (ct,) = cotangents
    if isinstance(ct, compat.Zero):
        return rules.zeros((rows,))
    zeros = rules.broadcast_like(jnp.zeros((), ct.dtype), rows.aval)
    return [rules.match_type(add_steps(zeros, ct, begin, axis), rows.aval, -axis)]


@_add_steps_operator.def_transpose
def _add_steps_transpose(cotangents, rows, some, *, begin, axis):
    (ct,) = cotangents
    if isinstance(ct, compat.Zero):
        return rules.zeros((rows, some))
    cts: list[jax.Array | None] = [None, None]
    if compat.is_undefined_primal(rows):
        cts[0] = rules.match_type(ct, rows.aval, -axis)
    if compat.is_undefined_primal(some):
        count = some.aval.shape[axis]
        cts[1] = rules.match_type(take_steps(ct, begin, count, axis), some.aval, -axis)
    return cts


def ragged_starts(starts: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """For each token the first one of its sequence, and the number of its sequence, int32.

    `starts` (S + 1,) has the first token of each sequence and the end of the last. Tokens past that
    end are a sequence of their own, which has the number S. A token has start 0 if no start
    precedes it, or if the starts are out of order and its own would be a later token.
    """
    starts = starts.astype(jnp.int32)
    steps = jnp.arange(tokens, dtype=jnp.int32)
    # The last of the sequences that start at a token is the one that is not empty.
    # A search takes as many steps as the number of sequences has bits, and jax.numpy has none for a
    # symbolic number; of one entry it makes a loop.
    count = starts.shape[0]
    if jax.export.is_symbolic_dim(count) or count < 2:
        number = jnp.sum(starts[:, None] <= steps[None], axis=0, dtype=jnp.int32) - 1
    else:
        number = jnp.searchsorted(starts, steps, side="right", method="scan_unrolled")
        number = number.astype(jnp.int32) - 1
    first = jnp.take(starts, number, mode="clip")
    # Kernels find rows of states by the distance from the first token.
    return jnp.where((first >= 0) & (first <= steps), first, 0), number


def final_state(
    x: jax.Array,
    padding: int,
    data_format: str,
    starts: jax.Array | None = None,
    initial_state: jax.Array | None = None,
) -> jax.Array:
    """The last `padding` inputs of the last segment of each row: the state of a next call.

    The initial state precedes the inputs of the first segment, zeros those of the others. The
    result has the dtype of the initial state, else that of x.
    """
    axis = x.ndim + time_axis(data_format)
    time = x.shape[axis]
    dtype = x.dtype if initial_state is None else initial_state.dtype
    if jax.export.is_symbolic_dim(x.shape[axis]) or time < padding:
        x = take_steps(x, 0, time, axis - x.ndim)
        if initial_state is None:
            before = [(0, 0)] * x.ndim
            before[axis] = (padding, 0)
            rows = jnp.pad(x, before)
        else:
            wide = jnp.promote_types(x.dtype, dtype)
            rows = jnp.concatenate([initial_state.astype(wide), x.astype(wide)], axis=axis)
        last = jax.lax.slice_in_dim(rows, time, time + padding, axis=axis)
    else:
        last = take_steps(x, time - padding, padding, axis - x.ndim)
    if starts is not None and padding > 0 and time > 0:
        steps = time - padding + jnp.arange(padding, dtype=jnp.int32)
        is_of_last = steps >= take_steps(starts, time - 1, 1, -1)
        last = jnp.where(jnp.expand_dims(is_of_last, 2 * x.ndim - 3 - axis), last, 0)
    return last.astype(dtype)


def final_states(
    x: jax.Array, starts: jax.Array, padding: int, initial_states: jax.Array | None
) -> jax.Array:
    """The last `padding` inputs (S, padding, C) of each sequence of tokens (N, C).

    The initial state of a sequence precedes its inputs; without one zeros do.
    """
    tokens, channels = x.shape
    begins, ends = starts[:-1, None], starts[1:, None]
    rows = ends - padding + jnp.arange(padding, dtype=starts.dtype)
    is_input = (rows >= begins)[..., None]
    if tokens > 0:
        last = x.at[jnp.where(rows >= begins, rows, tokens)].get(mode="fill", fill_value=0)
    else:
        last = jnp.zeros((*rows.shape, channels), x.dtype)
    if initial_states is None:
        return last
    if padding == 0:
        return initial_states
    kept = jnp.clip(rows - begins + padding, 0, padding - 1)
    before = jax.vmap(lambda state, at: state.at[at].get(mode="clip"))(initial_states, kept)
    return jnp.where(is_input, last.astype(initial_states.dtype), before)
