"""A language model that goes on with texts on the devices of a layout.

All processes call the same methods with the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from launcher.config.schema import Config
from launcher.inference.placed_model import ModelPlaces
from launcher.recipes.models.decoding import Generator, Sampling, TextPlaces, build_decoder


class TextModel:
    """Goes on with texts; programs are compiled at first use and stay.

    Args:
        settings: the run's settings, whose section `generate` says how to draw.
        places: where the parameters lie.

    Raises:
        InputError: the model has no decoder.
    """

    def __init__(self, settings: Config, places: ModelPlaces) -> None:
        self._asked = asked = settings.generate
        decoder = build_decoder(settings.model, settings.train.precision)
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
        at = TextPlaces(places.whole, places.of_cache)
        self._generator = Generator(decoder, sampling, at)

    def generate(
        self, params: Any, prompts: Sequence[Sequence[int]], most: int
    ) -> Iterator[np.ndarray]:
        """Yield the next token of each prompt, `most` times; see `Generator`."""
        return self._generator(params, prompts, most, self._asked.seed)
