"""A U-Net whose skip connections are jaxops.concatenate: removes noise from handwritten digits.

    python examples/concatenate_unet.py [--steps N] [--picture FILE]

The images are scikit-learn's digits, 8 x 8 pixels; nothing is downloaded. Each has Gaussian noise,
which is drawn again for every batch, and the network has to return the image. The metric is the
peak signal-to-noise ratio on held-out images, in dB. It compares the U-Net, the same network
without its skip connections, and no network. The picture shows some of the images. It needs
scikit-learn, optax, and matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track
from sklearn.datasets import load_digits

import jaxops

NOISE = 0.3  # standard deviation, of pixels between 0 and 1
WIDTHS = (16, 32, 64)  # channels at 8 x 8, 4 x 4 and 2 x 2 pixels


class Block(nn.Module):
    """Two convolutions."""

    channels: int

    @nn.compact
    def __call__(self, x):
        """(N, H, W, any channels) to (N, H, W, channels)."""
        for _ in range(2):
            x = nn.relu(nn.Conv(self.channels, (3, 3))(x))
        return x


class UNet(nn.Module):
    """Down to 2 x 2 pixels and up again; each level up sees the activations of its level down."""

    skips: bool = True

    @nn.compact
    def __call__(self, x):
        """(N, 8, 8, 1) to (N, 8, 8, 1)."""
        seen = []
        for channels in WIDTHS[:-1]:
            x = Block(channels)(x)
            seen.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = Block(WIDTHS[-1])(x)
        for channels in reversed(WIDTHS[:-1]):
            x = nn.ConvTranspose(channels, (2, 2), strides=(2, 2))(x)
            skipped = seen.pop()
            x = Block(channels)(jaxops.concatenate([x, skipped], axis=-1) if self.skips else x)
        return nn.Conv(1, (1, 1))(x)


def noisy(key, images):
    """The images with noise."""
    return images + NOISE * jax.random.normal(key, images.shape, images.dtype)


def train(model, images, steps: int, name: str = "training"):
    """The parameters after `steps` steps on batches of 64."""
    params = jax.jit(model.init)(jax.random.key(0, impl="rbg"), images[:1])
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    def loss(params, key, clean):
        return jnp.mean((model.apply(params, noisy(key, clean)) - clean) ** 2)

    @jax.jit
    def step(params, state, key):
        of_batch, of_noise = jax.random.split(key)
        clean = images[jax.random.randint(of_batch, (64,), 0, len(images))]
        updates, state = optimizer.update(jax.grad(loss)(params, of_noise, clean), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for key in track(jax.random.split(jax.random.key(1), steps), name):
        params, state = step(params, state, key)
    return params


def psnr(images, clean) -> float:
    """The peak signal-to-noise ratio in dB, of pixels between 0 and 1."""
    return float(-10 * jnp.log10(jnp.mean((images - clean) ** 2)))


def restore(steps: int) -> dict[str, jax.Array]:
    """Held-out images, "clean", as they come, "noisy", and as each network returns them."""
    images = jnp.asarray(load_digits().images[..., None] / 16, jnp.float32)
    images = images[np.random.default_rng(0).permutation(len(images))]
    held_out, images = images[:300], images[300:]
    spoilt = noisy(jax.random.key(2), held_out)
    results = {"clean": held_out, "noisy": spoilt}
    for name, model in (("without skips", UNet(skips=False)), ("U-Net", UNet())):
        params = train(model, images, steps, name)
        results[name] = jax.jit(functools.partial(model.apply, params))(spoilt)
    return results


def compare(results: dict[str, jax.Array]) -> dict[str, float]:
    """The ratio of the images of each name."""
    clean = results["clean"]
    return {name: psnr(images, clean) for name, images in results.items() if name != "clean"}


def draw(results: dict[str, jax.Array], file: str) -> None:
    """Ten images, a row for each name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    rows = figure.subplots(len(results), 10)
    for row, (name, images) in zip(rows, results.items(), strict=True):
        for subplot, image in zip(row, np.asarray(images), strict=False):
            subplot.imshow(image[..., 0], cmap="gray", vmin=0, vmax=1)
            subplot.set_axis_off()
        row[0].set_title(name, loc="left")
    figure.savefig(file, dpi=100)


def main() -> None:
    """Trains, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--picture", default="concatenate_unet.png")
    arguments = parser.parse_args()
    results = restore(arguments.steps)
    for name, decibels in compare(results).items():
        print(f"{name:14} {decibels:6.2f} dB")
    draw(results, arguments.picture)
    print(f"images are in {arguments.picture}")


if __name__ == "__main__":
    main()
