"""One layer's forward and backward pass as programs that another process can compile.

They are traced for an abstract mesh, `copies` × `model`, so that one program keeps every device at
work, each copy on rows of its own; and exported as StableHLO, which is data. Used by `profile.run`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend import core as jex
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.sharding.dims import Sharding, Spec
from launcher.plan.sharding.layout import MODEL
from launcher.plan.sharding.stage import model_sharding
from launcher.plan.stages import StageGraph
from launcher.trace.graph import Var, is_var, program, structure_text
from launcher.trace.step import Loss, TracedStep

COPIES = "copies"


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """A layer on `copies` × `model` devices.

    Attributes:
        key: equal for equal programs on equal meshes, in every process.
    """

    graph: StageGraph
    loss: Loss
    sharding: Sharding
    copies: int
    model: int

    @property
    def key(self) -> str:
        """See the class."""
        body = program(self._reads, self.graph.equations, self.graph.outs).jaxpr
        specs = [self.sharding.spec(v) for v in (*self._reads, *self._outs)]
        more = {
            "mesh": (self.copies, self.model),
            "specs": specs,
            "wrt": [i in self.graph.wrt for i in self.graph.operands],
            "active": [v in self.graph.active for v in self.graph.activations_in],
        }
        return hashlib.sha256(structure_text(body, more).encode()).hexdigest()[:32]

    @property
    def _reads(self) -> list[Var]:
        own = [self.loss.invars[i] for i in self.graph.operands]
        return [*own, *self.graph.activations_in]

    @property
    def _outs(self) -> list[Var]:
        return [v for v in self.graph.outs if is_var(v)]

    def exported(self, platform: str) -> list[bytes]:
        """The forward pass, and the backward pass where there is one, for `platform`.

        The forward pass gives its results and what the backward pass needs beside its inputs; the
        backward pass takes both, the gradients of the results, and sums to add to.
        """
        graph, parameters = self.graph, {self.loss.invars[i] for i in self.graph.wrt}
        reads, outs = self._reads, self._outs
        fun = jex.jaxpr_as_fun(program(reads, graph.equations, outs))
        active = {*graph.active_in, *parameters}
        moving = [k for k, v in enumerate(reads) if v in active]
        loss_out = self.loss.outvars[0] if self.loss.wrt and 0 in graph.results else None
        sources = [k for k, v in enumerate(outs) if v in graph.active or v is loss_out]
        tree: list[Any] = []

        def forward(*inputs: Any) -> tuple[Any, ...]:
            def of_moving(*values: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
                full = list(inputs)
                for k, value in zip(moving, values, strict=True):
                    full[k] = value
                results = fun(*full)
                return tuple(results[k] for k in sources), tuple(results)

            if not moving or not sources:
                return tuple(fun(*inputs))
            _, vjp, results = jax.vjp(of_moving, *(inputs[k] for k in moving), has_aux=True)
            leaves, structure = jax.tree.flatten(vjp)
            known = {id(x): k for k, x in enumerate(inputs)}
            tree[:] = [structure, [known.get(id(leaf)) for leaf in leaves]]
            return (*results, *(leaf for leaf in leaves if id(leaf) not in known))

        def backward(*values: Any) -> tuple[Any, ...]:
            structure, places = tree
            inputs, rest = values[: len(reads)], list(values[len(reads) :])
            leaves = [rest.pop(0) if k is None else inputs[k] for k in places]
            vjp = jax.tree.unflatten(structure, leaves)
            grads = vjp(tuple(rest[: len(sources)]))
            sums = rest[len(sources) :]
            summed = [k for k in moving if reads[k] in parameters]
            found = dict(zip(moving, grads, strict=True))
            back = [found[k] for k in moving if k not in summed]
            return (*back, *(s + found[k] for s, k in zip(sums, summed, strict=True)))

        shared = [v in self.loss.invars and self._is_shared(v) for v in reads]
        specs = [self.sharding.spec(v) for v in reads]
        avals = [v.aval for v in reads]
        first = self._export(forward, avals, shared, specs, platform)
        if not moving or not sources:
            return [first]
        made = jax.eval_shape(forward, *map(_shape, avals))
        residuals = [*made[len(outs) :]]
        seeds = [outs[k].aval for k in sources]
        weights = [reads[k] for k in moving if reads[k] in parameters]
        more = [*residuals, *seeds, *(v.aval for v in weights)]
        unsaid: list[Spec | None] = [None] * len(residuals)
        more_specs = [*unsaid, *(self.sharding.spec(outs[k]) for k in sources)]
        more_specs += [self.sharding.spec(v) for v in weights]
        second = self._export(
            backward,
            [*avals, *more],
            [*shared, *(False for _ in more)],
            [*specs, *more_specs],
            platform,
        )
        return [first, second]

    def _is_shared(self, var: Var) -> bool:
        """What all copies read alike: not the batch."""
        return self.loss.slice_axes[self.loss.invars.index(var)] is None

    def _export(
        self,
        fun: Any,
        avals: Sequence[Any],
        shared: Sequence[bool],
        specs: Sequence[Spec | None],
        platform: str,
    ) -> bytes:
        shapes = [_shape(a) for a in avals]
        shardings: Any = None
        if self.copies > 1:
            axes = tuple(None if alike else 0 for alike in shared)
            fun = jax.vmap(fun, in_axes=axes, spmd_axis_name=COPIES, axis_size=self.copies)
            shapes = [
                s if alike else jax.ShapeDtypeStruct((self.copies, *s.shape), s.dtype)
                for s, alike in zip(shapes, shared, strict=True)
            ]
        if self.copies * self.model > 1:
            mesh = AbstractMesh((self.copies, self.model), (COPIES, MODEL))
            leading = [() if alike or self.copies == 1 else (COPIES,) for alike in shared]
            shardings = tuple(
                NamedSharding(mesh, PartitionSpec(*first, *(spec or ())))
                for first, spec in zip(leading, specs, strict=True)
            )
        jitted = jax.jit(fun, in_shardings=shardings) if shardings else jax.jit(fun)
        return bytes(export.export(jitted, platforms=[platform])(*shapes).serialize())


def layer_program(
    step: TracedStep,
    graph: StageGraph,
    loss: Loss,
    copies: int,
    model: int,
    cluster: ClusterShape,
) -> LayerProgram:
    """A layer, sharded over `model` devices as the planner would."""
    sharding = model_sharding(step, loss, graph, model, cluster, cluster.link_of_axis(model))
    return LayerProgram(graph, loss, sharding, copies, model)


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(aval), aval.dtype)
