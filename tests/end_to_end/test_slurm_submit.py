"""Submitting without a Slurm: what is shown, what is refused, and what is left alone."""

import os
import shlex
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.config.compose import load
from launcher.driver.folder.folder import RunFolder
from launcher.driver.folder.make_folder import make_folder
from launcher.stop import Stop
from launcher.submit.job import hand_in, read_job, script_for

SETTINGS = ("cluster=slurm", "cluster.hosts=2", "cluster.gpus=16", "model.num_layers=4")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path


@pytest.mark.parametrize("task", ["train", "submit"])
def test_a_dry_run_shows_the_script_and_does_nothing(
    task: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SETTINGS, f"task={task}", "cluster.slurm.dry_run=true", "run.id=mine")
    assert main(words) == 0
    script = capsys.readouterr().out
    home = folder / "outputs" / "mine"
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=8",
        f"#SBATCH --output={home}/logs/slurm-%j.out",
    ):
        assert line in script.splitlines()
    assert f"-m launcher --frozen {home}/config.yaml)" in script
    assert list(folder.iterdir()) == []


def test_a_dry_run_of_a_sweep_shows_one_array_or_a_script_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ("-m", *SETTINGS, "cluster.slurm.dry_run=true", "run.id=s", "train.steps=1,2,3")
    assert main(sweep) == 0
    assert capsys.readouterr().out.count("#!/usr/bin/env bash") == 3
    assert main((*sweep, "cluster.slurm.array=2")) == 0
    script = capsys.readouterr().out
    assert script.count("#!/usr/bin/env bash") == 1
    assert "#SBATCH --array=0-2%2" in script.splitlines()
    assert f'--frozen {folder}/multirun/s/s-"${{SLURM_ARRAY_TASK_ID}}"/config.yaml)' in script
    assert list(folder.iterdir()) == []


def test_the_jobs_of_a_sweep_that_learns_repeat_its_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which alone can allow code to be run."""
    by_optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "sweep.jobs=3")
    words = (*SETTINGS, *by_optuna, "train.steps=interval(1,9)", "allow_modules=[my_pkg]")
    assert main(("-m", *words, "cluster.slurm.dry_run=true", "run.id=s")) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-11%3" in script.splitlines()
    assert f"#SBATCH --output={folder}/multirun/s/s-%a/logs/slurm-%A_%a.out" in script.splitlines()
    assert f"launcher -m {shlex.join(words)} cluster.slurm.dry_run=true run.id=s run.id=s" in script
    assert list(folder.iterdir()) == []
    assert main(("-m", *words, "cluster.hosts=2,1", "cluster.slurm.dry_run=true")) == 2
    told = "The runs of a job array cannot have different settings of the cluster"
    assert told in capsys.readouterr().err


def test_a_job_may_load_what_the_command_line_allows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its frozen settings cannot say so."""
    mine = ("model=custom", "model.module=my_pkg.net", "allow_modules=[my_pkg]")
    words = ("cluster=slurm", *mine, "cluster.slurm.dry_run=true", "run.id=mine")
    assert main(words) == 0
    frozen = f"--frozen {folder}/outputs/mine/config.yaml 'allow_modules=[my_pkg]')"
    assert frozen in capsys.readouterr().out
    assert main(("-m", *words, "cluster.slurm.array=2", "train.steps=1,2")) == 0
    assert "/config.yaml 'allow_modules=[my_pkg]')" in capsys.readouterr().out


def test_without_slurm_nothing_is_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SETTINGS) == 2
    assert capsys.readouterr().err == (
        "launcher: cluster=slurm needs Slurm's commands, and sbatch is not on this machine. "
        "Submit from a login node, or use cluster=local.\n"
    )
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("sweep", [(), ("-m", "train.steps=1,2")])
def test_a_wrong_partition_is_found_before_anything_is_planned(
    sweep: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = folder / "bin"
    commands.mkdir()
    for name, script in (("sbatch", "exit 9"), ("sinfo", "echo gpu\necho urgent")):
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))
    for variable in ("SBATCH_PARTITION", "SLURM_MEM_PER_CPU", "SLURM_JOB_ID"):
        monkeypatch.setenv(variable, "7")
    monkeypatch.setattr(
        "launcher.driver.planning.prepare.prepare", lambda *_, **__: pytest.fail("planned")
    )
    assert main((*sweep, *SETTINGS, "cluster.slurm.partition=gpus")) == 2
    assert capsys.readouterr().err == (
        "launcher: not passed on to the job: SBATCH_PARTITION, SLURM_MEM_PER_CPU; "
        "cluster.slurm says what it needs\n"
        "launcher: cluster.slurm.partition=gpus: Slurm has no partition gpus. Did you mean gpu?\n"
    )
    assert [path.name for path in folder.iterdir()] == ["bin"]


def test_an_array_whose_runs_ask_for_different_things_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("-m", "cluster=slurm", "cluster.gpus=4", "cluster.slurm.array=2")
    assert main((*words, "cluster.slurm.time=1h,2h")) == 2
    words_of_cluster = "The runs of a job array cannot have different settings of the cluster"
    assert words_of_cluster in capsys.readouterr().err
    assert main((*words, "allow_modules=[a],[a,b]")) == 2
    assert "The runs of a job array cannot be allowed different modules" in capsys.readouterr().err


def test_a_sweep_that_is_none_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("task=sweep_status", f"sweep.dir={folder}")) == 2
    assert "holds no runs that were submitted to Slurm" in capsys.readouterr().err


@pytest.mark.parametrize("env", ["{}", "{API_KEY: s3cret}"])
def test_a_script_that_holds_values_of_the_environment_is_its_users_alone(
    env: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.submit.job.sbatch", lambda script, sleep: "7")
    config = load((*SETTINGS, f"cluster.slurm.env={env}", "run.id=mine", "run.shared=true"))
    path = folder / "job.sbatch"
    hand_in(config, path, script_for(config), {}, str, [], Stop())
    assert ("s3cret" in path.read_text()) == ("s3cret" in env)
    assert (path.stat().st_mode & 0o077 == 0) == ("s3cret" in env)


@pytest.mark.parametrize("text", ["", "[]", '{"job_id": "7"}', '{"job_id": "-f", "script": "x"}'])
def test_a_damaged_note_of_a_job_is_said_and_stays_where_it_is(
    text: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "squeue").write_text(f"#!/bin/sh\necho $* >> {folder}/asked\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    path = folder / "s-0" / "job.json"
    path.parent.mkdir()
    path.write_text(text)
    assert read_job(path.parent) is None
    err = capsys.readouterr().err
    assert (err.count("\n"), err.startswith(f"launcher: {path} is damaged")) == (1, True)
    (folder / "s-1").mkdir()
    (folder / "s-1" / "job.json").symlink_to("job.json")  # not to be read, whoever asks
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # in a container it has no name
    assert main(("task=sweep_status", f"sweep.dir={folder}")) == 0
    out, err = capsys.readouterr()
    assert out.count("unknown") == 2
    assert f"{folder}/s-1/job.json cannot be read: Too many levels" in err
    assert f"-u {os.getuid()} -o" in (folder / "asked").read_text()
    assert (path.read_text(), [file.name for file in path.parent.iterdir()]) == (text, ["job.json"])


def test_frozen_settings_are_a_runs_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("--cfg", "job", "train.steps=7")) == 0
    (folder / "config.yaml").write_text(capsys.readouterr().out)
    assert main(("--frozen", "config.yaml", "--cfg", "job", "-p", "train.steps")) == 0
    assert capsys.readouterr().out.startswith("7")
    assert main(("--frozen", "config.yaml", "train.steps=8")) == 2
    assert "--frozen takes all settings from its file" in capsys.readouterr().err
    assert main(("--frozen", "missing.yaml")) == 2
    assert "launcher: --frozen missing.yaml cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster.slurm.array=2"], "cluster.slurm.array=2 is for sweeps, but this is one run"),
        (["-m", "train.steps=1,2", "cluster.slurm.wait=true"], "cluster.slurm.wait=true follows"),
    ],
)
def test_what_one_run_or_a_sweep_cannot_follow_is_refused(
    words: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SETTINGS, *words]) == 2
    assert told in capsys.readouterr().err
    assert list(folder.iterdir()) == []


# Its Ctrl-C comes when Slurm has the job, and it has not said so yet; not to its own group.
SBATCH = """#!/bin/sh
set -- $(cat /proc/$$/stat)
[ $5 = $$ ] || exit 9
kill -INT $PPID
sleep 0.3
echo 17
"""


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        (("run.id=s",), {"outputs/s": "17"}),
        (
            ("-m", "run.id=s", "cluster.slurm.array=2", "train.steps=1,2"),
            {"multirun/s/s-0": "17_0", "multirun/s/s-1": "17_1"},
        ),
    ],
)
def test_a_job_that_slurm_takes_while_ctrl_c_is_pressed_is_noted(
    words: tuple[str, ...],
    jobs: dict[str, str],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    frozen = "launcher.submit.job.freeze"
    monkeypatch.setattr(frozen, lambda config, console: RunFolder(make_folder(config)))
    assert main((*SETTINGS, *words)) == 130
    for home, job_id in jobs.items():
        noted = read_job(folder / home)
        assert noted is not None
        assert noted.job_id == job_id
    out = capfd.readouterr().out
    assert "launcher: stopping: once Slurm has answered" in out
    assert "submitted job" in out
