"""Draws the README's picture: the speed-ups of every operator over its fastest peer.

The SVG is written without a plotting library, so that a results file gives the same bytes on every
machine.
"""

from __future__ import annotations

import itertools
import math
from xml.sax.saxutils import escape

from jaxops._bench import figures
from jaxops._bench.results import Document, Row

_WIDTH = 760
_LEFT, _RIGHT = 190, 70  # margins, for the operators' names and their means
_TOP, _BOTTOM = 76, 52
_LINE = 34
_BAR = 14


def speedups(document: Document) -> dict[str, list[float]]:
    """The speed-up of each row over its fastest peer, by operator; scaling left out."""
    found = {}
    for operator, rows in itertools.groupby(document.rows, key=lambda row: row.operator):
        ratios = [_over_fastest(row) for row in rows if row.group != "scaling"]
        if timed := [ratio for ratio in ratios if ratio is not None]:
            found[operator] = timed
    return found


def _over_fastest(row: Row) -> float | None:
    ratios = [figures.speedup(row, peer) for peer in figures.peers([row])]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def svg(document: Document) -> str:
    """The picture: a bar up to the geometric mean of each operator, and a dot for each row."""
    shown = speedups(document)
    ratios = [1.0, *itertools.chain(*shown.values())]
    first, last = math.floor(math.log2(min(ratios))), math.ceil(math.log2(max(ratios)))
    bottom = _TOP + _LINE * len(shown)

    def x(ratio: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log2(ratio) - first) / max(1, last - first)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + _BOTTOM}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(16, 26, "Speed-up over the fastest of XLA and PyTorch", size=16),
        _text(16, 46, f"{document.device}, {document.date[:10]}", fill="#555"),
    ]
    for power in range(first, last + 1):
        at = x(2.0**power)
        color = "#222" if power == 0 else "#ddd"
        lines.append(f'<path d="M{at:.1f} {_TOP - 6}V{bottom}" stroke="{color}"/>')
        lines.append(_text(at, _TOP - 12, f"{2.0**power:g}\u00d7", anchor="middle", fill="#555"))
    for i, (operator, timed) in enumerate(shown.items()):
        y = _TOP + _LINE * (i + 0.5)
        mean = figures.geomean(timed)
        low, high = sorted((x(1), x(mean)))
        lines += [
            _text(_LEFT - 12, y + 4, operator, anchor="end", family="monospace"),
            f'<rect x="{low:.1f}" y="{y - _BAR / 2:.1f}" width="{high - low:.1f}" '
            f'height="{_BAR}" fill="#9ecae1"/>',
            *(
                f'<circle cx="{x(ratio):.1f}" cy="{y:.1f}" r="3" fill="#08519c" '
                'fill-opacity="0.6"/>'
                for ratio in timed
            ),
            _text(_WIDTH - 12, y + 4, f"{mean:.2f}\u00d7", anchor="end"),
        ]
    lines += [
        _text(
            16, bottom + 22, "A dot is one case in one direction; left of 1\u00d7 a peer is faster."
        ),
        _text(
            16,
            bottom + 40,
            "A bar ends at the geometric mean of its dots, the number on the right.",
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(x, y, text, *, size=13, fill="#222", anchor="start", family="sans-serif") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-family="{family}">{escape(text)}</text>'
    )
