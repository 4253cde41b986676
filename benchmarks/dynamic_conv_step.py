"""dynamic_conv_step in a loop: shapes and functions are those of `lightweight_conv_step`."""

from __future__ import annotations

import dataclasses
import sys

import jaxops
from jaxops._bench import registry
from jaxops._bench.spec import cases

_STEP = registry.load("lightweight_conv_step")
_functions = sys.modules[_STEP.function.__module__]

# fmt: off
CASES = [
    *cases("small", (1, 1024, 16, 3, 64), ["float32", "bfloat16"], slots=1, softmax=True),
    # DynamicConv (Wu et al. 2019) has these layers.
    *cases("typical", (16, 1024, 16, 7, 64), ["float32", "bfloat16"], slots=[1, 2], softmax=True),
    *cases("typical", (64, 1024, 16, 31, 64), ["float32", "bfloat16"], slots=1, softmax=True),
    *cases("typical", (64, 512, 8, 15, 64), "float32", slots=1, softmax=[True, False]),
    *cases("large", (256, 4096, 64, 15, 16), "bfloat16", slots=[1, 2], softmax=True),
    *cases("odd", (17, 999, 333, 5, 64), ["float32", "float16"], slots=[1, 3], softmax=True),
]
# fmt: on
for entries in (2**n for n in range(0, 13, 3)):
    CASES += cases("scaling", (entries, 1024, 16, 7, 16), "float32", slots=1, softmax=True)


def ours(case):
    def step(x_t, state, weight, indices):
        indices = indices if case.options["slots"] > 1 else None
        return jaxops.dynamic_conv_step(
            x_t, state, weight, normalize=case.options["softmax"], state_indices=indices
        )

    return _functions.decode(case, step)


BENCHMARK = dataclasses.replace(_STEP, operator="dynamic_conv_step", cases=CASES, function=ours)
