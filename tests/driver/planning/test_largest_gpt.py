"""A GPT of 13 billion parameters trains on 8 GPUs of 80 GB, and the memory says how."""

import pytest

from launcher.config.compose import load
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import shape_of
from launcher.train.program import build_program

GPT_13B = (
    "model=gpt",
    "model.num_layers=40",
    "model.hidden_size=5120",
    "model.num_heads=40",
    "model.sequence_length=2048",
    "model.vocab_size=51200",
    "model.scan_layers=true",  # traced in the time of one block
    "train.precision=bf16",
    "train.global_batch_size=64",
    "train.eval_every=0",
    "dataset=synthetic",
    "parallel=auto",
    "parallel.allow_over_memory=false",
)


@pytest.mark.slow
def test_auto_fits_13_billion_parameters_on_8_gpus_of_80_gb():
    config = load([*GPT_13B, "cluster=a100_8", "task=plan"])
    shape = shape_of(config, None, None)
    plan = plan_of(config.parallel, build_program(config).train, shape)
    assert shape.num_devices == 8
    assert shape.memory_bytes <= 0.92 * 80 * 2**30
    assert plan.num_parameters >= 12.8e9  # as GPT-3 13B is counted
    assert max(stage.memory_bytes for stage in plan.stages) <= shape.memory_bytes


@pytest.mark.slow
def test_seven_billion_parameters_with_long_samples_fit_8_gpus_whose_weights_are_gathered():
    """16 samples of 4,096 tokens a device, as others have run it."""
    words = "model=gpt model.size=6.7b model.sequence_length=4096 model.scan_layers=true"
    words += " train.precision=bf16 train.global_batch_size=128 train.eval_every=0"
    words += " dataset=synthetic parallel=zero3 parallel.remat=full cluster=h100_8 task=plan"
    config = load(words.split())
    shape = shape_of(config, None, None)
    step = build_program(config, shape.compute_capability).train  # attention in one kernel
    plan = plan_of(config.parallel, step, shape)
    assert plan.num_parameters >= 6.6e9
    assert plan.missing_bytes <= 0
