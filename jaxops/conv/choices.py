"""Which convolutions are computed otherwise than by one call of a kernel, or by patches.

A way can run only some calls, and `find` prefers it for those of which that was measured. The
figures are in docs/conv2d.md, and `scripts/time_conv_choices.py` measures them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator
from typing import Any, Literal

import jax

from jaxops.conv import rearranged
from jaxops.conv.options import Options

Kind = Literal[
    "own",
    "xla",
    "cut_taps",
    "images",
    "examples",
    "example_groups",
    "fold_depth",
    "fill_groups",
    "strides_to_channels",
]
Direction = Literal["forward", "input_grad", "kernel_grad"]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a convolution is computed.

    Attributes:
      kind: "xla" is XLA's convolution. "cut_taps" adds convolutions of some of the taps, and
        "images" takes some images at a time. "examples" makes kernel gradients of a batch one after
        another, and "example_groups" all as groups of one convolution. Others are functions of
        `rearranged`. "own" is what convolutions have without a choice: a kernel, or patches.
      blocks: how many taps along each dimension are taken at a time.
      block: how many images are taken at a time.
      multiple: to which groups are filled up.
    """

    kind: Kind
    blocks: tuple[int, ...] = ()
    block: int = 0
    multiple: int = 0

    def rearranged(self, options: Options) -> rearranged.Rearranged:
        """The convolution of rearranged arrays."""
        if self.kind == "fill_groups":
            return rearranged.fill_groups(options, self.multiple)
        if self.kind == "fold_depth":
            return rearranged.fold_depth(options)
        return rearranged.strides_to_channels(options)


_forced: contextvars.ContextVar[Way | None] = contextvars.ContextVar("_forced", default=None)


@contextlib.contextmanager
def forced(way: Way) -> Generator[None]:
    """Lets the next convolution that is traced be computed in this way, if the way can run it."""
    token = _forced.set(way)
    try:
        yield
    finally:
        _forced.reset(token)


def find(
    direction: Direction, options: Options, platform: str | None, dtype: Any, *arrays: jax.Array
) -> Way | None:
    """The way of a call, or None for its own: a kernel, or patches."""
    way = _forced.get()
    if way is not None and way.kind == "own":
        return None
    if way is not None:
        # Convolutions that this one is made of choose for themselves.
        _forced.set(None)
        return way
    return None
