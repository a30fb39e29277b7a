"""The best state stays, a run without progress ends early, and callbacks are called."""

import json
import sys
from pathlib import Path

import pytest

from launcher import checkpoint
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.config.sections import Train
from launcher.driver.callback import Callbacks, HookError, find_hook
from launcher.driver.record.best import Best
from launcher.driver.record.step_log import StepLog
from launcher.recipes import InputError
from launcher.report.jsonl import METRICS

sys.path.insert(0, str(Path(__file__).parents[1]))
from trained_here import Training

LEARNS, WORSENS = "optimizer.learning_rate=1e-2", "optimizer.learning_rate=30"


def after(train, *values, name="loss"):
    best = Best(train, Path("none"))
    for step, value in enumerate(values, 1):
        best.on_evaluation(step, {"eval/loss": 0.0, f"eval/{name}": value})
    return best


def test_the_lowest_loss_is_the_best_and_the_highest_accuracy():
    assert after(Train(keep_best="eval_loss"), 3.0, 1.0, 2.0).step == 2
    best = after(Train(keep_best="eval_accuracy"), 0.3, 0.9, 0.5, name="accuracy")
    assert (best.step, best.value) == (2, 0.9)
    assert best.is_to_keep(2)
    assert not best.is_to_keep(3)


def test_a_run_ends_after_as_many_evaluations_without_progress():
    assert after(Train(stop_early=2), 3.0, 3.0, 2.0, 2.5).reason is None
    best = after(Train(stop_early=2), 3.0, 2.0, 2.5, 2.0)
    assert best.reason == (
        "stopped early: eval_loss is no better than the 2 of step 2 after 2 further evaluations"
    )
    assert not best.is_to_keep(2)  # as nobody asked for that


@pytest.mark.parametrize("restarts", [0, 1])
def test_what_was_recorded_counts_after_a_restart(tmp_path, restarts):
    best = Best(Train(stop_early=2, keep_best="eval_loss"), tmp_path)
    recorded = (
        {"step": 1, "train/loss": 9.0},
        {"step": 2, "eval/loss": 1.0},
        {"step": 3, "eval/loss": 0.5},
    )
    (tmp_path / METRICS).write_text("".join(f"{json.dumps(record)}\n" for record in recorded))
    best.on_start(2, tmp_path)
    for _ in range(restarts):
        best.on_evaluation(4, {"eval/loss": 0.25})
        best.on_restart(2, "worker 0 died")
    best.on_evaluation(4, {"eval/loss": 2.0})
    assert (best.step, best.reason) == (2, None)
    best.on_evaluation(6, {"eval/loss": 2.0})
    assert best.reason


def test_a_metric_that_an_evaluation_lacks_is_refused():
    with pytest.raises(InputError, match=r"eval_speed is not a metric .* it is one of eval_loss"):
        after(Train(keep_best="eval_speed"), 1.0)
    with pytest.raises(ConfigError, match="keep_best=loss is not a metric of an evaluation"):
        load(["train.keep_best=loss"])
    with pytest.raises(ConfigError, match=r"train.stop_early has no effect: train.eval_every=0"):
        load(["train.stop_early=1", "train.eval_every=0"])


class Kept(Training):
    """As `Training`, with what `RunLog` adds."""

    hooks = ()

    def run(self, monkeypatch):
        self.best = Best(self.config.train, self.folder)
        callbacks = Callbacks(self.best)
        callbacks.add_hooks(self.hooks)

        def step_log(*given, **named):
            return StepLog(*given, **{**named, "callbacks": callbacks})

        def saving(*given):
            def saved(step):
                callbacks.call("on_save", step, self.folder / str(step))

            return Saving(*given, saved=saved)

        from trained_here import Saving

        monkeypatch.setattr("trained_here.StepLog", step_log)
        monkeypatch.setattr("trained_here.Saving", saving)
        return super().run()


@pytest.mark.slow
def test_the_best_state_is_saved_at_once_and_outlives_later_ones(tmp_path, monkeypatch):
    words = "train.eval_every=1", "train.steps=6", "train.keep_best=eval_loss"
    often = "train.checkpoint.every_minutes=1e-9", "train.checkpoint.keep=1"
    run = Kept(tmp_path, *words, *often, WORSENS, "optimizer.clip_norm=null").run(monkeypatch)
    values = {line["step"]: line["eval/loss"] for line in run.lines}
    lowest = min(values, key=values.get)
    assert lowest < 5  # else this run shows nothing
    noted = json.loads((tmp_path / "best.json").read_text())
    assert (noted["step"], noted["value"]) == (lowest, values[lowest])
    kept = {int(path.name) for path in tmp_path.iterdir() if path.is_dir()}
    assert lowest in kept
    assert max(kept) == 6
    assert len(kept) <= 3


def test_a_run_that_no_longer_improves_saves_and_ends(tmp_path, monkeypatch):
    words = "train.eval_every=1", "train.steps=50", "train.stop_early=2"
    run = Kept(tmp_path, *words, WORSENS, "optimizer.clip_norm=null").run(monkeypatch)
    assert run.best.reason.startswith("stopped early: eval_loss is no better than")
    assert checkpoint.newest(tmp_path).step == len(run.lines) < 50


HOOK = """
from launcher.driver import Callback

calls = []

class Mine(Callback):
    def on_step(self, step, metrics): calls.append(("step", step, "train/loss" in metrics))
    def on_evaluation(self, step, metrics):
        calls.append(("evaluation", step, "eval/loss" in metrics))
    def on_save(self, step, path): calls.append(("save", step, (path / "checksums.json").exists()))

instance = Mine()
"""


def test_a_hook_is_called_for_steps_evaluations_and_complete_saves(tmp_path, monkeypatch):
    (tmp_path / "my_hook.py").write_text(HOOK)
    monkeypatch.syspath_prepend(tmp_path)
    run = Kept(tmp_path / "c", "train.checkpoint.every_steps=4", LEARNS)
    run.hooks = ["my_hook.Mine", "my_hook.instance"]
    run.run(monkeypatch)
    calls = sys.modules["my_hook"].calls
    assert calls[::2] == calls[1::2]  # the class's and the instance's
    calls = calls[::2]
    assert [step for name, step, _ in calls if name == "step"] == [1, 2, 3, 4, 5, 6]
    assert [step for name, step, _ in calls if name == "evaluation"] == [3, 6]
    assert [step for name, step, _ in calls if name == "save"] == [4, 6]
    assert all(right for *_, right in calls)


BAD = """
from launcher.driver import Callback

class Bad(Callback):
    def on_step(self, step, metrics):
        raise ValueError("x")

    on_end = on_step

plain = object()
"""


def test_a_hook_that_fails_is_named_with_its_line(tmp_path, monkeypatch, said):
    (tmp_path / "bad_hook.py").write_text(BAD)
    monkeypatch.syspath_prepend(tmp_path)
    callbacks = Callbacks()
    callbacks.add_hooks(["bad_hook.Bad"])
    callbacks.call("on_start", 0, tmp_path)
    with pytest.raises(HookError) as error:
        callbacks.call("on_step", 3, {})
    failed = f"failed at step 3: ValueError: x ({tmp_path}/bad_hook.py:6)"
    assert str(error.value) == (
        f"hooks=[bad_hook.Bad]: on_step {failed}. The run ends; fix the hook, or leave it out, and "
        "run the same command again with its run.id"
    )
    assert said == []
    callbacks.call("on_end", 3, "done")  # the run has ended: nothing is left to stop
    assert said == [f"hooks=[bad_hook.Bad]: on_end {failed}"]


def test_a_hook_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "odd_hook.py").write_text(
        "from launcher.driver import Callback\n"
        "class Odd(Callback):\n"
        "    def __init__(self, size): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = r"^hooks=\[odd_hook.Odd\]: Odd \(.*odd_hook.py:3\) fails: TypeError: .*'size'$"
    with pytest.raises(InputError, match=said):
        Callbacks().add_hooks(["odd_hook.Odd"])


def test_hooks_that_are_none_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a_hook.py").write_text(BAD)
    (tmp_path / "broken_hook.py").write_text("\nx = 1 / 0\n")
    (tmp_path / "cut_hook.py").write_text("def on_step(\n")
    (tmp_path / "poor_hook.py").write_text("import not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a_hook.plain", "a_hook.Callbacks", "a_hook"):
        with pytest.raises(InputError, match=rf"hooks=\[{name}\] is no callback; .*MyCallback$"):
            find_hook(name)
    with pytest.raises(InputError) as error:
        find_hook("broken_hook.Mine")
    assert str(error.value) == (
        "hooks=broken_hook cannot be imported: ZeroDivisionError: division by zero "
        f"({tmp_path}/broken_hook.py:2)"
    )
    with pytest.raises(InputError, match=r"SyntaxError: .* \(cut_hook.py, line 1\)$"):
        find_hook("cut_hook.Mine")
    with pytest.raises(InputError, match=r"No module named 'not_there' \(.*poor_hook.py:1\)$"):
        find_hook("poor_hook.Mine")
    with pytest.raises(InputError, match="hooks=not_there is not found"):
        find_hook("not_there.Mine")
    with pytest.raises(ConfigError, match=r"hooks=my\.hook is code that this run is not allowed"):
        load(["hooks=[my.hook]"])
