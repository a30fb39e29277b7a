"""The sections of the tasks other than training: export, generate, evaluate, sweeps and data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from launcher.config.errors import ConfigError
from launcher.config.fields import Switch, choice, number


@dataclass(frozen=True)
class ChosenWeights:
    """A run's weights.

    Attributes:
        step: those after so many steps; None: those of the newest checkpoint.
        best: those of the checkpoint that `train.keep_best` keeps.
        ema: the averages that `optimizer.ema` keeps, in place of the parameters.
    """

    step: int | None = number(None, minimum=0)
    best: bool = False
    ema: bool = False

    def check(self, section: str) -> Iterator[ConfigError]:
        """Yield an error if the section names two checkpoints."""
        if self.best and self.step is not None:
            yield ConfigError(
                f"{section}.best=true and {section}.step={self.step} name two checkpoints",
                "Leave one of them out.",
                [f"{section}.best", f"{section}.step"],
            )


@dataclass(frozen=True)
class Export(ChosenWeights):
    """Weights that `task=export` writes to `path`."""

    path: str | None = None  # null: weights-<step>.npz, or a folder hf-<step>, in the run's folder
    # One .npz file, or a folder as Hugging Face's transformers reads it.
    format: str = choice("npz", "npz", "hf")
    dtype: str = choice("float32", "float32", "bfloat16")  # of the arrays, for hf


@dataclass(frozen=True)
class Evaluate(ChosenWeights):
    """Weights that `task=evaluate` evaluates, and on how many batches."""

    batches: int | None = number(None, minimum=1)  # null: all that is held out
    path: str | None = None  # null: evaluation-<step>.json, or with the data's name


@dataclass(frozen=True)
class Generate(ChosenWeights):
    """Weights and sampling of `task=generate`, and of the samples of a training."""

    prompts: str | None = None  # a file with a prompt a line, in place of `prompt`
    max_new_tokens: int = number(200, minimum=1)
    temperature: float = number(0.8, minimum=0.0)  # 0: always the likeliest
    top_k: int = number(0, minimum=0)  # 0: of all tokens
    top_p: float = number(1.0, minimum=0.0, maximum=1.0)
    seed: int = number(0, minimum=0, maximum=2**32 - 1)


@dataclass(frozen=True)
class Prepare:
    """Number of processes of `task=prepare_data`."""

    processes: int | None = number(None, minimum=1)  # null: one a core


@dataclass(frozen=True)
class Tokenize:
    """Size and file of the tokenizer that `task=tokenize` trains on the dataset's documents."""

    vocab_size: int = number(32_000, minimum=257)
    path: str = "tokenizer.json"


# Results of a run by which a sweep may be steered, as `summary.json` names them, and in short.
OBJECTIVES = (
    *("eval_loss", "final_loss", "step_seconds", "predicted_step_seconds", "samples_per_second"),
    *("tokens_per_second", "mfu", "predicted_samples_per_second", "peak_memory_bytes"),
    *("predicted_peak_memory_bytes", "predicted_bubble_fraction", "bubble_fraction"),
    *("compile_seconds", "plan_seconds", "time_to_first_step_seconds", "total_seconds"),
)
MAXIMIZED = ("samples_per_second", "tokens_per_second", "predicted_samples_per_second", "mfu")


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        dir: the folder of the sweep that `task=sweep_status` shows.
        objective: the result of a run that the sweeper receives; None: the evaluation loss,
            the final loss of runs that evaluate nothing, the predicted step time of plans.
        jobs: the number of concurrent runs.
    """

    dir: str | None = None
    objective: str | None = field(default=None, metadata={"choices": OBJECTIVES})
    jobs: int = number(1, minimum=1, maximum=256)


def _of_task(keys: tuple[str, ...], *tasks: str) -> Switch:
    """Return the switch of settings that only these tasks read."""
    return Switch(
        keys, ("task",), lambda c: c.task in tasks, f"that is for task={tasks[0]}", "use that task"
    )


def _samples(config: Any) -> bool:
    every = config.train.sample_every
    return bool(config.train.eval_every if every is None else every)


SWITCHES = (
    _of_task(("export",), "export"),
    Switch(
        ("export.dtype",),
        ("export.format",),
        lambda c: c.export.format == "hf",
        "an .npz file keeps the types of the checkpoint",
        "set export.format=hf",
    ),
    _of_task(("evaluate",), "evaluate"),
    _of_task(tuple(f"generate.{name}" for name in ("step", "best", "ema", "prompts")), "generate"),
    Switch(
        ("generate", "prompt"),
        ("task", "train.sample_every"),
        lambda c: c.task == "generate" or _samples(c),
        "that is for task=generate and the samples of a training",
        "use that task, or set train.sample_every",
    ),
    Switch(
        ("prompt",),
        ("generate.prompts",),
        lambda c: c.generate.prompts is None,
        "generate.prompts names a file of them",
        "leave that out",
    ),
    Switch(
        ("generate.top_k", "generate.top_p", "generate.seed"),
        ("generate.temperature",),
        lambda c: c.generate.temperature > 0,
        "generate.temperature=0 always takes the likeliest token",
        "set generate.temperature",
    ),
    Switch(
        ("prepare",),
        ("task",),
        lambda c: c.task in ("prepare_data", "train"),
        "that is for task=prepare_data, and for a training, which prepares its data first",
        "use that task",
    ),
    _of_task(("tokenize",), "tokenize"),
    _of_task(("sweep.dir",), "sweep_status"),
)
