"""A sweep's folder says what points there are: those that are done are never run again."""

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.compose import Point, load
from launcher.config.errors import ConfigError
from launcher.submit.points import (
    DONE,
    FAILED,
    FILE,
    RUNNING,
    members,
    open_points,
    read_points,
    settings_digest,
)
from launcher.submit.sweep import _command

ONE, OTHER = ("train.steps=1",), ("train.steps=2",)


def test_what_is_done_stays_so_and_what_was_cut_off_or_failed_goes_on(tmp_path: Path) -> None:
    with open_points(tmp_path) as points:
        done, cut = (points.claim(swept, "s", "x") for swept in (ONE, OTHER))
        assert [point.run for point in (done, cut)] == ["x-0", "x-0"]  # the same settings
        cut = points.claim(("train.steps=3",), "t", "x")
        points.note(replace(done, state=DONE, value=0.5))
        failed = points.claim(("train.steps=4",), "u", "x")
        points.note(replace(failed, state=FAILED))
    with open_points(tmp_path) as points:
        again = points.claim(ONE, "s", "x")
        assert (again.number, again.state, again.value) == (0, DONE, 0.5)
        assert points.claim(cut.swept, "t", "x") == cut
        assert cut.state == RUNNING
        assert points.claim(failed.swept, "u", "x") == failed  # as one that has not run
        assert points.claim(("train.steps=5",), "v", "x").run == "x-4"


def test_a_point_asked_for_twice_runs_once(tmp_path: Path) -> None:
    with open_points(tmp_path) as points:
        first, second = (points.claim(ONE, "s", "x") for _ in range(2))
        assert (second.number, second.same_as, second.run) == (1, first.number, first.run)
        wrong = [points.claim(OTHER, "", "x") for _ in range(2)]
        assert [point.same_as for point in wrong] == [None, None]
    with open_points(tmp_path) as points:  # and both are found again
        assert [points.claim(ONE, "s", "x").number for _ in range(2)] == [0, 1]


def test_other_settings_a_second_sweep_and_damage_are_refused(tmp_path: Path) -> None:
    with open_points(tmp_path) as points:
        points.claim(ONE, "s", "x")
        running = pytest.raises(ConfigError, match="is a sweep that is running right now")
        with running, open_points(tmp_path):
            pass
    other = pytest.raises(ConfigError, match=r"^train.steps=1 has run in this sweep with other")
    with open_points(tmp_path) as points, other:
        points.claim(ONE, "other", "x")
    text = (tmp_path / FILE).read_text()
    for damaged in (
        text[:-9],
        text.replace('"x-0"', '"../x"'),
        text.replace('"number": 0', '"number": 4'),
        text.replace('"same_as": null', '"same_as": 0'),
        '{"points": 3}',
    ):
        (tmp_path / FILE).write_text(damaged)
        with pytest.raises(ConfigError, match=r"sweep\.json is damaged: "):
            read_points(tmp_path)


def test_only_what_changes_a_result_tells_settings_apart() -> None:
    plain = load(["recipe=smoke"])
    same = load(["recipe=smoke", "run.id=x", "wandb.mode=offline", "run.dir=elsewhere"])
    assert settings_digest(plain) == settings_digest(same)
    assert settings_digest(plain) != settings_digest(load(["recipe=smoke", "run.seed=1"]))


def test_the_runs_of_a_sweep_have_mirrors_of_their_own(tmp_path: Path) -> None:
    words = ("model=mlp", "dataset=synthetic", "run.id=s", "run.mirror=s3://bucket/all/")
    points = [Point(words, label, load(words)) for label in "ab"]
    runs = [config.run for config in members(points, "s", tmp_path)]
    assert [(run.id, run.mirror) for run in runs] == [
        (name, f"s3://bucket/all/{name}") for name in ("s-0", "s-1")
    ]
    assert "run.mirror=s3://bucket/all/s-1" in _command(points[1], (), tmp_path, "s-1", "s")
    assert settings_digest(load(words)) == settings_digest(load(words[:3]))
