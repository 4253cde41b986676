"""conv1d against XLA and PyTorch: shapes and functions are those of `conv3d`, with a rank of 1."""

from __future__ import annotations

import dataclasses

from jaxops._bench import registry
from jaxops._bench.spec import cases

# fmt: off
CASES = [
    *cases("small", (2, 16, 128, 16, 3, 1), ["float32", "bfloat16"], rank=1),
    # An encoder of speech, layers of a wave net, long filters.
    *cases("typical", (8, 512, 2048, 512, 3, 2), ["float32", "bfloat16"], rank=1),
    *cases("typical", (8, 128, 8192, 128, 7, 1), ["float32", "bfloat16"], rank=1),
    *cases("typical", (16, 256, 4096, 256, 31, 1), "bfloat16", rank=1, groups=256),
    *cases("large", (16, 64, 4096, 64, 255, 1), "bfloat16", rank=1),
    *cases("odd", (3, 37, 1001, 41, 5, 3), ["float32", "float16"], rank=1),
    *cases("odd", (2, 12, 499, 18, 4, 1), "float64", rank=1, groups=6),
]
# fmt: on
for n in (1, 16, 256, 4096):
    CASES += cases("scaling", (n, 8, 64, 8, 3, 1), "float32", rank=1)

BENCHMARK = dataclasses.replace(registry.load("conv3d"), operator="conv1d", cases=CASES)
