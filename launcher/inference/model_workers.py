"""Workers that generate text with a finished model, or evaluate it, together.

Each has `begin`, which reads its share of the model, and then `more` for each answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from launcher.checkpoint import FinishedModel
from launcher.cluster.process_group import Peer
from launcher.config.reader import from_dict
from launcher.config.schema import Config
from launcher.inference.eval_step import make_eval_step
from launcher.inference.placed_model import ModelLayout, ModelPlaces, put, text_generator
from launcher.recipes import Dataset, build_dataset, build_model

# The mean of each metric with its weight, and the number of rows.
Means = tuple[dict[str, tuple[float, float]], int]


class TextWorker(Peer):
    """Continues texts."""

    def begin(
        self,
        settings: dict[str, Any],
        source: str,
        layout: ModelLayout,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """Read the model of a checkpoint, and prepare to continue prompts.

        Args:
            settings: the run's, but for `generate`, which says how.
            source: the checkpoint.
            layout: where its model lies.
            prompts: the tokens of each.

        Raises:
            Mismatch: the checkpoint cannot be read.
            InputError: the model has no decoder.
        """
        config = from_dict(settings)
        places = ModelPlaces(layout, jax.devices())
        generate = text_generator(config, places)
        stored = FinishedModel(Path(source), config.optimizer.lora, config.generate.ema)
        params = places.load(stored)["params"]
        self._tokens = generate(params, prompts, config.generate.max_new_tokens)

    def more(self) -> list[int] | None:
        """Return the next token of each prompt; None behind the last."""
        found = next(self._tokens, None)
        return None if found is None else found.tolist()


class EvaluationWorker(Peer):
    """Evaluates a model on held-out rows."""

    def begin(
        self, settings: dict[str, Any], source: str, layout: ModelLayout, batches: int, rows: int
    ) -> None:
        """Read the model of a checkpoint, and get ready to evaluate it.

        Args:
            settings: the task's, with the run's optimizer.
            source: the checkpoint.
            layout: where its model lies.
            batches: the batches to evaluate on.
            rows: the rows that are evaluated together; each device has all of them.

        Raises:
            Mismatch: the checkpoint cannot be read.
            InputError: the data cannot be used.
        """
        config = from_dict(settings)
        places = ModelPlaces(layout, jax.devices())
        stored = FinishedModel(Path(source), config.optimizer.lora, config.evaluate.ema)
        model = places.load(stored)
        size = config.train.global_batch_size
        dataset = build_dataset(config.dataset, config.model, size, config.run.seed)
        self._found = _means(config, dataset, model, places, batches, rows)

    def more(self) -> list[Means] | None:
        """Return what a batch comes to, piece by piece; None behind the last batch."""
        return next(self._found, None)


def _means(
    config: Config, dataset: Dataset, model: Any, places: ModelPlaces, batches: int, rows: int
) -> Iterator[list[Means]]:
    """Yield what each held-out batch comes to, by pieces of `rows` rows."""
    precision, capability = config.train.precision, places.compute_capability
    step = make_eval_step(build_model(config.model, precision, capability))
    compiled = jax.jit(step, out_shardings=places.whole)
    assert dataset.validation is not None
    for number in range(batches):
        batch = dataset.validation(number)
        count = len(jax.tree.leaves(batch)[0])
        if count == 0:
            return
        found = []
        for first in range(0, count, rows):
            piece = jax.tree.map(lambda x, i=first: put(x[i : i + rows], places.whole), batch)
            here = min(rows, count - first)
            values = jax.tree.map(lambda x: x.addressable_data(0), compiled(model, piece))
            found.append((_weighed(jax.device_get(values), here), here))
        yield found


def _weighed(values: dict[str, np.ndarray], count: int) -> dict[str, tuple[float, float]]:
    """Return each mean with its weight: the model's own, or the number of rows."""
    found = {}
    for name, value in values.items():
        mean, *weight = np.ravel(value).astype(float)
        found[name] = (float(mean), float(weight[0]) if weight else float(count))
    return found
