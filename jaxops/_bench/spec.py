"""The declaration of an operator's benchmark: what a file of `benchmarks/` is made of."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Function = Callable[..., Any]

GROUPS = ("small", "typical", "large", "odd", "scaling")
#: The group of a case that a user names.
OWN = "own"
#: The group of a case of `Benchmark.grid`.
GRID = "grid"
TARGET_TAG = "PERFORMANCE"
_SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: shapes, dtype and options.

    Attributes:
      group: one of `GROUPS`, `OWN` or `GRID`. Sizes of "scaling" grow over several decades and are
        reported apart.
      shape: the sizes of the problem, in the order that the operator's file says.
      dtype: the dtype of the arrays that have gradients, or of all where none has.
      options: what else the operator is told.
      target: whether the targets of the project were set on this case.
    """

    group: str
    shape: tuple[int, ...]
    dtype: str
    options: Mapping[str, Any]
    target: bool = False

    @property
    def name(self) -> str:
        """Identifies the case among those of its operator."""
        options = [str(v) if isinstance(v, str) else f"{k} {v}" for k, v in self.options.items()]
        shape = ",".join(map(str, self.shape))
        return " ".join([f"({shape})", _SHORT_DTYPES.get(self.dtype, self.dtype), *options])

    def matches(self, pattern: str) -> bool:
        """Whether a shell pattern occurs in the group, the name or, with targets, `TARGET_TAG`."""
        text = f"{self.group} {self.name} {TARGET_TAG if self.target else ''}"
        return fnmatch.fnmatchcase(text, f"*{pattern}*")


def cases(
    group: str,
    shape: tuple[int, ...],
    dtypes: str | Sequence[str],
    *,
    target: bool = False,
    **options: Any,
) -> list[Case]:
    """A case for every combination of the dtypes and of those options that are given as lists."""
    if group not in (*GROUPS, GRID):
        raise ValueError(f"a case's group must be one of {(*GROUPS, GRID)}, got {group!r}")
    dtypes = [dtypes] if isinstance(dtypes, str) else dtypes
    choices = [v if isinstance(v, list) else [v] for v in options.values()]
    return [
        Case(group, shape, dtype, dict(zip(options, chosen, strict=True)), target)
        for dtype in dtypes
        for chosen in itertools.product(*choices)
    ]


@dataclasses.dataclass(frozen=True)
class Direction:
    """The part of an operator that is computed: its value, some arguments' gradients, or both."""

    name: str
    value: bool
    wrt: tuple[int, ...]

    def of(self, function: Function) -> Function:
        """This direction of `function`: of (*arguments), or (cotangent, *arguments) with `wrt`."""
        if not self.wrt:
            return function

        def with_gradient(cotangent, *arguments):
            def moving(*changed):
                replaced = list(arguments)
                for i, argument in zip(self.wrt, changed, strict=True):
                    replaced[i] = argument
                return function(*replaced)

            value, pull = jax.vjp(moving, *(arguments[i] for i in self.wrt))
            gradients = pull(cotangent)
            return (value, *gradients) if self.value else gradients

        return with_gradient


def directions(*wrt: int) -> tuple[Direction, ...]:
    """Forward, backward by the arguments at these positions, and both in one."""
    return (
        Direction("forward", True, ()),
        Direction("backward", False, wrt),
        Direction("value_and_grad", True, wrt),
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least that one call must do.

    Attributes:
      bytes: every input read once and every result written once.
      flops: floating-point operations; a multiply-add is two.
      unit: the ceiling that bounds the FLOPs, such as "fma float32" or "matmul bfloat16".
      special: exponentials, logarithms and the like.
    """

    bytes: float
    flops: float = 0
    unit: str = "fma float32"
    special: float = 0


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another formulation of the operator, in JAX or in PyTorch.

    Attributes:
      name: what the tables call it.
      function: called with a case, returns a function of the case's arguments: JAX arrays, or
        PyTorch tensors.
      torch: whether it is PyTorch's.
      declines: why this peer does not run on a case (called with the case, the direction and the
        platform), or None where it does.
      costly: whether it takes so long to compile, or to run, that `--quick` leaves it out unless it
        is asked for by name.
      family: the operator of a table of kernel families, and the family of it that runs all calls,
        where the function is jaxops' own.
    """

    name: str
    function: Callable[[Case], Function]
    torch: bool = False
    declines: Callable[[Case, Direction, str], str | None] = lambda case, direction, platform: None
    costly: bool = False
    family: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One operator: its cases, what each must do, and what it is timed against.

    Attributes:
      operator: the public name, which is also the name of the file.
      shape: the names of the sizes in a case's shape, such as "B,C,T".
      cases: what is timed; no two of the same name.
      directions: what of the operator is timed, all of one class; cases of the group "scaling"
        only the first.
      arguments: called with a case and a random key, returns the operator's arguments, which may be
        lists of arrays; traceable.
      function: called with a case, returns the operator with the case's options bound.
      reference: the same, exact enough when called in float64 to judge all contenders by.
      peers: what it is timed against.
      cost: the least that a case must do in a direction.
      terms: the number of terms in the longest sum of a case in a direction.
      rounding: the dtype that a case's results are rounded like, where products are narrower than
        its own dtype.
      near_limit: whether the target of being near the machine's limit holds for this operator.
      grid: cases that cover the sizes evenly, to find slow ones; `--grid` times them.
    """

    operator: str
    shape: str
    cases: Sequence[Case]
    directions: tuple[Direction, ...]
    arguments: Callable[[Case, jax.Array], tuple[jax.Array, ...]]
    function: Callable[[Case], Function]
    reference: Callable[[Case], Function]
    peers: tuple[Peer, ...]
    cost: Callable[[Case, Direction], Cost]
    terms: Callable[[Case, Direction], int]
    rounding: Callable[[Case], str] = lambda case: case.dtype
    near_limit: bool = True
    grid: Sequence[Case] = ()

    def __post_init__(self) -> None:
        names = [case.name for case in (*self.cases, *self.grid)]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"{self.operator}: cases declared twice: {', '.join(twice)}")

    def directions_of(self, case: Case) -> tuple[Direction, ...]:
        """The directions that are timed for a case; only the first where there is no gradient."""
        differentiable = jnp.issubdtype(case.dtype, jnp.floating)
        whole = differentiable and case.group != "scaling"
        return self.directions if whole else self.directions[:1]


def normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Independent standard normal numbers, rounded to `dtype`."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)
