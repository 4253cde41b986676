"""Handwritten digits classified by a network whose every convolution is ours.

    python examples/conv2d_digits.py [--steps N] [--picture FILE]

The images are scikit-learn's digits, 8 x 8 pixels, nothing is downloaded. A small Flax network is
trained with `jaxops.conv_general_dilated` in its layers; a layer without a kernel would raise an
error. The trained parameters are then used with `jax.lax`'s convolution for comparison. The
picture shows held-out digits and what they were told to be. It needs scikit-learn, optax, and
matplotlib for the picture.
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
from rich.progress import track
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
    def step(params, state, key):
        batch = jax.random.randint(key, (128,), 0, len(images))
        gradients = jax.grad(loss)(params, jnp.asarray(images)[batch], jnp.asarray(labels)[batch])
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for key in track(jax.random.split(jax.random.key(1), steps), "training"):
        params, state = step(params, state, key)
    return params


def classify(steps: int) -> dict:
    """The accuracy on held-out digits, and the distance of `jax.lax`'s logits from ours.

    Also the digits, "images", and what they were told to be, "found".
    """
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
        "images": images,
        "labels": labels,
        "found": np.asarray(logits.argmax(-1)),
    }


def draw(images, labels, found, file: str) -> None:
    """Digits with what they were told to be: all wrong ones, in red, before right ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    first_wrong = np.argsort(found == labels, kind="stable")
    for subplot, i in zip(figure.subplots(4, 10).flat, first_wrong, strict=False):
        subplot.imshow(images[i, ..., 0], cmap="gray_r")
        subplot.set_title(found[i], color="black" if found[i] == labels[i] else "red")
        subplot.set_axis_off()
    figure.savefig(file, dpi=100)


def main() -> None:
    """Prints and draws what `classify` finds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--picture", default="conv2d_digits.png")
    arguments = parser.parse_args()
    found = classify(arguments.steps)
    print(f"{found['accuracy']:.1%} of the held-out digits are recognised")
    print(
        f"with jax.lax's convolution the logits differ by {found['difference']:.1e} of the largest"
    )
    draw(found["images"], found["labels"], found["found"], arguments.picture)
    print(f"digits are in {arguments.picture}")


if __name__ == "__main__":
    main()
