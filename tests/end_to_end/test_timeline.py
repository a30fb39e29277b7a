"""The recorded step of a run in two processes: one file, on one clock, and a picture."""

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest
from launched import Launcher

WORDS = (
    *("model=mlp", "model.widths=[1024,512,1024]", "model.input_size=512", "model.output_size=512"),
    *("dataset=synthetic", "train.global_batch_size=256", "train.eval_every=0", "optimizer=sgd"),
    *("parallel=data", "parallel.num_micro_batches=1", "parallel.bucket_bytes=4400000"),
    *("cluster=emulated", "cluster.gpus=2", "cluster.hosts=2", "wandb.mode=disabled", "run.id=a"),
)


def trained(folder: Path, *words: str) -> dict:
    code, out, err = Launcher(folder, *WORDS, *words).end()
    assert (code, err) == (0, ""), out
    return json.loads((folder / "outputs" / "a" / "timeline.json").read_text())


@pytest.mark.slow
def test_the_first_sum_of_gradients_begins_before_the_backward_pass_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace = trained(tmp_path, "train.steps=4")
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"
                 and e["name"] == "process_name"}  # fmt: skip
    assert sorted(processes.values()) == ["driver", "worker 0", "worker 1"]
    clocks = trace["otherData"]["clocks"]["3"]
    assert all(abs(c["offset_ns"]) <= 1e6 + 2 * c["uncertainty_ns"] for c in clocks.values())

    passes, sums = {}, {}
    for pid, name in processes.items():
        if name == "driver":
            continue
        mine = [event for event in events if event["pid"] == pid]
        (whole,) = (event for event in mine if event["cat"] == "forward_backward")
        crossing = sorted((e for e in mine if e["cat"] == "gradient sum"), key=lambda e: e["ts"])
        assert [event["name"] for event in crossing] == ["bucket 0", "bucket 1"]
        assert whole["ts"] < crossing[0]["ts"] < whole["ts"] + whole["dur"]
        (update,) = (event for event in mine if event["cat"] == "update")
        assert crossing[1]["ts"] + crossing[1]["dur"] <= update["ts"]
        passes[pid], sums[pid] = whole, crossing
    # A sum ends in both processes at about the same time: none can end before all have begun it.
    first, second = sums.values()
    slack = sum(clock["uncertainty_ns"] for clock in clocks.values()) / 1e3
    for a, b in zip(first, second, strict=True):
        assert max(a["ts"], b["ts"]) <= min(a["ts"] + a["dur"], b["ts"] + b["dur"]) + slack

    # Balanced: the events of a lane are apart or nested.
    lanes = defaultdict(list)
    for event in events:
        assert event["dur"] >= 0
        start = round(event["ts"] * 1e3)
        lanes[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1e3)))
    for found in lanes.values():
        for (a, b), (c, d) in itertools.combinations(sorted(found), 2):
            assert b <= c or d <= b or a == c

    # Resumed, the run keeps what was recorded, and records further steps.
    again = trained(tmp_path, "train.steps=8", "report.timeline_steps=[7,8]")
    assert again["otherData"]["steps"] == [3, 7, 8]
    kept = [event for event in again["traceEvents"] if event.get("args", {}).get("step") == 3]
    assert len(kept) == len(events)
    assert (tmp_path / "outputs" / "a" / "plots" / "timeline.png").stat().st_size > 0


@pytest.mark.slow
def test_workers_of_parameter_servers_are_recorded_each_under_its_own_number(
    tmp_path: Path,
) -> None:
    """Each is a JAX of its own, in which it is process 0 with device 0."""
    words = ("parallel=parameter_server", "train.steps=4", "parallel.num_micro_batches=1")
    trace = trained(tmp_path, *words)
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    assert sorted(processes.values()) == ["driver", "worker 0", "worker 1"]
    lanes = {(processes[e["pid"]], e["args"]["name"]): e for e in named if "tid" in e}
    for worker in range(2):
        lane = lanes[f"worker {worker}", f"device {worker}"]
        assert (f"worker {worker}", f"device {1 - worker}") not in lanes
        ran = [
            event["cat"]
            for event in trace["traceEvents"]
            if event["ph"] == "X" and (event["pid"], event["tid"]) == (lane["pid"], lane["tid"])
        ]
        assert "forward_backward" in ran
        assert "update" in ran
