"""Times training steps of models by one, two, ... devices, with our operators and plain JAX's.

Each device has the batch that one device has alone, so the losses are the same to rounding, and a
step that scales takes the same time. Steps are a `jax.shard_map` over the batch; statistics
of batches are those of a device's own.

python scripts/time_scaling.py [MODEL ...] [--devices 1,2,4] [--json FILE]
python scripts/time_scaling.py [MODEL ...] --processes 4 [--json FILE]   # each has one of the GPUs
python scripts/time_scaling.py [MODEL ...] --batch 4   # four times the examples on each device
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import pathlib
import re
import statistics
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxops._bench import clock
from jaxops._bench.models import MODELS, Model, Operators, ours, plain
from jaxops._bench.models.model import Setup
from jaxops._bench.training_steps import initial_state, train_step
from jaxops.testing.measure import collectives
from jaxops.testing.processes import run_local

DEFAULT = ("resnet50-bf16", "lightconv-lm-bf16", "shortconv-lm-bf16", "retinanet-bf16")
LOSSES = 3  # steps whose losses are compared
ROUNDS = 5
STEPS = 25  # of a round


def make_step(model: Model, setup: Setup, operators: Operators, mesh):
    """A training step whose gradients are the means over the devices."""
    step = functools.partial(train_step, model, setup, operators, axis="data")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    return jax.jit(sharded, donate_argnums=0)


def prepare(model: Model, setup: Setup, operators: Operators, devices, batches: int = 1):
    """The compiled step, the first state, and the batch of all devices, each with some batches.

    Devices of other processes get theirs from those, which call this as well.
    """
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    one = jax.tree.map(np.asarray, setup.batch(np.random.default_rng(0)))

    def put(tree, spec):
        return jax.tree.map(
            lambda array: jax.make_array_from_callback(
                array.shape, NamedSharding(mesh, spec), np.asarray(array).__getitem__
            ),
            tree,
        )

    count = batches * len(devices)
    batch = put(jax.tree.map(lambda array: np.concatenate([array] * count), one), P("data"))
    state = put(initial_state(model, setup, one[0])(), P())
    return make_step(model, setup, operators, mesh).lower(state, batch).compile(), state, batch


class Run:
    """Training with a compiled step, from the first state on."""

    def __init__(self, compiled, state, batch):
        self.compiled, self.state, self.batch = compiled, state, batch

    def losses(self, count: int) -> list[float]:
        """The losses of `count` steps, which are queued."""
        found = []
        for _ in range(count):
            self.state, loss = self.compiled(self.state, self.batch)
            found.append(loss)
        return [float(loss) for loss in found]

    def seconds(self, count: int) -> float:
        """The seconds of a step, the mean of `count`."""
        start = time.perf_counter()
        self.losses(count)
        return (time.perf_counter() - start) / count


def launched(run: Run, devices, count: int = 3) -> dict[str, dict[str, float]]:
    """`by_collective` of a step on one of the devices, the mean over those of this process.

    Processes enter the profiler at different times, and all but the last one's collectives wait for
    it: of several processes only the numbers of kernels are kept.
    """
    own = set(devices) & set(jax.local_devices())
    events = clock.gpu_events(clock.profile_of(lambda: run.losses(count)))
    found = by_collective(events, count * len(own))
    if jax.process_count() > 1:
        return {name: {"count": of_step["count"]} for name, of_step in found.items()}
    return found


def by_collective(events, count: int) -> dict[str, dict[str, float]]:
    """How many kernels each of NCCL's collectives has in one of `count` steps, and their ms.

    "other" are kernels, copies and fills that are none of NCCL's.
    """
    durations = collections.defaultdict(list)
    for event in events:
        name = re.match(r"nccl\w+?Kernel_([A-Za-z]+)", event.name)
        durations[name[1] if name is not None else "other"].append(event.duration_ns)
    return {
        name: {"count": len(ns) / count, "ms": 1e-6 * sum(ns) / count}
        for name, ns in durations.items()
    }


def measure(run: Run) -> dict:
    """The losses of the first steps, the collectives, and the milliseconds of a step."""
    losses = run.losses(LOSSES)
    run.losses(STEPS)  # not timed: the first are slower
    rounds = [1e3 * run.seconds(STEPS) for _ in range(ROUNDS)]
    return {
        "losses": losses,
        "collectives": collectives(run.compiled),
        "ms": statistics.median(rounds),
        "spread": (max(rounds) - min(rounds)) / 2,
    }


def add_scaling(found: dict, alone: dict) -> None:
    """Adds the time of the step alone over that of this step.

    Devices wait for each other: they cannot be faster than the slowest of them alone.
    """
    found["scaling"] = alone["ms"] / found["ms"]
    if "ms_of_processes" in alone:
        found["scaling_of_slowest"] = max(alone["ms_of_processes"]) / found["ms"]


def main() -> None:
    """Prints a table, and writes its figures where it is told to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--devices", metavar="1,2,4", help="how many (default: powers of two)")
    parser.add_argument("--processes", type=int, help="local ones, each of one of the GPUs")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=1, help="how many batches a device has")
    parser.add_argument("--small", action="store_true", help="the sizes of a CPU")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"there are {', '.join(MODELS)}, not {', '.join(unknown)}")
    if options.batch < 1:
        parser.error(f"--batch must be at least 1, got {options.batch}")
    if options.processes is not None:
        if options.devices:
            parser.error("--devices is for one process")
        if options.processes < 2:
            parser.error(f"--processes must be at least 2, got {options.processes}")
        if options.process is None:
            sys.exit(run_local([sys.executable, *sys.argv], options.processes))
        own = options.process
        jax.distributed.initialize(options.coordinator, options.processes, own, [own])
    devices = jax.devices()
    counts = [2**n for n in range(len(devices).bit_length()) if 2**n <= len(devices)]
    if options.processes:
        counts = [1, len(devices)]  # at first each alone, all at the same time
    if options.devices:
        counts = [int(count) for count in options.devices.split(",")]
    if not 0 < min(counts) <= max(counts) <= len(devices):
        parser.error(f"--devices {options.devices}: there are {len(devices)}")
    is_first = jax.process_index() == 0
    if is_first:
        print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}")
    tasks = list(itertools.product(options.models or DEFAULT, (ours(), plain()), counts))

    rows, alone = [], {}
    for name, operators, count in tasks:
        setup = MODELS[name].small if options.small else MODELS[name].full
        those = jax.local_devices()[:1] if count == 1 else devices[:count]
        run = Run(*prepare(MODELS[name], setup, operators, those, options.batch))
        found = measure(run)
        if devices[0].platform == "gpu":
            found["launched"] = launched(run, those)
        if count == counts[0]:
            alone = found
            if jax.process_count() > 1:
                times = multihost_utils.process_allgather(np.float32(found["ms"]))
                found["ms_of_processes"] = [float(ms) for ms in times]
        difference = float(np.abs(np.subtract(found["losses"], alone["losses"])).max())
        add_scaling(found, alone)
        about = {"model": name, "operators": operators.name, "devices": count}
        about |= {"processes": jax.process_count(), "batches": options.batch}
        rows.append({**about, **found, "difference": difference})
        if not is_first:
            continue
        slowest = found.get("scaling_of_slowest") if found is not alone else None
        print(
            f"{name}, {operators.name}, {count}: {found['ms']:.2f} +- {found['spread']:.2f} ms, "
            f"{100 * found['scaling']:.1f} %, "
            + (f"{100 * slowest:.1f} % of the slowest alone, " if slowest else "")
            + f"{found['collectives']}, losses differ by {difference:.1e} "
            f"{found.get('launched', '')}",
            flush=True,
        )
        if options.json:
            about = {"jax": jax.__version__, "device": devices[0].device_kind, "rows": rows}
            options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
