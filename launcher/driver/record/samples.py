"""Samples of a run: texts by its model, shown and stored during training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.base import problem_of, without_control, write_whole
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.callback import Callback
from launcher.driver.record.step_log import is_evaluated
from launcher.driver.tasks.generate import decoded_after, default_prompt, encoded
from launcher.recipes import InputError, Tokenizer, tokenizer_of
from launcher.recipes.models.decoding import build_decoder
from launcher.train.sampling import Sample

FOLDER = "samples"  # in the run's folder
LARGEST = 2**31  # bytes of parameters that are moved for a sample nobody asked for
MOST_LINES = 12  # of a text on the console
_MOST_ROWS = 100  # of the table that trackers get

_log = logging.getLogger(__name__)


class Samples(Callback):
    """Decides when the model writes samples, shows and stores them.

    Args:
        config: the run's settings.
        folder: the run's.
        num_parameters: the model's.
        say: prints a line.
        table: takes a table, for trackers.

    Attributes:
        unsaid: lines to show at the run's end, those of the sample after the last step.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        num_parameters: int,
        say: Callable[[str], object],
        table: Callable[[str, Sequence[str], Sequence[Sequence[object]]], object],
    ) -> None:
        self._config, self._folder, self._say, self._table = config, folder, say, table
        self._bytes = 4 * num_parameters
        self._tokenizer: Tokenizer | None = None
        self._texts: list[str] = []
        self._rows: list[tuple[int, str]] = []
        self._can: bool | None = None
        self.prompts: list[list[int]] = []
        self.most = 0
        self.unsaid: list[str] = []

    def is_due(self, step: int) -> bool:
        """Return whether the model is to write after `step`."""
        train, every = self._config.train, self._config.train.sample_every
        if every is None:
            due = is_evaluated(step, train)
        else:
            due = every > 0 and (step % every == 0 or step == train.steps)
        if due and self._can is None:
            self._can = self._prepare()
        return due and bool(self._can)

    def take(self, sample: Sample) -> None:
        """Show and store a sample and pass it to the trackers; a failure is a warning."""
        try:
            if sample.problem:
                self._can = False  # it would be the same each time
                _log.warning(f"the model writes no samples ({sample.problem}); the run continues")
            else:
                self._take(sample)
        except Exception as error:  # of any class: the tokenizer may be the user's
            _log.warning(
                f"the sample after step {sample.step} cannot be shown ({problem_of(error)}); "
                "the run continues"
            )

    def _take(self, sample: Sample) -> None:
        assert self._tokenizer is not None
        said = [f"sample after step {sample.step}:"]
        self._rows = [row for row in self._rows if row[0] < sample.step]  # made again
        for begun, prompt, tokens in zip(self._texts, self.prompts, sample.tokens, strict=True):
            end = self._tokenizer.end_token
            kept = tokens[: tokens.index(end)] if end in tokens else tokens
            text = f"{begun}{decoded_after(begun, prompt, self._tokenizer, kept)}"
            self._rows.append((sample.step, text))
            said += [f"  {line}" for line in printable(text)[:MOST_LINES]]
        texts = [text for step, text in self._rows if step == sample.step]
        folder = self._folder / FOLDER
        try:
            folder.mkdir(exist_ok=True)
            write_whole(folder / f"{sample.step}.txt", "\n\n".join(texts) + "\n", durable=False)
        except OSError as error:
            _log.warning(f"the sample is not kept ({error.strerror}); the run continues")
        self._rows = self._rows[-_MOST_ROWS:]
        self._table(FOLDER, ("step", "text"), self._rows)
        if sample.step < self._config.train.steps:
            self._show(said)
        else:
            self.unsaid = said

    def on_end(self, step: int, reason: str) -> None:
        """Show the sample after the last step, if it has not been shown."""
        self._show(["", *self.unsaid] if self.unsaid else [])
        self.unsaid = []

    def _show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(line)

    def _prepare(self) -> bool:
        """Return whether the model can write samples, and prepare their prompts."""
        config = self._config
        asked = config.train.sample_every is not None
        if self._bytes > LARGEST and not asked:
            _log.info(
                f"no samples: the model has {self._bytes / 2**30:.1f} GiB of parameters, which "
                "would be moved for each; train.sample_every=… asks for them all the same"
            )
            return False
        try:
            self._tokenizer = tokenizer_of(config.dataset)
            decoder = build_decoder(config.model, config.train.precision)
            self._texts = config.prompt or [default_prompt(self._tokenizer)]
            self.prompts = [list(encoded(self._tokenizer, text, config)) for text in self._texts]
        except (InputError, ConfigError) as error:
            if asked:
                _log.info(f"no samples: {error}")
            return False
        except Exception as error:  # of any class: decoder and tokenizer may be the user's
            _log.warning(f"no samples: {problem_of(error)}; the run continues")
            return False
        # Longer texts would have to be read anew.
        longest = max(len(prompt) for prompt in self.prompts)
        self.most = max(1, min(config.generate.max_new_tokens, decoder.length - longest))
        return True


def printable(text: str) -> list[str]:
    """Return the lines of a text, without terminal control sequences."""
    return without_control(text.expandtabs(4)).split("\n")
