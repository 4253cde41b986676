"""Focal loss over sigmoid or softmax probabilities.

`public` has the functions, `arguments` what they check. `sigmoid` and `softmax` have the primitives
of both families: the loss itself, of every element or of every row, and those of its sum, to which
`summed_loss` gives their rules: the sum reads the logits once and writes a scalar, its gradient,
and both in one pass.

Second derivatives, and those by anything but logits, are those of the definition in jax.numpy.
"""

from jaxops.focal_loss.public import sigmoid_focal_loss, softmax_focal_loss

__all__ = ["sigmoid_focal_loss", "softmax_focal_loss"]
