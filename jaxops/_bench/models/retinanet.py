"""The heads of RetinaNet (Lin et al. 2017) on the levels of a feature pyramid, with its losses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxops._bench.models.model import Batch, Model, Setup, momentum
from jaxops._bench.models.operators import Operators

ANCHORS = 9  # at each place
BOX = 4


class Tower(nn.Module):
    """Four convolutions of 3 x 3, and one to the results of all anchors of a place."""

    operators: Operators
    features: int
    outputs: int
    bias: float
    dtype: Any

    @nn.compact
    def __call__(self, levels: tuple[jax.Array, ...]) -> jax.Array:
        """Levels (N, H, W, C) to (N, all anchors, outputs), by the same weights on every level."""
        conv, dtype = self.operators.Conv, self.dtype
        layers = [conv(self.features, (3, 3), dtype=dtype) for _ in range(4)]
        last = conv(
            ANCHORS * self.outputs,
            (3, 3),
            dtype=dtype,
            kernel_init=nn.initializers.normal(0.01),
            bias_init=nn.initializers.constant(self.bias),
        )
        found = []
        for x in levels:
            for layer in layers:
                x = nn.relu(layer(x))
            found.append(last(x).reshape(len(x), -1, self.outputs))
        return self.operators.concatenate(found, axis=1)


class Heads(nn.Module):
    """Classes and boxes of every anchor."""

    operators: Operators
    features: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, *levels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Levels (N, H, W, C) to (N, all anchors, classes) and (N, all anchors, BOX)."""
        # A rare class is unlikely at first, as in the paper.
        rare = -math.log((1 - 0.01) / 0.01)
        options = self.operators, self.features
        classes = Tower(*options, self.classes, rare, self.dtype, name="classes")(levels)
        boxes = Tower(*options, BOX, 0.0, self.dtype, name="boxes")(levels)
        return classes, boxes


def _setup(dtype: str, images: int, size: int, features: int, classes: int) -> Setup:
    sides = [size >> level for level in range(3, 8) if size >> level > 1]
    anchors = ANCHORS * sum(side**2 for side in sides)
    positives = max(1, images * anchors // 1000)

    def batch(random: np.random.Generator) -> Batch:
        levels = [
            random.standard_normal((images, side, side, features), np.float32) for side in sides
        ]
        labels = np.full(images * anchors, -1, np.int32)
        found = random.choice(labels.size, positives, replace=False)
        labels[found] = random.integers(0, classes, positives)
        boxes = random.standard_normal((positives, BOX), np.float32)
        return tuple(jnp.asarray(level, dtype) for level in levels), (labels, found, boxes)

    def loss(
        operators: Operators,
        found: tuple[jax.Array, jax.Array],
        labels: jax.Array,
        positive: jax.Array,
        boxes: jax.Array,
    ) -> jax.Array:
        logits, predicted = (x.reshape(-1, x.shape[-1]) for x in found)
        of_boxes = optax.huber_loss(predicted[positive].astype("float32"), boxes).sum() / positives
        return operators.focal_loss(logits, labels, positives) + of_boxes

    return Setup(
        f"{images} images of {size} x {size}, {images * anchors:,} anchors",
        lambda operators: Heads(operators, features, classes, dtype),
        batch,
        loss,
    )


BFLOAT16 = Model(
    "retinanet-bf16",
    "bfloat16",
    momentum(0.001),
    full=_setup("bfloat16", 8, 512, 256, 80),
    small=_setup("bfloat16", 4, 64, 32, 20),
)
