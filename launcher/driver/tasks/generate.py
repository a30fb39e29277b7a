"""`task=generate`: continue texts by a run's checkpoint, on the run's own plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.base import answer, without_control
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.tasks.task import CheckpointTask
from launcher.inference.answers import model_answers
from launcher.inference.model_workers import TextWorker
from launcher.inference.stored_model import run_settings, stored_plan
from launcher.recipes import Tokenizer, tokenizer_of
from launcher.recipes.models.decoding import build_decoder
from launcher.report.console import RunConsole, status

_LARGEST = 2**20  # bytes of a file of prompts


class GenerateTask(CheckpointTask):
    """Continue texts by a run's checkpoint, on the run's own plan."""

    name, verb, answers = "generate", "generate", True

    def use(self, config: Config, console: RunConsole, source: Path, home: Path) -> int:
        """Print the prompts and their continuations.

        A single prompt's text is printed as it is made, several when all of them are. A text ends
        with the token that ends a document.

        Raises:
            ConfigError: there is no such checkpoint, or the prompts cannot be used.
            InputError: the model has no decoder, or its data is no text.
            OSError: a file cannot be read.
        """
        asked = config.generate
        settings = run_settings(config, home)
        build_decoder(settings.model, settings.train.precision)  # before any process is started
        tokenizer = tokenizer_of(settings.dataset)
        texts = _prompts(config, tokenizer)
        prompts = [encoded(tokenizer, text, settings) for text in texts]
        # The run's method may not fit this task's devices; its plan is all that is needed.
        given = replace(settings, generate=asked, cluster=config.cluster, parallel=config.parallel)
        asked_of = TextWorker, given, source, stored_plan(home), asked.ema, (prompts,), console
        with model_answers(*asked_of) as tokens:
            rows = _ended(tokens, tokenizer.end_token)
            with status(console, "compiling"):
                made = list(itertools.islice(rows, 1))
            if len(texts) == 1:
                following = (row[0] for row in itertools.chain(made, rows))
                return _stream(texts[0], prompts[0], tokenizer, following)
            with status(console, "writing") as advance:
                for row in rows:
                    made.append(row)
                    advance(len(made), asked.max_new_tokens, "tokens")
            return _print_all(texts, prompts, tokenizer, made)


def _print_all(
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    rows: Sequence[list[int]],
) -> int:
    """Print prompts and continuations; each row holds a token of each. Return the exit code."""
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        column = (row[number] for row in rows)
        made = list(itertools.takewhile(lambda token: token != tokenizer.end_token, column))
        following = decoded_after(text, prompt, tokenizer, made)
        if code := answer(f"{without_control(text + following)}\n"):
            return code
    return 0


def _ended(tokens: Iterable[list[int]], end_token: int | None) -> Iterator[list[int]]:
    """Yield tokens, those of all prompts, until all texts have ended."""
    open_rows: set[int] | None = None
    for row in tokens:
        open_rows = set(range(len(row))) if open_rows is None else open_rows
        open_rows -= {index for index, token in enumerate(row) if token == end_token}
        if not open_rows and len(row) == 1:
            return
        yield row
        if not open_rows:
            return


def _stream(text: str, prompt: Sequence[int], tokenizer: Tokenizer, tokens: Iterable[int]) -> int:
    """Print a prompt and its continuation, each piece of text as soon as it is complete."""
    code, made, shown = answer(without_control(text), end=""), [], ""
    for token in tokens:
        if code:
            return code
        made.append(token)
        following = decoded_after(text, prompt, tokenizer, made)
        whole = following.rstrip("\ufffd")  # the rest of a character may follow
        if len(whole) > len(shown):
            code, shown = answer(without_control(whole[len(shown) :]), end=""), whole
    rest = decoded_after(text, prompt, tokenizer, made)[len(shown) :]
    return code or answer(without_control(rest))


def decoded_after(
    text: str, prompt: Sequence[int], tokenizer: Tokenizer, made: Sequence[int]
) -> str:
    """Return the text of tokens that follow a prompt.

    Both are decoded together: some tokenizers drop the space that a text begins with.

    Args:
        text: the prompt's text; of "" the tokens stand alone.
        prompt: its tokens.
        tokenizer: their tokenizer.
        made: the tokens that follow.
    """
    if not text:
        return tokenizer.decode(made)
    return tokenizer.decode([*prompt, *made])[len(tokenizer.decode(prompt)) :]


def default_prompt(tokenizer: Tokenizer) -> str:
    """Return the default prompt; "" is the beginning of a document."""
    return "import " if tokenizer.end_token is None else ""


def _prompts(config: Config, tokenizer: Tokenizer) -> list[str]:
    """Return the texts to continue; "" is the beginning of a document."""
    path = config.generate.prompts
    if path is None:
        return config.prompt or [default_prompt(tokenizer)]
    file = Path(path).expanduser()
    if not file.is_file() or file.stat().st_size > _LARGEST:
        what = "is not a file" if not file.is_file() else f"has more than {_LARGEST:,} bytes"
        raise ConfigError(
            f"generate.prompts={path} {what}", "Name a text file with a prompt a line."
        )
    lines = [line for line in file.read_text("utf-8", "replace").splitlines() if line]
    if not lines:
        raise ConfigError(f"generate.prompts={path} holds no prompt", "Write one a line.")
    return lines


def encoded(tokenizer: Tokenizer, text: str, settings: Config) -> Sequence[int]:
    """Return the tokens of a prompt; raise ConfigError if the run's model does not know them."""
    vocabulary: Any = getattr(settings.model, "vocab_size", None)
    tokens = tokenizer.prompt(text)
    if not tokens and tokenizer.end_token is not None:
        tokens = [tokenizer.end_token]
    if not tokens:
        raise ConfigError("prompt holds an empty text", "Write what it begins with.")
    if vocabulary and max(tokens) >= vocabulary:
        raise ConfigError(
            f"prompt has the token {max(tokens)}, and the model knows {vocabulary}",
            "The run's tokenizer makes more tokens than its model takes.",
        )
    return tokens
