"""Trains a small conv-attention language model on Python's own source code."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from jaxops._core import native

if TYPE_CHECKING:
    from rich.console import Console

    from jaxops._cli import char_lm

DEFAULT_STEPS = 500
# Platforms that JAX looks for. The CPU comes second to "cuda": told to look for "cuda" alone, on a
# machine without a GPU, JAX fails an assertion that says nothing.
PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu"}
EXTRAS = {"flax", "optax", "rich"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jaxops demo`."""
    parser.add_argument(
        "--steps",
        type=_integer(1),
        default=DEFAULT_STEPS,
        help="training steps (default %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=_integer(0),
        default=0,
        help="decides every random choice (default %(default)s)",
    )
    parser.add_argument(
        "--platform", choices=tuple(PLATFORMS), help="where to run (default: where JAX would)"
    )


def _integer(low: int) -> Callable[[str], int]:
    # argparse names the function when int() refuses the text: "invalid integer value".
    def integer(text: str) -> int:
        number = int(text)
        if number < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {number}")
        return number

    return integer


def run(args: argparse.Namespace) -> int:
    """Trains, measures and shows; returns the exit code.

    0: done. 1: trained for the default number of steps or more, and not better than a bigram
    model. 2: the platform, a package or the text is absent.
    """
    if args.platform:
        jax.config.update("jax_platforms", PLATFORMS[args.platform])
    try:
        device = jax.devices(args.platform)[0]
    except (RuntimeError, AssertionError) as error:
        print(f"jaxops demo: no {args.platform or 'usable'} device here. {error}", file=sys.stderr)
        return 2
    try:
        from rich.console import Console

        from jaxops._cli import char_lm
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(f"jaxops demo: {package} is not installed: pip install jaxops[flax]", file=sys.stderr)
        return 2

    console = Console(highlight=False)
    console.print(f"Platform {device.platform}, {device.device_kind}, JAX {jax.__version__}")
    for status in native.status():
        console.print(f"jaxops handlers for {status.platform}: {_handlers(status)}", markup=False)

    start = time.perf_counter()
    try:
        with jax.default_device(device):
            figures = _train(console, char_lm.Config(), args.steps, args.seed)
    except FileNotFoundError as error:
        # Some Pythons come without the source of their standard library.
        print(f"jaxops demo: {error}", file=sys.stderr)
        return 2
    _show(console, figures, time.perf_counter() - start)

    if figures.model_bits < figures.bigram_bits:
        return 0
    if args.steps < DEFAULT_STEPS:
        console.print(f"Not yet below the bigram model: {DEFAULT_STEPS} steps are needed.")
        return 0
    print("jaxops demo: the trained model is no better than a bigram model", file=sys.stderr)
    return 1


def _handlers(status: native.PlatformStatus) -> str:
    if status.available:
        return f"{len(status.targets)} registered"
    return f"none ({status.reason})"


def _train(console: Console, config: char_lm.Config, steps: int, seed: int) -> char_lm.Figures:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from jaxops._cli import char_lm

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, state="compiling")

        def report(done: int, bits: float, speed: float) -> None:
            state = f"{bits:.3f} bits/character, {speed:,.0f} characters/s"
            progress.update(task, completed=done, state=state)

        return char_lm.run(config, steps, seed, report)


def _show(console: Console, figures: char_lm.Figures, seconds: float) -> None:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{figures.held_out_characters:,} characters of modules held out")
    table.add_column("model")
    table.add_column("bits per character", justify="right")
    table.add_row("unigram", f"{figures.unigram_bits:.3f}")
    table.add_row("bigram", f"{figures.bigram_bits:.3f}")
    table.add_row("conv-attention", f"{figures.model_bits:.3f}")
    console.print(table)
    # Text and not str: generated code is full of the square brackets that rich reads as markup.
    console.print(Panel(Text(figures.sample.strip("\n")), title="a sample of the model"))
    console.print(
        f"sampled {figures.cached_speed:,.0f} characters/s with the cache of inputs, "
        f"{figures.uncached_speed:,.0f} from a window of inputs each"
    )
    console.print(f"{seconds:.0f} s in all, compilation included")
