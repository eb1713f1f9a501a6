"""This module trains with whole versions and with deltas, for `benchmarks.delta_sync`.

An engine on a rank of its own gets the weights of every step. After each sync the digest of its weights
is compared with the trainer's (`benchmarks.delta_digests`). The run with deltas must have the digests
of the run with whole versions in every step, and end with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.delta_digests import VARIABLE
from benchmarks.evidence.digest import ROOT
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model

SMOLLM = ROOT / "runs" / "smollm" / "dense"
FORMATS = ("none", "fp8_block")
"""Values of `rollout.quantization`; with `none` the engine's weights are bfloat16."""
LIMIT_S = 3600
COMMON = (
    *("rollout.placement=disaggregated", "rollout.num_ranks=1", "model.dtype=bfloat16"),
    *("rollout.engine=benchmarks.delta_digests", "checkpoint.keep=1", "rollout.min_response_len=0"),
)


@dataclass(frozen=True)
class Model:
    recipe: str
    lr: float
    keys: tuple[str, ...]
    """Overrides of the recipe that make a step short."""


MODELS = {
    "toy": Model(
        "launch/recipes/toy_moe.yaml",
        1e-5,
        (
            "rollout.prompts_per_step=4",
            "rollout.samples_per_prompt=4",
            "rollout.max_response_len=12",
        ),
    ),
    "SmolLM2-135M": Model(
        "launch/recipes/smollm.yaml",
        1e-6,
        (
            *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"),
            *("rollout.max_response_len=8", "eval.every=0", "eval.sets=[]"),
        ),
    ),
}


def compare(name: str, quantization: str, steps: int, work: Path) -> dict[str, Any]:
    """Return the row of a model and a format: from its file in `work`, or by two runs of `steps`
    steps."""
    file = work / f"{name}_{quantization}_{steps}.json"
    if file.exists():
        return json.loads(file.read_text())
    scratch = work / "runs"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        row = _compare(name, quantization, steps, scratch)
    finally:
        for log in scratch.glob("*.log"):
            log.replace(work / f"{name}_{quantization}_{log.name}")
        shutil.rmtree(scratch, ignore_errors=True)
    file.write_text(json.dumps(row))
    return row


def _compare(name: str, quantization: str, steps: int, scratch: Path) -> dict[str, Any]:
    folder = SMOLLM
    if name == "toy":
        folder = scratch / "model"
        write_toy_model(folder)
    model, format_key = MODELS[name], f"rollout.quantization={quantization}"
    metrics, digests, bits = {}, {}, {}
    for encoding in ("full", "delta"):
        output = scratch / encoding
        keys = (f"model.path={folder}", format_key, f"rollout.weight_encoding={encoding}")
        metrics[encoding] = _run(model, output, steps, *keys)
        digests[encoding] = _lines(output.with_suffix(".digests"))
        bits[encoding] = _checkpoint(output, steps)
        shutil.rmtree(output)
    row = {"model": name, "quantization": quantization, "lr": model.lr}
    row |= _traffic(metrics["full"], metrics["delta"])
    return row | {
        "syncs_compared": len(digests["delta"]),
        "digests_equal": sum(line["is_equal"] for line in digests["delta"]),
        "distinct_digests": len({line["engine"] for line in digests["delta"]}),
        "same_digests_as_full": digests["delta"] == digests["full"],
        "same_bits_as_full": bits["delta"] == bits["full"],
    }


def _run(model: Model, output: Path, steps: int, *keys: str) -> list[dict[str, Any]]:
    """Train, and return the metrics of the steps. Raises CalledProcessError if the run fails."""
    launcher = (sys.executable, "-W", "ignore", "-m", "mrl.launch", "--standalone")
    words = (
        *(f"output_dir={output}", f"train.num_steps={steps}", f"checkpoint.save_every={steps}"),
        f"optimizer.lr={model.lr}",
    )
    command = [*launcher, "--nproc-per-node=2", "-m", "mrl", "train", model.recipe]
    environment = {**os.environ, VARIABLE: str(output.with_suffix(".digests"))}
    with output.with_suffix(".log").open("w") as log:
        subprocess.run(
            [*command, *COMMON, *model.keys, *words, *keys], cwd=ROOT, env=environment,
            stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=True,
        )  # fmt: skip
    return RunFolder(output).read_metrics()


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _checkpoint(output: Path, step: int) -> str:
    """Return a digest of the files with the tensors of a checkpoint."""
    files = sorted((output / "checkpoints" / f"iter_{step:07d}").glob("*.distcp"))
    assert files, f"{output} has no checkpoint of step {step}"
    found = hashlib.blake2b()
    for each in files:
        with each.open("rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def _traffic(full: list[dict[str, Any]], delta: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare what the syncs of two runs sent, and how long they took."""
    deltas = [row for row in delta if not row["rollout/sync_full_workers"]]
    sent = sum(row["rollout/sync_sent_bytes"] for row in delta)
    whole = sum(row["rollout/sync_bytes"] for row in full)
    return {
        "syncs": len(delta),
        "whole_versions": len(delta) - len(deltas),
        "resent_buckets": sum(row["rollout/sync_resent_buckets"] for row in delta),
        "full_mb": round(full[0]["rollout/sync_bytes"] / 1e6, 2),
        "sent_share": round(sent / whole, 4),
        "sent_share_of_deltas": _median(deltas, "rollout/sync_sent_share"),
        "changed": _median(deltas, "rollout/sync_changed_share"),
        "full_sync_s": _median(full, "time/sync_s"),
        "delta_sync_s": _median(delta, "time/sync_s"),
    }


def _median(rows: list[dict[str, Any]], key: str) -> float:
    return round(statistics.median(row[key] for row in rows), 4)


def is_good(row: dict[str, Any]) -> bool:
    """Return whether every sync was checked, no bucket was sent again, and nothing differs.

    At least half of the versions must be distinct. A step in which all samples of each prompt have the
    same reward may leave the weights as they are.
    """
    return (
        row["syncs"] == row["syncs_compared"] == row["digests_equal"]
        and row["distinct_digests"] >= row["syncs"] / 2
        and row["resent_buckets"] == 0
        and row["same_digests_as_full"]
        and row["same_bits_as_full"]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| model | engine | whole version | syncs, of these whole | elements that changed "
        "| bytes of a delta | bytes of all syncs | digests equal | same bits as `full` |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        engine = "bfloat16" if row["quantization"] == "none" else f"`{row['quantization']}`"
        lines.append(
            f"| {row['model']} | {engine} | {row['full_mb']:g} MB | {row['syncs']}, "
            f"{row['whole_versions']} | {row['changed']:.2%} | {row['sent_share_of_deltas']:.2%} "
            f"| {row['sent_share']:.2%} | {row['digests_equal']} of {row['syncs_compared']} "
            f"| {'yes' if row['same_bits_as_full'] else 'NO'} |"
        )
    return "\n".join(lines)
