"""Runs with a mirror: they end, their disk is lost, and they resume from the store to the bit."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from fault_proxy import Fault, FaultProxy
from launched import Launcher, losses, train, typed
from object_servers import SECRET, ObjectServer, object_server

from launcher.checkpoint.layout import files_below, steps_in

WORDS = typed(
    "dataset=text dataset.path=fox.txt model.num_layers=2 model.num_heads=2 model.hidden_size=32 "
    "model.sequence_length=16 model.dropout=0.1 train.global_batch_size=8 train.eval_every=0 "
    "train.checkpoint.every_steps=2 optimizer.decay=constant parallel=manual "
    "parallel.num_micro_batches=2 cluster=emulated cluster.gpus=2 wandb.mode=disabled "
    "report.timeline_steps=[] run.id=a"
)


@pytest.fixture(params=["s3", "gs"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """A server, a proxy before it, and this process's environment for both."""
    with object_server(request.param) as server, FaultProxy(server.url) as proxy:
        for name, value in {**server.environ(proxy.url), "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        yield server, proxy


def fox(folder: Path) -> None:
    (folder / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)


def state(run: Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint, read by stock Orbax."""
    import orbax.checkpoint as ocp

    step = steps_in(run / "checkpoints")[-1]
    with ocp.CheckpointManager((run / "checkpoints").absolute()) as manager:
        tree = manager.restore(step, args=ocp.args.StandardRestore())
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.slow
def test_a_run_on_an_empty_disk_resumes_to_the_bit(
    tmp_path: Path, server: tuple[ObjectServer, FaultProxy]
) -> None:
    store, proxy = server
    mirror = f"run.mirror={store.bucket}/runs/a"
    here, whole = tmp_path / "here", tmp_path / "whole"
    for folder in (here, whole):
        folder.mkdir()
        fox(folder)
    train(whole, *WORDS, "train.steps=8")
    run = here / "outputs" / "a"

    # The store is away when it is needed: the training does not notice, the next start makes up.
    proxy.fail(Fault("status", "commits", times=9999, status=401))
    code, out, err = Launcher(here, *WORDS, mirror, "train.steps=4").end()
    assert code == 0, err
    assert f"not mirrored to {store.bucket}/runs/a: step 4; the next start" in err
    assert steps_in(run / "checkpoints") == [2, 4]
    proxy.heal()
    proxy.fail(Fault("status", "checkpoints", times=2, retry_after=1), Fault("reset", times=2))
    said = train(here, *WORDS, mirror, "train.steps=4")
    assert "complete" in said

    shutil.rmtree(run)
    code, _, other = Launcher(here, *WORDS[:-1], "run.id=b", mirror, "train.steps=4").end()
    assert code == 2
    assert "belongs to run a" in other
    assert not (here / "outputs" / "b").exists()
    proxy.fail(Fault("truncate", "default", after=100), Fault("flip", "default", after=5))
    resumed = train(here, *WORDS, mirror, "train.steps=8", "run.resume=must")
    assert "resuming run a at step 4" in resumed
    assert losses(run) == losses(whole / "outputs" / "a")
    found, wanted = state(run), state(whole / "outputs" / "a")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    texts = [path.read_bytes() for path in files_below(here)]
    assert SECRET not in out + err + said + other + resumed
    assert not [text for text in texts if SECRET.encode() in text]


@pytest.mark.slow
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_killed_while_it_mirrors_a_run_resumes(
    tmp_path: Path, server: tuple[ObjectServer, FaultProxy]
) -> None:
    store, proxy = server
    fox(tmp_path)
    words = *WORDS, f"run.mirror={store.bucket}/a", "train.steps=6"
    proxy.fail(Fault("delay", "PUT .*default", times=9999, seconds=1.0))
    launcher = Launcher(tmp_path, *words)
    launcher.wait_for(lambda: any("default" in seen for seen in proxy.seen()))
    launcher.process.send_signal(signal.SIGKILL)
    launcher.end()  # nothing is left, the process that mirrors included
    proxy.heal()
    # Ctrl-C ends the wait for the mirror; the next start makes up.
    proxy.fail(Fault("delay", "PUT .*default", times=9999, seconds=60.0))
    shown = tmp_path / "shown"
    with shown.open("w") as out:
        launcher = Launcher(tmp_path, *words, stdout=out.fileno())
        launcher.wait_for(lambda: "mirroring to" in shown.read_text())
        launcher.process.send_signal(signal.SIGINT)
        code, _, err = launcher.end()
    assert code == 0
    assert f"not mirrored to {store.bucket}/a: step 6; the next start of run a" in err
    proxy.heal()
    train(tmp_path, *words)
    whole = losses(tmp_path / "outputs/a"), state(tmp_path / "outputs/a")
    shutil.rmtree(tmp_path / "outputs/a")
    assert "complete, 6 of 6" in train(tmp_path, *words)  # fetched, with nothing left to train
    assert losses(tmp_path / "outputs/a") == whole[0]
    found = state(tmp_path / "outputs/a")
    assert all(np.array_equal(found[name], whole[1][name]) for name in whole[1])


@pytest.mark.parametrize(
    ("url", "tried"),
    [
        ("s3://nobody/a", "AWS_ACCESS_KEY_ID"),
        ("gs://nobody/a", "GOOGLE_APPLICATION_CREDENTIALS"),
    ],
)
def test_without_credentials_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, tried: str
) -> None:
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    for task in ("task=check", "task=train"):
        code, _, err = Launcher(tmp_path, "run.id=a", f"run.mirror={url}", task).end()
        assert code == 2
        assert f"run.mirror={url} cannot be used: {url}" in err
        assert f"no credentials; tried {tried}" in err
        assert "Traceback" not in err
    assert not (tmp_path / "outputs").exists()
