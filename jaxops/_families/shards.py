"""Sequences of which each device has a part: what depends on steps of other devices.

A device convolves its own steps as if there were no others. Meanwhile it gets from its neighbours
the steps that filters reach beyond its part. Then it computes again the few results near the ends
of its part that depend on these, from arrays of a few steps. The parts themselves are read once and
never copied, and the exchange is hidden behind the convolution of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._core import halo
from jaxops._core.partition import Plan

TIME = "time"  # the factor of signatures
FILTER_AXIS = -3  # the dimension of time in filters (..., T, H, K)


class Part:
    """The steps of a sequence that one device has; the other devices have as many each.

    Steps are counted from the first one of the part.
    """

    def __init__(self, plan: Plan, steps: int):
        self.axes = plan.axes[TIME]
        self.mesh = plan.mesh
        self.devices = plan.size(self.axes)
        self.steps = steps
        self.first = lax.axis_index(self.axes) * jnp.int32(steps)  # its number in the sequence

    def borders(self, array: jax.Array, axis: int, before: int, after: int):
        """The steps of `array` before the part and after it, with zeros beyond the ends."""
        dim = array.ndim + axis
        sides = halo.borders(array, dim, before, after, self.axes, self.mesh)
        return tuple(_joined(arrays, dim) if arrays else None for arrays in sides)

    def borders_of_several(self, wanted):
        """The `borders` of arrays (array, axis, before, after), which are sent together."""
        wanted = [(a, a.ndim + axis, before, after) for a, axis, before, after in wanted]
        found = halo.borders_of_several(wanted, self.axes, self.mesh)
        return [
            [_joined(arrays, dim) if arrays else None for arrays in sides]
            for (_, dim, *_), sides in zip(wanted, found, strict=True)
        ]

    def own(self, array: jax.Array, axis: int, begin: int, end: int) -> jax.Array:
        """These steps of `array`, with zeros for those that other devices have."""
        low, high = max(begin, 0), min(end, self.steps)
        steps = lax.slice_in_dim(array, low, high, axis=array.ndim + axis)
        return _padded(steps, low - begin, end - high, axis)

    def own_starts(self, starts: jax.Array | None) -> jax.Array | None:
        """The first step of the segment of each step; segments that began earlier begin at 0."""
        return None if starts is None else jnp.maximum(starts - self.first, 0)


def part_of(plan: Plan, operand: jax.Array, axis: int) -> Part | None:
    """One device's part of the sequence `operand`, or None where it has all of it."""
    steps = operand.shape[axis]
    is_whole = plan.size(plan.axes.get(TIME, ())) == 1 or steps == 0
    return None if is_whole else Part(plan, steps)


class Surroundings:
    """The steps of a sequence, and the steps of other devices that filters reach.

    Filters that differ from step to step are exchanged with the rows if they are given.

    Attributes:
      before, after: how many steps of other devices there are on each side.
    """

    def __init__(
        self, rows, starts, state=None, *, part: Part, options: Any, reach: int, filters=None
    ):
        self._axis = axis = options.time_axis
        self._own = rows
        self._part = part
        self.padding, self.beyond = options.padding, reach - options.padding
        others = (part.devices - 1) * part.steps
        # Beyond the ends are zeros, which nobody sends.
        self.before, self.after = min(self.padding, others), min(self.beyond, others)
        wanted = [(rows, axis, self.before, self.after)]
        if filters is not None:
            wanted.append((filters, FILTER_AXIS, self.before, self.after))
        if starts is not None:
            wanted.append((starts, -1, 0, self.after))
        (self._before, self._after), *others = part.borders_of_several(wanted)
        if filters is not None:
            before, after = others[0]
            self._filters = self._places(before, filters, after)
        if state is not None:
            self._put_state_before(state)
        self._starts = None if starts is None else self._starts_around(starts, others[-1][1])

    def _put_state_before(self, state):
        """The state of the whole sequence precedes its first step."""
        part, axis = self._part, self._axis
        # Zeros follow it, as the steps of the sequence do.
        rows = _padded(state, 0, self.padding, axis)
        at = jnp.minimum(part.first, self.padding)
        rows = lax.dynamic_slice_in_dim(rows, at, self.padding, rows.ndim + axis)
        if self._before is not None:
            wide = jnp.promote_types(state.dtype, self._own.dtype)
            received = _padded(self._before.astype(wide), self.padding - self.before, 0, axis)
            steps = part.first + jnp.arange(-self.padding, 0, dtype=jnp.int32)
            is_input = (steps >= 0) if axis == -1 else (steps >= 0)[:, None]
            rows = jnp.where(is_input, received, rows.astype(wide))
        self._before, self.before = rows, self.padding

    def _starts_around(self, starts, received):
        part = self._part
        starts = starts - part.first
        steps = jnp.arange(-self.before, 0, dtype=jnp.int32)
        first = starts[..., :1]
        around = [jnp.where(steps >= first, first, -self.before), starts]
        if received is not None:
            # Each step beyond the end is a segment of its own.
            steps = part.steps + jnp.arange(self.after, dtype=jnp.int32)
            is_step = part.first + steps < part.devices * part.steps
            around.append(jnp.where(is_step, received - part.first, steps))
        return jnp.concatenate(around, axis=-1)

    def starts(self, begin: int, end: int) -> jax.Array | None:
        """The starts of the segments of these steps, counted from `begin`."""
        if self._starts is None:
            return None
        low = self.before + begin
        return jnp.maximum(self._starts[..., low : low + end - begin] - begin, 0)

    def rows(self, begin: int, end: int) -> jax.Array:
        """These steps, of which those before 0 are of the devices before, and so on."""
        places = self._places(self._before, self._own, self._after)
        return _steps_of(places, self._own.ndim + self._axis, begin, end)

    def filters(self, begin: int, end: int) -> jax.Array:
        """The filters of these steps."""
        _, (_, own), _ = self._filters
        return _steps_of(self._filters, own.ndim + FILTER_AXIS, begin, end)

    def _places(self, before, own, after):
        """The steps of three arrays, each with its first one."""
        return ((-self.before, before), (0, own), (self._part.steps, after))


def _steps_of(places, axis: int, begin: int, end: int) -> jax.Array:
    found = []
    for place, rows in places:
        if rows is None:
            continue
        low, high = max(begin, place), min(end, place + rows.shape[axis])
        if low < high:
            found.append(lax.slice_in_dim(rows, low - place, high - place, axis=axis))
    return _joined(found, axis)


def _joined(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    """Arrays one after the other, of the widest type and with all batch dimensions."""
    if len(arrays) == 1:
        return arrays[0]
    shapes = [list(a.shape) for a in arrays]
    for shape in shapes:
        shape[axis] = 1
    common = jnp.broadcast_shapes(*map(tuple, shapes))
    dtype = jnp.result_type(*arrays)

    def broadcast(a):
        shape = list(common)
        shape[axis] = a.shape[axis]
        return jnp.broadcast_to(a, shape).astype(dtype)

    return jnp.concatenate([broadcast(a) for a in arrays], axis=axis)


def _padded(rows: jax.Array, before: int, after: int, axis: int) -> jax.Array:
    pads = [(0, 0)] * rows.ndim
    pads[axis] = (before, after)
    return jnp.pad(rows, pads)


def completed(
    y: jax.Array, around: Surroundings, part: Part, axis: int, compute: Callable
) -> jax.Array:
    """The convolution y of a part, with the results that depend on steps of other devices.

    compute(begin, end) is the convolution of these steps, with zeros around them.
    """
    head, tail = min(around.before, part.steps), min(around.after, part.steps)
    ends = [(0, head), (part.steps - tail, part.steps)]
    if head + tail >= part.steps:
        ends = [(0, part.steps)]
    for begin, end in ends:
        if begin == end:
            continue
        low = max(begin - around.padding, -around.before)
        high = min(end + around.beyond, part.steps + around.after)
        results = compute(low, high)
        dim = results.ndim + axis
        results = lax.slice_in_dim(results, begin - low, end - low, axis=dim).astype(y.dtype)
        shape = [*y.shape]
        shape[axis] = end - begin
        results = jnp.broadcast_to(results, shape)
        y = lax.dynamic_update_slice_in_dim(y, results, begin, dim)
    return y


def filter_grad_across(
    x: Surroundings, g: jax.Array, part: Part, axis: int, compute: Callable
) -> list[jax.Array]:
    """A filter's gradient from products of a part's cotangents with other devices' inputs.

    compute(rows of x, rows of g, starts) is the filter gradient of some steps. Zeros take the place
    of rows whose products are counted elsewhere: no NaN reaches a tap that it would not reach
    without them.
    """
    terms = []
    dim = g.ndim + axis
    if x.before:
        head = min(x.padding, part.steps)
        rows = _padded(x.rows(-x.before, 0), 0, head, axis)
        of_head = _padded(lax.slice_in_dim(g, 0, head, axis=dim), x.before, 0, axis)
        terms.append(compute(rows, of_head, x.starts(-x.before, head)))
    if x.after:
        tail = min(x.beyond, part.steps)
        begin, end = part.steps - tail, part.steps + x.after
        rows = _padded(x.rows(part.steps, end), tail, 0, axis)
        of_tail = _padded(lax.slice_in_dim(g, begin, part.steps, axis=dim), 0, x.after, axis)
        terms.append(compute(rows, of_tail, x.starts(begin, end)))
    return terms
