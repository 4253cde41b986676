"""dynamic_conv against XLA's formulations. Shapes are (B, T, C, H, K)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import Benchmark, Case, Cost, Direction, Peer, cases, directions, normal


def conv(group, shape, dtypes, *, layout="NTC", softmax=True, **options):
    return cases(group, shape, dtypes, layout=layout, softmax=softmax, **options)


BOTH = ["float32", "bfloat16"]
# fmt: off
CASES = [
    *conv("small", (2, 65, 64, 8, 5), "float32"),
    *conv("small", (16, 1, 1024, 16, 7), "float32"),
    # DynamicConv (Wu et al. 2019) has these layers.
    *conv("typical", (8, 512, 1024, 16, 3), BOTH, softmax=[True, False]),
    *conv("typical", (8, 512, 1024, 16, 7), BOTH),
    *conv("typical", (8, 512, 1024, 16, 15), BOTH),
    *conv("typical", (8, 512, 1024, 16, 31), BOTH, softmax=[True, False]),
    *conv("typical", (8, 512, 1024, 16, 3), "float32", layout="NCT"),
    *conv("typical", (8, 512, 1024, 16, 31), "float32", layout="NCT"),
    *conv("typical", (1, 2048, 512, 8, 4), BOTH, layout=["NTC", "NCT"]),
    *conv("large", (8, 2048, 1024, 16, 15), "bfloat16", layout=["NTC", "NCT"]),
    *conv("odd", (3, 1001, 259, 7, 5), "float32"),
    *conv("odd", (2, 1001, 64, 64, 4), "float32"),
]
# fmt: on
for steps in (2**n for n in range(4, 17, 3)):
    CASES += conv("scaling", (1, steps, 256, 4, 7), "float32")


def time_axis(case: Case) -> int:
    return 2 if case.options["layout"] == "NCT" else 1


def arguments(case, key):
    B, T, C, H, K = case.shape
    of_x, of_weight = jax.random.split(key)
    x = normal(of_x, (B, C, T) if time_axis(case) == 2 else (B, T, C), case.dtype)
    return x, (normal(of_weight, (B, T, H, K), "float32") / K**0.5).astype(case.dtype)


def ours(case):
    def function(x, weight):
        return jaxops.dynamic_conv(
            x, weight, normalize=case.options["softmax"], data_format=case.options["layout"]
        )

    return function


def probabilities(case, weight):
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    return jax.nn.softmax(wide, axis=-1) if case.options["softmax"] else wide


def causal(case, x):
    """x in float32 at least, with zeros before it."""
    widths = [(0, 0)] * 3
    widths[time_axis(case)] = (case.shape[-1] - 1, 0)
    return jnp.pad(x, widths).astype(jnp.promote_types(x.dtype, jnp.float32))


def shift_and_add(case):
    """K shifted multiplies, which XLA fuses."""
    axis, (B, T, C, H, K) = time_axis(case), case.shape

    def function(x, weight):
        rows, p = causal(case, x), probabilities(case, weight)
        shape = (B, T, H, C // H) if axis == 1 else (B, H, C // H, T)
        total = 0
        for k in range(K):
            shifted = jax.lax.slice_in_dim(rows, k, k + T, axis=axis).reshape(shape)
            tap = p[..., k][..., None] if axis == 1 else p[..., k].swapaxes(1, 2)[:, :, None]
            total = total + tap * shifted
        return total.reshape(x.shape).astype(x.dtype)

    return function


def unfold(case):
    """The windows of all steps as an array, times the filters, as in fairseq."""
    axis, (B, T, C, H, K) = time_axis(case), case.shape

    def function(x, weight):
        rows, p = causal(case, x), probabilities(case, weight)
        shape = (B, T, H, C // H) if axis == 1 else (B, H, C // H, T)
        steps = (jax.lax.slice_in_dim(rows, k, k + T, axis=axis).reshape(shape) for k in range(K))
        windows = jnp.stack(list(steps), axis=-1)
        if axis == 1:
            y = jnp.einsum("bthrk,bthk->bthr", windows, p, precision="highest")
        else:
            y = jnp.einsum("bhrtk,bthk->bhrt", windows, p, precision="highest")
        return y.reshape(x.shape).astype(x.dtype)

    return function


def slow_unfold(case, direction, platform):
    B, T, C, _, K = case.shape
    return SLOW if platform == "cpu" and B * T * C * K > 2**26 else None


SLOW = "takes more than a second a call on a CPU"


def cost(case: Case, direction: Direction) -> Cost:
    B, T, C, H, K = case.shape
    itemsize = jnp.dtype(case.dtype).itemsize
    # Reads x and the weights, and the cotangent; writes y, the gradients, or both.
    sequences = {"forward": 2, "backward": 3, "value_and_grad": 4}[direction.name]
    filters = 1 if direction.name == "forward" else 2
    products = {"forward": 1, "backward": 2, "value_and_grad": 3}[direction.name]
    return Cost(
        bytes=(sequences * B * T * C + filters * B * T * H * K) * itemsize,
        flops=2 * products * B * T * C * K,
        unit="fma float64" if case.dtype == "float64" else "fma float32",
    )


def terms(case: Case, direction: Direction) -> int:
    _, _, C, H, K = case.shape
    return C // H + 2 * K if direction.wrt else 2 * K


BENCHMARK = Benchmark(
    operator="dynamic_conv",
    shape="B,T,C,H,K",
    cases=CASES,
    directions=directions(0, 1),
    arguments=arguments,
    function=ours,
    reference=shift_and_add,
    peers=(
        Peer("XLA shift-and-add", shift_and_add),
        Peer("XLA unfold", unfold, declines=slow_unfold, costly=True),
    ),
    cost=cost,
    terms=terms,
)
