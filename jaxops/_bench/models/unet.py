"""U-Net (Ronneberger et al. 2015) with batch normalisation: segments images."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxops._bench.models.model import Batch, Model, Setup, cross_entropy, momentum
from jaxops._bench.models.operators import Operators

CLASSES = 21


class Block(nn.Module):
    """Two convolutions of 3 x 3."""

    operators: Operators
    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(N, H, W, C) to (N, H, W, features)."""
        for _ in range(2):
            x = self.operators.Conv(self.features, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return x


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions; each level up sees its level down."""

    operators: Operators
    widths: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """(N, H, W, 3) to (N, H, W, CLASSES)."""
        operators, dtype = self.operators, self.dtype
        x, seen = images, []
        for width in self.widths[:-1]:
            x = Block(operators, width, dtype)(x)
            seen.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = Block(operators, self.widths[-1], dtype)(x)
        for width in reversed(self.widths[:-1]):
            x = operators.ConvTranspose(width, (2, 2), strides=(2, 2), dtype=dtype)(x)
            x = Block(operators, width, dtype)(operators.concatenate([x, seen.pop()], axis=-1))
        return operators.Conv(CLASSES, (1, 1), dtype=dtype)(x)


def _setup(dtype: str, images: int, size: int, widths: tuple[int, ...]) -> Setup:
    def batch(random: np.random.Generator) -> Batch:
        pixels = random.standard_normal((images, size, size, 3), np.float32)
        labels = random.integers(0, CLASSES, (images, size, size), np.int32)
        return (jnp.asarray(pixels, dtype),), (labels,)

    return Setup(
        f"{images} images of {size} x {size}",
        lambda operators: UNet(operators, widths, dtype),
        batch,
        cross_entropy,
    )


BFLOAT16 = Model(
    "unet-bf16",
    "bfloat16",
    momentum(0.01),
    full=_setup("bfloat16", 16, 256, (64, 128, 256, 512, 1024)),
    small=_setup("bfloat16", 4, 64, (16, 32)),
)
