"""The predicted and the measured timeline of a step as lanes on one axis. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.report.pages.charts import Mark, ticks, without_zeros
from launcher.report.pages.timeline_plot import Box, Picture
from launcher.report.text import seconds_text

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
