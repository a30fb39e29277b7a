"""Sample text from a model during its training, under any plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from launcher.arrays.stacked_array import StackedArray
from launcher.base import problem_of
from launcher.checkpoint.train_state import (
    adapted_kernel,
    adapters_of,
    flat_name,
    map_named,
    without_adapters,
)
from launcher.config.schema import Config
from launcher.inference.placed_model import ModelPlaces, everywhere, layout_of, text_generator
from launcher.plan import Plan
from launcher.recipes.models.decoding import Generator


@dataclass(frozen=True)
class Sample:
    """What a model has written. Plain data, that is pickled.

    Attributes:
        step: after which step.
        tokens: what follows each prompt.
        problem: why there is nothing, in a line; "" where there is.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...] = ()
    problem: str = ""


class Sampler:
    """Continues prompts with the current parameters; its programs are compiled once.

    The parameters are copied to where they lie for `task=generate`, as the plan shards them. One
    array, of a stack of layers one layer, is gathered at a time, and no process holds the whole
    model. All processes of a group call it together.

    Args:
        config: the run's settings, whose section `generate` says how to draw.
        plan: the plan.
    """

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config, self._plan = config, plan
        self._model: tuple[ModelPlaces, Generator] | None = None

    def sample(self, step: int, params: Any, prompts: Sequence[Sequence[int]], most: int) -> Sample:
        """Return the sample after `step`, or why there is none: that ends no training.

        Args:
            step: the newest step.
            params: as `__call__` takes them, and so are the others.
            prompts: the tokens of each prompt.
            most: how many tokens to write.
        """
        try:
            return Sample(step, self(params, prompts, most))
        except Exception as error:  # of any class: the decoder may be the user's
            of_this_process = isinstance(error, jax.errors.JaxRuntimeError | MemoryError)
            if of_this_process and jax.process_count() > 1:
                raise  # the others may wait for this one; what is in the code all of them meet
            return Sample(step, problem=problem_of(error))

    def __call__(
        self, params: Any, prompts: Sequence[Sequence[int]], most: int
    ) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that follow each prompt; none in a process without devices for that.

        Args:
            params: the parameters, wherever they lie, and adapters.
            prompts: the tokens of each prompt.
            most: how many tokens to write.
        """
        placed = self.placed(params)
        assert self._model is not None
        if not self._model[0].whole.addressable_devices:
            return ()
        rows = list(self._model[1](placed, prompts, most))
        return tuple(tuple(int(token) for token in column) for column in zip(*rows, strict=True))

    def placed(self, params: Any) -> Any:
        """Return the parameters, adapters added, where they are read; None elsewhere."""
        own, adapters = without_adapters(params), adapters_of(params)
        if self._model is None:
            leaves = jax.tree_util.tree_leaves_with_path(own)
            shapes = {f"params.{flat_name(path)}": leaf.shape for path, leaf in leaves}
            layout = layout_of(self._plan, shapes, jax.device_count())
            places = ModelPlaces(layout, jax.devices())
            self._model = places, text_generator(self._config, places)
        places, _ = self._model
        return map_named(
            lambda name, leaf: places.place(
                f"params.{name}", leaf.shape, leaf.dtype, self._pieces(leaf, adapters.get(name))
            ),
            own,
        )

    def _pieces(
        self, leaf: Any, adapter: tuple[Any, Any] | None
    ) -> Iterator[tuple[int | None, np.ndarray]]:
        """Yield the value of a parameter, its adapter added; of a stack, a row at a time."""
        lora = self._config.optimizer.lora
        factors = [everywhere(factor) for factor in adapter or ()]
        stacked = isinstance(leaf, StackedArray)
        for number, part in enumerate(leaf.rows) if stacked else [(None, leaf)]:
            value = everywhere(part)
            if factors:
                a, b = factors if number is None else (factor[number] for factor in factors)
                value = adapted_kernel(value, a, b, lora)
            yield number, value
