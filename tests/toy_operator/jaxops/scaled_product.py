"""The product of two arrays and a number. It is linear in each array, and so are its gradients."""

from __future__ import annotations

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jaxops._core import checks, compat, rules
from jaxops._core.dtypes import accumulation_dtype
from jaxops._core.primitive import Operator
from jaxops._core.public import public_function
from jaxops.reference import scaled_product as reference

_NAME = "scaled_product"


@public_function
def scaled_product(
    a: ArrayLike, b: ArrayLike, *, scale: float = 1.0, implementation: str | None = None
) -> jax.Array:
    """Computes ``scale · a · b`` of two arrays of one shape (..., N) and one dtype.

    Raises:
      TypeError: an argument is not an array of a float dtype, or scale is no number.
      ValueError: the shapes differ.
    """
    a = checks.float_array(_NAME, "a", a, None, "(..., N)")
    b = checks.float_array(_NAME, "b", b, None, "(..., N)")
    if a.ndim == 0:
        raise ValueError(f"{_NAME}: a must have shape (..., N), got shape ()")
    checks.shape(_NAME, "b", b, a.shape, f"that of a, {a.shape}")
    if a.dtype != b.dtype:
        raise TypeError(f"{_NAME}: b must have the dtype of a, {a.dtype}, got {b.dtype}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{_NAME}: scale must be a number, got {checks.describe(scale)}")
    wide = accumulation_dtype(a)
    (out,) = _operator(a.astype(wide), b.astype(wide), scale=float(scale))
    return checkpoint_name(out.astype(a.dtype), _NAME)


_operator = Operator(
    _NAME,
    signature=lambda **_: "width, width -> width",
    dtypes=lambda a, b, **_: [a.dtype],
    reference=lambda a, b, scale: [reference.scaled_product(a, b, scale=scale)],
    attributes=lambda *, scale: {"scale": np.float64(scale)},
)


@_operator.def_jvp
def _jvp(primals, tangents, **params):
    a, b = primals
    da, db = rules.nonzero(tangents, 2)
    terms = [(da, b)] if da is not None else []
    terms += [(a, db)] if db is not None else []
    return _operator(a, b, **params), [sum(_operator(*term, **params)[0] for term in terms)]


@_operator.def_transpose
def _transpose(cotangents, a, b, **params):
    (g,) = cotangents
    if isinstance(g, compat.Zero):
        return rules.zeros((a, b))
    if compat.is_undefined_primal(a):
        return [rules.match_type(*_operator(g, b, **params), a.aval, 1), None]
    return [None, rules.match_type(*_operator(a, g, **params), b.aval, 1)]
