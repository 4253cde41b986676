"""Checks on this machine that every operator can do all that it promises."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxops.testing import platforms, registry
from jaxops.testing.capabilities import CAPABILITIES, Capability, NotApplicable
from jaxops.testing.platforms import Absent, Platform
from jaxops.testing.spec import OperatorSpec

PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "not applicable"
MARKS = {
    PASS: Text("✓", "green"),
    FAIL: Text("✗", "bold red"),
    NOT_APPLICABLE: Text("\N{EN DASH}", "dim"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `python -m jaxops check`."""
    parser.add_argument(
        "operators",
        nargs="*",
        type=_operator,
        metavar="operator",
        help=f"what to check (default: all of {', '.join(registry.operators())})",
    )
    parser.add_argument(
        "--platform", choices=platforms.NAMES, help="where to check (default: wherever JAX runs)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="check only the first variant of each operator"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document on standard output"
    )


def _operator(name: str) -> str:
    if name not in registry.operators():
        raise argparse.ArgumentTypeError(
            f"there is no operator {name!r}; there are {', '.join(registry.operators())}"
        )
    return name


@dataclasses.dataclass(frozen=True)
class Result:
    """One capability of one operator on one platform; `reason` is None where it passed."""

    platform: str
    operator: str
    variant: str
    capability: str
    status: str
    reason: str | None
    seconds: float


def run(args: argparse.Namespace) -> int:
    """Checks and reports; returns the exit code.

    0: nothing failed. 1: something failed. 2: the platform asked for is absent, or every one is.
    """
    platforms.prepare()
    names = [args.platform] if args.platform else platforms.NAMES
    found = {name: platforms.find(name) for name in names}
    present = [p for p in found.values() if isinstance(p, Platform)]
    if not present:
        for absent in found.values():
            assert isinstance(absent, Absent)
            print(f"jaxops check: {absent.name}: {absent.reason}", file=sys.stderr)
        return 2
    specs = _select(args.operators, args.quick)
    # Standard output is the report's: the progress goes where messages go.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        total = len(present) * len(specs) * len(CAPABILITIES)
        task = progress.add_task("checking", total=total)

        def report(platform: Platform, spec: OperatorSpec, capability: Capability) -> None:
            progress.update(task, advance=1, description=f"{spec} on {platform}: {capability.name}")

        results = check(specs, present, report)
    failed = any(r.status == FAIL for r in results)
    if args.json:
        print(json.dumps(_document(found, results, failed), indent=2))
    else:
        _show(found, specs, results)
    return int(failed)


def _select(operators: Sequence[str], quick: bool) -> list[OperatorSpec]:
    specs = [s for s in registry.all_specs() if not operators or s.operator in operators]
    if quick:
        first = {s.operator: s for s in reversed(specs)}
        specs = [s for s in specs if first[s.operator] is s]
    return specs


def check(
    specs: Sequence[OperatorSpec],
    present: Sequence[Platform],
    report: Callable[[Platform, OperatorSpec, Capability], None],
) -> list[Result]:
    """Every capability of every spec on every platform; `report` is told of each one done."""
    results = []
    for platform in present:
        for spec in specs:
            for capability in CAPABILITIES.values():
                start = time.perf_counter()
                status, reason = _outcome(capability, spec, platform)
                seconds = round(time.perf_counter() - start, 3)
                results.append(
                    Result(
                        platform.name,
                        spec.operator,
                        spec.variant,
                        capability.name,
                        status,
                        reason,
                        seconds,
                    )
                )
                report(platform, spec, capability)
    return results


def _outcome(capability, spec, platform) -> tuple[str, str | None]:
    try:
        capability.check(spec, platform)
    except NotApplicable as reason:
        return NOT_APPLICABLE, str(reason)
    except AssertionError as error:
        return FAIL, str(error)
    except Exception as error:
        # Whatever else goes wrong in an operator is what this command is there to show.
        return FAIL, f"{type(error).__name__}: {error}"
    return PASS, None


def _document(found, results: Sequence[Result], failed: bool) -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "passed": not failed,
        "platforms": {
            name: {"devices": len(p.devices), "kind": p.device.device_kind, "reason": None}
            if isinstance(p, Platform)
            else {"devices": 0, "kind": None, "reason": p.reason}
            for name, p in found.items()
        },
        "results": [dataclasses.asdict(r) for r in results],
    }


def _show(found, specs: Sequence[OperatorSpec], results: Sequence[Result]) -> None:
    console = Console(highlight=False)
    by_cell = {(r.platform, r.operator, r.variant, r.capability): r for r in results}
    for name, platform in found.items():
        if not isinstance(platform, Platform):
            console.print(f"{name}: not checked. {platform.reason}\n", markup=False)
            continue
        devices = f"{len(platform.devices)} x {platform.device.device_kind}"
        operators = list(dict.fromkeys(s.operator for s in specs))
        if len(operators) == len(specs):  # one variant each, as with --quick
            groups = {f"every operator on {name} ({devices})": list(specs)}
        else:
            groups = {
                f"{operator} on {name} ({devices})": [s for s in specs if s.operator == operator]
                for operator in operators
            }
        for title, columns in groups.items():
            # Rules between the columns of all operators would not fit a narrow screen.
            table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
            table.add_column("", no_wrap=True)
            # Numbers, which fit next to each other on every screen; their meaning is listed below.
            for number in range(1, len(columns) + 1):
                table.add_column(str(number), justify="center")
            for capability in CAPABILITIES:
                cells = [by_cell[name, s.operator, s.variant, capability] for s in columns]
                table.add_row(capability, *(MARKS[c.status] for c in cells))
            console.print(table)
            for number, spec in enumerate(columns, 1):
                shown = spec if len(groups) == 1 else spec.variant
                console.print(f"{number:3}  {shown}", markup=False)
            console.print()
    for status in (NOT_APPLICABLE, FAIL):
        _show_reasons(console, status, results)
    counts = collections.Counter(r.status for r in results)
    seconds = sum(r.seconds for r in results)
    summary = ", ".join(f"{counts[s]} {s}" for s in MARKS)
    console.print(f"{summary}, in {seconds:.0f} s, compilation included")


def _show_reasons(console: Console, status: str, results: Sequence[Result]) -> None:
    cells = collections.defaultdict(list)
    for r in results:
        if r.status == status:
            cells[r.platform, r.capability, r.reason].append(r)
    for (platform, capability, reason), found in cells.items():
        operators = ", ".join(dict.fromkeys(r.operator for r in found))
        # Text and not str: reasons may hold the square brackets that rich reads as markup.
        console.print(Text.assemble(MARKS[status], f" {operators} on {platform}, {capability}"))
        if status == FAIL:
            broken = "; ".join(f"{r.operator}, {r.variant}" for r in found)
            console.print(f"  promised: {CAPABILITIES[capability].summary}", markup=False)
            console.print(f"  broken by: {broken}", markup=False)
        console.print(f"  {reason}", markup=False)
