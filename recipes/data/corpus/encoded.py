"""The documents of the source as tokens, and how bad ones are treated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from launcher.recipes import InputError
from launcher.recipes.data.corpus.chat import Encoded, chat_encoder
from launcher.recipes.data.corpus.documents import FoundDocument, documents_in
from launcher.recipes.data.corpus.sources import SourcePiece
from launcher.recipes.data.corpus.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from launcher.recipes.data.corpus.prepare import Preparation

_AT_ONCE = 256  # documents that are tokenised in one call


class EncodedDocument(NamedTuple):
    """A document's tokens.

    Attributes:
        tokens: with the one that ends it, if the tokenizer has one.
        text_bytes: how long the text is as UTF-8; None: it is a conversation.
        learned: which tokens are to be learned; None: all.
    """

    tokens: np.ndarray
    text_bytes: int | None
    learned: np.ndarray | None = None


class BadDocuments:
    """Refuses bad documents, or counts them, as `dataset.bad` says.

    Args:
        refuse: whether the first one is an error.
    """

    def __init__(self, refuse: bool) -> None:
        self._refuse, self.count, self.first = refuse, 0, ""

    def add(self, path: str, found: FoundDocument) -> None:
        """Count a bad document; raises InputError if they are refused."""
        if self._refuse:
            raise found.refusal(path)
        self.count += found.lost
        self.first = self.first or found.problem(path)


@functools.lru_cache(1)
def _encoder(name: str, template: str | None) -> tuple[Tokenizer, Callable[[Any], Encoded]]:
    tokenizer = load_tokenizer(name)
    made: list[Callable[[Any], Encoded]] = []

    def chat(messages: Any) -> Encoded:
        made[:] = made or [chat_encoder(tokenizer, template)]
        return made[0](messages)

    return tokenizer, chat


def encoded_documents(
    work: Preparation, piece: SourcePiece, bad: BadDocuments
) -> Iterator[EncodedDocument]:
    """Yield the documents of a piece as tokens.

    Raises:
        InputError: one is bad, and such are refused.
        OSError: the file cannot be read.
    """
    tokenizer, chat = _encoder(work.tokenizer, work.chat_template)
    end = np.array([] if tokenizer.end_token is None else [tokenizer.end_token], np.int64)
    waiting: list[FoundDocument] = []

    def flush() -> Iterator[EncodedDocument]:
        made = tokenizer.encode([one.value for one in waiting])
        for one, tokens in zip(waiting, made, strict=True):
            if len(tokens):
                yield EncodedDocument(np.concatenate([tokens, end]), len(one.value.encode()))
            else:
                bad.add(piece.path, replace(one, why="it has no token"))
        waiting.clear()

    for found in documents_in(piece, work.format, work.field):
        if found.value is None:
            bad.add(piece.path, found)
        elif isinstance(found.value, str):
            waiting.append(found)
            if len(waiting) == _AT_ONCE:
                yield from flush()
        else:
            yield from flush()
            try:
                tokens, learned = chat(found.value)
            except InputError:
                raise
            except ValueError as error:
                bad.add(piece.path, replace(found, why=str(error)))
                continue
            # The end of the last answer is to be learned as well.
            last = np.full(len(end), learned[-1])
            both = np.concatenate([tokens, end]), np.concatenate([learned, last])
            yield EncodedDocument(both[0], None, both[1])
    yield from flush()
