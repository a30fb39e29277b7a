"""What a program of the table is, the methods that run it, and what holds it against one device."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.trace import BatchError, JoinedError

ROWS, STEPS, DEVICES = 16, 3, 4
TWO_STAGES = launcher.UniformStageOption(num_stages=2)
METHODS = {
    "data": launcher.DataParallel(),
    "stages": launcher.PipeshardParallel(num_micro_batches=2, stage_option=TWO_STAGES),
    "shard": launcher.ShardParallel(logical_mesh_shape=(2, 2)),
    "zero3": launcher.Zero3Parallel(),
    "one_microbatch": launcher.PipeshardParallel(num_micro_batches=1, stage_option=TWO_STAGES),
    "auto": launcher.PipeshardParallel(num_micro_batches=None, stage_option="auto"),
}


@dataclass(frozen=True)
class Refused:
    """The step is refused, with an error of this class whose message matches the pattern."""

    match: str
    error: type[Exception] = BatchError


@dataclass(frozen=True, eq=False)
class Program:
    """A train step `step(state, batch) -> (state, metrics)`.

    Attributes:
        init: returns the first state.
        build: makes the step, with a function in the place of `launcher.value_and_grad`.
        batch: `batch(k)` is the k-th batch.
        refused: by the names of methods; any other method equals one device.
        reference: makes what `build` does of `jax.value_and_grad`, for so many slices of the batch;
            None: the step of `build` itself. It is for what each slice computes by itself.
    """

    init: Callable[[], Any]
    build: Callable[[Any], Any]
    batch: Callable[[int], Any]
    refused: Mapping[str, Refused] = field(default_factory=dict)
    reference: Callable[[int], Any] | None = None


def everywhere(match: str, error: type[Exception]) -> dict[str, Refused]:
    """Refused by every method."""
    return dict.fromkeys(METHODS, Refused(match, error))


def one_microbatch_only(match: str) -> dict[str, Refused]:
    """Right on the whole batch alone: refused where there are to be several microbatches."""
    return {"stages": Refused(rf"{match}.*Ask for one microbatch", JoinedError)}


def several_slices(match: str, error: type[Exception] = BatchError) -> dict[str, Refused]:
    """Refused wherever the batch is cut, into replicas or microbatches."""
    return {name: Refused(match, error) for name in METHODS if name != "auto"}


# The only ones with leaves of other types, another library's modules, or arrays of keys.
SLOW = {
    *("bytes, booleans and a number", "Equinox", "Haiku with batch norm"),
    *("keys of layers", "raw key in the loss"),
}


def cases(programs: Mapping[str, Program], every: int = 12) -> list[Any]:
    """Every program by every method, as parameters of a test.

    Without being asked for one program in `every` runs, in two stages of two replicas each, which
    tell the most, or by data parallelism where they are refused. One in twelve is slow by a method,
    in turn, and those of `SLOW`; all else is for `stress`.
    """

    def marks(i: int, name: str, program: Program, method: str) -> Any:
        told_most = "data" if "stages" in program.refused else "stages"
        if i % every == 0 and method == told_most:
            return []
        in_turn = i % 12 == 6 and i // 12 % len(METHODS) == place[method]
        is_slow = in_turn or (name in SLOW and method == told_most)
        return [pytest.mark.slow if is_slow else pytest.mark.stress]

    place = {method: i for i, method in enumerate(METHODS)}
    return [
        pytest.param(name, method, marks=marks(i, name, program, method))
        for (i, (name, program)), method in itertools.product(enumerate(programs.items()), METHODS)
    ]


def table_test(programs: Mapping[str, Program]) -> Any:
    """The test of a table of programs: each equals one device, or is refused as it declares."""

    @pytest.mark.parametrize(("name", "method"), cases(programs))
    def test(name: str, method: str) -> None:
        check(programs[name], method)

    return test


def trained(step: Any, program: Program) -> list[Any]:
    """The state and the metrics after each step."""
    state, found = program.init(), []
    for k in range(STEPS):
        state, metrics = step(state, program.batch(k))
        found.append(jax.device_get(jax.tree.map(plain, (state, metrics))))
    return found


def plain(x: Any) -> Any:
    """An array, or the data of random keys."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@functools.cache
def one_device(program: Program, num_slices: int) -> list[Any]:
    """The training by `jax.jit` on one device."""
    if program.reference is None:
        step = program.build(jax.value_and_grad)
    else:
        step = program.reference(num_slices)
    found = trained(jax.jit(step), program)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(found) if is_inexact(x))
    return found


def is_inexact(x: Any) -> bool:
    """Whether an array holds floating-point numbers."""
    return np.issubdtype(np.asarray(x).dtype, np.inexact)


def check(program: Program, method: str, rtol: float = 1e-5, devices: int = DEVICES) -> None:
    """Hold a program by a method against one device, or against the refusal that it declares."""
    step = launcher.parallelize(
        program.build(launcher.value_and_grad),
        method=METHODS[method],
        devices=jax.devices()[:devices],
        donate_argnums=(),
    )
    refused = program.refused.get(method)
    if refused is not None:
        expect_refusal(lambda: trained(step, program), refused)
        return
    got = trained(step, program)
    plan = step.last_plan
    slices = plan.num_micro_batches * plan.num_replicas
    want = one_device(program, 1 if program.reference is None else slices)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b, rtol)


def expect_refusal(run: Callable[[], Any], refused: Refused) -> None:
    """Run what must be refused as is declared."""
    try:
        run()
    except refused.error as error:
        message = str(error)
    else:
        raise AssertionError("this program was refused before, and runs")
    assert re.search(refused.match, message, re.DOTALL), message


def assert_same(got: Any, want: Any, rtol: float) -> None:
    """To `rtol` of an array's largest entry: of a sum whose terms cancel, no more is known."""

    def close(path: Any, a: Any, b: Any) -> None:
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        scale = float(np.abs(b).max(initial=0)) if is_inexact(b) else 0.0
        np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * scale, err_msg=jax.tree_util.keystr(path)
        )

    jax.tree_util.tree_map_with_path(close, got, want)
