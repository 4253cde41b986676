"""Helpers of derivative rules: symbolic zeros, and broadcast batch dimensions undone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._core import compat


def nonzero(tangents: Sequence, count: int) -> list[jax.Array | None]:
    """Tangents or cotangents with None for symbolic zeros, padded with None to `count`."""
    found = [None if isinstance(t, compat.Zero) else t for t in tangents]
    return found + [None] * (count - len(found))


def jvp(function: Callable, primals: Sequence, tangents: Sequence):
    """`jax.jvp` that spends nothing on operands whose tangent is a symbolic zero."""
    at = [i for i, t in enumerate(tangents) if not isinstance(t, compat.Zero)]

    def apply(*moving):
        operands = list(primals)
        for i, operand in zip(at, moving, strict=True):
            operands[i] = operand
        return function(*operands)

    # How dtypes promote is the caller's business.
    with jax.numpy_dtype_promotion("standard"):
        return jax.jvp(apply, [primals[i] for i in at], [tangents[i] for i in at])


def transpose(function: Callable, cotangents: Sequence, operands: Sequence) -> list:
    """The transpose of `function` with respect to the operands that are undefined."""
    at = [i for i, x in enumerate(operands) if compat.is_undefined_primal(x)]

    def apply(*linear):
        whole = list(operands)
        for i, x in zip(at, linear, strict=True):
            whole[i] = x
        return function(*whole)

    transposed = jax.linear_transpose(apply, *(operands[i].aval for i in at))
    found = iter(transposed([compat.ad.instantiate_zeros(ct) for ct in cotangents]))
    return [next(found) if i in at else None for i in range(len(operands))]


def zeros(operands: Sequence) -> list:
    """Symbolic zero cotangents for the undefined ones among `operands`, None for the others."""
    return [compat.Zero(x.aval) if compat.is_undefined_primal(x) else None for x in operands]


def unbroadcast(array: jax.Array, batch: Sequence[int]) -> jax.Array:
    """Sums over the leading dimensions where `batch` has 1: the transpose of broadcasting them."""
    axes = tuple(i for i, n in enumerate(batch) if n == 1 and array.shape[i] != 1)
    return array.sum(axes, keepdims=True) if axes else array


def broadcast_like(array: jax.Array, like) -> jax.Array:
    """`array` with the shape of the type `like`, and on explicit meshes with its sharding.

    An array that is broadcast first and moved then has a cotangent that is moved, which gathers
    all of it, before it is summed.
    """
    is_explicit = jax.sharding.AxisType.Explicit in like.sharding.mesh.axis_types
    return jnp.broadcast_to(array, like.shape, out_sharding=like.sharding if is_explicit else None)


def match_type(array: Any, like, core_rank: int = 2) -> jax.Array:
    """A cotangent of the type `like`: batch dimensions summed or broadcast, resharded, cast."""
    summed = unbroadcast(array, like.shape[: like.ndim - core_rank]).astype(like.dtype)
    if summed.shape != like.shape:
        return broadcast_like(summed, like)
    return compat.reshard_like(summed, like)


def taylor(function: Callable, primals: Sequence, series: Sequence) -> tuple[list, list]:
    """The results of `function` along curves, and the Taylor coefficients of each.

    The curves are those of the operands: x + series[0] t + series[1] t^2 + ... The derivatives
    with respect to t are those of `function` itself, to any order.
    """

    def along(t):
        def point(x, terms):
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            polynomial = functools.reduce(
                lambda sum, term: sum * t.astype(x.dtype) + term, terms[::-1]
            )
            return x + polynomial * t.astype(x.dtype)

        return function(*map(point, primals, series))

    def derivative(function):
        return lambda t: jax.jvp(function, (t,), (jnp.ones_like(t),))[1]

    start = jnp.zeros((), jnp.float32)
    values, terms = along(start), []
    for order in range(1, len(series[0]) + 1):
        along = derivative(along)
        terms.append(
            [
                d / math.factorial(order) if d.dtype == y.dtype else jnp.zeros_like(y)
                for d, y in zip(along(start), values, strict=True)  # integers have no derivatives
            ]
        )
    return values, [list(of_result) for of_result in zip(*terms, strict=True)]
