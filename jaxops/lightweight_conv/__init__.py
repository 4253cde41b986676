"""Lightweight convolution: a depthwise convolution over time whose filters heads share.

`public` has the function and `ragged` that of ragged batches, `primitives` the family of primitives
and their rules.
"""

from jaxops.lightweight_conv.public import lightweight_conv
from jaxops.lightweight_conv.ragged import ragged_conv

__all__ = ["lightweight_conv", "ragged_conv"]
