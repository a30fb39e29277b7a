"""Planning: which cut of a step is best, and what it costs.

Imports `partition` and below.
"""

from launcher.partition.errors import PlanError
from launcher.plan.cluster_shape import ClusterShape, local_shape
from launcher.plan.forward import make_forward_plan
from launcher.plan.inter_op.select import describe_plan
from launcher.plan.links import microbatch_transfer_seconds
from launcher.plan.pipeline import measured_bubble, timeline
from launcher.plan.plan import Plan
from launcher.plan.stage_plan import ServerExchange, StagePlan, Transfer

__all__ = [
    "ClusterShape",
    "Plan",
    "PlanError",
    "ServerExchange",
    "StagePlan",
    "Transfer",
    "describe_plan",
    "local_shape",
    "make_forward_plan",
    "measured_bubble",
    "microbatch_transfer_seconds",
    "timeline",
]
