"""Convolution in one to three dimensions: the patches of an image times a matrix.

`public` has the functions, and `primitives` what they call, with its rules. `local` is what one
device computes: by `cuda_kernels` where these take a call, elsewhere of `patches`, in `slabs` of an
image whose patches are too many at once.
"""

from jaxops.conv.public import (
    conv1d,
    conv2d,
    conv3d,
    conv_general_dilated,
    conv_transpose,
)

__all__ = ["conv1d", "conv2d", "conv3d", "conv_general_dilated", "conv_transpose"]
