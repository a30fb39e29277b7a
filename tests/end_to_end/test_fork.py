"""A run that begins with the state of another has the losses of its parent, to the last bit."""

import shutil

import pytest
from launched import losses, summary, train, typed

from launcher.report.run_record import runs

WORDS = typed(
    "dataset=text dataset.path=fox.txt model.num_layers=2 model.num_heads=2 model.hidden_size=32 "
    "model.sequence_length=16 model.dropout=0.1 train.global_batch_size=8 train.steps=8 "
    "train.eval_every=0 optimizer.decay=constant optimizer.ema=0.9 parallel=manual "
    "parallel.num_micro_batches=2 cluster=emulated cluster.gpus=2 wandb.mode=disabled "
    "report.timeline_steps=[]"
)


@pytest.mark.slow
def test_a_fork_has_the_losses_of_its_parent_and_needs_it_no_more(tmp_path):
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    a, b, c = (tmp_path / "outputs" / name for name in "abc")
    train(tmp_path, *WORDS, "run.id=a", "train.checkpoint.every_steps=4")
    whole = losses(a)
    for parent, run in ((a, b), (b, c)):
        train(tmp_path, *WORDS, f"run.id={run.name}", f"run.fork=outputs/{parent.name}@4")
        assert losses(run) == whole[4:]
        assert summary(run)["forked_from"] == f"{parent}@4"
        shutil.rmtree(parent)
    assert [run["forked_from"] for run in runs(tmp_path / "outputs")] == [f"{b}@4"]
