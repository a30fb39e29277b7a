"""What the command line says where nobody reads it, or where it cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.output import without_control

ANSWERS = [
    ["--help"],
    ["--version"],
    ["--cfg", "job"],
    ["task=check"],
    ["-m", "task=check", "train.steps=1,2"],
]


def run(words: list[str], folder: Path, **streams) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher", *words]
    return subprocess.run(command, cwd=folder, text=True, check=False, **streams)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("words", [*ANSWERS, ["train.stepz=1"]], ids=" ".join)
def test_nobody_reads_the_answer_or_the_complaint(words: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| true` does, sooner or later
    outputs = {"stdout": writer, "stderr": subprocess.PIPE}
    if words not in ANSWERS:
        outputs = {"stdout": subprocess.PIPE, "stderr": writer}
    result = run(words, tmp_path, **outputs)
    os.close(writer)
    assert result.returncode == (0 if words in ANSWERS else 2)
    assert not result.stdout
    assert not result.stderr


def test_an_answer_that_a_full_disk_does_not_take_is_a_failure(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        result = run(["--cfg", "job"], tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 1
    assert result.stderr == "launcher: standard output: No space left on device\n"


def test_output_may_be_closed(tmp_path: Path) -> None:
    shell = f"{sys.executable} -m launcher --version >&-; echo $?"
    result = subprocess.run(shell, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("0\n", "")


def test_what_a_terminal_obeys_is_masked_and_every_other_character_stays() -> None:
    obeyed = "\x1b\x07\r\x9b\u2028\u202e\ud800"
    assert without_control(obeyed) == "\ufffd" * len(obeyed)
    # a space that does not break, an ideographic one, joiners, a soft hyphen
    text = "3\xa0€\u3000👩\u200d🔬 می\u200cخواهم co\xadop\n\t\ue000"
    assert without_control(text) == text
