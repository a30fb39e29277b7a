"""The median rule ends runs that are behind, and no others."""

import pytest

from launcher.submit.stop_early import is_hopeless


def curve(*values, first=1):
    return [(first + n, value) for n, value in enumerate(values)]


OTHERS = [curve(5, 4, 3, 2), curve(5, 5, 5, 5), curve(6, 2, 9, 9)]


@pytest.mark.parametrize(
    ("mine", "others", "steps", "expected"),
    [
        (curve(7, 7, 7), OTHERS, 8, True),  # the others' best there: 3, 5, 2
        (curve(7, 7, 3), OTHERS, 8, False),  # the median itself is no worse
        (curve(7, 3, 9), OTHERS, 8, False),  # what counts is its best
        (curve(7), OTHERS, 8, False),  # the first quarter is warm-up
        (curve(7, 7, 7), OTHERS[:2], 8, False),  # too few to compare with
        (curve(7, 7, 7, 7, 7), OTHERS, 8, False),  # none of them has got so far
        ([], OTHERS, 8, False),
    ],
)
def test_the_median_rule(mine, others, steps, expected):
    assert is_hopeless(mine, others, steps) is expected
