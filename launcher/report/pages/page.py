"""Pages from templates: what charts and timelines on them are made of. Pure.

Places are in percent of the chart. Styles and script are in the page, and nothing may be loaded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from launcher.report import text

MOST_POINTS = 600  # of a line; of more every n-th is drawn, and the last
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # between ticks, times a power of ten


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("launcher.report", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("days", "seconds", "result", "setting", "label"):
        environment.filters[name] = getattr(text, f"{name}_text")
    environment.filters |= {"percent_of": percent_of, "short": without_zeros}
    return environment


def page_from(template: str, content: Mapping[str, Any]) -> str:
    """Return the page that a template of this folder makes of its content."""
    return _environment().get_template(template).render(**content)


def percent_of(part: float, whole: float) -> float:
    """Return a part as a percentage of the whole, at least 0."""
    return round(max(0.0, part / whole) * 100, 4)


@dataclass(frozen=True)
class Series:
    """A line or dots of a chart.

    Attributes:
        name: its name.
        css: the class that colours it.
        points: (x, y); `chart` leaves out others than finite numbers.
        is_joined: whether a line joins them.
        best: the y of the best points.
    """

    name: str
    css: str
    points: Sequence[tuple[float, float]]
    is_joined: bool = True
    best: float | None = None


@dataclass(frozen=True)
class Chart:
    """Several series in one pair of axes.

    Attributes:
        title: what the values are.
        x_name: what they are drawn against.
        shown: writes a value.
        series: the series, each with a point or more.
        x_range: the ends of the axis.
        x_ticks: its marks.
        y_ticks: those of the other axis, which they end.
        labels: the names of x = 0, 1, …, if x is no number.
    """

    title: str
    x_name: str
    shown: Callable[[float], str]
    series: Sequence[Series]
    x_range: tuple[float, float]
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    labels: Sequence[str]

    def across(self, x: float) -> float:
        """Return the place of an x, from the left."""
        left, right = self.x_range
        return percent_of(x - left, right - left)

    def down(self, y: float) -> float:
        """Return the place of a y, from the top."""
        low, *_, high = self.y_ticks
        return percent_of(high - y, high - low)

    def named(self, x: float) -> str:
        """Return the label of an x."""
        return self.labels[int(x)] if self.labels else f"{x:g}"


def chart(
    title: str,
    x_name: str,
    series: Sequence[Series],
    shown: Callable[[float], str],
    labels: Sequence[str] = (),
    from_zero: bool = False,
) -> Chart | None:
    """Return a `Chart`, None where no series has a point.

    Its axis begins at 0 if `from_zero`. Bytes have marks at multiples of powers of two.
    """
    kept = []
    for one in series:
        points = [(x, y) for x, y in one.points if math.isfinite(x) and math.isfinite(y)]
        if points:  # of too many every n-th, and the last
            thinned = [*points[:-1][:: -(-len(points) // MOST_POINTS)], points[-1]]
            kept.append(Series(one.name, one.css, thinned, one.is_joined, one.best))
    if not kept:
        return None
    xs, ys = ([point[axis] for one in kept for point in one.points] for axis in (0, 1))
    left, right = (-0.5, len(labels) - 0.5) if labels else (min(xs), max(xs))
    right += left == right
    x_ticks = range(len(labels)) or [t for t in ticks(left, right) if left <= t <= right]
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys), binary=shown is text.bytes_text)
    return Chart(title, x_name, shown, kept, (left, right), x_ticks, y_ticks, labels)


def without_zeros(number: str) -> str:
    """Return a number, and its unit, without zeros at its end: "2.50 s" is "2.5 s"."""
    number, blank, unit = number.partition(" ")
    if "." in number and "e" not in number:
        number = number.rstrip("0").rstrip(".")
    return number if number == "0" else number + blank + unit


def ticks(low: float, high: float, most: int = 5, binary: bool = False) -> list[float]:
    """Return round numbers at equal distances, from one not above `low` to one not below `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * power for s in _STEPS if span / (s * power) <= most)
    if binary:
        step = 2.0 ** math.ceil(math.log2(span / most))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, max(last, first + 1) + 1)]
