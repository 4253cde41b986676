"""The primitives of convolution, of any number of spatial dimensions.

The family has three, each linear in each of its operands:

    conv              x, kernel -> y
    conv_input_grad   g, kernel -> dx, its transpose in x
    conv_kernel_grad  x, g -> dkernel, its transpose in the kernel

and every derivative of these is again one of these. The first may also add a bias and apply an
activation, before it rounds. `local` has the computation of one device. A gradient needs x, not its
patches, which are computed again.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxops._core import compat, rules
from jaxops._core.primitive import Operator
from jaxops.activations import ACTIVATIONS
from jaxops.conv import local
from jaxops.conv.options import over_pixels, sum_dtype

_REPLICATED = ("in", "out", "step", "tap", "fan", "inputs", "outputs")


def _with_neighbours(image, *others, plan, options, of_windows, **params):
    first = image.ndim - 1 - options.rank
    image, part = options.windows.exchange_halo(image, first, plan, of_windows=of_windows)
    return (image, *others), {"options": dataclasses.replace(options, windows=part), **params}, None


def _operator(name, signature, compute, **more):
    of_windows = compute is local.input_grad
    return Operator(
        name,
        signature=lambda *, options, **params: signature(options, **params),
        dtypes=lambda *_, dtype, **__: [dtype],
        local=compute,
        replicated=_REPLICATED,
        summed_outputs=(0,) if compute is local.kernel_grad else (),
        neighbours=functools.partial(_with_neighbours, of_windows=of_windows),
        **more,
    )


def _forward_signature(options, *, with_bias, **_):
    operands = (options.x, options.kernel, *([options.bias] if with_bias else ()))
    return f"{', '.join(operands)} -> {options.y}"


_forward_operator = _operator(
    "conv",
    _forward_signature,
    local.forward,
    reference=local.by_xla,
    epilogue=local.epilogue,
)
_input_grad_operator = _operator(
    "conv_input_grad",
    lambda o, **_: f"{o.y}, {o.kernel} -> {o.x}",
    local.input_grad,
    reference=local.input_grad_by_xla,
)
_kernel_grad_operator = _operator(
    "conv_kernel_grad", lambda o, **_: f"{o.x}, {o.y} -> {o.kernel}", local.kernel_grad
)


def forward(x, kernel, bias=None, *, options, dtype, activation=None):
    """The convolution; a bias must have the dtype of the sums."""
    operands = (x, kernel) if bias is None else (x, kernel, bias)
    (y,) = _forward_operator(
        *operands,
        options=options,
        dtype=np.dtype(dtype),
        activation=activation,
        with_bias=bias is not None,
    )
    return y


def input_grad(g, kernel, *, options, dtype):
    """The gradient with respect to x, of the dtype given."""
    (dx,) = _input_grad_operator(g, kernel, options=options, dtype=np.dtype(dtype))
    return dx


def kernel_grad(x, g, like, *, options):
    """The kernel gradient in the dtype of `like`, summed over its batch dimensions of size 1."""
    summed = tuple(n == 1 for n in like.shape[: like.ndim - 2 - options.rank])
    (dkernel,) = _kernel_grad_operator(
        x, g, options=options, dtype=np.dtype(like.dtype), summed=summed
    )
    return dkernel


def _tangent(operator: Operator, primals, tangents, **params) -> jax.Array | None:
    """The tangent of an operator which is linear in each of two operands."""
    a, b = primals
    da, db = tangents
    terms = [(da, b)] if da is not None else []
    terms += [(a, db)] if db is not None else []
    results = [operator(*t, **params)[0] for t in terms]
    return functools.reduce(jnp.add, results) if results else None


def _def_jvp(operator: Operator) -> None:
    @operator.def_jvp
    def _jvp(primals, tangents, **params):
        (value,) = operator(*primals, **params)
        return [value], [_tangent(operator, primals, rules.nonzero(tangents, 2), **params)]


_def_jvp(_input_grad_operator)
_def_jvp(_kernel_grad_operator)


@_forward_operator.def_jvp
def _forward_jvp(primals, tangents, *, options, dtype, activation, **_):
    if activation not in (None, "relu"):

        def unfused(*operands):
            wide = sum_dtype(*operands[:2], dtype=dtype)
            # Named as well: it is what the gradient needs, so that a policy which saves the
            # operator's result spares the backward pass a second forward one.
            y = forward(*operands, options=options, dtype=wide)
            y = checkpoint_name(y, f"conv{options.rank}d")
            return ACTIVATIONS[activation](y).astype(dtype)

        y, dy = rules.jvp(unfused, primals, tangents)
        return [y], [dy]

    y = forward(*primals, options=options, dtype=dtype, activation=activation)
    if activation is not None:
        # The result tells where it was positive, so that nothing else is kept for the gradient.
        y = checkpoint_name(y, f"conv{options.rank}d")
    *moving, dbias = rules.nonzero(tangents, 3)
    plain = dict(options=options, activation=None, with_bias=False)
    # The sum that the bias is added to is rounded with it.
    summed = dtype if dbias is None else sum_dtype(*primals[:2], dtype=dtype)
    dy = _tangent(_forward_operator, primals[:2], moving, dtype=np.dtype(summed), **plain)
    if dbias is not None:
        spread = rules.broadcast_like(over_pixels(dbias, options), jax.typeof(y)).astype(summed)
        dy = spread if dy is None else compat.reshard_like(dy, jax.typeof(y)) + spread
    assert dy is not None  # a rule is called where one tangent is not zero
    dy = compat.reshard_like(dy.astype(dtype), jax.typeof(y))
    return [y], [dy if activation is None else jnp.where(y > 0, dy, jnp.zeros_like(dy))]


@_forward_operator.def_transpose
def _forward_transpose(cotangents, x, kernel, *, options, dtype, activation, with_bias):
    del dtype, activation, with_bias  # what is linear has neither
    (g,) = cotangents
    if isinstance(g, compat.Zero):
        return rules.zeros((x, kernel))
    like = x.aval if compat.is_undefined_primal(x) else kernel.aval
    if options.rounds_cotangent:
        g = g.astype(like.dtype)
    if compat.is_undefined_primal(x):
        dx = input_grad(g, kernel, options=options, dtype=like.dtype)
        return [rules.match_type(dx, like, options.rank + 2), None]
    dkernel = kernel_grad(x, g, like, options=options)
    return [None, rules.match_type(dkernel, like, options.rank + 2)]


@_input_grad_operator.def_transpose
def _input_grad_transpose(cotangents, g, kernel, *, options, dtype):
    (dx,) = cotangents
    if isinstance(dx, compat.Zero):
        return rules.zeros((g, kernel))
    if compat.is_undefined_primal(g):
        y = forward(dx, kernel, options=options, dtype=g.aval.dtype)
        return [rules.match_type(y, g.aval, options.rank + 2), None]
    dkernel = kernel_grad(dx, g, kernel.aval, options=options)
    return [None, rules.match_type(dkernel, kernel.aval, options.rank + 2)]


@_kernel_grad_operator.def_transpose
def _kernel_grad_transpose(cotangents, x, g, *, options, dtype, summed):
    (dkernel,) = cotangents
    if isinstance(dkernel, compat.Zero):
        return rules.zeros((x, g))
    if compat.is_undefined_primal(x):
        dx = input_grad(g, dkernel, options=options, dtype=x.aval.dtype)
        return [rules.match_type(dx, x.aval, options.rank + 2), None]
    y = forward(x, dkernel, options=options, dtype=g.aval.dtype)
    return [None, rules.match_type(y, g.aval, options.rank + 2)]
