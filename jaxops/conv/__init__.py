"""Convolution in one to three dimensions: the patches of an image times a matrix.

`public` has the functions, `primitives` what they bind, with its rules. What one device computes is
made by `cuda_kernels` where there are some, elsewhere of patches, of an image or of its `slabs`.
"""

from jaxops.conv.public import conv2d, conv_general_dilated

__all__ = ["conv2d", "conv_general_dilated"]
