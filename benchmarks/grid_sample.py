"""grid_sample against XLA and PyTorch. Shapes are (points, channels, sizes of the volume).

Points are random, or "rays": they lie along parallel rays through the volume, as renderers sample.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, normal
from jaxops.reference import grid_sample as reference

SAMPLES = 128  # along a ray

# fmt: off
CASES = [
    *cases("small", (4096, 4, 32, 32, 32), "float32", where="random"),
    *cases("small", (4096, 16, 64, 64), ["float32", "bfloat16"], where="random"),
    *cases("typical", (1_048_576, 16, 128, 128, 128), "float32", where="random", target=True),
    *cases("typical", (1_048_576, 16, 128, 128, 128), "float32", where="rays"),
    *cases("typical", (1_048_576, 16, 128, 128, 128), ["bfloat16", "float16"], where="random"),
    *cases("typical", (1_048_576, 16, 128, 128, 128), "float32", where="random",
           sums="deterministic"),
    *cases("typical", (262_144, 32, 64, 64, 64), ["float32", "bfloat16"], where="rays"),
    *cases("typical", (262_144, 64, 256, 256), ["float32", "bfloat16"], where="random"),
    *cases("large", (4_194_304, 4, 160, 160, 160), "float32", where="rays"),
    *cases("large", (4_194_304, 1, 256, 256, 256), "float32", where="random"),
    *cases("large", (1_048_576, 3, 2048, 2048), ["float32", "float16"], where="random"),
    *cases("large", (262_144, 128, 512, 512), "bfloat16", where="random"),
    *cases("odd", (500_009, 7, 97, 101, 89), ["float32", "bfloat16"], where="random"),
    *cases("odd", (500_009, 2, 97, 101, 89), "float32", where="random"),
    *cases("odd", (262_147, 33, 127, 129), "float32", where="random"),
    *cases("odd", (262_144, 8, 64, 64, 64), "float64", where="random"),
]
# fmt: on
# Caches hold these volumes, of 1 to 32 channels: distortions and feature fields on a CPU.
for sizes in ((64, 64), (32, 32, 32)):
    CASES += cases("small", (1000, 2, *sizes), "float32", where="random")
    for channels in (1, 2, 3, 4, 8, 16, 32):
        CASES += cases("typical", (100_000, channels, *sizes), "float32", where="random")
    for channels in (1, 4, 32):
        CASES += cases("typical", (100_000, channels, *sizes), "bfloat16", where="random")
    CASES += cases(
        "typical", (100_000, 2, *sizes), "float32", where="random", padding=["border", "reflection"]
    )
# Stencils that jax.numpy makes, and the kernels that sum their entries.
# fmt: off
CASES += cases("typical", (100_000, 3, 256, 256), "float32", where="random", method="cubic")
CASES += cases("typical", (100_000, 16, 256, 256), "float32", where="random", method="cubic")
CASES += cases("typical", (50_000, 4, 64, 64, 64), "float32", where="random", method="cubic")
CASES += cases("typical", (100_000, 4, 64, 64, 64), "float32", where="random", padding="wrap")
CASES += cases("odd", (50_009, 7, 97, 89), "bfloat16", where="random", method="cubic")
# fmt: on
for points in (2**n for n in range(8, 23, 2)):
    CASES += cases("scaling", (points, 8, 16, 16, 16), "float32", where="random")

DIRECTIONS = (
    Direction("forward", True, ()),
    Direction("volume_grad", False, (0,)),
    Direction("point_grad", False, (1,)),
    Direction("backward", False, (0, 1)),
    Direction("value_and_grad", True, (0, 1)),
)


def arguments(case, key):
    count, channels, *sizes = case.shape
    of_volume, of_points = jax.random.split(key)
    axes = len(sizes)
    volume = normal(of_volume, (*sizes, channels), case.dtype)
    # Half-precision coordinates would not tell neighbouring entries apart.
    wide = jnp.promote_types(case.dtype, jnp.float32)
    if case.options["where"] == "rays":
        t = (jnp.arange(count) % SAMPLES + 0.5) / SAMPLES * 2 - 1
        rays = jax.random.uniform(of_points, (-(-count // SAMPLES), axes - 1), wide, -0.95, 0.95)
        across = jnp.repeat(rays, SAMPLES, axis=0)[:count]
        points = jnp.concatenate([t[:, None].astype(wide), across + 0.05 * t[:, None]], -1)
    else:
        reach = 1.25 if "padding" in case.options else 1
        points = jax.random.uniform(of_points, (count, axes), wide, -reach, reach)
    return volume, off_the_grid(points, sizes)


def off_the_grid(points, sizes):
    """Points are clear of the entries: gradients jump there, and rounding decides on which side."""
    scale = (jnp.array(sizes, points.dtype) - 1) / 2
    x = (points + 1) * scale
    cell = jnp.floor(x)
    return (cell + jnp.clip(x - cell, 0.01, 0.99)) / scale - 1


def padding_of(case):
    return case.options.get("padding", "zeros")


def ours(case):
    options = {
        "method": case.options.get("method", "linear"),
        "padding_mode": padding_of(case),
        "deterministic": case.options.get("sums") == "deterministic",
    }
    return lambda volume, points: jaxops.grid_sample(volume, points, **options)


def positions(case, points):
    """The coordinates of points, in entries."""
    last = jnp.array(case.shape[2:], points.dtype) - 1
    x = (points + 1) * last / 2
    if padding_of(case) == "border":
        return jnp.clip(x, 0, last)
    if padding_of(case) == "reflection":
        x = jnp.abs(x) % (2 * last)
        return jnp.minimum(x, 2 * last - x)
    return x


def has_stencils(case):
    """Whether jax.numpy makes the stencils of the points."""
    return "method" in case.options or padding_of(case) == "wrap"


def by_gathers(case):
    """The rows of all corners, gathered and weighted, which XLA fuses; its gradient scatters."""
    if has_stencils(case):
        options = {"method": case.options.get("method", "linear"), "padding_mode": padding_of(case)}
        return lambda volume, points: reference.grid_sample(volume, points, **options)
    sizes = case.shape[2:]
    axes = len(sizes)

    def function(volume, points):
        wide = jnp.promote_types(volume.dtype, jnp.float32)
        rows = volume.reshape(-1, volume.shape[-1])
        x = positions(case, points.astype(wide))
        lower = jnp.floor(x)
        fraction = x - lower
        index = lower.astype(jnp.int32)
        total = 0
        for corner in itertools.product((0, 1), repeat=axes):
            entry, weight, valid = 0, 1, True
            for a, (c, n) in enumerate(zip(corner, sizes, strict=True)):
                at = index[:, a] + c
                valid = valid & (at >= 0) & (at < n)
                entry = entry * n + jnp.clip(at, 0, n - 1)
                weight = weight * (fraction[:, a] if c else 1 - fraction[:, a])
            weight = jnp.where(valid, weight, 0)[:, None]
            total = total + weight * rows[entry].astype(wide)
        return total.astype(volume.dtype)

    return function


def by_map_coordinates(case):
    """JAX's interpolation of one channel, applied to each channel."""
    mode = {
        "zeros": "constant",
        "border": "nearest",
        "reflection": "mirror",
        "wrap": "wrap",
    }[padding_of(case)]
    last = np.array(case.shape[2:]) - 1

    def function(volume, points):
        x = list((points.T + 1) * (last[:, None] / 2).astype(points.dtype))

        def one(channel):
            return jax.scipy.ndimage.map_coordinates(channel, x, order=1, mode=mode)

        return jax.vmap(one, -1, -1)(volume)

    return function


def by_torch(case):
    import torch

    sizes = case.shape[2:]

    def function(volume, points):
        # PyTorch's images have channels first, and coordinates in the order of the axes from the
        # last.
        image = volume.movedim(-1, 0)[None]
        grid = points.flip(-1).reshape(1, -1, *[1] * (len(sizes) - 1), len(sizes))
        found = torch.nn.functional.grid_sample(
            image,
            grid.to(volume.dtype),
            mode="bicubic" if "method" in case.options else "bilinear",
            padding_mode=padding_of(case),
            align_corners=True,
        )
        return found.reshape(volume.shape[-1], -1).T

    return function


def no_cubic(case, direction, platform):
    return "has no cubic interpolation" if "method" in case.options else None


def not_in_torch(case, direction, platform):
    if padding_of(case) == "wrap" or ("method" in case.options and len(case.shape) == 5):
        return "has neither wrap nor cubic interpolation of volumes"
    return not_in_half(case, direction, platform)


def not_in_half(case, direction, platform):
    if jnp.dtype(case.dtype).itemsize < 4:
        return "takes points of the volume's dtype only, too coarse to compare"
    return None


def cost(case: Case, direction: Direction) -> Cost:
    count, channels, *sizes = case.shape
    itemsize = jnp.dtype(case.dtype).itemsize
    volume = math.prod(sizes) * channels * itemsize
    rows = count * channels * itemsize  # values or cotangents
    points = count * len(sizes) * max(4, itemsize)
    by_volume, by_points = 0 in direction.wrt, 1 in direction.wrt
    reads_volume = direction.value or by_points
    entries = (4 if "method" in case.options else 2) ** len(sizes)
    products = entries * (direction.value + len(direction.wrt))
    return Cost(
        bytes=volume * (reads_volume + by_volume)
        + rows * (direction.value + bool(direction.wrt))
        + points * (1 + by_points),
        flops=2 * products * count * channels,
        unit="fma float64" if case.dtype == "float64" else "fma float32",
    )


def terms(case: Case, direction: Direction) -> int:
    count, channels, *sizes = case.shape
    # Positions are rounded relative to the extent of the volume. A sum of an entry has one term for
    # each point around it.
    position = max(sizes) ** 2
    crowd = -(-count << len(sizes)) // math.prod(sizes)
    return position * (channels if 1 in direction.wrt else 1) + crowd


BENCHMARK = Benchmark(
    operator="grid_sample",
    shape="P,C,sizes",
    cases=CASES,
    directions=DIRECTIONS,
    arguments=arguments,
    function=ours,
    reference=by_gathers,
    peers=(
        Peer("XLA gathers", by_gathers),
        Peer("XLA map_coordinates", by_map_coordinates, declines=no_cubic),
        Peer("torch grid_sample", by_torch, torch=True, declines=not_in_torch),
    ),
    cost=cost,
    terms=terms,
    # The limit counts the volume once, and random reads of its corners cannot reach that.
    near_limit=False,
)
