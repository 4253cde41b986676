"""The declaration of an operator under test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxops._core import native

FLOATS = ("float16", "bfloat16", "float32", "float64")

Arrays = tuple[np.ndarray, ...]
MakeArguments = Callable[[np.random.Generator, np.dtype], Arrays]
Calls = Mapping[str, int] | Callable[[str], Mapping[str, int]]


def unless_xla_is_faster(
    calls: Mapping[str, int], always: Mapping[str, int] | None = None
) -> Calls:
    """The handlers' calls: on GPUs `always` alone, unless kernels run where XLA is faster."""
    always = always or {}

    def of_platform(platform):
        leaves_out = platform == "cuda" and not native.allows_new_kernels()
        return dict(always) if leaves_out else {**always, **calls}

    return of_platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One way to lay the arguments out over several devices, and what that may cost.

    Attributes:
      name: what is sharded, in a word.
      axes: the names of the mesh axes, one or two. All devices are on the mesh.
      arguments: a spec an argument.
      results: a spec a result.
      forward: the collectives of the compiled function, by HLO name: this number on CPUs, on GPUs
        at least one and at most this number.
      backward: those of the compiled value and gradient together, on GPUs at most twice as many.
      manual: whether the function of the shards makes the shards of the result, as `shard_map`
        needs.
    """

    name: str
    axes: tuple[str, ...]
    arguments: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    forward: Mapping[str, int] = dataclasses.field(default_factory=dict)
    backward: Mapping[str, int] = dataclasses.field(default_factory=dict)
    manual: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadInput:
    """A call that must raise: `call(*arguments)` with the arguments that the function accepts."""

    name: str
    call: Callable[..., Any]
    error: type[Exception]
    fragments: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class OperatorSpec:
    """One operator with its options bound: all that the capabilities need to know.

    Functions take the arguments by position and return an array or a tuple of arrays. Arguments of
    integer and boolean dtypes keep their dtype where a capability changes that of the others.

    Attributes:
      operator: the public name.
      variant: what is special about this one.
      function: the public function.
      reference: the same in jax.numpy, exact enough in float64 to judge the function by.
      arguments: a small case, called as arguments(rng, dtype).
      large: a case for several threads, blocks and devices; mesh axes of 2, 4 and 8 divide what
        `placements` shards.
      differentiable: positions of the arguments that have gradients.
      calls: native handlers that one call runs, and how often; where that depends on the devices,
        a function of the platform's name that returns it.
      vjp_calls: the same of the value together with every differentiable argument's gradient.
      value_terms: the number of terms in the longest sum of a value, called with the arguments.
      vjp_terms: the same of a gradient.
      vjp_roundings: how often a gradient rounds an intermediate to the arguments' dtype.
      dtypes: what the floating arguments may be.
      placements: layouts over several devices.
      empty: named cases with a dimension of size 0.
      bad_inputs: calls that must raise.
      padded_reach: for an argument that may be multiplied by the zeros beyond the edge of another,
        what a NaN in one entry then reaches: called as reach(index, *arguments), it returns masks
        of the results and of the gradients.
      untouched: for an argument, the results, gradients counted after them, that a NaN in it does
        not reach although they depend on the argument, because the operator says so.
      arrival_order: whether sums of gradients may be made in the order of arrival, so that they
        differ from run to run; only where the operator documents it.
      vjp_bitwise: whether gradients are the same bit for bit in different programs; not those that
        XLA computes, as it fuses them with what is around.
      checkpoint_name: the name that `jax.checkpoint` policies may save the result by.
    """

    operator: str
    variant: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: MakeArguments
    large: MakeArguments
    differentiable: tuple[int, ...]
    calls: Calls
    vjp_calls: Calls
    value_terms: Callable[..., int]
    vjp_terms: Callable[..., int]
    vjp_roundings: int = 0
    dtypes: tuple[str, ...] = FLOATS
    placements: tuple[Placement, ...] = ()
    empty: Mapping[str, MakeArguments] = dataclasses.field(default_factory=dict)
    bad_inputs: tuple[BadInput, ...] = ()
    padded_reach: Mapping[int, Callable[..., Sequence]] = dataclasses.field(default_factory=dict)
    untouched: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    arrival_order: bool = False
    vjp_bitwise: bool = True
    checkpoint_name: str | None = None

    def __repr__(self) -> str:
        return f"{self.operator}[{self.variant}]"

    def calls_on(self, platform: str) -> Mapping[str, int]:
        """The `calls` of a platform."""
        return self.calls(platform) if callable(self.calls) else self.calls

    def vjp_calls_on(self, platform: str) -> Mapping[str, int]:
        """The `vjp_calls` of a platform."""
        return self.vjp_calls(platform) if callable(self.vjp_calls) else self.vjp_calls

    def case(self, dtype: str = "float64", make: MakeArguments | None = None) -> Arrays:
        """Arguments, the same in every run; `make` is one of the spec's, `arguments` by default."""
        rng = np.random.default_rng(_SEED)
        return tuple(np.asarray(a) for a in (make or self.arguments)(rng, jnp.dtype(dtype)))


_SEED = 20190129


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Independent standard normal numbers, rounded to dtype."""
    return rng.standard_normal(shape).astype(dtype)
