"""What the whole search can be asked for, on a traced step."""

from layered import layered_step

from launcher.plan import local_shape
from launcher.plan.auto_plan import auto_plans


def test_more_stages_than_groups_of_layers_that_are_searched_by_default():
    step = layered_step([(8, 8)] * 18, 8)
    plan = auto_plans(step, local_shape(18, 1, "cpu"), 2, "1f1b", "none", num_stages=17)[0]
    assert len(plan.stages) == 17
