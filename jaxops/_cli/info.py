"""Shows versions, devices and registered handlers, or which CUDA kernels take a call."""

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

from jaxops._cli import kernels
from jaxops._core import native

PACKAGES = ("jax", "jaxlib", "jaxops", "flax", "optax", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jaxops info`."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document on standard output"
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
        _show(found)
    return 0


def collect() -> dict[str, Any]:
    """Versions (None where a package is absent), devices and handlers, as JSON would have them.

    "devices_error" says why JAX has no device, and is None when it has one.
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
            {"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in jax.devices()
        ]
    except (RuntimeError, AssertionError) as error:
        # A machine where JAX finds no device is just where this report is wanted. JAX asserts that
        # there is one when it was told to look for NVIDIA GPUs only.
        devices_error = f"{type(error).__name__}: {error}"
    return {
        "versions": versions,
        "devices": devices,
        "devices_error": devices_error,
        "handlers": [
            dataclasses.asdict(status) | {"reason": native.missing_kernels(status.platform)}
            for status in native.status()
        ],
    }


def _show(found: dict[str, Any]) -> None:
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
        [(name, version or "not installed") for name, version in found["versions"].items()],
    )
    if found["devices_error"]:
        console.print(f"No device: {found['devices_error']}", markup=False)
    else:
        table(
            "Devices",
            ("id", "platform", "kind"),
            [(str(d["id"]), d["platform"], d["kind"]) for d in found["devices"]],
        )
    table(
        "Handlers",
        ("platform", "built with", "registered, or why not"),
        [
            (h["platform"], h["build"] or "", h["reason"] or "\n".join(h["targets"]) or "none")
            for h in found["handlers"]
        ],
    )
