"""Errors name function and argument, and describe the given value without any entry of an array."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._core import checks

SENTINEL = 123456.78
X = np.zeros((2, 4, 6), np.float32)
IMAGE = np.zeros((1, 5, 5, 4), np.float32)
KERNEL = np.zeros((3, 3, 4, 2), np.float32)

# Valid arguments of every public function.
CALLS = {
    "lightweight_conv": {
        "x": X,
        "weight": np.zeros((2, 3), np.float32),
        "padding": "causal",
        "dilation": 1,
        "bias": np.zeros(6, np.float32),
        "activation": None,
        "segment_ids": np.zeros((2, 4), np.int32),
        "initial_state": np.zeros((2, 2, 6), np.float32),
        "return_final_state": False,
        "data_format": "NTC",
    },
    "lightweight_conv_step": {
        "x_t": np.zeros((2, 6), np.float32),
        "state": np.zeros((2, 2, 6), np.float32),
        "weight": np.zeros((2, 3), np.float32),
        "dilation": 1,
        "bias": np.zeros(6, np.float32),
        "activation": None,
        "state_indices": np.arange(2, dtype=np.int32),
    },
    "dynamic_conv": {
        "x": X,
        "weight": np.zeros((2, 4, 2, 3), np.float32),
        "normalize": True,
        "padding": "causal",
        "dilation": 1,
        "bias": np.zeros(6, np.float32),
        "activation": None,
        "segment_ids": np.zeros((2, 4), np.int32),
        "initial_state": np.zeros((2, 2, 6), np.float32),
        "return_final_state": False,
        "data_format": "NTC",
    },
    "dynamic_conv_step": {
        "x_t": X[:, 0],
        "state": np.zeros((3, 2, 6), np.float32),
        "weight": np.zeros((2, 2, 3), np.float32),
        "normalize": True,
        "dilation": 1,
        "bias": np.zeros(6, np.float32),
        "activation": None,
        "state_indices": np.zeros(2, np.int32),
    },
    "conv_transpose": {
        "lhs": X,
        "rhs": np.zeros((3, 2, 6), np.float32),
        "strides": (2,),
        "padding": ((1, 1),),
        "rhs_dilation": (1,),
        "dimension_numbers": ("NHC", "HIO", "NHC"),
        "transpose_kernel": True,
        "precision": None,
        "preferred_element_type": None,
        "use_consistent_padding": True,
        "feature_group_count": 1,
    },
    "ragged_conv": {
        "x": X[0],
        "weight": np.zeros((2, 3), np.float32),
        "starts": np.asarray([0, 3, 4], np.int32),
        "initial_state": np.zeros((5, 2, 6), np.float32),
        "state_indices": np.asarray([4, 0], np.int32),
        "dilation": 1,
        "bias": np.zeros(6, np.float32),
        "activation": None,
        "return_final_state": False,
    },
    "concatenate": {
        "arrays": [X, X],
        "axis": 1,
        "dtype": "float32",
        "sizes": (4, 4),
        "padded_size": 9,
    },
    "split": {"array": X, "sizes": (1, 3), "axis": 1, "padded_sizes": (1, 4)},
    "conv1d": {
        "x": IMAGE[0],
        "kernel": KERNEL[0],
        "strides": 1,
        "padding": "SAME",
        "dilation": 1,
        "groups": 1,
        "bias": np.zeros(2, np.float32),
        "activation": None,
        "dimension_numbers": ("NWC", "WIO", "NWC"),
        "precision": None,
        "preferred_element_type": None,
    },
    "conv2d": {
        "x": IMAGE,
        "kernel": KERNEL,
        "strides": 1,
        "padding": "SAME",
        "dilation": 1,
        "groups": 1,
        "bias": np.zeros(2, np.float32),
        "activation": None,
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        "precision": None,
        "preferred_element_type": None,
    },
    "conv3d": {
        "x": IMAGE[None],
        "kernel": KERNEL[None],
        "strides": 1,
        "padding": "SAME",
        "dilation": 1,
        "groups": 1,
        "bias": np.zeros(2, np.float32),
        "activation": None,
        "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"),
        "precision": None,
        "preferred_element_type": None,
    },
    "im2col": {
        "x": IMAGE,
        "kernel_size": 3,
        "strides": 1,
        "padding": 0,
        "dilation": 1,
        "data_format": "NHWC",
    },
    "col2im": {
        "patches": np.zeros((1, 3, 3, 3, 3, 4), np.float32),
        "input_shape": IMAGE.shape,
        "strides": 1,
        "padding": 0,
        "dilation": 1,
        "data_format": "NHWC",
    },
    "sigmoid_focal_loss": {
        "logits": np.zeros((3, 5), np.float32),
        "labels": np.zeros(3, np.int32),
        "gamma": 2.0,
        "alpha": 0.25,
        "class_weight": np.ones(5, np.float32),
        "sample_weight": np.ones(3, np.float32),
        "ignore_index": -1,
        "reduction": "sum",
        "normalizer": 1.0,
    },
    "grid_sample": {
        "volume": np.zeros((3, 3, 2), np.float32),
        "points": np.zeros((7, 2), np.float32),
        "method": "linear",
        "padding_mode": "constant",
        "align_corners": True,
        "coordinates": "normalized",
        "cval": 0.5,
        "data_format": "NHWC",
        "deterministic": False,
    },
    "map_coordinates": {
        "input": np.zeros((3, 4, 5), np.float32),
        "coordinates": [np.zeros(5, np.float32)] * 3,
        "order": 1,
        "mode": "nearest",
        "cval": 0.0,
    },
    "trilinear_interpolate": {
        "features": np.zeros((2, 8, 3), np.float32),
        "points": np.zeros((2, 3), np.float32),
    },
}
CALLS["softmax_focal_loss"] = CALLS["sigmoid_focal_loss"] | {"where": np.ones((3, 5), bool)}
for of_function in CALLS.values():
    of_function["implementation"] = None

# No argument accepts these values.
BAD = {
    "jax": lambda: jnp.full((3, 1, 2, 3, 5, 7), SENTINEL),
    "numpy": lambda: np.full((3, 1, 2, 3, 5, 7), SENTINEL, np.float32),
    "vector": lambda: np.full(40, SENTINEL),
    "few integers": lambda: np.full(17, int(SENTINEL)),
    "list": lambda: [SENTINEL] * 11,
    "short list": lambda: [SENTINEL] * 2 + [None],
    "nested list": lambda: [[SENTINEL] * 3] * 17,
    "list of arrays": lambda: [np.full(3, SENTINEL), jnp.full(4, SENTINEL)],
    "array of objects": lambda: np.array([SENTINEL, "name", None], object),
    "long list": lambda: [0] * 1000,
    "long string": lambda: str(SENTINEL) * 1000,
    "mapping": lambda: {"a": jnp.full(3, SENTINEL)},
    "traced": lambda: jnp.full((3, 1, 2, 3, 5, 7), SENTINEL),
    "list of traced": lambda: [jnp.full((7,), SENTINEL), jnp.full((6,), SENTINEL)],
}
LISTS = ("list", "short list")
OF_ARRAYS = (("concatenate", "arrays"), ("map_coordinates", "coordinates"))

LAX_OPTIONS = {
    "window_strides": (1, 1),
    "padding": "SAME",
    "lhs_dilation": None,
    "rhs_dilation": None,
    "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    "feature_group_count": 1,
    "batch_group_count": 1,
    "precision": None,
    "preferred_element_type": None,
}


def messages(error):
    """The message of an error, and those that its traceback would show."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f, arguments in CALLS.items() for a in arguments]
)
def test_errors_have_no_arrays(function, argument):
    call = functools.partial(getattr(jaxops, function), **CALLS[function])
    for kind, make in BAD.items():
        if (function, argument) in OF_ARRAYS and kind in ("jax", "numpy", "traced"):
            continue  # an array is a sequence of arrays
        bad = make()
        given = [bad] if "traced" in kind else []
        with pytest.raises((TypeError, ValueError)) as caught:
            jax.eval_shape(lambda value=bad: call(**{argument: value}), *given)
        own, *others = messages(caught.value)
        assert own.startswith(f"{function}: ")
        assert any(name in own for name in CALLS[function])
        assert len(own) < 300
        shown = sum(message.count("123456") for message in (own, *others))
        assert shown <= (kind in LISTS)  # the wrong entry, a number of Python


NAMES = {
    "activation": ("relu", "silu", "gelu", "swish"),
    "padding": ("causal", "same", "valid"),
    "data_format": ("NTC", "NCT", "NHWC", "NCHW"),
    "reduction": ("none", "sum", "mean"),
    "method": ("linear", "bilinear", "nearest", "cubic"),
    "padding_mode": ("zeros", "border", "reflection", "wrap", "constant"),
    "coordinates": ("normalized", "pixel"),
    "mode": ("constant", "nearest", "wrap", "mirror", "reflect"),
    "implementation": ("xla", "native"),
}


def _abstract(function, **options):
    call = functools.partial(getattr(jaxops, function), **{**CALLS[function], **options})
    try:
        return str(jax.make_jaxpr(call)())
    except (NotImplementedError, ValueError) as error:
        return str(error)


def test_masked_arrays_are_refused():
    """JAX has no masks: what is masked would count."""
    labels = np.ma.array([0, 1], mask=[True, False])
    with pytest.raises(TypeError, match=r"labels must be an array .*, got MaskedArray"):
        jaxops.softmax_focal_loss(np.ones((2, 4), np.float32), labels)
    bias = np.ma.array(np.ones(4, np.float32))
    with pytest.raises(TypeError, match=r"bias must be an array .*, got MaskedArray"):
        jaxops.lightweight_conv(np.ones((3, 4), np.float32), np.ones((2, 3), "float32"), bias=bias)


@pytest.mark.parametrize("function", CALLS)
def test_names_in_any_case(function):
    for argument, names in NAMES.items():
        parameters = inspect.signature(getattr(jaxops, function)).parameters
        if argument not in parameters or (function, argument) in OF_ARRAYS:
            continue
        taken = 0
        for name in names:
            known = _abstract(function, **{argument: name})
            if "must be" in known and f"got {name!r}" in known:
                continue  # a name of other operators
            taken += 1
            for other in (name.upper(), name.lower(), name.capitalize()):
                assert _abstract(function, **{argument: other}) == known, (argument, name, other)
        assert taken, argument


@pytest.mark.parametrize("argument", LAX_OPTIONS)
def test_errors_of_lax_have_no_arrays(argument):
    call = functools.partial(jaxops.conv_general_dilated, IMAGE, KERNEL, **LAX_OPTIONS)
    for kind, make in BAD.items():
        bad = make()
        given = [bad] if "traced" in kind else []
        with pytest.raises(TypeError) as caught:
            jax.eval_shape(lambda value=bad: call(**{argument: value}), *given)
        (own,) = messages(caught.value)
        assert own.startswith(f"conv_general_dilated: {argument} must be static and short, got ")
        assert len(own) < 300
        assert "123456" not in own


def test_short_options_of_lax_are_not_blamed():
    """An error about other arguments, here about channels, does not name these options."""
    short = {
        "window_strides": (np.int64(1), np.int64(1)),
        "precision": (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST),
    }
    kernel = jnp.ones((3, 3, IMAGE.shape[-1] + 3, 2))
    with pytest.raises(ValueError, match="feature"):
        jaxops.conv_general_dilated(IMAGE, kernel, **{**LAX_OPTIONS, **short})


@pytest.mark.parametrize("argument", ["lhs", "rhs"])
def test_operands_of_lax(argument):
    operands = {"lhs": IMAGE, "rhs": KERNEL, argument: BAD["array of objects"]()}
    with pytest.raises(
        TypeError, match=rf"^conv_general_dilated: {argument} must be .* got object$"
    ):
        jaxops.conv_general_dilated(**operands, **LAX_OPTIONS)


def test_calls_are_complete():
    others = {"DISABLE_JAX_EXPORT_CHECKS", "NoKernelWarning", "conv_general_dilated"}
    others.add("use_implementation")
    assert {*CALLS, *others} == set(jaxops.__all__)
    for function, arguments in CALLS.items():
        jax.eval_shape(functools.partial(getattr(jaxops, function), **arguments))


def test_a_forgotten_list():
    x = jnp.full((2, 3), SENTINEL, jnp.float32)
    with pytest.raises(TypeError) as caught:
        jaxops.concatenate(x, x)
    assert str(caught.value) == (
        "concatenate: axis must be a static integer, got an array of shape (2, 3) and dtype "
        "float32; did you forget the list around the arrays?"
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (1.5, "1.5"),
        ("same", "'same'"),
        ("s" * 1000, "str of length 1000"),
        (((1, 2), [3, 4]), "((1, 2), [3, 4])"),
        ((0.5, 2), "tuple of length 2"),
        (((0,) * 8,) * 8, "tuple of length 8"),
        (np.float32(0.5), "an array of shape () and dtype float32"),
        (list(range(9)), "list of length 9"),
        (2**5000, "int of 5001 bits"),
        (np.zeros((3, 0)), "an array of shape (3, 0) and dtype float64"),
        ({1: 2}, "dict"),
    ],
    ids=lambda _: "",
)
def test_describe(value, expected):
    assert checks.describe(value) == expected
