"""What a model writes in the middle of a training, under any plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from launcher.config.schema import Config
from launcher.plan import Plan
from launcher.stacked_array import StackedArray
from launcher.train.lora import merge
from launcher.train.names import flat_name
from launcher.train.text_layout import layout_of
from launcher.train.text_model import TextModel, everywhere
from recipes.decoding import Sampling


@dataclass(frozen=True)
class Sample:
    """What a model has written. Plain data, that is pickled.

    Attributes:
        step: after which step.
        tokens: what follows each prompt.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]


class Sampler:
    """Goes on with prompts by the parameters of a training; its programs are compiled once.

    Parameters are gathered, so that each process holds all of them for a moment, and lie as for
    `task=generate`: as the plan shards them. All processes of a group call it together.

    Args:
        config: the run's settings, whose section `generate` says how to draw.
        plan: the plan.
    """

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config, self._plan = config, plan
        self._model: TextModel | None = None
        self._takes_part = True

    def __call__(
        self, params: Any, prompts: Sequence[Sequence[int]], most: int
    ) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that follow each prompt; none in a process without devices for that.

        Args:
            params: the parameters, wherever they lie, and adapters.
            prompts: the tokens of each prompt.
            most: how many tokens to write.
        """
        asked, devices = self._config.generate, jax.devices()
        whole = jax.tree.map(everywhere, params, is_leaf=lambda x: isinstance(x, StackedArray))
        whole = merge(whole, self._config.optimizer.lora)
        if self._model is None:
            leaves = jax.tree_util.tree_leaves_with_path(whole)
            shapes = {f"params.{flat_name(path)}": np.shape(leaf) for path, leaf in leaves}
            layout = layout_of(self._plan, shapes, len(devices))
            used = devices[: layout.num_devices]
            self._takes_part = any(d.process_index == jax.process_index() for d in used)
            sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
            self._model = TextModel(self._config, layout, sampling, devices)
        if not self._takes_part:
            return ()
        placed = self._model.place(whole)
        rows = list(self._model.generate(placed, prompts, most, asked.seed))
        return tuple(tuple(int(token) for token in column) for column in zip(*rows, strict=True))
