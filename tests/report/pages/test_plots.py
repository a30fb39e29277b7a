"""The pictures show what they are given: colours in the right shares, odd values left out."""

import math
import os

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from launcher.report.pages import plots


def pixels(path, colour):
    image = imread(path)[..., :3]
    return int((np.abs(image - to_rgb(colour)).max(axis=-1) < 0.01).sum())


def records(num_steps, eval_every=0):
    for step in range(1, num_steps + 1):
        record = {"step": step, "train/loss": 2 + 3 / step}
        if eval_every and step % eval_every == 0:
            record["eval/loss"] = 2.2 + 3 / step
        yield record


@pytest.mark.parametrize("num_steps", [0, 1, 30, 200])
@pytest.mark.parametrize("eval_every", [0, 10])
def test_each_curve_that_there_is_can_be_seen(tmp_path, num_steps, eval_every):
    os.mkfifo(tmp_path / "loss.png")  # nobody waits for what stands there
    path = plots.plot_loss(list(records(num_steps, eval_every)), tmp_path / "loss.png", "run")
    assert (pixels(path, plots.TRAIN) > 0) == (num_steps > 0)
    assert (pixels(path, plots.EVAL) > 0) == (eval_every > 0 and num_steps >= eval_every)


def test_a_loss_that_is_not_finite_is_left_out(tmp_path):
    broken = [{"step": 31, "train/loss": None}, {"step": 32, "train/loss": math.inf}]
    whole = plots.plot_loss(list(records(30)), tmp_path / "a.png")
    same = plots.plot_loss([*records(30), *broken], tmp_path / "b.png")
    assert (imread(whole) == imread(same)).all()


def test_smoothing_keeps_lines_and_constants():
    line = [3.0 * i for i in range(20)]
    assert plots.smoothed(line, window=9) == pytest.approx(line)
    assert plots.smoothed([1.0, 4.0, 1.0, 1.0], window=3)[1:3] == pytest.approx([2.0, 2.0])


def test_smoothing_does_not_hook_at_its_ends():
    flat = [2.0] * 200
    for outlier in (0, 199):
        values = flat.copy()
        values[outlier] = 3.0
        bent = max(abs(value - 2.0) for value in plots.smoothed(values, window=11))
        assert bent < 0.35  # and not 1, as where the last value stands alone
