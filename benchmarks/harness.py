"""Times jitted functions on the device, interleaved, on inputs that do not fit its cache."""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax

ROTATED_BYTES = 400e6  # several times any L2
ROUNDS = 3


def repeat(function: Callable, sets: int) -> Callable:
    """One jitted program that calls `function` on each of several argument sets, in order.

    Each call waits for the one before it, so that XLA neither merges nor reorders them; dispatch is
    paid once for all of them.
    """

    def program(argument_sets):
        results, previous = [], None
        for i in range(sets):
            arguments = argument_sets[i]
            if previous is not None:
                arguments, _ = jax.lax.optimization_barrier((arguments, previous))
            previous = function(*arguments)
            results.append(previous)
        return results

    return jax.jit(program)


def device_seconds(program: Callable, argument_sets: Sequence) -> float:
    """Seconds that the GPU was busy with one run of `program`, from the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(argument_sets))
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        return 1e-9 * sum(
            event.duration_ns
            for plane in profile.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        )


def wall_seconds(program: Callable, argument_sets: Sequence) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(argument_sets))
    return time.perf_counter() - start


def measure(
    functions: Mapping[str, Callable], make_arguments: Callable[[int], Sequence], bytes_moved: float
) -> dict[str, tuple[float, float]]:
    """Microseconds a call, (median, spread), of each function; rounds alternate between them.

    On a GPU it is the time that its kernels ran, without what launching them costs; on a CPU it is
    wall time.
    """
    sets = int(min(32, max(4, ROTATED_BYTES // bytes_moved)))
    clock = device_seconds if jax.default_backend() == "gpu" else wall_seconds
    argument_sets = [tuple(make_arguments(i)) for i in range(sets)]
    programs = {name: repeat(f, sets) for name, f in functions.items()}
    for program in programs.values():
        for _ in range(2):
            jax.block_until_ready(program(argument_sets))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            times[name].append(clock(program, argument_sets) / sets * 1e6)
    return {name: (statistics.median(t), (max(t) - min(t)) / 2) for name, t in times.items()}
