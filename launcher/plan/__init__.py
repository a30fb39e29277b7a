"""Where and when it runs. Imports `trace` and `schedule` only."""

from launcher.plan.by_name import make_plan
from launcher.plan.cluster_shape import ClusterShape, local_shape
from launcher.plan.errors import PlanError
from launcher.plan.make import make_forward_plan
from launcher.plan.plan import Plan, StagePlan, Transfer
from launcher.plan.predict import measured_bubble, timeline, transfer_seconds
from launcher.plan.search.best import in_words

__all__ = [
    "ClusterShape",
    "Plan",
    "PlanError",
    "StagePlan",
    "Transfer",
    "in_words",
    "local_shape",
    "make_forward_plan",
    "make_plan",
    "measured_bubble",
    "timeline",
    "transfer_seconds",
]
