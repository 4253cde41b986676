"""Code that the benchmarks of losses share: in training, the cotangent of a loss is one.

JAX and compilers for PyTorch know so when the program is made, and multiply nothing by it.
"""

# CI checks types without PyTorch.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxops._bench.spec import Direction, directions


class OfTraining(Direction):
    """A direction of a loss with a cotangent of one, whatever the caller says."""

    def of(self, function):
        if not self.wrt:
            return function

        def with_gradient(cotangent, *arguments):
            del cotangent
            value, gradients = jax.value_and_grad(function, argnums=self.wrt)(*arguments)
            return (value, *gradients) if self.value else gradients

        return with_gradient


def training_directions(*wrt: int) -> tuple[Direction, ...]:
    """The directions of a loss that has gradients of the arguments at these positions."""
    return tuple(OfTraining(**vars(direction)) for direction in directions(*wrt))


def with_unit_gradient(function: Callable) -> Callable:
    """The same for a loss in PyTorch, as a function of the same arguments."""
    import torch

    class One(torch.autograd.Function):
        @staticmethod
        def forward(context, loss):
            return loss.clone()

        @staticmethod
        def backward(context, cotangent):
            return torch.ones_like(cotangent)

    return lambda *arguments: One.apply(function(*arguments))
