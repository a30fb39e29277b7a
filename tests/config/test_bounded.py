"""Settings files that stand for more than they hold, or are no files: one line, at once."""

import os
from pathlib import Path

import pytest

from launcher.__main__ import main

OPTIONS = "# @package _global_\nmodel:\n  options:\n    a0: &a0 {x: 1, y: 2}\n"


def doubled(words: str) -> str:
    return OPTIONS + "".join(
        f"    a{n}: &a{n} {words.format(before=n - 1, n=n)}\n" for n in range(1, 30)
    )


FILES = {
    "lists of anchors": (doubled("[*a{before}, *a{before}]"), "stands for more than 20,000 names"),
    "merged anchors": (
        doubled("{{<<: [*a{before}, *a{before}], z{n}: 1}}"),
        "stands for more than 20,000 names and values",
    ),
    "a chain of anchors": (
        OPTIONS + "".join(f"    a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 90)),
        "is nested more than 64 levels deep",
    ),
    "an endless anchor": (f"{OPTIONS}    b: &b [*b]\n", "has an anchor inside what it stands for"),
    "brackets": (f"{OPTIONS}    b: {'[' * 9999}{']' * 9999}\n", "is nested too deeply"),
    "tables": (f"{OPTIONS}    b: {'{b: ' * 70}1{'}' * 70}\n", "is nested more than 64 levels deep"),
    "its size": (OPTIONS + "#\n" * 200_000, "is larger than 262,144 bytes"),
    "interpolations": (
        doubled("'${{.a{before}}}${{.a{before}}}'"),
        "its interpolations come to more than 1,048,576 characters",
    ),
    "lists of interpolations": (
        doubled("['${{..a{before}}}', '${{..a{before}}}']"),
        "or 2,000 references",
    ),
    "many interpolations": (
        f"{OPTIONS}    b: {'${oc.env:A,x}' * 1000}\n",
        "of which an interpolation counts as 20",
    ),
    "anchors of interpolations": (
        f"{OPTIONS}    b: &b '${{oc.env:A,x}}'\n    c: [{'*b, ' * 1000}]\n",
        "of which an interpolation counts as 20",
    ),
    "interpolations in one another": (
        f"{OPTIONS}    b: '{'${oc.env:A,' * 200}x{'}' * 200}'\n",
        "has an interpolation nested more than 32 levels deep",
    ),
    "digits": (f"{OPTIONS}    b: {'9' * 5000}\n", "holds a number of 5000 digits"),
    "no date": (f"{OPTIONS}    b: 2026-02-31\n", ""),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FILES)
def test_a_settings_file_beyond_all_bounds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, told = FILES[name]
    path = tmp_path / "conf" / "recipe" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    for words in (["--config-dir", "conf", "recipe=mine"], ["--frozen", str(path)]):
        assert main([*words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert told in err
        assert "mine.yaml" in err


@pytest.mark.parametrize("words", [["recipe=mine"], ["recipe=mime"], ["model=mine"]])
def test_a_fifo_among_the_settings_files_is_not_waited_for(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for group in ("recipe", "model"):
        (tmp_path / "conf" / group).mkdir(parents=True)
        os.mkfifo(tmp_path / "conf" / group / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    assert main(["--config-dir", "conf", *words]) == 2
    assert main(["--frozen", "conf/recipe/mine.yaml"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (f"train.steps={'9' * 5000}", "cannot be read as key=value"),
        (f"model.options={'{a:' * 200}1{'}' * 200}", "is nested too deeply"),
        (f"a={'[' * 2000}{']' * 2000}", "cannot be read as key=value"),
        (f"run.dir='{'${oc.env:A,' * 100}x{'}' * 100}'", "is nested too deeply"),
        (f"a={'(' * 3000}", "cannot be read as key=value"),
    ],
)
def test_a_word_beyond_all_bounds(word: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "task=check"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), told in err, len(err) < 400) == (1, True, True)
