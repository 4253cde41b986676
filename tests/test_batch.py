"""Nested vmaps that batch other operands at each level, with more levels than kernels support."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.testing.measure import hasty_options, run

LABELS = jnp.array([1, 0])


def sigmoid_sum(logits, weight, gamma):
    options = {"sample_weight": weight, "gamma": gamma, "reduction": "sum"}
    return jaxops.sigmoid_focal_loss(logits, LABELS, **options)


def softmax_sum(logits, weight, gamma):
    options = {"sample_weight": weight, "gamma": gamma, "reduction": "sum"}
    return jaxops.softmax_focal_loss(logits, LABELS, **options)


# Each function is listed with the shapes of its arguments.
FUNCTIONS = {
    "lightweight_conv": (
        lambda x, w, b: jaxops.lightweight_conv(x, w, bias=b),
        [(1, 3, 2), (1, 2), (2,)],
    ),
    "trilinear_interpolate": (jaxops.trilinear_interpolate, [(2, 8, 1), (2, 3)]),
    "grid_sample": (jaxops.grid_sample, [(2, 3, 1), (2, 2)]),
    "sigmoid_focal_loss": (sigmoid_sum, [(2, 3), (2,), ()]),
    "softmax_focal_loss": (softmax_sum, [(2, 3), (2,), ()]),
    "concatenate": (lambda *xs: jaxops.concatenate(xs), [(1,), (2,), (1,), (3,)]),
}


@pytest.mark.parametrize("is_inside", [True, False], ids=["gradients of each", "of all"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nine_levels_of_vmap(platform, name, is_inside):
    function, shapes = FUNCTIONS[name]
    count = len(shapes)
    some = [v for v in itertools.product((True, False), repeat=count) if any(v)]
    varies = [some[level * (len(some) - 1) // 2 % len(some)] for level in range(9)]
    assert all(a != b for a, b in itertools.pairwise(varies))

    def with_gradients(*arguments):
        argnums = tuple(range(count))
        return jax.value_and_grad(lambda *xs: jnp.sin(function(*xs)).sum(), argnums)(*arguments)

    def nested(*arguments):
        mapped = with_gradients if is_inside else function
        for level in reversed(varies):
            mapped = jax.vmap(mapped, [0 if v else None for v in level])
        if is_inside:
            return mapped(*arguments)
        return jax.value_and_grad(lambda *xs: jnp.sin(mapped(*xs)).sum(), range(count))(*arguments)

    def flat(*arguments):
        batch = (2,) * len(varies)

        def mapped(*arguments):
            expanded = []
            for i, (x, shape) in enumerate(zip(arguments, shapes, strict=True)):
                x = x.reshape([2 if v[i] else 1 for v in varies] + list(shape))
                expanded.append(jnp.broadcast_to(x, (*batch, *shape)).reshape(-1, *shape))
            return jax.vmap(with_gradients if is_inside else function)(*expanded)

        if is_inside:
            value, gradients = mapped(*arguments)
            return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), (value, gradients))
        return jax.value_and_grad(lambda *xs: jnp.sin(mapped(*xs)).sum(), range(count))(*arguments)

    rng = np.random.default_rng(0)
    arguments = [
        rng.uniform(0.1, 0.9, (2,) * sum(v[i] for v in varies) + shape)
        for i, shape in enumerate(shapes)
    ]
    options = hasty_options(platform)
    results = [run(f, platform, *arguments, options=options) for f in (nested, flat)]
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)
