"""Times whole training steps of models, with our operators and with those of plain JAX."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxops._bench import report, results
from jaxops._bench.results import OURS

if TYPE_CHECKING:
    from jaxops._bench.models import Model
    from jaxops._bench.training_steps import Document

#: Packages that the models need beyond those of jaxops itself.
EXTRAS = {"flax", "optax"}


def run(
    names: Sequence[str],
    *,
    device: Callable[[], jax.Device],
    describe: Callable[[str, jax.Device], dict],
    quick: bool,
    json: pathlib.Path | None,
    markdown: str | None,
    source: pathlib.Path | None,
) -> int:
    """Measures, or reads what was measured, and shows it; returns the exit code.

    0: measured. 1: a model failed with our operators, or its losses differ by more than rounding,
    or the run was interrupted.

    Args:
      names: of the models; none for all.
      device: gives the device to measure on.
      describe: gives the fields of a document that say where and when, of platform and device.
      quick: small forms, and little of them.
      json, markdown: the files to write; "-" prints Markdown.
      source: a file to read in place of measuring.

    Raises:
      ValueError: there is no model of a name.
      ResultsError: a file cannot be read or written.
      ImportError: Flax or optax is not installed.
    """
    try:
        from jaxops._bench import training_report, training_steps
        from jaxops._bench.models import MODELS
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise ImportError(
            f"--models needs {package}, which is not installed: pip install jaxops[flax]"
        ) from error
    for name in names:
        if name not in MODELS:
            raise ValueError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    if source is not None:
        document = training_steps.load(source)
    else:
        models = [MODELS[name] for name in dict.fromkeys(names or MODELS)]
        document = _measure(models, device(), describe, quick, json)
    if json is not None:
        results.save(document, json)
    blocks = training_report.blocks(document)
    if markdown == "-":
        print(report.markdown(blocks), end="")
    else:
        report.show(blocks, Console(highlight=False))
        if markdown:
            pathlib.Path(markdown).write_text(report.markdown(blocks))
    failed = document.unfinished or any(
        row.outcomes[OURS].error or not row.agrees for row in document.rows
    )
    return int(bool(failed))


def _measure(
    models: Sequence[Model],
    device: jax.Device,
    describe: Callable[[str, jax.Device], dict],
    quick: bool,
    json: pathlib.Path | None,
) -> Document:
    from jaxops._bench import training_steps

    platform = "cuda" if device.platform == "gpu" else device.platform
    about = describe(platform, device)
    rows: list[training_steps.Row] = []

    def document() -> Document:
        return training_steps.Document(**about, unfinished=len(models) - len(rows), rows=rows)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("starting", total=training_steps.REPORTS * len(models))

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        try:
            for model in models:
                rows.append(
                    training_steps.measure(model, platform, device, quick=quick, report=advance)
                )
                if json is not None:  # minutes of measuring are not to be lost
                    results.save(document(), json)
        except KeyboardInterrupt:
            if not rows:
                raise
            print("jaxops bench: interrupted", file=sys.stderr)
    return document()
