"""Focal losses: accuracy, published values, and what is special about them.

The oracle is `jaxops.reference`, whose formulas the accuracy test holds to extended precision.
"""

from __future__ import annotations

import functools
import itertools
import math

import focal_accuracy
import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import jaxops
from jaxops.reference import focal_loss as reference
from jaxops.testing.measure import compile_without_loops, custom_calls, on_reference, run

OPERATORS = ("sigmoid_focal_loss", "softmax_focal_loss")


# --- accuracy ------------------------------------------------------------------------------------


@pytest.mark.any_jax
@pytest.mark.parametrize("gamma", focal_accuracy.GAMMAS)
def test_the_measure_of_accuracy_is_exact(gamma):
    assert focal_accuracy.check_truth(focal_accuracy.number(gamma)) < 1e-17


@pytest.mark.any_jax
@pytest.mark.parametrize("gamma", focal_accuracy.GAMMAS)
@pytest.mark.parametrize("dtype", focal_accuracy.FLOATS)
@pytest.mark.parametrize("function", [focal_accuracy.sigmoid, focal_accuracy.softmax])
def test_accuracy(function, dtype, gamma, platform):
    """Tests the whole range. An error is infinite if a result is not finite."""
    worst = focal_accuracy.measure(function, dtype, gamma, platform.device)
    wrong = {order: w for order, w in worst.items() if not w <= focal_accuracy.BOUNDS[order]}
    assert not wrong, f"{function.__name__} {dtype}, gamma {gamma}: {wrong} ulp"


@pytest.mark.any_jax
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_soft_zeros_and_ones_are_hard(dtype, gamma, platform):
    """No term of the other target remains, even if that term is infinite."""
    z = np.sort(focal_accuracy.points(dtype))[::7]
    eps = float(np.finfo(dtype).eps)
    for y in (0, 1):

        def both(z, labels):
            return jax.value_and_grad(
                lambda z: jaxops.sigmoid_focal_loss(z, labels, gamma=gamma).sum(), has_aux=False
            )(z)[1], jaxops.sigmoid_focal_loss(z, labels, gamma=gamma)

        hard = run(both, platform, z[:, None], np.full(z.shape, y - 1, np.int32))
        soft = run(both, platform, z[:, None], np.full((z.size, 1), y, dtype))
        for h, s in zip(hard, soft, strict=True):
            np.testing.assert_allclose(s, h, rtol=16 * eps, atol=float(np.finfo(dtype).tiny))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0, 5.0])
def test_infinite_logits_have_the_limits(gamma, platform):
    z = np.array([[-np.inf], [np.inf]], np.float32)

    def slope(z, labels):
        def total(z):
            return jaxops.sigmoid_focal_loss(z, labels, gamma=gamma, alpha=None, reduction="sum")

        return jax.grad(total)(z), jaxops.sigmoid_focal_loss(z, labels, gamma=gamma, alpha=None)

    for labels, soft in (
        (np.array([-1, -1]), np.zeros((2, 1))),
        (np.zeros(2, int), np.ones((2, 1))),
    ):
        positive = labels[0] == 0
        want_loss = [[np.inf], [0]] if positive else [[0], [np.inf]]
        want_slope = [[-1], [0]] if positive else [[0], [1]]
        for given in (labels.astype(np.int32), soft.astype(np.float32)):
            got_slope, got_loss = run(slope, platform, z, given)
            np.testing.assert_array_equal(got_loss, want_loss)
            np.testing.assert_array_equal(got_slope, want_slope)


@pytest.mark.parametrize("gamma", [0.0, 2.0, 2.5])
@pytest.mark.parametrize("dtype", focal_accuracy.FLOATS)
def test_a_row_of_one_infinite_or_very_small_logit(dtype, gamma, platform):
    def both(z):
        loss, pull = jax.vjp(
            lambda z: jaxops.softmax_focal_loss(
                z, np.zeros(len(z), np.int32), gamma=gamma, alpha=None
            ),
            z,
        )
        return loss, pull(jnp.ones_like(loss))[0]

    low = float(jnp.finfo(dtype).min)
    # Another class is certain: only its own gradient is undefined.
    got = run(both, platform, np.array([[0, np.inf, 1]]).astype(jnp.dtype(dtype)))
    np.testing.assert_array_equal(got[0], [np.inf])
    np.testing.assert_array_equal(got[1][:, ::2], [[-1, 0]])
    # The label is certain, because no other class has a finite logit next to it.
    for row in ([-3000], [-3000, -np.inf], [-3000, low, low], [low, -np.inf]):
        got = run(both, platform, np.array([row]).astype(jnp.dtype(dtype)))
        for g in got:
            np.testing.assert_array_equal(g, np.zeros_like(g))


# --- derivatives of every order ------------------------------------------------------------------


_STEP = mpmath.mpf(10) ** -60


@functools.cache
def exact_loss(z, y, gamma, steps):
    """The loss of an element whose logit, target and gamma are `steps` steps from these."""
    with mpmath.workdps(460):
        z, y, gamma = (mpmath.mpf(x) + n * _STEP for x, n in zip((z, y, gamma), steps, strict=True))
        e = mpmath.exp(z)
        return ((y + (1 - y) * e) / (1 + e)) ** gamma * (mpmath.log1p(e) - y * z)


def exact(z, y, gamma, orders):
    """The derivative of the given orders with respect to z, y and gamma, by differences."""
    total = mpmath.mpf(0)
    with mpmath.workdps(460):
        for steps in itertools.product(*(range(n + 1) for n in orders)):
            ways = math.prod(map(math.comb, orders, steps)) * (-1) ** (sum(orders) - sum(steps))
            total += ways * exact_loss(z, y, gamma, steps)
        return total / _STEP ** sum(orders)


def differentiate(function, orders):
    """The derivative of these orders of a function of arrays whose elements are independent."""

    def along(function, argument):
        def derivative(*arguments):
            def vary(x):
                return function(*arguments[:argument], x, *arguments[argument + 1 :])

            x = arguments[argument]
            return jax.jvp(vary, (x,), (jnp.ones_like(x),))[1]

        return derivative

    for argument, order in enumerate(orders):
        for _ in range(order):
            function = along(function, argument)
    return function


def assert_derivatives(function, y, z, gammas, every, dtype, device):
    """Tests all pairs of y and z, within some roundings and the loss of subnormal parts."""
    info = np.finfo(dtype)
    y, z = (np.array(a, dtype) for a in zip(*itertools.product(y, z), strict=True))
    vary = [jax.vmap(differentiate(function, orders), (None, None, 0)) for orders in every]
    arguments = jax.device_put((z, y, np.array(gammas, dtype)), device)
    found = jax.jit(lambda *arguments: [f(*arguments) for f in vary])(*arguments)
    for orders, values in zip(every, map(np.asarray, found), strict=True):
        for (i, gamma), j in itertools.product(enumerate(gammas), range(len(z))):
            got, want = float(values[i, j]), exact(float(z[j]), float(y[j]), gamma, orders)
            case = f"{orders}, z={z[j]}, y={y[j]}, gamma={gamma}: got {got}, wanted {float(want)}"
            if abs(want) > float(info.max):
                assert np.isinf(got), case
            else:
                near = 1000 * float(info.eps) * abs(want) + 1000 * float(info.tiny) + 1e-55
                assert abs(got - want) <= near, case


def by_soft_labels(z, y, gamma):
    return jaxops.sigmoid_focal_loss(z[:, None], y[:, None], gamma=gamma, alpha=None)[:, 0]


def soft_targets(dtype):
    # XLA flushes subnormal numbers to zero on CPUs, also exponentials of logits in float32.
    tiny = 0 if dtype == "float64" else 1e-30
    return [0.0, 1.0, np.nextafter(tiny, 1, dtype=dtype), np.nextafter(1, 0, dtype=dtype), 0.3]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_soft_labels_have_every_derivative_by_logits(dtype, platform):
    z = [0.0, float(np.finfo(dtype).tiny), 1, -1, 40, -40, 100, -100, 350, -400]
    orders = [(n, 0, 0) for n in (1, 2, 3, 4)]
    gammas, device = [0.0, 0.5, 1.0, 1.5, 3.0], platform.device
    assert_derivatives(by_soft_labels, soft_targets(dtype), z, gammas, orders, dtype, device)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_soft_labels_have_mixed_derivatives(dtype, platform):
    z = [0.0, 1, -40, 80, -80]
    orders = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (2, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)]
    gammas, device = [0.5, 1.0, 2.0], platform.device
    assert_derivatives(by_soft_labels, soft_targets(dtype), z, gammas, orders, dtype, device)


@pytest.mark.parametrize(
    ("operator", "dtype"), [("sigmoid", "float32"), ("sigmoid", "float64"), ("softmax", "float64")]
)
def test_class_ids_have_every_derivative(operator, dtype, platform):
    z = [0.0, float(np.finfo(dtype).tiny), 1, -1, -40, 100]
    orders = [(3, 0, 0), (4, 0, 0)]
    if operator == "sigmoid":
        orders += [(2, 0, 0), (0, 0, 1), (2, 0, 1), (0, 0, 2)]
    gammas = [0.0, 0.5, 1.0, 1.5, 3.0]

    def loss(z, y, gamma):
        del y
        return getattr(focal_accuracy, operator)(z, np.arange(len(z)) >= len(z) // 2, gamma, "none")

    assert_derivatives(loss, [0.0, 1.0], z, gammas, orders, dtype, platform.device)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("soft", "float32"), ("soft", "float64"), ("sigmoid", "float32"), ("softmax", "float32")],
)
def test_derivatives_at_the_largest_logits_are_finite(kind, dtype, platform):
    largest = float(np.finfo(dtype).max)
    z = np.array([largest, -largest] * 4, dtype)
    y = np.repeat(np.array([0, 0.3, 0.9, 1], dtype), 2)

    def loss(z, gamma, alpha):
        if kind == "soft":
            return jaxops.sigmoid_focal_loss(z[:, None], y[:, None], gamma=gamma, alpha=alpha)
        function = getattr(focal_accuracy, kind)
        return alpha * function(z, y > 0.5, gamma, "none")

    @jax.jit
    def derivatives(*arguments):
        every = [(1, 0, 0), (3, 0, 0), (1, 1, 0), (1, 0, 1), (0, 2, 0), (0, 1, 1)]
        return {orders: differentiate(loss, orders)(*arguments) for orders in every}

    arguments = jax.device_put((z, *np.array([1.5, 0.25], dtype)), platform.device)
    for orders, found in jax.device_get(derivatives(*arguments)).items():
        assert np.isfinite(found).all(), orders

    def scaled(*arguments):
        return (2.0**-20 * loss(*arguments)).sum()

    backwards = jax.jit(jax.jacrev(jax.grad(scaled, (0, 1, 2)), (1, 2)))(*arguments)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(backwards))


@pytest.mark.parametrize("kind", ["soft", "sigmoid", "softmax"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_very_large_gamma(kind, dtype, platform):
    """Only logits as large as its logarithm have a loss that is not zero."""
    info = np.finfo(dtype)
    gammas = np.array([1e30, 2e35, info.max if dtype == "float32" else 1e305], dtype)
    z = np.linspace(-800, 800, 401).astype(dtype)

    @jax.jit
    def every_order(gamma):
        def loss(z):
            if kind == "soft":
                return by_soft_labels(z, jnp.zeros_like(z), gamma)
            return getattr(focal_accuracy, kind)(z, np.zeros(z.shape, bool), gamma, "none")

        slope = jax.grad(lambda z: loss(z).sum())
        return loss(z), *jax.jvp(slope, (z,), (jnp.ones_like(z),))

    for gamma in gammas:
        got = [np.asarray(x) for x in every_order(jax.device_put(gamma, platform.device))]
        assert all(np.isfinite(x).all() for x in got)
        wide = z.astype(np.longdouble)
        want = np.exp(-gamma * np.log1p(np.exp(-wide))) * np.logaddexp(0, wide)
        np.testing.assert_allclose(got[0], want, rtol=3e-4, atol=1e-30)


# --- published values ----------------------------------------------------------------------------

# Object-detection toolboxes test their kernels with these small cases: gamma 2, alpha 0.25, divided
# by the number of rows. Logits, labels, and (loss, gradient) of each operator.
PUBLISHED = (
    (
        [[1, 0], [0, 1]],
        [0, 1],
        (0.13562961, [[-0.00657264, 0.11185755], [0.11185755, -0.00657264]]),
        (0.00566451, [[-0.00657264, 0.00657264], [0.00657264, -0.00657264]]),
    ),
    (
        [[1, 0, -1], [0, 1, 2]],
        [2, 1],
        (
            1.10251057,
            [[0.28808805, 0.11185755, -0.09602935], [0.11185755, -0.00657264, 0.40376765]],
        ),
        (
            0.34956908,
            [[0.10165970, 0.03739851, -0.13905823], [0.01227554, -0.10298023, 0.09070466]],
        ),
    ),
    (
        [[1e-6, 2e-6, 3e-6], [4e-6, 5e-5, 6e-4], [7e-3, 8e-2, 9e-1]],
        [1, 2, 0],
        (
            0.42287254,
            [
                [0.07457182, -0.02485716, 0.07457201],
                [0.07457211, 0.07457669, -0.02483728],
                [-0.02462499, 0.08277918, 0.18050370],
            ],
        ),
        (
            0.15754992,
            [
                [0.02590877, -0.05181759, 0.02590882],
                [0.02589641, 0.02589760, -0.05179400],
                [-0.07307514, 0.02234372, 0.05073142],
            ],
        ),
    ),
)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("case", PUBLISHED, ids=["2x2", "2x3", "3x3"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_published_values(operator, case, dtype, platform):
    logits, labels, *results = case
    loss, gradient = results[OPERATORS.index(operator)]

    def mean(logits):
        return getattr(jaxops, operator)(logits, np.array(labels), reduction="mean")

    got = run(jax.value_and_grad(mean), platform, np.array(logits, dtype))
    tolerance = 1e-2 if dtype == "float16" else 1e-4
    np.testing.assert_allclose(got[0], loss, rtol=tolerance)
    np.testing.assert_allclose(got[1].astype(np.float64), gradient, rtol=tolerance, atol=1e-7)


def random_case(seed=0, rows=37, classes=11, dtype=np.float32):
    rng = np.random.default_rng(seed)
    logits = (5 * rng.standard_normal((rows, classes))).astype(dtype)
    return logits, rng.integers(0, classes, rows).astype(np.int32)


def test_optax(platform):
    optax = pytest.importorskip("optax")
    logits, labels = random_case(dtype=np.float64)
    for alpha, gamma in ((0.25, 2.0), (None, 2.0), (0.7, 1.0)):

        def ours(logits, a=alpha, g=gamma):
            return jaxops.sigmoid_focal_loss(logits, labels, alpha=a, gamma=g)

        got = run(ours, platform, logits)
        one_hot = np.eye(logits.shape[1])[labels]
        want = optax.losses.sigmoid_focal_loss(logits, one_hot, alpha=alpha, gamma=gamma)
        np.testing.assert_allclose(got[0], want, rtol=1e-6)


def test_torchvision(platform):
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("torchvision.ops")
    logits, labels = random_case(dtype=np.float64)
    one_hot = np.eye(logits.shape[1])[labels]
    z = torch.tensor(logits, requires_grad=True)
    want = ops.sigmoid_focal_loss(z, torch.tensor(one_hot), alpha=0.25, gamma=2, reduction="sum")
    want.backward()

    def total(logits):
        return jaxops.sigmoid_focal_loss(logits, labels, reduction="sum")

    got = run(jax.value_and_grad(total), platform, logits)
    np.testing.assert_allclose(got[0], want.detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(got[1], z.grad.numpy(), rtol=1e-6, atol=1e-12)


# --- passes over memory --------------------------------------------------------------------------


def handlers(function, *arguments):
    return custom_calls(compile_without_loops(function, *arguments))


@pytest.mark.parametrize("operator", OPERATORS)
def test_value_and_gradient_are_one_pass_where_the_cotangent_is_one(operator, platform):
    logits, labels = jax.device_put(random_case(), platform.device)
    weight = jnp.ones(labels.shape)
    total, gradient, both = (
        f"jaxops_{operator}_{name}" for name in ("sum", "gradient", "value_and_gradient")
    )

    def loss(logits, normalizer=7.0):
        return getattr(jaxops, operator)(
            logits, labels, sample_weight=weight, normalizer=normalizer
        )

    def with_another(logits):
        return loss(logits) + jnp.sum(logits**2)

    def scaled(logits):
        return 0.5 * loss(logits)

    assert handlers(loss, logits) == {total: 1}
    assert handlers(jax.value_and_grad(loss), logits) == {both: 1}
    assert handlers(jax.value_and_grad(loss), logits, 3.0) == {both: 1}
    assert handlers(jax.value_and_grad(with_another), logits) == {both: 1}
    assert handlers(jax.grad(loss), logits) == {gradient: 1}
    # Another cotangent joins the scale of a separate pass, and the first pass writes no gradient.
    assert handlers(jax.value_and_grad(scaled), logits) == {total: 1, gradient: 1}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_reduced_loss_keeps_nothing_of_the_size_of_the_logits(operator, with_gradient, platform):
    logits, labels = jax.device_put(random_case(rows=1024, classes=80), platform.device)

    def mean(logits, labels):
        return getattr(jaxops, operator)(logits, labels, reduction="mean")

    function = jax.value_and_grad(mean) if with_gradient else mean
    memory = compile_without_loops(function, logits, labels).memory_analysis()
    assert memory.temp_size_in_bytes < logits.nbytes / 4


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("scale", [1.0, 0.5, "traced"])
def test_the_gradient_is_the_same_whichever_pass_makes_it(operator, scale, platform):
    logits, labels = random_case()

    def gradient(module, logits, factor):
        factor = factor if scale == "traced" else scale
        loss = getattr(module, operator)
        return jax.grad(lambda z: factor * loss(z, labels, reduction="mean"))(logits)

    factor = np.float32(0.3)
    got = run(functools.partial(gradient, jaxops), platform, logits, factor)
    want = on_reference(functools.partial(gradient, reference), logits, factor)
    # A share of a softmax is the exponential of a difference, whose rounding small shares magnify.
    atol = 1e-9 if operator == "softmax_focal_loss" else 0
    np.testing.assert_allclose(got[0], want[0], rtol=3e-6, atol=atol)
    with jax.disable_jit():
        eager = gradient(jaxops, jnp.asarray(logits), factor)
    np.testing.assert_allclose(eager, got[0], rtol=3e-6)


# --- shapes and options --------------------------------------------------------------------------


@hypothesis.settings(max_examples=16, deadline=None)
@hypothesis.given(data=st.data())
def test_shapes_and_options(data, platform):
    """Compares with the reference, over shapes that reach every kernel."""
    operator = data.draw(st.sampled_from(OPERATORS))
    dtype = data.draw(st.sampled_from(("float32", "bfloat16", "float64")))
    classes = data.draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 80, 91, 129, 1030)))
    shape = data.draw(st.sampled_from(((), (1,), (3,), (2, 3), (67,), (300,), (2, 1, 5))))
    soft = operator == "sigmoid_focal_loss" and data.draw(st.booleans())
    gamma = data.draw(st.sampled_from((0, 0.5, 1, 2, 1.7, 5)))
    reduction = data.draw(st.sampled_from(("none", "sum", "mean")))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = (4 * rng.standard_normal((*shape, classes))).astype(jnp.dtype(dtype))
    labels = rng.integers(-2, classes + 2, shape).astype(np.int32)
    options = {"gamma": gamma, "reduction": reduction}
    if soft:
        labels = rng.uniform(size=logits.shape).astype(np.float32)
    elif data.draw(st.booleans()):
        options["ignore_index"] = data.draw(st.sampled_from((-1, 0, 99)))
    if data.draw(st.booleans()):
        options["sample_weight"] = rng.uniform(0.5, 2, shape).astype(np.float32)
    if not soft and data.draw(st.booleans()):
        size = classes + data.draw(st.integers(0, 1))
        options["class_weight"] = rng.uniform(0.5, 2, size).astype(np.float32)

    def both(module, logits):
        def loss(z):
            weights = {
                k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()
            }
            return getattr(module, operator)(z, jnp.asarray(labels), **weights)

        value, pull = jax.vjp(loss, logits)
        return value, pull(jnp.ones_like(value))[0]

    got = run(lambda z: both(jaxops, z), platform, logits)
    want = on_reference(lambda z: both(reference, z), logits)
    eps = float(jnp.finfo(dtype).eps)
    sum_eps = eps if dtype == "float64" else float(jnp.finfo("float32").eps)
    for g, w in zip(got, want, strict=True):
        scale = max(1e-3, np.abs(w).max(initial=0))
        near = 3 * eps * np.abs(w) + (16 + logits.size) * sum_eps * scale
        np.testing.assert_array_less(np.abs(g.astype(np.float64) - w), near + 1e-30)


# Sums of this length go through shared memory on GPUs. The cases have many short rows in a tile,
# rows that begin in one tile and end in the next, and rows longer than a tile, all with odd ends.
@pytest.mark.any_jax
@pytest.mark.parametrize("gamma", [2.0, 1.7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "classes"), [(409_201, 41), (184_371, 91), (1_679, 10_007)])
def test_a_long_sum_is_that_of_its_elements(rows, classes, dtype, gamma, platform):
    rng = np.random.default_rng(classes)
    logits = 4 * rng.standard_normal((rows, classes), np.float32)
    labels = rng.integers(-classes, classes, rows).astype(np.int32)
    # The loss of these rows is zero if targets are told from other classes.
    logits[0] = -np.inf
    labels[0] = -1
    logits[1:8, 0] = np.inf
    labels[1:8] = 0
    logits = logits.astype(jnp.dtype(dtype))

    def total(logits, reduction):
        logits = logits if reduction == "sum" else logits.astype(jnp.float32)
        return jaxops.sigmoid_focal_loss(logits, labels, gamma=gamma, reduction=reduction)

    elements = run(lambda z: total(z, "none"), platform, logits)[0]
    got = run(lambda z: total(z, "sum"), platform, logits)[0]
    np.testing.assert_allclose(got, elements.sum(dtype=np.float64), rtol=3e-6)


# A thread of a GPU computes results of this number of elements far apart. Rows are whole vectors,
# or not, or of one class; the last block is not full.
@pytest.mark.any_jax
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(("rows", "classes"), [(26_221, 80), (23_052, 91), (2_100_004, 1)])
def test_sigmoid_of_many_elements(rows, classes, gamma, platform):
    rng = np.random.default_rng(classes)
    logits = 4 * rng.standard_normal((rows, classes), np.float32)
    labels = rng.integers(-1, classes, rows).astype(np.int32)

    def results(module, logits):
        loss, pull = jax.vjp(lambda z: module.sigmoid_focal_loss(z, labels, gamma=gamma), logits)
        return loss, pull(jnp.ones_like(loss))[0]

    got = run(functools.partial(results, jaxops), platform, logits)
    want = on_reference(functools.partial(results, reference), logits)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, 3e-6, 1e-30)


def test_sigmoid_of_very_many_elements(platform):
    """Results far apart in a thread: with class labels each depends on its row alone."""
    if platform.name == "cpu":
        pytest.skip("the kernels of the host have no such limit; too slow here")
    rows, classes = 838_865, 80
    assert rows * classes > 2**26

    def gradient(logits, labels):
        return jax.grad(lambda z: jaxops.sigmoid_focal_loss(z, labels, reduction="sum"))(logits)

    rng = np.random.default_rng(0)
    few = 4 * rng.standard_normal((1003, classes), np.float32)
    few_labels = rng.integers(-1, classes, 1003).astype(np.int32)

    def program(few, few_labels):
        rows_of = jnp.arange(rows) % 1003
        return gradient(few[rows_of], few_labels[rows_of]).reshape(rows, classes)

    (got,) = run(program, platform, few, few_labels)
    (want,) = run(gradient, platform, few, few_labels)
    np.testing.assert_allclose(got, want[np.arange(rows) % 1003], 3e-6, 1e-30)


# Small cases do not reach these CUDA kernels: rows of a thread, or that a few lanes or a warp
# reduce, of whole vectors and others; tiles of consecutive rows; one or several blocks a row; rows
# that exceed the registers of these blocks.
MANY = (
    (300_007, 7, "float32"),
    (131_101, 10, "float32"),
    (60_001, 31, "float32"),
    (100_003, 21, "bfloat16"),
    (30_011, 63, "float16"),
    (50_007, 13, "float64"),
    (131_101, 75, "bfloat16"),
    (5_003, 250, "float32"),
    (9, 100_003, "float64"),
    (100_003, 80, "bfloat16"),
    (20_021, 1_000, "bfloat16"),
    (131_077, 80, "float16"),
    (50_003, 88, "bfloat16"),
    (14_003, 304, "float16"),
    (4_099, 2_048, "bfloat16"),
    (20_011, 1_000, "float32"),
    (1_037, 32_000, "float32"),
    (7, 300_000, "float32"),
    (16_387, 190, "float32"),
    (16_387, 378, "float16"),
    (32_773, 260, "float32"),
    (4_099, 2_050, "float32"),
    (1_500, 1_533, "float32"),
    (40, 12_270, "float32"),
    (37, 40_001, "bfloat16"),
)


@pytest.mark.any_jax
@pytest.mark.parametrize(("rows", "classes", "dtype"), MANY)
def test_softmax_of_many_rows_or_classes(rows, classes, dtype, platform):
    rng = np.random.default_rng(classes)
    logits = (4 * rng.standard_normal((rows, classes), np.float32)).astype(jnp.dtype(dtype))
    labels = rng.integers(-1, classes, rows).astype(np.int32)
    weight = rng.uniform(0.5, 2, rows).astype(np.float32)
    weight[labels < 0] = np.nan  # no result depends on it

    def results(module, logits):
        loss, pull = jax.vjp(lambda z: module.softmax_focal_loss(z, labels), logits)
        total = functools.partial(
            module.softmax_focal_loss, labels=labels, sample_weight=weight, reduction="sum"
        )
        return [
            loss,
            pull(jnp.ones_like(loss))[0],
            total(logits),
            *jax.value_and_grad(total)(logits),
        ]

    got = run(functools.partial(results, jaxops), platform, logits)
    want = on_reference(functools.partial(results, reference), logits)
    # The last term allows for the roundings of a sum over the classes of a row.
    rtol = max(2e-5, 2 * float(jnp.finfo(dtype).eps), 2e-10 * classes)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g.astype(np.float64), w, rtol, 1e-6 * np.abs(w).max())
    # Sums with and without the gradient are of the same losses.
    np.testing.assert_allclose(got[2], got[3], rtol=3e-6)
    np.testing.assert_allclose(got[2], want[2], rtol=3e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_pass_is_one_on_explicit_meshes(operator, platform):
    if len(platform.devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(
        platform.devices[:2], ("n",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("n"))
    logits, labels = (jax.device_put(a, rows) for a in random_case(rows=38))
    mean = functools.partial(getattr(jaxops, operator), reduction="mean")
    with jax.set_mesh(mesh):
        assert handlers(jax.value_and_grad(mean), logits, labels) == {
            f"jaxops_{operator}_value_and_gradient": 1
        }


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.5])
@pytest.mark.parametrize("dtype", focal_accuracy.FLOATS)
def test_softmax_of_classes_on_several_devices(dtype, gamma, platform):
    """Each row is as on one device, whichever device has its label."""
    if len(platform.devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(platform.devices[:2], ("c",))
    low, high = float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)
    far = min(high / 2, 3e4)
    extremes = [
        [0, np.inf, 1, 2],
        [0, 1, 2, np.inf],
        [0, 1, np.nan, 2],
        [-3000, -np.inf, -np.inf, -np.inf],
        [-3000, low, low, low],
        [low, -np.inf, low, -np.inf],
        [far, far - 32, -far, far],
        [-far, -far, -far, -far],
        [np.inf, 0, 0, 0],
    ]
    near = 6 * np.random.default_rng(0).standard_normal((20, 4))
    logits = np.concatenate([*[extremes] * 4, near]).astype(jnp.dtype(dtype))
    labels = np.append(np.repeat([0, 1, 3, 9], len(extremes)), np.arange(20) % 6 - 1)
    labels = labels.astype(np.int32)
    ct = np.linspace(0.5, 2, len(labels)).astype(jnp.dtype(dtype))

    def both(logits, labels, ct):
        loss, pull = jax.vjp(
            lambda z: jaxops.softmax_focal_loss(z, labels, gamma=gamma, alpha=0.3), logits
        )
        return loss, pull(ct)[0]

    spec = jax.sharding.PartitionSpec(None, "c")
    sharded = jax.device_put(logits, jax.sharding.NamedSharding(mesh, spec))
    rest = jax.device_put(
        (labels, ct), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    got = jax.jit(both)(sharded, *rest)
    assert got[1].sharding.spec == spec
    want = run(both, platform, logits, labels, ct)
    # The lead is rounded in two ways, and the power magnifies the difference by the lead's size.
    wide = jnp.finfo(jnp.promote_types(dtype, "float32"))
    rtol = max(2 * float(jnp.finfo(dtype).eps), 30 * (1 + gamma) * float(wide.eps))
    for g, w in zip(got, want, strict=True):
        # Subnormal numbers have fewer digits.
        g, w = (np.asarray(a, np.float64) for a in (g, w))
        np.testing.assert_allclose(g, w, rtol, 4 * float(jnp.finfo(dtype).tiny))


def test_softmax_of_classes_on_a_mesh_axis_of_one_device(platform):
    """No other device has any of the classes: the kernel takes the rows."""
    if len(platform.devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(np.reshape(platform.devices[:2], (2, 1)), ("n", "c"))
    logits, labels = random_case(rows=38)
    sharded = [
        jax.device_put(a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))
        for a, axes in ((logits, ("n", "c")), (labels, ("n",)))
    ]
    total = functools.partial(jaxops.softmax_focal_loss, reduction="sum")
    compiled = jax.jit(total).lower(*sharded).compile()
    assert custom_calls(compiled) == {"jaxops_softmax_focal_loss_sum": 1}
    np.testing.assert_allclose(compiled(*sharded), run(total, platform, logits, labels), rtol=1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_arrays_without_a_sharding_in_a_program_of_a_mesh(operator, platform):
    mesh = jax.sharding.Mesh(platform.devices, ("n",))
    logits, labels = random_case()
    mean = jax.value_and_grad(functools.partial(getattr(jaxops, operator), reduction="mean"))
    want = run(mean, platform, logits, labels)
    with jax.set_mesh(mesh):
        got = jax.jit(mean)(logits, labels)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_derivative_of_a_mean_of_float16_is_not_rounded_away(operator, platform):
    rows = 100_003
    logits, labels = random_case(rows=rows, classes=8, dtype=np.float16)
    tangent = np.zeros_like(logits)
    tangent[np.arange(rows), labels] = 1

    def slope(module, logits):
        mean = functools.partial(getattr(module, operator), labels=labels, reduction="mean")
        return jax.jvp(mean, (logits,), (tangent.astype(logits.dtype),))[1]

    got = run(functools.partial(slope, jaxops), platform, logits)[0]
    want = on_reference(functools.partial(slope, reference), logits.astype(np.float64))[0]
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("operator", OPERATORS)
def test_weights_of_rows_without_a_class_do_not_matter(operator, platform):
    """They reach no derivative of a factor; a sigmoid has ignored labels instead of such rows."""
    logits, labels = random_case(rows=6)
    labels[[2, 4]] = -1
    weights = np.linspace(1, 2, 6).astype(np.float32)
    poisoned = np.where(labels < 0, np.nan, weights).astype(np.float32)

    def derivatives(logits, alpha, normalizer, weight):
        def loss(alpha, normalizer):
            return getattr(jaxops, operator)(
                logits,
                labels,
                alpha=alpha,
                normalizer=normalizer,
                sample_weight=weight,
                ignore_index=-1,
            )

        return jax.value_and_grad(loss, (0, 1))(alpha, normalizer)

    scalars = np.float32(0.3), np.float32(2)
    got = run(derivatives, platform, logits, *scalars, poisoned)
    want = run(derivatives, platform, logits, *scalars, weights)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


# Rows for one block, for a cluster of blocks, and more; and many rows of 16 bits.
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(3, "float32"), (700, "float32"), (5_000, "float32"), (131_077, "bfloat16")],
)
@pytest.mark.parametrize("kind", [*OPERATORS, "booleans", "soft"])
def test_a_sum_under_vmap_is_that_of_its_entry(kind, rows, dtype, platform):
    """Entries of whole vectors have equal bits: the order of additions does not depend on vmap."""
    logits, labels = random_case(rows=3 * rows, classes=32, dtype=jnp.dtype(dtype))
    logits, labels = logits.reshape(3, rows, 32), labels.reshape(3, rows)
    if kind not in OPERATORS:
        labels = labels[..., None] == np.arange(32)
        labels = labels if kind == "booleans" else (0.9 * labels).astype(logits.dtype)
    operator = getattr(jaxops, kind if kind in OPERATORS else "sigmoid_focal_loss")
    total = functools.partial(operator, reduction="sum")

    def function(z, y):
        return *jax.value_and_grad(total)(z, y), total(z, y, gamma=1.5)

    got = run(jax.vmap(function), platform, logits, labels)
    for i in range(3):
        alone = run(function, platform, logits[i], labels[i])
        for together, single in zip(got, alone, strict=True):
            np.testing.assert_array_equal(together[i], single)


@pytest.mark.parametrize("targets", ["bfloat16", "float32"])
def test_entries_that_vectors_of_16_bits_do_not_divide(targets, platform):
    """Gradients take 4 elements at a time, and sums 8."""
    logits, _ = random_case(rows=3 * 2049, classes=4, dtype=jnp.bfloat16)
    logits = logits.reshape(3, 2049, 4)
    soft = np.random.default_rng(0).random(logits.shape).astype(jnp.dtype(targets))
    both = jax.value_and_grad(functools.partial(jaxops.sigmoid_focal_loss, reduction="sum"))
    sums, gradients = run(jax.vmap(both), platform, logits, soft)
    for i in range(3):
        total, gradient = run(both, platform, logits[i], soft[i])
        np.testing.assert_allclose(sums[i], total, rtol=1e-5)
        np.testing.assert_array_equal(gradients[i], gradient)


@pytest.mark.parametrize(
    ("operator", "labels"),
    [
        *((operator, np.zeros(16, np.int32)) for operator in OPERATORS),
        ("sigmoid_focal_loss", np.zeros((16, 8), bool)),
        ("sigmoid_focal_loss", np.zeros((16, 8), np.float32)),
    ],
)
def test_a_gradient_is_nothing_but_one_kernel(operator, labels, platform):
    """Constants that XLA can compute, such as an iota, would cost a launch for each call.

    So would booleans that became floats before.
    """

    def mean(z, labels):
        return getattr(jaxops, operator)(z, labels, reduction="mean")

    arguments = np.zeros((16, 8), np.float32), labels
    program = jax.jit(jax.grad(mean)).lower(*jax.device_put(arguments, platform.device)).compile()
    assert "custom-call(" in program.as_text()
    assert "fusion(" not in program.as_text()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("classes", [3, 8])
def test_ignored_rows_are_zero_whatever_their_logits(operator, classes, platform):
    logits, labels = random_case(rows=9, classes=classes)
    ignored = labels == 1
    poisoned = np.where(ignored[:, None], np.nan, logits)

    def both(logits, options):
        def mean(z):
            return getattr(jaxops, operator)(z, labels, ignore_index=1, reduction="mean", **options)

        return (
            *jax.value_and_grad(mean)(logits),
            getattr(jaxops, operator)(logits, labels, ignore_index=1, **options),
        )

    for options in ({}, {"sample_weight": np.ones(9, np.float32)}):
        clean = run(lambda z, o=options: both(z, o), platform, logits)
        got = run(lambda z, o=options: both(z, o), platform, poisoned)
        for g, c in zip(got, clean, strict=True):
            np.testing.assert_array_equal(g, c)
        assert not got[1][ignored].any()
        assert not got[2][ignored].any()


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_mean_over_no_rows_is_zero(operator, platform):
    labels = np.full(4, 2, np.int32)

    def mean(logits):
        return getattr(jaxops, operator)(logits, labels, ignore_index=2, reduction="mean")

    value, gradient = run(jax.value_and_grad(mean), platform, np.ones((4, 3), np.float32))
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"]
)
def test_labels_at_the_ends_of_their_dtype_are_background(operator, dtype, x64, platform):
    info = jnp.iinfo(dtype)
    labels = np.array([info.min, info.max, 0, 2, 1, info.max // 2 + 1], jnp.dtype(dtype))
    # The classes are 0 to 2; 2**32 would be class 0 if it were cut to 32 bits.
    if info.bits == 64:
        labels[5] = 2**32
    known = [int(n) if 0 <= n < 3 else -1 for n in labels.tolist()]
    logits = np.linspace(-2, 2, 18).reshape(6, 3).astype(np.float32)
    function = getattr(jaxops, operator)
    with jax.enable_x64(x64), jax.default_device(platform.device):
        got = function(logits, labels)
        want = function(logits, np.array(known, np.int32))
        np.testing.assert_array_equal(got, want)
        # 2**31 and 2**31 + 5 fit in a uint32; JAX reads them as an int32.
        for ignored in (int(info.min), int(info.max), 1, -1, 2**31, 2**31 + 5):
            got = function(logits, labels, ignore_index=ignored, reduction="mean")
            rows = np.asarray(function(logits, np.array(known, np.int32))).reshape(6, -1).sum(-1)
            counted = np.array([n != ignored for n in labels.tolist()])
            np.testing.assert_allclose(got, rows[counted].sum() / counted.sum(), rtol=1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_scalars_never_widen(operator):
    logits, labels = random_case()
    for dtype in (jnp.bfloat16, jnp.float32):
        for scalar in (np.float64, np.float32, np.array, jnp.asarray):
            loss = getattr(jaxops, operator)(
                logits.astype(dtype), labels, gamma=scalar(2.0), alpha=scalar(0.25)
            )
            assert loss.dtype == dtype
            total = getattr(jaxops, operator)(
                logits.astype(dtype), labels, normalizer=scalar(2.0), reduction="sum"
            )
            assert total.dtype == jnp.float32


def test_a_float64_weight_makes_the_arithmetic_float64():
    logits, labels = random_case()
    weight = np.full(labels.shape, 1 / 3)
    got = jaxops.sigmoid_focal_loss(logits, labels, sample_weight=weight)
    wide = jaxops.sigmoid_focal_loss(logits.astype(np.float64), labels, sample_weight=weight)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, wide.astype(np.float32))


def test_softmax_alpha_by_class(platform):
    logits, labels = random_case()
    labels[:3] = (-1, 11, 5)
    alpha = np.linspace(0.1, 1, 11).astype(np.float32)
    got = run(lambda z: jaxops.softmax_focal_loss(z, labels, alpha=alpha), platform, logits)[0]
    plain = np.asarray(jaxops.softmax_focal_loss(logits, labels, alpha=None))
    factor = np.where((labels >= 0) & (labels < 11), alpha[np.clip(labels, 0, 10)], 0)
    np.testing.assert_allclose(got, plain * factor, rtol=1e-6)
    assert not got[:2].any()


SOFT = np.full((2, 3), 0.5, np.float32)
BAD = (
    (ValueError, "class_weight needs class ids as labels", {"class_weight": np.ones(3, "f")}),
    (ValueError, "ignore_index needs class ids as labels", {"ignore_index": 1}),
    (ValueError, r"alpha must be in \[0, 1\] or None, got -1.0", {"alpha": -1}),
    (TypeError, "alpha must be a number or a scalar array of a float", {"alpha": "no"}),
    (ValueError, r"normalizer must be a scalar, got shape \(2,\)", {"normalizer": jnp.ones(2)}),
    (ValueError, r"normalizer must be a scalar, got shape \(1,\)", {"normalizer": np.ones((1,))}),
    (ValueError, r"gamma must be a scalar, got shape \(1, 1\)", {"gamma": np.ones((1, 1))}),
    (ValueError, "gamma must be finite in float32 and >= 0, got 1e\\+39", {"gamma": 1e39}),
)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
@pytest.mark.parametrize(("error", "message", "options"), BAD)
def test_bad_options_of_targets(error, message, options, dtype):
    with pytest.raises(error, match=f"sigmoid_focal_loss: {message}"):
        jaxops.sigmoid_focal_loss(np.zeros((2, 3), np.float32), SOFT.astype(dtype), **options)


@pytest.mark.parametrize(
    ("operator", "shape", "dtype", "error"),
    [
        ("sigmoid_focal_loss", (2,), bool, TypeError),
        ("sigmoid_focal_loss", (2,), np.float32, ValueError),
        ("sigmoid_focal_loss", (2, 1), np.int32, ValueError),
        ("sigmoid_focal_loss", (2, 3), np.complex64, TypeError),
        ("softmax_focal_loss", (2,), bool, TypeError),
        ("softmax_focal_loss", (2, 3), bool, TypeError),
        ("softmax_focal_loss", (2, 3), np.int32, TypeError),
        ("softmax_focal_loss", (2,), np.float32, ValueError),
        ("softmax_focal_loss", (2, 3), np.complex64, TypeError),
        ("softmax_focal_loss", (3,), np.int32, ValueError),
    ],
)
def test_bad_labels(operator, shape, dtype, error):
    with pytest.raises(error, match=f"{operator}: labels must"):
        getattr(jaxops, operator)(np.zeros((2, 3), np.float32), np.zeros(shape, dtype))


# --- targets 0 and 1 -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "int8", "uint4", "int32", "uint64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_integers_of_the_shape_of_logits_are_targets(kind, dtype, platform):
    """Results equal those of floats of the same values, and of class ids of one class."""
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((7, 1))).astype(jnp.dtype(dtype))
    targets = np.array([0, 1, 1, 0, 1, 0, 0])[:, None]
    weight = np.linspace(1, 2, 7, dtype=np.float32)

    def both(logits, labels):
        def total(z):
            return jaxops.sigmoid_focal_loss(z, labels, sample_weight=weight, reduction="sum")

        return (
            *jax.value_and_grad(total)(logits),
            jax.vmap(lambda z, y: jaxops.sigmoid_focal_loss(z, y, gamma=1.5))(logits, labels),
        )

    got = run(both, platform, logits, targets.astype(jnp.dtype(kind)))
    floats = run(both, platform, logits, targets.astype(logits.dtype))
    ids = run(both, platform, logits, np.where(targets[:, 0], 0, -1))
    eps = float(jnp.finfo(dtype).eps)
    for g, f, i in zip(got, floats, ids, strict=True):
        if platform.name == "cpu":
            np.testing.assert_array_equal(g, f)
        else:  # floats have another kernel
            np.testing.assert_allclose(g.astype(float), f.astype(float), rtol=16 * eps)
        np.testing.assert_allclose(g.astype(float), i.astype(float), rtol=16 * eps)
    reference_loss = reference.sigmoid_focal_loss(jnp.asarray(logits), jnp.asarray(targets))
    plain = run(jaxops.sigmoid_focal_loss, platform, logits, targets)[0]
    np.testing.assert_allclose(plain.astype(float), reference_loss.astype(float), rtol=16 * eps)


# --- settings of JAX, and of its threads ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["soft", *OPERATORS])
def test_no_derivative_promotes_ranks(kind, platform):
    soft = kind == "soft"
    function = jaxops.sigmoid_focal_loss if soft else getattr(jaxops, kind)
    logits, labels = random_case(rows=4, classes=3)
    labels = SOFT[0, 0] * np.ones_like(logits) if soft else labels
    weight = {} if soft else {"class_weight": np.ones(4, np.float32)}

    def loss(z, gamma, alpha, normalizer, sample_weight, weight, reduction):
        value = function(
            z,
            labels,
            gamma=gamma,
            alpha=alpha,
            sample_weight=sample_weight,
            normalizer=normalizer if reduction == "sum" else None,
            reduction=reduction,
            **weight,
        )
        return value.sum()

    by = (0, 1, 2, 3, 4, 5)
    arguments = logits, *np.float32([1.5, 0.3, 2]), np.ones(4, np.float32), weight
    arguments = jax.device_put(jax.tree.map(jnp.asarray, arguments), platform.device)
    with jax.numpy_rank_promotion("raise"), jax.default_device(platform.device):
        for reduction in ("none", "sum", "mean"):
            total = functools.partial(loss, reduction=reduction)
            jax.jit(jax.hessian(total, by)).lower(*arguments)


@pytest.mark.parametrize("kind", ["soft", *OPERATORS])
def test_a_sum_of_subnormal_losses_is_not_zero(kind, platform):
    z = np.full((3, 1), -50, np.float32)  # 3 e^(-2 * 50), which is subnormal

    def losses(reduction):
        if kind == "softmax_focal_loss":
            function, logits, labels = jaxops.softmax_focal_loss, np.hstack([z * 0, z]), np.zeros(3)
        else:
            function, logits, labels = jaxops.sigmoid_focal_loss, z, np.full(3, -1)
        labels = np.zeros_like(z) if kind == "soft" else labels.astype(np.int32)
        options = {"gamma": 1.0, "alpha": None, "reduction": reduction}
        value = run(lambda z: function(z, labels, **options), platform, logits)[0]
        return value, run(
            jax.vmap(lambda z: function(z, labels, **options)), platform, np.stack([logits] * 2)
        )[0]

    with np.errstate(under="ignore"):
        (none, many), (total, totals) = losses("none"), losses("sum")
        assert none.all()
        assert many.all()
        np.testing.assert_allclose(np.float64(total), none.sum(dtype=np.float64), rtol=1e-4)
        np.testing.assert_array_equal(totals, [total] * 2)


# A task of the host computes several such entries: contiguous or not, with one exponent for all or
# one for each.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_many_small_sums(operator, dtype, platform):
    rng = np.random.default_rng(0)
    entries, rows, classes = 700, 3, 5
    logits = rng.standard_normal((entries, rows, classes)).astype(jnp.dtype(dtype))
    labels = rng.integers(-1, classes, (entries, rows)).astype(np.int32)
    gammas = np.repeat(np.array([1.5, 2.5], np.float32), [400, 300])
    weights = rng.uniform(1, 2, (entries, rows)).astype(np.float32)

    def both(z, labels, gamma, weight):
        function = functools.partial(
            getattr(jaxops, operator), labels=labels, gamma=gamma, sample_weight=weight
        )
        return *jax.value_and_grad(functools.partial(function, reduction="sum"))(z), function(z)

    arguments = logits, labels, gammas, weights
    for axes in ((0, 0, 0, 0), (0, 0, None, None), (None, 0, None, 0), (0, None, 0, None)):
        given = [x if a == 0 else x[0] for x, a in zip(arguments, axes, strict=True)]
        got = run(jax.vmap(both, axes), platform, *given)
        for i in (0, 1, 399, 400, 699):
            one = [x[i] if a == 0 else x for x, a in zip(given, axes, strict=True)]
            for g, w in zip(got, run(both, platform, *one), strict=True):
                if platform.name == "cpu":
                    np.testing.assert_array_equal(g[i], w)
                else:  # one entry is aligned to vectors, and is added up in another order
                    np.testing.assert_allclose(g[i], w, rtol=8 * jnp.finfo(w.dtype).eps)


# On GPUs a block has several entries, or one, whose rows it takes at once or in rounds; an entry
# of a sigmoid has 8 lanes, a warp or a block.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "classes"), [(1, 10), (4, 17), (30, 80), (40, 9), (3, 300), (2, 1030)]
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_many_entries(operator, rows, classes, dtype, platform):
    rng = np.random.default_rng(rows)
    entries = 1100
    logits = rng.standard_normal((entries, rows, classes)).astype(jnp.dtype(dtype))
    labels = rng.integers(-1, classes + 1, (entries, rows)).astype(np.int32)
    weights = rng.uniform(1, 2, (entries, rows)).astype(np.float32)
    scales = rng.uniform(1, 2, entries).astype(np.float32)
    soft = (np.arange(classes) == labels[..., None]).astype(jnp.dtype(dtype))

    def losses(z, labels, weight, scale, implementation=None):
        loss = functools.partial(getattr(jaxops, operator), implementation=implementation)

        def total(z, scale, **options):
            return scale * loss(z, labels, reduction="mean", **options)

        (value, weighed), pull = jax.vjp(
            lambda z: (total(z, scale), total(z, scale, sample_weight=weight, gamma=1.5)), z
        )
        (one,) = pull((jnp.ones_like(value), jnp.zeros_like(value)))
        (other,) = pull((jnp.zeros_like(value), scale))
        return value, weighed, one, other, *jax.value_and_grad(total)(z, 1.0), loss(z, labels)

    kinds = (labels, soft) if operator == "sigmoid_focal_loss" else (labels,)
    for given in kinds:
        arguments = logits, given, weights, scales
        got = run(jax.vmap(losses), platform, *arguments)
        plain = functools.partial(losses, implementation="xla")
        want = on_reference(jax.vmap(plain), *arguments)
        for g, w in zip(got, want, strict=True):
            # An entry of the losses' dtype, and sums of as many in float32.
            allowed = float(jnp.finfo(g.dtype).eps) * (1 if g.dtype == dtype else 8) + 1e-5
            np.testing.assert_allclose(
                g.astype(np.float64), w, rtol=allowed, atol=allowed * np.abs(w).max()
            )


# On GPUs a warp has as many whole entries as it has threads for their rows.
@pytest.mark.parametrize("dtype", focal_accuracy.FLOATS)
@pytest.mark.parametrize(
    ("entries", "rows", "classes"),
    [(50_003, 1, 10), (20_011, 3, 7), (1_501, 20, 15), (700, 32, 21)],
)
def test_softmax_sums_of_entries_of_a_warp(entries, rows, classes, dtype, platform):
    rng = np.random.default_rng(rows)
    logits = (3 * rng.standard_normal((entries, rows, classes))).astype(jnp.dtype(dtype))
    labels = rng.integers(-1, classes + 1, (entries, rows)).astype(np.int32)
    weights = rng.uniform(1, 2, (entries, rows)).astype(np.float32)
    weights[(labels < 0) | (labels == classes)] = np.nan  # no result depends on it

    def sums(z, labels, weight, implementation=None):
        total = functools.partial(
            jaxops.softmax_focal_loss,
            labels=labels,
            reduction="sum",
            implementation=implementation,
        )
        weighed = functools.partial(total, sample_weight=weight, gamma=1.5)
        return total(z), weighed(z), *jax.value_and_grad(total)(z), *jax.value_and_grad(weighed)(z)

    arguments = logits, labels, weights
    got = run(jax.vmap(sums), platform, *arguments)
    plain = functools.partial(sums, implementation="xla")
    want = on_reference(jax.vmap(plain), *arguments)
    for g, w in zip(got, want, strict=True):
        allowed = float(jnp.finfo(g.dtype).eps) * (1 if g.dtype == dtype else 8)
        allowed += 1e-12 if g.dtype == np.float64 else 1e-5
        np.testing.assert_allclose(
            g.astype(np.float64), w, rtol=allowed, atol=allowed * np.abs(w).max()
        )


# --- soft labels and classes left out of the softmax ---------------------------------------------


def soft_softmax(z, y, gamma, alpha=1.0, kept=True):
    """The formula as it stands, exact enough for logits that are near each other."""
    p = jax.nn.softmax(jnp.where(kept, z, -jnp.inf), axis=-1)
    log_p = jnp.log(jnp.where(kept, p, 1))
    return -jnp.where(kept, y * alpha * (1 - p) ** gamma * log_p, 0).sum(-1)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0, 1.7])
def test_soft_labels_of_a_softmax(gamma):
    rng = np.random.default_rng(0)
    z, y = rng.standard_normal((3, 5)), rng.dirichlet(np.ones(5), 3)
    alpha, weight = rng.random(5), rng.random(3)

    def ours(z, y, gamma):
        return jaxops.softmax_focal_loss(z, y, gamma=gamma, alpha=alpha, sample_weight=weight)

    def formula(z, y, gamma):
        return weight * soft_softmax(z, y, gamma, alpha)

    def orders(function):
        def both(z, y, gamma):
            def total(z, y):
                return function(z, y, gamma).sum()

            return function(z, y, gamma), jax.grad(total, (0, 1))(z, y), jax.hessian(total)(z, y)

        return jax.jit(both)(z, y, gamma)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
        orders(ours),
        orders(formula),
    )
    np.testing.assert_allclose(
        jaxops.softmax_focal_loss(z, y, gamma=gamma, alpha=alpha, reduction="mean"),
        soft_softmax(z, y, gamma, alpha).mean(),
    )


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_one_hot_soft_labels_are_class_ids(dtype, gamma, platform):
    """Also for logits so far apart that a probability is 1 or 0 in the dtype."""
    far = np.array([0, 1e-3, 30, 90, 800, 6e4])
    rows = np.stack([far, -far, far[::-1], np.zeros(6)]).astype(jnp.dtype(dtype))
    z, ids = np.repeat(rows, 6, axis=0), np.tile(np.arange(6), 4)

    def loss(z, labels):
        def total(z):
            return jaxops.softmax_focal_loss(z, labels, gamma=gamma, reduction="sum")

        return jaxops.softmax_focal_loss(z, labels, gamma=gamma), jax.grad(total)(z)

    soft = run(loss, platform, z, np.eye(6, dtype=z.dtype)[ids])
    hard = run(loss, platform, z, ids)
    # One rounding of subnormal numbers of float16; CPUs flush those of other dtypes.
    atol = 2.0**-24 if dtype == "float16" else float(jnp.finfo(dtype).tiny)
    for s, h in zip(soft, hard, strict=True):
        assert s.dtype == h.dtype
        s, h = s.astype(np.float64), h.astype(np.float64)
        np.testing.assert_allclose(s, h, rtol=32 * float(jnp.finfo(dtype).eps), atol=atol)


@pytest.mark.parametrize("kind", ["ids", "soft"])
def test_classes_left_out_of_a_softmax(kind, platform):
    rng = np.random.default_rng(1)
    z, kept = rng.standard_normal((6, 5)), rng.random((6, 5)) < 0.6
    kept[0], kept[1] = False, [True, False, False, False, False]
    ids = np.array([0, 0, 1, 2, 3, 4])
    kept[2:4, 1:3] = True
    one_hot = np.eye(5)[ids]
    labels = ids if kind == "ids" else one_hot
    some = kept.any(-1, keepdims=True)
    # Whatever logits are left out, no derivative meets them.
    lost = np.where(kept, z, np.array([np.nan, np.inf, -np.inf])[rng.integers(0, 3, z.shape)])

    def ours(z):
        return jaxops.softmax_focal_loss(z, labels, gamma=1.5, alpha=None, where=kept)

    def formula(z):
        y = one_hot * kept
        return soft_softmax(z, y, 1.5, kept=kept | ~some)

    def orders(function):
        def total(z):
            return function(z).sum()

        return lambda z: (function(z), jax.grad(total)(z), jax.hessian(total)(z))

    got = run(orders(ours), platform, lost)
    want = run(orders(formula), platform, np.where(kept, z, 0))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, np.where(np.isnan(w), 0, w), rtol=1e-9, atol=1e-12)
    row = run(lambda z: jaxops.softmax_focal_loss(z, labels, where=kept[3]), platform, z)
    every = np.broadcast_to(kept[3], z.shape)
    np.testing.assert_array_equal(
        row, run(lambda z: jaxops.softmax_focal_loss(z, labels, where=every), platform, z)
    )


@pytest.mark.parametrize(
    ("where", "error"),
    [(np.ones((2, 3), np.int32), TypeError), (np.ones((4, 3), bool), ValueError)],
)
def test_bad_where(where, error):
    with pytest.raises(error, match=r"^softmax_focal_loss: where must"):
        jaxops.softmax_focal_loss(np.zeros((2, 3), np.float32), [0, 1], where=where)
