"""This machine's own limits: how fast it copies, multiplies matrices, and computes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._bench import contenders
from jaxops._bench.clock import Batch, Clock, ProfileError
from jaxops._bench.spec import normal

COPY, FMA, MATMUL, SPECIAL, DISPATCH = "copy", "fma", "matmul", "special", "dispatch"
#: By the first word of a ceiling's name; some have a dtype as their second.
UNITS = {COPY: "B/s", FMA: "FLOP/s", MATMUL: "FLOP/s", SPECIAL: "op/s", DISPATCH: "s"}
_ROUNDS = 3
# Operations an element: enough to hide that it is read and written, and how long one takes.
_CHAINS, _STEPS = 8, 64
_FMA_DTYPES = ("float32", "float64")
# Matrices of the wider dtypes are narrower by this factor: their products take longer.
_MATMUL_DTYPES = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 2}
#: How many ceilings there are.
PROBES = 3 + len(_FMA_DTYPES) + len(_MATMUL_DTYPES)


def measure(clock: Clock, platform: str, quick: bool, report: Callable[[str], None]) -> dict:
    """The ceilings by name: bytes, FLOPs or special functions a second, and an empty call's time.

    Each is the best of several rounds. Arrays are several times what a cache holds; `quick` ones
    on a CPU are smaller, which leaves the machine's memory less to do. `report` is told what is
    next.
    """
    shrink = 1 if platform == "cuda" else 64 if quick else 8
    found = {}

    def best(name: str, functions: Sequence[Callable], shapes: Sequence, dtype: str, work: float):
        report(name)
        with jax.enable_x64(True):
            # Random, as what is multiplied decides how much power that takes.
            keys = jax.random.split(jax.random.key(0, impl="rbg"), len(shapes))
            arguments = [normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]
            rates = [work / _seconds(clock, function, arguments) for function in functions]
        found[name] = max(rates)

    count = 2**27 // shrink
    best(COPY, [jnp.copy, jnp.negative], [(count,)], "float32", 2 * 4 * count)
    if platform == "cpu":
        # XLA's copy also pays for memory that is fresh from the operating system.
        found[COPY] = max(found[COPY], 2 * 4 * count / _host_copy_seconds(count))
    count = 2**25 // (4 * shrink if platform == "cpu" else 1)
    work = _CHAINS * _STEPS * count
    for dtype in _FMA_DTYPES:
        best(f"{FMA} {dtype}", [_multiply_adds], [(count,)], dtype, 2 * work)
    best(f"{SPECIAL} float32", [_exponentials, _roots], [(count,)], "float32", work)
    for dtype, narrower in _MATMUL_DTYPES.items():
        n = (8192 if platform == "cuda" else 512 if quick else 2048) // narrower
        best(f"{MATMUL} {dtype}", [_product], [(n, n), (n, n)], dtype, 2 * n**3)
    report(DISPATCH)
    found[DISPATCH] = _empty_call()
    return found


def _seconds(clock: Clock, function: Callable, arguments: Sequence[jax.Array]) -> float:
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    contender = contenders.JaxContender(function, structs)
    calls = contender.calls([tuple(arguments)])
    contender.block(calls[0]())
    readings = clock([Batch(contender, calls * 2)] * _ROUNDS)
    for reading in readings:
        if isinstance(reading, ProfileError):
            raise reading
    return min(readings) / 2


def _host_copy_seconds(count: int) -> float:
    """The least time in which all threads of the host copy `count` float32 to where others were."""
    threads = len(os.sched_getaffinity(0))
    source, target = (np.array_split(np.ones(count, np.float32), threads) for _ in range(2))
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.copyto, target, source))
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
_roots = _chains(lambda x: jax.lax.rsqrt(x + 9))  # of a positive number: x is random


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
    return seconds[name], name
