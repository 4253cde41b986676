"""Prints the host's time in the CUDA handlers: choosing kernels, and launching them.

It is measured in dry runs (`jaxops.testing.kernels`), without a GPU and without XLA; launches take
no time in them. For each handler of each chosen call it prints the median of many calls, and the
first call.

python scripts/time_host.py [OPERATOR ...] [--device H200 ...] [--calls N]

The table has the largest medians of all cases, on two cores of an AMD EPYC, in microseconds;
"before" is commit
71c41e6, whose convolutions planned at every call:

    handlers                                        before    plans are kept
    conv                                             10.53      1.80
    conv_input_grad                                  21.66      1.88
    conv_kernel_grad                                  5.04      0.81
    concatenate and split of 100 arrays               4.49      4.96
    all others                                        1.0       1.1
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from dry_run import cases

from jaxops.testing import kernels


def main():
    """Prints a line for each handler of each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATOR")
    parser.add_argument("--device", choices=kernels.DEVICES, action="append")
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    if kernels.dry_run().IS_SANITIZED:
        print("This module looks for undefined behaviour, which takes time: these are no figures.")
    print("microseconds of the host in a handler, the launches left out")
    print(f"{'median':>8} {'first':>8}")
    for case in cases.CASES:
        if options.operators and case.name.split()[0] not in options.operators:
            continue
        for dtype in case.dtypes:
            for device in map(kernels.find_device, options.device or ("H200", "A100")):
                _print_case(case, dtype, device, options.calls)


def _print_case(case, dtype, device, count):
    for call in case.calls(device.compute_capability, dtype):
        names = dict.fromkeys(k.split("<")[0] for k in kernels.run(call, device).kernels)
        times = [1e6 * t for t in kernels.seconds(call, device, count)]
        print(
            f"{statistics.median(times):8.2f} {times[0]:8.2f}  {device}  {case.name}, {dtype}, "
            f"{call.target.removeprefix('jaxops_')}: {', '.join(names)}",
            flush=True,
        )


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
