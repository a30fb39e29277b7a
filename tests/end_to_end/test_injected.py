"""What is made slow in two worker processes is what the accounting of the run names."""

import json
from pathlib import Path

import pytest
from launched import Launcher, summary

from launcher.report.accounting import read_accounting

HERE = Path(__file__).parent
WORDS = (
    *("model=custom", "model.module=slow_net", "allow_modules=[slow_net]", "dataset=synthetic"),
    *("train.global_batch_size=64", "train.steps=5", "train.eval_every=0", "optimizer=sgd"),
    *("parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=4"),
    *("cluster=emulated", "cluster.gpus=2", "cluster.hosts=2", "wandb.mode=disabled", "run.id=a"),
)
CASES = {
    "stage": ("stage 1", "the compute of stage 1"),
    "link": ("link 0-1", "the link between stage 0 and stage 1"),
    "save": ("saves", "saves, which hold training up"),
    "data": ("data", "devices wait for their batch"),
}


@pytest.mark.stress
@pytest.mark.parametrize("slow", CASES)
def test_what_is_slow_in_two_processes_is_named(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    options = f"model.options={{input_size: 64, output_size: 64, slow: {slow}}}"
    saves = ("train.checkpoint.every_steps=1",) if slow == "save" else ()
    code, out, err = Launcher(tmp_path, *WORDS, options, *saves).end()
    assert (code, err) == (0, ""), out
    folder, (culprit, said) = tmp_path / "outputs" / "a", CASES[slow]
    found = read_accounting(folder)
    assert found.culprit == culprit, found.parts
    assert said in found.sentence
    assert summary(folder)["differs"] == found.sentence
    step = found.measured_step_seconds
    assert sum(part.measured_seconds for part in found.parts) == pytest.approx(step)
    for stage in found.stages:
        assert stage.measured.step_seconds == pytest.approx(step, rel=0.05)
    residue = found.part("residue")
    more = residue.measured_seconds - residue.predicted_seconds
    assert abs(more) <= 0.1 * abs(step - found.predicted_step_seconds)
    assert len(json.loads((folder / "plan.json").read_text())["stages"]) == 2
