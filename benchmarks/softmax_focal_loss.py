"""softmax_focal_loss, a mean over rows, against XLA and PyTorch. Shapes are (rows, classes).

With the option `entries`, vmap takes the mean of each of `entries` equal groups of rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, normal
from jaxops._bench.training import training_directions, with_unit_gradient

# fmt: off
CASES = [
    *cases("small", (900, 91), "float32"),
    *cases("typical", (191_772, 80), ["float32", "bfloat16"]),
    *cases("typical", (65_536, 1_000), ["float32", "bfloat16"]),
    *cases("large", (1_534_176, 80), ["float32", "bfloat16"]),
    *cases("large", (8_192, 32_000), ["float32", "bfloat16"]),
    *cases("odd", (1_000_003, 7), "float32"),
    *cases("odd", (50_001, 1_203), "float32"),
    *cases("odd", (300_000, 10), "float32", entries=300_000),
    *cases("odd", (1_200_000, 10), "float32", entries=300_000),
]
# fmt: on
for rows in (2**n for n in range(6, 21, 2)):
    CASES += cases("scaling", (rows, 80), "float32")


def arguments(case, key):
    rows, classes = case.shape
    of_logits, of_labels = jax.random.split(key)
    labels = jax.random.randint(of_labels, (rows,), 0, classes)
    return normal(of_logits, (rows, classes), case.dtype), labels


def by_entries(case, mean):
    """The mean of every row, or the sum over entries of the means of their rows."""
    entries = case.options.get("entries")
    if entries is None:
        return mean

    def function(logits, labels):
        shape = (entries, len(labels) // entries)
        means = jax.vmap(mean)(logits.reshape(*shape, -1), labels.reshape(shape))
        return jnp.sum(means)

    return function


def ours(case):
    def mean(logits, labels):
        return jaxops.softmax_focal_loss(logits, labels, reduction="mean")

    return by_entries(case, mean)


def by_log_softmax(case):
    def function(logits, labels):
        z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        log_p = jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], axis=1)
        return jnp.mean(-0.25 * jnp.square(1 - jnp.exp(log_p)) * log_p)

    return by_entries(case, function)


def torch_loss(case):
    import torch

    def function(logits, labels):
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        entropy = torch.nn.functional.cross_entropy(z, labels.long(), reduction="none")
        # The sum of the means of entries that are equally long.
        total = (0.25 * (1 - torch.exp(-entropy)) ** 2 * entropy).mean()
        return total * case.options.get("entries", 1)

    return with_unit_gradient(torch.compile(function, dynamic=False, fullgraph=True))


def cost(case: Case, direction: Direction) -> Cost:
    rows, classes = case.shape
    passes = 1 if direction.name == "forward" else 2
    return Cost(
        bytes=passes * rows * classes * jnp.dtype(case.dtype).itemsize + 4 * rows,
        special=rows * classes,
    )


def terms(case: Case, direction: Direction) -> int:
    rows, classes = case.shape
    return classes if direction.wrt else rows * classes


BENCHMARK = Benchmark(
    operator="softmax_focal_loss",
    shape="rows,classes",
    cases=CASES,
    directions=training_directions(0),
    arguments=arguments,
    function=ours,
    reference=by_log_softmax,
    peers=(
        Peer("XLA", by_log_softmax),
        Peer("torch.compile", torch_loss, torch=True, costly=True),
    ),
    cost=cost,
    terms=terms,
)
