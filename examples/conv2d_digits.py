"""Handwritten digits classified by a network whose every convolution is ours.

    python examples/conv2d_digits.py [--steps N]

The images are scikit-learn's digits, 8 x 8 pixels, nothing is downloaded. A small Flax network is
trained with `jaxops.conv_general_dilated` in its layers; a layer without a kernel would raise an
error. The trained parameters are then used with `jax.lax`'s convolution for comparison.
"""

from __future__ import annotations

import argparse
import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxops


class Classifier(nn.Module):
    """Four convolutions: dense, depthwise, strided and 1x1."""

    @nn.compact
    def __call__(self, images, convolution=jaxops.conv_general_dilated):
        """(N, 8, 8, 1) to (N, 10)."""
        conv = functools.partial(nn.Conv, conv_general_dilated=convolution)
        x = nn.relu(conv(16, (3, 3))(images))
        x = nn.relu(conv(16, (3, 3), feature_group_count=16)(x))
        x = nn.relu(conv(32, (3, 3), strides=2)(x))
        x = nn.relu(conv(32, (1, 1))(x))
        return nn.Dense(10)(x.mean((1, 2)))


def split_digits():
    """Training and held-out images, in [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(images))
    held_out, training = order[:400], order[400:]
    return (images[training], labels[training]), (images[held_out], labels[held_out])


def train(images, labels, steps: int):
    """The parameters after `steps` steps on batches of 128."""
    model = Classifier()
    params = model.init(jax.random.key(0), images[:1])
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def loss(params, images, labels):
        logits = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(carry, key):
        params, state = carry
        batch = jax.random.randint(key, (128,), 0, len(images))
        gradients = jax.grad(loss)(params, jnp.asarray(images)[batch], jnp.asarray(labels)[batch])
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(1), steps)
    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    return params


def classify(steps: int) -> dict[str, float]:
    """The accuracy on held-out digits, and the distance of `jax.lax`'s logits from ours."""
    training, (images, labels) = split_digits()
    with warnings.catch_warnings():
        warnings.simplefilter("error", jaxops.NoKernelWarning)
        params = train(*training, steps)
        # GPUs round the operands of products to TF32 by default.
        with jax.default_matmul_precision("highest"):
            logits = Classifier().apply(params, images)
            by_lax = Classifier().apply(params, images, jax.lax.conv_general_dilated)
    return {
        "accuracy": float((logits.argmax(-1) == labels).mean()),
        "difference": float(jnp.abs(logits - by_lax).max() / jnp.abs(by_lax).max()),
    }


def main() -> None:
    """Prints what `classify` finds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    found = classify(parser.parse_args().steps)
    print(f"{found['accuracy']:.1%} of the held-out digits are told")
    print(
        f"with jax.lax's convolution the logits differ by {found['difference']:.1e} of the largest"
    )


if __name__ == "__main__":
    main()
