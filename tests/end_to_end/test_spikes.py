"""A loss spike in a run: it goes back, passes over the batches that did it, and is killed."""

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
from disturbed import SLOW, WORDS, stored
from launched import Launcher, command_of, lines, losses, summary, train
from object_servers import s3_server

from launcher.base.object_store import Store
from launcher.checkpoint import Mirror, steps_in

# A dataset whose batch 31, of step 32, is 100 times as large; and one that never had batches 29,
# 30 and 31.
MADE = """
from launcher.recipes.datasets.synthetic import dataset as synthetic
check = synthetic.check

def build(*arguments):
    dataset = synthetic.build(*arguments)

    def train(k):
        CHANGE

    return dataset._replace(train=train)
"""
SPIKED = 'return {n: v * (100 if n == "x" and k == 31 else 1) for n, v in dataset.train(k).items()}'
WITHOUT = "return dict(dataset.train(k if k < 29 else k + 3))"
URL = "s3://bucket/a"
OPTIONS = "+dataset.options={num_samples: 4096, targets: network}"


def words_of(folder: Path, name: str, change: str) -> tuple[str, ...]:
    (folder / f"{name}.py").write_text(MADE.replace("CHANGE", change))
    own = "dataset=custom", f"dataset.module={name}", OPTIONS, f"allow_modules=[{name}]"
    rest = (word for word in (*WORDS, *SLOW) if word != "dataset=synthetic")
    return *rest, *own, "train.spikes=rollback"


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never had those batches."""
    folder = tmp_path_factory.mktemp("without")
    train(folder, *words_of(folder, "without", WITHOUT))
    return folder / "outputs" / "one"


def kill_the_next_workers(launcher: Launcher, run: Path) -> None:
    """As soon as one is there after the spike."""
    launcher.wait_for(lambda: len(lines(run)) >= 30)
    before = {process.pid for process in launcher.processes()}

    def new() -> list[psutil.Process]:
        there = [p for p in launcher.processes() if p.pid not in before]
        return [p for p in there if command_of(p).startswith("ray::")]

    launcher.wait_for(new)
    new()[0].kill()


def kill_a_worker(launcher: Launcher, run: Path) -> None:
    """After the roll-back."""
    launcher.wait_for(lambda: len(lines(run)) >= 34)
    launcher.workers()[0].kill()


def kill_the_launcher(launcher: Launcher, run: Path) -> None:
    """After the roll-back."""
    launcher.wait_for(lambda: len(lines(run)) >= 34)
    os.kill(launcher.process.pid, signal.SIGKILL)


KILLS = kill_the_next_workers, kill_a_worker, kill_the_launcher


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("snapshot", "disturb"), [*itertools.product(["4", "off"], KILLS)])
def test_a_run_that_spikes_comes_to_the_bytes_of_one_without_these_batches(
    disturb: Callable[[Launcher, Path], None], snapshot: str, without: Path, tmp_path: Path
) -> None:
    """From a snapshot and from the disk, where the checkpoint of step 30 may have led to it."""
    words = *words_of(tmp_path, "spiked", SPIKED), f"train.snapshot={snapshot}"
    run, launcher = tmp_path / "outputs" / "one", Launcher(tmp_path, *words)
    disturb(launcher, run)
    code, out, err = launcher.end()
    if disturb is kill_the_launcher:
        assert code == -signal.SIGKILL
        code, _, again = Launcher(tmp_path, *words).end()
        assert "at step 32: far above" in err + again
    assert code == 0, out + err
    assert "step 32: passing over batches 29, 30, 31, from step 30 on" in out
    assert disturb is kill_the_launcher or summary(run)["restarts"] >= 1
    assert losses(run) == losses(without)
    jax.tree.map(np.testing.assert_array_equal, stored(run), stored(without))


@pytest.mark.slow
def test_on_an_empty_disk_the_mirror_has_a_checkpoint_of_before_the_spike(
    without: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start there fetches the newest, of step 30, which may have led to the spike."""
    go, run, shown = (tmp_path / name for name in ("go", "outputs/one", "shown"))
    waits = f"""import os, time
        while k == 31 and not os.path.exists({str(go)!r}):
            time.sleep(0.1)
        {SPIKED}"""
    words = *words_of(tmp_path, "spiked", waits), "train.snapshot=off", "cluster.step_timeout=120"
    words = *words, f"run.mirror={URL}"
    with s3_server() as server, shown.open("w") as out:
        for name, value in {**server.environ(server.url), "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        launcher = Launcher(tmp_path, *words, stdout=out.fileno())
        launcher.wait_for(lambda: [each.step for each in Mirror(Store(URL)).copies()][:1] == [30])
        go.touch()
        launcher.wait_for(lambda: "passing over" in shown.read_text())
        launcher.process.send_signal(signal.SIGKILL)
        launcher.end()
        assert max(steps_in(run / "checkpoints")) == 25
        shutil.rmtree(run)
        code, said, err = Launcher(tmp_path, *words).end()
    assert code == 0, err
    assert "resuming run one at step 30" in said
    assert "step 32: passing over batches 29, 30, 31, from step 30 on" in said
    assert losses(run) == losses(without)
    jax.tree.map(np.testing.assert_array_equal, stored(run), stored(without))


@pytest.mark.slow
def test_a_run_without_a_checkpoint_before_the_spike_ends_and_loses_none(tmp_path: Path) -> None:
    words = (word for word in words_of(tmp_path, "spiked", SPIKED) if "every_steps" not in word)
    own = "train.snapshot=off", "train.checkpoint.every_steps=31"
    code, out, err = Launcher(tmp_path, *words, *own).end()
    assert code == 1, out + err
    assert "there is no checkpoint of a step up to 29" in err
    assert steps_in(tmp_path / "outputs/one/checkpoints") == [31]
