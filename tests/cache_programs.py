"""Runs sharded programs that differ in static options only, with a persistent compilation cache.

    python cache_programs.py DIRECTORY POINTER_IN_KEY ROUNDS COUNT

Takes the first COUNT programs, and prints as JSON a list for each one: whether its values were
right, and how often it was found in the cache. `test_compilation_cache.py` starts it in processes
of its own.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.monitoring
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.testing import platforms

#: Operators whose first argument alone is sharded.
CONVOLUTIONS = (
    jaxops.lightweight_conv,
    jaxops.ragged_conv,
    jaxops.conv2d,
    jaxops.conv_general_dilated,
    jaxops.conv_transpose,
)
RNG = np.random.default_rng(0)
DEVICES = 2


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def points(*shape):
    return RNG.uniform(-1.4, 1.4, shape).astype(np.float32)


def with_gradient(function):
    """Its results and their gradients with respect to the first argument."""

    def both(x, *rest):
        value, pull = jax.vjp(lambda x: function(x, *rest), x)
        return value, pull(jax.tree.map(lambda v: v * 0.5 + 1, value))

    return both


def step(*arrays, **options):
    """Without its derivative, whose program would tell the options apart."""
    return jaxops.lightweight_conv_step(*map(jax.lax.stop_gradient, arrays), **options)


SEQUENCES = normal(4, 6, 6), normal(2, 3)
IMAGES = normal(4, 6, 6, 2), normal(3, 3, 2, 4)
# A program: its operator, its arguments, and options by which it differs from the others.
CASES = [
    (jaxops.lightweight_conv, SEQUENCES, options)
    for options in (
        *({"padding": p} for p in (0, 1, 2)),
        {"padding": 2, "dilation": 2},
        {"padding": 2, "activation": "relu"},
        {"padding": 2, "activation": "silu"},
        {"padding": 2, "data_format": "NCT"},
        {"padding": 1, "segment_ids": np.arange(24, dtype=np.int32).reshape(4, 6) // 4},
        {"padding": 2, "segment_ids": np.arange(24, dtype=np.int32).reshape(4, 6) // 4},
    )
]
CASES += [
    (jaxops.ragged_conv, (SEQUENCES[0][0], SEQUENCES[1], np.array([0, 4, 6])), options)
    for options in ({}, {"dilation": 2})
]
CASES += [
    (step, (normal(4, 6), normal(4, 2, 6), SEQUENCES[1]), options)
    for options in ({}, {"activation": "silu"})
]
CASES += [
    (jaxops.dynamic_conv, (SEQUENCES[0], normal(4, 6, 2, 3)), options)
    for options in (
        {"padding": 1},
        {"padding": 2},
        {"padding": 2, "dilation": 2},
        {"padding": 2, "normalize": True},
    )
]
CASES += [
    (jaxops.dynamic_conv_step, (normal(4, 6), normal(4, 2, 6), normal(4, 2, 3)), options)
    for options in ({}, {"normalize": True})
]
CASES += [
    (jaxops.grid_sample, (normal(4, 5, 6, 2), points(4, 7, 2)), options)
    for options in (
        {},
        {"method": "nearest"},
        {"padding_mode": "border"},
        {"padding_mode": "reflection"},
        {"padding_mode": "border", "align_corners": False},
        {"padding_mode": "border", "deterministic": True},
    )
]
CASES += [
    (jaxops.conv2d, IMAGES, options)
    for options in (
        {"padding": [(1, 1), (1, 1)]},
        {"padding": [(0, 2), (1, 1)]},
        {"padding": [(2, 2), (2, 2)], "dilation": 2},
        {"padding": [(1, 1), (1, 1)], "activation": "relu"},
        {"padding": [(1, 1), (1, 1)], "precision": "highest"},
    )
]
CASES += [
    (jaxops.conv_general_dilated, (normal(4, 2, 6, 6), normal(4, 2, 3, 3)), options)
    for options in (
        {"window_strides": (1, 1), "padding": [(1, 1), (1, 1)]},
        {"window_strides": (1, 1), "padding": [(2, 0), (1, 1)]},
    )
]
CASES += [
    (jaxops.conv_transpose, (IMAGES[0], normal(3, 3, 2, 2)), {"strides": (1, 1), **options})
    for options in ({"padding": "SAME"}, {"padding": [(2, 0), (1, 1)]})
]
CASES += [
    (jaxops.im2col, IMAGES[:1], {"kernel_size": 3, **options})
    for options in (
        {"padding": 1},
        {"padding": [(0, 2), (1, 1)]},
        {"padding": 2, "dilation": 2},
    )
]
CASES += [
    (jaxops.col2im, (normal(4, 6, 6, 3, 3, 2),), {"input_shape": (4, 6, 6, 2), "padding": padding})
    for padding in (1, [(0, 2), (1, 1)])
]
CASES += [
    (lambda *arrays, **options: jaxops.concatenate(arrays, -1, **options), SEQUENCES[:1] * 2, o)
    for o in ({"sizes": (2, 3)}, {"sizes": (3, 2)}, {"sizes": (2, 2), "padded_size": 5})
]
CASES += [
    (jaxops.split, SEQUENCES[:1], {"sizes": sizes, "axis": -1, "padded_sizes": (5, 5)})
    for sizes in ((2, 4), (4, 2))
]
CASES += [
    (loss, (normal(8, 5), np.arange(8) % 6), {"ignore_index": i, "reduction": reduction})
    for loss in (jaxops.sigmoid_focal_loss, jaxops.softmax_focal_loss)
    for reduction in ("none", "sum")
    for i in (None, 0, 2)
]
CASES += [(jaxops.trilinear_interpolate, (normal(8, 8, 3), points(8, 3)), {})]


def main(directory: str, pointer_in_key: bool, rounds: int, count: int) -> None:
    platforms.prepare()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", not pointer_in_key)
    found = []
    jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
    hit = "/jax/compilation_cache/cache_hits"

    mesh = jax.make_mesh(
        (DEVICES,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )
    batch, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())

    def program(function, options):
        return jax.jit(with_gradient(lambda *operands: function(*operands, **options)))

    cases = CASES[:count]
    wants = [program(f, options)(*arguments) for f, arguments, options in cases]
    report = [[True, 0] for _ in cases]
    for _ in range(rounds):
        for i, ((function, arguments, options), want) in enumerate(zip(cases, wants, strict=True)):
            jax.clear_caches()
            shardings = [
                batch,
                *(whole if function in CONVOLUTIONS else batch for _ in arguments[1:]),
            ]
            placed = jax.device_put(arguments, tuple(shardings))
            found.clear()
            got = program(function, options)(*placed)
            report[i][1] += found.count(hit)
            report[i][0] &= all(
                np.allclose(g, w, rtol=1e-4, atol=1e-5)
                for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "True", int(sys.argv[3]), int(sys.argv[4]))
