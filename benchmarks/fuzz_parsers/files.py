"""This module has the parsers of files: data rows, models, checkpoints, recipes and run folders."""

from __future__ import annotations

import gzip
import io
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save

from benchmarks.fuzz_parsers.base import Parser, require
from mrl.config import load_recipe
from mrl.data.files import read_rows
from mrl.data.forms import read_form
from mrl.errors import InputError
from mrl.run import metric_rows
from mrl.run.failure import read_failure
from mrl.run.rollouts import encode_groups, load_groups
from mrl.view import series
from parallel.architectures import find_architecture
from parallel.checkpoint.manifest import (
    DIGEST,
    MANIFEST,
    Damaged,
    FileRecord,
    read_manifest,
    write_manifest,
)  # fmt: skip
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors
from tests.sample_groups import group

ROWS: list[dict[str, Any]] = [
    {"prompt": "a b", "answer": "1"},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 256, "max_position_embeddings": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "intermediate_size": 64, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6, "norm_topk_prob": True, "tie_word_embeddings": False, "hidden_act": "silu",
    "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.0,
}  # fmt: skip
RECIPE = Path(__file__).parents[2] / "launch/recipes/toy_moe.yaml"
METRICS = b"".join(
    json.dumps({"step": n, "reward/mean": 0.5, "loss": None}).encode() + b"\n" for n in range(3)
)
FAILURE = json.dumps({"what": "rank 1 was killed", "exit_code": 71, "rank": 1, "step": 3}).encode()


def _parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS[:1] * 8), out)
    return out.getvalue()


def _rows(name: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, folder: Path) -> None:
        file = folder / name
        file.write_bytes(data)
        for source, values in read_rows(file):
            json.dumps(values, ensure_ascii=False).encode()
            row = read_form(source, values, None, {})
            require(bool(row.prompt) or row.prompt == "", f"an empty prompt: {row.prompt!r}")
            if not isinstance(row.prompt, str):
                require(all(isinstance(m["role"], str) for m in row.prompt), "a role is no string")

    return read


def _tensors(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with HfTensors(HfModel(folder, CONFIG, find_architecture(CONFIG, None))) as tensors:
        for name in tensors.names:
            require(tuple(tensors[name].shape) == tensors.shape(name), f"{name} has another shape")


def _config(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    (folder / "model.safetensors").write_bytes(TENSORS)
    sizes = HfModel.read(folder).sizes
    require(type(sizes.num_layers) is int and sizes.num_layers > 0, f"{sizes.num_layers!r} layers")
    require(type(sizes.vocab_size) is int and sizes.vocab_size > 0, f"{sizes.vocab_size!r} tokens")


def _index(data: bytes, folder: Path) -> None:
    (folder / "model-1.safetensors").write_bytes(TENSORS)
    (folder / "model.safetensors.index.json").write_bytes(data)
    with HfTensors(HfModel(folder, CONFIG, find_architecture(CONFIG, None))) as tensors:
        require(tensors.names <= {"a", "b"}, "names of no file")


def _manifest(name: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, folder: Path) -> None:
        _write_manifest(folder)
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(data)
        read_manifest(folder)
        require(data == whole, f"{name} was changed, and read")

    return read


def _write_manifest(folder: Path) -> None:
    write_manifest(folder, {"step": 1}, {"a.safetensors": FileRecord(8, "0" * 64)})


def _manifest_seed(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        _write_manifest(Path(folder))
        return (Path(folder) / name).read_bytes()


def _recipe(data: bytes, folder: Path) -> None:
    file = folder / "recipe.yaml"
    file.write_bytes(data)
    recipe = load_recipe(file)
    require(math.isfinite(recipe.optimizer.lr), f"a learning rate of {recipe.optimizer.lr}")


def _metrics(data: bytes, folder: Path) -> None:
    file = folder / "metrics.jsonl"
    file.write_bytes(data)
    rows, _ = series.read_rows(file)
    json.dumps(series.curves(rows), allow_nan=False)
    metric_rows.read(file)


def _failure(data: bytes, folder: Path) -> None:
    (folder / "failure.json").write_bytes(data)
    read_failure(folder)


def _rollouts(data: bytes, folder: Path) -> None:
    file = folder / "rollouts"
    file.write_bytes(data)
    for each in load_groups(file):
        for sample in each.samples:
            total = len(sample.token_ids)
            require(0 < sample.prompt_len <= total, f"{sample.prompt_len} of {total} tokens")
            require(len(sample.loss_mask) == total, "the loss mask has another length")
            require(len(sample.rollout_logprobs) == total, "the log-probs have another length")


def in_order(data: bytes) -> bytes:
    """Return a safetensors file with the keys of its header in order.

    safetensors writes the keys of the metadata in another order in each process, and then the inputs
    of one `--seed` and number would differ from run to run.
    """
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(
        json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")
    ).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


TENSORS = save({"a": torch.zeros(4, 2), "b": torch.ones(3, dtype=torch.bfloat16)})
INPUT = (InputError,)
PARSERS = (
    Parser("rows.jsonl", (LINES,), _rows("rows.jsonl"), INPUT),
    Parser("rows.json", (json.dumps(ROWS).encode(),), _rows("rows.json"), INPUT),
    Parser("rows.csv", (b'prompt,answer\na b,1\n"c, ""d""",2\n',), _rows("rows.csv"), INPUT),
    Parser("rows.jsonl.gz", (gzip.compress(LINES, mtime=0),), _rows("rows.jsonl.gz"), INPUT),
    Parser("rows.parquet", (_parquet(),), _rows("rows.parquet"), INPUT),
    Parser("safetensors", (TENSORS,), _tensors, INPUT),
    Parser("safetensors.index", (json.dumps({"weight_map": {
        "a": "model-1.safetensors", "b": "model-1.safetensors"}}).encode(),), _index, INPUT),
    Parser("config.json", (json.dumps(CONFIG).encode(),), _config, INPUT),
    Parser("manifest", (_manifest_seed(MANIFEST),), _manifest(MANIFEST), (InputError, Damaged)),
    Parser("manifest digest", (_manifest_seed(DIGEST),), _manifest(DIGEST), (InputError, Damaged)),
    Parser("recipe", (RECIPE.read_bytes(),), _recipe, INPUT),
    Parser("metrics.jsonl", (METRICS,), _metrics, INPUT),
    Parser("failure.json", (FAILURE,), _failure, ()),
    Parser("rollouts", (in_order(encode_groups([group([0.0, 1.0])])),), _rollouts, INPUT),
)  # fmt: skip
