"""Pieces of a state on several hosts: who holds what alone, and who gets what from whom."""

import itertools

import numpy as np
import pytest

from launcher.checkpoint import pieces
from launcher.checkpoint.pieces import Copy, Holding, Moment, copies, lends, newest_of_all
from launcher.checkpoint.share_file import Found

SHAPES = {"kernel": (12, 8), "bias": (8,), "step": ()}


def grid(name, *cuts):
    """The pieces of an array that is cut so often in each dimension, in C order."""
    sides = [
        [(k * n // cut, (k + 1) * n // cut) for k in range(cut)]
        for n, cut in zip(SHAPES[name], cuts, strict=True)
    ]
    return [(name, ranges) for ranges in itertools.product(*sides)]


STEP = [("step", ())]
ZERO3 = [[piece, *grid("bias", 1), *STEP] for piece in grid("kernel", 3, 1)]
STAGES = [[*grid("kernel", 1, 1), *STEP], [*grid("bias", 1), *STEP]]
WHOLE = [*grid("kernel", 1, 1), *grid("bias", 1), *STEP]
TWO_AXES = [[*grid("kernel", 2, 2)[k % 2 :: 2], *WHOLE[1:]] for k in range(4)]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([WHOLE] * 3, [[]] * 3),  # data parallelism, parameter servers
        (ZERO3, [[k] for k in grid("kernel", 3, 1)]),
        (STAGES, [grid("kernel", 1, 1), grid("bias", 1)]),
        (TWO_AXES, [[]] * 4),  # each shard is on two hosts
    ],
    ids=["replicas", "zero3", "stages", "two axes"],
)
def test_the_next_host_gets_what_no_other_one_holds(held, expected):
    sizes = [{piece: 8 * pieces.volume(piece[1]) for piece in own} for own in held]
    taken = [sum(sizes[k - 1][piece] for piece in expected[k - 1]) for k in range(len(held))]
    to = [*range(1, len(held)), 0]
    assert copies(sizes) == [*map(Copy, expected, to, taken)]


def holdings(*steps_of_hosts, held=STAGES):
    return [
        {Moment(step, 0): Holding(SHAPES, own) for step in steps}
        for steps, own in zip(steps_of_hosts, held, strict=True)
    ]


@pytest.mark.parametrize(
    ("hosts", "newest"),
    [
        (holdings([30, 33], [33, 36]), 33),
        (holdings([33, 36], [33, 36]), 36),
        (holdings([36, 39], [36, 39]), 36),  # 39 is not recorded
        (holdings([30, 33], [36, 39]), None),
        (holdings([33], []), None),  # a host is lost, and nobody has its pieces
        (holdings([33], [], held=[WHOLE, WHOLE]), 33),  # a replica
        (holdings([33], [], [33], held=[*STAGES, [*grid("bias", 2)[:1]]]), None),  # half of it
        (holdings([33], [], [33], held=[*STAGES, grid("bias", 1)]), 33),  # a neighbour's copy
    ],
)
def test_the_newest_is_one_whose_pieces_are_all_on_hand(hosts, newest):
    found = newest_of_all(hosts, most=37, since=0)
    assert found == (None if newest is None else Moment(newest, 0))


def test_pieces_of_two_attempts_are_not_put_together():
    one, other = holdings([33], [33])
    assert newest_of_all([one, {Moment(33, 1): other[Moment(33, 0)]}], 37, 0) is None


def test_a_host_that_comes_back_holds_what_a_roll_back_has_left():
    left, now = holdings([33, 36], [30], held=[WHOLE, WHOLE])
    hosts = [left, {Moment(30, 1): now[Moment(30, 0)]}]
    assert newest_of_all(hosts, 37, since=0) == Moment(36, 0)
    assert newest_of_all(hosts, 37, since=1) == Moment(30, 1)


def arrays():
    return {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in SHAPES.items()}


def found_by(own):
    found = Found(SHAPES)
    found.add({piece: value_of(*piece) for piece in own})
    return found


def value_of(name, place):
    return arrays()[name][tuple(slice(*ends) for ends in place)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("most", [1, 20, 10**9])
@pytest.mark.parametrize(
    ("held", "needed"),
    [
        (ZERO3, [WHOLE, WHOLE]),
        (STAGES, [[*grid("kernel", 4, 1)[k : k + 1], *WHOLE[1:]] for k in range(4)]),
        (TWO_AXES, ZERO3),
        ([*ZERO3[:2], [], ZERO3[2]], ZERO3),  # the third host is lost, and another one has a copy
        ([WHOLE, []], [WHOLE, WHOLE]),
    ],
)
def test_a_host_gets_what_it_lacks_in_rounds_under_any_plan(monkeypatch, held, needed, most):
    monkeypatch.setattr(pieces, "_MOST_ELEMENTS", most)
    hosts = max(len(held), len(needed))  # some may be new, others of no use any more
    held, needed = ([*each, *[[]] * (hosts - len(each))] for each in (held, needed))
    found = [found_by(each) for each in held]
    both = list(zip(needed, held, strict=True))
    for lent in lends([[p for p in wanted if p not in own] for wanted, own in both], held):
        for host, (holder, parts) in lent.items():
            assert sum(pieces.volume(place) for _, place in parts) <= most or len(parts) == 1
            assert not set(parts) & set(held[host])
            found[host].add({part: found[holder].copy_of(part) for part in parts})
    for wanted, here in zip(needed, found, strict=True):
        for piece in wanted:
            np.testing.assert_array_equal(here.copy_of(piece), value_of(*piece), strict=True)


def test_nobody_lends_where_nothing_is_lacking():
    assert list(lends([[], []], [WHOLE, WHOLE])) == []
