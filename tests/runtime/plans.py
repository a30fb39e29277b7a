"""Plans that the tests run: by every method, and at random."""

import itertools
import math
import random

from launcher.partition.assignment import Assignment, Submesh
from launcher.plan.build import build_plan
from launcher.plan.methods import (
    DataParallel,
    ManualStageOption,
    PipeshardParallel,
    ShardParallel,
    ThreeDParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
)
from launcher.trace.interface import leaf_names


def manual(num_micro_batches, stages, submeshes, logical=None, options=None, **other):
    option = ManualStageOption(stages, submeshes, logical, options)
    return PipeshardParallel(num_micro_batches, stage_option=option, **other)


def uniform(num_micro_batches=1, stages=None, **other):
    return PipeshardParallel(num_micro_batches, stage_option=UniformStageOption(stages), **other)


BY_WORD = {
    "manual": uniform,
    "data": DataParallel,
    "zero2": Zero2Parallel,
    "zero3": Zero3Parallel,
    "shard": ShardParallel,
    "three_d": ThreeDParallel,
}


def from_words(method, **settings):
    """The method of settings that came as text."""
    return BY_WORD[method](**settings)


def by_hand(step, first, last, sizes):
    """Specs for every argument: the first dimension along one axis and the last along another,
    where they divide; not as a method would have it. `sizes`: (data, model)."""
    parts = {"data": sizes[0], "model": sizes[1], None: 1}
    found = {}
    for name, var in zip(leaf_names(step), step.invars, strict=True):
        shape = var.aval.shape
        spec = [None] * len(shape)
        if len(shape) > 1 and shape[0] % parts[first] == 0:
            spec[0] = first
        if shape and shape[-1] % parts[last] == 0:
            spec[-1] = last
        found[name] = tuple(spec)
    return found


TWO, FOUR = [[0, 1], [2, 3]], [[0], [1], [2], [3]]


def given_specs(step):
    options = [
        by_hand(step, "data", "model", (2, 2)),
        by_hand(step, "model", None, (1, 2)),
    ]
    return manual(2, TWO, [(1, 4), (1, 2)], [(2, 2), (1, 2)], options)


def one_and_three(step):
    """Two halves, on one device and on three."""
    count = step.loss(1).num_layers
    halves = [list(range(count // 2)), list(range(count // 2, count))]
    return manual(2, halves, [(1, 1), (1, 3)])


# For models of four layers: name: (devices, method or what makes it for a step).
METHODS = {
    **{f"shard 4, {m}": (4, ShardParallel(m)) for m in (1, 2)},
    **{f"shard 2x2, {m}": (4, ShardParallel(m, (2, 2))) for m in (1, 2)},
    **{f"data, {m}": (4, DataParallel(m)) for m in (1, 2)},
    **{f"zero2, {m}": (4, Zero2Parallel(m)) for m in (1, 2)},
    **{f"zero3, {m}": (4, Zero3Parallel(m)) for m in (1, 2)},
    "zero3, remat": (4, Zero3Parallel(2, remat="full")),
    "3d": (8, ThreeDParallel(2, 2, 2, num_micro_batches=3)),
    "3d, remat": (8, ThreeDParallel(2, 2, 2, 2, schedule="gpipe", remat="full")),
    "3d, zero bubble": (8, ThreeDParallel(2, 2, 2, 2, schedule="zero_bubble")),
    "2 stages": (2, uniform(4, 2)),
    "4 stages": (4, uniform(6, 4)),
    "4 stages on 2 meshes": (4, uniform(3, 4, schedule="interleaved_1f1b")),
    "1+3": (4, one_and_three),
    "1+3, whole": (4, manual(1, TWO, [(1, 1), (1, 3)])),
    "3+1, remat": (4, manual(2, TWO, [(1, 3), (1, 1)], remat="dots_saveable")),
    "2+4": (6, manual(3, TWO, [(1, 2), (1, 4)], [(2, 1), (1, 4)])),
    "2+4, zero3": (6, manual(3, TWO, [(1, 2), (1, 4)], [(2, 1), (2, 2)], ["zero3", "zero3"])),
    "2+4, zero2": (6, manual(2, TWO, [(1, 2), (1, 4)], [(2, 1), (4, 1)], ["zero2", "zero2"])),
    "1+2+4+1": (8, manual(4, FOUR, [(1, 1), (1, 2), (1, 4), (1, 1)],
                          [(1, 1), (1, 2), (2, 2), (1, 1)])),
    "given": (6, given_specs),
    "1 stage": (1, uniform(2, 1)),
    "4 stages of two": (8, uniform(6, 4)),
    "gpipe, remat": (8, uniform(2, 2, schedule="gpipe", remat="full")),
    "eager": (3, uniform(4, 3, schedule="eager_1f1b")),
    "zero bubble": (4, uniform(6, 4, schedule="zero_bubble")),
    "zero bubble, whole": (2, uniform(1, 2, schedule="zero_bubble")),
    "zero bubble, 1 stage": (1, uniform(2, 1, schedule="zero_bubble")),
    "zero bubble, remat": (
        3, uniform(4, 3, schedule="zero_bubble", remat=["none", "full", "none"])),
    "4 stages on 1 mesh": (1, uniform(4, 4, schedule="interleaved_1f1b")),
    "rounds that do not divide": (2, uniform(3, 4, schedule="interleaved_1f1b")),
    "interleaved, remat": (
        4, uniform(3, 4, schedule="interleaved_1f1b", remat="dots_saveable")),
}  # fmt: skip


def by_name(step, name, cluster):
    """The plan of a method of `METHODS`."""
    how = METHODS[name][1]
    return (how(step) if callable(how) else how).plan(step, cluster)


def at_random(step, seed, cluster):
    """A plan of 1 to 6 stages and 1 to 9 microbatches on submeshes of random shapes; all but the
    cluster follows from the seed."""
    rng = random.Random(seed)
    while True:
        assignment = _assignment(step, rng, cluster.num_devices)
        replicas = math.gcd(*(submesh.logical_mesh[0] for submesh in assignment.submeshes))
        if step.batch_size % (assignment.num_micro_batches * replicas) == 0:
            return build_plan(step, assignment, cluster)


def _assignment(step, rng, num_devices):
    num_layers = step.loss(1).num_layers
    num_stages = rng.randint(1, min(6, num_layers))
    ends = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    schedule = rng.choice(["gpipe", "1f1b", "zero_bubble", "interleaved_1f1b", "eager_1f1b"])
    num_meshes = num_stages
    if schedule == "interleaved_1f1b":
        num_meshes = rng.choice([n for n in range(1, num_stages + 1) if num_stages % n == 0])
    if num_meshes > num_devices:
        return _assignment(step, rng, num_devices)
    submeshes = _submeshes(rng, num_devices, num_meshes)
    zero = [rng.choice([0, 0, 2, 3]) for _ in range(num_stages)]
    axes = ["data", "model", None]
    given = [
        by_hand(step, *rng.sample(axes, 2), submeshes[s % num_meshes].logical_mesh)
        if not z and rng.random() < 0.4
        else None
        for s, z in enumerate(zero)
    ]
    return Assignment(
        method="manual",
        layers=tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends)),
        submeshes=submeshes,
        mesh_of=tuple(s % num_meshes for s in range(num_stages)),
        num_micro_batches=rng.randint(1, 9),
        schedule=schedule,
        remat=tuple(rng.choice(["none", "full", "dots_saveable"]) for _ in range(num_stages)),
        zero=tuple(zero),
        shardings=tuple(given),
    )


def _submeshes(rng, num_devices, count):
    """All devices, in order; each submesh has 1, 2, 3, 4, 6 or 8."""
    sizes = [0]
    while not set(sizes) <= {1, 2, 3, 4, 6, 8}:
        cuts = sorted(rng.sample(range(1, num_devices), count - 1))
        sizes = [b - a for a, b in itertools.pairwise([0, *cuts, num_devices])]
    found, first = [], 0
    for size in sizes:
        model = rng.choice([n for n in (1, 2, 4) if size % n == 0])
        found.append(Submesh(tuple(range(first, first + size)), (size // model, model)))
        first += size
    return tuple(found)
