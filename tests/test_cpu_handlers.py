"""Calls of CPU handlers that Python does not make, but a program from elsewhere may."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_calls

import jaxops


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Calls of its handlers are recorded even where the default device is a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def call(function, *arguments, target):
    """The call of this handler that the function makes, as types and attributes."""
    (found,) = (c for c in wrong_calls.record([(function, *arguments)]) if c.target == target)
    return found


def run(found, operands, results):
    """The results of a call with other operands and results, on a CPU."""
    make = jax.ffi.ffi_call(found.target, [jax.ShapeDtypeStruct(*r) for r in results])
    program = jax.jit(lambda *xs: make(*xs, **dict(found.attributes)))
    cpu = jax.devices("cpu")[0]
    return [np.asarray(y) for y in program(*jax.device_put(operands, cpu))]


def without_sizes(type_, axes):
    shape, dtype = type_
    return tuple(0 if i in axes else n for i, n in enumerate(shape)), dtype


def ones(types):
    return [np.ones(*t) for t in types]


@pytest.mark.parametrize("groups", [1, 4])
def test_gradients_of_convolutions_without_results_are_zero(groups):
    """A cotangent without rows; memory that nobody writes would hold what was there before."""
    function = functools.partial(jaxops.conv2d, groups=groups, padding="VALID")
    arguments = of(2, 5, 6, 4), of(3, 2, 4 // groups, 4)
    loss = jax.grad(lambda *xs: function(*xs).sum(), (0, 1))
    calls = [c for c in wrong_calls.record([(loss, *arguments)]) if "grad" in c.target]
    assert len(calls) == 2
    rows = (2, 3, 5, 4)  # the shape of the value
    for found in calls:
        operands = [
            without_sizes(t, (len(t[0]) - 3,)) if t[0][-4:] == rows else t for t in found.operands
        ]
        assert operands != list(found.operands)
        (gradient,) = run(found, ones(operands), found.results)
        assert not gradient.any()


def test_dynamic_filters_without_steps():
    found = call(jaxops.dynamic_conv, of(2, 9, 8), of(2, 9, 2, 3), target="jaxops_dynamic_conv")
    operands = [without_sizes(t, [i for i, n in enumerate(t[0]) if n == 9]) for t in found.operands]
    results = [without_sizes(t, [i for i, n in enumerate(t[0]) if n == 9]) for t in found.results]
    (y,) = run(found, ones(operands), results)
    assert y.size == 0


@pytest.mark.parametrize("index", [-1, -(2**31)])
def test_a_step_of_no_slot_reads_zeros_and_writes_nothing(index):
    def function(x, state, weight, indices):
        return jaxops.lightweight_conv_step(x, state, weight, state_indices=indices)

    shapes = of(2, 8), of(5, 2, 8), of(2, 3), of(2, dtype=jnp.int32)
    found = call(function, *shapes, target="jaxops_lightweight_conv_step")
    random = np.random.default_rng(0)
    operands = [
        np.full(shape, index, dtype)
        if dtype == np.int32
        else random.normal(size=shape).astype(dtype)
        for shape, dtype in found.operands
    ]
    y, state = run(found, operands, found.results)
    x, before, weight = (
        next(o for o in operands if o.shape[-len(s) :] == s) for s in ((1, 8), (5, 2, 8), (2, 3))
    )
    np.testing.assert_array_equal(state, before)
    want = x.reshape(2, 8) * np.repeat(weight.reshape(2, 3)[:, -1], 4)
    np.testing.assert_allclose(y.reshape(2, 8), want, rtol=1e-6)
