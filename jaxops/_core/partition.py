"""Sharding, derived from a primitive's signature.

`jit` over sharded arrays reaches an operator as one custom call. XLA would gather its operands onto
every device; here it is told which factors may be sharded (a Shardy rule), what each device
computes of its shards (the same primitive on smaller sizes) and which results are partial sums.

Contiguous shards of a dimension such as (heads depth) need not respect its major factor: eight
shards of four heads hold half a head each. Such a call is computed at its finest grain, one head a
channel: an operand with one row a head is repeated to one row a channel and sliced, and a result
with one row a head is summed from its channels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxops._core.signature import Call, Term, flat

Axes = tuple[str, ...]  # mesh axes, major first


def shardy_rule(call: Call, devices: int, replicated: Sequence[str]) -> tuple[str, dict]:
    """The call as a Shardy rule: `custom_partitioning`'s string form and its keyword arguments."""
    ones = 0
    whole = set(replicated)

    def visible(dim):
        if len(dim) > 1 and call.sizes[dim[0]] % devices:
            # Were the major factor a factor of the rule, Shardy would split it by a part of a mesh
            # axis, which has no NamedSharding. The plan below aligns the operands instead.
            joined = "_".join(dim)
            if whole.intersection(dim):
                whole.add(joined)
            return (joined,)
        return tuple(f for f in dim if call.sizes[f] != 1)

    def dim_text(dim):
        nonlocal ones
        if not dim:  # Shardy refuses factors of size 1 next to others; alone, each is its own.
            ones += 1
            return f"one{ones}"
        return dim[0] if len(dim) == 1 else f"({' '.join(dim)})"

    def side(terms):
        return ", ".join(" ".join(map(dim_text, term)) for term in terms)

    operands, outputs = (
        [[visible(dim) for dim in term] for term in terms]
        for terms in (call.signature.operands, call.signature.outputs)
    )
    alone = {dim[0] for term in (*operands, *outputs) for dim in term if len(dim) == 1}
    read, written = ({f for t in terms for f in flat(t)} for terms in (operands, outputs))
    # Shardy wants special factors in order of appearance.
    order = dict.fromkeys(f for term in (*operands, *outputs) for f in flat(term))
    return f"{side(operands)} -> {side(outputs)}", {
        "need_replication_factors": tuple(f for f in order if f in whole),
        "reduction_factors": tuple(f for f in order if f in read - written - whole),
        **{f: call.sizes[f] for f in order if f not in alone},
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which mesh axes split which factor, and which compound dimension is split unevenly."""

    call: Call
    mesh: Mesh | AbstractMesh
    axes: Mapping[str, Axes]
    refined: tuple[str, ...] | None = None  # a compound dimension, computed at its finest grain
    refined_axes: Axes = ()
    across: str | None = None  # a factor over which results are whole without being summed

    def size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[a] for a in axes)

    def dim_axes(self, dim) -> Axes:
        if dim == self.refined:
            return self.refined_axes
        return tuple(a for f in dim for a in self.axes.get(f, ()))

    def sharding(self, term: Term) -> NamedSharding:
        return NamedSharding(self.mesh, P(*(self.dim_axes(dim) or None for dim in term)))

    def summed_axes(self, term: Term) -> Axes:
        """The mesh axes over which a result of these dimensions is summed."""
        reduced = self.call.reduced(term) - {self.across}
        axes = {a for f in reduced for a in self.axes.get(f, ())}
        if self.refined and self.refined not in term:
            axes |= set(self.refined_axes)
        return tuple(a for a in self.mesh.axis_names if a in axes)

    def local_sizes(self) -> dict[str, int]:
        sizes = {f: n // self.size(self.axes.get(f, ())) for f, n in self.call.sizes.items()}
        if self.refined:
            major, *minor = self.refined
            whole = math.prod(self.call.sizes[f] for f in self.refined)
            sizes |= {major: whole // self.size(self.refined_axes), **dict.fromkeys(minor, 1)}
        return sizes


def make_plan(call: Call, mesh, specs: Sequence[tuple[Term, P]], replicated: Sequence[str]) -> Plan:
    """Chooses every factor's mesh axes from the proposed shardings, the first array's first."""
    plan = Plan(call, mesh, {})
    axes: dict[str, Axes] = {}
    used: set[str] = set()
    for term, spec in specs:
        for dim, entry in zip(term, spec, strict=False):
            proposed = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            proposed = tuple(a for a in proposed if a not in used)
            taken = set(dim) & (set(axes) | set(plan.refined or ()))
            if not proposed or not dim or taken or dim[0] in replicated:
                continue
            major, minor = dim[0], tuple(f for f in dim[1:] if f not in replicated)
            heads = call.sizes[major]
            if heads % plan.size(proposed) == 0:
                axes[major] = proposed
            elif minor and (n := _prefix(proposed, heads, plan.size)) is not None:
                axes[major], axes[minor[-1]] = proposed[:n], proposed[n:]
            elif minor:
                plan = dataclasses.replace(plan, refined=dim, refined_axes=proposed)
            else:
                continue
            used |= set(proposed)
    return dataclasses.replace(plan, axes=axes)


def _prefix(axes: Axes, count: int, size: Callable[[Axes], int]) -> int | None:
    """How many leading axes split `count` into single entries; None where none do so exactly."""
    return next((n for n in range(len(axes) + 1) if size(axes[:n]) == count), None)


def run_locally(plan: Plan, compute: Callable[..., tuple]) -> Callable:
    """The function of one device, with refinement and sums around `compute(*shards, sizes)`.

    That returns results and a function of these for after they have been summed, or None.
    """
    signature, sizes = plan.call.signature, plan.call.sizes
    local = plan.local_sizes()
    major = plan.refined[0] if plan.refined else ""
    depth = math.prod(sizes[f] for f in plan.refined[1:]) if plan.refined else 1

    def per_head_axis(term):
        return term.index((major,)) if (major,) in term else None

    def refine(shard, term):
        axis = per_head_axis(term)
        if axis is None:
            return shard
        start = jax.lax.axis_index(plan.refined_axes) * local[major]
        repeated = jnp.repeat(shard, depth, axis=axis)
        return jax.lax.dynamic_slice_in_dim(repeated, start, local[major], axis)

    def coarsen(shard, term):
        axis = per_head_axis(term)
        if axis is None:
            return shard
        start = jax.lax.axis_index(plan.refined_axes) * local[major]
        whole = jnp.zeros(
            (*shard.shape[:axis], sizes[major] * depth, *shard.shape[axis + 1 :]), shard.dtype
        )
        whole = jax.lax.dynamic_update_slice_in_dim(whole, shard, start, axis)
        split = (*shard.shape[:axis], sizes[major], depth, *shard.shape[axis + 1 :])
        return whole.reshape(split).sum(axis + 1)

    def sum_over_devices(shard, term):
        axes = plan.summed_axes(term)
        return jax.lax.psum(shard, axes) if axes else shard

    def lower(*shards):
        refined = [refine(s, t) for s, t in zip(shards, signature.operands, strict=True)]
        results, finish = compute(*refined, sizes=local)
        coarse = [coarsen(r, t) for r, t in zip(results, signature.outputs, strict=True)]
        summed = [sum_over_devices(r, t) for r, t in zip(coarse, signature.outputs, strict=True)]
        return summed if finish is None else finish(*summed)

    return lower
