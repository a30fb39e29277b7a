"""`recipes/data/corpus/tokenizers.py` and `chat.py`, and tokenizers that are trained here."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest
import tiktoken

from launcher.recipes import InputError
from launcher.recipes.data.corpus.chat import chat_encoder
from launcher.recipes.data.corpus.files import find_corpus
from launcher.recipes.data.corpus.rows import RowMaker
from launcher.recipes.data.corpus.tokenizers import load_tokenizer, tokenizer_fingerprint
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import prepare_corpus, train_tokenizer

TEXT = "Hello world, it's 12345 o'clock — naïve Ωμέγα\n\n  def f(x):  return x"
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
    {"role": "user", "content": "ok"},
]


@pytest.fixture
def trained(tmp_path):
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": TEXT[i:] * 3}) + "\n" for i in range(20)))
    work = Documents(path=str(source))
    size = train_tokenizer(work, 300, tmp_path / "tokenizer.json")
    assert size == 300
    return tmp_path / "tokenizer.json"


def named(trained, kind):
    """The name of a tokenizer of each kind."""
    if kind == "tiktoken":
        path = trained.with_name("small.tiktoken")
        tokens = [bytes([i]) for i in range(256)] + [b"He", b"ll", b"Hell"]
        path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
        return str(path)
    return {"bytes": "bytes", "folder": str(trained.parent)}.get(kind, str(trained))


@pytest.mark.parametrize("kind", ["bytes", "file", "folder", "tiktoken"])
def test_every_tokenizer_gives_the_text_back(trained, kind):
    name = named(trained, kind)
    tokenizer = load_tokenizer(name)
    encoded = tokenizer.encode([TEXT, "x"])
    assert tokenizer.decode(encoded[0]) == TEXT
    assert len(encoded[1]) == 1
    assert max(encoded[0]) < tokenizer.vocab_size
    assert tokenizer.end_token in {"bytes": [256], "tiktoken": [259]}.get(kind, [0])
    assert tokenizer.fingerprint == tokenizer_fingerprint(name)
    if kind != "bytes":
        assert len(encoded[0]) < len(TEXT.encode())


@pytest.mark.parametrize("kind", ["bytes", "file", "tiktoken"])
def test_a_token_that_a_tokenizer_does_not_have_stands_as_one_character(trained, kind):
    tokenizer = load_tokenizer(named(trained, kind))
    one, two = (tokenizer.encode([text])[0].tolist() for text in ("He", "x"))
    unknown = tokenizer.vocab_size + 477  # of a model whose vocabulary is padded
    assert tokenizer.decode([unknown, *one, unknown, unknown, *two]) == "\ufffdHe\ufffd\ufffdx"
    assert tokenizer.decode(np.array([unknown])) == "\ufffd"
    assert tokenizer.decode([]) == ""


def test_bytes_are_text_and_half_a_character_is_none():
    encode, _, decode, *_ = load_tokenizer("bytes")
    tokens = encode(["a–b"])[0].tolist()
    assert tokens == [97, 226, 128, 147, 98]
    assert decode(tokens) == "a–b"
    assert decode(tokens[:3]) == "a\ufffd"
    assert decode([97, 300, 98, 256]) == "a\ufffdb"


def test_tiktokens_patterns_are_its_own():
    import inspect

    from tiktoken_ext import openai_public

    from launcher.recipes.data.corpus import tokenizers

    assert tokenizers._CUTS["r50k"] == openai_public.r50k_pat_str
    assert tokenizers._CUTS["cl100k"] in inspect.getsource(openai_public.cl100k_base)
    ours = tiktoken.Encoding(
        "x",
        pat_str=tokenizers._CUTS["o200k"],
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={},
    )
    assert ours.decode(ours.encode(TEXT)) == TEXT


def test_a_folders_special_tokens_and_template_are_taken(trained):
    settings = {"eos_token": {"content": "H"}, "bos_token": "<s>", "chat_template": "x"}
    (trained.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(trained.parent))
    assert tokenizer.decode([tokenizer.end_token]) == "H"
    assert tokenizer.special == {"eos_token": "H", "bos_token": "<s>"}
    assert tokenizer.templates == {"default": "x"}
    (trained.parent / "chat_template.jinja").write_text("y")
    assert load_tokenizer(str(trained)).templates == {"default": "y"}


def test_a_damaged_tokenizer_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(InputError, match=r"dataset\.tokenizer=.*tokenizer\.json cannot be read"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_answers_alone_are_learned(template):
    tokenizer = load_tokenizer("bytes")
    tokens, learned = chat_encoder(tokenizer, template)(TALK)
    end = "<|im_end|>\n" if template == "chatml" else "\n"
    assert tokenizer.decode(tokens[learned]) == f"hello{end}bye{end}"
    if template == "plain":
        assert tokenizer.decode(tokens) == (
            "user: hi\nassistant: hello\nuser: and?\nassistant: bye\nuser: ok\n"
        )


def test_bad_conversations_and_templates_are_refused():
    encode = chat_encoder(load_tokenizer("bytes"), "plain")
    with pytest.raises(ValueError, match="no message is the assistant's"):
        encode(TALK[:1])
    with pytest.raises(InputError, match="the tokenizer brings no chat template; name a file"):
        chat_encoder(load_tokenizer("bytes"), None)


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        ("{{ messages[0].tools[0] }}", ValueError, r"the chat template fails on it: .*tools"),
        ("{% for %}", InputError, r"t\.jinja: not a valid Jinja chat template \(.*; name another"),
    ],
)
def test_a_template_that_fails_is_named(template, error, said, tmp_path):
    (tmp_path / "t.jinja").write_text(template)
    with pytest.raises(error, match=said):
        chat_encoder(load_tokenizer("bytes"), str(tmp_path / "t.jinja"))(TALK)


def test_parts_of_text_are_joined_to_the_content_of_a_message(tmp_path):
    source, out = tmp_path / "a.jsonl", str(tmp_path / "out")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    talk = [TALK[0], {"role": "assistant", "content": parts}]
    source.write_text(json.dumps({"messages": talk}) + "\n")
    work = Documents(path=str(source), field="messages", chat_template="plain", tokens=out)
    meta = prepare_corpus(work, 1)
    tokens = find_corpus(out).tokens(0, meta.tokens - 1)
    assert load_tokenizer("bytes").decode(tokens.tolist()) == "user: hi\nassistant: hello\n"
    assert meta.text_bytes is None  # of conversations


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "user"}], "'messages' has no content that is text in message 1"),
        ([TALK[0], "hi"], "'messages' has no role that is text in message 2"),
        (
            [{"role": "user", "content": None}],
            "'messages' has no content that is text in message 1",
        ),
        (
            [TALK[0], {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "'messages' has a part of type 'image_url' in message 2; only text can be learned",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "'messages' has a part without text in message 1",
        ),
        (
            [{"role": "user", "content": "\ud800"}],
            r"'messages' has half of a surrogate pair (\ud800) at character 0 "
            "in message 1",
        ),
        (TALK[:1], "no message is the assistant's, so that nothing is to be learned"),
    ],
)
def test_a_bad_conversation_is_named_by_line_and_message(tmp_path, messages, why):
    source, out = tmp_path / "a.jsonl", str(tmp_path / "out")
    rows = [TALK, TALK, messages]
    source.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    work = Documents(path=str(source), field="messages", chat_template="plain", tokens=out)
    with pytest.raises(InputError) as error:
        prepare_corpus(work, 1)
    assert str(error.value).startswith(f"{source}, line 3: {why}; fix it")
    assert prepare_corpus(replace(work, bad="skip"), 1).skipped == 1


def test_a_prepared_conversation_weighs_its_answers_alone(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"messages": TALK}) + "\n")
    out = str(tmp_path / "out")
    work = Documents(path=str(source), field="messages", chat_template="plain", tokens=out)
    assert prepare_corpus(work, 1).masked
    corpus = find_corpus(out)
    maker = RowMaker(corpus, corpus.count - 1, 0, 257, masked=True)
    batch = maker(np.array([0]))
    learned = batch["targets"][0][batch["weights"][0] == 1]
    assert load_tokenizer("bytes").decode(learned) == "hello\nbye\n"
