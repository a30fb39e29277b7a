"""Metadata of a folder of prepared tokens, `meta.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.base import write_whole
from launcher.recipes import InputError

META = "meta.json"
_FORMAT = 1
_COUNTS = ("tokens", "documents", "skipped", "text_bytes")  # of all parts, for people


@dataclass(frozen=True)
class TokenPart:
    """One token file: `<name>.bin`, and `<name>.ends` where its documents end.

    Attributes:
        name: the files' name.
        key: a digest of what it was made of: source, tokenizer, settings.
        tokens: the number of tokens.
        documents: the number of documents.
        skipped: the number of bad documents that were left out.
        first_bad: the first of them, and why.
        digest: of the tokens, SHA-256.
        text_bytes: the length of the documents as UTF-8, of which `<name>.bytes` has where each
            ends; None: they are conversations, or it was not counted.
    """

    name: str
    key: str
    tokens: int
    documents: int
    skipped: int
    first_bad: str
    digest: str
    text_bytes: int | None = None


@dataclass(frozen=True)
class CorpusMeta:
    """A folder of prepared tokens.

    Attributes:
        tokenizer: what was named as the tokenizer.
        tokenizer_fingerprint: of its file.
        vocab_size: the number of its tokens.
        end_token: what ends a document; None: nothing does.
        dtype: of a token.
        masked: whether `<part>.mask` says which tokens are to be learned.
        source: a digest of the names, sizes and times of the source files.
        settings: how documents were read.
        parts: the token files.
        fingerprint: of the content, all tokens.
        mask_token: the tokenizer's that stands for tokens to be filled in; None: it has none.
    """

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    end_token: int | None
    dtype: np.dtype
    masked: bool
    source: str
    settings: str
    parts: tuple[TokenPart, ...]
    fingerprint: str
    mask_token: int | None = None

    @property
    def tokens(self) -> int:
        """The number of all tokens."""
        return sum(part.tokens for part in self.parts)

    @property
    def documents(self) -> int:
        """The number of all documents."""
        return sum(part.documents for part in self.parts)

    @property
    def text_bytes(self) -> int | None:
        """The length of all documents as UTF-8; None: it is not known of all."""
        sizes = [part.text_bytes for part in self.parts]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    @property
    def skipped(self) -> int:
        """The number of all bad documents that were left out."""
        return sum(part.skipped for part in self.parts)


def write_meta(root: Path, meta: CorpusMeta) -> None:
    """Write `meta.json`, whole or not at all."""
    counts = {name: getattr(meta, name) for name in _COUNTS}
    tree = {"format": _FORMAT, **asdict(meta), "dtype": meta.dtype.name, **counts}
    write_whole(root / META, json.dumps(tree, indent=1) + "\n")


def read_meta(root: Path, source: str) -> CorpusMeta:
    """Read a folder's `meta.json`.

    Raises:
        InputError: it is damaged, or of another version.
    """
    try:
        tree: dict[str, Any] = json.loads((root / META).read_text())
        if tree.pop("format") != _FORMAT:
            raise ValueError("it was written by another version")
        for count in _COUNTS:
            tree.pop(count, None)
        parts = tuple(TokenPart(**part) for part in tree.pop("parts"))
        return CorpusMeta(**(tree | {"dtype": np.dtype(tree["dtype"]), "parts": parts}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{source}: {root / META} is damaged ({error}); run task=prepare_data again"
        ) from None
