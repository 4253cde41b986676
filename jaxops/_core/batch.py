"""Batch dimensions in an order that native handlers can work with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._core import native


def call_grouped(
    call: Callable[..., Sequence[jax.Array]],
    rank: int,
    operands: Sequence[jax.Array],
    params: Mapping[str, Any],
) -> Sequence[jax.Array]:
    """call(*operands, **params), of operands and results with `rank` batch dimensions.

    Handlers take neighbouring batch dimensions along which the same arrays vary as one, and no more
    than a few others. Where nested vmaps have alternated more often than that, the dimensions are
    sorted: operands and results are transposed.
    """
    patterns = _patterns(rank, operands, params)
    groups = [pattern for pattern, _ in itertools.groupby(filter(None, patterns))]
    most = native.limits("batch").max_groups
    if len(groups) <= most:
        return call(*operands, **params)
    if len(set(groups)) > most:
        batch = lax.broadcast_shapes(*(x.shape[:rank] for x in operands))
        operands = [jnp.broadcast_to(x, (*batch, *x.shape[rank:])) for x in operands]
        patterns = _patterns(rank, operands, params)
    order = sorted(range(rank), key=patterns.__getitem__)
    if "summed" in params:
        params = {**params, "summed": tuple(params["summed"][d] for d in order)}
    results = call(*(_transpose(x, order) for x in operands), **params)
    return [_transpose(x, np.argsort(order).tolist()) for x in results]


def _patterns(rank, operands, params):
    """The operands that vary along each batch dimension, as flags; along one of size 1, none."""
    summed = params.get("summed", (False,) * rank)
    varies = [tuple(x.shape[d] != 1 for x in operands) for d in range(rank)]
    return [(*v, s) if any(v) else () for v, s in zip(varies, summed, strict=True)]


def _transpose(array, order):
    return array.transpose(*order, *range(len(order), array.ndim))
