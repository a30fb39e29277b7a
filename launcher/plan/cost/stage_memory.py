"""Activation memory of a stage: what a task keeps for later ones, and its peak temporaries.

The task programs are those that the runtime will run, cut out of the same joint graph. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from launcher.partition import (
    JointGraph,
    Name,
    NamedDims,
    Sharding,
    StagePrograms,
    TaskProgram,
    opened,
    sum_places,
)
from launcher.plan.cost.collectives import loads
from launcher.plan.cost.liveness import Liveness, Size
from launcher.plan.cost.waiting import PutOff
from launcher.schedule import Kind
from launcher.trace import (
    CONTRACTIONS,
    FORMS,
    GRADIENT_SUMS,
    Aval,
    Equation,
    Var,
    dependents,
    is_var,
    nbytes,
)

# What XLA:CPU needs more than the values: copies, and places it cannot share.
_SLACK = 1.06
# What a product of cuBLAS's may use while it runs, as XLA:GPU asks for it.
_WORKSPACE = 4 << 20
# How XLA:GPU's scheduler times sums along a model axis, and products of gradients, each with what
# is beside it.
_START, _SUM_RATE, _RATE_32, _RATE_16 = 20e-6, 205e9, 320e12, 470e12


@dataclass(frozen=True)
class Footprint:
    """Memory of one stage and one slice of the batch, in bytes on one device, by kind of task.

    Attributes:
        left: change in the memory held between tasks when a task is done.
        working: the most that a task needs on top of what was held before it.
        arriving: what the forward pass gets from other stages.
        last: `working` of the pass that sums the gradients of several microbatches.
    """

    left: Mapping[Kind, float]
    working: Mapping[Kind, float]
    arriving: float = 0.0
    last: Mapping[Kind, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Temporaries:
    """Temporaries of a task program, in bytes on one device.

    Attributes:
        peak: the most that it needs on top of what was held before it.
        early: what it holds when it reads the first gradient; of a stage, for all of its layers.
        fixed_peak: the most that it needs of what is as large with any number of rows.
        fixed_early: the part of `early` that is as large with any number of rows.
    """

    peak: float
    early: float
    fixed_peak: float
    fixed_early: float


class Summed(NamedTuple):
    """How a task program makes its gradients, by their operands.

    Attributes:
        afresh: those that are made, rather than added to an accumulator.
        gathered: those of parameters that a pass gathers.
        together: sets of those that are made when all of a set can be: they are summed together.
        last: the same of the pass that sums the gradients of several microbatches.
    """

    afresh: Set[int] = frozenset()
    gathered: Set[int] = frozenset()
    together: Sequence[Set[int]] = ()
    last: Sequence[Set[int]] = ()


class Stored:
    """What a task program stores, and its values under any sharding."""

    def __init__(
        self,
        one: TaskProgram,
        on_gpu: bool,
        how: Summed = Summed(),  # noqa: B008
        sharding: Sharding | None = None,
    ) -> None:
        self._given, self.jaxpr = one.closed.invars, opened(one.closed)
        inputs = self.jaxpr.invars[len(one.constants) :]  # its variables are others
        self.inputs: dict[Var, Name] = dict(zip(inputs, one.inputs, strict=True))
        outs = list(zip(one.outputs, self.jaxpr.outvars, strict=True))
        summed = [v for name, v in outs if name.kind in ("grad", "result")]
        held = [v for name, v in outs if name.kind not in ("grad", "result")]
        self.gradients = {v: name.of for name, v in outs if name.kind == "grad" and is_var(v)}
        # On GPUs a product's kernel adds to an accumulator itself, and so does what is fused.
        self._added = frozenset(self.gradients if on_gpu else ())
        if not on_gpu:
            self.slack, self._workspace = _SLACK, 0
            self.liveness = Liveness(self.jaxpr.eqns, held, summed)
            return
        self.slack, self._workspace = 1.0, _WORKSPACE
        is_operand = ((v, name) for v, name in self.inputs.items() if name.kind == "operand")
        whole = [v for v, name in is_operand if name.of in how.gathered]
        products, own = _products(self.jaxpr.eqns), {*self.gradients.values()}
        together = [of & own for of in how.together if of & own]
        places = sum_places(dataclasses.replace(one, closed=self.jaxpr), together)
        waits = [
            PutOff(
                # One in parts waits for no sum before its own.
                {v for v in self.apart(together[k]) if v in products and (products[v] or not n)},
                place.ties,
            )
            for n, place in enumerate(places)
            for k in place.buckets
        ]
        if sharding and not waits:
            waits = self._under_sums(products, self._inside(sharding))
        self.liveness = Liveness(self.jaxpr.eqns, held, summed, whole, waits, on_gpu=True)

    def _under_sums(self, products: Mapping[Var, Var | None], within: Sharding) -> list[PutOff]:
        """Return where XLA:GPU makes gradients in a pass that sums none over the replicas.

        Other sums hide products before them: from the last one on the nearest, until they take as
        long. Every other gradient is made where it stands.
        """
        own = {product: v for v in self.gradients if (product := products.get(v))}
        every = loads(within, lambda *_: False)
        uses = [(use.eqn.outvars[0], load) for use, load in every if use.eqn.outvars]
        found, left = [], {**own}
        for place, (out, load) in reversed([*enumerate(uses)]):
            size = 0.0 if out in own else sum(of.size for of in load.forward)
            room, hidden = size and _START + size / _SUM_RATE, set[Var]()
            for v, one in reversed(uses[:place] if room else ()):
                if room > 0 and v in left:
                    hidden.add(left.pop(v))
                    seconds = one.product_flops / _RATE_16 + one.product_flops_fp32 / _RATE_32
                    room -= _START + seconds
            found += [PutOff(hidden, (out,))] if hidden else []
        under = {v for of in found for v in of.gradients}
        return found and found + [PutOff({v}) for v in self.gradients if v not in under]

    def asked(self, values: float) -> float:
        """Return the bytes that the compiler asks for, given the most that values take."""
        return self.slack * values + self._workspace

    def apart(self, operands: Set[int]) -> frozenset[Var]:
        """Return the gradients of operands."""
        return frozenset(v for v, i in self.gradients.items() if i in operands)

    @functools.cached_property
    def _dims(self) -> NamedDims:
        return NamedDims(self.jaxpr.eqns)

    def sizes(self, sharding: Sharding, apart: Set[Var] = frozenset()) -> Size:
        """Return the bytes of its values where `sharding` cuts those of the joint graph.

        What is added to an accumulator as it is made takes none, but for the gradients `apart`.
        """
        return _sizes(self._inside(sharding), self._added - apart)

    def _inside(self, sharding: Sharding) -> Sharding:
        inside = Sharding(self._dims if sharding.axis_of else NamedDims(()), sharding.sizes)
        for v, known in zip(self.jaxpr.invars, self._given, strict=True):
            inside.seed(v, sharding.spec(known))
        return inside


def _products(equations: Sequence[Equation]) -> dict[Var, Var | None]:
    """Return what are products in some form, and the product; None: one of several parts."""
    found: dict[Var, Var | None] = {}
    for eqn in equations:
        name, of = eqn.primitive.name, [found[v] for v in eqn.invars if is_var(v) and v in found]
        if name in CONTRACTIONS:
            found[eqn.outvars[0]] = eqn.outvars[0]
        elif of and name in FORMS | GRADIENT_SUMS:
            found[eqn.outvars[0]] = None if name in GRADIENT_SUMS else of[0]
    return found


def stored_in(of: StagePrograms, on_gpu: bool) -> dict[Kind, Stored]:
    """Return what each of the task programs stores, where XLA:GPU compiles them or XLA:CPU."""
    return {kind: Stored(one, on_gpu) for kind, one in of.programs.items()}


def footprint(
    of: StagePrograms,
    sharding: Sharding,
    on_gpu: bool,
    how: Summed = Summed(),  # noqa: B008
) -> Footprint:
    """Return the memory of the task programs where `sharding` cuts the joint graph's values.

    Args:
        of: the task programs.
        sharding: of the joint graph's values.
        on_gpu: whether XLA:GPU compiles them, not XLA:CPU.
        how: how the gradients are made. The buffer of one made afresh can hold another value
            until then.
    """
    size = _sizes(sharding)

    def working(how: Summed) -> dict[Kind, float]:
        found = {}
        for k, (kind, program) in enumerate(of.programs.items()):
            one = Stored(program, on_gpu, how, sharding)
            buffers = one.apart(how.afresh)
            inside = one.sizes(sharding, buffers | one.apart(how.gathered))
            live = one.liveness
            needs = live.peak_beside(list(buffers), inside) if buffers else live.peak(inside)
            found[kind] = one.asked(_arriving(of, k, size) + needs)
        return found

    last = working(Summed(how.afresh, how.gathered, how.last)) if how.last else {}
    given = (name for name in of.joint.inputs if name.kind == "activation")
    arriving = sum(_size(of.joint, name, size) for name in given)
    return Footprint(left_bytes(of, sharding), working(how), arriving, last)


def left_bytes(of: StagePrograms, sharding: Sharding) -> dict[Kind, float]:
    """Return the change in the memory held between tasks when a task is done, by its kind."""
    held = _held(of.joint, list(of.programs.values()), _sizes(sharding))
    return {kind: held[k + 1] - held[k] for k, kind in enumerate(of.programs)}


def temporaries(
    of: StagePrograms, sharding: Sharding, stored: Mapping[Kind, Stored]
) -> dict[Kind, Temporaries]:
    """Return the temporaries of the task programs of a layer, in parts that add up for a stage.

    As large with any number of rows is taken to be what has the lengths of a parameter, in any
    order, or as many elements and not the rows first: its copies and its gradient.

    Args:
        of: the task programs.
        sharding: of the joint graph's values.
        stored: what each of them stores (`stored_in`), which is the same under any sharding.
    """
    slices, sizes = of.joint.slices, _sizes(sharding)
    whole = [
        v.aval for name, v in of.joint.inputs.items() if name.kind == "operand" and v not in slices
    ]
    elements, lengths = {aval.size for aval in whole}, {_lengths(aval) for aval in whole}
    rows = {v.aval.shape[:1] for v in slices}
    found = {}
    for k, (kind, one) in enumerate(stored.items()):
        program, size, names = one.liveness, one.sizes(sharding), one.inputs
        late = [v for v, name in names.items() if name.kind in ("cotangent", "seed")]
        first = next(_dependent(program.equations, late), 0)

        def fixed(v: Var, size: Size = size) -> float:
            alike = v.aval.size in elements and v.aval.shape[:1] not in rows
            return size(v) if alike or _lengths(v.aval) in lengths else 0.0

        own = dependents(program.equations, names)

        def unlike(v: Var, size: Size = size, own: Set[Var] = own) -> float:
            return size(v) if v in own else 0.0  # constants are the same in all layers

        found[kind] = Temporaries(
            peak=one.asked(_arriving(of, k, sizes) + program.peak(size)),
            early=one.slack * program.held(first, unlike),
            fixed_peak=one.asked(program.peak(fixed)),
            fixed_early=one.slack * program.held(first, fixed),
        )
    return found


def _lengths(aval: Aval) -> tuple[int, ...]:
    return tuple(sorted(n for n in aval.shape if n > 1))


def _dependent(equations: Sequence[Equation], sources: Sequence[Var]) -> Iterator[int]:
    """Yield the equations that depend on `sources`, by number."""
    reached = dependents(equations, sources)
    for place, eqn in enumerate(equations):
        if any(v in reached for v in eqn.outvars):
            yield place


def _sizes(sharding: Sharding, without: Set[Var] = frozenset()) -> Size:
    known: dict[Var, float] = dict.fromkeys(without, 0.0)

    def size(v: Var) -> float:
        if v not in known:
            known[v] = nbytes(v.aval) / sharding.parts(v)
        return known[v]

    return size


def _held(joint: JointGraph, passes: list[TaskProgram], size: Size) -> list[float]:
    """Return the bytes held before the first task program, and after each.

    A value is held from the task program that first has it to the last one that reads it. Operands
    are held anyway, and counted where they live.
    """
    first: dict[Name, int] = {}
    last: dict[Name, int] = {}
    for k, one in enumerate(passes):
        for name in (*one.inputs, *one.outputs):
            if name.kind in ("activation", "cotangent", "residual"):
                first.setdefault(name, k)
        last.update((name, k) for name in one.inputs if name in first)
    sizes = {name: _size(joint, name, size) for name in last}
    return [0.0] + [
        sum(b for name, b in sizes.items() if first[name] <= k < last[name])
        for k in range(len(passes))
    ]


def _arriving(of: StagePrograms, k: int, size: Size) -> float:
    """Return the bytes of a task program's inputs that come from elsewhere.

    They are what other stages have sent that no earlier task program has read, and its slice of the
    batch.
    """
    listed = list(of.programs.values())
    before = {name for one in listed[:k] for name in one.inputs}
    total = 0.0
    for name in listed[k].inputs:
        sent = name.kind in ("activation", "cotangent") and name not in before
        if sent or (name.kind == "operand" and name.of in of.sliced):
            total += _size(of.joint, name, size)
    return total


def _size(joint: JointGraph, name: Name, size: Size) -> float:
    v = name.of if name.kind == "residual" else joint.inputs.get(name, joint.outputs.get(name))
    return size(v) if v is not None and is_var(v) else 0.0
