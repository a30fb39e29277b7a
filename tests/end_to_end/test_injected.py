"""What is made slow in two worker processes is what the accounting of the run names."""

import json
from pathlib import Path

import pytest
from launched import Launcher, summary

from launcher.report.breakdown import read_breakdown
from launcher.report.pages.timeline import FILE, read_timeline

HERE, AHEAD = Path(__file__).parent, 500_000_000  # ns, as slow_net has it
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


def trained(folder: Path, slow: str, *words: str) -> tuple[Path, str]:
    options = f"model.options={{input_size: 64, output_size: 64, slow: {slow}}}"
    code, out, err = Launcher(folder, *WORDS, options, *words).end()
    assert (code, err) == (0, ""), out
    return folder / "outputs" / "a", out


@pytest.mark.stress
@pytest.mark.parametrize("slow", CASES)
def test_what_is_slow_in_two_processes_is_named(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    saves = ("train.checkpoint.every_steps=1",) if slow == "save" else ()
    folder, _ = trained(tmp_path, slow, *saves)
    culprit, said = CASES[slow]
    found = read_breakdown(folder)
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


@pytest.mark.stress
def test_a_clock_that_is_ahead_is_measured_said_and_corrected_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("SLOW_NET_MARK", str(tmp_path / "mark"))
    folder, out = trained(tmp_path, "clock")
    trace = json.loads((folder / FILE).read_text())
    (clocks,) = trace["otherData"]["clocks"].values()
    uncertainty = sum(clock["uncertainty_ns"] for clock in clocks.values())
    offsets = sorted(clock["offset_ns"] for clock in clocks.values())
    # The driver's, and those of both workers.
    assert offsets == pytest.approx([0, 0, AHEAD], abs=1e6 + uncertainty)
    found = read_breakdown(folder)
    assert found.clock_skew_seconds == pytest.approx(AHEAD / 1e9, abs=1e-3 + uncertainty / 1e9)
    assert "The processes' clocks were 50" in out
    assert found.measured_step_seconds < 0.4  # not half a second more
    # Stage 1 begins what stage 0 has sent, and stage 0 what stage 1 has.
    spans = {
        (span.about["stage"], span.about["microbatch"], span.kind): span
        for span in read_timeline(folder / FILE).spans()
        if span.kind in ("forward", "backward", "forward_backward") and "stage" in span.about
    }
    for k in range(4):
        there, back = spans[0, k, "forward"], spans[0, k, "backward"]
        beyond = [s for (stage, of, _), s in spans.items() if (stage, of) == (1, k)]
        assert there.end <= min(s.start for s in beyond) + uncertainty
        assert max(s.end for s in beyond) <= back.start + uncertainty
