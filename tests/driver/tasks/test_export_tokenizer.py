"""`launcher/inference/export_tokenizer.py`: the tokenizer of the data goes with the weights."""

import json
import logging

import numpy as np
import pytest

from launcher.config.compose import load
from launcher.inference.export_tokenizer import exported_tokenizer, warn_of_other_tokens
from launcher.recipes.data.corpus.tokenizers import load_tokenizer
from launcher.recipes.datasets.documents.prepare import prepare_corpus, train_tokenizer

DOCUMENTS = "dataset=jsonl", "dataset.path=talks.jsonl", "dataset.tokenizer=own/tokenizer.json"


@pytest.fixture(autouse=True)
def prepared(tmp_path, monkeypatch):
    """Documents, their tokenizer and their tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = (json.dumps({"text": f"number {i}"}) for i in range(50))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    (tmp_path / "own").mkdir()
    work = load(DOCUMENTS).dataset
    train_tokenizer(work, 300, tmp_path / "own" / "tokenizer.json")
    prepare_corpus(work, 1)
    np.zeros(99, "u2").tofile(tmp_path / "plain.bin")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (DOCUMENTS, "own"),
        (("dataset=tokens", "dataset.path=talks.jsonl.tokens"), "own"),
        (("dataset=tokens", "dataset.path='~/talks.jsonl.tokens'"), "own"),
        (("dataset=mixture", "dataset.parts={a: {path: talks.jsonl.tokens}}"), "own"),
        (("dataset=tokens", "dataset.path=plain.bin", "train.init_from=hf:own"), "own"),
        (("dataset=tokens", "dataset.path=plain.bin"), None),
        (("dataset=stdlib_text",), "bytes"),
        (("dataset=jsonl", "dataset.path=other.jsonl"), "bytes"),
    ],
)
def test_it_is_the_one_that_made_the_tokens(words, expected, tmp_path):
    files, special, _ = exported_tokenizer(load([*words]))
    assert bool(files) == (expected is not None) == bool(special)
    if files:
        (tmp_path / "again").mkdir()
        (tmp_path / "again" / "tokenizer.json").write_bytes(files["tokenizer.json"])
        name = "bytes" if expected == "bytes" else "own"
        found = load_tokenizer(str(tmp_path / "again")).encode(["number 7"])[0]
        assert found.tolist() == load_tokenizer(name).encode(["number 7"])[0].tolist()


@pytest.mark.parametrize("content", [None, "{}"])
def test_one_that_is_no_longer_what_it_was_is_not_written(content, tmp_path, caplog):
    file = tmp_path / "own" / "tokenizer.json"
    file.unlink() if content is None else file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert exported_tokenizer(load([*DOCUMENTS])).files == {}
    (record,) = caplog.records
    why = "does not exist" if content is None else "has changed since talks.jsonl.tokens"
    assert record.getMessage().startswith("no tokenizer is written with the weights: ")
    assert why in record.getMessage()


def test_an_evaluation_on_tokens_of_another_tokenizer_is_warned_of(caplog):
    run, bytes_ = load([*DOCUMENTS]), load(["dataset=jsonl", "dataset.path=other.jsonl"])
    warn_of_other_tokens(run, run)
    assert not caplog.records
    warn_of_other_tokens(run, bytes_)
    (record,) = caplog.records
    said = record.getMessage()
    assert "were made by own/tokenizer.json, and dataset=documents has those of bytes" in said
    assert said.endswith("; prepare the data with dataset.tokenizer=own/tokenizer.json")
