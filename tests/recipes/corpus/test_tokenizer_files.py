"""`tokenizer_files.py`: what is written beside weights means the same tokens."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tokenizer_forms import TEXTS, write

from launcher.recipes import InputError
from launcher.recipes.data.corpus.chat import TEMPLATES
from launcher.recipes.data.corpus.tokenizer_files import tokenizer_files
from launcher.recipes.data.corpus.tokenizers import load_tokenizer


def again(files, folder):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("kind", "end"), [("bytes", 256), ("bytes, no end", None), ("file", 268), ("folder", 268)]
)
def test_the_files_are_the_same_tokenizer(kind, end, tmp_path):
    name = kind.split(",")[0]
    if name != "bytes":
        folder = write("gpt2", tmp_path / "theirs")
        name = str(folder / "tokenizer.json" if kind == "file" else folder)
    files, special, _ = tokenizer_files(name, ends_documents=kind != "bytes, no end")
    own, copy = load_tokenizer(name), again(files, tmp_path / "again")
    text = "".join(TEXTS) + "\0 Ωμέγα"
    assert copy.encode([text])[0].tolist() == own.encode([text])[0].tolist()
    assert copy.decode(own.encode([text])[0]) == text
    assert copy.end_token == end == special["eos_token_id"]
    assert copy.vocab_size == own.vocab_size - (kind == "bytes, no end")


def test_settings_and_the_trained_chat_template_go_with_it(tmp_path):
    folder = write("llama3", tmp_path / "theirs")
    (folder / "model.safetensors").write_bytes(b"not of the tokenizer")
    files, special, _ = tokenizer_files(str(folder), "chatml")
    assert special == {"bos_token_id": 268, "pad_token_id": None, "eos_token_id": 269}
    assert sorted(files) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|eot_id|>"
    assert again(files, tmp_path / "again").templates == {"default": TEMPLATES["chatml"]}


def test_what_has_no_such_form_is_refused(tmp_path):
    (tmp_path / "x.tiktoken").write_bytes(b"YQ== 0\n")
    with pytest.raises(InputError, match="tiktoken's ranks, which transformers does not load"):
        tokenizer_files(str(tmp_path / "x.tiktoken"))
    with pytest.raises(InputError, match=r"dataset.chat_template=gone: there is none such"):
        tokenizer_files("bytes", "gone")
