"""Lightweight convolution: a depthwise convolution over time whose filters heads share.

`public` has the function, `primitives` the family of primitives and their rules.
"""

from jaxops.lightweight_conv.public import lightweight_conv

__all__ = ["lightweight_conv"]
