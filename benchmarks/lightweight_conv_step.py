"""lightweight_conv_step in a loop against XLA's formulation. Shapes are (B, C, H, K, N).

B sequences are decoded for N steps in a `jax.lax.scan`, whose carry is the state: that is updated
in place. With `slots`, the state has this many times B of them, and the sequences have indices.
`dynamic_conv_step` has the same functions: there every step has filters of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, normal

# fmt: off
CASES = [
    *cases("small", (1, 1024, 1024, 4, 64), ["float32", "bfloat16"], slots=1),
    *cases("small", (8, 256, 16, 7, 64), "float32", slots=[1, 2]),
    # The convolutions of Mamba's and of GDN's layers, and LightConv's.
    *cases("typical", (16, 4096, 4096, 4, 64), ["float32", "bfloat16"], slots=[1, 2]),
    *cases("typical", (64, 1536, 1536, 4, 64), "bfloat16", slots=4),
    *cases("typical", (32, 1024, 16, 31, 64), "float32", slots=1),
    *cases("large", (256, 8192, 8192, 4, 16), "bfloat16", slots=[1, 2]),
    *cases("odd", (17, 999, 333, 5, 64), ["float32", "float16"], slots=[1, 3]),
    *cases("odd", (5, 510, 10, 3, 64), "float64", slots=1, dilation=4),
]
# fmt: on
for entries in (2**n for n in range(0, 13, 2)):
    CASES += cases("scaling", (entries, 1024, 1024, 4, 16), "float32", slots=1)


def is_dynamic(case: Case) -> bool:
    """Whether every step has filters of its own, as in the cases of `dynamic_conv_step`."""
    return "softmax" in case.options


def dilation(case: Case) -> int:
    return case.options.get("dilation", 1)


def reach(case: Case) -> int:
    return (case.shape[3] - 1) * dilation(case)


def arguments(case, key):
    B, C, H, K, N = case.shape
    of_x, of_state, of_weight = jax.random.split(key, 3)
    slots = B * case.options["slots"]
    x = normal(of_x, (N, B, C), case.dtype)
    state = normal(of_state, (slots, reach(case), C), case.dtype)
    filters = (N, B, H, K) if is_dynamic(case) else (H, K)
    weight = (normal(of_weight, filters, "float32") / K**0.5).astype(case.dtype)
    return x, state, weight, jnp.arange(slots, dtype=jnp.int32)[::-1][:B]


def decode(case, step):
    """The steps of a sequence: step(x_t, state, weight, indices) makes one.

    The results are added up, because XLA's CPU backend converts a whole array of bfloat16 to store
    one step of it.
    """

    def function(x, state, weight, indices):
        def advance(carry, steps):
            state, total = carry
            x_t, weight_t = steps if is_dynamic(case) else (steps, weight)
            y, state = step(x_t, state, weight_t, indices)
            return (state, total + y.astype(total.dtype)), None

        wide = jnp.promote_types(x.dtype, jnp.float32)
        steps = (x, weight) if is_dynamic(case) else x
        return jax.lax.scan(advance, (state, jnp.zeros(x.shape[1:], wide)), steps)[0]

    return function


def ours(case):
    def step(x_t, state, weight, indices):
        indices = indices if case.options["slots"] > 1 else None
        return jaxops.lightweight_conv_step(
            x_t, state, weight, dilation=dilation(case), state_indices=indices
        )

    return decode(case, step)


def by_channel(case, weight, dtype):
    """The filters (..., H, K) as (..., C, K), after the softmax of a case that has one."""
    _, C, H, _, _ = case.shape
    wide = weight.astype(dtype)
    if case.options.get("softmax"):
        wide = jax.nn.softmax(wide, axis=-1)
    return jnp.repeat(wide, C // H, axis=-2)


def concatenated(case):
    """The state and the new row in one array: what is written by hand."""

    def step(x_t, state, weight, indices):
        is_indexed = case.options["slots"] > 1
        rows = state[indices] if is_indexed else state
        wide = jnp.promote_types(x_t.dtype, jnp.float32)
        window = jnp.concatenate([rows, x_t[:, None]], axis=1)
        taps = by_channel(case, weight, wide).swapaxes(-1, -2)
        y = jnp.sum(window[:, :: dilation(case)].astype(wide) * taps, axis=1).astype(x_t.dtype)
        last = window[:, 1:]
        return y, state.at[indices].set(last, unique_indices=True) if is_indexed else last

    return decode(case, step)


def shifted(case):
    """A product of each row, added up one by one, and the state rolled."""
    K = case.shape[3]

    def step(x_t, state, weight, indices):
        is_indexed = case.options["slots"] > 1
        rows = state[indices] if is_indexed else state
        wide = jnp.promote_types(x_t.dtype, jnp.float32)
        taps = by_channel(case, weight, wide)
        total = taps[..., -1] * x_t.astype(wide)
        for k in range(K - 1):
            total = total + taps[..., k] * rows[:, k * dilation(case)].astype(wide)
        last = jnp.roll(rows, -1, axis=1).at[:, -1].set(x_t)
        last = state.at[indices].set(last, unique_indices=True) if is_indexed else last
        return total.astype(x_t.dtype), last

    return decode(case, step)


def cost(case: Case, direction: Direction) -> Cost:
    B, C, H, K, N = case.shape
    itemsize = jnp.dtype(case.dtype).itemsize
    # A step reads the state, x and the filters, and writes the state and y. The sum reads y.
    rows = B * (2 * reach(case) + 3) * C
    sums = 2 * B * C * max(4, itemsize)
    filters = H * K * (B if is_dynamic(case) else 1)
    return Cost(
        bytes=N * ((rows + filters) * itemsize + sums),
        flops=2 * N * B * C * K,
        unit="fma float64" if case.dtype == "float64" else "fma float32",
    )


def terms(case: Case, direction: Direction) -> int:
    return case.shape[3] * case.shape[4]


BENCHMARK = Benchmark(
    operator="lightweight_conv_step",
    shape="B,C,H,K,N",
    cases=CASES,
    directions=(Direction("forward", True, ()),),
    arguments=arguments,
    function=ours,
    reference=concatenated,
    peers=(Peer("XLA concatenate", concatenated), Peer("XLA shift", shifted)),
    cost=cost,
    terms=terms,
    # The launches bind it, or caches hold the state.
    near_limit=False,
)
