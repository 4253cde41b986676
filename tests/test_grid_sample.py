"""Sampling of volumes: published and independent values, what special coordinates mean, gradients.

The oracle is `jaxops.reference` in float64, which tests below hold against SciPy, ONNX and PyTorch.
"""

from __future__ import annotations

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import onnx_nodes
import pytest
from jax.test_util import check_grads

import jaxops
from jaxops.reference import grid_sample as reference
from jaxops.reference import taps
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
PADDINGS = ("zeros", "border", "reflection")
METHODS = ("linear", "nearest")
BOTH = (False, True)


def random_case(sizes=(5, 4, 6), width=3, points=40, dtype="float64", seed=0, reach=1.6):
    rng = np.random.default_rng(seed)
    volume = rng.standard_normal((*sizes, width)).astype(jnp.dtype(dtype))
    at = rng.uniform(-reach, reach, (points, len(sizes))).astype(jnp.dtype(dtype))
    return volume, at


def sample_and_gradients(function=jaxops.grid_sample, **options):
    """f(volume, points) -> value, dvolume and dpoints for a cotangent of ones."""

    def compute(volume, points):
        bound = functools.partial(function, **options)
        ones = (jnp.ones((*points.shape[:-1], volume.shape[-1]), volume.dtype),)
        value, gradients = vjp_of(bound, (0, 1))(ones, volume, points)
        return value[0], *gradients

    return compute


# --- values from elsewhere -----------------------------------------------------------------------


@pytest.mark.parametrize("align_corners", BOTH)
@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize("sizes", [(5, 4, 6), (7, 3)], ids=str)
def test_scipy(sizes, padding_mode, align_corners, platform):
    ndimage = pytest.importorskip("scipy.ndimage")
    volume, points = random_case(sizes, reach=1.9)
    mode = {
        "zeros": "grid-constant",
        "border": "nearest",
        "reflection": "mirror" if align_corners else "reflect",
    }[padding_mode]
    n = np.array(sizes)
    at = (points + 1) / 2 * (n - 1) if align_corners else ((points + 1) * n - 1) / 2
    want = np.stack(
        [
            ndimage.map_coordinates(volume[..., f], at.T, order=1, mode=mode)
            for f in range(volume.shape[-1])
        ],
        axis=-1,
    )
    options = {"padding_mode": padding_mode, "align_corners": align_corners}
    (got,) = run(functools.partial(jaxops.grid_sample, **options), platform, volume, points)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def onnx_cases():
    """The published cases of ONNX's GridSample, by name."""
    found = onnx_nodes.cases("GridSample").items()
    cases = [pytest.param(case, id=name) for name, case in found]
    skipped = pytest.param(None, marks=pytest.mark.skip(reason="onnx is not installed"))
    return cases or [skipped]


@pytest.mark.parametrize("published", onnx_cases())
def test_onnx(published, platform):
    options, (image, grid), (want,) = published
    (got,) = run(
        functools.partial(
            jaxops.grid_sample,
            method=options.get("mode", b"linear").decode().replace("bicubic", "cubic"),
            padding_mode=options.get("padding_mode", b"zeros").decode(),
            align_corners=bool(options.get("align_corners", 0)),
        ),
        platform,
        np.moveaxis(image, 1, -1),
        # ONNX orders coordinates from the last axis to the first.
        np.ascontiguousarray(grid[..., ::-1]),
    )
    # Some cases have values of four decimals.
    tolerance = 6e-5 if options.get("mode") == b"cubic" else 1e-6
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), want, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("align_corners", BOTH)
@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [(5, 4, 6), (7, 3)], ids=str)
def test_torch(sizes, method, padding_mode, align_corners, platform):
    torch = pytest.importorskip("torch")
    volume, points = random_case(sizes, reach=1.9)
    image = torch.tensor(np.moveaxis(volume, -1, 0)[None], requires_grad=True)
    grid = torch.tensor(points[:, ::-1].copy(), requires_grad=True)
    shaped = grid.reshape(1, -1, *[1] * (len(sizes) - 1), len(sizes))
    found = torch.nn.functional.grid_sample(
        image,
        shaped,
        mode="bilinear" if method == "linear" else "nearest",
        padding_mode=padding_mode,
        align_corners=align_corners,
    )
    found.sum().backward()
    want = (
        found.detach().numpy().reshape(volume.shape[-1], -1).T,
        np.moveaxis(image.grad.numpy()[0], 0, -1),
        grid.grad.numpy()[:, ::-1],
    )
    options = {"method": method, "padding_mode": padding_mode, "align_corners": align_corners}
    got = run(sample_and_gradients(**options), platform, volume, points)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)


# --- shapes, dtypes and options ------------------------------------------------------------------


@hypothesis.settings(deadline=None, max_examples=8)
@hypothesis.given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=3),
    width=st.integers(0, 40),
    lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    shape=st.sampled_from([(), (0,), (1,), (37,), (5, 3), (2, 1, 4)]),
    dtype=st.sampled_from(DTYPES),
    point_dtype=st.sampled_from(DTYPES),
    method=st.sampled_from([*METHODS, "cubic"]),
    padding_mode=st.sampled_from([*PADDINGS, "wrap", "constant"]),
    frame=st.sampled_from(
        [("align_corners", True), ("align_corners", False), ("coordinates", "pixel")]
    ),
    deterministic=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_anything(
    platform, sizes, width, lead, shape, dtype, point_dtype, frame, deterministic, seed, **options
):
    options.update([frame])
    rng = np.random.default_rng(seed)
    axes = len(sizes)
    volume = rng.standard_normal((*lead, *sizes, width)).astype(jnp.dtype(dtype))
    points = rng.uniform(-1.7, 1.7, (*lead, *shape, axes)).astype(jnp.dtype(point_dtype))
    function = sample_and_gradients(**options, deterministic=deterministic)
    oracle = sample_and_gradients(reference.grid_sample, **options, point_rank=len(shape))
    got = run(function, platform, volume, points, options=hasty_options(platform))
    assert [g.dtype for g in got] == [volume.dtype, volume.dtype, points.dtype]
    want = on_reference(oracle, volume, points)
    coarser = max((dtype, point_dtype), key=lambda d: float(jnp.finfo(d).eps))
    terms = 32 + 16 * max(sizes) * (1 + width) + points.size
    terms *= 4 if options["method"] == "cubic" else 1
    for g, w, of in zip(got, want, (dtype, dtype, coarser), strict=True):
        assert_close([g], [w], f"{options}", dtype=of, terms=terms)


WIDTHS = (1, 2, 3, 4, 7, 8, 12, 16, 31, 32, 64, 130)


@pytest.mark.any_jax
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(dtype, platform):
    """All widths share points: the reference has their channels in one array, compiled once."""
    volume, points = random_case((4, 3), sum(WIDTHS), 300, dtype, reach=1.2)
    ends = np.cumsum(WIDTHS)
    parts = [slice(end - width, end) for end, width in zip(ends, WIDTHS, strict=True)]
    g = np.zeros((len(WIDTHS), 300, sum(WIDTHS)), volume.dtype)
    for i, part in enumerate(parts):
        g[i, :, part] = 1

    def oracle(volume, points, g):
        value, pull = jax.vjp(reference.grid_sample, volume, points)
        return value, *jax.vmap(pull)(g)

    value, of_volume, of_points = on_reference(oracle, volume, points, g)
    want = [(value[:, part], of_volume[i][..., part], of_points[i]) for i, part in enumerate(parts)]

    def ours(volume, points):
        return [
            sample_and_gradients(deterministic=deterministic)(volume[..., part], points)
            for deterministic in BOTH
            for part in parts
        ]

    got = run(ours, platform, volume, points)
    assert_close(got, jax.tree.leaves([want, want]), "widths", dtype=dtype, terms=1024)


@pytest.mark.any_jax
@pytest.mark.parametrize("sizes", [(90, 91, 99), (900, 901)], ids=str)
def test_many_points_of_a_large_volume(sizes, platform):
    """The volume exceeds the caches and has repeated entries, so the points are sorted."""
    volume, points = random_case(sizes, 16, 2_500_000 // 2 ** len(sizes), "float32", reach=1.1)
    g = np.random.default_rng(1).standard_normal((len(points), 16)).astype(np.float32)

    def function(sample):
        def compute(volume, points, g):
            value, pull = jax.vjp(sample, volume, points)
            return value, pull(g)[0]

        return compute

    def with_point_gradients(volume, points, g):
        _, pull = jax.vjp(jaxops.grid_sample, volume, points)
        alone = jax.vjp(functools.partial(jaxops.grid_sample, volume), points)[1](g)[0]
        return *pull(g), alone

    want = on_reference(function(reference.grid_sample), volume, points, g)
    got = run(function(jaxops.grid_sample), platform, volume, points, g)
    assert_close(got, want, "value, volume gradient", dtype="float32", terms=2048)
    of_volume, of_points, alone = run(with_point_gradients, platform, volume, points, g)
    assert_close([of_volume], want[1:], "volume gradient of both", dtype="float32", terms=2048)
    assert_close([of_points], [alone], "point gradient of both", dtype="float32", terms=2048)


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("method", "padding_mode"),
    [*((method, "zeros") for method in METHODS), ("linear", "border")],
)
@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_points_have_the_bits_of_many(dtype, width, method, padding_mode, platform):
    """Kernels differ by the number of threads for the points and their channels."""
    volume, points = random_case((5, 4, 6), width, 270_001 if width == 1 else 140_001, dtype)
    points[3] = np.nan
    _, directions = random_case((5, 4, 6), width, len(points), dtype, seed=1)

    def value_and_tangent(volume, points, directions):
        sample = functools.partial(
            jaxops.grid_sample, volume, method=method, padding_mode=padding_mode
        )
        # A value by itself has other kernels than with its derivative.
        return sample(points + 0), *jax.jvp(sample, (points,), (directions,))

    many = run(value_and_tangent, platform, volume, points, directions)
    few = run(value_and_tangent, platform, volume, points[:1000], directions[:1000])
    for of_few, of_many in zip(few, many, strict=True):
        assert of_few.tobytes() == of_many[:1000].tobytes()


@pytest.mark.any_jax
@pytest.mark.parametrize("width", [3, 33, 64, 97])
@pytest.mark.parametrize("sizes", [(9, 8), (5, 4, 6)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_few_and_of_many_points(dtype, sizes, width, platform):
    """The number of lanes that share a point depends on the numbers of channels and of points."""
    volume, points = random_case(sizes, width, 20_001, dtype)
    points = points.astype(jnp.promote_types(points.dtype, "float32"))
    g = np.random.default_rng(1).standard_normal((len(points), width)).astype(volume.dtype)

    def compute(sample, volume, points, g):
        value, pull = jax.vjp(functools.partial(sample, volume), points)
        return value, *pull(g)

    ours = functools.partial(compute, jaxops.grid_sample)
    several = slice(300)
    want = on_reference(
        functools.partial(compute, reference.grid_sample), volume, points[several], g[several]
    )
    options = hasty_options(platform)
    few = run(ours, platform, volume, points[several], g[several], options=options)
    many = [result[several] for result in run(ours, platform, volume, points, g, options=options)]
    assert few[0].tobytes() == many[0].tobytes()
    for got in few, many:
        assert_close(got[:1], want[:1], "value", dtype=dtype, terms=512)
        assert_close(
            got[1:], want[1:], "point gradient", dtype=points.dtype.name, terms=512 * width
        )


def test_one_volume_for_all_points_of_any_shape(platform):
    volume, points = random_case(points=24)
    (flat,) = run(jaxops.grid_sample, platform, volume, points)
    (shaped,) = run(jaxops.grid_sample, platform, volume, points.reshape(2, 3, 4, 3))
    np.testing.assert_array_equal(shaped.reshape(24, -1), flat)
    (one,) = run(jaxops.grid_sample, platform, volume, points[0])
    np.testing.assert_array_equal(one, flat[0])


def test_numpy_and_lists_are_taken():
    image = [[[1.0], [2.0]], [[3.0], [4.0]]]
    np.testing.assert_allclose(jaxops.grid_sample(image, [0.0, 0.0]), [2.5])


# --- what special coordinates mean ---------------------------------------------------------------

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_nan_and_infinity(method, dtype, platform):
    """NaN gives rows of NaN or zero and no volume gradient; infinity is far outside."""
    line = np.arange(1.0, 4.0).astype(jnp.dtype(dtype))
    points = np.array([[NAN, 0], [0, NAN], [INF, 0], [-INF, 0], [0, 0]]).astype(line.dtype)
    lost = NAN if method == "linear" else 0.0
    for padding_mode, (high, low) in (
        ("zeros", (0, 0)),
        ("border", (3, 1)),
        ("reflection", (3, 1)),
    ):
        # Kernels differ for an axis of one entry.
        for deterministic, entries in ((False, 1), (True, 2), (False, 2)):
            image = np.broadcast_to(line[:, None, None], (3, entries, 1))
            found = run(
                sample_and_gradients(
                    method=method, padding_mode=padding_mode, deterministic=deterministic
                ),
                platform,
                image,
                points,
            )
            # NumPy does not know that a NaN of bfloat16 is one.
            value, of_image, of_points = (x.astype(np.float64) for x in found)
            np.testing.assert_array_equal(value[:, 0], [lost, lost, high, low, 2])
            outside = padding_mode != "zeros"
            np.testing.assert_array_equal(of_image.sum(1)[:, 0], [outside, 1, outside])
            np.testing.assert_array_equal(of_points[2:4], 0)
            np.testing.assert_array_equal(np.isnan(of_points[:2]), method == "linear")


@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_huge_coordinates_stay_in_range(padding_mode, dtype, platform):
    volume, _ = random_case(dtype=dtype)
    huge = np.array([1e9, 1e20, 3e38, -1e9, -1e20, -3e38], dtype)
    points = np.stack([huge, huge[::-1], huge], axis=-1)
    value, _, _ = run(sample_and_gradients(padding_mode=padding_mode), platform, volume, points)
    if padding_mode == "zeros":
        np.testing.assert_array_equal(value, 0)
    assert (np.abs(value) <= np.abs(volume).max()).all()


@pytest.mark.parametrize("padding_mode", PADDINGS)
def test_an_axis_of_one_entry(padding_mode, platform):
    """With align_corners its index is 0 wherever the point is, infinity included."""
    volume = np.array([[[2.0]], [[4.0]]])  # (2, 1, 1): an image of one column
    points = np.array([[-1.0, -1], [-1, 0], [1, 7], [1, INF], [0, -INF]])
    options = {"padding_mode": padding_mode}
    value, _, of_points = run(sample_and_gradients(**options), platform, volume, points)
    np.testing.assert_array_equal(value[:, 0], [2, 2, 4, 4, 3])
    np.testing.assert_array_equal(of_points[:, 1], 0)


def test_halves_round_to_even(platform):
    image = np.arange(6.0).reshape(6, 1, 1)
    at = np.array([-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
    points = np.stack([at / 2.5 - 1, np.zeros(7)], axis=-1)
    (got,) = run(functools.partial(jaxops.grid_sample, method="nearest"), platform, image, points)
    np.testing.assert_array_equal(got[:, 0], [0, 0, 2, 2, 4, 4, 0])


@pytest.mark.parametrize("padding_mode", [*PADDINGS, "constant"])
@pytest.mark.parametrize("align_corners", BOTH)
def test_point_gradients_at_entries_are_one_sided(align_corners, padding_mode, platform):
    """A one-sided derivative, scaled by the grid; at the ends it is the one from inside."""
    line = np.array([1.0, 3.0, 4.0, 9.0])
    image = np.broadcast_to(line[:, None, None], (4, 3, 1))
    index = np.arange(4.0)
    at = index / 1.5 - 1 if align_corners else (2 * index + 1) / 4 - 1
    points = np.stack([at, np.zeros(4)], axis=-1)
    options = {"padding_mode": padding_mode, "align_corners": align_corners}
    if padding_mode == "constant":
        options["cval"] = 7.0
    scale = 1.5 if align_corners else 2
    oracle = sample_and_gradients(reference.grid_sample, **options)
    for value, _, slopes in (
        run(sample_and_gradients(**options), platform, image, points),
        on_reference(oracle, image, points),
    ):
        np.testing.assert_allclose(value[:, 0], line, rtol=1e-12)
        np.testing.assert_allclose(slopes[:, 0], scale * np.array([2, 1, 5, 5]), rtol=1e-9)


@pytest.mark.parametrize("method", ["linear", "cubic"])
@pytest.mark.parametrize("n", [1, 4])
def test_slopes_at_entries_with_a_constant_outside(method, n, platform):
    """One of the differences to both sides, which are equal where the weights have no kink."""
    line = np.array([2.0, -1.0, 3.0, 0.5])[:n]
    image = np.broadcast_to(line[:, None, None], (n, 3, 1))
    points = np.stack([np.arange(-2.0, n + 2), np.ones(n + 4)], axis=-1)
    sample = functools.partial(
        jaxops.grid_sample,
        image,
        method=method,
        padding_mode="constant",
        coordinates="pixel",
        cval=10.0,
    )
    slopes = run(jax.grad(lambda p: sample(p).sum()), platform, points)[0][:, 0]
    step = np.array([2.0**-20, 0])
    before, at, after = (run(sample, platform, points + d * step)[0][:, 0] for d in (-1, 0, 1))
    sides = np.stack([at - before, after - at]) * 2.0**20
    np.testing.assert_allclose(np.abs(sides - slopes).min(0), 0, atol=1e-4)
    if method == "cubic":
        np.testing.assert_allclose(sides[0], sides[1], atol=1e-3)


def special_coordinates(size, align_corners):
    """Derivatives at entries and midway between them, inside, at both borders and outside."""
    index = np.arange(-2 * size - 1, 4 * size) / 2
    if align_corners:
        return index * (2 / max(size - 1, 1)) - 1
    return (2 * index + 1) / size - 1


@pytest.mark.parametrize("align_corners", BOTH)
@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize("sizes", [(1, 3), (2, 3), (1, 2, 1), (2, 3, 2)], ids=str)
def test_derivatives_at_kinks_are_one_sided(sizes, padding_mode, align_corners, platform):
    """First and second derivatives, also of points that are on kinks of several axes."""
    axes = len(sizes)
    volume, _ = random_case(sizes, width=1)
    lines = [special_coordinates(n, align_corners) for n in sizes]
    points = np.stack(np.meshgrid(*lines, indexing="ij"), axis=-1).reshape(-1, axes)
    options = {"padding_mode": padding_mode, "align_corners": align_corners}

    def derivatives(sample, points):
        def slopes(points):
            return jax.grad(lambda p: sample(volume, p, **options).sum())(points)

        along = jnp.broadcast_to(jnp.eye(axes)[:, None], (axes, *points.shape))
        columns = jax.vmap(lambda t: jax.jvp(slopes, (points,), (t,))[1])(along)
        return slopes(points), columns

    # The function is multilinear between kinks, which are far enough apart for exact differences.
    step = 2.0**-16
    moves = np.array(list(itertools.product((-1, 0, 1), repeat=axes)))
    (moved,) = on_reference(
        functools.partial(reference.grid_sample, volume, point_rank=2, **options),
        points + step * moves[:, None],
    )
    value = {tuple(m): v[:, 0] for m, v in zip(moves, moved, strict=True)}

    def difference(move, a, side):
        there = tuple(side if i == a else m for i, m in enumerate(move))
        return (value[there] - value[move]) * side / step

    def mixed(a, b, side_a, side_b):
        there = tuple(side_b if i == b else 0 for i in range(axes))
        origin = difference((0,) * axes, a, side_a)
        return (difference(there, a, side_a) - origin) * side_b / step

    for found in (
        on_reference(functools.partial(derivatives, reference.grid_sample), points),
        run(functools.partial(derivatives, jaxops.grid_sample), platform, points),
    ):
        slopes, columns = found
        for a in range(axes):
            sides = [difference((0,) * axes, a, side) for side in (-1, 1)]
            assert np.abs(sides - slopes[:, a]).min(0).max() < 1e-9
            np.testing.assert_array_equal(columns[a][:, a], 0)
            for b in range(a):
                sides = [mixed(a, b, *s) for s in itertools.product((-1, 1), repeat=2)]
                assert np.abs(sides - columns[a][:, b]).min(0).max() < 1e-5
                np.testing.assert_allclose(columns[b][:, a], columns[a][:, b], rtol=1e-12)


def test_entries_outside_count_as_zero_each_on_its_own(platform):
    """A NaN inside does not leak to points whose other entries are outside, nor zeros in."""
    image = np.ones((3, 3, 1), np.float32)
    image[0, 0] = np.nan
    points = np.array([[1.5, 1.5], [1.5, 0], [-1.5, -1.5], [-3, -3]], np.float32)
    (got,) = run(jaxops.grid_sample, platform, image, points)
    np.testing.assert_array_equal(got[:, 0], [0.25, 0.5, np.nan, 0])


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_volume_gradients_are_summed_in_single_precision(dtype, deterministic, platform):
    """4096 ones, a count that neither half-precision dtype reaches one by one."""
    volume = np.zeros((3, 3, 3, 5)).astype(jnp.dtype(dtype))
    points = np.zeros((4096, 3)).astype(volume.dtype)
    function = sample_and_gradients(deterministic=deterministic)
    _, of_volume, _ = run(function, platform, volume, points)
    want = np.zeros(volume.shape)
    want[1, 1, 1] = 4096
    np.testing.assert_array_equal(of_volume.astype(np.float64), want)


@pytest.mark.any_jax
@pytest.mark.parametrize("size", [(1 << 24) + 2, (1 << 24) + 3])
@pytest.mark.parametrize("method", ["linear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_the_last_of_more_entries_than_float32_counts(size, method, padding, platform):
    """The position of the last entry is rounded, and may then be after the entry."""
    volume = jnp.zeros((size, 2, 1), jnp.float16).at[-1].set(1).at[-2].set(3)
    volume, point = jax.device_put((volume, np.array([[1.0, 0.5]], np.float32)), platform.device)
    options = {"method": method, "padding_mode": padding}
    assert reference.grid_sample(volume, point, **options).tolist() == [[1.0]]
    ours = functools.partial(jaxops.grid_sample, **options)
    assert ours(volume, point).tolist() == [[1.0]]
    gradient = jax.grad(lambda v: ours(v, point).sum())(volume)
    assert gradient[-1].sum() == 1
    assert not gradient[:-1].any()


@pytest.mark.parametrize(("axes", "width"), [(2, 5), (3, 5), (3, 8)])
@pytest.mark.parametrize("crowd", ["everywhere", "in one cell", "in some cells"])
def test_deterministic_is_the_same_bit_for_bit(crowd, axes, width, platform):
    """Bits are equal even if whole groups of points share a cell, in three levels of groups."""
    count = 70_001 if crowd == "in one cell" else 3000
    volume, points = random_case((9, 7, 8)[:axes], width, count, "float32", reach=1.3)
    if crowd == "in one cell":
        points = 0.01 + points * 1e-3
    elif crowd == "in some cells":
        points = np.round(points * 2) / 2 + 0.02 + points * 1e-3
    rng = np.random.default_rng(1)
    g = rng.standard_normal((len(points), width)).astype(np.float32)

    def gradients(function):
        def compute(volume, points, g):
            return vjp_of(function, (0, 1))((g,), volume, points)[1]

        return compute

    ours = jax.jit(gradients(functools.partial(jaxops.grid_sample, deterministic=True)))
    placed = jax.device_put((volume, points, g), platform.device)
    first, again = (np.asarray(ours(*placed)[0]) for _ in range(2))
    assert first.tobytes() == again.tobytes()
    want = on_reference(gradients(reference.grid_sample), volume, points, g)
    assert_close([first], [want[0]], crowd, dtype="float32", terms=count)


@pytest.mark.parametrize(
    ("dtype", "padding_mode"),
    [("bfloat16", "zeros"), ("float32", "reflection"), ("float64", "zeros")],
)
def test_slabs_of_a_volume_have_the_bits_of_all_of_it(dtype, padding_mode):
    """On a CPU, threads share the gradient of a large volume, unless it has few channels."""
    volume, points = random_case((75, 40, 30), 32, 12_000, dtype, reach=1.2)
    points = points.astype(np.float32).reshape(3, 4000, 3)
    points[0, 5] = np.nan
    g = np.random.default_rng(1).standard_normal((3, 4000, 32)).astype(volume.dtype)
    sample = functools.partial(jaxops.grid_sample, padding_mode=padding_mode)

    @jax.jit
    def gradient(volume, g):
        of_shared = jax.vjp(lambda v: jax.vmap(sample, (None, 0))(v, points), volume)[1](g)[0]
        several = jnp.broadcast_to(volume, (3, *volume.shape))
        return of_shared, jax.vjp(lambda v: sample(v, points), several)[1](g)[0]

    with jax.default_device(jax.devices("cpu")[0]):
        whole = gradient(volume, g)
        few = gradient(volume[..., 24:28], g[..., 24:28])
    for of_whole, of_few in zip(whole, few, strict=True):
        assert np.asarray(of_few).any()
        assert np.asarray(of_whole[..., 24:28]).tobytes() == np.asarray(of_few).tobytes()


@pytest.mark.parametrize("deterministic", BOTH)
def test_vmap_sums_the_gradient_of_a_shared_volume_in_one_call(deterministic, platform):
    """The program has no copy of the volume for each entry of the batch."""
    volume, points = random_case(points=10)
    many = np.stack([points, points * 0.5, -points])

    def total(function):
        def loss(volume, many):
            return (jax.vmap(function, (None, 0))(volume, many) ** 2).sum()

        return jax.grad(loss, (0, 1))

    ours = total(functools.partial(jaxops.grid_sample, deterministic=deterministic))
    got = run(ours, platform, volume, many)
    want = on_reference(total(reference.grid_sample), volume, many)
    assert_close(got, want, "a shared volume", dtype="float64", terms=300)
    placed = jax.device_put((volume, many), platform.device)
    program = compile_without_loops(ours, *placed)
    assert custom_calls(program) == {"jaxops_grid_sample": 1, "jaxops_grid_sample_backward": 1}
    assert f"f64[3,{','.join(map(str, volume.shape))}]" not in program.as_text()


@pytest.mark.parametrize(
    ("wrt", "name"), [((0,), "volume_grad"), ((1,), "point_grad"), ((0, 1), "backward")]
)
def test_a_gradient_runs_one_kernel(wrt, name, platform):
    arguments = jax.device_put(random_case(), platform.device)

    def gradients(g, *arguments):
        return vjp_of(jaxops.grid_sample, wrt)((g,), *arguments)[1]

    program = compile_without_loops(gradients, jnp.ones((40, 3)), *arguments)
    assert custom_calls(program) == {f"jaxops_grid_sample_{name}": 1}


def test_the_volume_gradient_keeps_no_volume():
    volume, points = random_case()
    _, pull = jax.vjp(lambda v: jaxops.grid_sample(v, points), volume)
    kept = [x.shape for x in jax.tree.leaves(pull) if hasattr(x, "shape")]
    assert volume.shape not in kept


@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("sizes", [(5, 4, 6), (7, 5)], ids=str)
def test_an_eikonal_loss_trains_the_volume(sizes, deterministic, platform):
    """The volume gradient of a loss on the slope of the field, and its own derivative."""
    volume, points = random_case(sizes, width=1, reach=0.95)

    def eikonal(function):
        def loss(volume, points):
            slopes = jax.grad(lambda p: function(volume, p).sum())(points)
            return ((jnp.sqrt((slopes**2).sum(-1) + 1e-3) - 1) ** 2).mean()

        def both(volume, points):
            gradients = jax.grad(loss, (0, 1))
            moved = jax.jvp(gradients, (volume, points), (volume, points))[1]
            return gradients(volume, points), moved

        return both

    ours = functools.partial(jaxops.grid_sample, deterministic=deterministic)
    got = run(eikonal(ours), platform, volume, points)
    want = on_reference(eikonal(reference.grid_sample), volume, points)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9 * np.abs(w).max())


@pytest.mark.parametrize("axes", [2, 3])
def test_derivatives_beyond_the_last_are_zero(axes, platform):
    volume, points = random_case((4, 5, 3)[:axes])

    def function(points):
        return jaxops.grid_sample(volume, points)

    for _ in range(axes + 1):
        function = functools.partial(
            lambda f, p: jax.jvp(f, (p,), (jnp.ones_like(p),))[1], function
        )
    assert not run(function, platform, points)[0].any()


def test_nearest_has_no_gradient_by_points(platform):
    volume, points = random_case()
    _, of_volume, of_points = run(sample_and_gradients(method="nearest"), platform, volume, points)
    assert not of_points.any()
    inside = on_reference(
        sample_and_gradients(reference.grid_sample, method="nearest"), volume, points
    )
    np.testing.assert_array_equal(of_volume, inside[1])


@pytest.mark.parametrize("align_corners", BOTH)
@pytest.mark.parametrize("padding_mode", PADDINGS)
@pytest.mark.parametrize("method", METHODS)
def test_continuity(method, padding_mode, align_corners, platform):
    """Linear interpolation has no jumps along a line through the volume and beyond it."""
    volume, _ = random_case()
    t = np.linspace(-2.5, 2.5, 20_001)
    points = np.stack([t, 0.3 * t, -0.7 * t], axis=-1)
    options = {"method": method, "padding_mode": padding_mode, "align_corners": align_corners}
    (value,) = run(functools.partial(jaxops.grid_sample, **options), platform, volume, points)
    largest = np.abs(np.diff(value, axis=0)).max()
    if method == "linear":
        assert largest < 3 * 6 * np.abs(volume).max() * (t[1] - t[0])
    else:
        assert largest > 0.1


# --- cubic convolution, other paddings and coordinates -------------------------------------------


def keys(distance):
    """The kernel of cubic convolution with a = -0.75, as Keys wrote it."""
    s, a = abs(distance), -0.75
    if s <= 1:
        return (a + 2) * s**3 - (a + 3) * s**2 + 1
    return a * s**3 - 5 * a * s**2 + 8 * a * s - 4 * a if s < 2 else 0.0


def triangle(distance):
    return max(0.0, 1 - abs(distance))


def entry_of(index, n, padding_mode, align_corners):
    """The entry that PyTorch reads at an index, None for one outside."""
    if padding_mode == "border":
        return min(max(index, 0), n - 1)
    if padding_mode == "wrap":
        return index % n
    if padding_mode == "reflection":
        low, high = (0, n - 1) if align_corners else (-0.5, n - 0.5)
        while not low <= index <= high:
            index = 2 * (low if index < low else high) - index
            if low == high:
                index = low
        return int(index)
    return index if 0 <= index < n else None


def by_sums(volume, at, kernel, padding_mode, align_corners=True, cval=0.0):
    """The sum over all entries that the kernel reaches from positions in entries, one by one."""
    out = np.zeros((len(at), volume.shape[-1]))
    for row, x in zip(out, at, strict=True):
        near = [range(int(np.floor(p)) - 2, int(np.floor(p)) + 4) for p in x]
        for index in itertools.product(*near):
            weight = np.prod([kernel(p - i) for p, i in zip(x, index, strict=True)])
            entry = [
                entry_of(i, n, padding_mode, align_corners)
                for i, n in zip(index, volume.shape[:-1], strict=True)
            ]
            row += weight * (cval if None in entry else volume[tuple(entry)])
    return out


KERNELS = {"linear": triangle, "cubic": keys}


@pytest.mark.parametrize("frame", ["corners", "edges", "pixel"])
@pytest.mark.parametrize("padding_mode", [*PADDINGS, "wrap", "constant"])
def test_sums_over_entries(padding_mode, frame, platform):
    """PyTorch's bicubic, its tensor product in space, and every padding of both methods."""
    options = {
        "corners": {},
        "edges": {"align_corners": False},
        "pixel": {"coordinates": "pixel"},
    }[frame]
    cval = {"cval": 0.7} if padding_mode == "constant" else {}
    cases, wanted = [], []
    for sizes, method in itertools.product([(5, 4), (1, 3), (3, 4, 2)], KERNELS):
        volume, points = random_case(sizes, width=2, points=9, reach=2.3)
        n = np.array(sizes)
        if frame == "pixel":
            points = at = (points + 1) / 2 * n
        elif frame == "edges":
            at = ((points + 1) * n - 1) / 2
        else:
            at = (points + 1) / 2 * (n - 1)
        cases.append((method, volume, points))
        wanted.append(by_sums(volume, at, KERNELS[method], padding_mode, frame != "edges", **cval))

    def ours(arrays):
        return [
            jaxops.grid_sample(*a, method=case[0], padding_mode=padding_mode, **options, **cval)
            for a, case in zip(arrays, cases, strict=True)
        ]

    got = run(ours, platform, [case[1:] for case in cases])
    for g, w, case in zip(got, wanted, cases, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-11, atol=1e-11, err_msg=str(case[0]))


def test_names_of_linear_and_formats_with_channels_first(platform):
    volume, points = random_case((4, 3, 5), points=6)
    image, places = random_case((4, 3), points=6)
    batch = np.stack([image, 2 * image])

    def ours(volume, points, image, places, batch):
        first = jnp.moveaxis(batch, -1, 1)
        shared = jaxops.grid_sample(first, places[None], data_format="nchw")
        return (
            jaxops.grid_sample(volume, points, method="trilinear"),
            jaxops.grid_sample(image, places, method="bilinear", data_format="NHWC"),
            jaxops.grid_sample(jnp.moveaxis(volume, -1, 0), points, data_format="NCDHW"),
            jnp.moveaxis(shared, 1, -1),
            jax.vmap(jaxops.grid_sample, (0, None))(batch, places),
        )

    def plain(volume, points, image, places, batch):
        space = jaxops.grid_sample(volume, points)
        plane = jaxops.grid_sample(image, places)
        both = jnp.stack([plane, 2 * plane])
        return space, plane, jnp.moveaxis(space, -1, 0), both, both

    arguments = (volume, points, image, places, batch)
    got, want = run(ours, platform, *arguments), run(plain, platform, *arguments)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("method", ["linear", "cubic"])
def test_points_shared_by_a_batch_are_one_call(method, platform):
    """Points of size 1 along a batch dimension are not copied, and their gradient is summed."""
    image, points = random_case((6, 5), width=3, points=8)
    batch = np.stack([image, -image, image**2])

    def total(sample):
        def loss(batch, points):
            return (sample(batch, points[None]) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1))

    def one_by_one(batch, points):
        return jnp.stack([jaxops.grid_sample(v, points[0], method=method) for v in batch])

    ours = total(functools.partial(jaxops.grid_sample, method=method))
    got, want = run(ours, platform, batch, points), run(total(one_by_one), platform, batch, points)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-12, atol=1e-12)
    program = compile_without_loops(ours, *jax.device_put((batch, points), platform.device))
    counts = custom_calls(program)
    if platform.name == "cpu":
        assert set(counts.values()) == {1}
    with pytest.raises(ValueError, match="or 1 in their place"):
        jaxops.grid_sample(batch, np.stack([points] * 2))


@pytest.mark.parametrize("method", METHODS)
def test_pixels_are_exact(method, platform):
    """Whole positions are entries, bit for bit, and only infinity and NaN are anywhere else."""
    volume, _ = random_case((1000, 3), width=1, dtype="float32")
    volume[501] = np.nan
    rows = np.array([0, 500, 502, 999, INF, -INF, NAN], np.float32)
    points = np.stack([rows, np.ones_like(rows)], -1)
    options = {"method": method, "coordinates": "pixel", "padding_mode": "border"}
    value, _, _ = run(sample_and_gradients(**options), platform, volume, points)
    lost = NAN if method == "linear" else 0
    # All entries around a position count, those with the weight zero too.
    beside = NAN if method == "linear" else volume[500, 1, 0]
    want = [volume[0, 1, 0], beside, *volume[[502, 999, 999, 0], 1, 0], lost]
    np.testing.assert_array_equal(value[:, 0], want)


@pytest.mark.parametrize("padding_mode", [*PADDINGS, "wrap", "constant"])
def test_cubic_of_nan_and_infinity(padding_mode, platform):
    line = np.arange(1.0, 6.0)
    image = np.broadcast_to(line[:, None, None], (5, 1, 1))
    points = np.array([[NAN, 0], [0, NAN], [INF, 0], [-INF, 0], [0, 0], [1e30, 0]])
    options = {"method": "cubic", "padding_mode": padding_mode, "coordinates": "pixel"}
    value, of_image, of_points = run(sample_and_gradients(**options), platform, image, points)
    assert np.isnan(value[:2]).all()
    assert np.isnan(of_points[:2]).all()
    assert np.isfinite(of_image).all()
    ends = (0, 0) if padding_mode in ("zeros", "constant") else (5, 1)
    np.testing.assert_allclose(value[2:4, 0], ends, atol=1e-12)
    assert np.isfinite(value[2:]).all()
    np.testing.assert_allclose(of_points[2:4], 0, atol=1e-12)


def test_a_constant_that_is_nan_marks_what_is_outside(platform):
    """Also where its gradient is taken, and a traced one has a gradient of its own."""
    image, _ = random_case((3, 3), width=1)
    points = np.array([[0.1, 0.2], [0.4, -0.9], [1.4, 0], [9, 0]])

    def value_and_gradients(image, points, cval):
        def total(image, points, cval):
            y = jaxops.grid_sample(image, points, padding_mode="constant", cval=cval)
            return y[:2].sum() + 0 * cval, y[:, 0]

        gradients, y = jax.grad(total, (0, 1), has_aux=True)(image, points, cval)

        def outside(cval):
            options = {"padding_mode": "constant", "cval": cval}
            return jaxops.grid_sample(image, points, **options)[2:].sum()

        return y, *gradients, jax.grad(outside)(2.0)

    y, of_image, of_points, of_constant = run(value_and_gradients, platform, image, points, NAN)
    np.testing.assert_array_equal(np.isnan(y), [False, False, True, True])
    assert np.isfinite(of_image).all()
    assert np.isfinite(of_points[:2]).all()
    np.testing.assert_allclose(of_constant, 0.4 + 1, rtol=1e-12)


@pytest.mark.parametrize("options", [{"method": "cubic"}, {"padding_mode": "wrap"}], ids=str)
def test_derivatives_of_stencils(options, platform):
    """Against differences, to the third order, and the sums of a fixed order of other platforms."""
    volume, points = random_case((4, 3), width=2, points=5, reach=1.4)

    @jax.jit
    def sample(volume, points):
        return jnp.sin(jaxops.grid_sample(volume, points, **options))

    with jax.default_device(platform.device):
        check_grads(sample, (volume, points), 2, eps=1e-4, rtol=1e-4, atol=1e-4)

        @jax.jit
        def third(points):
            return jax.grad(lambda p: jax.grad(lambda q: sample(volume, q).sum())(p)[0, 0])(points)

        check_grads(third, (points,), 1, eps=1e-5, rtol=1e-4, atol=1e-4)


def test_the_ordered_gradient_of_taps():
    """GPUs have no kernels of it, and sum in a fixed order where `deterministic` asks for that."""
    rng = np.random.default_rng(0)
    indices = rng.integers(-1, 4, (3, 50, 2, 2)).astype(np.int32)
    weights = [rng.standard_normal((n, 50, 2)) for n in (3, 1)]
    g = rng.standard_normal((3, 50, 5))
    for kept in ((3,), (1,)):
        shape = (*kept, 4, 3, 5)
        _, pull = jax.vjp(lambda v: taps.sum_taps(v, indices, weights, 1), jnp.zeros(shape))
        got = jax.jit(taps.ordered_volume_grad, static_argnums=(0, 4))(
            shape, indices, g, weights, 1
        )
        np.testing.assert_allclose(got, pull(jnp.asarray(g))[0], rtol=1e-12, atol=1e-12)
    for points, width in ((0, 5), (50, 0)):
        few = [array[:, :points] for array in (indices, g[..., :width], *weights)]
        empty = taps.ordered_volume_grad((3, 4, 3, width), few[0], few[1], few[2:], 1)
        assert empty.shape == (3, 4, 3, width)
        assert not empty.any()
