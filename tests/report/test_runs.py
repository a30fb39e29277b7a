"""`launcher runs`: what folders tell, whole or damaged, and what is done to them."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import launcher
from launcher.cli.outcome import run as command
from launcher.cli.runs_command import _line, main
from launcher.config.errors import ConfigError
from launcher.driver.folder.status import Status
from launcher.report.console import Phase
from launcher.report.run_record import ended_well, read_run
from launcher.stop import Stop


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(name, root="outputs", age=0.0, **more):
    """A run's folder as a launcher leaves it that has ended; `more` changes the summary."""
    folder = Path(root, name)
    folder.mkdir(parents=True)
    summary = {"run_id": name, "exit_reason": "done", "steps": 9, "final_loss": 2.5} | more
    at = time.time() - age
    status = {"phase": summary["exit_reason"], "steps": 9, "plan": "1 stage", "updated_at": at}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.yaml").write_text(f"train: {{steps: {len(name)}}}\n")
    return folder


def told(folder, **fields):
    """Changes what a run's status says."""
    path = folder / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def lines(capsys, *words):
    assert main(words) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_runs_are_listed_newest_first_with_those_of_sweeps(here, capsys):
    make("old", age=7300)
    make("new", age=100, eval_loss=2.25)
    make("s-0", root="multirun/s", age=200, final_loss=None)
    (here / "outputs" / "no run").mkdir()
    head, *rows = lines(capsys)
    assert head == ["run", "state", "step", "loss", "eval", "step", "time", "age", "plan"]
    assert rows == [
        ["new", "done", "9/9", "2.5000", "2.2500", "-", "1", "min", "1", "stage"],
        ["s-0", "done", "9/9", "-", "-", "-", "3", "min", "1", "stage"],
        ["old", "done", "9/9", "2.5000", "-", "-", "2", "h", "1", "stage"],
    ]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"phase": 3}', "\0" * 9, "{" * 5000, "x" * 2**21], ids=range(7)
)
def test_a_damaged_folder_costs_a_line_and_not_the_table(content, here, capsys):
    make("good")
    (make("bad") / "status.json").write_text(content)
    (Path("outputs/bad") / "summary.json").write_text(content)
    rows = lines(capsys)
    assert [row[0] for row in rows if row[:1] == ["good"]] == ["good"]
    assert any(row[0] == "bad" and row[1] == "unknown" for row in rows)
    named = [row for row in rows if row[:2] == ["bad:", "damaged:"]]
    assert len(named) == (0 if "phase" in content else 1)


def test_neither_a_fifo_nor_a_link_can_block_or_lead_elsewhere(here, capsys):
    folder = make("pipe")
    (folder / "status.json").unlink()
    os.mkfifo(folder / "status.json")
    elsewhere = make("elsewhere", root="far/away")
    Path("outputs/link").symlink_to(elsewhere)
    rows = lines(capsys)
    assert [row[0] for row in rows] == ["run", "pipe", "pipe:"]


def test_a_process_that_is_gone_has_died(here):
    folder, me = make("mine"), psutil.Process()
    about = {"host": os.uname().nodename, "pid": me.pid, "process_started": me.create_time()}
    told(folder, phase="training", **about)
    assert read_run(folder).state == "training"
    told(folder, process_started=me.create_time() - 100)  # its number is another one's now
    assert read_run(folder).state == "died"
    told(folder, host="elsewhere", updated_at=time.time() - 10)
    assert read_run(folder).state == "training"
    told(folder, updated_at=time.time() - 100)
    assert read_run(folder).state == "lost"


@pytest.mark.devices  # a process
def test_a_launcher_that_is_killed_has_died(here):
    text = (
        "import sys, time; from pathlib import Path\n"
        "from launcher.driver.folder.status import Status\n"
        "from launcher.report.console import Phase\n"
        "with Status(Path('r'), 9) as s: s.phase(Phase.COMPILING); print(flush=1); time.sleep(99)"
    )
    Path("r").mkdir()
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        while read_run(Path("r")).state != "compiling":
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert read_run(Path("r")).state == "died"


def test_names_may_be_shortened_while_they_are_clear(here, capsys):
    for name in ("alpha-1", "alpha-2", "beta"):
        make(name)
    assert lines(capsys, "show", "be")[0] == ["id", "beta"]
    assert lines(capsys, "show", "outputs/alpha-1")[0] == ["id", "alpha-1"]
    with pytest.raises(ConfigError, match="There is no run alpha"):
        main(["show", "alpha"])
    with pytest.raises(ConfigError, match="Did you mean beta"):
        main(["show", "betta"])
    with pytest.raises(ConfigError, match="Did you mean compare"):
        main(["compar"])
    with pytest.raises(ConfigError, match="unrecognized arguments: --jsn"):
        main(["--jsn"])


def test_a_run_that_stopped_early_as_it_was_to_has_ended_well(here, capsys):
    reason = "stopped early: eval_loss is no better than the 2 of step 2"
    told(make("one", exit_reason=reason, eval_loss=2.0), phase="done")
    assert main(["watch", "one"]) == 0
    capsys.readouterr()
    assert [row[0] for row in lines(capsys, "best")] == ["run", "one"]
    assert ended_well(reason)
    assert not ended_well("it failed: badly")
    rows = lines(capsys, "compare", "one", make("two").name)
    assert next(row[-2:] for row in rows if row[0] == "one") == ["stopped", "early"]


def test_the_newest_job_is_that_of_the_status(here):
    folder = make("again", job_id="1")
    assert read_run(folder).job_id == "1"
    told(folder, job_id="2")
    assert read_run(folder).job_id == "2"


def test_the_best_comes_first_by_any_number_of_the_summary(here, capsys):
    make("a", eval_loss=3.0, samples_per_second=9.0)
    make("b", eval_loss=2.0, samples_per_second=5.0)
    make("c", eval_loss=1.0, exit_reason="interrupted")
    assert [row[0] for row in lines(capsys, "best")] == ["run", "b", "a"]
    assert [r[0] for r in lines(capsys, "best", "by=samples_per_second")] == ["run", "a", "b"]
    with pytest.raises(ConfigError, match="Did you mean eval_loss"):
        main(["best", "by=eval_los"])


def test_runs_and_sweeps_are_compared(here, capsys):
    told(make("one"), plan="2 stages")
    make("three")
    for number in (10, 9):
        make(f"s-{number}", root="multirun/s")
    text = "\n".join(" ".join(row) for row in lines(capsys, "compare", "one", "three"))
    assert "steps" in text  # the setting that differs
    assert text.endswith("one: 2 stages\nthree: 1 stage")
    rows = lines(capsys, "compare", "multirun/s")
    assert [row[0] for row in rows[2:4]] == ["9", "10"]
    with pytest.raises(ConfigError, match="two runs or more"):
        main(["compare", "one"])


def test_a_note_is_kept_and_shown(here, capsys):
    make("one")
    lines(capsys, "note", "one", "the good\n one")
    assert lines(capsys)[1][-3:] == ["the", "good", "one"]


def test_folders_are_removed_when_asked_unless_they_run(here, capsys, monkeypatch):
    folder = make("one")
    with pytest.raises(ConfigError, match="Add --yes"):
        main(["rm", "one"])
    with open(folder / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="one is running"):
            main(["rm", "one", "--yes"])
    assert folder.is_dir()
    lines(capsys, "rm", "one", "--yes")
    assert not folder.exists()
    with pytest.raises(ConfigError, match="There is no run"):
        main(["rm", ".", "--yes"])


def test_watching_ends_with_the_run_and_its_code(here, capsys):
    make("one")
    assert main(["watch", "one"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("one  done  step 9/9")
    told(make("two", exit_reason="preempted"), phase="preempted")
    assert main(["watch", "two"]) == 75
    told(make("three", exit_reason="no disk left"), phase="failed")
    assert main(["watch", "three"]) == 1
    assert "no disk left" in capsys.readouterr().out


def test_python_gets_a_table(here):
    make("one", eval_loss=2.0)
    [row] = launcher.runs()
    assert (row["id"], row["state"], row["eval_loss"]) == ("one", "done", 2.0)
    assert launcher.runs("multirun") == []
    assert all(not isinstance(value, list | dict) for value in row.values())


@pytest.mark.devices  # a process
def test_a_thousand_runs_are_listed_from_two_files_each_and_without_jax(here):
    for number in range(1000):
        make(f"run-{number}")
    text = (
        "import sys; from launcher.cli.runs_command import main; assert main([]) == 0\n"
        "heavy = {'jax', 'ray', 'flax', 'wandb', 'hydra', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1001


def test_the_command_line_knows_runs(here, capsys):
    make("one")
    with Stop() as stop:
        assert command(["runs"], stop) == 0
        assert capsys.readouterr().out.splitlines()[1].startswith("one  done")
        assert command(["runs", "show", "two"], stop) == 2
        assert "There is no run two" in capsys.readouterr().err


def test_a_status_tells_each_step_and_the_end(here):
    Path("r").mkdir()
    with Status(Path("r"), 10) as status:
        assert read_run(Path("r")).state == "starting"
        status.phase(Phase.COMPILING, 3, 12, "programs")
        while (found := read_run(Path("r"))).state != "compiling":
            time.sleep(0.01)
        assert (found.phase_done, found.phase_total, found.phase_unit) == (3, 12, "programs")
        status.on_step(1, {"train/loss": 3.0, "perf/step_seconds": 0.5, "eval/loss": 2.0})
        status.on_step(2, {"train/loss": float("nan"), "perf/step_seconds": 0.5})
        status.on_end(2, "interrupted, not saved since step 0")
    found = read_run(Path("r"))
    assert (found.state, found.step, found.loss, found.eval_loss) == ("interrupted", 2, None, 2.0)
    assert found.exit_reason == "interrupted, not saved since step 0"


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"phase": "compiling", "phase_done": 3, "phase_total": 12}, "one  compiling 3 of 12  "),
        (
            {"phase": "compiling", "phase_done": 3, "phase_total": 12, "phase_unit": "programs"},
            "one  compiling 3 of 12 programs  ",
        ),
        (
            {"phase": "reading", "phase_done": 3000, "phase_unit": "MiB read"},
            "one  reading 3,000 MiB read  ",
        ),
        ({"phase": "planning", "phase_done": 0.25, "phase_total": 1.0}, "one  planning 25%  "),
        ({"phase": "training", "phase_done": None, "phase_total": None}, "one  training  step"),
        (
            {
                "phase": "compiling",
                "phase_done": 3,
                "phase_total": 12,
                "host": socket.gethostname(),
                "pid": 0,
            },
            "one  died  step",
        ),
    ],
)
def test_a_watched_run_tells_how_far_its_phase_is(here, about, said):
    folder = make("one")
    told(folder, **about)
    assert _line(read_run(folder)).startswith(said)


def test_a_status_names_the_error_that_ended_the_run(here):
    Path("r").mkdir()
    with pytest.raises(OSError, match="gone"), Status(Path("r"), 10):
        raise OSError("gone\nand more")
    assert (read_run(Path("r")).state, read_run(Path("r")).exit_reason) == ("failed", "gone")


def test_a_status_that_cannot_be_written_ends_nothing(here, monkeypatch, caplog):
    Path("r").mkdir()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("launcher.driver.folder.status.write_whole", full)
    with Status(Path("r"), 10) as status:
        status.phase(Phase.TRAINING)
        status.on_end(2, "done")
    assert [r.getMessage() for r in caplog.records] == [
        "status.json is not written (No space left on device); the run continues"
    ]
