"""Measured rates of devices replace nominal ones where they can be used."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from launcher.base import measurements
from launcher.plan import PlanError, local_shape
from launcher.plan.cost.formulas import launch_seconds, ring_seconds
from launcher.plan.profile import calibration
from launcher.plan.profile.calibration import (
    Calibration,
    HostLinks,
    TimedCollective,
    attention_seconds,
    block_seconds,
    calibrated,
    calibration_file,
    element_seconds,
    keep_host_rates,
    measure,
)
from launcher.plan.profile.measure_devices import (
    COLLECTIVES,
    Meter,
    effective_parallelism,
    is_undisturbed,
    line,
    of_gpus,
)

VERSIONS = measurements.versions()
FOUND = Calibration(
    product_flops={"bfloat16": {"128": 1e9, "1024": 4e9}, "float32": {"128": 1e9, "1024": 2e9}},
    memory_bandwidth=3e9,
    effective_parallelism=2.0,
    product_parallelism=1.5,
    dispatch_overhead=3e-4,
    collectives=(
        TimedCollective("all-reduce", 4, 1, 4096, 1e-3),
        TimedCollective("all-reduce", 4, 1, 4194304, 9e-3),
    ),
    memory_bytes=None,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "launcher" / "calibration"


def kept(folder: Path, devices: int) -> Path:
    """Where a calibration of this machine's CPU devices is kept."""
    path = measurements.cache_file("calibration", "cpu", devices)
    assert path.parent == folder
    return path


def test_the_figures_stand_in_the_shape() -> None:
    shape = FOUND.applied(local_shape(4, 1, "cpu"))
    assert (shape.flops, shape.flops_fp32, shape.memory_bandwidth) == (4e9, 2e9, 3e9)
    assert (shape.effective_parallelism, shape.product_parallelism) == (2.0, 1.5)
    assert shape.dispatch_overhead == 3e-4


def test_the_link_gives_back_the_all_reduces_it_was_measured_by() -> None:
    shape = FOUND.applied(local_shape(4, 1, "cpu"))
    for one in FOUND.collectives:
        again = ring_seconds(one.kind, one.size, 4, shape.intra_host, shape)
        assert math.isclose(again, one.seconds, rel_tol=0.01)


def test_rings_of_every_kind_and_size_give_back_their_rates() -> None:
    nominal = local_shape(8, 1, "NVIDIA H100 80GB HBM3")
    true = dataclasses.replace(nominal, intra_host=2e11, latency=7e-6, gather_rate=0.8)
    ways = itertools.product(COLLECTIVES, (2, 8), (1 << 16, 1 << 28))
    timed = tuple(
        TimedCollective(kind, n, 1, size, ring_seconds(kind, size, n, true.intra_host, true))
        for kind, n, size in ways
    )
    shape = dataclasses.replace(FOUND, collectives=timed).applied(nominal)
    found = shape.intra_host, shape.latency, shape.gather_rate
    assert found == pytest.approx((2e11, 7e-6, 0.8))


def test_rings_that_share_a_hosts_link_tell_its_rate() -> None:
    nominal = local_shape(16, 2, "NVIDIA H100 80GB HBM3")
    true = dataclasses.replace(nominal, inter_host=4e10)
    timed = [
        ("all-reduce", 16 // rings, rings, size, seconds)
        for rings in (1, 8)
        for size in (1 << 16, 1 << 28)
        for seconds in [ring_seconds("all-reduce", size, 16 // rings, 4e10 / rings, true)]
    ]
    shape = HostLinks.from_cache({"collectives": timed}).applied(nominal)
    assert shape.inter_host == pytest.approx(4e10)
    assert (shape.intra_host, shape.latency) == (nominal.intra_host, nominal.latency)


@pytest.mark.parametrize("devices", [2, 4])
def test_sums_over_hosts_give_their_link_which_the_next_plans_have(
    devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    nominal = local_shape(devices, 2, "cpu")
    sums = [("all-reduce", devices, 1, 4096, 1e-3), ("all-reduce", devices, 1, 1 << 24, 40e-3)]
    measured = HostLinks.from_cache({"collectives": sums})
    path = keep_host_rates(nominal, measured)
    assert path is not None
    shape = calibrated(nominal)
    short, long = (
        ring_seconds("all-reduce", size, devices, shape.inter_host, shape)
        for size in (4096, 1 << 24)
    )
    assert math.isclose(long, 40e-3, rel_tol=0.02)
    assert math.isclose(short, 1e-3, rel_tol=0.02) == (devices == 2)  # whose only latency it is
    assert shape.intra_host == nominal.intra_host
    assert (shape.latency == nominal.latency) == (devices == 4)  # that inside a host
    assert calibrated(local_shape(devices, 1, "cpu")) == local_shape(devices, 1, "cpu")
    assert caplog.messages == []
    for damaged in ("fast", sums[:1], [(*sums[0][:4], "fast"), sums[1]]):
        path.write_text(json.dumps({"versions": VERSIONS, "collectives": damaged}))
        assert calibrated(nominal) == nominal


def test_links_that_noise_hides_stay_nominal() -> None:
    nominal = local_shape(2, 2, "cpu")
    sums = [("all-reduce", 2, 1, 4096, 2e-3), ("all-reduce", 2, 1, 1 << 24, 1e-3)]
    assert HostLinks.from_cache({"collectives": sums}).applied(nominal) == nominal


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged: ignored"),
        (json.dumps({"versions": {"jax": "0.1"}}), "is of other versions (jax 0.1): ignored"),
        (
            json.dumps({"versions": {k: v for k, v in VERSIONS.items() if k != "format"}}),
            "is of other versions (an earlier format): ignored",
        ),
        (
            json.dumps({"versions": VERSIONS, **vars(FOUND), "product_flops": 7}),
            "damaged",
        ),
        *(
            (
                json.dumps({"versions": VERSIONS, **vars(FOUND), **change}),
                "is damaged",
            )
            for change in (
                *({"memory_bandwidth": bad} for bad in (None, "x", -1.0, 0, math.nan, math.inf)),
                {"product_flops": {"bfloat16": {"128": None}, "float32": {"128": 1e9}}},
                {"product_flops": {"bfloat16": {}, "float32": {"128": 1e9}}},
                {"collectives": [["all-reduce", 4, 1, 4096, -1.0]]},
                {"collectives": [["all-reduce", 4, 1, 4096, 1e-3]]},
                {"collectives": 7},
                {"attention_flops": 0},
                {"launch_seconds": None},
                {"effective_parallelism": "x"},
                {"product_parallelism": 0.5},
                {"dispatch_overhead": None},
                {"memory_bytes": -1},
                {"overrun": 0},
            )
        ),
    ],
)
def test_what_cannot_be_used_is_ignored_and_said(
    folder: Path, text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    kept(folder, 4).write_text(text)
    assert calibrated(local_shape(4, 1, "cpu")) == local_shape(4, 1, "cpu")
    [line] = caplog.messages
    assert words in line


def test_other_devices_have_a_calibration_of_their_own(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert calibrated(local_shape(4, 1, "cpu")) == local_shape(4, 1, "cpu")
    measurements.write(kept(folder, 4), vars(FOUND))
    assert calibrated(local_shape(4, 1, "cpu")).flops == 4e9
    assert calibrated(local_shape(2, 1, "cpu")) == local_shape(2, 1, "cpu")
    assert caplog.messages == []


def test_the_calibration_of_another_machine_is_not_taken_for_this_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where machines share a home: each keeps its own, and says what it ignores."""
    nominal = local_shape(4, 1, "cpu")
    with monkeypatch.context() as other:
        other.setattr(measurements, "processor", lambda: "Zeta 9000, 96 cores")
        measurements.write(kept(folder, 4), vars(FOUND))
        assert calibrated(nominal).flops == 4e9
    assert caplog.messages == []
    assert calibrated(nominal) == nominal
    assert caplog.messages == [
        f"{folder}: what was measured on another machine (Zeta_9000_96_cores) is ignored"
    ]
    measurements.write(kept(folder, 4), {**vars(FOUND), "memory_bandwidth": 1e9})
    assert calibrated(nominal).memory_bandwidth == 1e9
    assert len(list(folder.iterdir())) == 2


@pytest.mark.devices
def test_devices_that_cannot_be_measured_are_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "measure_devices.py"
    script.write_text("raise SystemExit('no device answers')")
    monkeypatch.setattr(calibration.measure_devices, "__file__", str(script))
    with pytest.raises(PlanError, match="the devices cannot be measured: no device answers"):
        measure(local_shape(1, 1, "cpu"))


@pytest.mark.devices
@pytest.mark.parametrize(
    "quick",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.stress)],
)
def test_this_machine_is_measured_and_remembered(folder: Path, quick: bool) -> None:
    shape = local_shape(2, 1, "cpu")
    found, path = measure(shape, quick)
    assert [*found.product_flops["float32"]] == (["512"] if quick else ["128", "256", "512"])
    rate = found.product_flops["float32"]["512"]
    assert found.applied(shape).flops_fp32 == rate / found.overrun
    assert 1 < found.overrun < 10  # a block is no large product
    assert path == kept(folder, 2)
    assert calibrated(shape) == found.applied(shape)
    alone, in_products = found.effective_parallelism, found.product_parallelism
    assert (alone is None) == (in_products is None)
    assert alone is None or 1 <= in_products <= alone <= 2


@pytest.mark.devices
def test_a_block_is_predicted_to_take_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates are those of models: large products and copies alone are faster than any."""
    told = {name: value for name, value in vars(FOUND).items() if name != "overrun"}
    script = tmp_path / "measure_devices.py"
    script.write_text(f"print({json.dumps(json.dumps(told | {'block_seconds': 0.25}))})")
    monkeypatch.setattr(calibration.measure_devices, "__file__", str(script))
    nominal = local_shape(4, 1, "cpu")
    found, _ = measure(nominal)
    by_rates = block_seconds(FOUND.applied(nominal))
    assert found.overrun == pytest.approx(0.25 / by_rates)
    assert block_seconds(calibrated(nominal)) == pytest.approx(0.25)
    # 4 rows of 128 tokens: the products of both passes alone, at 2 GFLOP/s.
    weights = 128 * (384 + 128) + 2 * 128 * 512
    products = 3 * 2 * (512 * weights + 2 * 4 * 128 * 128 * 128)
    assert products / 2e9 < by_rates < 1.1 * products / 2e9


@pytest.mark.devices
def test_a_gpus_programs_are_predicted_to_take_what_they_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rate of each, in place of the datasheet's share."""
    told = {name: value for name, value in vars(FOUND).items() if name != "overrun"} | {
        "product_flops": {"bfloat16": {"8192": 600e12}, "float32": {"8192": 300e12}},
        "effective_parallelism": None,
        "product_parallelism": None,
        "element_seconds": 4e-3,
        "attention_seconds": 2e-3,
        "layer_seconds": 80e-6,
        "dispatch_overhead": 30e-6,
    }
    script = tmp_path / "measure_devices.py"
    script.write_text(f"print({json.dumps(json.dumps(told))})")
    monkeypatch.setattr(calibration.measure_devices, "__file__", str(script))
    nominal = local_shape(4, 1, "NVIDIA H100 80GB HBM3")
    assert nominal.rates(measured=True) == []
    measure(nominal)
    shape = calibrated(nominal)
    assert element_seconds(shape) == pytest.approx(4e-3)
    assert attention_seconds(shape) == pytest.approx(2e-3)
    assert sum(launch_seconds(2, 0, shape)) == pytest.approx(80e-6)
    product = shape.product_seconds(2 * 8192.0**3, 0.0, results=8192**2)
    assert product == pytest.approx(2 * 8192**3 / 600e12)
    assert shape.dispatch_overhead == 30e-6
    assert "gathers beside sums" in shape.rates(measured=False)
    assert {"fused attention", "launches", "links in a host"} <= {*shape.rates(measured=True)}


@pytest.mark.devices
def test_what_is_measured_of_gpus_runs_on_any_devices() -> None:
    meter = Meter(2, longest=0.1, fewest=1, most=1, together=2)
    found = of_gpus(meter, (2, 16, 32), (2, 16, 2, 8), "xla")
    seconds = {name: value for name, value in found.items() if name.endswith("_seconds")}
    assert [*seconds] == ["element_seconds", "attention_seconds", "layer_seconds"]
    assert 0 < seconds["element_seconds"] < 10
    assert 0 < seconds["attention_seconds"] < 10
    assert meter.attention_seconds((2, 16, 2, 8), "cudnn") is None  # of which CPUs have none


@pytest.mark.devices
def test_collectives_are_timed_in_pairs_and_of_all() -> None:
    found = Meter(4, longest=0.1, fewest=2, most=2).collectives((1 << 12, 1 << 16), quick=False)
    ways = [*itertools.product(COLLECTIVES, (2, 4), (1,), (1 << 12, 1 << 16))]
    assert [one[:4] for one in found] == [(kind, n, one, size) for kind, n, one, size in ways]
    assert all(0 < one[-1] < 10 for one in found)
    assert Meter(1).collectives((1 << 12,), quick=True) == []


def test_cores_in_use_say_how_much_devices_slow_one_another() -> None:
    """A device that uses one of two cores alone runs at twice the speed of four at work."""
    every = [(2.0, 4.0), (4.0, 4.0)]  # seconds, processor seconds: the second was disturbed
    assert effective_parallelism(4, 2, [(0.5, 1.0), (3.0, 1.0)], every) == 1.0
    assert effective_parallelism(4, 2, [(1.0, 1.0), (3.0, 1.0)], every) == 2.0
    assert effective_parallelism(4, 2, [(0.8, 1.0), (3.0, 1.0)], every) == pytest.approx(1.6)
    assert effective_parallelism(2, 8, [(1.0, 2.0)], [(1.0, 4.0)]) == 2.0  # cores for all


def test_what_other_work_hides_is_nominal() -> None:
    never_alone = [(4.0, 4.0), (8.0, 4.0)]  # half of two cores at best
    assert not is_undisturbed(4, 2, never_alone)
    assert is_undisturbed(4, 2, [*never_alone, (2.0, 4.0)])
    assert is_undisturbed(1, 2, never_alone)  # one device leaves a core idle by itself
    assert is_undisturbed(4, 0, never_alone)  # GPUs
    hidden = dataclasses.replace(
        FOUND,
        effective_parallelism=None,
        product_parallelism=None,
        dispatch_overhead=0.0,
        collectives=(),
    )
    nominal = local_shape(4, 1, "cpu")
    shape = hidden.applied(nominal)
    assert shape.effective_parallelism == nominal.effective_parallelism
    assert shape.product_parallelism is None
    assert shape.dispatch_overhead == nominal.dispatch_overhead > 0
    assert (shape.latency, shape.intra_host) == (nominal.latency, nominal.intra_host)
    assert shape.flops_fp32 == FOUND.applied(nominal).flops_fp32


def test_a_start_is_told_from_one_row() -> None:
    """However much longer than its work the long program took, since other work disturbed it."""
    for disturbed in (1.0, 10.0):
        _, found = line({1: 2.04e-3, 512: disturbed * 22.4e-3})
        assert found == pytest.approx(2e-3, rel=0.25)


SHAPE = local_shape(4, 1, "cpu")


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that has a line a measurement, by a stand-in of the program that measures."""
    told, script = tmp_path / "requests", tmp_path / "measure_devices.py"
    told.touch()
    script.write_text(
        "import sys, pathlib\n"
        f"open({str(told)!r}, 'a').write(pathlib.Path(sys.argv[1]).read_text() + '\\n')\n"
        f"print({json.dumps(vars(FOUND))!r})\n"
    )
    monkeypatch.setattr(calibration.measure_devices, "__file__", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    calibration._measured_now.cache_clear()
    return told


def times(requests: Path) -> int:
    return len(requests.read_text().splitlines())


@pytest.mark.devices
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


@pytest.mark.devices
def test_other_processes_that_hid_rates_are_told(requests: Path, said: list[str]) -> None:
    hidden = dataclasses.replace(FOUND, effective_parallelism=None)
    requests.with_name("measure_devices.py").write_text(f"print({json.dumps(vars(hidden))!r})\n")
    assert calibration.measure_first(SHAPE) == hidden
    [line] = said
    told = "; other processes were at work, and hid some rates: python -m launcher task=calibrate"
    assert f"{calibration_file(SHAPE)}{told} measures again (" in line


@pytest.mark.devices
def test_what_is_of_other_versions_is_measured_again(requests: Path, said: list[str]) -> None:
    path = calibration_file(SHAPE)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"versions": {"jax": "0.1"}, **vars(FOUND)}))
    assert calibration.measure_first(SHAPE) is not None
    assert times(requests) == 1
    assert said[0] == f"{path} is of other versions (jax 0.1): ignored, measured again"
    assert calibrated(SHAPE).flops == 4e9


@pytest.mark.devices
def test_of_two_at_once_one_measures_and_the_other_waits_for_it(requests: Path) -> None:
    path, results = calibration_file(SHAPE), []
    path.parent.mkdir(parents=True)
    with FileLock(path.with_suffix(".lock")):  # the other process
        waiting = threading.Thread(target=lambda: results.append(calibration.measure_first(SHAPE)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        measurements.write(path, vars(FOUND))
    waiting.join()
    assert results == [None]
    assert times(requests) == 0


@pytest.mark.devices
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


@pytest.mark.devices
def test_devices_that_cannot_be_measured_are_planned_for_by_nominal_rates(
    requests: Path, tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "measure_devices.py").write_text("raise SystemExit('no device answers')")
    assert calibration.measure_first(SHAPE) is None
    assert said == [
        "the devices cannot be measured: no device answers; predictions rest on nominal rates"
    ]
    assert calibrated(SHAPE) == SHAPE
