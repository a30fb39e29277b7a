"""Planning: which cut of a step is best, and what it costs.

Imports `partition` and below.
"""

from launcher.hardware import ClusterShape, local_shape
from launcher.partition import PlanError
from launcher.plan.followers import make_forward_plan
from launcher.plan.pipeline import measured_bubble, microbatch_transfer_seconds, timeline
from launcher.plan.plan import Plan, Trial
from launcher.plan.stage_plan import ServerExchange, StagePlan, Transfer, describe_plan

__all__ = [
    "ClusterShape",
    "Plan",
    "PlanError",
    "ServerExchange",
    "StagePlan",
    "Transfer",
    "Trial",
    "describe_plan",
    "local_shape",
    "make_forward_plan",
    "measured_bubble",
    "microbatch_transfer_seconds",
    "timeline",
]
