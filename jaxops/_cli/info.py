"""Shows versions and devices, what keeps kernels from running, or which kernels take a call."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
from typing import Any

import jax
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from jaxops._cli import doctor, kernels
from jaxops._core import native

PACKAGES = ("jax", "jaxlib", "jaxops", "flax", "optax", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jaxops info`."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document on standard output"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="list the names of the registered handlers"
    )
    kernels.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints what `collect` found, as tables or as JSON; returns 0, or what `kernels.run` does."""
    if args.kernels:
        return kernels.run(args)
    found = collect()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found, args.verbose)
    return 0


def collect() -> dict[str, Any]:
    """Versions (None where a package is absent), devices and handlers, as JSON would have them.

    "devices_error" says why JAX has no device, and is None when it has one. "gpus" are those of the
    driver, which JAX need not see. "findings" judge all of it; one with "advice" is a problem.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    devices, devices_error = [], None
    try:
        devices = [
            {
                "id": d.id,
                "platform": d.platform,
                "kind": d.device_kind,
                "compute_capability": getattr(d, "compute_capability", None),
            }
            for d in jax.devices()
        ]
    except (RuntimeError, AssertionError) as error:
        # A machine where JAX finds no device is just where this report is wanted. JAX asserts that
        # there is one when it was told to look for NVIDIA GPUs only.
        devices_error = f"{type(error).__name__}: {error}"
    found = {
        "versions": versions,
        "devices": devices,
        "devices_error": devices_error,
        "handlers": [
            dataclasses.asdict(status) | {"reason": native.missing_kernels(status.platform)}
            for status in native.status()
        ],
        "gpus": [dataclasses.asdict(gpu) for gpu in doctor.gpus()],
        "gpu_files": doctor.device_files(),
        "plugins": doctor.plugins(),
        "environment": doctor.environment(),
    }
    return found | {"findings": [dataclasses.asdict(f) for f in doctor.diagnose(found)]}


def _show(found: dict[str, Any], verbose: bool) -> None:
    console = Console(highlight=False)

    def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        grid = Table(
            *(Column(c, overflow="fold") for c in columns), title=title, title_justify="left"
        )
        for row in rows:
            # Text and not str: reasons may hold the square brackets that rich reads as markup.
            grid.add_row(*map(Text, row))
        console.print(grid)

    table(
        "Versions",
        ("package", "version"),
        [
            *((name, version or "not installed") for name, version in found["versions"].items()),
            *found["plugins"].items(),
        ],
    )
    if found["devices_error"]:
        console.print(f"No device: {found['devices_error']}", markup=False)
    else:
        table(
            "Devices",
            ("id", "platform", "kind", "compute capability"),
            [
                (str(d["id"]), d["platform"], d["kind"], str(d["compute_capability"] or ""))
                for d in found["devices"]
            ],
        )
    table(
        "Handlers",
        ("platform", "built with", "registered"),
        [(h["platform"], h["build"] or "", _handlers(h, verbose)) for h in found["handlers"]],
    )
    if found["environment"]:
        table("Environment", ("variable", "value"), list(found["environment"].items()))
    for finding in found["findings"]:
        problem = finding["advice"] is not None
        mark = Text("✗ ", "bold red") if problem else Text("✓ ", "green")
        console.print(Text.assemble(mark, finding["fact"]))
        if problem:
            console.print(Text(f"  {finding['advice']}", "bold"))


def _handlers(handlers: dict[str, Any], verbose: bool) -> str:
    targets = handlers["targets"]
    return "\n".join(targets) if verbose and targets else str(len(targets) or "none")
