"""`Conv` and `ConvTranspose` of both APIs of Flax: the parameters and the results of Flax's own."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxops
from jaxops.flax import linen as jaxops_linen
from jaxops.flax import nnx as jaxops_nnx

CASES = {
    "Conv": {
        "2-D": ((2, 9, 8, 4), (3, 3), {"strides": 2}),
        "1-D, causal, dilated": ((2, 11, 4), (4,), {"padding": "CAUSAL", "kernel_dilation": 2}),
        "3-D": ((1, 4, 5, 3, 4), (2, 2, 2), {"padding": 1}),
        "groups, circular": (
            (3, 7, 7, 4),
            (3, 3),
            {"feature_group_count": 2, "padding": "CIRCULAR"},
        ),
        "no batch, no bias": ((9, 8, 4), (3, 3), {"use_bias": False}),
        "input dilation, bfloat16": (
            (2, 5, 4),
            (3,),
            {"input_dilation": 2, "padding": 2, "dtype": jnp.bfloat16},
        ),
    },
    "ConvTranspose": {
        "2-D": ((2, 5, 6, 4), (4, 4), {"strides": (2, 2)}),
        "1-D, transposed kernel": ((2, 7, 4), 5, {"strides": (3,), "transpose_kernel": True}),
        "3-D, valid, dilated": (
            (1, 3, 2, 3, 4),
            (2, 3, 1),
            {"padding": "VALID", "strides": (2, 1, 2), "kernel_dilation": (2, 1, 1)},
        ),
        "pairs, two batch dimensions": ((2, 3, 6, 4), (3,), {"padding": [(1, 2)], "strides": (2,)}),
        "an int, no batch, no bias": ((5, 6, 4), (3, 3), {"padding": 1, "use_bias": False}),
        "circular": ((2, 5, 6, 4), (6, 3), {"padding": "CIRCULAR", "strides": (2, 3)}),
        "circular, transposed kernel": (
            (2, 5, 3, 4),
            (6, 4),
            {"padding": "CIRCULAR", "strides": (1, 2), "transpose_kernel": True},
        ),
        "circular, far kernel": ((2, 2, 4), (11,), {"padding": "CIRCULAR"}),
        "mask, bfloat16": (
            (2, 5, 4),
            (3,),
            {"mask": np.tril(np.ones((3, 4, 6), np.float32)), "dtype": jnp.bfloat16},
        ),
    },
}
EACH = pytest.mark.parametrize(
    ("layer", "case"), [(layer, case) for layer, cases in CASES.items() for case in cases]
)


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    """GPUs round the operands of float32 products by default, so that two ways give two results."""
    with jax.default_matmul_precision("highest"):
        yield


def assert_same(ours, theirs, parameters, x, hasty):
    """Values, and gradients with respect to the parameters and x."""
    # XLA compiles a layer as one program faster than each of its operations.
    compiled = functools.partial(jax.jit, compiler_options=hasty)

    def loss(apply):
        return lambda *arguments: (apply(*arguments).astype(jnp.float32) ** 2).mean()

    got, want = (compiled(f)(parameters, x) for f in (ours, theirs))
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    tolerance = 2e-2 if got.dtype == jnp.bfloat16 else 1e-5
    gradients = (compiled(jax.grad(loss(f), argnums=(0, 1)))(parameters, x) for f in (ours, theirs))
    for a, b in zip(
        jax.tree.leaves(next(gradients)), jax.tree.leaves(next(gradients)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    a, b = (np.asarray(r, np.float32) for r in (got, want))
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@EACH
def test_linen(layer, case, hasty):
    shape, size, options = CASES[layer][case]
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    ours, theirs = (getattr(m, layer)(6, size, **options) for m in (jaxops_linen, linen))
    parameters = theirs.init(jax.random.key(1), x)
    own = jax.eval_shape(ours.init, jax.random.key(1), x)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, parameters)
    assert_same(ours.apply, theirs.apply, parameters, x, hasty)


@EACH
def test_nnx(layer, case, hasty):
    shape, size, options = CASES[layer][case]
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    ours, theirs = (
        getattr(m, layer)(4, 6, size, rngs=nnx.Rngs(1), **options) for m in (jaxops_nnx, nnx)
    )
    merged = [nnx.split(m) for m in (ours, theirs)]
    (_, own), (_, parameters) = merged
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, parameters)
    apply = (lambda p, x, g=g: nnx.merge(g, p)(x) for g, _ in merged)
    assert_same(*apply, parameters, x, hasty)


@pytest.mark.parametrize("layer", CASES)
def test_the_kernels_are_ours(layer):
    x = jnp.zeros((2, 5, 6, 4))
    module = getattr(jaxops_linen, layer)(6, (3, 3), strides=(2, 2))
    parameters = module.init(jax.random.key(0), x)
    text = jax.jit(module.apply).lower(parameters, x).as_text()
    assert re.search(r"@jaxops_(conv|conv_input_grad|im2col|col2im)\(", text)


def test_empty_images():
    """A bias alone, as Flax has it."""
    x = np.ones((2, 0, 4), np.float32)
    fields = {
        "features": 3,
        "kernel_size": (5,),
        "strides": (2,),
        "bias_init": jax.nn.initializers.ones,
    }
    want, _ = linen.ConvTranspose(**fields).init_with_output(jax.random.key(0), x)
    got, _ = jaxops_linen.ConvTranspose(**fields).init_with_output(jax.random.key(0), x)
    np.testing.assert_array_equal(got, want)


def test_errors():
    layer = jaxops_linen.ConvTranspose(6, (3,), mask=np.ones((3, 6, 4)))
    with pytest.raises(ValueError, match=r"ConvTranspose: mask must have shape \(3, 4, 6\)"):
        layer.init(jax.random.key(0), jnp.zeros((2, 5, 4)))
    layer = jaxops_linen.ConvTranspose(6, (3,), padding="CAUSAL")
    with pytest.raises(ValueError, match="conv_transpose: padding must be one of"):
        layer.init(jax.random.key(0), jnp.zeros((2, 5, 4)))
    assert jaxops.conv_general_dilated is jaxops_linen.Conv(6, (3,)).conv_general_dilated
