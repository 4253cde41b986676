"""Draws a results file: a roofline, the speed-ups and the scaling of each operator."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxops._bench import ceilings, figures
from jaxops._bench.results import OURS, Document, ResultsError, Row

FORMATS = ("svg", "png")
# The same results give the same bytes.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "jaxops", "font.size": 8}
_METADATA = {"svg": {"Date": None}, "png": {"Software": None}}


def draw(document: Document, folder: pathlib.Path) -> list[str]:
    """Writes the figures, as SVG and PNG; returns lines that say which, or why there is none.

    Raises:
      ResultsError: the folder cannot be written to.
    """
    said = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for operator, group in itertools.groupby(document.rows, key=lambda row: row.operator):
            rows = [row for row in group if row.ours.us is not None]
            ordinary = [row for row in rows if row.group != "scaling"]
            computing = [row for row in ordinary if row.flops]
            compared = [row for row in ordinary if _timed_peers([row])]
            scaling = [row for row in rows if row.group == "scaling"]
            for name, figure_of, shown in (
                ("roofline", _roofline, computing),
                ("speedup", _speedup, compared),
                ("scaling", _scaling, scaling),
            ):
                if not shown:
                    said.append(f"no {name} of {operator}: no row has what it shows")
                    continue
                with matplotlib.rc_context(_STYLE):
                    figure = figure_of(document, operator, shown)
                    for kind in FORMATS:
                        file = folder / f"{operator}-{name}.{kind}"
                        figure.savefig(file, metadata=_METADATA[kind], bbox_inches="tight")
                        said.append(f"wrote {file}")
    except OSError as error:
        raise ResultsError(f"{folder} cannot be written to: {error.strerror}") from error
    return said


def _timed_peers(rows: list[Row]) -> list[str]:
    return [
        peer
        for peer in figures.peers(rows)
        if any(figures.speedup(row, peer) is not None for row in rows)
    ]


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, height), dpi=150)
    return figure, figure.add_subplot()


def _roofline(document: Document, operator: str, rows: list[Row]) -> Figure:
    """FLOP/s over FLOPs a byte, under the lines of memory and arithmetic."""
    figure, axes = _figure(5)
    copy = document.ceilings[ceilings.COPY]
    intensities = [row.flops / row.bytes for row in rows]
    for unit in dict.fromkeys(row.unit for row in rows):
        peak = document.ceilings[unit]
        ends = [min(intensities) / 2, peak / copy, max(*intensities, peak / copy) * 2]
        axes.plot(ends, [min(peak, copy * x) / 1e12 for x in ends], label=f"copy, {unit}")
    for direction in dict.fromkeys(row.direction for row in rows):
        points = [
            (row.flops / row.bytes, figures.teraflops(row, row.ours))
            for row in rows
            if row.direction == direction
        ]
        axes.plot(*zip(*points, strict=True), "o", markersize=3, label=direction)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs a byte, least of both",
        ylabel="TFLOP/s",
        title=f"{operator} under the roofline of {document.device}",
    )
    axes.legend()
    return figure


def _speedup(document: Document, operator: str, rows: list[Row]) -> Figure:
    """A group of bars a row, one bar a peer."""
    peers = _timed_peers(rows)
    figure, axes = _figure(1 + 0.14 * len(rows) * len(peers))
    height = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        bars = {
            y: ratio
            for y, row in enumerate(rows)
            if (ratio := figures.speedup(row, peer)) is not None
        }
        places = [y + (i - (len(peers) - 1) / 2) * height for y in bars]
        # From 1 on, so that what is slower points the other way.
        axes.barh(places, [r - 1 for r in bars.values()], height, left=1, label=peer)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(
        xscale="log",
        xlabel="time of the peer over ours",
        title=f"{operator} on {document.device}",
        ylim=(len(rows) - 0.5, -0.5),
    )
    axes.set_yticks(
        range(len(rows)), [f"{row.group} {row.case} {row.direction}" for row in rows], fontsize=6
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _scaling(document: Document, operator: str, rows: list[Row]) -> Figure:
    """Time over the bytes of the case, ours, the peers' and the limit."""
    figure, axes = _figure(5)
    for name in (OURS, *_timed_peers(rows)):
        points = [
            (row.bytes, row.outcomes[name].us)
            for row in rows
            if name in row.outcomes and row.outcomes[name].us is not None
        ]
        style: dict[str, Any] = {"linewidth": 1}
        if name == OURS:
            style = {"linewidth": 2, "color": "black"}
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=name, **style)
    limits = [(row.bytes, figures.limit(document, row)[0]) for row in rows]
    axes.plot(*zip(*limits, strict=True), "--", color="grey", label="limit")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="least bytes",
        ylabel="µs",
        title=f"{operator} {rows[0].direction} on {document.device}, as the work grows",
    )
    axes.legend()
    return figure
