"""`recipes/documents.py`: what is checked before the documents are tokens, and after."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from launcher.config.compose import load
from recipes import (
    InputError,
    build_dataset,
    check_dataset,
    needs_preparing,
    prepare_dataset,
    tokenizer_of,
)
from recipes.documents_options import Documents

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
    with pytest.raises(InputError, match=r"dataset\.path=none does not exist"):
        check_dataset(Documents(path="none"), MODEL, validation=True)
    with pytest.raises(InputError, match=r"dataset\.tokenizer=x: x does not exist"):
        check_dataset(Documents(path=given.path, tokenizer="x"), MODEL, validation=True)
    with pytest.raises(InputError, match=r"are not made yet .*; run this command with task=prep"):
        build_dataset(given, MODEL, 4, 0)  # as for a plan


def test_a_glob_is_asked_for_a_folder_of_tokens_and_then_trains(given, tmp_path):
    path = str(tmp_path / "*.jsonl")
    model = load(["dataset=synthetic"]).model
    (error,) = Documents(path=path).check(model)
    assert str(error).startswith(f"dataset.path={path} is a glob, which tells no folder for its")
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
    with pytest.raises(InputError, match="less than one row"):
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


def test_what_is_no_text_has_no_tokenizer():
    with pytest.raises(InputError, match=r"dataset\.name=synthetic is not text to continue"):
        tokenizer_of(SimpleNamespace(name="synthetic"))
