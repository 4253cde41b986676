"""Draws what the operators compute, for the pages of the documentation.

python scripts/draw_operators.py                        # all pictures, into docs/pictures
python scripts/draw_operators.py im2col --to FOLDER     # one of them

A picture has the name of the page that shows it. Its numbers are results of the operators.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Circle, PathPatch, Rectangle
from matplotlib.path import Path

import jaxops

PICTURES = pathlib.Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 7.2  # inches, the column of a page
# The same version of matplotlib writes the same bytes. Text as paths would make the files larger.
STYLE = {
    "svg.hashsalt": "jaxops",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9,
}

BLUE, ORANGE, GREEN, PURPLE = "#08519c", "#d94801", "#238b45", "#6a51a3"
PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_PURPLE = "#d6e6f4", "#fee6ce", "#e0f3db", "#e8e6f2"
BLACK, GREY, PALE_GREY, WHITE = "#222222", "#6b6b6b", "#eeeeee", "#ffffff"
#: 17 colors from -1 to 1. That of zero differs from WHITE: text on it is black.
SIGNED = LinearSegmentedColormap.from_list("signed", ["#fdae6b", "#fdfdfd", "#6baed6"], N=17)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure without axes: x goes right, y goes down, and a unit is the side of a cell."""
    figure = Figure(figsize=(WIDTH, WIDTH * height / width))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def write(axes: Axes, x: float, y: float, text, color=BLACK, ha="center", **options) -> None:
    """A line of text whose middle is at y."""
    text = str(text).replace("-", "\u2212")
    axes.text(x, y, text, color=color, ha=ha, va="center_baseline", **options)


def cells(axes: Axes, left: float, top: float, texts, colors=PALE_GREY, size=9.0) -> None:
    """A table of cells. Text is grey in WHITE cells and black in others."""
    shape = np.shape(texts)
    colors = np.broadcast_to(colors, shape)
    for color in dict.fromkeys(colors.flat):
        # One path for all cells of a color: fewer bytes than a path for each.
        corners = np.argwhere(colors == color)[:, ::-1] + (left, top)
        boxes = [Path(Path.unit_rectangle().vertices + corner, closed=True) for corner in corners]
        path = Path.make_compound_path(*boxes)
        axes.add_patch(PathPatch(path, facecolor=color, edgecolor="#bbbbbb", linewidth=0.8))
    for i, j in np.ndindex(shape):
        if str(texts[i][j]) != "":
            color = GREY if colors[i, j] == WHITE else BLACK
            write(axes, left + j + 0.5, top + i + 0.5, texts[i][j], color, fontsize=size)


def outline(axes: Axes, left, top, width, height, color, inset=0.04, **options) -> None:
    """The border of cells."""
    corner = (left + inset, top + inset)
    options = {"fill": False, "edgecolor": color, "linewidth": 2, **options}
    axes.add_patch(Rectangle(corner, width - 2 * inset, height - 2 * inset, **options))


def numbers(axes: Axes, values, x, y, step=(1, 0)) -> None:
    """The labels of the rows or columns of a table."""
    for i, value in enumerate(values):
        write(axes, x + i * step[0], y + i * step[1], value, GREY, fontsize=8)


def draw_lightweight_conv() -> Figure:
    """Windows of three taps, of two heads, at the start of a sequence and of a segment."""
    x = np.array([[2, 1, 3, 0, 2, 1, 4, 1, 0, 2], [1, 0, 2, 2, 1, 3, 0, 2, 1, 1]])
    x = np.concatenate([x, x[::-1, ::-1]])  # (C, T)
    weight, ids = np.array([[1, 2, 3], [2, 3, 1]]), np.repeat([0, 1], [6, 4])
    y = jaxops.lightweight_conv(x.T.astype("f4"), weight.astype("f4"), segment_ids=ids)
    y = np.asarray(y).T.astype(int)
    of_segment = np.array([PALE_GREEN, PALE_PURPLE])[ids]

    figure, axes = canvas(19, 18)
    left, top, below = 5.5, 5.2, 11.1
    write(axes, 2.5, 0.6, "weight[h, k]", weight="bold")
    numbers(axes, ["k = 0", "1", "2"], 1.5, 1.3)
    cells(axes, 1, 1.7, weight)
    note = "K = 3 taps, causal: y[t] reads x[t - 2], x[t - 1] and x[t]"
    write(axes, left + 1.4, 2.2, note, ha="left")
    note = "C = 4 channels, H = 2 heads: channel c has head c // 2"
    write(axes, left + 1.4, 3.2, note, ha="left")
    write(axes, left - 0.3, top - 0.4, "step t", GREY, ha="right", fontsize=8)
    numbers(axes, range(-2, 10), left + 0.5, top - 0.4)
    write(axes, left + 1.7, top + 0.5, "segment_ids", ha="right")
    cells(axes, left + 2, top, [ids], of_segment)
    write(axes, 2, top + 3.2, "x[t, c]", weight="bold")
    padded = np.pad(x, ((0, 0), (2, 0)))
    cells(axes, left, top + 1.2, padded, np.append([WHITE, WHITE], of_segment))
    write(axes, 2, below + 2, "y[t, c]", weight="bold")
    cells(axes, left + 2, below, y, of_segment)
    for c in range(4):
        color = (BLUE, ORANGE)[c // 2]
        write(axes, left - 0.3, top + 1.7 + c, f"c = {c}", color, ha="right")
        write(axes, left + 1.7, below + 0.5 + c, f"c = {c}", color, ha="right")
    for h, color in enumerate((BLUE, ORANGE)):
        outline(axes, 1, 1.7 + h, 3, 1, color)
        write(axes, 4.2, 2.2 + h, f"head {h}", color, ha="left")

    why_zero = {1: "a tap before the sequence reads 0", 7: "a tap of another segment reads 0"}
    for i, (t, c) in enumerate([(1, 0), (4, 0), (7, 2)]):
        color, line = (BLUE, ORANGE)[c // 2], below + 4.8 + 0.65 * i
        outline(axes, left + t, top + 1.2 + c, 3, 2, color)
        outline(axes, left + 2 + t, below + c, 1, 2, color)
        taps = [x[c, s] if s >= 0 and ids[s] == ids[t] else 0 for s in range(t - 2, t + 1)]
        products = [f"{w}·{v}" for w, v in zip(weight[c // 2], taps, strict=True)]
        text = f"y[{t}, {c}] = {' + '.join(products)} = {y[c, t]}"
        write(axes, left, line, text, color, ha="left")
        write(axes, left + 6.4, line, why_zero.get(t, ""), GREY, ha="left")
    return figure


def draw_dynamic_conv() -> Figure:
    """The filters of the steps, and the matrices of both convolutions over time."""
    T, K = 8, 3
    weight = np.random.default_rng(3).normal(0, 1.5, (T, 1, K)).astype("f4")
    taps = np.asarray(jax.nn.softmax(weight))[:, 0]
    # Channel s of the identity is 1 at step s: results are the entries of the matrix.
    dynamic = np.asarray(jaxops.dynamic_conv(np.eye(T, dtype="f4"), weight, normalize=True))
    light = np.asarray(jaxops.lightweight_conv(np.eye(T, dtype="f4"), taps[5:6]))

    figure, axes = canvas(25, 12)
    top = 2.7
    for left, values, name, filters in (
        (1.5, taps, "p[t, h, k]", "softmax over k"),
        (6.4, dynamic, "dynamic_conv", "y = M x, a filter for each step"),
        (16, light, "lightweight_conv", "y = M x, one filter for all steps"),
    ):
        texts = np.array([f"{v:.2f}".removeprefix("0") for v in values.flat]).reshape(values.shape)
        if values is not taps:
            texts[~np.tri(T, dtype=bool) | np.tri(T, k=-K, dtype=bool)] = ""
        colors = [[to_hex(SIGNED(0.5 + v / 2)) for v in row] for row in values]
        cells(axes, left, top, texts, colors, size=7.5)
        numbers(axes, range(T), left - 0.4, top + 0.5, (0, 1))
        numbers(axes, range(values.shape[1]), left + 0.5, top - 0.4)
        middle = left + values.shape[1] / 2
        write(axes, middle, 0.6, name, weight="bold")
        write(axes, middle, 1.4, filters)
        write(axes, middle, top + T + 0.6, "tap k" if values is taps else "step s of x", GREY)
    axes.text(0.5, top + T / 2, "step t of y", color=GREY, rotation=90, ha="center", va="center")
    for t in (0, 4):
        outline(axes, 1.5, top + t, K, 1, ORANGE)
        outline(axes, 6.4 + max(t - 2, 0), top + t, min(t + 1, K), 1, ORANGE)
    return figure


def draw_conv2d() -> Figure:
    """Windows with strides and with dilation, and the product of matrices."""
    figure, axes = canvas(29, 23.2)
    for left, shown, options in (
        (1, [(0, 0), (1, 2)], {"strides": 2}),
        (15.5, [(0, 0), (2, 3)], {"dilation": 2}),
    ):
        ((name, value),) = options.items()
        write(axes, left, 0.7, f"{name}={value}, padding=1, KH = KW = 3", ha="left")
        _windows(axes, left, 2.4, shown, options)

    top, rows, inner = 14.4, 6, 8
    write(axes, 1, 11.7, "A convolution as a product of matrices, in tiles", ha="left")
    for left, width, height, name, shape in (
        (3, inner, rows, "patches of x", ("N·OH·OW", "KH·KW·C")),
        (15, 5, inner, "kernel", ("KH·KW·C", "O")),
        (23, 5, rows, "y", ("N·OH·OW", "O")),
    ):
        write(axes, left + width / 2, top - 1.5, name, weight="bold")
        write(axes, left + width / 2, top - 0.6, shape[1], GREY, fontsize=8)
        side = {"rotation": 90, "fontsize": 8, "ha": "center", "va": "center"}
        axes.text(left - 0.5, top + height / 2, shape[0], color=GREY, **side)
        is_kept = name != "patches of x"
        style = {"linewidth": 1.2, "linestyle": "-" if is_kept else (0, (3, 3))}
        outline(axes, left, top, width, height, GREY, 0, **style)
    filled = {"fill": True, "linewidth": 1.2}
    outline(axes, 3, top + 2, inner, 2, BLUE, 0, facecolor=PALE_BLUE, **filled)
    outline(axes, 16, top, 2, inner, ORANGE, 0, facecolor=PALE_ORANGE, **filled)
    outline(axes, 24, top + 2, 2, 2, GREEN, 0, facecolor=PALE_GREEN, **filled)
    write(axes, 12.7, top + 3, "\u00d7", fontsize=14)
    write(axes, 21.2, top + 3, "=", fontsize=14)
    write(axes, 3, top + 6.8, "formed from x, a tile at a time", BLUE, ha="left", fontsize=8)
    return figure


def _windows(axes: Axes, left: float, top: float, shown, options) -> None:
    """An image of 6 × 6 with its padding, the result, and the windows of the results shown."""

    def convolve(x):
        return jaxops.conv2d(x, jnp.ones((3, 3, 1, 1)), padding="VALID", **options)[0, ..., 0]

    # The derivative of a result is 1 in the entries that it reads.
    reads = np.asarray(jax.jacobian(convolve)(jnp.zeros((1, 8, 8, 1))))[:, :, 0, :, :, 0]
    texts = np.pad(np.full((6, 6), ""), 1, constant_values="0")
    image = np.where(texts == "0", WHITE, PALE_GREY)
    result = np.full(reads.shape[:2], PALE_GREY)
    for index, pale in zip(shown, (PALE_BLUE, PALE_ORANGE), strict=True):
        image[reads[index] == 1] = result[index] = pale
    cells(axes, left, top, texts, image, size=8)
    cells(axes, left + 9, top, np.full(result.shape, ""), result)
    for (oh, ow), color in zip(shown, (BLUE, ORANGE), strict=True):
        first, last = np.argwhere(reads[oh, ow])[[0, -1]]
        height, width = last - first + 1
        outline(axes, left + first[1], top + first[0], width, height, color)
        outline(axes, left + 9 + ow, top + oh, 1, 1, color)
    write(axes, left + 4, top - 0.7, "x", weight="bold")
    write(axes, left + 9 + len(result) / 2, top - 0.7, "y", weight="bold")


def draw_im2col() -> Figure:
    """An image, the matrix of its patches, and what col2im sums from them."""
    x = np.arange(11, 27, dtype="f4").reshape(1, 4, 4, 1)
    options = {"strides": 2, "padding": 1}
    patches = jaxops.im2col(x, 3, **options)
    summed = np.asarray(jaxops.col2im(patches, x.shape, **options)).astype(int)
    patches = np.asarray(patches).reshape(4, 9).astype(int)
    windows = list(np.ndindex(2, 2))
    colors = (BLUE, ORANGE, GREEN, PURPLE)

    figure, axes = canvas(27, 9.4)
    top = 1.6
    image = np.pad(x[0, ..., 0].astype(int), 1)
    cells(axes, 1, top, image, np.where(image, PALE_GREY, WHITE), size=8)
    write(axes, 4, 0.6, "x and its padding", weight="bold")
    write(axes, 4, top + 7, "KH = KW = 3, strides=2", fontsize=8)
    for (oh, ow), color in zip(windows, colors, strict=True):
        outline(axes, 1 + 2 * ow, top + 2 * oh, 3, 3, color, 0.05 if oh == ow else 0.13)

    left, middle = 9.8, top + 1
    write(axes, left + 3.8, 0.6, "im2col: a row for each window", weight="bold")
    for column, tap in enumerate(np.ndindex(3, 3)):
        label = f"{tap[0]},{tap[1]}"
        write(axes, left + 0.5 + column, middle - 0.4, label, GREY, fontsize=7)
    write(axes, left - 0.2, middle - 0.4, "kh,kw", GREY, ha="right", fontsize=7)
    pale = np.array([PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_PURPLE])[:, None]
    cells(axes, left, middle, patches, np.where(patches, pale, WHITE), size=8)
    for row, ((oh, ow), color) in enumerate(zip(windows, colors, strict=True)):
        write(axes, left - 0.2, middle + 0.5 + row, f"{oh},{ow}", color, ha="right", fontsize=8)

    write(axes, 23.8, 0.6, "col2im of these", weight="bold")
    cells(axes, 21.8, middle, summed[0, ..., 0], size=8)
    write(axes, 23.8, top + 7, "16 is in four windows", fontsize=8)
    return figure


def draw_focal_loss() -> Figure:
    """The losses of a target over its probability, and their derivatives."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = jnp.linspace(-6, 6, 81)
    colors = (BLACK, PURPLE, BLUE, GREEN, ORANGE)
    for gamma, color in zip((0, 0.5, 1, 2, 5), colors, strict=True):

        def loss(x, gamma=gamma):
            target = jnp.ones_like(x)
            return jaxops.sigmoid_focal_loss(-x, target, gamma=gamma, alpha=None)

        p = jax.nn.sigmoid(-x)
        label = "gamma = 0: cross-entropy" if gamma == 0 else f"gamma = {gamma}"
        left.plot(p, loss(x), color=color, label=label)
        right.plot(x, jax.grad(lambda x: loss(x).sum())(x), color=color)
    left.set(xlabel="p, the probability of the target", ylabel="loss", xlim=(0, 1), ylim=(0, 4))
    right.set(
        xlabel="x, by which the wrong answer leads", ylabel="derivative of the loss", xlim=(-6, 6)
    )
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(color=PALE_GREY)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_grid_sample() -> Figure:
    """The weights of the entries around a point, what coordinates mean, and what lies outside."""
    figure = Figure(figsize=(WIDTH, 7))
    for left, method in ((0.07, "linear"), (0.57, "cubic")):
        axes = figure.add_axes((left, 0.53, 0.4, 0.42))
        axes.set(xlim=(0, 6), ylim=(6, 0), aspect="equal")
        axes.set_axis_off()
        _weights(axes, np.array([2.3, 2.6]), method)
    _coordinates(figure.add_axes((0.05, 0.04, 0.42, 0.38)))
    _outside(figure)
    return figure


def _weights(axes: Axes, point, method: str) -> None:
    """An image of 6 × 6 entries with their weights at a point."""

    def sample(image):
        return jaxops.grid_sample(image, point, coordinates="pixel", method=method)[0]

    # The result is linear in the image: its derivatives are the weights.
    weights = np.asarray(jax.grad(sample)(jnp.zeros((6, 6, 1))))[..., 0]
    texts = np.array([f"{w:.3f}" if w else "" for w in weights.flat]).reshape(6, 6)
    colors = [[to_hex(SIGNED(0.5 + w)) if w else PALE_GREY for w in row] for row in weights]
    cells(axes, 0, 0, texts, colors, size=7.5)
    axes.plot(point[1] + 0.5, point[0] + 0.5, "o", color=ORANGE, markersize=6)
    write(axes, 3, -0.4, f'method="{method}": weights at {tuple(point.tolist())}')
    numbers(axes, range(6), -0.3, 0.5, (0, 1))
    numbers(axes, range(6), 0.5, 6.3)
    write(axes, 3, 6.75, "axis 1", GREY, fontsize=8)
    axes.text(-0.7, 3, "axis 0", color=GREY, fontsize=8, rotation=90, ha="center", va="center")


def _coordinates(axes: Axes) -> None:
    """An axis of four entries under the three scales of coordinates."""
    axes.set(xlim=(-0.6, 3.6), ylim=(6, 0))
    axes.set_axis_off()
    write(axes, 1.5, 0.2, "coordinates of an axis of 4 entries")
    cells(axes, -0.5, 0.7, [range(4)])
    x = np.arange(4)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the dotted line
    for y, name, scale, positions in (
        (2.6, 'coordinates="pixel"', x, x),
        (4.0, "align_corners=True", (-1, 0, 1), (0, 1.5, 3)),
        (5.4, "align_corners=False", (-1, 0, 1), (-0.5, 1.5, 3.5)),
    ):
        ends = (positions[0], positions[-1])
        axes.vlines(ends, 1.7, y, color=GREY, linestyle=":", linewidth=0.8)
        axes.plot(positions, np.full(len(positions), y), "|-", color=BLUE, linewidth=1.2)
        write(axes, 1.5, y - 0.45, name, fontsize=8)
        for position, value in zip(positions, scale, strict=True):
            write(axes, position, y + 0.4, value, GREY, fontsize=8, bbox=box)


def _outside(figure: Figure) -> None:
    """Samples along an axis of four entries, and beyond it, for each padding mode."""
    entries = np.array([1.0, 3, 2, 4])
    x = np.arange(-4, 7.5, 0.5)
    points = np.stack([0 * x, x], -1)
    modes = ("zeros", "constant", "border", "reflection", "wrap")
    for i, mode in enumerate(modes):
        options = {"cval": 2.5} if mode == "constant" else {}
        axes = figure.add_axes((0.55, 0.34 - 0.066 * i, 0.3, 0.055))
        sampled = jaxops.grid_sample(
            entries[None, :, None], points, coordinates="pixel", padding_mode=mode, **options
        )
        axes.plot(x, sampled[:, 0], color=BLUE, linewidth=1.2)
        axes.plot(range(4), entries, "o", color=ORANGE, markersize=3)
        axes.set(xlim=(-4, 7), ylim=(-0.5, 4.8), yticks=[], xticks=range(-4, 8))
        axes.tick_params(labelbottom=mode == modes[-1], labelsize=8, colors=GREY)
        axes.axvspan(0, 3, color=PALE_BLUE, linewidth=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        name = f"{mode},\ncval=2.5" if options else mode
        axes.text(7.3, 2, name, color=BLACK, va="center", fontsize=8)
        if mode == "zeros":
            write(axes, 1.5, 6.4, "padding_mode: samples beyond its entries")
    axes.set_xlabel("index x", fontsize=8, color=GREY)


def draw_trilinear() -> Figure:
    """The corners of a cell with their numbers, and their weights at a point."""
    point = np.array([0.5, -0.2, 0.4], "f4")

    def interpolate(features):
        return jaxops.trilinear_interpolate(features, point)[0]

    # The result is linear in the features: its derivatives are the weights.
    weights = np.asarray(jax.grad(interpolate)(jnp.zeros((8, 1))))[:, 0]
    corners = np.array(list(np.ndindex(2, 2, 2)))  # i, j, k

    figure, axes = canvas(18, 9.4)
    _box(axes, [-1, -1, -1], [1, 1, 1], color="#bbbbbb", linewidth=1.2)
    _box(axes, [-1, -1, -1], point, color=BLUE, linewidth=1.2)
    x, y = _project(point)
    axes.plot(x, y, "o", color=ORANGE, markersize=7)
    write(axes, x + 0.3, y - 0.35, "point", ORANGE, ha="left")
    for number, (corner, weight) in enumerate(zip(corners, weights, strict=True)):
        x, y = _project(2 * corner - 1)
        # The area of a disk is proportional to the weight.
        axes.add_patch(Circle((x, y), np.sqrt(weight), color=PALE_BLUE, zorder=0))
        write(axes, x, y, number, weight="bold")
    for name, middle, (right, down) in (
        ("u", (0, -1, 1), (0.4, 0.3)),
        ("v", (-1, 0, -1), (-0.5, 0)),
        ("w", (-1, -1, 0), (0, 0.5)),
    ):
        x, y = _project(middle)
        write(axes, x + right, y + down, name, GREY)

    left = 11.2
    for x, text in ((0, "corner"), (2.2, "i, j, k"), (4.7, "weight")):
        write(axes, left + x, 0.8, text, weight="bold")
    for number, (corner, weight) in enumerate(zip(corners, weights, strict=True)):
        y = 1.6 + 0.65 * number
        write(axes, left, y, number)
        write(axes, left + 2.2, y, ", ".join(map(str, corner)))
        write(axes, left + 4.7, y, f"{weight:.3f}")
    position = ", ".join(f"{p:.1f}" for p in point)
    write(axes, left - 0.6, 7.3, f"point: (u, v, w) = ({position})", ORANGE, ha="left")
    write(axes, left - 0.6, 8.0, "The volume of the blue box, over 8,", BLUE, ha="left")
    write(axes, left - 0.6, 8.6, "is the weight of corner 7.", BLUE, ha="left")
    return figure


def _project(position) -> tuple[float, float]:
    """A point of the cell on the canvas: w goes right, v up, and u back."""
    u, v, w = position
    return 4.9 + 2.4 * w + 1.1 * u, 4.9 - 2.4 * v - 0.9 * u


def _box(axes: Axes, low, high, **options) -> None:
    """The twelve edges of a box between two corners."""
    for a, b in itertools.combinations(np.ndindex(2, 2, 2), 2):
        if np.sum(np.not_equal(a, b)) == 1:
            ends = [_project(np.where(corner, high, low)) for corner in (a, b)]
            axes.plot(*np.transpose(ends), **options)


def draw_concatenate() -> Figure:
    """Two arrays with padded channels, their join, and its parts."""
    sizes, extents = (3, 6), (4, 8)
    arrays = [
        (base + 10 * np.arange(2)[:, None] + np.arange(extent)).astype("f4")
        for base, extent in zip((11, 51), extents, strict=True)
    ]
    for array, size in zip(arrays, sizes, strict=True):
        array[:, size:] = np.nan  # not read
    joined = jaxops.concatenate(arrays, axis=1, sizes=sizes, padded_size=12)
    parts = jaxops.split(joined[:, :9], sizes, axis=1, padded_sizes=extents)

    figure, axes = canvas(19, 12)
    blue, orange = [PALE_BLUE] * 3, [PALE_ORANGE] * 6
    for left, top, name, table, colors in (
        (3, 0.7, "a", arrays[0], [*blue, WHITE]),
        (9, 0.7, "b", arrays[1], [*orange, WHITE, WHITE]),
        (4, 5, "y", joined, [*blue, *orange, WHITE, WHITE, WHITE]),
        (3, 9.3, "a", parts[0], [*blue, WHITE]),
        (9, 9.3, "b", parts[1], [*orange, WHITE, WHITE]),
    ):
        texts = [["nan" if np.isnan(v) else int(v) for v in row] for row in np.asarray(table)]
        cells(axes, left, top, texts, colors)
        write(axes, left - 0.5, top + 1, name, weight="bold")
    for y, call in (
        (3.05, "y = concatenate([a, b], axis=1, sizes=(3, 6), padded_size=12)"),
        (7.35, "a, b = split(y[:, :9], (3, 6), axis=1, padded_sizes=(4, 8))"),
    ):
        axes.annotate(
            "", (4, y + 1.6), (4, y), arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1.2}
        )
        write(axes, 4.5, y + 0.8, call, ha="left")
    return figure


DRAWINGS = {
    "lightweight_conv": draw_lightweight_conv,
    "dynamic_conv": draw_dynamic_conv,
    "conv2d": draw_conv2d,
    "im2col": draw_im2col,
    "focal_loss": draw_focal_loss,
    "grid_sample": draw_grid_sample,
    "trilinear": draw_trilinear,
    "concatenate": draw_concatenate,
}


def draw(folder: pathlib.Path, names) -> None:
    """Writes the pictures of those names to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name in names:
            DRAWINGS[name]().savefig(folder / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    """Draws all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DRAWINGS))
    parser.add_argument("--to", type=pathlib.Path, default=PICTURES, metavar="FOLDER")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(DRAWINGS):
        parser.error(f"no picture is named {', '.join(sorted(unknown))}")
    draw(arguments.to, arguments.names or DRAWINGS)


if __name__ == "__main__":
    main()
