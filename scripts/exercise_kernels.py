"""Runs the kernels of every variant once and compares them with NumPy.

`scripts/verify.sh` runs this script under compute-sanitizer, so its arrays and programs are
small and few. NumPy loops over the taps give the expected values, because compiling
`jaxops.reference` for every filter would take most of the time.

python scripts/exercise_kernels.py [OPERATOR ...] [--platform cuda|cpu]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops._families import sequences
from jaxops.grid_sample import taps as taps_family

DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYOUTS = ("NTC", "NCT")
# T, C and the numbers of heads: the first sizes are divisible by vector widths and include heads of
# 16 channels; the others are odd.
SIZES = ((72, 48, (3, 6, 48)), (65, 33, (3, 33)))
# Sequences long enough for the kernels of single channels.
LONG_SIZES = ((528, 40, (5, 40)),)
TAPS = (3, 7, 31, 70)
DILATIONS = (1, 2)
BATCH = 2  # sequences a call
GROUP = 2  # calls under vmap, each with its own filters
# Rows of few vectors, whole ones and not: B, T, C, the numbers of heads and taps.
SHORT_ROWS = ((5, 16, 40, (2, 40), (3, 7, 15)), (37, 9, 33, (3, 33), (3, 7, 15)))
# Causal rows of whole vectors, whose kernels know the number of taps: threads that have sequences,
# channels or parts of a row to share; and several sequences of a thread, the last of them fewer.
CAUSAL_ROWS = (
    (5, 16, 40, (2, 40), (2, 3, 4, 5, 6, 7, 8)),
    (2, 2112, 6, (3,), (2, 3, 4, 6, 8)),
    (1, 776, 24, (24,), (3, 4, 7)),
    (8191, 8, 72, (72,), (4,)),
)
# Enough short sequences in NTC for the kernel whose threads read whole windows; the last of their
# segments has one step, or few, and a vector of channels has one filter, one each, or some.
MANY_WINDOWS = (909, 9, 72, (2, 36, 72), (3, 8))
# Threads have several sequences, and the last of them fewer.
MANY_SHORT_ROWS = (17001, 8, 64, (64,), (7,))


def computed(options, x, weight, bias, g):
    """Every compared result, by name. The arguments have a leading dimension for vmap."""

    def function(x, weight, bias, activation=None):
        return jaxops.lightweight_conv(x, weight, bias=bias, activation=activation, **options)

    def value_and_gradients(x, weight, bias, g):
        y, pullback = jax.vjp(function, x, weight, bias)
        return dict(zip(("y", "dx", "dweight", "dbias"), (y, *pullback(g)), strict=True))

    x0, weight0, bias0, g0 = x[0], weight[0], bias[0], g[0]
    by_input = jax.vjp(lambda x: function(x, weight0, bias0), x0)[1]
    by_weight = jax.vjp(lambda weight: function(x0, weight, bias0), weight0)[1]
    return {
        "together": value_and_gradients(x0, weight0, bias0, g0),
        "by input alone": by_input(g0)[0],
        "by weight alone": by_weight(g0)[0],
        "silu": function(x0, weight0, bias0, activation="silu"),
        "vmap": jax.vmap(value_and_gradients)(x, weight, bias, g),
    }


def expected(options, x, weight, bias, g):
    """The results of `computed`, in float64."""
    x, weight, bias, g = (a.astype(np.float64) for a in (x, weight, bias, g))
    if options["data_format"] == "NCT":
        x, g = x.swapaxes(-1, -2), g.swapaxes(-1, -2)
    time, channels = x.shape[-2:]
    heads, taps = weight.shape[-2:]
    dilation = options["dilation"]
    reach = (taps - 1) * dilation
    before = reach if options["padding"] == "causal" else reach // 2
    padded = np.pad(x, [(0, 0), (0, 0), (before, reach - before), (0, 0)])
    filters = weight.repeat(channels // heads, axis=1)

    y = np.broadcast_to(bias[:, None, None, :], x.shape).copy()
    d_padded = np.zeros_like(padded)
    dweight = np.zeros_like(weight)
    for k in range(taps):
        steps = slice(k * dilation, k * dilation + time)
        tap = filters[:, None, None, :, k]
        y += tap * padded[:, :, steps]
        d_padded[:, :, steps] += tap * g
        by_channel = (g * padded[:, :, steps]).sum(axis=(1, 2))
        dweight[..., k] = by_channel.reshape(GROUP, heads, -1).sum(axis=-1)
    dx = d_padded[:, :, before : before + time]
    dbias = g.sum(axis=(1, 2))
    silu = y[0] / (1 + np.exp(-y[0]))
    if options["data_format"] == "NCT":
        y, dx, silu = (a.swapaxes(-1, -2) for a in (y, dx, silu))
    whole = {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}
    return {
        "together": {name: a[0] for name, a in whole.items()},
        "by input alone": dx[0],
        "by weight alone": dweight[0],
        "silu": silu,
        "vmap": whole,
    }


def random_arguments(seed, dtype, layout, time, channels, heads, taps, batch=BATCH):
    """x, weight, bias and cotangent, rounded to `dtype`."""
    rng = np.random.default_rng(seed)
    rows = (time, channels) if layout == "NTC" else (channels, time)
    shapes = ((batch, *rows), (heads, taps), (channels,), (batch, *rows))
    return [rng.normal(size=(GROUP, *shape)).astype(jnp.dtype(dtype)) for shape in shapes]


def tolerance(dtype, terms=1):
    """Relative to the largest entry: the rounding of the result, and of the sum before it."""
    accumulated = "float64" if dtype == "float64" else "float32"
    roundings = 64 * max(1, terms / 2**12) ** 0.5
    return float(jnp.finfo(dtype).eps) + roundings * float(jnp.finfo(accumulated).eps)


def exercise(device, dtype, layout, size):
    """Runs one program of all filters; returns (cases compared, descriptions of wrong ones)."""
    time, channels, all_heads = size
    filters = list(itertools.product(all_heads, TAPS, DILATIONS))
    return exercise_filters(device, dtype, layout, (BATCH, time, channels), filters)


def exercise_short_rows(device, dtype, size):
    """The same of short rows."""
    *shape, all_heads, all_taps = size
    filters = list(itertools.product(all_heads, all_taps, (1,)))
    return exercise_filters(device, dtype, "NCT", shape, filters)


def exercise_causal_rows(device, dtype, size):
    """The same of causal filters."""
    *shape, all_heads, all_taps = size
    filters = list(itertools.product(all_heads, all_taps, (1,)))
    return exercise_filters(device, dtype, "NCT", shape, filters, ("causal",))


def exercise_windows(device, dtype, size):
    """The same of short sequences in NTC."""
    *shape, all_heads, all_taps = size
    filters = list(itertools.product(all_heads, all_taps, (1, 2)))
    return exercise_filters(device, dtype, "NTC", shape, filters)


def exercise_filters(device, dtype, layout, shape, filters, paddings=("causal", "same")):
    """The same of some filters: (heads, taps, dilation)."""
    batch, time, channels = shape
    paddings = itertools.cycle(paddings)
    options = [
        {"padding": padding, "dilation": dilation, "data_format": layout}
        for (_, _, dilation), padding in zip(filters, paddings, strict=False)
    ]
    arguments = [
        random_arguments(i, dtype, layout, time, channels, heads, taps, batch)
        for i, (heads, taps, _) in enumerate(filters)
    ]

    def program(arguments):
        return [computed(o, *a) for o, a in zip(options, arguments, strict=True)]

    got = jax.jit(program)(jax.device_put(arguments, device))
    want = [expected(o, *a) for o, a in zip(options, arguments, strict=True)]

    wrong = []
    compared = 0
    allowed = tolerance(dtype, batch * time)
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(got))
    for (path, a), b in zip(flat, jax.tree.leaves(want), strict=True):
        compared += 1
        a = np.asarray(a, np.float64)
        error = np.max(np.abs(a - b)) / np.max(np.abs(b))
        if not error <= allowed:  # NaN is not
            heads, taps, _ = filters[path[0].idx]
            wrong.append(
                f"{dtype}, T={time}, C={channels}, H={heads}, K={taps}, {options[path[0].idx]}, "
                f"{jax.tree_util.keystr(path[1:])}: error {error:.1e}, "
                f"at most {allowed:.1e}"
            )
    return compared, wrong


# --- focal losses --------------------------------------------------------------------------------

# Rows that fill a thread's vectors, rows that do not, and rows of less than one vector.
CLASSES = (1, 3, 16, 80, 91, 1030)
ROWS = 37
# Many entries: numbers of them, of rows and of classes.
ENTRIES = (
    (1500, 1, 10),
    (1500, 4, 17),
    (1100, 33, 91),
    (1100, 40, 9),
    (600, 3, 300),
    (1100, 2, 530),
)
GAMMAS = (0.0, 0.5, 1.0, 2.0, 5.0)


def focal_losses(gammas, z, labels, soft, weight):
    """Every compared result, by name, for each gamma; arguments are batched for vmap."""

    def sigmoid(z, labels, weight, gamma, reduction="sum"):
        return jaxops.sigmoid_focal_loss(
            z,
            labels,
            gamma=gamma,
            sample_weight=weight,
            reduction=reduction,
            ignore_index=1 if labels.dtype == jnp.int32 else None,
        )

    def softmax(z, labels, weight, gamma, reduction="none"):
        return jaxops.softmax_focal_loss(
            z, labels, gamma=gamma, sample_weight=weight, reduction=reduction
        )

    results = {}
    for gamma in gammas:
        for name, y, w in (
            ("hard", labels, weight[0]),
            ("soft", soft, weight[0]),
            ("boolean", soft > 0.5, None),
            ("boolean, weighted", soft > 0.5, weight[0]),
        ):
            sigmoid_of = functools.partial(sigmoid, gamma=gamma)
            scaled = jax.grad(lambda z, y, w, f=sigmoid_of: 0.5 * f(z, y, w))
            results[gamma, name] = {
                "loss": sigmoid_of(z[0], y[0], w, reduction="none"),
                "both": jax.value_and_grad(sigmoid_of)(z[0], y[0], w),
                "scaled gradient": scaled(z[0], y[0], w),
                "vmap": jax.vmap(sigmoid_of, (0, 0, None))(z, y, w),
                "vmap of both": jax.vmap(jax.value_and_grad(sigmoid_of), (0, 0, None))(z, y, w),
                "vmap of a gradient": jax.vmap(scaled, (0, 0, None))(z, y, w),
            }
        softmax_of = functools.partial(softmax, gamma=gamma)
        total = functools.partial(softmax_of, reduction="sum")
        value, pullback = jax.vjp(lambda z, f=softmax_of: f(z, labels[0], weight[0]), z[0])
        results[gamma, "softmax"] = {
            "loss": value,
            "gradient": pullback(jnp.ones_like(value))[0],
            "both": jax.value_and_grad(total)(z[0], labels[0], weight[0]),
            "vmap": jax.vmap(total, (0, 0, None))(z, labels, weight[0]),
            "vmap of both": jax.vmap(jax.value_and_grad(total), (0, 0, None))(z, labels, weight[0]),
        }
    return results


def expected_focal_losses(gammas, z, labels, soft, weight):
    """The results of `losses`, in float64."""
    z, soft, weight = (a.astype(np.float64) for a in (z, soft, weight))
    classes = z.shape[-1]
    one_hot = (labels[..., None] == np.arange(classes)).astype(np.float64)
    counted = (labels != 1)[..., None]
    p = 1 / (1 + np.exp(-z))
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    share = e / e.sum(axis=-1, keepdims=True)

    def sigmoid(y, weight, gamma):
        entropy = y * np.logaddexp(0, -z) + (1 - y) * np.logaddexp(0, z)
        wrong = y * (1 - p) + (1 - y) * p
        factor = (0.25 * y + 0.75 * (1 - y)) * weight * wrong**gamma
        slope = gamma * (1 - 2 * y) * p * (1 - p) / wrong * entropy + (p - y)
        return factor * entropy, factor * slope

    results = {}
    for gamma in gammas:
        for name, y, w in (
            ("hard", one_hot, weight[:1, :, None] * counted),
            ("soft", soft, weight[:1, :, None]),
            ("boolean", (soft > 0.5).astype(np.float64), np.ones((1, 1, 1))),
            ("boolean, weighted", (soft > 0.5).astype(np.float64), weight[:1, :, None]),
        ):
            loss, slope = sigmoid(y, w, gamma)
            results[gamma, name] = {
                "loss": loss[0],
                "both": (loss[0].sum(), slope[0]),
                "scaled gradient": 0.5 * slope[0],
                "vmap": loss.sum(axis=(1, 2)),
                "vmap of both": (loss.sum(axis=(1, 2)), slope),
                "vmap of a gradient": 0.5 * slope,
            }
        hit = (share * one_hot).sum(-1)
        known = (hit > 0) & (classes > 1)  # the loss of one class is zero
        py = np.where(known, hit, 0.5)
        factor = 0.25 * weight[0] * known
        by_log = (1 - py) ** gamma - gamma * py * np.log(py) * (1 - py) ** (gamma - 1)
        loss = -factor * (1 - py) ** gamma * np.log(py)
        gradient = (factor * by_log)[..., None] * (share - one_hot)
        results[gamma, "softmax"] = {
            "loss": loss[0],
            "gradient": gradient[0],
            "both": (loss[0].sum(), gradient[0]),
            "vmap": loss.sum(axis=1),
            "vmap of both": (loss.sum(axis=1), gradient),
        }
    return results


def exercise_focal(device, dtype, group, rows, classes):
    """The comparisons of `exercise`, for the focal losses."""
    rng = np.random.default_rng(classes)
    shape = (group, rows, classes)
    z = (2 * rng.normal(size=shape)).astype(jnp.dtype(dtype))
    labels = rng.integers(-1, classes + 1, shape[:2]).astype(np.int32)
    soft = rng.uniform(size=shape).astype(jnp.dtype(dtype))
    weight = rng.uniform(0.5, 2, shape[:2]).astype(jnp.dtype(dtype))
    arguments = (z, labels, soft, weight)
    gammas = GAMMAS if dtype != "float64" else GAMMAS[-2:]
    got = jax.jit(functools.partial(focal_losses, gammas))(*jax.device_put(arguments, device))
    want = expected_focal_losses(gammas, *arguments)

    wrong = []
    compared = 0
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(got))
    for (path, a), b in zip(flat, jax.tree.leaves(want), strict=True):
        compared += 1
        error = np.max(np.abs(np.asarray(a, np.float64) - b)) / max(np.max(np.abs(b)), 1e-3)
        if not error <= 2 * tolerance(dtype):
            wrong.append(
                f"{dtype}, {shape}, {jax.tree_util.keystr(path)}: error {error:.1e}, "
                f"at most {2 * tolerance(dtype):.1e}"
            )
    return compared, wrong


# These sums have enough logits to go through shared memory; tiles cut some rows.
LONG_SUMS = ((209_731, 80), (46_091, 365), (50_000, 80))


def exercise_long_sum(device, dtype, rows, classes):
    """The comparison of `exercise`, for a sum of many losses, with and without targets."""
    rng = np.random.default_rng(classes)
    z = (2 * rng.normal(size=(rows, classes)).astype(np.float32)).astype(jnp.dtype(dtype))
    labels = rng.integers(-1, classes + 1, rows).astype(np.int32)

    @jax.jit
    def program(z, labels):
        return jaxops.sigmoid_focal_loss(z, labels, gamma=2.0, alpha=0.25, reduction="sum")

    got = program(*jax.device_put((z, labels), device))
    wide = z.astype(np.float64)
    p = 1 / (1 + np.exp(-wide))
    losses = 0.75 * p**2 * np.logaddexp(0, wide)
    hit = (labels >= 0) & (labels < classes)
    at = np.flatnonzero(hit), labels[hit]
    losses[at] = 0.25 * (1 - p[at]) ** 2 * np.logaddexp(0, -wide[at])
    return compared(f"{dtype}, ({rows}, {classes})", got, losses.sum(), "float32", 64)


# Rows that a lane, several lanes, a warp or blocks reduce; some are whole vectors long, some not. A
# single cluster of blocks cannot reduce all rows of a case. Two cases have enough rows for the
# kernels of large 16-bit arrays. Warps sum batch entries of three of the rows of up to 128 bytes.
SOFTMAX_ROWS = (
    (60_003, 7),
    (40_001, 13),
    (20_001, 31),
    (10_007, 63),
    (17_003, 80),
    (17_003, 91),
    (52_501, 80),
    (4_211, 1_000),
    (1_031, 1_203),
    (67, 12_270),
    (67, 32_000),
    (5, 300_000),
)


def exercise_softmax_rows(device, dtype, rows, classes):
    """The comparison of `exercise`, for the sum of many softmax losses, and its gradient."""
    rng = np.random.default_rng(classes)
    z = (2 * rng.normal(size=(rows, classes)).astype(np.float32)).astype(jnp.dtype(dtype))
    labels = rng.integers(-1, classes, rows).astype(np.int32)

    def total(z, labels):
        return jaxops.softmax_focal_loss(z, labels, gamma=2.0, alpha=None, reduction="sum")

    def results(z, labels):
        return {
            "sum": total(z, labels),
            "both": jax.value_and_grad(total)(z, labels),
            "gradient": jax.grad(lambda z: 0.5 * total(z, labels))(z),
            "entries": jax.vmap(total)(*by_entry(z, labels)),
            "both by entry": jax.vmap(jax.value_and_grad(total))(*by_entry(z, labels)),
        }

    def by_entry(*arrays):
        """Three neighbouring rows as a batch entry; rows that are left belong to none."""
        return [a[: rows // 3 * 3].reshape(rows // 3, 3, *a.shape[1:]) for a in arrays]

    got = jax.jit(results)(*jax.device_put((z, labels), device))
    wide = z.astype(np.float64)
    e = np.exp(wide - wide.max(-1, keepdims=True))
    share = e / e.sum(-1, keepdims=True)
    known = labels >= 0
    py = np.where(known, share[np.arange(rows), labels], 0.5)
    losses = -((1 - py) ** 2) * np.log(py) * known
    slopes = known * ((1 - py) ** 2 - 2 * py * np.log(py) * (1 - py))
    gradient = slopes[:, None] * (share - (labels[:, None] == np.arange(classes)))
    entry_losses, entry_gradients = by_entry(losses, gradient)
    want = {
        "sum": losses.sum(),
        "both": (losses.sum(), gradient),
        "gradient": gradient / 2,
        "entries": entry_losses.sum(axis=1),
        "both by entry": (entry_losses.sum(axis=1), entry_gradients),
    }
    return compared(f"{dtype}, ({rows}, {classes})", got, want, dtype, 64)


# --- concatenation and splitting -----------------------------------------------------------------

# The number of rows, and the bytes of a row of each array.
MOVES = (
    # Common divisors of 16, 8, 4, 2 and 1 bytes, with one or several vectors a row; (3, 0, 14) has
    # an empty array.
    (40, (32, 48)),
    (40, (8, 24)),
    (40, (4, 20)),
    (40, (2, 6)),
    (40, (3, 0, 14)),
    (77, (126, 130)),
    (20_011, (32, 48)),
    (20_011, (8, 24)),
    (20_011, (4, 20)),
    (20_011, (2, 6)),
    (20_011, (3, 0, 14)),
    # Rows are smaller than 4 bytes, so a tile has many of them; the last tile is not full.
    (33_001, (3, 1)),
    (33_001, (1, 1, 1)),
    (33_001, (2, 4)),
    # Arrays of this number of rows are gathered in shared memory.
    (700_001, (3, 1)),
    (700_003, (1, 1, 1)),
    (350_003, (2, 4)),
    (40_001, (3, 7, 2, 9, 1, 30)),
    # Rows are read whole for all parts.
    (50_001, (4, 4)),
    (50_001, (4, 12, 8, 8)),
    (200_001, (6, 10)),
    (200_001, (3, 5)),
    # Equal arrays have 2 to 33 parts of every vector width, with 2 to 48 bytes each.
    (40, (2,) * 4),
    (40, (8,) * 3),
    (40, (16,) * 4),
    (40, (48, 48)),
    (40, (7,) * 33),
    (40, (14,) * 33),
    (40, (28,) * 33),
    (20_011, (12,) * 5),
    (3_001, (33,) * 33),
    # Arrays have whole vectors of 16 bytes: different numbers of them, and one.
    (10_007, (32, 16, 48, 16, 80)),
    (1_009, (16,) * 40),
    # Rows are longer than a tile.
    (3, (32_769, 40_003)),
    (3, (65_538, 80_002)),
    (2, (1_000_000, 65_552)),
    (2, (140_001, 1)),
    # There are more arrays than each of the tables holds.
    (5, (3,) * 9),
    (5, (16,) * 65),
    (5, (1, 2, 3) * 75),
    (3, (7,) * 479),
    (3, (4, 12) * 250),
)


def moves(widths, arrays, wholes, columns):
    """Every compared result, by name; all but `columns` have a leading dimension for vmap.

    Wholes and columns are arguments, because XLA takes minutes to compile hundreds of arrays.
    """
    unit = int(np.gcd.reduce(widths))
    sizes = [max(0, n - unit) for n in widths]

    def plain(arrays):
        return jaxops.concatenate(arrays, 1)

    def padded(arrays):
        return jaxops.concatenate(arrays, 1, sizes=sizes, padded_size=sum(widths) + unit)

    def split(whole):
        return jaxops.split(whole, widths, 1)

    def padded_split(whole):
        return jaxops.split(whole, widths, 1, padded_sizes=[n + unit for n in widths])

    first = [a[0] for a in arrays]
    # Every other array is shared by all entries of a vmap.
    batched = [i % 2 == 0 for i in range(len(arrays))]
    mixed = [a if b else a[0] for a, b in zip(arrays, batched, strict=True)]
    in_axes = ([0 if b else None for b in batched],)
    return {
        "concatenate": plain(first),
        "sizes and padding": padded(first),
        "axis 0": jaxops.concatenate(columns, 0),
        "vmap": jax.vmap(plain, in_axes)(mixed),
        "vmap of sizes and padding": jax.vmap(padded, in_axes)(mixed),
        "split": split(wholes[0]),
        "padded split": padded_split(wholes[0]),
        "vmap of split": jax.vmap(split)(wholes),
        "the first": jaxops.concatenate([wholes[0]], 1, sizes=widths[:1]),
    }


def expected_moves(widths, arrays):
    """The results of `moves`, in NumPy."""
    unit = int(np.gcd.reduce(widths))
    rows = arrays[0].shape[1]
    zeros = np.zeros((rows, unit), np.uint8)

    def padded(arrays):
        valid = [a[:, : max(0, n - unit)] for a, n in zip(arrays, widths, strict=True)]
        missing = sum(widths) + unit - sum(v.shape[1] for v in valid)
        return np.concatenate([*valid, np.zeros((rows, missing), np.uint8)], 1)

    first = [a[0] for a in arrays]
    other = [a[1 if i % 2 == 0 else 0] for i, a in enumerate(arrays)]
    whole = np.concatenate(first, 1)
    return {
        "concatenate": whole,
        "sizes and padding": padded(first),
        "axis 0": whole.T,
        "vmap": np.stack([whole, np.concatenate(other, 1)]),
        "vmap of sizes and padding": np.stack([padded(first), padded(other)]),
        "split": tuple(first),
        "padded split": tuple(np.concatenate([a, zeros], 1) for a in first),
        "vmap of split": tuple(arrays),
        "the first": first[0],
    }


def exercise_moves(device, rows, widths):
    """The comparisons of `exercise`, for bytes that must be equal."""
    rng = np.random.default_rng(rows)
    arrays = [rng.integers(0, 256, (2, rows, n), np.uint8) for n in widths]
    inputs = arrays, np.concatenate(arrays, 2), [np.ascontiguousarray(a[0].T) for a in arrays]
    program = jax.jit(functools.partial(moves, widths))
    got = jax.device_get(program(*jax.device_put(inputs, device)))
    want = expected_moves(widths, arrays)
    wrong = [
        f"{rows} rows of {len(widths)} arrays, {widths[:4]}..., {name}"
        for name in want
        if not all(map(np.array_equal, jax.tree.leaves(got[name]), jax.tree.leaves(want[name])))
    ]
    return len(want), wrong


# --- interpolation -------------------------------------------------------------------------------

# Rows of whole sectors, of 16 bytes and of other sizes, and rows longer than a tile.
WIDTHS = (1, 2, 3, 4, 8, 13, 14, 16, 22, 24, 32, 33, 64, 130)
CELLS = 301
# Some widths exceed those of the kernels of small calls.
CELLS_OF = {1: 33_001, 3: 33_001, 13: 9_001, 14: 9_001, 33: 9_001}


def compared(name, got, want, dtype, terms):
    """(results compared, descriptions of wrong ones) of trees of arrays."""
    wrong = []
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(got))
    for (path, a), b in zip(flat, jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        allowed = tolerance(dtype) + terms * float(jnp.finfo(jnp.promote_types(dtype, "f4")).eps)
        error = np.max(np.abs(a - b)) / np.max(np.abs(b))
        if not error <= allowed:
            where = jax.tree_util.keystr(path)
            wrong.append(f"{name}, {where}: error {error:.1e}, at most {allowed:.1e}")
    return len(flat), wrong


def interpolations(function, values, points, g):
    """Every compared result, by name; slopes are derivatives along the points."""

    def slopes(values, points):
        return jax.jvp(lambda p: function(values, p), (points,), (points,))[1]

    value, pull = jax.vjp(function, values, points)
    _, pull_slopes = jax.vjp(slopes, values, points)
    return {
        "value": value,
        "together": pull(g),
        "by values alone": jax.vjp(lambda v: function(v, points), values)[1](g)[0],
        "by points alone": jax.vjp(lambda p: function(values, p), points)[1](g)[0],
        "slopes": slopes(values, points),
        "slopes by values": pull_slopes(g)[0],
        "vmap": jax.vmap(function, (None, 0))(values, jnp.stack([points, points / 2])),
    }


def expected_interpolations(sums, values, points, g, step=0.01):
    """The results of `interpolated`, from sums(points) -> (weights, entries), each (count,
    corners).

    Two steps must not cross a kink.
    """
    rows = values.reshape(-1, values.shape[-1])

    def value(points):
        weights, entries = sums(points)
        return np.einsum("pc,pcf->pf", weights, rows[entries])

    def by_values(weights, entries):
        total = np.zeros_like(rows)
        np.add.at(total, entries, weights[..., None] * g[:, None])
        return total.reshape(values.shape)

    def moved(direction):
        # Weights are at most cubic, for which these differences are exact.
        one, two = (
            sums(points + n * step * direction)[0] - sums(points - n * step * direction)[0]
            for n in (1, 2)
        )
        return (8 * one - two) / (12 * step), sums(points)[1]

    by_points = np.stack(
        [
            np.einsum("pc,pcf,pf->p", w, rows[e], g)
            for w, e in map(moved, np.eye(points.shape[1])[:, None])
        ],
        axis=-1,
    )
    weights, entries = moved(points)
    return {
        "value": value(points),
        "together": (by_values(*sums(points)), by_points),
        "by values alone": by_values(*sums(points)),
        "by points alone": by_points,
        "slopes": np.einsum("pc,pcf->pf", weights, rows[entries]),
        "slopes by values": by_values(weights, entries),
        "vmap": np.stack([value(points), value(points / 2)]),
    }


def corner_weights(lower, upper):
    """Products of one factor an axis, (count, corners), from factors (count, axes)."""
    corners = itertools.product((lower, upper), repeat=lower.shape[1])
    return np.stack([np.prod([f[:, a] for a, f in enumerate(c)], axis=0) for c in corners], axis=-1)


def exercise_trilinear(device, dtype, width):
    """The comparisons of `exercise`, for interpolation in cells."""
    rng = np.random.default_rng(width)
    cells = CELLS_OF.get(width, CELLS)
    features = rng.normal(size=(cells, 8, width)).astype(jnp.dtype(dtype))
    points = rng.uniform(-1, 1, (cells, 3)).astype(jnp.dtype(dtype))
    g = rng.normal(size=(cells, width)).astype(jnp.dtype(dtype))

    def function(features, points):
        return jaxops.trilinear_interpolate(features, points)

    def sums(points):
        entries = np.arange(cells)[:, None] * 8 + np.arange(8)
        return corner_weights((1 - points) / 2, (1 + points) / 2), entries

    program = jax.jit(functools.partial(interpolations, function))
    got = program(*jax.device_put((features, points, g), device))
    want = expected_interpolations(sums, *(a.astype(np.float64) for a in (features, points, g)))
    return compared(f"{dtype}, F={width}", got, want, dtype, 64)


# A volume with more entries is a large one.
LARGE = 1 << 16


def exercise_grid_sample(device, dtype, sizes, deterministic):
    """The comparisons of `exercise`, for sampling at points of which many share a cell."""
    wrong, count = [], 0
    n = np.array(sizes)
    # No cache holds a large volume, and its points are enough to be sorted.
    is_large = n.prod() > LARGE
    widths = (32,) if is_large else (1, 5, 16, 33)
    # All points are inside, where both paddings have the same values by kernels of their own.
    frames = ((False, "border"), (True, "zeros"))
    for width, (align_corners, padding_mode) in itertools.product(widths, frames):
        points_of = n.prod() // 2 if is_large else 600
        if dtype == "float32" and width == 5 and not deterministic and not is_large:
            points_of = 53_000  # kernels whose threads locate their own points take fewer
        elif dtype == "float32" and width == 33 and not deterministic:
            points_of = 8_000  # enough points for several elements of a row per thread
        rng = np.random.default_rng(width)
        volume = rng.normal(size=(*sizes, width)).astype(jnp.dtype(dtype))
        # Points are in float32, away from kinks, also after rounding to float16.
        shape = (points_of, n.size)
        x = rng.integers(0, n - 1, shape) + rng.uniform(0.2, 0.8, shape)
        # A large volume's brick gets more points than one warp sums.
        of_one_cell = 3000 if is_large else 400
        x[:of_one_cell] = n // 2 + rng.uniform(0.2, 0.8, (of_one_cell, n.size))
        points = (2 * x / (n - 1) if align_corners else (2 * x + 1) / n) - 1
        points = points.astype("float64" if dtype == "float64" else "float32")
        g = rng.normal(size=(points_of, width)).astype(jnp.dtype(dtype))
        options = {
            "align_corners": align_corners,
            "padding_mode": padding_mode,
            "deterministic": deterministic,
        }

        def sums(points, n=n, align_corners=align_corners):
            x = (points + 1) / 2 * (n - 1) if align_corners else ((points + 1) * n - 1) / 2
            low = np.floor(x).astype(int)
            corners = [
                np.ravel_multi_index((low + c).T, n)
                for c in itertools.product((0, 1), repeat=n.size)
            ]
            return corner_weights(1 - (x - low), x - low), np.stack(corners, axis=-1)

        function = functools.partial(jaxops.grid_sample, **options)
        program = jax.jit(functools.partial(interpolations, function))
        got = program(*jax.device_put((volume, points, g), device))
        wide = [a.astype(np.float64) for a in (volume, points, g)]
        want = expected_interpolations(sums, *wide, step=0.09 / n.max())
        name = f"{dtype}, {sizes}, F={width}, {options}"
        terms = max(600, of_one_cell if is_large else points_of // 10)
        found, bad = compared(name, got, want, dtype, terms)
        count, wrong = count + found, wrong + bad
    return count, wrong


# Axes, taps and channels of stencils: linear and cubic ones, and those of hash grids.
STENCILS = (
    *((1, 8, 2), (1, 8, 16), (1, 4, 33)),
    *((2, 4, 1), (2, 4, 16), (2, 1, 5)),
    *((3, 2, 40), (3, 4, 3), (3, 4, 8)),
)


def stencil_results(volume, indices, weights, g):
    """The sums of entries, and both gradients."""

    def function(volume, weights):
        return taps_family.sum_taps(volume, indices, weights, 1)

    y, pull = jax.vjp(function, volume, weights)
    return {"value": y, "gradients": pull(g)}


def exercise_stencils(device, dtype, axes, taps, width):
    """The comparisons of `exercise`, for sums of entries: of one volume, and of a batch of them."""
    rng = np.random.default_rng(taps)
    count, sizes = 700, (6, 5, 7)[:axes]
    wide = "float64" if dtype == "float64" else "float32"
    # Some entries are outside.
    indices = rng.integers(-1, np.array(sizes)[:, None] + 1, (BATCH, count, axes, taps))
    indices = indices.astype(np.int32)
    weights = [rng.normal(size=(BATCH, count, taps)).astype(wide) for _ in sizes]
    g = rng.normal(size=(BATCH, count, width)).astype(jnp.dtype(dtype))
    wrong, found = [], 0
    for volumes in (1, BATCH):
        volume = rng.normal(size=(volumes, *sizes, width)).astype(jnp.dtype(dtype))
        got = jax.jit(stencil_results)(*jax.device_put((volume, indices, weights, g), device))
        rows, cotangent = (a.astype(np.float64) for a in (volume, g))
        factors = [w.astype(np.float64) for w in weights]
        value, by_rows = np.zeros_like(cotangent), np.zeros_like(rows)
        by_weights = [np.zeros_like(w) for w in factors]
        which = np.arange(BATCH)[:, None] % volumes
        for combination in itertools.product(range(taps), repeat=axes):
            at = [indices[..., a, k] for a, k in enumerate(combination)]
            inside = np.all([(i >= 0) & (i < n) for i, n in zip(at, sizes, strict=True)], axis=0)
            entry = (which, *(np.clip(i, 0, n - 1) for i, n in zip(at, sizes, strict=True)))
            of_taps = [w[..., k] for w, k in zip(factors, combination, strict=True)]
            weight = np.prod(of_taps, axis=0) * inside
            value += weight[..., None] * rows[entry]
            np.add.at(by_rows, entry, weight[..., None] * cotangent)
            dots = (rows[entry] * cotangent).sum(-1) * inside
            for a, k in enumerate(combination):
                others = [w for b, w in enumerate(of_taps) if b != a]
                by_weights[a][..., k] += dots * np.prod(others, axis=0)
        want = {"value": value, "gradients": (by_rows, by_weights)}
        name = f"taps {dtype}, {axes} axes, {taps} taps, F={width}, {volumes} volumes"
        more, bad = compared(name, got, want, dtype, 64 + BATCH * count)
        wrong, found = wrong + bad, found + more
    return found, wrong


# --- steps of the lightweight and of the dynamic convolution -------------------------------------

# Sequences, slots, C and H.
STEPS = ((3, 5, 48, 48), (2, 4, 33, 3), (64, 64, 2048, 2048))
# Taps, dilation and steps, and whether every step has a filter, of which a softmax is taken or not.
STEP_KINDS = (
    (1, 1, 1, None),
    (4, 1, 1, None),
    (8, 1, 3, None),
    (40, 1, 1, None),
    (4, 1, 2, None),
    (11, 1, 2, None),
    (3, 2, 1, None),
    (1, 1, 2, True),
    (4, 1, 1, False),
    (4, 1, 1, True),
    (3, 1, 3, False),
    (11, 1, 2, True),
    (8, 1, 2, True),
    (40, 1, 1, True),
    (3, 2, 1, True),
)


def exercise_steps(device, dtype, size):
    """Like `exercise`, of steps of the lightweight and of the dynamic convolution."""
    entries, slots, channels, heads = size
    rng = np.random.default_rng(channels)
    indices = np.int32(rng.permutation(slots)[:entries])
    indices[0] = -1  # padding, which reads zeros and writes nothing
    arguments, programs, want = {}, {}, {}
    for taps, dilation, steps, softmax in STEP_KINDS:
        name = f"{taps} taps, dilation {dilation}, {steps} steps, softmax {softmax}"
        reach = (taps - 1) * dilation
        filters = (heads, taps) if softmax is None else (entries, steps, heads, taps)
        shapes = (entries, steps, channels), (slots, reach, channels), filters, (channels,)
        arrays = [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]
        arguments[name] = arrays
        programs[name] = functools.partial(_steps, dilation, indices, softmax)
        x, state, weight, bias = (a.astype(np.float64) for a in arrays)
        if softmax:
            weight = np.exp(weight - weight.max(axis=-1, keepdims=True))
            weight /= weight.sum(axis=-1, keepdims=True)
        weight = np.broadcast_to(weight, (entries, steps, heads, taps))
        weight = weight.repeat(channels // heads, axis=2)
        y, new = np.broadcast_to(bias, x.shape).copy(), state.copy()
        for entry, slot in enumerate(indices):
            rows = np.concatenate([state[slot] * (slot >= 0), x[entry]])
            for k in range(taps):
                y[entry] += weight[entry, ..., k] * rows[k * dilation : k * dilation + steps]
            if slot >= 0:
                new[slot] = rows[len(rows) - reach :]
        want[name] = {"y": y, "state": new} if reach else {"y": y}
    program = jax.jit(lambda given: {n: programs[n](*given[n]) for n in programs})
    return compared(f"{dtype}, {size}", program(jax.device_put(arguments, device)), want, dtype, 12)


def _steps(dilation, indices, softmax, x, state, weight, bias):
    options = {"dilation": dilation, "bias": bias, "state_indices": indices}
    if softmax is None:
        y, new = jaxops.lightweight_conv_step(x, state, weight, **options)
    else:
        y, new = jaxops.dynamic_conv_step(x, state, weight, normalize=softmax, **options)
    return {"y": y, "state": new} if new.size else {"y": y}


# --- dynamic convolution -------------------------------------------------------------------------


def exercise_dynamic(device, dtype, layout, normalize, heads, taps):
    """Like `exercise`, with segments and a state."""
    time, channels = 37, 48
    rng = np.random.default_rng(taps)
    shapes = ((BATCH, time, channels), (BATCH, time, heads, taps), (BATCH, taps - 1, channels))
    x, weight, state = (rng.normal(size=s).astype(jnp.dtype(dtype)) for s in shapes)
    g = rng.normal(size=x.shape).astype(x.dtype)
    ids = np.cumsum(rng.random((BATCH, time)) < 0.1, axis=1)

    def swap(array):
        return array.swapaxes(1, 2) if layout == "NCT" else array

    def function(x, weight, state):
        return jaxops.dynamic_conv(
            x,
            weight,
            normalize=normalize,
            segment_ids=ids,
            initial_state=state,
            data_format=layout,
        )

    def program(g, *arguments):
        y, pullback = jax.vjp(function, *arguments)
        return dict(zip(("y", "dx", "dweight", "dstate"), (y, *pullback(g)), strict=True))

    arguments = jax.device_put((swap(g), swap(x), weight, swap(state)), device)
    got = jax.jit(program)(*arguments)
    g, x, weight, state = (a.astype(np.float64) for a in (g, x, weight, state))
    p = np.exp(weight) / np.exp(weight).sum(-1, keepdims=True) if normalize else weight
    # The state is the first segment's; steps after the padded sequence have none.
    rows = np.concatenate([state, x], axis=1)
    numbers = np.pad(np.cumsum(np.diff(ids, axis=1) != 0, axis=1), [(0, 0), (taps, 0)])
    y, drows, dp = np.zeros(x.shape), np.zeros(rows.shape), np.zeros(p.shape)
    for k in range(taps):
        valid = (numbers[:, k : k + time] == numbers[:, taps - 1 :])[..., None]
        tap = np.repeat(p[..., k], channels // heads, axis=2)
        source = np.where(valid, rows[:, k : k + time], 0)
        y += tap * source
        drows[:, k : k + time] += np.where(valid, tap * g, 0)
        dp[..., k] = (g * source).reshape(BATCH, time, heads, -1).sum(-1)
    dweight = p * (dp - (p * dp).sum(-1, keepdims=True)) if normalize else dp
    want = {
        "y": swap(y),
        "dx": swap(drows[:, taps - 1 :]),
        "dweight": dweight,
        "dstate": swap(drows[:, : taps - 1]),
    }
    name = f"dynamic_conv {dtype}, {layout}, softmax {normalize}, H={heads}, K={taps}"
    return compared(name, got, want, dtype, 4 * taps + channels)


# --- patches -------------------------------------------------------------------------------------

# Items have 16 bytes and every smaller size, in one to three dimensions.
IMAGES = (
    ("NHWC", (9, 7), (3, 2)),
    ("NCHW", (9, 7), (3, 2)),
    ("NWC", (40,), (5,)),
    ("NCW", (40,), (5,)),
    ("NDHWC", (5, 4, 6), (2, 3, 2)),
    ("NCDHW", (5, 4, 6), (2, 3, 2)),
)
CHANNELS = (1, 2, 3, 4, 8, 40)


def exercise_patches(device, dtype, data_format, sizes, taps):
    """The comparisons of `exercise`, for patches and their sums."""
    wrong, count = [], 0
    rank, channels_last = len(sizes), data_format.endswith("C")
    strides, dilation, padding = (2, 1, 2)[:rank], (1, 2, 1)[:rank], ((1, 2),) * rank
    options = {"strides": strides, "dilation": dilation, "padding": padding}
    for channels in CHANNELS:
        rng = np.random.default_rng(channels)
        shape = (3, *sizes, channels) if channels_last else (3, channels, *sizes)
        x = rng.normal(size=shape).astype(jnp.dtype(dtype))
        # The source index of each entry of the patches; padding has the index after the image.
        entries = np.arange(x.size).reshape(shape)
        around = [(0, 0)] * x.ndim
        first = 1 if channels_last else 2
        around[first : first + rank] = padding
        padded = np.pad(entries, around, constant_values=x.size)
        reaches = [(k - 1) * d + 1 for k, d in zip(taps, dilation, strict=True)]
        axes = tuple(range(first, first + rank))
        views = np.lib.stride_tricks.sliding_window_view(padded, reaches, axes)
        cut = [slice(None)] * views.ndim
        for d in range(rank):
            cut[first + d] = slice(None, None, strides[d])
            cut[x.ndim + d] = slice(None, None, dilation[d])
        views = views[tuple(cut)]
        if channels_last:
            source = np.moveaxis(views, 1 + rank, -1)
        else:
            source = np.moveaxis(views, range(2, 2 + rank), range(2 + rank, 2 + 2 * rank))
        g = rng.normal(size=source.shape).astype(jnp.dtype(dtype))

        def program(x, g, options=options):
            def function(x):
                return jaxops.im2col(x, taps, data_format=data_format, **options)

            value, pull = jax.vjp(function, x)
            return {"value": value, "gradient": pull(g)[0], "vmap": jax.vmap(function)(x[None])[0]}

        got = jax.jit(program)(*jax.device_put((x, g), device))
        value = np.append(x.astype(np.float64).ravel(), 0)[source]
        summed = np.zeros(x.size + 1)
        np.add.at(summed, source, g.astype(np.float64))
        want = {"value": value, "gradient": summed[:-1].reshape(shape), "vmap": value}
        found, bad = compared(f"{dtype}, {data_format}, C={channels}", got, want, dtype, 16)
        count, wrong = count + found, wrong + bad
    return count, wrong


# --- convolution ---------------------------------------------------------------------------------

# (images, H, W), channels, outputs, taps, strides, dilation and groups: tiles of every width and
# height, partial tiles, rows in several strips, and taps in one group and one by one.
CONVOLUTIONS = (
    ((3, 14, 14), 64, 136, 3, 1, 1, 1),
    ((2, 9, 67), 40, 24, 3, 1, 2, 1),
    ((2, 31, 33), 3, 64, 7, 2, 1, 1),
    ((2, 40, 48), 3, 64, 7, 2, 1, 1),
    ((2, 20, 140), 1, 72, 5, 1, 1, 1),
    ((2, 17, 30), 96, 72, 3, 2, 1, 1),
    # The sums of an input gradient with strides: two launches of 8, and windows with gaps.
    ((2, 21, 24), 40, 48, 4, 4, 1, 1),
    ((2, 20, 23), 64, 32, 3, 3, 2, 1),
    ((1, 40, 40), 64, 64, 3, 1, 15, 1),
    ((2, 13, 19), 48, 32, 3, 2, 1, 2),
    # Clusters of blocks share the long sums of few pixels.
    ((1, 7, 7), 264, 136, 3, 1, 1, 1),
    ((2, 7, 9), 512, 32, 1, 2, 1, 1),
    # Kernels of true float32 and float64 take these cases: odd channels, few outputs, odd groups.
    ((2, 9, 11), 37, 41, 3, 1, 1, 1),
    ((2, 9, 67), 24, 3, 3, 2, 1, 1),
    ((2, 13, 19), 27, 30, 3, 2, 1, 3),
)
# Small groups have kernels of every dtype: loops with strides one and two, partial strips of odd
# channels, and windows of all kinds.
SMALL_GROUPS = (
    ((3, 14, 14), 64, 64, 3, 1, 1, 64),
    ((2, 13, 19), 37, 37, 3, 2, 1, 37),
    ((2, 15, 18), 38, 38, 3, 2, 1, 38),
    ((2, 19, 21), 40, 40, 5, 1, 1, 40),
    ((2, 19, 21), 33, 33, 5, 2, 1, 33),
    ((2, 28, 30), 36, 36, 7, 1, 1, 36),
    ((2, 13, 19), 12, 36, 3, 1, 1, 12),
    ((2, 13, 19), 32, 32, 3, 1, 1, 8),
    ((2, 13, 19), 32, 32, 3, 2, 1, 8),
    ((2, 13, 19), 15, 20, 3, 3, 2, 5),
    ((2, 24, 24), 20, 20, 4, 1, 3, 20),
)
# Dtypes and precisions: float32 is rounded to TF32 or not.
CONVOLVED = (*((dtype, None) for dtype in DTYPES), ("float32", "highest"))


def exercise_convolution(
    device, dtype, precision, sizes, channels, outputs, taps, stride, dilation, groups
):
    """The comparisons of `exercise`, for images: by kernels if there are any, else by patches."""
    rng = np.random.default_rng(taps)
    reach = (taps - 1) * dilation
    low = reach // 2
    x = rng.normal(size=(*sizes, channels)).astype(jnp.dtype(dtype))
    shape = (taps, taps, channels // groups, outputs)
    kernel = rng.normal(size=shape).astype(jnp.dtype(dtype))
    options = {"strides": stride, "dilation": dilation, "padding": low, "groups": groups}

    def function(x, kernel, **more):
        return jaxops.conv2d(x, kernel, precision=precision, **options, **more)

    g = rng.normal(size=jax.eval_shape(function, x, kernel).shape).astype(jnp.dtype(dtype))
    bias = rng.normal(size=outputs).astype(jnp.dtype(dtype))

    def program(x, kernel, bias, g):
        y, pull = jax.vjp(function, x, kernel)
        return {
            "y": y,
            "with bias and activation": function(x, kernel, bias=bias, activation="relu"),
            "gradients": pull(g),
            "vmap": jax.vmap(function, (0, None))(x[None], kernel),
        }

    got = jax.jit(program)(*jax.device_put((x, kernel, bias, g), device))
    wide_x, wide_kernel, wide_g = (a.astype(np.float64) for a in (x, kernel, g))
    padded = np.pad(wide_x, ((0, 0), (low, low), (low, low), (0, 0)))
    y, d_padded, d_kernel = np.zeros(g.shape), np.zeros(padded.shape), np.zeros(kernel.shape)

    def grouped(array):
        return array.reshape(*array.shape[:-1], groups, -1)

    for i, j in itertools.product(range(taps), repeat=2):
        rows, columns = (
            slice(n * dilation, n * dilation + (out - 1) * stride + 1, stride)
            for n, out in zip((i, j), g.shape[1:3], strict=True)
        )
        seen, tap = grouped(padded[:, rows, columns]), grouped(wide_kernel[i, j])
        of_g = grouped(wide_g)
        y += np.einsum("nhwgi,igo->nhwgo", seen, tap).reshape(y.shape)
        dx = np.einsum("nhwgo,igo->nhwgi", of_g, tap)
        d_padded[:, rows, columns] += dx.reshape(*dx.shape[:3], channels)
        d_kernel[i, j] = np.einsum("nhwgi,nhwgo->igo", seen, of_g).reshape(shape[2:])
    dx = d_padded[:, low : low + sizes[1], low : low + sizes[2]]
    want = {
        "y": y,
        "with bias and activation": np.maximum(y + bias.astype(np.float64), 0),
        "gradients": (dx, d_kernel),
        "vmap": y[None],
    }
    # Products of float32 may be products of TF32, whose mantissa has as many bits as float16's.
    is_small = groups > 1 and min(channels, outputs) < 8 * groups
    is_rounded = dtype == "float32" and precision is None and not is_small
    rounded = "float16" if is_rounded else dtype
    return compared(f"{dtype}, {sizes}, {channels} to {outputs}", got, want, rounded, 64)


# (images, H, W), channels, outputs, taps, strides and dilation of kernel gradients: whole rows and
# strips of rows, several phases, and 3 channels.
SPOILED = (
    ((3, 9, 11), 64, 72, 3, 1, 1),
    ((9, 7, 7), 128, 64, 3, 1, 1),
    ((3, 30, 192), 64, 64, 3, 1, 1),
    ((3, 17, 9), 64, 64, 3, 2, 1),
    ((3, 30, 31), 64, 64, 3, 1, 2),
    ((3, 13, 16), 3, 64, 7, 2, 1),
)
# The entries of x and the cotangent that are not finite.
SPOILS = {
    "nowhere": ([], []),
    "x in a corner": ([(0, 0, 0, 1)], []),
    "x at a border": ([(2, 3, 0, 0), (1, -1, -1, -1)], []),
    "x everywhere": ([...], []),
    "the cotangent": ([], [(0, 1, 2, 3)]),
}


def exercise_not_finite(device, dtype, sizes, channels, outputs, taps, stride, dilation):
    """Kernel gradients of images and cotangents with one or many NaN or Inf."""
    rng = np.random.default_rng(taps)
    low = (taps - 1) * dilation // 2
    options = {"strides": stride, "dilation": dilation, "padding": low}
    kernel = jnp.zeros((taps, taps, channels, outputs), dtype)
    x = rng.normal(size=(*sizes, channels)).astype(jnp.dtype(dtype))
    shape = jax.eval_shape(lambda *a: jaxops.conv2d(*a, **options), x, kernel).shape
    g = rng.normal(size=shape).astype(jnp.dtype(dtype))

    @jax.jit
    def gradient(x, g):
        return jax.vjp(lambda kernel: jaxops.conv2d(x, kernel, **options), kernel)[1](g)[0]

    count, wrong = 0, []
    for (name, places), value in itertools.product(SPOILS.items(), (np.inf, np.nan)):
        arrays = x.copy(), g.copy()
        for array, found in zip(arrays, places, strict=True):
            for place in found:
                array[place] = value
        got = np.asarray(gradient(*jax.device_put(arrays, device)), np.float64)
        padded = np.pad(arrays[0].astype(np.float64), ((0, 0), (low, low), (low, low), (0, 0)))
        columns = arrays[1].astype(np.float64).reshape(-1, outputs)
        want = np.empty(got.shape)
        for i, j in itertools.product(range(taps), repeat=2):
            rows, steps = (
                slice(n * dilation, n * dilation + (out - 1) * stride + 1, stride)
                for n, out in zip((i, j), shape[1:3], strict=True)
            )
            with np.errstate(invalid="ignore"):
                want[i, j] = padded[:, rows, steps].reshape(-1, channels).T @ columns
        finite = np.isfinite(want)
        near = np.allclose(got[finite], want[finite], rtol=0.01, atol=0.02 * len(columns) ** 0.5)
        count += 1
        if not near or not np.array_equal(got[~finite], want[~finite], equal_nan=True):
            wrong.append(f"{dtype}, {sizes}, {channels} to {outputs}, {value} in {name}: differs")
    return count, wrong


# --- lightweight convolution of segments and states ----------------------------------------------

PACKED_TAPS = (3, 7, 31)
PACKED_RESULTS = ("y", "dx", "dweight", "dbias", "dstate")
#: Lengths of segments: shorter and longer than filters, and next to the size of vectors and tiles.
LENGTHS = (9, 1, 30, 4, 2, 16)


def packed_sources(starts, padding, dilation, taps, state_rows=0, slots=None):
    """Rows of a state and of x after them that taps (T, K) read, and the row after both for none.

    `state_rows` are those of all states; `slots` (T,) is the slot of each step's segment.
    """
    time = len(starts)
    s = np.arange(time)[:, None] + np.arange(taps) * dilation - padding
    own = starts[:, None]
    is_inside = (s >= 0) & (s < time)
    is_of_segment = is_inside & (starts[np.clip(s, 0, time - 1)] == own)
    source = np.where(is_of_segment, state_rows + s, state_rows + time)
    if slots is not None:
        row = slots[:, None] * padding + padding + s - own
        return np.where((s < own) & (row >= 0) & (slots[:, None] >= 0), row, source)
    if state_rows:
        return np.where((s < 0) & (s >= own), padding + s, source)
    return source


def packed_expected(source, rows, weight, bias, g):
    """y and the gradients of (rows, weight, bias) of one sequence, in float64."""
    rows = np.concatenate([rows, np.zeros((1, rows.shape[1]))])
    depth = rows.shape[1] // weight.shape[0]
    filters = weight.repeat(depth, axis=0)
    read = rows[source]  # (T, K, C)
    y = np.einsum("tkc,ck->tc", read, filters) + bias
    drows = np.zeros_like(rows)
    np.add.at(drows, source, np.einsum("tc,ck->tkc", g, filters))
    dweight = np.einsum("tkc,tc->ck", read, g).reshape(*weight.shape[:1], depth, -1).sum(axis=1)
    return y, drows[:-1], dweight, g.sum(axis=0)


def packed_starts(time, first):
    """The first step of each step's segment, which is `first` for the first segment."""
    ends = np.cumsum(np.resize(LENGTHS, time))
    starts = np.concatenate([[first], ends[ends < time]])
    return starts[np.searchsorted(np.maximum(starts, 0), np.arange(time), side="right") - 1]


def exercise_packed(device, dtype, layout, size):
    """Segments, states of rows, and for "NTC" states of segments, in one program."""
    time, channels, all_heads = size
    filters = list(itertools.product(all_heads, PACKED_TAPS, DILATIONS))
    programs, arguments, want = [], [], []
    paddings = itertools.cycle(("causal", "causal", "same"))
    kinds = ("segments", "segments and state", "state", *(["slots"] if layout == "NTC" else []))
    for i, ((heads, taps, dilation), kind) in enumerate(itertools.product(filters, kinds)):
        padding = "causal" if kind == "slots" else next(paddings)
        rng = np.random.default_rng(i)
        reach = (taps - 1) * dilation
        before = reach if padding == "causal" else reach // 2

        def normal(*shape, rng=rng):
            return rng.normal(size=shape).astype(jnp.dtype(dtype))

        weight, bias = normal(heads, taps), normal(channels)
        options = {"dilation": dilation}
        if kind == "slots":
            x, g = normal(time, channels), normal(time, channels)
            starts = packed_starts(time, 0)
            firsts, numbers = np.unique(starts, return_inverse=True)
            cache = normal(len(firsts) + 2, before, channels)
            indices = rng.permutation(len(firsts)).astype(np.int32)
            indices[0] = -1
            ends = np.append(firsts, time).astype(np.int32)

            def function(x, weight, bias, cache, ends=ends, indices=indices, options=options):
                return jaxops.ragged_conv(
                    x,
                    weight,
                    ends,
                    initial_state=cache,
                    state_indices=indices,
                    bias=bias,
                    **options,
                )

            source = packed_sources(
                starts, before, dilation, taps, cache.shape[0] * before, indices[numbers]
            )
            wide = [a.astype(np.float64) for a in (x, weight, bias, g, cache)]
            rows = np.concatenate([wide[4].reshape(-1, channels), wide[0]])
            y, drows, dweight, dbias = packed_expected(source, rows, wide[1], wide[2], wide[3])
            dcache, dx = np.split(drows, [cache.shape[0] * before])
            operands = (x, weight, bias, cache)
            results = (y, dx, dweight, dbias, dcache.reshape(cache.shape))
        else:
            has_ids, has_state = "segments" in kind, "state" in kind
            options |= {"padding": padding, "data_format": layout}
            x, g = normal(BATCH, time, channels), normal(BATCH, time, channels)
            state = normal(BATCH, before if has_state else 0, channels)
            first = -before if has_state or not has_ids else 0
            starts = packed_starts(time, first) if has_ids else np.full(time, first)
            source = packed_sources(starts, before, dilation, taps, state.shape[1])
            ids = np.broadcast_to(np.unique(starts, return_inverse=True)[1], (BATCH, time)) % 3

            def function(x, weight, bias, *state, ids=ids, has_ids=has_ids, options=options):
                return jaxops.lightweight_conv(
                    x,
                    weight,
                    bias=bias,
                    segment_ids=ids if has_ids else None,
                    initial_state=state[0] if state else None,
                    **options,
                )

            wide = [a.astype(np.float64) for a in (x, weight, bias, g, state)]
            each = [
                packed_expected(
                    source, np.concatenate([wide[4][b], wide[0][b]]), wide[1], wide[2], wide[3][b]
                )
                for b in range(BATCH)
            ]
            y, drows, dweight, dbias = (np.stack(a) for a in zip(*each, strict=True))
            dstate, dx = np.split(drows, [state.shape[1]], axis=1)
            operands = (x, weight, bias, *((state,) if has_state else ()))
            results = [y, dx, dweight.sum(axis=0), dbias.sum(axis=0), dstate][: len(operands) + 1]
            if layout == "NCT":
                x, g, y, dx, dstate = (np.swapaxes(a, 1, 2) for a in (x, g, y, dx, dstate))
                operands = (x, weight, bias, *((state.swapaxes(1, 2),) if has_state else ()))
                results = [y, dx, *results[2:4], dstate][: len(operands) + 1]
        programs.append(function)
        arguments.append((operands, g))
        want.append((f"{kind}, H={heads}, K={taps}, {options}", results))

    def program(arguments):
        got = []
        for function, (operands, g) in zip(programs, arguments, strict=True):
            y, pullback = jax.vjp(function, *operands)
            got.append((y, *pullback(g)))
        return got

    got = jax.device_get(jax.jit(program)(jax.device_put(arguments, device)))
    wrong, compared = [], 0
    for results, (name, expected) in zip(got, want, strict=True):
        for part, a, b in zip(PACKED_RESULTS, results, expected, strict=False):
            compared += 1
            a = np.asarray(a, np.float64)
            error = np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-30)
            if a.shape != b.shape or not error <= tolerance(dtype):  # NaN is not
                wrong.append(f"{dtype}, T={time}, C={channels}, {name}, {part}: error {error:.1e}")
    return compared, wrong


# Sizes (B, T, C) and the channels that repeat, for threads of one or two channels with ranges of 64
# steps, which is more than the 32 whose segments they compare at once.
LONG_RANGES = (("float32", (4, 600, 2047), 23), ("bfloat16", (8, 600, 2046), 62))


def exercise_long_ranges(device, dtype, size, different):
    """Segments in NTC for threads of many steps; sequences are equal, and channels repeat."""
    batch, time, channels = size
    times = channels // different
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    starts = packed_starts(time, 0)
    ids = np.broadcast_to(np.unique(starts, return_inverse=True)[1] % 3, (batch, time))
    wrong = []
    for taps in (3, 7):
        x, g = normal(time, different), normal(time, different)
        weight, bias = normal(different, taps), normal(different)
        operands = (
            np.tile(x, (batch, 1, times)),
            np.tile(weight, (times, 1)),
            np.tile(bias, times),
        )

        def program(x, weight, bias, g, ids=ids):
            def function(x, weight, bias):
                return jaxops.lightweight_conv(
                    x, weight, bias=bias, padding="causal", segment_ids=ids
                )

            y, pullback = jax.vjp(function, x, weight, bias)
            return y, *pullback(g)

        arguments = jax.device_put((*operands, np.tile(g, (batch, 1, times))), device)
        got = jax.device_get(jax.jit(program)(*arguments))
        wide = [a.astype(np.float64) for a in (x, weight, bias, g)]
        source = packed_sources(starts, taps - 1, 1, taps)
        y, dx, dweight, dbias = packed_expected(source, *wide)
        want = (y, dx, batch * dweight, batch * dbias)
        for part, a, b in zip(PACKED_RESULTS, got, want, strict=False):
            repeats = (batch, 1, times) if a.ndim == 3 else (times, 1)[: a.ndim]
            b = np.tile(b, repeats)
            error = np.max(np.abs(a.astype(np.float64) - b)) / np.max(np.abs(b))
            if a.shape != b.shape or not error <= tolerance(dtype, batch * time):  # NaN is not
                wrong.append(f"{dtype}, {size}, K={taps}, {part}: error {error:.1e}")
    return 8, wrong


# Steps of one launch and of two, no multiples of those of a block, and lengths of segments.
SEGMENTED = ((1, 1), (2049, 3), (8191, 2500), (8193, 8192), (70_001, 1), (1_100_000, 400_000))


def exercise_segment_starts(device, dtype, time, length):
    """The first steps of segments of equal length, of several rows."""
    steps = np.arange(time)
    numbers = [steps // length, (steps + length // 2) // length, np.zeros_like(steps)]
    ids = np.stack([n % 2 for n in numbers]).astype(dtype)
    found = jax.jit(lambda ids: sequences.segment_starts(ids, -2))(jax.device_put(ids, device))
    wrong = []
    for n, got in zip(numbers, np.asarray(found), strict=True):
        begins = np.flatnonzero(np.diff(n, prepend=n[0]))
        want = np.append(-2, begins)[np.searchsorted(begins, steps, side="right")]
        if not np.array_equal(got, want):
            wrong.append(f"segment_starts, {dtype}, {time} steps, segments of {length}")
    return len(numbers), wrong


EXERCISES = {
    "concatenate": (exercise_moves, MOVES),
    "conv2d": (
        exercise_convolution,
        (
            *((*kind, *case) for kind in CONVOLVED for case in CONVOLUTIONS),
            *((dtype, None, *case) for dtype in DTYPES for case in SMALL_GROUPS),
        ),
    ),
    "conv2d_not_finite": (
        exercise_not_finite,
        tuple((dtype, *case) for dtype in ("bfloat16", "float16") for case in SPOILED),
    ),
    "focal_loss": (
        exercise_focal,
        tuple(itertools.product(DTYPES, (GROUP,), (ROWS,), CLASSES)),
    ),
    "focal_loss_entries": (
        exercise_focal,
        tuple((dtype, *entries) for dtype in DTYPES for entries in ENTRIES),
    ),
    "focal_loss_sum": (
        exercise_long_sum,
        tuple((dtype, *shape) for dtype in DTYPES[:3] for shape in LONG_SUMS),
    ),
    "focal_loss_rows": (
        exercise_softmax_rows,
        tuple((dtype, *shape) for dtype in DTYPES for shape in SOFTMAX_ROWS),
    ),
    "dynamic_conv": (
        exercise_dynamic,
        tuple(itertools.product(DTYPES, LAYOUTS, (False, True), (3, 48), (4,))),
    ),
    "grid_sample": (
        exercise_grid_sample,
        (
            *itertools.product(DTYPES, ((6, 5, 7), (9, 6)), (False, True)),
            *itertools.product(("bfloat16", "float32"), ((80, 64, 72), (700, 500)), (False,)),
        ),
    ),
    "im2col": (
        exercise_patches,
        tuple((dtype, *image) for dtype in DTYPES for image in IMAGES),
    ),
    "lightweight_conv": (exercise, tuple(itertools.product(DTYPES, LAYOUTS, SIZES))),
    "lightweight_conv_causal": (
        exercise_causal_rows,
        tuple(itertools.product(DTYPES[:3], CAUSAL_ROWS)),
    ),
    "lightweight_conv_channels": (
        exercise,
        tuple(itertools.product(("float16", "bfloat16"), LAYOUTS, LONG_SIZES)),
    ),
    "lightweight_conv_short_rows": (
        exercise_short_rows,
        (*itertools.product(DTYPES, SHORT_ROWS), ("float32", MANY_SHORT_ROWS)),
    ),
    "lightweight_conv_windows": (
        exercise_windows,
        tuple(itertools.product(DTYPES[:3], (MANY_WINDOWS,))),
    ),
    "lightweight_conv_step": (exercise_steps, tuple(itertools.product(DTYPES, STEPS))),
    "lightweight_conv_packed": (
        exercise_packed,
        tuple(itertools.product(DTYPES, LAYOUTS, SIZES)),
    ),
    # Enough steps for tensor cores and a kernel of those that read states of segments.
    "lightweight_conv_state_steps": (
        exercise_packed,
        tuple(itertools.product(DTYPES[:3], ("NTC",), ((490, 48, (3,)),))),
    ),
    "lightweight_conv_long_ranges": (exercise_long_ranges, LONG_RANGES),
    "segment_starts": (
        exercise_segment_starts,
        tuple((dtype, *case) for dtype in ("int8", "int32", "int64") for case in SEGMENTED),
    ),
    "taps": (
        exercise_stencils,
        tuple((dtype, *stencil) for dtype in DTYPES for stencil in STENCILS),
    ),
    "trilinear": (exercise_trilinear, tuple(itertools.product(DTYPES, WIDTHS))),
}


def main() -> int:
    """Returns 1 if a result is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=", ".join(EXERCISES))
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    unknown = set(options.operators) - set(EXERCISES)
    if unknown:
        parser.error(f"there are {', '.join(EXERCISES)}, not {', '.join(unknown)}")
    os.environ["JAXOPS_NEW_KERNELS"] = "on"  # exercises those that no GPU has run yet, too
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu" if options.platform == "cpu" else "cuda,cpu")
    device = jax.devices(options.platform)[0]
    compared, wrong = 0, []
    for operator in options.operators or EXERCISES:
        function, cases = EXERCISES[operator]
        for case in cases:
            count, found = function(device, *case)
            compared += count
            wrong += found
    for line in wrong:
        print(line)
    print(f"{device.device_kind}: {compared - len(wrong)} of {compared} results as expected")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
