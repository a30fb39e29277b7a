"""From a user's train step to data: what is computed before, inside and after the loss.

`trace_step` traces the step once on the whole batch. The loss inside it is traced again for a
slice of the batch whenever somebody asks for it (`TracedStep.loss`), since only the planner knows
how many slices there will be. Imported by `plan` and `runtime`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from launcher.trace.clusters import LayerEnds, recut
from launcher.trace.conditionals import split_conditionals
from launcher.trace.errors import BatchError, GradientError
from launcher.trace.graph import (
    Atom,
    Equation,
    Var,
    inline_calls,
    is_var,
    needed,
    source_line,
    structure_text,
)
from launcher.trace.layers import cut_layers
from launcher.trace.primitives import loss_p


@dataclass(frozen=True, eq=False)
class Loss:
    """The forward pass on one of `num_slices` equal slices of the batch.

    Attributes:
        invars: one variable an operand of the loss equation, in its order.
        outvars: the loss first (where something is differentiated), then the other results.
        equations, layers: the program and the layer of each equation (`ANY_LAYER`: of none).
        slice_axes: an operand's axis that is cut into slices, or None: every slice gets it whole.
        keys: whether an operand is a random key (folded with the slice's number).
        wrt: the operands that are differentiated. reduce: how each result is combined.
    """

    num_slices: int
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    layers: tuple[int, ...]
    num_layers: int
    slice_axes: tuple[int | None, ...]
    keys: tuple[bool, ...]
    wrt: tuple[int, ...]
    reduce: tuple[str, ...]


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
    retrace: Callable[[int], Equation]
    layer_ends: LayerEnds | None = None
    # the memo of `loss`
    losses: dict[tuple[int, LayerEnds | None], Loss] = field(default_factory=dict, repr=False)

    def loss(self, num_slices: int) -> Loss:
        """The loss on one of `num_slices` equal slices of the batch (cached).

        Raises:
            BatchError: the batch does not divide, or a result changes shape with it.
        """
        marked, wanted = (num_slices, None), (num_slices, self.layer_ends)
        if marked not in self.losses:
            self.losses[marked] = _loss(self, num_slices)
        if wanted not in self.losses:
            self.losses[wanted] = recut(self.losses[marked], self.layer_ends or ())
        return self.losses[wanted]

    def cut_at(self, ends: LayerEnds | None) -> TracedStep:
        """The same step with layers that end elsewhere (`clusters.cluster`); None: at the marks."""
        return dataclasses.replace(self, layer_ends=ends)


def trace_step(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    batch_argnums: Sequence[int] = (1,),
    donate_argnums: Sequence[int] = (0,),
) -> TracedStep:
    """Trace `fun(*args)`; `args` are pytrees of arrays or `jax.ShapeDtypeStruct`, whole batch.

    Raises:
        GradientError: `fun` does not go through `launcher.grad`/`value_and_grad`/`microbatched`
            exactly once.
        BatchError: the batch's leaves disagree about their first axis.
    """
    args = tuple(jax.tree.map(_abstract, tuple(args)))
    flags = _leaf_flags(args, batch_argnums), _leaf_flags(args, donate_argnums)
    batch_size = _batch_size(args, flags[0])
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    closed = inline_calls(closed)
    equations = closed.jaxpr.eqns
    place = _only_loss(fun, equations)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    loss_equation = _with_named_operands(equations[place], constants)
    before = needed(equations[:place], loss_equation.invars)
    early = {id(e) for e in before}
    rest = [e for e in equations if e is not equations[place] and id(e) not in early]
    after = needed(split_conditionals(rest), closed.jaxpr.outvars)

    def retrace(num_slices: int) -> Equation:
        small = [
            _shrink(leaf, num_slices) if is_batch else leaf
            for leaf, is_batch in zip(jax.tree.leaves(args), flags[0], strict=True)
        ]
        again = jax.make_jaxpr(fun)(*jax.tree.unflatten(jax.tree.structure(args), small))
        again_equations = inline_calls(again).jaxpr.eqns
        return again_equations[_only_loss(fun, again_equations)]

    return TracedStep(
        in_tree=jax.tree.structure(args),
        out_tree=jax.tree.structure(out_shape),
        in_avals=tuple(v.aval for v in closed.jaxpr.invars),
        invars=tuple(closed.jaxpr.invars),
        constants=constants,
        before=tuple(before),
        loss_equation=loss_equation,
        after=tuple(after),
        outvars=tuple(closed.jaxpr.outvars),
        donated=flags[1],
        batch=flags[0],
        batch_size=batch_size,
        aliases=_aliases(args, donate_argnums, out_shape),
        fingerprint=_fingerprint(closed.jaxpr, flags),
        retrace=retrace,
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


def _loss(step: TracedStep, num_slices: int) -> Loss:
    eqn = step.loss_equation
    if step.batch_size % num_slices:
        raise BatchError(
            f"a batch of {step.batch_size} does not divide into {num_slices} equal slices "
            "(microbatches × data-parallel replicas); change the batch size or either number"
        )
    if num_slices > 1:
        eqn = step.retrace(num_slices)
        _check_outputs(step.loss_equation, eqn, num_slices)
    closed = eqn.params["jaxpr"]
    for i in eqn.params["wrt"] if num_slices > 1 else ():
        if (
            _slice_axis(step.loss_equation.invars[i].aval, eqn.invars[i].aval, num_slices)
            is not None
        ):
            raise BatchError(
                "the loss is differentiated with respect to the batch, of which a microbatch sees "
                "only a part; take that gradient without microbatches and replicas"
            )
    equations, layers, num_layers = cut_layers(closed.jaxpr)
    axes = [
        _slice_axis(whole.aval, part.aval, num_slices)
        for whole, part in zip(step.loss_equation.invars, eqn.invars, strict=True)
    ]
    return Loss(
        num_slices=num_slices,
        invars=tuple(closed.jaxpr.invars),
        outvars=tuple(closed.jaxpr.outvars),
        equations=tuple(equations),
        layers=tuple(layers),
        num_layers=num_layers,
        slice_axes=tuple(axes),
        keys=tuple(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key) for v in eqn.invars),
        wrt=eqn.params["wrt"],
        reduce=eqn.params["reduce"],
    )


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(jax.numpy.shape(leaf), jax.numpy.result_type(leaf))


def _leaf_flags(args: tuple[Any, ...], argnums: Sequence[int]) -> tuple[bool, ...]:
    wanted = {range(len(args))[n] for n in argnums if n < len(args)}
    return tuple(i in wanted for i, arg in enumerate(args) for _ in jax.tree.leaves(arg))


def _batch_size(args: tuple[Any, ...], is_batch: Sequence[bool]) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(args)
    sizes = {
        jax.tree_util.keystr(path): leaf.shape[0]
        for (path, leaf), wanted in zip(leaves, is_batch, strict=True)
        if wanted and leaf.shape
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise BatchError(f"the batch's leaves differ along axis 0 ({listed}); they must agree")
    return next(iter(sizes.values()), 1)


def _shrink(leaf: Any, num_slices: int) -> Any:
    if not leaf.shape:
        return leaf
    return jax.ShapeDtypeStruct((leaf.shape[0] // num_slices, *leaf.shape[1:]), leaf.dtype)


def _only_loss(fun: Callable[..., Any], equations: Sequence[Equation]) -> int:
    places = [i for i, eqn in enumerate(equations) if eqn.primitive is loss_p]
    if len(places) == 1:
        return places[0]
    name = getattr(fun, "__name__", repr(fun))
    if not places:
        raise GradientError(
            f"{name} takes no gradient through launcher.grad or launcher.value_and_grad. Use one "
            "of them instead of jax.grad (or launcher.microbatched in an evaluation step)"
        )
    lines = " and ".join(source_line(equations[i]) for i in places)
    raise GradientError(
        f"{name} calls launcher.grad, value_and_grad or microbatched {len(places)} times "
        f"({lines}); "
        "a parallelized step takes its gradients in one place"
    )


def _slice_axis(whole: Any, part: Any, num_slices: int) -> int | None:
    axes = [i for i, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if not axes:
        return None
    if len(axes) > 1 or whole.shape[axes[0]] != num_slices * part.shape[axes[0]]:
        raise BatchError(
            f"an input of the loss has shape {whole.shape} on the whole batch and {part.shape} on "
            f"one of {num_slices} slices; it must grow along one axis in proportion to the batch"
        )
    return axes[0]


def _check_outputs(whole: Equation, part: Equation, num_slices: int) -> None:
    shapes = zip(whole.outvars, part.outvars, part.params["reduce"], strict=False)
    for i, (a, b, word) in enumerate(shapes):
        if word == "mean" and not jax.numpy.issubdtype(b.aval.dtype, jax.numpy.inexact):
            raise BatchError(
                f"result {i} of the loss is {b.aval.dtype}, whose mean over microbatches is not "
                'defined; say reduce="sum" or "last" for it'
            )
        grown = (b.aval.shape[0] * num_slices, *b.aval.shape[1:]) if b.aval.shape else None
        if a.aval.shape != (grown if word == "concat" else b.aval.shape):
            raise BatchError(
                f"result {i} of the loss has shape {a.aval.shape} on the whole batch and "
                f"{b.aval.shape} on one of {num_slices} slices, which reduce={word!r} cannot "
                'combine; say "concat" for a result with a row per example'
            )


def _aliases(args: tuple[Any, ...], donate_argnums: Sequence[int], out: Any) -> dict[int, int]:
    """Result leaves that take a donated argument's place: the first result of its structure."""
    results = list(out) if type(out) in (tuple, list) else [out]
    out_starts = _starts(results)
    in_starts = _starts(args)
    aliases: dict[int, int] = {}
    for n in donate_argnums:
        for start, result in zip(out_starts, results, strict=True):
            if start not in aliases and _same(args[n], result):
                count = len(jax.tree.leaves(result))
                aliases.update((start + i, in_starts[n] + i) for i in range(count))
                break
    return aliases


def _starts(trees: Sequence[Any]) -> list[int]:
    counts = [len(jax.tree.leaves(tree)) for tree in trees]
    return list(itertools.accumulate(counts, initial=0))[:-1]


def _same(a: Any, b: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(a), jax.tree.structure(b)]
    if structures[0] != structures[1]:
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)


def _fingerprint(jaxpr: jex.Jaxpr, flags: Any) -> str:
    return hashlib.sha256(structure_text(jaxpr, {"flags": flags}).encode()).hexdigest()[:16]
