"""sigmoid_focal_loss, a mean over rows, against XLA and PyTorch. Shapes are (rows, classes)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, normal
from jaxops._bench.training import training_directions, with_unit_gradient


def focal(group, shape, dtypes, *, gamma=2.0, target=False, **options):
    return cases(group, shape, dtypes, gamma=gamma, target=target, **options)


# fmt: off
CASES = [
    # DETR has 900 queries, SSD these anchors; both have COCO's classes.
    *focal("small", (900, 91), "float32"),
    *focal("small", (14_400, 91), "float32", target=True),
    *focal("small", (8_732, 80), ["bfloat16", "float16"]),
    # RetinaNet has these anchors in one image, and in a batch of 8.
    *focal("typical", (191_772, 80), ["float32", "bfloat16", "float16"]),
    *focal("typical", (191_772, 80), "float32", gamma=[0.0, 0.5, 1.0, 5.0]),
    *focal("large", (1_534_176, 80), "float32", target=True),
    *focal("large", (1_534_176, 80), ["bfloat16", "float16"]),
    *focal("large", (1_534_176, 91), ["float32", "bfloat16"]),
    *focal("large", (60_000_000, 1), ["float32", "bfloat16"]),
    *focal("odd", (1_000_003, 7), "float32"),
    *focal("odd", (100_003, 365), ["float32", "bfloat16"]),
    *focal("odd", (50_001, 1_203), "float32"),
    *focal("odd", (191_772, 80), "float64"),
    *focal("odd", (191_772, 80), "float32", gamma=[1.5, 2.0], labels="soft"),
    *focal("odd", (191_772, 80), "float64", gamma=1.5, labels="soft"),
    *focal("odd", (191_772, 80), "float32", labels="bool"),
]
# fmt: on
for rows in (2**n for n in range(6, 21, 2)):
    CASES += focal("scaling", (rows, 80), "float32")


def arguments(case, key):
    rows, classes = case.shape
    of_logits, of_labels = jax.random.split(key)
    logits = normal(of_logits, (rows, classes), case.dtype)
    if case.options.get("labels") == "soft":
        return logits, jax.random.uniform(of_labels, logits.shape).astype(logits.dtype)
    if case.options.get("labels") == "bool":
        return logits, jax.random.bernoulli(of_labels, 0.01, logits.shape)
    # Most rows are background, as in detection.
    labels = jax.random.randint(of_labels, (rows,), -9 * classes, classes)
    return logits, jnp.maximum(labels, -1)


def normalizer(case: Case) -> float:
    """The number of rows; float16 is trained with scaled losses, because gradients are small."""
    return case.shape[0] / (2**16 if case.dtype == "float16" else 1)


def ours(case):
    options = {"normalizer": normalizer(case)} if case.dtype == "float16" else {"reduction": "mean"}
    return functools.partial(jaxops.sigmoid_focal_loss, gamma=case.options["gamma"], **options)


def by_targets(case):
    gamma = case.options["gamma"]

    def function(logits, labels):
        z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        y = labels.astype(z.dtype)
        p = jax.nn.sigmoid(z)
        wrong = y * (1 - p) + (1 - y) * p
        entropy = y * jax.nn.softplus(-z) + (1 - y) * jax.nn.softplus(z)
        return jnp.sum((0.25 * y + 0.75 * (1 - y)) * wrong**gamma * entropy) / normalizer(case)

    return function


def by_iota(case):
    """Labels are compared with an iota, so that XLA makes no one-hot array."""
    if "labels" in case.options:
        return by_targets(case)
    gamma = case.options["gamma"]

    def function(logits, labels):
        z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        target = labels[:, None] == jnp.arange(z.shape[1])
        x = jnp.where(target, -z, z)
        factor = jnp.where(target, 0.25, 0.75)
        power = jnp.exp(-gamma * jax.nn.softplus(-x))
        return jnp.sum(factor * power * jax.nn.softplus(x)) / normalizer(case)

    return function


def by_optax(case):
    import optax

    def function(logits, labels):
        z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        has_targets = labels.ndim == 2
        one_hot = labels if has_targets else jax.nn.one_hot(labels, z.shape[1], dtype=z.dtype)
        one_hot = one_hot.astype(z.dtype)
        loss = optax.losses.sigmoid_focal_loss(z, one_hot, alpha=0.25, gamma=case.options["gamma"])
        return loss.sum() / normalizer(case)

    return function


def torch_loss(case):
    import torch

    gamma = case.options["gamma"]

    def function(logits, labels):
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        has_targets = labels.ndim == 2
        ids = torch.arange(z.shape[1], device=z.device)
        target = (labels if has_targets else labels[:, None] == ids).to(z.dtype)
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(z, target, reduction="none")
        p = torch.sigmoid(z)
        wrong = p * (1 - target) + (1 - p) * target
        factor = 0.25 * target + 0.75 * (1 - target)
        return (factor * wrong**gamma * entropy).sum() / normalizer(case)

    return function


def torch_eager(case):
    return with_unit_gradient(torch_loss(case))


def torch_compiled(case):
    import torch

    return with_unit_gradient(torch.compile(torch_loss(case), dynamic=False, fullgraph=True))


def cost(case: Case, direction: Direction) -> Cost:
    rows, classes = case.shape
    passes = 1 if direction.name == "forward" else 2
    itemsize = jnp.dtype(case.dtype).itemsize
    label_bytes = {"soft": itemsize * classes, "bool": classes}.get(case.options.get("labels"), 4)
    return Cost(
        bytes=passes * rows * classes * itemsize + label_bytes * rows,
        special=2 * rows * classes,
    )


def terms(case: Case, direction: Direction) -> int:
    rows, classes = case.shape
    return 8 if direction.wrt else rows * classes


BENCHMARK = Benchmark(
    operator="sigmoid_focal_loss",
    shape="rows,classes",
    cases=CASES,
    directions=training_directions(0),
    arguments=arguments,
    function=ours,
    reference=by_iota,
    peers=(
        Peer("XLA, iota", by_iota),
        Peer("optax", by_optax),
        Peer("torch", torch_eager, torch=True),
        Peer("torch.compile", torch_compiled, torch=True, costly=True),
    ),
    cost=cost,
    terms=terms,
)
