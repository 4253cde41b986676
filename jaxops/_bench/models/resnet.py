"""ResNet-50 (He et al. 2015), in the form that strides in the 3 x 3 convolutions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxops._bench.models.model import Batch, Model, Setup, cross_entropy, momentum
from jaxops._bench.models.operators import Operators


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, around which the input is added."""

    operators: Operators
    features: int
    strides: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(N, H, W, C) to (N, H / strides, W / strides, 4 features)."""
        conv = functools.partial(self.operators.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), strides=self.strides)(y)))
        y = norm()(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides=self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem, stages of bottlenecks, each of half the resolution, and a classifier."""

    operators: Operators
    stages: tuple[int, ...]
    features: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """(N, H, W, 3) to (N, classes)."""
        x = self.operators.Conv(self.features, (7, 7), strides=2, use_bias=False, dtype=self.dtype)(
            images
        )
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                strides = 2 if stage and not block else 1
                x = Bottleneck(self.operators, self.features << stage, strides, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


def _setup(
    dtype: str, images: int, size: int, stages: tuple[int, ...], features: int, classes: int
) -> Setup:
    def batch(random: np.random.Generator) -> Batch:
        pixels = random.standard_normal((images, size, size, 3), np.float32)
        labels = random.integers(0, classes, images, np.int32)
        return (jnp.asarray(pixels, dtype),), (labels,)

    return Setup(
        f"{images} images of {size} x {size}",
        lambda operators: ResNet(operators, stages, features, classes, dtype),
        batch,
        cross_entropy,
    )


def _model(name: str, dtype: str, images: int) -> Model:
    return Model(
        name,
        dtype,
        momentum(0.01),
        full=_setup(dtype, images, 224, (3, 4, 6, 3), 64, 1000),
        small=_setup(dtype, 8, 64, (1, 1), 32, 10),
    )


BFLOAT16 = _model("resnet50-bf16", "bfloat16", 64)
FLOAT32 = _model("resnet50-f32", "float32", 32)
