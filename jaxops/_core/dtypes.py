"""The dtype of arithmetic, which does not ask how JAX promotes: that is the caller's setting."""

from __future__ import annotations

from typing import Any

import numpy as np


def accumulation_dtype(*arrays: Any) -> np.dtype:
    """float64 if any of these arrays or dtypes is float64, else float32."""
    dtypes = [np.dtype(getattr(a, "dtype", a)) for a in arrays]
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
