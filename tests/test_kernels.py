"""Queries of the CUDA kernels that a call launches: `jaxops.testing.kernels`, `info --kernels`."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import jaxops
from jaxops import _cli
from jaxops._core import native
from jaxops.lightweight_conv import primitives
from jaxops.testing import kernels

X, KERNEL = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 56, 56, 64), (3, 3, 64, 128)))

needs_module = pytest.mark.skipif(
    "90a" not in native.cuda_architectures(), reason="no CUDA module for 90a was built"
)


def loss(x, kernel):
    return jaxops.conv2d(x, kernel).astype(jnp.float32).sum()


def names(found):
    """The names of the kernels without template arguments, by target."""
    return {
        call.target: [launch.kernel.split("<")[0] for launch in launches]
        for call, launches in found.items()
    }


@needs_module
def test_a_gradient_on_two_devices():
    grad = jax.grad(loss, (0, 1))
    assert names(kernels.kernels(grad, X, KERNEL, device="H200")) == {
        "jaxops_conv_input_grad": ["ConvolveWgmma"],
        "jaxops_conv_kernel_grad": ["KernelGradWgmma", "AddParts"],
    }
    assert names(kernels.kernels(grad, X, KERNEL, device="L4")) == {
        "jaxops_conv_input_grad": ["ConvolveMma"],
        "jaxops_conv_kernel_grad": ["KernelGradMma", "AddParts"],
    }


@needs_module
def test_launches_have_their_sizes():
    two = kernels.Device("two of its processors", "9.0", 2, 227)
    for device, blocks in ((two, 2), ("H100", 131)):
        ((call, (launch,)),) = kernels.kernels(jaxops.conv2d, X, KERNEL, device=device).items()
        assert call.operands == (
            kernels.Array((8, 56, 56, 64), "bfloat16"),
            kernels.Array((3, 3, 64, 128), "bfloat16"),
        )
        assert (launch.grid, launch.cluster) == ((blocks, 1, 1), (1, 1, 1))
        assert launch.threads[0] % 32 == 0
        assert 0 < launch.shared_bytes <= 227 * 1024


@needs_module
def test_calls_of_xla_are_not_listed():
    x, kernel = (jax.ShapeDtypeStruct(a.shape, jnp.int8) for a in (X, KERNEL))

    def convolve(x, kernel):
        return jaxops.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    with pytest.warns(UserWarning, match="int8"):
        assert kernels.kernels(convolve, x, kernel) == {}
    assert kernels.kernels(jnp.add, X, X) == {}


@needs_module
def test_nothing_is_left_of_a_dry_run():
    """Programs lowered afterwards are for the GPUs of this machine."""
    with native.recording_calls("9.0"):
        assert native.gpu_capabilities() == {"9.0"}
    assert native.gpu_capabilities() == native.compat.gpu_capabilities()
    kernels.kernels(jaxops.conv2d, X, KERNEL)
    with jax.default_device(jax.devices("cpu")[0]):
        y = jax.jit(jaxops.conv2d)(jnp.ones((1, 4, 4, 8)), jnp.ones((1, 1, 8, 8)))
    assert (y == 8).all()


@needs_module
@pytest.mark.parametrize("device", ["H200", "L4"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("steps", [1, 8, 9, 64])
def test_sequences_shorter_than_their_filter(dtype, steps, device):
    """A device's part of a sequence, and a symbolic one, keep the taps that read nothing."""
    options = primitives.Options(padding=63, dilation=1, data_format="NCT")
    with jax.enable_x64(True):
        x, weight = (jax.ShapeDtypeStruct(s, dtype) for s in ((2, 64, steps), (1, 64, 64)))
        function = functools.partial(primitives.conv, options=options)
        (launches,) = kernels.kernels(function, x, weight, device=device).values()
    assert launches


@needs_module
def test_segments_keep_tensor_cores():
    """Rows of 64 steps in float32, whose gradients have other kernels without segments."""
    x, weight = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((128, 1024, 64), (16, 15)))
    ids = jax.ShapeDtypeStruct((128, 64), jnp.int32)

    def total(x, weight, ids=None):
        return jaxops.lightweight_conv(x, weight, data_format="NCT", segment_ids=ids).sum()

    gradient = jax.grad(total, (0, 1))
    target = "jaxops_lightweight_conv_backward"
    assert names(kernels.kernels(gradient, x, weight))[target][0] == "WindowNct"
    assert names(kernels.kernels(gradient, x, weight, ids))[target][0] == "BackwardMma"


@needs_module
def test_long_filters_in_ntc_run_in_nct():
    """Where that is faster, by "A long filter in NTC" in docs/lightweight_conv.md."""

    def layout(taps, heads=64, steps=1024, dtype=jnp.bfloat16, **more):
        x = jax.ShapeDtypeStruct((128, steps, 64), dtype)
        weight = jax.ShapeDtypeStruct((heads, taps), dtype)

        def total(x, weight):
            return jaxops.lightweight_conv(x, weight, **more).sum()

        (call,) = kernels.kernels(jax.grad(total, (0, 1)), x, weight)
        return next(a.text.strip('"') for a in call.attributes if a.name == "data_format")

    assert layout(127) == layout(127, heads=8) == "NCT"
    assert layout(126) == layout(127, heads=4) == layout(127, dilation=2) == "NTC"
    assert layout(127, steps=1025) == layout(127, steps=1028) == "NTC"
    assert layout(191, steps=1028, dtype=jnp.float32) == "NCT"
    assert layout(190, dtype=jnp.float32) == layout(191, steps=1025, dtype=jnp.float32) == "NTC"


def test_unknown_device():
    with pytest.raises(ValueError, match=r"kernels: device must be one of A100, .*, got 'H300'"):
        kernels.kernels(jaxops.conv2d, X, KERNEL, device="H300")


def test_without_the_module(monkeypatch):
    monkeypatch.delitem(native._modules, "cuda", raising=False)
    reason = "jaxops._cuda was not built"
    status = native.PlatformStatus("cuda", available=False, reason=reason)
    monkeypatch.setitem(native._statuses, "cuda", status)
    with pytest.raises(RuntimeError, match=reason):
        kernels.kernels(jaxops.conv2d, X, KERNEL)


# --- the command line ----------------------------------------------------------------------------


@needs_module
def test_command_line(capsys):
    words = ["conv2d", "8,56,56,64", "3,3,64,128", "--option", "strides=2", "--json"]
    devices = ["--device", "H200", "--device", "L4"]
    assert _cli.main(["info", "--kernels", *words, *devices]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["H200", "L4"]
    value, *gradients = found["H200"]
    assert value["program"] == "value"
    assert "strides=[2, 2]" in value["call"]
    (launch,) = value["launches"]
    assert launch["kernel"].startswith("ConvolveWgmma<bf16")
    assert launch["source"] in ("cuda/conv/wgmma/convolve.cuh", None)
    assert [row["program"] for row in gradients] == [
        "gradient with respect to argument 0",
        "gradient with respect to argument 1",
    ]
    assert _cli.main(["info", "--kernels", *words[:-1]]) == 0
    assert "ConvolveWgmma<bf16" in capsys.readouterr().out


@needs_module
@pytest.mark.parametrize(
    ("words", "target"),
    [
        (["concatenate", "8,3", "8,5", "--option", "axis=1"], "jaxops_concatenate"),
        (["softmax_focal_loss", "100,10", "100:int32"], "jaxops_softmax_focal_loss"),
        (["im2col", "2,9,9,4", "--option", "kernel_size=3"], "jaxops_im2col"),
        (["trilinear_interpolate", "9,8,4", "9,3", "--dtype", "float32"], "jaxops_trilinear"),
        (["lightweight_conv", "2,64,16", "4,3"], "jaxops_lightweight_conv"),
        (["lightweight_conv_step", "4,64", "4,3,64", "64,4"], "jaxops_lightweight_conv_step"),
        (["dynamic_conv", "2,64,16", "2,64,4,3"], "jaxops_dynamic_conv"),
        (["grid_sample", "8,8,8,4", "9,3"], "jaxops_grid_sample"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_every_operator_on_the_command_line(words, target, capsys):
    assert _cli.main(["info", "--json", "--kernels", *words]) == 0
    rows = json.loads(capsys.readouterr().out)["H200"]
    assert rows[0]["call"].startswith(target)
    assert all(row["launches"] for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["conv3d_transposed", "3"], "'conv3d_transposed' is no operator of jaxops"),
        (["conv2d", "3,x", "3"], "a shape must be integers with commas, got '3,x'"),
        (["conv2d", "3", "--option", "strides"], "--option must be NAME=VALUE, got 'strides'"),
        (["conv2d", "1,4,4,8", "1,1,9,8"], "conv2d: kernel must have shape"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert _cli.main(["info", "--kernels", *words]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
