"""What the driver does in which order, and what stays of a run that did not begin. Nothing is
started: the session, the trace, the plan and the training are stand-ins that note their turn."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from launcher.base import measurements
from launcher.cluster.errors import RayEndedError
from launcher.cluster.kinds import ClusterKind
from launcher.config.compose import load
from launcher.driver import run, training
from launcher.driver.planning import prepare
from launcher.plan import PlanError
from launcher.stop import Stop

PLAIN = ["model=mlp", "dataset=synthetic", "cluster=emulated", "cluster.gpus=2"]


@pytest.fixture
def driven(tmp_path, monkeypatch):
    """A function of settings and of a stand-in that raises: the exit code and what was done."""

    def driven(*words, hosts=1, **raising):
        done = []

        def stand_in(name, result=None):
            def call(*arguments, **named):
                done.append(name)
                if name in raising:
                    raise raising[name]() if callable(raising[name]) else raising[name]
                return result

            return call

        workers = [SimpleNamespace(submit=lambda method, *_: done.append(method))] * hosts

        @contextmanager
        def start(kind, pool, logs, limit):
            assert logs.is_dir()
            done.append("start")
            try:
                yield SimpleNamespace(begin=stand_in("begin", workers), pool=pool)
            finally:
                done.append("close")

        monkeypatch.setattr(ClusterKind, "start", start)
        monkeypatch.setattr(prepare, "trace", stand_in("trace"))
        monkeypatch.setattr(prepare, "plan", stand_in("plan"))
        monkeypatch.setattr(training, "train_in", stand_in("train", 0))
        config = load([*PLAIN, f"run.dir={tmp_path}", "run.id=mine", *words])
        return run.guarded(lambda: run.run(config, Stop())), " ".join(done)

    return driven


def test_ray_and_the_worker_come_up_while_the_run_is_traced_and_planned(driven, tmp_path):
    assert driven() == (0, "start trace begin build plan train close")
    assert (tmp_path / "mine").is_dir()


def test_several_workers_meet_before_they_trace(driven):
    assert driven("cluster.hosts=2", hosts=2) == (0, "start trace begin plan train close")


def test_nothing_comes_up_beside_a_plan_that_is_measured(driven):
    assert driven("parallel.cost=profile") == (0, "trace plan train")


def test_nothing_comes_up_beside_a_first_calibration(driven, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert driven() == (0, "trace plan train")
    early = 0, "start trace begin build plan train close"
    assert driven("parallel.cost=model") == early
    measurements.write(measurements.cache_file("calibration", "cpu", 2), {})
    assert driven() == early
    monkeypatch.setattr(measurements, "versions", lambda: {"jax": "another"})
    assert driven() == (0, "trace plan train")


def test_a_ray_that_does_not_come_up_is_for_the_run_to_tell(driven):
    assert driven(begin=RayEndedError("no")) == (0, "start trace begin plan train close")


def test_what_is_logged_is_printed_once_and_as_it_is(driven, tmp_path, monkeypatch, capsys):
    """Whatever a user's module does to the root logger."""
    line = f"[bold]{tmp_path}[/bold] is 100% ignored " * 9  # wider than a console

    def logged():
        logging.basicConfig(level="INFO")
        logging.getLogger("launcher.some.module").warning(line)
        return PlanError("too large")

    monkeypatch.setattr(logging.root, "handlers", [])
    assert driven(plan=logged)[0] == 2
    said = capsys.readouterr()
    assert (said.out.count(line), said.err) == (1, "launcher: too large\n")


def test_of_a_run_that_cannot_be_planned_nothing_stays(driven, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept").touch()
    assert driven(plan=PlanError("too large"))[0] == 2
    assert (tmp_path / "mine" / "kept").exists()
    code, done = driven("run.id=other", plan=PlanError("too large"))
    assert (code, done) == (2, "start trace begin build plan close")
    assert capsys.readouterr().err == "launcher: too large\n" * 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
