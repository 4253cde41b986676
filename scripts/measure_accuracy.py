"""Measures how far the results of every operator are from exact ones.

python scripts/measure_accuracy.py                        # prints the table
python scripts/measure_accuracy.py --platform cuda        # of a GPU
python scripts/measure_accuracy.py --json FILE            # writes the figures
python scripts/measure_accuracy.py --update               # the platform's file and the page here
python scripts/measure_accuracy.py --page                 # the page, of the files that are here
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform as host

import jax
from rich.progress import track

import jaxops
from jaxops._core import native
from jaxops.testing import accuracy, platforms
from jaxops.testing.registry import all_specs
from jaxops.testing.spec import FLOATS

ROOT = pathlib.Path(__file__).parents[1]
#: Results files, by platform.
KEPT = {name: ROOT / f"benchmarks/results/accuracy/{name}.json" for name in ("cpu", "cuda")}
PAGE = ROOT / "docs" / "accuracy.md"
MARKERS = ("<!-- accuracy -->", "<!-- end of accuracy -->")


def measure(platform: platforms.Platform) -> dict:
    """The errors of every spec and dtype, and where they were measured."""
    tasks = [(spec, dtype) for spec in all_specs() for dtype in spec.dtypes]
    rows = [
        {
            "operator": spec.operator,
            "variant": spec.variant,
            "dtype": dtype,
            **_rounded(accuracy.measure(spec, dtype, platform)),
        }
        for spec, dtype in track(tasks, "measuring")
    ]
    return {
        "device": platform.device.device_kind,
        "machine": host.machine(),
        "build": dict(native.builds())[platform.name],
        "jax": jax.__version__,
        "jaxops": jaxops.__version__,
        "rows": rows,
    }


def _rounded(errors: dict[str, float]) -> dict[str, float]:
    return {kind: float(f"{error:.3g}") for kind, error in errors.items()}


def worst(found: dict) -> dict[tuple[str, str], dict[str, float]]:
    """The largest errors over the variants, for every operator and dtype."""
    errors: dict[tuple[str, str], dict[str, float]] = {}
    for row in found["rows"]:
        largest = errors.setdefault((row["operator"], row["dtype"]), {})
        for kind in accuracy.KINDS:
            if kind in row:
                largest[kind] = max(largest.get(kind, 0.0), row[kind])
    return errors


def table(found: dict) -> str:
    """The worst errors in Markdown, a line for each operator."""
    errors = worst(found)
    operators = dict.fromkeys(operator for operator, _ in errors)
    dtypes = sorted({dtype for _, dtype in errors}, key=FLOATS.index)
    lines = [f"| operator | {' | '.join(dtypes)} |", "|---" * (1 + len(dtypes)) + "|"]
    for operator in operators:
        cells = [
            " / ".join(f"{e:.2f}" for e in errors.get((operator, dtype), {}).values())
            for dtype in dtypes
        ]
        lines.append(f"| `{operator}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def section(found: dict) -> str:
    """The text of the page for one results file."""
    machine = found["machine"] if found["device"] == "cpu" else found["device"]
    where = f"{found['build']} on {machine}, jax {found['jax']}, jaxops {found['jaxops']}"
    return f"\nMeasured with {where}:\n\n{table(found)}\n"


def sections() -> str:
    """The text of the page between the markers."""
    return "".join(section(json.loads(file.read_text())) for file in KEPT.values())


def main() -> None:
    """Prints a table, and writes its figures where it is told to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", choices=platforms.NAMES, default="cpu")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--update", action="store_true", help=f"write the platform's file and {PAGE.name}"
    )
    parser.add_argument("--page", action="store_true", help=f"measure nothing, write {PAGE.name}")
    options = parser.parse_args()
    if options.page and (options.json or options.update):
        parser.error(
            "--page measures nothing, so that there is nothing to write with --json, --update"
        )
    if not options.page:
        platforms.prepare()
        platform = platforms.find(options.platform)
        if isinstance(platform, platforms.Absent):
            parser.error(platform.reason)
        found = measure(platform)
        print(section(found))
        text = json.dumps(found, indent=1) + "\n"
        for file in (options.json, KEPT[options.platform] if options.update else None):
            if file is not None:
                file.write_text(text)
    if options.update or options.page:
        before, start, rest = PAGE.read_text().partition(MARKERS[0])
        _, end, after = rest.partition(MARKERS[1])
        PAGE.write_text(f"{before}{start}\n{sections()}{end}{after}")


if __name__ == "__main__":
    main()
