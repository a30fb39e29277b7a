"""Numbers are written as a person reads them."""

import pytest

from launcher.report import text


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (2.41333, "2.4133"),
        (0, "0.0000"),
        (1.25e-5, "1.250e-05"),
        (123456.0, "1.235e+05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (None, "-"),
    ],
)
def test_losses(value, written):
    assert text.loss_text(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0000004, "0.00 ms"),
        (0.0852, "85.2 ms"),
        (0.9996, "1000 ms"),
        (1.234, "1.23 s"),
        (119.7, "120 s"),
        (125, "2:05"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_seconds(seconds, written):
    assert text.seconds_text(seconds) == written


def test_a_clock_rounds_before_it_splits():
    assert text.clock_text(35.2) == "0:35"
    assert text.clock_text(59.7) == "1:00"
    assert text.clock_text(3 * 3600 + 10) == "3:00:10"


@pytest.mark.parametrize(
    ("count", "written"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 K"),
        (105_344, "105 K"),
        (999_960, "1.00 M"),
        (7.0e9, "7.00 B"),
        (3.2e18, "3200000 T"),
        (None, "-"),
    ],
)
def test_counts(count, written):
    assert text.count_text(count) == written


def test_bytes_use_binary_units():
    assert text.bytes_text(512) == "512 B"
    assert text.bytes_text(1 << 20) == "1.00 MiB"
    assert text.bytes_text(80 << 30) == "80.0 GiB"


def test_rates_and_fractions():
    assert text.rate_text(12345.6, "tokens") == "12,346 tokens/s"
    assert text.rate_text(3.2, "samples") == "3.20 samples/s"
    assert text.percent_text(0.2734) == "27.3%"


def test_runs_of_numbers_are_drawn_together():
    assert text.ranges_text([0, 1, 2, 3]) == "0-3"
    assert text.ranges_text([2]) == "2"
    assert text.ranges_text([0, 1, 4, 6, 7]) == "0-1, 4, 6-7"
    assert text.ranges_text([]) == ""
