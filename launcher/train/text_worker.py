"""A worker that goes on with texts, together with the others of a run's plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from launcher.cluster.process_group import Peer
from launcher.config.compose import from_dict
from launcher.train.checkpoint import FinishedModel
from launcher.train.text_layout import TextLayout
from launcher.train.text_model import TextModel
from recipes.decoding import Sampling


class TextWorker(Peer):
    """Generates by a checkpoint on this process's devices: `begin`, then `more` for each token."""

    def begin(
        self,
        settings: dict[str, Any],
        source: str,
        layout: TextLayout,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """Read the model of a checkpoint, and get ready to go on with prompts.

        Args:
            settings: the run's, but for `generate`, which says how.
            source: the checkpoint.
            layout: where its parameters lie.
            prompts: the tokens of each.

        Raises:
            Mismatch: the checkpoint cannot be read.
            InputError: the model has no decoder.
        """
        config = from_dict(settings)
        asked = config.generate
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
        model = TextModel(config, layout, sampling, jax.devices())
        params = model.load(FinishedModel(Path(source), config.optimizer.lora, asked.ema))
        self._tokens = model.generate(params, prompts, asked.max_new_tokens, asked.seed)

    def more(self) -> list[int] | None:
        """Return the next token of each prompt; None behind the last."""
        found = next(self._tokens, None)
        return None if found is None else found.tolist()
