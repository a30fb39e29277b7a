"""Which plans rest on measured rates, and which trainings measure them first."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from launcher.base import measurements
from launcher.cluster.kinds import pool_shape
from launcher.config.compose import load
from launcher.driver.planning import check, prepare
from launcher.driver.planning.check import find_pool, measures_first
from launcher.driver.planning.prepare import shape_of
from launcher.plan.profile.calibration import Calibration
from launcher.report.console import make_console

FOUND = Calibration(
    product_flops={"bfloat16": {"512": 4e9}, "float32": {"512": 2e9}},
    memory_bandwidth=3e9,
    effective_parallelism=2.0,
    product_parallelism=1.5,
    dispatch_overhead=3e-4,
    collectives=(),
    memory_bytes=None,
)
HERE = "recipe=mlp_synthetic", "cluster=emulated", "cluster.gpus=2"


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The shapes that were measured, by a stand-in; nothing is kept."""
    found: list[object] = []

    def stand_in(shape: object) -> Calibration:
        found.append(shape)
        return FOUND

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prepare, "measure_first", stand_in)
    return found


def keep() -> None:
    measurements.write(measurements.cache_file("calibration", "cpu", 2), vars(FOUND))


def shape(*words: str, measures: bool = True):
    config = load([*HERE, *words])
    pool = find_pool(config, plan_only=True)
    return shape_of(config, pool, make_console() if measures else None)


@pytest.mark.parametrize("method", ["auto", "data", "manual", "shard"])
def test_a_training_measures_where_nothing_is_kept(method: str, measured: list[object]) -> None:
    assert shape(f"parallel={method}").flops == 4e9
    assert len(measured) == 1
    keep()
    assert shape(f"parallel={method}").flops == 4e9
    assert len(measured) == 1


def test_the_model_alone_forgets_what_was_measured(measured: list[object]) -> None:
    keep()
    config = load([*HERE, "parallel.cost=model"])
    pool = find_pool(config, plan_only=True)
    assert pool is not None
    assert shape("parallel.cost=model") == pool_shape(pool)
    assert measured == []


def test_profiled_layers_stand_beside_measured_rates(measured: list[object]) -> None:
    assert shape("parallel.cost=profile").flops == 4e9
    assert len(measured) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("cluster=h100_8",),
        ("cluster=slurm",),
        ("cluster=ray", "cluster.address=127.0.0.1:1"),
        ("parallel=replay", "parallel.plan=plan.json"),
        ("parallel.cost=model",),
    ],
)
def test_what_is_not_here_or_not_predicted_is_not_measured(words: tuple[str, ...]) -> None:
    assert not measures_first(load(["recipe=mlp_synthetic", "cluster=emulated", *words]))


def test_a_plan_alone_measures_nothing_and_says_what_would(
    measured: list[object], said: list[str]
) -> None:
    nominal = shape(measures=False)
    assert nominal.flops != 4e9
    line = "predictions rest on nominal rates: the first training here, or python -m launcher "
    assert said[-1].startswith(line)
    keep()
    said.clear()
    assert shape(measures=False).flops == 4e9
    assert not any(line in each for each in said)
    assert measured == []


def test_only_trainings_measure(measured: list[object]) -> None:
    prepare.prepare(load([*HERE, "parallel=data"]), make_console())
    assert measured == []


def test_predictions_allow_for_threads_of_other_processes(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    keep()
    config = load([*HERE, "parallel=data"])
    cores = len(psutil.Process().cpu_affinity() or [0])
    seconds = []
    for others in (0.0, 0.05, 1.0):
        monkeypatch.setattr(check, "threads_at_work", lambda of=others: of)
        traced = prepare.trace(config, make_console(), check.look(config, 0), measures=True)
        seconds.append(prepare.plan(config, make_console(), traced).plan.predicted_step_seconds)
    assert seconds[1] == seconds[0]
    assert seconds[2] == pytest.approx((1 + 1 / cores) * seconds[0])
    line = "other processes have 1.0 threads at work, and predictions allow for it"
    assert [one for one in said if "other processes" in one] == [line]
    assert check.look(config, 0, plan_only=True).others == 0.0
    for words in (("parallel.cost=model",), ("cluster=h100_8",)):
        assert check.look(load([*HERE, *words]), 0, plan_only=True).others == 0.0
