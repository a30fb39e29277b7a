"""Loss spikes: their score, what is caught, what is no spike, and a step that is not taken."""

import functools
import itertools

import jax
import numpy as np
import pytest

from launcher.config.compose import load
from launcher.recipes import build_dataset, build_model
from launcher.train.program import build_steps
from launcher.train.spikes import LAG, LIMIT, WINDOW, batch_index, no_steps, spike_score

SCORE = jax.jit(spike_score)
LOG = np.random.default_rng(0).normal(size=(2, 300)) / 4 - np.linspace(0, 3, 300)
STEPS = np.exp(LOG).astype(np.float32)  # losses and norms that fall by 20, with noise


def scores(steps):
    recent, found = no_steps(), []
    for loss, norm in steps.T:
        score, recent = SCORE(recent, loss, norm)
        found.append(float(score))
    return np.array(found)


median = functools.partial(np.quantile, q=0.5, method="lower")


def test_the_score_is_of_medians_of_the_last_200_steps():
    found = scores(STEPS)
    for k in (20, 120, 299):
        window = np.log(STEPS[:, max(0, k - WINDOW) : k])
        level = np.maximum(*(median(window[:, -n:], axis=1) for n in (20, 5)))
        steps = np.diff(window, axis=1)
        spread = median(abs(steps - median(steps, axis=1, keepdims=True)), axis=1)
        z = (np.log(STEPS[:, k]) - level) / (1.4826 / np.sqrt(2) * spread)
        assert found[k] == pytest.approx(z.sum() / np.sqrt(2), rel=1e-3)
    assert not found[:20].any()  # too few to say
    assert found.max() < LIMIT / 2


def test_a_spike_does_not_hide_the_next_one_and_a_fall_is_none():
    steps = STEPS.copy()
    steps[:, [100, 104, 108]] *= 100
    steps[:, 200] /= 100
    assert (np.flatnonzero(scores(steps) > LIMIT) == [100, 104, 108]).all()


def test_what_has_no_logarithm_is_no_spike():
    steps = STEPS.copy()
    steps[0] = -1
    steps[1, 250] *= 1e6
    assert (np.flatnonzero(scores(steps) > LIMIT) == [250]).all()
    steps[1] = 0
    assert not (scores(steps) > LIMIT).any()
    steps[:, 100] = np.nan
    assert np.isfinite(scores(steps)).all()
    assert not (scores(np.ones((2, 60))) > LIMIT).any()
    steps = STEPS.copy()
    steps[0, :200] = 0  # what comes after is not above it by any factor
    assert not (scores(steps) > LIMIT).any()


@functools.cache
def training(*words):
    config = load(["dataset=synthetic", "model=mlp", "model.hidden_size=32", *words])
    dataset = build_dataset(config.dataset, config.model, config.train.global_batch_size, 0)
    init, step = build_steps(config, build_model(config.model, config.train.precision))
    return config, dataset.train, jax.jit(init), jax.jit(step)


def trained(words, seed, poison=lambda k, batch: batch, rate=lambda k: 1.0):
    """Train; yield each step's number, state and metrics.

    `poison` makes a step's batch, and `rate` says how much of its update is made.
    """
    config, batch_at, init, step = training(*words)
    state = init(np.array([0, seed], np.uint32))
    for k in range(config.train.steps):
        new, metrics = step(state, poison(k, batch_at(k)))
        much = rate(k)
        if much != 1:
            params = jax.tree.map(lambda a, b, m=much: a + m * (b - a), state.params, new.params)
            new = type(new)(**{**vars(new), "params": params})
        state = new
        yield k, state, metrics


DIGITS = ("dataset=digits", "model.input_size=64", "model.output_size=10")
WARN = ("train.spikes=warn", "train.steps=300", "train.global_batch_size=16")
BOTH = pytest.mark.parametrize("data", [(), DIGITS], ids=["synthetic", "digits"])


@pytest.mark.slow
@pytest.mark.sampled(2)
@BOTH
def test_poisonings_are_caught_within_three_steps(data):
    """Of each 30, at different steps: a batch times 100, shuffled targets, a rate times 30."""
    caught = []
    for seed in range(30):
        rates = "optimizer.decay=constant", f"optimizer.learning_rate={(3e-3, 1e-2)[seed % 2]}"
        words = (*data, *WARN, *rates)
        at, draw = 100 + 6 * seed, np.random.default_rng(seed)

        def poison(k, batch, at=at, seed=seed, draw=draw):
            if k != at or seed % 3 == 2:
                return batch
            if seed % 3:
                return {**batch, "y": draw.permutation(batch["y"])}
            return {**batch, "x": batch["x"] * 100}

        def rate(k, at=at, seed=seed):
            return 30.0 if k == at and seed % 3 == 2 else 1.0

        steps = itertools.islice(trained(words, seed, poison, rate), at + LAG)
        found = [k for k, _, metrics in steps if metrics["spike_score"] > LIMIT]
        caught.append(bool(found) and found[0] >= at)
    assert sum(caught) >= 28, caught


@pytest.mark.slow
@pytest.mark.sampled(2)
@BOTH
def test_no_training_is_a_spike(data):
    """Of 20 in all, with a warm-up and restarts of the rate."""
    highest = []
    for seed in range(10):
        rates = (
            f"optimizer.learning_rate={(1e-3, 3e-3, 1e-2, 2e-2, 5e-3)[seed % 5]}",
            f"optimizer.warmup_steps={(0, 20, 60)[seed % 3]}",
            *("optimizer.decay=cosine_restarts", f"optimizer.restarts={2 + seed % 3}"),
        )
        steps = trained((*data, *WARN, *rates), seed)
        highest.append(max(float(metrics["spike_score"]) for _, _, metrics in steps))
    assert max(highest) <= LIMIT, highest


def test_a_spike_that_is_skipped_leaves_the_state_and_the_record_as_they_were():
    words = ("train.spikes=skip", "train.steps=26", "optimizer.ema=0.5")

    def poison(k, batch):
        return {**batch, "x": batch["x"] * 100} if k == 23 else batch

    states, found = {}, []
    for k, state, metrics in trained(words, 0, poison):
        states[k] = state
        found.append(float(metrics["skipped"]))
    assert found == [0.0] * 23 + [1.0, 0.0, 0.0]
    before, after = ({**vars(states[k]), "step": None} for k in (22, 23))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert int(states[23].step) == 24
    assert not np.array_equal(states[24].recent, states[23].recent)


def test_without_it_the_program_has_nothing_of_it_and_to_watch_changes_no_bit():
    programs = {}
    for spikes in ("off", "warn", "rollback"):
        words = (f"train.spikes={spikes}", "train.steps=4")
        *_, (_, state, metrics) = trained(words, 0)
        programs[spikes] = {**vars(state)}, metrics
        _, batch_at, init, step = training(*words)
        text = step.lower(jax.eval_shape(init, np.zeros(2, np.uint32)), batch_at(0)).as_text()
        assert ("2x200xf32" in text, "sort" in text) == (spikes != "off",) * 2
    jax.tree.map(np.testing.assert_array_equal, programs["warn"], programs["rollback"])
    (state, metrics), (watched, scored) = programs["off"], programs["warn"]
    assert state.pop("recent") is None
    assert watched.pop("recent").shape == (2, WINDOW)
    assert scored.keys() - metrics.keys() == {"spike_score"}
    jax.tree.map(np.testing.assert_array_equal, state, watched)


def test_single_batches_are_left_out():
    passed = {3, 4, 5, 9}
    left = [k for k in range(20) if k not in passed]
    for start in (0, 2, 3, 6, 10):
        first = next(i for i, k in enumerate(left) if k >= start)
        for count in range(-first, 8):
            assert batch_index(start, count, passed) == left[first + count]
