"""Trilinear interpolation in cells: every width, mixed dtypes, every order of derivative.

The oracle is `jaxops.reference` in float64, whose corners and signs a test below states again.
"""

from __future__ import annotations

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.reference import trilinear as reference
from jaxops.testing.measure import (
    assert_close,
    compile_without_loops,
    custom_calls,
    hasty_options,
    on_reference,
    run,
    vjp_of,
)

DTYPES = ("float16", "bfloat16", "float32", "float64")
INTERPOLATE, FEATURE_GRAD, POINT_GRAD, BACKWARD = (
    f"jaxops_trilinear_{name}" for name in ("interpolate", "feature_grad", "point_grad", "backward")
)


def random_case(cells=5, width=4, dtype="float32", point_dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((cells, 8, width)).astype(jnp.dtype(dtype))
    points = rng.uniform(-1.5, 1.5, (cells, 3)).astype(jnp.dtype(point_dtype or dtype))
    return features, points


@pytest.mark.parametrize("dtype", DTYPES)
def test_corners_are_where_they_are_said_to_be(dtype, platform):
    features = np.arange(8.0).astype(jnp.dtype(dtype)).reshape(8, 1) ** 2
    corners = np.array(list(itertools.product((-1, 1), repeat=3)), jnp.dtype(dtype))
    (got,) = run(jax.vmap(jaxops.trilinear_interpolate, (None, 0)), platform, features, corners)
    np.testing.assert_array_equal(got, features)


def test_a_linear_function_is_reproduced_inside_and_outside(platform):
    corners = np.array(list(itertools.product((-1.0, 1.0), repeat=3)))
    slopes = np.array([[1.0, -2.0], [3.0, 0.5], [-4.0, 2.0]])
    points = np.random.default_rng(0).uniform(-3, 3, (50, 3))
    features = np.broadcast_to(corners @ slopes, (50, 8, 2))
    (got,) = run(jaxops.trilinear_interpolate, platform, features, points)
    np.testing.assert_allclose(got, points @ slopes, rtol=1e-14, atol=1e-13)


# Widths around a 16-byte vector, a sector, a warp, and the capacity of a tile in shared memory.
WIDTHS = (*range(1, 25), 31, 32, 33, 63, 66, 100, 129, 256, 1000, 1001, 3075, 4096)
SUBSETS = ((0,), (1,), (0, 1))


def check_everything(platform, dtype, cases, cotangents, repeats=None, batched=lambda vjp: vjp):
    """Checks values and all gradients of cases whose cells are repeated `repeats` times.

    `batched` turns the vjp of one case into the vjp of several.
    """
    repeats = repeats or [1] * len(cases)

    def everything(function, subsets):
        def compute(cases, cotangents):
            return [
                batched(vjp_of(function, wrt))((g,), f, p)
                for wrt in subsets
                for (f, p), g in zip(cases, cotangents, strict=True)
            ]

        return compute

    def repeated(x, n):
        return np.tile(x, (n, *[1] * (x.ndim - 1)))

    got = run(
        everything(jaxops.trilinear_interpolate, SUBSETS),
        platform,
        [[repeated(x, n) for x in case] for case, n in zip(cases, repeats, strict=True)],
        [repeated(g, n) for g, n in zip(cotangents, repeats, strict=True)],
        options=hasty_options(platform),
    )
    # The reference computes every gradient once: it does not depend on the other results.
    oracle = everything(reference.trilinear_interpolate, [(0, 1)])
    exact = iter(on_reference(oracle, cases, cotangents))
    of_case = [list(itertools.islice(exact, 3)) for _ in cases]
    found = iter(got)
    for wrt in SUBSETS:
        for (features, _), wants, n in zip(cases, of_case, repeats, strict=True):
            width = features.shape[-1]
            for i in (0, *(1 + argument for argument in wrt)):
                what = f"gradient {i - 1}" if i else "value"
                name = f"{dtype}, width {width}, {what} of the vjp by {wrt}"
                want = repeated(wants[i], n)
                assert_close([next(found)], [want], name, dtype=dtype, terms=16 + 8 * width)
    assert next(found, None) is None


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(dtype, platform):
    cases = [random_case(7 if width > 500 else 67, width, dtype, seed=width) for width in WIDTHS]
    check_everything(platform, dtype, cases, [f[:, 3] for f, _ in cases])


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_of_nested_cells(dtype, platform):
    """Several sets of features share points: such calls have separate kernels."""
    cases, cotangents = [], []
    for width in WIDTHS:
        features, points = random_case(6 if width > 500 else 66, width, dtype, seed=width)
        features = features.reshape(3, -1, 8, width)
        cases.append((features, points[: features.shape[1]]))
        cotangents.append(features[0, :, 3])
    check_everything(
        platform, dtype, cases, cotangents, batched=lambda vjp: jax.vmap(vjp, (None, 0, None))
    )


# Each kind of kernel of large calls has one of these widths.
MANY_WIDTHS = (1, 2, 3, 4, 5, 7, 8, 10, 12, 13, 16, 17, 18, 20, 24, 33, 36, 64, 66, 129, 257)
# Kernels of small calls take fewer bytes.
MANY_BYTES = 9 * 2**20


def many_cells(width):
    return 9000 if width < 200 else 4200


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_cells(dtype, platform):
    """A prime number of cells is repeated, so that these cells determine all results."""
    cases = [random_case(67, width, dtype, seed=width) for width in MANY_WIDTHS]
    repeats = [max(MANY_BYTES // f.nbytes, many_cells(f.shape[-1]) // len(f)) + 1 for f, _ in cases]
    check_everything(platform, dtype, cases, [f[:, 3] for f, _ in cases], repeats)


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(
    cells=st.integers(0, 300),
    width=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    point_dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_any_shape_and_dtypes(platform, cells, width, dtype, point_dtype, seed):
    features, points = random_case(cells, width, dtype, point_dtype, seed)
    function = vjp_of(jaxops.trilinear_interpolate, (0, 1))
    oracle = vjp_of(reference.trilinear_interpolate, (0, 1))
    cotangent = (features[:, 0],)
    got = run(function, platform, cotangent, features, points)
    assert [g.dtype for g in got] == [features.dtype, features.dtype, points.dtype]
    want = on_reference(oracle, cotangent, features, points)
    coarser = max((dtype, point_dtype), key=lambda d: float(jnp.finfo(d).eps))
    for g, w, of in zip(got, want, (dtype, dtype, coarser), strict=True):
        assert_close([g], [w], "mixed dtypes", dtype=of, terms=16 + 8 * width)


def derivative(function, directions):
    """The derivative of a function of points along several directions, one after the other."""
    for direction in directions:
        function = functools.partial(lambda f, t, p: jax.jvp(f, (p,), (t,))[1], function, direction)
    return function


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_derivatives_of_every_order(order, platform):
    """Forward derivatives of the value and of both gradients; beyond the last they are zero."""
    features, points = random_case(6, 5, "float64")
    rng = np.random.default_rng(1)
    directions = [rng.standard_normal(points.shape) for _ in range(order)]
    g = features[:, 2]

    def along(function):
        def compute(g, features, points, directions):
            def whole(points):
                return vjp_of(function, (0, 1))((g,), features, points)

            value_and_gradients = derivative(whole, directions)(points)

            # Computes reverse derivatives of the forward derivatives.
            def move(features, points, last):
                moved = functools.partial(function, features)
                return derivative(moved, [*directions[:-1], last])(points)

            pulled = jax.vjp(move, features, points, directions[-1])[1](g)
            return value_and_gradients, pulled

        return compute

    operands = (g, features, points, directions)
    got = run(along(jaxops.trilinear_interpolate), platform, *operands)
    want = on_reference(along(reference.trilinear_interpolate), *operands)
    assert_close(got, want, f"order {order}", dtype="float64", terms=400)
    if order == 4:
        assert not got[0].any()


def test_third_derivative_in_reverse_alone(platform):
    features, points = random_case(4, 3, "float64")

    def third(function):
        def loss(points, features):
            return (function(features, points) ** 3).sum()

        def sum_of_gradients(function):
            return lambda *args: sum((g**2).sum() for g in jax.grad(function, (0, 1))(*args))

        return jax.grad(sum_of_gradients(sum_of_gradients(loss)), (0, 1))

    got = run(third(jaxops.trilinear_interpolate), platform, points, features)
    want = on_reference(third(reference.trilinear_interpolate), points, features)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10)


@pytest.mark.parametrize(
    ("wrt", "calls"),
    [
        ((0,), {FEATURE_GRAD: 1}),
        ((1,), {POINT_GRAD: 1}),
        ((0, 1), {BACKWARD: 1}),
    ],
)
def test_a_gradient_runs_one_kernel(wrt, calls, platform):
    arguments = jax.device_put(random_case(), platform.device)

    def gradients(g, *arguments):
        return vjp_of(jaxops.trilinear_interpolate, wrt)((g,), *arguments)[1]

    program = compile_without_loops(gradients, arguments[0][:, 0], *arguments)
    assert custom_calls(program) == calls


@pytest.mark.parametrize(("used", "call"), [(0, FEATURE_GRAD), (1, POINT_GRAD)])
def test_an_unused_gradient_is_not_made(used, call, platform):
    arguments = jax.device_put(random_case(), platform.device)

    def one(g, *arguments):
        return vjp_of(jaxops.trilinear_interpolate, (0, 1))((g,), *arguments)[1][used]

    program = compile_without_loops(one, arguments[0][:, 0], *arguments)
    assert custom_calls(program) == {call: 1}


def test_the_gradient_by_features_keeps_no_features():
    features, points = random_case()
    _, pull = jax.vjp(lambda f: jaxops.trilinear_interpolate(f, points), features)
    kept = [x.shape for x in jax.tree.leaves(pull) if hasattr(x, "shape")]
    assert features.shape not in kept


def test_cells_share_what_vmap_does_not_batch(platform):
    """A feature gradient of shared features is the sum over the batch."""
    features, points = random_case(4, 6, "float64")
    many = np.stack([points, points / 2, -points])

    def total(function):
        def loss(features, points):
            return (jax.vmap(function, (None, 0))(features, points) ** 2).sum()

        return jax.grad(loss, (0, 1))

    got = run(total(jaxops.trilinear_interpolate), platform, features, many)
    want = on_reference(total(reference.trilinear_interpolate), features, many)
    assert_close(got, want, "shared features", dtype="float64", terms=200)


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 13, 17, 33])
def test_many_points_of_one_cell(width, dtype, platform):
    features, _ = random_case(1, width, dtype)
    _, many = random_case(20_000, 1, dtype, seed=1)
    features, g = features[0], np.broadcast_to(features[0, 3], (len(many), width))

    def gradients(function):
        pull = vjp_of(function, (1,))
        return lambda g, f, points: jax.vmap(pull, (0, None, 0))((g,), f, points)

    got = run(gradients(jaxops.trilinear_interpolate), platform, g, features, many)
    want = on_reference(gradients(reference.trilinear_interpolate), g, features, many)
    assert_close(got, want, f"F={width}", dtype=dtype, terms=8 * width)


def test_nan_and_inf_stay_in_their_cell(platform):
    features, points = random_case(4, 3)
    features[1, 2, 0] = np.nan
    points[2, 1] = np.inf
    value, (of_features, of_points) = jax.jit(vjp_of(jaxops.trilinear_interpolate, (0, 1)))(
        (np.ones((4, 3), np.float32),), *jax.device_put((features, points), platform.device)
    )
    value = value[0]
    assert np.isnan(value[1, 0])
    assert np.isfinite(value[1, 1:]).all()
    for array in (value, of_features, of_points):
        assert np.isfinite(np.asarray(array)[[0, 3]]).all()
    assert np.isfinite(of_features[1]).all()
    assert np.isnan(of_points[1]).all()
