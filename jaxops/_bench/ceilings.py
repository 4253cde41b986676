"""This machine's own limits: how fast it copies, multiplies matrices, and computes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._bench import contenders
from jaxops._bench.clock import Batch, Clock

COPY, FMA, MATMUL, SPECIAL, DISPATCH = "copy", "fma", "matmul", "special", "dispatch"
#: By the first word of a ceiling's name; some have a dtype as their second.
UNITS = {COPY: "B/s", FMA: "FLOP/s", MATMUL: "FLOP/s", SPECIAL: "op/s", DISPATCH: "s"}
_ROUNDS = 3
# Operations an element: enough to hide that it is read and written, and how long one takes.
_CHAINS, _STEPS = 8, 64
_FMA_DTYPES = ("float32", "float64")
# Matrices of the wider dtypes are smaller by this factor: their products take longer.
_MATMUL_DTYPES = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 2}
#: How many ceilings there are.
PROBES = 3 + len(_FMA_DTYPES) + len(_MATMUL_DTYPES)


def measure(clock: Clock, platform: str, quick: bool, report: Callable[[str], None]) -> dict:
    """The ceilings by name: bytes, FLOPs or special functions a second, and an empty call's time.

    Each is the best of several rounds. The sizes are those that keep a machine of the platform
    busy for some milliseconds; `quick` ones are an order smaller. `report` is told what is next.
    """
    shrink = (1 if platform == "cuda" else 8) * (8 if quick else 1)
    found = {}

    def best(name: str, functions: Sequence[Callable], arguments: Sequence, work: float) -> None:
        report(name)
        with jax.enable_x64(True):
            arguments = [jax.device_put(a) for a in arguments]
            structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
            rates = [work / _seconds(clock, f, structs, arguments) for f in functions]
        found[name] = max(rates)

    elements = np.ones(2**27 // shrink, np.float32)
    best(COPY, [jnp.copy, jnp.negative], [elements], 2 * elements.nbytes)
    if platform == "cpu":
        # XLA's copy also pays for memory that is fresh from the operating system.
        found[COPY] = max(found[COPY], 2 * elements.nbytes / _host_copy_seconds(elements))
    elements = np.linspace(0.5, 1, 2**22 // shrink)
    for dtype in _FMA_DTYPES:
        work = 2 * _CHAINS * _STEPS * elements.size
        best(f"{FMA} {dtype}", [_multiply_adds], [elements.astype(dtype)], work)
    work = _CHAINS * _STEPS * elements.size
    best(f"{SPECIAL} float32", [_exponentials, _roots], [elements.astype(np.float32)], work)
    for dtype, wide in _MATMUL_DTYPES.items():
        n = (8192 if platform == "cuda" else 2048) // wide // (4 if quick else 1)
        square = np.full((n, n), 0.5, np.float32) + np.eye(n, dtype=np.float32)
        best(f"{MATMUL} {dtype}", [_product], [square.astype(jnp.dtype(dtype))] * 2, 2 * n**3)
    report(DISPATCH)
    found[DISPATCH] = _empty_call()
    return found


def _seconds(clock: Clock, function: Callable, structs: Sequence, arguments: Sequence) -> float:
    contender = contenders.JaxContender(function, structs)
    calls = contender.calls([tuple(arguments)])
    contender.block(calls[0]())
    return min(clock([Batch(contender, calls * 2)] * _ROUNDS)) / 2


def _host_copy_seconds(source: np.ndarray) -> float:
    """The least time of copying an array, all threads of the host at it, to one that is there."""
    threads = len(os.sched_getaffinity(0))
    parts = list(
        zip(
            np.array_split(np.empty_like(source), threads),
            np.array_split(source, threads),
            strict=True,
        )
    )
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(*part), parts))
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def _chains(step: Callable) -> Callable:
    """`_CHAINS` times `_STEPS` steps an element: side by side, so that none waits for another."""

    def function(x):
        chains = [x + 0.01 * i for i in range(_CHAINS)]
        for _ in range(_STEPS):
            chains = [step(c) for c in chains]
        return sum(chains)

    return function


_multiply_adds = _chains(lambda x: x * 0.999 + 0.001)
_exponentials = _chains(lambda x: jnp.exp(-x))
_roots = _chains(lambda x: jax.lax.rsqrt(x + 1))


def _product(a, b):
    # The highest precision is the one that the dtype promises: no TF32 for float32.
    return jnp.matmul(a, b, precision="highest")


def _empty_call() -> float:
    """The median wall time of a compiled call that computes next to nothing."""
    contender = contenders.JaxContender(jnp.negative, [jax.ShapeDtypeStruct((), jnp.float32)])
    (call,) = contender.calls([(jnp.zeros((), jnp.float32),)])
    return call_seconds(contender, call, 50)


def call_seconds(contender: contenders.Contender, call: contenders.Call, repeats: int) -> float:
    """The median wall time of a call from its start until its result is there."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        contender.block(call())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def limit(
    ceilings: dict, bytes_moved: float, flops: float, unit: str, special: float
) -> tuple[float, str]:
    """The least seconds that a call can take on this machine, and the ceiling that says so."""
    seconds = {COPY: bytes_moved / ceilings[COPY]}
    if flops:
        seconds[unit] = flops / ceilings[unit]
    if special:
        seconds[f"{SPECIAL} float32"] = special / ceilings[f"{SPECIAL} float32"]
    name = max(seconds, key=seconds.get)
    assert math.isfinite(seconds[name])
    return seconds[name], name
