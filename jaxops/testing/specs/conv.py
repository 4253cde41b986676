"""Convolution: of all channels, depthwise and transposed."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.conv import cpu_kernels, cuda_kernels
from jaxops.reference import conv as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal


def _bad(name, call, error, *fragments):
    return BadInput(name=name, call=call, error=error, fragments=("conv2d: ", *fragments))


def _bad_of_rank(rank, kernel_shape, layouts):
    """Calls of `conv1d` and `conv3d` whose errors name their own dimensions."""
    name, x = f"conv{rank}d", np.zeros((2, *(5, 4, 3)[:rank], 6), np.float32)
    kernel = np.zeros((*(2,) * rank, 6, 4), np.float32)
    convolve = getattr(jaxops, name)

    def bad(what, call, *fragments):
        return BadInput(name=what, call=call, error=ValueError, fragments=(f"{name}: ", *fragments))

    return (
        bad(
            "a vector as kernel",
            lambda *_: convolve(x, np.zeros(3, np.float32)),
            f"kernel must have shape {kernel_shape}, which has {rank + 2} dimensions",
        ),
        bad(
            "dimension numbers of images",
            lambda *_: convolve(x, kernel, dimension_numbers=("NH", "IO", "NH")),
            f"dimension_numbers must be one of {layouts[0]}, {layouts[1]}, got",
        ),
        bad(
            "strides of another rank",
            lambda *_: convolve(x, kernel, strides=(1,) * (rank + 1)),
            f"strides must be an integer or {rank} of them",
        ),
    )


_X = np.zeros((2, 5, 4, 6), np.float32)
_KERNEL = np.zeros((3, 3, 6, 4), np.float32)

_BAD_INPUTS = (
    _bad(
        "integer images",
        lambda *_: jaxops.conv2d(_X.astype(np.int32), _KERNEL),
        TypeError,
        "x must have dtype float16, bfloat16, float32 or float64, got int32",
    ),
    _bad(
        "a vector as kernel",
        lambda *_: jaxops.conv2d(_X, _KERNEL[0, 0, 0]),
        ValueError,
        "kernel must have shape (KH, KW, C // groups, O), which has 4 dimensions, got shape (4,)",
    ),
    _bad(
        "other channels",
        lambda *_: jaxops.conv2d(_X[..., :5], _KERNEL),
        ValueError,
        "kernel must have shape (KH, KW, C // groups, O)",
        "1 groups of its 6 input channels do not make the 5 channels of x",
    ),
    _bad(
        "groups that do not divide",
        lambda *_: jaxops.conv2d(_X, _KERNEL[:, :, :2], groups=3),
        ValueError,
        "groups = 3 must divide the 4 output channels of kernel",
    ),
    _bad(
        "a kernel of nothing",
        lambda *_: jaxops.conv2d(_X, _KERNEL[:, :0]),
        ValueError,
        "kernel must have KH >= 1 and KW >= 1, got 3 and 0",
    ),
    _bad(
        "unknown dimension numbers",
        lambda *_: jaxops.conv2d(_X, _KERNEL, dimension_numbers=("NHWC", "OIHW", "NHWC")),
        ValueError,
        "dimension_numbers must be one of ('NHWC', 'HWIO', 'NHWC'), ('NCHW', 'OIHW', 'NCHW'), got",
    ),
    _bad(
        "a bias of another length",
        lambda *_: jaxops.conv2d(_X, _KERNEL, bias=np.zeros(5, np.float32)),
        ValueError,
        "bias must have shape (4,)",
    ),
    _bad(
        "an unknown activation",
        lambda *_: jaxops.conv2d(_X, _KERNEL, activation="tanh"),
        ValueError,
        "activation must be one of None, 'relu', 'silu', 'gelu', got 'tanh'",
    ),
    _bad(
        "negative padding",
        lambda *_: jaxops.conv2d(_X, _KERNEL, padding=(0, -1)),
        ValueError,
        "padding[1] must be >= 0, got -1",
    ),
    _bad(
        "no stride",
        lambda *_: jaxops.conv2d(_X, _KERNEL, strides=0),
        ValueError,
        "strides must be >= 1, got 0",
    ),
    _bad(
        "an unknown precision",
        lambda *_: jaxops.conv2d(_X, _KERNEL, precision="exact"),
        ValueError,
        "precision must be one that jax.lax knows, got 'exact'",
    ),
    _bad(
        "an integer result",
        lambda *_: jaxops.conv2d(_X, _KERNEL, preferred_element_type=np.int32),
        TypeError,
        "preferred_element_type must be float16, bfloat16, float32 or float64, got int32",
    ),
)


def _placements(rank, *, depthwise, bias):
    """By images, by output channels, and by both."""
    space = (None,) * rank

    def placement(name, axes, row, channel):
        # Every device has a part of the images, or of what an image's gradient is the sum of. XLA
        # joins the sums over images of the kernel and bias gradients.
        sums = (row is not None) + (channel is not None and not depthwise)
        shared = (P(*space, None, channel), *([P(channel)] if bias else []))
        return Placement(
            name=name,
            axes=axes,
            arguments=(P(row, *space, channel if depthwise else None), *shared),
            results=(P(row, *space, channel),),
            backward={"all-reduce": sums} if sums else {},
        )

    yield placement("images", ("n",), "n", None)
    yield placement("output channels", ("c",), None, "c")
    yield placement("images and output channels", ("n", "c"), "n", "c")


def _calls(platform, *, depthwise, passes):
    """Calls of a pass, or of value and gradients: patches on a GPU, but for a depthwise one.

    Images of so few channels have no other kernels there.
    """
    if platform == "cpu" or (depthwise and platform == "cuda" and cuda_kernels.has_kernels()):
        return dict.fromkeys(cpu_kernels.TARGETS[:passes], 1)
    return {"jaxops_im2col": 1} if passes == 1 else {"jaxops_im2col": 2, "jaxops_col2im": 1}


def transposed_calls(platform, *, passes, groups=1):
    """Calls of a transposed convolution of few channels, or of it and its gradients."""
    if (
        platform == "cpu" or groups > 1
    ):  # GPUs have kernels of small groups, but of few channels none
        forward, input_grad, kernel_grad = cpu_kernels.TARGETS
        return dict.fromkeys((input_grad, forward, kernel_grad)[:passes], 1)
    return {"jaxops_col2im": 1} if passes == 1 else {"jaxops_im2col": 2, "jaxops_col2im": 1}


def make_spec(
    variant,
    *,
    fans,
    large,
    strides,
    low,
    high,
    dilation,
    bias=False,
    activation=None,
    ins=(5, 4),
    taps=(3, 2),
    groups=None,
    channels_first=False,
    bad_inputs=_BAD_INPUTS,
):
    """`fans` are the channels of a group, input and output; there are three groups of one each, and
    one group of more, unless `groups` says otherwise. Placements are those of channels last.
    """
    rank = len(ins)
    convolve = getattr(jaxops, f"conv{rank}d")
    space = "DHW"[3 - rank :]
    images, kernels = f"N{space}C", f"{space}IO"
    if channels_first:
        images, kernels = f"NC{space}", f"OI{space}"
    outs = tuple(
        (n + lo + hi - (k - 1) * d - 1) // s + 1
        for n, k, s, lo, hi, d in zip(ins, taps, strides, low, high, dilation, strict=True)
    )
    depthwise = fans == (1, 1)
    groups = groups or (3 if depthwise else 1)
    channel, fan_in_axis, output = (1, 1, 0) if channels_first else (-1, -2, -1)

    def arguments(rng, dtype, rows=2, fan_in=fans[0], fan_out=fans[1], groups=groups):
        channels, outputs = groups * fan_in, groups * fan_out
        if channels_first:
            shapes = [(rows, channels, *ins), (outputs, fan_in, *taps)]
        else:
            shapes = [(rows, *ins, channels), (*taps, fan_in, outputs)]
        shapes += [(outputs,)] if bias else []
        return tuple(normal(rng, shape, dtype) for shape in shapes)

    def options(x, kernel):
        fan_in = kernel.shape[fan_in_axis]
        found = x.shape[channel] // fan_in if fan_in else groups
        return {"strides": strides, "dilation": dilation, "groups": found}

    def function(x, kernel, bias=None):
        return convolve(
            x,
            kernel,
            padding=tuple(zip(low, high, strict=True)),
            precision="highest",
            dimension_numbers=(images, kernels, images),
            bias=bias,
            activation=activation,
            **options(x, kernel),
        )

    def compute_reference(x, kernel, bias=None):
        finish = {"outs": outs, "low": low, "bias": bias, "activation": activation}
        finish |= options(x, kernel)
        if not channels_first:
            return reference.conv(x, kernel, **finish)
        y = reference.conv(jnp.moveaxis(x, 1, -1), jnp.moveaxis(kernel, (1, 0), (-2, -1)), **finish)
        return jnp.moveaxis(y, -1, 1)

    def terms_of_sum(kernel):
        return math.prod(taps) * kernel.shape[fan_in_axis]

    def terms(x, kernel, *_):
        images = x.shape[0] * math.prod(outs)
        return max(images, terms_of_sum(kernel), math.prod(taps) * kernel.shape[output])

    def reach(index, x, kernel):
        """The zeros around the cotangent are multiplied by every tap of their channel."""
        of_x = np.zeros(x.shape, bool)
        of_x[..., index[-1]] = True
        return False, of_x, False

    calls = functools.partial(_calls, depthwise=depthwise)
    empty = {"no images": {"rows": 0}}
    if not depthwise:
        empty |= {"no input channels": {"fan_in": 0}, "no output channels": {"fan_out": 0}}
    return OperatorSpec(
        operator=f"conv{rank}d",
        variant=variant,
        function=function,
        reference=compute_reference,
        arguments=arguments,
        large=functools.partial(arguments, rows=8, **large),
        differentiable=(0, 1, 2) if bias else (0, 1),
        calls=functools.partial(calls, passes=1),
        vjp_calls=functools.partial(calls, passes=3),
        value_terms=lambda x, kernel, *_: terms_of_sum(kernel) + bias,
        vjp_terms=lambda *arguments: 4 * terms(*arguments),
        vjp_roundings=1,
        placements=()
        if channels_first
        else tuple(_placements(rank, depthwise=depthwise, bias=bias)),
        empty={name: functools.partial(arguments, **n) for name, n in empty.items()},
        bad_inputs=bad_inputs,
        padded_reach={1: reach} if depthwise and not channels_first else {},
        vjp_bitwise=False,
        checkpoint_name=f"conv{rank}d",
    )


# --- conv_general_dilated ------------------------------------------------------------------------


def _transposed_spec():
    """Transposed convolution with channels first, which doubles the images."""
    numbers = ("NCHW", "OIHW", "NCHW")
    pads = ((1, 2), (2, 1))

    def arguments(rng, dtype, rows=2, channels=3, outputs=2):
        x = normal(rng, (rows, channels, 3, 2), dtype)
        return x, normal(rng, (outputs, channels, 3, 3), dtype)

    def function(x, kernel):
        return jaxops.conv_general_dilated(
            x, kernel, (1, 1), pads, (2, 2), None, numbers, precision="highest"
        )

    def compute_reference(x, kernel):
        widths = [(0, 0, 0), (0, 0, 1), (0, 0, 1), (0, 0, 0)]
        spread = jax.lax.pad(x.transpose(0, 2, 3, 1), jnp.zeros((), x.dtype), widths)
        outs = tuple(n + lo + hi - 2 for n, (lo, hi) in zip(spread.shape[1:3], pads, strict=True))
        low = tuple(lo for lo, _ in pads)
        y = reference.conv(
            spread,
            kernel.transpose(2, 3, 1, 0),
            outs=outs,
            strides=(1, 1),
            dilation=(1, 1),
            low=low,
        )
        return y.transpose(0, 3, 1, 2)

    def placement(name, axes, row, channel):
        sums = (row is not None) + (channel is not None)
        return Placement(
            name=name,
            axes=axes,
            arguments=(P(row, None, None, None), P(channel, None, None, None)),
            results=(P(row, channel, None, None),),
            backward={"all-reduce": sums},
        )

    def reach(index, x, kernel):
        """Entries and taps whose product is beyond the result are multiplied by zeros there."""
        of_x, of_kernel = np.zeros(x.shape, bool), np.zeros(kernel.shape, bool)
        of_x[:, index[1]] = True
        of_kernel[:, index[1]] = True
        return False, of_x, of_kernel

    return OperatorSpec(
        operator="conv_general_dilated",
        variant="transposed, channels first",
        function=function,
        reference=compute_reference,
        arguments=arguments,
        large=functools.partial(arguments, rows=8, channels=8, outputs=16),
        differentiable=(0, 1),
        calls=functools.partial(transposed_calls, passes=1),
        vjp_calls=functools.partial(transposed_calls, passes=3),
        value_terms=lambda x, kernel: math.prod(kernel.shape[1:]),
        vjp_terms=lambda x, kernel: 4 * max(x.size, kernel.size),
        vjp_roundings=2,
        placements=(
            placement("images", ("n",), "n", None),
            placement("output channels", ("c",), None, "c"),
            placement("images and output channels", ("n", "c"), "n", "c"),
        ),
        empty={
            "no images": functools.partial(arguments, rows=0),
            "no channels": functools.partial(arguments, channels=0),
        },
        bad_inputs=(
            BadInput(
                name="other channels",
                call=lambda x, kernel: jaxops.conv_general_dilated(
                    x, kernel[:, :1], (1, 1), "VALID"
                ),
                error=ValueError,
                fragments=("conv_general_dilated", "feature_group_count"),
            ),
        ),
        padded_reach={0: reach, 1: reach},
        vjp_bitwise=False,
        checkpoint_name="conv_general_dilated",
    )


SPECS = (
    make_spec(
        "strides, bias, relu",
        fans=(3, 2),
        large={"fan_in": 8, "fan_out": 16},
        strides=(2, 1),
        low=(1, 0),
        high=(1, 1),
        dilation=(1, 1),
        bias=True,
        activation="relu",
    ),
    make_spec(
        "depthwise, dilated",
        fans=(1, 1),
        large={"groups": 32},
        strides=(1, 1),
        low=(2, 1),
        high=(2, 0),
        dilation=(2, 1),
    ),
    make_spec(
        "dilated, bias, silu",
        fans=(3, 2),
        large={"fan_in": 8, "fan_out": 16},
        ins=(6,),
        taps=(3,),
        strides=(1,),
        low=(2,),
        high=(1,),
        dilation=(2,),
        bias=True,
        activation="silu",
        bad_inputs=_bad_of_rank(
            1, "(KW, C // groups, O)", (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"))
        ),
    ),
    make_spec(
        "strides",
        fans=(3, 2),
        large={"fan_in": 8, "fan_out": 16},
        ins=(3, 4, 3),
        taps=(2, 3, 1),
        strides=(1, 2, 1),
        low=(1, 1, 0),
        high=(0, 1, 0),
        dilation=(1, 1, 1),
        bad_inputs=_bad_of_rank(
            3,
            "(KD, KH, KW, C // groups, O)",
            (("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW")),
        ),
    ),
    _transposed_spec(),
)
