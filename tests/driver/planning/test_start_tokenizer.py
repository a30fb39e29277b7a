"""`launcher/driver/planning/init_from.py`: data of tokens that the model does not know."""

import json
import os

import pytest
import tokenizers

from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.driver.planning.check import check
from launcher.recipes import InputError
from launcher.recipes.data.corpus.tokenizer_files import tokenizer_files
from launcher.recipes.datasets.documents.prepare import prepare_corpus, train_tokenizer
from launcher.recipes.models.llama.hf import config_of

START = "model=llama", "model.size=hf:theirs", "train.init_from=hf:theirs"
DOCUMENTS = "dataset=jsonl", "dataset.path=talks.jsonl"
TOKENS = "dataset=tokens", "dataset.path=talks.jsonl.tokens", "model.sequence_length=32"


@pytest.fixture(autouse=True)
def theirs(tmp_path, monkeypatch):
    """A model's folder, its tokenizer, and documents."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "theirs"
    folder.mkdir()
    model = load(["model=llama", "dataset=synthetic", "model.vocab_size=400"]).model
    (folder / "config.json").write_text(json.dumps(config_of(model)))
    lines = (json.dumps({"text": f"the number {i} follows {i - 1}"}) for i in range(200))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    train_tokenizer(load(DOCUMENTS).dataset, 290, folder / "tokenizer.json")
    return folder


def prepared(*words):
    prepare_corpus(load([*DOCUMENTS, *words]).dataset, 1)


def said(*words):
    try:
        return 0, "; ".join(check(load([*START, *words]), os.environ))
    except (ConfigError, InputError) as error:
        return 2, str(error)


HAS = "train.init_from=hf:theirs has a tokenizer, and the tokens of dataset="
OTHERS = ", which are others for the same text: the model would know none of them"


@pytest.mark.parametrize(
    ("words", "made", "remedy"),
    [
        (("dataset=stdlib_text",), "stdlib_text are bytes", "Use dataset=jsonl, parquet, arrow or"),
        (DOCUMENTS, "documents are bytes", "Set dataset.tokenizer=theirs here."),
        (TOKENS, "tokens are bytes", "Prepare the data with dataset.tokenizer=theirs first."),
        (
            ("dataset=mixture", "dataset.parts={a: {path: talks.jsonl.tokens}}", TOKENS[2]),
            "mixture are bytes",
            "Prepare the data with",
        ),
        (
            (*DOCUMENTS, "dataset.tokenizer=other.json"),
            "documents are made by other.json",
            "Set dataset.tokenizer=theirs here.",
        ),
    ],
)
def test_data_of_another_tokenizer_than_the_starts_are_refused(words, made, remedy, tmp_path):
    prepared()
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = [f"<{i}>" for i in range(40)]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    other.train_from_iterator(
        [], tokenizers.trainers.BpeTrainer(special_tokens=specials, initial_alphabet=alphabet)
    )
    other.save(str(tmp_path / "other.json"))
    code, text = said(*words)
    assert code == 2
    assert f"{HAS}{made}{OTHERS}" in text
    assert remedy in text
    assert "move its tokenizer to another folder" in text
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    assert said(*words)[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        (*DOCUMENTS, "dataset.tokenizer=theirs", TOKENS[2]),
        (*DOCUMENTS, "dataset.tokenizer=again.json"),  # the same, written in another way
        TOKENS,
        ("dataset=synthetic",),
    ],
)
def test_data_of_the_same_tokens_or_of_none_begin(words, tmp_path):
    prepared("dataset.tokenizer=theirs")
    content = json.loads((tmp_path / "theirs" / "tokenizer.json").read_text())
    (tmp_path / "again.json").write_text(json.dumps(content))
    code, text = said(*words)
    assert code == 0, text
    assert "tokenizer.json" not in text


def test_bytes_go_on_from_an_exported_model_of_bytes(theirs):
    for name, content in tokenizer_files("bytes").files.items():
        (theirs / name).write_bytes(content)
    for words in (("dataset=stdlib_text",), DOCUMENTS):
        code, text = said(*words)
        assert code == 0, text
        assert "tokenizer.json" not in text


def test_an_extended_tokenizer_or_one_that_has_gone_is_warned_of(tmp_path):
    content = json.loads((tmp_path / "theirs" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["zy"] = len(vocabulary)
    content["model"]["merges"].append(["z", "y"])
    (tmp_path / "more.json").write_text(json.dumps(content))
    code, text = said(*DOCUMENTS, "dataset.tokenizer=more.json")
    assert code == 0, text
    assert f"{HAS}documents are made by more.json: of a sample text only 9" in text
    prepared("dataset.tokenizer=more.json")
    (tmp_path / "more.json").unlink()
    code, text = said(*TOKENS)
    assert code == 0, text
    assert f"{HAS}tokens are made by more.json, a file that is another or not there to be" in text
