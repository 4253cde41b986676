"""lightweight_conv against XLA's and PyTorch's formulations. Shapes are (B, C, T, H, K)."""

from __future__ import annotations

import importlib.util
import itertools

import jax
import jax.numpy as jnp

import jaxops
from jaxops._bench.spec import (
    GRID,
    Benchmark,
    Case,
    Cost,
    Direction,
    Peer,
    cases,
    directions,
    normal,
)

LAYOUTS = ["NCT", "NTC"]


def conv(group, shape, dtypes, *, layout=LAYOUTS, padding="causal", target=False, **options):
    return cases(group, shape, dtypes, layout=layout, padding=padding, target=target, **options)


# fmt: off
CASES = [
    *conv("small", (2, 64, 65, 8, 5), "float32"),
    *conv("small", (1, 256, 64, 4, 7), "float16", layout="NTC", padding="same"),
    *conv("small", (8, 256, 128, 256, 4), "bfloat16"),
    # LightConv (Wu et al. 2019) has these layers; Mamba and Hyena have the depthwise ones.
    *conv("typical", (32, 1024, 128, 16, 31), "float32", layout="NCT", target=True),
    *conv("typical", (32, 1024, 128, 16, 31), "float32", layout="NTC", target=True),
    *conv("typical", (32, 1024, 128, 16, 7), ["float32", "bfloat16"], layout="NTC", padding="same"),
    *conv("typical", (16, 512, 512, 8, 15), "float16"),
    *conv("typical", (8, 1536, 2048, 1536, 4), "bfloat16"),
    *conv("typical", (4, 768, 4096, 768, 3), "float32", layout="NCT"),
    *conv("large", (8, 1024, 2048, 16, 31), "bfloat16", layout="NCT", target=True),
    *conv("large", (8, 1024, 2048, 16, 31), "bfloat16", layout="NTC", target=True),
    *conv("large", (4, 2048, 8192, 2048, 4), "bfloat16", layout="NCT", target=True),
    *conv("large", (4, 2048, 8192, 2048, 4), "bfloat16", layout="NTC", target=True),
    *conv("large", (8, 1024, 4096, 1024, 3), "bfloat16", dilation=8),
    # Rows of few vectors, and rows that are not whole vectors.
    *conv("typical", (2048, 512, 16, 512, 7), ["float32", "bfloat16"], layout="NCT"),
    *conv("typical", (2048, 512, 16, 8, 15), "bfloat16", layout="NCT"),
    *conv("odd", (254, 512, 129, 512, 4), ["float32", "bfloat16"], layout="NCT"),
    *conv("odd", (8, 777, 1001, 7, 15), "bfloat16", layout="NTC", padding="same"),
    *conv("odd", (64, 255, 65, 5, 3), "float32", layout="NCT"),
    *conv("odd", (3, 129, 4099, 3, 63), "float32", layout="NTC", padding="same"),
    *conv("odd", (4, 510, 1023, 10, 5), "float64", padding="same"),
    # Packed sequences of so many steps, for which XLA pads and masks.
    *[c for n in (1, 16, 128, 1000)
      for c in conv("typical", (4, 1024, 2048, 1024, 4), ["float32", "bfloat16"], segments=n)],
    *conv("typical", (32, 1024, 128, 16, 31), "float32", segments=100),
    *[c for n in (16, 128, 1000)
      for c in conv("large", (8, 1024, 2048, 16, 31), "bfloat16", segments=n)],
    *conv("large", (1, 12288, 16384, 12288, 4), "bfloat16"),
    *conv("large", (1, 12288, 16384, 12288, 4), "bfloat16", segments=1024),
    # Sequences in chunks: each has the state that the one before has left.
    *conv("typical", (32, 1024, 128, 16, 31), "float32", state=True),
    *conv("typical", (4, 1024, 2048, 1024, 4), "bfloat16", state=True),
    *conv("large", (8, 1024, 2048, 16, 31), "bfloat16", state=True),
    *conv("large", (1, 12288, 16384, 12288, 4), "bfloat16", state=True),
    *conv("large", (1, 12288, 16384, 12288, 4), "bfloat16", segments=1024, state=True),
]
# fmt: on
for steps in (2**n for n in range(6, 21, 2)):
    CASES += conv("scaling", (1, 256, steps, 4, 7), "float32", layout="NTC")


def grid() -> list[Case]:
    """All numbers of taps with all numbers of steps, as 2^23 elements or more, in both layouts.

    Heads and dtypes take turns, so that each pair of two properties occurs. Filters of more than
    16 times the steps are left out.
    """
    channels, found = 1024, []
    dtypes = [("bfloat16", {}), ("float32", {}), ("bfloat16", {"weights": "float32"})]
    dtypes.append(("float16", {}))
    indices = itertools.product(range(6), range(6), range(2))
    for by_steps, by_taps, by_layout in indices:
        steps, taps = (1, 8, 64, 512, 4096, 65536)[by_steps], (3, 4, 7, 31, 127, 1023)[by_taps]
        heads = (channels, 128, 16, 1)[(by_steps + by_taps + by_layout) % 4]
        dtype, options = dtypes[(by_steps + 2 * by_taps + 3 * by_layout) % 4]
        shape = (max(1, 2**23 // (channels * steps)), channels, steps, heads, taps)
        if taps <= 16 * steps:
            found += conv(GRID, shape, dtype, layout=LAYOUTS[by_layout], **options)
    return found


def time_axis(case: Case) -> int:
    return 2 if case.options["layout"] == "NCT" else 1


def dilation(case: Case) -> int:
    return case.options.get("dilation", 1)


def pads(case: Case) -> tuple[int, int]:
    """Zero steps before and after the sequence."""
    reach = (case.shape[-1] - 1) * dilation(case)
    before = reach if case.options["padding"] == "causal" else reach // 2
    return before, reach - before


def arguments(case, key):
    B, C, T, H, K = case.shape
    of_x, of_weight, of_state = jax.random.split(key, 3)
    is_nct = time_axis(case) == 2
    shape = (B, C, T) if is_nct else (B, T, C)
    x = normal(of_x, shape, case.dtype)
    weights = case.options.get("weights", case.dtype)
    weight = (normal(of_weight, (H, K), "float32") / K**0.5).astype(weights)
    rest = []
    if "segments" in case.options:
        ids = jnp.arange(T, dtype=jnp.int32) // case.options["segments"]
        rest.append(jnp.broadcast_to(ids, (B, T)))
    if "state" in case.options:
        before = pads(case)[0]
        rest.append(normal(of_state, (B, C, before) if is_nct else (B, before, C), case.dtype))
    return x, weight, *rest


def unpack(case, rest):
    """The ids and the state of a case, None for what it does not have."""
    rest = list(rest)
    ids = rest.pop(0) if "segments" in case.options else None
    return ids, rest.pop(0) if "state" in case.options else None


def with_rows_around(case, x, ids, state):
    """x with the rows that taps read before and after it, and likewise the ids."""
    axis = time_axis(case)
    widths = [(0, 0)] * 3
    widths[axis] = pads(case)
    if state is not None:
        x = jnp.concatenate([state.astype(x.dtype), x], axis=axis)
        widths[axis] = (0, pads(case)[1])
    if ids is None:
        return jnp.pad(x, widths), None
    # A state belongs to the first segment.
    own = jnp.full_like(ids[:, :1], -1) if state is None else ids[:, :1]
    ids = jnp.concatenate([jnp.repeat(own, pads(case)[0], axis=1), ids], axis=1)
    return jnp.pad(x, widths), jnp.pad(ids, [(0, 0), (0, pads(case)[1])], constant_values=-1)


def ours(case):
    def function(x, weight, *rest):
        ids, state = unpack(case, rest)
        return jaxops.lightweight_conv(
            x,
            weight,
            segment_ids=ids,
            initial_state=state,
            padding=case.options["padding"],
            dilation=dilation(case),
            data_format=case.options["layout"],
        )

    return function


def shift_and_add(case):
    """K shifted multiplies, which XLA fuses: its best formulation for short filters.

    With segments, what is shifted is masked where the shifted ids are others.
    """
    axis, (_, C, T, H, K) = time_axis(case), case.shape

    def function(x, weight, *rest):
        ids, state = unpack(case, rest)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        padded, padded_ids = with_rows_around(case, x, ids, state)
        by_channel = jnp.repeat(weight, C // H, axis=0).astype(wide)
        total = 0
        for k in range(K):
            start = k * dilation(case)
            shifted = jax.lax.slice_in_dim(padded, start, start + T, axis=axis)
            if padded_ids is not None:
                is_one = padded_ids[:, start : start + T] == ids
                shifted = jnp.where(jnp.expand_dims(is_one, 3 - axis), shifted, 0)
            tap = by_channel[:, k, None] if axis == 2 else by_channel[:, k]
            total = total + tap * shifted.astype(wide)
        return total.astype(x.dtype)

    return function


def exact(case):
    """Shift-and-add as a loop, which compiles and runs faster than XLA's fusion in float64."""
    axis, (_, C, T, H, K) = time_axis(case), case.shape

    def function(x, weight, *rest):
        ids, state = unpack(case, rest)
        padded, padded_ids = with_rows_around(case, x, ids, state)
        by_tap = jnp.repeat(weight, C // H, axis=0).T
        by_tap = by_tap[:, :, None] if axis == 2 else by_tap

        @jax.checkpoint  # a gradient then keeps no shifted copy
        def add(total, k):
            shifted = jax.lax.dynamic_slice_in_dim(padded, k * dilation(case), T, axis=axis)
            if padded_ids is not None:
                of_taps = jax.lax.dynamic_slice_in_dim(padded_ids, k * dilation(case), T, axis=1)
                shifted = jnp.where(jnp.expand_dims(of_taps == ids, 3 - axis), shifted, 0)
            return total + by_tap[k] * shifted, None

        return jax.lax.scan(add, jnp.zeros_like(x), jnp.arange(K))[0]

    return function


def grouped_conv(case):
    _, C, _, H, _ = case.shape
    layout = {1: ("NWC", "WIO", "NWC"), 2: ("NCW", "OIW", "NCW")}[time_axis(case)]

    def function(x, weight):
        by_channel = jnp.repeat(weight, C // H, axis=0)
        kernel = by_channel[:, None] if time_axis(case) == 2 else by_channel.T[:, None]
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (1,),
            [pads(case)],
            rhs_dilation=(dilation(case),),
            dimension_numbers=layout,
            feature_group_count=C,
            precision="highest",  # no TF32, which float32 users do not expect
        )

    return function


def fft(case):
    axis, (_, C, T, H, K) = time_axis(case), case.shape
    reach = (K - 1) * dilation(case)

    def function(x, weight):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        by_channel = jnp.repeat(weight, C // H, axis=0).astype(wide)
        # A correlation is a convolution with the taps in reverse, spread by the dilation.
        zero = jnp.zeros((), wide)
        taps = jax.lax.pad(by_channel[:, ::-1], zero, [(0, 0, 0), (0, 0, dilation(case) - 1)])
        taps = taps if axis == 2 else taps.T
        length = 1 << (T + reach - 1).bit_length()
        spectrum = jnp.fft.rfft(x.astype(wide), length, axis=axis)
        spectrum = spectrum * jnp.fft.rfft(taps, length, axis=axis - 1)
        full = jnp.fft.irfft(spectrum, length, axis=axis)
        start = reach - pads(case)[0]
        return jax.lax.slice_in_dim(full, start, start + T, axis=axis).astype(x.dtype)

    return function


def torch_conv(case):
    import torch

    _, C, _, H, _ = case.shape

    def function(x, weight):
        x = x if time_axis(case) == 2 else x.transpose(1, 2)
        by_channel = weight.repeat_interleave(C // H, dim=0)[:, None]
        padded = torch.nn.functional.pad(x, pads(case))
        y = torch.nn.functional.conv1d(padded, by_channel, dilation=dilation(case), groups=C)
        return y if time_axis(case) == 2 else y.transpose(1, 2)

    return function


def torch_shift_and_add(case):
    import torch

    axis, (_, C, T, H, K) = time_axis(case), case.shape

    def function(x, weight):
        wide = torch.promote_types(x.dtype, torch.float32)
        before, after = pads(case)
        padded = torch.nn.functional.pad(x, (before, after) if axis == 2 else (0, 0, before, after))
        by_channel = weight.repeat_interleave(C // H, dim=0).to(wide)
        total = 0
        for k in range(K):
            tap = by_channel[:, k, None] if axis == 2 else by_channel[:, k]
            total = total + tap * padded.narrow(axis, k * dilation(case), T).to(wide)
        return total.to(x.dtype)

    return torch.compile(function, dynamic=False, fullgraph=True)


def causal_conv1d(case):
    """The package of that name, whose kernels Mamba's authors wrote."""
    from causal_conv1d import causal_conv1d_fn  # pyright: ignore[reportMissingImports]

    _, C, _, H, _ = case.shape

    def function(x, weight, ids=None):
        # It takes rows of channels as such: a transposed view of (B, T, C).
        x = x if time_axis(case) == 2 else x.transpose(1, 2)
        y = causal_conv1d_fn(x, weight.repeat_interleave(C // H, dim=0), seq_idx=ids)
        return y if time_axis(case) == 2 else y.transpose(1, 2)

    return function


def not_causal_conv1d(case, direction, platform):
    """Why the package causal-conv1d does not run on a case."""
    if platform != "cuda":
        return "has kernels for GPUs only"
    if importlib.util.find_spec("causal_conv1d") is None:
        return "causal-conv1d is not installed"
    if not 2 <= case.shape[-1] <= 4:
        return "has 2 to 4 taps"
    if case.options["padding"] != "causal" or dilation(case) != 1:
        return "has causal padding without dilation only"
    if case.dtype == "float64" or "weights" in case.options:
        return "has no float64, and one dtype"
    if "segments" in case.options and time_axis(case) == 2:
        return "has segments in NTC only"
    return "is timed without states" if "state" in case.options else None


def not_plain(case, direction, platform):
    """Why a library's convolution does not run on a case."""
    if {"segments", "state"} & set(case.options):
        return "has no segments and states"
    return "has one dtype" if "weights" in case.options else None


def many_taps(case, direction, platform):
    """Why shift-and-add does not run on a case."""
    return "takes up to 80 ms a call of 127 taps on an H200" if case.shape[-1] > 64 else None


def not_compiled(case, direction, platform):
    """Why torch.compile does not run on a case."""
    return not_plain(case, direction, platform) or many_taps(case, direction, platform)


def slow_conv(case, direction, platform):
    if why := not_plain(case, direction, platform):
        return why
    B, C, T, _, K = case.shape
    much = case.dtype == "float64" or B * C * T * K > 2**26
    return SLOW if platform == "cpu" and much else None


def slow_fft(case, direction, platform):
    if why := not_plain(case, direction, platform):
        return why
    B, C, T, *_ = case.shape
    return SLOW if platform == "cpu" and B * C * T > 2**24 else None


SLOW = "takes more than a second a call on a CPU"


def cost(case: Case, direction: Direction) -> Cost:
    B, C, T, H, K = case.shape
    itemsize = jnp.dtype(case.dtype).itemsize
    # Reads x, or x and the cotangent; writes y, dx, or both.
    sequences = {"forward": 2, "backward": 3, "value_and_grad": 4}[direction.name]
    filters = 1 if direction.name == "forward" else 2
    products = {"forward": 1, "backward": 2, "value_and_grad": 3}[direction.name]
    if itemsize == 2 and C > H:
        # Channels that share taps form matrices, which tensor cores multiply.
        unit = f"matmul {case.dtype}"
    else:
        unit = "fma float64" if case.dtype == "float64" else "fma float32"
    ids = 4 * B * T if "segments" in case.options else 0
    return Cost(
        bytes=(sequences * B * C * T + filters * H * K) * itemsize + ids,
        flops=2 * products * B * C * T * K,
        unit=unit,
    )


def terms(case: Case, direction: Direction) -> int:
    B, C, T, H, K = case.shape
    return B * T * (C // H) if direction.wrt else K


BENCHMARK = Benchmark(
    operator="lightweight_conv",
    shape="B,C,T,H,K",
    cases=CASES,
    directions=directions(0, 1),
    arguments=arguments,
    function=ours,
    reference=exact,
    peers=(
        Peer("XLA shift-and-add", shift_and_add, declines=many_taps),
        Peer("XLA conv", grouped_conv, declines=slow_conv, costly=True),
        Peer("XLA FFT", fft, declines=slow_fft),
        Peer("torch conv1d", torch_conv, declines=not_plain, torch=True),
        Peer("causal-conv1d", causal_conv1d, declines=not_causal_conv1d, torch=True),
        Peer("torch.compile", torch_shift_and_add, declines=not_compiled, torch=True, costly=True),
    ),
    cost=cost,
    terms=terms,
    grid=grid(),
)
