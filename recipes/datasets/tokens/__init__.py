"""The settings of token files, one corpus or a mixture of several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config.errors import ConfigError
from launcher.config.families import HOLDS_OUT, DatasetOptions, ModelOptions, register, taken_by
from launcher.config.fields import Switch, choice, number

IS_PACKED = Switch(
    ("dataset.end_token",),
    ("dataset.packing",),
    lambda config: config.dataset.packing == "documents",
    "dataset.packing=stream takes no notice of documents",
    "use dataset.packing=documents",
)


@dataclass(frozen=True, kw_only=True)
class TokenRows(DatasetOptions):
    """Rows of tokens: what they ask of a model, and how they are made."""

    holds = ("text",)
    packing: str = choice("stream", "stream", "documents")
    bad: str = choice("refuse", "refuse", "skip")
    validation_fraction: float = number(0.05, minimum=0.0, maximum=0.9)

    def check(self, model: ModelOptions) -> Iterator[ConfigError]:
        """Yield an error for a model that takes no text, or one that attends across documents."""
        yield from super().check(model)
        if taken_by(model) == "text" and self.packing == "documents" and not model.keeps_documents:
            yield ConfigError(
                f"model={model.name} attends to all of a row, also where "
                "dataset.packing=documents packs several documents into one",
                "Use dataset.packing=stream, or model=gpt, llama or moe.",
                ["dataset.packing", "model.name"],
            )


@register
@dataclass(frozen=True, kw_only=True)
class Tokens(TokenRows):
    """Tokens: a folder that `task=prepare_data` wrote, or `.bin` and `.npy` files."""

    name: str = "tokens"
    path: str
    dtype: str = choice("auto", "auto", "uint16", "uint32")
    end_token: int | None = number(None, minimum=0)
    validation_path: str | None = None

    switches = (IS_PACKED, HOLDS_OUT)
