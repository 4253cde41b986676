"""Times the ways in which a convolution can be computed on a GPU, where the choice is not plain.

    python scripts/time_conv_choices.py                    all that 230 seconds suffice for
    python scripts/time_conv_choices.py --seconds 900      more
    python scripts/time_conv_choices.py --dtypes float32   of one dtype
    python scripts/time_conv_choices.py 3x3x3 depthwise    cases whose names have one of the words

A line of JSON is a case, a dtype and a direction, with the microseconds that the GPU is busy in
each way (`jaxops/conv/choices.py`), and how much its result differs from that of "own", a kernel or
patches, relative to the largest entry. "xla" is the convolution of jax.lax, "product32" a product
whose result is float32 and rounded afterwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._bench import clock
from jaxops._families.windows import make_windows
from jaxops.conv import choices, local, patches
from jaxops.conv.choices import Way
from jaxops.conv.options import Options

OWN, XLA = Way("own"), Way("xla")
DEPTH, CHANNELS = Way("fold_depth"), Way("strides_to_channels")
PRODUCT32 = "product32"
CALLS, ROUNDS = 4, 3
ALL = ("forward", "input_grad", "kernel_grad")


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution: x (examples..., rows, *ins, C), a kernel (*taps, C // groups, O), and ways."""

    name: str
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    ways: tuple = (XLA,)
    kernel_grad_ways: tuple = ()
    groups: int = 1
    strides: int | tuple[int, ...] = 1
    padding: str | int = "SAME"
    directions: tuple[str, ...] = ALL
    per_example: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    has_own: bool = True

    @property
    def options(self) -> Options:
        """What the primitives are told."""
        rank = len(self.kernel) - 2
        windows = make_windows(
            "case",
            self.x[-1 - rank : -1],
            self.kernel[:rank],
            strides=self.strides,
            padding=self.padding,
            dilation=1,
            channels_last=True,
        )
        fan_in, outputs = self.kernel[-2:]
        return Options(windows, self.groups, fan_in, outputs // self.groups, None, True)


def _cut(*blocks):
    return Way("cut_taps", blocks=blocks)


def _fill(multiple):
    return Way("fill_groups", multiple=multiple)


FILLED = (XLA, _fill(8), _fill(4))
BF16 = ("bfloat16",)


def _gradients(name, x, kernel, strides, ways=(XLA, CHANNELS)):
    directions = ("input_grad", "kernel_grad")
    return Case(name, x, kernel, ways, strides=strides, directions=directions)


# The first ones matter most: time may not suffice for all.
CASES = [
    _gradients("transposed 2x2 strides 2", (16, 32, 32, 128), (2, 2, 128, 256), 2),
    _gradients("transposed 4x4 strides 2", (16, 64, 64, 64), (4, 4, 64, 128), 2),
    _gradients("transposed 4x4 strides 2, large", (32, 128, 128, 64), (4, 4, 64, 128), 2),
    _gradients("transposed 4x4 strides 2, small", (1, 16, 16, 16), (4, 4, 16, 16), 2),
    _gradients("transposed 16 strides 8", (8, 4096, 256), (16, 256, 128), 8),
    _gradients("transposed 8x8 strides 4", (16, 64, 64, 64), (8, 8, 64, 64), 4),
    _gradients("2x2 taps apart, large", (32, 112, 112, 64), (2, 2, 64, 128), 2),
    _gradients("4x4 taps apart", (32, 56, 56, 96), (4, 4, 96, 192), 4),
    _gradients("strides 8: 8 taps", (8, 4096, 256), (8, 256, 128), 8),
    _gradients("strides 8: 16 taps, 64 channels", (16, 8192, 64), (16, 64, 64), 8),
    _gradients("strides 8: 8x8 taps", (16, 64, 64, 64), (8, 8, 64, 256), 8),
    _gradients("strides 6: 12 taps", (16, 3072, 128), (12, 128, 128), 6),
    _gradients("strides 5: 10 taps", (16, 5120, 64), (10, 64, 128), 5),
    _gradients("strides 4: 8 taps", (16, 4096, 128), (8, 128, 128), 4),
    _gradients("3x3 strides 2", (64, 56, 56, 128), (3, 3, 128, 128), 2, (XLA,)),
    _gradients("3x3 strides 2, small", (64, 14, 14, 512), (3, 3, 512, 512), 2, (XLA,)),
    Case("3x3x3, 32", (2, 32, 64, 64, 32), (3, 3, 3, 32, 32), (XLA, DEPTH)),
    Case("3x3x3, 64", (8, 16, 32, 32, 64), (3, 3, 3, 64, 64), (XLA, DEPTH)),
    Case("3x3x3 strides 2", (4, 32, 64, 64, 32), (3, 3, 3, 32, 64), (XLA, DEPTH), strides=2),
    Case("depthwise 7x7 strides 2", (32, 112, 112, 96), (7, 7, 1, 96), groups=96, strides=2),
    Case(
        "depthwise 7x7 strides 2, small", (64, 28, 28, 384), (7, 7, 1, 384), groups=384, strides=2
    ),
    Case("depthwise 13x13", (32, 56, 56, 96), (13, 13, 1, 96), (XLA, _cut(7, 13)), groups=96),
    Case(
        "depthwise 13x13, small",
        (64, 14, 14, 384),
        (13, 13, 1, 384),
        (XLA, _cut(7, 13)),
        groups=384,
    ),
    Case("RGB 7x7 strides 2", (32, 224, 224, 3), (7, 7, 3, 64), (XLA,), (CHANNELS,), strides=2),
    Case(
        "RGB 11x11 strides 4",
        (64, 227, 227, 3),
        (11, 11, 3, 64),
        (XLA, _cut(6, 8), _cut(8, 4)),
        (CHANNELS,),
        strides=4,
        padding="VALID",
    ),
    Case(
        "RGB 11x11 strides 2",
        (32, 112, 112, 3),
        (11, 11, 3, 64),
        (XLA, _cut(6, 8)),
        (CHANNELS,),
        strides=2,
    ),
    Case("RGB 9x9", (32, 112, 112, 3), (9, 9, 3, 64), (XLA, _cut(5, 5), _cut(8, 8))),
    Case(
        "RGB 16x16 strides 16",
        (64, 224, 224, 3),
        (16, 16, 3, 768),
        (XLA, CHANNELS),
        strides=16,
        padding="VALID",
    ),
    Case(
        "RGB 4x4 strides 4",
        (64, 224, 224, 3),
        (4, 4, 3, 96),
        (XLA, CHANNELS),
        strides=4,
        padding="VALID",
    ),
    Case("13x13, 32", (32, 56, 56, 32), (13, 13, 32, 32), (XLA, _cut(7, 13))),
    Case("12x12, 64 small", (32, 14, 14, 64), (12, 12, 64, 64), (XLA, _cut(6, 12))),
    Case("255 taps", (16, 4096, 64), (255, 64, 64), (XLA, _cut(128))),
    Case("8 groups of 12", (32, 56, 56, 96), (3, 3, 12, 96), FILLED, groups=8),
    Case("16 groups of 10 to 20", (32, 28, 28, 160), (3, 3, 10, 320), FILLED, groups=16),
    Case("4 groups of 64 to 2", (32, 56, 56, 256), (3, 3, 64, 8), FILLED, groups=4),
    Case("8 groups of 32 to 4", (32, 28, 28, 256), (3, 3, 32, 32), FILLED, groups=8),
    Case("8 groups of 3 to 32", (32, 56, 56, 24), (3, 3, 3, 256), FILLED, groups=8),
    Case("64 examples of 28x28", (64, 1, 28, 28, 128), (3, 3, 128, 128), (XLA,), per_example=True),
    Case("32 examples of 56x56", (32, 1, 56, 56, 64), (3, 3, 64, 64), (XLA,), per_example=True),
    Case("256 examples of 14x14", (256, 1, 14, 14, 32), (3, 3, 32, 64), (XLA,), per_example=True),
    Case("1x1, 256 to 1024", (64, 14, 14, 256), (1, 1, 256, 1024), (XLA, PRODUCT32)),
    Case("1x1, 1024 to 256 of 7x7", (8, 7, 7, 1024), (1, 1, 1024, 256), (XLA, PRODUCT32)),
    Case("1x1, 64 to 256", (32, 56, 56, 64), (1, 1, 64, 256), (XLA, PRODUCT32)),
    Case(
        "video stem 3x7x7", (4, 16, 112, 112, 3), (3, 7, 7, 3, 64), (XLA, DEPTH), strides=(1, 2, 2)
    ),
    Case("depthwise 3x3x3", (4, 16, 56, 56, 64), (3, 3, 3, 1, 64), (XLA, DEPTH), groups=64),
    Case("3x3x3, 8 groups of 16", (4, 16, 28, 28, 128), (3, 3, 3, 16, 128), (XLA, DEPTH), groups=8),
    Case("1x1x1 strides 2", (4, 32, 64, 64, 64), (1, 1, 1, 64, 128), (XLA, DEPTH), strides=2),
    Case("3x1x1, 64", (4, 16, 56, 56, 64), (3, 1, 1, 64, 64), (XLA, DEPTH)),
    Case("depthwise 31x31", (16, 56, 56, 128), (31, 31, 1, 128), (XLA, _cut(4, 31)), groups=128),
    Case("depthwise 9x9 strides 2", (32, 56, 56, 96), (9, 9, 1, 96), groups=96, strides=2),
    Case("depthwise 5x5 strides 2", (32, 112, 112, 96), (5, 5, 1, 96), groups=96, strides=2),
    Case("depthwise 3x3 strides 4", (32, 112, 112, 96), (3, 3, 1, 96), groups=96, strides=4),
    Case("depthwise 255 taps", (16, 4096, 256), (255, 1, 256), (XLA, _cut(128)), groups=256),
    Case(
        "2^30 pixels",
        (1040, 1024, 1024, 8),
        (3, 3, 8, 8),
        (Way("images", block=520), XLA),
        directions=("forward",),
        dtypes=BF16,
        has_own=False,
    ),
]


def _function(case: Case, direction: str, way, dtype):
    """The function of a direction in one way."""
    options = case.options
    compute = getattr(local, direction)
    more = dict(options=options, dtype=np.dtype(dtype), platform="cuda")
    if direction == "kernel_grad":
        more["summed"] = (False,) * (len(case.x) - len(case.kernel))

    def function(a, b):
        if way == PRODUCT32:
            wide = mock.patch.object(local, "product_dtype", return_value=np.dtype(np.float32))
            with wide, choices.forced(OWN):
                return compute(a, b, **more)[0]
        with choices.forced(way):
            return compute(a, b, **more)[0]

    function.__name__ = f"{direction}_{way if isinstance(way, str) else way.kind}"
    return function


def _label(way) -> str:
    if isinstance(way, str):
        return way
    numbers = way.blocks or tuple(filter(None, (way.block, way.multiple)))
    return " ".join([way.kind, "x".join(map(str, numbers))]).strip()


def _operands(case: Case, direction: str, dtype):
    options = case.options
    lead = case.x[: len(case.x) - 1 - options.rank]
    shapes = {
        "x": case.x,
        "kernel": case.kernel,
        "g": (*lead, *options.windows.outs, case.kernel[-1]),
    }
    names = {"forward": "x kernel", "input_grad": "g kernel", "kernel_grad": "x g"}[direction]
    keys = jax.random.split(jax.random.key(0), 2)
    return [
        jax.random.normal(key, shapes[n], dtype) for key, n in zip(keys, names.split(), strict=True)
    ]


class _Program:
    """What `clock` runs."""

    def __init__(self, compiled):
        self._compiled = compiled

    def block(self, result):
        """Waits for the result."""
        jax.block_until_ready(result)

    def batch(self, operands) -> clock.Batch:
        """Some calls."""
        return clock.Batch(self, [functools.partial(self._compiled, *operands)] * CALLS)


def _rows(case: Case, dtype):
    """A row a direction."""
    for direction in ("kernel_grad",) if case.per_example else case.directions:
        more = case.kernel_grad_ways if direction == "kernel_grad" else ()
        ways = (*((OWN,) if case.has_own else ()), *case.ways, *more)
        operands = _operands(case, direction, dtype)
        times, errors, differs, programs, reference = {}, {}, {}, {}, None
        for way in ways:
            label = _label(way)
            try:
                compiled = (
                    jax.jit(_function(case, direction, way, dtype)).lower(*operands).compile()
                )
                result = compiled(*operands)
                if case.has_own:
                    if reference is None:
                        reference = result.astype(jnp.float32)
                    gap = jnp.abs(result.astype(jnp.float32) - reference).max()
                    differs[label] = float(gap / jnp.abs(reference).max())
                jax.block_until_ready(result)
                del result
                programs[label] = _Program(compiled)
            except Exception as error:  # one way that fails must not cost the others
                errors[label] = f"{type(error).__name__}: {str(error)[:200]}"
        batches = [p.batch(operands) for _ in range(ROUNDS) for p in programs.values()]
        seconds = clock.device_seconds(batches)
        for i, label in enumerate(programs):
            found = [s for s in seconds[i :: len(programs)] if not isinstance(s, Exception)]
            if found:
                times[label] = round(1e6 * statistics.median(found) / CALLS, 2)
        yield {
            "case": case.name,
            "x": case.x,
            "kernel": case.kernel,
            "groups": case.groups,
            "strides": case.strides,
            "dtype": dtype,
            "direction": direction,
            "us": times,
            "differs": {k: float(f"{v:.2g}") for k, v in differs.items()},
            **({"errors": errors} if errors else {}),
        }


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only cases with one of these in their name")
    parser.add_argument("--seconds", type=float, default=230, help="begin no row after this time")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    start = time.monotonic()
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(json.dumps({**about, "block_bytes": patches.DEVICE_BLOCK_BYTES}), flush=True)
    for dtype in arguments.dtypes:
        for case in CASES:
            if dtype not in case.dtypes:
                continue
            if arguments.words and not any(w in case.name for w in arguments.words):
                continue
            rows = _rows(case, dtype)
            while time.monotonic() - start < arguments.seconds:
                try:
                    row = next(rows, None)
                except Exception as error:  # such as of the profiler
                    print(f"{case.name}, {dtype}: {error}", file=sys.stderr)
                    break
                if row is None:
                    break
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
