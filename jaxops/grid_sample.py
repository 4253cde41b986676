"""Sampling of volumes and images at points.

The primitives and their rules are those of every interpolation, see `_families/multilinear.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops._core.dtypes import accumulation_dtype
from jaxops._families import multilinear
from jaxops.reference import grid_sample as reference

_NAME = "grid_sample"
_METHODS = ("linear", "nearest")
_PADDING_MODES = ("zeros", "border", "reflection")


def grid_sample(
    volume: ArrayLike,
    points: ArrayLike,
    *,
    method: str = "linear",
    padding_mode: str = "zeros",
    align_corners: bool = True,
    deterministic: bool = False,
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


#: Sorted points of one cell that are summed together before all else is, and how many levels of
#: such groups there are, as in cuda/grid_sample/sorted.cu.
_GROUP = 32
_LEVELS = 3


#: Bytes of volumes that no cache holds, of which points are taken in an order.
_LARGE = 1 << 25
#: Points that a block puts in a rough order, and the bytes that it writes; see
#: cuda/grid_sample/order.cu.
_ROUGH = 4096
_ROUGH_BYTES = (4096 + 32 * 32) * 16
#: The entries of a brick along each axis, by the number of axes, the points that a block sorts by
#: groups of bricks, one more than its groups, and the points that a warp takes of a brick.
_BRICKS = {2: (8, 16), 3: (4, 4, 8)}
_SORTED = 8192
_GROUPS = 512 + 1
_SHARE = 1024
#: Bytes to which it is aligned behind the sums of a gradient.
_ALIGNED = 16
#: Bytes from which an order pays if volumes are only read, the least bytes of an entry for it, and
#: a sector of memory, of which entries must be multiples.
_LARGE_READ = 3 << 24
_WIDE = 64
_SECTOR = 32


def _order_bytes(batch, points, entry_bytes, options, sums) -> int:
    """Work space to put points in an order, if they meet entries repeatedly.

    For the volume's gradient (`sums`) that may be by bricks, of which each has 2^axes bins.
    """
    count = _count(points, options)
    entries = math.prod(options.sizes)
    meets = count * 2**options.axes
    if math.prod(batch) != 1 or meets < 2 * entries or entries * entry_bytes < _LARGE:
        return 0
    rough = -(-count // _ROUGH) * _ROUGH_BYTES
    if not sums:
        return rough
    bins = 2**options.axes * math.prod(
        -(-n // edge) for n, edge in zip(options.sizes, _BRICKS[options.axes], strict=True)
    )
    numbers = 3 * count + 2 * bins + 2 * (meets // _SHARE) - (-count // _SORTED) * _GROUPS + 2
    return max(rough, 4 * numbers)


def _count(points, options) -> int:
    first = points.ndim - 1 - options.point_rank
    return math.prod(points.shape[first:-1])


def _bytes(size: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((size,), np.dtype(np.uint8))] if size else []


def _sample_scratch(batch, volume, points, options):
    entry_bytes = volume.shape[-1] * volume.dtype.itemsize
    if entry_bytes < _WIDE or entry_bytes % _SECTOR:
        return []
    if math.prod(options.sizes) * entry_bytes < _LARGE_READ:
        return []
    return _bytes(_order_bytes(batch, points, entry_bytes, options, sums=False))


def _scratch(batch, points, g, options, order, summed):
    """Work space of the volume's gradient on CUDA devices.

    Sums in the accumulation's dtype where the volume's is shorter, then the order of the points.
    """
    wide = accumulation_dtype(g)
    kept = math.prod(n for n, s in zip(batch, summed, strict=True) if not s)
    entry_bytes = g.shape[-1] * wide.itemsize
    if options.deterministic:
        count = math.prod(batch) * _count(points, options)
        return _bytes(_sort_bytes(count, kept, entry_bytes, wide.itemsize, options, order))
    sums = 0 if wide == g.dtype else kept * math.prod(options.sizes) * entry_bytes
    placing = _order_bytes(batch, points, entry_bytes, options, sums=True)
    return _bytes(-(-sums // _ALIGNED) * _ALIGNED + placing if placing else sums)


def _sort_bytes(count, volumes, entry_bytes, itemsize, options, order) -> int:
    """Work space of the sums in a fixed order.

    Twice a key and an index for each point, and what the sort itself wants; then the first and the
    last point of every cell, a record of each point and, of a derivative, its weights; and the sums
    of groups of points.
    """
    corners = 2**options.axes
    cells = volumes * math.prod(n + 1 for n in options.sizes)
    key_bytes = 4 if cells < 2**32 else 8
    point_bytes = 2 * (key_bytes + 4) + 4 * itemsize
    if order > 0:
        point_bytes += corners * itemsize
    groups = sum(count // _GROUP ** (level + 1) for level in range(_LEVELS))
    sort = count + (1 << 22)
    return count * point_bytes + cells * 2 * 4 + groups * corners * entry_bytes + sort


_family = multilinear.Family(
    _NAME,
    values_name="volume",
    reference=_sample_reference,
    attributes=_attributes,
    replicated=("size", "axes"),
    sums_batches=True,
    sample_scratch=_sample_scratch,
    scratch=_scratch,
)
