"""Trainings drawn at random, by the command: each has the losses that one device has."""

import random
from pathlib import Path

import numpy as np
import pytest
from disturbed import on_one_device
from launched import lines, train, typed

from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import PlanError, local_shape
from launcher.train.program import build_program

STEPS = 3
PIPELINES = ("manual", "three_d")
METHODS = (*PIPELINES, "auto", "manual", "data", "three_d", "zero2", "manual", "zero3", "shard")
ALWAYS = typed(
    f"train.steps={STEPS} train.global_batch_size=16 train.log_every=1 train.eval_every=0 "
    "train.checkpoint.at_end=false optimizer.warmup_steps=1 wandb.mode=disabled cluster=emulated "
    "run.id=one"
)


def model_at_random(draw: random.Random) -> list[str]:
    layers = f"model.num_layers={draw.choice([2, 3, 4, 5])}"
    hidden = f"model.hidden_size={draw.choice([32, 48])}"
    if draw.random() < 0.4:
        return ["model=mlp", "dataset=synthetic", layers, hidden]
    words = ["model=gpt", f"dataset={draw.choice(['synthetic', 'stdlib_text'])}", layers, hidden]
    tied = f"model.tie_embeddings={draw.choice(['true', 'false'])}"
    scans = f"model.scan_layers={draw.choice(['true', 'false'])}"
    return [*words, tied, scans, "model.num_heads=4", "model.sequence_length=16"]


def optimizer_at_random(draw: random.Random) -> list[str]:
    name = draw.choice(["adamw", "adam", "sgd", "lion", "adafactor"])
    rate = {"sgd": 0.05, "lion": 1e-4}.get(name, 1e-3)
    clip, decay = draw.choice(["null", "1.0", "0.1"]), draw.choice(["constant", "cosine", "linear"])
    words = [f"optimizer={name}", f"optimizer.learning_rate={rate}"]
    return [*words, f"optimizer.clip_norm={clip}", f"optimizer.decay={decay}"]


def method_at_random(draw: random.Random, method: str) -> list[str]:
    gpus = draw.choice([2, 4] if method in PIPELINES else [1, 2, 4])
    hosts = draw.choice([h for h in (1, 2) if h <= gpus])
    micro_batches = f"parallel.num_micro_batches={draw.choice([1, 2, 4])}"
    words = [f"cluster.gpus={gpus}", f"cluster.hosts={hosts}", micro_batches]
    words += [f"parallel={method}", f"parallel.remat={draw.choice(['none', 'full'])}"]
    schedules = ["gpipe", "1f1b", "eager_1f1b", "zero_bubble"]
    if method == "shard":
        words.append(f"parallel.model={draw.choice([1, 2, 4])}")
    if method == "three_d":
        words.append(f"parallel.model={draw.choice([1, 2])}")
        words.append(f"parallel.pipeline={draw.choice([2, 4])}")
    if method == "manual":
        schedules.append("interleaved_1f1b")
        words.append(f"parallel.num_stages={draw.choice([2, 3, 4])}")
    if method in PIPELINES:
        words.append(f"parallel.schedule={draw.choice(schedules)}")
    return words


def training_at_random(seed: int) -> tuple[list[str], Config]:
    """The words of the command, of a training that can be planned."""
    draw = random.Random(seed)
    precision = f"train.precision={draw.choice(['fp32', 'fp32', 'fp32', 'bf16'])}"
    always = [*optimizer_at_random(draw), *ALWAYS, precision]
    for _ in range(100):
        method = METHODS[seed % len(METHODS)]
        words = [*model_at_random(draw), *method_at_random(draw, method), *always]
        try:
            config = load(words)
            shape = local_shape(config.cluster.gpus, config.cluster.hosts, "cpu")
            plan_of(config.parallel, build_program(config).train, shape)
        except (ConfigError, PlanError):
            continue
        return words, config
    raise AssertionError("nothing that is drawn can be planned")


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(30))
def test_a_random_training_has_the_losses_of_one_device(tmp_path: Path, seed: int) -> None:
    settings, config = training_at_random(seed)
    train(tmp_path, *settings)
    run = lines(tmp_path / "outputs" / "one")
    found = [(line["train/loss"], line["train/grad_norm"]) for line in run]
    exact = config.train.precision == "fp32"
    wanted = on_one_device(config, range(STEPS))
    np.testing.assert_allclose(
        found, wanted, rtol=1e-5 if exact else 2e-2, err_msg=" ".join(settings)
    )
