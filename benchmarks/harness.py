"""Times jitted functions on the device, interleaved, on inputs that do not fit its cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax

ROTATED_BYTES = 400e6  # several times any L2
ROUNDS = 7


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


def measure(
    functions: Mapping[str, Callable], make_arguments: Callable[[int], Sequence], bytes_moved: float
) -> dict[str, tuple[float, float]]:
    """Microseconds a call, (median, spread), of each function; rounds alternate between them."""
    sets = int(min(64, max(4, ROTATED_BYTES // bytes_moved)))
    argument_sets = [tuple(make_arguments(i)) for i in range(sets)]
    programs = {name: repeat(f, sets) for name, f in functions.items()}
    for program in programs.values():
        jax.block_until_ready(program(argument_sets))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            start = time.perf_counter()
            for _ in range(3):
                result = program(argument_sets)
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - start) / (3 * sets) * 1e6)
    return {
        name: (statistics.median(t), (max(t) - min(t)) / 2) for name, t in times.items()
    }
