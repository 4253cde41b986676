"""Division by a multiplication and a shift, which kernels index with, against the plain one."""

from __future__ import annotations

import numpy as np
import pytest

from jaxops import _cpu

pytestmark = pytest.mark.any_jax

TYPES = (np.uint32, np.uint64)


def check(dividends, divisor):
    """`dividends` have one of the two types."""
    got = dividends.copy()
    _cpu.divide_in_place(got, int(divisor))
    wrong = got != dividends // dividends.dtype.type(divisor)
    assert not wrong.any(), f"{dividends[wrong][0]} / {divisor} is not {got[wrong][0]}"


def limit(kind):
    """Dividends and divisors are below this limit."""
    return 1 << (8 * kind().itemsize - 1)


def edges(kind):
    """1, 2, 3 and every power of two with its neighbours, up to the greatest divisor."""
    powers = (1 << k for k in range(limit(kind).bit_length()))
    return sorted({d for p in powers for d in (p - 1, p, p + 1) if 0 < d < limit(kind)} | {3, 7})


def around_multiples(divisor, kind):
    """Dividends near 0, near multiples of the divisor, small and great, and near the maximum."""
    most = limit(kind) - 1
    last = most // divisor
    multiples = {k for k in (0, 1, 2, 3, last // 3, last // 2, last - 1, last) if 0 <= k <= last}
    near = {k * divisor + offset for k in multiples for offset in range(-3, 4)}
    near |= {most - offset for offset in range(4)} | set(edges(kind))
    return np.array(sorted(n for n in near if 0 <= n <= most), kind)


@pytest.mark.parametrize("kind", TYPES)
def test_edges(kind):
    divisors = edges(kind)
    assert {1, 2, 3, limit(kind) - 1} <= set(divisors)
    for divisor in divisors:
        check(around_multiples(divisor, kind), divisor)


@pytest.mark.parametrize("kind", TYPES)
def test_every_divisor_and_dividend_of_eleven_bits(kind):
    dividends = np.arange(1 << 11, dtype=kind)
    for divisor in range(1, 1 << 11):
        check(dividends, divisor)


@pytest.mark.parametrize("kind", TYPES)
def test_every_dividend_of_twenty_bits_below_the_limit(kind):
    dividends = np.arange(limit(kind) - (1 << 20), limit(kind), dtype=kind)
    for divisor in (1, 2, 3, 5, 7, 10, 255, 641, 65_537, (1 << 20) - 1, limit(kind) // 3):
        check(dividends, divisor)


@pytest.mark.parametrize("kind", TYPES)
def test_random_pairs(kind):
    """Four million pairs of every magnitude: a random number of bits is dropped."""
    rng = np.random.default_rng(1994)
    bits = limit(kind).bit_length() - 1
    total = 0

    def sample(count):
        numbers = rng.integers(0, limit(kind), count, dtype=kind)
        return numbers >> rng.integers(0, bits, count).astype(kind)

    for divisor in np.maximum(sample(2000), 1).tolist():
        dividends = sample(1000)
        check(dividends, divisor)
        # An inexact quotient would show one below a multiple.
        multiples = dividends // kind(divisor) * kind(divisor)
        check(np.concatenate([multiples, np.maximum(multiples, 1) - kind(1)]), divisor)
        total += 3 * dividends.size
    assert total >= 10**6


def test_the_check_can_fail():
    """Beyond the limit the multiplication is not exact, and the comparison notices."""
    with pytest.raises(AssertionError, match="is not"):
        check(np.array([2**64 - 1], np.uint64), 3)
