"""Shows a results file: as tables on a terminal, as Markdown, and on docs/results.md."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxops._bench import ceilings, figures
from jaxops._bench.results import OURS, Document, Outcome, ResultsError, Row
from jaxops._bench.spec import OWN


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table: a title, the names of its columns, and the cells. The first `left` are words."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 2


Block = str | Grid


# --- the blocks of a report ----------------------------------------------------------------------


def blocks(document: Document) -> list[Block]:
    """Everything there is to say about a run."""
    found: list[Block] = _head(document)
    for operator, rows in itertools.groupby(document.rows, key=lambda row: row.operator):
        found += _operator(document, operator, list(rows))
    return [*found, *_summary(document)]


def _head(document: Document) -> list[Block]:
    versions = ", ".join(f"{name} {version}" for name, version in document.versions.items())
    clock = {"cuda": "time that the device was busy", "cpu": "time on the wall"}
    lines = [
        f"{document.device} ({document.platform}), {document.threads} host threads; {versions}",
        f"{document.date}: {document.command}",
        f"Times: {clock[document.platform]}, median of the rounds, ± half their range.",
    ]
    if document.seconds:
        phases = ", ".join(f"{name} {s:.1f}" for name, s in document.seconds.items())
        lines.append(f"Seconds of {sum(document.seconds.values()):.0f}: {phases}.")
    lines += [f"Not there: {name}: {reason}" for name, reason in document.absent.items()]
    if document.unfinished:
        lines.append(f"Interrupted: {document.unfinished} rows were not measured.")
    rows = [
        (name, _si(value, ceilings.UNITS[name.split()[0]]))
        for name, value in document.ceilings.items()
    ]
    return [*lines, Grid("ceilings of this machine", ("ceiling", "measured"), rows, left=1)]


def _operator(document: Document, operator: str, rows: list[Row]) -> list[Block]:
    own = [row for row in rows if row.group == OWN]
    ordinary = [row for row in rows if row.group not in ("scaling", OWN)]
    scaling = [row for row in rows if row.group == "scaling"]
    found: list[Block] = [*_own(document, own), *_not_timed(own)] if own else []
    if ordinary:
        found.append(_times(document, operator, ordinary))
        if any(row.target for row in ordinary):
            found.append(f"{_TARGET} a case that the project has set targets on")
        found += [*_not_timed(ordinary), _beside_time(operator, ordinary)]
    if scaling:
        found += [_scaling(operator, scaling), *_not_timed(scaling)]
    return found


def _own(document: Document, rows: list[Row]) -> list[Block]:
    """One case: a line a contender, and a pair of columns a direction."""
    names = list(dict.fromkeys(name for row in rows for name in row.outcomes))
    directions = [row.direction for row in rows]
    outcomes = {name: [row.outcomes.get(name, Outcome()) for row in rows] for name in names}
    cells = [
        (
            name,
            *itertools.chain.from_iterable(
                (number(outcome.us), "" if name == OURS else ratio(figures.speedup(row, name)))
                for row, outcome in zip(rows, outcomes[name], strict=True)
            ),
        )
        for name in names
    ]
    least = [(number(figures.limit(document, row)[0]), "") for row in rows]
    cells.append(("limit", *itertools.chain.from_iterable(least)))
    times = [(f"{direction} µs", "over ours") for direction in directions]
    title = f"{rows[0].operator} {rows[0].case}, shapes are {document.shapes[rows[0].operator]}"
    memory = [
        (name, *(number(o.memory and o.memory / 1e6) for o in outcomes[name])) for name in names
    ]
    return [
        Grid(title, ("", *itertools.chain.from_iterable(times)), cells, left=1),
        Grid("MB of arguments, results and temporaries", ("", *directions), memory, left=1),
    ]


def _times(document: Document, operator: str, rows: list[Row]) -> Grid:
    peers = figures.peers(rows)
    cells = []
    for row in rows:
        least, _ = figures.limit(document, row)
        ours = row.ours
        cells.append(
            (
                _case(row),
                row.direction,
                number(ours.us),
                number(ours.spread),
                _of(ours, lambda o, row=row: number(figures.gigabytes_per_second(row, o))),
                _of(ours, lambda o, row=row: number(figures.teraflops(row, o))),
                number(least),
                number(None) if ours.us is None else f"{least / ours.us:.0%}",
                *(ratio(figures.speedup(row, peer)) for peer in peers),
            )
        )
    columns = ("case", "direction", "µs", "±", "GB/s", "TFLOP/s", "limit µs", "of limit")
    return Grid(
        f"{operator} ({document.shapes[operator]}): times, and speed-up over each peer",
        (*columns, *peers),
        cells,
    )


def _scaling(operator: str, rows: list[Row]) -> Grid:
    peers = figures.peers(rows)
    cells = [
        (
            row.case,
            _si(row.bytes, "B"),
            number(row.ours.us),
            _of(row.ours, lambda o, row=row: number(figures.gigabytes_per_second(row, o))),
            *(number(row.outcomes[p].us if p in row.outcomes else None) for p in peers),
        )
        for row in rows
    ]
    columns = ("case", "least bytes", "µs", "GB/s", *(f"{p} µs" for p in peers))
    return Grid(f"{operator}: cost as the work grows, {rows[0].direction}", columns, cells, left=1)


def _beside_time(operator: str, rows: list[Row]) -> Grid:
    """The costs of a call other than its time: memory, and on a GPU what launching adds."""

    def shown(outcome: Outcome) -> str:
        found = []
        if outcome.memory is not None:
            found.append(f"{number(outcome.memory / 1e6)} MB")
        if outcome.us is not None and outcome.call_us is not None:
            found.append(f"{number(max(0.0, outcome.call_us - outcome.us))} µs")
        return " + ".join(found) or number(None)

    names = list(dict.fromkeys(n for r in rows for n, o in r.outcomes.items() if o.us is not None))
    cells = [
        (
            _case(row),
            row.direction,
            *(shown(row.outcomes[n]) if n in row.outcomes else number(None) for n in names),
        )
        for row in rows
    ]
    title = f"{operator}: MB of arguments, results and temporaries"
    if any(outcome.call_us is not None for row in rows for outcome in row.outcomes.values()):
        title += " + µs that a single call takes beyond its time on the device"
    return Grid(title, ("case", "direction", *names), cells)


_TARGET = "*"


def _case(row: Row) -> str:
    return f"{row.group} {row.case}{_TARGET * row.target}"


def _not_timed(rows: Iterable[Row]) -> list[str]:
    """Why contenders have no time, each reason once."""
    where = collections.defaultdict(list)
    for row in rows:
        for name, outcome in row.outcomes.items():
            if outcome.error:
                where[name, outcome.error].append(f"{row.case} {row.direction}")
    return [
        f"Not timed: {name}: {reason} ({_some(places)})" for (name, reason), places in where.items()
    ]


def _some(places: Sequence[str]) -> str:
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return places[0] + more


def _summary(document: Document) -> list[Block]:
    ordinary = [row for row in document.rows if row.group not in ("scaling", OWN)]
    cells = []
    for operator, rows in itertools.groupby(ordinary, key=lambda row: row.operator):
        rows = list(rows)
        for peer in figures.peers(rows):
            ratios = figures.speedups(rows, peer)
            if ratios:
                mean, worst = figures.geomean(ratios), min(ratios)
                cells.append((operator, peer, str(len(ratios)), ratio(mean), ratio(worst)))
    columns = ("operator", "peer", "rows", "geomean", "least")
    found: list[Block] = []
    if cells:
        found.append(Grid("speed-up over each peer", columns, cells))
    missed = [
        (row.operator, f"{row.case} {row.direction}", "; ".join(reasons))
        for row in ordinary
        if (reasons := figures.misses(document, row))
    ]
    if missed:
        columns = ("operator", "row", "missed")
        found.append(Grid("rows that miss the targets", columns, missed, left=3))
    if ordinary:
        found.append(f"{len(ordinary) - len(missed)} of {len(ordinary)} rows meet the targets.")
    return found


def comparison(old: Document, new: Document) -> list[Block]:
    """The rows that got faster or slower beyond the spread."""
    changes = figures.compare(old, new)
    cells = [
        (
            f"{c.row.operator} {c.row.case}",
            c.row.direction,
            f"{number(c.old.us)} ± {number(c.old.spread)}",
            f"{number(c.new.us)} ± {number(c.new.spread)}",
            f"{c.ratio:.3f}",
            c.verdict,
        )
        for c in changes
        if c.verdict != "same"
    ]
    counts = collections.Counter(c.verdict for c in changes)
    summary = (
        f"Against {old.date}: {counts['faster']} rows faster, {counts['slower']} slower, "
        f"{counts['same']} the same within the spread; {len(new.rows) - len(changes)} rows have no "
        "counterpart."
    )
    columns = ("case", "direction", "old µs", "new µs", "new / old", "verdict")
    return [Grid("beyond the spread", columns, cells), summary] if cells else [summary]


# --- cells ---------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Three significant digits or more, without an exponent."""
    if value is None:
        return "\N{EN DASH}"
    for least, decimals in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= least:
            return f"{value:,.{decimals}f}"
    return f"{value:.3g}"


def ratio(value: float | None) -> str:
    """A speed-up."""
    return number(None) if value is None else f"{value:.2f}x"


def _of(outcome: Outcome, show: Callable[[Outcome], str]) -> str:
    return number(None) if outcome.us is None else show(outcome)


def _si(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m")):
        if value >= factor:
            return f"{number(value / factor)} {prefix}{unit}"
    return f"{number(value / 1e-6)} µ{unit}"


# --- ways to show blocks -------------------------------------------------------------------------


def show(shown: Iterable[Block], console: Console) -> None:
    """Prints blocks on a terminal; a table that is wider than it becomes several."""
    for block in shown:
        # Text and not str: what others say may hold the square brackets that rich reads as markup.
        if isinstance(block, str):
            console.print(Text(block))
            continue
        console.print()
        for i, columns in enumerate(_fitting(block, console.width)):
            table = Table(title=None if i else block.title, title_justify="left", box=None)
            for column in columns:
                left = column < block.left
                name = _heading(block, column)
                justify = "left" if left else "right"
                table.add_column(name, justify=justify, vertical="bottom", no_wrap=not left)
            for row in block.rows:
                table.add_row(*(Text(row[column]) for column in columns))
            console.print(table)


def _heading(grid: Grid, column: int) -> str:
    # The names of peers are wider than what is said of them.
    name = grid.columns[column]
    return name if column < grid.left else name.replace(" ", "\n")


#: Wider columns of words are folded.
_MAX_WORDS = 34


def _fitting(grid: Grid, width: int) -> Iterable[list[int]]:
    """The columns of each table: those of words, and as many others as there is room for."""
    widths = [
        max(map(len, [*_heading(grid, i).split("\n"), *(row[i] for row in grid.rows)])) + 2
        for i in range(len(grid.columns))
    ]
    words = list(range(grid.left))
    room = width - sum(min(widths[i], _MAX_WORDS) for i in words)
    columns, taken = list(words), 0
    for i in range(grid.left, len(widths)):
        if len(columns) > grid.left and taken + widths[i] > room:
            yield columns
            columns, taken = list(words), 0
        columns.append(i)
        taken += widths[i]
    yield columns


def markdown(shown: Iterable[Block]) -> str:
    """Blocks as Markdown."""
    parts = []
    for block in shown:
        if isinstance(block, str):
            parts.append(block)
            continue
        if block.title:
            parts.append(f"**{block.title}**")
        rule = [":--" if i < block.left else "--:" for i in range(len(block.columns))]
        lines = [block.columns, rule, *block.rows]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(parts) + "\n"


# --- the page of results -------------------------------------------------------------------------

MARKERS = ("<!-- benchmarks -->", "<!-- /benchmarks -->")


def results_section(document: Document) -> str:
    """The rows with targets, and how far all rows are from each peer."""
    versions = ", ".join(
        f"{name} {document.versions[name]}"
        for name in ("jax", "jaxops", "torch")
        if name in document.versions
    )
    head = (
        f"{document.device}, {versions}, {document.date[:10]}, `{document.command}`. Times in µs, "
        "medians; the limit is what the measured rates of copying and arithmetic allow. A speed-up "
        "below 1 means that the peer is ahead."
    )
    rows = [row for row in document.rows if row.target]
    columns = ("operator", "case", "direction", "limit", "jaxops", "best of XLA", "best of PyTorch")
    cells = [
        (
            f"`{row.operator}` ({document.shapes[row.operator]})",
            row.case,
            row.direction,
            number(figures.limit(document, row)[0]),
            number(row.ours.us),
            _best(row, torch=False),
            _best(row, torch=True),
        )
        for row in rows
    ]
    means = []
    for operator, group in itertools.groupby(document.rows, key=lambda row: row.operator):
        group = list(group)
        shown = [
            f"{peer} {ratio(figures.geomean(ratios))} ({ratio(min(ratios))} to "
            f"{ratio(max(ratios))}, {len(ratios)} rows)"
            for peer in figures.peers(group)
            if (ratios := figures.speedups(group, peer))
        ]
        ordinary = [row for row in group if row.group != "scaling"]
        met = sum(not figures.misses(document, row) for row in ordinary)
        means.append(
            f"`{operator}`, geomean of the speed-ups over each peer (least to most): "
            f"{', '.join(shown)}. {met} of {len(ordinary)} rows meet the targets."
        )
    return markdown([head, Grid("", columns, cells, left=3), *means])


def _best(row: Row, torch: bool) -> str:
    peer = figures.best_peer(row, torch)
    return number(None) if peer is None else f"{number(row.outcomes[peer].us)} ({peer})"


def update_results(document: Document, file: pathlib.Path) -> None:
    """Replaces the lines between the markers of a page.

    Raises:
      ResultsError: the file is not there, or lacks the markers.
    """
    try:
        text = file.read_text()
    except OSError as error:
        raise ResultsError(f"{file} cannot be read: {error.strerror}") from error
    before, start, rest = text.partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (start and end):
        raise ResultsError(f"{file} lacks the lines {' and '.join(MARKERS)}")
    file.write_text(f"{before}{start}\n{results_section(document)}{end}{after}")
