"""`documents`: what is checked before the documents are tokens, and after."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from launcher.config.compose import load
from launcher.recipes import (
    InputError,
    build_dataset,
    bytes_per_target,
    check_dataset,
    needs_preparing,
    prepare_dataset,
    tokenizer_of,
)
from launcher.recipes.data.corpus import sources
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.mixture import Mixture

MODEL = SimpleNamespace(name="gpt", vocab_size=257, sequence_length=8)


@pytest.fixture
def given(tmp_path):
    rows = [json.dumps({"text": f"document {i}"}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    return Documents(path=str(tmp_path / "a.jsonl"), validation_fraction=0.2)


def test_documents_are_checked_before_they_are_tokens(given):
    check_dataset(given, MODEL, validation=True)
    assert needs_preparing(given)
    small = SimpleNamespace(name="gpt", vocab_size=200, sequence_length=8)
    with pytest.raises(InputError, match=r"^dataset\.tokenizer=bytes has 257 tokens, more than mo"):
        check_dataset(given, small, validation=True)
    with pytest.raises(InputError, match=r"dataset\.path=none does not exist; name a file, a fol"):
        check_dataset(Documents(path="none"), MODEL, validation=True)
    with pytest.raises(InputError, match=r"dataset\.tokenizer=x: x does not exist; name a token"):
        check_dataset(Documents(path=given.path, tokenizer="x"), MODEL, validation=True)
    with pytest.raises(InputError, match=r"are not made yet .*; run this command with task=prep"):
        build_dataset(given, MODEL, 4, 0)  # as for a plan


def test_a_glob_is_asked_for_a_folder_of_tokens_and_then_trains(given, tmp_path):
    path = str(tmp_path / "*.jsonl")
    model = load(["dataset=synthetic"]).model
    (error,) = Documents(path=path).check(model)
    assert str(error).startswith(f"dataset.path={path} is a glob, which implies no folder for its")
    assert "such as dataset.tokens=" in str(error)
    named = replace(given, path=path, tokens=str(tmp_path / "out"))
    assert prepare_dataset(named, 1, lambda share: None).startswith("40 documents, ")
    check_dataset(named, MODEL, validation=True)
    assert build_dataset(named, MODEL, 4, 0).train(0)["tokens"].shape == (4, 8)
    (tmp_path / "a[1].jsonl").write_text('{"text": "a"}\n')  # a name that looks like a glob
    assert not list(Documents(path=str(tmp_path / "a[1].jsonl")).check(model))


def test_what_is_prepared_trains_and_has_its_tokenizer(given):
    shares = []
    said = prepare_dataset(given, 1, shares.append)
    assert said.startswith("40 documents, ")
    assert shares[-1] == 1
    assert not needs_preparing(given)
    batch = build_dataset(given, MODEL, 4, 0).train(0)
    assert batch["tokens"].shape == (4, 8)
    text = tokenizer_of(given).decode(batch["tokens"].ravel().tolist())
    assert "docu" in text
    long = SimpleNamespace(name="gpt", vocab_size=257, sequence_length=10**6)
    with pytest.raises(InputError, match="less than one example"):
        check_dataset(given, long, validation=False)


def test_bad_documents_are_counted_in_what_is_said(given):
    with open(given.path, "a") as file:
        file.write('{"text": ""}\n{\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 41: 'text' is empty; fix it"):
        prepare_dataset(given, 1, lambda share: None)
    skipping = Documents(path=given.path, bad="skip")
    said = prepare_dataset(skipping, 1, lambda share: None)
    assert said.startswith("left out: 2 bad documents, first ")
    assert "a.jsonl, line 41: 'text' is empty" in said


def test_a_held_out_target_stands_for_its_share_of_a_documents_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 300)  # several parts
    texts = ["é" * (1 + i % 7) for i in range(60)]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = Documents(path=str(source), validation_fraction=0.5)
    prepare_dataset(options, 1, lambda share: None)
    sizes = [len(text.encode()) for text in texts]
    each = np.concatenate([np.full(size + 1, size / (size + 1)) for size in sizes])
    start = len(each) - len(each) // 2 + 1
    for rows in (1, 5, 17):
        wanted = each[start : start + rows * MODEL.sequence_length].mean()
        assert bytes_per_target(options, MODEL, rows) == pytest.approx(wanted)
    parts = Mixture(
        parts={name: {"path": options.folder} for name in "ab"}, validation_fraction=0.5
    )
    held = build_dataset(parts, MODEL, 4, 0).validation.num_rows
    one = bytes_per_target(options, MODEL, held // 2)
    assert bytes_per_target(parts, MODEL, held) == pytest.approx(one)
    assert bytes_per_target(replace(options, packing="documents"), MODEL, 5) is None
    part = Path(options.folder, "meta.json")
    part.write_text(re.sub(r'"text_bytes": \d+', '"text_bytes": null', part.read_text()))
    assert bytes_per_target(options, MODEL, 5) is None  # as a folder of before
    assert bytes_per_target(parts, MODEL, 5) is None


def test_what_is_no_text_has_no_tokenizer():
    with pytest.raises(InputError, match=r"dataset\.name=synthetic is not text to continue"):
        tokenizer_of(SimpleNamespace(name="synthetic"))
