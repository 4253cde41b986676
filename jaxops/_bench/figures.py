"""The numbers that follow from a results file: speeds, limits, ratios, verdicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxops._bench import ceilings
from jaxops._bench.results import Document, Outcome, Row

#: The targets of the project: how near the limit, on a GPU, and from which time on.
MOST_OF_LIMIT = 1.15
JUDGED_FROM_US = 40.0


def limit(document: Document, row: Row) -> tuple[float, str]:
    """The least microseconds that a row can take, and the ceiling that says so."""
    seconds, name = ceilings.limit(document.ceilings, row.bytes, row.flops, row.unit, row.special)
    return 1e6 * seconds, name


def gigabytes_per_second(row: Row, outcome: Outcome) -> float:
    """The bytes that must be moved, over the time that was taken."""
    assert outcome.us is not None
    return row.bytes / outcome.us / 1e3


def teraflops(row: Row, outcome: Outcome) -> float:
    """The FLOPs that must be done, over the time that was taken."""
    assert outcome.us is not None
    return row.flops / outcome.us / 1e6


def peers(rows: Iterable[Row]) -> list[str]:
    """The names of the peers in these rows, each once, in the order of their appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.outcomes if row.is_peer(name)))


def speedup(row: Row, peer: str) -> float | None:
    """How often ours goes into the peer's time; None where one of them was not timed."""
    theirs = row.outcomes.get(peer)
    if theirs is None or theirs.us is None or row.ours.us is None:
        return None
    return theirs.us / row.ours.us


def geomean(ratios: Sequence[float]) -> float:
    """The geometric mean of at least one ratio."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def speedups(rows: Iterable[Row], peer: str) -> list[float]:
    """Our speed-up over a peer on every row that has one, scaling left out."""
    found = (speedup(row, peer) for row in rows if row.group != "scaling")
    return [ratio for ratio in found if ratio is not None]


def best_peer(row: Row, torch: bool) -> str | None:
    """The fastest of PyTorch's or of XLA's contenders, or None where none was timed."""
    timed = {
        name: outcome.us
        for name, outcome in row.outcomes.items()
        if row.is_peer(name) and outcome.torch == torch and outcome.us is not None
    }
    return min(timed, key=timed.__getitem__, default=None)


def misses(document: Document, row: Row) -> list[str]:
    """The targets of the project that a row misses, in words.

    On a GPU: ahead of every peer, and within 1.15 times the limit where that is a target and the
    time is above 40 µs. On a CPU: ahead of XLA's formulations. A difference counts when it is
    beyond the spread of both.
    """
    if row.ours.us is None:
        return [f"not timed: {row.ours.error}"]
    assert row.ours.spread is not None
    found = []
    least, name = limit(document, row)
    if (
        document.platform == "cuda"
        and row.near_limit
        and row.ours.us > JUDGED_FROM_US
        and row.ours.us - row.ours.spread > MOST_OF_LIMIT * least
    ):
        found.append(f"{row.ours.us / least:.2f} x the limit ({name})")
    for peer in peers([row]):
        theirs = row.outcomes[peer]
        judged = document.platform == "cuda" or not theirs.torch
        if judged and theirs.us is not None and beyond_spread(theirs, row.ours):
            found.append(f"{row.ours.us / theirs.us:.2f} x the time of {peer}")
    return found


def beyond_spread(fast: Outcome, slow: Outcome) -> bool:
    """Whether `slow` took longer than `fast` by more than the spreads of both together."""
    assert slow.us is not None
    assert slow.spread is not None
    assert fast.us is not None
    assert fast.spread is not None
    return slow.us - fast.us > slow.spread + fast.spread


@dataclasses.dataclass(frozen=True)
class Change:
    """A row of ours in two runs; `ratio` is the new time over the old one."""

    row: Row
    old: Outcome
    new: Outcome

    @property
    def ratio(self) -> float:
        """The new time over the old one."""
        assert self.new.us is not None
        assert self.old.us is not None
        return self.new.us / self.old.us

    @property
    def verdict(self) -> str:
        """ "faster" or "slower", or "same" when it is within the spread."""
        if beyond_spread(self.old, self.new):
            return "slower"
        return "faster" if beyond_spread(self.new, self.old) else "same"


def compare(old: Document, new: Document) -> list[Change]:
    """Our rows that were timed in both runs, in the order of the new one."""
    before = {row.key: row.ours for row in old.rows if row.ours.us is not None}
    return [
        Change(row, before[row.key], row.ours)
        for row in new.rows
        if row.key in before and row.ours.us is not None
    ]
