"""Measures whole training steps of the models in `models`, with our operators and plain JAX's.

Both start from the same parameters. Their losses must agree to rounding, which is measured too:
it is what the losses of plain JAX change by if every parameter moves by a rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxops._bench import results
from jaxops._bench.clock import Batch, ProfileError, device_seconds
from jaxops._bench.contenders import memory_of
from jaxops._bench.models import Model, Operators, ours, plain
from jaxops._bench.models.model import Setup
from jaxops._bench.results import OURS

#: How many times the losses of two sets of operators may differ by what rounding changes them by.
TOLERANCE = 8


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is run of a model.

    Attributes:
      steps: those whose losses are compared.
      rounds: times that each set of operators is timed, in turns.
      round_seconds: what the steps of one round should take.
      single_calls: steps that are waited for, one by one.
    """

    steps: int
    rounds: int
    round_seconds: float
    single_calls: int


EFFORTS = {"cuda": Effort(10, 5, 0.5, 10), "cpu": Effort(5, 3, 0.2, 3)}
QUICK_EFFORT = Effort(3, 1, 0.1, 1)
_MAX_QUEUED = 100  # steps
_PROFILED = 3  # steps


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the training steps of a model ran with one set of operators; times in milliseconds.

    Attributes:
      ms: the wall time of a step, of many that are queued: the median over the rounds.
      spread: half the distance of the fastest round from the slowest.
      rounds: how many there were.
      call_ms: the wall time of one step that is waited for.
      host_ms: how much of `call_ms` passes until the call returns, the device still computing.
      device_ms: how long a GPU is busy with a step, by the profiler; None on a CPU.
      memory: bytes of arguments, results and temporaries, by XLA's analysis of the program.
      trace_s: the seconds that tracing and lowering the step took.
      compile_s: the seconds that XLA took to compile it.
      losses: of the first steps.
      error: why there is none of this.
    """

    ms: float | None = None
    spread: float | None = None
    rounds: int = 0
    call_ms: float | None = None
    host_ms: float | None = None
    device_ms: float | None = None
    memory: int | None = None
    trace_s: float | None = None
    compile_s: float | None = None
    losses: Sequence[float] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One model; `rounding` is what a rounding of all parameters changes its losses by."""

    model: str
    sizes: str
    parameters: int
    outcomes: dict[str, Outcome]
    rounding: float | None = None

    @property
    def difference(self) -> float | None:
        """The largest difference of our losses from those of plain JAX; NaN if one is NaN."""
        ours, plain = (outcome.losses for outcome in self.outcomes.values())
        if not (ours and plain):
            return None
        return float(np.abs(np.subtract(ours, plain)).max())

    @property
    def agrees(self) -> bool:
        """Whether the losses are equal to rounding; False where they cannot be compared."""
        if self.difference is None or self.rounding is None:
            return False
        return self.difference <= TOLERANCE * self.rounding


@dataclasses.dataclass(frozen=True)
class Document:
    """One run; see `results.Document`."""

    command: str
    date: str
    platform: str
    device: str
    threads: int
    versions: dict[str, str]
    unfinished: int
    rows: list[Row]


def load(file: pathlib.Path) -> Document:
    """Reads what `results.save` has written of models.

    Raises:
      ResultsError: see `results.read`.
    """

    def document(content: dict[str, Any]) -> Document:
        rows = [
            Row(**{**r, "outcomes": {n: Outcome(**o) for n, o in r["outcomes"].items()}})
            for r in content.pop("rows")
        ]
        return Document(**content, rows=rows)

    return results.read(file, document)


State = tuple[Any, Any, Any]  # parameters, statistics, and what the optimizer keeps


class Program:
    """A compiled training step, and the state that it moves on."""

    def __init__(self, model: Model, setup: Setup, operators: Operators, state: Any, batch: Any):
        step = functools.partial(train_step, model, setup, operators)
        start = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
        self.trace_s = time.perf_counter() - start
        self._compiled = lowered.compile()
        self.compile_s = time.perf_counter() - start - self.trace_s
        self._batch = batch
        self._state: State | None = None

    def begin(self, state: State | None) -> None:
        """Training begins with this state; None lets go of the last."""
        self._state = state

    def step(self) -> jax.Array:
        """Queues a step; returns its loss."""
        self._state, loss = self._compiled(self._state, self._batch)
        return loss

    def losses(self, count: int) -> list[float]:
        """The losses of as many steps."""
        return [float(loss) for loss in [self.step() for _ in range(count)]]

    def memory(self) -> int | None:
        """Bytes of arguments, results and temporaries."""
        return memory_of(self._compiled)

    # Clocks take a `Contender`.

    def calls(self, argument_sets: Sequence[tuple]) -> list[Callable[[], Any]]:
        """See `Contender`; a step has its arguments already."""
        return [self.step for _ in argument_sets]

    def block(self, result: Any) -> None:
        """See `Contender`."""
        jax.block_until_ready(result)

    def arrays(self, result: Any) -> list[jax.Array]:
        """See `Contender`."""
        return [result]


def train_step(
    model: Model,
    setup: Setup,
    operators: Operators,
    state: State,
    batch: Any,
    axis: str | None = None,
):
    """The next state and the loss; with `axis`, the means over this axis of a `shard_map`."""
    params, statistics_, kept = state
    inputs, targets = batch

    def loss_of(params):
        variables = {"params": params, **statistics_}
        found, changed = setup.module(operators).apply(
            variables, *inputs, mutable=list(statistics_)
        )
        return mean(setup.loss(operators, found, *targets)), changed

    def mean(found):
        return found if axis is None else jax.lax.pmean(found, axis)

    (loss, statistics_), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    statistics_ = jax.tree.map(mean, statistics_)
    updates, kept = model.optimizer.update(gradients, kept, params)
    return (optax.apply_updates(params, updates), statistics_, kept), loss


def initial_state(model: Model, setup: Setup, inputs: Sequence[jax.Array]) -> Callable[[], State]:
    """Makes the same state whenever it is called, for a step that is given the state's memory."""
    examples = [x[:1] for x in inputs]

    @jax.jit
    def state(key):
        variables = dict(setup.module(plain()).init(key, *examples))
        params = variables.pop("params")
        return params, variables, model.optimizer.init(params)

    # XLA is quick to compile this generator.
    return lambda: state(jax.random.key(0, impl="rbg"))


def _moved(state: State, eps: float) -> State:
    """The state with every parameter larger or smaller by a rounding."""
    random = np.random.default_rng(1)

    def moved(parameter):
        signs = random.integers(0, 2, parameter.shape, np.int8) * np.float32(2 * eps) - eps
        return jnp.asarray(np.asarray(parameter) * (1 + signs), parameter.dtype)

    return (jax.tree.map(moved, state[0]), *state[1:])


def _eps(dtype: str, platform: str) -> float:
    """How far a number may be from what was rounded to the dtype."""
    if dtype != "float32":
        return float(jnp.finfo(dtype).eps)
    # GPUs round the operands of products to TF32 unless they are told otherwise. On a CPU sums,
    # which are float32 for every dtype, round most.
    return 2.0**-10 if platform == "cuda" else 4 * float(jnp.finfo(dtype).eps)


def measure(
    model: Model,
    platform: str,
    device: jax.Device,
    *,
    quick: bool,
    report: Callable[[str], None] = lambda what: None,
) -> Row:
    """Trains a model for some steps with both sets of operators; `report` is told what is next."""
    with jax.default_device(device), _without_compilation_cache():
        return _measure(model, platform, quick, report)


#: How often `measure` reports.
REPORTS = 4


def _measure(model: Model, platform: str, quick: bool, report: Callable[[str], None]) -> Row:
    effort = QUICK_EFFORT if quick else EFFORTS[platform]
    setup = model.small if quick or platform == "cpu" else model.full
    batch = jax.tree.map(jnp.asarray, setup.batch(np.random.default_rng(0)))
    initial = initial_state(model, setup, batch[0])
    shapes = jax.eval_shape(initial)
    programs: dict[str, Program] = {}
    found: dict[str, dict[str, Any]] = {}
    rounding = None
    for operators in (ours(), plain()):
        report(f"compiling {model.name}, {operators.name}")
        try:
            program = Program(model, setup, operators, shapes, batch)
            program.begin(initial())
            losses = program.losses(effort.steps)
            found[operators.name] = {
                "losses": losses,
                "memory": program.memory(),
                "trace_s": program.trace_s,
                "compile_s": program.compile_s,
            }
            if operators.name != OURS:
                program.begin(_moved(initial(), _eps(model.dtype, platform)))
                changes = np.abs(np.subtract(program.losses(effort.steps), losses))
                # Losses are float32 themselves.
                least = float(jnp.finfo("float32").eps) * max(map(abs, losses))
                rounding = max(float(changes.max()), least)
            program.begin(None)
            programs[operators.name] = program
        except Exception as error:
            # Whatever goes wrong in a model is what the table is there to show.
            first, *_ = str(error).strip().splitlines() or [""]
            found[operators.name] = {"error": f"{type(error).__name__}: {first}"}
    report(f"timing {model.name}")
    for name, times in _time(programs, initial, platform, effort).items():
        found[name] |= times
    report(f"timed {model.name}")
    return Row(
        model.name,
        setup.sizes,
        sum(leaf.size for leaf in jax.tree.leaves(shapes[0])),
        {name: Outcome(**fields) for name, fields in found.items()},
        rounding,
    )


def _time(
    programs: dict[str, Program], initial: Callable[[], State], platform: str, effort: Effort
) -> dict[str, dict[str, Any]]:
    """The fields of an `Outcome` on times; rounds alternate between the programs."""
    found: dict[str, dict[str, Any]] = {}
    counts: dict[str, int] = {}
    for name, program in programs.items():
        program.begin(initial())
        program.block(program.step())
        calls = [_single(program) for _ in range(effort.single_calls)]
        host, whole = (statistics.median(seconds) for seconds in zip(*calls, strict=True))
        found[name] = {"host_ms": 1e3 * host, "call_ms": 1e3 * whole}
        counts[name] = int(min(_MAX_QUEUED, max(1, effort.round_seconds // whole)))
    rounds = [(name, program) for _ in range(effort.rounds) for name, program in programs.items()]
    readings = [(name, _queued(program, counts[name])) for name, program in rounds]
    for name in programs:
        ms = [1e3 * seconds for of, seconds in readings if of == name]
        found[name] |= {
            "ms": statistics.median(ms),
            "spread": (max(ms) - min(ms)) / 2,
            "rounds": len(ms),
        }
    if platform == "cuda":
        batches = [Batch(program, [program.step] * _PROFILED) for program in programs.values()]
        for name, seconds in zip(programs, device_seconds(batches), strict=True):
            if not isinstance(seconds, ProfileError):
                found[name]["device_ms"] = 1e3 * seconds / _PROFILED
    for program in programs.values():
        program.begin(None)
    return found


def _single(program: Program) -> tuple[float, float]:
    """The seconds until the call of a step returns, and until its loss is there."""
    start = time.perf_counter()
    loss = program.step()
    returned = time.perf_counter()
    program.block(loss)
    return returned - start, time.perf_counter() - start


def _queued(program: Program, count: int) -> float:
    """The seconds of a step, of as many that are queued one after another."""
    program.block(program.step())
    start = time.perf_counter()
    loss = None
    for _ in range(count):
        loss = program.step()
    program.block(loss)
    return (time.perf_counter() - start) / count


@contextlib.contextmanager
def _without_compilation_cache() -> Generator[None]:
    """Programs are compiled, and not read from a file, so that the seconds are XLA's."""
    # jax.config finds its attributes when it is asked for them.
    was = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
