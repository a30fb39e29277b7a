"""Datasets in whole runs: resumed on other hosts, with other data, larger than memory."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import prepare_corpus

sys.path.insert(0, str(Path(__file__).parent))
from launched import Launcher, losses

TINY = (
    "model.vocab_size=257",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.hidden_size=16",
    "model.sequence_length=16",
    "train.global_batch_size=8",
    "train.eval_every=0",
    "optimizer.warmup_steps=0",
    "optimizer.decay=constant",
    "cluster=emulated",
    "wandb.mode=disabled",
    "report.timeline_steps=[]",
)
PLAN = ("parallel=data", "cluster.gpus=2")


def launched(folder: Path, *words: str) -> tuple[int, str]:
    code, _, err = Launcher(folder, *TINY, *words).end()
    return code, err


@pytest.mark.slow
def test_a_packed_mixture_resumes_on_other_hosts_and_not_with_other_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        texts = ["".join(rng.choice(list("abc "), 1 + rng.integers(40))) for _ in range(60)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet")
        source, out = str(tmp_path / f"{name}.parquet"), str(tmp_path / name)
        prepare_corpus(Documents(path=source, format="parquet", tokens=out), 1)
    parts = "dataset.parts={a: {path: a, weight: 2}, b: {path: b}}"
    data = ("dataset=mixture", parts, "dataset.packing=documents", *PLAN)
    for number, (steps, hosts) in enumerate([(6, 1), (3, 1), (6, 2)]):
        run = "undisturbed" if number == 0 else "resumed"
        words = (f"run.id={run}", f"train.steps={steps}", f"cluster.hosts={hosts}")
        code, err = launched(tmp_path, *data, *words)
        assert code == 0, err
    wanted, resumed = (losses(tmp_path / "outputs" / run) for run in ("undisturbed", "resumed"))
    assert len(wanted) == 6
    np.testing.assert_allclose(resumed, wanted, rtol=1e-5)
    assert len(set(wanted)) == 6

    tokens = bytearray((tmp_path / "a" / "00000.bin").read_bytes())
    (tmp_path / "a.parquet").unlink()
    pq.write_table(pa.table({"text": ["another text"] * 40}), tmp_path / "a.parquet")
    source, out = str(tmp_path / "a.parquet"), str(tmp_path / "a")
    prepare_corpus(Documents(path=source, format="parquet", tokens=out), 1)
    assert (tmp_path / "a" / "00000.bin").read_bytes() != tokens
    code, err = launched(tmp_path, *data, "run.id=resumed", "train.steps=9")
    assert code == 2
    assert "the data of dataset=mixture has changed since run.id=resumed reached step 6" in err


@pytest.mark.slow
def test_a_bad_token_ends_a_run_with_its_file_and_position_and_no_traceback(tmp_path: Path) -> None:
    tokens = np.zeros(1000, np.uint16)
    tokens[500] = 300
    tokens.tofile(tmp_path / "a.bin")
    words = ("dataset=tokens", "dataset.path=a.bin", "train.steps=30", *PLAN)
    code, err = launched(tmp_path, *words)
    assert code == 1
    assert "a.bin: token 500 is 300, which is outside model.vocab_size=257" in err
    assert "Traceback" not in err


@pytest.mark.stress
def test_ten_gigabytes_train_in_two_of_memory(tmp_path: Path) -> None:
    """The file has holes, which read as tokens 0; each row is somewhere else in it."""
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(10 * 2**30)
    words = ("dataset=tokens", "dataset.path=a.bin", "train.steps=50", "run.id=large", *PLAN)
    code, err = launched(tmp_path, *words, "train.global_batch_size=512")
    assert code == 0, err
    rows = (tmp_path / "outputs" / "large" / "metrics.jsonl").read_text().splitlines()
    peak = max(json.loads(row)["perf/process_peak_bytes"] for row in rows)
    assert peak < 2 * 2**30


@pytest.mark.slow
def test_a_training_on_documents_prepares_them_and_its_model_speaks(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"number {i} comes before {i + 1}"}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    words = ("dataset=jsonl", "dataset.path=a.jsonl", "run.id=r", *PLAN)
    code, out, err = Launcher(tmp_path, *TINY, *words, "train.steps=2").end()
    assert code == 0, err
    assert "200 documents, " in out
    assert "of 257 are in a.jsonl.tokens" in out
    asked = ("prompt=[number,one]", "generate.max_new_tokens=5", "generate.temperature=0")
    code, out, err = Launcher(tmp_path, "task=generate", "run.id=r", *asked).end()
    assert code == 0, err
    assert out.startswith("number")
    assert "\none" in out

    (tmp_path / "a.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    code, _, err = Launcher(tmp_path, *TINY, *words, "train.steps=3").end()
    assert code == 2
    assert "the data of dataset=documents has changed since run.id=r reached step 2" in err


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


@pytest.mark.stress
def test_a_stream_is_resumed_by_count_on_other_hosts(tmp_path: Path) -> None:
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "stream.py").write_text(STREAM)
    data = ("model=mlp", "dataset=custom", "dataset.module=my_pkg.stream", "allow_modules=[my_pkg]")
    words = (*data, *(word for word in TINY if not word.startswith("model.")), *PLAN)
    begun = tmp_path / "begun.txt"
    for number, (steps, hosts) in enumerate([(6, 1), (3, 1), (6, 2)]):
        run = "undisturbed" if number == 0 else "resumed"
        begun.write_text("")
        of_run = (f"run.id={run}", f"train.steps={steps}", f"cluster.hosts={hosts}")
        code, _, err = Launcher(tmp_path, *words, *of_run).end()
        assert code == 0, err
    wanted, resumed = (losses(tmp_path / "outputs" / run) for run in ("undisturbed", "resumed"))
    assert len(set(wanted)) == 6
    np.testing.assert_allclose(resumed, wanted, rtol=1e-5)
    # Each worker read the stream once from where the run had come to; batch 0 shows the shapes.
    starts: dict[str, list[str]] = {}
    for process, taken in map(str.split, begun.read_text().splitlines()):
        starts.setdefault(process, []).append(taken)
    assert sum(own[-1] == "3" and own.count("3") == 1 for own in starts.values()) == 2, starts


@pytest.mark.stress
def test_pictures_train_resume_on_other_hosts_and_not_with_other_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = {}
    for i in range(40):
        stream = io.BytesIO()
        points = rng.integers(256, size=(9, 12, 3), dtype=np.uint8)
        Image.fromarray(points).save(stream, "PNG")
        files[f"{'ab'[i % 2]}/{i:02}.png"] = stream.getvalue()
    write_pictures(tmp_path / "a.tar", files)
    words = ("model=vit", "model.image_size=8", "model.patch_size=4", "model.num_layers=2")
    words += ("model.num_heads=2", "model.hidden_size=8", "model.num_classes=2")
    words += ("dataset=webdataset", "dataset.path=a.tar", "dataset.smallest_crop=0.5", *PLAN)
    words += tuple(word for word in TINY if not word.startswith("model."))
    for number, (steps, hosts) in enumerate([(4, 1), (2, 1), (4, 2)]):
        run = "undisturbed" if number == 0 else "resumed"
        of_run = (f"run.id={run}", f"train.steps={steps}", f"cluster.hosts={hosts}")
        code, _, err = Launcher(tmp_path, *words, *of_run).end()
        assert code == 0, err
    wanted, resumed = (losses(tmp_path / "outputs" / run) for run in ("undisturbed", "resumed"))
    assert len(wanted) == 4
    np.testing.assert_allclose(resumed, wanted, rtol=1e-5)

    files["a/00.png"] = files["b/01.png"]
    write_pictures(tmp_path / "a.tar", files)
    code, _, err = Launcher(tmp_path, *words, "run.id=resumed", "train.steps=5").end()
    assert code == 2
    assert "the data of dataset=pictures has changed since run.id=resumed reached step 4" in err


def write_pictures(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
