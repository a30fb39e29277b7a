"""The search prices a stage as the plan that is built of it is predicted: one cost model."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import random_problems

import launcher
from launcher.partition.assignment import Submesh
from launcher.plan import microbatch_transfer_seconds
from launcher.plan.build import build_plan
from launcher.plan.inter_op.estimate import make_estimate
from launcher.plan.inter_op.layer_construction import make_problem
from launcher.trace import trace_step
from launcher.trace.interface import leaf_names

SECONDS = "forward_seconds", "backward_seconds", "backward_weight_seconds", "update_seconds"
RINGS = "pass_rings", "once_rings"


def traced(rng):
    """A small network of up to six layers of random widths, and its optimizer."""
    layers, batch = int(rng.integers(2, 7)), int(rng.choice([16, 32]))
    optimizer = [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1)][rng.integers(3)]
    hidden, dtype = int(rng.choice([24, 64])), [jnp.float32, jnp.bfloat16][rng.integers(2)]
    frozen = rng.random() < 0.2

    def array(*lengths):
        return jax.ShapeDtypeStruct(lengths, dtype)

    def loss(params, x):
        for i, (up, down) in enumerate(params):
            if i:
                launcher.mark_pipeline_boundary()
            x = x + jnp.tanh(x @ up) @ down
        return (x.astype(jnp.float32) ** 2).mean()

    def train(state, x):
        params, kept = state
        grads = launcher.grad(loss)(params, x)
        if frozen:  # no step uses its gradient
            grads[0] = grads[0][0], jnp.zeros_like(grads[0][1])
        updates, kept = optimizer.update(grads, kept, params)
        return optax.apply_updates(params, updates), kept

    widths = [int(rng.choice([48, 96, 80])) for _ in range(layers)]
    params = [(array(hidden, wide), array(wide, hidden)) for wide in widths]
    state = params, jax.eval_shape(optimizer.init, params)
    return trace_step(train, (state, array(batch, hidden))), frozen


def cluster_of(rng):
    hosts, each = int(rng.choice([1, 2])), int(rng.choice([2, 4]))
    rates = {
        name: float(10 ** rng.uniform(low, low + 2))
        for name, low in (
            ("flops", 8),
            ("flops_fp32", 7),
            ("memory_bandwidth", 7),
            ("intra_host", 7),
            ("inter_host", 6),
            ("latency", -5),
            ("gather_rate", -1),
            ("dispatch_overhead", -4),
        )
    }
    return random_problems.cluster_of(hosts, each, **rates)


def assignment_of(rng, step, cluster, zeros):
    """Stages of random runs of layers, on meshes of as many replicas and random model axes."""
    layers = step.loss(1).num_layers
    data = int(rng.choice([1, 2, 4]))
    models = [m for m in (1, 2, 4) if m <= cluster.devices_per_host]
    meshes, used = [], 0
    while len(meshes) < layers:
        fits = [m for m in models if used + data * m <= cluster.num_devices]
        if not fits or (meshes and rng.random() < 0.3):
            break
        model = int(rng.choice(fits))
        meshes.append(Submesh(tuple(range(used, used + data * model)), (data, model)))
        used += data * model
    if not meshes:
        meshes.append(Submesh((0, 1), (2, 1)))
    count = len(meshes)
    cuts = sorted(rng.choice(np.arange(1, layers), count - 1, replace=False).tolist())
    runs = zip((0, *cuts), (*cuts, layers), strict=True)
    schedule = str(rng.choice(["gpipe", "1f1b", "eager_1f1b", "zero_bubble"]))
    remats = ["none", "full", "full:1"]
    given = random_problems.equal_stages(meshes, layers, schedule=schedule)
    return dataclasses.replace(
        given,
        layers=tuple(tuple(range(first, end)) for first, end in runs),
        num_micro_batches=int(rng.choice([1, 2, 4])),
        remat=tuple(str(rng.choice(remats)) for _ in meshes),
        zero=tuple(int(rng.choice(zeros)) for _ in meshes),
    )


def sharded_alike(step, stage, table):
    """Whether the layers, each solved alone, are cut along the model axis as their stage is."""
    model = stage.logical_mesh[1]
    alone = collections.Counter()
    for one in table.parameters:
        if one.layers[0] in stage.layers:
            lengths = one.lengths[table.index(model, False)]
            alone[lengths] += int(one.of["parameters"][0])
    together = collections.Counter()
    for name, var in zip(leaf_names(step), step.invars, strict=True):
        state, _, place = name.partition(".")
        if state == "0" and place.startswith("0.") and int(place.split(".")[1]) in stage.layers:
            spec = stage.shardings.get(name, (None,) * 2)
            cut = ["model" in str(axis) for axis in spec]
            together[
                tuple(n // model if c else n for n, c in zip(var.aval.shape, cut, strict=True))
            ] += 1
    return alone == together


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(30))
def test_an_estimate_is_the_plans_own_prediction(seed):
    rng = np.random.default_rng(seed)
    (step, frozen), cluster = traced(rng), cluster_of(rng)
    # A prediction takes all gradients to be scattered in every pass.
    assignment = assignment_of(rng, step, cluster, zeros=(0, 2) if frozen else (0, 2, 3))
    problem = make_problem(step, cluster)
    plan, estimate = build_plan(step, assignment, cluster), make_estimate(assignment, problem)
    for built, known in zip(plan.stages, estimate.stages, strict=True):
        if not sharded_alike(step, built, problem.table):
            continue
        for name in SECONDS:
            assert getattr(known, name) == pytest.approx(getattr(built, name), rel=2e-3), name
        for name in RINGS:
            rings = vars(getattr(built, name))
            assert vars(getattr(known, name)) == pytest.approx(rings, rel=2e-3), name
        whole = built.update_seconds + built.hidden_seconds
        assert known.update_seconds + known.hidden_seconds == pytest.approx(whole, rel=2e-3)
    sent = {
        link: s
        for link, s in microbatch_transfer_seconds(plan).items()
        if abs(link[0] - link[1]) == 1
    }
    assert microbatch_transfer_seconds(estimate) == pytest.approx(sent)
