"""The sections `report` and `wandb`: trackers, timelines and profiles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from launcher.config.errors import ConfigError, advice
from launcher.config.fields import Switch

TRACKERS = ("wandb", "tensorboard", "mlflow")


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
            elif not any(f"{module}.".startswith(f"{allowed}.") for allowed in allow_modules):
                yield ConfigError(
                    f"{key}: {name} is code that this run is not allowed to load",
                    f"If you trust it, add allow_modules=[{module}] on the command line.",
                    [key],
                )
        if len(set(names)) < len(names):
            yield ConfigError(f"{key} names a tracker twice", "Name each once.", [key])


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases. `mode` null: online where the user is logged in, else offline."""

    mode: str | None = field(default=None, metadata={"choices": ("online", "offline", "disabled")})
    project: str = "launcher"
    entity: str | None = None
    group: str | None = None
    name: str | None = None  # null: the run id
    tags: list[str] = field(default_factory=list)


_WANDB = tuple(f"wandb.{name}" for name in ("project", "entity", "group", "name", "tags"))
SWITCHES = (
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
