"""What a tool was given, read back by the tool itself: for every run its steps, with the numbers of each."""

import json
import os
import struct
import time
from collections import defaultdict
from pathlib import Path

Steps = dict[int, list[dict[str, float]]]       # a step that was written twice has two entries


def tensorboard(folder: Path) -> dict[str, Steps]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, Steps] = defaultdict(lambda: defaultdict(list))
    for file in sorted(folder.rglob("events.*")):
        name = str(file.parent.relative_to(folder))
        for event in EventFileLoader(str(file)).Load():
            values = {v.tag: v.tensor.float_val[0] for v in event.summary.value if v.tensor.float_val}
            if values:
                found[name][event.step].append(values)
    return found


def wandb(folder: Path) -> dict[str, Steps]:
    """The transaction logs of offline runs: of history, and of the summary as step -1."""
    found: dict[str, Steps] = defaultdict(lambda: defaultdict(list))
    for file in sorted(folder.rglob("*.wandb")):
        name, records = file.stem.partition("-")[2], _records(file)
        # its service writes the end of it
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not any(r.WhichOneof("record_type") == "exit" for r in records):
            time.sleep(0.05)
            records = _records(file)
        for record in records:
            if record.WhichOneof("record_type") == "run":
                name = f"{record.run.project}/{record.run.run_group}/{record.run.display_name}"
                found[name][-2] = [{c.key: json.loads(c.value_json) for c in record.run.config.update}]
            elif record.WhichOneof("record_type") == "history":
                values = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                step = values.pop("_step", record.history.step.num)
                found[name][step].append({k: v for k, v in values.items() if not k.startswith("_")})
            elif record.WhichOneof("record_type") == "summary":
                new = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.summary.update}
                found[name].setdefault(-1, [{}])[0].update(new)
    return found


def _records(file: Path) -> list:
    """Records in blocks of 32 KiB as LevelDB's log has them: checksum, length, and whether it is all of one or a part."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, part = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            found.append(record)
    return found


def mlflow(folder: Path) -> dict[str, Steps]:
    from mlflow.tracking import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    client, found = MlflowClient(tracking_uri=uri), {}
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            steps: Steps = defaultdict(list)
            for tag in run.data.metrics:
                for number, metric in enumerate(client.get_metric_history(run.info.run_id, tag)):
                    entries = steps[metric.step]
                    if not entries or metric.key in entries[-1]:
                        entries.append({})
                    entries[-1][metric.key] = metric.value
                    assert number < 10_000
            steps[-2] = [dict(run.data.params)]
            found[f"{experiment.name}/{run.info.run_name}"] = steps
    return found
