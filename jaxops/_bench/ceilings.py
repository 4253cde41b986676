"""This machine's own limits: how fast it copies, multiplies matrices, and computes.

A ceiling is what programs that XLA compiles have reached, and no data sheet's number.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
# Special functions are slower, and long to compile.
_CHAINS, _FMA_STEPS, _SPECIAL_STEPS = 8, 64, 16
_FMA_DTYPES = ("float32", "float64")
# On a GPU matrices of the wider dtypes are narrower by this factor: their products take longer.
_MATMUL_DTYPES = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 2}
#: How many ceilings there are.
PROBES = 4 + len(_FMA_DTYPES) + len(_MATMUL_DTYPES)


@dataclasses.dataclass(frozen=True)
class _Probe:
    """Functions of arrays of one dtype that each do `work` at their best."""

    name: str
    functions: Sequence[Callable]
    shapes: Sequence[tuple[int, ...]]
    dtype: str
    work: float

    def compiled(self) -> list[contenders.Contender]:
        """The contenders that compile here; there must be one."""
        found, errors = [], []
        with jax.enable_x64(True):
            structs = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.shapes]
            for function in self.functions:
                try:
                    found.append(contenders.JaxContender(function, structs))
                except Exception as error:
                    # Pallas is experimental: where it has changed, the other function remains.
                    errors.append(error)
        if not found:
            raise errors[0]
        return found

    def rate(self, clock: Clock, programs: Sequence[contenders.Contender]) -> float:
        """The work a second of the fastest."""
        with jax.enable_x64(True):
            # Random, as what is multiplied decides how much power that takes.
            keys = jax.random.split(jax.random.key(0, impl="rbg"), len(self.shapes))
            made = zip(keys, self.shapes, strict=True)
            arguments = [normal(key, shape, self.dtype) for key, shape in made]
            return max(self.work / _seconds(clock, program, arguments) for program in programs)


def measure(
    clock: Clock, device: jax.Device, platform: str, quick: bool, report: Callable[[str], None]
) -> dict:
    """The ceilings by name: bytes, FLOPs or special functions a second, and an empty call's time.

    Each is the best of several rounds. Arrays are several times what a cache holds; `quick` ones
    on a CPU are smaller, which leaves the machine's memory less to do. `report` is told what is
    next.
    """
    shrink = 1 if platform == "cuda" else 64 if quick else 8
    count = 2**27 // shrink
    probes = list(_probes(platform, quick, count))

    def compiled(probe: _Probe) -> list[contenders.Contender]:
        with jax.default_device(device):
            return probe.compiled()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        programs = list(pool.map(compiled, probes))
    found = {}
    with jax.default_device(device):
        for probe, of_one in zip(probes, programs, strict=True):
            report(probe.name)
            found[probe.name] = probe.rate(clock, of_one)
        if platform == "cpu":
            # XLA's copy also pays for memory that is fresh from the operating system.
            found[COPY] = max(found[COPY], 2 * 4 * count / _host_copy_seconds(count))
        for dtype in _FMA_DTYPES:
            # The units of multiply-adds make these products; a GPU has others for float64.
            if platform == "cpu" or dtype == "float32":
                product = found[f"{MATMUL} {dtype}"]
                found[f"{FMA} {dtype}"] = max(found[f"{FMA} {dtype}"], product)
        report(DISPATCH)
        found[DISPATCH] = _empty_call()
    return found


def _probes(platform: str, quick: bool, count: int) -> Iterator[_Probe]:
    yield _Probe(COPY, [jnp.copy, jnp.negative], [(count,)], "float32", 2 * 4 * count)
    count //= 16 if platform == "cpu" else 4
    multiply_adds = [_multiply_adds] + [_multiply_adds_in_ptx] * (platform == "cuda")
    work = 2 * _CHAINS * _FMA_STEPS * count
    for dtype in _FMA_DTYPES:
        yield _Probe(f"{FMA} {dtype}", multiply_adds, [(count,)], dtype, work)
    work = _CHAINS * _SPECIAL_STEPS * count
    yield _Probe(f"{SPECIAL} float32", [_exponentials, _roots], [(count,)], "float32", work)
    for dtype, narrower in _MATMUL_DTYPES.items():
        n = 8192 // narrower if platform == "cuda" else 512 if quick else 1024
        yield _Probe(f"{MATMUL} {dtype}", [_product], [(n, n)] * 2, dtype, 2 * n**3)
        if dtype == "float32":
            yield _Probe(f"{MATMUL} tf32", [_tf32_product], [(n, n)] * 2, dtype, 2 * n**3)


def _seconds(clock: Clock, program: contenders.Contender, arguments: Sequence[jax.Array]) -> float:
    calls = program.calls([tuple(arguments)])
    program.block(calls[0]())
    readings = []
    for reading in clock([Batch(program, calls * 2)] * _ROUNDS):
        if isinstance(reading, ProfileError):
            raise reading
        readings.append(reading)
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


def _chains(step: Callable, steps: int) -> Callable:
    """`_CHAINS` times `steps` steps an element: side by side, so that none waits for another."""

    def function(x):
        chains = [x + 0.01 * i for i in range(_CHAINS)]
        for _ in range(steps):
            chains = [step(c) for c in chains]
        return sum(chains)

    return function


_FACTOR, _SUMMAND = 0.999, 0.001
_multiply_adds = _chains(lambda x: x * _FACTOR + _SUMMAND, _FMA_STEPS)
_exponentials = _chains(lambda x: jnp.exp(-x), _SPECIAL_STEPS)
_roots = _chains(lambda x: jax.lax.rsqrt(x + 9), _SPECIAL_STEPS)  # of a positive number


def _multiply_adds_in_ptx(x):
    """As many multiply-adds an element as `_multiply_adds`, in one chain an element.

    Written out as instructions, because what XLA may make of a product and a sum is two of them.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    letter, kind = {4: ("f", "f32"), 8: ("d", "f64")}[x.dtype.itemsize]
    block, unrolled = 1024, 16
    # The first operand is written before the others are read for the last time: "=&".
    constraints = ",".join([f"=&{letter}", *[letter] * 3])
    first, again = (f"fma.rn.{kind} $0, ${i}, $2, $3; " for i in (1, 0))

    def kernel(x_ref, y_ref):
        factor, summand = (jnp.full(block, v, x.dtype) for v in (_FACTOR, _SUMMAND))

        def steps(_, chain):
            (chain,) = triton.elementwise_inline_asm(
                first + again * (unrolled - 1),
                args=[chain, factor, summand],
                constraints=constraints,
                pack=1,
                result_shape_dtypes=[jax.ShapeDtypeStruct(chain.shape, chain.dtype)],
            )
            return chain

        y_ref[...] = jax.lax.fori_loop(0, _CHAINS * _FMA_STEPS // unrolled, steps, x_ref[...])

    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        grid=(x.size // block,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
    )(x)


def _product(a, b):
    # The highest precision is the one that the dtype promises: no TF32 for float32.
    return jnp.matmul(a, b, precision="highest")


def _tf32_product(a, b):
    # Other devices than GPUs compute the highest precision for it.
    return jnp.matmul(a, b, precision="default")


def _empty_call() -> float:
    """The median wall time of a compiled call that computes next to nothing."""
    contender = contenders.JaxContender(jnp.negative, [jax.ShapeDtypeStruct((), jnp.float32)])
    (call,) = contender.calls([(jnp.zeros((), jnp.float32),)])
    return call_seconds(contender, [call] * 50)


def call_seconds(contender: contenders.Contender, calls: Sequence[contenders.Call]) -> float:
    """The median wall time of these calls, each from its start until its result is there."""
    seconds = []
    for call in calls:
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
    name = max(seconds, key=seconds.__getitem__)
    return seconds[name], name
