"""The decorator that parallelizes a step.

    @launcher.parallelize(method=launcher.PipeshardParallel(num_micro_batches=8))
    def train_step(state, batch): ...

    state = train_step.create(init, key, like=batch)
    state, metrics = train_step(state, batch)

`launcher.init` selects the backend on which it runs.
"""

from __future__ import annotations

import functools
import logging
import operator
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from launcher.api.ray_backend import RayBackend, RemoteExecutable
from launcher.api.remote_array import RemoteArray
from launcher.api.session import LocalBackend, SessionError, current, is_up
from launcher.api.signature import Argnums, Signature, Traceable, check_context, created, kind
from launcher.base import Clock, warn_once
from launcher.plan import Plan, PlanError, TooLargeError
from launcher.plan.methods import DataParallel, Follow, Method, Replay
from launcher.report.pages.timeline import ProcessSpans, Timeline
from launcher.runtime import CompiledStep, Executable, Transport, compile_now, target_for
from launcher.trace import TracedStep, TraceError, no_gradient_note, trace_step, unfixed

_AUTO = 'num_micro_batches=None, stage_option="auto"'
_log = logging.getLogger(__name__)
_spec = operator.attrgetter("shape", "dtype")
_PLANNING = threading.RLock()  # one thread at a time traces, plans and compiles


@dataclass(eq=False)
class _Variant:
    """The step for arguments of one kind: traced and planned, and compiled when it first runs."""

    source: Traceable
    step: TracedStep
    plan: Plan
    executable: Executable | RemoteExecutable | None = None


@dataclass(frozen=True)
class _Last:
    """The properties of the last call's arguments that decide which variant runs."""

    tree: Any
    specs: list[Any]
    static: tuple[Any, ...]
    followed: Plan | None
    variant: _Variant


class ParallelizedFunction:
    """A step that runs on many devices; made by `parallelize`.

    It is called like the function it was made from. Donated arguments are consumed, Flax NNX
    objects among the arguments get their new arrays, and a call does not wait for its results.
    These are arrays, each on the devices of its stage: `jax.Array`s or, after
    `launcher.init("ray")`, handles (`RemoteArray`) to arrays on the workers.
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
        results = self._compiled(variant)(*dynamic)
        return self._signature.returned(args, dynamic, static[-1], results)

    def __get__(self, instance: object, owner: type | None = None) -> ParallelizedFunction:
        """Return the function itself.

        Raises:
            TypeError: it was made from a method and is read from an instance.
        """
        if instance is None:
            return self
        raise TypeError(
            f"{self.__name__} is a method, and parallelize does not know its self; parallelize it "
            f"bound, in __init__: self.{self.__name__} = launcher.parallelize(self.{self.__name__})"
        )

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for arguments like these: arrays, or `jax.ShapeDtypeStruct`s.

        Raises:
            TraceError: the step cannot be traced.
            PlanError: the step cannot be planned on these devices.
        """
        return self._variant(self._signature.positional(args, kwargs)).plan

    def executable(self, *args: Any, **kwargs: Any) -> Executable | RemoteExecutable:
        """Return the compiled step for arguments like these: arrays, or `jax.ShapeDtypeStruct`s."""
        return self._compiled(self._variant(self._signature.positional(args, kwargs)))

    def compiled_for(self, device: str | None, *args: Any, **kwargs: Any) -> CompiledStep:
        """Return what a compiler says of the step's programs: memory, collectives, their text.

        Args:
            device: a kind of GPU, such as "h100", which need not be here: the extra
                `plan-cuda` brings the compiler. None: the programs that run
                in this process.
            *args: the arguments of a call: arrays, or `jax.ShapeDtypeStruct`s.
            **kwargs: the same, by name.

        Raises:
            PlanError: the GPU is not known, its compiler is not installed, or the programs run on
                workers and no kind is given.
        """
        variant = self._variant(self._signature.positional(args, kwargs))
        if device is not None:
            target = target_for(variant.plan, device)
            return compile_now(variant.step, variant.plan, target)
        executable = self._compiled(variant)
        if isinstance(executable, RemoteExecutable):
            raise PlanError(
                f"{self.__name__} runs on workers, which have its programs; give "
                'compiled_for a kind of GPU, such as "h100"'
            )
        return executable.compiled()

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Compile the step for these arguments and run it once, so that the next call is fast.

        The connections between workers are open then, and nothing has changed: donated arguments
        are copied, which takes as much memory again for as long as it lasts, and the results are
        dropped.

        Args:
            *args: the arguments of a call.
            **kwargs: the same, by name.

        Raises:
            WorkerError, HungError: as a call.
        """
        args = self._signature.positional(args, kwargs)
        dynamic, _ = self._signature.split(args)
        self._compiled(self._variant(args)).warm_up(*dynamic)

    def timeline(self, *args: Any, **kwargs: Any) -> tuple[Any, Timeline]:
        """Run one step as a call does, wait for it, and return when each of its parts ran.

        Returns:
            The results, and the timeline: `timeline.spans()` are what ran on each device and in
                each other lane, in nanoseconds; `timeline.save("timeline.json")` is for Perfetto.

        Raises:
            WorkerError, HungError: as a call.
        """
        args = self._signature.positional(args, kwargs)
        dynamic, static = self._signature.split(args)
        executable = self._compiled(self._variant(args))
        if isinstance(executable, RemoteExecutable):
            results, found, clocks = executable.record(*dynamic)
            pairs = enumerate(zip(found, clocks, strict=True))
            parts = [ProcessSpans(f"worker {i}", *pair) for i, pair in pairs]
        else:
            results, read = executable.record(*dynamic)
            parts = [ProcessSpans("this process", read(), Clock())]
        results = self._signature.returned(args, dynamic, static[-1], results)
        return results, Timeline().with_step(1, parts)

    def create(self, init: Callable[..., Any], *init_args: Any, like: Any) -> Any:
        """Create the step's first argument, `init(*init_args)`, already sharded.

        Each array is created on the devices of its stage; no device or process holds all of them.

        Args:
            init: returns the argument.
            *init_args: the arguments of `init`.
            like: the step's other argument, or a tuple of them: arrays or shapes.
        """
        others = like if isinstance(like, tuple) else (like,)
        made = functools.partial(created, init)
        state = jax.eval_shape(made, *init_args)
        return unfixed(self.executable(state, *others).create(made, *init_args))

    @property
    def last_plan(self) -> Plan:
        """The plan that was used last.

        Raises:
            PlanError: no plan has been made yet.
        """
        if (last := self._last) is None or self._backend != self._where():
            raise PlanError(
                f"{self.__name__} has no plan to follow yet; call it, its create or its plan first"
            )
        return last.variant.plan

    # -- which variant ---------------------------------------------------------------------------

    def _same_as_last(self, dynamic: tuple[Any, ...], static: tuple[Any, ...]) -> _Variant | None:
        """Return the last call's variant if these arguments are of its kind: a shortcut."""
        last = self._last
        if last is None or self._backend != self._where() or last.followed is not self._followed:
            return None
        leaves, tree = jax.tree.flatten(dynamic)
        if not is_up() and RemoteArray in map(type, leaves):
            return None
        try:
            same = tree == last.tree and list(map(_spec, leaves)) == last.specs
        except AttributeError:  # a Python number, or something that is no array
            return None
        return last.variant if same and static == last.static else None

    def _variant(self, args: tuple[Any, ...], says: bool = False) -> _Variant:
        with _PLANNING:
            if self._backend != (backend := self._where()):
                self._variants.clear()
                self._backend, self._last = backend, None
            dynamic, static = self._signature.split(args)
            followed = self._followed
            leaves, tree = jax.tree.flatten(dynamic)
            for i, leaf in enumerate(leaves):
                self._signature.check(leaf, i, dynamic)
                if type(leaf) is RemoteArray and not is_up():
                    path = self._signature.path(i, dynamic)
                    raise SessionError(
                        f"{path} of {self.__name__} is an array of workers whose session has "
                        "ended; call launcher.init again and create it again"
                    )
            key = tree, tuple(map(kind, leaves)), static, id(followed)
            if key not in self._variants:
                variant = self._planned(dynamic, static)
                last, self._variants[key] = self._last, variant
                if says and last and last.variant.executable and last.followed is followed:
                    self._say_again(last, tree, static, variant)
            specs = [_spec(leaf) if hasattr(leaf, "dtype") else None for leaf in leaves]
            self._last = _Last(tree, specs, static, followed, self._variants[key])
            return self._last.variant

    @property
    def _followed(self) -> Plan | None:
        """The plan of the function that this one follows, if it follows one."""
        method = self._method
        return method.last_plan if isinstance(method, ParallelizedFunction) else None

    def as_method(self) -> Follow:
        """Return the method of a function that follows this one: its last plan and step."""
        plan = self.last_plan
        assert self._last is not None
        return Follow(plan, self._last.variant.step)

    def _planned(self, dynamic: tuple[Any, ...], static: tuple[Any, ...]) -> _Variant:
        assert self._backend is not None
        check_context(self.__name__)
        method, follows = self._method, False
        if isinstance(method, ParallelizedFunction):
            method, follows = method.as_method(), True
        needs_loss = not (follows or _has_no_loss(method))
        source = self._signature.traceable(dynamic, static, needs_loss)
        # The guard is for constants that JAX's own functions make.
        with python_words(), jax.transfer_guard("allow"):
            step = trace_step(**vars(source))
            if note := no_gradient_note(step):
                warn_once(_log, f"{self.__name__}: {note}")
            return _Variant(source, step, method.plan(step, self._backend.shape(method)))

    def _compiled(self, variant: _Variant) -> Executable | RemoteExecutable:
        if variant.executable is not None:
            return variant.executable
        with _PLANNING:
            if variant.executable is None:
                backend = self._backend
                assert backend is not None
                variant.executable = backend.compile(variant.step, variant.plan, variant.source)
            return variant.executable

    def _where(self) -> LocalBackend | RayBackend:
        if isinstance(self._backend, RayBackend) and not is_up():
            raise SessionError(
                f"{self.__name__} has run on workers, whose session has ended; call launcher.init "
                'again, or launcher.init("local") to run it in this process'
            )
        return self._local or current()

    def _say_again(self, last: _Last, tree: Any, static: Any, variant: _Variant) -> None:
        """Warn that the step is compiled again, and which argument changed.

        A new static value is no surprise, so it causes no warning.
        """
        if static != last.static:
            return
        change = "its arguments have another structure"
        if tree == last.tree:
            before, now = (jax.tree.leaves(v.source.args) for v in (last.variant, variant))
            i = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
            path = self._signature.path(i, variant.source.args)
            change = f"{path} is {_text(now[i])}, was {_text(before[i])}"
        warnings.warn(f"{self.__name__} is compiled again: {change}", stacklevel=4)


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | ParallelizedFunction | None = None,
    donate_argnums: Argnums = (0,),
    batch_argnums: Argnums = (1,),
    static_argnums: Argnums = (),
    devices: Sequence[jax.Device] | None = None,
    transport: Transport | None = None,
) -> Any:
    """Run a train or evaluation step by a parallel method; a function or a decorator.

    Args:
        fun: the step. Its outermost `jax.grad` or `jax.value_and_grad`, also through a library, is
            the loss's, or only its `launcher.grad` and `value_and_grad`, if it calls them; an
            evaluation step uses `launcher.microbatched`.
        method: the parallel method, `DataParallel()` by default. For an evaluation step, the
            parallelized train step whose placement it follows; likewise for a function that uses
            gradients and takes none, which runs where the update of that step does.
        donate_argnums: the arguments that a call consumes; the first result of the same structure
            takes their place.
        batch_argnums: the arguments whose leaves are cut along axis 0 into microbatches and
            replicas; a function that takes no gradient has none.
        static_argnums: the arguments that are hashable Python values and not arrays; a new value
            compiles again. So are leaves of Equinox modules that are no arrays.
        devices: the devices of this process to run on; by default those of `launcher.init`, or else
            `jax.devices()`.
        transport: moves arrays between processes, if the devices are of several.

    Raises:
        TraceError: an argument is static and batch, or static and donated.
        PlanError: `method` is not a parallel method.

    Example:
        >>> def loss(params, batch):
        ...     return jnp.mean((batch @ params) ** 2)
        >>> @launcher.parallelize(method=launcher.DataParallel())
        ... def step(params, batch):
        ...     value, grads = launcher.value_and_grad(loss)(params, batch)
        ...     return params - 0.1 * grads, value
        >>> params, value = step(jnp.ones((4, 2)), jnp.ones((8, 4)))
        >>> float(value)
        16.0
    """
    if method is not None and (isinstance(method, type) or not hasattr(method, "plan")):
        name = getattr(method, "__name__", None)
        raise PlanError(
            f"method={name or repr(method)} is not a parallel method; give an object, such as "
            f"launcher.{name or 'PipeshardParallel'}({'' if name else _AUTO})"
        )
    local = None
    if devices is not None or transport is not None:
        local = LocalBackend(tuple(devices) if devices is not None else None, transport)

    def wrap(fun: Callable[..., Any]) -> ParallelizedFunction:
        signature = Signature.of(fun, donate_argnums, batch_argnums, static_argnums)
        return ParallelizedFunction(signature, method or DataParallel(), local)

    return wrap if fun is None else wrap(fun)


def _has_no_loss(method: Method) -> bool:
    """Return whether a method replays the plan of a function that takes no gradient."""
    return isinstance(method, Replay) and not any(s.layers for s in method.found.all_stages)


def _text(leaf: jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


_WORDS = (
    (r" \(cluster\.\w+(, cluster\.\w+)*\)", ""),
    (r"\bor use parallel=manual\b", "or a stage_option"),
    (r"\bparallel=(\w+)", r'method "\1"'),
    (r"\bparallel\.(num_stages|num_micro_batches)=auto\b", r"\1=None"),
    (r"\bparallel\.(\w+)", r"\1"),
    (r"\btrain\.global_batch_size\b", "batch size"),
    (r"\bcluster\.gpus\b", "devices"),
    (r"\bcluster\.(\w+\.)*(\w+)", r"\2"),
)


def in_python(text: str) -> str:
    """Return a message with the names that Python has for what it names by settings."""
    for setting, word in _WORDS:
        text = re.sub(setting, word, text)
    return text


@contextmanager
def python_words() -> Iterator[None]:
    """Have errors of the planner raised with the words of the Python API."""
    try:
        yield
    except TooLargeError as error:
        error.reword(in_python)
        raise
    except (PlanError, TraceError) as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
