"""A tokenizer's files as `transformers` loads them, beside the weights of a model."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from launcher.recipes.data.corpus.chat import template_text
from launcher.recipes.data.corpus.tokenizers import BYTES, file_in, load_tokenizer, tokenizer_path
from launcher.recipes.protocols import InputError

_TEMPLATE = "chat_template.jinja"
_SETTINGS = "tokenizer_config.json"
# What a tokenizer's folder may hold; a model's own files beside them are left there.
_KNOWN = (
    *("tokenizer.json", _SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *(_TEMPLATE, "vocab.json", "merges.txt", "tokenizer.model"),
)
_END = "<|endoftext|>"


class TokenizerFiles(NamedTuple):
    """A tokenizer to write beside a model.

    Attributes:
        files: the content of each file, by its name.
        special: what `config.json` says of it: the numbers of special tokens, or None.
        mask_token: the mask for tokens to be filled in, if any.
    """

    files: dict[str, bytes]
    special: dict[str, int | None]
    mask_token: int | None = None


def tokenizer_files(
    name: str, chat_template: str | None = None, ends_documents: bool = True
) -> TokenizerFiles:
    """Return the files of the tokenizer that `dataset.tokenizer` names.

    Args:
        name: as `load_tokenizer` takes it.
        chat_template: the one that was trained on, as `dataset.chat_template` names it; None: the
            tokenizer's own.
        ends_documents: of `bytes`, whether a token beyond the bytes ends a document.

    Raises:
        InputError: it is not there, cannot be read, or has no form there.
    """
    found = _bytes_files(ends_documents) if name == BYTES else _copied(name)
    if chat_template is not None:
        found.files[_TEMPLATE] = template_text(load_tokenizer(name), chat_template).encode()
    return found


def _copied(name: str) -> TokenizerFiles:
    loaded = load_tokenizer(name)
    path = tokenizer_path(name)
    if path.suffix == ".tiktoken":
        raise InputError(f"{name} holds tiktoken's ranks, which transformers does not load")
    file = file_in(path) if path.is_dir() else path
    files = {f"tokenizer{file.suffix}": file.read_bytes()}
    if file.name in _KNOWN:
        beside = (path for path in file.parent.iterdir() if path.name in _KNOWN and path != file)
        files |= {path.name: path.read_bytes() for path in beside}
    if _SETTINGS not in files:
        roles = {"eos_token": loaded.end_token, "mask_token": loaded.mask_token}
        names = {role: loaded.decode([n]) for role, n in roles.items() if n is not None}
        files[_SETTINGS] = _settings(loaded.special | names)
    ids: dict[str, int | None] = {"eos_token_id": loaded.end_token}
    for role in ("bos", "pad"):
        found = loaded.encode([loaded.special.get(f"{role}_token", "")])[0].tolist()
        ids[f"{role}_token_id"] = found[0] if len(found) == 1 else None
    return TokenizerFiles(files, ids, loaded.mask_token)


def _bytes_files(ends_documents: bool) -> TokenizerFiles:
    """Return a byte-level BPE without merges, whose tokens are numbered as the bytes are."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(_byte_letters(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if ends_documents:
        tokenizer.add_special_tokens([AddedToken(_END, normalized=False)])
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        _SETTINGS: _settings({"eos_token": _END} if ends_documents else {}),
    }
    end = 256 if ends_documents else None
    return TokenizerFiles(files, {"bos_token_id": None, "pad_token_id": None, "eos_token_id": end})


def _byte_letters() -> dict[str, int]:
    """Return the byte of every letter in a byte-level BPE.

    Printable bytes are their own letters; the others are those from U+0100 on (GPT-2's way).
    """
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = (byte for byte in range(256) if byte not in own.values())
    return own | dict(zip(letters[len(own) :], others, strict=True))


def _settings(special: dict[str, str]) -> bytes:
    """Return `tokenizer_config.json` with special tokens by their roles."""
    tree: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    return (json.dumps(tree, indent=2) + "\n").encode()
