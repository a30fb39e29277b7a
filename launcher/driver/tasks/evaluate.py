"""`task=evaluate`: a checkpoint's loss on held-out data, the run's own or another.

The model lies as its plan shards it, as for `task=generate`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from launcher.base import write_whole
from launcher.config.compose import to_dict
from launcher.config.schema import Config
from launcher.driver.folder import folder
from launcher.driver.tasks.prepare_data import prepare_first
from launcher.driver.tasks.task import CheckpointTask, new_path
from launcher.inference.answers import model_answers
from launcher.inference.export_tokenizer import warn_of_other_tokens
from launcher.inference.model_workers import EvaluationWorker, Means
from launcher.inference.stored_model import run_settings, stored_plan
from launcher.plan import Plan
from launcher.recipes import Dataset, InputError, build_dataset, bytes_per_target
from launcher.report.console import RunConsole, status
from launcher.train.feed import num_batches


class EvaluateTask(CheckpointTask):
    """Evaluate a run's model on held-out data."""

    name, verb = "evaluate", "be evaluated"

    def use(self, config: Config, console: RunConsole, source: Path, home: Path) -> int:
        """Print the metrics of the run's model on held-out data, and write them.

        Raises:
            ConfigError: there is no such checkpoint.
            InputError: the data cannot be used, or holds nothing out.
            OSError: a file cannot be read or written.
        """
        settings, config = run_settings(config, home), folder.pinned(config)
        target = _target(
            config, home / f"evaluation-{source.name}{_other_data(config, settings)}.json"
        )
        earlier = target.exists()
        warn_of_other_tokens(settings, config)
        prepare_first(config, console)
        size = config.train.global_batch_size
        dataset = build_dataset(config.dataset, config.model, size, config.run.seed)
        batches, plan = _batches(config, dataset), stored_plan(home)
        counts = batches, _rows(size, plan)
        asked_of = EvaluationWorker, config, source, plan, config.evaluate.ema, counts, console
        with (
            model_answers(*asked_of) as answers,
            status(console, f"evaluating {source}") as advance,
        ):
            found = means(_counted(answers, lambda done: advance(done, batches, "batches")))
        found |= _derived(config, found["loss"], int(found["rows"]))
        about = {
            "checkpoint": str(source),
            "dataset": config.dataset.name,
            "data": dataset.describe,
        }
        write_whole(target, json.dumps({**about, **found}, indent=2) + "\n", not config.run.shared)
        for name, value in found.items():
            console.print(f"{name:<14} {value:.6g}")
        instead = ", in place of an earlier evaluation" if earlier else ""
        console.print(f"written to {target}{instead}", soft_wrap=True)
        return 0


def _other_data(config: Config, settings: Config) -> str:
    """Return the suffix of the file for other data than the run's own."""
    if config.dataset == settings.dataset:
        return ""
    said = json.dumps(to_dict(config)["dataset"], sort_keys=True)
    return f"-{config.dataset.name}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"


def _target(config: Config, default: Path) -> Path:
    """Return the file to write; raises ConfigError if it cannot be made, before all the work."""
    named = config.evaluate.path
    return default if named is None else new_path("evaluate.path", named)


def means(batches: Iterable[list[Means]]) -> dict[str, float]:
    """Return the means over all rows of the model's metrics, and `rows`, their number.

    Args:
        batches: the means of each batch's pieces.

    Raises:
        InputError: there is no row.
    """
    pieces = [piece for batch in batches for piece in batch]
    if not pieces:
        raise InputError("the data holds out no row to evaluate on")
    found = {}
    for name in pieces[0][0]:
        values, weights = zip(*(metrics[name] for metrics, _ in pieces), strict=True)
        found[name] = float(np.average(values, weights=weights))
    return {**found, "rows": sum(rows for _, rows in pieces)}


def _counted(batches: Iterable[list[Means]], tell: Callable[[int], None]) -> Iterator[list[Means]]:
    """Yield batches, and pass their number so far to `tell`."""
    for number, batch in enumerate(batches, start=1):
        yield batch
        tell(number)


def _batches(config: Config, dataset: Dataset) -> int:
    """Return the number of batches to evaluate on.

    Raises:
        InputError: nothing is held out, or it has no end and no number of batches is given.
    """
    held_out, most = dataset.validation, config.evaluate.batches
    named = f"dataset.name={config.dataset.name}"
    if held_out is None:
        raise InputError(f"{named} holds nothing out to evaluate on; raise its validation_fraction")
    number = num_batches(held_out, config.train.global_batch_size, most)
    if number is None:
        raise InputError(f"{named} does not say how much it holds out; set evaluate.batches")
    return number


def _rows(batch_size: int, plan: Plan | None) -> int:
    """Return the rows evaluated together: a device's share of a microbatch."""
    slices = 1 if plan is None else plan.num_micro_batches * plan.num_replicas
    return max(1, batch_size // slices)


def _derived(config: Config, loss: float, rows: int) -> dict[str, float]:
    """Return the metrics derived from a mean next-token loss, in nats."""
    is_masked = hasattr(config.model, "mask_every")
    if is_masked or getattr(config.model, "vocab_size", None) is None:
        return {}
    found = {"perplexity": math.exp(min(loss, 700.0))}
    if size := bytes_per_target(config.dataset, config.model, rows):
        found["bits_per_byte"] = loss / (math.log(2) * size)
    return found
