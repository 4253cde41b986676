"""Interpolation of an array at coordinates, with the signature of `jax.scipy.ndimage`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.implementation import needs_kernels
from jaxops._core.public import public_function
from jaxops.grid_sample import sampling, taps
from jaxops.reference import grid_sample as sample_reference
from jaxops.reference import map_coordinates as reference
from jaxops.reference import taps as taps_reference

_NAME = "map_coordinates"
_ORDERS = (0, 1, 3)
_MAX_RANK = 3

# The padding of the modes whose points kernels locate, and what "reflection" is about: entries
# (True) or edges.
_LOCATED = {
    "constant": ("constant", True),
    "nearest": ("border", True),
    "wrap": ("border", True),  # of a copy, in which the first entries follow the last
    "mirror": ("reflection", True),
    "reflect": ("reflection", False),
}


@public_function
def map_coordinates(
    input: ArrayLike,
    coordinates: Sequence[ArrayLike],
    order: int,
    mode: str = "constant",
    cval: ArrayLike = 0.0,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Interpolates an array of one to three axes at coordinates that count its entries.

    The values for orders 0 and 1 are those of `jax.scipy.ndimage.map_coordinates`, and for order 3
    those of `scipy.ndimage.map_coordinates`, whose modes "grid-constant" and "grid-wrap" are
    "constant" and "wrap" here, as in `jax.scipy`. Gradients with respect to the input, the
    coordinates (of orders 1 and 3) and `cval`, of any order, run kernels.

    Args:
      input: the array, of one to three axes and a float dtype.
      coordinates: for each axis an array of a float dtype; together they broadcast to the shape of
        the result. An array (axes, ...) is taken too.
      order: 0 (the nearest entry, halves rounded away from zero), 1 (linear) or 3 (the cubic
        spline through all entries; the entries are filtered first).
      mode: what lies outside. "constant": `cval`. "nearest": the nearest entry. "wrap": the entries
        repeat. "mirror" and "reflect": the entries are reflected about the centre of the last one,
        or its edge.
      cval: the constant outside, a number or a scalar array.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      The values, of the dtype of `input` and the shape of the coordinates. Sums are made in
      float32, or in float64 if an array is float64. A NaN among the coordinates of a point gives
      NaN, with order 0 zero.

    Raises:
      TypeError: an argument is not an array of float16, bfloat16, float32 or float64.
      ValueError: the number of coordinates is not that of axes, or there are more than three; an
        option is unknown, or an axis without entries is filled from entries.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> image = jnp.arange(12.0).reshape(3, 4)
      >>> rows, columns = jnp.array([0.5, 2.0]), jnp.array([1.0, 2.5])
      >>> jaxops.map_coordinates(image, [rows, columns], order=1)
      Array([ 3. , 10.5], dtype=float32)
    """
    input = checks.float_array(_NAME, "input", input, None, "(n0,), (n0, n1) or (n0, n1, n2)")
    axes = input.ndim
    if not 1 <= axes <= _MAX_RANK:
        raise ValueError(f"{_NAME}: input must have 1 to 3 axes, got shape {input.shape}")
    arrays = _arrays(coordinates, axes, input.shape)
    if isinstance(order, bool) or checks.integer(_NAME, "order", order) not in _ORDERS:
        raise ValueError(f"{_NAME}: order must be one of 0, 1, 3, got {checks.describe(order)}")
    mode = checks.choice(_NAME, "mode", mode, tuple(reference.PADDINGS))
    cval = checks.scalar(_NAME, "cval", cval, integers=True)
    if 0 in input.shape and mode != "constant":
        raise ValueError(
            f"{_NAME}: mode {mode!r} needs an entry along every axis, got input {input.shape}"
        )
    with jax.numpy_dtype_promotion("standard"):  # how dtypes promote is the caller's business
        result = _interpolate(input, arrays, int(order), mode, cval)
    return checkpoint_name(result, _NAME)


def _arrays(coordinates: Any, axes: int, shape: tuple[int, ...]) -> list[jax.Array]:
    """The coordinates along each axis, of one shape and dtype."""
    if checks.is_array(coordinates):
        coordinates = list(
            checks.float_array(_NAME, "coordinates", coordinates, None, "(axes, ...)")
        )
    if not isinstance(coordinates, (list, tuple)):
        raise TypeError(
            f"{_NAME}: coordinates must be a sequence of arrays, got {checks.describe(coordinates)}"
        )
    if len(coordinates) != axes:
        raise ValueError(
            f"{_NAME}: coordinates must be {axes} arrays, one for each axis of input {shape}, got "
            f"{len(coordinates)}"
        )
    arrays = [checks.float_array(_NAME, "coordinates", c, None, "(...)") for c in coordinates]
    try:
        common = jnp.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError:
        shapes = ", ".join(str(a.shape) for a in arrays)
        raise ValueError(
            f"{_NAME}: coordinates must have shapes that broadcast together, got {shapes}"
        ) from None
    dtypes = {a.dtype for a in arrays}
    dtype = arrays[0].dtype if len(dtypes) == 1 else accumulation_dtype(*arrays)
    return [jnp.broadcast_to(a, common).astype(dtype) for a in arrays]


def _interpolate(input, arrays, order, mode, cval):
    if order == 0:
        function = needs_kernels(_NAME)
        if function is not None:
            raise NotImplementedError(
                f"{function}: implementation='native' needs kernels, and there are none for order 0"
            )
        # One gather by XLA, which makes the indices as it reads, and sums gradients in this dtype.
        dtype = accumulation_dtype(input, arrays[0])
        arrays = [a.astype(dtype) for a in arrays]
        return reference.nearest(input.astype(dtype), arrays, mode, cval).astype(input.dtype)
    # XLA writes arrays one after the other faster than interleaved.
    points = jnp.moveaxis(jnp.stack(arrays), 0, -1)
    if order == 3 or (mode == "wrap" and not _may_copy(input, points)):
        return _sum_stencils(input, points, order, mode, cval)
    return _locate(input, points, mode, cval)


def _locate(input, points, mode, cval):
    """Order 1, by the kernels that locate points."""
    result_dtype = input.dtype
    if mode == "wrap":
        # Gradients of the copy are added to those of the array before they are rounded.
        input = input.astype(accumulation_dtype(input, points))
        points = _moved_inside(points.astype(input.dtype), input.shape)
        input = jnp.pad(input, (0, 1), mode="wrap")
    padding_mode, align_corners = _LOCATED[mode]
    if isinstance(cval, float) and cval == 0 and padding_mode == "constant":
        padding_mode = "zeros"
    options = sampling.Options(
        sizes=input.shape,
        point_rank=points.ndim - 1,
        method="linear",
        padding_mode=padding_mode,
        align_corners=align_corners,
        pixel=True,
        deterministic=False,
        by_axis=True,
    )
    return sampling.sample(input[..., None], points, options, cval)[..., 0].astype(result_dtype)


def _may_copy(input, points):
    """Whether the array has no more entries than points read, so that a copy of it costs little.

    Sizes that are no numbers do not tell.
    """
    reads = 2**input.ndim * (points.size // input.ndim)
    return isinstance(reads, int) and isinstance(input.size, int) and input.size <= reads


def _moved_inside(points, sizes):
    """Points (..., axes) at the same places of a volume that repeats, in [0, n] along each axis."""
    lost = taps_reference.lost(points)
    along = []
    for a, n in enumerate(sizes):
        x = points[..., a]
        along.append(jnp.where(lost, x, taps_reference.near(jnp.where(lost, 0, x), n, "wrap")))
    return jnp.moveaxis(jnp.stack(along), 0, -1)


def _sum_stencils(input, points, order, mode, cval):
    dtype = accumulation_dtype(input, points)
    points = points.astype(dtype)
    volume = input.astype(dtype) if order == 3 or dtype == jnp.float64 else input
    if order == 3:
        volume, margin = reference.prefiltered(volume, mode, cval)
        points = points + margin
    indices, weights = reference.stencils(points, volume.shape, order, mode)
    total = taps.sum_taps(volume[..., None], indices, weights, points.ndim - 1)
    if mode == "constant":
        total = sample_reference.add_outside(total, taps_reference.outside(indices, weights), cval)
    total = sample_reference.mark(total, points, "linear")
    return total[..., 0].astype(input.dtype)
