"""`launcher/base/hub_files.py`: files of the hub arrive whole and once, whatever happens."""

import hashlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import huggingface_hub
import pytest
from fault_proxy import Fault, FaultProxy
from hub_stub import SIGNATURE, TOKEN, HubStub, digest_of
from huggingface_hub import constants

from launcher.base import hub
from launcher.base.hub_files import HubError, HubName, described, fetch, is_model, is_small, pin

PEER = Path(hub.__file__).parents[2] / "tests" / "hub_peer.py"
WEIGHTS = random.Random(0).randbytes(3_000_000)
SUM = hashlib.sha256(WEIGHTS).hexdigest()
FILES = {
    "config.json": '{"model_type": "llama"}',
    "tokenizer.json": "{}" * 500,
    "model.safetensors": WEIGHTS,
    "modeling_x.py": "raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.onnx": b"no",
    "additional_chat_templates/tool.jinja": "{{ x }}",
    "consolidated.safetensors": b"the same weights again",
    "old..json": "{}",
}
TAKEN = {n for n in FILES if n.endswith((".json", ".jinja")) or n == "model.safetensors"}


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    with HubStub(tmp_path_factory.mktemp("hub")) as running:
        running.add("org/name", FILES)
        yield running


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Have this process ask an address, with an empty cache; return the variables of others."""

    def at(url, **variables):
        hub.pin.cache_clear()
        hub._silence.cache_clear()
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", variables.get("HF_TOKEN", ""))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        own = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        return os.environ | own | variables

    return at


def names_in(folder):
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def refused(text, fits=is_model):
    with pytest.raises(HubError) as found:
        fetch(text, fits)
    return f"{found.value.problem}. {found.value.remedy}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://org/name", ("model", "org/name", None, "")),
        ("hf://org/na.me@v1.0/", ("model", "org/na.me", "v1.0", "")),
        ("hf://datasets/org/name@refs/convert/parquet/a/*.parquet", None),
        ("hf://org/name@a%2Fb/c", ("model", "org/name", "a/b", "c")),
        ("hf://datasets/org/name/sub//a", ("dataset", "org/name", None, "sub//a")),
    ],
)
def test_names(text, parts):
    parts = parts or ("dataset", "org/name", "refs/convert/parquet", "a/*.parquet")
    assert HubName.of(text) == parts
    pinned = HubName.of(text).at("0" * 40)
    assert HubName.of(str(pinned)) == pinned


WRONG = "hf:// hf://name hf://spaces/a/b hf://a/b/../c hf://a/b@ hf://a/b@..%2Fc"


@pytest.mark.parametrize("text", [*WRONG.split(), "hf://a/b c"])
def test_what_is_no_name(text):
    with pytest.raises(HubError, match="is not the name of a repository"):
        HubName.of(text)


def test_only_what_is_read_is_taken_and_never_twice(stub, at, tmp_path):
    at(stub.url)
    commit = stub.add("org/name", FILES)
    assert described("hf://org/name", is_model).endswith(" (2.9 MiB to download, files: 5)")
    shares = []
    folder = fetch("hf://org/name", is_model, lambda done, total: shares.append(done / total))
    assert pin("hf://org/name") == f"hf://org/name@{commit}"
    assert names_in(folder) == TAKEN
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert shares == sorted(shares)
    assert shares[-1] == 1
    asked = len(stub.seen())
    assert fetch(f"hf://org/name@{commit}", is_model) == folder
    assert fetch("hf://org/name/tokenizer.json", is_small) == folder / "tokenizer.json"
    assert len(stub.seen()) == asked + 1  # a commit needs no network
    # The library's own form: it takes our files for its, and its list of them.
    theirs = huggingface_hub.snapshot_download(
        "org/name",
        local_files_only=True,
        allow_patterns=["*.json", "model.safetensors"],
        cache_dir=constants.HF_HUB_CACHE,
    )
    assert Path(theirs) == folder
    assert not huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).warnings


def test_a_blob_that_was_cut_on_the_disk_is_not_taken(stub, at):
    at(stub.url)
    file = fetch("hf://org/name", is_model) / "model.safetensors"
    with open(file, "r+b") as content:
        content.truncate(1000)
    assert fetch("hf://org/name", is_model) == file.parent
    assert file.read_bytes() == WEIGHTS


def test_without_a_network(stub, at, monkeypatch, caplog):
    at(stub.url)
    commit = stub.add("org/name", FILES)
    fetch("hf://org/name", is_small)
    at("http://127.0.0.1:9")  # nobody listens
    assert described("hf://org/name", is_small) == f"hf://org/name@{commit} (in the cache)"
    silent = "the hub does not answer ([Errno 111] Connection refused)"
    assert caplog.messages == [f"hf://org/name: {silent}; the cache had commit {commit} last"]
    assert f"not whole, and {silent}. Try again, " in refused("hf://org/name")
    at("http://127.0.0.1:none")
    assert "is not in the cache" in refused("hf://org/other")
    # What is of another kind is no reason to forget what is there.
    assert "holds no file that is read here" in refused("hf://org/name", lambda path: False)
    assert described("hf://org/name", is_small).endswith("(in the cache)")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    at(stub.url)
    assert "the hub is not to be asked (HF_HUB_OFFLINE). Try again, " in refused("hf://org/name")
    assert refused("hf://org/other").startswith("is not in the cache ")


def test_a_network_that_drops_what_it_is_sent_is_not_waited_for(at, monkeypatch):
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # it takes one; what else comes is dropped
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        at(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert "and the hub does not answer in 1 s. Try again, " in refused("hf://org/other")
        answered = threading.Event()
        stack.callback(answered.set)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *name, **options: answered.wait() and [])
        at("http://nowhere.invalid")
        assert "and the hub does not answer in 1 s. Try again, " in refused("hf://org/other")


def test_a_cache_that_cannot_be_written_is_named(stub, at, monkeypatch):
    at(stub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/proc/none")
    said = refused("hf://org/name")
    assert said.startswith("cannot be put into the cache /proc/none (No such file or directory). ")


def test_what_the_hub_refuses(stub, at):
    stub.add("org/gated", FILES, closed="gated")
    stub.add("org/private", FILES, closed="private")
    stub.add("org/odd", FILES, closed="odd")
    stub.add("org/pickled", {"config.json.py": "", "model.bin": b""})
    for ref in ("main", "v1.0"):
        stub.add("org/talks", {"a.jsonl": "{}"}, kind="datasets", ref=ref)
    page, closed = f"Open {stub.url}/org/", ("gated", "private", "odd")
    for token, may in (
        ("", "set HF_TOKEN to"),
        ("hf_other987", "the token in use may not read it"),
    ):
        at(stub.url, HF_TOKEN=token)
        with pytest.raises(HubError, match="is gated"):  # `task=check` says it, too
            described("hf://org/gated", is_model)
        texts = {name: refused(f"hf://org/{name}") for name in (*closed, "none")}
        assert texts["gated"].startswith(f"is gated. {page}gated and accept its conditions; ")
        assert texts["private"].startswith(f"is not there, or is private. {page}private; ")
        assert re.match(f"may not be read: the hub answers 40[13]. {page}odd; ", texts["odd"])
        assert texts["none"].startswith(f"is not there, or is private. {page}none; ")
        assert all(may in text for text in texts.values())
        assert not any("hf_" in text for text in texts.values())
    at(stub.url, HF_TOKEN=TOKEN)
    for name in closed:
        assert names_in(fetch(f"hf://org/{name}", is_model)) == TAKEN
    assert refused("hf://org/name@mian").startswith("has no revision mian. Look at ")
    assert "; of a dataset, write hf://datasets/org/talks." in refused("hf://org/talks@v1.0")
    assert refused("hf://datasets/org/talks@v1.0/b.jsonl") == (
        "has no such file or folder. Did you mean hf://datasets/org/talks@v1.0/a.jsonl?"
    )
    assert refused("hf://org/na--me").startswith("is not the name of a repository. Cannot have -- ")
    assert refused("hf://org/pickled").startswith("holds no file that is read here, but .bin, .py.")


FAULTS = [
    Fault("reset", "cdn", after=1_000_000),
    Fault("truncate", "cdn", times=3, after=100_000),
    Fault("shorten", "cdn", after=2_999_999),
    Fault("flip", "cdn", after=1_234_567),
    Fault("status", "GET", times=2, status=503, retry_after=0),
    Fault("status", "cdn|revision", times=2, status=429, retry_after=1),
    Fault("status", "api", times=1, status=500),
    Fault("lost", "resolve", times=2, status=502),
    Fault("reset", "api", after=5),
    Fault("shorten", "revision", after=40),
    Fault("truncate", "resolve.*json", after=3),
    Fault("flip", "tokenizer", times=2, after=700),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.matches}")
def test_a_fault_on_the_way_costs_only_time(fault, stub, at, tmp_path):
    with FaultProxy(stub.url) as proxy:
        at(proxy.url)
        proxy.fail(fault)
        folder = fetch("hf://org/name", is_model)
        assert names_in(folder) == TAKEN
        assert all(
            (folder / name).read_bytes() == (c if isinstance(c, bytes) else c.encode())
            for name, c in FILES.items()
            if name in TAKEN
        )
        before = proxy.seen()
    if fault.kind in ("reset", "truncate", "shorten") and fault.matches == "cdn":
        assert sum("cdn" in line for line in before) == 1 + fault.times
        ranges = [line.split()[2] for line in stub.seen() if "/cdn/" in line][-fault.times :]
        assert all(one.startswith("bytes=") and one != "bytes=0-" for one in ranges)


def test_what_stays_damaged_is_refused_and_nothing_of_it_kept(stub, at, tmp_path):
    with FaultProxy(stub.url) as proxy:
        at(proxy.url)
        proxy.fail(Fault("flip", "cdn", times=99, after=5))
        assert "model.safetensors with other bytes than it lists" in refused("hf://org/name")
        assert not [p for p in (tmp_path / "cache").rglob("*") if p.name == "model.safetensors"]
        proxy.heal()
        assert (fetch("hf://org/name", is_model) / "model.safetensors").read_bytes() == WEIGHTS


def peer(variables, text="hf://org/name"):
    return subprocess.Popen(
        [sys.executable, str(PEER), text],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed_after(process, cache, bytes_there, seconds=30):
    """Kill a process once so much of the weights is there, or leave it if it was faster."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if any(hub._size(part) >= bytes_there for part in cache.rglob("*.launcher-part")):
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_killed_download_goes_on_where_it_was(stub, at, tmp_path):
    with FaultProxy(stub.url) as proxy:
        variables = at(proxy.url)
        proxy.fail(Fault("truncate", "cdn", after=1_000_000), Fault("delay", "cdn", seconds=60.0))
        process = peer(variables)
        killed_after(process, tmp_path / "cache", 1_000_000)
        assert not list((tmp_path / "cache").rglob("model.safetensors"))
        proxy.heal()
        output, errors = peer(variables).communicate()
    assert output.strip() == SUM, errors
    assert [line.split()[2] for line in stub.seen() if "/cdn/" in line][-1] == "bytes=1000000-"


def test_of_several_processes_one_downloads(stub, at):
    variables = at(stub.url)
    before = sum("/cdn/" in line for line in stub.seen())
    for process in [peer(variables) for _ in range(3)]:
        assert process.communicate()[0].strip() == SUM
    assert sum("/cdn/" in line for line in stub.seen()) == before + 1


def drawn(seed):
    """Faults, and after how many bytes the process is killed; None: it is not."""
    draw = random.Random(seed)
    faults = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(["reset", "truncate", "shorten", "flip", "status", "lost", "delay"])
        faults.append(
            Fault(
                kind,
                draw.choice(["cdn", "cdn", "resolve", "api", "revision", "GET", "json"]),
                draw.randint(1, 3),
                draw.choice([429, 500, 502, 503, 504]),
                draw.choice([None, 0, 1]),
                draw.choice([0, 10, 500, draw.randint(0, len(WEIGHTS))]),
                draw.random() / 5,
            )
        )
    return faults, draw.randint(0, len(WEIGHTS)) if draw.random() < 0.4 else None


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(80))
def test_random_faults_and_kills(seed, stub, at, tmp_path):
    faults, kill = drawn(seed)
    with FaultProxy(stub.url) as proxy:
        variables = at(proxy.url, HF_TOKEN=TOKEN)
        proxy.fail(*faults)
        if kill is not None:
            killed_after(peer(variables), tmp_path / "cache", kill, seconds=8)
        said = []
        for heal in (False, True):
            output, errors = peer(variables).communicate(timeout=120)
            said += [output, errors]
            for file in (tmp_path / "cache").rglob("model.safetensors"):
                assert file.read_bytes() == WEIGHTS
            if output:
                assert output.strip() == SUM
            else:  # too much at once: it says so, and may be tried again
                assert "refused: " in errors
            if heal:
                assert output, errors
            proxy.heal()
    said += [p.read_text("latin-1") for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert not any(secret in text for text in said for secret in (TOKEN, SIGNATURE))
    assert digest_of(next((tmp_path / "cache").rglob("model.safetensors"))) == SUM
