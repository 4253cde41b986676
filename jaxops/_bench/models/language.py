"""Language models without attention: LightConv (Wu et al. 2019), and gated short convolutions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxops._bench.models.model import Batch, Model, Setup, cross_entropy
from jaxops._bench.models.operators import Operators


class LightConv(nn.Module):
    """Linear, gate, a lightweight convolution whose filters are softmaxes, linear."""

    operators: Operators
    heads: int
    taps: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, T, D) to (B, T, D)."""
        width = x.shape[-1]
        kernel = self.param(
            "kernel", nn.initializers.xavier_uniform(), (self.heads, self.taps), jnp.float32
        )
        y = nn.glu(nn.Dense(2 * width, dtype=self.dtype)(x))
        y = self.operators.lightweight_conv(y, jax.nn.softmax(kernel).astype(self.dtype))
        return nn.Dense(width, dtype=self.dtype)(y)


class ShortConv(nn.Module):
    """A short depthwise convolution between two gates, as the mixers of Hyena and LFM2 have it."""

    operators: Operators
    taps: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, T, D) to (B, T, D)."""
        width = x.shape[-1]
        kernel = self.param(
            "kernel", nn.initializers.normal(self.taps**-0.5), (width, self.taps), jnp.float32
        )
        before, after, y = jnp.split(nn.Dense(3 * width, dtype=self.dtype)(x), 3, -1)
        y = after * self.operators.lightweight_conv(before * y, kernel.astype(self.dtype))
        return nn.Dense(width, dtype=self.dtype)(y)


class LanguageModel(nn.Module):
    """Blocks of a mixer and a feed-forward network, each after a normalisation.

    The mixer is `LightConv` with `heads`, or else `ShortConv`.
    """

    operators: Operators
    symbols: int
    width: int
    taps: tuple[int, ...]
    heads: int | None
    dtype: Any

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        """(B, T) to (B, T, symbols), the logits of what follows each position."""
        operators, dtype = self.operators, self.dtype
        x = nn.Embed(self.symbols, self.width, dtype=dtype)(text)
        for taps in self.taps:
            y = nn.RMSNorm(dtype=dtype)(x)
            if self.heads is None:
                x = x + ShortConv(operators, taps, dtype)(y)
            else:
                x = x + LightConv(operators, self.heads, taps, dtype)(y)
            y = nn.Dense(4 * self.width, dtype=dtype)(nn.RMSNorm(dtype=dtype)(x))
            x = x + nn.Dense(self.width, dtype=dtype)(nn.relu(y))
        return nn.Dense(self.symbols, dtype=dtype)(nn.RMSNorm(dtype=dtype)(x))


def _setup(
    rows: int, length: int, symbols: int, width: int, taps: tuple[int, ...], heads: int | None
) -> Setup:
    def batch(random: np.random.Generator) -> Batch:
        text = random.integers(0, symbols, (rows, length + 1), np.int32)
        return (text[:, :-1],), (text[:, 1:],)

    return Setup(
        f"{rows} texts of {length} symbols",
        lambda operators: LanguageModel(operators, symbols, width, taps, heads, "bfloat16"),
        batch,
        cross_entropy,
    )


LIGHT_CONV = Model(
    "lightconv-lm-bf16",
    "bfloat16",
    optax.adamw(3e-4),
    full=_setup(16, 1024, 8192, 768, (3, 7, 15, 31, 31, 31), 12),
    small=_setup(4, 256, 256, 128, (15,), 4),
)
SHORT_CONV = Model(
    "shortconv-lm-bf16",
    "bfloat16",
    optax.adamw(3e-4),
    full=_setup(8, 2048, 8192, 768, (4,) * 8, None),
    small=_setup(4, 256, 256, 128, (4,), None),
)
