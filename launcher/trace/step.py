"""From a user's train step to data: what is computed before, inside and after the loss.

`trace_step` traces the step once on the whole batch. The loss inside it is traced again for a slice
of the batch whenever somebody asks for it (`TracedStep.loss`), since only the planner knows how
many slices there will be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer

from launcher.base import source_of
from launcher.trace.auto_layers import LayerEnds, apply_layer_ends
from launcher.trace.errors import BatchError, JoinedError, TraceError
from launcher.trace.interface import (
    Arguments,
    Interface,
    OuterProgram,
    aliases,
    arrays_only,
    batch_size,
    leaf_names,
    read_arguments,
)
from launcher.trace.ir.cudnn import described_cudnn
from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    has_tangent,
    inline_calls,
    is_var,
    make_jaxpr,
    make_jaxpr_and_shape,
    source_line,
    structure_text,
    sub_jaxprs,
)
from launcher.trace.ir.primitive_kinds import RECOMPUTED, WITHOUT_GRADIENT
from launcher.trace.open_scans import OPEN, Stacks, open_scans
from launcher.trace.parts import (
    Part,
    cut_at_losses,
    find_losses,
    interfaces,
    is_mixed,
    no_loss,
    refuse_side_effects,
    with_named_operands,
)
from launcher.trace.primitives import calling_at_losses, loss_p, plain_gradients
from launcher.trace.slicing.draws import may_be_raw_key, raw_generator
from launcher.trace.slicing.slices import Loss, SplitLoss, Traces, slice_loss, split_loss


@dataclass(frozen=True, eq=False)
class TracedStep(OuterProgram):
    """A train step (or, with nothing differentiated, an evaluation step) as data.

    A function without a loss is a step, too, whose loss reads and makes nothing (`losses.no_loss`).

    A step with several losses is a chain of parts with one loss each (`trace.parts`). Then this is
    the first part, and has its arguments and results.

    Attributes:
        constants: captured arrays by their variable.
        batch_size: rows along axis 0 of the batch leaves.
        fingerprint: equal for equal programs, in every process.
        traces: those of the loss; None if there is none.
        layer_ends: where layers end instead of at the marks (`cut_at`); None: at the marks.
        other_losses: the parts after the first.
        of: the arguments and results of the whole step, if it has several parts.
        stacks: the arguments and results as the caller knows them, if scans are open.
    """

    constants: dict[Var, Any]
    batch_size: int
    fingerprint: str
    traces: Traces | None
    layer_ends: LayerEnds | None = None
    other_losses: tuple[TracedStep, ...] = ()
    of: Interface | None = None
    stacks: Stacks | None = None
    # the memo of `loss`
    losses: dict[tuple[int, LayerEnds | None], Loss] = field(default_factory=dict, repr=False)

    @property
    def parts(self) -> tuple[TracedStep, ...]:
        """The step's parts, one for each loss, in order."""
        return (self, *self.other_losses)

    @property
    def whole(self) -> Interface:
        """The arguments and results of the whole step."""
        return self.of or self

    @functools.cached_property
    def operand_names(self) -> tuple[str, ...]:
        """A name for every operand of the loss: the argument leaf's name, or a description."""
        words: dict[Any, str] = dict.fromkeys(self.constants, "a constant")
        words |= zip(self.invars, leaf_names(self), strict=True)
        return tuple(words.get(v, f"operand {i}") for i, v in enumerate(self.operands))

    def loss(self, num_slices: int) -> Loss:
        """Return the loss on one of `num_slices` equal slices of the batch (cached).

        Raises:
            BatchError: the batch does not divide, or slices cannot compute what the loss means.
        """
        if self.traces is None:
            return no_loss(num_slices)
        if num_slices > 1 and not any(v.aval.shape for v in self.batch_vars):
            cause = "the batch holds no arrays"
            raise JoinedError(
                f"{cause}, and is to be cut into {num_slices} slices (microbatches × data-parallel "
                "replicas). Ask for one microbatch, or give the step its examples as a batch",
                cause,
            )
        marked, wanted = (num_slices, None), (num_slices, self.layer_ends)
        if marked not in self.losses:
            self.losses[marked] = slice_loss(self.traces, num_slices)
        if wanted not in self.losses:
            self.losses[wanted] = apply_layer_ends(self.losses[marked], self.layer_ends or ())
        return self.losses[wanted]

    @functools.cached_property
    def opened(self) -> TracedStep:
        """The same step with a layer for each iteration of a scan over the parameters.

        It is the step itself if there is none, or if they are open. See `open_scans`.
        """
        if self.stacks or self.traces is None or self.other_losses or self.of is not None:
            return self
        if not (opened := open_scans(self, self.traces)):
            return self
        fingerprint = f"{self.fingerprint}{OPEN}"
        return dataclasses.replace(self, **opened, fingerprint=fingerprint, losses={})

    def planned_as(self, fingerprint: str) -> TracedStep:
        """Return the step as a plan with this fingerprint has it: with open scans, or as it is."""
        return self.opened if fingerprint.endswith(OPEN) else self

    def cut_at(self, ends: LayerEnds | None) -> TracedStep:
        """Return the same step with its layers ended elsewhere (`auto_layers`); None: at marks."""
        return dataclasses.replace(self, layer_ends=ends)


def trace_step(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    batch_argnums: Sequence[int] = (1,),
    donate_argnums: Sequence[int] = (0,),
    needs_loss: bool = True,
) -> TracedStep:
    """Trace `fun(*args)`.

    Args:
        fun: the train step.
        args: pytrees of arrays or `jax.ShapeDtypeStruct`, of the whole batch.
        batch_argnums: the arguments whose leaves are cut along axis 0.
        donate_argnums: those that a call consumes.
        needs_loss: whether the function has to have a loss. If it has none, no argument is a batch.
            Unless it calls `launcher.grad` and the like, `jax.grad` and `jax.value_and_grad` are
            the loss's (`primitives.plain_gradients`).

    Raises:
        GradientError: `fun` takes no gradient and calls no `launcher.microbatched`, or does so
            inside a loop or a branch.
        BatchError: the batch's leaves disagree about their first axis.
        TraceError: an argument is no array, or something outside the loss has a side effect.
    """
    arguments = read_arguments(args, batch_argnums, donate_argnums)
    maybe = [may_be_raw_key(leaf) for leaf in jax.tree.leaves(arguments.shapes)]
    others = arguments.without(maybe)
    if needs_loss:  # a clearer error than that of the trace
        batch_size(others)

    taking = plain_gradients if needs_loss else contextlib.nullcontext

    def make(shapes: tuple[Any, ...]) -> tuple[Jaxpr, Any]:
        with described_cudnn(), taking():
            closed, out = trace_users(fun, *shapes)
        return inline_calls(closed), out

    reached: list[Any] = []
    with calling_at_losses(lambda _, params: reached.append(params["jaxpr"])):
        closed, out_shape = make(arguments.shapes)
        if is_mixed(closed.eqns):  # the step says itself which gradient is the loss's
            taking, reached = contextlib.nullcontext, []
            closed, out_shape = make(arguments.shapes)
    equations = closed.eqns
    places = find_losses(fun, equations, needs_loss)
    constants = dict(zip(closed.constvars, closed.consts, strict=True))
    rows = {v.aval.shape[:1] for v in itertools.compress(closed.invars, others.batch)} - {()}
    no_rows = (
        k and (bool(rows - {v.aval.shape}) or raw_generator(v, equations) is not None)
        for k, v in zip(maybe, closed.invars, strict=True)
    )
    arguments = arguments.without([key or not places for key in no_rows])
    size = batch_size(arguments)
    whole = Interface(
        in_tree=jax.tree.structure(arguments.shapes),
        out_tree=jax.tree.structure(out_shape),
        invars=tuple(closed.invars),
        outvars=tuple(closed.outvars),
        donated=arguments.donated,
        batch=arguments.batch,
        aliases=aliases(arguments, out_shape),
    )
    # A trace may end at the loss that it comes to first, if that is the only one.
    may_stop = len(reached) == 1 and [equations[i].params["jaxpr"] for i in places] == reached

    @functools.cache
    def retrace(rows: int) -> list[Equation]:
        try:
            stopping = calling_at_losses(_stop) if may_stop else contextlib.nullcontext()
            with _of_slice(rows, size), stopping:
                again, _ = make(arguments.with_rows(rows))
        except _LossReachedError as end:
            avals, params = end.args
            (eqn,) = make_jaxpr(functools.partial(loss_p.bind, **params), *avals).eqns
            return [eqn.replace(source_info=equations[places[0]].source_info)]
        found = [again.eqns[place] for place in find_losses(fun, again.eqns)]
        if len(found) != len(places):
            raise BatchError(
                f"the step has {len(places)} losses on the whole batch of {size} and {len(found)} "
                f"on {rows} rows; their number must not depend on the batch's"
            )
        return found

    def split(number: int, place: int) -> SplitLoss:
        eqn = with_named_operands(equations[place], constants)
        return split_loss(eqn, size, lambda rows: retrace(rows)[number], set(constants))

    losses = {place: split(number, place) for number, place in enumerate(places)}
    refuse_side_effects([e for i, e in enumerate(equations) if i not in losses])
    parts = cut_at_losses(equations, losses, whole.outvars, whole.batch_vars | set(constants))
    return _chained(whole, parts, constants, size, _fingerprint(closed, arguments))


def trace_users(fun: Callable[..., Any], *args: Any) -> tuple[Jaxpr, Any]:
    """Return the program of a user's function, and the shapes of its results.

    Raises:
        TraceError: a result is no array, or a value is of an earlier trace.
    """

    def uncached(*values: Any) -> Any:  # JAX keeps the traces of `fun` itself
        return arrays_only(fun, fun(*values))

    closed, out = make_jaxpr_and_shape(uncached, *args)
    values = zip(closed.constvars, closed.consts, strict=True)
    left = [var for var, value in values if isinstance(value, Tracer)]
    if left:
        users = [source_line(eqn) for eqn in closed.eqns if left[0] in eqn.invars]
        raise TraceError(
            f"{source_of(fun)} uses a value that an earlier trace left behind"
            f", at {users[0] if users else 'its end'}; pass it as an argument, and return it"
        )
    return closed, out


class _LossReachedError(BaseException):
    """Ends the trace of a step at its loss: the operands' types and the equation's parameters."""


def _stop(avals: Sequence[Any], params: dict[str, Any]) -> None:
    raise _LossReachedError(avals, params)


@contextlib.contextmanager
def _of_slice(rows: int, size: int) -> Iterator[None]:
    """Turn an error of the step, traced on a slice of the batch, into a BatchError."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        raise BatchError(
            f"the step cannot be traced on one of {size // rows} slices of the batch, "
            f"{rows} rows ({type(error).__name__}: {error}); it may hold the batch size as a "
            "number: read it off a shape, or write -1 in reshape"
        ) from error


def _chained(
    whole: Interface, parts: Sequence[Part], constants: dict[Var, Any], size: int, fingerprint: str
) -> TracedStep:
    """Return a step with one loss, or the chain of parts of one with several."""
    ends = [whole]
    if len(parts) > 1:
        ends = interfaces(whole, parts, set(constants), leaf_names(whole))
    first, *others = (
        TracedStep(
            **{f.name: getattr(end, f.name) for f in dataclasses.fields(Interface)},
            constants=constants,
            before=part.before,
            loss_equation=part.loss,
            after=part.after,
            batch_size=size,
            fingerprint=f"{fingerprint}.{number}" if number else fingerprint,
            traces=part.traces,
        )
        for number, (part, end) in enumerate(zip(parts, ends, strict=True))
    )
    return dataclasses.replace(first, other_losses=tuple(others), of=whole) if others else first


def _fingerprint(jaxpr: Jaxpr, arguments: Arguments) -> str:
    flags = arguments.batch, arguments.donated
    return hashlib.sha256(structure_text(jaxpr, {"flags": flags}).encode()).hexdigest()[:16]


_MOST_NAMES = 4


def no_gradient_note(step: TracedStep) -> str | None:
    """Return a line that names the parameters that no gradient reaches; None if there are none.

    A parameter is an argument of the step that the loss is differentiated with respect to.
    """
    jaxpr: Jaxpr = step.loss_equation.params["jaxpr"]
    wrt = step.loss_equation.params["wrt"]
    reached = reached_by_gradients(jaxpr.eqns, jaxpr.outvars[:1]) if wrt else set()
    operands = {i: step.loss_equation.invars[i] for i in wrt}
    with_gradient = {operands[i] for i in wrt if jaxpr.invars[i] in reached}
    without = {v for v in operands.values() if v not in with_gradient}
    names = [n for v, n in zip(step.invars, leaf_names(step), strict=True) if v in without]
    if not names:
        return None
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    them = "it" if len(names) == 1 else "them"
    return (
        f"no gradient reaches {', '.join(names[:_MOST_NAMES])}{more}: the loss does not depend on "
        f"{them}, or only through stop_gradient or whole numbers"
    )


def reached_by_gradients(equations: Sequence[Equation], outs: Iterable[Atom]) -> set[Var]:
    """Return the values through which gradients flow back from `outs`."""
    reached = {v for v in outs if is_var(v)}
    for eqn in reversed(equations):
        found = [i for i, v in enumerate(eqn.outvars) if v in reached]
        if not found or eqn.primitive.name in WITHOUT_GRADIENT:
            continue
        operands = eqn.invars
        if eqn.primitive.name in RECOMPUTED:
            (body,) = sub_jaxprs(eqn)
            inside = reached_by_gradients(body.eqns, [body.outvars[i] for i in found])
            operands = [v for v, w in zip(operands, body.invars, strict=True) if w in inside]
        reached |= {v for v in operands if is_var(v) and has_tangent(v.aval)}
    return reached
