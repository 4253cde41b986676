"""Windows that slide over one to three dimensions, and the linear primitives that they define.

    im2col   image -> patches, the entries that each window covers
    col2im   patches -> image, the sums of the entries that stem from one entry

Each is the other's transpose, so that these two are closed under differentiation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxops._core import checks, compat, halo, rules
from jaxops._core.partition import Plan
from jaxops._core.primitive import Operator
from jaxops.reference import im2col as reference


@dataclasses.dataclass(frozen=True)
class Windows:
    """Parameters of the primitives; every sequence has one entry a dimension of the window.

    Attributes:
      ins: the sizes of the image.
      outs: how many windows there are along each dimension.
      taps: the sizes of a window.
      strides: the steps between neighbouring windows.
      dilation: the steps between neighbouring taps.
      low: entries of padding before the image; negative where the first ones are left out.
      channels_last: whether channels follow the dimensions of image and patches, or precede them.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    taps: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    low: tuple[int, ...]
    channels_last: bool

    @property
    def are_entries(self) -> bool:
        """Whether every patch is one entry of the image, in order."""
        return (
            set(self.taps) == {1}
            and set(self.strides) == {1}
            and set(self.low) == {0}
            and self.ins == self.outs
        )

    def with_channels_last(self) -> Windows:
        """The same windows over images whose channels are last."""
        return dataclasses.replace(self, channels_last=True)

    def is_even(self, i: int) -> bool:
        """Whether along dimension i there are `strides` entries of the image a window.

        Windows and image may then be split into parts that belong to each other.
        """
        return self.ins[i] == self.outs[i] * self.strides[i] > 0

    @property
    def reach(self) -> tuple[int, ...]:
        """How far the last tap is from the first."""
        return tuple((k - 1) * d for k, d in zip(self.taps, self.dilation, strict=True))

    # The dimensions in signatures. Where windows are even devices may have parts of images:
    # along0 of image and windows, each with step0 entries of the image.

    @property
    def in_dims(self) -> str:
        return " ".join(map(self._in_dim, range(len(self.ins))))

    @property
    def out_dims(self) -> str:
        return " ".join(
            f"{'along' if self.is_even(i) else 'out'}{i}={size}" for i, size in enumerate(self.outs)
        )

    @property
    def tap_dims(self) -> str:
        return " ".join(f"tap{i}={size}" for i, size in enumerate(self.taps))

    def _in_dim(self, i):
        if not self.is_even(i):
            return f"in{i}={self.ins[i]}"
        along, step = f"along{i}={self.outs[i]}", self.strides[i]
        return along if step == 1 else f"({along} step{i}={step})"

    @property
    def image(self) -> str:
        """The dimensions of an image."""
        return self._with_channels(self.in_dims)

    @property
    def patches(self) -> str:
        """The dimensions of patches."""
        outs, taps = self.out_dims, self.tap_dims
        return self._with_channels(f"{outs} {taps}" if self.channels_last else f"{taps} {outs}")

    def _with_channels(self, dims: str) -> str:
        return f"rows {dims} channels" if self.channels_last else f"rows channels {dims}"

    def exchange_halo(
        self, array: jax.Array, first: int, plan: Plan, *, of_windows: bool
    ) -> tuple[jax.Array, Windows]:
        """The entries that a device with a part of every image needs, and its windows.

        `array` is its part of the image, or of what there is for every window, and `first` the
        first of the array's dimensions that windows slide over. Entries that results of this part
        depend on are copied from the devices that have them; beyond the ends they are zeros, as in
        the padding.
        """
        ins, outs, low = list(self.ins), list(self.outs), list(self.low)
        for i, (reach, stride) in enumerate(zip(self.reach, self.strides, strict=True)):
            axes = plan.axes.get(f"along{i}", ())
            parts = plan.size(axes)
            if parts == 1:
                continue
            ins[i], outs[i] = ins[i] // parts, outs[i] // parts
            if of_windows:
                before, after = max(0, (reach - low[i]) // stride), max(0, -(-low[i] // stride))
                outs[i] += before + after
                low[i] += before * stride
            else:
                before, after = max(0, low[i]), max(0, reach - low[i] - stride + 1)
                ins[i] += before + after
                low[i] -= before
            array = halo.extended(array, first + i, before, after, axes, plan.mesh)
        part = dataclasses.replace(self, ins=tuple(ins), outs=tuple(outs), low=tuple(low))
        return array, part


def _attributes(*, windows: Windows) -> dict[str, Any]:
    return {
        "strides": np.array(windows.strides, np.int64),
        "dilation": np.array(windows.dilation, np.int64),
        "low": np.array(windows.low, np.int64),
        "channels_last": np.bool_(windows.channels_last),
    }


def _options(windows: Windows, *names: str) -> dict[str, Any]:
    names = (*names, "strides", "dilation", "low", "channels_last")
    return {name: getattr(windows, name) for name in names}


def _with_neighbours(array, *, plan, windows, of_windows, **params):
    rank = len(windows.ins)
    after = windows.channels_last * (1 + of_windows * rank)
    array, part = windows.exchange_halo(
        array, array.ndim - after - rank, plan, of_windows=of_windows
    )
    return (array,), {"windows": part, **params}, None


_REPLICATED = ("in", "out", "step", "tap")

# `again` tells patches from the same ones that have been made before. XLA would make both at once,
# and keep those of a whole forward pass for the backward pass.
im2col_operator = Operator(
    "im2col",
    signature=lambda *, windows, again: f"{windows.image} -> {windows.patches}",
    dtypes=lambda x, **_: [x.dtype],
    reference=lambda x, *, windows, again: [
        reference.im2col(x, **_options(windows, "taps", "outs"))
    ],
    attributes=lambda *, windows, again: {**_attributes(windows=windows), "again": np.bool_(again)},
    replicated=_REPLICATED,
    neighbours=functools.partial(_with_neighbours, of_windows=False),
)

col2im_operator = Operator(
    "col2im",
    signature=lambda *, windows: f"{windows.patches} -> {windows.image}",
    dtypes=lambda patches, **_: [patches.dtype],
    reference=lambda patches, *, windows: [reference.col2im(patches, **_options(windows, "ins"))],
    attributes=_attributes,
    replicated=_REPLICATED,
    neighbours=functools.partial(_with_neighbours, of_windows=True),
)


def _im2col(x, windows):
    return im2col_operator(x, windows=windows, again=False)


def _col2im(patches, windows):
    # Sums have kernels for the usual types; copies may be of any.
    wide = patches if patches.dtype in checks.FLOATS else patches.astype(np.float32)
    (image,) = col2im_operator(wide, windows=windows)
    return [image.astype(patches.dtype)]


def _register_rules(operator: Operator, call: Callable, transpose: Callable) -> None:
    @operator.def_jvp
    def _jvp(primals, tangents, *, windows, **_):
        return call(*primals, windows), call(*tangents, windows)

    @operator.def_transpose
    def _transpose(cotangents, operand, *, windows, **_):
        (g,) = cotangents
        if isinstance(g, compat.Zero):
            return rules.zeros((operand,))
        (pulled,) = transpose(g, windows)
        return [compat.reshard_like(pulled, operand.aval)]


_register_rules(im2col_operator, _im2col, _col2im)
_register_rules(col2im_operator, _col2im, _im2col)


# --- arguments -----------------------------------------------------------------------------------


def per_dimension(function: str, argument: str, value: Any, rank: int, low: int) -> tuple[int, ...]:
    """An int for all dimensions, or one for each, every one at least `low`."""
    if checks.is_sequence(value):
        if len(value) != rank:
            raise ValueError(
                f"{function}: {argument} must be an integer or {rank} of them, one a dimension, "
                f"got {checks.describe(value)}"
            )
        return tuple(
            checks.integer(function, f"{argument}[{i}]", v, low) for i, v in enumerate(value)
        )
    return (checks.integer(function, argument, value, low),) * rank


def make_windows(
    function: str,
    ins: Sequence[int],
    taps: Sequence[int],
    *,
    strides: Any,
    padding: Any,
    dilation: Any,
    channels_last: bool,
) -> Windows:
    """The windows that the public arguments `strides`, `padding` and `dilation` describe."""
    rank = len(ins)
    strides = per_dimension(function, "strides", strides, rank, 1)
    dilation = per_dimension(function, "dilation", dilation, rank, 1)
    reaches = [(k - 1) * d + 1 for k, d in zip(taps, dilation, strict=True)]
    pads = _padding(function, padding, ins, reaches, strides)
    outs = tuple(
        max(0, (n + low + high - reach) // stride + 1)
        for n, (low, high), reach, stride in zip(ins, pads, reaches, strides, strict=True)
    )
    return Windows(
        ins=tuple(ins),
        outs=outs,
        taps=tuple(taps),
        strides=strides,
        dilation=dilation,
        low=tuple(low for low, _ in pads),
        channels_last=channels_last,
    )


_PADDINGS = ("SAME", "VALID")


def _padding(function, padding, ins, reaches, strides):
    """(low, high) for each dimension."""
    rank = len(ins)
    if isinstance(padding, str):
        if checks.choice(function, "padding", padding, _PADDINGS) == "VALID":
            return [(0, 0)] * rank
        totals = [
            max(0, (-(-n // stride) - 1) * stride + reach - n)
            for n, reach, stride in zip(ins, reaches, strides, strict=True)
        ]
        return [(total // 2, total - total // 2) for total in totals]
    if not checks.is_sequence(padding):
        return [(n, n) for n in per_dimension(function, "padding", padding, rank, 0)]
    if len(padding) != rank:
        raise ValueError(
            f"{function}: padding must be 'SAME', 'VALID', an integer, or {rank} integers or "
            f"(low, high) pairs, one a dimension, got {checks.describe(padding)}"
        )
    pads = []
    for i, entry in enumerate(padding):
        name = f"padding[{i}]"
        if checks.is_sequence(entry):
            pads.append(per_dimension(function, name, entry, 2, 0))
        else:
            pads.append((checks.integer(function, name, entry, 0),) * 2)
    return pads


_DATA_FORMATS = ("NWC", "NHWC", "NDHWC", "NCW", "NCHW", "NCDHW")


def data_format(function: str, value: Any) -> str:
    """The data format, in capitals."""
    return checks.choice(function, "data_format", value, _DATA_FORMATS)
