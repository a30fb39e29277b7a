"""The run's computation, built from its settings.

The driver builds it to plan it, and each worker builds it again to compile it; equal fingerprints
prove that it is the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from launcher.config.schema import Config
from launcher.trace import TracedStep, trace_step
from launcher.train.optimizer import build_optimizer
from launcher.train.step import TrainState, init_state, make_eval_step, make_train_step
from recipes import InputError, build_dataset, build_model

if TYPE_CHECKING:
    from recipes import Dataset


@dataclass(frozen=True)
class Program:
    """A run's computation and its data.

    Attributes:
        dataset: the batches.
        init: returns the first state, from the seed.
        seed: the argument of `init`, uint32.
        state: the state's shapes, a tree of `jax.ShapeDtypeStruct`.
        train: the train step.
        evaluate: the evaluation step, or None if the run has none.
    """

    dataset: Dataset
    init: Callable[[jax.Array], TrainState]
    seed: np.ndarray
    state: TrainState
    train: TracedStep
    evaluate: TracedStep | None


def build_program(config: Config) -> Program:
    """Build the model, the optimizer and the data, and trace both steps; compute nothing.

    Raises:
        recipes.InputError: the model or the data cannot be built.
        launcher.trace.TraceError: a step cannot be traced.
        OSError: a file cannot be read.
    """
    batch_size = config.train.global_batch_size
    dataset = build_dataset(config.dataset, config.model, batch_size, config.run.seed)
    if config.train.eval_every and dataset.validation is None:
        raise InputError(
            f"train.eval_every={config.train.eval_every} evaluates, and dataset.name="
            f"{config.dataset.name} holds nothing out for that; have its build return validation "
            "batches, or set train.eval_every=0"
        )
    model = build_model(config.model, config.train.precision)
    optimizer, schedule = build_optimizer(config.optimizer, config.train.steps)

    init = functools.partial(init_state, model, optimizer)
    seed = np.asarray(jax.random.key_data(jax.random.key(config.run.seed)))
    state = jax.eval_shape(init, seed)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dataset.train(0))
    skips = config.train.non_finite == "skip"
    train = trace_step(make_train_step(model, optimizer, schedule, skips), (state, batch))
    evaluate = None
    if config.train.eval_every:
        evaluate = trace_step(make_eval_step(model), (state.model, batch), donate_argnums=())
    return Program(dataset, init, seed, state, train, evaluate)
