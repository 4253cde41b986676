"""The sampling of volumes at points that `grid_sample` and `map_coordinates` share.

Linear and nearest samples have kernels that locate the points; their primitives and rules are those
of every interpolation, see `_families/multilinear.py`. Others have stencils that `jax.numpy` makes,
and kernels that sum the entries of these, see `taps.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxops._core import native, signature
from jaxops._core.dtypes import accumulation_dtype
from jaxops._families import multilinear
from jaxops.grid_sample import taps
from jaxops.reference import grid_sample as reference
from jaxops.reference import taps as taps_reference


@dataclasses.dataclass(frozen=True)
class Options:
    """Parameters of every primitive of the family, next to shapes.

    Attributes:
      sizes: those of the volume's axes.
      point_rank: the dimensions of the points, next to those of a batch and of coordinates.
      method, padding_mode, deterministic: as in `grid_sample`.
      align_corners: the same; "pixel" coordinates are reflected about the centres of entries with
        it, and about their edges without.
      pixel: whether coordinates count entries.
      by_axis: whether the coordinates are arrays for each axis that are stacked for this call.
    """

    sizes: tuple[int, ...]
    point_rank: int
    method: str
    padding_mode: str
    align_corners: bool
    pixel: bool
    deterministic: bool
    by_axis: bool = False

    @property
    def values(self) -> str:
        """The dimensions of the volume in a signature."""
        return " ".join(f"size{i}={n}" for i, n in enumerate(self.sizes)) + " features"

    @property
    def points(self) -> str:
        """The dimensions of the points."""
        return " ".join([*self._points, f"axes={self.axes}"])

    @property
    def result(self) -> str:
        """The dimensions of the result."""
        return " ".join([*self._points, "features"])

    @property
    def _points(self) -> list[str]:
        return [f"point{i}" for i in range(self.point_rank)]

    @property
    def entries(self) -> tuple[int, ...]:
        """The sizes of the volume's dimensions but that of channels."""
        return self.sizes

    @property
    def axes(self) -> int:
        """The number of axes."""
        return len(self.sizes)

    @property
    def has_stencils(self) -> bool:
        """Whether `jax.numpy` makes stencils of the points, because no kernel locates them."""
        # A nearest entry outside counts as the constant: one computation tells both.
        is_constant = self.method == "nearest" and self.padding_mode == "constant"
        return self.method == "cubic" or self.padding_mode == "wrap" or is_constant


def sample(
    volume: jax.Array, points: jax.Array, options: Options, cval: ArrayLike = 0.0
) -> jax.Array:
    """The volume (..., *sizes, F) at points (..., *P, axes), in the dtype of `volume`.

    Leading dimensions broadcast. `cval` is what lies outside with padding_mode "constant".
    """
    with jax.numpy_dtype_promotion("standard"):  # how dtypes promote is the caller's business
        return _sample(volume, points, options, cval)


def _sample(volume, points, options, cval):
    dtype = volume.dtype
    if points.dtype == jnp.float64:
        volume = volume.astype(jnp.float64)
    if options.method == "nearest":
        points = jax.lax.stop_gradient(points)  # a derivative that is zero needs no kernel
    wide = points.astype(accumulation_dtype(volume, points))
    if options.padding_mode == "constant":
        volume = volume.astype(wide.dtype)  # the sum with the constant is rounded once
    frame = (options.align_corners, options.pixel)
    if options.has_stencils:
        indices, weights = reference.stencils(
            wide, options.sizes, options.method, options.padding_mode, *frame
        )
        total = taps.sum_taps(volume, indices, weights, options.point_rank, options.deterministic)
        if options.padding_mode == "constant":
            total = reference.add_outside(total, taps_reference.outside(indices, weights), cval)
        return reference.mark(total, wide, options.method).astype(dtype)
    if options.padding_mode == "constant":
        total = _family(volume, points, dataclasses.replace(options, padding_mode="zeros"))
        beyond = reference.outside(wide, options.sizes, *frame)
        return reference.add_outside(total, beyond, cval).astype(dtype)
    return _family(volume, points, options).astype(dtype)


def _sample_reference(volume, points, options):
    return reference.grid_sample(
        volume,
        points,
        method=options.method,
        padding_mode=options.padding_mode,
        align_corners=options.align_corners,
        coordinates="pixel" if options.pixel else "normalized",
        point_rank=options.point_rank,
    )


def _attributes(options) -> dict[str, Any]:
    return {
        "point_rank": np.int64(options.point_rank),
        "method": options.method,
        "padding_mode": options.padding_mode,
        "align_corners": np.bool_(options.align_corners),
        "pixel": np.bool_(options.pixel),
        "deterministic": np.bool_(options.deterministic),
    }


def _cpu_layout(term, *, options, **_):
    return signature.with_last(term, "point") if options.by_axis and ("axes",) in term else None


_family = multilinear.Family(
    "grid_sample",
    values_name="volume",
    reference=_sample_reference,
    attributes=_attributes,
    replicated=("size", "axes"),
    sums_batches=True,
    work_space=True,
    platforms=lambda options: ("cpu",) if options.pixel else tuple(native.PLATFORMS),
    cpu_layout=_cpu_layout,
)
