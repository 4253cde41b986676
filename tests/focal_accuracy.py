"""How exact the focal losses are, over the whole range of every dtype.

`python tests/focal_accuracy.py` prints the table of docs/focal_loss.md; the tests run the same
sweeps and hold them to `BOUNDS`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import mpmath
import numpy as np

import jaxops

FLOATS = ("float16", "bfloat16", "float32", "float64")
GAMMAS = (0.0, 0.5, 1.0, 2.0, 5.0, "traced 1.7")
ORDERS = ("loss", "first derivative", "second derivative")
# The maximum error of a result, in units in the last place.
BOUNDS = {"loss": 10, "first derivative": 10, "second derivative": 12}


def number(gamma):
    return 1.7 if isinstance(gamma, str) else gamma


def points(dtype: str) -> np.ndarray:
    """All finite numbers of 16 bits; a dense sample of others, with the neighbours of corners."""
    if dtype in ("float16", "bfloat16"):
        every = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
        return every[np.isfinite(every.astype(np.float32))]
    info = np.finfo(dtype)
    largest = float(info.max)
    magnitudes = [
        np.exp2(np.linspace(info.minexp - info.nmant, info.maxexp - 1e-3, 6000)),
        np.geomspace(1e-3, 1e3, 6000),
        *(
            np.float64(corner) * (1 + np.arange(-100, 101) * float(info.eps) * step)
            for corner in (16.6, 88.0, 88.7, 103.3, 104.0, 710.0, 745.1, 1e-300 + float(info.tiny))
            for step in (1, 1000)
        ),
        largest * (1 - np.arange(100) * float(info.epsneg)),
        np.zeros(1),
    ]
    positive = np.concatenate(magnitudes).astype(dtype)
    return np.concatenate([-positive, positive])


def truth(x: np.ndarray, gamma: float):
    """Loss, two derivatives and the size of the second's terms, in extended precision.

    x is the lead of the wrong answer.
    """
    x, gamma = x.astype(np.longdouble), np.longdouble(gamma)
    with np.errstate(all="ignore"):
        e = np.exp(-np.abs(x))
        wrong = np.where(x >= 0, 1, e) / (1 + e)
        right = np.where(x >= 0, e, 1) / (1 + e)
        log1p = np.log1p(e)
        softplus = np.maximum(x, 0) + log1p
        power = np.exp(gamma * (np.minimum(x, 0) - log1p))
        if gamma == 0:
            power = np.ones_like(x)
        product = right * softplus
        loss = power * softplus
        slope = power * (gamma * product + wrong)
        constant = (2 * gamma + 1) * wrong * right
        curvature = power * (gamma * (gamma * right - wrong) * product + constant)
        size = power * (gamma * (gamma * right + wrong) * product + constant)
    return loss, slope, curvature, size


def check_truth(gamma: float) -> float:
    """The relative error of `truth` against mpmath, at a few points."""
    worst = 0.0
    with mpmath.workdps(60):
        for at in (-700.3, -90.7, -16.6, -1.5, -1e-9, 0.0, 0.3, 2.0, 16.6, 88.1, 700.0):
            x, g = mpmath.mpf(at), mpmath.mpf(gamma)

            def focal(x, g=g):
                return (1 / (1 + mpmath.exp(-x))) ** g * mpmath.log1p(mpmath.exp(x))

            wanted = [
                focal(x),
                *(mpmath.diff(focal, x, n, h=mpmath.mpf(10) ** -18) for n in (1, 2)),
            ]
            for got, want in zip(truth(np.array([at]), gamma)[:3], wanted, strict=True):
                high = np.float64(got[0])
                value = mpmath.mpf(float(high)) + mpmath.mpf(float(got[0] - high))
                if abs(want) > mpmath.mpf(10) ** -300:
                    worst = max(worst, float(abs(value / want - 1)))
    return worst


def ulps(got: np.ndarray, want: np.ndarray, scale: np.ndarray, dtype: str, flushed: float) -> float:
    """The largest error in units in the last place of `scale`, without numbers flushed to zero."""
    info = jnp.finfo(dtype)
    if not np.isfinite(got.astype(np.float64)).all():
        return np.inf
    size = np.maximum(np.abs(scale), float(info.smallest_subnormal) / float(info.eps))
    unit = np.ldexp(np.longdouble(1), np.frexp(size)[1] - 1) * np.longdouble(float(info.eps))
    error = np.abs(got.astype(np.longdouble) - want)
    return float((np.maximum(error - flushed, 0) / unit).max(initial=0))


def sigmoid(z, positive, gamma, reduction):
    """The loss of logits; `positive` marks those whose target is 1."""
    loss = jaxops.sigmoid_focal_loss(
        z[:, None], np.where(positive, 0, -1), gamma=gamma, alpha=None, reduction=reduction
    )
    return loss[:, 0] if reduction == "none" else loss


def softmax(z, positive, gamma, reduction):
    """The loss of pairs of a logit and 0; `positive` marks those whose label is the first."""
    pairs = jnp.stack([z, jnp.zeros_like(z)], axis=-1)
    return jaxops.softmax_focal_loss(
        pairs, np.where(positive, 0, 1), gamma=gamma, alpha=None, reduction=reduction
    )


def measure(function, dtype: str, gamma, device) -> dict[str, float]:
    """The worst error of each order, in ulp, over all logits and both targets."""
    z = np.tile(points(dtype), 2)
    positive = np.arange(z.size) < z.size // 2
    accumulated = "float64" if dtype == "float64" else "float32"
    traced = jnp.asarray(number(gamma), accumulated)

    @jax.jit
    def every_order(z, traced):
        exponent = traced if isinstance(gamma, str) else gamma
        slope = jax.grad(lambda z: function(z, positive, exponent, "sum"))
        return function(z, positive, exponent, "none"), *jax.jvp(slope, (z,), (jnp.ones_like(z),))

    got = [np.asarray(a) for a in every_order(*jax.device_put((z, traced), device))]
    sign = np.where(positive, -1, 1)
    exponent = float(np.asarray(traced)) if isinstance(gamma, str) else gamma
    loss, slope, curvature, size = truth(sign * z.astype(np.longdouble), exponent)
    # The second derivative crosses zero, where its terms decide, and XLA, which computes it, may
    # flush those that are subnormal in the type of its arithmetic.
    around = np.maximum(np.abs(curvature), size / 8)
    flushed = 4 * float(jnp.finfo(accumulated).tiny)
    rows = zip(
        ORDERS,
        got,
        (loss, sign * slope, curvature),
        (loss, slope, around),
        (0, 0, flushed),
        strict=True,
    )
    return {order: ulps(*columns[:3], dtype, columns[3]) for order, *columns in rows}


def main():
    """Prints the table."""
    jax.config.update("jax_enable_x64", True)
    device = jax.devices()[0]
    print(f"Each cell is {' / '.join(ORDERS)}.\n")
    print(f"| | {' | '.join(f'gamma = {gamma}' for gamma in GAMMAS)} |")
    print("|---" * (1 + len(GAMMAS)) + "|")
    for function in (sigmoid, softmax):
        for dtype in FLOATS:
            cells = []
            for gamma in GAMMAS:
                worst = measure(function, dtype, gamma, device)
                cells.append(" / ".join(f"{worst[order]:.1f}" for order in ORDERS))
            print(f"| {function.__name__}, {dtype} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
