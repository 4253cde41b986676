"""Convolution in one to three dimensions: the patches of an image times a matrix.

The primitives and their rules are in `jaxops/conv/primitives.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from jaxops._core import checks, compat
from jaxops._core.implementation import is_xla, needs_kernels
from jaxops._core.native import NoKernelWarning
from jaxops._core.public import public_function
from jaxops._families.windows import Windows, make_windows, per_dimension
from jaxops.activations import ACTIVATIONS, Activation, find_name
from jaxops.conv import primitives
from jaxops.conv.options import Options, sum_dtype, transposed_kernel

_Numbers = tuple[str, str, str]
# By the number of spatial dimensions: channels last, and channels first.
_LAYOUTS: dict[int, tuple[_Numbers, _Numbers]] = {
    1: (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")),
    2: (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")),
    3: (("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW")),
}


@public_function
def conv1d(
    x: ArrayLike,
    kernel: ArrayLike,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: ArrayLike | None = None,
    activation: Activation = None,
    dimension_numbers: tuple[str, str, str] = ("NWC", "WIO", "NWC"),
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Convolution of sequences: `conv2d` in one dimension.

    Policies of `jax.checkpoint` can name the result "conv1d".

    Args:
      x: (N, W, C), or (N, C, W); dtypes as for `conv2d`.
      kernel: (KW, C // groups, O), or (O, C // groups, KW), with KW >= 1.
      strides: an int >= 1, or a sequence of one; so is `dilation`.
      padding: "SAME", "VALID", an int >= 0, a sequence of one, or of one (low, high) pair.
      dilation: the steps between neighbouring entries of the window.
      groups: as for `conv2d`, like `bias`, `activation`, `precision` and `preferred_element_type`.
      bias: (O,).
      activation: as for `conv2d`.
      dimension_numbers: ("NWC", "WIO", "NWC") or ("NCW", "OIW", "NCW").
      precision: of the matrix products.
      preferred_element_type: the dtype of the result.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (N, OW, O), or (N, O, OW).

    Raises:
      TypeError, ValueError: as for `conv2d`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> x = jnp.arange(5.0).reshape(1, 5, 1)  # batch, width, channels
      >>> kernel = jnp.ones((3, 1, 1))  # width, input channels, output channels
      >>> jaxops.conv1d(x, kernel)[0, :, 0]
      Array([1., 3., 6., 9., 7.], dtype=float32)
    """
    return _convolve(
        "conv1d",
        1,
        x,
        kernel,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        activation=activation,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


@public_function
def conv2d(
    x: ArrayLike,
    kernel: ArrayLike,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: ArrayLike | None = None,
    activation: Activation = None,
    dimension_numbers: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC"),
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Convolution of images: `im2col` followed by a matrix product.

    ``y[n, oh, ow, o] = act(bias[o] + Σ kernel[kh, kw, i, o] ·
    x[n, oh·SH + kh·DH − PH, ow·SW + kw·DW − PW, g·I + i])`` over kh, kw and i, with the strides S,
    the dilation D, the padding P before the image, x zero outside of it, and g = o // (O // groups)
    the group of the output channel. It is what `jax.lax.conv_general_dilated` computes, with bias
    and activation.

    Under `jax.checkpoint`, policies such as
    ``jax.checkpoint_policies.save_only_these_names("conv2d")`` can name the result.

    Args:
      x: (N, H, W, C), or (N, C, H, W); float16, bfloat16, float32 or float64, or, with a kernel of
        the same and `preferred_element_type=jnp.int32`, int8. Such results are exact, and have no
        derivatives.
      kernel: (KH, KW, C // groups, O), or (O, C // groups, KH, KW), with KH, KW >= 1; any float
        dtype.
      strides: an int, or one for each of H and W, >= 1; so is `dilation`.
      padding: "SAME" for ceil(H / SH) rows of results and as many columns, "VALID" for no padding,
        an int >= 0, one for each of H and W, or a (low, high) pair for each.
      dilation: the steps between neighbouring entries of the window.
      groups: how many groups the channels form, each with its own part of the kernel; divides C and
        O. C groups make a depthwise convolution.
      bias: (O,), any float dtype.
      activation: None, "relu", "silu" (or "swish") or "gelu" (the tanh form, `jax.nn.gelu`'s
        default), in any case, or the function of `jax.nn`.
      dimension_numbers: ("NHWC", "HWIO", "NHWC") or ("NCHW", "OIHW", "NCHW"), the layouts of x,
        kernel and result.
      precision: of the matrix products, as in `jax.lax`: by default float32 may use TF32 on GPUs;
        "highest" is true float32.
      preferred_element_type: the dtype of the result, that of x by default.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (N, OH, OW, O), or (N, O, OH, OW). Sums are made in float32, or in float64 where an argument
      is.

    Raises:
      TypeError: an argument is not of a float dtype, or an option not a static integer.
      ValueError: shapes do not fit each other, or an option is out of what is listed above.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> images, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 16))  # NHWC, HWIO
      >>> jaxops.conv2d(images, kernel, strides=2, bias=jnp.ones(16), activation="relu").shape
      (2, 4, 4, 16)
      >>> images, kernel = images.astype(jnp.int8), kernel.astype(jnp.int8)
      >>> jaxops.conv2d(images, kernel, preferred_element_type=jnp.int32).max()
      Array(27, dtype=int32)
    """
    return _convolve(
        "conv2d",
        2,
        x,
        kernel,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        activation=activation,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


@public_function
def conv3d(
    x: ArrayLike,
    kernel: ArrayLike,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: ArrayLike | None = None,
    activation: Activation = None,
    dimension_numbers: tuple[str, str, str] = ("NDHWC", "DHWIO", "NDHWC"),
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Convolution of volumes: `conv2d` in three dimensions.

    Policies of `jax.checkpoint` can name the result "conv3d".

    Args:
      x: (N, D, H, W, C), or (N, C, D, H, W); dtypes as for `conv2d`.
      kernel: (KD, KH, KW, C // groups, O), or (O, C // groups, KD, KH, KW), with KD, KH, KW >= 1.
      strides: an int >= 1, or one for each of D, H and W; so is `dilation`.
      padding: "SAME", "VALID", an int >= 0, one for each of D, H and W, or a (low, high) pair for
        each.
      dilation: the steps between neighbouring entries of the window.
      groups: as for `conv2d`, like `bias`, `activation`, `precision` and `preferred_element_type`.
      bias: (O,).
      activation: as for `conv2d`.
      dimension_numbers: ("NDHWC", "DHWIO", "NDHWC") or ("NCDHW", "OIDHW", "NCDHW").
      precision: of the matrix products.
      preferred_element_type: the dtype of the result.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (N, OD, OH, OW, O), or (N, O, OD, OH, OW).

    Raises:
      TypeError, ValueError: as for `conv2d`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> volumes, kernel = jnp.ones((1, 4, 6, 6, 2)), jnp.ones((3, 3, 3, 2, 8))  # NDHWC, DHWIO
      >>> jaxops.conv3d(volumes, kernel, padding="VALID").shape
      (1, 2, 4, 4, 8)
    """
    return _convolve(
        "conv3d",
        3,
        x,
        kernel,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        activation=activation,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _convolve(
    name: str,
    rank: int,
    x: ArrayLike,
    kernel: ArrayLike,
    *,
    strides: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    bias: ArrayLike | None,
    activation: Activation,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: DTypeLike | None,
) -> jax.Array:
    """The convolution of `conv1d`, `conv2d` and `conv3d`."""
    layouts = _LAYOUTS[rank]
    layout = tuple(dimension_numbers) if isinstance(dimension_numbers, (tuple, list)) else ()
    if not all(isinstance(names, str) for names in layout) or layout not in layouts:
        raise ValueError(
            f"{name}: dimension_numbers must be one of {', '.join(map(str, layouts))}, got "
            f"{checks.describe(dimension_numbers)}"
        )
    activation = checks.choice(name, "activation", find_name(activation), ACTIVATIONS)
    channels_last = layout == layouts[0]
    space, window = list("DHW"[3 - rank :]), [f"K{d}" for d in "DHW"[3 - rank :]]
    x_shape = ["N", *space, "C"] if channels_last else ["N", "C", *space]
    fans = ["C // groups", "O"]
    kernel_shape = ", ".join([*window, *fans] if channels_last else [*fans[::-1], *window])
    kernel_shape = f"({kernel_shape})"
    # Products of integers are exact, and have no derivatives.
    is_integer = getattr(x, "dtype", None) == np.int8
    array = (
        functools.partial(_int8_array, name)
        if is_integer
        else functools.partial(checks.float_array, name)
    )
    x = array("x", x, rank + 2, f"({', '.join(x_shape)})")
    kernel = array("kernel", kernel, rank + 2, kernel_shape)
    if is_integer:
        result_dtype = _check_integers(name, preferred_element_type, bias, activation)
    else:
        result_dtype = _float_dtype(name, "preferred_element_type", preferred_element_type, x.dtype)
    precision = _precision(name, precision)
    if not channels_last:
        x = lax.transpose(x, (0, *range(2, rank + 2), 1))
        kernel = lax.transpose(kernel, (*range(2, rank + 2), 1, 0))
    *taps, fan_in, outputs = kernel.shape
    groups = checks.integer(name, "groups", groups, 1)
    if x.shape[-1] % groups:
        raise ValueError(f"{name}: groups = {groups} must divide the {x.shape[-1]} channels of x")
    if fan_in * groups != x.shape[-1]:
        raise ValueError(
            f"{name}: kernel must have shape {kernel_shape}, and {groups} groups of its {fan_in} "
            f"input channels do not make the {x.shape[-1]} channels of x"
        )
    if outputs % groups:
        raise ValueError(
            f"{name}: groups = {groups} must divide the {outputs} output channels of kernel"
        )
    if 0 in taps:
        raise ValueError(
            f"{name}: kernel must have {_and([f'{k} >= 1' for k in window])}, got {_and(taps)}"
        )
    windows = make_windows(
        name,
        x.shape[1:-1],
        taps,
        strides=strides,
        padding=padding,
        dilation=dilation,
        channels_last=True,
    )
    arrays = [x, kernel]
    if bias is not None:
        bias = (
            checks.as_array(name, "bias", bias)
            if is_integer
            else checks.float_array(name, "bias", bias, 1, "(O,)")
        )
        checks.shape(name, "bias", bias, (outputs,), "(O,), one entry an output channel of kernel")
        arrays.append(bias)
    wide = sum_dtype(*arrays, dtype=result_dtype)
    if x.dtype != kernel.dtype or wide == jnp.float64:
        x, kernel = x.astype(wide), kernel.astype(wide)
    options = Options(
        windows=windows,
        groups=groups,
        fan_in=fan_in,
        fan_out=outputs // groups,
        precision=precision,
        rounds_cotangent=preferred_element_type is None,
    )
    # Bias and activation come before the rounding.
    y = primitives.forward(
        x,
        kernel,
        None if bias is None else compat.shard_like_last(bias, kernel).astype(wide),
        options=options,
        dtype=result_dtype,
        activation=activation,
    )
    return checkpoint_name(
        y if channels_last else lax.transpose(y, (0, rank + 1, *range(1, rank + 1))), name
    )


def _int8_array(name: str, argument: str, value: Any, rank: int, shape: str) -> jax.Array:
    array = checks.as_array(name, argument, value)
    if array.dtype != jnp.int8:
        raise TypeError(
            f"{name}: {argument} must have dtype int8 if x has, got {checks.describe(array)}"
        )
    if array.ndim != rank:
        raise ValueError(
            f"{name}: {argument} must have shape {shape}, which has {rank} dimensions, got shape "
            f"{array.shape}"
        )
    return array


def _check_integers(name: str, preferred: Any, bias: Any, activation: Any) -> np.dtype:
    """The dtype of a result of int8."""
    try:
        is_int32 = preferred is not None and jnp.dtype(preferred) == np.int32
    except TypeError:
        is_int32 = False
    if not is_int32:
        raise TypeError(
            f"{name}: preferred_element_type must be int32 if x has dtype int8, got "
            f"{checks.describe(preferred)}"
        )
    if bias is not None and getattr(bias, "dtype", None) != np.int32:
        raise TypeError(
            f"{name}: bias must be an array of dtype int32 if x has dtype int8, got "
            f"{checks.describe(bias)}"
        )
    if activation not in (None, "relu"):
        raise ValueError(
            f"{name}: activation must be None or 'relu' if x has dtype int8, got {activation!r}"
        )
    return np.dtype(np.int32)


def _and(values: Sequence[Any]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last


@public_function
def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated`, argument by argument, on the kernels of this library.

    `flax.linen.Conv` and `flax.nnx.Conv` take it as their ``conv_general_dilated=``. It has
    convolutions in one to three dimensions of equal float dtypes, or of int8 with int32 results,
    with any layout, padding, negative too, strides, dilation and groups, and transposed ones, which
    are those with `lhs_dilation` and without strides. Other calls go to `jax.lax`, with a
    `NoKernelWarning`, once a case:
    ``warnings.simplefilter("error", jaxops.NoKernelWarning)`` makes that an error, and
    ``jaxops.conv_general_dilated.supported(...)``, which takes the same arguments and structures of
    shape and dtype as well, tells beforehand and runs nothing.

    Args:
      lhs: the images, of rank n + 2; with the other arguments, see `jax.lax.conv_general_dilated`.
      rhs: the kernel, of rank n + 2.
      window_strides: n integers.
      padding: "SAME", "SAME_LOWER", "VALID" or n pairs (low, high).
      lhs_dilation: n integers: zeros go between neighbouring entries of lhs.
      rhs_dilation: n integers.
      dimension_numbers: the layouts of lhs, rhs and result; by default "NCHW", "OIHW" and "NCHW".
      feature_group_count: the groups of channels.
      batch_group_count: the groups of the batch; more than one are left to `jax.lax`.
      precision: as for `conv2d`.
      preferred_element_type: the dtype of the result, that of lhs by default.
      out_sharding: the sharding of the result on meshes of explicit axes.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      The array that `jax.lax.conv_general_dilated` returns, but for the order of its sums.

    Raises:
      TypeError, ValueError: those of `jax.lax.conv_general_dilated`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> images, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((16, 3, 3, 3))  # NCHW, OIHW
      >>> jaxops.conv_general_dilated(images, kernel, (2, 2), "SAME").shape
      (2, 16, 4, 4)
      >>> jaxops.conv_general_dilated.supported(images, kernel, (2, 2), "SAME")
      True
    """
    name = "conv_general_dilated"
    lhs, rhs = checks.as_array(name, "lhs", lhs), checks.as_array(name, "rhs", rhs)
    options = {
        "window_strides": window_strides,
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    case = _find_case(lhs, rhs, options)
    # On explicit meshes `jax.lax` would want an out_sharding of some calls.
    if is_xla() and (case.missing is not None or not compat.has_explicit_axes(lhs)):
        y = lax.conv_general_dilated(lhs, rhs, **options, out_sharding=out_sharding)
        return checkpoint_name(y, name)
    if case.missing is not None:
        case.refuse_or_warn()
        return lax.conv_general_dilated(lhs, rhs, **options, out_sharding=out_sharding)
    if isinstance(lhs, jax.core.Tracer) or isinstance(rhs, jax.core.Tracer):
        y = checkpoint_name(case.compute(lhs, rhs), name)
    else:
        y = case.compiled(lhs, rhs)
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


@public_function
def conv_transpose(
    lhs: ArrayLike,
    rhs: ArrayLike,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    use_consistent_padding: bool = False,
    *,
    feature_group_count: int = 1,
    implementation: str | None = None,
) -> jax.Array:
    """`jax.lax.conv_transpose`, argument by argument, on the kernels of this library, with groups.

    It is the convolution, with strides of 1, of lhs with S - 1 zeros between its neighbours, for
    the strides S: ``y[n, h, o] = Σ rhs[k, i, o] · lhs[n, (h + k·D − P) / S, i]`` in one dimension,
    over i and over the k whose index is whole and inside of lhs. With `transpose_kernel` it is the
    gradient, with respect to its input, of the convolution with kernel rhs and strides S, which
    PyTorch and Keras call the transposed convolution.

    Policies of `jax.checkpoint` can name the result "conv_general_dilated".

    Args:
      lhs: the images, of rank n + 2 for n of 1 to 3; float16, bfloat16, float32 or float64.
      rhs: the kernel, of rank n + 2 and of lhs's dtype: that of `conv_general_dilated`; with
        transpose_kernel that of the convolution whose transpose this is, with lhs's channels as
        outputs.
      strides: n integers >= 1.
      padding: "SAME" for results of S times the size of lhs; "VALID" for all that the convolution
        of the result with strides S and no padding would read; or n pairs (low, high) of the
        dilated lhs.
      rhs_dilation: n integers >= 1, the steps between neighbouring entries of the window.
      dimension_numbers: the layouts of lhs, rhs and result; by default channels last, as
        ("NHWC", "HWIO", "NHWC").
      transpose_kernel: whether to flip the window and to exchange inputs and outputs of rhs.
      precision: as for `conv2d`.
      preferred_element_type: the dtype of the result, that of lhs by default.
      use_consistent_padding: whether pairs are those of the convolution whose transpose this is, as
        in PyTorch: (low, high) stands for K - 1 - low and K - 1 - high, of the dilated window K.
      feature_group_count: how many groups the channels form, each with its own part of the kernel.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      The array that `jax.lax.conv_transpose` returns, but for the order of its sums.

    Raises:
      TypeError, ValueError: an option is out of what is listed above, or shapes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> images, kernel = jnp.ones((2, 8, 8, 16)), jnp.ones((4, 4, 16, 3))  # NHWC, HWIO
      >>> jaxops.conv_transpose(images, kernel, (2, 2), "SAME").shape
      (2, 16, 16, 3)
    """
    name = "conv_transpose"
    lhs, rhs = checks.as_array(name, "lhs", lhs), checks.as_array(name, "rhs", rhs)
    rank = lhs.ndim - 2
    if rhs.ndim != lhs.ndim or not 1 <= rank <= 3:
        raise ValueError(
            f"{name}: lhs and rhs must both have 3, 4 or 5 dimensions, got shapes {lhs.shape} and "
            f"{rhs.shape}"
        )
    transpose_kernel = checks.boolean(name, "transpose_kernel", transpose_kernel)
    use_consistent_padding = checks.boolean(name, "use_consistent_padding", use_consistent_padding)
    precision = _precision(name, precision)
    if preferred_element_type is not None:
        preferred_element_type = _float_dtype(
            name, "preferred_element_type", preferred_element_type, None
        )
    strides = per_dimension(name, "strides", strides, rank, 1)
    ones = (1,) * rank
    dilation = per_dimension(
        name, "rhs_dilation", ones if rhs_dilation is None else rhs_dilation, rank, 1
    )
    groups = checks.integer(name, "feature_group_count", feature_group_count, 1)
    if dimension_numbers is None:
        dimension_numbers = _CHANNELS_LAST[rank]
    with checks.without_arrays(name, {"dimension_numbers": dimension_numbers}):
        numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    outputs, inputs, *space = numbers.rhs_spec
    reaches = [(rhs.shape[d] - 1) * step for d, step in zip(space, dilation, strict=True)]
    if isinstance(padding, str):
        of_pads = checks.choice(name, "padding", padding, ("SAME", "VALID"))
        pads = [_transposed_pads(r, s, of_pads) for r, s in zip(reaches, strides, strict=True)]
    else:
        pads = _pairs(name, padding, rank)
        if use_consistent_padding:
            pads = [(r - low, r - high) for r, (low, high) in zip(reaches, pads, strict=True)]
    if transpose_kernel:
        if rhs.shape[outputs] % groups:
            raise ValueError(
                f"{name}: feature_group_count = {groups} must divide the {rhs.shape[outputs]} "
                "output channels of rhs"
            )
        rhs = transposed_kernel(lax.transpose(rhs, (*space, inputs, outputs)), groups)
        last = (rank + 1, rank, *range(rank))
        numbers = lax.ConvDimensionNumbers(numbers.lhs_spec, last, numbers.out_spec)
    return conv_general_dilated(
        lhs,
        rhs,
        ones,
        pads,
        strides,
        dilation,
        numbers,
        feature_group_count=groups,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


_CHANNELS_LAST = {
    1: ("NHC", "HIO", "NHC"),
    2: ("NHWC", "HWIO", "NHWC"),
    3: ("NHWDC", "HWDIO", "NHWDC"),
}


def _pairs(function: str, padding: Any, rank: int) -> list[tuple[int, int]]:
    is_pairs = checks.is_sequence(padding) and len(padding) == rank
    if not is_pairs or not all(checks.is_sequence(p) and len(p) == 2 for p in padding):
        raise ValueError(
            f"{function}: padding must be 'SAME', 'VALID' or {rank} (low, high) pairs, got "
            f"{checks.describe(padding)}"
        )
    low, high = (
        [checks.integer(function, f"padding[{i}]", pair[end]) for i, pair in enumerate(padding)]
        for end in (0, 1)
    )
    return list(zip(low, high, strict=True))


def _transposed_pads(reach: int, stride: int, padding: str) -> tuple[int, int]:
    """The zeros around the dilated images whose result has the size that `padding` says."""
    if padding == "VALID":
        return reach, max(stride - 1, reach)
    low = reach if stride > reach else -(-(reach + stride - 1) // 2)
    return low, reach + stride - 1 - low


def _supported(*arguments: Any, **options: Any) -> bool:
    """Whether `conv_general_dilated` has kernels for these arguments; runs nothing.

    It takes what `conv_general_dilated` takes, with `jax.ShapeDtypeStruct` for arrays where that is
    all there is, and raises what that raises.
    """
    bound = _SIGNATURE.bind(*arguments, **options)
    bound.apply_defaults()
    for name in ("out_sharding", "implementation"):
        del bound.arguments[name]
    for name in ("lhs", "rhs"):
        if not isinstance(bound.arguments[name], jax.ShapeDtypeStruct):
            bound.arguments[name] = jnp.asarray(bound.arguments[name])
    lhs, rhs = (bound.arguments.pop(name) for name in ("lhs", "rhs"))
    return _find_case(lhs, rhs, bound.arguments).missing is None


_SIGNATURE = inspect.signature(conv_general_dilated)
# An attribute that a checker does not know functions to have.
setattr(conv_general_dilated, "supported", _supported)  # noqa: B010


def _find_case(lhs: Any, rhs: Any, options: dict[str, Any]) -> _LaxCase:
    """The case of these arguments, which is made once for all of the same types and options."""
    # A list is no dtype, but NumPy takes some tuples for one.
    frozen = tuple(
        (name, value if name == "preferred_element_type" else _freeze(value))
        for name, value in options.items()
    )
    # Without 64 bits a result of float64 is float32; 1 and 1.0 are equal, and only one is a stride.
    setting = compat.setting("jax_enable_x64"), repr(frozen)
    static = lhs.shape, lhs.dtype, rhs.shape, rhs.dtype, frozen, setting
    has_numbers = all(type(n) is int for n in (*lhs.shape, *rhs.shape))
    return (_LaxCase.cached if has_numbers and _is_hashable(static) else _LaxCase)(*static)


def _freeze(value: Any) -> Any:
    """Lists and arrays as tuples, which have a hash."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(map(_freeze, value)) if type(value) in (list, tuple) else value


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class _LaxCase:
    """The arguments of `jax.lax.conv_general_dilated`, checked by it.

    Attributes:
      missing: what there is no kernel for, or None.
    """

    # The cases that were left to `jax.lax` with a warning.
    _warned: ClassVar[set[str]] = set()

    def __init__(self, lhs_shape, lhs_dtype, rhs_shape, rhs_dtype, options, _):
        options = dict(options)
        like = functools.partial(lax.conv_general_dilated, **options)
        structs = (
            jax.ShapeDtypeStruct(lhs_shape, lhs_dtype),
            jax.ShapeDtypeStruct(rhs_shape, rhs_dtype),
        )
        with checks.without_arrays("conv_general_dilated", options):
            self._result = jax.eval_shape(like, *structs)
        numbers = lax.conv_dimension_numbers(lhs_shape, rhs_shape, options["dimension_numbers"])
        self._numbers = numbers
        self._ins, self._taps, self._outs = (
            tuple(shape[d] for d in spec[2:])
            for shape, spec in zip((lhs_shape, rhs_shape, self._result.shape), numbers, strict=True)
        )
        ones = (1,) * len(self._ins)
        self._strides = tuple(options["window_strides"])
        self._zeros = tuple(options["lhs_dilation"] or ones)
        self._dilation = tuple(options["rhs_dilation"] or ones)
        self._padding = options["padding"]
        self._groups = options["feature_group_count"]
        self._precision = options["precision"]
        self._preferred = options["preferred_element_type"]
        self._dtypes = (lhs_dtype, rhs_dtype)
        self.missing = self._find_missing(options["batch_group_count"])

    @classmethod
    @functools.lru_cache(4096)
    def cached(cls, *static: Any) -> _LaxCase:
        """The one case of these arguments."""
        return cls(*static)

    @functools.cached_property
    def compiled(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """`compute` as one program, for calls outside of `jit`."""
        return jax.jit(self.compute)

    def _find_missing(self, batch_groups: int) -> str | None:
        wanted = (*self._dtypes, self._result.dtype)
        is_integer = wanted == (jnp.int8, jnp.int8, jnp.int32)
        unknown = [str(d) for d in wanted if d not in checks.FLOATS and not is_integer]
        if not 1 <= len(self._ins) <= 3:
            return f"{len(self._ins)} spatial dimensions"
        if unknown:
            return f"dtype {unknown[0]}"
        if self._dtypes[0] != self._dtypes[1]:
            return "operands of two dtypes"
        if batch_groups != 1:
            return "batch_group_count"
        if 0 in self._taps:
            return "a kernel of no entries"
        if set(self._zeros) != {1} and set(self._strides) != {1}:
            return "window_strides and lhs_dilation at once"
        return None

    def refuse_or_warn(self) -> None:
        """Says once that `jax.lax` computes this case, or raises where kernels are insisted on."""
        function = needs_kernels("conv_general_dilated")
        if function is not None:
            raise NotImplementedError(
                f"{function}: implementation='native' needs a kernel, and jaxops has none for "
                f"{self.missing}"
            )
        if self.missing is None or self.missing in self._warned:
            return
        warnings.warn(
            f"conv_general_dilated: jaxops has no kernel for {self.missing}; jax.lax computes it",
            NoKernelWarning,
            stacklevel=4,
        )
        self._warned.add(self.missing)

    def compute(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The convolution of arrays of the shapes of this case."""
        (n, c, *space), (o, i, *of_taps), out_spec = self._numbers
        x, kernel = _permute(lhs, (n, *space, c)), _permute(rhs, (*of_taps, i, o))
        if self._result.dtype == jnp.float64:
            x, kernel = x.astype(jnp.float64), kernel.astype(jnp.float64)
        fan_in, outputs = kernel.shape[-2:]
        groups = self._groups
        options = Options(
            windows=Windows(
                ins=self._ins,
                outs=self._outs,
                taps=self._taps,
                strides=self._strides,
                dilation=self._dilation,
                low=self._low(),
                channels_last=True,
            ),
            groups=groups,
            fan_in=fan_in,
            fan_out=outputs // groups,
            precision=_precision("conv_general_dilated", self._precision),
            rounds_cotangent=self._preferred is None,
        )
        if set(self._zeros) == {1} or self._result.dtype == jnp.int32:
            x, options = _with_zeros(x, options, self._zeros)
            y = primitives.forward(x, kernel, options=options, dtype=self._result.dtype)
        else:
            mirrored, flipped = (
                options.transposed(self._zeros),
                transposed_kernel(kernel, groups),
            )
            y = primitives.input_grad(x, flipped, options=mirrored, dtype=self._result.dtype)
        order = out_spec[0], *out_spec[2:], out_spec[1]
        return _permute(y, tuple(map(order.index, range(y.ndim))))

    def _low(self) -> tuple[int, ...]:
        if not isinstance(self._padding, str):
            return tuple(int(low) for low, _ in self._padding)
        reaches = [
            (k - 1) * d + 1 if k else 0 for k, d in zip(self._taps, self._dilation, strict=True)
        ]
        pads = lax.padtype_to_pads(self._ins, reaches, self._strides, self._padding)
        return tuple(int(low) for low, _ in pads)


def _with_zeros(x: jax.Array, options: Options, steps: Sequence[int]) -> tuple[jax.Array, Options]:
    """Images whose entries are `steps` apart, with zeros between them, and their options.

    The input gradient, of which convolutions of floats are made that have such images, adds patches
    of floats only.
    """
    if set(steps) == {1}:
        return x, options
    padding = [(0, 0, 0), *((0, 0, step - 1) for step in steps), (0, 0, 0)]
    x = lax.pad(x, jnp.zeros((), x.dtype), padding)
    windows = dataclasses.replace(options.windows, ins=x.shape[1:-1])
    return x, dataclasses.replace(options, windows=windows)


def _permute(array: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return array if order == tuple(range(array.ndim)) else lax.transpose(array, order)


def _float_dtype(function: str, argument: str, value: Any, default: Any) -> np.dtype:
    if value is None:
        return np.dtype(default)
    got = checks.describe(value)
    if not checks.is_array(value):  # NumPy takes an array for its dtype
        try:
            # Without 64 bits, float64 is float32, as everywhere in JAX.
            dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(value))
        except (TypeError, ValueError):
            pass
        else:
            if dtype in checks.FLOATS:
                return dtype
            got = str(dtype)
    raise TypeError(
        f"{function}: {argument} must be float16, bfloat16, float32 or float64, got {got}"
    )


def _precision(function: str, precision: Any) -> Any:
    """The precision as `jax.lax` takes it, hashable; None is JAX's default at this moment."""
    if precision is None:
        return compat.setting("jax_default_matmul_precision")
    precision = _freeze(precision)
    try:
        _check_precision(precision)
    except (TypeError, ValueError):
        raise ValueError(
            f"{function}: precision must be one that jax.lax knows, got "
            f"{checks.describe(precision)}"
        ) from None
    return precision


@functools.cache
def _check_precision(precision: Any) -> None:
    struct = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.eval_shape(functools.partial(lax.dot, precision=precision), struct, struct)
