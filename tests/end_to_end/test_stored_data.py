"""A training on tokens in an object store, on two workers, with a restart."""

import json
from pathlib import Path

import numpy as np
import pytest
from fault_proxy import Fault, FaultProxy
from launched import Launcher, losses, train, typed
from object_servers import SECRET, s3_server

from launcher.base.object_store import Store

WORDS = typed(
    "model.vocab_size=257 model.num_layers=2 model.num_heads=2 model.hidden_size=16 "
    "model.sequence_length=16 dataset=tokens train.global_batch_size=8 train.eval_every=2 "
    "train.eval_batches=1 optimizer.warmup_steps=0 optimizer.decay=constant cluster=emulated "
    "cluster.gpus=2 cluster.hosts=2 parallel=data wandb.mode=disabled report.timeline_steps=[]"
)


@pytest.mark.slow
def test_a_run_on_stored_tokens_is_that_on_local_ones_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.random.default_rng(0).integers(0, 257, 300_000).astype(np.uint16)
    (tmp_path / "d").mkdir()
    with s3_server() as server, FaultProxy(server.url) as proxy:
        for name, value in server.environ(proxy.url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        store = Store(server.bucket)
        for number, part in enumerate(np.array_split(tokens, 3)):
            part.tofile(tmp_path / "d" / f"{number}.bin")
            store.put(f"d/{number}.bin", part.tobytes())
        local, stored = "dataset.path=d", f"dataset.path={server.bucket}/d"
        train(tmp_path, *WORDS, local, "run.id=local", "train.steps=8")
        proxy.fail(Fault("status", "GET", 3, 503, retry_after=1), Fault("truncate", "GET", 2))
        train(tmp_path, *WORDS, stored, "run.id=stored", "train.steps=4")
        store.put("d/00.bin", tokens[:9000].tobytes())  # is none of its files
        train(tmp_path, *WORDS, stored, "run.id=stored", "train.steps=8")
        wanted, found = (losses(tmp_path / "outputs" / run) for run in ("local", "stored"))
        assert len(set(wanted)) == 8
        assert found == wanted
        store.put("d/1.bin", tokens[:9000].tobytes())
        code, _, err = Launcher(tmp_path, *WORDS, stored, "run.id=stored", "train.steps=9").end()
        assert code == 2
        assert f"{server.bucket}/d/1.bin has changed since the run began: it held 200,000" in err
        told = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not [path for path in told if SECRET.encode() in path.read_bytes()]
        pinned = (tmp_path / "outputs/stored/config.yaml").read_text()
        assert json.dumps(f"{server.bucket}/d/1.bin 200000")[1:-1] in pinned
