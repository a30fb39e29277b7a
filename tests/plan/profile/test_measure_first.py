"""Devices of which nothing is kept are measured before the first plan, once, and it is said."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from launcher.base import measurements
from launcher.plan import local_shape
from launcher.plan.profile import calibration
from launcher.plan.profile.calibration import calibrated, calibration_file

SHAPE = local_shape(4, 1, "cpu")
FOUND = {
    "product_flops": {"bfloat16": {"512": 4e9}, "float32": {"512": 2e9}},
    "memory_bandwidth": 3e9,
    "effective_parallelism": 2.0,
    "product_parallelism": 1.5,
    "dispatch_overhead": 3e-4,
    "all_reduce_seconds": {"4096": 1e-3, "4194304": 9e-3},
    "memory_bytes": None,
    "overrun": 1.0,
}

pytestmark = pytest.mark.devices


@pytest.fixture(autouse=True)
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that has a line a measurement, by a stand-in of the program that measures."""
    told, script = tmp_path / "requests", tmp_path / "measure_devices.py"
    told.touch()
    script.write_text(
        "import sys, pathlib\n"
        f"open({str(told)!r}, 'a').write(pathlib.Path(sys.argv[1]).read_text() + '\\n')\n"
        f"print({json.dumps(FOUND)!r})\n"
    )
    monkeypatch.setattr(calibration.measure_devices, "__file__", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    calibration._measured_now.cache_clear()
    return told


def times(requests: Path) -> int:
    return len(requests.read_text().splitlines())


def test_the_first_plan_measures_and_says_it_and_the_next_ones_use_it(
    requests: Path, said: list[str]
) -> None:
    found = calibration.measure_first(SHAPE)
    assert found is not None
    assert json.loads(requests.read_text()) == {"platform": "cpu", "devices": 4, "quick": True}
    [line] = said
    assert line.startswith("measured the rates of 4 emulated CPU devices in ")
    assert f" s, kept for later plans: {calibration_file(SHAPE)} (parallel.cost=model " in line
    assert calibrated(SHAPE) == found.applied(SHAPE) != SHAPE
    assert calibration.measure_first(SHAPE) is None
    assert (times(requests), len(said)) == (1, 1)
    other = local_shape(2, 1, "cpu")
    assert calibration.measure_first(other) is not None
    assert times(requests) == 2


def test_what_is_of_other_versions_is_measured_again(requests: Path, said: list[str]) -> None:
    path = calibration_file(SHAPE)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"versions": {"jax": "0.1"}, **FOUND}))
    assert calibration.measure_first(SHAPE) is not None
    assert times(requests) == 1
    assert said[0] == f"{path} is of other versions (jax 0.1): ignored, measured again"
    assert calibrated(SHAPE).flops == 4e9


def test_of_two_at_once_one_measures_and_the_other_waits_for_it(requests: Path) -> None:
    path, results = calibration_file(SHAPE), []
    path.parent.mkdir(parents=True)
    with FileLock(path.with_suffix(".lock")):  # the other process
        waiting = threading.Thread(target=lambda: results.append(calibration.measure_first(SHAPE)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        measurements.write(path, FOUND)
    waiting.join()
    assert results == [None]
    assert times(requests) == 0


def test_what_cannot_be_kept_serves_this_process(
    requests: Path, tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "home").touch()  # which is no folder
    found = calibration.measure_first(SHAPE)
    assert found is not None
    assert "the measurement is not kept" in said[-2]
    assert "for this plan alone" in said[-1]
    assert calibrated(SHAPE, found).flops == 4e9
    assert calibration.measure_first(SHAPE) == found
    assert times(requests) == 1


def test_devices_that_cannot_be_measured_are_planned_for_by_nominal_rates(
    tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "measure_devices.py").write_text("raise SystemExit('no device answers')")
    assert calibration.measure_first(SHAPE) is None
    assert said == [
        "the devices cannot be measured: no device answers; predictions rest on nominal rates"
    ]
    assert calibrated(SHAPE) == SHAPE
