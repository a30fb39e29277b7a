"""The run's computation, built from its settings.

The driver builds it to plan it, and each worker builds it again to compile it; equal fingerprints
prove that it is the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from launcher import checkpoint
from launcher.arrays.stacked_array import sharding_of, with_rows, with_stacks
from launcher.base import source_of
from launcher.checkpoint.train_state import ADAPTERS, TrainState, without_adapters
from launcher.config.schema import Config
from launcher.inference.eval_step import make_eval_step
from launcher.plan import Plan, make_forward_plan
from launcher.recipes import Batches, InputError, build_dataset, build_model
from launcher.trace import TracedStep, described_cudnn, trace_step, trace_users
from launcher.train.feed import num_batches, shapes_of
from launcher.train.lora import with_adapters
from launcher.train.optimizer import build_optimizer, check_patterns, learning
from launcher.train.step import init_state, make_train_step

if TYPE_CHECKING:
    from launcher.recipes import Dataset, Model


@dataclass(frozen=True)
class Program:
    """A run's computation and its data.

    Attributes:
        dataset: the batches.
        init: returns the first state, from the seed.
        seed: the argument of `init`, uint32.
        state: the state's shapes, a tree of `jax.ShapeDtypeStruct`.
        batch: the batch's shapes.
        train: the train step.
        evaluate: the evaluation step, or None if the run has none.
        eval_batches: the batches of an evaluation.
    """

    dataset: Dataset
    init: Callable[[jax.Array], TrainState]
    seed: np.ndarray
    state: TrainState
    batch: Any
    train: TracedStep
    evaluate: TracedStep | None
    eval_batches: int

    def by(self, plan: Plan) -> list[tuple[TracedStep, Plan]]:
        """Return the train step with its plan, and the evaluation step with one that follows it."""
        steps = filter(None, [self.evaluate])
        return [(self.train, plan), *((step, make_forward_plan(step, like=plan)) for step in steps)]


def build_program(config: Config, compute_capability: float | None = None) -> Program:
    """Build the model, the optimizer and the data, and trace both steps; compute nothing.

    Args:
        config: the settings.
        compute_capability: of the GPUs that it is for, such as 9.0; None: of CPUs, or unknown.

    Raises:
        launcher.recipes.InputError: the model or the data cannot be built.
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
    model = build_model(config.model, config.train.precision, compute_capability)
    model = with_adapters(model, config.optimizer.lora)
    init, step = build_steps(config, model)
    init = described_cudnn()(init)
    seed = np.asarray(jax.random.key_data(jax.random.key(config.run.seed)))
    state = trace_users(init, seed)[1]
    check_patterns(config.optimizer, state.params)
    batch = shapes_of(dataset.train, batch_size)
    held_out = dataset.validation if config.train.eval_every else None
    if held_out and not isinstance(held_out, Batches):
        found = shapes_of(held_out, batch_size, held_out=True)
        if found != batch:
            raise InputError(f"{source_of(held_out)} returns {found}, and for training {batch}")
    train = trace_step(step, (state, batch))
    evaluate = None
    if config.train.eval_every:
        evaluate = trace_step(make_eval_step(model), (state.model, batch), donate_argnums=())
    count = _eval_batches(config, dataset)
    return Program(dataset, init, seed, state, batch, train, evaluate, count)


def build_steps(
    config: Config, model: Model
) -> tuple[Callable[[jax.Array], TrainState], Callable[[TrainState, Any], Any]]:
    """Return what makes the first state of a model, and its train step.

    Args:
        config: the settings.
        model: the model, with the adapters that they ask for.
    """
    options = config.optimizer
    optimizer, schedule = build_optimizer(options, config.train.steps)
    learns, averages = learning(options), options.ema is not None
    skips, spikes = config.train.non_finite == "skip", config.train.spikes
    init = functools.partial(
        init_state, model, optimizer, learns=learns, averages=averages, watches=spikes != "off"
    )
    return init, make_train_step(model, optimizer, schedule, skips, learns, options.ema, spikes)


def _eval_batches(config: Config, dataset: Dataset) -> int:
    """Return how many batches an evaluation takes, where it takes none twice."""
    most, size = config.train.eval_batches, config.train.global_batch_size
    if dataset.validation and (number := num_batches(dataset.validation, size, most)) is not None:
        return number
    if config.train.eval_every:
        raise InputError(
            f"train.eval_batches=null evaluates on all that is held out, and dataset.name="
            f"{config.dataset.name} does not say how much that is; set train.eval_batches to a "
            "number, or have its build return launcher.recipes.data.batches.held_out"
        )
    return 0


def stored_part(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a model a checkpoint to start from holds: all but new adapters."""
    return {**model, "params": without_adapters(model["params"])}


def with_stored_model(state: TrainState, placed: TrainState, path: Path) -> TrainState:
    """Return a first state with a stored model, whose average begins there, too.

    Args:
        state: a first state; the memory of what is replaced is freed first.
        placed: its shapes with their shardings.
        path: a checkpoint, or files as `checkpoint.restore_model` reads them.
    """
    adapters = {}
    if without_adapters(state.params) is not state.params:
        adapters = {ADAPTERS: state.params[ADAPTERS]}
    nothing: dict[str, Any] = dict.fromkeys((*placed.model, "ema"))
    state = replace(state, **nothing)
    state = replace(state, **checkpoint.restore_model(path, stored_part(placed.model)))
    if adapters:
        state = replace(state, params={**state.params, **adapters})
    if placed.ema is None:
        return state
    learning = jax.tree.map(
        lambda average, param: None if average is None else param,
        *(placed.ema, state.params),
        is_leaf=lambda leaf: leaf is None,
    )
    return replace(state, ema=_placed_as(learning, placed.ema))


def averaged_model(state: TrainState, placed: TrainState) -> dict[str, Any]:
    """Return the model with the averages of its parameters, placed as the parameters are."""
    if state.ema is None:
        return state.model
    return {**state.model, "params": _placed_as(state.averaged["params"], placed.params)}


def _placed_as(tree: Any, like: Any) -> Any:
    """Return copies of a tree's arrays, sharded over their devices as those of `like` are."""

    def move(leaf: Any, one: Any) -> Any:
        where = sharding_of(one)
        if where is None or not where.addressable_devices:  # no part of it is here
            return leaf
        return jax.jit(lambda x: x.copy(), out_shardings=where)(leaf)

    return with_stacks(jax.tree.map(move, with_rows(tree), with_rows(like)), like)
