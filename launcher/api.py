"""The front door for Python code: what `import launcher` offers.

@launcher.parallelize(method=launcher.PipeshardParallel(num_micro_batches=8))
def train_step(state, batch): ...

state = train_step.create(init, key, like=batch)
state, metrics = train_step(state, batch)
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from launcher.plan import Plan, local_shape
from launcher.plan.calibration import calibrated
from launcher.plan.methods import (
    AutoLayerOption,
    AutoStageOption,
    DataParallel,
    Follow,
    ManualLayerOption,
    ManualStageOption,
    Method,
    PipeshardParallel,
    Replay,
    ShardParallel,
    ThreeDParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
)
from launcher.runtime import Executable, Transport, compile_step
from launcher.trace import TracedStep, trace_step
from launcher.trace.errors import TraceError
from launcher.trace.primitives import grad, mark_pipeline_boundary, microbatched, value_and_grad

__all__ = [
    "AutoLayerOption",
    "AutoStageOption",
    "DataParallel",
    "Follow",
    "ManualLayerOption",
    "ManualStageOption",
    "ParallelizedFunction",
    "PipeshardParallel",
    "Plan",
    "Replay",
    "ShardParallel",
    "ThreeDParallel",
    "UniformStageOption",
    "Zero2Parallel",
    "Zero3Parallel",
    "grad",
    "mark_pipeline_boundary",
    "microbatched",
    "parallelize",
    "value_and_grad",
]


class ParallelizedFunction:
    """A step that runs on many devices; made by `parallelize`.

    It is called like the function it was made from. Arguments that are donated are consumed, and
    the results are `jax.Array`s, each on the devices of its stage; nothing is waited for.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        method: Method,
        donate_argnums: Sequence[int],
        batch_argnums: Sequence[int],
        devices: Sequence[jax.Device] | None,
        transport: Transport | None,
    ) -> None:
        self._fun = fun
        self._method = method
        self._donate, self._batch = tuple(donate_argnums), tuple(batch_argnums)
        self._devices, self._transport = devices, transport
        self._made: dict[Any, tuple[TracedStep, Plan]] = {}
        self._compiled: dict[Any, Executable] = {}
        self.__name__ = getattr(fun, "__name__", "step")
        self.__doc__ = fun.__doc__

    def __call__(self, *args: Any) -> Any:
        """Run one step; the first call with new shapes compiles."""
        return self.executable(*args)(*args)

    def plan(self, *args: Any) -> Plan:
        """The plan for arguments like these (arrays, or `jax.ShapeDtypeStruct`s).

        Raises:
            TraceError, PlanError: the step cannot be traced, or planned on these devices.
        """
        return self._planned(self._key(args), args)[1]

    def executable(self, *args: Any) -> Executable:
        """The compiled step for arguments like these (arrays, or `jax.ShapeDtypeStruct`s)."""
        key = self._key(args)
        if key not in self._compiled:
            if self._compiled:
                warnings.warn(
                    f"{self.__name__} is compiled again: its arguments have new shapes or dtypes",
                    stacklevel=3,
                )
            step, plan = self._planned(key, args)
            devices = self._devices or jax.devices()
            self._compiled[key] = compile_step(step, plan, devices, self._transport)
        return self._compiled[key]

    def create(self, init: Callable[..., Any], *init_args: Any, like: Sequence[Any] | Any) -> Any:
        """Make the step's first argument, `init(*init_args)`, in place: each array is born on the
        devices of its stage.

        Args:
            like: the step's other argument, or a tuple of them: arrays or shapes.
        """
        others = like if isinstance(like, tuple) else (like,)
        state = jax.eval_shape(init, *init_args)
        return self.executable(state, *others).create(init, *init_args)

    def _planned(self, key: Any, args: tuple[Any, ...]) -> tuple[TracedStep, Plan]:
        if key not in self._made:
            step = trace_step(
                self._fun, args, batch_argnums=self._batch, donate_argnums=self._donate
            )
            devices: Any = self._devices or jax.devices()
            kind = "cpu" if devices[0].platform == "cpu" else devices[0].device_kind
            hosts = len({device.process_index for device in devices})
            shape = local_shape(len(devices), hosts, kind)
            if hosts == 1:  # several processes must come to the same plan
                shape = calibrated(shape, functools.partial(warnings.warn, stacklevel=5))
            self._made[key] = step, self._method.plan(step, shape)
        return self._made[key]

    def _key(self, args: tuple[Any, ...]) -> Any:
        leaves, tree = jax.tree.flatten(args)
        for leaf in leaves:
            if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
                raise TraceError(
                    f"{self.__name__} was given a {type(leaf).__name__}, which is no array; close "
                    "over it (functools.partial) instead of passing it"
                )
        return tree, tuple((jax.numpy.shape(x), jax.numpy.result_type(x)) for x in leaves)


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | None = None,
    donate_argnums: Sequence[int] = (0,),
    batch_argnums: Sequence[int] = (1,),
    devices: Sequence[jax.Device] | None = None,
    transport: Transport | None = None,
) -> Any:
    """Run a train or evaluation step by a parallel method; a function or a decorator.

    Args:
        fun: the step. Its gradients go through `launcher.grad` or `value_and_grad`; an evaluation
            step goes through `launcher.microbatched`.
        method: how; by default `DataParallel()`.
        donate_argnums: arguments that a call consumes; the first result of the same structure
            takes their place.
        batch_argnums: arguments whose leaves are cut along axis 0 into microbatches and replicas.
        devices: on which; by default `jax.devices()`. transport: between processes, if several.
    """

    def wrap(fun: Callable[..., Any]) -> ParallelizedFunction:
        return ParallelizedFunction(
            fun, method or DataParallel(), donate_argnums, batch_argnums, devices, transport
        )

    return wrap if fun is None else wrap(fun)
