"""The operators of the models: ours, or the fastest that plain JAX has for the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxops
import jaxops.flax
from jaxops._bench import registry
from jaxops._bench.spec import Case


@dataclasses.dataclass(frozen=True)
class Operators:
    """A set of operators; all sets have the same arguments, parameters and results.

    Attributes:
      name: what the tables call it.
      Conv, ConvTranspose: layers of Flax.
      concatenate: as `jax.numpy.concatenate`.
      lightweight_conv: the causal convolution of x (B, T, C) with the filters (H, K).
      focal_loss: of logits (rows, classes) and labels (rows,), the sum over rows divided by the
        last argument, a static number.
      grid_sample: of a volume (*sizes, F) at points (P, len(sizes)).
    """

    name: str
    Conv: type[nn.Module]
    ConvTranspose: type[nn.Module]
    concatenate: Callable[..., jax.Array]
    lightweight_conv: Callable[..., Any]
    focal_loss: Callable[[jax.Array, jax.Array, float], jax.Array]
    grid_sample: Callable[[jax.Array, jax.Array], jax.Array]


def ours() -> Operators:
    """The operators of jaxops."""

    def focal_loss(logits: jax.Array, labels: jax.Array, normalizer: float) -> jax.Array:
        return jaxops.sigmoid_focal_loss(logits, labels, normalizer=normalizer)

    return Operators(
        "jaxops",
        jaxops.flax.linen.Conv,
        jaxops.flax.linen.ConvTranspose,
        jaxops.concatenate,
        jaxops.lightweight_conv,
        focal_loss,
        jaxops.grid_sample,
    )


def plain() -> Operators:
    """Layers of Flax, and the formulations that XLA compiles best: peers of `benchmarks/`."""

    def lightweight_conv(x: jax.Array, weight: jax.Array) -> jax.Array:
        B, T, C = x.shape
        options = {"layout": "NTC", "padding": "causal"}
        return _peer("lightweight_conv", "XLA shift-and-add", (B, C, T, *weight.shape), **options)(
            x, weight
        )

    def focal_loss(logits: jax.Array, labels: jax.Array, normalizer: float) -> jax.Array:
        mean = _peer("sigmoid_focal_loss", "XLA, iota", logits.shape, gamma=2.0)(logits, labels)
        return mean * (len(labels) / normalizer)

    def grid_sample(volume: jax.Array, points: jax.Array) -> jax.Array:
        *sizes, width = volume.shape
        return _peer("grid_sample", "XLA gathers", (len(points), width, *sizes))(volume, points)

    return Operators(
        "plain JAX",
        nn.Conv,
        nn.ConvTranspose,
        jnp.concatenate,
        lightweight_conv,
        focal_loss,
        grid_sample,
    )


def _peer(operator: str, name: str, shape: tuple[int, ...], **options: Any) -> Callable:
    """The function of a peer in the benchmark of an operator, for a problem of this shape."""
    (peer,) = (peer for peer in registry.load(operator).peers if peer.name == name)
    return peer.function(Case("typical", shape, "float32", options))
