"""Times every operator against its peers and against the limits of this machine."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import importlib.metadata
import os
import pathlib
import platform as host
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxops._bench import (
    ceilings,
    contenders,
    families,
    figures,
    overview,
    own,
    registry,
    report,
    results,
    runner,
)
from jaxops._bench.clock import ProfileError
from jaxops._bench.results import Document, ResultsError
from jaxops._bench.spec import TARGET_TAG, Benchmark, Peer
from jaxops._cli import models

# The CPU comes second to "cuda", as in `demo`: told to look for "cuda" alone, on a machine without
# a GPU, JAX fails an assertion that says nothing.
PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu"}
# A clone shows one run: its table on this page, its picture in README.
RESULTS_PAGE = registry.FOLDER.parent / "docs" / "results.md"
PICTURE = RESULTS_PAGE.with_name("speedups.svg")


#: The arguments that choose cases.
_CHOICES = ("shape", "dtype", "option", "cases", "without", "grid")


class UsageError(Exception):
    """The command asks for something that cannot be done; the message says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `python -m jaxops bench`."""
    parser.add_argument(
        "operators",
        nargs="*",
        metavar="operator",
        help=f"what to time (default: all of {', '.join(registry.operators())})",
    )
    measuring = parser.add_argument_group("what is measured")
    measuring.add_argument(
        "--platform", choices=tuple(PLATFORMS), help="where (default: where JAX would run)"
    )
    measuring.add_argument(
        "--quick", action="store_true", help="the first case of each operator, and little of it"
    )
    measuring.add_argument(
        "--cases",
        action="append",
        metavar="PATTERN",
        help="only cases in whose group and name this shell pattern occurs, such as 'large*bf16'; "
        f"{TARGET_TAG} stands for the cases that targets were set on; may be given several times",
    )
    measuring.add_argument(
        "--grid",
        action="store_true",
        help="in place of an operator's cases, those that cover the sizes evenly",
    )
    measuring.add_argument(
        "--shape",
        metavar="SIZES",
        help="time one operator on a problem of your own, of these sizes, such as "
        "8,1024,2048,16,31 for lightweight_conv; a wrong number of them is answered with their "
        "names",
    )
    measuring.add_argument(
        "--dtype", help="that of the arrays of --shape, such as bfloat16 (default: float32)"
    )
    measuring.add_argument(
        "--option",
        action="append",
        metavar="NAME=VALUE",
        help="an option of the problem of --shape, such as layout=NTC; may be given several times",
    )
    measuring.add_argument(
        "--without",
        action="append",
        metavar="PATTERN",
        help="no cases in which this pattern occurs, such as those that a peer takes minutes to "
        "compile; may be given several times",
    )
    measuring.add_argument(
        "--peers",
        metavar="NAMES",
        help="only these peers: names or shell patterns, separated by commas",
    )
    measuring.add_argument(
        "--kernels",
        action="store_true",
        help="time every kernel family that can run a case, in place of the peers; on GPUs",
    )
    measuring.add_argument(
        "--models",
        action="store_true",
        help="time whole training steps, with our operators and with those of plain JAX; the names "
        "given are then those of models",
    )
    measuring.add_argument(
        "--rounds", type=_positive, help="how often each contender is timed (default: 5, quick: 3)"
    )
    measuring.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        type=pathlib.Path,
        metavar="FILE",
        help="measure nothing, and show the results in these files, of one device",
    )
    showing = parser.add_argument_group("what is made of it, besides tables on a terminal")
    showing.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    showing.add_argument(
        "--markdown",
        metavar="FILE",
        help="write the tables as Markdown; - prints them instead of those for a terminal",
    )
    showing.add_argument(
        "--plot", type=pathlib.Path, metavar="DIR", help="draw rooflines, speed-ups and scaling"
    )
    showing.add_argument(
        "--compare",
        type=pathlib.Path,
        metavar="OLD.json",
        help="show what got faster or slower beyond the spread; exit code 1 if anything got slower",
    )
    showing.add_argument(
        "--update-readme",
        action="store_true",
        help="write the README's picture and the table of docs/results.md, in a clone",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


# argparse names the function when int() refuses the text: "invalid integer value".
_positive.__name__ = "integer"


def run(args: argparse.Namespace) -> int:
    """Measures, or reads what was measured, and shows it; returns the exit code.

    0: measured. 1: our own operator failed or was wrong on a row, or --compare found a row slower
    beyond the spread, or the run was interrupted. 2: what was asked for cannot be done.
    """
    try:
        # Steps that can fail in the end are tried first: a measurement takes minutes.
        _refuse_no_folder(args)
        if args.models:
            return _run_models(args)
        draw = _plotter(args)
        old = results.load(args.compare) if args.compare else None
        document = _read(args) if args.sources else _measure(args)
        if old is not None:
            _refuse_other_device(old, document, "the results to compare with")
        _write(args, document, draw)
    except (UsageError, ResultsError, ProfileError) as error:
        print(f"jaxops bench: {error}", file=sys.stderr)
        return 2
    failed = document.unfinished or any(row.ours.us is None for row in document.rows)
    if old is not None:
        changes = figures.compare(old, document)
        failed |= any(change.verdict == "slower" for change in changes)
    return int(bool(failed))


def _run_models(args: argparse.Namespace) -> int:
    others = (*_CHOICES, "peers", "kernels", "rounds", "plot", "compare", "update_readme")
    given = [name for name in others if getattr(args, name)]
    if args.sources:
        given += [name for name in ("operators", "platform", "quick") if getattr(args, name)]
    if given:
        mode = "--models --from" if args.sources else "--models"
        raise UsageError(f"{mode} goes without {', '.join(given)}")
    if args.sources and len(args.sources) > 1:
        raise UsageError(f"--models --from takes one file, got {len(args.sources)}")

    def describe(platform: str, device: jax.Device) -> dict[str, Any]:
        return _about(args, platform, device, ("jax", "jaxlib", "jaxops", "flax", "optax", "numpy"))

    try:
        return models.run(
            args.operators,
            device=lambda: _device(args.platform),
            describe=describe,
            quick=args.quick,
            json=args.json,
            markdown=args.markdown,
            source=args.sources[0] if args.sources else None,
        )
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error


# --- measuring -----------------------------------------------------------------------------------


def _read(args: argparse.Namespace) -> Document:
    measuring = ("operators", "platform", "quick", *_CHOICES, "peers", "kernels", "rounds")
    given = [name for name in measuring if getattr(args, name)]
    if given:
        raise UsageError(f"--from measures nothing, so it goes without {', '.join(given)}")
    documents = [results.load(file) for file in args.sources]
    for file, other in zip(args.sources, documents, strict=True):
        _refuse_other_device(other, documents[0], f"the results in {file}")
    return results.merge(documents)


def _measure(args: argparse.Namespace) -> Document:
    benchmarks = _benchmarks(args)
    device = _device(args.platform)
    platform = "cuda" if device.platform == "gpu" else device.platform
    if platform not in PLATFORMS:
        raise UsageError(f"there is no clock for platform {platform}: --platform cpu or cuda")
    if args.kernels:
        if platform != "cuda":
            raise UsageError("--kernels times the kernel families of GPUs, and needs one")
        try:
            benchmarks = [families.with_families(benchmark) for benchmark in benchmarks]
        except RuntimeError as error:  # without the CUDA module
            raise UsageError(str(error)) from error
    efforts = runner.QUICK_EFFORTS if args.quick else runner.EFFORTS
    effort = efforts[platform]
    if args.rounds:
        effort = dataclasses.replace(effort, rounds=args.rounds)
    machine = runner.Machine(platform, device, effort, runner.Stopwatch())
    works, absent = _works(benchmarks, args, platform)
    packages = ["jax", "jaxlib", "jaxops", "numpy"]
    if any(peer.torch for work in works for peer in work.peers):
        packages.append("torch")
    about = _about(args, platform, device, packages)
    rows, planned = [], sum(len(work.directions) for work in works)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Standard output is the report's: the progress goes where messages go.
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        # Every row is reported twice, when it is compiled and when its values are checked.
        task = progress.add_task("starting", total=ceilings.PROBES + 2 * planned)

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        with machine.stopwatch("ceilings"):
            found = ceilings.measure(machine.clock, device, platform, args.quick, advance)
        try:
            for row in runner.run(works, machine, advance):
                rows.append(row)
        except KeyboardInterrupt:
            # Minutes of measuring are not to be lost; the report says what is missing.
            if not rows:
                raise
    return Document(
        **about,
        ceilings=found,
        absent=absent,
        unfinished=planned - len(rows),
        shapes={benchmark.operator: benchmark.shape for benchmark in benchmarks},
        rows=rows,
        seconds=dict(machine.stopwatch.seconds),
    )


def _benchmarks(args: argparse.Namespace) -> list[Benchmark]:
    known = registry.operators()
    for name in args.operators:
        if name not in known:
            raise UsageError(f"there is no benchmark of {name!r}; there are {', '.join(known)}")
    found = [registry.load(name) for name in dict.fromkeys(args.operators or known)]
    if args.shape is None:
        if args.dtype or args.option:
            raise UsageError("--dtype and --option go with --shape")
        return _grids(found) if args.grid else found
    if len(args.operators) != 1 or args.cases or args.without or args.grid:
        raise UsageError(
            "--shape goes with one operator, and without --cases, --without and --grid"
        )
    try:
        case = own.make_case(found[0], args.shape, args.dtype or "float32", args.option or ())
    except ValueError as error:
        raise UsageError(str(error)) from error
    return [dataclasses.replace(found[0], cases=[case])]


def _grids(benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
    found = [dataclasses.replace(b, cases=b.grid, grid=()) for b in benchmarks if b.grid]
    if not found:
        names = ", ".join(benchmark.operator for benchmark in benchmarks)
        raise UsageError(f"--grid: there is no grid of {names}")
    return found


def _device(platform: str | None) -> jax.Device:
    if platform:
        jax.config.update("jax_platforms", PLATFORMS[platform])
    try:
        device = jax.devices(platform)[0]
        # JAX calls AMD's GPUs "gpu" as well, and they have another profiler.
        return jax.devices("cuda")[0] if device.platform == "gpu" else device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"no {platform or 'usable'} device here. {error}") from error


def _processor() -> str:
    """The name of the host's processor, where Linux tells it; JAX calls every one "cpu"."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, host.processor() or host.machine())


def _works(
    benchmarks: Sequence[Benchmark], args: argparse.Namespace, platform: str
) -> tuple[list[runner.Work], dict[str, str]]:
    """The work to be measured, and the peers that are absent, with the reasons."""
    patterns = None if args.peers is None else [p.strip() for p in args.peers.split(",")]
    everyone = [p for b in benchmarks for p in b.peers]
    for pattern in patterns or ():
        if not any(fnmatch.fnmatchcase(p.name, pattern) for p in everyone):
            names = ", ".join(dict.fromkeys(p.name for p in everyone))
            raise UsageError(f"no peer is called {pattern!r}; there are {names}")
    asked = [p for p in everyone if _asked_for(p, patterns)]
    absence = contenders.torch_absence(platform) if any(p.torch for p in asked) else None
    absent = {p.name: absence for p in asked if p.torch and absence}
    if patterns and absent:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in absent.items()))
    works = []
    for benchmark in benchmarks:
        cases = [
            case
            for case in benchmark.cases
            if (args.cases is None or any(map(case.matches, args.cases)))
            and not any(map(case.matches, args.without or ()))
        ]
        for case in cases[:1] if args.quick else cases:
            peers = tuple(
                p
                for p in benchmark.peers
                if p in asked
                and p.name not in absent
                and (patterns or not args.quick or not p.costly)
            )
            works.append(runner.Work(benchmark, case, peers))
    if not works:
        names = ", ".join(benchmark.operator for benchmark in benchmarks)
        chosen = " or ".join(map(repr, args.cases or ["*"]))
        left_out = "".join(f" and not {pattern!r}" for pattern in args.without or ())
        raise UsageError(f"no case of {names} matches {chosen}{left_out}")
    return works, absent


def _asked_for(peer: Peer, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatch.fnmatchcase(peer.name, p) for p in patterns)


def _about(
    args: argparse.Namespace, platform: str, device: jax.Device, packages: Sequence[str]
) -> dict[str, Any]:
    """The fields of a document that say what was measured, when and where."""
    return {
        "command": _command(args),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform,
        "device": _processor() if platform == "cpu" else device.device_kind,
        "threads": len(os.sched_getaffinity(0)),
        "versions": {
            "python": host.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }


def _command(args: argparse.Namespace) -> str:
    """The command that measures the same again."""
    words = ["python", "-m", "jaxops", "bench", *args.operators]
    for option in ("platform", *(c for c in _CHOICES if c != "grid"), "peers", "rounds"):
        value = getattr(args, option)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for each in values:
            words += [f"--{option}", str(each)]
    words += [f"--{name}" for name in ("grid", "kernels", "models", "quick") if getattr(args, name)]
    return shlex.join(words)


# --- showing -------------------------------------------------------------------------------------


def _refuse_other_device(old: Document, new: Document, what: str) -> None:
    if (old.platform, old.device) != (new.platform, new.device):
        raise UsageError(
            f"{what} are those of another device: {old.device} ({old.platform}), not "
            f"{new.device} ({new.platform})"
        )


def _refuse_no_folder(args: argparse.Namespace) -> None:
    pages = [pathlib.Path(args.markdown)] if args.markdown not in (None, "-") else []
    for file in [*pages, *([args.json] if args.json else [])]:
        if not file.absolute().parent.is_dir():
            raise UsageError(f"{file} cannot be written: its folder is not there")
    if args.update_readme and not RESULTS_PAGE.is_file():
        raise UsageError(f"--update-readme works in a clone of jaxops: there is no {RESULTS_PAGE}")


def _plotter(args: argparse.Namespace):
    if args.plot is None:
        return None
    try:
        from jaxops._bench import plots
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UsageError(
            "--plot needs matplotlib, which is not installed: pip install jaxops[bench]"
        ) from error
    return plots.draw


def _write(args: argparse.Namespace, document: Document, draw) -> None:
    if args.json:
        results.save(document, args.json)
    blocks = report.blocks(document)
    if args.compare:
        blocks += report.comparison(results.load(args.compare), document)
    if args.markdown == "-":
        print(report.markdown(blocks), end="")
    else:
        report.show(blocks, Console(highlight=False))
        if args.markdown:
            pathlib.Path(args.markdown).write_text(report.markdown(blocks))
    if draw is not None:
        for line in draw(document, args.plot):
            print(line, file=sys.stderr)
    if args.update_readme:
        report.update_results(document, RESULTS_PAGE)
        PICTURE.write_text(overview.svg(document))
