"""Capabilities that every operator must have: one function each.

A capability takes an `OperatorSpec` and a `Platform`. It returns when the operator has it, raises
AssertionError with what is wrong when not, and NotApplicable with a reason when the question makes
no sense for this operator or cannot be put on this machine.

Calls are counted in compiled programs, where what runs is what is written; loops are excluded in
the StableHLO before, where XLA has not yet made any of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_jvp, check_vjp

import jaxops
from jaxops.testing.measure import (
    assert_bitwise,
    assert_value,
    assert_vjp,
    collectives,
    compile_without_loops,
    cotangents_for,
    custom_calls,
    hasty_options,
    host,
    is_floating,
    jvp_of,
    leaves,
    lowered_calls,
    on_reference,
    replace,
    run,
    vjp_of,
    widen,
)
from jaxops.testing.platforms import Platform
from jaxops.testing.spec import Arrays, OperatorSpec, Placement, normal


class NotApplicable(Exception):  # noqa: N818 - it reports no error
    """The capability cannot be asked of this operator, or not on this machine."""


@dataclasses.dataclass(frozen=True)
class Capability:
    """A question every operator answers. `summary` says what a yes means."""

    name: str
    summary: str
    function: Callable[[OperatorSpec, Platform], None]

    def check(self, spec: OperatorSpec, platform: Platform) -> None:
        """Raises AssertionError or NotApplicable unless `spec` is capable on `platform`.

        Warnings are errors.
        """
        with warnings.catch_warnings(), jax.default_device(platform.device):
            warnings.simplefilter("error")
            self.function(spec, platform)


CAPABILITIES: dict[str, Capability] = {}


def _capability(name: str, *arguments: Any):
    def register(function):
        summary = function.__doc__.splitlines()[0].format(*arguments)
        bound = (lambda *a: function(*a, *arguments)) if arguments else function
        CAPABILITIES[name] = Capability(name, summary, bound)
        return function

    return register


def _needs_gradient(spec: OperatorSpec) -> None:
    if not spec.differentiable:
        raise NotApplicable("no argument has a gradient")


def _widest(spec: OperatorSpec) -> str:
    """The dtype in which wrong results show best."""
    return spec.dtypes[-1]


def _single(spec: OperatorSpec) -> str:
    """The dtype that users mostly have."""
    return "float32" if "float32" in spec.dtypes else spec.dtypes[-1]


# --- values and derivatives ----------------------------------------------------------------------


@_capability("value f64", "float64")
@_capability("value f32", "float32")
@_capability("value bf16", "bfloat16")
@_capability("value f16", "float16")
def value(spec: OperatorSpec, platform: Platform, dtype: str) -> None:
    """In {0} the value is the float64 reference's, to the rounding of {0}."""
    if dtype not in spec.dtypes:
        raise NotApplicable(f"{spec.operator} does not take {dtype}")
    for make in (spec.arguments, spec.large):
        arguments = spec.case(dtype, make)
        got = run(spec.function, platform, *arguments)
        want = on_reference(spec.reference, *arguments)
        found, expected = ([a.dtype for a in b] for b in (got, cotangents_for(spec, arguments)))
        assert found == expected, f"the results' dtypes are {found}, expected {expected}"
        assert_value(spec, got, want, arguments, f"value in {dtype}", dtype)


@_capability("jit")
def jit(spec: OperatorSpec, platform: Platform) -> None:
    """Compiled, eager and under `jax.disable_jit` the value is the same."""
    dtype = _single(spec)
    arguments = spec.case(dtype)
    compiled = run(spec.function, platform, *arguments)
    placed = jax.device_put(arguments, platform.device)
    eager = host(spec.function(*placed))
    with jax.disable_jit():
        undone = host(spec.function(*placed))
    assert_value(spec, eager, widen(compiled), arguments, "eager against compiled", dtype)
    assert_value(spec, undone, widen(compiled), arguments, "disable_jit against compiled", dtype)
    program = compile_without_loops(spec.function, *placed)
    expected = spec.calls_on(platform.name)
    assert custom_calls(program) == expected, (
        f"one call runs the handlers {custom_calls(program)}, expected {dict(expected)}"
    )


@_capability("grad")
def grad(spec: OperatorSpec, platform: Platform) -> None:
    """In every dtype the gradient is the reference's, by all arguments and by any of them."""
    _needs_gradient(spec)
    for dtype in spec.dtypes:
        arguments = spec.case(dtype)
        cotangents = cotangents_for(spec, arguments)
        function = vjp_of(spec.function, spec.differentiable)
        got = run(function, platform, cotangents, *arguments)
        want = on_reference(vjp_of(spec.reference, spec.differentiable), cotangents, *arguments)
        assert_vjp(spec, got, want, arguments, f"value and gradient in {dtype}", dtype)
        count = len(want) - len(spec.differentiable)
        for i, g in zip(spec.differentiable, got[count:], strict=True):
            assert g.dtype == arguments[i].dtype, (
                f"the gradient by argument {i}, {arguments[i].dtype}, has dtype {g.dtype}"
            )

    dtype = _widest(spec)
    arguments = spec.case(dtype)
    cotangents = cotangents_for(spec, arguments)
    wholly = on_reference(vjp_of(spec.reference, spec.differentiable), cotangents, *arguments)
    by_argument = dict(zip(spec.differentiable, wholly[-len(spec.differentiable) :], strict=True))
    subsets = list(_subsets(spec.differentiable))

    def every_subset(cotangents, *arguments):
        return [vjp_of(spec.function, s)(cotangents, *arguments)[1] for s in subsets]

    got = run(every_subset, platform, cotangents, *arguments)
    want = [by_argument[i] for subset in subsets for i in subset]
    assert_vjp(spec, got, want, arguments, f"gradients by {subsets}", dtype)


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(items) + 1):
        yield from itertools.combinations(items, size)


@_capability("gradient calls")
def gradient_calls(spec: OperatorSpec, platform: Platform) -> None:
    """Value and gradient run only the declared handlers."""
    _needs_gradient(spec)
    arguments = spec.case(_single(spec))
    cotangents = cotangents_for(spec, arguments)
    placed = jax.device_put((cotangents, *arguments), platform.device)
    found = custom_calls(compile_without_loops(vjp_of(spec.function, spec.differentiable), *placed))
    expected = spec.vjp_calls_on(platform.name)
    assert found == expected, (
        f"value and gradient run the handlers {found}, expected {dict(expected)}"
    )


@_capability("jvp")
def jvp(spec: OperatorSpec, platform: Platform) -> None:
    """Forward derivatives are the reference's, along all arguments and along any of them."""
    _needs_gradient(spec)
    dtype = _widest(spec)
    arguments = spec.case(dtype)
    tangents = _tangents(spec, arguments)
    subsets = list(_subsets(spec.differentiable))

    def every_subset(function):
        def jvps(tangents, *arguments):
            return [jvp_of(function, s)([tangents[i] for i in s], *arguments) for s in subsets]

        return jvps

    options = hasty_options(platform)
    got = run(every_subset(spec.function), platform, tangents, *arguments, options=options)
    want = on_reference(every_subset(spec.reference), tangents, *arguments)
    assert_vjp(spec, got, want, arguments, f"values and tangents along {subsets}", dtype)


def _tangents(spec: OperatorSpec, arguments: Arrays) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(2)
    return {i: normal(rng, arguments[i].shape, arguments[i].dtype) for i in spec.differentiable}


@_capability("second order")
def second_order(spec: OperatorSpec, platform: Platform) -> None:
    """Both kinds of derivative of both kinds of derivative are the reference's."""
    _needs_gradient(spec)
    dtype = _widest(spec)
    arguments = spec.case(dtype)
    cotangents = cotangents_for(spec, arguments)
    moving = spec.differentiable
    tangents = [_tangents(spec, arguments)[i] for i in moving]
    rng = np.random.default_rng(3)
    outer = [normal(rng, t.shape, t.dtype) for t in tangents]

    def every_order(function):
        def reverse(cotangents, *changed, arguments):
            whole = replace(arguments, moving, changed)
            return vjp_of(function, moving)(cotangents, *whole)[1]

        def forward(changed, tangents, arguments):
            whole = replace(arguments, moving, changed)
            return jvp_of(function, moving)(tangents, *whole)[1]

        def orders(cotangents, tangents, outer, *arguments):
            first = tuple(arguments[i] for i in moving)
            of_reverse = functools.partial(reverse, arguments=arguments)
            of_forward = functools.partial(forward, arguments=arguments)
            moved = (cotangents, *first)
            forward_over_reverse = jax.jvp(of_reverse, moved, (cotangents, *outer))[1]
            reverse_over_reverse = jax.vjp(of_reverse, *moved)[1](tuple(tangents))
            forward_over_forward = jax.jvp(
                of_forward, (first, tuple(tangents)), (tuple(outer), tuple(outer))
            )[1]
            reverse_over_forward = jax.vjp(of_forward, first, tuple(tangents))[1](tuple(cotangents))
            return (
                forward_over_reverse,
                reverse_over_reverse,
                forward_over_forward,
                reverse_over_forward,
            )

        return orders

    inputs = (cotangents, tangents, outer, *arguments)
    # Optimized on both sides: in float64 the reference has errors of its own, which are larger
    # without, where an activation is all but flat.
    got = run(every_order(spec.function), platform, *inputs)
    want = on_reference(every_order(spec.reference), *inputs, optimized=True)
    assert_vjp(spec, got, want, arguments, "second derivatives", dtype, order=2)


@_capability("check_grads")
def numeric(spec: OperatorSpec, platform: Platform) -> None:
    """`check_grads` agrees with finite differences to order 2, in both modes."""
    _needs_gradient(spec)
    if "float64" not in spec.dtypes:
        raise NotApplicable("finite differences need float64")
    arguments = jax.device_put(spec.case("float64"), platform.device)

    def moving(*changed):
        return tuple(leaves(spec.function(*replace(arguments, spec.differentiable, changed))))

    points = [arguments[i] for i in spec.differentiable]
    _check_grads(jax.jit(moving), points, 2, hasty_options(platform), "the function")


def _check_grads(
    function: Callable, points: Sequence, order: int, options: dict, what: str
) -> None:
    """`jax.test_util.check_grads` in both modes, with every derivative compiled as one program.

    That one has each of their parts compiled alone, and takes no options of the compiler.
    """
    compiled = functools.partial(jax.jit, compiler_options=options)
    value = compiled(function)

    def forward(points, tangents):
        return jax.jvp(function, points, tangents)

    def reverse(points, cotangents):
        results, pull = jax.vjp(function, *points)
        return results, pull(cotangents)

    def results_and_pullback(*points):
        both = functools.partial(compiled(reverse), points)
        return both(value(*points))[0], lambda cotangents: both(cotangents)[1]

    points = tuple(points)
    check_jvp(value, compiled(forward), points, err_msg=f"JVP of {what}")
    check_vjp(value, results_and_pullback, points, err_msg=f"VJP of {what}")
    if order > 1:
        _check_grads(forward, (points, points), order - 1, options, f"the JVP of {what}")

        def reverse_along_itself(*points):
            return reverse(points, function(*points))[1]

        _check_grads(reverse_along_itself, points, order - 1, options, f"the VJP of {what}")


# --- batching ------------------------------------------------------------------------------------

_BATCHED = 3

# An operator of four or five arguments has hundreds of `in_axes`, and each takes XLA 0.1 s.
_MOST_CASES = 24

# The in_axes of nested vmaps, the outermost first; each has an axis or None for every argument.
Levels = Sequence[tuple[int | None, ...]]


@_capability("vmap")
def vmap(spec: OperatorSpec, platform: Platform) -> None:
    """Over any `in_axes`, function and gradient are what a loop makes, in one call each."""
    choices = [_batch_axes(a.ndim) for a in spec.case(_widest(spec))]
    every = [axes for axes in itertools.product(*choices) if any(a is not None for a in axes)]
    _check_vmap(spec, platform, _sample(spec, [(axes,) for axes in every]))


@_capability("nested vmap")
def nested_vmap(spec: OperatorSpec, platform: Platform) -> None:
    """Over two levels of `vmap` of any two sets of arguments, still in one call each."""
    count = len(spec.case(_widest(spec)))

    def axes_of(batched, axis):
        return tuple(axis if i in batched else None for i in range(count))

    sets = list(_subsets(range(count)))
    cases = [(axes_of(outer, 0), axes_of(inner, -1)) for outer in sets for inner in sets]
    _check_vmap(spec, platform, _sample(spec, cases))


def _sample(spec: OperatorSpec, cases: Sequence[Levels]) -> Sequence[Levels]:
    """All cases, or `_MOST_CASES` of them, always the same for a spec and others for another.

    Every two arguments have every two of their axes in one of them, at every two levels.
    """
    if len(cases) <= _MOST_CASES:
        return cases
    order = np.random.default_rng(zlib.crc32(str(spec).encode())).permutation(len(cases))

    def pairs(n):
        factors = enumerate(itertools.chain.from_iterable(cases[n]))
        return set(itertools.combinations(factors, 2))

    missing = set[Any]().union(*map(pairs, order))
    chosen: list[int] = []
    while missing:
        chosen.append(max(order, key=lambda n: len(pairs(n) & missing)))
        missing -= pairs(chosen[-1])
    others = [n for n in order if n not in chosen]
    return [cases[n] for n in (*chosen, *others)[:_MOST_CASES]]


def _batch_axes(rank: int) -> list[int | None]:
    """None, first, middle and last of the batched array, which has one more dimension."""
    return [None, *sorted({0, (rank + 1) // 2, rank})]


def _check_vmap(spec: OperatorSpec, platform: Platform, cases: Sequence[Levels]) -> None:
    arguments = spec.case(_widest(spec))
    # Cotangents are batched in every other case, so that rules meet both kinds.
    cases = [[((0, None)[n % 2], *axes) for axes in levels] for n, levels in enumerate(cases)]
    batches = [Batched(spec, arguments, levels) for levels in cases]

    def value(cotangents, *arguments):
        return spec.function(*arguments)

    def reference(cotangents, *arguments):
        return spec.reference(*arguments)

    calls = spec.calls_on(platform.name)
    _check_batches(spec, platform, batches, value, reference, calls, assert_value)
    if spec.differentiable:
        function = vjp_of(spec.function, spec.differentiable)
        reference = vjp_of(spec.reference, spec.differentiable)
        calls = spec.vjp_calls_on(platform.name)
        _check_batches(spec, platform, batches, function, reference, calls, assert_vjp)


class Batched:
    """Cotangents and arguments, different in every entry of every batch dimension.

    Attributes:
      levels: the in_axes of nested vmaps; the first axis of each is that of the cotangents.
      inputs: cotangents and arguments, batched where and as `levels` says.
    """

    def __init__(self, spec: OperatorSpec, arguments: Arrays, levels: Levels):
        self.levels = levels
        self._shape = (_BATCHED,) * len(levels)
        rng = np.random.default_rng(4)

        def stack(array):
            if not is_floating(array):
                return np.broadcast_to(array, self._shape + array.shape)
            return normal(rng, self._shape + array.shape, array.dtype)

        self._stacks = jax.tree.map(stack, (cotangents_for(spec, arguments), *arguments))
        self.inputs = self._by_argument(self._batch)

    def nest(self, function: Callable) -> Callable:
        """`function` of one entry, vmapped level by level."""
        for axes in reversed(self.levels):
            function = jax.vmap(function, axes)
        return function

    def loop(self, function: Callable) -> list[np.ndarray]:
        """The result that `nest` should give for `inputs`: `function` of every entry, stacked."""
        entries = [
            function(*self._by_argument(functools.partial(self._entry, index)))
            for index in np.ndindex(self._shape)
        ]
        stacked = [np.stack(results) for results in zip(*entries, strict=True)]
        return [s.reshape(self._shape + s.shape[1:]) for s in stacked]

    def _by_argument(self, function):
        axes = zip(*self.levels, strict=True)
        return [
            jax.tree.map(functools.partial(function, a), stack)
            for a, stack in zip(axes, self._stacks, strict=True)
        ]

    def _entry(self, index, axes, stack):
        return stack[tuple(0 if a is None else i for a, i in zip(axes, index, strict=True))]

    def _batch(self, axes, stack):
        stack = stack[tuple(0 if a is None else slice(None) for a in axes)]
        axes = [a for a in axes if a is not None]
        # The innermost vmap sees its dimension among those of the unbatched array, and every
        # other one its own among those of what the next level sees.
        for level in reversed(range(len(axes))):
            stack = np.moveaxis(stack, level, level + axes[level] % (stack.ndim - level))
        return stack


def _check_batches(spec, platform, batches, function, reference, calls, assert_right) -> None:
    inputs = jax.device_put([b.inputs for b in batches], platform.device)
    nested = [b.nest(function) for b in batches]

    # One program for all: compiling each alone would take most of the time.
    def all_at_once(inputs):
        return [f(*i) for f, i in zip(nested, inputs, strict=True)]

    options = hasty_options(platform)
    program = compile_without_loops(all_at_once, inputs, options=options)
    if custom_calls(program) != {name: n * len(batches) for name, n in calls.items()}:
        programs = itertools.starmap(
            lambda f, i: compile_without_loops(f, *i), zip(nested, inputs, strict=True)
        )
        found = {str(b.levels): custom_calls(p) for b, p in zip(batches, programs, strict=True)}
        wrong = {axes: f for axes, f in found.items() if f != calls}
        # XLA merges calls that are equal.
        if wrong:
            raise AssertionError(
                f"one vmap should run the handlers {dict(calls)}; over these in_axes, of "
                f"cotangents and arguments, it runs {wrong}"
            )
    for batch, results in zip(batches, program(inputs), strict=True):
        want = batch.loop(lambda *entry: on_reference(reference, *entry))
        what = f"vmap over in_axes {batch.levels}, cotangents first"
        assert_right(spec, host(results), want, spec.case(_widest(spec)), what, _widest(spec))


# --- several devices -----------------------------------------------------------------------------


def _placements(spec: OperatorSpec, platform: Platform) -> Iterator[Placement]:
    """The placements that fit the devices; at least one."""
    if not spec.placements:
        raise NotApplicable("no placement is declared")
    count = len(platform.devices)
    if count < 2:
        raise NotApplicable(f"one {platform.name} device; several are needed")
    yield from (p for p in spec.placements if len(p.axes) == 1 or (count % 2 == 0 and count > 2))


def _mesh(placement: Placement, platform: Platform, kind: AxisType) -> Mesh:
    count = len(platform.devices)
    shape = (count,) if len(placement.axes) == 1 else (2, count // 2)
    types = (kind,) * len(shape)
    return jax.make_mesh(shape, placement.axes, axis_types=types, devices=platform.devices)


@dataclasses.dataclass(frozen=True)
class _Spread:
    """A large case laid out on a mesh, and its exact results."""

    mesh: Mesh
    arguments: Arrays
    placed: list[jax.Array]
    cotangents: list[jax.Array]
    value: list[np.ndarray]
    vjp: list[np.ndarray]


def _spread(spec, placement, platform, kind: AxisType) -> _Spread:
    arguments = spec.case(_widest(spec), spec.large)
    cotangents = cotangents_for(spec, arguments)
    mesh = _mesh(placement, platform, kind)

    def put(arrays, specs):
        pairs = zip(arrays, specs, strict=True)
        return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in pairs]

    return _Spread(
        mesh,
        arguments,
        put(arguments, placement.arguments),
        put(cotangents, placement.results),
        on_reference(spec.reference, *arguments),
        on_reference(vjp_of(spec.reference, spec.differentiable), cotangents, *arguments),
    )


def _check_program(
    spec, case: _Spread, function, with_gradient, expected, what, options=None
) -> list:
    """Compiles, counts the collectives and compares; returns the results on their devices."""
    inputs = (case.cotangents, *case.placed) if with_gradient else case.placed
    program = compile_without_loops(function, *inputs, options=options)
    found = collectives(program)
    counts = f"{what}: the compiled program has the collectives {found}, expected {expected}"
    if case.mesh.devices.flat[0].platform == "cpu":
        assert found == expected, counts
    else:
        # XLA merges others on GPUs, and of a value and its gradient fewer.
        most = {kind: n * (1 + with_gradient) for kind, n in expected.items()}
        assert found.keys() == most.keys(), counts
        assert all(found[kind] <= n for kind, n in most.items()), f"{counts}, {most} at most"
    results = leaves(program(*inputs))
    assert_right, want = (assert_vjp, case.vjp) if with_gradient else (assert_value, case.value)
    assert_right(spec, host(results), want, case.arguments, what, _widest(spec))
    return results


def _assert_sharded(results, specs: Sequence[PartitionSpec], mesh: Mesh, what: str) -> None:
    for result, expected in zip(results, specs, strict=True):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, expected), result.ndim), (
            f"{what} is sharded {result.sharding}, expected {expected}"
        )


@_capability("sharded jit")
def sharded_jit(spec: OperatorSpec, platform: Platform) -> None:
    """Sharded arguments stay where they are, with no collective beyond those declared."""
    options = hasty_options(platform)
    for placement in _placements(spec, platform):
        case = _spread(spec, placement, platform, AxisType.Auto)
        what = f"sharded by {placement.name}"
        with _arguments_decide_devices():
            results = _check_program(
                spec, case, spec.function, False, placement.forward, f"{what}, value", options
            )
            _assert_sharded(results, placement.results, case.mesh, f"{what}, the result")
            if not spec.differentiable:
                continue
            function = vjp_of(spec.function, spec.differentiable)
            where = f"{what}, value and gradient"
            results = _check_program(spec, case, function, True, placement.backward, where, options)
            _assert_sharded(
                results[: len(placement.results)], placement.results, case.mesh, f"{what}, result"
            )


@_capability("shard_map")
def shard_map(spec: OperatorSpec, platform: Platform) -> None:
    """Under `shard_map` with check_vma, gradients of replicated arguments are summed."""
    placements = [p for p in _placements(spec, platform) if p.manual]
    if not placements:
        raise NotApplicable("no placement can be computed shard by shard")
    options = hasty_options(platform)

    def results_of(*arguments):
        return tuple(leaves(spec.function(*arguments)))

    for placement in placements:
        case = _spread(spec, placement, platform, AxisType.Auto)
        what = f"shard_map over {placement.name}"
        mapped = functools.partial(jax.shard_map, mesh=case.mesh, check_vma=True)
        with _arguments_decide_devices():
            whole = mapped(results_of, in_specs=placement.arguments, out_specs=placement.results)
            _check_program(spec, case, whole, False, placement.forward, f"{what}, value", options)
            if not spec.differentiable:
                continue
            of_shards = vjp_of(spec.function, spec.differentiable)
            gradients = tuple(placement.arguments[i] for i in spec.differentiable)
            inside = mapped(
                lambda cotangents, *arguments, f=of_shards: f(cotangents, *arguments),
                in_specs=(list(placement.results), *placement.arguments),
                out_specs=(placement.results, gradients),
            )
            outside = vjp_of(whole, spec.differentiable)
            for name, function in (("inside", inside), ("outside", outside)):
                where = f"{what}, gradient taken {name}"
                _check_program(spec, case, function, True, placement.backward, where, options)


@_capability("explicit mesh")
def explicit_mesh(spec: OperatorSpec, platform: Platform) -> None:
    """On a mesh of explicit axes, types follow the arguments, collectives are those declared."""
    dtype = _widest(spec)
    options = hasty_options(platform)

    def assert_typed(arrays, specs, what):
        for array, expected in zip(arrays, specs, strict=True):
            found = jax.typeof(array).sharding.spec
            assert found == expected, f"{what} has the type {found}, expected {expected}"

    for placement in _placements(spec, platform):
        case = _spread(spec, placement, platform, AxisType.Explicit)
        what = f"explicitly sharded by {placement.name}"
        with _arguments_decide_devices(), jax.set_mesh(case.mesh):
            compiled = jax.jit(spec.function, compiler_options=options)
            for name, function in (("eager", spec.function), ("jit", compiled)):
                results = leaves(function(*case.placed))
                assert_typed(results, placement.results, f"{what}, the {name} result")
                where = f"{what}, {name}"
                assert_value(spec, host(results), case.value, case.arguments, where, dtype)
            if not spec.differentiable:
                continue
            whole = vjp_of(spec.function, spec.differentiable)
            arrays = _check_program(
                spec, case, whole, True, placement.backward, f"{what}, value and gradient", options
            )
            expected = (*placement.results, *(placement.arguments[i] for i in spec.differentiable))
            assert_typed(arrays, expected, f"{what}, the result or gradient")

            # The rules for one argument alone may be others than those for all of them.
            def one_by_one(cotangents, *arguments):
                moving = [vjp_of(spec.function, (i,)) for i in spec.differentiable]
                return [function(cotangents, *arguments)[1] for function in moving]

            inputs = case.cotangents, *case.placed
            found = collectives(compile_without_loops(one_by_one, *inputs, options=options))
            assert found.keys() <= placement.backward.keys(), (
                f"{what}, gradients by one argument: the compiled program has the collectives "
                f"{found}, expected none but {list(placement.backward)}"
            )


def _arguments_decide_devices() -> contextlib.AbstractContextManager:
    """Lifts the default device, which is not on the mesh of everything there is."""
    return jax.default_device(None)


# --- the rest of JAX -----------------------------------------------------------------------------


@_capability("export")
def export(spec: OperatorSpec, platform: Platform) -> None:
    """`jax.export` keeps value and gradient over serialization, also when made elsewhere."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise NotApplicable("jax.export serializes with flatbuffers: pip install flatbuffers")
    dtype = _single(spec)
    arguments = spec.case(dtype)
    exported = jax.export.export(
        jax.jit(spec.function),
        platforms=("cpu", "cuda", "tpu"),
        disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS,
    )(*arguments)
    data = exported.serialize(vjp_order=1 if spec.differentiable else 0)
    loaded = jax.export.deserialize(data)
    got = run(loaded.call, platform, *arguments)
    want = on_reference(spec.reference, *arguments)
    assert_value(spec, got, want, arguments, "the loaded export", dtype)
    if spec.differentiable:
        cotangents = cotangents_for(spec, arguments)
        got = run(vjp_of(loaded.call, spec.differentiable), platform, cotangents, *arguments)
        want = on_reference(vjp_of(spec.reference, spec.differentiable), cotangents, *arguments)
        assert_vjp(spec, got, want, arguments, "the gradient of the loaded export", dtype)


@_capability("implementation")
def implementation(spec: OperatorSpec, platform: Platform) -> None:
    """ "xla" is plain JAX, which exports as it is; "native" is an error without kernels."""
    dtype = _single(spec)
    arguments = spec.case(dtype)
    cotangents = cotangents_for(spec, arguments)

    @jaxops.use_implementation("xla")
    def plain(*arguments):
        return spec.function(*arguments)

    function = vjp_of(plain, spec.differentiable)
    make = jax.export.export(jax.jit(function), platforms=("cpu", "cuda", "tpu"))
    # An export with a custom call that JAX does not know is refused.
    text = make(cotangents, *arguments).mlir_module()
    assert "custom_call" not in text, "plain JAX has a custom call"
    options = hasty_options(platform)
    got = run(function, platform, cotangents, *arguments, options=options)
    want = on_reference(vjp_of(spec.reference, spec.differentiable), cotangents, *arguments)
    assert_vjp(spec, got, want, arguments, "value and gradient in plain JAX", dtype)

    @jaxops.use_implementation("native")
    def native(*arguments):
        return spec.function(*arguments)

    traced = jax.jit(native).trace(*jax.device_put(arguments, platform.device))

    def is_refused(where: str) -> bool:
        """Whether there are no kernels for a platform; those that there are must be called."""
        lowered, message = None, ""
        try:
            lowered = traced.lower(lowering_platforms=(where,))
        except NotImplementedError as error:
            message = str(error)
        if lowered is not None:
            assert lowered_calls(lowered), f"native runs no handler on {where}"
            return False
        needs = f"{spec.operator}: implementation='native' needs kernels for platform '{where}'"
        assert message.startswith(needs), f"native says {message}"
        return True

    assert is_refused("tpu"), "native lowers for a platform without kernels"
    assert not (is_refused(platform.name) and spec.calls_on(platform.name)), "kernels are refused"


@_capability("checkpoint")
def checkpoint(spec: OperatorSpec, platform: Platform) -> None:
    """`jax.checkpoint` can save the result by name, so that backward does not run forward again."""
    _needs_gradient(spec)
    if spec.checkpoint_name is None:
        raise NotApplicable("the result has no checkpoint name")
    if not (spec.calls_on(platform.name) and spec.vjp_calls_on(platform.name)):
        raise NotApplicable("no handler is called, whose calls could be counted")
    arguments = jax.device_put(spec.case(_single(spec)), platform.device)
    points = [arguments[i] for i in spec.differentiable]

    def gradient(policy):
        def loss(*changed):
            whole = replace(arguments, spec.differentiable, changed)
            # The sine needs the result for its own derivative.
            return sum(jnp.sin(r).sum() for r in leaves(spec.function(*whole)))

        remat = jax.checkpoint(loss, policy=policy)
        return jax.value_and_grad(remat, argnums=tuple(range(len(spec.differentiable))))

    policies = jax.checkpoint_policies
    lowered = [
        jax.jit(gradient(policy)).lower(*points)
        for policy in (
            policies.everything_saveable,
            policies.save_only_these_names(spec.checkpoint_name),
            policies.nothing_saveable,
        )
    ]
    # Counted before XLA, which may find on its own that a call is made twice.
    everything, by_name, nothing = map(lowered_calls, lowered)
    assert len(nothing) > len(everything), (
        f"nothing is computed again where nothing is saved: {nothing}"
    )
    assert by_name == everything, (
        f"the gradient with {spec.checkpoint_name!r} saved calls {by_name}, "
        f"with everything saved {everything}"
    )
    with_all, with_name, with_none = (host(low.compile()(*points)) for low in lowered)
    for what, got in (("the name", with_name), ("nothing", with_none)):
        where = f"the gradient with {what} saved"
        if spec.vjp_bitwise:
            _assert_same(spec, got, with_all, where)
        else:
            assert_vjp(spec, got, widen(with_all), spec.case(_single(spec)), where, _single(spec))


def _assert_same(spec: OperatorSpec, got, want, what: str) -> None:
    """Bit for bit, or to their roundings where sums may be made in the order of arrival."""
    if spec.arrival_order:
        dtype = _single(spec)
        assert_vjp(spec, got, widen(want), spec.case(dtype), what, dtype, order=2)
    else:
        assert_bitwise(got, want, what)


@_capability("donation")
def donation(spec: OperatorSpec, platform: Platform) -> None:
    """Gradients may take the donated memory of what they are taken by."""
    _needs_gradient(spec)
    arguments = spec.case(_single(spec))
    cotangents = cotangents_for(spec, arguments)
    function = vjp_of(spec.function, spec.differentiable)

    def gradients(cotangents, *arguments):
        return function(cotangents, *arguments)[1]

    want = run(gradients, platform, cotangents, *arguments)
    placed = jax.device_put((cotangents, *arguments), platform.device, may_alias=False)
    donated = tuple(i + 1 for i in spec.differentiable)
    results = jax.jit(gradients, donate_argnums=donated, keep_unused=True)(*placed)
    _assert_same(spec, host(results), want, "the gradient in donated memory")
    kept = [i - 1 for i in donated if not placed[i].is_deleted()]
    assert not kept, f"the memory of arguments {kept} was not taken"


@_capability("size zero")
def size_zero(spec: OperatorSpec, platform: Platform) -> None:
    """With a dimension of size 0, value and gradient are the reference's."""
    if not spec.empty:
        raise NotApplicable("no dimension may be zero")
    dtype = _single(spec)
    for name, make in spec.empty.items():
        arguments = spec.case(dtype, make)
        assert any(a.size == 0 for a in arguments), f"{name}: the declared case is not empty"
        cotangents = cotangents_for(spec, arguments)
        moving = spec.differentiable
        got = run(vjp_of(spec.function, moving), platform, cotangents, *arguments)
        want = on_reference(vjp_of(spec.reference, moving), cotangents, *arguments)
        assert_vjp(spec, got, want, arguments, f"{name}, value and gradient", dtype)
        batched = [np.stack([a, a]) for a in arguments]
        got = run(jax.vmap(spec.function), platform, *batched)
        want = [np.stack([w, w]) for w in on_reference(spec.reference, *arguments)]
        assert_value(spec, got, want, arguments, f"{name}, vmap", dtype)


@_capability("determinism")
def determinism(spec: OperatorSpec, platform: Platform) -> None:
    """Value and gradient are the same bit for bit, run after run."""
    if spec.arrival_order and platform.name == "cuda":
        raise NotApplicable("sums are documented to be in the order of arrival unless asked for")
    arguments = spec.case(_single(spec), spec.large)
    cotangents = cotangents_for(spec, arguments)
    function = jax.jit(vjp_of(spec.function, spec.differentiable))
    placed = jax.device_put((cotangents, *arguments), platform.device)
    first, *others = (host(function(*placed)) for _ in range(8))
    for n, other in enumerate(others, 2):
        assert_bitwise(other, first, f"run {n} against run 1")


@_capability("NaN and Inf")
def confinement(spec: OperatorSpec, platform: Platform) -> None:
    """A NaN or Inf in one entry spreads to what depends on that entry and to nothing else."""
    _needs_gradient(spec)
    dtype = _single(spec)
    arguments = spec.case(dtype)
    cotangents = cotangents_for(spec, arguments)
    function = vjp_of(spec.function, spec.differentiable)
    reference = vjp_of(spec.reference, spec.differentiable)
    clean = run(function, platform, cotangents, *arguments)
    exact = on_reference(reference, cotangents, *arguments)
    # The definition may sum in an order that depends on all entries, as a sort does.
    roundings = 0 if spec.vjp_calls_on(platform.name) else 8
    rng = np.random.default_rng(5)
    spared = 0
    for i in spec.differentiable:
        for at in (0, int(rng.integers(arguments[i].size))):
            tangent = np.zeros_like(arguments[i])
            tangent.flat[at] = 1
            slopes = on_reference(_derivative_of(reference, i), tangent, cotangents, *arguments)
            for poison in (np.nan, np.inf):
                poisoned = [a.copy() for a in arguments]
                poisoned[i].flat[at] = poison
                got = run(function, platform, cotangents, *poisoned)
                changed = on_reference(reference, cotangents, *poisoned)
                reached = [False] * len(slopes)
                if i in spec.padded_reach:
                    index = np.unravel_index(at, arguments[i].shape)
                    reached = spec.padded_reach[i](index, *arguments)
                for n, slope in enumerate(slopes):
                    what = f"{poison} in entry {at} of argument {i}, result {n}"
                    must = slope != 0
                    # A slope may be 0 by chance, as that of a relu, where a NaN still goes through.
                    may = must | (changed[n] != exact[n]) | reached[n]
                    slack = roundings * jnp.finfo(clean[n].dtype).eps * np.abs(clean[n])
                    same = np.abs(got[n] - clean[n]) <= slack
                    spared += int((~may).sum())
                    assert same[~may].all(), f"{what}: {(~same & ~may).sum()} others changed"
                    if np.isnan(poison) and n not in spec.untouched.get(i, ()):
                        lost = must & ~np.isnan(got[n])
                        assert not lost.any(), f"{what}: {lost.sum()} that depend on it are not NaN"
    assert spared, "every result depends on every entry: the declared case shows nothing"


@functools.cache
def _derivative_of(function: Callable, position: int) -> Callable:
    """f(tangent, cotangents, *arguments): the tangent of value and gradient in one argument."""

    def derivative(tangent, cotangents, *arguments):
        def moving(changed):
            return function(cotangents, *replace(arguments, (position,), (changed,)))

        return jax.jvp(moving, (arguments[position],), (tangent,))[1]

    return derivative


@_capability("bad input")
def bad_input(spec: OperatorSpec, platform: Platform) -> None:
    """Bad input raises the documented error, which names operator and argument."""
    if not spec.bad_inputs:
        raise NotApplicable("no bad input is declared")
    arguments = spec.case(_single(spec))
    for bad in spec.bad_inputs:
        raised = None
        try:
            bad.call(*arguments)
        except Exception as error:
            raised = error
        assert type(raised) is bad.error, f"{bad.name}: {raised!r}, expected {bad.error.__name__}"
        missing = [f for f in bad.fragments if f not in str(raised)]
        assert not missing, f"{bad.name}: {missing} are not in the message {str(raised)!r}"


@_capability("command buffers")
def command_buffers(spec: OperatorSpec, platform: Platform) -> None:
    """Compiled with command buffers (CUDA graphs) for custom calls, every run is still right."""
    if platform.name != "cuda":
        raise NotApplicable(f"{platform.name} has no command buffers")
    arguments = spec.case(_single(spec))
    cotangents = cotangents_for(spec, arguments)
    function = vjp_of(spec.function, spec.differentiable)
    placed = jax.device_put((cotangents, *arguments), platform.device)
    options: dict[str, Any] = {
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
        "xla_gpu_graph_min_graph_size": 1,
    }
    program = jax.jit(function).lower(*placed).compile(compiler_options=options)
    for scale in (1, 2, -1, 1):
        changed = [a * scale if is_floating(a) else a for a in arguments]
        want = run(function, platform, cotangents, *changed)
        placed = jax.device_put((cotangents, *changed), platform.device)
        got = host(program(*placed))
        _assert_same(spec, got, want, f"with command buffers, and the arguments times {scale}")
