"""`task=evaluate`: a checkpoint's loss on held-out data, the run's own or another.

The model is read onto one device of this process, whatever plan has trained it.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.stored_model import refused, run_settings, stored_model
from launcher.files import write_whole
from launcher.report.console import status
from launcher.train import checkpoint
from launcher.train.step import make_eval_step
from recipes import Batches, Dataset, InputError, build_dataset, build_model

_OF_BYTES = "text", "stdlib_text"


def evaluate(config: Config, console: Console) -> int:
    """Print what the run's model comes to on held-out data, and write it; return the exit code.

    Raises:
        ConfigError: there is no such checkpoint.
        InputError: the data cannot be used, or holds nothing out.
        OSError: a file cannot be read or written.
    """
    asked = config.evaluate
    source, home = stored_model(config, asked.step, asked.best, "evaluate")
    check_model_is_theirs(config, home)
    lora = run_settings(config, home).optimizer.lora
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what does not matter here
    size = config.train.global_batch_size
    dataset = build_dataset(config.dataset, config.model, size, config.run.seed)
    with status(console, f"evaluating {source}"):
        try:
            model = checkpoint.FinishedModel(source, lora, asked.ema).whole()
        except checkpoint.Mismatch as error:
            raise refused(config, f"cannot be evaluated: {source}: {error}", "evaluate") from None
        found = means(config, dataset, jax.device_put(model, jax.local_devices()[0]))
    found |= _derived(config, found["loss"])
    target = (
        Path(asked.path).expanduser() if asked.path else home / f"evaluation-{source.name}.json"
    )
    about = {"checkpoint": str(source), "dataset": config.dataset.name, "data": dataset.describe}
    write_whole(target, json.dumps({**about, **found}, indent=2) + "\n", not config.run.shared)
    for name, value in found.items():
        console.print(f"{name:<14} {value:.6g}")
    console.print(f"written to {target}", soft_wrap=True)
    return 0


def means(config: Config, dataset: Dataset, model: dict[str, Any]) -> dict[str, float]:
    """Return the means over all held-out rows of the model's metrics, and `rows`, their number.

    Args:
        config: the settings, with `evaluate.batches`.
        dataset: the data.
        model: `TrainState.model`.

    Raises:
        InputError: nothing is held out, or it has no end and no number of batches is given.
    """
    batches, most = dataset.validation, config.evaluate.batches
    named = f"dataset.name={config.dataset.name}"
    if batches is None:
        raise InputError(f"{named} holds nothing out to evaluate on; raise its validation_fraction")
    there = batches.num_rows if isinstance(batches, Batches) else None
    if there is not None:
        all_batches = -(-there // config.train.global_batch_size)
        most = all_batches if most is None else min(most, all_batches)
    if most is None:
        raise InputError(f"{named} does not say how much it holds out; set evaluate.batches")
    step = jax.jit(make_eval_step(build_model(config.model, config.train.precision)))
    sums: dict[str, list[tuple[float, float]]] = {}
    rows = number = 0
    while number < most:
        batch = batches(number)
        count = len(next(iter(batch.values())))
        if count == 0:
            break
        for name, value in step(model, batch).items():
            mean, *weight = np.ravel(value).astype(float)
            sums.setdefault(name, []).append((mean, weight[0] if weight else float(count)))
        rows, number = rows + count, number + 1
    if not sums:
        raise InputError(f"{named} holds out no row to evaluate on")
    found = {
        name: float(np.average([v for v, _ in pairs], weights=[w for _, w in pairs]))
        for name, pairs in sums.items()
    }
    return {**found, "rows": rows}


def _derived(config: Config, loss: float) -> dict[str, float]:
    """Return what a mean loss of the next token stands for, in nats."""
    is_masked = hasattr(config.model, "mask_every")
    if is_masked or getattr(config.model, "vocab_size", None) is None:
        return {}
    found = {"perplexity": math.exp(min(loss, 700.0))}
    if config.dataset.name in _OF_BYTES:
        found["bits_per_byte"] = loss / math.log(2)
    return found


def check_model_is_theirs(config: Config, home: Path) -> None:
    """Raise ConfigError if the settings say another model than the run's."""
    theirs = run_settings(config, home).model
    if theirs != config.model:
        raise ConfigError(
            f"the settings of the model are not those of run.id={config.run.id}",
            "Leave them out: they are the run's own.",
            ["model.name"],
        )
