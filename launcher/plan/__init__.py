"""Planning: which cut of a step is best, and what it costs.

Imports `partition` and below.
"""

from launcher.partition.errors import PlanError
from launcher.plan.build import make_forward_plan
from launcher.plan.cluster_shape import ClusterShape, local_shape
from launcher.plan.inter_op.select import in_words
from launcher.plan.pipeline import measured_bubble, timeline, transfer_seconds
from launcher.plan.plan import Plan
from launcher.plan.stage_plan import StagePlan, Transfer

__all__ = [
    "ClusterShape",
    "Plan",
    "PlanError",
    "StagePlan",
    "Transfer",
    "in_words",
    "local_shape",
    "make_forward_plan",
    "measured_bubble",
    "timeline",
    "transfer_seconds",
]
