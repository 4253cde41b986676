"""Dynamic convolution: a depthwise convolution over time with a filter of its own at each step.

`public` has the function and `step` the one for decoding, `primitives` the family of primitives and
their rules.
"""

from jaxops.dynamic_conv.public import dynamic_conv
from jaxops.dynamic_conv.step import dynamic_conv_step

__all__ = ["dynamic_conv", "dynamic_conv_step"]
