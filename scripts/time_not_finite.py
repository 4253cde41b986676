"""Times kernel gradients of 16-bit convolutions whose operands hold a NaN or Inf, or many.

A loss-scaled step that overflows should take no longer than twice the time of a finite one. Each
figure is the median, over several runs, of the time of a program of several gradients divided by
their number; the ratios are to the finite step.

    python scripts/time_not_finite.py
    JAXOPS_UNPROVEN_KERNELS=1 python scripts/time_not_finite.py
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxops

# (images, H, W), channels, outputs, taps, strides.
CASES = (
    ((32, 28, 28), 256, 256, 3, 1),
    ((32, 56, 56), 64, 64, 3, 1),
    ((64, 14, 14), 512, 512, 3, 1),
    ((64, 7, 7), 512, 512, 3, 1),
    ((32, 56, 56), 128, 128, 3, 2),
    ((32, 224, 224), 3, 64, 7, 2),
)
# What is not finite of x and of the cotangent.
SPOILS = {
    "finite": (None, None),
    "x, one inside": ((1, 5, 3, 1), None),
    "x, one at a border": ((1, 5, 0, 1), None),
    "x, a column": ((slice(None), slice(None), 0), None),
    "x, all": (..., None),
    "cotangent, one": (None, (1, 5, 3, 1)),
    "cotangent, all": (None, ...),
}
GRADIENTS, RUNS = 10, 7


def program(shape, stride):
    """The sum of several kernel gradients, each of which waits for the one before."""

    def gradient(x, g):
        def convolved(kernel):
            return jaxops.conv2d(x, kernel, strides=stride)

        return jax.vjp(convolved, jnp.zeros(shape, x.dtype))[1](g)[0]

    @jax.jit
    def several(x, g):
        result = gradient(x, g)
        for _ in range(GRADIENTS - 1):
            x, g, result = lax.optimization_barrier((x, g, result))
            result = gradient(x, g)
        return result

    return several


def main() -> None:
    """Prints a table a case and dtype."""
    rng = np.random.default_rng(0)
    print(jax.devices()[0].device_kind, "jax", jax.__version__)
    for sizes, channels, outputs, taps, stride in CASES:
        several = program((taps, taps, channels, outputs), stride)
        outs = (sizes[0], *(-(-n // stride) for n in sizes[1:]))
        print(f"\n{sizes}, {channels} to {outputs}, {taps} x {taps}, strides of {stride}, float16")
        finite = None
        for name, places in SPOILS.items():
            # Of positive cotangents the sums of an infinite image are infinite, and not NaN.
            arrays = rng.normal(size=(*sizes, channels)), abs(rng.normal(size=(*outs, outputs)))
            for array, place in zip(arrays, places, strict=True):
                if place is not None:
                    array[place] = np.inf
            placed = jax.device_put([a.astype(np.float16) for a in arrays])
            several(*placed).block_until_ready()
            times = []
            for _ in range(RUNS):
                begin = time.perf_counter()
                several(*placed).block_until_ready()
                times.append((time.perf_counter() - begin) / GRADIENTS * 1e6)
            found = statistics.median(times)
            finite = finite or found
            print(f"  {name:20} {found:9.1f} us  {found / finite:6.2f}", flush=True)


if __name__ == "__main__":
    main()
