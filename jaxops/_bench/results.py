"""A results file: what was measured, where, and how; nothing that can be derived from it."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

#: Counted up whenever a file of before cannot be read as one of today.
FORMAT = 2

OURS = "jaxops"


class ResultsError(Exception):
    """A results file that cannot be used; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one contender did on one row.

    Attributes:
      us: the median over the rounds, in microseconds a call; None where it was not timed.
      spread: half the distance of the fastest round from the slowest.
      rounds: how many there were.
      call_us: the wall time of one call that is waited for, where `us` is the device's time.
      memory: bytes of arguments, results and temporaries, where they are known beforehand.
      error: why it was not timed.
      torch: whether it is PyTorch's.
    """

    us: float | None = None
    spread: float | None = None
    rounds: int = 0
    call_us: float | None = None
    memory: int | None = None
    error: str | None = None
    torch: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """One direction of one case, by every contender; ours is called "jaxops"."""

    operator: str
    case: str
    group: str
    target: bool
    near_limit: bool
    direction: str
    bytes: float
    flops: float
    unit: str
    special: float
    outcomes: dict[str, Outcome]

    @property
    def key(self) -> tuple[str, str, str]:
        """Rows of equal keys are comparable."""
        return self.operator, self.case, self.direction

    @property
    def ours(self) -> Outcome:
        """Our own outcome."""
        return self.outcomes[OURS]

    @staticmethod
    def is_peer(name: str) -> bool:
        """Whether an outcome's name is a peer's."""
        return name != OURS


@dataclasses.dataclass(frozen=True)
class Document:
    """One run of the benchmarks.

    Attributes:
      command: what reproduces it.
      date: when it began, ISO 8601 in UTC.
      platform: "cpu" or "cuda".
      device: its kind.
      threads: those that the host computes with.
      versions: of what took part.
      ceilings: this machine's limits, see `ceilings.measure`.
      absent: peers that were not there, and why.
      shapes: what the numbers in a case's name are, by operator.
      unfinished: how many rows were left when the run was interrupted.
      rows: what was measured.
      seconds: what the run spent on each of its phases.
    """

    command: str
    date: str
    platform: str
    device: str
    threads: int
    versions: dict[str, str]
    ceilings: dict[str, float]
    absent: dict[str, str]
    shapes: dict[str, str]
    unfinished: int
    rows: list[Row]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)


def save(document: Any, file: pathlib.Path) -> None:
    """Writes a document, a dataclass that has `rows`, as JSON with one row a line.

    Raises:
      ResultsError: the file cannot be written.
    """
    content: dict[str, Any] = {"format": FORMAT, **dataclasses.asdict(document)}
    rows = content.pop("rows")
    head = json.dumps(content, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    try:
        file.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    except OSError as error:
        raise ResultsError(f"{file} cannot be written: {error.strerror}") from error


def load(file: pathlib.Path) -> Document:
    """Reads what `save` has written of operators.

    Raises:
      ResultsError: the file is not there, is not a results file, or is one of another format.
    """

    def document(content: dict[str, Any]) -> Document:
        rows = [
            Row(**{**r, "outcomes": {n: Outcome(**o) for n, o in r["outcomes"].items()}})
            for r in content.pop("rows")
        ]
        return Document(**content, rows=rows)

    return read(file, document)


def merge(documents: Sequence[Document]) -> Document:
    """The rows of several runs on machines of one kind, from the date of the earliest.

    Ceilings and versions are the first's.

    Raises:
      ResultsError: an operator is in several of them.
    """
    operators = [
        operator for d in documents for operator in dict.fromkeys(r.operator for r in d.rows)
    ]
    for operator, count in collections.Counter(operators).items():
        if count > 1:
            raise ResultsError(f"{count} of the files have rows of {operator}")
    seconds = collections.Counter[str]()
    for document in documents:
        seconds.update(document.seconds)
    return dataclasses.replace(
        documents[0],
        command="; ".join(d.command for d in documents),
        date=min(d.date for d in documents),
        absent={peer: why for d in documents for peer, why in d.absent.items()},
        shapes={operator: shape for d in documents for operator, shape in d.shapes.items()},
        unfinished=sum(d.unfinished for d in documents),
        rows=[row for d in documents for row in d.rows],
        seconds=dict(seconds),
    )


_Document = TypeVar("_Document")


def read(file: pathlib.Path, document: Callable[[dict[str, Any]], _Document]) -> _Document:
    """Reads a results file, of whose content `document` makes the result.

    Raises:
      ResultsError: the file is not there, is not a results file, or is one of another format.
    """
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ResultsError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{file} is not a results file: {error}") from error
    found = _format(content)
    if found != FORMAT:
        raise ResultsError(
            f"{file} is a results file of format {found}, and this jaxops reads format {FORMAT}: "
            "measure again, with --json FILE"
        )
    del content["format"]
    try:
        return document(content)
    except (AttributeError, KeyError, TypeError) as error:
        raise ResultsError(f"{file} is not a results file of format {FORMAT}: {error}") from error


def _format(content: Any) -> Any:
    return content.get("format", "unknown") if isinstance(content, dict) else "unknown"
