"""Planning: which cut of a step is best, and what it costs.

Imports `partition` and below.
"""

from launcher.hardware import ClusterShape as ClusterShape
from launcher.hardware import local_shape as local_shape
from launcher.partition import PlanError as PlanError
from launcher.plan.compiled_plan import CompiledCollectives as CompiledCollectives
from launcher.plan.compiled_plan import CompiledPlan as CompiledPlan
from launcher.plan.compiled_plan import CompiledProgram as CompiledProgram
from launcher.plan.compiled_plan import CompiledStage as CompiledStage
from launcher.plan.compiled_plan import CompileError as CompileError
from launcher.plan.followers import make_forward_plan as make_forward_plan
from launcher.plan.pipeline import measured_bubble as measured_bubble
from launcher.plan.pipeline import microbatch_transfer_seconds as microbatch_transfer_seconds
from launcher.plan.pipeline import timeline as timeline
from launcher.plan.plan import Advice as Advice
from launcher.plan.plan import Plan as Plan
from launcher.plan.plan import TooLargeError as TooLargeError
from launcher.plan.plan import Trial as Trial
from launcher.plan.plan import UnfitError as UnfitError
from launcher.plan.profile.trials import fastest as fastest
from launcher.plan.profile.trials import keep_trial as keep_trial
from launcher.plan.profile.trials import kept_trial as kept_trial
from launcher.plan.profile.trials import same_way as same_way
from launcher.plan.profile.trials import trial_of as trial_of
from launcher.plan.stage_plan import ServerExchange as ServerExchange
from launcher.plan.stage_plan import StagePlan as StagePlan
from launcher.plan.stage_plan import describe_plan as describe_plan
