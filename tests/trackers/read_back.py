"""`python -m tests.trackers.read_back RUN` prints as JSON what the files of the trackers hold.

{"tensorboard": {step: {key: value}}, "wandb": ..., "mlflow": ..., "samples": {tracker: [steps]}}. It
runs in a process of its own, with the trackers' packages on its path.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Steps = dict[int, dict[str, float]]
BLOCK = 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def tensorboard(run: Path) -> tuple[Steps, list[int]]:
    """Read as TensorBoard itself does, with what was purged left out."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore
        EventAccumulator,
    )

    events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    steps: Steps = {}
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            assert key not in steps.setdefault(event.step, {})
            steps[event.step][key] = event.value
    return steps, [event.step for event in events.Tensors("samples/text_summary")]


def wandb(run: Path) -> tuple[Steps, list[int]]:
    """Read the history of the one segment that `wandb sync` would upload."""
    from wandb.proto import wandb_internal_pb2  # type: ignore

    (segment,) = run.glob("wandb/offline-run-*/*.wandb")
    steps: Steps = {}
    samples = []
    for data in wandb_records(segment.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        items: dict[str, Any] = {}
        for item in record.history.item:
            items["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        step = items.pop("step")
        assert step not in steps
        if any(key.startswith("samples") for key in items):
            samples.append(step)
        steps[step] = {k: v for k, v in items.items() if not k.startswith(("_", "samples"))}
    return steps, samples


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: 7 bytes of header, then LevelDB's log format."""
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no room for a header: padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts


def mlflow(run: Path) -> tuple[Steps, list[int]]:
    """Take the value with the latest timestamp where a step has several: docs/logging.md."""
    from mlflow import MlflowClient  # type: ignore

    client = MlflowClient(tracking_uri=f"sqlite:///{run.absolute() / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'mine'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["train.num_steps"] == "8"
    steps: Steps = {}
    for key in found.data.metrics:
        history = client.get_metric_history(found.info.run_id, key)
        for each in sorted(history, key=lambda each: each.timestamp):
            steps.setdefault(each.step, {})[key] = each.value
    tables = (run / "mlflow").rglob("samples/step_*.json")
    return steps, sorted(int(file.stem.removeprefix("step_")) for file in tables)


def main() -> None:
    run = Path(sys.argv[1])
    found: dict[str, Any] = {"samples": {}}
    for read in (tensorboard, wandb, mlflow):
        name = read.__name__
        found[name], found["samples"][name] = read(run)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
