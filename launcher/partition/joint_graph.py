"""Trace a stage's forward and backward pass on one slice of the batch as one program.

Its values have names that the runtime knows them by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax

from launcher.partition.layout import Layout
from launcher.partition.named_dims import Spec
from launcher.partition.remat import Policy, segments
from launcher.partition.stages import StageGraph
from launcher.trace import (
    CHEAP,
    Atom,
    Equation,
    Jaxpr,
    Loss,
    Var,
    called_instead,
    captured,
    free_vars,
    inline_calls,
    is_checkpoint,
    is_var,
    jaxpr_as_fun,
    make_jaxpr,
    needed,
    read_jaxpr,
    runs_again,
    structure_text,
)

# The functions of segments by their computation, kept for as long as a step is planned.
Known: TypeAlias = dict[object, Callable[..., Any]]


class Name(NamedTuple):
    """What a value of a stage is: its kind, and which one of that kind.

    "operand", "result", "grad": of the loss, by index (a gradient by its operand's).
    "activation": a variable of the loss. "cotangent": the gradient of an activation that a stage
    sends back, as `(activation, stage)`. "seed": the gradient of the loss itself.
    "residual": a variable of the joint program that one pass leaves to a later one.
    "per_replica": a gradient of all replicas, by its operand. "packed": the sum of a bucket.
    """

    kind: str
    of: Any


@dataclass(frozen=True, eq=False)
class JointGraph:
    """The joint program.

    Attributes:
        inputs, outputs: each value's variable. constants: arrays that the program captures.
        slices: the inputs that differ from slice to slice.
    """

    inputs: Mapping[Name, Var]
    outputs: Mapping[Name, Atom]
    equations: Sequence[Equation]
    constants: Mapping[Var, Any]
    slices: frozenset[Var]

    def named(self, kind: str) -> list[Name]:
        """Return the outputs of a kind."""
        return [name for name in self.outputs if name.kind == kind]

    @property
    def gradients_in(self) -> list[Var]:
        """The inputs that a backward pass waits for."""
        return [v for name, v in self.inputs.items() if name.kind in ("cotangent", "seed")]


def trace_joint(
    graph: StageGraph,
    loss: Loss,
    grads: Sequence[int],
    varying: Sequence[int],
    remat: str,
    open_checkpoints: bool,
    known: Known | None = None,
) -> JointGraph:
    """Trace a stage's forward and backward pass as one program.

    Its outputs are the activations out, the results, the gradients and the cotangents that the
    stage sends back; with neither of the last two it has no backward pass.

    Args:
        graph: the stage.
        loss: the loss that it is a part of.
        grads: the operands whose gradients are wanted.
        varying: the operands that differ from slice to slice.
        remat: what the pullback recomputes, a string of `base.names`.
        open_checkpoints: whether a `jax.checkpoint` may be cut, too.
        known: of what is traced with the same memo, equal layers are differentiated once: faster,
            but an equation may have the source line and the scopes of another layer's. None: each
            by itself.
    """
    reads = {
        **{Name("operand", i): loss.invars[i] for i in graph.operands},
        **{Name("activation", v): v for v in graph.activations_in},
    }
    forward = _in_segments(graph, list(reads.values()), remat, known)
    made = [Name("activation", v) for v in graph.activations_out]
    made += [Name("result", i) for i in graph.results]
    wrt = [Name("operand", i) for i in grads] + [Name("activation", v) for v in graph.active_in]
    heads = [Name("activation", v) for v in graph.active_out]
    heads += [Name("result", 0)] if loss.wrt and 0 in graph.results else []
    inputs = reads | (_gradients_in(graph, loss) if wrt else {})

    def joint(*flat: Any) -> list[Any]:
        values = dict(zip(inputs, flat, strict=True))

        def of_wrt(diff: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            full = values | dict(zip(wrt, diff, strict=True))
            outs = forward(*(full[name] for name in reads))
            return [outs[made.index(name)] for name in heads], outs

        diff = [values[name] for name in wrt]
        if not wrt:
            return of_wrt(diff)[1]
        _, pullback, outs = jax.vjp(of_wrt, diff, has_aux=True)
        (back,) = pullback([_gradient(name, values) for name in heads])
        return [*outs, *back]

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs.values()]
    closed = inline_calls(make_jaxpr(joint, *avals))
    if open_checkpoints:
        closed = opened(closed)
    variables = dict(zip(inputs, closed.invars, strict=True))
    outputs = [*made, *(Name("grad", i) for i in grads)]
    outputs += [Name("cotangent", (v, graph.index)) for v in graph.active_in]
    return JointGraph(
        inputs=variables,
        outputs=dict(zip(outputs, closed.outvars, strict=True)),
        equations=closed.eqns,
        constants=dict(zip(closed.constvars, closed.consts, strict=True)),
        slices=frozenset(
            v for name, v in variables.items() if name.kind != "operand" or name.of in varying
        ),
    )


def _in_segments(
    graph: StageGraph, reads: Sequence[Var], remat: str, known: Known | None
) -> Callable[..., list[Any]]:
    """Return the stage's forward pass, a function of `reads` that returns `graph.outs`.

    What is recomputed together is a `jax.checkpoint` (Chen et al. 2016, arXiv 1604.06174): the
    backward pass holds the inputs of these segments and, one after another, what one of them
    computes. The user's own checkpoints stand between them, so that nothing runs a third time. What
    depends on no value of the step, such as a causal mask, each segment makes for itself: from
    another one it would be an input, and held.
    """
    cut = segments(graph.layers, remat, by_layer=known is not None)
    if known is None and all(segment.policy is None for segment in cut):
        return jaxpr_as_fun(Jaxpr(list(reads), graph.equations, graph.outs))
    fixed = _fixed(graph.equations)
    parts: list[tuple[list[Var], list[Var], Callable[..., Any]]] = []
    wanted = {v for v in graph.outs if is_var(v)}
    for segment in reversed(cut):
        made = [v for eqn in segment.equations for v in eqn.outvars if v in wanted]
        equations = [*needed(fixed, free_vars(segment.equations)), *segment.equations]
        given = free_vars(equations)
        wanted.update(given)
        run = _run(Jaxpr(given, equations, made), segment.policy, known)
        parts.insert(0, (given, made, run))

    def forward(*values: Any) -> list[Any]:
        env = dict(zip(reads, values, strict=True))
        for given, made, run in parts:
            env.update(zip(made, run(*(env[v] for v in given)), strict=True))
        return [env[v] if is_var(v) else v.val for v in graph.outs]

    return forward


def _run(closed: Jaxpr, policy: Policy | None, known: Known | None) -> Callable[..., Any]:
    """Return the function of a segment; by `known` one for equal segments, derived once by JAX."""
    if known is not None:
        key = structure_text(closed), policy, tuple(map(id, captured(closed.eqns)))
        if key not in known:
            known[key] = jax.jit(_run(closed, policy, None))
        return known[key]
    run = jaxpr_as_fun(closed)
    return run if policy is None else jax.checkpoint(run, policy=policy)


def _fixed(equations: Sequence[Equation]) -> list[Equation]:
    """Return the cheap equations that depend on nothing but one another."""
    found: list[Equation] = []
    made: set[Var] = set()
    for eqn in equations:
        if eqn.primitive.name in CHEAP and all(v in made for v in eqn.invars if is_var(v)):
            found.append(eqn)
            made.update(eqn.outvars)
    return found


def input_spec(name: Name, layout: Layout) -> Spec:
    """Return how an input of a joint program is cut over a submesh."""
    if name.kind == "operand":
        return layout.operand(name.of)
    if name.kind == "seed":
        return ()
    return layout.activation(name.of if name.kind == "activation" else name.of[0])


def _gradients_in(graph: StageGraph, loss: Loss) -> dict[Name, Atom]:
    """Return what the backward pass is given.

    That is a gradient from every stage that reads an activation, and the loss's own where it is
    made.
    """
    pairs = zip(graph.activations_out, graph.consumers, strict=True)
    found = {
        Name("cotangent", (v, to)): v
        for v, consumers in pairs
        if v in graph.active
        for to in consumers
    }
    return found | ({Name("seed", None): loss.outvars[0]} if 0 in graph.results else {})


def _gradient(head: Name, values: Mapping[Name, Any]) -> Any:
    """Return the sum of the gradients that later stages send back, or the seed of the loss."""
    if head.kind == "result":
        return values[Name("seed", None)]
    first, *others = (
        x for name, x in values.items() if name.kind == "cotangent" and name.of[0] is head.of
    )
    for other in others:
        first = first + other
    return first


def opened(closed: Jaxpr) -> Jaxpr:
    """Replace every `jax.checkpoint` by its body.

    A barrier, like that of `jax.checkpoint`, keeps the compiler from computing only once what is to
    be recomputed.
    """
    while any(is_checkpoint(eqn) for eqn in closed.eqns):
        equations = [_as_call(eqn) if is_checkpoint(eqn) else eqn for eqn in closed.eqns]
        closed = inline_calls(dataclasses.replace(closed, eqns=equations))
    return closed


def _as_call(eqn: Equation) -> Equation:
    body = jaxpr_as_fun(read_jaxpr(eqn.params["jaxpr"]))
    again = runs_again(eqn)

    def run(*args: Any) -> Any:
        return body(*(jax.lax.optimization_barrier(args) if again else args))

    return called_instead(eqn, run, eqn.invars)
