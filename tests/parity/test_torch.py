"""Trainings equal PyTorch's from one file of arrays, however they are split.

The figures in `toy.npz` and `mlp.npz` are PyTorch's, made by `torch_figures.py`. Adam is not
compared in float32: it divides by roots of tiny second moments, and one ReLU whose input is near
zero moves it by 3e-4 in ten steps, in plain JAX as well.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from parity.step import HERE, RATES, arrays_of, check, check_on_workers

import launcher
from launcher.config.compose import load, to_dict
from launcher.driver.planning.init_from import check_start
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import local_shape
from launcher.plan.methods import (
    DataParallel,
    ParameterServer,
    PipeshardParallel,
    UniformStageOption,
)
from launcher.train.program import build_program
from launcher.train.worker import TrainWorker

# The devices and the method.
SPLITS = {
    "1 device": (1, DataParallel()),
    "2 devices": (2, DataParallel()),
    "4 devices": (4, DataParallel()),
    "8 microbatches": (4, DataParallel(num_micro_batches=8)),
    "2 stages x 2": (4, PipeshardParallel(4, stage_option=UniformStageOption(2))),
}
SIZES = {
    "toy": ("model.input_size=10", "model.widths=[10]", "model.output_size=5"),
    "mlp": ("model.input_size=12", "model.widths=[24,16]", "model.output_size=6"),
}
TOLERANCE = {"toy": 1e-6, "mlp": 1e-5}  # in float32


@pytest.fixture
def float64():
    """64 bits for every thread: programs are compiled in several."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def cases():
    """All of them; by default each split once, and each model with each optimizer."""
    default = {("mlp", "adam", split) for split in SPLITS} | {
        *(("toy", "sgd", "2 stages x 2"), ("toy", "adam", "4 devices")),
        ("mlp", "sgd", "8 microbatches"),
    }
    for name in SIZES:
        for optimizer in ("sgd", "adam"):
            for split in SPLITS:
                slow = (name, optimizer, split) not in default
                marks = pytest.mark.slow if slow else ()
                yield pytest.param(name, optimizer, split, marks=marks)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "optimizer", "split"), list(cases()))
def test_fifty_steps_in_float64(name, optimizer, split):
    count, method = SPLITS[split]
    check(name, optimizer, method=method, devices=jax.devices()[:count])


SERVED = {  # workers × devices of each
    "2 x 1": (2, 2),
    "2 x 2": (2, 4),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.sampled(2, rest="slow")
@pytest.mark.parametrize(
    ("name", "optimizer", "split"),
    [
        ("mlp", "adam", "2 x 2"),
        ("mlp", "sgd", "2 x 1"),
        ("toy", "sgd", "2 x 1"),
        ("toy", "adam", "2 x 2"),
    ],
)
def test_fifty_steps_through_parameter_servers(name, optimizer, split):
    workers, devices = SERVED[split]
    method = ParameterServer(2, servers=2, bucket_bytes=1000)
    first, second = check_on_workers(name, optimizer, method, workers, devices)
    for leaf, value in first.items():
        np.testing.assert_array_equal(second[leaf], value)


def settings(name, *words):
    """The command line's words for the float32 training: data and start are of one file."""
    file = HERE / f"{name}.npz"
    return (
        *("recipe=ddp_tutorial", *SIZES[name], f"optimizer.learning_rate={RATES[name]}"),
        *("dataset=arrays", f"dataset.path={file}", "dataset.shuffle=false"),
        *("dataset.validation_fraction=0", "train.global_batch_size=32", "train.steps=10"),
        *(f"train.init_from={file}", "wandb.mode=disabled", *words),
    )


@pytest.mark.sampled(2, rest="slow")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("toy", ("cluster.gpus=4", "parallel.num_micro_batches=8")),
        ("toy", ("cluster.gpus=1",)),
        ("mlp", ("parallel=manual", "parallel.num_stages=2", "cluster.gpus=4")),
        ("mlp", ("cluster.gpus=2",)),
    ],
)
def test_ten_steps_in_float32_by_settings(name, words):
    """What a worker of the command line does, in this process."""
    config = load(list(settings(name, *words)))
    program, shape = build_program(config), local_shape(config.cluster.gpus, 1, "cpu")
    path = HERE / f"{name}.npz"
    check_start(str(path), path, program.state.model)
    worker = TrainWorker()
    worker.build(to_dict(config))
    worker.setup(plan_of(config.parallel, program.train, shape).to_dict())
    worker.create(str(path))
    results = [worker.step(step) for step in range(1, 11)] + [worker.flush()]
    worker.close()
    losses = [result.metrics["train/loss"] for result in results[1:]]
    np.testing.assert_allclose(
        losses, arrays_of(name)["torch.float32.sgd.losses"], rtol=TOLERANCE[name]
    )


@pytest.mark.slow
def test_two_processes_of_the_command_in_float32(tmp_path):
    """2 × 2 devices; and what they end with is exported."""
    name = "mlp"
    words = settings(name, "run.id=run", "cluster.gpus=4", "cluster.hosts=2")
    environ = os.environ | {"PYTHONPATH": str(Path(launcher.__file__).parents[1])}
    for command in (words, ("task=export", "run.id=run")):
        subprocess.run(
            [sys.executable, "-m", "launcher", *command], cwd=tmp_path, env=environ, check=True
        )
    run, figures = tmp_path / "outputs" / "run", arrays_of(name)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [record["train/loss"] for record in records]
    np.testing.assert_allclose(losses, figures["torch.float32.sgd.losses"], rtol=TOLERANCE[name])
    with np.load(run / "weights-10.npz") as weights:
        for leaf in weights:
            expected = figures[f"torch.float32.sgd.{leaf}"]
            np.testing.assert_allclose(weights[leaf], expected, rtol=1e-4, atol=1e-6)
