"""Sampling of volumes and images at points.

The primitives and their rules are those of every interpolation, see `_families/multilinear.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops._core.public import public_function
from jaxops._families import multilinear
from jaxops.reference import grid_sample as reference

_NAME = "grid_sample"
_METHODS = ("linear", "nearest")
_PADDING_MODES = ("zeros", "border", "reflection")


@public_function
def grid_sample(
    volume: ArrayLike,
    points: ArrayLike,
    *,
    method: str = "linear",
    padding_mode: str = "zeros",
    align_corners: bool = True,
    deterministic: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Samples a volume (or image) of F channels at points.

    Coordinate p along an axis of n entries is at entry x = (p + 1)/2 · (n − 1) with
    `align_corners`, so that −1 and 1 are the centres of the first and the last entry, and otherwise
    at x = ((p + 1) · n − 1)/2, where they are its outer edges. The result there is

    ``out[f] = Σ_c w_c · volume[entry_c, f]``

    over the 4 or 8 entries around x, with w the product of (1 − r) or r of each axis, r being the
    fraction of x; or the nearest entry, where halves round to even. Derivatives with respect to
    the volume and, for "linear", the points, of any order and mixed, run kernels of their own. At a
    kink they are one of the two one-sided derivatives.

    Args:
      volume: (D, H, W, F), or (H, W, F) with points in the plane, of a float dtype; with any number
        of leading batch dimensions.
      points: (..., 3), or (..., 2), of any float dtype; coordinate i runs along axis i of the
        volume. Without batch dimensions in `volume` all points are in the one volume, otherwise the
        first dimensions of `points` are those.
      method: "linear" or "nearest".
      padding_mode: what lies outside. "zeros": entries there count as zero, each on its own.
        "border": x is clamped to [0, n − 1]. "reflection": x is reflected about 0 and n − 1 with
        `align_corners`, otherwise about −1/2 and n − 1/2, then clamped. Infinite coordinates are
        far outside, and clamped under "reflection".
      align_corners: see above.
      deterministic: whether the volume's gradient has the same bits in every run on a GPU,
        where by default its sums are in the order of arrival. It then sorts the points.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (..., F), the leading dimensions those of `points`, of the dtype of `volume`. Weights and sums
      are made in float32, or in float64 if either array is float64. A point with a NaN gives a row
      of NaNs with "linear" and of zeros with "nearest", and adds nothing to the volume's
      gradient.

    Raises:
      TypeError: an argument is not an array of float16, bfloat16, float32 or float64, or a flag is
        not a bool.
      ValueError: shapes do not fit, an option is unknown, or an axis without entries is padded with
        "border" or "reflection".
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
    batch = volume.shape[: max(0, volume.ndim - axes - 1)]
    if volume.ndim < axes + 1:
        raise ValueError(
            f"{_NAME}: volume must have {axes} dimensions and one of channels for points of shape "
            f"{points.shape}, got shape {volume.shape}"
        )
    if points.ndim < len(batch) + 1 or points.shape[: len(batch)] != batch:
        raise ValueError(
            f"{_NAME}: points must have shape ({', '.join(map(str, batch))}, ..., {axes}), the "
            f"batch dimensions of volume {volume.shape} first, got {points.shape}"
        )
    checks.choice(_NAME, "method", method, _METHODS)
    checks.choice(_NAME, "padding_mode", padding_mode, _PADDING_MODES)
    sizes = volume.shape[len(batch) : -1]
    if 0 in sizes and padding_mode != "zeros":
        raise ValueError(
            f"{_NAME}: padding_mode {padding_mode!r} needs an entry along every axis, got volume "
            f"{volume.shape}"
        )
    options = _Options(
        sizes=sizes,
        point_rank=points.ndim - 1 - len(batch),
        method=method,
        padding_mode=padding_mode,
        align_corners=_flag("align_corners", align_corners),
        deterministic=_flag("deterministic", deterministic),
    )
    dtype = volume.dtype
    if points.dtype == jnp.float64:
        volume = volume.astype(jnp.float64)
    if method == "nearest":
        points = jax.lax.stop_gradient(points)  # a derivative that is zero needs no kernel
    return checkpoint_name(_family(volume, points, options).astype(dtype), _NAME)


def _flag(argument: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{_NAME}: {argument} must be a bool, got {checks.describe(value)}")
    return bool(value)


@dataclasses.dataclass(frozen=True)
class _Options:
    """Parameters of every primitive of the family, next to shapes."""

    sizes: tuple[int, ...]
    point_rank: int
    method: str
    padding_mode: str
    align_corners: bool
    deterministic: bool

    @property
    def values(self) -> str:
        return " ".join(f"size{i}={n}" for i, n in enumerate(self.sizes)) + " features"

    @property
    def points(self) -> str:
        return " ".join([*self._points, f"axes={self.axes}"])

    @property
    def result(self) -> str:
        return " ".join([*self._points, "features"])

    @property
    def _points(self) -> list[str]:
        return [f"point{i}" for i in range(self.point_rank)]

    @property
    def entries(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def axes(self) -> int:
        return len(self.sizes)


def _sample_reference(volume, points, options):
    return reference.grid_sample(
        volume,
        points,
        method=options.method,
        padding_mode=options.padding_mode,
        align_corners=options.align_corners,
        point_rank=options.point_rank,
    )


def _attributes(options):
    return {
        "point_rank": np.int64(options.point_rank),
        "method": options.method,
        "padding_mode": options.padding_mode,
        "align_corners": np.bool_(options.align_corners),
        "deterministic": np.bool_(options.deterministic),
    }


_family = multilinear.Family(
    _NAME,
    values_name="volume",
    reference=_sample_reference,
    attributes=_attributes,
    replicated=("size", "axes"),
    sums_batches=True,
    work_space=True,
)
