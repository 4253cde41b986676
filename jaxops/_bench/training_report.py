"""Shows what `training_steps` measured."""

from __future__ import annotations

from jaxops._bench.report import Block, Grid, number, ratio
from jaxops._bench.results import OURS
from jaxops._bench.training_steps import TOLERANCE, Document, Outcome, Row


def blocks(document: Document) -> list[Block]:
    """Everything there is to say about a run."""
    versions = ", ".join(f"{name} {version}" for name, version in document.versions.items())
    found: list[Block] = [
        f"{document.device} ({document.platform}), {document.threads} host threads; {versions}",
        f"{document.date}: {document.command}",
    ]
    if document.unfinished:
        found.append(f"Interrupted: {document.unfinished} models were not measured.")
    if document.rows:
        found += [
            _speeds(document.rows),
            "memory: arguments, results and temporaries. host: until the call of a step returns.",
            _losses(document.rows),
            "rounding: what a rounding of every parameter changes in the losses of plain JAX. "
            f"equal: a difference of at most {TOLERANCE} times as much.",
            *(
                f"{row.model}: {row.sizes}, {number(row.parameters / 1e6)} M parameters"
                for row in document.rows
            ),
        ]
    found += [
        f"Not measured: {row.model}, {name}: {outcome.error}"
        for row in document.rows
        for name, outcome in row.outcomes.items()
        if outcome.error
    ]
    return found


def _speeds(rows: list[Row]) -> Grid:
    cells = [
        (
            row.model if name == OURS else "",
            name,
            number(outcome.ms and 1e3 / outcome.ms),
            _speed_up(row) if name == OURS else "",
            number(outcome.memory and outcome.memory / 1e6),
            number(_compile_seconds(outcome)),
            number(outcome.host_ms),
            *([number(outcome.device_ms)] if _on_gpu(rows) else []),
        )
        for row in rows
        for name, outcome in row.outcomes.items()
    ]
    columns = ("model", "operators", "steps/s", "speed-up", "memory MB", "compile s", "host ms")
    on_gpu = ("GPU ms",) if _on_gpu(rows) else ()
    return Grid("training steps", (*columns, *on_gpu), cells)


def _on_gpu(rows: list[Row]) -> bool:
    return any(o.device_ms is not None for row in rows for o in row.outcomes.values())


def _speed_up(row: Row) -> str:
    ours, plain = (outcome.ms for outcome in row.outcomes.values())
    return ratio(plain / ours if plain and ours else None)


def _compile_seconds(outcome: Outcome) -> float | None:
    if outcome.trace_s is None or outcome.compile_s is None:
        return None
    return outcome.trace_s + outcome.compile_s


def _losses(rows: list[Row]) -> Grid:
    cells = []
    for row in rows:
        losses = row.outcomes[OURS].losses
        cells.append(
            (
                row.model,
                f"{losses[0]:.5g} to {losses[-1]:.5g}" if losses else number(None),
                *map(_small, (row.difference, row.rounding)),
                "yes" if row.agrees else "no",
            )
        )
    columns = ("model", "losses", "difference", "rounding", "equal")
    return Grid("losses of the first steps", columns, cells, left=1)


def _small(value: float | None) -> str:
    return number(None) if value is None else f"{value:.1e}"
