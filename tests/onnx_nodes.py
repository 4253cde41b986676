"""The node cases that ONNX publishes for an operator."""

from __future__ import annotations

import importlib
import warnings
from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
    """One call of an operator, with what it returns."""

    attributes: dict[str, Any]
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


def cases(operator: str) -> dict[str, Case]:
    """The cases by name; none where onnx is not installed."""
    found = {}

    def record(node, inputs, outputs, name, **_):
        from onnx.helper import get_attribute_value

        attributes = {a.name: get_attribute_value(a) for a in node.attribute}
        found[name] = Case(attributes, list(inputs), list(outputs))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the cases of other operators warn
            module = importlib.import_module(f"onnx.backend.test.case.node.{operator.lower()}")
    except ImportError:
        return {}
    # onnx collects the cases of one operator a process, so they are computed again.
    publish, module.expect = module.expect, record
    try:
        for name, make in vars(getattr(module, operator)).items():
            if name.startswith("export"):
                make.__func__()
    finally:
        module.expect = publish
    return found
