"""The section `train`: the length of a training, its evaluations and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.config.errors import ConfigError
from launcher.config.fields import Switch, choice, number
from launcher.config.machines import Cluster, Machines


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint intervals, retention, and the response to a failed save.

    Checkpoints of `every_steps` are kept forever, of `every_minutes` the newest `keep`. A failed
    save at the end is always an error.
    """

    at_end: bool = True
    every_steps: int = number(0, minimum=0)  # 0: never
    every_minutes: float = number(0.0, minimum=0.0)  # 0: never
    keep: int = number(2, minimum=1)
    on_error: str = choice("continue", "continue", "stop")


@dataclass(frozen=True)
class Train:
    """Steps, batch size, precision, evaluation and checkpoints."""

    steps: int = number(200, minimum=1)
    global_batch_size: int = number(32, minimum=1)
    precision: str = choice("fp32", "fp32", "bf16")
    dry_steps: int = number(0, minimum=0)
    log_every: int = number(1, minimum=1)
    eval_every: int = number(50, minimum=0)  # 0: never
    eval_batches: int | None = number(8, minimum=1)  # null: all that is held out
    sample_every: int | None = number(None, minimum=0)  # steps; null: at evaluations; 0: never
    check_replicas_every: int = number(0, minimum=0)  # 0: never
    # Response to a loss or gradient that is not finite: end the run | skip the update | return to
    # the newest checkpoint and continue with other batches.
    non_finite: str = choice("stop", "stop", "skip", "rollback")
    # A checkpoint, a run's folder, an .npz file or hf:<folder>: start from its model.
    init_from: str | None = None
    keep_best: str | None = None  # a metric of evaluations, such as eval_loss: its best state stays
    stop_early: int = number(0, minimum=0)  # after so many evaluations that are no better; 0: never
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def check(self, cluster: Cluster) -> Iterator[ConfigError]:
        """Yield the contradictions within this section and with the cluster."""
        if self.keep_best is not None and not self.keep_best.startswith("eval_"):
            yield ConfigError(
                f"train.keep_best={self.keep_best} is not a metric of an evaluation",
                "Name one as eval_loss, with eval_ before its name.",
                ["train.keep_best"],
            )
        can_restart = not isinstance(cluster, Machines) or cluster.max_restarts > 0
        if self.non_finite == "rollback" and not can_restart:
            yield ConfigError(
                "train.non_finite=rollback is a restart, and cluster.max_restarts=0 allows none",
                "Use train.non_finite=stop or skip, or allow restarts.",
                ["train.non_finite", "cluster.max_restarts"],
            )


SWITCHES = (
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
        lambda c: c.train.checkpoint.every_minutes > 0,
        "only what train.checkpoint.every_minutes saves is ever deleted, and it is 0",
        "set train.checkpoint.every_minutes",
    ),
    Switch(
        ("train.checkpoint.on_error",),
        ("train.checkpoint.every_steps", "train.checkpoint.every_minutes"),
        lambda c: bool(c.train.checkpoint.every_steps or c.train.checkpoint.every_minutes),
        "nothing is saved before the end, where a save that fails is an error in any case",
        "set train.checkpoint.every_steps or every_minutes",
    ),
)
