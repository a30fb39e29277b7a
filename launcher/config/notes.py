"""Note what a user should know about settings that are allowed. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.schema import Config, GPTOptions, StdlibText, Text

BYTES = 256  # text is read as bytes: the vocabulary that it needs


def notes(config: Config) -> Iterator[str]:
    """Yields what a user should know, each in one line with what to do about it."""
    model, dataset = config.model, config.dataset
    if isinstance(model, GPTOptions) and isinstance(dataset, StdlibText | Text):
        rows = model.vocab_size or BYTES
        if rows > BYTES:
            yield (
                f"dataset={dataset.name} is bytes: {rows - BYTES:,} of the model's {rows:,} "
                f"vocabulary rows are unused; model.vocab_size={BYTES} leaves them out"
            )
