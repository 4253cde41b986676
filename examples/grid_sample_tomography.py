"""Tomography with a VoxelGrid of jaxops: fits a volume to rays through a real MRI image of a head.

    python examples/grid_sample_tomography.py [--steps N] [--picture FILE]

The image is the small anatomical one that nibabel ships with its tests, 33 x 41 x 25 voxels;
nothing is downloaded. A scan is what a detector sees: the mean intensity along straight rays in
random directions, with 1 % of noise. The fit starts from an empty volume and follows the gradient
of the squared error, which goes through `grid_sample` into the grid of the layer. The picture shows
three slices of the volume before, after, and of the truth; the metric is the peak signal-to-noise
ratio of the volume in dB. It needs flax, nibabel, optax, and matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import functools
import importlib.resources

import jax
import jax.numpy as jnp
import nibabel
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import jaxops
from jaxops.flax import linen as layers

RAYS = 60_000  # of a scan
SAMPLES = 48  # along a ray
BATCH = 2048  # rays a step
NOISE = 0.01


def load_image() -> np.ndarray:
    """The image, (33, 41, 25, 1), between 0 and 1; its few brightest voxels are clipped."""
    with importlib.resources.as_file(
        importlib.resources.files(nibabel) / "tests" / "data" / "anatomical.nii"
    ) as file:
        image = np.asarray(nibabel.load(file).dataobj, np.float32)
    return np.minimum(image / np.quantile(image, 0.999), 1)[..., None]


def random_rays(key, count: int):
    """The ends of rays through the volume, (count, 2, 3): points on the sphere around it."""
    ends = jax.random.normal(key, (count, 2, 3))
    return 3**0.5 * ends / jnp.linalg.norm(ends, axis=-1, keepdims=True)


def scan(sample, rays):
    """The mean intensity along each ray, (count,), of a volume that `sample` reads at points."""
    t = (jnp.arange(SAMPLES) + 0.5)[:, None] / SAMPLES
    start, end = rays[:, None, 0], rays[:, None, 1]
    points = start + t * (end - start)  # (count, SAMPLES, 3)
    return sample(points)[..., 0].mean(-1)


def fit(rays, measured, shape, steps: int, on_step=lambda loss: None):
    """The volume of `shape` that explains the measurements, after `steps` steps."""
    *resolution, features = shape
    layer = layers.VoxelGrid(resolution, features)  # zero at first, and outside of the volume
    optimizer = optax.adam(optax.cosine_decay_schedule(0.03, steps))

    def loss(variables, rays, measured):
        found = scan(functools.partial(layer.apply, variables), rays)
        return jnp.mean((found - measured) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(variables, state, key):
        batch = jax.random.randint(key, (BATCH,), 0, len(rays))
        value, gradient = jax.value_and_grad(loss)(variables, rays[batch], measured[batch])
        updates, state = optimizer.update(gradient, state)
        # Intensities are not negative.
        variables = jax.tree.map(jax.nn.relu, optax.apply_updates(variables, updates))
        return variables, state, value

    variables = layer.init(jax.random.key(1), rays[0])
    state = optimizer.init(variables)
    for key in jax.random.split(jax.random.key(2), steps):
        variables, state, value = step(variables, state, key)
        on_step(value)
    return variables["params"]["grid"]


def psnr(volume, truth) -> float:
    """The peak signal-to-noise ratio in dB, of intensities between 0 and 1."""
    return float(-10 * jnp.log10(jnp.mean((volume - truth) ** 2)))


def reconstruct(steps: int, on_step=lambda loss: None):
    """The truth and the volume that is fitted to a scan of it."""
    truth = jnp.asarray(load_image())
    of_rays, of_noise = jax.random.split(jax.random.key(0))
    rays = random_rays(of_rays, RAYS)
    clean = scan(functools.partial(jaxops.grid_sample, truth), rays)
    measured = clean + NOISE * clean.max() * jax.random.normal(of_noise, clean.shape)
    return truth, fit(rays, measured, truth.shape, steps, on_step)


def draw(volumes, file: str) -> None:
    """Slices through the middle, a row for each of the named volumes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    for row, (name, volume) in zip(figure.subplots(3, 3), volumes.items(), strict=True):
        for axis, subplot in enumerate(row):
            middle = np.take(np.asarray(volume)[..., 0], volume.shape[axis] // 2, axis)
            subplot.imshow(middle.T, cmap="gray", origin="lower", vmin=0, vmax=1)
            subplot.set_axis_off()
        row[1].set_title(name)
    figure.savefig(file, dpi=120)


def main() -> None:
    """Fits, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--picture", default="grid_sample_tomography.png")
    arguments = parser.parse_args()
    columns = (TextColumn("fitting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}")) as progress:
        task = progress.add_task("", total=arguments.steps, state="compiling")
        losses = []

        def on_step(loss):
            losses.append(loss)
            state = {"state": f"error {loss:.2e}"} if len(losses) % 10 == 0 else {}
            progress.update(task, advance=1, **state)

        truth, volume = reconstruct(arguments.steps, on_step)
    before = jnp.zeros_like(truth)
    print(f"before {psnr(before, truth):6.2f} dB\nafter  {psnr(volume, truth):6.2f} dB")
    draw({"before": before, "after": volume, "truth": truth}, arguments.picture)
    print(f"slices are in {arguments.picture}")


if __name__ == "__main__":
    main()
