"""Convolution in one to three dimensions: the patches of an image times a matrix.

The family has three primitives, each linear in each of its operands:

    forward       x, kernel -> y
    input_grad    g, kernel -> dx, its transpose in x
    kernel_grad   x, g -> dkernel, its transpose in the kernel

and every derivative of these is again one of these. They are made of `im2col` and `col2im` and of a
matrix product of XLA's. What a gradient needs is x, not its patches, which are made again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import string
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from jaxops._core import checks, compat, rules
from jaxops._core.primitive import Operator
from jaxops._core.windows import Windows, col2im_operator, im2col_operator, place
from jaxops.reference.lightweight_conv import ACTIVATIONS

# Patches of more bytes than these do not stay in the caches of a CPU until they are multiplied.
# There they are made and used block by block; where XLA's own convolution, which never has more
# than a tile of them, was measured to be faster still, it takes their place.
_BLOCK_BYTES = 8 << 20
# On other devices they may take this much of the memory.
_DEVICE_BLOCK_BYTES = 1 << 30

_LAYOUTS = (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"))


def conv2d(
    x: ArrayLike,
    kernel: ArrayLike,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    dimension_numbers: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC"),
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
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
      x: (N, H, W, C), or (N, C, H, W); float16, bfloat16, float32 or float64.
      kernel: (KH, KW, C // groups, O), or (O, C // groups, KH, KW), with KH, KW >= 1; any float
        dtype.
      strides: an int, or one for each of H and W, >= 1; so is `dilation`.
      padding: "SAME" for ceil(H / SH) rows of results and as many columns, "VALID" for no padding,
        an int >= 0, one for each of H and W, or a (low, high) pair for each.
      dilation: the steps between neighbouring entries of the window.
      groups: how many groups the channels form, each with its own part of the kernel; divides C and
        O. C groups make a depthwise convolution.
      bias: (O,), any float dtype.
      activation: None, "relu", "silu" or "gelu" (the tanh form, `jax.nn.gelu`'s default).
      dimension_numbers: ("NHWC", "HWIO", "NHWC") or ("NCHW", "OIHW", "NCHW"), the layouts of x,
        kernel and result.
      precision: of the matrix products, as in `jax.lax`: by default float32 may use TF32 on GPUs;
        "highest" is true float32.
      preferred_element_type: the dtype of the result, that of x by default.

    Returns:
      (N, OH, OW, O), or (N, O, OH, OW). Sums are made in float32, or in float64 where an argument
      is.

    Raises:
      TypeError: an argument is not of a float dtype, or an option not a static integer.
      ValueError: shapes do not fit each other, or an option is out of what is listed above.
    """
    me = "conv2d"
    layout = tuple(dimension_numbers) if isinstance(dimension_numbers, (tuple, list)) else None
    if layout not in _LAYOUTS:
        raise ValueError(
            f"{me}: dimension_numbers must be one of {', '.join(map(str, _LAYOUTS))}, got "
            f"{dimension_numbers!r}"
        )
    checks.choice(me, "activation", activation, ACTIVATIONS)
    channels_last = layout == _LAYOUTS[0]
    x = checks.float_array(me, "x", x, 4, "(N, H, W, C)" if channels_last else "(N, C, H, W)")
    kernel_shape = "(KH, KW, C // groups, O)" if channels_last else "(O, C // groups, KH, KW)"
    kernel = checks.float_array(me, "kernel", kernel, 4, kernel_shape)
    result_dtype = _float_dtype(me, "preferred_element_type", preferred_element_type, x.dtype)
    precision = _precision(me, precision)
    if not channels_last:
        x, kernel = x.transpose(0, 2, 3, 1), kernel.transpose(2, 3, 1, 0)
    *taps, fan_in, outputs = kernel.shape
    groups = checks.integer(me, "groups", groups, 1)
    if x.shape[-1] % groups:
        raise ValueError(f"{me}: groups = {groups} must divide the {x.shape[-1]} channels of x")
    if fan_in * groups != x.shape[-1]:
        raise ValueError(
            f"{me}: kernel must have shape {kernel_shape}, and {groups} groups of its {fan_in} "
            f"input channels do not make the {x.shape[-1]} channels of x"
        )
    if outputs % groups:
        raise ValueError(
            f"{me}: groups = {groups} must divide the {outputs} output channels of kernel"
        )
    if 0 in taps:
        raise ValueError(f"{me}: kernel must have KH >= 1 and KW >= 1, got {taps[0]} and {taps[1]}")
    windows = place(
        me,
        x.shape[1:-1],
        taps,
        strides=strides,
        padding=padding,
        dilation=dilation,
        channels_last=True,
    )
    arrays = [x, kernel]
    if bias is not None:
        bias = checks.float_array(me, "bias", bias, 1, "(O,)")
        checks.shape(me, "bias", bias, (outputs,), "(O,), one entry an output channel of kernel")
        arrays.append(bias)
    wide = jnp.result_type(jnp.float32, result_dtype, *(a.dtype for a in arrays))
    if x.dtype != kernel.dtype or wide == jnp.float64:
        x, kernel = x.astype(wide), kernel.astype(wide)
    options = _Options(
        windows=windows,
        groups=groups,
        fan_in=fan_in,
        fan_out=outputs // groups,
        precision=precision,
        rounds_cotangent=preferred_element_type is None,
    )
    # Bias and activation come before the rounding.
    is_last = bias is None and activation is None
    y = _forward(x, kernel, options=options, dtype=result_dtype if is_last else wide)
    if bias is not None:
        y = y + compat.shard_like_last(bias, y).astype(y.dtype)
    if activation is not None:
        # Named as well: it is what the gradient needs, so that a policy which saves the operator's
        # result spares the backward pass a second forward one.
        y = ACTIVATIONS[activation](checkpoint_name(y, me))
    y = y.astype(result_dtype)
    return checkpoint_name(y if channels_last else y.transpose(0, 3, 1, 2), me)


class NoKernelWarning(UserWarning):
    """`conv_general_dilated` has left a case to `jax.lax`. There is one a case and process."""


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
) -> jax.Array:
    """`jax.lax.conv_general_dilated`, argument by argument, on the kernels of this library.

    `flax.linen.Conv` and `flax.nnx.Conv` take it as their ``conv_general_dilated=``. It has
    convolutions in one to three dimensions of equal float dtypes, with any layout, padding,
    negative too, strides, dilation and groups, and transposed ones, which are those with
    `lhs_dilation` and without strides. What else there is goes to `jax.lax`, with a
    `NoKernelWarning`, once a case:
    ``warnings.simplefilter("error", jaxops.conv.NoKernelWarning)`` makes that an error, and
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

    Returns:
      The array that `jax.lax.conv_general_dilated` returns, but for the order of its sums.

    Raises:
      TypeError, ValueError: those of `jax.lax.conv_general_dilated`.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
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
    case = _LaxCase(lhs, rhs, **options)
    if case.missing is not None:
        case.warn()
        return lax.conv_general_dilated(lhs, rhs, **options, out_sharding=out_sharding)
    y = checkpoint_name(case.compute(lhs, rhs), "conv_general_dilated")
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def _supported(*arguments: Any, **options: Any) -> bool:
    """Whether `conv_general_dilated` has kernels for these arguments; runs nothing.

    It takes what `conv_general_dilated` takes, with `jax.ShapeDtypeStruct` for arrays where that is
    all there is, and raises what that raises.
    """
    bound = _SIGNATURE.bind(*arguments, **options)
    bound.apply_defaults()
    del bound.arguments["out_sharding"]
    return _LaxCase(**bound.arguments).missing is None


_SIGNATURE = inspect.signature(conv_general_dilated)
conv_general_dilated.supported = _supported


class _LaxCase:
    """The arguments of `jax.lax.conv_general_dilated`, checked by it.

    Attributes:
      missing: what there is no kernel for, or None.
    """

    # What has been left to `jax.lax` and said so.
    _warned: ClassVar[set[str]] = set()

    def __init__(
        self,
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
    ):
        like = functools.partial(
            lax.conv_general_dilated,
            window_strides=window_strides,
            padding=padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            dimension_numbers=dimension_numbers,
            feature_group_count=feature_group_count,
            batch_group_count=batch_group_count,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs)]
        self._result = jax.eval_shape(like, *structs)
        self._numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
        self._ins, self._taps, self._outs = (
            tuple(shape[d] for d in spec[2:])
            for shape, spec in zip(
                (lhs.shape, rhs.shape, self._result.shape), self._numbers, strict=True
            )
        )
        ones = (1,) * len(self._ins)
        self._strides = tuple(window_strides)
        self._zeros = ones if lhs_dilation is None else tuple(lhs_dilation)
        self._dilation = ones if rhs_dilation is None else tuple(rhs_dilation)
        self._padding = padding
        self._groups = feature_group_count
        self._precision = precision
        self._preferred = preferred_element_type
        self._dtypes = (lhs.dtype, rhs.dtype)
        self.missing = self._find_missing(batch_group_count)

    def _find_missing(self, batch_groups: int) -> str | None:
        wanted = (*self._dtypes, self._result.dtype)
        unknown = [str(d) for d in wanted if d not in checks.FLOATS]
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

    def warn(self) -> None:
        """Says once that `jax.lax` computes this case."""
        if self.missing in self._warned:
            return
        warnings.warn(
            f"conv_general_dilated: jaxops has no kernel for {self.missing}; jax.lax computes it",
            NoKernelWarning,
            stacklevel=3,
        )
        self._warned.add(self.missing)

    def compute(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The convolution of arrays of the shapes of this case."""
        (n, c, *space), (o, i, *of_taps), out_spec = self._numbers
        x, kernel = lhs.transpose(n, *space, c), rhs.transpose(*of_taps, i, o)
        if self._result.dtype == jnp.float64:
            x, kernel = x.astype(jnp.float64), kernel.astype(jnp.float64)
        fan_in, outputs = kernel.shape[-2:]
        groups = self._groups
        options = _Options(
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
        if set(self._zeros) == {1}:
            y = _forward(x, kernel, options=options, dtype=self._result.dtype)
        else:
            mirrored, flipped = options.transposed(self._zeros), _transposed_kernel(kernel, groups)
            y = _input_grad(x, flipped, options=mirrored, dtype=self._result.dtype)
        return jnp.moveaxis(y, range(y.ndim), (out_spec[0], *out_spec[2:], out_spec[1]))

    def _low(self) -> tuple[int, ...]:
        if not isinstance(self._padding, str):
            return tuple(int(low) for low, _ in self._padding)
        reaches = [
            (k - 1) * d + 1 if k else 0 for k, d in zip(self._taps, self._dilation, strict=True)
        ]
        pads = lax.padtype_to_pads(self._ins, reaches, self._strides, self._padding)
        return tuple(int(low) for low, _ in pads)


def _transposed_kernel(kernel: jax.Array, groups: int) -> jax.Array:
    """The kernel whose input gradient is the convolution, without strides, with `kernel`."""
    *taps, fan_in, outputs = kernel.shape
    flipped = jnp.flip(kernel, range(len(taps)))
    grouped = flipped.reshape(*taps, fan_in, groups, outputs // groups)
    return jnp.moveaxis(grouped, (-3, -1), (-1, -3)).reshape(
        *taps, outputs // groups, groups * fan_in
    )


def _float_dtype(function: str, argument: str, value: Any, default: Any) -> np.dtype:
    if value is None:
        return np.dtype(default)
    # Without 64 bits, float64 is float32, as everywhere in JAX.
    dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(value))
    if dtype not in checks.FLOATS:
        raise TypeError(
            f"{function}: {argument} must be float16, bfloat16, float32 or float64, got {dtype}"
        )
    return dtype


def _precision(function: str, precision: Any) -> Any:
    """What `jax.lax` takes as a precision, hashable; None is JAX's default at this moment."""
    if precision is None:
        return jax.config.jax_default_matmul_precision
    if isinstance(precision, list):
        precision = tuple(precision)
    struct = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(functools.partial(lax.dot, precision=precision), struct, struct)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{function}: precision must be one that jax.lax knows, got {precision!r}"
        ) from error
    return precision


# --- the primitives ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Options:
    """What every primitive of the family is told, beside shapes.

    Attributes:
      windows: over x.
      groups: of channels.
      fan_in: input channels of a group.
      fan_out: output channels of a group.
      precision: of the products.
      rounds_cotangent: whether cotangents of the result are rounded to the dtype of x, to which
        the result is rounded too, if only after bias and activation.
    """

    windows: Windows
    groups: int
    fan_in: int
    fan_out: int
    precision: Any
    rounds_cotangent: bool

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.fan_in == 1 and self.fan_out == 1

    def of_one_group(self) -> _Options:
        return dataclasses.replace(self, groups=1)

    def transposed(self, strides: Sequence[int]) -> _Options:
        """Those of the convolution whose input gradient is this one, of an lhs with zeros between.

        This one has no strides, that one those by which the entries of lhs are apart.
        """
        windows = self.windows
        reaches = [(k - 1) * d for k, d in zip(windows.taps, windows.dilation, strict=True)]
        mirrored = dataclasses.replace(
            windows,
            ins=windows.outs,
            outs=windows.ins,
            strides=tuple(strides),
            low=tuple(r - low for r, low in zip(reaches, windows.low, strict=True)),
        )
        return dataclasses.replace(self, windows=mirrored, fan_in=self.fan_out, fan_out=self.fan_in)

    # The dimensions of the operands in signatures. Of several groups devices have all channels,
    # unless every channel is a group of its own.

    @property
    def x(self) -> str:
        return self._image(self.windows.ins, "in", "cin", "inputs", self.fan_in)

    @property
    def y(self) -> str:
        return self._image(self.windows.outs, "out", "cout", "outputs", self.fan_out)

    @property
    def kernel(self) -> str:
        taps = " ".join(f"tap{i}={n}" for i, n in enumerate(self.windows.taps))
        if self.groups == 1:
            return f"{taps} cin cout"
        if self.is_depthwise:
            return f"{taps} () channels"
        return f"{taps} fan={self.fan_in} outputs={self.groups * self.fan_out}"

    def _image(self, sizes, dim, dense, grouped, fan):
        dims = " ".join(f"{dim}{i}={n}" for i, n in enumerate(sizes))
        if self.groups == 1:
            return f"rows {dims} {dense}"
        return f"rows {dims} " + (
            "channels" if self.is_depthwise else f"{grouped}={self.groups * fan}"
        )


_REPLICATED = ("in", "out", "tap", "fan", "inputs", "outputs")


def _forward_local(x, kernel, *, options, dtype, platform):
    windows = options.windows
    axis = x.ndim - 2 - _rank(options)
    if options.is_depthwise:

        def compute(x):
            products = _wide(_patches(x, windows)) * _over_images(kernel, options)
            return products.sum(_tap_axes(products, options))
    elif options.groups > 1:
        grouped = _to_groups(x, axis, options), _to_groups(kernel, axis, options)
        y = _forward_local(*grouped, options=options.of_one_group(), dtype=dtype, platform=platform)
        return [_from_groups(y[0], axis)]
    else:

        def compute(x):
            outs, taps = _letters(options)
            return _product(
                (f"n{outs}{taps}i", f"{taps}ij", f"n{outs}j"), _patches(x, windows), kernel, options
            )

    block = _block(options, platform, x, kernel)
    if _is_faster_in_tiles(options, platform, block, x, kernel):
        return [_convolution(x, kernel, options).astype(dtype)]
    return [_joined(lambda x: compute(x).astype(dtype), axis, block, x)]


def _input_grad_local(g, kernel, *, options, dtype, platform):
    windows = options.windows
    axis = g.ndim - 2 - _rank(options)
    if options.is_depthwise:

        def patches(g):
            taps = range(g.ndim - 1, g.ndim - 1 + _rank(options))
            return _wide(jnp.expand_dims(g, taps)) * _over_images(kernel, options)
    elif options.groups > 1:
        grouped = _to_groups(g, axis, options), _to_groups(kernel, axis, options)
        one = options.of_one_group()
        dx = _input_grad_local(*grouped, options=one, dtype=dtype, platform=platform)
        return [_from_groups(dx[0], axis)]
    else:

        def patches(g):
            outs, taps = _letters(options)
            return _product((f"n{outs}j", f"{taps}ij", f"n{outs}{taps}i"), g, kernel, options)

    block = _block(options, platform, g, kernel)
    if set(windows.strides) == {1} and _is_faster_in_tiles(options, platform, block, g, kernel):
        mirrored = options.transposed((1,) * _rank(options))
        return [_convolution(g, _transposed_kernel(kernel, 1), mirrored).astype(dtype)]
    return [_joined(lambda g: _image(patches(g), windows).astype(dtype), axis, block, g)]


def _kernel_grad_local(x, g, *, options, dtype, summed, platform):
    windows = options.windows
    axis = x.ndim - 2 - _rank(options)
    if options.groups > 1 and not options.is_depthwise:
        grouped = _to_groups(x, axis, options), _to_groups(g, axis, options)
        (dkernel,) = _kernel_grad_local(
            *grouped,
            options=options.of_one_group(),
            dtype=dtype,
            summed=(*summed, False),
            platform=platform,
        )
        return [_from_groups(dkernel, axis)]

    def compute(x, g):
        patches = _patches(x, windows, again=True)
        if options.is_depthwise:
            taps = range(g.ndim - 1, g.ndim - 1 + _rank(options))
            products = _wide(patches) * jnp.expand_dims(g, taps)
            images = range(axis, axis + 1 + _rank(options))
            batch = tuple(i for i, s in enumerate(summed) if s)
            return products.sum(batch, keepdims=True).sum(tuple(images))[..., None, :]
        outs, taps = _letters(options)
        names = (f"n{outs}{taps}i", f"n{outs}j", f"{taps}ij")
        return _product(names, patches, g, options, summed)

    block = _block(options, platform, x, g)
    return [_summed(compute, axis, block, x, g).astype(dtype)]


def _rank(options: _Options) -> int:
    return len(options.windows.taps)


def _letters(options: _Options) -> tuple[str, str]:
    """Those of the windows' dimensions, for `_product`: patches and taps.

    Dimensions that are summed over come in the order of their letters. With these, that is how they
    lie in memory, in which patches are multiplied as they are.
    """
    return "opq"[: _rank(options)], "abc"[: _rank(options)]


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _patches(x: jax.Array, windows: Windows, *, again: bool = False) -> jax.Array:
    """(..., rows, *ins, C) -> (..., rows, *outs, *taps, C)."""
    if windows.are_entries:
        return jnp.expand_dims(x, range(x.ndim - 1, x.ndim - 1 + len(windows.taps)))
    return im2col_operator.on_one_device(x, windows=windows, again=again)[0]


def _image(patches: jax.Array, windows: Windows) -> jax.Array:
    """The transpose of `_patches`."""
    if windows.are_entries:
        rank = len(windows.taps)
        return jnp.squeeze(patches, range(patches.ndim - 1 - rank, patches.ndim - 1))
    return col2im_operator.on_one_device(patches, windows=windows)[0]


def _over_images(kernel: jax.Array, options: _Options) -> jax.Array:
    """A depthwise kernel, broadcast over the patches of images: (..., 1, 1..., *taps, C)."""
    at = kernel.ndim - 2 - _rank(options)
    return jnp.expand_dims(kernel.squeeze(-2), range(at, at + 1 + _rank(options)))


def _tap_axes(patches: jax.Array, options: _Options) -> tuple[int, ...]:
    return tuple(range(patches.ndim - 1 - _rank(options), patches.ndim - 1))


def _to_groups(array: jax.Array, axis: int, options: _Options) -> jax.Array:
    """The groups of the last dimension as one more batch dimension, the one before `axis`."""
    groups = options.groups
    split = array.reshape(*array.shape[:-1], groups, array.shape[-1] // groups)
    return jnp.moveaxis(split, -2, axis)


def _from_groups(array: jax.Array, axis: int) -> jax.Array:
    """Undoes `_to_groups`."""
    split = jnp.moveaxis(array, axis, -2)
    return split.reshape(*split.shape[:-2], split.shape[-2] * split.shape[-1])


def _product(names, a, b, options, summed=None):
    """An einsum in the accumulation's dtype, of arrays with batch dimensions before the named ones.

    A batch dimension may be 1 in either array, which then does not vary along it. Those flagged in
    `summed` are summed over; their size in the result is 1.
    """
    of_a, of_b, of_out = names
    rank = a.ndim - len(of_a)
    texts, shape = ["", "", ""], []
    squeezed: list[list[int]] = [[], []]
    for i, letter in zip(range(rank), string.ascii_uppercase, strict=False):
        sizes = (a.shape[i], b.shape[i])
        for n, size in enumerate(sizes):
            if size == 1:
                squeezed[n].append(i)
            else:
                texts[n] += letter
        varies = sizes != (1, 1) and not (summed and summed[i])
        texts[2] += letter if varies else ""
        shape.append(max(sizes) if varies and 0 not in sizes else int(not varies))
    dtype = jnp.result_type(jnp.float32, a.dtype, b.dtype)
    if a.dtype != b.dtype:
        a, b = a.astype(dtype), b.astype(dtype)
    result = jnp.einsum(
        f"{texts[0]}{of_a},{texts[1]}{of_b}->{texts[2]}{of_out}",
        jnp.squeeze(a, squeezed[0]),
        jnp.squeeze(b, squeezed[1]),
        precision=options.precision,
        preferred_element_type=dtype,
    )
    return result.reshape(*shape, *result.shape[result.ndim - len(of_out) :])


def _block(options: _Options, platform: str | None, *arrays: jax.Array) -> int:
    """How many images' patches may be made at a time; 0 where one's are too many."""
    images = arrays[0]
    rank = _rank(options)
    axis = images.ndim - 2 - rank
    rows = images.shape[axis]
    batch = np.broadcast_shapes(*(a.shape[:axis] for a in arrays))
    windows = options.windows
    entries = math.prod((*batch, *windows.outs, *windows.taps))
    channels = options.fan_in * (images.shape[-1] if options.is_depthwise else 1)
    image_bytes = entries * channels * max(a.dtype.itemsize for a in arrays)
    most = _BLOCK_BYTES if platform == "cpu" else _DEVICE_BLOCK_BYTES
    return rows if image_bytes == 0 else most // image_bytes


def _is_faster_in_tiles(options: _Options, platform: str | None, block: int, images, kernel):
    """Whether XLA's convolution takes the place of patches: of float32, and too many of them."""
    rank = _rank(options)
    return (
        platform == "cpu"
        and images.ndim == kernel.ndim == rank + 2
        and block < images.shape[0]
        and images.dtype == kernel.dtype == jnp.float32
        and not options.is_depthwise
    )


def _convolution(x: jax.Array, kernel: jax.Array, options: _Options) -> jax.Array:
    """XLA's convolution of one group."""
    windows = options.windows
    reaches = [
        (out - 1) * s + (k - 1) * d + 1
        for out, s, k, d in zip(
            windows.outs, windows.strides, windows.taps, windows.dilation, strict=True
        )
    ]
    padding = [
        (low, reach - n - low)
        for low, reach, n in zip(windows.low, reaches, windows.ins, strict=True)
    ]
    sizes = "DHW"[3 - _rank(options) :]
    return lax.conv_general_dilated(
        x,
        kernel,
        windows.strides,
        padding,
        rhs_dilation=windows.dilation,
        dimension_numbers=(f"N{sizes}C", f"{sizes}IO", f"N{sizes}C"),
        precision=options.precision,
    )


def _cut(array: jax.Array, axis: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Whole blocks of entries along the axis, beside each other, and what is left of the array."""
    moved = jnp.moveaxis(array, axis, 0)
    whole = moved.shape[0] // block * block
    blocks = moved[:whole].reshape(whole // block, block, *moved.shape[1:])
    return jnp.moveaxis(blocks, 1, axis + 1), jnp.moveaxis(moved[whole:], 0, axis)


def _joined(function, axis, block, array):
    """function(array), made of blocks of entries along the axis."""
    rows = array.shape[axis]
    block = max(1, block)
    if block >= rows:
        return function(array)
    blocks, rest = _cut(array, axis, block)
    results = jnp.moveaxis(lax.map(function, blocks), 0, axis)
    shape = results.shape
    joined = results.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    if rest.shape[axis] == 0:
        return joined
    return jnp.concatenate([joined, function(rest)], axis)


def _summed(function, axis, block, *arrays):
    """function(*arrays), a sum over the entries along the axis, made of blocks of them."""
    block = max(1, block)
    if block >= arrays[0].shape[axis]:
        return function(*arrays)
    blocks, rests = zip(*(_cut(a, axis, block) for a in arrays), strict=True)
    total = function(*(b[0] for b in blocks))
    total, _ = lax.scan(
        lambda total, block: (total + function(*block), None), total, tuple(b[1:] for b in blocks)
    )
    return total + function(*rests) if rests[0].shape[axis] else total


def _operator(name, signature, local):
    return Operator(
        name,
        signature=lambda *, options, **_: signature(options),
        dtypes=lambda *_, dtype, **__: [dtype],
        local=local,
        replicated=_REPLICATED,
        summed_outputs=(0,) if local is _kernel_grad_local else (),
    )


_forward_operator = _operator("conv", lambda o: f"{o.x}, {o.kernel} -> {o.y}", _forward_local)
_input_grad_operator = _operator(
    "conv_input_grad", lambda o: f"{o.y}, {o.kernel} -> {o.x}", _input_grad_local
)
_kernel_grad_operator = _operator(
    "conv_kernel_grad", lambda o: f"{o.x}, {o.y} -> {o.kernel}", _kernel_grad_local
)


def _forward(x, kernel, *, options, dtype):
    (y,) = _forward_operator(x, kernel, options=options, dtype=np.dtype(dtype))
    return y


def _input_grad(g, kernel, *, options, dtype):
    (dx,) = _input_grad_operator(g, kernel, options=options, dtype=np.dtype(dtype))
    return dx


def _kernel_grad(x, g, like, *, options):
    """Of the dtype of `like`, and summed over the batch dimensions that it does not have."""
    summed = tuple(n == 1 for n in like.shape[: like.ndim - 2 - _rank(options)])
    (dkernel,) = _kernel_grad_operator(
        x, g, options=options, dtype=np.dtype(like.dtype), summed=summed
    )
    return dkernel


def _def_jvp(operator: Operator) -> None:
    """Of an operator that is linear in each of two operands."""

    @operator.def_jvp
    def _jvp(primals, tangents, **params):
        a, b = primals
        da, db = rules.live(tangents, 2)
        terms = [(da, b)] if da is not None else []
        terms += [(a, db)] if db is not None else []
        (value,) = operator(a, b, **params)
        return [value], [sum(operator(*term, **params)[0] for term in terms)]


for _each in (_forward_operator, _input_grad_operator, _kernel_grad_operator):
    _def_jvp(_each)


@_forward_operator.def_transpose
def _forward_transpose(cotangents, x, kernel, *, options, dtype):
    (g,) = cotangents
    if isinstance(g, compat.Zero):
        return rules.zeros((x, kernel))
    like = x.aval if compat.is_undefined_primal(x) else kernel.aval
    if options.rounds_cotangent:
        g = g.astype(like.dtype)
    if compat.is_undefined_primal(x):
        dx = _input_grad(g, kernel, options=options, dtype=like.dtype)
        return [rules.fit(dx, like, _rank(options) + 2), None]
    dkernel = _kernel_grad(x, g, like, options=options)
    return [None, rules.fit(dkernel, like, _rank(options) + 2)]


@_input_grad_operator.def_transpose
def _input_grad_transpose(cotangents, g, kernel, *, options, dtype):
    (dx,) = cotangents
    if isinstance(dx, compat.Zero):
        return rules.zeros((g, kernel))
    if compat.is_undefined_primal(g):
        y = _forward(dx, kernel, options=options, dtype=g.aval.dtype)
        return [rules.fit(y, g.aval, _rank(options) + 2), None]
    dkernel = _kernel_grad(dx, g, kernel.aval, options=options)
    return [None, rules.fit(dkernel, kernel.aval, _rank(options) + 2)]


@_kernel_grad_operator.def_transpose
def _kernel_grad_transpose(cotangents, x, g, *, options, dtype, summed):
    (dkernel,) = cotangents
    if isinstance(dkernel, compat.Zero):
        return rules.zeros((x, g))
    if compat.is_undefined_primal(x):
        dx = _input_grad(g, dkernel, options=options, dtype=x.aval.dtype)
        return [rules.fit(dx, x.aval, _rank(options) + 2), None]
    y = _forward(x, dkernel, options=options, dtype=g.aval.dtype)
    return [None, rules.fit(y, g.aval, _rank(options) + 2)]
