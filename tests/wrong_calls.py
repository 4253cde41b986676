"""Wrong calls of the CPU handlers, which must end in errors: a program of its own.

    python tests/wrong_calls.py [operator...]

The handlers' calls are recorded as the library makes them. A handler must refuse every change of
one thing, except those in `_FREE`, which no handler can recognise as wrong. Several random changes
at once must not end the process either.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops._core import native

Type = tuple[tuple[int, ...], np.dtype]


@dataclasses.dataclass(frozen=True)
class Call:
    target: str
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    attributes: tuple[tuple[str, object], ...]


def run(calls: Sequence[Call]) -> list[str | None]:
    """The error of each call, or None. One program has all calls; an execution makes one."""
    types = list(dict.fromkeys(o for c in calls for o in c.operands))

    def branch(call):
        results = [jax.ShapeDtypeStruct(*r) for r in call.results]
        make = jax.ffi.ffi_call(call.target, results, has_side_effect=True)
        numbers = [types.index(o) for o in call.operands]

        def make_call(*arrays):
            make(*(arrays[n] for n in numbers), **dict(call.attributes))
            return 0

        return make_call

    program = jax.jit(lambda i, *arrays: jax.lax.switch(i, [branch(c) for c in calls], *arrays))
    arrays = [jax.device_put(_values(*t)) for t in types]
    program = program.lower(0, *arrays).compile()
    errors = []
    for i in range(len(calls)):
        try:
            program(i, *arrays).block_until_ready()
            errors.append(None)
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))
    return errors


def _values(shape, dtype):
    values = np.random.default_rng(0).integers(-3, 4, shape)
    return values.astype(dtype) / dtype.type(2) if dtype.kind == "f" else values.astype(dtype)


def _type(x) -> Type:
    return tuple(x.shape), np.dtype(x.dtype)


def record(functions) -> list[Call]:
    """The calls of handlers that functions, each with its arguments, make."""
    calls = {}

    def call_of(target, results, **_):
        def call(*operands, **attributes):
            made = Call(
                target,
                tuple(map(_type, operands)),
                tuple(map(_type, results)),
                tuple(
                    (k, tuple(v.tolist()) if getattr(v, "ndim", 0) else v)
                    for k, v in attributes.items()
                ),
            )
            calls.setdefault(repr(made), (made, attributes))
            return [jnp.zeros(r.shape, r.dtype) for r in results]

        return call

    with mock.patch.object(jax.ffi, "ffi_call", call_of):
        for function, *arguments in functions:
            jax.jit(function).lower(*arguments)
    return [dataclasses.replace(c, attributes=tuple(a.items())) for c, a in calls.values()]


def valid_calls() -> list[Call]:
    """At least one call of every CPU handler; vmap batches operands of some calls."""

    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def gradients(function, *numbers):
        return jax.grad(lambda *xs: function(*xs).astype(jnp.float32).sum(), numbers or 0)

    def conv(x, weight, bias, **options):
        return jaxops.lightweight_conv(x, weight, bias=bias, **options)

    def conv_without_bias(x, weight):
        return jaxops.lightweight_conv(x, weight, padding="same", data_format="NCT")

    def step(x, state, weight, bias, indices):
        options = {"activation": "gelu", "bias": bias, "state_indices": indices}
        return jaxops.lightweight_conv_step(x, state, weight, **options)

    def dynamic(x, weight, bias, state, ids):
        options = {"bias": bias, "initial_state": state, "segment_ids": ids}
        return jaxops.dynamic_conv(x, weight, normalize=True, **options)

    def dynamic_without_bias(x, weight):
        return jaxops.dynamic_conv(x, weight, padding="same", data_format="NCT")

    def conv_of_segments(x, weight, bias, ids, state):
        return jaxops.lightweight_conv(x, weight, bias=bias, segment_ids=ids, initial_state=state)

    def conv_from_state(x, weight, state):
        return jaxops.lightweight_conv(x, weight, initial_state=state, data_format="NCT")

    def ragged(x, weight, starts, state):
        return jaxops.ragged_conv(x, weight, starts, initial_state=state)

    def grid(volume, points):
        return jaxops.grid_sample(volume, points, padding_mode="border")

    def cubic(volume, points):
        return jaxops.grid_sample(volume, points, method="cubic")

    def hard(logits, labels):
        return jaxops.sigmoid_focal_loss(logits, labels)

    def hard_sum(logits, labels, weight):
        return jaxops.sigmoid_focal_loss(logits, labels, reduction="sum", sample_weight=weight)

    def soft(logits, labels):
        return jaxops.softmax_focal_loss(logits, labels)

    def soft_sum(logits, labels, weight):
        return jaxops.softmax_focal_loss(logits, labels, reduction="sum", sample_weight=weight)

    x, weight, bias = of(2, 9, 4, dtype=jnp.float16), of(2, 3), of(4)
    filters, state, ids = of(2, 9, 2, 3), of(2, 2, 4), of(2, 9, dtype=jnp.int32)
    volume, points = of(3, 4, 5, 2), of(6, 3)
    cells, places = of(6, 8, 5, dtype=jnp.float16), of(6, 3)
    logits, labels = of(7, 4), of(7, dtype=jnp.int32)
    rows = of(7)
    image = of(2, 6, 5, 3)
    window = dict(strides=(2, 1), padding=1, dilation=(1, 2))
    patches = jax.eval_shape(lambda x: jaxops.im2col(x, (3, 2), **window), image)

    def convolve(x, kernel, bias=None, groups=1):
        more = {"groups": groups, "bias": bias, "strides": (2, 1), "dilation": (1, 2)}
        return jaxops.conv2d(x, kernel, **more)

    half, depthwise = of(2, 6, 5, 3, dtype=jnp.float16), functools.partial(convolve, groups=3)

    def dynamic_step(x, state, weight, bias, indices):
        options = {"normalize": True, "bias": bias, "state_indices": indices}
        return jaxops.dynamic_conv_step(x, state, weight, **options)

    parts = [of(3, 2, 4), of(3, 5, 4), of(3, 1, 4)]
    functions = [
        (conv, x, weight, bias),
        (functools.partial(conv, dilation=2, activation="silu"), x, weight, bias),
        (gradients(conv, 0, 1, 2), x, weight, bias),
        (gradients(conv_without_bias, 0, 1), of(2, 4, 9), weight),
        (gradients(conv_without_bias, 1), of(2, 4, 9), weight),
        (jax.vmap(gradients(conv, 0, 1, 2), (0, None, 0)), of(5, *x.shape), weight, of(5, 4)),
        (jaxops.lightweight_conv_step, of(2, 4), of(2, 2, 4), weight),
        (jaxops.dynamic_conv_step, of(2, 4), of(2, 2, 4), of(2, 2, 3)),
        (
            dynamic_step,
            of(3, 2, 4, dtype=jnp.float16),
            of(5, 2, 4),
            of(3, 2, 2, 3),
            of(4),
            of(3, dtype=jnp.int32),
        ),
        (
            jax.vmap(dynamic_step, (0, None, 0, None, None)),
            of(6, 3, 2, 4),
            of(5, 2, 4),
            of(6, 3, 2, 2, 3),
            of(4),
            of(3, dtype=jnp.int32),
        ),
        (step, of(3, 2, 4, dtype=jnp.float16), of(5, 2, 4), weight, of(4), of(3, dtype=jnp.int32)),
        (
            jax.vmap(step, (0, None, None, 0, None)),
            of(6, 3, 2, 4),
            of(5, 2, 4),
            weight,
            of(6, 4),
            of(3, dtype=jnp.int64),
        ),
        (dynamic, x, filters, bias, state, ids),
        (dynamic_without_bias, of(2, 4, 9), filters),
        (gradients(dynamic, 0, 1, 2, 3), x, filters, bias, state, ids),
        (gradients(dynamic_without_bias, 0), of(2, 4, 9), filters),
        (gradients(dynamic_without_bias, 1), of(2, 4, 9), filters),
        (jax.vmap(gradients(dynamic_without_bias, 0, 1), (0, None)), of(5, 2, 4, 9), filters),
        (conv_of_segments, x, weight, bias, ids, state),
        (gradients(conv_of_segments, 0, 1, 2), x, weight, bias, ids, state),
        (gradients(conv_of_segments, 1), x, weight, bias, ids, state),
        (jax.vmap(conv_from_state, (0, None, None)), of(5, 2, 4, 9), weight, of(2, 4, 2)),
        (ragged, of(9, 4), weight, of(4, dtype=jnp.int32), of(3, 2, 4)),
        (grid, volume, points),
        (gradients(grid, 0), volume, points),
        (gradients(grid, 1), volume, points),
        (gradients(grid, 0, 1), volume, points),
        (jax.vmap(gradients(grid, 0, 1), (None, 0)), volume, of(5, 6, 3)),
        (grid, of(4, 5, 2), of(2, 3, 2)),
        (lambda v, p: jax.jvp(lambda p: grid(v, p), (p,), (p,))[1], volume, points),
        (cubic, volume, points),
        (gradients(cubic, 0), volume, points),
        (gradients(cubic, 1), volume, points),
        (jax.vmap(gradients(cubic, 0, 1), (None, 0)), of(4, 5, 2), of(5, 6, 2)),
        (jaxops.trilinear_interpolate, cells, places),
        (gradients(jaxops.trilinear_interpolate, 0), cells, places),
        (gradients(jaxops.trilinear_interpolate, 1), cells, places),
        (gradients(jaxops.trilinear_interpolate, 0, 1), cells, places),
        (jax.vmap(jaxops.trilinear_interpolate, (0, None)), of(4, 6, 8, 5), places),
        (hard, logits, labels),
        (hard, logits, of(7, 4)),
        (hard, logits, of(7, 4, dtype=jnp.bool_)),
        (gradients(hard), logits, labels),
        (gradients(hard), logits, of(7, 4, dtype=jnp.bool_)),
        (hard_sum, logits, labels, rows),
        (jax.value_and_grad(hard_sum), logits, labels, rows),
        (jax.vmap(jax.value_and_grad(hard_sum), (0, None, 0)), of(3, 7, 4), labels, of(3, 7)),
        (soft, logits, labels),
        (gradients(soft), logits, labels),
        (soft_sum, logits, labels, rows),
        (jax.value_and_grad(soft_sum), logits, labels, rows),
        (lambda x: jaxops.im2col(x, (3, 2), **window), image),
        (lambda x: jaxops.im2col(x, 2, data_format="NCHW"), image),
        (lambda p: jaxops.col2im(p, image.shape, **window), patches),
        (convolve, image, of(3, 2, 3, 4), of(4)),
        (gradients(convolve, 0, 1), image, of(3, 2, 3, 4)),
        (gradients(depthwise, 0, 1), half, of(3, 2, 1, 3, dtype=jnp.float16)),
        (jax.vmap(gradients(convolve, 0, 1), (0, None)), of(4, *image.shape), of(3, 2, 3, 4)),
        (lambda *xs: jaxops.concatenate(xs, 1, padded_size=9), *parts),
        (jax.vmap(lambda *xs: jaxops.concatenate(xs, 1), (None, 0)), parts[0], of(5, 3, 1, 4)),
        (lambda x: jaxops.split(x, (2, 5, 1), 1, padded_sizes=(2, 6, 4)), of(3, 8, 4)),
    ]
    return record(functions)


_DTYPES = [jnp.dtype(n) for n in ("f2", "f4", "f8", "i4", "?", "c16")]
_INTEGERS = (-(2**63), -2, 0, 5, 2**33, 2**61, 2**63 - 1)


def _other_types(type_: Type) -> Iterator[tuple[str, Type]]:
    shape, dtype = type_
    for i, n in enumerate(shape):
        for other in sorted({0, 1, n + 1} - {n}):
            yield f"size {i}", ((*shape[:i], other, *shape[i + 1 :]), dtype)
    for other in ((1, *shape), (2, *shape), shape[1:] if shape else (1, 1)):
        yield "rank", (other, dtype)
    for other in _DTYPES:
        if other != dtype:
            yield "dtype", (shape, other)


def _other_values(value: object) -> Iterator[object]:
    if isinstance(value, str):
        yield from ("", value[:-1], value + "s", value.swapcase())
    elif isinstance(value, np.bool_):
        yield ~value
    elif value.dtype == np.int64 and value.ndim:
        yield value[1:]
        yield np.append(value, value[-1:])
        for i in range(value.size):
            for integer in (-2, 2**61, 2**63 - 1):
                other = value.copy()
                other[i] = integer
                yield other
    elif value.dtype.kind == "i" and not value.ndim:
        bounds = np.iinfo(value.dtype)
        yield from (value.dtype.type(np.clip(i, bounds.min, bounds.max)) for i in _INTEGERS)


def _of_other_types(value: object) -> Iterator[object]:
    """The value as an attribute of other types."""
    dtype = None if isinstance(value, str) or value.ndim else value.dtype
    yield from (np.dtype(name).type(0) for name in ("?", "i4", "i8", "f8") if name != dtype)
    dtype = value.dtype if isinstance(value, np.ndarray) else None
    yield from (np.zeros(2, name) for name in ("i4", "i8", "f8") if name != dtype)
    if not isinstance(value, str):
        yield "0"


def single_faults(call: Call) -> Iterator[tuple[str, Call]]:
    """Yields a description of each change, and the call with that change."""
    for kind in ("operands", "results"):
        types = getattr(call, kind)
        for i, type_ in enumerate(types):
            for what, other in _other_types(type_):
                changed = (*types[:i], other, *types[i + 1 :])
                yield f"{kind[:-1]} {i} {what}", dataclasses.replace(call, **{kind: changed})
            without = (*types[:i], *types[i + 1 :])
            yield f"{kind} less {i}", dataclasses.replace(call, **{kind: without})
        yield f"{kind} more", dataclasses.replace(call, **{kind: (*types, types[-1])})
    for i, (name, value) in enumerate(call.attributes):
        rest = call.attributes[:i], call.attributes[i + 1 :]
        others = [("less", ()), ("named otherwise", ((name + "s", value),))]
        others += [("of another type", ((name, other),)) for other in _of_other_types(value)]
        for what, instead in others:
            changed = (*rest[0], *instead, *rest[1])
            yield f"attributes {what}", dataclasses.replace(call, attributes=changed)
        for other in _other_values(value):
            if not np.array_equal(other, value):
                changed = (*rest[0], (name, other), *rest[1])
                yield name, dataclasses.replace(call, attributes=changed)
    more = (*call.attributes, ("zzz", np.int64(0)))
    yield "attributes more", dataclasses.replace(call, attributes=more)


# The changes, by target, that make a valid call of other arrays.
_FREE = {
    "dynamic_conv_step": "operand [0134] size 0|operand 2 (size [01234]|dtype)|operand [34] dtype"
    "|operands less 3|normalize",
    "lightweight_conv_step": "operand [0134] size 0|operand 2 (size [01]|dtype)"
    "|operand [34] dtype|operands less 3",
    "lightweight_conv": "operand 0 size [01]|operand 1 .*|operand [234] (size [01]|dtype)|padding"
    "|dilation|flip_taps",
    "lightweight_conv_backward": "operand . size [01]|operands less 3|result 1 size 0"
    "|result 2 dtype|results less 2|padding|dilation",
    "lightweight_conv_filter_grad": "operand . size 0|operands less 2|result 0 (size .|dtype)"
    "|padding|dilation",
    "dynamic_conv": "operand [01234] size 0|operand 1 size [23]|operand [124] dtype|padding"
    "|dilation|normalize",
    "dynamic_conv_backward": "operand . size 0|operand [012] size 1|operand 1 dtype|result 1 dtype"
    "|padding|dilation|normalize",
    "dynamic_conv_input_grad": "operand [01] size 0|operand 1 (size [23]|dtype)|padding|dilation"
    "|normalize",
    "dynamic_conv_weight_grad": "operand [01] size 0|result 0 (size [23]|dtype)|padding|dilation",
    "grid_sample": "operand 0 size [012]|operand 1 dtype|operands (more|less .)|align_corners"
    "|pixel|deterministic|permuted",
    "grid_sample_volume_grad": "operand 0 dtype|result 0 size [012]|align_corners|pixel"
    "|deterministic|permuted",
    "grid_sample_point_grad": "operand 0 size [012]|align_corners|pixel|deterministic|permuted",
    "grid_sample_backward": "result 0 size 0|align_corners|pixel|deterministic|permuted",
    "taps": "operand 0 size [012]|operand . size 0|permuted",
    "taps_volume_grad": "operand . size 0|result 0 size [012]|permuted",
    "taps_weight_grad": "operand 0 size [012]|operand . size 0|permuted",
    "trilinear_interpolate": "operand . size [01]|operand 1 dtype|operands more",
    "trilinear_feature_grad": "operand . size 0|operand 0 dtype",
    "trilinear_point_grad": "operand . size 0",
    "trilinear_backward": "operand . size 0",
    "sigmoid_focal_loss": "operand 1 dtype|has_ignored|ignored",
    "sigmoid_focal_loss_gradient": "operand 1 dtype|has_ignored|ignored",
    "sigmoid_focal_loss_sum": "operand 0 dtype|operands less 5|has_ignored|ignored",
    "sigmoid_focal_loss_value_and_gradient": "operand [05] size 0|operands less 5"
    "|has_ignored|ignored",
    "softmax_focal_loss": "operand 0 (size 1|dtype)",
    "softmax_focal_loss_gradient": "operands less 4",
    "softmax_focal_loss_sum": "operand 0 (size 1|dtype)|operands less 4",
    "softmax_focal_loss_value_and_gradient": "operands less 4",
    "im2col": "operand 0 size [123]|result 0 size [12345]|strides|dilation|low|again",
    "col2im": "operand 0 size [1234]|result 0 size [12]|strides|dilation|low",
    "conv": "operand 0 size [1234]|operand 1 size [012]|operands less 2"
    "|result 0 (size [123]|dtype)|strides|dilation|low",
    "conv_input_grad": "operand 0 size [123]|operand 1 size [012]|result 0 (size [1234]|dtype)"
    "|strides|dilation|low",
    "conv_kernel_grad": "operand [01] size .|result 0 (size [012]|dtype)|strides|dilation|low",
    "concatenate": "operand . size [012]|operands more|sources",
    "split": "operand 0 size 1|result . size 1|starts|sizes",
}


def several_faults(calls: Sequence[Call], count: int) -> Iterator[Call]:
    random = np.random.default_rng(7)
    for _ in range(count):
        call = calls[random.integers(len(calls))]
        for _ in range(random.integers(2, 5)):
            changed = [c for _, c in single_faults(call)]
            call = changed[random.integers(len(changed))]
            if not call.results or not call.operands:
                break
        yield call


def main(names: Sequence[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    valid = valid_calls()
    assert {c.target for c in valid} == set(native.TARGETS)
    wanted = {f"jaxops_{name}" for name in names} or set(native.TARGETS)
    types = (((1000, 8, 64), jnp.dtype("f2")), ((1000, 3), jnp.dtype("f4")))
    small = ((1, 64), jnp.dtype("f2"))
    wrong = [("result", Call("jaxops_trilinear_interpolate", types, (small,), ()))]
    # Kernels support no items of 16 bytes: complex arrays are passed as two images.
    wide = [[((2, 6, 5, 3), jnp.dtype("c16"))], [((2, 6, 2, 2, 4, 2), jnp.dtype("c16"))]]
    narrow = [c for c in valid if c.target == "jaxops_im2col"][-1]
    wrong += [("dtype", dataclasses.replace(narrow, operands=wide[0], results=wide[1]))]
    wrong = [fault for fault in wrong if fault[1].target in wanted]
    valid = [call for call in valid if call.target in wanted]
    wrong += [fault for call in valid for fault in single_faults(call)]
    wrong += [(None, call) for call in several_faults(valid, 300)]
    assert run(valid) == [None] * len(valid)
    for i in range(0, len(wrong), 64):
        part = wrong[i : i + 64]
        for (what, call), error in zip(part, run([call for _, call in part]), strict=True):
            if what is None or error is not None:
                continue
            free = _FREE[call.target.removeprefix("jaxops_")]
            assert re.fullmatch(free, what), f"not refused, a wrong {what}: {call}"
    print(len(wrong), "wrong calls")


if __name__ == "__main__":
    main(sys.argv[1:])
