"""The command line as a process: what it prints, how it exits, and what it leaves alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import launcher.config.compose
from launcher.__main__ import main

HEAVY = ("jax", "flax", "grain", "optax", "orbax", "ray", "wandb")


def run(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher", *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_check_says_what_was_checked_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XLA_FLAGS")  # the tests' own number of devices, which would be named
    result = run("task=check", "model.size=1.3b", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "The settings are fine: model=gpt (24 layers), dataset=stdlib_text, optimizer=adamw, "
        "200 steps of 32 samples, parallel=auto (auto, num_micro_batches=auto), cluster=local.\n"
        "no GPU here: 4 emulated CPU devices stand in\n"
        "dataset=stdlib_text is bytes: 50,944 of the model's 51,200 vocabulary rows are unused; "
        "model.vocab_size=256 leaves them out\n"
        "not checked: the plan and the memory that it needs (task=plan)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_setting_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = run("train.stepz=3", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "launcher: train.stepz is not a setting (on the command line). Did you mean train.steps?\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "unneeded"),
    [
        (["task=check"], 0, HEAVY),
        (["train.stepz=3"], 2, HEAVY),
        (["--help"], 0, HEAVY),
        pytest.param(
            ["task=plan", "recipe=pipeshard_tutorial", "parallel=data"],
            0,
            ("ray", "orbax", "tensorstore", "grain", "wandb"),
            marks=pytest.mark.devices,
        ),
    ],
)
def test_what_is_not_needed_is_not_imported(
    arguments: list[str], code: int, unneeded: tuple[str, ...], tmp_path: Path
) -> None:
    program = (
        f"import sys; from launcher.__main__ import main; assert main({arguments!r}) == {code}; "
        f"sys.exit(' '.join(name for name in {unneeded!r} if name in sys.modules) or None)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for picture in tmp_path.glob("outputs/*/plots"):
        assert (picture / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("outputs/*/plots")) or arguments[0] != "task=plan"


def test_help_shows_options_examples_and_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").touch()
    assert main(["--help", "--config-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for line in (
        "  model      bert | custom | gpt | llama | mine | mlp | moe | resnet | toy | unet | vit | "
        "wide_resnet",
        "  optimizer  adafactor | adam | adamw | custom | lion | muon | sgd",
        "  launcher -m parallel.num_micro_batches=2,4          run both, then compare them",
        "  2    a setting is wrong: nothing was trained",
    ):
        assert line in out.splitlines()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("launcher ")


def test_cfg_prints_settings_that_load_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["model.size=39b", "wandb.name=no", "optimizer.eps=1e-9"]
    assert main(["--cfg", "job", *arguments]) == 0
    (tmp_path / "recipe").mkdir()
    recipe = "# @package _global_\n" + capsys.readouterr().out
    (tmp_path / "recipe" / "again.yaml").write_text(recipe)
    load = launcher.config.compose.load
    assert load(["recipe=again"], [str(tmp_path)]) == load(arguments)


def test_cfg_prints_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "-p", "train.checkpoint"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {
        "at_end": True,
        "every_steps": 0,
        "every_minutes": None,
        "keep": 2,
        "on_error": "continue",
    }
    assert main(["--cfg", "job", "--package", "trian"]) == 2
    assert capsys.readouterr().err == (
        "launcher: --package trian is not a section. Did you mean train?\n"
    )


def test_flags_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.steps=1,2", "-m", "task=check", "optimizer=adam,sgd"]) == 0
    assert capsys.readouterr().out.startswith("The settings of all 4 runs are fine.\n")


def test_ctrl_c_is_exit_code_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher.config.compose, "load", interrupted)
    assert main([]) == 130
    assert capsys.readouterr() == ("", "")
