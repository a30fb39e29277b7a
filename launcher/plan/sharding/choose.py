"""Choosing what to cut along a submesh's model axis, and along data for ZeRO.

The named dimensions make it a small integer program: one binary variable a class; two classes that
meet in one array exclude each other; a class's price is what cutting it alone changes. For a
transformer this finds Megatron's cut (Shoeybi et al. 2019, arXiv 1909.08053): heads, the hidden
dimension of each feed-forward block, the vocabulary. Solved by HiGHS. Pure; used by `plan.make`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.sharding.cost import PRODUCTS, Flow, load, seconds
from launcher.plan.sharding.dims import NamedDims, Sharding, Spec, axes
from launcher.plan.sharding.layout import MODEL
from launcher.trace.graph import Var, nbytes

_LEAST_CUT = 0.75  # of the parameter bytes that can be cut at all


@dataclass(frozen=True)
class Choice:
    """A class that can be cut: what that changes, in seconds of a slice's forward and backward
    pass (negative is better), and the parameter bytes that are cut."""

    of: int
    seconds: float
    cut_bytes: int


def model_classes(
    dims: NamedDims,
    parameters: Sequence[Var],
    batch: Set[int],
    flows: Flow,
    devices: int,
    cluster: ClusterShape,
    link: float,
) -> list[int]:
    """The classes to cut over `devices`: those that cost least while at least three quarters of
    the parameter bytes that can be cut are.

    Args:
        batch: classes of the batch's rows, which are no candidates.
        link: bytes/s between the devices.
    """
    choices, meetings = _choices(dims, parameters, batch, flows, devices, cluster, link)
    if not choices:
        return []
    size = np.array([c.cut_bytes for c in choices], float)
    price = np.array([c.seconds for c in choices])
    most = _solve(-size, meetings, None)
    size /= size.max() or 1.0  # the solver takes no coefficients above 1e15
    wanted = _LEAST_CUT * float(size @ most)
    best = _solve(price, meetings, LinearConstraint(size[None, :], lb=wanted))
    return [c.of for c, taken in zip(choices, best, strict=True) if taken]


def _choices(
    dims: NamedDims,
    parameters: Sequence[Var],
    batch: Set[int],
    flows: Flow,
    devices: int,
    cluster: ClusterShape,
    link: float,
) -> tuple[list[Choice], list[tuple[int, int]]]:
    """The candidates, and the pairs of them (by position) that meet in an array."""
    sizes = {MODEL: devices}
    price: dict[int, float] = {}
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
        before = seconds(load(use, whole, flows), sizes, cluster, link)
        for c in fits:
            cut = Sharding(dims, sizes)
            cut.axis_of[c] = (MODEL,)
            after = seconds(load(use, cut, flows), sizes, cluster, link)
            price[c] = price.get(c, 0.0) + after - before
        if use.eqn.primitive.name in PRODUCTS:
            met.update(_pairs(by_atom, set(fits)))
    size: dict[int, int] = {}
    for var in parameters:
        own = [c for c in dict.fromkeys(dims.classes(var)) if c in price]
        met.update(_pairs([dims.classes(var)], set(own)))
        for c in own:
            size[c] = size.get(c, 0) + nbytes(var.aval)
    listed = sorted(c for c in price if size.get(c) or price[c] < 0)
    place = {c: k for k, c in enumerate(listed)}
    pairs = [(place[a], place[b]) for a, b in met if a in place and b in place]
    return [Choice(c, price[c], size.get(c, 0)) for c in listed], pairs


def _fits(dims: NamedDims, of: int, devices: int) -> bool:
    return dims.size(of) > 1 and dims.size(of) % devices == 0


def _pairs(by_atom: Iterable[Sequence[int]], among: Set[int]) -> dict[tuple[int, int], None]:
    return {
        pair: None
        for classes in by_atom
        for pair in itertools.combinations(sorted(set(classes) & among), 2)
    }


def _solve(
    price: np.ndarray, exclusive: Sequence[tuple[int, int]], least: LinearConstraint | None
) -> np.ndarray:
    """The cheapest 0/1 choice without two that exclude each other."""
    constraints = [] if least is None else [least]
    if exclusive:
        rows = np.zeros((len(exclusive), len(price)))
        for row, (a, b) in zip(rows, exclusive, strict=True):
            row[a] = row[b] = 1.0
        constraints.append(LinearConstraint(rows, ub=1.0))
    scale = float(np.abs(price).max()) or 1.0
    found = milp(
        price / scale, integrality=np.ones(len(price)), bounds=Bounds(0, 1), constraints=constraints
    )
    if found.x is None:
        raise AssertionError(f"the choice of shardings has no solution: {found.message}")
    return np.round(found.x)


def along_data(shape: Sequence[int], spec: Spec, replicas: int, model: int) -> Spec | None:
    """A spec with the data axis as well: on the longest dimension that it divides, rather one that
    is not cut yet. None: there is none."""
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
