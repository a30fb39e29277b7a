"""Datasets in whole runs: resumed on other hosts, with other data, larger than memory."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launched import Launcher, lines, losses, train, typed
from PIL import Image

from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import prepare_corpus

GPT = typed(
    "model.vocab_size=257 model.num_layers=2 model.num_heads=2 model.hidden_size=16 "
    "model.sequence_length=16"
)
TINY = typed(
    "train.global_batch_size=8 train.eval_every=0 optimizer.warmup_steps=0 "
    "optimizer.decay=constant cluster=emulated cluster.gpus=2 parallel=data wandb.mode=disabled "
    "report.timeline_steps=[]"
)
STREAM = """\
import itertools
import os
from pathlib import Path

import numpy as np

from launcher.recipes import Dataset
from launcher.recipes.data.streams import StreamedBatches


def check(options, model_options, validation):
    pass


def build(options, model_options, global_batch_size, seed):
    def begin(taken):
        with Path("begun.txt").open("a") as file:
            file.write(f"{os.getpid()} {taken}\\n")
        return map(batch, itertools.count(taken))

    def batch(k):
        x = np.random.default_rng(k).normal(size=(global_batch_size, model_options.input_size))
        x = x.astype(np.float32)
        return {"x": x, "y": x[:, : model_options.output_size]}

    return Dataset(StreamedBatches(begin), None, "a stream of vectors")
"""


def mixture(folder: Path, changed: bool) -> tuple[str, ...]:
    """Two corpora of packed documents."""
    rng = np.random.default_rng(int(changed))
    for name in ("a", "b"):
        texts = ["".join(rng.choice(list("abc "), 1 + rng.integers(40))) for _ in range(60)]
        source = folder / f"{name}.parquet"
        source.unlink(missing_ok=True)
        pq.write_table(pa.table({"text": texts}), source)
        out = str(folder / name)
        prepare_corpus(Documents(path=str(source), format="parquet", tokens=out), 1)
    parts = "dataset.parts={a: {path: a, weight: 2}, b: {path: b}}"
    return (*GPT, "dataset=mixture", parts, "dataset.packing=documents")


def pictures(folder: Path, changed: bool) -> tuple[str, ...]:
    rng = np.random.default_rng(0)
    with tarfile.open(folder / "a.tar", "w") as archive:
        for i in range(40):
            stream = io.BytesIO()
            points = rng.integers(256, size=(9, 12, 3), dtype=np.uint8)
            Image.fromarray(255 - points if changed and not i else points).save(stream, "PNG")
            info = tarfile.TarInfo(f"{'ab'[i % 2]}/{i:02}.png")
            info.size = len(stream.getvalue())
            archive.addfile(info, io.BytesIO(stream.getvalue()))
    return typed(
        "model=vit model.image_size=8 model.patch_size=4 model.num_layers=2 model.num_heads=2 "
        "model.hidden_size=8 model.num_classes=2 dataset=webdataset dataset.path=a.tar "
        "dataset.smallest_crop=0.5"
    )


def stream(folder: Path, changed: bool) -> tuple[str, ...]:
    (folder / "my_pkg").mkdir()
    (folder / "my_pkg" / "stream.py").write_text(STREAM)
    return typed("model=mlp dataset=custom dataset.module=my_pkg.stream allow_modules=[my_pkg]")


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("data", [mixture, pictures, stream])
def test_data_resume_on_other_hosts_and_no_others_are_taken(
    data: Callable[[Path, bool], tuple[str, ...]], tmp_path: Path
) -> None:
    own = (*data(tmp_path, False), *TINY)
    for run, steps, hosts in (("undisturbed", 4, 1), ("resumed", 2, 1), ("resumed", 4, 2)):
        (tmp_path / "begun.txt").write_text("")
        train(tmp_path, *own, f"run.id={run}", f"train.steps={steps}", f"cluster.hosts={hosts}")
    wanted, resumed = (losses(tmp_path / "outputs" / run) for run in ("undisturbed", "resumed"))
    assert len(set(wanted)) == 4
    np.testing.assert_allclose(resumed, wanted, rtol=1e-5)
    if data is stream:  # each worker read it once from where the run had come to
        starts: dict[str, list[str]] = {}
        for process, taken in map(str.split, (tmp_path / "begun.txt").read_text().splitlines()):
            starts.setdefault(process, []).append(taken)
        assert sum(of[-1] == "2" and of.count("2") == 1 for of in starts.values()) == 2, starts
        return
    data(tmp_path, True)
    code, _, err = Launcher(tmp_path, *own, "run.id=resumed", "train.steps=5").end()
    assert code == 2
    assert f"the data of dataset={data.__name__} has changed since run.id=resumed" in err


@pytest.mark.stress
def test_ten_gigabytes_train_in_two_of_memory(tmp_path: Path) -> None:
    """The file has holes, which read as tokens 0; each row is somewhere else in it."""
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(10 * 2**30)
    own = "dataset=tokens", "dataset.path=a.bin", "train.steps=50", "run.id=large"
    train(tmp_path, *GPT, *TINY, *own, "train.global_batch_size=512")
    run = lines(tmp_path / "outputs" / "large")
    assert max(line["perf/process_peak_bytes"] for line in run) < 2 * 2**30


@pytest.mark.slow
def test_a_training_on_documents_prepares_them_and_its_model_speaks(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"number {i} comes before {i + 1}"}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    own = (*GPT, *TINY, "dataset=jsonl", "dataset.path=a.jsonl", "run.id=r")
    out = train(tmp_path, *own, "train.steps=2")
    assert "200 documents, " in out
    assert "of 257 are in a.jsonl.tokens" in out
    asked = ("prompt=[number,one]", "generate.max_new_tokens=5", "generate.temperature=0")
    out = train(tmp_path, "task=generate", "run.id=r", *asked)
    assert out.startswith("number")
    assert "\none" in out

    (tmp_path / "a.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    code, _, err = Launcher(tmp_path, *own, "train.steps=3").end()
    assert code == 2
    assert "the data of dataset=documents has changed since run.id=r reached step 2" in err
