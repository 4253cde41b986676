"""The declaration of a model: its sizes, its module, its data and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

from jaxops._bench.models.operators import Operators

Batch = tuple[tuple[Any, ...], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model of one size, ready to be trained.

    Attributes:
      sizes: what the size is, in words, such as "64 images of 224 x 224".
      module: the network, of the operators that it is to use.
      batch: random data: the inputs of the network and the targets of its loss.
      loss: a scalar in float32, of the operators, the network's result and the targets.
    """

    sizes: str
    module: Callable[[Operators], nn.Module]
    batch: Callable[[np.random.Generator], Batch]
    loss: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that is trained.

    Attributes:
      name: what the command line calls it.
      dtype: the dtype in which the network computes.
      optimizer: what updates the parameters, which are float32.
      full: the size that GPUs train.
      small: the size that a CPU trains, of the same layers.
    """

    name: str
    dtype: str
    optimizer: optax.GradientTransformation
    full: Setup
    small: Setup


def cross_entropy(operators: Operators, logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels; of plain JAX for all operators."""
    del operators
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), labels).mean()


def momentum(learning_rate: float) -> optax.GradientTransformation:
    """Stochastic gradient descent as convolutional networks are trained."""
    return optax.sgd(learning_rate, momentum=0.9)
