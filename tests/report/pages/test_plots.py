"""The pictures show what they are given: colours in the right shares, odd values left out."""

import math
import os

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from launcher.report.pages import plots
from launcher.report.pages.plots import IDLE, TASK_COLOURS, PlotProcess, plot_timeline
from launcher.schedule import SCHEDULES, Kind, Task, TimedTask, bubble_fraction, simulate


def pixels(path, colour):
    image = imread(path)[..., :3]
    return int((np.abs(image - to_rgb(colour)).max(axis=-1) < 0.01).sum())


def records(num_steps, eval_every=0):
    for step in range(1, num_steps + 1):
        record = {"step": step, "train/loss": 2 + 3 / step}
        if eval_every and step % eval_every == 0:
            record["eval/loss"] = 2.2 + 3 / step
        yield record


@pytest.mark.parametrize("num_steps", [0, 1, 30, 200])
@pytest.mark.parametrize("eval_every", [0, 10])
def test_each_curve_that_there_is_can_be_seen(tmp_path, num_steps, eval_every):
    os.mkfifo(tmp_path / "loss.png")  # nobody waits for what stands there
    path = plots.plot_loss(list(records(num_steps, eval_every)), tmp_path / "loss.png", "run")
    assert (pixels(path, plots.TRAIN) > 0) == (num_steps > 0)
    assert (pixels(path, plots.EVAL) > 0) == (eval_every > 0 and num_steps >= eval_every)


def test_a_loss_that_is_not_finite_is_left_out(tmp_path):
    broken = [{"step": 31, "train/loss": None}, {"step": 32, "train/loss": math.inf}]
    whole = plots.plot_loss(list(records(30)), tmp_path / "a.png")
    same = plots.plot_loss([*records(30), *broken], tmp_path / "b.png")
    assert (imread(whole) == imread(same)).all()


def test_smoothing_keeps_lines_and_constants():
    line = [3.0 * i for i in range(20)]
    assert plots.smoothed(line, window=9) == pytest.approx(line)
    assert plots.smoothed([1.0, 4.0, 1.0, 1.0], window=3)[1:3] == pytest.approx([2.0, 2.0])


def test_smoothing_does_not_hook_at_its_ends():
    flat = [2.0] * 200
    for outlier in (0, 199):
        values = flat.copy()
        values[outlier] = 3.0
        bent = max(abs(value - 2.0) for value in plots.smoothed(values, window=11))
        assert bent < 0.35  # and not 1, as where the last value stands alone


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

    monkeypatch.setattr(plots, "save_figure", save)
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


TIMELINE = [
    TimedTask(Task(0, 0, Kind.FORWARD), 0, 0.0, 1.0),
    TimedTask(Task(0, 0, Kind.BACKWARD), 0, 1.0, 3.0),
]


def drawn_by_a_process(path, kill=False):
    with PlotProcess() as process:
        if kill:
            process._process.kill()
            process._process.wait()
        process.draw(TIMELINE, path, "mine", 4.0)
        process.wait()
    assert process._process.poll() is not None
    return process._process.returncode


@pytest.mark.devices
@pytest.mark.parametrize("kill", [False, True])
def test_the_picture_is_the_same(tmp_path, monkeypatch, kill):
    monkeypatch.chdir(tmp_path)
    expected = plot_timeline(TIMELINE, tmp_path / "expected.png", "mine", 4.0).read_bytes()
    path = (tmp_path / "plots" / "timeline.png").relative_to(tmp_path)
    assert bool(drawn_by_a_process(path, kill)) == kill
    assert path.read_bytes() == expected


@pytest.mark.devices
def test_what_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "plots").write_text("no folder")
    with pytest.raises(OSError, match="plots"):
        drawn_by_a_process(tmp_path / "plots" / "timeline.png")


@pytest.mark.devices
def test_it_ends_with_the_process_that_asks(tmp_path):
    """As the pipe that it reads does."""
    with PlotProcess() as process:
        process._process.stdin.close()
        assert process._process.wait(timeout=60)
        process._process.stdin = None
