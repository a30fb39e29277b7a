"""Reads what wandb has recorded offline, and TensorBoard's files: protocol buffers in both.

wandb has no public reader of its files, of LevelDB's log format: only its service reads them.
"""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

from wandb.proto import wandb_internal_pb2 as proto

BLOCK, HEADER = 32768, 7


def records(path):
    """Yield the records of a `.wandb` file."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = HEADER, []
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # no header fits into the rest of the block
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        parts.append(data[at + HEADER : at + HEADER + length])
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            record = proto.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def items(found):
    """Return the items of a record by name; nested names are joined by a dot."""
    return {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for item in found
    }  # fmt: skip


def read_offline(run_dir):
    """Return all that a run's offline recordings hold, the oldest first."""
    run = SimpleNamespace(
        ids=[], config={}, history=[], summary={}, artifacts={}, alerts=[], metrics=[], exits=[]
    )
    for path in sorted(Path(run_dir).glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    run.ids.append(record.run.run_id)
                    run.config |= items(record.run.config.update)
                case "history":
                    run.history.append(items(record.history.item))
                case "summary":
                    run.summary |= items(record.summary.update)
                case "artifact":
                    names = [entry.path for entry in record.artifact.manifest.contents]
                    run.artifacts[record.artifact.name] = (record.artifact.type, names)
                case "alert":
                    run.alerts.append((record.alert.title, record.alert.text))
                case "metric":
                    run.metrics.append(record.metric)
                case "exit":
                    run.exits.append(record.exit.exit_code)
                case "request" if record.request.WhichOneof("request_type") == "log_artifact":
                    found = record.request.log_artifact.artifact
                    names = [entry.path for entry in found.manifest.contents]
                    run.artifacts[found.name] = (found.type, names)
    return run


def events(folder):
    """Yield the events of all of TensorBoard's files, the oldest first: TFRecords of protobufs."""
    from tensorboardX.proto import event_pb2

    for path in sorted((folder / "tensorboard").glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = event_pb2.Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            yield event
