"""When nothing fits: the words name the stage and the lack, and what they advise would fit."""

import dataclasses
import re

import numpy as np
import pytest
from layered import layered_step
from random_problems import LAYER_FIELDS

from launcher.plan import describe_plan, local_shape
from launcher.plan.build import PlanBuilder, build_plan
from launcher.plan.inter_op import explain
from launcher.plan.inter_op.explain import _batch, leanest, nothing_fits
from launcher.plan.inter_op.layer_construction import make_problem
from launcher.plan.inter_op.layer_table import SELECTIVE_FIELDS, LayerTable, Parameters
from launcher.plan.inter_op.problem import Constraints, Problem, best_of, of_batch
from launcher.plan.inter_op.select import search
from launcher.plan.inter_op.submeshes import submesh_sizes
from launcher.plan.plan import TooLargeError
from launcher.plan.profile.measure_layers import UnmeasuredError

GIB = 2**30


def problem_of(memory_gib, residual=6.0, state=1.0, batch=8):
    """Four equal layers on one host of two devices; bytes of the whole batch, in GiB."""
    of = {name: np.full((1, 4), 1e-3) for name in (*LAYER_FIELDS, *SELECTIVE_FIELDS)}
    for name in ("residual_bytes", "left_bytes", "forward_peak_bytes", "whole_peak_bytes"):
        of[name] = np.full((1, 4), residual * GIB)
    of["whole_early_bytes"] = of["left_bytes"]
    of["checkpoint_bytes"] = of["left_bytes"]  # to compute anything again would save nothing
    sizes = {"parameters": 1.0, "parameter_bytes": 0.25, "owned_bytes": 0.25}
    sizes |= {"optimizer_bytes": 0.75, "gradient_bytes": 0.25}
    each = {name: np.array([share * state * GIB]) for name, share in sizes.items()}
    parameters = tuple(Parameters((i,), ((8,),), each) for i in range(4))
    cluster = dataclasses.replace(local_shape(2, 1, "cpu"), memory_bytes=int(memory_gib * GIB))
    groups = tuple((i,) for i in range(4))
    table = LayerTable((1,), of, parameters)
    return Problem(table, groups, batch, cluster, submesh_sizes(cluster, batch), memory_gib * GIB)


def told(problem, wanted):
    return nothing_fits(problem, wanted, leanest(problem, wanted))


def test_what_was_asked_for_too_much_is_left_to_the_search():
    problem, wanted = problem_of(9.0), Constraints(num_micro_batches=1)
    assert not best_of(problem, wanted)
    message = str(told(problem, wanted))
    assert message.endswith("This would fit: parallel.num_micro_batches=auto")
    assert best_of(problem, Constraints())


@pytest.mark.parametrize("memory", [0.4, 1.0, 1.9])
def test_advice_that_is_followed_helps(memory):
    problem = problem_of(memory)
    assert not best_of(problem, Constraints())
    message = str(told(problem, Constraints()))
    assert re.search(r"stage \d+ needs [\d.]+ GiB a device, [\d.]+ GiB more than", message)
    advice = message.split("This would fit: ")[1]
    if found := re.search(r"cluster.hosts=(\d+)", advice):
        more = dataclasses.replace(problem.cluster, hosts=int(found[1]))
        sizes = submesh_sizes(more, problem.batch_size)
        assert best_of(dataclasses.replace(problem, cluster=more, sizes=sizes), Constraints())
    if found := re.search(r"train.global_batch_size=(\d+)", advice):
        assert best_of(of_batch(problem, int(found[1])), Constraints())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("local", " of these devices in a Slurm job: cluster=slurm cluster.hosts="),
        ("mine", " cluster.links.inter_host_gb_per_second=12.5 (100 Gbit/s between hosts, or"),
    ],
)
def test_more_hosts_are_advised_with_all_that_they_need(name, words):
    problem = problem_of(1.0, residual=0.1, state=1.5)
    there = dataclasses.replace(problem.cluster, name=name)
    assert words in str(told(dataclasses.replace(problem, cluster=there), Constraints()))


def test_a_layer_too_large_for_any_device_is_said_to_be():
    message = str(told(problem_of(0.01, state=400.0), Constraints()))
    assert "take a smaller model or larger devices" in message


def test_a_batch_that_does_not_divide():
    problem = dataclasses.replace(problem_of(1.0), memory_bytes=None)
    assert "does not divide into 3 microbatches" in str(told(problem, Constraints(3)))


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (5, "num_stages=5 is more than the model's 4 layers"),
        (3, "num_stages=3 is more than the 2 devices"),
    ],
)
def test_more_stages_than_layers_or_devices(stages, words):
    for problem in (problem_of(9.0), dataclasses.replace(problem_of(9.0), memory_bytes=None)):
        wanted = Constraints(num_stages=stages)
        assert not best_of(problem, wanted)
        message = str(told(problem, wanted))
        assert words in message
        assert "Give at most 2," in message


def test_an_odd_batch_is_cut_into_as_many_microbatches_as_fit():
    [found, *_] = best_of(problem_of(5.0, residual=12.0, batch=81), Constraints())
    assert found.assignment.num_micro_batches == 27


def test_a_smaller_odd_batch_is_advised():
    problem, wanted = problem_of(4.0, residual=12.0, batch=81), Constraints(num_micro_batches=1)
    assert not best_of(problem, wanted)
    assert _batch(problem, wanted) == "train.global_batch_size=3"
    assert best_of(of_batch(problem, 3), wanted)
    assert not best_of(of_batch(problem, 9), wanted)


def a100s(memory_gib):
    shape = local_shape(4, 1, "NVIDIA A100-SXM4-80GB")
    return dataclasses.replace(shape, memory_bytes=int(memory_gib * GIB))


def test_the_lack_is_that_of_the_plan_that_is_shown():
    """Whose memory is not quite that of its estimate."""
    step, cluster = layered_step([(8192, 8192)] * 3, 65536), a100s(0.5)
    with pytest.raises(TooLargeError) as raised:
        search(step, cluster, Constraints())
    plan = build_plan(step, raised.value.assignment, cluster)
    needed = max(stage.memory_bytes for stage in plan.stages) / GIB
    assert f"{describe_plan(plan)}) stage " in str(raised.value)
    assert f" needs {needed:.2f} GiB a device, {needed - 0.5:.2f} GiB more" in str(raised.value)


def test_a_plan_that_fits_is_taken_though_its_estimate_does_not():
    step, memory = layered_step([(4096, 4096)] * 2, 1), 0.2
    while found := best_of(make_problem(step, a100s(memory)), Constraints()):
        memory = (min(max(one.memory) for one in found) - 1) / GIB
    [(plan, _)] = search(step, a100s(memory), Constraints())
    assert plan.missing_bytes <= 0


def test_where_layers_could_not_be_measured_it_is_the_lack_that_is_said(monkeypatch):
    """Layers that take too much memory are those that cannot be run to be measured."""

    def unmeasured(*_):
        raise UnmeasuredError("layer 0 could not be measured")

    monkeypatch.setattr(PlanBuilder, "build", unmeasured)
    monkeypatch.setattr(explain, "make_estimate", unmeasured)
    with pytest.raises(TooLargeError, match=r"leanest plan found stage \d needs [\d.]+ GiB"):
        search(layered_step([(8192, 8192)] * 2, 65536), a100s(0.5), Constraints())
