"""The steps of every public function before its own: its implementation, and misnamed arguments.

    @public_function
    def operator(x, *, option=1, implementation=None):

The signature stays as it is written, and has `implementation`, which this module reads.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from jaxops._core import implementation

P = ParamSpec("P")
R = TypeVar("R")

#: The names that PyTorch, jax.lax, Keras and NumPy have for an argument, by those that it may have
#: here. The first name that a function has is meant.
_NAMES_ELSEWHERE = {
    "x": ("input", "inputs", "lhs"),
    "x_t": ("input", "inputs", "x"),
    "lhs": ("input", "inputs", "x"),
    "logits": ("input", "inputs", "preds", "y_pred", "x"),
    "volume": ("input", "inputs", "image", "x"),
    "features": ("input", "inputs", "x"),
    "patches": ("input", "inputs", "x"),
    "arrays": ("tensors", "xs", "operands"),
    "array": ("tensor", "ary", "input", "x"),
    "kernel": ("weight", "weights", "rhs", "filter", "filters", "w"),
    "rhs": ("weight", "weights", "kernel", "filter", "filters", "w"),
    "weight": ("kernel", "filter", "filters", "rhs", "w"),
    "labels": ("target", "targets", "y_true"),
    "points": ("grid", "coordinates", "coords"),
    "axis": ("dim", "axes", "dimension"),
    "sizes": ("split_size_or_sections", "indices_or_sections", "num_or_size_splits", "split_sizes"),
    "strides": ("stride", "window_strides"),
    "window_strides": ("stride", "strides"),
    "padding": ("pad", "pads", "paddings"),
    "dilation": ("rhs_dilation", "dilations", "dilation_rate", "kernel_dilation"),
    "rhs_dilation": ("dilation", "dilations", "dilation_rate", "kernel_dilation"),
    "groups": ("feature_group_count", "group", "num_groups"),
    "feature_group_count": ("groups", "group", "num_groups"),
    "kernel_size": ("kernel_shape", "filter_shape", "window_shape"),
    "input_shape": ("output_size", "output_shape", "input_size"),
    "dimension_numbers": ("data_format", "layout"),
    "data_format": ("dimension_numbers", "layout"),
    "preferred_element_type": ("dtype", "out_dtype"),
    "activation": ("act", "activation_fn", "nonlinearity"),
    "method": ("mode", "interpolation", "order"),
    "padding_mode": ("mode", "pad_mode"),
    "class_weight": ("weight", "weights", "class_weights"),
    "sample_weight": ("sample_weights",),
    "ignore_index": ("ignore_label",),
    "normalizer": ("avg_factor", "num_positives"),
    "segment_ids": ("seq_idx", "segments"),
    "initial_state": ("initial_states", "conv_state", "state"),
    "return_final_state": ("return_final_states",),
    "state": ("conv_state", "initial_state", "cache"),
    "state_indices": ("conv_state_indices", "cache_indices", "slots"),
    "starts": ("cu_seqlens", "query_start_loc", "offsets"),
    "normalize": ("softmax", "weight_softmax"),
    "implementation": ("impl", "backend"),
}


def public_function(function: Callable[P, R]) -> Callable[P, R]:
    """A public function, whose calls run under the implementation that they ask for.

    A call with an argument that it does not have is a TypeError, which names the one that is meant.
    """
    name = function.__name__
    names = dict.fromkeys(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for given in kwargs:
            if given not in names:
                raise TypeError(f"{name}: {_unexpected(given, names)}")
        context = implementation.of_call(name, kwargs.get("implementation"))
        if context is None:
            return function(*args, **kwargs)
        with context:
            return function(*args, **kwargs)

    return call


def _unexpected(given: str, names: Collection[str]) -> str:
    meant = next((n for n in names if given in _NAMES_ELSEWHERE.get(n, ())), None)
    if meant is None:
        meant = next(iter(difflib.get_close_matches(given, names, 1)), None)
    if meant is not None:
        return f"there is no argument {given!r}; did you mean {meant!r}?"
    return f"there is no argument {given!r}; the arguments are {', '.join(names)}"
