"""`prepare.py`: what is written, going on, and bad documents by file and place."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.recipes import InputError
from launcher.recipes.data.corpus import sources
from launcher.recipes.data.corpus.files import find_corpus
from launcher.recipes.data.corpus.tokenizers import load_tokenizer
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import (
    prepare_corpus,
    train_tokenizer,
    up_to_date,
)

TEXTS = [f"document {i} " * (1 + i % 5) for i in range(40)]


def work(path, tokens, **changes):
    return Documents(path=str(path), tokens=str(tokens), **changes)


def lines(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def texts_in(folder):
    """The documents in a folder of tokens, by its index."""
    corpus = find_corpus(str(folder))
    decode, tokens = load_tokenizer("bytes").decode, corpus.tokens(0, corpus.count)
    begins = np.flatnonzero(corpus.begins(0, tokens, None))
    return [decode(part.tolist()) for part in np.split(tokens, begins[1:])]


def written(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix != ".lock"}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 300)


@pytest.mark.parametrize("format", ["jsonl", "parquet", "arrow", "stream", "text"])
def test_every_format_gives_its_documents_in_order(tmp_path, small_pieces, format):
    source = tmp_path / "source"
    source.mkdir()
    half = len(TEXTS) // 2
    for name, texts in {"a": TEXTS[:half], "b": TEXTS[half:]}.items():
        table = pa.table({"other": list(range(half)), "text": texts})
        if format == "jsonl":
            lines(source / f"{name}.jsonl", texts)
        elif format == "parquet":
            pq.write_table(table, source / f"{name}.parquet", row_group_size=7)
        elif format == "text":
            for index, text in enumerate(texts):
                (source / f"{name}{index:02}.txt").write_text(text)
        else:
            new = pa.ipc.new_stream if format == "stream" else pa.ipc.new_file
            with new(source / f"{name}.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
    named = "arrow" if format == "stream" else format
    meta = prepare_corpus(work(source, tmp_path / "out", format=named), 1)
    assert texts_in(tmp_path / "out") == TEXTS
    assert (meta.documents, meta.skipped, meta.vocab_size) == (len(TEXTS), 0, 257)
    assert meta.tokens == sum(map(len, TEXTS)) + len(TEXTS)
    assert meta.dtype == np.uint16
    assert len(meta.parts) > 1


@pytest.mark.devices
def test_processes_write_what_one_writes(tmp_path, small_pieces):
    source = lines(tmp_path / "a.jsonl", TEXTS)
    prepare_corpus(work(source, tmp_path / "one"), 1)
    prepare_corpus(work(source, tmp_path / "two"), 2)
    assert written(tmp_path / "one") == written(tmp_path / "two")


def test_it_goes_on_and_makes_again_only_what_changed(tmp_path, small_pieces):
    folder = tmp_path / "s"
    folder.mkdir()
    for name in "abc":
        lines(folder / f"{name}.jsonl", [f"{name} {text}" for text in TEXTS[:5]])
    given = work(folder, tmp_path / "out")
    prepare_corpus(given, 1)
    whole = written(tmp_path / "out")
    (tmp_path / "out" / "meta.json").unlink()
    (tmp_path / "out" / "00001.json").unlink()  # as a killed run leaves it
    kept = (tmp_path / "out" / "00000.bin").stat().st_mtime_ns
    prepare_corpus(given, 1)
    assert written(tmp_path / "out") == whole
    assert (tmp_path / "out" / "00000.bin").stat().st_mtime_ns == kept
    assert up_to_date(given)
    lines(folder / "c.jsonl", ["other"])
    assert up_to_date(given) is None
    assert up_to_date(replace(given, field="x")) is None
    prepare_corpus(given, 1)
    assert texts_in(tmp_path / "out")[-1] == "other"
    assert (tmp_path / "out" / "00000.bin").stat().st_mtime_ns == kept
    (folder / "b.jsonl").unlink()
    prepare_corpus(given, 1)
    assert len(texts_in(tmp_path / "out")) == 6
    assert {p.stem for p in (tmp_path / "out").glob("*.bin")} == {
        part.name for part in find_corpus(str(tmp_path / "out")).meta.parts
    }


@pytest.mark.devices
def test_a_killed_run_leaves_no_processes_and_goes_on(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    for index in range(12):
        lines(folder / f"{index:02}.jsonl", TEXTS * 300)
    code = (
        "import sys\nfrom launcher.recipes.data.corpus import sources\n"
        "from launcher.recipes.datasets.documents import Documents\n"
        "from launcher.recipes.datasets.documents.prepare import prepare_corpus\n"
        "sources.PIECE = 10**5\n"
        "if __name__ == '__main__':\n"
        f"    prepare_corpus({work(folder, tmp_path / 'out')!r}, 2)\n"
    )
    script = tmp_path / "prepare.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    running = subprocess.Popen([sys.executable, script], env=environment)
    children = set()
    while not list((tmp_path / "out").glob("*.json")):
        time.sleep(0.01)
        children |= {
            int(pid)
            for task in Path(f"/proc/{running.pid}/task").glob("*/children")
            for pid in task.read_text().split()
        }
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert children
    assert not (tmp_path / "out" / "meta.json").exists()
    for _ in range(500):
        if not any(is_alive(pid) for pid in children):
            break
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in children)
    subprocess.run([sys.executable, script], env=environment, check=True)
    assert texts_in(tmp_path / "out") == TEXTS * 300 * 12


@pytest.mark.devices
def test_ctrl_c_waits_for_nothing_that_is_half_done(tmp_path):
    for index in range(2):
        lines(tmp_path / f"{index}.jsonl", TEXTS)
    code = (
        "import os, time\nfrom launcher.recipes.data.corpus import sources\n"
        "from launcher.recipes.datasets.documents import Documents, prepare\n"
        "sources.PIECE = 1\n"
        "def _make(*_):\n"
        "    os.write(1, b'%d\\n' % os.getpid())  # in one piece, beside another's\n"
        "    time.sleep(1000)\n"
        "_make.__module__, prepare._make = prepare.__name__, _make\n"
        "if __name__ == '__main__':\n"
        f"    prepare.prepare_corpus({work(tmp_path, tmp_path / 'out')!r}, 2)\n"
    )
    (tmp_path / "prepare.py").write_text(code)
    running = subprocess.Popen(
        [sys.executable, tmp_path / "prepare.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    children = [int(running.stdout.readline()) for _ in range(2)]
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert "leaked" not in err
    assert not any(is_alive(pid) for pid in children)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def bad_sources(folder):
    """Bad files, by name: how they are written and read, and what is said of them."""
    table = pa.table({"text": ["fine", "", None]})
    pq.write_table(pa.table({"text": [1, 2]}), folder / "numbers.parquet")
    pq.write_table(table, folder / "empty_row.parquet")
    pq.write_table(pa.table({"text": TEXTS}), folder / "cut.parquet")
    (folder / "cut.parquet").write_bytes((folder / "cut.parquet").read_bytes()[:-20])
    (folder / "empty.jsonl").touch()
    (folder / "bad.jsonl").write_text(
        '{"text": "a"}\n\n{"text": "b"\n{"text": ""}\n{"body": "c"}\n7\n'
    )
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "zero.txt").touch()
    return {
        "numbers.parquet": "row 0: 'text' is of type int, neither text nor a list of messages",
        "empty_row.parquet": "row 1: 'text' is empty",
        "cut.parquet": "Parquet magic bytes not found in footer",
        "empty.jsonl": "the file is empty",
        "bad.jsonl": "line 3: ",
        "latin.txt": "byte 3: it is not UTF-8",
        "zero.txt": "it is empty",
    }


def test_bad_documents_are_refused_by_file_and_place_or_skipped_and_counted(tmp_path):
    wanted = bad_sources(tmp_path)
    fine = lines(tmp_path / "fine.jsonl", ["fine"])
    for name, text in wanted.items():
        format = {".txt": "text"}.get(Path(name).suffix, Path(name).suffix[1:])
        given = work(tmp_path / name, tmp_path / f"{name}.out", format=format)
        with pytest.raises(InputError) as error:
            prepare_corpus(given, 1)
        said = str(error.value)
        assert str(tmp_path / name) in said, said
        assert text.removeprefix("the file ") in said, said
        assert said.endswith("fix it, or leave bad documents out with dataset.bad=skip")
        assert "\n" not in said
        assert not (tmp_path / f"{name}.out" / "meta.json").exists()
    both = tmp_path / "both"
    both.mkdir()
    for name in ("bad.jsonl", "fine.jsonl"):
        (both / name).write_bytes((tmp_path / name).read_bytes())
    given = work(both, tmp_path / "skipped", bad="skip")
    with pytest.raises(InputError) as error:  # most are bad
        prepare_corpus(given, 1)
    said = f"dataset.bad=skip would leave out 4 of 6 documents of dataset.path={both}, 1 of them "
    assert str(error.value).startswith(f"{said}because: ")
    lines(both / "fine.jsonl", ["fine", "good", "best"])
    meta = prepare_corpus(given, 1)
    assert (meta.documents, meta.skipped) == (4, 4)
    assert meta.parts[0].first_bad.startswith(f"{both}/bad.jsonl, line 3: ")
    assert texts_in(tmp_path / "skipped") == ["a", "fine", "good", "best"]
    with pytest.raises(InputError, match=r"1 of 1 documents of .*, 1 of them because: it is empty"):
        prepare_corpus(work(tmp_path / "empty.jsonl", tmp_path / "o", bad="skip"), 1)
    assert fine.exists()


DEEP = '{"text": ' + "[" * 200_000 + "]" * 200_000 + "}"
BAD_LINES = {
    "deep": (DEEP, "it is nested too deeply"),
    "half": (
        '{"text": "ab \\ud800 cd"}',
        r"'text' has half of a surrogate pair (\ud800) at character 3",
    ),
    "name": (
        '{"\\ud800": 1}',
        r"it has no field 'text' (dataset.field), it has \ud800",
    ),
}


@pytest.mark.parametrize("tokenizer", ["bytes", "tokenizer.json", "tokenize"])
@pytest.mark.parametrize("kind", BAD_LINES)
def test_json_that_is_no_text_is_a_bad_document_for_every_tokenizer(tmp_path, kind, tokenizer):
    source, out = lines(tmp_path / "a.jsonl", ["fine", "good"]), tmp_path / "tokenizer.json"
    train_tokenizer(work(source, "unused"), 300, out)
    with open(source, "a") as file:
        file.write(BAD_LINES[kind][0] + "\n")

    def read(bad):
        if tokenizer == "tokenize":
            return train_tokenizer(work(source, "unused", bad=bad), 300, out)
        name = str(out) if tokenizer == "tokenizer.json" else tokenizer
        return prepare_corpus(work(source, tmp_path / "out", tokenizer=name, bad=bad), 1)

    with pytest.raises(InputError) as error:
        read("refuse")
    assert str(error.value) == (
        f"{source}, line 3: {BAD_LINES[kind][1]}; fix it, or leave bad documents out with "
        "dataset.bad=skip"
    )
    found = read("skip")
    assert tokenizer == "tokenize" or (found.documents, found.skipped) == (2, 1)


def test_a_damaged_row_group_is_named_and_all_its_rows_are_counted(tmp_path):
    source = tmp_path / "a.parquet"
    texts = [f"row {i} " * 20 for i in range(150)]
    pq.write_table(pa.table({"text": texts}), source, row_group_size=50, use_dictionary=False)
    column = pq.ParquetFile(source).metadata.row_group(1).column(0)
    content = bytearray(source.read_bytes())
    start, size = column.data_page_offset, column.total_compressed_size
    content[start + 40 : start + size] = b"\xff" * (size - 40)
    source.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet, row group 1, rows 50 to 99: .*; fix it"):
        prepare_corpus(work(source, tmp_path / "out", format="parquet"), 1)
    meta = prepare_corpus(work(source, tmp_path / "out", format="parquet", bad="skip"), 1)
    assert (meta.documents, meta.skipped) == (100, 50)
    assert texts_in(tmp_path / "out") == texts[:50] + texts[100:]
    lacking = work(source, tmp_path / "none", format="parquet", bad="skip", field="body")
    with pytest.raises(InputError, match=r"150 of 150 documents of .*: it has no column 'body'"):
        prepare_corpus(lacking, 1)
    pq.write_table(pa.table({"body": ["fine"] * 3}), tmp_path / "b.parquet")
    glob = work(tmp_path / "*.parquet", tmp_path / "out", format="parquet", bad="skip")
    assert prepare_corpus(glob, 1).skipped == 53


def test_a_row_that_is_not_utf8_is_one_bad_document(tmp_path):
    cells = pa.array([b"fine", b"caf\xe9", b"good"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, cells.buffers())
    table = pa.table({"text": column})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    given = work(tmp_path / "a.arrow", tmp_path / "out", format="arrow", bad="skip")
    meta = prepare_corpus(given, 1)
    assert (meta.documents, meta.skipped) == (2, 1)
    assert meta.parts[0].first_bad.endswith("a.arrow, row 1: 'text' is not UTF-8")


def test_a_glob_takes_the_documents_of_the_files_that_fit(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "other.txt"):
        lines(tmp_path / name, [f"of {name}"])
    (tmp_path / "deep").mkdir()
    lines(tmp_path / "deep" / "c.jsonl", ["of c"])
    prepare_corpus(work(tmp_path / "*.jsonl", tmp_path / "out"), 1)
    assert texts_in(tmp_path / "out") == ["of a.jsonl", "of b.jsonl"]
    prepare_corpus(work(f"{tmp_path}/**/*.jsonl", tmp_path / "out"), 1)
    assert texts_in(tmp_path / "out") == ["of a.jsonl", "of b.jsonl", "of c"]


def test_the_length_of_the_text_is_recorded(tmp_path, small_pieces):
    texts = [f"é{text}" for text in TEXTS]
    meta = prepare_corpus(work(lines(tmp_path / "a.jsonl", texts), tmp_path / "out"), 1)
    sizes = [len(text.encode()) for text in texts]
    assert meta.text_bytes == sum(sizes)
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["text_bytes"] == sum(sizes)
    ends = [np.fromfile(tmp_path / "out" / f"{part.name}.bytes", np.int64) for part in meta.parts]
    assert len(meta.parts) > 1
    assert np.concatenate([np.diff(one, prepend=0) for one in ends]).tolist() == sizes


def test_a_full_disk_is_said_with_the_file(tmp_path):
    lines(tmp_path / "a.jsonl", TEXTS)
    prepare_corpus(work(tmp_path / "a.jsonl", tmp_path / "out"), 1)
    (part,) = (tmp_path / "out").glob("*.bin")
    (tmp_path / "full").mkdir()
    file = tmp_path / "full" / f"{part.stem}.partial"
    file.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as error:
        prepare_corpus(work(tmp_path / "a.jsonl", tmp_path / "full"), 1)
    assert error.value.filename == str(file)


def test_lines_are_counted_also_in_later_pieces(tmp_path, small_pieces):
    source = lines(tmp_path / "a.jsonl", TEXTS)
    source.write_text(source.read_text() + "[]\n")
    with pytest.raises(InputError, match=rf"a\.jsonl, line {len(TEXTS) + 1}: it is not a table"):
        prepare_corpus(work(source, tmp_path / "out"), 1)


def test_a_missing_column_is_named(tmp_path):
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"it has no column 'text' \(dataset\.field\), it has"):
        prepare_corpus(work(tmp_path, tmp_path / "out", format="parquet"), 1)


def test_two_that_need_the_same_tokens_make_them_once(tmp_path, caplog):
    source = lines(tmp_path / "a.jsonl", TEXTS)
    given = work(source, tmp_path / "out")
    prepare_corpus(given, 1)
    made = (tmp_path / "out" / "meta.json").stat().st_mtime_ns
    caplog.set_level("INFO")
    with open(tmp_path / "out" / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process is at it
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(prepare_corpus, given, 1)
            while "waiting for that" not in caplog.text:
                time.sleep(0.01)
            assert not second.done()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert second.result().documents == len(TEXTS)
    assert (tmp_path / "out" / "meta.json").stat().st_mtime_ns == made
