"""Settings of the whole search, on a traced step."""

import dataclasses

from layered import layered_step

from launcher.plan import local_shape
from launcher.plan.methods import auto_plans


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
    # On one device it is predicted to be 1.6 % faster, which is less than predictions are good for.
    between = layered_step([(896, 896)] * 4, 128)
    assert auto_plans(between, shape, None, "auto", "auto")[0].num_devices == 4
    every = auto_plans(small, shape, None, "auto", "auto", num_stages=2)[0]
    assert len(every.stages) == 2


def test_products_that_use_all_cores_by_themselves_are_left_to_one_device():
    """A machine whose network uses one of two cores alone, and its products both."""
    step = layered_step([(512, 512)] * 4, 256)
    shape = dataclasses.replace(
        local_shape(4, 1, "cpu"), effective_parallelism=2.0, dispatch_overhead=5e-4, latency=2e-5
    )
    assert auto_plans(step, shape, None, "auto", "auto")[0].num_devices > 1
    apart = dataclasses.replace(shape, product_parallelism=1.0)
    assert auto_plans(step, apart, None, "auto", "auto")[0].num_devices == 1
