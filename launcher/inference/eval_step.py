"""The evaluation step: a pure function of a model's state and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from launcher.recipes.checked_model import Metrics, checked_loss
from launcher.trace import microbatched

if TYPE_CHECKING:
    from launcher.recipes import Batch, Model


def make_eval_step(model: Model) -> Callable[[Any, Batch], Metrics]:
    """Return a function `(TrainState.model, batch) -> metrics`, without dropout.

    `metrics` holds `loss` and what the model adds. If that is a `weight`, each of the others comes
    with it as `[value, weight]`, so that both are where the one is. The model's state stays as it
    is.
    """

    def evaluate(of_model: dict[str, Any], batch: Batch) -> Metrics:
        params, model_state = of_model["params"], of_model.get("model_state")
        loss, (extra, _) = checked_loss(model)(params, model_state, batch, None)
        return {**extra, "loss": loss}

    def weighted(of_model: dict[str, Any], batch: Batch) -> Metrics:
        metrics = dict(microbatched(evaluate)(of_model, batch))
        if "weight" not in metrics:
            return metrics
        weight = metrics.pop("weight")
        return {name: jnp.stack([value, weight]) for name, value in metrics.items()}

    return weighted
