"""jaxops: operators that XLA serves badly, as CUDA and C++ kernels behind real JAX primitives."""

import importlib as _importlib
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import Any as _Any

from jaxops._core import native as _native
from jaxops._core.implementation import use_implementation
from jaxops._core.native import NoKernelWarning
from jaxops.concatenate import concatenate, split
from jaxops.conv import conv1d, conv2d, conv3d, conv_general_dilated, conv_transpose
from jaxops.dynamic_conv import dynamic_conv, dynamic_conv_step
from jaxops.focal_loss import sigmoid_focal_loss, softmax_focal_loss
from jaxops.grid_sample import grid_sample, map_coordinates
from jaxops.im2col import col2im, im2col
from jaxops.lightweight_conv import lightweight_conv, ragged_conv
from jaxops.lightweight_conv_step import lightweight_conv_step
from jaxops.trilinear import trilinear_interpolate

try:
    __version__ = _version("jaxops")
except _PackageNotFoundError:  # a clone that is not installed
    __version__ = "0+unknown"

_native.register()

#: For `jax.export.export(..., disabled_checks=jaxops.DISABLE_JAX_EXPORT_CHECKS)`: the custom calls
#: that an exported jaxops program contains. The program that loads the export imports jaxops too.
DISABLE_JAX_EXPORT_CHECKS = _native.export_checks()

__all__ = [
    "DISABLE_JAX_EXPORT_CHECKS",
    "NoKernelWarning",
    "col2im",
    "concatenate",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_general_dilated",
    "conv_transpose",
    "dynamic_conv",
    "dynamic_conv_step",
    "grid_sample",
    "im2col",
    "lightweight_conv",
    "lightweight_conv_step",
    "map_coordinates",
    "ragged_conv",
    "sigmoid_focal_loss",
    "softmax_focal_loss",
    "split",
    "trilinear_interpolate",
    "use_implementation",
]


def __getattr__(name: str) -> _Any:
    # Flax is an extra, and takes a second to import.
    if name == "flax":
        return _importlib.import_module("jaxops.flax")
    raise AttributeError(f"module 'jaxops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "flax"})
