"""Operators in threads and in processes of their own: fork, spawn, interrupts, no memory."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import pickle
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest

import jaxops
from jaxops.testing.processes import run_local

THREADS = 16


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def programs():
    """Functions of one array (8, 6, 12) each, by operator."""
    weight, points = normal(1, 3, 4), normal(2, 5, 2)
    labels = np.arange(8 * 6).reshape(8, 6) % 12
    return {
        "lightweight_conv": lambda x: jaxops.lightweight_conv(x, weight, activation="silu"),
        "dynamic_conv": lambda x: jaxops.dynamic_conv(x, normal(3, 8, 6, 2, 3), normalize=True),
        "conv2d": lambda x: jaxops.conv2d(x[None], normal(4, 3, 3, 12, 4)),
        "im2col": lambda x: jaxops.im2col(x[None], 3),
        "grid_sample": lambda x: jaxops.grid_sample(x, points),
        "trilinear": lambda x: jaxops.trilinear_interpolate(x.swapaxes(0, 1), normal(5, 6, 3)),
        "concatenate": lambda x: jaxops.concatenate([x, 2 * x], axis=1),
        "focal_loss": lambda x: jaxops.softmax_focal_loss(x, labels),
    }


def value_and_gradient(function, x):
    y, pull = jax.vjp(function, x)
    return y, *pull(jnp.cos(y))


def test_threads_with_programs_on_devices_of_their_own(platform):
    """Each thread compiles its program and runs it on one of the devices, while others do."""
    devices, named = platform.devices[:8], list(programs().items())
    x = normal(0, 8, 6, 12)
    with jax.default_device(devices[0]):
        want = {name: jax.jit(functools.partial(value_and_gradient, f))(x) for name, f in named}

    def work(number):
        name, function = named[number % len(named)]
        device = devices[(number * 5 + number // len(devices)) % len(devices)]
        compiled = jax.jit(functools.partial(value_and_gradient, function))
        placed = jax.device_put(x, device)
        results = [compiled(placed) for _ in range(20)]
        assert all(a.devices() == {device} for a in jax.tree.leaves(results))
        return name, jax.device_get(results)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for name, results in pool.map(work, range(THREADS)):
            for found in results:
                for got, expected in zip(found, want[name], strict=True):
                    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_public_functions_are_pickled_by_name():
    functions = [f for f in map(jaxops.__dict__.get, jaxops.__all__) if callable(f)]
    assert jaxops.lightweight_conv in functions
    for function in functions:
        assert pickle.loads(pickle.dumps(function)) is function


def test_what_closes_over_operators_is_computed_in_a_spawned_process():
    """JAX is running in this one. The other one gets the function and what it closes over."""
    x, weight = normal(0, 2, 8, 6), normal(1, 3, 4)
    function = functools.partial(jaxops.lightweight_conv, x, activation="silu")
    want = np.asarray(function(weight))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        got = pool.submit(function, weight).result(timeout=120)
    np.testing.assert_allclose(got, want, rtol=1e-6)


IMPORTED_AND_FORKED = """
import os, sys
import jaxops, jaxops.flax.linen, jaxops.flax.nnx
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "import jaxops starts a backend"
import numpy as np

def compute():
    return float(jaxops.lightweight_conv(np.ones((1, 8, 4), "f"), np.ones((2, 3), "f")).sum())

child = os.fork()
if child == 0:
    sys.stdout.write(f"{compute()}\\n")
    sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
print(compute())
"""


def test_an_import_starts_no_backend_so_that_processes_may_fork():
    said = processes.run_python(["-c", IMPORTED_AND_FORKED], {"JAX_PLATFORMS": "cpu"})
    assert said == "84.0\n84.0\n"


INTERRUPTED = """
import os, signal, threading
import jax, jax.numpy as jnp, jaxops

# Shells that run tests in the background ignore the signal, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

@jax.jit
def long(x, weight):
    return jax.lax.fori_loop(0, COUNT, lambda _, x: jaxops.lightweight_conv(x, weight), x)

x, weight = jnp.ones((8, 4096, 64)), jnp.full((4, 31), 1 / 31)
compiled = long.lower(x, weight).compile()
for _ in range(4):  # a busy machine may send the signal too late
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        jax.block_until_ready(compiled(x, weight))
        timer.join()
    except KeyboardInterrupt:
        print("interrupted")
        break
print(float(jaxops.lightweight_conv(jnp.ones((1, 8, 4)), jnp.ones((2, 3))).sum()))
"""


def test_a_long_call_may_be_interrupted_and_the_process_lives():
    program = INTERRUPTED.replace("COUNT", "400")
    said = processes.run_python(["-c", program], {"JAX_PLATFORMS": "cpu"})
    assert said == "interrupted\n84.0\n"


WITHOUT_MEMORY = """
import resource
import jax, numpy as np, jaxops

# The handler of the gradient sorts the points, in memory of its own.
def gradient(volume, points, g):
    return jax.vjp(lambda v: jaxops.grid_sample(v, points), volume)[1](g)[0]

volume, points = jax.numpy.ones((64, 64, 1)), jax.numpy.zeros((1 << 24, 2))
g = jax.numpy.zeros((1 << 24, 1))
few = jax.jit(gradient)(volume, points[:1000], g[:1000])
whole = jax.jit(gradient).lower(volume, points, g).compile()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), hard))
try:
    jax.block_until_ready(whole(volume, points, g))
except jax.errors.JaxRuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
print(float(whole(volume, points, g).sum()))
"""


def test_a_handler_without_memory_is_an_error_and_the_process_lives():
    said = processes.run_python(["-c", WITHOUT_MEMORY], {"JAX_PLATFORMS": "cpu"})
    assert "RESOURCE_EXHAUSTED: jaxops: out of host memory" in said
    assert said.splitlines()[-1] == "0.0"


@pytest.mark.any_jax
@pytest.mark.parametrize("failing", [None, 1])
def test_local_processes_end_with_the_first_that_fails(failing, tmp_path):
    program = (
        "import pathlib, sys, time; n = sys.argv[sys.argv.index('--process') + 1]; "
        "assert sys.argv[sys.argv.index('--processes') + 1] == '2'; "
        f"pathlib.Path({str(tmp_path)!r}, n).touch(); "
        f"n == '{failing}' and sys.exit(7); time.sleep(0 if {failing is None} else 600)"
    )
    start = time.monotonic()
    assert run_local([sys.executable, "-c", program], 2) == (0 if failing is None else 7)
    assert time.monotonic() - start < 60
    if failing is None:
        assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}
