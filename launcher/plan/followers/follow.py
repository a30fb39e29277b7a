"""The method of functions that follow another one: evaluations, and what uses gradients."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.hardware.cluster_shape import ClusterShape
from launcher.partition.errors import PlanError
from launcher.plan.followers.forward import make_forward_plan
from launcher.plan.followers.update_plan import make_update_plan
from launcher.plan.plan import Plan
from launcher.trace.step import TracedStep


@dataclass(frozen=True)
class Follow:
    """Evaluation where a train step keeps its parameters: on the stages of its plan `like`.

    A function without a loss, which uses gradients, runs where the update of the train step does.

    Attributes:
        like: the plan of the train step.
        step: the train step; only a function without a loss needs it.
    """

    like: Plan
    step: TracedStep | None = None

    def plan(self, step: TracedStep, cluster: ClusterShape) -> Plan:
        """See `Method.plan`."""
        del cluster
        if step.traces is not None:
            return make_forward_plan(step, self.like)
        if self.step is None:
            raise PlanError(
                "a function that takes no gradient follows a function, not a plan: name the "
                "parallelized train step, launcher.parallelize(apply, method=step)"
            )
        return make_update_plan(step, self.step, self.like)
