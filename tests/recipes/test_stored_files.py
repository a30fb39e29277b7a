"""Token files and Parquet in object stores: the batches of a disk to the bit, or a clean error."""

import functools
import glob
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from fault_proxy import Fault, FaultProxy
from object_servers import SECRET, object_server

from launcher.base import fits_glob
from launcher.base.object_store import NotFoundError, Stat, Store
from launcher.config.compose import load, load_frozen, to_written
from launcher.inference.export_tokenizer import run_tokenizer
from launcher.recipes import (
    InputError,
    build_dataset,
    check_dataset,
    fingerprint_dataset,
    tokenizer_of,
)
from launcher.recipes.data import stored_files
from launcher.recipes.data.block_cache import BlockCache
from launcher.recipes.data.corpus.files import find_corpus
from launcher.recipes.data.corpus.tokenizers import BYTES
from launcher.recipes.data.files import find_text
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.prepare import prepare_corpus
from launcher.recipes.datasets.mixture import Mixture
from launcher.recipes.datasets.tokens import Tokens

pytestmark = pytest.mark.devices  # servers are processes
MODEL = SimpleNamespace(name="gpt", vocab_size=60_000, sequence_length=32)
TEXTS = [f"document {i} " * (1 + i % 7) for i in range(300)]


@pytest.fixture(scope="module", params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def served(request, tmp_path_factory):
    """A server behind a proxy, with the files of a folder that is returned."""
    folder = tmp_path_factory.mktemp("served")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, 900_000).astype("uint16")
    for name in ("bins", "source"):
        (folder / name).mkdir()
    for number, part in enumerate(np.array_split(tokens, [500_000, 500_001])):
        part.tofile(folder / "bins" / f"{number}.bin")
    (folder / "bins" / "about.md").write_text("not tokens")
    np.save(folder / "a.npy", tokens[:5000].astype(np.int64))
    pq.write_table(pa.table({"text": TEXTS}), folder / "source/a.parquet", row_group_size=90)
    prepare_corpus(of_rows(folder, folder / "prepared"), 1)
    with (
        object_server(request.param) as server,
        FaultProxy(server.url) as proxy,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.environ(proxy.url).items():
            patch.setenv(name, value)
        sent = Store(server.bucket)
        for path in filter(Path.is_file, folder.rglob("*")):
            sent.put(path.relative_to(folder).as_posix(), path.read_bytes())
        yield SimpleNamespace(server=server, proxy=proxy, folder=folder, url=server.bucket)


def of_rows(place, tokens):
    return Documents(path=f"{place}/source", format="parquet", tokens=str(tokens))


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A cache of its own, and stores that are asked for seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = functools.cache(functools.partial(Store, patience=4.0))
    monkeypatch.setattr(stored_files, "_store", store)


@pytest.fixture
def proxy(served):
    yield served.proxy
    served.proxy.heal()


def batches_of(options, numbers=range(3)):
    check_dataset(options, MODEL, validation=True)
    dataset = build_dataset(options, MODEL, 8, seed=1)
    return [dataset.train(k) for k in numbers] + [dataset.validation(0)]


def same(found, wanted):
    assert all(a.keys() == b.keys() for a, b in zip(found, wanted, strict=True))
    for one, other in zip(found, wanted, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], strict=True)


def refused(call):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    assert SECRET not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("bins", {}),
        ("bins/*.bin", {"packing": "documents", "end_token": 7}),
        ("bins/0.bin", {"validation_path": "bins/2.bin"}),
        ("a.npy", {}),
        ("prepared", {"packing": "documents"}),
    ],
)
def test_batches_are_those_of_the_disk_and_pinned_ones_list_nothing(served, path, changes):
    def options(place):
        named = {k: f"{place}/{v}" if k == "validation_path" else v for k, v in changes.items()}
        return Tokens(path=f"{place}/{path}", **named)

    pinned = options(served.url).pinned(dict)
    asked = len(served.proxy.seen())
    same(batches_of(pinned), batches_of(options(served.folder)))
    assert len(set(pinned.objects)) == len(pinned.objects)
    assert "about.md" not in str(pinned.objects)
    later = served.proxy.seen()[asked:]
    assert not [one for one in later if re.search("list-type|HEAD|/o\\?prefix", one)], later
    asked = len(served.proxy.seen())
    same(batches_of(pinned), batches_of(options(served.folder)))  # by the cache alone
    assert served.proxy.seen()[asked:] == []


@pytest.mark.slow
def test_a_mixture_and_parquet_are_as_on_the_disk(served, tmp_path):
    def mixture(place):
        parts = {name: {"path": f"{place}/{name}"} for name in ("bins", "a.npy")}
        return Mixture(parts=parts)

    same(batches_of(mixture(served.url).pinned(dict)), batches_of(mixture(served.folder)))
    prepared = Tokens(path=f"{served.url}/prepared").pinned(dict)
    assert tokenizer_of(prepared).fingerprint == BYTES
    assert run_tokenizer(SimpleNamespace(dataset=prepared)).name == BYTES
    prepare_corpus(of_rows(served.url, tmp_path / "tokens").pinned(dict), 2)
    for file in (tmp_path / "tokens").glob("*.bin"):
        assert file.read_bytes() == (served.folder / "prepared" / file.name).read_bytes()
    assert len([*(tmp_path / "tokens").glob("*.bin")]) == len(
        [*(served.folder / "prepared").glob("*.bin")]
    )


FAULTS = [
    Fault("status", "GET", 2, 503, retry_after=1),
    Fault("status", "GET", 2, 429, retry_after=0),
    Fault("reset", "GET", 2, after=1000),
    Fault("truncate", "GET", 2, after=1000),
    Fault("shorten", "GET", 2, after=1000),
    Fault("delay", "GET", 2, seconds=0.3),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}{fault.status}")
def test_faults_change_no_batch(served, proxy, fault):
    pinned = Tokens(path=f"{served.url}/bins").pinned(dict)
    proxy.fail(fault)
    began = time.monotonic()
    same(batches_of(pinned), batches_of(Tokens(path=str(served.folder / "bins"))))
    if fault.retry_after:
        assert time.monotonic() - began > fault.retry_after  # no sooner than it asks


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("served", "seed"),
    [(("s3", "gs")[seed // 32], seed) for seed in range(64)],
    indirect=["served"],
)
def test_seeded_faults_change_no_batch_or_are_told(served, proxy, seed, tmp_path):
    draw = random.Random(seed)
    kinds = ["status", "reset", "truncate", "shorten", "delay"]
    path = draw.choice(["bins", "bins/0.bin", "prepared", "a.npy", "source"])
    faults = [
        Fault(
            draw.choice(kinds),
            draw.choice(["GET", "HEAD", "bin|npy|parquet", "meta.json", ""]),
            draw.choice([1, 1, 2, 40]),
            draw.choice([500, 503, 429, 404, 403]),
            draw.choice([None, 0, 1]),
            after=draw.choice([0, 1, 100, 70_000]),
            seconds=0.05,
        )
        for _ in range(draw.choice([1, 2, 3]))
    ]

    def read(place):
        if path != "source":
            return batches_of(Tokens(path=f"{place}/{path}").pinned(dict))
        tokens = tmp_path / ("there" if place == served.url else "here")
        prepare_corpus(of_rows(place, tokens).pinned(dict), 1)
        return batches_of(Tokens(path=str(tokens)))

    proxy.fail(*faults)
    said = ""
    try:
        found = read(served.url)
    except InputError as error:
        said = str(error)
        proxy.heal()
        found = read(served.url)  # nothing half is left
    assert said == "" or (served.url in said and "\n" not in said and SECRET not in said)
    same(found, read(str(served.folder)))


def test_a_run_sees_the_files_that_it_began_with_or_names_what_has_changed(served, proxy):
    store, content = Store(served.url), b"\1\0" * 3000
    store.put("grows/a.bin", content)
    first = Tokens(path=f"{served.url}/grows").pinned(dict)
    store.put("grows/0.bin", content)
    before = {"path": first.path, "objects": first.objects}
    resumed = Tokens(path=first.path).pinned(lambda: before)
    assert fingerprint_dataset(resumed) == fingerprint_dataset(first)
    assert fingerprint_dataset(Tokens(path=first.path)) != fingerprint_dataset(first)
    store.put("grows/a.bin", content[:-2])
    said = refused(lambda: Tokens(path=first.path).pinned(lambda: before))
    assert f"{served.url}/grows/a.bin has changed since the run began: it held 6,000 bytes" in said
    assert "it now holds 5,998" in said
    if served.server.kind == "s3":  # the other server heeds no version
        said = refused(lambda: build_dataset(first, MODEL, 8, 0).train(0))
        assert "grows/a.bin has changed or gone since the run began" in said
    store.delete("grows/a.bin")
    said = refused(lambda: Tokens(path=first.path).pinned(lambda: before))
    assert "it is gone; put it back" in said


@pytest.mark.slow
def test_what_cannot_be_read_is_told_with_what_to_do(served, proxy):
    assert "grow names no object; name an object" in refused(
        lambda: Tokens(path=f"{served.url}/grow").pinned(dict)
    )
    absent = served.url.replace("bucket", "absent")
    said = refused(lambda: Tokens(path=f"{absent}/x").pinned(dict))
    assert said.startswith(f"dataset.path={absent}/x: {absent}")
    assert "is not there" in said
    assert "names no bucket" in refused(lambda: Tokens(path="s3://").pinned(dict))
    pinned = Tokens(path=f"{served.url}/bins").pinned(dict)
    proxy.fail(Fault("status", "GET", 1000, 503))
    read = functools.partial(batches_of, pinned)
    said = refused(read)
    assert "is not available" in said
    assert "see that the store can be reached" in said
    proxy.heal()
    proxy.fail(Fault("shorten", "GET", 1000, after=10))
    assert re.search(r"bin arrives cut short, 10 bytes of \d.*; see that", refused(read))


def test_other_data_and_missing_libraries_are_refused_with_what_to_do(monkeypatch):
    rows = Documents(path="s3://bucket/web", format="parquet")
    assert "is a URL, which implies no folder for its tokens" in str(next(rows.check(MODEL)))
    lines = Documents(path="s3://bucket/web", format="jsonl", tokens="t")
    assert "documents are read in Parquet, not in dataset.format=jsonl" in str(
        next(lines.check(MODEL))
    )
    rows = Documents(path="web", format="parquet", tokens="s3://bucket/tokens")
    assert "tokens are written to a folder" in str(next(rows.check(MODEL)))
    for url in ("S3://bucket/a", "gcs://bucket/a", "https://bucket.s3.amazonaws.com/a", "s3:/b/a"):
        assert "is a URL; tokens" in refused(lambda url=url: find_corpus(url))
    typed = Tokens(path="s3://bucket/a", objects=["s3://bucket/a.bin"])
    assert "'s3://bucket/a.bin' is no line of a run" in refused(lambda: typed.pinned(dict))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://me:{SECRET}@a b")
    said = refused(lambda: Tokens(path="s3://b").pinned(dict))
    assert "AWS_ENDPOINT_URL or ~/.aws/config is no address; see" in said
    said = refused(lambda: find_text("s3://bucket/books", "*.txt"))
    assert said.startswith("dataset.path=s3://bucket/books is a URL; tokens, mixtures and Parquet")
    monkeypatch.setattr("launcher.base.libraries.find_spec", lambda name: None)
    for url, library in (("s3://b/a", "'boto3>=1.36'"), ("gs://b/a", "'google-cloud-storage")):
        said = refused(lambda url=url: Tokens(path=url).pinned(dict))
        assert said.split()[-1].startswith(library)  # the command ends it


def test_a_run_keeps_very_many_objects_and_says_how_many_are_too_many(tmp_path, monkeypatch):
    class Many(Store):
        def objects(self, begin=""):
            version = '"d41d8cd98f00b204e9800998ecf8427e"'
            return ((f"{begin}{n:05}.bin", Stat(2**20, version, 1.0)) for n in range(5000))

        def stat(self, name):
            raise NotFoundError(name)

    monkeypatch.setattr(stored_files.stores, "Store", Many)
    words = ["dataset=tokens", "dataset.path=s3://bucket/web", "task=check"]
    config = load(words)
    config = replace(config, dataset=config.dataset.pinned(dict))
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(to_written(config)))
    assert len(load_frozen(written).dataset.objects) == 5000
    assert load_frozen(written).dataset == config.dataset
    monkeypatch.setattr(stored_files, "_MOST_OBJECTS", 4999)
    said = refused(lambda: Tokens(path="s3://bucket/web").pinned(dict))
    assert "names 5,000 objects, and a run reads 4,999 at most" in said


@pytest.mark.slow
def test_no_credentials_are_told_within_seconds(tmp_path):
    environ = {
        k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "GOOGLE_", "STORAGE_"))
    }
    environ |= {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true"}
    for url, named in (("s3", "AWS_ACCESS_KEY_ID"), ("gs", "GOOGLE_APPLICATION_CREDENTIALS")):
        words = ("task=check", "dataset=tokens", f"dataset.path={url}://bucket/a.bin")
        command = [sys.executable, "-m", "launcher", *words]
        began = time.monotonic()
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
        took = time.monotonic() - began
        assert done.returncode == 2, done.stderr
        assert f"no credentials; tried {named}" in done.stderr
        assert "Traceback" not in done.stderr
        assert took < 60  # of a loaded machine; alone it is 2


def blocks(folder):
    return {path.name: path for path in folder.rglob("*") if path.is_file()}


def test_the_cache_keeps_within_its_bound_what_was_used_last(tmp_path):
    cache = BlockCache(tmp_path / "blocks", 10_000 * 256)
    for number in range(9):
        cache.put(f"aa{number}", bytes(1000))
        os.utime(tmp_path / f"blocks/aa/aa{number}", (number, number))
    cache.put("bb0", bytes(1000))
    (tmp_path / "blocks/aa/aa9.half.partial").write_bytes(b"of one who was killed")
    os.utime(tmp_path / "blocks/aa/aa9.half.partial", (0, 0))
    assert cache.get("aa0") == bytes(1000)
    cache.put("aa9", bytes(1000))  # 10 x 1016 bytes are too many
    assert sorted(blocks(tmp_path / "blocks")) == ["aa0", *(f"aa{n}" for n in range(2, 10)), "bb0"]
    (tmp_path / "blocks/aa/aa5").write_bytes(bytes(1016))
    (tmp_path / "blocks/aa/aa6").write_bytes(b"")
    assert [cache.get(name) for name in ("aa5", "aa6", "aa7")] == [None, None, bytes(1000)]
    cache.put("cc0", bytes(10_000))
    assert cache.get("cc0") is None
    assert (tmp_path / "blocks/aa").stat().st_mode & 0o777 == 0o700
    (tmp_path / "blocks").chmod(0o777)
    others = BlockCache(tmp_path / "blocks", 10_000 * 256)
    others.put("aa8", bytes(1))
    assert others.get("aa7") is None  # it may be another's
    assert cache.get("aa8") == bytes(1000)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0.0, 0.1])
def test_any_bound_gives_the_same_batches(served, bound, tmp_path, caplog, monkeypatch):
    options = Tokens(path=f"{served.url}/bins", cache_gib=bound).pinned(dict)
    same(batches_of(options), batches_of(Tokens(path=str(served.folder / "bins"))))
    assert bool(blocks(tmp_path / "cache")) == bool(bound)
    monkeypatch.setattr(stored_files, "BLOCK", 4096)
    build_dataset(options, MODEL, 64, seed=1).train(0)  # of many blocks at once
    assert not caplog.records  # such as a library's, of too many connections


READER = """
import json, resource, sys
import numpy as np
from types import SimpleNamespace
from launcher.recipes import build_dataset
from launcher.recipes.data import stored_files
from launcher.recipes.datasets.tokens import Tokens

stored_files.BLOCK = 4096
limit, options = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
model = SimpleNamespace(name="gpt", vocab_size=60_000, sequence_length=32)
dataset = build_dataset(Tokens(**json.loads(options)), model, 8, seed=1)
dataset.train(0)
print("begun", flush=True)
total = sum(int(dataset.train(k)["tokens"].astype(np.int64).sum()) for k in range(30))
print(total)
"""


def reader(options, limit=0):
    told = json.dumps(
        {"path": options.path, "objects": options.objects, "cache_gib": options.cache_gib}
    )
    command = [sys.executable, "-c", READER, str(limit), told]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kept_in(folder):
    return sum(path.stat().st_size for path in blocks(folder / "cache").values())


def total(options):
    dataset = build_dataset(options, MODEL, 8, seed=1)
    return sum(int(dataset.train(k)["tokens"].astype(np.int64).sum()) for k in range(30))


@pytest.mark.slow
def test_processes_share_a_cache_and_a_full_disk_costs_only_the_cache(served, tmp_path):
    options = Tokens(path=f"{served.url}/bins", cache_gib=0.001).pinned(dict)
    wanted = total(Tokens(path=str(served.folder / "bins")))
    readers = [reader(options) for _ in range(2)] + [reader(options, limit=2000)]
    told = [one.communicate(timeout=120) for one in readers]
    assert [int(out.splitlines()[-1]) for out, _ in told] == [wanted] * 3, told
    assert told[2][1].count("keeps no more of remote files") == 1
    assert 0 < kept_in(tmp_path) <= 0.001 * 2**30


@pytest.mark.slow
def test_readers_that_are_killed_leave_no_half_block(served, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_files, "BLOCK", 4096)
    options = Tokens(path=f"{served.url}/bins", cache_gib=0.001).pinned(dict)
    draw = random.Random(1)
    for _ in range(10):
        one = reader(options)
        assert one.stdout.readline() == "begun\n"
        time.sleep(draw.random() * 0.7)
        one.send_signal(signal.SIGKILL)
        one.communicate()
    folder = tmp_path / "cache" / "launcher" / "objects"
    cache = BlockCache(folder, 2**20)
    names = [name for name in blocks(folder) if not name.endswith(".partial")]
    assert names
    assert all(cache.get(name) is not None for name in names)
    assert kept_in(tmp_path) <= 0.001 * 2**30
    assert total(options) == total(Tokens(path=str(served.folder / "bins")))
    assert kept_in(tmp_path) <= 0.001 * 2**30


def test_globs_fit_as_on_a_disk(tmp_path):
    names = ["a.bin", "d/a.bin", "d/e/a.bin", ".h/a.bin", "d/.a.bin"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for pattern in ("*.bin", "*/*.bin", "**/*.bin", "d/**", "**", "d/[a-c]*", "?.bin", "**/e/*"):
        found = {
            p.relative_to(tmp_path)
            for p in map(Path, glob.glob(str(tmp_path / pattern), recursive=True))
        }
        ours = {Path(name) for name in names if fits_glob(name, pattern)}
        assert ours == {one for one in found if (tmp_path / one).is_file()}, pattern
