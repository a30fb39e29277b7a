"""The front door for Python code: a step, and what `parallelize` makes of it.

@launcher.parallelize(method=launcher.PipeshardParallel(num_micro_batches=8))
def train_step(state, batch): ...

state = train_step.create(init, key, like=batch)
state, metrics = train_step(state, batch)

Where it runs is `launcher.api.session`'s affair. `launcher` offers these names.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from launcher.api.ray_backend import RayBackend, RemoteExecutable
from launcher.api.session import LocalBackend, current
from launcher.api.signature import Signature, Traceable, kind
from launcher.plan import Plan, PlanError
from launcher.plan.methods import DataParallel, Follow, Method
from launcher.runtime import Executable, Transport
from launcher.trace import TracedStep, trace_step

_spec = operator.attrgetter("shape", "dtype")


@dataclass(eq=False)
class _Variant:
    """The step for arguments of one kind: traced and planned, and compiled when it first runs."""

    source: Traceable
    step: TracedStep
    plan: Plan
    executable: Executable | RemoteExecutable | None = None


@dataclass(frozen=True)
class _Last:
    """The arguments of the last call, as far as they decide which variant runs."""

    tree: Any
    specs: list[Any]
    static: tuple[Any, ...]
    followed: Plan | None
    variant: _Variant


class ParallelizedFunction:
    """A step that runs on many devices; made by `parallelize`.

    It is called like the function it was made from. Arguments that are donated are consumed;
    nothing is waited for. The results are arrays, each on the devices of its stage: `jax.Array`s,
    or after `launcher.init("ray")` handles (`RemoteArray`) to arrays on the workers.
    """

    def __init__(
        self,
        signature: Signature,
        method: Method | ParallelizedFunction,
        local: LocalBackend | None,
    ) -> None:
        self._signature, self._method, self._local = signature, method, local
        self._variants: dict[Any, _Variant] = {}
        self._last: _Last | None = None
        self._backend: LocalBackend | RayBackend | None = None
        functools.update_wrapper(self, signature.fun)
        self.__name__: str = signature.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; the first call with new shapes, dtypes or static values compiles."""
        args = self._signature.positional(args, kwargs)
        dynamic, static = self._signature.split(args)
        variant = self._same_as_last(dynamic, static)
        if variant is None:
            variant = self._variant(args, says=True)
        return self._compiled(variant)(*dynamic)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments like these (arrays, or `jax.ShapeDtypeStruct`s).

        Raises:
            TraceError, PlanError: the step cannot be traced, or planned on these devices.
        """
        return self._variant(self._signature.positional(args, kwargs)).plan

    def executable(self, *args: Any, **kwargs: Any) -> Executable | RemoteExecutable:
        """The compiled step for arguments like these (arrays, or `jax.ShapeDtypeStruct`s)."""
        return self._compiled(self._variant(self._signature.positional(args, kwargs)))

    def create(self, init: Callable[..., Any], *init_args: Any, like: Any) -> Any:
        """Make the step's first argument, `init(*init_args)`, in place: each array is born on the
        devices of its stage, and the whole is nowhere.

        Args:
            like: the step's other argument, or a tuple of them: arrays or shapes.
        """
        others = like if isinstance(like, tuple) else (like,)
        state = jax.eval_shape(init, *init_args)
        return self.executable(state, *others).create(init, *init_args)

    @property
    def last_plan(self) -> Plan:
        """The plan that was used last. Raises PlanError where there is none yet."""
        if self._last is None or self._backend != self._where():
            raise PlanError(
                f"{self.__name__} has no plan to follow yet; call it, its create or its plan first"
            )
        return self._last.variant.plan

    # -- which variant ---------------------------------------------------------------------------

    def _same_as_last(self, dynamic: tuple[Any, ...], static: tuple[Any, ...]) -> _Variant | None:
        """The last call's variant, if these arguments are of its kind: the usual case, made
        cheap."""
        last = self._last
        if last is None or self._backend != self._where() or last.followed is not self._followed:
            return None
        leaves, tree = jax.tree.flatten(dynamic)
        try:
            same = tree == last.tree and list(map(_spec, leaves)) == last.specs
        except AttributeError:  # a Python number, or what is no array
            return None
        return last.variant if same and static == last.static else None

    def _variant(self, args: tuple[Any, ...], says: bool = False) -> _Variant:
        if self._backend != (backend := self._where()):
            self._variants.clear()
            self._backend, self._last = backend, None
        dynamic, static = self._signature.split(args)
        followed = self._followed
        leaves, tree = jax.tree.flatten(dynamic)
        for i, leaf in enumerate(leaves):
            self._signature.check(leaf, i, dynamic)
        key = tree, tuple(map(kind, leaves)), static, id(followed)
        if key not in self._variants:
            variant = self._planned(self._signature.traceable(dynamic, static))
            last, self._variants[key] = self._last, variant
            if says and last and last.variant.executable and last.followed is followed:
                self._say_again(last, tree, static, variant)
        specs = [_spec(leaf) if hasattr(leaf, "dtype") else None for leaf in leaves]
        self._last = _Last(tree, specs, static, followed, self._variants[key])
        return self._last.variant

    @property
    def _followed(self) -> Plan | None:
        """The plan of the function that this one follows, if it does."""
        method = self._method
        return method.last_plan if isinstance(method, ParallelizedFunction) else None

    def _planned(self, source: Traceable) -> _Variant:
        assert self._backend is not None
        method = self._method
        if isinstance(method, ParallelizedFunction):
            method = Follow(method.last_plan)
        step = trace_step(
            source.fun,
            source.args,
            batch_argnums=source.batch_argnums,
            donate_argnums=source.donate_argnums,
        )
        return _Variant(source, step, method.plan(step, self._backend.shape))

    def _compiled(self, variant: _Variant) -> Executable | RemoteExecutable:
        if variant.executable is None:
            assert self._backend is not None
            backend = self._backend
            variant.executable = backend.compile(variant.step, variant.plan, variant.source)
        return variant.executable

    def _where(self) -> LocalBackend | RayBackend:
        return self._local or current()

    def _say_again(self, last: _Last, tree: Any, static: Any, variant: _Variant) -> None:
        """Warn that the step is compiled again, and for what change; not for a new static value,
        which is no surprise."""
        told = "its arguments have another structure"
        if static != last.static:
            return
        if tree == last.tree:
            before, now = (jax.tree.leaves(v.source.args) for v in (last.variant, variant))
            i = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
            path = self._signature.path(i, variant.source.args)
            told = f"{path} is {_text(now[i])}, was {_text(before[i])}"
        warnings.warn(f"{self.__name__} is compiled again: {told}", stacklevel=4)


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | ParallelizedFunction | None = None,
    donate_argnums: int | Sequence[int] = (0,),
    batch_argnums: int | Sequence[int] = (1,),
    static_argnums: int | Sequence[int] = (),
    devices: Sequence[jax.Device] | None = None,
    transport: Transport | None = None,
) -> Any:
    """Run a train or evaluation step by a parallel method; a function or a decorator.

    Args:
        fun: the step. Its gradients go through `launcher.grad` or `value_and_grad`; an evaluation
            step goes through `launcher.microbatched`.
        method: how; by default `DataParallel()`. For an evaluation step: the parallelized train
            step whose placement it follows.
        donate_argnums: arguments that a call consumes; the first result of the same structure
            takes their place.
        batch_argnums: arguments whose leaves are cut along axis 0 into microbatches and replicas.
        static_argnums: arguments that are hashable Python values, not arrays; a new value
            compiles again.
        devices: on which, of this process; by default where `launcher.init` says, else
            `jax.devices()`. transport: between processes, if these are of several.

    Raises:
        TraceError: an argument is static and batch, or static and donated.
    """
    local = None
    if devices is not None or transport is not None:
        local = LocalBackend(tuple(devices) if devices is not None else None, transport)

    def wrap(fun: Callable[..., Any]) -> ParallelizedFunction:
        signature = Signature.of(fun, donate_argnums, batch_argnums, static_argnums)
        return ParallelizedFunction(signature, method or DataParallel(), local)

    return wrap if fun is None else wrap(fun)


def _text(leaf: jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
