"""Tokens of documents and of conversations are those that `transformers` makes, of every form.

pip install transformers
pytest -m stress tests/recipes/corpus/test_forms.py
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tokenizer_forms import CHAT, FORMS, PINNED, TAGGED, TEXTS, theirs, write

from launcher.recipes.data.corpus.chat import chat_encoder
from launcher.recipes.data.corpus.tokenizer_files import tokenizer_files
from launcher.recipes.data.corpus.tokenizers import load_tokenizer

EXPECTED = json.loads(PINNED.read_text())


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
