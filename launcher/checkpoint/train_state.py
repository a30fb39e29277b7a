"""The state of training: what a step takes and returns, and a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from launcher.checkpoint.names import rejoined

MODEL_PARTS = ("params", "model_state")  # what of a state is the model's, and an evaluation reads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of training, with its random key.

    Attributes:
        step: the number of finished steps, int32 [].
        params: the model's parameters.
        opt_state: the optimizer's state.
        key: `jax.random.key_data` of the run's random key, uint32. It holds the bits and not a
            typed key, so that every leaf is a plain array to store and to move.
        model_state: the model's state (`launcher.recipes.Model.has_state`); None if it has none.
        ema: an exponential moving average of the parameters that learn, None in the place of the
            others; None if none is kept.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array
    model_state: Any = None
    ema: Any = None

    @property
    def averaged(self) -> dict[str, Any]:
        """`model`, with the average of the parameters where one is kept."""
        if self.ema is None:
            return self.model
        return {**self.model, "params": rejoined(self.ema, self.params)}

    @property
    def model(self) -> dict[str, Any]:
        """The parts that are the model's, by their names."""
        parts = {name: getattr(self, name) for name in MODEL_PARTS}
        return {name: part for name, part in parts.items() if part is not None}
