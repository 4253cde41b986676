"""The programs that are timed: a compiled JAX function, or PyTorch's counterpart of it.

Both are prepared from the same JAX arrays and hand out calls without arguments, so that whoever
times them need not know which is which.
"""

# CI checks types without PyTorch.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxops._bench.spec import Direction, Function

Call = Callable[[], Any]


class Contender(Protocol):
    """One formulation of one direction of one case."""

    def calls(self, argument_sets: Sequence[tuple[jax.Array, ...]]) -> list[Call]:
        """A call for each of the argument sets; with a gradient, the cotangent comes first."""
        ...

    def block(self, result: Any) -> None:
        """Waits until the call that returned `result`, and all before it, have finished."""

    def arrays(self, result: Any) -> list[jax.Array]:
        """The results of a call, on the device of the arguments."""
        ...

    def memory(self) -> int | None:
        """Bytes of arguments, results and temporaries of a call, where it is known beforehand."""


class JaxContender:
    """A function compiled ahead of time for the shapes of the arguments."""

    def __init__(self, function: Function, structs: Sequence[jax.ShapeDtypeStruct]) -> None:
        self._compiled = jax.jit(function).lower(*structs).compile()

    def calls(self, argument_sets):
        """See `Contender`."""
        return [functools.partial(self._compiled, *arguments) for arguments in argument_sets]

    def block(self, result):
        """See `Contender`."""
        jax.block_until_ready(result)

    def arrays(self, result):
        """See `Contender`."""
        return jax.tree.leaves(result)

    def memory(self):
        """See `Contender`."""
        return memory_of(self._compiled)


def memory_of(compiled: jax.stages.Compiled) -> int | None:
    """Bytes of arguments, results and temporaries of a compiled function, if XLA tells."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


class TorchContender:
    """A PyTorch function on tensors that share their memory with the JAX arrays.

    A gradient without the value is timed like autograd's own backward pass: the forward pass, and
    what it saves, is made once beforehand.
    """

    def __init__(self, function: Function, direction: Direction) -> None:
        self._function = function
        self._direction = direction

    def calls(self, argument_sets):
        """See `Contender`."""
        import torch

        jax.block_until_ready(argument_sets)
        calls = []
        for arguments in argument_sets:
            tensors = jax.tree.map(torch.from_dlpack, list(arguments))
            if not self._direction.wrt:
                calls.append(functools.partial(self._forward, tensors))
                continue
            cotangent, *tensors = tensors
            moving = jax.tree.leaves([tensors[i] for i in self._direction.wrt])
            for tensor in moving:
                tensor.requires_grad_()
            value = None if self._direction.value else self._function(*tensors)
            calls.append(functools.partial(self._backward, value, tensors, moving, cotangent))
        return calls

    def _forward(self, tensors):
        import torch

        with torch.no_grad():
            return self._function(*tensors)

    def _backward(self, value, tensors, moving, cotangent):
        import torch

        if value is not None:
            return torch.autograd.grad(value, moving, cotangent, retain_graph=True)
        value = self._function(*tensors)
        return (value.detach(), *torch.autograd.grad(value, moving, cotangent))

    def block(self, result):
        """See `Contender`."""
        import torch

        if any(t.is_cuda for t in jax.tree.leaves(result)):
            torch.cuda.synchronize()

    def arrays(self, result):
        """See `Contender`."""
        self.block(result)
        return [jax.dlpack.from_dlpack(t.contiguous()) for t in jax.tree.leaves(result)]

    def memory(self):
        """See `Contender`."""
        return None


@functools.cache
def torch_absence(platform: str) -> str | None:
    """Why PyTorch cannot be timed on a platform, or None where it can.

    Where it can, it is set to the precision that JAX is asked for: no TF32 for float32.
    """
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {error}"
    if platform == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    # A compiled backward pass is run again and again on what one forward pass has saved.
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
    return None


def forget_compiled() -> None:
    """Has PyTorch start afresh: it stops compiling a function that it has compiled a few times."""
    # Its compiler takes seconds to import, which those who have not compiled need not wait for.
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


def error(got: Sequence[jax.Array], want: Sequence[jax.Array]) -> float:
    """The largest ||got - want|| / ||want|| over the results; NaN where one is not a number."""
    if [g.shape for g in got] != [w.shape for w in want]:
        shapes = ([g.shape for g in got], [w.shape for w in want])
        raise ValueError("results of shapes {}, expected {}".format(*shapes))
    with jax.enable_x64(True):
        return float(jnp.max(jnp.stack([_distance(g, w) for g, w in zip(got, want, strict=True)])))


@jax.jit
def _distance(got, want):
    got, want = got.astype(jnp.float64), want.astype(jnp.float64)
    norm = jnp.linalg.norm(want.ravel())
    return jnp.linalg.norm((got - want).ravel()) / jnp.where(norm == 0, 1, norm)


def tolerance(dtype: str, terms: int) -> float:
    """How large `error` may be: a few roundings to the dtype, and those of a sum of `terms`.

    Sums are made in float32, or in float64 for float64; roundings of random sign add up like the
    square root of their number. Integers are exact.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    accumulated = jnp.finfo("float64" if dtype == "float64" else "float32").eps
    return float(4 * jnp.finfo(dtype).eps + 4 * accumulated * terms**0.5)


def in_float64(function: Function) -> Function:
    """The function of the same arguments, their floating ones in float64 first."""

    def widen(array):
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(jnp.float64) if floating else array

    return lambda *arguments: function(*jax.tree.map(widen, arguments))
