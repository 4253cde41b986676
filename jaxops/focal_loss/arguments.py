"""The arguments of the focal losses, checked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._core import checks
from jaxops._core.dtypes import accumulation_dtype
from jaxops.focal_loss.options import Scalar
from jaxops.reference import focal_loss as reference

_REDUCTIONS = ("none", "sum", "mean")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments that the two functions have in common, checked.

    Integer labels are int32 here, and `ignored` is the one whose rows are left out.
    """

    logits: jax.Array
    labels: jax.Array
    soft: bool
    ignored: int | None
    class_weight: jax.Array | None
    sample_weight: jax.Array | None
    reduction: str
    normalizer: Any

    @classmethod
    def check(
        cls,
        name,
        logits,
        labels,
        class_weight,
        sample_weight,
        ignore_index,
        reduction,
        normalizer,
        *,
        hard_targets,
    ):
        """Checks the arguments of `name`.

        Labels may be floats of the shape of logits, and with `hard_targets` also booleans and
        integers of that shape.
        """
        logits = checks.float_array(name, "logits", logits, None, "(..., C)")
        if logits.ndim == 0:
            raise ValueError(f"{name}: logits must have shape (..., C), got shape ()")
        classes = logits.shape[-1]
        labels = checks.array(name, "labels", labels, "(...,)")
        is_target = _check_labels(name, labels, logits.shape, hard_targets)
        ignored = None
        if is_target:
            for argument, value in (("class_weight", class_weight), ("ignore_index", ignore_index)):
                if value is not None:
                    raise ValueError(
                        f"{name}: {argument} needs class ids as labels, integers of shape (...,), "
                        f"got targets of the shape of logits, of dtype {labels.dtype}"
                    )
        else:
            if ignore_index is not None:
                ignore_index = checks.integer(name, "ignore_index", ignore_index)
            labels, ignored = _as_int32(labels, classes, ignore_index)
        if class_weight is not None:
            class_weight = checks.float_array(name, "class_weight", class_weight, 1, "(C,)")
            if class_weight.shape[0] not in (classes, classes + 1):
                raise ValueError(
                    f"{name}: class_weight must have shape ({classes},) or, with background, "
                    f"({classes + 1},), got {class_weight.shape}"
                )
        if sample_weight is not None:
            sample_weight = checks.float_array(name, "sample_weight", sample_weight, None, "(...,)")
            why = "(...,), one entry a row of logits"
            checks.shape(name, "sample_weight", sample_weight, logits.shape[:-1], why)
        reduction = checks.choice(name, "reduction", reduction, _REDUCTIONS)
        if normalizer is not None:
            if reduction == "mean":
                raise ValueError(f'{name}: reduction must not be "mean" where normalizer is given')
            normalizer = checks.scalar(name, "normalizer", normalizer, integers=True)
        return cls(
            logits,
            jnp.asarray(labels),
            is_target,
            ignored,
            class_weight,
            sample_weight,
            reduction,
            normalizer,
        )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.logits.shape[-1]

    @property
    def reduced(self) -> bool:
        """Whether the result is a sum."""
        return self.reduction != "none" or self.normalizer is not None

    @property
    def result_dtype(self):
        """The dtype of the result."""
        return accumulation_dtype(self.logits) if self.reduced else self.logits.dtype

    def dtype(self, *others) -> jnp.dtype:
        """The dtype of the arithmetic."""
        arrays = [jnp.asarray(a) for a in others if a is not None]
        return accumulation_dtype(self.logits, *arrays)

    def row_weight(self, dtype):
        """The factor of each row, None where there are no weights."""
        if self.class_weight is None and self.sample_weight is None:
            return None
        return reference.row_weight(
            self.logits if self.soft else self.labels,
            self.classes,
            self.class_weight,
            self.sample_weight,
            dtype,
        )

    def scale(self, dtype):
        """The factor of the sum."""
        if self.normalizer is not None:
            return 1 / jnp.asarray(self.normalizer, dtype)
        if self.reduction != "mean":
            return np.ones((), dtype)
        if self.ignored is None:
            rows = math.prod(self.logits.shape[:-1])
            if jax.export.is_symbolic_dim(rows):
                return 1 / jnp.maximum(jnp.asarray(rows), 1).astype(dtype)
            return np.asarray(1 / max(1, rows), dtype)
        counted = jnp.sum(self.labels != self.ignored)
        return 1 / jnp.maximum(counted, 1).astype(dtype)


def _check_labels(name: str, labels, logits_shape: tuple[int, ...], hard_targets: bool) -> bool:
    """Whether labels are targets of each logit rather than class ids.

    They are told apart by their shapes, of which one has a dimension more than the other.
    """
    is_integer = jnp.issubdtype(labels.dtype, jnp.integer)
    is_bool = labels.dtype == np.bool_
    is_float = labels.dtype in checks.FLOATS
    of_logits = labels.shape == logits_shape
    targets = "targets" if hard_targets else "floats"
    known = is_integer or is_float or (is_bool and hard_targets)
    is_misfit = (of_logits and not is_float and not hard_targets) or (
        is_bool and labels.shape == logits_shape[:-1]
    )
    if not known or is_misfit:
        raise TypeError(
            f"{name}: labels must be integers of shape (...,), class ids, or {targets} of the "
            f"shape of logits, got dtype {labels.dtype} and shape {labels.shape}"
        )
    if of_logits:
        return True
    if not is_integer:
        why = f"(..., C), {targets} of the shape of logits"
        checks.shape(name, "labels", labels, logits_shape, why)
    why = f"(...,), one class a row of logits; or {logits_shape}, (..., C), "
    why += "targets 0 and 1" if hard_targets else "floats"
    checks.shape(name, "labels", labels, logits_shape[:-1], why)
    return False


def _as_int32(labels, classes: int, ignore_index: int | None):
    """Integer labels as int32, and which of them is ignored.

    Labels that are no class may all become the same one: they are background, or the ignored label.
    """
    held = jnp.iinfo(labels.dtype)
    if ignore_index is not None and not held.min <= ignore_index <= held.max:
        ignore_index = None
    int32 = np.iinfo(np.int32)
    if int32.min <= held.min and held.max <= int32.max:
        return labels.astype(np.int32), ignore_index
    library = np if isinstance(labels, np.ndarray) else jnp
    known = (labels >= 0) & (labels < classes)
    narrow = library.where(known, labels.astype(np.int32), np.int32(-1))
    if ignore_index is None:
        return narrow, None
    # As an array: JAX takes a number for an int32.
    is_ignored = labels == np.asarray(ignore_index, labels.dtype)
    return library.where(is_ignored, np.int32(-2), narrow), -2


def check_gamma(name: str, gamma: Scalar, dtype: jnp.dtype):
    """Refuses a number that is negative, or not finite in the dtype of the arithmetic."""
    if isinstance(gamma, float) and not 0 <= gamma <= float(jnp.finfo(dtype).max):
        raise ValueError(f"{name}: gamma must be finite in {dtype} and >= 0, got {gamma}")
