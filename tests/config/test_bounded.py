"""Settings that no reader can hold are refused in one line, at once."""

from pathlib import Path

import pytest

from launcher.__main__ import main

OPTIONS = "# @package _global_\nmodel:\n  options:\n    a0: &a0 {x: 1, y: 2}\n"
FILES = {
    "an endless anchor": f"{OPTIONS}    b: &b [*b]\n",
    "brackets": f"{OPTIONS}    b: {'[' * 9999}{']' * 9999}\n",
    "its size": OPTIONS + "#\n" * 200_000,
    "digits": f"{OPTIONS}    b: {'9' * 5000}\n",
    "no date": f"{OPTIONS}    b: 2026-02-31\n",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FILES)
def test_a_settings_file_beyond_all_bounds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "conf" / "recipe" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(FILES[name])
    monkeypatch.chdir(tmp_path)
    for words in (["--config-dir", "conf", "recipe=mine"], ["--frozen", str(path)]):
        assert main([*words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "word",
    [
        f"train.steps={'9' * 5000}",
        f"a={'[' * 2000}{']' * 2000}",
        f"a={'(' * 3000}",
    ],
)
def test_a_word_beyond_all_bounds(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "task=check"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), "cannot be read as key=value" in err) == (1, True)
    assert len(err) < 400
