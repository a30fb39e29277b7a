"""`tokenizer_files.py`: what is written beside weights means the same tokens."""

import json

import pytest
import tokenizers

from launcher.recipes import InputError
from launcher.recipes.data.corpus.chat import TEMPLATES
from launcher.recipes.data.corpus.tokenizer_files import tokenizer_files
from launcher.recipes.data.corpus.tokenizers import load_tokenizer

TEXT = "Hello world, it's 12345 o'clock — naïve Ωμέγα\n\n  def f(x):\x00 return x"


def trained(folder):
    """A byte-level BPE in `<folder>/tokenizer.json`."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=letters
    )
    made.train_from_iterator([TEXT * 3], trainer)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def written(files, folder):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


@pytest.mark.parametrize("kind", ["bytes", "bytes, no end", "file", "folder"])
def test_the_files_are_the_same_tokenizer(kind, tmp_path):
    name = "bytes"
    if not kind.startswith("bytes"):
        folder = trained(tmp_path / "theirs")
        name = str(folder / "tokenizer.json") if kind == "file" else str(folder)
    files, special, _ = tokenizer_files(name, ends_documents=kind != "bytes, no end")
    again = load_tokenizer(written(files, tmp_path / "again"))
    own = load_tokenizer(name)
    assert again.encode([TEXT])[0].tolist() == own.encode([TEXT])[0].tolist()
    assert again.decode(own.encode([TEXT])[0]) == TEXT
    end = {"bytes": 256, "bytes, no end": None}.get(kind, 1)
    assert again.end_token == end == special["eos_token_id"]
    assert again.vocab_size == own.vocab_size - (kind == "bytes, no end")


def test_settings_and_the_trained_chat_template_go_with_it(tmp_path):
    folder = trained(tmp_path / "theirs")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": "old"})
    )
    (folder / "model.safetensors").write_bytes(b"not of the tokenizer")
    files, special, _ = tokenizer_files(str(folder), "chatml")
    assert special == {"bos_token_id": 0, "pad_token_id": None, "eos_token_id": 1}
    assert sorted(files) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert load_tokenizer(written(files, tmp_path / "again")).templates == {
        "default": TEMPLATES["chatml"]
    }


def test_what_has_no_such_form_is_refused(tmp_path):
    (tmp_path / "x.tiktoken").write_bytes(b"YQ== 0\n")
    with pytest.raises(InputError, match="tiktoken's ranks, which transformers does not load"):
        tokenizer_files(str(tmp_path / "x.tiktoken"))
    with pytest.raises(InputError, match=r"dataset.chat_template=gone: there is none such"):
        tokenizer_files("bytes", "gone")
