"""A radiance field on a grid of features (as in DVGO, Sun et al. 2021), fitted to rays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxops._bench.models.model import Batch, Model, Setup
from jaxops._bench.models.operators import Operators


class RadianceField(nn.Module):
    """Features of a grid, a small network that makes density and colour of them, and rendering."""

    operators: Operators
    side: int
    features: int
    hidden: int
    samples: int

    @nn.compact
    def __call__(self, ends: jax.Array) -> jax.Array:
        """The ends of rays (R, 2, 3) to their colours (R, 3)."""
        shape = (self.side,) * 3 + (self.features,)
        grid = self.param("grid", nn.initializers.normal(0.1), shape, jnp.float32)
        along = (jnp.arange(self.samples, dtype=jnp.float32)[:, None] + 0.5) / self.samples
        start, end = ends[:, None, 0], ends[:, None, 1]
        points = start + along * (end - start)
        x = self.operators.grid_sample(grid, points.reshape(-1, 3))
        x = nn.Dense(4)(nn.relu(nn.Dense(self.hidden)(x)))
        x = x.reshape(len(ends), self.samples, 4)
        step = jnp.linalg.norm(end - start, axis=-1) / self.samples
        depth = nn.softplus(x[..., 0]) * step
        # The light that reaches a sample is what those before it let through.
        reaching = jnp.exp(depth - jnp.cumsum(depth, axis=1))
        weight = reaching * (1 - jnp.exp(-depth))
        return jnp.sum(weight[..., None] * nn.sigmoid(x[..., 1:]), axis=1)


def _setup(side: int, features: int, hidden: int, rays: int, samples: int) -> Setup:
    def batch(random: np.random.Generator) -> Batch:
        ends = random.standard_normal((rays, 2, 3), np.float32)
        ends /= np.linalg.norm(ends, axis=-1, keepdims=True)
        return (ends,), (random.random((rays, 3), np.float32),)

    def loss(operators: Operators, colours: jax.Array, wanted: jax.Array) -> jax.Array:
        del operators
        return jnp.mean((colours - wanted) ** 2)

    return Setup(
        f"{rays} rays of {samples} points, {features} features on {side}³",
        lambda operators: RadianceField(operators, side, features, hidden, samples),
        batch,
        loss,
    )


FLOAT32 = Model(
    "nerf-volume-f32",
    "float32",
    optax.adam(1e-2),
    full=_setup(128, 16, 64, 8192, 128),
    small=_setup(32, 8, 32, 512, 32),
)
