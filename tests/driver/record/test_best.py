"""The best evaluation's state stays, a run without progress ends early, and hooks are called."""

import json
import sys
from pathlib import Path

import pytest

from launcher import checkpoint
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.config.training import Train
from launcher.driver.record.best import Best
from launcher.driver.record.hooks import HookError, Hooks
from launcher.driver.record.recorder import Followers, Recorder
from launcher.recipes import InputError
from launcher.train.step_result import StepResult

sys.path.insert(0, str(Path(__file__).parents[1]))
from trained_here import Training

LEARNS, WORSENS = "optimizer.learning_rate=1e-2", "optimizer.learning_rate=30"


def after(train, *values, name="loss"):
    best = Best(train)
    for step, value in enumerate(values, 1):
        best.add(step, {"eval/loss": 0.0, f"eval/{name}": value})
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


def test_what_was_recorded_counts_after_a_restart():
    best = Best(Train(stop_early=2, keep_best="eval_loss"))
    best.begin([{"step": 1, "train/loss": 9.0}, {"step": 2, "eval/loss": 1.0}])
    best.add(4, {"eval/loss": 2.0})
    assert (best.step, best.reason) == (2, None)
    best.add(6, {"eval/loss": 2.0})
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

    hooks = None

    def run(self, monkeypatch):
        best = Best(self.config.train)

        def recorder(*given, **named):
            return Recorder(*given, followers=Followers(best, self.hooks), **named)

        def saving(*given):
            def saved(step):
                if best.is_to_keep(step):
                    checkpoint.write_best(self.folder, step, best.metric, best.value)
                if self.hooks:
                    self.hooks.saved(step, self.folder / str(step))

            return Saving(*given, saved=saved)

        from trained_here import Saving

        monkeypatch.setattr("trained_here.Recorder", recorder)
        monkeypatch.setattr("trained_here.Saving", saving)
        self.best = best
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
calls = []
def on_step(step, metrics): calls.append(("step", step, "train/loss" in metrics))
def on_evaluation(step, metrics): calls.append(("evaluation", step, "eval/loss" in metrics))
def on_save(step, path): calls.append(("save", step, (path / "checksums.json").exists()))
"""


def test_hooks_are_told_of_steps_evaluations_and_complete_saves(tmp_path, monkeypatch):
    (tmp_path / "my_hook.py").write_text(HOOK)
    monkeypatch.syspath_prepend(tmp_path)
    run = Kept(tmp_path / "c", "train.checkpoint.every_steps=4", LEARNS)
    run.hooks = Hooks(["my_hook"])
    run.run(monkeypatch)
    calls = sys.modules["my_hook"].calls
    assert [step for name, step, _ in calls if name == "step"] == [1, 2, 3, 4, 5, 6]
    assert [step for name, step, _ in calls if name == "evaluation"] == [3, 6]
    assert [step for name, step, _ in calls if name == "save"] == [4, 6]
    assert all(right for *_, right in calls)


def test_a_hook_that_fails_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "bad_hook.py").write_text(
        "def on_step(step, metrics):\n    raise ValueError('x')\n"
    )
    (tmp_path / "no_hook.py").write_text("")
    (tmp_path / "broken_hook.py").write_text("\nx = 1 / 0\n")
    (tmp_path / "cut_hook.py").write_text("def on_step(\n")
    (tmp_path / "poor_hook.py").write_text("import not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    hooks = Hooks(["bad_hook"])
    with pytest.raises(HookError) as error:
        hooks.stepped(StepResult(3, {}, 0.0), {})
    assert str(error.value) == (
        "hooks=[bad_hook]: on_step failed at step 3: ValueError: x "
        f"({tmp_path}/bad_hook.py:2). The run ends; fix the hook, or leave it out, and run the "
        "same command again with its run.id"
    )
    with pytest.raises(InputError, match=r"hooks=\[no_hook\] has no function on_step"):
        Hooks(["no_hook"])
    with pytest.raises(InputError) as error:
        Hooks(["broken_hook"])
    assert str(error.value) == (
        "hooks=broken_hook cannot be imported: ZeroDivisionError: division by zero "
        f"({tmp_path}/broken_hook.py:2)"
    )
    with pytest.raises(InputError, match=r"SyntaxError: .* \(cut_hook.py, line 1\)$"):
        Hooks(["cut_hook"])
    with pytest.raises(InputError, match=r"No module named 'not_there' \(.*poor_hook.py:1\)$"):
        Hooks(["poor_hook"])
    with pytest.raises(InputError, match="hooks=not_there is not found"):
        Hooks(["not_there"])
    with pytest.raises(ConfigError, match=r"hooks=my\.hook is code that this run is not allowed"):
        load(["hooks=[my.hook]"])
