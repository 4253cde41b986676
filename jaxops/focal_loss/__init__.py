"""Focal loss over sigmoid or softmax probabilities."""

from jaxops.focal_loss.public import sigmoid_focal_loss, softmax_focal_loss

__all__ = ["sigmoid_focal_loss", "softmax_focal_loss"]
