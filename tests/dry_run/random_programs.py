"""Random programs of the public functions: sizes, dtypes, options, derivatives and vmaps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops._core.native import NoKernelWarning
from jaxops.testing.measure import leaves, replace

FLOATS = ("float16", "bfloat16", "float32", "float64")
ITEMS = (*FLOATS, "int8", "int16", "int32", "int64", "bool", "uint8")
# Arrays of more bytes have no address space on a GPU.
_MAX_BYTES = 1 << 42

Program = tuple[Callable, tuple[Any, ...]]


class Random:
    """What the programs are drawn from."""

    def __init__(self, seed: Sequence[int]):
        self._rng = np.random.default_rng(seed)

    def pick(self, *choices):
        """One of the choices."""
        return choices[self._rng.integers(len(choices))]

    def happens(self, probability: float) -> bool:
        """True so often."""
        return bool(self._rng.random() < probability)

    def upto(self, most: int, least: int = 1) -> int:
        """A size of any magnitude, now and then around a power of two, or a multiple of 8."""
        size = int(math.exp(self._rng.uniform(math.log(least + 0.5), math.log(most + 0.5))) + 0.5)
        if self.happens(0.3):
            size = 1 << size.bit_length() - 1
            size += self.pick(0, 0, 0, -1, 1)
        elif self.happens(0.4):
            size = -(-size // 8) * 8
        return min(max(size, least), most)

    def dims(self, least: int, most: int) -> tuple[int, ...]:
        """Leading dimensions."""
        return tuple(self.upto(70) for _ in range(self._rng.integers(least, most + 1)))

    def float_dtype(self, like: str | None = None) -> str:
        """A float dtype, most often that of another array."""
        return like if like is not None and self.happens(0.8) else self.pick(*FLOATS)


def array(shape, dtype) -> jax.ShapeDtypeStruct:
    """An argument."""
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


# --- operators: a function, its arguments and the positions of those that have gradients ---------


def concatenate(r: Random):
    dtype = r.pick(*ITEMS)
    lead, trail = r.dims(0, 2), (r.upto(300),) if r.happens(0.6) else ()
    sizes = [r.upto(r.pick(16, 300, 100_000)) for _ in range(r.upto(r.pick(4, 12, 500)))]
    if r.happens(0.1):
        sizes[r.upto(len(sizes)) - 1] = 0
    if r.happens(0.4):
        sizes = [sizes[0]] * len(sizes)
    axis = len(lead)
    used = [r.upto(s) if s and r.happens(0.2) else s for s in sizes]
    padded = sum(used) + r.pick(0, 0, 1, 5, 64)
    moved = tuple(i for i in range(len(sizes)) if r.happens(0.8)) if dtype in FLOATS else ()
    if r.happens(0.5):
        arrays = [array((*lead, s, *trail), dtype) for s in sizes]

        def join(*arrays):
            return jaxops.concatenate(arrays, axis, sizes=used, padded_size=padded)

        return join, arrays, moved
    targets = [s + r.pick(0, 0, 0, 3) for s in used] if r.happens(0.3) else None

    def cut(whole):
        return jaxops.split(whole, used, axis, padded_sizes=targets)

    return cut, [array((*lead, padded, *trail), dtype)], (0,) if dtype in FLOATS else ()


def conv2d(r: Random):
    dtype = r.float_dtype()
    rank = 2
    taps = [r.upto(r.pick(3, 3, 5, 12)) for _ in range(rank)]
    strides = [r.pick(1, 1, 1, 2, 2, 3, 4, 8) for _ in range(rank)]
    dilation = [r.pick(1, 1, 1, 2, 5) for _ in range(rank)]
    groups = r.pick(1, 1, 1, r.upto(64), r.upto(512))
    most = r.pick(8, 64, 512, 2048) // min(groups, 8)
    fan_in, fan_out = (r.upto(max(most, 1)) for _ in range(2))
    if r.happens(0.25):
        fan_in, fan_out = 1, r.pick(1, 1, 2, 4)
    elif r.happens(0.15):
        fan_in, groups = r.upto(7), 1
    images = r.upto(r.pick(2, 64, 512))
    sizes = [r.upto(r.pick(16, 64, 224, 1000)) for _ in range(rank)]
    if r.happens(0.2):  # depthwise
        fan_in, fan_out, groups = 1, 1, 8 * r.upto(64)
        taps = [r.pick(3, 5, 7)] * rank
        dilation, strides = [1] * rank, [r.pick(1, 1, 2)] * rank
    elif r.happens(0.2):
        fan_in, fan_out, groups = 8 * r.upto(64), 8 * r.upto(64), 1
        taps = [3] * rank
    channels, outputs = fan_in * groups, fan_out * groups
    padding = r.pick("SAME", "VALID", r.upto(4), [(r.upto(3), r.upto(5)) for _ in range(rank)])
    bias = r.happens(0.4)
    options = {
        "strides": strides,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "activation": r.pick(None, None, "relu", "silu", "gelu"),
        "precision": r.pick(None, None, "highest"),
        "preferred_element_type": r.pick(None, None, None, "float32", dtype),
    }
    arguments = [
        array((images, *sizes, channels), dtype),
        array((*taps, fan_in, outputs), r.float_dtype(dtype)),
        *([array((outputs,), r.float_dtype(dtype))] if bias else []),
    ]
    if r.happens(0.2):
        options["dimension_numbers"] = ("NCHW", "OIHW", "NCHW")
        x, kernel, *rest = arguments
        arguments = [
            array((images, channels, *sizes), x.dtype),
            array((outputs, fan_in, *taps), kernel.dtype),
            *rest,
        ]

    def convolve(x, kernel, *rest):
        return jaxops.conv2d(x, kernel, bias=rest[0] if rest else None, **options)

    return convolve, arguments, tuple(range(len(arguments)))


def conv_general_dilated(r: Random):
    dtype = r.float_dtype()
    rank = r.pick(1, 1, 2, 3)
    taps = [r.upto(r.pick(3, 9)) for _ in range(rank)]
    fan_in, fan_out = r.upto(r.pick(8, 256)), r.upto(r.pick(8, 256))
    groups = r.pick(1, 1, 1, r.upto(64))
    outputs = fan_out * groups
    sizes = [r.upto(r.pick(16, 64)) for _ in range(rank)]
    spatial = "DHW"[-rank:]
    options = {
        "window_strides": [r.pick(1, 1, 2, 3) for _ in range(rank)],
        "padding": r.pick("SAME", "VALID", [(r.upto(3), r.upto(3)) for _ in range(rank)]),
        "lhs_dilation": r.pick(None, None, [r.pick(1, 2, 3) for _ in range(rank)]),
        "rhs_dilation": r.pick(None, None, [r.pick(1, 2) for _ in range(rank)]),
        "dimension_numbers": (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        "feature_group_count": groups,
        "preferred_element_type": r.pick(None, None, "float32"),
    }
    if isinstance(options["padding"], str):
        options["lhs_dilation"] = None  # SAME is not defined with it
    if dtype == "float64":
        options["preferred_element_type"] = None
    arguments = [
        array((r.upto(64), *sizes, fan_in * groups), dtype),
        array((*taps, fan_in, outputs), dtype),
    ]
    return functools.partial(_general, options), arguments, (0, 1)


def _general(options, x, kernel):
    return jaxops.conv_general_dilated(x, kernel, **options)


def _focal_loss(function, r: Random):
    dtype = r.float_dtype()
    rows, classes = r.dims(0, 2), r.upto(r.pick(2, 16, 128, 1024, 4096, 70_000))
    if r.happens(0.7):
        rows = (r.upto(r.pick(16, 4096, 4096, 10_000_000)),)
    is_hard = r.happens(0.6)
    labels = array(rows if is_hard else (*rows, classes), r.pick("int8", "int32", "int64"))
    if not is_hard and r.happens(0.7):
        labels = array(labels.shape, r.pick("bool", r.float_dtype(dtype)))
    reduction = r.pick("none", "sum", "mean")
    options = {
        "gamma": r.pick(0.0, 0.5, 1.0, 2.0, 2.0, 1.7),
        "alpha": r.pick(None, 0.25),
        "reduction": reduction,
        "ignore_index": r.pick(None, None, -1) if is_hard else None,
    }
    names = ["gamma"] if r.happens(0.2) else []
    arguments = [array((*rows, classes), dtype), labels]
    if names:
        arguments.append(array((), r.float_dtype(dtype)))
    if is_hard and r.happens(0.3):
        names.append("class_weight")
        arguments.append(array((classes + r.pick(0, 1),), r.float_dtype(dtype)))
    if r.happens(0.3):
        names.append("sample_weight")
        arguments.append(array(rows, r.float_dtype(dtype)))
    if reduction != "mean" and r.happens(0.2):
        names.append("normalizer")
        arguments.append(array((), r.float_dtype(dtype)))

    def loss(logits, labels, *rest):
        return function(logits, labels, **options | dict(zip(names, rest, strict=True)))

    return loss, arguments, (0,)


def sigmoid_focal_loss(r: Random):
    return _focal_loss(jaxops.sigmoid_focal_loss, r)


def softmax_focal_loss(r: Random):
    return _focal_loss(jaxops.softmax_focal_loss, r)


def grid_sample(r: Random):
    dtype = r.float_dtype()
    rank = r.pick(2, 3)
    batch = r.dims(0, 1)
    volume = [r.upto(r.pick(8, 64, 512)) for _ in range(rank)]
    points = (r.upto(r.pick(100, 10_000, 4_000_000, 4_000_000)),)
    options = {
        "method": r.pick("linear", "linear", "nearest"),
        "padding_mode": r.pick("zeros", "border", "reflection"),
        "align_corners": r.happens(0.5),
        "deterministic": r.happens(0.4),
    }
    arguments = [
        array((*batch, *volume, r.upto(r.pick(1, 4, 32, 64, 400))), dtype),
        array((*batch, *points, rank), r.float_dtype(dtype)),
    ]
    return lambda v, p: jaxops.grid_sample(v, p, **options), arguments, (0, 1)


def stencils(r: Random):
    """Samples whose stencils `jax.numpy` makes, for kernels that sum their entries."""
    dtype = r.float_dtype()
    rank = r.pick(2, 3)
    batch = r.dims(0, 1)
    method = r.pick("cubic", "linear", "nearest")
    options = {
        "method": method,
        "padding_mode": r.pick("zeros", "border", "wrap") if method == "cubic" else "wrap",
        "coordinates": r.pick("pixel", "normalized"),
    }
    volume = [r.upto(r.pick(8, 64)) for _ in range(rank)]
    arguments = [
        array((*batch, *volume, r.upto(r.pick(1, 4, 32, 400))), dtype),
        array((*batch, r.upto(r.pick(100, 10_000, 1_000_000)), rank), r.float_dtype(dtype)),
    ]
    return lambda v, p: jaxops.grid_sample(v, p, **options), arguments, (0, 1)


def trilinear_interpolate(r: Random):
    dtype = r.float_dtype()
    lead = (r.upto(r.pick(100, 100_000, 50_000_000)),) if r.happens(0.7) else r.dims(0, 3)
    arguments = [
        array((*lead, 8, r.upto(r.pick(4, 64, 1000))), dtype),
        array((*lead, 3), r.float_dtype(dtype)),
    ]
    return jaxops.trilinear_interpolate, arguments, (0, 1)


_FORMATS = {1: ("NWC", "NCW"), 2: ("NHWC", "NCHW"), 3: ("NDHWC", "NCDHW")}


def im2col(r: Random):
    dtype = r.pick(*ITEMS)
    rank = r.pick(1, 2, 2, 3)
    data_format = r.pick(*_FORMATS[rank])
    channels = r.upto(r.pick(4, 64, 512))
    sizes = [r.upto(r.pick(16, 100, 400)) for _ in range(rank)]
    images = r.upto(r.pick(4, 64))
    shape = (images, *sizes, channels) if data_format[-1] == "C" else (images, channels, *sizes)
    taps = [r.upto(r.pick(3, 8)) for _ in range(rank)]
    options = {
        "strides": [r.pick(1, 1, 2, 3, 7) for _ in range(rank)],
        "padding": r.pick("SAME", "VALID", r.upto(4), [(r.upto(3), 0) for _ in range(rank)]),
        "dilation": [r.pick(1, 1, 2, 3) for _ in range(rank)],
        "data_format": data_format,
    }
    x = array(shape, dtype)

    def copy(x):
        return jaxops.im2col(x, taps, **options)

    if r.happens(0.5) or dtype not in FLOATS:
        return copy, [x], (0,) if dtype in FLOATS else ()
    patches = jax.eval_shape(copy, x)
    return lambda p: jaxops.col2im(p, shape, **options), [patches], (0,)


def _heads(r: Random) -> tuple[int, int]:
    """Heads, and channels that they divide."""
    heads = r.upto(r.pick(4, 16, 1024))
    channels = heads * r.upto(max(r.pick(4, 64, 2048) // heads, 1))
    return heads, channels


def lightweight_conv(r: Random):
    dtype = r.float_dtype()
    heads, channels = _heads(r)
    if r.happens(0.3):
        heads = r.pick(1, 4, 8, 16)
        channels = heads * r.pick(16, 32, 64, 128)
    taps = r.upto(r.pick(3, 7, 31, 64, 200))
    dilation = r.pick(1, 1, 1, 2, 9)
    images = r.upto(r.pick(4, 64, 100_000))
    time = r.upto(r.pick(1, 16, 512, 10_000))
    layout = r.pick("NTC", "NCT")
    options = {
        "padding": r.pick("causal", "same", r.upto((taps - 1) * dilation + 1) - 1),
        "dilation": dilation,
        "activation": r.pick(None, None, "relu", "silu", "gelu"),
        "data_format": layout,
    }
    arguments = [
        array((images, time, channels) if layout == "NTC" else (images, channels, time), dtype),
        array((heads, taps), r.float_dtype(dtype)),
        *([array((channels,), r.float_dtype(dtype))] if r.happens(0.4) else []),
    ]

    def convolve(x, weight, *rest):
        return jaxops.lightweight_conv(x, weight, bias=rest[0] if rest else None, **options)

    return convolve, arguments, tuple(range(len(arguments)))


def lightweight_conv_packed(r: Random):
    dtype = r.float_dtype()
    heads, channels = _heads(r)
    taps = r.upto(r.pick(4, 8, 31, 200))
    dilation = r.pick(1, 1, 1, 2, 9)
    images = r.upto(r.pick(4, 64, 10_000))
    time = r.upto(r.pick(1, 16, 512, 10_000))
    if r.happens(0.3):
        channels, time = (-(-n // 8) * 8 for n in (channels, time))
        heads = channels
    activation = r.pick(None, None, "relu", "silu", "gelu")
    weight = array((heads, taps), r.float_dtype(dtype))
    bias = [array((channels,), r.float_dtype(dtype))] if r.happens(0.4) else []
    reach = (taps - 1) * dilation
    if r.happens(0.3):
        sequences, slots = r.upto(64), r.upto(64)
        arguments = [
            array((time, channels), dtype),
            weight,
            array((slots, reach, channels), r.float_dtype(dtype)),
            array((sequences + 1,), "int32"),
            array((sequences,), "int32"),
            *bias,
        ]

        def convolve_ragged(x, weight, state, starts, indices, *rest):
            return jaxops.ragged_conv(
                x,
                weight,
                starts,
                initial_state=state,
                state_indices=indices,
                dilation=dilation,
                bias=rest[0] if rest else None,
                activation=activation,
            )

        return convolve_ragged, arguments, (0, 1, 2, *range(5, len(arguments)))

    layout = r.pick("NTC", "NCT")
    padding = r.pick(reach, reach, reach // 2, r.upto(reach + 1) - 1)
    options = {
        "padding": padding,
        "dilation": dilation,
        "activation": activation,
        "data_format": layout,
    }
    has_ids = r.happens(0.8)
    has_state = not has_ids or r.happens(0.4)

    def rows(steps):
        return (images, steps, channels) if layout == "NTC" else (images, channels, steps)

    arguments = [
        array(rows(time), dtype),
        weight,
        *([array(rows(padding), r.float_dtype(dtype))] if has_state else []),
        *bias,
        *([array((images, time), r.pick("int32", "int32", "uint8"))] if has_ids else []),
    ]

    def convolve(x, weight, *rest):
        rest = list(rest)
        return jaxops.lightweight_conv(
            x,
            weight,
            initial_state=rest.pop(0) if has_state else None,
            bias=rest.pop(0) if bias else None,
            segment_ids=rest.pop(0) if has_ids else None,
            **options,
        )

    return convolve, arguments, tuple(range(len(arguments) - has_ids))


def lightweight_conv_step(r: Random):
    dtype = r.float_dtype()
    heads, channels = _heads(r)
    if r.happens(0.3):
        heads = channels = 8 * r.upto(1024)
    taps, dilation = r.upto(r.pick(4, 8, 8, 100)), r.pick(1, 1, 1, 2, 9)
    is_dynamic = r.happens(0.4)
    entries = r.upto(r.pick(4, 64, 100_000))
    options = {"dilation": dilation, "activation": r.pick(None, None, "relu", "silu", "gelu")}
    bias, indices = r.happens(0.4), r.happens(0.6)
    slots = r.upto(r.pick(4, 100, 100_000)) if indices else entries + r.pick(0, 0, 3)
    steps = () if r.happens(0.5) else (r.upto(r.pick(8, 300)),)
    if is_dynamic:
        options["normalize"] = r.happens(0.5)
        slots = slots if indices else entries
    arguments = [
        array((entries, *steps, channels), dtype),
        array((slots, (taps - 1) * dilation, channels), r.float_dtype(dtype)),
        array((*((entries, *steps) if is_dynamic else ()), heads, taps), r.float_dtype(dtype)),
        *([array((channels,), r.float_dtype(dtype))] if bias else []),
        *([array((entries,), r.pick("int32", "int32", "uint8", "int64"))] if indices else []),
    ]

    def step(x, state, weight, *rest):
        function = jaxops.dynamic_conv_step if is_dynamic else jaxops.lightweight_conv_step
        return function(
            x,
            state,
            weight,
            bias=rest[0] if bias else None,
            state_indices=rest[-1] if indices else None,
            **options,
        )

    # The derivatives are made of other operators.
    return step, arguments, ()


def dynamic_conv(r: Random):
    dtype = r.float_dtype()
    heads, channels = _heads(r)
    taps, dilation = r.upto(r.pick(4, 8, 31, 200)), r.pick(1, 1, 1, 2, 9)
    images, time = r.upto(r.pick(4, 64, 10_000)), r.upto(r.pick(1, 16, 512, 10_000))
    layout = r.pick("NTC", "NCT")
    reach = (taps - 1) * dilation
    padding = r.pick(reach, reach, reach // 2, r.upto(reach + 1) - 1)
    bias, ids, state = r.happens(0.4), r.happens(0.3), r.happens(0.3)
    options = {
        "normalize": r.happens(0.5),
        "padding": padding,
        "dilation": dilation,
        "activation": r.pick(None, None, "relu", "silu", "gelu"),
        "data_format": layout,
    }

    def rows(steps):
        return (images, steps, channels) if layout == "NTC" else (images, channels, steps)

    arguments = [
        array(rows(time), dtype),
        array((images, time, heads, taps), r.float_dtype(dtype)),
        *([array((channels,), r.float_dtype(dtype))] if bias else []),
        *([array(rows(padding), r.float_dtype(dtype))] if state else []),
        *([array((images, time), "int32")] if ids else []),
    ]

    def convolve(x, weight, *rest):
        return jaxops.dynamic_conv(
            x,
            weight,
            bias=rest[0] if bias else None,
            initial_state=rest[bias] if state else None,
            segment_ids=rest[-1] if ids else None,
            **options,
        )

    return convolve, arguments, tuple(range(len(arguments) - ids))


OPERATORS = {
    f.__name__: f
    for f in (
        concatenate,
        conv2d,
        conv_general_dilated,
        dynamic_conv,
        grid_sample,
        im2col,
        lightweight_conv,
        lightweight_conv_packed,
        lightweight_conv_step,
        sigmoid_focal_loss,
        softmax_focal_loss,
        stencils,
        trilinear_interpolate,
    )
}


def make(operator: str, seed: Sequence[int]) -> Program:
    """The program of a seed: a function and its arguments."""
    r = Random(seed)
    while True:
        function, arguments, differentiable = OPERATORS[operator](r)
        if r.happens(0.06):
            arguments = _emptied(r, arguments)
        try:
            results = leaves(jax.eval_shape(function, *arguments))
        except (TypeError, ValueError, NoKernelWarning):  # there is no such program
            continue
        if r.happens(0.65) and differentiable:
            moved = tuple(i for i in differentiable if r.happens(0.7)) or differentiable[:1]
            function = functools.partial(_vjp, function, moved, r.happens(0.5))
            arguments = [tuple(array(y.shape, y.dtype) for y in results), *arguments]
        else:
            function = functools.partial(_value, function)
            arguments = [(), *arguments]
        if r.happens(0.3):
            function, arguments = _batched(r, function, arguments)
        if sum(a.size * a.dtype.itemsize for a in leaves((arguments, results))) < _MAX_BYTES:
            return function, tuple(arguments)


def _value(function, _, *arguments):
    return function(*arguments)


def _vjp(function, moved, with_value, cotangents, *arguments):
    def moving(*changed):
        return tuple(leaves(function(*replace(arguments, moved, changed))))

    value, pull = jax.vjp(moving, *(arguments[i] for i in moved))
    return (value if with_value else ()), pull(cotangents)


def _batched(r: Random, function, arguments):
    """Under one vmap, or several, of other arguments each."""
    for _ in range(r.pick(1, 1, 2)):
        axes = [0 if r.happens(0.6) else None for _ in arguments]
        if not leaves(arguments[0]):
            axes[0] = None
        if set(axes) == {None}:
            axes[1] = 0
        size = r.upto(r.pick(3, 40))
        arguments = [
            a if axis is None else jax.tree.map(lambda x: array((size, *x.shape), x.dtype), a)  # noqa: B023
            for a, axis in zip(arguments, axes, strict=True)
        ]
        function = jax.vmap(function, in_axes=tuple(axes))
    return function, arguments


def _emptied(r: Random, arguments):
    """With a dimension of size 0: the first one, of all arguments that have as many there."""
    size = arguments[0].shape[0] if arguments[0].shape else None
    return [
        array((0, *a.shape[1:]), a.dtype) if a.shape and a.shape[0] == size else a
        for a in arguments
    ]
