"""What the whole search can be asked for, on a traced step."""

from layered import layered_step

from launcher.plan import local_shape
from launcher.plan.auto_plan import auto_plans


def test_more_stages_than_groups_of_layers_that_are_searched_by_default():
    step = layered_step([(8, 8)] * 18, 8)
    plan = auto_plans(step, local_shape(18, 1, "cpu"), 2, "1f1b", "none", num_stages=17)[0]
    assert len(plan.stages) == 17


def test_devices_that_share_a_machine_may_idle():
    """A small step is the faster on one of them, which then has all cores; a large one is not."""
    shape = local_shape(4, 1, "cpu")
    small, large = (layered_step([(size, size)] * 4, 128) for size in (512, 2048))
    plan = auto_plans(small, shape, None, "auto", "auto")[0]
    assert plan.num_devices == 1
    assert auto_plans(large, shape, None, "auto", "auto")[0].num_devices == 4
    every = auto_plans(small, shape, None, "auto", "auto", num_stages=2)[0]
    assert len(every.stages) == 2
