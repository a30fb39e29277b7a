"""A timeline drawn by a process of its own: the same picture, whatever becomes of the process."""

import pytest

from launcher.report.pages.plots import PlotProcess, plot_timeline
from launcher.schedule import Kind, Task, TimedTask

pytestmark = pytest.mark.devices

TIMELINE = [
    TimedTask(Task(0, 0, Kind.FORWARD), 0, 0.0, 1.0),
    TimedTask(Task(0, 0, Kind.BACKWARD), 0, 1.0, 3.0),
]


def drawn_by_a_process(path, kill=False):
    with PlotProcess() as plots:
        if kill:
            plots._process.kill()
            plots._process.wait()
        plots.draw(TIMELINE, path, "mine", 4.0)
        plots.wait()
    assert plots._process.poll() is not None
    return plots._process.returncode


@pytest.mark.parametrize("kill", [False, True])
def test_the_picture_is_the_same(tmp_path, monkeypatch, kill):
    monkeypatch.chdir(tmp_path)
    expected = plot_timeline(TIMELINE, tmp_path / "expected.png", "mine", 4.0).read_bytes()
    path = (tmp_path / "plots" / "timeline.png").relative_to(tmp_path)
    assert bool(drawn_by_a_process(path, kill)) == kill
    assert path.read_bytes() == expected


def test_what_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "plots").write_text("no folder")
    with pytest.raises(OSError, match="plots"):
        drawn_by_a_process(tmp_path / "plots" / "timeline.png")


def test_it_ends_with_the_process_that_asks(tmp_path):
    """As the pipe that it reads does."""
    with PlotProcess() as plots:
        plots._process.stdin.close()
        assert plots._process.wait(timeout=60)
        plots._process.stdin = None
