"""Divisors of a batch: the numbers of parts that are tried. Pure."""

from __future__ import annotations

import math

_MOST_DIVISORS = 20


def divisors(number: int, most: int) -> list[int]:
    """Return all divisors of a number up to `most`."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted(n for n in {*low, *(number // n for n in low)} if n <= most)


def spread_divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`.

    Of more than `_MOST_DIVISORS` they are those that are nearest to the powers of the root of two,
    and the largest.
    """
    every = divisors(number, most)
    if len(every) <= _MOST_DIVISORS:
        return every
    powers = [2 ** (k / 2) for k in range(2 * every[-1].bit_length())]
    nearest = {min(every, key=lambda n: max(n / power, power / n)) for power in powers}
    return sorted({*nearest, every[-1]})
