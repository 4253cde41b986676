"""The demo's text, Python's own standard library, and the two counting models of it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
OTHER_BYTES = bytes(set(range(256)) - set(ALPHABET.encode()))
HELD_OUT_EVERY = 10


def encode(text: bytes) -> np.ndarray:
    """The symbols of a text, uint8 positions in `ALPHABET`: tabs expanded, other bytes dropped."""
    codes = np.frombuffer(text.expandtabs().translate(None, OTHER_BYTES), np.uint8)
    return np.where(codes == ord("\n"), 0, codes - 31).astype(np.uint8)


def decode(symbols: np.ndarray) -> str:
    """The text of an array of symbols."""
    return "".join(ALPHABET[symbol] for symbol in symbols)


def standard_library(directory: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The text of the standard library's top-level modules: (to train on, held out), in symbols.

    Every tenth file, in the order of their names, is held out whole: the held-out text is code
    from modules the model has not seen. `directory` replaces the running Python's own.

    Raises:
      FileNotFoundError: there are not enough `*.py` files to hold one out.
    """
    directory = directory or Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata_*.py describes the machine Python was built on, and differs between machines.
    files = sorted(p for p in directory.glob("*.py") if not p.name.startswith("_sysconfigdata"))
    if len(files) < HELD_OUT_EVERY:
        raise FileNotFoundError(f"{directory} has {len(files)} *.py files, too few to train on")
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    trained = [file for file in files if file not in held_out]
    train, test = (encode(b"".join(f.read_bytes() for f in part)) for part in (trained, held_out))
    return train, test


def spaced_windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """`count` windows of `length` symbols, evenly spaced from the first to the last of the text."""
    starts = np.linspace(0, len(text) - length, count).astype(np.int64)
    return text[starts[:, None] + np.arange(length)]


def unigram_bits(text: np.ndarray, windows: np.ndarray, symbols: int = len(ALPHABET)) -> float:
    """Bits per character of windows[:, 1:] under p(c) = (n(c) + 1) / (N + symbols).

    n counts in `text`, whose length is N; the first character of a window is left out because
    it is what the other models are given.
    """
    counts = np.bincount(text, minlength=symbols) + 1
    return float(-np.log2(counts[windows[:, 1:]] / counts.sum()).mean())


def bigram_bits(text: np.ndarray, windows: np.ndarray, symbols: int = len(ALPHABET)) -> float:
    """Bits per character of windows[:, 1:] under p(c | b) = (n(bc) + 1) / (n(b·) + symbols).

    n counts pairs of neighbours in `text`; b is the character before c in its window.
    """
    pairs = text[:-1].astype(np.int64) * symbols + text[1:]
    counts = np.bincount(pairs, minlength=symbols**2).reshape(symbols, symbols) + 1
    probability = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log2(probability[windows[:, :-1], windows[:, 1:]]).mean())
