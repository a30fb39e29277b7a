"""The parallel methods as values: what a user writes in Python. Used by `launcher.api`.

A method is a frozen dataclass that turns a traced step and a cluster's shape into a `Plan`; it
holds no device and no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.make import make_forward_plan, make_plan
from launcher.plan.plan import Plan
from launcher.trace.step import TracedStep


class Method(Protocol):
    """Anything that fills in a plan."""

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """The plan of `step` on `cluster`. Raises PlanError where there is none."""


@dataclass(frozen=True)
class DataParallel:
    """One stage on all devices; each holds all parameters and its share of the batch. Gradients
    are all-reduced once a step, whatever the number of microbatches."""

    num_micro_batches: int = 1

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        return make_plan(
            step, method="data", num_micro_batches=self.num_micro_batches, cluster=cluster
        )


@dataclass(frozen=True)
class PipeshardParallel:
    """Stages cut at the model's `mark_pipeline_boundary()` calls, each on an equal share of the
    devices, whose number beyond one replicates the stage.

    Attributes:
        num_micro_batches: parts of the batch that follow one another through the stages.
        num_stages: None for as many as layers and devices allow.
        stages_per_mesh: how many stages share a submesh, with `interleaved_1f1b`.
        schedule: "gpipe", "1f1b", "interleaved_1f1b" or "zero_bubble".
        remat: one of `plan.remat.POLICIES`, or one a stage.
    """

    num_micro_batches: int = 1
    num_stages: int | None = None
    stages_per_mesh: int | None = None
    schedule: str = "1f1b"
    remat: str | tuple[str, ...] = "none"

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        return make_plan(
            step,
            method="manual",
            num_stages=self.num_stages,
            stages_per_mesh=self.stages_per_mesh,
            num_micro_batches=self.num_micro_batches,
            schedule=self.schedule,
            remat=self.remat,
            cluster=cluster,
        )


@dataclass(frozen=True)
class Replay:
    """A plan found before, as it is (`Plan.from_dict(json.load(open("plan.json")))`)."""

    found: Plan

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`. The runtime refuses it where `step` is another program."""
        del step, cluster
        return self.found


@dataclass(frozen=True)
class Follow:
    """Evaluate where a train step keeps its parameters: on the stages of its plan `like`."""

    like: Plan

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        del cluster
        return make_forward_plan(step, self.like)
