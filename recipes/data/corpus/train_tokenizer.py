"""Train a tokenizer on documents, by the library `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.base import write_whole
from launcher.recipes.data.corpus.documents import documents_in
from launcher.recipes.data.corpus.prepare import Preparation
from launcher.recipes.data.corpus.sources import find_sources, pieces_of

_END = "<|endoftext|>"


def train_tokenizer(work: Preparation, vocab_size: int, path: Path) -> int:
    """Write a byte-level BPE, as GPT-2's, as a `tokenizer.json`, and return its size.

    (Sennrich et al., 2016, "Neural Machine Translation of Rare Words with Subword Units"; Radford
    et al., 2019, for bytes.) `<|endoftext|>` is one of its tokens.

    Args:
        work: the documents, by the same settings as for preparing them.
        vocab_size: the most tokens.
        path: the file to write.

    Raises:
        InputError: the documents cannot be used.
        OSError: a file cannot be read or written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_texts(work), trainer)
    write_whole(path, made.to_str(pretty=True))
    return int(made.get_vocab_size())


def _texts(work: Preparation) -> Iterator[str]:
    for group in pieces_of(find_sources(work.path, work.pattern, work.format), work.format):
        for piece in group:
            for found in documents_in(piece, work.format, work.field):
                if isinstance(found.value, str):
                    yield found.value
                elif found.value is not None:
                    yield from (message["content"] for message in found.value)
                elif work.bad == "refuse":
                    raise found.refusal(piece.path)
