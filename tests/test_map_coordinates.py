"""map_coordinates against JAX and SciPy, whose names and values it has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxops
from jaxops.testing.measure import run

# SciPy's names of the modes, of which JAX has two in another sense.
MODES = {
    "constant": "grid-constant",
    "nearest": "nearest",
    "wrap": "grid-wrap",
    "mirror": "mirror",
    "reflect": "reflect",
}
SIZES = ((7,), (17, 9), (5, 8, 6))


def random_case(sizes, dtype="float64", points=(40, 2)):
    """An array, and coordinates far beyond it, the first of which are whole and half positions."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(sizes).astype(dtype)
    coordinates = [rng.uniform(-1.7 * n - 3, 2.7 * n + 3, points) for n in sizes]
    for c in coordinates:
        c[:10] = np.round(c[:10])
        c[5:10] += 0.5
    return x, [c.astype(dtype) for c in coordinates]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_those_of_jax(mode, dtype, platform):
    def both(cases):
        return [
            function(x, coordinates, order, mode, 0.75)
            for x, coordinates in cases
            for order in (0, 1)
            for function in (jaxops.map_coordinates, jax.scipy.ndimage.map_coordinates)
        ]

    found = run(both, platform, [random_case(sizes, dtype) for sizes in SIZES])
    for got, want in zip(found[::2], found[1::2], strict=True):
        assert got.dtype == want.dtype
        tolerance = 64 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_values_are_those_of_scipy(mode, platform):
    """SciPy starts the filter of "reflect" with an error, which is below 1e-7 from 7 entries on."""
    ndimage = pytest.importorskip("scipy.ndimage")
    cases = [random_case(sizes) for sizes in (*SIZES, (20, 16), (1, 20))]

    def ours(cases):
        return [
            jaxops.map_coordinates(*case, order, mode, 0.75) for case in cases for order in (1, 3)
        ]

    found = iter(run(ours, platform, cases))
    for x, coordinates in cases:
        for order in (1, 3):
            want = ndimage.map_coordinates(x, coordinates, order=order, mode=MODES[mode], cval=0.75)
            is_short = mode == "reflect" and order == 3 and min(n for n in x.shape if n > 1) < 16
            tolerance = 1e-5 if is_short else 1e-12
            np.testing.assert_allclose(next(found), want, rtol=tolerance, atol=tolerance)


def test_a_spline_goes_through_its_entries_in_every_dtype(platform):
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        x = np.random.default_rng(1).standard_normal((6, 3)).astype(jnp.dtype(dtype))
        at = np.stack(np.meshgrid(np.arange(6.0), np.arange(3.0), indexing="ij"))

        def every_mode(x, at):
            return [jaxops.map_coordinates(x, at, 3, mode) for mode in MODES]

        for got in run(every_mode, platform, x, at.astype(x.dtype)):
            assert got.dtype == x.dtype
            tolerance = 32 * float(jnp.finfo(dtype).eps)
            got, want = (a.astype(np.float64) for a in (got, x))
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("order", "sizes"), [(1, (4, 3)), (3, (5,))])
def test_derivatives(order, sizes, platform):
    """In the array, the coordinates and the constant, away from whole positions."""
    x, _ = random_case(sizes)
    rng = np.random.default_rng(2)
    at = [rng.integers(-1, n, 6) + rng.uniform(0.2, 0.8, 6) for n in x.shape]

    @jax.jit
    def function(x, cval, *at):
        return jnp.sin(jaxops.map_coordinates(x, at, order, "constant", cval))

    with jax.default_device(platform.device):
        check_grads(function, (x, 0.5, *at), 2, eps=1e-4, rtol=1e-4, atol=1e-4)


def test_shapes_and_nan(platform):
    x = np.arange(12.0).reshape(3, 4)

    def ours(x):
        shapes = [
            jaxops.map_coordinates(x, [0.5, 1.5], 1),
            jaxops.map_coordinates(x, [np.zeros((2, 1)), np.ones(3)], 1),
            jaxops.map_coordinates(x, np.ones((2, 5)), 3, "mirror"),
        ]
        lost = [
            jaxops.map_coordinates(x, [np.array([np.nan, 1]), np.ones(2)], order, "nearest")
            for order in (0, 1, 3)
        ]
        return *shapes, *lost

    scalar, grid, array, *lost = run(ours, platform, x)
    np.testing.assert_allclose(scalar, 3.5)
    np.testing.assert_allclose(grid, np.ones((2, 3)))
    np.testing.assert_allclose(array, np.full(5, 5.0))
    for order, found in zip((0, 1, 3), lost, strict=True):
        np.testing.assert_allclose(found, [np.nan if order else 0, 5])


@pytest.mark.parametrize("sizes", [(3,), (4, 3), (900, 3)], ids=str)
def test_a_wrapped_array_has_the_derivatives_of_the_definition(sizes, platform):
    """Whether it is copied, with its first entries after its last, or is too large for that."""
    x, coordinates = random_case(sizes, "float32", (60,))
    coordinates[0][20:22] = np.inf, np.nan
    coordinates[-1][22:24] = -np.inf, np.nan

    def value_and_gradients(implementation):
        def function(x, *coordinates):
            return jaxops.map_coordinates(x, coordinates, 1, "wrap", implementation=implementation)

        y, pull = jax.vjp(function, x, *coordinates)
        return y, *pull(jnp.cos(jnp.arange(60, dtype=jnp.float32)))

    got = run(lambda: value_and_gradients(None), platform)
    want = run(lambda: value_and_gradients("xla"), platform)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [0, 1])
def test_gradients_of_two_bytes_are_rounded_once(order, platform):
    """Of an entry that many points read, from both ends of an array that repeats."""
    places = jnp.tile(jnp.array([0.0, 5.0]), 600)
    x = jnp.zeros(5, jnp.bfloat16)

    def total(x):
        return jaxops.map_coordinates(x, [places], order, "wrap").astype(jnp.float32).sum()

    (gradient,) = run(jax.grad(total), platform, x)
    np.testing.assert_array_equal(gradient.astype(np.float32), [1200, 0, 0, 0, 0])


def test_a_nan_has_no_nearest_entry(platform):
    at = [jnp.array([jnp.nan, 7.0, 1.0])]
    x = np.arange(3, dtype=np.float32)
    (got,) = run(lambda x: jaxops.map_coordinates(x, at, 0, "constant", 5.0), platform, x)
    np.testing.assert_array_equal(got, [0, 5, 1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_gradients_of_many_points_are_whole(dtype, platform):
    """Also where parts of the points have sums of their own, which are exact here."""
    entries = np.random.default_rng(0).integers(0, 49, 60_000)
    places = [jnp.asarray(entries + 0.25, jnp.float32)]

    def total(x):
        return jaxops.map_coordinates(x, places, 1, "nearest").astype(jnp.float32).sum()

    (gradient,) = run(jax.grad(total), platform, jnp.zeros(50, dtype))
    counts = np.bincount(entries, minlength=50)
    want = 0.75 * counts + 0.25 * np.roll(counts, 1)
    np.testing.assert_array_equal(gradient, want.astype(gradient.dtype))
