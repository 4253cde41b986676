"""Focal loss of softmax rows whose classes are spread over devices.

A device reduces its part of a row to the largest logit of a wrong answer, the sum of their
exponentials, and the logit of the right answer where it has that. All-reduces of these numbers, a
maximum and then a sum, make them those of the whole row; no device sees the logits of another.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxops.reference import focal_loss as reference


@dataclasses.dataclass(frozen=True)
class ShardedRows:
    """Rows of logits, and what is known of them on every device.

    Attributes:
      known: whether the label of a row is a class.
      target: whether an entry of this device's part is that of the label.
      lead: how far the wrong answers lead: the logarithm of the sum of their exponentials, less the
        logit of the label.
      shares: the softmax over wrong answers, of this device's part.
    """

    known: jax.Array
    target: jax.Array
    lead: jax.Array
    shares: jax.Array

    def losses(self, gamma: jax.Array) -> jax.Array:
        """The loss of every row."""
        return jnp.where(self.known, reference.focal(self.lead, gamma), 0)

    def gradient(self, gamma: jax.Array, factor: jax.Array) -> jax.Array:
        """The losses' gradient, each times its factor, for this device's part of the logits."""
        slope = factor * reference.focal_slope(self.lead, gamma)
        by_logit = slope[..., None] * jnp.where(self.target, -1, self.shares)
        return jnp.where(self.known[..., None], by_logit, 0)


def sharded_rows(
    logits: jax.Array, labels: jax.Array, dtype: jnp.dtype, axes: tuple[str, ...]
) -> ShardedRows:
    """Reduces one device's part of the classes, which these mesh axes share in order."""
    classes = logits.shape[-1]
    known = (labels >= 0) & (labels < classes * jax.lax.psum(1, axes))
    first = jax.lax.axis_index(axes) * classes
    target = labels[..., None] - first == reference.class_ids(classes, labels.ndim + 1)
    z = jnp.where(known[..., None], logits, 0).astype(dtype)
    largest = jnp.max(z, axis=-1, where=~target, initial=-jnp.inf)
    largest = jax.lax.pmax(largest, axes)
    # With infinities it would be inf - inf; a NaN is in the terms, too.
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    terms = jnp.where(target, 0, jnp.exp(jnp.where(target, 0, z - largest[..., None])))
    right = jnp.where(target, z, 0).sum(-1)
    total, right = jax.lax.psum(jnp.stack([terms.sum(-1), right]), axes)
    shares = terms / jnp.where(total == 0, 1, total)[..., None]
    return ShardedRows(known, target, (largest - right) + jnp.log(total), shares)
