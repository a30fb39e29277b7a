"""Parts of pages as data that a template draws: charts, timelines as lanes, labels. Pure.

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
from launcher.report.pages.plots import Box, Picture
from launcher.report.text import seconds_text


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("launcher.report", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("loss_text", "seconds_text", "clock_text", "count_text", "bytes_text"):
        environment.filters[name.removesuffix("_text")] = getattr(text, name)
    environment.filters["percent"] = text.percent_text
    return environment


def page_from(template: str, content: Mapping[str, Any]) -> str:
    """Return the page that a template of this folder makes of its content."""
    return _environment().get_template(template).render(**content)


MOST_POINTS = 600  # of a line; of more every n-th is drawn, and the last
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # between ticks, times a power of ten


@dataclass(frozen=True)
class Mark:
    """A label beside an axis, at a place in percent."""

    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    """A point of a chart, in percent from its upper left corner, and its label."""

    x: float
    y: float
    text: str
    is_best: bool = False


@dataclass(frozen=True)
class Line:
    """A series of points: its name, its newest value, and the class that colours it."""

    name: str
    newest: str
    css: str
    points: tuple[Dot, ...]
    is_joined: bool = True


@dataclass(frozen=True)
class Chart:
    """A chart: lines or dots in one pair of axes."""

    title: str
    x_name: str
    lines: tuple[Line, ...]
    x_marks: tuple[Mark, ...]
    y_marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Series:
    """Data of a line: points (x, y), and the best of them.

    Attributes:
        name: its name.
        css: the class that colours it.
        points: (x, y); others than finite numbers are left out.
        is_joined: whether a line joins them.
        best: the y of the best points.
    """

    name: str
    css: str
    points: Sequence[tuple[float, float]]
    is_joined: bool = True
    best: float | None = None


def chart(
    title: str,
    x_name: str,
    series: Sequence[Series],
    shown: Callable[[float], str],
    x_labels: Sequence[str] | None = None,
    from_zero: bool = False,
    binary: bool = False,
) -> Chart | None:
    """Return a chart of several series, None where none has a point.

    Args:
        title: what the values are.
        x_name: what they are drawn against.
        series: the series.
        shown: writes a value.
        x_labels: the names of x = 0, 1, …, if x is no number.
        from_zero: whether the axis begins at 0.
        binary: whether marks lie at multiples of powers of two, as for bytes.
    """
    kept = [(one, _finite(one.points)) for one in series]
    kept = [(one, points) for one, points in kept if points]
    if not kept:
        return None
    xs = [x for _, points in kept for x, _ in points]
    ys = [y for _, points in kept for _, y in points]
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys), binary=binary)
    low, high = y_ticks[0], y_ticks[-1]
    left, right = min(xs), max(xs)
    if x_labels:
        left, right = -0.5, len(x_labels) - 0.5
    elif left == right:
        right += 1

    def across(x: float) -> float:
        return round((x - left) / (right - left) * 100, 3)

    def down(y: float) -> float:
        return round((high - y) / (high - low) * 100, 3)

    def named(x: float) -> str:
        return x_labels[int(x)] if x_labels else f"{x:g}"

    lines = tuple(
        Line(
            one.name,
            shown(points[-1][1]),
            one.css,
            tuple(
                Dot(
                    across(x),
                    down(y),
                    f"{one.name}, {x_name} {named(x)}: {shown(y)}",
                    one.best is not None and y == one.best,
                )
                for x, y in _thinned(points)
            ),
            one.is_joined and len(points) > 1,
        )
        for one, points in kept
    )
    numbers: Sequence[float] = [t for t in ticks(left, right) if left <= t <= right]
    if x_labels:
        numbers = range(len(x_labels))
    return Chart(
        title,
        x_name,
        lines,
        tuple(Mark(across(t), named(t)) for t in numbers),
        tuple(Mark(down(t), without_zeros(shown(t))) for t in y_ticks),
    )


def without_zeros(text: str) -> str:
    """Return a number, and its unit, without zeros at its end: "2.50 s" is "2.5 s"."""
    number, blank, unit = text.partition(" ")
    if "." in number and "e" not in number:
        number = number.rstrip("0").rstrip(".")
    return number if number == "0" else number + blank + unit


def metric(records: Sequence[Mapping[str, Any]], key: str, name: str, css: str) -> Series:
    """Return a metric over its steps."""
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return Series(name, css, points)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return every n-th point, and the last one, where there are too many to draw."""
    every = -(-len(points) // MOST_POINTS)
    found = list(points[::every])
    return found if found[-1] == points[-1] else [*found, points[-1]]


def ticks(low: float, high: float, most: int = 5, binary: bool = False) -> list[float]:
    """Return round numbers at equal distances, from one not above `low` to one not below `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * power for s in _STEPS if span / (s * power) <= most)
    if binary:
        step = 2.0 ** math.ceil(math.log2(span / most))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if first == last:
        last += 1
    return [round(n * step, 12) for n in range(first, last + 1)]


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


MOST_BOXES = 6000  # of a timeline; more would make the page slow
_LEGEND = {
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "backward_input": ("backward", "backward"),
    "backward_weight": ("weight", "backward, weights"),
    "forward_backward": ("both", "forward and backward"),
    "gradient sum": ("sum", "gradient sums"),
    "update": ("update", "update"),
}


@dataclass(frozen=True)
class Bar:
    """A box of a lane: its place in percent, its look, and its label."""

    row: int
    left: float
    width: float
    css: str
    text: str
    number: str = ""


@dataclass(frozen=True)
class Arrow:
    """A transfer from one row to another, by its times in percent."""

    from_x: float
    from_row: int
    to_x: float
    to_row: int


@dataclass(frozen=True)
class Lanes:
    """A timeline: its heading, the names of its rows, its boxes and transfers.

    Attributes:
        idle: up to where a row without a box is idle, in percent.
        left_out: the number of boxes that are too many to draw.
    """

    title: str
    rows: Sequence[str]
    bars: Sequence[Bar]
    arrows: Sequence[Arrow]
    idle: float
    left_out: int = 0


def lanes(picture: Picture, total: float) -> Lanes:
    """Return a timeline on an axis of `total` seconds."""

    def place(seconds: float) -> float:
        return round(seconds / total * 100, 4)

    def bar(box: Box) -> Bar:
        even = "" if box.number is None or box.number % 2 == 0 else " odd"
        what = box.kind.replace("_", ", ")
        micro = "" if box.number is None else f", microbatch {box.number}"
        return Bar(
            box.row,
            place(box.start),
            place(box.end - box.start),
            _LEGEND.get(box.kind, ("other", ""))[0] + even,
            f"{picture.rows[box.row]}: {what}{micro}, {seconds_text(box.end - box.start)} "
            f"from {seconds_text(box.start)} on",
            "" if box.number is None else str(box.number),
        )

    boxes = sorted(picture.boxes, key=lambda box: (box.kind == "gradient sum", box.start))
    arrows = [Arrow(place(s), a, place(e), b) for (a, s), (b, e) in picture.arrows]
    return Lanes(
        picture.title,
        picture.rows,
        [bar(box) for box in boxes[:MOST_BOXES]],
        arrows if len(boxes) <= MOST_BOXES else (),
        place(picture.idle_until),
        max(0, len(boxes) - MOST_BOXES),
    )


def legend(pictures: Sequence[Picture]) -> list[tuple[str, str]]:
    """Return the class and the name of each kind of box."""
    kinds = {box.kind for picture in pictures for box in picture.boxes}
    named = dict.fromkeys((css, name) for kind, (css, name) in _LEGEND.items() if kind in kinds)
    return [*named, ("idle", "idle")]


def together(pictures: Sequence[Picture]) -> tuple[list[Lanes], list[Mark]]:
    """Return several timelines on the axis of the longest, and the marks of that axis."""
    total = max((picture.total for picture in pictures), default=0.0)
    if total <= 0:
        return [], []
    marks = [
        Mark(round(t / total * 100, 3), without_zeros(seconds_text(t)))
        for t in ticks(0.0, total, 8)
        if t <= total
    ]
    return [lanes(picture, total) for picture in pictures], marks
