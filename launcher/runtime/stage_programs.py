"""The programs of one stage: forward, backward, and both in one.

From a `StageGraph` to jittable functions over flat lists. Residuals go from the forward to the
backward program as the leaves of the pytree that `jax.vjp` returns; a leaf that is an input, or
that follows from the parameters alone, is not carried but read or computed again. Replicas are a
`jax.vmap(spmd_axis_name=…)` axis of every activation, residual and accumulator, so that a backward
program holds no data-parallel collective. Imported by `runtime.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from launcher.plan.outer import Operand, Slicing, accumulator_dtype
from launcher.plan.stages import StageGraph
from launcher.trace.graph import Var, dependents, is_var, needed, program
from launcher.trace.step import Loss

DATA = "data"  # the mesh axis of the replicas


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One program. Flat inputs and outputs, in this order:

    inputs: the microbatch's number, `operands`, `activations`, `residuals`, cotangents (one for
    each of `cotangents`: an active activation out and a stage that read it), accumulators.
    outputs: activations out, residuals, cotangents of the active activations in, accumulators.

    Attributes:
        operands: loss operands read, by index. activations: activations in read.
        residuals_in, residuals_out: how many. residual_avals: of those made, replicas included.
        sends_back: the activations in whose cotangents come out.
        accumulators: `("result" | "grad", index)` read, added to and returned (donated);
            `fresh`: returned without being read (the only microbatch, or a part a microbatch).
    """

    fun: Callable[..., tuple[Any, ...]]
    operands: tuple[int, ...]
    activations: tuple[Var, ...]
    residuals_in: int
    cotangents: tuple[tuple[Var, int], ...]
    accumulators: tuple[tuple[str, int], ...]
    activations_out: tuple[Var, ...]
    residual_avals: tuple[Any, ...]
    sends_back: tuple[Var, ...]
    fresh: tuple[tuple[str, int], ...]


class StagePrograms:
    """Builds the programs of one stage.

    Args:
        results, grads: which results (by index) and gradients (by operand) the step uses.
    """

    def __init__(
        self,
        graph: StageGraph,
        loss: Loss,
        operands: Sequence[Operand],
        slicing: Slicing,
        remat: str,
        results: Sequence[int],
        grads: Sequence[int],
    ) -> None:
        self.graph = graph
        self.loss = loss
        self.holders = operands
        self.slicing = slicing
        self.remat = remat
        self.results = tuple(i for i in graph.results if i in results)
        self.grads = tuple(i for i in graph.wrt if i in grads)
        self.seeds = 0 in graph.results and bool(loss.wrt)
        self.wrt = (*self.grads, *graph.active_in)
        self._body = jex.jaxpr_as_fun(
            program(
                [*(loss.invars[i] for i in graph.operands), *graph.activations_in],
                graph.equations,
                graph.outs,
            )
        )

    # -- what a slice computes -------------------------------------------------------------------

    def _slice(self, i: int, whole: Any, number: Any, replica: Any) -> Any:
        """Operand `i` as one slice of the batch sees it."""
        if self.holders[i].stacked and self.slicing.num_slices > 1:
            row = jax.lax.dynamic_index_in_dim(whole, number, 0, keepdims=False)
            axis = self.loss.slice_axes[i]
            return jnp.moveaxis(row, 0, axis) if axis else row
        if self.loss.keys[i] and self.slicing.num_slices > 1:
            return jax.random.fold_in(whole, number * self.slicing.replicas + replica)
        return whole

    def _evaluate(self, operands: Sequence[Any], activations: Sequence[Any]) -> tuple[list, list]:
        outs = self._body(*operands, *activations)
        cut = len(self.graph.activations_out)
        return list(outs[:cut]), list(outs[cut:])

    def _vjp(self, operands: Sequence[Any], activations: Sequence[Any]) -> tuple[Any, ...]:
        """`(activations out, results, pullback)`; the pullback takes cotangents of the active
        activations out and, where the loss is made, its own."""
        names = [*self.graph.operands, *self.graph.activations_in]
        values = dict(zip(names, [*operands, *activations], strict=True))
        cut = len(self.graph.operands)

        def of(diff: Sequence[Any]) -> tuple[list[Any], Any]:
            full = {**values, **dict(zip(self.wrt, diff, strict=True))}
            flat = [full[n] for n in names]
            out, results = self._evaluate(flat[:cut], flat[cut:])
            pairs = zip(self.graph.activations_out, out, strict=True)
            primal = [x for v, x in pairs if v in self.graph.active]
            if self.seeds:
                primal.append(results[self.graph.results.index(0)])
            return primal, (out, results)

        if self.remat == "full":
            of = jax.checkpoint(of)
        _, pullback, (out, results) = jax.vjp(of, [values[n] for n in self.wrt], has_aux=True)
        return out, results, pullback

    def _pull(self, pullback: Any, cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Gradients and cotangents of the active activations in."""
        seeds: list[Any] = []
        if self.seeds:
            dtype = self.loss.outvars[0].aval.dtype
            mean = self.loss.reduce[0] == "mean"
            seeds = [jnp.asarray(1.0 / self.slicing.num_slices if mean else 1.0, dtype)]
        (grads,) = pullback([*self._summed(cotangents), *seeds])
        return list(grads[: len(self.grads)]), list(grads[len(self.grads) :])

    @property
    def cotangents(self) -> tuple[tuple[Var, int], ...]:
        """One for every active activation out and stage that reads it."""
        pairs = zip(self.graph.activations_out, self.graph.consumers, strict=True)
        return tuple((v, to) for v, stages in pairs if v in self.graph.active for to in stages)

    def _summed(self, cotangents: Sequence[Any]) -> list[Any]:
        total: dict[Var, Any] = {}
        for (v, _), x in zip(self.cotangents, cotangents, strict=True):
            total[v] = total[v] + x if v in total else x
        return list(total.values())

    # -- accumulators ----------------------------------------------------------------------------

    def _kept(self, kind: str, index: int) -> bool:
        """Whether an accumulator is read and added to, rather than made afresh."""
        word = self.loss.reduce[index] if kind == "result" else "sum"
        return self.slicing.micro_batches > 1 and word in ("mean", "sum")

    def _store(self, names: Sequence[tuple[str, int]], values: Sequence[Any], old: Any) -> list:
        """New accumulators from this microbatch's values; `old` holds those that are kept."""
        before = dict(zip([n for n in names if self._kept(*n)], old, strict=True))
        wide = self.slicing.num_slices > 1
        new = {}
        for name, x in zip(names, values, strict=True):
            x = x.astype(accumulator_dtype(x.dtype)) if wide else x
            new[name] = before[name] + x if name in before else x
        return [new[n] for n in (*before, *(n for n in names if n not in before))]

    def _program(
        self,
        body: Callable[..., tuple[list[Any], list[Any]]],
        names: Sequence[tuple[str, int]],
        operands: Sequence[int],
        activations: Sequence[Var],
        residuals_in: int = 0,
        cotangents: Sequence[tuple[Var, int]] = (),
        activations_out: Sequence[Var] = (),
        residual_avals: Sequence[Any] = (),
        sends_back: Sequence[Var] = (),
    ) -> StageProgram:
        """Wrap `body(operands, activations, residuals, cotangents) -> (outputs, values)`, which
        sees one slice, into a program over all replicas that also accumulates `values`."""
        sizes = [len(operands), len(activations), residuals_in, len(cotangents)]
        kept = [n for n in names if self._kept(*n)]

        def one(number: Any, replica: Any, *flat: Any) -> tuple[Any, ...]:
            parts, rest = [], list(flat)
            for size in sizes:
                parts.append(rest[:size])
                rest = rest[size:]
            pairs = zip(operands, parts[0], strict=True)
            parts[0] = [self._slice(i, x, number, replica) for i, x in pairs]
            outputs, values = body(*parts)
            return (*outputs, *self._store(names, values, rest))

        fun = one
        replicas = self.slicing.replicas
        if replicas > 1:
            axes = [None, 0, *(1 if self.holders[i].stacked else None for i in operands)]
            axes += [0] * (sum(sizes[1:]) + len(kept))
            fun = jax.vmap(one, in_axes=tuple(axes), spmd_axis_name=DATA)

        def whole(number: Any, *flat: Any) -> tuple[Any, ...]:
            return fun(number, jnp.arange(replicas) if replicas > 1 else 0, *flat)

        lead = (replicas,) if replicas > 1 else ()
        return StageProgram(
            fun=whole,
            operands=tuple(operands),
            activations=tuple(activations),
            residuals_in=residuals_in,
            cotangents=tuple(cotangents),
            accumulators=tuple(kept),
            activations_out=tuple(activations_out),
            residual_avals=tuple(
                jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype) for a in residual_avals
            ),
            sends_back=tuple(sends_back),
            fresh=tuple(n for n in names if n not in kept),
        )

    # -- the programs ----------------------------------------------------------------------------

    def forward(self) -> StageProgram:
        """The forward pass alone, for evaluation, or where no gradient comes back."""

        def body(operands: Any, activations: Any, *_: Any) -> tuple[list, list]:
            out, results = self._evaluate(operands, activations)
            return out, self._used(results)

        graph = self.graph
        return self._program(
            body,
            self._result_names,
            graph.operands,
            graph.activations_in,
            activations_out=graph.activations_out,
        )

    def forward_backward(self) -> StageProgram:
        """Both passes in one program: where a microbatch's backward follows its forward at once."""

        def body(operands: Any, activations: Any, _: Any, cotangents: Any) -> tuple[list, list]:
            _, results, pullback = self._vjp(operands, activations)
            grads, back = self._pull(pullback, cotangents)
            return back, [*self._used(results), *grads]

        graph = self.graph
        return self._program(
            body,
            [*self._result_names, *self._grad_names],
            graph.operands,
            graph.activations_in,
            cotangents=self.cotangents,
            sends_back=graph.active_in,
        )

    def forward_and_backward(self) -> tuple[StageProgram, StageProgram]:
        """The forward pass that leaves residuals, and the backward pass that reads them."""
        graph = self.graph
        count_out = len(graph.activations_out)
        structure = None

        def with_residuals(*flat: Any) -> list[Any]:
            nonlocal structure
            cut = len(graph.operands)
            out, results, pullback = self._vjp(flat[:cut], flat[cut:])
            leaves, structure = jax.tree.flatten(pullback)
            return [*out, *self._used(results), *leaves]

        invars = [*(self.loss.invars[i] for i in graph.operands), *graph.activations_in]
        closed = jax.make_jaxpr(with_residuals)(
            *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars)
        )
        leaves = closed.jaxpr.outvars[count_out + len(self.results) :]
        carried = self._carried(closed.jaxpr, leaves)
        read_operands, read_activations, again = self._reread(closed, leaves, carried)

        def forward_body(operands: Any, activations: Any, *_: Any) -> tuple[list, list]:
            flat = jax.core.eval_jaxpr(
                closed.jaxpr.replace(
                    outvars=[*closed.jaxpr.outvars[: count_out + len(self.results)], *carried]
                ),
                closed.consts,
                *operands,
                *activations,
            )
            results = flat[count_out : count_out + len(self.results)]
            residuals = flat[count_out + len(self.results) :]
            return [*flat[:count_out], *residuals], results

        def backward_body(
            operands: Any, activations: Any, residuals: Any, cotangents: Any
        ) -> tuple[list, list]:
            env = dict(zip(carried, residuals, strict=True))
            rest = [v for v in dict.fromkeys(leaves) if is_var(v) and v not in env]
            env.update(zip(rest, again(rest, operands, activations), strict=True))
            values = [env[v] if is_var(v) else v.val for v in leaves]
            grads, back = self._pull(jax.tree.unflatten(structure, values), cotangents)
            return back, grads

        forward = self._program(
            forward_body,
            self._result_names,
            graph.operands,
            graph.activations_in,
            activations_out=graph.activations_out,
            residual_avals=[v.aval for v in carried],
        )
        backward = self._program(
            backward_body,
            self._grad_names,
            read_operands,
            read_activations,
            len(carried),
            self.cotangents,
            sends_back=graph.active_in,
        )
        return forward, backward

    def _carried(self, jaxpr: jex.Jaxpr, leaves: Sequence[Any]) -> list[Var]:
        """The residuals that must travel: not an input, and not a function of parameters alone."""
        graph = self.graph
        names = [*graph.operands, *graph.activations_in]
        varying = [
            v
            for name, v in zip(names, jaxpr.invars, strict=True)
            if not isinstance(name, int) or self.holders[name].stacked or self.loss.keys[name]
        ]
        depend = dependents(jaxpr.eqns, varying)
        inputs = {*jaxpr.invars, *jaxpr.constvars}
        return [v for v in dict.fromkeys(x for x in leaves if is_var(x)) if v in depend - inputs]

    def _reread(
        self, closed: jex.ClosedJaxpr, leaves: Sequence[Any], carried: Sequence[Var]
    ) -> tuple[tuple[int, ...], tuple[Var, ...], Callable[..., list[Any]]]:
        """What the backward pass reads itself: operands, activations in, and how to get the rest
        of the leaves from them."""
        graph, jaxpr = self.graph, closed.jaxpr
        rest = [v for v in dict.fromkeys(leaves) if is_var(v) and v not in set(carried)]
        equations = needed(jaxpr.eqns, rest)
        reads = {v for e in equations for v in e.invars if is_var(v)} | set(rest)
        cut = len(graph.operands)
        operand_vars = dict(zip(graph.operands, jaxpr.invars[:cut], strict=True))
        activation_vars = dict(zip(graph.activations_in, jaxpr.invars[cut:], strict=True))
        operands = tuple(i for i, v in operand_vars.items() if v in reads)
        activations = tuple(a for a, v in activation_vars.items() if v in reads)
        invars = [operand_vars[i] for i in operands] + [activation_vars[a] for a in activations]

        def again(outs: Sequence[Var], operand_values: Any, activation_values: Any) -> list[Any]:
            small = program([*invars, *closed.jaxpr.constvars], equations, outs)
            return jex.jaxpr_as_fun(small)(*operand_values, *activation_values, *closed.consts)

        return operands, activations, again

    @property
    def _result_names(self) -> list[tuple[str, int]]:
        return [("result", i) for i in self.results]

    @property
    def _grad_names(self) -> list[tuple[str, int]]:
        return [("grad", i) for i in self.grads]

    def _used(self, results: Sequence[Any]) -> list[Any]:
        return [results[self.graph.results.index(i)] for i in self.results]
