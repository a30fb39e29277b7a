"""Other families than the GPT on the cluster of the Alpa paper: nothing simpler is faster."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from planner_families import MIXTURES, RESIDUALS, mixture, plans, residual
from planner_published import fits


@pytest.mark.stress
@pytest.mark.parametrize(
    ("make", "sizes", "gpus"), [(mixture, MIXTURES, 8), (residual, RESIDUALS, 8)]
)
def test_both_kinds_of_parallelism_are_not_slower_than_either(make, sizes, gpus):
    check_beside_others(plans(make(sizes[gpus]), gpus))


@pytest.mark.stress
def test_experts_across_nodes_are_far_faster_in_a_pipeline_than_with_everything_cut():
    """As published: a pipeline sends activations over the slow links, ZeRO-3 all parameters."""
    found = plans(mixture(MIXTURES[16]), 16)
    check_beside_others(found)
    assert len(found["auto"].meshes) > 1
    assert found["zero3"].predicted_step_seconds > 2 * found["auto"].predicted_step_seconds


def check_beside_others(found):
    """Auto's fits, and none of the others that fit is faster."""
    auto = found["auto"]
    assert max(stage.memory_bytes for stage in auto.stages) <= auto.cluster["memory_bytes"]
    for name, other in found.items():
        if other is not None and fits(other):
            assert auto.predicted_step_seconds <= 1.001 * other.predicted_step_seconds, name
