"""Tokenizers that `dataset.tokenizer` names: Hugging Face's, tiktoken's, or bytes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.base import lacking, missing_path
from launcher.recipes.protocols import InputError, Tokenizer

BYTES = "bytes"
_END_OF_BYTES = 256
# Special tokens that a tokenizer's folder may not name: a mask, and the end of a document.
_MASKS = ("[MASK]", "<mask>")
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>")
# tiktoken's files hold ranks alone. Their number shows which pattern cuts the text, and which token
# <|endoftext|> is.
_RANKS = {50256: ("r50k", 50256), 100256: ("cl100k", 100257), 199998: ("o200k", 199999)}
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CUTS = {
    "r50k": (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"),
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k": (
        f"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def tokenizer_fingerprint(name: str) -> str:
    """Return a digest of the tokenizer that `name` names, by its file and without loading it."""
    if name == BYTES:
        return BYTES
    return hashlib.sha256(_file(name).read_bytes()).hexdigest()[:32]


def plain_bytes() -> Tokenizer:
    """Return what text read as bytes has for a tokenizer: nothing ends a document."""
    return _bytes()._replace(vocab_size=_END_OF_BYTES, end_token=None)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `name` names.

    Args:
        name: `bytes`; a `tokenizer.json`, or a folder with one; or a `.tiktoken` file.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    if name == BYTES:
        return _bytes()
    path = _file(name)
    try:
        return _tiktoken(path) if path.suffix == ".tiktoken" else _hugging_face(path)
    except InputError:
        raise
    except Exception as error:  # what the libraries raise is of no class of theirs
        raise InputError(
            f"dataset.tokenizer={name}: {path} cannot be read ({error}); name another"
        ) from None


def _file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(
            f"dataset.tokenizer={name}: {path} {missing_path(path)}; name a tokenizer.json, "
            "a folder with one, a .tiktoken file, or bytes"
        )
    return path


def _bytes() -> Tokenizer:
    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts]

    def decode(tokens: Sequence[int]) -> str:
        runs = itertools.groupby(tokens, lambda token: token < _END_OF_BYTES)
        return "".join(
            bytes(run).decode(errors="replace")
            if is_text
            else "\ufffd" * sum(token != _END_OF_BYTES for token in run)
            for is_text, run in runs
        )

    return Tokenizer(encode, decode, _END_OF_BYTES + 1, _END_OF_BYTES, BYTES)


def _hugging_face(path: Path) -> Tokenizer:
    import tokenizers  # here: checking settings must not load it

    found = tokenizers.Tokenizer.from_file(str(path))
    found.no_padding()
    found.no_truncation()
    settings = _settings(path.parent)
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }

    def number_of(role: str, usual: Sequence[str]) -> int | None:
        names = [special[role]] if role in special else usual
        numbers = (found.token_to_id(name) for name in names)
        return next((number for number in numbers if number is not None), None)

    template = path.parent / "chat_template.jinja"
    chat = template.read_text() if template.is_file() else settings.get("chat_template")

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        made = found.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in made]

    vocabulary = found.get_vocab(with_added_tokens=True)
    decode = functools.partial(found.decode, skip_special_tokens=False)
    return Tokenizer(
        encode,
        _total(decode, vocabulary.values()),
        max(vocabulary.values(), default=-1) + 1,
        number_of("eos_token", _ENDS),
        tokenizer_fingerprint(str(path)),
        chat if isinstance(chat, str) else None,
        special,
        number_of("mask_token", _MASKS),
    )


def _total(
    decode: Callable[[list[int]], str], known: Iterable[int]
) -> Callable[[Sequence[int]], str]:
    """Return `decode` for any tokens: those that are not known stand as U+FFFD.

    A model's vocabulary is often padded, so it may write numbers that its tokenizer does not have.
    """
    has = frozenset(known).__contains__

    def decode_any(tokens: Sequence[int]) -> str:
        runs = itertools.groupby((int(token) for token in tokens), has)
        return "".join(
            decode(list(run)) if is_known else "\ufffd" * len(list(run)) for is_known, run in runs
        )

    return decode_any


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def _tiktoken(path: Path) -> Tokenizer:
    import base64

    if command := lacking("tiktoken"):
        raise InputError(f"dataset.tokenizer={path} needs the package tiktoken; {command}")
    import tiktoken

    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    cut, end = _RANKS.get(len(ranks), ("cl100k", len(ranks)))
    found = tiktoken.Encoding(
        path.stem,
        pat_str=_CUTS[cut],
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": end},
    )

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(found.encode_ordinary(text), np.int64) for text in texts]

    return Tokenizer(
        encode,
        _total(found.decode, [*ranks.values(), end]),
        found.n_vocab,
        end,
        tokenizer_fingerprint(str(path)),
    )
