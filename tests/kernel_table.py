"""The table of kernels: those that chosen calls launch, on GPUs of several kinds.

    python tests/kernel_table.py          shows the differences from kernel_table.txt
    python tests/kernel_table.py --write  writes it

It needs the module jaxops._cuda with code for 90a, and no GPU.
"""

from __future__ import annotations

import argparse
import difflib
import pathlib

import jax
from dry_run import cases

from jaxops.testing import kernels

DEVICES = [kernels.DEVICES[name] for name in ("H200", "A100", "L4", "B200")]
PATH = pathlib.Path(__file__).with_suffix(".txt")
_HEAD = """\
Which kernels a call runs, by operator, dtype and GPU: what `python tests/kernel_table.py --write`
writes. A line is a call of a handler, of the value or of a gradient; kernels follow in the order of
their launches.
"""


def make() -> str:
    """The table of the present sources."""
    lines = [_HEAD]
    for case in cases.CASES:
        for dtype in case.dtypes:
            lines += ["", f"{case.name}, {dtype}", *_lines(case, dtype)]
    return "\n".join(lines) + "\n"


def _lines(case, dtype):
    # Programs are the same for all GPUs but those of 9.0.
    calls = {c: case.calls(c, dtype) for c in ("9.0", "8.0")}
    found = {}
    for device in DEVICES:
        for call in calls["9.0" if device.compute_capability == "9.0" else "8.0"]:
            outcome = kernels.run(call, device)
            if outcome.error or outcome.violation:
                raise AssertionError(f"{case.name}, {dtype}: {call} on {device}: {outcome}")
            line = f"{call.target.removeprefix('jaxops_')}: {_text(outcome.kernels)}"
            found.setdefault(line, {})[device.name] = None
    return [
        f"  {', '.join(gpus) if len(gpus) < len(DEVICES) else 'all'}: {line}"
        for line, gpus in found.items()
    ] or ["  no handler"]


def _text(names):
    """The kernels; a kernel that is launched several times in a row has the number of launches."""
    runs = []
    for kernel in names:
        if runs and runs[-1][0] == kernel:
            runs[-1][1] += 1
        else:
            runs.append([kernel, 1])
    return ", ".join(f"{count} x {k}" if count > 1 else k for k, count in runs)


def difference() -> str:
    """The difference of the file and the present sources, as a diff; empty if they are equal."""
    was = PATH.read_text().splitlines() if PATH.exists() else []
    return "\n".join(
        difflib.unified_diff(was, make().splitlines(), str(PATH.name), "now", lineterm="", n=1)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the file")
    if parser.parse_args().write:
        PATH.write_text(make())
    else:
        print(difference() or "nothing has changed")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
