"""The scaled product by hand: its transforms are checked by its specification."""

from __future__ import annotations

import jax
import numpy as np

import jaxops
from jaxops.testing.measure import run


def test_a_square_and_its_derivatives(platform):
    x = np.array([[1.0, -2.0, 3.0], [0.5, 0.0, 4.0]])

    def square(x):
        return jaxops.scaled_product(x, x, scale=2.5)

    def derivative(x):
        return jax.grad(lambda x: square(x).sum())(x)

    for function, expected in (
        (jax.vmap(square), 2.5 * x * x),
        (jax.jit(jax.vmap(derivative)), 5 * x),
        (lambda x: jax.jvp(derivative, (x,), (x,))[1], 5 * x),
    ):
        np.testing.assert_allclose(run(function, platform, x)[0], expected, rtol=1e-15)
