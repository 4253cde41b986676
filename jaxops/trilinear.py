"""Trilinear interpolation between the eight corners of cells.

The primitives and their rules are those of every interpolation, see `_families/multilinear.py`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks
from jaxops._core.public import public_function
from jaxops._families import multilinear
from jaxops.reference import trilinear as reference

_NAME = "trilinear_interpolate"


@public_function
def trilinear_interpolate(
    features: ArrayLike, points: ArrayLike, *, implementation: str | None = None
) -> jax.Array:
    """Interpolates between the features of the eight corners of a cell, for each of many cells.

    ``out[..., f] = Σ_ijk a_i(u) a_j(v) a_k(w) · features[..., 4i + 2j + k, f]``

    with (u, v, w) the point, a_0(u) = (1 − u)/2 and a_1(u) = (1 + u)/2. Outside of [−1, 1] the same
    formula extrapolates. Derivatives with respect to features and points, of any order and
    mixed, run kernels of their own; a feature gradient alone does not keep the features.

    Args:
      features: (..., 8, F), of a float dtype; the last dimension is the fastest.
      points: (..., 3), local coordinates in [−1, 1], of any float dtype; its leading dimensions are
        those of `features` (`jax.vmap` broadcasts).
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      (..., F), of the dtype of `features`. Weights and sums are made in float32, or in float64 if
      either array is float64.

    Raises:
      TypeError: an argument is not an array of float16, bfloat16, float32 or float64.
      ValueError: the shapes are not (..., 8, F) and (..., 3) with equal leading dimensions.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> features = jnp.arange(8.0).reshape(1, 8, 1)  # cells, corners, features
      >>> jaxops.trilinear_interpolate(features, jnp.zeros((1, 3)))  # at the centre of the cell
      Array([[3.5]], dtype=float32)
    """
    features = checks.float_array(_NAME, "features", features, None, "(..., 8, F)")
    points = checks.float_array(_NAME, "points", points, None, "(..., 3)")
    if features.ndim < 2 or features.shape[-2] != 8:
        raise ValueError(
            f"{_NAME}: features must have shape (..., 8, F), got shape {features.shape}"
        )
    checks.shape(
        _NAME,
        "points",
        points,
        (*features.shape[:-2], 3),
        f"(..., 3) for features {features.shape}",
    )
    dtype = features.dtype
    if points.dtype == jnp.float64:
        features = features.astype(jnp.float64)
    return checkpoint_name(_family(features, points, _Cells()).astype(dtype), _NAME)


@dataclasses.dataclass(frozen=True)
class _Cells:
    """Leading dimensions are batch dimensions: every cell has its own features and point."""

    values: str = "corners=8 features"
    points: str = "axes=3"
    result: str = "features"
    entries: tuple[int, ...] = (8,)
    axes: int = 3


_family = multilinear.Family(
    _NAME,
    prefix="trilinear",
    values_name="feature",
    reference=lambda features, points, options: reference.trilinear_interpolate(features, points),
    attributes=lambda options: {},
    replicated=("corners", "axes"),
)
