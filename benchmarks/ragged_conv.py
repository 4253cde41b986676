"""ragged_conv against XLA's formulations. Shapes are (S, N, C, H, K).

S sequences have N tokens together. Their lengths are random and the same in every run; with `state`
each continues one of S states.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, directions, normal

BOTH = ["float32", "bfloat16"]
# fmt: off
CASES = [
    *cases("small", (4, 64, 256, 256, 4), BOTH, state=False),
    *cases("small", (16, 256, 256, 16, 7), "float32", state=[False, True]),
    # A server packs such steps of Mamba's or GDN's layers, and of LightConv's.
    *cases("typical", (8, 2048, 4096, 4096, 4), BOTH, state=[False, True]),
    *cases("typical", (64, 2048, 4096, 4096, 4), "bfloat16", state=[False, True]),
    *cases("typical", (16, 4096, 1024, 16, 31), BOTH, state=[False, True]),
    *cases("large", (32, 16384, 8192, 8192, 4), "bfloat16", state=[False, True]),
    *cases("odd", (9, 1001, 333, 111, 5), ["float32", "float16"], state=[False, True]),
    *cases("odd", (5, 510, 100, 10, 3), "float64", state=True),
]
# fmt: on
for tokens in (2**n for n in range(4, 17, 3)):
    CASES += cases("scaling", (8, tokens, 1024, 1024, 4), "float32", state=False)


def starts(case: Case) -> np.ndarray:
    """Where sequences begin, and the number of tokens."""
    count, tokens, *_ = case.shape
    cuts = np.random.default_rng(0).integers(0, tokens + 1, count - 1)
    return np.concatenate([[0], np.sort(cuts), [tokens]]).astype(np.int32)


def arguments(case, key):
    S, N, C, H, K = case.shape
    of_x, of_weight, of_state = jax.random.split(key, 3)
    x = normal(of_x, (N, C), case.dtype)
    weight = (normal(of_weight, (H, K), "float32") / K**0.5).astype(case.dtype)
    state = [normal(of_state, (S, K - 1, C), case.dtype)] if case.options["state"] else []
    return x, weight, jnp.asarray(starts(case)), *state


def ours(case):
    def function(x, weight, starts, state=None):
        return jaxops.ragged_conv(x, weight, starts, initial_state=state)

    return function


def taps(case, weight, dtype):
    _, _, C, H, _ = case.shape
    return jnp.repeat(weight.astype(dtype), C // H, axis=0)


def positions(case, starts):
    """The sequence that a token belongs to, and the index of the token there."""
    tokens = jnp.arange(case.shape[1], dtype=jnp.int32)
    sequence = jnp.searchsorted(starts, tokens, side="right").astype(jnp.int32) - 1
    return sequence, tokens - starts[sequence]


def shift_and_mask(case):
    """K shifted multiplies, where the shifted token is of the same sequence."""
    _, N, _, _, K = case.shape

    def function(x, weight, starts, state=None):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        filters = taps(case, weight, wide)
        sequence, position = positions(case, starts)
        padded = jnp.pad(x, [(K - 1, 0), (0, 0)])
        total = 0
        for k in range(K):
            before = position - (K - 1 - k)
            outside = 0
            if state is not None and k < K - 1:
                outside = state[sequence, jnp.clip(before + K - 1, 0, K - 2)]
            shifted = jnp.where((before >= 0)[:, None], padded[k : k + N], outside)
            total = total + filters[:, k] * shifted.astype(wide)
        return total.astype(x.dtype)

    return function


def padded_batch(case):
    """Sequences of the longest one's length, as a convolution of a batch takes them."""
    S, _, _, _, K = case.shape
    longest = int(np.diff(starts(case)).max())

    def function(x, weight, starts, state=None):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        filters = taps(case, weight, wide)
        sequence, position = positions(case, starts)
        rows = jnp.zeros((S, K - 1 + longest, x.shape[1]), x.dtype)
        if state is not None:
            rows = rows.at[:, : K - 1].set(state)
        rows = rows.at[sequence, position + K - 1].set(x, unique_indices=True)
        total = 0
        for k in range(K):
            total = total + filters[:, k] * rows[:, k : k + longest].astype(wide)
        return total.astype(x.dtype)[sequence, position]

    return function


def cost(case: Case, direction: Direction) -> Cost:
    S, N, C, H, K = case.shape
    itemsize = jnp.dtype(case.dtype).itemsize
    # Reads x, and the cotangent; writes y, the gradients, or both.
    arrays = {"forward": 2, "backward": 3, "value_and_grad": 4}[direction.name]
    products = {"forward": 1, "backward": 2, "value_and_grad": 3}[direction.name]
    states = S * (K - 1) * C if case.options["state"] else 0
    return Cost(
        bytes=(arrays * N * C + states + H * K) * itemsize,
        flops=2 * products * N * C * K,
        unit="fma float64" if case.dtype == "float64" else "fma float32",
    )


def terms(case: Case, direction: Direction) -> int:
    _, N, C, H, K = case.shape
    return N * (C // H) if direction.wrt else K


BENCHMARK = Benchmark(
    operator="ragged_conv",
    shape="S,N,C,H,K",
    cases=CASES,
    directions=directions(0, 1),
    arguments=arguments,
    function=ours,
    reference=shift_and_mask,
    peers=(Peer("XLA shift-and-mask", shift_and_mask), Peer("XLA padded batch", padded_batch)),
    cost=cost,
    terms=terms,
)
