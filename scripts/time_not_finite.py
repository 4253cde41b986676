"""Times kernel gradients of 16-bit convolutions whose operands hold a NaN or Inf, or many.

A loss-scaled step that overflows should take no longer than twice the time of a finite one. Each
figure is the median, over several runs, of the time of a program of several gradients divided by
their number; the ratios are to the finite step.

    python scripts/time_not_finite.py

The figures are from an H200 with jax 0.11.2, at commit 3054452, in microseconds. In the column
"threads" a thread computed each spoiled sum again; in the column "products" tensor cores did, as
the kernel does now.

    images of float16         taps    strides  finite  worst, threads    worst, products
    32x28x28, 256 to 256      3 x 3   1        88.0    57441 (x, all)    138.4 (x, a column)
    32x56x56, 64 to 64        3 x 3   1        58.4    15038 (x, all)     97.6 (x, a column)
    64x14x14, 512 to 512      3 x 3   1        127.7   109903 (x, all)   255.0 (x, all)
    64x7x7, 512 to 512        3 x 3   1        56.2    30834 (x, all)    120.8 (x, all)
    32x56x56, 128 to 128      3 x 3   2        47.6    13640 (x, all)     99.3 (x, all)
    32x224x224, 3 to 64       7 x 7   2        56.8    not measured       73.0 (cotangent, one)
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
# The entries of x and of the cotangent that are not finite.
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
        results = [gradient(x, g)]
        for _ in range(GRADIENTS - 1):
            x, g, results[-1] = lax.optimization_barrier((x, g, results[-1]))
            results.append(gradient(x, g))
        return results  # the sum reads all of them: XLA drops a gradient that nobody reads

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
            # With positive cotangents the sums of an infinite image are infinite, and not NaN.
            arrays = rng.normal(size=(*sizes, channels)), abs(rng.normal(size=(*outs, outputs)))
            for array, place in zip(arrays, places, strict=True):
                if place is not None:
                    array[place] = np.inf
            placed = jax.device_put([a.astype(np.float16) for a in arrays])
            jax.block_until_ready(several(*placed))
            times = []
            for _ in range(RUNS):
                begin = time.perf_counter()
                jax.block_until_ready(several(*placed))
                times.append((time.perf_counter() - begin) / GRADIENTS * 1e6)
            found = statistics.median(times)
            finite = finite or found
            print(f"  {name:20} {found:9.1f} us  {found / finite:6.2f}", flush=True)


if __name__ == "__main__":
    main()
