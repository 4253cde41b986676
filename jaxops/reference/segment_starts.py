"""The first steps of segments in plain `jax.numpy`: their definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_starts(ids: jax.Array, *, first: int) -> jax.Array:
    """starts[..., t] = max({s <= t : ids[..., s] != ids[..., s - 1]} and {first}), int32.

    A segment is a run of equal neighbouring ids (..., T). The first one starts at `first`, which
    is at most 0.
    """
    time = ids.shape[-1]
    steps = jnp.arange(time, dtype=jnp.int32)
    changes = ids[..., 1:] != ids[..., :-1]
    begins = jnp.pad(changes, [(0, 0)] * (ids.ndim - 1) + [(min(1, time), 0)])
    return jax.lax.cummax(jnp.where(begins, steps, jnp.int32(first)), axis=ids.ndim - 1)
