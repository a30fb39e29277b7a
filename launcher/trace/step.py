"""From a user's train step to data: what is computed before, inside and after the loss.

`trace_step` traces the step once on the whole batch. The loss inside it is traced again for a slice
of the batch whenever somebody asks for it (`TracedStep.loss`), since only the planner knows how
many slices there will be.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from launcher.trace.arguments import Arguments, aliases, batch_size, read_arguments
from launcher.trace.auto_layers import LayerEnds, apply_layer_ends
from launcher.trace.conditionals import split_conditionals
from launcher.trace.errors import BatchError, GradientError, TraceError
from launcher.trace.jaxpr import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    inline_calls,
    is_var,
    make_jaxpr,
    make_jaxpr_and_shape,
    needed,
    source_line,
    structure_text,
    sub_jaxprs,
)
from launcher.trace.primitives import loss_p
from launcher.trace.slices import Loss, Traces, resized, slice_loss
from launcher.trace.split_loss import split_loss
from launcher.trace.stop_at_loss import LossReachedError, stopping_at_loss


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A train step (or, with nothing differentiated, an evaluation step) as data.

    Attributes:
        in_tree, out_tree, in_avals: the step's arguments and results, whole batch shapes.
        invars: one variable an argument leaf. constants: captured arrays by their variable.
        before, loss_equation, after: the outer program, split at the loss.
        outvars: one atom a result leaf.
        donated, batch: per argument leaf. batch_size: rows along axis 0 of the batch leaves.
        aliases: result leaf -> the donated argument leaf whose place it takes.
        fingerprint: equal for equal programs, in every process.
        layer_ends: where layers end instead of at the marks (`cut_at`); None: at the marks.
    """

    in_tree: Any
    out_tree: Any
    in_avals: tuple[Any, ...]
    invars: tuple[Var, ...]
    constants: dict[Var, Any]
    before: tuple[Equation, ...]
    loss_equation: Equation
    after: tuple[Equation, ...]
    outvars: tuple[Atom, ...]
    donated: tuple[bool, ...]
    batch: tuple[bool, ...]
    batch_size: int
    aliases: dict[int, int]
    fingerprint: str
    traces: Traces
    layer_ends: LayerEnds | None = None
    # the memo of `loss`
    losses: dict[tuple[int, LayerEnds | None], Loss] = field(default_factory=dict, repr=False)

    @property
    def operands(self) -> tuple[Var, ...]:
        """The operands of the loss."""
        return tuple(v for v in self.loss_equation.invars if is_var(v))  # as all of them are

    def loss(self, num_slices: int) -> Loss:
        """The loss on one of `num_slices` equal slices of the batch (cached).

        Raises:
            BatchError: the batch does not divide, or slices cannot compute what the loss means.
        """
        if num_slices > 1 and not any(self.batch):
            raise BatchError(
                f"the batch holds no arrays, and is to be cut into {num_slices} slices "
                "(microbatches × data-parallel replicas); ask for one microbatch, and share the "
                "work along the model axis"
            )
        marked, wanted = (num_slices, None), (num_slices, self.layer_ends)
        if marked not in self.losses:
            self.losses[marked] = slice_loss(self.traces, num_slices)
        if wanted not in self.losses:
            self.losses[wanted] = apply_layer_ends(self.losses[marked], self.layer_ends or ())
        return self.losses[wanted]

    def cut_at(self, ends: LayerEnds | None) -> TracedStep:
        """The same step with layers that end elsewhere (`auto_layers`); None: at the marks."""
        return dataclasses.replace(self, layer_ends=ends)


def trace_step(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    batch_argnums: Sequence[int] = (1,),
    donate_argnums: Sequence[int] = (0,),
    static_argnums: Sequence[int] = (),
) -> TracedStep:
    """Trace `fun(*args)`.

    Args:
        fun: the train step.
        args: pytrees of arrays or `jax.ShapeDtypeStruct`, of the whole batch.
        batch_argnums: the arguments whose leaves are cut along axis 0.
        donate_argnums: those that a call consumes.
        static_argnums: those that are Python values, baked into the program. The traced step takes
            None in their place (`arguments.without_static`).

    Raises:
        GradientError: `fun` does not go through `launcher.grad`/`value_and_grad`/`microbatched`
            exactly once, or does so inside a loop or a branch.
        BatchError: the batch's leaves disagree about their first axis.
        TraceError: an argument is no array, or something outside the loss has a side effect.
    """
    arguments = read_arguments(args, batch_argnums, donate_argnums, static_argnums)
    size = batch_size(arguments)

    def make(shapes: tuple[Any, ...]) -> tuple[ClosedJaxpr, Any]:
        def of_arrays(*values: Any) -> Any:
            return fun(*arguments.with_static(values))

        closed, out = make_jaxpr_and_shape(of_arrays, *shapes)
        return inline_calls(closed), out

    closed, out_shape = make(arguments.shapes)
    equations = closed.jaxpr.eqns
    place = _only_loss(fun, equations)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    loss_equation = _with_named_operands(equations[place], constants)
    in_tree = jax.tree.structure(arguments.shapes)

    @functools.cache
    def retrace(rows: int) -> Equation:
        leaves = resized(jax.tree.leaves(arguments.shapes), arguments.batch, rows)
        try:
            with stopping_at_loss():
                again, _ = make(jax.tree.unflatten(in_tree, leaves))
        except LossReachedError as reached:
            bind = functools.partial(loss_p.bind, **reached.params)
            (eqn,) = make_jaxpr(bind, *reached.avals).jaxpr.eqns
            return eqn.replace(source_info=loss_equation.source_info)
        except TraceError:
            raise
        except Exception as error:
            raise BatchError(
                f"the step cannot be traced on one of {size // rows} slices of the batch, "
                f"{rows} rows ({type(error).__name__}: {error}); it may hold the batch size as a "
                "number: read it off a shape, or write -1 in reshape"
            ) from error
        return again.jaxpr.eqns[_only_loss(fun, again.jaxpr.eqns)]

    split = split_loss(loss_equation, size, retrace, set(constants))
    loss_equation = split.traces.whole
    before = needed([*equations[:place], *split.before], loss_equation.invars)
    placed = {id(e) for e in before}
    rest = [e for e in equations if e is not equations[place] and id(e) not in placed]
    rest = [*split.after, *rest]
    _refuse_side_effects([*before, *rest])
    after = needed(split_conditionals(rest), closed.jaxpr.outvars)
    return TracedStep(
        in_tree=in_tree,
        out_tree=jax.tree.structure(out_shape),
        in_avals=tuple(v.aval for v in closed.jaxpr.invars),
        invars=tuple(closed.jaxpr.invars),
        constants=constants,
        before=tuple(before),
        loss_equation=loss_equation,
        after=tuple(after),
        outvars=tuple(closed.jaxpr.outvars),
        donated=arguments.donated,
        batch=arguments.batch,
        batch_size=size,
        aliases=aliases(arguments, out_shape),
        fingerprint=_fingerprint(closed.jaxpr, arguments),
        traces=split.traces,
    )


def _with_named_operands(eqn: Equation, constants: dict[Var, Any]) -> Equation:
    """The loss equation with a constant of its own for every operand that is a literal."""
    operands = []
    for atom in eqn.invars:
        if not is_var(atom):
            constants[name := Var(atom.aval)] = np.asarray(atom.val, atom.aval.dtype)
            atom = name
        operands.append(atom)
    return eqn.replace(invars=operands)


def _refuse_side_effects(equations: Sequence[Equation]) -> None:
    for eqn in equations:
        if eqn.effects:
            raise TraceError(
                f"{eqn.primitive.name} at {source_line(eqn)} has a side effect; the parts of a "
                "parallelized step run in several places, which must not see each other. Remove "
                "the print or callback, or return the value as a result of the step"
            )


def _only_loss(fun: Callable[..., Any], equations: Sequence[Equation]) -> int:
    name = getattr(fun, "__name__", repr(fun))
    for eqn in equations:
        if eqn.primitive is not loss_p and (inner := _loss_inside(eqn)):
            raise GradientError(
                f"{name} calls launcher.grad, value_and_grad or microbatched at "
                f"{source_line(inner)} inside {eqn.primitive.name} at {source_line(eqn)}; a "
                "parallelized step calls it outside of loops, branches and checkpoints. To "
                "accumulate gradients say num_micro_batches instead of looping; to skip an update "
                "take the gradients first and choose afterwards"
            )
    places = [i for i, eqn in enumerate(equations) if eqn.primitive is loss_p]
    if len(places) == 1:
        return places[0]
    if not places:
        raise GradientError(
            f"{name} takes no gradient through launcher.grad or launcher.value_and_grad. Use one "
            "of them instead of jax.grad (or launcher.microbatched in an evaluation step), and do "
            "not differentiate or vmap it"
        )
    lines = " and ".join(source_line(equations[i]) for i in places)
    raise GradientError(
        f"{name} calls launcher.grad, value_and_grad or microbatched {len(places)} times "
        f"({lines}); a parallelized step takes its gradients in one place: add the losses up, or "
        "return the others as aux"
    )


def _loss_inside(eqn: Equation) -> Equation | None:
    """A loss among the equations of a loop's body, a branch or another function of an equation."""
    for jaxpr in sub_jaxprs(eqn):
        for inner in jaxpr.eqns:
            found = inner if inner.primitive is loss_p else _loss_inside(inner)
            if found is not None:
                return found
    return None


def _fingerprint(jaxpr: Jaxpr, arguments: Arguments) -> str:
    flags = arguments.batch, arguments.donated
    return hashlib.sha256(structure_text(jaxpr, {"flags": flags}).encode()).hexdigest()[:16]
