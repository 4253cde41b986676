"""The example runs, in a short form, and its skip connections improve its result."""

from __future__ import annotations

import importlib
import pathlib

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_skip_connections_help_to_remove_noise(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("concatenate_unet")
    results = example.compare(example.restore(steps=80))
    assert results["U-Net"] > results["noisy"] + 3
    assert results["U-Net"] > results["without skips"] + 2
