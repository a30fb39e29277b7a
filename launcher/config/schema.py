"""The settings a user can make: one frozen dataclass a section of the YAML tree.

This module is data only. `build` fills it strictly from a plain tree, `checks` holds the rules that
no single field can state. Whoever may know settings (cluster, train, report, __main__) reads these
classes; they import nothing else of ours.

The sections `cluster`, `optimizer` and `parallel` are in `machines`, `optimizers` and `parallel`,
those of models and datasets in `recipes`, a class a family (`families`); `fields` is how a field
says which values it takes. A default says what the YAML of the default options says too (a test
holds them together); it serves files that leave a key out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launcher.config.families import DatasetOptions, ModelOptions, find_datasets, find_models
from launcher.config.fields import FromEnvironment, choice, number, variants
from launcher.config.machines import CLUSTERS, Cluster, Local
from launcher.config.optimizers import OPTIMIZERS, AdamW, Optimizer
from launcher.config.parallel import METHODS, Auto, Parallel


@dataclass(frozen=True)
class Run:
    """Which run this is and where it is kept: `<dir>/<id>/`."""

    id: str | None = None  # null: a fresh one is made, <model>-<utc time>-<4 hex>
    dir: str = "outputs"
    resume: str = choice("auto", "auto", "never", "must")
    seed: int = number(0, minimum=0, maximum=2**32 - 1)
    shared: bool = False  # others may read the folder, as far as the user's umask lets them


@dataclass(frozen=True, kw_only=True)
class CustomModel(ModelOptions):
    """A model of the user's own: a module with `build`, as `recipes` describes it, and its options.

    Its pipeline layers are counted when it is traced.
    """

    name: str = "custom"
    module: str
    options: dict[str, Any] = field(default_factory=dict)

    keeps_documents: ClassVar[bool] = True  # it is given them

    @property
    def sequence_length(self) -> int | None:
        """Tokens a sample, where its options say so."""
        length = self.options.get("sequence_length")
        return length if isinstance(length, int) else None


@dataclass(frozen=True, kw_only=True)
class CustomDataset(DatasetOptions):
    """A dataset of the user's own: a module with `check` and `build`, as `recipes` describes it."""

    name: str = "custom"
    module: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """When a run's state is saved, how much of that is kept, and what a save that fails means.

    What `every_steps` saves stays; of what `every_minutes` saves the newest `keep` do. A save at
    the end that fails is an error in any case.
    """

    at_end: bool = True
    every_steps: int = number(0, minimum=0)  # 0: never
    every_minutes: float = number(0.0, minimum=0.0)  # 0: never
    keep: int = number(2, minimum=1)
    on_error: str = choice("continue", "continue", "stop")


@dataclass(frozen=True)
class Train:
    """How long and on how much."""

    steps: int = number(200, minimum=1)
    global_batch_size: int = number(32, minimum=1)
    precision: str = choice("fp32", "fp32", "bf16")
    dry_steps: int = number(0, minimum=0)
    log_every: int = number(1, minimum=1)
    eval_every: int = number(50, minimum=0)  # 0: never
    eval_batches: int | None = number(8, minimum=1)  # null: all that is held out
    sample_every: int | None = number(None, minimum=0)  # steps; null: at evaluations; 0: never
    check_replicas_every: int = number(0, minimum=0)  # 0: never
    # What follows a loss or gradient that is not finite: the end | the state stays as it was | the
    # newest checkpoint, and from there other batches.
    non_finite: str = choice("stop", "stop", "skip", "rollback")
    # A checkpoint, a run's folder, an .npz file or hf:<folder>: start from its model.
    init_from: str | None = None
    keep_best: str | None = None  # a metric of evaluations, such as eval_loss: its best state stays
    stop_early: int = number(0, minimum=0)  # after so many evaluations that are no better; 0: never
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


@dataclass(frozen=True)
class Export:
    """What `task=export` writes: the weights after `step` steps of the run, to `path`."""

    step: int | None = number(None, minimum=0)  # null: those of the newest checkpoint
    best: bool = False  # those that train.keep_best has kept
    ema: bool = False  # the averages that optimizer.ema keeps, in place of the parameters
    path: str | None = None  # null: weights-<step>.npz, or a folder hf-<step>, in the run's folder
    # One .npz file, or a folder as Hugging Face's transformers reads it.
    format: str = choice("npz", "npz", "hf")
    dtype: str = choice("float32", "float32", "bfloat16")  # of the arrays, for hf


@dataclass(frozen=True)
class Prepare:
    """How `task=prepare_data` works: in how many processes."""

    processes: int | None = number(None, minimum=1)  # null: one a core


@dataclass(frozen=True)
class Tokenize:
    """The tokenizer that `task=tokenize` trains on the dataset's documents: its size and file."""

    vocab_size: int = number(32_000, minimum=257)
    path: str = "tokenizer.json"


@dataclass(frozen=True)
class Generate:
    """What `task=generate` goes on with, by the weights after `step` steps of the run, and how."""

    step: int | None = number(None, minimum=0)  # null: those of the newest checkpoint
    best: bool = False  # those that train.keep_best has kept
    ema: bool = False  # the averages that optimizer.ema keeps, in place of the parameters
    prompts: str | None = None  # a file with a prompt a line, in place of `prompt`
    max_new_tokens: int = number(200, minimum=1)
    temperature: float = number(0.8, minimum=0.0)  # 0: always the likeliest
    top_k: int = number(0, minimum=0)  # 0: of all tokens
    top_p: float = number(1.0, minimum=0.0, maximum=1.0)
    seed: int = number(0, minimum=0, maximum=2**32 - 1)


# Results of a run by which a sweep may be steered, as `summary.json` names them, and in short.
OBJECTIVES = (
    *("eval_loss", "final_loss", "step_seconds", "predicted_step_seconds", "samples_per_second"),
    *("tokens_per_second", "mfu", "predicted_samples_per_second", "peak_memory_bytes"),
    *("predicted_peak_memory_bytes", "predicted_bubble_fraction", "bubble_fraction"),
    *("compile_seconds", "plan_seconds", "time_to_first_step_seconds", "total_seconds"),
)
MAXIMIZED = ("samples_per_second", "tokens_per_second", "predicted_samples_per_second", "mfu")


@dataclass(frozen=True)
class Evaluate:
    """What `task=evaluate` evaluates: the weights after `step` steps of the run, on how much."""

    step: int | None = number(None, minimum=0)  # null: those of the newest checkpoint
    best: bool = False  # those that train.keep_best has kept
    ema: bool = False  # the averages that optimizer.ema keeps, in place of the parameters
    batches: int | None = number(None, minimum=1)  # null: all that is held out
    path: str | None = None  # null: evaluation-<step>.json, or with the data's name


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        dir: the folder of the sweep that `task=sweep_status` shows.
        objective: the result that a sweeper is told of each run; None: the evaluation loss, the
            final loss of runs that evaluate nothing, the predicted step time of plans.
        jobs: how many runs go on at a time.
    """

    dir: str | None = None
    objective: str | None = field(default=None, metadata={"choices": OBJECTIVES})
    jobs: int = number(1, minimum=1, maximum=256)


@dataclass(frozen=True)
class Report:
    """What a run reports beside its metrics, and where; the steps count from 1.

    `trackers` names those of ours (wandb, tensorboard, mlflow) and classes of the user's, such as
    my_pkg.MyTracker. Of `timeline_steps` the timelines are kept, of `profiler_steps` the traces of
    JAX's profiler.
    """

    trackers: list[str] | None = field(default_factory=lambda: ["wandb"])  # null, []: none

    # null, []: none
    timeline_steps: list[int] | None = field(
        default_factory=lambda: [3], metadata={"minimum": 1, "maximum": None}
    )
    profiler_steps: list[int] | None = field(
        default_factory=list, metadata={"minimum": 1, "maximum": None}
    )


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases. `mode` null: online where the user is logged in, else offline."""

    mode: str | None = field(default=None, metadata={"choices": ("online", "offline", "disabled")})
    project: str = "launcher"
    entity: str | None = None
    group: str | None = None
    name: str | None = None  # null: the run id
    tags: list[str] = field(default_factory=list)


MODELS: Mapping[str, type[ModelOptions]] = {**find_models(), "custom": CustomModel}
DATASETS: Mapping[str, type[DatasetOptions]] = {**find_datasets(), "custom": CustomDataset}


@dataclass(frozen=True)
class Config:
    """The whole tree.

    `model`, `dataset` and `optimizer` are of the class that their `name` picks, `parallel` of the
    one of its `method`, `cluster` of its `kind`.

    `allow_modules` and `allow_commands` are given on the command line only: what a file says of
    them does not count. `from_environment` is how the settings are to be written that took the
    value of a variable.
    """

    task: str = choice(
        *("train", "train", "plan", "check", "calibrate", "export", "generate", "evaluate"),
        *("submit", "sweep_status", "prepare_data", "tokenize"),
    )
    allow_modules: list[str] = field(default_factory=list)
    allow_commands: bool = False
    hooks: list[str] = field(default_factory=list)
    prompt: list[str] | None = field(default=None, metadata={"one_or_several": True, "lines": True})
    run: Run = field(default_factory=Run)
    model: ModelOptions = field(default_factory=MODELS["gpt"], metadata=variants("name", MODELS))
    dataset: DatasetOptions = field(
        default_factory=DATASETS["stdlib_text"], metadata=variants("name", DATASETS)
    )
    optimizer: Optimizer = field(default_factory=AdamW, metadata=variants("name", OPTIMIZERS))
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Auto, metadata=variants("method", METHODS))
    cluster: Cluster = field(default_factory=Local, metadata=variants("kind", CLUSTERS))
    report: Report = field(default_factory=Report)
    wandb: Wandb = field(default_factory=Wandb)
    export: Export = field(default_factory=Export)
    evaluate: Evaluate = field(default_factory=Evaluate)
    generate: Generate = field(default_factory=Generate)
    prepare: Prepare = field(default_factory=Prepare)
    tokenize: Tokenize = field(default_factory=Tokenize)
    sweep: Sweep = field(default_factory=Sweep)
    from_environment: FromEnvironment = field(
        default_factory=dict, compare=False, repr=False, metadata={"internal": True}
    )
