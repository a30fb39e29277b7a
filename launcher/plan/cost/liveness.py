"""Peak temporaries of a program: the memory for what it computes, beside its inputs.

This is an estimate of what the compiler makes of it. Pure.

Equations run in their order. A chain of element-wise ones is fused into what reads it, so that it
takes no memory. A value is stored where a matrix product, a loop or the caller reads it, where it
is a matrix product's or a sum's result, and where it would otherwise be computed twice: from
several others that are no broadcasts (the rule of XLA's instruction fusion), or for a sum, which a
library's routine computes.

XLA:CPU, for its many threads, runs equations as soon as it can instead, and stores whatever is
computed for a sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from launcher.plan.cost.waiting import PutOff, put_off
from launcher.trace import (
    BARRIERS,
    BROADCASTS,
    CHEAP,
    COSTLY,
    FORMS,
    FUSED,
    IN_PLACE,
    IN_STEPS,
    LOOPS,
    MAX_POOL_GRADIENTS,
    NEGATIONS,
    OTHER_DIMS,
    PARTIAL_SUMS,
    REDUCTIONS,
    Atom,
    Body,
    Equation,
    Var,
    bodies,
    is_var,
    nbytes,
)

Size = Callable[[Var], float]
_UNSPLIT = 4096  # rows whose columns XLA:GPU sums by one kernel
_MOMENTS = 24  # of a program, at which is looked what buffers are free


class Liveness:
    """Which values of a program are stored, and when.

    Args:
        equations: the program, in order.
        outs: what the caller gets, which is held to the end.
        at_once: what is added to an accumulator as soon as it is computed.
        as_soon: whether equations run as soon as they can, and sums read what is stored.
        gathered: inputs that are there in parts, and whole from their first reader to the last.
        waits: see `put_off`.
        on_gpu: whether a value is stored, rather than computed for each that reads it, where that
            moves fewer bytes: the rule of XLA:GPU's priority fusion.
    """

    def __init__(
        self,
        equations: Sequence[Equation],
        outs: Iterable[Atom],
        at_once: Iterable[Atom] = (),
        gathered: Iterable[Var] = (),
        waits: Sequence[PutOff] = (),
        as_soon: bool = False,
        on_gpu: bool = False,
    ) -> None:
        self.equations, same = _without_barriers(equations) if on_gpu else ([*equations], {})
        outs, at_once = ([_of(same, v) for v in of] for of in (outs, at_once))
        if waits:
            self.equations = put_off(self.equations, outs, at_once, waits)
        if as_soon or on_gpu:
            self.equations = (_as_soon if as_soon else _as_late)(self.equations)
        turned = list(map(_turned, self.equations))
        if on_gpu:
            turned = _turned_apart(self.equations)
        columns = _columns(self.equations) if on_gpu else {}
        held = [*outs, *at_once, *columns, *same.values()]
        kept = _kept(self.equations, held, as_soon, on_gpu, turned)
        whole = _first_reads(self.equations, gathered)
        behind = _behind(self.equations, kept, whole)
        end = len(self.equations)
        last: dict[Var, int] = {}
        for place, eqn in enumerate(self.equations):
            if any(v in kept for v in eqn.outvars):
                reads = {s for v in eqn.invars if is_var(v) for s in behind.get(v, ())}
                last.update(dict.fromkeys((*reads, *(v for v in eqn.outvars if v in kept)), place))
        until: dict[Var, int] = {}
        for v, source in columns.items():
            until[source] = max(until.get(source, 0), last[v])
        last.update((v, until[source]) for v, source in columns.items())
        last.update((v, end) for v in outs if is_var(v) and v in last)
        ends: dict[int, list[Var]] = {}
        for v, place in last.items():
            ends.setdefault(place, []).append(v)
        defined = {v for eqn in self.equations for v in eqn.outvars}
        self._made = [[v for v in eqn.outvars if v in kept] for eqn in self.equations]
        for v, place in whole.items():
            self._made[place].append(v)
        self._dying = [ends.get(place, []) for place in range(end)]
        self._turned = turned
        self._in_place = _in_place(self.equations, kept, on_gpu)
        self._copy_ahead(defined, on_gpu)
        self._steps = [_in_steps(eqn, on_gpu) for eqn in self.equations]
        self._bodies = [
            [_of_body(body, as_soon, on_gpu) for body in bodies(eqn) if eqn.primitive.name in LOOPS]
            for eqn in self.equations
        ]
        every = self._made, self._dying, self._turned, self._steps, self._bodies
        self._events = [k for k, of in enumerate(zip(*every, strict=True)) if any(of)]

    def _copy_ahead(self, defined: Set[Var], on_gpu: bool) -> None:
        """Make copies where the compiler does: those of inputs at the start.

        XLA:GPU runs them under collectives. That of a product's input is made when the one before
        it of this shape is read. Those of a value are made with it.
        """
        copies = {v for copied in self._turned for v in copied if on_gpu}
        made = {v: place for place, of in enumerate(self._made) for v in of if v in copies}
        ahead: dict[object, int] = {}
        for place, copied in enumerate(self._turned):
            self._turned[place] = [v for v in copied if v in defined and v not in made]
            for v in (v for v in copied if v in made or v not in defined):
                in_turn = on_gpu and self.equations[place].primitive.name == "dot_general"
                before = ahead.get(v.aval.shape, place) if in_turn else 0
                self._made[made.get(v, before)].append(v)  # the copy
                self._dying[place].append(v)
                ahead |= {} if v in made else {v.aval.shape: place}

    def peak(self, size: Size) -> float:
        """Return the most bytes that the values take at one time; `size` returns those of one."""
        return max((level for _, level in self._levels(size)), default=0.0)

    def peak_beside(self, buffers: Sequence[Var], size: Size) -> float:
        """Return the peak where there is room for each of these values all the time.

        Until a value is made, its buffer can hold another one. Some moments are looked at.

        Args:
            buffers: results of the program.
            size: returns the bytes of a value.
        """
        made = {v: place for place, of in enumerate(self._made) for v in of}

        def other(v: Var, own: Set[Var] = frozenset(buffers)) -> float:
            return 0.0 if v in own else size(v)

        levels, peak = list(self._levels(other)), 0.0
        each = -(-len(levels) // _MOMENTS)
        for first in range(0, len(levels), each):
            place, level = max(levels[first : first + each], key=lambda of: of[1])
            if level > peak:
                free = [size(v) for v in buffers if made.get(v, -1) > place]
                there = self._there(place).union(self._made[place])
                peak = max(peak, level - _housed(list(map(other, there)), free))
        return peak

    def _there(self, place: int) -> set[Var]:
        """Return the values just before the equation number `place`."""
        there = set[Var]()
        for made, dying in zip(self._made[:place], self._dying[:place], strict=True):
            there = there.union(made).difference(dying) if made or dying else there
        return there

    def _levels(self, size: Size) -> Iterator[tuple[int, float]]:
        """Yield equations, by number, and the bytes of all values while they run."""
        level = 0.0
        yield 0, level
        for place in self._events:
            made, dying = (list(map(size, of)) for of in (self._made[place], self._dying[place]))
            level += sum(made)
            beside = sum(map(size, (*self._turned[place], *self._steps[place])))
            beside += sum(body.peak(size) for body in self._bodies[place])
            if place in self._in_place:
                beside -= sum((Counter(made) & Counter(dying)).elements())  # of one size alone
            yield place, level + beside
            level -= sum(dying)

    def held(self, place: int, size: Size) -> float:
        """Return the bytes that the values take just before the equation number `place`."""
        level = 0.0
        for made, dying in zip(self._made[:place], self._dying[:place], strict=True):
            level += sum(map(size, made)) - sum(map(size, dying))
        return level


def _of_body(body: Body, as_soon: bool, on_gpu: bool) -> Liveness:
    """Return what a loop's body stores; the rows that it makes are written to where they belong."""
    outs, rows = body.jaxpr.outvars, body.stacked_outputs.start
    return Liveness(body.jaxpr.eqns, outs[:rows], outs[rows:], as_soon=as_soon, on_gpu=on_gpu)


def _without_barriers(
    equations: Iterable[Equation],
) -> tuple[list[Equation], dict[Var, Atom]]:
    """Return the equations without barriers, and what each result of one is: it is stored.

    XLA:CPU copies some of them, and has them as results of their own.
    """
    found: list[Equation] = []
    same: dict[Var, Atom] = {}
    for eqn in equations:
        reads = [_of(same, v) for v in eqn.invars]
        if eqn.primitive.name in BARRIERS:
            same.update(zip(eqn.outvars, reads, strict=True))
        else:
            found.append(eqn.replace(invars=reads) if same else eqn)
    return found, same


def _of(same: Mapping[Var, Atom], v: Atom) -> Atom:
    return same.get(v, v) if is_var(v) else v


def _housed(values: Sequence[float], buffers: Sequence[float]) -> float:
    """Return the bytes of the values for which there is a buffer, the largest first."""
    total, free = 0.0, sorted(buffers)
    for value in sorted(values, reverse=True):
        if free and value <= free[-1]:
            free.pop()
            total += value
    return total


def _as_soon(equations: Sequence[Equation]) -> list[Equation]:
    """Return the equations by how many run before them, at least."""
    level: dict[Var, int] = {}
    for eqn in equations:
        own = 1 + max((level.get(v, 0) for v in eqn.invars if is_var(v)), default=0)
        level.update(dict.fromkeys(eqn.outvars, own))
    return sorted(equations, key=lambda eqn: level[eqn.outvars[0]] if eqn.outvars else 0)


def _as_late(equations: Sequence[Equation]) -> list[Equation]:
    """Return the equations, with those that need no other result just before the first reader.

    They are what is fused and follows from the program's inputs alone, such as a weight's cast, and
    batches of products in 16 bits with what is fused and follows from them.
    """
    late: list[Equation] = []
    early: set[Var] = set()
    products: set[Var] = set()
    for eqn in equations:
        reads = {v for v in eqn.invars if is_var(v)}
        if _is_batch(eqn) or (eqn.primitive.name in CHEAP and reads & products):
            products.update(eqn.outvars)
            late.append(eqn)
        elif eqn.primitive.name in CHEAP and early.isdisjoint(reads):
            late.append(eqn)
        else:
            early.update(eqn.outvars)
    return _before_readers(equations, late)


def _is_batch(eqn: Equation) -> bool:
    """Return whether an equation is a batch of products in 16 bits."""
    if eqn.primitive.name != "dot_general" or not eqn.params["dimension_numbers"][1][0]:
        return False
    return all(v.aval.dtype.itemsize == 2 for v in eqn.invars)


def _before_readers(equations: Sequence[Equation], moved: Iterable[Equation]) -> list[Equation]:
    """Return the equations, the `moved` ones where something else first needs them."""
    late = {v: eqn for eqn in moved for v in eqn.outvars}
    found: dict[int, Equation] = {}

    def place(eqn: Equation) -> None:
        stack = [eqn]
        while stack:
            reads = (late[v] for v in stack[-1].invars if is_var(v) and v in late)
            if missing := next((one for one in reads if id(one) not in found), None):
                stack.append(missing)
            else:
                done = stack.pop()
                found[id(done)] = done

    for eqn in equations:
        if not any(v in late for v in eqn.outvars):
            place(eqn)
    for eqn in late.values():
        found.setdefault(id(eqn), eqn)
    return list(found.values())


def _kept(
    equations: Sequence[Equation],
    outs: Iterable[Atom],
    of_sums: bool,
    on_gpu: bool,
    copied: Iterable[Iterable[Var]],
) -> set[Var]:
    """Return the values that are stored; `of_sums`: with all that sums read."""
    defined = {v for eqn in equations for v in eqn.outvars}
    kept = {v for v in outs if is_var(v) and v in defined}
    turned = {v for of in copied for v in of}
    same = _read_through(equations) if on_gpu else {}
    for eqn in equations:
        fuses = eqn.primitive.name in FUSED or eqn.primitive.name in REDUCTIONS
        if not fuses or (of_sums and eqn.primitive.name in REDUCTIONS):
            reads = [v for v in eqn.invars if is_var(v)]
            if eqn.primitive.name == "dot_general":
                reads = [same.get(v, v) for v in reads]
            kept.update(v for v in reads if v in defined)
        if eqn.primitive.name not in FUSED:
            kept.update(eqn.outvars)
    spread = {v for eqn in equations if _spreads(eqn) for v in eqn.outvars}
    sums = {v for eqn in equations if eqn.primitive.name in PARTIAL_SUMS for v in eqn.outvars}
    leaves = _leaves(equations) if on_gpu else {}
    # Stored values that each value is fused into; with exactly one it is computed once.
    into: dict[Var, set[object]] = {v: set() for v in defined}
    for eqn in reversed(equations):
        if eqn.primitive.name in FUSED:
            out = eqn.outvars[0]
            sources = {v for v in eqn.invars if is_var(v) and v.aval.size > 1}
            grown = sum(v.aval.size for v in sources) < out.aval.size
            full = {v for v in sources if v.aval.size >= out.aval.size} - spread
            summed = full and into[out] & sums
            dear: object = (
                len(full) > 1 or eqn.primitive.name in COSTLY or (sources and grown) or summed
            )
            times = len(into[out])
            if on_gpu:
                count = len([v for v in leaves[out] if v.aval.size >= out.aval.size])
                dear = times * count > times + count + 1 and not _is_wider(eqn, defined)
            if dear and times > 1:
                kept.add(out)
        for v in {v for v in eqn.invars if is_var(v) and v in defined}:
            for out in eqn.outvars:
                into[v] |= _stored(out, kept, turned) or into[out]
    return kept


def _in_place(equations: Sequence[Equation], kept: Set[Var], on_gpu: bool) -> set[int]:
    """Return the equations, by number, whose result may take the place of what they read.

    XLA:GPU computes a value in one kernel with the sums of it, and of what it is made of at once,
    which may not write over what it reads.
    """
    summed = set[Var]()
    for eqn in reversed(equations):
        name, outs = eqn.primitive.name, {*eqn.outvars}
        if name in REDUCTIONS or (name in FUSED and summed & outs and kept.isdisjoint(outs)):
            summed.update(v for v in eqn.invars if is_var(v))
    found, apart = set[int](), summed - kept
    for place, eqn in enumerate(equations):
        name, outs = eqn.primitive.name, {*eqn.outvars}
        reads = {v for v in eqn.invars if is_var(v)} if on_gpu and name in FUSED else set()
        if name in IN_PLACE and not (reads and (summed & outs or apart & reads)):
            found.add(place)
        if apart & reads:
            apart |= outs - kept
    return found


def _leaves(equations: Iterable[Equation]) -> dict[Var, frozenset[Var]]:
    """Return for every value what a kernel reads that computes it of what is no fused value."""
    found: dict[Var, frozenset[Var]] = {}
    for eqn in equations:
        reads = [found.get(v, frozenset((v,))) for v in eqn.invars if is_var(v)]
        of = frozenset[Var]().union(*reads)
        fuses = eqn.primitive.name in FUSED
        found.update((v, of if fuses else frozenset((v,))) for v in eqn.outvars)
    return found


def _columns(equations: Sequence[Equation]) -> dict[Var, Var]:
    """Return the summands of columns that are stored, by the last value that they are made of.

    XLA:GPU does not split sums of few rows. The kernel of one reads narrow values slowly, so that a
    summand of several is stored wide first: one kernel computes all summands of the same values.
    """
    leaves, found = _leaves(equations), dict[Var, Var]()
    at = {v: place for place, eqn in enumerate(equations) for v in eqn.outvars}
    reads = dict.fromkeys(v for eqn in equations for v in eqn.invars if is_var(v))
    order = {v: place for place, v in enumerate(reads)}  # sets of values have none
    for eqn in (e for e in equations if e.primitive.name in REDUCTIONS):
        (v,) = filter(is_var, eqn.invars)
        while v in at and equations[at[v]].primitive.name in NEGATIONS:
            (v,) = filter(is_var, equations[at[v]].invars)
        rows = math.prod(v.aval.shape[d] for d in eqn.params["axes"])
        full = [x for x in leaves.get(v, ()) if x.aval.size >= v.aval.size]
        narrow = any(x.aval.dtype.itemsize < v.aval.dtype.itemsize for x in full)
        computed = len(full) > 1 and equations[at[v]].primitive.name not in FORMS
        if v.aval.ndim - 1 not in eqn.params["axes"] and rows <= _UNSPLIT and narrow and computed:
            found[v] = max(full, key=lambda x: (at.get(x, -1), order[x]))
    return found


def _read_through(equations: Iterable[Equation]) -> dict[Var, Var]:
    """Return for values that are another order of dims of one, which a product reads, that one."""
    found: dict[Var, Var] = {}
    for eqn in equations:
        if eqn.primitive.name in OTHER_DIMS and is_var(source := eqn.invars[0]):
            found[eqn.outvars[0]] = found.get(source, source)
    return found


def _spreads(eqn: Equation) -> bool:
    """Return whether the result is a broadcast, which is recomputed at no cost."""
    read = max((v.aval.size for v in eqn.invars), default=1)
    return eqn.primitive.name in BROADCASTS and read < eqn.outvars[0].aval.size


def _is_wider(eqn: Equation, defined: Set[Var]) -> bool:
    """Return whether the result is a computed value, wider: that is stored in its stead."""
    source = eqn.invars[0] if eqn.primitive.name in FORMS else None
    narrow = source in defined and nbytes(source.aval) if source and is_var(source) else 0
    return 0 < narrow < nbytes(eqn.outvars[0].aval)


def _stored(v: Var, kept: Set[Var], turned: Set[Var]) -> set[object]:
    """Return a value as it is stored, and its copy in another layout; empty if it is not stored."""
    if v not in kept:
        return set()
    return {v, (v, "turned")} if v in turned else {v}


def _turned(eqn: Equation) -> list[Var]:
    """Return the operands of a product that are copied first, since their layout does not suit it.

    Batch dimensions have to come first, and in the first operand the contracted dimension last,
    except of a matrix.
    """
    if eqn.primitive.name == "dot_general":
        (contracted, _), batch = eqn.params["dimension_numbers"]
        first = eqn.invars[0]
        turned = [v for v, d in zip(eqn.invars, batch, strict=True) if list(d) != [*range(len(d))]]
        rank = len(first.aval.shape)
        if contracted and rank > 2 and rank - 1 not in contracted and first not in turned:
            turned.append(first)
        return [v for v in turned if is_var(v)]
    if eqn.primitive.name == "conv_general_dilated":
        of = eqn.params["dimension_numbers"]
        return [v for v, d in zip(eqn.invars, (of.lhs_spec[0], 0), strict=True) if d and is_var(v)]
    return []


def _in_steps(eqn: Equation, on_gpu: bool) -> list[Var]:
    """Return values, each as large as one that an equation stores only while it runs.

    XLA:GPU finds the place of the largest element of every window first: a number of 32 bits for
    each dimension, one of which counts replicas. It then adds to zeros, in two copies, and writes
    to a third place.
    """
    if on_gpu and eqn.primitive.name in MAX_POOL_GRADIENTS and is_var(source := eqn.invars[0]):
        words = (1 + len(source.aval.shape)) * 4 // source.aval.dtype.itemsize
        return [source] * words + eqn.outvars * 2
    return eqn.outvars * (0 if on_gpu else IN_STEPS.get(eqn.primitive.name, 0))


def _turned_apart(equations: Sequence[Equation]) -> list[list[Var]]:
    """Return `_turned` for XLA:GPU, which turns operands of batches of products alone.

    There the batch dimensions have to come first, in their order, and the contracted ones last; in
    the second operand they may be between. What nothing else reads is made in the right layout.
    What a convolution pads at one end of a dimension more than at the other is copied, too.
    """
    reads = Counter(v for eqn in equations for v in eqn.invars if is_var(v))
    made = {v for eqn in equations for v in eqn.outvars}
    found: list[list[Var]] = []
    for eqn in equations:
        found.append([])
        if eqn.primitive.name == "conv_general_dilated" and set(eqn.params["lhs_dilation"]) == {1}:
            uneven = any(low != high for low, high in eqn.params["padding"] if min(low, high) >= 0)
            found[-1] += [v for v in eqn.invars[:1] if uneven and is_var(v)]
        if eqn.primitive.name != "dot_general" or not eqn.params["dimension_numbers"][1][0]:
            continue
        numbers = zip(*eqn.params["dimension_numbers"], strict=True)
        for k, (v, (contracted, batch)) in enumerate(zip(eqn.invars, numbers, strict=True)):
            order = [*range(v.aval.ndim)]
            rows = [d for d in order if d not in {*batch, *contracted}]
            fits = [*batch, *rows, *contracted], [*batch, *contracted, *rows]
            if is_var(v) and order not in fits[: k + 1] and (v not in made or reads[v] > 1):
                found[-1].append(v)
    return found


def _first_reads(equations: Sequence[Equation], of: Iterable[Var]) -> dict[Var, int]:
    """Return the equation, by number, that first reads each of these values, if one does."""
    first = {v: n for n, eqn in reversed([*enumerate(equations)]) for v in eqn.invars if is_var(v)}
    return {v: first[v] for v in of if v in first}


def _behind(
    equations: Iterable[Equation], kept: set[Var], given: Iterable[Var] = ()
) -> dict[Var, frozenset[Var]]:
    """Return for every value the stored values that it is computed from when it is read."""
    found: dict[Var, frozenset[Var]] = {v: frozenset((v,)) for v in given}
    for eqn in equations:
        reads = [found[v] for v in eqn.invars if is_var(v) and v in found]
        through = frozenset().union(*reads)
        found.update((v, frozenset((v,)) if v in kept else through) for v in eqn.outvars)
    return found
