"""Choosing what to cut along a submesh's model axis, and along data for ZeRO.

The named dimensions make it a small integer program: one binary variable for each class; two
classes that meet in one array exclude each other; the price of a class is what cutting it alone
changes. For a transformer this finds Megatron's cut (Shoeybi et al. 2019, arXiv 1909.08053): heads,
the hidden dimension of each feed-forward block, the vocabulary. Solved by HiGHS. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from launcher.hardware import ClusterShape
from launcher.partition import MODEL, NamedDims, Sharding, Spec, axes
from launcher.plan.cost.collectives import (
    Collective,
    Flow,
    SumKey,
    equation_load,
    joined_sums,
    seconds,
)
from launcher.trace import PRODUCTS, Var, nbytes

_LEAST_CUT = 0.75  # of the parameter bytes that can be cut at all


@dataclass(frozen=True)
class CutChoice:
    """A class of dimensions that can be cut.

    Attributes:
        of: the class.
        seconds: what cutting it changes in a slice's forward and backward pass; negative is better.
        cut_bytes: bytes of the parameters that are cut.
    """

    of: int
    seconds: float
    cut_bytes: int


@dataclass(frozen=True)
class Choices:
    """What the integer program chooses from.

    Attributes:
        of: the choices.
        exclusive: pairs of choices, by position, that meet in an array.
        shared: seconds that are spent once if any of several choices, by position, is taken.
    """

    of: tuple[CutChoice, ...]
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
    size = np.array([c.cut_bytes for c in choices.of], float)
    price = np.array([c.seconds for c in choices.of])
    most = _solve(-size, choices.exclusive)
    size /= size.max() or 1.0  # the solver takes no coefficients above 1e15
    wanted = _LEAST_CUT * float(size @ most)
    best = _solve(price, choices.exclusive, choices.shared, (size, wanted))
    return [c.of for c, taken in zip(choices.of, best, strict=True) if taken]


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
            at.setdefault(key, {})[c] = one.seconds(sizes, link, cluster.latency)
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
        tuple(CutChoice(c, price[c], size.get(c, 0)) for c in listed),
        tuple((place[a], place[b]) for a, b in met if a in place and b in place),
        tuple((cost, places) for places, cost in shared.items()),
    )


def _fits(dims: NamedDims, of: int, devices: int) -> bool:
    return dims.size(of) > 1 and dims.size(of) % devices == 0


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
