"""Every known kind of parallelism is found where it is the best: the search's plan is as fast as
the fastest of all that its only stage could be, by the same predictions."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from random_problems import cluster_of, equal_stages, in_order

import launcher
from launcher.partition.layout import MODEL, outer_dims
from launcher.partition.named_dims import NamedDims, Sharding
from launcher.partition.stages import cut_stages
from launcher.plan.build import build_plan
from launcher.plan.inter_op.problem import Constraints
from launcher.plan.inter_op.select import search
from launcher.plan.intra_op import argument_specs, batch_specs, row_classes
from launcher.trace import trace_step

RATES = {"flops": 1e12, "flops_fp32": 1e12, "memory_bandwidth": 1e12}
CLUSTER = cluster_of(1, 4, **RATES, intra_host=1e10, inter_host=1e9, latency=1e-8)


def floats(*lengths):
    return jax.ShapeDtypeStruct(lengths, jnp.float32)


def mlp(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def attention(params, x):
    query, key, value = (x @ params[name] for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqh,bkh->bqk", query, key))
    return mlp(params, jnp.einsum("bqk,bkh->bqh", weights, value))


@launcher.per_slice
def experts(params, x):
    """Switch's (Fedus et al. 2021), dispatched by einsum, with room for twice the tokens."""
    rows, count = x.shape[0], params["gate"].shape[1]
    room = 2 * -(-rows // count)
    gates = jax.nn.softmax(x @ params["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), count)
    place = jax.nn.one_hot(((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(int), room)
    dispatch = chosen[:, :, None] * place[:, None, :]
    taken = jnp.einsum("td,tec->ecd", x, dispatch)
    inner = jax.nn.relu(jnp.einsum("ecd,edf->ecf", taken, params["up"]))
    made = jnp.einsum("ecf,efd->ecd", inner, params["down"])
    return jnp.einsum("ecd,tec,te->td", made, dispatch, gates)


def traced(layer, shapes, optimizer, *lengths):
    def loss(params, x):
        return ((layer(params, x) - x) ** 2).mean()

    def train(state, x):
        params, kept = state
        updates, kept = optimizer.update(launcher.grad(loss)(params, x), kept, params)
        return optax.apply_updates(params, updates), kept

    params = {name: floats(*shape) for name, shape in shapes.items()}
    state = params, jax.eval_shape(optimizer.init, params)
    return trace_step(train, (state, floats(*lengths)))


def every_plan(step, cluster, count):
    """All logical meshes, ZeRO levels and sets of dimensions that can be cut together, in `count`
    microbatches."""
    for data, model in ((4, 1), (2, 2), (1, 4)):
        if step.batch_size % (data * count):
            continue
        loss = step.loss(data * count)
        layers = tuple(range(loss.num_layers))
        (graph,) = cut_stages(loss, [layers])
        dims, outer = NamedDims(loss.equations), outer_dims(step)
        for chosen in _sets(step, loss, graph, dims, model):
            cut = Sharding(dims, {MODEL: model})
            cut.axis_of.update(dict.fromkeys(chosen, (MODEL,)))
            operands = {i: cut.spec(loss.invars[i]) for i in graph.operands}
            batch = {}
            for of in chosen:
                batch |= batch_specs(step, loss, dims, of)
            for zero in (0, 2, 3) if data > 1 else (0,):
                specs = argument_specs(
                    step, loss, graph, operands, (data, model), zero, outer, batch
                )
                changed = {"num_micro_batches": count, "shardings": (specs,)}
                assignment = equal_stages(in_order([(data, model)]), len(layers), **changed)
                yield build_plan(step, assignment, cluster)


def _sets(step, loss, graph, dims, model):
    if model == 1:
        return [()]
    arrays = [dims.classes(loss.invars[i]) for i in graph.operands]
    for use in dims.uses:
        arrays += [dims.classes(v, use.scope) for v in (*use.eqn.invars, *use.eqn.outvars)]
    given = {of for i in graph.operands for of in dims.classes(loss.invars[i])}
    whole = row_classes(step, loss, graph, dims)
    classes = sorted(of for of in given - whole if dims.size(of) % model == 0 and dims.size(of) > 1)
    return [
        chosen
        for count in range(len(classes) + 1)
        for chosen in itertools.combinations(classes, count)
        if all(len(set(chosen) & set(classes)) <= 1 for classes in arrays)
    ]


WIDE = {"up": (1024, 4096), "down": (4096, 1024)}
NARROW = {"up": (64, 256), "down": (256, 64)}
ATTENTION = dict.fromkeys(("q", "k", "v", "up", "down"), (32, 32))
EXPERTS = {"gate": (256, 8), "up": (8, 256, 1024), "down": (8, 1024, 256)}
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
# A layer, its parameters, the optimizer, the batch, microbatches; and the plan: its logical mesh,
# and whether it cuts parameters, what the optimizer keeps, or neither, along data.
KINDS = {
    "data": (mlp, NARROW, SGD, (8192, 64), 4, (4, 1), set()),
    # Parameters would be gathered for every microbatch.
    "zero2": (mlp, NARROW, ADAM, (2048, 64), 4, (4, 1), {"state"}),
    # They are gathered as often as ZeRO-2 does, and take less to update.
    "zero3": (mlp, NARROW, ADAM, (8192, 64), 1, (4, 1), {"parameters", "state"}),
    "tensor": (mlp, WIDE, ADAM, (4, 1024), 1, (1, 4), set()),
    "expert": (experts, EXPERTS, ADAM, (30, 256), 1, (1, 4), set()),
    "sequence": (attention, ATTENTION, ADAM, (1, 4096, 32), 1, (1, 4), set()),
}


def along_data(plan):
    """What is cut along data beside the batch."""
    found = set()
    for name, spec in plan.stages[0].shardings.items():
        if name[0] == "0" and "data" in str(spec):
            found.add("parameters" if name.startswith("0.0.") else "state")
    return found


def along_model(plan):
    """Names of what is cut along the model axis, and the dimension."""
    specs = plan.stages[0].shardings
    return {(name, spec.index("model")) for name, spec in specs.items() if "model" in spec}


def cut_parameters(plan):
    return {(name.removeprefix("0.0."), d) for name, d in along_model(plan) if "0.0." in name}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_found_where_it_is_the_best(kind):
    layer, shapes, optimizer, lengths, count, mesh, data = KINDS[kind]
    step = traced(layer, shapes, optimizer, *lengths)
    found = search(step, CLUSTER, Constraints(count, "1f1b", "none", 1))[0][0]
    fastest = min(plan.predicted_step_seconds for plan in every_plan(step, CLUSTER, count))
    assert found.predicted_step_seconds <= 1.001 * fastest
    assert found.stages[0].logical_mesh == mesh
    assert along_data(found) == data
    if kind == "tensor":
        assert cut_parameters(found) == {("up", 1), ("down", 0)}
    elif kind == "expert":
        assert cut_parameters(found) == {("gate", 1), ("up", 0), ("down", 0)}
    elif kind == "sequence":
        assert along_model(found) == {("1", 1)}
    else:
        assert not along_model(found)
