"""The focal losses: hard and soft labels, every reduction, weights, ignored rows and exponents."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.reference import focal_loss as reference
from jaxops.testing.spec import BadInput, OperatorSpec, Placement, normal

_SIGMOID, _SOFTMAX = "sigmoid_focal_loss", "softmax_focal_loss"
_ROWS, _CLASSES = 64, 48  # of the large case
_IGNORED = 2


def _bad_inputs(operator):
    call = getattr(jaxops, operator)

    def bad(name, error, fragments, **options):
        def called(logits, *_):
            # Arrays are made JAX's here, not while `check` has yet to make the devices.
            given = {
                k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()
            }
            return call(logits, np.zeros(logits.shape[:-1], int), **given)

        return BadInput(
            name=name, call=called, error=error, fragments=(f"{operator}: ", *fragments)
        )

    def bad_labels(name, error, fragments, labels):
        return BadInput(
            name=name,
            call=lambda logits, *_: call(logits, labels(logits)),
            error=error,
            fragments=(f"{operator}: labels must", *fragments),
        )

    return (
        BadInput(
            name="integer logits",
            call=lambda logits, labels, *_: call(logits.astype(np.int32), labels),
            error=TypeError,
            fragments=(f"{operator}: logits must have dtype", "got int32"),
        ),
        BadInput(
            name="no classes axis",
            call=lambda logits, labels, *_: call(logits[0, 0], 0),
            error=ValueError,
            fragments=(f"{operator}: logits must have shape (..., C)",),
        ),
        bad_labels("too few", ValueError, ("(...,)",), lambda z: np.zeros(z.shape[0] - 1, int)),
        bad_labels("booleans", TypeError, ("dtype bool",), lambda z: np.zeros(z.shape[:-1], bool)),
        bad("negative gamma", ValueError, ("gamma must be", ">= 0", "-1.0"), gamma=-1),
        bad("integer gamma", TypeError, ("gamma must be", "int32"), gamma=np.ones((), np.int32)),
        bad("a gamma for each row", ValueError, ("gamma must be", "(2,)"), gamma=np.ones(2)),
        bad("weights of other classes", ValueError, ("class_weight",), class_weight=np.ones(99)),
        bad("weights of other rows", ValueError, ("sample_weight",), sample_weight=np.ones(99)),
        bad("an unknown reduction", ValueError, ("reduction must be", "'avg'"), reduction="avg"),
        bad("a fraction as label", TypeError, ("ignore_index", "0.5"), ignore_index=0.5),
        bad(
            "two divisors",
            ValueError,
            ("reduction", "normalizer"),
            reduction="mean",
            normalizer=2.0,
        ),
    )


def _collectives(operator, reduced):
    """All-reduces of a sum; a softmax has, of rows of sharded classes, a maximum, then sums."""

    def counts(row, column):
        over_rows = reduced and (operator == _SIGMOID or row is not None)
        over_classes = 2 if operator == _SOFTMAX and column is not None else 0
        return {"all-reduce": over_rows + over_classes} if over_rows or over_classes else {}

    return counts


def _placements(operator, reduced, extra, backward):
    """By row, by class and by both."""

    def placement(name, axes, row, column):
        return Placement(
            name=name,
            axes=axes,
            arguments=(P(row, column), *extra(row, column)),
            results=(P() if reduced else P(row, column) if operator == _SIGMOID else P(row),),
            forward=_collectives(operator, reduced)(row, column),
            backward=backward(row, column),
            # A shard's sum is not the sum, and its labels are not those of its classes.
            manual=not reduced and column is None,
        )

    return (
        placement("rows", ("n",), "n", None),
        placement("classes", ("c",), None, "c"),
        placement("rows and classes", ("n", "c"), "n", "c"),
    )


def make_spec(
    variant,
    *,
    operator=_SIGMOID,
    function,
    others,
    calls,
    vjp_calls,
    differentiable,
    reduced=False,
    extra=lambda row, column: (P(row),),
    backward=None,
):
    """`function(module, logits, *others)`; `others(rng, rows, classes, dtype)` makes the rest."""

    def arrays(rng, dtype, rows=5, classes=6):
        # A few far ones, on both sides.
        logits = 4 * normal(rng, (rows, classes), dtype)
        return (logits.astype(dtype), *others(rng, rows, classes, dtype))

    elements = 8  # roundings of an element's own arithmetic

    def terms(logits, *_):
        return elements + (logits.size if reduced else logits.shape[-1])

    backward = backward or _collectives(operator, reduced)
    return OperatorSpec(
        operator=operator,
        variant=variant,
        function=functools.partial(function, jaxops),
        reference=functools.partial(function, reference),
        arguments=arrays,
        large=functools.partial(arrays, rows=_ROWS, classes=_CLASSES),
        differentiable=differentiable,
        calls={f"jaxops_{name}": 1 for name in calls},
        vjp_calls={f"jaxops_{name}": 1 for name in vjp_calls},
        value_terms=terms,
        vjp_terms=lambda *arguments: 8 * terms(*arguments),
        # The derivative with respect to a logit, and its product with the cotangent.
        vjp_roundings=2,
        placements=_placements(operator, reduced, extra, backward),
        empty={
            "no rows": functools.partial(arrays, rows=0),
            "no classes": functools.partial(arrays, classes=0),
        },
        bad_inputs=_bad_inputs(operator),
        # Derivatives with respect to anything but logits are XLA's.
        vjp_bitwise=differentiable == (0,),
        checkpoint_name=operator,
    )


def _labels(rng, rows, classes, dtype):
    del dtype
    return (rng.integers(-1, classes + 1, rows).astype(np.int32),)


def _labels_and_row_weights(rng, rows, classes, dtype):
    return (*_labels(rng, rows, classes, dtype), normal(rng, (rows,), dtype))


def _labels_and_class_weights(rng, rows, classes, dtype):
    return (*_labels(rng, rows, classes, dtype), normal(rng, (classes + 1,), dtype))


def _plain(module, logits, labels):
    return module.sigmoid_focal_loss(logits, labels)


def _weighted_sum(module, logits, labels, weight):
    return module.sigmoid_focal_loss(
        logits,
        labels,
        gamma=0.5,
        alpha=None,
        sample_weight=weight,
        ignore_index=_IGNORED,
        reduction="sum",
    )


def _soft_mean(module, logits, x):
    # Any x makes targets in [0, 1].
    return module.sigmoid_focal_loss(logits, jax.nn.sigmoid(x), gamma=1, reduction="mean")


def _targets_mean(module, logits, targets):
    return module.sigmoid_focal_loss(logits, targets, gamma=1.5, reduction="mean")


def _traced(module, logits, labels, x):
    # Any x makes a gamma and a normalizer that are positive and no multiple of 1/2.
    positive = 1.1 + 0.5 * jnp.sin(x)
    return module.sigmoid_focal_loss(
        logits, labels, gamma=positive, alpha=positive / 2, normalizer=positive
    )


def _softmax(module, logits, labels):
    return module.softmax_focal_loss(logits, labels)


def _softmax_traced(module, logits, labels, x):
    positive = 1.1 + 0.5 * jnp.sin(x)
    return module.softmax_focal_loss(
        logits, labels, gamma=positive, alpha=positive / 2, normalizer=positive
    )


def _softmax_mean(module, logits, labels, weight):
    return module.softmax_focal_loss(
        logits, labels, gamma=5, alpha=None, class_weight=weight, reduction="mean"
    )


_SUM, _GRADIENT = f"{_SIGMOID}_sum", f"{_SIGMOID}_gradient"

SPECS = (
    make_spec(
        "hard labels",
        function=_plain,
        others=_labels,
        calls=[_SIGMOID],
        vjp_calls=[_SIGMOID, _GRADIENT],
        differentiable=(0,),
    ),
    make_spec(
        "sum, gamma = 1/2, weighted and ignored rows",
        function=_weighted_sum,
        others=_labels_and_row_weights,
        calls=[_SUM],
        vjp_calls=[_SUM, _GRADIENT],
        differentiable=(0, 2),
        reduced=True,
        extra=lambda row, column: (P(row), P(row)),
        # The sum, and for the weight of a row the sum over its classes.
        backward=lambda row, column: {"all-reduce": 2 if row and column else 1},
    ),
    make_spec(
        "mean, gamma = 1, soft labels",
        function=_soft_mean,
        others=lambda rng, rows, classes, dtype: (normal(rng, (rows, classes), dtype),),
        calls=[_SUM],
        vjp_calls=[_SUM, _GRADIENT],
        differentiable=(0, 1),
        reduced=True,
        extra=lambda row, column: (P(row, column),),
    ),
    make_spec(
        "mean, gamma = 3/2, integer targets",
        function=_targets_mean,
        others=lambda rng, rows, classes, dtype: (
            rng.integers(0, 2, (rows, classes)).astype(np.int8),
        ),
        calls=[_SUM],
        vjp_calls=[_SUM, _GRADIENT],
        differentiable=(0,),
        reduced=True,
        extra=lambda row, column: (P(row, column),),
    ),
    make_spec(
        "traced gamma, alpha and normalizer",
        function=_traced,
        others=lambda rng, rows, classes, dtype: (
            *_labels(rng, rows, classes, dtype),
            normal(rng, (), dtype),
        ),
        calls=[_SUM],
        vjp_calls=[_SUM, _GRADIENT],
        differentiable=(0, 2),
        reduced=True,
        extra=lambda row, column: (P(row), P()),
        # The scalars' derivatives are sums over one axis after the other.
        backward=lambda row, column: {"all-reduce": 3 if row and column else 1},
    ),
    make_spec(
        "rows",
        operator=_SOFTMAX,
        function=_softmax,
        others=_labels,
        calls=[_SOFTMAX],
        vjp_calls=[_SOFTMAX, f"{_SOFTMAX}_gradient"],
        differentiable=(0,),
    ),
    make_spec(
        "mean, gamma = 5, weighted classes",
        operator=_SOFTMAX,
        function=_softmax_mean,
        others=_labels_and_class_weights,
        calls=[f"{_SOFTMAX}_sum"],
        vjp_calls=[_SOFTMAX, f"{_SOFTMAX}_gradient"],
        differentiable=(0, 2),
        reduced=True,
        extra=lambda row, column: (P(row), P(None)),
    ),
    make_spec(
        "traced gamma, alpha and normalizer",
        operator=_SOFTMAX,
        function=_softmax_traced,
        others=lambda rng, rows, classes, dtype: (
            *_labels(rng, rows, classes, dtype),
            normal(rng, (), dtype),
        ),
        calls=[f"{_SOFTMAX}_sum"],
        vjp_calls=[_SOFTMAX, f"{_SOFTMAX}_gradient"],
        differentiable=(0, 2),
        reduced=True,
        extra=lambda row, column: (P(row), P()),
    ),
)
