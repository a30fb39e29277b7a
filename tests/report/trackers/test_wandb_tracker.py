"""wandb records what it is given, below the run folder, and never stops a run."""

import socket

import psutil
import pytest

from launcher.config.sections import Wandb
from launcher.report.pages.plots import plot_loss
from launcher.report.trackers import wandb_tracker
from launcher.report.trackers.tracker import QueuedTracker, TrackedRun
from launcher.report.trackers.wandb_tracker import open_wandb

pytestmark = pytest.mark.devices
CONFIG = {"model": {"hidden_size": 98765}}
SOME_KEY = "a" * 40


@pytest.fixture(autouse=True)
def nobody_logged_in(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run-1").mkdir()
    return tmp_path / "run-1"


def open_it(run_dir, **settings):
    config = {**CONFIG, "wandb": vars(Wandb(**settings))}
    run = TrackedRun("run-1", run_dir, config)
    tracker = open_wandb(run)
    return tracker and QueuedTracker("wandb", tracker)


def recorded(run_dir):
    """Everything in the offline runs' files."""
    return b"".join(path.read_bytes() for path in run_dir.glob("wandb/offline-run-*/*.wandb"))


def wandb_processes():
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "wandb" in child.name()]


def test_an_offline_run_holds_settings_steps_and_summary_and_leaves_no_process(
    run_dir, tmp_path, capfd, said
):
    tracker = open_it(run_dir, tags=["fast"], group="sweep-7", project="rocket")
    for step in (1, 2):
        tracker.log(step, {"train/loss": float("nan"), "perf/mfu": None})
    tracker.finish({"final_loss": 2.25, "exit_reason": "done", "mfu": None})
    tracker.finish({})
    data = recorded(run_dir)
    for word in (b"98765", b"train/loss", b"final_loss", b"rocket", b"sweep-7", b"fast", b"run-1"):
        assert word in data
    assert b"perf/mfu" not in data
    assert said == []
    assert tracker.summary_fields() == {
        "wandb_sync_command": f"wandb sync {run_dir}/wandb/offline-run-*"
    }
    assert wandb_processes() == []
    assert list((tmp_path / "cwd").iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_tables_and_pictures_are_recorded(run_dir, said):
    tracker = open_it(run_dir)
    tracker.table("plan/stages", ["stage", "data"], [[0, 4], [1, None]])
    tracker.log(1, {})
    path = plot_loss([{"step": 1, "train/loss": 2.0}], run_dir / "plots" / "loss.png")
    tracker.image("plots/loss", path)
    tracker.finish({})
    assert said == []
    assert b"plan/stages" in recorded(run_dir)
    assert b"plots/loss" in recorded(run_dir)
    media = run_dir / "wandb"
    assert len(list(media.glob("offline-run-*/files/media/table/plan/*.json"))) == 1
    assert len(list(media.glob("offline-run-*/files/media/images/plots/*.png"))) == 1


def test_online_without_a_login_is_offline_and_says_so(run_dir, said):
    tracker = open_it(run_dir, mode="online")
    tracker.finish({})
    assert tracker.summary_fields()["wandb_sync_command"]
    assert said == ["wandb: nobody is logged in, recording offline (to log in: wandb login)"]


def test_a_key_that_is_none_is_said_and_recording_goes_on_offline(run_dir, monkeypatch, said):
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    tracker = open_it(run_dir)
    tracker.finish({})
    [warning] = said
    assert "WANDB_API_KEY invalid" in warning
    assert warning.endswith("recording offline")
    assert tracker.summary_fields()["wandb_sync_command"]


def test_a_server_that_does_not_answer_is_said_and_recording_goes_on_offline(
    run_dir, monkeypatch, said
):
    monkeypatch.setattr(wandb_tracker, "ONLINE_TIMEOUT", 1)
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        port = nobody_listens.getsockname()[1]
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("WANDB_API_KEY", SOME_KEY)
        tracker = open_it(run_dir)
        tracker.log(1, {"train/loss": 2.0})
        tracker.finish({})
    [warning] = said
    assert warning.startswith("wandb: cannot go online (")
    assert warning.endswith("); recording offline")
    assert b"train/loss" in recorded(run_dir)
    assert wandb_processes() == []


def test_a_late_failure_is_said_once_and_stops_nothing(run_dir, said):
    tracker = open_it(run_dir)
    tracker.log(1, {})
    for process in wandb_processes():
        process.kill()
        process.wait()
    for step in range(2, 6):
        tracker.log(step, {"train/loss": 2.0})
    tracker.finish({"final_loss": 2.0})
    [warning] = said
    assert warning.startswith("wandb: ")
    assert warning.endswith("; the run is no longer recorded there")
    assert wandb_processes() == []


@pytest.mark.parametrize(
    ("mode", "warned"),
    [
        ("disabled", []),
        ("of", ["WANDB_MODE=of is none of online, offline, disabled: wandb is left out"]),
    ],
)
def test_the_environment_decides_where_the_settings_do_not(
    run_dir, monkeypatch, mode, warned, said
):
    monkeypatch.setenv("WANDB_MODE", mode)
    assert open_it(run_dir) is None
    assert said == warned
    assert list(run_dir.iterdir()) == []


def test_the_settings_beat_the_environment(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = open_it(run_dir, mode="offline")
    tracker.finish({})
    assert recorded(run_dir)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert open_it(run_dir, mode="disabled") is None
