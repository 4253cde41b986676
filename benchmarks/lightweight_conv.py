"""Times lightweight_conv against XLA's shift-and-add formulation, forward and backward.

python benchmarks/lightweight_conv.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxops

# B, C, T, H, K, dtype, padding, dilation
CASES = [
    (32, 1024, 128, 16, 31, "float32", "causal", 1),
    (8, 1024, 2048, 16, 31, "bfloat16", "causal", 1),
    (4, 2048, 8192, 2048, 4, "bfloat16", "causal", 1),
    (4, 2048, 8192, 2048, 4, "float32", "causal", 1),
    (16, 512, 512, 8, 7, "float32", "same", 1),
    (64, 256, 65, 4, 3, "float32", "causal", 1),
    (8, 777, 1001, 7, 15, "bfloat16", "same", 1),
    (8, 1024, 4096, 1024, 3, "bfloat16", "causal", 8),
]
SMALL_CASES = [(2, 64, 65, 8, 5, "float32", "causal", 1)]


def shift_and_add(x, weight, *, padding, dilation, data_format):
    """K shifted multiplies in jax.numpy: what XLA fuses best."""
    time_axis = 1 if data_format == "NTC" else 2
    channels, time_steps = x.shape[3 - time_axis], x.shape[time_axis]
    heads, taps = weight.shape
    reach = (taps - 1) * dilation
    before = reach if padding == "causal" else reach // 2
    pads = [(0, 0)] * 3
    pads[time_axis] = (before, reach - before)
    padded = jnp.pad(x, pads)
    by_channel = jnp.repeat(weight, channels // heads, axis=0).astype(jnp.float32)
    total = 0
    for k in range(taps):
        shifted = jax.lax.slice_in_dim(
            padded, k * dilation, k * dilation + time_steps, axis=time_axis
        )
        tap = by_channel[:, k] if data_format == "NTC" else by_channel[:, k, None]
        total = total + tap * shifted.astype(jnp.float32)
    return total.astype(x.dtype)


def backward(function):
    """(x, weight, cotangent) -> (dx, dweight)."""

    def run(x, weight, g):
        return jax.vjp(function, x, weight)[1](g)

    return run


def run_case(case, data_format):
    B, C, T, H, K, dtype, padding, dilation = case
    options = dict(padding=padding, dilation=dilation, data_format=data_format)
    shape = (B, T, C) if data_format == "NTC" else (B, C, T)
    itemsize = jnp.dtype(dtype).itemsize
    size = B * T * C * itemsize
    ours = lambda x, w: jaxops.lightweight_conv(x, w, **options)  # noqa: E731
    theirs = lambda x, w: shift_and_add(x, w, **options)  # noqa: E731

    def arguments(seed, count):
        rng = np.random.default_rng(seed)
        keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), count)
        arrays = [jax.random.normal(k, shape, jnp.float32).astype(dtype) for k in keys]
        weight = jnp.asarray(rng.normal(size=(H, K)) / K**0.5, dtype)
        return [arrays[0], weight, *arrays[1:]]

    rows = []
    for direction, count, passes in (("forward", 1, 2), ("backward", 2, 3)):
        functions = {"jaxops": ours, "shift_and_add": theirs}
        if direction == "backward":
            functions = {name: backward(f) for name, f in functions.items()}
        sample = arguments(0, count)
        results = {n: jax.tree.leaves(jax.jit(f)(*sample)) for n, f in functions.items()}
        for a, b in zip(*results.values(), strict=True):
            a, b = (np.asarray(t, np.float64) for t in (a, b))
            error = np.linalg.norm(a - b) / np.linalg.norm(b)
            assert error < 4 * float(jnp.finfo(dtype).eps) * K**0.5, (case, direction, error)
        times = harness.measure(functions, lambda i: arguments(i, count), passes * size)  # noqa: B023
        median, spread = times["jaxops"]
        rows.append(
            {
                "case": f"({B},{C},{T},{H},{K})",
                "dtype": dtype,
                "padding": padding,
                "dilation": dilation,
                "data_format": data_format,
                "direction": direction,
                "µs": round(median, 2),
                "spread": round(spread, 2),
                "GB/s": round(passes * size / median / 1e3, 1),
                "TFLOP/s": round(2 * B * T * C * K * (1 if count == 1 else 2) / median / 1e6, 2),
                "shift_and_add": round(times["shift_and_add"][0], 2),
                "speedup": round(times["shift_and_add"][0] / median, 2),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--quick", action="store_true", help="one tiny case")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N cases")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    rows = []
    for case in SMALL_CASES if options.quick else CASES[: options.first]:
        for data_format in ("NCT", "NTC"):
            rows += run_case(case, data_format)
    table = Table(box=None)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    behind = [r for r in rows if r["speedup"] < 1]
    console.print(f"{len(rows) - len(behind)} of {len(rows)} rows ahead of shift-and-add")
    if options.json:
        device = jax.devices()[0]
        document = {
            "command": "python benchmarks/lightweight_conv.py --json FILE"
            + (" --quick" if options.quick else "")
            + (f" --first {options.first}" if options.first else ""),
            "date": time.strftime("%Y-%m-%d"),
            "device": device.device_kind,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxops": jaxops.__version__,
            "rows": rows,
        }
        with open(options.json, "w") as file:
            json.dump(document, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
