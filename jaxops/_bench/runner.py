"""Measures: compiles every contender, compares their values, and times those that agree."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxops._bench import ceilings, contenders
from jaxops._bench.clock import Batch, Clock, ProfileError, device_seconds, wall_seconds
from jaxops._bench.contenders import Call, Contender, JaxContender, TorchContender
from jaxops._bench.families import ForcedContender
from jaxops._bench.results import OURS, Outcome, Row
from jaxops._bench.spec import Benchmark, Case, Direction, Peer, normal


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much time a measurement may take.

    Attributes:
      rounds: times that every contender of a row is timed, in turns.
      batch_seconds: what the calls of one contender in one round should take together.
      contender_seconds: what all rounds of a contender may take: a slow one has fewer.
      rotated_bytes: how much memory the arguments of one round should spread over, several times
        what a cache holds.
    """

    rounds: int
    batch_seconds: float
    contender_seconds: float
    rotated_bytes: float


EFFORTS = {"cuda": Effort(5, 5e-3, 0.1, 400e6), "cpu": Effort(5, 50e-3, 2.0, 200e6)}
QUICK_EFFORTS = {"cuda": Effort(3, 2e-3, 0.05, 400e6), "cpu": Effort(3, 10e-3, 0.2, 50e6)}
_MOST_CALLS = 32  # in one batch, and so of argument sets
_SINGLE_CALLS, _SINGLE_SECONDS = 20, 0.05


class Stopwatch:
    """The seconds on the wall of what a run consists of."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Adds what the block takes to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where to measure, and how."""

    platform: str
    device: jax.Device
    effort: Effort
    stopwatch: Stopwatch

    @property
    def clock(self) -> Clock:
        """The device's own time where the platform has a profiler for it."""
        return device_seconds if self.platform == "cuda" else wall_seconds

    @contextlib.contextmanager
    def settings(self, dtype: str) -> Generator[None]:
        """JAX as a case of this dtype needs it, in the thread that asks."""
        # Float64 is switched on for float64 alone: it would widen the integers of other cases.
        with jax.default_device(self.device), jax.enable_x64(dtype == "float64"):
            yield


@dataclasses.dataclass(frozen=True)
class Work:
    """A case and the peers that it is to be timed with, absent ones left out."""

    benchmark: Benchmark
    case: Case
    peers: tuple[Peer, ...]

    @property
    def directions(self) -> tuple[Direction, ...]:
        """See `Benchmark.directions_of`."""
        return self.benchmark.directions_of(self.case)

    @property
    def everything(self) -> Direction:
        """All that any direction computes, which one run of the reference gives."""
        moving = {i for direction in self.directions for i in direction.wrt}
        return dataclasses.replace(self.directions[0], value=True, wrt=tuple(sorted(moving)))


Key = tuple[str, str, str]  # the names of a case, of a direction or "", and of a contender
_REFERENCE, _INPUTS = "reference", "inputs"


def run(works: Sequence[Work], machine: Machine, report: Callable[[str], None]) -> Iterator[Row]:
    """The rows of all cases; `report` is told what is being done, twice for each row."""
    # Whatever compiles while something is timed would disturb it, so an operator is compiled
    # before it is timed.
    for _, group in itertools.groupby(works, key=lambda work: work.benchmark.operator):
        of_one = list(group)
        with machine.stopwatch("compile"):
            programs = _compile(of_one, machine, report)
        for work in of_one:
            with machine.settings(work.case.dtype):
                # All of them before any is handed out: the settings end here.
                rows = list(_measure(work, programs, machine, report))
            yield from rows


def _compile(
    works: Sequence[Work], machine: Machine, report: Callable[[str], None]
) -> dict[Key, Contender | str]:
    """All that these cases run, or in words why it cannot be compiled."""

    def build(task: tuple[Work, Direction | None, str]) -> tuple[Key, Contender | str]:
        work, direction, name = task
        try:
            built = _contender(work, direction, name, machine)
        except Exception as error:
            # Whatever goes wrong in a contender is what the table is there to show.
            built = _message(error)
        if name == OURS:
            report(f"compiling {work.benchmark.operator} {work.case.name}")
        return (work.case.name, direction.name if direction else "", name), built

    tasks = []
    for work in works:
        names = (OURS, *(peer.name for peer in work.peers))
        tasks += [(work, None, _INPUTS), (work, None, _REFERENCE)]
        tasks += itertools.product([work], work.directions, names)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(pool.map(build, tasks))


def _contender(
    work: Work, direction: Direction | None, name: str, machine: Machine
) -> Contender | str:
    case, benchmark = work.case, work.benchmark
    with machine.settings(case.dtype):
        make_inputs = _make_inputs(benchmark, case)
        if name == _INPUTS:
            return JaxContender(make_inputs, [_KEY])
        inputs = jax.eval_shape(make_inputs, _KEY)
        if direction is not None and name == OURS:
            function = direction.of(benchmark.function(case))
            return JaxContender(function, _select_inputs(inputs, direction))
        if direction is not None:
            (peer,) = (p for p in work.peers if p.name == name)
            declined = peer.declines(case, direction, machine.platform)
            if declined:
                return declined
            if peer.torch:
                return TorchContender(peer.function(case), direction)
            function = direction.of(peer.function(case))
            if peer.family:
                return ForcedContender(function, _select_inputs(inputs, direction), peer.family)
            return JaxContender(function, _select_inputs(inputs, direction))
    with machine.settings("float64"):
        function = contenders.in_float64(_everything(work, benchmark.reference(case)))
        return JaxContender(function, _select_inputs(inputs, work.everything))


def _everything(work: Work, function: Callable) -> Callable:
    """The results of every direction, by its name."""
    everything = work.everything

    def results(*arguments):
        found = everything.of(function)(*arguments)
        value, *gradients = found if everything.wrt else [found]
        by_argument = dict(zip(everything.wrt, gradients, strict=True))
        return {
            direction.name: [value] * direction.value + [by_argument[i] for i in direction.wrt]
            for direction in work.directions
        }

    return results


_KEY = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))


def _make_inputs(benchmark: Benchmark, case: Case) -> Callable:
    """A function of a random key: (cotangent, arguments)."""

    def make(key):
        of_arguments, of_cotangent = jax.random.split(key)
        arguments = benchmark.arguments(case, of_arguments)
        value = jax.eval_shape(benchmark.function(case), *arguments)
        return (
            jax.tree.map(lambda v: normal(of_cotangent, v.shape, v.dtype), value),
            arguments,
        )

    return make


def _select_inputs(inputs: tuple, direction: Direction) -> tuple:
    cotangent, arguments = inputs
    return (cotangent, *arguments) if direction.wrt else tuple(arguments)


class _RefusedError(Exception):
    """Something is not to be run or timed; the message says why."""


def _ready(program: Contender | str) -> Contender:
    """The compiled program; without one, raises an error that says why."""
    if isinstance(program, str):
        raise _RefusedError(program)
    return program


def _message(error: Exception) -> str:
    if isinstance(error, _RefusedError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _measure(
    work: Work,
    programs: dict[Key, Contender | str],
    machine: Machine,
    report: Callable[[str], None],
) -> Iterator[Row]:
    """The rows of a case."""
    contenders.forget_compiled()
    try:
        with machine.stopwatch("inputs"):
            make = _ready(programs[work.case.name, "", _INPUTS])
            input_sets = _input_sets(make, machine.effort)
    except Exception as error:
        # Memory may not suffice for the inputs of one case, which should not cost the others.
        for direction in work.directions:
            yield _row(work, direction, {OURS: Outcome(error=f"no inputs: {_message(error)}")})
        return
    try:
        with machine.stopwatch("check reference"):
            reference = _ready(programs[work.case.name, "", _REFERENCE])
            (call,) = reference.calls([_select_inputs(input_sets[0], work.everything)])
            want = call()
            reference.block(want)
    except Exception as error:
        want = f"nothing to compare with: {_message(error)}"
    outcomes, timed = {}, {}
    for direction in work.directions:
        report(f"checking {work.benchmark.operator} {work.case.name} {direction.name}")
        built = {
            name: programs[work.case.name, direction.name, name]
            for name in (OURS, *(peer.name for peer in work.peers))
        }
        if isinstance(want, str):
            outcomes[direction.name] = {name: Outcome(error=want) for name in built}
            continue
        argument_sets = [_select_inputs(inputs, direction) for inputs in input_sets]
        # Each direction's results are let go once they have been compared.
        wanted = [jax.tree.leaves(want.pop(direction.name))]
        checked, calls = _checked(work, direction, built, argument_sets, wanted.pop(), machine)
        outcomes[direction.name] = checked
        timed |= {(direction.name, name): (built[name], calls[name]) for name in calls}
    times = _time(timed, machine) if timed else {}
    for direction in work.directions:
        of_direction = {
            name: dataclasses.replace(outcome, **times.get((direction.name, name), {}))
            for name, outcome in outcomes[direction.name].items()
        }
        yield _row(work, direction, of_direction)


def _input_sets(make: Contender, effort: Effort) -> list[tuple]:
    """As many inputs of a case as it takes for none to be in a cache when it is used."""

    def made(seed: int) -> tuple:
        (call,) = make.calls([(jax.random.key(seed, impl="rbg"),)])
        return call()

    first = made(0)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    count = _between(1, effort.rotated_bytes // size, _MOST_CALLS)
    sets = [first, *map(made, range(1, count))]
    jax.block_until_ready(sets)
    return sets


def _checked(
    work: Work,
    direction: Direction,
    built: dict[str, Contender | str],
    argument_sets: Sequence[tuple],
    want: list[jax.Array],
    machine: Machine,
) -> tuple[dict[str, Outcome], dict[str, list[Call]]]:
    """Each contender's outcome but for its times, and the calls of those to be timed."""
    outcomes, calls = {}, {}
    benchmark = work.benchmark
    allowed = contenders.tolerance(
        benchmark.rounding(work.case), benchmark.terms(work.case, direction)
    )
    torch = {peer.name for peer in work.peers if peer.torch}
    for name, contender in built.items():
        try:
            with machine.stopwatch(f"check {name}"):
                calls[name] = _checked_calls(contender, argument_sets, want, allowed)
            outcome = Outcome(memory=_ready(contender).memory())
        except Exception as error:
            outcome = Outcome(error=_message(error))
        outcomes[name] = dataclasses.replace(outcome, torch=name in torch)
    return outcomes, calls


def _checked_calls(
    contender: Contender | str, argument_sets: Sequence, want: Sequence, allowed: float
) -> list[Call]:
    """The calls of a contender, once the first has returned what is wanted."""
    contender = _ready(contender)
    calls = contender.calls(argument_sets)
    error = contenders.error(contender.arrays(calls[0]()), want)
    if not error <= allowed:  # a NaN is wrong too
        raise _RefusedError(f"wrong values: relative error {error:.2g}, allowed {allowed:.2g}")
    return calls


def _time(
    timed: dict[tuple[str, str], tuple[Contender, list[Call]]], machine: Machine
) -> dict[tuple[str, str], dict[str, Any]]:
    """The fields of an `Outcome` on times, for every contender in every direction.

    Rounds alternate between all of them. They are under one clock, because to start and read a
    profile takes several times what it measures.
    """
    effort = machine.effort
    batches, rounds, call_us, found = {}, {}, {}, {}
    with machine.stopwatch("single calls"):
        for name, (contender, calls) in timed.items():
            estimate = ceilings.call_seconds(contender, calls[-1:])
            if machine.platform == "cpu" and estimate > effort.contender_seconds:
                found[name] = _statistics([1e6 * estimate])  # it was the same clock
                continue
            count = _between(1, effort.batch_seconds // estimate, _MOST_CALLS)
            batches[name] = Batch(contender, _cycled(calls, count))
            affordable = effort.contender_seconds // (estimate * count)
            rounds[name] = _between(1, affordable, effort.rounds)
            if machine.platform == "cuda":
                singles = _between(3, _SINGLE_SECONDS // estimate, _SINGLE_CALLS)
                call_us[name] = 1e6 * ceilings.call_seconds(contender, _cycled(calls, singles))
    turns = [name for turn in range(effort.rounds) for name in batches if turn < rounds[name]]
    with machine.stopwatch("rounds"):
        readings = machine.clock([batches[name] for name in turns])
    for name, batch in batches.items():
        of_one = [r for turn, r in zip(turns, readings, strict=True) if turn == name]
        unseen = [reading for reading in of_one if isinstance(reading, ProfileError)]
        if unseen:
            found[name] = {"error": str(unseen[0])}
            continue
        us = [1e6 * r / len(batch.calls) for r in of_one if not isinstance(r, ProfileError)]
        found[name] = {"call_us": call_us.get(name), **_statistics(us)}
    return found


def _between(least: int, value: float, most: int) -> int:
    return int(min(most, max(least, value)))


def _cycled(calls: Sequence[Call], count: int) -> list[Call]:
    return list(itertools.islice(itertools.cycle(calls), count))


def _statistics(us: Sequence[float]) -> dict[str, Any]:
    return {
        "us": statistics.median(us),
        "spread": (max(us) - min(us)) / 2,
        "rounds": len(us),
    }


def _row(work: Work, direction: Direction, outcomes: dict[str, Outcome]) -> Row:
    case, benchmark = work.case, work.benchmark
    return Row(
        operator=benchmark.operator,
        case=case.name,
        group=case.group,
        target=case.target,
        near_limit=benchmark.near_limit,
        direction=direction.name,
        outcomes=outcomes,
        **dataclasses.asdict(benchmark.cost(case, direction)),
    )
