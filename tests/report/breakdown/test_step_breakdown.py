"""The accounting of a step as a file: it is read as it was written, and is JSON for anybody."""

import json

import pytest

from launcher.base.files import DamagedError
from launcher.report.breakdown import (
    FILE,
    PARTS,
    Goodput,
    LinkWait,
    Memory,
    StageBreakdown,
    StageParts,
    StepBreakdown,
    StepPart,
    read_breakdown,
)

WHOLE = StepBreakdown(
    predicted_step_seconds=1.0,
    step=3,
    measured_step_seconds=2.0,
    samples_per_second=16.0,
    memory=Memory(now=10, peak=20),
    parts=tuple(StepPart(name, 0.125, 0.25) for name in PARTS),
    stages=(StageBreakdown(StageParts(0, 0.5, 0.25, 0.125, 0.125), StageParts(0, 2.0)),),
    links=(LinkWait((0, 2), (1,), 0.0, 0.25),),
    goodput=Goodput(training_seconds=90.0, starting_seconds=10.0),
)


def test_it_is_read_as_it_was_written(tmp_path):
    assert read_breakdown(tmp_path) is None
    WHOLE.save(tmp_path)
    assert read_breakdown(tmp_path) == WHOLE
    tree = json.loads((tmp_path / FILE).read_text())
    assert tree["goodput"]["goodput"] == 0.9
    assert tree["goodput"]["wall_seconds"] == 100.0
    assert [part["name"] for part in tree["parts"]] == list(PARTS)
    assert tree["parts"][0] == {
        "name": "compute",
        "predicted_seconds": 0.125,
        "measured_seconds": 0.25,
    }


def test_the_row_of_a_stage_adds_up():
    assert WHOLE.stages[0].predicted.step_seconds == 1.0
    assert WHOLE.part("bubble") == StepPart("bubble", 0.125, 0.25)
    assert StepBreakdown(1.0).part("bubble") == StepPart("bubble", 0.0, 0.0)


def test_what_is_no_number_is_null(tmp_path):
    StepBreakdown(1.0, measured_step_seconds=float("nan")).save(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["measured_step_seconds"] is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"goodput": {}, "parts": 3}'])
def test_a_file_that_is_damaged_is_none(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert read_breakdown(tmp_path) is None


def test_a_part_that_is_missing_is_named():
    with pytest.raises(DamagedError, match="predicted_step_seconds is missing"):
        StepBreakdown.from_dict({"goodput": {}})
