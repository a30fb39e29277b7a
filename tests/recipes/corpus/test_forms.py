"""Tokens of documents and of conversations are those that `transformers` makes, of every form.

pip install transformers
pytest -m stress tests/recipes/corpus/test_forms.py
"""

import ast
import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import house
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tokenizer_forms import CHAT, FORMS, PINNED, TAGGED, TEXTS, theirs, write

from launcher.config.compose import load
from launcher.config.families import builder_of, find_datasets
from launcher.driver.tasks.generate import encoded
from launcher.recipes import build_dataset, tokenizer_of
from launcher.recipes.data.corpus.chat import chat_encoder
from launcher.recipes.data.corpus.tokenizer_files import tokenizer_files
from launcher.recipes.data.corpus.tokenizers import load_tokenizer
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import prepare_corpus
from launcher.recipes.datasets.mixture import Mixture
from launcher.recipes.datasets.text import StdlibText, Text
from launcher.recipes.datasets.tokens import Tokens

EXPECTED = json.loads(PINNED.read_text())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_tokens_and_masks_are_those_of_transformers(form, tmp_path):
    tokenizer, expected = load_tokenizer(str(write(form, tmp_path / "own"))), EXPECTED[form]
    begin, end = list(tokenizer.begin), list(tokenizer.end)
    (tmp_path / "tagged.jinja").write_text(TAGGED)
    every = zip(TEXTS, expected["texts"], tokenizer.encode(TEXTS), strict=True)
    for text, wanted, tokens in every:
        assert [*begin, *tokens, *end] == wanted
        # Those that a text brings are not put again.
        once = wanted[len(begin) :] if tokens[: len(begin)].tolist() == begin else wanted
        assert tokenizer.prompt(text) == once[: len(once) - len(end)]
        ends = once if tokenizer.end_token in (None, *end) else [*once, tokenizer.end_token]
        blank = text.endswith("<|im_end|>\n") and form in ("qwen", "named")
        assert tokenizer.document(tokens).tolist() == (once if blank else ends)
    tokens, learned = chat_encoder(tokenizer, None)(CHAT)
    assert tokens.tolist() == expected["chat"]
    spoken, rest = (tokenizer.decode(tokens[mask]) for mask in (learned, ~learned))
    spoken, rest = (text.replace(" ##", "").replace(" ", "") for text in (spoken, rest))
    assert (spoken.count("two"), rest.count("two"), spoken.count("one")) == (2, 0, 0)
    tokens, learned = chat_encoder(tokenizer, str(tmp_path / "tagged.jinja"))(CHAT)
    assert [tokens.tolist(), learned.astype(int).tolist()] == expected["mask"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_the_same_tokenizer(form, tmp_path):
    own = str(write(form, tmp_path / "own"))
    (tmp_path / "again").mkdir()
    for name, content in tokenizer_files(own).files.items():
        (tmp_path / "again" / name).write_bytes(content)
    both = load_tokenizer(own), load_tokenizer(str(tmp_path / "again"))
    ours, again = ([one.document(x).tolist() for x in one.encode(TEXTS)] for one in both)
    assert ours == again
    assert both[0].templates == both[1].templates


@pytest.mark.stress
@pytest.mark.parametrize("form", FORMS)
def test_what_is_pinned_is_what_transformers_makes(form, tmp_path):
    pytest.importorskip("transformers", minversion="5.0")
    if form.endswith(".model"):
        pytest.importorskip("sentencepiece")
    assert theirs(form, tmp_path / "own") == EXPECTED[form]


# Whatever else turns text into tokens calls `Tokenizer.prompt`, which begins as documents do.
ENCODERS = {
    "launcher.recipes.protocols",  # prompts
    "launcher.recipes.datasets.documents.prepare",  # documents
    "launcher.recipes.data.corpus.tokenizers",  # of which these are made
    "launcher.recipes.data.corpus.tokenizer_files",  # the number of a special token
}


def test_nobody_else_encodes_texts():
    found = {
        name
        for name, module in house.modules().items()
        for node in module.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".encode")
        if any(not isinstance(argument, ast.Constant) for argument in node.args)  # no str.encode
    }
    assert found == ENCODERS


def prepared(tmp_path):
    folder = write("llama3", tmp_path / "own")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one two ones " * 9}) + "\n")
    work = Documents(path=str(tmp_path / "a.jsonl"), tokenizer=str(folder), validation_fraction=0.0)
    prepare_corpus(work, 1)
    return work


# Of each family of datasets with a tokenizer, one whose first row is the text's beginning.
TEXT_FAMILIES = {
    "documents": prepared,
    "tokens": lambda tmp_path: Tokens(path=prepared(tmp_path).folder, validation_fraction=0.0),
    "mixture": lambda tmp_path: Mixture(
        parts={"a": {"path": prepared(tmp_path).folder}}, validation_fraction=0.0
    ),
    "text": lambda tmp_path: prepared(tmp_path) and Text(path=str(tmp_path / "a.jsonl")),
    "stdlib_text": lambda tmp_path: StdlibText(),
}
FAMILIES = [
    name
    for name, options in find_datasets().items()
    if hasattr(import_module(builder_of(options)), "tokenizer")
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_begins_as_the_rows_of_every_dataset_do(name, tmp_path):
    options = TEXT_FAMILIES[name](tmp_path)
    model = load(
        ["model=gpt", "dataset=synthetic", "model.sequence_length=8", "model.vocab_size=300"]
    ).model
    tokenizer, train = tokenizer_of(options), build_dataset(options, model, 1, 0).train
    begin = list(tokenizer.begin)
    rows = (train(k)["tokens"][0].tolist() for k in range(6))  # all of the text
    row = next(row for row in rows if row[: len(begin)] == begin)
    text = tokenizer.decode(row[len(begin) :])
    assert encoded(tokenizer, text, SimpleNamespace(model=model)) == row
