"""Shardings of a stage's arguments, the contents of its `StagePlan.shardings`: intra-operator cuts.

What to cut along a submesh's model axis is a small integer program: one binary variable for each
class of named dimensions; two classes that meet in one array exclude each other; the price of a
class is what cutting it alone changes. For a transformer this finds Megatron's cut (Shoeybi et al.
2019, arXiv 1909.08053): heads, the hidden dimension of each feed-forward block, the vocabulary.
Solved by HiGHS.

Instead, a stage may cut its data along a dimension other than the rows: a text's positions, for
example. Every device then has all parameters and a part of each row's activations. What the
positions exchange, keys and values in attention, is gathered, and the gradients of all parameters
are summed in every microbatch (cf. Li et al. 2021, arXiv 2105.13120). That pays where activations
are large compared with the parameters. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from launcher.hardware import ClusterShape
from launcher.partition import (
    MODEL,
    Assignment,
    NamedDims,
    PlanError,
    Sharding,
    Spec,
    StageGraph,
    axes,
    batch_axes,
)
from launcher.plan.cost.collectives import (
    Collective,
    Flow,
    SumKey,
    equation_load,
    flow,
    joined_sums,
    seconds,
)
from launcher.plan.cost.stage_seconds import links_of
from launcher.trace import PRODUCTS, Loss, TracedStep, Var, leaf_names, nbytes

_LEAST_CUT = 0.75  # of the parameter bytes that can be cut at all


@dataclass(frozen=True, eq=False)
class Choices:
    """What the integer program chooses from: classes of dimensions that can be cut.

    Attributes:
        of: the classes.
        seconds: what cutting each changes in a slice's forward and backward pass; negative is
            better.
        cut_bytes: bytes of the parameters that are cut with each.
        exclusive: pairs of choices, by position, that meet in an array.
        shared: seconds that are spent once if any of several choices, by position, is taken.
    """

    of: list[int]
    seconds: np.ndarray
    cut_bytes: np.ndarray
    exclusive: tuple[tuple[int, int], ...]
    shared: tuple[tuple[float, tuple[int, ...]], ...]


def model_classes(
    dims: NamedDims,
    parameters: Sequence[Var],
    batch: Set[int],
    flows: Flow,
    devices: int,
    cluster: ClusterShape,
    link: float,
) -> list[int]:
    """Return the classes to cut over `devices`.

    They are those that cost least while at least three quarters of the parameter bytes that can be
    cut are.

    Args:
        dims: the named dimensions of a stage's program.
        parameters: its parameters.
        batch: classes of the batch's rows, which are no candidates.
        flows: whether gradients flow to a value.
        devices: number of devices of the model axis.
        cluster: the rates of the devices.
        link: bytes/s between the devices.
    """
    choices = _choices(dims, parameters, batch, flows, devices, cluster, link)
    if not choices.of:
        return []
    most = _solve(-choices.cut_bytes, choices.exclusive)
    size = choices.cut_bytes / (choices.cut_bytes.max() or 1.0)  # the solver takes none above 1e15
    wanted = _LEAST_CUT * float(size @ most)
    best = _solve(choices.seconds, choices.exclusive, choices.shared, (size, wanted))
    return list(itertools.compress(choices.of, best))


def _choices(
    dims: NamedDims,
    parameters: Sequence[Var],
    batch: Set[int],
    flows: Flow,
    devices: int,
    cluster: ClusterShape,
    link: float,
) -> Choices:
    sizes = {MODEL: devices}
    price: dict[int, float] = {}
    sums: dict[int, list[Collective]] = {}  # of gradients, one for all parts of each
    met: dict[tuple[int, int], None] = {}
    whole = Sharding(dims, sizes)
    for use in dims.uses:
        atoms = [*use.eqn.invars, *use.eqn.outvars]
        by_atom = [dims.classes(atom, use.scope) for atom in atoms]
        fits = sorted(
            {c for cs in by_atom for c in cs if c not in batch and _fits(dims, c, devices)}
        )
        if not fits:
            continue
        before = seconds(equation_load(use, whole, flows), sizes, cluster, link)
        for c in fits:
            cut = Sharding(dims, sizes)
            cut.axis_of[c] = (MODEL,)
            found = equation_load(use, cut, flows)
            sums.setdefault(c, []).extend(one for one in found.backward if one.of)
            own = tuple(one for one in found.backward if not one.of)
            after = seconds(dataclasses.replace(found, backward=own), sizes, cluster, link)
            price[c] = price.get(c, 0.0) + after - before
        if use.eqn.primitive.name in PRODUCTS:
            met.update(_pairs(by_atom, set(fits)))
    size: dict[int, int] = {}
    for var in parameters:
        own_classes = [c for c in dict.fromkeys(dims.classes(var)) if c in price]
        met.update(_pairs([dims.classes(var)], set(own_classes)))
        for c in own_classes:
            size[c] = size.get(c, 0) + nbytes(var.aval)
    at: dict[SumKey, dict[int, float]] = {}
    for c, parts in sums.items():
        for key, one in joined_sums(dims, parts).items():
            at.setdefault(key, {})[c] = one.seconds(sizes, link, cluster)
    listed = sorted(c for c in price if size.get(c) or price[c] < 0)
    place = {c: k for k, c in enumerate(listed)}
    shared: dict[tuple[int, ...], float] = {}
    for of in at.values():
        places = tuple(place[c] for c in of if c in place)
        if len(places) == 1:
            price[listed[places[0]]] += max(of.values())
        elif places:
            shared[places] = shared.get(places, 0.0) + max(of.values())
    return Choices(
        listed,
        np.array([price[c] for c in listed]),
        np.array([size.get(c, 0) for c in listed], float),
        tuple((place[a], place[b]) for a, b in met if a in place and b in place),
        tuple((cost, places) for places, cost in shared.items()),
    )


def _pairs(by_atom: Iterable[Sequence[int]], among: Set[int]) -> dict[tuple[int, int], None]:
    return {
        pair: None
        for classes in by_atom
        for pair in itertools.combinations(sorted(set(classes) & among), 2)
    }


def _solve(
    price: np.ndarray,
    exclusive: Sequence[tuple[int, int]],
    shared: Sequence[tuple[float, tuple[int, ...]]] = (),
    least: tuple[np.ndarray, float] | None = None,
) -> np.ndarray:
    """Return the cheapest 0/1 choice without two that exclude each other.

    Args:
        price: the price of each choice.
        exclusive: see `Choices`.
        shared: see `Choices`.
        least: an amount for each choice, and the sum of amounts that has to be chosen.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # which workers need not import

    count = len(price)
    # After the choices, for each shared price whether it is paid: at least as much as any of its.
    costs = np.concatenate([price, [cost for cost, _ in shared]])
    pays = [(count + k, i) for k, (_, places) in enumerate(shared) for i in places]
    constraints = []
    for pairs, (first, second), (lower, upper) in (
        (exclusive, (1.0, 1.0), (-np.inf, 1.0)),
        (pays, (1.0, -1.0), (0.0, np.inf)),
    ):
        if pairs:
            rows = np.zeros((len(pairs), len(costs)))
            for row, (a, b) in zip(rows, pairs, strict=True):
                row[a], row[b] = first, second
            constraints.append(LinearConstraint(rows, lb=lower, ub=upper))
    if least:
        amounts, wanted = least
        row = np.concatenate([amounts, np.zeros(len(shared))])
        constraints.append(LinearConstraint(row[None, :], lb=wanted))
    scale = float(np.abs(costs).max()) or 1.0
    integral = np.arange(len(costs)) < count
    found = milp(costs / scale, integrality=integral, bounds=Bounds(0, 1), constraints=constraints)
    if found.x is None:
        raise AssertionError(f"the choice of shardings has no solution: {found.message}")
    chosen: np.ndarray = np.round(found.x[:count])
    return chosen


def along_data(shape: Sequence[int], spec: Spec, replicas: int, model: int) -> Spec | None:
    """Return a spec with the data axis added, or None if no dimension fits.

    The axis goes to the longest dimension that it divides, preferably one that is not cut yet.
    """
    options = []
    for d, length in enumerate(shape):
        held = length // (model if axes(spec[d]) else 1)
        if held % replicas == 0 and held:
            options.append((not axes(spec[d]), held, -d))
    if not options:
        return None
    at = -max(options)[2]
    return tuple(
        (*axes(a), "data") if d == at and axes(a) else "data" if d == at else a
        for d, a in enumerate(spec)
    )


def sequence_class(step: TracedStep, loss: Loss, dims: NamedDims, model: int) -> int | None:
    """Return the class of the batch's sequence dimension, or None if there is none.

    It is the dimension that most leaves of the batch have beside their rows, among those that
    `model` devices can share; the first of several.

    Args:
        step: the traced step.
        loss: its loss.
        dims: the named dimensions of the loss.
        model: number of devices of the model axis.
    """
    found: Counter[int] = Counter()
    rows = {c for var, axis in _leaves(step, loss) for c in [dims.classes(var)[axis]]}
    for var, _ in _leaves(step, loss):
        found.update(c for c in set(dims.classes(var)) if c not in rows and _fits(dims, c, model))
    return max(found, key=lambda c: (found[c], -c)) if found else None


def batch_specs(step: TracedStep, loss: Loss, dims: NamedDims, of: int) -> dict[Var, Spec]:
    """Return the spec along the model axis of every batch leaf of class `of`."""
    holders = dict(zip(loss.invars, step.operands, strict=True))
    found: dict[Var, Spec] = {}
    for var, _ in _leaves(step, loss):
        classes = dims.classes(var)
        if of in classes:
            at = classes.index(of)
            found[holders[var]] = tuple(MODEL if d == at else None for d in range(len(classes)))
    return found


def sequence_sharding(
    graph: StageGraph, loss: Loss, dims: NamedDims, of: int, model: int
) -> Sharding:
    """Return a stage's sharding with the class `of` cut over `model` devices.

    The class is one of the loss's named dimensions `dims`.
    """
    cut = Sharding(NamedDims(graph.equations), {MODEL: model})
    for var in (*(loss.invars[i] for i in graph.operands), *graph.activations_in):
        for outside, inside in zip(dims.classes(var), cut.dims.classes(var), strict=True):
            if outside == of:
                cut.axis_of[inside] = (MODEL,)
    return cut


def _fits(dims: NamedDims, of: int, devices: int) -> bool:
    return dims.size(of) > 1 and dims.size(of) % devices == 0


def _leaves(step: TracedStep, loss: Loss) -> list[tuple[Var, int]]:
    """Return the operands that are leaves of the batch, with the axis of their rows."""
    batch = step.batch_vars
    operands = zip(step.operands, loss.invars, batch_axes(step, loss), strict=True)
    return [(inner, axis) for outer, inner, axis in operands if outer in batch and axis is not None]


class StageShardings:
    """Chooser of the shardings of an assignment's stages.

    Stages that are the same program are solved once.

    Args:
        step: the traced step.
        assignment: the stages and their submeshes.
        cluster: the rates of the devices.
        outer: the step's named dimensions outside of the loss.
    """

    def __init__(
        self, step: TracedStep, assignment: Assignment, cluster: ClusterShape, outer: NamedDims
    ) -> None:
        self._step = step
        self._assignment = assignment
        self._cluster = cluster
        self._outer = outer
        self._inner: NamedDims | None = None
        self._solved: dict[object, list[Spec]] = {}

    def __call__(self, loss: Loss, graph: StageGraph) -> dict[str, Spec]:
        """Return the specs of the arguments that belong to a stage.

        They are its parameters, what the update keeps for them, and the batch. A stage on one
        device has no specs.

        Raises:
            PlanError: the data cannot be cut along a sequence, as the assignment has it.
        """
        step, assignment = self._step, self._assignment
        submesh, zero = assignment.submeshes[graph.mesh], assignment.zero_of(graph.index)
        data, model = submesh.logical_mesh
        if data * model == 1:
            return {}
        batch: dict[Var, Spec] = {}
        if assignment.sequence_of(graph.index):
            specs, batch = self._along_sequence(loss, graph, model)
        else:
            specs = self._solution(loss, graph, model, links_of(submesh, self._cluster).model)
        operands = dict(zip(graph.operands, specs, strict=True))
        return argument_specs(
            step, loss, graph, operands, submesh.logical_mesh, zero, self._outer, batch
        )

    def _along_sequence(
        self, loss: Loss, graph: StageGraph, model: int
    ) -> tuple[list[Spec], dict[Var, Spec]]:
        """Return a stage's operand specs, and the batch's, cut along the data's sequence."""
        if self._inner is None:
            self._inner = NamedDims(loss.equations)
        of = sequence_class(self._step, loss, self._inner, model)
        if of is None:
            raise PlanError(f"the data has no dimension beside its rows that {model} devices share")
        cut = sequence_sharding(graph, loss, self._inner, of, model)
        specs = [cut.spec(loss.invars[i]) for i in graph.operands]
        return specs, batch_specs(self._step, loss, self._inner, of)

    def _solution(self, loss: Loss, graph: StageGraph, model: int, link: float) -> list[Spec]:
        """Return the specs of a stage's operands along the model axis.

        The links of the axis have `link` bytes/s.
        """
        rows = batch_axes(self._step, loss)
        key = graph.structure, tuple(rows[i] for i in graph.operands), model, link
        if key not in self._solved:
            cut = model_sharding(self._step, loss, graph, model, self._cluster, link)
            self._solved[key] = [cut.spec(loss.invars[i]) for i in graph.operands]
        return self._solved[key]


def model_sharding(
    step: TracedStep,
    loss: Loss,
    graph: StageGraph,
    model: int,
    cluster: ClusterShape,
    link: float,
) -> Sharding:
    """Return what a stage's program cuts along the model axis."""
    dims = NamedDims(graph.equations)
    cut = Sharding(dims, {MODEL: model})
    if model > 1:
        parameters = [loss.invars[i] for i in graph.wrt]
        flows = flow(graph.equations, [*parameters, *graph.active_in])
        batch = row_classes(step, loss, graph, dims)
        for of in model_classes(dims, parameters, batch, flows, model, cluster, link):
            cut.axis_of[of] = (MODEL,)
    return cut


def row_classes(step: TracedStep, loss: Loss, graph: StageGraph, dims: NamedDims) -> set[int]:
    """Return the classes of the batch's rows in a stage."""
    rows = batch_axes(step, loss)
    sliced = [(loss.invars[i], rows[i]) for i in graph.operands]
    return {dims.classes(v)[axis] for v, axis in sliced if axis is not None}


def argument_specs(  # noqa: PLR0913 (each is one fact of the stage)
    step: TracedStep,
    loss: Loss,
    graph: StageGraph,
    operands: Mapping[int, Spec],
    logical_mesh: tuple[int, int],
    zero: int,
    dims: NamedDims,
    batch: Mapping[Var, Spec],
) -> dict[str, Spec]:
    """Return the specs of a stage's arguments, given those of the loss's operands.

    Args:
        step: the traced step.
        loss: its loss.
        graph: the stage.
        operands: specs of the stage's operands along the model axis, by index.
        logical_mesh: (data, model) of the stage's submesh.
        zero: ZeRO level of the stage: 0, 2 or 3.
        dims: the step's named dimensions outside of the loss.
        batch: specs of leaves of the batch along the model axis; they determine those of the
            activations as well, and are therefore listed with every stage.
    """
    data, model = logical_mesh
    holders = {i: step.operands[i] for i in graph.operands}
    kept = Sharding(dims, {MODEL: model})
    cut = Sharding(dims, {MODEL: model, "data": data})
    for i, spec in operands.items():
        if loss.slice_axes[i] is None:
            kept.seed(holders[i], spec)
            cut.seed(holders[i], spec)
            target = along_data(loss.invars[i].aval.shape, spec, data, model)
            if zero and data > 1 and i in loss.wrt and target:
                cut.seed(holders[i], target)
    parameters = {holders[i] for i in graph.wrt}
    own = {c for i in graph.operands for c in dims.classes(holders[i])}
    found: dict[str, Spec] = {}
    arguments = zip(leaf_names(step), step.invars, step.batch, strict=True)
    for name, var, is_batch in arguments:
        if is_batch:
            if var in batch or (var in holders.values() and var.aval.shape):
                found[name] = _batch_spec(var, data, batch.get(var, ()))
            continue
        spec = (cut if zero == 3 or (zero and var not in parameters) else kept).spec(var)
        if var in parameters or (any(spec) and own & set(dims.classes(var))):
            found[name] = spec
    return found


def _batch_spec(var: Var, data: int, along: Spec) -> Spec:
    rows = "data" if data > 1 and var.aval.shape[0] % data == 0 else None
    return (rows, *(along[1:] or (None for _ in var.aval.shape[1:])))
