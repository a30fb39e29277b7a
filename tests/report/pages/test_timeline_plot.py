"""The timeline's picture shows what it is given: colours in the right shares, numbers that fit."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from launcher.report.pages import plots as timeline_plot
from launcher.report.pages.plots import IDLE, TASK_COLOURS, plot_timeline
from launcher.schedule import SCHEDULES, Kind, bubble_fraction, simulate


def pixels(path, colour):
    image = imread(path)[..., :3]
    return int((np.abs(image - to_rgb(colour)).max(axis=-1) < 0.01).sum())


@pytest.mark.parametrize(("schedule", "num_stages"), [("gpipe", 2), ("1f1b", 4)])
def test_the_idle_area_of_the_timeline_is_the_bubble(tmp_path, schedule, num_stages):
    timeline = simulate(
        SCHEDULES[schedule].tasks(num_stages, 4),
        lambda task: 0.01 if task.kind is Kind.FORWARD else 0.02,
    )
    path = plot_timeline(timeline, tmp_path / "plots" / "timeline.png", "a plan")
    idle = pixels(path, IDLE)
    busy = sum(pixels(path, colour) for colour in set(TASK_COLOURS.values()))
    assert idle / (idle + busy) == pytest.approx(bubble_fraction(timeline, num_stages), abs=0.05)


def test_backward_takes_its_share_of_the_timeline(tmp_path):
    timeline = simulate(
        SCHEDULES["gpipe"].tasks(1, 3), lambda task: 1.0 if task.kind is Kind.FORWARD else 2.0
    )
    path = plot_timeline(timeline, tmp_path / "timeline.png")
    forward, backward = (pixels(path, TASK_COLOURS[k]) for k in ("forward", "backward"))
    assert backward / forward == pytest.approx(2.0, rel=0.1)


@pytest.fixture
def drawn(monkeypatch):
    """The figures, as they are before they are written."""
    figures = []

    def save(figure, path):
        figures.append(figure)
        return path

    monkeypatch.setattr(timeline_plot, "save_figure", save)
    return figures


def test_tasks_too_narrow_for_a_number_cost_the_others_none(tmp_path, drawn):
    def duration(task):
        # The first stage's inputs need no gradient.
        return 0.0 if task.kind is Kind.BACKWARD_INPUT and task.stage == 0 else 1.0

    timeline = simulate(SCHEDULES["zero_bubble"].tasks(3, 6), duration)
    plot_timeline(timeline, tmp_path / "timeline.png")
    [axes] = drawn[0].axes
    wide = [timed for timed in timeline if timed.end > timed.start]
    assert len(wide) < len(timeline)
    written = numbers_of(axes)
    assert all(len(one.get_paths()) == len(one.get_offsets()) for one in written)
    places = sorted(tuple(place) for one in written for place in one.get_offsets())
    expected = sorted(((timed.start + timed.end) / 2, timed.mesh) for timed in wide)
    assert np.array(places) == pytest.approx(np.array(expected))


def numbers_of(axes):
    return [one for one in axes.collections if one.get_label() == "numbers"]


def test_numbers_are_their_microbatches(tmp_path, drawn):
    timeline = simulate(SCHEDULES["gpipe"].tasks(1, 12), lambda task: 1.0)
    plot_timeline(timeline, tmp_path / "timeline.png")
    [axes] = drawn[0].axes
    forward, _ = numbers_of(axes)
    widths = [path.get_extents().width for path in forward.get_paths()]
    at = [start for start, _ in forward.get_offsets()]
    by_time = [width for _, width in sorted(zip(at, widths, strict=True))]
    assert max(by_time[:10]) < min(by_time[10:])  # one digit, then two
    assert by_time[1] == min(by_time)  # a one is the narrowest


def test_the_pictures_step_time_is_the_consoles(tmp_path, drawn):
    timeline = simulate(SCHEDULES["gpipe"].tasks(2, 4), lambda task: 0.01)
    plot_timeline(timeline, tmp_path / "timeline.png", "run", step_seconds=0.125)
    [axes] = drawn[0].axes
    assert axes.get_title(loc="left").startswith("run: 125 ms a step, 20.0% idle")
    assert axes.get_xlim() == (0.0, 125.0)
