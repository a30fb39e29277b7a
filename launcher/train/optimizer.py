"""Optimizers: Optax's transformations and learning-rate schedules, by the `optimizer` section.

Each of our optimizers is the same chain of Optax's parts: clip, scale, decay, learning rate. The
last two may differ from one group of parameters to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from launcher.base import source_of
from launcher.checkpoint.train_state import ADAPTERS, Picks, check_pattern, map_named, matches
from launcher.config.optimizer import CustomOptimizer, Group, Optimizer, Scheduled
from launcher.recipes import InputError, users_code, users_module

Schedule = Callable[[Any], jax.Array]
# From 1 to 0 over `steps` steps: shapes and not rates, so that a peak of 0 is no special case.
_DECAYS: dict[str, Callable[[int], Schedule]] = {
    "constant": lambda steps: optax.constant_schedule(1.0),
    "cosine": lambda steps: optax.cosine_decay_schedule(1.0, steps),
    "linear": lambda steps: optax.linear_schedule(1.0, 0.0, steps),
}
STACKED = "layers"  # what families name the module whose parameters a scan stacks
_EXPERTS = "experts_"  # how the names of arrays begin that hold a matrix for each expert
_RMS = 0.2  # of an update, about that of Adam's


def build_optimizer(
    options: Optimizer, total_steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
    """Build the optimizer that `options.name` selects, for a run of `total_steps` steps.

    Gradients are clipped to the global norm `clip_norm` (None: no clipping). Weight decay is
    decoupled and scaled by the learning rate (Loshchilov & Hutter, 2019, "Decoupled Weight Decay
    Regularization") for every optimizer. It leaves out parameters of fewer than two dimensions:
    biases and the scales of norms. Parameters of a group have its rate and decay; its schedule has
    the same form.

    Returns:
        The transformation, whose state is a plain Optax pytree, and the schedule: a function from
            the number of finished steps to the learning rate of the next one.
    """
    if isinstance(options, CustomOptimizer):
        return _users_own(options, total_steps)
    assert isinstance(options, Scheduled)
    schedule = build_schedule(options, total_steps)
    scaling = _SCALINGS.get(options.scaling) or getattr(optax, options.scaling)
    parts = [scaling(**options.arguments), _scale_by_rates(options, schedule, total_steps)]
    if options.weight_decay or any(group.weight_decay for group in options.groups):
        parts.insert(1, _decayed(options))
    if options.clip_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(options.clip_norm))
    return optax.chain(*parts), schedule


def learning(options: Optimizer) -> Picks | None:
    """Return which parameters learn, by their names; None: all do.

    The others have no gradient and no optimizer state.
    """
    groups = options.groups if isinstance(options, Scheduled) else []
    frozen = [group for group in groups if group.frozen]
    if options.train_only is None and not frozen and not options.lora.rank:
        return None
    is_asked = matches(options.train_only or "*")

    def learns(name: str) -> bool:
        if name.startswith(f"{ADAPTERS}.") and options.lora.rank:
            return True
        group = _group_of(groups, name)
        if (group and group.frozen) or (options.lora.rank and options.train_only is None):
            return False
        return is_asked(name)

    return learns


def check_patterns(options: Optimizer, params: Any) -> None:
    """Raise InputError if a pattern fits no parameter, or if none learns."""
    groups = options.groups if isinstance(options, Scheduled) else []
    for number, group in enumerate(groups):
        check_pattern(f"optimizer.groups[{number}].pattern", group.pattern, params)
    if options.train_only is not None:
        check_pattern("optimizer.train_only", options.train_only, params)
    learns = learning(options)
    if learns and not any(jax.tree.leaves(map_named(lambda name, _: learns(name), params))):
        raise InputError("optimizer.groups freezes all parameters; leave one to learn")


def _users_own(
    options: CustomOptimizer, total_steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
    """Return what the module `optimizer.module` builds."""
    key = f"optimizer.module={options.module}"
    module = users_module("optimizer.module", options.module, ("build",))
    made = users_code(key, module.build)(SimpleNamespace(**options.options), total_steps)
    is_pair = isinstance(made, tuple) and len(made) == 2 and callable(made[1])
    if not is_pair or not {"init", "update"} <= set(dir(made[0])):
        raise InputError(
            f"{key}: {source_of(module.build)} must return (transformation, schedule), an Optax "
            "transformation and a function from the number of updates to the learning rate"
        )
    init, update, schedule = (users_code(key, f) for f in (made[0].init, made[0].update, made[1]))
    return optax.GradientTransformation(init, update), schedule


def _group_of(groups: list[Group], name: str) -> Group | None:
    return next((group for group in groups if matches(group.pattern)(name)), None)


def _decayed(options: Scheduled) -> optax.GradientTransformation:
    """Add to each update its parameter times the weight decay of its group."""

    def add(name: str, update: jax.Array, param: jax.Array) -> jax.Array:
        group, rate = _group_of(options.groups, name), options.weight_decay
        if group and group.weight_decay is not None:
            rate = group.weight_decay
        return update + rate * param if param.ndim >= 2 and rate else update

    return optax.stateless(lambda updates, params: map_named(add, updates, params))


def _scale_by_rates(
    options: Scheduled, schedule: Schedule, total_steps: int
) -> optax.GradientTransformation:
    """Scale each update by minus the learning rate of its group."""
    schedules: dict[float | None, Schedule] = {None: schedule}
    share = options.final_learning_rate / (options.learning_rate or 1.0)
    for group in options.groups:
        peak = group.learning_rate
        if peak is not None:
            own = replace(options, learning_rate=peak, final_learning_rate=peak * share)
            schedules[peak] = build_schedule(own, total_steps)

    def init(params: Any) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(count=jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rates = {peak: -1 * one(state.count) for peak, one in schedules.items()}

        def scaled(name: str, leaf: jax.Array) -> jax.Array:
            group = _group_of(options.groups, name)
            rate = rates[group.learning_rate if group else None]
            return jnp.asarray(rate, leaf.dtype) * leaf

        count = optax.safe_increment(state.count)
        return map_named(scaled, updates), optax.ScaleByScheduleState(count=count)

    return optax.GradientTransformation(init, update)


def count_updates(opt_state: Any) -> jax.Array | None:
    """Return the number of updates, int32 [], in a state of a `build_optimizer` optimizer.

    It is None if a custom optimizer does not count them by an Optax schedule.
    """
    parts = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState))
    schedules = (part for part in parts if isinstance(part, optax.ScaleByScheduleState))
    found = next(schedules, None)
    return None if found is None else found.count


def build_schedule(options: Scheduled, total_steps: int) -> Schedule:
    """Build a linear warm-up to `learning_rate` and the decay to `final_learning_rate`.

    With w warm-up steps, step k (from 0) of the first w has learning rate `learning_rate * (k + 1)
    / (w + 1)`: no step is wasted on a rate of zero. The decay ends after `total_steps`; `constant`
    stays at `learning_rate`. `wsd` does so, too, until the last `decay_fraction` of all steps, in
    which it falls linearly (Hu et al., 2024, "MiniCPM"). `cosine_restarts` jumps back to the peak
    `restarts` times, after equal parts (Loshchilov & Hutter, 2017, "SGDR").
    """
    peak, final, warmup = options.learning_rate, options.final_learning_rate, options.warmup_steps
    steps = max(1, total_steps - warmup)
    if options.decay == "wsd":
        falling = max(1, min(steps, round(options.decay_fraction * total_steps)))
        shape = optax.linear_schedule(1.0, 0.0, falling, steps - falling)
    elif options.decay == "cosine_restarts":
        shape = _restarted_cosine(steps, options.restarts + 1)
    else:
        shape = _DECAYS[options.decay](steps)
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)

    def decay(count: Any) -> Any:
        return final + (peak - final) * shape(count)

    joined: Schedule = optax.join_schedules([rise, decay], [warmup])
    return joined


def _restarted_cosine(steps: int, parts: int) -> Schedule:
    """Return cosines from 1 to 0, one after the other; the last one stays at 0."""
    ends = [steps * part // parts for part in range(1, parts + 1)]
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    cosines = [optax.cosine_decay_schedule(1.0, max(1, length)) for length in lengths]
    joined: Schedule = optax.join_schedules(cosines, ends[:-1])
    return joined


def _scale_by_adafactor() -> optax.GradientTransformation:
    """Shazeer & Stern, 2018: update clipping at 1, steps relative to the parameter's own size."""
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


class Axes(NamedTuple):
    """The axes of an array, in order: those of a stack, and a matrix's rows and columns.

    Attributes:
        stack: the number of axes along which matrices lie beside one another.
        rows: the number of axes that are the rows.
    """

    stack: int
    rows: int

    def sizes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        """Return the sizes of the stack's axes, and the numbers of rows and columns."""
        middle = self.stack + self.rows
        inside = shape[self.stack : middle], shape[middle:]
        return shape[: self.stack], math.prod(inside[0]), math.prod(inside[1])


def matrix_axes(name: str, shape: tuple[int, ...]) -> Axes | None:
    """Return how a parameter is a matrix; None: it is none.

    With more than two axes, such as attention's heads, the leading axes are inputs and the trailing
    ones outputs, divided where the matrix is nearest to square; that is right for products that
    read or make a whole hidden state.
    """
    words = name.split(".")
    stack = (STACKED in words) + words[-1].startswith(_EXPERTS)
    inner = shape[stack:]
    if len(inner) < 2:
        return None

    def slenderness(cut: int) -> float:
        return abs(math.log(math.prod(inner[:cut]) / math.prod(inner[cut:])))

    return Axes(stack, min(range(1, len(inner)), key=slenderness))


def scale_by_muon_or_adam(
    momentum: float, adam: Sequence[str], b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    """Return a transformation of gradients: Muon for matrices, Adam for the rest.

    Args:
        momentum: of Muon.
        adam: patterns of matrices that Adam is for, such as embeddings.
        b1: of Adam, as the next two.
        b2: of Adam.
        eps: of Adam.
    """
    by_adam = matches(*adam)

    def axes(params: Any) -> Any:
        return map_named(lambda name, leaf: _numbers(name, leaf.shape), params)

    def labels(params: Any) -> Any:
        def label(name: str, leaf: Any) -> str:
            is_matrix = matrix_axes(name, leaf.shape) is not None
            return "muon" if is_matrix and not by_adam(name) else "adam"

        return map_named(label, params)

    def scaled(updates: Any, params: Any) -> Any:
        return map_named(lambda name, leaf: leaf * _factor(name, leaf.shape), updates)

    muon = scale_by_muon(beta=momentum, weight_dimension_numbers=axes)
    return optax.partition(
        {
            "muon": optax.chain(muon, optax.stateless(scaled)),
            "adam": optax.scale_by_adam(b1, b2, eps),
        },
        labels,
    )


def _numbers(name: str, shape: tuple[int, ...]) -> MuonDimensionNumbers:
    axes = matrix_axes(name, shape)
    assert axes is not None, name
    middle = axes.stack + axes.rows
    rows, columns = tuple(range(axes.stack, middle)), tuple(range(middle, len(shape)))
    return MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)


def _factor(name: str, shape: tuple[int, ...]) -> float:
    axes = matrix_axes(name, shape)
    assert axes is not None, name
    _, rows, columns = axes.sizes(shape)
    return float(_RMS * max(rows, columns) ** 0.5)


# What Optax has by another name or in several parts; by the names in `config.optimizer`.
_SCALINGS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "scale_by_momentum": lambda momentum: optax.trace(momentum),
    "scale_by_adafactor": _scale_by_adafactor,
    "scale_by_muon": scale_by_muon_or_adam,
}
