"""What is kept of recorded steps, by the parts that workers hand in."""

import json

import pytest

from launcher.base.spans import Clock, Span
from launcher.driver.record.step_log import Timelines
from launcher.report.pages.timeline import FILE
from launcher.train.step_result import Recording, RecordingReader

SPAN = Span("device 0", "it", 1_000, 2_000, "update", {})


@pytest.fixture
def timelines(tmp_path):
    made = Timelines(tmp_path, [3])
    made.begin([Clock(), Clock()])
    return made


def read(process):
    """What a process hands in, by the number that its worker gives."""
    recordings = RecordingReader()
    recordings.add(3, process, lambda: [SPAN])
    recordings.wait()
    recordings.close()
    return recordings.take()


def test_a_step_is_written_once_each_process_has_handed_its_own_in(timelines, tmp_path, said):
    timelines.add(read(1))
    assert not (tmp_path / FILE).exists()
    timelines.add(read(0))
    events = json.loads((tmp_path / FILE).read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert sorted(names) == ["driver", "worker 0", "worker 1"]
    timelines.on_end(3, "done")
    assert said == []


def test_a_part_that_never_came_is_told(timelines, said):
    timelines.add([Recording(3, 0, (SPAN,))])
    timelines.on_end(3, "done")
    assert said == ["no timeline of step 3: what worker 1 recorded has not come"]
