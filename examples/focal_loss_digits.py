"""Focal against cross-entropy loss with a rare class: which handwritten digits are nines?

    python examples/focal_loss_digits.py [--steps N] [--seeds N] [--picture FILE]

The images are scikit-learn's digits, 8 x 8 pixels, nothing is downloaded. The training set keeps
few of the nines. A small Flax network is trained twice from the same start, with the focal loss and
with gamma = 0 and no alpha, which is cross-entropy. The metrics are those of the rare class on
held-out images: the average precision of the ranking, and recall and F1 at a probability of one
half. The picture shows them. It needs scikit-learn, optax, and matplotlib for the picture.
"""

from __future__ import annotations

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, f1_score, recall_score

import jaxops

RARE = 9
KEPT = 12  # nines of the training set
LOSSES = {
    "cross-entropy": {"gamma": 0.0, "alpha": None},
    "focal": {"gamma": 2.0, "alpha": 0.75},
}


class Classifier(nn.Module):
    """One logit an image: how likely it is a nine."""

    @nn.compact
    def __call__(self, images):
        """(N, 64) to (N, 1)."""
        x = nn.relu(nn.Dense(64)(images))
        return nn.Dense(1)(nn.relu(nn.Dense(64)(x)))


def imbalanced_digits(seed: int):
    """Training and held-out images, and for each whether it is a nine, as (N, 1)."""
    images, digits = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    held_out, training = order[:600], order[600:]
    rare = training[digits[training] == RARE][:KEPT]
    training = np.concatenate([training[digits[training] != RARE], rare])
    labels = (digits == RARE)[:, None]  # the shape of the logits
    return (images[training], labels[training]), (images[held_out], labels[held_out])


def train(options, images, labels, steps: int, seed: int):
    """The parameters after `steps` steps on batches of 128."""
    model = Classifier()
    params = model.init(jax.random.key(seed), images[:1])
    optimizer = optax.adam(2e-3)

    def loss(params, images, labels):
        logits = model.apply(params, images)
        return jaxops.sigmoid_focal_loss(logits, labels, reduction="mean", **options)

    @jax.jit
    def step(carry, key):
        params, state = carry
        batch = jax.random.randint(key, (128,), 0, len(images))
        gradients = jax.grad(loss)(params, jnp.asarray(images)[batch], jnp.asarray(labels)[batch])
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(seed + 1), steps)
    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    return params


def evaluate(params, images, labels) -> dict[str, float]:
    """The metrics of the rare class."""
    logits = np.asarray(Classifier().apply(params, images))[:, 0]
    truth = labels[:, 0]
    return {
        "average precision": float(average_precision_score(truth, logits)),
        "recall": float(recall_score(truth, logits > 0)),
        "F1": float(f1_score(truth, logits > 0)),
    }


def compare(steps: int, seeds: int) -> dict[str, dict[str, float]]:
    """Each loss's metrics, the means over `seeds` starts and splits."""
    found = {name: [] for name in LOSSES}
    for seed in track(range(seeds), "training"):
        training, held_out = imbalanced_digits(seed)
        for name, options in LOSSES.items():
            params = train(options, *training, steps, seed)
            found[name].append(evaluate(params, *held_out))
    return {
        name: {metric: float(np.mean([m[metric] for m in metrics])) for metric in metrics[0]}
        for name, metrics in found.items()
    }


def draw(results: dict[str, dict[str, float]], file: str) -> None:
    """A group of bars for each metric, a bar for each loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(results)
    for i, (name, metrics) in enumerate(results.items()):
        bars = axes.bar(np.arange(len(metrics)) + i * width, metrics.values(), width, label=name)
        axes.bar_label(bars, fmt="%.2f")
    axes.set_xticks(np.arange(len(metrics)) + width / 2, metrics)
    axes.set(ylim=(0, 1), title=f"Which digits are nines? {KEPT} nines to train on")
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=100)


def main() -> None:
    """Prints the table and draws it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--picture", default="focal_loss_digits.png")
    arguments = parser.parse_args()
    results = compare(arguments.steps, arguments.seeds)
    print(f"{KEPT} nines to train on; means over {arguments.seeds} seeds, held-out images")
    print(f"{'':16}" + "".join(f"{metric:>20}" for metric in results["focal"]))
    for name, metrics in results.items():
        print(f"{name:16}" + "".join(f"{value:20.3f}" for value in metrics.values()))
    draw(results, arguments.picture)
    print(f"the metrics are in {arguments.picture}")


if __name__ == "__main__":
    main()
