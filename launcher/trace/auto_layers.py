"""Layer clustering: a model without marks is cut where few bytes cross (Alpa, OSDI 2022). Pure.

`cluster_layers` finds the cuts in one trace of the loss; `apply_layer_ends` applies them to another
trace of the same model, such as that of a smaller slice or without dropout. A cut is therefore
described by the *anchors* that all traces have in common: equations that hold a matrix product or
read a floating-point operand (a parameter).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from launcher.trace.errors import LayerCountError, TraceError
from launcher.trace.ir.cost import matmul_flops, program_flops
from launcher.trace.ir.jaxpr import Equation, Var, has_tangent, is_var, nbytes
from launcher.trace.slicing.slices import ANY_LAYER, Loss

LayerEnds: TypeAlias = tuple[tuple[int, int], ...]
"""Where layers end, but for the last: after so many anchors, and then so many other equations."""

MOST_LAYERS = 16  # that are chosen without being asked for
_FEWEST_PRODUCTS = 3  # that each of these has on average
_BALANCE = 1e-4  # tie-break weight: evenness of work against bytes crossed


def cluster_layers(loss: Loss, num_layers: int | None, eps: float) -> LayerEnds:
    """Choose where to cut the forward pass into layers.

    The fewest bytes cross all cuts, with no layer of more than `1 + eps` times the mean work; of
    these choices the most even one is taken.

    A dynamic program over the places with the fewest bytes between two matrix products; what holds
    a loop or a branch is one equation and stays whole. Where one equation alone is more than that
    work, the bound is its work.

    Args:
        loss: the loss whose forward pass is cut.
        num_layers: None for as many, to `MOST_LAYERS`, as keep a cut within `1 + eps` times the
            bytes of a cut into two.
        eps: at least 0.

    Raises:
        LayerCountError: more layers than equations, or none.
    """
    equations = _own(loss)
    if num_layers is not None and not 1 <= num_layers <= max(1, len(equations)):
        raise LayerCountError(
            f"parallel.num_layers={num_layers} does not fit a forward pass of {len(equations)} "
            "equations; each layer is at least one"
        )
    if num_layers is not None:
        return layer_ends_at(loss, _cut(equations, loss, num_layers, eps)[1])
    products = sum(matmul_flops([eqn]) > 0 for eqn in equations)
    most = min(MOST_LAYERS, max(1, products // _FEWEST_PRODUCTS), len(equations))
    if most == 1:
        return ()
    least = _cut(equations, loss, 2, eps)[0]
    for count in range(most, 1, -1):
        crossing, cuts = _cut(equations, loss, count, eps)
        if count == 2 or crossing / (count - 1) <= (1 + eps) * least:
            return layer_ends_at(loss, cuts)
    raise AssertionError("two layers are no more than two")


def apply_layer_ends(loss: Loss, ends: LayerEnds) -> Loss:
    """Return the loss with layers that end there instead of at its marks.

    Raises:
        TraceError: there are no such places: it is another model.
    """
    equations = _own(loss)
    anchors = _anchors(equations, loss)
    cuts = []
    for after, others in ends:
        if not 0 <= after <= len(anchors):
            raise TraceError(
                f"a layer ends after {after} equations with a matrix product or a parameter and "
                f"this forward pass has {len(anchors)}: it is another model than the one that was "
                "cut. Mark its layers with mark_pipeline_boundary()"
            )
        last = anchors[after - 1] + 1 if after else 0
        following = anchors[after] if after < len(anchors) else len(equations)
        cuts.append(min(last + others, following))
    layer_of = {id(eqn): bisect.bisect_right(cuts, i) for i, eqn in enumerate(equations)}
    layers = tuple(layer_of.get(id(eqn), ANY_LAYER) for eqn in loss.equations)
    return dataclasses.replace(loss, layers=layers, num_layers=len(ends) + 1)


def layer_ends_at(loss: Loss, cuts: Sequence[int]) -> LayerEnds:
    """Return the ends of layers before these equations, counted among those of any layer."""
    anchors = _anchors(_own(loss), loss)
    counts = [bisect.bisect_left(anchors, cut) for cut in cuts]
    lasts = [anchors[n - 1] + 1 if n else 0 for n in counts]
    return tuple((n, cut - last) for n, cut, last in zip(counts, cuts, lasts, strict=True))


def _own(loss: Loss) -> list[Equation]:
    """Return the equations that belong to a layer."""
    pairs = zip(loss.equations, loss.layers, strict=True)
    return [eqn for eqn, layer in pairs if layer != ANY_LAYER]


def _anchors(equations: Sequence[Equation], loss: Loss) -> list[int]:
    floating = {v for v in loss.invars if has_tangent(v.aval)}
    return [
        i
        for i, eqn in enumerate(equations)
        if any(is_var(v) and v in floating for v in eqn.invars) or matmul_flops([eqn])
    ]


def _cut(
    equations: Sequence[Equation], loss: Loss, num_layers: int, eps: float
) -> tuple[float, list[int]]:
    """Return the bytes that cross, and the cuts, each before an equation."""
    crossing = _crossing(equations, loss)
    work = np.array([0.0, *itertools.accumulate(program_flops([eqn]) for eqn in equations)])
    places = _places(equations, crossing, num_layers)
    at = [0, *places, len(equations)]
    done, bytes_at = work[at], np.array([0.0, *crossing[places], 0.0])
    mean = max(float(done[-1]), 1.0) / num_layers
    bound = max((1 + eps) * mean, _least_bound(done, num_layers) * (1 + 1e-9))
    scale = max(float(bytes_at.max()), 1.0)
    count = len(at)
    best = np.full(count, np.inf)
    best[0] = 0.0
    choices = []
    for layer in range(1, num_layers + 1):
        now, choice = np.full(count, np.inf), np.zeros(count, np.int64)
        for k in range(layer, count):
            first = int(np.searchsorted(done, done[k] - bound))
            if first >= k:
                continue
            own = (done[k] - done[first:k]) / mean
            total = best[first:k] + bytes_at[k] / scale + _BALANCE * own**2
            j = int(total.argmin())
            now[k], choice[k] = total[j], first + j
        best = now
        choices.append(choice)
    cuts, k = [], count - 1
    for choice in reversed(choices):
        k = int(choice[k])
        cuts.append(at[k])
    cuts = cuts[-2::-1]
    return float(crossing[cuts].sum()), cuts


def _crossing(equations: Sequence[Equation], loss: Loss) -> np.ndarray:
    """Bytes of the values that are made before each equation and read from there on."""
    made = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars}
    read: dict[Var, int] = {}
    for i, eqn in enumerate(equations):
        read.update((v, i) for v in eqn.invars if is_var(v) and v in made)
    change = np.zeros(len(equations) + 1)
    for v, last in read.items():
        change[made[v] + 1] += nbytes(v.aval)
        change[last + 1] -= nbytes(v.aval)
    return np.cumsum(change)


def _places(equations: Sequence[Equation], crossing: np.ndarray, num_layers: int) -> list[int]:
    """Return where to cut: between two products, the place with the fewest bytes.

    Any place where these are too few.
    """
    products = [i for i, eqn in enumerate(equations) if matmul_flops([eqn])]
    runs = [range(a + 1, b + 1) for a, b in itertools.pairwise(products)]
    found = [min(run, key=lambda i: float(crossing[i])) for run in runs]
    return found if len(found) >= num_layers - 1 else list(range(1, len(equations)))


def _least_bound(done: np.ndarray, num_layers: int) -> float:
    """Return the least work of the largest of so many layers, to a thousandth."""
    steps = np.diff(done)
    low, high = float(steps.max()), float(done[-1])
    while high - low > 1e-3 * low and not math.isclose(low, high):
        bound = (low + high) / 2
        if _layers_needed(done, bound) <= num_layers:
            high = bound
        else:
            low = bound
    return low if _layers_needed(done, low) <= num_layers else high


def _layers_needed(done: np.ndarray, bound: float) -> int:
    layers, start = 0, 0
    while start < len(done) - 1:
        end = int(np.searchsorted(done, done[start] + bound * (1 + 1e-12), side="right")) - 1
        start = max(end, start + 1)
        layers += 1
    return layers
