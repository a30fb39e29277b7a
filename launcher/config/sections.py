"""The sections that have no kinds: the training, its reports, the other tasks, and sweeps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from launcher.base import stores, to_type
from launcher.config.cluster import Cluster, Described
from launcher.config.errors import ConfigError, advice
from launcher.config.fields import Switch, automatic, choice, number, off_or_automatic


@dataclass(frozen=True)
class Run:
    """Identity and folder of the run, `<dir>/<id>/`."""

    id: str | None = None  # null: a fresh one is made, <model>-<utc time>-<4 hex>
    dir: str = "outputs"
    resume: str = choice("auto", "auto", "never", "must")
    seed: int = number(0, minimum=0, maximum=2**32 - 1)
    shared: bool = False  # others may read the folder, as far as the user's umask lets them
    # A run's folder or id, and @<step>, @best or @latest: begin with the whole state of that step.
    fork: str | None = None
    mirror: str | None = None  # s3://bucket/prefix or gs://bucket/prefix: a copy of the checkpoints
    switches = (
        Switch(
            ("run.fork",),
            ("run.resume", "train.init_from"),
            lambda c: c.run.resume != "must" and c.train.init_from is None,
            "it begins a new training with the whole state of another",
            "leave out run.resume=must and train.init_from",
        ),
    )

    def check(self) -> Iterator[ConfigError]:
        """Yield errors of the id and of the places."""
        if self.id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.id):
            yield ConfigError(
                f"run.id={self.id!r} cannot name a folder and a Weights & Biases run",
                "Use letters, digits, '.', '_' and '-'.",
                code="wrong_value",
            )
        if self.id is not None and len(self.id) > _LONGEST_NAME:
            yield ConfigError(
                f"run.id={self.id[:20]}… has {len(self.id)} characters; a folder's name has at "
                f"most {_LONGEST_NAME}",
                "Choose a shorter one.",
                code="wrong_value",
            )
        if self.resume == "must" and self.id is None:
            problem, remedy = "run.resume=must does not say which run", "Give run.id=VALUE."
            yield ConfigError(problem, remedy, code="missing_value")
        if re.match(r"\w+://", self.dir):
            yield ConfigError(
                f"run.dir={self.dir} is no folder",
                "Train in a folder, and for a copy of its checkpoints set "
                f"{to_type(('run.mirror', self.dir))}.",
                code="wrong_value",
            )
        if self.mirror is None:
            return
        if not re.fullmatch(rf"(?:{'|'.join(stores.SCHEMES)})://[\w.-]+(?:/[^\s]*)?", self.mirror):
            yield ConfigError(
                f"run.mirror={self.mirror} is no place in an object store",
                "Write s3://bucket/prefix or gs://bucket/prefix.",
                code="wrong_value",
            )
        if self.id is None:
            yield ConfigError(
                "run.mirror does not know which run it copies, as each start has a new id",
                "Give run.id=VALUE.",
                code="missing_value",
            )


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint intervals, retention, and the response to a failed save.

    Checkpoints of `every_steps` are kept forever, of `every_minutes` the newest `keep`; None: as
    often as loses the least time. A failed save at the end is always an error.
    """

    at_end: bool = True
    every_steps: int = number(0, minimum=0)  # 0: never
    every_minutes: float | None = automatic(None, minimum=0.0)  # 0: never
    keep: int = number(2, minimum=1)
    on_error: str = choice("continue", "continue", "stop")


@dataclass(frozen=True)
class Train:
    """Steps, batch size, precision, evaluation and checkpoints."""

    steps: int = number(200, minimum=1)
    global_batch_size: int = number(32, minimum=1)
    precision: str = choice("fp32", "fp32", "bf16")
    deterministic: bool = False  # the same bits at each run on GPUs, by slower operations
    dry_steps: int = number(0, minimum=0)
    log_every: int = number(1, minimum=1)
    eval_every: int = number(50, minimum=0)  # 0: never
    eval_batches: int | None = number(8, minimum=1)  # null: all that is held out
    sample_every: int | None = number(None, minimum=0)  # steps; null: at evaluations; 0: never
    check_replicas_every: int = number(0, minimum=0)  # 0: never
    # Response to a loss or gradient that is not finite: end the run | skip the update | return to
    # the newest checkpoint and continue with other batches.
    non_finite: str = choice("stop", "stop", "skip", "rollback")
    # Response to a loss or gradient norm far above that of the steps before: say so | skip the
    # update | return to a state before it and pass over the batches that did it.
    spikes: str = choice("off", "off", "warn", "skip", "rollback")
    # A checkpoint, a run's folder, an .npz file, hf:<folder> or hf://…: start from its model.
    init_from: str | None = field(default=None, metadata={"hub": "model"})
    keep_best: str | None = None  # a metric of evaluations, such as eval_loss: its best state stays
    stop_early: int = number(0, minimum=0)  # after so many evaluations that are no better; 0: never
    # Steps between snapshots in memory; auto: as often as costs at most 1 %; 0, off: never.
    snapshot: int | None = off_or_automatic()
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    switches = (
        Switch(
            ("train.eval_batches", "train.keep_best", "train.stop_early"),
            ("train.eval_every",),
            lambda c: c.train.eval_every > 0,
            "train.eval_every=0 never evaluates",
            "set train.eval_every",
        ),
        Switch(
            ("train.checkpoint.keep",),
            ("train.checkpoint.every_minutes",),
            lambda c: c.train.checkpoint.every_minutes != 0,
            "only what train.checkpoint.every_minutes saves is ever deleted, and it is 0",
            "set train.checkpoint.every_minutes",
        ),
        Switch(
            ("train.checkpoint.on_error",),
            ("train.checkpoint.every_steps", "train.checkpoint.every_minutes"),
            lambda c: c.train.checkpoint.every_steps > 0 or c.train.checkpoint.every_minutes != 0,
            "nothing is saved before the end, where a save that fails is an error in any case",
            "set train.checkpoint.every_steps or every_minutes",
        ),
    )

    @property
    def samples(self) -> bool:
        """Whether the training writes samples."""
        every = self.eval_every if self.sample_every is None else self.sample_every
        return every > 0

    def check(self, cluster: Cluster) -> Iterator[ConfigError]:
        """Yield the contradictions within this section and with the cluster."""
        if self.keep_best is not None and not self.keep_best.startswith("eval_"):
            yield ConfigError(
                f"train.keep_best={self.keep_best} is not a metric of an evaluation",
                "Name one as eval_loss, with eval_ before its name.",
                code="wrong_value",
            )
        for name, other in (("non_finite", "stop"), ("spikes", "warn")):
            if getattr(self, name) == "rollback" and not getattr(cluster, "max_restarts", 1):
                yield ConfigError(
                    f"train.{name}=rollback is a restart, and cluster.max_restarts=0 allows none",
                    f"Use train.{name}={other} or skip, or allow restarts.",
                )


# By the values of `task`, the settings and sections that it reads from the command line; None: all.
# The others it takes from the run `run.id`, or not at all. `launcher.driver.tasks` adds those that
# are registered from outside.
TASKS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("train", "plan", "check", "submit", "prepare_data", "preflight")),
    "calibrate": ("cluster",),
    "tokenize": ("dataset", "tokenize"),
    "sweep_status": ("sweep.dir",),
    "export": ("run.id", "run.dir", "run.shared", "export"),
    "generate": ("run.id", "run.dir", "cluster", "generate", "prompt"),
    "evaluate": (
        *("run.id", "run.dir", "run.shared", "run.seed", "cluster", "dataset", "prepare"),
        *("train.global_batch_size", "train.precision", "evaluate"),
    ),
}
_LONGEST_NAME = 255  # bytes, of a folder
TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")


@dataclass(frozen=True)
class Report:
    """Outputs beside the metrics; steps count from 1.

    Attributes:
        trackers: names of `TRACKERS` and classes of the user's, such as my_pkg.MyTracker.
        timeline_steps: the steps of which the timelines are kept.
        profiler_steps: the steps of which JAX's profiler writes a trace.
    """

    trackers: list[str] | None = field(default_factory=lambda: ["wandb"])  # null, []: none

    # null, []: none
    timeline_steps: list[int] | None = field(
        default_factory=lambda: [3], metadata={"minimum": 1, "maximum": None}
    )
    profiler_steps: list[int] | None = field(
        default_factory=list, metadata={"minimum": 1, "maximum": None}
    )

    def check(self, allow_modules: Sequence[str]) -> Iterator[ConfigError]:
        """Yield an error for each tracker that is unknown, not allowed or repeated."""
        key = "report.trackers"
        names = self.trackers or []
        for name in names:
            module = name.rpartition(".")[0]
            if name in TRACKERS:
                continue
            if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
                yield ConfigError(
                    f"{key}: {name!r} is not a tracker",
                    f"{advice(name, TRACKERS)} One of your own is written my_pkg.MyTracker.",
                    [key],
                )
            else:
                yield from check_code(key, f"{key}: {name}", module, allow_modules)
        if len(set(names)) < len(names):
            yield ConfigError(f"{key} names a tracker twice", "Name each once.", [key])


_WANDB = tuple(f"wandb.{name}" for name in ("project", "entity", "group", "name", "tags"))


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases. What is null or empty, its variables such as WANDB_PROJECT decide.

    `mode` null without WANDB_MODE: online where the user is logged in, else offline.
    """

    mode: str | None = field(default=None, metadata={"choices": ("online", "offline", "disabled")})
    project: str | None = None  # null: launcher
    entity: str | None = None
    group: str | None = None
    name: str | None = None  # null: the run id
    tags: list[str] = field(default_factory=list)
    switches = (
        Switch(
            _WANDB,
            ("wandb.mode",),
            lambda c: c.wandb.mode != "disabled",
            "wandb.mode=disabled records nothing there",
            "use another wandb.mode",
        ),
        Switch(
            ("wandb.mode", *_WANDB),
            ("report.trackers",),
            lambda c: "wandb" in (c.report.trackers or ()),
            "report.trackers does not name wandb",
            "add it there",
        ),
    )


def check_code(
    key: str, named: str, module: str, allow_modules: Sequence[str]
) -> Iterator[ConfigError]:
    """Yield an error unless the command line allows the module that the setting `key` names."""
    if not any(f"{module}.".startswith(f"{allowed}.") for allowed in allow_modules):
        yield ConfigError(
            f"{named} is code that this run is not allowed to load",
            f"If you trust it, add {to_type(('allow_modules', [*allow_modules, module]))} on the "
            "command line.",
            [key],
            code="not_allowed",
        )


def _of_task(task: str, *keys: str) -> Switch:
    """Return the switch of settings that only this task reads."""
    off = f"that is for task={task}"
    return Switch(keys, ("task",), lambda c: c.task == task, off, "use that task")


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
    switches = (
        _of_task("export", "export"),
        Switch(
            ("export.dtype",),
            ("export.format",),
            lambda c: c.export.format == "hf",
            "an .npz file keeps the types of the checkpoint",
            "set export.format=hf",
        ),
    )


@dataclass(frozen=True)
class Evaluate(ChosenWeights):
    """Weights that `task=evaluate` evaluates, and on how many batches."""

    batches: int | None = number(None, minimum=1)  # null: all that is held out
    path: str | None = None  # null: evaluation-<step>.json, or with the data's name
    switches = (_of_task("evaluate", "evaluate"),)


@dataclass(frozen=True)
class Generate(ChosenWeights):
    """Weights and sampling of `task=generate`, and of the samples of a training."""

    prompts: str | None = None  # a file with a prompt a line, in place of `prompt`
    max_new_tokens: int = number(200, minimum=1)
    temperature: float = number(0.8, minimum=0.0)  # 0: always the likeliest
    top_k: int = number(0, minimum=0)  # 0: of all tokens
    top_p: float = number(1.0, minimum=0.0, maximum=1.0)
    seed: int = number(0, minimum=0, maximum=2**32 - 1)
    switches = (
        _of_task("generate", *(f"generate.{name}" for name in ("step", "best", "ema", "prompts"))),
        Switch(
            ("generate", "prompt"),
            ("task", "train.sample_every"),
            lambda c: c.task == "generate" or c.train.samples,
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
    )


@dataclass(frozen=True)
class Planning:
    """What `task=plan` does beside planning.

    Attributes:
        compile: whether it compiles the plan's programs, for devices that need not be here.
        advise: whether it plans other settings, too, and says what each would bring.
    """

    compile: bool = False
    advise: bool = False
    switches = (
        _of_task("plan", "plan"),
        Switch(
            ("plan.advise",),
            ("cluster.kind",),
            lambda c: isinstance(c.cluster, Described),
            "other devices can be planned for only where the cluster is a described one",
            "choose one, such as cluster=a100_8",
        ),
        Switch(
            ("plan.advise",),
            ("parallel.verify",),
            lambda c: getattr(c.parallel, "verify", None) is None,
            "parallel.verify=compile chooses by compiled plans, and advice is not compiled",
            "leave that out",
        ),
    )


@dataclass(frozen=True)
class Prepare:
    """Number of processes that prepare the data."""

    processes: int | None = number(None, minimum=1)  # null: one a core


@dataclass(frozen=True)
class Tokenize:
    """Size and file of the tokenizer that `task=tokenize` trains on the dataset's documents."""

    vocab_size: int = number(32_000, minimum=257)
    path: str = "tokenizer.json"
    switches = (_of_task("tokenize", "tokenize"),)


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
    switches = (_of_task("sweep_status", "sweep.dir"),)
