"""The patches of an image as a copy, and its transpose.

The primitives and their rules are those of every window, see `_families/windows.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops._core.public import public_function
from jaxops._families import windows
from jaxops._families.windows import col2im_operator, im2col_operator


@public_function
def im2col(
    x: ArrayLike,
    kernel_size: int | Sequence[int],
    *,
    strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0,
    dilation: int | Sequence[int] = 1,
    data_format: str = "NHWC",
    implementation: str | None = None,
) -> jax.Array:
    """Copies the patches that a window covers as it slides over an image.

    ``patches[n, oh, ow, kh, kw, c] = x[n, oh·SH + kh·DH − PH, ow·SW + kw·DW − PW, c]``

    with the strides S, the dilation D and the padding P before the image, and zero where x has no
    such entry. With data_format "NCHW" it is ``patches[n, c, kh, kw, oh, ow]``. Entries are copied
    bit for bit: a NaN in one pixel shows in the entries of that pixel and nowhere else. The
    transpose, and so the gradient, is `col2im`.

    There are ``(H + PH + PH' − (KH − 1)·DH − 1) // SH + 1`` patches along H, with PH' the padding
    after the image, and none where that is negative.

    Args:
      x: (N, H, W, C), or as `data_format` says; of any dtype of whole bytes.
      kernel_size: the sizes (KH, KW) of the window, >= 1. Like every option here, an int for all
        dimensions or one for each.
      strides: the steps from one patch to the next, >= 1.
      padding: zeros around the image: an int, one a dimension, a (low, high) pair for each, "VALID"
        for none, or "SAME" for the number that gives ceil(H / SH) patches, the smaller half
        before the image.
      dilation: the steps between neighbouring entries of a window, >= 1.
      data_format: "NHWC" or "NCHW" in two dimensions, "NWC" or "NCW" in one, "NDHWC" or "NCDHW" in
        three.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (N, OH, OW, KH, KW, C), or (N, C, KH, KW, OH, OW), of the dtype of x.

    Raises:
      TypeError: x is not an array, its dtype has less than a byte, or an option is not a static
        integer.
      ValueError: the rank of x or an option is out of what is listed above.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)  # NHWC
      >>> patches = jaxops.im2col(x, 2, strides=2)
      >>> patches.shape
      (1, 2, 2, 2, 2, 1)
      >>> patches[0, 0, 0, :, :, 0].tolist()
      [[0.0, 1.0], [4.0, 5.0]]
    """
    name = "im2col"
    data_format = windows.data_format(name, data_format)
    rank, channels_last = len(data_format) - 2, data_format.endswith("C")
    x = checks.array(name, "x", x, _shape(data_format))
    if not _has_whole_bytes(x.dtype):
        raise TypeError(f"{name}: x must have a dtype of whole bytes, got {x.dtype}")
    x = checks.as_array(name, "x", x)
    _check_rank(name, "x", x, rank + 2, data_format)
    taps = windows.per_dimension(name, "kernel_size", kernel_size, rank, 1)
    placed = windows.make_windows(
        name,
        x.shape[1:-1] if channels_last else x.shape[2:],
        taps,
        strides=strides,
        padding=padding,
        dilation=dilation,
        channels_last=channels_last,
    )
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        patches = jax.lax.complex(_patches(x.real, placed), _patches(x.imag, placed))
    else:
        patches = _patches(x, placed)
    return checkpoint_name(patches, name)


def _patches(x: jax.Array, placed: windows.Windows) -> jax.Array:
    (patches,) = im2col_operator(x, windows=placed, again=False)
    return patches


def _has_whole_bytes(dtype: np.dtype) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    return not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits >= 8


@public_function
def col2im(
    patches: ArrayLike,
    input_shape: Sequence[int],
    *,
    strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0,
    dilation: int | Sequence[int] = 1,
    data_format: str = "NHWC",
    implementation: str | None = None,
) -> jax.Array:
    """Sums patches into the image that they would stem from: the transpose of `im2col`.

    ``x[n, h, w, c] = Σ patches[n, oh, ow, kh, kw, c]`` over all oh, ow, kh and kw with
    ``oh·SH + kh·DH − PH = h`` and ``ow·SW + kw·DW − PW = w``; entries of padding are left out.
    Results are the same bit for bit, run after run.

    Args:
      patches: what `im2col` returns for an image of the shape `input_shape`, or anything of that
        shape, of a float dtype. The sizes of the window are read from it.
      input_shape: the full shape of the image, such as (N, H, W, C).
      strides: as for `im2col`, like the other options.
      padding: see `im2col`.
      dilation: see `im2col`.
      data_format: see `im2col`.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      An array of `input_shape` and of the dtype of `patches`; float16 and bfloat16 are summed in
      float32.

    Raises:
      TypeError: patches are not an array of float16, bfloat16, float32 or float64, or a size or an
        option is not a static integer.
      ValueError: the shapes do not fit each other, or an option is out of what `im2col` lists.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> x = jnp.ones((1, 3, 3, 1))  # NHWC
      >>> patches = jaxops.im2col(x, 2)
      >>> jaxops.col2im(patches, x.shape)[0, :, :, 0].tolist()  # number of patches at a pixel
      [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]
    """
    name = "col2im"
    data_format = windows.data_format(name, data_format)
    rank, channels_last = len(data_format) - 2, data_format.endswith("C")
    patches = checks.float_array(name, "patches", patches, None, _patches_shape(data_format))
    _check_rank(name, "patches", patches, 2 * rank + 2, data_format, _patches_shape(data_format))
    if not checks.is_sequence(input_shape) or len(input_shape) != rank + 2:
        raise ValueError(
            f"{name}: input_shape must be {_shape(data_format)}, got {checks.describe(input_shape)}"
        )
    # The number of images may be symbolic.
    is_symbolic = jax.export.is_symbolic_dim(input_shape[0])
    counted = (0, *input_shape[1:]) if is_symbolic else input_shape
    shape = windows.per_dimension(name, "input_shape", counted, rank + 2, 0)
    rows: Any = input_shape[0] if is_symbolic else shape[0]
    at = 1 + rank if channels_last else 2
    taps = patches.shape[at : at + rank]
    if 0 in taps:
        raise ValueError(
            f"{name}: patches must have shape {_patches_shape(data_format)} with a window of one "
            f"entry or more, got {patches.shape}"
        )
    placed = windows.make_windows(
        name,
        shape[1:-1] if channels_last else shape[2:],
        taps,
        strides=strides,
        padding=padding,
        dilation=dilation,
        channels_last=channels_last,
    )
    if channels_last:
        expected = (rows, *placed.outs, *taps, shape[-1])
    else:
        expected = (rows, shape[1], *taps, *placed.outs)
    why = f"for input_shape {(rows, *shape[1:])}"
    checks.shape(name, "patches", patches, expected, why)
    (image,) = col2im_operator(patches, windows=placed)
    return checkpoint_name(image, name)


def _shape(data_format: str) -> str:
    return f"({', '.join(data_format)})"


def _patches_shape(data_format: str) -> str:
    sizes = data_format[1:-1] if data_format.endswith("C") else data_format[2:]
    outs, taps = ([f"{letter}{s}" for s in sizes] for letter in "OK")
    inner = (*outs, *taps, "C") if data_format.endswith("C") else ("C", *taps, *outs)
    return f"({', '.join(('N', *inner))})"


def _check_rank(
    function: str, argument: str, array: Any, rank: int, data_format: str, shape: str | None = None
) -> None:
    if array.ndim != rank:
        raise ValueError(
            f"{function}: {argument} must have shape {shape or _shape(data_format)} "
            f"({data_format}), got shape {array.shape}"
        )
