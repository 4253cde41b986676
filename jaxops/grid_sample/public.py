"""Sampling of volumes and images at points."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops._core.public import public_function
from jaxops.grid_sample import sampling

_NAME = "grid_sample"
_METHODS = ("linear", "bilinear", "trilinear", "nearest", "cubic")
_PADDING_MODES = ("zeros", "border", "reflection", "wrap", "constant")
_COORDINATES = ("normalized", "pixel")
_CHANNELS_LAST = {2: "NHWC", 3: "NDHWC"}
_CHANNELS_FIRST = {2: "NCHW", 3: "NCDHW"}


@public_function
def grid_sample(
    volume: ArrayLike,
    points: ArrayLike,
    *,
    method: str = "linear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
    coordinates: str = "normalized",
    cval: ArrayLike | None = None,
    data_format: str | None = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Samples a volume (or image) of F channels at points.

    Coordinate p along an axis of n entries is at entry x = (p + 1)/2 · (n − 1) with
    `align_corners`, so that −1 and 1 are the centres of the first and the last entry, and otherwise
    at x = ((p + 1) · n − 1)/2, where they are its outer edges; "pixel" coordinates are x. The
    result there is

    ``out[f] = Σ_c w_c · volume[entry_c, f]``

    over the 4 or 8 entries around x, with w the product of (1 − r) or r of each axis, r being the
    fraction of x; or the nearest entry, where halves round to even; or with "cubic" over 16 or 64
    entries, with the weights of cubic convolution of each axis. Derivatives with respect to the
    volume and, but for "nearest", the points, of any order and mixed, run kernels of their own. At
    a kink they are one of the two one-sided derivatives.

    Args:
      volume: (D, H, W, F), or (H, W, F) with points in the plane, of a float dtype; with any number
        of leading batch dimensions.
      points: (..., 3), or (..., 2), of any float dtype; coordinate i runs along axis i of the
        volume. Without batch dimensions in `volume` all points are in the one volume, otherwise the
        first dimensions of `points` are those. A batch dimension of size 1, in either array,
        broadcasts: ``points[None]`` are the points of every volume of a batch, and
        ``jax.vmap(grid_sample, (0, None))`` is the same call.
      method: "linear", also called "bilinear" and "trilinear", "nearest", or "cubic": cubic
        convolution with a = −0.75, as PyTorch's "bicubic", in each axis.
      padding_mode: what lies outside. "zeros": entries there count as zero, each on its own.
        "constant": they count as `cval`. "border": x is clamped to [0, n − 1]. "reflection": x is
        reflected about 0 and n − 1 with `align_corners` or "pixel", otherwise about −1/2 and
        n − 1/2, then clamped. "wrap": the entries repeat with period n. With "cubic" it is the
        index of each entry that is clamped or reflected. Infinite coordinates are far outside, and
        clamped under "reflection" and "wrap".
      align_corners: see above; True by default, and an error with "pixel".
      coordinates: "normalized", or "pixel" for points in entries: 0 is the centre of the first one.
      cval: the constant outside, a number or a scalar array; 0 by default. Only for "constant".
      data_format: "NCHW" or "NCDHW" for volumes (..., F, H, W) or (..., F, D, H, W), whose results
        have F after the batch dimensions. By default, "NHWC" or "NDHWC", F is the last dimension;
        N stands for any number of batch dimensions. The kernels read F last: others are transposed.
      deterministic: whether the volume's gradient has the same bits in every run on a GPU,
        where by default its sums are in the order of arrival. It then sorts the points.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (..., F), the leading dimensions those of `points`, of the dtype of `volume`. Weights and sums
      are made in float32, or in float64 if either array is float64. A point with a NaN gives a row
      of NaNs with "linear" and "cubic" and of zeros with "nearest", and adds nothing to the
      volume's gradient.

    Raises:
      TypeError: an argument is not an array of float16, bfloat16, float32 or float64, or a flag is
        not a bool.
      ValueError: shapes do not fit, an option is unknown, or has no meaning next to another, or an
        axis without entries is padded with entries.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> volume = jnp.arange(8.0).reshape(2, 2, 2, 1)  # depth, height, width, features
      >>> points = jnp.array([[-1.0, -1.0, -1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
      >>> jaxops.grid_sample(volume, points, method="trilinear")[:, 0]
      Array([0. , 3.5, 7. ], dtype=float32)

    Source: Keys, "Cubic convolution interpolation for digital image processing", 1981, for "cubic".
    """
    volume = checks.float_array(
        _NAME, "volume", volume, None, "(..., D, H, W, F) or (..., H, W, F)"
    )
    points = checks.float_array(_NAME, "points", points, None, "(..., 3) or (..., 2)")
    if points.ndim < 1 or points.shape[-1] not in (2, 3):
        raise ValueError(
            f"{_NAME}: points must have shape (..., 3) or (..., 2), got shape {points.shape}"
        )
    axes = points.shape[-1]
    if volume.ndim < axes + 1:
        raise ValueError(
            f"{_NAME}: volume must have {axes} dimensions and one of channels for points of shape "
            f"{points.shape}, got shape {volume.shape}"
        )
    has_channels_first = _has_channels_first(data_format, axes)
    if has_channels_first:
        volume = jnp.moveaxis(volume, -axes - 1, -1)
    rank = volume.ndim - axes - 1
    batch = volume.shape[:rank]
    leading = itertools.zip_longest(batch, points.shape[:-1][:rank], fillvalue=0)
    if points.ndim < rank + 1 or any(m != n and 1 not in (m, n) for m, n in leading):
        raise ValueError(
            f"{_NAME}: points must have shape ({', '.join(map(str, batch))}, ..., {axes}), the "
            f"batch dimensions of volume {volume.shape} first, or 1 in their place, got "
            f"{points.shape}"
        )
    method = checks.choice(_NAME, "method", method, _METHODS)
    padding_mode = checks.choice(_NAME, "padding_mode", padding_mode, _PADDING_MODES)
    coordinates = checks.choice(_NAME, "coordinates", coordinates, _COORDINATES)
    if align_corners is not None:
        align_corners = checks.boolean(_NAME, "align_corners", align_corners)
        if coordinates == "pixel":
            raise ValueError(
                f'{_NAME}: align_corners has no meaning with coordinates="pixel", got '
                f"{align_corners}"
            )
    sizes = volume.shape[rank:-1]
    if 0 in sizes and padding_mode not in ("zeros", "constant"):
        raise ValueError(
            f"{_NAME}: padding_mode {padding_mode!r} needs an entry along every axis, got volume "
            f"{volume.shape}"
        )
    options = sampling.Options(
        sizes=sizes,
        point_rank=points.ndim - 1 - rank,
        method="linear" if method in ("bilinear", "trilinear") else method,
        padding_mode=padding_mode,
        align_corners=align_corners is not False,
        pixel=coordinates == "pixel",
        deterministic=checks.boolean(_NAME, "deterministic", deterministic),
    )
    result = sampling.sample(volume, points, options, _constant(padding_mode, cval))
    if has_channels_first:
        result = jnp.moveaxis(result, -1, rank)
    return checkpoint_name(result, _NAME)


def _has_channels_first(data_format: str | None, axes: int) -> bool:
    if data_format is None:
        return False
    names = (_CHANNELS_LAST[axes], _CHANNELS_FIRST[axes])
    return checks.choice(_NAME, "data_format", data_format, names) == _CHANNELS_FIRST[axes]


def _constant(padding_mode: str, cval: ArrayLike | None) -> ArrayLike:
    if cval is None:
        return 0.0
    if padding_mode != "constant":
        raise ValueError(
            f'{_NAME}: cval needs padding_mode="constant", got {padding_mode!r} and '
            f"{checks.describe(cval)}"
        )
    return checks.scalar(_NAME, "cval", cval)
