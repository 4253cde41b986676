"""The launches of the CUDA handlers, in dry runs: see `jaxops.testing.kernels`.

JAXOPS_RANDOM_CALLS is the least number of random calls of handlers for each operator, and
JAXOPS_RANDOM_SEED selects other calls.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import types

import jax
import jax.numpy as jnp
import kernel_table
import pytest
from dry_run import cases, random_programs

import jaxops
from jaxops._core import native
from jaxops.testing import kernels
from jaxops.testing.measure import vjp_of

try:
    DRY_RUN = kernels.dry_run()
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)
if "90a" not in native.cuda_architectures():
    pytest.skip("kernels for 90a were not compiled", allow_module_level=True)

H200, A100, L4, B200 = kernel_table.DEVICES
RANDOM_CALLS = int(os.environ.get("JAXOPS_RANDOM_CALLS", "600"))
RANDOM_SEED = int(os.environ.get("JAXOPS_RANDOM_SEED", "0"))

#: The number of random programs for each kernel family, and the functions in them, by the operator
#: of a table if its name differs.
FORCED_PROGRAMS = RANDOM_CALLS // 10
FORCED = {
    "conv": ["conv2d", "conv_general_dilated"],
    "col2im": ["im2col"],
    "lightweight_conv_part": ["lightweight_conv"],
    "lightweight_conv_packed_part": ["lightweight_conv_packed"],
}
#: Few random programs run these families.
RARE = {("grid_sample", "bricks"), ("lightweight_conv", "nct/vectors")}

SHARED = {"8.0": 163, "8.6": 99, "9.0": 227, "10.0": 227, "12.0": 99}
PROCESSORS = (16, 58, 108, 132, 148)
# Programs are the same for all GPUs but those of 9.0.
HOPPERS, OTHERS = (
    [
        kernels.Device(f"{capability} with {count} multiprocessors", capability, count, shared)
        for capability, shared in SHARED.items()
        if (capability == "9.0") == is_hopper
        for count in PROCESSORS
    ]
    for is_hopper in (True, False)
)


def check(call, gpu):
    """A call of a handler on a GPU, whose launches must be valid."""
    outcome = kernels.run(call, gpu)
    assert not outcome.error, f"{call} on {gpu}: {outcome.error}. {outcome.violation}"
    assert not outcome.violation, f"{call} on {gpu}: {outcome.violation}"
    return outcome


@functools.cache
def kernel(name):
    """The mangled name of one kernel of this name."""
    return next(k for k in DRY_RUN.kernel_names() if kernels.short_name(k).startswith(f"{name}<"))


# --- the checks find faults ----------------------------------------------------------------------

LAUNCHES = {
    "no blocks": ({"grid": (0, 1, 1)}, "its grid is (0, 1, 1)"),
    "too many blocks": ({"grid": (1 << 31, 1, 1)}, "its grid is (2147483648, 1, 1)"),
    "too many rows of blocks": ({"grid": (1, 65536, 1)}, "its grid is (1, 65536, 1)"),
    "too many planes of blocks": ({"grid": (1, 1, 65536)}, "its grid is (1, 1, 65536)"),
    "no threads": ({"threads": (32, 0, 1)}, "its blocks have (32, 0, 1) threads"),
    "too many threads": ({"threads": (1025, 1, 1)}, "its blocks have (1025, 1, 1) threads"),
    "threads beyond the launch bounds": ({"threads": (512, 1, 1)}, "its launch bounds are 256"),
    "no leave for shared memory": (
        {"dynamic_bytes": 49153},
        "it has 49153 bytes of dynamic shared memory, and opted in to 49152",
    ),
    "more shared memory than there is": (
        {"dynamic_bytes": 49153, "opt_in": 232449},
        "opts in to 232449 + 0 bytes of shared memory, and blocks have at most 232448",
    ),
    "clusters of 9": ({"grid": (9, 1, 1), "cluster": (9, 1, 1)}, "its clusters are (9, 1, 1)"),
    "clusters that do not divide": (
        {"grid": (6, 1, 1), "cluster": (4, 1, 1)},
        "its clusters (4, 1, 1) do not divide its grid (6, 1, 1)",
    ),
    "clusters before 9.0": (
        {"gpu": A100, "grid": (4, 1, 1), "cluster": (4, 1, 1)},
        "it has clusters, which a GPU of 8.0 lacks",
    ),
    "wgmma on another GPU": (
        {"gpu": B200, "name": "ConvolveFew", "threads": (128, 1, 1)},
        "it is made of wgmma instructions, which a GPU of 10.0 lacks",
    ),
    "another stream": ({"is_on_stream": False}, "it is not on the stream of the call"),
}


def try_launch(gpu=H200, name="SumPatches", **options):
    launch = {
        "device": gpu.as_tuple(),
        "grid": (4, 1, 1),
        "threads": (256, 1, 1),
        "dynamic_bytes": 0,
        "opt_in": 0,
        "cluster": (1, 1, 1),
        "is_on_stream": True,
    } | options
    return DRY_RUN.try_launch(kernel=kernel(name), **launch)


@pytest.mark.parametrize("name", LAUNCHES)
def test_wrong_launch_is_found(name):
    options, fragment = LAUNCHES[name]
    assert fragment in try_launch(**options)


def test_right_launch_is_none():
    assert try_launch() == ""
    assert try_launch(grid=(2**31 - 1, 1, 1)) == ""
    assert try_launch(grid=(8, 65535, 65535), cluster=(8, 1, 1)) == ""
    assert try_launch(dynamic_bytes=232448, opt_in=232448) == ""


MEMSETS = {
    "before": (-4, 8),
    "after": ((1 << 20) - 4, 8),
    "more than there is": (0, (1 << 20) + 1),
}


@pytest.mark.parametrize("name", MEMSETS)
def test_wrong_memset_is_found(name):
    assert "is not in a result of the call" in DRY_RUN.try_memset(H200.as_tuple(), *MEMSETS[name])
    assert DRY_RUN.try_memset(H200.as_tuple(), 4, (1 << 20) - 4) == ""


MAPS = {
    "its base is not aligned": ({"offset": 8}, "its base is not aligned to 16 bytes"),
    "no rank": ({"dims": [], "strides": [], "box": [], "steps": []}, "its rank is 0"),
    "nothing in it": ({"dims": [64, 0]}, "dimension 1 is 0"),
    "too large": ({"dims": [64, 2**32 + 1]}, "dimension 1 is 4294967297"),
    "a stride of 8 bytes": ({"strides": [136]}, "stride 0 is 136 bytes"),
    "a stride of 2^40 bytes": ({"strides": [1 << 40]}, "stride 0 is 1099511627776 bytes"),
    "a large box": ({"box": [64, 257]}, "its box has 257 in dimension 1"),
    "rows of 8 bytes": ({"box": [4, 4], "swizzle_bytes": 0}, "rows of its box have 8 bytes"),
    "rows beyond the swizzle": ({"swizzle_bytes": 64}, "rows of its box have 128 bytes"),
    "large element strides": ({"steps": [1, 9]}, "element stride 1 is 9"),
    "outside of the buffer": ({"dims": [64, 8193]}, "are not in a buffer of the call"),
    "before 9.0": ({"gpu": L4}, "a GPU of 8.9 has no tensor maps"),
}


def try_map(gpu=H200, **options):
    tensor = {
        "device": gpu.as_tuple(),
        "offset": 0,
        "dims": [64, 8192],
        "strides": [128],
        "box": [64, 256],
        "steps": [1, 1],
        "swizzle_bytes": 128,
    }
    return DRY_RUN.try_tensor_map(**tensor | options)


@pytest.mark.parametrize("name", MAPS)
def test_wrong_tensor_map_is_found(name):
    options, fragment = MAPS[name]
    assert fragment in try_map(**options)
    assert try_map() == ""


def test_launcher_of_too_much_is_found():
    """A launcher that exceeds a GPU's resources fails, and the stub says why."""
    x, weight = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 9, 9, 64), (3, 3, 64, 64)))
    (call,) = kernels.record(jaxops.conv2d, x, weight, capability="9.0")
    check(call, H200)
    outcome = kernels.run(call, kernels.Device("less", "9.0", 132, 99))
    assert outcome.error.startswith("conv: ")
    assert "bytes of shared memory, and blocks have at most 101376" in outcome.violation


@pytest.mark.parametrize("is_gradient", [False, True])
def test_too_little_work_space_is_an_error(is_gradient):
    """Points are sorted if there is work space; without it the call is an error."""
    arguments = arrays(F32, (128, 128, 128, 16), (1 << 20, 3))
    function = jaxops.grid_sample
    if is_gradient:
        function = jax.grad(lambda *arrays: jaxops.grid_sample(*arrays).sum())
    *_, call = kernels.record(function, *arguments, capability="9.0")
    assert any(kernel.startswith("SortInto") for kernel in check(call, H200).kernels)
    *results, space = call.results
    half = dataclasses.replace(space, shape=(space.shape[0] // 2,))
    call = dataclasses.replace(call, results=(*results, half))
    assert "the work space must have" in kernels.run(call, H200).error


@pytest.mark.parametrize("channels", [0, 8])
def test_gradients_with_a_bias_and_without_work_space(channels):
    """The bias gradient is the last result then, and not a work space."""
    x, weight, bias = arrays(F32, (3, 20, channels), (4, 3), (channels,))

    def loss(x, weight, bias):
        return jaxops.lightweight_conv(x, weight, bias=bias).sum()

    calls = kernels.record(jax.grad(loss, (0, 1, 2)), x, weight, bias, capability="9.0")
    (call,) = (c for c in calls if c.target == "jaxops_lightweight_conv_backward")
    assert len(call.results) == (3 if channels == 0 else 4)
    check(call, H200)


def test_machine_code_is_known():
    """Every kernel has registers and launch bounds, and kernels with wgmma are recognised."""
    resources = kernels.resources()
    assert set(DRY_RUN.kernel_names()) == set(resources)
    assert all(registers for registers, *_ in resources.values())
    names = {kernels.short_name(k).split("<")[0] for k, r in resources.items() if r[-1]}
    assert {"ConvolveWgmma", "KernelGradWgmma", "ConvolveFew"} <= names
    assert not {"ConvolveMma", "ConvolveFma", "SumPatches"} & names


# --- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", random_programs.OPERATORS)
def test_random_calls(operator):
    calls = 0
    for seed in itertools.count(RANDOM_SEED):
        function, arguments = random_programs.make(operator, [seed])
        # Runs each program for one kind of GPU, on several devices of it.
        capability, gpus = ("9.0", HOPPERS) if seed % 2 else ("8.0", OTHERS)
        for call in kernels.record(function, *arguments, capability=capability):
            for i in range(4):
                check(call, gpus[(seed // 2 + 7 * i) % len(gpus)])
                calls += 1
        if calls >= RANDOM_CALLS:
            break


#: The error of a call that a family cannot run.
CANNOT = "cudaErrorNotSupported"


@pytest.mark.parametrize(
    ("operator", "family"),
    [
        (operator, family)
        for operator, directions in kernels.families().items()
        for family in sorted({name for names in directions.values() for name in names})
    ],
)
def test_a_family_runs_what_it_says_it_can(operator, family):
    """A forced family has valid launches, or refuses the call."""
    ran = 0
    for name in FORCED.get(operator, [operator]):
        for seed in range(RANDOM_SEED, RANDOM_SEED + FORCED_PROGRAMS):
            function, arguments = random_programs.make(name, [seed])
            capability, gpus = ("9.0", HOPPERS) if seed % 2 else ("8.0", OTHERS)
            for call in kernels.record(function, *arguments, capability=capability):
                with kernels.forcing(operator, family):
                    outcome = kernels.run(call, gpus[seed // 2 % len(gpus)])
                assert not outcome.violation, f"{call}: {outcome.violation}"
                assert not outcome.error or CANNOT in outcome.error, f"{call}: {outcome.error}"
                ran += bool(outcome.launches)
    assert ran or (operator, family) in RARE


def test_nothing_is_forced_afterwards():
    x, weight = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 9, 9, 64), (3, 3, 64, 64)))
    (call,) = kernels.record(jaxops.conv2d, x, weight, capability="9.0")
    chosen = check(call, H200)
    with kernels.forcing("conv", "mma"):
        forced = check(call, H200)
    assert chosen.kernels[0].startswith("ConvolveWgmma<")
    assert forced.kernels[0].startswith("ConvolveMma<")
    assert check(call, H200) == chosen
    with kernels.forcing("conv", "direct"):
        assert CANNOT in kernels.run(call, H200).error


def test_unknown_family():
    with (
        pytest.raises(ValueError, match=r"'conv' has the families \[.*'wgmma'\], got 'simt'"),
        kernels.forcing("conv", "simt"),
    ):
        pass


BF16, F32 = jnp.bfloat16, jnp.float32


def arrays(dtype, *shapes):
    return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


def rows(count, classes):
    """Logits and class ids."""
    return [*arrays(BF16, (count, classes)), *arrays(jnp.int32, (count,))]


def summed(function):
    return lambda x, labels: function(x, labels, reduction="sum")


PIECES = native.limits("concatenate")
CONV = native.limits("conv")
FEW_TAPS = CONV.max_few_tap_rows, CONV.max_few_row_entries // CONV.max_few_channels

# Sizes at the limits of grids, of 32-bit indices, and of what one call does.
EDGES = {
    "2^31 rows of one class": (jaxops.sigmoid_focal_loss, rows(1 << 31, 1)),
    "2^33 logits": (
        summed(jaxops.sigmoid_focal_loss),
        arrays(BF16, (1 << 26, 128), (1 << 26, 128)),
    ),
    "2^32 rows": (jaxops.softmax_focal_loss, rows(1 << 32, 4)),
    "2^31 cells": (jaxops.trilinear_interpolate, arrays(BF16, (1 << 31, 8, 1), (1 << 31, 3))),
    "2^31 points": (jaxops.grid_sample, arrays(BF16, (8, 8, 8, 1), (1 << 31, 3))),
    "2^31 points of stencils": (
        functools.partial(jaxops.grid_sample, method="cubic"),
        arrays(BF16, (8, 8, 1), (1 << 31, 2)),
    ),
    "2^32 entries of stencils": (
        functools.partial(jaxops.grid_sample, padding_mode="wrap"),
        arrays(BF16, (1 << 16, 1 << 16, 1), (1000, 2)),
    ),
    "65536 volumes": (jaxops.grid_sample, arrays(BF16, (65536, 4, 4, 4, 4), (65536, 9, 3))),
    "2^32 pixels": (
        functools.partial(jaxops.im2col, kernel_size=3),
        arrays(BF16, (1, 1 << 16, 1 << 16, 1)),
    ),
    "65536 images": (
        functools.partial(jaxops.im2col, kernel_size=3),
        arrays(F32, (65536, 9, 9, 8)),
    ),
    "2^34 joined": (
        lambda a, b: jaxops.concatenate([a, b], 1),
        arrays(F32, (1 << 20, 1 << 13), (1 << 20, 1 << 13)),
    ),
    "2^31 rows joined": (
        lambda a, b: jaxops.concatenate([a, b], 1),
        arrays(BF16, (1 << 31, 3), (1 << 31, 2)),
    ),
    "most pieces": (
        lambda *a: jaxops.concatenate(a, 1),
        arrays(BF16, *[(64, 3)] * PIECES.max_pieces),
    ),
    "most parts": (
        lambda a: jaxops.split(a, [3] * PIECES.max_parts, 1),
        arrays(BF16, (64, 3 * PIECES.max_parts)),
    ),
    "2^22 sequences": (jaxops.lightweight_conv, arrays(BF16, (1 << 22, 3, 64), (4, 3))),
    "a sequence of 2^30 - 1": (
        jaxops.lightweight_conv,
        arrays(BF16, (1, (1 << 30) - 1, 2), (1, 3)),
    ),
    "65536 images convolved": (jaxops.conv2d, arrays(BF16, (65536, 8, 8, 16), (3, 3, 16, 16))),
    "65536 outputs": (jaxops.conv2d, arrays(BF16, (1, 8, 8, 16), (3, 3, 16, 65536))),
    "65536 outputs in float32": (jaxops.conv2d, arrays(F32, (1, 8, 8, 16), (3, 3, 16, 65536))),
    "65535 groups": (
        functools.partial(jaxops.conv2d, groups=65535),
        arrays(BF16, (1, 8, 8, 65535), (3, 3, 1, 65535)),
    ),
    "most taps": (jaxops.conv2d, arrays(BF16, (2, 40, 40, 64), (8, CONV.max_taps // 8, 64, 64))),
    "few channels at their limits": (
        functools.partial(jaxops.conv2d, strides=CONV.max_stride),
        arrays(
            BF16,
            (2, 99, 99, CONV.max_few_channels),
            (*FEW_TAPS, CONV.max_few_channels, CONV.max_few_outputs),
        ),
    ),
    "2^31 pixels of depthwise": (
        functools.partial(jaxops.conv2d, groups=16),
        arrays(BF16, (1 << 15, 256, 256, 16), (3, 3, 1, 16)),
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    function, arguments = EDGES[name]
    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    cotangents = tuple(arrays(results[0].dtype, *(y.shape for y in results)))
    floats = tuple(i for i, a in enumerate(arguments) if jnp.issubdtype(a.dtype, jnp.floating))
    programs = [(function, arguments)]
    programs += [(vjp_of(function, m), (cotangents, *arguments)) for m in {(0,), floats}]
    for (function, arguments), gpu in itertools.product(programs, kernel_table.DEVICES):
        for call in kernels.record(function, *arguments, capability=gpu.compute_capability):
            check(call, gpu)


def more_pieces(*arrays):
    return jaxops.concatenate(arrays, 1)


def more_parts(array):
    return jaxops.split(array, [3] * (PIECES.max_parts + 1), 1)


MORE_PIECES = arrays(BF16, *[(64, 3)] * (PIECES.max_pieces + 1))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (more_pieces, MORE_PIECES),
        (more_parts, arrays(BF16, (64, 3 * (PIECES.max_parts + 1)))),
    ],
)
def test_more_than_the_limit_is_several_calls(function, arguments):
    calls = kernels.record(function, *arguments, capability="9.0")
    assert len(calls) == 2
    for call in calls:
        check(call, H200)


#: The sentence of a call that no kernel family, or not the one that is forced, can run.
REFUSED = "{}: {} run this call on a GPU of compute capability {} with code for sm "


def run_error(call, gpu):
    """The error of a call, without a launch."""
    outcome = kernels.run(call, gpu)
    assert outcome.error
    assert not outcome.launches
    return outcome.error


def test_one_call_of_more_than_the_limit_is_refused(monkeypatch):
    more = types.SimpleNamespace(max_pieces=PIECES.max_pieces + 1)
    limits = native.limits
    monkeypatch.setattr(
        native, "limits", lambda name: more if name == "concatenate" else limits(name)
    )
    (call,) = kernels.record(more_pieces, *MORE_PIECES, capability="9.0")
    error = run_error(call, H200)
    assert REFUSED.format("concatenate (move)", "no kernel family can", "9.0") in error


def test_a_family_that_cannot_run_a_call_is_named():
    x, weight = arrays(BF16, (2, 40, 64), (4, 3))
    (call,) = kernels.record(jaxops.lightweight_conv, x, weight, capability="8.0")
    with kernels.forcing("lightweight_conv", "nct/window"):
        error = run_error(call, A100)
    assert (
        REFUSED.format("lightweight_conv (forward)", "the family nct/window cannot", "8.0") in error
    )
    assert CANNOT in error


def test_a_program_for_another_gpu_is_refused():
    """Few channels have kernels on Hopper GPUs only."""
    x, kernel = arrays(BF16, (2, 40, 40, 3), (7, 7, 3, 64))
    (call,) = kernels.record(jaxops.conv2d, x, kernel, capability="9.0")
    error = run_error(call, A100)
    assert REFUSED.format("conv (forward)", "no kernel family can", "8.0") in error
    assert "compiled for another kind of GPU" in error


@pytest.mark.parametrize(
    ("shape", "taps", "dilation", "error"),
    [
        ((1, 1 << 30, 2), 3, 1, "time must be at most 1073741823 on a GPU, got 1073741824"),
        ((1, 3, 1 << 30), 3, 1, "channels must be at most 1073741823 on a GPU, got 1073741824"),
        (
            (1, (1 << 30) - 1, 2),
            3,
            (1 << 22) + 1,
            "dilation must be at most 4194304 on a GPU, got 4194305",
        ),
    ],
)
def test_sequences_out_of_range(shape, taps, dilation, error):
    function = functools.partial(jaxops.lightweight_conv, dilation=dilation)
    x, weight = arrays(BF16, shape, (2, taps))
    for program, arguments in (
        (function, (x, weight)),
        (vjp_of(function, (0, 1)), ((x,), x, weight)),
    ):
        for call in kernels.record(program, *arguments, capability="9.0"):
            assert f"lightweight_conv: {error}" in run_error(call, H200)


def test_taps_past_a_sequence_are_in_range():
    """Filters are cut to the taps that read something, so their reach is at most a sequence."""
    function = functools.partial(jaxops.lightweight_conv, dilation=1 << 22)
    for call in kernels.record(
        function, *arrays(BF16, (1, (1 << 30) - 1, 2), (2, 257)), capability="9.0"
    ):
        check(call, H200)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_single_steps_launch_alike_in_both_formats(dtype):
    """They are the same in memory in both. Gradients of "NCT" once had a sixth of the blocks."""

    def launches(data_format, shape):
        function = functools.partial(jaxops.lightweight_conv, data_format=data_format)
        x, weight = arrays(dtype, shape, (16, 3))
        return [
            kernels.kernels(function, x, weight),
            kernels.kernels(vjp_of(function, (0, 1)), (x,), x, weight),
        ]

    one, other = launches("NCT", (8192, 1024, 1)), launches("NTC", (8192, 1, 1024))
    assert [[*calls.values()] for calls in one] == [[*calls.values()] for calls in other]
    assert all(one)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_devices_of_several_kinds_in_one_process(case):
    """The launches on a device do not depend on devices that ran the same program before."""
    calls = case.calls("8.0", case.dtypes[0])
    others = [A100, L4, B200]
    for call in calls:
        there, back = ([check(call, gpu) for gpu in order] for order in (others, others[::-1]))
        assert there == back[::-1]


def test_table_of_kernels():
    """Choices change on purpose only: `python tests/kernel_table.py --write` accepts them."""
    difference = kernel_table.difference()
    assert not difference, f"other kernels than in {kernel_table.PATH.name}:\n{difference}"


def test_time_of_a_call():
    (call,) = cases.CASES[0].calls("9.0", "float32")[:1]
    times = kernels.seconds(call, H200, 10)
    assert len(times) == 10
    assert 0 < min(times) < 1
