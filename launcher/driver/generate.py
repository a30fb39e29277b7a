"""`task=generate`: go on with texts, by the model of a run's checkpoint.

The model is read onto one device of this process, whatever plan has trained it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.stored_model import run_settings, stored_model
from launcher.output import answer
from launcher.report.console import status
from launcher.train import checkpoint
from recipes import users_function
from recipes.decoding import (
    ByteTokenizer,
    Sampling,
    Tokenizer,
    build_decoder,
    generate,
)

_LARGEST = 2**20  # bytes of a file of prompts


def generate_text(config: Config, console: Console) -> int:
    """Print how the model goes on with the prompts; return the exit code.

    A single prompt's text is printed as it is made.

    Raises:
        ConfigError: there is no such checkpoint, or the prompts cannot be used.
        InputError: the model has no decoder.
        OSError: a file cannot be read.
    """
    asked = config.generate
    source, home = stored_model(config, asked.step, asked.best, "generate")
    settings = run_settings(config, home)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what does not matter here
    tokenizer = tokenizer_of(settings)
    texts = _prompts(config)
    prompts = [_encoded(tokenizer, text, settings) for text in texts]
    decoder = build_decoder(settings.model, settings.train.precision)
    with status(console, f"reading {source}"):
        try:
            model = checkpoint.FinishedModel(source, settings.optimizer.lora, asked.ema).whole()
        except checkpoint.Mismatch as error:
            raise ConfigError(
                f"run.id={config.run.id} cannot generate: {source}: {error}", "", ["run.id"]
            ) from None
    params = jax.device_put(model["params"], jax.local_devices()[0])
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    tokens = generate(decoder, params, prompts, asked.max_new_tokens, sampling, asked.seed)
    if len(texts) == 1:
        return _stream(texts[0], tokenizer, (int(row[0]) for row in tokens))
    rows = np.array(list(tokens)).T
    for text, row in zip(texts, rows, strict=True):
        if code := answer(f"{text}{tokenizer.decode(row.tolist())}\n"):
            return code
    return 0


def tokenizer_of(settings: Config) -> Tokenizer:
    """Return what makes tokens of a run's texts.

    Raises:
        ConfigError: its data is no text.
    """
    if own := users_function("dataset", settings.dataset, "tokenizer"):
        made: Tokenizer = own()
        return made
    if settings.dataset.name not in ("text", "stdlib_text"):
        raise ConfigError(
            f"run.id={settings.run.id} has learned from dataset={settings.dataset.name}, which is "
            "no text to go on with",
            "Name a run with dataset=stdlib_text or text; the module of a dataset of your own says "
            "by tokenizer(options) how it makes tokens.",
            ["run.id"],
        )
    return ByteTokenizer()


def _stream(prompt: str, tokenizer: Tokenizer, tokens: Iterable[int]) -> int:
    """Print a prompt and what follows; a piece of text is printed when it is whole."""
    code, made, shown = answer(prompt, end=""), [], ""
    for token in tokens:
        if code:
            return code
        made.append(token)
        text = tokenizer.decode(made)
        whole = text.rstrip("\ufffd")  # the rest of a character may follow
        if len(whole) > len(shown):
            code, shown = answer(whole[len(shown) :], end=""), whole
    rest = tokenizer.decode(made)[len(shown) :]
    return code or answer(rest)


def _prompts(config: Config) -> list[str]:
    asked = config.generate
    if asked.prompts is None:
        return [asked.prompt]
    path = Path(asked.prompts).expanduser()
    if not path.is_file() or path.stat().st_size > _LARGEST:
        what = "is not a file" if not path.is_file() else f"has more than {_LARGEST:,} bytes"
        raise ConfigError(
            f"generate.prompts={asked.prompts} {what}",
            "Name a text file with a prompt a line.",
            ["generate.prompts"],
        )
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line]
    if not lines:
        raise ConfigError(
            f"generate.prompts={asked.prompts} holds no prompt",
            "Write one a line.",
            ["generate.prompts"],
        )
    return lines


def _encoded(tokenizer: Tokenizer, text: str, settings: Config) -> Sequence[int]:
    vocabulary: Any = getattr(settings.model, "vocab_size", None)
    tokens = tokenizer.encode(text)
    if vocabulary and tokens and max(tokens) >= vocabulary:
        raise ConfigError(
            f"generate.prompt has the token {max(tokens)}, and the model knows {vocabulary}",
            "Name the run's own tokenizer.",
            ["generate.prompt"],
        )
    return tokens
