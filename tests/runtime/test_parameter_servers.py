"""Workers whose sums go through parameter servers: data parallelism, each with its own rows."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import several
from runtime.servers import InMemory, Store, on_workers, own_rows, planned, trained

import launcher
from launcher.plan import ClusterShape, Plan, PlanError
from launcher.plan.methods import DataParallel, Follow, ParameterServer
from launcher.runtime import compile_step
from launcher.trace import trace_step

ROWS, WIDTH, LAYERS = 16, 8, 2
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
_rng = np.random.default_rng(0)
BATCHES = [
    {
        "x": _rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "label": _rng.integers(0, WIDTH, ROWS),
        "mask": (np.arange(ROWS) % 7 < 3).astype(np.float32),
    }
    for _ in range(2)
]


def init():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 3, "b": jnp.zeros(WIDTH)} for k in keys]
    return params, OPTIMIZER.init(params), jax.random.key(1)


def step(state, batch):
    """A masked mean by the whole batch's weights, dropout, and results of every kind."""
    params, moments, key = state
    key, dropped = jax.random.split(key)

    def loss(params):
        x = batch["x"] - batch["x"].mean(0)
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        x = jnp.where(jax.random.bernoulli(dropped, 0.9, x.shape), x, 0.0)
        each = optax.softmax_cross_entropy_with_integer_labels(x, batch["label"])
        hits = x.argmax(1) == batch["label"]
        found = {"worst": each.max(), "hits": hits.sum(), "each": each, "at": hits}
        return (each * batch["mask"]).sum() / batch["mask"].sum(), found

    (value, found), grads = launcher.value_and_grad(loss, has_aux=True)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    found |= {"loss": value, "norm": optax.tree.norm(grads), "weight": batch["mask"].mean()}
    return (optax.apply_updates(params, updates), moments, key), found


TRACED = trace_step(step, (jax.eval_shape(init), BATCHES[0]))


def plain(tree):
    words = jax.random.key_data
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(words(x) if is_key(x) else x), tree)


def same(got, want, **tolerance):
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-6}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **tolerance), plain(got), plain(want)
    )


def equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, plain(got), plain(want))


SPLITS = [  # workers, microbatches, settings
    (2, 2, {"bucket_bytes": LAYER, "servers": 2}),
    (2, 1, {}),
    (4, 1, {"bucket_bytes": 0, "servers": 3}),
    (4, 2, {"servers": 1}),
    (2, 4, {"bucket_bytes": 2 * LAYER}),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("workers", "micro_batches", "settings"), SPLITS)
def test_workers_train_as_data_parallelism_does(workers, micro_batches, settings):
    plan = planned(TRACED, ParameterServer(micro_batches, **settings), workers)
    first, *others = trained(TRACED, plan, init, BATCHES, seed=0)
    for other in others:
        equal(other, first)
    data = planned(TRACED, DataParallel(micro_batches), 1)
    same(first, *trained(TRACED, data, init, BATCHES))


def descent(params, batch):
    """One step of gradient descent at rate 1."""

    def loss(params):
        return ((jnp.tanh(batch["x"] @ params["w"]) - params["b"]) ** 2).sum(1).mean()

    value, grads = launcher.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def start(dtype=np.float32):
    return {"w": jnp.full((WIDTH, WIDTH), 0.1, dtype), "b": jnp.ones(WIDTH)}


def descending(method=None, workers=2, make=start, **options):
    """The traced step and its plan; by default each gradient is exchanged by itself."""
    traced = trace_step(descent, (jax.eval_shape(make), BATCHES[0]), **options)
    return traced, planned(traced, method or ParameterServer(bucket_bytes=0), workers)


def after_descent(method, workers, make=start, seed=None):
    return trained(*descending(method, workers, make), make, BATCHES[:1], seed)[0]


def test_two_runs_are_equal_whatever_arrives_first():
    """Four workers on two servers; a worker's parts come late, and in any order."""
    method = ParameterServer(bucket_bytes=0, servers=2)
    equal(*(after_descent(method, 4, seed=seed) for seed in (1, 2)))


def test_gradients_are_those_of_one_device():
    ours = after_descent(ParameterServer(2, bucket_bytes=0), 4)
    params, value = jax.jit(descent)(start(), BATCHES[0])
    same(ours, (params, [value]))


def test_a_parameter_that_several_layers_slice_is_summed_as_planned():
    """Its gradient has a part from each layer; the plan and the workers pack it in one place."""
    layers = 3

    def make():
        return {"w": [jnp.eye(WIDTH) / 2] * layers, "b": jnp.ones((layers, WIDTH))}

    def step(params, batch):
        def loss(params):
            x = batch["x"]
            for i, w in enumerate(params["w"]):
                x = jnp.tanh(x @ w + params["b"][i])
                if i < layers - 1:
                    launcher.mark_pipeline_boundary()
            return jnp.mean(x**2)

        value, grads = launcher.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    traced = trace_step(step, (jax.eval_shape(make), BATCHES[0]))
    plan = planned(traced, ParameterServer(bucket_bytes=256, servers=2), 2)
    assert len([x for x in plan.exchanges if x.kind == "sum"]) > 2
    params, value = jax.jit(step)(make(), BATCHES[0])
    same(trained(traced, plan, make, BATCHES[:1])[0], (params, [value]))


def test_gradients_of_sixteen_bits_cross_in_sixteen():
    method = ParameterServer(reduce_dtype="bf16", bucket_bytes=0)
    _, plan = descending(method)
    sums = {x.dtype: x.bytes for x in plan.exchanges if x.kind == "sum"}
    assert set(sums) == {"bfloat16"}
    params, value = jax.jit(descent)(start(), BATCHES[0])
    same(after_descent(method, 2), (params, [value]), rtol=2e-2, atol=2e-2)


def test_keys_cross_as_their_words():
    """Keys of the batch that the step reads whole, and one that the loss returns."""

    def noisy(state, batch):
        weight, key = state
        scale = jax.vmap(jax.random.uniform)(batch["key"]).mean()

        def loss(weight):
            noise = jax.vmap(lambda k: jax.random.normal(k, (4,)))(batch["key"])
            return ((noise * weight) ** 2).mean() * scale, jax.random.split(key)[0]

        gradient = launcher.value_and_grad(loss, has_aux=True, reduce=("mean", "last"))
        (value, key), grad = gradient(weight)
        return (weight - grad, key), value

    batch = {"key": jax.random.split(jax.random.key(3), ROWS)}
    start = jnp.ones(4), jax.random.key(0, impl="rbg")
    traced = trace_step(noisy, (start, batch))

    def run(executable, _):
        state = executable.create(lambda: start)
        return jax.tree.map(jax.device_get, plain(executable(state, batch)))

    (data,) = on_workers(traced, planned(traced, DataParallel(), 1), run)
    for found in on_workers(traced, planned(traced, ParameterServer(), 2), run):
        same(found, data)


def test_types_do_not_mix():
    """A bfloat16 parameter's gradient is widened, as by data parallelism."""
    make = lambda: start(jnp.bfloat16)  # noqa: E731
    ours = after_descent(ParameterServer(), 2, make)
    assert ours[0]["w"].dtype == jnp.bfloat16
    same(ours, after_descent(DataParallel(), 1, make))


def contrastive(params, batch):
    def loss(params):
        return -jnp.diag(jax.nn.log_softmax((batch["x"] @ params["w"]) @ batch["x"].T)).mean()

    value, grads = launcher.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def test_a_loss_that_joins_examples_is_refused():
    traced = trace_step(contrastive, (jax.eval_shape(start), BATCHES[0]))
    with pytest.raises(PlanError, match=r"parameter servers cannot join.*parallel=data"):
        planned(traced, ParameterServer(), 2)


def test_an_evaluation_step_exchanges_its_results():
    def evaluate(params, batch):
        def loss(params):
            each = ((batch["x"] @ params["w"]) ** 2).sum(1)
            return (each * batch["mask"]).sum(), {"weight": batch["mask"].sum(), "each": each}

        value, found = launcher.microbatched(loss)(params)
        return found | {"loss": value}

    traced = trace_step(evaluate, (jax.eval_shape(start), BATCHES[0]), donate_argnums=())
    plan = planned(traced, ParameterServer(2), 2)
    assert {x.kind for x in plan.exchanges} == {"gather"}

    def run(executable, _):
        params = jax.device_put(start(), executable.in_shardings[0])
        return jax.device_get(executable(params, own_rows(executable, BATCHES[0])))

    for found in on_workers(traced, plan, run):
        same(found, evaluate(start(), BATCHES[0]))


def test_several_losses_exchange_one_after_the_other():
    step, make = several.ours(several.gan)
    traced = trace_step(step, (jax.eval_shape(make), several.BATCH))
    plan = planned(traced, ParameterServer(), 2)
    assert all(part.exchanges for part in plan.parts)
    first, second = trained(traced, plan, make, [several.BATCH] * 2)
    equal(second, first)
    same(first, *trained(traced, planned(traced, DataParallel(), 1), make, [several.BATCH] * 2))


def test_gradients_are_applied_apart():
    def gradients(params, batch):
        def loss(params):
            return ((jnp.tanh(batch["x"] @ params["w"]) - params["b"]) ** 2).sum(1).mean()

        return launcher.grad(loss)(params)

    def apply(params, grads):
        return jax.tree.map(lambda p, g: p - g, params, grads)

    shapes = jax.eval_shape(start)
    traced = trace_step(gradients, (shapes, BATCHES[0]), donate_argnums=())
    follower = trace_step(apply, (shapes, shapes), batch_argnums=(), needs_loss=False)
    plan = planned(traced, ParameterServer(), 2)
    following = Follow(plan, traced).plan(follower, ClusterShape(**plan.cluster))

    def run(executable, rank):
        params = executable.create(start)
        grads = executable(params, BATCHES[0])
        servers, devices = InMemory(Store(2), rank), jax.devices()[2 * rank : 2 * rank + 2]
        follow = compile_step(follower, following, devices, servers=servers)
        return jax.device_get(follow(params, grads))

    expected, _ = jax.jit(descent)(start(), BATCHES[0])
    for params in on_workers(traced, plan, run):
        same(params, expected)


def test_an_exchange_that_fails_is_the_step_s_error():
    traced, plan = descending()
    store = Store(2)

    class Failing(InMemory):
        def get(self, call, exchange):
            if exchange == 0:
                raise ConnectionError("server 1 is gone")
            return super().get(call, exchange)

    executable = compile_step(traced, plan, jax.devices()[:2], servers=Failing(store, 0))
    with pytest.raises(ConnectionError, match="server 1 is gone"):  # the others wait for ever
        executable(executable.create(start), BATCHES[0])
    with store.changed:
        store.broken = ConnectionError("the end")
        store.changed.notify_all()


def test_a_recording_has_what_each_exchange_does():
    """Warming up before changes nothing."""
    traced, plan = descending()

    def run(executable, _):
        params = executable.create(start)
        executable.warm_up(params, BATCHES[0])
        (params, _), times = executable.profile(params, BATCHES[0])
        _, spans = executable.record(params, BATCHES[0], profiled=False)
        return times.stage_seconds, [(span.lane, span.name) for span in spans()]

    expected = {(lane, x.name) for lane in ("pack", "put", "get", "place") for x in plan.exchanges}
    for (busy,), found in on_workers(traced, plan, run):
        assert busy > 0
        assert expected <= set(found)


def test_arguments_that_are_not_donated_stay_whole():
    """Sums come from memory that may not be written to, and may be all that can be reused."""
    traced, plan = descending(donate_argnums=())

    def run(executable, _):
        params = executable.create(start)
        return [jax.device_get(executable(params, BATCHES[0])) for _ in range(2)]

    for once, again in on_workers(traced, plan, run):
        equal(again, once)


def test_each_worker_reads_its_own_rows():
    traced, plan = descending(ParameterServer(2), 4)
    rows = on_workers(traced, plan, lambda executable, _: executable.batch_rows())
    assert np.array(rows).tolist() == [[2 * r, 2 * r + 1, 8 + 2 * r, 9 + 2 * r] for r in range(4)]


def test_one_worker_needs_no_server():
    plan, data = (planned(TRACED, m, 1) for m in (ParameterServer(servers=2), DataParallel()))
    assert plan.notes[0].startswith("one worker: nothing to sum")
    assert (plan.exchanges, plan.reduction) == ((), data.reduction)
    assert plan.stages == data.stages
    assert plan.predicted_step_seconds == data.predicted_step_seconds


def test_rows_that_are_gathered_are_named():
    plan = planned(TRACED, ParameterServer(), 2)
    (note,) = (x for x in plan.notes if "gather" in x)
    leaves = "1.x, 1.mask"
    assert note == f"workers gather all examples of the batch's {leaves}: the step reads them whole"
    # a leaf's rows cross once
    assert [x.bytes for x in plan.exchanges if x.when == "before"] == [ROWS // 2 * (WIDTH + 1) * 4]


def test_a_plan_needs_its_workers():
    plan = planned(TRACED, ParameterServer(), 2)
    with pytest.raises(PlanError, match="for 2 workers with parameter servers; this process alone"):
        compile_step(TRACED, plan, jax.devices()[:4])
    with pytest.raises(PlanError, match="4 workers are here"):
        compile_step(TRACED, plan, jax.devices()[:2], servers=InMemory(Store(4), 0))
    with pytest.raises(PlanError, match="needs 2 devices; here are 1"):
        compile_step(TRACED, plan, jax.devices()[:1], servers=InMemory(Store(2), 0))


def edited(plan, **changes):
    tree = json.loads(json.dumps(plan.to_dict()))
    for path, value in changes.items():
        *folders, name = path.split("__")
        at = tree
        for folder in folders:
            at = at[int(folder) if folder.isdecimal() else folder]
        at[name] = value
    return Plan.from_dict(tree)


EDITS = {
    "workers that do not divide": ({"reduction__workers": 3}, "equal shares"),
    "no servers": ({"reduction__servers": 0}, "0 parameter servers cannot sum over 2 workers"),
    "an unknown server": ({"exchanges__0__server": 7}, "server 7, and there are 2"),
    "a sharded parameter": (
        {"stages__0__shardings": {"0.0.0.w": ["data", None]}}, "each device holds all of it"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_plan_is_checked(case):
    changes, words = EDITS[case]
    plan = planned(TRACED, ParameterServer(), 2)
    edited(plan).validate(TRACED)
    with pytest.raises(PlanError, match=words):
        edited(plan, **changes).validate(TRACED)


def test_exchanges_of_another_step_are_refused():
    plan = edited(planned(TRACED, ParameterServer(), 2), exchanges__0__bytes=5)
    with pytest.raises(PlanError, match="not those of this step"):
        compile_step(TRACED, plan, jax.devices()[:2], servers=InMemory(Store(2), 0))
