"""Contents of the messages to the workers and of their answers: plain data, pickled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.api.signature import Traceable
from launcher.partition import Box
from launcher.plan import Plan

SURVIVED = {"compile", "foreach"}  # methods after whose errors the workers hold what they held
Shards = list[tuple[Box, np.ndarray]]  # of an array, each with its place in it


@dataclass(frozen=True)
class StepProgram:
    """A step as it travels to the workers: the function, the shapes of its arguments, its plan.

    Attributes:
        source: the function, and the shapes of its arguments.
        plan: the plan of the step.
        settings: the settings of `jax.config` under which it was traced, by name.
    """

    source: Traceable
    plan: Plan
    settings: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One call of a compiled step.

    Attributes:
        program: the number of the step.
        first: the number of the first leaf of the results; the others follow.
        leaves: the number of each argument leaf, or -1 for the next of the values sent with the
            message.
        consumed: the numbers that the call donates.
        profile: whether to wait for every task and measure it.
        record: whether to record it.
    """

    program: int
    first: int
    leaves: tuple[int, ...]
    consumed: tuple[int, ...]
    profile: bool = False
    record: bool = False


@dataclass(frozen=True)
class Held:
    """An array of the workers where it stands in a tree that travels to them, by its number."""

    number: int


@dataclass(frozen=True)
class Given:
    """An array of the driver where it stands in a tree that travels: a `portable` value."""

    value: Any


@dataclass(frozen=True)
class UserCall:
    """A call of a user's function on the workers' own copies of arrays.

    Attributes:
        fun: the function.
        trees: its arguments, with `Held` and `Given` in place of arrays of JAX.
        settings: the settings of `jax.config` in the driver, by name.
    """

    fun: Callable[..., Any]
    trees: tuple[Any, ...]
    settings: dict[str, Any]
