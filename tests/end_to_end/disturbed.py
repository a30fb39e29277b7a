"""The run that is disturbed in many ways, and what it must come to: the bytes of one left alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from launched import lines, losses, typed

from launcher.config.schema import Config
from launcher.recipes import build_model
from launcher.train.optimizer import build_optimizer
from launcher.train.program import build_program
from launcher.train.step import init_state, make_train_step

STEPS = 40
MODEL = typed(
    "model=mlp dataset=synthetic optimizer.learning_rate=0.01 train.global_batch_size=16 "
    "train.eval_every=0 parallel=manual parallel.num_stages=2 parallel.num_micro_batches=2 "
    "cluster=emulated cluster.gpus=2 wandb.mode=disabled"
)
# Steps of 50 ms and more: whoever is to be killed in the middle of a run is found by then.
SLOW = typed("model.hidden_size=384 model.num_layers=8 train.global_batch_size=512")
WORDS = (*MODEL, f"train.steps={STEPS}", "train.checkpoint.every_steps=5", "run.id=one")


def stored(run: Path) -> dict[str, Any]:
    """The state at the end, by its parts."""
    with ocp.CheckpointManager((run / "checkpoints").absolute()) as manager:
        assert manager.latest_step() == STEPS
        return manager.restore(STEPS, args=ocp.args.StandardRestore())


def parameters(run: Path) -> list[np.ndarray]:
    return jax.tree.leaves(stored(run))


def assert_as_undisturbed(run: Path, undisturbed: Path) -> None:
    assert [line["step"] for line in lines(run)] == list(range(1, STEPS + 1))
    assert losses(run) == losses(undisturbed)
    for array, expected in zip(parameters(run), parameters(undisturbed), strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)


def on_one_device(config: Config, batches: Iterable[int]) -> list[tuple[float, float]]:
    """The loss and the gradient's norm of each step on these batches, by plain JAX."""
    program = build_program(config)
    model = build_model(config.model, config.train.precision)
    optimizer, schedule = build_optimizer(config.optimizer, config.train.steps)
    step = jax.jit(make_train_step(model, optimizer, schedule))
    state, results = init_state(model, optimizer, program.seed), []
    for k in batches:
        state, metrics = step(state, program.dataset.train(k))
        results.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return results
